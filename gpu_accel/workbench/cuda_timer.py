"""The device under the timing logic: events, cache flush, graph capture and clocks of the current CUDA device.

`timing` talks to a `Timer` only, so that its logic is tested with a fake one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpu_accel.errors import HardwareError
from gpu_accel.workbench.clocks import ClockSampler, Gpu, open_gpu

Call = Callable[[], object]


class Clocks(Protocol):
    """What `Timer.clocks` yields: a `ClockSampler` or a fake one."""

    def summary(self) -> dict[str, Any]: ...


class Timer(Protocol):
    """A device that runs work in order, and the host clock beside it."""

    def mark(self) -> Any:
        """A point in the device's queue."""

    def wait(self, mark: Any) -> None:
        """Until the device has passed the mark."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks that the device has passed."""

    def synchronize(self) -> None:
        """Until the device has nothing left to do."""

    def flush(self, *, clean: bool = False) -> None:
        """Queue work that leaves nothing of interest in the second-level cache; `clean`: nor anything to write back."""

    def lead(self, microseconds: float) -> None:
        """Keep the device busy, without memory traffic, while the host queues what follows."""

    def capture(self, call: Call, repeats: int) -> Call:
        """A function that replays `repeats` captured calls; raises where the call cannot be captured."""

    def now(self) -> float:
        """Host time in seconds."""

    def clocks(self) -> AbstractContextManager[Clocks]:
        """A sampler that reads the clocks while its block runs."""

    def release(self) -> None:
        """Give cached device memory back, after a failure."""


class CudaTimer:
    """`Timer` of the current CUDA (or ROCm) device and stream.

    Args:
        flush_bytes: size of the buffer written to flush the second-level cache; default twice its size.
        clean_bytes: size of another buffer, which `flush(clean=True)` reads afterwards; default four times its size.
    Raises:
        HardwareError: there is no such device.
    """

    def __init__(self, *, flush_bytes: int | None = None, clean_bytes: int | None = None) -> None:
        import torch

        if not torch.cuda.is_available():
            raise HardwareError("timing needs a GPU and torch sees none; on a CPU results are checked, not timed")
        self._torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 * 2**20
        self._flush_bytes = flush_bytes or 2 * self.l2_bytes
        # What is replaced first is not known to be what is oldest, so one size of the cache might leave some behind.
        self._clean_bytes = clean_bytes or 4 * self.l2_bytes
        self._buffer: Any = None
        self._read: tuple[Any, Any] | None = None  # what is read, and where its largest number goes
        # clock_rate is the highest clock in kHz; where torch does not tell, assume a fast one: the lead gets longer.
        self._cycles_per_us = getattr(properties, "clock_rate", 2_000_000) / 1000
        self._gpu: Gpu | None
        self._gpu, self._no_clocks = open_gpu()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def elapsed(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def flush(self, *, clean: bool = False) -> None:
        torch = self._torch
        if self._buffer is None:
            self._buffer = torch.empty(self._flush_bytes // 4, dtype=torch.int32, device="cuda")
        self._buffer.zero_()
        if clean:
            if self._read is None:
                source = torch.zeros(self._clean_bytes // 4, dtype=torch.int32, device="cuda")
                self._read = source, torch.empty((), dtype=torch.int32, device="cuda")
            torch.amax(self._read[0], (0,), out=self._read[1])

    def lead(self, microseconds: float) -> None:
        self._torch.cuda._sleep(int(microseconds * self._cycles_per_us))

    def capture(self, call: Call, repeats: int) -> Call:
        torch = self._torch
        before = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(before)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # First outside of a capture, with synchronisation forbidden: a capture that breaks is hard to clean up
            # after, and the set-up that libraries do once for each stream must not be captured.
            torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(side):
                call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            before.wait_stream(side)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    result = call()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails to end leaves its own stream behind as the current one
        return _Replay(graph, result)

    def now(self) -> float:
        return time.perf_counter()

    def clocks(self) -> AbstractContextManager[Clocks]:
        return ClockSampler(self._gpu.read if self._gpu is not None else None, unavailable=self._no_clocks)

    def max_clock_mhz(self) -> float | None:
        """The highest SM clock of the card, None when NVML does not tell."""
        return self._gpu.max_clock_mhz() if self._gpu is not None else None

    def release(self) -> None:
        self._torch.cuda.empty_cache()


class _Replay:
    """A captured graph and its last result, which lives in the graph's memory and must stay valid while it replays."""

    def __init__(self, graph: Any, result: object) -> None:
        self._graph = graph
        self._result = result

    def __call__(self) -> None:
        self._graph.replay()
