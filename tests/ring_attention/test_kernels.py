"""Steps by the portable kernels, in Triton's interpreter without a GPU: each kind of piece, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import GpuAccelError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.testing import assert_close_to_truth, default_floor, yardstick_attention, yardstick_attention_backward

sys.path.insert(0, str(Path(__file__).parent))
from test_schedules import NAMES  # noqa: E402


def make(seqlen: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    heads = (2, 1, 1, 2)
    return [torch.randn(1, seqlen, h, 16, generator=source).to(device, dtype) for h in heads]


@pytest.mark.parametrize(
    ("schedule", "layout", "options"),
    [
        ("kv_ring", "zigzag", {"causal": True}),
        ("kv_ring", "striped", {"causal": True}),
        ("q_ring", "contiguous", {"window_size": (9, 0)}),
    ],
    ids=["causal", "strictly-causal", "window"],
)
def test_portable_kernels_are_as_exact_as_torch(schedule: str, layout: str, options: dict, device: str):
    q, k, v, do = make(37, torch.bfloat16, device)
    found = simulate_attention(q, k, v, do=do, ranks=2, schedule=schedule, layout=layout, backend="portable", **options)
    exact = (*attention_truth(q, k, v, **options), *attention_truth_backward(do, q, k, v, **options))
    rulers = (*yardstick_attention(q, k, v, **options), *yardstick_attention_backward(do, q, k, v, **options))
    for name, x, truth, ruler in zip(NAMES, found, exact, rulers, strict=True):
        # kernels round o and gradients of each of the two steps to bf16, and the sum is rounded once more
        floor = 1e-5 if name == "lse" else 2 * default_floor(torch.bfloat16, truth.abs().max().item())
        assert_close_to_truth(name, x, truth, ruler, floor=floor)


def test_a_backend_that_cannot_run_is_an_error_on_every_rank():
    if torch.cuda.is_available():
        pytest.skip("the Hopper kernels may be there")
    q, k, v, _ = make(16, torch.bfloat16, "cpu")
    with pytest.raises(GpuAccelError, match="hopper"):
        simulate_attention(q, k, v, ranks=2, backend="hopper")
