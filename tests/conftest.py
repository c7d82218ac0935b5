"""What every test needs before it imports anything: the interpreter where there is no GPU, and no network."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["tiny_paper"]  # its notebook runs in test_add_a_paper, with the paper around it

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests give captures a folder of their own, but a model need not be converted by every one of them.
os.environ.setdefault("GPU_ACCEL_MODELS", os.environ.get("GPU_ACCEL_CACHE") or str(Path.home() / ".cache/gpu-accel"))
os.environ.setdefault("COLUMNS", "160")  # tables of subprocesses do not wrap


def _gpu_here() -> bool:
    import torch

    return torch.cuda.is_available()


GPU = _gpu_here()
if not GPU:
    # Triton's decorators look at this when a kernel's module is imported, so it has to be set before any test module.
    os.environ["TRITON_INTERPRET"] = "1"

try:
    from hypothesis import settings
except ImportError:  # a GPU box without it runs tests/gpu
    pass
else:
    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/gpu is marked `gpu`, and what is marked is skipped without a GPU."""
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(not GPU, reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def only_own_memory() -> Iterator[None]:
    """GPU_ACCEL_ONLY_OWN_MEMORY=1: kernels in the interpreter may touch their arguments and nothing else."""
    if GPU or not os.environ.get("GPU_ACCEL_ONLY_OWN_MEMORY"):
        yield
        return
    from gpu_accel.testing.out_of_bounds import only_own_memory

    with only_own_memory():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run here: "cuda", or "cpu" by way of Triton's interpreter."""
    return "cuda" if GPU else "cpu"


_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TRITON_VERSIONS = re.search(r"^TRITON_VERSIONS := (.+)$", _MAKEFILE, flags=re.M)[1].split()  # type: ignore[index]


@pytest.fixture(params=["installed", *TRITON_VERSIONS])
def compile_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables of a process that compiles kernels without a GPU, with each supported Triton in turn.

    The others come from `make triton-targets`. Without them a test is skipped, but fails in CI.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = [str(ROOT)]
    if request.param != "installed":
        targets = os.environ.get("GPU_ACCEL_TRITON_TARGETS") or str(ROOT / ".triton-targets")
        folder = Path(targets) / request.param
        if not (folder / "triton" / "__init__.py").is_file():
            why = f"Triton {request.param} is not in {targets}; run `make triton-targets`"
            pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
        path.insert(0, str(folder))
    return environment | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture
def compile_once(
    request: pytest.FixtureRequest, compile_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Any]]:
    """`compile_once(script, *words)`: the lines of JSON that a script prints, run with that Triton.

    Importing torch and Triton takes longer than most kernels do: a script compiles all that several tests read, and is
    run once for all of them, also where they are spread over processes.
    """
    version = request.node.callspec.params["compile_environment"]
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent

    def run(script: Path, *words: str) -> list[Any]:
        name = hashlib.sha256(repr((version, str(script), words)).encode()).hexdigest()[:20]
        kept = folder / f"compiled-{name}"
        with open(f"{kept}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                command = [sys.executable, str(script), *words]
                done = subprocess.run(command, env=compile_environment, capture_output=True, text=True, timeout=600)
                assert done.returncode == 0, done.stderr[-4000:]
                kept.write_text(done.stdout)
        rows = [json.loads(line) for line in kept.read_text().splitlines() if line.startswith(("{", "["))]
        if version != "installed":
            assert {row["triton"] for row in rows if "triton" in row} <= {version}
        return rows

    run.version = version  # type: ignore[attr-defined]
    return run
