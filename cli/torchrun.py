"""`gpu-accel run ... --nproc N`: the same command once for each of N processes, started by torchrun.

Every process runs the same cases, and rank 0 alone prints and keeps records. A process that was started so is known by
torchrun's variables. torchrun ends with 1 whatever a process ended with, so each leaves its exit code in a file.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import typer

from gpu_accel.errors import HardwareError, InvalidInputError, shown

from . import codes

EXITS = "GPU_ACCEL_EXITS"  # the folder for exit codes
MOST_ON_A_CPU = 64  # processes
_PATIENCE = 30.0  # seconds; torchrun itself kills what is left after as many
_SPEAKING = 5.0  # seconds that a helper whose run failed leaves the first process to say so


def helper() -> bool:
    """Whether this process is one of several, and not the first."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _number("RANK") > 0


def _number(name: str) -> int:
    """One of torchrun's variables."""
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise InvalidInputError(f"{name} is {shown(text, 40)}: torchrun sets it to a number")
    return int(text)


def relaunch(nproc: int, device: str) -> None:
    """Start torchrun and leave with the exit code of the process that failed first, or 0.

    Raises:
        InvalidInputError: not a number of processes. HardwareError: fewer GPUs than that.
    """
    import subprocess

    if nproc < 1:
        raise InvalidInputError(f"--nproc {nproc}: a whole number from 1 up")
    if device == "cpu" and nproc > MOST_ON_A_CPU:
        raise InvalidInputError(f"--nproc {nproc}: at most {MOST_ON_A_CPU} on a CPU, for each is a process with torch")
    if device != "cpu":
        import torch

        found = torch.cuda.device_count()
        if found < nproc:
            instead = "--device cpu checks small shapes instead"
            raise HardwareError(f"--nproc {nproc}, but there are {found} GPUs; {instead}")
    package = __package__ or "cli"
    launcher = [sys.executable, "-m", f"{package}.launcher", "--standalone", "--nproc-per-node", str(nproc)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, "-m", f"{package}.torchrun", *_without_nproc(sys.argv[1:])]
        threads = {"OMP_NUM_THREADS": "1"} if nproc > 1 else {}  # torchrun's own choice, which it would announce
        with subprocess.Popen(command, env={**threads, **os.environ, EXITS: folder}) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                # the processes have the signal too, and write down what they have measured
                with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                    process.wait(_PATIENCE)
                process.terminate()
                raise typer.Exit(codes.INTERRUPTED) from None
        left = sorted(Path(folder).iterdir(), key=lambda file: file.stat().st_mtime_ns)
        raise typer.Exit(int(left[0].read_text()) if left and code else code)


def one_process() -> None:
    """What torchrun starts: the command line, with its exit code left in a file."""
    from .main import main

    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code and EXITS in os.environ:
            folder = Path(os.environ[EXITS])
            with suppress(FileNotFoundError):  # who started this is gone, and its folder too
                (folder / os.environ.get("RANK", "0")).write_text(str(stop.code))
            if helper():  # when one has ended torchrun ends the others: the first is to say what is wrong before
                end = time.monotonic() + _SPEAKING
                while folder.exists() and not (folder / "0").exists() and time.monotonic() < end:
                    time.sleep(0.05)
        raise


def _without_nproc(arguments: list[str]) -> list[str]:
    """The command line of each process; torchrun would take --nproc for an option of its own."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            kept.append(argument)
        skip = argument == "--nproc"
    return kept


def join(device: str) -> None:
    """In a process that torchrun has started: take the GPU of its number, and be silent unless it is the first."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    import torch

    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(_number("LOCAL_RANK"))
    if helper():
        silence()


def silence() -> None:
    """A helper's output would only repeat what rank 0 says."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())


if __name__ == "__main__":
    one_process()
