"""Unified sequence parallelism (USP, arXiv 2405.07719): Ulysses within groups of u ranks, a KV ring across them.

Ranks g u ... g u + u - 1 are group g (near one another). An all-to-all in the group gives each member all tokens of the
group for its share of the heads; members with the same share form a ring over the N / u groups. u = N is Ulysses, u = 1
the KV ring. Tokens of a group are put in order of the sequence, so neighbouring chunks need no merge.
"""

from __future__ import annotations

from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import block_runs
from gpu_accel.ring_attention.schedules.heads import to_heads, to_sequence
from gpu_accel.ring_attention.schedules.kv_ring import backward_on, forward_on
from gpu_accel.ring_attention.schedules.ring import Ring
from gpu_accel.ring_attention.sizes import default_degree, share_heads
from gpu_accel.ring_attention.step import delta_of
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport, *, degree: int | None = None
) -> tuple[Tensor, Tensor]:
    groups = _Groups(call, transport, q, k, degree)
    tensors = [(q, groups.shares.queries), (k, groups.shares.keys), (v, groups.shares.keys)]
    q_, k_, v_ = groups.to_heads(tensors, keys=2)
    o, lse = forward_on(groups.ring, q_, k_, v_, call)
    queries = groups.shares.queries
    (o,) = groups.to_sequence([(o, queries, q.shape[2])])
    (lse,) = groups.to_sequence([(lse.transpose(1, 2)[..., None].contiguous(), queries, q.shape[2])])
    return o, lse[..., 0].transpose(1, 2).contiguous()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport,
    *, degree: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups = _Groups(call, transport, q, k, degree)
    queries, keys = groups.shares.queries, groups.shares.keys
    do_, q_, k_, v_ = groups.to_heads([(do, queries), (q, queries), (k, keys), (v, keys)], keys=2)
    stats = [x.transpose(1, 2)[..., None].contiguous() for x in (lse, delta_of(do, o))]
    lse_, delta = (x[..., 0].transpose(1, 2) for x in groups.to_heads([(x, queries) for x in stats]))
    dq, dk, dv = backward_on(groups.ring, do_, q_, k_, v_, lse_, delta, call)
    dq, dk, dv = groups.to_sequence([(dq, queries, q.shape[2]), (dk, keys, k.shape[2]), (dv, keys, k.shape[2])])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Groups:
    """This rank's group, its share of the heads, and the ring it is on."""

    def __init__(self, call: Call, transport: Transport, q: Tensor, k: Tensor, degree: int | None) -> None:
        u = degree or call.ulysses or default_degree(call.ranks, k.shape[2])
        group, member = divmod(transport.rank, u)
        self.transport, self.wire = transport, call.wire
        self.ranks = tuple(range(group * u, group * u + u))
        self.shares = share_heads(q.shape[2], k.shape[2], u)
        blocks = [block_runs(call.layout, range(g * u, g * u + u), q.device) for g in range(call.ranks // u)]
        self.order = blocks[group][1]
        members = tuple(g * u + member for g in range(call.ranks // u))
        self.ring = Ring(transport, members, tuple(runs for runs, _ in blocks), group)

    def to_heads(self, tensors, keys: int = 0) -> list[Tensor]:
        """`keys`: how many of the tensors, the last ones, are keys or values, which may travel as something else."""
        rest, wire = len(tensors) - keys, self.wire
        if not keys or wire in (None, tensors[-1][0].dtype):
            return to_heads(tensors, self.order, self.ranks, self.transport)
        return [
            *to_heads(tensors[:rest], self.order, self.ranks, self.transport),
            *to_heads(tensors[rest:], self.order, self.ranks, self.transport, wire),
        ]

    def to_sequence(self, tensors) -> list[Tensor]:
        return to_sequence(tensors, self.order, self.ranks, self.transport)
