"""Clock sampling with a fake NVML: decoding, summaries, and an honest word when there is nothing to read."""

from __future__ import annotations

import ctypes
import time

import pytest

from gpu_accel.workbench import clocks
from gpu_accel.workbench.clocks import ClockSampler, EnergyMeter, Gpu, Reading, throttle_names


class FakeLibrary:
    """Answers like NVML; `missing` functions report NVML_ERROR_NOT_SUPPORTED (3)."""

    def __init__(self, missing: tuple[str, ...] = (), **values: int) -> None:
        self.missing, self.values = missing, values
        self.by_uuid: dict[bytes, int] = {}
        self.by_pci: dict[bytes, int] = {}

    def __getattr__(self, name: str):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(_handle, *arguments) -> int:
            if name in self.missing:
                return 3
            arguments[-1]._obj.value = self.values[name]
            return 0

        return call

    def nvmlDeviceGetFieldValues(self, _handle, count, field) -> int:
        assert count == 1 and field._obj.field_id == 186
        if "instant" not in self.values:
            return 3
        field._obj.value, field._obj.status = self.values["instant"] | (0xDEAD << 32), 0
        return 0

    def _find(self, table: dict[bytes, int], key: bytes, handle) -> int:
        if key not in table:
            return 6
        handle._obj.value = table[key]
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        return self._find(self.by_uuid, uuid, handle)

    def nvmlDeviceGetHandleByPciBusId_v2(self, pci, handle) -> int:
        return self._find(self.by_pci, pci, handle)


FULL = {
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
    "nvmlDeviceGetPowerUsage": 512_000,
    "nvmlDeviceGetTotalEnergyConsumption": 2**40 + 500,
}


def test_throttle_bits_have_names():
    assert throttle_names(0) == []
    assert throttle_names(0x1) == [], "an idle card is not throttled"
    assert throttle_names(0x4 | 0x20 | 0x1) == ["power-cap", "sw-thermal"]
    assert throttle_names(0x8000) == ["0x8000"], "an unknown bit is shown, not dropped"


def test_reading_prefers_instant_power_and_uses_the_low_word_of_the_union():
    assert Gpu(FakeLibrary(**FULL, instant=698_000), None).read() == Reading(1755, 698.0, 61, 0x24)
    assert Gpu(FakeLibrary(**FULL), None).read().power_w == 512.0


def test_quantities_the_card_does_not_report_are_none():
    library = FakeLibrary(missing=("nvmlDeviceGetClockInfo", "nvmlDeviceGetTotalEnergyConsumption"), **FULL)
    assert Gpu(library, None).read().clock_mhz is None
    assert Gpu(library, None).energy_j() is None


def test_energy_counter_is_64_bit():
    assert Gpu(FakeLibrary(**FULL), None).energy_j() == (2**40 + 500) / 1000


def test_card_is_found_by_uuid_then_by_pci_address_never_by_index(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(clocks, "load_nvml", lambda: (library, ""))
    monkeypatch.setattr(clocks, "identity", lambda index: ("GPU-aa", "00000000:1b:00.0"))
    gpu, why = clocks.open_gpu(0)
    assert gpu is None and "GPU-aa" in why and "1b:00.0" in why
    library.by_pci[b"00000000:1b:00.0"] = 7
    assert clocks.open_gpu(0)[0]._handle.value == 7
    library.by_uuid[b"GPU-aa"] = 5
    assert clocks.open_gpu(0)[0]._handle.value == 5


def test_missing_library_is_said(monkeypatch):
    def no_library(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with ClockSampler() as sampler:
        pass
    assert "NVML" in sampler.summary()["unavailable"]
    with EnergyMeter() as meter:
        pass
    assert meter.joules is None and "NVML" in meter.unavailable


def test_sampler_summarises_what_it_read():
    readings = iter([Reading(1000, 100.0, 50, 0x0), Reading(1980, None, 52, 0x4), Reading(1500, 300.0, 60, 0x40)])
    sampler = ClockSampler(lambda: next(readings), interval=60)
    for _ in range(3):
        sampler._take()
    assert sampler.summary() == {
        "readings": 3,
        "clock_mhz": {"median": 1500, "min": 1000, "max": 1980},
        "power_w": {"median": 200.0, "min": 100.0, "max": 300.0},
        "temperature_c": {"median": 52, "min": 50, "max": 60},
        "throttle": ["power-cap", "hw-thermal"],
    }


def test_sampler_reads_at_both_ends_and_in_between():
    with ClockSampler(lambda: Reading(1000, None, None, None), interval=0.001) as sampler:
        deadline = time.monotonic() + 5
        while len(sampler.readings) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
    taken = len(sampler.readings)
    assert taken >= 5
    time.sleep(0.01)
    assert len(sampler.readings) == taken, "the thread ends with the block"
    assert sampler.summary()["clock_mhz"]["median"] == 1000 and "power_w" not in sampler.summary()


def test_short_block_still_has_two_readings():
    with ClockSampler(lambda: Reading(1000, None, None, None), interval=60) as sampler:
        pass
    assert len(sampler.readings) == 2


def test_failing_sensor_is_reported_and_does_not_raise():
    readings = iter([Reading(1000, 1.0, 50, 0)])
    with ClockSampler(lambda: next(readings), interval=60) as sampler:
        pass
    summary = sampler.summary()
    assert summary["readings"] == 1 and "failed" in summary["unavailable"]


def test_sampler_stops_when_the_block_raises():
    with pytest.raises(KeyError), ClockSampler(lambda: Reading(1, 1, 1, 0), interval=0.001) as sampler:
        raise KeyError
    assert sampler._thread is None


def test_energy_is_the_difference():
    counter = iter([10.0, 42.5])
    with EnergyMeter(lambda: next(counter)) as meter:
        pass
    assert meter.joules == 32.5
    with EnergyMeter(lambda: None) as meter:
        pass
    assert meter.joules is None and "no energy counter" in meter.unavailable
