"""Profiles: every number has a source, wrong files are refused, and known mistakes of others are not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources

import pytest

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.hardware import profile, profiles
from gpu_accel.hardware.catalog import DTYPE_WORDS, PEAK_UNITS, SPEC_UNITS, parse

ALL = profiles()
H100 = (resources.files("gpu_accel.hardware") / "profiles" / "h100-sxm.toml").read_text()
by_name = pytest.mark.parametrize("gpu", ALL, ids=lambda p: p.name)


def test_the_promised_gpus_are_there():
    names = {p.name for p in ALL}
    assert names >= {"h100-sxm", "h100-pcie", "h100-nvl", "h200-sxm", "b200-sxm", "gb200", "a100-sxm-80gb"}
    assert names >= {"rtx-4090", "rtx-5090", "l40s", "mi300x"}
    assert names >= {"h800-pcie", "gh200-96gb", "rtx-pro-6000", "mi325x", "mi350x", "max-1550"}


@by_name
def test_every_number_has_a_source_and_every_peak_is_dense(gpu):
    for quantity in (*gpu.peaks.values(), *gpu.spec.values()):
        assert gpu.sources[quantity.source].url.startswith("https://")
    assert all(q.dense is True for q in gpu.peaks.values())
    assert json.loads(json.dumps(gpu.as_dict()))["name"] == gpu.name


@by_name
def test_what_is_missing_is_named(gpu):
    for key in ("sm_count", "boost_clock", "l2", "shared_per_block", "power"):
        assert key in gpu.spec or key in gpu.absent, key


@by_name
def test_peaks_are_consistent(gpu):
    # Every halving of the format doubles the rate, on all architectures here: a sparse figure among dense ones shows.
    for dtype in ("fp16", "bf16"):
        assert dtype in gpu.peaks or dtype in gpu.absent
    if not gpu.peaks.keys() >= {"fp16", "bf16"}:
        return
    assert gpu.peak("fp16") == gpu.peak("bf16")
    if "tf32" in gpu.peaks:
        assert gpu.peak("bf16") == pytest.approx(2 * gpu.peak("tf32"), rel=0.02)
    if "fp8" in gpu.peaks:
        assert gpu.peak("fp8") == pytest.approx(2 * gpu.peak("bf16"), rel=0.03)
    if "fp32" in gpu.peaks and gpu.spec.keys() >= {"sm_count", "boost_clock"} and gpu.vendor == "NVIDIA":
        lanes = 64 if gpu.architecture == "Ampere" else 128
        formula = 2 * lanes * gpu.sm_count * gpu.value("boost_clock") * 1e6 / 1e12
        assert gpu.peak("fp32") == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-sxm-80gb"])
def test_tensor_peaks_follow_from_the_clock(name):
    gpu = profile(name)
    per_clock = {"h100-sxm": 4096, "a100-sxm-80gb": 2048}[name]
    clock = gpu.value("tensor_clock") or gpu.value("boost_clock")
    assert gpu.peak("bf16") == pytest.approx(per_clock * gpu.sm_count * clock * 1e6 / 1e12, rel=1e-3)


def test_figures_that_are_often_printed_wrong():
    assert profile("h100").peak("bf16") == 989.4  # not 1979 (sparse), not 740 (what FlashAttention-3 reached)
    assert profile("h100").peak("fp8") == 1978.9  # not 1200 (FlashAttention-3), not 3958 (sparse)
    assert profile("b200").peak("fp4") == 9000  # not 1200
    assert profile("b200").peak("bf16") == 2250  # not 300
    assert profile("rtx-4090").peak("fp8") == 330.3  # not 660.6, which accumulates in fp16
    assert profile("rtx-5090").peak("bf16") == 209.5  # not 419 (fp16 accumulation) and not 838 (sparse)
    with pytest.raises(UnsupportedError, match="fp8"):
        profile("a100").peak("fp8")


def test_aliases_lead_to_one_profile_each():
    words = [word for p in ALL for word in (p.name, *p.aliases)]
    assert len(words) == len(set(words))
    for alias, name in {"h100": "h100-sxm", "H200": "h200-sxm", "b200": "b200-sxm", "RTX 4090": "rtx-4090",
                        "a100": "a100-sxm-80gb"}.items():  # fmt: skip
        assert profile(alias).name == name
    device_names = [name.lower() for p in ALL for name in p.device_names]
    assert len(device_names) == len(set(device_names))


def test_unknown_names_are_answered_with_suggestions():
    with pytest.raises(InvalidInputError, match="did you mean h100"):
        profile("h10")
    with pytest.raises(InvalidInputError, match="there are: .*mi300x"):
        profile("qqqqqq")


def test_dtype_words():
    gpu = profile("b200")
    assert gpu.peak("e4m3") == gpu.peak("e5m2") == gpu.peak("fp8") == gpu.peak("torch.float8_e4m3fn")
    assert gpu.peak("nvfp4") == gpu.peak("fp4") and gpu.peak("bfloat16") == gpu.peak("bf16")
    assert set(DTYPE_WORDS.values()) <= set(PEAK_UNITS)
    with pytest.raises(InvalidInputError, match="fp9"):
        gpu.peak("fp9")


def test_value_knows_absent_from_unknown():
    assert profile("gb200").value("sm_count") is None and profile("gb200").sm_count is None
    assert profile("h100").value("l2") == 50 and "l2" in SPEC_UNITS
    with pytest.raises(InvalidInputError, match="l5"):
        profile("h100").value("l5")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('vendor = "NVIDIA"', 'vendor = "NVIDIA"\ncolour = "green"', "unknown colour"),
        ('vendor = "NVIDIA"\n', "", "missing vendor"),
        ('value = 80, unit = "GB"', 'value = 80, unit = "GiB"', "'GiB'"),
        ('value = 80, unit = "GB"', 'value = "80", unit = "GB"', "positive number"),
        ('value = 80, unit = "GB"', 'value = -80, unit = "GB"', "positive number"),
        ('value = 80, unit = "GB"', 'value = nan, unit = "GB"', "positive number"),
        ('value = 80, unit = "GB"', 'value = inf, unit = "GB"', "positive number"),
        ('value = 80, unit = "GB"', 'value = true, unit = "GB"', "positive number"),
        ('value = 80, unit = "GB"', 'value = 80, sort = "HBM3", unit = "GB"', "spec.memory: unknown sort"),
        ('value = 80, unit = "GB", source = "h100_whitepaper"', 'value = 80, unit = "GB"', "missing source"),
        ('unit = "GB", source = "h100_whitepaper"', 'unit = "GB", source = "a friend"', "a friend"),
        ("memory = {", "memori = {", "spec.memori is not known"),
        ("bf16 = {", "bf61 = {", "peak.bf61 is not known"),
        ("dense = true", "dense = false", "not dense"),
        (", dense = true", "", "missing dense"),
        ('kind = "vendor"', 'kind = "rumour"', "kind"),
        ("[spec]", '[absent]\nl2 = "no idea"\n[spec]', "absent.l2"),
        ("[spec]", '[sources.blog]\ntitle = "a"\nurl = "https://b"\nkind = "secondary"\n[spec]', "nothing uses"),
        ("[spec]", "[spec", "h100-sxm.toml"),
    ],
)  # fmt: skip
def test_the_loader_refuses(old, new, message):
    assert old in H100
    with pytest.raises(InvalidInputError, match=message) as caught:
        parse(H100.replace(old, new, 1), "h100-sxm.toml")
    assert "h100-sxm.toml" in str(caught.value)


def test_importing_hardware_imports_neither_torch_nor_triton():
    code = "import sys, gpu_accel.hardware as h; h.profile('h100'); print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_profile_is_found_by_what_the_driver_calls_the_card():
    assert profile("NVIDIA H100 80GB HBM3").name == profile("nvidia h100 80gb hbm3 ").name == "h100-sxm"
    for one in profiles():
        for device in one.device_names:
            others = [p.name for p in profiles() if device in p.device_names]
            if len(others) == 1:
                assert profile(device) == one
            else:
                with pytest.raises(InvalidInputError, match=" or ".join(others)):
                    profile(device)


@pytest.mark.parametrize("name", [None, 7, b"h100", ("h100",)], ids=repr)
def test_a_name_that_is_no_string_is_refused(name):
    with pytest.raises(InvalidInputError, match="a string such as"):
        profile(name)
