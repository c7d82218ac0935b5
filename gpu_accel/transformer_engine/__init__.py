"""Numbers of eight, six and four bits: exact formats, quantisers, recipes and matrix products.

    from gpu_accel.transformer_engine import quantize, MXFP8BlockScaling
    q = quantize(x, "mxfp8")              # QuantizedTensor: codes, scales, scheme
    y = q.dequantize()
    MXFP8BlockScaling().quantize(x)       # what Transformer Engine's recipe of that name does

    convert(model)                        # its linear layers, forward and backward
    with autocast(recipe=DelayedScaling()):
        loss = model(batch)

Read `formats.py` first, then `scales.py` (the policy for zeros, infinities and NaN), then `reference.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "AdamW8bit": "optimizers",
    "autocast": "context",
    "checkpoint": "context",
    "convert": "conversion",
    "decode": "formats",
    "DelayedScaling": "recipes",
    "dequantize_and_accumulate": "ops",
    "DotProductAttention": "modules",
    "dynamic_precision_select": "select",
    "encode": "formats",
    "error_report": "report",
    "explain_mm": "gemm",
    "Float8BlockScaling": "recipes",
    "Float8CurrentScaling": "recipes",
    "Format": "formats",
    "fp4_gemm": "gemm",
    "fp4_quantize": "ops",
    "fp8_autocast": "context",
    "fp8_gemm": "gemm",
    "fp8_quantize": "ops",
    "gather_in_fp8": "sharded",
    "group_ends": "gemm_grouped",
    "group_room": "gemm_grouped",
    "group_rows": "gemm_grouped",
    "grouped_mm": "gemm_grouped",
    "grouped_mm_fp8": "gemm_grouped",
    "GroupedLinear": "grouped_linear",
    "k_grouped_mm": "gemm_grouped",
    "LayerNormLinear": "modules",
    "LayerNormMLP": "modules",
    "Linear": "linear",
    "Lion8bit": "optimizers",
    "mixed_precision_attention": "attention",
    "MXFP8BlockScaling": "recipes",
    "number_format": "formats",
    "NVFP4BlockScaling": "recipes",
    "OverflowGuard": "overflow",
    "precision_report": "precision",
    "precompute_scales": "sharded",
    "quantize": "quantizer",
    "quantize_kv_cache": "kv_cache",
    "QuantizedTensor": "tensor",
    "scaled_mm": "gemm",
    "scaled_mm_fp8": "gemm",
    "scaled_mm_reference": "reference_gemm",
    "Scheme": "schemes",
    "scheme": "schemes",
    "SCHEMES": "schemes",
    "swizzle_scales": "scales",
    "transformer_engine_fp4": "conversion",
    "transformer_engine_fp8": "conversion",
    "transformer_engine_layer": "conversion",
    "TransformerLayer": "modules",
    "unswizzle_scales": "scales",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
