"""Tasks: oracles that agree with torch, tolerances that tell kernels from none, floors, baselines that compile."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from gpu_accel.cuda_llm import TASKS, Verdict, find
from gpu_accel.cuda_llm.admission import admission
from gpu_accel.cuda_llm.harness import judge_time
from gpu_accel.cuda_llm.outputs import compare
from gpu_accel.cuda_llm.tasks import Truth
from gpu_accel.errors import InvalidInputError

every_task = pytest.mark.parametrize("name", TASKS)


def test_there_are_enough_families() -> None:
    assert len(TASKS) >= 18
    assert len({one.family for one in TASKS.values()}) >= 10


@every_task
def test_zeros_constants_means_and_copies_fail(name: str) -> None:
    found = admission(TASKS[name], seed=3)
    assert found.ok, found.shares
    assert {"zeros", "ones", "mean of inputs", "copy of an input"} <= set(found.shares)


def test_a_task_that_a_constant_solves_is_not_admitted() -> None:
    def oracle(x, dims):
        return {"out": Truth(torch.full_like(x["x"], 0.25), torch.ones_like(x["x"]))}

    assert not admission(dataclasses.replace(TASKS["softmax"], oracle=oracle)).ok


@every_task
def test_torch_stays_within_the_tolerance(name: str) -> None:
    task = TASKS[name]
    cases = itertools.product((*task.shown, *task.held_out(11)), task.families)
    for number, (dims, family) in enumerate(cases):
        inputs = task.draw(dims, family=family, seed=number)
        truth = task.truth(inputs, dims)
        found = compare(task, task.baseline(inputs, dims), truth, inputs)
        assert found.kind is None, (dims, family, found)
        assert all(truth[one.name].value.shape == one.sizes(dims) for one in task.outputs)


@every_task
def test_hidden_shapes_are_hidden_and_come_from_the_seed(name: str) -> None:
    task = TASKS[name]
    assert task.held_out(5) == task.held_out(5) != task.held_out(6)
    assert all(dims not in task.shown for dims in task.held_out(5))


@every_task
def test_no_time_below_the_roofline(name: str) -> None:
    task = TASKS[name]
    floor = task.floor_ms(task.bench, "h100-sxm")
    assert floor > 0.01
    assert judge_time(task, task.bench, floor * 0.5, "h100-sxm").verdict is Verdict.FASTER_THAN_PHYSICS
    assert judge_time(task, task.bench, float("nan"), "h100-sxm").verdict is Verdict.FASTER_THAN_PHYSICS
    assert judge_time(task, task.bench, floor * 1.01, "h100-sxm").ok


def test_the_floor_of_a_copy_is_its_bytes() -> None:
    task = TASKS["reverse"]
    assert task.bytes_moved({"n": 1000}) == 8000
    assert task.floor_ms({"n": 10**9}, "h100-sxm") == pytest.approx(8e9 / 3.35e12 * 1e3, rel=0.01)


def test_unknown_tasks() -> None:
    with pytest.raises(InvalidInputError, match="choose one of"):
        find("softmin")


def test_all_naive_baselines_compile() -> None:
    """In one source: each has its own name."""
    compiling = pytest.importorskip("gpu_accel.hardware.microbenchmarks.compile")
    if why := compiling.missing():
        pytest.skip(why)
    binary = compiling.build("\n".join(one.naive.source for one in TASKS.values()))
    assert {one.naive.launch.entry for one in TASKS.values()} <= set(binary.functions)
