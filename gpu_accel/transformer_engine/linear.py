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
from gpu_accel.flash_attention3.function import refuse_transforms
from gpu_accel.transformer_engine import context as state
from gpu_accel.transformer_engine import taped
from gpu_accel.transformer_engine.checks import (
    check_first,
    check_flag,
    check_one_device,
    check_parameters,
    check_params_dtype,
    check_rows,
    check_size,
    check_tangents,
)
from gpu_accel.transformer_engine.delayed import DelayedLayer
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.linear_op import BACKENDS, Plan, layer_backend, linear, rolls_in_kernel
from gpu_accel.transformer_engine.parallel import enter, leave, parallel, shared
from gpu_accel.transformer_engine.quantize_launch import PLAIN, Source
from gpu_accel.transformer_engine.quantizer import DTYPES
from gpu_accel.transformer_engine.recipes import DelayedScaling, Float8CurrentScaling, Recipe, Role
from gpu_accel.transformer_engine.scales import scale_fp32
from gpu_accel.transformer_engine.sharded import plain, whole_rows
from gpu_accel.transformer_engine.sources import none_of, operand_op, quickly
from gpu_accel.transformer_engine.tensor import QuantizedTensor


class Linear(DelayedLayer):
    """y = x W^T + b, as `transformer_engine.pytorch.Linear`.

    Args:
        in_features, out_features, bias, device: as torch.nn.Linear; any sizes (NVIDIA's needs multiples of 16).
        params_dtype: of the parameters; None is torch's default.
        recipe: used where no `autocast` says otherwise; None quantises nothing there.
        backend: "portable" and "reference" as of `quantize` and `scaled_mm`; "hopper": Hopper's products where they
            take the operands, portable ones elsewhere; "auto": the best of what has been checked on a GPU.
        parallel_mode, tp_group, sequence_parallel: split over the ranks of a group, see `parallel.py`; in_features and
            out_features are those of the whole layer, the attributes and parameters those of the rank's part.

    Input (..., in_features), result (..., out_features) in its dtype; weight (out_features, in_features), bias (N,).

    Raises:
        InvalidInputError: sizes, dtypes, a recipe or backend that is none, an input of another width. UnsupportedError,
        HardwareError: as `scaled_mm`.

    `delayed` holds the histories once delayed scaling was used; they are part of the state_dict. A state_dict with
    histories makes them, one without leaves them as they are.
    """


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
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        state.check_recipe(recipe)
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_flag("bias", bias)
        check_params_dtype(params_dtype)
        self.parallel = parallel(parallel_mode, tp_group, sequence_parallel)
        self.entered = False  # whether a layer around this one has gathered its input already
        bound = 1 / math.sqrt(in_features)  # of the whole layer, however it is split
        if parallel_mode == "column":
            out_features = self.parallel.part("out_features", out_features)
        elif parallel_mode == "row":
            in_features = self.parallel.part("in_features", in_features)
        if backend not in BACKENDS:
            raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.backend = recipe, backend
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None
        self.delayed = None
        self._kept: tuple[Any, ...] | None = None  # what a quantised weight was made for, and itself
        self._kinds = taped.Kinds()
        if isinstance(recipe, DelayedScaling):
            self.make_histories(recipe.amax_history_len)
        self._bound = bound
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch.nn.Linear's, each rank its part: give ranks seeds of their own."""
        nn.init.uniform_(self.weight, -self._bound, self._bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -self._bound, self._bound)

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

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
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
        recipe = self.active_recipe()
        if recipe is None:
            check_one_device(x=x, weight=self.weight, bias=self.bias)
        else:
            self.check(x)
        x = _autocasted(x)
        if self.parallel.mode == "column" and not self.entered:
            y = None if recipe is None else self._of_codes(x, recipe, is_first_microbatch)
            if y is not None:
                return y
            x = enter(x, self.parallel)
        if recipe is None:
            self._check_gathered(None)
            bias = self._bias()
            bias = None if bias is None else bias.to(x.dtype)
            return self._left(nn.functional.linear(x, self.weight.to(x.dtype), bias))
        return self._done(x, recipe, is_first_microbatch)

    def check(self, x: Tensor) -> None:
        """Where parameters are and how large, which no kernel looks at."""
        check_tangents(x=x)
        refuse_transforms("a layer under a recipe")
        n, k = self.out_features, self.in_features
        check_parameters(x, weight=(self.weight, (n, k)), bias=(self.bias, (n,)))

    def _done(self, x: Tensor, recipe: Recipe, first: bool | None, source: Source = PLAIN) -> Tensor:
        """The whole layer on what every rank has of x."""
        if self.parallel.mode == "row" and (y := self._of_codes(x, recipe, first, source)) is not None:
            return self._biased(y)
        return self._left(self._quantized(x, recipe, first, source))

    def _of_codes(self, x: Tensor, recipe: Recipe, first: bool | None, source: Source = PLAIN) -> Tensor | None:
        """The layer with sequence parallelism where ranks gather codes, see `sequence.py`; None where they cannot."""
        if not (self.parallel.active and self.parallel.sequence) or x.dtype not in DTYPES:
            return None
        from gpu_accel.transformer_engine.sequence import step

        return step(self, x, recipe, first, source)

    def _bias(self) -> Tensor | None:
        """The bias that the product adds; with parts of a sum it comes after the sum."""
        return None if self.parallel.mode == "row" else self.bias

    def _left(self, y: Tensor) -> Tensor:
        """y of the whole layer, of a row-parallel one."""
        if self.parallel.mode != "row":
            return y
        return self._biased(leave(y, self.parallel))

    def _biased(self, y: Tensor) -> Tensor:
        """y plus the bias, which a row-parallel layer adds once the parts are summed."""
        if self.bias is None:
            return y
        bias = shared(self.bias, self.parallel) if self.parallel.sequence else self.bias
        assert bias is not None
        return y + bias.to(y.dtype)

    def _quantized(self, x: Tensor, recipe: Recipe, first: bool | None, source: Source = PLAIN) -> Tensor:
        """The layer on x, or on what `source` makes of x: quantised in one go with it."""
        if x.dtype not in DTYPES:
            raise InvalidInputError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
        plan = Plan.of(recipe)
        if plan.random and torch.compiler.is_compiling():
            raise UnsupportedError(
                "stochastic rounding draws a seed each step, which torch.compile would freeze: use "
                "NVFP4BlockScaling(disable_stochastic_rounding=True), or leave this layer out of the compiled region"
            )
        backend = layer_backend(self.backend, x)
        self._check_gathered(plan)
        before = None if first is None else self._kept_weight(plan, first, backend, needs_t=False)
        if first is None or before is not None:
            y = taped.step(self, x, recipe, plan, backend, source, before)
            if y is not None:
                return y
        histories = self.make_histories(recipe.amax_history_len) if isinstance(recipe, DelayedScaling) else None
        # evaluation and recomputation change no history, whatever they see
        update = histories is not None and self.training and not state.recomputing()
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        grads = torch.is_grad_enabled()
        needs_t = grads and any(t is not None and t.requires_grad for t in (x, source.gamma, source.beta))
        keep = grads and self.weight.requires_grad
        whole = self._check_gathered(plan)
        kept: tuple[Tensor, ...] | None
        if whole is not None:
            kept = (*whole_rows(whole), *none_of(flat))  # the other copy is made once the backward pass has gathered it
        else:
            kept = self._kept_weight(plan, first, backend, needs_t)
        scales = self._scales(flat, recipe, plan, update, backend, with_weight=kept is None)
        pending = [None if histories is None or not update else histories.of(r).pending for r in ("input", "weight")]
        gamma, beta = (None if t is None else t.detach() for t in (source.gamma, source.beta))
        *operand, means, rstds = quickly(operand_op, x)(
            flat.detach(), scales[0], pending[0], plan.input.text, plan.input_t.text, True, keep, 0, backend,
            source.kind, gamma, beta, source.eps,
        )  # fmt: skip
        if kept is None:
            values = plain(self.weight.detach())
            *made, _, _ = quickly(operand_op, values)(
                values, scales[1], pending[1], plan.weight.text, plan.weight_t.text, True, needs_t, 0,
                backend, "", None, None, 0.0,
            )  # fmt: skip
            kept = tuple(made)
            if first is not None and not torch.compiler.is_compiling():
                self._kept = (self._key(plan, backend), needs_t, kept)
        grad = histories.grad if histories is not None else None
        settings = (recipe.margin, recipe.amax_compute_algo) if isinstance(recipe, DelayedScaling) else (0, "max")
        y = linear(
            flat, self.weight, self._bias(), source.gamma, source.beta, *operand, means, rstds, *kept,
            *((grad.history, grad.scale, grad.pending, grad.overflows) if grad is not None else (None,) * 4),
            plan.text, source.kind, source.eps, *settings, backend,
        )  # fmt: skip
        # no view: FSDP2 warns of modules that return one, for its hooks are lost where that is changed in place
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))

    def _scales(
        self, x: Tensor, recipe: Recipe, plan: Plan, update: bool, backend: str, *, with_weight: bool
    ) -> list[Tensor | None]:
        """The scales of input and weight that are known before either is read: of delayed scaling, or None."""
        if isinstance(recipe, DelayedScaling):
            assert self.delayed is not None
            roles: tuple[Role, ...] = ("input", "weight") if with_weight else ("input",)
            histories = [self.delayed.of(role) for role in roles]
            if update:
                states = [t for h in histories for t in (h.history, h.scale, h.pending, h.overflows)]
                largest = [getattr(plan, role).largest for role in roles]
                kernels = rolls_in_kernel(backend, self.delayed.input.history)
                rolled = quickly(roll_op, x)(states, largest, recipe.margin, recipe.amax_compute_algo, kernels)
                found = [rolled[i, 0] for i in range(len(roles))]
            else:
                kept = state.current().frame is not None  # a checkpoint keeps what may have changed by then
                found = [h.scale.clone() if kept else h.scale for h in histories]
            return [*map(state.scale_of_frame, found), None]
        group = state.current().group
        if group is None or not isinstance(recipe, Float8CurrentScaling):
            return [None, None]
        amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        amax = torch.where(amax < float("inf"), amax, 0.0)
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        return [scale_fp32(amax, plan.input.largest, power_of_two=plan.input.scale == "pow2"), None]

    def _check_gathered(self, plan: Plan | None) -> QuantizedTensor | None:
        """The weight, where FSDP2 has gathered it in FP8 and the plan has that format for weights."""
        weight = self.weight
        if not isinstance(weight, QuantizedTensor):
            return None
        if plan is None or plan.weight != weight.scheme or plan.weight_t != weight.scheme:
            wanted = "none" if plan is None else f"weights in {plan.weight}"
            raise UnsupportedError(
                f"this layer's weight was gathered as {weight.scheme} (gather_in_fp8), and the recipe in force here "
                f"wants {wanted}: use a recipe with that format, or leave the layer out with `filter`"
            )
        return weight

    def _key(self, plan: Plan, backend: str) -> tuple[Any, ...]:
        """What kept copies of the weight are good for."""
        return plan.text, backend, plain(self.weight).data_ptr()

    def _kept_weight(self, plan: Plan, first: bool | None, backend: str, needs_t: bool) -> tuple[Tensor, ...] | None:
        """Both quantised copies of the weight from the call before, where they are asked for and fit."""
        if first is not False or self._kept is None or torch.compiler.is_compiling():
            return None
        key, had_t, weight = self._kept
        return weight if key == self._key(plan, backend) and had_t >= needs_t else None

    def fuses(self, x: Tensor, recipe: Recipe) -> bool:
        """Whether a norm or an activation before this layer can be computed while its result is quantised: not where
        hooks want to see the result, another dtype is in force, or its maximum is needed beforehand on all ranks."""
        hooked = any((self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks))
        reduces = isinstance(recipe, Float8CurrentScaling) and state.current().group is not None
        return not (hooked or reduces) and x.dtype in DTYPES and _autocasted(x).dtype == x.dtype

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{recipe}"


def _autocasted(x: Tensor) -> Tensor:
    """x in the dtype of torch.autocast, where that is on."""
    device = x.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x
