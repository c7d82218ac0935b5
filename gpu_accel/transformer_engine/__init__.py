"""Numbers of eight, six and four bits: exact formats, quantisers, recipes and matrix products.

    from gpu_accel.transformer_engine import quantize, MXFP8BlockScaling
    q = quantize(x, "mxfp8")              # QuantizedTensor: codes, scales, scheme
    y = q.dequantize()
    MXFP8BlockScaling().quantize(x)       # what Transformer Engine's recipe of that name does

Read `formats.py` first, then `scales.py` (the policy for zeros, infinities and NaN), then `reference.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "DelayedScaling": "recipes",
    "Float8BlockScaling": "recipes",
    "Float8CurrentScaling": "recipes",
    "Format": "formats",
    "MXFP8BlockScaling": "recipes",
    "NVFP4BlockScaling": "recipes",
    "QuantizedTensor": "tensor",
    "SCHEMES": "schemes",
    "Scheme": "schemes",
    "decode": "formats",
    "dequantize_and_accumulate": "ops",
    "dynamic_precision_select": "select",
    "encode": "formats",
    "error_report": "report",
    "explain_mm": "gemm",
    "fp4_gemm": "gemm",
    "fp4_quantize": "ops",
    "fp8_quantize": "ops",
    "fp8_gemm": "gemm",
    "number_format": "formats",
    "quantize": "quantizer",
    "quantize_kv_cache": "kv_cache",
    "scaled_mm": "gemm",
    "scaled_mm_reference": "reference_gemm",
    "scheme": "schemes",
    "swizzle_scales": "scales",
    "unswizzle_scales": "scales",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
