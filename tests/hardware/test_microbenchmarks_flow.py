"""The Python around the kernels, with a GPU made up: launches leave time stamps and compute nothing.

Then every measurement has to come to its end with samples, and every check has to fail: a result that no kernel wrote
must never pass.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gpu_accel.hardware.microbenchmarks import cores, latency
from gpu_accel.hardware.microbenchmarks import launch as launching
from gpu_accel.hardware.microbenchmarks import probe as probing
from gpu_accel.workbench import clocks

FAMILIES = ("latency", "bandwidth", "alu", "dpx", "dsm", "tma", "fp8_sums", "tensor", "cores")
SMS, CYCLES = 16, 100_000
NAMES = ("launch", "launch_cubin", "sm_count", "tensor_map", "touch", "flusher")


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU is made in host memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Event:
    def __init__(self, **_: object) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: object) -> float:
        return 1.0


class Sampler:
    readings = [clocks.Reading(1980.0, 500.0, 50.0, 0)] * 3

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None: ...
    def summary(self) -> dict:
        return {"readings": 3, "clock_mhz": {"median": 1980.0, "min": 1980.0, "max": 1980.0}}


def stamp_only(source, kernel, arguments, *, grid=1, block=32, shared=0, cluster=1):
    with launching._packed(arguments):
        stamps = arguments[0]
    blocks = grid if isinstance(grid, int) else grid[0]
    assert blocks % cluster == 0 and block <= 1024 and shared <= launching.MOST_SHARED
    assert tuple(stamps.shape) == (blocks, -(-block // 32), 2) and stamps.dtype == torch.int64
    stamps[..., 0], stamps[..., 1] = 1000, 1000 + CYCLES


def stamp_cubin(cubin, kernel, arguments, *, block):
    stamp_only("", kernel, arguments, block=block)


def two_sides(lines):
    memory = torch.zeros(lines * latency.LINE // 8, dtype=torch.int64)
    return latency._Sides(memory, list(range(0, lines, 2)), list(range(1, lines, 2)), toucher=3, walker=0)


@pytest.fixture
def made_up_gpu(monkeypatch):
    modules = [importlib.import_module(f"gpu_accel.hardware.microbenchmarks.{name}") for name in FAMILIES]
    fakes = {
        "launch": stamp_only, "launch_cubin": stamp_cubin, "sm_count": lambda: SMS,
        "tensor_map": lambda tensor, box: bytes(128), "touch": lambda memory: None, "flusher": lambda: lambda: None,
    }  # fmt: skip
    for module in (*modules, launching):
        for name in NAMES:
            if callable(getattr(module, name, None)):
                monkeypatch.setattr(module, name, fakes[name])
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self.clone())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clocks, "ClockSampler", Sampler)
    monkeypatch.setattr(launching, "warm_up", lambda milliseconds=0: None)
    monkeypatch.setattr(launching, "hold", lambda milliseconds=0: None)
    monkeypatch.setattr(latency, "_sides", two_sides)
    monkeypatch.setattr(latency, "_touch_by", lambda memory, lines, sm: None)
    monkeypatch.setattr(cores, "patched", lambda kernel, variant: (b"", 5))
    monkeypatch.setattr(probing.Kernel, "loop", lambda self: None)
    with OnCpu():
        yield


def sensible(probe) -> bool:
    """Leaves out what takes gigabytes, what is torch's own, and a patch that is made to give wrong results."""
    case = probe.case
    large = case.get("footprint_kb", 0) > 64 * 1024 or case.get("source") == "dram" or case.get("k", 0) > 1024
    return not large and probe.role == "ours" and case.get("probe") not in ("stall-count", "bank-conflict")


@pytest.mark.parametrize("name", FAMILIES)
def test_measurements_end_and_no_unwritten_result_passes(name, made_up_gpu):
    module = importlib.import_module(f"gpu_accel.hardware.microbenchmarks.{name}")
    chosen = [probe for probe in module.probes() if sensible(probe)]
    assert chosen
    for probe in chosen[:: max(1, len(chosen) // 24)]:
        outcome = probe.measure(5)
        assert not outcome.check.ok, (probe.case, probe.name, outcome.check)
        assert outcome.metrics
        for metric, sampled in outcome.metrics.items():
            computed = metric == "max_rel_error"  # by the kernel
            finite = sampled.samples and all(math.isfinite(value) for value in sampled.samples)
            assert computed or finite, (probe.case, metric)
            assert sampled.unit and sampled.timing.get("method"), (probe.case, metric)


def test_a_warp_without_a_stamp_is_noticed(made_up_gpu, monkeypatch):
    from gpu_accel.errors import IncorrectResultError
    from gpu_accel.hardware.microbenchmarks.cores import ISSUE

    monkeypatch.setattr(launching, "launch", lambda *_, **__: None)
    with pytest.raises(IncorrectResultError, match="no time stamp"):
        probing.run(ISSUE, [], block=64)
