"""How keys and values of a ring come to the ranks that need them, ahead of the step that does.

    passed   every rank sends on what it has received: N - 1 hops between neighbours, two buffers
    pushed   where the transport can write to any rank's memory, owners write their block to each rank in turn, straight
             from where it lies: two buffers, and only the rows that the reader needs: under a causal mask with zigzag
             shards a quarter less on average
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.masks import Mask
from gpu_accel.ring_attention.schedules.ring import Message, Ring
from gpu_accel.ring_attention.transport import Pending


class _Way(Protocol):
    """Two buffers take turns, so up to two blocks can be under way."""

    def expect(self, step: int) -> Pending:
        """The block of that step, from when on it may come; nobody reads the block of two steps before any more."""
        ...

    def send(self, step: int) -> None:
        """What this rank has to do for the rank that needs its own block in that step."""
        ...

    def arrived(self, step: int) -> Tensor:
        """The buffer in which it is."""
        ...

    def close(self) -> None:
        """No step is left: wait until what was sent may be overwritten."""
        ...


class Blocks:
    """Keys and values in the order in which a rank meets them: its own, those one place behind, ...

    `fetch(step)` starts the way of a block here; `get(step)` waits for it. In between computes the step before.
    """

    def __init__(self, ring: Ring, tensors: tuple[Tensor, Tensor], hops: int, call: Call) -> None:
        self.hops, self.call = hops, call
        self.own, self.dtype = list(tensors), tensors[0].dtype
        self.packed = Message(tensors, call.wire)
        self.on_the_way: dict[int, Pending] = {}
        self.way: _Way | None = None
        if hops == 0:
            return
        if ring.transport.pushes:
            self.way = _Pushed(ring, self.packed, tensors, hops, call)
        else:
            self.way = _Passed(ring, self.packed, tensors)

    def fetch(self, step: int) -> None:
        """Start what step `step` needs, and what can come along with it."""
        if self.way is None or not 0 < step <= self.hops or step in self.on_the_way:
            return
        # the buffer of step n is that of n - 2: free at once for the first two, then when step n - 2 has been issued
        both = step == 1 and self.call.overlap and not isinstance(self.way, _Passed)
        steps = [n for n in (step, step + 1)[: 1 + both] if n <= self.hops]
        found = [self.way.expect(n) for n in steps]
        for n, pending in zip(steps, found, strict=True):
            self.way.send(n)
            self.on_the_way[n] = self.call.start(pending)

    def get(self, step: int) -> list[Tensor]:
        """The block of step `step`, of the dtype that it has at home; steps are asked for in order."""
        if step == 0 or self.way is None:
            return self.own
        self.on_the_way.pop(step).wait()
        return self.packed.unpack(self.way.arrived(step), self.dtype)

    def close(self) -> None:
        """No step is left: wait until what was sent may be overwritten."""
        if self.way is not None:
            self.way.close()


class _Passed:
    def __init__(self, ring: Ring, packed: Message, tensors: tuple[Tensor, Tensor]) -> None:
        self.ring = ring
        self.buffers = ring.transport.buffers(2, (packed.numel,), tensors[0], packed.dtype)
        packed.pack(tensors, self.buffers[0])

    def expect(self, step: int) -> Pending:
        here, there = self.buffers[(step - 1) % 2], self.buffers[step % 2]
        return self.ring.transport.exchange(here, there, to=self.ring.rank(1), source=self.ring.rank(-1))

    def send(self, step: int) -> None: ...

    def arrived(self, step: int) -> Tensor:
        return self.buffers[step % 2]

    def close(self) -> None: ...


class _Pushed:
    def __init__(self, ring: Ring, packed: Message, tensors: tuple[Tensor, Tensor], hops: int, call: Call) -> None:
        self.ring, self.packed, self.mask = ring, packed, call.mask
        self.buffers = ring.transport.buffers(min(hops, 2), (packed.numel,), tensors[0], packed.dtype)
        self.parts = list(tensors)
        as_it_is = call.wire in (None, tensors[0].dtype)
        if not as_it_is or not all(rows.is_contiguous() for x in tensors for rows in x):
            staged = torch.empty(packed.numel, dtype=packed.dtype, device=tensors[0].device)
            packed.pack(tensors, staged)
            self.parts = packed.parts(staged)
        self.mail = ring.transport.mail()

    def _buffer(self, step: int) -> Tensor:
        return self.buffers[(step - 1) % 2]

    def expect(self, step: int) -> Pending:
        return self.mail.expect(self.ring.rank(-step), self._buffer(step))

    def send(self, step: int) -> None:
        lo, hi = needed(self.ring, step, 0, self.mask)
        starts = rows_in(self.packed, lo, hi)
        parts = [(x[batch, lo:hi], next(starts)[0]) for x in self.parts for batch in range(len(x))]
        self.mail.send(self.ring.rank(step), parts if lo < hi else [], self._buffer(step))

    def arrived(self, step: int) -> Tensor:
        return self._buffer(step)

    def close(self) -> None:
        self.mail.close()


def needed(ring: Ring, reader: int, owner: int, mask: Mask) -> tuple[int, int]:
    """The rows [a, b) of the owner's block from the first to the last that the reader sees; places relative to here."""
    found = ring.pieces(reader, owner, mask)
    return min((p.k0 for p in found), default=0), max((p.k0 + p.sk for p in found), default=0)


def rows_in(packed: Message, lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Where rows [lo, hi) of each sequence lie in a buffer, in elements; keys, then values."""
    start = 0
    for shape, size in zip(packed.shapes, packed.sizes, strict=True):
        row = size // max(1, shape[0] * shape[1])
        for batch in range(shape[0]):
            at = start + batch * shape[1] * row
            yield at + lo * row, at + hi * row
        start += size
