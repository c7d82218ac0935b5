"""Loading machine code and launching it, through the CUDA driver that torch already uses.

`Driver` calls libcuda by ctypes: two functions more than what torch offers do not justify a dependency. The context is
torch's, so a launch goes to torch's current stream and can be captured in a graph.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_accel.errors import HardwareError

from .compiled import Binary

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 * 1024  # what a launch may have without asking
_CANDIDATES_FAULT = (1, 701)  # invalid value (a block too large), too many resources requested


class LaunchError(RuntimeError):
    """A launch that the driver refuses for what the candidate asked for."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HardwareError(f"the CUDA driver does not load: {error}") from error


def _require(status: int, what: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _library().cuGetErrorString(status, ctypes.byref(text))
    said = (text.value or b"unknown").decode(errors="replace")
    if status in _CANDIDATES_FAULT:
        raise LaunchError(f"{what}: {said} ({status})")
    raise RuntimeError(f"CUDA error in {what}: {said} ({status})")


def without_persisting_cache() -> None:
    """No part of the second-level cache is set aside for lines that are to stay; where the GPU knows such a thing."""
    limit = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    _library().cuCtxSetLimit(ctypes.c_int(limit), ctypes.c_size_t(0))


class Module:
    """One loaded cubin. Loading it again gives fresh `__device__` variables.

    Raises:
        RuntimeError: the driver does not take it.
    """

    def __init__(self, binary: Binary) -> None:
        import torch

        torch.cuda.init()
        torch.cuda.current_stream()
        torch.empty(1, device="cuda")  # makes the context current in this thread
        library = _library()
        self.binary = binary
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _require(library.cuModuleLoadData(ctypes.byref(self._module), binary.cubin), "cuModuleLoadData")
        status = library.cuModuleGetFunction(
            ctypes.byref(self._function), self._module, binary.entry.encode()
        )  # fmt: skip
        _require(status, f"cuModuleGetFunction({binary.entry})")
        if binary.shared > _STATIC_SHARED:
            status = library.cuFuncSetAttribute(
                self._function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(binary.shared)
            )
            _require(status, f"{binary.shared} bytes of shared memory")
        self.parameters = self._count()
        self.then = [Module(one) for one in binary.then]

    def _count(self) -> int:
        """How many parameters the kernel takes."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        count = 0
        while _library().cuFuncGetParamInfo(
            self._function, ctypes.c_size_t(count), ctypes.byref(offset), ctypes.byref(size)
        ) == 0:  # fmt: skip
            count += 1
        return count

    def launcher(self, grid: Sequence[int], values: Sequence[int], *, hidden: int = 0) -> Callable[[], None]:
        """A zero-argument call that launches on torch's current stream.

        Args:
            values: addresses and sizes, in the order of the parameters.
            hidden: how many pointers the compiler wants beyond them at most; the first is its scratch memory, if it has
                any, the others are null.
        Raises:
            LaunchError: the kernel takes another number of parameters.
        """
        import torch

        if self.parameters not in range(len(values), len(values) + hidden + 1):
            raise LaunchError(f"the kernel takes {self.parameters} parameters, the launch has {len(values)}")
        scratch = None
        beyond = [0] * (self.parameters - len(values))
        if self.binary.scratch:
            if not beyond:
                raise LaunchError("the kernel has scratch memory and no parameter for its address")
            scratch = torch.empty(self.binary.scratch * math.prod(grid), dtype=torch.uint8, device="cuda")
            beyond[0] = scratch.data_ptr()
        kept = [ctypes.c_longlong(value) for value in (*values, *beyond)]
        pointers = (ctypes.c_void_p * max(len(kept), 1))(*(ctypes.addressof(one) for one in kept))
        sizes = [ctypes.c_uint(size) for size in (*grid, 1, 1)[:3]]
        threads = [ctypes.c_uint(size) for size in self.binary.threads]
        shared, launch = ctypes.c_uint(self.binary.shared), _library().cuLaunchKernel
        stream_of = torch.cuda.current_stream

        def call() -> None:
            stream = ctypes.c_void_p(stream_of().cuda_stream)
            _require(launch(self._function, *sizes, *threads, shared, stream, pointers, None), "the launch")

        call.kept = kept, scratch  # type: ignore[attr-defined]
        return call


def launch_on(
    module: Module, trial: Mapping[str, Any], image: Any, *, hidden: int
) -> Callable[[], None]:
    """The call that launches a kernel, and those that follow it, on the memory of one trial."""
    pairs = zip((module, *module.then), (trial, *trial.get("then", ())), strict=True)
    calls = [_launch(one, how, image, hidden) for one, how in pairs if 0 not in how["grid"]]
    if len(calls) == 1:
        return calls[0]

    def call() -> None:
        for one in calls:
            one()

    return call


def _launch(module: Module, trial: Mapping[str, Any], image: Any, hidden: int) -> Callable[[], None]:
    address = image.data_ptr()
    places = {slot["name"]: address + slot["offset"] for slot in trial["buffers"]}
    values = [
        places[name] if name in places else int(trial["scalars"][name])
        for name in trial["arguments"]
        if name not in trial["constants"] or trial["language"] == "cuda"
    ]
    return module.launcher(trial["grid"], values, hidden=hidden if trial["language"] == "triton" else 0)
