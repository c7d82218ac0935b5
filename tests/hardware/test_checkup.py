"""The doctor: what it finds on made-up machines, and that nothing broken can silence it."""

from __future__ import annotations

import json
import os
import platform
import sys

import pytest

from gpu_accel.hardware import checkup, doctor
from gpu_accel.hardware.detection import match

GIB = 2**30 / 1e9


def smi(**answers):
    """A stand-in for nvidia-smi: field -> answer; other fields fail, as unknown ones do."""

    def run(command):
        query = next((word.split("=")[1] for word in command if word.startswith("--query-")), "")
        return answers.get(query.replace(".", "_"))

    return run


HEALTHY = {"driver_version": "580.159.04\n", "mig_mode_current": "Disabled\n", "pid": "",
           "clocks_event_reasons_active": "0x0000000000000001\n", "ecc_mode_current": "Enabled\n",
           "ecc_errors_uncorrected_volatile_total": "0\n", "clocks_sm": "1755\n", "clocks_max_sm": "1980\n",
           "power_limit": "700.00\n", "power_default_limit": "700.00\n", "temperature_gpu": "34\n",
           "compute_mode": "Default\n"}  # fmt: skip


def found(findings, words):
    return next(f for f in findings if words in f.what)


@pytest.fixture
def h100(monkeypatch):
    gpu = match(index=0, name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gb=79.18 * GIB, sm_count=132)
    monkeypatch.setattr(checkup, "detect", lambda index: gpu)
    monkeypatch.setattr(checkup, "_memory", lambda index: iter(()))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_without_a_gpu_everything_is_still_reported(monkeypatch):
    monkeypatch.setattr(checkup, "detect", lambda index: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    findings = doctor(run=lambda command: None)
    assert all(f.level in ("ok", "warn", "fail") and f.what for f in findings)
    assert all(f.remedy for f in findings if f.level != "ok"), "whatever is wrong has a remedy"
    assert "TRITON_INTERPRET=1" in found(findings, "TRITON_INTERPRET is not set").remedy
    assert found(findings, "Python ").level == "ok"
    json.dumps([f.as_dict() for f in findings])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert found(doctor(run=lambda command: None), "TRITON_INTERPRET=1").level == "ok"


def test_a_healthy_h100(h100):
    findings = doctor(run=smi(**HEALTHY))
    gpu = [f for f in findings if any(w in f.what for w in ("GPU", "TMA", "driver", "clocks", "MIG"))]
    assert [f.what for f in gpu if f.level != "ok"] == []
    assert found(findings, "driver 580").level == found(findings, "TMA").level == "ok"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mig_mode_current": "Enabled\n"}, "MIG is on"),
        ({"clocks_event_reasons_active": "0x0000000000000044\n"}, "power cap, hardware thermal limit"),
        ({"clocks_event_reasons_active": None, "clocks_throttle_reasons_active": "0x8\n"}, "hardware slowdown"),
        ({"pid": "12345\n678\n"}, "2 other process(es)"),
        ({"driver_version": None}, "does not answer"),
        ({"ecc_mode_current": "Disabled\n"}, "ECC is off"),
        ({"power_limit": "500.00\n"}, "power limit is 500 W, the card's own 700 W"),
        ({"temperature_gpu": "91\n"}, "91 C"),
        ({"compute_mode": "Exclusive_Process\n"}, "Exclusive_Process"),
    ],
)
def test_trouble_is_named(h100, change, words):
    finding = found(doctor(run=smi(**(HEALTHY | change))), words)
    assert finding.level == "warn" and finding.remedy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ecc_errors_uncorrected_volatile_total": "3\n"}, "3 uncorrected memory errors"),
        ({"compute_mode": "Prohibited\n"}, "Prohibited"),
    ],
)
def test_what_makes_results_worthless_fails(h100, change, words):
    finding = found(doctor(run=smi(**(HEALTHY | change))), words)
    assert finding.level == "fail" and finding.remedy


def test_a_driver_too_old_for_torch_is_named(h100, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    finding = found(doctor(run=smi(**HEALTHY)), "driver 580")
    assert finding.level == "fail" and "CUDA up to 12.8" in finding.what and "torch built for CUDA 12" in finding.remedy
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    assert found(doctor(run=smi(**HEALTHY)), "driver 580").level == "ok"


def test_what_is_untested_is_said(monkeypatch):
    card = match(
        index=0, name="AMD Instinct MI300X", capability="gfx942", memory_gb=205.8, sm_count=304, platform="rocm"
    )
    monkeypatch.setattr(checkup, "detect", lambda index: card)
    monkeypatch.setattr(checkup, "_memory", lambda index: iter(()))
    findings = doctor(run=lambda command: None)
    assert found(findings, "no ROCm GPU was at hand").level == "warn"
    assert found(findings, "gfx942: the plain Triton kernels").level == "ok"
    assert not any("nvidia-smi" in f.what for f in findings)
    intel = match(index=0, name="Intel(R) Data Center GPU Max 1550", capability="xe-hpc", memory_gb=131, sm_count=128,
                  platform="xpu")  # fmt: skip
    monkeypatch.setattr(checkup, "detect", lambda index: intel)
    assert "device='xpu'" in found(doctor(run=lambda command: None), "no Intel GPU was at hand").remedy


def test_room_for_compiled_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "yet"))
    assert next(checkup._cache()).level == "ok"
    monkeypatch.setattr(checkup, "LOW_DISK", 1e30)
    assert next(checkup._cache()).level == "fail"
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(tmp_path) not in next(checkup._cache()).what, "a home folder is a name"


def test_one_line_for_a_bug_report(h100):
    findings = doctor(run=smi(**(HEALTHY | {"ecc_errors_uncorrected_volatile_total": "3\n"})))
    line = checkup.one_line(findings)
    assert "\n" not in line and "NVIDIA H100 80GB HBM3" in line and "torch" in line and "driver 580" in line
    assert "3 uncorrected memory errors" in line and "1 failures" in line
    assert os.path.expanduser("~") not in line and platform.node() not in line


def test_unknown_answers_of_nvidia_smi_are_not_taken_for_facts(h100):
    findings = doctor(run=smi(**(HEALTHY | {"mig_mode_current": "[N/A]\n", "clocks_event_reasons_active": "[N/A]\n"})))
    assert not any("MIG" in f.what or "clocks" in f.what for f in findings)


def test_our_own_process_is_no_company(h100):
    findings = doctor(run=smi(**(HEALTHY | {"pid": f"{os.getpid()}\n"})))
    assert found(findings, "no other process").level == "ok"


def test_interpreter_on_a_gpu_is_warned_of(h100, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert found(doctor(run=smi(**HEALTHY)), "TRITON_INTERPRET=1 although").level == "warn"


@pytest.mark.parametrize(
    ("capability", "level"), [("7.5", "fail"), ("8.0", "warn"), ("8.9", "warn"), ("9.0", "ok"), ("gfx942", "ok")]
)
def test_capabilities(capability, level):
    assert next(checkup._capability(capability)).level == level


@pytest.mark.parametrize(
    ("package", "version", "level"),
    [
        ("torch", None, "fail"), ("torch", "2.10.1", "fail"), ("torch", "2.11.0+cu130", "ok"),
        ("triton", None, "fail"), ("triton", "3.5.1", "fail"), ("triton", "3.6.0", "ok"), ("triton", "3.9.0", "ok"),
        ("triton", "3.10.0", "warn"),
    ],
)  # fmt: skip
def test_versions(monkeypatch, package, version, level):
    real = checkup._version
    monkeypatch.setattr(checkup, "_version", lambda name: version if name == package else real(name))
    findings = list(checkup._torch() if package == "torch" else checkup._triton())
    assert findings[0].level == level and package in findings[0].what


def test_a_triton_without_gluon(monkeypatch, tmp_path):
    monkeypatch.setattr(checkup, "_folder", lambda name: tmp_path)
    monkeypatch.setattr(checkup, "_version", lambda name: "3.6.0")
    assert found(list(checkup._triton()), "no Gluon").level == "warn"


def test_a_broken_driver_does_not_silence_the_rest(monkeypatch):
    def broken(index):
        raise RuntimeError("CUDA driver is in error state")

    monkeypatch.setattr(checkup, "detect", broken)
    findings = doctor(run=lambda command: None)
    assert found(findings, "error state").level == "fail" == checkup.worst(findings)
    assert any("plotly" in f.what for f in findings)


def test_profiling_counters(tmp_path, monkeypatch):
    params = tmp_path / "params"
    assert list(checkup._counters(params)) == []
    params.write_text("RmProfilingAdminOnly: 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert next(checkup._counters(params)).level == "warn"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert next(checkup._counters(params)).level == "ok"


def test_physical_index(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert checkup._physical(0) == "3" and checkup._physical(1) == "GPU-abc"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert checkup._physical(0) == "0"


def test_doctor_does_not_import_triton(monkeypatch):
    had = "triton" in sys.modules
    doctor(run=lambda command: None)
    assert ("triton" in sys.modules) == had
