"""Thousands of random calls over all features against float64, on a real GPU.

    python3 -m pytest tests/gpu/test_differential.py -q -s               # 10 seconds for each of 12 seeds
    GPU_ACCEL_DIFFERENTIAL_SECONDS=300 GPU_ACCEL_DIFFERENTIAL_SEED=7 pytest -n 8 tests/gpu/test_differential.py

The seed is printed, and a failing call comes out small enough to paste: `check(Call(...))`. Each search has a process
of its own: an illegal access would fail every later test of a worker.
"""

from __future__ import annotations

import os
import time

import pytest

from gpu_accel.testing.differential import search_apart

pytestmark = pytest.mark.gpu
SHARES = 12  # of the work: one a process under pytest-xdist
SECONDS = float(os.environ.get("GPU_ACCEL_DIFFERENTIAL_SECONDS", "10"))
SEED = int(os.environ.get("GPU_ACCEL_DIFFERENTIAL_SEED", time.time_ns() // 10**9 % 10**6 * SHARES))


@pytest.mark.parametrize("share", range(SHARES))
def test_random_calls(share):
    counts = search_apart(seconds=SECONDS, seed=SEED + share)
    print(f"seed {SEED + share}: {counts}")
    assert counts["judged"] > 0
