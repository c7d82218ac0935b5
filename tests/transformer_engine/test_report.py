"""error_report: every share is what it says."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.report import SCHEMES, error_report
from gpu_accel.transformer_engine.schemes import SCHEMES as ALL


def report(x: torch.Tensor, *names: str):
    return error_report(x, names or SCHEMES, backend="reference")


def test_an_ordinary_tensor():
    found = report(torch.randn(32, 256, generator=generator(0)))
    assert len(found.rows) == len(SCHEMES) and found.shape == (32, 256)
    assert found["mxfp8"].relative_error < 0.04 < found["nvfp4"].relative_error
    assert found["fp8"].sqnr_db == pytest.approx(-20 * math.log10(found["fp8"].relative_error))
    assert all(row.not_finite == 0 for row in found.rows)
    assert all(row.clipped == 0 for row in found.rows)  # no scale here is below its block
    text = str(found)
    assert all(name in text for name in SCHEMES) and "vanished" in text


def test_floor_clips_and_says_how_much():
    x = torch.ones(4, 32)
    x[:2] = 7.9  # 6 is the largest at the scale that floor takes; 7.9 is half a step of 2 beyond it
    x[2] = 6.9
    found = report(x, "e2m1:1x32:e8m0:floor", "mxfp4")
    assert found["e2m1:1x32:e8m0:floor"].clipped == 0.5
    assert found["mxfp4"].clipped == 0


def test_what_vanishes_is_counted():
    x = torch.full((1, 32), 1e-3)
    x[0, 0] = 1.0
    assert report(x, "int8_row")["int8_row"].vanished == 31 / 32
    assert report(x, "mxfp8")["mxfp8"].vanished == 0


def test_what_is_not_finite_is_counted():
    x = torch.ones(2, 64)
    x[0, 3] = math.nan
    found = report(x, "fp8", "mxfp8", "int8_row")
    assert [found[name].not_finite for name in ("fp8", "mxfp8", "int8_row")] == [1 / 128, 32 / 128, 64 / 128]
    assert found["fp8"].relative_error == 0


def test_the_narrowest_within_an_error():
    found = report(torch.randn(32, 256, generator=generator(0)))
    assert found.narrowest(0.2).scheme in ("nvfp4", "mxfp4", "int4_32")
    assert found.narrowest(0.04).bits_per_value <= 8.25
    assert found.narrowest(1e-6) is None


@pytest.mark.parametrize(
    "x", [torch.zeros(4, 32), torch.zeros(0, 32), torch.zeros(4, 0)], ids=["zeros", "no-rows", "no-columns"]
)
def test_nothing(x):
    found = report(x, *ALL)
    assert all(row.relative_error == 0 and row.sqnr_db == math.inf and not row.vanished for row in found.rows)


def test_refusals():
    with pytest.raises(InvalidInputError):
        error_report(torch.ones(4, 4, dtype=torch.int32))
    with pytest.raises(InvalidInputError):
        error_report(torch.ones(4, 4), ["fp7"])
