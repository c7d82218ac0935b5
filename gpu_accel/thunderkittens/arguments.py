"""Checks that the public functions share: kinds, dtypes and devices of tensors, offsets, numbers.

Kernels get addresses: a tensor on another device, of another kind or with offsets beyond its neighbours is memory read
or written that belongs to something else. Values of tensors are read only on the CPU, where that waits for nothing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.problem import FLOAT_DTYPES, check_strided, values_readable

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def readable(x: Tensor) -> bool:
    """Whether the values of x can be read without waiting for a device, breaking a graph or failing in a mode."""
    return values_readable(x)


def check_tensors(
    required: Mapping[str, object], optional: Mapping[str, object] | None = None, integers: tuple[str, ...] = (),
    floats: tuple[torch.dtype, ...] = FLOAT_DTYPES,
) -> None:  # fmt: skip
    """Tensors with strides, on the device of the first one; of a dtype in `floats`, those named in `integers` of a
    signed integer one. `optional` ones may be None.
    """
    first: tuple[str, Tensor] | None = None
    given = {name: x for name, x in (optional or {}).items() if x is not None}
    for name, x in (dict(required) | given).items():
        if not isinstance(x, Tensor):
            raise InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_strided(name, x)
        first = (name, x) if first is None else first
        if x.device != first[1].device:
            raise InvalidInputError(
                f"{name} is on {x.device}, {first[0]} on {first[1].device}: use {name}.to({first[0]}.device)"
            )
        if name in integers and x.dtype not in INTEGERS:
            raise InvalidInputError(f"{name} must be of a signed integer dtype, as int32 is, got {x.dtype}")
        if name not in integers and x.dtype not in floats:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in floats)
            raise InvalidInputError(f"{name} must be of a floating dtype ({names}), got {x.dtype}")


def check_cu_seqlens(cu_seqlens: Tensor, rows: int) -> None:
    """Shape and dtype of offsets of packed sequences, and on the CPU their values: from 0, not decreasing, to rows."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(
            f"cu_seqlens must be (sequences + 1,) int32 or int64, got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )
    if not readable(cu_seqlens):
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise InvalidInputError(f"cu_seqlens must start with 0, got {ends[0]}")
    for at, (one, other) in enumerate(zip(ends, ends[1:], strict=False)):
        if other < one:
            raise InvalidInputError(f"cu_seqlens must not decrease, got {one} then {other} at position {at + 1}")
    if ends[-1] > rows:
        raise InvalidInputError(f"cu_seqlens ends at {ends[-1]}, but there are only {rows} rows")


def check_copy(cu_seqlens: Tensor | None, copy: object, rows: int) -> None:
    """`cu_seqlens_cpu`, a copy of cu_seqlens on the CPU: with it values are checked without waiting for a GPU."""
    if cu_seqlens is None:
        raise InvalidInputError("cu_seqlens_cpu is a copy of cu_seqlens, which is missing")
    if not isinstance(copy, Tensor) or copy.device.type != "cpu" or copy.shape != cu_seqlens.shape:
        raise InvalidInputError(f"cu_seqlens_cpu must be a copy of cu_seqlens on the CPU, got {shown(copy)}")
    check_cu_seqlens(copy, rows)


def check_values(name: str, x: Tensor, least: int, most: int, what: str) -> None:
    """On the CPU: every value is from least to most; `what` says why."""
    if not readable(x) or not x.numel():
        return
    low, high = (int(n) for n in x.long().aminmax())
    if low < least or high > most:
        raise InvalidInputError(f"{name} must be from {least} to {most} ({what}), got {low if low < least else high}")


def real(name: str, x: object, least: float = -math.inf) -> float:
    """x as a float: finite, and not below `least`."""
    if isinstance(x, Tensor) and x.dim() == 0 and not x.is_meta and not x.requires_grad:
        x = x.item()
    bound = "" if least == -math.inf else f" from {least:g}"
    if isinstance(x, bool) or not isinstance(x, (int, float, numbers.Real)):
        raise InvalidInputError(f"{name} must be a finite number{bound}, got {shown(x)} of type {type(x).__name__}")
    try:
        x = float(x)
    except OverflowError:  # an integer or a fraction beyond float64
        x = math.inf
    if not least <= x < math.inf or x == -math.inf:  # NaN fails
        raise InvalidInputError(f"{name} must be a finite number{bound}, got {x!r}")
    return x


def integer(name: str, x: object, least: int = -(1 << 63), most: int = (1 << 63) - 1) -> int:
    """x as an int, numpy's too, from least to most: of 64 bits unless given."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or not least <= int(x) <= most:
        bounds = "" if least < 0 else f" from {least} to {most}"
        raise InvalidInputError(f"{name} must be an integer{bounds}, got {shown(x)} of type {type(x).__name__}")
    return int(x)
