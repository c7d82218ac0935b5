"""Joules per call, from the energy counter of the card: what work costs, and how well that is known.

    energy = measure_energy(lambda: a @ b, seconds=3)
    energy.joules_per_call      # above idle
    energy.per(tokens)          # joules per token, when a call makes that many

The counter (NVML's total energy, in millijoules) stands still for some 20 to 100 ms at a time, so a short window counts
mostly its steps. Three rules follow, and a window that breaks them is refused instead of reported:

* both ends of a window lie where the counter has just moved, so no energy of before or after is in it;
* the resolution, the longest step of the counter relative to the window, is stated, and must be what was asked for:
  a window with a long step in it (the host looked late) goes on until it is, up to MOST_PATIENT times as long;
* the card's idle power is measured with the same counter, just before, and subtracted; both are kept.

The load runs in batches with the host waiting after each, a few milliseconds long, so that a batch is either in the
window or not. What a call costs includes all the card does meanwhile: leakage above idle, refresh, copies, the fans of
boards that have them. It does not include the host.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown

STEP = 0.1  # seconds between two movements of the counter, the longest seen
RESOLUTION = 0.05
FEWEST_STEPS = 8  # of the counter in a window
BATCH = 0.005  # seconds of load between two looks at the counter
WARM_UP = 0.5  # seconds of load before the window: clocks and power settle within it
SETTLE = 0.5  # seconds of rest before the idle power is read
MOST_PATIENT = 3  # windows as asked for, before one that does not resolve enough is given up
PATIENCE = 20 * STEP  # seconds without a movement after which a counter counts as stuck


@dataclass(frozen=True, kw_only=True)
class Energy:
    """What a call costs on this card.

    ``resolution`` is relative: by how much the energy of the window may be off because the counter moves in steps. The
    spread between repetitions is another matter, and is the caller's to look at.
    """

    joules_per_call: float  # above idle
    gross_joules_per_call: float  # with idle
    idle_w: float  # power of the card before, with nothing to do
    power_w: float  # mean power in the window
    window_s: float
    resolution: float
    step_s: float  # the longest time between two movements of the counter in the window
    calls: int

    def per(self, units: float) -> float:
        """Joules for each of `units` things that one call makes, tokens for example."""
        if not units > 0:
            raise InvalidInputError(f"a call makes {units} of them; a number above 0 is needed")
        return self.joules_per_call / units

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counter(Protocol):
    """A card with an energy counter: `workbench.clocks.Gpu`, or a made-up one."""

    def energy_j(self) -> float | None: ...


def measure_energy(
    call: Callable[[], object],
    *,
    seconds: float = 3.0,
    resolution: float = RESOLUTION,
    idle_seconds: float = 1.0,
    index: int | None = None,
    card: Counter | None = None,
    synchronize: Callable[[], object] | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Energy:
    """Run `call` for some seconds and tell what one call costs.

    Args:
        call: queues the work on the current device; it is called many times, and must not change what it costs.
        seconds: the shortest window. At least STEP / resolution, and FEWEST_STEPS steps of the counter.
        resolution: the largest relative error that the steps of the counter may cause.
        idle_seconds: how long the idle power is watched.
        index: torch's number of the GPU, default the current one.
        card, synchronize, now, sleep: the counter, the wait for the device and the clock; given by tests.
    Raises:
        InvalidInputError: the window is too short for the resolution asked for.
        UnsupportedError: the card, or its driver, has no energy counter.
        HardwareError: the counter does not move, moves too rarely, or the load draws no more than idle.
    """
    for name, value in (("seconds", seconds), ("resolution", resolution), ("idle_seconds", idle_seconds)):
        if not 0 < value <= sys.float_info.max:
            raise InvalidInputError(f"{name} is {shown(value)}; it must be a finite number above 0")
    shortest = max(STEP / resolution, FEWEST_STEPS * STEP)
    if seconds < shortest * (1 - 1e-9):
        raise InvalidInputError(
            f"seconds is {seconds:g}: the energy counter moves about every {STEP * 1e3:.0f} ms, so this window cannot "
            f"resolve {resolution:.1%}. Give at least {shortest:g} s, or a coarser resolution"
        )
    meter = _Meter(card if card is not None else _open(index), now, sleep)
    wait = synchronize if synchronize is not None else _wait
    wait()
    sleep(SETTLE)
    idle = meter.watch(idle_seconds, lambda: sleep(0.001))
    batch = _batch_of(call, wait, now)
    done = 0

    def work() -> None:
        nonlocal done
        for _ in range(batch):
            call()
        wait()
        done += batch

    start = now()
    while now() - start < WARM_UP:
        work()
    loaded = meter.watch(seconds, work, count=lambda: done, resolution=resolution)
    achieved = loaded.step_s / loaded.seconds
    if loaded.steps < FEWEST_STEPS or achieved > resolution:
        raise HardwareError(
            f"the energy counter moved {loaded.steps} times in {loaded.seconds:.2f} s, once after {loaded.step_s:.2f} "
            f"s: that resolves {achieved:.1%}, not the {resolution:.1%} asked for. Give a longer window"
        )
    idle_w, power_w = idle.joules / idle.seconds, loaded.joules / loaded.seconds
    if power_w - idle_w <= 2 * achieved * power_w:
        raise HardwareError(
            f"the load draws {power_w:.0f} W and the idle card {idle_w:.0f} W: too little is left for the calls to be "
            f"told from steps of {achieved:.1%}. Is the work done on this card, and is nobody else using it?"
        )
    return Energy(
        joules_per_call=(loaded.joules - idle_w * loaded.seconds) / loaded.count,
        gross_joules_per_call=loaded.joules / loaded.count,
        idle_w=idle_w,
        power_w=power_w,
        window_s=loaded.seconds,
        resolution=achieved,
        step_s=loaded.step_s,
        calls=loaded.count,
    )


@dataclass(frozen=True)
class _Window:
    """Between the first and the last movement of the counter."""

    joules: float
    seconds: float
    steps: int
    step_s: float
    count: int


class _Meter:
    def __init__(self, card: Counter, now: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._card, self._now, self._sleep = card, now, sleep

    def read(self) -> float:
        joules = self._card.energy_j()
        if joules is None:
            raise UnsupportedError("this card, or its driver, has no energy counter (NVML has it since Volta)")
        return joules

    def watch(
        self,
        seconds: float,
        meanwhile: Callable[[], object],
        *,
        count: Callable[[], int] = lambda: 0,
        resolution: float = math.inf,
    ) -> _Window:
        """From one movement of the counter to the first that is `seconds` later and resolves enough (or too late to
        wait on), with `meanwhile` between looks."""
        moves = self._moves(meanwhile)
        begin, energy = next(moves)
        counted, last, steps, longest = count(), begin, 0, 0.0
        for when, joules in moves:
            steps, longest, last = steps + 1, max(longest, when - last), when
            length = when - begin
            fine = steps >= FEWEST_STEPS and longest <= resolution * length or resolution == math.inf
            if length >= seconds and (fine or length >= MOST_PATIENT * seconds):
                return _Window(joules - energy, when - begin, steps, longest, count() - counted)
        raise AssertionError("a counter moves until it is stuck, which raises")

    def _moves(self, meanwhile: Callable[[], object]) -> Iterator[tuple[float, float]]:
        """(time, joules) each time that the counter is seen to have moved."""
        known, since = self.read(), self._now()
        while True:
            meanwhile()
            joules, when = self.read(), self._now()
            if joules < known:
                raise HardwareError(f"the energy counter went back, from {known:.3f} to {joules:.3f} J")
            if joules > known:
                known, since = joules, when
                yield when, joules
            elif when - since > PATIENCE:
                raise HardwareError(f"the energy counter has not moved for {when - since:.1f} s")


def _batch_of(call: Callable[[], object], wait: Callable[[], object], now: Callable[[], float]) -> int:
    """How many calls last about BATCH seconds; at least one."""
    call()  # what is done once, such as compiling, does not count
    wait()
    calls = 1
    while True:
        start = now()
        for _ in range(calls):
            call()
        wait()
        took = now() - start
        if took >= BATCH / 4 or calls >= 2**16:
            return max(1, round(calls * BATCH / max(took, 1e-9))) if took < BATCH else max(1, calls // 2)
        calls *= 2


def _open(index: int | None) -> Counter:
    from gpu_accel.workbench.clocks import open_gpu

    card, why = open_gpu(index)
    if card is None:
        raise UnsupportedError(f"energy needs NVML's counter: {why}")
    return card


def _wait() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("energy is measured on a GPU, and torch sees none")
    torch.cuda.synchronize()
