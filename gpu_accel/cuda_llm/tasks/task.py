"""What a task is: buffers, sizes, a float64 oracle with its tolerance, baselines, and the least work.

**Tolerance.** An oracle gives, for every output element, the exact value and a `scale`: the sum of the magnitudes that
go into it (for a dot product sum |a||b|). A result may err by `tolerance` units of float32 rounding, 2**-24, of that
scale, and by the least normal number, since what is smaller may be flushed to zero: `__fdividef(1, y)` is 0 for y above
2**126. A right kernel leaves some of its tolerance over, but loses all of what is flushed. So zeros never pass for
small values, cancellation is not held against a kernel, and neither fp16 nor TF32, whose unit is 2**-11, passes for
float32. Integer outputs must be equal.

**Shapes.** `shown` are those that a proposer may know. `held_out` draws others from `ranges` and adds the smallest.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_accel.hardware.catalog import Profile, profile
from gpu_accel.hardware.roofline import Roofline

from ..candidate import Candidate
from ..launch import evaluate

UNIT = 2.0**-24  # of float32 rounding
FLOOR = 2.0**-126  # smaller numbers may be flushed to zero
# An argument of loads in Triton: what is read once leaves the cache first. After a flush the cache is full of lines
# that are not written back yet, and a kernel that reads much and writes little need not wait for that.
ONCE = ', eviction_policy="evict_first" if STREAM else ""'
# Of real-valued inputs; trials go through all of them, the first four on shapes that are shown.
FAMILIES = ("normal", "large", "sparse", "integers", "heavy", "shifted", "tiny")

Dims = dict[str, int]
Tensors = dict[str, Tensor]


class Truth(NamedTuple):
    """Exact values of an output and the magnitude that rounding errors are relative to, both float64."""

    value: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Buffer:
    """One input or output.

    Args:
        shape: sizes, as integers or expressions of the dimensions.
        kind: of an input's values: "real" (one of FAMILIES), "unit" (uniform on [0, 1)), or "index" below `below`.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float32"
    kind: str = "real"
    below: int | str = 0

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(size, dims) for size in self.shape)

    def elements(self, dims: Mapping[str, int]) -> int:
        return functools.reduce(int.__mul__, self.sizes(dims), 1)

    def draw(self, dims: Mapping[str, int], family: str, generator: torch.Generator) -> Tensor:
        shape = self.sizes(dims)
        given: dict[str, Any] = {"generator": generator, "device": generator.device}
        if self.kind == "index":
            below = max(evaluate(self.below, dims), 1)
            return torch.randint(below, shape, dtype=getattr(torch, self.dtype), **given)
        if self.kind == "unit":
            return torch.rand(shape, **given)
        x = torch.randn(shape, **given)
        if family == "shifted":
            return x + 3
        if family == "heavy":
            return x + 10 * torch.randn(shape, **given) * (torch.rand(shape, **given) < 0.05)
        if family == "integers":
            return torch.randint(-4, 5, shape, **given).float()
        if family == "large":  # beyond what exp takes in float32: 88
            return 100 * x
        if family == "sparse":  # short rows of zeros alone, or with one other number
            return x * (torch.rand(shape, **given) < 0.1)
        return x * 1e-3 if family == "tiny" else x


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kernel to write.

    Args:
        name, title, family: as in tables.
        dims: names of the sizes; a kernel may take any of them as an argument.
        shown, bench: shapes for checks on a CPU, and the shape that is timed on a GPU.
        ranges: (least, largest) of each size, for shapes that no proposer sees.
        oracle: (inputs in float64 or int64, dims) -> truth by output name.
        library: (inputs, dims) -> outputs by torch: the strong baseline.
        prepare: (inputs, dims) -> what `library` takes, where it wants another format; no part of its time.
        flops: arithmetic of one call, an expression of the dimensions.
        tolerance: units of float32 rounding of the scale; 0 for results that must be equal.
        start: a plain Triton kernel that is right, with the values its constants may take.
        naive_cuda: the naive baseline, one thread an output element, in CUDA C++.
        features: further templates of the grammar, in Triton or CUDA C++, with other structures than `start`.
        priors: points of `start` that a grammar tries first: what experience with large GPUs suggests.
        dtype: of the values.
        families: of FAMILIES, those for which the result is defined.
        arithmetic: the fastest units of a GPU that reach the tolerance, and how often they must do the work. Float32
            products can be three TF32 products of split operands, on tensor cores: ("tf32", 3).
    """

    name: str
    title: str
    family: str
    dims: tuple[str, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    shown: tuple[Dims, ...]
    bench: Dims
    ranges: Mapping[str, tuple[int, int]]
    oracle: Callable[[Tensors, Dims], dict[str, Truth]] = field(repr=False)
    library: Callable[[Tensors, Dims], Tensors] = field(repr=False)
    flops: str
    tolerance: float
    start: str = field(repr=False)
    naive_cuda: str = field(repr=False)
    dtype: str = "fp32"
    families: tuple[str, ...] = FAMILIES
    arithmetic: tuple[str, int] = ("fp32", 1)
    prepare: Callable[[Tensors, Dims], Any] | None = field(default=None, repr=False)
    features: tuple[str, ...] = field(default=(), repr=False)
    priors: tuple[Mapping[str, int], ...] = field(default=(), repr=False)

    def draw(self, dims: Dims, *, family: str, seed: int) -> Tensors:
        """Inputs of one trial, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        return {one.name: one.draw(dims, family, generator) for one in self.inputs}

    def truth(self, inputs: Tensors, dims: Dims) -> dict[str, Truth]:
        """The oracle on inputs of the kernel's dtypes."""
        wide = {name: x.double() if x.is_floating_point() else x.long() for name, x in inputs.items()}
        return self.oracle(wide, dims)

    def bound(self, truth: Truth) -> Tensor:
        """The largest error allowed at each element."""
        if self.tolerance == 0:
            return torch.zeros_like(truth.scale)
        return self.tolerance * UNIT * truth.scale + FLOOR

    def share(self, error: Tensor, truth: Truth) -> Tensor:
        """How much of its tolerance each error takes up, beyond what may be flushed: at most 1 within the bound.

        Where results must be equal, the error itself.
        """
        if self.tolerance == 0:
            return error
        beyond = (error - FLOOR).clamp(min=0)
        return torch.where(beyond > 0, beyond / (self.tolerance * UNIT * truth.scale), beyond)

    def held_out(self, seed: int, count: int = 2) -> list[Dims]:
        """Shapes that differ from `shown`: `count` drawn ones, the first of odd sizes, then the smallest."""
        source = random.Random(seed)
        drawn: list[Dims] = []
        while len(drawn) < count:
            dims = {name: source.randint(*self.ranges[name]) for name in self.dims}
            if not drawn:  # so that no block of a power of two ends where a buffer does
                dims = {name: _odd(size, *self.ranges[name]) for name, size in dims.items()}
            if dims not in self.shown:
                drawn.append(dims)
        return [*drawn, {name: self.ranges[name][0] for name in self.dims}]

    def bytes_moved(self, dims: Dims) -> int:
        """Compulsory traffic: every input read once, every output written once."""
        return sum(
            one.elements(dims) * getattr(torch, one.dtype).itemsize for one in (*self.inputs, *self.outputs)
        )  # fmt: skip

    def floor_ms(self, dims: Dims, gpu: str | Profile) -> float:
        """Milliseconds below which no kernel can be on that GPU, by its datasheet.

        Raises:
            InvalidInputError: no such profile.
        """
        chosen = gpu if isinstance(gpu, Profile) else profile(gpu)
        units, times = self.arithmetic
        return Roofline(chosen).time(evaluate(self.flops, dims) * times, self.bytes_moved(dims), units)

    def baseline(self, inputs: Tensors, dims: Dims) -> Tensors:
        """The library's outputs."""
        return self.library(self.prepare(inputs, dims) if self.prepare else inputs, dims)

    @functools.cached_property
    def templates(self) -> tuple[Candidate, ...]:
        """What the grammar varies: the plain kernel, kernels of other structure, and the plain one's likely points."""
        likely = (self.candidate.with_(**values) for values in self.priors)
        return (self.candidate, *(Candidate.parse(text) for text in self.features), *likely)

    @functools.cached_property
    def candidate(self) -> Candidate:
        """The plain kernel that a search starts from."""
        return Candidate.parse(self.start)

    @functools.cached_property
    def naive(self) -> Candidate:
        """The naive baseline in CUDA C++."""
        return Candidate.parse(self.naive_cuda)


def _odd(size: int, least: int, largest: int) -> int:
    """The size or a neighbour of it that is odd, where the range has one."""
    return next((one for one in (size, size + 1, size - 1) if one % 2 and least <= one <= largest), size)
