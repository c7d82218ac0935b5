"""Activations of a multilayer perceptron with their gradients, gated or not: one read and one write each.

The input of a gated one (swiglu, geglu, reglu) is the gate and the value side by side, as one linear layer makes them,
and its gradient comes back the same way, so that nothing has to be joined. Arithmetic is in float32, and results are
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from gpu_accel.flash_attention3.launch import launch
from gpu_accel.thunderkittens.element_kernels import _activation
from gpu_accel.thunderkittens.reference import gelu_tanh

# name -> (function and its slope by the names of `_curve`, how many times wider the input is than the output)
ACTIVATIONS: dict[str, tuple[str, int]] = {
    "gelu": ("gelu_tanh", 1), "relu": ("relu", 1), "silu": ("silu", 1), "srelu": ("srelu", 1),
    "geglu": ("gelu_tanh", 2), "reglu": ("relu", 2), "swiglu": ("silu", 2),
}  # fmt: skip
_BLOCK = 1024


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": gelu_tanh, "relu": F.relu, "silu": F.silu, "srelu": lambda x: F.relu(x).square(),
}  # fmt: skip


def activate_reference(x: Tensor, name: str) -> Tensor:
    """The activation in plain torch: computed in float32 at least, in the dtype of x; differentiable."""
    curve, widening = ACTIVATIONS[name]
    wide = x if x.dtype == torch.float64 else x.float()
    if widening == 1:
        return _PLAIN[curve](wide).to(x.dtype)
    gate, value = wide.chunk(2, -1)
    return (_PLAIN[curve](gate) * value).to(x.dtype)


def slope_reference(x: Tensor, curve: str) -> Tensor:
    """The derivative of a curve at float32 x."""
    if curve == "relu":
        return (x > 0).float()
    if curve == "srelu":
        return 2 * F.relu(x)
    if curve == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + (0.134145 * x * x).clamp(max=1e9))


def gradient_reference(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """The gradient of x (rows, wide) for dy (rows, width), in plain torch."""
    curve, widening = ACTIVATIONS[name]
    grad, wide = dy.float(), x.float()
    if widening == 1:
        return (grad * slope_reference(wide, curve)).to(x.dtype)
    gate, value = wide.chunk(2, -1)
    parts = (grad * value * slope_reference(gate, curve), grad * _PLAIN[curve](gate))
    return torch.cat(parts, -1).to(x.dtype)


# -- kernels


@triton.jit
def curve_of(a, CURVE: tl.constexpr):
    """(f(a), f'(a)) in float32."""
    if CURVE == "relu":
        value = tl.where(a > 0, a, 0.0)
        value = tl.where(a != a, a, value)
        slope = tl.where(a > 0, 1.0, 0.0)
    elif CURVE == "srelu":
        kept = tl.where(a > 0, a, 0.0)
        kept = tl.where(a != a, a, kept)
        value = kept * kept
        slope = 2.0 * kept
    else:
        value, slope = _activation(a, CURVE, False)  # as the reference has it, which codes are compared with
    return value, slope


@triton.jit
def _activation_kernel(
    x, y, x_row, width, blocks, BLOCK: tl.constexpr, CURVE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    value, _ = curve_of(tl.load(x + row * x_row + cols, mask=mask, other=0.0).to(tl.float32), CURVE)
    if GATED:
        value *= tl.load(x + row * x_row + width + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + cols, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_kernel(
    dy, x, dx, dy_row, x_row, width, blocks, BLOCK: tl.constexpr, CURVE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    grad = tl.load(dy + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = curve_of(tl.load(x + row * x_row + cols, mask=mask, other=0.0).to(tl.float32), CURVE)
    if GATED:
        other = tl.load(x + row * x_row + width + cols, mask=mask, other=0.0).to(tl.float32)
        to = dx + row * (2 * width) + cols
        tl.store(to, (grad * other * slope).to(dx.dtype.element_ty), mask=mask)
        tl.store(to + width, (grad * value).to(dx.dtype.element_ty), mask=mask)
    else:
        tl.store(dx + row * width + cols, (grad * slope).to(dx.dtype.element_ty), mask=mask)


def _flat(x: Tensor) -> Tensor:
    """x (..., width) as (rows, width), neighbours along a row next to each other."""
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def run_activation(x: Tensor, name: str) -> Tensor:
    """The kernel: (rows, width) of x (rows, width or twice that)."""
    curve, widening = ACTIVATIONS[name]
    rows, width = x.shape[0], x.shape[1] // widening
    y = x.new_empty(rows, width)
    x = _flat(x)
    blocks = -(-width // _BLOCK)
    if y.numel():
        launch(_activation_kernel, rows * blocks, (x, y, x.stride(0), width, blocks),
               dict(BLOCK=_BLOCK, CURVE=curve, GATED=widening == 2, num_warps=4))  # fmt: skip
    return y


def run_gradient(dy: Tensor, x: Tensor, name: str) -> Tensor:
    """The kernel: the gradient of x (rows, width or twice that), contiguous."""
    curve, widening = ACTIVATIONS[name]
    rows, width = dy.shape
    dx = x.new_empty(rows, widening * width)
    dy, x = _flat(dy), _flat(x)
    blocks = -(-width // _BLOCK)
    if dy.numel():
        launch(_gradient_kernel, rows * blocks, (dy, x, dx, dy.stride(0), x.stride(0), width, blocks),
               dict(BLOCK=_BLOCK, CURVE=curve, GATED=widening == 2, num_warps=4))  # fmt: skip
    return dx


@torch.library.custom_op("gpu_accel::te_activation", mutates_args=())
def activation_op(x: Tensor, name: str) -> Tensor:
    return run_activation(x, name)


@activation_op.register_fake
def _(x, name):
    return x.new_empty(x.shape[0], x.shape[1] // ACTIVATIONS[name][1])


@torch.library.custom_op("gpu_accel::te_activation_backward", mutates_args=())
def activation_backward_op(dy: Tensor, x: Tensor, name: str) -> Tensor:
    return run_gradient(dy, x, name)


@activation_backward_op.register_fake
def _(dy, x, name):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.name = inputs[1]


def _backward(ctx, dy):
    return activation_backward_op(dy, ctx.saved_tensors[0], ctx.name), None


activation_op.register_autograd(_backward, setup_context=_save)


def activate(x: Tensor, name: str, *, kernels: bool | None = None) -> Tensor:
    """The activation of x (..., width or twice that). kernels: Triton's, or plain torch; None: Triton's on a GPU."""
    if not (x.is_cuda if kernels is None else kernels) or x.dtype == torch.float64:
        return activate_reference(x, name)
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return activation_op(flat, name).view(*x.shape[:-1], -1)
