"""bubblewrap around a worker, where it is installed and the system lets it make namespaces.

The worker and all its jobs then see the file system read-only but for one folder, no home, temporary or run-time
folders that Python does not need, no process but their own, and no network. It is the outer wall: each job still gives
up on its own what `worker.confine` says.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

_HIDDEN = ("/home", "/root", "/tmp", "/var/tmp", "/run", "/mnt", "/media", "/srv")
_PROBE_SECONDS = 20.0


def wrapper(folder: Path) -> tuple[list[str], str]:
    """(what goes in front of the worker's command, what it comes to in words); nothing where it does not work.

    Args:
        folder: the only place that may be written, for all jobs together.
    """
    tool = shutil.which("bwrap")
    if tool is None:
        return [], "none: bubblewrap is not installed"
    hidden = _hidden()
    command = [tool, *_arguments(hidden), "--bind", str(folder), str(folder), "--chdir", "/", "--"]
    if why := _refused(tool, tuple(_arguments(hidden))):
        return [], f"none: bubblewrap does not work here ({why})"
    return command, f"read-only files, {', '.join(hidden) or 'nothing'} hidden, processes of their own (bubblewrap)"


def _arguments(hidden: tuple[str, ...]) -> list[str]:
    # Not --die-with-parent: that parent is a thread, which may end earlier. The worker ends with its stdin.
    made = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    made += ["--unshare-cgroup-try", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    if os.geteuid() == 0:  # the worker gives these up for each job: it changes the user id and cuts the network
        for name in ("SETUID", "SETGID", "SYS_ADMIN", "NET_ADMIN", "KILL", "DAC_OVERRIDE", "CHOWN", "FOWNER"):
            made += ["--cap-add", f"CAP_{name}"]
    else:
        made += ["--unshare-user"]
    return [*made, *(part for one in hidden for part in ("--tmpfs", one))]


def _hidden() -> tuple[str, ...]:
    """Folders that are put out of sight: all of _HIDDEN in which nothing lies that the worker imports."""
    needed = {os.path.realpath(one) for one in (*sys.path, sys.prefix, sys.base_prefix, sys.executable) if one}
    needed |= {str(Path(one).absolute()) for one in (sys.executable, *filter(None, sys.path))}
    needed.add(str(Path(__file__).resolve().parents[2]))
    for name in ("torch", "triton"):
        found = importlib.util.find_spec(name)
        if found and found.origin:
            needed.add(os.path.realpath(found.origin))
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"):
        needed |= {os.path.realpath(one) for one in os.environ.get(name, "").split(os.pathsep) if one}

    def free(folder: str) -> bool:
        inside = (os.path.realpath(folder), folder)
        return not any(one == at or one.startswith(f"{at}/") for one in needed for at in inside)

    return tuple(one for one in _HIDDEN if os.path.isdir(one) and not os.path.islink(one) and free(one))


@functools.cache
def _refused(tool: str, arguments: tuple[str, ...]) -> str:
    """Why Python does not start inside; "" if it does."""
    command = [tool, *arguments, "--chdir", "/", "--", sys.executable, "-c", "print('inside')"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}"
    said = " ".join(done.stderr.split())[:120] or f"exit code {done.returncode}"
    return "" if done.stdout.strip() == "inside" else said
