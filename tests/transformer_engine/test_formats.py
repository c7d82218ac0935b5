"""Every code and every 16-bit input of every format, against ml_dtypes, torch and exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.formats import FORMATS, decode, encode

ml_dtypes = pytest.importorskip("ml_dtypes")
np = pytest.importorskip("numpy")

THEIRS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
ELEMENTS = [name for name in THEIRS if name != "e8m0"]
CODES = torch.arange(256, dtype=torch.uint8)


def all_16_bit(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()


def edges(fmt: formats.Format) -> torch.Tensor:
    """All numbers of a format, the middles between neighbours, and the float32 next to each, of both signs."""
    numbers = [fmt.value(code) for code in range(fmt.largest_code + 1)]
    beyond = 2 * numbers[-1] - numbers[-2]
    row = torch.tensor([*numbers, beyond, 2 * beyond], dtype=torch.float64)
    points = torch.cat((row, (row[1:] + row[:-1]) / 2)).float()
    up, down = (torch.nextafter(points, torch.tensor(end)) for end in (math.inf, -math.inf))
    special = torch.tensor([0.0, 1e-45, 1.2e-38, 3.4028235e38, math.inf, math.nan])
    some = torch.cat((points, up, down, special))
    return torch.cat((some, -some))


def inputs(name: str) -> torch.Tensor:
    return torch.cat((all_16_bit(torch.bfloat16), all_16_bit(torch.float16), edges(FORMATS[name])))


def their_codes(x: torch.Tensor, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.numpy().astype(THEIRS[name]).view(np.uint8).copy())


@pytest.mark.parametrize("name", THEIRS)
def test_every_code_decodes_as_in_ml_dtypes(name):
    fmt = FORMATS[name]
    codes = CODES[: 1 << fmt.bits]
    theirs = torch.from_numpy(codes.numpy().view(THEIRS[name]).astype(np.float32))
    torch.testing.assert_close(decode(codes, name), theirs, rtol=0, atol=0, equal_nan=True)
    zeros = decode(codes, name) == 0
    assert torch.equal(decode(codes, name)[zeros].signbit(), theirs[zeros].signbit())


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].dtype])
def test_every_code_decodes_as_in_torch(name):
    theirs = CODES.view(FORMATS[name].dtype).float()
    if name == "e8m0":  # torch's own decoding of code 0 has differed between versions; the format says 2**-127
        assert decode(CODES, name)[0].item() == 2.0**-127
        theirs[0] = 2.0**-127
    torch.testing.assert_close(decode(CODES, name), theirs, rtol=0, atol=0, equal_nan=True)


def test_the_scale_format_of_nvfp4_ignores_the_sign_bit():
    positive = decode(CODES, "e4m3")[:128]
    torch.testing.assert_close(decode(CODES, "ue4m3")[128:], positive, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTS)
def test_encoding_without_saturation_is_that_of_ml_dtypes(name):
    x = inputs(name)
    fmt = FORMATS[name]
    if fmt.nan_code is None:  # ml_dtypes saturates too, and makes NaN -0, where PTX and we make it the largest
        x = x[~x.isnan()]
        assert torch.equal(encode(x, name), their_codes(x, name))
        return
    ours, theirs = encode(x, name, saturate=False), their_codes(x, name)
    nan = decode(theirs, name).isnan()
    assert torch.equal(decode(ours, name).isnan(), nan)
    assert torch.equal(ours[~nan], theirs[~nan])
    assert set(ours[nan].tolist()) == {fmt.nan_code}


@pytest.mark.parametrize("name", ELEMENTS)
def test_encoding_with_saturation_clamps_and_keeps_nan(name):
    x = inputs(name)
    fmt = FORMATS[name]
    ours = encode(x, name)
    nan = x.isnan()
    assert set(ours[nan].tolist()) == {fmt.largest_code if fmt.nan_code is None else fmt.nan_code}
    x, ours = x[~nan], ours[~nan]
    assert torch.equal(ours, their_codes(x.clamp(-fmt.largest, fmt.largest), name))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_torch_agrees_on_everything_within_range(name):
    fmt = FORMATS[name]
    x = inputs(name)
    x = x[x.abs() <= fmt.largest]
    assert torch.equal(encode(x, name), x.to(fmt.dtype).view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_survive_the_round_trip(name):
    fmt = FORMATS[name]
    codes = CODES[: 1 << fmt.bits]
    known = ~decode(codes, name).isnan() & ~decode(codes, name).isinf()
    assert torch.equal(encode(decode(codes, name), name)[known], codes[known])


def test_known_roundings_of_e2m1():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 1e9, -0.26])
    assert decode(encode(x, "e2m1"), "e2m1").tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, -0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_top_binade_of_e4m3_is_exact(dtype):
    """A conversion that takes exponent 15 for overflow turns 256 into 448 (tilelang-metax PR 140)."""
    x = torch.tensor([256, 288, 320, 352, 384, 416, 448], dtype=dtype)
    assert decode(encode(x, "e4m3"), "e4m3").tolist() == x.tolist()


def test_saturation_is_the_callers_choice():
    """torch's eager cast saturates in some versions and not in others (pytorch PR 178817, ao#1912, ml_dtypes#400)."""
    x = torch.tensor([464.0, 465.0, 1000.0, math.inf, -math.inf])
    assert decode(encode(x, "e4m3"), "e4m3").tolist() == [448, 448, 448, 448, -448]
    assert encode(x, "e4m3", saturate=False).tolist() == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F]
    assert encode(torch.tensor([61439.0, 61440.0, -math.inf]), "e5m2", saturate=False).tolist() == [0x7B, 0x7C, 0xFC]
    assert encode(torch.tensor([math.inf]), "e4m3fnuz", saturate=False).tolist() == [0x80]  # not 240 (onnx#6220)


def test_scales_have_no_sign():
    x = torch.tensor([-1.0, -0.0, 0.0, 3.0, 500.0, math.nan])
    assert encode(x, "ue4m3").tolist() == [0x7F, 0, 0, 0x44, 0x7E, 0x7F]
    assert encode(x, "ue4m3", saturate=False).tolist() == [0x7F, 0, 0, 0x44, 0x7F, 0x7F]


# -- e8m0


def test_e8m0_codes_at_the_ends():
    """Codes 0, 254 and 255 (TransformerEngine#2407, PR 3262; ao PR 4117): 2**-127, 2**127, NaN."""
    values = decode(torch.tensor([0, 127, 254, 255], dtype=torch.uint8), "e8m0")
    assert values[:3].tolist() == [2.0**-127, 1.0, 2.0**127] and values[3].isnan()


@pytest.mark.parametrize("rounding", ["nearest", "floor", "ceil"])
def test_e8m0_rounds_as_logarithms_say(rounding):
    positive = torch.cat((all_16_bit(torch.bfloat16), all_16_bit(torch.float16), edges(FORMATS["e8m0"])))
    positive = positive[positive.isfinite() & (positive > 0)]
    mantissa, exponent = torch.frexp(positive.double())
    mantissa, exponent = 2 * mantissa, exponent - 1
    up = {"nearest": mantissa >= 1.5, "floor": mantissa > 2, "ceil": mantissa > 1}[rounding]
    expected = (exponent + up).clamp(-127, 127) + 127
    assert torch.equal(formats.encode_e8m0(positive, rounding=rounding).int(), expected.int())


def test_e8m0_nearest_is_the_cast_of_torch():
    x = torch.cat((all_16_bit(torch.bfloat16), edges(FORMATS["e8m0"])))
    x = x[(x >= 2.0**-126) & ~x.isnan()]
    assert torch.equal(formats.encode_e8m0(x, saturate=False), x.to(torch.float8_e8m0fnu).view(torch.uint8))


def test_e8m0_of_what_is_no_scale():
    x = torch.tensor([0.0, 1e-45, 3e38, math.inf, math.nan, -1.0, -math.inf])
    assert encode(x, "e8m0").tolist() == [0, 0, 254, 255, 255, 255, 255]
    assert encode(x, "e8m0", saturate=False).tolist()[2] == 255


def test_rounding_up_is_not_truncated():
    """onnx PR 7784: 1.125 rounded up was 1; ml_dtypes#298: the caller picks the mode."""
    x = torch.tensor([1.125, 1.25, 5.0])
    assert decode(formats.encode_e8m0(x, rounding="ceil"), "e8m0").tolist() == [2, 2, 8]
    assert decode(formats.encode_e8m0(x, rounding="floor"), "e8m0").tolist() == [1, 1, 4]


# -- stochastic rounding


def test_philox_gives_the_published_words():
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(w) for w in formats.philox((zero, zero, zero, zero), 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = zero + 0xFFFFFFFF
    words = [int(w) for w in formats.philox((ones, ones, ones, ones), (1 << 64) - 1)]
    assert words == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2", "e4m3fnuz"])
def test_stochastic_rounding_is_unbiased(name):
    fmt = FORMATS[name]
    points = [0.3 * fmt.smallest, 0.001 * fmt.smallest, 1.37, -2.6, 0.9 * fmt.largest]
    count = 40000
    for point in points:
        got = decode(encode(torch.full((count,), point), name, rounding="stochastic", seed=7), name).double()
        low, high = got.min().item(), got.max().item()
        exact = float(torch.tensor(point, dtype=torch.float32))
        assert low <= exact <= high and len(set(got.tolist())) <= 2
        spread = max(high - low, fmt.smallest) * math.sqrt(0.25 / count)
        assert abs(got.mean().item() - exact) <= 5 * spread, point


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_stochastic_rounding_is_exact_reproducible_and_seeded(name):
    fmt = FORMATS[name]
    numbers = torch.tensor([fmt.value(c) for c in range(fmt.largest_code + 1)])
    assert torch.equal(encode(numbers, name, rounding="stochastic", seed=1), encode(numbers, name))
    x = torch.linspace(-1, 1, 4097)
    first, again, other, stream = (
        encode(x, name, rounding="stochastic", seed=s, stream=t) for s, t in ((3, 0), (3, 0), (4, 0), (3, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other) and not torch.equal(first, stream)
    assert torch.equal(first[:1000], encode(x[:1000], name, rounding="stochastic", seed=3))


def test_stochastic_rounding_handles_the_ends():
    x = torch.tensor([1e9, math.inf, math.nan, 0.0, -0.0, 1e-40])
    assert encode(x, "e4m3", rounding="stochastic", seed=0).tolist() == [0x7E, 0x7E, 0x7F, 0, 0x80, 0]


# -- packing


def test_the_low_nibble_comes_first():
    """[1, 6] is 0x72 (comfy-kitchen PR 41, composable_kernel PR 1889: libraries disagreed)."""
    assert formats.pack_nibbles(encode(torch.tensor([1.0, 6.0]), "e2m1")).tolist() == [0x72]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 64, 65])
def test_packing_round_trips(length):
    four = torch.randint(0, 16, (3, length), dtype=torch.uint8)
    assert torch.equal(formats.unpack_nibbles(formats.pack_nibbles(four), length), four)
    six = torch.randint(0, 64, (3, length), dtype=torch.uint8)
    assert formats.pack_sixes(six).shape == (3, 3 * -(-length // 4))
    assert torch.equal(formats.unpack_sixes(formats.pack_sixes(six), length), six)


# -- refusals


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("format", dict(fmt="e9m9")),
        ("float64", dict(x=torch.zeros(1, dtype=torch.float64))),
        ("integers", dict(x=torch.zeros(1, dtype=torch.int32))),
        ("rounding", dict(rounding="up")),
        ("no-seed", dict(rounding="stochastic")),
        ("useless-seed", dict(seed=1)),
        ("negative-seed", dict(rounding="stochastic", seed=-1)),
        ("no-nan", dict(fmt="e2m1", saturate=False)),
        ("random-scale", dict(fmt="e8m0", rounding="stochastic", seed=1)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals(what, arguments):
    with pytest.raises(InvalidInputError):
        encode(**{"x": torch.zeros(1), "fmt": "e4m3", **arguments})


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (5, 1)])
def test_any_shape(shape):
    assert encode(torch.ones(shape), "e4m3").shape == shape
    assert decode(encode(torch.ones(shape), "e4m3"), "e4m3").shape == shape
    assert encode(torch.ones(shape), "e4m3", rounding="stochastic", seed=0).shape == shape


def test_strides_do_not_matter():
    x = torch.randn(6, 10)[:, ::3].t()
    assert torch.equal(encode(x, "e4m3"), encode(x.contiguous(), "e4m3"))
