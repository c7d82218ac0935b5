"""Schedule replay: the computation of one rank of a KV ring of any size, on one device and without the others.

    o, lse = replay_rank(q, k, v, layout=make_layout("zigzag", seqlen=64 * 8192, ranks=64), rank=5, causal=True)

Kernels, shapes, masks, merges and launches are those of the real rank; keys come from a function, or are always this
rank's own. So its time is what is left of a step of 64 or 512 GPUs when no hop takes any time: what the planner has to
add is the network. With the true keys of every rank the results are those of the ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.ring_attention.attention import make_call
from gpu_accel.ring_attention.layouts import Layout
from gpu_accel.ring_attention.schedules import kv_ring
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.step import attend_apart
from gpu_accel.ring_attention.transport import LocalTransport, Pending, PointToPoint, World

Keys = Callable[[int], tuple[Tensor, Tensor]]  # (k, v) of a rank


def replay_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    rank: int,
    keys: Keys | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """What rank `rank` computes in the forward of the KV ring, step by step.

    Args:
        q, k, v: its shards, (batch, local_length, heads, head_dim).
        layout: how the sequence is cut, into any number of shards.
        keys: keys(source) gives (k, v) of another rank; None: k and v stand in for all of them.
        options: causal, window_size, ... as in `distributed_attention`.

    Returns:
        o and lse of this rank's queries; of its real keys only with `keys`.

    Raises:
        InvalidInputError: as `distributed_attention`, or a rank that is not there.
    """
    return Replay(q, k, v, layout=layout, rank=rank, keys=keys, **options).forward()


class Replay:
    """The same, for both passes. Arguments and errors as of :func:`replay_rank`."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, rank: int, keys: Keys | None = None, **options: Any
    ) -> None:
        self.call = make_call(q, k, v, layout, **options)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < layout.ranks:
            raise InvalidInputError(f"rank must be a whole number from 0 to {layout.ranks - 1}, got {shown(rank, 40)}")
        if keys is not None and not callable(keys):
            raise InvalidInputError(f"keys must be a function of a rank or None, got {shown(keys)}")
        self.tensors, self.rank, self.keys = (q, k, v), rank, keys

    def forward(self) -> tuple[Tensor, Tensor]:
        """o and lse of this rank's queries."""
        with torch.no_grad():
            self._alone.asked = 0
            return kv_ring.forward(*self.tensors, self.call, self._alone)

    def kernels(self) -> list[tuple[Tensor, Tensor]]:
        """(o, lse) of every piece of every step, with this rank's own keys and not merged: the forward less its merges.

        o is rounded to the dtype of q, as a kernel that does not merge leaves it.
        """
        (q, k, v), call = self.tensors, self.call
        ring = ring_of(call, LocalTransport(World(call.ranks), self.rank))
        with torch.no_grad():
            steps = [ring.pieces(0, -step, call.mask) for step in range(ring.hops(call.mask) + 1)]
            return [result for found in steps for result in attend_apart(q, k, v, found, call)]

    def backward(self, do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
        """dq from the gradient of o and the results of `forward`. What is computed of dk and dv would travel on."""
        q, k, v = self.tensors
        with torch.no_grad():
            self._alone.asked = 0
            return kv_ring.backward(do, q, k, v, o, lse, self.call, self._alone)[0]

    @functools.cached_property
    def _alone(self) -> _Alone:
        return _Alone(self.call.ranks, self.rank, self.tensors[1:], self.keys, self.call.wire)


class _Alone(PointToPoint):
    """The network of a rank whose others are not there: nothing takes any time, and buffers stay as they are."""

    name, pushes = "alone", True

    def __init__(
        self, size: int, rank: int, block: tuple[Tensor, Tensor], keys: Keys | None, wire: torch.dtype | None
    ) -> None:
        self.size, self.rank, self.keys = size, rank, keys
        self.message = Message(block, wire)
        self.block = block[0].new_empty(self.message.numel, dtype=self.message.dtype)
        self.message.pack(block, self.block)
        self.asked = 0
        self.sums: dict[tuple, list[Tensor]] = {}

    def buffers(self, count: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        """First those of keys, which hold this rank's own, then those of sums."""
        self.asked += 1
        if self.asked == 1:
            return [self.block if self.keys is None else self.block.clone() for _ in range(count)]
        key = (self.asked, count, tuple(shape), dtype)
        if key not in self.sums:
            self.sums[key] = [torch.zeros(shape, dtype=dtype or like.dtype, device=like.device) for _ in range(count)]
        return self.sums[key]

    def mail(self) -> _Alone:
        return self

    def expect(self, source: int, into: Tensor) -> Pending:
        def arrive() -> None:
            if self.keys is not None:
                self.message.pack(self.keys(source), into)

        return Pending(arrive)

    def send(self, to: int, parts: Any, into: Tensor) -> None: ...

    def close(self) -> None: ...

    def exchange(self, message: Tensor, into: Tensor, *, to: int, source: int) -> Pending:
        return Pending(lambda: None)

    def transfer(self, sends: Any, receives: Any) -> Pending:
        return Pending(lambda: None)

    def _statements(self, mine: str) -> list[str]:
        return [mine] * self.size
