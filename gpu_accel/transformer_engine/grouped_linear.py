"""`GroupedLinear`: linear layers of the experts of a mixture, in one product forward and two backward, on FP8 operands.

    layer = GroupedLinear(8, 4096, 14336)
    with autocast(recipe=Float8BlockScaling()):
        y = layer(x, m_splits)          # x (M, K), rows sorted by expert; m_splits: how many rows each has

Rows of each expert go to whole blocks of 128 (`group_rows`), padded with zeros, which add nothing to any product: y and
dx are `grouped_mm`, dW is `k_grouped_mm`. Where `m_splits` is a tensor on the GPU nothing waits for it, so that a step
can be captured in a CUDA graph; the room for padding is then that of the worst case, 127 rows an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.transformer_engine import context as state
from gpu_accel.transformer_engine.checks import (
    check_flag,
    check_parameters,
    check_params_dtype,
    check_rows,
    check_size,
    check_tangents,
)
from gpu_accel.transformer_engine.delayed import DelayedLayer
from gpu_accel.transformer_engine.gemm_grouped import BLOCK, _check_counts, grouped_mm, k_grouped_mm
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.linear import _autocasted
from gpu_accel.transformer_engine.linear_op import BACKENDS, Plan, check_second, layer_backend, rolls_in_kernel
from gpu_accel.transformer_engine.quantize_launch import Three
from gpu_accel.transformer_engine.quantizer import DTYPES
from gpu_accel.transformer_engine.recipes import DelayedScaling, Recipe
from gpu_accel.transformer_engine.reference import Parts
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.sources import operand_op, quickly
from gpu_accel.transformer_engine.tensor import QuantizedTensor


@dataclass(frozen=True)
class Rows:
    """Where rows go. place (M,): of each row among `room` padded ones; groups (room,) int32; ends (G,) int32."""

    place: Tensor
    groups: Tensor
    ends: Tensor
    room: int
    expert: Tensor  # (M,): of each row

    @classmethod
    def of(cls, sizes: Tensor, rows: int) -> Rows:
        """For sizes (G,) on the device of the rows. On a CPU they must sum up to `rows`."""
        count = sizes.shape[0]
        sizes = sizes.long()
        padded = (sizes + BLOCK - 1) // BLOCK * BLOCK
        ends = padded.cumsum(0)
        most = (rows + count * (BLOCK - 1)) // BLOCK * BLOCK
        room = int(ends[-1]) if sizes.device.type == "cpu" else most
        shift = ends - padded - (sizes.cumsum(0) - sizes)
        experts = torch.arange(count, device=sizes.device)
        expert = experts.repeat_interleave(sizes, output_size=rows)
        place = torch.arange(rows, device=sizes.device) + shift[expert]
        first = torch.arange(0, room, BLOCK, device=sizes.device)
        member = torch.searchsorted(ends, first, right=True)
        member = torch.where(member < count, member, -1).to(torch.int32)
        return cls(place, member.repeat_interleave(BLOCK), ends.to(torch.int32), room, expert)

    def to(self, device: torch.device) -> Rows:
        place, groups, ends, expert = (t.to(device) for t in (self.place, self.groups, self.ends, self.expert))
        return Rows(place, groups, ends, self.room, expert)

    def spread(self, x: Tensor) -> Tensor:
        """x (M, K) with zeros between experts, (room, K)."""
        return x.new_zeros(self.room, x.shape[1]).index_copy_(0, self.place, x)


def _operand(three: Sequence[Tensor], scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> QuantizedTensor:
    parts = Parts(three[0], three[1])
    return QuantizedTensor.from_parts(row=parts, col=None, scheme=scheme, shape=torch.Size(shape), dtype=dtype)


def _quantised(x: Tensor, scale: Tensor | None, seen: Tensor | None, scheme: Scheme, row: bool, col: bool,
               backend: str) -> tuple[Three, Three]:  # fmt: skip
    made = quickly(operand_op, x)(x, scale, seen, scheme.text, scheme.text, row, col, 0, backend, "", None, None, 0.0)
    return made[:3], made[3:6]


class _Grouped(torch.autograd.Function):
    """x (M, K), weight (G, N, K), bias (G, N) or None -> y (M, N)."""

    @staticmethod
    def forward(ctx, x, weight, bias, rows, plan, scales, pending, grad_history, settings, backend):  # type: ignore[override]
        count, n, k = weight.shape
        needs = ctx.needs_input_grad
        spread = rows.spread(x)
        row, col = _quantised(spread, scales[0], pending[0], plan.input, True, needs[1], backend)
        flat = weight.detach().reshape(count * n, k)
        own, _ = _quantised(flat, scales[1], pending[1], plan.weight, True, False, backend)
        y = grouped_mm(
            _operand(row, plan.input, (rows.room, k), x.dtype), _operand(own, plan.weight, (count, n, k), x.dtype),
            rows.groups, bias=None if bias is None else bias.detach(), out_dtype=x.dtype, backend=backend,
        ).index_select(0, rows.place)  # fmt: skip
        turned: Three | tuple[()] = ()
        if needs[0]:
            flat = weight.detach().transpose(1, 2).reshape(count * k, n)
            turned, _ = _quantised(flat, scales[1], None, plan.weight_t, True, False, backend)
        ctx.save_for_backward(*col[:2], *turned[:2])
        ctx.rows, ctx.plan, ctx.settings, ctx.backend, ctx.grad_history = rows, plan, settings, backend, grad_history
        ctx.shape, ctx.dtypes = (count, n, k), (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        check_second("a grouped layer", dy, (*ctx.needs_input_grad[:3], False, False), "")
        (count, n, k), rows, plan, needs = ctx.shape, ctx.rows, ctx.plan, ctx.needs_input_grad
        saved = ctx.saved_tensors  # asked for once: checkpoints give them once
        xt, turned = saved[:2], saved[2:]
        dx = dw = db = used = pending = None
        if ctx.grad_history is not None:
            history = ctx.grad_history
            margin, algorithm = ctx.settings
            used = quickly(roll_op, dy)(
                list(history), [plan.grad.largest], margin, algorithm, rolls_in_kernel(ctx.backend, history[0])
            )[0, 0]  # fmt: skip
            pending = history[2]
        spread = rows.spread(dy)
        row, col = _quantised(spread, used, pending, plan.grad, needs[0], needs[1], ctx.backend)
        if needs[0]:
            a = _operand(row, plan.grad, (rows.room, n), dy.dtype)
            b = _operand(turned, plan.weight_t, (count, k, n), dy.dtype)
            dx = grouped_mm(a, b, rows.groups, out_dtype=ctx.dtypes[0], backend=ctx.backend)
            dx = dx.index_select(0, rows.place)
        if needs[1]:
            a = _operand(col, plan.grad_t, (n, rows.room), dy.dtype)
            b = _operand(xt, plan.input_t, (k, rows.room), dy.dtype)
            dw = k_grouped_mm(a, b, rows.ends, out_dtype=torch.float32, backend=ctx.backend).to(ctx.dtypes[1])
        if needs[2]:
            db = torch.zeros(count, n, device=dy.device).index_add_(0, rows.expert, dy.float()).to(ctx.dtypes[2])
        return (dx, dw, db, *(None for _ in range(7)))


def _check_sum(sizes: list[int], rows: int) -> None:
    if sum(sizes) != rows or any(n < 0 for n in sizes):
        raise InvalidInputError(f"m_splits must be at least 0 and sum up to {rows}, got {shown(sizes)}")


class GroupedLinear(DelayedLayer):
    """y[i] = x[i] W[e]^T + b[e] with e the expert of row i, as `transformer_engine.pytorch.GroupedLinear`.

    Args:
        num_gemms: experts. in_features, out_features, bias, params_dtype, device, recipe, backend: as of `Linear`, for
            each expert. With blocks of 128 both sizes must be multiples of 128, so that no block has two experts.

    weight is one parameter (num_gemms, out_features, in_features), bias (num_gemms, out_features); Transformer Engine
    has one a matrix (`from_experts` joins such). Recipes: per-tensor FP8 (one scale for the tensors of all experts)
    and blocks of 128. Errors as of `Linear`, and UnsupportedError for other recipes.
    """


    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, *,
        params_dtype: torch.dtype | None = None, device: torch.device | str | None = None,
        recipe: Recipe | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        state.check_recipe(recipe)
        check_size("num_gemms", num_gemms)
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_flag("bias", bias)
        check_params_dtype(params_dtype)
        if backend not in BACKENDS:
            raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.recipe, self.backend = recipe, backend
        options: dict[str, Any] = dict(dtype=params_dtype, device=device)
        self.weight = nn.Parameter(torch.empty(num_gemms, out_features, in_features, **options))
        self.bias = nn.Parameter(torch.empty(num_gemms, out_features, **options)) if bias else None
        self.delayed = None
        if isinstance(recipe, DelayedScaling):
            self.make_histories(recipe.amax_history_len)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch.nn.Linear's, of each expert."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_experts(
        cls, experts: Sequence[nn.Linear], *, recipe: Recipe | None = None, backend: str = "auto"
    ) -> GroupedLinear:  # fmt: skip
        """A layer with copies of the parameters of torch.nn.Linear layers of one shape, dtype and device."""
        if not isinstance(experts, Sequence | nn.ModuleList) or not all(isinstance(e, nn.Linear) for e in experts):
            raise InvalidInputError(f"experts must be torch.nn.Linear layers, got {shown(experts)}")
        if not experts or any(e.weight.shape != experts[0].weight.shape for e in experts):
            raise InvalidInputError("experts must be linear layers of one shape, one at least")
        if len({(e.weight.dtype, e.weight.device) for e in experts}) > 1:
            raise InvalidInputError("experts must have one dtype and be on one device: move them with .to()")
        if any((e.bias is None) != (experts[0].bias is None) for e in experts):
            raise InvalidInputError("either all experts have a bias, or none")
        first = experts[0]
        made = cls(
            len(experts), first.in_features, first.out_features, first.bias is not None, recipe=recipe,
            params_dtype=first.weight.dtype, device=first.weight.device, backend=backend,
        )  # fmt: skip
        with torch.no_grad():
            made.weight.copy_(torch.stack([e.weight for e in experts]))
            if made.bias is not None:
                made.bias.copy_(torch.stack([e.bias for e in experts]))
        return made

    def forward(self, x: Tensor, m_splits: Sequence[int] | Tensor) -> Tensor:
        """x (M, in_features) -> (M, out_features) in the dtype of x (that of torch.autocast, where it is on).

        Args:
            m_splits: rows of each expert, that sum up to M: integers, or a tensor (num_gemms,) of them (on a GPU it is
                not looked at under a recipe, and must not sum up to another number).
        Raises:
            InvalidInputError: x, m_splits or parameters of other shapes, dtypes or devices. UnsupportedError: a recipe
                that grouped layers do not take, or sizes that its blocks do not divide.
        """
        check_rows("x", x, self.in_features)
        count, n, k = self.num_gemms, self.out_features, self.in_features
        check_parameters(x, weight=(self.weight, (count, n, k)), bias=(self.bias, (count, n)))
        x = _autocasted(x)
        if x.dim() != 2 or x.dtype not in DTYPES:
            raise InvalidInputError(f"x must be (M, K) in 16 or 32 bits, got {tuple(x.shape)} {x.dtype}")
        sizes = self._sizes(m_splits, x.shape[0])
        now = state.current()
        recipe = (now.recipe if now.enabled else None) if state.is_explicit() else self.recipe
        if recipe is None:
            return self._plain(x, sizes)
        plan = Plan.of(recipe)
        if any(s.scale not in ("fp32", "pow2") for s in (plan.input, plan.weight, plan.grad)):
            raise UnsupportedError(f"grouped layers take FP8 per tensor and in blocks of 128, not {recipe.title}")
        if plan.grad.block == (128, 128) or plan.input.block == (128, 128):
            raise UnsupportedError("inputs and gradients of grouped layers have blocks of 1x128")
        if plan.weight.block == (128, 128) and (self.in_features % 128 or self.out_features % 128):
            raise UnsupportedError(
                f"blocks of 128x128 need sizes that are multiples of 128, got {self.in_features}, {self.out_features}"
            )
        if now.group is not None and not isinstance(recipe, DelayedScaling) and plan.input.block == (0, 0):
            raise UnsupportedError("current scaling of grouped layers has no amax_reduction_group: use blocks of 128")
        if x.shape[0] == 0:
            return self._plain(x, sizes)
        return self._quantized(x, Rows.of(sizes, x.shape[0]).to(x.device), recipe, plan)

    def _sizes(self, m_splits: Sequence[int] | Tensor, rows: int) -> Tensor:
        """(num_gemms,) integers."""
        if not isinstance(m_splits, Tensor):
            if not isinstance(m_splits, Sequence) or any(type(n) is not int or abs(n) >= 2**63 for n in m_splits):
                raise InvalidInputError(f"m_splits must be a list of integers or a tensor, got {shown(m_splits)}")
            m_splits = torch.tensor(list(m_splits), dtype=torch.int64)
        _check_counts("m_splits", m_splits)
        if m_splits.shape[0] != self.num_gemms or m_splits.is_meta:
            got = f"{m_splits.shape[0]} on {m_splits.device}"
            raise InvalidInputError(f"m_splits must be {self.num_gemms} integers with values, got {got}")
        if m_splits.device.type == "cpu":
            _check_sum(m_splits.tolist(), rows)
        return m_splits

    def _plain(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Without a recipe: torch's products, one an expert."""
        parts, at, numbers = [], 0, sizes.tolist()
        _check_sum(numbers, x.shape[0])
        for expert, size in enumerate(numbers):
            bias = None if self.bias is None else self.bias[expert].to(x.dtype)
            parts.append(nn.functional.linear(x[at : at + size], self.weight[expert].to(x.dtype), bias))
            at += size
        return torch.cat(parts)

    def _quantized(self, x: Tensor, rows: Rows, recipe: Recipe, plan: Plan) -> Tensor:
        backend = layer_backend(self.backend, x)
        scales: list[Tensor | None] = [None, None]
        pending: list[Tensor | None] = [None, None]
        settings, grad = (0, "max"), None
        if isinstance(recipe, DelayedScaling):
            histories = self.make_histories(recipe.amax_history_len)
            settings, grad = (recipe.margin, recipe.amax_compute_algo), histories.grad.state()
            pair = (histories.input, histories.weight)
            if self.training and not state.recomputing():
                states = [t for h in pair for t in h.state()]
                largest = [plan.input.largest, plan.weight.largest]
                kernels = rolls_in_kernel(backend, histories.input.history)
                rolled = quickly(roll_op, x)(states, largest, *settings, kernels)
                scales, pending = [rolled[0, 0], rolled[1, 0]], [h.pending for h in pair]
            else:
                kept = state.current().frame is not None  # a checkpoint keeps what may have changed by then
                scales = [h.scale.clone() if kept else h.scale for h in pair]
            scales = [state.scale_of_frame(scale) for scale in scales if scale is not None]
        check_tangents(x=x, weight=self.weight, bias=self.bias)
        return _Grouped.apply(
            x, self.weight, self.bias, rows, plan, scales, pending, grad, settings, backend
        )  # fmt: skip

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{recipe}"
        )
