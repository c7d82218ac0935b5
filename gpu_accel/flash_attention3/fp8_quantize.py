"""Rounding tensors to fp8 with one scale per block of rows: formats, kernel and launcher.

    scale = max |x| / largest fp8 number,   x8 = round_to_nearest_even(x * (1 / scale)),   x ~ x8 * scale

One program holds one block of rows in registers (32 or 64 values a thread): read once, optionally turned by the rotary
embedding and multiplied by the random Hadamard matrix, largest magnitude, written once. So the goal is the speed of a
copy: 2 bytes read, 1 written.
Blocks of more than 32768 values, and a single scale for a whole tensor, need a first pass that only looks.

What decides the scale, written down:
* Only finite values count. Inf and NaN become NaN in fp8 (e4m3 has no Inf), so they stay visible in the result, and
  the other values of the block keep their precision. With the Hadamard matrix they spread over their row first.
* A block without a finite non-zero value has scale 1.
* Scales are at least 2**-126, so that 1 / scale is finite; values below about 2**-118 lose bits and may become 0.
* All arithmetic is float32 with correctly rounded divisions and no reordering: `reference_fp8.quantize_reference` gives
  the same bits. Not so in Triton's interpreter with RoPE of bfloat16: its cast to bfloat16 cuts off where it should
  round. Nor in `hopper_quantize.py`, which multiplies by the Hadamard matrix on tensor cores and says how close it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET, widen
from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, gluon_available
from gpu_accel.flash_attention3.hadamard import (
    as_bhsd,
    hadamard_block,
    load_rows,
    mix_rows,
    random_signs,
    tile_shape,
)
from gpu_accel.flash_attention3.launch import capability, launch
from gpu_accel.flash_attention3.rotary import load_rotated

_INTERPRET = tl.constexpr(INTERPRET)
MIN_SCALE = 2.0**-126
TRANSPOSED_PAD = 16  # TMA wants row pitches that are multiples of 16 bytes
TENSOR_CORES = True  # whether "auto" takes hopper_quantize.py
_TENSOR_CORE_DIMS, _TENSOR_CORE_ROWS = (64, 128), 128


@dataclass(frozen=True)
class Fp8Format:
    """An fp8 format; `p_shift` is the power of two by which attention scales probabilities into its range."""

    name: str
    dtype: torch.dtype
    largest: float
    mantissa_bits: int
    p_shift: int


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 448.0, 3, 8)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 57344.0, 2, 15)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def fp8_format(dtype: str | torch.dtype) -> Fp8Format:
    """The format called "e4m3" or "e5m2", or of a torch dtype."""
    for name, fmt in FORMATS.items():
        if dtype in (name, fmt.dtype):
            return fmt
    raise InvalidInputError(f"fp8 dtype must be 'e4m3' or 'e5m2', got {dtype!r}")


@triton.jit
def to_fp8(x, E5M2: tl.constexpr):
    """float32 -> fp8, to nearest even; the caller keeps |x| within the format. NaN stays NaN."""
    if _INTERPRET:
        # The interpreter's own cast (seen on 3.7.1) drops the carry of the mantissa and mangles NaN, so build the bits.
        BITS: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        MAGIC: tl.constexpr = 1.5 * 2.0 ** (24 - BIAS - BITS)  # adding it rounds to the smallest subnormal number
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        drop: tl.constexpr = 23 - BITS
        code = (size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop
        code = code - ((127 - BIAS) << BITS)
        small = (tl.abs(x) + MAGIC).to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(size < ((128 - BIAS) << 23), small, code)
        code = tl.where(size > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))
        out = code.to(tl.uint8)
        return out.to(tl.float8e5, bitcast=True) if E5M2 else out.to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e5) if E5M2 else x.to(tl.float8e4nv)


@triton.jit
def dot_fp8(a, b, acc):
    """`acc + a @ b` of fp8 operands with float32 sums; `acc` may be None."""
    if _INTERPRET:  # as in `compat.dot`
        a = widen(a, tl.float32)
        b = widen(b, tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _finite_amax(x):
    """(x with Inf replaced by NaN, largest finite |x|)."""
    a = tl.abs(x)
    largest = tl.max(tl.max(a, 1), 0)  # ignores NaN
    if largest == float("inf"):
        finite = a < float("inf")
        x = tl.where(finite, x, float("nan"))
        largest = tl.max(tl.max(tl.where(finite, a, 0.0), 1), 0)
    return x, largest


@triton.jit
def _load_raw(x, stride, row0, end, ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr):
    """(rows as they are, largest finite |x|): 16 bits a value leave registers for two programs an SM."""
    r = row0 + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    pointers = x + r.to(tl.int64)[:, None] * stride + c[None, :]
    tile = tl.load(pointers, mask=(r < end)[:, None] & (c < D)[None, :], other=0.0)
    a = tl.abs(tile.to(tl.float32))
    return tile, tl.max(tl.max(tl.where(a < float("inf"), a, 0.0), 1), 0)


@triton.jit
def _store_rows(
    out, y, row, end, stop, pitch,
    ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, TRANSPOSE: tl.constexpr, E5M2: tl.constexpr,
):  # fmt: skip
    """Rows [row, stop) of y, as rows or as columns `pitch` apart; zeros from row `end` on."""
    r = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    if TRANSPOSE:
        y8 = to_fp8(tl.where((r < end)[:, None], y, 0.0), E5M2)
        pointers = out + c.to(tl.int64)[:, None] * pitch + r[None, :]
        tl.store(pointers, tl.trans(y8), mask=(c < D)[:, None] & (r < stop)[None, :])
    else:
        pointers = out + r.to(tl.int64)[:, None] * D + c[None, :]
        tl.store(pointers, to_fp8(y, E5M2), mask=(r < stop)[:, None] & (c < D)[None, :])


@triton.jit
def _load_pairs(rows, r, end, cos, sin, ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, ROTARY: tl.constexpr):
    """`load_rotated` of neighbouring pairs, which lie in one thread: loads stay wide, an angle is loaded once."""
    c = tl.arange(0, COLS)
    pair = tl.arange(0, COLS // 2)
    here = (r < end)[:, None]
    x = tl.load(rows[:, None] + c[None, :], mask=here & (c < D)[None, :], other=0.0)
    a, b = tl.split(tl.reshape(x, (ROWS, COLS // 2, 2)))
    turns = here & (pair < ROTARY // 2)[None, :]
    places = r.to(tl.int64)[:, None] * (ROTARY // 2) + pair[None, :]
    cosine = tl.load(cos + places, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + places, mask=turns, other=0.0).to(tl.float32)
    wide_a = a.to(tl.float32)
    wide_b = b.to(tl.float32)
    first = (wide_a * cosine - wide_b * sine).to(x.dtype)
    second = (wide_b * cosine + wide_a * sine).to(x.dtype)
    turned = tl.join(tl.where(turns, first, a), tl.where(turns, second, b))
    return tl.reshape(turned, (ROWS, COLS))


@triton.jit
def _load(
    x, stride, row, end, signs, cos, sin,
    ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr, FACTOR: tl.constexpr,
    HADAMARD: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS) as float32: turned, rounded to their dtype as RoPE alone would, and times M."""
    if ROTARY == 0:
        tile = load_rows(x, stride, row, end - row, signs, ROWS, D, COLS, LOG2, FACTOR, HADAMARD)
    else:
        r = row + tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
        pointers = x + r.to(tl.int64) * stride
        if INTERLEAVED:
            tile = _load_pairs(pointers, r, end, cos, sin, ROWS, D, COLS, ROTARY).to(tl.float32)
        else:
            tile = load_rotated(pointers, c, r < end, r, cos, sin, end, D, ROTARY, False, True).to(tl.float32)
        if HADAMARD:
            tile = mix_rows(tile, signs, ROWS, D, COLS, LOG2, FACTOR)
    return tile


@triton.jit
def _quantize_kernel(
    x, signs, out, scales, cos, sin, sb, sh, ss, heads, seqlen, pitch, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr,
    FACTOR: tl.constexpr, HADAMARD: tl.constexpr, TRANSPOSE: tl.constexpr, E5M2: tl.constexpr,
    LARGEST: tl.constexpr, MODE: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One block of rows. MODE 0: scale and values; 1: only the largest magnitude (to `scales`); 2: scale is given."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // blocks
    block = pid % blocks
    row0 = block * BLOCK
    end = tl.minimum(seqlen, row0 + BLOCK)
    stop = tl.minimum(pitch, row0 + BLOCK) if TRANSPOSE else end  # transposed rows are padded with zeros to the pitch
    x += (bh // heads) * sb + (bh % heads) * sh
    out += bh * D * (pitch if TRANSPOSE else seqlen)
    CHUNKS: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
    RAW: tl.constexpr = TRANSPOSE and CHUNKS == 1 and MODE == 0 and not HADAMARD and ROTARY == 0
    if RAW:
        tile, amax = _load_raw(x, ss, row0, end, ROWS, D, COLS)
    elif CHUNKS == 1 and MODE != 2:
        tile = _load(
            x, ss, row0, end, signs, cos, sin, ROWS, D, COLS, LOG2, FACTOR, HADAMARD, ROTARY, INTERLEAVED
        )  # fmt: skip
        tile, amax = _finite_amax(tile)
    elif MODE != 2:
        amax = 0.0
        for i in range(CHUNKS):
            row = row0 + i * ROWS
            t = _load(
                x, ss, row, end, signs, cos, sin, ROWS, D, COLS, LOG2, FACTOR, HADAMARD, ROTARY, INTERLEAVED
            )  # fmt: skip
            t, largest = _finite_amax(t)
            amax = tl.maximum(amax, largest)
    if MODE == 1:
        tl.store(scales + pid, amax)
    else:
        if MODE == 0:
            scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, LARGEST), 1.1754943508222875e-38), 1.0)
            tl.store(scales + pid, scale)
        else:
            scale = tl.load(scales)
        inverse = tl.div_rn(1.0, scale)
        if RAW:
            y = tile.to(tl.float32)
            y = tl.where(tl.abs(y) < float("inf"), y * inverse, float("nan"))
            _store_rows(out, y, row0, end, stop, pitch, ROWS, D, COLS, TRANSPOSE, E5M2)
        elif CHUNKS == 1 and MODE == 0:
            _store_rows(out, tile * inverse, row0, end, stop, pitch, ROWS, D, COLS, TRANSPOSE, E5M2)
        else:
            for i in range(CHUNKS):
                row = row0 + i * ROWS
                t = _load(
                    x, ss, row, end, signs, cos, sin, ROWS, D, COLS, LOG2, FACTOR, HADAMARD, ROTARY, INTERLEAVED
                )  # fmt: skip
                t, largest = _finite_amax(t)
                _store_rows(out, t * inverse, row, end, stop, pitch, ROWS, D, COLS, TRANSPOSE, E5M2)


_quick = QuickLaunch(_quantize_kernel)


def scale_of(amax: Tensor, largest: float) -> Tensor:
    """The scale for a largest finite magnitude (float32 tensor), as the kernel computes it."""
    # divide by a tensor: dividing by a Python number becomes a multiplication on CUDA, which rounds differently
    scale = (amax / torch.full_like(amax, largest)).clamp_min(MIN_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def quantized_shapes(
    x: Tensor, block_size: int, per_block: bool, transpose: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of (values, scales) for x (..., seqlen, dim)."""
    *lead, seqlen, dim = x.shape
    pitch = -(-seqlen // TRANSPOSED_PAD) * TRANSPOSED_PAD
    values = (*lead, dim, pitch) if transpose else (*lead, seqlen, dim)
    return tuple(values), ((*lead, -(-seqlen // block_size)) if per_block else ())


def tensor_core_refusal(
    x: Tensor, block_size: int, per_block: bool, hadamard: bool, transpose: bool, rotary: bool
) -> str | None:
    """Why `hopper_quantize.py` and `hopper_hadamard.py` cannot run a call, or None."""
    if not x.is_cuda or capability(x.device) != (9, 0):
        return "needs an NVIDIA GPU of compute capability 9.0 (H100, H200)"
    if not gluon_available():
        return "this Triton has no usable Gluon dialect"
    if hadamard == transpose or rotary:
        return "is for either hadamard=True or transpose=True, without rotary tables"
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[-1] not in _TENSOR_CORE_DIMS:
        return f"takes bfloat16 and float16 of head_dim 64 and 128, got {x.dtype} of {x.shape[-1]}"
    if not per_block or block_size != _TENSOR_CORE_ROWS:
        got = f"block_size {block_size}" if per_block else "one for all"
        return f"takes one scale per {_TENSOR_CORE_ROWS} rows, got {got}"
    return None


@torch.library.custom_op("gpu_accel::fp8_block_quantize", mutates_args=())
def quantize_op(
    x: Tensor, block_size: int, per_block: bool, dtype: str, hadamard: bool, seed: int, transpose: bool,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = True, tensor_cores: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`quantize_blocks` as compilers and modes see it."""
    return quantize_blocks(
        x, block_size, per_block, dtype, hadamard, seed, transpose, cos, sin, interleaved, tensor_cores
    )  # fmt: skip


def quantize_blocks(
    x: Tensor, block_size: int, per_block: bool, dtype: str, hadamard: bool, seed: int, transpose: bool,
    cos: Tensor | None = None, sin: Tensor | None = None, interleaved: bool = True, tensor_cores: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel; arguments are checked by `fp8.fp8_block_quantize`, `tensor_cores` by `tensor_core_refusal`."""
    fmt = FORMATS[dtype]
    values_shape, scales_shape = quantized_shapes(x, block_size, per_block, transpose)
    out = torch.empty(values_shape, dtype=fmt.dtype, device=x.device)
    scales = torch.empty(scales_shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out, scales.fill_(1.0)
    view = as_bhsd(x)
    batch, heads, seqlen, dim = view.shape
    if tensor_cores:
        from gpu_accel.flash_attention3 import hopper_hadamard, hopper_quantize

        if hadamard and dim == hopper_hadamard.DIM:
            hopper_hadamard.quantize(view, seed, out, scales, fmt.largest)
        else:
            signs = random_signs(dim, seed, x.device) if hadamard else scales
            hopper_quantize.quantize(view, signs, out, scales, fmt.largest, transpose)
        return out, scales
    # a longer block has the same scale, but the kernel would loop over rows that do not exist
    block_size = min(block_size, max(16, triton.next_power_of_2(seqlen)))
    hadamard_size = hadamard_block(dim) if hadamard else 1
    # the transposing store holds the tile in two layouts, and RoPE its partners and angles: so they get half the tile
    rows, cols, warps = tile_shape(block_size, dim, 16384 if transpose or cos is not None else 32768)
    # 64 registers suffice for 32 values a thread, and let two programs share an SM: one loads while one stores
    raw = per_block and not hadamard and cos is None and x.element_size() == 2 and block_size <= rows
    narrow = rows * cols <= 1024 * warps and (raw or not transpose)
    limit: dict[str, object] = {"maxnreg": 64} if narrow and cos is None else {}
    if cos is not None:  # products and sums of RoPE round one by one, as in torch
        limit["enable_fp_fusion"] = False
    blocks = triton.cdiv(seqlen, block_size)
    programs = batch * heads * blocks
    signs = random_signs(dim, seed, x.device) if hadamard else scales
    partial = scales if per_block else torch.empty(programs, dtype=torch.float32, device=x.device)

    def run(target: Tensor, mode: int) -> None:
        turns = (signs, signs) if cos is None or sin is None else (cos, sin)
        arguments = (view, signs, out, target, *turns, *view.stride()[:3], heads, seqlen, values_shape[-1], blocks)
        options = dict(
            BLOCK=block_size, ROWS=rows, D=dim, COLS=cols, LOG2=hadamard_size.bit_length() - 1,
            FACTOR=1 / math.sqrt(hadamard_size), HADAMARD=hadamard, TRANSPOSE=transpose, E5M2=dtype == "e5m2",
            LARGEST=fmt.largest, MODE=mode, ROTARY=0 if cos is None else 2 * cos.shape[1], INTERLEAVED=interleaved,
        )  # fmt: skip
        if x.is_cuda:
            # what Triton would look up in every call: which addresses and numbers are multiples of 16, 1, or 64-bit
            aligned = (t.data_ptr() % 16 == 0 for t in arguments[:6])
            shapes = ((n % 16 == 0, n == 1, n >> 31 == 0) for n in arguments[6:])
            key = (x.dtype, fmt.dtype, turns[0].dtype, *aligned, *shapes)
            _quick(key, programs, arguments, options, dict(num_warps=warps, **limit))
        else:
            launch(_quantize_kernel, programs, arguments, dict(options, num_warps=warps, **limit))

    if per_block:
        run(scales, 0)
    else:
        run(partial, 1)
        # fmax ignores the NaN of blocks that hold nothing else
        scales = scale_of(torch.nan_to_num(partial, nan=0.0).amax(), fmt.largest)
        run(scales, 2)
    return out, scales


@quantize_op.register_fake
def _(
    x, block_size, per_block, dtype, hadamard, seed, transpose, cos=None, sin=None, interleaved=True, tensor_cores=False
):
    values_shape, scales_shape = quantized_shapes(x, block_size, per_block, transpose)
    return (
        torch.empty(values_shape, dtype=FORMATS[dtype].dtype, device=x.device),
        torch.empty(scales_shape, dtype=torch.float32, device=x.device),
    )
