"""Arrows point one way, cli -> workbench -> papers/<id> -> gpu_accel/<paper>, and starting up is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_accel.workbench.registry import papers

ROOT = Path(__file__).resolve().parents[1]
PAPER_PACKAGES = tuple(paper.package for paper in papers() if paper.package)
OUTSIDE = ("cli", "papers", "tests", "gpu_accel_cli", "gpu_accel_papers")
# A GPU box has torch and Triton; typer and rich are all that a run needs besides. numpy comes with the interpreter.
RUN_PATH = {"torch", "triton", "typer", "rich", "numpy", "gpu_accel"}


def sources(*folders: str) -> list[Path]:
    found = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no sources in {folders}"
    return found


FRONTS = {"cli/ring.py": "gpu_accel.ring_attention", "cli/optimize.py": "gpu_accel.cuda_llm"}


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute module names that a piece of code imports; relative imports stay inside their package by design."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: not inside functions, not under TYPE_CHECKING, not behind `try`."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from imported(statement)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offenders(files: list[Path], packages: tuple[str, ...]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(ast.parse(file.read_text()))
        if within(name, packages)
    ]


def test_the_library_never_looks_back() -> None:
    assert not offenders(sources("gpu_accel"), OUTSIDE)


def test_the_workbench_knows_no_paper() -> None:
    """But for commands that are the front of one package, such as `gpu-accel ring plan`."""
    assert PAPER_PACKAGES
    files = sources("gpu_accel/workbench", "gpu_accel/hardware", "cli")
    fronts = {ROOT / file: package for file, package in FRONTS.items()}
    assert set(fronts) <= set(files)
    for file in files:
        own = fronts.get(file, "gpu_accel.hardware" if file.is_relative_to(ROOT / "gpu_accel/hardware") else "")
        assert not offenders([file], tuple(name for name in PAPER_PACKAGES if not within(name, (own,))))


def test_papers_use_the_library_only() -> None:
    assert not offenders(sources("papers"), ("cli", "tests", "gpu_accel_cli", "gpu_accel_papers"))


def test_nothing_beyond_torch_and_triton_is_imported_up_front() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources("gpu_accel", "cli", "papers")
        for name in at_import_time(ast.parse(file.read_text()))
        if name.partition(".")[0] not in RUN_PATH | sys.stdlib_module_names | {"__future__"}
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["gpu_accel/workbench", "gpu_accel/hardware", "cli"])
def test_reading_and_judging_need_no_torch(folder: str) -> None:
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sources(folder)
        if file.name != "__main__.py"
    ]
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n" + (
        "print(sorted({'torch', 'triton', 'plotly', 'pandas', 'IPython'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
