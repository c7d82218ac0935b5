"""Matrix product with bias and activation: one call, the fastest kernel that takes the operands, gradients.

c = gemm(a, b)                                              # a (..., K) b (K, N)
h = gemm(x, weight.t(), bias=bias, activation="gelu")       # a linear layer; views are fine, nothing is copied

c = gemm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale)      # eight-bit floats with scales, see gemm_fp8.py

`hopper` is two Gluon kernels: gemm_kernel.py for products large enough to fill the GPU with tiles, and
gemm_skinny_kernel.py for few rows or few tiles. `portable` is plain Triton. `explain_gemm` says which one a call takes,
and why not another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import FLOAT_DTYPES
from gpu_accel.flash_attention3.reference import without_autocast
from gpu_accel.thunderkittens import gemm_fp8, gemm_hopper, gemm_portable, gemm_skinny
from gpu_accel.thunderkittens.arguments import check_tensors, integer
from gpu_accel.thunderkittens.gemm_hopper import ACTIVATIONS

BACKENDS = ("auto", "hopper", "portable", "reference")
# What has been right on an H100 so far. Of the rest "auto" takes torch's product, until tests/gpu/test_gemm.py passes.
_CHECKED = {"hopper": (torch.bfloat16, torch.float16), "portable": (torch.bfloat16, torch.float16)}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 16


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    tile_size: int = _TILE,
    backend: str = "auto",
) -> Tensor:
    """activation(a (..., K) b (K, N) + bias (N,)), summed in float32 and rounded once; differentiable.

    Args:
        a, b: bfloat16, float16 or float32, of one dtype (the reference also float64); any sizes, 0 included, and
            strides. The Hopper kernels take bf16 and fp16 whose rows or columns are contiguous and start at multiples
            of 16 bytes; other operands are copied first, or go to the portable kernel (see `explain_gemm`). Or both
            float8_e4m3fn or float8_e5m2, one of each if need be, without gradients; b.t() contiguous is not copied.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu", of the float32 sums.
        out_dtype: that of a (bfloat16 for eight bits), or bfloat16, float16, float32.
        scale_a, scale_b: float32, for eight bits only: what codes are multiplied with. One number, or one for each row
            of a (a.shape[:-1]) and each column of b (N,); 1 unless given.
        tile_size: side of the base tile, which is the tensor core's own: 16.
        backend: "auto", "hopper", "portable" or "reference" (torch).

    Raises:
        InvalidInputError: shapes, dtypes, devices or names. UnsupportedError: `backend` cannot run this call,
            tile_size is not 16, a tensor is sparse or nested, or eight bits want a gradient. HardwareError: a GPU
            without products of eight bits.
    """
    _validate(a, b, bias, activation, out_dtype, tile_size, scale_a, scale_b)
    if gemm_fp8.takes(a, b):
        _check_backend(backend)
        return gemm_fp8.gemm(
            a, b, bias, scale_a, scale_b, activation=activation, out_dtype=out_dtype, backend=backend
        )
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
    out_dtype = out_dtype or a.dtype
    if _stays_in_torch(a, backend):
        out = gemm_reference(flat, b, bias=bias, activation=activation, out_dtype=out_dtype)
    else:
        out = gemm_op(flat, b, bias, activation, out_dtype, backend)
    return out.view(*a.shape[:-1], b.shape[1])


def explain_gemm(
    a: Tensor, b: Tensor, *, scale_a: Tensor | None = None, scale_b: Tensor | None = None, backend: str = "auto"
) -> str:
    """Which kernel `gemm` takes for these operands, and why each faster one was refused; raises what it would raise."""
    _validate(a, b, None, "none", None, _TILE, scale_a, scale_b)
    if gemm_fp8.takes(a, b):
        _check_backend(backend)
        return gemm_fp8.explain(a, b, scale_a, scale_b, backend)
    _stays_in_torch(a, backend)
    what, reasons = _choose(a, b, backend)
    return "; ".join([f"{what}: {_DESCRIPTIONS[what]}", *reasons])


@without_autocast
def gemm_reference(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain torch: operands widened to float32 (float64 stays), multiplied, rounded once."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    out = a.to(wide) @ b.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    return activated(out, activation).to(out_dtype or a.dtype)


_DESCRIPTIONS = {
    "skinny": "Gluon, slices of K dealt evenly to the SMs (sm_90a)",
    "hopper": "Gluon, persistent and warp-specialised, wgmma and TMA (sm_90a)",
    "portable": "plain Triton",
    "reference": "torch, in float32",
}


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation by name, in plain torch."""
    if activation == "relu":
        return torch.relu(x)
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return x


def _validate(a, b, bias, activation: str, out_dtype, tile_size: int, scale_a=None, scale_b=None) -> None:
    # float8 of other encodings would be read as numbers, and rounded to on the way out
    check_tensors({"a": a, "b": b}, {"bias": bias}, floats=(*FLOAT_DTYPES, *gemm_fp8.CODES))
    if a.dim() < 1 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise InvalidInputError(f"a must be (..., K) and b (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype and not gemm_fp8.takes(a, b):
        raise InvalidInputError(f"a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype not in FLOAT_DTYPES):
        raise InvalidInputError(f"bias must be ({b.shape[1]},) floats, got {tuple(bias.shape)} {bias.dtype}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise InvalidInputError(f"activation is {shown(activation)}; choose one of {', '.join(ACTIVATIONS)}")
    if gemm_fp8.takes(a, b):
        gemm_fp8.validate(a, b, bias, scale_a, scale_b, out_dtype)
    elif scale_a is not None or scale_b is not None:
        raise InvalidInputError(f"scale_a and scale_b are for float8_e4m3fn and float8_e5m2, got {a.dtype}")
    elif out_dtype not in (None, a.dtype, *_DTYPES):
        raise InvalidInputError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if integer("tile_size", tile_size) != _TILE:
        raise UnsupportedError(f"tile_size is {tile_size}: the base tile is the tensor core's own, {_TILE}")


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend is {backend!r}; choose one of {', '.join(BACKENDS)}")


def _stays_in_torch(a: Tensor, backend: str) -> bool:
    """Whether `_choose` would say "reference", from what torch.compile may know: addresses are for the op to see."""
    _check_backend(backend)
    return backend == "reference" or (backend == "auto" and not (a.is_cuda and a.dtype in _CHECKED["hopper"]))


def _choose(a: Tensor, b: Tensor, backend: str) -> tuple[str, list[str]]:
    """("skinny", "hopper", "portable" or "reference", why not those before it)."""
    if backend == "reference":
        return backend, []
    reasons = []
    if backend in ("auto", "hopper"):
        flat = a.reshape(a.shape[:-1].numel(), a.shape[-1])
        why = gemm_hopper.refusal(flat, b)
        if why is None:
            return gemm_hopper.kernel_for(flat, b), gemm_hopper.copied(flat, b)
        if backend == "hopper":
            raise UnsupportedError(f"hopper: {why}; use backend='portable'")
        reasons.append(f"hopper refused: {why}")
    why = None
    if a.dtype not in _DTYPES:
        why = f"takes bfloat16, float16 and float32, got {a.dtype}"
    elif not a.is_cuda and not INTERPRET:
        why = "needs a GPU, or TRITON_INTERPRET=1"
    elif backend == "auto" and not a.is_cuda:
        why = "only interpreted on a CPU: ask for it by name"
    elif backend == "auto" and a.dtype not in _CHECKED["portable"]:
        why = f"{a.dtype} is not yet checked on a GPU: ask for it by name"
    if why is None:
        return "portable", reasons
    if backend == "portable":
        raise UnsupportedError(f"portable: {why}; use backend='reference'")
    return "reference", [*reasons, f"portable refused: {why}"]


@torch.library.custom_op("gpu_accel::tk_gemm", mutates_args=())
def gemm_op(a: Tensor, b: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype, backend: str) -> Tensor:
    """a (M, K), b (K, N), bias (N,); the kernel is chosen here, where addresses are known."""
    what, _ = _choose(a, b, backend)
    if what == "reference" or not a.shape[0] or not b.shape[1] or not b.shape[0]:
        return gemm_reference(a, b, bias=bias, activation=activation, out_dtype=out_dtype)
    if bias is not None:
        bias = bias.contiguous()
    with gemm_hopper.on_device(a):
        if what != "portable":
            a, b = gemm_hopper.addressable(a, 1), gemm_hopper.addressable(b, 0)
        if what == "skinny":
            return gemm_skinny.gemm(a, b, bias, activation=activation, out_dtype=out_dtype)
        if what == "hopper":
            return gemm_hopper.gemm(a, b, bias, activation=activation, out_dtype=out_dtype)
        return gemm_portable.gemm(a, b, bias, activation=activation, out_dtype=out_dtype)


@gemm_op.register_fake
def _(a, b, bias, activation, out_dtype, backend):
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _save(ctx, inputs, output):
    a, b, bias, activation, _, backend = inputs
    ctx.save_for_backward(a, b, bias)
    ctx.activation, ctx.backend = activation, backend


def _gradients(ctx, dout):
    a, b, bias = ctx.saved_tensors
    if ctx.activation != "none":
        # the sums before the activation are computed again rather than kept
        sums = gemm_op(a, b, bias, "none", torch.float32, ctx.backend)
        dout = _activation_gradient(sums, dout.float(), ctx.activation)
    d = dout.to(a.dtype)
    # views that no Hopper kernel takes may come up here: whatever the forward was asked for, these find their kernel
    backend = "auto" if ctx.backend == "hopper" else ctx.backend
    da = gemm_op(d, b.t(), None, "none", a.dtype, backend) if ctx.needs_input_grad[0] else None
    db = gemm_op(a.t(), d, None, "none", b.dtype, backend) if ctx.needs_input_grad[1] else None
    dbias = dout.float().sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
    return da, db, dbias, None, None, None


def _activation_gradient(x: Tensor, d: Tensor, activation: str) -> Tensor:
    """d times the derivative of the activation at x."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(d, x, 0)
    if activation == "silu":
        if torch.is_grad_enabled():  # torch's has no derivative
            s = torch.sigmoid(x)
            return d * s * (1 + x * (1 - s))
        return torch.ops.aten.silu_backward(d, x)
    return torch.ops.aten.gelu_backward(d, x, approximate="tanh" if activation == "gelu_tanh" else "none")


gemm_op.register_autograd(_gradients, setup_context=_save)
