"""`gpu-accel compare A B`: what got faster or slower from A to B, and what is too noisy to say."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, output
from .console import Fittest, Items, note, out, plain, table
from .options import JsonOption, OutputOption
from .render import number, split_cases
from .results import load

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.statistics import Ratio

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

    Results are matched by implementation, case, metric, load (burst or sustained), L2 cache and GPU, times by the work
    of a call too. A pair is ambiguous when its interval allows two verdicts. Of errors and bytes, faster means smaller;
    of likeness, closer.
    """
    output.check_suffix(output_)
    if unknown := [word for word in fail_on or [] if word not in GATES]:
        raise InvalidInputError(f"--fail-on {unknown[0]}: choose {', '.join(GATES)}")
    if paper:
        from gpu_accel.workbench.registry import paper as find

        paper = find(paper).id
    given = [load(source, paper) for source in (a, b)]
    sides = [_index(records, only or [], skip or []) for records in given]
    pairs, left_out, alone = _pair(*sides)
    if not pairs:
        found = "; ".join(f"{name}: {_found(records)}" for name, records in zip((a, b), given, strict=True))
        why = "".join(f". {_left_out(entry)}" for entry in left_out)
        note(
            f"nothing to compare: no implementation was measured in the same case by both. {found}{why}", style="yellow"
        )
        raise typer.Exit(codes.NOTHING_RAN)
    rows = [compared(one, other, noise) for one, other in pairs]
    counts = Counter(row["verdict"] for row in rows)
    payload = {
        "a": a,
        "b": b,
        "noise": noise,
        "rows": rows,
        "counts": {word: counts[word] for word in WORDS},
        "only_in_a": alone[0],
        "only_in_b": alone[1],
        "left_out": left_out,
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
    """One row: both values in the unit of A, how much better B is with its interval, and a word.

    `ratio` is above 1 where B is better, whichever way the metric points: a / b of times, errors and bytes (of their
    magnitudes, for a bias may be negative), b / a of rates and of likeness, the ratio of amplitudes of what is in dB.
    It is None where no ratio exists (a value of 0, a likeness below 0); then the sign of `difference`, b - a, decides.
    """
    from gpu_accel.workbench.ledger import higher_is_better
    from gpu_accel.workbench.statistics import verdict

    scale = _factor(b.unit) / _factor(a.unit)
    one, other = a.value(), b.value() * scale
    up = higher_is_better(a.metric, a.unit) or higher_is_better(b.metric, b.unit)
    ratio = _ratio(a, b, scale, up=up)
    if ratio is not None:
        word = verdict(ratio, noise=noise)
    else:
        gain = other - one if up else abs(one) - abs(other)
        most = noise * max(abs(one), abs(other))
        word = "same" if abs(gain) <= most else "faster" if gain > 0 else "slower"
    same = {key: getattr(a, key) for key in ("paper", "experiment", "impl", "case", "metric", "unit")}
    how = {key: str(a.timing.get(key) or "") for key in ("mode", "l2")}
    gpus = [record.env.get("gpu", "") for record in (a, b)]
    ends = (ratio.median, ratio.low, ratio.high) if ratio is not None else (None, None, None)
    return same | how | {
        "a": one, "b": other, "difference": other - one, "higher_is_better": up,
        "ratio": ends[0], "low": ends[1], "high": ends[2], "verdict": word, "gpu_a": gpus[0], "gpu_b": gpus[1],
    }  # fmt: skip


def _ratio(a: Record, b: Record, scale: float, *, up: bool) -> Ratio | None:
    """How much better B is, with its interval; None where that is no finite number above 0."""
    from gpu_accel.workbench.statistics import Ratio, bootstrap_ratio

    one, other = a.value(), b.value() * scale
    if one == other and (a.samples == b.samples or not (a.samples and b.samples)):
        return Ratio(1.0, 1.0, 1.0)  # the same measurement has no noise against itself
    if a.unit == "dB":
        exponent = (other - one if up else one - other) / 20
        return Ratio(*[10.0**exponent] * 3) if abs(exponent) < 300 else None
    old, new = a.samples, tuple(sample * scale for sample in b.samples)
    if min(len(old), len(new)) >= 2 and min(*old, *new) > 0:
        try:
            return bootstrap_ratio(new, old) if up else bootstrap_ratio(old, new)
        except InvalidInputError:  # too far apart
            return None
    # One number each, such as peak bytes: nothing to resample. Of an error only the magnitude counts.
    top, bottom = (other, one) if up else (abs(one), abs(other))
    value = top / bottom if top > 0 and bottom > 0 else 0.0
    return Ratio(value, value, value) if 0 < value < float("inf") else None


# Units of one quantity, each as a multiple of the first; other units are compared with themselves only.
QUANTITIES = (
    {"ms": 1.0, "us": 1e-3, "s": 1e3},
    {"bytes": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    {"J": 1.0, "mJ": 1e-3},
    {"1": 1.0, "%": 0.01},
)


def _factor(unit: str) -> float:
    return next((quantity[unit] for quantity in QUANTITIES if unit in quantity), 1.0)


def _quantity(unit: str) -> str:
    return next((next(iter(quantity)) for quantity in QUANTITIES if unit in quantity), unit)


def _found(records: list[Record]) -> str:
    """What a side holds: `76 timed records`, or `27 checked, 0 timed (CPU)`."""
    timed = sum(record.kind == "measured" and record.is_speed for record in records)
    checked = sum(record.kind == "checked" for record in records)
    if timed or not checked:
        return f"{timed} timed records"
    return f"{checked} checked, 0 timed ({'GPU' if any(record.env.get('gpu') for record in records) else 'CPU'})"


Thing = tuple[str, ...]  # paper, experiment, implementation, case, metric
How = tuple[str, str, str, str]  # load (burst, sustained), second-level cache (flushed, clean, warm), quantity, GPU
HOW = ("load", "L2 cache", "unit", "GPU")
WORK = ("one amount of work a call", "another")  # A and B


def _index(records: list[Record], only: list[str], skip: list[str]) -> dict[tuple[Thing, How], Record]:
    """The newest measured record of each thing, by what it is and how it was taken."""
    from gpu_accel.workbench.records import merge

    kept = [
        record
        for record in merge(records)
        if record.kind == "measured" and record.median is not None
        and (not only or record.impl in only) and record.impl not in skip
    ]  # fmt: skip
    kept.sort(key=lambda record: record.when)
    found: dict[tuple[Thing, How], Record] = {}
    for r in kept:
        thing = (r.paper, r.experiment, r.impl, json.dumps(r.case, sort_keys=True), r.metric)
        mode, l2 = (str(r.timing.get(key) or "") for key in ("mode", "l2"))
        found[thing, (mode, l2, _quantity(r.unit), str(r.env.get("gpu") or ""))] = r
    return found


def _pair(
    a: dict[tuple[Thing, How], Record], b: dict[tuple[Thing, How], Record]
) -> tuple[list[tuple[Record, Record]], list[dict[str, Any]], tuple[int, int]]:
    """(pairs of like with like, what both measured in different ways and how often, how many only one side has).

    The same GPU is paired with itself. Where each side has a single GPU, and not the same, these two are compared.
    Times of different work are not: a kernel whose loop was made longer has not become slower.
    """
    gpus = [{how[3] for _, how in side} for side in (a, b)]
    across = len(gpus[0]) == len(gpus[1]) == 1

    def key(known: tuple[Thing, How]) -> tuple[Thing, tuple[str, ...]]:
        return known[0], known[1][:3] if across else known[1]

    others = {key(known): known for known in b}
    found = {known: others[key(known)] for known in a if key(known) in others}
    matches = {one: other for one, other in found.items() if _same_work(a[one], b[other])}
    rest_a = [known for known in a if known not in found]
    taken = set(found.values())
    rest_b = [known for known in b if known not in taken]
    reasons: Counter[tuple[str, str]] = Counter()
    by_thing: dict[Thing, list[How]] = {}
    for thing, how in rest_b:
        by_thing.setdefault(thing, []).append(how)
    explained = set()
    for thing, how in rest_a:
        for other in by_thing.get(thing, []):
            differs = [i for i in range(len(HOW)) if how[i] != other[i] and not (i == 3 and across)]
            words = [", ".join(f"{HOW[i]} {side[i] or 'unknown'}" for i in differs) for side in (how, other)]
            reasons[words[0], words[1]] += 1
            explained |= {("a", thing, how), ("b", thing, other)}
    if unlike := len(found) - len(matches):
        reasons[WORK] += unlike
    left_out = [{"a": one, "b": other, "count": count} for (one, other), count in reasons.items()]
    alone = [sum((side, *known) not in explained for known in rest) for side, rest in (("a", rest_a), ("b", rest_b))]
    return [(a[one], b[other]) for one, other in matches.items()], left_out, (alone[0], alone[1])


def _same_work(a: Record, b: Record) -> bool:
    """Whether one call does as many operations and moves as many bytes, as far as both say; rates need not ask."""
    if a.metric != "time":
        return True
    return all(math.isclose(a.work[name], b.work[name], rel_tol=1e-6) for name in a.work.keys() & b.work.keys())


def _left_out(entry: dict[str, Any]) -> str:
    return f"not compared: {entry['a']} in A with {entry['b']} in B ({entry['count']} pairs)"


def _show(payload: dict[str, Any]) -> None:
    rows = payload["rows"]
    names = {row["experiment"] for row in rows}
    shared, labels = split_cases([row["case"] for row in rows], *(names if len(names) == 1 else ()))
    parts = [one for one in ("mode", "l2", "gpu_a") if len({row[one] for row in rows}) > 1]
    heads = ["experiment"] if len(names) != 1 else []
    heads += ["implementation", "case", *(["taken"] if parts else []), "metric"]
    numbers = ("A", "B", "gain")
    title = plain(shared) if len(names) != 1 else f"{plain(names.pop())}  [dim]{plain(shared)}[/]"
    wide, narrow = (table(*about, *numbers, "", title=title, right=numbers) for about in (heads, [", ".join(heads)]))
    for row, label in zip(rows, labels, strict=True):
        cells = {
            "experiment": row["experiment"], "implementation": row["impl"], "case": label,
            "taken": ", ".join(filter(None, [row[one] for one in parts])),
            "metric": f"{row['metric'].replace('_', ' ')} {row['unit'] if row['unit'] != '1' else ''}".strip(),
        }  # fmt: skip
        about = [plain(cells[head]) for head in heads]
        style = STYLES[row["verdict"]]
        found = (number(row["a"]), number(row["b"]), _gain(row), f"[{style}]{row['verdict']}[/]")
        wide.add_row(*about, *found)
        narrow.add_row(Items([one for one in about if one]), *found)
    screen = out()
    screen.print(Fittest(wide, narrow))
    counts = ", ".join(f"{count} {word}" for word, count in payload["counts"].items() if count)
    screen.print(
        f"{len(rows)} compared: {counts}. A gain above 1 means that B is better: A / B of times, errors and bytes, "
        "B / A of rates and likeness."
    )
    for entry in payload["left_out"]:
        note(_left_out(entry), style="yellow")
    if payload["only_in_a"] or payload["only_in_b"]:
        note(f"{payload['only_in_a']} results only in A, {payload['only_in_b']} only in B")
    gpus = {(row["gpu_a"], row["gpu_b"]) for row in rows if row["gpu_a"] != row["gpu_b"]}
    for one, other in sorted(gpus):
        note(f"different GPUs: {one} in A, {other} in B; the ratio compares cards too", style="yellow")


def _gain(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return f"{row['difference']:+.3g} {row['unit'] if row['unit'] != '1' else ''}".strip()
    interval = f" [{row['low']:.3f}, {row['high']:.3f}]" if row["low"] != row["high"] else ""
    return f"{row['ratio']:.3f}{interval}"
