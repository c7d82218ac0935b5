"""Judging claims: what a paper says, what the records say, and one of five words.

    reproduced                       the value holds, up to the claim's tolerance (5 % unless it says otherwise)
    within N%                        it misses by more than that, but by at most 25 %
    not reproduced                   it misses by more, or a range or an ordering does not hold
    not measured (why)               nothing on record may settle it; `why` names the command that would
    unsupported (no source found)    a claim of the seed that no source supports and nothing measures

A verdict names the records it rests on, the value with its interval, and what differs from the claim's conditions.
Beside the word stands which way a result misses: a speed-up above the range that a paper states does not reproduce the
range, and is no shortfall. Claims of a paper's text that its own figures settle (`internal`) are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_accel.errors import GpuAccelError
from gpu_accel.workbench import conditions
from gpu_accel.workbench.evidence import Cell, Evidence, NotMeasured, collect, command, from_figures
from gpu_accel.workbench.figures import quoted_records
from gpu_accel.workbench.ledger import Claim, Measure, load_claims
from gpu_accel.workbench.records import Record
from gpu_accel.workbench.statistics import Ratio, median
from gpu_accel.workbench.statistics import verdict as speed_word

__all__ = [
    "WORDS",
    "Claim",
    "Measure",
    "Verdict",
    "against_itself",
    "judge",
    "judge_all",
    "load_claims",
    "quoted_records",
    "summary",
]

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
UNSUPPORTED = "unsupported (no source found)"
FURTHEST = 0.25  # a miss up to here is called "within N%"
WITHIN = f"within {FURTHEST:.0%}"  # all of those together
WORDS = (REPRODUCED, WITHIN, NOT_REPRODUCED, "not measured", "unsupported")
NOISE = 0.02  # half-width of the band around 1 inside which two speeds are the same
_ROUNDING = 1e-9
_EXAMPLES = 3  # failing cells that a verdict lists


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the evidence says of one claim.

    ``measured`` is in the claim's unit: a number, (low, high) for a range, the worst ratio for a qualitative claim.
    ``interval`` goes with it: 95 % for a ratio, 20th to 80th percentile of the samples for a single value.
    """

    claim: Claim
    word: str
    measured: float | tuple[float, float] | None = None
    interval: tuple[float, float] | None = None
    detail: str = ""
    records: tuple[Record, ...] = ()
    differs: tuple[str, ...] = ()
    expected: float | tuple[float, float] | None = None  # the claimed number carried over to the card measured here
    side: str = ""  # where a result that misses lies: "above", "below" or "below and above"; "" for an ordering

    @property
    def shown(self) -> str:
        """The word with the side on which it misses: `within 20%, above`, `not reproduced: above, 1.8 to 2.098`."""
        if not self.side:
            return self.word
        if self.category == WITHIN or not isinstance(self.measured, tuple):
            return f"{self.word}, {self.side}"
        return f"{self.word}: {self.side}, {' to '.join(f'{end:.3g}' for end in self.measured)}"

    @property
    def internal(self) -> bool:
        """Whether the paper's own figures decide, so that nothing is reproduced or missed here."""
        return self.claim.internal

    @property
    def category(self) -> str:
        """The word without its own number or reason, one of WORDS."""
        if self.word.startswith("within "):
            return WITHIN
        return next(word for word in WORDS if self.word.startswith(word))

    @property
    def settled(self) -> bool:
        """Whether evidence decided, either way."""
        return self.category in WORDS[:3]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able dict; records by the place they were read from, or by what they are about."""
        claim = self.claim
        return {
            "id": claim.id,
            "paper": claim.paper,
            "where": claim.where,
            "statement": claim.statement,
            "source": claim.source,
            "kind": claim.kind,
            "value": list(claim.value) if isinstance(claim.value, tuple) else claim.value,
            "unit": claim.unit,
            "verdict": self.word,
            "side": self.side,
            "internal": self.internal,
            "measured": list(self.measured) if isinstance(self.measured, tuple) else self.measured,
            "interval": list(self.interval) if self.interval else None,
            "detail": self.detail,
            "differs": list(self.differs),
            "records": [record.name for record in self.records],
        }


@dataclass(frozen=True)
class _Finding:
    word: str
    measured: float | tuple[float, float] | None
    interval: tuple[float, float] | None
    text: str
    cells: tuple[Cell, ...]  # the cells that decided
    side: str = ""


def judge(claim: Claim, records: Iterable[Record]) -> Verdict:
    """The verdict on one claim from any records (those of other papers and experiments are left out)."""
    if claim.measure is None:
        if claim.unmeasurable:
            return Verdict(claim=claim, word=f"not measured ({claim.unmeasurable})", detail=_notes(claim))
        return Verdict(claim=claim, word=UNSUPPORTED, detail=_notes(claim))
    try:
        evidence = from_figures(claim) if claim.internal else collect(claim, records)
        aimed, carried = _scaled(claim, evidence)
        finding = _find(aimed, evidence)
        if evidence.missing and not _decided_already(claim, finding.word):
            raise NotMeasured(f"{evidence.missing} of {evidence.asked} cells have no record; `{command(claim)}`")
    except NotMeasured as why:
        return Verdict(claim=claim, word=f"not measured ({why})", detail=_notes(claim))
    used = _records(finding.cells)
    differs = () if claim.internal else conditions.differences(claim, used)
    if claim.internal:
        basis = f"arithmetic on the paper's own figures ({', '.join(claim.measure.figure)}), nothing was run"
    else:
        ours = f"{'/'.join(dict.fromkeys(cell.impl for cell in finding.cells))} on "
        basis = ours + conditions.basis(used)
    sentences = [finding.text, *carried, basis]
    if evidence.missing:
        sentences.append(f"{evidence.missing} of {evidence.asked} cells have no record, but could not change this")
    if evidence.elsewhere:
        sentences.append(f"also recorded on {', '.join(evidence.elsewhere)}, left out here")
    if differs:
        sentences.append("differs: " + "; ".join(differs))
    sentences += filter(None, [_notes(claim)])
    return Verdict(
        claim=claim,
        word=finding.word,
        measured=finding.measured,
        interval=finding.interval,
        detail=". ".join(sentences),
        records=used,
        differs=differs,
        expected=aimed.value if carried else None,
        side=finding.side,
    )


def _scaled(claim: Claim, evidence: Evidence) -> tuple[Claim, tuple[str, ...]]:
    """The claim with its number carried over to the card of the evidence, and the sentence that says so.

    Raises NotMeasured where a profile lacks what it takes.
    """
    if claim.scale is None:
        return claim, ()
    env = evidence.cells[0].records[0].env
    sku = str(env.get("sku") or env.get("gpu"))
    try:
        factor = claim.scale.factor(sku)
    except GpuAccelError as error:
        raise NotMeasured(f"recorded on {sku}, to which the claim cannot be scaled: {error}") from error
    low, high = (factor * number for number in claim.numbers)
    stated = " to ".join(dict.fromkeys(_number(number) for number in claim.numbers))
    words = f"{stated} on {claim.scale.origin}, times {factor:.4g} for {sku} in proportion to {claim.scale.by}"
    return replace(claim, value=(low, high) if isinstance(claim.value, tuple) else low), (words,)


def judge_all(claims: Iterable[Claim], records: Iterable[Record]) -> list[Verdict]:
    """The verdict on every claim, in order."""
    records = list(records)
    return [judge(claim, records) for claim in claims]


def summary(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts have each of WORDS, zeros included; without those that the paper's own figures decide."""
    counts = dict.fromkeys(WORDS, 0)
    for verdict in verdicts:
        if not verdict.internal:
            counts[verdict.category] += 1
    return counts


def against_itself(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """(hold, do not): of the claims that the paper's own figures decide, how many they bear out."""
    inside = [verdict for verdict in verdicts if verdict.internal]
    hold = sum(verdict.category == REPRODUCED for verdict in inside)
    return hold, len(inside) - hold


# -- from cells to a word


def _find(claim: Claim, evidence: Evidence) -> _Finding:
    measure = claim.measure
    assert measure is not None
    if measure.predicate == "correct":
        return _all_correct(evidence.cells)
    if measure.predicate:
        return _all_better(claim, evidence.cells)
    if measure.aggregate == "range":
        return _range(claim, evidence.cells)
    cells = sorted(evidence.cells, key=lambda cell: cell.value)
    if measure.aggregate == "median":
        value, interval, used = median([cell.value for cell in cells]), None, tuple(cells)
    else:
        cell = cells[0] if measure.aggregate == "min" else cells[-1]
        value, interval, used = cell.value, cell.interval, (cell,)
    word = _word(claim, value)
    among = f", the {measure.aggregate} of {len(cells)} cells" if measure.aggregate != "single" else ""
    text = f"{_number(value)}{_unit(claim)}{_bracket(claim, interval)}{among}, against {_aim(claim)}"
    if interval and len({_word(claim, end) == REPRODUCED for end in interval}) == 2:
        text += "; the interval reaches across the limit"
    return _Finding(word, value, interval, text, used, _side(claim, [value]))


def _range(claim: Claim, cells: Sequence[Cell]) -> _Finding:
    """A range is reproduced only when the least and the greatest value both lie in it."""
    low, high = claim.numbers
    first, last = min(cells, key=lambda c: c.value), max(cells, key=lambda c: c.value)
    inside = _word(claim, first.value) == _word(claim, last.value) == REPRODUCED
    ends = None
    if first.interval and last.interval:
        ends = (first.interval[0], last.interval[1])
    text = (
        f"{_number(first.value)} to {_number(last.value)}{_unit(claim)} over {len(cells)} cells, "
        f"against {_aim(claim)}; "
        f"{sum(c.value < low for c in cells)} cells below and {sum(c.value > high for c in cells)} above"
    )
    word = REPRODUCED if inside else NOT_REPRODUCED
    side = _side(claim, [first.value, last.value])
    return _Finding(word, (first.value, last.value), ends, text, tuple(cells), side)


def _side(claim: Claim, values: Sequence[float]) -> str:
    """On which sides of the claim those values lie that miss it; "" when none does."""
    missing = [value for value in values if _word(claim, value) != REPRODUCED]
    low, high = claim.numbers
    sides = {"below": any(value < low for value in missing), "above": any(value > high for value in missing)}
    return " and ".join(side for side, there in sides.items() if there)


def _all_better(claim: Claim, cells: Sequence[Cell]) -> _Finding:
    """An ordering: every cell must be better, beyond noise where there is an interval."""
    measure = claim.measure
    assert measure is not None
    words = {
        id(cell): speed_word(Ratio(cell.value, *cell.interval), NOISE) if cell.interval else _order(cell)
        for cell in cells
    }
    worst = min(cells, key=lambda cell: cell.value)
    worse = sorted((c for c in cells if words[id(c)] == "slower"), key=lambda c: c.value)
    better = [cell for cell in cells if words[id(cell)] == "faster"]
    word = NOT_REPRODUCED if worse else _miss_word(max(NOISE, 1 - worst.value))
    if len(better) == len(cells):
        word = REPRODUCED
    text = f"{measure.predicate} than {measure.than} in {len(better)} of {len(cells)} cells"
    if undecided := len(cells) - len(better) - len(worse):
        text += f", no clear difference in {undecided}"
    if worse:
        shown = "; ".join(f"{_case(cell, cells)}: {_number(cell.value)} x" for cell in worse[:_EXAMPLES])
        text += f", not in {len(worse)} ({shown}{'; ...' if len(worse) > _EXAMPLES else ''})"
    return _Finding(word, worst.value, worst.interval, text, tuple(cells))


def _all_correct(cells: Sequence[Cell]) -> _Finding:
    """Records exist only for results that passed their check, so having them is the evidence."""
    worst = max(cells, key=lambda cell: _used_up(cell.records[0]))
    check = worst.records[0].checked or {}
    text = (
        f"{len(cells)} results passed their check; closest to its bound: {check.get('metric')} "
        f"{_number(check.get('error', 0.0))} of {_number(check.get('bound', 0.0))} allowed"
    )
    return _Finding(REPRODUCED, None, None, text, tuple(cells))


def _used_up(record: Record) -> float:
    check = record.checked or {}
    return float(check["error"]) / float(check["bound"]) if check.get("bound") else 0.0


def _order(cell: Cell) -> str:
    return "faster" if cell.value > 1 else "slower" if cell.value < 1 else "same"


def _word(claim: Claim, value: float) -> str:
    miss = _miss(claim, value)
    return REPRODUCED if miss <= claim.tolerance + _ROUNDING else _miss_word(miss)


def _miss_word(miss: float) -> str:
    return f"within {math.ceil(100 * miss - 1e-7)}%" if miss <= FURTHEST + _ROUNDING else NOT_REPRODUCED


def _miss(claim: Claim, value: float) -> float:
    """By how much a value misses the claim, relative to the claimed value; 0 when it does not."""
    low, high = claim.numbers
    below = (low - value) / abs(low) if low else (0.0 if value >= 0 else math.inf)
    above = (value - high) / abs(high) if high else (0.0 if value <= 0 else math.inf)
    if math.isnan(below) or math.isnan(above):
        return math.inf  # max() would drop a NaN, and so take what cannot be compared for no miss at all
    if claim.direction == "at_least":
        return max(0.0, below)
    if claim.direction == "at_most":
        return max(0.0, above)
    return max(0.0, below, above)


def _decided_already(claim: Claim, word: str) -> bool:
    """Whether the cells that are missing could not change the word."""
    measure = claim.measure
    assert measure is not None
    if measure.aggregate == "range" or measure.predicate in ("faster", "lower"):
        return word == NOT_REPRODUCED
    good = {("max", "at_least"), ("min", "at_most")}
    bad = {("min", "at_least"), ("max", "at_most")}
    way = (measure.aggregate, claim.direction)
    return (way in good and word == REPRODUCED) or (way in bad and word == NOT_REPRODUCED)


# -- words


def _aim(claim: Claim) -> str:
    low, high = claim.numbers
    if claim.direction == "between":
        return f"{_number(low)} to {_number(high)}"
    return f"{claim.direction.replace('_', ' ')} {_number(low)}"


def _unit(claim: Claim) -> str:
    """With a space before it; a plain number, whose unit is 1, has none."""
    return f" {claim.unit}" if claim.unit not in ("", "1") else ""


def _bracket(claim: Claim, interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    kind = "95 % interval" if claim.unit == "x" else "20th to 80th percentile"
    return f" ({kind} {_number(interval[0])} to {_number(interval[1])})"


def _case(cell: Cell, cells: Sequence[Cell]) -> str:
    """The keys of a case that tell it from the other cells."""
    told = [k for k in cell.case if k != "seqlen_k" and len({repr(c.case.get(k)) for c in cells}) > 1]
    return ", ".join(f"{key} {cell.case[key]}" for key in told) or "the only cell"


def _notes(claim: Claim) -> str:
    notes = []
    if claim.source == "seed":
        notes.append("stated by the seed, which names no source")
    if claim.contradicts:
        notes.append(f"contradicts {', '.join(claim.contradicts)}")
    return ". ".join([*notes, *filter(None, [claim.note])])


def _number(value: float) -> str:
    return f"{value:.4g}"


def _records(cells: Iterable[Cell]) -> tuple[Record, ...]:
    found = {id(record): record for cell in cells for record in cell.records}
    return tuple(found.values())
