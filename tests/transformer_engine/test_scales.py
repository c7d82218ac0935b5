"""The policy of scales.py, and the public reports of libraries that had another or none."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine import scales
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import SCHEMES, Scheme, scheme

NAN, INF = math.nan, math.inf
FLOATS = [name for name, s in SCHEMES.items() if s.scale in ("fp32", "pow2")]


def dequantized(x: torch.Tensor, name: str) -> torch.Tensor:
    return quantize(x, name, backend="reference").dequantize(torch.float32)


# -- zeros


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name):
    """ao#4713, kernels-community#681, slime PR 2256, compressed-tensors PR 595: amax / 448 without a guard is 0 / 0."""
    for x in (torch.zeros(16, 32), torch.zeros(256, 256)):
        q = quantize(x, name, backend="reference")
        assert torch.equal(q.dequantize(), x)
        assert q.scales.float().isfinite().all()


@pytest.mark.parametrize("name", SCHEMES)
def test_one_value_among_zeros_is_kept(name):
    x = torch.zeros(256, 256)
    x[0, 0] = 1.0
    y = dequantized(x, name)
    assert y[0, 0] == 1.0 and y.abs().sum() == 1.0


def test_a_zero_block_beside_a_tiny_tensor_is_not_nan():
    """Model-Optimizer PR 1397, #1633: a zero block with scale 1 exceeded 448 in the scales' format and became NaN."""
    x = torch.full((1, 64), 1e-6)
    x[0, :16] = 0
    q = quantize(x, "nvfp4", backend="reference")
    assert q.scales.view(torch.uint8).tolist() == [[0, 0x7E, 0x7E, 0x7E]]
    assert q.dequantize()[0, :16].abs().sum() == 0


# -- small and large


@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e-23, 1e-12])
@pytest.mark.parametrize("name", SCHEMES)
def test_tiny_blocks_do_not_overflow(name, size):
    """flashinfer#2595 (NaN at a scale of 1e-23); a clamp at 1e-4 or 1e-12 instead loses the block."""
    x = torch.full((2, 32), size)
    y = dequantized(x, name)
    assert y.isfinite().all()
    assert (y <= 1.1 * x + 2.0**-126).all()
    if size >= 1e-23:
        assert (y >= 0.9 * x).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_huge_blocks_are_finite(name):
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    y = dequantized(x, name).double()
    assert (y / x.double() - 1).abs().max() < 0.07 or y.isinf().all()


def test_scales_are_never_subnormal():
    """TransformerEngine PR 2589: a subnormal scale of a power of two corrupted packed e8m0 scales."""
    amax = torch.tensor([0.0, 1e-45, 1e-38, 1.0, 3e38])
    for power_of_two in (False, True):
        scale = scales.scale_fp32(amax, 448.0, power_of_two=power_of_two)
        assert (scale >= 2.0**-126).all() and (1 / scale).isfinite().all()
    assert (scale.view(torch.int32) & 0x7FFFFF).eq(0).all()


@pytest.mark.parametrize("largest", [448.0, 57344.0, 6.0, 127.0])
def test_powers_of_two_clip_nothing_and_waste_nothing(largest):
    amax = torch.cat((torch.logspace(-30, 30, 4001), largest * 2.0 ** torch.arange(-20.0, 20.0)))
    amax = torch.cat((amax, torch.nextafter(amax, torch.tensor(INF))))
    scale = scales.scale_fp32(amax, largest, power_of_two=True).double()
    assert (amax.double() <= scale * largest).all()
    assert (amax.double() > scale / 2 * largest).all()


# -- the rules of MX


@pytest.mark.parametrize(
    ("rule", "element", "amax", "exponent"),
    [
        ("floor", "e4m3", 448.0, 0),
        ("floor", "e4m3", 511.0, 0),
        ("floor", "e4m3", 512.0, 1),
        ("rceil", "e4m3", 448.0, 0),
        ("rceil", "e4m3", 448.0001, 1),
        ("rceil", "e2m1", 6.0, 0),
        ("rceil", "e2m1", 6.01, 1),
        ("rceil", "e2m1", 3.0, -1),
        ("ceil", "e4m3", 256.0, 0),
        ("ceil", "e4m3", 257.0, 1),
        ("even", "e4m3", 479.0, 0),
        ("even", "e4m3", 480.0, 0),
        ("even", "e4m3", 496.0, 1),
        ("even", "e2m1", 7.0, 1),
        ("even", "e2m1", 6.9, 0),
    ],
)
def test_mx_rules_at_their_borders(rule, element, amax, exponent):
    what = Scheme(element=element, block=(1, 32), scale="e8m0", rule=rule)
    bits = torch.tensor([amax]).view(torch.int32)
    assert scales.mx_codes(bits, what).item() == 127 + exponent


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_rceil_clips_nothing_and_floor_clips_at_most_a_half(element):
    x = torch.randn(64, 32) * 10
    for rule, least in (("rceil", 1.0), ("floor", 0.5)):
        name = f"{element}:1x32:e8m0:{rule}"
        y = dequantized(x, name)
        ratio = y.abs().amax(1) / x.abs().amax(1)
        tolerance = 2.0 ** -(scheme(name).bits == 8 and 3 or 1)
        assert (ratio >= least * (1 - tolerance)).all() and (ratio <= 1 + tolerance).all()


# -- NaN and Inf


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite_stays_visible_and_stays_local(name, bad):
    """TransformerEngine#3550: NaN was lost in a packed maximum, and the block got a finite scale."""
    x = torch.randn(64, 512)
    x[17, 100] = bad
    y = dequantized(x, name)
    what = scheme(name)
    assert y[17, 100].isnan()
    lost = y.isnan()
    if what.keeps_nan_in_place:
        assert lost.sum() == 1
    else:
        r, c = what.block[0] or 64, what.block[1] or 512
        block = torch.zeros_like(lost)
        block[17 // r * r : 17 // r * r + r, 100 // c * c : 100 // c * c + c] = True
        assert torch.equal(lost, block)


@pytest.mark.parametrize("position", range(0, 32, 5))
def test_nan_anywhere_in_an_mx_block_gives_the_nan_scale(position):
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    x[0, position] = NAN
    assert quantize(x, "mxfp8", backend="reference").scales.view(torch.uint8).tolist() == [[255, 119]]


# -- delayed scaling


def step(history, amax, scale=1.0, **options):
    made = scales.update_history(
        torch.tensor(history), torch.tensor(amax), torch.tensor(scale), largest=448.0, **options
    )
    return made[0].tolist(), made[1].item(), made[2].item()


def test_delayed_scaling_takes_the_maximum_of_its_history():
    assert step([0.0, 0.0, 0.0], 448.0) == ([448.0, 0.0, 0.0], 1.0, 0)
    assert step([448.0, 896.0, 1.0], 224.0) == ([224.0, 448.0, 896.0], 2.0, 0)
    assert step([448.0, 896.0, 1.0], 224.0, algorithm="most_recent")[1] == 0.5
    assert step([0.0], 448.0, margin=2)[1] == 4.0


@pytest.mark.parametrize("amax", [0.0, INF, NAN])
def test_a_maximum_that_tells_nothing_changes_nothing(amax):
    """Transformer Engine: current scaling sets 1, delayed scaling keeps the scale, and its two kernels differ."""
    history, scale, overflowed = step([3.0, 2.0], amax, scale=0.25)
    assert (history, scale) == ([3.0, 2.0], 0.25)
    assert overflowed == (amax != 0.0)


def test_history_is_checked():
    with pytest.raises(InvalidInputError, match="length"):
        step([], 1.0)
    with pytest.raises(InvalidInputError, match="amax_compute_algo"):
        step([1.0], 1.0, algorithm="mean")


# -- the order of scales


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
@pytest.mark.parametrize("shape", [(1, 1), (8, 4), (32, 4), (128, 4), (129, 5), (300, 17), (0, 4), (3, 0)], ids=str)
def test_swizzling_round_trips(shape, layout):
    table = torch.randint(0, 256, shape, dtype=torch.uint8)
    flat = scales.swizzle_scales(table, layout=layout)
    rows = int(layout.split("x")[0])
    assert flat.shape == (-(-shape[0] // rows) * rows * -(-shape[1] // 4) * 4,)
    assert torch.equal(scales.unswizzle_scales(flat, *shape, layout=layout), table)
    assert int((flat != 0).sum()) == int((table != 0).sum())  # padding is zero


def test_the_order_of_cublas():
    rows = torch.arange(256, dtype=torch.int32)[:, None].expand(256, 8)
    flat = scales.swizzle_scales(rows.to(torch.uint8))
    assert flat[::4][:8].tolist() == [0, 32, 64, 96, 1, 33, 65, 97]
    cols = torch.arange(8, dtype=torch.uint8)[None, :].expand(256, 8)
    flat = scales.swizzle_scales(cols)
    assert flat[:8].tolist() == [0, 1, 2, 3] * 2 and flat[512:516].tolist() == [4, 5, 6, 7]
    assert scales.swizzle_scales(rows.to(torch.uint8))[1024:1028].tolist() == [128] * 4  # tiles row by row


def test_padding_is_zero_whatever_memory_held():
    """vllm PR 38148, #37563, flashinfer#2861: padding from torch.empty was read as scales, NaN among them."""
    table = torch.full((17, 3), 0x7F, dtype=torch.uint8)
    for layout in ("128x4", "8x4"):
        flat = scales.swizzle_scales(table, layout=layout)
        assert set(flat.tolist()) == {0, 0x7F} and int((flat == 0x7F).sum()) == 51


def test_typed_scales_keep_their_type():
    table = torch.ones(4, 4).to(torch.float8_e4m3fn)
    assert scales.swizzle_scales(table).dtype == torch.float8_e4m3fn
    assert torch.equal(scales.unswizzle_scales(scales.swizzle_scales(table), 4, 4).float(), table.float())


def test_scales_that_are_no_powers_of_two_are_refused():
    """sglang#39193, vllm PR 53680: 1.5 was cut to 1 without a word, an error of a third."""
    with pytest.raises(InvalidInputError, match="powers of two"):
        scales.to_e8m0(torch.tensor([1.0, 1.5]))
    assert scales.to_e8m0(torch.tensor([1.0, 2.0**-127, 2.0**10])).tolist() == [127, 0, 137]


def test_wrong_tables_are_refused():
    with pytest.raises(InvalidInputError, match="one byte"):
        scales.swizzle_scales(torch.ones(4, 4))
    with pytest.raises(InvalidInputError, match="bytes"):
        scales.unswizzle_scales(torch.zeros(511, dtype=torch.uint8), 128, 4)
    with pytest.raises(InvalidInputError, match="layout"):
        scales.swizzle_scales(torch.zeros(4, 4, dtype=torch.uint8), layout="4x4")
