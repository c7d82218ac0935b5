"""Peers whose Triton kernels tune themselves: their configurations compiled side by side, before they are timed.

An autotuner compiles one configuration after the other, 3 to 12 seconds each; a backward of ten kernels takes minutes
on one core of many. Compilation releases Python's lock nearly all the time (0.4 of 12.7 seconds held it), so
threads do. What is tried, how it is timed and what is chosen stays the autotuner's business.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_THREADS = 32


@contextlib.contextmanager
def compiled_together(threads: int | None = None) -> Iterator[None]:
    """While it lasts, every autotuner compiles the configurations it is about to time all at once.

    One that does not compile is left to the autotuner, which then meets the error itself.
    """
    import triton
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs
    threads = threads or max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))

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
