"""Operands of a layer: what is quantised, row-wise and column-wise, from a tensor, a norm or an activation of it.

`operand_op` is the one custom op that makes them. Norms and activations are computed within the quantisers' kernels,
so their results are never written in 16 bits: the norm costs one more read of its input (for the statistics), the
activation nothing but its arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_accel.thunderkittens.rows import WHOLE, norm_backward_op
from gpu_accel.transformer_engine import quantizer, tape
from gpu_accel.transformer_engine.activations import (
    ACTIVATIONS,
    activate_reference,
    activation_backward_op,
    gradient_reference,
)
from gpu_accel.transformer_engine.quantize_launch import (
    LONGEST_ROW,
    PLAIN,
    Source,
    Three,
    _empty_parts,
    run_quantize,
)
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

KINDS = ("", "rms", "layer", *ACTIVATIONS)


def quickly(op: Any, x: Tensor) -> Any:
    """The Python function of a custom op, which takes no gradient itself, where calling it directly is the same: not
    while torch.compile or a mode traces, under transforms, on a subclass of Tensor or on meta. The op costs 50 us more.
    """
    if tape.recording():
        return op._init_fn
    plain = (type(x) is Tensor or type(x) is torch.nn.Parameter) and not x.is_meta
    if not plain or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return op
    return op if torch._C._are_functorch_transforms_active() else op._init_fn


def source_reference(x: Tensor, source: Source) -> tuple[Tensor, Tensor, Tensor]:
    """(what the source makes of x (rows, cols), in the dtype of x; means; 1 / deviations) in plain torch."""
    means, rstds = (x.new_empty(0, dtype=torch.float32) for _ in range(2))
    if not source.kind:
        return x, means, rstds
    if not source.is_norm:
        return activate_reference(x, source.kind), means, rstds
    wide = x.float()
    assert source.gamma is not None
    if source.kind == "layer":
        means = wide.mean(-1)
        wide = wide - means[:, None]
    rstds = torch.rsqrt(wide.square().mean(-1) + source.eps)
    y = wide * rstds[:, None] * source.gamma.float()
    if source.beta is not None:
        y = y + source.beta.float()
    return y.to(x.dtype), means, rstds


def source_backward(
    dy: Tensor, x: Tensor, source: Source, means: Tensor, rstds: Tensor, *, kernels: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dgamma, dbeta) for the gradient dy (rows, width) of what the source makes of x."""
    if not source.is_norm:
        made = quickly(activation_backward_op, dy)(dy, x, source.kind) if kernels else None
        return gradient_reference(dy, x, source.kind) if made is None else made, None, None
    gamma, beta, center = source.gamma, source.beta, source.kind == "layer"
    assert gamma is not None
    if kernels:
        dtype = None if beta is None else beta.dtype
        dx, _, dgamma, dbeta = quickly(norm_backward_op, dy)(
            dy, None, x, gamma, means, rstds, x.dtype, None, dtype, center, 0.0, 0, WHOLE
        )
        return dx, dgamma, None if beta is None else dbeta
    unit = x.float()
    unit = (unit - means[:, None] if center else unit) * rstds[:, None]
    grad = dy.float() * gamma.float()
    dx = grad - unit * (unit * grad).mean(-1, keepdim=True)
    if center:
        dx = dx - grad.mean(-1, keepdim=True)
    dgamma = (dy.float() * unit).sum(0).to(gamma.dtype)
    dbeta = None if beta is None else dy.float().sum(0).to(beta.dtype)
    return (dx * rstds[:, None]).to(x.dtype), dgamma, dbeta


def none_of(like: Tensor) -> Three:
    """A copy that is not made."""
    return (
        like.new_empty(0, dtype=torch.uint8),
        like.new_empty(0, dtype=torch.float32),
        like.new_empty(0, dtype=torch.float32),
    )


def three(q: QuantizedTensor, prefix: str) -> Three:
    parts = q._parts(prefix)
    assert parts is not None
    none = parts.scales.new_empty(0, dtype=torch.float32)
    return parts.codes, parts.scales, none if parts.tensor_scale is None else parts.tensor_scale


def _padded(x: Tensor, scheme: Scheme) -> Tensor:
    missing = -x.shape[0] % 16 if scheme.hadamard else 0
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _copies(
    x: Tensor, scheme: Scheme, scheme_t: Scheme, *, row: bool, col: bool, scale: Tensor | None, seed: int,
    seen: Tensor | None, kernels: bool, source: Source, statistics: tuple[Tensor, Tensor] | None,
) -> tuple[Three, Three]:  # fmt: skip
    """The row-wise copy by `scheme` and the column-wise one by `scheme_t`, in one pass where they are the same."""

    def make(what: Tensor, by: Scheme, wanted_row: bool, wanted_col: bool) -> tuple[Three, Three]:
        if kernels:
            return run_quantize(
                what, by, wanted_row, wanted_col, seed=seed, scale=scale, seen=seen, source=source,
                statistics=statistics,
            )  # fmt: skip
        drawn = seed if by.rounding == "stochastic" else None
        q = quantize(
            what, by, rowwise=wanted_row, columnwise=wanted_col, scale=scale, seed=drawn, backend="reference"
        )  # fmt: skip
        if seen is not None and q.seen_amax is not None:
            seen.copy_(torch.maximum(seen, q.seen_amax))
        return three(q, "") if wanted_row else none_of(x), three(q, "col_") if wanted_col else none_of(x)

    if scheme == scheme_t and row and col and not scheme.hadamard:
        return make(x, scheme, True, True)
    rows = make(x, scheme, True, False)[0] if row else none_of(x)
    cols = make(_padded(x, scheme_t), scheme_t, False, True)[1] if col else none_of(x)
    return rows, cols


@torch.library.custom_op("gpu_accel::te_operand", mutates_args=("pending",))
def operand_op(
    x: Tensor, scale: Tensor | None, pending: Tensor | None, text: str, text_t: str, row: bool, col: bool, seed: int,
    backend: str, kind: str, gamma: Tensor | None, beta: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """An operand from x (M, K), or (M, 2 K) for a gated activation.

    scale: () float32 that is known (delayed scaling); pending: () float32, raised to the largest magnitude then.
    Returns codes, scales, tensor scale row-wise (scheme `text`) and column-wise (`text_t`), what is not made empty, and
    of a norm the means (of "layer" only) and 1 / deviations of rows.
    """
    scheme, scheme_t = find_scheme(text), find_scheme(text_t)
    source = Source(kind, gamma, beta, eps) if kind else PLAIN
    kernels = backend != "reference"
    seen = pending
    if scale is not None:
        scale = scale.float().reshape(())
    else:
        seen = None
    fused = kernels and bool(kind)
    if fused and backend == "auto" and x.is_cuda and not quantizer.FUSED_CHECKED:
        fused = False
    if fused and ((source.is_norm and x.shape[1] > LONGEST_ROW) or (scheme_t.hadamard and col and x.shape[0] % 16)):
        fused = False
    means, rstds = _statistics(x, kind)
    if kind and not fused:
        x, means, rstds = source_reference(x, source)
        source = PLAIN
    rows, cols = _copies(
        x, scheme, scheme_t, row=row, col=col, scale=scale, seed=seed, seen=seen, kernels=kernels, source=source,
        statistics=(means, rstds) if source.is_norm else None,
    )  # fmt: skip
    return (*rows, *cols, means, rstds)


def _statistics(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape[0] if kind == "layer" else 0, dtype=torch.float32),
        x.new_empty(x.shape[0] if kind in ("rms", "layer") else 0, dtype=torch.float32),
    )


@operand_op.register_fake
def _(x, scale, pending, text, text_t, row, col, seed, backend, kind, gamma, beta, eps):
    m, k = x.shape[0], Source(kind).width(x.shape[1])
    scheme, scheme_t = find_scheme(text), find_scheme(text_t)
    wide = -(-m // 16) * 16 if scheme_t.hadamard else m
    return (
        *_empty_parts(x, m, k, scheme, row),
        *_empty_parts(x, k, wide, scheme_t, col),
        *_statistics(x, kind),
    )
