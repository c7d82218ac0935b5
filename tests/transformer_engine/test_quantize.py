"""`quantize`: kernel and reference give the same bits for every scheme, shape, stride and copy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.launch import recording
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import quantize_launch
from gpu_accel.transformer_engine import quantizer as module
from gpu_accel.transformer_engine.quantize_launch import PLAIN, Source
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import SCHEMES, Scheme, scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

MORE = [
    "e4m3:0x0:fp32:stochastic",
    "e5m2:1x128:pow2",
    "e4m3:128x128:pow2",
    "e2m1:1x32:e8m0:even",
    "e5m2:1x32:e8m0:floor:stochastic",
    "e2m1:1x16:nvfp4:stochastic",
    "e2m1:1x16:nvfp4:hadamard16",
    "e2m1:1x16:nvfp4:stochastic:hadamard16",
    "e3m2:1x32:fp32",
]
COPIES = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def make(shape, *, dtype=torch.bfloat16, device="cpu", seed=0, special=True) -> torch.Tensor:
    """Normal values with a zero row, NaN, Inf and tiny values where there is room for them."""
    x = torch.randn(shape, generator=generator(seed)) * 3
    if special and x.dim() == 2 and x.shape[0] > 4 and x.shape[1] > 5:
        x[1] = 0
        x[2, 3], x[3, 5], x[0, 0], x[4] = float("nan"), float("-inf"), 1e-38, x[4] * 1e30
    return x.to(device, dtype)


def assert_same_bits(one: QuantizedTensor, other: QuantizedTensor) -> None:
    assert one.shape == other.shape and one.dtype == other.dtype and one.scheme == other.scheme
    for name, mine in one._inner.items():
        theirs = other._inner[name]
        assert (mine is None) == (theirs is None), name
        if mine is None:
            continue
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, name
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            wrong = mine.view(torch.uint8) != theirs.view(torch.uint8)
            assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} bytes differ"


def both(x, name, **options):
    options.setdefault("seed", 11 if scheme(name).rounding == "stochastic" else None)
    return (quantize(x, name, backend=backend, **options) for backend in ("portable", "reference"))


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("name", [*SCHEMES, *MORE])
def test_kernel_and_reference_agree(name, copies, device):
    # ragged in both directions, wider than a tile of 1x128 blocks; one block; a single value
    shapes = [(48, 32)] if "hadamard" in name else [(37, 161), (1, 1)]
    for shape in shapes:
        row, col = COPIES[copies]
        assert_same_bits(*both(make(shape, device=device), name, rowwise=row, columnwise=col))


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "mxfp8", "nvfp4", "fp8_128x128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_dtypes(name, dtype, device):
    assert_same_bits(*both(make((9, 70), dtype=dtype, device=device), name, columnwise=True))


STRIDES = {
    "transposed": lambda d: make((70, 9), device=d).t(),
    "sliced": lambda d: make((9, 140), device=d)[:, ::2],
    "odd-start": lambda d: make((9, 71), device=d)[:, 1:],
    "broadcast-rows": lambda d: make((1, 70), device=d).expand(9, 70),
    "broadcast-columns": lambda d: make((9, 1), device=d).expand(9, 70),
    "flipped-batches": lambda d: make((2, 3, 70), device=d).transpose(0, 1),
    "four-dims": lambda d: make((2, 3, 2, 33), device=d),
    "vector": lambda d: make((70,), device=d),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides, device):
    """bitsandbytes#57: a strided tensor broke blockwise quantisation without a message."""
    x = STRIDES[strides](device)
    for name in ("fp8_row", "mxfp4"):
        out, reference = both(x, name, columnwise=True)
        assert_same_bits(out, reference)
        assert_same_bits(out, quantize(x.contiguous(), name, columnwise=True, backend="reference"))
        assert out.shape == x.shape


def test_strides_that_no_kernel_takes_are_refused(device):
    x = make((3, 4, 5, 16), device=device).permute(2, 0, 1, 3)
    assert quantize(x, "mxfp8").shape == x.shape  # two strides
    with pytest.raises(InvalidInputError, match="contiguous"):
        quantize(make((3, 4, 5, 16), device=device).permute(2, 1, 0, 3), "mxfp8")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0), (2, 0, 16)], ids=str)
def test_nothing_to_quantise(name, shape, device):
    out, reference = both(make(shape, device=device), name, columnwise=True)
    assert_same_bits(out, reference)
    assert out.dequantize().shape == torch.Size(shape)


def test_rows_longer_than_a_tile(device):
    x = make((2, module.LONGEST_ROW + 3), device=device, special=False)
    assert_same_bits(*both(x, "fp8_row"))
    assert_same_bits(*both(x, "int8_row"))


@pytest.mark.parametrize("name", ["fp8_row", "fp8_1x128", "mxfp8", "nvfp4", "mxfp4", "int4_32"])
def test_the_column_copy_is_the_row_copy_of_the_transpose(name, device):
    x = make((64, 96), device=device, special=False)
    both_copies = quantize(x, name, columnwise=True)
    turned = quantize(x.t().contiguous(), name)
    assert torch.equal(both_copies.col_codes.view(torch.uint8), turned.codes.view(torch.uint8))
    assert torch.equal(both_copies.col_scales.float(), turned.scales.float())
    assert torch.equal(both_copies.dequantize_columns(), turned.dequantize())


@pytest.mark.parametrize("name", ["fp8", "fp8_128x128", "nvfp4_16x16"])
def test_square_blocks_round_alike_in_both_directions(name, device):
    q = quantize(make((160, 144), device=device, special=False), name, columnwise=True)
    assert torch.equal(q.dequantize_columns(), q.dequantize().t())


# -- how good it is


@pytest.mark.parametrize(
    ("name", "bound"),
    # half a step at the bottom of a binade, relative to it: 2**-(m + 1); fp4 below 1 has steps of half
    [
        ("fp8_1x128", 2.0**-4),
        ("mxfp8", 2.0**-4),
        ("mxfp8_e5m2", 2.0**-3),
        ("mxfp6_e2m3", 2.0**-4),
        ("mxfp6_e3m2", 2.0**-3),
    ],
)
def test_relative_error_of_large_values(name, bound):
    x = torch.rand(32, 256) + 1  # within one binade, so all are normal numbers in every format
    y = quantize(x, name, backend="reference").dequantize()
    assert ((y - x).abs() / x).max() <= bound


def test_finer_schemes_are_better_on_outliers():
    x = torch.randn(128, 1024, generator=generator(1))
    x[:, ::256] *= 1000
    error = {
        name: ((quantize(x, name, backend="reference").dequantize() - x).square().mean() / x.square().mean())
        .sqrt()
        .item()
        for name in ("fp8", "fp8_1x128", "mxfp8", "int8", "int8_row", "int4_32", "mxfp4", "nvfp4")
    }
    assert error["nvfp4"] < error["mxfp4"]
    assert error["fp8_1x128"] <= error["fp8"] * 1.05
    assert error["mxfp8"] < error["mxfp4"] / 2


def test_the_hadamard_matrix_spreads_an_outlier():
    """Many values of one size and one large one per block: rotated, the block's scale follows the many."""
    x = torch.where(torch.rand(256, 256, generator=generator(2)) < 0.5, -0.4, 0.4)
    x[:, ::16] = 6.0
    plain, turned = (
        (quantize(x, name, backend="reference").dequantize() - x).square().mean().sqrt()
        for name in ("nvfp4", "e2m1:1x16:nvfp4:hadamard16")
    )
    assert turned < 2 * plain  # it is orthogonal: errors stay of the same order, and are spread evenly
    y = quantize(x, "e2m1:1x16:nvfp4:hadamard16", backend="reference").dequantize()
    small = (y - x)[:, 1:16].abs().mean()
    assert small < 1.0


def test_stochastic_rounding_averages_to_the_input():
    x = torch.randn(8, 64, generator=generator(3))
    what = scheme("mxfp4").with_(rounding="stochastic")
    mean = torch.stack([quantize(x, what, seed=s, backend="reference").dequantize() for s in range(400)]).mean(0)
    nearest = quantize(x, "mxfp4", backend="reference").dequantize()
    assert (mean - x).abs().mean() < 0.2 * (nearest - x).abs().mean()


# -- delayed scaling


def test_a_given_scale_is_used_and_the_maximum_is_reported(device):
    x = make((37, 161), device=device, special=False)
    scale = torch.tensor(0.01, device=device)
    out, reference = both(x, "fp8", scale=scale, columnwise=True)
    assert_same_bits(out, reference)
    assert out.scales.item() == scale.item()
    assert out.seen_amax.item() == x.float().abs().max().item()
    assert out.dequantize().float().abs().max() == pytest.approx(4.48, rel=1e-2)  # saturated


def test_a_given_scale_reports_what_is_not_finite(device):
    x = make((9, 70), device=device)
    out, reference = both(x, "fp8", scale=torch.tensor(1.0))
    assert_same_bits(out, reference)
    assert out.seen_amax.isnan()
    assert out.dequantize()[2, 3].isnan() and out.dequantize()[3, 5].isnan()


# -- the tool that compiles


def test_compile_sees_through_it():
    x = make((16, 64), special=False)

    def f(x):
        q = torch.ops.gpu_accel.te_quantize(x * 2, "mxfp8", True, False, 0, None)
        return q[0].float().sum() + q[1].float().sum()

    with torch.device("cpu"):
        assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "int4_32"])
def test_opcheck(name):
    x = make((16, 64), special=False)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.gpu_accel.te_quantize, (x, scheme(name).text, True, True, 0, None), test_utils=tests
    )


# -- schemes and refusals


@pytest.mark.parametrize("name", [*SCHEMES, *MORE])
def test_schemes_survive_as_text(name):
    assert scheme(scheme(name).text) == scheme(name)
    assert str(scheme(name)) in (name, scheme(name).text)


def test_bits_per_value():
    bits = {name: scheme(name).bits_per_value for name in ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "fp8_1x128", "fp8")}
    assert bits == {"mxfp8": 8.25, "mxfp6_e2m3": 6.25, "mxfp4": 4.25, "nvfp4": 4.5, "fp8_1x128": 8.25, "fp8": 8.0}


@pytest.mark.parametrize(
    "options",
    [
        dict(element="e9m9", block=(1, 32), scale="fp32"),
        dict(element="e4m3", block=(1, 31), scale="fp32"),
        dict(element="e4m3", block=(32, 1), scale="fp32"),
        dict(element="e4m3", block=(32, 64), scale="fp32"),
        dict(element="e4m3", block=(1, 32), scale="bf16"),
        dict(element="e4m3", block=(1, 16), scale="nvfp4"),
        dict(element="e4m3", block=(0, 0), scale="e8m0"),
        dict(element="int8", block=(1, 32), scale="e8m0"),
        dict(element="e4m3", block=(1, 32), scale="fp32", rule="floor"),
        dict(element="int4", block=(1, 32), scale="fp32", rounding="stochastic"),
        dict(element="e4m3", block=(1, 32), scale="fp32", hadamard=16),
    ],
)
def test_impossible_schemes(options):
    with pytest.raises(InvalidInputError):
        Scheme(**options)


@pytest.mark.parametrize(
    ("x", "options", "error"),
    [
        (torch.ones(4, 4, dtype=torch.int32), {}, InvalidInputError),
        (torch.ones(4, 4, dtype=torch.float64), {}, InvalidInputError),
        (torch.ones(()), {}, InvalidInputError),
        ([1.0], {}, InvalidInputError),
        (torch.ones(4, 4), dict(rowwise=False), InvalidInputError),
        (torch.ones(4, 4), dict(seed=1), InvalidInputError),
        (torch.ones(4, 4), dict(scheme="mxfp8:stochastic"), InvalidInputError),
        (torch.ones(4, 4), dict(scheme="e4m3:0x0:fp32:stochastic"), InvalidInputError),
        (torch.ones(4, 4), dict(scheme="mxfp8", scale=torch.ones(())), InvalidInputError),
        (torch.ones(4, 4), dict(scheme="int8", scale=torch.ones(())), InvalidInputError),
        (torch.ones(4, 4), dict(scheme="fp8", scale=torch.ones(2)), InvalidInputError),
        (torch.ones(4, 20), dict(scheme="e2m1:1x16:nvfp4:hadamard16"), InvalidInputError),
        (torch.ones(4, 4), dict(backend="fast"), InvalidInputError),
        (torch.ones(4, 4).to_sparse(), {}, InvalidInputError),
    ],
)
def test_refusals(x, options, error):
    with pytest.raises(error):
        quantize(x, **options)


def test_the_kernel_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(module, "INTERPRET", False)
    x = torch.ones(4, 32)
    with pytest.raises(HardwareError):
        quantize(x, backend="portable")
    assert_same_bits(quantize(x, backend="auto"), quantize(x, backend="reference"))


def test_what_is_quantised_is_not_quantised_again():
    with pytest.raises(InvalidInputError, match="already"):
        quantize(quantize(torch.ones(4, 32)))


def test_the_attention_rooms_quantiser_has_the_same_bits():
    """fp8_block_quantize: blocks of 128 rows of a head are 1 x (128 * dim) here only as one row; one block then."""
    from gpu_accel.flash_attention3 import fp8_block_quantize

    x = torch.randn(1, 1, 128, 64, generator=generator(4))
    theirs = fp8_block_quantize(x, 128, backend="reference")
    ours = quantize(x[0, 0], "fp8", backend="reference")
    values, scale = (theirs.values, theirs.scales) if hasattr(theirs, "values") else theirs[:2]
    assert torch.equal(values.view(torch.uint8)[0, 0], ours.codes.view(torch.uint8))
    assert scale.flatten().tolist() == ours.scales.flatten().tolist()


def test_nvfp4_rounds_without_bias_what_its_scales_do_not_clip():
    """Scales of blocks are rounded to nearest, so some of the largest values lie beyond 6 times theirs, by 1/16."""
    x = torch.rand(512, 512, generator=generator(0)) - 0.5
    copies = [
        quantize(x, scheme("nvfp4").with_(rounding="stochastic"), seed=seed, backend="reference") for seed in range(8)
    ]
    sizes = copies[0].scales.float().repeat_interleave(16, 1).double() * copies[0].tensor_scale.double()
    beyond = x.double().abs() / (6 * sizes)
    error = (sum(q.dequantize().double() for q in copies) / 8 - x.double()) * x.sign()
    kept = error[beyond <= 1]
    assert abs(kept.mean()) <= 5 * kept.std() / len(kept) ** 0.5
    assert 1.01 < beyond.max() <= 1 + 1 / 16 and (error[beyond > 1.01] < 0).all()


@pytest.mark.parametrize("shape", [(64, 128), (65, 130), (1, 300), (0, 4)], ids=str)
def test_codes_turned_round(shape, device):
    codes = torch.randint(0, 256, shape, generator=generator(0)).to(device, torch.uint8)
    turned = quantize_launch.turned_codes(codes)
    assert torch.equal(turned, codes.t()) and turned.is_contiguous()


def test_what_is_turned_in_registers(monkeypatch):
    """Whole tiles of bf16 in the forms that were faster so on a GPU; nothing else, for no mask stops a read there."""
    monkeypatch.setattr(quantize_launch, "machine_refusal", lambda _: None)
    monkeypatch.setattr(quantize_launch, "MX_CHECKED", False)

    def takes(name="fp8", shape=(256, 384), known=True, dtype=torch.bfloat16, source=PLAIN, at=0, view=lambda x: x):
        x = view(torch.empty(*shape, dtype=dtype))
        on_gpu = SimpleNamespace(is_cuda=True, dtype=dtype, data_ptr=lambda: at)
        return quantize_launch.takes_turn(on_gpu, scheme(name), quantize_launch.as_matrix(x), source, known)

    assert takes() and takes("fp8_e5m2") and takes("fp8_1x128", known=False) and takes("e4m3:1x128:pow2", known=False)
    assert takes(shape=(2, 128, 384)) and takes(shape=(256, 512), view=lambda x: x[:, 8:392])
    assert not any(takes(name) for name in ("mxfp8", "fp8_row", "fp8_128x128", "e4m3:1x128:fp32:stochastic", "int8"))
    for seen_on_a_gpu in (False, True):
        monkeypatch.setattr(quantize_launch, "SQUARE_CHECKED", seen_on_a_gpu)
        monkeypatch.setattr(quantize_launch, "MX_CHECKED", seen_on_a_gpu)
        assert takes("fp8_128x128", known=False) is seen_on_a_gpu
        assert takes("mxfp8", known=False) is takes("mxfp8_e5m2", known=False) is seen_on_a_gpu
        assert not takes("mxfp4", known=False) and not takes("mxfp8", known=False, shape=(192, 384))
    assert not takes(known=False) and not takes(source=Source("silu")) and not takes(dtype=torch.float16)
    assert not takes(shape=(192, 384)) and not takes(shape=(256, 192)) and not takes(at=8)
    assert not takes(shape=(384, 256), view=torch.Tensor.t)
    assert not takes(shape=(256, 388), view=lambda x: x[:, :384])  # rows start at multiples of 8 bytes
    assert not takes(shape=(2, 256, 384), view=lambda x: x[:, :128])  # two strides for rows


@pytest.mark.parametrize("name", ["fp8", "fp8_1x128", "fp8_128x128"])
def test_launch_of_the_kernel_that_turns_in_registers(name, monkeypatch):
    """Words of two values, rows apart as in memory, whatever the strides of dimensions of size 1."""
    monkeypatch.setattr(quantize_launch, "takes_turn", lambda *_: True)
    x = torch.arange(256 * 520, dtype=torch.int16).view(torch.bfloat16).as_strided((1, 256, 384), (7, 520, 1), 8)
    scale, seen = (torch.ones(()), torch.zeros(())) if name == "fp8" else (None, None)
    with recording() as launches:
        row, col = quantize_launch.run_quantize(x, scheme(name), True, True, scale=scale, seen=seen)
    ((kernel, programs, given, options),) = launches
    tall = 64 if name == "fp8" else 128
    assert kernel.__name__ == "turn_kernel" and programs == 256 // tall * 3 and given[-4:] == (256, 384, 260, 3)
    assert options["TALL"] == tall == 16 * options["num_warps"] and options["AMAX"] == (name == "fp8")
    assert (options["GC"], options["SQUARE"]) == (128 if name == "fp8_1x128" else 0, name == "fp8_128x128")
    assert torch.equal(given[0].view(torch.int16), x[0].view(torch.int16)) and given[0].stride() == (260, 1)
    assert row[0].shape == (256, 384) and col[0].shape == (384, 256)
    if name == "fp8":
        assert given[5] is scale and given[6].data_ptr() == seen.data_ptr()
