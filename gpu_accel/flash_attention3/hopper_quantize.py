"""Quantising on tensor cores, for Hopper (sm_90a) in Gluon: rows times the Hadamard matrix, or transposed.

    y = x M              wgmma of 16-bit rows with a matrix of +-1: every product is exact, sums are float32
    y = I x^T            with TRANSPOSE: a product with the identity, which is exact
    scale = max |y| / largest fp8 number,   x8 = round(y / scale)

The butterflies of `fp8_quantize.py` move every number between threads once for three of seven strides at head_dim 128,
which keeps the path of exchanges busy for two thirds of the time. Here 128 x 128 x 128 multiplications take the tensor
cores 1024 clocks, where memory gives a block 2600 (H200), and a thread is left with maximum, multiplication and
conversion of each of its numbers.

    program      `programs` an SM, persistent; block after block of 128 rows
    x            `stages` buffers, filled by TMA ahead of time (rows behind the sequence's end come as zeros)
    M            made once a program, in shared memory: (-1)**popcount(i & j) times the sign of row i
    columns      of M stand in the order that gives a thread 16 neighbours of a row of y, so that it writes 16 bytes
    barriers     one mbarrier a buffer; a buffer is filled anew behind the maximum of the block, where all warps met

What differs from `quantize_reference`. With M: the order of additions (and that the tensor cores cut off instead of
rounding), so y may be off by `sum_error(dim)` times the sum of magnitudes of its row of x, and rounds to the
neighbouring fp8 number where it lies that close to the middle. Sums beyond 3.4e38 are Inf in one order and may not be
in another. Transposed: only that -0 becomes 0.

With the Hadamard matrix at head_dim 128 `hopper_hadamard.py` is taken, where x goes to registers straight away.

Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpu_accel.gluon_compat import reinterpret, tma_load

from .gluon_launch import QuickLaunch, addressable, multiprocessors
from .hopper_fp8 import rows_map

ROWS = 128  # rows of a block, which has one scale


@gluon.jit
def column(n):
    """The column of y that column n of the accumulator holds: 8 j + 2 t + e -> 64 (j / 8) + 16 t + 2 (j % 8) + e."""
    return (n & ~63) + ((n & 6) << 3) + ((n & 56) >> 2) + (n & 1)


@gluon.jit
def _make_matrix(m_words, signs, WARPS: gl.constexpr, IDENTITY: gl.constexpr, BFLOAT16: gl.constexpr):
    """M transposed (a row a column of y), numbers of +-1 in 16 bits, or the identity; two of them a word."""
    D: gl.constexpr = m_words.shape[0]
    COLS: gl.constexpr = D // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // COLS, COLS], [WARPS, 1], [1, 0])
    n = gl.arange(0, D, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    k = 2 * gl.arange(0, D // 2, layout=gl.SliceLayout(0, LAYOUT))
    ONE: gl.constexpr = 0x3F80 if BFLOAT16 else 0x3C00
    if IDENTITY:
        words = gl.where(n == k[None, :], ONE, 0) | gl.where(n == k[None, :] + 1, ONE << 16, 0)
    else:
        signs_of_two = gl.where(gl.load(signs + k) < 0, 1 << 15, 0) | gl.where(gl.load(signs + k + 1) < 0, -1 << 31, 0)
        n = column(n)
        both = n & k[None, :]
        odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1  # whether the number of ones is odd
        words = (odd * -0x7FFF8000) ^ (((n & 1) << 31) | (ONE << 16 | ONE)) ^ signs_of_two[None, :]
    m_words.store(words)


@gluon.jit
def _fetch(x_desc, full, x_bufs, slot, tile, tiles, heads, blocks):
    """Start loading block `tile`, if there is one, into buffer `slot`."""
    ROWS: gl.constexpr = x_bufs.shape[1]
    if tile < tiles:
        row = tile // blocks
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes)
        tma_load(
            x_desc, [row // heads, row % heads, (tile % blocks) * ROWS, 0], full.index(slot), x_bufs.index(slot)
        )  # fmt: skip


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def finite(y):
    """(y with NaN for what is not finite, the largest magnitude of what is)."""
    is_finite = gl.abs(y) < float("inf")
    y = gl.where(is_finite, y, float("nan"))
    return y, gl.max(gl.max(gl.where(is_finite, gl.abs(y), 0.0), axis=1), axis=0)


@gluon.jit
def quantized(y, largest, scales, tile, dtype: gl.constexpr, FACTOR: gl.constexpr, LARGEST: gl.constexpr):
    """FACTOR * y in fp8. Writes its scale, with which FACTOR * `largest` becomes LARGEST: 1 for zero, always normal."""
    amax = largest * FACTOR
    scale = gl.where(amax > 0, gl.maximum(gl.div_rn(amax, LARGEST), 1.1754943508222875e-38), 1.0)
    gl.store(scales + tile, scale)
    return (y * (FACTOR * gl.div_rn(1.0, scale))).to(dtype)


@gluon.jit
def write_rows(y8, out, head, row0, seqlen, LAYOUT: gl.constexpr):
    """y8, its columns in the order of `column`, to rows from row0 on of a head of (heads, seqlen, columns)."""
    ROWS: gl.constexpr = y8.shape[0]
    D: gl.constexpr = y8.shape[1]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    col = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # 8 j + 2 t + e -> 64 (j / 8) + 16 t + 2 (j % 8) + e: a matter of names and of the order of registers
    y8 = y8.reshape((ROWS, D // 64, 8, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((ROWS, D))
    y8 = gl.convert_layout(y8, LAYOUT, assert_trivial=True)
    gl.store(out + (head * seqlen + row0) * D + (row * D + col), y8, mask=row < seqlen - row0)


@gluon.jit(
    do_not_specialize=["heads", "seqlen", "blocks", "tiles", "pitch"],
    do_not_specialize_on_alignment=["signs", "scales"],
)  # fmt: skip
def hadamard_quantize_kernel(
    x_desc, signs, out, scales, heads, seqlen, blocks, tiles, pitch,
    ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, TRANSPOSE: gl.constexpr,
    FACTOR: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """x: (batch, head, row, column) of 16 bits; out: fp8, contiguous; scales: one a block of ROWS rows.

    out is like x times M, or with TRANSPOSE (batch, head, column, row) without M, 16 * `pitch` rows of which count.
    """
    dtype: gl.constexpr = x_desc.dtype
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D], dtype)
    R: gl.constexpr = D if TRANSPOSE else ROWS  # rows and columns of the result
    C: gl.constexpr = ROWS if TRANSPOSE else D
    Y_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, C, 16]
    )  # fmt: skip
    # 16 neighbours of a row a thread, four threads beside each other
    HALVES: gl.constexpr = [[0, 64]] if C == 128 else []
    TALL: gl.constexpr = [[64, 0]] if R > 16 * WARPS else []
    WARP_BASES: gl.constexpr = [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    OUT_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8]] + HALVES + [[8, 0]] + TALL,
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        WARP_BASES,
        [],
        [R, C],
    )
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], X_LAYOUT)
    WORD_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D // 2], gl.int32)  # the same bytes
    m_words = gl.allocate_shared_memory(gl.int32, [D, D // 2], WORD_LAYOUT)
    m_buf = reinterpret(m_words, dtype, [D, D], M_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        _fetch(x_desc, full, x_bufs, i, tile + i * step, tiles, heads, blocks)
    _make_matrix(m_words, signs, WARPS, TRANSPOSE, dtype == gl.bfloat16)
    fence_async_shared()
    it = 0
    while tile < tiles:
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        zero = gl.full([R, C], 0.0, gl.float32, Y_LAYOUT)
        x_buf = x_bufs.index(slot)
        if TRANSPOSE:
            y = warpgroup_mma(m_buf, x_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
            y = warpgroup_mma_wait(0, deps=[y])
            # Inf and NaN times the zeros of M are NaN in their whole row: then the numbers themselves are read
            largest = gl.reduce(gl.reduce(gl.abs(y), 1, _larger), 0, _larger)
            if not (largest < float("inf")):
                y = x_buf.permute((1, 0)).load(Y_LAYOUT).to(gl.float32)
                y, largest = finite(y)
            _fetch(x_desc, full, x_bufs, slot, tile + STAGES * step, tiles, heads, blocks)
        else:
            y = warpgroup_mma(x_buf, m_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
            y = warpgroup_mma_wait(0, deps=[y])
            largest = gl.max(gl.max(gl.abs(y), axis=1), axis=0)  # ignores NaN
            _fetch(x_desc, full, x_bufs, slot, tile + STAGES * step, tiles, heads, blocks)
            if largest == float("inf"):
                y, largest = finite(y)
        y8 = quantized(y, largest, scales, tile, out.dtype.element_ty, FACTOR, LARGEST)
        row0 = tile % blocks * ROWS
        head = (tile // blocks).to(gl.int64)
        if TRANSPOSE:
            row = gl.arange(0, R, layout=gl.SliceLayout(1, OUT_LAYOUT))[:, None]
            col = gl.arange(0, C, layout=gl.SliceLayout(0, OUT_LAYOUT))[None, :]
            y8 = gl.convert_layout(y8, OUT_LAYOUT)
            base = out + (head * (D * 16) * pitch + row0)
            left = pitch * 16 - row0
            # a multiple of 16, so 16 bytes leave at once or not at all
            gl.store(base + row.to(gl.int64) * (pitch * 16) + col, y8, mask=col < gl.multiple_of(left, 16))
        else:
            write_rows(y8, out, head, row0, seqlen, OUT_LAYOUT)
        tile += step
        it += 1


_quick = QuickLaunch(hadamard_quantize_kernel)


@dataclass(frozen=True)
class QuantizeConfig:
    """Warps of a program (4 or 8), buffers of x, and programs an SM."""

    warps: int
    stages: int
    programs: int


# by transpose and head_dim
CONFIGS = {
    (False, 64): QuantizeConfig(4, 2, 4),
    (False, 128): QuantizeConfig(8, 2, 2),
    (True, 64): QuantizeConfig(4, 2, 4),
    (True, 128): QuantizeConfig(8, 2, 2),
}


def sum_error(dim: int) -> float:
    """How far a sum of the tensor cores may be from the exact one, as a share of the sum of magnitudes.

    16 products and the sum so far are shifted to the largest exponent among them and cut off there, 2**-23 of at most
    that sum each, and so is the result: 18 times 2**-23 for each of dim / 16 steps.
    """
    return dim / 16 * 18 * 2.0**-23


def quantize(
    x: Tensor, signs: Tensor, out: Tensor, scales: Tensor, largest: float, transpose: bool = False,
    config: QuantizeConfig | None = None,
) -> None:  # fmt: skip
    """Launch.

    Args:
        x: (batch, heads, seqlen, dim) bfloat16 or float16, any strides with last stride 1; dim 64 or 128.
        signs: (dim,) float32 of +-1 (unused with `transpose`). scales: float32, one a block of 128 rows.
        out: like x, or with `transpose` (batch, heads, dim, seqlen padded to a multiple of 16); contiguous, fp8.
        largest: of the fp8 format. transpose: without the Hadamard matrix.
    """
    x = addressable(x)
    batch, heads, seqlen, dim = x.shape
    config = config or CONFIGS[transpose, dim]
    blocks = -(-seqlen // ROWS)
    tiles = batch * heads * blocks
    arguments = (rows_map(x, ROWS, dim), signs, out, scales, heads, seqlen, blocks, tiles, -(-seqlen // 16))
    constants = dict(
        ROWS=ROWS, D=dim, STAGES=config.stages, WARPS=config.warps, TRANSPOSE=transpose,
        FACTOR=1.0 if transpose else 1 / math.sqrt(dim), LARGEST=largest,
    )  # fmt: skip
    programs = min(tiles, config.programs * multiprocessors(x.device))
    registers = 65536 // (32 * config.warps * config.programs) & ~7  # so that all programs of an SM fit
    options = dict(num_warps=config.warps, maxnreg=min(registers, 232))
    _quick((x.dtype, out.dtype), programs, arguments, constants, options)
