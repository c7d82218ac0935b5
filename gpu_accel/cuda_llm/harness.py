"""Judging a candidate: none of its host code runs, and nothing it can reach knows the answer.

    judgement = check(open("softmax.py").read(), "softmax")
    judgement.verdict, judgement.kind, judgement.detail

1. The source is read: a Triton kernel in the subset of `triton_source`, or CUDA C++ by the rules of `cuda_source`.
2. Seeds are drawn after the source is fixed, and with them inputs and shapes, some of which no proposer ever sees.
3. The kernel runs in a sandboxed process, on the GPU or in Triton's interpreter, on memory that the controller filled:
   inputs, poison where outputs belong, guards between buffers. One launch is repeated with other guards.
4. The controller compares every output of every launch with a float64 oracle, inputs and guards with what they were.

CUDA C++ is compiled (NVRTC) and run on a GPU like Triton's kernels; without one it ends as `unverified`. Times are
taken by `measure.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpu_accel.errors import shown

from . import cuda_source
from .candidate import Candidate
from .image import GUARDS, Layout
from .launch import Launch, malformed
from .outputs import Trial, judge
from .sandbox import Outcome, Sandbox, open_plain
from .tasks import Task, find
from .triton_source import canonical
from .verdict import Judgement, Kind, Rejected, Verdict

LARGEST_TRIAL = 1 << 26  # bytes of the memory of one launch on a small shape, scratch memory included
PHYSICS_MARGIN = 1.0  # of the datasheet's roofline
_ATOMIC = re.compile(r"atomic|\bred\b")


@dataclass(frozen=True)
class Program:
    """A source that passed the rules of its language, and what it takes."""

    language: str
    source: str
    entry: str
    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    then: tuple[Program, ...] = ()  # kernels that follow, of the same source

    @property
    def passes(self) -> tuple[Program, ...]:
        """All its kernels, in order."""
        return (self, *self.then)

    def repeats(self, task: Task) -> bool:
        """Whether it gives the same bits each time: sums of floats by atomics need not."""
        source = cuda_source.without_comments(self.source) if self.language == "cuda" else self.source
        return _ATOMIC.search(source) is None or not any(one.dtype.startswith("float") for one in task.outputs)

    @classmethod
    def of(cls, candidate: Candidate) -> Program:
        """Read a candidate's source.

        Raises:
            Rejected: it may not contain what it does, or does not parse.
        """
        if candidate.language == "cuda":
            cuda_source.check(candidate)
            first, *then = [cls("cuda", candidate.source, one.entry, one.args, ()) for one in candidate.launch.passes]
        else:
            kernel = canonical(candidate.source, [one.entry for one in candidate.launch.then])
            first, *then = [cls("triton", one.source, one.name, one.parameters, one.constants)
                            for one in (kernel, *kernel.further)]  # fmt: skip
        return replace(first, then=tuple(then))


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
        candidate: a file (a `Path`; a string is never taken for one), its text, or parsed.
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
        program = Program.of(candidate)
        bind(program, candidate.launch, task)
        trials = draw(task, candidate, seed)
        if sandbox is None:
            with Sandbox() as own:
                return _in(own, candidate, program, task, trials, seconds)
        return _in(sandbox, candidate, program, task, trials, seconds)
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
        if path.is_fifo():
            raise InvalidInputError(f"cannot read {path}: it is a pipe, which may wait for ever")
        with path.open("rb") as file:
            return file.read(LARGEST_SOURCE + 1)
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error


def bind(program: Program, launch: Launch, task: Task) -> None:
    """Check that every parameter has a value, and that every output is a parameter.

    Raises:
        Rejected: malformed.
    """
    buffers = {one.name for one in (*task.inputs, *task.outputs)} | set(launch.workspace)
    cuda = program.language == "cuda"
    parameters = {name: name in one.constants for one in program.passes for name in one.parameters}
    for name, constant in ((name, name in one.constants) for one in program.passes for name in one.parameters):
        if not cuda and constant != (name in launch.constants):
            where = "not in [constants]" if constant else "in [constants], and not annotated tl.constexpr"
            raise malformed(f"the parameter {name} is {where}")
        if not constant and name not in buffers | set(task.dims):
            known = ", ".join([*sorted(buffers), *task.dims])
            raise malformed(f"{task.name} has nothing called {shown(name, 40)}; it has {known}")
    if unused := [name for name in launch.constants if not cuda and name not in parameters]:
        raise malformed(f"the kernel has no parameter {unused[0]}")
    if taken := [name for name in launch.constants if cuda and name in buffers | set(task.dims)]:
        raise malformed(f"the constant {taken[0]} has the name of something else")
    if lacking := [one.name for one in task.outputs if one.name not in parameters]:
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
    families = task.families * len(shapes)
    trials = [
        _trial(task, candidate.launch, dims, family=families[i], seed=number + i, hidden=hidden)
        for i, (dims, hidden) in enumerate(shapes)
    ]
    for again in (0, len(trials) - 3):
        first = trials[again]
        before = first.layout.fill(first.inputs, candidate.launch, GUARDS[1], number - 1 - again)
        trials.append(replace(first, before=before, repeats=again))
    return trials


def _trial(task: Task, launch: Launch, dims: dict[str, int], *, family: str, seed: int, hidden: bool) -> Trial:
    inputs = task.draw(dims, family=family, seed=seed)
    _, constants = launch.resolve(dims)
    layout = Layout.of(task, launch, dims, constants)
    if layout.total > LARGEST_TRIAL:  # there are a dozen of them, and they are filled here
        raise malformed(f"the buffers take {layout.total} bytes on a small shape; at most {LARGEST_TRIAL}")
    before = layout.fill(inputs, launch, GUARDS[0], seed)
    return Trial(dims=dims, family=family, inputs=inputs, layout=layout, before=before, hidden=hidden)


def described(program: Program, launch: Launch, dims: dict[str, int], layout: Layout) -> dict[str, Any]:
    """One launch as the worker needs it."""
    grid, constants = launch.resolve(dims)
    found: dict[str, Any] = {
        "language": program.language, "grid": list(grid), "scalars": dict(dims), "constants": constants,
        "buffers": [slot.as_dict() | {"fill": launch.fill.get(slot.name)} for slot in layout.slots],
        "arguments": list(program.parameters), "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        "total": layout.total,
    }  # fmt: skip
    for name, space in launch.workspace.items():
        for slot in found["buffers"]:
            if slot["name"] == name:
                slot["fill"] = space.fill
    if program.language == "cuda":
        block, found["shared"] = launch.threads(dims, constants)
        found["block"] = list(block)
    if program.then:
        found["then"] = [described(one, how, dims, layout) | {"entry": one.entry}
                         for one, how in zip(program.then, launch.passes[1:], strict=True)]  # fmt: skip
    return found


def job(program: Program, launch: Launch, trials: Sequence[Trial]) -> dict[str, Any]:
    """What the worker needs to launch the kernel on every trial's memory."""
    listed = [described(program, launch, trial.dims, trial.layout) for trial in trials]
    return {"name": program.entry, "trials": listed}


def _in(
    sandbox: Sandbox,
    candidate: Candidate,
    program: Program,
    task: Task,
    trials: Sequence[Trial],
    seconds: float | None,
) -> Judgement:
    try:
        if program.language == "cuda" and not sandbox.gpu:
            judgement = _compiled(sandbox, candidate, trials[0].dims, seconds)
        else:
            run(sandbox, program, candidate.launch, trials, seconds=seconds)
            bits = program.repeats(task)
            error = judge(task, candidate.launch, trials, bits=bits)
            hidden = sum(trial.hidden for trial in trials)
            judgement = Judgement(
                verdict=Verdict.ACCEPTED, error=error,
                detail=f"{len(trials)} launches, largest error {error:.2g} of what is allowed",
                verified_by=(
                    "source in the kernel language", f"{len(trials) - hidden} launches on shapes shown",
                    f"{hidden} on shapes not shown", "guards and inputs unchanged",
                    f"repeated in other memory, {'bit for bit' if bits else 'within the bound: it has atomics'}",
                    "ran on the GPU" if sandbox.gpu else "ran in Triton's interpreter, not compiled",
                ),
            )  # fmt: skip
    except Rejected as rejected:
        judgement = rejected.judgement
    return replace(judgement, sandbox=sandbox.described)


def run(
    sandbox: Sandbox, program: Program, launch: Launch, trials: Sequence[Trial], **more: Any
) -> dict[str, Any]:
    """Run the trials in the sandbox and read back their memory; returns what the process said, untrusted.

    Raises:
        Rejected: compile_error, crashed, timeout or oom.
    """
    with sandbox.folder() as folder:
        write(program, folder)
        for number, trial in enumerate(trials):
            (folder / f"in{number}.bin").write_bytes(trial.before.numpy().tobytes())
        outcome = sandbox.run("run", folder, **job(program, launch, trials), **more)
        result = ended(outcome)
        for number, trial in enumerate(trials):
            trial.after = read_memory(folder / f"out{number}.bin", trial.layout.total)
    return result


def write(program: Program, folder: Path) -> None:
    """Put the source where the sandboxed process looks for it."""
    name = "kernel.py" if program.language == "triton" else "kernel.cu"
    (folder / name).write_text(program.source, encoding="utf-8")


def read_memory(path: Path, size: int) -> torch.Tensor:
    """Memory as the process left it: a plain file of exactly that size."""
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno()).st_size
            data = bytearray(file.read(size)) if found == size else bytearray()
    except OSError as error:
        raise Rejected(Verdict.CRASHED, None, f"left no output: {error.strerror}") from error
    if found != size:  # asked before it is read: what a process says of itself may be more than there is memory
        raise Rejected(Verdict.CRASHED, None, f"left {found} bytes of memory where {size} belong")
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def ended(outcome: Outcome) -> dict[str, Any]:
    """The result of a process that ended by itself and without an error."""
    if outcome.ended == "timeout":
        raise Rejected(Verdict.TIMEOUT, None, f"still running after {outcome.seconds:.3g} s")
    if outcome.ended == "signal" and outcome.signal == signal.SIGALRM:
        raise Rejected(Verdict.TIMEOUT, None, "compiled for too long, or held the GPU for too long")
    if outcome.ended == "signal":
        raise Rejected(Verdict.CRASHED, None, f"ended by signal {outcome.signal}")
    result = outcome.result
    if outcome.ended == "lost" or result is None:
        raise Rejected(Verdict.CRASHED, None, "its process ended without a word", (outcome.log[-200:],))
    error, kind = result.get("error"), str(result.get("kind"))
    if error == "refused" and kind in cuda_source.PTX_KINDS:
        raise Rejected(Verdict.CHEATING, Kind(kind), str(result.get("message"))[:1000])
    if error is not None:
        verdicts = {"oom": Verdict.OOM, "crash": Verdict.CRASHED, "unavailable": Verdict.UNVERIFIED}
        raise Rejected(verdicts.get(str(error), Verdict.COMPILE_ERROR), None, str(result.get("message"))[:1000])
    return result


def _compiled(sandbox: Sandbox, candidate: Candidate, dims: dict[str, int], seconds: float | None) -> Judgement:
    _, constants = candidate.launch.resolve(dims)
    with sandbox.folder() as folder:
        (folder / "kernel.cu").write_text(candidate.source, encoding="utf-8")
        result = ended(sandbox.run("compile", folder, seconds=seconds, constants=constants))
    functions = result.get("functions")
    known = functions if isinstance(functions, list) else []
    if lacking := [one.entry for one in candidate.launch.passes if one.entry not in known]:
        raise Rejected(
            Verdict.COMPILE_ERROR, None,
            f'no kernel {lacking[0]} in the machine code; declare it extern "C"', (str(functions)[:200],),
        )  # fmt: skip
    return Judgement(
        verdict=Verdict.UNVERIFIED,
        detail=f"compiles ({str(result.get('compiler'))[:40]}); without a GPU CUDA C++ is not run",
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
