"""The random differential test itself: it passes what is right, finds what is wrong, and makes it small."""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, replace

import pytest
import torch

from gpu_accel.errors import IncorrectResultError
from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func
from gpu_accel.testing import differential
from gpu_accel.testing.differential import Call, check, draw_call, draw_round, search, search_apart, shrink

EVERYTHING = Call(
    backend="portable", dtype="fp16", packed=True, lengths_q=(10, 0), lengths_k=(10, 5), used=True,
    window=(9, 3), softcap=3.0, sinks=True, alibi=True, score_mod=True, mask_mod=True, lse_gradient=True,
    max_logits=True, head_dim=16, head_dim_v=16,
)  # fmt: skip
BLOCKS = Call(backend="portable", dtype="fp32", lengths_q=(17,), lengths_k=(20,), mask_mod=True, block=16,
              sinks=True, head_dim=16, head_dim_v=32)  # fmt: skip


def attend(q, k, v, **options):
    call = flash_attn_varlen_func if options.get("cu_seqlens_q") is not None else flash_attn_func
    return call(q, k, v, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [EVERYTHING, BLOCKS], ids=["packed-all-features", "block-mask"])
def test_right_results_pass(call, device):
    check(call, device=device)


def one_key_too_few(q, k, v, **options):
    """Wrong only where a window to the left is longer than 3."""
    left, right = options["window_size"]
    return attend(q, k, v, **{**options, "window_size": (left - 1 if left > 3 else left, right)})


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_window_is_found_and_made_small():
    def fails(call):
        try:
            check(call, device="cpu", attention=one_key_too_few)
        except IncorrectResultError:
            return True
        return False

    drawn = Call(backend="reference", packed=True, lengths_q=(30, 9), lengths_k=(30, 9), heads_kv=2, group=3,
                 window=(5, 2), softcap=3.0, kind="poisoned", lse_gradient=True, deterministic=True)  # fmt: skip
    assert fails(drawn)
    small = shrink(drawn, fails, seconds=30)
    assert fails(small)
    assert not (small.packed or small.softcap or small.gradients or small.lse_gradient or small.deterministic)
    assert (small.heads_kv, small.group, small.batch, small.kind) == (1, 1, 1, "normal")
    assert max(small.lengths_q + small.lengths_k) <= 8


class OneKey(torch.autograd.Function):
    """Attention to one key whose gradients round as a kernel's do: dP and delta are sums of their own, term by term."""

    @staticmethod
    def forward(ctx, q, k, v, wrong):
        ctx.save_for_backward(q, k, v)
        ctx.wrong = wrong
        group = q.shape[2] // k.shape[2]
        scores = (q * k.repeat_interleave(group, 2)).sum(-1) * q.shape[-1] ** -0.5
        return v.repeat_interleave(group, 2).expand(*q.shape[:3], -1).contiguous(), scores.transpose(1, 2)

    @staticmethod
    def backward(ctx, do, _):
        q, k, v = ctx.saved_tensors
        group, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
        dp = delta = torch.zeros_like(do[..., 0])
        terms = do * v.repeat_interleave(group, 2)
        for i in range(terms.shape[-1]):
            dp, delta = dp + terms[..., i], delta + terms[..., -1 - i]
        ds = (dp - delta * (1.0 + ctx.wrong))[..., None] * scale
        dk, dv = ((x.unflatten(2, (-1, group)).sum((1, 3))[:, None]) for x in (ds * q, do))
        return ds * k.repeat_interleave(group, 2), dk, dv, None


@pytest.mark.filterwarnings("ignore")
def test_rounding_of_what_cancels_is_no_error():
    # the yardstick's dk is exactly 0 here: torch takes delta from dP itself
    call = Call(backend="reference", dtype="fp32", head_dim=256, head_dim_v=256, lengths_q=(100,), lengths_k=(1,),
                heads_kv=2, group=2)  # fmt: skip
    check(call, device="cpu", attention=lambda q, k, v, **_: OneKey.apply(q, k, v, 0.0))
    with pytest.raises(IncorrectResultError, match="^d[qk]: error"):
        check(call, device="cpu", attention=lambda q, k, v, **_: OneKey.apply(q, k, v, 1e-4))


@pytest.mark.filterwarnings("ignore")
def test_search_says_seed_and_call(monkeypatch):
    def nan(q, k, v, **options):
        o, *rest = attend(q, k, v, **options)
        return torch.where(torch.arange(len(o)).view(-1, *[1] * (o.dim() - 1)) == len(o) - 1, float("nan"), o), *rest

    monkeypatch.setattr(differential, "HEAD_DIMS", ((16, 16),))
    with pytest.raises(IncorrectResultError, match=r"seed 5, call \d+: .*(?s:.)*drawn  Call\((?s:.)*small  Call\("):
        search(seconds=20, seed=5, device="cpu", longest=20, backends=("reference",), attention=nan)
    counts = search(seconds=2, seed=5, device="cpu", longest=20, backends=("reference",), calls_a_round=3)
    assert counts["judged"] > 0


FAKE = """#!{python}
import json, os, sys
if "--call" in sys.argv:  # a call with five queries or more is the end of its process
    call = json.loads(sys.argv[sys.argv.index("--call") + 1])
    if sum(call["lengths_q"]) >= 5:
        os.abort()
    print(json.dumps({{"why": ""}}))
else:
    print(json.dumps({{"call": {call}}}), flush=True)
    print("what it said last", file=sys.stderr, flush=True)
    os.abort()
"""


def test_a_call_that_ends_its_process_is_named_and_made_small(monkeypatch, tmp_path):
    drawn = Call(packed=True, lengths_q=(9, 3), lengths_k=(4, 4), used=True, causal=True, gradients=True)
    python = tmp_path / "python"
    python.write_text(FAKE.format(python=sys.executable, call=asdict(drawn)))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(IncorrectResultError) as told:
        search_apart(seconds=1, seed=7)
    message = str(told.value)
    assert message.startswith("seed 7: the process ended with -6: what it said last") and f"drawn  {drawn}" in message
    small = replace(differential.Call(), lengths_q=(5,), lengths_k=(0,), gradients=False)
    assert f"small  {small}" in message and "there  fatal: the process ended with -6" in message


FAULTS = [torch.AcceleratorError("CUDA error: an illegal memory access"),
          RuntimeError("Triton Error [CUDA]: an illegal memory access")]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=["torch", "triton"])
def test_after_a_fault_of_the_gpu_calls_are_tried_in_processes_of_their_own(fault, monkeypatch):
    tried: list[Call] = []

    def apart(call, **_):
        tried.append(call)
        return "fatal: again" if call.causal else ""

    def faulty(call, **_):
        raise fault

    monkeypatch.setattr(differential, "check", faulty)
    monkeypatch.setattr(differential, "failure_apart", apart)
    monkeypatch.setattr(differential, "draw_call", lambda *_: Call(causal=True, softcap=2.0))
    with pytest.raises(IncorrectResultError, match=r"seed 5, call 1: fatal: (?s:.)*there  fatal: again"):
        search(seconds=20, seed=5, device="cpu")
    assert len(tried) > 2


def test_draws_cover_every_feature_and_repeat():
    def draw():
        rng = random.Random(3)
        return [draw_call(rng, draw_round(rng, ("auto",)), 200) for _ in range(300)]

    calls = draw()
    assert calls == draw()
    for name, off in differential._OFF.items():
        assert any(getattr(call, name) != off for call in calls), name
    assert any(0 in call.lengths_q for call in calls) and any(call.packed for call in calls)
    assert {call.head_dim for call in calls} == {d for d, _ in differential.HEAD_DIMS}


def test_what_a_call_launches_tells_kernels_apart_and_nothing_else(device):
    call = Call(backend="portable", dtype="fp16", lengths_q=(40,), lengths_k=(50,), causal=True, seed=1)
    known = differential.launched(call, device=device)
    assert len(known) == 4  # forward, delta, dK and dV, dQ
    assert differential.launched(replace(call, seed=2, softmax_scale=0.2, kind="outliers"), device=device) == known
    assert differential.launched(replace(call, gradients=False), device=device) < known
    for other in (dict(head_dim=32), dict(dtype="fp32"), dict(causal=False), dict(sinks=True), dict(packed=True),
                  dict(score_mod=True), dict(lse_gradient=True)):  # fmt: skip
        assert not differential.launched(replace(call, **other), device=device) <= known, other


def test_a_call_after_another_is_drawn_until_it_compiles_nothing(monkeypatch):
    monkeypatch.setattr(differential, "launched", lambda call, device: frozenset({call.head_dim} - {0}))
    others = iter([Call(head_dim=48), Call(head_dim=0), Call(head_dim=32), Call(head_dim=40)])
    first, again = Call(head_dim=80), lambda: next(others)
    assert differential._drawn(first, again, {32}, 0, "cuda") == (first, frozenset({80}))
    assert differential._drawn(first, again, {32}, 1, "cuda") == (Call(head_dim=32), frozenset({32}))
    monkeypatch.setattr(differential, "_DRAWS", 2)  # none was found
    assert differential._drawn(first, again, {32}, 1, "cuda") == (Call(head_dim=40), frozenset({40}))
