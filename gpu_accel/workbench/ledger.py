"""The claims of a paper as data: `claims.toml`, read strictly.

    [[claim]]                                  one statement
    id = "fwd-vs-fa2"
    where = "abstract, section 4.1"
    statement = "Forward is 1.5 to 2.0 times as fast as FlashAttention-2"       # in our own words
    source = "arXiv:2407.08608v2"              # or "seed": an earlier document of this project; or a URL
    kind = "measured"                          # or "bound" (a limit that follows from theory), or "qualitative"
    value = [1.5, 2.0]                         # a number, or [low, high]
    unit = "x"
    direction = "between"                      # at_least | at_most | about (default for a number) | between
    conditions = {dtype = "fp16", gpu = "H100 SXM", clocks = "locked 1830 MHz", baseline_version = "2.5.8"}
    needs = ["h100-sxm"]                       # GPUs that can settle it; empty: any, or none at all for numerics
    measure = {experiment = "forward", impl = "ours", ratio_to = "sdpa-flash", aggregate = "range",
               case = {head_dim = [64, 128, 256], causal = [false, true]}, where = "seqlen_q >= 1024"}
    contradicts = ["fig5a"]

`measure` says which records settle the claim; a list in `case` means that every value must be covered. `over` and
`minus` compare two cases of one implementation: `over = {data = "zeros"}` divides the value by that of the case with
these keys changed, `minus` subtracts that. Instead of `measure`
there may be `unmeasurable = "why"`; a claim of the seed may have neither, and then no source supports it. With
`internal = true` the paper's own figures settle it: `measure = {figure = "fig5", impl = "FA3", ratio_to = "FA2", ...}`,
where impl and ratio_to are labels of rows. Qualitative claims name a predicate in place of a value:
`measure = {predicate = "faster", impl = "ours", than = "sdpa-cudnn", ...}`, also "lower" (of a metric) and "correct".
A number that was taken on another card than those at hand may say by what it is carried over:
`scale = {from = "h800-pcie", by = "fp16"}` multiplies it by (value of our card) / (value of theirs), where `by` is a
peak or a quantity of their hardware profiles, or "sm_clock" for SMs x highest clock. Counts of cycles need none of it.

`[[figure]]` is a table of claims, one per cell; see `gpu_accel.workbench.figures`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import GpuAccelError, UnsupportedError, shown
from gpu_accel.workbench.invariants import Scalar
from gpu_accel.workbench.records import gpu_slug
from gpu_accel.workbench.strict_toml import Table, read_toml

if TYPE_CHECKING:
    from gpu_accel.hardware.catalog import Profile

KINDS = ("measured", "bound", "qualitative")
DIRECTIONS = ("at_least", "at_most", "about", "between")
AGGREGATES = ("single", "max", "min", "median", "range")
PREDICATES = ("faster", "lower", "correct")
# The metric that a unit means; None: the claim must name its metric.
UNITS = {
    "tflops": "tflops",
    "gbps": "gbps",
    "ms": "ms",
    "x": "time",
    "1": None,
    "bytes": None,
    "tokens/s": None,
    "J": None,
    "W": None,
    "TFLOP/J": None,
    "%": None,
    "bits": None,
    "clk": None,
    "B/clk": None,
    "B/clk/SM": None,
    "instr/clk/SM": None,
    "flop/clk/SM": None,
}
_RATES_PER_CYCLE = frozenset({"B/clk", "B/clk/SM", "instr/clk/SM", "flop/clk/SM"})
# Units, and metrics without one.
_HIGHER_IS_BETTER = frozenset({"tflops", "gbps", "tokens/s", "cosine", "sqnr", "TFLOP/J"}) | _RATES_PER_CYCLE
SOURCES = ("seed", "arXiv:", "doi:", "https://")

_ID = re.compile(r"[a-z0-9][a-z0-9._-]*")
_TERM = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([\w.+-]+)\s*")
_WORDS: dict[str, Scalar] = {"true": True, "false": False}


@dataclass(frozen=True)
class Term:
    """One comparison of `where`: a key of the case, an operator, a value."""

    key: str
    operator: str
    value: Scalar

    def holds(self, case: Mapping[str, Any]) -> bool:
        """Whether a case fulfils it; one that lacks the key does not."""
        have = case.get(self.key)
        if self.operator in ("==", "!="):
            return have is not None and same(have, self.value) == (self.operator == "==")
        if isinstance(have, bool | str) or not isinstance(have, int | float):
            return False
        wanted = float(self.value)
        return {">=": have >= wanted, "<=": have <= wanted, ">": have > wanted, "<": have < wanted}[self.operator]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Which records (or which cells of the paper's figures) settle a claim, and how they become one value."""

    experiment: str = ""
    impl: str = ""
    metric: str = ""
    case: dict[str, Any] = field(default_factory=dict)  # scalars, or lists of which every value must be covered
    where: tuple[Term, ...] = ()
    ratio_to: str = ""  # the value is how many times better impl is than this one
    over: dict[str, Any] = field(default_factory=dict)  # the value is divided by that of the case so changed,
    minus: dict[str, Any] = field(default_factory=dict)  # or that one is subtracted
    aggregate: str = "single"
    predicate: str = ""
    than: str = ""
    figure: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """A field by name, as of the table it was read from."""
        return getattr(self, name, default)

    @property
    def other(self) -> str:
        """The implementation compared with, if any."""
        return self.ratio_to or self.than

    def covers(self, case: Mapping[str, Any]) -> bool:
        """Whether a case is one of those that the claim is about."""
        for key, wanted in self.case.items():
            have = case.get(key)
            if not (any(same(have, one) for one in wanted) if isinstance(wanted, list) else same(have, wanted)):
                return False
        return all(term.holds(case) for term in self.where)


@dataclass(frozen=True)
class Scale:
    """How a claimed number moves from the card it was taken on to another: in proportion to `by` of their profiles."""

    origin: str  # name of a hardware profile
    by: str  # a peak ("fp16"), a quantity ("memory_bandwidth", "sm_count"), or "sm_clock": SMs x highest clock

    def factor(self, sku: str) -> float:
        """(value of the card `sku`) / (value of the card of the claim).

        Raises InvalidInputError or UnsupportedError where a profile, or the quantity in it, is missing.
        """
        from gpu_accel.hardware import profile

        return _quantity(profile(gpu_slug(sku)), self.by) / _quantity(profile(self.origin), self.by)


SM_CLOCK = "sm_clock"


def _quantity(profile: Profile, by: str) -> float:
    from gpu_accel.hardware.catalog import SPEC_UNITS

    if by not in SPEC_UNITS and by != SM_CLOCK:
        return profile.peak(by)
    keys = ("sm_count", "boost_clock") if by == SM_CLOCK else (by,)
    product = 1.0
    for key in keys:
        value = profile.value(key)
        if value is None:
            raise UnsupportedError(f"the profile of {profile.title} has no {key} to scale by")
        product *= value
    return product


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim; see the module docstring for the meaning of its fields."""

    id: str
    where: str
    statement: str
    source: str
    kind: str = "measured"
    value: float | tuple[float, float] | None = None
    unit: str = ""
    direction: str = "about"
    tolerance: float = 0.05
    conditions: dict[str, Scalar] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    measure: Measure | None = None
    unmeasurable: str = ""
    internal: bool = False
    scale: Scale | None = None
    contradicts: tuple[str, ...] = ()
    note: str = ""
    figure: str = ""  # id of the figure that it is a cell of
    label: str = ""  # label of that cell's row
    experiment: str = ""  # what that cell belongs to,
    metric: str = ""  # what it is a value of,
    cell: dict[str, Scalar] = field(default_factory=dict)  # and where in the figure it lies
    cells: tuple[Claim, ...] = ()  # for an internal claim: every cell of the figures it names
    paper: str = ""
    alias: str = ""
    ours: tuple[str, ...] = ()
    one_precision: bool = False  # whether its experiment has no choice of precision,
    processes: bool = False  # and whether it takes a process a GPU

    @property
    def numbers(self) -> tuple[float, float]:
        """The value as (low, high), equal for a single number."""
        if self.value is None:
            raise ValueError(f"claim {self.id} has no value")
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)


def higher_is_better(metric: str, unit: str) -> bool:
    """Whether more of a metric is better: of rates and of likeness, not of times, errors and bytes."""
    return unit in _HIGHER_IS_BETTER or metric in _HIGHER_IS_BETTER


def same(a: object, b: object) -> bool:
    """Equality of two case values; 1 and true differ, 1 and 1.0 do not."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def load_claims(
    path: Path | str,
    *,
    paper: str = "",
    alias: str = "",
    ours: Sequence[str] = (),
    experiments: Sequence[str] = (),
    one_precision: Sequence[str] = (),
    processes: Sequence[str] = (),
) -> list[Claim]:
    """Read `claims.toml`: its claims in order, then one claim per cell of its figures.

    ``ours`` are the implementations among which impl = "ours" takes the best; ``experiments``, when given, are the only
    names that `measure.experiment` may have, ``one_precision`` those of them that have no choice of precision, and
    ``processes`` those that take a process a GPU.
    Raises InvalidInputError naming file, id and key for anything wrong.
    """
    from gpu_accel.workbench.figures import read_figure

    file = read_toml(Path(path))
    claims = [_read_claim(table, file.where) for table in file.tables("claim")]
    cells = []
    for table in file.tables("figure"):
        try:
            cells += read_figure(table, file.where)
        except OverflowError as error:
            table.fail(f"'values' must be finite numbers ({error})")
    file.end()
    for cell in cells:
        if not _is_number(cell.value):
            Table({}, f"{file.where}: {cell.id}").fail(f"'values' must be finite numbers, not {cell.value!r}")
    claims += cells
    figures = {cell.figure for cell in cells}
    known = figures | {claim.id for claim in claims}
    seen: set[str] = set()
    for claim in claims:
        entry = Table({}, f"{file.where}: {claim.id}")
        if claim.id in seen or claim.id in figures:
            entry.fail("this id is used twice")
        seen.add(claim.id)
        if missing := [other for other in claim.contradicts if other not in known]:
            entry.fail(f"contradicts names {missing[0]!r}, which is no claim and no figure of this file")
        if experiments and claim.measure and claim.measure.experiment and claim.measure.experiment not in experiments:
            entry.fail(f"measure: experiment {claim.measure.experiment!r} is none of {', '.join(experiments)}")
        if claim.measure and claim.measure.impl == "ours" and not claim.internal and not ours:
            entry.fail("measure: impl = 'ours', but the paper names no implementations of its own (ours = [...])")
    return [
        replace(
            claim,
            cells=_cells_of(claim, cells, file.where),
            paper=paper,
            alias=alias or paper,
            ours=tuple(ours),
            one_precision=claim.measure is not None and claim.measure.experiment in one_precision,
            processes=claim.measure is not None and claim.measure.experiment in processes,
        )
        for claim in claims
    ]


def _cells_of(claim: Claim, cells: list[Claim], file: str) -> tuple[Claim, ...]:
    if not claim.internal or claim.measure is None:
        return ()
    found: list[Claim] = []
    for name in claim.measure.figure:
        # "fig5" stands for all of its panels, "fig5a" to "fig5f"
        panels = [cell for cell in cells if cell.figure == name or re.fullmatch(re.escape(name) + "[a-z]", cell.figure)]
        if not panels:
            Table({}, f"{file}: {claim.id}").fail(f"measure: no figure is named {name!r}")
        found += panels
    labels = {cell.label for cell in found}
    for label in filter(None, (claim.measure.impl, claim.measure.other)):
        if label not in labels:
            Table({}, f"{file}: {claim.id}").fail(f"measure: no row is labelled {label!r}; there are {sorted(labels)}")
    return tuple(found)


def read_id(table: Table, file: str) -> str:
    """The id of an entry, which from then on stands in its messages."""
    name = table.text("id")
    if not _ID.fullmatch(name):
        table.fail(f"'id' must be lower case letters, digits and . _ -, not {name!r}")
    table.where = f"{file}: {name}"
    return name


def read_common(table: Table) -> dict[str, Any]:
    """What claims and figures share."""
    source = table.text("source")
    if not source.startswith(SOURCES):
        table.fail(f"'source' must be 'seed', arXiv:<id>, doi:<id> or an https address, not {source!r}")
    tolerance = table.number("tolerance", 0.05)
    if not 0 <= tolerance < 1:
        table.fail(f"'tolerance' is relative and lies between 0 and 1, not at {tolerance!r}")
    conditions = table.scalars("conditions")
    for key, value in conditions.items():
        if isinstance(value, int | float) and not math.isfinite(_as_float(value)):
            table.fail(f"conditions: {key!r} must be finite, not {shown(value)}")
    return {
        "where": table.text("where"),
        "source": source,
        "tolerance": tolerance,
        "conditions": conditions,
        "needs": tuple(gpu_slug(need) for need in table.texts("needs")),
        "contradicts": table.texts("contradicts"),
        "note": table.text("note", ""),
    }


def _read_claim(table: Table, file: str) -> Claim:
    fields: dict[str, Any] = {"id": read_id(table, file), **read_common(table)}
    fields["statement"] = table.text("statement")
    kind = fields["kind"] = table.text("kind", "measured", choices=KINDS)
    fields["internal"] = table.flag("internal")
    if kind == "qualitative":
        for key in ("value", "unit", "direction"):
            if key in table:
                table.fail(f"a qualitative claim has no {key!r}")
        unit = ""
    else:
        fields["value"] = _read_value(table)
        unit = fields["unit"] = table.text("unit", choices=tuple(UNITS))
        default = "between" if isinstance(fields["value"], tuple) else "about"
        fields["direction"] = table.text("direction", default, choices=DIRECTIONS)
        if (fields["direction"] == "between") != isinstance(fields["value"], tuple):
            table.fail("'direction' must be 'between' for a value [low, high], and only for it")
    fields["unmeasurable"] = table.text("unmeasurable", "")
    if "scale" in table:
        fields["scale"] = read_scale(table.table("scale"))
        if unit in ("", "x") or "measure" not in table or fields["internal"]:
            table.fail("'scale' is for a number that records of another card settle: 'measure', a unit, and not 'x'")
    if "measure" in table:
        fields["measure"] = _read_measure(table.table("measure"), unit=unit, internal=fields["internal"])
        if fields["measure"].aggregate == "range" and not isinstance(fields.get("value"), tuple):
            table.fail("measure: aggregate 'range' needs a value [low, high]")
    if ("measure" in fields) == bool(fields["unmeasurable"]) and ("measure" in fields or fields["source"] != "seed"):
        table.fail("give either 'measure' or 'unmeasurable' (why it cannot be measured)")
    if fields["internal"] and "measure" not in fields:
        table.fail("an internal claim needs 'measure' with 'figure'")
    table.end()
    return Claim(**fields)


def _read_value(table: Table) -> float | tuple[float, float]:
    value = table.take("value")
    ends = value if isinstance(value, list) else [value]
    # An infinite value would be met by anything: every distance to it, relative to it, is NaN.
    numbers = all(_is_number(x) for x in ends)
    if not numbers or len(ends) != (2 if isinstance(value, list) else 1) or ends[0] > ends[-1]:
        table.fail(f"'value' must be a finite number or [low, high], not {shown(value)}")
    return (ends[0], ends[1]) if isinstance(value, list) else ends[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_as_float(value))


def _as_float(value: int | float) -> float:
    """The value as a float, infinite for an integer that is too large to be one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read_measure(table: Table, *, unit: str, internal: bool) -> Measure:
    figure = table.take("figure", [])
    measure = Measure(
        experiment=table.text("experiment", ""),
        impl=table.text("impl"),
        metric=table.text("metric", UNITS.get(unit) or ""),
        case=read_case(table),
        where=_read_where(table),
        ratio_to=table.text("ratio_to", ""),
        over=read_case(table, "over"),
        minus=read_case(table, "minus"),
        aggregate=table.text("aggregate", "single", choices=AGGREGATES),
        predicate=table.text("predicate", "", choices=("", *PREDICATES)),
        than=table.text("than", ""),
        figure=tuple(figure) if isinstance(figure, list) else (str(figure),),
    )
    table.end()
    if internal != bool(measure.figure):
        table.fail("'figure' and internal = true go together")
    if not internal and not measure.experiment:
        table.fail("key 'experiment' is missing")
    if bool(measure.predicate) == bool(unit):
        table.fail("a qualitative claim needs a 'predicate', and only such a claim has one")
    if bool(measure.than) != (measure.predicate in ("faster", "lower")):
        table.fail("the predicates 'faster' and 'lower' need 'than', and nothing else has it")
    if measure.over or measure.minus:
        plain = not (measure.over and measure.minus) and not measure.ratio_to and not measure.predicate and not internal
        if not plain or measure.aggregate != "single":
            table.fail("'over' or 'minus' compares one case with one other, and goes with no other comparison")
        if measure.over and unit != "1":
            table.fail("'over' gives a plain number: the unit is '1'")
        if missing := [key for key in (*measure.over, *measure.minus) if key not in measure.case]:
            table.fail(f"'case' must say what {missing[0]!r} is, which 'over' or 'minus' changes")
    if bool(measure.ratio_to) != (unit == "x"):
        table.fail("'ratio_to' and the unit 'x' go together")
    if not measure.metric and not internal:
        if measure.predicate not in ("faster", "correct"):
            table.fail(f"key 'metric' is missing; the unit {unit!r} does not imply one")
        return replace(measure, metric="time" if measure.predicate == "faster" else "correct")
    return measure


def read_scale(table: Table) -> Scale:
    """`scale`: two words, each known to the hardware profiles."""
    from gpu_accel.hardware import profile

    scale = Scale(origin=table.text("from"), by=table.text("by"))
    table.end()
    try:
        _quantity(profile(scale.origin), scale.by)
    except GpuAccelError as error:
        table.fail(str(error))
    return scale


def read_case(table: Table, name: str = "case") -> dict[str, Any]:
    """`case`: a table of scalars, or of lists of scalars of which each must be covered."""
    case = table.take(name, {})
    if not isinstance(case, dict):
        table.fail(f"{name!r} must be a table, not {case!r}")
    for key, value in case.items():
        choices = value if isinstance(value, list) else [value]
        if not choices or not all(isinstance(choice, str | bool) or _is_number(choice) for choice in choices):
            table.fail(f"{name}: {key!r} must be a string, number or boolean, or a list of them; not {shown(value)}")
    return dict(case)


def _read_where(table: Table) -> tuple[Term, ...]:
    text = table.text("where", "")
    terms = []
    for part in text.split(" and ") if text else ():
        match = _TERM.fullmatch(part)
        if match is None:
            table.fail(f"'where' must be comparisons such as 'seqlen_q >= 1024 and causal == true', not {text!r}")
        key, operator, word = match.groups()
        value = _WORDS.get(word, word)
        if isinstance(value, str):
            try:
                value = float(word)
            except ValueError:
                if operator not in ("==", "!="):
                    table.fail(f"where: {word!r} has no order, so {operator} does not apply")
            if isinstance(value, float) and not math.isfinite(value):
                table.fail(f"where: {word!r} is not finite")
        terms.append(Term(key, operator, value))
    return tuple(terms)
