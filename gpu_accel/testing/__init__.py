"""Helpers for testing kernels: inputs that find bugs, and a judgement that can fail.

q, k, v = make_qkv(batch=2, seqlen_q=1023, heads=6, heads_kv=2, head_dim=128, kind="poisoned")
o, _ = attention_truth(q, k, v, causal=True)
ruler, _ = yardstick_attention(q, k, v, causal=True)
assert_close_to_truth("o", my_attention(q, k, v), o, ruler, by_scale=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_accel.testing.errors import (
    Comparison,
    assert_close_to_truth,
    compare,
    default_floor,
    error_and_bound,
    max_abs,
    relative_error,
    rmse,
)
from gpu_accel.testing.inputs import (
    KINDS,
    LAYOUTS,
    QKV,
    VarlenInputs,
    generator,
    make_qkv,
    make_varlen,
    random_like,
    random_values,
    split_varlen,
)
from gpu_accel.testing.poison import never_written, poison_, poison_like
from gpu_accel.testing.truth import attention_mask, yardstick_attention, yardstick_attention_backward

if TYPE_CHECKING:
    from gpu_accel.testing.truth import attention_truth

__all__ = [
    "KINDS",
    "LAYOUTS",
    "QKV",
    "Comparison",
    "VarlenInputs",
    "assert_close_to_truth",
    "attention_mask",
    "attention_truth",
    "compare",
    "default_floor",
    "error_and_bound",
    "generator",
    "make_qkv",
    "make_varlen",
    "max_abs",
    "never_written",
    "poison_",
    "poison_like",
    "random_like",
    "random_values",
    "relative_error",
    "rmse",
    "split_varlen",
    "yardstick_attention",
    "yardstick_attention_backward",
]


def __getattr__(name: str) -> Any:
    if name in ("attention_truth", "attention_truth_backward"):
        from gpu_accel.testing import truth

        return getattr(truth, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
