"""Fixtures of the tests that need a GPU, and how the workers of pytest-xdist share it (`card.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .card import (  # noqa: F401  (hooks)
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
