"""Runs kernels in Triton's interpreter and refuses every access outside the arguments of their launch.

    with only_own_memory():
        flash_attn_varlen_func(...)         # IncorrectResultError: attention_forward: load ... before argument "k"

What lies beside a tensor in a process is mostly mapped, so a read there gives numbers that a mask may throw away, and
nothing fails; on a GPU the same read is an illegal access where the page behind it happens to be missing. Here all
tensors of a launch are copied into one stretch of memory, with guards between, and each address of a load, a store or
an atomic operation that no mask switches off has to be an element of one of the tensors as they were passed: what lies
between the rows of a strided view is outside as well. Descriptors of TMA are pointers and masks in the interpreter.

It knows nothing of races, nor of shared memory, and not of Gluon, which has no interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpu_accel.errors import HardwareError, IncorrectResultError

_GUARD = 1 << 16  # bytes between tensors, and before and after them
_LINE = 512  # addresses keep what they are modulo this, which alignment may depend on


class _Launch:
    """Tensors of one launch, moved."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.places: dict[int, tuple[torch.UntypedStorage, int]] = {}  # by address: what was moved, and where to
        end = _GUARD
        for _, tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.places:
                start = end + storage.data_ptr() % _LINE
                self.places[storage.data_ptr()] = (storage, start)
                end = -(-(start + storage.nbytes() + _GUARD) // _LINE) * _LINE
        whole = torch.full((end + _LINE,), 255, dtype=torch.uint8)  # a NaN in every floating-point dtype
        self.memory = whole[-whole.data_ptr() % _LINE :][:end]
        for storage, start in self.places.values():
            self.memory[start : start + storage.nbytes()].copy_(_bytes(storage))
        allowed = torch.zeros(end, dtype=torch.bool)
        self.arguments: list[tuple[int, int, str]] = []
        self.moved: list[torch.Tensor] = []
        for name, tensor in tensors:
            start = self.places[tensor.untyped_storage().data_ptr()][1]
            offset = int(start + tensor.storage_offset() * tensor.element_size())
            stride = [n * tensor.element_size() for n in tensor.stride()]
            bytes_ = (*tensor.shape, tensor.element_size()), (*stride, 1)
            allowed.as_strided(*bytes_, offset).fill_(True)
            size = int(sum((n - 1) * step for n, step in zip(*bytes_, strict=True)) + 1) if tensor.numel() else 0
            self.arguments.append((offset, offset + size, name))
            view = torch.empty(0, dtype=tensor.dtype)
            first = (self.memory.data_ptr() - whole.data_ptr() + offset) // tensor.element_size()
            self.moved.append(view.set_(whole.untyped_storage(), first, tensor.shape, tensor.stride()))
        self.allowed = allowed.numpy()

    def put_back(self) -> None:
        for storage, start in self.places.values():
            _bytes(storage).copy_(self.memory[start : start + storage.nbytes()])

    def fault(self, what: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> str:
        """What is wrong with an access of `size` bytes at each of these addresses, or nothing."""
        at = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.int64) - self.memory.data_ptr()
        known = (at >= 0) & (at <= len(self.allowed) - size)
        inside = np.where(known, at, 0)
        right = known & self.allowed[inside] & self.allowed[inside + size - 1]
        if right.all():
            return ""
        first = int(at[~right][0])
        start, end, name = min(self.arguments, key=lambda a: max(a[0] - first, first - a[1] + 1, 0))
        where = f"{start - first} bytes before the first" if first < start else f"{first - start} bytes after the first"
        where += f" of {end - start}" if start <= first < end else f", where there are {end - start}"
        return f"{what} of {(~right).sum()} of {len(at)} addresses outside the arguments: {where}, of {name!r}"


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextlib.contextmanager
def only_own_memory() -> Iterator[None]:
    """Every launch in this process is watched while the context lasts.

    Raises:
        HardwareError: kernels are not run by the interpreter. In the context, from a launch:
        IncorrectResultError: names the kernel, the program, the kind of access and the nearest argument.
    """
    import triton
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not triton.knobs.runtime.interpret:
        raise HardwareError("accesses are watched in Triton's interpreter: set TRITON_INTERPRET=1 before kernels exist")
    executor, builder, native = interpreter.GridExecutor, interpreter.interpreter_builder, interpreter._interpreter
    started, ended, called = executor._init_args_hst, executor._restore_args_dev, executor.__call__
    under_way: list[_Launch] = []
    found: list[str] = []

    def tensors(name: str, x: Any, visit: Callable[[str, Any], Any]) -> Any:
        """x with what `visit` makes of the tensors in it."""
        if isinstance(x, tuple):
            parts = [tensors(f"{name}[{i}]", part, visit) for i, part in enumerate(x)]
            return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
        if isinstance(x, TensorDescriptor):
            return dataclasses.replace(x, base=tensors(name, x.base, visit))
        return visit(name, x) if hasattr(x, "data_ptr") else x

    def start(self: Any, args: Any, kwargs: Any) -> Any:
        names = [*self.arg_names[: len(args)], *kwargs]
        seen: list[tuple[str, torch.Tensor]] = []

        def note(name: str, x: Any) -> Any:
            seen.append((name, interpreter._unwrap_tensor(x)))
            return x

        values = [*args, *kwargs.values()]
        for name, x in zip(names, values, strict=True):
            tensors(name, x, note)
        launch = _Launch(seen)
        under_way.append(launch)
        moved = iter(launch.moved)

        def replace(_: str, x: Any) -> Any:
            return interpreter._rewrap_tensor(next(moved), original_tensor=x)

        values = [tensors(name, x, replace) for name, x in zip(names, values, strict=True)]
        return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))

    def end(self: Any, *_: Any) -> None:
        under_way[-1].put_back()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth = len(under_way)
        try:
            return called(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            if not found:
                raise
            raise IncorrectResultError(f"{self.fn.__name__}, program {builder.grid_idx}: {found.pop()}") from error
        finally:
            del under_way[depth:]

    def watch(what: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        if fault := under_way[-1].fault(what, pointers, mask, size):
            found.append(fault)
            raise IncorrectResultError(fault)

    class Watched:
        """What the interpreter reads and writes memory with."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            watch("load", pointers, mask, np.dtype(dtype).itemsize)
            return native.load(pointers, mask, other, dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            watch("store", pointers, mask, value.dtype.itemsize)
            return native.store(pointers, value, mask)

        def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
            watch("atomic", pointers, mask, value.dtype.itemsize)
            return native.atomic_rmw(operation, pointers, value, mask, order)

        def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
            watch("atomic", pointers, np.ones(pointers.shape, dtype=bool), value.dtype.itemsize)
            return native.atomic_cas(pointers, expected, value, order)

    interpreter._interpreter = Watched()
    executor._init_args_hst, executor._restore_args_dev, executor.__call__ = start, end, call
    try:
        yield
    finally:
        interpreter._interpreter = native
        executor._init_args_hst, executor._restore_args_dev, executor.__call__ = started, ended, called
