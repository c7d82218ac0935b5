"""`quantize`: checks, choice of kernel and tile, launch, and the custom op that torch.compile sees."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.problem import check_tangents
from gpu_accel.transformer_engine import scales
from gpu_accel.transformer_engine.formats import check_seed
from gpu_accel.transformer_engine.quantize_launch import (
    LONGEST_ROW,
    _empty_parts,
    as_matrix,
    native_fp8,
    run_quantize,
)
from gpu_accel.transformer_engine.reference import Parts, quantize_reference
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

__all__ = ["BACKENDS", "DTYPES", "LONGEST_ROW", "as_matrix", "choose_backend", "native_fp8", "quantize"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "portable", "reference")
# Whether tests/gpu/test_transformer_engine.py has passed on a GPU (an H200, 2026-11-28). Where not, "auto" takes the
# reference on CUDA, slow and right; backend="portable" asks for the kernels.
GPU_CHECKED = True
# The same of norms and activations within the quantisers' kernels, and of the one launch for histories.
FUSED_CHECKED = True


def choose_backend(backend: str, x: Tensor, what: str) -> str:
    """Resolve "auto"; refuse what cannot run here. Raises InvalidInputError, HardwareError."""
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend of {what} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runs = INTERPRET or x.is_cuda
    if backend == "auto":
        return "portable" if INTERPRET or (runs and GPU_CHECKED) else "reference"
    if backend == "portable" and not runs:
        raise HardwareError(
            f"{what}: the portable kernel got a tensor on {x.device.type}: move it to a CUDA device, set "
            f"TRITON_INTERPRET=1 before Python starts, or use backend='reference'"
        )
    return backend


@torch.library.custom_op("gpu_accel::te_quantize", mutates_args=())
def quantize_op(
    x: Tensor, text: str, rowwise: bool, columnwise: bool, seed: int, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels; arguments are checked by `quantize`.

    Returns (data, scales, tensor scale) row-wise, the same column-wise, and () float32 largest magnitude when the scale
    was given. What is not made is empty.
    """
    seen = None if scale is None else x.new_zeros((), dtype=torch.float32)
    row, col = run_quantize(x, find_scheme(text), rowwise, columnwise, seed=seed, scale=scale, seen=seen)
    return (*row, *col, x.new_empty((), dtype=torch.float32) if seen is None else seen)


@quantize_op.register_fake
def _(x, text, rowwise, columnwise, seed, scale):
    scheme = find_scheme(text)
    cols = x.shape[-1]
    rows = x.shape[:-1].numel()
    row = _empty_parts(x, rows, cols, scheme, rowwise)
    col = _empty_parts(x, cols, rows, scheme, columnwise)
    return (*row, *col, x.new_empty((), dtype=torch.float32))


def check_input(x: Tensor, what: str = "x") -> None:
    """x must be a strided (..., K) tensor of a supported dtype."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{what} must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(x, QuantizedTensor):
        raise InvalidInputError(
            f"{what} is quantised already: quantise the high-precision tensor, or dequantize() first"
        )
    if x.layout != torch.strided:
        raise InvalidInputError(f"{what} must be a strided tensor, got {x.layout}")
    if x.dtype not in DTYPES:
        raise InvalidInputError(f"{what} must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() < 1:
        raise InvalidInputError(f"{what} must have at least one dimension, got a scalar")
    check_tangents(**{what: x})


def quantize(
    x: Tensor,
    scheme: str | Scheme = "mxfp8",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantise x (..., K) to eight, six or four bits.

    Args:
        x: float32, bfloat16 or float16; any strides that two leading strides can describe, zero sizes included.
        scheme: a name of `SCHEMES`, a text or a `Scheme`.
        rowwise: make the copy (M, K) with blocks along K. columnwise: make the copy of the transposed matrix (K, M),
            with blocks along M, read in the same pass. At least one.
        seed: of stochastic rounding; needed by it, refused otherwise.
        scale: () float32 to use instead of the current maximum (delayed scaling; e4m3 and e5m2 per tensor only). The
            largest magnitude is then left in `.seen_amax`.
        backend: "portable" (Triton; GPU, or the interpreter), "reference" (plain torch), or "auto": the kernels in the
            interpreter, and on a GPU once they have been checked on one (`GPU_CHECKED`); until then the reference.

    Both backends give the same bits. What happens to zeros, infinities and NaN is written in `scales.py`.

    Raises:
        InvalidInputError: wrong dtype or strides, nothing to make, seed or scale where they do not belong, a Hadamard
            matrix on a length that is no multiple of 16. HardwareError: backend="portable" without a GPU.
    """
    check_input(x)
    scheme = find_scheme(scheme)
    if not isinstance(rowwise, bool) or not isinstance(columnwise, bool):
        raise InvalidInputError(f"rowwise and columnwise must be True or False, got {rowwise!r} and {columnwise!r}")
    if not (rowwise or columnwise):
        raise InvalidInputError("nothing to do: rowwise or columnwise must be True")
    if (seed is None) == (scheme.rounding == "stochastic"):
        raise InvalidInputError("schemes with stochastic rounding need a seed, and others take none")
    if scale is not None and (scheme.block != (0, 0) or not scheme.keeps_nan_in_place):
        raise InvalidInputError(f"only e4m3 and e5m2 with a scale per tensor take a scale, not {scheme}")
    if scale is not None and not (isinstance(scale, Tensor) and scale.numel() == 1 and scale.is_floating_point()):
        got = f"{tuple(scale.shape)} {scale.dtype}" if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"scale must be a tensor of one float32, got {got}")
    if scale is not None and scale.is_meta and not x.is_meta:
        raise InvalidInputError(f"scale has no value (it is on meta), and x is on {x.device}")
    matrix = as_matrix(x)
    if scheme.hadamard and ((rowwise and matrix.cols % 16) or (columnwise and matrix.rows % 16)):
        raise InvalidInputError(f"the Hadamard matrix needs multiples of 16, got {matrix.rows} x {matrix.cols}")
    number = check_seed(0 if seed is None else seed)
    amax = None
    x = x.detach()
    if choose_backend(backend, x, "quantize") == "portable":
        if scale is not None:
            scale = scale.detach().to(x.device, torch.float32).reshape(1, 1)
        out = quantize_op(x, scheme.text, rowwise, columnwise, number, scale)
        made = [
            Parts(out[i], out[i + 1], out[i + 2] if scheme.scale == "nvfp4" else None) if wanted else None
            for i, wanted in ((0, rowwise), (3, columnwise))
        ]
        amax = out[6] if scale is not None else None
    else:
        wide = x.reshape(matrix.rows, matrix.cols)
        given = None if scale is None else scale.to(x.device)
        made = [
            quantize_reference(part, scheme, seed=seed, stream=stream, scale=given) if wanted else None
            for stream, (wanted, part) in enumerate(((rowwise, wide), (columnwise, wide.t())))
        ]
        if scale is not None:
            bits = scales.amax_bits(wide, finite_only=False)
            amax = (bits.amax() if bits.numel() else bits.new_zeros(())).view(torch.float32)
    return QuantizedTensor.from_parts(row=made[0], col=made[1], scheme=scheme, shape=x.shape, dtype=x.dtype, amax=amax)
