"""The tasks: kernels to write, each with inputs, a float64 oracle, baselines and the least work."""

from __future__ import annotations

import dataclasses

from gpu_accel.errors import InvalidInputError, shown

from . import convolving, moving, pointwise, products, reducing, rowwise, sparse
from .task import FAMILIES, Buffer, Task, Truth

_WIDE, _ROW = ({"BLOCK": 1024}, {"BLOCK": 2048, "num_warps": 8}), ({"num_warps": 8}, {"num_warps": 16})
_READ = ({"STREAM": 1}, {"num_warps": 8, "STREAM": 1})
_PRIORS: dict[str, tuple[dict[str, int], ...]] = {
    "matrix_copy": ({"BLOCK": 512}, {"BLOCK": 2048, "num_warps": 8}), "reverse": ({"BLOCK": 1024},),
    "transpose": ({"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8},), "bias_gelu": _WIDE, "sigmoid": ({"BLOCK": 1024},),
    "relu": ({"BLOCK": 1024},), "swiglu": ({"BLOCK": 1024},), "embedding": ({"BLOCK": 1024}, {"BLOCK": 512}),
    "scan": _ROW, "softmax": _ROW, "layernorm": _ROW, "cross_entropy": _READ, "residual_rmsnorm": _ROW, "argmax": _READ,
    "ols": _READ, "matvec": ({"BLOCK": 4096, "num_warps": 8, "STREAM": 1}, {"BLOCK": 1024}), "conv1d": _WIDE,
}  # fmt: skip
_MODULES = (moving, pointwise, reducing, rowwise, products, convolving, sparse)
TASKS: dict[str, Task] = {
    one.name: dataclasses.replace(one, priors=_PRIORS.get(one.name, ())) for module in _MODULES for one in module.TASKS
}

__all__ = ["FAMILIES", "TASKS", "Buffer", "Task", "Truth", "find"]


def find(name: str) -> Task:
    """The task called `name`.

    Raises:
        InvalidInputError: there is none; the message lists them.
    """
    if not isinstance(name, str) or name not in TASKS:
        raise InvalidInputError(f"there is no task {shown(name, 40)}; choose one of {', '.join(TASKS)}")
    return TASKS[name]
