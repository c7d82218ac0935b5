"""Interactive plots: pure functions from records to a plotly Figure.

plotly is imported inside the functions, so reading records never needs it. Every figure says in its subtitle whether
its numbers are measured, checked, modelled or quoted, on which GPU and when, and none mixes GPUs: records of several
GPUs raise unless `gpu=` picks one. Static pictures without plotly come from `svg.static_svg`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.workbench import series
from gpu_accel.workbench.svg import static_svg

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from gpu_accel.hardware import Ceilings, Profile
    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.records import Record

__all__ = ["claims_overview", "curve", "errors", "memory", "ratios", "roofline", "static_svg", "template", "throughput"]

PLOTLY_SYMBOLS = {
    "circle": "circle",
    "square": "square",
    "diamond": "diamond",
    "triangle": "triangle-up",
    "cross": "cross",
}
WORD_COLOURS = {
    "reproduced": "#15803d",
    "within": "#84a71f",
    "not reproduced": "#c2410c",
    "not measured": "#9aa5b1",
    "unsupported": "#7c3aed",
}
# Slower than the baseline is orange, equal is grey, faster is blue: told apart by people who do not see red and green.
RATIO_SCALE = [[0, "#b45309"], [0.5, "#eef1f4"], [1, "#1d4ed8"]]


def _plotly():
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise UnsupportedError("plots need plotly: pip install 'gpu-accel[notebook]'") from error
    return go


def template() -> go.layout.Template:
    """The look of all plots: white, light grid, no default colour cycle; about 1 kB where plotly's own is 7 kB."""
    axis = {"gridcolor": "#e9edf2", "linecolor": "#5b6673", "zeroline": False, "ticks": "", "automargin": True}
    axis |= {"title": {"font": {"size": 12}, "standoff": 8}}
    return _plotly().layout.Template(
        layout={
            "font": {"family": "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif", "size": 13},
            "paper_bgcolor": "#ffffff",
            "plot_bgcolor": "#ffffff",
            "colorway": [light for light, _ in series.COLOURS.values()],
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "y": -0.16, "yanchor": "top", "x": 0},
            "margin": {"l": 64, "r": 24, "t": 104, "b": 56},
            "title": {"x": 0.015, "xref": "container", "xanchor": "left", "y": 0.96, "yanchor": "top"},
            "hoverlabel": {"align": "left"},
        }
    )


def _figure(title: str, records: Sequence[Record], quotes: Sequence[Claim] = (), *, height: int = 440) -> go.Figure:
    """An empty figure with the project template, the title and the stamp below it."""
    stamp = series.stamp(records, quotes)
    text = stamp.text
    heading = {"text": title, "subtitle": {"text": stamp.sentence, "font": {"size": 12, "color": "#5b6673"}}}
    return _plotly().Figure(
        layout={"template": template(), "title": heading, "height": height, "meta": {"stamp": text}}
    )


def _note_if_empty(figure: go.Figure, empty: bool, text: str = "not measured yet") -> go.Figure:
    if empty:
        figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 16})
    return figure


def _grid(figure: go.Figure, rows: int, columns: int, titles: Sequence[str], *, x_title: str, y_title: str) -> None:
    figure.set_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=list(titles),
        shared_yaxes="all",
        horizontal_spacing=0.04,
        vertical_spacing=0.22 / rows if rows > 1 else 0,
    )
    figure.update_annotations(font={"size": 13})
    for column in range(1, columns + 1):
        figure.update_xaxes(title_text=x_title, row=rows, col=column)
    for row in range(1, rows + 1):
        figure.update_yaxes(title_text=y_title, row=row, col=1)


def hover(record: Record | None, note: str = "") -> str:
    """What a point says when pointed at: implementation, shape, time with interval, rate, clock, check."""
    if record is None:
        return f"quoted: {note}"
    case = record.case
    shape = " ".join(
        f"{key}={case[key]}"
        for key in ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv", "head_dim", "causal")
        if key in case
    )
    lines = [f"<b>{series.label(record.impl)}</b> ({record.kind})", shape]
    if record.median is not None:
        ends = record.interval()
        spread = f" [{ends[0]:.4g} to {ends[1]:.4g}, p20 to p80]" if ends else ""
        lines.append(f"{record.metric} {record.median:.4g} {record.unit}{spread}")
    lines += [
        f"{record.value(metric):.4g} {name}"
        for metric, name in (("tflops", "TFLOP/s"), ("gbps", "GB/s"))
        if record.has(metric)
    ]
    clock = record.env.get("clock_mhz")
    clock = clock.get("median") if isinstance(clock, dict) else clock
    if clock:
        lines.append(f"clock {clock:.0f} MHz")
    if record.env.get("throttle"):
        lines.append(f"throttled: {record.env['throttle']}")
    if record.checked:
        lines.append(
            f"error {record.checked['error']:.2g} of {record.checked['bound']:.2g} allowed ({record.checked['metric']})"
        )
    return "<br>".join(lines + ([note] if note else []))


def _add_line(figure: go.Figure, line: series.Line, impls: Sequence[str], *, legend: bool, **place: int) -> None:
    go = _plotly()
    colour = "#16202c" if line.quoted else series.colour(line.impl, impls)[0]
    ys = [p.y for p in line.points]
    style: dict[str, Any] = {"mode": "lines", "line": {"color": colour, "width": 1.5, "dash": "dash"}}
    if not line.quoted:
        style = {
            "mode": "lines+markers",
            "line": {"color": colour, "width": 2.5 if line.impl in series.OURS else 1.5},
            "marker": {"symbol": PLOTLY_SYMBOLS[series.symbol(line.impl, impls)], "size": 8, "color": colour},
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [p.high - p.y for p in line.points],
                "arrayminus": [p.y - p.low for p in line.points],
                "thickness": 1.2,
                "width": 4,
            },
        }
    trace = go.Scatter(
        x=[series.short(p.x) for p in line.points],
        y=ys,
        name=line.label if line.kind in ("measured", "quoted") else f"{line.label} ({line.kind})",
        legendgroup=line.impl,
        showlegend=legend,
        customdata=[hover(p.record, p.note) for p in line.points],
        hovertemplate="%{customdata}<extra>%{y:.4g}</extra>",
        **style,
    )
    figure.add_trace(trace, **place)


def throughput(
    records: Iterable[Record],
    *,
    quotes: Iterable[Claim] = (),
    gpu: str | None = None,
    title: str = "Throughput",
    metric: str = "tflops",
    unit: str = "TFLOP/s",
) -> go.Figure:
    """`metric` against sequence length: one chart per (causal, head_dim), one line per implementation.

    Takes records of one pass, dtype and input (`series.select`); `quotes` come from `series.paper_curve`.
    """
    records, quotes = series.one_gpu(records, gpu), list(quotes)
    panels = series.sweep(records, metric=metric, quotes=quotes)
    drawn = [p.record for panel in panels for line in panel.lines for p in line.points if p.record]
    columns = sorted({p.column for p in panels}, key=series.in_order)
    rows = sorted({p.row for p in panels}, key=series.in_order)
    figure = _figure(title, drawn, quotes, height=170 + 240 * max(1, len(rows)))
    if not panels:
        return _note_if_empty(figure, True)
    by_place = {(p.row, p.column): p for p in panels}
    found = [by_place.get((r, c)) for r in rows for c in columns]
    titles = [f"{p.title} ({p.note})" if p and p.note else p.title if p else "" for p in found]
    _grid(figure, len(rows), len(columns), titles, x_title="sequence length", y_title=unit)
    impls, seen = series.order(r.impl for r in drawn), set()
    lengths = sorted({p.x for panel in panels for line in panel.lines for p in line.points})
    for panel in panels:
        place = {"row": rows.index(panel.row) + 1, "col": columns.index(panel.column) + 1}
        for line in panel.lines:
            _add_line(figure, line, impls, legend=line.impl not in seen, **place)
            seen.add(line.impl)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=[series.short(x) for x in lengths])
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(legend_y=-0.3 / len(rows))
    return figure


def errors(records: Iterable[Record], *, metric: str = "rmse", title: str = "Error against float64") -> go.Figure:
    """Dots: the error of each recipe (implementation), one colour per input; log axis, p20 to p80 where known.

    Each input has one shape, which its legend entry names (see `notebook.largest`); several raise. Operands of one
    input (layers of a model) are apart. Errors do not depend on the GPU, so checked records (CPU) are drawn too; where
    both exist the measured one counts.
    """
    go = _plotly()
    chosen: dict[tuple[str, str], Record] = {}
    records = [r for r in records if r.has(metric)]
    operands: dict[str, set[str]] = {}
    for record in records:
        operands.setdefault(str(record.case.get("input", "")), set()).add(str(record.case.get("operand", "")))

    def drawn_as(record: Record) -> str:
        name = str(record.case.get("input", ""))
        return f"{name} {record.case.get('operand', '')}" if len(operands[name]) > 1 else name

    for record in sorted(records, key=lambda r: (r.kind == "measured", r.time)):
        chosen[drawn_as(record), record.impl] = record
    inputs = sorted({name for name, _ in chosen})
    for name in inputs:
        alike = [r for r in records if drawn_as(r) == name]
        series.require_one(alike, "seqlen_q", "head_dim", "causal")
    worst = {impl: max(r.value(metric) for (_, other), r in chosen.items() if other == impl) for _, impl in chosen}
    recipes = sorted(worst, key=lambda impl: (worst[impl], impl))
    figure = _figure(title, series.one_gpu(chosen.values()), height=190 + 26 * max(4, len(recipes)))
    for index, name in enumerate(inputs):
        mine = [chosen[name, impl] for impl in recipes if (name, impl) in chosen]
        ends = [r.interval(metric) or (r.value(metric), r.value(metric)) for r in mine]
        colour = series.SPARE_COLOURS[index % len(series.SPARE_COLOURS)][0]
        dots = go.Scatter(
            x=[r.value(metric) for r in mine],
            y=[r.impl for r in mine],
            name=_input_name(name, mine[0]),
            mode="markers",
            marker={"size": 11, "color": colour, "symbol": list(PLOTLY_SYMBOLS.values())[index % len(PLOTLY_SYMBOLS)]},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - r.value(metric) for r, (_, high) in zip(mine, ends, strict=True)],
                "arrayminus": [r.value(metric) - low for r, (low, _) in zip(mine, ends, strict=True)],
                "thickness": 1.2,
                "width": 4,
            },
            customdata=[hover(r) for r in mine],
            hovertemplate="%{customdata}<extra>%{x:.3g}</extra>",
        )
        figure.add_trace(dots)
    figure.update_xaxes(type="log", title_text=metric.upper(), exponentformat="power", dtick=1)
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=recipes[::-1])
    figure.update_layout(legend={"y": 1.02, "yanchor": "bottom"}, margin_t=124)
    return _note_if_empty(figure, not chosen)


def _input_name(name: str, record: Record) -> str:
    case = record.case
    words = [f"length {series.short(case['seqlen_q'])}"] if "seqlen_q" in case else []
    words += [f"head dim {case['head_dim']}"] if "head_dim" in case else []
    words += ["causal" if case["causal"] else "full"] if "causal" in case else []
    return f"{name or 'input not named'} ({', '.join(words)})" if words else name


def memory(
    records: Iterable[Record], *, gpu: str | None = None, metric: str = "peak_bytes", title: str = "Peak memory"
) -> go.Figure:
    """Peak bytes against sequence length, log-log: linear growth has slope 1, a materialised N x N matrix slope 2."""
    go = _plotly()
    records = [r for r in series.one_gpu(records, gpu) if r.has(metric) and "seqlen_q" in r.case]
    series.require_one(records, "pass", "dtype", "input", "head_dim", "causal")
    figure = _figure(title, records)
    impls = series.order(r.impl for r in records)
    for impl in impls:
        mine = sorted((r for r in records if r.impl == impl), key=lambda r: (r.case["seqlen_q"], r.time))
        newest = list({r.case["seqlen_q"]: r for r in mine}.values())
        colour = series.colour(impl, impls)[0]
        trace = go.Scatter(
            x=[r.case["seqlen_q"] for r in newest],
            y=[r.value(metric) / 2**20 for r in newest],
            name=series.label(impl),
            mode="lines+markers",
            line={"color": colour},
            marker={"symbol": PLOTLY_SYMBOLS[series.symbol(impl, impls)], "size": 8},
            customdata=[hover(r) for r in newest],
            hovertemplate="%{customdata}<extra>%{y:.4g} MiB</extra>",
        )
        figure.add_trace(trace)
    lengths = sorted({r.case["seqlen_q"] for r in records})
    figure.update_xaxes(
        type="log", title_text="sequence length", tickvals=lengths, ticktext=[series.short(n) for n in lengths]
    )
    figure.update_yaxes(type="log", title_text="MiB", dtick=1)
    return _note_if_empty(figure, not records)


def ratios(
    records: Iterable[Record], *, baseline: str, impl: str | None = None, gpu: str | None = None, title: str = ""
) -> go.Figure:
    """Heat map of time(baseline) / time(impl) for every shape; above 1 means that `impl` is faster.

    Only ratios taken in one interleaved run are drawn (`Record.ratio_to`); hover shows the bootstrap 95 % interval.
    `impl` defaults to our fastest implementation that has such ratios.
    """
    records = [r for r in series.one_gpu(records, gpu) if baseline in r.ratio_to and "seqlen_q" in r.case]
    names = series.order(r.impl for r in records)
    impl = impl or next((name for name in names if name in series.OURS), names[0] if names else "portable")
    newest = {}
    for record in sorted((r for r in records if r.impl == impl), key=lambda r: r.time):
        row = (record.case.get("head_dim"), bool(record.case.get("causal")))
        newest[row, record.case["seqlen_q"]] = record
    rows = sorted({row for row, _ in newest})
    lengths = sorted({n for _, n in newest})
    text = title or f"{series.label(impl)} against {series.label(baseline)}: time ratio, above 1 is faster"
    figure = _figure(text, list(newest.values()), height=170 + 44 * max(4, len(rows)))
    if not newest:
        return _note_if_empty(figure, True, f"no ratio to {baseline} measured yet")
    found = [[newest[row, n].ratio_to[baseline] if (row, n) in newest else None for n in lengths] for row in rows]
    values = [[math.log2(cell["median"]) if cell else None for cell in line] for line in found]
    reach = max(0.2, *(abs(v) for line in values for v in line if v is not None))
    notes = [
        [f"{c['median']:.3f}<br>95 % interval {c['ci95'][0]:.3f} to {c['ci95'][1]:.3f}" if c else "" for c in line]
        for line in found
    ]
    heat = _plotly().Heatmap(
        x=[series.short(n) for n in lengths],
        y=[f"head dim {d}, {'causal' if causal else 'full'}" for d, causal in rows],
        z=values,
        zmin=-reach,
        zmax=reach,
        colorscale=RATIO_SCALE,
        showscale=False,
        text=[[f"{cell['median']:.2f}" if cell else "" for cell in line] for line in found],
        texttemplate="%{text}",
        customdata=notes,
        hovertemplate="%{y}, %{x}<br>%{customdata}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    figure.add_trace(heat)
    figure.update_xaxes(title_text="sequence length", type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def curve(
    records: Iterable[Record],
    *,
    x: str,
    metric: str,
    by: str = "impl",
    marks: dict[str, float] | None = None,
    gpu: str | None = None,
    title: str = "",
) -> go.Figure:
    """One metric against one number of the case, both axes logarithmic: a line for each value of `by`.

    Args:
        records: those that lack `x` in their case, or the metric, are left out.
        by: "impl", or a key of the case.
        marks: horizontal lines by name, for numbers of somebody else.
    Raises:
        InvalidInputError: several GPUs and `gpu` picks none.
    """
    go = _plotly()
    drawn = [r for r in series.one_gpu(records, gpu) if r.has(metric) and isinstance(r.case.get(x), int | float)]
    figure = _figure(title or metric, drawn, height=480)
    lines: dict[str, list[Record]] = {}
    for record in drawn:
        lines.setdefault(record.impl if by == "impl" else str(record.case.get(by, "")), []).append(record)
    for name, members in lines.items():
        members.sort(key=lambda r: float(r.case[x]))
        line = go.Scatter(
            x=[r.case[x] for r in members],
            y=[r.value(metric) for r in members],
            name=series.label(name),
            mode="lines+markers",
            hovertemplate=f"{x} %{{x:,}}: %{{y:.4g}} {members[0].unit}<extra></extra>",
        )
        figure.add_trace(line)
    for name, value in (marks or {}).items():
        figure.add_hline(y=value, line={"dash": "dot", "width": 1, "color": "#5b6673"}, annotation_text=name)
    unit = drawn[0].unit if drawn else ""
    figure.update_xaxes(type="log", title_text=x.replace("_", " "))
    figure.update_yaxes(type="log", title_text=f"{metric} {unit}".strip())
    return _note_if_empty(figure, not drawn)


def roofline(
    records: Iterable[Record],
    *,
    profile: Profile | str | None = None,
    dtypes: Sequence[str] = (),
    gpu: str | None = None,
    ceilings: Ceilings | None = None,
    title: str = "Roofline",
) -> go.Figure:
    """Records as points under the roofs of their GPU: TFLOP/s against FLOP per byte, log-log, one roof per dtype.

    The datasheet's roofs are drawn, and beside them, dashed, those that were measured, where they are on record.

    Args:
        records: timed records with flops and compulsory bytes; others are left out.
        profile: the GPU whose roofs are drawn; by default the one that the records name.
        dtypes: roofs to draw beside those that the records need.
        ceilings: measured ones to draw; by default those on record for that GPU.

    Raises:
        InvalidInputError: several GPUs, or a GPU without a profile and none given.
    """
    from gpu_accel.hardware import Roofline, measured_ceilings
    from gpu_accel.hardware import profile as find

    go = _plotly()
    needed = [
        r for r in series.one_gpu(records, gpu) if r.kind == "measured" and r.has("tflops") and r.work.get("bytes")
    ]
    chosen = find(profile) if isinstance(profile, str) else profile or _profile_of(needed)
    figure = _figure(f"{title}, {chosen.title}" if chosen else title, needed, height=520)
    if chosen is None:
        return _note_if_empty(figure, True)
    roof = Roofline(chosen)
    used = list(dict.fromkeys([*dtypes, *(str(r.case.get("dtype")) for r in needed)])) or ["bf16"]
    at = {id(r): r.work["flops"] / r.work["bytes"] for r in needed}
    left = min([8.0, *(x / 2 for x in at.values())])
    right = max([8 * roof.ridge(dtype) for dtype in used] + [2 * x for x in at.values()])
    for peak in sorted({chosen.peak(dtype) for dtype in used}):
        names = [dtype for dtype in used if chosen.peak(dtype) == peak]
        corners = [left, roof.ridge(names[0]), right]
        line = go.Scatter(
            x=corners,
            y=[roof.attainable(x, names[0]) for x in corners],
            name=f"roof {'/'.join(names)}: {peak:g} TFLOP/s, {chosen.bandwidth_gbs:g} GB/s",
            mode="lines",
            line={"color": "#5b6673", "width": 2, "dash": "solid" if peak == max(map(chosen.peak, used)) else "dot"},
            hovertemplate="%{y:.4g} TFLOP/s at most<extra></extra>",
        )
        figure.add_trace(line)
    best = Roofline(chosen, ceilings=ceilings or measured_ceilings(chosen))
    for dtype in [one for one in used if best.basis(one) == ("measured", "measured")]:
        corners = [left, best.ridge(dtype), max(right, best.ridge(dtype))]
        line = go.Scatter(
            x=corners,
            y=[best.attainable(x, dtype) for x in corners],
            name=f"measured roof {dtype}: {best.peak(dtype):.4g} TFLOP/s, {best.bandwidth_gbs:.4g} GB/s",
            mode="lines",
            line={"color": "#5b6673", "width": 1.5, "dash": "dash"},
            hovertemplate="%{y:.4g} TFLOP/s measured<extra></extra>",
        )
        figure.add_trace(line)
    impls = series.order(r.impl for r in needed)
    for impl in impls:
        mine = [r for r in needed if r.impl == impl]
        shares = [
            roof.fraction(r.value("ms"), r.work["flops"], r.work["bytes"], str(r.case.get("dtype"))) for r in mine
        ]
        points = go.Scatter(
            x=[at[id(r)] for r in mine],
            y=[r.value("tflops") for r in mine],
            name=series.label(impl),
            mode="markers",
            marker={
                "color": series.colour(impl, impls)[0],
                "symbol": PLOTLY_SYMBOLS[series.symbol(impl, impls)],
                "size": 9,
                "line": {"width": 1, "color": "#ffffff"},
            },
            customdata=[f"{hover(r)}<br>{share:.0%} of the roof" for r, share in zip(mine, shares, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
        )
        figure.add_trace(points)
    figure.update_xaxes(type="log", title_text="FLOP per byte of compulsory traffic", dtick=1)
    figure.update_yaxes(type="log", title_text="TFLOP/s", dtick=1)
    return figure


def _profile_of(records: Sequence[Record]) -> Profile | None:
    """The profile of the one GPU that the records name, None without records."""
    from gpu_accel.hardware import profiles

    names = series.gpus(records)
    if not names:
        return None
    known = {device: profile for profile in profiles() for device in profile.device_names}
    if names[0] not in known:
        raise InvalidInputError(f"no hardware profile describes {names[0]}; choose one with profile=")
    return known[names[0]]


def word_group(word: str) -> str:
    """The colour group of a verdict word: `within 7%` -> `within`, `not measured (why)` -> `not measured`."""
    for group in WORD_COLOURS:
        if word.startswith(group):
            return group
    raise InvalidInputError(f"{word!r} is not a verdict word")


def word_label(group: str) -> str:
    """A colour group as legends and headings name it."""
    from gpu_accel.workbench.claims import WITHIN

    return WITHIN if group == "within" else group


def claim_group(claim: Claim) -> str:
    """Where a claim comes from, coarsely: a figure with all its panels, the text, or an earlier document of ours."""
    if claim.figure:
        numbered = re.match(r"(fig|table)\D*(\d+)", claim.figure)
        return f"{'Figure' if numbered[1] == 'fig' else 'Table'} {numbered[2]}" if numbered else claim.where
    if claim.source == "seed":
        return "earlier documents of this project"
    return "the text, against its own figures" if claim.internal else "the text"


def claims_overview(verdicts: Iterable[Verdict], *, title: str = "Claims") -> go.Figure:
    """Stacked bars: how many claims of each part of the paper (its text, each figure) got which verdict."""
    go = _plotly()
    verdicts = list(verdicts)
    figure = _figure(title, [r for v in verdicts for r in v.records if r.kind != "quoted"])
    places = list(dict.fromkeys(claim_group(v.claim) for v in verdicts))
    for group, colour in WORD_COLOURS.items():
        found = Counter(claim_group(v.claim) for v in verdicts if word_group(v.word) == group)
        if found:
            bar = go.Bar(
                y=places,
                x=[found[place] for place in places],
                name=word_label(group),
                orientation="h",
                marker_color=colour,
                hovertemplate="%{y}: %{x}<extra>%{fullData.name}</extra>",
            )
            figure.add_trace(bar)
    figure.update_layout(barmode="stack", height=230 + 30 * max(3, len(places)), bargap=0.35)
    figure.update_layout(legend={"y": 1.02, "yanchor": "bottom", "traceorder": "normal"}, margin_t=124)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title_text="claims")
    return _note_if_empty(figure, not verdicts, "no claims")
