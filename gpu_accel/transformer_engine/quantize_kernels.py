"""Kernels that read a tensor once and write its codes and scales, row-wise, column-wise or both.

    _block_kernel    scales of blocks that lie within one tile: 1x128, 128x128, MX, NVFP4, INT4 groups, whole short rows
    _amax_kernel     largest magnitudes of a tensor, of rows or of columns (int32 bits, atomic maximum)
    _cast_kernel     codes with scales that are known: per tensor (current, after _amax_kernel; delayed), per row
    _norm_kernel     statistics of rows, where it is a norm of the tensor that is quantised
    _turn_kernel     the column-wise copy of codes that are there already

What is quantised may be a norm or an activation of what is read (SOURCE): it is computed on the way and never written.

A program holds a tile of the matrix in registers, 32 or 64 values a thread. Rows of a tile are read in vectors of 16
bytes where strides allow it. The column-wise copy is the row-wise copy of the transposed tile, whose codes (bytes, not
floats) go through shared memory so that they too are written in whole sectors. So a copy costs 2 bytes read and 1 (or
one half) written per value, plus scales: the goal is the speed of a copy, and nothing is read twice except where one
scale spans more than a tile can hold.

Largest magnitudes are compared as integers: for float32 without its sign the order of bits is the order of numbers,
with Inf above them and NaN above that, so NaN is never lost on the way (TransformerEngine#3550).
Multiplications and additions are not fused (launched with enable_fp_fusion=False), so the bits are the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.flash_attention3.hadamard import butterflies
from gpu_accel.transformer_engine.activations import curve_of
from gpu_accel.transformer_engine.codec import (
    bits_of,
    encode,
    encode_scale,
    number_of,
    pack_pairs,
    random_words,
    scale_and_inverse,
)

_INF = tl.constexpr(0x7F800000)


@triton.jit
def _tile(
    x, gamma, beta, means, rstds, row, col, rows, cols, inner, s_outer, s_row, s_col,
    BM: tl.constexpr, BK: tl.constexpr, NESTED: tl.constexpr, EVEN: tl.constexpr, SOURCE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """The tile (BM, BK) at (row, col) in the type of x, zeros outside.

    Row r lies r * s_row behind the first, or (NESTED) r // inner * s_outer + r % inner * s_row. SOURCE: what is done
    to x first, rounded to its type as if it had been written: nothing (""), a norm ("rms", "layer") with known means
    and deviations, or the curve of an activation, GATED by the columns that follow the first `cols`.
    """
    r = row + tl.arange(0, BM).to(tl.int64)
    c = col + tl.arange(0, BK)
    offset = r * s_row
    if NESTED:
        offset = (r // inner) * s_outer + (r % inner) * s_row
    pointers = x + offset[:, None] + c.to(tl.int64)[None, :] * s_col
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    tile = tl.load(pointers) if EVEN else tl.load(pointers, mask=inside, other=0.0)
    if SOURCE != "":
        y = tile.to(tl.float32)
        if SOURCE == "rms" or SOURCE == "layer":
            if SOURCE == "layer":
                y -= tl.load(means + r, mask=r < rows, other=0.0)[:, None]
            y *= tl.load(rstds + r, mask=r < rows, other=0.0)[:, None]
            y *= tl.load(gamma + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
            if SOURCE == "layer":
                y += tl.load(beta + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
        else:
            y, _ = curve_of(y, SOURCE)
            if GATED:
                other = x + offset[:, None] + (c.to(tl.int64) + cols)[None, :] * s_col
                if EVEN:
                    y *= tl.load(other).to(tl.float32)
                else:
                    y *= tl.load(other, mask=inside, other=0.0).to(tl.float32)
        tile = y.to(x.dtype.element_ty)
        if not EVEN:
            tile = tl.where(inside, tile, 0.0)
    return tile


@triton.jit
def _rotate(tile, signs, R: tl.constexpr, C: tl.constexpr):
    """tile (R, C) float32 times the Hadamard matrix of size 16, along its columns."""
    sign = tl.load(signs + tl.arange(0, C) % 16)
    return butterflies(tile * sign[None, :], R, C, 4) * 0.25


@triton.jit
def _magnitudes(tile, FINITE: tl.constexpr):
    size = bits_of(tile) & 0x7FFFFFFF
    return tl.where(size < _INF, size, 0) if FINITE else size


@triton.jit
def _store_codes(
    out, codes, row, col, rows, cols, width,
    R: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write codes (R, C) of the tile at (row, col) into out (rows, width), contiguous, two a byte if PACKED.

    `width` is an argument of its own, and not (cols + 1) // 2, so that Triton sees that it is a multiple of 16.
    """
    r = row + tl.arange(0, R).to(tl.int64)
    if PACKED:
        if not EVEN:  # the half byte behind an odd number of columns is zero whatever became of the padding
            codes = tl.where((col + tl.arange(0, C) < cols)[None, :], codes, 0).to(tl.uint8)
        codes = pack_pairs(codes, R, C)
        c = col // 2 + tl.arange(0, C // 2)
    else:
        c = col + tl.arange(0, C)
    pointers = out + r[:, None] * width + c[None, :]
    if EVEN:
        tl.store(pointers, codes)
    else:
        tl.store(pointers, codes, mask=(r < rows)[:, None] & (c < width)[None, :])


@triton.jit
def _quantize_tile(
    tile, out, scales, signs, tensor_encode, row, col, rows, cols, width, seed,
    R: tl.constexpr, C: tl.constexpr, GR: tl.constexpr, GC: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr, FINITE: tl.constexpr,
    STOCHASTIC: tl.constexpr, STREAM: tl.constexpr, HADAMARD: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile (R, C) in blocks of GR x GC and write codes and scales."""
    x = tile.to(tl.float32)
    if HADAMARD:
        x = _rotate(x, signs, R, C)
    size = _magnitudes(x, FINITE)
    if FINITE:
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    DOWN: tl.constexpr = R // GR
    ACROSS: tl.constexpr = C // GC
    if GR == 1:
        amax = tl.max(tl.reshape(size, (R, ACROSS, GC)), 2)
    else:
        amax = tl.max(tl.max(tl.reshape(size, (DOWN, GR, ACROSS, GC)), 3), 1)
    stored, inverse = scale_and_inverse(amax, tensor_encode, SCALE, LARGEST, ADD, EMAX)
    gr = row // GR + tl.arange(0, DOWN).to(tl.int64)
    gc = col // GC + tl.arange(0, ACROSS)
    down = (rows + GR - 1) // GR
    across = (cols + GC - 1) // GC
    pointers = scales + gr[:, None] * across + gc[None, :]
    tl.store(pointers, stored, mask=(gr < down)[:, None] & (gc < across)[None, :])
    if GR == 1:
        y = tl.reshape(tl.reshape(x, (R, ACROSS, GC)) * inverse[:, :, None], (R, C))
    else:
        y = tl.reshape(tl.reshape(x, (DOWN, GR, ACROSS, GC)) * inverse[:, None, :, None], (R, C))
    words = 0
    if STOCHASTIC:
        words = random_words(row, col, (cols + 3) // 4 * 4, seed, STREAM, R, C)
    codes = encode(y, words, ELEMENT, STOCHASTIC, NATIVE)
    _store_codes(out, codes, row, col, rows, cols, width, R, C, PACKED, EVEN)


@triton.jit(do_not_specialize=["seed"])
def _block_kernel(
    x, gamma, beta, means, rstds, out_r, scales_r, tensor_r, out_c, scales_c, tensor_c, amax_r, amax_c, signs,
    rows, cols, inner, s_outer, s_row, s_col, col_tiles, width_r, width_c, seed,
    BM: tl.constexpr, BK: tl.constexpr, GR: tl.constexpr, GC: tl.constexpr, ELEMENT: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr, FINITE: tl.constexpr,
    STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, PACKED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    NESTED: tl.constexpr, EVEN: tl.constexpr, SOURCE: tl.constexpr, GATED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // col_tiles).to(tl.int64) * BM
    col = (pid % col_tiles) * BK
    tile = _tile(x, gamma, beta, means, rstds, row, col, rows, cols, inner, s_outer, s_row, s_col, BM, BK, NESTED, EVEN,
                 SOURCE, GATED)  # fmt: skip
    if ROW:
        whole = 1.0
        if SCALE == 3:
            whole = encode_scale(number_of(tl.load(amax_r)))
            if pid == 0:
                tl.store(tensor_r, tl.div_rn(1.0, whole))
        _quantize_tile(
            tile, out_r, scales_r, signs, whole, row, col, rows, cols, width_r, seed,
            BM, BK, GR, GC, ELEMENT, SCALE, LARGEST, ADD, EMAX, FINITE, STOCHASTIC, 0, HADAMARD, PACKED, EVEN, NATIVE,
        )  # fmt: skip
    if COL:
        whole = 1.0
        if SCALE == 3:
            whole = encode_scale(number_of(tl.load(amax_c)))
            if pid == 0:
                tl.store(tensor_c, tl.div_rn(1.0, whole))
        _quantize_tile(
            tl.trans(tile), out_c, scales_c, signs, whole, col.to(tl.int64), row.to(tl.int32), cols, rows, width_c,
            seed,
            BK, BM, GR, GC, ELEMENT, SCALE, LARGEST, ADD, EMAX, FINITE, STOCHASTIC, 1, HADAMARD, PACKED, EVEN, NATIVE,
        )  # fmt: skip


@triton.jit
def _raise(pointer, value):
    """atomic maximum of one int32, skipped where a smaller value could change nothing."""
    if value > tl.load(pointer):
        tl.atomic_max(pointer, value, sem="relaxed")


@triton.jit
def _amax_kernel(
    x, gamma, beta, means, rstds, amax_r, amax_c, signs, rows, cols, inner, s_outer, s_row, s_col, col_tiles,
    BM: tl.constexpr, BK: tl.constexpr, AXIS: tl.constexpr, FINITE: tl.constexpr, HADAMARD: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, NESTED: tl.constexpr, EVEN: tl.constexpr, SOURCE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """AXIS 0: one maximum for the tensor. AXIS 1: one per row in amax_r (ROW), one per column in amax_c (COL).

    With HADAMARD the maxima of a tensor are those of its rows (amax_r) and of its columns (amax_c) times the matrix.
    """
    pid = tl.program_id(0)
    row = (pid // col_tiles).to(tl.int64) * BM
    col = (pid % col_tiles) * BK
    tile = _tile(x, gamma, beta, means, rstds, row, col, rows, cols, inner, s_outer, s_row, s_col, BM, BK, NESTED, EVEN,
                 SOURCE, GATED)  # fmt: skip
    if AXIS == 0:
        if HADAMARD:
            if ROW:
                turned = _rotate(tile.to(tl.float32), signs, BM, BK)
                _raise(amax_r, tl.max(tl.max(_magnitudes(turned, FINITE), 1), 0))
            if COL:
                turned = _rotate(tl.trans(tile).to(tl.float32), signs, BK, BM)
                _raise(amax_c, tl.max(tl.max(_magnitudes(turned, FINITE), 1), 0))
        else:
            _raise(amax_r, tl.max(tl.max(_magnitudes(tile.to(tl.float32), FINITE), 1), 0))
    else:
        size = _magnitudes(tile.to(tl.float32), FINITE)
        if ROW:
            r = row + tl.arange(0, BM)
            tl.atomic_max(amax_r + r, tl.max(size, 1), mask=r < rows, sem="relaxed")
        if COL:
            c = col + tl.arange(0, BK)
            tl.atomic_max(amax_c + c, tl.max(size, 0), mask=c < cols, sem="relaxed")


@triton.jit
def _norm_kernel(
    x, gamma, beta, means, rstds, amax, rows, cols, inner, s_outer, s_row, s_col, eps,
    BK: tl.constexpr, NESTED: tl.constexpr, SOURCE: tl.constexpr, AMAX: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Mean ("layer") and 1 / deviation of each row; with AMAX the largest magnitude of what the norm will give, too."""
    r = tl.program_id(0).to(tl.int64)
    offset = r * s_row
    if NESTED:
        offset = (r // inner) * s_outer + (r % inner) * s_row
    c = tl.arange(0, BK)
    inside = c < cols
    h = tl.load(x + offset + c.to(tl.int64) * s_col, mask=inside, other=0.0).to(tl.float32)
    if SOURCE == "layer":
        mean = tl.sum(h, 0) / cols
        tl.store(means + r, mean)
        h = tl.where(inside, h - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / cols + eps)
    tl.store(rstds + r, rstd)
    if AMAX:
        y = h * rstd * tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)
        if SOURCE == "layer":
            y += tl.load(beta + c, mask=inside, other=0.0).to(tl.float32)
        y = y.to(x.dtype.element_ty).to(tl.float32)
        _raise(amax, tl.max(_magnitudes(y, FINITE), 0))


@triton.jit
def _cast_tile(
    tile, inverse, out, row, col, rows, cols, width, seed,
    R: tl.constexpr, C: tl.constexpr, ELEMENT: tl.constexpr, FINITE: tl.constexpr, STOCHASTIC: tl.constexpr,
    STREAM: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    x = tile.to(tl.float32)
    if FINITE:
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    words = 0
    if STOCHASTIC:
        words = random_words(row, col, (cols + 3) // 4 * 4, seed, STREAM, R, C)
    codes = encode(x * inverse, words, ELEMENT, STOCHASTIC, NATIVE)
    _store_codes(out, codes, row, col, rows, cols, width, R, C, PACKED, EVEN)


@triton.jit
def _row_scales(
    amax, scales, index, limit, write,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr,
):  # fmt: skip
    bits = tl.load(amax + index, mask=index < limit, other=0)
    stored, inverse = scale_and_inverse(bits, 1.0, SCALE, LARGEST, ADD, EMAX)
    tl.store(scales + index, stored, mask=(index < limit) & write)
    return inverse


@triton.jit
def _tensor_scale(
    given, amax, scales, write,
    MODE: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr,
):  # fmt: skip
    if MODE == 2:
        scale = tl.load(given)
        if write:
            tl.store(scales, scale)
        return tl.div_rn(1.0, scale)
    else:
        stored, inverse = scale_and_inverse(tl.load(amax), 1.0, SCALE, LARGEST, ADD, EMAX)
        if write:
            tl.store(scales, stored)
        return inverse


@triton.jit(do_not_specialize=["seed"])
def _cast_kernel(
    x, gamma, beta, means, rstds, out_r, out_c, scales_r, scales_c, amax_r, amax_c, given_r, given_c,
    rows, cols, inner, s_outer, s_row, s_col, col_tiles, width_r, width_c, seed,
    BM: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr, FINITE: tl.constexpr, STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, NESTED: tl.constexpr, EVEN: tl.constexpr,
    SOURCE: tl.constexpr, GATED: tl.constexpr, AMAX: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """MODE 0: the scale of the tensor follows from its largest magnitude, in amax_r and amax_c alike. 1: scales per row
    and column follow from amax_r and amax_c. 2: the scale is given in given_r and given_c, and with AMAX the largest
    magnitude (all values, NaN and Inf too) raises amax_r.

    Each copy has its own pointer to what both share, so that their conversions are never merged (see codec.py)."""
    pid = tl.program_id(0)
    row = (pid // col_tiles).to(tl.int64) * BM
    col = (pid % col_tiles) * BK
    tile = _tile(x, gamma, beta, means, rstds, row, col, rows, cols, inner, s_outer, s_row, s_col, BM, BK, NESTED, EVEN,
                 SOURCE, GATED)  # fmt: skip
    if AMAX:
        _raise(amax_r, tl.max(tl.max(_magnitudes(tile.to(tl.float32), False), 1), 0))
    if ROW:
        if MODE == 1:
            r = row + tl.arange(0, BM)
            inverse = _row_scales(amax_r, scales_r, r, rows, col == 0, SCALE, LARGEST, ADD, EMAX)[:, None]
        else:
            inverse = _tensor_scale(given_r, amax_r, scales_r, pid == 0, MODE, SCALE, LARGEST, ADD, EMAX)
        _cast_tile(tile, inverse, out_r, row, col, rows, cols, width_r, seed, BM, BK, ELEMENT, FINITE, STOCHASTIC, 0,
                   PACKED, EVEN, NATIVE)  # fmt: skip
    if COL:
        turned = tl.trans(tile)
        top, left = col.to(tl.int64), row.to(tl.int32)
        if MODE == 1:
            c = col + tl.arange(0, BK)
            inverse = _row_scales(amax_c, scales_c, c, cols, row == 0, SCALE, LARGEST, ADD, EMAX)[:, None]
        else:
            inverse = _tensor_scale(given_c, amax_c, scales_c, pid == 0, MODE, SCALE, LARGEST, ADD, EMAX)
        _cast_tile(turned, inverse, out_c, top, left, cols, rows, width_c, seed, BK, BM, ELEMENT, FINITE, STOCHASTIC, 1,
                   PACKED, EVEN, NATIVE)  # fmt: skip


@triton.jit
def _turn_kernel(x, out, rows, cols, tiles, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Bytes (rows, cols) as (cols, rows)."""
    pid = tl.program_id(0)
    r = (pid // tiles).to(tl.int64) * BM + tl.arange(0, BM)
    c = (pid % tiles).to(tl.int64) * BK + tl.arange(0, BK)
    source, target = x + r[:, None] * cols + c[None, :], out + c[:, None] * rows + r[None, :]
    if EVEN:
        tl.store(target, tl.trans(tl.load(source)))
    else:
        tile = tl.load(source, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0)
        tl.store(target, tl.trans(tile), mask=(c < cols)[:, None] & (r < rows)[None, :])


@triton.jit
def scales_kernel(scale, out, rows, cols, wide, tiles, TURNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """scale (rows, cols) to out (cols, wide), zeros behind the rows. TURNED: of each 16 rows, place 4 i + 2 h + e has
    row 8 h + 2 i + e, the order in which threads of an accumulator have its columns."""
    program = tl.program_id(0)
    place = program // tiles * ROWS + tl.arange(0, ROWS)
    col = program % tiles * COLS + tl.arange(0, COLS)
    row = place
    if TURNED:
        within = place % 16
        row = place - within + within // 2 % 2 * 8 + within // 4 * 2 + within % 2
    there = (row < rows)[:, None] & (col < cols)[None, :]
    values = tl.load(scale + row[:, None].to(tl.int64) * cols + col[None, :], mask=there, other=0.0)
    kept = (place < wide)[:, None] & (col < cols)[None, :]
    tl.store(out + col[None, :].to(tl.int64) * wide + place[:, None], values, mask=kept)
