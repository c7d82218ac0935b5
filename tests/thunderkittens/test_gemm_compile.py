"""The Hopper products compile to sm_90a with every supported Triton: no serialised wgmma, next to no spills, TMA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = Path(os.environ.get("GPU_ACCEL_TRITON_TARGETS") or ROOT / ".triton-targets")
VERSIONS = ["installed", *sorted(p.name for p in TARGETS.glob("*") if (p / "triton").is_dir())]
SHARED_LIMIT = 227 * 1024  # bytes that one program can have on an H100

SMALL_SPILL = 32  # bytes a thread, once a tile: FP8 needs 208 of 240 registers for sums and operands


def compiled(version: str, names: list[str]) -> dict[str, dict]:
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    first = [] if version == "installed" else [str(TARGETS / version)]
    env["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = Path(__file__).with_name("compile_gemm.py")
    done = subprocess.run([sys.executable, str(script), *names], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if version != "installed":
        assert {row["triton"] for row in rows} == {version}
    assert [row["name"] for row in rows] == names
    return {row["name"]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_no_spills_and_nothing_serialised(version):
    # the installed one, and 3.6.0 of torch 2.11
    few = [] if version in ("3.8.0", "3.9.0") else ["skinny-16", "fp8-skinny-blocks"]
    rows = compiled(version, ["tile", "fp8-blocks", *few])
    for row in rows.values():
        assert row["spills"] <= SMALL_SPILL and not row["faults"], row
        assert row["wgmma"] and row["tma_loads"] and row["shared"] <= SHARED_LIMIT, row
    assert rows["tile"]["wgmma"] == 16  # nothing is unrolled or doubled
    assert all(rows[name]["wgmma"] == 16 for name in few)  # four boxes of 128 bytes of K
    assert rows["tile"]["tma_stores"] and rows["fp8-blocks"]["tma_stores"]


@pytest.mark.slow
def test_epilogues_and_scales():
    names = ["tile-gelu", "fp8-to-fp8", "fp8-lines-add"]
    for name, row in compiled("installed", [*names, "fp8-narrow", "skinny-128-pairs"]).items():
        assert row["spills"] <= 2 * SMALL_SPILL and not row["faults"], row
        assert row["wgmma"] and row["shared"] <= SHARED_LIMIT, row
        assert bool(row["tma_stores"]) == (name not in ("fp8-lines-add", "skinny-128-pairs")), row
