"""Several sandboxes side by side: candidates compile in parallel, and a file lock lets one at a time be timed."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .sandbox import Sandbox

T = TypeVar("T")
MOST_WORKERS = 26


class Pool:
    """Sandboxes that are lent one job at a time.

    Args:
        workers: how many; by default two fewer than processors with a GPU, at most MOST_WORKERS, and one without.
        gpu: as of `Sandbox`.
        seconds: wall clock of a job, waiting for the GPU included.
        own: sandboxes to use instead of new ones; they are not closed.
    """

    def __init__(
        self, workers: int | None = None, *, gpu: bool = False, seconds: float = 60.0, own: tuple[Sandbox, ...] = ()
    ) -> None:
        count = workers or (max(min((os.cpu_count() or 1) - 2, MOST_WORKERS), 1) if gpu else 1)
        self.gpu = own[0].gpu if own else gpu
        self._own = own
        self._all = list(own) or [Sandbox(gpu=gpu, seconds=seconds) for _ in range(count)]
        self._idle: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(len(self._all), "candidates")
        self._urgent = ThreadPoolExecutor(len(self._all), "winners")
        handle, name = tempfile.mkstemp(prefix="gpu-accel-lock-")
        os.fchmod(handle, 0o644)
        os.close(handle)
        self.lock: Path | None = Path(name)
        self._removed = weakref.finalize(self, Path(name).unlink, missing_ok=True)  # also if it is never entered

    @property
    def workers(self) -> int:
        return len(self._all)

    @property
    def described(self) -> str:
        """The isolation of every sandbox."""
        return self._all[0].described

    @property
    def restarts(self) -> int:
        """How often workers had to be replaced."""
        return sum(max(one.restarts, 0) for one in self._all)

    def __enter__(self) -> Pool:
        try:
            for one, started in [(one, self._threads.submit(self._started, one)) for one in self._all]:
                started.result()
                self._idle.put(one)
        except BaseException:  # one does not start: those that do are ended
            self.__exit__(None, None, None)
            raise
        return self

    def _started(self, sandbox: Sandbox) -> None:
        if not self._own:
            sandbox.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._urgent.shutdown(cancel_futures=True)
        if not self._own:
            for one in self._all:
                one.close()
        self._removed()

    def stop(self) -> None:
        """End everything that runs in sandboxes of its own: whoever waits for it gets an error at once."""
        for one in () if self._own else self._all:
            one.stop()

    @contextlib.contextmanager
    def one(self) -> Iterator[Sandbox]:
        """A sandbox for one job."""
        sandbox = self._idle.get()
        try:
            yield sandbox
        finally:
            self._idle.put(sandbox)

    def submit(self, work: Callable[[Sandbox], T], *, urgent: bool = False) -> Future[T]:
        """Run `work(sandbox)` in a thread, as soon as a sandbox is idle; urgent work passes what is queued."""

        def lent() -> T:
            with self.one() as sandbox:
                return work(sandbox)

        return (self._urgent if urgent else self._threads).submit(lent)
