"""Tasks: oracles that agree with torch, tolerances that tell kernels from none, floors, baselines that compile."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from gpu_accel.cuda_llm import TASKS, Verdict, find
from gpu_accel.cuda_llm.admission import admission
from gpu_accel.cuda_llm.harness import judge_time
from gpu_accel.cuda_llm.outputs import compare
from gpu_accel.cuda_llm.tasks import Truth
from gpu_accel.cuda_llm.tasks.task import FLOOR, UNIT, Dims, Tensors
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


def flushed(x: torch.Tensor) -> torch.Tensor:
    return x.where(x.abs() >= FLOOR, 0 * x)


def fast_exp(x: torch.Tensor) -> torch.Tensor:
    """As `__expf` and Triton's exp: 2 to the rounded product; what is below the normal numbers is lost."""
    return flushed(torch.exp2((x * 1.44269504).double()).float())


def fast_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As `__fdividef`, which gives 0 for y above 2**126."""
    return flushed(x / y).where(y.abs() <= 2.0**126, 0 * x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return fast_divide(torch.ones(()), 1 + fast_exp(-x))


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = fast_exp(x - x.amax(-1, keepdim=True))
    return fast_divide(e, e.sum(-1, keepdim=True))


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    top = x.amax(-1)
    return fast_exp(x - top[:, None]).sum(-1).log() + top - x.gather(1, target.long()[:, None])[:, 0]


FAST: dict[str, Callable[[Tensors, Dims], torch.Tensor]] = {
    "sigmoid": lambda x, d: sigmoid(x["x"]),
    "swiglu": lambda x, d: flushed(flushed(x["gate"] * sigmoid(x["gate"])) * x["up"]),
    "softmax": lambda x, d: softmax(x["x"]),
    "cross_entropy": lambda x, d: cross_entropy(x["x"], x["target"]),
    "attention": lambda x, d: softmax(x["q"] @ x["k"].t() * d["dim"] ** -0.5) @ x["v"],
}


@pytest.mark.parametrize("name", FAST)
def test_fast_exponentials_leave_some_of_the_tolerance(name: str) -> None:
    """Rounding x log2(e), and its constant, is 2|x| units of exp(x); exp2, the sum and the division are 9 at most.

    The scales hold 1 + |x|, of which 16 units are allowed: at most 9/16 is used, 2/16 where x is large.
    """
    task = TASKS[name]
    for number, (dims, family) in enumerate(itertools.product((*task.shown, *task.held_out(12)), task.families)):
        inputs = task.draw(dims, family=family, seed=number)
        found = compare(task, {"out": FAST[name](inputs, dims)}, task.truth(inputs, dims), inputs)
        assert found.kind is None and found.error <= 0.6, (dims, family, found)


def test_what_is_flushed_takes_nothing_of_the_tolerance() -> None:
    """All of a number below 2**-126 or nothing is lost; what is computed must be right to the tolerance."""
    task = TASKS["sigmoid"]
    x = torch.linspace(-87.5, -87.2, 3001)  # 2**-126 is at -87.3365
    inputs, dims = {"x": x}, {"n": x.numel()}
    truth = task.truth(inputs, dims)
    out = sigmoid(x)
    error, exact = (out.double() - truth["out"].value).abs(), truth["out"]
    assert float((error / task.bound(exact)).max()) > 0.99 and bool((error <= task.bound(exact)).all())
    assert compare(task, {"out": out}, truth, inputs).error < 0.2
    assert compare(task, {"out": out.where(x < -87.3, 0 * x)}, truth, inputs).kind is not None
    for share in (0.9, 1.1):
        moved = exact.value + FLOOR + share * task.tolerance * UNIT * exact.scale
        assert float(task.share(moved - exact.value, exact).max()) == pytest.approx(share, rel=1e-3)
        assert bool((moved - exact.value <= task.bound(exact)).all()) == (share < 1)
    nothing = Truth(torch.zeros(1).double(), torch.zeros(1).double())
    assert task.share(torch.tensor([FLOOR]).double(), nothing) == 0
    assert task.share(torch.tensor([2 * FLOOR]).double(), nothing) == float("inf")


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
