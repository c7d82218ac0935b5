"""Two clocks beside the events that times are taken with: the host's, and the one that the GPU counts itself.

    told = read(replay, launches=500)    # {"events": ms a launch, "host": ..., "gpu": ...}
    judge_clocks(told)

A graph of many launches, one after the other, runs between two events and two readings of each clock: all see the
same launches and the same load beside them. What would run outside of the events, on another stream or after the last
of them, is in the host's time, which ends when the device has nothing left to do. The GPU's own clock is read by a
kernel of ours before and after the graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from .verdict import Rejected, Verdict

WINDOW_MS, MOST = 20.0, 500  # how long the graph runs, and how many launches it holds at most
ROUNDS = 5
# The host also starts the graph and waits for an interrupt, a tenth of a millisecond in twenty, and may be late when
# its processor has other work. Work that escapes from the events would show as a multiple.
ALLOWED = 1.25
NAMES = ("host", "gpu")
STAMP = """extern "C" __global__ void stamp(unsigned long long* at) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(*at) :: "memory");
}
"""


def count_of(ms: float) -> int:
    """How many launches of that length fill the window."""
    return max(1, min(MOST, math.ceil(WINDOW_MS / ms)))


def read(replay: Callable[[], object], *, launches: int) -> dict[str, float]:
    """Milliseconds a launch by each clock, of the round in which the host saw the least; the GPU's if it compiles."""
    import torch

    stamps = torch.zeros(2, dtype=torch.int64, device="cuda")
    before, after = _stamps(stamps.data_ptr()) or (None, None)
    rounds = []
    for _ in range(ROUNDS + 1):  # the first only warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if before:
            before()
        start.record()
        replay()
        end.record()
        if after:
            after()
        torch.cuda.synchronize()
        taken = {"host": (time.perf_counter() - begin) * 1e3, "events": start.elapsed_time(end)}
        if before:
            first, last = stamps.tolist()
            taken["gpu"] = (last - first) * 1e-6
        rounds.append({name: ms / launches for name, ms in taken.items()})
    return min(rounds[1:], key=lambda one: one["host"])


def _stamps(address: int) -> tuple[Callable[[], None], Callable[[], None]] | None:
    from gpu_accel.errors import UnsupportedError

    from .compiled import compile_cuda
    from .device import Module

    try:
        binary = compile_cuda(STAMP, "stamp", {"constants": {}, "block": [1], "shared": 0})
    except UnsupportedError:
        return None
    module = Module(binary)
    return module.launcher([1], [address]), module.launcher([1], [address + 8])


def judge_clocks(told: Any) -> str:
    """What the clocks say of the same launches, in words; untrusted.

    Raises:
        Rejected: unverified, when one says that they take longer than the events do; crashed where none is told.
    """
    known = {}
    for name in ("events", *NAMES):
        value = told.get(name) if isinstance(told, Mapping) else None
        if isinstance(value, float) and 0 < value < math.inf:
            known[name] = value
    events = known.pop("events", None)
    if events is None or not known:
        raise Rejected(Verdict.CRASHED, None, "its process read no other clock")
    words = f"{', '.join(f'{name} {value:.4g}' for name, value in known.items())} and events {events:.4g} ms a launch"
    if max(known.values()) > ALLOWED * events:
        raise Rejected(Verdict.UNVERIFIED, None, f"clocks disagree: {words}")
    return f"clocks agree: {words}, in a row"
