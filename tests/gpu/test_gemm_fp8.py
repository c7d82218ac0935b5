"""FP8 products on a GPU against float64 on the same codes: every scaling, and sums as exact as cuBLAS'."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.gemm import explain_mm, scaled_mm
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
PAIRS = [
    ("fp8", "fp8"),
    ("fp8_row", "fp8_row"),
    ("fp8_row", "fp8"),
    ("fp8_e5m2", "fp8"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_128x128", "fp8_128x128"),
]


def operands(m, n, k, pair):
    a = torch.randn(m, k, generator=generator(1, "cuda"), device="cuda") * 2
    b = torch.randn(n, k, generator=generator(2, "cuda"), device="cuda") / 8
    return [quantize(x.bfloat16(), name) for x, name in zip((a, b), pair, strict=True)]


@pytest.mark.parametrize("mnk", [(3, 200, 272), (64, 8200, 1040), (300, 1000, 528), (2000, 520, 4096)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_against_float64(pair, mnk):
    m, n, k = mnk
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32)
    # the tensor core keeps about 14 bits of a sum over 128 of K
    floor = 2.0**-11 * truth.abs().max().item()
    out = scaled_mm(a, b, out_dtype=torch.float32, backend="hopper")
    assert_close_to_truth("out", out, truth, yardstick, floor=floor)


@pytest.mark.parametrize("m", [5, 300])
def test_bias_and_odd_columns(m):
    a, b = operands(m, 1001, 528, ("fp8_row", "fp8_row"))
    bias = torch.randn(1001, device="cuda", dtype=torch.bfloat16)
    truth = scaled_mm_reference(a, b, bias=bias)
    ruler = scaled_mm_reference(a, b, bias=bias, dtype=torch.float32, out_dtype=torch.bfloat16)
    assert_close_to_truth("out", scaled_mm(a, b, bias=bias, backend="hopper"), truth, ruler)


def test_sums_are_at_least_as_exact_as_cublas():
    """Positive numbers: with 14 bits all along, a sum over 16384 would lose its small terms."""
    codes = [torch.rand(256, 16384, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    one = torch.ones(1, device="cuda")
    truth = codes[0].double() @ codes[1].double().t()

    def error(out):
        return ((out.double() - truth).abs() / truth).max().item()

    mine = error(hopper_gemm.gemm(*codes, one, one, out_dtype=torch.float32))
    cublas = torch._scaled_mm(codes[0], codes[1].t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert mine <= 1.05 * error(cublas) + 1e-6
    assert mine < 1e-3


def test_what_is_refused_goes_to_plain_triton():
    a, b = operands(64, 128, 280, ("fp8", "fp8"))  # K is no multiple of 16
    assert "hopper refused: rows of K = 280" in explain_mm(a, b)
    a, b = operands(64, 128, 256, ("fp8_1x128", "fp8_1x128"))
    assert "hopper refused: scales of b" in explain_mm(a, b)
