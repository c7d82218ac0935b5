"""Judging a candidate: none of its host code runs, and nothing it can reach knows the answer.

    judgement = check(open("softmax.py").read(), "softmax")
    judgement.verdict, judgement.kind, judgement.detail

1. The source is read: a Triton kernel in the subset of `triton_source`, or CUDA C++ by the rules of `cuda_source`.
2. Seeds are drawn after the source is fixed, and with them inputs and shapes, some of which no proposer ever sees.
3. The kernel runs in a sandboxed process, on the GPU or in Triton's interpreter, on memory that the controller filled:
   inputs, poison where outputs belong, guards between buffers. One launch is repeated with other guards.
4. The controller compares every output of every launch with a float64 oracle, inputs and guards with what they were.

CUDA candidates are compiled here (NVRTC) and, without a GPU, end as `unverified`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_accel.errors import HardwareError

from . import cuda_source
from .candidate import Candidate
from .image import GUARDS, Layout
from .launch import Launch, malformed
from .outputs import Trial, judge
from .sandbox import Outcome, Sandbox
from .tasks import FAMILIES, Task, find
from .triton_source import Kernel, canonical
from .verdict import Judgement, Kind, Rejected, Verdict

PHYSICS_MARGIN = 1.0  # of the datasheet's roofline


def check(
    candidate: Candidate | str | bytes | Path,
    task: Task | str,
    *,
    sandbox: Sandbox | None = None,
    seed: int | None = None,
    seconds: float | None = None,
) -> Judgement:
    """The verdict on one candidate.

    Args:
        candidate: a file, its text, or parsed.
        task: what it should compute.
        sandbox: one to use again; otherwise a new one is started, which takes seconds.
        seed: of inputs and held-out shapes. None, the default, draws one that nobody can know.
        seconds: wall clock that it may take; that of the sandbox if not given.
    Raises:
        InvalidInputError: there is no such task, or the file cannot be read. Whatever the candidate does is a verdict.
        HardwareError: no sandbox can be made here.
    """
    task = find(task) if isinstance(task, str) else task
    try:
        if isinstance(candidate, Path):
            candidate = read(candidate)
        if not isinstance(candidate, Candidate):
            candidate = Candidate.parse(candidate)
        if candidate.language == "cuda":
            cuda_source.check(candidate)
            kernel, trials = None, []
        else:
            kernel = canonical(candidate.source)
            bind(kernel, candidate.launch, task)
            trials = draw(task, candidate, seed)
        if sandbox is None:
            with Sandbox() as own:
                return _in(own, candidate, kernel, task, trials, seconds)
        return _in(sandbox, candidate, kernel, task, trials, seconds)
    except Rejected as rejected:
        return rejected.judgement


def read(path: Path) -> bytes:
    """The bytes of a candidate file, not more than a candidate may have.

    Raises:
        InvalidInputError: it cannot be read.
    """
    from gpu_accel.errors import InvalidInputError

    from .candidate import LARGEST_SOURCE

    try:
        with path.open("rb") as file:
            return file.read(LARGEST_SOURCE + 1)
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error


def bind(kernel: Kernel, launch: Launch, task: Task) -> None:
    """Check that every parameter has a value, and that every output is a parameter.

    Raises:
        Rejected: malformed.
    """
    buffers = {one.name for one in (*task.inputs, *task.outputs)} | set(launch.workspace)
    for name in kernel.parameters:
        constant = name in kernel.constants
        if constant != (name in launch.constants):
            where = "not in [constants]" if constant else "in [constants], and not annotated tl.constexpr"
            raise malformed(f"the parameter {name} is {where}")
        if not constant and name not in buffers | set(task.dims):
            known = ", ".join([*sorted(buffers), *task.dims])
            raise malformed(f"{task.name} has nothing called {name!r:.40}; it has {known}")
    if unused := [name for name in launch.constants if name not in kernel.parameters]:
        raise malformed(f"the kernel has no parameter {unused[0]}")
    if lacking := [one.name for one in task.outputs if one.name not in kernel.parameters]:
        raise malformed(f"the kernel does not take the output {lacking[0]}")
    if wrong := [name for name in launch.fill if name not in {one.name for one in task.outputs}]:
        raise malformed(f"fill names {wrong[0]}, which is no output")


def draw(task: Task, candidate: Candidate, seed: int | None) -> list[Trial]:
    """The trials of one check: shown shapes, hidden ones, and two repeats on memory with other guards.

    Raises:
        Rejected: malformed, for a launch that makes no sense for a shape.
    """
    chosen = secrets.token_hex(16) if seed is None else f"{seed}"
    number = int.from_bytes(hashlib.sha256(f"{chosen}/{candidate.digest}/{task.name}".encode()).digest()[:6], "big")
    shapes = [(dims, False) for dims in (*task.shown, *task.shown)]
    shapes += [(dims, True) for dims in task.held_out(number)]
    trials = [
        _trial(task, candidate.launch, dims, family=FAMILIES[i % len(FAMILIES)], seed=number + i, hidden=hidden)
        for i, (dims, hidden) in enumerate(shapes)
    ]
    for again in (0, len(trials) - 3):
        first = trials[again]
        before = first.layout.fill(first.inputs, candidate.launch, GUARDS[1])
        trials.append(replace(first, before=before, repeats=again))
    return trials


def _trial(task: Task, launch: Launch, dims: dict[str, int], *, family: str, seed: int, hidden: bool) -> Trial:
    inputs = task.draw(dims, family=family, seed=seed)
    _, constants = launch.resolve(dims)
    layout = Layout.of(task, launch, dims, constants)
    before = layout.fill(inputs, launch, GUARDS[0])
    return Trial(dims=dims, family=family, inputs=inputs, layout=layout, before=before, hidden=hidden)


def job(kernel: Kernel, launch: Launch, trials: Sequence[Trial]) -> dict[str, Any]:
    """What the worker needs to launch the kernel on every trial's memory."""
    listed = []
    for trial in trials:
        grid, constants = launch.resolve(trial.dims)
        buffers = [slot.as_dict() | {"fill": launch.fill.get(slot.name)} for slot in trial.layout.slots]
        listed.append({
            "grid": list(grid), "scalars": {**trial.dims, **constants}, "buffers": buffers,
            "arguments": list(kernel.parameters), "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        })  # fmt: skip
    return {"name": kernel.name, "trials": listed}


def _in(
    sandbox: Sandbox,
    candidate: Candidate,
    kernel: Kernel | None,
    task: Task,
    trials: Sequence[Trial],
    seconds: float | None,
) -> Judgement:
    try:
        if kernel is None:
            judgement = _compiled(sandbox, candidate, seconds)
        else:
            run(sandbox, kernel, candidate.launch, trials, seconds=seconds)
            error = judge(task, candidate.launch, trials)
            hidden = sum(trial.hidden for trial in trials)
            judgement = Judgement(
                verdict=Verdict.ACCEPTED, error=error,
                detail=f"{len(trials)} launches, largest error {error:.2g} of what is allowed",
                verified_by=(
                    "source in the kernel language", f"{len(trials) - hidden} launches on shapes shown",
                    f"{hidden} on shapes not shown", "guards and inputs unchanged", "repeated in other memory",
                    "ran on the GPU" if sandbox.gpu else "ran in Triton's interpreter, not compiled",
                ),
            )  # fmt: skip
    except Rejected as rejected:
        judgement = rejected.judgement
    return replace(judgement, sandbox=sandbox.described)


def run(
    sandbox: Sandbox, kernel: Kernel, launch: Launch, trials: Sequence[Trial], *, what: str = "run", **more: Any
) -> dict[str, Any]:
    """Run the trials in the sandbox and read back their memory; returns what the process said, untrusted.

    Raises:
        Rejected: compile_error, crashed, timeout or oom.
    """
    with sandbox.folder() as folder:
        (folder / "kernel.py").write_text(kernel.source)
        for number, trial in enumerate(trials):
            (folder / f"in{number}.bin").write_bytes(trial.before.numpy().tobytes())
        outcome = sandbox.run(what, folder, **job(kernel, launch, trials), **more)
        result = _ended(outcome)
        for number, trial in enumerate(trials):
            trial.after = _read_image(folder / f"out{number}.bin", trial.layout.total)
    return result


def _read_image(path: Path, size: int) -> torch.Tensor:
    """Memory as the process left it: a plain file of exactly that size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = bytearray(file.read(size + 1))
    except OSError as error:
        raise Rejected(Verdict.CRASHED, None, f"left no output: {error.strerror}") from error
    if len(data) != size:
        raise Rejected(Verdict.CRASHED, None, f"left {len(data)} bytes of memory where {size} belong")
    return torch.frombuffer(data, dtype=torch.uint8)


def _ended(outcome: Outcome) -> dict[str, Any]:
    """The result of a process that ended by itself and without an error."""
    if outcome.ended == "timeout":
        raise Rejected(Verdict.TIMEOUT, None, f"still running after {outcome.seconds:.3g} s")
    if outcome.ended == "signal":
        raise Rejected(Verdict.CRASHED, None, f"ended by signal {outcome.signal}")
    result = outcome.result
    if outcome.ended == "lost" or result is None:
        raise Rejected(Verdict.CRASHED, None, "its process ended without a word", (outcome.log[-200:],))
    error = result.get("error")
    if error is not None:
        verdicts: Mapping[Any, Verdict] = {
            "oom": Verdict.OOM, "crash": Verdict.CRASHED, "unavailable": Verdict.UNVERIFIED,
        }  # fmt: skip
        raise Rejected(verdicts.get(error, Verdict.COMPILE_ERROR), None, str(result.get("message"))[:1000])
    return result


def _compiled(sandbox: Sandbox, candidate: Candidate, seconds: float | None) -> Judgement:
    with sandbox.folder() as folder:
        (folder / "kernel.cu").write_text(candidate.source)
        result = _ended(sandbox.run("compile", folder, seconds=seconds))
    functions = result.get("functions")
    if not isinstance(functions, list) or candidate.launch.entry not in functions:
        raise Rejected(
            Verdict.COMPILE_ERROR, None,
            f'no kernel {candidate.launch.entry} in the machine code; declare it extern "C"', (str(functions)[:200],),
        )  # fmt: skip
    return Judgement(
        verdict=Verdict.UNVERIFIED,
        detail=f"compiles ({str(result.get('compiler'))[:40]}); CUDA kernels are not run by this version",
        verified_by=("source rules", "compiled for sm_90a"),
    )


def judge_time(task: Task, dims: dict[str, int], milliseconds: float, gpu: str) -> Judgement:
    """Whether a time can be true: no kernel is faster than its compulsory bytes and arithmetic.

    Raises:
        InvalidInputError: no profile of that GPU.
    """
    floor = task.floor_ms(dims, gpu)
    detail = f"{milliseconds:.4g} ms, the least possible is {floor:.4g} ms"
    if not milliseconds >= floor * PHYSICS_MARGIN:  # also NaN
        return Judgement(verdict=Verdict.FASTER_THAN_PHYSICS, detail=detail)
    return Judgement(verdict=Verdict.ACCEPTED, detail=detail, verified_by=("roofline floor",))


def bench(
    candidate: Candidate, task: Task, *, sandbox: Sandbox, gpu: str, seconds: float = 0.25
) -> tuple[Judgement, float | None]:
    """On a GPU: (the verdict, time as a multiple of a copy of as many bytes) of a candidate that `check` accepted.

    Each process times one kernel, interleaved with a copy, so ratios of two candidates can be compared although the
    clocks of their runs differ. Outputs of all timed inputs are compared with the oracle.

    Raises:
        HardwareError: the sandbox has no GPU.
    """
    if not sandbox.gpu:
        raise HardwareError("times need a GPU; without one only correctness is judged")
    try:
        kernel = canonical(candidate.source)
        bind(kernel, candidate.launch, task)
        base = secrets.randbits(40)
        trials = [
            _trial(task, candidate.launch, task.bench, family="normal", seed=base + i, hidden=False) for i in range(2)
        ]
        result = run(
            sandbox, kernel, candidate.launch, trials, what="bench", bytes=task.bytes_moved(task.bench), budget=seconds
        )
        judge(task, candidate.launch, trials)
        times = {name: _times(result.get(name)) for name in ("candidate", "copy")}
    except Rejected as rejected:
        return rejected.judgement, None
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    judgement = judge_time(task, task.bench, medians["candidate"], gpu)
    return judgement, medians["candidate"] / medians["copy"] if judgement.ok else None


def _times(found: Any) -> list[float]:
    """The samples of one name in a result, which is untrusted."""
    samples = found.get("ms") if isinstance(found, dict) else None
    if isinstance(samples, list) and samples and all(isinstance(one, float) and one > 0 for one in samples):
        return samples
    why = found.get("failed") if isinstance(found, dict) else found
    raise Rejected(Verdict.CRASHED, Kind.MISMATCH if why is None else None, f"no times: {str(why)[:200]}")
