"""A linear layer on quantised operands, forward and backward, as two custom ops: torch.compile sees one call each.

    y  (M, N) = x  (M, K) W (N, K)^T        x row-wise, W row-wise
    dx (M, K) = dy (M, N) W (N, K)          dy row-wise, W column-wise
    dW (N, K) = dy (M, N)^T x (M, K)        dy column-wise, x column-wise

All three are the product a @ b.T of `scaled_mm`, both operands contiguous along what is summed: Hopper's fp8 tensor
cores know no other. That is why every tensor is quantised twice, along rows and along columns, in one pass. What is
kept for the backward pass is the column-wise copy of x, one byte a value or less; x itself is not.

Where both operands of dW are rotated (NVFP4), zeros pad M to a multiple of 16: they add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.gemm import scaled_mm
from gpu_accel.transformer_engine.quantizer import _empty_parts, choose_backend, quantize
from gpu_accel.transformer_engine.recipes import Recipe
from gpu_accel.transformer_engine.reference import Parts
from gpu_accel.transformer_engine.scales import update_history
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

Three = tuple[Tensor, Tensor, Tensor]  # codes, scales, tensor scale; what does not exist is empty


@dataclass(frozen=True)
class Plan:
    """The schemes of the six operands; `text` is what the custom ops get."""

    input: Scheme
    input_t: Scheme
    weight: Scheme
    weight_t: Scheme
    grad: Scheme
    grad_t: Scheme

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        pairs = [
            (recipe.scheme(role), recipe.scheme_columnwise(role)) for role in ("input", "weight", "grad")
        ]  # fmt: skip
        return cls(*(one for pair in pairs for one in pair))

    @classmethod
    def read(cls, text: str) -> Plan:
        return cls(*(find_scheme(part) for part in text.split("|")))

    @property
    def text(self) -> str:
        parts = (self.input, self.input_t, self.weight, self.weight_t, self.grad, self.grad_t)
        return "|".join(part.text for part in parts)

    @property
    def random(self) -> bool:
        return any(s.rounding == "stochastic" for s in (self.grad, self.grad_t))


def _three(q: QuantizedTensor, prefix: str) -> Three:
    parts = q._parts(prefix)
    assert parts is not None
    none = parts.scales.new_empty(0, dtype=torch.float32)
    return parts.codes, parts.scales, none if parts.tensor_scale is None else parts.tensor_scale


def _none(like: Tensor) -> Three:
    return (
        like.new_empty(0, dtype=torch.uint8),
        like.new_empty(0, dtype=torch.float32),
        like.new_empty(0, dtype=torch.float32),
    )


BACKENDS = ("auto", "hopper", "portable", "reference")


def layer_backend(backend: str, x: Tensor) -> str:
    """What a layer's `backend` means for x: "reference" where "auto" comes to that. Raises as `choose_backend`."""
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return "reference" if choose_backend("auto", x, "a layer") == "reference" else "auto"
    choose_backend("portable" if backend == "hopper" else backend, x, "a layer")
    return backend


def _quantizer(backend: str) -> str:
    return "portable" if backend == "hopper" else backend


def _product(a: QuantizedTensor, b: QuantizedTensor, backend: str, out_dtype: torch.dtype, bias: Tensor | None = None):
    """a @ b.T. With "hopper" the plain kernel takes what Hopper's does not: MX and NVFP4, odd lengths."""
    if backend == "hopper" and (a.scheme.scale in ("e8m0", "nvfp4") or hopper_gemm.scheme_refusal(a, b) is not None):
        backend = "portable"
    return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, backend=backend)


def _rows(three: Three, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> QuantizedTensor:
    """Codes that are contiguous along what is summed, as an operand of `scaled_mm`. A rotation that both operands share
    cancels in the product, so it is not mentioned there."""
    parts = Parts(three[0], three[1], three[2] if three[2].numel() else None)
    plain = scheme.with_(hadamard=0, rounding="nearest")
    return QuantizedTensor.from_parts(row=parts, col=None, scheme=plain, shape=torch.Size(shape), dtype=dtype)


def _padded(x: Tensor, scheme: Scheme) -> Tensor:
    missing = -x.shape[0] % 16 if scheme.hadamard else 0
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _both(
    x: Tensor, scheme: Scheme, scheme_t: Scheme, *, row: bool, col: bool, scale: Tensor | None, seed: int, backend: str
) -> tuple[Three, Three, Tensor]:
    """(row-wise copy, column-wise copy, largest magnitude if the scale was given) of x (M, K)."""
    amax = x.new_zeros((), dtype=torch.float32)
    rows, cols = _none(x), _none(x)
    backend = _quantizer(backend)
    seeds = [seed if s.rounding == "stochastic" else None for s in (scheme, scheme_t)]
    if scheme == scheme_t and row and col:
        q = quantize(x, scheme, columnwise=True, scale=scale, seed=seeds[0], backend=backend)
        rows, cols = _three(q, ""), _three(q, "col_")
    else:
        q = None
        if row:
            q = quantize(x, scheme, scale=scale, seed=seeds[0], backend=backend)
            rows = _three(q, "")
        if col:
            q = quantize(
                _padded(x, scheme_t), scheme_t, rowwise=False, columnwise=True, scale=scale, seed=seeds[1],
                backend=backend,
            )  # fmt: skip
            cols = _three(q, "col_")
    if q is not None and q.seen_amax is not None:
        amax = q.seen_amax.clone()
    return rows, cols, amax


@torch.library.custom_op("gpu_accel::te_weight", mutates_args=())
def weight_op(
    weight: Tensor, scale: Tensor | None, plan: str, col: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A weight (N, K) row-wise, column-wise if `col`, and its largest magnitude if the scale was given."""
    p = Plan.read(plan)
    rows, cols, amax = _both(weight, p.weight, p.weight_t, row=True, col=col, scale=scale, seed=0, backend=backend)
    return (*rows, *cols, amax)


@weight_op.register_fake
def _(weight, scale, plan, col, backend):
    p = Plan.read(plan)
    n, k = weight.shape
    return (
        *_empty_parts(weight, n, k, p.weight, True),
        *_empty_parts(weight, k, n, p.weight_t, col),
        weight.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("gpu_accel::te_linear", mutates_args=())
def linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, w0: Tensor, w1: Tensor, w2: Tensor, t0: Tensor, t1: Tensor,
    t2: Tensor, scale: Tensor | None, grad_history: Tensor | None, grad_scale: Tensor | None,
    grad_pending: Tensor | None, grad_overflows: Tensor | None, plan: str, margin: int, algorithm: str, keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y (M, N) in the dtype of x, the column-wise copy of x (if `keep`), the largest magnitude of x (if `scale`).

    weight is there for its gradient; the product reads its quantised copies w0.. (row-wise) and, backward, t0..
    (column-wise). grad_*: the history of the gradient's scale under delayed scaling, which the backward pass changes.
    """
    p = Plan.read(plan)
    rows, cols, amax = _both(x, p.input, p.input_t, row=True, col=keep, scale=scale, seed=0, backend=backend)
    a = _rows(rows, p.input, (x.shape[0], x.shape[1]), x.dtype)
    b = _rows((w0, w1, w2), p.weight, (weight.shape[0], weight.shape[1]), x.dtype)
    y = _product(a, b, backend, x.dtype, bias)
    return (y, *cols, amax)


@linear_op.register_fake
def _(x, weight, bias, w0, w1, w2, t0, t1, t2, scale, gh, gs, gp, go, plan, margin, algorithm, keep, backend):
    p = Plan.read(plan)
    m = x.shape[0]
    wide = -(-m // 16) * 16 if p.input_t.hadamard else m
    return (
        x.new_empty((m, weight.shape[0])),
        *_empty_parts(x, x.shape[1], wide, p.input_t, keep),
        x.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("gpu_accel::te_linear_backward", mutates_args=())
def linear_backward_op(
    dy: Tensor, x0: Tensor, x1: Tensor, x2: Tensor, t0: Tensor, t1: Tensor, t2: Tensor, scale: Tensor | None, k: int,
    plan: str, seed: int, needs: list[bool], x_dtype: torch.dtype, w_dtype: torch.dtype, b_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dW, dbias, largest magnitude of dy); what is not in `needs` is empty."""
    p = Plan.read(plan)
    m, n = dy.shape
    rows, cols, amax = _both(
        dy, p.grad, p.grad_t, row=needs[0], col=needs[1], scale=scale, seed=seed, backend=backend
    )  # fmt: skip
    dx, dw, db = (dy.new_empty(0, dtype=dtype) for dtype in (x_dtype, w_dtype, b_dtype))
    if needs[0]:
        a = _rows(rows, p.grad, (m, n), dy.dtype)
        dx = _product(a, _rows((t0, t1, t2), p.weight_t, (k, n), dy.dtype), backend, x_dtype)
    if needs[1]:
        wide = -(-m // 16) * 16 if p.grad_t.hadamard else m
        a = _rows(cols, p.grad_t, (n, wide), dy.dtype)
        dw = _product(a, _rows((x0, x1, x2), p.input_t, (k, wide), dy.dtype), backend, w_dtype)
    if needs[2]:
        db = dy.sum(0, dtype=torch.float32).to(b_dtype)
    return dx, dw, db, amax


@linear_backward_op.register_fake
def _(dy, x0, x1, x2, t0, t1, t2, scale, k, plan, seed, needs, x_dtype, w_dtype, b_dtype, backend):
    m, n = dy.shape
    dtypes = (x_dtype, w_dtype, b_dtype)
    shapes = ((m, k), (n, k), (n,))
    out = [
        dy.new_empty(s if need else (0,), dtype=d) for s, need, d in zip(shapes, needs, dtypes, strict=True)
    ]  # fmt: skip
    return (*out, dy.new_empty((), dtype=torch.float32))


def roll(history: Tensor, scale: Tensor, pending: Tensor, overflows: Tensor, *, largest: float, margin: int,
         algorithm: str) -> None:  # fmt: skip
    """Enter the maximum that is pending, in place, and with it find the next scale. Without one nothing changes.

    overflows (2,): how often a tensor held NaN or Inf, and how often finite values were clipped.
    """
    clipped = (pending > scale * largest) & (pending < float("inf"))
    fresh, next_scale, over = update_history(
        history, pending, scale, largest=largest, margin=margin, algorithm=algorithm
    )  # fmt: skip
    history.copy_(fresh)
    scale.copy_(next_scale)
    overflows.add_(torch.stack((over, clipped.long())))
    pending.zero_()


def next_seed() -> int:
    """A seed for stochastic rounding, from torch's generator on the CPU: `torch.manual_seed` fixes it."""
    return int(torch.randint(0, 2**62, ()).item())


def _setup(ctx, inputs, output) -> None:
    x, weight, bias, *_, t0, t1, t2, scale, gh, gs, gp, go, plan, margin, algorithm, keep, backend = inputs
    _, x0, x1, x2, amax = output
    ctx.save_for_backward(x0, x1, x2, t0, t1, t2)
    ctx.mark_non_differentiable(x0, x1, x2, amax)
    ctx.set_materialize_grads(False)
    # not saved for backward: they are meant to change in between, and what backward wants is what they are then
    ctx.delayed = (gh, gs, gp, go)
    ctx.plan, ctx.margin, ctx.algorithm, ctx.backend = plan, margin, algorithm, backend
    ctx.k = weight.shape[1]
    ctx.dtypes = [x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
    ctx.with_bias = bias is not None


def _backward(ctx, dy, *_):
    nothing: list[Tensor | None] = [None] * 19
    if dy is None:
        return tuple(nothing)
    x0, x1, x2, t0, t1, t2 = ctx.saved_tensors
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.with_bias and ctx.needs_input_grad[2]]
    if torch.is_grad_enabled() and dy.requires_grad:
        raise UnsupportedError("quantised linear layers have first gradients only: create_graph=True is not supported")
    plan = Plan.read(ctx.plan)
    history, scale, pending, overflows = ctx.delayed
    used = None
    if history is not None:
        roll(history, scale, pending, overflows, largest=plan.grad.largest, margin=ctx.margin,
             algorithm=ctx.algorithm)  # fmt: skip
        used = scale.clone()
    seed = next_seed() if plan.random else 0
    dx, dw, db, amax = linear_backward_op(
        dy, x0, x1, x2, t0, t1, t2, used, ctx.k, ctx.plan, seed, needs, *ctx.dtypes, ctx.backend
    )
    if pending is not None:
        pending.copy_(torch.maximum(pending, amax))
    for i, (made, need) in enumerate(zip((dx, dw, db), needs, strict=True)):
        nothing[i] = made if need else None
    return tuple(nothing)


linear_op.register_autograd(_backward, setup_context=_setup)
