"""Candidates as machine code: Triton and CUDA C++ to cubins for one GPU, without needing that GPU.

A Triton kernel is compiled once for each set of constants and each pattern of sizes and pointers that are multiples of
16, as Triton's own launcher would, but sizes of 1 stay arguments. CUDA C++ gets its constants as `#define`s in front
of the source and goes through NVRTC. Either way the result is a `Binary` that `device.py` loads and launches: no host
code of a candidate, and none that is generated for it, runs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """Machine code of one kernel and what its launch needs.

    Args:
        shared: bytes that the launch must ask for; of CUDA C++ the dynamic ones only.
        scratch: bytes of global memory a block that Triton's compiler wants for itself, such as for TMA descriptors.
        barriers: whether it waits at mbarriers, as copies by TMA do.
        then: of the kernels that follow.
    """

    cubin: bytes
    entry: str
    threads: tuple[int, int, int]
    shared: int
    compiler: str
    scratch: int = 0
    barriers: bool = False
    then: tuple[Binary, ...] = ()

    @property
    def passes(self) -> tuple[Binary, ...]:
        """All kernels, in order."""
        return (self, *self.then)


TENSOR_TYPES = ("fp8", "int8", "fp16", "bf16", "tf32", "fp64")  # of operands
_TENSOR = re.compile(r"\b([HQID]G?MMA)\.([\w.]+)")
_BY_NAME = {"Q": "fp8", "I": "int8", "D": "fp64", "H": "fp16"}


def tensor_types(cubin: bytes) -> list[str]:
    """The types that a kernel's machine code multiplies on tensor cores; none if it leaves them alone.

    Raises:
        HardwareError: no disassembler here. RuntimeError: it does not take the code.
    """
    from gpu_accel.hardware.microbenchmarks.compile import disassemble

    return tensor_types_of(disassemble(cubin))


def tensor_types_of(sass: str) -> list[str]:
    """The same, of the disassembly."""
    found = set()
    for name, suffix in _TENSOR.findall(sass):
        parts = suffix.split(".")
        found.add("tf32" if "TF32" in parts else "bf16" if "BF16" in parts else _BY_NAME[name[0]])
    return [one for one in TENSOR_TYPES if one in found]


def triton_key(trial: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for trials that one compilation serves."""
    buffers = {slot["name"] for slot in trial["buffers"]}
    sizes = [name for name in trial["arguments"] if name not in buffers and name not in trial["constants"]]
    pattern = tuple((name, trial["scalars"][name] % 16 == 0, _int_type(trial["scalars"][name])) for name in sizes)
    return (tuple(sorted(trial["constants"].items())), pattern, trial["num_warps"], trial["num_stages"])


def _int_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_triton(path: Path, name: str, trial: Mapping[str, Any], capability: int) -> Binary:
    """Compile the kernel `name` of a file whose source passed `triton_source.canonical`.

    Args:
        trial: arguments, constants, buffers, scalars, num_warps and num_stages of a launch.
        capability: such as 90.
    Raises:
        Exception: whatever Triton raises for a kernel that it does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load(path, name)
    dtypes = {slot["name"]: slot["dtype"] for slot in trial["buffers"]}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, argument in enumerate(trial["arguments"]):
        if argument in trial["constants"]:
            signature[argument] = "constexpr"
            constants[(position,)] = trial["constants"][argument]
            continue
        if argument in dtypes:
            signature[argument] = "*" + _TYPES[dtypes[argument]]
            aligned = True  # buffers start at multiples of a page
        else:
            signature[argument] = _int_type(trial["scalars"][argument])
            aligned = trial["scalars"][argument] % 16 == 0
        if aligned:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": trial["num_warps"], "num_stages": trial["num_stages"]}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Binary(
        cubin=kernel.asm["cubin"], entry=kernel.metadata.name, threads=(trial["num_warps"] * 32, 1, 1),
        shared=kernel.metadata.shared, compiler=f"triton {triton.__version__}",
        scratch=getattr(kernel.metadata, "global_scratch_size", 0), barriers="mbarrier" in kernel.asm["ptx"],
    )  # fmt: skip


def load(path: Path, name: str) -> Any:
    """The kernel called `name` of a module."""
    spec = importlib.util.spec_from_file_location("candidate_kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def with_defines(source: str, constants: Mapping[str, Any]) -> str:
    """CUDA C++ with its constants in front; line numbers of messages stay those of the candidate."""
    lines = [f"#define {name} {_literal(value)}" for name, value in constants.items()]
    return "\n".join([*lines, "#line 1", source]) if lines else source


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value!r}f" if isinstance(value, float) else f"({value})" if value < 0 else str(value)


def ptx_of(source: str, trial: Mapping[str, Any]) -> str:
    """The PTX of CUDA C++ with the constants of a launch.

    Raises:
        RuntimeError: it does not compile. UnsupportedError: no NVRTC here.
    """
    from gpu_accel.hardware.microbenchmarks.compile import ptx

    return ptx(with_defines(source, trial["constants"]))


def compile_cuda(source: str, entry: str, trial: Mapping[str, Any]) -> Binary:
    """Compile CUDA C++ through NVRTC for Hopper, with the constants of a launch.

    Raises:
        RuntimeError: it does not compile, or has no kernel of that name.
        UnsupportedError: no NVRTC here.
    """
    from gpu_accel.hardware.microbenchmarks.compile import build

    built = build(with_defines(source, trial["constants"]))
    if entry not in built.functions:
        raise RuntimeError(f'no kernel {entry} in the machine code; declare it extern "C"')
    block = tuple(trial["block"]) + (1,) * (3 - len(trial["block"]))
    return Binary(
        cubin=built.cubin, entry=entry, threads=block, shared=trial["shared"], compiler=built.compiler,
        barriers="mbarrier" in source,
    )  # fmt: skip
