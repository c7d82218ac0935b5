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

from .test_thunderkittens import BF16, FP16, FP32, judge, randn

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


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [
    pytest.param((2, 1023, 4, 128, 128), id="T1023-K128-V128"),
    pytest.param((2, 300, 2, 64, 128), id="T300-K64-V128"),
    pytest.param((2, 130, 2, 96, 72), id="T130-K96-V72"),
    pytest.param((2, 300, 2, 128, 64), id="T300-K128-V64"),
    pytest.param((3, 65, 2, 24, 40), id="T65-K24-V40"),
])  # fmt: skip
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


def test_offsets_beyond_two_to_the_31():
    """Views whose last step lies more than 2^31 elements from their first; of gates, too."""
    step = 2**31 // 63 + 96
    buffer = torch.empty(63 * step + 96, dtype=BF16, device="cuda")
    x = buffer.as_strided((1, 64, 1, 96), (0, step, 96, 1))
    x.copy_(-randn(1, 64, 1, 96, seed=1).square())
    near = x.contiguous()
    for far, close in zip(function("portable")(x, x, x, x), function("portable")(*[near] * 4), strict=True):
        assert torch.equal(far, close)
    grads = [x, near]
    found = []
    for one in grads:
        leaf = one.detach().requires_grad_()
        found.append(torch.autograd.grad(function("portable")(leaf, leaf, leaf, leaf)[0], leaf, one)[0])
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
