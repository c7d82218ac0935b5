"""Configurations of an autotuner that are compiled side by side: all of them before the first is timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import contextlib, threading, torch, triton, triton.compiler, triton.language as tl
from gpu_accel.testing.compile_only import use_target
from gpu_accel.workbench.autotuning import compile_ahead, compiled_together, tuned_anew

use_target(90)
events, plain = [], triton.compiler.compile

def compile(*arguments, **options):
    made = plain(*arguments, **options)
    events.append("here" if threading.current_thread() is threading.main_thread() else "thread")
    return made

triton.compiler.compile = compile

def time(call, quantiles):
    events.append("timed")
    call()
    return [len(events)] * 3

wants = [triton.Config(dict(BLOCK=n), num_warps=w) for n, w in ((64, 1), (128, 2), (512, 4), (3, 4))]

@triton.autotune(wants, key=["n"], do_bench=time)
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)  # not of 3
    tl.store(x + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)

with compiled_together(3):
    try:
        kernel.run(torch.empty(64), 64, grid=(1,), warmup=True)
    except triton.CompilationError:  # up to Triton 3.6 of the last one, which the autotuner met itself
        pass
print(" ".join(events))

@triton.jit
def plain_kernel(x):
    tl.store(x, 0)

def call():
    plain_kernel[(1,)](torch.empty(32))
    kernel[(1,)](torch.empty(32), 32.0)  # another type of n, and so other kernels
    raise RuntimeError("looks at values")

events.clear()
print(compile_ahead(call, 3), " ".join(events))
events.clear()
plain_kernel.warmup(torch.empty(32), grid=(1,))
kernel.fn.warmup(torch.empty(32), 32.0, grid=(1,), **wants[0].all_kwargs())
print(len(events))

def timed_in(around):
    events.clear()
    with around:
        for _ in range(2):
            try:
                kernel.run(torch.empty(64), 64, grid=(1,), warmup=True)
            except triton.CompilationError:
                pass
    return events.count("timed")

kernel.cache_results = True  # as fla has it
kernel.configs = kernel.configs[:3]
kernel.cache.clear()
print(*(timed_in(around) for around in (contextlib.nullcontext(), contextlib.nullcontext(), tuned_anew(), tuned_anew(),
                                        contextlib.nullcontext())), kernel.cache_results)
kernel.cache.clear()  # another process
print(timed_in(contextlib.nullcontext()), timed_in(tuned_anew()))
"""


def test_all_are_compiled_in_threads_before_the_first_is_timed_and_timed_anew_on_demand(tmp_path):
    script = tmp_path / "tuned.py"  # a kernel's source must be in a file
    script.write_text(CODE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (environment.get("PYTHONPATH", ""), str(Path(__file__).resolve().parents[2])) if p
    )
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    together, ahead, again, anew, on_disk = done.stdout.splitlines()
    assert together.split() == ["thread"] * 3 + ["timed"] * 4
    # one plain kernel and four configurations, one of which does not compile; then they are there
    assert ahead.split() == ["5"] + ["thread"] * 4 and again == "0"
    assert "looks at values" in done.stderr
    # three configurations once; then no more, but anew in each context, even where the disk has what was chosen
    assert anew.split() == ["3", "0", "3", "3", "0", "True"] and on_disk.split() == ["0", "3"]
