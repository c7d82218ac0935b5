"""Kernels that touch what is not theirs are refused in the interpreter, others run as they do without being watched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import IncorrectResultError
from gpu_accel.testing.differential import Call, check
from gpu_accel.testing.out_of_bounds import only_own_memory

pytestmark = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")


@triton.jit
def shift(x, y, n, first, limit, MASKED: tl.constexpr, N: tl.constexpr):
    """y[i] = x[i + first] for i < limit, or for all i."""
    i = tl.arange(0, N)
    if MASKED:
        tl.store(y + i, tl.load(x + i + first, mask=(i + first < n) & (i + first >= 0), other=0.0), mask=i < limit)
    else:
        tl.store(y + i, tl.load(x + i + first), mask=i < limit)


@triton.jit
def gather(x, where, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(y + tl.load(where[0] + i), tl.load(x + i))


@triton.jit
def tile(x, y, row, N: tl.constexpr):
    i = tl.arange(0, N)
    block = x.load([row, 0]).reshape([N, N])
    tl.store(y + i[:, None] * N + i[None, :], block)


def run(kernel, *arguments, **options):
    with only_own_memory():
        kernel[(1,)](*arguments, **options)


def test_what_is_right_is_right_while_watched():
    x, y = torch.randn(16), torch.zeros(16)
    run(shift, x, y, 16, 5, 16, True, 16)
    assert torch.equal(y[:11], x[5:]) and not y[11:].any()
    where = torch.tensor([3, 3, 0, 1])
    y.zero_()
    run(gather, x, (where,), y, 4)
    assert torch.allclose(y[:4], torch.stack([x[2], x[3], torch.tensor(0.0), x[0] + x[1]]))


@pytest.mark.parametrize(
    "first, limit, masked, found",
    [
        (-1, 16, False, r"shift, program \(0, 0, 0\): load of 1 of 16 .* 4 bytes before the first, .* 64, of 'x'"),
        (3, 16, False, "load of 3 of 16 addresses outside the arguments: 64 bytes after the first, .* of 'x'"),
        (1 << 28, 16, False, "load of 16 of 16 "),
        (0, 17, True, "store of 1 of 17 .* 64 bytes after the first, .* of 'y'"),
    ],
    ids=["before", "after", "far", "store"],
)
def test_accesses_outside(first, limit, masked, found):
    x, y = torch.randn(16), torch.zeros(16)
    with pytest.raises(IncorrectResultError, match=found):
        run(shift, x, y, 16, first, limit, masked, 32 if limit > 16 else 16)
    run(shift, x, y, 16, 0, 16, True, 16)  # and the next launch is watched from new
    assert torch.equal(x, y)


def test_what_lies_between_the_rows_of_a_view_is_outside():
    x, y = torch.randn(8, 16), torch.zeros(16)
    with pytest.raises(IncorrectResultError, match="load of 4 of 16 addresses .*: 48 bytes after the first of "):
        run(shift, x[::2, :12], y, 16, 0, 16, False, 16)


def test_atomics_and_tuples():
    x, y = torch.randn(16), torch.zeros(3)
    with pytest.raises(IncorrectResultError, match="atomic of 1 of 4 addresses"):
        run(gather, x, (torch.tensor([0, 1, 2, 3]),), y, 4)
    with pytest.raises(IncorrectResultError, match=r"load of 1 of 4 .* of 'where\[0\]'"):
        run(gather, x, (torch.tensor([0, 1, 2]),), y, 4)


def test_descriptors_cut_their_blocks():
    x, y = torch.randn(6, 4), torch.full((4, 4), 7.0)
    described = TensorDescriptor.from_tensor(x, [4, 4])
    run(tile, described, y, 4, 4)
    assert torch.equal(y[:2], x[4:]) and not y[2:].any()


CALLS = {
    # a tile behind the last row that counts began its window beyond the last key: an illegal access on a GPU
    "window-behind-seqused": Call(lengths_q=(60, 5, 2), lengths_k=(2, 2, 5), used=True, causal=True, window=(0, -1),
                                  softcap=3.0),
    "causal-more-rows-than-keys": Call(lengths_q=(40, 0, 37), lengths_k=(4, 3, 0), used=True, causal=True,
                                       score_mod=True, max_logits=True),
    "window-on-both-sides": Call(lengths_q=(3, 70, 1), lengths_k=(70, 3, 1), used=True, window=(5, 2), sinks=True,
                                 alibi=True),
    "keys-that-nobody-sees": Call(lengths_q=(1, 2), lengths_k=(60, 60), window=(3, 0), causal=True, mask_mod=True,
                                  lse_gradient=True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_packed_attention_touches_nothing_else(name):
    with only_own_memory():
        for seed in range(3):  # which also draws seqused
            check(replace(CALLS[name], backend="portable", dtype="fp32", packed=True, head_dim=24, head_dim_v=40,
                          kind="poisoned", seed=seed), device="cpu")  # fmt: skip
