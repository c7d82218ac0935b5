"""Gated linear attention on a GPU: what decides in which forms its kernels may run (`gla.refusal`).

Forms that `gla.refusal` names are refused, and that is tested. GPU_ACCEL_UNCHECKED=1 runs them: one test a process,
since an illegal access spoils what comes after it.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing import assert_close_to_truth
from gpu_accel.thunderkittens import gla

from .judging import BF16, FP16, FP32, assert_repeats, between_nan, judge, judge_values, randn

NAMES = ["o", "state", "dq", "dk", "dv", "dg", "dinitial"]
UNCHECKED = os.environ.get("GPU_ACCEL_UNCHECKED") == "1"


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setattr(gla, "UNCHECKED", UNCHECKED)


def function(backend, **options):
    return lambda q, k, v, g, h=None: gla.gated_linear_attention(
        q, k, v, g, initial_state=h, backend=backend, **options
    )


def make(batch, seqlen, heads, key_dim, value_dim, dtype, gates=0.1):
    tensors = [randn(batch, seqlen, heads, d, seed=s, dtype=dtype) for s, d in enumerate((key_dim, key_dim, value_dim))]
    tensors.append(-randn(batch, seqlen, heads, key_dim, seed=4).square() * gates)
    tensors.append(randn(batch, heads, key_dim, value_dim, seed=5))
    return tensors, [randn(batch, seqlen, heads, value_dim, seed=6), randn(batch, heads, key_dim, value_dim, seed=7)]


# three products of tf32 keep about 22 bits of float32, and torch's own products 24
def factor_of(dtype):
    return 8.0 if dtype == FP32 else 2.0


SHAPES = [
    pytest.param((2, 1023, 4, 128, 128), id="T1023-K128-V128"),
    pytest.param((2, 300, 2, 64, 128), id="T300-K64-V128"),
    pytest.param((2, 130, 2, 96, 72), id="T130-K96-V72"),
    pytest.param((2, 300, 2, 128, 64), id="T300-K128-V64"),
    pytest.param((3, 65, 2, 24, 40), id="T65-K24-V40"),
]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gla(shape, dtype):
    tensors, grads = make(*shape, dtype)
    judge(NAMES, function, tensors, grads, factor_of(dtype))


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(gla, "UNCHECKED", False)
    tensors, _ = make(1, 64, 2, 256, 64, FP16)
    with pytest.raises(UnsupportedError, match="at most 128 on a GPU, got 256 and 64"):
        function("portable")(*tensors)
    for one, other in zip(function("auto")(*tensors), function("reference")(*tensors), strict=True):
        assert torch.equal(one, other)


def test_one_step():
    """Many heads: one step is one number a head and column, and the yardstick may hit a few by luck."""
    judge(NAMES, function, *make(1, 1, 32, 128, 128, BF16))


@pytest.mark.parametrize("gate", [-30.0, -1e4, -math.inf])
def test_gates_that_forget(gate):
    """At every third step of every other dimension: sums of gates are large beside those of the steps between."""
    tensors, grads = make(2, 130, 4, 128, 128, BF16)
    tensors[3][:, 2::3, :, ::2] = gate
    judge(NAMES, function, tensors, grads)


def test_packed_sequences():
    """NaN behind the last sequence, in inputs and in the gradient of o."""
    lengths, slack = [1, 0, 300, 64, 129], 7
    total = sum(lengths)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    tensors, (do, _) = make(1, total + slack, 2, 128, 128, BF16)
    for x in (*tensors[:4], do):
        x[:, total:] = math.nan
    tensors[4] = randn(len(lengths), 2, 128, 128, seed=8)

    def packed(backend):
        def call(*given):
            o, state = function(backend, cu_seqlens=cu)(*given)
            assert not o[:, total:].any()
            return o[:, :total], state

        return call

    judge(NAMES, packed, tensors, [do[:, :total], randn(*tensors[4].shape, seed=9)])


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_offsets_beyond_two_to_the_31(backend):
    """Views whose last step lies more than 2^31 elements from their first; of gates, too."""
    step = 2**31 // 63 // 8 * 8 + 96
    buffer = torch.empty(63 * step + 96, dtype=BF16, device="cuda")
    x = buffer.as_strided((1, 64, 1, 96), (0, step, 96, 1))
    x.copy_(-randn(1, 64, 1, 96, seed=1).square())
    near = x.contiguous()
    for far, close in zip(function(backend)(x, x, x, x), function(backend)(*[near] * 4), strict=True):
        assert torch.equal(far, close)
    grads = [x, near]
    found = []
    for one in grads:
        leaf = one.detach().requires_grad_()
        found.append(torch.autograd.grad(function(backend)(leaf, leaf, leaf, leaf)[0], leaf, one)[0])
    assert torch.equal(*found)


def test_the_same_bits_again():
    tensors, grads = make(2, 300, 4, 128, 128, BF16)
    leaves = [x.requires_grad_() for x in tensors]
    first, *others = (
        torch.autograd.grad(function("portable")(*leaves), leaves, [grads[0].to(BF16), grads[1]]) for _ in range(8)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_long_memories():
    """Hardly any gates over 4096 steps: gradients of gates are sums of thousands of pairs, which must not drift."""
    tensors, grads = make(1, 4096, 2, 64, 96, BF16, gates=1e-4)
    leaves = [x.requires_grad_() for x in tensors]
    mine = torch.autograd.grad(function("portable")(*leaves), leaves, [grads[0].to(BF16), grads[1]])[3]
    ruler = torch.autograd.grad(function("reference")(*leaves), leaves, [grads[0].to(BF16), grads[1]])[3]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    given = [grads[0].to(BF16).double(), grads[1].double()]
    truth = torch.autograd.grad(function("reference")(*wide), wide, given)[3]
    for part in (slice(0, 1024), slice(3072, 4096)):
        assert_close_to_truth("dg", mine[:, part], truth[:, part], ruler[:, part])


def on_hopper(backend):
    """`judge` asks for "portable" and for the reference, which is the truth and the ruler."""
    return function("hopper" if backend == "portable" else backend)


@pytest.mark.parametrize("shape", [
    *SHAPES,
    pytest.param((1, 4096, 2, 128, 128), id="T4096-K128-V128-segments"),
    pytest.param((1, 2500, 1, 64, 256), id="T2500-K64-V256-segments"),
])  # fmt: skip
def test_gla_on_hopper(shape):
    judge(NAMES, on_hopper, *make(*shape, BF16))


@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 128, 129])
def test_lengths_on_hopper(seqlen):
    """Many heads: see `test_one_step`. Without a first state: what is in memory there must not matter."""
    tensors, grads = make(1, seqlen, 32, 128, 128, BF16)
    judge(NAMES[:-1], on_hopper, tensors[:4], grads)


@pytest.mark.parametrize("gate", [-30.0, -1e4, -math.inf])
def test_gates_that_forget_on_hopper(gate):
    tensors, grads = make(2, 130, 4, 128, 128, BF16)
    tensors[3][:, 2::3, :, ::2] = gate
    judge(NAMES, on_hopper, tensors, grads)


@pytest.mark.parametrize("gates", [0.0, 1e-4, 30.0])
def test_memories_on_hopper(gates):
    """None forgotten, hardly any, nearly all at once: gates are multiplied up, thousands of them."""
    judge_values(NAMES, on_hopper, make(1, 4096, 2, 64, 96, BF16, gates=gates)[0])


def test_views_on_hopper():
    """NaN before and behind every tensor, steps apart, gates of 16 bits; then views that TMA cannot address."""
    tensors, _ = make(2, 200, 3, 64, 64, BF16)
    tensors[3] = tensors[3].bfloat16()
    expected = function("hopper")(*tensors)
    for shift in (8, 3):
        given = [between_nan(x, shift) for x in tensors[:4]]
        for one, other in zip(function("hopper")(*given, tensors[4]), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(2, 300, 4, 128, 128), (1, 4096, 2, 64, 64)], ids=["K128", "K64-segments"])
def test_the_same_bits_again_on_hopper(shape):
    assert_repeats(function("hopper"), make(*shape, BF16)[0])


def test_compiled_on_hopper():
    tensors, _ = make(1, 130, 2, 64, 64, BF16)
    compiled = torch.compile(function("hopper"), fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(*tensors), function("hopper")(*tensors), strict=True):
        assert torch.equal(one, other)


def test_what_is_refused_on_hopper():
    tensors, _ = make(1, 64, 2, 256, 64, BF16)
    with pytest.raises(UnsupportedError, match="K must be a multiple of 8 from 16 to 128"):
        function("hopper")(*tensors)
    with pytest.raises(UnsupportedError, match="takes bfloat16"):
        function("hopper")(*make(1, 64, 2, 64, 64, FP16)[0])
