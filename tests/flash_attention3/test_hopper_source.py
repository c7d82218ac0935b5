"""Hopper kernels as they stand, run in torch on a CPU (`gluon_in_torch`): partitions in turn, each barrier counted.

What is seen: coordinates, masks, the order of blocks, rings of K, V and Q, the queue of tiles, ping-pong, what
consumers hand on to each other, the way out.
"""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import hopper, hopper_backward
from gpu_accel.testing import generator
from tests import gluon_in_torch

CASES = {
    "64": dict(head_dim=64),
    "128-causal-fp16": dict(head_dim=128, window_right=0, dtype=torch.float16),
    "64-window": dict(head_dim=64, window_left=70, window_right=10),
    "128-causal-softcap": dict(head_dim=128, window_right=0, softcap=5.0),
    "256-causal-more-queries": dict(head_dim=256, window_right=0, seqlen_q=330),
    "96-fills-up": dict(head_dim=96, batch=2, heads=4),
}


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, "cpu")).to(dtype)


def truth(q, k, v, scale, window_left=-1, window_right=-1, softcap=0.0):
    """o and log-sum-exp in float64; rows that see nothing give 0 and -inf."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bthd,bshd->bhts", q, k) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    row, col = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    unseen = torch.zeros(s.shape[2:], dtype=torch.bool)
    if window_right >= 0:
        unseen |= col > row + window_right
    if window_left >= 0:
        unseen |= col < row - window_left
    s = s.masked_fill(unseen, -torch.inf)
    return torch.einsum("bhts,bshd->bthd", s.softmax(-1).nan_to_num(0.0), v), s.logsumexp(-1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward(case):
    case = dict(batch=1, seqlen_q=200, seqlen_k=260, heads=2, dtype=torch.bfloat16) | case
    batch, seqlen_q, seqlen_k, heads, head_dim, dtype = (
        case.pop(name) for name in ("batch", "seqlen_q", "seqlen_k", "heads", "head_dim", "dtype")
    )
    q = randn(batch, seqlen_q, heads, head_dim, seed=1, dtype=dtype)
    k, v = (randn(batch, seqlen_k, 1, head_dim, seed=s, dtype=dtype) for s in (2, 3))
    with gluon_in_torch.kernels_on_a_cpu() as done:
        o, lse, *_ = hopper.forward(q, k, v, softmax_scale=0.1, **case)
    assert done == ["attention_forward_kernel"]
    right, right_lse = truth(q, k, v, 0.1, **case)
    # the probabilities and the result are rounded, each by a third of eps where errors are spread evenly
    assert float((o - right).norm()) <= 0.5 * torch.finfo(dtype).eps * float(right.norm())
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kernel", "head_dim", "options"), [
    pytest.param("attention_backward_apart_kernel", 64, {}, id="apart-64"),
    pytest.param("attention_backward_apart_kernel", 128, dict(window_right=0), id="apart-128-causal"),
    pytest.param("attention_backward_kernel", 64, dict(window_left=70, window_right=10), id="64-window"),
    pytest.param("attention_backward_kernel", 128, dict(window_right=0, softcap=5.0), id="128-causal-softcap"),
])  # fmt: skip
def test_backward(kernel, head_dim, options):
    q, do = (randn(1, 200, 2, head_dim, seed=s, dtype=torch.bfloat16) for s in (1, 4))
    k, v = (randn(1, 260, 1, head_dim, seed=s, dtype=torch.bfloat16) for s in (2, 3))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = truth(*leaves, 0.1, **options)
    right = torch.autograd.grad(o, leaves, do.double())
    o, lse = o.detach().bfloat16(), lse.detach().float()
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = hopper_backward.backward(do, q, k, v, o, lse, softmax_scale=0.1, **options)
    assert done == [kernel]
    for name, one, other in zip(("dq", "dk", "dv"), mine, right, strict=True):
        # o, P, dS and the result are rounded, each by a third of eps where errors are spread evenly
        assert float((one - other).norm()) <= torch.finfo(torch.bfloat16).eps * float(other.norm()), name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_forward(causal):
    """NaN behind the last sequence, in q, k and v."""
    lengths, slack = [70, 0, 1, 190], 9
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total, window = sum(lengths), dict(window_right=0) if causal else {}
    q, k, v = (randn(total + slack, h, 64, seed=h, dtype=torch.bfloat16) for h in (2, 1, 1))
    for x in (q, k, v):
        x[total:] = torch.nan
    with gluon_in_torch.kernels_on_a_cpu() as done:
        o, _, *_ = hopper.forward(q, k, v, softmax_scale=0.1, cu_seqlens_q=edges, cu_seqlens_k=edges, **window)
    assert done[-1] == "attention_forward_kernel"
    for start, stop in zip(edges.tolist(), edges.tolist()[1:], strict=False):
        if stop > start:
            right, _ = truth(*(x[None, start:stop] for x in (q, k, v)), 0.1, **window)
            assert float((o[start:stop] - right[0]).norm()) <= 4e-3 * float(right.norm())
