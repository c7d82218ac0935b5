"""The proposer that needs no model: kernels as templates, with the values that their features may take.

A template is a kernel whose launch spec has a `[space]`: tile sizes, warps and stages, and in CUDA C++ whatever its
constants choose: vector width, unrolling, shared memory or shuffles, launch bounds. A task may have several
templates of different structure. A point is a template and a value for each of its features; a strategy picks points
from what the points before it took. The same seed and the same history give the same points.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpu_accel.errors import InvalidInputError, shown

from .candidate import Candidate
from .launch import Scalar
from .proposers import Attempt, Brief, Proposal, ranked

Space = Mapping[str, tuple[Scalar, ...]]
Values = dict[str, Scalar]


@dataclass(frozen=True)
class Point:
    """A template and the values of its features."""

    template: int
    values: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, template: int, values: Mapping[str, Scalar]) -> Point:
        return cls(template, tuple(values.items()))


def space_of(candidate: Candidate) -> dict[str, tuple[Scalar, ...]]:
    """What may vary: the space of its launch spec, or else powers of two around its constants and warps."""
    if candidate.launch.space:
        return dict(candidate.launch.space)
    found: dict[str, tuple[Scalar, ...]] = {}
    for name, value in candidate.launch.constants.items():
        if type(value) is int and value >= 8 and value & (value - 1) == 0:
            found[name] = tuple(size for size in (value // 4, value // 2, value, value * 2, value * 4) if size >= 8)
    if candidate.language == "cuda":
        return found
    return found | {"num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4)}


def point_of(candidate: Candidate, space: Space) -> Values:
    """The values that a candidate has for what may vary."""
    launch = candidate.launch
    own = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.constants}
    return {name: own[name] for name in space}


def size_of(space: Space) -> int:
    """How many points a space has."""
    return math.prod(len(values) for values in space.values())


class Terrain:
    """The templates of one search and what is known of their points."""

    def __init__(self, brief: Brief, history: Sequence[Attempt], source: random.Random) -> None:
        self.bases, self.source = brief.bases, source
        self.spaces = [space_of(one) for one in self.bases]
        self.known: list[tuple[Point, Attempt]] = []
        by_source = {one.source: number for number, one in enumerate(self.bases)}
        for attempt in ranked(history) + [one for one in history if not one.ok]:
            if attempt.candidate is not None and (at := by_source.get(attempt.candidate.source)) is not None:
                self.known.append((Point.of(at, point_of(attempt.candidate, self.spaces[at])), attempt))

    @property
    def best(self) -> list[Point]:
        """Points of accepted attempts, the fastest first."""
        return [point for point, attempt in self.known if attempt.ok]

    def made(self, point: Point) -> Candidate:
        return self.bases[point.template].with_(**dict(point.values))

    def any(self) -> Point:
        """Each template equally likely, and each of its points."""
        at = self.source.randrange(len(self.bases))
        return Point.of(at, {name: self.source.choice(values) for name, values in self.spaces[at].items()})

    def all(self) -> Iterator[Point]:
        for at, space in enumerate(self.spaces):
            for values in _all_values(space):
                yield Point.of(at, values)

    def neighbours(self, point: Point) -> Iterator[Point]:
        """Every point with one feature moved one step."""
        space = self.spaces[point.template]
        for name, value in point.values:
            values = space[name]
            at = values.index(value) if value in values else 0
            for other in (at + 1, at - 1):
                if 0 <= other < len(values):
                    yield Point.of(point.template, dict(point.values) | {name: values[other]})

    def reward(self, attempt: Attempt) -> float:
        """Between 0 (rejected) and 1 (the fastest)."""
        times = [one.time for _, one in self.known if one.ok and one.time]
        if not attempt.ok:
            return 0.0
        return min(times) / attempt.time if attempt.time and times else 0.5


def _random(terrain: Terrain) -> Iterator[Point]:
    while True:
        yield terrain.any()


def _evolutionary(terrain: Terrain) -> Iterator[Point]:
    """Children of the best four: one or two features move a step or come from another parent; a third is random."""
    source, parents = terrain.source, terrain.best[:4]
    while True:
        if not parents or source.random() < 1 / 3:
            yield terrain.any()
            continue
        parent = source.choice(parents)
        other = dict(source.choice([one for one in parents if one.template == parent.template]).values)
        child, space = dict(parent.values), terrain.spaces[parent.template]
        for name in source.sample(list(space), min(len(space), source.choice((1, 1, 2)))):
            values = space[name]
            if source.random() < 0.3:
                child[name] = other[name]
            elif child[name] in values:
                at = values.index(child[name]) + source.choice((-1, 1))
                child[name] = values[min(max(at, 0), len(values) - 1)]
            else:
                child[name] = source.choice(values)
        yield Point.of(parent.template, child)


def _pattern(terrain: Terrain) -> Iterator[Point]:
    """All neighbours of the best point, then of the next best; then chance."""
    for point in terrain.best:
        yield from terrain.neighbours(point)
    yield from _random(terrain)


def _bandit(terrain: Terrain) -> Iterator[Point]:
    """Each template, and each value of each feature, is an arm; upper confidence bounds of their rewards choose."""
    pulls: dict[tuple[int, str, Scalar], list[float]] = {}
    arms: dict[int, list[float]] = {at: [] for at in range(len(terrain.bases))}
    for point, attempt in terrain.known:
        arms[point.template].append(terrain.reward(attempt))
        for name, value in point.values:
            pulls.setdefault((point.template, name, value), []).append(terrain.reward(attempt))
    total = max(len(terrain.known), 1)

    def score(rewards: list[float]) -> float:
        if not rewards:
            return 1.5 + terrain.source.random() * 0.5
        mean = sum(rewards) / len(rewards)
        return mean + 0.4 * math.sqrt(math.log(total + 1) / len(rewards)) + terrain.source.random() * 0.1

    while True:
        at = max(arms, key=lambda one: score(arms[one]))
        chosen = {
            name: max(values, key=lambda value, name=name: score(pulls.get((at, name, value), [])))  # type: ignore[misc]
            for name, values in terrain.spaces[at].items()
        }
        arms[at].append(0.0)  # so that one round does not put everything on one arm
        yield Point.of(at, chosen)
        yield terrain.any()


def _surrogate(terrain: Terrain) -> Iterator[Point]:
    """Ridge regression of log time on features (one-hot), fitted to all attempts; the best of 256 random points."""
    columns = {
        key: at
        for at, key in enumerate(
            [(t, "", 0) for t in range(len(terrain.bases))]
            + [(t, n, v) for t, space in enumerate(terrain.spaces) for n, vs in space.items() for v in range(len(vs))]
        )
    }  # fmt: skip

    def row(point: Point) -> np.ndarray:
        made = np.zeros(len(columns))
        made[columns[point.template, "", 0]] = 1
        for name, value in point.values:
            values = terrain.spaces[point.template][name]
            if value in values:
                made[columns[point.template, name, values.index(value)]] = 1
        return made

    times = [attempt.time for _, attempt in terrain.known if attempt.ok and attempt.time]
    if len(times) < 3:
        yield from _random(terrain)
    worst = 2 * max(times)
    x = np.stack([row(point) for point, _ in terrain.known])
    y = np.log([attempt.time if attempt.ok and attempt.time else worst for _, attempt in terrain.known])
    weights = np.linalg.solve(x.T @ x + 0.3 * np.eye(len(columns)), x.T @ (y - y.mean()))
    while True:
        pool = [terrain.any() for _ in range(256)]
        yield from sorted(pool, key=lambda point: float(row(point) @ weights))[:8]
        yield terrain.any()


_STRATEGIES: dict[str, Callable[[Terrain], Iterator[Point]]] = {
    "random": _random, "evolutionary": _evolutionary, "pattern": _pattern, "bandit": _bandit,
    "surrogate": _surrogate,
}  # fmt: skip
STRATEGIES = tuple(_STRATEGIES)
MOST_TRIES = 20_000  # of a strategy in one round, whatever is asked for: seconds


@dataclass
class Grammar:
    """Proposes points: first every template as it is written, then what the strategy picks.

    Args:
        strategy: of STRATEGIES.
        seed: of all choices.
    Raises:
        InvalidInputError: no such strategy.
    """

    strategy: str = "evolutionary"
    seed: int = 0
    name: str = field(default="grammar", init=False)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidInputError(f"strategy is {shown(self.strategy, 40)}; choose one of {', '.join(STRATEGIES)}")

    def propose(self, brief: Brief, history: Sequence[Attempt], count: int) -> list[Proposal]:
        """Points that history does not have; fewer than `count` when the spaces are used up."""
        source = random.Random(f"{self.seed}/{brief.start.digest}/{len(history)}")
        terrain = Terrain(brief, history, source)
        seen = {brief.start.digest} | {one.digest for one in history}
        found: list[Proposal] = []

        def take(points: Iterable[Point], tries: int) -> None:
            for _, point in zip(range(tries), points, strict=False):
                if len(found) == count:
                    return
                made = terrain.made(point)
                if made.digest not in seen:
                    seen.add(made.digest)
                    found.append(Proposal(text=made.text, note=_note(brief, terrain, point)))

        take((Point.of(at, point_of(one, terrain.spaces[at])) for at, one in enumerate(terrain.bases)), 1000)
        take(_STRATEGIES[self.strategy](terrain), min(count * 50, MOST_TRIES))
        if sum(size_of(space) for space in terrain.spaces) <= 100_000:  # what chance has not found
            take(terrain.all(), 100_000)
        return found


def _note(brief: Brief, terrain: Terrain, point: Point) -> str:
    base = terrain.bases[point.template]
    if base.source == brief.start.source:  # a likely point of the start
        base, point = brief.start, Point(0, point.values)
    before = point_of(base, terrain.spaces[point.template])
    words = [f"{name} {before[name]} -> {value}" for name, value in point.values if value != before[name]]
    name = "" if point.template == 0 else f"template {point.template} ({base.language})"
    return ": ".join(filter(None, (name, ", ".join(words))))


def _all_values(space: Space) -> Iterator[Values]:
    names = list(space)

    def below(at: int, values: Values) -> Iterator[Values]:
        if at == len(names):
            yield dict(values)
            return
        for value in space[names[at]]:
            values[names[at]] = value
            yield from below(at + 1, values)

    return below(0, {})
