"""The Gluon kernels compile to sm_90a, the experimental one to sm_100a, with every supported Triton.

The flagship neither spills nor serialises.
"""

from __future__ import annotations

import functools
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
SMALL_SPILL = 600  # bytes a thread, outside the loop that matters: three consumers with masks have 160 registers


@functools.cache
def compiled(version: str, which: str) -> dict[str, dict]:
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    first = [] if version == "installed" else [str(TARGETS / version)]
    env["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = Path(__file__).with_name("compile_hopper.py")
    done = subprocess.run([sys.executable, str(script), which], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if version != "installed":
        assert {row["triton"] for row in rows} == {version}
    return {f"{row['name']} {row['kernel']}": row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_flagship_neither_spills_nor_serialises(version):
    rows = compiled(version, "flagship")
    assert len(rows) == 3
    for name, row in rows.items():
        # 3.9 puts addresses of O aside at head_dim 64, 34 stores and 56 loads of 4 bytes (24 and 26 without the
        # --regAllocOptLevel=2 that it gives to ptxas), never in the steps
        assert row["spills"] <= (4 * (34 + 56) if row["triton"] >= "3.9" else 0), (name, row)
        assert len(row["loop_spills"]) >= 2 and not any(row["loop_spills"]), (name, row)
        # one for the wait on an array of mbarriers that another wait was on before, one for a turn; without `seamless`
        # (head_dim 256; 64 with 3.9) one more, to free a buffer
        meetings = {"d64": 1 if row["triton"] < "3.9" else 2, "d128": 2, "d256": 3}[row["name"]]
        assert row["loop_meetings"][:2] == [meetings, meetings], (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0, (name, row)
        assert row["shared"] <= SHARED_LIMIT, (name, row)
        assert row["repacking"] < 64, (name, row)  # P stays packed from step to step


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in VERSIONS if v in ("installed", "3.6.0")])  # 3.6.0 comes with torch 2.11
def test_masks_windows_soft_caps_and_modifiers_compile(version):
    rows = compiled(version, "features")
    assert len(rows) == 5
    for name, row in rows.items():
        assert row["spills"] <= SMALL_SPILL, (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
def test_variants_of_the_ablation_compile():
    rows = compiled("installed", "ablation")
    assert len(rows) == 2
    for name, row in rows.items():
        # two warpgroups are compiled apart, without specialisation there is one program for both
        assert row["wgmma"] > 0 and row["spills"] <= SMALL_SPILL and row["shared"] <= SHARED_LIMIT, (name, row)
        assert not row["warnings"], (name, row)


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in VERSIONS if v in ("installed", "3.6.0")])
def test_packed_sequences_and_another_head_dim_of_v_compile(version):
    rows = compiled(version, "packed")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] <= SMALL_SPILL, (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in VERSIONS if v in ("installed", "3.6.0")])
def test_backward_compiles_without_serialised_products(version):
    rows = compiled(version, "backward")
    assert len(rows) == 4  # two kernels at head_dim 256
    for name, row in rows.items():
        # where dQ leaves at head_dim 256, and what only the masked step needs, is put aside once a tile
        assert row["spills"] <= (1000 if row["kernel"] == "dq_kernel" else SMALL_SPILL), (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0 and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
def test_backward_with_modifiers_and_packed_above_128_compiles():
    rows = compiled("installed", "more-backward")
    assert len(rows) == 3
    for name, row in rows.items():
        # 800 bytes and more once a step or a tile: what a bias and two users' functions or a table ask for
        assert row["spills"] <= 1500 and not row["warnings"] and row["shared"] <= SHARED_LIMIT, (name, row)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_blackwell_compiles(version):
    rows = dict(compiled(version, "blackwell"))
    if version == "installed":
        rows |= compiled(version, "blackwell-more")
    assert len(rows) == (3 if version == "installed" else 1)
    for name, row in rows.items():
        assert row["tcgen05"] > 0 and row["wgmma"] == 0 and row["tma"] > 0, (name, row)
        assert row["spills"] <= SMALL_SPILL and not row["warnings"], (name, row)
        assert row["shared"] <= SHARED_LIMIT, (name, row)
