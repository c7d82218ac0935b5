"""Single functions for single steps: quantise to fp8 with a history, quantise to fp4, widen and add up."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.problem import check_written
from gpu_accel.transformer_engine import scales
from gpu_accel.transformer_engine.checks import LARGEST, check_floats, check_one_device
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor


def fp8_quantize(
    tensor: Tensor, amax_history: Tensor | None = None, *, dtype: str = "e4m3", margin: int = 0, backend: str = "auto"
) -> QuantizedTensor:
    """Quantise to fp8 with one scale for the tensor.

    Args:
        tensor: (..., K) float32, bfloat16 or float16.
        amax_history: (length,) float32, newest first. The scale follows from its maximum (1 while it holds only zeros,
            as in Transformer Engine), and afterwards the tensor's own maximum is entered **in place**; a zero, infinite
            or NaN one is not. None: the scale follows from the tensor itself, which reads it twice.
        dtype: "e4m3" or "e5m2". margin: with a history, leave room for a factor of 2**margin.

    Raises:
        InvalidInputError: wrong dtypes or shapes, a margin without a history.
    """
    if dtype not in ("e4m3", "e5m2"):
        raise InvalidInputError(f"dtype must be 'e4m3' or 'e5m2', got {dtype!r}")
    what = Scheme(element=dtype, block=(0, 0), scale="fp32")
    scales.check_margin(margin)
    if amax_history is None:
        if margin:
            raise InvalidInputError("margin goes with amax_history")
        return quantize(tensor, what, backend=backend)
    if not isinstance(amax_history, Tensor) or amax_history.requires_grad:
        raise InvalidInputError("amax_history must be a tensor without gradient: it is changed in place")
    if isinstance(tensor, Tensor) and tensor.is_meta:
        raise InvalidInputError("tensor is on the meta device and has no values for the history to keep")
    if amax_history.is_meta:
        raise InvalidInputError("amax_history is on the meta device and has no values")
    if amax_history.dim() != 1 or not amax_history.numel() or amax_history.dtype != torch.float32:
        raise InvalidInputError(
            f"amax_history must be (length,) float32, got {tuple(amax_history.shape)} {amax_history.dtype}"
        )
    scale = scales.scale_fp32(amax_history.amax() * 2.0**margin, what.largest)
    q = quantize(tensor, what, scale=scale, backend=backend)
    assert q.seen_amax is not None
    fresh, _, _ = scales.update_history(amax_history, q.seen_amax.to(amax_history.device), scale, largest=what.largest)
    amax_history.copy_(fresh)
    return q


def fp4_quantize(tensor: Tensor, scale_per_block: bool = True, *, backend: str = "auto") -> QuantizedTensor:
    """Quantise (..., K) to e2m1: NVFP4 (e4m3 scales per block of 16, one float32), or one float32 scale for all.

    Dtypes, backends and errors as of `quantize`.
    """
    if not isinstance(scale_per_block, bool):
        raise InvalidInputError(f"scale_per_block must be True or False, got {scale_per_block!r}")
    what = Scheme(
        element="e2m1", block=(1, 16) if scale_per_block else (0, 0), scale="nvfp4" if scale_per_block else "fp32"
    )
    return quantize(tensor, what, backend=backend)


def dequantize_and_accumulate(
    result: Tensor | QuantizedTensor, scale: Tensor | float = 1.0, accumulator: Tensor | None = None
) -> Tensor:
    """accumulator + result * scale in float32, in place when an accumulator is given.

    Args:
        result: what a product left, (M, N) of any float dtype, or codes with their own scales (QuantizedTensor).
        scale: a number, or a tensor that broadcasts: (), (M, 1) per row, (N,) per column.
        accumulator: float32, the shape of result. None: zeros.

    Raises:
        InvalidInputError: dtypes, shapes or devices that do not fit, an accumulator that wants a gradient.
    """
    check_floats("result", result)
    if not isinstance(scale, Tensor | numbers.Real):
        raise InvalidInputError(f"scale must be a number or a tensor, got {type(scale).__name__}")
    if not isinstance(scale, Tensor) and isinstance(scale, int) and abs(scale) > LARGEST:
        raise InvalidInputError(f"scale must be within float64, got {shown(scale)}")
    wide = result.dequantize(torch.float32) if isinstance(result, QuantizedTensor) else result.float()
    if isinstance(scale, int):
        scale = float(scale)  # torch takes no whole number beyond 64 bits
    if isinstance(scale, Tensor):
        sizes = zip(reversed(scale.shape), reversed(wide.shape), strict=False)
        if scale.dim() > wide.dim() or any(one not in (1, whole) for one, whole in sizes):
            raise InvalidInputError(f"scale {tuple(scale.shape)} does not broadcast to {tuple(wide.shape)}")
        scale = scale.float()
        check_one_device(result=wide, scale=scale if scale.dim() else None)  # torch takes one number from anywhere
    if accumulator is None:
        return wide * scale
    check_floats("accumulator", accumulator)
    check_one_device(result=wide, accumulator=accumulator)
    if accumulator.requires_grad and torch.is_grad_enabled():
        raise InvalidInputError("accumulator must not want a gradient: it is changed in place")
    if accumulator.dtype != torch.float32 or accumulator.shape != wide.shape:
        raise InvalidInputError(
            f"accumulator must be float32 {tuple(wide.shape)}, got {accumulator.dtype} {tuple(accumulator.shape)}"
        )
    check_written("accumulator", accumulator)
    return accumulator.add_(wide * scale)
