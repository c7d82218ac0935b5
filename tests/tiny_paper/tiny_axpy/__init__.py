"""y = a * x + y: the smallest kernel that is still a paper's worth of parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpu_accel.errors import InvalidInputError

__all__ = ["axpy", "reference"]


@triton.jit
def _axpy(x_ptr, y_ptr, out_ptr, a, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, a * x + y, mask=inside)


def axpy(a: float, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a * x + y for contiguous float32 vectors of one length."""
    if x.shape != y.shape or x.ndim != 1:
        raise InvalidInputError(f"x and y must be vectors of one length, got {tuple(x.shape)} and {tuple(y.shape)}")
    out = torch.empty_like(x) if out is None else out
    if x.numel():
        _axpy[(triton.cdiv(x.numel(), 256),)](x, y, out, a, x.numel(), block=256)
    return out


def reference(a: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    return a * x.double() + y.double()
