"""Medians, percentiles and honest ratios of timings. Standard library only, deterministic by seed.

The bootstrap of a median needs no resampling: drawing n values with replacement and taking the middle one is the same
as drawing the position of the middle one, which is a Beta variable (the middle order statistic of n uniform numbers).
That is exact, and fast enough to be recomputed for every row of a table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpu_accel.errors import InvalidInputError

_FEWEST_FOR_BOOTSTRAP = 6  # below six samples no 95 % interval of a median exists without assumptions; see _ends
_MAD_TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution, in standard deviations


@dataclass(frozen=True)
class Ratio:
    """A ratio with its confidence interval. As other's time / this time, above 1 means that this one is faster."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval relative to the median: what a stopping rule compares with the noise wanted."""
        return (self.high - self.low) / (2 * self.median)

    @property
    def inverse(self) -> Ratio:
        """The same comparison seen from the other side."""
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    def as_dict(self) -> dict[str, float | list[float]]:
        """The form in which records keep it (a 95 % interval)."""
        return {"median": self.median, "ci95": [self.low, self.high]}


def median(samples: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = _ordered(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def percentile(samples: Sequence[float], q: float) -> float:
    """The value below which ``q`` percent (0 to 100) of the samples lie, interpolated linearly between neighbours."""
    if not 0 <= q <= 100:
        raise InvalidInputError(f"a percentile lies between 0 and 100, not at {q!r}")
    ordered = _ordered(samples)
    position = q / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return min(high, low + (high - low) * (position - below))


def rel_std(samples: Sequence[float]) -> float:
    """Sample standard deviation / mean."""
    ordered = _ordered(samples)
    if len(ordered) < 2:
        raise InvalidInputError("a standard deviation needs at least 2 samples")
    mean = math.fsum(ordered) / len(ordered)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in ordered) / (len(ordered) - 1)) / mean


def outliers(samples: Sequence[float], *, sigmas: float = 5.0) -> list[int]:
    """Positions of samples further than ``sigmas`` robust standard deviations from the median.

    The scale is the median absolute deviation, which the outliers themselves do not move. They are reported, never
    removed. When more than half of the samples are equal the scale is 0 and every other value counts.
    """
    middle = median(samples)
    scale = _MAD_TO_SIGMA * median([abs(x - middle) for x in samples])
    return [i for i, x in enumerate(samples) if abs(x - middle) > sigmas * scale]


def bootstrap_median(
    samples: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Bootstrap percentile interval (low, high) of the median."""
    return _ends(_medians(samples, resamples, seed), confidence)


def bootstrap_ratio(
    a: Sequence[float],
    b: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
    paired: bool = False,
) -> Ratio:
    """Ratio of medians a / b with a bootstrap percentile interval; a = other's times, b = ours: above 1, we are faster.

    ``paired`` says that a[i] and b[i] were taken in one interleaved round: then the statistic is the median of the
    ratios a[i] / b[i], from which a drift of the clock that slows both cancels.
    With fewer than 6 samples the interval spans everything seen. Raises InvalidInputError on fewer than 2 samples, on
    values that are not above 0, and on pairs of different lengths.
    """
    if min(len(a), len(b)) < 2:
        raise InvalidInputError(f"a ratio needs at least 2 samples on each side, not {len(a)} and {len(b)}")
    if min(_ordered(a)[0], _ordered(b)[0]) <= 0:
        raise InvalidInputError("times must be above 0")
    if paired:
        if len(a) != len(b):
            raise InvalidInputError(f"paired samples must be as many on each side, not {len(a)} and {len(b)}")
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        return Ratio(median(ratios), *_ends(_medians(ratios, resamples, seed), confidence))
    if min(len(a), len(b)) < _FEWEST_FOR_BOOTSTRAP:
        return Ratio(median(a) / median(b), min(a) / max(b), max(a) / min(b))
    tops, bottoms = _medians(a, resamples, seed), _medians(b, resamples, seed + 1_000_003)
    ratios = [top / bottom for top, bottom in zip(tops, bottoms, strict=True)]
    value = median(a) / median(b)
    low, high = _ends(ratios, confidence)
    return Ratio(value, min(low, value), max(high, value))


def verdict(ratio: Ratio, noise: float = 0.02) -> str:
    """What an interval allows to say of a speed ratio: "faster", "slower", "same" or "ambiguous".

    Faster (slower) needs the whole interval above (below) the noise band around 1, same needs it inside; anything
    else is ambiguous, so that noise alone turns nothing red or green.
    """
    top, bottom = 1 + noise, 1 / (1 + noise)
    if ratio.low > top:
        return "faster"
    if ratio.high < bottom:
        return "slower"
    return "same" if bottom <= ratio.low and ratio.high <= top else "ambiguous"


def _ordered(samples: Sequence[float]) -> list[float]:
    if not len(samples):
        raise InvalidInputError("no samples")
    ordered = sorted(samples)
    # NaN does not sort, so look at every value and not only at the ends.
    if not all(map(math.isfinite, ordered)):
        raise InvalidInputError("samples must be finite numbers")
    return ordered


def _medians(samples: Sequence[float], resamples: int, seed: int) -> list[float]:
    """Medians of bootstrap resamples; below six samples, the samples themselves (their ends are all one can say)."""
    ordered = _ordered(samples)
    if len(ordered) < _FEWEST_FOR_BOOTSTRAP:
        return ordered
    return [(ordered[i] + ordered[j]) / 2 for i, j in _middle_positions(len(ordered), resamples, seed)]


@lru_cache(maxsize=256)
def _middle_positions(n: int, resamples: int, seed: int) -> list[tuple[int, int]]:
    """Positions, in the sorted sample, of the middle one or two values of resamples of n out of n."""
    rng = random.Random(f"{seed}/{n}")
    half = n // 2
    positions = []
    for _ in range(resamples):
        if n % 2:
            lower = upper = rng.betavariate(half + 1, half + 1)
        else:
            lower = rng.betavariate(half, half + 1)
            # The next order statistic is the smallest of the `half` uniform numbers that lie above.
            upper = lower + (1 - lower) * (1 - (1 - rng.random()) ** (1 / half))
        positions.append((min(int(lower * n), n - 1), min(int(upper * n), n - 1)))
    return positions


def _ends(values: list[float], confidence: float) -> tuple[float, float]:
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence lies between 0 and 1, not at {confidence!r}")
    if len(values) < _FEWEST_FOR_BOOTSTRAP:
        return min(values), max(values)
    tail = 50 * (1 - confidence)
    return percentile(values, tail), percentile(values, 100 - tail)
