"""Figures and tables of a paper, written compactly in `claims.toml`: every cell becomes a claim.

    [[figure]]
    id = "fig5a"
    where = "Figure 5a"
    source = "arXiv:2407.08608v2"
    unit = "tflops"
    experiment = "forward"
    axis = "seqlen_q"                          # sets seqlen_k too, and with `tokens` also batch = tokens / seqlen
    columns = [512, 1024, 2048]
    tokens = 16384
    case = {pass = "forward", heads = 32, head_dim = 64, causal = false}
    conditions = {dtype = "fp16", gpu = "H100 SXM", clocks = "locked 1830 MHz"}
    needs = ["h100-sxm"]
    rows = [
      {label = "FA3", impl = "ours", values = [333, 392, 460]},
      {label = "cuDNN", impl = "sdpa-cudnn", version = "9.1.1.17", values = [335, 373, "-"]},
      {label = "Triton", values = [340, 382, 396], unmeasurable = "that kernel is not run here"},
    ]

The ids are `fig5a.fa3.512`. "-" or nan is a cell without a value. Unless `direction` says otherwise, a cell counts as
reproduced when the result is at least as good as the paper's, up to the tolerance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from gpu_accel.workbench.invariants import Scalar
from gpu_accel.workbench.ledger import (
    DIRECTIONS,
    UNITS,
    Claim,
    Measure,
    higher_is_better,
    read_common,
    read_id,
    read_scale,
)
from gpu_accel.workbench.records import Record
from gpu_accel.workbench.strict_toml import Table


def read_figure(table: Table, file: str) -> list[Claim]:
    """The claims of one `[[figure]]`, row by row."""
    figure = read_id(table, file)
    common = read_common(table)
    unit = table.text("unit", choices=tuple(u for u in UNITS if u != "x"))
    metric = table.text("metric", UNITS[unit] or "")
    if not metric:
        table.fail(f"key 'metric' is missing; the unit {unit!r} does not imply one")
    better = "at_least" if higher_is_better(metric, unit) else "at_most"
    direction = table.text("direction", better, choices=DIRECTIONS[:3])
    experiment = table.text("experiment")
    scale = read_scale(table.table("scale")) if "scale" in table else None
    axis = table.text("axis")
    case = table.scalars("case")
    columns = table.take("columns")
    if not isinstance(columns, list) or not columns or not all(isinstance(c, str | int | float) for c in columns):
        table.fail(f"'columns' must be a list of numbers or strings, not {columns!r}")
    tokens = table.number("tokens", 0)
    if tokens and not all(isinstance(c, int) and c > 0 for c in columns):
        table.fail("'tokens' needs columns that are sequence lengths")
    claims = []
    for row in table.tables("rows"):
        label, values = row.text("label"), row.take("values")
        row.where = f"{table.where}: row {label}"
        if not isinstance(values, list) or len(values) != len(columns):
            row.fail(f"'values' must be a list of {len(columns)} entries, one per column, not {values!r}")
        impl, why = row.text("impl", ""), row.text("unmeasurable", "")
        version = row.text("version", "")
        if bool(impl) == bool(why):
            row.fail("give either 'impl' (what is run for it here) or 'unmeasurable' (why nothing is)")
        aim = row.text("direction", direction, choices=DIRECTIONS[:3])
        row.end()
        conditions = common["conditions"] | ({"baseline": label, "baseline_version": version} if version else {})
        for column, value in zip(columns, values, strict=True):
            number = _number(row, value)
            if number is None:
                continue
            cell = _place(case, axis, column, tokens)
            measure = Measure(experiment=experiment, impl=impl, metric=metric, case=cell) if impl else None
            claims.append(
                Claim(
                    **{**common, "conditions": conditions},
                    id=f"{figure}.{_slug(label)}.{_slug(str(column))}",
                    statement=f"{label} at {axis} {column}: {number:g}{'' if unit == '1' else f' {unit}'}",
                    value=number,
                    unit=unit,
                    direction=aim,
                    measure=measure,
                    scale=scale if measure else None,
                    unmeasurable=why,
                    figure=figure,
                    label=label,
                    experiment=experiment,
                    metric=metric,
                    cell=cell,
                )
            )
    table.end()
    if not claims:
        table.fail("the figure has no values")
    return claims


def quoted_records(claims: Iterable[Claim]) -> list[Record]:
    """The cells of the paper's figures as records of kind "quoted", with the row's label as implementation."""
    found = []
    for claim in claims:
        if claim.figure and isinstance(claim.value, int | float):
            dtype = {"dtype": claim.conditions["dtype"]} if "dtype" in claim.conditions else {}
            found.append(
                Record(
                    kind="quoted",
                    paper=claim.paper or "unknown",
                    experiment=claim.experiment,
                    case=dtype | claim.cell,
                    impl=claim.label,
                    metric=claim.metric,
                    unit=claim.unit,
                    median=float(claim.value),
                    source=f"{claim.source}, {claim.where}",
                    note=claim.id,
                )
            )
    return found


def _number(row: Table, value: Any) -> float | None:
    if value == "-" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        row.fail(f"a value must be a number, or '-' for none; not {value!r}")
    return value


def _place(case: dict[str, Any], axis: str, column: Any, tokens: float) -> dict[str, Scalar]:
    place = case | {axis: column}
    if axis == "seqlen_q":
        place = {"seqlen_k": column} | place
        if tokens:
            place = {"batch": max(1, round(tokens / column))} | place
    return place


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
