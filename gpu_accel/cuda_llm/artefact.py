"""A search on disk: one folder that another machine can read, resume or verify.

    run.json         task, target, proposer, budget, versions, the outcome
    attempts.jsonl   one line a proposal: verdict, time, cost, file
    NNNN-digest.py   every proposal as it was given (.cu for CUDA C++, .txt for what is no candidate)
    transcript.jsonl what a language model was asked and what it answered
    best.py          the fastest confirmed kernel (.cu for CUDA C++)
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError, shown

from .candidate import Candidate
from .proposers import Attempt, digest_of
from .verdict import Judgement, Kind, Rejected, Verdict

SCHEMA = 1


class Artefact:
    """Writes the folder of one search; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            make_folder(folder)

    def begin(self, **what: Any) -> None:
        """Write run.json."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write("run.json", {"schema": SCHEMA, "time": now, "environment": environment(), **what})

    def end(self, **what: Any) -> None:
        """Add the outcome to run.json."""
        if self.folder is not None:
            self._write("run.json", read_run(self.folder) | what)

    def add(self, attempt: Attempt) -> None:
        """Keep one attempt; a later line with its number replaces an earlier one."""
        if self.folder is None:
            return
        name = f"{attempt.number:04d}-{attempt.digest}{suffix_of(attempt.candidate)}"
        (self.folder / name).write_text(attempt.source, encoding="utf-8")
        row = {
            "number": attempt.number, "file": name, "change": attempt.change, "time": attempt.time, "ms": attempt.ms,
            "confirmed": attempt.confirmed, "tokens": list(attempt.tokens), "dollars": attempt.dollars,
            "at": round(attempt.at, 3),
        }  # fmt: skip
        with (self.folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | attempt.judgement.as_dict()) + "\n")

    def best(self, candidate: Candidate) -> None:
        if self.folder is not None:
            for old in ("best.py", "best.cu"):
                (self.folder / old).unlink(missing_ok=True)
            (self.folder / f"best{suffix_of(candidate)}").write_text(candidate.text, encoding="utf-8")

    def say(self, entry: dict[str, Any]) -> None:
        """Keep one exchange with a model."""
        if self.folder is not None:
            with (self.folder / "transcript.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def _write(self, name: str, value: dict[str, Any]) -> None:
        if self.folder is not None:
            (self.folder / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it.

    Raises:
        InvalidInputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make the folder {folder}: {error.strerror or error}") from error


def holds_search(folder: Path) -> bool:
    """Whether a search was kept here, whole or not."""
    return any((folder / name).exists() for name in ("run.json", "attempts.jsonl"))


def suffix_of(candidate: Candidate | None) -> str:
    return {"triton": ".py", "cuda": ".cu"}[candidate.language] if candidate else ".txt"


def environment() -> dict[str, str]:
    """Versions that decide what a kernel becomes."""
    import torch
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


@functools.cache
def host() -> dict[str, Any]:
    """What records say of a machine with a GPU: its environment with peaks, the commit, and whether files differ."""
    from gpu_accel.workbench.host import Host

    found = Host.here("cuda")
    return {"env": found.env, "commit": found.commit, "dirty": found.dirty}


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a folder.

    Raises:
        InvalidInputError: there is none, or of a version that is not known.
    """
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{folder} holds no search: run.json cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InvalidInputError(f"{folder}/run.json has another format; this version reads schema {SCHEMA}")
    for key in ("task", "target"):
        if not isinstance(found.get(key), str):
            raise InvalidInputError(f"{folder}/run.json: {key} is {shown(found.get(key), 60)}, not text; {_REMEDY}")
    if not isinstance(found.get("environment"), dict):
        raise InvalidInputError(f"{folder}/run.json: environment is no object; {_REMEDY}")
    if fault := _final_fault(found.get("final")):
        raise InvalidInputError(f"{folder}/run.json: final {fault}; {_REMEDY}")
    return found


def _final_fault(final: Any) -> str:
    """What is wrong with the times of the last measurement; "" for nothing."""
    if final is None:
        return ""
    if not isinstance(final, dict):
        return f"is {shown(final, 60)}, no object"
    for part in ("samples", "slow", "warm"):
        taken = final.get(part, {})
        if not isinstance(taken, dict) or not all(isinstance(times, list) for times in taken.values()):
            return f"has {part} that are no lists of times"
        if not all(_amount(time) and time > 0 for times in taken.values() for time in times):
            return f"has {part} with times that are no positive numbers"
    for name, error in final.items():
        if name.endswith("_error") and error is not None and type(error) not in (int, float):
            return f"has {name} {shown(error, 60)}, no number"
    return ""


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The rows of attempts.jsonl, the last one of each number; a torn last line is left out.

    Raises:
        InvalidInputError: there is no such file, it holds no attempt, or a line is none; names the line.
    """
    path = folder / "attempts.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInputError(f"{folder} holds no search: attempts.jsonl cannot be read ({error})") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:
                continue
            why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "no JSON"
            raise InvalidInputError(f"{path}, line {number}: {why}; {_REMEDY}") from error
        if fault := _fault(row):
            raise InvalidInputError(f"{path}, line {number}: {fault}; {_REMEDY}")
        if not (folder / row["file"]).is_file():
            raise InvalidInputError(f"{path}, line {number}: there is no file {row['file']}; {_REMEDY}")
        rows[row["number"]] = row
    if not rows:
        raise InvalidInputError(f"{path} holds no attempt; {_REMEDY}")
    if lacking := [number for number in range(len(rows)) if number not in rows]:
        raise InvalidInputError(f"{path} has no attempt {lacking[0]}; {_REMEDY}")
    return [rows[number] for number in sorted(rows)]


_REMEDY = "restore the folder, or search again into a new one"
_FILE = re.compile(r"(?P<number>\d{4,})-[0-9a-f]{16}\.(py|cu|txt)")


def _fault(row: Any) -> str:
    """What is wrong with a row of attempts.jsonl; "" for nothing."""
    if not isinstance(row, dict):
        return "no object"
    if lacking := [key for key in _ROW if key not in row]:
        return f"lacks {lacking[0]}"
    for key, (known, what) in _ROW.items():
        if not known(row[key]):
            return f"{key} is {shown(row[key], 60)}, not {what}"
    named = _FILE.fullmatch(row["file"])
    if named is None or int(named["number"]) != row["number"]:
        return f"file is {shown(row['file'], 60)}, not {row['number']:04d}-, 16 digits of a digest and .py, .cu or .txt"
    return ""


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _time(value: Any) -> bool:
    return value is None or (_amount(value) and value > 0)


_ROW: dict[str, tuple[Callable[[Any], bool], str]] = {
    "number": (_count, "a count"), "file": (_text, "text"), "change": (_text, "text"),
    "time": (_time, "a positive number or null"), "ms": (_time, "a positive number or null"),
    "confirmed": (lambda value: isinstance(value, bool), "true or false"),
    "tokens": (lambda value: isinstance(value, list) and len(value) == 2 and all(map(_count, value)), "two counts"),
    "dollars": (_amount, "an amount"), "at": (_amount, "seconds"),
    "verdict": (lambda value: value in list(Verdict), "one of " + ", ".join(Verdict)),
    "kind": (lambda value: value is None or value in list(Kind), "null or a kind of fault"),
    "detail": (_text, "text"), "evidence": (_texts, "a list of texts"), "verified_by": (_texts, "a list of texts"),
    "sandbox": (_text, "text"),
    "error": (lambda value: value is None or type(value) in (int, float), "a number or null"),
}  # fmt: skip


def text_of(folder: Path, row: Mapping[str, Any]) -> str:
    """The proposal of a row of attempts.jsonl, as it was given.

    Raises:
        InvalidInputError: its file cannot be read.
    """
    try:
        return (folder / row["file"]).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{folder}/{row['file']} cannot be read: {error}") from error


def attempts_of(folder: Path) -> list[Attempt]:
    """What a search has tried so far, to go on from.

    Raises:
        InvalidInputError: a file is missing or is not what it was.
    """
    made = []
    for row in read_attempts(folder):
        text = text_of(folder, row)
        candidate: Candidate | None = None
        if row["file"].endswith(".txt") and digest_of(text) not in row["file"]:
            raise InvalidInputError(f"{folder}/{row['file']} was changed since it was judged")
        if not row["file"].endswith(".txt"):
            try:
                candidate = Candidate.parse(text)
            except Rejected as rejected:
                raise InvalidInputError(f"{folder}/{row['file']} is no candidate any more: {rejected}") from rejected
            if candidate.digest not in row["file"]:
                raise InvalidInputError(f"{folder}/{row['file']} was changed since it was judged")
        made.append(
            Attempt(
                number=row["number"], candidate=candidate, text=text, judgement=_judgement(row), time=row["time"],
                ms=row["ms"], change=row["change"], confirmed=row["confirmed"], tokens=tuple(row["tokens"]),
                dollars=row["dollars"], at=row["at"],
            )
        )  # fmt: skip
    return made


def best_of(folder: Path) -> Candidate:
    """The best kernel that a search kept.

    Raises:
        InvalidInputError: it kept none.
    """
    for name in ("best.py", "best.cu"):
        if (folder / name).is_file():
            try:
                return Candidate.parse((folder / name).read_bytes())
            except Rejected as rejected:
                raise InvalidInputError(f"{folder}/{name} is no candidate: {rejected}") from rejected
    raise InvalidInputError(f"{folder} has no best.py and no best.cu")


def _judgement(row: dict[str, Any]) -> Judgement:
    return Judgement(
        verdict=Verdict(row["verdict"]), kind=Kind(row["kind"]) if row["kind"] else None, detail=row["detail"],
        evidence=tuple(row["evidence"]), verified_by=tuple(row["verified_by"]), sandbox=row["sandbox"],
        error=row["error"],
    )  # fmt: skip
