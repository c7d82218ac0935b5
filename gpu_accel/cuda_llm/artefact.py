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
import platform
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError

from .candidate import Candidate
from .proposers import Attempt
from .verdict import Judgement, Kind, Rejected, Verdict

SCHEMA = 1


class Artefact:
    """Writes the folder of one search; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

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
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{folder} holds no search: run.json cannot be read ({error})") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InvalidInputError(f"{folder}/run.json has another format; this version reads schema {SCHEMA}")
    return found


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The rows of attempts.jsonl, the last one of each number; a torn last line is left out.

    Raises:
        InvalidInputError: there is no such file, or a line is no attempt.
    """
    try:
        lines = (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidInputError(f"{folder} holds no search: attempts.jsonl cannot be read ({error})") from error
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows[row["number"]] = row
            row["file"], row["verdict"], row["change"], row["tokens"], row["dollars"]  # noqa: B018
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            raise InvalidInputError(f"line {number} of {folder}/attempts.jsonl is no attempt") from error
    return [rows[number] for number in sorted(rows)]


def attempts_of(folder: Path) -> list[Attempt]:
    """What a search has tried so far, to go on from.

    Raises:
        InvalidInputError: a file is missing or is not what it was.
    """
    made = []
    for row in read_attempts(folder):
        try:
            text = (folder / row["file"]).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidInputError(f"{folder}/{row['file']} cannot be read: {error.strerror}") from error
        candidate: Candidate | None = None
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
