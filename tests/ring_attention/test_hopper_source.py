"""The Hopper forward that merges, as it stands, run in torch on a CPU (`gluon_in_torch`): two steps of a ring."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.ring_attention import hopper_merge
from gpu_accel.testing import generator
from tests import gluon_in_torch


@pytest.mark.parametrize(("head_dim", "options"), [
    pytest.param(64, {}, id="64"),
    pytest.param(128, dict(window_right=0), id="128-causal"),
    pytest.param(64, dict(window_left=70, window_right=10, softcap=5.0), id="64-window-softcap"),
])  # fmt: skip
def test_two_steps(head_dim, options):
    """The first step leaves (o, lse), the second merges into them and rounds the rows that are done."""
    queries, keys, heads, row = 200, (130, 100), 2, 3

    def randn(length: int, seed: int) -> torch.Tensor:
        return torch.randn(1, length, heads, head_dim, generator=generator(seed, "cpu")).bfloat16()

    q, parts = randn(queries, 1), [(randn(n, 2 + n), randn(n, 3 + n)) for n in keys]
    o = torch.full((1, row + queries, heads, head_dim), torch.nan)
    lse = torch.full((1, heads, row + queries), torch.nan)
    result = torch.full(o.shape, torch.nan, dtype=torch.bfloat16)
    with gluon_in_torch.kernels_on_a_cpu() as ran:
        for i, (k, v) in enumerate(parts):
            done = (64, 192) if i else (0, 0)
            rounded = hopper_merge.forward_merge(
                q, k, v, o, lse, result, row=row, first=not i, done=done, softmax_scale=0.1, **options
            )
    assert ran == ["attention_merge_kernel"] * 2 and rounded == (64, 192)
    at = slice(row + 64, row + 192)
    assert result[:, :row].isnan().all() and not result[:, at].isnan().any()
    found = o[:, row:].clone()
    found[:, 64:192] = result[:, at].float()
    weights, values = [], []
    for k, v in parts:
        s = torch.einsum("bthd,bshd->bhts", q.double(), k.double()) * 0.1
        s = 5.0 * torch.tanh(s / 5.0) if "softcap" in options else s
        ahead = torch.arange(k.shape[1]) - torch.arange(queries)[:, None] - (k.shape[1] - queries)
        if "window_right" in options:
            s = s.masked_fill(ahead > options["window_right"], -torch.inf)
        if "window_left" in options:
            s = s.masked_fill(-ahead > options["window_left"], -torch.inf)
        weights.append(s)
        values.append(v.double())
    s = torch.cat(weights, -1)
    right = torch.einsum("bhts,bshd->bthd", s.softmax(-1).nan_to_num(0.0), torch.cat(values, 1))
    torch.testing.assert_close(lse[:, :, row:].double(), s.logsumexp(-1), rtol=1e-5, atol=1e-5)
    # the probabilities and a part of the result are rounded, each by a third of eps where errors are spread evenly
    assert float((found - right).norm()) <= 0.5 * torch.finfo(torch.bfloat16).eps * float(right.norm())
