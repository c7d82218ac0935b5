"""Several searches at once, and kernels verified together: everything that shares one GPU and one pool of sandboxes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from .candidate import Candidate
from .grammar import Grammar
from .harness import check
from .measure import Measured, measure
from .pool import Pool
from .proposers import Attempt, Proposer
from .sandbox import Sandbox
from .sanitizer import sanitize
from .search import Budget, Optimized, check_out, screened, search
from .tasks import Task


class _Stopped(Exception):
    """All searches were interrupted."""


class _Together:
    """Lets searches wait for each other: torch.compile, which the last timing begins with, keeps others from timing."""

    def __init__(self, count: int) -> None:
        self._left, self._condition = count, threading.Condition()

    def one(self) -> Callable[[], None]:
        """What one of them calls, once or more often, when it has searched."""
        pending = [True]

        def arrived() -> None:
            with self._condition:
                if pending:
                    pending.clear()
                    self._left -= 1
                    self._condition.notify_all()

        return arrived

    def wait(self, arrived: Callable[[], None]) -> None:
        """Arrive, and go on when all have."""
        arrived()
        with self._condition:
            self._condition.wait_for(lambda: self._left <= 0)


def search_all(
    tasks: Sequence[Task],
    *,
    pool: Pool,
    target: str,
    seconds: float,
    reserve: float = 0.35,
    strategy: str = "evolutionary",
    proposer: Callable[[Task], Proposer] | None = None,
    candidates: int | None = None,
    seed: int = 0,
    batch: int = 4,
    out: Path | None = None,
    peers: Sequence[str] = ("library", "compiled", "naive"),
    final_seconds: float = 0.25,
    tell: Callable[[str, Attempt], None] | None = None,
    done: Callable[[str, Optimized | Exception], None] | None = None,
) -> dict[str, Optimized | Exception]:
    """Search for all tasks at once: candidates of all compile side by side, and are timed one after the other.

    Args:
        seconds: wall clock of everything; `reserve` is the part of it kept for checking and timing the best again.
        proposer: made for each task; by default a grammar.
    Returns:
        What was found, or the error that ended the search, for each task.
    Raises:
        InvalidInputError: `out` holds a search for one of the tasks already.
    """
    for each in tasks if out else ():
        check_out(out / each.name if out else None, each, resume=False)
    deadline = time.monotonic() + seconds * (1 - reserve)
    together, stopped = _Together(len(tasks)), threading.Event()

    def told(task: Task, attempt: Attempt) -> None:
        if stopped.is_set():
            raise _Stopped
        if tell:
            tell(task.name, attempt)

    def one(task: Task) -> Optimized | Exception:
        arrived = together.one()
        try:
            found: Optimized | Exception = search(
                task.candidate, task, proposer=proposer(task) if proposer else Grammar(strategy, seed), pool=pool,
                target=target, budget=Budget(candidates=candidates, seconds=seconds, batch=batch), peers=peers,
                final_seconds=final_seconds, whole_start=False,
                out=out / task.name if out else None, deadline=deadline, searched=lambda: together.wait(arrived),
                templates=[kernel for kernel in task.templates if kernel.language == "triton" or pool.gpu],
                tell=functools.partial(told, task),
            )  # fmt: skip
        except Exception as error:  # one search that fails leaves the others alone
            found = error
        arrived()
        if done:
            done(task.name, found)
        return found

    with ThreadPoolExecutor(max(len(tasks), 1), "search") as threads:
        try:
            return dict(zip((task.name for task in tasks), threads.map(one, tasks), strict=True))
        except BaseException:  # Ctrl-C: no search goes on to its own end, which may be minutes away
            stopped.set()
            pool.stop()  # nor does a job that it waits for
            raise


def verify(
    kernels: Sequence[tuple[Task, Candidate]], *, target: str, peers: Sequence[str] = ("library", "compiled", "naive"),
    seconds: float = 0.25, keep: int = 4, pool: Pool | None = None,
) -> list[Measured]:  # fmt: skip
    """The whole check and the times of kernels, each in processes of its own; the verdict is that of both.

    Args:
        pool: where they run; a new one, if not given.
    Raises:
        HardwareError: there is no GPU.
    """
    if pool is None:
        with Pool(gpu=True) as own:
            return verify(kernels, target=target, peers=peers, seconds=seconds, keep=keep, pool=own)
    waiting = [verifying(kernel, task, target=target, peers=peers, seconds=seconds, keep=keep, pool=pool)
               for task, kernel in kernels]  # fmt: skip
    return [future.result() for future in waiting]


def verifying(
    kernel: Candidate, task: Task, *, target: str, peers: Sequence[str], seconds: float, keep: int, pool: Pool
) -> Future[Measured]:
    """`verify` of one kernel, which goes on while others do."""

    def one(sandbox: Sandbox) -> Measured:
        judgement = sanitize(kernel, task, sandbox=sandbox, judged=check(kernel, task, sandbox=sandbox))
        if not judgement.ok:
            return Measured(judgement=judgement)
        found = measure(kernel, task, sandbox=sandbox, gpu=target, peers=peers, seconds=seconds, keep=keep, warm=True,
                        again=True, lock=pool.lock)  # fmt: skip
        return replace(found, judgement=screened(found, judgement))

    return pool.submit(one)
