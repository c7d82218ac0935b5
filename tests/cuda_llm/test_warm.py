"""Times with a warm cache: taken beside those with a cold one, of launches that still have to do their work."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.cuda_llm import gpu_jobs
from gpu_accel.cuda_llm.gpu_jobs import Counted, Memory
from gpu_accel.cuda_llm.image import Slot
from gpu_accel.testing.fake_timer import FakeTimer
from gpu_accel.testing.poison import never_written, poison_
from gpu_accel.workbench.timing import compare


class OnCpu(Memory):
    """The memory of one timed shape with one output, here."""

    def __init__(self, elements: int = 20_000) -> None:
        self.slots, self.fill = [Slot("out", "output", "float32", (elements,), 0, 4 * elements)], {}
        self.views, self.count, self.spoilt = {"out": poison_(torch.empty(elements))}, 0, 0

    def spoil(self) -> None:
        self.spoilt += 1
        super().spoil()


@pytest.mark.parametrize("ms", [1.0, 0.01], ids=["events", "graphs"])
@pytest.mark.parametrize("honest", [True, False])
def test_a_kernel_that_remembers_leaves_poison(monkeypatch: pytest.MonkeyPatch, ms: float, honest: bool) -> None:
    monkeypatch.setattr("gpu_accel.workbench.cuda_timer.CudaTimer", FakeTimer)
    memory, ran = OnCpu(), []

    def kernel() -> None:
        fresh.work(ms, "candidate")
        if honest or not ran:
            memory.views["out"].fill_(1.0)
        ran.append(1)

    candidate = Counted(kernel)
    fresh = gpu_jobs._timer(memory, candidate, set(), [], warm=True)
    others = {name: [lambda name=name: fresh.work(2.0, name)] for name in ("copy", "library")}
    taken = compare({"candidate": [candidate], **others}, timer=fresh, flush_l2=False, min_rounds=5, max_rounds=7)
    assert all(one.ok and one.l2 == "warm" for one in taken.values()) and len(taken["candidate"].times) >= 5
    assert "flush" not in fresh.log
    assert memory.spoilt >= len(taken["candidate"].times), "before every timed launch"
    assert bool(never_written(memory.views["out"]).any()) is not honest, "of the last, nothing is left but its own"
