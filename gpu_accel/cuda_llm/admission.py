"""Whether a task can be trusted to tell a kernel from none: outputs that take no work must fail it.

Adversaries: zeros, ones, the mean of the inputs, the mean of the truth, a copy of an input, an output that ignores one
of the inputs, two inputs in each other's place, the truth moved by one row, and for results with a tolerance the same
computation on inputs rounded to fp16. Each meets every shown shape with every family of inputs; a task is admitted if
all are told apart in at least `SHARE` of these (a sum of small integers may happen to be 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .outputs import compare
from .tasks import Task
from .tasks.task import Dims, Tensors, Truth

SHARE = 0.8
SYMMETRIC = ("dot", "mse", "residual_rmsnorm")  # two inputs may change places
SHARE_FP16 = 0.5  # rounding errors of a sum may cancel, and those of tiny exponents do not matter


@dataclass(frozen=True)
class Admission:
    """For each adversary the share of trials in which it failed, as it must."""

    task: str
    shares: dict[str, float]

    @property
    def ok(self) -> bool:
        return bool(self.shares) and all(
            share >= (SHARE_FP16 if name == "fp16" else SHARE) for name, share in self.shares.items()
        )

    @property
    def weakest(self) -> str:
        return min(self.shares, key=self.shares.__getitem__)


def admission(task: Task, seed: int = 0) -> Admission:
    """Let the adversaries try."""
    failed: dict[str, list[bool]] = {}
    for number, dims in enumerate(task.shown):
        for family in task.families:
            inputs = task.draw(dims, family=family, seed=seed + number)
            truth = task.truth(inputs, dims)
            for name, outputs in _adversaries(task, inputs, truth, dims, family, seed).items():
                failed.setdefault(name, []).append(compare(task, outputs, truth, inputs).kind is not None)
    return Admission(task.name, {name: sum(them) / len(them) for name, them in failed.items()})


def _adversaries(
    task: Task, inputs: Tensors, truth: dict[str, Truth], dims: Dims, family: str, seed: int
) -> dict[str, Tensors]:
    real = torch.cat([x.double().flatten() for x in inputs.values()])
    found = {
        "zeros": _each(task, dims, lambda name: torch.tensor(0.0)),
        "ones": _each(task, dims, lambda name: torch.tensor(1.0)),
        "mean of inputs": _each(task, dims, lambda name: real.mean()),
        "copy of an input": _each(task, dims, lambda name: next(iter(inputs.values())), whole=True),
    }
    if any(one.elements(dims) > 1 for one in task.outputs):
        found["mean of truth"] = _each(task, dims, lambda name: truth[name].value.mean())
    other = task.draw(dims, family=family, seed=seed + 1_000_003)
    for name in inputs:
        made = task.truth(inputs | {name: other[name]}, dims)
        found[f"ignores {name}"] = {key: one.value.to(getattr(torch, _dtype(task, key))) for key, one in made.items()}
    if any(one.elements(dims) > 1 for one in task.outputs):
        found["moved by a row"] = {name: _moved(one.value).to(getattr(torch, _dtype(task, name)))
                                   for name, one in truth.items()}  # fmt: skip
    alike = [(a, b) for a, x in inputs.items() for b, y in inputs.items()
             if a < b and (x.shape, x.dtype) == (y.shape, y.dtype)]  # fmt: skip
    for a, b in alike if task.name not in SYMMETRIC else ():
        made = task.truth(inputs | {a: inputs[b], b: inputs[a]}, dims)
        found[f"swaps {a} and {b}"] = {name: one.value.to(getattr(torch, _dtype(task, name)))
                                       for name, one in made.items()}  # fmt: skip
    if task.tolerance and family != "integers":  # small integers are exact in fp16
        short = {name: x.half().float() if x.is_floating_point() else x for name, x in inputs.items()}
        found["fp16"] = {key: one.value.float() for key, one in task.truth(short, dims).items()}
    return found


def _moved(value: Tensor) -> Tensor:
    """The same rows, or elements where there is but one row, each one place further."""
    return value.roll(1, next((at for at, size in enumerate(value.shape) if size > 1), 0))


def _dtype(task: Task, name: str) -> str:
    return next(one.dtype for one in task.outputs if one.name == name)


def _each(task: Task, dims: Dims, value, *, whole: bool = False) -> Tensors:  # type: ignore[no-untyped-def]
    """Every output filled with a value, or with as much of a tensor as it takes, again and again."""
    made: Tensors = {}
    for one in task.outputs:
        given: Tensor = value(one.name)
        dtype = getattr(torch, one.dtype)
        if whole:
            count = one.elements(dims)
            flat = given.flatten().repeat(-(-count // max(given.numel(), 1)))[:count]
            made[one.name] = flat.to(dtype).reshape(one.sizes(dims))
        else:
            made[one.name] = torch.full(one.sizes(dims), float(given)).to(dtype)
    return made
