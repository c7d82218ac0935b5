"""What every test needs before it imports anything: the interpreter where there is no GPU, and no network."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
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
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker("gpu")
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run here: "cuda", or "cpu" by way of Triton's interpreter."""
    return "cuda" if GPU else "cpu"
