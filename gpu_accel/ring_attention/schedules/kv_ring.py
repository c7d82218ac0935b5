"""The KV ring (Ring Attention, arXiv 2310.01889): queries stay, keys and values go round.

    step i:  start sending the block that is here to the next rank and receiving the previous rank's
             attend to the block that is here, of rank r - i
             wait

One message a hop, two buffers. Backward: keys and values go round again, and the sums of their gradients, in float32,
follow one step behind; a last hop takes them home. Every block's sum is formed in one fixed order, so results are the
same bits in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.schedules.ring import Message, Ring
from gpu_accel.ring_attention.step import Partial, add_gradients, attend, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def ring_of(call: Call, transport: Transport) -> Ring:
    """All ranks in order."""
    blocks = tuple(call.layout.runs(r) for r in range(call.ranks))
    return Ring(transport, tuple(range(call.ranks)), blocks, transport.rank)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    partial = forward_on(ring_of(call, transport), q, k, v, call)
    return partial.o.to(q.dtype), partial.lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = backward_on(ring_of(call, transport), do, q, k, v, lse, delta_of(do, o), call)
    # copies: what a hop brought lies in a buffer that the next call will use
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


def forward_on(ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Partial:
    """The forward on any ring: q, k, v are this place's block."""
    partial = Partial.empty(q, v.shape[-1])
    hops = ring.hops(call.mask)
    packed = Message((k, v))
    here, there = _start(ring, packed, (k, v), call) if hops else (k, k)
    keys, values = k, v
    for step in range(hops + 1):
        pending = None
        if step < hops:
            pending = call.start(ring.transport.exchange(here, there, to=ring.rank(1), source=ring.rank(-1)))
        attend(partial, q, keys, values, ring.pieces(0, -step, call.mask), call)
        if pending is not None:
            pending.wait()
            here, there = there, here
            keys, values = packed.unpack(here, k.dtype)
    return partial


def backward_on(
    ring: Ring, do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward on any ring; gradients in the dtype of partial results."""
    dtype = partial_dtype(q)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    hops = ring.hops(call.mask)
    packed = Message((k, v))
    here, there = _start(ring, packed, (k, v), call) if hops else (k, k)
    sums, spare = ring.transport.buffers(2, (packed.numel,), k, dtype) if hops else (k, k)
    keys, values, arriving = k, v, None
    for step in range(hops + 1):
        pending = None
        if step < hops:
            pending = call.start(ring.transport.exchange(here, there, to=ring.rank(1), source=ring.rank(-1)))
        dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        add_gradients((dq, dk, dv), do, q, keys, values, lse, delta, ring.pieces(0, -step, call.mask), call)
        if hops == 0:
            return dq, dk, dv
        if arriving is None:
            packed.pack((dk, dv), sums)
        else:
            arriving.wait()
            sums, spare = spare, sums
            for total, part in zip(packed.unpack(sums), (dk, dv), strict=True):
                total += part
        if pending is not None:
            pending.wait()
            here, there = there, here
            keys, values = packed.unpack(here, k.dtype)
            arriving = ring.transport.exchange(sums, spare, to=ring.rank(1), source=ring.rank(-1))
    ring.transport.exchange(sums, spare, to=ring.rank(-hops), source=ring.rank(hops)).wait()
    dk, dv = packed.unpack(spare)
    return dq, dk, dv


def _start(ring: Ring, packed: Message, tensors: tuple[Tensor, Tensor], call: Call) -> list[Tensor]:
    here, there = ring.transport.buffers(2, (packed.numel,), tensors[0], call.wire)
    packed.pack(tensors, here)
    return [here, there]
