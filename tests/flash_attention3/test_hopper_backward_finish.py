"""What surrounds the Hopper backward, in plain Triton, against torch: row statistics, and dQ out of its fragments."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.flash_attention3 import hopper_backward
from gpu_accel.flash_attention3.reference import attention_reference, attention_truth_backward

LOG2_E = 1.4426950408889634


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("heads", [3, 4])
def test_prepare(heads, d, dlse, device):
    """Odd lengths, a head_dim filled with zeros, heads by themselves and several in one program."""
    batch, seqlen, head_dim, block = 2, 150, d - 24, 128 if d == 64 else 64
    o, do = (torch.randn(batch, seqlen, heads, head_dim, device=device) for _ in range(2))
    lse = torch.randn(batch, heads, seqlen, device=device)
    lse[0, 1, 7] = -math.inf
    do[0, 7, 1] = math.nan  # where a row sees nothing, do does not matter
    gradient = torch.randn_like(lse) if dlse else None
    blocks = -(-seqlen // block)
    total = None if d == 256 else torch.full((batch, heads, blocks, 2, 4096), math.nan, device=device)
    stat = hopper_backward._prepare((do, o, o, o, o, lse, gradient), blocks, block, d, total)
    assert total is None or torch.equal(total, torch.zeros_like(total))
    got = stat.transpose(2, 3).reshape(batch, heads, 2, blocks * block)
    delta = (o * do).sum(-1).transpose(1, 2) - (0.0 if gradient is None else gradient)
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
    hopper_backward._finish(order.contiguous(), got, 0.5, d, block)
    torch.testing.assert_close(got, 0.5 * dq[:, :, :seqlen, :head_dim].transpose(1, 2), rtol=0, atol=0)


def test_gradient_of_sinks(device):
    batch, seqlen, heads, d = 2, 70, 3, 64
    q, k, v = (torch.randn(batch, seqlen, heads, d, device=device) for _ in range(3))
    sinks = torch.randn(heads, device=device)
    o, lse = attention_reference(q, k, v, sinks=sinks, causal=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    stat = hopper_backward._prepare((do, q, k, v, o, lse, dlse), 2, 64, d, None)
    truth = attention_truth_backward(do, q, k, v, dlse=dlse, sinks=sinks, causal=True)[3]
    torch.testing.assert_close(hopper_backward._sink_gradient(sinks, stat).double(), truth, rtol=1e-4, atol=1e-4)
