"""The process in which candidates run: `python -m gpu_accel.cuda_llm.worker`, started by `sandbox.Sandbox`.

It imports what kernels need once, then forks for every job that it reads from stdin, so a candidate gets a process of
its own within milliseconds. The fork gives up what it does not need (files, network, user id, resources), then imports
the kernel and runs it. It knows neither expected results nor how they are judged, and what it writes is judged by the
controller as untrusted bytes. The parent of the fork, which never runs candidate code, kills it when its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from gpu_accel.cuda_llm import host_jobs, landlock, seccomp
from gpu_accel.cuda_llm.verdict import Rejected

NOBODY = 65534
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES, _SIGNAL_OF_PARENT = 38, 1  # of prctl
MIB = 1 << 20

# Beside CUDA too, as on an H200 the harness has been run behind both. Where CUDA does not start behind them they are
# left out, and the level says so.
SECCOMP_ON_GPU, LANDLOCK_ON_GPU = True, True
DEVICES = ("/dev/null", "/dev/zero")
# CUDA opens its devices for writing, and threads give themselves names in /proc/self/task/*/comm, which they open with
# O_TRUNC: without that right it does not start (error 304). What compute-sanitizer starts has another /proc/self.
CUDA_WRITES, TOOL_WRITES = ("/dev", "/proc/self"), ("/dev", "/proc")


def main() -> None:
    """Serve jobs until stdin ends."""
    import torch  # noqa: F401  (imported here so that every fork has it)
    import triton.language  # noqa: F401

    gpu = os.environ.get("GPU_ACCEL_SANDBOX_GPU") == "1"
    if gpu:
        _import_for_gpu()
    else:
        _warm_up()
    with contextlib.suppress(ImportError):  # CUDA sources then end as unverified, with the reason
        from cuda.bindings import nvrtc  # noqa: F401

        import gpu_accel.hardware.microbenchmarks.compile  # noqa: F401
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_supervise(json.loads(line))), flush=True)


def _import_for_gpu() -> None:
    """What jobs on a GPU use; a fork may not be able to read the files. Nothing here makes a context."""
    import triton.backends.compiler
    import triton.compiler  # noqa: F401
    from triton.backends import backends  # noqa: F401

    import gpu_accel.cuda_llm.device
    import gpu_accel.cuda_llm.gpu_jobs
    import gpu_accel.cuda_llm.image
    import gpu_accel.cuda_llm.tasks
    import gpu_accel.workbench.timing  # noqa: F401


def _warm_up() -> None:
    """Run a kernel of ours once: the interpreter imports lazily, and a fork may not be able to read the files."""
    from gpu_accel.cuda_llm import warm

    warm.mend_dot()
    warm.run()


def _supervise(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, kill: how the fork ended."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            code = _child(job)
        finally:
            os._exit(code)
    deadline, pause = start + job["seconds"], 0.001
    timed_out = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if not timed_out and time.monotonic() > deadline:
            timed_out = True
            _kill(pid)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    _kill_group(pid)  # whatever it started
    return {
        "timed_out": timed_out,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "seconds": time.monotonic() - start,
        "peak_kib": usage.ru_maxrss,
    }


def _kill(pid: int) -> None:
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _child(job: dict[str, Any]) -> int:
    os.setsid()
    folder = Path(job["folder"])
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 4096)
    job["lock_descriptor"] = os.open(job["lock"], os.O_RDONLY) if job.get("lock") else None
    os.chdir(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["GPU_ACCEL_CACHE"] = str(folder / "compiled")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # the worker may have asked for it before
    level = confine(job)
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGKILL, 0, 0, 0)  # after the user id: a change of it undoes this
    if job["what"] == "probe":
        cuda = _start_cuda() if os.environ.get("GPU_ACCEL_SANDBOX_GPU") == "1" else 0
        (folder / "result.json").write_text(json.dumps({"level": level, "cuda": cuda}))
        return 0
    try:
        result = _JOBS[job["what"]](job, folder)
    except Rejected as rejected:  # for what a compiler made of the source; nothing of the candidate has run
        result = {"error": "refused", "kind": rejected.kind, "message": rejected.detail}
    except BaseException as error:  # of whatever kind: it becomes one line, and the process ends
        result = {"error": _class_of(error), "message": _message(error)}
    text = json.dumps(result)
    (folder / "result.json").write_text(text)
    return 0


def _start_cuda() -> int:
    """The driver's error, 0 for none; in a process that ends afterwards."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return 0  # no driver: whoever needs it says so


def confine(job: dict[str, Any]) -> dict[str, str]:
    """Give up what a kernel does not need; returns what was reached, in words."""
    level = {"process": "own process and group, killed at the deadline"}
    libc = ctypes.CDLL(None, use_errno=True)
    root, caller = os.geteuid() == 0, os.getuid()
    cut = libc.unshare(_NEW_NET) == 0 if root else libc.unshare(_NEW_USER | _NEW_NET) == 0
    level["network"] = "none (namespace)" if cut else "not cut: the system refuses namespaces"
    if cut and job["what"] == "sanitize":
        _raise_loopback()  # compute-sanitizer and what it watches speak through it
    seconds = math.ceil(job["seconds"]) + 1
    limits = {
        "CPU": (seconds, f"{seconds} s"),
        "FSIZE": (job["file_mib"] * MIB, f"{job['file_mib']} MiB a file"),
        "CORE": (0, ""),
        "NOFILE": (256, "256 open files"),
    }
    if job["memory_mib"]:  # not with CUDA, which reserves far more addresses than it uses
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits["AS"] = (pages * resource.getpagesize() + job["memory_mib"] * MIB, f"{job['memory_mib']} MiB more")
    if root:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            level["user"] = f"uid {NOBODY}"
        except OSError as error:
            level["user"] = f"still root: {error.strerror}"
    else:
        level["user"] = f"uid of the caller, {caller}"
    limits["NPROC"] = (job["processes"], f"{job['processes']} processes of that user")
    for name, (value, _) in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    level["limits"] = ", ".join(words for _, words in limits.values() if words)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0:
        level["privileges"] = "none to gain"
    gpu, tool = os.environ.get("GPU_ACCEL_SANDBOX_GPU") == "1", job["what"] == "sanitize"
    without = str(job.get("without") or "")  # why walls that CUDA may not start behind are left out, if they are
    if gpu and (tool or without or not SECCOMP_ON_GPU):  # compute-sanitizer looks into the process that it watches
        level["calls"] = f"none refused: {without or 'switched off'}"
    else:
        level["calls"] = seccomp.restrict() + (", except beside compute-sanitizer" if gpu else "")
    if gpu and (without or not LANDLOCK_ON_GPU):
        level["files"] = f"not held to its folder: {without or 'switched off'}"
    else:
        also = (TOOL_WRITES if tool else CUDA_WRITES) if gpu else DEVICES
        level["files"] = landlock.restrict(Path(job["folder"]), also=also, connections=tool)
    return level


def _raise_loopback() -> None:
    """Switch on the loopback device of this process' own network, which leads nowhere else."""
    up_and_running, set_flags = 0x1 | 0x40, 0x8914
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, set_flags, struct.pack("16sH14x", b"lo", up_and_running))


def _class_of(error: BaseException) -> str:
    """The kind of an error, through the interpreter's wrapper."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or "OutOfMemory" in type(seen).__name__:
            return "oom"
        if "CUDA error" in str(seen) or "illegal memory access" in str(seen):
            return "crash"
        # A candidate opens and imports nothing: such errors are the machine's, as of files this user id cannot read.
        if isinstance(seen, OSError | ImportError) or type(seen).__name__ in ("UnsupportedError", "HardwareError"):
            return "unavailable"
        seen = seen.__cause__ or seen.__context__
    return "compile"


def _message(error: BaseException) -> str:
    last = error
    while last.__cause__ is not None:
        last = last.__cause__
    text = " ".join("".join(traceback.format_exception_only(last)).split())
    return text[:2000]


def _compile_cuda(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from gpu_accel.hardware.microbenchmarks.compile import build

    from . import cuda_source
    from .compiled import ptx_of, with_defines

    source = (folder / "kernel.cu").read_text(encoding="utf-8")
    cuda_source.check_ptx(ptx_of(source, job))
    binary = build(with_defines(source, job["constants"]))
    return {"compiler": binary.compiler, "functions": sorted(binary.functions)}


def _run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Launch once on each image, in order, and write each back whole."""
    if job["device"] == "cuda":
        from . import gpu_jobs

        return gpu_jobs.run(job, folder)
    from .compiled import load

    kernels: dict[str, Any] = {}
    for number, trial in enumerate(job["trials"]):
        image = _load(folder, number)
        for one in (trial, *trial.get("then", ())):
            name = one.get("entry", job["name"])
            if name not in kernels:
                kernels[name] = load(folder / "kernel.py", name)
            _interpret(kernels[name], one, image)
        (folder / f"out{number}.bin").write_bytes(memoryview(image.numpy()))
    return {"ran": len(job["trials"])}


def _interpret(kernel: Any, trial: dict[str, Any], image: Any) -> None:
    """Run the kernel on an image in Triton's interpreter."""
    import torch

    if math.prod(trial["grid"]) == 0:
        return
    arguments: dict[str, Any] = {**trial["scalars"], **trial["constants"]}
    for slot in trial["buffers"]:
        flat = image[slot["offset"] : slot["offset"] + slot["size"]].view(getattr(torch, slot["dtype"]))
        arguments[slot["name"]] = flat
    values = {name: arguments[name] for name in trial["arguments"]}
    kernel[tuple(trial["grid"])](**values, num_warps=trial["num_warps"], num_stages=trial["num_stages"])


def _load(folder: Path, number: int) -> Any:
    import torch

    return torch.frombuffer(bytearray((folder / f"in{number}.bin").read_bytes()), dtype=torch.uint8)


def _compile_all(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from . import gpu_jobs

    return gpu_jobs.compile_only(job, folder)


def _sanitize(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from . import gpu_jobs

    return gpu_jobs.sanitize(job, folder)


_JOBS = {
    "compile": _compile_cuda, "run": _run, "compile_all": _compile_all, "sanitize": _sanitize,
    "host": host_jobs.host,
    "model": host_jobs.model,
}  # fmt: skip


if __name__ == "__main__":
    main()
