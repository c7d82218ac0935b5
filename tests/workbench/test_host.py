"""Which device a word means, and the peaks that bound what may be recorded."""

from __future__ import annotations

import gc
import weakref

import pytest

from gpu_accel import hardware
from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.hardware.detection import match
from gpu_accel.workbench import host as host_module
from gpu_accel.workbench.host import resolve_device

torch = pytest.importorskip("torch")


def test_resolve_device_on_a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert resolve_device() == resolve_device("cpu") == "cpu"
    with pytest.raises(HardwareError, match="sees no GPU"):
        resolve_device("cuda")
    for wrong in ("gpu", "cuda:x", "cpu:0", "cuda:-1"):
        with pytest.raises(InvalidInputError, match="choose 'auto'"):
            resolve_device(wrong)


@pytest.mark.parametrize(("device", "oldest"), [("cpu", 1), ("cuda", 2)])
def test_a_cycle_is_dropped_and_old_objects_are_looked_at_for_a_gpu_alone(device, oldest, monkeypatch):
    looked, collect = [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda generation=2: (looked.append(generation), collect(generation))[1])
    one: list = [torch.zeros(3)]
    one.append(one)
    left = weakref.ref(one[0])
    del one
    host_module.Host(device=device).release()
    assert looked == [oldest] and left() is None


def test_resolve_device_with_gpus_and_the_interpreter(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert resolve_device("auto") == resolve_device("cuda") == "cuda" and not chosen
    assert resolve_device("cuda:1") == "cuda" and chosen == [1]
    with pytest.raises(HardwareError, match="2 GPU"):
        resolve_device("cuda:2")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(HardwareError, match="TRITON_INTERPRET"):
        resolve_device("cuda")


def test_peaks_are_scaled_to_the_highest_clock_and_only_for_an_exact_match(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    reported = {"index": 0, "name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "memory_gb": 85.0}
    monkeypatch.setattr(hardware, "detect", lambda index: match(**reported, sm_count=132))
    peaks = host_module._peaks(1980.0)
    assert peaks["peak_tflops"]["bf16"] == pytest.approx(989.4 * 1980 / 1830, abs=0.1)
    assert peaks["peak_tflops"]["e4m3"] == pytest.approx(1978.9 * 1980 / 1830, abs=0.1)
    assert peaks["peak_tflops"]["fp32"] > 500, "float32 may run on tf32 units"
    assert 3300 < peaks["peak_gbps"] < 3400
    assert host_module._peaks(None)["peak_tflops"]["bf16"] == 989.4
    monkeypatch.setattr(hardware, "detect", lambda index: match(**reported, sm_count=60))
    assert host_module._peaks(1980.0) == {}, "a slice of a card"
    monkeypatch.setattr(hardware, "detect", lambda index: None)
    assert host_module._peaks(1980.0) == {}
