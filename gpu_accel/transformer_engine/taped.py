"""Eager steps of a layer as tapes: what `Linear._quantized` and the backward pass of `linear_op` do, played back.

The first step of a kind (shapes, strides, dtypes, recipe, what wants a gradient) goes the ordinary way, the second is
written down, and from the third on the layer's launches follow each other with nothing in between (`tape.py`). On a GPU
only, and where all there is to do is launches: without maxima that are reduced beforehand, checkpoints or random
rounding. Weights that FSDP2 has gathered as codes are taken as such, and so are weights that a layer keeps, where no
gradient is wanted. Everything else goes the ordinary way, always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import launch as launching
from gpu_accel.flash_attention3.function import flash_attention_backward, flash_attention_forward
from gpu_accel.flash_attention3.problem import check_first_gradient
from gpu_accel.transformer_engine import context as state
from gpu_accel.transformer_engine import hopper_gemm, quantizer
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.linear_op import Plan, check_second, linear_backward_op, linear_op, rolls_in_kernel
from gpu_accel.transformer_engine.quantize_launch import Source, turned_codes
from gpu_accel.transformer_engine.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from gpu_accel.transformer_engine.sources import none_of, operand_op, quickly
from gpu_accel.transformer_engine.tape import Tape
from gpu_accel.transformer_engine.tensor import QuantizedTensor

MOST = 64  # kinds of steps that a layer remembers
GPU_CHECKED = True  # whether tests/gpu/test_transformer_engine.py has found the same bits on a GPU
ON_CPU = False  # for tests: in Triton's interpreter too
_SEEN = 1


@dataclass(frozen=True)
class What:
    """What a step is, beside its tensors; see `linear_op`."""

    plan: Plan
    kind: str
    eps: float
    margin: int
    algorithm: str
    backend: str
    delayed: bool
    update: bool
    kernels: bool  # whether histories are rolled by one
    needs_x: bool
    needs_w: bool
    gathered: bool  # whether the weight is given as codes
    shape: tuple[int, ...]  # of x
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    b_dtype: torch.dtype
    n: int
    k: int


def forward_of(what: What) -> Callable[..., tuple[tuple, tuple]]:
    """(x, weight, bias, gamma, beta, codes and scales of a gathered weight, and of input and weight history, scale,
    pending, overflows) -> (y,), (kept)."""

    def run(x, weight, bias, gamma, beta, codes, scales_of_codes, *histories):
        plan = what.plan
        flat = x.view(-1, x.shape[-1])
        scales, pending = (None, None), (None, None)
        if what.delayed:
            scales = histories[1], None if what.gathered else histories[5]
            if what.update:
                largest = [plan.input.largest] if what.gathered else [plan.input.largest, plan.weight.largest]
                states = list(histories[: 4 * len(largest)])
                rolled = roll_op._init_fn(states, largest, what.margin, what.algorithm, what.kernels)
                scales = rolled[0, 0], None if what.gathered else rolled[1, 0]
                pending = histories[2], None if what.gathered else histories[6]
        *operand, means, rstds = operand_op._init_fn(
            flat, scales[0], pending[0], plan.input.text, plan.input_t.text, True, what.needs_w, 0, what.backend,
            what.kind, gamma, beta, what.eps,
        )  # fmt: skip
        if what.gathered:  # the other copy is made in the backward pass, once that has gathered the weight again
            made = [codes, scales_of_codes, *none_of(flat)[2:], *none_of(flat)]
        else:
            *made, _, _ = operand_op._init_fn(
                weight, scales[1], pending[1], plan.weight.text, plan.weight_t.text, True, what.needs_x, 0,
                what.backend, "", None, None, 0.0,
            )  # fmt: skip
        weight = codes if what.gathered else weight
        y = linear_op._init_fn(
            flat, weight, bias, gamma, beta, *operand, means, rstds, *made, None, None, None, None, plan.text,
            what.kind, what.eps, what.margin, what.algorithm, what.backend,
        )  # fmt: skip
        return (y,), (*operand[3:], means, rstds, *made[3:])

    return run


def backward_of(what: What, needs: tuple[bool, bool, bool]) -> Callable[..., tuple[tuple, tuple]]:
    """(dy, x, gamma, beta, codes and scales of a gathered weight, history, scale, pending, overflows of the gradient,
    kept) -> (dx, dW, dbias, dgamma, dbeta); None for what is not in needs."""

    def run(dy, x, gamma, beta, codes, scales_of_codes, history, scale, pending, overflows, *kept):
        plan = what.plan
        flat = dy.reshape(-1, dy.shape[-1])
        xt, (means, rstds), wt = kept[:3], kept[3:5], kept[5:8]
        if what.gathered and needs[0]:
            wt = (turned_codes(codes), scales_of_codes.t().contiguous(), wt[2])
        used = None
        if history is not None:
            states = [history, scale, pending, overflows]
            used = roll_op._init_fn(states, [plan.grad.largest], what.margin, what.algorithm, what.kernels)[0, 0]
        *copies, _, _ = operand_op._init_fn(
            flat, used, pending, plan.grad.text, plan.grad_t.text, needs[0], needs[1], 0, what.backend, "", None, None,
            0.0,
        )  # fmt: skip
        given = x.view(-1, x.shape[-1]) if what.kind else None
        dx, dw, db, dgamma, dbeta = linear_backward_op._init_fn(
            flat, *copies, given, *xt, gamma, beta, means, rstds, *wt, what.k, plan.text, what.kind, what.eps,
            list(needs), what.x_dtype, what.w_dtype, what.b_dtype, what.backend,
        )  # fmt: skip
        made = [t if need else None for t, need in zip((dx, dw, db), needs, strict=True)]
        made += [t if needs[0] and given is not None and t.numel() else None for t in (dgamma, dbeta)]
        return tuple(made), ()

    return run


class Kinds(dict):
    """What a layer knows of its steps. A copy of the layer, in memory or in a file, starts anew."""

    def __deepcopy__(self, memo: Any) -> Kinds:
        return Kinds()

    def __reduce__(self) -> Any:
        return Kinds, ()


@dataclass
class Kind:
    """Steps of one kind: what they are, the tape of the forward pass and those of backward passes."""

    what: What
    forward: Tape | None = None
    backward: dict[tuple, Tape | int] = field(default_factory=dict)
    why_not: str = ""


class _Step(torch.autograd.Function):
    """x (..., K), weight, bias, gamma, beta want gradients; kind, the histories of the layer, and codes and scales of a
    weight that was quantised before (without gradients only)."""

    @staticmethod
    def forward(ctx, kind, histories, grad_history, given, x, weight, bias, gamma, beta):  # type: ignore[override]
        gathered = weight if kind.what.gathered and given is None else None
        given = _codes(gathered) if given is None else given
        inputs = (x, None if kind.what.gathered else weight, bias, gamma, beta, *given, *histories)
        what = kind.what
        if kind.forward is None:
            y, kept = _record(kind, inputs)
        else:
            (y,), pool = kind.forward.play(inputs)
            kept = (pool,)
        ctx.save_for_backward(x if what.kind else None, gamma, beta, gathered, *kept)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.grad_history, ctx.pooled = kind, grad_history, len(kept) == 1
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        nothing = (None,) * 9
        if dy is None:
            return nothing
        check_second("a quantised linear layer", dy, ctx.needs_input_grad[4:], ctx.kind.what.kind)
        x, gamma, beta, gathered, *kept = ctx.saved_tensors
        kind, wanted = ctx.kind, ctx.needs_input_grad
        needs = (wanted[4] or wanted[7] or wanted[8], wanted[5], bool(wanted[6]))
        given = (dy, x, gamma, beta, *_codes(gathered), *ctx.grad_history)
        made = _gradients(kind, needs, given, kept, ctx.pooled)
        dx, dw, db, dgamma, dbeta = made
        if dx is not None:
            dx = dx.view(kind.what.shape) if wanted[4] else None
        return (*nothing[:4], dx, dw, db, dgamma if wanted[7] else None, dbeta if wanted[8] else None)


def _codes(weight: Any) -> tuple[Tensor | None, Tensor | None]:
    """Codes, as bytes, and scales of a weight that was gathered."""
    return (None, None) if weight is None else (weight.codes.view(torch.uint8), weight.scales)


def _record(kind: Kind, inputs: tuple) -> tuple[Tensor, tuple]:
    """The forward pass as it is, written down for the next time."""
    what = kind.what
    shape = (*what.shape[:-1], what.n)
    (y,), kept, kind.forward, kind.why_not = Tape.record(forward_of(what), inputs, [shape])
    return torch.ops.aten._unsafe_view(y, shape), kept


def _gradients(kind: Kind, needs: tuple, given: tuple, kept: list[Tensor], pooled: bool) -> Any:
    """(dx, dW, dbias, dgamma, dbeta), by the tape of this kind of backward pass where there is one."""
    dy, run = given[0], backward_of(kind.what, needs)
    if not pooled:
        return run(*given, *kept)[0]
    assert kind.forward is not None
    # what else is read has the alignment that it had in the forward pass, but for weights that were gathered again
    key = needs, dy.shape, dy.stride(), dy.dtype, dy.data_ptr() % 16, _alignment(given[4:6])
    tape = kind.backward.get(key)
    if isinstance(tape, Tape) and tape.fits():
        return tape.play((*given, kept[0]))[0]
    inputs = (*given, kept[0])
    if tape is None and len(kind.backward) < MOST and _plain(*inputs) and not _capturing(dy):

        def with_views(*all_of_it):
            return run(*all_of_it[:-1], *kind.forward.views(all_of_it[-1]))  # type: ignore[union-attr]

        made, _, tape, why = Tape.record(with_views, inputs, [kind.what.shape])
        kind.backward[key] = _SEEN if tape is None else tape
        kind.why_not = kind.why_not or why
        return made
    return run(*given, *kind.forward.views(kept[0]))[0]


def _alignment(tensors: tuple[Tensor | None, ...]) -> int:
    """What the worst address lacks to a multiple of 16 bytes: kernels are compiled for it."""
    addresses = 0
    for t in tensors:
        if t is not None:
            addresses |= t.data_ptr()
    return addresses % 16


def _plain(*tensors: Tensor | None) -> bool:
    return all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)


def _capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which has counters of its own."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _packs() -> bool:
    """Whether hooks change what is saved for the backward pass."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def step(
    layer: Any, x: Tensor, recipe: Recipe, plan: Plan, backend: str, source: Source,
    kept: tuple[Tensor, ...] | None = None,
) -> Tensor | None:  # fmt: skip
    """The layer on x (or on what `source` makes of it), or None where the ordinary way has to be gone.

    kept: the weight as it was quantised before, where no gradient is wanted.
    """
    weight, bias = layer.weight, layer._bias()
    if not (GPU_CHECKED if x.is_cuda else ON_CPU) or launching._hook is not None:
        return None
    if backend == "reference" or plan.random:
        return None
    if _packs() or state.recomputing():
        return None  # checkpoints compare what two runs have saved, which tapes and the ordinary way do differently
    gathered = kept is not None or isinstance(weight, QuantizedTensor)
    codes = kept[0] if kept is not None else weight.codes if gathered else weight
    if kept is not None and (torch.is_grad_enabled() or kept[2].numel()):
        return None
    if quickly(linear_op, x) is linear_op or not _plain(codes, bias, source.gamma, source.beta):
        return None
    now = state.current()
    reduces = now.group is not None and isinstance(recipe, Float8CurrentScaling)
    if now.frame is not None or reduces or not x.is_contiguous() or not codes.is_contiguous():
        return None
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return None
    grads, delayed = torch.is_grad_enabled(), isinstance(recipe, DelayedScaling)
    update = delayed and layer.training and not state.recomputing()
    gamma, beta = source.gamma, source.beta
    wanted = tuple(grads and t is not None and t.requires_grad for t in (x, weight, bias, gamma, beta))
    key: tuple = (
        x.shape, x.dtype, x.data_ptr() % 16, weight.dtype, codes.data_ptr() % 16, gathered, x.device, recipe,
        backend, kept[1].data_ptr() % 16 if kept is not None else weight.scales.data_ptr() % 16 if gathered else 0,
        source.kind, source.eps, wanted, update, hopper_gemm.GPU_CHECKED, quantizer.FUSED_CHECKED,
        None if bias is None else (bias.dtype, bias.data_ptr() % 16),
        None if gamma is None else (gamma.dtype, gamma.data_ptr() % 16, gamma.is_contiguous()),
        None if beta is None else (beta.dtype, beta.data_ptr() % 16, beta.is_contiguous()),
    )  # fmt: skip
    histories: tuple[Tensor, ...] = ()
    grad_history: tuple[Tensor | None, ...] = (None,) * 4
    if isinstance(recipe, DelayedScaling):
        all_of_it = layer.make_histories(recipe.amax_history_len)
        histories = (*all_of_it.input.state(), *all_of_it.weight.state())
        grad_history = all_of_it.grad.state()
        key += (_alignment(histories), _alignment(grad_history))
    kinds = layer._kinds
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) < MOST:
            kinds[key] = _SEEN
        return None
    if kind is _SEEN:
        if _capturing(x):
            return None
        kind = kinds[key] = Kind(_what(layer, x, recipe, plan, backend, source, wanted, update, gathered))
    elif kind.forward is None or not kind.forward.fits():
        return None  # it could not be written down, or belongs to another stream
    given = None if kept is None else (kept[0], kept[1])
    return _Step.apply(kind, histories, grad_history, given, x, weight, bias, gamma, beta)


def _what(layer, x, recipe, plan, backend, source, wanted, update, gathered) -> What:
    delayed = isinstance(recipe, DelayedScaling)
    margin, algorithm = (recipe.margin, recipe.amax_compute_algo) if delayed else (0, "max")
    kernels = delayed and rolls_in_kernel(backend, layer.delayed.input.history)
    weight, bias = layer.weight, layer._bias()
    return What(
        plan, source.kind, source.eps, margin, algorithm, backend, delayed, update, kernels,
        needs_x=wanted[0] or wanted[3] or wanted[4], needs_w=wanted[1], gathered=gathered,
        shape=tuple(x.shape), x_dtype=x.dtype, w_dtype=weight.dtype,
        b_dtype=weight.dtype if bias is None else bias.dtype, n=layer.out_features, k=layer.in_features,
    )  # fmt: skip


# -- attention


@dataclass
class Attended:
    """Attention of one kind: scalars of the op, and tapes of both passes."""

    scalars: tuple
    forward: Tape | None = None
    backward: dict[tuple, Tape | int] = field(default_factory=dict)
    why_not: str = ""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kind, q, k, v):  # type: ignore[override]
        def run(*qkv):
            return flash_attention_forward._init_fn(*qkv, *kind.scalars), ()

        if kind.forward is None:
            (o, lse), _, kind.forward, kind.why_not = Tape.record(run, (q, k, v), overlapping=True)
        else:
            o, lse = kind.forward.play((q, k, v))[0]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        return o

    @staticmethod
    def backward(ctx, do):  # type: ignore[override]
        if do is None:
            return None, None, None, None
        q, k, v, o, lse = ctx.saved_tensors
        kind, inputs = ctx.kind, (do, q, k, v, o, lse)
        check_first_gradient("attention by kernels", *inputs)

        def run(do, q, k, v, o, lse):
            return flash_attention_backward._init_fn(do, None, q, k, v, o, lse, *kind.scalars), ()

        key = (do.shape, do.stride(), do.dtype, *(t.data_ptr() % 16 for t in (do, q, k, v)))
        tape = kind.backward.get(key)
        if isinstance(tape, Tape) and tape.fits():
            return None, *tape.play(inputs)[0]
        if _capturing(q) or not _plain(*inputs):
            return None, *run(*inputs)[0]
        if tape is None and len(kind.backward) < MOST:  # the kernels are compiled the first time
            kind.backward[key] = 0
        elif tape == 0:
            made, _, tape, why = Tape.record(run, inputs, overlapping=True)
            kind.backward[key] = _SEEN if tape is None else tape
            kind.why_not = kind.why_not or why
            return None, *made
        return None, *run(*inputs)[0]


def attention(kinds: Kinds, q: Tensor, k: Tensor, v: Tensor, scalars: tuple) -> Tensor | None:
    """Attention of (batch, seqlen, heads, head_dim) tensors by the op's scalars, or None for the ordinary way."""
    if not (GPU_CHECKED and q.is_cuda) or launching._hook is not None or scalars[-1] == "reference":
        return None
    if quickly(flash_attention_forward, q) is flash_attention_forward or not _plain(q, k, v):
        return None
    if _packs() or state.recomputing():
        return None
    if _capturing(q) or torch.is_autocast_enabled("cuda"):
        return None
    if q.device.index != torch.cuda.current_device():
        return None
    key = (*((t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in (q, k, v)), scalars)
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) < MOST:
            kinds[key] = _SEEN
        return None
    if kind is _SEEN:
        kind = kinds[key] = Attended(scalars)
    elif kind.forward is None or not kind.forward.fits():
        return None
    return _Attend.apply(kind, q, k, v)
