"""The red team: every known hack must be rejected under its own name, and every honest twin accepted.

    for row in redteam():
        print(row.fixture.id, row.hack.name, row.twin.name, row.ok)

Two hacks are no candidates, and are tried on the parts that stop them: a time below the roofline, and a task that an
output without work would pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu_accel.hardware.microbenchmarks.compile import missing

from .admission import admission
from .fixtures import FIXTURES, Fixture
from .harness import check, judge_time
from .sandbox import Sandbox
from .tasks import TASKS
from .tasks.task import Truth
from .verdict import Judgement, Kind, Verdict

COMPILE_SECONDS = 18.0  # that a kernel gets on a GPU beyond what a fixture asks for, to be compiled in


@dataclass(frozen=True)
class Row:
    """What became of one fixture."""

    fixture: Fixture
    hack: Judgement
    twin: Judgement
    gpu: bool = False

    @property
    def hack_rejected(self) -> bool:
        """Rejected, and under the name that it should have."""
        return (self.hack.verdict, self.hack.kind) == self.fixture.expected(self.gpu)

    @property
    def twin_accepted(self) -> bool:
        return self.twin.verdict is self.fixture.expected_twin(self.gpu)

    @property
    def ok(self) -> bool:
        return self.hack_rejected and self.twin_accepted

    def as_dict(self) -> dict[str, Any]:
        one = self.fixture
        verdict, kind = one.expected(self.gpu)
        wanted = f"{verdict}({kind})" if kind else str(verdict)
        return {
            "id": one.id, "hack": one.name, "task": one.task, "expected": wanted, "got": self.hack.name,
            "detail": self.hack.detail, "twin": self.twin.name, "ok": self.ok,
        }  # fmt: skip


def here() -> list[Fixture]:
    """The fixtures that can be tried here: some show in what NVRTC makes of them alone."""
    without = any(one.compiled for one in FIXTURES) and bool(missing())
    return [one for one in FIXTURES if not (one.compiled and without)]


def redteam(
    *, sandbox: Sandbox | None = None, only: Sequence[str] = (), seed: int | None = None,
    tell: Callable[[Row], None] | None = None,
) -> list[Row]:  # fmt: skip
    """Try every fixture that can be tried here, or those with the ids in `only`.

    Raises:
        HardwareError: no sandbox can be made here.
    """
    wanted = [fixture for fixture in (FIXTURES if only else here()) if not only or fixture.id in only]
    if sandbox is None and wanted:
        with Sandbox(seconds=20) as own:
            return redteam(sandbox=own, only=only, seed=seed, tell=tell)
    twins: dict[str, Judgement] = {}
    rows = []
    for fixture in wanted:
        assert sandbox is not None
        if fixture.twin not in twins:
            twins[fixture.twin] = check(fixture.twin, fixture.task, sandbox=sandbox, seed=seed)
        seconds = fixture.seconds + (COMPILE_SECONDS if sandbox.gpu else 0) if fixture.seconds else None
        hack = check(fixture.hack, fixture.task, sandbox=sandbox, seed=seed, seconds=seconds)
        rows.append(Row(fixture, hack, twins[fixture.twin], sandbox.gpu))
        if tell:
            tell(rows[-1])
    for row in (_physics(), _constant_task()):
        if not only or row.fixture.id in only:
            rows.append(row)
            if tell:
                tell(row)
    return rows


def _physics(gpu: str = "h100-sxm") -> Row:
    """A time of nearly nothing for one shape, which would lift a geometric mean."""
    task = TASKS["matrix_copy"]
    floor = task.floor_ms(task.bench, gpu)
    fixture = Fixture(
        id="C12", name="one shape's time is driven to nothing", task=task.name, hack="", twin="",
        verdict=Verdict.FASTER_THAN_PHYSICS,
    )  # fmt: skip
    return Row(fixture, judge_time(task, task.bench, floor / 100, gpu), judge_time(task, task.bench, floor * 1.1, gpu))


def _constant_task() -> Row:
    """A task whose answer is known without its input: the mean of a softmax."""
    honest = TASKS["softmax"]
    collapsed = replace(
        honest, name="mean_of_softmax",
        oracle=lambda x, d: {"out": Truth(torch.full_like(x["x"], 1 / d["cols"]), torch.ones_like(x["x"]))},
    )  # fmt: skip
    judgements = []
    for task in (collapsed, honest):
        found = admission(task)
        detail = f"{found.weakest}: told apart in {found.shares[found.weakest]:.0%} of trials"
        verdict = Verdict.ACCEPTED if found.ok else Verdict.MALFORMED
        judgements.append(Judgement(verdict=verdict, kind=None if found.ok else Kind.CONSTANT_OUTPUT, detail=detail))
    fixture = Fixture(
        id="T1", name="a task that a constant solves", task="mean_of_softmax", hack="", twin="",
        verdict=Verdict.MALFORMED, kind=Kind.CONSTANT_OUTPUT,
    )  # fmt: skip
    return Row(fixture, judgements[0], judgements[1])
