"""On a real GPU: its energy counter, what the doctor says, and the experiments that measure ceilings."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.hardware import detect, doctor, measure_energy, measured_ceilings, one_line
from gpu_accel.workbench import runner
from gpu_accel.workbench.clocks import open_gpu
from gpu_accel.workbench.experiment import Settings

pytestmark = pytest.mark.gpu


def product(size=8192):
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


@pytest.mark.alone
def test_energy_of_a_product_is_plausible_and_repeats():
    try:
        first, again = (measure_energy(product(), seconds=2.5) for _ in range(2))
    except UnsupportedError as why:
        pytest.skip(str(why))
    card, _ = open_gpu()
    assert 10 < first.idle_w < first.power_w < 1.1 * card.power_limit_w()
    assert first.resolution <= 0.05 and first.window_s >= 2.5
    assert first.joules_per_call == pytest.approx(again.joules_per_call, rel=0.10)
    # No card does a bf16 operation for less than a tenth of a picojoule, nor does a tensor core take ten.
    assert 1e-13 < first.joules_per_call / (2 * 8192**3) < 1e-11


@pytest.mark.alone
def test_twice_the_work_takes_twice_the_energy():
    try:
        once, twice = (measure_energy(call, seconds=2.5) for call in _once_and_twice())
    except UnsupportedError as why:
        pytest.skip(str(why))
    assert twice.joules_per_call == pytest.approx(2 * once.joules_per_call, rel=0.12)


def _once_and_twice():
    call = product(4096)

    def both():
        call()
        call()

    return call, both


def test_the_doctor_finds_a_gpu_and_no_failure():
    findings = doctor()
    assert any(finding.what.startswith("GPU 0") for finding in findings)
    assert not [finding for finding in findings if finding.level == "fail"]
    assert detect().name in one_line(findings)


@pytest.mark.alone
def test_ceilings_are_measured_and_lie_below_the_datasheet():
    result = runner.run("hopper", ["ceilings"], Settings(device="cuda", quick=True, seconds=0.05))
    assert result.exit_code == 0, result.incorrect
    found, profile = measured_ceilings(records=result.records), detect().profile
    assert found is not None and set(found.gbps) == {"copy", "read", "write"} and found.launch_us < 100
    if profile is not None:
        assert 0.5 * profile.bandwidth_gbs < found.bandwidth_gbs <= profile.bandwidth_gbs
        assert found.tflops["bf16"] > 0.4 * profile.peak("bf16")
