"""Fixtures of the attention tests."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["pointer", "tma"])
def kernel_path(request, device: str) -> str:
    """Both ways of reading memory; the interpreter emulates TMA descriptors."""
    if request.param == "tma" and device == "cuda":
        import torch

        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("TMA needs compute capability 9.0")
    return request.param
