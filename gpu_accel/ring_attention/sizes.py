"""How heads, tokens and ranks divide: arithmetic that layouts, schedules and the planner share, without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Which heads each of the ranks works on: lists of equal length; -1 is a head of zeros."""

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> float:
        """How often a key head is sent, on average over the heads there are."""
        sent = [h for share in self.keys for h in share if h >= 0]
        return len(sent) / max(1, len(set(sent)))


def share_heads(heads: int, heads_kv: int, ranks: int) -> Shares:
    """Divide the heads of grouped attention among ranks, so that each share is grouped attention again."""
    group = heads // heads_kv
    if heads_kv % ranks == 0:
        each = heads_kv // ranks
        keys = [tuple(range(r * each, (r + 1) * each)) for r in range(ranks)]
        return Shares(tuple(tuple(h * group + g for h in share for g in range(group)) for share in keys), tuple(keys))
    each = max(1, -(-heads // ranks))
    queries = [tuple(h if h < heads else -1 for h in range(r * each, (r + 1) * each)) for r in range(ranks)]
    if group % each == 0:  # every rank stays within one group
        keys = [(share[0] // group if share[0] >= 0 else -1,) for share in queries]
    else:
        keys = [tuple(h // group if h >= 0 else -1 for h in share) for share in queries]
    return Shares(tuple(queries), tuple(keys))


def default_mesh(ranks: int, heads: int, heads_kv: int) -> tuple[int, int]:
    """The (a, b) that sends least forward: 16-bit queries, keys and values, float32 results."""

    def sent(a: int) -> int:
        return (1 + 2) * heads * (a - 1) + 2 * heads_kv * (ranks // a - 1)

    rows = min((a for a in range(1, ranks + 1) if ranks % a == 0), key=sent)
    return rows, ranks // rows


def default_inner(ranks: int) -> int:
    """8, the GPUs of a usual machine, or the largest smaller divisor of ranks that leaves several groups."""
    return max((w for w in range(1, 9) if ranks % w == 0 and w < ranks), default=1)


def default_degree(ranks: int, heads_kv: int) -> int:
    """The largest group that needs no copies of key heads."""
    return math.gcd(ranks, heads_kv)


def shard_rows(layout: str, documents: Sequence[int], ranks: int) -> int:
    """Rows of every rank's shard, padding included; `documents` are the lengths that make up the sequence."""
    if layout == "zigzag":
        return 2 * -(-sum(documents) // (2 * ranks))
    if layout == "documents":
        return sum(2 * -(-length // (2 * ranks)) for length in documents)
    return -(-sum(documents) // ranks)


def visible_pairs(layout: str, documents: tuple[int, ...], ranks: int, causal: bool) -> tuple[int, ...]:
    """How many (query, key) pairs the tokens of each rank see in their own document, of zigzag, documents or contiguous
    shards; the first and the last take one document."""
    found = [0] * ranks
    for length, times in Counter(documents).items():
        chunk = -(-length // (ranks if layout == "contiguous" else 2 * ranks))
        for rank in range(ranks):
            for place in (rank,) if layout == "contiguous" else (rank, 2 * ranks - 1 - rank):
                a, b = (min(length, i * chunk) for i in (place, place + 1))
                seen = (b * (b + 1) - a * (a + 1)) // 2 if causal else (b - a) * length
                found[rank] += times * seen
    return tuple(found)
