"""Encoding and decoding of wire.py in one pass each, in plain Triton: the bytes are those of its torch operations.

A program takes ROWS rows of heads; a coded row is a float32 scale and `dim` bytes, 4 + dim of them, so nothing is
aligned to more than 4 bytes and bytes are moved one by one, side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import widen
from gpu_accel.flash_attention3.fp8_quantize import E4M3, E5M2, to_fp8
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2

_ELEMENTS = 2048  # of a program


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
def _places(heads, rows, count, ROWS: tl.constexpr):
    """(batch, row, head, whether it is there) of this program's rows of heads."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return at // heads // rows, at // heads % rows, at % heads, at < count


@triton.jit(do_not_specialize=["heads", "rows", "count"])
def encode_kernel(
    x, out, x_sb, x_ss, x_sh, o_sb, o_ss, o_sh, heads, rows, count, largest,
    WIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, row, head, there = _places(heads, rows, count, ROWS)
    col = tl.arange(0, D)
    here = there[:, None] & (col < DIM)[None, :]
    numbers = tl.load(x + (batch * x_sb + row * x_ss + head * x_sh)[:, None] + col[None, :], mask=here, other=0.0)
    numbers = numbers.to(tl.float32)
    bits = tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of the largest; NaN is above infinity
    quotient = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((ROWS,), largest, tl.float32))
    exponent = (quotient.to(tl.int32, bitcast=True) >> 23) - 126  # as of frexp; of 0 it is 0
    exponent = tl.where(quotient == 0.0, 0, tl.maximum(exponent, -120))
    finite = bits < 0x7F800000
    scale = tl.where(finite, (exponent + 127) << 23, 0x7FC00000)
    inverse = tl.where(finite, (127 - exponent) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    start = out + batch * o_sb + row * o_ss + head * o_sh
    for i in tl.static_range(4):
        tl.store(start + i, ((scale >> (8 * i)) & 0xFF).to(tl.uint8), mask=there)
    coded = to_fp8(numbers * inverse[:, None], WIDE).to(tl.uint8, bitcast=True)
    tl.store(start[:, None] + 4 + col[None, :], coded, mask=here)


@triton.jit(do_not_specialize=["heads", "rows", "count"])
def decode_kernel(
    coded, out, c_sb, c_ss, c_sh, o_sb, o_ss, o_sh, heads, rows, count,
    WIDE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, row, head, there = _places(heads, rows, count, ROWS)
    col = tl.arange(0, D)
    here = there[:, None] & (col < DIM)[None, :]
    start = coded + batch * c_sb + row * c_ss + head * c_sh
    scale = tl.zeros((ROWS,), tl.int32)
    for i in tl.static_range(4):
        scale |= tl.load(start + i, mask=there, other=0).to(tl.int32) << (8 * i)
    numbers = tl.load(start[:, None] + 4 + col[None, :], mask=here, other=0)
    numbers = numbers.to(tl.float8e5, bitcast=True) if WIDE else numbers.to(tl.float8e4nv, bitcast=True)
    numbers = widen(numbers, tl.float32) * scale.to(tl.float32, bitcast=True)[:, None]
    place = (batch * o_sb + row * o_ss + head * o_sh)[:, None] + col[None, :]
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=here)


def encode_into(x: Tensor, wire: torch.dtype, out: Tensor) -> None:
    """x (batch, rows, heads, dim) into out (batch, rows, heads, dim + 4), bytes."""
    largest = (E5M2 if wire == E5M2.dtype else E4M3).largest
    _run(encode_kernel, x, out, x.shape, (largest,), wire)


def decode_into(coded: Tensor, wire: torch.dtype, out: Tensor) -> None:
    """coded (batch, rows, heads, dim + 4), bytes, into out (batch, rows, heads, dim)."""
    _run(decode_kernel, coded, out, out.shape, (), wire)


def _run(kernel, source: Tensor, out: Tensor, shape: torch.Size, more: tuple, wire: torch.dtype) -> None:
    batch, rows, heads, dim = shape
    if not out.numel():
        return
    d = next_power_of_2(dim)
    per_program = max(1, _ELEMENTS // d)
    count = batch * rows * heads
    arguments = (source, out, *source.stride()[:3], *out.stride()[:3], heads, rows, count, *more)
    options = dict(WIDE=wire == E5M2.dtype, DIM=dim, D=d, ROWS=per_program, num_warps=4)
    launch(kernel, triton.cdiv(count, per_program), arguments, options)
