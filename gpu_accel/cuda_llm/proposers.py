"""Where candidates come from. A proposer sees the kernel to start from and what became of everything proposed so far.

`Grammar` needs no model: the launch spec says which values each constant, num_warps and num_stages may take, and the
proposer picks points of that space at random or by evolution. With the same seed it proposes the same again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpu_accel.errors import InvalidInputError

from .candidate import Candidate
from .launch import Scalar
from .verdict import Judgement

STRATEGIES = ("random", "evolutionary")
Space = Mapping[str, tuple[Scalar, ...]]
Point = dict[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One candidate and what became of it.

    `time` is its median as a multiple of a copy of as many bytes; None where nothing was timed.
    """

    number: int
    candidate: Candidate
    judgement: Judgement
    time: float | None = None
    change: str = ""  # what differs from the kernel at the start

    @property
    def ok(self) -> bool:
        return self.judgement.ok


class Proposer(Protocol):
    """Anything that proposes candidates: a search over a grammar, a language model, a person's folder."""

    name: str

    def propose(self, start: Candidate, history: Sequence[Attempt], count: int) -> list[Candidate]:
        """Up to `count` new candidates; an empty list ends the search."""
        ...


def space_of(candidate: Candidate) -> dict[str, tuple[Scalar, ...]]:
    """What may vary: the space of its launch spec, or else powers of two around its constants and warps."""
    if candidate.launch.space:
        return dict(candidate.launch.space)
    found: dict[str, tuple[Scalar, ...]] = {}
    for name, value in candidate.launch.constants.items():
        if type(value) is int and value >= 8 and value & (value - 1) == 0:
            found[name] = tuple(size for size in (value // 4, value // 2, value, value * 2, value * 4) if size >= 8)
    return found | {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4)}


def point_of(candidate: Candidate, space: Space) -> Point:
    """The values that a candidate has for what may vary."""
    launch = candidate.launch
    own = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.constants}
    return {name: own[name] for name in space}


def size_of(space: Space) -> int:
    """How many points a space has."""
    return math.prod(len(values) for values in space.values())


@dataclass
class Grammar:
    """Proposes points of a template's space.

    Args:
        strategy: "random": points not tried yet, each equally likely. "evolutionary": children of the best accepted
            candidates, of which one or two values move to a neighbour, or come from a second parent; a third of the
            proposals stay random.
        seed: the same seed and the same history give the same proposals.
    """

    strategy: str = "evolutionary"
    seed: int = 0
    parents: int = 4
    name: str = field(default="grammar", init=False)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidInputError(f"strategy is {self.strategy!r:.40}; choose one of {', '.join(STRATEGIES)}")

    def propose(self, start: Candidate, history: Sequence[Attempt], count: int) -> list[Candidate]:
        """Points that history does not have; fewer than `count` when the space is used up."""
        space = space_of(start)
        source = random.Random(f"{self.seed}/{start.digest}/{len(history)}")
        seen = {start.digest} | {one.candidate.digest for one in history}
        ranked = sorted((one for one in history if one.ok), key=lambda one: (one.time or math.inf, one.number))
        parents = [point_of(one.candidate, space) for one in ranked[: self.parents]]
        found: list[Candidate] = []
        for point in self._points(space, parents, source, tries=count * 50):
            made = start.with_(**point)
            if made.digest not in seen:
                seen.add(made.digest)
                found.append(made)
            if len(found) == count:
                return found
        if size_of(space) <= 100_000:  # what chance has not found
            for point in _all_points(space):
                made = start.with_(**point)
                if len(found) < count and made.digest not in seen:
                    seen.add(made.digest)
                    found.append(made)
        return found

    def _points(self, space: Space, parents: list[Point], source: random.Random, tries: int) -> Iterator[Point]:
        for _ in range(tries):
            if self.strategy == "random" or not parents or source.random() < 1 / 3:
                yield {name: source.choice(values) for name, values in space.items()}
                continue
            child = dict(source.choice(parents))
            other = source.choice(parents)
            for name in source.sample(list(space), min(len(space), source.choice((1, 1, 2)))):
                values = space[name]
                if source.random() < 0.3:
                    child[name] = other[name]
                elif child[name] in values:
                    at = values.index(child[name]) + source.choice((-1, 1))
                    child[name] = values[min(max(at, 0), len(values) - 1)]
                else:
                    child[name] = source.choice(values)
            yield child


def _all_points(space: Space) -> Iterator[Point]:
    names = list(space)

    def below(at: int, point: Point) -> Iterator[Point]:
        if at == len(names):
            yield dict(point)
            return
        for value in space[names[at]]:
            point[names[at]] = value
            yield from below(at + 1, point)

    return below(0, {})
