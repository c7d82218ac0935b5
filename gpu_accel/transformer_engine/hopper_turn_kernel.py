"""Both copies of a bf16 matrix in eight bits, from one reading, turned in registers (Gluon, sm_90a).

A thread holds 8 rows of 8 columns, two columns a word. Neighbours of a row make the codes of one copy, neighbours of a
column those of the other, so that nothing has to be turned after it was rounded:

    load      8 times 16 bytes a thread; a warp has 32 rows of 64 columns, 8 warps a tile of 128 x 128
    maxima    of words, two values at a time (max.s16x2 of magnitudes), then over lanes and warps; none with a scale
    scales    one a thread: the divisions would otherwise be repeated by every thread of a row; of a block of 128 x 128,
              which is a tile, one
    codes     two at a time from float32, 8 bytes a row, and 8 bytes a column; four lanes fill a sector of 32 bytes

A bf16 magnitude plus 0x0080 is negative in 16 bits if it was Inf or NaN, so that a signed maximum leaves these out.

Whole tiles only, and nothing is computed before quantising; the bits are those of `quantize_kernels`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_quantize_kernel import _MIN_SCALE, _scale_and_inverse


@gluon.jit
def _max2(a, b):
    """Larger halves of words, as signed numbers of 16 bits."""
    return gl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _halve(x, AXIS: gl.constexpr):
    """(even, odd) neighbours along an axis of a matrix."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    if AXIS == 1:
        return gl.split(x.reshape((R, C // 2, 2)))
    else:
        return gl.split(x.reshape((R // 2, 2, C)).permute((0, 2, 1)))


@gluon.jit
def _numbers(words):
    """(float32 of the lower halves, of the upper halves) of words of two bf16."""
    low = (words << 16).to(gl.float32, bitcast=True)
    high = (words & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def _pair(first, second, E5M2: gl.constexpr):
    """Codes of two numbers each, the first in the lower byte."""
    E4M3_PAIR: gl.constexpr = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    E5M2_PAIR: gl.constexpr = "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;"
    CONVERT: gl.constexpr = E5M2_PAIR if E5M2 else E4M3_PAIR
    return gl.inline_asm_elementwise(CONVERT, "=h,f,f", [first, second], dtype=gl.int16, is_pure=True, pack=1)


@gluon.jit
def _without_inf(words, size):
    """Infinity made NaN, all else as it was: |x| * -0 + x."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [size, gl.full_like(size, -2147450880), words],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _bits(size, FINITE: gl.constexpr):
    """Bits of float32 from the 16 bits of a largest magnitude."""
    if FINITE:
        size = gl.maximum(size - 0x80, 0)
    return size << 16


@gluon.jit
def _one_scale(bits, SCALE: gl.constexpr, LARGEST: gl.constexpr, ADD: gl.constexpr, EMAX: gl.constexpr):
    """`_scale_and_inverse` of one number, in float32 or a power of two."""
    if SCALE == 1:
        stored = (gl.maximum(((bits + ADD) >> 23) - EMAX, 1) << 23).to(gl.float32, bitcast=True)
    else:
        stored = gl.maximum(gl.div_rn(bits.to(gl.float32, bitcast=True), LARGEST), _MIN_SCALE)
    stored = gl.where(bits > 0, stored, 1.0)
    return stored, gl.div_rn(1.0, stored)


@gluon.jit
def turn_kernel(
    x, out_r, scales_r, out_c, scales_c, given, seen, rows, cols, s_row, tiles,
    GC: gl.constexpr, SCALE: gl.constexpr, LARGEST: gl.constexpr, ADD: gl.constexpr, EMAX: gl.constexpr,
    FINITE: gl.constexpr, E5M2: gl.constexpr, AMAX: gl.constexpr, TALL: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """x: words (rows, cols / 2), s_row words apart. Codes (rows, cols) and (cols, rows) as pairs (int16), with a scale
    for each block of 1 x GC (128; 32 with SCALE 2 and tiles of 128 rows, four scales a word), or (GC = 0) of all by the
    scale in `given`, which goes to scales_r and scales_c, or (GC = 0, SQUARE) for each tile of 128 x 128. AMAX: `seen`
    (int32) is raised to the bits of the largest magnitude. TALL: rows of a tile, 64 or 128, 16 for each warp."""
    WARPS: gl.constexpr = TALL // 16
    W: gl.constexpr = gl.BlockedLayout([8, 4], [4, 8], [WARPS // 2, 2], [1, 0])
    gl.static_assert(TALL == 128 or TALL == 64)
    ROW_WARPS: gl.constexpr = [[16, 0], [32, 0]] if TALL == 128 else [[16, 0]]
    # pairs of rows, words; the pairs of one column are neighbours in registers, as they are in memory
    C: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [0, 1], [0, 2]],
        lane_bases=[[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
        warp_bases=[[0, 32]] + ROW_WARPS,
        block_bases=[],
        shape=[TALL // 2, 64],
    )
    # a byte a store would touch as many sectors as codes do: the four of a row, or column, of a tile go as one word
    gl.static_assert(SCALE != 2 or (GC == 32 and TALL == 128))
    G: gl.constexpr = 1 if GC == 0 else 128 // GC  # blocks across a tile, and down
    D: gl.constexpr = 1 if GC == 0 else TALL // GC
    pid = gl.program_id(0)
    row = pid // tiles * TALL
    col = pid % tiles * 128
    r = row + gl.arange(0, TALL, gl.SliceLayout(1, W))
    c = col // 2 + gl.arange(0, 64, gl.SliceLayout(0, W))
    words = gl.load(x + r.to(gl.int64)[:, None] * s_row + c[None, :])
    size = words & 0x7FFF7FFF
    if SQUARE:
        gl.static_assert(GC == 0 and TALL == 128 and not AMAX and SCALE != 2)
        kept = size + 0x00800080 if FINITE else size
        even, odd = _halve(kept, 1)
        even, odd = _halve(_max2(even, odd), 1)
        most = _max2(even, odd)
        most = gl.max(gl.max(gl.maximum((most << 16) >> 16, most >> 16), 1), 0)
        scale, factor = _one_scale(_bits(most, FINITE), SCALE, LARGEST, ADD, EMAX)
        down = row // 128
        across = pid % tiles
        gl.store(scales_r + down.to(gl.int64) * tiles + across, scale)
        gl.store(scales_c + across.to(gl.int64) * (rows // 128) + down, scale)
    elif GC == 0:
        scale = gl.load(given)
        factor = gl.div_rn(1.0, scale)
        if pid == 0:
            gl.store(scales_r, scale)
            gl.store(scales_c, scale)
        if AMAX:
            even, odd = _halve(size, 1)
            even, odd = _halve(_max2(even, odd), 1)
            most = _max2(even, odd)
            most = gl.max(gl.max(gl.maximum(most & 0xFFFF, most >> 16), 1), 0) << 16
            if most > gl.load(seen):
                gl.atomic_max(seen, most, sem="relaxed")
    else:
        kept = size + 0x00800080 if FINITE else size
        # rows
        even, odd = _halve(kept, 1)
        even, odd = _halve(_max2(even, odd), 1)
        most = _max2(even, odd)
        most = gl.maximum((most << 16) >> 16, most >> 16)
        most = gl.max(gl.reshape(most, (TALL, G, 16 // G)), 2)
        FOUR_R: gl.constexpr = gl.BlockedLayout([1, G], [32, 1], [WARPS, 1], [1, 0])
        ONE_R: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS // G, G], [0, 1])
        FLAT_R: gl.constexpr = FOUR_R if SCALE == 2 else ONE_R
        stored, inverse = _scale_and_inverse(gl.convert_layout(_bits(most, FINITE), FLAT_R), SCALE, LARGEST, ADD, EMAX)
        sr = row + gl.arange(0, TALL, gl.SliceLayout(1, FLAT_R))
        if SCALE == 2:
            four = stored.to(gl.int32) << (8 * gl.arange(0, G, gl.SliceLayout(0, FLAT_R)))[None, :]
            gl.store(scales_r + sr.to(gl.int64) * (cols // 128) + pid % tiles, gl.sum(four, 1))
        else:
            sg = pid % tiles * G + gl.arange(0, G, gl.SliceLayout(0, FLAT_R))
            gl.store(scales_r + sr.to(gl.int64)[:, None] * (cols // GC) + sg[None, :], stored)
        # columns
        even, odd = _halve(kept, 0)
        even, odd = _halve(_max2(even, odd), 0)
        even, odd = _halve(_max2(even, odd), 0)
        most = _max2(even, odd)
        most = gl.join((most << 16) >> 16, most >> 16)  # (TALL / 8, 64, 2)
        most = gl.reshape(gl.max(gl.reshape(most, (D, TALL // 8 // D, 64, 2)), 1), (D, 128))
        FOUR_C: gl.constexpr = gl.BlockedLayout([D, 2], [1, 32], [1, WARPS], [0, 1])
        ONE_C: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [D, WARPS // D], [1, 0])
        FLAT_C: gl.constexpr = FOUR_C if SCALE == 2 else ONE_C
        stored, inverse_c = _scale_and_inverse(
            gl.convert_layout(_bits(most, FINITE), FLAT_C), SCALE, LARGEST, ADD, EMAX
        )
        sc = col + gl.arange(0, 128, gl.SliceLayout(0, FLAT_C))
        if SCALE == 2:
            four = stored.to(gl.int32) << (8 * gl.arange(0, D, gl.SliceLayout(1, FLAT_C)))[:, None]
            gl.store(scales_c + sc.to(gl.int64) * (rows // 128) + row // 128, gl.sum(four, 0))
        else:
            sg = row // GC + gl.arange(0, D, gl.SliceLayout(1, FLAT_C))
            gl.store(scales_c + sc.to(gl.int64)[None, :] * (rows // GC) + sg[:, None], stored)
    if FINITE:
        words = _without_inf(words, size)
    low, high = _numbers(words)

    if GC == 0:
        codes = _pair(low * factor, high * factor, E5M2)
    else:
        low3 = gl.reshape(low, (TALL, G, 64 // G))
        high3 = gl.reshape(high, (TALL, G, 64 // G))
        by_row = gl.convert_layout(inverse, gl.SliceLayout(2, low3.type.layout))[:, :, None]
        codes = gl.reshape(_pair(low3 * by_row, high3 * by_row, E5M2), (TALL, 64))
    codes = gl.convert_layout(codes, W, assert_trivial=True)
    gl.store(out_r + r.to(gl.int64)[:, None] * (cols // 2) + c[None, :], codes)

    pairs = row // 2 + gl.arange(0, TALL // 2, gl.SliceLayout(1, C))
    columns = col + 2 * gl.arange(0, 64, gl.SliceLayout(0, C))
    places = out_c + columns.to(gl.int64)[None, :] * (rows // 2) + pairs[:, None]
    if GC != 0:
        low_c, high_c = gl.split(gl.reshape(inverse_c, (D, 64, 2)))
    for half in gl.static_range(2):
        even, odd = _halve(low if half == 0 else high, 0)
        if GC == 0:
            codes = _pair(even * factor, odd * factor, E5M2)
        else:
            even = gl.reshape(even, (D, TALL // 2 // D, 64))
            odd = gl.reshape(odd, (D, TALL // 2 // D, 64))
            by_col = low_c if half == 0 else high_c
            by_col = gl.convert_layout(by_col, gl.SliceLayout(1, even.type.layout))[:, None, :]
            codes = gl.reshape(_pair(even * by_col, odd * by_col, E5M2), (TALL // 2, 64))
        gl.store(places + half * (rows // 2), gl.convert_layout(codes, C, assert_trivial=True))
