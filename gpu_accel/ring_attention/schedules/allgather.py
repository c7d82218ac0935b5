"""All-gather of keys and values (Llama 3, arXiv 2407.21783, section 3.3.2): one collective, then ordinary attention.

Every rank holds all keys for a while, in the order of the sequence, so a causal shard of two chunks is two kernel calls
and nothing is merged: the best numerics, for memory of O(seqlen). Nothing is hidden behind computation within one call.
Backward gathers again, computes the gradients of all keys from its own queries, in float32, and every rank adds up its
share in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Run, block_runs
from gpu_accel.ring_attention.masks import pieces
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.step import Running, add_gradients, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    keys, _ = _key_runs(call, q.device)
    running = Running(q, v.shape[-1], [pieces(call.layout.runs(transport.rank), keys, call.mask)], call)
    running.attend(0, *_gather(k, v, call, transport))
    return running.finish()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    keys, order = _key_runs(call, q.device)
    found = pieces(call.layout.runs(transport.rank), keys, call.mask)
    whole = _gather(k, v, call, transport)
    dtype = partial_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, *whole))
    add_gradients((dq, dk, dv), do, q, *whole, lse, delta_of(do, o), found, call)
    packed = Message((k, v))
    outgoing = dk.new_empty((call.ranks, packed.numel))
    shares = zip(_split(dk, order, call), _split(dv, order, call), strict=True)
    for rank, share in enumerate(shares):
        packed.pack(share, outgoing[rank])
    total = add_in_order(transport.all_to_all(outgoing).wait())
    dk, dv = packed.unpack(total)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def add_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, first to last: the same bits every time."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _key_runs(call: Call, device: torch.device) -> tuple[tuple[Run, ...], Tensor | None]:
    """Runs of all keys, and the order of rows that gives them. Striped queries meet striped keys, so these stay."""
    layout = call.layout
    if layout.name == "striped":
        length = layout.local_length
        return tuple(run.moved(r * length) for r in range(call.ranks) for run in layout.runs(r)), None
    return block_runs(layout, range(call.ranks), device)


def _gather(k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    """All keys and values, (batch, ranks * local_length, heads_kv, dim), in the order of `_key_runs`."""
    packed = Message((k, v), call.wire)
    mine = torch.empty(packed.numel, dtype=packed.dtype, device=k.device)
    packed.pack((k, v), mine)
    shards = [packed.unpack(row, k.dtype) for row in transport.all_gather(mine).wait()]
    order = _key_runs(call, k.device)[1]
    keys, values = (torch.cat(parts, 1) for parts in zip(*shards, strict=True))
    if order is None:
        return keys, values
    return keys.index_select(1, order), values.index_select(1, order)


def _split(x: Tensor, order: Tensor | None, call: Call) -> tuple[Tensor, ...]:
    """Back to the shards of each rank."""
    if order is not None:
        x = torch.empty_like(x).index_copy_(1, order, x)
    return x.split(call.layout.local_length, 1)
