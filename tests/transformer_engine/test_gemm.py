"""Products of quantised matrices against float64 on the same codes, for every pair and shapes that no tile divides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.launch import recording
from gpu_accel.testing import assert_close_to_truth, generator, poison_like
from gpu_accel.transformer_engine.gemm import _bytes, explain_mm, fp4_gemm, fp8_gemm, scaled_mm, scaled_mm_op
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import hopper_fp8_sum, scaled_mm_reference

PAIRS = [
    ("fp8", "fp8"),
    ("fp8_row", "fp8_row"),
    ("fp8_row", "fp8"),
    ("fp8_e5m2", "fp8"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"),
    ("e5m2:1x128:pow2", "fp8_128x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp8_e5m2", "mxfp4"),
    ("mxfp6_e2m3", "mxfp6_e3m2"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_16x16"),
]
SHAPES = {
    "one-tile": (64, 128, 128),
    "ragged": (37, 150, 289),  # no dimension divides a tile; K has an odd tail
    "two-tiles": (130, 40, 64),
    "one": (1, 1, 1),
}


def operands(m, n, k, pair, device, seed=0):
    a = torch.randn(m, k, generator=generator(seed)) * 2
    b = torch.randn(n, k, generator=generator(seed + 1)) / 8
    return (quantize(x.to(device, torch.bfloat16), name) for x, name in zip((a, b), pair, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_against_float64(pair, shape, device):
    m, n, k = SHAPES[shape]
    a, b = operands(m, n, k, pair, device)
    poison_like(torch.empty(m, n, device=device))
    truth = scaled_mm_reference(a, b)
    out = scaled_mm(a, b, out_dtype=torch.float32, backend="portable")
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32)
    # the kernel multiplies scales in after the sums, float32 torch before them: both round a few times
    floor = 16 * torch.finfo(torch.float32).eps * truth.abs().max().item() + 1e-7 * math.sqrt(k)
    assert_close_to_truth("out", out, truth, yardstick, factor=4.0, floor=floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("pair", [("fp8_row", "fp8_row"), ("nvfp4", "nvfp4")], ids="-".join)
def test_bias_batches_and_narrow_results(pair, dtype, device):
    a, b = operands(12, 20, 96, pair, device)
    bias = torch.randn(20, generator=generator(5)).to(device, dtype)
    truth = scaled_mm_reference(a, b, bias=bias)
    out = scaled_mm(a.view(3, 4, 96), b, bias=bias, out_dtype=dtype)
    assert out.shape == (3, 4, 20)
    assert_close_to_truth("out", out.view(12, 20), truth, truth.to(dtype))


@pytest.mark.parametrize(
    "pair", [("fp8", "fp8"), ("fp8_1x128", "fp8_128x128"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")], ids="-".join
)
@pytest.mark.parametrize("shape", [(0, 8, 32), (8, 0, 32), (8, 8, 0)], ids=str)
def test_nothing(pair, shape, device):
    m, n, k = shape
    a, b = operands(m, n, k, pair, device)
    bias = torch.ones(n, device=device)
    out = scaled_mm(a, b, bias=bias, backend="portable")
    assert out.shape == (m, n) and bool((out == 1).all())


@pytest.mark.parametrize(
    "pair",
    [
        ("fp8_row", "fp8_row"), ("fp8_e5m2", "fp8"), ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"),
        ("mxfp8_e5m2", "mxfp8"), ("nvfp4", "nvfp4"),
    ],
    ids="-".join,
)  # fmt: skip
def test_nan_reaches_the_rows_it_belongs_to(pair, device):
    x = torch.randn(40, 160, generator=generator(0))
    x[7, 33] = float("nan")
    a = quantize(x.to(device), pair[0])
    b = quantize(torch.randn(24, 160, generator=generator(1)).to(device), pair[1])
    out = scaled_mm(a, b, backend="portable")
    assert out[7].isnan().all() and out.isnan().sum() == 24


def test_sums_do_not_lose_bits_over_a_long_k(device):
    """Hopper's fp8 products keep about 14 bits of a sum: a long K shows it, sums every 128 do not."""
    k = 1 << (15 if device == "cuda" else 11)
    a = quantize(torch.ones(16, k, device=device), "fp8")
    b = quantize(torch.ones(16, k, device=device) / 3, "fp8")
    out = scaled_mm(a, b, out_dtype=torch.float32)
    truth = scaled_mm_reference(a, b)
    assert ((out.double() - truth) / truth).abs().max() < 1e-5


def test_named_products_quantise_what_is_not(device):
    a = torch.randn(32, 128, generator=generator(0)).to(device, torch.bfloat16)
    b = torch.randn(48, 128, generator=generator(1)).to(device, torch.bfloat16)
    truth = a.double() @ b.double().t()
    for product, bound in ((fp8_gemm, 0.05), (fp4_gemm, 0.2)):
        out = product(a, b)
        assert (out.double() - truth).norm() / truth.norm() < bound
        assert torch.equal(out, product(quantize(a, "fp8_row" if product is fp8_gemm else "nvfp4"), b))


def test_explanations_say_what_is_emulated():
    x = torch.ones(4, 128)
    assert "emulated" in explain_mm(quantize(x, "nvfp4"), quantize(x, "nvfp4"))
    assert "emulated" not in explain_mm(quantize(x, "fp8"), quantize(x, "fp8_row"))


@pytest.mark.parametrize(
    ("pair", "error"),
    [
        (("fp8", "fp8_1x128"), UnsupportedError),
        (("fp8", "mxfp8"), UnsupportedError),
        (("mxfp4", "nvfp4"), UnsupportedError),
        (("int8", "int8"), UnsupportedError),
        (("int4_32", "int4_32"), UnsupportedError),
        (("e2m1:1x16:nvfp4:hadamard16", "nvfp4"), UnsupportedError),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else "",
)
def test_pairs_that_do_not_belong_together(pair, error):
    x = torch.ones(4, 128)
    with pytest.raises(error):
        scaled_mm(*(quantize(x, name) for name in pair))


def test_refusals():
    a, b = quantize(torch.ones(4, 32), "fp8"), quantize(torch.ones(6, 64), "fp8")
    with pytest.raises(InvalidInputError, match=r"\(N, K\)"):
        scaled_mm(a, b)
    with pytest.raises(InvalidInputError, match="bias"):
        scaled_mm(a, a, bias=torch.ones(3))
    with pytest.raises(InvalidInputError, match="out_dtype"):
        scaled_mm(a, a, out_dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="rowwise"):
        scaled_mm(quantize(torch.ones(4, 32), "fp8", rowwise=False, columnwise=True), a)
    with pytest.raises(UnsupportedError, match="fp4_gemm"):
        fp8_gemm(quantize(torch.ones(4, 32), "nvfp4"), torch.ones(4, 32))
    with pytest.raises(UnsupportedError, match="fp8_gemm"):
        fp4_gemm(a, torch.ones(4, 32))


@pytest.mark.parametrize("pair", [("fp8_row", "fp8_row"), ("nvfp4", "nvfp4")], ids="-".join)
def test_the_op_is_one_that_torch_knows(pair, device):
    a, b = operands(20, 24, 96, pair, device)
    arguments = (*_bytes(a), *_bytes(b), None, torch.bfloat16, a.scheme.text, b.scheme.text, 96, False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gpu_accel.te_scaled_mm, arguments, test_utils=tests)


@pytest.mark.parametrize("product", [fp8_gemm, fp4_gemm])
def test_gradients_are_refused_not_dropped(product, device):
    a, b = torch.randn(16, 32, device=device, requires_grad=True), torch.randn(16, 32, device=device)
    with pytest.raises(UnsupportedError, match="no gradient"):
        product(a, b)
    with torch.no_grad():
        assert product(a, b).shape == (16, 16)


def test_a_bias_that_wants_a_gradient_is_refused(device):
    a, b = operands(4, 8, 32, ("fp8_row", "fp8_row"), device)
    bias = torch.ones(8, device=device, requires_grad=True)
    for backend in ("portable", "reference"):
        with pytest.raises(UnsupportedError, match="bias wants one"):
            scaled_mm(a, b, bias=bias, backend=backend)
        with torch.no_grad():
            out = scaled_mm(a, b, bias=bias, backend=backend)
        assert torch.equal(out, scaled_mm(a, b, bias=bias.detach(), backend=backend))
    with pytest.raises(UnsupportedError, match="bias wants one"):
        fp8_gemm(a, b, bias=bias)


def test_blackwell_by_name_only(device):
    """What its units do not multiply is refused, and so is any other GPU."""
    for pair, why in (
        (("fp8", "fp8"), "has no kernel there"),
        (("mxfp6_e2m3", "mxfp8"), "has no kernel there"),
        (("mxfp8", "mxfp4"), "needs compute capability 10.0"),
        (("nvfp4", "nvfp4_16x16"), "needs compute capability 10.0"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            scaled_mm(*operands(4, 8, 32, pair, device), backend="blackwell")
    with pytest.raises(UnsupportedError, match="needs compute capability 10.0"):
        fp4_gemm(*(torch.randn(4, 32, device=device) for _ in range(2)), backend="blackwell")


@pytest.mark.parametrize(("pair", "bk"), [(("mxfp8", "mxfp4"), 128), (("nvfp4", "nvfp4_16x16"), 256)])
def test_what_blackwell_is_given(pair, bk):
    """Codes and scales as they are, formats by their elements, rows that share a scale."""
    a, b = operands(20, 24, 512, pair, "cpu")
    with recording() as launches:
        out = scaled_mm_op(*_bytes(a), *_bytes(b), None, torch.float32, a.scheme.text, b.scheme.text, 512, True)
    ((kernel, programs, given, options),) = launches
    assert kernel.__name__ == "_native_kernel" and programs == 1 and out.shape == (20, 24)
    assert (options["A_FORMAT"], options["B_FORMAT"]) == (a.scheme.element, b.scheme.element)
    assert options["BK"] == bk and options["EVEN"] and options["ROWS_B"] == b.scheme.block[0]
    assert given[0] is _bytes(a)[0] or torch.equal(given[0], _bytes(a)[0])
    assert given[-5:] == (_bytes(a)[0].shape[1], _bytes(b)[0].shape[1], _bytes(a)[1].shape[1], 1, 1)


def test_model_of_the_sums_of_a_tensor_core():
    """Exact with many bits; with 13 the loss grows with what stays inside."""
    a, b = (quantize(torch.rand(4, 4096, generator=generator(s)), "fp8", backend="reference") for s in (0, 1))
    x, y = a.codes.float(), b.codes.float()
    truth = x.double() @ y.double().t()
    exact = hopper_fp8_sum(x, y, every=4096, fraction_bits=40)
    torch.testing.assert_close(exact, truth, rtol=2**-24, atol=0)  # float32, as what leaves a GPU
    lost = [((truth - hopper_fp8_sum(x, y, every=n)) / truth).max().item() for n in (32, 128, 4096)]
    assert 0 < lost[0] < 5e-5 < lost[1] < 1e-3 < 0.02 < lost[2] < 0.2, lost
    assert hopper_fp8_sum(x[:, :0], y[:, :0]).abs().max() == 0
    assert torch.equal(hopper_fp8_sum(-x, y), -hopper_fp8_sum(x, y))  # what is cut off is cut off towards zero


def test_the_model_has_the_bits_of_a_gpu():
    """Sums that an H200 gave, those that leave the tensor core every 128 of K and those of cuBLAS that never do."""
    given = json.loads(Path(__file__).with_name("fp8_sums_h200.json").read_text())
    for one in given["sets"]:
        a, b = (
            torch.tensor([list(bytes.fromhex(row)) for row in one[side]], dtype=torch.uint8)
            .view(getattr(torch, one["dtype"]))
            .float()
            for side in ("a", "b")
        )
        for name, every in (("sums", 128), ("fast", 1 << 20)):
            if name in one:
                sums = [[float.fromhex(x) for x in row] for row in one[name]]
                assert hopper_fp8_sum(a, b, every=every).tolist() == sums, (one["dtype"], name)
