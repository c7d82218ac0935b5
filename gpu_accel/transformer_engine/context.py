"""`autocast`: which recipe the layers of this package use, with Transformer Engine's names; and `checkpoint`.

    with autocast(recipe=DelayedScaling()):
        y = layer(x)                            # quantised
        with autocast(enabled=False):
            z = head(y)                         # not

Delayed scaling enters the maxima of a step when the same layer is used the next time, not when the context ends. So a
forward pass that is recomputed within the backward pass (`checkpoint`, torch.utils.checkpoint) finds the scales of its
first run, and changes none (TransformerEngine#1190, pull requests 3284 and 3394). `checkpoint` also brings the recipe
along, which the backward pass would not know, and the scales, where the layer ran again in between.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine.history_kernels import roll_together
from gpu_accel.transformer_engine.recipes import DelayedScaling, Recipe


@dataclass
class Frame:
    """What a region of checkpointing keeps between its two runs: the scales in order of use."""

    scales: list[Tensor] = field(default_factory=list)
    replay: bool = False
    next: int = 0


@dataclass(frozen=True)
class State:
    """What is in force."""

    enabled: bool = False
    recipe: Recipe | None = None
    group: Any = None  # process group over which largest magnitudes are reduced
    frame: Frame | None = None


class _Now:
    """What is in force in this process; one plain object, which torch.compile can guard. `explicit`: whether an
    `autocast` says so, and not just the default."""

    def __init__(self) -> None:
        self.state = State()
        self.explicit = False


_now = _Now()
_layers: list[weakref.ref] = []  # layers with histories, in order of creation, which is the same on all ranks


def current() -> State:
    """The state in force; outside any `autocast` nothing is quantised except layers with a recipe of their own."""
    return _now.state


def is_explicit() -> bool:
    """Whether an `autocast` surrounds the caller, so that its word counts more than a layer's own recipe."""
    return _now.explicit


def check_recipe(recipe: Recipe | None) -> None:
    if recipe is not None and not isinstance(recipe, Recipe):
        raise InvalidInputError(f"recipe must be one such as DelayedScaling(), got {type(recipe).__name__}")


def process_group(group: Any) -> Any:
    """The process group of a group or of a mesh of one dimension; None is None."""
    if group is None or isinstance(group, torch.distributed.ProcessGroup):
        return group
    if isinstance(group, torch.distributed.DeviceMesh):
        if group.ndim == 1:
            return group.get_group()
        raise InvalidInputError(f"a mesh must have one dimension here, got {group}: choose one, mesh['dp']")
    raise InvalidInputError(f"a process group or a mesh of one dimension is needed, got {type(group).__name__}")


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: Any = None) -> Iterator[None]:
    """Quantise the products of the layers inside, forward and backward.

    Args:
        recipe: None is `DelayedScaling()`, as in Transformer Engine.
        amax_reduction_group: a torch.distributed group, or a mesh of one dimension, whose ranks hold parts of one
            tensor (tensor and sequence parallelism) or see parts of one batch (FSDP2, the mesh given to fully_shard):
            scales per tensor are then the same on all of them. Delayed scaling
            reduces what is pending when the context is entered, all layers in one call; current scaling reduces each
            tensor of the forward pass. Scales of blocks need none. Every rank must have the same layers and contexts.

    Raises:
        InvalidInputError: a recipe or an `enabled` of another type.
    """
    if not isinstance(enabled, bool):
        raise InvalidInputError(f"enabled must be True or False, got {enabled!r}")
    check_recipe(recipe)
    recipe = DelayedScaling() if recipe is None else recipe
    amax_reduction_group = process_group(amax_reduction_group)
    before, explicit = _now.state, _now.explicit
    state = State(enabled, recipe, amax_reduction_group, before.frame)
    nested = before.enabled and before.group is amax_reduction_group
    reduces = isinstance(recipe, DelayedScaling) and recipe.reduce_amax and amax_reduction_group is not None
    if enabled and reduces and not nested and not recomputing():
        assert isinstance(recipe, DelayedScaling)
        reduce_pending(amax_reduction_group, recipe)
    _now.state, _now.explicit = state, True
    try:
        yield
    finally:
        _now.state, _now.explicit = before, explicit


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None, fp8_group: Any = None) -> Iterator[None]:
    """`autocast` under the argument names of Transformer Engine before version 2."""
    with autocast(enabled=enabled, recipe=fp8_recipe, amax_reduction_group=fp8_group):
        yield


def recomputing() -> bool:
    """Whether this is a forward pass inside a backward pass, such as that of a checkpoint."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def register(layer: Any) -> None:
    """A layer with histories says that it is there."""
    _layers.append(weakref.ref(layer))


def _alive() -> list[Any]:
    _layers[:] = [ref for ref in _layers if ref() is not None]
    return [layer for ref in _layers if (layer := ref()) is not None]


def reduce_pending(group: Any, recipe: DelayedScaling) -> None:
    """Enter the largest of what is pending on any rank in every history, with one call for all layers: one to the
    network, and some tens of operations however many layers there are.

    At once, and not when a layer is used next: a rank that has no tokens for a layer (its maxima are zeros) may not use
    it, and its histories must still be those of the others.
    """
    roles = [(h, role) for h in _alive() for role in h.entered_here()]
    histories = [h.of(role) for h, role in roles]
    by_device: dict[torch.device, list[int]] = {}
    for i, one in enumerate(histories):
        by_device.setdefault(one.pending.device, []).append(i)
    largest = {role: recipe.scheme(role).largest for _, role in roles}
    for some in by_device.values():
        together = torch.stack([histories[i].pending for i in some])
        together = torch.where(together.isnan(), float("inf"), together)  # a maximum that no backend loses
        torch.distributed.all_reduce(together, torch.distributed.ReduceOp.MAX, group=group)
        roll_together(
            [histories[i].state() for i in some], list(together.unbind()), [largest[roles[i][1]] for i in some],
            recipe.margin, recipe.amax_compute_algo,
        )  # fmt: skip


def scale_of_frame(scale: Tensor) -> Tensor:
    """The scale to use: within a checkpoint's second run that of its first."""
    frame = _now.state.frame
    if frame is None:
        return scale
    if frame.replay:
        frame.next += 1
        return frame.scales[frame.next - 1]
    frame.scales.append(scale)
    return scale


def checkpoint(function: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Run `function` without keeping what its backward pass needs, and run it again then (Transformer Engine's name).

    The second run has the recipe and the scales of the first, and enters no maxima. torch.utils.checkpoint around an
    `autocast` inside is as good, unless the layer is used again before the backward pass.

    args, kwargs: of `function`; preserve_rng_state: as of torch.utils.checkpoint. Returns what `function` returns.
    Raises InvalidInputError for what cannot be called.
    """
    if not callable(function):
        raise InvalidInputError(f"function must be something to call, such as a layer, got {type(function).__name__}")
    outer, explicit = _now.state, _now.explicit
    frame = Frame()

    @contextlib.contextmanager
    def run(replay: bool) -> Iterator[None]:
        before = _now.state, _now.explicit
        frame.replay, frame.next = replay, 0
        _now.state, _now.explicit = State(outer.enabled, outer.recipe, outer.group, frame), explicit
        try:
            yield
        finally:
            _now.state, _now.explicit = before

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state,
        context_fn=lambda: (run(False), run(True)), **kwargs,
    )  # fmt: skip
