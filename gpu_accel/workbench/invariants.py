"""What must hold for a record of each kind, checked when it is made; every message names the field it is about."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from gpu_accel.errors import InvalidInputError, shown

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record

SCHEMA = 1
KINDS = ("measured", "checked", "modelled", "quoted")
# The second-level cache before a timed call: another buffer written through it; then a third one read through it, so
# that the call does not wait for lines that are not its own to be written back; or what the call itself left there.
COLD_L2 = ("flushed", "clean")
L2_STATES = (*COLD_L2, "warm")
MILLISECONDS = {"ms": 1.0, "us": 1e-3, "s": 1e3}
RATE_UNITS = frozenset({"tflops", "gbps", "tokens/s", "1/s"})
# The units of what is neither a time nor a rate. Everything else counts as a speed, so that a rate in a unit that
# nobody thought of ("TFLOP/s", "x", "msec") cannot pass as an ordinary number.
PLAIN_UNITS = frozenset(
    {"1", "%", "dB", "bits", "ulp", "bytes", "B", "KB", "MB", "GB", "KiB", "MiB", "GiB"}
    | {"J", "mJ", "W", "TFLOP/J", "C", "tokens"}
)
# Counted by the GPU in its own clock, whatever the clock is: a latency in cycles, or work per cycle. Neither a time nor
# a rate that a hotter card lowers, but it takes a GPU and a check all the same.
CYCLE_UNITS = frozenset({"clk", "B/clk", "B/clk/SM", "instr/clk/SM", "flop/clk/SM"})
SPEED_WORDS = frozenset(
    {"time", "latency", "duration", "runtime", "speed", "speedup", "throughput", "bandwidth", "mfu", "tps"}
    | {"ms", "us", "ns", "msec", "usec", "sec", "seconds", "flops", "gflops", "tflops", "pflops", "gbps"}
)
NEVER_NEGATIVE = frozenset({"rmse", "mse", "max_abs", "mean_abs", "max_error", "rel_error", "relative_error"})
TEXTS = ("source", "commit", "time", "input_source", "note", "location")
DERIVED = ("ms", "tflops", "gbps")
_LARGEST_PEAK_EXCESS = 1e-9  # float rounding only: a rate above the peak is a broken measurement, not a good one

Scalar = str | int | float | bool


def is_speed(metric: str, unit: str) -> bool:
    """Whether a metric is a time or a rate, by its name or its unit; only a checked run on a GPU may measure one.

    A unit that is not known to be something else (PLAIN_UNITS) counts as one; a number of cycles does not.
    """
    if unit in CYCLE_UNITS:
        return False
    return unit not in PLAIN_UNITS or not SPEED_WORDS.isdisjoint(re.split(r"[^a-z0-9]+", metric.lower()))


class Invariants:
    """The checks of one record; each names the field it is about.

    Tens of thousands of records are read at once: what shows a value in its message calls `refuse`, so that only values
    that are wrong are printed.
    """

    def __init__(self, record: Record) -> None:
        self.r = record

    def hold(self) -> None:
        self.types()
        self.numbers()
        self.ratios()
        getattr(self, self.r.kind)()
        if self.r.kind in ("measured", "modelled"):
            self.below_peak()
        self.serialisable()

    def require(self, condition: object, message: str) -> None:
        if not condition:
            self.refuse(message)

    def refuse(self, message: str) -> NoReturn:
        r = self.r
        raise InvalidInputError(f"record {r.paper}/{r.experiment}/{r.impl} ({r.kind} {r.metric}): {message}")

    def types(self) -> None:
        r = self.r
        self.require(r.kind in KINDS, f"kind must be one of {KINDS}")
        if not (type(r.schema) is int and r.schema == SCHEMA):
            self.refuse(f"schema must be {SCHEMA}, not {shown(r.schema)}")
        for name in ("paper", "experiment", "impl", "metric", "unit"):
            text = getattr(r, name)
            if not (isinstance(text, str) and text):
                self.refuse(f"{name} must be a non-empty string, not {shown(text)}")
        for name in TEXTS:
            if not isinstance(getattr(r, name), str):
                self.refuse(f"{name} must be a string, not {shown(getattr(r, name))}")
        for name in ("case", "work", "ratio_to", "env", "timing", *(["checked"] if r.checked is not None else [])):
            table = getattr(r, name)
            if not isinstance(table, dict):
                self.refuse(f"{name} must be a dict, not {shown(table)}")
            if not all(isinstance(key, str) for key in table):
                self.refuse(f"{name} must have strings as keys, not {shown(table)}")
        for key, value in r.case.items():
            if not isinstance(value, Scalar):
                self.refuse(f"case[{key!r}] must be a string, number or boolean, not {shown(value)}")
        if not isinstance(r.dirty, bool):
            self.refuse(f"dirty must be true or false, not {shown(r.dirty)}")
        try:
            offset = r.when.utcoffset()
        except (TypeError, ValueError):
            offset = None
        if offset is None or offset:
            self.refuse(f"time must be ISO 8601 in UTC, not {shown(r.time)}")

    def numbers(self) -> None:
        r = self.r
        for name in ("median", "p20", "p80"):
            value = getattr(r, name)
            if not (value is None or is_finite(value)):
                self.refuse(f"{name} must be a finite number, not {shown(value)}")
        self.require(all(is_finite(s) for s in r.samples), "every sample must be a finite number")
        self.require(all(is_finite(w) and w >= 0 for w in r.work.values()), "work must be numbers >= 0")
        self.require((r.p20 is None) == (r.p80 is None), "p20 and p80 go together")
        if r.p20 is not None and r.p80 is not None:
            self.require(r.median is not None and r.p20 <= r.median <= r.p80, "p20 <= median <= p80 must hold")
        if r.median is not None and r.samples:
            inside = min(r.samples) <= r.median <= max(r.samples)
            self.require(inside, f"median {r.median} lies outside its own samples")
        self.require(r.metric != "time" or r.unit in MILLISECONDS, f"a time is in ms, us or s, not {r.unit!r}")
        if r.metric in NEVER_NEGATIVE or r.unit == "bytes":
            values = [value for value in (r.median, r.p20, *r.samples) if value is not None]
            if not min(values, default=0) >= 0:
                self.refuse(f"{r.metric} in {r.unit} cannot be negative: {shown(r.median)}")
        if r.checked is not None:
            fields = {"error", "bound", "metric"}
            if r.checked.keys() != fields:
                self.refuse(f"checked must have {sorted(fields)}, not {shown(r.checked)}")
            name = r.checked["metric"]
            if not (isinstance(name, str) and name):
                self.refuse(f"checked.metric must be a non-empty string, not {shown(name)}")
            numbers = is_finite(r.checked["error"]) and is_finite(r.checked["bound"])
            # Written so that NaN, which compares false with everything, never counts as correct.
            if not (numbers and 0 <= r.checked["error"] <= r.checked["bound"]):
                self.refuse(f"error above its bound: {shown(r.checked)}")

    def ratios(self) -> None:
        r = self.r
        self.require(not r.ratio_to or r.kind == "measured", "only a measured record may carry ratio_to")
        interleaved = r.timing.get("interleaved") or []
        names = isinstance(interleaved, list | tuple) and all(isinstance(name, str) for name in interleaved)
        if not names:
            self.refuse(f"timing.interleaved must be a list of names, not {shown(interleaved)}")
        for other, ratio in r.ratio_to.items():
            if other not in interleaved:
                self.refuse(f"ratio_to {other!r} was not interleaved in the run, {list(interleaved)}")
            well_formed = isinstance(ratio, dict) and ratio.keys() == {"median", "ci95"}
            well_formed = well_formed and isinstance(ratio["ci95"], list | tuple) and len(ratio["ci95"]) == 2
            if not well_formed:
                self.refuse(f"ratio_to[{other!r}] must be {{median, ci95: [low, high]}}, not {shown(ratio)}")
            low, high = ratio["ci95"]
            numbers = all(is_finite(x) and x > 0 for x in (low, ratio["median"], high))
            if not (numbers and low <= ratio["median"] <= high):
                self.refuse(f"ratio_to[{other!r}] is no interval: {shown(ratio)}")

    def measured(self) -> None:
        r = self.r
        gpu = r.env.get("gpu")
        self.require(isinstance(gpu, str) and gpu, "a measured record needs env.gpu")
        self.require(r.median is not None, "a measured record needs a median")
        if r.unit in CYCLE_UNITS:
            above = r.median is not None and r.median > 0
            self.require(above, f"{r.metric} in {r.unit} must be above 0, not {shown(r.median)}")
            self.require(r.checked is not None, "a count of cycles needs checked {error, bound, metric}")
        if not r.is_speed:
            return
        self.require(r.metric not in DERIVED, f"record the time; {r.metric!r} is derived from it")
        self.require(
            r.metric == "time",
            f"{r.metric!r} in {r.unit!r} is a speed or is not known to be none: record the metric 'time' in ms with "
            f"its samples, or use a unit of {', '.join(sorted(PLAIN_UNITS | CYCLE_UNITS))}",
        )
        self.require(
            r.checked is not None, "a speed needs checked {error, bound, metric}: only what is correct is timed"
        )
        self.require(r.samples, "a speed needs its raw samples")
        self.require(min(r.samples) > 0, "a time or rate must be above 0")
        self.require(r.timing.get("l2") in L2_STATES, f"timing.l2 must name the state of the cache, one of {L2_STATES}")
        method = r.timing.get("method")
        self.require(isinstance(method, str) and method, "timing.method must name how the time was taken")

    def checked(self) -> None:
        r = self.r
        self.require(not r.is_speed, f"a checked record carries no time and no rate, but {r.metric!r} in {r.unit!r}")
        self.require(r.unit not in CYCLE_UNITS, f"a CPU counts no cycles of a GPU: {r.metric!r} in {r.unit!r}")
        self.require(r.checked is not None, "a checked record needs checked {error, bound, metric}")
        if r.metric == "correct":
            self.require(r.median is None and not r.samples, "metric 'correct' has no median; its error is in checked")
        else:
            self.require(r.median is not None, f"metric {r.metric!r} needs a median")

    def modelled(self) -> None:
        r = self.r
        self.require(r.median is not None and r.p20 is not None, "a modelled record needs its interval in p20 and p80")
        self.require(not r.samples, "a model has no samples")
        known = r.unit in {*MILLISECONDS, *RATE_UNITS, *PLAIN_UNITS, *CYCLE_UNITS, "x"}
        self.require(known, f"the unit {r.unit!r} is unknown, so the peak of the device cannot be held against it")

    def quoted(self) -> None:
        r = self.r
        self.require(r.source, "a quoted record needs its source")
        self.require(r.median is not None, "a quoted record needs a median")

    def below_peak(self) -> None:
        r = self.r
        for metric in ("tflops", "gbps"):
            peak, why = self.peak(f"peak_{metric}")
            rate = r.median if r.unit == metric else r.value(metric) if r.has(metric) else None
            if peak is not None and rate is not None:
                fits = rate <= peak * (1 + _LARGEST_PEAK_EXCESS)
                if not fits:
                    self.refuse(f"{rate:.4g} {metric} is above the device peak, {peak:.4g}{why}")

    def peak(self, name: str) -> tuple[float | None, str]:
        """The peak that applies, and in words why it is that one where it is not the peak of the case's dtype."""
        peak, why = self.r.env.get(name), ""
        known = peak if isinstance(peak, Mapping) else {"": peak}
        for value in known.values():
            fits = value is None or (is_finite(value) and value >= 0)
            if not fits:
                self.refuse(f"env.{name} must be a number >= 0, or one per dtype; not {shown(peak)}")
        if isinstance(peak, Mapping):
            dtype = self.r.case.get("dtype")
            peak = known.get(str(dtype))
            if not peak:
                # Some limit is better than none: a dtype that is spelt otherwise must not switch the check off.
                peak = max((value for value in known.values() if value), default=None)
                why = f" (the highest known, since env.{name} has none for dtype {dtype!r})"
        # A product with a 2:4 sparse operand counts what it skips, as the vendor's figures do.
        doubled = 2 if name == "peak_tflops" and self.r.case.get("sparse") is True else 1
        return (float(peak) * doubled, why) if peak else (None, "")

    def serialisable(self) -> None:
        """Whatever was accepted must also be writable, for the run that made it is over by then."""
        try:
            self.r.to_json()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self.require(False, f"cannot be written as JSON: {str(error) or type(error).__name__}")


def is_finite(value: object) -> bool:
    """Whether a value is a number (no boolean) that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
