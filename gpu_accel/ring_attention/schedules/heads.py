"""Exchanging the sequence for heads, and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Among u ranks that hold u shards of all heads, an all-to-all leaves each with all u shards of its share of the heads.
Any numbers of heads go: where u divides heads_kv, each rank gets whole groups; otherwise keys and values are sent to
every rank whose query heads need them, and where u does not divide heads, the last share is filled with heads of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_accel.ring_attention.transport import Transport
from gpu_accel.ring_attention.wire import decode, encode, in_eight_bits


def to_heads(
    tensors: Sequence[tuple[Tensor, tuple[tuple[int, ...], ...]]],
    order: Tensor | None,
    ranks: Sequence[int],
    transport: Transport,
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """Each (batch, rows, heads, dim) becomes (batch, len(ranks) * rows, share, dim), in one all-to-all
    (one each where head_dim differs).

    `order` arranges the rows that came together, as `block_runs` gives it on this device. `wire`: what all of them
    travel as.
    """
    if wire is not None and in_eight_bits(wire):
        coded = to_heads([(encode(x, wire), shares) for x, shares in tensors], order, ranks, transport)
        return [decode(x, wire, own.dtype) for x, (own, _) in zip(coded, tensors, strict=True)]
    dtype, n = tensors[0][0].dtype, len(ranks)
    if len({x.shape[:2] + x.shape[3:] for x, _ in tensors}) > 1:  # a head_dim of v of its own
        return [to_heads([one], order, ranks, transport, wire)[0] for one in tensors]
    batch, length, _, dim = tensors[0][0].shape
    counts = [len(shares[0]) for _, shares in tensors]
    # heads of all tensors side by side, so that what arrives is in place for the kernel as it is
    out = tensors[0][0].new_empty((n, batch, length, sum(counts), dim), dtype=wire or dtype)
    for i in range(n):
        for (x, shares), slot in zip(tensors, out[i].split(counts, 2), strict=True):
            _select(x, shares[i], slot)
    back = transport.all_to_all(out, ranks).wait().to(dtype)
    joined = back.transpose(0, 1).reshape(batch, n * length, sum(counts), dim)
    if order is not None:
        joined = joined.index_select(1, order)
    return list(joined.split(counts, 2))


def to_sequence(
    tensors: Sequence[tuple[Tensor, tuple[tuple[int, ...], ...], int]],
    order: Tensor | None,
    ranks: Sequence[int],
    transport: Transport,
) -> list[Tensor]:
    """The way back: (batch, len(ranks) * rows, share, dim) with its shares and the number of heads they are of.

    Where several ranks worked with one head (a key head that was sent more than once), the results are added up in
    rank order.
    """
    n = len(ranks)
    outgoing = []
    for x, _, _ in tensors:
        if order is not None:
            x = torch.empty_like(x).index_copy_(1, order, x)
        batch, length, share, dim = x.shape
        outgoing.append(x.view(batch, n, length // n, share, dim).transpose(0, 1).reshape(n, -1))
    back = transport.all_to_all(outgoing[0] if len(outgoing) == 1 else torch.cat(outgoing, 1), ranks).wait()
    results, done = [], 0
    for (x, shares, heads), sent in zip(tensors, outgoing, strict=True):
        batch, length, share, dim = x.shape
        part = back[:, done : done + sent.shape[1]].view(n, batch, length // n, share, dim)
        done += sent.shape[1]
        results.append(_joined(part, shares, heads))
    return results


def _joined(part: Tensor, shares: tuple[tuple[int, ...], ...], heads: int) -> Tensor:
    """(batch, rows, heads, dim) from (ranks, batch, rows, share, dim)."""
    real = [[h for h in share if h >= 0] for share in shares]  # heads of zeros come last
    alone = sorted(h for share in real for h in share) == list(range(heads))
    shape = (part.shape[1], part.shape[2], heads, part.shape[4])
    total = part.new_empty(shape) if alone else part.new_zeros(shape)
    for i, some in enumerate(real):
        if alone and some and _is_range(some):
            total[:, :, some[0] : some[-1] + 1] = part[i, :, :, : len(some)]
            continue
        for place, head in enumerate(some):
            if alone:
                total[:, :, head] = part[i, :, :, place]
            else:
                total[:, :, head] += part[i, :, :, place]
    return total


def _select(x: Tensor, heads: tuple[int, ...], out: Tensor) -> None:
    """These heads of x (batch, rows, heads, dim) into out; -1 gives zeros."""
    real = [h for h in heads if h >= 0]  # heads of zeros come last
    if real:
        out[:, :, : len(real)] = x[:, :, real[0] : real[-1] + 1] if _is_range(real) else x[:, :, real]
    if len(real) < len(heads):
        out[:, :, len(real) :] = 0


def _is_range(heads: list[int]) -> bool:
    return heads == list(range(heads[0], heads[0] + len(heads)))
