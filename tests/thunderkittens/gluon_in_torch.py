"""Runs the source of a Gluon kernel on a CPU, in torch: there is no interpreter for Gluon.

Layouts are taken for granted (the compiler checks them), everything else is done as it stands: coordinates, pointers,
masks, shapes, dtypes, phases and bytes of barriers. What runs beside the program comes as late as it may, so that
operands that are written over too soon are seen: products read theirs when they are waited for, stores by TMA too;
loads by TMA arrive when they are asked for. A product that nobody has waited for is no number. Threads are not told
apart: what needs a barrier between warps is not seen.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from gpu_accel.flash_attention3 import launch


class Registers(Tensor):
    """A tensor that a kernel may ask for its layout; it gets none."""

    type = types.SimpleNamespace(layout=None)  # type: ignore[assignment]


class Pointer:
    """Numbers of a tensor's memory, at offsets."""

    def __init__(self, memory: Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    def places(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offsets = torch.as_tensor(self.offsets)
        mask = torch.ones_like(offsets, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        offsets, mask = torch.broadcast_tensors(offsets, mask)
        return offsets, mask


class Shared:
    """Shared memory; what was never written is not a number."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, dims: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(dims))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone().as_subclass(Registers)

    def store(self, value: Tensor) -> None:
        assert value.shape == self.data.shape and value.dtype == self.data.dtype
        self.data.copy_(value)


class Map:
    """A tensor map: boxes of a tensor, zeros outside."""

    def __init__(self, made: Any) -> None:
        self.view = made.base.as_strided(made.shape, made.strides)
        self.box, self.dtype = tuple(made.block_shape), made.base.dtype
        self.block_type = types.SimpleNamespace(nbytes=math.prod(self.box) * made.base.element_size(), shape=self.box)

    def parts(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the box exists: in the tensor, and in the box."""
        spans = [max(0, min(n, size - int(a))) for a, n, size in zip(at, self.box, self.view.shape, strict=True)]
        return tuple(slice(int(a), int(a) + n) for a, n in zip(at, spans, strict=True)), tuple(map(slice, spans))


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


class Machine:
    """What a program sees as `gl`, `tma`, `mbarrier` and the like."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Store] = []
        self.barriers: dict[int, list[int]] = {}  # bytes awaited, phases done
        self.program = 0

    def names(self) -> dict[str, Any]:
        def nothing(*_, **__):
            return None

        def jit(function=None, **_):
            return function or (lambda f: f)

        def arange(start: int, stop: int, layout: Any) -> Registers:
            return torch.arange(start, stop).as_subclass(Registers)

        def full(shape: list[int], value: Any, dtype: torch.dtype, layout: Any) -> Registers:
            return torch.full(shape, value, dtype=dtype).as_subclass(Registers)

        gl = types.SimpleNamespace(
            constexpr=lambda x: x, float32=torch.float32, bfloat16=torch.bfloat16, int64=torch.int64, int32=torch.int32,
            static_range=range, minimum=min, program_id=lambda _: torch.tensor(self.program),
            cdiv=lambda a, b: -(-a // b), static_assert=nothing, arange=arange,
            full=full,
            where=lambda which, a, b: torch.where(torch.as_tensor(which), a, b), exp2=torch.exp2,
            sum=lambda x, axis: x.sum(axis), max=lambda x, axis: x.amax(axis),
            reshape=lambda x, shape: x.reshape(shape), permute=lambda x, dims: x.permute(dims),
            split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), -1),
            convert_layout=lambda x, layout, assert_trivial=False: x, to_tensor=torch.as_tensor,
            inline_asm_elementwise=instruction,
            allocate_shared_memory=allocate, load=load, store=store,
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout",
                             "SwizzledSharedLayout"), nothing),
        )  # fmt: skip
        gl.NVMMASharedLayout = nothing_with(get_default_for=nothing)
        mbarrier = types.SimpleNamespace(MBarrierLayout=nothing, init=self.init, expect=self.expect, wait=self.wait)
        return dict(
            gluon=types.SimpleNamespace(jit=jit), gl=gl, mbarrier=mbarrier, tma_load=self.load, barrier=nothing,
            tma=types.SimpleNamespace(store_wait=self.store_wait), tma_store=self.store, fence_async_shared=nothing,
            tma_add=self.add, tma_written=self.written,
            mma_v2=lambda a, b, acc: a.float() @ b.float() + acc,
            warpgroup_mma=self.multiply, warpgroup_mma_wait=self.wait_for_products,
        )  # fmt: skip

    def init(self, bar: Shared, count: int) -> None:
        assert count == 1
        self.barriers[bar.data.data_ptr()] = [0, 0]

    def expect(self, bar: Shared, size: int) -> None:
        state = self.barriers[bar.data.data_ptr()]
        assert state[0] == 0, "bytes of the last phase are still awaited"
        state[0] = size

    def wait(self, bar: Shared, phase: int) -> None:
        awaited, phases = self.barriers[bar.data.data_ptr()]
        assert awaited == 0 and phases % 2 != phase, "waits forever, or for another phase"

    def load(self, made: Map, at: list[int], bar: Shared, to: Shared) -> None:
        there, inside = made.parts(at)
        box = torch.zeros(made.box, dtype=made.dtype)
        box[inside] = made.view[there]
        to.store(box.reshape(to.data.shape))
        state = self.barriers[bar.data.data_ptr()]
        state[0] -= made.block_type.nbytes
        assert state[0] >= 0
        state[1] += state[0] == 0

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


def instruction(code: str, constraints: str, arguments: list[Any], **_: Any) -> Any:
    """What the kernels have as PTX."""
    if code.startswith("mov.b32"):
        return arguments[0]
    assert code.startswith("mul.rn.bf16x2"), code
    return arguments[0] * arguments[1]


def nothing_with(**attributes: Any) -> Any:
    def nothing(*_, **__):
        return None

    for name, value in attributes.items():
        setattr(nothing, name, value)
    return nothing


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype))


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    offsets, mask = pointer.places(mask)
    assert not mask.any() or 0 <= int(offsets[mask].min()) <= int(offsets[mask].max()) < pointer.memory.numel()
    read = pointer.memory[torch.where(mask, offsets, 0)] if pointer.memory.numel() else torch.zeros(offsets.shape)
    return torch.where(mask, read, torch.tensor(other, dtype=read.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    offsets, mask = pointer.places(mask)
    assert not mask.any() or 0 <= int(offsets[mask].min()) <= int(offsets[mask].max()) < pointer.memory.numel()
    pointer.memory[offsets[mask]] = value.expand(offsets.shape)[mask]


def definitions(path: Path, space: dict[str, Any]) -> None:
    """What a file defines, and what it takes from other kernels' files, without their imports of Gluon."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpu_accel.thunderkittens."):
            definitions(path.with_name(f"{str(node.module).rpartition('.')[2]}.py"), space)
    kept = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
    flags = __future__.annotations.compiler_flag  # names of types stay unread
    exec(compile(ast.Module(kept, []), str(path), "exec", flags=flags, dont_inherit=True), space)


def run(kernel: Any, programs: int, arguments: tuple, constants: dict[str, Any]) -> None:
    """Every program of a launch, one after the other. arguments: tensors, tensor maps and numbers, as launched."""
    machine = Machine()
    space = machine.names()
    definitions(Path(kernel.fn.__code__.co_filename), space)
    given = []
    for x in arguments:
        if isinstance(x, Tensor):
            size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            x = Pointer(x.as_strided((size,), (1,)))
        elif hasattr(x, "block_shape"):
            x = Map(x)
        given.append(x)
    for machine.program in range(programs):
        space[kernel.fn.__name__](*given, **constants)
        assert all(one.box is not None for one in machine.stores) and not machine.products
        machine.written()
        assert not any(awaited for awaited, _ in machine.barriers.values())
        machine.barriers.clear()


@contextlib.contextmanager
def kernels_on_a_cpu() -> Iterator[list[str]]:
    """Launches of Gluon kernels are done by `run`, others as ever; the names of the former."""
    done = []

    def hook(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
        if isinstance(kernel, GluonJITFunction):
            constants = {name: x for name, x in options.items() if name not in ("num_warps", "maxnreg")}
            run(kernel, programs, arguments, constants)
            done.append(kernel.fn.__name__)
        else:
            with launch._hooked(None):
                launch.launch(kernel, programs, arguments, options)

    with launch._hooked(hook):
        yield done
