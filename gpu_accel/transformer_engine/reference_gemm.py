"""Matrix products of quantised operands in plain torch: dequantise, multiply in float64 (or float32), round once."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.transformer_engine.reference import dequantize_reference
from gpu_accel.transformer_engine.tensor import QuantizedTensor


def exact_values(q: QuantizedTensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The numbers that a quantised matrix means, (M, K), in float64 exactly. A Hadamard matrix is left in."""
    parts = q._parts("")
    assert parts is not None
    return dequantize_reference(parts, *q.rows_and_columns, q.scheme, rotated=True, dtype=dtype)


def scaled_mm_reference(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """a (..., K) times the transpose of b (N, K), plus bias (N,), summed in `dtype`."""
    out = exact_values(a, dtype) @ exact_values(b, dtype).t()
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(out_dtype).reshape(*a.shape[:-1], b.shape[0])
