"""Where candidates come from: one protocol for a grammar, language models, people and recordings.

A proposer gets a `Brief` (the task, the kernel to start from, the GPU) and the history of everything proposed so far
with what became of it, and answers with texts. A text need not be a candidate: what cannot be read becomes an
attempt with the verdict `malformed`, and its reason goes back like any other.

    grammar.py     Grammar: points of templates' spaces; needs no model
    models.py      OpenAICompatible, Anthropic, Transformers: language models
    below          Files: a folder where a person or a program puts kernels; Replay: what a recorded run proposed
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpu_accel.errors import InvalidInputError, shown

from .candidate import Candidate
from .tasks import Task
from .verdict import Judgement, printable


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One text and what it cost.

    Args:
        note: how it came to be, such as the values that a grammar changed.
        tokens: (read, written) by a model for it; the call's are spread over its answers.
        dollars: their price, where prices were given.
    """

    text: str
    note: str = ""
    tokens: tuple[int, int] = (0, 0)
    dollars: float = 0.0

    @property
    def digest(self) -> str:
        return digest_of(self.text)


def digest_of(text: str) -> str:
    """Identifies a text; that of a candidate whose text is canonical is its own digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One proposal and what became of it.

    Args:
        candidate: None where the text is none.
        time: median of its time as a multiple of a copy of as many bytes; None where nothing was timed.
        ms: median of its time.
        confirmed: whether the whole check was passed, hidden shapes and repeats included, not only the first launches.
    """

    number: int
    candidate: Candidate | None
    judgement: Judgement
    text: str = ""
    time: float | None = None
    ms: float | None = None
    change: str = ""
    confirmed: bool = False
    tokens: tuple[int, int] = (0, 0)
    dollars: float = 0.0
    at: float = 0.0  # seconds since the search began

    @property
    def ok(self) -> bool:
        return self.judgement.ok and self.candidate is not None

    @property
    def digest(self) -> str:
        return self.candidate.digest if self.candidate else digest_of(self.text)

    @property
    def source(self) -> str:
        """The text as it is kept."""
        return self.candidate.text if self.candidate else self.text


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What a proposer may know: not the oracle's values, not the hidden shapes, no seeds."""

    task: Task
    start: Candidate
    target: str  # name of a hardware profile
    templates: tuple[Candidate, ...] = ()  # kernels whose spaces a grammar searches; the start is the first

    @property
    def bases(self) -> tuple[Candidate, ...]:
        return self.templates or (self.start,)


class Proposer(Protocol):
    """Anything that proposes kernels."""

    name: str

    def propose(self, brief: Brief, history: Sequence[Attempt], count: int) -> list[Proposal]:
        """Up to `count` proposals; an empty list ends the search."""
        ...


def ranked(history: Sequence[Attempt]) -> list[Attempt]:
    """Accepted attempts, the fastest first; untimed ones in the order they came."""
    return sorted((one for one in history if one.ok), key=lambda one: (one.time or math.inf, one.number))


@dataclass
class Files:
    """Kernels that somebody puts into a folder, each proposed once.

    Args:
        folder: looked at for `*.py` and `*.cu`, in the order of their times.
        wait: seconds to wait for a first new file before the search ends.
    """

    folder: Path | str
    wait: float = 0.0
    name: str = field(default="file", init=False)
    _seen: set[tuple[str, int]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.folder = folder_of(self.folder)
        if not self.folder.is_dir():
            raise InvalidInputError(f"there is no folder {self.folder} to read kernels from")

    def propose(self, brief: Brief, history: Sequence[Attempt], count: int) -> list[Proposal]:
        """New files, at most `count`; what changed since it was read counts as new."""
        deadline = time.monotonic() + self.wait
        while True:
            found = []
            for path in folder_of(self.folder).iterdir():
                with contextlib.suppress(OSError):  # it has just been taken away
                    if path.suffix in (".py", ".cu") and path.is_file():
                        found.append((path.stat().st_mtime_ns, path.name, path))
            new = [one for one in sorted(found) if (one[1], one[0]) not in self._seen][:count]
            if new or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        made = []
        for changed, name, path in new:
            self._seen.add((name, changed))
            with contextlib.suppress(OSError), path.open("rb") as file:  # taken away, or not ours to read
                made.append(Proposal(text=file.read(1 << 17).decode(errors="replace"), note=printable(name)))
        return made


@dataclass
class Replay:
    """What a recorded run proposed, in its order: a search again from its own log, without a model.

    Args:
        folder: of the run; its `attempts.jsonl` and candidates are read.
    """

    folder: Path | str
    name: str = field(default="replay", init=False)

    def __post_init__(self) -> None:
        from .artefact import read_attempts

        self.folder = folder_of(self.folder)
        self._rows: list[dict[str, Any]] = [row for row in read_attempts(self.folder) if row["number"] > 0]

    def propose(self, brief: Brief, history: Sequence[Attempt], count: int) -> list[Proposal]:
        """The next ones."""
        from .artefact import proposal_of

        at = sum(one.number > 0 for one in history)
        made = []
        for row in self._rows[at : at + count]:
            text, _ = proposal_of(folder_of(self.folder), row)
            made.append(
                Proposal(text=text, note=row["change"], tokens=tuple(row["tokens"]), dollars=row["dollars"])
            )  # fmt: skip
        return made


def folder_of(given: object) -> Path:
    """A path, also where it is given as text.

    Raises:
        InvalidInputError: it is neither.
    """
    if not isinstance(given, str | Path):
        raise InvalidInputError(f"a folder is a path or its text, not {shown(given, 60)}")
    return Path(given)


def cost_of(history: Sequence[Attempt]) -> float:
    """Dollars spent."""
    return sum(one.dollars for one in history)


