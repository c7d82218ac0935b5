"""FP8 attention in plain torch: the twin of the quantiser, and the arithmetic of the attention kernel.

`quantize_reference` gives the bits of the kernel (`fp8_quantize` names the one exception). `fp8_attention_reference`
walks over blocks of keys as the kernel does (running maximum, probabilities scaled into the fp8 range and rounded, one
scale per block), in float32 or float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpu_accel.flash_attention3.fp8_quantize import Fp8Format, fp8_format, scale_of
from gpu_accel.flash_attention3.hadamard import hadamard_reference
from gpu_accel.flash_attention3.reference import visible, without_autocast
from gpu_accel.flash_attention3.rotary import apply_rotary

LOG2E = 1.4426950408889634


def encode(y: Tensor, fmt: Fp8Format) -> Tensor:
    """float32 within the range of the format -> fp8, to nearest even; Inf and NaN become the NaN 0x7f."""
    bad = ~torch.isfinite(y)
    out = torch.where(bad, 0.0, y).to(fmt.dtype)
    out.view(torch.uint8)[bad] = 0x7F
    return out


@without_autocast
def quantize_reference(
    tensor: Tensor,
    block_size: int = 128,
    scale_per_block: bool = True,
    dtype: str = "e4m3",
    *,
    hadamard: bool = False,
    seed: int = 0,
    transpose: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """`fp8_block_quantize` in plain torch, bit for bit as `fp8_quantize` says (NaN is always 0x7f)."""
    fmt = fp8_format(dtype)
    if rotary_cos is not None and rotary_sin is not None:
        rows = tensor.reshape(math.prod(tensor.shape[:-2]), *tensor.shape[-2:]).transpose(0, 1)
        positions = torch.arange(len(rows), device=tensor.device)
        turned = apply_rotary(rows, rotary_cos, rotary_sin, positions, interleaved=rotary_interleaved)
        tensor = turned.transpose(0, 1).reshape(tensor.shape)
    x = hadamard_reference(tensor, seed=seed) if hadamard else tensor.float()
    *lead, seqlen, dim = x.shape
    block_size = min(block_size, max(1, seqlen))  # a longer block would only be padded
    blocks = -(-seqlen // block_size)
    size = torch.where(torch.isfinite(x), x.abs(), 0.0)
    if scale_per_block:
        padded = torch.nn.functional.pad(size, (0, 0, 0, blocks * block_size - seqlen))
        amax = padded.reshape(*lead, blocks, block_size * dim).amax(-1) if x.numel() else x.new_zeros(*lead, blocks)
        scales = scale_of(amax, fmt.largest)
        rows = scales.repeat_interleave(block_size, -1)[..., :seqlen, None]
    else:
        scales = scale_of(size.amax() if x.numel() else x.new_zeros(()), fmt.largest)
        rows = scales
    values = encode(x * (torch.ones_like(rows) / rows), fmt)
    if transpose:
        values = transpose_values(values)
    return values.contiguous(), scales


def transpose_values(values: Tensor) -> Tensor:
    """fp8 (..., seqlen, dim) -> (..., dim, seqlen padded with zeros to a multiple of 16), as the kernel wants v."""
    *lead, seqlen, dim = values.shape
    out = torch.zeros(*lead, dim, -(-seqlen // 16) * 16, dtype=torch.uint8, device=values.device)
    out[..., :seqlen] = values.view(torch.uint8).transpose(-1, -2)
    return out.view(values.dtype)


def expand_scales(scales: Tensor, batch: int, heads: int, blocks: int) -> Tensor:
    """Scales of shape (), (batch, heads) or (batch, heads, blocks) as (batch, heads, blocks), without a copy."""
    if scales.dim() == 2:
        scales = scales[..., None]
    return scales.expand(batch, heads, blocks)


def dequantize(values: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """fp8 (batch, heads, seqlen, dim) times its scales -> `dtype`."""
    batch, heads, seqlen, _ = values.shape
    block_size = min(block_size, max(1, seqlen))
    blocks = -(-seqlen // block_size)
    rows = expand_scales(scales, batch, heads, blocks).repeat_interleave(block_size, -1)[..., :seqlen, None]
    return values.to(dtype) * rows.to(dtype)


@without_autocast
def fp8_attention_reference(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    q_block: int = 128,
    k_block: int = 128,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    v_transposed: bool = False,
    quantize_p: bool = True,
    block_n: int = 128,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """What `fp8_attention_quantized` computes, in `dtype`, walking over `block_n` keys at a time.

    Shapes as there. quantize_p=False keeps the probabilities exact: the error that remains is that of q, k and v.

    Returns:
        o (batch, heads, seqlen_q, head_dim) and lse (batch, heads, seqlen_q), both in `dtype`.
    """
    fmt = fp8_format(v8.dtype)
    batch, heads, sq, dim = q8.shape
    heads_kv, sk = k8.shape[1], k8.shape[2]
    group = heads // heads_kv
    if v_transposed:
        v8 = v8[..., :sk].view(torch.uint8).transpose(-1, -2).view(v8.dtype)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = (-1 if w is None or w < 0 else w for w in window_size)
    right = 0 if causal else right

    if sk == 0 or q8.numel() == 0:
        o = torch.zeros(batch, heads, sq, dim, dtype=dtype, device=q8.device)
        return o, o.new_full((batch, heads, sq), float("-inf"))
    q = dequantize(q8, q_scale, q_block, dtype)
    k = dequantize(k8, k_scale, k_block, dtype).repeat_interleave(group, 1)
    v = dequantize(v8, v_scale, k_block, dtype).repeat_interleave(group, 1)
    v_unit = v8.to(dtype).repeat_interleave(group, 1)
    v_scales = expand_scales(v_scale, batch, heads_kv, -(-sk // k_block)).repeat_interleave(group, 1)

    rows = torch.arange(sq, device=q.device)
    mask = visible(rows, sq, sk, left, right)
    m = q.new_full((batch, heads, sq, 1), float("-inf"))
    total = q.new_zeros(batch, heads, sq, 1)
    acc = q.new_zeros(batch, heads, sq, dim)
    for start in range(0, sk, block_n):
        keys = slice(start, min(sk, start + block_n))
        s = q @ k[:, :, keys].transpose(-1, -2) * scale
        if softcap > 0:
            s = torch.tanh(s / softcap) * softcap
        s = (s * LOG2E).masked_fill(~mask[:, keys], float("-inf"))
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        safe = torch.where(m_new == float("-inf"), 0.0, m_new)
        alpha = torch.exp2(m - safe)
        p = torch.exp2(s - safe)
        total = total * alpha + p.sum(-1, keepdim=True)
        if quantize_p:
            p = (p * 2.0**fmt.p_shift).float().to(fmt.dtype).to(dtype) * 2.0**-fmt.p_shift
            vs = v_scales[:, :, start // k_block, None, None].to(dtype)
            acc = acc * alpha + (p @ v_unit[:, :, keys]) * vs
        else:
            acc = acc * alpha + p @ v[:, :, keys]
        m = m_new
    empty = total == 0
    o = acc / torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), m / LOG2E + torch.where(empty, 1.0, total).log())
    return o, lse.squeeze(-1)
