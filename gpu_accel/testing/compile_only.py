"""Compile Triton and Gluon kernels for a GPU that is not there, and read what came out.

A driver that only names the target is enough for the whole pipeline down to the cubin: kernels are called through
`warmup` with CPU tensors, and ptxas and nvdisasm, which Triton brings along, tell registers, spills, shared memory and
instructions. What ptxas said is taken from Triton's own run of it, with the options that the kernel really gets. What
has been compiled is disassembled when somebody first asks for a kernel's instructions, all of it at once: nvdisasm
needs a quarter of a second to begin and next to none for a kernel. So compile first, and read afterwards. Run it in a
process of its own: the driver stays replaced, and TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_accel.errors import HardwareError, UnsupportedError
from gpu_accel.flash_attention3 import launch
from gpu_accel.testing.overwritten import lost_descriptors, overwritten_operands
from gpu_accel.testing.racing import racing_copies

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)")
_BRANCH = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?((?:BRA|BSSY|CALL)\b[^;]*?)\b(0x[0-9a-f]+) *;")
_FAULTS = ("serializ", "never used", "overwritten", "ever written")
_INSTRUCTION_SIZE = 16  # bytes, since compute capability 7.0


@dataclass(frozen=True, eq=False)
class Compiled:
    """One compiled kernel. Sizes in bytes."""

    name: str
    capability: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    num_warps: int
    ptx: str
    cubin: bytes = field(repr=False)
    ttgir: str
    remarks: tuple[str, ...]  # of ptxas, and on its barriers

    def __post_init__(self) -> None:
        _undisassembled.append(self)

    @functools.cached_property
    def sass(self) -> str:
        _disassemble()
        return self.__dict__["sass"]

    @functools.cached_property
    def instructions(self) -> Counter:
        """How often each SASS opcode occurs (without its suffixes)."""
        return Counter(_INSTRUCTION.findall(self.sass))

    @functools.cached_property
    def warnings(self) -> tuple[str, ...]:
        lost = (*overwritten_operands(self.ptx, self.sass), *lost_descriptors(self.sass))
        return (*self.remarks, *racing_copies(self.ttgir), *lost)

    @property
    def faults(self) -> tuple[str, ...]:
        """The warnings but those of ptxas on other things: products in series, barriers never used, operands lost."""
        return tuple(w for w in self.warnings if any(word in w.lower() for word in _FAULTS))

    @property
    def spills(self) -> int:
        """Bytes spilled per thread, stores and loads together."""
        return self.spill_stores + self.spill_loads

    def __str__(self) -> str:
        return (
            f"{self.name} sm_{self.capability}: {self.registers} registers, {self.spills} bytes spilled, "
            f"{self.shared} bytes shared, {self.num_warps} warps"
        )


_undisassembled: list[Compiled] = []


def code(cubin: bytes) -> bytes:
    """The machine code in an ELF file: its sections .text.*, of which a kernel of Triton has one."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<II16xQQ", cubin, table + i * size) for i in range(count)]
    text = heads[names][2]
    found = [
        cubin[offset : offset + length] for name, _, offset, length in heads if cubin.startswith(b".text.", text + name)
    ]
    return b"".join(found)


def _labelled(lines: list[str], base: int) -> str:
    """One kernel's instructions with addresses from 0, and labels where they branch to, as nvdisasm gives to an ELF."""
    branches = [_BRANCH.search(line) for line in lines]
    targets = sorted({int(found[2], 16) for found in branches if found})
    labels = {target: f".L_x_{i}" for i, target in enumerate(targets)}
    out = []
    for i, (line, branch) in enumerate(zip(lines, branches, strict=True)):
        address = i * _INSTRUCTION_SIZE
        if address + base in labels:
            out.append(f"{labels[address + base]}:")
        if branch:
            line = f"{line[: branch.start(2)]}`({labels[int(branch[2], 16)]}){line[branch.end(2) :]}"
        out.append(re.sub(r"(?<=/\*)[0-9a-f]+(?=\*/)", f"{address:04x}", line, count=1))
    return "\n".join(out)


def _disassemble() -> None:
    """Give each kernel that waits for it its `sass`, with one run of nvdisasm for each compute capability."""
    for capability in {kernel.capability for kernel in _undisassembled}:
        kernels = [kernel for kernel in _undisassembled if kernel.capability == capability]
        codes = [code(kernel.cubin) for kernel in kernels]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernels.bin")
            file.write_bytes(b"".join(codes))
            command = [_nvdisasm(capability), "-c", "-b", f"SM{capability}", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]
        sizes = [len(one) // _INSTRUCTION_SIZE for one in codes]
        if len(lines) != sum(sizes):
            raise RuntimeError(f"nvdisasm shows {len(lines)} instructions of {sum(sizes)}")
        for kernel, size, end in zip(kernels, sizes, itertools.accumulate(sizes), strict=True):
            kernel.__dict__["sass"] = _labelled(lines[end - size : end], (end - size) * _INSTRUCTION_SIZE)
    _undisassembled.clear()


def idle_barriers(ttgir: str) -> list[str]:
    """Names of mbarriers that are initialised, perhaps arrived at, and nothing else.

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
                    used[of[name]].add(not re.search(r"\bttng\.(init|arrive)_barrier\b", line))
    return [name for name, uses in used.items() if uses == {False}]


def _ptxas(capability: int) -> str:
    """The ptxas that this Triton itself uses for `capability`: it brings two, and which is whose has changed."""
    from triton.backends.nvidia import compiler

    return compiler.get_ptxas(capability).path


def _nvdisasm(capability: int) -> str:
    """The nvdisasm beside ptxas. Triton knows one too, but asks it for its version first: a quarter of a second."""
    beside = Path(_ptxas(capability)).with_name("nvdisasm")
    if beside.is_file():
        return str(beside)
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
    launch._target = divmod(capability, 10)


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
    ptx = kernel.asm["ptx"]
    if log is None:
        log = _assembled(ptx, name, capability)
    ttgir = kernel.asm.get("ttgir", "")
    # C7512 and its like: "wgmma serialized", silent in Triton and up to three times slower
    remarks = [line for line in log.splitlines() if "warning" in line.lower() or "serializ" in line.lower()]
    remarks += [f"barrier {barrier} is initialised and never used" for barrier in idle_barriers(ttgir)]

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
        ptx=ptx,
        cubin=kernel.asm["cubin"],
        ttgir=ttgir,
        remarks=tuple(remarks),
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
    kept = triton.runtime.cache.get_cache_manager(kernel.hash)
    if "Used " in log:
        kept.put(log, "ptxas.log", binary=False)
    elif file := kept.get_file("ptxas.log"):  # the kernel is out of Triton's cache
        log = Path(file).read_text()
    return inspect(kernel, name, capability, log or None)
