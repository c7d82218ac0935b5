"""Sequence parallelism with codes: ranks quantise their own rows and gather a byte a value, not two.

    column    forward: x is quantised (with the norm before it) and gathered; backward: dx is summed and cut
    row       forward: y is summed and cut; backward: dy is quantised and gathered

What arrives has the bits of quantising the gathered tensor: with delayed scaling the scale is known beforehand and the
same on all ranks, since their maxima are reduced; blocks of 1x128 and of MX lie within a rank's rows, where those are a
multiple of the block. The column-wise copy of a scale per tensor is the gathered codes turned round; that of blocks is
gathered as well. Sums travel in the dtype of activations: they are not codes. The norm runs on a rank's own rows.

Everything else (current scaling, whose scale would have to be reduced before the cast; NVFP4; ragged blocks; weights
that are kept or were gathered by FSDP2; torch.compile) is gathered as it was, in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_accel.transformer_engine import context as state
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.linear_op import (
    Plan,
    _multiply,
    check_second,
    layer_backend,
    linear_op,
    rolls_in_kernel,
)
from gpu_accel.transformer_engine.parallel import _gather, _sum_and_cut
from gpu_accel.transformer_engine.quantize_launch import PLAIN, Source, Three, turned_codes
from gpu_accel.transformer_engine.recipes import DelayedScaling, Recipe
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.sources import none_of, operand_op, quickly, source_backward

GPU_CHECKED = False  # whether it has been right on GPUs


@dataclass(frozen=True)
class Job:
    """A step; see `Linear._quantized`."""

    column: bool
    group: Any
    plan: Plan
    kind: str
    eps: float
    backend: str
    scales: tuple[Tensor | None, Tensor | None]  # of input and weight
    pending: tuple[Tensor | None, Tensor | None]
    grad_history: tuple[Tensor, Tensor, Tensor, Tensor] | None
    settings: tuple[int, str]  # margin and algorithm of delayed scaling
    reduced: bool  # whether `autocast` reduces maxima anyway


def _gathers(scheme: Scheme, scheme_t: Scheme, rows: int, delayed: bool) -> bool:
    """Whether a tensor of which each rank has `rows` rows can be gathered as codes of these schemes."""
    if scheme != scheme_t or scheme.rounding != "nearest" or scheme.packed:
        return False
    if scheme.block == (0, 0):
        return delayed
    return scheme.block[0] == 1 and scheme.block[1] > 1 and rows % scheme.block[1] == 0


def _rows(part: Three, scheme: Scheme, group: Any) -> Three:
    """Row-wise copies of all ranks, one below the other."""
    scales = part[1] if scheme.block == (0, 0) else _gather(part[1], group)
    return _gather(part[0], group), scales, part[2]


def _columns(part: Three, whole: Three, scheme: Scheme, group: Any) -> Three:
    """The column-wise copy: of the gathered codes, or of all ranks, side by side."""
    if scheme.block == (0, 0):
        return turned_codes(whole[0]), whole[1], whole[2]
    codes, scales = (_side_by_side(t, group) for t in part[:2])
    return codes, scales, part[2]


def _side_by_side(x: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    return _gather(x, group).view(ranks, *x.shape).transpose(0, 1).reshape(x.shape[0], -1)


def _reduce_pending(pending: Tensor | None, job: Job) -> None:
    """The maximum of all ranks, so that their histories stay alike."""
    if pending is not None and not job.reduced:
        seen = torch.where(pending.isnan(), float("inf"), pending)  # which no backend loses in a reduction
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=job.group)
        pending.copy_(seen)


class _Step(torch.autograd.Function):
    """y of x, weight, bias, gamma, beta; x and dy as this rank has them."""

    @staticmethod
    def forward(ctx, x, weight, bias, gamma, beta, job):  # type: ignore[override]
        plan, needs = job.plan, ctx.needs_input_grad
        flat, (n, k) = x.reshape(-1, x.shape[-1]), weight.shape
        whole_col = needs[1] and not (job.column and plan.input.block == (0, 0))
        *parts, means, rstds = quickly(operand_op, x)(
            flat.detach(), job.scales[0], job.pending[0], plan.input.text, plan.input_t.text, True, whole_col, 0,
            job.backend, job.kind, gamma, beta, job.eps,
        )  # fmt: skip
        row, col = parts[:3], parts[3:]
        if job.column:
            _reduce_pending(job.pending[0], job)
            mine, row = col, _rows(row, plan.input, job.group)
            col = _columns(mine, row, plan.input_t, job.group) if needs[1] else none_of(flat)
        needs_x = needs[0] or needs[3] or needs[4]
        *made, _, _ = quickly(operand_op, weight)(
            weight.detach(), job.scales[1], job.pending[1], plan.weight.text, plan.weight_t.text, True, needs_x, 0,
            job.backend, "", None, None, 0.0,
        )  # fmt: skip
        shape = (row[0].shape[0], n, k)
        y = _multiply(row, plan.input, made[:3], plan.weight, shape, x.dtype, job.backend, x.dtype, bias)
        lead = x.shape[:-1]
        if job.column:
            lead = (lead[0] * dist.get_world_size(job.group), *lead[1:])
        y = y.view(*lead, n)
        ctx.save_for_backward(x if job.kind else None, gamma, beta, means, rstds, *col, *made[3:])
        ctx.job, ctx.shape, ctx.x_shape = job, shape, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y if job.column else _sum_and_cut(y, job.group)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        check_second("a quantised layer", dy, ctx.needs_input_grad, ctx.job.kind)
        job, plan, (m, n, k), needs = ctx.job, ctx.job.plan, ctx.shape, ctx.needs_input_grad
        x, gamma, beta, means, rstds, *kept = ctx.saved_tensors
        xt, wt = kept[:3], kept[3:]
        needs_x = needs[0] or needs[3] or needs[4]
        used = pending = None
        if job.grad_history is not None:
            history, _, pending, _ = job.grad_history
            kernels = rolls_in_kernel(job.backend, history)
            used = quickly(roll_op, dy)(list(job.grad_history), [plan.grad.largest], *job.settings, kernels)[0, 0]
        flat = dy.reshape(-1, n)
        gathers = not job.column
        own_col = needs[1] and not (gathers and plan.grad.block == (0, 0))
        *parts, _, _ = quickly(operand_op, dy)(
            flat, used, pending, plan.grad.text, plan.grad_t.text, needs_x or gathers, own_col, 0, job.backend, "",
            None, None, 0.0,
        )  # fmt: skip
        row, col = parts[:3], parts[3:]
        if gathers:
            _reduce_pending(pending, job)
            mine, row = col, _rows(row, plan.grad, job.group)
            col = _columns(mine, row, plan.grad_t, job.group) if needs[1] else none_of(flat)
        dx = dw = db = dgamma = dbeta = None
        if needs[1]:
            shape = (n, k, m)
            dw = _multiply(col, plan.grad_t, xt, plan.input_t, shape, dy.dtype, job.backend, ctx.dtypes[1])
        if needs[2]:
            db = flat.sum(0, dtype=torch.float32).to(ctx.dtypes[2])
        if needs_x:
            dx = _multiply(row, plan.grad, wt, plan.weight_t, (m, k, n), dy.dtype, job.backend, ctx.dtypes[0])
            if job.column:
                lead = (ctx.x_shape[0] * dist.get_world_size(job.group), *ctx.x_shape[1:-1])
                dx = _sum_and_cut(dx.view(*lead, k), job.group).view(-1, k)
            if job.kind:
                source, flat_x = Source(job.kind, gamma, beta, job.eps), x.reshape(-1, x.shape[-1])
                kernels = job.backend != "reference"
                dx, dgamma, dbeta = source_backward(dx, flat_x, source, means, rstds, kernels=kernels)
            dx = dx.view(ctx.x_shape) if needs[0] else None
        return dx, dw, db, dgamma if needs[3] else None, dbeta if needs[4] else None, None


def step(layer: Any, x: Tensor, recipe: Recipe, first: bool | None, source: Source = PLAIN) -> Tensor | None:
    """A layer with sequence parallelism on its part of x (what `source` makes of it), or None where codes cannot be
    gathered. A row-parallel layer adds its bias afterwards."""
    how = layer.parallel
    if not (how.active and how.sequence) or first is not None or (x.is_cuda and not GPU_CHECKED):
        return None
    if quickly(linear_op, x) is linear_op or type(layer.weight) is not torch.nn.Parameter or x.dim() < 2:
        return None
    plan, now, delayed = Plan.of(recipe), state.current(), isinstance(recipe, DelayedScaling)
    if plan.random or now.frame is not None or not x.numel():
        return None
    rows, ranks = x.shape[:-1].numel(), dist.get_world_size(how.group)
    if how.mode == "column":
        fits = _gathers(plan.input, plan.input_t, rows, delayed)
    else:
        fits = x.shape[0] % ranks == 0 and _gathers(plan.grad, plan.grad_t, rows // ranks, delayed)
    if not fits:
        return None
    backend = layer_backend(layer.backend, x)
    settings, grad = (0, "max"), None
    pending: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(recipe, DelayedScaling):
        histories = layer.make_histories(recipe.amax_history_len)
        settings, grad = (recipe.margin, recipe.amax_compute_algo), histories.grad.state()
        if layer.training and not state.recomputing():
            pending = histories.input.pending, histories.weight.pending
    update = pending[0] is not None
    scales = layer._scales(x, recipe, plan, update, backend, with_weight=True)
    job = Job(
        how.mode == "column", how.group, plan, source.kind, source.eps, backend, (scales[0], scales[1]), pending, grad,
        settings, now.group is not None and delayed,
    )  # fmt: skip
    return _Step.apply(x, layer.weight, layer._bias(), source.gamma, source.beta, job)
