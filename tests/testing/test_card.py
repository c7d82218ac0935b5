"""How workers of pytest-xdist share a GPU: the lock by itself, then a run of tests under it, without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl")
from tests.gpu.card import Card  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_many_together_or_one_alone(tmp_path: Path) -> None:
    first, second, third = (Card(tmp_path / "card.lock") for _ in range(3))
    first.take(alone=False)
    second.take(alone=False, seconds=0)
    with pytest.raises(TimeoutError, match="keep the card"):
        third.take(alone=True, seconds=0.05)
    second.take(alone=False, seconds=0)  # who gave up lets others in
    first.give()
    second.give()
    third.take(alone=True, seconds=0)
    for other, alone in ((first, False), (second, True)):
        with pytest.raises(TimeoutError):
            other.take(alone=alone, seconds=0.05)
    third.take(alone=False)
    first.take(alone=False, seconds=0)


def test_who_waits_for_it_alone_comes_before_those_who_ask_later(tmp_path: Path) -> None:
    early, late, writer = (Card(tmp_path / "card.lock") for _ in range(3))
    early.take(alone=False)
    order: list[str] = []

    def take(card: Card, alone: bool, name: str) -> None:
        card.take(alone=alone, seconds=20)
        order.append(name)
        card.give()

    waiting = threading.Thread(target=take, args=(writer, True, "alone"))
    waiting.start()
    with (tmp_path / "card.gate").open() as gate, contextlib.suppress(BlockingIOError):
        while waiting.is_alive():  # until the gate is kept
            fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(gate, fcntl.LOCK_UN)
            time.sleep(0.01)
    after = threading.Thread(target=take, args=(late, False, "shared"))
    after.start()
    early.give()
    waiting.join()
    after.join()
    assert order == ["alone", "shared"]


def test_a_worker_that_dies_lets_go(tmp_path: Path) -> None:
    lock = tmp_path / "card.lock"
    code = (
        "import sys, pathlib, time; from tests.gpu.card import Card; Card(pathlib.Path(sys.argv[1])).take(alone=True); "
        "print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], cwd=ROOT, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError):
            Card(lock).take(alone=False, seconds=0)
        worker.send_signal(signal.SIGKILL)
    Card(lock).take(alone=True, seconds=5)


TESTS = """
import json, os, pathlib, time
import pytest

def lasts(name, seconds=0.05):
    start = time.monotonic()
    time.sleep(seconds)
    with open(pathlib.Path(__file__).with_name("times.jsonl"), "a") as file:
        file.write(json.dumps([name, start, time.monotonic(), os.environ["PYTEST_XDIST_WORKER"]]) + "\\n")

@pytest.mark.parametrize("n", range(12))
def test_together(n):
    lasts("together")

@pytest.mark.alone
@pytest.mark.parametrize("n", range(4))
def test_alone(n):
    lasts("alone")

@pytest.mark.alone
@pytest.mark.skipif(True, reason="as without a GPU")
def test_skipped():
    pass

@pytest.mark.alone
def test_alone_and_fails():
    lasts("alone")
    assert False
"""


def test_a_run_of_tests(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    (tmp_path / "conftest.py").write_text("from tests.gpu.card import *\n")  # pytest finds hooks by their names
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "3",
               "--dist", "worksteal", "-q", str(tmp_path)]  # fmt: skip
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed, 16 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    ran = [json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()]
    assert len({worker for *_, worker in ran}) > 1
    for name, start, end, _ in ran:
        others = [one for one in ran if one[1] < end and one[2] > start]
        assert name == "together" or len(others) == 1, others
