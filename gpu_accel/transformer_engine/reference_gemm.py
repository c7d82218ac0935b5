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
    """What Hopper's fp8 tensor cores make of codes a (M, K) @ b (N, K).T; float64 (M, N), not fast.

    32 products and the sum so far are cut off (towards zero) below `fraction_bits` bits behind the largest exponent
    among them, where a product's exponent is the sum of its factors' (so it may be one less than that of its value);
    so is what they add up to, behind its own leading bit. After `every` of K (a multiple of 32) the sum leaves the
    tensor core and is added in float32. Bit for bit what an H200 gave in 44 sets of sums, e4m3 and e5m2, of normal,
    positive, negative, sparse and widely scaled values, K of 32 to 8192 (`torch._scaled_mm` without `use_fast_accum`
    gives the same bits, and with it those of `every` = K). Of sums of 2**15 positive numbers it loses 0.05 % if they
    leave every 128 of K, 0.004 % every 32, and 41 % if they never do. DeepSeek-V3 (arXiv:2412.19437, section 3.5.2)
    speaks of about 14 bits.
    """
    least = -1000  # below any exponent: zeros decide nothing

    def exponent(x: Tensor) -> Tensor:  # not from log2, which on a GPU is below n for some 2**n
        return torch.where(x == 0, least, torch.frexp(x).exponent - 1)

    def cut(x: Tensor, top: Tensor) -> Tensor:
        power = top.clamp_min(-900).long() - fraction_bits
        unit = (power + 1023 << 52).view(torch.float64)  # 2**power, exactly
        return torch.trunc(x / unit) * unit

    a, b = a.double(), b.double()
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    part = total.double()
    of_a, of_b = exponent(a), exponent(b)
    for k in range(0, a.shape[1], 32):
        if k % every == 0:
            total, part = total + part.float(), torch.zeros_like(part)
        s = slice(k, k + 32)
        products, tops = a[:, None, s] * b[None, :, s], of_a[:, None, s] + of_b[None, :, s]
        top = torch.maximum(tops.amax(-1), exponent(part))
        part = cut(products, top[..., None]).sum(-1) + cut(part, top)
        part = cut(part, exponent(part))
    return (total + part.float()).double()
