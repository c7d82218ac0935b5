"""Mamba-2's scan against its loop over time in float64, with the gradients of every argument."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.thunderkittens import chunked, mamba2, walk_back, walk_hopper
from gpu_accel.thunderkittens.mamba2 import mamba_chunk_scan_combined, mamba_scan_recurrent
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run

NAMES = ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"]


def make(device, *, seqlen=21, heads=2, groups=1, headdim=16, dstate=20, dtype=torch.float32, wide_d=False):
    x = randn(1, seqlen, heads, headdim, seed=1, dtype=dtype, device=device)
    B, C = (randn(1, seqlen, groups, dstate, seed=s, dtype=dtype, device=device) for s in (2, 3))
    return dict(
        x=x, dt=randn(1, seqlen, heads, seed=4, device=device), A=-randn(heads, seed=5, device=device).exp(), B=B, C=C,
        D=randn(*((heads, headdim) if wide_d else (heads,)), seed=6, device=device),
        z=randn(*x.shape, seed=7, dtype=dtype, device=device), dt_bias=randn(heads, seed=8, device=device),
        initial_states=randn(1, heads, headdim, dstate, seed=9, device=device),
    )  # fmt: skip


CASES = {
    "everything": dict(),
    "two-groups-D-by-dim": dict(groups=2, wide_d=True, seqlen=17),
    "bf16": dict(dtype=torch.bfloat16, seqlen=18),
    "one-step": dict(seqlen=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scan(case, device):
    given = make(device, **case)
    given = {name: given[name] for name in NAMES}
    x = given["x"]
    grads = [randn(*x.shape, seed=10, device=device), randn(*given["initial_states"].shape, seed=11, device=device)]

    def ours(backend):
        def call(*tensors):
            return mamba_chunk_scan_combined(
                chunk_size=16, dt_softplus=True, return_final_states=True, backend=backend,
                **dict(zip(NAMES, tensors, strict=True)),
            )  # fmt: skip

        return call

    def loop(*tensors):
        return mamba_scan_recurrent(dt_softplus=True, **dict(zip(NAMES, tensors, strict=True)))

    tensors = list(given.values())
    mine = run(ours("portable"), tensors, grads)
    truth, ruler = run(loop, tensors, grads, torch.float64), run(ours("reference"), tensors, grads)
    for name, *three in zip(["y", "states", *(f"d{n}" for n in NAMES)], mine, truth, ruler, strict=True):
        close(name, *three, narrow=x.dtype == torch.bfloat16)


def test_seq_idx_starts_anew(device):
    given = make(device)
    seq_idx = torch.tensor([[0] * 5 + [1] * 9 + [4] * 7], device=device)
    y, states = mamba_chunk_scan_combined(
        chunk_size=16, seq_idx=seq_idx, dt_softplus=True, return_final_states=True, backend="portable", **given
    )
    wide = {name: t.double() for name, t in given.items()}
    truth, last = mamba_scan_recurrent(seq_idx=seq_idx, dt_softplus=True, **wide)
    ruler, last_ruler = mamba_chunk_scan_combined(
        chunk_size=16, seq_idx=seq_idx, dt_softplus=True, return_final_states=True, backend="reference", **given
    )
    close("y", y, truth, ruler)
    close("states", states, last, last_ruler)


def test_packed_sequences_have_a_state_each(device):
    given = make(device)
    given["initial_states"] = None
    cu = torch.tensor([0, 5, 5, 21], device=device)
    y, states = mamba_chunk_scan_combined(chunk_size=64, cu_seqlens=cu, return_final_states=True, backend="portable",
                                          dt_softplus=True, **given)  # fmt: skip
    assert states.shape[0] == 3 and not states[1].any()
    cut = {n: t[:, 5:] if n in ("x", "dt", "B", "C", "z") else t for n, t in given.items()}
    alone, last = mamba_chunk_scan_combined(
        chunk_size=64, return_final_states=True, backend="portable", dt_softplus=True, **cut
    )
    torch.testing.assert_close(y[:, 5:], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[2:], last, rtol=1e-4, atol=1e-4)


def test_packed_sequences_as_mamba_ssm_calls_them(device):
    """With seq_idx beside cu_seqlens, and states of all sequences beside that of the last one."""
    given = make(device)
    given["initial_states"] = randn(4, *given["initial_states"].shape[1:], seed=12, device=device)
    cu, seq_idx = torch.tensor([0, 5, 5, 21, 21]), torch.tensor([[0] * 5 + [2] * 16])
    options = dict(chunk_size=64, cu_seqlens=cu.int().to(device), dt_softplus=True)
    y, states = mamba_chunk_scan_combined(return_final_states=True, **options, **given)
    options["seq_idx"] = seq_idx.to(device)
    both, last, each = mamba_chunk_scan_combined(return_final_states=True, return_varlen_states=True, **options,
                                                 **given)  # fmt: skip
    assert torch.equal(both, y) and torch.equal(each, states) and torch.equal(last, states[2:3])
    _, alone = mamba_chunk_scan_combined(return_varlen_states=True, **options, **given)
    assert torch.equal(alone, states)
    options["seq_idx"] = torch.tensor([[0] * 5 + [2] * 9 + [3] * 7], device=device)  # one more cut
    cut, _ = mamba_chunk_scan_combined(return_varlen_states=True, **options, **given)
    assert torch.equal(cut[:, :14], y[:, :14]) and not torch.isclose(cut[:, 14:], y[:, 14:]).any(-1).all()


@pytest.mark.parametrize("limit", [(0.0, math.inf), (-math.inf, math.inf), (-0.5, 0.5), (0.1, 0.4)], ids=str)
@pytest.mark.parametrize("softplus", [False, True])
def test_dt_is_limited_as_it_says(softplus, limit, device):
    """Also by the default, where dt may be negative."""
    given = make(device) | {"z": None}
    given["dt"] = randn(*given["dt"].shape, seed=9, device=device)
    y = mamba_chunk_scan_combined(chunk_size=64, dt_softplus=softplus, dt_limit=limit, backend="reference", **given)
    wide = given["dt"] if given.get("dt_bias") is None else given["dt"] + given["dt_bias"]
    wide = torch.nn.functional.softplus(wide) if softplus else wide
    given |= {"dt": wide.clamp(*limit), "dt_bias": None}
    torch.testing.assert_close(y, mamba_scan_recurrent(**given)[0], rtol=1e-3, atol=1e-3)


def test_the_chunk_does_not_matter_and_dt_can_be_limited(device):
    given = make(device)
    same = [
        mamba_chunk_scan_combined(chunk_size=c, dt_limit=(0.1, 0.5), dt_softplus=True, backend="reference", **given)
        for c in (16, 256)
    ]
    torch.testing.assert_close(*same, rtol=1e-4, atol=1e-4)
    other = mamba_chunk_scan_combined(chunk_size=16, dt_softplus=True, backend="reference", **given)
    assert not torch.allclose(other, same[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [(dict(chunk_size=50), "power of two"), (dict(D=torch.ones(3)), "D must be"),
     (dict(dt=torch.ones(1, 21)), "dt must"),
     (dict(seq_idx=torch.zeros(21).int()), "seq_idx must"), (dict(return_varlen_states=True), "needs cu_seqlens")],
    ids=["chunk-50", "D", "dt", "seq_idx", "states-of-what"],
)  # fmt: skip
def test_wrong_arguments_are_refused(changed, message):
    with pytest.raises(InvalidInputError, match=message):
        mamba_chunk_scan_combined(**(make("cpu") | dict(chunk_size=64) | changed))


def test_pairs_are_not_rounded_before_gates_have_them(device):
    """One chunk, where the gradient of A is pairs of steps alone: taken out of dq and dk, where they are rounded, they
    erred 0.4 to 0.8 as much as eager torch (root mean square), which a sum over all steps of a batch keeps."""
    x, B, C, do = (randn(1, 64, heads, 16, seed=s, dtype=torch.float16, device=device)
                   for s, heads in ((1, 8), (2, 1), (3, 1), (4, 8)))  # fmt: skip
    dt = 0.01 * torch.exp(2.3 * randn(1, 64, 8, seed=5, device=device).clamp(-1, 1))
    A = -(1 + 15 * torch.sigmoid(randn(8, seed=6, device=device)))

    def gradient(backend, dtype):
        a = A.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
        given = x.to(dtype), dt.to(a.dtype), a, B.to(dtype), C.to(dtype)
        y = mamba_chunk_scan_combined(*given, 64, backend=backend)
        return torch.autograd.grad(y, a, do.to(dtype))[0].double()

    truth = gradient("reference", torch.float64)
    mine, ruler = (gradient(name, torch.float16) - truth for name in ("portable", "reference"))
    assert mine.square().mean() < (0.1 * ruler).square().mean()


@pytest.mark.parametrize(("dstate", "states", "dtype"), [
    *((n, s, torch.bfloat16) for s in (True, False) for n in (128, 64)), (64, True, torch.float16)
])  # fmt: skip
def test_gates_by_the_source_of_the_walks(dstate, states, dtype, device, monkeypatch):
    """Gates and their gradients made by the kernels of the walks: the same as those that torch makes, but for the order
    of sums. Six heads for four programs; some of dt is beyond its limits."""
    monkeypatch.setattr(walk_hopper, "refusal", lambda *_: None)
    monkeypatch.setattr(walk_hopper, "sms", lambda _: 2)
    monkeypatch.setattr(walk_back, "unseen", lambda *_: None)
    monkeypatch.setattr(chunked, "segments_for", lambda *_: 1)
    x, do = (randn(2, 130, 3, 64, seed=s, dtype=dtype, device=device) for s in (1, 2))
    B, C = (randn(2, 130, 1, dstate, seed=s, dtype=dtype, device=device) for s in (3, 4))
    tensors = [x, randn(2, 130, 3, seed=5, device=device), -randn(3, seed=6, device=device).exp(), B, C]
    grads = [do, randn(2, 3, 64, dstate, seed=7, device=device)][: 1 + states]

    def call(*tensors):
        made = mamba_chunk_scan_combined(*tensors, 64, dt_limit=(-0.1, 0.9), return_final_states=True, backend="hopper")
        return made if states else made[0]

    found = []
    for whole in (False, True):
        monkeypatch.setattr(mamba2, "_walks", lambda *_, whole=whole: whole)
        with gluon_in_torch.kernels_on_a_cpu() as done:
            found.append(run(call, tensors, grads))
        assert sorted(done) == ["both_kernel", "walk_kernel", "walk_kernel"]
    names = ["y", "states", "dx", "ddt", "dA", "dB", "dC"] if states else ["y", "dx", "ddt", "dA", "dB", "dC"]
    for name, by_torch, mine in zip(names, *found, strict=True):
        if name in ("ddt", "dA"):
            torch.testing.assert_close(mine, by_torch, rtol=1e-5, atol=1e-5 * float(by_torch.abs().max()))
        else:
            assert torch.equal(mine, by_torch), name


def test_what_walks():
    def walks(dtype, backend):
        return mamba2._walks(SimpleNamespace(is_cuda=True, dtype=dtype), backend)

    for dtype in (torch.bfloat16, torch.float16):
        assert walks(dtype, "auto") and walks(dtype, "hopper") and not walks(dtype, "portable")
    assert not walks(torch.float32, "auto") and not walks(torch.float32, "hopper")


def test_opcheck(device):
    """As torch.compile sees it, gradients too."""
    q, k = (randn(1, 5, 1, 16, seed=s, dtype=torch.bfloat16, device=device).requires_grad_() for s in (1, 2))
    v = randn(1, 5, 2, 16, seed=3, dtype=torch.bfloat16, device=device).requires_grad_()
    dt, rates = (randn(*shape, seed=4, device=device).requires_grad_() for shape in ((1, 5, 2), (2,)))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(mamba2.scan_op, (q, k, v, dt, rates, 0.0, 1.0, 64), test_utils=tests)
