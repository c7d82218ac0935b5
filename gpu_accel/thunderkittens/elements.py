"""Rotary embedding and gated activations (SwiGLU, GEGLU) with autograd.

q = rotary(q, cos, sin)                # pairs (0, half), (1, half + 1) ...; interleaved=True: (0, 1), (2, 3) ...
h = silu_mul(gate, up)                 # x @ Wg and x @ Wu of SwiGLU, arXiv 2002.05202
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_flag
from gpu_accel.flash_attention3.rotary import apply_rotary
from gpu_accel.thunderkittens import element_kernels as kernels
from gpu_accel.thunderkittens import reference
from gpu_accel.thunderkittens.arguments import check_tensors
from gpu_accel.thunderkittens.chunked import _device, _unit
from gpu_accel.thunderkittens.linear import choose
from gpu_accel.thunderkittens.rows import _need, _rows

# Whether heads that turn as a whole, in halves, have a kernel that loads angles once for several heads or sequences.
HALVES = True
_EACH, _NUMBERS, _WARPS = 2, 2048, 4  # heads or sequences of a program of it, and numbers


@torch.library.custom_op("gpu_accel::tk_rotary", mutates_args=())
def rotary_op(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor | None, start: int, interleaved: bool, backward: bool
) -> Tensor:
    """x (batch, seqlen, heads, dim) turned, or with `backward` turned back. Not differentiable in cos and sin."""
    y = x.new_empty(x.shape)
    x, cos, sin = _unit(x), cos.contiguous(), sin.contiguous()
    offsets = None if offsets is None else offsets.contiguous()
    batch, seqlen, heads, dim = x.shape
    block = max(2, next_power_of_2(dim))
    rows = max(1, 2048 // block)
    pairs = batch * heads
    whole = not interleaved and offsets is None and dim == block == 2 * cos.shape[1] >= 16 and pairs < 2**31
    with _device(x):
        if x.numel() and HALVES and whole and 0 <= start <= cos.shape[0] - seqlen:
            each = min(_EACH, next_power_of_2(pairs))
            tokens = max(1, _NUMBERS // (each * block))
            blocks, groups = -(-seqlen // tokens), -(-pairs // each)
            flat = groups > 65535  # as many as a grid's second dimension may have
            launch(
                kernels._rotary_halves_kernel, blocks * groups if flat else (blocks, groups),
                (x, y, cos, sin, *x.stride()[:3], seqlen, heads, pairs, start),
                dict(DIM=dim, TOKENS=tokens, EACH=each, BACKWARD=backward, FLAT=flat, num_warps=_WARPS),
            )  # fmt: skip
        elif x.numel():
            blocks = -(-seqlen * heads // rows)
            launch(
                kernels._rotary_kernel, blocks * batch,
                (x, y, cos, sin, offsets, *x.stride()[:3], seqlen, heads, cos.shape[0], start, blocks),
                dict(DIM=dim, ROTARY=2 * cos.shape[1], INTERLEAVED=interleaved, BLOCK=block, ROWS=rows,
                     BACKWARD=backward, OFFSETS=offsets is not None, num_warps=4),
            )  # fmt: skip
    return y


@rotary_op.register_fake
def _(x, cos, sin, offsets, start, interleaved, backward):
    return x.new_empty(x.shape)


def _rotary_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:4])
    ctx.scalars = inputs[4:]


def _rotary_gradients(ctx, dy):
    cos, sin, offsets = ctx.saved_tensors
    start, interleaved, backward = ctx.scalars
    dx = rotary_op(dy, cos, sin, offsets, start, interleaved, not backward)
    return dx, None, None, None, None, None, None


rotary_op.register_autograd(_rotary_gradients, setup_context=_rotary_save)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, start: int = 0,
    offsets: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Turn pairs of x (batch, seqlen, heads, dim) by angles that grow with the position.

    Args:
        cos, sin: (longest, rotary_dim / 2); dimensions from rotary_dim on stay as they are. No gradients for these.
        interleaved: pairs are (0, 1), (2, 3) ... (GPT-J); else (0, rotary_dim / 2) ... (Llama).
        start: position of the first token. offsets: (batch,) integers that are added to it, one a sequence.

    Raises:
        InvalidInputError: shapes do not fit, or a position lies beyond the tables (as far as is known without
            waiting for the device: with offsets, positions below 0 or beyond `longest` are not turned).
        UnsupportedError: a gradient of cos or sin, or the backend cannot run here.
    """
    check_tensors({"x": x, "cos": cos, "sin": sin}, {"offsets": offsets}, ("offsets",))
    _need(x.dim() == 4, f"x must be (batch, seqlen, heads, dim), got {tuple(x.shape)}")
    _need(cos.dim() == 2 and cos.shape == sin.shape, f"cos and sin must be (longest, rotary_dim / 2) both, got "
          f"{tuple(cos.shape)} and {tuple(sin.shape)}")  # fmt: skip
    _need(2 * cos.shape[1] <= x.shape[3], f"rotary_dim {2 * cos.shape[1]} is more than the {x.shape[3]} dimensions; of "
          f"tables with each angle twice, as transformers makes them, pass the first {x.shape[3] // 2} columns"
          )  # fmt: skip
    interleaved = check_flag("interleaved", interleaved)
    _need(isinstance(start, int) and not isinstance(start, bool), f"start must be an integer, got {shown(start)}")
    _need(start >= 0 and start + x.shape[1] <= cos.shape[0],
          f"positions {start} to {start + x.shape[1] - 1} need tables of that length, got {cos.shape[0]}")  # fmt: skip
    _need(offsets is None or offsets.shape == x.shape[:1], "offsets must be (batch,) integers")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(f"{name} gets no gradient: pass {name}.detach()")
    if choose(x, backend) == "portable":
        return rotary_op(x, cos, sin, offsets, start, interleaved, False)
    positions = torch.arange(x.shape[1], device=x.device) + start
    if offsets is None:
        return _turn(x.flatten(0, 1), cos, sin, positions.repeat(x.shape[0]), interleaved).view(x.shape)
    every = (positions[None] + offsets[:, None]).flatten()
    beyond = (every < 0) | (every >= cos.shape[0])
    turned = _turn(x.flatten(0, 1), cos, sin, every.clamp(0, cos.shape[0] - 1), interleaved)
    return torch.where(beyond[:, None, None], x.flatten(0, 1), turned).view(x.shape)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return apply_rotary(x, cos, sin, positions, interleaved=interleaved)


_BLOCK = 1024


@torch.library.custom_op("gpu_accel::tk_gated", mutates_args=())
def gated_op(a: Tensor, b: Tensor, kind: str) -> Tensor:
    """f(a) b of (rows, width)."""
    rows, width = a.shape
    y = a.new_empty(rows, width)
    a, b = _rows(a), _rows(b)
    blocks = -(-width // _BLOCK)
    with _device(a):
        if a.numel():
            launch(kernels._gated_kernel, rows * blocks, (a, b, y, a.stride(0), b.stride(0), width, blocks),
                   dict(BLOCK=_BLOCK, KIND=kind, num_warps=4))  # fmt: skip
    return y


@gated_op.register_fake
def _(a, b, kind):
    return a.new_empty(a.shape)


@torch.library.custom_op("gpu_accel::tk_gated_backward", mutates_args=())
def gated_backward_op(dy: Tensor, a: Tensor, b: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, width = a.shape
    da, db = a.new_empty(rows, width), b.new_empty(rows, width)
    dy, a, b = _rows(dy), _rows(a), _rows(b)
    blocks = -(-width // _BLOCK)
    with _device(a):
        if a.numel():
            launch(kernels._gated_backward_kernel, rows * blocks,
                   (dy, a, b, da, db, dy.stride(0), a.stride(0), b.stride(0), width, blocks),
                   dict(BLOCK=_BLOCK, KIND=kind, num_warps=4))  # fmt: skip
    return da, db


@gated_backward_op.register_fake
def _(dy, a, b, kind):
    return a.new_empty(a.shape), b.new_empty(b.shape)


refuse_second(gated_backward_op, "a gated activation by kernels")


def _gated_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.kind = inputs[2]


def _gated_gradients(ctx, dy):
    return (*gated_backward_op(dy, *ctx.saved_tensors, ctx.kind), None)


gated_op.register_autograd(_gated_gradients, setup_context=_gated_save)


def _gated(gate: Tensor, up: Tensor, kind: str, backend: str) -> Tensor:
    check_tensors({"gate": gate, "up": up})
    _need(gate.shape == up.shape and gate.dtype == up.dtype and gate.dim() >= 1,
          f"gate and up must have one shape and floating dtype, got {tuple(gate.shape)} {gate.dtype} and "
          f"{tuple(up.shape)} {up.dtype}")  # fmt: skip
    if choose(gate, backend) == "reference":
        a, b = (x if x.dtype == torch.float64 else x.float() for x in (gate, up))
        out = reference.silu_mul(a, b) if kind == "silu" else reference.gelu_mul(a, b, _APPROXIMATE[kind])
        return out.to(gate.dtype)
    width = gate.shape[-1]
    rows = gate.numel() // width if width else 0
    return gated_op(gate.reshape(rows, width), up.reshape(rows, width), kind).view(gate.shape)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def silu_mul(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up, elementwise: SwiGLU between its products (Shazeer, arXiv:2002.05202). Differentiable.

    Args:
        gate, up: any one shape and dtype, float32, bfloat16 or float16 (reference also float64); computed in float32.
        backend: "portable" (plain Triton), "reference" (plain torch), or "auto": portable on a GPU.

    Raises:
        InvalidInputError: shapes, dtypes or devices that differ. UnsupportedError: the backend cannot run here.
    """
    return _gated(gate, up, "silu", backend)


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "tanh", backend: str = "auto") -> Tensor:
    """gelu(gate) * up, elementwise: GEGLU between its products. approximate: "tanh" or "none" (erf).

    Arguments and errors otherwise as in `silu_mul`.
    """
    if approximate not in ("tanh", "none"):
        raise InvalidInputError(f"approximate is {approximate!r}; choose 'tanh' or 'none'")
    return _gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu", backend)
