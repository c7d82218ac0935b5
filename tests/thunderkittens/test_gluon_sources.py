"""Products in Gluon as they stand, run in torch (`gluon_in_torch`): warps that load and warps that multiply, in turn.

The ring is filled as early and emptied as late as it may be, and partitions that wait for each other forever are seen.
"""

from __future__ import annotations

import pytest
import torch

from gpu_accel.thunderkittens import gemm_hopper, template
from tests import gluon_in_torch
from tests.thunderkittens.helpers import randn


def judge(out: torch.Tensor, truth: torch.Tensor) -> None:
    """Sums are float32, so all that shows is one rounding of the result: at most half a unit of its dtype."""
    torch.testing.assert_close(out.double(), truth, rtol=torch.finfo(out.dtype).eps, atol=1e-3)


@pytest.mark.parametrize("by_tma", [True, False], ids=["tma", "direct"])
@pytest.mark.parametrize(("m", "k", "n"), [(200, 500, 264), (300, 64, 520)])
def test_the_template(m, k, n, by_tma, monkeypatch):
    """More slices than stages, then more tiles than slices."""
    monkeypatch.setattr(template, "_BY_TMA", by_tma)
    a, b = randn(m, k, seed=1, dtype=torch.bfloat16), randn(k, n, seed=2, dtype=torch.bfloat16)
    a = torch.nn.functional.pad(a, (0, 4))[:, :k] if k % 8 else a  # rows at multiples of 16 bytes
    with gluon_in_torch.kernels_on_a_cpu() as done:
        out = template.product(a, b)
    assert done == ["product_kernel"]
    judge(out, a.double() @ b.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(("m", "k", "n", "out_dtype"), [
    pytest.param(200, 520, 264, None, id="200x520x264"),
    pytest.param(72, 64, 136, torch.float32, id="72x64x136-float32"),
])  # fmt: skip
def test_products(m, k, n, out_dtype, layout, dtype, monkeypatch):
    """Six tiles by two programs; a bias and an activation; float32 leaves from registers."""
    monkeypatch.setattr(gemm_hopper, "multiprocessors", lambda _: 2)
    a = randn(m, k, seed=1, dtype=dtype) if layout[0] == "n" else randn(k, m, seed=1, dtype=dtype).t()
    b = randn(k, n, seed=2, dtype=dtype) if layout[1] == "n" else randn(n, k, seed=2, dtype=dtype).t()
    bias = randn(n, seed=3, dtype=dtype)
    truth = (a.double() @ b.double() + bias.double()).relu()
    for config in (gemm_hopper.GemmConfig(), gemm_hopper.GemmConfig(bn=128, stages=3, chunks=1, group=8)):
        with gluon_in_torch.kernels_on_a_cpu() as done:
            out = gemm_hopper.gemm(a, b, bias, activation="relu", out_dtype=out_dtype, config=config)
        assert done == ["gemm_kernel"] and out.dtype == (out_dtype or dtype)
        judge(out, truth)
