"""The tile layer, and kernels of the ThunderKittens paper's families: products, linear attention, Mamba-2, fused rows.

import gpu_accel.thunderkittens as tk
o, state = tk.chunk_simple_gla(q, k, v, g, output_final_state=True)     # (batch, seqlen, heads, dim)
y = tk.rms_norm(x, weight, residual=r)
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "FlashFFTConv": "long_conv",
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "chunk_delta_rule": "delta",
    "chunk_gated_delta_rule": "delta",
    "chunk_gla": "gla",
    "chunk_linear_attn": "linear",
    "chunk_retention": "linear",
    "chunk_simple_gla": "linear",
    "explain_gemm": "gemm_api",
    "explain_gla": "gla",
    "explain_linear": "linear_explanation",
    "cross_entropy": "losses",
    "delta_rule": "delta",
    "fused_chunk_based": "features",
    "fused_linear_cross_entropy": "losses",
    "gated_linear_attention": "gla",
    "gelu_mul": "elements",
    "gemm": "gemm_api",
    "hedgehog_attention": "features",
    "layer_norm": "rows",
    "linear_attention": "linear",
    "mamba_chunk_scan_combined": "mamba2",
    "parallel_based": "features",
    "pipeline": "template",
    "retention_decay": "linear",
    "rms_norm": "rows",
    "rotary": "elements",
    "silu_mul": "elements",
    "softmax": "rows",
}
# what kernels are written with: device functions, see tiles.py
_TILES = (
    "tile", "load", "store", "tma_async_load", "tma_store_async", "register_cache",
    "mma_AB", "mma_ABt", "mma_AtB", "mma_AtBt", "row_sum", "row_max",
    "row_min", "col_sum", "col_max", "col_min", "broadcast_row", "broadcast_col",
    "add_row", "mul_row", "add_col", "sub_col", "mul_col", "div_col",
    "cumsum", "warp_reduce_sum", "warp_broadcast", "warp_shuffle", "make_causal", "tril",
    "triu", "right_fill", "block_scheduler", "block_gemm", "block_attention",
)  # fmt: skip
_WHERE |= dict.fromkeys(_TILES, "tiles") | dict.fromkeys(("pingpong_schedule", "warp_specialized_gemm"), "ladder")
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
