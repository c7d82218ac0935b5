"""The KV ring (Ring Attention, arXiv 2310.01889): queries stay, keys and values go round.

    step i:  start the way of the next block here
             attend to the block that is here, of rank r - i
             wait

One message a hop, two buffers; or straight from the owners (blocks.py).

Backward: keys and values come round again, and the sums of their gradients, in float32, follow them home: one step
behind and with one more hop, or, where a kernel can add to what has arrived (ring_backward.py), two steps behind.
Every block's sum is formed in one fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention import hopper_merge, lanes
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.masks import Piece
from gpu_accel.ring_attention.schedules import ring_backward
from gpu_accel.ring_attention.schedules.blocks import Blocks
from gpu_accel.ring_attention.schedules.ring import Message, Ring
from gpu_accel.ring_attention.step import Running, add_gradients, delta_of, kernel_of, partial_dtype
from gpu_accel.ring_attention.streams import on
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def ring_of(call: Call, transport: Transport) -> Ring:
    """All ranks in order."""
    blocks = tuple(call.layout.runs(r) for r in range(call.ranks))
    return Ring(transport, tuple(range(call.ranks)), blocks, transport.rank)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    return forward_on(ring_of(call, transport), q, k, v, call)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    return backward_on(ring_of(call, transport), do, q, k, v, lse, delta_of(do, o), call, q.dtype)


def forward_on(ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The forward on any ring: q, k, v are this place's block. Returns o of the dtype of q, and lse."""
    hops = ring.hops(call.mask)
    steps = [ring.pieces(0, -step, call.mask) for step in range(hops + 1)]
    if hops and lanes.fit(ring.transport, call) and lanes.useful(q, k, len(steps)) and _in_lanes(q, k, v, call):
        return _forward_in_lanes(ring, q, k, v, call, steps)
    running = Running(q, v.shape[-1], steps, call)
    blocks = Blocks(ring, (k, v), hops, call)
    for step in range(hops + 1):
        keys, values = blocks.get(step)
        blocks.fetch(step + 1)
        running.attend(step, keys, values)
    blocks.close()
    return running.finish()


def _in_lanes(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether all steps are of the kernel that draws tiles from a queue."""
    problem, name = kernel_of(call, q, k, v, "forward")
    return name == "hopper" and hopper_merge.refuse(problem) is None


def _forward_in_lanes(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: Call, steps: list[tuple[Piece, ...]]
) -> tuple[Tensor, Tensor]:
    """The same with each half of the heads on a stream of its own."""
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    found = [
        Running(queries, v.shape[-1], steps, call, result)
        for queries, result in zip(lanes.halves(q), lanes.halves(o), strict=True)
    ]
    blocks = Blocks(ring, (k, v), len(steps) - 1, call)
    both = lanes.Lanes(q.device)
    for step in range(len(steps)):
        keys, values = blocks.get(step)
        with both.both():  # the block of two steps before may be overwritten when both have read it
            blocks.fetch(step + 1)
        both.follow()
        parts = zip(both, found, lanes.halves(keys), lanes.halves(values), strict=True)
        for stream, running, k_half, v_half in parts:
            with on(stream):
                running.attend(step, k_half, v_half)
    both.join()
    blocks.close()
    lse = torch.cat([running.finish()[1] for running in found], 1)
    return o, lse


def backward_on(
    ring: Ring,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    call: Call,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward on any ring; gradients of `dtype`, by default that of partial results."""
    wide = partial_dtype(q)
    dtype = dtype or wide
    if ring_backward.refuse(ring, q, k, v, call) is None:
        return ring_backward.backward_on(ring, do, q, k, v, lse, delta, call, dtype)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    hops = ring.hops(call.mask)
    blocks = Blocks(ring, (k, v), hops, call)
    packed = Message((k, v))
    sums, spare = ring.transport.buffers(2, (packed.numel,), k, wide) if hops else (k, k)
    arriving = None
    for step in range(hops + 1):
        keys, values = blocks.get(step)
        blocks.fetch(step + 1)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        add_gradients((dq, dk, dv), do, q, keys, values, lse, delta, ring.pieces(0, -step, call.mask), call)
        if hops == 0:
            return dq.to(dtype), dk.to(dtype), dv.to(dtype)
        if arriving is None:
            packed.pack((dk, dv), sums)
        else:
            arriving.wait()
            sums, spare = spare, sums
            for total, part in zip(packed.unpack(sums), (dk, dv), strict=True):
                total += part
        if step < hops:
            arriving = ring.transport.exchange(sums, spare, to=ring.rank(1), source=ring.rank(-1))
    blocks.close()
    ring.transport.exchange(sums, spare, to=ring.rank(-hops), source=ring.rank(hops)).wait()
    dk, dv = packed.unpack(spare)
    # copies: what a hop brought lies in a buffer that the next call will use
    return dq.to(dtype), dk.to(dtype, copy=True), dv.to(dtype, copy=True)
