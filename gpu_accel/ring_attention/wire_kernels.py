"""Encoding and decoding of wire.py in one pass each, in plain Triton: the bytes are those of its torch operations.

A program takes a few heads of a few rows. A coded row of a head is a float32 scale and `dim` bytes, so nothing is
aligned to more than 4 bytes: four of them are moved at once where rows begin at multiples of four, else one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import widen
from gpu_accel.flash_attention3.fp8_quantize import E4M3, E5M2, to_fp8
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2

_ELEMENTS, _HEADS, _ROWS = 4096, 32, 4  # of a program, at most


def refuse(x: Tensor, coded: Tensor, wire: torch.dtype) -> str | None:
    """Why these kernels cannot do it, or None; x (batch, rows, heads, dim), of dtype float16, bfloat16 or float32."""
    if not x.is_cuda or torch.version.hip:
        return "they are for NVIDIA GPUs"
    if capability(x.device) < (8, 9) and wire == torch.float8_e4m3fn:
        return "before compute capability 8.9 Triton has no float8_e4m3fn"
    if x.dim() != 4 or x.stride(-1) != 1 or coded.stride(-1) != 1:
        return "they take (batch, rows, heads, dim) with neighbours in memory"
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"they do not take {x.dtype}"
    return None


@triton.jit
def _places(heads, rows, HEADS: tl.constexpr, RUN: tl.constexpr):
    """(batch, the first of RUN rows, HEADS heads) of this program. Only whole programs divide: a division of each row's
    index had been most of the instructions."""
    blocks = tl.cdiv(heads, HEADS)
    runs = tl.cdiv(rows, RUN)
    program = tl.program_id(0)
    run = program // blocks
    head = (program - run * blocks) * HEADS + tl.arange(0, HEADS)
    batch = run // runs
    return batch.to(tl.int64), (run - batch * runs) * RUN, head


@triton.jit(do_not_specialize=["heads", "rows"])
def encode_kernel(
    x, out, x_sb, x_ss, x_sh, o_sb, o_ss, o_sh, heads, rows, largest,
    WIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    batch, first, head = _places(heads, rows, HEADS, RUN)
    head64 = head.to(tl.int64)
    col = tl.arange(0, D)
    for i in tl.static_range(RUN):
        row = (first + i).to(tl.int64)
        there = (head < heads) & (row < rows)
        inside = there[:, None] & (col < DIM)[None, :]
        at = x + (batch * x_sb + row * x_ss)
        numbers = tl.load(at + (head64 * x_sh)[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        bits = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of the largest; NaN is above infinity
        quotient = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((HEADS,), largest, tl.float32))
        exponent = (quotient.to(tl.int32, bitcast=True) >> 23) - 126  # as of frexp; of 0 it is 0
        exponent = tl.where(quotient == 0.0, 0, tl.maximum(exponent, -120))
        finite = bits < 0x7F800000
        scale = tl.where(finite, (exponent + 127) << 23, 0x7FC00000)
        inverse = tl.where(finite, (127 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
        coded = to_fp8(numbers * inverse[:, None], WIDE).to(tl.uint8, bitcast=True)
        start = out + UNIT * (batch * o_sb + row * o_ss) + UNIT * (head64 * o_sh)
        if UNIT == 4:
            tl.store(start.to(tl.pointer_type(tl.int32), bitcast=True), scale, mask=there)
        else:
            for byte in tl.static_range(4):
                tl.store(start + byte, ((scale >> (8 * byte)) & 0xFF).to(tl.uint8), mask=there)
        tl.store(start[:, None] + 4 + col[None, :], coded, mask=inside)


@triton.jit(do_not_specialize=["heads", "rows"])
def decode_kernel(
    coded, out, c_sb, c_ss, c_sh, o_sb, o_ss, o_sh, heads, rows,
    WIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    batch, first, head = _places(heads, rows, HEADS, RUN)
    head64 = head.to(tl.int64)
    col = tl.arange(0, D)
    for i in tl.static_range(RUN):
        row = (first + i).to(tl.int64)
        there = (head < heads) & (row < rows)
        inside = there[:, None] & (col < DIM)[None, :]
        start = coded + UNIT * (batch * c_sb + row * c_ss) + UNIT * (head64 * c_sh)
        if UNIT == 4:
            scale = tl.load(start.to(tl.pointer_type(tl.int32), bitcast=True), mask=there, other=0)
        else:
            scale = tl.zeros((HEADS,), tl.int32)
            for byte in tl.static_range(4):
                scale |= tl.load(start + byte, mask=there, other=0).to(tl.int32) << (8 * byte)
        numbers = tl.load(start[:, None] + 4 + col[None, :], mask=inside, other=0)
        numbers = numbers.to(tl.float8e5, bitcast=True) if WIDE else numbers.to(tl.float8e4nv, bitcast=True)
        numbers = widen(numbers, tl.float32) * scale.to(tl.float32, bitcast=True)[:, None]
        at = out + (batch * o_sb + row * o_ss)
        tl.store(at + (head64 * o_sh)[:, None] + col[None, :], numbers.to(out.dtype.element_ty), mask=inside)


def encode_into(x: Tensor, wire: torch.dtype, out: Tensor) -> None:
    """x (batch, rows, heads, dim) into out (batch, rows, heads, dim + 4), bytes."""
    largest = (E5M2 if wire == E5M2.dtype else E4M3).largest
    _run(encode_kernel, x, out, out, x.shape, (largest,), wire)


def decode_into(coded: Tensor, wire: torch.dtype, out: Tensor) -> None:
    """coded (batch, rows, heads, dim + 4), bytes, into out (batch, rows, heads, dim)."""
    _run(decode_kernel, coded, out, coded, out.shape, (), wire)


def _run(
    kernel: Any, source: Tensor, out: Tensor, coded: Tensor, shape: torch.Size, more: tuple, wire: torch.dtype
) -> None:
    batch, rows, heads, dim = shape
    if not out.numel():
        return
    d, block = next_power_of_2(dim), min(_HEADS, next_power_of_2(heads))
    run = max(1, min(_ROWS, _ELEMENTS // (d * block)))
    whole = dim % 4 == 0 and not any(n % 4 for n in (coded.data_ptr(), *coded.stride()[:3]))
    unit = 4 if whole else 1  # of strides of coded rows: the compiler then knows that a word may be moved at once
    strides = [n // unit if x is coded else n for x in (source, out) for n in x.stride()[:3]]
    arguments = (source, out, *strides, heads, rows, *more)
    options = dict(WIDE=wire == E5M2.dtype, DIM=dim, D=d, HEADS=block, RUN=run, UNIT=unit, num_warps=4)
    launch(kernel, batch * triton.cdiv(rows, run) * triton.cdiv(heads, block), arguments, options)
