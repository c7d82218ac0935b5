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


def hopper_fp8_sum(a: Tensor, b: Tensor, *, every: int = 128, fraction_bits: int = 13) -> Tensor:
    """A model of how Hopper's fp8 tensor cores add up a (M, K) @ b (N, K).T; float64, not fast.

    32 products and the sum so far are aligned to the largest of them and cut off (towards zero) below
    `fraction_bits` bits behind its leading one. After `every` of K the sum leaves the tensor core and is added in
    float32. Of sums of 2**15 positive numbers it loses 0.06 % if they leave every 128 of K, 0.002 % every 32, and 38 %
    if they never do; an H100 lost 0.06 % in the first case. DeepSeek-V3 (arXiv:2412.19437, section 3.5.2) speaks of
    about 14 bits.
    """
    a, b = a.double(), b.double()
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    part = total.double()
    for k in range(0, a.shape[1], 32):
        if k % every == 0:
            total, part = total + part.float(), torch.zeros_like(part)
        products = a[:, None, k : k + 32] * b[None, :, k : k + 32]
        top = torch.maximum(products.abs().amax(-1), part.abs())
        step = torch.exp2(torch.floor(torch.log2(top.clamp_min(2.0**-100))) - fraction_bits)
        part = (torch.trunc(products / step[..., None]).sum(-1) + torch.trunc(part / step)) * step
    return total.double() + part
