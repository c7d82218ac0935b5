"""Quantisation and its inverse in plain torch: short, slow, and the same bits as the kernels.

    codes = round(x * (1 / scale of its block)),     x ~ codes * scale

`quantize_reference` works on a matrix (M, K), row-wise. A column-wise copy is by definition the row-wise copy of the
transposed matrix, (K, M), which is what the matrix products of the backward pass read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.hadamard import random_signs
from gpu_accel.transformer_engine import formats, scales
from gpu_accel.transformer_engine.schemes import INTEGERS, Scheme

SIGNS_SEED = 0  # of the random signs of the Hadamard matrix: one fixed matrix, as both operands of a product need it


@dataclass(frozen=True)
class Parts:
    """codes: (M, K) or, packed, (M, ceil(K / 2)) bytes; scales (row blocks, column blocks): float32, e8m0 or e4m3 codes
    as bytes; tensor_scale: () float32, only of nvfp4."""

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None = None


def block_grid(rows: int, cols: int, scheme: Scheme) -> tuple[int, int]:
    """(row blocks, column blocks) of a matrix; at least one block where a scale spans everything."""
    r, c = scheme.block
    return (-(-rows // r) if r else 1), (-(-cols // c) if c else 1)


def spread(values: Tensor, rows: int, cols: int, scheme: Scheme) -> Tensor:
    """Values per block (row blocks, column blocks) as values per element (rows, cols)."""
    r, c = scheme.block[0] or max(rows, 1), scheme.block[1] or max(cols, 1)
    return values.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :cols]


def block_amax(bits: Tensor, scheme: Scheme) -> Tensor:
    """The largest of (M, K) int32 in every block."""
    rows, cols = bits.shape
    down, across = block_grid(rows, cols, scheme)
    if not bits.numel():
        return torch.zeros(down, across, dtype=bits.dtype, device=bits.device)
    r, c = scheme.block[0] or rows, scheme.block[1] or cols
    padded = torch.nn.functional.pad(bits, (0, across * c - cols, 0, down * r - rows))
    return padded.view(down, r, across, c).amax((1, 3))


def hadamard16(x: Tensor, *, inverse: bool = False) -> Tensor:
    """x (M, K) float32 times the orthogonal matrix, in runs of 16 columns: random signs, butterflies, 1/4."""
    if x.shape[-1] % 16:
        raise InvalidInputError(f"the Hadamard matrix needs a multiple of 16 columns, got {x.shape[-1]}")
    signs = random_signs(16, SIGNS_SEED, x.device).repeat(x.shape[-1] // 16)
    y = x if inverse else x * signs
    for stride in (1, 2, 4, 8):
        pair = y.reshape(x.shape[0], -1, 2, stride)
        a, b = pair[:, :, 0], pair[:, :, 1]
        y = torch.stack((a + b, a - b), 2).reshape(x.shape)
    y = y * 0.25
    return y * signs if inverse else y


def element_words(rows: int, cols: int, seed: int, stream: int, device: torch.device) -> Tensor:
    """Random words (rows, cols) of stochastic rounding; every row starts at a multiple of four words."""
    pitch = -(-cols // 4) * 4
    return formats.random_words(rows * pitch, seed, stream, device).view(rows, pitch)[:, :cols]


def quantize_reference(
    x: Tensor, scheme: Scheme, *, seed: int | None = None, stream: int = 0, scale: Tensor | None = None
) -> Parts:
    """Quantise x (M, K).

    Args:
        seed: needed by stochastic rounding, refused otherwise. stream: 0 for row-wise, 1 for column-wise copies.
        scale: () float32 for a scale per tensor that is known beforehand (delayed scaling).
    """
    rows, cols = x.shape
    values = x.float()
    if scheme.hadamard:
        values = hadamard16(values)
    bits = scales.amax_bits(values, finite_only=scheme.keeps_nan_in_place)
    amax = block_amax(bits, scheme)
    tensor_scale = None
    if scheme.scale == "e8m0":
        block_scales = scales.mx_codes(amax, scheme)
        inverse = scales.mx_inverse(block_scales)
    elif scheme.scale == "nvfp4":
        finite = scales.amax_bits(values, finite_only=True)
        largest = finite.amax() if finite.numel() else finite.new_zeros(())
        encode_scale = scales.nvfp4_encode_scale(largest.view(torch.float32))
        tensor_scale = scales.divide(1.0, encode_scale, encode_scale)
        block_scales = scales.nvfp4_codes(amax, encode_scale)
        inverse = scales.nvfp4_inverse(block_scales, encode_scale)
    else:
        if scale is None:
            block_scales = scales.scale_fp32(
                amax.view(torch.float32), scheme.largest, power_of_two=scheme.scale == "pow2"
            )
        else:
            block_scales = scale.detach().float().reshape(1, 1).clone()  # a custom op may not return its input
        inverse = scales.divide(1.0, block_scales, block_scales)
    scaled = values * spread(inverse, rows, cols, scheme)
    if scheme.element in INTEGERS:
        limit = scheme.largest
        codes = scaled.nan_to_num(0.0, limit, -limit).clamp(-limit, limit).round().to(torch.int8).view(torch.uint8)
        codes = codes & ((1 << scheme.bits) - 1)
    else:
        if scheme.keeps_nan_in_place:
            scaled = torch.where(values.abs() < float("inf"), scaled, float("nan"))
        words = None if seed is None else element_words(rows, cols, seed, stream, x.device)
        codes = formats.encode_with(scaled, formats.FORMATS[scheme.element], saturate=True, words=words)
    codes = formats.pack_nibbles(codes) if scheme.packed else codes
    return Parts(codes, block_scales, tensor_scale)


def dequantize_reference(
    parts: Parts, rows: int, cols: int, scheme: Scheme, *, rotated: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The matrix (rows, cols) that codes and scales mean, computed in `dtype`. `rotated` leaves the Hadamard matrix in.

    In float64 it is exact; in float32 the product of code and scale is rounded once (twice for nvfp4).
    """
    codes = formats.unpack_nibbles(parts.codes, cols) if scheme.packed else parts.codes.view(torch.uint8)
    if scheme.element in INTEGERS:
        signed = codes.view(torch.int8)
        values = ((signed << 4) >> 4 if scheme.bits == 4 else signed).float()
    else:
        values = formats.decode(codes, scheme.element)
    if scheme.scale == "e8m0":
        factor = formats.decode(parts.scales.view(torch.uint8), "e8m0")
    elif scheme.scale == "nvfp4":
        factor = formats.decode(parts.scales.view(torch.uint8), "ue4m3")
    else:
        factor = parts.scales
    values = values.to(dtype) * spread(factor, rows, cols, scheme).to(dtype)
    if parts.tensor_scale is not None:
        values = values * parts.tensor_scale.to(dtype)
    return values if rotated or not scheme.hadamard else hadamard16(values, inverse=True)
