"""compute-sanitizer finds nothing in the Hopper kernels, where the tool is installed (it comes with the CUDA toolkit).

python3 -m pytest tests/gpu/test_sanitizer.py -q
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed"),
]
HERE = Path(__file__).parent
KERNELS = [f"{what}-{d}" for what in ("forward", "packed", "backward") for d in (64, 128, 256)]
CALLS = [*KERNELS, "window-softcap", "full"]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_nothing_is_found(tool, name):
    # the allocator's cache would hide reads behind a tensor's end
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", sys.executable, str(HERE / "sanitize_set.py"), name]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"ran {name}" in done.stdout
