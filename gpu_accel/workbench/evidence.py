"""Which records settle a claim. What may not settle it is left out here, and the reason is kept.

A claim is settled by records of one GPU, one dtype, one kind of input and one way of timing; results of different
conditions never form one range. Only measured records count, and for a claim about numerics that needs no GPU also
checked ones. A ratio of times exists only where both were interleaved in one run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from gpu_accel.workbench.invariants import COLD_L2
from gpu_accel.workbench.ledger import Claim, Measure, higher_is_better, same
from gpu_accel.workbench.records import Record, gpu_slug, merge
from gpu_accel.workbench.statistics import Ratio

ERROR_METRICS = frozenset({"rmse", "max_abs", "mean_abs", "cosine", "sqnr", "bias", "correct"})
SIXTEEN_BIT = ("bf16", "fp16")
PRECISIONS = {"e4m3": "fp8", "e5m2": "fp8"}
_CPU = "CPU"


class NotMeasured(Exception):
    """Why no record settles a claim; its text stands in the verdict."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case of the evidence. ``value`` is in the unit of the claim; of a comparison it is how many times better."""

    case: dict[str, Any]
    value: float
    interval: tuple[float, float] | None
    impl: str
    records: tuple[Record, ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The cells that settle a claim, and what is missing from them."""

    cells: tuple[Cell, ...]
    asked: int = 0  # cells that the claim lists; 0 when it lists none
    missing: int = 0  # of these, how many no record covers
    elsewhere: tuple[str, ...] = ()  # other GPUs with records, which were left out


def is_error_metric(metric: str) -> bool:
    """Whether a metric tells how exact a result is, which no clock and no load changes."""
    return metric in ERROR_METRICS or metric.endswith("error")


def command(claim: Claim) -> str:
    """The command that would make the records which settle a claim."""
    measure = claim.measure
    if measure is None:
        return ""
    known = {**claim.conditions, **{key: value for key, value in measure.case.items() if not isinstance(value, list)}}
    parts = ["gpu-accel run", claim.alias or claim.paper or "PAPER", measure.experiment]
    if (dtype := known.get("dtype")) and not claim.one_precision:
        parts += ["--precision", PRECISIONS.get(str(dtype), str(dtype))]
    if known.get("input", "normal") != "normal":
        parts += ["--input", str(known["input"])]
    if claim.processes:
        gpus = measure.case.get("gpus", 4)
        parts += ["--nproc", str(max(gpus) if isinstance(gpus, list) else gpus)]
    return " ".join(parts)


def collect(claim: Claim, records: Iterable[Record]) -> Evidence:
    """The evidence for a claim with `measure`; raises NotMeasured with the reason when there is none."""
    measure = claim.measure
    assert measure is not None
    if measure.over or measure.minus:
        return _two_cases(claim, measure, list(records))
    impls = claim.ours if measure.impl == "ours" else (measure.impl,)
    named = {*impls, measure.other}
    about = [
        r
        for r in records
        if r.impl in named
        and r.experiment == measure.experiment
        and r.paper == (claim.paper or r.paper)
        and measure.covers(r.case)
    ]
    mine = [r for r in about if r.impl in impls and _offers(r, measure.metric)]
    if not mine:
        raise NotMeasured(f"no record; `{command(claim)}`{_on(claim.needs)} measures it")
    for keep, seen in _STEPS:
        before, mine = mine, [r for r in mine if keep(r, claim)]
        if not mine:
            why = ", ".join(sorted({seen(r) for r in before}))
            raise NotMeasured(f"{why}; `{command(claim)}`{_on(claim.needs)} measures it")
    cells = _comparisons(claim, mine, about) if measure.other else _plain(claim, mine)
    return _choose(claim, cells)


def _two_cases(claim: Claim, measure: Measure, records: list[Record]) -> Evidence:
    """One cell whose value is the quotient or the difference of two, both of one GPU.

    They need no common run: what is compared so are cycles, or rates of one program on different data. A word about
    that stands in the verdict, by the records that it names.
    """
    change = measure.over or measure.minus
    unit = "" if measure.over else claim.unit  # of the two values, which a quotient does not have
    sides = []
    for case in (measure.case, {**measure.case, **change}):
        asked = replace(claim, unit=unit, measure=replace(measure, case=case, over={}, minus={}))
        sides.append(collect(asked, records))
    (one,), (other,) = (side.cells for side in sides)
    if _gpu(one.records[0]) != _gpu(other.records[0]):
        raise NotMeasured(f"recorded on {_gpu(one.records[0])} and on {_gpu(other.records[0])}, which do not compare")
    if measure.over and not other.value:
        raise NotMeasured("the value to divide by is 0")
    value = one.value / other.value if measure.over else one.value - other.value
    cell = Cell(case=one.case, value=value, interval=None, impl=one.impl, records=(*one.records, *other.records))
    return Evidence(cells=(cell,), elsewhere=sides[0].elsewhere)


def from_figures(claim: Claim) -> Evidence:
    """The evidence for an internal claim: cells of the paper's own figures, as quoted records."""
    from gpu_accel.workbench.figures import quoted_records

    measure = claim.measure
    assert measure is not None
    values: dict[str, dict[str, tuple[Claim, Record]]] = {}
    for cell in claim.cells:
        if measure.covers(cell.cell) and cell.label in (measure.impl, measure.other):
            place = f"{cell.experiment} {json.dumps(cell.cell, sort_keys=True)}"
            values.setdefault(place, {})[cell.label] = (cell, quoted_records([cell])[0])
    cells = []
    for rows in values.values():
        if measure.impl not in rows or (measure.other and measure.other not in rows):
            continue  # a cell that the paper does not fill for both
        cell, record = rows[measure.impl]
        value, used = record.value(), [record]
        if measure.other:
            used.append(rows[measure.other][1])
            value = _times_better(record, used[-1])
        cells.append(Cell(case=cell.cell, value=value, interval=None, impl=measure.impl, records=tuple(used)))
    if not cells:
        raise NotMeasured("the figures have no such cells")
    if measure.aggregate == "single" and not measure.predicate:
        _require_one(cells)
    return Evidence(cells=tuple(cells))


# -- what may count


def _offers(record: Record, metric: str) -> bool:
    if metric == "correct":  # every record that was checked tells it
        return record.checked is not None
    return record.has(metric)


def _kind_counts(record: Record, claim: Claim) -> bool:
    exact = claim.measure is not None and is_error_metric(claim.measure.metric) and not claim.needs
    return record.kind == "measured" or (record.kind == "checked" and exact)


def _conditions_agree(record: Record, claim: Claim) -> bool:
    """16-bit dtypes stand in for each other (the verdict says so), other dtypes and other inputs do not."""
    dtype, wanted = record.case.get("dtype"), claim.conditions.get("dtype")
    alike = {dtype, wanted} <= set(SIXTEEN_BIT)
    if wanted is not None and dtype is not None and dtype != wanted and not alike:
        return False
    return "input" not in claim.conditions or same(record.case.get("input"), claim.conditions["input"])


def _unit_agrees(record: Record, claim: Claim) -> bool:
    direct = claim.measure is not None and record.metric == claim.measure.metric
    return claim.unit in ("", "x") or not direct or record.unit == claim.unit


def _gpu_counts(record: Record, claim: Claim) -> bool:
    return not claim.needs or any(_is_gpu(record, need) for need in claim.needs)


def _gpu(record: Record) -> str:
    return str(record.env.get("sku") or record.env.get("gpu") or _CPU)


def _is_gpu(record: Record, need: str) -> bool:
    """Whether a record is from the GPU that `needs` names: "h100" takes every H100, "h100-sxm" only that variant."""
    slug = gpu_slug(_gpu(record))
    return slug == need or (slug.startswith(f"{need}-") and "-mig-" not in slug)


def _on(needs: Sequence[str]) -> str:
    return f" on {' or '.join(needs)}" if needs else ""


# What thins out the records, and how the verdict says what was there when nothing is left.
_STEPS: tuple[tuple[Callable[[Record, Claim], bool], Callable[[Record], str]], ...] = (
    (_kind_counts, lambda r: f"{r.kind} records only"),
    (_conditions_agree, lambda r: f"recorded with dtype {r.case.get('dtype')}, input {r.case.get('input')} only"),
    (_unit_agrees, lambda r: f"recorded in {r.unit} only"),
    (_gpu_counts, lambda r: f"recorded on {_gpu(r)} only"),
)


# -- cells


def _plain(claim: Claim, records: list[Record]) -> list[Cell]:
    measure = claim.measure
    assert measure is not None
    cells = []
    for record in merge(records):
        correct = measure.metric == "correct" and record.checked is not None
        value = float(record.checked["error"]) if correct and record.checked else record.value(measure.metric)
        interval = None if correct else record.interval(measure.metric)
        cells.append(Cell(case=record.case, value=value, interval=interval, impl=record.impl, records=(record,)))
    return cells


def _comparisons(claim: Claim, mine: list[Record], about: list[Record]) -> list[Cell]:
    """Cells whose value is how many times better `impl` is than `ratio_to` or `than`."""
    measure = claim.measure
    assert measure is not None
    theirs = [r for r in about if r.impl == measure.other and _offers(r, measure.metric) and _kind_counts(r, claim)]
    timed = not is_error_metric(measure.metric) and mine[0].is_speed
    if not timed:
        mine, theirs = merge(mine), merge(theirs)
    pair: Callable[[Record, Record], Cell | None] = _interleaved if timed else _quotient
    partners: dict[tuple[str, ...], list[Record]] = {}
    for other in theirs:
        partners.setdefault(_place(other), []).append(other)
    found: dict[tuple[str, ...], tuple[datetime, Cell]] = {}
    for record in mine:
        alone = _interleaved(record, None, measure.other) if timed else None
        options = [alone] if alone else [pair(record, other) for other in partners.get(_place(record), [])]
        for cell in filter(None, options):
            newest = max(r.when for r in cell.records)
            if record.key not in found or found[record.key][0] <= newest:
                found[record.key] = (newest, cell)
    if not found:
        names = "/".join(sorted({r.impl for r in mine}))
        how = "were not interleaved in one run" if timed else "have no results for the same case"
        raise NotMeasured(f"{names} and {measure.other} {how}; `{command(claim)}`{_on(claim.needs)} measures both")
    return [cell for _, cell in found.values()]


def _place(record: Record) -> tuple[str, ...]:
    return (json.dumps(record.case, sort_keys=True), _gpu(record), record.kind)


def _interleaved(record: Record, other: Record | None, name: str = "") -> Cell | None:
    """From the ratio that the record keeps, or else from the one that the other keeps, seen from the other side."""
    if other is None:
        kept, used = record.ratio_to.get(name), (record,)
    else:
        kept, used = other.ratio_to.get(record.impl), (other,)
    if kept is None:
        return None
    ratio = Ratio(kept["median"], *kept["ci95"])
    ratio = ratio.inverse if other is not None else ratio
    return Cell(case=record.case, value=ratio.median, interval=(ratio.low, ratio.high), impl=record.impl, records=used)


def _quotient(record: Record, other: Record) -> Cell | None:
    """Of values that do not depend on clocks (errors, bytes), which need no common run."""
    if not record.value():
        return None
    value = _times_better(record, other)
    return Cell(case=record.case, value=value, interval=None, impl=record.impl, records=(record, other))


def _times_better(record: Record, other: Record) -> float:
    value, against = record.value(), other.value()
    return value / against if higher_is_better(record.metric, record.unit) else against / value


# -- one group of comparable cells


def _choose(claim: Claim, cells: list[Cell]) -> Evidence:
    measure = claim.measure
    assert measure is not None
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(_group(claim, cell), []).append(cell)
    chosen = max(groups.values(), key=lambda group: _preference(claim, group))
    gpu = _gpu(chosen[0].records[0])
    elsewhere = sorted({_gpu(cell.records[0]) for cell in cells} - {gpu})
    if measure.predicate != "correct":
        chosen = _best_of_ours(claim, chosen)
    if measure.aggregate == "single" and not measure.predicate:
        _require_one(chosen)
    asked, missing = _coverage(claim, chosen)
    return Evidence(cells=tuple(chosen), asked=asked, missing=missing, elsewhere=tuple(elsewhere))


def _group(claim: Claim, cell: Cell) -> tuple[Any, ...]:
    measure, record = claim.measure, cell.records[0]
    assert measure is not None
    free = [None if key in measure.case else record.case.get(key) for key in ("dtype", "input")]
    return (_gpu(record), *free, record.timing.get("mode"), record.timing.get("l2"))


def _preference(claim: Claim, cells: list[Cell]) -> tuple[Any, ...]:
    record, wanted = cells[0].records[0], claim.conditions
    dtype, gpu = record.case.get("dtype"), gpu_slug(_gpu(record))
    return (
        -_coverage(claim, cells)[1],
        record.kind == "measured",
        "dtype" not in wanted or dtype == wanted["dtype"],
        "gpu" not in wanted or gpu == gpu_slug(str(wanted["gpu"])),
        record.case.get("input", "normal") == wanted.get("input", "normal"),
        record.timing.get("mode", "burst") == wanted.get("mode", "burst"),
        _cold(record.timing) == _cold(wanted),
        len(cells),
        max(r.when for cell in cells for r in cell.records),
    )


def _cold(stated: Mapping[str, Any]) -> bool:
    """Claims say at most whether the second-level cache was warm; how it was flushed splits groups, but none is better.

    Ratios are of one run and thereby of one state; a verdict never joins cells of two, see `_group`.
    """
    return stated.get("l2", COLD_L2[0]) in COLD_L2


def _best_of_ours(claim: Claim, cells: list[Cell]) -> list[Cell]:
    """For every case the best implementation, which is what the paper's claim is about."""
    measure = claim.measure
    assert measure is not None
    sign = 1 if measure.other or higher_is_better(measure.metric, claim.unit) else -1
    best: dict[str, Cell] = {}
    for cell in cells:
        case = json.dumps(cell.case, sort_keys=True)
        if case not in best or sign * cell.value > sign * best[case].value:
            best[case] = cell
    return list(best.values())


def _coverage(claim: Claim, cells: Sequence[Cell]) -> tuple[int, int]:
    """(asked, missing): combinations of the values listed in `case`, and how many of them no cell has."""
    measure = claim.measure
    assert measure is not None
    lists = {key: value for key, value in measure.case.items() if isinstance(value, list)}
    combinations = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    if not lists:
        return 0, 0
    wanted = [c for c in combinations if all(t.holds(c) for t in measure.where if t.key in c)]
    missing = [c for c in wanted if not any(all(same(cell.case.get(k), v) for k, v in c.items()) for cell in cells)]
    return len(wanted), len(missing)


def _require_one(cells: Sequence[Cell]) -> None:
    cases = {json.dumps(cell.case, sort_keys=True): cell.case for cell in cells}
    if len(cases) > 1:
        keys = sorted({key for case in cases.values() for key in case})
        differing = [key for key in keys if len({repr(case.get(key)) for case in cases.values()}) > 1]
        raise NotMeasured(f"{len(cases)} cases fit and differ in {', '.join(differing)}; the claim must say which")
