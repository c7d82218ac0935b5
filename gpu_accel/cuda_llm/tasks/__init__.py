"""The tasks: kernels to write, each with inputs, a float64 oracle, baselines and the least work."""

from __future__ import annotations

from gpu_accel.errors import InvalidInputError

from . import moving, pointwise, products, reducing, rowwise, sparse
from .task import FAMILIES, Buffer, Task, Truth

_MODULES = (moving, pointwise, reducing, rowwise, products, sparse)
TASKS: dict[str, Task] = {one.name: one for module in _MODULES for one in module.TASKS}

__all__ = ["FAMILIES", "TASKS", "Buffer", "Task", "Truth", "find"]


def find(name: str) -> Task:
    """The task called `name`.

    Raises:
        InvalidInputError: there is none; the message lists them.
    """
    if name not in TASKS:
        raise InvalidInputError(f"there is no task {name!r:.40}; choose one of {', '.join(TASKS)}")
    return TASKS[name]
