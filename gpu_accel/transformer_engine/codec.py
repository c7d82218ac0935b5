"""Device functions: float32 to codes, largest magnitudes to scales. Used by every kernel of this package.

On GPUs that convert to fp8 themselves (sm_89 and newer, NATIVE) e4m3 and e5m2 use that instruction: Triton 3.6 to
3.9 write cvt.rn.satfinite for both, so ties go to even, what is too large saturates, and NaN is 0x7F (a test reads the
PTX). Everywhere else, in the interpreter, and for narrower formats, integers do the same: Triton's interpreter drops
the carry of the mantissa (seen on 3.7.1) and older GPUs have no such instruction.

ptxas 12.8.93 and 12.9.86 (of Triton 3.6 to 3.9) miscompile that instruction where its two codes are used twice: as half
of a packed word and by themselves. They merge it into the packed word and read a register that nothing wrote for the
other use; on an H100 a quarter of the bytes was wrong. So nothing here lets a result of it have both uses (a test reads
the PTX): copies along rows and along columns take their scale from two loads, which are not known to be equal.

e2m1 takes one addition: its steps are 0.5, 1 and 2 in [0, 2), [2, 4) and [4, 6], so adding the float32 number whose
last place is that step rounds to nearest even, and with last bits 0, 2 and 4 chosen for it they become the code.

ELEMENT is 0 e4m3, 1 e5m2, 2 e2m3, 3 e3m2, 4 e2m1, 5 int8, 6 int4. SCALE is 0 fp32, 1 pow2, 2 e8m0, 3 nvfp4.
"""

from __future__ import annotations

import triton
import triton.language as tl

ELEMENTS = {"e4m3": 0, "e5m2": 1, "e2m3": 2, "e3m2": 3, "e2m1": 4, "int8": 5, "int4": 6}
SCALES = {"fp32": 0, "pow2": 1, "e8m0": 2, "nvfp4": 3}
_INF = tl.constexpr(0x7F800000)
_MIN_SCALE = tl.constexpr(2.0**-126)
_MAX_ENCODE = tl.constexpr(2.0**126)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float_code(y, words, M: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Magnitude codes of |y| (float32), saturated to the code LARGEST; NaN gives LARGEST too."""
    size = bits_of(y) & 0x7FFFFFFF
    if STOCHASTIC:
        field = size >> 23
        exponent = tl.maximum(field, 1) - 127
        significand = (size & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
        target = tl.maximum(exponent, 1 - BIAS)
        shift = (23 - M) + target - exponent
        whole = tl.where(shift < 32, significand >> tl.minimum(shift, 31), 0)
        rest = (significand - (whole << tl.minimum(shift, 31))).to(tl.uint32)
        left = tl.maximum(tl.minimum(32 - shift, 31), 0).to(tl.uint32)
        right = tl.minimum(tl.maximum(shift - 32, 0), 31).to(tl.uint32)
        fraction = (rest << left) >> right  # of a step, in units of 2**-32
        code = whole + (words < fraction).to(tl.int32) + ((target + BIAS - 1) << M)
    else:
        DROP: tl.constexpr = 23 - M
        MAGIC: tl.constexpr = 1.5 * 2.0 ** (24 - BIAS - M)  # its last place is the smallest subnormal number
        code = ((size + ((1 << (DROP - 1)) - 1) + ((size >> DROP) & 1)) >> DROP) - ((127 - BIAS) << M)
        small = bits_of(tl.abs(y) + MAGIC) & 0xFF
        code = tl.where(size < ((128 - BIAS) << 23), small, code)
    return tl.where(size >= _INF, LARGEST, tl.minimum(code, LARGEST))


@triton.jit
def encode(y, words, ELEMENT: tl.constexpr, STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr):
    """Codes (uint8, unpacked) of float32 y, saturating. `words` are random uint32 of its shape if STOCHASTIC."""
    sign = (bits_of(y) >> 24) & 0x80
    nan = y != y
    if ELEMENT <= 1:
        if NATIVE and not STOCHASTIC:
            if ELEMENT == 0:
                return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            else:
                return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            if ELEMENT == 0:
                code = _float_code(y, words, 3, 7, 0x7E, STOCHASTIC)
            else:
                code = _float_code(y, words, 2, 15, 0x7B, STOCHASTIC)
            return tl.where(nan, 0x7F, code | sign).to(tl.uint8)
    elif ELEMENT == 2:
        code = _float_code(y, words, 3, 1, 0x1F, STOCHASTIC)
        return tl.where(nan, 0x1F, code | (sign >> 2)).to(tl.uint8)
    elif ELEMENT == 3:
        code = _float_code(y, words, 2, 3, 0x1F, STOCHASTIC)
        return tl.where(nan, 0x1F, code | (sign >> 2)).to(tl.uint8)
    elif ELEMENT == 4:
        if STOCHASTIC:
            code = _float_code(y, words, 1, 1, 7, True)
        else:
            size = tl.minimum(tl.abs(y), 6.0)
            magic = tl.where(size < 2.0, 6291456.0, tl.where(size < 4.0, 12582914.0, 25165832.0))
            code = bits_of(size + magic) & 7
            if NATIVE:  # there a NaN product has no sign, and the minimum of NaN and 6 is 6: already code 7
                return (code | (sign >> 4)).to(tl.uint8)
        return tl.where(nan, 7, code | (sign >> 4)).to(tl.uint8)
    else:
        LIMIT: tl.constexpr = 127.0 if ELEMENT == 5 else 7.0
        MASK: tl.constexpr = 0xFF if ELEMENT == 5 else 0xF
        limited = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
        return tl.where(nan, 0, bits_of(limited + 12582912.0) & MASK).to(tl.uint8)


@triton.jit
def encode_scale(amax):
    """Of nvfp4: what a tensor is multiplied with first, from its largest finite magnitude (float32)."""
    scale = tl.minimum(tl.div_rn(2688.0, amax), _MAX_ENCODE)
    return tl.where(amax > 0, scale, 1.0)


@triton.jit
def scale_and_inverse(
    bits, encode, SCALE: tl.constexpr, LARGEST: tl.constexpr, ADD: tl.constexpr, EMAX: tl.constexpr,
):  # fmt: skip
    """(scale as it is stored, what numbers are multiplied with) from the bits of largest magnitudes.

    `encode` is the tensor's `encode_scale` for nvfp4. ADD and EMAX are those of `scales.mx_rounding` and `carry`.
    """
    wrong = bits >= _INF
    if SCALE == 2:
        code = tl.minimum(tl.maximum(((bits + ADD) >> 23) - EMAX, 0), 254)
        inverse = tl.where(wrong, float("nan"), number_of((254 - code) << 23))
        stored = tl.where(wrong, 255, code).to(tl.uint8)
    elif SCALE == 3:
        wanted = tl.minimum(number_of(bits) * tl.div_rn(encode, 6.0), 448.0)
        wanted = tl.where(wrong, 0.0, wanted)
        # by integers on every GPU: ptxas spoils a conversion to fp8 that is both packed and read, see the file's head
        code = _float_code(wanted, 0, 3, 7, 0x7E, False)
        normal = number_of((code + (120 << 3)) << 20)
        number = tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
        inverse = tl.minimum(tl.div_rn(encode + tl.zeros_like(number), tl.where(code == 0, 1.0, number)), _FLT_MAX)
        inverse = tl.where(wrong, float("nan"), tl.where(code == 0, 0.0, inverse))
        stored = tl.where(wrong, 0x7F, code).to(tl.uint8)
    else:
        if SCALE == 1:
            stored = number_of(tl.maximum(((bits + ADD) >> 23) - EMAX, 1) << 23)
        else:
            stored = tl.maximum(tl.div_rn(number_of(bits), LARGEST), _MIN_SCALE)
        stored = tl.where(bits > 0, stored, 1.0)
        stored = tl.where(wrong, float("nan"), stored)
        inverse = tl.div_rn(1.0, stored)
    return stored, inverse


@triton.jit
def pack_pairs(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Two four-bit codes a byte, the first in the low half: (ROWS, COLS) -> (ROWS, COLS / 2)."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLS // 2, 2)))
    return low | (high << 4)


@triton.jit
def random_words(row, col, pitch, seed, STREAM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """uint32 words (ROWS, COLS) for the elements from (row, col) on: word i % 4 of Philox at i // 4.

    `pitch` is the number of columns rounded up to four; col is a multiple of four.
    """
    r = row + tl.arange(0, ROWS).to(tl.int64)
    c = col // 4 + tl.arange(0, COLS // 4)
    index = r[:, None] * (pitch // 4) + c[None, :]
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, c0, c1, tl.zeros_like(c0) + STREAM, tl.zeros_like(c0))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS))
