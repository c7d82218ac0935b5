"""The memory of one launch as one block of bytes: inputs, outputs and scratch, with guards between them.

The controller fills it, the candidate's process runs the kernel on it and hands all of it back, and the controller
looks at every byte: outputs hold poison until they are written, guards and inputs must come back as they were. Nothing
in it tells what the outputs should be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.testing.poison import never_written, poison_

from .launch import Launch, evaluate, malformed
from .tasks import Task
from .tasks.task import Dims, Tensors

GUARD = 4096  # bytes on both sides of every buffer; buffers start at multiples of it
GUARDS = (0xFF, 0x7F)  # as float32 a NaN, and 3.4e38: what is read beyond a buffer differs between two runs
LARGEST = 2**33


@dataclass(frozen=True)
class Slot:
    """A buffer within the image."""

    name: str
    role: str  # "input", "output" or "workspace"
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def view(self, image: Tensor) -> Tensor:
        """The buffer as a tensor that shares memory with the image."""
        flat = image[self.offset : self.offset + self.size].view(getattr(torch, self.dtype))
        return flat.view(self.shape)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "role": self.role, "dtype": self.dtype,
                "shape": list(self.shape), "offset": self.offset, "size": self.size}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where the buffers of one launch lie."""

    slots: tuple[Slot, ...]
    total: int

    @classmethod
    def of(cls, task: Task, launch: Launch, dims: Dims, constants: Mapping[str, Any]) -> Layout:
        """Inputs, outputs, then the launch's workspaces.

        Raises:
            Rejected: malformed, for workspaces that make no sense.
        """
        names = dims | {k: v for k, v in constants.items() if isinstance(v, int) and not isinstance(v, bool)}
        wanted = [(one.name, "input", one.dtype, one.sizes(dims)) for one in task.inputs]
        wanted += [(one.name, "output", one.dtype, one.sizes(dims)) for one in task.outputs]
        for name, buffer in launch.workspace.items():
            if any(name == other for other, *_ in wanted) or name in dims:
                raise malformed(f"workspace {name} has the name of something else")
            wanted.append((name, "workspace", buffer.dtype, tuple(evaluate(size, names) for size in buffer.shape)))
        slots, offset = [], GUARD
        for name, role, dtype, shape in wanted:
            elements = 1
            for size in shape:
                elements *= size
                if size < 0 or elements > LARGEST:
                    raise malformed(f"{name} has the shape {shape}")
            size = elements * getattr(torch, dtype).itemsize
            slots.append(Slot(name, role, dtype, shape, offset, size))
            offset += -(-size // GUARD) * GUARD + GUARD
        if offset > LARGEST:
            raise malformed(f"the buffers take {offset} bytes")
        return cls(tuple(slots), offset)

    def fill(self, inputs: Tensors, launch: Launch, guard: int) -> Tensor:
        """A fresh image: inputs, poisoned or filled outputs and scratch, and guards of the byte `guard`."""
        image = torch.full((self.total,), guard, dtype=torch.uint8)
        for slot in self.slots:
            if not slot.size:
                continue
            view = slot.view(image)
            if slot.role == "input":
                view.copy_(inputs[slot.name])
            elif slot.role == "output":
                poison_(view)
                if slot.name in launch.fill:
                    view.fill_(launch.fill[slot.name])
            elif (value := launch.workspace[slot.name].fill) is not None:
                view.fill_(value)
        return image

    def outputs(self, image: Tensor) -> Tensors:
        return {slot.name: slot.view(image) for slot in self.slots if slot.role == "output"}

    def changed_inputs(self, before: Tensor, after: Tensor) -> list[str]:
        return [
            slot.name
            for slot in self.slots
            if slot.role == "input" and not torch.equal(_bytes(slot, before), _bytes(slot, after))
        ]

    def changed_guards(self, before: Tensor, after: Tensor) -> int:
        """How many bytes outside all buffers were changed."""
        outside = torch.ones(self.total, dtype=torch.bool)
        for slot in self.slots:
            outside[slot.offset : slot.offset + slot.size] = False
        return int((before != after)[outside].sum())

    def unwritten(self, image: Tensor, launch: Launch) -> dict[str, int]:
        """Elements of outputs that still hold poison."""
        counts = {
            slot.name: int(never_written(slot.view(image)).sum())
            for slot in self.slots
            if slot.role == "output" and slot.name not in launch.fill
        }
        return {name: count for name, count in counts.items() if count}


def _bytes(slot: Slot, image: Tensor) -> Tensor:
    return image[slot.offset : slot.offset + slot.size]
