"""`gemm` of eight-bit floats: checks codes and scales, and hands them to the FP8 products of transformer_engine.

Those multiply rows of a by rows of the transpose of b, since tensor cores take eight bits with K side by side in both.
So b = weight.t() with weight (N, K) contiguous is read where it lies; any other layout of a or b is copied first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.problem import check_strided

CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(*operands: object) -> bool:
    """Whether any of them is of eight bits."""
    return any(isinstance(x, Tensor) and x.dtype in CODES for x in operands)


def validate(a: Tensor, b: Tensor, bias: Tensor | None, scale_a, scale_b, out_dtype) -> None:
    """What is not checked for products of any dtype."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in CODES:
            raise InvalidInputError(
                f"a and b must both be float8_e4m3fn or float8_e5m2, got {name} of {x.dtype}: quantise it, as "
                "gpu_accel.transformer_engine.quantize does"
            )
    if out_dtype not in (None, *OUT_DTYPES):
        raise InvalidInputError(
            f"out_dtype must be bfloat16 (the default here), float16 or float32, got {out_dtype}; for eight bits use "
            "gpu_accel.transformer_engine.scaled_mm_fp8"
        )
    rows, cols = tuple(a.shape[:-1]), (b.shape[1],)
    for name, x, lines, what in (("scale_a", scale_a, rows, "row of a"), ("scale_b", scale_b, cols, "column of b")):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.device != a.device:
            found = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"{name} must be a float32 tensor on {a.device}, got {found}")
        check_strided(name, x)
        if x.numel() != 1 and tuple(x.shape) != lines:
            raise InvalidInputError(f"{name} must be one number, or {lines}: one a {what}, got {tuple(x.shape)}")
    given = {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    for name, tensor in given.items():
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, and products of eight bits have none: use "
                "gpu_accel.transformer_engine.Linear to train, or detach"
            )


def _operand(codes: Tensor, scale: Tensor | None):
    """(rows, K) of codes as a QuantizedTensor: one scale, or one a row."""
    from gpu_accel.transformer_engine.reference import Parts
    from gpu_accel.transformer_engine.schemes import Scheme
    from gpu_accel.transformer_engine.tensor import QuantizedTensor

    codes = codes.contiguous()
    lines = codes.new_ones((1, 1), dtype=torch.float32) if scale is None else scale.detach().reshape(-1, 1)
    what = Scheme(element=CODES[codes.dtype], block=(0, 0) if lines.numel() == 1 else (1, 0), scale="fp32")
    row = Parts(codes.view(torch.uint8), lines.contiguous())
    return QuantizedTensor.from_parts(row=row, col=None, scheme=what, shape=codes.shape, dtype=torch.bfloat16)


def operands(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None):
    """a (rows, K) and the transpose of b (N, K), as transformer_engine has them."""
    return _operand(a.reshape(a.shape[:-1].numel(), a.shape[-1]), scale_a), _operand(b.t(), scale_b)


@torch.library.custom_op("gpu_accel::tk_gemm_fp8", mutates_args=())
def gemm_op(
    a: Tensor, b: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, activation: str,
    out_dtype: torch.dtype, backend: str,
) -> Tensor:  # fmt: skip
    """activation((a scale_a) (M, K) times (b scale_b) (K, N), plus bias); arguments are checked."""
    from gpu_accel.transformer_engine.gemm import scaled_mm

    left, right = operands(a, b, scale_a, scale_b)
    return scaled_mm(left, right, bias=bias, activation=activation, out_dtype=out_dtype, backend=backend)


@gemm_op.register_fake
def _(a, b, bias, scale_a, scale_b, activation, out_dtype, backend):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, *, activation: str,
    out_dtype: torch.dtype | None, backend: str,
) -> Tensor:  # fmt: skip
    """The same for a (..., K)."""
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    out = gemm_op(flat, b, bias, scale_a, scale_b, activation, out_dtype or torch.bfloat16, backend)
    return out.view(*a.shape[:-1], b.shape[1])


def explain(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, backend: str) -> str:
    """Which product they go to, and what is copied first."""
    from gpu_accel.transformer_engine.gemm import explain_mm

    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    turned = [name for name, x in (("a", flat), ("b.t()", b.t())) if not x.is_contiguous()]
    copies = [f"{' and '.join(turned)} copied first: eight bits want K side by side"] if turned else []
    what = "reference" if backend == "reference" else "fp8"
    return "; ".join([f"{what}: {explain_mm(*operands(a, b, scale_a, scale_b), backend=backend)}", *copies])
