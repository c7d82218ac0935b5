"""The histories of a layer under delayed scaling, as buffers: they are saved, moved and broadcast with the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine import context
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.recipes import ROLES, DelayedScaling, Role
from gpu_accel.transformer_engine.sources import quickly


class History(nn.Module):
    """Of one tensor.

    history (length,): maxima, newest first. scale (): what codes are multiplied with. pending (): the maximum since the
    history was last entered. overflows (2,) int64: tensors with NaN or Inf, and tensors that were clipped.
    """

    history: Tensor
    scale: Tensor
    pending: Tensor
    overflows: Tensor

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(length, device=device, dtype=torch.float32))
        self.register_buffer("scale", torch.ones((), device=device, dtype=torch.float32))
        self.register_buffer("pending", torch.zeros((), device=device, dtype=torch.float32))
        self.register_buffer("overflows", torch.zeros(2, device=device, dtype=torch.int64))

    def _apply(self, fn: Any, recurse: bool = True) -> History:
        """Follow a move to another device, and stay float32 when a model becomes bfloat16."""
        device = fn(torch.empty(0, dtype=torch.float32, device=self.history.device)).device
        if device != self.history.device:
            for name, value in self.named_buffers():
                # from the meta device there are no values: those of an empty history, and not what memory holds
                new = torch.ones_like if name == "scale" else torch.zeros_like
                moved = new(value, device=device) if value.is_meta else value.to(device)
                setattr(self, name, moved)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        """Stay float32 with `assign=True` too, where a whole checkpoint was made bfloat16."""
        for name, own in self.named_buffers():
            found = state_dict.get(f"{prefix}{name}")
            if isinstance(found, Tensor) and found.dtype != own.dtype:
                state_dict[f"{prefix}{name}"] = found.to(own.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def state(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.history, self.scale, self.pending, self.overflows

    def roll(self, recipe: DelayedScaling, largest: float, kernels: bool) -> None:
        """Enter what is pending and find the next scale; in one launch with `kernels`."""
        state = list(self.state())
        quickly(roll_op, state[0])(state, [largest], recipe.margin, recipe.amax_compute_algo, kernels)


class Histories(nn.Module):
    """Of a layer's input, weight and gradient.

    gathered: whether that of the weight is entered where FSDP2 gathers it (`sharded.py`), and not here.
    """

    input: History
    weight: History
    grad: History

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.length = length
        self.gathered = False
        for role in ROLES:
            setattr(self, role, History(length, device))

    def of(self, role: Role) -> History:
        return getattr(self, role)

    def entered_here(self) -> tuple[Role, ...]:
        return ("input", "grad") if self.gathered else ROLES

    def pending(self) -> list[Tensor]:
        return [self.of(role).pending for role in self.entered_here()]

    def overflowed(self) -> Tensor:
        """(3, 2) int64: for input, weight and gradient, tensors with NaN or Inf and tensors that were clipped."""
        return torch.stack([self.of(role).overflows for role in ROLES])


def length_of(state_dict: dict[str, Any], prefix: str) -> int | None:
    """The length of the histories that a state_dict holds under this prefix, None without any."""
    found = state_dict.get(f"{prefix}input.history")
    if found is None:
        return None
    if found.dim() != 1:
        raise InvalidInputError(f"{prefix}input.history must be (length,), got {tuple(found.shape)}")
    return int(found.shape[0])


@torch.compiler.disable
def _give_histories(layer: DelayedLayer, length: int) -> None:
    """Not in a graph, whose backward pass would change what its forward pass has made: torch cannot compile that.

    A first step under torch.compile breaks the graph here. With fullgraph=True a layer has to have histories before,
    by `convert(model, recipe)`, its own `recipe` or a step without torch.compile.
    """
    with torch.inference_mode(False):  # a caller's mode: training enters maxima into them later
        layer.delayed = Histories(length, layer.weight.device)
    context.register(layer.delayed)


class DelayedLayer(nn.Module):
    """A layer that may have histories: made when a recipe first needs them, saved and loaded with its state."""

    weight: Tensor
    delayed: Histories | None

    def make_histories(self, length: int) -> Histories:
        """Empty histories of this length, where there are none."""
        if self.delayed is None:
            _give_histories(self, length)
            assert self.delayed is not None
        elif self.delayed.length != length:
            raise InvalidInputError(
                f"this layer has histories of length {self.delayed.length}, the recipe has amax_history_len={length}: "
                f"use one length, or set layer.delayed = None to start anew"
            )
        return self.delayed

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        length = length_of(state_dict, f"{prefix}delayed.")
        if length is not None:
            self.make_histories(length)
        elif self.delayed is not None and not any(key.startswith(f"{prefix}delayed.") for key in state_dict):
            state_dict.update(self.delayed.state_dict(prefix=f"{prefix}delayed."))  # torch passes a copy of its own
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
