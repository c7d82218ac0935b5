"""Tier B: candidates with host code. Python runs in the sandbox and its result is labelled `untrusted host code`.

    judgement = check_host(Path("submission.py").read_text(), "softmax")

A file defines `run(x, ...)`, with the task's inputs by position, or `custom_kernel(data)` as gpu-mode's submissions do,
with a tuple of them; either returns the outputs. KernelBench's pairs of `Model` and `ModelNew` are judged against each
other by `check_model`: the problem runs in one process, the answer in another, and only the controller sees both.

Such code owns its process. It can call libraries, start threads, read clocks and lie about its time, so nothing here is
timed, and no verdict of this tier is ranked with kernels whose host code is ours. What it cannot do is see the expected
results: they are never in its process.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown

from .candidate import LARGEST_SOURCE
from .harness import ended, read_memory
from .launch import DTYPES
from .outputs import Comparison, compare
from .sandbox import Sandbox
from .tasks import Task, find
from .tasks.task import Dims
from .verdict import Judgement, Kind, Rejected, Verdict

R = TypeVar("R")
LABEL = "untrusted host code"
ENTRIES = ("run", "custom_kernel")
YARDSTICK = 4.0  # times the error of the problem's own arithmetic, that an answer to a KernelBench problem may have
LARGEST_TENSOR = 1 << 31


def check_host(
    source: str, task: Task | str, *, sandbox: Sandbox | None = None, seed: int | None = None,
    seconds: float | None = None,
) -> Judgement:  # fmt: skip
    """The verdict on Python host code for one of our tasks.

    Raises:
        InvalidInputError: there is no such task. HardwareError: no sandbox can be made here.
    """
    chosen = find(task) if isinstance(task, str) else task
    if sandbox is None:
        with Sandbox() as own:
            return check_host(source, chosen, sandbox=own, seed=seed, seconds=seconds)
    try:
        _readable(source)
        number = _number(source, chosen.name, seed)
        shapes = [(dims, False) for dims in chosen.shown] + [(dims, True) for dims in chosen.held_out(number)]
        trials = [
            (dims, hidden, chosen.draw(dims, family=chosen.families[i % len(chosen.families)], seed=number + i))
            for i, (dims, hidden) in enumerate(shapes)
        ]
        results = _run(sandbox, source, [list(inputs.values()) for *_, inputs in trials], seconds)
        worst = 0.0
        bad: list[tuple[Dims, bool, Comparison]] = []
        for (dims, hidden, inputs), outputs in zip(trials, results, strict=True):
            named = _named(chosen, dims, outputs)
            found = compare(chosen, named, chosen.truth(inputs, dims), inputs)
            worst = max(worst, found.error)
            if found.kind:
                bad.append((dims, hidden, found))
        if bad:
            dims, _, found = bad[0]
            kind = Kind.HELD_OUT if all(hidden for _, hidden, _ in bad) else found.kind
            raise Rejected(Verdict.WRONG, kind, found.detail, (str(dims),))
        judgement = Judgement(
            verdict=Verdict.ACCEPTED, error=worst, detail=f"{len(trials)} calls; {LABEL}: not timed, not ranked",
            verified_by=(LABEL, f"{len(chosen.shown)} calls on shapes shown", f"{len(trials) - len(chosen.shown)} on "
                         "shapes not shown"),
        )  # fmt: skip
    except Rejected as rejected:
        judgement = replace(rejected.judgement, verified_by=(LABEL,))
    return replace(judgement, sandbox=sandbox.described)


def check_model(
    problem: str, answer: str, *, sandbox: Sandbox | None = None, seed: int | None = None, trials: int = 3,
    seconds: float | None = None,
) -> Judgement:  # fmt: skip
    """The verdict on a `ModelNew` for a KernelBench problem: `Model`, `get_inputs()` and `get_init_inputs()`.

    The problem's results are taken in float64 and in its own dtypes; the answer may err `YARDSTICK` times as much as
    the latter, plus rounding of the largest value. Where the problem gives infinity or NaN, so must the answer. Both
    models get the same seed, and the answer the problem's weights where their names agree.

    Raises:
        InvalidInputError: the problem itself does not run here, or gives nothing that can be compared. HardwareError:
            no sandbox can be made here.
    """
    if sandbox is None:
        with Sandbox() as own:
            return check_model(problem, answer, sandbox=own, seed=seed, trials=trials, seconds=seconds)
    try:
        _of_problem(lambda: _readable(problem))
        _readable(answer)
        number = _number(answer, problem, seed)
        worst = 0.0
        for trial in range(trials):
            drawn = number + trial
            truth = _of_problem(functools.partial(_model, sandbox, problem, None, drawn, seconds))
            if not truth:
                raise InvalidInputError("the problem gives no outputs, so there is nothing to compare")
            made = _model(sandbox, problem, answer, drawn, seconds)
            exact, plain = truth[: len(truth) // 2], truth[len(truth) // 2 :]
            shapes, dtypes = [x.shape for x in plain], [x.dtype for x in plain]
            if [x.shape for x in made] != shapes or [x.dtype for x in made] != dtypes:
                raise Rejected(Verdict.WRONG, Kind.MISMATCH, "the outputs have other shapes or dtypes")
            for at, got in enumerate(made):
                worst = max(worst, _against(got, exact[at], plain[at]))
        judgement = Judgement(
            verdict=Verdict.ACCEPTED, error=worst, detail=f"{trials} calls; {LABEL}: not timed, not ranked",
            verified_by=(LABEL, f"{trials} calls with fresh inputs and weights"),
        )  # fmt: skip
    except Rejected as rejected:
        judgement = replace(rejected.judgement, verified_by=(LABEL,))
    return replace(judgement, sandbox=sandbox.described)


def _of_problem(work: Callable[[], R]) -> R:
    """What goes wrong with the problem is no verdict on an answer."""
    try:
        return work()
    except Rejected as rejected:
        raise InvalidInputError(f"the problem does not run here: {rejected.judgement}") from rejected


def _against(got: Tensor, wanted: Tensor, yardstick: Tensor) -> float:
    """The error in units of what is allowed.

    Raises:
        Rejected: wrong.
    """
    if not got.is_floating_point():
        if not torch.equal(got, yardstick):
            raise Rejected(Verdict.WRONG, Kind.MISMATCH, f"{int((got != yardstick).sum())} integers differ")
        return 0.0
    wide = got.double()
    finite = torch.isfinite(wanted) & torch.isfinite(yardstick)
    if not bool(torch.isfinite(wide[finite]).all()):
        raise Rejected(Verdict.WRONG, Kind.NON_FINITE, "elements are no numbers where the problem's are")
    if not torch.allclose(wide[~finite], yardstick.double()[~finite], rtol=0, atol=0, equal_nan=True):
        raise Rejected(Verdict.WRONG, Kind.MISMATCH, "other values where the problem gives infinity or NaN")
    wide, wanted, yardstick = wide[finite], wanted[finite], yardstick[finite]
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    eps = torch.finfo(got.dtype).eps
    allowed = YARDSTICK * float((yardstick.double() - wanted).abs().max() if wanted.numel() else 0.0) + eps * size
    error = float((wide - wanted).abs().max()) if wanted.numel() else 0.0
    if not error <= allowed:
        constant = got.numel() > 1 and bool((got == got.flatten()[0]).all())
        kind = Kind.CONSTANT_OUTPUT if constant and float(wanted.std()) > 0 else Kind.MISMATCH
        raise Rejected(Verdict.WRONG, kind, f"the largest error is {error:.3g}, {allowed:.3g} is allowed")
    return error / allowed if allowed else 0.0


def _readable(source: str) -> None:
    if not isinstance(source, str):
        raise Rejected(Verdict.MALFORMED, None, f"{shown(source, 40)} is no text")
    if len(source) > LARGEST_SOURCE or "\0" in source:
        raise Rejected(Verdict.MALFORMED, None, f"{len(source)} characters; at most {LARGEST_SOURCE}, none zero")
    try:
        compile(source, "candidate", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Rejected(Verdict.COMPILE_ERROR, None, f"not Python: {error}") from error


def _number(source: str, name: str, seed: int | None) -> int:
    """Drawn after the source is fixed, like the seeds of the other tier."""
    chosen = secrets.token_hex(16) if seed is None else f"{seed}"
    return int.from_bytes(hashlib.sha256(f"{chosen}/{source}/{name}".encode()).digest()[:6], "big")


def _run(sandbox: Sandbox, source: str, sets: list[list[Tensor]], seconds: float | None) -> list[list[Tensor]]:
    with sandbox.folder() as folder:
        (folder / "candidate.py").write_text(source, encoding="utf-8")
        described = []
        for number, tensors in enumerate(sets):
            (folder / f"in{number}.bin").write_bytes(b"".join(x.numpy().tobytes() for x in tensors))
            described.append([{"shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")} for x in tensors])
        result = ended(sandbox.run("host", folder, seconds=seconds, sets=described, entries=list(ENTRIES)))
        return [_outputs(folder, number, one) for number, one in enumerate(_listed(result, len(sets)))]


def _model(sandbox: Sandbox, problem: str, answer: str | None, seed: int, seconds: float | None) -> list[Tensor]:
    """Outputs of the answer; without one those of the problem, in float64 and then in its own dtypes."""
    with sandbox.folder() as folder:
        (folder / "problem.py").write_text(problem, encoding="utf-8")
        if answer is not None:
            (folder / "candidate.py").write_text(answer, encoding="utf-8")
        result = ended(sandbox.run("model", folder, seconds=seconds, answer=answer is not None, seed=seed))
        return _outputs(folder, 0, _listed(result, 1)[0])


def _listed(result: dict[str, Any], count: int) -> list[Any]:
    found = result.get("outputs")
    if not isinstance(found, list) or len(found) != count:
        raise Rejected(Verdict.CRASHED, None, "its process told of no outputs")
    return found


def _outputs(folder: Path, number: int, described: Any) -> list[Tensor]:
    """Tensors from a file of raw bytes; their shapes and dtypes are what the process says, untrusted."""
    sizes = []
    for one in described if isinstance(described, list) else ():
        shape, dtype = (one.get("shape"), one.get("dtype")) if isinstance(one, dict) else (None, None)
        if dtype not in (*DTYPES, "bool", "uint8") or not isinstance(shape, list):
            raise Rejected(Verdict.WRONG, Kind.MISMATCH, f"an output is {shown(one)}")
        count = 1
        for size in shape:
            if type(size) is not int or not 0 <= size <= LARGEST_TENSOR or (count := count * size) > LARGEST_TENSOR:
                raise Rejected(Verdict.WRONG, Kind.MISMATCH, f"an output has the shape {shown(shape)}")
        sizes.append((shape, getattr(torch, dtype), count * getattr(torch, dtype).itemsize))
    memory = read_memory(folder / f"out{number}.bin", sum(size for *_, size in sizes))
    made, at = [], 0
    for shape, dtype, size in sizes:
        made.append(memory[at : at + size].clone().view(dtype).view(shape))
        at += size
    return made


def _named(task: Task, dims: dict[str, int], outputs: list[Tensor]) -> dict[str, Tensor]:
    if len(outputs) != len(task.outputs):
        raise Rejected(Verdict.WRONG, Kind.MISMATCH, f"{len(outputs)} outputs instead of {len(task.outputs)}")
    for one, x in zip(task.outputs, outputs, strict=True):
        if tuple(x.shape) != one.sizes(dims) or x.dtype is not getattr(torch, one.dtype):
            detail = f"{one.name} is {x.dtype} {shown(tuple(x.shape))}, not {one.dtype} {one.sizes(dims)}"
            raise Rejected(Verdict.WRONG, Kind.MISMATCH, detail)
    return {one.name: x for one, x in zip(task.outputs, outputs, strict=True)}
