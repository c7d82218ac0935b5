"""The backward of a ring by a kernel that adds to float32 sums, so that nothing but kernels and hops is left.

Step i of rank r adds the gradients of block r - i to a sum that comes from rank r - 2, which worked on that block two
steps before: the sum has a whole step to travel in. So every block has two sums, of its even and its odd steps, and
both come home, the last but one under the last step:

    step            0 (own, part 1)   1        2        3 (last)     own, part 2
    adds to         a                 b        c = a"   b"           home sum that came first
    on its way      -                 a ->     b ->     c -> home    b" -> home

Most of the own block is left for the end, where the last sum is still on its way. dQ stays here all the time.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from gpu_accel.ring_attention import hopper_backward, lanes
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.masks import Mask, Piece
from gpu_accel.ring_attention.schedules.blocks import Blocks
from gpu_accel.ring_attention.schedules.ring import Ring
from gpu_accel.ring_attention.step import kernel_of
from gpu_accel.ring_attention.streams import on
from gpu_accel.ring_attention.transport import Pending


def refuse(ring: Ring, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Why this cannot run, or None. All ranks decide alike: it depends on what all of them have to do."""
    problem, name = kernel_of(replace(call, deterministic=False), q, k, v, "backward")
    if name != "hopper":
        return "only the Hopper kernels add to what has arrived"
    if call.deterministic and call.mask.left >= 0:
        return "taking turns to add to dq is written for masks without a left bound"
    why = hopper_backward.refuse(problem)
    for queries, keys in ring.pairs():
        why = why or _misplaced(queries, keys, call.mask, q.shape[1], q.shape[-1])
    return why


@functools.lru_cache(256)
def _misplaced(queries: tuple, keys: tuple, mask: Mask, rows: int, head_dim: int) -> str | None:
    from gpu_accel.ring_attention.masks import pieces

    found = [piece for mine in queries for theirs in keys for piece in pieces(mine, theirs, mask)]
    return hopper_backward.misplaced(found, rows, head_dim)


def split(piece: Piece, at: int) -> tuple[Piece, Piece]:
    """Its rows [0, at) and its rows [at, sq), each with the keys that they see. No left bound."""
    assert piece.left < 0 and 0 < at < piece.sq
    if piece.right < 0:
        return replace(piece, sq=at), replace(piece, q0=piece.q0 + at, sq=piece.sq - at)
    reach = piece.sk - piece.sq + piece.right  # row i sees keys up to i + reach
    keys = min(piece.sk, at + reach)
    return (
        Piece(piece.q0, at, piece.k0, keys, -1, reach - (keys - at)),
        Piece(piece.q0 + at, piece.sq - at, piece.k0, piece.sk, -1, reach + at - (piece.sk - (piece.sq - at))),
    )


def halves(found: tuple[Piece, ...], block: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of the own block as the part to begin with, about a quarter of the work, and the one to end with.

    Keys and values for the next step arrive under the first part, and sums of twice their bytes come home under the
    last. Cut at a multiple of `block` rows; 0: everything at the beginning.
    """
    if not block or len(found) != 1 or found[0].left >= 0:
        return found, ()
    (piece,) = found
    share = 2 if piece.right >= 0 else 4  # causal: the upper half of the rows is a quarter of the area
    at = piece.sq // share // block * block
    if not 0 < at < piece.sq or (piece.right >= 0 and piece.sk < piece.sq):
        return found, ()
    first, last = split(piece, at)
    return (first,), (last,)


def backward_on(
    ring: Ring,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    call: Call,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `dtype`."""
    transport, hops = ring.transport, ring.hops(call.mask)
    blocks = Blocks(ring, (k, v), hops, call)
    size = hopper_backward.sum_size(k)
    if hops:
        sums = transport.buffers(3, (size,), k, torch.float32)
    else:
        sums = [torch.empty(size, dtype=torch.float32, device=k.device)]
    for buffer in sums[: min(hops, 1) + 1]:
        buffer.zero_()
    work = hopper_backward.Gradients(
        do, q, lse, delta, softmax_scale=call.softmax_scale, softcap=call.softcap, deterministic=call.deterministic
    )
    first, last = halves(ring.pieces(0, 0, call.mask), 128 if hops else 0)
    in_lanes = hops and lanes.fit(transport, call) and len(q) == 1 and not call.deterministic
    both = lanes.Lanes(q.device) if in_lanes and lanes.useful(q, k, hops + 1) else None

    def add(found: tuple[Piece, ...], keys: Tensor, values: Tensor, into: Tensor) -> None:
        if both is None:
            for piece in found:
                work.add(piece, keys, values, into)
            return
        both.follow()
        for half, stream in enumerate(both):
            with on(stream):
                for piece in found:
                    work.add(piece, keys, values, into, half)

    after_both = nullcontext if both is None else both.both
    on_the_way: dict[int, tuple[Pending, Tensor]] = {}
    for step in range(hops + 1):
        keys, values = blocks.get(step)
        with after_both():
            blocks.fetch(step + 1)
        buffer = sums[step % 3]
        if step in on_the_way:
            on_the_way.pop(step)[0].wait()
        add(first if step == 0 else ring.pieces(0, -step, call.mask), keys, values, buffer)
        if step + 2 <= hops:
            ahead, target = 2, step + 2
        elif step > 0:
            ahead, target = -step, hops + 1 + (step == hops)  # home, as the first or the second to arrive
        else:
            continue  # of at most one hop: the own sum stays
        for pending, _ in on_the_way.values():
            pending.wait()  # one step old; the buffer that it was sent from is the next to receive
        into = sums[2 if hops == 1 else (step + 2) % 3]
        with after_both():
            pending = transport.exchange(buffer, into, to=ring.rank(ahead), source=ring.rank(-ahead))
        on_the_way[target] = (call.start(pending), into)
    blocks.close()
    home = sums[0]
    if hops > 1:
        pending, home = on_the_way.pop(hops + 1)
        pending.wait()
    add(last, k, v, home)
    if both is not None:
        both.join()
    other = None
    if hops:
        pending, other = on_the_way.pop(hops + 2)
        pending.wait()
    return work.finish(k, home, other, dtype)
