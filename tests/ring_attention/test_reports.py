"""Public reports against other implementations, as small inputs on four gloo ranks, all together or in groups of two.

DeepSpeed #7672 (a group smaller than the world: global ranks used as places in the group), PR 5823 (all-to-all with a
batch), #5177 (lengths that do not divide); TransformerEngine #1930 (an odd token of packed documents is dropped), #2159
(shapes that differ between ranks); ring-flash-attention #46 (short documents), PR 87 (gradients of another dtype);
OpenTau #300 (NaN in the second step); sglang PR 33353 (one Ulysses rank and a ring of two: text was counted twice);
diffusers #14265 (the backward of a ring of two took the keys of the first step for all); ring-attention-pytorch #11
and #20 (several buckets of stripes), PR 9 (sends that are not posted together hang); MagiAttention #46 (one size of
padding for all).

Of all four: pytorch #147793 (causal with the math backend), #159706 (fewer tokens than chunks), accelerate PR 4177 (a
window silently full), verl #1226 (more ranks than key heads), torchtitan PR 2543 (documents that no number of chunks
divides), MagiAttention #154 (a batch), vllm #41623 (decoding drifts). In one process: ring-flash-attention #53 (a ring
of one), long-context-attention #149 (as many gradients as inputs).
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
    "stripes": {"seqlen": 40, "layout": "striped"},
    "groups of one": {"seqlen": 16, "schedule": "usp", "ulysses": 1},
    "four ranks": {"seqlen": 8, "together": True},
    "fewer tokens than chunks": {"seqlen": 6, "together": True},
    "a window": {"seqlen": 16, "together": True, "window": (3, 0)},
    "more ranks than key heads": {"seqlen": 16, "together": True, "heads": (10, 2), "schedule": "ulysses"},
    "documents of odd lengths": {
        "seqlen": 2178, "together": True, "heads": (1, 1), "layout": "documents", "documents": (137, 2041)
    },
    "a batch in a ring": {"seqlen": 16, "together": True, "batch": 2},
}  # fmt: skip


def inputs(seqlen: int, batch: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seqlen)
    return [torch.randn(batch, seqlen, heads[i], 8, generator=source).to(dtype) for i in (0, 1, 1, 0)]


def settings(report: dict) -> dict:
    usual = {"batch": 1, "heads": (4, 2), "schedule": "kv_ring", "ulysses": None, "layout": "zigzag", "documents": None}
    return {**usual, "dtype": torch.float32, "together": False, "window": (-1, -1), **report}


def in_groups(rank: int) -> dict:
    """Every report, in both groups or together, twice: what the first step leaves behind must not be in the second."""
    import torch.distributed as dist

    groups = [dist.new_group(list(range(first, first + GROUP))) for first in range(0, WORLD, GROUP)]
    few, all_of_them = TorchTransport(groups[rank // GROUP], timeout=20), TorchTransport(timeout=20)
    assert (few.rank, few.size) == (rank % GROUP, GROUP)
    found = {}
    for name, report in REPORTS.items():
        s = settings(report)
        transport = all_of_them if s["together"] else few
        cut = make_layout(s["layout"], seqlen=s["seqlen"], ranks=transport.size, documents=s["documents"])
        for _ in range(2):
            whole = inputs(s["seqlen"], s["batch"], s["dtype"], s["heads"])
            *qkv, do = (cut.shard(x, transport.rank) for x in whole)
            leaves = [x.requires_grad_() for x in qkv]
            options = {name: s[name] for name in ("schedule", "ulysses")} | {"causal": True, "window_size": s["window"]}
            o, _ = distributed_attention(*leaves, layout=cut, transport=transport, **options)
            tensors = (o.detach(), *torch.autograd.grad(o, leaves, do))
            found[name] = [gather_sequence(x, cut, transport).numpy() for x in tensors]
    found["decoding"] = decode(all_of_them)
    return found


def decode(transport: TorchTransport) -> list:
    """The last eight tokens one after the other, keys in shards that all ranks hold from the start."""
    q, k, v, _ = inputs(24, 1, torch.float32)
    cut = make_layout("zigzag", seqlen=24, ranks=WORLD)
    keys, values = (cut.shard(x, transport.rank) for x in (k, v))
    options = {"layout": cut, "transport": transport, "schedule": "tree"}
    last = q[:, 16:].contiguous().split(1, 1)
    return [distributed_attention(x.contiguous(), keys, values, **options)[0].numpy() for x in last]


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
        (attention_truth(q[:, p], k[:, p], v[:, p], causal=True, window_size=s["window"])[0],
         *attention_truth_backward(do[:, p], q[:, p], k[:, p], v[:, p], causal=True, window_size=s["window"]))
        for p in parts
    ]  # fmt: skip
    bound = 1e-6 if s["dtype"] == torch.float32 else 2e-3
    for rank in everywhere:
        for which, found, truth in zip(NAMES, rank[name], zip(*exact, strict=True), strict=True):
            whole = torch.cat(truth, 1)
            assert found.shape == whole.shape and torch.from_numpy(found).dtype == s["dtype"], which
            assert relative_error(torch.from_numpy(found), whole) < bound, which


def test_decoded_tokens_do_not_drift(everywhere):
    q, k, v, _ = inputs(24, 1, torch.float32)
    exact, _ = attention_truth(q[:, 16:], k, v)
    for rank in everywhere:
        assert relative_error(torch.cat([torch.from_numpy(x) for x in rank["decoding"]], 1), exact) < 1e-6


def test_a_ring_of_one_is_plain_attention():
    q, k, v, do = inputs(640, 1, torch.float32)
    found = simulate_attention(q, k, v, do=do, ranks=1, causal=True)
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    for which, x, truth in zip(NAMES, (found[0], *found[2:]), exact, strict=True):
        assert relative_error(x, truth) < 1e-6, which


@pytest.mark.parametrize("schedule", ["kv_ring", "concentric"])
def test_gradients_by_finite_differences(schedule: str):
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in inputs(4, 1, torch.float64, (2, 1))[:3])
    options = {"mesh": (2, 2)} if schedule == "concentric" else {}
    ring = RingAttention(4 if options else 2, schedule=schedule, simulate=True, **options)
    assert torch.autograd.gradcheck(lambda *qkv: ring(*qkv, causal=True), (q, k, v), fast_mode=True)


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
