"""SM clock, power, temperature, throttle reasons and energy of a GPU, read beside a measurement.

One kernel on one card can differ by a tenth as the card warms and meets its power limit, so a time without its clock
is half a result. The readings come from NVML, the driver's own library, through ctypes: nothing needs installing.
Where NVML is missing (no driver, AMD, some containers) the summary says so under "unavailable".
"""

from __future__ import annotations

import ctypes
import os
import statistics
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

# The bits of nvmlDeviceGetCurrentClocksThrottleReasons, named after nvml.h.
THROTTLE_BITS = {
    0x001: "idle",
    0x002: "application-clocks",
    0x004: "power-cap",
    0x008: "hw-slowdown",
    0x010: "sync-boost",
    0x020: "sw-thermal",
    0x040: "hw-thermal",
    0x080: "power-brake",
    0x100: "display-clocks",
}
_SM_CLOCK = 1  # NVML_CLOCK_SM
_GPU_SENSOR = 0  # NVML_TEMPERATURE_GPU
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage averages over a second since Ampere


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),  # a union of 8 bytes; the power fields use its unsigned int
    ]


class Reading(NamedTuple):
    """One look at the card; a quantity the card does not report is None."""

    clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int | None  # bit mask, see throttle_names


def throttle_names(mask: int) -> list[str]:
    """The names of what holds the clock down; "idle" is left out, unknown bits are given as hexadecimal numbers."""
    bits = (1 << position for position in range(mask.bit_length()))
    names = [THROTTLE_BITS.get(bit, hex(bit)) for bit in bits if mask & bit]
    return [name for name in names if name != "idle"]


class Gpu:
    """One GPU as NVML sees it. Use `open_gpu`, which finds the one that a torch device index means."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> Reading:
        power = self.power_w()
        clock = self._unsigned("nvmlDeviceGetClockInfo", _SM_CLOCK)
        temperature = self._unsigned("nvmlDeviceGetTemperature", _GPU_SENSOR)
        reasons = self._unsigned("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return Reading(clock, power, temperature, reasons)

    def power_w(self) -> float | None:
        """Power now, or its average over the last second on cards that report no instant value, in watts."""
        field = _FieldValue(field_id=_POWER_INSTANT)
        get = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        if get is not None and get(self._handle, 1, ctypes.byref(field)) == 0 and field.status == 0:
            return (field.value & 0xFFFFFFFF) / 1000
        milliwatts = self._unsigned("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    def power_limit_w(self) -> float | None:
        """The power limit in force, in watts."""
        milliwatts = self._unsigned("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1000

    def max_clock_mhz(self) -> float | None:
        """The highest SM clock of the card, in MHz."""
        return self._unsigned("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)

    def energy_j(self) -> float | None:
        """Energy used since the driver was loaded, in joules; None where the card has no counter (before Volta)."""
        millijoules = self._unsigned("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong)
        return None if millijoules is None else millijoules / 1000

    def _unsigned(self, function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        call = getattr(self._library, function, None)
        value = kind()
        if call is None or call(self._handle, *arguments, ctypes.byref(value)) != 0:
            return None
        return value.value


def load_nvml() -> tuple[Any, str]:
    """(library, "") with NVML initialised, or (None, why it is not there)."""
    name = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return None, f"NVML is not on this machine ({error})"
    status = library.nvmlInit_v2()
    return (library, "") if status == 0 else (None, f"NVML did not start: {_status_text(library, status)}")


def open_gpu(index: int | None = None) -> tuple[Gpu | None, str]:
    """(GPU, "") for a torch device index (None: the current one), or (None, why there is none).

    Torch counts what CUDA_VISIBLE_DEVICES leaves, NVML counts every card, so the card is found by UUID or PCI address.
    """
    library, why = load_nvml()
    if library is None:
        return None, why
    uuid, pci = identity(index)
    handle = ctypes.c_void_p()
    if uuid and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
        return Gpu(library, handle), ""
    if pci and library.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(handle)) == 0:
        return Gpu(library, handle), ""
    return None, f"NVML does not know the device torch uses (UUID {uuid or 'unknown'}, PCI {pci or 'unknown'})"


def identity(index: int | None = None) -> tuple[str, str]:
    """(UUID, PCI address) of a torch device as NVML writes them, "" for what torch does not tell."""
    import torch

    if not torch.cuda.is_available():
        return "", ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    uuid = str(getattr(properties, "uuid", ""))
    if uuid and not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return uuid, ""
    domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    return uuid, f"{domain:08x}:{bus:02x}:{device:02x}.0"


class ClockSampler:
    """Read the card every `interval` seconds in a thread, and once at either end, while the block runs.

        with ClockSampler() as clocks:
            ...
        clocks.summary()   # {"readings", "clock_mhz": {"median", "min", "max"}, "power_w": ..., "temperature_c": ...,
                           #  "throttle": [names]}

    Args:
        read: how to read the card; None opens the GPU `index` (None: torch's current one).
        unavailable: why there is nothing to read.
    """

    def __init__(
        self,
        read: Callable[[], Reading] | None = None,
        *,
        index: int | None = None,
        interval: float = 0.02,
        unavailable: str = "",
    ) -> None:
        if read is None and not unavailable:
            gpu, unavailable = open_gpu(index)
            read = gpu.read if gpu is not None else None
        self.unavailable = unavailable
        self.readings: list[Reading] = []
        self._read = read
        self._interval = interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._read is not None:
            self._take()
            self._stop.clear()
            self._thread = threading.Thread(target=self._loop, name="clock-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self._take()

    def _loop(self) -> None:
        while not self._stop.wait(self._interval):
            self._take()

    def _take(self) -> None:
        if self._read is None:
            return
        try:
            self.readings.append(self._read())
        except Exception as error:  # a failing sensor must not take the measurement with it, but it is reported
            self.unavailable = f"reading the clocks failed: {error}"
            self._read = None

    def summary(self) -> dict[str, Any]:
        """Median, minimum and maximum of each quantity and the throttle reasons seen, or {"unavailable": why}."""
        if not self.readings:
            return {"unavailable": self.unavailable or "no reading was taken"}
        summary: dict[str, Any] = {"readings": len(self.readings)}
        for name in ("clock_mhz", "power_w", "temperature_c"):
            values = [value for value in (getattr(reading, name) for reading in self.readings) if value is not None]
            if values:
                summary[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        masks = [reading.reasons for reading in self.readings if reading.reasons is not None]
        if masks:
            seen = 0
            for mask in masks:
                seen |= mask
            summary["throttle"] = throttle_names(seen)
        if self.unavailable:
            summary["unavailable"] = self.unavailable
        return summary


class EnergyMeter:
    """Energy used by the card while the block runs: `joules`, or None with the reason in `unavailable`.

    The counter moves every 20 to 100 ms, so a block should last a second or more; synchronize before it ends.
    """

    def __init__(self, read: Callable[[], float | None] | None = None, *, index: int | None = None) -> None:
        self.unavailable = ""
        self.joules: float | None = None
        if read is None:
            gpu, self.unavailable = open_gpu(index)
            read = gpu.energy_j if gpu is not None else None
        self._read = read
        self._start: float | None = None

    def __enter__(self) -> Self:
        self._start = self._read() if self._read is not None else None
        if self._start is None and not self.unavailable:
            self.unavailable = "the card has no energy counter"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = self._read() if self._read is not None and self._start is not None else None
        self.joules = end - self._start if end is not None and self._start is not None else None


def _status_text(library: Any, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    text = library.nvmlErrorString(status)
    return text.decode(errors="replace") if text else f"status {status}"
