"""Launches of a function, written down once and played back: an eager step without deciding anything anew.

A layer decides the same things in every step: tiles, variants, strides, the sizes of what it allocates. `Tape.record`
runs a function of tensors and notes its launches (kernel, grid, arguments) and each address in them as an offset into
one of its inputs or into memory that it allocated. `Tape.play` does the launches again for other inputs of the same
kind: some 6 us each, where deciding takes 20 to 60. Of memory that it allocates there are

    results   what the function returns, tensors of their own
    kept      what its backward pass reads: one tensor of bytes, `views` of which are those tensors again
    scratch   the rest: one tensor of bytes that ends with the call

Anything that a tape cannot repeat (another operation of torch than those below, memory that it does not know, what was
random) makes it no tape: `record` then gives None, and the function goes on being called. Whoever plays a tape makes
sure that all decisions would be the same: that shapes, strides, dtypes, devices, alignments and settings are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_accel.flash_attention3 import gluon_launch
from gpu_accel.flash_attention3 import launch as launching
from gpu_accel.thunderkittens import gemm_hopper

_ALIGNMENT = 256
_aten = torch.ops.aten
_ALLOCATE = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_strided.default, _aten.empty_like.default}
_ZEROS = {_aten.new_zeros.default, _aten.zeros.default}
# operations of torch that are done again as they are
_REPEATED = {_aten.sum.dim_IntList, _aten._to_copy.default, _aten.clone.default}
_one_at_a_time = threading.RLock()  # what sees launches is one for all threads
_recorder = 0  # the thread whose launches are written down
_EMPTY, _LASTING = -1, -2  # in place of a memory: of no elements; of counters that belong to a stream
_COUNTERS = (gluon_launch._counters, gemm_hopper._by_stream)


def recording() -> bool:
    """Whether launches of this thread are being written down, so that no custom op may stand in front of them."""
    return _recorder != 0 and _recorder == threading.get_ident()


@dataclass(frozen=True)
class Place:
    """A tensor as an offset in bytes into one of the memories of a tape (of `_LASTING`, its address)."""

    memory: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def view(self, memories: Sequence[Any]) -> Tensor:
        base: Tensor = memories[self.memory]
        if self.empty:
            return base.new_empty(self.shape, dtype=self.dtype)
        same = self.offset == 0 and base.dtype == self.dtype and tuple(base.shape) == self.shape
        if same and base.stride() == self.stride:
            return base
        start = base.storage_offset() * base.element_size() + self.offset
        flat = base.as_strided((base.untyped_storage().nbytes() // base.element_size(),), (1,), 0)
        whole = flat if base.dtype == self.dtype else flat.view(torch.uint8)[: flat.nbytes // 8 * 8].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, start // self.dtype.itemsize)


class _At:
    """Stands in a tensor map for the tensor whose address it has."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


@dataclass
class _Launch:
    """kernel: what was launched; compiled: the variant (None in the interpreter)."""

    kernel: Any
    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]  # tensors are None here; with a variant, constants follow
    options: dict[str, Any]
    places: list[tuple[int, Place]]
    maps: list[tuple[int, dict[str, Any], Place]]


@dataclass
class _Call:
    """An operation of torch on memories that are tensors of their own; `to` is where its result goes."""

    function: Any
    arguments: tuple[Any, ...]  # places and plain values
    options: dict[str, Any]
    to: int | None  # None where it writes to its first argument


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last."""
    if not math.prod(shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


class _NoTapeError(Exception):
    """What happened cannot be repeated."""


@dataclass
class _Memory:
    """Of what the function allocated: kind "results", "kept", "scratch", "zeros" or "made" (by a repeated call)."""

    tensor: Tensor
    kind: str


class _Watch(TorchDispatchMode):
    """Notes what a function does to memory."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.inputs = inputs
        self.held: list[Tensor] = []
        self.spans = [
            (0, 0) if t is None or not t.numel() else (t.data_ptr(), t.data_ptr() + _bytes(t)) for t in inputs
        ]  # fmt: skip
        self.memories: list[_Memory] = []
        self.steps: list[_Launch | _Call] = []
        self.why = ""
        self.thread = threading.get_ident()

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _ALLOCATE or func in _ZEROS:
            self.memories.append(_Memory(out, "zeros" if func in _ZEROS else "scratch"))
        elif func in _REPEATED or func is _aten.copy_.default:
            self._repeated(func, args, kwargs, out)
        elif not self._is_view(func, out):
            self.refuse(f"{func} is not repeated")
        return out

    @staticmethod
    def _is_view(func: Any, out: Any) -> bool:
        if func is _aten._unsafe_view.default:
            return True
        aliases = [r.alias_info for r in func._schema.returns]
        return bool(aliases) and all(a is not None and not a.is_write for a in aliases)

    def _repeated(self, func: Any, args: tuple, kwargs: dict, out: Tensor) -> None:
        try:
            given = tuple(self._whole(a) if isinstance(a, Tensor) else a for a in args)
        except _NoTapeError as error:
            return self.refuse(str(error))
        if any(isinstance(value, Tensor) for value in kwargs.values()):
            return self.refuse(f"{func} has a tensor by name")
        to = None
        if func in _REPEATED:
            self.memories.append(_Memory(out, "made"))
            to = len(self.inputs) + len(self.memories) - 1
        self.steps.append(_Call(func, given, dict(kwargs), to))

    def _whole(self, x: Tensor) -> Place:
        """Where x is, as a tensor that torch works on: its memory must be a tensor of its own."""
        place = self.place(x)
        at = place.memory - len(self.inputs)
        if place.memory < 0:
            raise _NoTapeError("an operation of torch works on a counter, or on nothing")
        if at >= 0:
            if self.memories[at].kind == "zeros":
                raise _NoTapeError("an operation of torch reads what was zeroed")
            if self.memories[at].kind == "scratch":
                self.memories[at].kind = "results"
        return place

    def place(self, x: Tensor) -> Place:
        shape, stride = tuple(x.shape), x.stride()
        if not x.numel():
            return Place(_EMPTY, 0, shape, stride, x.dtype)
        start, end = x.data_ptr(), x.data_ptr() + _bytes(x)
        found = [i for i, (low, high) in enumerate(self.spans) if low <= start and end <= high]
        if not found:
            for i, memory in enumerate(self.memories):
                low = memory.tensor.data_ptr()
                if memory.tensor.numel() and low <= start and end <= low + _bytes(memory.tensor):
                    return Place(len(self.inputs) + i, start - low, shape, stride, x.dtype)
            if any(counter is x for kept in _COUNTERS for counter in kept.values()):
                self.held.append(x)
                return Place(_LASTING, start, shape, stride, x.dtype)
        if len(found) > 1:  # arguments that lie within each other, such as q, k and v of one packed tensor
            found = [i for i in found if self.spans[i][0] == start]
        if len(found) != 1:
            raise _NoTapeError("a launch uses memory that is in no argument, or in several")
        return Place(found[0], start - self.spans[found[0]][0], shape, stride, x.dtype)

    def launched(self, kernel: Any, compiled: Any, grid: tuple, arguments: tuple, options: dict) -> None:
        if threading.get_ident() != self.thread:
            return
        places, maps, plain = [], [], list(arguments)
        try:
            for i, value in enumerate(arguments):
                if isinstance(value, Tensor):
                    places.append((i, self.place(value)))
                    plain[i] = None
                elif type(value).__name__ == "TensorDescriptor":
                    maps.append((i, {**vars(value), "base": None, "_kind": type(value)}, self.place(value.base)))
                    plain[i] = None
                elif not (value is None or isinstance(value, int | float)):
                    raise _NoTapeError(f"an argument is a {type(value).__name__}")
        except _NoTapeError as error:
            return self.refuse(str(error))
        if compiled is not None:
            names = kernel.arg_names[len(arguments) :]
            if any(name not in options for name in names):
                return self.refuse("a constant is left at its default")
            plain += [options[name] for name in names]
        self.steps.append(_Launch(kernel, compiled, (*grid, 1, 1)[:3], plain, options, places, maps))


def stream_of(device: torch.device) -> int:
    """The address of the current stream of a device; 0 on a CPU."""
    return 0 if device.type != "cuda" else torch._C._cuda_getCurrentRawStream(device.index)


def _profiled() -> bool:
    """Whether somebody wants to be told of launches, such as Triton's profiler."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _bytes(x: Tensor) -> int:
    return _extent(x.shape, x.stride()) * x.element_size()


@dataclass
class Tape:
    """See the head of this file. Memories: the inputs, then kept, scratch and zeros, then tensors of their own."""

    inputs: int
    device: torch.device
    steps: list[_Launch | _Call]
    results: list[Place | None]
    kept: list[Place]
    kept_bytes: int
    scratch_bytes: int
    zero_bytes: int
    own: list[tuple[int, tuple[int, ...], torch.dtype]]  # memory, shape, dtype
    memories: int
    held: list[Tensor]  # counters of the stream that it was recorded on, see `fits`
    stream: int
    _ready: list[tuple] = field(default_factory=list)

    @classmethod
    def record(
        cls, function: Callable[..., tuple[tuple, tuple]], inputs: Sequence[Tensor | None],
        shapes: Sequence[tuple[int, ...] | None] = (), *, overlapping: bool = False,
    ) -> tuple[tuple, tuple, Tape | None, str]:  # fmt: skip
        """Run function(*inputs), which gives (results, kept), and write it down.

        shapes: of the results as the tape is to make them, where not as the function does. overlapping: arguments may
        share memory; each is then used as it is, none by parts.
        Returns results and kept as the function made them, the tape or None, and why there is none.
        """
        global _recorder
        watch = _Watch(inputs)
        with _one_at_a_time:
            before = launching._seen, _recorder
            launching._seen, _recorder = watch.launched, watch.thread
            try:
                with watch:
                    results, kept = function(*inputs)
            finally:
                launching._seen, _recorder = before
        spans = sorted(span for span in watch.spans if span[1])
        if not overlapping and any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
            watch.refuse("two arguments share memory")
        if watch.why:
            return results, kept, None, watch.why
        try:
            return results, kept, cls._made(watch, results, kept, shapes), ""
        except _NoTapeError as error:
            return results, kept, None, str(error)

    @classmethod
    def _made(cls, watch: _Watch, results: tuple, kept: tuple, shapes: Sequence[tuple[int, ...] | None]) -> Tape:
        inputs, memories = len(watch.inputs), watch.memories

        def own(t: Tensor) -> Place:
            place = watch.place(t)
            at = place.memory - inputs
            if at < 0 or memories[at].kind not in ("scratch", "results", "made"):
                raise _NoTapeError("a result is an argument, or zeros")
            if memories[at].kind == "scratch":
                memories[at].kind = "results"
            return place

        found = [None if t is None else own(t) for t in results]
        if len({p.memory for p in found if p}) != sum(p is not None for p in found):
            raise _NoTapeError("two results are one")
        kept_places = [watch.place(t) for t in kept]
        for place in kept_places:
            at = place.memory - inputs
            if place.memory != _EMPTY and (at < 0 or memories[at].kind not in ("scratch", "kept")):
                raise _NoTapeError("what is kept is an argument, a result or zeros")
            if place.memory != _EMPTY:
                memories[at].kind = "kept"
        sizes = {"kept": 0, "scratch": 0, "zeros": 0}
        # memory of the recording -> (memory of the tape, offset)
        where: dict[int, tuple[int, int]] = {_EMPTY: (inputs, 0)}
        own_memories, count = [], inputs + len(sizes)
        for i, memory in enumerate(memories):
            kind = memory.kind
            if kind in sizes:
                where[inputs + i] = inputs + list(sizes).index(kind), sizes[kind]
                sizes[kind] += -(-_bytes(memory.tensor) // _ALIGNMENT) * _ALIGNMENT
            else:
                where[inputs + i] = count, 0
                if kind == "results":
                    if not memory.tensor.is_contiguous():
                        raise _NoTapeError("a result is not contiguous")
                    own_memories.append((count, tuple(memory.tensor.shape), memory.tensor.dtype))
                count += 1

        def moved(place: Place) -> Place:
            if 0 <= place.memory < inputs or place.memory == _LASTING:
                return place
            to, offset = where[place.memory]
            return Place(to, offset + place.offset, place.shape, place.stride, place.dtype)

        steps: list[_Launch | _Call] = []
        for step in watch.steps:
            if isinstance(step, _Call):
                given = tuple(moved(a) if isinstance(a, Place) else a for a in step.arguments)
                to = None if step.to is None else where[step.to][0]
                steps.append(_Call(step.function, given, step.options, to))
            else:
                places = [(i, moved(p)) for i, p in step.places]
                maps = [(i, fields, moved(p)) for i, fields, p in step.maps]
                steps.append(
                    _Launch(step.kernel, step.compiled, step.grid, step.arguments, step.options, places, maps)
                )  # fmt: skip
        ends: list[Place | None] = []
        for i, result in enumerate(found):
            end = None if result is None else moved(result)
            wanted = shapes[i] if i < len(shapes) else None
            if end is not None and wanted is not None and wanted != end.shape:
                which = [j for j, one in enumerate(own_memories) if one[0] == end.memory]
                if not which or math.prod(own_memories[which[0]][1]) != math.prod(wanted) or end.offset:
                    raise _NoTapeError("a result has another size than is wanted")
                own_memories[which[0]] = (end.memory, wanted, end.dtype)
                strides = torch.empty(wanted, device="meta").stride()
                end = Place(end.memory, 0, wanted, strides, end.dtype)
            ends.append(end)
        device = next(t.device for t in watch.inputs if t is not None)
        tape = cls(
            inputs, device, steps, ends, [moved(p) for p in kept_places], sizes["kept"], sizes["scratch"],
            sizes["zeros"], own_memories, count, watch.held, stream_of(device),
        )  # fmt: skip
        tape._prepare()
        return tape

    def _prepare(self) -> None:
        """Everything about launches that does not depend on addresses."""
        for step in self.steps:
            if isinstance(step, _Call) or step.compiled is None:
                self._ready.append((step,))
                continue
            run, compiled = step.compiled.run, step.compiled
            patches = tuple((i, p.memory, p.offset) for i, p in step.places if p.memory >= 0 and not p.empty)
            arguments = list(step.arguments)
            for at, where in step.places:
                if where.empty or where.memory == _LASTING:
                    arguments[at] = where.offset if where.memory == _LASTING else 0
            maps = tuple((i, fields.pop("_kind"), fields, p.memory, p.offset) for i, fields, p in step.maps)
            self._ready.append(
                (None, compiled, run, step.grid, compiled.function, compiled.packed_metadata, arguments, patches, maps)
            )

    def fits(self) -> bool:
        """Whether it can be played on the current stream: with counters only on theirs, and in no CUDA graph."""
        if not self.held:
            return True
        return self.stream == stream_of(self.device) and not torch.cuda.is_current_stream_capturing()

    def views(self, kept: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the function kept, of what `play` has returned."""
        memories = [None] * self.inputs + [kept]
        return tuple(place.view(memories) for place in self.kept)

    def play(self, inputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Tensor]:
        """Do it again: (results, what is kept as bytes)."""
        device = self.device
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)
        memories: list[Any] = [None] * self.memories
        memories[: self.inputs] = inputs
        first = self.inputs
        memories[first] = kept
        if self.scratch_bytes:
            memories[first + 1] = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        if self.zero_bytes:
            memories[first + 2] = torch.zeros(self.zero_bytes, dtype=torch.uint8, device=device)
        for at, shape, dtype in self.own:
            memories[at] = torch.empty(shape, dtype=dtype, device=device)
        addresses = [0 if t is None else t.data_ptr() for t in memories]
        watched = _profiled()
        stream = stream_of(device)
        launching.have_context()
        for step in self._ready:
            if step[0] is not None:
                self._slowly(step[0], memories, addresses)
                continue
            _, compiled, run, (x, y, z), function, metadata, template, patches, maps = step
            arguments = template.copy()
            for i, memory, offset in patches:
                arguments[i] = addresses[memory] + offset
            for i, kind, fields, memory, offset in maps:
                made = object.__new__(kind)
                made.__dict__.update(fields)
                made.base = _At(addresses[memory] + offset)
                arguments[i] = made
            if watched:
                compiled[x, y, z](*arguments)
            else:
                run(x, y, z, stream, function, metadata, None, None, None, *arguments)
        return [None if place is None else place.view(memories) for place in self.results], kept

    def _slowly(self, step: _Launch | _Call, memories: list[Any], addresses: list[int]) -> None:
        """A step on tensors: an operation of torch, or a launch in Triton's interpreter."""
        if isinstance(step, _Call):
            given = [a.view(memories) if isinstance(a, Place) else a for a in step.arguments]
            made = step.function(*given, **step.options)
            if step.to is not None:
                memories[step.to] = made
                addresses[step.to] = made.data_ptr()
            return
        arguments = list(step.arguments)
        for i, place in step.places:
            arguments[i] = place.view([*memories, torch.empty(0)])
        launching.launch(step.kernel, step.grid, tuple(arguments), step.options)
