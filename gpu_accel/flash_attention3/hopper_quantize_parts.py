"""Quantising on tensor cores, for Hopper (sm_90a) in Gluon: rows times the Hadamard matrix, or transposed.

    y = x M              wgmma of 16-bit rows with a matrix of +-1: every product is exact, sums are float32
    y = x^T              with TRANSPOSE, by ldmatrix
    scale = max |y| / largest fp8 number,   x8 = round(y / scale)

The butterflies of `fp8_quantize.py` move every number between threads once for three of seven strides at head_dim 128,
which keeps the path of exchanges busy for two thirds of the time. Here a thread is left with maximum, multiplication
and conversion of each of its numbers. A row of 128 is two parts of 64, each times H of 64, then one butterfly: half of
the multiplications of one product, and a block's way through the tensor cores is 512 clocks, where memory gives 2600
(H200). What counts is the way of one block: most calls give a program two to eight of them.

    program      `programs` an SM, persistent; block after block of 128 rows
    x            `stages` times 1 or 2 buffers of 64 columns, filled by TMA ahead of time (rows behind the sequence's
                 end come as zeros)
    M            made once a program, in shared memory: (-1)**popcount(i & j) times the sign of row i, which is a bit
                 of an argument: nothing has to be read before the first product
    columns      of M stand in the order that gives a thread 16 neighbours of a row of y, so that it writes 16 bytes
    barriers     one mbarrier a stage; a stage is filled anew behind the maximum of the block, where all warps met

What differs from `quantize_reference`, with M only: the order of additions (and that the tensor cores cut off instead
of rounding), so y may be off by `sum_error(dim)` times the sum of magnitudes of its row of x, and rounds to the
neighbouring fp8 number where it lies that close to the middle. Sums beyond 3.4e38 are Inf in one order and may not be
in another.

Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

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
from .hadamard import sign_values
from .hopper_fp8 import rows_map

ROWS = 128  # rows of a block, which has one scale
PART = gl.constexpr(64)  # columns of a part: of a swizzled buffer, and of one product


@gluon.jit
def _make_matrix(m_words, low, high, WARPS: gl.constexpr, BFLOAT16: gl.constexpr):
    """H, 64 x 64, with the signs of one part (bits of `low` and `high`): a row a column of y, two numbers a word."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    n = gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    k = 2 * gl.arange(0, PART // 2, layout=gl.SliceLayout(0, LAYOUT))
    ONES: gl.constexpr = 0x3F803F80 if BFLOAT16 else 0x3C003C00
    negative = gl.where(k < 32, low, high) >> (k & 31)
    negative = ((negative & 1) << 15) | ((negative & 2) << 30)
    n = ((n & 6) << 3) + ((n & 56) >> 2) + (n & 1)  # column 8 j + 2 t + e of the accumulator is 16 t + 2 j + e of y
    both = n & k[None, :]
    odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1  # whether the number of ones is odd
    m_words.store((odd * -0x7FFF8000) ^ (((n & 1) << 31) | ONES) ^ negative[None, :])


@gluon.jit
def _fetch(x_desc, full, x_bufs, slot, tile, tiles, heads, blocks, PARTS: gl.constexpr):
    """Start loading block `tile`, if there is one, into the buffers of `slot`."""
    ROWS: gl.constexpr = x_bufs.shape[1]
    if tile < tiles:
        head = tile // blocks
        row0 = (tile % blocks) * ROWS
        mbarrier.expect(full.index(slot), PARTS * x_desc.block_type.nbytes)
        for g in gl.static_range(PARTS):
            tma_load(
                x_desc, [head // heads, head % heads, row0, g * PART], full.index(slot), x_bufs.index(slot * PARTS + g)
            )  # fmt: skip


@gluon.jit
def _butterfly(a, b):
    """(a + b, a - b), made once: LLVM would rather make them again where they are read, and keep all four."""
    return gl.inline_asm_elementwise(
        "add.f32 $0, $2, $3; sub.f32 $1, $2, $3;",
        "=&f,=f,f,f",
        [a, b],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _widened(x):
    """16 bits to float32, made once, as in `_butterfly`."""
    if x.dtype == gl.bfloat16:
        CONVERT: gl.constexpr = (
            "{ .reg .b16 l, h, z; mov.b16 z, 0; mov.b32 {l, h}, $2; mov.b32 $0, {z, l}; mov.b32 $1, {z, h}; }"
        )
    else:
        CONVERT: gl.constexpr = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    return gl.inline_asm_elementwise(CONVERT, "=f,=f,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def _only_finite(y):
    """y with NaN for Inf, and its magnitudes with 0 for both."""
    finite = gl.abs(y) < float("inf")
    return gl.where(finite, y, float("nan")), gl.where(finite, gl.abs(y), 0.0)


@gluon.jit
def _store(out, y, factor, at, here, PERMUTED: gl.constexpr, OUT_LAYOUT: gl.constexpr):
    """16 neighbours of a row a thread. PERMUTED: they are a thread's already, under other names."""
    y8 = (y * factor).to(out.dtype.element_ty)
    if PERMUTED:
        rows: gl.constexpr = y.shape[0]
        y8 = y8.reshape((rows, 8, 4, 2)).permute((0, 2, 1, 3)).reshape((rows, PART))
    gl.store(out + at, gl.convert_layout(y8, OUT_LAYOUT, assert_trivial=PERMUTED), mask=here)


@gluon.jit
def _finish(
    a, b, largest, out, scales, tile, seqlen, blocks, pitch,
    TRANSPOSE: gl.constexpr, PARTS: gl.constexpr, FACTOR: gl.constexpr, LARGEST: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scale and values of one block, in one or two parts; `largest` before FACTOR."""
    D: gl.constexpr = PARTS * PART
    ROWS: gl.constexpr = a.shape[1] if TRANSPOSE else a.shape[0]
    amax = largest * FACTOR
    scale = gl.where(amax > 0, gl.maximum(gl.div_rn(amax, LARGEST), 1.1754943508222875e-38), 1.0)
    gl.store(scales + tile, scale)
    factor = FACTOR * gl.div_rn(1.0, scale)
    row0 = tile % blocks * ROWS
    head = (tile // blocks).to(gl.int64)
    row = gl.arange(0, a.shape[0], layout=gl.SliceLayout(1, OUT_LAYOUT))[:, None]
    col = gl.arange(0, a.shape[1], layout=gl.SliceLayout(0, OUT_LAYOUT))[None, :]
    if TRANSPOSE:
        at = row.to(gl.int64) * (pitch * 16) + col
        here = col < gl.multiple_of(pitch * 16 - row0, 16)  # 16 bytes leave at once or not at all
        base = out + (head * (D * 16) * pitch + row0)
        _store(base, a, factor, at, here, False, OUT_LAYOUT)
        if PARTS == 2:
            _store(base + (PART * 16) * pitch.to(gl.int64), b, factor, at, here, False, OUT_LAYOUT)
    else:
        at = row * D + col
        base = out + (head * seqlen + row0) * D
        _store(base, a, factor, at, row < seqlen - row0, True, OUT_LAYOUT)
        if PARTS == 2:
            _store(base + PART, b, factor, at, row < seqlen - row0, True, OUT_LAYOUT)


@gluon.jit(
    do_not_specialize=["signs_0", "signs_1", "signs_2", "signs_3", "heads", "seqlen", "blocks", "tiles", "pitch"],
    do_not_specialize_on_alignment=["scales"],
)  # fmt: skip
def quantize_kernel(
    x_desc, signs_0, signs_1, signs_2, signs_3, out, scales, heads, seqlen, blocks, tiles, pitch,
    ROWS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, TRANSPOSE: gl.constexpr,
    FACTOR: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """x: (batch, head, row, column) of 16 bits; out: fp8, contiguous; scales: one a block of ROWS rows.

    out is like x times M, or with TRANSPOSE (batch, head, column, row) without M, 16 * `pitch` rows of which count.
    """
    dtype: gl.constexpr = x_desc.dtype
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART], dtype)
    if TRANSPOSE:
        Y_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, WARPS // 4], instr_shape=[16, ROWS * 4 // WARPS, 16]
        )  # fmt: skip
        OUT_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]] + ([[0, 64]] if WARPS == 4 else []),
            [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]] + ([[0, 64]] if WARPS == 8 else []),
            [],
            [PART, ROWS],
        )
    else:
        Y_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, PART, 16]
        )  # fmt: skip
        OUT_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]] + ([[64, 0]] if WARPS == 4 else []),
            [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]] + ([[64, 0]] if WARPS == 8 else []),
            [],
            [ROWS, PART],
        )
    x_bufs = gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, PART], X_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    for i in gl.static_range(STAGES):
        _fetch(x_desc, full, x_bufs, i, tile + i * step, tiles, heads, blocks, PARTS)
    if not TRANSPOSE:
        M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, PART], dtype)
        WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, PART // 2], gl.int32)  # the same bytes
        m_words = gl.allocate_shared_memory(gl.int32, [PARTS, PART, PART // 2], WORDS)
        _make_matrix(m_words.index(0), signs_0, signs_1, WARPS, dtype == gl.bfloat16)
        if PARTS == 2:
            _make_matrix(m_words.index(1), signs_2, signs_3, WARPS, dtype == gl.bfloat16)
        fence_async_shared()
    it = 0
    while tile < tiles:
        slot = it % STAGES
        mbarrier.wait(full.index(slot), (it // STAGES) & 1)
        if TRANSPOSE:
            a = _widened(x_bufs.index(slot * PARTS).permute((1, 0)).load(Y_LAYOUT))
            b = _widened(x_bufs.index(slot * PARTS + 1).permute((1, 0)).load(Y_LAYOUT)) if PARTS == 2 else a
        else:
            zero = gl.full([ROWS, PART], 0.0, gl.float32, Y_LAYOUT)
            m_0 = reinterpret(m_words.index(0), dtype, [PART, PART], M_LAYOUT).permute((1, 0))
            a = warpgroup_mma(x_bufs.index(slot * PARTS), m_0, zero, use_acc=False, is_async=True)
            if PARTS == 2:
                m_1 = reinterpret(m_words.index(1), dtype, [PART, PART], M_LAYOUT).permute((1, 0))
                b = warpgroup_mma(x_bufs.index(slot * PARTS + 1), m_1, zero, use_acc=False, is_async=True)
                a, b = warpgroup_mma_wait(0, deps=[a, b])
                a, b = _butterfly(a, b)
            else:
                a = warpgroup_mma_wait(0, deps=[a])
                b = a
        size = gl.maximum(gl.abs(a), gl.abs(b)) if PARTS == 2 else gl.abs(a)
        largest = gl.max(gl.max(size, axis=1), axis=0)  # ignores NaN
        _fetch(x_desc, full, x_bufs, slot, tile + STAGES * step, tiles, heads, blocks, PARTS)
        if largest < float("inf"):
            _finish(
                a, b, largest, out, scales, tile, seqlen, blocks, pitch, TRANSPOSE, PARTS, FACTOR, LARGEST, OUT_LAYOUT
            )
        else:  # a copy of the code, so that registers need not hold both
            a, size = _only_finite(a)
            if PARTS == 2:
                b, size_b = _only_finite(b)
                size = gl.maximum(size, size_b)
            else:
                b = a
            largest = gl.max(gl.max(size, axis=1), axis=0)
            _finish(
                a, b, largest, out, scales, tile, seqlen, blocks, pitch, TRANSPOSE, PARTS, FACTOR, LARGEST, OUT_LAYOUT
            )
        tile += step
        it += 1


_quick = QuickLaunch(quantize_kernel)


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
    that sum each, and so is the result: 18 times 2**-23 for each of 4 steps. Then two parts are added.
    """
    return (4 * 18 + (dim // 64 - 1)) * 2.0**-23


@functools.lru_cache(maxsize=64)
def _sign_words(dim: int, seed: int) -> tuple[int, int, int, int]:
    """Which of the random signs are negative, as bits of four numbers of 32 bits."""
    bits = sum(1 << i for i, sign in enumerate(sign_values(dim, seed)) if sign < 0)
    words = ((bits >> shift) & 0xFFFFFFFF for shift in (0, 32, 64, 96))
    return tuple(w - (w >> 31 << 32) for w in words)  # type: ignore[return-value]


def quantize(
    x: Tensor, seed: int, out: Tensor, scales: Tensor, largest: float, transpose: bool = False,
    config: QuantizeConfig | None = None,
) -> None:  # fmt: skip
    """Launch.

    Args:
        x: (batch, heads, seqlen, dim) bfloat16 or float16, any strides with last stride 1; dim 64 or 128.
        seed: of the random signs (unused with `transpose`). scales: float32, one a block of 128 rows.
        out: like x, or with `transpose` (batch, heads, dim, seqlen padded to a multiple of 16); contiguous, fp8.
        largest: of the fp8 format. transpose: without the Hadamard matrix.
    """
    x = addressable(x)
    batch, heads, seqlen, dim = x.shape
    config = config or CONFIGS[transpose, dim]
    blocks = -(-seqlen // ROWS)
    tiles = batch * heads * blocks
    signs = (0, 0, 0, 0) if transpose else _sign_words(dim, seed)
    arguments = (rows_map(x, ROWS, 64), *signs, out, scales, heads, seqlen, blocks, tiles, -(-seqlen // 16))
    constants = dict(
        ROWS=ROWS, PARTS=dim // 64, STAGES=config.stages, WARPS=config.warps, TRANSPOSE=transpose,
        FACTOR=1.0 if transpose else 1 / math.sqrt(dim), LARGEST=largest,
    )  # fmt: skip
    programs = min(tiles, config.programs * multiprocessors(x.device))
    registers = 65536 // (32 * config.warps * config.programs) & ~7  # so that all programs of an SM fit
    options = dict(num_warps=config.warps, maxnreg=min(registers, 232))
    _quick((x.dtype, out.dtype), programs, arguments, constants, options)
