"""Blocks that come straight from their owners; simulated ranks."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import make_layout
from gpu_accel.ring_attention.attention import make_call
from gpu_accel.ring_attention.schedules import schedule
from gpu_accel.ring_attention.simulate import simulate
from gpu_accel.ring_attention.transport import LocalTransport, Pending
from gpu_accel.testing import relative_error

HEADS = (4, 2, 2, 4)


class Pushing(LocalTransport):
    """Ranks of one process that write to one another's buffers, as SymmetricTransport does."""

    pushes = True

    def mail(self):
        return _Mail(self)

    def taken(self, source: int, kind: str):
        return self.world.take(self.rank, source, kind, self.world.number(source, self.rank, kind, "asked"))


class _Mail:
    """Sends wait until they are expected, buffers hold NaN until the block is there, what is sent must not change."""

    def __init__(self, transport: Pushing) -> None:
        self.transport, self.sent = transport, []

    def expect(self, source, into):
        self.transport.world.post(self.transport.rank, source, "free", into.numel())
        into.view(torch.uint8).fill_(0xFF)  # NaN in every format

        def copy() -> None:
            for x, at in self.transport.taken(source, "sent"):
                into[at : at + x.numel()] = x.view(-1)

        return Pending(copy)

    def send(self, to, parts, into):
        assert self.transport.taken(to, "free") == into.numel()
        assert all(x.is_contiguous() and x.dtype == into.dtype for x, _ in parts)
        copies = [(x.clone(), at) for x, at in parts]
        self.sent += zip(parts, copies, strict=True)
        self.transport.world.post(self.transport.rank, to, "sent", copies)

    def close(self):
        assert all(torch.equal(x, copy) for (x, _), (copy, _) in self.sent)


def inputs(length: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, h, 8, generator=source, dtype=torch.float64) for h in HEADS]


def run(ranks: int, length: int, layout: str, way: str, options: dict, name: str = "kv_ring"):
    """Both passes on every rank, twice, so that buffers are used again."""
    cut = make_layout(layout, seqlen=length, ranks=ranks)
    whole = inputs(length)

    def rank(local: LocalTransport):
        transport = local if way == "passed on" else Pushing(local.world, local.rank)
        q, k, v, do = (cut.shard(x, local.rank) for x in whole)
        if way == "pushed, strided" and local.rank == 0:  # each rank for itself
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        for _ in range(2):
            call = make_call(q, k, v, cut, **options)
            transport.agree(call.statement(name, q, k, v))
            o, lse = schedule(name).forward(q, k, v, call, transport)
            grads = schedule(name).backward(do, q, k, v, o, lse, call, transport)
        return o, *grads

    return cut, simulate(rank, ranks)


@pytest.mark.parametrize("way", ["pushed", "pushed, strided"])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window_size": (9, 0)}], ids=str)
@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (5, "zigzag"), (3, "striped")])
def test_blocks_from_their_owners_give_what_one_device_gives(ranks: int, layout: str, options: dict, way: str):
    cut, found = run(ranks, 37, layout, way, options)
    q, k, v, do = inputs(37)
    exact = (attention_truth(q, k, v, **options)[0], *attention_truth_backward(do, q, k, v, **options))
    for i, truth in enumerate(exact):
        assert relative_error(cut.unshard([tensors[i] for tensors in found]), truth) < 1e-12


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (9, 0)}], ids=str)
def test_rings_side_by_side(options: dict):
    """Each with queries of a team; under a window one of them could stop earlier than the others do."""
    cut, found = run(6, 37, "contiguous", "pushed", {**options, "mesh": (2, 3)}, "concentric")
    q, k, v, do = inputs(37)
    exact = (attention_truth(q, k, v, **options)[0], *attention_truth_backward(do, q, k, v, **options))
    for i, truth in enumerate(exact):
        assert relative_error(cut.unshard([tensors[i] for tensors in found]), truth) < 1e-12


def test_hops_are_waited_for_one_by_one_where_nothing_is_to_overlap():
    cut, found = run(4, 24, "zigzag", "pushed", {"causal": True, "overlap": False})
    exact, _ = attention_truth(*inputs(24)[:3], causal=True)
    assert relative_error(cut.unshard([tensors[0] for tensors in found]), exact) < 1e-12


def test_keys_in_eight_bits_are_pushed_as_the_bytes_that_they_travel_as():
    options = {"causal": True, "wire": torch.float8_e4m3fn}
    ways = [run(3, 24, "zigzag", way, options)[1] for way in ("pushed", "passed on")]
    for pushed, passed in zip(*ways, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pushed, passed, strict=True))
