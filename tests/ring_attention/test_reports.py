"""Public reports against other implementations, as small inputs on four gloo ranks in two groups of two.

DeepSpeed #7672 (a group smaller than the world: global ranks used as places in the group), PR 5823 (all-to-all with a
batch), #5177 (lengths that do not divide); TransformerEngine #1930 (an odd token of packed documents is dropped);
ring-flash-attention #46 (short documents), PR 87 (gradients of another dtype); OpenTau #300 (NaN in the second step).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.transport import TorchTransport
from gpu_accel.testing import relative_error

sys.path.insert(0, str(Path(__file__).parent))
from processes import results, run_ranks  # noqa: E402

WORLD, GROUP, NAMES = 4, 2, ("o", "dq", "dk", "dv")
REPORTS = {
    "a group of the world": {"seqlen": 16},
    "a batch in an all-to-all": {"seqlen": 16, "batch": 3, "schedule": "ulysses"},
    "a length that does not divide": {"seqlen": 13, "schedule": "ulysses"},
    "an odd token": {"seqlen": 7, "layout": "documents", "documents": (4, 3)},
    "short documents": {"seqlen": 8, "layout": "documents", "documents": (4, 4)},
    "no document divides": {"seqlen": 41, "layout": "documents", "documents": (17, 1, 23)},
    "float16": {"seqlen": 16, "dtype": torch.float16},
}


def inputs(seqlen: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seqlen)
    return [torch.randn(batch, seqlen, heads, 8, generator=source).to(dtype) for heads in (4, 2, 2, 4)]


def settings(report: dict) -> dict:
    return {"batch": 1, "schedule": "kv_ring", "layout": "zigzag", "documents": None, "dtype": torch.float32, **report}


def in_groups(rank: int) -> dict:
    """Every report, in each of the two groups, twice: what the first step leaves behind must not be in the second."""
    import torch.distributed as dist

    groups = [dist.new_group(list(range(first, first + GROUP))) for first in range(0, WORLD, GROUP)]
    transport = TorchTransport(groups[rank // GROUP], timeout=20)
    assert (transport.rank, transport.size) == (rank % GROUP, GROUP)
    found = {}
    for name, report in REPORTS.items():
        s = settings(report)
        cut = make_layout(s["layout"], seqlen=s["seqlen"], ranks=GROUP, documents=s["documents"])
        for _ in range(2):
            *qkv, do = (cut.shard(x, transport.rank) for x in inputs(s["seqlen"], s["batch"], s["dtype"]))
            leaves = [x.requires_grad_() for x in qkv]
            o, _ = distributed_attention(*leaves, layout=cut, transport=transport, schedule=s["schedule"], causal=True)
            tensors = (o.detach(), *torch.autograd.grad(o, leaves, do))
            found[name] = [gather_sequence(x, cut, transport).numpy() for x in tensors]
    return found


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory):
    q, k, v, do = inputs(8, 1, torch.float32)
    o = RingAttention(2, simulate=True)(*(x.transpose(1, 2).requires_grad_() for x in (q, k, v)))
    torch.autograd.grad(o.sum(), o)  # imports, before processes are forked
    return results(run_ranks(in_groups, WORLD, tmp_path_factory.mktemp("reports")))


@pytest.mark.parametrize("name", REPORTS)
def test_equals_one_device(name: str, everywhere):
    s = settings(REPORTS[name])
    q, k, v, do = inputs(s["seqlen"], s["batch"], s["dtype"])
    parts = [slice(0, s["seqlen"])]
    if s["documents"]:
        ends = torch.tensor(s["documents"]).cumsum(0).tolist()
        parts = [slice(end - n, end) for n, end in zip(s["documents"], ends, strict=True)]
    exact = [
        (attention_truth(q[:, p], k[:, p], v[:, p], causal=True)[0],
         *attention_truth_backward(do[:, p], q[:, p], k[:, p], v[:, p], causal=True))
        for p in parts
    ]  # fmt: skip
    bound = 1e-6 if s["dtype"] == torch.float32 else 2e-3
    for rank in everywhere:
        for which, found, truth in zip(NAMES, rank[name], zip(*exact, strict=True), strict=True):
            whole = torch.cat(truth, 1)
            assert found.shape == whole.shape and torch.from_numpy(found).dtype == s["dtype"], which
            assert relative_error(torch.from_numpy(found), whole) < bound, which
