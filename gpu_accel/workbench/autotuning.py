"""Peers whose Triton kernels tune themselves: their configurations compiled side by side, before they are timed.

An autotuner compiles one configuration after the other, 3 to 12 seconds each; a backward of ten kernels takes minutes
on one core of many. Compilation releases Python's lock nearly all the time (0.4 of 12.7 seconds held it), so
threads do. What is tried, how it is timed and what is chosen stays the autotuner's business.

    compile_ahead       all kernels of a call at once, in a run of it that launches none
    compiled_together   while it lasts, the configurations of one kernel at a time
    tuned_anew          while it lasts, every autotuner times its configurations again

What an autotuner remembers a choice by often leaves out the batch and the length of sequences (fla's and mamba_ssm's
do), and fla keeps choices on the disk. So what is compared at one shape may run as was fastest at another: fla's
chunk_simple_gla took 427 us for 16384 steps as it had chosen for 8 x 2048, and 240 us as it chose for them (H200).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_THREADS = 32


def _threads() -> int:
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))


def compile_ahead(call: Callable[[], Any], threads: int | None = None) -> int:
    """Run `call` without launching a Triton kernel, then compile all that it would have; how many there were.

    The call computes with memory that nothing was written to, so it must not look at values. What it raises for that
    ends it, and what was met until then is compiled. Kernels that do not compile are left to the real call.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    met: list[tuple[Any, tuple, dict]] = []
    tuned, plain = Autotuner.run, JITFunction.run

    def tune(self: Any, *arguments: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        configs = self.prune_configs(options) if len(self.configs) > 1 else self.configs
        self.best_config = configs[0]  # some size a buffer by it
        met.extend((self.fn, arguments, options | config.all_kwargs()) for config in configs)

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        met.append((self, arguments, options))

    Autotuner.run, JITFunction.run = tune, launch
    try:
        call()
    except Exception as error:
        print(f"compiling ahead: the call stopped at {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        Autotuner.run, JITFunction.run = tuned, plain
    with ThreadPoolExecutor(threads or _threads()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for kernel, arguments, options in met:
            with contextlib.suppress(Exception):  # the real call meets it again
                kernel.warmup(*arguments, **{name: value for name, value in options.items() if name != "warmup"})
    return len(met)


@contextlib.contextmanager
def tuned_anew() -> Iterator[None]:
    """While it lasts, an autotuner forgets what it chose before when it is first met, and takes nothing from the disk.

    What it chooses stays, so calls of the same shape may follow, and of no other.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run
    on_disk: dict[Any, bool] = {}

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        if self not in on_disk:
            on_disk[self], self.cache_results = self.cache_results, False
            self.cache.clear()
        return original(self, *arguments, **options)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = original
        for one, before in on_disk.items():
            one.cache_results = before


@contextlib.contextmanager
def compiled_together(threads: int | None = None) -> Iterator[None]:
    """While it lasts, every autotuner compiles the configurations it is about to time all at once.

    One that does not compile is left to the autotuner, which then meets the error itself.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs
    threads = threads or _threads()

    def prune_configs(self: Any, kwargs: dict) -> list:
        configs = original(self, kwargs)
        if len(configs) > 1:
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    self.fn.warmup(*self.nargs.values(), **given, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = prune_configs
    try:
        yield
    finally:
        Autotuner.prune_configs = original
