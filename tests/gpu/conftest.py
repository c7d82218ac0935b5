"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
