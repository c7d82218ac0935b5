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

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.problem import check_first_gradient, check_tangents
from gpu_accel.transformer_engine import hopper_gemm, quantizer
from gpu_accel.transformer_engine.gemm import scaled_mm, scaled_mm_op
from gpu_accel.transformer_engine.history_kernels import roll_op
from gpu_accel.transformer_engine.quantize_launch import Source, Three
from gpu_accel.transformer_engine.quantizer import choose_backend
from gpu_accel.transformer_engine.recipes import ROLES, Recipe
from gpu_accel.transformer_engine.reference import Parts
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.sharded import whole_columns
from gpu_accel.transformer_engine.sources import operand_op, quickly, source_backward
from gpu_accel.transformer_engine.tensor import QuantizedTensor


@dataclass(frozen=True)
class Plan:
    """The schemes of the six operands; `text` is what the custom ops get."""

    text: str
    input: Scheme
    input_t: Scheme
    weight: Scheme
    weight_t: Scheme
    grad: Scheme
    grad_t: Scheme

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        return _made(recipe) if torch.compiler.is_compiling() else _plan_of(recipe)

    @classmethod
    def read(cls, text: str) -> Plan:
        return _read(text)

    @property
    def random(self) -> bool:
        return any(s.rounding == "stochastic" for s in (self.grad, self.grad_t))


def _made(recipe: Recipe) -> Plan:
    pairs = [(recipe.scheme(role), recipe.scheme_columnwise(role)) for role in ROLES]
    schemes = [one for pair in pairs for one in pair]
    return Plan("|".join(one.text for one in schemes), *schemes)


_plan_of = functools.lru_cache(maxsize=64)(_made)


@functools.lru_cache(maxsize=64)
def _read(text: str) -> Plan:
    return Plan(text, *(find_scheme(part) for part in text.split("|")))


BACKENDS = ("auto", "hopper", "portable", "reference")


def layer_backend(backend: str, x: Tensor) -> str:
    """What a layer's `backend` means for x: "reference" where "auto" comes to that. Raises as `choose_backend`."""
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        return "reference" if choose_backend("auto", x, "a layer") == "reference" else "auto"
    choose_backend("portable" if backend == "hopper" else backend, x, "a layer")
    return backend


def rolls_in_kernel(backend: str, history: Tensor) -> bool:
    """Whether one launch rolls the histories, or plain torch does."""
    if backend == "auto":
        return history.is_cuda and quantizer.FUSED_CHECKED
    return backend != "reference"


def _product(a: QuantizedTensor, b: QuantizedTensor, backend: str, out_dtype: torch.dtype, bias: Tensor | None = None):
    """a @ b.T. With "hopper" the plain kernel takes what Hopper's does not: MX and NVFP4, odd lengths."""
    if backend == "hopper" and (a.scheme.scale in ("e8m0", "nvfp4") or hopper_gemm.scheme_refusal(a, b) is not None):
        backend = "portable"
    return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, backend=backend)


@functools.lru_cache(maxsize=256)
def _plain(scheme: Scheme) -> Scheme:
    return scheme.with_(hadamard=0, rounding="nearest")


def _rows(three: Three, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> QuantizedTensor:
    """Codes that are contiguous along what is summed, as an operand of `scaled_mm`. A rotation that both operands share
    cancels in the product, so it is not mentioned there."""
    parts = Parts(three[0], three[1], three[2] if three[2].numel() else None)
    return QuantizedTensor.from_parts(row=parts, col=None, scheme=_plain(scheme), shape=torch.Size(shape), dtype=dtype)


_ways: dict[tuple, str] = {}  # for operands seen before: the kernel that takes their product, or ""


def _multiply(
    a: Three, of_a: Scheme, b: Three, of_b: Scheme, shape: tuple[int, int, int], dtype: torch.dtype, backend: str,
    out_dtype: torch.dtype, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The product (M, N) over K, shape (M, N, K), of operands that are contiguous along K. From the second time on it
    goes to its kernel without tensors around it and checks."""
    m, n, k = shape
    key = (of_a, of_b, shape, backend, out_dtype, a[0].device, hopper_gemm.GPU_CHECKED)
    way = _ways.get(key)
    if way:
        texts = (_plain(of_a).text, _plain(of_b).text)
        if way == "hopper":
            return hopper_gemm.hopper_mm_op._init_fn(a[0], a[1], b[0], b[1], bias, "none", out_dtype, *texts)
        tensors = [t if t.numel() else None for t in (a[2], b[2])]
        return scaled_mm_op._init_fn(a[0], a[1], tensors[0], b[0], b[1], tensors[1], bias, out_dtype, *texts, k, False)
    first, second = _rows(a, of_a, (m, k), dtype), _rows(b, of_b, (n, k), dtype)
    out = _product(first, second, backend, out_dtype, bias)
    if way is None:
        if len(_ways) > 4096:
            _ways.clear()
        _ways[key] = _way_of(first, second, backend) if m * n * k else ""
    return out


def _way_of(a: QuantizedTensor, b: QuantizedTensor, backend: str) -> str:
    """ "hopper" or "portable", the kernel that `_product` launches, or "" where it launches none."""
    possible = a.scheme.scale not in ("e8m0", "nvfp4") and hopper_gemm.scheme_refusal(a, b) is None
    if possible and hopper_gemm.chosen(a, b, backend):
        return "hopper"
    backend = "portable" if backend == "hopper" else backend
    return "portable" if choose_backend(backend, a, "a layer") == "portable" else ""


@torch.library.custom_op("gpu_accel::te_linear", mutates_args=())
def linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, x0: Tensor, x1: Tensor,
    x2: Tensor, xt0: Tensor, xt1: Tensor, xt2: Tensor, means: Tensor, rstds: Tensor, w0: Tensor, w1: Tensor, w2: Tensor,
    wt0: Tensor, wt1: Tensor, wt2: Tensor, grad_history: Tensor | None, grad_scale: Tensor | None,
    grad_pending: Tensor | None, grad_overflows: Tensor | None, plan: str, kind: str, eps: float, margin: int,
    algorithm: str, backend: str,
) -> Tensor:  # fmt: skip
    """y (M, N) in the dtype of x, from operands that `operand_op` has made of x (or of its norm or activation, `kind`)
    and of weight: x0.. and w0.. row-wise, xt0.. and wt0.. column-wise, which the backward pass reads.

    x, weight, gamma and beta are there for their gradients. A weight that FSDP2 has gathered as codes is a
    QuantizedTensor: then wt0.. are empty, and the backward pass makes them. grad_*: the history of the gradient's scale
    under delayed scaling, which the backward pass changes.
    """
    p = Plan.read(plan)
    n, k = weight.shape
    return _multiply(
        (x0, x1, x2), p.input, (w0, w1, w2), p.weight, (x.shape[0], n, k), x.dtype, backend, x.dtype, bias
    )  # fmt: skip


@linear_op.register_fake
def _(x, weight, bias, gamma, beta, x0, x1, x2, xt0, xt1, xt2, means, rstds, w0, w1, w2, wt0, wt1, wt2, gh, gs, gp, go,
      plan, kind, eps, margin, algorithm, backend):  # fmt: skip
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("gpu_accel::te_linear_backward", mutates_args=())
def linear_backward_op(
    dy: Tensor, g0: Tensor, g1: Tensor, g2: Tensor, gt0: Tensor, gt1: Tensor, gt2: Tensor, x: Tensor | None,
    xt0: Tensor, xt1: Tensor, xt2: Tensor, gamma: Tensor | None, beta: Tensor | None, means: Tensor, rstds: Tensor,
    wt0: Tensor, wt1: Tensor, wt2: Tensor, k: int, plan: str, kind: str, eps: float, needs: list[bool],
    x_dtype: torch.dtype, w_dtype: torch.dtype, b_dtype: torch.dtype, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dW, dbias, dgamma, dbeta); what is not in `needs` is empty. g0.. and gt0..: dy row-wise and column-wise."""
    p = Plan.read(plan)
    m, n = dy.shape
    dx, dw, db = (dy.new_empty(0, dtype=dtype) for dtype in (x_dtype, w_dtype, b_dtype))
    dgamma, dbeta = (dy.new_empty(0, dtype=dy.dtype if g is None else g.dtype) for g in (gamma, beta))
    if needs[0]:
        dx = _multiply((g0, g1, g2), p.grad, (wt0, wt1, wt2), p.weight_t, (m, k, n), dy.dtype, backend, x_dtype)
    if needs[1]:
        wide = -(-m // 16) * 16 if p.grad_t.hadamard else m
        dw = _multiply(
            (gt0, gt1, gt2), p.grad_t, (xt0, xt1, xt2), p.input_t, (n, k, wide), dy.dtype, backend, w_dtype
        )  # fmt: skip
    if needs[2]:
        db = dy.sum(0, dtype=torch.float32).to(b_dtype)
    if needs[0] and kind:
        assert x is not None
        source = Source(kind, gamma, beta, eps)
        dx, more, last = source_backward(dx, x, source, means, rstds, kernels=backend != "reference")
        dgamma = dgamma if more is None else more
        dbeta = dbeta if last is None else last
    return dx, dw, db, dgamma, dbeta


@linear_backward_op.register_fake
def _(dy, g0, g1, g2, gt0, gt1, gt2, x, xt0, xt1, xt2, gamma, beta, means, rstds, wt0, wt1, wt2, k, plan, kind, eps,
      needs, x_dtype, w_dtype, b_dtype, backend):  # fmt: skip
    m, n = dy.shape
    dtypes = (x_dtype, w_dtype, b_dtype)
    shapes = ((m, k) if x is None else x.shape, (n, k), (n,))
    out = [
        dy.new_empty(s if need else (0,), dtype=d) for s, need, d in zip(shapes, needs, dtypes, strict=True)
    ]  # fmt: skip
    wide = needs[0] and kind in ("rms", "layer")
    more = [
        dy.new_empty(0 if g is None or not wide else g.shape, dtype=dy.dtype if g is None else g.dtype)
        for g in (gamma, beta)
    ]
    return (*out, *more)


def next_seed() -> int:
    """A seed for stochastic rounding, from torch's generator on the CPU: `torch.manual_seed` fixes it."""
    return int(torch.randint(0, 2**62, ()).item())


def _setup(ctx, inputs, output) -> None:
    (x, weight, bias, gamma, beta, _, _, _, xt0, xt1, xt2, means, rstds, _, _, _, wt0, wt1, wt2, gh, gs, gp, go, plan,
     kind, eps, margin, algorithm, backend) = inputs  # fmt: skip
    kept = x if kind else None
    gathered = weight if isinstance(weight, QuantizedTensor) else None
    ctx.save_for_backward(kept, xt0, xt1, xt2, gamma, beta, means, rstds, wt0, wt1, wt2, gathered)
    ctx.set_materialize_grads(False)
    # not saved for backward: they are meant to change in between, and what backward wants is what they are then
    ctx.delayed = (gh, gs, gp, go)
    ctx.plan, ctx.kind, ctx.eps, ctx.margin, ctx.algorithm, ctx.backend = plan, kind, eps, margin, algorithm, backend
    ctx.k = weight.shape[1]
    ctx.dtypes = [x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
    ctx.with_bias = bias is not None


def check_second(what: str, dy: Tensor, wanted: Sequence[bool], kind: str) -> None:
    """Raise where gradients of a layer are to be differentiated again, which are made of codes.

    wanted: whether x, weight, bias, gamma and beta want gradients; kind: the norm or activation before the product.
    Those of x and weight depend on each other, what comes through a norm on x itself, and all of them on dy.
    """
    first, second, _, gamma, beta = wanted[:5]
    depends = ((first or gamma or beta) and second) or (bool(kind) and first)
    check_first_gradient(what, dy, depends=depends)


def _backward(ctx, dy):
    nothing: list[Tensor | None] = [None] * 29
    if dy is None:
        return tuple(nothing)
    x, xt0, xt1, xt2, gamma, beta, means, rstds, wt0, wt1, wt2, gathered = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    needs = [any((wanted[0], wanted[3], wanted[4])), wanted[1], ctx.with_bias and wanted[2]]
    if gathered is not None and needs[0]:
        wt0, wt1, wt2 = whole_columns(gathered)
    check_second("a quantised linear layer", dy, wanted, ctx.kind)
    plan = Plan.read(ctx.plan)
    history, scale, pending, overflows = ctx.delayed
    used = None
    if history is not None:
        kernels = rolls_in_kernel(ctx.backend, history)
        used = quickly(roll_op, dy)(
            [history, scale, pending, overflows], [plan.grad.largest], ctx.margin, ctx.algorithm, kernels
        )[0, 0]  # fmt: skip
    seed = next_seed() if plan.random else 0
    *copies, _, _ = quickly(operand_op, dy)(
        dy, used, pending, plan.grad.text, plan.grad_t.text, needs[0], needs[1], seed, ctx.backend, "", None, None, 0.0
    )
    made = quickly(linear_backward_op, dy)(
        dy, *copies, x, xt0, xt1, xt2, gamma, beta, means, rstds, wt0, wt1, wt2, ctx.k, ctx.plan, ctx.kind, ctx.eps,
        needs, *ctx.dtypes, ctx.backend,
    )  # fmt: skip
    for i, gradient in enumerate(made):
        nothing[i] = gradient if wanted[i] else None
    return tuple(nothing)


linear_op.register_autograd(_backward, setup_context=_setup)


class _Linear(torch.autograd.Function):
    """`linear_op` without its way through torch.library."""

    @staticmethod
    def forward(ctx, *arguments):  # with a `setup_context` of its own torch would bind names at every call
        y = linear_op._init_fn(*arguments)
        _setup(ctx, arguments, y)
        return y

    backward = staticmethod(_backward)


def linear(*arguments: Any) -> Tensor:
    """`linear_op`, by the shorter way where nobody looks."""
    check_tangents(**dict(zip(("x", "weight", "bias", "gamma", "beta"), arguments, strict=False)))
    return linear_op(*arguments) if quickly(linear_op, arguments[0]) is linear_op else _Linear.apply(*arguments)
