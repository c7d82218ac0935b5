"""Compile without a GPU, with every Triton that is supported: no spills in the flagship, everything else assembles.

Copies of Triton live in the folders of GPU_ACCEL_TRITON_TARGETS (default `.triton-targets` in the checkout), one a
version, made by `pip install --no-deps --target .triton-targets/3.8.0 triton==3.8.0`.
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
TARGETS = Path(os.environ.get("GPU_ACCEL_TRITON_TARGETS", ROOT / ".triton-targets"))
INSTALLED = "installed"


def versions() -> list[str]:
    found = sorted(p.name for p in TARGETS.iterdir() if (p / "triton").is_dir()) if TARGETS.is_dir() else []
    return [INSTALLED, *found]


@functools.cache
def compiled(version: str, which: str, script: str = "compile_flagship.py") -> dict[str, dict]:
    """Compile one set in a process of its own, with that Triton first on the path and the interpreter off."""
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    first = [] if version == INSTALLED else [str(TARGETS / version)]
    env["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, str(path), which], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if version != INSTALLED:
        assert {row["triton"] for row in rows} == {version}
    return {row["name"]: row for row in rows}


def test_all_versions_are_there():
    if versions() == [INSTALLED]:
        message = f"no Triton versions in {TARGETS}: only the installed one is compiled with"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.mark.slow
@pytest.mark.parametrize("version", versions())
def test_flagship_forward_neither_spills_nor_serialises(version):
    rows = compiled(version, "flagship")
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["spills"] == 0, (name, row)
        assert not row["warnings"], (name, row)
        assert row["wgmma"] > 0 and row["tma"] > 0, (name, row)
        assert row["shared"] <= 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("version", versions())
def test_large_packed_and_backward_kernels_assemble(version):
    rows = compiled(version, "large")
    assert len(rows) == 6
    for name, row in rows.items():
        assert row["wgmma"] > 0, (name, row)
        assert row["shared"] <= 227 * 1024, (name, row)
        assert ("-pointer-" in name) == (row["tma"] == 0), (name, row)
    forward = {name: row for name, row in rows.items() if name.endswith("forward")}
    assert all(row["spills"] == 0 for row in forward.values()), forward


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in versions() if v in (INSTALLED, "3.6.0")])  # 3.6.0 comes with torch 2.11
def test_features_keep_the_matrix_instructions_and_do_not_spill(version):
    rows = compiled(version, "features", "compile_features.py")
    assert len(rows) == 21
    for name, row in rows.items():
        assert row["wgmma"] > 0 and row["shared"] <= 227 * 1024, (name, row)
        assert not row["warnings"], (name, row)
        if not name.startswith("packed-"):
            assert row["spills"] == 0 and row["tma"] > 0, (name, row)


@pytest.mark.slow
def test_ampere_configurations_fit_its_shared_memory():
    rows = compiled(INSTALLED, "ampere")
    assert len(rows) == 3
    for name, row in rows.items():
        assert row["wgmma"] == 0 and row["shared"] <= 99 * 1024, (name, row)


@pytest.mark.slow
def test_blackwell_compiles():
    (row,) = compiled(INSTALLED, "blackwell").values()
    assert row["shared"] <= 227 * 1024
