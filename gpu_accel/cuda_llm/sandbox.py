"""Runs jobs in processes that can do little and end in time. The level of isolation reached is reported, not assumed.

    with Sandbox() as sandbox:
        outcome = sandbox.run("run", folder, name="softmax", trials=[...])

Every job: one process, forked from a worker that never runs candidate code; its own process group, killed at the
deadline; its own folder, and no writing elsewhere where the kernel has Landlock; limits on CPU time, memory, file size,
open files and processes; no network where the system allows namespaces; another user id when started as root. A worker
that dies or hangs is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gpu_accel.errors import HardwareError, InvalidInputError, shown

from . import bubblewrap
from .worker import NOBODY

START_SECONDS = 180.0
GRACE = 10.0  # beyond a job's deadline, before the worker itself counts as hung
MOST_SECONDS = 86400.0  # of a job, whatever is asked for: a day
LARGEST_RESULT = 1 << 20
_KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "SYSTEMROOT")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended.

    `result` is what its process said, untrusted; None when it said nothing that can be read.
    """

    ended: str  # "exit", "timeout", "signal", "lost" (the worker had to be replaced)
    signal: int = 0
    result: dict[str, Any] | None = None
    seconds: float = 0.0
    log: str = ""


class Sandbox:
    """A worker and the limits of its jobs.

    Args:
        seconds: wall clock of a job.
        memory_mib: beyond what the worker has; without effect on a GPU, where addresses cannot be limited.
        file_mib: of one file that a job writes; by default 256, or 2048 on a GPU, where memory to be timed is larger.
        gpu: let jobs use the GPU; kernels are interpreted on the CPU otherwise.
    Raises:
        HardwareError: this is no Linux, or the worker does not start.
    """

    def __init__(
        self, *, seconds: float = 30.0, memory_mib: int = 1024, file_mib: int | None = None, gpu: bool = False
    ) -> None:
        if sys.platform != "linux":
            raise HardwareError("candidates run in a sandbox that needs Linux")
        self.seconds, self.memory_mib, self.gpu = seconds, memory_mib, gpu
        self.file_mib = file_mib or (2048 if gpu else 256)
        self._worker: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.level: dict[str, str] = {}
        self._without = ""  # why some walls are left out
        self._base: Path | None = None
        self._removed: Callable[[], object] = lambda: None
        self._stopped = False
        self.restarts = -1

    def __enter__(self) -> Sandbox:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if self._base is not None:
            self._removed()
            self._base = None

    def stop(self) -> None:
        """End the worker and what it runs, from whichever thread: a job that waits for it ends with an error."""
        self._stopped = True
        if worker := self._worker:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with contextlib.suppress(OSError):
            if worker.stdin:
                worker.stdin.close()
        try:
            worker.wait(1.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)  # its session: what is wrapped around it, too
            worker.wait()
        if worker.stdout:
            worker.stdout.close()

    @property
    def described(self) -> str:
        """The level of isolation, one line."""
        return "; ".join(f"{key}: {words}" for key, words in self.level.items())

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment |= {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"GPU_ACCEL_SANDBOX_GPU": "1"} if self.gpu else {"TRITON_INTERPRET": "1"}
        wrapped, around = bubblewrap.wrapper(self._place()) if not self.gpu else ([], "none: not tried with CUDA")
        self._worker = subprocess.Popen(
            [*wrapped, sys.executable, "-m", "gpu_accel.cuda_llm.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        self._rest = b""
        self.restarts += 1
        if self._reply(START_SECONDS) != {"ready": True}:
            self.close()
            raise HardwareError("the sandbox's worker does not start: `python -m gpu_accel.cuda_llm.worker` says why")
        if not self.level:
            found = self._probe()
            if found["cuda"] and self.gpu:  # another driver may want another place to write to, or another call
                self._without = f"CUDA does not start behind it (error {found['cuda']})"
                if (bare := self._probe())["cuda"]:  # nor without it: that is no reason to be without
                    self._without = ""
                else:
                    found = bare
            self.level = found["level"] | {"around": around}
            if self.gpu:
                from .sanitizer import level  # which imports this module

                self.level["sanitizer"] = level()

    def _probe(self) -> dict[str, Any]:
        """What a confined process says of itself."""
        with self.folder() as folder:
            found = self.run("probe", folder).result
        if not found or not isinstance(found.get("level"), dict) or type(found.get("cuda")) is not int:
            raise HardwareError("the sandbox cannot confine a process on this machine")
        return found

    def _place(self) -> Path:
        """The folder of all build folders, the only one that is writable where bubblewrap is around the worker."""
        if self._base is None or not self._base.is_dir():
            self._base = Path(tempfile.mkdtemp(prefix="gpu-accel-sandbox-"))
            self._base.chmod(0o711)
            self._removed = weakref.finalize(self, remove, self._base)
        return self._base

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A fresh build folder, removed afterwards."""
        place = Path(tempfile.mkdtemp(prefix="candidate-", dir=self._place()))
        try:
            yield place
        finally:
            remove(place)

    def run(self, what: str, folder: Path, *, seconds: float | None = None, **job: Any) -> Outcome:
        """One job in a process of its own: "probe", "run", "compile" (CUDA sources) or "bench".

        Raises:
            HardwareError: the sandbox was stopped. InvalidInputError: seconds is no time.
        """
        self._require_open()
        if self._worker is None:
            self._start()
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        limit = min(self.seconds if seconds is None else seconds, MOST_SECONDS)
        if not limit > 0:
            raise InvalidInputError(f"seconds is {shown(seconds)}; it must be a positive number")
        # A compiler starts ptxas or nvdisasm, CUDA has threads, and the limit is that of the user id in all sandboxes.
        processes = 4096 if self.gpu else 512 if what == "compile" else 0
        request = {
            "what": what, "folder": str(folder), "seconds": limit, "file_mib": self.file_mib,
            "memory_mib": 0 if self.gpu else self.memory_mib, "processes": processes,
            "device": "cuda" if self.gpu else "cpu", "without": self._without, **job,
        }  # fmt: skip
        ended = self._ask(request, limit + GRACE)
        if ended is None:
            self.close()
            self._require_open()
            self._start()
            return Outcome(ended="lost", log=_text(folder / "log.txt"))
        kind = "timeout" if ended["timed_out"] or ended["signal"] == 24 else "signal" if ended["signal"] else "exit"
        return Outcome(
            ended=kind, signal=ended["signal"], result=_json(folder / "result.json"), seconds=ended["seconds"],
            log=_text(folder / "log.txt"),
        )  # fmt: skip

    def _require_open(self) -> None:
        if self._stopped:
            raise HardwareError("the sandbox was stopped")

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        assert self._worker and self._worker.stdin
        try:
            self._worker.stdin.write(json.dumps(request).encode() + b"\n")
            self._worker.stdin.flush()
        except OSError:
            return None
        return self._reply(timeout)

    def _reply(self, timeout: float) -> dict[str, Any] | None:
        """One line of the worker, or None when it ends or is late."""
        assert self._worker and self._worker.stdout
        deadline = time.monotonic() + timeout
        descriptor = self._worker.stdout.fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


def open_plain(path: Path) -> BinaryIO:
    """A file that a job left, to be read: no link, which could lead to what only we may read, and nothing that waits.

    Raises:
        OSError: it is not there, or no plain file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no plain file", str(path))


def remove(folder: Path) -> None:
    """Remove a folder and all that a job put there, nested ever so deep or closed even to its owner."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.is_dir():
        with contextlib.suppress(OSError):
            _empty(folder)
            folder.rmdir()


def _empty(folder: Path) -> None:
    """Remove what lies in a folder step by step, down and up again, with one of them open at a time."""
    at, above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), list[str]()
    try:
        while True:
            inner = ""
            with os.scandir(at) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        inner = entry.name
                        break
                    os.unlink(entry.name, dir_fd=at)
            if inner:
                os.chmod(inner, 0o700, dir_fd=at)
                above.append(inner)
            elif not above:
                return
            following = os.open(inner or "..", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = following
            if not inner:
                os.rmdir(above.pop(), dir_fd=at)
    finally:
        os.close(at)


def _json(path: Path) -> dict[str, Any] | None:
    """What a job wrote, if it is an object of a sensible size."""
    try:
        with open_plain(path) as file:
            data = file.read(LARGEST_RESULT + 1)
        found = json.loads(data) if len(data) <= LARGEST_RESULT else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(path: Path) -> str:
    try:
        with open_plain(path) as file:
            return file.read(4000).decode(errors="replace")
    except OSError:
        return ""
