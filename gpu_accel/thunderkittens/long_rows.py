"""Host side of `long_rows_kernel`: which rows it takes, and its launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, gluon_available, multiprocessors
from gpu_accel.flash_attention3.launch import capability

# What "auto" takes it for. All three have passed tests/gpu (H200, Triton 3.6.0); of a copy's bandwidth it reaches 0.79
# in softmax for 0.70 in plain Triton, but 0.63 for 0.87 in RMSNorm and 0.49 for 0.75 in LayerNorm.
CHECKED: tuple[str, ...] = ("softmax",)
_OPS = {"softmax": 0, "rms": 1, "layer": 2}
_LINE, _LINES, _STAGES, _WARPS = 64, 128, 13, 16
_AHEAD = 3  # blocks of the next row that have room beside a whole one
_quick: list[QuickLaunch] = []


def refusal(x: Tensor) -> str | None:
    """Why this kernel cannot take x (rows, width), or None."""
    rows, width = x.shape
    if not x.is_cuda or torch.version.hip:
        return f"needs an NVIDIA GPU of compute capability 9.0, got a {x.device.type} tensor"
    if capability(x.device) != (9, 0) or not gluon_available():
        return "needs compute capability 9.0 (H100, H200) and a Triton with Gluon"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {x.dtype}"
    most = (_STAGES - _AHEAD) * _LINES * _LINE
    if width % _LINE or not 0 < width <= most:
        return f"widths are multiples of {_LINE} up to {most}, got {width}"
    if not x.is_contiguous() or x.data_ptr() % 16:
        return "rows must be contiguous and start at a multiple of 16 bytes"
    return "it has 2^31 lines or more" if rows * width >= 2**31 * _LINE else None


def takes(x: Tensor, op: str, width_of_registers: int) -> bool:
    """Whether "auto" takes this kernel: too wide for registers, and seen right."""
    return op in CHECKED and x.shape[1] > width_of_registers and refusal(x) is None


def run(
    x: Tensor, y: Tensor, op: str, weight: Tensor | None = None, bias: Tensor | None = None,
    means: Tensor | None = None, rstds: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """y = softmax or norm of every row of x; rstds (rows,) and for "layer" means (rows,) float32 are written."""
    from gpu_accel.thunderkittens import long_rows_kernel
    from gpu_accel.thunderkittens.gemm_hopper import matrix_map

    if not _quick:
        _quick.append(QuickLaunch(long_rows_kernel.long_rows_kernel))
    rows, width = x.shape
    lines = width // _LINE
    programs = min(rows, multiprocessors(x.device))
    optional = [y if t is None else t for t in (weight, bias, means, rstds)]
    # what Triton compiles for: dtypes, and whether addresses are multiples of 16 bytes
    kinds = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in (x, *optional))
    _quick[0](
        kinds, programs,
        (matrix_map(x.view(rows * lines, _LINE), _LINES, _LINE), y, *optional, rows, lines, triton.cdiv(lines, _LINES),
         eps),
        dict(OP=_OPS[op], STAGES=_STAGES, LINES=_LINES, WARPS=_WARPS, WEIGHT=weight is not None, BIAS=bias is not None,
             EXACT=lines % _LINES == 0),
        dict(num_warps=_WARPS),
    )  # fmt: skip
