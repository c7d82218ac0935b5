"""Whatever launches a kernel with tensor maps asks for the thread's CUDA context before."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from gpu_accel.flash_attention3 import launch
from gpu_accel.flash_attention3.gluon_launch import Known, QuickLaunch
from gpu_accel.transformer_engine.tape import Tape


class Kernel:
    """A kernel, and what it compiles to; writes down its launches."""

    function = packed_metadata = None

    def __init__(self, done: list[str]):
        self.done = done

    def __getitem__(self, grid):
        return self.run

    def run(self, *arguments, **options):
        self.done.append("launch")
        return self


def launched(kernel: Kernel) -> None:
    launch.launch(kernel, 1, (), {})


def seen(kernel: Kernel) -> None:
    before, launch._seen = launch._seen, lambda *_: None
    try:
        launch.launch(kernel, 1, (), {})
    finally:
        launch._seen = before


def quick(kernel: Kernel) -> None:
    """Compiled by the first launch, known by the second."""
    one = QuickLaunch(kernel)
    for _ in range(2):
        one((), 1, (), {}, {})


def known(kernel: Kernel) -> None:
    kept = Known()
    kept.keep((), (kernel, (1, 1, 1), ()), None)
    assert kept.again((), torch.device("cpu"))


def played(kernel: Kernel) -> None:
    tape = Tape(
        inputs=0, device=torch.device("cpu"), steps=[], results=[], kept=[], kept_bytes=0, scratch_bytes=0,
        zero_bytes=0, own=[], memories=3, held=[], stream=0,
    )  # fmt: skip
    tape._ready.append((None, kernel, kernel.run, (1, 1, 1), None, None, [], (), ()))
    tape.play([])


@pytest.mark.parametrize("way", [launched, seen, quick, known, played], ids=lambda way: way.__name__)
def test_a_launch_asks_for_the_context(way, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(launch, "have_context", lambda: done.append("context"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    way(Kernel(done))
    assert done and done == ["context", "launch"] * (len(done) // 2)


def test_a_thread_gets_its_context_once(monkeypatch):
    """Not before CUDA is there: then nothing has been launched, and it is asked for again."""
    made: list[int] = []
    record = SimpleNamespace(record=lambda: made.append(threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "Event", lambda: record)
    monkeypatch.setattr(launch, "_thread", threading.local())
    there = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: there)
    launch.have_context()
    assert not made
    there = True
    launch.have_context()
    launch.have_context()
    thread = threading.Thread(target=launch.have_context)
    thread.start()
    thread.join()
    assert len(made) == 2 and made[0] == threading.get_ident() != made[1]
