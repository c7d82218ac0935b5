"""Which GPU is here, and which profile describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_accel.errors import HardwareError
from gpu_accel.hardware.catalog import Profile, profiles

# Vendors count GB as 1e9 or as 2**30 bytes and keep some back, hence the width. The closest variants (A100 with 40 and
# 80 GB) differ by far more.
_MEMORY_TOLERANCE = 0.15


@dataclass(frozen=True)
class Detected:
    """A GPU as the driver reports it. `exact` is False where it differs from its profile in a way that `note` names."""

    index: int
    name: str
    capability: str  # "9.0", or "gfx942"
    memory_gb: float  # 1e9 bytes
    sm_count: int
    profile: Profile | None
    exact: bool
    note: str = ""

    @property
    def slug(self) -> str:
        """A short name for files: the profile's, or the reported name in lower case with dashes."""
        if self.profile:
            return self.profile.name
        words = "".join(c if c.isalnum() else " " for c in self.name.lower()).split()
        return "-".join(word for word in words if word not in ("nvidia", "amd"))

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "name": self.name,
            "capability": self.capability,
            "memory_gb": round(self.memory_gb, 1),
            "sm_count": self.sm_count,
            "profile": self.profile.name if self.profile else None,
            "exact": self.exact,
            "note": self.note,
        }


def detect(index: int = 0) -> Detected | None:
    """The GPU of an index with its profile; None where torch sees no GPU at all (or is not installed).

    Raises HardwareError for an index beyond the GPUs that are there.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise HardwareError(f"there is no GPU {index}; torch sees {count} (check CUDA_VISIBLE_DEVICES)")
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
    return match(
        index=index,
        name=properties.name,
        capability=arch or f"{properties.major}.{properties.minor}",
        memory_gb=properties.total_memory / 1e9,
        sm_count=properties.multi_processor_count,
    )


def match(*, index: int, name: str, capability: str, memory_gb: float, sm_count: int) -> Detected:
    """Find the profile of what a driver reports: by name, on AMD also by architecture and number of compute units."""
    found = next((p for p in profiles() if name.lower() in (n.lower() for n in p.device_names)), None)
    if found is None and capability.startswith("gfx"):
        # Containers without the marketing name table report "AMD Radeon Graphics".
        found = next((p for p in profiles() if p.capability == capability and p.sm_count == sm_count), None)
    differences = _differences(found, capability, memory_gb, sm_count) if found else ["no profile has this name"]
    return Detected(
        index, name, capability, memory_gb, sm_count, found, exact=not differences, note="; ".join(differences)
    )


def _differences(profile: Profile, capability: str, memory_gb: float, sm_count: int) -> list[str]:
    differences = []
    if capability != profile.capability:
        differences.append(f"compute capability {capability}, not {profile.capability}")
    if profile.sm_count is not None and sm_count != profile.sm_count:
        differences.append(f"{sm_count} SMs, not {profile.sm_count} (MIG, or another variant): the peaks do not apply")
    if abs(memory_gb / profile.memory_gb - 1) > _MEMORY_TOLERANCE:
        differences.append(f"{memory_gb:.0f} GB of memory, not {profile.memory_gb:g}")
    return differences
