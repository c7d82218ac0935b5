"""`error_report`: what each scheme would make of a tensor, before it is used.

A scheme's error alone hides why: values that saturated, that vanished, that were not finite. All are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.quantizer import check_input, quantize
from gpu_accel.transformer_engine.schemes import INTEGERS, Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

SCHEMES = ("fp8", "fp8_e5m2", "fp8_row", "fp8_1x128", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "int8_row", "int4_32")


@dataclass(frozen=True, kw_only=True)
class SchemeError:
    """One scheme on one tensor. Shares are of all values, the error is over those that were finite."""

    scheme: str
    bits_per_value: float
    relative_error: float  # 2-norm of the difference over that of the tensor; 0 for a tensor of zeros that stays so
    clipped: float  # share that lay beyond the largest number of its block
    vanished: float  # share of values other than zero that became zero
    not_finite: float  # share that came out as NaN or infinite

    @property
    def sqnr_db(self) -> float:
        """-20 log10(relative_error)."""
        return -20 * math.log10(self.relative_error) if self.relative_error else math.inf


@dataclass(frozen=True)
class ErrorReport:
    """The schemes in the order asked for; printing it gives a table."""

    shape: tuple[int, ...]
    amax: float
    rows: tuple[SchemeError, ...]

    def __getitem__(self, name: str) -> SchemeError:
        return next(row for row in self.rows if row.scheme == name)

    def narrowest(self, max_error: float) -> SchemeError | None:
        """The scheme with the fewest bits a value among those within an error, of equals the more exact one."""
        fit = [row for row in self.rows if row.relative_error <= max_error and not row.not_finite]
        return min(fit, key=lambda row: (row.bits_per_value, row.relative_error)) if fit else None

    def __str__(self) -> str:
        lines = [f"{self.shape}, largest magnitude {self.amax:g}", _LINE.format(*_HEAD)]
        lines += [
            _LINE.format(
                r.scheme, f"{r.bits_per_value:.2f}", f"{r.relative_error:.3%}", f"{r.sqnr_db:.1f}", f"{r.clipped:.2%}",
                f"{r.vanished:.2%}", f"{r.not_finite:.2%}",
            )
            for r in self.rows
        ]  # fmt: skip
        return "\n".join(lines)


_HEAD = ("scheme", "bits", "error", "dB", "clipped", "vanished", "NaN/Inf")
_LINE = "{:<14}{:>6}{:>10}{:>7}{:>9}{:>10}{:>9}"


def error_report(
    x: Tensor, schemes: Iterable[str | Scheme] = SCHEMES, *, seed: int = 0, backend: str = "auto"
) -> ErrorReport:
    """Quantise x (..., K) under every scheme and compare.

    Args:
        x: float32, bfloat16 or float16.
        schemes: names, texts or `Scheme`s. seed: for those that round stochastically.

    Raises InvalidInputError as `quantize` does.
    """
    check_input(x)
    if x.is_meta:
        raise InvalidInputError("x is on the meta device and has no values to report on")
    if not isinstance(schemes, Iterable) or isinstance(schemes, Tensor):
        raise InvalidInputError(f"schemes must be names, texts or Schemes, got {type(schemes).__name__}")
    wide = x.detach().float()
    finite = wide.isfinite()
    clean = torch.where(finite, wide, 0.0).double()
    count = max(1, x.numel())
    norm = clean.norm().item()
    rows = []
    for one in schemes:
        what = find_scheme(one)
        needs_seed = seed if what.rounding == "stochastic" else None
        q = quantize(x, what, seed=needs_seed, backend=backend)
        y = q.dequantize(torch.float32)
        kept = y.isfinite()
        difference = torch.where(kept & finite, y.double() - clean, 0.0).norm().item()
        rows.append(
            SchemeError(
                scheme=str(what),
                bits_per_value=what.bits_per_value,
                relative_error=difference / norm if norm else difference,
                clipped=int((_clipped(q, clean, y) & kept & finite).sum()) / count,
                vanished=int(((y == 0) & (clean != 0)).sum()) / count,
                not_finite=int((~kept).sum()) / count,
            )
        )
    amax = clean.abs().max().item() if x.numel() else 0.0
    return ErrorReport(tuple(x.shape), amax, tuple(rows))


def _clipped(q: QuantizedTensor, clean: Tensor, y: Tensor) -> Tensor:
    """Which values have the largest code although they lay more than half a step beyond it (not told if rotated)."""
    what = q.scheme
    parts = q._parts("")
    if what.hadamard or parts is None:
        return torch.zeros_like(y, dtype=torch.bool)
    codes = formats.unpack_nibbles(parts.codes, y.shape[-1]) if what.packed else parts.codes
    if what.element in INTEGERS:
        signed = codes.view(torch.int8)
        size = ((signed << 4) >> 4 if what.bits == 4 else signed).int().abs()
        step = 1.0
    else:
        fmt = formats.FORMATS[what.element]
        size = formats.decode(codes, fmt).abs()
        step = fmt.largest - fmt.value(fmt.largest_code - 1)
    beyond = clean.abs() > y.double().abs() * (1 + 0.5 * step / what.largest)
    return (size == what.largest).reshape(y.shape) & beyond
