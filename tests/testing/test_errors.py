"""Every way in which a result can be wrong must be noticed, and a right result must pass."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import IncorrectResultError, InvalidInputError
from gpu_accel.testing import (
    assert_close_to_truth,
    compare,
    error_and_bound,
    max_abs,
    poison_like,
    relative_error,
    rmse,
)

SHAPE = (2, 33, 3, 16)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def example(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, truth, yardstick): two independent roundings of the same truth."""
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(SHAPE, generator=g, dtype=torch.float64)
    noise = torch.finfo(dtype).eps * torch.randn(2, *SHAPE, generator=g, dtype=torch.float64)
    out, yardstick = ((truth * (1 + n)).to(dtype) for n in noise)
    return out, truth, yardstick


def rejected(out, truth, yardstick, **options) -> str:
    with pytest.raises(IncorrectResultError) as caught:
        assert_close_to_truth("o", out, truth, yardstick, **options)
    error, bound = error_and_bound(out, truth, yardstick, **options)
    assert not error <= bound, "error_and_bound must agree with the assertion"
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_scale", [False, True])
def test_right_result_passes(dtype, by_scale):
    out, truth, yardstick = example(dtype)
    assert_close_to_truth("o", out, truth, yardstick, by_scale=by_scale)
    error, bound = error_and_bound(out, truth, yardstick, by_scale=by_scale)
    assert 0 < error <= bound < 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_is_found_and_named(dtype):
    out, truth, yardstick = example(dtype)
    out[1, 20, 2, 7] += 1.0
    message = rejected(out, truth, yardstick)
    assert "o:" in message and "[1, 20, 2, 7]" in message and "bound" in message
    assert f"{out[1, 20, 2, 7].item():.9g}" in message and f"{truth[1, 20, 2, 7].item():.9g}" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_where_the_truth_is_finite(value):
    out, truth, yardstick = example()
    out[0, 3, 1, 2] = value
    message = rejected(out, truth, yardstick)
    assert "1 of" in message and "[0, 3, 1, 2]" in message
    assert error_and_bound(out, truth, yardstick)[0] == math.inf


@pytest.mark.parametrize("wanted", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("given", [math.nan, math.inf, -math.inf, 0.0])
def test_special_values_must_match(wanted, given):
    out, truth, yardstick = example(torch.float32)
    truth[0, 0, 0, 0] = wanted
    yardstick[0, 0, 0, 0] = wanted
    out[0, 0, 0, 0] = given
    if given == wanted or (math.isnan(given) and math.isnan(wanted)):
        assert_close_to_truth("lse", out, truth, yardstick)
    else:
        rejected(out, truth, yardstick)


def test_zeros_and_a_shifted_row_and_swapped_heads():
    out, truth, yardstick = example()
    rejected(torch.zeros_like(out), truth, yardstick)
    rejected(out.roll(1, dims=1), truth, yardstick)
    swapped = out.clone()
    swapped[:, :, [0, 1]] = out[:, :, [1, 0]]
    rejected(swapped, truth, yardstick)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2], ids=str)
def test_an_element_never_written(dtype):
    out, truth, yardstick = example(dtype)
    buffer = poison_like(out)
    flat = torch.arange(out.numel()).reshape(out.shape) != 100
    written = torch.where(flat, out.float(), torch.zeros(())).to(dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    buffer.view(bits)[flat] = written.view(bits)[flat]
    message = rejected(buffer, truth, yardstick)
    assert "1 of" in message and "never written" in message


def test_poison_is_refused_even_where_the_truth_is_nan():
    out, truth, yardstick = example()
    truth[0, 0, 0, 0] = math.nan
    out[0, 0, 0, 0] = poison_like(out)[0, 0, 0, 0]
    assert "never written" in rejected(out, truth, yardstick)


def test_shape_and_dtype_must_match():
    out, truth, yardstick = example()
    assert "shape" in rejected(out[:, :-1], truth, yardstick)
    assert "shape" in rejected(out.transpose(1, 2), truth, yardstick)
    assert "dtype" in rejected(out.float(), truth, yardstick)
    assert "dtype" in rejected(out.half(), truth, yardstick)


def test_unusable_truth_and_missing_yardstick_are_refused():
    out, truth, yardstick = example()
    with pytest.raises(InvalidInputError, match="float64"):
        compare(out, truth.bfloat16(), yardstick)
    with pytest.raises(InvalidInputError, match="floor"):
        compare(out, truth, None)
    with pytest.raises(InvalidInputError, match="yardstick"):
        compare(out, truth, yardstick[:1])
    assert compare(truth.float(), truth, None, floor=1e-6).ok


def test_a_yardstick_with_nan_or_infinity_excuses_nothing():
    out, truth, yardstick = example()
    for value in (math.nan, math.inf):
        yardstick[0, 0, 0, 0] = value
        assert_close_to_truth("o", out, truth, yardstick)
        wrong = out.clone()
        wrong[1, 1, 1, 1] += 1.0
        rejected(wrong, truth, yardstick)
    yardstick.fill_(math.nan)
    assert compare(out, truth, yardstick).bound == compare(out, truth, truth.to(out.dtype), factor=0.0).bound


@pytest.mark.parametrize("by_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_of_the_yardstick_excuses_nothing(dtype, by_scale):
    out, truth, yardstick = example(dtype)
    usual = compare(out, truth, yardstick).bound
    yardstick[0, 3, 1, 2] += 100.0
    assert_close_to_truth("o", out, truth, yardstick, by_scale=by_scale)
    assert compare(out, truth, yardstick).bound < 8 * usual
    rejected(torch.zeros_like(out), truth, yardstick, by_scale=by_scale)
    rejected(-out, truth, yardstick, by_scale=by_scale)


def test_the_bound_is_never_wider_than_the_worst_of_the_yardstick():
    for seed in range(5):
        out, truth, yardstick = example(torch.float32, seed=seed)
        worst = max_abs(yardstick, truth)
        assert compare(out, truth, yardstick, floor=0.0).bound == 2.0 * worst, "an ordinary tail is left as it is"
        yardstick[1, 2, 0, 3] += 1.0
        assert compare(out, truth, yardstick, floor=0.0).bound <= 2.0 * max_abs(yardstick, truth)


def test_padding_does_not_narrow_the_bound():
    out, truth, yardstick = example()
    padded = [torch.cat([t, torch.zeros(2, 33, 3, 16 * 1200, dtype=t.dtype)], dim=-1) for t in (out, truth, yardstick)]
    assert compare(*padded).bound == compare(out, truth, yardstick).bound


def test_by_scale_sees_a_wrong_small_row_that_one_bound_hides():
    out, truth, yardstick = example()
    scale = torch.tensor(0.5, dtype=torch.float64) ** torch.arange(33).clamp(max=9).reshape(1, 33, 1, 1)
    out, truth, yardstick = ((t.double() * scale).to(t.dtype) for t in (out, truth, yardstick))
    assert_close_to_truth("o", out, truth, yardstick, by_scale=True)
    out[0, 30] = 0.0
    assert compare(out, truth, yardstick).ok, "the premise: one bound for the tensor lets a zeroed row pass"
    assert "[0, 30," in rejected(out, truth, yardstick, by_scale=True)


def test_rows_that_are_exactly_zero_must_be_zero_by_scale():
    out, truth, yardstick = example()
    for t in (out, truth, yardstick):
        t[0, 0] = 0.0
    assert_close_to_truth("o", out, truth, yardstick, by_scale=True)
    out[0, 0, 0, 0] = 1e-6
    rejected(out, truth, yardstick, by_scale=True)


def test_twice_the_yardstick_passes_and_more_does_not():
    truth = torch.ones(4, dtype=torch.float64)
    yardstick = torch.full((4,), 1.01)
    assert compare(torch.full((4,), 1.0199), truth, yardstick).ok
    assert not compare(torch.full((4,), 1.0203), truth, yardstick).ok
    assert compare(torch.full((4,), 1.0203), truth, yardstick, factor=3.0).ok


def test_empty_tensors_pass_and_wrong_empty_shapes_do_not():
    empty = torch.empty(2, 0, 4)
    assert_close_to_truth("o", empty, empty.double(), empty)
    rejected(torch.empty(2, 1, 4), empty.double(), empty)


def test_metrics():
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)
    out = torch.tensor([3.0, 5.0])
    assert max_abs(out, reference) == 1.0
    assert rmse(out, reference) == pytest.approx(math.sqrt(0.5))
    assert relative_error(out, reference) == pytest.approx(0.2)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    for metric in (max_abs, rmse, relative_error):
        assert math.isnan(metric(torch.tensor([math.nan, 4.0]), reference))
        assert metric(torch.empty(0), torch.empty(0)) == 0.0
        with pytest.raises(InvalidInputError):
            metric(torch.ones(3), reference)
