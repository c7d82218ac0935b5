"""The machine a run happens on: its device, description, timer and memory. Tests put a made-up one in its place."""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import dataclass, field
from typing import Any

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.workbench.cuda_timer import CudaTimer, Timer
from gpu_accel.workbench.environment import Environment


def resolve_device(device: str = "auto") -> str:
    """What "auto", "cuda", "cuda:N" or "cpu" means here: "cuda" or "cpu". "cuda:N" becomes the current device.

    "auto" is the GPU when torch sees one and Triton compiles for it; with TRITON_INTERPRET=1 the CPU.

    Raises:
        HardwareError: a GPU was asked for and there is none, or Triton interprets instead of compiling.
        InvalidInputError: no such word.
    """
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda", "cpu") or (index and (name != "cuda" or not index.isdecimal())):
        raise InvalidInputError(f"device is {device!r}; choose 'auto', 'cuda', 'cuda:N' or 'cpu'")
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    if name == "cpu" or (name == "auto" and interpreted):
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    if interpreted:
        raise HardwareError("TRITON_INTERPRET=1 is set, so Triton runs on the CPU: unset it to use the GPU")
    if not count:
        raise HardwareError(
            f"device {device!r} was asked for, but torch sees no GPU; device 'cpu' checks without timing"
        )
    if index:
        if int(index) >= count:
            raise HardwareError(
                f"device {device!r} was asked for, but torch sees {count} GPU(s), cuda:0 to cuda:{count - 1}"
            )
        torch.cuda.set_device(int(index))
    return "cuda"


@dataclass(kw_only=True)
class Host:
    """A resolved device and what records say about it.

    Args:
        device: "cuda" or "cpu".
        env: `Environment.as_dict()` without commit and dirty.
        timer: what times calls; None where nothing is timed.
    """

    device: str
    env: dict[str, Any] = field(default_factory=dict)
    commit: str = ""
    dirty: bool = False
    timer: Timer | None = None

    @classmethod
    def here(cls, device: str) -> Host:
        """This machine; `device` as for `resolve_device`."""
        resolved = resolve_device(device)
        env = Environment.capture(resolved).as_dict()
        commit, dirty = env.pop("commit", "") or "", bool(env.pop("dirty", False))
        timer: CudaTimer | None = None
        if resolved == "cuda":
            timer = CudaTimer()
            env |= _peaks(timer.max_clock_mhz())
        return cls(device=resolved, env=env, commit=commit, dirty=dirty, timer=timer)

    @property
    def gpu(self) -> str:
        return str(self.env.get("gpu") or "") if self.device == "cuda" else ""

    def free_bytes(self) -> int:
        """Device memory that can still be had, the allocator's unused cache included."""
        import torch

        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def allocated_bytes(self) -> int:
        """Device memory held by tensors."""
        import torch

        return torch.cuda.memory_allocated()

    def release(self) -> None:
        """Drop what nobody holds any more and give cached device memory back.

        Where memory is the machine's own, young objects alone are looked at: all that torch and others have imported
        takes 0.1 to 0.2 s, longer than most checks.
        """
        gc.collect(2 if self.device == "cuda" else 1)
        if self.timer is not None:
            with contextlib.suppress(Exception):  # a device that has failed says so again at its next use
                self.timer.release()


def _peaks(max_clock_mhz: float | None) -> dict[str, Any]:
    """Peak rates of the current device at its highest clock, for records to refuse what lies above.

    Empty where the device has no profile, or is only part of what its profile describes.
    """
    import torch

    from gpu_accel.hardware import detect

    found = detect(torch.cuda.current_device())
    if found is None or found.profile is None or not found.exact:
        return {}
    profile = found.profile
    nominal = profile.value("tensor_clock") or profile.value("boost_clock")
    scale = max(1.0, max_clock_mhz / nominal) if max_clock_mhz and nominal else 1.0
    peaks = {name: quantity.value * scale for name, quantity in profile.peaks.items()}
    # A bound has to hold for whatever units a kernel may use for a dtype.
    peaks["fp32"] = max(peaks.get("fp32", 0.0), peaks.get("tf32", 0.0))
    for name in ("fp16", "fp8"):
        peaks[name] = max(peaks.get(name, 0.0), peaks.get(f"{name}_acc16", 0.0))
    peaks["e4m3"] = peaks["e5m2"] = peaks["fp8"]
    known = {name: round(peak, 1) for name, peak in peaks.items() if peak > 0}
    return {"peak_tflops": known, "peak_gbps": profile.bandwidth_gbs}
