"""The first call of a shape compiles in less than 10 seconds, imports aside; the next process compiles nothing.

Seconds of processors are judged, not of the clock; where other processes keep the cores busy, two of them share one
and each counts up to double, so the limit does too.

    python3 -m pytest tests/gpu/test_compile_time.py -q -s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]
ROOT = Path(__file__).parents[2]
LIMIT = 10.0  # seconds, forward or backward
SCRIPT = """
import json, resource, sys, time
import torch
from gpu_accel.flash_attention3 import flash_attn_func, hopper_backward_kernel, hopper_forward

def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)

def timed(call):
    torch.cuda.synchronize()
    before = time.perf_counter(), cpu()
    result = call()
    torch.cuda.synchronize()
    return result, {"wall": time.perf_counter() - before[0], "cpu": cpu() - before[1]}

d, seqlen = int(sys.argv[1]), int(sys.argv[2])
q, k, v = (torch.randn(1, seqlen, 2, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o, forward = timed(lambda: flash_attn_func(q, k, v, causal=True, backend="hopper"))
_, backward = timed(lambda: torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))
print(json.dumps({"forward": forward, "backward": backward}))
"""


def limit(before: tuple[int, int], after: tuple[int, int]) -> float:
    idle, every = (y - x for x, y in zip(before, after, strict=True))
    return 2 * LIMIT if idle < 0.5 * every else LIMIT


def ticks() -> tuple[int, int]:
    """(idle, all) ticks of all processors so far. A load average lags by a minute, longer than the calls take."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def kept(cache: Path) -> set[Path]:
    return {p for p in cache.rglob("*") if p.is_file()}


def first_calls(d: int, seqlen: int, cache: Path) -> dict[str, dict[str, float]]:
    """Seconds of the first forward and the first backward of a process of its own, by the clock and of processors."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(d), str(seqlen)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("d,seqlen", [(64, 1024), (64, 8192), (128, 2048), (256, 2048)])  # 64: two and three consumers
def test_first_call(d, seqlen, tmp_path):
    before = ticks()
    cold = first_calls(d, seqlen, tmp_path)
    allowed = limit(before, ticks())
    compiled = kept(tmp_path)
    warm = first_calls(d, seqlen, tmp_path)
    print(f"head_dim {d}, {seqlen} keys: first calls {cold}, with the cache {warm}, limit {allowed:.0f}")
    assert max(x["cpu"] for x in cold.values()) < allowed
    assert compiled and kept(tmp_path) == compiled
