"""CUDA C++ to machine code and its disassembly, without nvcc and without a GPU.

NVRTC is a library of NVIDIA's pip packages; the disassembler is the nvdisasm that Triton brings along, or the one on
PATH. A source is compiled once: what comes out is kept for the life of the process, and on disk in
$GPU_ACCEL_CACHE, or gpu-accel/ in the user's cache folder, under a name made of source, target and compiler version.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_accel.errors import HardwareError, UnsupportedError

from .sass import Function, parse

ARCHITECTURE = "sm_90a"
CACHE_VARIABLE = "GPU_ACCEL_CACHE"
INSTALL = "pip install 'gpu-accel[microbenchmarks]', or pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"


@dataclass(frozen=True)
class Binary:
    """A compiled source: the cubin and what is in it."""

    cubin: bytes
    sass: str
    functions: dict[str, Function]
    compiler: str  # "nvrtc 13.0"

    @property
    def digest(self) -> str:
        """Identifies the machine code: the same in every run of the same compiler."""
        return hashlib.sha256(self.sass.encode()).hexdigest()[:16]


def missing() -> str:
    """Why microbenchmarks cannot be compiled here, with the remedy; "" when they can."""
    try:
        _nvrtc()
        nvdisasm()
    except (UnsupportedError, HardwareError) as error:
        return str(error)
    return ""


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise UnsupportedError(f"kernels in CUDA C++ need NVRTC's Python bindings ({error}): {INSTALL}") from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library itself is not there
        raise UnsupportedError(f"NVRTC does not load ({error}): {INSTALL}") from error
    return nvrtc


@functools.cache
def nvdisasm() -> str:
    """Path of the disassembler.

    Raises:
        HardwareError: neither Triton's nor one on PATH exists.
    """
    import importlib.util

    spec = importlib.util.find_spec("triton")
    for place in spec.submodule_search_locations or () if spec else ():
        own = Path(place) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if own.is_file() and os.access(own, os.X_OK):
            return str(own)
    if found := shutil.which("nvdisasm"):
        return found
    raise HardwareError(
        "no nvdisasm: the kernels' machine code is checked before they are timed. Triton's wheel for Linux has one; "
        "otherwise put that of the CUDA toolkit on PATH"
    )


def build(source: str) -> Binary:
    """Compile a source for Hopper and disassemble it.

    Raises:
        UnsupportedError: NVRTC is not installed. HardwareError: there is no disassembler.
        RuntimeError: the source does not compile; the message is the compiler's log.
    """
    return _build(source)


@functools.cache
def _build(source: str) -> Binary:
    compiler = _compiler()
    place = _cache(source, compiler)
    if (kept := _read(place)) is None:
        if (kept := _compiled.get(source)) is None:
            cubin = _compile(_nvrtc(), source)
            kept = cubin, disassemble(cubin)
        _write(place, *kept)
    return Binary(cubin=kept[0], sass=kept[1], functions=parse(kept[1]), compiler=compiler)


def _compiler() -> str:
    nvrtc = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _require(nvrtc, status)
    return f"nvrtc {major}.{minor}"


def ptx(source: str) -> str:
    """The PTX of a source, which takes a fraction of what its machine code takes.

    Raises:
        UnsupportedError: NVRTC is not installed.
        RuntimeError: the source does not compile; the message is the compiler's log.
    """
    return _compile(_nvrtc(), source, "PTX").decode().rstrip("\0 ")


def _compile(nvrtc: Any, source: str, what: str = "CUBIN") -> bytes:
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"microbenchmark.cu", 0, [], [])
    _require(nvrtc, status)
    target = ARCHITECTURE if what == "CUBIN" else ARCHITECTURE.replace("sm", "compute")
    try:
        options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.decode(errors='replace').strip(chr(0))}")
        status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        _require(nvrtc, status)
        made = b" " * size
        _require(nvrtc, *getattr(nvrtc, f"nvrtcGet{what}")(program, made))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return made


def disassemble(cubin: bytes) -> str:
    """The text of `nvdisasm -c -hex` of machine code.

    Raises:
        HardwareError: there is no disassembler. RuntimeError: it does not take the code.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Dataflow analysis only serves indirect branches, of which there are none, and takes most of the time.
        command = [nvdisasm(), "-c", "-hex", "-ndf", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _cache(source: str, compiler: str) -> Path:
    """Where a source's machine code lies, without a suffix."""
    folder = os.environ.get(CACHE_VARIABLE) or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpu-accel"
    )
    name = hashlib.sha256("\0".join((source, ARCHITECTURE, compiler)).encode()).hexdigest()
    return Path(folder) / f"{name[:40]}.gz"


def _read(place: Path) -> tuple[bytes, str] | None:
    """(cubin, disassembly), or None where nothing usable lies."""
    try:
        data = gzip.decompress(place.read_bytes())
        size = int.from_bytes(data[:8], "little")
        cubin, sass = data[8 : 8 + size], data[8 + size :].decode()
    except (OSError, EOFError, ValueError, zlib.error):  # not there, cut short, or somebody else's
        return None
    return (cubin, sass) if cubin and sass else None  # an empty file decompresses well


def _write(place: Path, cubin: bytes, sass: str) -> None:
    """Keep it, if the folder can be written; a file appears whole or not at all."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(gzip.compress(len(cubin).to_bytes(8, "little") + cubin + sass.encode(), 6))
        try:
            os.replace(file.name, place)
        except OSError:
            os.unlink(file.name)


def _require(nvrtc: Any, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")


def build_all(sources: Iterable[str], workers: int | None = None) -> None:
    """Compile sources side by side, so that later calls of `build` find them ready.

    NVRTC compiles one source at a time in a process, so each worker is a process of its own.
    """
    todo = [source for source in dict.fromkeys(sources) if not _is_ready(source)]
    workers = min(len(todo), workers or min(16, os.cpu_count() or 1))
    if workers > 1:
        todo.sort(key=len, reverse=True)  # dealt out like cards, long ones first
        with ThreadPoolExecutor(workers) as pool:
            for ready in pool.map(_in_another_process, [todo[first::workers] for first in range(workers)]):
                _compiled.update(ready)
    for source in todo:  # those that no worker returned fail here, with their error
        build(source)


_compiled: dict[str, tuple[bytes, str]] = {}  # what workers made


def _is_ready(source: str) -> bool:
    return source in _compiled or _read(_cache(source, _compiler())) is not None


def _in_another_process(sources: list[str]) -> dict[str, tuple[bytes, str]]:
    """(cubin, disassembly) of what a worker could compile; its errors show again in `build`."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", f"from {__name__} import _work; _work()"]
    done = subprocess.run(
        command, input=pickle.dumps(sources), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    return pickle.loads(done.stdout) if done.returncode == 0 else {}


def _work() -> None:
    """What a worker does: sources from stdin, what became of them to stdout."""
    nvrtc, made = _nvrtc(), {}
    for source in pickle.load(sys.stdin.buffer):
        with contextlib.suppress(RuntimeError):
            cubin = _compile(nvrtc, source)
            made[source] = cubin, disassemble(cubin)
    pickle.dump(made, sys.stdout.buffer)
