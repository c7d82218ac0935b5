"""The bound of a quantiser that multiplies by the Hadamard matrix on tensor cores, which follows from its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.flash_attention3.fp8 import BLOCK
from gpu_accel.flash_attention3.fp8_quantize import FORMATS
from gpu_accel.flash_attention3.hadamard import hadamard_reference


def hadamard_excess(
    x: Tensor, values: Tensor, scales: Tensor, *, sum_error: float, dtype: str = "e4m3", seed: int = 0
) -> tuple[float, float]:
    """The largest errors of (scales, values) as shares of what is allowed: neither may be above 1, or NaN.

    Half a step of the format off the exact product is nobody's fault. Beyond that, sums may be off by `sum_error` times
    the magnitudes of a row: that moves the numbers before they are rounded, and in the row with the largest sum the
    scale; the scale, its inverse and the multiplication by it round three times more.

    Args:
        x: (batch, heads, seqlen, dim), finite. values: the same shape, fp8. scales: one a block of 128 rows.
        sum_error: as `hopper_quantize.sum_error` gives it.
        dtype, seed: as they were quantised with.
    """
    fmt, seqlen = FORMATS[dtype], x.shape[-2]

    def largest_of_blocks(a: Tensor) -> Tensor:
        a = a.amax(-1)
        return torch.nn.functional.pad(a, (0, -seqlen % BLOCK)).unflatten(-1, (-1, BLOCK)).amax(-1)

    truth = hadamard_reference(x, seed=seed, dtype=torch.float64)
    off = sum_error * x.shape[-1] ** -0.5 * x.double().abs().sum(-1, keepdim=True)
    wanted = largest_of_blocks(truth.abs()) / fmt.largest
    of_scales = (scales - wanted).abs() / (largest_of_blocks(off) / fmt.largest + 2.0**-22 * wanted)
    unit = scales.double().repeat_interleave(BLOCK, -1)[..., :seqlen, None]
    exact = truth / unit
    smallest = 2.0 ** {"e4m3": -9, "e5m2": -16}[dtype]
    half_step = torch.clamp_min(exact.abs() * 2.0 ** -(fmt.mantissa_bits + 1), smallest / 2)
    error = (values.double() - exact).abs() - half_step
    allowed = (off / unit) * 1.125 + 2.0**-21 * exact.abs()  # half a step of what is that much larger, too
    return of_scales.max().item(), (error / allowed).max().item()
