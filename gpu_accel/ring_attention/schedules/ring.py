"""What the ring schedules share: blocks that lie on a ring of ranks, and tensors packed into one message."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.ring_attention.layouts import Run
from gpu_accel.ring_attention.masks import Mask, Piece, pieces
from gpu_accel.ring_attention.transport import Transport
from gpu_accel.ring_attention.wire import carrier, coded_shape, decode, encode_into, in_eight_bits


@dataclass(frozen=True)
class Ring:
    """Some ranks of a transport in a circle, and the tokens that each of them holds."""

    transport: Transport
    members: tuple[int, ...]
    blocks: tuple[tuple[Run, ...], ...]
    me: int  # place on the ring
    queries: tuple[tuple[Run, ...], ...] = ()  # at each place; empty: those of its block
    rings: tuple[Ring, ...] = ()  # all rings that go round at once, this one among them; empty: it is the only one

    @property
    def size(self) -> int:
        return len(self.members)

    def rank(self, steps: int) -> int:
        """The rank that many places ahead of this one (behind, if negative)."""
        return self.members[(self.me + steps) % self.size]

    def pieces(self, query_steps: int, key_steps: int, mask: Mask) -> tuple[Piece, ...]:
        """What the queries of one place see of the keys of another; places relative to this one."""
        queries, keys = ((self.me + steps) % self.size for steps in (query_steps, key_steps))
        return pieces((self.queries or self.blocks)[queries], self.blocks[keys], mask)

    def pairs(self) -> list[tuple[tuple[tuple[Run, ...], ...], tuple[tuple[Run, ...], ...]]]:
        """Queries and keys of every place, of each of the rings: what all ranks decide alike by."""
        return [(one.queries or one.blocks, one.blocks) for one in self.rings or (self,)]

    def hops(self, mask: Mask, *, keys_travel: bool = True) -> int:
        """How far the travelling block must go until nobody has work for it: N - 1, fewer under a narrow window."""
        return max(_hops(*pair, mask, -1 if keys_travel else 1) for pair in self.pairs())


@functools.lru_cache(256)
def _hops(queries: tuple[tuple[Run, ...], ...], keys: tuple[tuple[Run, ...], ...], mask: Mask, way: int) -> int:
    n = len(keys)
    for distance in range(n - 1, 0, -1):
        if any(pieces(queries[p], keys[(p + way * distance) % n], mask) for p in range(n)):
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

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """What is in a buffer, as it travels."""
        return [part.view(shape) for part, shape in zip(buffer.split(self.sizes), self.shapes, strict=True)]

    def pack(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        for part, x in zip(self.parts(buffer), tensors, strict=True):
            if self.eight_bits is None:
                part.copy_(x)
            else:
                encode_into(x, self.eight_bits, part)

    def unpack(self, buffer: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Views into the buffer (copies where it has another dtype, which 8 bits always have)."""
        parts = self.parts(buffer)
        if self.eight_bits is not None:
            return [decode(x, self.eight_bits, dtype or torch.float32) for x in parts]
        return parts if dtype is None else [x.to(dtype) for x in parts]
