"""FlashAttention-3 (arXiv 2407.08608): exact attention that never stores the score matrix, and its FP8 form.

    from gpu_accel.flash_attention3 import flash_attn_func, explain
    o = flash_attn_func(q, k, v, causal=True)          # (batch, seqlen, heads, head_dim), differentiable
    print(explain(q, k, v, causal=True))               # which kernel, which tiles, why not the others

Read `reference.py` first, then `portable_forward.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "FlashAttention3": "modules",
    "Explanation": "explanation",
    "explain": "explanation",
    "flash_attn_func": "api",
    "flash_attn_varlen_func": "api",
    "modifier": "modifiers",
    "flash_attention_3_forward": "modules",
    "flash_attention_3_backward": "modules",
    "fp8_attention": "fp8",
    "fp8_block_quantize": "fp8",
    "fp8_attention_quantized": "fp8",
    "fp8_error_report": "fp8_error",
    "hadamard_transform": "hadamard",
    "flash_attn_with_kvcache": "kvcache",
    "explain_kvcache": "kvcache",
    "combine": "merging",
    "quantize_cache": "reference_kvcache",
    "blockwise_softmax": "blockwise",
    "attention_reference": "reference",
    "attention_truth": "reference",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
