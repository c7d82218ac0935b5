"""The times of one implementation, and how noisy they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_accel.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The times of one implementation, or why there are none.

    `times` are milliseconds a call. In one `compare` the i-th time of every implementation belongs to the same round,
    so times can be paired. `noise` is the relative half-width of the 95 % interval that let the run stop.
    """

    name: str
    times: tuple[float, ...] = ()
    method: str = "events"  # "events" | "graph"
    calls: int = 1  # calls per sample; `times` are already divided by it
    l2: str = "flushed"  # "flushed" | "clean" | "warm", see `invariants.L2_STATES`
    mode: str = "burst"  # "burst" | "sustained"
    interleaved: tuple[str, ...] = ()
    inputs: int = 1  # input sets that the samples rotate over
    noise: float = math.inf
    stopped: str = ""  # "noise" | "seconds" | "max_rounds"
    clocks: dict[str, Any] = field(default_factory=dict)
    failed: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and bool(self.times)

    @property
    def median(self) -> float:
        """Milliseconds a call."""
        if not self.times:
            raise InvalidInputError(f"{self.name} has no times: {self.failed or 'it was not timed'}")
        return statistics.median(self.times)

    def as_timing(self) -> dict[str, Any]:
        """How the times were taken, in the form kept in records."""
        timing: dict[str, Any] = {
            "method": self.method,
            "calls": self.calls,
            "l2": self.l2,
            "mode": self.mode,
            "rounds": len(self.times),
            "inputs": self.inputs,
            "interleaved": list(self.interleaved),
            "stopped": self.stopped,
        }
        if math.isfinite(self.noise):
            timing["noise"] = round(self.noise, 5)
        if self.note:
            timing["note"] = self.note
        return timing


def is_time(value: float) -> bool:
    """Whether a sample can be a duration: a finite number above 0, which NaN is not."""
    return 0 < value < math.inf


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median from order statistics: exact for any distribution, no resampling.

    Below six values it is their whole range, which covers less than 95 %.
    """
    ordered, n = sorted(values), len(values)
    reach = 1.96 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - reach) - 1), min(n - 1, math.ceil(n / 2 + reach))
    return ordered[low], ordered[high]


def relative_half_width(values: Sequence[float]) -> float:
    """Half the width of `median_interval` over the median.

    Infinite for fewer than three values, which say nothing, and for values that are no times (see `is_time`).
    """
    if len(values) < 3 or not all(map(is_time, values)):
        return math.inf
    low, high = median_interval(values)
    return (high - low) / 2 / statistics.median(values)


def noise_of(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What still has to shrink for each: the noise of its median, or of its paired ratio to the first, if smaller.

    A drifting clock widens the medians of all, but hardly the ratios, and ratios are what is compared. The first is
    judged by the worst ratio, so that one implementation drifting alone cannot hide. Values that are no times make the
    noise of their own implementation infinite, and its ratios count for nobody else.
    """
    if not times:
        return {}
    first, *others = times
    noise = {name: relative_half_width(values) for name, values in times.items()}
    sound = {name for name, values in times.items() if all(map(is_time, values))}
    others = [name for name in others if name in sound and first in sound]
    ratios = {
        name: relative_half_width([a / b for a, b in zip(times[name], times[first], strict=True)]) for name in others
    }
    for name in others:
        noise[name] = min(noise[name], ratios[name])
    if ratios:
        noise[first] = min(noise[first], max(ratios.values()))
    return noise


def reason(error: BaseException) -> str:
    """One line for an exception, saying "out of memory" where that is what it means."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    kind = type(error).__name__
    if kind == "OutOfMemoryError" or isinstance(error, MemoryError):
        return text if "out of memory" in text.lower() else f"out of memory: {text}"
    return f"{kind}: {text}"
