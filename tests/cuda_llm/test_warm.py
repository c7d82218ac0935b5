"""Launches that are timed still have to do their work: with a cold cache, and with a warm one beside."""

from __future__ import annotations

import functools
import resource

import pytest
import torch

from gpu_accel.cuda_llm import gpu_jobs
from gpu_accel.cuda_llm.gpu_jobs import Counted, Kept, Launches, Memory
from gpu_accel.cuda_llm.image import Slot
from gpu_accel.testing.fake_timer import FakeTimer
from gpu_accel.testing.poison import never_written, poison_
from gpu_accel.workbench.timing import compare


class OnCpu(Memory):
    """The memory of one timed shape with one output, here."""

    def __init__(self, elements: int = 20_000) -> None:
        self.slots, self.fill = [Slot("out", "output", "float32", (elements,), 0, 4 * elements)], {}
        self.views, self.renewed, self.seed = {"out": poison_(torch.empty(elements))}, 0, 0

    def refresh(self) -> None:
        self.renewed += 1
        self.seed += 1
        poison_(self.views["out"])


@pytest.mark.parametrize("ms", [1.0, 0.01], ids=["events", "graphs"])
@pytest.mark.parametrize("honest", [True, False])
def test_a_kernel_that_remembers_leaves_poison(monkeypatch: pytest.MonkeyPatch, ms: float, honest: bool) -> None:
    monkeypatch.setattr("gpu_accel.workbench.cuda_timer.CudaTimer", FakeTimer)
    memories, ran = [OnCpu(), OnCpu()], []
    launches = Launches(memories)

    def kernel(memory: OnCpu) -> None:
        fresh.work(ms, "candidate")
        if honest or memory not in ran:
            memory.views["out"].fill_(1.0)
        ran.append(memory)

    candidate = [Counted(functools.partial(kernel, one), one, launches) for one in memories]
    fresh = gpu_jobs._timer(launches, Kept(0, 0), warm=True)
    others = {name: [lambda name=name: fresh.work(2.0, name)] for name in ("copy", "library")}
    taken = compare(
        {"candidate": candidate, **others}, timer=fresh, flush_l2=False, min_rounds=5, max_rounds=7, most_repeats=1
    )
    assert all(one.ok and one.l2 == "warm" for one in taken.values()) and len(taken["candidate"].times) >= 5
    assert "flush" not in fresh.log
    assert taken["candidate"].calls == 1, "no launch finds what another one left"
    assert sum(one.renewed for one in memories) >= len(taken["candidate"].times), "before every timed launch"
    _, (left,) = launches.kept()
    assert bool(never_written(left).all()) is not honest, "of the last, nothing is left but its own"


@pytest.mark.parametrize("ms", [1.0, 0.01], ids=["events", "graphs"])
@pytest.mark.parametrize("honest", [True, False])
def test_launches_go_to_other_addresses_in_turn(monkeypatch: pytest.MonkeyPatch, ms: float, honest: bool) -> None:
    """A kernel that keeps the address of its first output, and writes there, leaves poison in half of the others."""
    monkeypatch.setattr("gpu_accel.workbench.cuda_timer.CudaTimer", FakeTimer)
    memories, kept = [OnCpu(100), OnCpu(100)], Kept(1000, 0)
    launches = Launches(memories)

    def kernel(memory: OnCpu) -> None:
        fresh.work(ms, "candidate")
        (memory if honest else memories[0]).views["out"].fill_(1.0)

    candidate = [Counted(functools.partial(kernel, one), one, launches) for one in memories]
    fresh = gpu_jobs._timer(launches, kept)
    calls = {"candidate": candidate, "copy": [lambda: fresh.work(2.0, "copy")]}
    taken = compare(calls, timer=fresh, min_rounds=8, max_rounds=8)
    assert taken["candidate"].ok and len(taken["candidate"].times) == 8
    poison = [bool(never_written(out).all()) for _, (out,) in kept.rows]
    assert len(kept.rows) >= 8 and (sum(poison) == 0 if honest else sum(poison[-8:]) == 4), poison
    launches.refresh()
    offered = kept.offered
    launches.pending = list(memories)  # as between two series of launches: nothing of a launch is left in them
    fresh.flush()
    assert kept.offered == offered, "poison is no output"
    if honest:  # nothing is launched on what another launch left
        assert all(bool(never_written(one.views["out"]).all()) for one in memories if one not in launches.pending)


def test_what_lies_around_buffers_must_stay() -> None:
    memory = OnCpu(16)
    memory.slots = [Slot("x", "input", "float32", (8,), 64, 32), Slot("out", "output", "float32", (8,), 192, 32)]
    memory.image = torch.full((320,), gpu_jobs.GUARD_BYTE, dtype=torch.uint8)
    for slot in memory.slots:
        slot.view(memory.image).fill_(1.0)
    assert memory.around() == 0
    for changed, at in enumerate((0, 63, 96, 191, 224, 319), 1):
        memory.image[at] = 0
        assert memory.around() == changed


def test_a_compiler_may_have_so_much_memory_and_what_follows_more() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with gpu_jobs.addresses(256):
        bytearray(1 << 20)
        with pytest.raises(MemoryError):
            bytearray(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(1 << 29)) == 1 << 29
