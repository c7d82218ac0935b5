"""`mixed_precision_attention`: attention in FP8 where that is allowed and worth quantising, in 16 bits elsewhere."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.api import flash_attn_func
from gpu_accel.flash_attention3.fp8 import fp8_attention
from gpu_accel.flash_attention3.launch import capability
from gpu_accel.flash_attention3.reference import attention_reference
from gpu_accel.transformer_engine.checks import check_between, check_choice, check_floats

# Fewer keys, and quantising costs more than it saves. Per row of q, k and v it moves 3 bytes a value, 9 d in all: 3 ps
# times d at 3 TB/s. A key costs a query 4 d operations, in FP8 at about 900 and not 600 TFLOP/s: 2.2 fs times d less.
# It breaks even near 1400 keys, twice that with a causal mask. An estimate with an H100's rates, not a measurement.
FEWEST_KEYS = 2048


@functools.cache
def attention_error() -> float:
    """Relative error (2-norm) of attention in FP8 on normal values, against float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=generator) for _ in range(3))
    out = fp8_attention(q, k, v, out_dtype=torch.float32, backend="reference")
    assert isinstance(out, Tensor)
    found = attention_reference(*(t.transpose(1, 2).double() for t in (q, k, v)))
    truth: Tensor = (found[0] if isinstance(found, tuple) else found).transpose(1, 2).double()
    return float((out.double() - truth).norm() / truth.norm())


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and capability(device) >= (8, 9)


def attention_precision(q: Tensor, k: Tensor, v: Tensor, *, max_error: float = 0.1) -> tuple[str, str]:
    """("fp8" or "bf16", why) for q, k, v (batch, seqlen, heads, head_dim)."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_floats(name, t)
        if t.dim() != 4:
            raise InvalidInputError(f"{name} must be (batch, seqlen, heads, head_dim), got shape {tuple(t.shape)}")
    allowed = check_between("max_error", max_error, 0)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "bf16", "a gradient is wanted, and FP8 attention has none"
    if not _has_fp8(q.device):
        return "bf16", f"no FP8 units on {q.device}"
    if q.shape[-1] % 16 or q.shape[-1] > 256:
        return "bf16", f"FP8 attention takes head dimensions that are multiples of 16 up to 256, not {q.shape[-1]}"
    if k.shape[1] < FEWEST_KEYS:
        return "bf16", f"{k.shape[1]} keys: below {FEWEST_KEYS} quantising costs more than it saves (estimated)"
    if (error := attention_error()) > allowed:
        return "bf16", f"its error on normal values is {error:.1%}, more than the {allowed:.1%} allowed"
    return "fp8", "FP8 units, no gradient wanted, enough keys, and the error is allowed"


def mixed_precision_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), precision: str = "auto", max_error: float = 0.1, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention (batch, seqlen, heads, head_dim) with q, k and v in FP8 or in the 16 bits they have.

    Args:
        precision: "auto" chooses, see `attention_precision`, which also says why; "fp8" and "bf16" insist.
        max_error: the largest relative error, on normal values, with which "auto" takes FP8.
        causal, softmax_scale, window_size, backend: as of `flash_attn_func`.

    Softmax and sums are float32 in both. Raises what `flash_attn_func` and `fp8_attention` raise.
    """
    check_choice("precision", precision, ("auto", "fp8", "bf16"))
    chosen = attention_precision(q, k, v, max_error=max_error)[0] if precision == "auto" else precision
    common: dict[str, Any] = dict(
        causal=causal, softmax_scale=softmax_scale, window_size=window_size, backend=backend
    )  # fmt: skip
    out: Any
    if chosen == "fp8":
        out_dtype = q.dtype if q.dtype in (torch.bfloat16, torch.float16) else torch.float32
        out = fp8_attention(q, k, v, layout="bshd", out_dtype=out_dtype, **common)
    else:
        out = flash_attn_func(q, k, v, **common)
    return out[0] if isinstance(out, tuple) else out
