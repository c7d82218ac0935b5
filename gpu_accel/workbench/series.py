"""From records to what a figure draws: panels, lines and points, with the stamp that says where they come from.

Everything here is plain data without a drawing library, so the static SVG (`svg.py`), the interactive plots
(`plots.py`) and the reports (`report.py`) show the same numbers. Two rules are enforced in this one place: records of
different GPUs are never drawn together (`one_gpu`), and every figure carries a `Stamp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import InvalidInputError

if TYPE_CHECKING:
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.records import Record

KINDS = ("measured", "checked", "modelled", "quoted")
OURS = ("hopper", "blackwell", "portable")

# Legend text and the (light, dark) colours of an implementation; both colours have contrast >= 3 on their background.
LABELS = {
    "hopper": "gpu-accel, Gluon",
    "blackwell": "gpu-accel, Gluon (Blackwell)",
    "portable": "gpu-accel, plain Triton",
    "reference": "reference",
    "sdpa-flash": "SDPA, FlashAttention-2",
    "sdpa-cudnn": "SDPA, cuDNN",
    "sdpa-math": "SDPA, math",
    "flex": "FlexAttention",
    "flash-attn-4": "flash-attn-4 (CuTe)",
}
COLOURS = {
    "hopper": ("#c2410c", "#fb923c"),
    "blackwell": ("#a21caf", "#e879f9"),
    "portable": ("#1d4ed8", "#60a5fa"),
    "reference": ("#6b7280", "#9ca3af"),
    "sdpa-flash": ("#a16207", "#facc15"),
    "sdpa-cudnn": ("#047857", "#34d399"),
    "sdpa-math": ("#6b7280", "#9ca3af"),
    "flex": ("#7c3aed", "#c4b5fd"),
    "flash-attn-4": ("#be185d", "#f9a8d4"),
}
SPARE_COLOURS = (("#0e7490", "#22d3ee"), ("#9f1239", "#fda4af"), ("#4d7c0f", "#a3e635"), ("#5b21b6", "#a78bfa"))
SYMBOLS = ("square", "diamond", "triangle", "cross")
SIXTEEN_BIT = ("bf16", "fp16")
PRECISION_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "e4m3"}


def label(impl: str) -> str:
    """The name of an implementation as a reader sees it; unknown names stay as they are."""
    return LABELS.get(impl, impl)


def order(impls: Iterable[str]) -> list[str]:
    """Distinct implementations: ours first, then the known peers in a fixed order, then the rest by name."""
    known = list(LABELS)
    return sorted(set(impls), key=lambda name: (known.index(name) if name in known else len(known), name))


def colour(impl: str, impls: Sequence[str] = ()) -> tuple[str, str]:
    """(light, dark) colour of `impl`; one that is not in the table takes a spare by its place among `impls`."""
    if impl in COLOURS:
        return COLOURS[impl]
    unknown = [name for name in impls if name not in COLOURS]
    return SPARE_COLOURS[unknown.index(impl) % len(SPARE_COLOURS) if impl in unknown else 0]


def symbol(impl: str, impls: Sequence[str]) -> str:
    """The marker: a circle for ours, and for peers one each, so that lines differ without colour too."""
    if impl in OURS:
        return "circle"
    peers = [name for name in impls if name not in OURS]
    return SYMBOLS[peers.index(impl) % len(SYMBOLS)]


def gpu_of(record: Record) -> str:
    """The GPU a record was taken on; "" for a CPU check or a quoted number."""
    return str(record.env.get("gpu") or "")


def gpus(records: Iterable[Record]) -> list[str]:
    """The GPUs that have measured records, by name."""
    return sorted({gpu_of(r) for r in records if r.kind == "measured" and gpu_of(r)})


def one_gpu(records: Iterable[Record], gpu: str | None = None) -> list[Record]:
    """The records of one GPU together with those that belong to none (checked, modelled, quoted).

    Raises:
        InvalidInputError: several GPUs have measured records and `gpu` picks none of them, or more than one.
    """
    records = list(records)
    names = gpus(records)
    if gpu is None:
        if len(names) > 1:
            raise InvalidInputError(f"records of {len(names)} GPUs ({', '.join(names)}); choose one with gpu=")
        return records
    matching = [name for name in names if name == gpu] or [name for name in names if gpu.lower() in name.lower()]
    if names and len(matching) != 1:
        raise InvalidInputError(
            f"gpu={gpu!r} matches {matching or 'none'} of the GPUs with records: {', '.join(names)}"
        )
    return [r for r in records if r.kind != "measured" or gpu_of(r) in matching]


def select(records: Iterable[Record], **where: Any) -> list[Record]:
    """Records whose field or case key equals the given value; a tuple, list or set means "one of"; None means "any".

    `precision="fp8"` is understood as `dtype="e4m3"`.
    """
    if where.get("precision") is not None:
        where["dtype"] = PRECISION_DTYPES.get(where["precision"], where["precision"])
    where.pop("precision", None)
    tests = [(key, value) for key, value in where.items() if value is not None]

    def keep(record: Record) -> bool:
        for key, value in tests:
            have = getattr(record, key) if hasattr(record, key) else record.case.get(key)
            if have not in value if isinstance(value, tuple | list | set | frozenset) else have != value:
                return False
        return True

    return [r for r in records if keep(r)]


def largest(records: Iterable[Record], metric: str) -> list[Record]:
    """Of each input, the records of `metric` at its largest shape: what can stand side by side."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.has(metric):
            shape = tuple(record.case.get(key, 0) for key in ("seqlen_q", "head_dim", "causal"))
            found.setdefault((record.case.get("input"), shape), []).append(record)
    best = {data: max(shape for other, shape in found if other == data) for data, _ in found}
    return [r for (data, shape), members in found.items() if best[data] == shape for r in members]


def require_one(records: Iterable[Record], *keys: str) -> None:
    """Raise InvalidInputError when the records differ in one of these case keys, so no line joins them silently."""
    records = list(records)
    for key in keys:
        values = sorted({str(r.case.get(key)) for r in records})
        if len(values) > 1:
            raise InvalidInputError(f"records mix {key} {', '.join(values)}; select one of them (series.select)")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What every figure and table says about its numbers."""

    kinds: tuple[str, ...]
    gpus: tuple[str, ...]
    first: str
    last: str
    commits: tuple[str, ...]
    dirty: bool
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line, as in `measured on NVIDIA H100 80GB HBM3, 2026-11-27, commit 1a2b3c4`."""
        parts = []
        if self.gpus:
            parts.append(f"measured on {' and '.join(self.gpus)}")
        rest = [kind for kind in self.kinds if kind not in ("measured", "quoted")]
        if "measured" in self.kinds and not self.gpus:
            rest.insert(0, "measured (GPU not recorded)")
        parts += [f"{kind} on CPU, no timings" if kind == "checked" else kind for kind in rest]
        if self.first:
            parts.append(self.first if self.first == self.last else f"{self.first} to {self.last}")
        if len(self.commits) == 1:
            parts.append(f"commit {self.commits[0]}" + (" + local changes" if self.dirty else ""))
        elif self.commits:
            parts.append(f"{len(self.commits)} commits")
        if self.sources:
            parts.append(f"quoted from {' and '.join(self.sources)}")
        return ", ".join(parts) or "nothing measured yet"

    @property
    def sentence(self) -> str:
        """The same with a capital, for where it stands alone."""
        return _capital(self.text)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def stamp(records: Iterable[Record], quotes: Iterable[Claim] = ()) -> Stamp:
    """The stamp of these records and quoted claims."""
    records, quotes = list(records), list(quotes)
    dates = sorted(r.time[:10] for r in records if r.time and r.kind != "quoted")
    kinds = {r.kind for r in records} | ({"quoted"} if quotes else set())
    sources = {r.source for r in records if r.kind == "quoted" and r.source} | {c.source for c in quotes if c.source}
    return Stamp(
        kinds=tuple(kind for kind in KINDS if kind in kinds),
        gpus=tuple(gpus(records)),
        first=dates[0] if dates else "",
        last=dates[-1] if dates else "",
        commits=tuple(sorted({r.commit[:7] for r in records if r.commit and r.kind != "quoted"})),
        dirty=any(r.dirty for r in records),
        sources=tuple(sorted(sources)),
    )


def interval(record: Record, metric: str) -> tuple[float, float, float] | None:
    """(median, low, high) of a stored or derived metric over p20..p80, or None when the record does not have it.

    Without percentiles low and high equal the median.
    """
    if not record.has(metric):
        return None
    median = record.value(metric)
    low, high = record.interval(metric) or (median, median)
    return median, low, high


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a line: x, the median and its p20..p80, and the record behind it (None when quoted from a claim)."""

    x: float
    y: float
    low: float
    high: float
    record: Record | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a panel. `kind` says whether it was measured here or quoted."""

    impl: str
    label: str
    kind: str
    points: tuple[Point, ...]

    @property
    def quoted(self) -> bool:
        return self.kind == "quoted"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small chart: all lines that share `row` and `column`, e.g. causal=True and head_dim=128."""

    row: Any
    column: Any
    lines: tuple[Line, ...]
    note: str = ""  # what the chart lacks that its neighbours have

    @property
    def title(self) -> str:
        return f"head dim {self.column}, {'causal' if self.row else 'full'}"


def _quoted_line(claims: Sequence[Claim], *, x: str, case: dict[str, Any]) -> Line | None:
    """The paper's own curve for one panel from the claims that quote its figure."""
    points, dtypes, labels = {}, set(), set()
    for claim in claims:
        if x in claim.cell and all(claim.cell.get(key) == value for key, value in case.items()):
            at, value = float(claim.cell[x]), claim.numbers[0]
            points[at] = Point(x=at, y=value, low=value, high=value, note=f"{claim.where} ({claim.source})")
            dtypes.add(_quote_dtype(claim))
            labels.add(claim.label)
    if not points:
        return None
    names = "/".join(sorted(dtypes - {""}))
    text = f"{'/'.join(sorted(labels))} in the paper{f', {names}' if names else ''} (quoted)"
    return Line(impl="quoted", label=text, kind="quoted", points=tuple(points[key] for key in sorted(points)))


def _quote_dtype(claim: Claim) -> str:
    return str(claim.cell.get("dtype") or claim.conditions.get("dtype") or "")


def paper_curve(claims: Iterable[Claim], *, pass_: str = "forward", dtype: str | None = None) -> list[Claim]:
    """The figure cells that quote the paper's own TFLOP/s for one pass and precision.

    A 16-bit curve stands for bf16 and fp16 alike (papers label the same plot as either); fp8 never stands for 16 bit.
    """
    found = []
    for claim in claims:
        measure, have = claim.measure, _quote_dtype(claim)
        if (
            not claim.figure
            or measure is None
            or claim.unit != "tflops"
            or not {"head_dim", "causal"} <= set(claim.cell)
        ):
            continue
        if measure.impl != "ours" or claim.source == "seed":  # rows of its competitors name who stands for them here
            continue
        if claim.cell.get("pass", measure.experiment) != pass_:
            continue
        if dtype and have and have != dtype and not (have in SIXTEEN_BIT and dtype in SIXTEEN_BIT):
            continue
        found.append(claim)
    return found


def sweep(
    records: Iterable[Record],
    *,
    metric: str = "tflops",
    x: str = "seqlen_q",
    row: str = "causal",
    column: str = "head_dim",
    quotes: Iterable[Claim] = (),
) -> list[Panel]:
    """Panels of `metric` against `x`, one per (row, column), ordered by row then column.

    Records of other metrics and checked records are left out. Of several records for the same point the newest counts.

    Raises:
        InvalidInputError: several GPUs, passes, dtypes or inputs that would share a line.
    """
    records = [r for r in one_gpu(records) if r.kind != "checked" and interval(r, metric)]
    records = [r for r in records if type(r.case.get(x)) in (int, float)]
    quotes = list(quotes)
    require_one(records, "pass", "dtype", "input")
    keys = {(r.case.get(row), r.case.get(column)) for r in records}
    keys |= {(c.cell.get(row), c.cell.get(column)) for c in quotes}
    ours = [impl for impl in order(r.impl for r in records) if impl in OURS]
    panels = []
    for row_value, column_value in sorted(keys, key=lambda k: (in_order(k[0]), in_order(k[1]))):
        mine = [r for r in records if (r.case.get(row), r.case.get(column)) == (row_value, column_value)]
        lines = []
        for impl in order(r.impl for r in mine):
            newest: dict[float, Record] = {}
            for record in sorted((r for r in mine if r.impl == impl), key=lambda r: r.time):
                newest[float(record.case[x])] = record
            points = tuple(
                Point(x=value, y=ends[0], low=ends[1], high=ends[2], record=record, note=record.note)
                for value, record in sorted(newest.items())
                if (ends := interval(record, metric))
            )
            kind = next(iter(newest.values())).kind
            lines.append(Line(impl=impl, label=label(impl), kind=kind, points=points))
        quoted = _quoted_line(quotes, x=x, case={row: row_value, column: column_value})
        # Of ours a neighbour may have the fast kernel and this one only the plain: said, or it reads as a slow result.
        missing = [impl for impl in ours if mine and impl not in {line.impl for line in lines}]
        note = f"no {' or '.join(label(impl).split(', ')[-1] for impl in missing)} result" if missing else ""
        drawn = (*lines, quoted) if quoted else tuple(lines)
        panels.append(Panel(row=row_value, column=column_value, lines=drawn, note=note))
    return panels


def in_order(size: object) -> tuple[int, float, str]:
    """A key to sort by: numbers as they count, then words, then nothing. A record of somebody else may hold any."""
    if isinstance(size, int | float):
        return 0, size, ""
    return (1, 0.0, size) if isinstance(size, str) else (2, 0.0, "")


def short(number: float | str) -> str:
    """512, 1k, 16k, 1M: powers of two as people write sequence lengths; what is no number as it is."""
    try:
        number = float(number)
    except ValueError:
        return str(number)
    if number >= 1 << 20 and number % (1 << 20) == 0:
        return f"{int(number) >> 20}M"
    if number >= 1024 and number % 1024 == 0:
        return f"{int(number) >> 10}k"
    return f"{number:g}"


def nice_step(top: float, count: int = 5) -> float:
    """A tick distance of 1, 2, 2.5 or 5 times a power of ten that gives about `count` ticks up to `top`."""
    if top <= 0:
        return 1.0
    raw = top / count
    power = 1.0
    while power * 10 <= raw:
        power *= 10
    while power > raw:
        power /= 10
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
