"""Which part of one block of keys the queries of another block see, as calls that an attention kernel can run.

Kernels know one mask: in a call with sq queries and sk keys, query i sees keys
`i + sk - sq - left <= j <= i + sk - sq + right` (bottom-right aligned, both ends included, -1 is no bound). A ring step
pairs shards that lie anywhere in the sequence, perhaps with a stride. :func:`pieces` cuts such a pair into calls of
that form: positions q0 + a i and k0 + a j make `k <= q + right` the same as `j <= i + floor((q0 - k0 + right) / a)`, so
full, causal, skipped, strictly causal (striped), windowed and document steps all come out of one rule. Rows that see
nothing and keys that nobody sees are cut away; neighbouring pieces are joined: a causal zigzag step is one call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gpu_accel.ring_attention.layouts import Run


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, by global positions: `q - left <= k <= q + right`, in its own document. -1: no bound."""

    left: int = -1
    right: int = -1

    @property
    def causal(self) -> bool:
        return self.right == 0

    def __str__(self) -> str:
        if self.left < 0 and self.right < 0:
            return "full"
        return "causal" if self.left < 0 and self.right == 0 else f"window({self.left},{self.right})"


@dataclass(frozen=True)
class Piece:
    """One kernel call: query rows [q0, q0+sq), key rows [k0, k0+sk), and its bottom-right window (-1: no bound)."""

    q0: int
    sq: int
    k0: int
    sk: int
    left: int = -1
    right: int = -1

    @property
    def kind(self) -> str:
        if self.left < 0 and self.right < 0:
            return "full"
        return "causal" if self.left < 0 and self.right == 0 else "window"

    def __str__(self) -> str:
        return f"{self.kind}, {self.sq:,} queries from row {self.q0:,}, {self.sk:,} keys from row {self.k0:,}"

    @property
    def area(self) -> int:
        """Visible (query, key) pairs."""
        if self.left < 0 and self.right < 0:
            return self.sq * self.sk
        shift = self.sk - self.sq
        total = 0
        for i in range(self.sq):
            low = max(0, i + shift - self.left) if self.left >= 0 else 0
            high = min(self.sk - 1, i + shift + self.right) if self.right >= 0 else self.sk - 1
            total += max(0, high - low + 1)
        return total


@functools.lru_cache(1 << 14)
def pieces(queries: tuple[Run, ...], keys: tuple[Run, ...], mask: Mask) -> tuple[Piece, ...]:
    """The kernel calls of one pair of blocks, ordered by query row then key; empty when no query sees any key.

    Every visible pair is in exactly one piece. Runs of the two sides must have one stride, unless one has length 1.
    """
    by_document: dict[int, list[Run]] = {}
    for k in keys:
        by_document.setdefault(k.document, []).append(k)
    found: dict[int, list[Piece]] = {}
    for q in queries:
        for k in by_document.get(q.document, ()):
            if (piece := _piece(q, k, mask)) is not None:
                found.setdefault(q.document, []).append(piece)
    joined = [piece for some in found.values() for piece in _join(some)]
    return tuple(sorted(joined, key=lambda p: (p.q0, p.k0)))


def work(queries: tuple[Run, ...], keys: tuple[Run, ...], mask: Mask) -> int:
    """Visible pairs between two blocks."""
    return sum(piece.area for piece in pieces(queries, keys, mask))


def _piece(q: Run, k: Run, mask: Mask) -> Piece | None:
    """The visible rectangle of two runs, and its diagonals. Row i sees keys i + low ... i + high, if they exist."""
    stride, apart = _common_stride(q, k), q.start - k.start
    high = (apart + mask.right) // stride if mask.right >= 0 else k.length - 1
    low = -((mask.left - apart) // stride) if mask.left >= 0 else -(q.length - 1)
    first_row, last_row = max(0, -high), min(q.length - 1, k.length - 1 - low)
    first_key, last_key = max(0, first_row + low), min(k.length - 1, last_row + high)
    if first_row > last_row or first_key > last_key or low > high:  # the last: a window narrower than the stride
        return None
    sq, sk = last_row - first_row + 1, last_key - first_key + 1
    high, low = high + first_row - first_key, low + first_row - first_key
    right = -1 if mask.right < 0 or high >= sk - 1 else high - (sk - sq)
    left = -1 if mask.left < 0 or low <= 1 - sq else (sk - sq) - low
    return Piece(q.offset + first_row, sq, k.offset + first_key, sk, left, right)


def _common_stride(q: Run, k: Run) -> int:
    if q.length == 1 and k.length == 1:
        return 1
    if q.length == 1:
        return k.stride
    if k.length == 1 or q.stride == k.stride:
        return q.stride
    raise AssertionError(f"runs with strides {q.stride} and {k.stride} cannot meet in one kernel call")


def _join(found: list[Piece]) -> list[Piece]:
    """Join neighbours that one call can cover, until nothing changes. Only without a left bound."""
    found = list(found)
    changed = True
    while changed:
        changed = False
        for a in range(len(found)):
            for b in range(len(found)):
                if a != b and (one := _joined(found[a], found[b])):
                    found = [p for i, p in enumerate(found) if i not in (a, b)] + [one]
                    changed = True
                    break
            if changed:
                break
    return found


def _joined(a: Piece, b: Piece) -> Piece | None:
    """a and b as one piece, with a the upper or the left one."""
    if a.left >= 0 or b.left >= 0:
        return None
    same_rows = (a.q0, a.sq) == (b.q0, b.sq)
    same_keys = (a.k0, a.sk) == (b.k0, b.sk)
    if a.right < 0 and same_rows and a.k0 + a.sk == b.k0:
        return Piece(a.q0, a.sq, a.k0, a.sk + b.sk, -1, b.right)  # full left of b: the diagonal stays where it is
    if a.right < 0 and b.right < 0 and same_keys and a.q0 + a.sq == b.q0:
        return Piece(a.q0, a.sq + b.sq, a.k0, a.sk)
    if a.right == b.right == 0 and a.q0 + a.sq == b.q0 and a.k0 == b.k0 and b.sk - a.sk == b.sq:
        return Piece(a.q0, a.sq + b.sq, a.k0, b.sk, -1, 0)  # one diagonal goes through both
    return None
