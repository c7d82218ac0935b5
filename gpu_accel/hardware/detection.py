"""Which GPU is here, and which profile describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_accel.errors import HardwareError
from gpu_accel.hardware.catalog import Profile, profiles

# Vendors count GB as 1e9 or as 2**30 bytes and keep some back, hence the width. The closest variants (A100 with 40 and
# 80 GB) differ by far more.
_MEMORY_TOLERANCE = 0.15
_CLOCK_TOLERANCE = 0.03  # boards of other makers differ by more, so a clock is remarked on and decides nothing
_ARCHITECTURES = {
    "7.0": "Volta",
    "7.5": "Turing",
    "8.0": "Ampere",
    "8.6": "Ampere",
    "8.7": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "10.3": "Blackwell Ultra",
    "12.0": "Blackwell",
    "12.1": "Blackwell",
    "gfx90a": "CDNA 2",
    "gfx942": "CDNA 3",
    "gfx950": "CDNA 4",
    "xe-hpc": "Xe-HPC",
    "xe2": "Xe2",
}
# What has been tried: Hopper by tests on a GPU and all measurements, CPUs by the tests. The rest only compiles.
UNTESTED = {
    "cuda": "",
    "rocm": "untested: no ROCm GPU was at hand. The plain Triton kernels are what runs, without TMA and without FP8",
    "xpu": "untested: no Intel GPU was at hand. The plain Triton kernels are what runs; nothing is timed",
}


def untested_on(device_type: str) -> str:
    """What `explain` says of tensors on such a torch device; "" where kernels have been tried."""
    if device_type == "cuda":
        import torch

        return UNTESTED["rocm" if torch.version.hip else "cuda"]
    return UNTESTED.get(device_type, "")


@dataclass(frozen=True)
class Detected:
    """A GPU as the driver reports it. `exact` is False where it differs from its profile in a way that `note` names."""

    index: int
    name: str
    capability: str  # "9.0", "gfx942", "xe-hpc"
    memory_gb: float  # 1e9 bytes
    sm_count: int
    profile: Profile | None
    exact: bool
    note: str = ""
    platform: str = "cuda"  # of torch: "cuda", "rocm" or "xpu"
    clock_mhz: float | None = None  # the highest, where torch tells

    @property
    def slug(self) -> str:
        """A short name for files: the profile's, or the reported name in lower case with dashes."""
        if self.profile:
            return self.profile.name
        words = "".join(c if c.isalnum() else " " for c in self.name.lower()).split()
        return "-".join(word for word in words if word not in ("nvidia", "amd", "intel", "r"))

    @property
    def architecture(self) -> str:
        """Such as "Hopper"; "unknown" for one that is not listed."""
        return self.profile.architecture if self.profile else _ARCHITECTURES.get(self.capability, "unknown")

    @property
    def untested(self) -> str:
        """What has not been tried on such a platform; "" for NVIDIA."""
        return UNTESTED[self.platform]

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "name": self.name,
            "platform": self.platform,
            "architecture": self.architecture,
            "capability": self.capability,
            "memory_gb": round(self.memory_gb, 1),
            "sm_count": self.sm_count,
            "clock_mhz": self.clock_mhz,
            "profile": self.profile.name if self.profile else None,
            "exact": self.exact,
            "note": self.note,
            "untested": self.untested,
        }


def detect(index: int = 0) -> Detected | None:
    """The GPU of an index with its profile; None where torch sees no GPU at all (or is not installed).

    A build of torch for ROCm shows its GPUs as CUDA devices, one for Intel as XPU devices.
    Raises HardwareError for an index beyond the GPUs that are there.
    """
    try:
        import torch
    except ImportError:
        return None
    if torch.cuda.is_available():
        _in_range(index, torch.cuda.device_count(), "CUDA_VISIBLE_DEVICES")
        properties = torch.cuda.get_device_properties(index)
        arch = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
        kilohertz = getattr(properties, "clock_rate", None)
        return match(
            index=index,
            name=properties.name,
            capability=arch or f"{properties.major}.{properties.minor}",
            memory_gb=properties.total_memory / 1e9,
            sm_count=properties.multi_processor_count,
            platform="rocm" if torch.version.hip else "cuda",
            clock_mhz=kilohertz / 1e3 if isinstance(kilohertz, int | float) and kilohertz > 0 else None,
        )
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        _in_range(index, xpu.device_count(), "ONEAPI_DEVICE_SELECTOR")
        properties = xpu.get_device_properties(index)
        return match(
            index=index,
            name=properties.name,
            capability=_intel(properties.name),
            memory_gb=properties.total_memory / 1e9,
            sm_count=int(getattr(properties, "gpu_subslice_count", 0) or getattr(properties, "max_compute_units", 0)),
            platform="xpu",
        )
    return None


def _in_range(index: int, count: int, variable: str) -> None:
    if not 0 <= index < count:
        raise HardwareError(f"there is no GPU {index}; torch sees {count} (check {variable})")


def _intel(name: str) -> str:
    """Torch tells no architecture of an Intel GPU as such; its name does."""
    if "Max" in name or "Ponte" in name:
        return "xe-hpc"
    return "xe2" if "Arc" in name and "B" in name.rsplit("Arc", 1)[-1] else "xe"


def match(
    *,
    index: int,
    name: str,
    capability: str,
    memory_gb: float,
    sm_count: int,
    platform: str = "cuda",
    clock_mhz: float | None = None,
) -> Detected:
    """Find the profile of what a driver reports: by name, on AMD also by architecture, compute units and memory."""
    found = next((p for p in profiles() if name.lower() in (n.lower() for n in p.device_names)), None)
    if found is None and capability.startswith("gfx"):
        # Containers without the marketing name table report "AMD Radeon Graphics". MI300X and MI325X have the same
        # architecture and number of units, and differ in memory.
        alike = [p for p in profiles() if p.capability == capability and p.sm_count == sm_count]
        found = min(alike, key=lambda p: abs(memory_gb / p.memory_gb - 1), default=None)
    differences = _differences(found, capability, memory_gb, sm_count) if found else ["no profile has this name"]
    boost = found.value("boost_clock") if found else None
    remarks = []
    if boost and clock_mhz and abs(clock_mhz / boost - 1) > _CLOCK_TOLERANCE:
        remarks.append(f"its highest clock is {clock_mhz:.0f} MHz, not {boost:g}: peaks move with it")
    return Detected(
        index, name, capability, memory_gb, sm_count, found, exact=not differences,
        note="; ".join([*differences, *remarks]), platform=platform, clock_mhz=clock_mhz,
    )  # fmt: skip


def _differences(profile: Profile, capability: str, memory_gb: float, sm_count: int) -> list[str]:
    differences = []
    if capability != profile.capability:
        differences.append(f"compute capability {capability}, not {profile.capability}")
    if profile.sm_count is not None and sm_count != profile.sm_count:
        differences.append(f"{sm_count} SMs, not {profile.sm_count} (MIG, or another variant): the peaks do not apply")
    if abs(memory_gb / profile.memory_gb - 1) > _MEMORY_TOLERANCE:
        differences.append(f"{memory_gb:.0f} GB of memory, not {profile.memory_gb:g}")
    return differences
