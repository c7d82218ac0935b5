"""Copy, read, write and do nothing: the plain Triton kernels that measure what device memory and a launch give.

One program moves `block` elements as 16-byte accesses of its threads. The read keeps one sum for each program, so that
no load can be left out and the traffic of the results is nothing beside that of the data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import HardwareError, InvalidInputError

__all__ = ["copy", "fill", "launch_nothing", "sum_blocks"]

BLOCK = 4096
_WARPS = 8


@triton.jit
def _copy(src, dst, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(dst + at, tl.load(src + at, mask=at < n), mask=at < n)


@triton.jit
def _fill(dst, value, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(dst + at, tl.full((block,), value, dst.dtype.element_ty), mask=at < n)


@triton.jit
def _sum(src, dst, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.sum(tl.load(src + at, mask=at < n, other=0.0), axis=0)
    tl.store(dst + tl.program_id(0), total)


@triton.jit
def _nothing():
    pass


def copy(src: Tensor, dst: Tensor) -> Tensor:
    """dst = src, both contiguous float32 of one size; returns dst."""
    _check(src, dst)
    if src.shape != dst.shape:
        raise InvalidInputError(f"src has shape {tuple(src.shape)} and dst {tuple(dst.shape)}; they must be alike")
    if src.numel():
        _copy[_grid(src)](src, dst, src.numel(), block=BLOCK, num_warps=_WARPS)
    return dst


def fill(dst: Tensor, value: float) -> Tensor:
    """Every element of the contiguous float32 tensor becomes `value`; returns dst."""
    _check(dst)
    if dst.numel():
        _fill[_grid(dst)](dst, float(value), dst.numel(), block=BLOCK, num_warps=_WARPS)
    return dst


def sum_blocks(src: Tensor, out: Tensor | None = None) -> Tensor:
    """The sums of BLOCK elements each, as float32 (ceil(n / BLOCK),), of a contiguous float32 tensor of n elements."""
    _check(src)
    blocks = triton.cdiv(src.numel(), BLOCK)
    out = src.new_empty(blocks) if out is None else out
    _check(src, out)
    if out.shape != (blocks,):
        raise InvalidInputError(f"out has shape {tuple(out.shape)}; {src.numel()} elements have ({blocks},) sums")
    if blocks:
        _sum[_grid(src)](src, out, src.numel(), block=BLOCK, num_warps=_WARPS)
    return out


def launch_nothing() -> None:
    """Launch one program that does nothing."""
    _nothing[(1,)](num_warps=1)


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), BLOCK),)


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise InvalidInputError(f"a contiguous float32 tensor is needed, not {x.dtype} with strides {x.stride()}")
        if x.device != tensors[0].device:
            raise InvalidInputError(f"tensors lie on {x.device} and {tensors[0].device}; put them on one device")
        if x.device.type == "cpu" and not INTERPRET:
            raise HardwareError("the kernel needs a GPU tensor, or TRITON_INTERPRET=1 before the import")
