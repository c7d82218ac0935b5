"""Sets of rows as intervals [a, b)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Spans:
    """Disjoint intervals in order."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        for a, b in spans:
            self.add(a, b)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and self._spans == other._spans

    def __repr__(self) -> str:
        return f"Spans({self._spans})"

    def add(self, a: int, b: int) -> None:
        """Also the rows [a, b)."""
        if a >= b:
            return
        apart = [(c, d) for c, d in self._spans if d < a or b < c]
        touching = [(c, d) for c, d in self._spans if not (d < a or b < c)]
        merged = (min([a, *(c for c, _ in touching)]), max([b, *(d for _, d in touching)]))
        self._spans = sorted([*apart, merged])

    def meets(self, a: int, b: int) -> bool:
        """Whether any row of [a, b) is in it."""
        return any(max(a, c) < min(b, d) for c, d in self._spans)

    def without(self, other: Spans) -> Spans:
        """What `other` does not have."""
        left = list(self._spans)
        for c, d in other:
            left = [part for a, b in left for part in ((a, min(b, c)), (max(a, d), b)) if part[0] < part[1]]
        return Spans(left)
