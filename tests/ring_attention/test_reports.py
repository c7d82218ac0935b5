"""Public reports against other implementations, as small inputs on four gloo ranks in two groups of two.

DeepSpeed #7672 (a group smaller than the world: global ranks used as places in the group), PR 5823 (all-to-all with a
batch), #5177 (lengths that do not divide); TransformerEngine #1930 (an odd token of packed documents is dropped), #2159
(shapes that differ between ranks); ring-flash-attention #46 (short documents), PR 87 (gradients of another dtype);
OpenTau #300 (NaN in the second step); sglang PR 33353 (one Ulysses rank and a ring of two: text was counted twice).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.simulate import simulate, simulate_attention
from gpu_accel.ring_attention.transport import TorchTransport, World
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
    "many heads": {"seqlen": 64, "heads": (16, 16)},
    "groups of one": {"seqlen": 16, "schedule": "usp", "ulysses": 1},
}


def inputs(seqlen: int, batch: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seqlen)
    return [torch.randn(batch, seqlen, heads[i], 8, generator=source).to(dtype) for i in (0, 1, 1, 0)]


def settings(report: dict) -> dict:
    usual = {"batch": 1, "heads": (4, 2), "schedule": "kv_ring", "ulysses": None, "layout": "zigzag", "documents": None}
    return {**usual, "dtype": torch.float32, **report}


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
            whole = inputs(s["seqlen"], s["batch"], s["dtype"], s["heads"])
            *qkv, do = (cut.shard(x, transport.rank) for x in whole)
            leaves = [x.requires_grad_() for x in qkv]
            options = {"schedule": s["schedule"], "ulysses": s["ulysses"], "causal": True}
            o, _ = distributed_attention(*leaves, layout=cut, transport=transport, **options)
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
    q, k, v, do = inputs(s["seqlen"], s["batch"], s["dtype"], s["heads"])
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


def test_a_prefix_that_every_rank_holds_is_refused_and_not_counted_twice():
    """sglang PR 33327: keys of a text that is not in shards, joined to the shards of an image."""
    q, k, v, _ = inputs(16, 1, torch.float32)
    cut = make_layout("zigzag", seqlen=16, ranks=2)

    def one_rank(transport):
        shards = [cut.shard(x, transport.rank) for x in (q, k, v)]
        joined = [shards[0], *(torch.cat([x[:, :3], part], 1) for x, part in zip((k, v), shards[1:], strict=True))]
        return distributed_attention(*joined, layout=cut, transport=transport)

    world = World(2)
    with pytest.raises(InvalidInputError, match="k has 11 rows, but a shard of this layout has 8"):
        simulate(one_rank, 2, world=world)
    assert world.bytes_sent == [0, 0]


def test_a_batch_gives_the_same_loss_on_any_number_of_ranks():
    """ring-flash-attention #67: the loss of one batch on rings of 1, 2, 4 and 8."""
    q, k, v, do = inputs(48, 2, torch.bfloat16)
    losses = [
        float((simulate_attention(q, k, v, ranks=ranks, causal=True)[0].double() * do.double()).sum())
        for ranks in (1, 2, 4, 8)
    ]
    exact = float((attention_truth(q, k, v, causal=True)[0] * do.double()).sum())
    # results are rounded to 16 bits once, at the end, so what rounding costs is the same for all
    assert max(losses) - min(losses) < 0.02 * abs(losses[0] - exact), (losses, exact)
