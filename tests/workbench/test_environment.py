"""The environment of a result: names of GPU variants, git state, and what must never leave the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_accel.errors import HardwareError
from gpu_accel.workbench.environment import (
    Environment,
    cudnn_name,
    driver_version,
    git_state,
    relevant_variables,
    sku_name,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "facts", "sku"),
    [
        ("NVIDIA H100 80GB HBM3", {"sms": 132}, "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", {}, "H100 SXM"),
        ("NVIDIA H100 PCIe", {"sms": 114}, "H100 PCIe"),
        ("NVIDIA H100", {"sms": 114}, "H100 PCIe"),
        ("NVIDIA H100 NVL", {"sms": 132, "memory_gib": 93.1}, "H100 NVL"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", {"sms": 16}, "H100 SXM MIG 1g.10gb"),
        ("NVIDIA H200", {"sms": 132}, "H200 SXM"),
        ("NVIDIA H200 NVL", {}, "H200 NVL"),
        ("NVIDIA GH200 480GB", {}, "GH200"),
        ("NVIDIA B200", {}, "B200"),
        ("NVIDIA A100-SXM4-80GB", {}, "A100 SXM 80GB"),
        ("NVIDIA A100-PCIE-40GB", {}, "A100 PCIe 40GB"),
        ("NVIDIA GeForce RTX 4090", {}, "RTX 4090"),
        ("NVIDIA L40S", {}, "L40S"),
        ("AMD Instinct MI300X", {}, "MI300X"),
        ("Tesla V100-SXM2-16GB", {}, "V100 SXM2 16GB"),
        ("NVIDIA", {}, "NVIDIA"),
    ],
)
def test_sku_names(name, facts, sku):
    assert sku_name(name, **facts) == sku


def test_cudnn_names():
    assert [cudnn_name(n) for n in (91900, 90101, 8902, None)] == ["9.19.0", "9.1.1", "8.9.2", None]


def test_a_cpu_environment_is_json_and_names_no_machine():
    environment = Environment.capture("cpu").as_dict()
    text = json.dumps(environment)
    assert environment["gpu"] is None and environment["python"] == platform.python_version()
    assert environment["torch"] and environment["cpu"] and environment["os"]
    for private in (platform.node(), str(ROOT), os.path.expanduser("~")):
        assert private == "" or private == "/" or f'"{private}"' not in text and f"{private}/" not in text


def test_capturing_on_a_cpu_imports_no_torch():
    program = (
        "import sys; from gpu_accel.workbench.environment import Environment; Environment.capture('cpu');"
        "assert not {'torch', 'triton', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_missing_gpu_is_a_clear_error():
    torch = pytest.importorskip("torch")
    missing = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(HardwareError, match="asked for"):
        Environment.capture(missing)


def test_a_gpu_environment_from_torch_properties(monkeypatch):
    torch = pytest.importorskip("torch")

    class Properties:
        name, total_memory, multi_processor_count, major, minor = "NVIDIA H100 80GB HBM3", 80 * 2**30, 132, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    environment = Environment.capture("cuda:1")
    assert (environment.gpu, environment.sku, environment.gpus) == ("NVIDIA H100 80GB HBM3", "H100 SXM", 2)
    assert (environment.capability, environment.sms, environment.memory_gib) == ("9.0", 132, 80.0)
    assert environment.torch == str(torch.__version__)
    with pytest.raises(HardwareError, match="2 CUDA devices"):
        Environment.capture("cuda:2")


def test_variables_are_kept_but_nothing_private():
    found = relevant_variables(
        {
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "NCCL_NVLS_ENABLE": "0",
            "TRITON_CACHE_DIR": "/home/somebody/cache",
            "CUDA_DEVICE": "GPU-8a6c4b2e-0000-0000-0000-000000000000",
            "NCCL_SOCKET": "10.1.2.3",
            "NCCL_HOST": platform.node() or "/x",
            "NCCL_COMM_ID": "abc",
            "TORCH_API_TOKEN": "hunter2",
            "HOME": "/home/somebody",
        }
    )
    assert found == {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_NVLS_ENABLE": "0",
        "TRITON_CACHE_DIR": "<set>",
        "CUDA_DEVICE": "<set>",
        "NCCL_SOCKET": "<set>",
        "NCCL_HOST": "<set>",
    }


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for command in (
        ["init", "-q"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "--allow-empty", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_git_state(checkout, monkeypatch):
    monkeypatch.delenv("GPU_ACCEL_COMMIT", raising=False)
    commit, dirty = git_state(checkout)
    assert len(commit) == 40 and not dirty
    results = checkout / "papers" / "toy" / "results" / "h100-sxm" / "a.jsonl"
    results.parent.mkdir(parents=True)
    results.write_text("{}\n")
    assert git_state(checkout) == (commit, False)  # a run writes results; that does not change the code
    (checkout / "kernel.py").write_text("x = 1\n")
    assert git_state(checkout) == (commit, True)
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert git_state(checkout) == (commit, True)


def test_a_repository_around_the_package_is_not_its_own(checkout, tmp_path):
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert git_state(inside) == ("", False)


def test_a_copy_without_git_can_be_stamped(monkeypatch):
    monkeypatch.setenv("GPU_ACCEL_COMMIT", "0123abc-dirty")
    assert git_state() == ("0123abc", True)
    monkeypatch.setenv("GPU_ACCEL_COMMIT", "0123abc")
    assert git_state() == ("0123abc", False)
    assert Environment.capture("cpu").commit == "0123abc"


def test_driver_version_falls_back_to_nvidia_smi(tmp_path, monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_library)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.95.05\necho 580.95.05\n")
    tool.chmod(0o755)
    assert driver_version() == "580.95.05"
