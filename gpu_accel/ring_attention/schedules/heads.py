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


def to_heads(
    tensors: Sequence[tuple[Tensor, tuple[tuple[int, ...], ...]]],
    order: Tensor | None,
    ranks: Sequence[int],
    transport: Transport,
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """Each (batch, rows, heads, dim) becomes (batch, len(ranks) * rows, share, dim), in one all-to-all.

    `order` arranges the rows that came together, as `block_runs` gives it.
    """
    rows = [torch.cat([_select(x, shares[i]).reshape(-1) for x, shares in tensors]) for i in range(len(ranks))]
    out = torch.stack(rows)
    back = transport.all_to_all(out if wire is None else out.to(wire), ranks).wait().to(out.dtype)
    results, done = [], 0
    for x, shares in tensors:
        batch, length, _, dim = x.shape
        size = batch * length * len(shares[0]) * dim
        part = back[:, done : done + size].view(len(ranks), batch, length, len(shares[0]), dim)
        done += size
        joined = part.transpose(0, 1).reshape(batch, len(ranks) * length, len(shares[0]), dim)
        results.append(joined if order is None else joined.index_select(1, order.to(joined.device)))
    return results


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
            x = torch.empty_like(x).index_copy_(1, order.to(x.device), x)
        batch, length, share, dim = x.shape
        outgoing.append(x.view(batch, n, length // n, share, dim).transpose(0, 1).reshape(n, -1))
    back = transport.all_to_all(torch.cat(outgoing, 1), ranks).wait()
    results, done = [], 0
    for (x, shares, heads), sent in zip(tensors, outgoing, strict=True):
        batch, length, share, dim = x.shape
        part = back[:, done : done + sent.shape[1]].view(n, batch, length // n, share, dim)
        done += sent.shape[1]
        total = x.new_zeros((batch, length // n, heads, dim))
        for i in range(n):
            for place, head in enumerate(shares[i]):
                if head >= 0:
                    total[:, :, head] += part[i, :, :, place]
        results.append(total)
    return results


def _select(x: Tensor, heads: tuple[int, ...]) -> Tensor:
    """These heads of x (batch, rows, heads, dim); -1 gives zeros."""
    out = x.new_zeros((*x.shape[:2], len(heads), x.shape[3]))
    real = [h for h in heads if h >= 0]
    if real:
        out[:, :, : len(real)] = x[:, :, real]  # heads of zeros come last
    return out
