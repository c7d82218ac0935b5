"""Candidates on a GPU: compiled, right, timed in their own process, and kernels that cheat are seen here too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_accel.cuda_llm import TASKS, Sandbox, Verdict, check, optimize_kernel
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.harness import bench

KERNEL_HACKS = [
    one for one in FIXTURES if one.id in ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S7b", "S10", "S11", "R3")
]


@pytest.fixture(scope="module")
def gpu_sandbox() -> Iterator[Sandbox]:
    with Sandbox(gpu=True, seconds=120) as made:
        yield made


@pytest.mark.parametrize("name", TASKS)
def test_the_plain_kernel_is_accepted(name: str, gpu_sandbox: Sandbox) -> None:
    judged = check(TASKS[name].candidate, name, sandbox=gpu_sandbox)
    assert judged.ok and "ran on the GPU" in judged.verified_by, judged


@pytest.mark.parametrize("fixture", KERNEL_HACKS, ids=lambda one: one.id)
def test_hacks_of_the_kernel_are_rejected(fixture, gpu_sandbox: Sandbox) -> None:
    seconds = 60.0 if fixture.seconds else None  # a compiler needs longer than the interpreter
    judged = check(fixture.hack, fixture.task, sandbox=gpu_sandbox, seconds=seconds)
    assert (judged.verdict, judged.kind) == (fixture.verdict, fixture.kind), judged
    assert check(fixture.twin, fixture.task, sandbox=gpu_sandbox).ok


def test_a_foreign_address_ends_one_process_only(gpu_sandbox: Sandbox) -> None:
    hack = next(one for one in FIXTURES if one.id == "R5")
    assert check(hack.hack, hack.task, sandbox=gpu_sandbox).verdict is Verdict.CRASHED
    assert check(hack.twin, hack.task, sandbox=gpu_sandbox).ok


@pytest.mark.parametrize("name", ["reverse", "matrix_copy"])
def test_a_copy_takes_about_as_long_as_a_copy(name: str, gpu_sandbox: Sandbox) -> None:
    from gpu_accel.hardware.detection import detect

    found = detect()
    assert found and found.profile
    judged, ratio = bench(TASKS[name].candidate, TASKS[name], sandbox=gpu_sandbox, gpu=found.profile.name)
    assert judged.ok, judged
    assert ratio is not None and 0.8 < ratio < 5


def test_a_search_times_its_candidates(gpu_sandbox: Sandbox) -> None:
    found = optimize_kernel(TASKS["reverse"].start, "h100", candidates=3, sandbox=gpu_sandbox)
    assert found.timed and found.speedup is not None and found.speedup >= 1
