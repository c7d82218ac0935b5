"""The Q ring (pass-Q, arXiv 2411.01783): keys and values stay, queries go round with what they have found so far.

For few new tokens over many cached ones, or few query heads a key head, queries are the smaller thing to send. Their
partial results (o and lse, float32) follow one step behind, merged at every stop, and a last hop takes them home, as
the sums of the gradients do in the backward of the KV ring. Backward: q, dO, lse and delta go round, the sum of dQ
follows, and dK and dV stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.step import Partial, add_gradients, attend, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    ring = ring_of(call, transport)
    hops = ring.hops(call.mask, keys_travel=False)
    partial = Partial.empty(q, v.shape[-1])
    if hops == 0:
        attend(partial, q, k, v, ring.pieces(0, 0, call.mask), call)
        return partial.o.to(q.dtype), partial.lse
    results = Message((partial.o, partial.lse))
    here, there = transport.buffers(2, (q.numel(),), q)
    sums, spare = transport.buffers(2, (results.numel,), q, partial.o.dtype)
    here.view(q.shape).copy_(q)
    queries, arriving = q, None
    for step in range(hops + 1):
        pending = None
        if step < hops:
            pending = call.start(transport.exchange(here, there, to=ring.rank(1), source=ring.rank(-1)))
        found = Partial.empty(q, v.shape[-1])
        attend(found, queries, k, v, ring.pieces(-step, 0, call.mask), call)
        if arriving is None:
            results.pack((found.o, found.lse), sums)
        else:
            arriving.wait()
            sums, spare = spare, sums
            total_o, total_lse = results.unpack(sums)
            Partial(total_o, total_lse).add(found.o, found.lse)
        if pending is not None:
            pending.wait()
            here, there = there, here
            queries = here.view(q.shape)
            arriving = transport.exchange(sums, spare, to=ring.rank(1), source=ring.rank(-1))
    transport.exchange(sums, spare, to=ring.rank(-hops), source=ring.rank(hops)).wait()
    o, lse = results.unpack(spare)
    return o.to(q.dtype, copy=True), lse.clone()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    ring = ring_of(call, transport)
    hops = ring.hops(call.mask, keys_travel=False)
    dtype = partial_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    delta = delta_of(do, o)
    if hops == 0:
        add_gradients((dq, dk, dv), do, q, k, v, lse, delta, ring.pieces(0, 0, call.mask), call)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    wide, narrow = Message((q, do)), Message((lse, delta))
    here, there = transport.buffers(2, (wide.numel,), q)
    stats, next_stats = transport.buffers(2, (narrow.numel,), q, dtype)
    sums, spare = transport.buffers(2, (q.numel(),), q, dtype)
    wide.pack((q, do), here)
    narrow.pack((lse, delta), stats)
    current, statistics, arriving = [q, do], [lse, delta], None
    for step in range(hops + 1):
        pending = []
        if step < hops:
            ends = {"to": ring.rank(1), "source": ring.rank(-1)}
            pending = [call.start(transport.exchange(a, b, **ends)) for a, b in ((here, there), (stats, next_stats))]
        part = torch.zeros_like(dq)
        found = ring.pieces(-step, 0, call.mask)
        add_gradients((part, dk, dv), current[1], current[0], k, v, statistics[0], statistics[1], found, call)
        if arriving is None:
            sums.view(q.shape).copy_(part)
        else:
            arriving.wait()
            sums, spare = spare, sums
            sums.view(q.shape).add_(part)
        if pending:
            for one in pending:
                one.wait()
            here, there, stats, next_stats = there, here, next_stats, stats
            current, statistics = wide.unpack(here), narrow.unpack(stats)
            arriving = transport.exchange(sums, spare, to=ring.rank(1), source=ring.rank(-1))
    transport.exchange(sums, spare, to=ring.rank(-hops), source=ring.rank(hops)).wait()
    return spare.view(q.shape).to(q.dtype, copy=True), dk.to(k.dtype), dv.to(v.dtype)
