"""`Linear`: torch's linear layer whose three products, forward and backward, run on quantised operands.

What decides the recipe, from the strongest: an `autocast` around the call, then the layer's own `recipe` (`convert`
sets it), else none: then it is torch's. Parameters stay in the dtype they were made with and are quantised from it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.transformer_engine import context as state
from gpu_accel.transformer_engine.checks import (
    check_first,
    check_flag,
    check_one_device,
    check_params_dtype,
    check_rows,
    check_size,
)
from gpu_accel.transformer_engine.delayed import Histories, length_of
from gpu_accel.transformer_engine.linear_op import BACKENDS, Plan, layer_backend, linear_op, weight_op
from gpu_accel.transformer_engine.quantizer import DTYPES
from gpu_accel.transformer_engine.recipes import DelayedScaling, Float8CurrentScaling, Recipe, Role
from gpu_accel.transformer_engine.scales import scale_fp32


class Linear(nn.Module):
    """y = x W^T + b, as `transformer_engine.pytorch.Linear`.

    Args:
        in_features, out_features, bias, device: as torch.nn.Linear; any sizes (NVIDIA's needs multiples of 16).
        params_dtype: of the parameters; None is torch's default.
        recipe: used where no `autocast` says otherwise; None quantises nothing there.
        backend: "portable" and "reference" as of `quantize` and `scaled_mm`; "hopper": Hopper's products where they
            take the operands, portable ones elsewhere; "auto": the best of what has been checked on a GPU.

    `delayed` holds the histories once delayed scaling was used; they are part of the state_dict. A state_dict with
    histories makes them, one without leaves them as they are.
    """

    delayed: Histories | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        state.check_recipe(recipe)
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_flag("bias", bias)
        check_params_dtype(params_dtype)
        if backend not in BACKENDS:
            raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.backend = recipe, backend
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None
        self.delayed = None
        self._kept: tuple[Any, ...] | None = None  # what a quantised weight was made for, and itself
        if isinstance(recipe, DelayedScaling):
            self.make_histories(recipe.amax_history_len)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch.nn.Linear's."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_torch(cls, linear: nn.Linear, *, recipe: Recipe | None = None, backend: str = "auto") -> Linear:
        """The same layer, with the very same parameters, hooks and attributes.

        Raises UnsupportedError for a layer that has more than a torch.nn.Linear: other parameters, buffers or modules
        (torch.nn.utils.weight_norm), or a `forward` of its own.
        """
        more = [*(linear._parameters.keys() - {"weight", "bias"}), *linear._buffers, *linear._modules]
        more += [name for name in ("weight", "bias") if name not in linear._parameters]
        more += [name for name in ("forward",) if name in linear.__dict__]
        if more:
            raise UnsupportedError(
                f"this torch.nn.Linear has {', '.join(sorted(more))} of its own, which a quantised layer would not "
                f"have: leave it out with filter, or undo what put it there"
            )
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", recipe=None,
            params_dtype=linear.weight.dtype, backend=backend,
        )  # fmt: skip
        assert isinstance(linear.weight, nn.Parameter)
        made.weight, made.recipe = linear.weight, recipe
        made.bias = linear.bias
        made.train(linear.training)
        for name, value in linear.__dict__.items():
            if "_hook" in name or name not in made.__dict__:
                made.__dict__[name] = value  # hooks are shared, so that their handles still remove them
        if isinstance(recipe, DelayedScaling):
            made.make_histories(recipe.amax_history_len)
        return made

    def make_histories(self, length: int) -> Histories:
        """Empty histories of this length, where there are none."""
        if self.delayed is None:
            self.delayed = Histories(length, self.weight.device)
            state.register(self.delayed)
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
        self._kept = None
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def active_recipe(self) -> Recipe | None:
        """The recipe that a call now would use, None for none."""
        now = state.current()
        if state.is_explicit():
            return now.recipe if now.enabled else None
        return self.recipe

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x (..., in_features) -> (..., out_features) in the dtype of x (that of torch.autocast, where it is on).

        Args:
            is_first_microbatch: False takes the quantised weight of the call before, which True made, whatever became
                of the weight since: for steps of several microbatches, and for evaluation with weights that stay. None
                quantises it each time: no cheap test sees every change (edits through `.data` leave no trace).
        """
        check_first(is_first_microbatch)
        check_rows("x", x, self.in_features)
        check_one_device(x=x, weight=self.weight, bias=self.bias)
        x = _autocasted(x)
        recipe = self.active_recipe()
        if recipe is None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return nn.functional.linear(x, self.weight.to(x.dtype), bias)
        return self._quantized(x, recipe, is_first_microbatch)

    def _quantized(self, x: Tensor, recipe: Recipe, first: bool | None) -> Tensor:
        if x.dtype not in DTYPES:
            raise InvalidInputError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
        plan = Plan.of(recipe)
        if plan.random and torch.compiler.is_compiling():
            raise UnsupportedError(
                "stochastic rounding draws a seed each step, which torch.compile would freeze: use "
                "NVFP4BlockScaling(disable_stochastic_rounding=True), or leave this layer out of the compiled region"
            )
        backend = layer_backend(self.backend, x)
        delayed = isinstance(recipe, DelayedScaling)
        histories = self.make_histories(recipe.amax_history_len) if delayed else None  # type: ignore[attr-defined]
        # evaluation and recomputation change no history, whatever they see
        update = histories is not None and self.training and not state.recomputing()
        flat = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        scale = self._scale("input", flat, recipe, plan, update)
        weight = self._weight(recipe, plan, update, first, backend, needs_t=x.requires_grad)
        grad = histories.grad if histories is not None else None
        settings = (recipe.margin, recipe.amax_compute_algo) if isinstance(recipe, DelayedScaling) else (0, "max")
        y, *_, amax = linear_op(
            flat, self.weight, self.bias, *weight, scale,
            *((grad.history, grad.scale, grad.pending, grad.overflows) if grad is not None else (None,) * 4),
            plan.text, *settings, torch.is_grad_enabled() and self.weight.requires_grad, backend,
        )  # fmt: skip
        if update:
            assert histories is not None
            histories.input.pending.copy_(torch.maximum(histories.input.pending, amax.detach()))
        return y.view(*x.shape[:-1], self.out_features)

    def _scale(self, role: Role, x: Tensor, recipe: Recipe, plan: Plan, update: bool) -> Tensor | None:
        """The scale that is known before x is read, if any."""
        scheme = getattr(plan, role)
        if isinstance(recipe, DelayedScaling):
            assert self.delayed is not None
            history = self.delayed.of(role)
            if update:
                history.roll(recipe, scheme.largest)
            return state.scale_of_frame(history.scale.clone())
        group = state.current().group
        if group is None or not isinstance(recipe, Float8CurrentScaling) or role == "weight":
            return None
        amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        amax = torch.where(amax < float("inf"), amax, 0.0)
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        return scale_fp32(amax, scheme.largest, power_of_two=scheme.scale == "pow2")

    def _weight(
        self, recipe: Recipe, plan: Plan, update: bool, first: bool | None, backend: str, *, needs_t: bool
    ) -> tuple[Tensor, ...]:
        """Both quantised copies of the weight; the column-wise one only where a gradient of x will be asked for."""
        needs_t = needs_t and torch.is_grad_enabled()
        key = (plan.text, backend, self.weight.data_ptr() if not torch.compiler.is_compiling() else 0, needs_t)
        keep = first is not None and not torch.compiler.is_compiling()
        if keep and not first and self._kept is not None and self._kept[0][:3] == key[:3]:
            (_, _, _, had_t), weight = self._kept
            if had_t >= needs_t:
                return weight
        scale = self._scale("weight", self.weight, recipe, plan, update)
        *weight, amax = weight_op(self.weight.detach(), scale, plan.text, needs_t, backend)
        if update:
            assert self.delayed is not None
            pending = self.delayed.weight.pending
            pending.copy_(torch.maximum(pending, amax))
        if keep:
            self._kept = (key, tuple(weight))
        return tuple(weight)

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{recipe}"


def _autocasted(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast, where that is on."""
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x
