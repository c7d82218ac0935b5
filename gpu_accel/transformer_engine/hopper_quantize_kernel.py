"""Both copies of a matrix in blocks of one row, e4m3 or e5m2, with each copy in the layout that suits it (Gluon).

Plain Triton reads a tile once, along rows, and turns its codes in shared memory byte by byte: 28 (MX) to 54 (1x128)
instructions a value, of which a copy leaves room for about 25. Here a tile of 128 x 128 is read twice, the second time
from the first-level cache:

    rows      a thread has 8 neighbours of a row, 16 threads a row: maxima by 4 shuffles for 8 values
    columns   a thread has 32 neighbours of a column: maxima and codes stay in the thread, which writes whole sectors

8 warps; no shared memory but for maxima over 4 warps (columns of 1x128), and for an activation, which is computed once
and turned in 16 bits. Whole tiles only; the rest goes to
`quantize_kernels._block_kernel`, whose bits these are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_INF = gl.constexpr(0x7F800000)
_MIN_SCALE = gl.constexpr(2.0**-126)


@gluon.jit
def _scale_and_inverse(bits, SCALE: gl.constexpr, LARGEST: gl.constexpr, ADD: gl.constexpr, EMAX: gl.constexpr):
    """As `codec.scale_and_inverse`: SCALE 0 float32, 1 a power of two in float32, 2 e8m0."""
    if SCALE == 2:
        wrong = bits >= _INF
        code = gl.minimum(gl.maximum(((bits + ADD) >> 23) - EMAX, 0), 254)
        number = ((254 - code) << 23).to(gl.float32, bitcast=True)
        inverse = gl.where(wrong, float("nan"), number)
        stored = gl.where(wrong, 255, code).to(gl.uint8)
    else:
        if SCALE == 1:
            stored = (gl.maximum(((bits + ADD) >> 23) - EMAX, 1) << 23).to(gl.float32, bitcast=True)
        else:
            amax = bits.to(gl.float32, bitcast=True)
            stored = gl.maximum(gl.div_rn(amax, gl.full_like(amax, LARGEST)), _MIN_SCALE)
        stored = gl.where(bits > 0, stored, 1.0)
        inverse = gl.div_rn(gl.full_like(stored, 1.0), stored)
    return stored, inverse


@gluon.jit
def _largest(x, AXIS: gl.constexpr, FINITE: gl.constexpr):
    """Bits of the largest |x| along an axis, where NaN > Inf > every number, or without either of them if FINITE: with
    one added to their exponent they are negative. 0 where nothing else is there."""
    size = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    if FINITE:
        return gl.maximum(gl.max(size + 0x00800000, AXIS), 0x00800000) - 0x00800000
    else:
        return gl.max(size, AXIS)


@gluon.jit
def _codes(x, inverse, E5M2: gl.constexpr, FINITE: gl.constexpr):
    """Codes of x * inverse; FINITE: NaN where x is infinite. |x| * -0 is NaN there and -0 elsewhere, which added to
    anything changes nothing, not the sign of a zero either."""
    y = x * inverse
    if FINITE:  # the literal -0.0 would become 0.0 in Triton
        minus_zero = gl.full_like(x.to(gl.int32, bitcast=True), -2147483648).to(gl.float32, bitcast=True)
        y = gl.fma(x, inverse, gl.abs(x) * minus_zero)
    code = y.to(gl.float8e5) if E5M2 else y.to(gl.float8e4nv)
    return code.to(gl.uint8, bitcast=True)


@gluon.jit
def _normed(tile, x, gamma, beta, means, rstds, r, c, SOURCE: gl.constexpr):
    """The tile as float32, or its norm, rounded to the type of x as if it had been written."""
    y = tile.to(gl.float32)
    if SOURCE != "":
        if SOURCE == "layer":
            y -= gl.load(means + r)[:, None]
        y *= gl.load(rstds + r)[:, None]
        y *= gl.load(gamma + c).to(gl.float32)[None, :]
        if SOURCE == "layer":
            y += gl.load(beta + c).to(gl.float32)[None, :]
        y = y.to(x.dtype.element_ty).to(gl.float32)
    return y


@gluon.jit
def _curve(a, CURVE: gl.constexpr):
    """As `activations.curve_of`, without the slope."""
    if CURVE == "silu":
        return a * (1.0 / (1.0 + gl.exp(-a)))
    elif CURVE == "gelu_tanh":
        u = 0.7978845608028654 * (a + 0.044715 * a * a * a)
        e = gl.exp(-2.0 * gl.abs(u))
        t = (1.0 - e) / (1.0 + e)
        return 0.5 * a * (1.0 + gl.where(u < 0, -t, t))
    else:
        kept = gl.where(a > 0, a, 0.0)
        kept = gl.where(a != a, a, kept)
        return kept * kept if CURVE == "srelu" else kept


@gluon.jit
def both_kernel(
    x, gamma, beta, means, rstds, out_r, scales_r, out_c, scales_c, rows, cols, s_row, tiles,
    GC: gl.constexpr, SCALE: gl.constexpr, LARGEST: gl.constexpr, ADD: gl.constexpr, EMAX: gl.constexpr,
    FINITE: gl.constexpr, E5M2: gl.constexpr, SOURCE: gl.constexpr, CURVE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Blocks of 1 x GC (32 or 128) of x (rows, cols): codes (rows, cols) and (cols, rows), a scale a block each."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    COLS: gl.constexpr = gl.BlockedLayout([32, 1], [1, 32], [4, 2], [0, 1])
    G: gl.constexpr = 128 // GC
    pid = gl.program_id(0)
    row = pid // tiles * 128
    col = pid % tiles * 128

    r = row + gl.arange(0, 128, gl.SliceLayout(1, ROWS))
    c = col + gl.arange(0, 128, gl.SliceLayout(0, ROWS))
    place = r.to(gl.int64)[:, None]
    places = x + place * s_row + c[None, :]
    if CURVE == "":
        tile = _normed(gl.load(places), x, gamma, beta, means, rstds, r, c, SOURCE)
    else:
        tile = _curve(gl.load(places).to(gl.float32), CURVE)
        if GATED:
            tile *= gl.load(places + cols).to(gl.float32)
        turned = gl.convert_layout(tile.to(x.dtype.element_ty), COLS)  # rather than to compute it once more
        tile = tile.to(x.dtype.element_ty).to(gl.float32)
    groups = gl.reshape(tile, (128, G, GC))
    stored, inverse = _scale_and_inverse(_largest(groups, 2, FINITE), SCALE, LARGEST, ADD, EMAX)
    codes = gl.reshape(_codes(groups, inverse[:, :, None], E5M2, FINITE), (128, 128))
    gl.store(out_r + place * cols + c[None, :], gl.convert_layout(codes, ROWS))
    FLAT_R: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 2], [0, 1])
    stored = gl.convert_layout(stored, FLAT_R)
    sr = row + gl.arange(0, 128, gl.SliceLayout(1, FLAT_R))
    sg = pid % tiles * G + gl.arange(0, G, gl.SliceLayout(0, FLAT_R))
    gl.store(scales_r + sr.to(gl.int64)[:, None] * (cols // GC) + sg[None, :], stored)

    r = row + gl.arange(0, 128, gl.SliceLayout(1, COLS))
    c = col + gl.arange(0, 128, gl.SliceLayout(0, COLS))
    if CURVE == "":
        places = x + r.to(gl.int64)[:, None] * s_row + c[None, :]
        tile = _normed(gl.load(places), x, gamma, beta, means, rstds, r, c, SOURCE)
    else:
        tile = turned.to(gl.float32)
    groups = gl.reshape(tile, (G, GC, 128))
    stored, inverse = _scale_and_inverse(_largest(groups, 1, FINITE), SCALE, LARGEST, ADD, EMAX)
    codes = gl.reshape(_codes(groups, inverse[:, None, :], E5M2, FINITE), (128, 128))
    gl.store(out_c + c.to(gl.int64)[None, :] * rows + r[:, None], gl.convert_layout(codes, COLS))
    FLAT_C: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 4], [1, 0])
    stored = gl.convert_layout(stored, FLAT_C)
    sg = row // GC + gl.arange(0, G, gl.SliceLayout(1, FLAT_C))
    sc = col + gl.arange(0, 128, gl.SliceLayout(0, FLAT_C))
    gl.store(scales_c + sc.to(gl.int64)[None, :] * (rows // GC) + sg[:, None], stored)
