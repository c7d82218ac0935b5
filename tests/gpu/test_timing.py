"""The timer on a real GPU: its numbers against what is known about the card."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from gpu_accel.hardware import detect  # noqa: E402
from gpu_accel.workbench.clocks import ClockSampler, EnergyMeter, open_gpu  # noqa: E402
from gpu_accel.workbench.cuda_timer import CudaTimer  # noqa: E402
from gpu_accel.workbench.timing import compare, sustained  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def copy(mib: int):
    source = torch.randn(mib * 2**18, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def matmul(n: int = 4096):
    a, b = torch.randn(2, n, n, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b


def test_bandwidth_of_a_large_copy_is_below_the_peak_and_not_far():
    samples = compare({"copy": [copy(1024)]})["copy"]
    gbps = 2 * 1024 * 2**20 / samples.median / 1e6
    found = detect(torch.cuda.current_device())
    peak = found.profile.bandwidth_gbs if found and found.profile and found.exact else None
    assert gbps > 100
    if peak:
        assert 0.6 * peak < gbps < peak


def test_cold_cache_is_slower_than_warm():
    call = copy(max(1, CudaTimer().l2_bytes // 4 // 2**20))  # read and written: half of the cache
    cold = compare({"copy": [call]}, flush_l2=True, method="graph")["copy"]
    warm = compare({"copy": [call]}, flush_l2=False, method="graph")["copy"]
    assert (cold.l2, warm.l2) == ("flushed", "warm")
    assert cold.median > 1.15 * warm.median


def test_reading_does_not_wait_for_lines_of_the_flush_in_a_clean_cache():
    source = torch.randn(32 * 2**20, device="cuda")  # 128 MB, more than the cache
    out = torch.empty((), device="cuda")
    read = {"read": [lambda: torch.amax(source, (0,), out=out)]}
    taken = [compare(read, clean_l2=clean)["read"] for clean in (False, True)]
    assert [one.l2 for one in taken] == ["flushed", "clean"]
    assert taken[1].median < taken[0].median


def test_graph_and_events_agree_on_a_long_call():
    call = matmul()
    samples = [compare({"mm": [call]}, method=method)["mm"] for method in ("events", "graph", "events", "graph")]
    assert [s.method for s in samples] == ["events", "graph", "events", "graph"]
    events, graph = min(samples[0].median, samples[2].median), min(samples[1].median, samples[3].median)
    assert abs(events / graph - 1) < 0.05


def test_work_of_the_host_is_not_in_the_time():
    call = matmul(2048)

    def slow_to_launch() -> None:
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        call()

    samples = compare({"direct": [call], "slow": [slow_to_launch]}, method="events")
    assert samples["slow"].median < 1.1 * samples["direct"].median + 5e-3


def test_same_call_under_two_names_has_ratio_one():
    call = matmul()
    samples = compare({"a": [call], "b": [call]}, seconds=0.5)
    assert samples["a"].median / samples["b"].median == pytest.approx(1, abs=0.03)


def test_call_that_cannot_be_captured_falls_back_to_events():
    tiny = torch.randn(64, device="cuda")
    samples = compare({"item": [lambda: tiny.sum().item()], "add": [lambda: tiny + 1]}, seconds=0.05)
    assert {s.method for s in samples.values()} == {"events"} and "cannot be captured" in samples["add"].note
    again = compare({"add": [lambda: tiny + 1]}, seconds=0.05)["add"]
    assert again.method == "graph", "a failed capture leaves the device usable"


def test_out_of_memory_is_reported_and_the_others_are_timed():
    samples = compare({"big": [lambda: torch.empty(2**50, device="cuda", dtype=torch.uint8)], "mm": [matmul()]})
    assert "out of memory" in samples["big"].failed.lower()
    assert samples["mm"].ok


def test_sustained_load_is_seen_by_the_clocks():
    if open_gpu()[0] is None:
        pytest.skip(f"no clocks: {open_gpu()[1]}")
    with ClockSampler() as idle:
        time.sleep(0.1)
    with EnergyMeter() as energy:
        samples = sustained({"mm": [matmul(8192)]}, seconds=1.5)["mm"]
        torch.cuda.synchronize()
    assert samples.ok and samples.mode == "sustained"
    assert samples.clocks["clock_mhz"]["median"] > 200
    assert samples.clocks["power_w"]["median"] > idle.summary()["power_w"]["min"]
    if energy.joules is not None:
        assert energy.joules > 10
