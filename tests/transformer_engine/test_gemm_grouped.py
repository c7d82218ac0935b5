"""Grouped products and epilogues of fp8 products against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.launch import recording
from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.transformer_engine import gemm_grouped
from gpu_accel.transformer_engine.gemm import scaled_mm, scaled_mm_fp8
from gpu_accel.transformer_engine.gemm_grouped import (
    group_ends,
    group_room,
    group_rows,
    grouped_mm,
    grouped_mm_fp8,
    grouped_mm_reference,
    k_grouped_mm,
    k_grouped_mm_reference,
)
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference


def operands(shape_a, shape_b, pair, device):
    a, b = (torch.randn(*shape, generator=generator(i)) for i, shape in enumerate((shape_a, shape_b)))
    a, b = (x.to(device, torch.bfloat16) for x in (a, b))
    return quantize(a, pair[0], backend="reference"), quantize(b, pair[1], backend="reference")


def test_group_rows():
    groups, starts = group_rows(torch.tensor([130, 0, 1]))
    assert starts.tolist() == [0, 256, 256] and groups.dtype == torch.int32
    assert groups.tolist() == [0] * 130 + [-1] * 126 + [2] + [-1] * 127
    assert group_rows(torch.tensor([0]))[0].shape == (0,)
    with pytest.raises(InvalidInputError, match="negative"):
        group_rows(torch.tensor([-1]))
    with pytest.raises(InvalidInputError, match="less than"):  # refused before it is allocated
        group_rows(torch.tensor([2**31 - 1, 1]))


META = torch.zeros(2, dtype=torch.int64, device="meta")
NO_COUNTS = {
    "list": [1, 2],
    "0d": torch.tensor(3),
    "2d": torch.tensor([[1, 2]]),
    "floats": torch.tensor([1.5]),
    "nan": torch.tensor([float("nan")]),
    "bools": torch.tensor([True]),
    "sparse": torch.tensor([1, 2]).to_sparse(),
}


@pytest.mark.parametrize("counts", NO_COUNTS.values(), ids=NO_COUNTS.keys())
def test_what_is_no_count_of_rows(counts):
    for use in (lambda: group_rows(counts), lambda: group_room(counts, 128)):
        with pytest.raises((InvalidInputError, UnsupportedError), match="sizes|counts"):
            use()


@pytest.mark.parametrize("room", ["128", None, 128.0, True, [128], 0, 100], ids=repr)
def test_what_is_no_room(room):
    with pytest.raises(InvalidInputError, match="multiple of 128"):
        group_room(torch.tensor([1]), room)


def test_counts_that_can_be_read_are_within_the_room():
    for counts in (torch.tensor([129]), torch.tensor([-1]), torch.tensor([200], dtype=torch.uint8)):
        with pytest.raises(InvalidInputError, match="from 0 to room, 128"):
            group_room(counts, 128)
    assert group_room(META, 128).shape == (256,)  # as on a GPU nothing is read
    with pytest.raises(InvalidInputError, match="meta"):
        group_rows(META)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_groups_that_b_does_not_have(backend):
    a, b = operands((256, 32), (2, 8, 32), ("fp8", "fp8"), "cpu")
    groups = torch.tensor([1] * 128 + [2] * 128, dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=r"groups\[128\] is 2, and b has 2"):
        grouped_mm(a, b, groups, backend=backend)
    with pytest.raises(InvalidInputError, match="b has 2"):
        grouped_mm_reference(a, b, groups)
    groups[129:] = 7  # never read
    groups[128] = -5
    assert not grouped_mm(a, b, groups, backend=backend)[128:].any()


def test_group_room():
    groups = group_room(torch.tensor([0, 129, 256]), 256)
    assert groups.dtype == torch.int32
    assert groups.tolist() == [-1] * 256 + [1] * 256 + [2] * 256
    with pytest.raises(InvalidInputError, match="multiple of 128"):
        group_room(torch.tensor([1]), 64)


@pytest.mark.parametrize("pair", [("fp8", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_grouped_against_float64(pair, backend, device):
    a, b = operands((300, 144), (3, 128, 144), pair, device)
    groups = torch.tensor([2] * 128 + [-1] * 128 + [0] * 44, dtype=torch.int32, device=device)
    truth = grouped_mm_reference(a, b, groups)
    ruler = grouped_mm_reference(a, b, groups, dtype=torch.float32, out_dtype=torch.float32)
    out = grouped_mm(a, b, groups, out_dtype=torch.float32, backend=backend)
    assert_close_to_truth("out", out, truth, ruler, factor=4.0, floor=1e-5 * truth.abs().max().item())
    assert not out[128:256].any() and out[:128].any()
    nothing = quantize(torch.zeros(0, 144, device=device), pair[0], backend="reference")
    assert grouped_mm(nothing, b, groups[:0], backend=backend).shape == (0, 128)


@pytest.mark.parametrize("pair", [("fp8", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_bias_and_activation_of_experts(pair, backend, device):
    """Each expert has a bias of its own, and rows of no expert stay 0 whatever biases are."""
    a, b = operands((300, 144), (3, 128, 144), pair, device)
    bias = torch.randn(3, 128, generator=generator(5)).to(device)
    groups = torch.tensor([2] * 128 + [-1] * 128 + [0] * 44, dtype=torch.int32, device=device)
    sums = grouped_mm_reference(a, b, groups, bias=bias)
    assert torch.equal(sums[:128], grouped_mm_reference(a, b, groups)[:128] + bias[2].double())
    truth = activated(sums, "gelu")
    out = grouped_mm(a, b, groups, bias=bias, activation="gelu", backend=backend)
    assert_close_to_truth("out", out, truth, truth.to(torch.bfloat16), factor=4.0)
    plain = grouped_mm(a, b, groups, bias=bias, out_dtype=torch.float32, backend=backend)
    assert_close_to_truth("plain", plain, sums, sums.float(), factor=4.0, floor=1e-5 * sums.abs().max().item())
    assert not out[128:256].any() and not plain[128:256].any()
    empty = [
        quantize(torch.zeros(*shape, device=device), "fp8", backend="reference") for shape in ((300, 0), (3, 128, 0))
    ]
    with pytest.raises(InvalidInputError, match="at least one matrix"):  # rows of no group would read one
        grouped_mm(a, quantize(torch.zeros(0, *b.shape[1:], device=device), b.scheme), torch.full_like(groups, -1))
    nothing = grouped_mm(*empty, groups, bias=bias, out_dtype=torch.float32, backend=backend)
    assert torch.equal(nothing[:128], bias[2].expand(128, -1)) and not nothing[128:256].any()
    with pytest.raises(InvalidInputError, match="bias must be"):
        grouped_mm(a, b, groups, bias=bias[0], backend=backend)
    with pytest.raises(InvalidInputError, match="activation"):
        grouped_mm(a, b, groups, activation="tanh", backend=backend)
    with pytest.raises(UnsupportedError, match="bias wants one"):
        grouped_mm(a, b, groups, bias=bias.requires_grad_(), backend=backend)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_results_of_experts_in_fp8(backend, device):
    a, b = operands((256, 64), (2, 40, 64), ("fp8", "fp8"), device)
    groups = torch.tensor([1] * 128 + [-1] * 128, dtype=torch.int32, device=device)
    bias = torch.randn(2, 40, generator=generator(5)).to(device)
    truth = torch.relu(grouped_mm_reference(a, b, groups, bias=bias))
    scale, amax = (truth.abs().amax() / 100).float(), torch.zeros((), device=device)
    got = grouped_mm_fp8(a, b, groups, scale, bias=bias, activation="relu", amax=amax, backend=backend)
    error = (got.dequantize(torch.float64) - truth).abs()
    assert (error <= 1.01 * 2.0**-4 * truth.abs() + 2.0**-10 * scale.item()).all()
    assert amax.item() == pytest.approx(truth.abs().amax().item(), rel=1e-5)
    assert got.shape == (256, 40) and not got.dequantize()[128:].any()


def test_what_the_hopper_kernel_is_told(monkeypatch, device):
    a, b = operands((256, 256), (3, 256, 256), ("fp8_1x128", "fp8_128x128"), "cpu")
    monkeypatch.setattr(gemm_grouped.hopper_gemm, "chosen", lambda *_, **__: True)
    groups = torch.zeros(256, dtype=torch.int32)
    with recording() as launches:
        out = grouped_mm(a, b, groups)
    ((kernel, _, given, options),) = launches
    assert kernel.__name__ == "fp8_gemm_kernel" and out.shape == (256, 256) and options["GROUPED"] == 1
    m, n, k_steps, tiles_m, _, _, stack, *_ = given[12:]
    assert (m, n, k_steps, tiles_m, stack) == (256, 256, 2, 2, 2 * 2)  # two blocks of rows of two scales a matrix
    bias, amax = torch.ones(3, 256), torch.zeros(())
    with recording() as launches:
        grouped_mm_fp8(a, b, groups, torch.ones(()), bias=bias, activation="silu", amax=amax)
    ((_, _, given, options),) = launches
    assert given[4] is bias and given[6].data_ptr() == amax.data_ptr() and given[3].dtype == torch.float8_e4m3fn
    assert options["BIAS"] and options["LARGEST"] and options["SCALE_OUT"] and options["GROUPED"] == 1


@pytest.mark.parametrize("pair", [("fp8", "fp8_row"), ("fp8_1x128", "fp8_1x128")], ids="-".join)
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_grouped_along_k_against_float64(pair, backend, device):
    a, b = operands((40, 384), (24, 384), pair, device)
    ends = group_ends(torch.tensor([100, 0, 129], device=device))
    assert ends.tolist() == [128, 128, 384] and ends.dtype == torch.int32
    for wrong in ([-1, 2], [2**31 - 127]):
        with pytest.raises(InvalidInputError, match="sizes must be"):
            group_ends(torch.tensor(wrong))
    truth = k_grouped_mm_reference(a, b, ends)
    ruler = k_grouped_mm_reference(a, b, ends, dtype=torch.float32, out_dtype=torch.float32)
    out = k_grouped_mm(a, b, ends, out_dtype=torch.float32, backend=backend)
    assert out.shape == (3, 40, 24) and not out[1].any()
    assert_close_to_truth("out", out, truth, ruler, factor=4.0, floor=1e-5 * truth.abs().max().item())
    first = k_grouped_mm(a, b, ends[:1], out_dtype=torch.float32, backend=backend)
    assert torch.equal(first[0], out[0])  # rows behind the last group belong to nobody


def test_what_the_hopper_kernel_is_told_along_k(monkeypatch):
    a, b = operands((256, 512), (384, 512), ("fp8_1x128", "fp8_1x128"), "cpu")
    monkeypatch.setattr(gemm_grouped.hopper_gemm, "chosen", lambda *_, **__: True)
    with recording() as launches:
        out = k_grouped_mm(a, b, torch.tensor([256, 256, 512], dtype=torch.int32))
    ((kernel, _, given, options),) = launches
    assert kernel.__name__ == "fp8_gemm_kernel" and out.shape == (3, 256, 384) and options["GROUPED"] == 2
    assert given[7].tolist() == [0, 2, 2, 4]
    m, n, k_steps, tiles_m, _, _, stack, *_ = given[12:]
    assert (m, n, k_steps, tiles_m, stack) == (3 * 256, 384, 4, 6, 256)


def test_what_has_no_product_along_k():
    a, b = operands((40, 256), (24, 256), ("fp8", "fp8"), "cpu")
    ends = torch.tensor([128, 256], dtype=torch.int32)
    for wrong in (ends.long(), ends[:0], ends[None], [128, 256]):
        with pytest.raises(InvalidInputError, match="ends must be"):
            k_grouped_mm(a, b, wrong)
    for wrong in ([256, 128], [128, 384], [100], [-128]):
        with pytest.raises(InvalidInputError, match="multiples of 128"):
            k_grouped_mm(a, b, torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(InvalidInputError, match=r"b \(K, M\)"):
        k_grouped_mm(a, quantize(torch.zeros(24, 128), "fp8"), ends)
    with pytest.raises(UnsupportedError, match="along K"):
        k_grouped_mm(*operands((40, 256), (24, 256), ("fp8_1x128", "fp8_128x128"), "cpu"), ends)
    with pytest.raises(UnsupportedError, match="multiple of 128"):
        k_grouped_mm(a, b, ends, backend="hopper")


def test_grouped_refusals(device):
    a, b = operands((128, 64), (2, 72, 64), ("fp8", "fp8"), device)
    groups = torch.zeros(128, dtype=torch.int32, device=device)
    with pytest.raises(InvalidInputError, match="int32"):
        grouped_mm(a, b, groups.long())
    with pytest.raises(InvalidInputError, match=r"b \(G, N, K\)"):
        grouped_mm(a, quantize(torch.zeros(72, 64, device=device), "fp8"), groups)
    with pytest.raises(UnsupportedError, match="multiple of 128"):
        grouped_mm(*operands((128, 64), (2, 72, 64), ("fp8_1x128", "fp8_128x128"), device), groups)
    with pytest.raises(UnsupportedError, match="grouped products"):
        grouped_mm(*operands((128, 64), (2, 72, 64), ("mxfp8", "mxfp8"), device), groups)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_activation_and_accumulation(backend, device):
    a, b = operands((7, 40), (20, 40), ("fp8_row", "fp8_row"), device)
    bias = torch.randn(20, generator=generator(9)).to(device)
    truth = activated(scaled_mm_reference(a, b, bias=bias), "gelu")
    out = scaled_mm(a, b, bias=bias, activation="gelu", backend=backend)
    assert_close_to_truth("out", out, truth, truth.to(torch.bfloat16), factor=4.0)
    before = torch.ones(7, 20, device=device)
    into = before.clone()
    assert scaled_mm(a, b, accumulate_into=into, backend=backend) is into
    wanted = scaled_mm_reference(a, b) + before.double()
    assert_close_to_truth("into", into, wanted, wanted.float(), factor=4.0, floor=1e-5)
    with pytest.raises(InvalidInputError, match="activation"):
        scaled_mm(a, b, activation="tanh")
    with pytest.raises(InvalidInputError, match="float32"):
        scaled_mm(a, b, accumulate_into=before.bfloat16())
    with pytest.raises(InvalidInputError, match="contiguous"):
        scaled_mm(a, b, accumulate_into=torch.zeros(20, 7, device=device).t())


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_results_in_fp8(element, device):
    a, b = operands((7, 40), (20, 40), ("fp8", "fp8"), device)
    truth = torch.relu(scaled_mm_reference(a, b))
    scale, amax = (truth.abs().amax() / 100).float(), torch.full((), 1e-3, device=device)
    got = scaled_mm_fp8(a, b, scale, element=element, activation="relu", amax=amax, backend="reference")
    assert got.scheme.text == quantize(torch.zeros(1, 1), "fp8" if element == "e4m3" else "fp8_e5m2").scheme.text
    step = 2.0**-4 if element == "e4m3" else 2.0**-3
    error = (got.dequantize(torch.float64) - truth).abs()
    assert (error <= 1.01 * step * truth.abs() + 2.0**-10 * scale.item()).all()
    assert amax.item() == pytest.approx(truth.abs().amax().item(), rel=1e-5)
    tight = scaled_mm_fp8(a, b, scale / 1000, activation="relu", backend="reference")
    assert tight.dequantize().abs().amax().item() == pytest.approx(448 * scale.item() / 1000, rel=1e-2)
    with pytest.raises(InvalidInputError, match="element"):
        scaled_mm_fp8(a, b, scale, element="e2m1")
    with pytest.raises(InvalidInputError, match="scale must be one float32"):
        scaled_mm_fp8(a, b, scale.double())


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_results_in_fp8_keep_their_meaning(backend):
    """Delayed scaling rolls its scale and maximum in place, step after step."""
    a, b = operands((3, 32), (5, 32), ("fp8", "fp8"), "cpu")
    for shape in ((), (1,), (1, 1, 1)):
        scale, amax = torch.full(shape, 0.25), torch.zeros(shape)
        got = scaled_mm_fp8(a, b, scale, amax=amax, backend=backend)
        meant, largest = got.dequantize(), amax.clone()
        scale.fill_(7.0), amax.fill_(-1.0)
        assert torch.equal(got.dequantize(), meant) and got.seen_amax.shape == ()
        assert got.seen_amax.item() == largest.item() > 0


@pytest.mark.parametrize(
    "shape_a, n", [((3, 32), 0), ((0, 32), 5), ((2, 3, 32), 0), ((2, 0, 32), 5), ((3, 0), 5)], ids=str
)
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_results_in_fp8_of_nothing(backend, shape_a, n):
    a, b = operands(shape_a, (n, shape_a[-1]), ("fp8", "fp8"), "cpu")
    amax = torch.zeros(())
    got = scaled_mm_fp8(a, b, torch.tensor(0.5), amax=amax, backend=backend)
    assert got.dequantize().shape == (*shape_a[:-1], n) and not got.dequantize().any() and amax == 0


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_what_is_written_may_not_want_a_gradient(backend):
    a, b = operands((3, 32), (5, 32), ("fp8", "fp8"), "cpu")
    into, amax = torch.zeros(3, 5, requires_grad=True), torch.zeros((), requires_grad=True)
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(UnsupportedError, match="accumulate_into wants one"):
        scaled_mm(a, b, accumulate_into=into, backend=backend)
    with pytest.raises(UnsupportedError, match="scale, amax wants one"):
        scaled_mm_fp8(a, b, scale, amax=amax, backend=backend)
    with torch.no_grad():
        assert scaled_mm(a, b, accumulate_into=into, backend=backend) is into and into.any()
        assert not scaled_mm_fp8(a, b, scale, amax=amax, backend=backend).scales.requires_grad and amax > 0
