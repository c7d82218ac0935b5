"""What must hold for a record of each kind, checked when it is made; every message names the field it is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpu_accel.errors import InvalidInputError

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record

SCHEMA = 1
KINDS = ("measured", "checked", "modelled", "quoted")
L2_STATES = ("flushed", "warm")
MILLISECONDS = {"ms": 1.0, "us": 1e-3, "s": 1e3}
SPEED_UNITS = frozenset({*MILLISECONDS, "tflops", "gbps", "tokens/s", "1/s"})
DERIVED = ("ms", "tflops", "gbps")
_LARGEST_PEAK_EXCESS = 1e-9  # float rounding only: a rate above the peak is a broken measurement, not a good one

Scalar = str | int | float | bool


def is_speed(metric: str, unit: str) -> bool:
    """Whether a metric is a time or a rate, which only a checked run on a GPU (or a model) may carry."""
    return metric == "time" or metric in DERIVED or unit in SPEED_UNITS


class Invariants:
    """The checks of one record; each names the field it is about."""

    def __init__(self, record: Record) -> None:
        self.r = record

    def hold(self) -> None:
        self.types()
        self.numbers()
        self.ratios()
        getattr(self, self.r.kind)()
        if self.r.kind in ("measured", "modelled"):
            self.below_peak()

    def require(self, condition: object, message: str) -> None:
        if not condition:
            r = self.r
            raise InvalidInputError(f"record {r.paper}/{r.experiment}/{r.impl} ({r.kind} {r.metric}): {message}")

    def types(self) -> None:
        r = self.r
        self.require(r.kind in KINDS, f"kind must be one of {KINDS}")
        self.require(r.schema == SCHEMA, f"schema must be {SCHEMA}, not {r.schema!r}")
        for name in ("paper", "experiment", "impl", "metric", "unit"):
            text = getattr(r, name)
            self.require(isinstance(text, str) and text, f"{name} must be a non-empty string, not {text!r}")
        for name in ("case", "work", "ratio_to", "env", "timing"):
            self.require(isinstance(getattr(r, name), dict), f"{name} must be a dict, not {getattr(r, name)!r}")
        for key, value in r.case.items():
            self.require(isinstance(value, Scalar), f"case[{key!r}] must be a string, number or boolean, not {value!r}")
        self.require(isinstance(r.dirty, bool), f"dirty must be true or false, not {r.dirty!r}")
        try:
            offset = r.when.utcoffset()
        except (TypeError, ValueError):
            offset = None
        self.require(offset is not None and not offset, f"time must be ISO 8601 in UTC, not {r.time!r}")

    def numbers(self) -> None:
        r = self.r
        for name in ("median", "p20", "p80"):
            value = getattr(r, name)
            self.require(value is None or is_finite(value), f"{name} must be a finite number, not {value!r}")
        self.require(all(is_finite(s) for s in r.samples), "every sample must be a finite number")
        self.require(all(is_finite(w) and w >= 0 for w in r.work.values()), f"work must be numbers >= 0, not {r.work}")
        self.require((r.p20 is None) == (r.p80 is None), "p20 and p80 go together")
        if r.p20 is not None and r.p80 is not None:
            self.require(r.median is not None and r.p20 <= r.median <= r.p80, "p20 <= median <= p80 must hold")
        if r.median is not None and r.samples:
            inside = min(r.samples) <= r.median <= max(r.samples)
            self.require(inside, f"median {r.median} lies outside its own samples")
        self.require(r.metric != "time" or r.unit in MILLISECONDS, f"a time is in ms, us or s, not {r.unit!r}")
        if r.checked is not None:
            fields = {"error", "bound", "metric"}
            self.require(r.checked.keys() == fields, f"checked must have {sorted(fields)}, not {r.checked}")
            numbers = is_finite(r.checked["error"]) and is_finite(r.checked["bound"])
            # Written so that NaN, which compares false with everything, never counts as correct.
            self.require(
                numbers and 0 <= r.checked["error"] <= r.checked["bound"], f"error above its bound: {r.checked}"
            )

    def ratios(self) -> None:
        r = self.r
        self.require(not r.ratio_to or r.kind == "measured", "only a measured record may carry ratio_to")
        for other, ratio in r.ratio_to.items():
            interleaved = r.timing.get("interleaved") or ()
            self.require(
                other in interleaved, f"ratio_to {other!r} was not interleaved in the run, {list(interleaved)}"
            )
            well_formed = isinstance(ratio, dict) and ratio.keys() == {"median", "ci95"} and len(ratio["ci95"]) == 2
            self.require(well_formed, f"ratio_to[{other!r}] must be {{median, ci95: [low, high]}}, not {ratio!r}")
            low, high = ratio["ci95"]
            numbers = all(is_finite(x) and x > 0 for x in (low, ratio["median"], high))
            self.require(numbers and low <= ratio["median"] <= high, f"ratio_to[{other!r}] is no interval: {ratio}")

    def measured(self) -> None:
        r = self.r
        self.require(r.env.get("gpu"), "a measured record needs env.gpu")
        self.require(r.median is not None, "a measured record needs a median")
        if not r.is_speed:
            return
        self.require(r.metric not in DERIVED, f"record the time; {r.metric!r} is derived from it")
        self.require(
            r.checked is not None, "a speed needs checked {error, bound, metric}: only what is correct is timed"
        )
        self.require(r.samples, "a speed needs its raw samples")
        self.require(min(r.samples) > 0, "a time or rate must be above 0")
        self.require(r.timing.get("l2") in L2_STATES, f"timing.l2 must name the state of the cache, one of {L2_STATES}")
        self.require(r.timing.get("method"), "timing.method must name how the time was taken")

    def checked(self) -> None:
        r = self.r
        self.require(not r.is_speed, "a checked record carries no time and no rate")
        self.require(r.checked is not None, "a checked record needs checked {error, bound, metric}")
        if r.metric == "correct":
            self.require(r.median is None and not r.samples, "metric 'correct' has no median; its error is in checked")
        else:
            self.require(r.median is not None, f"metric {r.metric!r} needs a median")

    def modelled(self) -> None:
        r = self.r
        self.require(r.median is not None and r.p20 is not None, "a modelled record needs its interval in p20 and p80")
        self.require(not r.samples, "a model has no samples")

    def quoted(self) -> None:
        r = self.r
        self.require(r.source, "a quoted record needs its source")
        self.require(r.median is not None, "a quoted record needs a median")

    def below_peak(self) -> None:
        r = self.r
        for metric, peak in (("tflops", self.peak("peak_tflops")), ("gbps", self.peak("peak_gbps"))):
            if peak is not None and r.has(metric):
                rate = r.value(metric)
                fits = rate <= peak * (1 + _LARGEST_PEAK_EXCESS)
                self.require(fits, f"{rate:.4g} {metric} is above the device peak, {peak:.4g}")

    def peak(self, name: str) -> float | None:
        peak = self.r.env.get(name)
        if isinstance(peak, Mapping):
            peak = peak.get(str(self.r.case.get("dtype")))
        return float(peak) if peak else None


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
