"""The wheel holds everything that the installed package needs, and works away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpu_accel.workbench import registry

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("setuptools")
PARTS = ("gpu_accel", "papers", "cli", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder appears in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        place = ROOT / part
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(place, source / part, ignore=ignore) if place.is_dir() else shutil.copy(place, source / part)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        target,
        source,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("gpu_accel-*.whl")
    return built


def test_it_holds_every_file_that_is_read_at_run_time(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    renamed = {"gpu_accel": "gpu_accel", "papers": "gpu_accel_papers", "cli": "gpu_accel_cli"}
    wanted = {
        str(new / file.relative_to(ROOT / old))
        for old, new in ((old, Path(new)) for old, new in renamed.items())
        for file in (ROOT / old).rglob("*")
        if file.suffix in (".py", ".toml", ".md", ".txt", ".svg", ".jsonl", ".typed")
        and "__pycache__" not in file.parts
    }
    assert any(name.endswith("paper.toml") for name in wanted)
    assert not wanted - inside


def test_it_installs_nothing_under_generic_names(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpu_accel", "gpu_accel_cli", "gpu_accel_papers"}


def test_it_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    environment.pop("GPU_ACCEL_PAPERS", None)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import gpu_accel; print(gpu_accel.__file__)").startswith(str(site))
    papers = {paper["id"]: paper for paper in json.loads(run("-m", "gpu_accel_cli", "list", "--json"))}
    expected = next(paper for paper in registry.papers() if paper.id == "flash_attention3")
    judged_by_records = [claim for claim in expected.claims() if not claim.internal]
    assert papers["flash_attention3"]["claims"] == len(judged_by_records) > 0
    script = site / "bin" / "gpu-accel"
    assert "usage" in run(str(script), "--help").lower()
