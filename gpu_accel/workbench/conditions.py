"""In words: on what a verdict rests, and what differs from the conditions under which the claim was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_accel.workbench.ledger import Claim
from gpu_accel.workbench.records import Record, gpu_slug

# Where the version of a rival that comes with something else is found in an environment.
_VERSION_OF = {"sdpa-cudnn": ("cuDNN", "cudnn"), "sdpa": ("torch", "torch"), "flex": ("torch", "torch")}
_SOFTWARE = ("driver", "cuda", "cudnn", "torch", "triton")
_SAID_ELSEWHERE = ("gpu", "clocks", "baseline", "baseline_version", *_SOFTWARE)


def basis(records: Sequence[Record]) -> str:
    """What the records were taken on: "H100 SXM, driver 580.95.05, torch 2.11.0, SM clock 1755 MHz, commit 0123456"."""
    measured = [r for r in records if r.kind == "measured"]
    if not measured:
        return "checked on a CPU, which numerics do not depend on" if records else "nothing"
    parts = [_values(r.env.get("sku") or r.env.get("gpu") for r in measured)]
    parts += [f"{name} {_values(r.env.get(name) for r in measured)}" for name in ("driver", "torch", "triton")]
    if clock := _clock(measured):
        parts.append(f"SM clock {clock}")
    if throttled := sorted({str(t) for r in measured for t in _as_list(r.env.get("throttle"))}):
        parts.append(f"throttled ({', '.join(throttled)})")
    parts.append(f"L2 {_values(r.timing.get('l2') for r in measured)}")
    commit = _values(r.commit[:7] for r in measured)
    parts.append(f"commit {commit}" + (" with uncommitted changes" if any(r.dirty for r in measured) else ""))
    return ", ".join(part for part in parts if not part.endswith(" "))


def differences(claim: Claim, records: Sequence[Record]) -> tuple[str, ...]:
    """What is not as the claim's conditions say; empty when everything that is known agrees."""
    stated, found = claim.conditions, []
    if (clocks := stated.get("clocks")) and any(r.is_speed for r in records):
        here = _clock(records)
        locked = all(r.env.get("clocks_locked") for r in records)
        if "lock" in str(clocks) and "unlock" not in str(clocks) and not locked:
            found.append(f"clocks: {clocks} in the claim, not locked here{f' ({here} sampled)' if here else ''}")
    if gpu := stated.get("gpu"):
        skus = {str(r.env.get("sku") or r.env.get("gpu") or "CPU") for r in records}
        if others := sorted(sku for sku in skus if not gpu_slug(sku).startswith(gpu_slug(str(gpu)))):
            found.append(f"gpu: {gpu} in the claim, {', '.join(others)} here")
    for name in _SOFTWARE:
        here = _values(r.env.get(name) for r in records)
        if name in stated and here and not here.startswith(str(stated[name])):
            found.append(f"{name}: {stated[name]} in the claim, {here} here")
    if rival := _rival(claim):
        theirs = " ".join(str(stated[k]) for k in ("baseline", "baseline_version") if k in stated)
        if theirs:
            found.append(f"baseline: {theirs} in the claim, {rival}{_version(rival, records)} here")
    for name, wanted in stated.items():
        here = _values(r.case.get(name) for r in records if name in r.case)
        if name not in _SAID_ELSEWHERE and here and here != str(wanted):
            found.append(f"{name}: {wanted} in the claim, {here} here")
    if modes := sorted({str(r.timing["mode"]) for r in records if r.timing.get("mode", "burst") != "burst"}):
        found.append(f"load: {', '.join(modes)} here")
    return tuple(found)


def _rival(claim: Claim) -> str:
    measure = claim.measure
    if measure is None:
        return ""
    return measure.other or ("" if measure.impl in ("ours", *claim.ours) else measure.impl)


def _version(rival: str, records: Iterable[Record]) -> str:
    records = list(records)
    name, key = _VERSION_OF.get(rival) or _VERSION_OF.get(rival.split("-")[0]) or ("", "")
    here = _values(r.env.get(key) for r in records) if key else _values(_packages(r.env).get(rival) for r in records)
    return f" ({name} {here})" if name and here else f" {here}" if here else ""


def _packages(env: Mapping[str, Any]) -> Mapping[str, Any]:
    packages = env.get("packages")
    return packages if isinstance(packages, Mapping) else {}


def _clock(records: Iterable[Record]) -> str:
    """The sampled clocks as text; environments keep a number, or its median, minimum and maximum."""
    medians = []
    for record in records:
        clock = record.env.get("clock_mhz")
        clock = clock.get("median") if isinstance(clock, Mapping) else clock
        if isinstance(clock, int | float):
            medians.append(clock)
    if not medians:
        return ""
    low, high = min(medians), max(medians)
    return f"{low:.0f} MHz" if low == high else f"{low:.0f} to {high:.0f} MHz"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


def _values(values: Iterable[Any]) -> str:
    """Distinct values in order of appearance."""
    return " and ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))
