"""The Hopper backward against float64: masks, odd lengths, grouped heads, memory layouts, and the bits of dk and dv."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.flash_attention3 import explain, hopper, hopper_backward
from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.testing import assert_close_to_truth, attention_truth, attention_truth_backward, differential, make_qkv
from gpu_accel.testing.attention import gradient_floor
from gpu_accel.testing.inputs import random_like
from gpu_accel.testing.truth import yardstick_attention_backward

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]

# (batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim), options
CASES = {
    "one-block": ((1, 128, 128, 1, 1, 128), {}),
    "one-row-one-key": ((1, 1, 1, 1, 1, 64), {}),
    "one-query": ((1, 1, 1000, 2, 1, 128), {"causal": True}),
    "one-key": ((1, 1000, 1, 2, 1, 64), {}),
    "odd-lengths-d128": ((1, 333, 257, 2, 2, 128), {}),
    "odd-lengths-d64": ((1, 333, 257, 2, 2, 64), {}),
    "causal-d128": ((2, 1024, 1024, 3, 3, 128), {"causal": True}),
    "causal-d64": ((2, 1024, 1024, 3, 3, 64), {"causal": True}),
    "causal-sq-lt-sk": ((2, 129, 515, 4, 2, 128), {"causal": True}),
    "causal-rows-see-nothing": ((2, 515, 129, 4, 1, 64), {"causal": True}),
    "window-d128": ((1, 700, 700, 8, 2, 128), {"window_size": (100, 50)}),
    "window-causal-d64": ((1, 700, 700, 8, 2, 64), {"window_size": (64, 0)}),
    "window-keys-nobody-sees": ((1, 200, 640, 2, 1, 64), {"window_size": (10, 5)}),
    "window-rows-see-nothing": ((1, 640, 200, 2, 1, 128), {"window_size": (10, 5)}),
    "softcap-causal-d128": ((1, 513, 640, 2, 1, 128), {"causal": True, "softcap": 3.0}),
    "softcap-d40": ((1, 300, 400, 4, 2, 40), {"softcap": 2.0}),
    "head-dim-8": ((1, 300, 400, 4, 2, 8), {"causal": True}),
    "head-dim-72": ((1, 300, 400, 4, 2, 72), {"causal": True}),
    "head-dim-120": ((1, 300, 400, 4, 2, 120), {}),
    "many-tiles-a-program": ((40, 256, 256, 8, 8, 64), {"causal": True}),
    "many-tiles-a-program-d128": ((40, 256, 256, 8, 8, 128), {}),
    "queue-d64": ((9, 900, 1400, 6, 3, 64), {}),
    "one-block-d256": ((1, 128, 128, 1, 1, 256), {}),
    "one-row-one-key-d256": ((1, 1, 1, 1, 1, 256), {}),
    "one-query-d256": ((1, 1, 1000, 2, 1, 256), {"causal": True}),
    "one-key-d256": ((1, 1000, 1, 2, 1, 256), {}),
    "odd-lengths-d256": ((1, 333, 257, 2, 2, 256), {}),
    "causal-d256": ((2, 1024, 1024, 3, 3, 256), {"causal": True}),
    "causal-sq-lt-sk-d192": ((2, 129, 515, 4, 2, 192), {"causal": True}),
    "causal-rows-see-nothing-d256": ((2, 515, 129, 4, 1, 256), {"causal": True}),
    "window-d256": ((1, 700, 700, 8, 2, 256), {"window_size": (100, 50)}),
    "window-causal-d200": ((1, 700, 700, 8, 2, 200), {"window_size": (64, 0)}),
    "window-keys-nobody-sees-d256": ((1, 200, 640, 2, 1, 256), {"window_size": (10, 5)}),
    "window-rows-see-nothing-d256": ((1, 640, 200, 2, 1, 256), {"window_size": (10, 5)}),
    "softcap-causal-d256": ((1, 513, 640, 2, 1, 256), {"causal": True, "softcap": 3.0}),
    "softcap-window-d136": ((1, 513, 640, 2, 1, 136), {"softcap": 2.0, "window_size": (70, 300)}),
    "many-tiles-a-program-d256": ((20, 256, 256, 8, 8, 256), {}),
    "many-tiles-a-program-causal-d256": ((20, 300, 256, 8, 4, 256), {"causal": True}),
}


def inputs(shape, dtype=BF16, kind="normal"):
    batch, sq, sk, heads, heads_kv, d = shape
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, kind=kind,
                    dtype=dtype, device="cuda")  # fmt: skip


def run(do, q, k, v, o, lse, *, dlse=None, causal=False, window_size=(-1, -1), softcap=0.0):
    for n in (1 << 24, 1 << 22, 1 << 20):  # what the allocator hands out next is full of NaN
        torch.full((n,), float("nan"), device="cuda")
    left, right = window_size
    return hopper_backward.backward(do, q, k, v, o, lse, dlse=dlse, softmax_scale=q.shape[-1] ** -0.5, window_left=left,
                                    window_right=0 if causal else right, softcap=softcap)  # fmt: skip


def check(q, k, v, do=None, lse_gradient=False, **options):
    o, lse = attention_truth(q, k, v, **options)
    do = random_like(q, seed=7) if do is None else do
    dlse = None
    if lse_gradient:
        dlse = torch.where(lse == float("-inf"), 0.0, torch.randn_like(lse)).float()
    got = run(do, q, k, v, o.to(q.dtype), lse.float(), dlse=dlse, **options)
    truth = attention_truth_backward(do, q, k, v, dlse=dlse, **options)
    ruler = yardstick_attention_backward(do, q, k, v, **options)
    for name, a, b, c in zip(("dq", "dk", "dv"), got, truth, ruler, strict=True):
        assert_close_to_truth(name, a, b, c, floor=gradient_floor(q.dtype, b.abs().max().item()))
    return got


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    shape, options = CASES[name]
    check(*inputs(shape), **options)


@pytest.mark.parametrize("name", ["odd-lengths-d64", "queue-d64", "causal-d128", "causal-d256",
                                  "causal-rows-see-nothing", "softcap-d40"])  # fmt: skip
def test_fp16(name):
    shape, options = CASES[name]
    check(*inputs(shape, FP16), **options)


@pytest.mark.parametrize("name", ["odd-lengths-d128", "odd-lengths-d256", "causal-sq-lt-sk", "causal-rows-see-nothing",
                                  "softcap-causal-d128", "softcap-causal-d256"])  # fmt: skip
def test_gradient_of_lse(name):
    shape, options = CASES[name]
    check(*inputs(shape), lse_gradient=True, **options)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 70, 1000, 2, 1), (40, 333, 257, 6, 3), (3, 2100, 2100, 4, 4)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (100, 0)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("switches", [("apart",), ("apart", "early")], ids="-".join)
def test_switches_give_the_same_bits(switches, left, right, head_dim, shape):
    q, k, v = inputs((*shape, head_dim))
    options = dict(softmax_scale=head_dim**-0.5, window_left=left, window_right=right)
    o, lse = hopper.forward(q, k, v, **options)
    do = random_like(o, seed=5)
    config = hopper_backward.backward_config(head_dim, causal=right >= 0)
    dq, dk, dv = hopper_backward.backward(do, q, k, v, o, lse, config=config, **options)
    for _ in range(3):
        config = replace(config, **dict.fromkeys(switches, True))
        dq2, dk2, dv2 = hopper_backward.backward(do, q, k, v, o, lse, config=config, **options)
        assert torch.equal(dk, dk2) and torch.equal(dv, dv2)
        # dq: sums of float32 in another order, then rounded: a unit in the last place of bfloat16 apart
        assert (dq2.float() - dq.float()).abs().max() <= 2**-7 * dq.float().abs().max()


@pytest.mark.parametrize("kind", ["strided", "packed", "broadcast", "transposed", "misaligned"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_memory_layouts(kind, head_dim):
    check(*inputs((2, 300, 300, 4, 4, head_dim), kind=kind), causal=True)


def test_expanded_output_gradient():
    q, k, v = inputs((2, 300, 300, 2, 2, 128))
    check(q, k, v, do=torch.ones(1, 1, 1, 1, dtype=BF16, device="cuda").expand(q.shape))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_rows_that_see_nothing_get_zeros(head_dim):
    q, k, v = inputs((1, 400, 100, 2, 2, head_dim))
    dq, _, _ = check(q, k, v, causal=True)
    assert torch.equal(dq[:, :300], torch.zeros_like(dq[:, :300]))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_that_nobody_sees_get_zeros(head_dim):
    q, k, v = inputs((1, 100, 600, 2, 1, head_dim))
    _, dk, dv = check(q, k, v, window_size=(0, 0))
    for x in (dk, dv):
        assert torch.equal(x[:, :500], torch.zeros_like(x[:, :500]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_is_said_not_to_change_from_run_to_run(head_dim):
    q, k, v = inputs((4, 1000, 1000, 4, 2, head_dim))
    o, lse = attention_truth(q, k, v, causal=True)
    do = random_like(q, seed=3)
    first = run(do, q, k, v, o.to(BF16), lse.float(), causal=True)
    for _ in range(5):
        again = run(do, q, k, v, o.to(BF16), lse.float(), causal=True)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        assert head_dim <= 128 or torch.equal(first[0], again[0])


@pytest.mark.parametrize("head_dim", [64, 256])
def test_large_scores_beyond_the_last_key(head_dim):
    # keys past the end score 0, far above a very negative lse: they must not turn dq into inf * 0
    q, k, v = inputs((1, 200, 130, 2, 2, head_dim))
    q = torch.full_like(q, 30.0)
    k = torch.full_like(k, -30.0) + 0.01 * k
    o, lse = attention_truth(q, k, v)
    assert lse.max() < -1000
    for x in run(random_like(q, seed=1), q, k, v, o.to(BF16), lse.float()):
        assert torch.isfinite(x).all()


def test_refusals():
    problem = dict(device_type="cuda", capability=(9, 0), dtype=BF16, batch=1, seqlen_q=8, seqlen_k=8, heads=1,
                   heads_kv=1, head_dim=64, head_dim_v=64, causal=False, window_left=-1, window_right=-1, softcap=0.0,
                   varlen=False)  # fmt: skip
    assert hopper_backward.refuse(Problem(**problem)) is None
    wide = dict.fromkeys(("head_dim", "head_dim_v"), hopper_backward.MOST_HEAD_DIM + 8)
    for change in ({"deterministic": True}, wide, {"head_dim_v": 128}, {"dtype": torch.float32},
                   {"capability": (10, 0)}):  # fmt: skip
        assert hopper_backward.refuse(Problem(**{**problem, **change}))


PACKED = {
    "causal": {"causal": True},
    "full-lse-gradient": {"lse_gradient": True},
    "window-softcap": {"window": (90, 7), "softcap": 5.0},
    "used": {"used": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "poisoned": {"kind": "poisoned", "causal": True},
    "other-lengths": {"lengths_k": (17, 300, 100, 0, 129, 800), "causal": True},
    "one": {"lengths_q": (1000,), "lengths_k": (1000,)},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("d", [64, 128])
def test_packed(d, options):
    # tiles of keys do not begin where sequences do; sequences of 0 and 1 rows; grouped heads
    lengths = (300, 0, 65, 1, 129, 505)
    shape = {"lengths_q": lengths, "lengths_k": lengths, "heads_kv": 2, "group": 2}
    call = {"backend": "hopper", "head_dim": d, "head_dim_v": d, "packed": True, "gradients": True}
    differential.check(differential.Call(**{**shape, **call, **options}))


def test_which_packed_calls_it_takes():
    q = torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    assert explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu).backward.startswith("hopper")
    wide = torch.randn(64, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert explain(wide, wide, wide, cu_seqlens_q=cu, cu_seqlens_k=cu).backward.startswith("hopper")
