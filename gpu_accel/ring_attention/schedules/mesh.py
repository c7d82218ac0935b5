"""2-D tiling of queries and keys (Mesh-Attention, arXiv 2512.20968): an a x b mesh of ranks, N = a b.

Rank (x, y) = x b + y gathers the queries of its column, (0, y) ... (a-1, y), and the keys and values of its row,
(x, 0) ... (x, b-1), and computes that tile of the score matrix. Every (query block, key block) pair is in one tile.
Partial results go back along the column and are merged in rank order.

    sent, forward:  h c (a-1) queries + (h + H) c (a-1) results in float32 + 2 hkv c (b-1) keys and values

instead of 2 hkv c (N-1) for a ring. With heads = heads_kv the least is near a = b; with grouped heads keys are the
small side, and the best a falls as sqrt(heads_kv / heads), down to a ring's a = 1. The default is the best a. The whole
tile is gathered before it is computed: communication is not hidden within a call, and memory grows with a and b.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Run
from gpu_accel.ring_attention.masks import Piece, pieces
from gpu_accel.ring_attention.schedules.allgather import add_in_order
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.sizes import default_mesh
from gpu_accel.ring_attention.step import Partial, add_gradients, attend, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


class Tile:
    """What this rank works on: the queries of its column, the keys of its row."""

    def __init__(self, call: Call, transport: Transport, heads: int, heads_kv: int) -> None:
        a, b = call.mesh or default_mesh(call.ranks, heads, heads_kv)
        x, y = divmod(transport.rank, b)
        self.transport, self.call = transport, call
        self.column = tuple(i * b + y for i in range(a))
        self.row = tuple(x * b + j for j in range(b))

    def runs(self, ranks: tuple[int, ...]) -> tuple[Run, ...]:
        """Of the shards of these ranks, one behind the other."""
        length = self.call.layout.local_length
        return tuple(run.moved(i * length) for i, r in enumerate(ranks) for run in self.call.layout.runs(r))

    def pieces(self) -> tuple[Piece, ...]:
        return pieces(self.runs(self.column), self.runs(self.row), self.call.mask)

    def gather(self, tensors: tuple[Tensor, ...], ranks: tuple[int, ...], wire: torch.dtype | None = None):
        """Shards (batch, rows, ...) of the ranks, one behind the other along the rows."""
        packed = Message(tensors, wire)
        mine = torch.empty(packed.numel, dtype=packed.dtype, device=tensors[0].device)
        packed.pack(tensors, mine)
        shards = [packed.unpack(row, tensors[0].dtype) for row in self.transport.all_gather(mine, ranks).wait()]
        return [torch.cat(parts, 1) for parts in zip(*shards, strict=True)]

    def scatter(self, tensors: tuple[Tensor, ...], ranks: tuple[int, ...]) -> tuple[Message, Tensor]:
        """Each rank's rows back to it: what this one gets, (len(ranks), numel), in rank order."""
        parts = [x.tensor_split(len(ranks), 1) for x in tensors]  # equal ones, also of no rows
        packed = Message([x[0] for x in parts])
        outgoing = tensors[0].new_empty((len(ranks), packed.numel))
        for i in range(len(ranks)):
            packed.pack([x[i] for x in parts], outgoing[i])
        return packed, self.transport.all_to_all(outgoing, ranks).wait()

    def results(self, partial: Partial, q: Tensor) -> tuple[Tensor, Tensor]:
        """(o, lse) of this rank's queries from what the ranks of its column have found, merged in rank order."""
        packed, arrived = self.scatter((partial.o, partial.lse.transpose(1, 2)), self.column)
        total = Partial.empty(q, partial.o.shape[-1])
        for part in arrived:
            o, lse = packed.unpack(part)
            total.add(o, lse.transpose(1, 2))
        return total.o.to(q.dtype), total.lse

    def gradients(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, do, lse and delta of the column."""
        queries, gradients = self.gather((q, do), self.column)
        stats = (lse.transpose(1, 2), delta_of(do, o).transpose(1, 2))
        lses, deltas = (x.transpose(1, 2) for x in self.gather(stats, self.column))
        return queries, gradients, lses, deltas

    def sum_over(self, tensors: tuple[Tensor, ...], ranks: tuple[int, ...]) -> list[Tensor]:
        """This rank's rows of float32 gradients of all these ranks' rows, added up in rank order."""
        packed, arrived = self.scatter(tensors, ranks)
        return packed.unpack(add_in_order(arrived))


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    tile = Tile(call, transport, q.shape[2], k.shape[2])
    (queries,) = tile.gather((q,), tile.column)
    keys, values = tile.gather((k, v), tile.row, call.wire)
    partial = Partial.empty(queries, v.shape[-1])
    attend(partial, queries, keys, values, tile.pieces(), call)
    return tile.results(partial, q)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    tile = Tile(call, transport, q.shape[2], k.shape[2])
    queries, gradients, lses, deltas = tile.gradients(do, q, o, lse)
    keys, values = tile.gather((k, v), tile.row, call.wire)
    dtype = partial_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (queries, keys, values))
    add_gradients((dq, dk, dv), gradients, queries, keys, values, lses, deltas, tile.pieces(), call)
    (dq,) = tile.sum_over((dq,), tile.column)
    dk, dv = tile.sum_over((dk, dv), tile.row)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
