"""Poison: a NaN with its own bit pattern, so that memory never written is told from a NaN that was computed.

Prefill outputs with `poison_like`, run the kernel, and `never_written` marks what it left out. The pattern is one that
arithmetic does not produce (hardware returns a canonical NaN), except in e4m3 and the fnuz formats, which have but one
or two NaN codes: there a computed NaN counts as never written.
"""

from __future__ import annotations

import torch

from gpu_accel.errors import InvalidInputError

# Quiet NaNs (the top mantissa bit is set), so that copying them does not change the pattern.
_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FFDEADDEADDEADD),
    torch.float32: (torch.int32, 0x7FDEADDE),
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7EDE),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7D),
    torch.float8_e4m3fnuz: (torch.uint8, 0x80),
    torch.float8_e5m2fnuz: (torch.uint8, 0x80),
}


def _pattern(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    if dtype in _PATTERNS:
        return _PATTERNS[dtype]
    if dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return dtype, torch.iinfo(dtype).min
    known = ", ".join(str(known) for known in _PATTERNS)
    raise InvalidInputError(f"cannot poison a tensor of dtype {dtype}; {known} and signed integers can be")


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of any strides with poison in place and return it. Integers get their most negative value."""
    bits, pattern = _pattern(tensor.dtype)
    tensor.detach().view(bits).fill_(pattern)
    return tensor


def poison_like(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor of the shape, device and (where dense) strides of `tensor`, full of poison: an output buffer."""
    return poison_(torch.empty_like(tensor, dtype=dtype, requires_grad=False))


def never_written(tensor: torch.Tensor) -> torch.Tensor:
    """A bool mask of the elements that still hold poison; False everywhere for a dtype that cannot be poisoned."""
    try:
        bits, pattern = _pattern(tensor.dtype)
    except InvalidInputError:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return tensor.detach().view(bits) == pattern
