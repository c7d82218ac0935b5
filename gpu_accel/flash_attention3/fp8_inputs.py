"""Checks shared by the fp8 functions: layouts, shapes and heads of q, k and v. Values are never looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.hadamard import check_rows
from gpu_accel.flash_attention3.problem import check_strided


def check_layout(layout: str) -> None:
    if layout not in ("bhsd", "bshd"):
        raise InvalidInputError(
            f"layout must be 'bhsd' (batch, heads, seqlen, head_dim) or 'bshd' (batch, seqlen, heads, head_dim), got "
            f"{layout!r}"
        )


def check_rows_per_scale(name: str, block: int) -> int:
    """How many rows share a scale: a positive int."""
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise InvalidInputError(f"{name} must be a positive number of rows, got {shown(block)}")
    return block


def check_rotary(cos: Tensor | None, sin: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous (cos, sin) for the rows of x (..., seqlen, head_dim), or (None, None)."""
    if (cos is None) != (sin is None):
        raise InvalidInputError("rotary_cos and rotary_sin go together, one of them is missing")
    if cos is None or sin is None:
        return None, None
    for name, y in (("rotary_cos", cos), ("rotary_sin", sin)):
        if isinstance(y, Tensor):
            check_strided(name, y)
        if not isinstance(y, Tensor) or y.dim() != 2 or y.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            said = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise InvalidInputError(f"{name} must be (positions, rotary_dim / 2), float32 or 16 bits, got {said}")
        if y.device != x.device:
            raise InvalidInputError(f"{name} is on {y.device}, the tensor on {x.device}")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        said = " and ".join(f"{y.dtype} {tuple(y.shape)}" for y in (cos, sin))
        raise InvalidInputError(f"rotary_cos and rotary_sin must have one shape and dtype, got {said}")
    seqlen, head_dim = x.shape[-2:]
    if cos.shape[0] < seqlen or not 0 < 2 * cos.shape[1] <= head_dim:
        raise InvalidInputError(
            f"rotary_cos must have at least {seqlen} rows and 1 to {head_dim // 2} columns, got {tuple(cos.shape)}"
        )
    return cos.contiguous(), sin.contiguous()


def as_heads(layout: str, **tensors: Tensor) -> list[Tensor]:
    """Checked views of (batch, heads, seqlen, head_dim), whatever the layout."""
    check_layout(layout)
    out = []
    for name, x in tensors.items():
        check_rows(name, x)
        if x.dim() != 4:
            raise InvalidInputError(f"{name} must have 4 dimensions ({layout}), got shape {tuple(x.shape)}")
        out.append(x.transpose(1, 2) if layout == "bshd" else x)
    return out


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes in (batch, heads, seqlen, head_dim)."""
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise InvalidInputError(f"q, k, v must be on one device, got q on {q.device} and {name} on {x.device}")
        if x.dtype != q.dtype:
            raise InvalidInputError(f"q, k, v must have one dtype, got q {q.dtype} and {name} {x.dtype}")
    if k.shape != v.shape:
        raise InvalidInputError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise InvalidInputError(
            f"q and k must agree in batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)} (batch, heads, "
            f"seqlen, head_dim)"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidInputError(f"heads of q ({q.shape[1]}) must be a multiple of the heads of k and v ({k.shape[1]})")
