"""Searching for a faster kernel: propose, judge, time, and propose again from what became of it.

    best = optimize_kernel(my_kernel, target_hardware="h100")

The loop is that of Feature Search and Reinforcement (CUDA-LLM, arXiv:2506.09092): several candidates a round, those
that do not compile or are wrong go back with their reason, the fastest is the basis of the next. Two things differ: a
budget ends it, and the best candidate of all rounds is returned instead of that of the last.

On a GPU candidates compete in time, measured as a multiple of a copy of as many bytes. Without one they are only judged
right or wrong, nothing is ranked, and the kernel at the start stays the best if it is right.
"""

from __future__ import annotations

import inspect
import json
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_accel.errors import IncorrectResultError, InvalidInputError
from gpu_accel.hardware.catalog import profile

from .candidate import Candidate
from .harness import bench, check, read
from .launch import read_launch
from .proposers import Attempt, Grammar, Proposer, point_of, space_of
from .sandbox import Sandbox
from .tasks import Task, find
from .verdict import Rejected


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """What a search found.

    Args:
        best: the best kernel of all that were accepted; `best.text` is a file that `check` reads.
        speedup: its time over that of the kernel at the start, both as multiples of a copy; None if nothing was timed.
        timed: whether candidates competed in time.
        note: why nothing was timed, or why the search ended.
    """

    task: str
    target: str
    start: Attempt
    best: Attempt
    attempts: tuple[Attempt, ...]
    timed: bool
    speedup: float | None
    note: str

    @property
    def candidate(self) -> Candidate:
        return self.best.candidate

    @property
    def source(self) -> str:
        """The best kernel as a file."""
        return self.best.candidate.text

    @property
    def counts(self) -> dict[str, int]:
        """How many attempts had each verdict."""
        found: dict[str, int] = {}
        for one in self.attempts:
            found[one.judgement.name] = found.get(one.judgement.name, 0) + 1
        return found

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        gain = f"{self.speedup:.3g}x the kernel at the start" if self.speedup else "not timed"
        return f"{self.task} for {self.target}: {len(self.attempts)} candidates ({told}); {gain}. {self.note}"


def search(
    start: Candidate,
    task: Task,
    *,
    proposer: Proposer,
    sandbox: Sandbox,
    target: str,
    candidates: int = 20,
    seconds: float = 600.0,
    batch: int = 4,
    seed: int | None = None,
    out: Path | None = None,
    tell: Callable[[Attempt], None] | None = None,
) -> Optimized:
    """Run a proposer against the harness until a budget is spent or nothing new is proposed.

    Args:
        candidates, seconds: the budget; the kernel at the start is not counted.
        batch: candidates a round.
        seed: of the harness' inputs; None draws one for every candidate.
        out: a folder that receives every candidate and `attempts.jsonl` as they come.
        tell: called with every attempt.
    Raises:
        IncorrectResultError: the kernel at the start is not accepted.
    """
    begin = time.monotonic()
    log = _Log(out)

    def judge(candidate: Candidate, number: int, change: str) -> Attempt:
        judgement = check(candidate, task, sandbox=sandbox, seed=seed)
        taken = None
        if judgement.ok and sandbox.gpu:
            timed, taken = bench(candidate, task, sandbox=sandbox, gpu=target)
            judgement = judgement if timed.ok else timed
        made = Attempt(number=number, candidate=candidate, judgement=judgement, time=taken, change=change)
        log.add(made)
        if tell:
            tell(made)
        return made

    first = judge(start, 0, "the kernel at the start")
    if not first.ok:
        raise IncorrectResultError(f"the kernel at the start is not right: {first.judgement}")
    attempts = [first]
    seen = {start.digest}
    note = ""
    while not note:
        left = candidates - len(attempts) + 1
        if left <= 0:
            note = "The budget of candidates is spent."
            break
        proposed = [one for one in proposer.propose(start, attempts, min(batch, left)) if one.digest not in seen]
        if not proposed:
            note = "Nothing new was proposed."
        for candidate in proposed[:left]:
            if time.monotonic() - begin > seconds:
                note = f"The budget of {seconds:g} s is spent."
                break
            if candidate.digest not in seen:
                seen.add(candidate.digest)
                attempts.append(judge(candidate, len(attempts), _change(start, candidate)))
    best = min((one for one in attempts if one.ok and one.time), key=lambda one: one.time or 0.0, default=first)
    speedup = first.time / best.time if first.time and best.time else None
    if not sandbox.gpu:
        note += " There is no GPU here: candidates were judged right or wrong, and none was timed."
    return Optimized(
        task=task.name, target=target, start=first, best=best, attempts=tuple(attempts), timed=sandbox.gpu,
        speedup=speedup, note=note,
    )  # fmt: skip


def optimize_kernel(
    my_kernel: Any,
    target_hardware: str = "h100",
    *,
    task: Task | str | None = None,
    launch: Mapping[str, Any] | None = None,
    strategy: str = "evolutionary",
    proposer: Proposer | None = None,
    candidates: int = 20,
    seconds: float = 600.0,
    seed: int = 0,
    out: Path | str | None = None,
    sandbox: Sandbox | None = None,
    tell: Callable[[Attempt], None] | None = None,
) -> Optimized:
    """Search for a faster version of a Triton kernel, with every candidate checked against a float64 oracle.

    Args:
        my_kernel: a candidate file (path or text, with its launch header), a `Candidate`, or a `@triton.jit` function,
            whose launch is then given as `launch`.
        target_hardware: a GPU with a profile, such as "h100"; times are taken if the GPU here is of its architecture.
        task: what the kernel computes, by name or as a `Task`; the header's `task` if not given.
        launch: launch spec of a function, with the fields of the header.
        strategy: of the grammar, "evolutionary" or "random".
        proposer: something else than the grammar.
        candidates, seconds: the budget.
        seed: of the proposals.
        out: a folder for candidates and the log.
    Returns:
        The best kernel of all accepted ones, and every attempt with its verdict.
    Raises:
        InvalidInputError: the kernel is no candidate, or its task is not named.
        IncorrectResultError: the kernel does not compute what the task says.
        HardwareError: no sandbox can be made here.
    """
    target = profile(target_hardware)
    candidate = as_candidate(my_kernel, launch)
    named = task or candidate.launch.task
    if not named:
        raise InvalidInputError('say what the kernel computes: task="softmax", or `task = ...` in the launch header')
    chosen = find(named) if isinstance(named, str) else named
    if candidate.language != "triton":
        raise InvalidInputError("the grammar edits Triton kernels; CUDA C++ is only compiled and checked so far")
    folder = Path(out) if out is not None else None
    arguments: dict[str, Any] = {
        "proposer": proposer or Grammar(strategy, seed), "target": target.name, "candidates": candidates,
        "seconds": seconds, "out": folder, "tell": tell,
    }  # fmt: skip
    if sandbox is not None:
        return search(candidate, chosen, sandbox=sandbox, **arguments)
    with Sandbox(gpu=_here(target.architecture), seconds=60) as own:
        return search(candidate, chosen, sandbox=own, **arguments)


def as_candidate(kernel: Any, launch: Mapping[str, Any] | None = None) -> Candidate:
    """A candidate from a file, its text, or a Triton function with a launch spec.

    Raises:
        InvalidInputError: it is none of these.
    """
    try:
        if isinstance(kernel, Candidate):
            return kernel
        if isinstance(kernel, Path):
            return Candidate.parse(read(kernel))
        if isinstance(kernel, str | bytes):
            return Candidate.parse(kernel)
        function = getattr(kernel, "fn", None)
        if inspect.isfunction(function):
            if launch is None:
                raise InvalidInputError("a Triton function needs launch={'grid': [...], 'constants': {...}}")
            return Candidate(textwrap.dedent(inspect.getsource(function)), read_launch(launch), "triton")
    except Rejected as rejected:
        raise InvalidInputError(f"this is no candidate: {rejected.detail}") from rejected
    raise InvalidInputError(f"a {type(kernel).__name__} is no kernel; give a file, its text or a @triton.jit function")


def _here(architecture: str) -> bool:
    """Whether this machine has a GPU of that architecture."""
    from gpu_accel.hardware.detection import detect

    found = detect()
    return found is not None and found.profile is not None and found.profile.architecture == architecture


def _change(start: Candidate, candidate: Candidate) -> str:
    if start.source != candidate.source:
        return "other source"
    space = space_of(start)
    before, after = point_of(start, space), point_of(candidate, space)
    return ", ".join(f"{name} {before[name]} -> {value}" for name, value in after.items() if value != before[name])


class _Log:
    """Every attempt on disk as it comes, if a folder is given."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, attempt: Attempt) -> None:
        if self.folder is None:
            return
        name = f"{attempt.number:04d}-{attempt.candidate.digest}.py"
        (self.folder / name).write_text(attempt.candidate.text, encoding="utf-8")
        row = {"number": attempt.number, "file": name, "change": attempt.change, "time": attempt.time}
        with (self.folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | attempt.judgement.as_dict()) + "\n")
