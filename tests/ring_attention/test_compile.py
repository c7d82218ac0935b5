"""The Gluon kernels compile to sm_90a without spills or serialised products, with the oldest Triton at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = Path(os.environ.get("GPU_ACCEL_TRITON_TARGETS") or ROOT / ".triton-targets")
VERSION = "3.6.0" if (TARGETS / "3.6.0" / "triton").is_dir() else "installed"  # torch 2.11 brings 3.6.0
SHARED_LIMIT = 227 * 1024  # bytes that one program can have on an H100


@pytest.mark.slow
def test_kernels_that_merge_and_add_compile_without_spills():
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    first = [] if VERSION == "installed" else [str(TARGETS / VERSION)]
    env["PYTHONPATH"] = os.pathsep.join([*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wanted = ["attention_merge_kernel", "ring_backward_apart_kernel", "ring_backward_kernel"]
    wanted += ["encode_kernel", "decode_kernel"]
    assert [row["kernel"] for row in rows] == wanted
    for row in rows:
        # with dQ apart ptxas puts seven numbers of a tile aside (28 bytes, and 36 where they are read), once a tile
        most = 28 + 36 if row["kernel"] == "ring_backward_apart_kernel" else 0
        assert row["spills"] <= most and not row["warnings"] and not row["unwritten"], row
        assert (row["wgmma"] > 0) == (row["kernel"] not in wanted[-2:]), row
        assert row["shared"] <= SHARED_LIMIT, row
