"""Compile Triton and Gluon kernels for a GPU that is not there, and read what came out.

A driver that only names the target is enough for the whole pipeline down to the cubin: kernels are called through
`warmup` with CPU tensors, and ptxas and nvdisasm, which Triton brings along, tell registers, spills, shared memory and
instructions. What ptxas said is taken from Triton's own run of it, with the options that the kernel really gets. Run it
in a process of its own: the driver stays replaced, and TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_accel.errors import HardwareError, UnsupportedError
from gpu_accel.testing.overwritten import overwritten_operands

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel. Sizes in bytes; `instructions` counts SASS opcodes (without their suffixes)."""

    name: str
    capability: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    num_warps: int
    instructions: Counter
    ptx: str
    sass: str
    ttgir: str
    warnings: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Bytes spilled per thread, stores and loads together."""
        return self.spill_stores + self.spill_loads

    def __str__(self) -> str:
        return (
            f"{self.name} sm_{self.capability}: {self.registers} registers, {self.spills} bytes spilled, "
            f"{self.shared} bytes shared, {self.num_warps} warps"
        )


def idle_barriers(ttgir: str) -> list[str]:
    """Names of mbarriers that are initialised and nothing else.

    To the compiler they are dead from there on, and it gives their memory to others. But what has been an mbarrier must
    not be used for anything else before it is invalidated: on GPUs that processes share by time slices, 16 bytes of
    float32 sums came out as the words of a barrier.
    """
    of: dict[str, str] = {}  # a view of a barrier -> the barrier
    used: dict[str, set[bool]] = {}
    for line in ttgir.splitlines():
        names = re.findall(r"%[\w.$-]+(?:#\d+)?", line)
        if made := re.match(r"\s*(%[\w.$-]+) = ttg\.local_alloc\b.*memdesc<[\dx]*xi64\b", line):
            of[made[1]] = made[1]
            used[made[1]] = set()
        elif len(names) > 1 and " = ttg.memdesc_" in line and names[1] in of:
            of[names[0]] = of[names[1]]
        else:
            for name in names:
                if name in of:
                    used[of[name]].add("init_barrier" not in line)
    return [name for name, uses in used.items() if uses == {False}]


def _ptxas(capability: int) -> str:
    """The ptxas that this Triton itself uses for `capability`: it brings two, and which is whose has changed."""
    from triton.backends.nvidia import compiler

    return compiler.get_ptxas(capability).path


def _nvdisasm() -> str:
    import triton

    return triton.knobs.nvidia.nvdisasm.path


def use_target(capability: int) -> None:
    """Make Triton compile for compute capability `capability` (80, 90, 100 ...) in this process from now on."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        raise HardwareError("compile-only needs the compiler: unset TRITON_INTERPRET and use a fresh process")

    class NamesOnly:
        """What the compiler asks of a driver."""

        launcher_cls = None

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_device_interface(self):
            return torch.cuda

        def get_benchmarker(self):
            return None

        def map_python_to_cpp_type(self, kind):
            return kind

    triton.runtime.driver.set_active(NamesOnly())


def _architecture(ptx: str, capability: int) -> str:
    found = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    return found.group(1) if found else f"sm_{capability}"


def _assembled(ptx: str, name: str, capability: int) -> str:
    """What ptxas says of `ptx`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        architecture = f"-arch={_architecture(ptx, capability)}"
        command = [_ptxas(capability), "-v", architecture, str(file), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(f"{name}: ptxas failed: {done.stderr[-2000:]}")
    return done.stderr


def inspect(kernel: Any, name: str, capability: int, log: str | None = None) -> Compiled:
    """Registers, spills and instructions of what `kernel.warmup(...)` returned; `log` is what ptxas said, if known."""
    ptx, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
    if log is None:
        log = _assembled(ptx, name, capability)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        # without the analysis of data flow, which only names the targets of indirect branches and takes a quarter more
        sass = subprocess.run([_nvdisasm(), "-c", "-ndf", str(file)], capture_output=True, text=True).stdout

    ttgir = kernel.asm.get("ttgir", "")
    # C7512 and its like: "wgmma serialized", silent in Triton and up to three times slower
    warnings = [line for line in log.splitlines() if "warning" in line.lower() or "serializ" in line.lower()]
    warnings += [f"barrier {barrier} is initialised and never used" for barrier in idle_barriers(ttgir)]
    warnings += overwritten_operands(ptx, sass)

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Compiled(
        name=name,
        capability=capability,
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        instructions=Counter(_INSTRUCTION.findall(sass)),
        ptx=ptx,
        sass=sass,
        ttgir=ttgir,
        warnings=tuple(warnings),
    )


def compile_only(kernel: Any, arguments: tuple, options: dict[str, Any], *, name: str, capability: int) -> Compiled:
    """Compile a `@triton.jit` (or Gluon) kernel with these arguments for `capability`, without a GPU.

    Args:
        arguments, options: as in a launch, `num_warps` and constexprs included; tensors may live on the CPU.

    Raises:
        HardwareError: the interpreter is on. UnsupportedError: ptxas refuses the kernel.
    """
    import triton

    use_target(capability)
    printed = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(printed):
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = kernel.warmup(*arguments, grid=(1,), **options)
    log = printed.getvalue()
    # a kernel out of Triton's cache has met ptxas before, in another process
    return inspect(kernel, name, capability, log if "ptxas info" in log else None)
