"""What keys and values travel as: any 16- or 32-bit dtype by rounding, or 8 bits with a scale for each row of a head.

In 8 bits a row of a head, `dim` numbers, is `dim + 4` bytes: a float32 scale and the numbers divided by it. Scales are
powers of two, so decoding is exact in bfloat16, and what is decoded and sent on (Ulysses, then a ring) is encoded into
the same bytes again. A row that holds NaN or Inf arrives as NaN: it cannot look like a result.

    error of a number, relative: 2^-4 for float8_e4m3fn, 2^-3 for float8_e5m2 (bfloat16: 2^-8)
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention import wire_kernels

EIGHT_BITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and their largest numbers
WIRES = (None, torch.float16, torch.bfloat16, torch.float32, *EIGHT_BITS)
_SCALE = 4  # bytes


def in_eight_bits(wire: torch.dtype | None) -> bool:
    return wire in EIGHT_BITS


def carrier(wire: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """The dtype of messages."""
    return torch.uint8 if in_eight_bits(wire) else wire or own


def coded_shape(shape: torch.Size, wire: torch.dtype | None) -> torch.Size:
    """The shape of (..., dim) as it is sent."""
    return torch.Size((*shape[:-1], shape[-1] + _SCALE)) if in_eight_bits(wire) else shape


def encode_into(x: Tensor, wire: torch.dtype, out: Tensor) -> None:
    """x (..., dim) into out (..., dim + 4), bytes."""
    if wire_kernels.refuse(x, out, wire) is None:
        wire_kernels.encode_into(x, wire, out)
        return
    largest = x.abs().amax(-1, keepdim=True).float() / EIGHT_BITS[wire]
    exponent = torch.frexp(largest).exponent.clamp(min=-120)
    scale = torch.ldexp(torch.ones_like(largest), exponent)  # above the quotient, by a factor of 2 at most
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    out[..., :_SCALE] = scale.view(torch.uint8)
    out[..., _SCALE:] = (x.float() / scale).to(wire).view(torch.uint8)


def encode(x: Tensor, wire: torch.dtype) -> Tensor:
    out = torch.empty(coded_shape(x.shape, wire), dtype=torch.uint8, device=x.device)
    encode_into(x, wire, out)
    return out


def decode(coded: Tensor, wire: torch.dtype, dtype: torch.dtype) -> Tensor:
    """(..., dim) of dtype from (..., dim + 4) bytes of any strides."""
    shape = (*coded.shape[:-1], coded.shape[-1] - _SCALE)
    out = torch.empty(shape, dtype=dtype, device=coded.device)
    if wire_kernels.refuse(out, coded, wire) is None:
        wire_kernels.decode_into(coded, wire, out)
        return out
    scale = coded[..., :_SCALE].contiguous().view(torch.float32)
    return (coded[..., _SCALE:].contiguous().view(wire).float() * scale).to(dtype)
