"""One sandbox for all tests of the folder: starting its worker takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def sandbox() -> Iterator:
    from gpu_accel.cuda_llm import Sandbox

    with Sandbox(seconds=60) as made:
        yield made
