"""Searching for a faster kernel: propose, compile, validate, profile, and propose again from what became of it.

    best = optimize_kernel(my_kernel, target_hardware="h100")

The loop is that of Feature Search and Reinforcement (CUDA-LLM, arXiv:2506.09092): N candidates a round, D rounds;
those that do not compile or are wrong go back with their reason, the fastest is the basis of the next. Two things
differ: a budget ends it, and the best candidate of all rounds is returned instead of that of the last.

On a GPU every candidate is first launched on the shapes that are shown and timed on a large one, where outputs of
timed launches are compared; time is a multiple of a copy of as many bytes. Then the fastest go through the whole
check, hidden shapes and repeats included, until one passes, and so does its last timing: only such a one is `best`.
Without a GPU candidates are judged right or wrong, nothing is ranked, and the kernel at the start stays the best if it
is right.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec

from gpu_accel.errors import IncorrectResultError, InvalidInputError, shown
from gpu_accel.hardware.catalog import profile

from .artefact import Artefact, attempts_of, environment, holds_search, host, make_folder, read_run
from .candidate import Candidate
from .folders import held
from .grammar import Grammar
from .harness import check, read
from .launch import read_launch
from .measure import PEERS, Measured, measure
from .models import Model, ModelError
from .pool import Pool
from .proposers import Attempt, Brief, Proposal, Proposer, cost_of, folder_of, ranked
from .sandbox import Sandbox
from .sanitizer import sanitize
from .tasks import Task, find
from .verdict import Judgement, Rejected, Verdict

P = ParamSpec("P")

SCREEN_SECONDS, SCREEN_ROUNDS, SCREEN_KEPT = 0.04, 16, 1
_SUFFIXES = (".py", ".cu", ".txt")  # a line that ends in one is a path, not a source
SCREEN_LIMIT = 30.0  # wall clock of one candidate, waiting for the GPU included
MOST_CONFIRMATIONS = 5
MOST_FINALS = 3  # kernels that are timed again until one passes; the last is that at the start
MOST_STALE = 3  # rounds without anything new before a search ends


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What ends a search, whichever is first; None is no limit.

    Args:
        candidates: proposals judged, the kernel at the start not counted.
        seconds: wall clock.
        dollars: what language models cost, where prices are known.
        depth: rounds, the D of the paper.
        batch: proposals a round, its N.
    """

    candidates: int | None = 20
    seconds: float | None = 600.0
    dollars: float | None = None
    depth: int | None = None
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("candidates", "seconds", "dollars", "depth", "batch"):
            value = getattr(self, name)
            if value is None and name != "batch":
                continue
            kinds = (int, float) if name in ("seconds", "dollars") else (int,)
            if type(value) not in kinds or not value > 0:
                what = "number" if len(kinds) > 1 else "whole number"
                raise InvalidInputError(f"{name} is {shown(value)}; it must be a positive {what}")

    def as_dict(self) -> dict[str, Any]:
        return {"candidates": self.candidates, "seconds": self.seconds, "dollars": self.dollars, "depth": self.depth,
                "batch": self.batch}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """What a search found.

    Args:
        best: the fastest kernel that passed the whole check.
        final: its times in a process of its own after the search, with baselines where they were asked for.
        baselines: verdicts of the whole check on the baselines that are kernels.
        speedup: time of the kernel at the start over that of the best, both as multiples of a copy; None if untimed.
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
    final: Measured | None = field(default=None, repr=False)
    baselines: Mapping[str, Judgement] = field(default_factory=dict, repr=False)

    @property
    def candidate(self) -> Candidate:
        assert self.best.candidate
        return self.best.candidate

    @property
    def source(self) -> str:
        """The best kernel as a file."""
        return self.candidate.text

    @property
    def counts(self) -> dict[str, int]:
        """How many attempts had each verdict."""
        found: dict[str, int] = {}
        for one in self.attempts:
            found[one.judgement.name] = found.get(one.judgement.name, 0) + 1
        return found

    @property
    def dollars(self) -> float:
        return cost_of(self.attempts)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        gain = f"{self.speedup:.3g}x the kernel at the start" if self.speedup else "not timed"
        for name in ("naive", "library", "compiled"):
            if self.final and (ratio := self.final.ratio(name)):
                gain += f", {ratio:.3g}x {name}"
        tried = f"{len(self.attempts)} candidate{'s' if len(self.attempts) > 1 else ''}"
        return f"{self.task} for {self.target}: {tried} ({told}); {gain}. {self.note}"


class _Search:
    """The state of one search."""

    def __init__(self, brief: Brief, pool: Pool, budget: Budget, artefact: Artefact, *, seed: int | None,
                 tell: Callable[[Attempt], None] | None, deadline: float | None) -> None:  # fmt: skip
        self.brief, self.pool, self.budget, self.artefact = brief, pool, budget, artefact
        self.seed, self.tell, self.deadline = seed, tell, deadline
        self.begin = time.monotonic()
        self.attempts: list[Attempt] = []
        self.wasted = 0.0

    def judged(self, sandbox: Sandbox, proposal: Proposal, number: int, *, whole: bool) -> Attempt:
        """Parse, check, time."""
        candidate, measured = None, None
        try:
            candidate = Candidate.parse(proposal.text)
            judgement = Judgement(verdict=Verdict.ACCEPTED)
            if whole or not self.pool.gpu:
                judgement = self.confirmed(sandbox, candidate)
            if judgement.ok and self.pool.gpu:
                measured = measure(
                    candidate, self.brief.task, sandbox=sandbox, gpu=self.brief.target, screen=not whole,
                    seconds=SCREEN_SECONDS, rounds=SCREEN_ROUNDS, keep=SCREEN_KEPT, lock=self.pool.lock,
                    limit=SCREEN_LIMIT,
                )  # fmt: skip
                judgement = screened(measured, judgement if whole else None)
        except Rejected as rejected:
            judgement = rejected.judgement
        timed = measured is not None and judgement.ok
        return Attempt(
            number=number, candidate=candidate, text=proposal.text, judgement=judgement, change=proposal.note,
            time=measured.over_copy if measured and timed else None, ms=measured.ms if measured and timed else None,
            confirmed=judgement.ok and (whole or not self.pool.gpu), tokens=proposal.tokens, dollars=proposal.dollars,
            at=time.monotonic() - self.begin,
        )  # fmt: skip

    def checked(self, sandbox: Sandbox, candidate: Candidate) -> Judgement:
        """The whole check."""
        return check(candidate, self.brief.task, sandbox=sandbox, seed=self.seed)

    def confirmed(self, sandbox: Sandbox, candidate: Candidate) -> Judgement:
        """The whole check and, on a GPU, compute-sanitizer: what the best must pass."""
        judged = self.checked(sandbox, candidate)
        return sanitize(candidate, self.brief.task, sandbox=sandbox, judged=judged)

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.artefact.add(attempt)
        if self.tell:
            self.tell(attempt)

    def replace(self, attempt: Attempt) -> None:
        self.attempts[attempt.number] = attempt
        self.artefact.add(attempt)

    def spent(self, more: float = 0.0) -> str:
        """Which budget is used up, after `more` dollars; "" when none is."""
        budget = self.budget
        if budget.candidates is not None and len(self.attempts) - 1 >= budget.candidates:
            return "The budget of candidates is spent."
        if self.slow():
            return f"The budget of {budget.seconds:g} s is spent."
        if self.late():
            return "The budget of all searches is spent."
        if budget.dollars is not None and self.cost + more >= budget.dollars:
            return f"The budget of {budget.dollars:g} dollars is spent."
        return ""

    def rounds(self, proposer: Proposer) -> str:
        """Propose and judge until something ends it; returns what did."""
        seen = {one.digest for one in self.attempts}
        depth = stale = 0
        while not (note := self.spent()):
            if self.budget.depth is not None and depth >= self.budget.depth:
                return f"{depth} rounds are over."
            depth += 1
            left = self.budget.candidates - len(self.attempts) + 1 if self.budget.candidates else self.budget.batch
            try:
                proposed = self.proposed(proposer, min(self.budget.batch, left))
            except ModelError as error:
                if len(self.attempts) == 1:
                    raise
                return f"The model failed: {error}"
            fresh: list[Proposal] = []
            for one in proposed[: max(left, 0)]:
                if (digest := _digest(one)) not in seen:
                    seen.add(digest)
                    fresh.append(one)
                else:
                    self.wasted += one.dollars
            stale = 0 if fresh else stale + 1
            if not proposed or stale == MOST_STALE:
                return "Nothing new was proposed."
            number = len(self.attempts)
            waiting = [
                self.pool.submit(functools.partial(self.in_time, proposal=one, number=number + at))
                for at, one in enumerate(fresh)
            ]
            for future in waiting:
                if attempt := future.result():
                    self.add(replace(attempt, number=len(self.attempts)))
        return note

    def in_time(self, sandbox: Sandbox, proposal: Proposal, number: int) -> Attempt | None:
        """`judged`; None where time was over before its turn came, behind others of a large batch."""
        if self.late() or self.slow():
            return None
        return self.judged(sandbox, proposal, number, whole=False)

    def late(self) -> bool:
        """Whether the time of all searches is over."""
        return self.deadline is not None and time.monotonic() > self.deadline

    def slow(self) -> bool:
        """Whether the time of this search is over."""
        return self.budget.seconds is not None and time.monotonic() - self.begin > self.budget.seconds

    def proposed(self, proposer: Proposer, count: int) -> list[Proposal]:
        """A round's proposals; of a model one by one, so that its time and its money are passed by no more than one."""
        if not isinstance(proposer, Model) and self.budget.dollars is None:
            return _proposals(proposer, proposer.propose(self.brief, self.attempts, count))
        made: list[Proposal] = []
        while len(made) < count and not (made and self.spent(sum(one.dollars for one in made))):
            try:
                more = _proposals(proposer, proposer.propose(self.brief, self.attempts, 1))
            except ModelError:
                if not made:
                    raise
                break
            if not more:
                break
            made += more
        return made

    @property
    def cost(self) -> float:
        """Dollars, for what was proposed twice too."""
        return cost_of(self.attempts) + self.wasted

    def confirm(self, only: Attempt | None = None) -> Attempt | None:
        """The fastest attempt that passes the whole check, or `only` if it does; those that do not are set right."""
        for _ in range(MOST_CONFIRMATIONS):
            best = only if only else next(iter(ranked(self.attempts)), None)
            if best is None or best.confirmed or not best.ok:
                return best if best and best.ok else None
            assert best.candidate is not None
            work = functools.partial(self.confirmed, candidate=best.candidate)
            judgement = self.pool.submit(work, urgent=True).result()
            judgement = replace(judgement, verified_by=(*judgement.verified_by, *best.judgement.verified_by))
            self.replace(replace(best, judgement=judgement, confirmed=judgement.ok))
            only = self.attempts[only.number] if only else None
        return next((one for one in ranked(self.attempts) if one.confirmed), None)


def _proposals(proposer: Proposer, made: object) -> list[Proposal]:
    """What a proposer, perhaps somebody else's, returned."""
    if not isinstance(made, list | tuple) or not all(isinstance(one, Proposal) for one in made):
        raise InvalidInputError(f"{proposer.name} must propose a list of Proposal, not {shown(made, 60)}")
    for one in made:
        if not (isinstance(one.text, str) and isinstance(one.note, str) and 0 <= one.dollars < math.inf):
            raise InvalidInputError(f"{proposer.name} proposes text, a note and a price that are none: {shown(one)}")
    # half a surrogate pair can be kept in no file
    return [replace(one, text=one.text.encode("utf-8", "replace").decode()) for one in made]


def screened(measured: Measured, whole: Judgement | None) -> Judgement:
    """The verdict of timed launches and, where there was one, of the whole check."""
    if not measured.judgement.ok:
        return measured.judgement
    passed = (f"outputs of {measured.compared} timed launches", *measured.judgement.verified_by)
    return replace(whole or measured.judgement, verified_by=(*(whole.verified_by if whole else ()), *passed))


def _digest(proposal: Proposal) -> str:
    try:
        return Candidate.parse(proposal.text).digest
    except Rejected:
        return proposal.digest


def _alone(work: Callable[P, Optimized]) -> Callable[P, Optimized]:
    """Keep the folder of a search from other searches while it runs."""

    @functools.wraps(work)
    def held_by_one(*given: P.args, **more: P.kwargs) -> Optimized:
        out, resume = more.get("out"), bool(more.get("resume"))
        task = given[1] if len(given) > 1 else more["task"]
        assert isinstance(task, Task) and (out is None or isinstance(out, Path))
        check_out(out, task, resume=resume, target=str(more["target"]))
        with held(out):
            check_out(out, task, resume=resume, target=str(more["target"]))  # another may just have ended there
            return work(*given, **more)

    return held_by_one


@_alone
def search(
    start: Candidate,
    task: Task,
    *,
    proposer: Proposer,
    pool: Pool,
    target: str,
    budget: Budget | None = None,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    peers: Sequence[str] = (),
    final_seconds: float = 0.25,
    templates: Sequence[Candidate] = (),
    whole_start: bool = True,
    deadline: float | None = None,
    searched: Callable[[], None] | None = None,
    tell: Callable[[Attempt], None] | None = None,
) -> Optimized:
    """Run a proposer against the harness until a budget is spent or nothing new is proposed.

    Args:
        seed: of the harness' inputs; None draws one for every candidate.
        out: a folder that receives everything, see `artefact.py`.
        resume: go on from what is in `out`.
        peers: baselines timed with the best kernel at the end, of `measure.PEERS`.
        final_seconds: timing budget of each of these.
        templates: kernels of other structure that a grammar may vary, besides the start.
        whole_start: put the kernel at the start through the whole check at once, not only if it turns out the best.
        deadline: of `time.monotonic()`, after which nothing new is proposed.
        searched: called before the best kernel is timed again; what it waits for, the final timing waits for.
        tell: called with every attempt.
    Raises:
        IncorrectResultError: the kernel at the start is not accepted.
        InvalidInputError: there is nothing to resume, it is another task's, kernel's or machine's, `out` holds a search
            and `resume` is not set, or another search is at work there.
    """
    budget = budget or Budget()
    earlier = _earlier(_resumable(out, task, target), start, gpu=pool.gpu) if resume else []
    artefact = Artefact(out)
    brief = Brief(task=task, start=start, target=target, templates=_distinct(start, templates))
    one = _Search(brief, pool, budget, artefact, seed=seed, tell=tell, deadline=deadline)
    one.attempts = earlier
    if resume and out is not None:
        one.wasted = max(0.0, read_run(out).get("dollars", 0.0) - cost_of(earlier))
    if not resume:
        artefact.begin(
            task=task.name, target=target, proposer=proposer.name, budget=budget.as_dict(), start=start.digest,
            sandbox=pool.described, gpu=pool.gpu, host=host() if pool.gpu else None,
        )  # fmt: skip
    if not one.attempts:
        first = Proposal(text=start.text, note="the kernel at the start")
        one.add(pool.submit(lambda sandbox: one.judged(sandbox, first, 0, whole=whole_start)).result())
    if not one.attempts[0].ok:
        raise IncorrectResultError(f"the kernel at the start is not right: {one.attempts[0].judgement}")
    if hasattr(proposer, "record"):
        proposer.record = artefact.say
    note = one.rounds(proposer)
    first_ = one.attempts[0]
    best = (one.confirm() if pool.gpu else None) or first_
    final, baselines = None, {}
    if pool.gpu:
        assert best.candidate is not None
        if not best.confirmed:
            raise IncorrectResultError(f"no kernel passes the whole check: {one.attempts[0].judgement}")
        checks = {name: pool.submit(functools.partial(one.checked, candidate=kernel), urgent=True)
                  for name, kernel in (("naive", task.naive), ("start", task.candidate)) if name in peers}  # fmt: skip
        if searched:
            searched()
        for tries in range(MOST_FINALS):
            assert best is not None and best.candidate is not None
            final = pool.submit(
                functools.partial(
                    _measured, candidate=best.candidate, task=task, gpu=target, peers=tuple(peers), keep=4,
                    lock=pool.lock, seconds=final_seconds, warm=True, again=True,
                ),
                urgent=True,
            ).result()  # fmt: skip
            if final.judgement.ok:
                break
            one.replace(replace(best, judgement=final.judgement, confirmed=False))  # such as wrong on other inputs
            if (following := one.confirm(one.attempts[0] if tries == MOST_FINALS - 2 else None)) is None:
                break
            best = following
        baselines = {name: future.result() for name, future in checks.items()}
        if not final or not final.judgement.ok:
            why = final.judgement if final else "nothing was timed"
            raise IncorrectResultError(f"the best kernel did not pass when it was timed again: {why}")
    else:
        note += " There is no GPU here: candidates were judged right or wrong, and none was timed."
    speedup = first_.time / best.time if first_.time and best.time else None
    assert best.candidate is not None
    artefact.best(best.candidate)
    artefact.end(
        best=best.digest, speedup_over_start=speedup, note=note, final=final.as_dict() if final else None,
        baselines={name: judged.as_dict() for name, judged in baselines.items()},
        attempts=len(one.attempts), seconds=round(time.monotonic() - one.begin, 3), dollars=one.cost,
    )  # fmt: skip
    return Optimized(
        task=task.name, target=target, start=first_, best=best, attempts=tuple(one.attempts), timed=pool.gpu,
        speedup=speedup, note=note, final=final, baselines=baselines,
    )  # fmt: skip


def check_out(out: Path | None, task: Task, *, resume: bool, target: str = "") -> None:
    """Make the folder of a search, unless it may not go there: one that holds a search is gone on with, or left alone.

    Args:
        target: the GPU that the search is for; one for another is not gone on with, since its times are other times.

    Raises:
        InvalidInputError: there is nothing to resume, or something that a new search would be mixed with, or the folder
            cannot be made.
    """
    if resume:
        _resumable(out, task, target)
    elif out is not None:
        make_folder(out)
        if not holds_search(out):
            return
        raise InvalidInputError(f"{out} holds a search already: go on with it (--resume, or resume=True), or name "
                                "another folder")  # fmt: skip


def _resumable(out: Path | None, task: Task, target: str) -> Path:
    if out is None:
        raise InvalidInputError("resuming needs the folder of the search: --folder FOLDER, or out=FOLDER")
    kept = read_run(out)
    if kept.get("task") != task.name:
        raise InvalidInputError(f"there is no search for {task.name} in {out} to go on from")
    if target and kept.get("target") != target:
        raise InvalidInputError(f"the search in {out} is for {shown(kept.get('target'), 40)}, not for {target}")
    return out


def _earlier(out: Path, start: Candidate, *, gpu: bool) -> list[Attempt]:
    """The attempts to go on from. What was confirmed elsewhere, or edited since, is confirmed here before it is best.

    Raises:
        InvalidInputError: it began with another kernel, or on another machine, whose times are other times.
    """
    kept = read_run(out)
    if kept.get("start", start.digest) != start.digest:
        raise InvalidInputError(f"the search in {out} began with another kernel: go on from that one, or name another "
                                "folder")  # fmt: skip
    there, here = (timed and (found.get("gpu") or "a GPU") for timed, found in (
        (kept.get("gpu", gpu), kept["environment"]), (gpu, environment())))  # fmt: skip
    if there != here:
        raise InvalidInputError(f"the search in {out} ran {_on(there)}, and this would run {_on(here)}: begin one in "
                                "another folder, or judge its best kernel here with `optimize bench`")  # fmt: skip
    return [replace(one, confirmed=one.confirmed and not gpu) for one in attempts_of(out)]


def _on(gpu: object) -> str:
    return f"on {shown(gpu, 60)}" if gpu else "without a GPU"


def _measured(sandbox: Sandbox, candidate: Candidate, task: Task, **more: Any) -> Measured:
    return measure(candidate, task, sandbox=sandbox, **more)


def _distinct(start: Candidate, templates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    kept = {start.digest: start}
    for one in templates:
        kept.setdefault(one.digest, one)
    return tuple(kept.values())


def optimize_kernel(
    my_kernel: Any,
    target_hardware: str = "h100",
    *,
    task: Task | str | None = None,
    launch: Mapping[str, Any] | None = None,
    strategy: str = "evolutionary",
    proposer: Proposer | None = None,
    candidates: int | None = 20,
    seconds: float | None = 600.0,
    dollars: float | None = None,
    depth: int | None = None,
    batch: int = 4,
    seed: int = 0,
    out: Path | str | None = None,
    resume: bool = False,
    peers: Sequence[str] = (),
    sandbox: Sandbox | None = None,
    pool: Pool | None = None,
    tell: Callable[[Attempt], None] | None = None,
) -> Optimized:
    """Search for a faster version of a kernel, with every candidate checked against a float64 oracle.

    Args:
        my_kernel: a candidate file (path or text, in Triton or CUDA C++, with its launch header), a `Candidate`, or a
            `@triton.jit` function, whose launch is then given as `launch`.
        target_hardware: a GPU with a profile, such as "h100"; times are taken if the GPU here is of its architecture.
        task: what the kernel computes, by name or as a `Task`; the header's `task` if not given.
        launch: launch spec of a function, with the fields of the header.
        strategy: of the grammar, one of `grammar.STRATEGIES`.
        proposer: something else than the grammar.
        candidates, seconds, dollars, depth, batch: the budget, see `Budget`.
        seed: of the grammar's proposals.
        out, resume: a folder for candidates and the log, and whether to go on from what is there.
        peers: baselines to time with the best kernel, of "library", "compiled", "naive", "start".
    Returns:
        The best kernel of all accepted ones, and every attempt with its verdict.
    Raises:
        InvalidInputError: the kernel is no candidate, or its task is not named.
        IncorrectResultError: the kernel does not compute what the task says.
        HardwareError: no sandbox can be made here.
    """
    target = profile(target_hardware)
    candidate = as_candidate(my_kernel, launch)
    if unknown := [one for one in peers if one not in PEERS]:
        raise InvalidInputError(f"peers has {shown(unknown[0], 40)}; choose from {', '.join(PEERS)}")
    if task and not isinstance(task, Task | str):
        raise InvalidInputError(f"task is {shown(task, 60)}; it is a Task or the name of one")
    if proposer is not None and not (hasattr(proposer, "propose") and hasattr(proposer, "name")):
        raise InvalidInputError(f"proposer is {shown(proposer, 60)}; it has a name and a method propose")
    named = task or candidate.launch.task
    if not named:
        raise InvalidInputError('say what the kernel computes: task="softmax", or `task = ...` in the launch header')
    chosen = find(named) if isinstance(named, str) else named
    if candidate.language == "cuda" and not gpu_here(target.architecture):
        raise InvalidInputError("CUDA C++ runs on a GPU only, and there is none of that kind here; Triton's kernels "
                                "can be checked without one")  # fmt: skip
    arguments: dict[str, Any] = {
        "proposer": proposer or Grammar(strategy, seed), "target": target.name, "resume": resume, "peers": peers,
        "budget": Budget(candidates=candidates, seconds=seconds, dollars=dollars, depth=depth, batch=batch),
        "out": folder_of(out) if out is not None else None, "tell": tell,
        "templates": [one for one in chosen.templates[1:] if one.language == "triton" or gpu_here(target.architecture)],
    }  # fmt: skip
    check_out(arguments["out"], chosen, resume=resume, target=target.name)
    if pool is not None:
        return search(candidate, chosen, pool=pool, **arguments)
    own = (sandbox,) if sandbox is not None else ()
    with Pool(gpu=gpu_here(target.architecture), own=own) as made:
        return search(candidate, chosen, pool=made, **arguments)


def as_candidate(kernel: Any, launch: Mapping[str, Any] | None = None) -> Candidate:
    """A candidate from a file, its text, or a Triton function with a launch spec.

    Raises:
        InvalidInputError: it is none of these.
    """
    function = getattr(kernel, "fn", None)
    if launch is not None and not inspect.isfunction(function):
        raise InvalidInputError("launch is for a @triton.jit function; a file says in its header how it is launched")
    try:
        if isinstance(kernel, Candidate):
            return kernel
        if isinstance(kernel, Path):
            return Candidate.parse(read(kernel))
        if isinstance(kernel, str) and "\n" not in kernel and kernel.endswith(_SUFFIXES):
            return Candidate.parse(read(Path(kernel)))
        if isinstance(kernel, str | bytes):
            return Candidate.parse(kernel)
        if inspect.isfunction(function):
            if launch is None:
                raise InvalidInputError("a Triton function needs launch={'grid': [...], 'constants': {...}}")
            return Candidate(textwrap.dedent(inspect.getsource(function)), read_launch(launch), "triton")
    except Rejected as rejected:
        raise InvalidInputError(f"this is no candidate: {rejected.detail}") from rejected
    raise InvalidInputError(f"a {type(kernel).__name__} is no kernel; give a file, its text or a @triton.jit function")


def gpu_here(architecture: str) -> bool:
    """Whether this machine has a GPU of that architecture."""
    from gpu_accel.hardware.detection import detect

    found = detect()
    return found is not None and found.profile is not None and found.profile.architecture == architecture
