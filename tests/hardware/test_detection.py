"""Matching what a driver reports with a profile, including what must not match."""

from __future__ import annotations

import json
import types

import pytest

from gpu_accel.errors import HardwareError
from gpu_accel.hardware import detect
from gpu_accel.hardware.detection import match

GIB = 2**30 / 1e9


def report(name, capability="9.0", gib=79.18, sms=132):
    return match(index=0, name=name, capability=capability, memory_gb=gib * GIB, sm_count=sms)


@pytest.mark.parametrize(
    ("name", "capability", "gib", "sms", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0", 79.18, 132, "h100-sxm"),
        ("NVIDIA H100 PCIe", "9.0", 79.2, 114, "h100-pcie"),
        ("NVIDIA H100 NVL", "9.0", 93.1, 132, "h100-nvl"),
        ("NVIDIA H200", "9.0", 139.8, 132, "h200-sxm"),
        ("NVIDIA B200", "10.0", 178.4, 148, "b200-sxm"),
        ("NVIDIA GB200", "10.0", 184.0, 152, "gb200"),
        ("NVIDIA A100-SXM4-40GB", "8.0", 39.4, 108, "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "8.0", 79.2, 108, "a100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "8.9", 23.5, 128, "rtx-4090"),
        ("AMD Instinct MI300X", "gfx942", 191.7, 304, "mi300x"),
        ("AMD Radeon Graphics", "gfx942", 191.7, 304, "mi300x"),
    ],
)
def test_known_gpus(name, capability, gib, sms, expected):
    found = report(name, capability, gib, sms)
    assert found.profile is not None and found.profile.name == expected == found.slug
    assert found.exact and not found.note


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20"])
def test_similar_names_do_not_match(name):
    found = report(name)
    assert found.profile is None and not found.exact and "no profile" in found.note
    assert found.slug == name.lower().removeprefix("nvidia ").replace(" ", "-")


def test_a_mig_slice_is_told_from_a_whole_gpu():
    found = report("NVIDIA H100 80GB HBM3", gib=19.6, sms=32)
    assert found.profile is not None and not found.exact
    assert "32 SMs, not 132" in found.note and "memory" in found.note
    assert json.loads(json.dumps(found.as_dict()))["profile"] == "h100-sxm"


def test_detect_asks_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    h100 = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85_017_624_576, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: h100)
    found = detect()
    assert found is not None and found.slug == "h100-sxm" and found.exact and found.capability == "9.0"
    with pytest.raises(HardwareError, match="there is no GPU 1"):
        detect(1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    h100.gcnArchName, h100.name, h100.multi_processor_count = "gfx942:sramecc+:xnack-", "AMD Radeon Graphics", 304
    h100.total_memory = 205_805_780_992
    found = detect()
    assert found is not None and found.slug == "mi300x" and found.exact
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is None
