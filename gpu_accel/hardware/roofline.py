"""The roofline: no kernel is faster than its arithmetic at peak rate, nor than its bytes at full bandwidth.

    roof = Roofline(profile("h100"))
    roof.time(flops, bytes_moved, "bf16")   # milliseconds, at least
    roof.ridge("bf16")                      # FLOP per byte where the two limits meet: 295

The peaks are those that vendors print, at their clock; a GPU that clocks higher may pass them by some per cent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpu_accel.errors import InvalidInputError
from gpu_accel.hardware.catalog import Profile

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Roofline:
    """The two limits of one GPU. `scale` lowers the compute peak, for a clock below the one of the vendor's figure."""

    profile: Profile
    scale: float = 1.0

    def compute_time(self, flops: float, dtype: str) -> float:
        """Milliseconds of `flops` at the dense peak."""
        return _not_negative("flops", flops) / (self.profile.peak(dtype) * self.scale * 1e12) * 1e3

    def memory_time(self, bytes_moved: float) -> float:
        """Milliseconds of `bytes_moved` at the full memory bandwidth."""
        return _not_negative("bytes_moved", bytes_moved) / (self.profile.bandwidth_gbs * 1e9) * 1e3

    def time(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """The least milliseconds that the work can take: the larger of both limits."""
        return max(self.compute_time(flops, dtype), self.memory_time(bytes_moved))

    def bound(self, flops: float, bytes_moved: float, dtype: str) -> Bound:
        """Which limit holds; "compute" where they are equal."""
        return "compute" if self.compute_time(flops, dtype) >= self.memory_time(bytes_moved) else "memory"

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which the arithmetic is the limit."""
        return self.profile.peak(dtype) * self.scale * 1e3 / self.profile.bandwidth_gbs

    def attainable(self, intensity: float, dtype: str) -> float:
        """The most TFLOP/s at an arithmetic intensity in FLOP per byte."""
        bandwidth_limit = _not_negative("intensity", intensity) * self.profile.bandwidth_gbs / 1e3
        return min(self.profile.peak(dtype) * self.scale, bandwidth_limit)

    def fraction(self, milliseconds: float, flops: float, bytes_moved: float, dtype: str) -> float:
        """The least possible time as a fraction of a measured one: 1 is the roof, above 1 cannot be true."""
        if milliseconds <= 0:
            raise InvalidInputError(f"a measured time must be positive, got {milliseconds} ms")
        return self.time(flops, bytes_moved, dtype) / milliseconds


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:  # also refuses NaN
        raise InvalidInputError(f"{name} must not be negative, got {value}")
    return value
