"""Papers about GPU acceleration turned into kernels you can import and claims you can check.

The names below are imported on first use, so `import gpu_accel` costs nothing and does not need torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> (module, attribute)
_LAZY = {
    "FlashAttention3": ("gpu_accel.flash_attention3", "FlashAttention3"),
    "RingAttention": ("gpu_accel.ring_attention", "RingAttention"),
}

# what get_kernel() finds, by the package that has it; a pair is (op name, attribute)
_OPS: dict[str, list[str | tuple[str, str]]] = {
    "gpu_accel.flash_attention3": [
        ("flash_attention", "flash_attn_func"),
        ("flash_attention_varlen", "flash_attn_varlen_func"),
        ("flash_attention_kvcache", "flash_attn_with_kvcache"),
        "flash_attention_3_forward",
        "flash_attention_3_backward",
        "fp8_attention",
        "blockwise_softmax",
        "fp8_block_quantize",
        "hadamard_transform",
        "quantize_cache",
        "combine",
    ],
    "gpu_accel.ring_attention": ["ring_attention_forward", "ring_attention_backward", "distributed_attention"],
    "gpu_accel.thunderkittens": [
        "gemm",
        "linear_attention",
        "chunk_linear_attn",
        "chunk_gla",
        "chunk_simple_gla",
        "chunk_retention",
        "chunk_delta_rule",
        "chunk_gated_delta_rule",
        "fused_chunk_based",
        "parallel_based",
        "hedgehog_attention",
        "mamba_chunk_scan_combined",
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "cross_entropy",
        "fused_linear_cross_entropy",
        "layer_norm",
        "rms_norm",
        "rotary",
        "silu_mul",
        "gelu_mul",
        "softmax",
    ],
    "gpu_accel.transformer_engine": [
        "quantize",
        "fp8_quantize",
        "fp4_quantize",
        "quantize_kv_cache",
        "fp8_gemm",
        "fp4_gemm",
        "scaled_mm",
        "grouped_mm",
        "dequantize_and_accumulate",
        "mixed_precision_attention",
    ],
}
_KERNELS = {
    (op if isinstance(op, str) else op[0]): (module, op if isinstance(op, str) else op[1])
    for module, ops in _OPS.items()
    for op in ops
}

__all__ = ["FlashAttention3", "RingAttention", "get_kernel", "kernels", "__version__"]


def kernels() -> list[str]:
    """Names that :func:`get_kernel` knows."""
    return sorted(_KERNELS)


def get_kernel(name: str) -> Any:
    """The public op called `name`, for example ``get_kernel("flash_attention")``.

    Raises:
        InvalidInputError: no such op; the message lists the close and the known names.
    """
    if not isinstance(name, str) or name not in _KERNELS:
        import difflib

        from gpu_accel.errors import InvalidInputError, shown

        close = difflib.get_close_matches(str(name), _KERNELS, n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise InvalidInputError(f"no kernel called {shown(name)}.{hint} Known: {', '.join(kernels())}")
    module, attribute = _KERNELS[name]
    return getattr(importlib.import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'gpu_accel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
