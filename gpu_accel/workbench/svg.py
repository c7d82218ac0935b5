"""The main figure as a static SVG, drawn with the standard library only, for READMEs and reports.

Small multiples: one chart per (causal, head_dim), TFLOP/s against sequence length, one line per implementation with its
p20 to p80 interval, and the paper's own curve dashed and named as quoted. The picture brings its own background and
follows the reader's light or dark preference, so it is legible wherever it is embedded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench import series
from gpu_accel.workbench.series import Line, Panel, Point

if TYPE_CHECKING:
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.records import Record

# name: (light, dark)
PALETTE = {
    "card": ("#ffffff", "#0d1117"),
    "edge": ("#d8dee6", "#30363d"),
    "text": ("#16202c", "#e6edf3"),
    "muted": ("#5b6673", "#9aa5b1"),
    "grid": ("#e9edf2", "#21262d"),
    "quoted": ("#16202c", "#e6edf3"),
}
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
PLOT_W, PLOT_H = 262, 168
LEFT, GAP_X, GAP_Y, MARGIN = 62, 26, 58, 24


def static_svg(
    records: Iterable[Record],
    *,
    quotes: Iterable[Claim] = (),
    gpu: str | None = None,
    title: str = "",
    metric: str = "tflops",
    unit: str = "TFLOP/s",
    theme: str = "auto",
    name: str = "figure",
) -> str:
    """Draw records of one experiment as SVG text.

    Args:
        records: records of one pass, dtype and input (see `series.select`); others raise.
        quotes: claims that quote the paper's curve, from `series.paper_curve`.
        gpu: which GPU, where records of several are given.
        title: heading; the stamp below it always says kind, GPU and date.
        metric: "tflops", "gbps" or "ms".
        unit: its name on the axis.
        theme: "auto" follows the reader; "light" and "dark" fix it.
        name: id of the drawing and of its style rules; give each its own where several share a page.

    Raises:
        InvalidInputError: nothing to draw, or records that must not share a figure.
    """
    if theme not in ("auto", "light", "dark"):
        raise InvalidInputError(f"theme is {theme!r}; choose auto, light or dark")
    records, quotes = series.one_gpu(records, gpu), list(quotes)
    panels = series.sweep(records, metric=metric, quotes=quotes)
    if not panels:
        raise InvalidInputError(f"no record has {metric!r} and no figure is quoted: there is nothing to draw")
    drawn = [p.record for panel in panels for line in panel.lines for p in line.points if p.record]
    impls = series.order(r.impl for r in drawn)
    names = {line.impl: line.label for panel in panels for line in panel.lines}
    columns = sorted({p.column for p in panels}, key=series.in_order)
    rows = sorted({p.row for p in panels}, key=series.in_order)

    width = LEFT + len(columns) * PLOT_W + (len(columns) - 1) * GAP_X + MARGIN
    legend, legend_height = _legend([*impls, *(["quoted"] if "quoted" in names else [])], names, impls, width)
    top = 74 + legend_height + 38
    height = top + len(rows) * PLOT_H + (len(rows) - 1) * GAP_Y + 76
    peak = max(point.high for panel in panels for line in panel.lines for point in line.points)
    step, ceiling = series.nice_step(peak, 4), peak * 1.13  # headroom for the number above the best point

    heading = title or "Throughput"
    stamp = series.stamp(drawn, quotes).sentence
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'id="{name}" role="img" aria-labelledby="{name}-title {name}-description" font-family="{FONT}">',
        f'<title id="{name}-title">{escape(heading)}</title>',
        f'<desc id="{name}-description">{escape(_description(panels, unit, stamp))}</desc>',
        f"<style>\n{_style(impls, theme, name)}\n</style>",
        f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="text" x="{MARGIN}" y="36" font-size="18" font-weight="650">{escape(heading)}</text>',
        f'<text class="muted" x="{MARGIN}" y="57" font-size="12.5">{escape(stamp)}</text>',
        *legend,
    ]
    for panel in panels:
        column, row = columns.index(panel.column), rows.index(panel.row)
        x0, y0 = LEFT + column * (PLOT_W + GAP_X), top + row * (PLOT_H + GAP_Y)
        parts += _panel(
            panel, impls, (x0, y0), (ceiling, step), first=column == 0, last=row == len(rows) - 1, unit=unit
        )
    bars = "whiskers: 20th to 80th percentile; number: best of ours" if drawn else "quoted numbers only"
    parts.append(f'<text class="muted" x="{MARGIN}" y="{height - 16}" font-size="11">{bars}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style(impls: Sequence[str], theme: str, name: str) -> str:
    def rules(shade: int) -> str:
        lines = [
            f".card{{fill:{PALETTE['card'][shade]};stroke:{PALETTE['edge'][shade]}}}",
            f".text{{fill:{PALETTE['text'][shade]}}} .muted{{fill:{PALETTE['muted'][shade]}}}",
            f".grid{{stroke:{PALETTE['grid'][shade]}}} .axis{{stroke:{PALETTE['muted'][shade]}}}",
            f".halo{{stroke:{PALETTE['card'][shade]}}}",
        ]
        for index, impl in enumerate([*impls, "quoted"]):
            tone = PALETTE["quoted"][shade] if impl == "quoted" else series.colour(impl, impls)[shade]
            lines.append(f".s{index}{{stroke:{tone}}} .f{index}{{fill:{tone}}}")
        # Style rules are global in a page that embeds the drawing, hence the id in front of each.
        return "\n".join(lines).replace(".", f"#{name} .")

    if theme != "auto":
        return rules(0 if theme == "light" else 1)
    return f"{rules(0)}\n@media (prefers-color-scheme: dark) {{\n{rules(1)}\n}}"


def _legend(shown: Sequence[str], names: dict[str, str], impls: Sequence[str], width: int) -> tuple[list[str], int]:
    """Legend entries in as many lines as needed, and their height."""
    parts: list[str] = []
    x, y = float(MARGIN), 84
    for impl in shown:
        needed = 50 + _text_width(names[impl])
        if x > MARGIN and x + needed > width - MARGIN:
            x, y = MARGIN, y + 21
        index = impls.index(impl) if impl in impls else len(impls)
        dash = ' stroke-dasharray="5 4"' if impl == "quoted" else ""
        parts.append(
            f'<line class="s{index}" x1="{x:.1f}" y1="{y - 4}" x2="{x + 24:.1f}" y2="{y - 4}" '
            f'stroke-width="{_weight(impl)}"{dash}/>'
        )
        if impl != "quoted":
            parts.append(_marker(series.symbol(impl, impls), x + 12, y - 4, index))
        parts.append(f'<text class="text" x="{x + 31:.1f}" y="{y}" font-size="12.5">{escape(names[impl])}</text>')
        x += needed
    return parts, y - 74


def _text_width(text: str) -> float:
    """About the width of 12.5 px text in pixels, for wide fonts, so that it may be too large but not too small."""
    return sum(4.2 if c in "iljt ,.()-" else 9.2 if c.isupper() else 7.7 for c in text)


def _weight(impl: str) -> float:
    return 2.6 if impl in series.OURS else 1.4


def _panel(
    panel: Panel,
    impls: Sequence[str],
    corner: tuple[float, float],
    scale: tuple[float, float],
    *,
    first: bool,
    last: bool,
    unit: str,
) -> list[str]:
    (x0, y0), (ceiling, step) = corner, scale
    xs = sorted({point.x for line in panel.lines for point in line.points})
    inner = PLOT_W - 28

    def at(point: Point) -> float:
        return x0 + 14 + (inner * xs.index(point.x) / (len(xs) - 1) if len(xs) > 1 else inner / 2)

    def up(value: float) -> float:
        return y0 + PLOT_H * (1 - value / ceiling)

    parts = [
        f"<!-- {escape(panel.title)} -->",
        f'<text class="text" x="{x0}" y="{y0 - 10}" font-size="13" font-weight="600">{escape(panel.title)}</text>',
    ]
    if panel.note:
        parts.append(
            f'<text class="muted" x="{x0 + PLOT_W}" y="{y0 - 10}" font-size="11.5" font-style="italic" '
            f'text-anchor="end">{escape(panel.note)}</text>'
        )
    for tick in range(int(ceiling / step) + 1):
        y = up(tick * step)
        kind = "axis" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x0}" y1="{y:.1f}" x2="{x0 + PLOT_W}" y2="{y:.1f}"/>')
        if first:
            parts.append(
                f'<text class="muted" x="{x0 - 8}" y="{y + 4:.1f}" font-size="11" text-anchor="end">'
                f"{tick * step:g}</text>"
            )
    if first:
        parts.append(
            f'<text class="muted" font-size="11.5" text-anchor="middle" '
            f'transform="translate({x0 - 42},{y0 + PLOT_H / 2:.0f}) rotate(-90)">{escape(unit)}</text>'
        )
    for index, value in enumerate(xs):
        x = x0 + 14 + (inner * index / (len(xs) - 1) if len(xs) > 1 else inner / 2)
        parts.append(
            f'<text class="muted" x="{x:.1f}" y="{y0 + PLOT_H + 17}" font-size="11" text-anchor="middle">'
            f"{series.short(value)}</text>"
        )
    if last:
        parts.append(
            f'<text class="muted" x="{x0 + PLOT_W / 2}" y="{y0 + PLOT_H + 35}" font-size="11.5" text-anchor="middle">'
            "sequence length</text>"
        )
    # Peers first and ours last, so that our line lies on top; the quoted curve lies below all of them.
    for line in sorted(panel.lines, key=lambda li: (not li.quoted, li.impl in series.OURS)):
        parts += _line(line, impls, at, up)
    ours = [(point, line) for line in panel.lines if line.impl in series.OURS for point in line.points]
    if ours:
        best, line = max(ours, key=lambda pair: pair[0].y)
        y = up(best.high) - 9
        parts.append(
            f'<text class="f{impls.index(line.impl)} halo" x="{at(best):.1f}" y="{y:.1f}" font-size="12" '
            f'font-weight="700" text-anchor="middle" stroke-width="3" paint-order="stroke">{best.y:.0f}</text>'
        )
    return parts


def _line(line: Line, impls: Sequence[str], at, up) -> list[str]:
    index = impls.index(line.impl) if line.impl in impls else len(impls)
    path = " ".join(f"{at(p):.1f},{up(p.y):.1f}" for p in line.points)
    dash = ' stroke-dasharray="5 4"' if line.quoted else ""
    parts = []
    if len(line.points) > 1:
        parts.append(
            f'<polyline class="s{index}" points="{path}" fill="none" stroke-width="{_weight(line.impl)}" '
            f'stroke-linejoin="round"{dash}/>'
        )
    for point in line.points:
        x, y = at(point), up(point.y)
        if line.quoted:
            if len(line.points) == 1:
                parts.append(
                    f'<line class="s{index}" x1="{x - 8:.1f}" y1="{y:.1f}" x2="{x + 8:.1f}" y2="{y:.1f}"{dash}/>'
                )
            continue
        low, high = up(point.low), up(point.high)
        if low - high > 1:
            parts.append(
                f'<path class="s{index}" fill="none" stroke-width="1.2" '
                f'd="M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"/>'
            )
        tip = f"{line.label}, {series.short(point.x)}: {point.y:.1f} ({point.low:.1f} to {point.high:.1f})"
        parts.append(_marker(series.symbol(line.impl, impls), x, y, index, tip))
    return parts


def _marker(shape: str, x: float, y: float, index: int, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    head = f'class="f{index} halo" stroke-width="1"'
    if shape == "circle":
        return f'<circle {head} cx="{x:.1f}" cy="{y:.1f}" r="4">{inside}</circle>'
    outlines: dict[str, list[tuple[float, float]]] = {
        "square": [(-3, -3), (3, -3), (3, 3), (-3, 3)],
        "diamond": [(0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)],
        "triangle": [(0, -4.2), (4, 3), (-4, 3)],
        "cross": [(-4, -1.3), (-1.3, -1.3), (-1.3, -4), (1.3, -4), (1.3, -1.3), (4, -1.3),
                  (4, 1.3), (1.3, 1.3), (1.3, 4), (-1.3, 4), (-1.3, 1.3), (-4, 1.3)],
    }  # fmt: skip
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in outlines[shape])
    return f'<polygon {head} points="{points}">{inside}</polygon>'


def _description(panels: Sequence[Panel], unit: str, stamp: str) -> str:
    """The figure in words, for screen readers: the best of each line in each chart."""
    sentences = []
    for panel in panels:
        best = [f"{line.label} {max(p.y for p in line.points):.0f}" for line in panel.lines]
        note = f"; {panel.note}" if panel.note else ""
        sentences.append(f"{panel.title}: at most {', '.join(best)} {unit}{note}.")
    return f"{stamp}. " + " ".join(sentences)
