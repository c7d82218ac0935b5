"""`gpu-accel compare A B`: what got faster or slower from A to B, and what is too noisy to say."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, output
from .console import note, out, table
from .options import JsonOption, OutputOption
from .render import number, split_cases
from .results import load

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record

WORDS = ("same", "faster", "slower", "ambiguous")
GATES = ("slower", "ambiguous", "faster")
STYLES = {"same": "dim", "faster": "green", "slower": "red", "ambiguous": "yellow"}


def compare(
    a: Annotated[str, typer.Argument(help="The base: a .jsonl file, a folder of them, or a git revision.")],
    b: Annotated[str, typer.Argument(help="What is compared with it, given in the same way.")],
    paper: Annotated[str, typer.Option("--paper", help="Only this paper.")] = "",
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this implementation. Repeatable.")] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Not this implementation. Repeatable.")] = None,
    noise: Annotated[float, typer.Option(min=0.0, max=1.0, help="Differences up to this share count as none.")] = 0.02,
    fail_on: Annotated[
        list[str] | None, typer.Option("--fail-on", help=f"Exit 1 if there is any: {', '.join(GATES)}. Repeatable.")
    ] = None,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """What got faster or slower from A to B.

    Results are matched by implementation, case and metric. A pair is ambiguous when its interval allows two verdicts.
    """
    output.check_suffix(output_)
    if unknown := [word for word in fail_on or [] if word not in GATES]:
        raise InvalidInputError(f"--fail-on {unknown[0]}: choose {', '.join(GATES)}")
    if paper:
        from gpu_accel.workbench.registry import paper as find

        paper = find(paper).id
    given = [load(source, paper) for source in (a, b)]
    sides = [_index(records, only or [], skip or []) for records in given]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        found = "; ".join(f"{name}: {_found(records)}" for name, records in zip((a, b), given, strict=True))
        note(f"nothing to compare: no implementation was measured in the same case by both. {found}", style="yellow")
        raise typer.Exit(codes.NOTHING_RAN)
    rows = [compared(sides[0][key], sides[1][key], noise) for key in common]
    counts = Counter(row["verdict"] for row in rows)
    payload = {
        "a": a,
        "b": b,
        "noise": noise,
        "rows": rows,
        "counts": {word: counts[word] for word in WORDS},
        "only_in_a": len(sides[0]) - len(common),
        "only_in_b": len(sides[1]) - len(common),
    }
    if output_:
        output.write(output_, rows, payload=payload, title=f"{a} and {b}")
    if json_:
        output.print_json(payload)
    else:
        _show(payload)
    if failed := [word for word in fail_on or [] if counts[word]]:
        note(f"gate: {', '.join(f'{counts[word]} {word}' for word in failed)}", style="bold red")
        raise typer.Exit(codes.GATE)


def compared(a: Record, b: Record, noise: float) -> dict[str, Any]:
    """One row: both medians, the ratio a / b with its interval (above 1: b is faster, or smaller), and a word."""
    from gpu_accel.workbench.statistics import Ratio, bootstrap_ratio, verdict

    if a.samples == b.samples and a.median == b.median:  # the same measurement has no noise against itself
        ratio = Ratio(median=1.0, low=1.0, high=1.0)
    elif min(len(a.samples), len(b.samples)) >= 2 and min(*a.samples, *b.samples) > 0:
        ratio = bootstrap_ratio(a.samples, b.samples)
    else:  # one number each, such as peak bytes: nothing to resample
        value = a.value() / b.value() if b.value() else float("inf") if a.value() else 1.0
        ratio = Ratio(median=value, low=value, high=value)
    gpus = [record.env.get("gpu", "") for record in (a, b)]
    same = {key: getattr(a, key) for key in ("paper", "experiment", "impl", "case", "metric", "unit")}
    return same | {
        "a": a.median, "b": b.median, "ratio": ratio.median, "low": ratio.low, "high": ratio.high,
        "verdict": verdict(ratio, noise=noise), "gpu_a": gpus[0], "gpu_b": gpus[1],
    }  # fmt: skip


def _found(records: list[Record]) -> str:
    """What a side holds: `76 timed records`, or `27 checked, 0 timed (CPU)`."""
    timed = sum(record.kind == "measured" and record.is_speed for record in records)
    checked = sum(record.kind == "checked" for record in records)
    if timed or not checked:
        return f"{timed} timed records"
    return f"{checked} checked, 0 timed ({'GPU' if any(record.env.get('gpu') for record in records) else 'CPU'})"


def _index(records: list[Record], only: list[str], skip: list[str]) -> dict[tuple[Any, ...], Record]:
    """The newest measured record of each thing, without the GPU in the key: A and B may come from different cards."""
    from gpu_accel.workbench.records import merge

    kept = [
        record
        for record in merge(records)
        if record.kind == "measured" and record.median is not None
        and (not only or record.impl in only) and record.impl not in skip
    ]  # fmt: skip
    kept.sort(key=lambda record: record.when)
    return {(r.paper, r.experiment, r.impl, r.metric, tuple(sorted(r.case.items()))): r for r in kept}


def _show(payload: dict[str, Any]) -> None:
    rows = payload["rows"]
    shared, labels = split_cases([row["case"] for row in rows])
    made = table("experiment", "implementation", "case", "metric", "A", "B", "A / B", "", title=shared,
                 right=("A", "B", "A / B"))  # fmt: skip
    for row, label in zip(rows, labels, strict=True):
        interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["low"] != row["high"] else ""
        style = STYLES[row["verdict"]]
        made.add_row(
            row["experiment"], row["impl"], label, f"{row['metric']} {row['unit']}", number(row["a"]), number(row["b"]),
            f"{row['ratio']:.3f}{interval}", f"[{style}]{row['verdict']}[/]",
        )  # fmt: skip
    screen = out()
    screen.print(made)
    counts = ", ".join(f"{count} {word}" for word, count in payload["counts"].items() if count)
    screen.print(f"{len(rows)} compared: {counts}. A / B above 1 means that B is faster (or smaller).")
    if missing := payload["only_in_a"] + payload["only_in_b"]:
        note(f"{payload['only_in_a']} results only in A, {payload['only_in_b']} only in B" if missing else "")
    gpus = {(row["gpu_a"], row["gpu_b"]) for row in rows if row["gpu_a"] != row["gpu_b"]}
    for one, other in sorted(gpus):
        note(f"different GPUs: {one} in A, {other} in B; the ratio compares cards too", style="yellow")
