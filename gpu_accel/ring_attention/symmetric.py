"""Hops by the copy engine: every rank pulls its neighbour's buffer out of symmetric memory, on a stream of its own.

Why: NCCL's send and receive are kernels, and do not run beside an attention kernel that fills the GPU. On H100s one
134 MB hop beside cuDNN attention of 1.61 ms took 2.1 ms in all by NCCL and 1.64 ms by such a pull (torch 2.11, two
GPUs over NVLink, measured before this file was written).

One exchange, on the side stream of each rank, all of it stream-ordered memory operations that need no SM:

    wait for the compute stream           the message is written, and nobody here still reads `into`
    write 1 to `ready` of rank `to`       it may pull
    wait for my own `ready` from `source`, reset it
    copy  peer's message -> into          the copy engine
    write 1 to `done` of rank `source`    it may overwrite its message
    wait for my own `done` from `to`, reset it

Flags are reset before the other side can set them again, so a CUDA graph that holds an exchange can be replayed.
Message and `into` must be buffers of this transport in the same places on all ranks, which the schedules see to. Areas
are kept and reused in the order in which a call asks for them, so only the first call of a shape allocates (and takes
part in a rendezvous of seconds). Collectives and other messages (`all_gather`, `all_to_all`, `transfer`) use NCCL.

NOT YET RUN. The parts were tried apart (the pull, its content, its capture in a graph). Not measured: this protocol as
a whole, its latency a hop, whether waits of a stream ever delay kernels on the compute stream, more than two GPUs. A
rank that dies leaves the others' side streams waiting: they end only when the NCCL watchdog ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.ring_attention.faults import CommunicationError
from gpu_accel.ring_attention.transport import Pending, TorchTransport

_ALIGNMENT = 256
_READY, _DONE = 0, 1
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HardwareError(f"the CUDA driver cannot be loaded: {error}") from error


def _memory_operation(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    """cuStreamWriteValue32 or cuStreamWaitValue32."""
    code = getattr(_driver(), name)(
        ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags)
    )
    if code != 0:
        raise CommunicationError(f"{name} failed with CUDA error {code}")


@dataclass
class _Area:
    """Slots of equal size in memory that every rank can read, at the same offsets."""

    memory: Tensor
    handle: Any
    slot: int

    def offset(self, x: Tensor) -> int | None:
        """Bytes from the start of the area to x, or None when x lies elsewhere."""
        offset = x.data_ptr() - self.memory.data_ptr()
        return offset if 0 <= offset < self.memory.numel() else None


class SymmetricTransport(TorchTransport):
    """GPUs that can read one another's memory (NVLink, one machine). See the head of this file for what is not tested.

    Raises:
        HardwareError: no CUDA device, or a process group that is not NCCL.
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, check: str = "auto") -> None:
        if not torch.cuda.is_available():
            raise HardwareError("symmetric memory needs CUDA GPUs: use TorchTransport, or simulate on one process")
        super().__init__(group, timeout=timeout, check=check)
        if self.name != "nccl":
            raise HardwareError(f"symmetric memory needs an NCCL process group, this one is {self.name}")
        import torch.distributed._symmetric_memory as symmetric

        self.name = "symmetric"
        self._symmetric = symmetric
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._areas: dict[tuple[int, int, int], _Area] = {}
        self._asked = 0
        flags = symmetric.empty(2 * self.size, dtype=torch.int32, device=self._device)
        flags.zero_()
        torch.cuda.synchronize(self._device)
        self._flags, self._flag_handle = flags, self._rendezvous(flags)
        self._dist.barrier(self.group)  # all flags are zero before anyone sets one

    def _rendezvous(self, memory: Tensor) -> Any:
        """The handle by which all ranks reach this memory, each at the same offset: the start of its own allocation."""
        handle = self._symmetric.rendezvous(memory, self.group)
        if handle.buffer_ptrs[self.rank] != memory.data_ptr():
            raise HardwareError(
                "torch placed symmetric memory inside a larger allocation, whose offsets differ between ranks: this "
                "version of torch is not supported by SymmetricTransport, use TorchTransport"
            )
        return handle

    def agree(self, statement: str, error: Exception | None = None) -> None:
        """Also the start of a call: its first request for buffers gets the first area."""
        self._asked = 0
        super().agree(statement, error)

    def buffers(self, count: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        dtype = dtype or like.dtype
        size = math.prod(shape) * dtype.itemsize
        slot = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        key = (self._asked, count, slot)
        self._asked += 1
        if key not in self._areas:
            memory = self._symmetric.empty(count * slot, dtype=torch.uint8, device=self._device)
            self._areas[key] = _Area(memory, self._rendezvous(memory), slot)
        area = self._areas[key].memory
        return [area[i * slot : i * slot + size].view(dtype).view(tuple(shape)) for i in range(count)]

    def exchange(self, message: Tensor, into: Tensor, *, to: int, source: int) -> Pending:
        area = next((a for a in self._areas.values() if a.offset(message) is not None), None)
        if area is None or area.offset(into) is None:
            raise InvalidInputError("what is exchanged must come from one call of this transport's buffers()")
        if to == self.rank:
            into.copy_(message)
            return Pending(lambda: None)
        offset = area.offset(message)
        assert offset is not None
        theirs = area.handle.get_buffer(source, tuple(message.shape), message.dtype, offset // message.itemsize)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._set(to, _READY)
            self._await(source, _READY)
            into.copy_(theirs)
            self._set(source, _DONE)
            self._await(to, _DONE)
            finished = torch.cuda.Event()
            finished.record(stream)
        return Pending(lambda: torch.cuda.current_stream(self._device).wait_event(finished))

    def _set(self, rank: int, kind: int) -> None:
        address = self._flag_handle.buffer_ptrs[rank] + 4 * (2 * self.rank + kind)
        _memory_operation("cuStreamWriteValue32_v2", self._stream, address, 1, 0)

    def _await(self, rank: int, kind: int) -> None:
        address = self._flags.data_ptr() + 4 * (2 * rank + kind)
        _memory_operation("cuStreamWaitValue32_v2", self._stream, address, 1, _EQUAL)
        _memory_operation("cuStreamWriteValue32_v2", self._stream, address, 0, 0)
