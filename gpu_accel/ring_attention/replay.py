"""Schedule replay: the computation of one rank of a KV ring of any size, on one device and without the others.

    o, lse = replay_rank(q, k, v, layout=make_layout("zigzag", seqlen=64 * 8192, ranks=64), rank=5, causal=True)

Kernels, shapes, masks, merges and launches are those of the real rank; keys come from a function, or are always this
rank's own. So its time is what is left of a step of 64 or 512 GPUs when no hop takes any time: what the planner has to
add is the network. With the true keys of every rank the results are those of the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.ring_attention.attention import make_call
from gpu_accel.ring_attention.layouts import Layout
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.step import Running
from gpu_accel.ring_attention.transport import LocalTransport, World


def replay_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    rank: int,
    keys: Callable[[int], tuple[Tensor, Tensor]] | None = None,
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
    call = make_call(q, k, v, layout, **options)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < layout.ranks:
        raise InvalidInputError(f"rank must be a whole number from 0 to {layout.ranks - 1}, got {rank!r:.40}")
    ring = ring_of(call, LocalTransport(World(layout.ranks), rank))
    hops = ring.hops(call.mask)
    with torch.no_grad():
        running = Running(q, v.shape[-1], [ring.pieces(0, -step, call.mask) for step in range(hops + 1)], call)
        for step in range(hops + 1):
            k_, v_ = (k, v) if keys is None or step == 0 else keys(ring.rank(-step))
            running.attend(step, k_, v_)
        return running.finish()
