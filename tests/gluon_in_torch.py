"""Runs the source of a Gluon kernel on a CPU, in torch: there is no interpreter for Gluon.

Layouts are taken for granted (the compiler checks them), everything else is done as it stands: coordinates, pointers,
masks, shapes, dtypes, phases, arrivals and bytes of barriers. What runs beside the program comes as late as it may, so
that operands that are written over too soon are seen: products read theirs when they are waited for, stores by TMA too;
loads by TMA arrive when they are asked for. A product that nobody has waited for is no number. Partitions of
`warp_specialize` take turns, each until it has to wait, so a producer is as far ahead as it can be; if all wait, that
is a deadlock. Threads are not told apart: what needs a barrier between warps of a partition is not seen.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import math
import operator
import threading
import time
import types
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from gpu_accel.flash_attention3 import launch

ROOT = Path(__file__).parents[1]
_lock = threading.Lock()
OPTIONS = ("num_warps", "maxnreg", "launch_cooperative_grid")  # not for the kernel


@dataclass(frozen=True)
class Kind:
    """A dtype, as Gluon has it."""

    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return self.torch.itemsize * 8


class Registers(Tensor):
    """A tensor that a kernel may ask for its layout, of which it gets none, and for another dtype."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, kind: Any, bitcast: bool = False) -> Any:  # type: ignore[override]
        dtype = kind.torch if isinstance(kind, Kind) else kind
        return self.view(dtype) if bitcast else super().to(dtype)


class Constant(int):
    """A constexpr integer."""

    @property
    def value(self) -> int:
        return int(self)


def _anew(name: str) -> Any:
    """`a += b` as a = a + b: a kernel's values do not change, and others may have the same one."""
    return lambda a, b: getattr(operator, name)(a, b)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(Registers, f"__i{_name.rstrip('_')}__", _anew(_name))


def number(x: int) -> Tensor:
    return torch.as_tensor(x).as_subclass(Registers)


class Pointer:
    """Numbers of a tensor's memory, at offsets."""

    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=Kind(self.memory.dtype))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offsets[key])

    def to(self, kind: Kind) -> Pointer:
        """An address is a number too."""
        return self

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offsets = torch.as_tensor(self.offsets)
        mask = torch.ones_like(offsets, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offsets, mask = torch.broadcast_tensors(offsets, mask)
        return offsets, mask


class Shared:
    """Shared memory; what was never written is not a number."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype, self.shape = Kind(data.dtype), data.shape

    def index(self, i: int) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def seen_as(self, kind: Kind, shape: list[int], layout: Any) -> Shared:
        """The same memory, where tiles of one swizzle lie one after the other."""
        return Shared(self.data.view(kind.torch).view(shape))

    def permute(self, dims: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(dims))

    def _keep_alive(self) -> None:
        """No memory is given to others here."""

    def load(self, layout: Any) -> Tensor:
        return self.data.clone().as_subclass(Registers)

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape and value.dtype == self.data.dtype
        self.data.copy_(value)


class Map:
    """A tensor map: boxes of a tensor, zeros outside."""

    def __init__(self, made: Any) -> None:
        self.view = made.base.as_strided(made.shape, made.strides)
        self.box, self.dtype, self.layout = tuple(made.block_shape), Kind(made.base.dtype), None
        self.block_shape = list(self.box)
        self.block_type = types.SimpleNamespace(nbytes=math.prod(self.box) * made.base.element_size(), shape=self.box)

    def parts(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the box exists: in the tensor, and in the box."""
        there, inside = [], []
        for a, n, size in zip(map(int, at), self.box, self.view.shape, strict=True):
            begin, end = max(0, a), max(0, a, min(a + n, size))  # coordinates may be negative
            there.append(slice(begin, end))
            inside.append(slice(begin - a, end - a) if end > begin else slice(0))
        return tuple(there), tuple(inside)


class Product:
    """One that was asked for; its operands are read when it is done."""

    def __init__(self, a: Any, b: Any, acc: Any) -> None:
        self.a, self.b, self.acc, self.value = a, b, acc, None

    def done(self) -> None:
        a, b = (x.data if isinstance(x, Shared) else x for x in (self.a, self.b))
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = (a.float() @ b.float() + (0.0 if acc is None else acc)).as_subclass(Registers)


class Store:
    """One by TMA that was asked for."""

    def __init__(self, made: Map, at: list[int], source: Shared, adds: bool = False) -> None:
        self.made, self.at, self.source, self.adds = made, [int(a) for a in at], source, adds
        self.box: Tensor | None = None

    def read(self) -> None:
        if self.box is None:
            self.box = self.source.data.reshape(self.made.box).clone()

    def write(self) -> None:
        self.read()
        assert self.box is not None
        there, inside = self.made.parts(self.at)
        self.made.view[there] = self.box[inside] + (self.made.view[there] if self.adds else 0)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phases = 0

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        assert self.pending >= 0 and self.bytes >= 0, "more than the barrier waits for"
        if not self.pending and not self.bytes:
            self.phases += 1
            self.pending = self.count


class Partitions:
    """Functions that run in turn, each until it has to wait for another one."""

    def __init__(self, parts: list[tuple[Any, tuple]], warps: list[int]) -> None:
        self.warps = warps
        self.parts, self.ended = parts, [False] * len(parts)
        self.turns = [threading.Semaphore(0) for _ in parts]
        self.all = threading.Semaphore(0)
        self.errors: list[BaseException] = []
        self.waiting = [-1] * len(parts)  # since which change of barriers
        self.changes = 0
        self.me = 0

    def run(self) -> None:
        for i in range(len(self.parts)):
            threading.Thread(target=self.body, args=(i,), daemon=True).start()
        self.turns[0].release()
        self.all.acquire()
        if self.errors:
            raise self.errors[0]

    def body(self, i: int) -> None:
        self.turns[i].acquire()
        self.me = i
        function, arguments = self.parts[i]
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)
        self.ended[i] = True
        self.pass_on(i)

    def pass_on(self, i: int) -> None:
        others = [j % len(self.parts) for j in range(i + 1, i + len(self.parts) + 1)]
        left = [j for j in others if not self.ended[j]]
        (self.turns[left[0]] if left and not self.errors else self.all).release()

    def wait(self) -> None:
        """Let others go on until something has changed."""
        i = self.me
        self.waiting[i] = self.changes
        assert not all(e or w == self.changes for e, w in zip(self.ended, self.waiting, strict=True)), "deadlock"
        self.pass_on(i)
        self.turns[i].acquire()
        self.me = i


class Machine:
    """What a program sees as `gl`, `tma`, `mbarrier` and the like."""

    def __init__(self, programs: int, warps: int) -> None:
        self.warps = warps
        self.asked: dict[int, list[Product]] = {}  # of a partition
        self.sent: dict[int, list[Store]] = {}
        self.barriers: dict[int, Barrier] = {}
        self.partitions: Partitions | None = None
        self.named: dict[int, tuple[int, int]] = {}  # of named barriers: threads that have arrived, phases
        self.program, self.programs = 0, programs

    @property
    def products(self) -> list[Product]:
        return self.asked.setdefault(self.partitions.me if self.partitions else -1, [])

    @property
    def stores(self) -> list[Store]:
        return self.sent.setdefault(self.partitions.me if self.partitions else -1, [])

    def names(self) -> dict[str, Any]:
        def nothing(*_, **__):
            return None

        def jit(function=None, **_):
            return function or (lambda f: f)

        def arange(start: int, stop: int, layout: Any) -> Registers:
            return torch.arange(start, stop).as_subclass(Registers)

        def full(shape: Any, value: Any, kind: Kind, layout: Any) -> Registers:
            return torch.full(tuple(shape), value, dtype=kind.torch).as_subclass(Registers)

        kinds = ("float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
        layouts = (
            "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "SwizzledSharedLayout",
            "DistributedLinearLayout",
        )  # fmt: skip
        gl = types.SimpleNamespace(
            constexpr=lambda x: Constant(x) if type(x) is int else x,
            static_range=range, static_assert=nothing, minimum=least(min, torch.minimum),
            maximum=least(max, torch.maximum), log2=torch.log2, num_warps=lambda: 4,
            cdiv=lambda a, b: -(-a // b), program_id=lambda _: number(self.program),
            num_programs=lambda _: number(self.programs), arange=arange, full=full,
            where=lambda which, a, b: torch.where(torch.as_tensor(which), a, b).as_subclass(Registers),
             exp2=torch.exp2, rsqrt=torch.rsqrt, abs=torch.abs, reduce=reduce,
             expand_dims=torch.unsqueeze, sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
             min=lambda x, axis: x.amin(axis),
            reshape=lambda x, shape: x.reshape(shape), permute=lambda x, dims: x.permute(dims),
            split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), -1),
            convert_layout=lambda x, layout, assert_trivial=False: x, to_tensor=number,
            inline_asm_elementwise=self.instruction, allocate_shared_memory=allocate, load=load, store=store,
            atomic_add=count_up,
            warp_specialize=self.specialize, **{name: Kind(getattr(torch, name)) for name in kinds},
            **dict.fromkeys(layouts, nothing),
        )  # fmt: skip
        gl.NVMMASharedLayout = nothing_with(get_default_for=nothing)
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=nothing, init=self.init, expect=self.expect, wait=self.wait, arrive=self.arrive
        )
        return dict(
            gluon=types.SimpleNamespace(jit=jit, constexpr_function=jit), gl=gl,
            mbarrier=mbarrier, tma_load=self.load, barrier=nothing,
            tma=types.SimpleNamespace(store_wait=self.store_wait), tma_store=self.store, fence_async_shared=nothing,
            tma_add=self.add, reinterpret=Shared.seen_as, tma_written=self.written,
            mma_v2=lambda a, b, acc: a.float() @ b.float() + acc,
            warpgroup_mma=self.multiply, warpgroup_mma_wait=self.wait_for_products,
        )  # fmt: skip

    def specialize(self, parts: list[tuple[Any, tuple]], warps: list[int], registers: list[int]) -> None:
        assert len(parts) == len(warps) + 1 == len(registers) + 1
        self.partitions = Partitions(parts, [self.warps, *warps])
        self.partitions.run()
        self.partitions = None

    def instruction(self, code: str, constraints: str, arguments: list[Any], **_: Any) -> Any:
        """What the kernels have as PTX."""
        if "bar.sync $1" not in code and "bar.arrive $1" not in code:
            return instruction(code, arguments)
        if "@p bar" in code and not bool(arguments.pop()):
            return None
        assert self.partitions is not None
        which, threads = map(int, arguments)
        arrived, phases = self.named.get(which, (0, 0))
        arrived += 32 * self.partitions.warps[self.partitions.me]
        assert arrived <= threads, f"too many at barrier {which}"
        self.named[which] = (0, phases + 1) if arrived == threads else (arrived, phases)
        self.partitions.changes += 1
        while "sync" in code and self.named[which][1] == phases:
            self.partitions.wait()
        return None

    def change(self, bar: Shared, arrivals: int, size: int) -> None:
        self.barriers[bar.data.data_ptr()].change(arrivals, size)
        if self.partitions:
            self.partitions.changes += 1

    def init(self, bar: Shared, count: int) -> None:
        self.barriers[bar.data.data_ptr()] = Barrier(count)

    def expect(self, bar: Shared, size: int) -> None:
        self.change(bar, 1, int(size))

    def arrive(self, bar: Shared, count: int, pred: Any = True) -> None:
        if pred:
            self.change(bar, count, 0)

    def wait(self, bar: Shared, phase: int, pred: Any = True) -> None:
        if not pred:
            return
        one = self.barriers[bar.data.data_ptr()]
        while one.phases % 2 == int(phase):
            assert self.partitions is not None, "waits forever"
            self.partitions.wait()

    def load(self, made: Map, at: list[int], bar: Shared, to: Shared) -> None:
        there, inside = made.parts(at)
        box = torch.zeros(made.box, dtype=made.dtype.torch)
        box[inside] = made.view[there]
        to.store(box.reshape(to.data.shape))
        self.change(bar, 0, -made.block_type.nbytes)

    def store(self, made: Map, at: list[int], source: Shared) -> None:
        self.stores.append(Store(made, at, source))

    def add(self, made: Map, at: list[int], source: Shared) -> None:
        place = [int(a) for a in at]
        assert not any(s.at == place and s.made is made and not s.adds for s in self.stores), "added before it is there"
        self.stores.append(Store(made, at, source, adds=True))

    def store_wait(self, left: int) -> None:
        """Shared memory has been read, which does not say that memory was written."""
        for one in self.stores[: len(self.stores) - left]:
            one.read()

    def written(self) -> None:
        for one in self.stores:
            one.write()
        self.stores.clear()

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.products.append(Product(a, b, acc if use_acc else None))
        return self.products[-1]

    def wait_for_products(self, left: int, deps: list[Any]) -> Any:
        while len(self.products) > left:
            self.products.pop(0).done()
        # one that is still on its way stays a product, which others may add to and nothing else can be done with
        values = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
        return values if len(values) > 1 else values[0]


def least(of_two: Any, of_many: Any) -> Any:
    """minimum or maximum, of numbers and of tensors."""

    def function(a: Any, b: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.dim() for x in (a, b)):
            if not (isinstance(a, int | Tensor) and isinstance(b, int | Tensor)):
                return of_two(a, b)
            dtype = next((x.dtype for x in (a, b) if isinstance(x, Tensor)), torch.int64)
            return number(of_two(a, b)).to(dtype)
        dtype = next(x.dtype for x in (a, b) if isinstance(x, Tensor) and x.dim())
        return of_many(*(torch.as_tensor(x, dtype=dtype) for x in (a, b)))

    return function


def reduce(values: tuple[Tensor, ...], axis: int, combine: Any) -> tuple[Tensor, ...]:
    """By halves, as threads do it."""
    while values[0].shape[axis] > 1:
        halves = [x.chunk(2, axis) for x in values]
        values = combine(*(x[0] for x in halves), *(x[1] for x in halves))
    return tuple(x.squeeze(axis) for x in values)


def number_of(word: Tensor) -> Tensor:
    return (word & 0xFFFFFFFF).to(torch.int32).view(torch.float32).as_subclass(Registers)


def notes(code: str, arguments: list[Any]) -> Any:
    """What programs of a row tell each other, in words of a number and a turn."""
    if "ld.relaxed" in code and len(arguments) == 1:  # what they say now
        place = arguments[0]
        at = torch.as_tensor(place.offsets).flatten()
        words = [place.memory[at + i].clone() for i in (0, 1)]  # each read once
        return tuple(x.to(torch.int32) for word in words for x in (word << 32 >> 32, word >> 32))
    if "ld.relaxed" in code:
        a, tag_a, b, tag_b, place, turn = arguments
        a, b = number_of(a), number_of(b)
        at = torch.as_tensor(place.offsets).flatten()
        start = time.monotonic()
        while not bool((tag_a == turn).all() and (tag_b == turn).all()):
            assert time.monotonic() < start + 20, "waits forever"
            time.sleep(0)
            words = [place.memory[at + i].clone() for i in (0, 1)]
            (a, b), (tag_a, tag_b) = map(number_of, words), ((w >> 32).to(torch.int32) for w in words)
        return a, b
    place = arguments[0]
    at = torch.as_tensor(place.offsets).flatten()
    if "st.relaxed" in code and "atom" not in code:
        place.memory[at], place.memory[at + 1] = arguments[1].flatten(), arguments[2].flatten()
        return None
    with _lock:
        place.memory[at] += 1
        if int(place.memory[at]) == int(arguments[2]) + 1:
            place.memory[int(arguments[1].offsets) : int(at) + 1] = 0
    return None


def instruction(code: str, arguments: list[Any]) -> Any:
    if "relaxed.gpu" in code:
        return notes(code, arguments)
    if code.startswith("bar.warp.sync"):
        return None
    if "cvt.rn.bf16x2.f32 both, $3, $2" in code:  # rounded to bfloat16
        return arguments[0].to(torch.bfloat16).to(torch.float32)
    if code.startswith("mov.b32"):
        return arguments[0]
    if "ld.acquire.gpu.global.u32 $0, [$1]" in code:  # until it is not 0: programs before this one are through
        pointer = arguments[0]
        assert int(pointer.memory[int(pointer.offsets.flatten()[0])]), "waits for what no program before has done"
        return None
    if code.startswith("mul.rn.bf16x2") or "mul.f32 $0, $0, $64" in code:  # products; those that may be left out
        return arguments[0] * arguments[1]
    if "@p atom.global.acq_rel.gpu.add.u32 $0, [$1], 1" in code:  # the first of 128 threads counts up
        pointer = arguments[0]
        place = int(pointer.offsets.flatten()[0])
        count = torch.zeros(128, dtype=torch.int32)
        count[0] = pointer.memory[place]
        pointer.memory[place] += 1
        return count.as_subclass(Registers)
    if "atom.global.add.u32 $0, [$1], 1" in code:  # the first thread counts up, where it is wanted
        pointer, wanted = arguments
        place = int(pointer.offsets.flatten()[0])
        count = torch.zeros(wanted.shape, dtype=torch.int32)
        if wanted.any():
            count[0] = pointer.memory[place]
            pointer.memory[place] += 1
        return count.as_subclass(Registers)
    kind = {"cvt.rn.bf16x2.f32 $0, $2, $1;": torch.bfloat16, "cvt.rn.f16x2.f32 $0, $2, $1;": torch.float16}[code]
    low, high = (x.to(kind).to(Kind(torch.int16), bitcast=True).to(torch.int32) for x in arguments)
    return low & 0xFFFF | high << 16


def nothing_with(**attributes: Any) -> Any:
    def nothing(*_, **__):
        return None

    for name, value in attributes.items():
        setattr(nothing, name, value)
    return nothing


def allocate(kind: Kind, shape: list[int], layout: Any) -> Shared:
    return Shared(torch.full(shape, math.nan if kind.torch.is_floating_point else 0, dtype=kind.torch))


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    offsets, mask = pointer.places(mask)
    assert not mask.any() or 0 <= int(offsets[mask].min()) <= int(offsets[mask].max()) < pointer.memory.numel()
    read = pointer.memory[torch.where(mask, offsets, 0)] if pointer.memory.numel() else torch.zeros(offsets.shape)
    return torch.where(mask, read, torch.tensor(other, dtype=read.dtype)).as_subclass(Registers)


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    offsets, mask = pointer.places(mask)
    assert not mask.any() or 0 <= int(offsets[mask].min()) <= int(offsets[mask].max()) < pointer.memory.numel()
    value = torch.as_tensor(value, dtype=pointer.memory.dtype)
    pointer.memory[offsets[mask]] = value.expand(offsets.shape)[mask]


def definitions(path: Path, space: dict[str, Any]) -> None:
    """What a file defines, and what it takes from others: from those with kernels by their source, else as it is."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("gpu_accel.")):
            continue
        inside = path.parent if node.level else ROOT
        other = inside.joinpath(*(node.module or "").split(".")).with_suffix(".py")
        if other.name == "gluon_compat.py":
            continue
        if other.is_file() and "@gluon.jit" in other.read_text():
            definitions(other, space)
            continue
        module = importlib.import_module(".".join(other.with_suffix("").relative_to(ROOT).parts))
        for one in node.names:
            value = getattr(module, one.name)
            space[one.asname or one.name] = Constant(value.value) if type(value).__name__ == "constexpr" else value
    kept = [
        node for node in tree.body
        if any("gluon" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))
        or isinstance(node, ast.Assign) and "gl.constexpr(" in ast.unparse(node.value)
    ]  # fmt: skip
    flags = __future__.annotations.compiler_flag  # names of types stay unread
    exec(compile(ast.Module(kept, []), str(path), "exec", flags=flags, dont_inherit=True), space)


def zero_rows(buffers: Shared, stage: int, first: int) -> None:
    """As in hopper_packed.py."""
    buffers.data[int(stage), int(first) :] = 0


def count_up(pointer: Pointer, by: int) -> Tensor:
    place = int(pointer.offsets)
    before = number(int(pointer.memory[place]))
    pointer.memory[place] += by
    return before


SUBSTITUTES = {"zero_rows": zero_rows}  # functions that go by how tiles lie in shared memory


def run(
    kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any], warps: int = 4, together: int | None = None
) -> None:
    """Every program of a launch, one after the other. arguments: tensors, tensor maps and numbers, as launched.

    Those of rows in parts run at once; together: the one to run here.
    """
    if constants.get("PARTS", 1) > 1 and together is None:  # programs that wait for each other
        with futures.ThreadPoolExecutor(programs) as pool:
            one_of = torch.no_grad()(run)
            each = [pool.submit(one_of, kernel, programs, arguments, constants, warps, i) for i in range(programs)]
            for one in futures.as_completed(each):
                one.result()
        return
    machine = Machine(programs, warps)
    space = machine.names()
    with _lock:  # Python 3.11 parses in one thread at a time
        definitions(Path(kernel.fn.__code__.co_filename), space)
    space |= SUBSTITUTES
    given: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            given.append(Pointer(x.as_strided((size,), (1,))))
        elif hasattr(x, "block_shape"):
            given.append(Map(x))
        else:
            given.append(number(x) if isinstance(x, int) else x)
    for machine.program in range(programs) if together is None else [together]:
        space[kernel.fn.__name__](*given, **constants)
        assert not any(machine.asked.values()), "a product that nobody waited for"
        for stores in machine.sent.values():
            assert all(one.box is not None for one in stores), "shared memory may be gone before it was read"
            for one in stores:
                one.write()
        machine.sent.clear()
        assert not any(one.bytes for one in machine.barriers.values())
        assert not any(arrived for arrived, _ in machine.named.values()), "a named barrier is left unbalanced"
        machine.barriers.clear()


@contextlib.contextmanager
def kernels_on_a_cpu() -> Iterator[list[str]]:
    """Launches of Gluon kernels are done by `run`, others as ever; the names of the former."""
    done = []

    def hook(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        if isinstance(kernel, GluonJITFunction):
            constants = {name: x for name, x in options.items() if name not in OPTIONS}
            run(kernel, programs, arguments, constants, options["num_warps"])
            done.append(kernel.fn.__name__)
        else:
            with launch._hooked(None):
                launch.launch(kernel, programs, arguments, options)

    with launch._hooked(hook):
        yield done
