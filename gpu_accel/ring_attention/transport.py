"""How shards travel: one interface, and what stands behind it.

    LocalTransport        ranks are threads of one process (see simulate.py); finds deadlocks and misused buffers
    TorchTransport        torch.distributed: NCCL on GPUs, gloo on CPUs
    SymmetricTransport    torch's symmetric memory: the copy engine writes to any rank (symmetric.py)

`exchange` is what rings are made of: send one buffer on, receive another, both of them from `buffers`, and compute in
between. After `wait()` the received buffer may be read *and* the sent one overwritten, so two buffers suffice for any
number of hops and nothing is allocated on the way. `all_gather` and `all_to_all` take the ranks that take part, so a
mesh or a group of a few ranks needs no process group of its own.

Before it communicates, a schedule lets all ranks `agree` on what they are about to do.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import check_number
from gpu_accel.ring_attention.faults import CommunicationError, compare_statements

Sends = Sequence[tuple[Tensor, int]]  # (contiguous tensor, rank it goes to)
Receives = Sequence[tuple[Tensor, int]]  # (contiguous tensor to fill, rank it comes from)
_STATEMENT = 512  # bytes of a statement that the ranks compare
_TIMEOUTS = (1e-3, 1e9)  # seconds; gloo counts milliseconds, and takes 0 of them for no limit


class Pending:
    """Something on its way. `wait()` returns once it has arrived and what was sent may be overwritten."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


class Mail(Protocol):
    """One round of blocks that their owners write into buffers of other ranks."""

    def expect(self, source: int, into: Tensor) -> Pending:
        """Let `source` write to `into`, one of `buffers`, from now on; `wait()`: it has."""
        ...

    def send(self, to: int, parts: Sequence[tuple[Tensor, int]], into: Tensor) -> None:
        """Contiguous tensors to elements [a, ...) of that buffer of rank `to` which lies where `into` lies here, as
        soon as it expects them."""
        ...

    def close(self) -> None:
        """Wait until what was sent may be overwritten."""
        ...


@runtime_checkable
class Transport(Protocol):
    """What a schedule asks of the network. Ranks are 0 ... size - 1 of this transport."""

    rank: int
    size: int
    name: str
    pushes: bool  # whether a rank can write to another one's buffers: then `mail` is there

    def buffers(self, count: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Buffers to send from and receive into, on the device of `like`; kept between calls where that saves work."""
        ...

    def exchange(self, message: Tensor, into: Tensor, *, to: int, source: int) -> Pending:
        """Send `message` to one rank and fill `into` from another, which calls this with the same buffers' places."""
        ...

    def transfer(self, sends: Sends, receives: Receives) -> Pending:
        """Any number of messages to and from any ranks; those of one pair of ranks keep their order."""
        ...

    def mail(self) -> Mail:
        """Begin a round of writing to other ranks' buffers. What is to be sent has been written by then."""
        ...

    def all_gather(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        """`x` of each of `ranks` (default: all), stacked: (len(ranks), *x.shape)."""
        ...

    def all_to_all(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        """x[i] goes to ranks[i]; the result's row i came from ranks[i]."""
        ...

    def agree(self, statement: str, error: Exception | None = None) -> None:
        """All ranks must say the same; `error` is this rank's own reason not to go on, and is raised."""
        ...


class PointToPoint(ABC):
    """Everything of a :class:`Transport` made from `transfer`, for those that have nothing better."""

    rank: int
    size: int
    name: str
    pushes = False

    def mail(self) -> Mail:
        raise UnsupportedError(f"ranks cannot write to one another's memory over {self.name}")

    @abstractmethod
    def transfer(self, sends: Sends, receives: Receives) -> Pending: ...

    @abstractmethod
    def _statements(self, mine: str) -> list[str]: ...

    def buffers(self, count: int, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
        return [torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device) for _ in range(count)]

    def exchange(self, message: Tensor, into: Tensor, *, to: int, source: int) -> Pending:
        return self.transfer([(message, to)], [(into, source)])

    def all_gather(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        ranks = range(self.size) if ranks is None else ranks
        x = _plain(x)
        out = x.new_empty((len(ranks), *x.shape))
        pending = self.transfer([(x, r) for r in ranks], [(out[i], r) for i, r in enumerate(ranks)])
        return Pending(lambda: (pending.wait(), out)[1])

    def all_to_all(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        ranks = range(self.size) if ranks is None else ranks
        if len(x) != len(ranks):
            raise InvalidInputError(f"all_to_all among {len(ranks)} ranks needs as many rows, got {len(x)}")
        x = _plain(x)
        out = torch.empty_like(x)
        pending = self.transfer([(x[i], r) for i, r in enumerate(ranks)], [(out[i], r) for i, r in enumerate(ranks)])
        return Pending(lambda: (pending.wait(), out)[1])

    def agree(self, statement: str, error: Exception | None = None) -> None:
        mine = statement if error is None else f"error: {error}"
        statements = self._statements(mine)
        if error is not None:
            raise error
        compare_statements(self.rank, statements)


class World:
    """The mailboxes that the ranks of one process share. One rank runs at a time: it holds the lock."""

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"a world has a whole number of ranks from 1 up, got {shown(size)}")
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, str, int], Any] = {}  # the n-th item of a kind from one rank to another
        self.counts: dict[tuple[int, int, str, str], int] = {}
        self.alive = set(range(size))
        self.running: set[int] = set()  # by simulate
        self.blocked: dict[int, Callable[[], bool]] = {}
        self.failed: tuple[int, BaseException] | None = None
        self.bytes_sent = [0] * size

    def begin(self) -> None:
        """All ranks are there, and nothing is on its way that an earlier call left."""
        if self.running:
            raise InvalidInputError("the ranks of this world are running: simulate others in a World of their own")
        self.running = set(range(self.size))
        self.alive, self.failed = set(range(self.size)), None
        self.mail.clear()
        self.counts.clear()

    def number(self, source: int, to: int, kind: str, side: str) -> int:
        """Counts what is sent and what is asked for: items pair up in the order of the calls, as on a network."""
        key = (source, to, kind, side)
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def post(self, source: int, to: int, kind: str, item: Any) -> None:
        self.mail[source, to, kind, self.number(source, to, kind, "sent")] = item
        self.changed.notify_all()

    def take(self, rank: int, source: int, kind: str, number: int) -> Any:
        """An item from a rank. Raises when it cannot come: a rank failed, ended, or all wait for one another."""
        key = (source, rank, kind, number)
        self.blocked[rank] = lambda: key in self.mail
        try:
            while key not in self.mail:
                if self.failed:
                    raise CommunicationError(f"rank {self.failed[0]} failed: {self.failed[1]}") from self.failed[1]
                if source not in self.alive:
                    raise CommunicationError(f"rank {rank} waits for rank {source}, which has ended")
                if self.alive <= set(self.blocked) and not any(ready() for ready in self.blocked.values()):
                    raise CommunicationError(f"deadlock: rank {rank} waits for rank {source}, and all ranks wait")
                self.changed.wait()
        finally:
            del self.blocked[rank]
        return self.mail.pop(key)

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        self.alive.discard(rank)
        self.running.discard(rank)
        if error is not None and self.failed is None:
            self.failed = (rank, error)
        self.changed.notify_all()


class LocalTransport(PointToPoint):
    """One rank among threads of this process. Stricter than a network: it raises when a message is changed in flight,
    and fills what is being received with NaN until `wait()`."""

    name = "local"

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def transfer(self, sends: Sends, receives: Receives) -> Pending:
        kept = []
        for x, to in sends:
            _check_contiguous(x)
            copy = x.detach().clone()
            kept.append((x, copy))
            if to != self.rank:
                self.world.bytes_sent[self.rank] += x.numel() * x.element_size()
            self.world.post(self.rank, to, "tensor", copy)
        numbers = []
        for x, source in receives:
            _check_contiguous(x)
            numbers.append(self.world.number(source, self.rank, "tensor", "asked"))
            if x.is_floating_point():
                x.fill_(float("nan"))

        def finish() -> None:
            for (x, source), number in zip(receives, numbers, strict=True):
                found = self.world.take(self.rank, source, "tensor", number)
                if found.shape != x.shape or found.dtype != x.dtype:
                    raise CommunicationError(
                        f"rank {self.rank} expected {x.dtype} {tuple(x.shape)} from rank {source}, "
                        f"got {found.dtype} {tuple(found.shape)}"
                    )
                x.copy_(found)
            for x, copy in kept:
                if not torch.equal(_as_bytes(x), _as_bytes(copy)):
                    raise AssertionError(f"rank {self.rank} changed a message while it was on its way")

        return Pending(finish)

    def _statements(self, mine: str) -> list[str]:
        for to in range(self.size):
            self.world.post(self.rank, to, "statement", mine)
        numbers = [self.world.number(source, self.rank, "statement", "asked") for source in range(self.size)]
        return [self.world.take(self.rank, source, "statement", n) for source, n in enumerate(numbers)]


class TorchTransport(PointToPoint):
    """torch.distributed: point-to-point, all-gather and all-to-all of NCCL (GPU tensors) or gloo (CPU tensors).

    Args:
        group: a process group; None is the default one, which must be initialised.
        timeout: seconds, 0.001 to 1e9, after which gloo gives up on a rank that does not answer. NCCL keeps to the
            timeout of its process group, whose watchdog ends the process: `init_process_group(timeout=...)` sets it.
        check: "always": all ranks agree before every call. "first": once for each new statement, which saves the
            round trip (and its synchronisation of the GPU); a later mismatch then ends at the timeout. "auto" is
            "always" on gloo and "first" on NCCL.

    On H100s NCCL's send and receive do not run beside an attention kernel that fills the GPU: see `SymmetricTransport`.
    """

    def __init__(self, group: Any = None, *, timeout: float = 60.0, check: str = "auto") -> None:
        import torch.distributed as dist

        seconds = check_number("timeout", timeout)
        if not _TIMEOUTS[0] <= seconds <= _TIMEOUTS[1]:
            raise InvalidInputError(f"timeout must be {_TIMEOUTS[0]:g} to {_TIMEOUTS[1]:g} seconds, got {seconds:g}")
        if not dist.is_available() or not dist.is_initialized():
            raise HardwareError(
                "torch.distributed is not initialised: start with torchrun and call init_process_group, or run "
                "all ranks in this process: RingAttention(num_gpus=8, simulate=True) or simulate_attention(ranks=8)"
            )
        if check not in ("auto", "always", "first"):
            raise InvalidInputError(f"check must be 'auto', 'always' or 'first', got {check!r}")
        check_group(group)
        self._dist = dist
        # the older name is deprecated from torch 2.13 on
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise InvalidInputError("this process is not in the process group given")
        backend = str(dist.get_backend(self.group))
        self.gloo = backend == "gloo"
        self.name = backend
        self.timeout = timedelta(seconds=seconds)
        self._every_time = check == "always" or (check == "auto" and self.gloo)
        self._agreed: set[str] = set()
        self._broken = ""

    def _global(self, rank: int) -> int:
        return self._dist.get_global_rank(self.group, rank)

    def _guarded(self, what: str, action: Callable[[], Any]) -> Any:
        """Run one action of the network; its failure ends this transport with a message that says what to do."""
        if self._broken:
            raise CommunicationError(f"this transport failed before ({self._broken}): start the ranks anew")
        try:
            return action()
        except RuntimeError as error:  # DistBackendError, and what gloo raises when a peer is gone or too slow
            reason = " ".join(str(error).split()).split(" Exception raised from")[0][:300]
            self._broken = f"{what}: {reason}"
            raise CommunicationError(
                f"rank {self.rank} of {self.size}, {what}: another rank is gone, failed or did not answer within "
                f"{self.timeout.total_seconds():g} s ({reason})"
            ) from error

    def _wait(self, what: str, works: Sequence[Any], result: Any = None) -> Any:
        arguments = (self.timeout,) if self.gloo else ()  # with a timeout, NCCL would make the host wait
        for work in works:
            self._guarded(what, functools.partial(work.wait, *arguments))
        return result

    def _wire(self, x: Tensor) -> Tensor:
        """The tensor as the backend takes it: gloo as bytes, which it need not know how to add up."""
        _check_contiguous(x)
        if self.gloo and x.is_cuda:
            raise InvalidInputError("the process group is gloo, but the tensors are on a GPU: use NCCL, or move them")
        if self.name == "nccl" and not x.is_cuda:
            raise InvalidInputError("the process group is NCCL, but the tensors are on the CPU: use gloo, or move them")
        return _as_bytes(x) if self.gloo else x.detach()

    def transfer(self, sends: Sends, receives: Receives) -> Pending:
        dist = self._dist
        mine = deque(x for x, to in sends if to == self.rank)
        for x, source in receives:
            if source == self.rank:
                x.copy_(mine.popleft())
        operations = [
            dist.P2POp(dist.isend, self._wire(x), self._global(to), self.group)
            for x, to in sends
            if to != self.rank and x.numel()
        ]
        operations += [
            dist.P2POp(dist.irecv, self._wire(x), self._global(source), self.group)
            for x, source in receives
            if source != self.rank and x.numel()
        ]
        if not operations:
            return Pending(lambda: None)
        works = self._guarded("send and receive", lambda: dist.batch_isend_irecv(operations))
        return Pending(lambda: self._wait("send and receive", works))

    def all_gather(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        if ranks is not None and tuple(ranks) != tuple(range(self.size)):
            return super().all_gather(x, ranks)
        x = _plain(x)
        out = x.new_empty((self.size, *x.shape))
        if not x.numel():
            return Pending(lambda: out)
        work = self._guarded(
            "all-gather",
            lambda: self._gather(self._wire(out), self._wire(x), group=self.group, async_op=True),
        )
        return Pending(lambda: self._wait("all-gather", [work], out))

    def all_to_all(self, x: Tensor, ranks: Sequence[int] | None = None) -> Pending:
        if self.gloo or (ranks is not None and tuple(ranks) != tuple(range(self.size))):
            return super().all_to_all(x, ranks)
        x = _plain(x)
        out = torch.empty_like(x)
        work = self._guarded(
            "all-to-all", lambda: self._dist.all_to_all_single(out, x, group=self.group, async_op=True)
        )
        return Pending(lambda: self._wait("all-to-all", [work], out))

    def agree(self, statement: str, error: Exception | None = None) -> None:
        if error is None and not self._every_time and statement in self._agreed:
            return
        if not self.gloo and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InvalidInputError(
                "ranks cannot ask one another inside a CUDA graph: make the same call once before it is captured, with "
                'check="first" (see capture_step)'
            )
        super().agree(statement, error)
        self._agreed.add(statement)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """What is issued meanwhile becomes part of a CUDA graph that `replay` will be given."""
        yield

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Issue a CUDA graph with calls of this transport in it, on the current stream; all ranks do.

        Raises:
            CommunicationError: this transport failed before.
        """
        self._guarded("a CUDA graph", graph.replay)

    def _statements(self, mine: str) -> list[str]:
        device = torch.device("cpu") if self.gloo else torch.device("cuda", torch.cuda.current_device())
        encoded = mine.encode()
        if len(encoded) > _STATEMENT:  # what follows must be the same too
            digest = hashlib.sha256(encoded).hexdigest()[:16].encode()
            encoded = encoded[: _STATEMENT - len(digest)] + digest
        line = torch.zeros(_STATEMENT, dtype=torch.uint8, device="cpu")
        line[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        lines = TorchTransport.all_gather(self, line.to(device)).wait().cpu()
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in lines]


def check_group(group: object) -> None:
    """A process group of torch.distributed, or None for the default one."""
    import torch.distributed as dist

    outside = group is dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to those that are not in it
    if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
        raise InvalidInputError(f"group must be a process group of torch.distributed or None, got {shown(group)}")


def _plain(x: Tensor) -> Tensor:
    """Contiguous, and as memory holds it: a view may be the negative of its memory."""
    return x.resolve_conj().resolve_neg().contiguous()


def _as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as its bytes, which every dtype has and NaN is equal to."""
    return x.detach().view(-1).view(torch.uint8)


def _check_contiguous(x: Tensor) -> None:
    if not x.is_contiguous():
        raise InvalidInputError(f"what is sent or received must be contiguous, got strides {x.stride()}")
