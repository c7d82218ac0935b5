"""Records and verdicts as tables for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .console import Fittest, Items, plain, table

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.runner import Outcome

Case = dict[str, Any]
MOST_ERRORS = 4  # kinds of error that a table names

# How a case is written: short names, in the order that kernel people say them.
SHORT = {
    "batch": "B", "seqlen_q": "Sq", "seqlen_k": "Sk", "heads": "H", "heads_kv": "Hkv", "head_dim": "D",
}  # fmt: skip


def number(value: float | None, digits: int = 4) -> str:
    """A number to so many digits, without a float's tail: 0.1235, 1234, 3.2e-07."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{min(digits - 1, 2)}e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def duration(ms: float) -> str:
    """A time with its unit: 12.34 us, 1.234 ms, 2.345 s."""
    if ms < 1:
        return f"{ms * 1e3:.4g} us"
    return f"{ms:.4g} ms" if ms < 1000 else f"{ms / 1e3:.4g} s"


def span(seconds: float) -> str:
    """A time to wait: 40 seconds, 12 minutes, 3 hours, 5 days."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}s"
    return f"{seconds:.0f} seconds"


def case_key(case: Case) -> str:
    """The same text for the same case."""
    return json.dumps(case, sort_keys=True)


def size(count: float) -> str:
    """A number of bytes: 640 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


def quantity(value: float, unit: str) -> str:
    """A value as it is read most easily in its unit."""
    match unit:
        case "ms":
            return duration(value)
        case "bytes":
            return size(value)
        case "1":
            return number(value)
        case _:
            return f"{number(value)} {unit}"


def label(case: Case, experiment: str = "") -> str:
    """A case in a few words: `B4 S2048 H16 D128 causal fp8`, without what the experiment's name says already."""
    rest = {key: value for key, value in case.items() if value != experiment}
    words = []
    if "seqlen_q" in rest and rest.get("seqlen_q") == rest.get("seqlen_k"):
        rest["seqlen"] = rest.pop("seqlen_q")
        del rest["seqlen_k"]
    if "heads" in rest and rest.get("heads") == rest.get("heads_kv"):
        del rest["heads_kv"]
    for key, short in {**SHORT, "seqlen": "S"}.items():
        if key in rest:
            words.append((list(SHORT).index(key) if key in SHORT else 1, f"{short}{rest.pop(key)}"))
    texts = [word for _, word in sorted(words)]
    for key, value in rest.items():
        if isinstance(value, bool):
            texts += [key] if value else [f"not {key}"]
        elif isinstance(value, str):
            texts.append(value)
        else:
            texts.append(f"{key}={value}")
    return " ".join(texts)


def split_cases(cases: Sequence[Case], experiment: str = "") -> tuple[str, list[str]]:
    """What all cases share, as one label, and what is left of each: long tables stay readable."""
    if not cases:
        return "", []
    pairs = [("seqlen_q", "seqlen_k"), ("heads", "heads_kv")]  # kept together, for label() to join
    same = {key for key, value in cases[0].items() if all(key in case and case[key] == value for case in cases)}
    for pair in pairs:
        if not same.issuperset(pair):
            same -= set(pair)
    if len({tuple(sorted(case.items())) for case in cases}) == 1:
        same = {key for key in same if not isinstance(cases[0][key], int) or isinstance(cases[0][key], bool)}
    shared = label({key: value for key, value in cases[0].items() if key in same}, experiment)
    return shared, [label({k: v for k, v in case.items() if k not in same}, experiment) for case in cases]


def result_tables(records: Sequence[Record], incorrect: Sequence[Outcome] = ()) -> list[Any]:
    """For each experiment a table (error, bound; on a GPU time, rate, ratio too) and a line on where it was made.

    Args:
        records: those of the run, in its order.
        incorrect: results that failed their check. They have no record, but a row that says WRONG.
    """
    parts: list[Any] = []
    names = [record.experiment for record in records] + [outcome.experiment for outcome in incorrect]
    for name in dict.fromkeys(names):
        group = [record for record in records if record.experiment == name]
        wrong = [outcome for outcome in incorrect if outcome.experiment == name]
        parts += [_result_table(name, group, wrong), *([_where(group)] if group else [])]
    return parts


def _result_table(experiment: str, records: list[Record], incorrect: list[Outcome]) -> Any:
    cases = [record.case for record in records] + [outcome.case for outcome in incorrect]
    shared, labels = split_cases(cases, experiment)
    lines: dict[tuple[str, str], list[Record]] = {}
    for record, case in zip(records, labels, strict=False):
        lines.setdefault((case, record.impl), []).append(record)
    wrong = {(case, one.impl): one for one, case in zip(incorrect, labels[len(records) :], strict=True)}
    lines |= {key: [] for key in wrong if key not in lines}
    lines = dict(sorted(lines.items(), key=lambda line: labels.index(line[0][0])))  # wrong ones to their cases
    timed = any(record.is_speed for record in records)
    rated = any(record.has("tflops") for record in records)
    first = {key: _first_speed(group) for key, group in lines.items()}
    others = list(dict.fromkeys(
        _told(r) for key, group in lines.items() for r in group if r.metric != "correct" and r is not first[key]
    ))  # fmt: skip
    against = list(dict.fromkeys(name for record in records for name in record.ratio_to))
    checks = [record.checked for record in records] + [one.check and one.check.as_dict() for one in incorrect]
    errors = list(dict.fromkeys(str(check["metric"]) for check in checks if check))
    rates = ["time", "p20 .. p80"] if timed else []
    rates += ["TFLOP/s"] if rated else []
    best = _fastest(records, labels[: len(records)])
    rows: list[_Row] = []
    for (case, impl), group in lines.items():
        failed = wrong.get((case, impl))
        checked = next((record.checked for record in group if record.checked), None)
        if failed:
            checked = failed.check.as_dict() if failed.check else checked
        cells = {"error": number(checked["error"], 2), "bound": number(checked["bound"], 2)} if checked else {}
        time = first[case, impl]
        by_metric = {_told(record): record for record in group if record is not time}
        cells |= {f"={m}": quantity(by_metric[m].value(), by_metric[m].unit) for m in others if m in by_metric}
        if timed:
            spread = time.interval("ms") if time and time.has("ms") else None
            cells["time"] = duration(time.value("ms")) if time and time.has("ms") else "[dim]not timed[/]"
            cells["p20 .. p80"] = f"{number(spread[0])} .. {number(spread[1])}" if spread else ""
        if time and time.has("tflops"):
            cells["TFLOP/s"] = number(time.value("tflops"), 3)
        cells |= {f"/{name}": _ratio(time.ratio_to.get(name)) for name in against if time}
        if incorrect:
            cells["result"] = "[bold red]WRONG[/]" if failed else "correct"
        rows.append((case, f"[bold green]{plain(impl)}[/]" if (case, impl) in best else plain(impl), cells))
    names = ["error", "bound", *(f"={m}" for m in others), *rates, *(f"/{name}" for name in against)]
    names += ["result"] if incorrect else []
    values, ratios = [name for name in names if name[0] == "="], [name for name in names if name[0] == "/"]
    layouts: list[dict[str, list[str]]] = [
        {}, {"values": values}, {"against": ratios}, {"values": values, "against": ratios}, {"results": names},
    ]  # fmt: skip
    words = {
        "title": f"{plain(experiment)}  [dim]{plain(shared)}[/]",
        "caption": f"error: {plain('; '.join(errors[:MOST_ERRORS]))}" if errors else "",
    }
    if len(errors) > MOST_ERRORS:  # such as one for each instruction
        words["caption"] += f"; and {len(errors) - MOST_ERRORS} others; --json gives each with its result"
    return Fittest(
        *(_laid_out(rows, names, joined, words) for joined in layouts if all(len(part) > 1 for part in joined.values()))
    )


def _first_speed(records: list[Record]) -> Record | None:
    """The time, or rate, that ratios are of: with a cold cache, where there is a choice."""
    speeds = sorted((one for one in records if one.is_speed), key=lambda one: one.timing.get("l2") == "warm")
    return speeds[0] if speeds else None


def _told(record: Record) -> str:
    """A metric's name, with what sets it apart from another record of the same."""
    if not record.is_speed:
        return record.metric
    cache = "warm cache" if record.timing.get("l2") == "warm" else ""
    return ", ".join(filter(None, (record.metric, cache, str(record.timing.get("mode") or ""))))


_Row = tuple[str, str, dict[str, str]]  # case, implementation, cells by column: =metric, /rival, or as it is headed


def _laid_out(rows: list[_Row], names: list[str], joined: dict[str, list[str]], words: dict[str, str]) -> Any:
    """The rows as a table; `joined` says which columns become one of `name value; name value`, and its heading."""
    heads = {name: name for name in names}
    heads |= {name: plain(name[1:].replace("_", " ")) for name in names if name[0] == "="}
    heads |= {name: f"against {plain(name[1:])}" for name in names if name[0] == "/"}
    place = {part[0]: (heading, part) for heading, part in joined.items()}
    columns = [name for name in names if name in place or not any(name in part for part in joined.values())]
    right = tuple(heads[name] for name in columns if name not in place)
    made = table("case", "implementation", *(place[name][0] if name in place else heads[name] for name in columns),
                 right=right, title=words["title"], caption=words["caption"])  # fmt: skip

    def item(name: str, text: str, heading: str) -> str:
        if name in ("result", "p20 .. p80") or text == "[dim]not timed[/]":
            return text
        if name == "TFLOP/s":
            return f"{text} {name}"
        return f"{heads[name].removeprefix(f'{heading} ')} {text}"

    previous, grouped = None, len({case for case, _, _ in rows}) < len(rows)  # single lines need no rules between
    for case, impl, cells in rows:
        if grouped and previous not in (None, case):
            made.add_section()
        line: list[Any] = ["" if case == previous else plain(case), impl]
        previous = case
        for name in columns:
            if name in place:
                heading, part = place[name]
                line.append(Items([item(one, cells[one], heading) for one in part if cells.get(one)]))
            else:
                line.append(cells.get(name, ""))
        made.add_row(*line)
    return made


def _where(records: list[Record]) -> str:
    """On what the numbers were made; the line under a table."""
    first = records[-1]
    env = first.env
    if first.kind == "checked":
        return "[dim]checked, not timed[/]" if env.get("gpu") else "[dim]checked on a CPU, not timed[/]"
    clock = env.get("clock_mhz")
    clock = clock.get("median") if isinstance(clock, dict) else clock
    parts = [first.kind + " on", str(env.get("gpu", "?"))]
    parts += [f"· torch {env['torch']}"] if env.get("torch") else []
    parts += [f"· triton {env['triton']}"] if env.get("triton") else []
    parts += [f"· {clock:.0f} MHz"] if isinstance(clock, int | float) else []
    return f"[dim]{plain(' '.join(parts))}[/]"


def _ratio(ratio: dict[str, Any] | None) -> str:
    """`1.23x [1.21, 1.25]`, coloured only when the interval leaves no doubt."""
    if not ratio:
        return ""
    low, high = ratio["ci95"]
    style = "green" if low > 1 else "red" if high < 1 else "dim"
    return f"[{style}]{ratio['median']:.2f}x \\[{low:.2f}, {high:.2f}][/]"


def _fastest(records: list[Record], labels: list[str]) -> set[tuple[str, str]]:
    """(case label, implementation) of the fastest in every case that has at least two times."""
    times: dict[str, dict[str, float]] = {}
    for record, case in zip(records, labels, strict=True):
        if record.has("ms"):
            times.setdefault(case, {})[record.impl] = record.value("ms")
    return {(case, min(group, key=group.__getitem__)) for case, group in times.items() if len(group) > 1}
