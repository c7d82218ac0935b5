"""Run the cases of one library in a process of its own, so that a crash, a hang or a ruined device is one verdict.

The child prints a line of JSON before and after every case. When it dies or stays silent for too long, the case it was
in gets the verdict, and a new child goes on with the next one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gpu_accel.testing.conformance.cases import CASES
from gpu_accel.testing.conformance.judge import run_case
from gpu_accel.testing.conformance.libraries import resolve

VERDICTS = ("pass", "wrong", "refused", "error", "crashed", "hung", "not run")
_MARK = "conformance "
_START = 120.0  # seconds for importing torch and setting up a device


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one library did with one case. `verdict` is one of VERDICTS."""

    library: str
    case: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_library(
    library: str, *, device: str, cases: Sequence[str] | None = None, timeout: float = 120.0
) -> Iterator[Outcome]:
    """Outcomes of a library, as they come. `timeout` is for one case, in seconds."""
    names = list(CASES if cases is None else cases)
    for name in [name for name in names if CASES[name].gpu_only and not device.startswith("cuda")]:
        names.remove(name)
        yield Outcome(library=library, case=name, verdict="not run", detail=f"GPU only: {CASES[name].gpu_only}")
    if why := resolve(library).missing(torch.device(device)):
        yield from (Outcome(library=library, case=name, verdict="not run", detail=why) for name in names)
        return
    while names:
        for outcome in _one_child(library, device, tuple(names), timeout):
            names.remove(outcome.case)
            yield outcome


def _one_child(library: str, device: str, names: Sequence[str], timeout: float) -> Iterator[Outcome]:
    command = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", __name__, library, device, *names]
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, stdin=subprocess.PIPE
    )
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(child.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(child.stderr, lambda line: said.append(line or "")), daemon=True),
    ]
    for reader in readers:
        reader.start()
    at, patience, finished = names[0], _START, False
    try:
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                yield Outcome(library=library, case=at, verdict="hung", detail=f"no end after {patience:g} s")
                return
            if line is None:  # the end of its output
                code = child.wait()
                if not finished:
                    last = next((text.strip() for text in reversed(said) if text.strip()), "")
                    yield Outcome(library=library, case=at, verdict="crashed", detail=f"exit code {code}: {last}"[:300])
                return
            if not line.startswith(_MARK):  # somebody's print
                continue
            message = json.loads(line.removeprefix(_MARK))
            at, patience = message["case"], timeout
            if "verdict" in message:
                yield Outcome(library=library, **message)
                if message["verdict"] == "error" and "CUDA error" in message["detail"]:
                    return  # the device is of no more use to this process
                finished = at == names[-1]
                at = _after(names, at)
    finally:
        child.kill()
        child.wait()


def _after(names: Sequence[str], name: str) -> str:
    place = names.index(name) + 1
    return names[place] if place < len(names) else name


def _read(stream, put) -> None:
    for line in stream:
        put(line)
    put(None)


def _end_with_parent() -> None:
    """Nothing is ever written to our input: it ends when the parent does, however that ended."""
    watched = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def watch() -> None:
        os.read(watched, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _child(library: str, device: str, names: Sequence[str]) -> None:
    _end_with_parent()
    attend = resolve(library).attend
    for name in names:
        _say(case=name)
        start = time.perf_counter()
        verdict, detail = run_case(CASES[name], attend, torch.device(device))
        seconds = round(time.perf_counter() - start, 3)
        _say(case=name, verdict=verdict, detail=detail, seconds=seconds)


def _say(**message: object) -> None:
    print("\n" + _MARK + json.dumps(message), flush=True)  # a library may have left its last line open


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3:])
