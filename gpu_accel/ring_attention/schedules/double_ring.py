"""Two nested rings (LoongTrain, arXiv 2406.18485). Concentric rings are another thing: concentric.py.

Ranks are in groups of `inner` neighbours, such as the GPUs of one machine. Keys and values go once round the group,
then one step on to the next group, and so on: of N - 1 hops only N / inner - 1 cross between groups, and each of
those is under way during a whole inner round, by all links between the machines at once.

    group of w ranks:   round 0 over its own blocks | round 1 over those of the group before | ...
    outer hop:          ------- under way --------->| ------- under way ------------------->|

Bytes are those of the KV ring, memory one more block. Backward: the sum of a block's gradients goes round the group
behind it, w hops with the one that closes the circle, then on to the next group; the last hop takes it home.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.masks import Piece, pieces
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.sizes import default_inner
from gpu_accel.ring_attention.step import Running, add_gradients, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Pending, Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if call.inner is None and default_inner(call.ranks) in (1, call.ranks) and call.ranks > 1:
        return f"{call.ranks} ranks have no groups: give inner=, or use kv_ring"
    return None


class _Circles:
    """Neighbours of this rank on both rings, and which block it sees when."""

    def __init__(self, call: Call, transport: Transport) -> None:
        self.w = call.inner or default_inner(call.ranks)
        self.groups = call.ranks // self.w
        self.call, self.transport = call, transport
        self.group, self.place = divmod(transport.rank, self.w)

    def inner(self, message: Tensor, into: Tensor) -> Pending:
        base = self.group * self.w
        to, source = ((self.place + s) % self.w + base for s in (1, -1))
        return self.call.start(self.transport.exchange(message, into, to=to, source=source))

    def outer(self, message: Tensor, into: Tensor, *, steps: int = 1) -> Pending:
        to, source = ((self.group + s) % self.groups * self.w + self.place for s in (steps, -steps))
        return self.call.start(self.transport.exchange(message, into, to=to, source=source))

    def pieces(self, turn: int, step: int) -> tuple[Piece, ...]:
        """In round `turn` and inner step `step` the block here is that of the rank `step` places and `turn` groups
        behind."""
        owner = (self.group - turn) % self.groups * self.w + (self.place - step) % self.w
        layout = self.call.layout
        return pieces(layout.runs(self.transport.rank), layout.runs(owner), self.call.mask)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    circles = _Circles(call, transport)
    w = circles.w
    steps = [circles.pieces(turn, step) for turn in range(circles.groups) for step in range(w)]
    running = Running(q, v.shape[-1], steps, call)
    packed = Message((k, v), call.wire)
    first, coming, here, there = transport.buffers(4, (packed.numel,), k, packed.dtype)
    packed.pack((k, v), first)
    for turn in range(circles.groups):
        outer = circles.outer(first, coming) if turn + 1 < circles.groups else None
        keys, values = packed.unpack(first, k.dtype)
        message = first
        for step in range(circles.w):
            # `first` must stay as it is while the outer hop reads it, so the inner ring goes on in its own buffers
            into = there if message is here else here
            inner = circles.inner(message, into) if step + 1 < circles.w else None
            running.attend(turn * w + step, keys, values)
            if inner is not None:
                inner.wait()
                message = into
                keys, values = packed.unpack(message, k.dtype)
        if outer is not None:
            outer.wait()
            first, coming = coming, first
    return running.finish()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    circles = _Circles(call, transport)
    dtype, packed, totals, delta = partial_dtype(q), Message((k, v), call.wire), Message((k, v)), delta_of(do, o)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    first, coming, here, there = transport.buffers(4, (packed.numel,), k, packed.dtype)
    sums, spare = transport.buffers(2, (totals.numel,), k, dtype)
    packed.pack((k, v), first)
    sums.zero_()
    arriving: Pending | None = None  # the sum that belongs to the block here
    for turn in range(circles.groups):
        outer = circles.outer(first, coming) if turn + 1 < circles.groups else None
        keys, values = packed.unpack(first, k.dtype)
        message = first
        for step in range(circles.w):
            into = there if message is here else here
            inner = circles.inner(message, into) if step + 1 < circles.w else None
            dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
            found = circles.pieces(turn, step)
            add_gradients((dq, dk, dv), do, q, keys, values, lse, delta, found, call)
            if arriving is not None:
                arriving.wait()
                sums, spare = spare, sums
            for total, part in zip(totals.unpack(sums), (dk, dv), strict=True):
                total += part
            if inner is not None:
                inner.wait()
                message = into
                keys, values = packed.unpack(message, k.dtype)
            arriving = circles.inner(sums, spare)  # the last one of a round closes the circle
        if arriving is not None:
            arriving.wait()
            sums, spare = spare, sums
        if outer is not None:
            outer.wait()
            first, coming = coming, first
        arriving = circles.outer(sums, spare)  # the last one of all takes it home
    if arriving is not None:
        arriving.wait()
    dk, dv = totals.unpack(spare)
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)
