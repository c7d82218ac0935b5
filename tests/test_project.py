"""The project's own files agree with each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
pytest.importorskip("packaging")
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402
from packaging.version import Version  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def pins() -> dict[str, Version]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pairs = [line.split("==") for line in lines if line]
    found = {canonicalize_name(name): Version(version) for name, version in pairs}
    assert len(found) == len(pairs), "a package is pinned twice"
    return found


def test_environment_yml_has_the_dependencies_of_pyproject() -> None:
    extras = ("notebook", "hub", "models", "microbenchmarks", "peers")
    wanted = {*PROJECT["dependencies"], *(r for e in extras for r in EXTRAS[e])}
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(part["pip"] for part in environment["dependencies"] if isinstance(part, dict))
    assert {line for line in pip if not line.startswith("-")} == wanted
    assert "-e ." in pip and "-c constraints.txt" in pip


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for text in [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version, prereleases=True), f"{text} excludes the pinned {version}"


def test_dependencies_of_dependencies_are_pinned_too() -> None:
    """Walks what is installed, so it sees what a fresh `pip install` would have to choose a version for."""
    pinned, seen = pins(), set()
    extras = ("notebook", "hub", "models", "microbenchmarks", "dev")
    todo = [*PROJECT["dependencies"], *(r for e in extras for r in EXTRAS[e])]
    while todo:
        requirement = Requirement(todo.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        try:
            todo += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: this needs the environment that `make install` makes")
    # CUDA libraries come with a CUDA build of torch, which pins them itself.
    loose = {name for name in seen - pinned.keys() if not name.startswith(("nvidia-", "cuda-"))}
    assert not loose


def test_the_library_has_the_version_of_the_project() -> None:
    import gpu_accel

    assert gpu_accel.__version__ == PROJECT["version"]


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    *before, last = re.findall(r"^make_ (.+)$", script.read_text(), flags=re.M)
    assert last == "test" and "fa3" in " ".join(before).split()
    readme = (ROOT / "README.md").read_text()
    assert all(f"make {name}" in readme for name in ("fa3", "test"))


def test_nothing_names_the_machine_it_was_written_on() -> None:
    """Absolute paths of somebody's home or work folder do not belong in the tree."""
    private = re.compile(r"(?<![\w/.])/(?:root|work|home/\w+|Users/\w+)/\w")
    text = (".py", ".toml", ".md", ".txt", ".yml", ".yaml", ".ipynb", ".jsonl", "")
    ours = [ROOT / name for name in ("Makefile", ".ci/run", "README.md", "constraints.txt", "pyproject.toml")]
    for folder in ("gpu_accel", "cli", "papers", "notebooks"):
        ours += [
            f for f in (ROOT / folder).rglob("*") if f.is_file() and f.suffix in text and "__pycache__" not in f.parts
        ]
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}" for file in ours for match in private.finditer(file.read_text())
    ]
    assert not found


# file -> why the second dimension of a grid of its kernels stays small, whatever callers pass
SMALL_GRIDS = {
    "thunderkittens/row_kernels.py": "as many parts of a sum, or sums, as the host chooses",
    "thunderkittens/element_kernels.py": "FLAT where there are more; otherwise programs divide by nothing",
}


def test_only_the_first_dimension_of_a_grid_counts_what_callers_choose() -> None:
    """The others end at 65535: sequences, heads and tiles may be more."""
    found = set()
    for path in (ROOT / "gpu_accel").rglob("*.py"):
        name = str(path.relative_to(ROOT / "gpu_accel"))
        if not name.startswith(("cuda_llm/", "hardware/")):  # sizes of their tasks are theirs
            found |= {name} if re.search(r"program_id\((axis=)?[12]", path.read_text()) else set()
    assert found == set(SMALL_GRIDS)
