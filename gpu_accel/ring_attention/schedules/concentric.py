"""Concentric rings (WallFacer, or StarTrail, arXiv 2407.00611): teams of ranks share their queries, and each member of
a team lets another part of the keys come by.

The tiles are those of an a x b mesh (mesh.py): rank (x, y) has the queries of its column, a team of a ranks, and works
on the keys of its row. But keys and values are not gathered: they go round a ring of b ranks, a ring for each row, all
at once, and hide behind the computation as those of the KV ring do. Partial results go back along the column.

    sent, forward:  h c (a-1) queries + (h + H) c (a-1) results in float32 + 2 hkv c (b-1) keys and values

a - 1 times the queries and results of a shard are sent in the open, for b - 1 = N / a - 1 hops instead of N - 1, so
each may take a times as long and still hides. The paper gathers keys in a team too and sends a blocks in a hop, N / a^2
hops of them: the same bytes.

Backward: queries, gradients of o and statistics are gathered, keys come round again with their gradients behind them
(those of kv_ring.py), and dQ goes back along the column.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.schedules import kv_ring
from gpu_accel.ring_attention.schedules.blocks import Blocks
from gpu_accel.ring_attention.schedules.mesh import Tile
from gpu_accel.ring_attention.schedules.ring import Ring
from gpu_accel.ring_attention.step import Partial, attend
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def ring_of(tile: Tile) -> Ring:
    """That of this rank's row, which knows the others: all ranks make the same hops and take the same kernels."""
    call, a, b = tile.call, len(tile.column), len(tile.row)
    columns = tuple(tile.runs(tuple(x * b + y for x in range(a))) for y in range(b))
    rows = [tuple(range(x * b, x * b + b)) for x in range(a)]
    rings = tuple(
        Ring(tile.transport, row, tuple(call.layout.runs(r) for r in row), place, columns)
        for row in rows
        for place in [tile.transport.rank % b]
    )
    return replace(rings[tile.transport.rank // b], rings=rings)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    tile = Tile(call, transport, q.shape[2], k.shape[2])
    ring = ring_of(tile)
    hops = ring.hops(call.mask)
    (queries,) = tile.gather((q,), tile.column)
    blocks = Blocks(ring, (k, v), hops, call)
    partial = Partial.empty(queries, v.shape[-1])
    for step in range(hops + 1):
        keys, values = blocks.get(step)
        blocks.fetch(step + 1)
        attend(partial, queries, keys, values, ring.pieces(0, -step, call.mask), call)
    blocks.close()
    return tile.results(partial, q)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    tile = Tile(call, transport, q.shape[2], k.shape[2])
    queries, gradients, lses, deltas = tile.gradients(do, q, o, lse)
    dq, dk, dv = kv_ring.backward_on(ring_of(tile), gradients, queries, k, v, lses, deltas, call)
    (dq,) = tile.sum_over((dq,), tile.column)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
