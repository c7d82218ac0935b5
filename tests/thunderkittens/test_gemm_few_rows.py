"""The source of the Hopper kernel of few rows, run on a CPU (`gluon_in_torch`): scales, shared tiles, their sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.testing import generator
from gpu_accel.thunderkittens import gemm_skinny
from tests import gluon_in_torch

TALL = gemm_skinny.SkinnyConfig(sub=1, early=True, lean=True, held=True)
CASES = {  # rows, columns of W, K, and how: tiles that no program has alone, whole ones, more programs than slices
    "128-shared": (128, 304, 640, replace(TALL, programs=7)),
    "128-as-before": (128, 304, 640, replace(TALL, programs=7, lean=False, held=False)),
    "128-pairs": (128, 304, 640, replace(TALL, sub=2, programs=7)),
    "64-shared": (50, 400, 896, replace(TALL, sub=2, programs=5)),
    "64-whole": (50, 400, 896, replace(TALL, sub=2, programs=7)),
    "64-wide": (50, 400, 896, replace(TALL, halves=2, programs=6)),
    "3-as-it-comes": (3, 200, 1152, replace(TALL, sub=4)),
    "3-idle-programs": (3, 130, 304, replace(TALL, sub=1, programs=11)),
}


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "row"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, blocks):
    m, n, k, config = case
    a, b = (torch.randn(rows, k, generator=generator(rows)).to(torch.float8_e4m3fn) for rows in (m, n))
    x, w = a.double(), b.double()
    if blocks:
        scale_x, scale_w = (torch.rand(rows, -(-k // 128), generator=generator(7)) + 0.5 for rows in (m, -(-n // 128)))
        x *= scale_x.double().repeat_interleave(128, 1)[:, :k]
        w *= scale_w.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(128, 0)[:n]
    else:
        scale_x, scale_w = (torch.rand(rows, 1, generator=generator(7)) + 0.5 for rows in (m, n))
        x, w = x * scale_x.double(), w * scale_w.double()
    how = dict(block_x=(1, 128), block_w=(128, 128)) if blocks else dict(block_x=(1, 0), block_w=(1, 0))
    out = torch.full((m, n), float("nan"))
    with gluon_in_torch.kernels_on_a_cpu() as done:
        gemm_skinny.gemm(a, b.t(), scale_x=scale_x, scale_w=scale_w, **how, config=config, out=out)
    assert done == ["skinny_gemm_kernel"]
    truth = x @ w.t()
    # sums of float32, and no cut of the tensor cores' here: some eps times the root of K
    assert (out.double() - truth).abs().max() <= 1e-6 * truth.abs().max()
