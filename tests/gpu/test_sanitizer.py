"""compute-sanitizer on the Hopper kernels, where it is installed (it comes with the CUDA toolkit): memcheck is clean.

racecheck does not follow mbarriers between partitions: it calls a correct hand-over through them a race, and the same
one without a wait too (sanitize_control.py). So it is asked for races anywhere else. synccheck takes two partitions
that wait on one named barrier for threads gone astray, since each does so at its own place in the code; where each
tells the other on a barrier of its own it is clean, and so are the kernels.

    python3 -m pytest tests/gpu/test_sanitizer.py -q                          # three kernels
    GPU_ACCEL_SANITIZE=all python3 -m pytest tests/gpu/test_sanitizer.py -q   # all of sanitize_set.py, some minutes

GPU_ACCEL_SANITIZER_REPORTS names a folder that keeps what the tools said.
"""

from __future__ import annotations

import ast
import os
import re
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
SOURCES = HERE.parents[1] / "gpu_accel" / "flash_attention3"
CALLS = [] if os.environ.get("GPU_ACCEL_SANITIZE") == "all" else ["forward-128", "packed-64", "backward-64", "whole-64"]
# what hands numbers on through mbarriers, and the kernels themselves, whose partitions get their arguments so
HANDED_ON = {f"{what}_{which}" for what in ("publish", "receive") for which in ("tile", "place", "entry")} | {"_field"}
BACKWARD = {"attention_backward_kernel", "attention_backward_apart_kernel", "dkdv_kernel", "dq_kernel"}
KERNELS = {"attention_forward_kernel", *BACKWARD}


def sanitized(tool: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # the allocator's cache would hide reads behind a tensor's end
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [TOOL, "--tool", tool, "--error-exitcode", "9", sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    folder = os.environ.get("GPU_ACCEL_SANITIZER_REPORTS")
    if folder:
        Path(folder, f"{tool}-{Path(script).stem}.txt").write_text(done.stdout + done.stderr)
    return done


def function_at(file: str, line: int) -> str:
    """The device function that a line of a kernel file is in."""
    tree = ast.parse((SOURCES / file).read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            if first <= line <= (node.end_lineno or first):
                return node.name
    return f"{file}:{line}"


def races(output: str) -> set[str]:
    """Functions that racecheck names."""
    return {function_at(file, int(line)) for file, line in re.findall(r"access at .* in (\w+\.py):(\d+)", output)}


def test_memcheck_finds_nothing():
    done = sanitized("memcheck", "sanitize_set.py", *CALLS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count("ran ") >= 3


@pytest.mark.parametrize("name", ["hand-over", "turns", "tell"])
def test_synccheck_passes_what_is_right(name):
    done = sanitized("synccheck", "sanitize_control.py", name)
    assert done.returncode == 0 and f"ran {name}" in done.stdout, done.stdout[-3000:]


def test_synccheck_cannot_tell_a_right_meeting():
    done = sanitized("synccheck", "sanitize_control.py", "meet")
    assert done.returncode != 0 and "Divergent thread(s) in block" in done.stdout, done.stdout[-3000:]


def test_racecheck_cannot_tell_a_right_hand_over():
    done = sanitized("racecheck", "sanitize_control.py", "hand-over")
    assert "ran hand-over" in done.stdout and "Race reported" in done.stdout, done.stdout[-3000:]


def test_racecheck_finds_nothing_else():
    done = sanitized("racecheck", "sanitize_set.py", *CALLS)
    assert done.stdout.count("ran ") >= 3, done.stdout[-3000:] + done.stderr[-1000:]
    assert races(done.stdout) <= HANDED_ON | KERNELS, done.stdout[-3000:]


def test_synccheck_finds_nothing():
    done = sanitized("synccheck", "sanitize_set.py", *CALLS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count("ran ") >= 3
