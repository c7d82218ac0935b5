"""Statistics against closed forms, brute-force resampling and known coverage."""

from __future__ import annotations

import random
import statistics as stdlib
import time

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.statistics import (
    Ratio,
    _medians,
    bootstrap_median,
    bootstrap_ratio,
    median,
    outliers,
    percentile,
    rel_std,
    verdict,
)


def draw(n, *, scale=1.0, seed=0, sigma=0.1):
    """Right-skewed positive numbers, the shape that timings have; their median is ``scale``."""
    rng = random.Random(seed)
    return [scale * rng.lognormvariate(0, sigma) for _ in range(n)]


def test_median_and_percentile():
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([4.0, 1.0, 2.0, 3.0]) == 2.5 and median([7.0]) == 7.0
    assert percentile([0.0, 10.0], 20) == pytest.approx(2.0)
    assert percentile([5.0, 1.0, 3.0], 0) == 1.0 and percentile([5.0, 1.0, 3.0], 100) == 5.0
    samples = draw(101)
    assert percentile(samples, 50) == median(samples) == stdlib.median(samples)
    deciles = stdlib.quantiles(samples, n=10, method="inclusive")
    assert [percentile(samples, q) for q in range(10, 100, 10)] == pytest.approx(deciles)
    assert percentile([0.1] * 7, 80) == 0.1  # interpolation must not leave the range by rounding


def test_spread():
    samples = draw(50)
    assert rel_std(samples) == pytest.approx(stdlib.stdev(samples) / stdlib.mean(samples))
    assert outliers([1.0, 1.01, 0.99, 1.02, 9.0, 0.98, 0.1]) == [4, 6]
    assert outliers([1.0, 1.01, 0.99, 1.02]) == []


@pytest.mark.parametrize("bad", [[], [1.0, float("nan"), 2.0], [1.0, float("inf")]])
def test_bad_samples_are_refused(bad):
    for call in (median, rel_std, outliers, bootstrap_median, lambda s: bootstrap_ratio(s, [1.0, 2.0])):
        with pytest.raises(InvalidInputError):
            call(bad)


def test_bad_arguments_are_refused():
    good = [1.0, 2.0, 3.0]
    for call in (
        lambda: percentile(good, 101),
        lambda: rel_std([1.0]),
        lambda: bootstrap_ratio([1.0], good),
        lambda: bootstrap_ratio([0.0, 1.0], good),
        lambda: bootstrap_ratio(good, [1.0, 2.0], paired=True),
        lambda: bootstrap_median(draw(20), confidence=95),
    ):
        with pytest.raises(InvalidInputError):
            call()


def test_degenerate_numbers_have_defined_answers():
    inf, nan = float("inf"), float("nan")
    good = draw(20)
    assert rel_std([0.0, 0.0, 0.0]) == 0.0
    assert median([1.7e308, 1.6e308]) == pytest.approx(1.65e308)
    assert percentile([-1.7e308, 1.7e308], 50) == 0.0
    assert Ratio(0.0, 0.0, 1.0).half_width == inf
    for call in (
        lambda: rel_std([-1.0, 1.0]),
        lambda: rel_std([1e300, 2e300]),
        lambda: median([1, 10**400]),
        lambda: median(["fast"]),
        lambda: Ratio(1.0, 0.0, 2.0).inverse,
        lambda: Ratio(5e-324, 5e-324, 1.0).inverse,
        lambda: Ratio(1.0, 0.5, inf).inverse,
        lambda: bootstrap_ratio(good, good[::-1], resamples=0),
        lambda: bootstrap_ratio([1.0, 2.0], [2.0, 3.0], resamples=0),
        lambda: bootstrap_median(good, resamples=-1),
        lambda: bootstrap_median(good, resamples=1.5),
        lambda: bootstrap_ratio([1.0, 2.0], [2.0, 3.0], confidence=95),
        lambda: bootstrap_ratio([1e308, 1e308], [1e-308, 1e-308]),
        lambda: bootstrap_ratio([1e308] * 9, [1e-308] * 9, paired=True),
        lambda: bootstrap_ratio([1e-308, 1e-308], [1e308, 1e308]),
        lambda: verdict(Ratio(1.0, 0.9, 1.1), noise=-1),
        lambda: verdict(Ratio(1.0, 0.9, 1.1), noise=nan),
        lambda: verdict(Ratio(inf, inf, inf)),
        lambda: verdict(Ratio(nan, nan, nan)),
        lambda: verdict(Ratio(1.0, 1.1, 0.9)),
    ):
        with pytest.raises(InvalidInputError):
            call()


@pytest.mark.parametrize("n", [2, 5, 6, 51])
@pytest.mark.parametrize("paired", [False, True])
def test_samples_are_the_same_as_themselves(n, paired):
    samples = draw(n, sigma=0.3)
    for noise in (0.0, 0.02):
        assert verdict(bootstrap_ratio(samples, list(samples), paired=paired), noise) == "same"
    assert verdict(bootstrap_ratio(samples, draw(n, sigma=0.3, seed=9), paired=paired)) != "same"


def test_bootstrap_is_deterministic_by_seed():
    a, b = draw(40, seed=1), draw(41, seed=2)
    assert bootstrap_ratio(a, b, seed=5) == bootstrap_ratio(a, b, seed=5)
    assert bootstrap_ratio(a, b, seed=5) != bootstrap_ratio(a, b, seed=6)


@pytest.mark.parametrize("n", [15, 16])
def test_the_shortcut_is_the_bootstrap(n):
    """Against resampling for real: the resampled median has the same distribution function (off by < 0.015)."""
    samples, rng, draws = draw(n, seed=3), random.Random(0), 20_000
    brute = [stdlib.median(rng.choices(samples, k=n)) for _ in range(draws)]
    quick = _medians(samples, draws, seed=0)
    for x in sorted(samples):
        expected = sum(value <= x for value in brute) / draws
        assert sum(value <= x for value in quick) / draws == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(("paired", "truth"), [(False, 1.25), (True, 1.25)])
def test_intervals_cover_the_truth_95_times_in_100(paired, truth):
    trials, covered = 400, 0
    for trial in range(trials):
        a, b = draw(51, scale=truth, seed=2 * trial), draw(51, seed=2 * trial + 1)
        ratio = bootstrap_ratio(a, b, resamples=1000, paired=paired)
        assert ratio.low <= ratio.median <= ratio.high
        covered += ratio.low <= truth <= ratio.high
    assert 0.92 <= covered / trials <= 0.985  # binomial spread at 400 trials is about 0.011


def test_pairs_cancel_a_drift_that_slows_both():
    drift = [1 + 0.01 * i for i in range(60)]
    a = [1.10 * d * x for d, x in zip(drift, draw(60, seed=1, sigma=0.01), strict=True)]
    b = [d * x for d, x in zip(drift, draw(60, seed=2, sigma=0.01), strict=True)]
    alone, together = bootstrap_ratio(a, b), bootstrap_ratio(a, b, paired=True)
    assert together.half_width < 0.25 * alone.half_width
    assert together.low < 1.10 < together.high


def test_few_samples_span_everything_seen():
    assert bootstrap_ratio([2.0, 2.2], [1.0, 1.1]) == Ratio(2.1 / 1.05, 2.0 / 1.1, 2.2 / 1.0)
    assert bootstrap_median([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_ratio():
    ratio = Ratio(2.0, 1.6, 2.5)
    assert ratio.half_width == pytest.approx(0.225)
    assert ratio.inverse == Ratio(0.5, 0.4, 0.625)
    assert ratio.as_dict() == {"median": 2.0, "ci95": [1.6, 2.5]}


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.03, 1.05, "faster"),
        (0.90, 0.95, "slower"),
        (0.99, 1.01, "same"),
        (1.01, 1.05, "ambiguous"),
        (0.95, 0.99, "ambiguous"),
        (0.90, 1.10, "ambiguous"),
        (1.021, 1.021, "faster"),
    ],
)
def test_verdicts(low, high, word):
    ratio = Ratio((low * high) ** 0.5, low, high)
    assert verdict(ratio) == word
    opposite = {"faster": "slower", "slower": "faster"}.get(word, word)
    assert verdict(ratio.inverse) == opposite


def test_a_whole_table_takes_about_a_second():
    cells = [(draw(100 + i, seed=i), draw(100 + i, seed=-i)) for i in range(36)]
    start = time.process_time()
    for a, b in cells:
        for _ in range(5):
            bootstrap_ratio(a, b)
    assert time.process_time() - start < 3.0
