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


def test_every_pair_and_every_k_is_taken(monkeypatch):
    monkeypatch.setattr(hopper_gemm, "machine_refusal", lambda x: None)
    for k, names in ((256, ("fp8_row", "fp8")), (256, ("fp8_1x128", "fp8_1x128")), (264, ("fp8_e5m2", "fp8"))):
        assert hopper_gemm.scheme_refusal(*pair(k, names)) is None
    assert "copied first" in hopper_gemm.explain(*pair(264, ("fp8", "fp8")))
    monkeypatch.setattr(hopper_gemm, "GPU_CHECKED", ())
    assert "not yet checked" in hopper_gemm.explain(*pair(256, ("fp8_e5m2", "fp8_e5m2")))
    assert not hopper_gemm.chosen(*pair(), "auto") and hopper_gemm.chosen(*pair(), "hopper")
    monkeypatch.setattr(hopper_gemm, "GPU_CHECKED", ("dense",))
    assert hopper_gemm.chosen(*pair(), "auto") and not hopper_gemm.chosen(*pair(), "auto", kind="grouped")
    lines = pair(256, ("fp8_1x128", "fp8_1x128"))
    assert hopper_gemm.chosen(*lines, "auto") and "Gluon" in hopper_gemm.explain(*lines)
    monkeypatch.setattr(hopper_gemm, "GPU_CHECKED", ("dense", "grouped"))
    assert hopper_gemm.chosen(*pair(), "auto", kind="grouped")
    assert not hopper_gemm.chosen(*lines, "auto", kind="grouped")
    assert hopper_gemm.chosen(*lines, "hopper", kind="grouped")


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize(("block_a", "block_b"), [(ROW, ROW), (LINE, SQUARE)], ids=["row", "blocks"])
def test_arguments_of_the_launch(rows, block_a, block_b):
    """Few rows go to the kernel that deals slices; strides say which scale is whose."""
    k, n = 1024, 520
    texts = {ROW: "fp8_row", LINE: "fp8_1x128", SQUARE: "fp8_128x128"}
    a, b = torch.zeros(rows, k, dtype=torch.uint8), torch.zeros(n, k, dtype=torch.uint8)
    shapes = {ROW: lambda m: (m, 1), LINE: lambda m: (m, k // 128), SQUARE: lambda m: (-(-m // 128), k // 128)}
    scales = torch.ones(shapes[block_a](rows)), torch.ones(shapes[block_b](n))
    arguments = (a, scales[0], b, scales[1], None, "none", torch.bfloat16, texts[block_a], texts[block_b])
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
    assert (row_a, k_a) == ((1, 0) if not blocked else (k // 128, 1) if rows == 3 else (1, 512))


def test_scales_side_by_side():
    scale = torch.rand(130, 3)
    assert hopper_gemm._side_by_side(scale, SQUARE) is scale
    for padded in (False, True):
        got = hopper_gemm._side_by_side(scale, LINE, padded=padded)
        assert torch.equal(got[:130], scale) and got.stride(0) == 1 and not got[130:].any()
    assert got.shape[0] == 384  # a tile that begins in row 129 of the last matrix of a stack stays inside
    turned = hopper_gemm._side_by_side(scale, LINE, padded=True, turned=True)
    first = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # as four threads have them
    order = torch.arange(0, 384, 16)[:, None] + torch.tensor(first)
    assert torch.equal(turned, got[order.flatten()]) and turned.stride(0) == 1
    for padded, in_turn in ((False, False), (True, False), (True, True)):
        wanted = hopper_gemm._side_by_side(scale, LINE, padded=padded, turned=in_turn)
        made = hopper_gemm._by_kernel(scale, padded, in_turn)
        assert torch.equal(made, wanted) and made.stride() == wanted.stride()


def launched(function, *arguments):
    with recording() as launches:
        out = function(*arguments)
    ((kernel, programs, given, options),) = launches
    return out, kernel.__name__, programs, given, options


@pytest.mark.parametrize("n", [512, 513])
def test_results_in_fp8_and_sums_that_are_added_to(n):
    """Few rows go to the kernel of many where its epilogue is needed; rows that TMA cannot write go to wider ones."""
    a, b, one = torch.zeros(20, 256, dtype=torch.uint8), torch.zeros(n, 256, dtype=torch.uint8), torch.ones(1)
    amax = torch.zeros(())
    given = (a, one, b, one, None, "gelu")
    codes, kernel, _, arguments, options = launched(
        hopper_gemm.hopper_mm_fp8_op, *given, torch.tensor(2.0), amax, "e5m2", "fp8", "fp8_e5m2"
    )
    assert codes.shape == (20, n) and codes.dtype == torch.float8_e5m2 and codes.is_contiguous()
    assert kernel == "fp8_gemm_kernel" and options["SCALE_OUT"] and options["LARGEST"] and not options["DIRECT"]
    assert arguments[5].item() == 0.5 and arguments[6].data_ptr() == amax.data_ptr()
    assert arguments[3].stride(0) % 16 == 0
    out = torch.zeros(20, n)
    _, kernel, _, arguments, options = launched(hopper_gemm.hopper_mm_add_op, out, *given, "fp8", "fp8")
    assert kernel == "fp8_gemm_kernel" and options["ACCUMULATE"] and arguments[3] is out


def test_odd_k_is_copied_to_rows_that_start_at_multiples_of_16_bytes():
    x = torch.arange(5 * 19).to(torch.uint8).view(5, 19)
    copy = hopper_gemm._addressable(x)
    assert torch.equal(copy, x) and copy.stride() == (32, 1)
    whole = torch.zeros(4, 32, dtype=torch.uint8)
    assert hopper_gemm._addressable(whole) is whole


@pytest.mark.parametrize(
    ("m", "n", "lines", "parts"),
    [(8192, 8192, False, 2), (512, 4096, False, 1), (8192, 8192, True, 1), (512, 64, False, 1)],
)
def test_tiles(m, n, lines, parts):
    assert hopper_gemm.fp8_gemm_config(m, n, lines).parts == parts
    assert hopper_gemm.fp8_gemm_config(m, n, lines, plain=False).parts == (1 if lines or n <= 128 else 2)


@pytest.mark.parametrize(
    ("m", "n", "lines_b", "parts"),
    [(4096, 4096, True, 1), (4096, 4096, False, 2), (8192, 256, False, 1)],
)
def test_scales_come_with_their_slice(m, n, lines_b, parts):
    config = hopper_gemm.fp8_gemm_config(m, n, lines_b, lines_a=True)
    assert config.staged and config.parts == parts and config.stages <= (5 if parts == 1 else 4)
    assert not hopper_gemm.fp8_gemm_config(m, n, lines_b).staged  # scales of A that are not those of rows
    assert not hopper_gemm.fp8_gemm_config(64, n, lines_b, lines_a=True).staged


@pytest.mark.parametrize(
    ("m", "n", "k", "few"),
    [(64, 32768, 512, True), (65, 2112, 7168, True), (128, 7168, 2048, True), (128, 8192, 8192, True),
     (129, 2112, 7168, False), (128, 6144, 4096, False), (128, 24576, 1536, False), (128, 7168, 16384, False),
     (128, 4096, 512, False)],
)  # fmt: skip
def test_up_to_128_rows_go_to_the_kernel_of_few_rows_where_it_is_faster(m, n, k, few):
    assert hopper_gemm.takes_few_rows(m, n, k, LINE, SQUARE) is hopper_gemm.takes_few_rows(m, n, k, ROW, ROW) is few
    assert not any(hopper_gemm.takes_few_rows(m, n, k, a, b) for a, b in ((SQUARE, SQUARE), (LINE, LINE)))


@pytest.mark.parametrize(
    ("m", "n", "parts"),
    [(4096, 2112, 1), (2048, 4608, 1), (8192, 2112, 2), (4096, 4096, 2), (4096, 6400, 2), (8192, 8192, 2)],
)
def test_narrow_tiles_where_wide_ones_leave_most_of_a_round_idle(m, n, parts):
    """3 rounds of wide tiles and 5 of narrow ones, which take 0.57 of them; 5 and 9; 4 and 8."""
    config = hopper_gemm.fp8_gemm_config(m, n, lines_a=True)
    assert config.parts == parts and config.staged
    assert hopper_gemm.fp8_gemm_config(m, n, lines_a=True, alone=False).parts == 2  # groups are as they were
    assert hopper_gemm.fp8_gemm_config(m, n, lines_a=True, plain=False).parts == 2
