"""A search on disk: one folder that another machine can read, resume or verify.

    run.json         task, target, proposer, budget, versions, the outcome
    attempts.jsonl   one line a proposal: verdict, time, cost, file
    NNNN-digest.py   every proposal as it was given (.cu for CUDA C++, .txt for what is no candidate)
    transcript.jsonl what a language model was asked and what it answered
    best.py          the fastest confirmed kernel (.cu for CUDA C++)
    .lock            held by the search that is at work here
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError

from .candidate import LARGEST_SOURCE, Candidate
from .folders import append_line, read_plain, write_whole
from .kept import FILE, fault_of_row, fault_of_run
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
        write_whole(self.folder / name, attempt.source)
        row = {
            "number": attempt.number, "file": name, "change": attempt.change, "time": attempt.time, "ms": attempt.ms,
            "confirmed": attempt.confirmed, "tokens": list(attempt.tokens), "dollars": attempt.dollars,
            "at": round(attempt.at, 3),
        }  # fmt: skip
        append_line(self.folder / "attempts.jsonl", json.dumps(row | attempt.judgement.as_dict()))

    def best(self, candidate: Candidate) -> None:
        if self.folder is not None:
            name = f"best{suffix_of(candidate)}"
            write_whole(self.folder / name, candidate.text)
            for old in {"best.py", "best.cu"} - {name}:
                (self.folder / old).unlink(missing_ok=True)

    def say(self, entry: dict[str, Any]) -> None:
        """Keep one exchange with a model."""
        if self.folder is not None:
            append_line(self.folder / "transcript.jsonl", json.dumps(entry))

    def _write(self, name: str, value: dict[str, Any]) -> None:
        if self.folder is not None:
            write_whole(self.folder / name, json.dumps(value, indent=1) + "\n")


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
    return any(os.path.lexists(folder / name) for name in ("run.json", "attempts.jsonl"))


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
        found = json.loads(read_plain(folder / "run.json").decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{folder} holds no search: run.json cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InvalidInputError(f"{folder}/run.json has another format; this version reads schema {SCHEMA}")
    if fault := fault_of_run(found):
        raise InvalidInputError(f"{folder}/run.json: {fault}; {_REMEDY}")
    return found


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The rows of attempts.jsonl, the last one of each number; a torn last line is left out.

    None of a search that was stopped before its first verdict.

    Raises:
        InvalidInputError: there is no such file, it holds no attempt, or a line is none; names the line.
    """
    path = folder / "attempts.jsonl"
    try:
        lines = read_plain(path).split(b"\n")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _only_begun(folder):
            return []
        raise InvalidInputError(f"{folder} holds no search: attempts.jsonl cannot be read ({error})") from error
    rows: dict[int, dict[str, Any]] = {}
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:
                continue
            why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "no JSON"
            raise InvalidInputError(f"{path}, line {number}: {why}; {_REMEDY}") from error
        if fault := fault_of_row(row):
            raise InvalidInputError(f"{path}, line {number}: {fault}; {_REMEDY}")
        if not (folder / row["file"]).is_file():
            raise InvalidInputError(f"{path}, line {number}: there is no file {row['file']}; {_REMEDY}")
        rows[row["number"]] = row
    if not rows:
        raise InvalidInputError(f"{path} holds no attempt; {_REMEDY}")
    if lacking := [number for number in range(len(rows)) if number not in rows]:
        raise InvalidInputError(f"{path} has no attempt {lacking[0]}; {_REMEDY}")
    return [rows[number] for number in sorted(rows)]


def _only_begun(folder: Path) -> bool:
    """Whether a search has written that it begins, and nothing else."""
    try:
        kept = any(FILE.fullmatch(one.name) for one in folder.iterdir())
        return not kept and "attempts" not in read_run(folder)
    except (OSError, InvalidInputError):
        return False


_REMEDY = "restore the folder, or search again into a new one"


def proposal_of(folder: Path, row: Mapping[str, Any]) -> tuple[str, Candidate | None]:
    """The proposal of a row of attempts.jsonl, as it was given, and the candidate that it is.

    Raises:
        InvalidInputError: its file cannot be read, or is not what it was; such as a link to something else.
    """
    try:
        text = read_plain(folder / row["file"]).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{folder}/{row['file']} cannot be read: {error}") from error
    candidate: Candidate | None = None
    if not row["file"].endswith(".txt"):
        try:
            candidate = Candidate.parse(text)
        except Rejected as rejected:
            raise InvalidInputError(f"{folder}/{row['file']} is no candidate any more: {rejected}") from rejected
    if (candidate.digest if candidate else digest_of(text)) not in row["file"]:
        raise InvalidInputError(f"{folder}/{row['file']} was changed since it was judged")
    return text, candidate


def attempts_of(folder: Path) -> list[Attempt]:
    """What a search has tried so far, to go on from.

    Raises:
        InvalidInputError: a file is missing or is not what it was.
    """
    made = []
    for row in read_attempts(folder):
        text, candidate = proposal_of(folder, row)
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
                return Candidate.parse(read_plain(folder / name, LARGEST_SOURCE + 1))
            except OSError as error:
                raise InvalidInputError(f"{folder}/{name} cannot be read: {error.strerror or error}") from error
            except Rejected as rejected:
                raise InvalidInputError(f"{folder}/{name} is no candidate: {rejected}") from rejected
    raise InvalidInputError(f"{folder} has no best.py and no best.cu")


def _judgement(row: dict[str, Any]) -> Judgement:
    return Judgement(
        verdict=Verdict(row["verdict"]), kind=Kind(row["kind"]) if row["kind"] else None, detail=row["detail"],
        evidence=tuple(row["evidence"]), verified_by=tuple(row["verified_by"]), sandbox=row["sandbox"],
        error=row["error"],
    )  # fmt: skip
