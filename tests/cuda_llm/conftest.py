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


@pytest.fixture(autouse=True)
def no_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do without a GPU, also where one with its tools is installed."""
    from gpu_accel.cuda_llm import sanitizer

    monkeypatch.setattr(sanitizer, "tool", lambda: "")
