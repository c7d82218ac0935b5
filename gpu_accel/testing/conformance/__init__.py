"""Attention on inputs that have broken attention libraries: who passes what.

Cases come from public reports, made small (two have none). `gpu-accel conformance` runs them on this library, on any
other installed one, or on your own function (`--against module:function`), each in a process of its own so that a crash
or a hang is a verdict like any other.
"""

from __future__ import annotations

from gpu_accel.testing.conformance.cases import CASES, ConformanceCase
from gpu_accel.testing.conformance.judge import Attend, run_case
from gpu_accel.testing.conformance.libraries import LIBRARIES, Library, resolve
from gpu_accel.testing.conformance.processes import Outcome, run_library

__all__ = [
    "CASES",
    "LIBRARIES",
    "Attend",
    "ConformanceCase",
    "Library",
    "Outcome",
    "resolve",
    "run_case",
    "run_library",
]
