"""Sums of gradients in float32 fragments: what the Hopper backward of a ring adds to, and how they start and end.

A fragment is a block of 64 rows and 64 columns, 4096 numbers in the order in which the threads of a warpgroup hold them
(see `flash_attention3/hopper_backward_finish.py`). Sums of all steps stay in this order, also while they travel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.flash_attention3.device import LOG2E
from gpu_accel.flash_attention3.gluon_launch import QuickLaunch
from gpu_accel.flash_attention3.launch import launch, next_power_of_2

SIDE = 64  # rows and columns of a fragment
NUMBERS = SIDE * SIDE
_quick = functools.cache(QuickLaunch)


def _launch(kernel: Any, programs: int, arguments: tuple, constants: dict, *specialised: int) -> None:
    """Run a kernel; on a GPU by the variant already known for the dtypes and alignments of its tensors and for the
    integers that Triton specialises on."""
    options = dict(num_warps=4)
    if not arguments[0].is_cuda:
        launch(kernel, programs, arguments, {**constants, **options})
        return
    tensors = [(x.dtype, x.data_ptr() % 16) for x in arguments if isinstance(x, Tensor)]
    _quick(kernel)((*tensors, *specialised), programs, arguments, constants, options)


@triton.jit(do_not_specialize=["heads", "rows"])
def delta_kernel(
    o, do, out, o_sb, o_ss, o_sh, d_sb, d_ss, d_sh, heads, rows,
    R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """out[batch, head, row] = sum(o * do) over the head's columns."""
    blocks = tl.cdiv(rows, R)
    batch_head = tl.program_id(0) // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = tl.program_id(0) % blocks * R + tl.arange(0, R)
    col = tl.arange(0, D)
    here = (row < rows)[:, None] & (col < DIM)[None, :]
    row64 = row.to(tl.int64)[:, None]
    x = tl.load(o + batch * o_sb + head * o_sh + row64 * o_ss + col[None, :], mask=here, other=0.0).to(tl.float32)
    y = tl.load(do + batch * d_sb + head * d_sh + row64 * d_ss + col[None, :], mask=here, other=0.0).to(tl.float32)
    tl.store(out + batch_head.to(tl.int64) * rows + row, tl.sum(x * y, 1), mask=row < rows)


def row_delta(do: Tensor, o: Tensor) -> Tensor:
    """rowsum(dO * O) in float32, (batch, heads, rows), of (batch, rows, heads, head_dim) with unit last strides."""
    batch, rows, heads, dim = o.shape
    out = torch.empty((batch, heads, rows), dtype=torch.float32, device=o.device)
    if out.numel():
        d = next_power_of_2(dim)
        r = max(1, min(64, 8192 // d))
        strides = (*o.stride()[:3], *do.stride()[:3])
        arguments = (o, do, out, *strides, heads, rows)
        _launch(delta_kernel, triton.cdiv(rows, r) * batch * heads, arguments, dict(R=r, DIM=dim, D=d), *strides)
    return out


@triton.jit(do_not_specialize=["rows", "blocks"])
def statistics_kernel(lse, delta, out, l_sb, l_sh, l_ss, d_sb, d_sh, d_ss, heads, rows, blocks, M: tl.constexpr):
    """out[batch, head, block] = (lse in base 2, delta) of M rows; (+inf, 0) where no row is or it sees nothing."""
    batch_head = tl.program_id(0) // blocks
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    block = tl.program_id(0) % blocks
    row = block * M + tl.arange(0, M)
    here = row < rows
    x = tl.load(lse + batch * l_sb + head * l_sh + row.to(tl.int64) * l_ss, mask=here, other=float("inf")) * LOG2E
    y = tl.load(delta + batch * d_sb + head * d_sh + row.to(tl.int64) * d_ss, mask=here, other=0.0)
    at = out + (batch_head.to(tl.int64) * blocks + block) * (2 * M) + tl.arange(0, M)
    tl.store(at, tl.where(x == float("-inf"), float("inf"), x))
    tl.store(at + M, y)


def statistics(lse: Tensor, delta: Tensor, block: int) -> Tensor:
    """(batch, heads, blocks, 2, block) from lse and delta, (batch, heads, rows) float32 of any strides."""
    batch, heads, rows = lse.shape
    blocks = -(-rows // block)
    out = torch.empty((batch, heads, blocks, 2, block), dtype=torch.float32, device=lse.device)
    specialised = (*lse.stride(), *delta.stride(), heads)
    arguments = (lse, delta, out, *specialised, rows, blocks)
    _launch(statistics_kernel, blocks * batch * heads, arguments, dict(M=block), *specialised)
    return out


@triton.jit(do_not_specialize=["heads", "rows", "fragments"])
def gather_kernel(
    first, second, out, o_sb, o_ss, o_sh, heads, rows, fragments, scale, WIDE: tl.constexpr, TWO: tl.constexpr
):
    """One fragment of scale * (first + second) in rows and columns. WIDE: two fragments lie beside one another."""
    used = tl.minimum(fragments, tl.cdiv(rows, 64) * (2 if WIDE else 1))
    batch_head = tl.program_id(0) // used
    fragment = tl.program_id(0) % used
    at = (batch_head.to(tl.int64) * fragments + fragment) * 4096 + tl.arange(0, 4096)
    x = tl.load(first + at)
    if TWO:
        x += tl.load(second + at)
    # (row / 16, column / 8, row % 8, column / 2 % 4, row / 8 % 2, column % 2)
    x = tl.reshape(tl.permute(tl.reshape(x * scale, (4, 8, 8, 4, 2, 2)), (0, 4, 2, 1, 3, 5)), (64, 64))
    if WIDE:
        row0 = fragment // 2 * 64
        col0 = fragment % 2 * 64
    else:
        row0 = fragment * 64
        col0 = 0
    row = row0 + tl.arange(0, 64)
    col = col0 + tl.arange(0, 64)
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    place = batch * o_sb + head * o_sh + row.to(tl.int64)[:, None] * o_ss + col[None, :]
    tl.store(out + place, x.to(out.dtype.element_ty), mask=(row < rows)[:, None])


def gather(first: Tensor, second: Tensor | None, out: Tensor, *, scale: float) -> Tensor:
    """scale * (first + second), sums in fragments, into out (batch, rows, heads, 64 or 128) of any dtype.

    Each sum is contiguous, of batch * heads equal parts.
    """
    batch, rows, heads, dim = out.shape
    if out.numel():
        fragments = first.numel() // (batch * heads * NUMBERS)
        arguments = (
            first, first if second is None else second, out, *out.stride()[:3], heads, rows, fragments, float(scale),
        )  # fmt: skip
        used = min(fragments, -(-rows // SIDE) * (dim // SIDE))
        constants = dict(WIDE=dim == 2 * SIDE, TWO=second is not None)
        _launch(gather_kernel, used * batch * heads, arguments, constants, *out.stride()[:3])
    return out
