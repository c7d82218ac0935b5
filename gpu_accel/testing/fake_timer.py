"""A device with its own clock: calls cost what they say, and everything that happens is written down."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any


class FakeTimer:
    """`Timer` without a device.

    `work(ms)` is what a fake kernel does. The log holds what the device and the host did, in order. Host time passes by
    `host_step` seconds at each look, and by the device's time at each synchronisation.
    """

    def __init__(self, *, host_step: float = 1e-6, drift: float = 0.0) -> None:
        self.device_ms = 0.0
        self.host = 0.0
        self.host_step = host_step
        self.drift = drift  # the device slows down by this share with every piece of work
        self.pieces = 0
        self.log: list[Any] = []
        self.released = 0
        self.broken = ""

    def work(self, ms: float, what: object = "work") -> None:
        self.pieces += 1
        self.device_ms += ms * (1 + self.drift * self.pieces)
        self.log.append(what)

    def mark(self) -> float:
        self.log.append("mark")
        return self.device_ms

    def wait(self, mark: float) -> None:
        self.log.append("wait")
        self.host = max(self.host, mark / 1e3)

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        self.log.append("sync")
        self.host = max(self.host, self.device_ms / 1e3)

    def flush(self, *, clean: bool = False) -> None:
        self.device_ms += 0.09 if clean else 0.03
        self.log.append("flush, clean" if clean else "flush")

    def lead(self, microseconds: float) -> None:
        assert microseconds > 0
        self.device_ms += microseconds / 1e3
        self.log.append("lead")

    def capture(self, call, repeats: int):
        self.log.append("capture")
        if getattr(call, "uncapturable", False):
            raise RuntimeError("operation not permitted when stream is capturing\nlong story")

        def replay() -> None:
            self.log.append("replay")
            for _ in range(repeats):
                call()

        return replay

    def now(self) -> float:
        self.host += self.host_step
        return self.host

    @contextmanager
    def clocks(self):
        self.log.append("clocks on")

        class Summary:
            def summary(self) -> dict:
                return {"clock_mhz": {"median": 1700, "min": 1600, "max": 1755}, "throttle": ["power-cap"]}

        yield Summary()
        self.log.append("clocks off")

    def release(self) -> None:
        self.released += 1
