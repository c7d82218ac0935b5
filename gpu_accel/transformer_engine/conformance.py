"""Conformance vectors: numbers, codes and scales that any implementation of these formats can be tested against.

`conformance.json` beside this file is written by `python -m gpu_accel.transformer_engine.conformance --write` from the
implementation below, which shares nothing with the rest of the package: Python integers and exact fractions, one value
at a time, from the definitions. Numbers in the file are strings of `float.hex()` ("0x1.8p+1", "nan", "-inf").

    formats[name].decode       256 numbers (or 2**bits), by code
    formats[name].encode       [input, code saturating, code not saturating or null] for ties, ends and specials
    inputs[case]               small matrices of numbers, as rows
    blocks                     {case, scheme, codes (row-major, unpacked), scales (rows of blocks), tensor_scale}
    packing, swizzle           small examples of the order of nibbles and of scales
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("conformance.json")

# name -> exponent bits, mantissa bits, bias, signed, kind of specials
DEFINITIONS: dict[str, tuple[int, int, int, bool, str]] = {
    "e4m3": (4, 3, 7, True, "last"),
    "e5m2": (5, 2, 15, True, "ieee"),
    "e4m3fnuz": (4, 3, 8, True, "minus-zero"),
    "e5m2fnuz": (5, 2, 16, True, "minus-zero"),
    "e2m3": (2, 3, 1, True, "none"),
    "e3m2": (3, 2, 3, True, "none"),
    "e2m1": (2, 1, 1, True, "none"),
    "ue4m3": (4, 3, 7, False, "last"),
}


def load() -> dict[str, Any]:
    """The published vectors."""
    return json.loads(FILE.read_text(encoding="utf-8"))


# -- float32 arithmetic on exact fractions


def round_to(value: Fraction, mantissa_bits: int, lowest_exponent: int) -> Fraction:
    """The nearest multiple of the step that `value` has in a binary format, ties to the even multiple."""
    if value == 0:
        return value
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, lowest_exponent) - mantissa_bits)
    return (1 if value > 0 else -1) * round(size / step) * step  # round() of a fraction goes to even


def float32(value: Fraction) -> Any:
    """The nearest float32; math.inf beyond the largest."""
    near = round_to(value, 23, -126)
    limit = Fraction(2) ** 128
    return near if abs(near) < limit else math.copysign(math.inf, value)


# -- formats


def decode(name: str, code: int) -> float:
    """What a code means."""
    exponent_bits, mantissa_bits, bias, signed, special = DEFINITIONS[name]
    width = exponent_bits + mantissa_bits
    negative, magnitude = signed and code >> width & 1, code & ((1 << width) - 1)
    if special == "minus-zero" and negative and not magnitude:
        return math.nan
    field, fraction = divmod(magnitude, 1 << mantissa_bits)
    if special == "last" and magnitude == (1 << width) - 1:
        return math.nan
    if special == "ieee" and field == (1 << exponent_bits) - 1:
        return math.nan if fraction else -math.inf if negative else math.inf
    if field:
        value = (1 + Fraction(fraction, 1 << mantissa_bits)) * Fraction(2) ** (field - bias)
    else:
        value = Fraction(fraction, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return -float(value) if negative else float(value)


@functools.cache
def magnitudes(name: str) -> list[Fraction]:
    """The finite numbers that are not negative, by code."""
    exponent_bits, mantissa_bits, *_ = DEFINITIONS[name]
    values = [decode(name, code) for code in range(1 << (exponent_bits + mantissa_bits))]
    return [Fraction(v) for v in values if math.isfinite(v)]


def encode(name: str, x: float, *, saturate: bool = True) -> int | None:
    """The code of the nearest number, of two equally near the even code; None where the format has no answer."""
    exponent_bits, mantissa_bits, _, signed, special = DEFINITIONS[name]
    width = exponent_bits + mantissa_bits
    known = magnitudes(name)
    nan = {"last": 0x7F, "ieee": 0x7F, "minus-zero": 0x80, "none": len(known) - 1}[special]
    if math.isnan(x) or (not signed and x < 0):
        return nan
    sign = (math.copysign(1, x) < 0) << width if signed else 0
    beyond = known[-1] + (known[-1] - known[-2])  # where the next number would be
    size = min(Fraction(abs(x)), 2 * beyond) if math.isfinite(x) else 2 * beyond
    if size > known[-1]:
        tie = (known[-1] + beyond) / 2
        over = size > tie or (size == tie and len(known) % 2 == 0)  # the code beyond would be even
        if over and not saturate:
            if special == "none":
                return None
            return len(known) | sign if special == "ieee" else nan
        return (len(known) - 1) | sign
    above = bisect.bisect_left(known, size)
    below = max(above - 1, 0)
    up, down = known[above] - size, size - known[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return 0 if special == "minus-zero" and code == 0 else code | sign


# -- blocks


def _power_code(amax: Fraction, largest: Fraction, mantissa_bits: int, rule: str) -> int:
    """The e8m0 code for a block, from the definitions of the four rules."""
    if amax == 0:
        return 0
    top = math.floor(math.log2(largest))
    floor = amax.numerator.bit_length() - amax.denominator.bit_length()
    floor -= amax < Fraction(2) ** floor
    if rule == "rceil":  # least n with amax <= largest * 2**n
        exponent = floor - top
        exponent += amax > largest * Fraction(2) ** exponent
        exponent -= amax <= largest * Fraction(2) ** (exponent - 1)
    elif rule == "even":  # the magnitude rounded half up to the element's significand may reach the next power of two
        step = Fraction(2) ** (floor - mantissa_bits)
        rounded = math.floor(amax / step + Fraction(1, 2)) * step
        exponent = floor + (rounded >= Fraction(2) ** (floor + 1)) - top
    else:
        exponent = floor + (rule == "ceil" and amax > Fraction(2) ** floor) - top
    return max(0, min(254, exponent + 127))


def quantize_block(values: list[float], scheme: str, encode_scale: Fraction | None = None) -> tuple[list[int], Any]:
    """(codes, scale as stored) of one block; scales in float32 are floats, others codes."""
    element, _, kind, *rest = scheme.split(":")
    largest = Fraction(127 if element == "int8" else 7) if element.startswith("int") else magnitudes(element)[-1]
    in_place = kind in ("fp32", "pow2") and element in ("e4m3", "e5m2")
    finite = [Fraction(abs(v)) for v in values if math.isfinite(v)]
    poisoned = len(finite) < len(values) and not in_place
    amax = max(finite, default=Fraction(0))
    inverse: Fraction | float
    stored: Any
    if kind == "e8m0":
        stored = 255 if poisoned else _power_code(amax, largest, DEFINITIONS[element][1], rest[0])
        inverse = Fraction(2) ** (127 - stored)
    elif kind == "nvfp4":
        assert encode_scale is not None
        sixth = float32(encode_scale / 6)
        wanted = min(Fraction(float32(amax * sixth)), Fraction(448))
        stored = 0x7F if poisoned else encode("ue4m3", float(wanted))
        number = Fraction(decode("ue4m3", stored)) if stored != 0x7F else Fraction(1)
        inverse = float32(encode_scale / number) if number else Fraction(0)
        inverse = Fraction(3.4028234663852886e38) if inverse == math.inf else inverse
    else:
        if amax == 0:
            scale = Fraction(1)
        elif kind == "pow2":
            scale = Fraction(2) ** (_power_code(amax, largest, 0, "rceil") - 127)
        else:
            scale = Fraction(float32(amax / largest))
        scale = max(scale, Fraction(2) ** -126)
        stored = math.nan if poisoned else float(scale)
        inverse = float32(1 / scale)
    codes: list[Any] = []
    for value in values:
        if poisoned or not math.isfinite(value):
            scaled = math.nan
        else:
            product = float32(Fraction(value) * Fraction(inverse))
            scaled = math.copysign(float(product), value)
        if element.startswith("int"):
            whole: Any = 0 if math.isnan(scaled) else max(-largest, min(largest, round(Fraction(scaled))))
            codes.append(int(whole) & (0xFF if element == "int8" else 0xF))
        else:
            codes.append(encode(element, scaled))
    return codes, stored


def quantize_matrix(rows: list[list[float]], scheme: str) -> dict[str, Any]:
    """Codes and scales of a small matrix."""
    _, block, kind, *_ = scheme.split(":")
    high, wide = len(rows), len(rows[0])
    block_rows, block_cols = (int(n) for n in block.split("x"))
    block_rows, block_cols = block_rows or high, block_cols or wide
    encode_scale: Any = None
    tensor_scale = None
    if kind == "nvfp4":
        finite = [Fraction(abs(v)) for row in rows for v in row if math.isfinite(v)]
        amax = max(finite, default=Fraction(0))
        wanted = float32(Fraction(2688) / amax) if amax else Fraction(1)
        encode_scale = min(Fraction(2) ** 126, wanted) if wanted != math.inf else Fraction(2) ** 126
        tensor_scale = float(float32(1 / encode_scale)).hex()
    codes = [[0] * wide for _ in range(high)]
    scales = []
    for top in range(0, high, block_rows):
        line = []
        for left in range(0, wide, block_cols):
            places = [
                (r, c)
                for r in range(top, min(high, top + block_rows))
                for c in range(left, min(wide, left + block_cols))
            ]
            made, stored = quantize_block([rows[r][c] for r, c in places], scheme, encode_scale)
            for (r, c), code in zip(places, made, strict=True):
                codes[r][c] = code
            line.append(stored.hex() if isinstance(stored, float) else stored)
        scales.append(line)
    return {
        "scheme": scheme,
        "codes": [c for row in codes for c in row],
        "scales": scales,
        "tensor_scale": tensor_scale,
    }


# -- the file

BLOCK_SCHEMES = (
    "e4m3:0x0:fp32", "e5m2:0x0:fp32", "e4m3:1x0:fp32", "e4m3:1x128:fp32", "e4m3:1x128:pow2", "e4m3:128x128:fp32",
    "e4m3:1x32:e8m0:rceil", "e4m3:1x32:e8m0:floor", "e4m3:1x32:e8m0:ceil", "e4m3:1x32:e8m0:even",
    "e5m2:1x32:e8m0:rceil", "e2m3:1x32:e8m0:rceil", "e3m2:1x32:e8m0:rceil",
    "e2m1:1x32:e8m0:rceil", "e2m1:1x32:e8m0:floor", "e2m1:1x32:e8m0:ceil", "e2m1:1x32:e8m0:even",
    "e2m1:1x16:nvfp4", "e2m1:16x16:nvfp4", "int8:0x0:fp32", "int8:1x0:fp32", "int4:1x32:fp32",
)  # fmt: skip


def _f32(value: float) -> float:
    near: Any = float32(Fraction(value)) if math.isfinite(value) else value
    return math.copysign(float(near), value)


def block_inputs(seed: int = 0) -> dict[str, list[list[float]]]:
    """Small matrices by what they try: ordinary numbers, zeros, tiny and huge numbers, NaN, Inf, a row of each."""
    draw = random.Random(seed)

    def row(scale: float, wide: int = 40) -> list[float]:
        return [_f32(draw.gauss(0, 1) * scale) for _ in range(wide)]

    ordinary = [row(1.0), row(300.0), row(2.0**-20)]
    zeros = [[0.0] * 40, [0.0, -0.0] * 20, row(1.0)]
    tiny = [row(1e-38), row(1e-41), row(1e-45), row(1e-23)]
    huge = [row(8e37), [_f32(3.4028234e38)] * 40, row(1.0)]
    special = [row(1.0), row(1.0), row(1.0), row(1.0)]
    special[0][3], special[1][20], special[2][33], special[3][0], special[3][1] = (
        math.nan, math.inf, -math.inf, math.nan, math.inf,
    )  # fmt: skip
    # largest magnitudes around the borders of the rules: 1.5, 1.75 and 1.875 times a power of two, and just beyond
    edges = [[_f32(m * 2.0**e)] + [_f32(m * 2.0**e / n) for n in range(2, 41)]
             for m in (1.0, 1.5, 1.5000001, 1.75, 1.7500001, 1.875, 1.9375, 1.9999999) for e in (0,)]  # fmt: skip
    small_beside_large = [[448.0 * 6 * 64] + [2.0**-12] * 39]
    return {"ordinary": ordinary, "zeros": zeros, "tiny": tiny, "huge": huge, "special": special, "edges": edges,
            "small beside large": small_beside_large, "one": [[-2.5]]}  # fmt: skip


def _encode_cases(name: str) -> list[list[Any]]:
    known = [float(v) for v in magnitudes(name)]
    beyond = 2 * known[-1] - known[-2]
    points = [*known, beyond]
    ties = [(a + b) / 2 for a, b in zip(points, points[1:], strict=False)]
    around = [_f32(t * (1 + side * 2.0**-20)) for t in ties for side in (-1, 1)]
    cases = [*ties, *around, beyond, 4 * beyond, 1e38, 1e-38, 0.0, math.inf]
    both = [*cases, *(-c for c in cases), math.nan]
    return [[x.hex(), encode(name, x), encode(name, x, saturate=False)] for x in both]


def generate() -> dict[str, Any]:
    """Everything in the file."""
    formats: dict[str, Any] = {}
    for name, (exponent_bits, mantissa_bits, _, _, _) in DEFINITIONS.items():
        codes = 1 << (exponent_bits + mantissa_bits + 1)
        formats[name] = {
            "decode": [decode(name, code).hex() for code in range(codes)],
            "encode": _encode_cases(name),
        }
    powers = [float(Fraction(2) ** (code - 127)).hex() for code in range(255)]
    formats["e8m0"] = {"decode": [*powers, "nan"]}
    inputs = {case: [[v.hex() for v in row] for row in rows] for case, rows in block_inputs().items()}
    blocks = [
        {"case": case, **quantize_matrix(rows, scheme)}
        for scheme in BLOCK_SCHEMES
        for case, rows in block_inputs().items()
    ]
    order = [(r % 32) * 16 + r // 32 * 4 + c for r in range(128) for c in range(4)]
    return {
        "about": "Conformance vectors of gpu-accel's low-precision formats; see conformance.py beside this file.",
        "version": 1,
        "formats": formats,
        "inputs": inputs,
        "blocks": blocks,
        "packing": {"codes": [2, 7, 1], "bytes": [0x72, 0x01]},
        "swizzle": {"rows": 128, "columns": 4, "place_of_row_major_byte": order},
    }


def text() -> str:
    """The file's content: one line an entry, so that a change shows."""
    made = generate()
    lines = []
    for key, value in made.items():
        if key in ("formats", "inputs"):
            inner = ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in value.items())
            lines.append(f'"{key}": {{\n{inner}\n}}')
        elif isinstance(value, list):
            inner = ",\n".join(f"  {json.dumps(v)}" for v in value)
            lines.append(f'"{key}": [\n{inner}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}; without it the text is printed")
    if parser.parse_args().write:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
