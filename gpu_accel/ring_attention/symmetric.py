"""Hops by the copy engine: ranks write to one another's symmetric memory, and read it, on streams of their own.

Why: NCCL's send and receive are kernels, and do not run beside an attention kernel that fills the GPU. On H100s one
134 MB hop beside cuDNN attention of 1.61 ms took 2.1 ms in all by NCCL and 1.64 ms by the copy engine (torch 2.11, two
GPUs over NVLink, measured before this file was written).

`mail`, for keys and values: owners write them straight from where they are to the buffers of those who need them. All
of it is stream-ordered memory operations that need no SM, and no copy is made first:

    reader   write 1 to `free` of the owner                           the buffer's last step has been computed
    owner    wait for its own `free` from the reader, reset it        on a side stream
             copy  keys and values -> reader's buffer                 the copy engine
             write 1 to `sent` of the reader
    reader   wait for its own `sent` from the owner, reset it         on another side stream

`exchange`, for sums that go round (gradients of keys and values): both sides use the same buffers, and the receiver
reads, with a handshake a hop:

    write 1 to `ready` of rank `to` | wait for `ready` from `source`, reset | copy | write 1 to `done` of `source` |
    wait for `done` from `to`, reset

Flags are reset before the other side can set them again, so a CUDA graph that holds them can be replayed. Buffers are
of this transport, in the same places on all ranks, which the schedules see to. Areas are kept and reused in the order
in which a call asks for them, so only the first call of a shape allocates (and takes part in a rendezvous of seconds).
Collectives and other messages (`all_gather`, `all_to_all`, `transfer`) use NCCL.

A rank that dies would leave the streams of the others waiting for ever, and the host with them. So every wait is
announced in host memory by the stream that waits, and a thread (`_Watch`) looks on: a wait that takes longer than
`timeout` breaks the transport. All that lies in its buffers becomes NaN, the waits are let go, and the next use raises
CommunicationError. Waits inside a CUDA graph are watched where `capture_step` made it, not in captures by hand.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.ring_attention.faults import CommunicationError
from gpu_accel.ring_attention.streams import on
from gpu_accel.ring_attention.transport import Pending, TorchTransport, check_group

_ALIGNMENT = 256
_READY, _DONE, _FREE, _SENT = _KINDS = range(4)  # of flags
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_REPLAYED = 1 << 30  # numbers from here on are of waits in CUDA graphs, which come again with every replay


@functools.cache
def _driver(name: str) -> Any:
    """A function of the CUDA driver on a stream, an address, a value and flags."""
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except OSError as error:
        raise HardwareError(f"the CUDA driver cannot be loaded: {error}") from error
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return function


def _memory_operation(name: str, stream: torch.cuda.Stream, address: int, value: int, flags: int) -> None:
    """cuStreamWriteValue32 or cuStreamWaitValue32."""
    code = _driver(name)(stream.cuda_stream, address, value, flags)
    if code != 0:
        raise CommunicationError(f"{name} failed with CUDA error {code}")


@dataclass
class _Area:
    """Slots of equal size in memory that every rank can read, at the same offsets."""

    memory: Tensor
    handle: Any
    slot: int
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def of(self, rank: int) -> Tensor:
        """The bytes of another rank's area."""
        if rank not in self._seen:
            self._seen[rank] = self.handle.get_buffer(rank, (self.memory.numel(),), torch.uint8, 0)
        return self._seen[rank]

    def offset(self, x: Tensor) -> int | None:
        """Bytes from the start of the area to x, or None when x lies elsewhere."""
        offset = x.data_ptr() - self.memory.data_ptr()
        return offset if 0 <= offset < self.memory.numel() else None


class _Watch:
    """Which waits of some streams have begun and which are over, as the streams themselves write it to host memory."""

    def __init__(self, streams: int, words: Tensor, timeout: float, late: Callable[[int], None]) -> None:
        """`words`: 2 * streams + 1 int32 of pinned memory, zeros; the last counts replays of CUDA graphs. late(rank):
        called once, for one not heard of."""
        self.words, self.timeout, self.late = words, timeout, late
        self._seen = words.numpy()  # the same memory, which is quicker to read one word of
        self.count = [0] * streams
        # of the waits that have been issued: who they are for, and where the flag is
        self.ranks: list[dict[int, tuple[int, int]]] = [{} for _ in range(streams)]
        self.replayed: dict[int, tuple[int, int]] = {}  # the same of waits in CUDA graphs, for ever
        self._thread: threading.Thread | None = None

    def issue(self, stream: int, rank: int, flag: int = 0, *, in_graph: bool = False) -> tuple[int, int, int]:
        """A wait for a rank's flag: its number, and the addresses to write it to before and after."""
        if in_graph:
            number = _REPLAYED + len(self.replayed)
            self.replayed[number] = rank, flag
        else:
            self.count[stream] += 1
            number, ranks = self.count[stream], self.ranks[stream]
            ranks[number] = rank, flag
            over = int(self._seen[2 * stream + 1])
            for old in [n for n in itertools.islice(ranks, 8) if n < over < _REPLAYED]:
                del ranks[old]
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="symmetric-memory-watch", daemon=True)
            self._thread.start()
        start = self.words.data_ptr() + 8 * stream
        return number, start, start + 4

    @property
    def turn(self) -> int:
        """The address that replays are counted at."""
        return self.words.data_ptr() + 8 * len(self.count)

    def waiting(self) -> list[tuple[int, int]]:
        """(stream, number) of the waits that are under way."""
        words = self.words.tolist()
        return [(i, words[2 * i]) for i in range(len(self.count)) if words[2 * i] != words[2 * i + 1]]

    def waited_for(self) -> list[tuple[int, int]]:
        """(rank, flag) of the waits that are under way."""
        found = [self._known(*wait) for wait in self.waiting()]
        return [x for x in found if x is not None]

    def _known(self, stream: int, number: int) -> tuple[int, int] | None:
        return self.replayed.get(number) if number >= _REPLAYED else self.ranks[stream].get(number)

    def _look(self) -> None:
        since: dict[tuple[int, tuple[int, int]], float] = {}
        while True:
            time.sleep(min(0.5, self.timeout / 10))
            now, turn = time.monotonic(), int(self._seen[2 * len(self.count)])
            since = {(turn, wait): since.get((turn, wait), now) for wait in self.waiting()}
            for (_, wait), start in since.items():
                if now - start > self.timeout:
                    self.late((self._known(*wait) or (-1, 0))[0])
                    return


class SymmetricTransport(TorchTransport):
    """GPUs that can read one another's memory (NVLink, one machine). See the head of this file for how.

    Args:
        timeout: seconds for which a stream may wait for another rank; as long as NCCL's, for the others may be
            compiling, or writing a checkpoint.
        group, check: as for `TorchTransport`.

    Raises:
        HardwareError: no CUDA device, or a process group that is not NCCL.
    """

    pushes = True
    carrier = "nccl"  # of collectives and messages; another in tests whose ranks share a GPU, which NCCL refuses

    def __init__(self, group: Any = None, *, timeout: float = 600.0, check: str = "auto") -> None:
        if not torch.cuda.is_available():
            raise HardwareError("symmetric memory needs CUDA GPUs: use TorchTransport, or simulate on one process")
        super().__init__(group, timeout=timeout, check=check)
        if self.name != self.carrier:
            raise HardwareError(f"symmetric memory needs an NCCL process group, this one is {self.name}")
        import torch.distributed._symmetric_memory as symmetric

        self.name = "symmetric"
        self._symmetric = symmetric
        self._index = torch.cuda.current_device()  # the number alone is quicker to ask for a stream by
        self._device = torch.device("cuda", self._index)
        # sums wait for what a neighbour computes, keys and values do not: they must not queue up behind one another,
        # nor what leaves here behind what arrives
        self._streams = [torch.cuda.Stream(self._device, priority=-1) for _ in range(3)]
        self._hops, self._departures, self._arrivals = self._streams
        self._areas: dict[tuple[int, int, int], _Area] = {}
        self._asked = 0
        self._used: set[tuple[int, int, int]] = set()
        flags = symmetric.empty(len(_KINDS) * self.size, dtype=torch.int32, device=self._device)
        flags.zero_()
        torch.cuda.synchronize(self._device)
        self._flags, self._flag_handle = flags, self._rendezvous(flags)
        self._watch = _Watch(
            len(self._streams), torch.zeros(2 * len(self._streams) + 1, dtype=torch.int32, device="cpu").pin_memory(),
            self.timeout.total_seconds(), self._give_up,
        )
        self._capturing, self._replays, self._replay = False, 0, torch.cuda.Event()  # of the last one, when it is over
        # What `_give_up` does, done once now. CUDA loads a kernel at its first launch, and may wait for all streams to
        # do so: for ever, if one of them waits for a rank that is gone.
        self._rescue = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._rescue):
            torch.empty(1 << 20, dtype=torch.uint8, device=self._device).fill_(0xFF)
        _memory_operation("cuStreamWriteValue32_v2", self._rescue, flags.data_ptr(), 0, 0)
        self._rescue.synchronize()
        self._dist.barrier(self.group)  # all flags are zero before anyone sets one

    def _give_up(self, rank: int) -> None:
        """On the watching thread: rank `rank` is gone. Nothing that comes of it may look like a result."""
        self._broken = f"rank {rank} did not answer within {self.timeout.total_seconds():g} s"
        warnings.warn(f"rank {self.rank}: {self._broken}: what was under way is NaN", RuntimeWarning, stacklevel=2)
        stream = self._rescue
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            while self._watch.waiting() or not (self._replay.query() and all(s.query() for s in self._streams)):
                late = self._watch.waited_for()
                lost = {rank, *(other for other, _ in late)} - {-1}
                for area in self._areas.values():  # also of lost ranks: what is pulled next comes from there
                    for memory in (area.memory, *(area.of(other) for other in lost)):
                        memory.fill_(0xFF)  # NaN in every format
                # only waits that have begun: before the others begin, something may still be written here
                for _, flag in late:
                    _memory_operation("cuStreamWriteValue32_v2", stream, flag, 1, 0)
                stream.synchronize()
                time.sleep(0.02)

    def _usable(self) -> None:
        if self._broken:
            raise CommunicationError(f"this transport failed before ({self._broken}): start the ranks anew")

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
        self._usable()
        self._asked = 0
        super().agree(statement, error)

    def buffers(self, count: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        dtype = dtype or like.dtype
        size = math.prod(shape) * dtype.itemsize
        slot = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        key = (self._asked, count, slot)
        self._asked += 1
        self._used.add(key)
        if key not in self._areas:
            memory = self._symmetric.empty(count * slot, dtype=torch.uint8, device=self._device)
            self._areas[key] = _Area(memory, self._rendezvous(memory), slot)
        area = self._areas[key].memory
        return [area[i * slot : i * slot + size].view(dtype).view(tuple(shape)) for i in range(count)]

    def bytes_used(self, call: Callable[[], object]) -> int:
        """Bytes of this rank's symmetric memory that a call takes; no allocator of torch counts them."""
        self._used.clear()
        call()
        return sum(self._areas[key].memory.numel() for key in self._used)

    def _area(self, *tensors: Tensor) -> tuple[_Area, list[int]]:
        """The area in which all of them lie, and where."""
        for area in self._areas.values():
            offsets = [area.offset(x) for x in tensors]
            if all(n is not None for n in offsets):
                return area, [n for n in offsets if n is not None]
        raise InvalidInputError("what ranks read of one another must come from one call of this transport's buffers()")

    def exchange(self, message: Tensor, into: Tensor, *, to: int, source: int) -> Pending:
        self._usable()
        area, (offset, _) = self._area(message, into)
        if to == self.rank:
            into.copy_(message)
            return Pending(lambda: None)
        size = message.numel() * message.element_size()
        stream = self._hops
        stream.wait_stream(torch.cuda.current_stream(self._index))
        with on(stream):
            self._set(stream, to, _READY)
            self._await(stream, source, _READY)
            into.view(-1).view(torch.uint8).copy_(area.of(source)[offset : offset + size])
            self._set(stream, source, _DONE)
            self._await(stream, to, _DONE)
        return self._after(stream)

    def mail(self) -> _Mail:
        return _Mail(self)

    @contextmanager
    def captured(self) -> Iterator[None]:
        self._usable()
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        self._usable()
        graph.replay()
        # a wait that is seen in two replays is not one that takes as long as both
        self._replays = (self._replays + 1) % _REPLAYED
        stream = torch.cuda.current_stream(self._index)
        _memory_operation("cuStreamWriteValue32_v2", stream, self._watch.turn, self._replays, 0)
        self._replay.record(stream)

    def _after(self, stream: torch.cuda.Stream) -> Pending:
        """What has been issued on a side stream; waiting makes the current stream wait, not the host."""
        finished = torch.cuda.Event()
        finished.record(stream)
        return Pending(lambda: torch.cuda.current_stream(self._index).wait_event(finished))

    def _set(self, stream: torch.cuda.Stream, rank: int, kind: int) -> None:
        address = self._flag_handle.buffer_ptrs[rank] + 4 * (len(_KINDS) * self.rank + kind)
        _memory_operation("cuStreamWriteValue32_v2", stream, address, 1, 0)

    def _await(self, stream: torch.cuda.Stream, rank: int, kind: int) -> None:
        address = self._flags.data_ptr() + 4 * (len(_KINDS) * rank + kind)
        in_graph = torch.cuda.is_current_stream_capturing()
        watched = self._capturing or not in_graph
        if watched:
            number, begun, over = self._watch.issue(self._streams.index(stream), rank, address, in_graph=in_graph)
            if in_graph:  # the wait that was over last may have been this one, in the replay before
                _memory_operation("cuStreamWriteValue32_v2", stream, over, 0, 0)
            _memory_operation("cuStreamWriteValue32_v2", stream, begun, number, 0)
        _memory_operation("cuStreamWaitValue32_v2", stream, address, 1, _EQUAL)
        _memory_operation("cuStreamWriteValue32_v2", stream, address, 0, 0)
        if watched:
            _memory_operation("cuStreamWriteValue32_v2", stream, over, number, 0)


def choose_transport(group: Any = None) -> TorchTransport:
    """Symmetric memory where all ranks are GPUs of one machine that reach one another, else plain torch.distributed.

    All ranks call it together; `name` of what it returns says which it is. Kept for each NCCL group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return TorchTransport(group)  # which says so
    check_group(group)
    if dist.get_backend(group) != "nccl":
        return TorchTransport(group)
    return _chosen(dist.group.WORLD if group is None else group)


@functools.cache
def _chosen(group: Any) -> TorchTransport:
    plain = TorchTransport(group)
    device = torch.cuda.current_device()
    others = [i for i in range(torch.cuda.device_count()) if i != device]
    reached = all(torch.cuda.can_device_access_peer(device, i) for i in others)
    machine = Path("/proc/sys/kernel/random/boot_id")
    here = machine.read_text().strip() if machine.exists() else f"{socket.gethostname()} {os.getpid()}"
    said = plain._statements(f"{here} {'reaches its peers' if reached else 'does not reach its peers'}")
    if plain.size == 1 or not reached or len(set(said)) > 1:
        return plain
    return SymmetricTransport(group)


class _Mail:
    """Blocks that owners write to other ranks, from `mail` to `close`."""

    def __init__(self, transport: SymmetricTransport) -> None:
        transport._usable()
        self.transport, self.stream = transport, transport._departures
        self.stream.wait_stream(torch.cuda.current_stream(transport._index))  # what will be sent is written

    def expect(self, source: int, into: Tensor) -> Pending:
        transport, stream = self.transport, self.transport._arrivals
        stream.wait_stream(torch.cuda.current_stream(transport._index))  # nobody here still reads `into`
        transport._set(stream, source, _FREE)

        def arrive() -> None:
            transport._await(stream, source, _SENT)
            transport._after(stream).wait()

        return Pending(arrive)

    def send(self, to: int, parts: Sequence[tuple[Tensor, int]], into: Tensor) -> None:
        transport = self.transport
        area, (offset,) = transport._area(into)
        theirs = area.of(to)
        with on(self.stream):
            transport._await(self.stream, to, _FREE)
            for x, at in parts:
                a = offset + at * into.element_size()
                theirs[a : a + x.numel() * x.element_size()].copy_(x.detach().view(-1).view(torch.uint8))
            transport._set(self.stream, to, _SENT)

    def close(self) -> None:
        self.transport._after(self.stream).wait()
