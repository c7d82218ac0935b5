"""Energy per call, on made-up cards whose counter moves in steps: what is known exactly, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.hardware import energy
from gpu_accel.hardware.energy import Energy, measure_energy


class Card:
    """A card with its own clock: `call` takes time and power, `sleep` takes idle power, the counter moves in steps."""

    def __init__(self, *, idle_w=80.0, load_w=500.0, call_s=0.002, step=0.1, queued=False):
        self.time, self.true_j, self.shown_j, self.shown_at = 0.0, 1000.0, 1000.0, 0.0
        self.idle_w, self.load_w, self.call_s, self.step = idle_w, load_w, call_s, step
        self.calls, self.pending = 0, 0

    def pass_time(self, seconds, watts):
        while seconds > 0:
            part = min(seconds, self.shown_at + self.step - self.time)
            self.time, self.true_j, seconds = self.time + part, self.true_j + part * watts, seconds - part
            if self.time >= self.shown_at + self.step - 1e-12:
                self.shown_at, self.shown_j = self.time, self.true_j

    def energy_j(self):
        return self.shown_j

    def call(self):
        self.pending += 1
        self.calls += 1

    def wait(self):
        self.pass_time(self.pending * self.call_s, self.load_w)
        self.pending = 0

    def sleep(self, seconds):
        self.pass_time(seconds, self.idle_w)

    def measure(self, **options):
        known = dict(card=self, synchronize=self.wait, now=lambda: self.time, sleep=self.sleep)
        return measure_energy(self.call, **{**known, **options})


@pytest.mark.parametrize("step", [0.02, 0.1], ids=["20ms", "100ms"])
@pytest.mark.parametrize("call_s", [0.0001, 0.002, 0.03, 0.25], ids=lambda s: f"{s * 1e3:g}ms")
def test_the_energy_above_idle_is_found_to_the_stated_resolution(step, call_s):
    card = Card(step=step, call_s=call_s)
    found = card.measure(seconds=6.0)
    assert found.joules_per_call == pytest.approx((500 - 80) * call_s, rel=found.resolution)
    assert found.gross_joules_per_call == pytest.approx(500 * call_s, rel=found.resolution)
    assert found.idle_w == pytest.approx(80, rel=0.03) and found.power_w == pytest.approx(500, rel=found.resolution)
    assert found.window_s >= 6.0 and 0 < found.resolution <= 0.05
    assert found.resolution == pytest.approx(found.step_s / found.window_s)


def test_a_longer_window_resolves_more():
    short, long = (Card().measure(seconds=s).resolution for s in (2.0, 20.0))
    assert long < short / 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0.5}, "at least 2 s"),
        ({"seconds": 1.9}, "cannot resolve 5.0%"),
        ({"seconds": 0.5, "resolution": 0.5}, "at least 0.8 s"),
        ({"seconds": 5.0, "resolution": 0.01}, "at least 10 s"),
        ({"seconds": 0.0}, "above 0"),
        ({"seconds": float("nan")}, "above 0"),
        ({"seconds": float("inf")}, "above 0"),
        ({"resolution": -0.1}, "above 0"),
        ({"idle_seconds": 0.0}, "above 0"),
    ],
)
def test_a_window_that_is_too_short_is_refused_before_anything_runs(options, message):
    card = Card()
    with pytest.raises(InvalidInputError, match=message):
        card.measure(**options)
    assert card.calls == 0


def test_a_counter_that_moves_too_rarely_is_found_out():
    with pytest.raises(HardwareError, match="longer window"):
        Card(step=0.7).measure(seconds=3.0)


def test_a_window_with_one_late_look_goes_on_until_it_resolves_enough():
    card = Card()
    energy_j, shown = card.energy_j, []

    def looks_late_once():
        if 3.0 < card.time < 3.18:  # one movement is seen late
            shown.append(energy_j())
            return shown[0]
        return energy_j()

    card.energy_j = looks_late_once
    found = card.measure(seconds=2.5)
    assert shown and found.step_s > 0.13 and found.resolution <= 0.05
    assert 2.6 < found.window_s < 5
    assert found.joules_per_call == pytest.approx(420 * card.call_s, rel=found.resolution)


def test_a_counter_that_is_stuck_is_found_out():
    card = Card(step=1e9)
    with pytest.raises(HardwareError, match="has not moved"):
        card.measure()


def test_a_counter_that_goes_back_is_found_out():
    card = Card()
    values = iter([10.0, 11.0, 12.0, 5.0])
    card.energy_j = lambda: next(values)
    with pytest.raises(HardwareError, match="went back"):
        card.measure()


def test_a_load_that_draws_no_more_than_idle_is_no_result():
    with pytest.raises(HardwareError, match="too little is left"):
        Card(load_w=80.0).measure()


def test_a_card_without_a_counter():
    card = Card()
    card.energy_j = lambda: None
    with pytest.raises(UnsupportedError, match="no energy counter"):
        card.measure()


def test_nvml_that_is_missing_says_so(monkeypatch):
    from gpu_accel.workbench import clocks

    monkeypatch.setattr(clocks, "open_gpu", lambda index: (None, "NVML is not on this machine"))
    with pytest.raises(UnsupportedError, match="NVML is not on this machine"):
        measure_energy(lambda: None)


def test_per_unit_and_as_json():
    one = Energy(joules_per_call=2.0, gross_joules_per_call=3.0, idle_w=80.0, power_w=500.0, window_s=3.0,
                 resolution=0.03, step_s=0.1, calls=100)  # fmt: skip
    assert one.per(8) == 0.25 and one.as_dict() == dataclasses.asdict(one)
    with pytest.raises(InvalidInputError, match="above 0"):
        one.per(0)


def test_the_load_is_looked_at_often_compared_with_the_step():
    card = Card(call_s=1e-5)
    card.measure(seconds=2.0)
    assert energy.BATCH < energy.STEP / 10
