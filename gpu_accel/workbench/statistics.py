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
        """Half the interval relative to the median: what a stopping rule compares with the noise wanted.

        Infinite for a median of 0.
        """
        if not self.median:
            return math.inf
        return (self.high - self.low) / (2 * self.median)

    @property
    def inverse(self) -> Ratio:
        """The same comparison seen from the other side; raises InvalidInputError for one that has no finite inverse."""
        ends = (self.median, self.high, self.low)
        if not all(math.isfinite(x) and x > 0 and math.isfinite(1 / x) for x in ends):
            raise InvalidInputError(f"{self} has no inverse")
        return Ratio(*(1 / x for x in ends))

    def as_dict(self) -> dict[str, float | list[float]]:
        """The form in which records keep it (a 95 % interval)."""
        return {"median": self.median, "ci95": [self.low, self.high]}


def median(samples: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = _ordered(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else _middle(ordered[half - 1], ordered[half])


def percentile(samples: Sequence[float], q: float) -> float:
    """The value below which ``q`` percent (0 to 100) of the samples lie, interpolated linearly between neighbours."""
    if not 0 <= q <= 100:
        raise InvalidInputError(f"a percentile lies between 0 and 100, not at {q!r}")
    ordered = _ordered(samples)
    position = q / 100 * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    part = position - below
    inside = low + (high - low) * part
    return min(high, inside if math.isfinite(inside) else low * (1 - part) + high * part)


def rel_std(samples: Sequence[float]) -> float:
    """Sample standard deviation / mean; 0 for equal samples, zeros among them.

    Raises InvalidInputError where it has no value, because the mean is 0 or the numbers are too large.
    """
    ordered = _ordered(samples)
    if len(ordered) < 2:
        raise InvalidInputError("a standard deviation needs at least 2 samples")
    if ordered[0] == ordered[-1]:
        return 0.0
    try:
        mean = math.fsum(ordered) / len(ordered)
        return math.sqrt(math.fsum((x - mean) ** 2 for x in ordered) / (len(ordered) - 1)) / mean
    except (ZeroDivisionError, OverflowError) as error:
        raise InvalidInputError("samples with a mean of 0, or too large, have no relative deviation") from error


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
    _validate(confidence, resamples)
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
    With fewer than 6 samples the interval spans everything seen. Samples compared with themselves give exactly 1: they
    are one measurement, not two independent ones. Raises InvalidInputError on fewer than 2 samples, on values that are
    not above 0, on pairs of different lengths, and on ratios too large or too small for a float.
    """
    if min(len(a), len(b)) < 2:
        raise InvalidInputError(f"a ratio needs at least 2 samples on each side, not {len(a)} and {len(b)}")
    if min(_ordered(a)[0], _ordered(b)[0]) <= 0:
        raise InvalidInputError("times must be above 0")
    if paired and len(a) != len(b):
        raise InvalidInputError(f"paired samples must be as many on each side, not {len(a)} and {len(b)}")
    _validate(confidence, resamples)
    if max(a) / min(b) == math.inf or min(a) / max(b) == 0:
        raise InvalidInputError("the samples are too far apart for their ratio to be a number")
    if len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True)):
        return Ratio(1.0, 1.0, 1.0)
    if paired:
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
    else is ambiguous, so that noise alone turns nothing red or green. Raises InvalidInputError for a noise that is
    negative or not finite, and for a ratio that is no interval of numbers >= 0.
    """
    if not (math.isfinite(noise) and noise >= 0):
        raise InvalidInputError(f"noise must be a number >= 0, not {noise!r}")
    # Written so that NaN, which compares false with everything, is refused too.
    if not (0 <= ratio.low <= ratio.high < math.inf and 0 <= ratio.median < math.inf):
        raise InvalidInputError(f"{ratio} is no interval of finite numbers >= 0")
    top, bottom = 1 + noise, 1 / (1 + noise)
    if ratio.low > top:
        return "faster"
    if ratio.high < bottom:
        return "slower"
    return "same" if bottom <= ratio.low and ratio.high <= top else "ambiguous"


def _ordered(samples: Sequence[float]) -> list[float]:
    if not len(samples):
        raise InvalidInputError("no samples")
    # NaN does not sort, so look at every value and not only at the ends.
    try:
        finite = all(map(math.isfinite, samples))
    except (TypeError, OverflowError):  # no numbers, or integers too large for a float
        finite = False
    if not finite:
        raise InvalidInputError("samples must be finite numbers")
    return sorted(samples)


def _middle(low: float, high: float) -> float:
    middle = (low + high) / 2
    return middle if math.isfinite(middle) else low / 2 + high / 2


def _medians(samples: Sequence[float], resamples: int, seed: int) -> list[float]:
    """Medians of bootstrap resamples; below six samples, the samples themselves (their ends are all one can say)."""
    ordered = _ordered(samples)
    if len(ordered) < _FEWEST_FOR_BOOTSTRAP:
        return ordered
    return [_middle(ordered[i], ordered[j]) for i, j in _middle_positions(len(ordered), resamples, seed)]


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


def _validate(confidence: float, resamples: int) -> None:
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence lies between 0 and 1, not at {confidence!r}")
    if not isinstance(resamples, int) or resamples < 1:
        raise InvalidInputError(f"resamples must be an integer of at least 1, not {resamples!r}")


def _ends(values: list[float], confidence: float) -> tuple[float, float]:
    if len(values) < _FEWEST_FOR_BOOTSTRAP:
        return min(values), max(values)
    tail = 50 * (1 - confidence)
    return percentile(values, tail), percentile(values, 100 - tail)
