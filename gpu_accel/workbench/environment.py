"""Where a result came from: GPU and its variant, driver, versions, commit. No host names, paths or serial numbers.

Torch is imported only for a CUDA device; on a CPU its version is read from the installed package's metadata.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_accel.errors import HardwareError

COMMIT_VARIABLE = "GPU_ACCEL_COMMIT"  # "<sha>" or "<sha>-dirty": the commit of a copy that travels without .git
PEERS = ("flash-attn-4", "flash-attn", "nvidia-cutlass-dsl", "flashinfer-python", "transformer-engine", "transformers")
_VARIABLES = ("TRITON_", "CUDA_", "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "NVIDIA_TF32_", "CUBLAS_", "CUDNN_")
_HARMLESS = re.compile(r"[\w.,:=+-]{0,48}")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|(GPU|MIG)-|[0-9a-fA-F]*:[0-9a-fA-F]*:")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|COMM_ID", re.IGNORECASE)
_DATACENTRE = ("H100", "H200", "H800", "H20", "A100", "A800", "B100", "B200", "B300", "GB200", "GB300", "GH200")
_FORMS = (("PCIE", "PCIe"), ("NVL", "NVL"), ("SXM", "SXM"))
_SMS_OF_H100_PCIE = 114  # the SXM and NVL boards have 132


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a record keeps as ``env``; None where there is no GPU or a thing is not known."""

    gpu: str | None = None  # the driver's name: "NVIDIA H100 80GB HBM3"
    sku: str | None = None  # the variant that decides clocks and bandwidth: "H100 SXM"
    gpus: int = 0  # visible to this process
    capability: str | None = None  # "9.0"
    sms: int | None = None
    memory_gib: float | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torch: str | None = None
    triton: str | None = None
    packages: dict[str, str] = field(default_factory=dict)  # rival kernels that are installed
    python: str = ""
    os: str = ""
    cpu: str = ""
    variables: dict[str, str] = field(default_factory=dict)  # environment variables that change results
    commit: str = ""
    dirty: bool = False

    @classmethod
    def capture(cls, device: str = "cpu") -> Environment:
        """Describe this machine for work on ``device`` ("cpu", "cuda" or "cuda:1", also as a torch.device).

        Raises HardwareError when a CUDA device is asked for and there is none.
        """
        commit, dirty = git_state()
        packages = {name: found for name in PEERS if (found := _version(name))}
        facts: dict[str, Any] = {
            "torch": _version("torch"),
            "triton": _version("triton") or _version("pytorch-triton"),
            "packages": packages,
            "python": platform.python_version(),
            "os": _os(),
            "cpu": _cpu(),
            "variables": relevant_variables(os.environ),
            "commit": commit,
            "dirty": dirty,
        }
        if str(device).startswith("cuda"):
            facts |= _gpu(str(device))
        return cls(**facts)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able dict of every field."""
        return dataclasses.asdict(self)


def sku_name(name: str, *, sms: int | None = None, memory_gib: float | None = None) -> str:
    """The variant of a GPU from the name its driver gives: "NVIDIA H100 80GB HBM3" -> "H100 SXM".

    Variants of one model differ in clocks, SMs and bandwidth, so a number of one says little about another. A slice of
    a GPU (MIG) is named as such. ``sms`` and ``memory_gib`` decide where the name alone does not.
    """
    short = re.sub(r"\b(NVIDIA|AMD|GeForce|Instinct|Graphics|Tesla|Quadro|GPU)\b", " ", name, flags=re.IGNORECASE)
    short, _, slice_ = short.partition(" MIG ")
    words = re.sub(r"[\s-]+", " ", short).split()
    if not words:
        return name.strip() or "unknown"
    model, rest = words[0], " ".join(words[1:]).upper()
    form = next((form for mark, form in _FORMS if mark in rest), "")
    if model == "H100" and not form:
        form = "PCIe" if sms == _SMS_OF_H100_PCIE else "SXM"
    elif model in ("H200", "H800") and not form:
        form = "SXM"
    elif model in ("A100", "A800"):  # 40 and 80 GB differ in bandwidth
        size = "80GB" if "80GB" in rest or (memory_gib or 0) > 60 else "40GB"
        form = f"{form} {size}".strip()
    known = model in _DATACENTRE
    sku = f"{model} {form}".strip() if known else " ".join(words)
    return f"{sku} MIG {slice_.strip()}" if slice_ else sku


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of Triton, CUDA, NCCL and torch; values that could name a person, a path or a machine read "<set>"."""
    found = {}
    for name in sorted(environ):
        if not name.startswith(_VARIABLES) or _SECRET.search(name):
            continue
        value = environ[name]
        node = platform.node()
        private = not _HARMLESS.fullmatch(value) or _ADDRESS.search(value) or (node and node in value)
        found[name] = "<set>" if private else value
    return found


def git_state(root: Path | None = None) -> tuple[str, bool]:
    """(commit, dirty) of the checkout at ``root`` (default: the one this package lies in); ("", False) if it is none.

    Committed results do not make a tree dirty, since running an experiment writes them. A repository that merely
    contains ``root`` (a virtual environment inside another project) is not ours and does not count.
    """
    if root is None:
        if stamp := os.environ.get(COMMIT_VARIABLE):
            return stamp.removesuffix("-dirty"), stamp.endswith("-dirty")
        root = Path(__file__).resolve().parents[2]
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != Path(root).resolve():
        return "", False
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", ".", ":(exclude)papers/*/results/*")
    return (commit or "").strip(), status is None or bool(status.strip())


def _git(root: Path, *arguments: str) -> str | None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpu(device: str) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise HardwareError(f"device {device!r} was asked for, but torch {torch.__version__} sees no CUDA device")
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    if index >= torch.cuda.device_count():
        raise HardwareError(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    properties = torch.cuda.get_device_properties(index)
    memory = round(properties.total_memory / 2**30, 1)
    sms = properties.multi_processor_count
    return {
        "gpu": properties.name,
        "sku": sku_name(properties.name, sms=sms, memory_gib=memory),
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "sms": sms,
        "memory_gib": memory,
        "driver": driver_version(),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": cudnn_name(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "torch": str(torch.__version__),
    }


def cudnn_name(number: int | None) -> str | None:
    """91900 -> "9.19.0"; the major version moved from thousands to ten thousands with cuDNN 9."""
    if not number:
        return None
    unit = 10_000 if number >= 90_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def driver_version() -> str | None:
    """The driver's version, from NVML or else nvidia-smi; None when there is neither."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            try:
                if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
                    return text.value.decode()
            finally:
                nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _os() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    return f"{name or platform.system()} ({platform.system()} {platform.release()})"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} threads"
