"""The Hopper FP8 product seen from a CPU: who is refused and why, and what is handed to the kernels."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.launch import recording
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.gemm import explain_mm, fp8_gemm, scaled_mm
from gpu_accel.transformer_engine.quantizer import quantize

ROW, LINE, SQUARE = (1, 0), (1, 128), (128, 128)


def pair(k=256, names=("fp8_row", "fp8_row")):
    return [quantize(torch.randn(n, k), name, backend="reference") for n, name in zip((40, 48), names, strict=True)]


def test_refused_by_name_and_explained():
    a, b = pair()
    with pytest.raises(UnsupportedError, match="compute capability 9.0"):
        scaled_mm(a, b, backend="hopper")
    with pytest.raises(UnsupportedError, match="compute capability 9.0"):
        fp8_gemm(torch.randn(4, 16), torch.randn(8, 16), backend="hopper")
    assert "plain Triton; hopper refused: needs an NVIDIA GPU" in explain_mm(a, b)


@pytest.mark.parametrize(
    ("k", "names", "why"),
    [
        (256, ("fp8_row", "fp8"), None),
        (256, ("fp8_1x128", "fp8_128x128"), None),
        (256, ("fp8_1x128", "fp8_1x128"), "1x128"),
        (264, ("fp8", "fp8"), "multiples of 16 bytes"),
    ],
    ids=["row", "blocks", "lines-right", "odd-k"],
)
def test_what_shapes_and_schemes_decide(k, names, why, monkeypatch):
    monkeypatch.setattr(hopper_gemm, "machine_refusal", lambda x: None)
    got = hopper_gemm.scheme_refusal(*pair(k, names))
    assert (got is None) if why is None else why in got


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(("block_a", "block_b"), [(ROW, ROW), (LINE, SQUARE)], ids=["row", "blocks"])
def test_arguments_of_the_launch(rows, block_a, block_b):
    """Few rows go to the kernel that deals slices; strides say which scale is whose."""
    k, n = 1024, 520
    texts = {ROW: "fp8_row", LINE: "fp8_1x128", SQUARE: "fp8_128x128"}
    a, b = torch.zeros(rows, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
    shapes = {ROW: lambda m: (m, 1), LINE: lambda m: (m, k // 128), SQUARE: lambda m: (-(-m // 128), k // 128)}
    scales = torch.ones(shapes[block_a](rows)), torch.ones(shapes[block_b](n))
    arguments = (a, scales[0], b, scales[1], None, torch.bfloat16, texts[block_a], texts[block_b])
    with recording() as launches:
        out = hopper_gemm.hopper_mm_op(*arguments)
    assert out.shape == (rows, n) and out.dtype == torch.bfloat16
    ((kernel, programs, given, options),) = launches
    assert kernel.__name__ == ("skinny_gemm_kernel" if rows == 3 else "fp8_gemm_kernel")
    assert 1 <= programs <= 132 and options["BLOCKED"] == (block_a == LINE)
    blocked = block_a == LINE
    row_a, k_a, row_b, k_b = given[-4:]
    assert (row_b, k_b) == ((k // 128, 1) if blocked else (1, 0))
    # the kernel for many rows gets the scales of rows side by side
    assert (row_a, k_a) == ((1, 0) if not blocked else (k // 128, 1) if rows == 3 else (1, rows))
