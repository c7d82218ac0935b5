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
GUARDS = ("nan", "huge")  # what is read beyond a buffer differs between two runs
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

    def fill(self, inputs: Tensors, launch: Launch, guard: str, seed: int) -> Tensor:
        """A fresh image: inputs, poisoned or filled outputs and scratch, and guards.

        No two places beyond buffers hold the same, so that copying one onto the other, or the larger of it and zero,
        shows. In front of and behind inputs, and in scratch, lie numbers that spoil a result (`guard`, of GUARDS);
        behind outputs and scratch lies noise.
        """
        noise = torch.Generator().manual_seed(seed)
        image = spoiling(self.total, guard, noise)
        for slot, end in zip(self.slots, [*(one.offset for one in self.slots[1:]), self.total], strict=True):
            if slot.role != "input":
                behind = image[slot.offset + slot.size : end]
                behind.copy_(torch.randint(256, behind.shape, dtype=torch.uint8, generator=noise))
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


def spoiling(size: int, guard: str, noise: torch.Generator) -> Tensor:
    """Bytes, a multiple of 8, that are different numbers of the same sort whatever the dtype.

    "nan" has a NaN of every floating-point type and small negative integers; "huge" has float32 values near 3.4e38 of
    either sign (float64 alike, 16-bit types huge or NaN).
    """
    words = torch.randint(256, (size // 4, 4), dtype=torch.uint8, generator=noise)
    if guard == "nan":
        words |= torch.tensor([0xF0, 0xFF, 0xF0, 0xFF], dtype=torch.uint8)
    else:
        words[:, 1:3] = 0x7F
        words[:, 3] |= 0x7F
    return words.flatten()


def _bytes(slot: Slot, image: Tensor) -> Tensor:
    return image[slot.offset : slot.offset + slot.size]
