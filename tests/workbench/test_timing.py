"""The logic of timing on a fake device: order, flushing, rotation, stopping, graphs, failures."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.testing.fake_timer import FakeTimer
from gpu_accel.workbench.cuda_timer import CudaTimer
from gpu_accel.workbench.samples import Samples, median_interval, noise_of, reason, relative_half_width
from gpu_accel.workbench.timing import compare, sustained


@pytest.fixture(autouse=True, scope="module")
def _what_others_made():
    """A failure collects all garbage: looking at what other tests of this process made would take most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def kernels(timer: FakeTimer, *, sets: int = 1, **ms: float) -> dict[str, list]:
    """For each name, `sets` calls that take `ms` and log (name, input set)."""

    def call(name: str, which: int, cost: float):
        return lambda: timer.work(cost, (name, which))

    return {name: [call(name, which, cost) for which in range(sets)] for name, cost in ms.items()}


def rounds_of(timer: FakeTimer) -> list[list]:
    """What happened in each measured round, from the log between "clocks on" and "clocks off"."""
    log = timer.log[timer.log.index("clocks on") + 1 : timer.log.index("clocks off")]
    rounds = [list(group) for is_sync, group in itertools.groupby(log, lambda entry: entry == "sync") if not is_sync]
    return rounds


def fixed(rounds: int) -> dict:
    """Arguments that make exactly this many rounds."""
    return {"min_rounds": rounds, "max_rounds": rounds}


def test_times_are_those_of_the_call_alone():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=1.0, b=2.5), timer=timer, **fixed(4))
    assert samples["a"].times == pytest.approx([1.0] * 4)
    assert samples["b"].times == pytest.approx([2.5] * 4), "neither flush nor lead nor the other's work is in it"
    assert list(samples) == ["a", "b"]
    assert samples["a"].interleaved == ("a", "b")
    assert samples["a"].clocks["throttle"] == ["power-cap"]


def test_each_round_runs_everyone_once_in_rotating_order():
    timer = FakeTimer()
    compare(kernels(timer, a=1.0, b=1.0, c=1.0), timer=timer, **fixed(6))
    orders = ["".join(entry[0] for entry in entries if isinstance(entry, tuple)) for entries in rounds_of(timer)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]
    assert all(Counter(position) == Counter("aabbcc") for position in zip(*orders, strict=True))


def test_flush_and_lead_come_before_the_first_mark_and_nothing_but_the_call_between_marks():
    timer = FakeTimer()
    compare(kernels(timer, a=1.0), timer=timer, **fixed(3))
    assert rounds_of(timer) == [["flush", "lead", "mark", ("a", 0), "mark"]] * 3


def test_warm_cache_runs_the_same_inputs_untimed_before():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=1.0, sets=2), timer=timer, flush_l2=False, **fixed(2))
    assert rounds_of(timer) == [[("a", i), "lead", "mark", ("a", i), "mark"] for i in (0, 1)]
    assert samples["a"].l2 == "warm" and "flush" not in timer.log


def test_inputs_rotate_and_all_are_warmed_up_before():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=1.0, sets=3), timer=timer, **fixed(6))
    used = [entry[1] for entries in rounds_of(timer) for entry in entries if isinstance(entry, tuple)]
    assert used == [0, 1, 2, 0, 1, 2]
    before = timer.log[: timer.log.index("clocks on")]
    assert {("a", 0), ("a", 1), ("a", 2)} <= set(before)
    assert samples["a"].inputs == 3


def test_slow_first_call_is_not_in_the_samples():
    timer = FakeTimer()
    costs = itertools.chain([5000.0], itertools.repeat(1.0))
    samples = compare({"a": [lambda: timer.work(next(costs))]}, timer=timer, seconds=100, **fixed(5))
    assert max(samples["a"].times) == pytest.approx(1.0)


def test_quiet_device_stops_at_min_rounds_for_noise():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=1.0, b=2.0), timer=timer, seconds=100, min_rounds=7)
    assert len(samples["a"].times) == 7 and samples["a"].stopped == "noise" and samples["a"].noise < 1e-9


def noisy(timer: FakeTimer, spread: float, seed: int = 0):
    rng = random.Random(seed)
    return [lambda: timer.work(1 + spread * rng.uniform(-1, 1))]


def test_noisy_device_runs_until_the_interval_is_narrow_enough():
    lengths = {}
    for noise in (0.2, 0.1, 0.06):
        timer = FakeTimer()
        samples = compare({"a": noisy(timer, 0.3)}, timer=timer, seconds=100, max_rounds=1000, noise=noise)
        assert samples["a"].stopped == "noise" and samples["a"].noise < noise
        assert samples["a"].noise == relative_half_width(samples["a"].times)
        lengths[noise] = len(samples["a"].times)
    assert 10 <= lengths[0.2] <= lengths[0.1] <= lengths[0.06] and lengths[0.06] > 10


def test_max_rounds_and_budget_stop_a_noisy_run():
    timer = FakeTimer()
    samples = compare({"a": noisy(timer, 0.3)}, timer=timer, seconds=100, max_rounds=12, noise=1e-3)
    assert (len(samples["a"].times), samples["a"].stopped) == (12, "max_rounds")
    timer = FakeTimer()
    samples = compare({"a": noisy(timer, 0.3), "b": noisy(timer, 0.3, seed=1)}, timer=timer, seconds=0.1, noise=1e-6)
    assert samples["a"].stopped == "seconds"
    assert 80 <= len(samples["a"].times) <= 110, "0.1 s for each of two: 0.2 s of rounds of about 2.1 ms"


def test_very_slow_call_is_cut_short_but_not_below_three_rounds():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=900.0), timer=timer, seconds=0.25, min_rounds=10, noise=1e-12)
    assert (len(samples["a"].times), samples["a"].stopped) == (3, "seconds")


def test_common_drift_widens_medians_but_not_ratios_and_does_not_keep_the_run_going():
    timer = FakeTimer(drift=0.01)
    samples = compare(kernels(timer, a=1.0, b=2.0, c=4.0), timer=timer, seconds=100, noise=0.03, max_rounds=300)
    assert samples["b"].stopped == "noise"
    assert relative_half_width(samples["b"].times) > 0.05 > 0.03 > samples["b"].noise
    assert len({len(s.times) for s in samples.values()}) == 1, "rounds are paired"


def test_short_call_on_cold_cache_is_one_graph_replay_a_sample():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=0.01, b=0.2, sets=2), timer=timer, **fixed(4))
    assert {s.method for s in samples.values()} == {"graph"}, "one method for all"
    assert {s.calls for s in samples.values()} == {1}, "a second call would find the cache warm"
    assert rounds_of(timer)[0] == [
        *("flush", "lead", "mark", "replay", ("a", 0), "mark"),
        *("flush", "lead", "mark", "replay", ("b", 0), "mark"),
    ]
    assert samples["a"].times == pytest.approx([0.01] * 4)


def test_short_call_on_warm_cache_is_repeated_within_a_graph():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=0.01, b=0.06), timer=timer, flush_l2=False, **fixed(4))
    assert (samples["a"].method, samples["a"].calls) == ("graph", 20)
    assert (samples["b"].method, samples["b"].calls) == ("graph", 3)
    assert samples["a"].times == pytest.approx([0.01] * 4) and samples["b"].times == pytest.approx([0.06] * 4)


def test_long_calls_are_timed_with_events():
    timer = FakeTimer()
    assert compare(kernels(timer, a=0.5), timer=timer, **fixed(3))["a"].method == "events"
    assert "capture" not in timer.log


def uncapturable(timer: FakeTimer, ms: float):
    def call() -> None:
        timer.work(ms)

    call.uncapturable = True
    return call


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "warm"])
def test_auto_falls_back_to_events_for_all_and_says_why(flush: bool):
    timer = FakeTimer()
    calls = kernels(timer, a=0.01) | {"b": [uncapturable(timer, 0.01)]}
    samples = compare(calls, timer=timer, flush_l2=flush, **fixed(3))
    assert {s.method for s in samples.values()} == {"events"}
    assert "b cannot be captured" in samples["a"].note and "long story" not in samples["a"].note
    assert samples["a"].times == pytest.approx([0.01] * 3)
    assert samples["a"].calls == (1 if flush else 20)


def test_graph_asked_for_fails_only_the_one_that_cannot():
    timer = FakeTimer()
    calls = kernels(timer, a=1.0) | {"b": [uncapturable(timer, 1.0)]}
    samples = compare(calls, timer=timer, method="graph", **fixed(3))
    assert samples["a"].ok and samples["a"].method == "graph"
    assert not samples["b"].ok and "cannot be captured" in samples["b"].failed


def test_out_of_memory_in_warm_up_is_reported_and_the_others_are_timed():
    timer = FakeTimer()

    def too_big() -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.\nmore lines")

    samples = compare({"big": [too_big]} | kernels(timer, a=1.0), timer=timer, **fixed(3))
    assert list(samples) == ["big", "a"]
    assert samples["big"].failed == "CUDA out of memory. Tried to allocate 96.00 GiB." and not samples["big"].times
    assert samples["a"].ok and samples["a"].interleaved == ("a",) and timer.released == 1
    with pytest.raises(InvalidInputError, match="out of memory"):
        _ = samples["big"].median


def test_failure_in_the_middle_drops_one_and_keeps_the_rounds_of_the_others_whole():
    timer = FakeTimer()
    budget = iter(range(9))

    def leaky() -> None:
        if next(budget, None) is None:
            raise RuntimeError("device-side problem")
        timer.work(1.0)

    samples = compare(kernels(timer, a=1.0) | {"leaky": [leaky]} | kernels(timer, c=3.0), timer=timer, **fixed(12))
    assert samples["leaky"].failed == "RuntimeError: device-side problem"
    assert len(samples["a"].times) == len(samples["c"].times) == 12
    assert samples["a"].interleaved == ("a", "c")


def test_all_failing_is_not_an_exception():
    timer = FakeTimer()

    def bad() -> None:
        raise MemoryError

    samples = compare({"x": [bad], "y": [bad]}, timer=timer)
    assert [s.failed for s in samples.values()] == ["out of memory: no message"] * 2


def test_device_error_seen_only_at_synchronisation_names_the_round():
    timer = FakeTimer()
    count = itertools.count()

    def breaks() -> None:
        timer.work(1.0)
        if next(count) == 8:
            timer.broken = "an illegal memory access was encountered"

    with pytest.raises(HardwareError, match="a, b.*illegal memory access|b, a.*illegal memory access"):
        compare({"a": [breaks]} | kernels(timer, b=1.0), timer=timer, **fixed(20))


def test_interrupt_is_passed_on():
    timer = FakeTimer()

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": [interrupted]}, timer=timer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"calls": {}},
        {"calls": {"a": []}},
        {"method": "stopwatch"},
        {"seconds": 0},
        {"noise": 2},
        {"noise": math.nan},
        {"min_rounds": 9, "max_rounds": 3},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict):
    timer = FakeTimer()
    with pytest.raises(InvalidInputError):
        compare(**{"calls": kernels(timer, a=1.0), "timer": timer} | arguments)


def test_sustained_keeps_the_tail_of_a_slowing_load():
    timer = FakeTimer(drift=0.0005)
    samples = sustained(kernels(timer, a=1.0, b=1.0, sets=2), timer=timer, seconds=1.0, tail=0.25)
    a = samples["a"]
    assert (a.mode, a.l2, a.method, a.interleaved) == ("sustained", "warm", "events", ("a",))
    assert 0.25 <= sum(a.times) / 1e3 <= 0.27, "a quarter of a second of the load"
    assert min(a.times) > 1.25, "the early, fast calls are left out"
    assert "flush" not in timer.log and a.clocks["clock_mhz"]["median"] == 1700
    load = timer.log[timer.log.index("clocks on") : timer.log.index("clocks off")]
    assert "sync" not in load[:-1], "the host never lets the device run dry"
    assert {("a", 0), ("a", 1)} <= set(load)


def test_sustained_repeats_short_calls_in_a_graph_and_bounds_the_queue():
    timer = FakeTimer()
    samples = sustained(kernels(timer, a=0.002), timer=timer, seconds=0.05)
    assert samples["a"].method == "graph" and samples["a"].calls == 100
    assert statistics.median(samples["a"].times) == pytest.approx(0.002)
    assert timer.log.count("wait") > 10


def test_sustained_reports_failures_and_a_call_longer_than_the_load():
    timer = FakeTimer()

    def bad() -> None:
        raise RuntimeError("no kernel image")

    samples = sustained({"bad": [bad]} | kernels(timer, slow=3000.0), timer=timer, seconds=0.5)
    assert samples["bad"].failed == "RuntimeError: no kernel image" and samples["bad"].mode == "sustained"
    assert samples["slow"].ok


@pytest.mark.parametrize("n", [6, 10, 11, 25, 100, 401])
def test_median_interval_covers_95_percent_whatever_the_distribution(n: int):
    low, high = median_interval(list(range(n)))
    below = [math.comb(n, k) / 2**n for k in range(n + 1)]  # P(k values lie below the true median)
    assert sum(below[low + 1 : high + 1]) >= 0.95
    assert n < 25 or high - low < 0.6 * n, "and says something"


def test_noise_uses_the_smaller_of_median_and_ratio_and_judges_the_first_by_the_worst():
    drifting = [1.0 + 0.01 * i for i in range(40)]
    times = {"first": drifting, "alike": [2 * t for t in drifting], "steady": [5.0] * 40}
    noise = noise_of(times)
    assert noise["alike"] < 1e-12 and noise["steady"] == 0
    assert noise["first"] == relative_half_width(drifting) > 0.02, "steady/first is as wide as first itself"
    assert noise_of({"only": drifting}) == {"only": relative_half_width(drifting)}
    assert relative_half_width([1.0, 1.0]) == math.inf, "two samples prove nothing"


class LyingTimer(FakeTimer):
    """Reports `bad` as the time of the implementation named `liar`, after its first `honest` times."""

    def __init__(self, liar: str, bad: float, *, honest: int) -> None:
        super().__init__()
        self.liar, self.bad, self.honest, self.last = liar, bad, honest, ""

    def work(self, ms: float, what: object = "work") -> None:
        super().work(ms, what)
        self.last = what[0]

    def mark(self):
        return super().mark(), self.last

    def wait(self, mark) -> None:
        super().wait(mark[0])

    def elapsed(self, start, end) -> float:
        if end[1] == self.liar:
            self.honest -= 1
            if self.honest < 0:
                return self.bad
        return end[0] - start[0]


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("honest", [0, 4, 9], ids=["from the start", "in the first round", "later"])
@pytest.mark.parametrize("liar", ["peer", "last"], ids=["first of all", "last of all"])
def test_a_time_that_is_none_fails_its_own_implementation_only(bad, honest, liar):
    order = ["peer", "ours", "last"]
    timer = LyingTimer(liar, bad, honest=honest)
    samples = compare(kernels(timer, **dict.fromkeys(order, 1.0)), timer=timer, min_rounds=8, max_rounds=12)
    assert list(samples) == order
    assert "which is no time" in samples[liar].failed and not samples[liar].times
    for name in set(order) - {liar}:
        assert samples[name].ok and samples[name].noise < 0.01 and liar not in samples[name].interleaved
        assert samples[name].times == pytest.approx([1.0] * len(samples[name].times)) and len(samples[name].times) >= 8


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_sustained_times_that_are_none_fail_their_own_implementation_only(bad):
    timer = LyingTimer("peer", bad, honest=6)
    samples = sustained(kernels(timer, peer=1.0, ours=1.0), seconds=0.05, timer=timer)
    assert "which is no time" in samples["peer"].failed and samples["ours"].ok


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("liar", ["a", "b"])
def test_noise_of_values_that_are_no_times_is_infinite_for_them_alone(bad, liar):
    times = {name: [1.0, 1.1, 0.9, 1.0] for name in ("a", "b", "c")}
    expected = relative_half_width(times["c"])
    times[liar] = [1.0, bad, 1.0, 1.0]
    noise = noise_of(times)
    assert noise.pop(liar) == math.inf
    assert all(value <= expected for value in noise.values()) and set(noise) == {"a", "b", "c"} - {liar}
    assert noise_of({}) == {}


def test_timing_dict_says_how():
    timing = Samples(name="a", times=(1.0, 2.0, 3.0), interleaved=("a", "b"), stopped="noise", note="n").as_timing()
    assert timing == {
        "method": "events",
        "calls": 1,
        "l2": "flushed",
        "mode": "burst",
        "rounds": 3,
        "inputs": 1,
        "interleaved": ["a", "b"],
        "stopped": "noise",
        "note": "n",
    }


def test_reasons_are_one_line():
    assert reason(OutOfMemoryError("cannot allocate\nx")) == "out of memory: cannot allocate"
    assert reason(ValueError("")) == "ValueError: no message"


def test_clean_cache_is_asked_for_before_every_sample_and_named():
    timer = FakeTimer()
    samples = compare(kernels(timer, a=1.0), timer=timer, clean_l2=True, **fixed(3))
    assert rounds_of(timer) == [["flush, clean", "lead", "mark", ("a", 0), "mark"]] * 3
    assert "flush" not in timer.log, "warming up under another state would choose graphs by other times"
    assert samples["a"].l2 == "clean" and samples["a"].as_timing()["l2"] == "clean"
    assert samples["a"].times == pytest.approx([1.0] * 3)


def test_a_warm_cache_is_not_cleaned():
    timer = FakeTimer()
    assert compare(kernels(timer, a=1.0), timer=timer, flush_l2=False, clean_l2=True, **fixed(2))["a"].l2 == "warm"
    assert not [entry for entry in timer.log if str(entry).startswith("flush")]


def test_cleaning_ends_with_a_read_of_another_buffer_that_is_larger_than_the_cache(monkeypatch):
    l2, log = 1 << 20, []

    class Memory:
        def __init__(self, *shape, dtype, device) -> None:
            self.bytes = 4 * math.prod(n for n in shape if n != ())

        def zero_(self) -> None:
            log.append(("write", self))

    def amax(source, dims, *, out) -> None:
        log.append(("read", source))
        assert out.bytes == 4, "what is written must be next to nothing"

    properties = SimpleNamespace(L2_cache_size=l2)
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True, current_device=lambda: 0, get_device_properties=lambda _: properties
        ),
        empty=Memory, zeros=Memory, amax=amax, int32=None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr("gpu_accel.workbench.cuda_timer.open_gpu", lambda: (None, "no GPU here"))
    timer = CudaTimer()
    timer.flush()
    timer.flush(clean=True)
    timer.flush(clean=True)
    assert [what for what, _ in log] == ["write", "write", "read", "write", "read"]
    written, read = log[1][1], log[2][1]
    assert written is log[0][1] is log[3][1] and read is log[4][1] is not written, "buffers are kept"
    assert written.bytes >= 2 * l2 and read.bytes >= 2 * l2
