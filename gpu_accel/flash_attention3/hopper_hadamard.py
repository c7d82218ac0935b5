"""Quantising with the random-sign Hadamard matrix at head_dim 128 on tensor cores, for Hopper (sm_90a) in Gluon.

    y = x M              wgmma of 16-bit rows with a matrix of +-1: every product is exact, sums are float32
    scale = max |y| / largest fp8 number,   x8 = round(y / scale)

As `hopper_quantize.py`, which says why tensor cores, but x needs no shared memory: what a thread loads are its
operands. Programs are short: most calls give one two to eight blocks, and the way of a block is what counts then.

    program      `programs` an SM, persistent; block after block of 128 rows
    x            read into registers, 16 bytes a load, which are the left operand: which dimension stands at which
                 place of a sum is free, so the rows of M stand in that order. The next block is on its way while this
                 one is scaled and written. Not marked as first to be evicted: that was slower (README)
    M            made once a program, in shared memory: (-1)**popcount(i & j) times the sign of row i, which is a bit
                 of an argument: nothing has to be read before the first product
    columns      of M stand in the order that gives a thread 16 neighbours of a row of y, so that it writes 16 bytes

What differs from `quantize_reference` is what differs there: the order of additions, bounded by `sum_error`.

Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import barrier, reinterpret

from .gluon_launch import QuickLaunch, addressable, multiprocessors
from .hadamard import sign_values
from .hopper_loads import as_usual, halves, load_16_bytes
from .hopper_quantize import column, finite, quantized, write_rows

ROWS = 128  # rows of a block, which has one scale
DIM = 128


@gluon.jit
def _dimension(k):
    """The column of x that place k of a sum holds: bits (g, b, r, t, e) become (g, t, b, r, e)."""
    return (k & ~30) | ((k & 6) << 2) | ((k & 24) >> 2)


@gluon.jit
def _make_matrix(m_words, signs_0, signs_1, signs_2, signs_3, WARPS: gl.constexpr, BFLOAT16: gl.constexpr):
    """M transposed (a row a column of y), numbers of +-1 in 16 bits, two of them a word."""
    D: gl.constexpr = m_words.shape[0]
    COLS: gl.constexpr = D // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // COLS, COLS], [WARPS, 1], [1, 0])
    n = column(gl.arange(0, D, layout=gl.SliceLayout(1, LAYOUT))[:, None])
    k = _dimension(2 * gl.arange(0, D // 2, layout=gl.SliceLayout(0, LAYOUT)))
    ONE: gl.constexpr = 0x3F80 if BFLOAT16 else 0x3C00
    negative = gl.where(k < 64, gl.where(k < 32, signs_0, signs_1), gl.where(k < 96, signs_2, signs_3)) >> (k & 31)
    signs_of_two = ((negative & 1) << 15) | ((negative & 2) << 30)
    both = n & k[None, :]
    odd = (0x6996 >> ((both ^ (both >> 4)) & 15)) & 1  # whether the number of ones is odd
    m_words.store((odd * -0x7FFF8000) ^ (((n & 1) << 31) | (ONE << 16 | ONE)) ^ signs_of_two[None, :])


@gluon.jit
def _load(
    x, tile, tiles, heads, seqlen, blocks, sb, sh, ss, policy, ROWS: gl.constexpr, D: gl.constexpr, L: gl.constexpr
):  # fmt: skip
    """Block `tile`, if there is one: four words each of 16 bytes (ROWS, D // 8); zeros behind the end."""
    line = tile // blocks
    row0 = tile % blocks * ROWS
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    col = 4 * gl.arange(0, D // 8, layout=gl.SliceLayout(0, L))
    base = x + ((line // heads).to(gl.int64) * sb + (line % heads).to(gl.int64) * sh + row0.to(gl.int64) * ss)
    left = gl.where(tile < tiles, seqlen - row0, 0)
    at = (base + row.to(gl.int64) * ss).to(gl.pointer_type(gl.int32), bitcast=True)[:, None] + col[None, :]
    return load_16_bytes(at, (row < left).to(gl.int32)[:, None], policy, True)


@gluon.jit
def _operand(w0, w1, w2, w3, ROWS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, L: gl.constexpr):
    """What `_load` gave as (ROWS, D) in the order of `_dimension`; nothing moves."""
    words = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [ROWS, D // 32, 4, 2, 2])
    low, high = halves(words, C)
    x = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 4, 2, 5)), [ROWS, D])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit(
    do_not_specialize=["signs_0", "signs_1", "signs_2", "signs_3", "heads", "seqlen", "blocks", "tiles"],
    do_not_specialize_on_alignment=["scales"],
)  # fmt: skip
def hadamard_quantize_kernel(
    x, signs_0, signs_1, signs_2, signs_3, out, scales, sb, sh, ss, heads, seqlen, blocks, tiles,
    ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, FACTOR: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """x: (batch, head, row, column) of 16 bits; out: fp8, contiguous, like x times M; scales: one a block of rows."""
    dtype: gl.constexpr = x.dtype.element_ty
    M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D], dtype)
    Y_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, D, 16]
    )  # fmt: skip
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=Y_LAYOUT, k_width=2)
    TALL: gl.constexpr = [[64, 0]] if WARPS == 4 else []
    WARP_BASES: gl.constexpr = [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]]
    # 16 neighbours of a row a thread, four threads beside each other
    OUT_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0]] + TALL,
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        WARP_BASES,
        [],
        [ROWS, D],
    )
    X_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]] + TALL,
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        WARP_BASES,
        [],
        [ROWS, D // 8],
    )
    WORD_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D // 2], gl.int32)  # the same bytes
    m_words = gl.allocate_shared_memory(gl.int32, [D, D // 2], WORD_LAYOUT)
    m_buf = reinterpret(m_words, dtype, [D, D], M_LAYOUT)
    tile = gl.program_id(0)
    step = gl.num_programs(0)
    policy = as_usual()
    w0, w1, w2, w3 = _load(x, tile, tiles, heads, seqlen, blocks, sb, sh, ss, policy, ROWS, D, X_LAYOUT)
    _make_matrix(m_words, signs_0, signs_1, signs_2, signs_3, WARPS, dtype == gl.bfloat16)
    fence_async_shared()
    barrier()
    while tile < tiles:
        a = _operand(w0, w1, w2, w3, ROWS, D, dtype, A_LAYOUT)
        zero = gl.full([ROWS, D], 0.0, gl.float32, Y_LAYOUT)
        y = warpgroup_mma(a, m_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        w0, w1, w2, w3 = _load(x, tile + step, tiles, heads, seqlen, blocks, sb, sh, ss, policy, ROWS, D, X_LAYOUT)
        largest = gl.max(gl.max(gl.abs(y), axis=1), axis=0)  # ignores NaN
        if largest == float("inf"):
            y, largest = finite(y)
        y8 = quantized(y, largest, scales, tile, out.dtype.element_ty, FACTOR, LARGEST)
        row0 = tile % blocks * ROWS
        write_rows(y8, out, (tile // blocks).to(gl.int64), row0, seqlen, OUT_LAYOUT)
        tile += step


_quick = QuickLaunch(hadamard_quantize_kernel)


@dataclass(frozen=True)
class HadamardConfig:
    """Warps of a program (4 or 8) and programs an SM."""

    warps: int
    programs: int


CONFIG = HadamardConfig(8, 2)


@functools.lru_cache(maxsize=64)
def _sign_words(dim: int, seed: int) -> tuple[int, ...]:
    """Which of the random signs are negative, as bits of four numbers of 32 bits."""
    bits = sum(1 << i for i, sign in enumerate(sign_values(dim, seed)) if sign < 0)
    words = ((bits >> shift) & 0xFFFFFFFF for shift in (0, 32, 64, 96))
    return tuple(w - (w >> 31 << 32) for w in words)


def quantize(
    x: Tensor, seed: int, out: Tensor, scales: Tensor, largest: float, config: HadamardConfig | None = None
) -> None:
    """Launch.

    Args:
        x: (batch, heads, seqlen, dim) bfloat16 or float16, any strides with last stride 1; dim 128.
        seed: of the random signs. scales: float32, one a block of 128 rows. out: like x, contiguous, fp8.
        largest: of the fp8 format.
    """
    x = addressable(x)
    batch, heads, seqlen, dim = x.shape
    config = config or CONFIG
    blocks = -(-seqlen // ROWS)
    tiles = batch * heads * blocks
    strides = x.stride()[:3]
    arguments = (x, *_sign_words(dim, seed), out, scales, *strides, heads, seqlen, blocks, tiles)
    constants = dict(ROWS=ROWS, D=dim, WARPS=config.warps, FACTOR=1 / math.sqrt(dim), LARGEST=largest)
    programs = min(tiles, config.programs * multiprocessors(x.device))
    registers = 65536 // (32 * config.warps * config.programs) & ~7  # so that all programs of an SM fit
    options = dict(num_warps=config.warps, maxnreg=min(registers, 232))
    # what Triton specialises on: strides are multiples of 8, some of 16, some beyond 31 bits
    key = (x.dtype, out.dtype, config, *((n % 16 == 0, n == 1, n >> 31 == 0) for n in strides))
    _quick(key, programs, arguments, constants, options)
