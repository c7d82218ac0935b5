"""Checks of arguments that layers, functions and optimizers share. None looks at the values of a tensor."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import check_flag, check_strided, check_tangents

__all__ = [
    "check_between", "check_bias", "check_choice", "check_first", "check_flag", "check_floats", "check_no_gradient",
    "check_one_device", "check_parameters", "check_params_dtype", "check_rows", "check_size", "check_strided",
    "check_tangents",
]  # fmt: skip
LARGEST = sys.float_info.max
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_floats(name: str, x: Any) -> None:
    """A strided tensor of real floats; without a recipe, layers are torch's own, which knows of tangents."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be a tensor of floats, got {type(x).__name__}")
    if not x.is_floating_point():
        raise InvalidInputError(f"{name} must be a tensor of floats, got {x.dtype}")
    check_strided(name, x, tangents=True)


def check_one_device(**tensors: Tensor | None) -> None:
    """All tensors on the device of the first; a kernel would read other memory than was meant."""
    places = {name: t.device for name, t in tensors.items() if t is not None}
    first = next(iter(places))
    for name, device in places.items():
        if device != places[first]:
            raise InvalidInputError(
                f"{', '.join(places)} must be on one device, got {first} on {places[first]} and {name} on {device}: "
                f"move one with .to()"
            )


def check_parameters(x: Tensor, **parameters: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Parameters (tensor, shape) on the device of x, and still as large as the layer that holds them was made."""
    check_one_device(x=x, **{name: p for name, (p, _) in parameters.items()})
    for name, (p, shape) in parameters.items():
        if p is not None and p.shape != shape:
            raise InvalidInputError(
                f"{name} of this layer must be {shape}, got {tuple(p.shape)}: make a layer of that size instead"
            )


def check_rows(name: str, x: Any, size: int) -> None:
    """A tensor of floats (..., size)."""
    check_floats(name, x)
    if x.dim() < 1 or x.shape[-1] != size:
        raise InvalidInputError(f"{name} must be (..., {size}), got shape {tuple(x.shape)}")


def check_bias(bias: Any, n: int) -> None:
    """None, or a tensor of floats (n,)."""
    if bias is None:
        return
    check_floats("bias", bias)
    if tuple(bias.shape) != (n,):
        raise InvalidInputError(f"bias must be ({n},), got {tuple(bias.shape)}")


def check_choice(name: str, x: Any, choices: Iterable[str]) -> str:
    """A text out of some. What cannot be hashed or compared is refused like any other."""
    allowed = tuple(choices)
    if not isinstance(x, str) or x not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}, got {shown(x)}")
    return x


def check_no_gradient(**tensors: Tensor | None) -> None:
    """No tensor that wants a gradient, where one would be recorded and none is written, and none with a tangent."""
    check_tangents(**tensors)
    wanted = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    if wanted and torch.is_grad_enabled():
        raise UnsupportedError(
            f"products of quantised matrices have no gradient, and {', '.join(wanted)} wants one: detach() it, or use "
            f"torch.no_grad()"
        )


def check_size(name: str, n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < 2**63:
        raise InvalidInputError(f"{name} must be a positive integer, got {shown(n)}")
    return n


def check_between(name: str, x: Any, low: float, high: float = math.inf) -> float:
    """A finite number from low to high."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not low <= x <= min(high, LARGEST):
        upper = "up" if high == math.inf else f"to {high:g}"
        raise InvalidInputError(f"{name} must be a number from {low:g} {upper}, got {shown(x)}")
    return float(x)


def check_first(first: Any) -> None:
    if first is not None and not isinstance(first, bool):
        raise InvalidInputError(f"is_first_microbatch must be True, False or None, got {shown(first)}")


def check_params_dtype(dtype: Any) -> None:
    if dtype is not None and dtype not in PARAMETER_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in PARAMETER_DTYPES)
        raise InvalidInputError(f"params_dtype must be a torch.dtype out of {allowed}, or None, got {shown(dtype)}")
