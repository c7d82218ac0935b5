"""Tensor and sequence parallelism: what ranks of a group send each other around a linear layer.

    column    a rank has rows of W (outputs): x is on all ranks, y is cut along its features
    row       a rank has columns of W (inputs): x is cut along its features, y is summed over ranks

A column-parallel layer and a row-parallel one behind it need one sum forward and one backward. With sequence
parallelism what lies between such pairs (norms, dropout, residuals) is cut along the first dimension: the sum becomes
a sum of which each rank keeps its part, and the way back a gathering. Both move as many bytes as the sum did.

    into the pair     `enter`   forward nothing, backward a sum;     or forward gather, backward sum and cut
    out of the pair   `leave`   forward a sum, backward nothing;     or forward sum and cut, backward gather
    parameters        `shared`  whose gradients are parts on each rank: forward nothing, backward a sum

Megatron-LM's scheme (arXiv:1909.08053, 2205.05198), under the argument names of Transformer Engine. Products of FP8
are summed in the dtype of activations; what is gathered has not been quantised yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.problem import check_first_gradient
from gpu_accel.transformer_engine.checks import check_flag

MODES = (None, "column", "row")


@dataclass(frozen=True)
class Parallel:
    """How a layer is split. `mode` None is not at all."""

    mode: str | None = None
    group: Any = None
    sequence: bool = False

    @property
    def size(self) -> int:
        return 1 if self.mode is None or self.group is None else dist.get_world_size(self.group)

    @property
    def active(self) -> bool:
        return self.mode is not None and self.group is not None

    def part(self, name: str, n: int) -> int:
        """The share of n that a rank has. Raises InvalidInputError where it is no whole number."""
        if n % self.size:
            raise InvalidInputError(f"{name} {n} must be a multiple of the {self.size} ranks of tp_group")
        return n // self.size


def parallel(mode: str | None, group: Any, sequence: bool) -> Parallel:
    """Check the three arguments. Raises InvalidInputError."""
    if mode not in MODES:
        raise InvalidInputError(f"parallel_mode must be None, 'column' or 'row', got {mode!r}")
    check_flag("sequence_parallel", sequence)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidInputError(f"tp_group must be a process group of torch.distributed, got {type(group).__name__}")
    if sequence and (mode is None or group is None):
        raise InvalidInputError("sequence_parallel goes with a parallel_mode and a tp_group")
    if mode is not None and group is None:
        raise InvalidInputError(f"parallel_mode={mode!r} needs tp_group, the ranks among which the layer is split")
    return Parallel(mode, group, sequence)


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: Any) -> Tensor:
    """Parts along the first dimension, in the order of ranks."""
    x = x.contiguous()
    out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _sum_and_cut(x: Tensor, group: Any) -> Tensor:
    """The part of this rank, along the first dimension, of the sum."""
    ranks = dist.get_world_size(group)
    if x.shape[0] % ranks:
        raise InvalidInputError(
            f"sequence_parallel cuts the first dimension, {x.shape[0]}, which must be a multiple of {ranks} ranks"
        )
    out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return _gather(x, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_first_gradient("what tensor parallelism sends", dy)
        return (_sum_and_cut if ctx.sequence else _sum)(dy, ctx.group), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return (_sum_and_cut if sequence else _sum)(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor):
        if not ctx.sequence:
            return dy, None, None
        check_first_gradient("what tensor parallelism sends", dy)
        return _gather(dy, ctx.group), None, None


def enter(x: Tensor, how: Parallel) -> Tensor:
    """x before a column-parallel layer: the whole of it, where each rank has a part of its rows (sequence)."""
    return _Enter.apply(x, how.group, how.sequence) if how.active else x


def leave(x: Tensor, how: Parallel) -> Tensor:
    """What a row-parallel layer has made, summed over ranks."""
    return _Leave.apply(x, how.group, how.sequence) if how.active else x


def shared(parameter: Tensor | None, how: Parallel) -> Tensor | None:
    """A parameter that all ranks have and of whose gradient each makes a part."""
    return parameter if parameter is None or not how.active else _Enter.apply(parameter, how.group, False)


def refuse(how: Parallel, what: str, why: str) -> None:
    if how.active:
        raise UnsupportedError(f"{what} does not go with tp_group: {why}")
