"""What a paper's README shows of its committed records: figures, a table of rates and ratios, the ledger in a line.

A paper without figures, of microbenchmarks, shows the claims that are settled instead.

`make readme` calls `refresh` for every paper; nothing in the generated block is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gpu_accel.workbench import report, series
from gpu_accel.workbench.claims import Verdict, judge_all
from gpu_accel.workbench.records import Record, merge
from gpu_accel.workbench.registry import Paper
from gpu_accel.workbench.svg import static_svg

BLOCK = "results"
NOTE = (
    "Tables: TFLOP/s of our fastest kernel and, in brackets, its speed against the fastest rival of the same "
    "interleaved run; above 1 is faster. Under sustained load contenders run one after another, so the fastest rival's "
    "own rate is in brackets."
)


def refresh(paper: Paper) -> list[Path]:
    """Write the SVG of every measured sweep and the `results` block of the paper's README; returns what was written."""
    everything = paper.records()
    records, claims = merge(everything), paper.claims()
    written, parts = [], []
    figures = report.figures(records, claims)
    titles = [title for title, *_ in figures]
    for title, members, quotes in figures:
        if titles.count(title) > 1:  # the same sweep on several GPUs
            title = f"{title} · {series.gpu_of(members[0]).removeprefix('NVIDIA ')}"
        name = re.sub(r"[^a-z0-9]+", "-", title.replace("input normal", "").lower()).strip("-") + ".svg"
        path = paper.path / name
        path.write_text(static_svg(members, quotes=quotes, title=f"{paper.title.split(':')[0]}: {title}"))
        written.append(path)
        ablation = members[0].experiment == "ablation"  # variants of one kernel are no rivals
        table = _every_rate(members) if ablation else best_table(members, ours=paper.ours)
        parts += [f"![{title}]({name})", table]
        parts += _gaps(members)
    verdicts = judge_all(claims, everything)
    if parts:
        parts += [*error_table(records), NOTE]
    elif settled := [verdict for verdict in verdicts if verdict.settled and not verdict.internal]:
        parts.append(report.markdown_table(report.CLAIM_HEADINGS, [report.claim_row(v) for v in settled]))
        parts += _where_measured(settled)
    parts.append(report.summary(verdicts) + ".")
    readme = paper.path / "README.md"
    if report.update_block(readme, BLOCK, "\n\n".join(parts)):
        written.append(readme)
    return written


def _where_measured(verdicts: Sequence[Verdict]) -> list[str]:
    """On which GPU, and which claims elsewhere where there are several; nothing where none took part."""
    by_gpu: dict[str, list[str]] = {}
    for verdict in verdicts:
        for gpu in series.gpus(verdict.records):
            by_gpu.setdefault(gpu, []).append(verdict.claim.statement)
    if not by_gpu:
        return []
    most = max(by_gpu, key=lambda gpu: len(by_gpu[gpu]))
    others = [f"on {gpu}: {'; '.join(statements)}" for gpu, statements in by_gpu.items() if gpu != most]
    return [f"GPU: {most}" + (f", but {'. '.join(others)}" if others else "") + "."]


def _gaps(records: Sequence[Record]) -> list[str]:
    """A line for each thing that some charts lack of ours, and where."""
    where: dict[str, list[str]] = {}
    for panel in series.sweep(records):
        if panel.note:
            where.setdefault(panel.note, []).append(panel.title)
    return [f"{note[:1].upper()}{note[1:]}: {'; '.join(titles)}." for note, titles in where.items()]


def best_table(records: Sequence[Record], *, ours: Sequence[str]) -> str:
    """Rate of our best implementation and, beside it, its speed against the best rival of the same run.

    One row per (head_dim, mask), one column per sequence length: `726 (1.05)` is 726 TFLOP/s, 1.05 times the rival.
    Under sustained load, which has no common rounds, the bracket is the rival's own rate: `650 (610)`.
    """
    lengths = sorted({int(r.case["seqlen_q"]) for r in records})
    cells: dict[tuple, dict[object, tuple[str, str]]] = {}
    for (dim, causal), of_shape in _by(records, lambda r: (r.case["head_dim"], bool(r.case.get("causal")))).items():
        for length, rows in _by(of_shape, lambda r: r.case["seqlen_q"]).items():
            mine = [r for r in rows if r.impl in ours]
            beside = {f"{name}-bf16" for name in ours if rows[0].case.get("dtype") == "fp16"}  # of ours, so no rivals
            rivals = {r.impl for r in rows if r.impl not in ours} - beside
            if not mine:
                continue
            best = max(mine, key=lambda r: r.value("tflops"))
            ratios = {name: x["median"] for name, x in best.ratio_to.items() if name in rivals}
            against = min(ratios, key=lambda name: ratios[name]) if ratios else ""
            text = f"{best.value('tflops'):.0f}" + (f" ({ratios[against]:.2f})" if against else "")
            if best.timing.get("mode") == "sustained" and rivals:
                rates = {r.impl: r.value("tflops") for r in rows if r.impl in rivals}
                against = max(rates, key=lambda name: rates[name])
                text += f" ({rates[against]:.0f})"
            cells.setdefault((dim, causal), {})[length] = (text, against)
    rows = []
    for (dim, causal), by_length in sorted(cells.items()):
        names = {against for _, against in by_length.values() if against}
        rival = ", ".join(series.label(n) for n in series.order(names))
        found = [by_length.get(n, ("–", ""))[0] for n in lengths]
        rows.append([str(dim), "causal" if causal else "full", *found, rival])
    headings = ["head dim", "mask", *(series.short(n) for n in lengths), "fastest rival"]
    return report.markdown_table(headings, rows, numeric_from=2)


def _every_rate(records: Sequence[Record]) -> str:
    """The rate of every implementation: one row each, one column per sequence length."""
    headings, rows = report.pivot(records, "tflops")
    return report.markdown_table(headings, rows, numeric_from=3)


def error_table(records: Sequence[Record]) -> list[str]:
    """RMSE of every recipe, one column an input at its largest shape, on the GPU measured last; the shapes in a line.

    Nothing where fewer than two inputs were measured: a single one has nothing to stand beside.
    """
    found = [r for r in records if r.kind == "measured" and r.has("rmse") and "input" in r.case]
    if not found:
        return []
    gpu = series.gpu_of(max(found, key=lambda r: r.when))
    found = series.largest([r for r in found if series.gpu_of(r) == gpu], "rmse")
    cells: dict[str, dict[str, Record]] = {}
    for record in sorted(found, key=lambda r: r.when):
        cells.setdefault(record.impl, {})[str(record.case["input"])] = record
    inputs = sorted({name for row in cells.values() for name in row})
    if len(inputs) < 2:
        return []
    rows = [[impl, *(f"{row[name].value('rmse'):.2e}" if name in row else "–" for name in inputs)]
            for impl, row in cells.items()]  # fmt: skip
    shapes = []
    for name in inputs:
        case = next(row[name].case for row in cells.values() if name in row)
        mask = "causal" if case.get("causal") else "full"
        shapes.append(f"{name} {series.short(case['seqlen_q'])} keys, head dim {case['head_dim']}, {mask}")
    table = report.markdown_table(["RMSE against float64", *inputs], rows, numeric_from=1)
    return [table, f"Errors: {'; '.join(shapes)}; {gpu}."]


def _by(records, key) -> dict:
    groups: dict = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
