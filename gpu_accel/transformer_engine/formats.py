"""Number formats of eight bits and fewer: what every code means, and how a float32 becomes one.

    name        bits s-e-m  bias  largest  smallest   special
    e4m3        1-4-3       7     448      2**-9      NaN 0x7F and 0xFF, no Inf            (OCP 8-bit formats, "FN")
    e5m2        1-5-2       15    57344    2**-16     Inf 0x7C, NaN 0x7D to 0x7F           (like IEEE 754)
    e4m3fnuz    1-4-3       8     240      2**-10     NaN 0x80 only; no -0, no Inf         (MI300)
    e5m2fnuz    1-5-2       16    57344    2**-17     NaN 0x80 only; no -0, no Inf         (MI300)
    e2m3        1-2-3       1     7.5      0.125      none                                 (OCP MX, FP6)
    e3m2        1-3-2       3     28       0.0625     none                                 (OCP MX, FP6)
    e2m1        1-2-1       1     6        0.5        none                                 (OCP MX, FP4)
    ue4m3       0-4-3       7     448      2**-9      NaN 0x7F; the sign bit is ignored    (scales of NVFP4)
    e8m0        0-8-0       127   2**127   2**-127    NaN 0xFF; no zero, no Inf, no sign   (scales of OCP MX)

Rounding uses integers only, so it does not depend on what a library's cast does (torch's eager cast to e4m3 turned 500
into NaN before version 2.13 and into 448 since, its CPU and GPU differed, and so do Triton's interpreter and compiler):

* "nearest": ties to the even code. "stochastic": up with the probability of the discarded part, resolved to 2**-32 of
  a step, from Philox4x32-10 (`random_words`), so a seed gives the same codes on every device.
* saturate=True: everything beyond the largest number, infinities included, becomes the largest number, as in the
  conversions of NVIDIA GPUs (PTX `.satfinite`). saturate=False: what would round beyond it becomes Inf, or NaN in a
  format without Inf, as IEEE 754 has it; formats with neither refuse.
* NaN becomes NaN, always the one positive code (0x7F for e4m3 and e5m2). In a format without NaN it becomes the largest
  positive number, as PTX has it: a scale has to carry NaN there (see `scales`). Negative numbers are NaN in the
  formats of scales.
* Zero keeps its sign where the format has -0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown

Rounding = Literal["nearest", "stochastic"]
Special = Literal["ieee", "fn", "fnuz", "none", "scale"]
ROUNDINGS = ("nearest", "stochastic")
_INF_BITS = 0x7F800000
_KEY_STEP = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Format:
    """One number format. Codes are held in the low `bits` bits of a byte."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: Special
    dtype: torch.dtype | None = None  # torch's name for it, where torch has one

    @property
    def signed(self) -> bool:
        return self.name not in ("ue4m3", "e8m0")

    @property
    def bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits + self.signed

    @property
    def largest_code(self) -> int:
        """The code of the largest number."""
        ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        return ones - {"ieee": 1 << self.mantissa_bits, "fn": 1, "scale": 1}.get(self.special, 0)

    @property
    def largest(self) -> float:
        return self.value(self.largest_code)

    @property
    def smallest(self) -> float:
        """The smallest positive number: subnormal where the format has those."""
        return self.value(0 if self.name == "e8m0" else 1)

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (-127 if self.name == "e8m0" else 1 - self.bias)

    @property
    def max_exponent(self) -> int:
        """floor(log2(largest)), "emax" of the OCP MX specification."""
        return math.frexp(self.largest)[1] - 1

    @property
    def nan_code(self) -> int | None:
        """The code that NaN is written as, or None."""
        return {"ieee": 0x7F, "fn": 0x7F, "fnuz": 0x80, "scale": 0xFF}.get(self.special)

    @property
    def inf_code(self) -> int | None:
        return self.largest_code + 1 if self.special == "ieee" else None

    def value(self, code: int) -> float:
        """What a code means; NaN and infinities included."""
        if self.name == "e8m0":
            return math.nan if code == 0xFF else 2.0 ** (code - 127)
        magnitude = code & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
        negative = self.signed and bool(code >> (self.exponent_bits + self.mantissa_bits) & 1)
        if self.special == "fnuz" and code == 0x80:
            return math.nan
        if self.special in ("ieee", "fn") and magnitude > self.largest_code:
            return (-math.inf if negative else math.inf) if magnitude == self.inf_code else math.nan
        field, fraction = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        significand = fraction + (bool(field) << self.mantissa_bits)
        size = significand * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)
        return -size if negative else size


E4M3 = Format("e4m3", 4, 3, 7, "fn", torch.float8_e4m3fn)
E5M2 = Format("e5m2", 5, 2, 15, "ieee", torch.float8_e5m2)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, "fnuz", torch.float8_e4m3fnuz)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, "fnuz", torch.float8_e5m2fnuz)
E2M3 = Format("e2m3", 2, 3, 1, "none")
E3M2 = Format("e3m2", 3, 2, 3, "none")
E2M1 = Format("e2m1", 2, 1, 1, "none")
UE4M3 = Format("ue4m3", 4, 3, 7, "fn")
E8M0 = Format("e8m0", 8, 0, 127, "scale", torch.float8_e8m0fnu)
FORMATS = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M3, E3M2, E2M1, UE4M3, E8M0)}


def number_format(name: str | torch.dtype | Format) -> Format:
    """The format of a name such as "e4m3", or of a torch dtype. Raises InvalidInputError for an unknown one."""
    if isinstance(name, Format):
        return name
    for one in FORMATS.values():
        if name == one.name or (isinstance(name, torch.dtype) and name == one.dtype):
            return one
    raise InvalidInputError(f"no number format {name!r}; there are {', '.join(FORMATS)}")


# -- codes to numbers


def _new_table(name: str, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        fmt = FORMATS[name]
        return torch.tensor([fmt.value(code) for code in range(256)], dtype=torch.float32, device=device)


_table = functools.lru_cache(maxsize=64)(_new_table)


def decode(codes: Tensor, fmt: str | Format) -> Tensor:
    """The float32 numbers that codes (uint8, or a torch dtype of the format) mean; exact. Bits above the format's count
    are ignored, and so is the sign bit of ue4m3. Raises InvalidInputError for another dtype or an unknown format."""
    fmt = number_format(fmt)
    if not isinstance(codes, Tensor):
        raise InvalidInputError(f"codes must be a torch.Tensor, got {type(codes).__name__}")
    if codes.dtype != torch.uint8:
        if codes.dtype != fmt.dtype:
            raise InvalidInputError(f"codes of {fmt.name} must be uint8 or {fmt.dtype}, got {codes.dtype}")
        codes = codes.view(torch.uint8)
    # a table made while torch.compile traces is a stand-in, which must not be kept, nor meet one that was
    table = (_table if type(codes) is Tensor else _new_table)(fmt.name, codes.device)
    return table[codes.long() & ((1 << fmt.bits) - 1)]


# -- numbers to codes


def encode(
    x: Tensor,
    fmt: str | Format,
    *,
    saturate: bool = True,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    stream: int = 0,
) -> Tensor:
    """The codes (uint8, the shape of x) of numbers, rounded as the head of this file says.

    Args:
        x: float32, bfloat16, float16 or an eight-bit float. float64 is refused: it would be rounded twice.
        seed, stream: choose the random words of stochastic rounding, one per element in row-major order.

    Raises:
        InvalidInputError: unknown format or rounding, float64, a seed without need or missing, saturate=False for a
            format that has neither Inf nor NaN.
    """
    fmt = number_format(fmt)
    if rounding not in ROUNDINGS:
        raise InvalidInputError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if (seed is None) == (rounding == "stochastic"):
        raise InvalidInputError("stochastic rounding needs a seed, and nothing else takes one")
    if type(stream) is not int or not 0 <= stream <= _MASK32 or (stream and seed is None):
        raise InvalidInputError(f"stream must be from 0 to 2**32 - 1, and goes with a seed, got {stream!r}")
    if not isinstance(saturate, bool):
        raise InvalidInputError(f"saturate must be True or False, got {shown(saturate)}")
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point() or x.dtype == torch.float64:
        raise InvalidInputError(f"x must be float32 or narrower, got {x.dtype}: round wider ones in one step yourself")
    if fmt.name == "e8m0":
        if rounding != "nearest":
            raise InvalidInputError("scales in e8m0 are not rounded stochastically")
        return encode_e8m0(x, rounding="nearest", saturate=saturate)
    if not saturate and fmt.nan_code is None:
        raise InvalidInputError(f"{fmt.name} has neither Inf nor NaN: only saturate=True can be done")
    words = None if seed is None else random_words(x.numel(), seed, stream, x.device).view(x.shape)
    return encode_with(x, fmt, saturate=saturate, words=words)


def encode_with(x: Tensor, fmt: Format, *, saturate: bool, words: Tensor | None) -> Tensor:
    """`encode` with the random words (int64, the shape of x) given, or to nearest without; nothing is checked."""
    raw = x.float().contiguous().view(torch.int32)
    size = raw & 0x7FFFFFFF
    code = _round_magnitude(size, fmt, words)
    # beyond the largest number
    over = (code > fmt.largest_code) | (size == _INF_BITS)
    if saturate:
        code = torch.where(over, fmt.largest_code, code)
    else:
        beyond = fmt.nan_code if fmt.inf_code is None else fmt.inf_code
        assert beyond is not None
        code = torch.where(over, beyond, code)
    negative = raw < 0
    nan = size > _INF_BITS
    if fmt.special == "fnuz":
        code = torch.where(negative & (code != 0) & (code != 0x80), code | 0x80, code)
    elif fmt.signed:
        code = code | (negative.int() << (fmt.bits - 1))
        if not saturate and fmt.inf_code is None:
            code = torch.where(over, 0x7F, code)  # the one NaN
    else:
        nan = nan | (negative & (size > 0))
    code = torch.where(nan, fmt.largest_code if fmt.nan_code is None else fmt.nan_code, code)
    return code.to(torch.uint8)


def _round_magnitude(size: Tensor, fmt: Format, words: Tensor | None) -> Tensor:
    """Codes of magnitudes (float32 bits without sign) as if the exponent of the format had no end; Inf and NaN give
    something beyond the largest code."""
    m, bias = fmt.mantissa_bits, fmt.bias
    field = size >> 23
    exponent = field.clamp(min=1) - 127
    significand = (size & 0x7FFFFF) | ((field > 0).int() << 23)
    target = exponent.clamp(min=1 - bias)
    shift = 23 - m + target - exponent  # at least 1
    if words is None:
        near = shift.clamp(max=25)  # at 25 everything is below half a step
        odd = (significand >> near) & 1
        steps = (significand + ((1 << (near - 1)) - 1) + odd) >> near
    else:
        wide = significand.long()
        far = shift.long()
        whole = wide >> far.clamp(max=62)
        rest = wide - (whole << far.clamp(max=62))
        # the discarded part as a fraction of a step, in units of 2**-32
        fraction = torch.where(far <= 32, rest << (32 - far).clamp(min=0), rest >> (far - 32).clamp(min=0, max=62))
        steps = (whole + (words < fraction)).int()
    return steps + ((target + bias - 1) << m)


def encode_e8m0(
    x: Tensor, *, rounding: Literal["nearest", "floor", "ceil"] = "nearest", saturate: bool = True
) -> Tensor:
    """Codes (uint8) of powers of two: x rounded to 2**n by its exponent.

    "floor" and "ceil" go to the next power below and above; "nearest" goes up from 1.5 * 2**n on, as torch's cast does
    (ml_dtypes sends that tie to the even exponent). 0 and everything below 2**-127 give 2**-127, since there is no
    zero. What exceeds 2**127 gives 2**127 with `saturate`, else NaN. Negative numbers, NaN and Inf always give NaN
    (0xFF): an infinite scale must not pass for a finite one.
    """
    raw = x.float().contiguous().view(torch.int32)
    # all positive numbers lie between two normal powers of two, or below 2**-126, where the grid is 0 (2**-127) and 1
    size = raw & 0x7FFFFFFF
    add = {"nearest": 0x400000, "floor": 0, "ceil": 0x7FFFFF}.get(rounding)
    if add is None:
        raise InvalidInputError(f"rounding of e8m0 must be nearest, floor or ceil, got {rounding!r}")
    code = (size + add) >> 23
    # below 2**-126 the bits are no longer a logarithm: 2**-127 is 0x400000, and 1.5 * 2**-127 is 0x600000
    border = {"nearest": 0x600000, "floor": 0x800000, "ceil": 0x400001}[rounding]
    code = torch.where(size < 0x800000, (size >= border).int(), code)
    code = torch.where(code > 254, 254 if saturate else 255, code)
    wrong = (size >= _INF_BITS) | ((raw < 0) & (size > 0))
    return torch.where(wrong, 255, code).to(torch.uint8)


# -- random words


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of the product of two 32-bit numbers, in int64."""
    low = a * (b & 0xFFFF)
    rest = a * (b >> 16) + (low >> 16)
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011): four words from a counter of four words (int64 tensors below 2**32)."""
    c0, c1, c2, c3 = counter
    key = [seed & _MASK32, (seed >> 32) & _MASK32]
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIER[0])
        high1, low1 = _multiply(c2, _MULTIPLIER[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = [(k + step) & _MASK32 for k, step in zip(key, _KEY_STEP, strict=True)]
    return c0, c1, c2, c3


def random_words(count: int, seed: int, stream: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """`count` random 32-bit words as int64: word i is word i % 4 of Philox with counter (i // 4, stream, 0)."""
    seed = check_seed(seed)
    index = torch.arange(-(-count // 4), dtype=torch.int64, device=device)
    zero = torch.zeros_like(index)
    words = philox((index & _MASK32, index >> 32, zero + stream, zero), seed)
    return torch.stack(words, -1).reshape(-1)[:count]


def check_seed(seed: int) -> int:
    """A seed between 0 and 2**63 - 1, as Triton takes it."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise InvalidInputError(f"a seed must be an integer from 0 to 2**63 - 1, got {shown(seed)}")
    return seed


# -- packing


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two four-bit codes (..., n) a byte (..., ceil(n / 2)): element 2i in the low half, 2i + 1 in the high half."""
    if codes.dtype != torch.uint8:
        raise InvalidInputError(f"codes must be uint8, got {codes.dtype}")
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, length: int | None = None) -> Tensor:
    """What `pack_nibbles` packed; `length` cuts off the half byte that pads an odd number."""
    return _cut(torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2), length)


def pack_sixes(codes: Tensor) -> Tensor:
    """Four six-bit codes (..., n) in three bytes (..., 3 * ceil(n / 4)), the first code in the lowest bits."""
    if codes.dtype != torch.uint8:
        raise InvalidInputError(f"codes must be uint8, got {codes.dtype}")
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 4))
    four = codes.unflatten(-1, (-1, 4)).int() & 0x3F
    word = four[..., 0] | (four[..., 1] << 6) | (four[..., 2] << 12) | (four[..., 3] << 18)
    return torch.stack((word & 0xFF, (word >> 8) & 0xFF, word >> 16), -1).flatten(-2).to(torch.uint8)


def unpack_sixes(packed: Tensor, length: int | None = None) -> Tensor:
    """What `pack_sixes` packed."""
    if packed.shape[-1] % 3:
        raise InvalidInputError(f"four codes of six bits take three bytes, got {packed.shape[-1]} bytes")
    three = packed.unflatten(-1, (-1, 3)).int()
    word = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
    codes = torch.stack([(word >> shift) & 0x3F for shift in (0, 6, 12, 18)], -1).flatten(-2).to(torch.uint8)
    return _cut(codes, length)


def _cut(codes: Tensor, length: int | None) -> Tensor:
    if length is not None and not 0 <= length <= codes.shape[-1]:
        raise InvalidInputError(f"length must be from 0 to the {codes.shape[-1]} codes there are, got {length}")
    return codes if length is None else codes[..., :length]
