"""The recipes of the paper's table and the report on a user's own tensors."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.fp8 import fp8_error_report
from gpu_accel.flash_attention3.fp8_error import PAPER_RMSE, RECIPES

FP8 = [r.name for r in RECIPES if r.fp8]


def paper_inputs(batch, heads, sq, sk, dim, seed=0):
    source = torch.Generator().manual_seed(seed)

    def draw(n):
        hit = torch.rand(batch, heads, n, dim, generator=source) < 0.001
        x = torch.randn(batch, heads, n, dim, generator=source)
        return x + 10 * torch.randn(batch, heads, n, dim, generator=source) * hit

    return draw(sq), draw(sk), draw(sk)


def test_the_order_of_the_papers_table_appears():
    """At seqlen 4096, head_dim 128 (the paper states no shape) the sizes and ratios of the table are met."""
    report = fp8_error_report(*paper_inputs(1, 4, 256, 4096, 128))
    error = {r.recipe: r.rmse for r in report.rows}
    assert all(0.4 < error[name] / PAPER_RMSE[name] < 2.0 for name in PAPER_RMSE), error
    assert error["fp16-standard"] > 1.2 * error["fp16-flash"]
    assert error["fp8-baseline"] > 1.7 * error["fp8-block-hadamard"]
    assert error["fp8-block"] > 1.4 * error["fp8-block-hadamard"]  # the Hadamard matrix brings the gain ...
    assert error["fp8-tensor-hadamard"] < 1.2 * error["fp8-block-hadamard"]  # ... and block scales hardly any
    assert report.recommended in ("fp8-tensor-hadamard", "fp8-block-hadamard")


def test_block_scales_matter_where_blocks_differ():
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, 256, 64, generator=source) for _ in range(3))
    q[0] *= 1e-5
    k[0] *= 1e5  # ordinary scores in both sequences, but one scale cannot serve both
    report = fp8_error_report(q, k, v, causal=True)
    assert report["fp8-tensor"].underflow > 0.1 and report["fp8-block"].underflow < 0.01
    assert report["fp8-block"].rmse < 0.6 * report["fp8-tensor"].rmse
    assert report["fp8-block-hadamard"].rmse < 0.6 * report["fp8-tensor-hadamard"].rmse


def test_report_reads_like_a_table_and_prefers_the_simplest_recipe():
    q, k, v = (torch.randn(1, 2, n, 32) for n in (20, 40, 40))
    report = fp8_error_report(q, k, v, causal=True)
    lines = str(report).splitlines()
    assert len(lines) == len(RECIPES) + 3 and lines[-1].startswith("recommended: fp8-")
    for row in report.rows:
        assert row.rmse > 0 and row.max_error >= row.rmse and math.isfinite(row.relative)
        assert (row.clipped > 0) == (row.recipe in FP8) and row.paper_rmse == PAPER_RMSE.get(row.recipe)
    same = torch.ones(1, 1, 8, 16)
    assert fp8_error_report(same, same, same).recommended == "fp8-tensor"  # nothing to lose


def test_layouts_and_grouped_heads():
    q, k, v = torch.randn(1, 30, 4, 32), torch.randn(1, 40, 2, 32), torch.randn(1, 40, 2, 32)
    a = fp8_error_report(q, k, v, layout="bshd")
    b = fp8_error_report(*(x.transpose(1, 2) for x in (q, k, v)))
    assert a.rows == b.rows


def test_not_finite_inputs_get_no_recommendation():
    q = torch.randn(1, 1, 8, 16)
    q[0, 0, 0, 0] = float("nan")
    assert fp8_error_report(q, q, q).recommended.startswith("none")


def test_wrong_arguments():
    with pytest.raises(InvalidInputError, match="one shape"):
        fp8_error_report(torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 5, 16))


def test_values_that_v_loses_are_counted():
    q, k, v = (torch.randn(1, 1, 64, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert fp8_error_report(q, k, v)["fp8-tensor"].underflow < 0.05
    v = v * 1e-4
    v[0, 0, 0, 0] = 1e3
    assert fp8_error_report(q, k, v)["fp8-tensor"].underflow > 0.9
