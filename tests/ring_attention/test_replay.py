"""One rank of a ring, computed alone."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import make_layout
from gpu_accel.ring_attention.replay import Replay, replay_rank
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.ring_attention.step import Partial
from gpu_accel.ring_attention.transport import LocalTransport, World
from gpu_accel.testing import relative_error


@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window_size": (9, 0)}], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_with_the_keys_of_all_ranks_it_is_the_ring(layout: str, options: dict):
    ranks, length = 5, 47
    source = torch.Generator().manual_seed(0)
    *whole, do = (torch.randn(1, length, heads, 8, generator=source, dtype=torch.float64) for heads in (4, 2, 2, 4))
    cut = make_layout(layout, seqlen=length, ranks=ranks)
    shards = [[cut.shard(x, r) for x in whole] for r in range(ranks)]
    replays = [
        Replay(*shards[r], layout=cut, rank=r, keys=lambda s: (shards[s][1], shards[s][2]), **options)
        for r in range(ranks)
    ]
    found = [replay.forward() for replay in replays]
    exact, lse = attention_truth(*whole, **options)
    assert relative_error(cut.unshard([o for o, _ in found]), exact) < 1e-12
    assert relative_error(cut.unshard([x for _, x in found], dim=2), lse) < 1e-12
    dq = attention_truth_backward(do, *whole, **options)[0]
    for _ in range(2):  # buffers are used again
        grads = [replays[r].backward(cut.shard(do, r), *found[r]) for r in range(ranks)]
        assert relative_error(cut.unshard(grads), dq) < 1e-12


@pytest.mark.parametrize("wire", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_keys_that_travel_as_something_else(wire: torch.dtype):
    """A rank of its own: its steps decode what a ring's would, and give the same."""
    cut, source = make_layout("zigzag", seqlen=40, ranks=4), torch.Generator().manual_seed(0)
    *whole, do = (torch.randn(1, 40, heads, 16, generator=source).bfloat16() for heads in (4, 2, 2, 4))
    shards = [[cut.shard(x, r) for x in whole] for r in range(4)]
    found = [
        Replay(*shards[r], layout=cut, rank=r, keys=lambda s: (shards[s][1], shards[s][2]), causal=True, wire=wire)
        for r in range(4)
    ]
    o, lse, dq, *_ = simulate_attention(*whole, do=do, ranks=4, causal=True, wire=wire)
    results = [replay.forward() for replay in found]
    assert torch.equal(cut.unshard([x for x, _ in results]), o)
    assert torch.equal(cut.unshard([x for _, x in results], dim=2), lse)
    grads = [replay.backward(cut.shard(do, r), *results[r]) for r, replay in enumerate(found)]
    assert torch.equal(cut.unshard(grads), dq)


def test_without_merges_it_is_the_same_pieces():
    cut = make_layout("zigzag", seqlen=40, ranks=4)
    q, k, v = (torch.randn(1, 10, 2, 8, dtype=torch.float64) for _ in range(3))
    replay = Replay(q, k, v, layout=cut, rank=2, causal=True)
    steps = [ring_of(replay.call, LocalTransport(World(4), 2)).pieces(0, -step, replay.call.mask) for step in range(4)]
    found, total = replay.kernels(), Partial.empty(q, 8)
    for piece, (o, lse) in zip([piece for step in steps for piece in step], found, strict=True):
        total.add(o, lse, slice(piece.q0, piece.q0 + piece.sq))
    assert torch.equal(total.o, replay.forward()[0])


def test_hundreds_of_ranks_need_no_keys_but_their_own():
    cut = make_layout("zigzag", seqlen=512 * 4, ranks=512)
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    o, lse = replay_rank(q, k, v, layout=cut, rank=200, causal=True)
    assert o.shape == q.shape and o.isfinite().all() and lse.isfinite().all()
    dq = Replay(q, k, v, layout=cut, rank=200, causal=True).backward(q, o, lse)
    assert dq.shape == q.shape and dq.isfinite().all()


@pytest.mark.parametrize("rank", [-1, 2, True, 0.0, None], ids=str)
def test_ranks_that_are_not_there(rank):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InvalidInputError, match="rank must be a whole number from 0 to 1"):
        replay_rank(q, q, q, layout=make_layout("zigzag", seqlen=8, ranks=2), rank=rank)
