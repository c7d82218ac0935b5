"""A paper's records and verdicts as Markdown or as one self-contained HTML page, and generated blocks of a README.

Everything is computed from the arguments; nothing is typed by hand. Tables are per GPU, experiment, precision and
input, and each carries its stamp (measured, checked, modelled or quoted; GPU; date).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench import series

if TYPE_CHECKING:
    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.registry import Paper

UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s"}  # as people write them
CLAIM_HEADINGS = ("claim", "where", "paper says", "here", "verdict")


def number(value: Any, unit: str = "") -> str:
    """A claimed or measured value as text: `740 TFLOP/s`, `1.5 to 2 x`, or a dash when there is none."""
    if value is None:
        return "–"
    ends = list(value) if isinstance(value, list | tuple) else [value]
    words = [_plain(v) if isinstance(v, int | float) and not isinstance(v, bool) else str(v) for v in ends]
    text = " to ".join(dict.fromkeys(words))  # a range of one value is that value
    return f"{text} {UNITS.get(unit, unit)}" if unit and unit != "1" else text


def _plain(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def summary(verdicts: Iterable[Verdict]) -> str:
    """One line: `61 claims: 20 reproduced, 9 within 25%, 4 not reproduced, 28 not measured`.

    Claims that the paper's own figures decide are counted apart: `...; the paper against itself: 5 hold, 6 do not`.
    """
    from gpu_accel.workbench import claims

    verdicts = list(verdicts)
    counts = claims.summary(verdicts)
    total, (hold, fail) = sum(counts.values()), claims.against_itself(verdicts)
    parts = []
    if total or not hold + fail:
        words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        parts.append(f"{total} claim{'' if total == 1 else 's'}: {words or 'none judged'}")
    if hold + fail:
        parts.append(f"the paper against itself: {hold} hold, {fail} do not")
    return "; ".join(parts)


_BOUNDS = {"at_least": "≥ ", "at_most": "≤ "}


def claimed(verdict: Verdict) -> str:
    """What the claim says, and what that is on the card measured here where it is scaled: `977 TFLOP/s (here 954)`."""
    claim = verdict.claim
    text = number(claim.value, claim.unit)
    if isinstance(claim.value, int | float) and not isinstance(claim.value, bool):
        text = _BOUNDS.get(claim.direction, "") + text
    return text if verdict.expected is None else f"{text} (here {number(verdict.expected)})"


def claim_row(verdict: Verdict) -> tuple[str, str, str, str, str]:
    """One row of the claims table, in the order of `CLAIM_HEADINGS`."""
    claim = verdict.claim
    here = number(verdict.measured, claim.unit)
    if verdict.measured is not None and verdict.interval is not None:
        here += f" [{number(verdict.interval)}]"
    return claim.statement, claim.where, claimed(verdict), here, verdict.shown


def _tables(records: Sequence[Record], metric: str) -> Iterable[tuple[str, list[Record]]]:
    """Split records into tables that may be shown as one: of one kind, GPU, experiment, pass, dtype, input and load."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.has(metric):
            case = record.case
            load = str(record.timing.get("mode", "burst")).replace("burst", "")
            conditions = (*(str(case.get(name, "")) for name in ("pass", "dtype", "input")), load)
            groups.setdefault((record.kind, series.gpu_of(record), record.experiment, *conditions), []).append(record)
    for (_, _, experiment, direction, dtype, data, load), members in sorted(groups.items()):
        parts = (experiment, direction if direction != experiment else "", dtype, f"input {data}" if data else "", load)
        yield " · ".join(part for part in parts if part), members


def pivot(records: Sequence[Record], metric: str) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) with one row per (head_dim, causal, implementation) and one column per sequence length.

    Records of other work, without sequences, get one row per case and implementation.
    """
    if not any("seqlen_q" in record.case for record in records):
        return _plain_rows(records, metric)
    newest: dict[tuple, Record] = {}
    for record in sorted(records, key=lambda r: r.time):
        case = record.case
        newest[case.get("head_dim"), bool(case.get("causal")), record.impl, case.get("seqlen_q")] = record
    lengths = sorted({key[3] for key in newest if key[3] is not None}, key=series.in_order)
    impls = series.order(key[2] for key in newest)
    rows = []
    for dim, causal in sorted({key[:2] for key in newest}, key=lambda k: (series.in_order(k[0]), k[1])):
        for impl in impls:
            found = [newest.get((dim, causal, impl, n)) for n in lengths or [None]]
            if any(found):
                cells = [number(r.value(metric)) if r else "–" for r in found]
                if metric in ("tflops", "gbps"):
                    cells = [f"{r.value(metric):.0f}" if r else "–" for r in found]
                rows.append(
                    [str(dim if dim is not None else ""), "causal" if causal else "full", series.label(impl), *cells]
                )
    return ["head dim", "mask", "implementation", *(series.short(n) for n in lengths or [0])], rows


def _plain_rows(records: Sequence[Record], metric: str) -> tuple[list[str], list[list[str]]]:
    """One row each, in the order of the records, with a column for every key of the case that differs among them."""
    newest: dict[tuple[str, str], Record] = {}
    for record in sorted(records, key=lambda r: r.time):
        newest[json.dumps(record.case, sort_keys=True), record.impl] = record
    kept = [r for r in records if newest[json.dumps(r.case, sort_keys=True), r.impl] is r]
    keys = list(dict.fromkeys(key for record in kept for key in record.case))
    telling = [key for key in keys if len({repr(record.case.get(key)) for record in kept}) > 1]
    units = {record.unit for record in kept if record.metric == metric}
    value = f"{metric}, {units.pop()}" if len(units) == 1 and units != {"1"} else metric
    rows = [
        [*(str(r.case.get(key, "")) for key in telling), series.label(r.impl), number(r.value(metric))] for r in kept
    ]
    return [*(key.replace("_", " ") for key in telling), "implementation", value], rows


def _sections(records: Sequence[Record]) -> Iterable[tuple[str, str, list[str], list[list[str]]]]:
    """(title, stamp, headings, rows) of every result table."""
    names = {"tflops": "TFLOP/s", "rmse": "RMSE against float64", "peak_bytes": "peak bytes"}
    others = {r.metric for r in records if r.kind != "quoted"} - {"time", "correct", "tflops"}
    for metric in ("tflops", *sorted(others)):
        for title, members in _tables([r for r in records if r.kind != "quoted"], metric):
            headings, rows = pivot(members, metric)
            yield f"{names.get(metric, metric)}: {title}", series.stamp(members).sentence, headings, rows
    correct = [r for r in records if r.metric == "correct" and r.checked]
    if correct:
        checks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for record in correct:
            checks.setdefault((record.experiment, record.impl), []).append(record.checked or {})
        rows = []
        for (experiment, impl), found in sorted(checks.items()):
            worst = max(found, key=lambda check: check["error"] / (check["bound"] or 1))
            numbers = [str(len(found)), f"{worst['error']:.2g}", f"{worst['bound']:.2g}"]
            rows.append([experiment, series.label(impl), *numbers, worst["metric"]])
        headings = ["experiment", "implementation", "cases", "worst error", "allowed", "metric"]
        yield "Correctness on a CPU", series.stamp(correct).sentence, headings, rows


def _commands(paper: Paper) -> list[str]:
    name = paper.aliases[0] if paper.aliases else paper.id
    return [f"gpu-accel run {name}", f"gpu-accel claims {name}"]


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numeric_from: int = 99) -> str:
    """A Markdown table; columns from `numeric_from` on are right-aligned."""
    rule = ["---:" if index >= numeric_from else "---" for index in range(len(headings))]
    lines = [headings, rule, *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def claims_markdown(verdicts: Iterable[Verdict]) -> str:
    """The claims table with its one-line summary above it."""
    verdicts = list(verdicts)
    return f"**{summary(verdicts)}**\n\n{markdown_table(CLAIM_HEADINGS, [claim_row(v) for v in verdicts])}"


def markdown(paper: Paper, records: Iterable[Record], verdicts: Iterable[Verdict]) -> str:
    """The whole report of one paper as Markdown."""
    records, verdicts = list(records), list(verdicts)
    parts = [
        f"# {paper.title}",
        f"arXiv:{paper.arxiv}, {paper.year}. {series.stamp(records).sentence}.",
        "## Claims",
        claims_markdown(verdicts),
        "## Results",
    ]
    empty = True
    for title, stamp, headings, rows in _sections(records):
        empty = False
        parts += [f"### {title}", f"*{stamp}*", markdown_table(headings, rows, numeric_from=3)]
    if empty:
        parts.append("Nothing is measured yet.")
    parts += ["## Run it", "```\n" + "\n".join(_commands(paper)) + "\n```"]
    return "\n\n".join(parts) + "\n"


STYLE = """
:root { color-scheme: light dark; --text: #16202c; --muted: #5b6673; --edge: #d8dee6; --back: #fff; --row: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --muted: #9aa5b1; --edge: #30363d; --back: #0d1117; --row: #161b22; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1120px;
  margin: 2.5rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; } h2 { margin: 2.4rem 0 .8rem; font-size: 1.3rem; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 0; } h3 + p { margin: 0; font-size: 13px; }
.scroll { overflow-x: auto; margin: .6rem 0 1.6rem; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--edge); text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--muted); white-space: nowrap; }
tr:nth-child(even) td { background: var(--row); } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
details { border-bottom: 1px solid var(--edge); padding: .4rem 0; } summary { cursor: pointer; }
code, pre { font: 13px/1.5 ui-monospace, monospace; background: var(--row); border-radius: 4px; }
code { padding: .05rem .25rem; font-size: 12px; } pre { padding: .7rem 1rem; overflow-x: auto; }
.muted { color: var(--muted); } figure { margin: 0 0 1.5rem; } figure svg { width: 100%; height: auto; }
"""


LEFT = ' style="text-align:left"'  # notebooks align cells to the right otherwise


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numeric_from: int = 99) -> str:
    """A plain HTML table, every cell escaped; columns from `numeric_from` on are right-aligned."""
    kind = [' class="n"' if index >= numeric_from else LEFT for index in range(len(headings))]
    head = "".join(f"<th{k}>{escape(h)}</th>" for h, k in zip(headings, kind, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{k}>{escape(str(c))}</td>" for c, k in zip(row, kind, strict=True)) + "</tr>"
        for row in rows
    )
    return _scrolling(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>")


def _scrolling(table: str) -> str:
    return f'<div class="scroll" style="overflow-x:auto">{table}</div>'


def _prose(text: str) -> str:
    """Text for HTML: escaped, and what stands between backticks as code, whose lines break only between words."""

    def code(found: re.Match[str]) -> str:
        return "<code>" + re.sub(r"(\S*-\S*)", r'<span style="white-space:nowrap">\1</span>', found[1]) + "</code>"

    return re.sub(r"`([^`]+)`", code, escape(text))


def split_word(shown: str) -> tuple[str, str]:
    """The bare verdict word and what is said with it: `not measured (no run)` -> `not measured`, `no run`."""
    found = re.match(r"(reproduced|within \d+%|not reproduced|not measured|unsupported)(?:[:,]? )?(.*)", shown, re.S)
    word, rest = (found[1], found[2]) if found else (shown, "")
    return word, rest[1:-1] if rest.startswith("(") and rest.endswith(")") else rest


def claims_html(verdicts: Iterable[Verdict]) -> str:
    """The claims as HTML; each verdict is coloured by its word and carries its reason.

    The cells of a figure, the claims that the paper's own figures decide, and those of the project's own earlier
    documents fold into a line with their summary.
    """
    folds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        claim = verdict.claim
        apart = "internal" if claim.internal else "seed" if claim.source == "seed" else ""
        folds.setdefault(claim.figure or apart, []).append(verdict)
    parts = [_claims_table_html(folds.pop("", []))]
    headings = {"seed": "Earlier documents of this project", "internal": "The text against the paper's own figures"}
    for name, members in folds.items():
        heading = headings.get(name, members[0].claim.where)
        line = f"<summary><b>{escape(heading)}</b>: {escape(summary(members))}</summary>"
        parts.append(f"<details>{line}\n{_claims_table_html(members)}\n</details>")
    return "\n".join(part for part in parts if part)


# Widths stand in the cells, because a notebook brings no style sheet of ours.
_WIDTHS = (";min-width:22em", ";min-width:8em", ";min-width:6em", ";min-width:8em", ";min-width:15em")


def _claims_table_html(verdicts: Sequence[Verdict]) -> str:
    from gpu_accel.workbench.plots import WORD_COLOURS, word_group

    if not verdicts:
        return ""
    rows = []
    for verdict in verdicts:
        *cells, shown = claim_row(verdict)
        word, why = split_word(str(shown))
        dot = f'<span style="color:{WORD_COLOURS[word_group(word)]}">●</span>'
        text = f'<span style="font-weight:600;white-space:nowrap">{dot} {escape(word)}</span>'
        if why:
            text += f'<br><span class="muted" style="font-size:.9em">{_prose(why)}</span>'
        body = "".join(f"<td{LEFT}>{_prose(str(cell))}</td>" for cell in cells)
        last = f'<td{LEFT} title="{escape(verdict.detail or "")}">{text}</td>'
        rows.append(f'<tr id="{escape(verdict.claim.id)}">{body}{last}</tr>')
    widths = (LEFT[:-1] + width + '"' for width in _WIDTHS)
    head = "".join(f"<th{style}>{heading}</th>" for heading, style in zip(CLAIM_HEADINGS, widths, strict=True))
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>"
    return _scrolling(table)


def figures(records: Iterable[Record], claims: Iterable[Claim] = ()) -> list[tuple[str, list[Record], list[Claim]]]:
    """(title, records, quotes) of each throughput figure: one per GPU, experiment, dtype and input."""
    claims = list(claims)
    found = []
    for title, members in _tables([r for r in records if r.kind == "measured"], "tflops"):
        case = members[0].case
        if "seqlen_q" in case and "head_dim" in case:
            dtype = str(case.get("dtype", "")) or None
            quotes = series.paper_curve(claims, pass_=str(case.get("pass", "forward")), dtype=dtype)
            found.append((title, members, quotes))
    return sorted(found, key=lambda figure: "backward" in figure[0])  # forward first


def _heading(title: str) -> str:
    return title[:1].upper() + title[1:]


def html(
    paper: Paper,
    records: Iterable[Record],
    verdicts: Iterable[Verdict],
    *,
    claims: Iterable[Claim] = (),
    plotly: str = "svg",
) -> str:
    """The whole report of one paper as one HTML page.

    Args:
        claims: the paper's claims, to draw its own curves beside ours; without them no curve is quoted.
        plotly: "svg" draws static figures and needs neither plotly nor a network; "cdn" embeds interactive plots that
            load plotly.js from its CDN.
    """
    from gpu_accel.workbench import plots

    if plotly not in ("svg", "cdn"):
        raise InvalidInputError(f"plotly is {plotly!r}; choose 'svg' or 'cdn'")
    records, verdicts = list(records), list(verdicts)
    parts = [
        f"<h1>{escape(paper.title)}</h1>",
        f'<p class="muted">arXiv:{escape(paper.arxiv)}, {paper.year}. {escape(series.stamp(records).sentence)}.</p>',
        f"<p><b>{escape(summary(verdicts))}</b></p>",
    ]
    for index, (title, members, quotes) in enumerate(figures(records, claims)):
        if plotly == "svg":
            drawing = plots.static_svg(members, quotes=quotes, title=_heading(title), name=f"figure-{index}")
            parts.append(f"<figure>{drawing}</figure>")
        else:
            figure = plots.throughput(members, quotes=quotes, title=_heading(title))
            parts.append(figure.to_html(full_html=False, include_plotlyjs="cdn" if index == 0 else False))
    parts += ["<h2>Claims</h2>", claims_html(verdicts), "<h2>Results</h2>"]
    tables = list(_sections(records))
    for title, stamp, headings, rows in tables:
        parts += [
            f"<h3>{escape(title)}</h3>",
            f'<p class="muted">{escape(stamp)}</p>',
            html_table(headings, rows, numeric_from=3),
        ]
    if not tables:
        parts.append("<p>Nothing is measured yet.</p>")
    parts.append("<h2>Run it</h2>\n<pre>" + escape("\n".join(_commands(paper))) + "</pre>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(paper.title)}</title>\n<style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def update_block(path: str | Path, name: str, text: str) -> bool:
    """Replace what lies between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` in a file.

    The file is written whole or not at all. Returns whether it changed.

    Raises:
        InvalidInputError: the file has not exactly one such pair of markers.
    """
    path = Path(path)
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    old = path.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise InvalidInputError(f"{path} needs exactly one pair of markers {begin} ... {end}")
    if begin in text or end in text:
        raise InvalidInputError(f"the text for block {name!r} contains its own marker")
    head, _, rest = old.partition(begin)
    tail = rest.partition(end)[2]
    new = f"{head}{begin}\n{text.strip()}\n{end}{tail}"
    if new == old:
        return False
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(new)
    os.chmod(file.name, path.stat().st_mode)
    os.replace(file.name, path)
    return True
