"""How a tensor becomes codes and scales, as data: element format, block, kind of scale, rounding.

    scheme("mxfp8")                                    one of SCHEMES
    Scheme(element="e5m2", block=(1, 128), scale="fp32")
    scheme("e5m2:1x128:fp32")                          the same, as the text that is saved with a tensor

A tensor (..., K) is seen as a matrix of M rows and K columns. `block` is (rows, columns) of what shares one scale; 0
means all of them, so (0, 0) is a scale per tensor and (1, 0) one per row. Blocks at the edges may be smaller.

    scale     stored as      rule
    "fp32"    float32        largest magnitude of the block / largest number of the format
    "pow2"    float32        the same, rounded up to a power of two
    "e8m0"    one byte       a power of two, found by `rule` (OCP MX)
    "nvfp4"   e4m3           two levels: e4m3 per block of 16, one float32 per tensor

`hadamard`: rows are first multiplied by a random orthogonal matrix in runs of that many columns.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Literal

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine.formats import FORMATS, Rounding

ScaleKind = Literal["fp32", "pow2", "e8m0", "nvfp4"]
Rule = Literal["rceil", "floor", "ceil", "even"]
SCALES = ("fp32", "pow2", "e8m0", "nvfp4")
RULES = ("rceil", "floor", "ceil", "even")
INTEGERS = {"int8": 127, "int4": 7}  # symmetric: -128 and -8 are not used
FLOATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_TEXT = re.compile(r"(\w+):(\d+)x(\d+):(\w+)(?::(rceil|floor|ceil|even))?(:stochastic)?(?::hadamard(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to quantise; see the head of this file."""

    element: str
    block: tuple[int, int]
    scale: ScaleKind
    rule: Rule = "rceil"
    rounding: Rounding = "nearest"
    hadamard: int = 0

    def __post_init__(self) -> None:
        if self.element not in (*FLOATS, *INTEGERS):
            raise InvalidInputError(f"element must be one of {', '.join((*FLOATS, *INTEGERS))}, got {self.element!r}")
        if self.scale not in SCALES:
            raise InvalidInputError(f"scale must be one of {', '.join(SCALES)}, got {self.scale!r}")
        if self.rule not in RULES or (self.rule != "rceil" and self.scale != "e8m0"):
            raise InvalidInputError(f"rule {self.rule!r} does not go with scales in {self.scale}")
        if self.rounding not in ("nearest", "stochastic"):
            raise InvalidInputError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        if not isinstance(self.block, tuple) or len(self.block) != 2 or not all(type(n) is int for n in self.block):
            raise InvalidInputError(f"block must be (rows, columns), two integers, got {self.block!r}")
        rows, cols = self.block
        powers = all(n == 0 or (8 <= n <= 256 and n & (n - 1) == 0) for n in self.block if n != 1)
        if not powers or (rows, cols) == (0, 1) or (rows != cols and rows != 1) or (cols == 1):
            raise InvalidInputError(
                f"block must be (0, 0), (1, 0), (1, n) or (n, n) with n a power of two from 8 to 256, got {self.block}"
            )
        if self.scale == "nvfp4" and (self.element, cols) != ("e2m1", 16):
            raise InvalidInputError("two-level scales are those of e2m1 in blocks of 16")
        if self.scale == "e8m0" and (self.element in INTEGERS or cols == 0):
            raise InvalidInputError("scales in e8m0 go with floating-point elements in blocks")
        if self.rounding == "stochastic" and self.element in INTEGERS:
            raise InvalidInputError("integers are rounded to nearest only")
        if type(self.hadamard) is not int:
            raise InvalidInputError(f"hadamard must be 0 or 16, got {self.hadamard!r}")
        if self.hadamard and (self.hadamard != 16 or self.block != (1, 16)):
            raise InvalidInputError("the Hadamard matrix is of size 16 and goes with blocks of 1 x 16")
        object.__setattr__(self, "_text", self._written())

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return int(self.element[3:]) if self.element in INTEGERS else FORMATS[self.element].bits

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes. Six-bit codes take a byte each (`formats.pack_sixes` packs them)."""
        return self.bits == 4

    @property
    def largest(self) -> float:
        return float(INTEGERS[self.element]) if self.element in INTEGERS else FORMATS[self.element].largest

    @property
    def bits_per_value(self) -> float:
        """With the scales of blocks counted (not those per row or tensor)."""
        rows, cols = self.block
        if not cols:
            return float(self.bits)
        return self.bits + (8 if self.scale in ("e8m0", "nvfp4") else 32) / (rows * cols)

    @property
    def keeps_nan_in_place(self) -> bool:
        """Whether NaN is kept by the element; else it makes the scale NaN, and so the block."""
        return self.scale in ("fp32", "pow2") and self.element in ("e4m3", "e5m2")

    @property
    def text(self) -> str:
        """The scheme as a word that `scheme` reads back."""
        return self._text  # type: ignore[attr-defined]  # set by __post_init__: it is asked for at every call

    def _written(self) -> str:
        parts = [self.element, f"{self.block[0]}x{self.block[1]}", self.scale]
        if self.scale == "e8m0":
            parts.append(self.rule)
        if self.rounding == "stochastic":
            parts.append("stochastic")
        if self.hadamard:
            parts.append(f"hadamard{self.hadamard}")
        return ":".join(parts)

    def with_(self, **changes) -> Scheme:
        """A copy with other values, such as ``scheme("nvfp4").with_(rounding="stochastic")``."""
        return replace(self, **changes)

    def __str__(self) -> str:
        return next((name for name, known in SCHEMES.items() if known == self), self.text)


SCHEMES = {
    "fp8": Scheme(element="e4m3", block=(0, 0), scale="fp32"),
    "fp8_e5m2": Scheme(element="e5m2", block=(0, 0), scale="fp32"),
    "fp8_row": Scheme(element="e4m3", block=(1, 0), scale="fp32"),
    "fp8_1x128": Scheme(element="e4m3", block=(1, 128), scale="fp32"),
    "fp8_128x128": Scheme(element="e4m3", block=(128, 128), scale="fp32"),
    "mxfp8": Scheme(element="e4m3", block=(1, 32), scale="e8m0"),
    "mxfp8_e5m2": Scheme(element="e5m2", block=(1, 32), scale="e8m0"),
    "mxfp6_e2m3": Scheme(element="e2m3", block=(1, 32), scale="e8m0"),
    "mxfp6_e3m2": Scheme(element="e3m2", block=(1, 32), scale="e8m0"),
    "mxfp4": Scheme(element="e2m1", block=(1, 32), scale="e8m0"),
    "nvfp4": Scheme(element="e2m1", block=(1, 16), scale="nvfp4"),
    "nvfp4_16x16": Scheme(element="e2m1", block=(16, 16), scale="nvfp4"),
    "int8": Scheme(element="int8", block=(0, 0), scale="fp32"),
    "int8_row": Scheme(element="int8", block=(1, 0), scale="fp32"),
    "int4_32": Scheme(element="int4", block=(1, 32), scale="fp32"),
    "int4_128": Scheme(element="int4", block=(1, 128), scale="fp32"),
}


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Scheme:
    if text in SCHEMES:
        return SCHEMES[text]
    found = _TEXT.fullmatch(text)
    if not found:
        raise InvalidInputError(
            f"no scheme {text!r}; there are {', '.join(SCHEMES)}, or write it as in e4m3:1x128:fp32"
        )
    element, rows, cols, scale, rule, stochastic, hadamard = found.groups()
    return Scheme(
        element=element,
        block=(int(rows), int(cols)),
        scale=scale,  # type: ignore[arg-type]  # checked by Scheme
        rule=rule or "rceil",  # type: ignore[arg-type]
        rounding="stochastic" if stochastic else "nearest",
        hadamard=int(hadamard or 0),
    )


def scheme(what: str | Scheme) -> Scheme:
    """A scheme by its name in SCHEMES or by its text. Raises InvalidInputError for an unknown one."""
    if not isinstance(what, str | Scheme):
        raise InvalidInputError(f"a scheme is a Scheme, its name or its text, got {type(what).__name__}")
    return what if isinstance(what, Scheme) else _parse(what)
