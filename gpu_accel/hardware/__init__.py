"""Hardware as data: profiles with sources, which GPU is here, rooflines, and what stands in the way (`doctor`).

    from gpu_accel.hardware import roofline, measure_energy, attention_flops, profile

Importing this does not import torch.
"""

from __future__ import annotations

from gpu_accel.hardware.catalog import Profile, Quantity, Source, profile, profiles
from gpu_accel.hardware.ceilings import Ceilings, measured_ceilings
from gpu_accel.hardware.checkup import Finding, doctor, one_line
from gpu_accel.hardware.detection import Detected, detect
from gpu_accel.hardware.energy import Energy, measure_energy
from gpu_accel.hardware.roofline import Estimate, Roofline, roofline
from gpu_accel.hardware.work import (
    attention_bytes,
    attention_flops,
    attention_pairs,
    bytes_of,
    copy_bytes,
    gemm_bytes,
    gemm_flops,
)

__all__ = [
    "Ceilings",
    "Detected",
    "Energy",
    "Estimate",
    "Finding",
    "Profile",
    "Quantity",
    "Roofline",
    "Source",
    "attention_bytes",
    "attention_flops",
    "attention_pairs",
    "bytes_of",
    "copy_bytes",
    "detect",
    "doctor",
    "gemm_bytes",
    "gemm_flops",
    "measure_energy",
    "measured_ceilings",
    "one_line",
    "profile",
    "profiles",
    "roofline",
]
