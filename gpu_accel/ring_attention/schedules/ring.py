"""What the ring schedules share: blocks that lie on a ring of ranks, and tensors packed into one message."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Run
from gpu_accel.ring_attention.masks import Mask, Piece, pieces
from gpu_accel.ring_attention.spans import Spans
from gpu_accel.ring_attention.transport import Pending, Transport
from gpu_accel.ring_attention.wire import carrier, coded_shape, decode, encode_into, in_eight_bits


@dataclass(frozen=True)
class Ring:
    """Some ranks of a transport in a circle, and the tokens that each of them holds."""

    transport: Transport
    members: tuple[int, ...]
    blocks: tuple[tuple[Run, ...], ...]
    me: int  # place on the ring

    @property
    def size(self) -> int:
        return len(self.members)

    def rank(self, steps: int) -> int:
        """The rank that many places ahead of this one (behind, if negative)."""
        return self.members[(self.me + steps) % self.size]

    def pieces(self, query_steps: int, key_steps: int, mask: Mask) -> tuple[Piece, ...]:
        """What the queries of one place see of the keys of another; places relative to this one."""
        queries, keys = ((self.me + steps) % self.size for steps in (query_steps, key_steps))
        return pieces(self.blocks[queries], self.blocks[keys], mask)

    def hops(self, mask: Mask, *, keys_travel: bool = True) -> int:
        """How far the travelling block must go until nobody has work for it: N - 1, fewer under a narrow window."""
        return _hops(self.blocks, mask, -1 if keys_travel else 1)


@functools.lru_cache(256)
def _hops(blocks: tuple[tuple[Run, ...], ...], mask: Mask, way: int) -> int:
    n = len(blocks)
    for distance in range(n - 1, 0, -1):
        if any(pieces(blocks[p], blocks[(p + way * distance) % n], mask) for p in range(n)):
            return distance
    return 0


class Message:
    """Tensors laid one behind the other in a flat buffer, so that a hop is one message.

    `wire`: what they travel as (wire.py); buffers are of `dtype`, and `shapes` and `sizes` those of what is in them.
    """

    def __init__(self, like: Sequence[Tensor], wire: torch.dtype | None = None) -> None:
        self.eight_bits = wire if in_eight_bits(wire) else None
        self.dtype = carrier(wire, like[0].dtype)
        self.shapes = [coded_shape(x.shape, wire) for x in like]
        self.sizes = [shape.numel() for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        for part, shape, x in zip(buffer.split(self.sizes), self.shapes, tensors, strict=True):
            if self.eight_bits is None:
                part.view(x.shape).copy_(x)
            else:
                encode_into(x, self.eight_bits, part.view(shape))

    def unpack(self, buffer: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Views into the buffer (copies where it has another dtype, which 8 bits always have)."""
        parts = [part.view(shape) for part, shape in zip(buffer.split(self.sizes), self.shapes, strict=True)]
        if self.eight_bits is not None:
            return [decode(x, self.eight_bits, dtype or torch.float32) for x in parts]
        return parts if dtype is None else [x.to(dtype) for x in parts]


class Blocks:
    """Keys and values of a ring in the order in which this rank meets them: its own, those one place behind, ...

    `fetch(step)` starts the way of a block here, ahead of the step that needs it; `get(step)` waits for it. In between
    computes the step before. Two ways lead here:

    passed   every rank sends on what it has received: N - 1 hops between neighbours, two buffers
    pulled   where the transport can read any rank's memory, blocks come straight from their owners, two at a time, and
             only the rows that this rank needs: under a causal mask with zigzag shards a quarter less on average. Each
             rank first copies its block to where others may read it, unless it lies there already (homes.py)
    """

    def __init__(self, ring: Ring, tensors: tuple[Tensor, Tensor], hops: int, call: Call) -> None:
        self.ring, self.hops, self.call = ring, hops, call
        self.own, self.dtype = list(tensors), tensors[0].dtype
        self.packed = Message(tensors, call.wire)
        self.pulled = hops > 0 and ring.transport.pulls
        if hops == 0:
            return
        homes = getattr(ring.transport, "homes", None)
        home = homes.find(*tensors) if self.pulled and homes and call.wire in (None, self.dtype) else None
        count = min(hops, 2) + (home is None) if self.pulled else 2
        self.buffers = ring.transport.buffers(count, (self.packed.numel,), tensors[0], self.packed.dtype)
        if home is not None:
            self.buffers.insert(0, home[1])
        else:
            self.packed.pack(tensors, self.buffers[0])
        self.on_the_way: dict[int, Pending] = {}
        if self.pulled:
            self.shared = ring.transport.share(
                self.buffers[0],
                readers=[ring.rank(step) for step in range(1, hops + 1)],
                sources=[ring.rank(-step) for step in range(1, hops + 1)],
            )

    def fetch(self, step: int) -> None:
        """Start what step `step` needs, and what can come along with it."""
        if not 0 < step <= self.hops:
            return
        if not self.pulled:
            here, there = self.buffers
            to, source = self.ring.rank(1), self.ring.rank(-1)
            self.on_the_way[step] = self.call.start(self.ring.transport.exchange(here, there, to=to, source=source))
            return
        # the buffer of step n is that of n - 2: free at once for the first two, then when step n - 2 has been issued
        for n in (step, step + 1) if step == 1 and self.call.overlap else (step,):
            if n <= self.hops and n not in self.on_the_way:
                self.on_the_way[n] = self.call.start(self._pull(n))

    def _pull(self, step: int) -> Pending:
        found = self.ring.pieces(0, -step, self.call.mask)
        lo, hi = min((p.k0 for p in found), default=0), max((p.k0 + p.sk for p in found), default=0)
        into = self.buffers[1 + (step - 1) % 2]
        parts, start = [], 0
        for shape, size in zip(self.packed.shapes, self.packed.sizes, strict=True):
            row = size // max(1, shape[0] * shape[1])
            for batch in range(shape[0]):
                at = start + (batch * shape[1]) * row
                parts.append((at + lo * row, at + hi * row))
            start += size
        return self.shared.pull(self.ring.rank(-step), into, list(Spans(parts)))

    def get(self, step: int) -> list[Tensor]:
        """The block of step `step`, of the dtype that it has at home; steps are asked for in order."""
        if step == 0:
            return self.own
        self.on_the_way.pop(step).wait()
        if self.pulled:
            return self.packed.unpack(self.buffers[1 + (step - 1) % 2], self.dtype)
        self.buffers.reverse()
        return self.packed.unpack(self.buffers[0], self.dtype)

    def close(self) -> None:
        """No step is left: what others may still read of this rank is waited for."""
        if self.pulled:
            self.shared.close()
