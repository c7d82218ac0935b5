"""Two clocks beside the events that times are taken with: the host's, and the one that the GPU counts itself.

    told = read(replay, launches=500)    # {"host": ms a launch, "gpu": ms a launch}
    judge_clocks(told, 0.041)

A graph of many launches, one after the other, runs between two readings of each clock. Such launches find some of
their memory in the cache, so they take less time than the launches that were timed, or about as much; more time means
that something ran outside of the events. The GPU's own clock is read by a kernel of ours before and after the graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from .verdict import Rejected, Verdict

WINDOW_MS, MOST = 20.0, 500  # how long the graph runs, and how many launches it holds at most
ROUNDS = 3
# Events are around single launches, clocks around many: between two launches in a graph lie one to two microseconds.
# A card's clock may sag under a load of 20 ms, and the host waits for an interrupt once. Work that escaped from the
# events would show as a multiple.
ALLOWED, GAP_MS = 1.25, 0.003
NAMES = ("host", "gpu")
STAMP = """extern "C" __global__ void stamp(unsigned long long* at) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(*at) :: "memory");
}
"""


def count_of(ms: float) -> int:
    """How many launches of that length fill the window."""
    return max(1, min(MOST, math.ceil(WINDOW_MS / ms)))


def read(replay: Callable[[], object], *, launches: int) -> dict[str, float]:
    """Milliseconds a launch by each clock, the least of some rounds; the GPU's only where its kernel compiles."""
    import torch

    stamps = torch.zeros(2, dtype=torch.int64, device="cuda")
    stamp = _stamps(stamps.data_ptr())
    found = dict.fromkeys(NAMES if stamp else NAMES[:1], math.inf)
    for _ in range(ROUNDS + 1):  # the first only warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        taken = {"host": (time.perf_counter() - begin) * 1e3}
        if stamp:
            stamp[0]()
            replay()
            stamp[1]()
            before, after = stamps.tolist()
            taken["gpu"] = (after - before) * 1e-6
        found = {name: min(ms, taken[name] / launches) for name, ms in found.items()}
    return found


def _stamps(address: int) -> list[Callable[[], None]] | None:
    from gpu_accel.errors import UnsupportedError

    from .compiled import compile_cuda
    from .device import Module

    try:
        binary = compile_cuda(STAMP, "stamp", {"constants": {}, "block": [1], "shared": 0})
    except UnsupportedError:
        return None
    module = Module(binary)
    return [module.launcher([1], [address + 8 * place]) for place in range(2)]


def judge_clocks(told: Any, ms: float) -> str:
    """What other clocks say of a launch that takes `ms` by events, in words; untrusted.

    Raises:
        Rejected: unverified, when one of them says that it takes longer; crashed where none is told.
    """
    known = {}
    for name in NAMES:
        value = told.get(name) if isinstance(told, Mapping) else None
        if isinstance(value, float) and 0 < value < math.inf:
            known[name] = value
    if not known:
        raise Rejected(Verdict.CRASHED, None, "its process read no other clock")
    words = ", ".join(f"{name} {value:.4g} ms" for name, value in known.items())
    if max(known.values()) > ALLOWED * ms + GAP_MS:
        raise Rejected(Verdict.UNVERIFIED, None, f"clocks disagree: {ms:.4g} ms by events, {words} a launch in a row")
    return f"other clocks agree ({words} in a row)"
