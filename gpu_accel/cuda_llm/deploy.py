"""A kernel that a search found, as a function of torch tensors.

    softmax = deploy(best.candidate, "softmax")
    out = softmax(x=torch.randn(8192, 4096, device="cuda"))["out"]

It is compiled for the sizes that it meets, once each, and launched on torch's current stream. Sizes follow from the
inputs' shapes; those that no input has (the bins of a histogram) are given by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import check_strided

from .candidate import Candidate
from .compiled import compile_cuda, compile_triton, triton_key
from .gpu_jobs import HIDDEN
from .harness import Program, bind
from .image import Slot
from .launch import evaluate
from .tasks import Task, find
from .tasks.task import Dims
from .verdict import Rejected


def dims_of(task: Task, inputs: dict[str, Tensor], given: dict[str, int]) -> Dims:
    """The task's sizes, from shapes and from what is given.

    Raises:
        InvalidInputError: an input is missing or has another shape or dtype, or a size does not follow or is none.
        UnsupportedError: a gradient is wanted, or an input is no plain memory.
    """
    dims: Dims = dict(given)
    if wrong := [name for name in given if name not in task.dims]:
        raise InvalidInputError(f"{task.name} has no size {shown(wrong[0], 40)}; it has {', '.join(task.dims)}")
    if wrong := [name for name, size in given.items() if type(size) is not int or not 0 <= size < 2**31]:
        raise InvalidInputError(f"{wrong[0]} is {shown(given[wrong[0]], 40)}; a size is an integer from 0 to 2**31 - 1")
    for one in task.inputs:
        x = inputs.get(one.name)
        if x is None:
            raise InvalidInputError(f"{task.name} needs the input {one.name}")
        check_strided(one.name, x)
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(f"a kernel has no gradient, and {one.name} wants one: detach() it")
        if x.dim() != len(one.shape) or x.dtype is not getattr(torch, one.dtype) or not x.is_contiguous():
            shape = ", ".join(map(str, one.shape))
            raise InvalidInputError(f"{one.name} must be a contiguous {one.dtype} tensor of shape ({shape})")
        for name, size in zip(one.shape, x.shape, strict=True):
            if isinstance(name, str) and name in task.dims:
                dims.setdefault(name, size)
    if missing := [name for name in task.dims if name not in dims]:
        raise InvalidInputError(f"give the size {missing[0]} by name; it does not follow from the inputs' shapes")
    for one in task.inputs:
        if tuple(inputs[one.name].shape) != one.sizes(dims):
            raise InvalidInputError(f"{one.name} has the shape {tuple(inputs[one.name].shape)}, not {one.sizes(dims)}")
    return dims


def deploy(kernel: Candidate | str | bytes, task: Task | str) -> Callable[..., dict[str, Tensor]]:
    """A function (inputs and sizes by name) -> outputs by name.

    What numbers mean is the caller's: an index beyond its array, or a bin beyond `bins`, is foreign memory.

    Raises:
        InvalidInputError: the kernel is no candidate, or none of this task. At a call: inputs that do not fit.
        HardwareError: at a call, without a GPU.
    """
    chosen = find(task) if isinstance(task, str) else task
    try:
        candidate = kernel if isinstance(kernel, Candidate) else Candidate.parse(kernel)
        program = Program.of(candidate)
        bind(program, candidate.launch, chosen)
    except Rejected as rejected:
        raise InvalidInputError(f"this is no candidate for {chosen.name}: {rejected.detail}") from rejected
    launch = candidate.launch
    modules: dict[Any, Any] = {}

    def call(**given: Any) -> dict[str, Tensor]:
        inputs = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        dims = dims_of(chosen, inputs, {name: size for name, size in given.items() if name not in inputs})
        if not all(x.is_cuda for x in inputs.values()):
            raise HardwareError("a deployed kernel runs on a GPU; its inputs are elsewhere")
        here = torch.cuda.current_device()
        if elsewhere := [name for name, x in inputs.items() if x.device.index != here]:
            raise InvalidInputError(f"{elsewhere[0]} is on {inputs[elsewhere[0]].device}, and the current GPU is "
                                    f"{here}: call it under torch.cuda.device")  # fmt: skip
        _, constants = launch.resolve(dims)
        buffers = dict(inputs)
        for one in chosen.outputs:
            buffers[one.name] = torch.empty(one.sizes(dims), dtype=getattr(torch, one.dtype), device="cuda")
            if one.name in launch.fill:
                buffers[one.name].fill_(launch.fill[one.name])
        sizes = dims | {name: value for name, value in constants.items() if type(value) is int}
        for name, space in launch.workspace.items():
            shape = tuple(evaluate(size, sizes) for size in space.shape)
            buffers[name] = torch.full(shape, space.fill or 0.0, dtype=getattr(torch, space.dtype), device="cuda")
        for part, how in zip(program.passes, launch.passes, strict=True):
            grid, _ = how.resolve(dims)
            if 0 in grid:
                continue
            trial = {
                "language": part.language, "constants": constants, "scalars": dims, "arguments": part.parameters,
                "num_warps": how.num_warps, "num_stages": how.num_stages,
                "buffers": [Slot(name, "", str(x.dtype).removeprefix("torch."), (), 0, 0).as_dict()
                            for name, x in buffers.items()],
            }  # fmt: skip
            if part.language == "cuda":
                trial["block"], trial["shared"] = how.threads(dims, constants)
            key = triton_key(trial) if part.language == "triton" else (tuple(constants.items()), trial["shared"])
            key = (here, key)  # a module belongs to the GPU that it was loaded on
            if (part.entry, key) not in modules:
                modules[part.entry, key] = _module(part, trial)
            values = [
                buffers[name].data_ptr() if name in buffers else dims[name]
                for name in part.parameters
                if part.language == "cuda" or name not in constants
            ]
            modules[part.entry, key].launcher(grid, values, hidden=HIDDEN if part.language == "triton" else 0)()
        return {one.name: buffers[one.name] for one in chosen.outputs}

    return call


def _module(program: Program, trial: dict[str, Any]) -> Any:
    from .device import Module

    if program.language == "cuda":
        return Module(compile_cuda(program.source, program.entry, trial))
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.py")
        file.write_text(program.source, encoding="utf-8")
        return Module(compile_triton(file, program.entry, trial, 10 * major + minor))
