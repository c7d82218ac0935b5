"""What the folder of a search may hold: the checks of run.json and of a line of attempts.jsonl, field by field.

A folder may come from another machine, be cut short or be edited; whatever reads it finds every field that it uses as
the search wrote it, or a sentence about what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpu_accel.errors import shown

from .verdict import Kind, Verdict

LARGEST = 1e300  # of numbers: an integer of JSON may be beyond what a float holds
FILE = re.compile(r"(?P<number>[0-9]{4,})-[0-9a-f]{16}\.(py|cu|txt)")
_DIGEST = re.compile(r"[0-9a-f]{16}")

Rule = tuple[Callable[[Any], bool], str]  # what is let through, and what that is called


def fault_of_row(row: Any) -> str:
    """What is wrong with a row of attempts.jsonl; "" for nothing."""
    if not isinstance(row, dict):
        return "no object"
    if lacking := [key for key in _ROW if key not in row]:
        return f"lacks {lacking[0]}"
    if fault := _against(row, _ROW):
        return fault
    named = FILE.fullmatch(row["file"])
    if named is None or named["number"] != f"{row['number']:04d}":
        return f"file is {shown(row['file'], 60)}, not {row['number']:04d}-, 16 digits of a digest and .py, .cu or .txt"
    return ""


def fault_of_run(run: Mapping[str, Any]) -> str:
    """What is wrong with a run.json; "" for nothing. A search that has not ended lacks its outcome."""
    if lacking := [key for key in ("task", "target", "environment", "time") if key not in run]:
        return f"lacks {lacking[0]}"
    if fault := _against(run, _RUN):
        return fault
    if run.get("host") and (fault := _lacking(run["host"], _HOST)):
        return f"host {fault}"
    for name, judged in (run.get("baselines") or {}).items():
        if fault := _lacking(judged, _JUDGED):
            return f"the verdict on {shown(name, 30)} {fault}"
    final = run.get("final")
    return f"final {fault}" if final is not None and (fault := _fault_of_final(final)) else ""


def _fault_of_final(final: Mapping[str, Any]) -> str:
    """What is wrong with the last measurement."""
    if lacking := [key for key in ("judgement", "samples", "slow", "method", "clocks") if key not in final]:
        return f"lacks {lacking[0]}"
    if fault := _against(final, _FINAL):
        return f"has a fault: {fault}"
    if fault := _lacking(final["judgement"], _JUDGED):
        return f"judgement {fault}"
    for part in ("samples", "slow", "warm"):
        taken = final.get(part, {})
        if not isinstance(taken, dict) or not all(isinstance(times, list) for times in taken.values()):
            return f"has {part} that are no lists of times"
        if not all(_amount(time) and time > 0 for times in taken.values() for time in times):
            return f"has {part} with times that are no positive numbers"
    if lacking := [name for name in ("candidate", "copy") if not final.get("samples", {}).get(name)]:
        return f"has no samples of {lacking[0]}"
    return ""


def _lacking(table: Any, rules: Mapping[str, Rule]) -> str:
    """What is wrong with an object inside another."""
    if not isinstance(table, dict):
        return f"is {shown(table, 60)}, no object"
    if lacking := [key for key in rules if key not in table]:
        return f"lacks {lacking[0]}"
    fault = _against(table, rules)
    return f"has a fault: {fault}" if fault else ""


def _against(table: Mapping[str, Any], rules: Mapping[str, Rule]) -> str:
    wrong = next((key for key, (known, _) in rules.items() if key in table and not known(table[key])), None)
    return f"{wrong} is {shown(table[wrong], 60)}, not {rules[wrong][1]}" if wrong else ""


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < LARGEST


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _yes_or_no(value: Any) -> bool:
    return isinstance(value, bool)


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _time(value: Any) -> bool:
    return _amount(value) and value > 0


def _or_none(rule: Rule) -> Rule:
    known, what = rule
    return lambda value: value is None or known(value), f"{what} or null"


COUNT: Rule = (_count, "a count")
AMOUNT: Rule = (_amount, "an amount")
NUMBER: Rule = (_number, "a number")
TEXT: Rule = (_text, "text")
TEXTS: Rule = (_texts, "a list of texts")
TABLE: Rule = (_table, "an object")
YES_OR_NO: Rule = (_yes_or_no, "true or false")
TIME: Rule = (_time, "a positive number")

_JUDGED: dict[str, Rule] = {
    "verdict": (lambda value: _text(value) and value in list(Verdict), "one of " + ", ".join(Verdict)),
    "kind": (lambda value: value is None or (_text(value) and value in list(Kind)), "null or a kind of fault"),
    "detail": TEXT, "evidence": TEXTS, "verified_by": TEXTS, "sandbox": TEXT, "error": _or_none(NUMBER),
}  # fmt: skip

_ROW: dict[str, Rule] = {
    "number": COUNT, "file": TEXT, "change": TEXT, "time": _or_none(TIME), "ms": _or_none(TIME),
    "confirmed": YES_OR_NO, "dollars": AMOUNT, "at": AMOUNT,
    "tokens": (lambda value: isinstance(value, list) and len(value) == 2 and all(map(_count, value)), "two counts"),
    **_JUDGED,
}  # fmt: skip

_RUN: dict[str, Rule] = {
    "task": TEXT, "target": TEXT, "environment": TABLE, "time": TEXT, "proposer": TEXT, "start": TEXT, "note": TEXT,
    "sandbox": TEXT, "gpu": YES_OR_NO, "host": _or_none(TABLE), "baselines": _or_none(TABLE), "final": _or_none(TABLE),
    "best": (lambda value: _text(value) and _DIGEST.fullmatch(value) is not None, "a digest of 16 digits"),
    "speedup_over_start": _or_none(TIME), "attempts": COUNT, "seconds": AMOUNT, "dollars": AMOUNT,
}  # fmt: skip

_HOST: dict[str, Rule] = {"env": TABLE, "commit": TEXT, "dirty": YES_OR_NO}

_FINAL: dict[str, Rule] = {
    "failed": TABLE, "clocks": TABLE, "other_clocks": TABLE, "method": TEXT, "warm_method": TEXT, "launches": COUNT,
    "compared": COUNT, "repeated": COUNT, "library_error": _or_none(NUMBER), "compiled_error": _or_none(NUMBER),
    "tensor_cores": _or_none(TEXTS),
}  # fmt: skip
