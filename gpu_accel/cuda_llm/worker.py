"""The process in which candidates run: `python -m gpu_accel.cuda_llm.worker`, started by `sandbox.Sandbox`.

It imports what kernels need once, then forks for every job that it reads from stdin, so a candidate gets a process of
its own within milliseconds. The fork gives up what it does not need (files, network, user id, resources), then imports
the kernel and runs it. It knows neither expected results nor how they are judged, and what it writes is judged by the
controller as untrusted bytes. The parent of the fork, which never runs candidate code, kills it when its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

NOBODY = 65534
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES = 38
MIB = 1 << 20


def main() -> None:
    """Serve jobs until stdin ends."""
    import torch  # noqa: F401  (imported here so that every fork has it)
    import triton.language  # noqa: F401

    gpu = os.environ.get("GPU_ACCEL_SANDBOX_GPU") == "1"
    if not gpu:
        _warm_up()
    with contextlib.suppress(ImportError):  # CUDA sources then end as unverified, with the reason
        from cuda.bindings import nvrtc  # noqa: F401

        import gpu_accel.hardware.microbenchmarks.compile  # noqa: F401
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_supervise(json.loads(line))), flush=True)


def _warm_up() -> None:
    """Run a kernel of ours once: the interpreter imports lazily, and a fork may not be able to read the files."""
    from gpu_accel.cuda_llm import warm

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
    os.chdir(folder)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["GPU_ACCEL_CACHE"] = str(folder / "compiled")
    os.environ["TMPDIR"] = str(folder)
    level = confine(job)
    if job["what"] == "probe":
        (folder / "result.json").write_text(json.dumps({"level": level}))
        return 0
    try:
        result = {"compile": _compile_cuda, "run": _run, "bench": _bench}[job["what"]](job, folder)
    except BaseException as error:  # of whatever kind: it becomes one line, and the process ends
        result = {"error": _class_of(error), "message": _message(error)}
    text = json.dumps(result)
    (folder / "result.json").write_text(text)
    return 0


def confine(job: dict[str, Any]) -> dict[str, str]:
    """Give up what a kernel does not need; returns what was reached, in words."""
    level = {"process": "own process and group, killed at the deadline"}
    libc = ctypes.CDLL(None, use_errno=True)
    root, caller = os.geteuid() == 0, os.getuid()
    cut = libc.unshare(_NEW_NET) == 0 if root else libc.unshare(_NEW_USER | _NEW_NET) == 0
    level["network"] = "none (namespace)" if cut else "not cut: the system refuses namespaces"
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
    return level


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

    binary = build((folder / "kernel.cu").read_text())
    return {"compiler": binary.compiler, "functions": sorted(binary.functions)}


def _kernel(job: dict[str, Any], folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("candidate_kernel", folder / "kernel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, job["name"])


def _launcher(kernel: Any, trial: dict[str, Any], image: Any) -> Any:
    """The zero-argument call that launches the kernel on an image."""
    import torch

    arguments: dict[str, Any] = dict(trial["scalars"])
    for slot in trial["buffers"]:
        flat = image[slot["offset"] : slot["offset"] + slot["size"]].view(getattr(torch, slot["dtype"]))
        arguments[slot["name"]] = flat
    values = {name: arguments[name] for name in trial["arguments"]}
    grid = tuple(trial["grid"])
    if math.prod(grid) == 0:
        return lambda: None
    options = {"num_warps": trial["num_warps"], "num_stages": trial["num_stages"]}
    bound = kernel[grid]
    return lambda: bound(**values, **options)


def _load(folder: Path, number: int, device: str) -> Any:
    import torch

    data = bytearray((folder / f"in{number}.bin").read_bytes())
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _save(folder: Path, number: int, image: Any) -> None:
    import torch

    image = image.cpu()
    (folder / f"out{number}.bin").write_bytes(memoryview(image.numpy()) if torch.numel(image) else b"")


def _run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Launch once on each image, in order, and write each back whole."""
    kernel = _kernel(job, folder)
    for number, trial in enumerate(job["trials"]):
        image = _load(folder, number, job["device"])
        _launcher(kernel, trial, image)()
        _save(folder, number, image)
    return {"ran": len(job["trials"])}


def _bench(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Time the kernel next to a copy of as many bytes, over images with other inputs, and write the images back.

    The copy is the yardstick that times of two processes are compared by: no baseline of the task runs here, since its
    output would lie in memory that the candidate can read.
    """
    import torch

    from gpu_accel.workbench.timing import compare

    kernel = _kernel(job, folder)
    trials = job["trials"]
    images = [_load(folder, number, "cuda") for number in range(len(trials))]
    kept = [image.clone() for image in images]
    calls = []
    for trial, image in zip(trials, images, strict=True):
        launch = _launcher(kernel, trial, image)
        fills = [
            (image[s["offset"] : s["offset"] + s["size"]].view(getattr(torch, s["dtype"])), s["fill"])
            for s in trial["buffers"]
            if s.get("fill") is not None
        ]
        calls.append(lambda launch=launch, fills=fills: ([view.fill_(value) for view, value in fills], launch()))
    half = max(job["bytes"] // 2, 1)
    source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    timed = compare(
        {"candidate": calls, "copy": [lambda: target.copy_(source)]}, seconds=job["budget"], method="auto"
    )  # fmt: skip
    for image, before in zip(images, kept, strict=True):  # once more on fresh images: the outputs that are judged
        image.copy_(before)
    for call in calls:
        call()
    torch.cuda.synchronize()
    for number, image in enumerate(images):
        _save(folder, number, image)
    return {name: {"ms": list(one.times), "failed": one.failed} for name, one in timed.items()}


if __name__ == "__main__":
    main()
