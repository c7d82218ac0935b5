"""Matching what a driver reports with a profile, including what must not match."""

from __future__ import annotations

import json
import types

import pytest

from gpu_accel.errors import HardwareError
from gpu_accel.hardware import detect
from gpu_accel.hardware.detection import match, untested_on

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
        ("AMD Radeon Graphics", "gfx942", 255.7, 304, "mi325x"),
        ("AMD Instinct MI350X", "gfx950", 287.7, 256, "mi350x"),
        ("NVIDIA H800 PCIe", "9.0", 79.2, 114, "h800-pcie"),
        ("NVIDIA GH200 480GB", "9.0", 94.5, 132, "gh200-96gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "12.0", 95.0, 188, "rtx-pro-6000"),
        ("Intel(R) Data Center GPU Max 1550", "xe-hpc", 122.0, 128, "max-1550"),
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


def test_a_gh200_with_144_gb_is_no_gh200_with_96():
    found = report("NVIDIA GH200 480GB", gib=141.0)
    assert found.profile is not None and not found.exact and "151 GB of memory, not 96" in found.note


def test_a_clock_is_remarked_on_and_decides_nothing():
    one = match(index=0, name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gb=85.0, sm_count=132, clock_mhz=1755.0)
    assert one.exact and "1755 MHz, not 1980" in one.note
    assert match(index=0, name="NVIDIA H100 80GB HBM3", capability="9.0", memory_gb=85.0, sm_count=132,
                 clock_mhz=1980.0).note == ""  # fmt: skip


@pytest.mark.parametrize(
    ("name", "capability", "architecture"),
    [
        ("NVIDIA H20", "9.0", "Hopper"),
        ("NVIDIA A10", "8.6", "Ampere"),
        ("Tesla V100-SXM2-32GB", "7.0", "Volta"),
        ("NVIDIA B300 SXM6 AC", "10.3", "Blackwell Ultra"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "unknown"),
    ],
)
def test_a_gpu_without_a_profile_still_has_an_architecture(name, capability, architecture):
    found = report(name, capability, sms=1)
    assert found.profile is None and found.architecture == architecture == found.as_dict()["architecture"]


@pytest.mark.parametrize(
    ("name", "slices", "memory", "profile", "capability"),
    [
        ("Intel(R) Data Center GPU Max 1550", 128, 131e9, "max-1550", "xe-hpc"),
        ("Intel(R) Arc(TM) B580 Graphics", 20, 12e9, None, "xe2"),
        ("Intel(R) Arc(TM) A770 Graphics", 32, 16e9, None, "xe"),
    ],
)
def test_a_torch_for_intel_is_seen(monkeypatch, name, slices, memory, profile, capability):
    torch = pytest.importorskip("torch")
    card = types.SimpleNamespace(name=name, total_memory=memory, gpu_subslice_count=slices)
    xpu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 1,
                                get_device_properties=lambda index: card)  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "xpu", xpu)
    found = detect()
    assert found is not None and (found.platform, found.capability) == ("xpu", capability)
    assert (found.profile.name if found.profile else None) == profile and "untested" in found.untested
    with pytest.raises(HardwareError, match="ONEAPI_DEVICE_SELECTOR"):
        detect(1)


def test_a_rocm_card_is_never_taken_for_hopper(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_accel.flash_attention3 import launch

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    launch.capability.cache_clear()
    try:
        assert launch.capability(torch.device("cuda", 0)) == (8, 0)
    finally:
        launch.capability.cache_clear()


def test_explain_says_what_is_untested(monkeypatch):
    torch = pytest.importorskip("torch")
    assert untested_on("cpu") == untested_on("cuda") == "" and "Intel" in untested_on("xpu")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in untested_on("cuda")


def test_the_plain_kernels_take_an_intel_tensor():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from gpu_accel.flash_attention3 import backends
    from gpu_accel.flash_attention3.problem import Problem

    sizes = dict(batch=1, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, head_dim=64, head_dim_v=64)
    mask = dict(causal=False, window_left=-1, window_right=-1, softcap=0.0, varlen=False)
    problem = Problem(device_type="xpu", capability=None, dtype=torch.bfloat16, **sizes, **mask)
    assert backends.refusal("portable", "forward", problem) is None
    assert "NVIDIA" in backends.refusal("hopper", "forward", problem)
