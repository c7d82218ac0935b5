"""What surrounds the Hopper backward, in plain Triton, against torch: row statistics, and dQ out of its fragments."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.flash_attention3 import hopper_backward
from gpu_accel.flash_attention3.hopper_backward_around import Around
from gpu_accel.flash_attention3.hopper_backward_finish import dq_finish, prepare
from gpu_accel.flash_attention3.reference import attention_reference, attention_truth_backward

LOG2_E = 1.4426950408889634


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_prepare(block, dlse, device):
    batch, seqlen, heads, head_dim, d = 2, 150, 3, 40, 64  # odd lengths, and head_dim filled with zeros
    o, do = (torch.randn(batch, seqlen, heads, head_dim, device=device) for _ in range(2))
    lse = torch.randn(batch, heads, seqlen, device=device)
    lse[0, 1, 7] = -math.inf
    do[0, 7, 1] = math.nan  # where a row sees nothing, do does not matter
    gradient = torch.randn_like(lse)
    blocks = -(-seqlen // block)
    stat = torch.full((batch, heads, blocks, 2, block), math.nan, device=device)
    total = torch.full((batch, heads, blocks, block, d), math.nan, device=device)
    grid = (batch * heads, blocks * block // 64)
    prepare[grid](o, do, lse, gradient, stat, total, *o.stride()[:3], *do.stride()[:3], heads, seqlen, blocks, head_dim,
                  D=d, M=block, ROWS=64, MASK_D=True, DLSE=dlse, ZERO=True)  # fmt: skip
    assert torch.equal(total, torch.zeros_like(total))
    got = stat.transpose(2, 3).reshape(batch, heads, 2, blocks * block)
    delta = (o * do).sum(-1).transpose(1, 2) - (gradient if dlse else 0.0)
    delta[0, 1, 7] = 0.0
    torch.testing.assert_close(got[:, :, 1, :seqlen], delta, rtol=1e-5, atol=1e-5)
    expected = torch.where(lse == -math.inf, math.inf, lse * LOG2_E)
    torch.testing.assert_close(got[:, :, 0, :seqlen], expected, rtol=1e-6, atol=1e-6)
    assert (got[:, :, 0, seqlen:] == math.inf).all() and (got[:, :, 1, seqlen:] == 0).all()


@pytest.mark.parametrize("d", [64, 128])
def test_dq_finish(d, device):
    batch, seqlen, heads, head_dim = 2, 150, 3, d - 8
    block = 128 if d == 64 else 64
    blocks = -(-seqlen // block)
    dq = torch.randn(batch, heads, blocks * block, d, device=device)
    # fragments of 64 x 64, numbers in them in the order in which the threads of a warpgroup hold an accumulator
    tiles = dq.reshape(batch, heads, blocks * block // 64, 64, d // 64, 64).transpose(3, 4)
    order = tiles.reshape(-1, 4, 2, 8, 8, 4, 2).permute(0, 1, 4, 3, 5, 2, 6).reshape(batch, heads, blocks, 2, 4096)
    got = torch.full((batch, seqlen, heads, head_dim), math.nan, device=device)
    dq_finish[(batch * heads, blocks * 2)](order.contiguous(), got, *got.stride()[:3], heads, seqlen, blocks, head_dim,
                                           0.5, D=d, M=block, MASK_D=True)  # fmt: skip
    torch.testing.assert_close(got, 0.5 * dq[:, :, :seqlen, :head_dim].transpose(1, 2), rtol=0, atol=0)


SHAPES = {
    "one-head": Around(heads=1, finish_heads=1),
    "two-of-six": Around(numbers=1024, heads=8, zeros="last", finish_heads=8, reverse=(True, True)),
    "direct": Around(numbers=8192, heads=2, zeros="memset", direct=True, reverse=(True, False)),
}


@pytest.mark.parametrize("around", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("d, head_dim", [(64, 64), (128, 120)])
def test_other_shapes_around_give_the_same_bits(around, d, head_dim, device):
    batch, seqlen, heads, block = 2, 150, 6, 128 if d == 64 else 64
    o, do, q = (torch.randn(batch, seqlen, heads, head_dim, device=device) for _ in range(3))
    lse, dlse = (torch.randn(batch, heads, seqlen, device=device) for _ in range(2))
    lse[1, 2, 140] = -math.inf
    blocks = -(-seqlen // block)
    found = []
    for shapes in (None, around):
        total = torch.full((batch, heads, blocks, 2, 4096), math.nan, device=device)
        stat = hopper_backward._prepare((do, q, q, q, o, lse, dlse), blocks, block, d, total, shapes)
        assert torch.equal(total, torch.zeros_like(total))
        total = torch.arange(total.numel(), device=device, dtype=torch.float32).view(total.shape)
        dq = torch.full_like(q, math.nan)
        hopper_backward._finish(total, dq, 0.5, d, block, shapes)
        found.append((stat, dq))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert (stat[:, :, -1, 0, 150 % block :] == math.inf).all()


@pytest.mark.parametrize("around", SHAPES.values(), ids=SHAPES)
def test_other_shapes_prepare_without_a_sum(around, device):
    batch, seqlen, heads, head_dim = 1, 100, 2, 200
    o, do = (torch.randn(batch, seqlen, heads, head_dim, device=device) for _ in range(2))
    lse = torch.randn(batch, heads, seqlen, device=device)
    a, b = (hopper_backward._prepare((do, o, o, o, o, lse, None), 2, 64, 256, None, x) for x in (None, around))
    assert torch.equal(a, b)


def test_gradient_of_sinks(device):
    batch, seqlen, heads, d = 2, 70, 3, 64
    q, k, v = (torch.randn(batch, seqlen, heads, d, device=device) for _ in range(3))
    sinks = torch.randn(heads, device=device)
    o, lse = attention_reference(q, k, v, sinks=sinks, causal=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    stat = torch.full((batch, heads, 2, 2, 64), math.nan, device=device)
    total = torch.empty(1, device=device)
    prepare[(batch * heads, 2)](o, do, lse, dlse, stat, total, *o.stride()[:3], *do.stride()[:3], heads, seqlen, 2, d,
                                D=d, M=64, ROWS=64, MASK_D=False, DLSE=True, ZERO=False)  # fmt: skip
    truth = attention_truth_backward(do, q, k, v, dlse=dlse, sinks=sinks, causal=True)[3]
    torch.testing.assert_close(hopper_backward._sink_gradient(sinks, stat).double(), truth, rtol=1e-4, atol=1e-4)
