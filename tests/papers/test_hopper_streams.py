"""The kernels that measure memory: every element, at sizes around a block."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError
from papers.hopper_microbenchmarks import streams
from papers.hopper_microbenchmarks.streams import BLOCK

pytestmark = pytest.mark.skipif(not INTERPRET and not torch.cuda.is_available(), reason="needs a GPU or interpreter")
DEVICE = "cpu" if INTERPRET else "cuda"
sizes = pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])


def guarded(n):
    """n poisoned elements inside a larger tensor, whose other elements must not change."""
    whole = torch.full((n + 2 * 64,), float("nan"), device=DEVICE)
    return whole, whole[64 : 64 + n]


@sizes
def test_copy(n):
    src = torch.randn(n, device=DEVICE)
    whole, dst = guarded(n)
    assert torch.equal(streams.copy(src, dst), src)
    assert whole.isnan().sum() == 128


@sizes
def test_fill(n):
    whole, dst = guarded(n)
    assert (streams.fill(dst, 2.5) == 2.5).all()
    assert whole.isnan().sum() == 128


@sizes
def test_sum_blocks(n):
    src = torch.randn(n, device=DEVICE)
    out = streams.sum_blocks(src)
    truth = torch.stack([part.double().sum() for part in src.split(BLOCK)]) if n else src.double()
    assert out.shape == truth.shape
    assert torch.allclose(out.double(), truth, rtol=0, atol=BLOCK**0.5 * 2**-20)


def test_what_they_refuse():
    x = torch.zeros(8, device=DEVICE)
    with pytest.raises(InvalidInputError, match="must be alike"):
        streams.copy(x, x[:4])
    with pytest.raises(InvalidInputError, match="contiguous float32"):
        streams.fill(x[::2], 0.0)
    with pytest.raises(InvalidInputError, match="contiguous float32"):
        streams.sum_blocks(x.double())
    with pytest.raises(InvalidInputError, match="sums"):
        streams.sum_blocks(x, x)


def test_nothing_can_be_launched():
    streams.launch_nothing()
