"""Matrix products through torch, for the experiments `ceilings` and `energy`: inputs, the call, and its check.

Every element is compared with the product in float64 of the numbers that were multiplied. Errors are relative to the
root mean square of the product, since one element of it says little about how large its terms were.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.hardware import gemm_bytes, gemm_flops
from gpu_accel.workbench.experiment import Check

# Largest error of an element, in root mean squares of the product. Rounding of the result is 0.02 in bf16 (where an
# element is five of them large), and twice that where a long sum is split; tf32 cuts the inputs to 11 bits; the tensor
# cores of Hopper keep some 14 bits of an FP8 sum, and cuBLAS moves it to float32 every 128 terms unless fast
# accumulation is asked for. A wrong element is off by about 1.
BOUNDS = {"bf16": 0.06, "fp16": 0.01, "tf32": 0.02, "e4m3": 0.06}
FAST = 0.25
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}


def operands(dtype: str, size: int, seed: int, *, data: str, device: str) -> tuple[Tensor, Tensor]:
    """a and b (size, size) of N(0, 1), or zeros; b of FP8 lies column by column, as the tensor cores want it."""
    if data == "zeros":
        a, b = (torch.zeros(size, size, device=device) for _ in range(2))
    else:
        generator = torch.Generator(device=device).manual_seed(seed)
        a, b = (torch.randn(size, size, generator=generator, device=device) for _ in range(2))
    a, b = a.to(_TORCH[dtype]), b.to(_TORCH[dtype])
    return (a, b.t().contiguous().t()) if dtype == "e4m3" else (a, b)


def multiply(a: Tensor, b: Tensor, *, fast: bool = False) -> Tensor:
    """a @ b: float32 operands as tf32, FP8 ones with scales of 1 into bf16."""
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    if a.dtype != torch.float32 or not a.is_cuda:
        return a @ b
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def prepared(dtype: str, size: int, seed: int, *, data: str, device: str, fast: bool = False) -> Callable[[], Tensor]:
    """The call to be timed, with its operands; the scales of FP8 exist already."""
    a, b = operands(dtype, size, seed, data=data, device=device)
    if dtype != "e4m3":
        return lambda: multiply(a, b)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def check(dtype: str, size: int, seed: int, *, device: str, fast: bool = False) -> Check:
    """Fresh random operands; the largest error in root mean squares of the product."""
    a, b = operands(dtype, size, seed, data="random", device=device)
    truth = a.double() @ b.double()
    error = (multiply(a, b, fast=fast).double() - truth).abs().max() / truth.square().mean().sqrt()
    return Check(error.item(), FAST if fast else BOUNDS[dtype], "max_abs / rms")


def work(dtype: str, size: int) -> tuple[float, float]:
    """(operations, compulsory bytes) of one product; FP8 has a result of 16 bits."""
    word = {"e4m3": "fp8", "tf32": "fp32"}.get(dtype, dtype)
    flops = gemm_flops(size, size, size)
    return float(flops), float(gemm_bytes(size, size, size, dtype=word, out_dtype="bf16" if word == "fp8" else word))
