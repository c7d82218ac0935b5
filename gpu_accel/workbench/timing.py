"""How long calls take on the GPU, compared fairly.

`compare` runs the competitors interleaved (A B C, B C A, ...), so that a card that warms up or is throttled does so for
all alike; each sample is one call on a cold second-level cache with other inputs than the call before it. It stops when
the noise is low enough, not after a fixed count. `sustained` times each under continuous load, which is what a long job
sees: a 700 W card loses several percent of its clock within about a second.

What lies outside the timed region: compilation and warm-up, the cache flush, and the host's launch work, which is
hidden behind a device-side delay queued before the first event. Very short calls are replayed from a CUDA graph.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.workbench.cuda_timer import Call, CudaTimer, Timer
from gpu_accel.workbench.samples import Samples, is_time, noise_of, reason, relative_half_width

METHODS = ("auto", "events", "graph")
SHORT_MS = 0.05  # below this, launches matter: "auto" replays graphs
SAMPLE_MS = 0.2  # where the cache need not be cold, a shorter call is repeated up to this length in each sample
MAX_REPEATS = 200
MAX_LEAD_US = 2000.0
QUEUE_DEPTH = 8  # samples queued ahead under sustained load
PATIENCE = 4  # times the budget: after that even min_rounds is cut short, at FEWEST_ROUNDS
FEWEST_ROUNDS = 3


def compare(
    calls: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 0.25,
    flush_l2: bool = True,
    clean_l2: bool = False,
    method: str = "auto",
    min_rounds: int = 10,
    max_rounds: int = 400,
    noise: float = 0.01,
    most_repeats: int = MAX_REPEATS,
    timer: Timer | None = None,
) -> dict[str, Samples]:
    """Time implementations in interleaved rounds.

    Args:
        calls: for each name its prepared calls, one for each input set; samples rotate over them.
        seconds: budget for each implementation; the rounds as a whole get seconds x implementations.
        flush_l2: True: a cold second-level cache before each sample, one call a sample. False: a warm one, by an
            untimed call with the same inputs just before, and a short call is repeated within a sample.
        clean_l2: after the flush read another buffer through the cache. A flush alone leaves it full of lines that
            memory does not hold yet, and a call that reads waits until they are written back, tens of megabytes that
            are not its own. A call that writes, on the other hand, then leaves as much behind for nobody to pay, so
            this is for calls that mostly read.
        method: "events" times between two events, "graph" times the replay of a captured graph, "auto" takes graphs
            when one implementation is shorter than 50 us and all can be captured (one method for all, or ratios lie).
        min_rounds: rounds before noise or budget may stop the run; only four times the budget cuts it to three.
        max_rounds: rounds after which the run stops whatever the noise.
        noise: stop when the relative half-width of the 95 % interval of every median, or of its ratio to the first, is
            below this.
        most_repeats: calls within a sample, at most, where the cache need not be cold; 1 where each call is to get
            inputs of its own.
        timer: the device; default the current CUDA device.
    Returns:
        Samples for every name, in the order given. One that fails, for lack of memory or otherwise, or that gives a
        time that is not a finite number above 0, has `failed` set and leaves the others alone.
    Raises:
        InvalidInputError: an argument makes no sense.
        HardwareError: no GPU, or the device reports an error that cannot be laid at one implementation's door.
    """
    _validate(calls, method, seconds=seconds, min_rounds=min_rounds, max_rounds=max_rounds, noise=noise,
              most_repeats=most_repeats)  # fmt: skip
    timer = timer or CudaTimer()
    l2 = "warm" if not flush_l2 else "clean" if clean_l2 else "flushed"
    _ready(timer, l2)  # allocates the buffers now, so that no implementation is blamed for them
    runs, failed = _prepare(calls, timer, method=method, l2=l2, most=most_repeats)
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    stopped, budget, rounds = "", seconds * len(names), 0
    with timer.clocks() as clocks:
        start = timer.now()
        while names and not stopped:
            taken = _round(_order(names, rounds), runs, rounds, timer=timer, l2=l2, failed=failed)
            rounds += 1
            names = [name for name in names if name not in failed]
            for name in names:
                times[name].append(taken[name])
            spent = timer.now() - start
            if rounds >= max_rounds:
                stopped = "max_rounds"
            elif spent >= budget * (1 if rounds >= min_rounds else PATIENCE) and rounds >= FEWEST_ROUNDS:
                stopped = "seconds"
            if names and rounds >= min_rounds and max(noise_of({n: times[n] for n in names}).values()) < noise:
                stopped = "noise"
    reached = noise_of({name: times[name] for name in names}) if names else {}
    done = {
        name: Samples(
            name=name,
            times=tuple(times[name]),
            method=runs[name].method,
            calls=runs[name].repeats,
            l2=l2,
            interleaved=tuple(names),
            inputs=len(runs[name].calls),
            noise=reached[name],
            stopped=stopped,
            clocks=clocks.summary(),
            note=runs[name].note,
        )
        for name in names
    }
    return {name: done.get(name) or Samples(name=name, failed=failed[name]) for name in calls}


def sustained(
    calls: Mapping[str, Sequence[Call]],
    *,
    seconds: float = 1.5,
    tail: float = 1 / 3,
    method: str = "auto",
    timer: Timer | None = None,
) -> dict[str, Samples]:
    """Time each implementation under continuous load, one after the other.

    Each runs back to back for `seconds`, its inputs rotating and the cache left as the load leaves it; times and clocks
    are those of the last `tail` of the load. They belong to no common rounds, so they give no paired ratio.

    Args, returns and errors otherwise as for `compare`.
    """
    _validate(calls, method, seconds=seconds, tail=tail)
    timer = timer or CudaTimer()
    runs, failed = _prepare(calls, timer, method=method, l2="warm")
    results = {}
    for name in calls:
        try:
            if name in runs:
                results[name] = _load(name, runs[name], seconds=seconds, tail=tail, timer=timer)
        except Exception as error:
            failed[name] = _fail(error, timer)
        if name in failed:
            results[name] = Samples(name=name, mode="sustained", failed=failed[name])
    return results


@dataclass(kw_only=True)
class _Run:
    """An implementation ready to be sampled: `calls` are one sample each, of `repeats` calls."""

    calls: list[Call]
    ms: float  # estimate of one call
    launch_us: float  # host time to queue one sample
    method: str = "events"
    repeats: int = 1
    note: str = ""

    @property
    def lead_us(self) -> float:
        """How long the device must be kept busy for the host to queue a sample: generous, for it costs nothing."""
        return min(2 * self.launch_us + 30, MAX_LEAD_US)


def _validate(calls: Mapping[str, Sequence[Call]], method: str, **numbers: float) -> None:
    if not calls or not all(calls.values()):
        raise InvalidInputError("nothing to time: give at least one implementation, each with at least one call")
    if method not in METHODS:
        raise InvalidInputError(f"method is {method!r}; choose one of {', '.join(METHODS)}")
    for name, number in numbers.items():
        if not number > 0 or (name in ("noise", "tail") and number > 1):
            raise InvalidInputError(
                f"{name} is {number!r}; it must be positive{', at most 1' * (name in ('noise', 'tail'))}"
            )
    if numbers.get("min_rounds", 0) > numbers.get("max_rounds", 0):
        raise InvalidInputError(f"min_rounds {numbers['min_rounds']} is above max_rounds {numbers['max_rounds']}")


def _ready(timer: Timer, l2: str) -> None:
    """Queue what leaves the second-level cache in this state; for a warm one that is the caller's call itself."""
    if l2 != "warm":
        timer.flush(clean=l2 == "clean")


def _prepare(
    calls: Mapping[str, Sequence[Call]], timer: Timer, *, method: str, l2: str, most: int = MAX_REPEATS
) -> tuple[dict[str, _Run], dict[str, str]]:
    """Warm every implementation up and settle how it is sampled: (ready ones, reasons of those that failed)."""
    runs: dict[str, _Run] = {}
    failed: dict[str, str] = {}
    for name, its_calls in calls.items():
        try:
            runs[name] = _warm_up(list(its_calls), timer, l2=l2)
        except Exception as error:
            failed[name] = _fail(error, timer)
    if l2 == "warm":
        for run in runs.values():
            run.repeats = max(1, min(most, round(SAMPLE_MS / run.ms)))
    if method == "graph" or (method == "auto" and any(run.ms < SHORT_MS for run in runs.values())):
        _capture(runs, failed, timer, required=method == "graph")
    for run in runs.values():
        if run.method == "events" and run.repeats > 1:
            run.calls = [_loop(call, run.repeats) for call in run.calls]
            run.launch_us *= run.repeats
    return runs, failed


def _warm_up(calls: list[Call], timer: Timer, *, l2: str) -> _Run:
    for call in calls:  # compiles, tunes, allocates, and fails here if it fails
        call()
    timer.synchronize()
    run = _Run(calls=calls, ms=math.inf, launch_us=math.inf)
    for attempt in range(4):
        call = calls[attempt % len(calls)]
        _ready(timer, l2)
        timer.synchronize()
        if attempt:  # by now the launch time is known
            timer.lead(run.lead_us)
        begin = timer.now()
        start = timer.mark()
        call()
        end = timer.mark()
        run.launch_us = min(run.launch_us, (timer.now() - begin) * 1e6)
        timer.synchronize()
        ms = timer.elapsed(start, end)
        if not 0 <= ms < math.inf:
            raise HardwareError(f"the timer reports {ms!r} ms, which is no time")
        run.ms = min(run.ms, max(ms, 1e-4))
    return run


def _capture(runs: dict[str, _Run], failed: dict[str, str], timer: Timer, *, required: bool) -> None:
    """Replace the calls of all runs by graph replays; one that cannot be captured fails, or leaves all as they are."""
    graphs: dict[str, tuple[list[Call], float]] = {}
    for name, run in list(runs.items()):
        try:
            replays = [timer.capture(call, run.repeats) for call in run.calls]
            timer.synchronize()
            begin = timer.now()
            replays[0]()
            launch_us = (timer.now() - begin) * 1e6
            timer.synchronize()
            graphs[name] = replays, launch_us
        except Exception as error:
            why = _fail(error, timer)
            if not required:
                for other in runs.values():
                    other.note = f"events, since {name} cannot be captured in a graph ({why})"
                return
            failed[name] = f"cannot be captured in a graph: {why}"
            del runs[name]
    for name, (replays, launch_us) in graphs.items():
        runs[name].calls, runs[name].launch_us, runs[name].method = replays, launch_us, "graph"


def _loop(call: Call, repeats: int) -> Call:
    def loop() -> None:
        for _ in range(repeats):
            call()

    return loop


def _order(names: Sequence[str], round_index: int) -> list[str]:
    """The order of a round: rotated by one each round, reversed in every other cycle so that neighbours change too."""
    cycle, shift = divmod(round_index, len(names))
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if cycle % 2 else rotated


def _round(
    order: Sequence[str], runs: dict[str, _Run], index: int, *, timer: Timer, l2: str, failed: dict[str, str]
) -> dict[str, float]:
    """One sample of each, in ms a call; the host waits only once, at the end."""
    marks = {}
    for name in order:
        run = runs[name]
        call = run.calls[index % len(run.calls)]
        try:
            if l2 == "warm":
                call()
            _ready(timer, l2)
            timer.lead(run.lead_us)
            start = timer.mark()
            call()
            marks[name] = start, timer.mark()
        except Exception as error:
            failed[name] = _fail(error, timer)
    try:
        timer.synchronize()
    except Exception as error:
        raise HardwareError(f"the device failed while it ran {', '.join(order)}: {reason(error)}") from error
    taken: dict[str, float] = {}
    for name, (start, end) in marks.items():
        if name in failed:
            continue
        try:
            taken[name] = _elapsed(timer, start, end) / runs[name].repeats
        except Exception as error:
            failed[name] = _fail(error, timer)
    return taken


def _elapsed(timer: Timer, start: Any, end: Any) -> float:
    """Milliseconds between two marks; raises HardwareError for what is no time, before any ratio is made of it."""
    ms = timer.elapsed(start, end)
    if not is_time(ms):
        raise HardwareError(f"the timer reports {ms!r} ms, which is no time")
    return ms


def _load(name: str, run: _Run, *, seconds: float, tail: float, timer: Timer) -> Samples:
    clocks = None
    marks = [timer.mark()]
    with ExitStack() as stack:
        begin = timer.now()
        while (passed := timer.now() - begin) < seconds or len(marks) < 2:
            if clocks is None and passed >= seconds * (1 - tail):
                clocks = stack.enter_context(timer.clocks())
            run.calls[len(marks) % len(run.calls)]()
            marks.append(timer.mark())
            if len(marks) > QUEUE_DEPTH:
                timer.wait(marks[-QUEUE_DEPTH])
        timer.synchronize()
    spans = [_elapsed(timer, start, end) for start, end in pairwise(marks)]
    late = tail * sum(spans)
    kept: list[float] = []
    while spans and sum(kept) < late:
        kept.append(spans.pop())
    times = tuple(span / run.repeats for span in reversed(kept))
    return Samples(
        name=name,
        times=times,
        method=run.method,
        calls=run.repeats,
        l2="warm",
        mode="sustained",
        interleaved=(name,),
        inputs=len(run.calls),
        noise=relative_half_width(times),
        stopped="seconds",
        clocks=clocks.summary() if clocks is not None else {"unavailable": "one call outlasted the load"},
        note=run.note,
    )


def _fail(error: Exception, timer: Timer) -> str:
    """The reason for a failure, after dropping what it holds on to: its frames keep tensors alive."""
    why = reason(error)
    error.__traceback__ = None
    gc.collect()
    try:
        timer.release()
    except Exception as after:  # a device that is beyond use reports itself at every call
        why = f"{why} (and then {reason(after)})"
    return why
