"""Sharing one GPU among the workers of pytest-xdist: tests marked `alone` have it to themselves.

Every test of a worker holds the card while it runs, together with others; one that is marked waits until they have
ended, and they wait for it. Tests so marked come first, where there is nothing to wait for yet, and a worker that has
several of them keeps the card from one to the next. Without xdist none of this happens.

Clocks, energy and what is in the second-level cache belong to whole cards: a test that judges them needs this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

MARK = "alone"
LIMIT = 300.0  # seconds that a test waits for the card; more than any test takes, so one that hangs does not stop all
_PAUSE = 0.01
_CARD = pytest.StashKey["Card"]()


class Card:
    """A lock that many hold together or one alone, in files, so that the system lets go of it for a dead process.

    Whoever wants it passes a gate. Who waits for it alone keeps the gate meanwhile: nobody else gets in before.

    Args:
        path: of the lock; its gate lies beside.
    """

    def __init__(self, path: Path) -> None:
        self._card, self._gate = (
            os.open(one, os.O_RDWR | os.O_CREAT, 0o600) for one in (path, path.with_suffix(".gate"))
        )
        self.held: str | None = None  # "shared" or "alone"

    def take(self, *, alone: bool, seconds: float = LIMIT) -> None:
        """Hold it, and nothing else of it that was held.

        Raises:
            TimeoutError: others held it for so long.
        """
        wanted = "alone" if alone else "shared"
        if self.held == wanted:
            return
        self.give()
        deadline = time.monotonic() + seconds
        _lock(self._gate, fcntl.LOCK_EX, deadline)
        try:
            _lock(self._card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, deadline)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        self.held = wanted

    def give(self) -> None:
        """Let go of it. Forks of this process hold the same lock, so it is not enough to close the file."""
        fcntl.flock(self._card, fcntl.LOCK_UN)
        self.held = None

    def close(self) -> None:
        """Let go of it for good."""
        self.give()
        os.close(self._card)
        os.close(self._gate)


def _lock(descriptor: int, how: int, deadline: float) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            raise TimeoutError("other tests keep the card; one of them may hang")
        time.sleep(_PAUSE)


def path() -> Path | None:
    """The lock of the GPUs that this worker sees, of this run of tests; None where tests run one by one."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") if os.environ.get("PYTEST_XDIST_WORKER") else None
    if run is None:
        return None
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    seen = "".join(one if one.isalnum() else "-" for one in devices)
    return Path(tempfile.gettempdir()) / f"gpu-accel-tests-{run}-{seen[:80]}.lock"


def _marked(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker(MARK) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With xdist, tests that need the card alone come first."""
    if path() is not None:
        items.sort(key=lambda one: not _marked(one))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take the card, if the test will run."""
    if (lock := path()) is None or _skipped(item):
        return
    card = item.config.stash.get(_CARD, None)
    if card is None:
        card = item.config.stash[_CARD] = Card(lock)
    card.take(alone=_marked(item))


def _skipped(item: pytest.Item) -> bool:
    """Whether a mark skips the test, as on a machine without a GPU."""
    return any(one.args and one.args[0] is True for one in item.iter_markers("skipif"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Give it back, unless the next test needs it alone like this one."""
    try:
        return (yield)
    finally:
        card = item.config.stash.get(_CARD, None)
        if card is not None and not (_marked(item) and _marked(nextitem)):
            card.give()
