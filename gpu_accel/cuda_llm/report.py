"""What searches came to: a table, `fast_p` as KernelBench defines it, and FlashInfer's trace format.

`fast_p` is the share of all tasks whose best kernel is right and more than p times as fast as a baseline; tasks without
a kernel count as not. It is given with the baseline's name: over a naive kernel it says little.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.statistics import median

from .artefact import best_of, make_folder, read_attempts, read_run
from .candidate import Candidate
from .measure import LIBRARIES, over_best_library
from .tasks import Task, find
from .tasks.task import UNIT
from .verdict import Verdict

_STATUS = {
    Verdict.ACCEPTED: "PASSED", Verdict.WRONG: "INCORRECT_NUMERICAL", Verdict.TIMEOUT: "TIMEOUT",
    Verdict.COMPILE_ERROR: "COMPILE_ERROR", Verdict.MALFORMED: "COMPILE_ERROR",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of one search, from its folder."""

    task: Task
    folder: Path
    run: Mapping[str, Any]
    attempts: Sequence[Mapping[str, Any]]

    @property
    def best(self) -> Candidate:
        """The best kernel, which is the one that was timed.

        Raises:
            InvalidInputError: there is none, or it was changed.
        """
        found = best_of(self.folder)
        if found.digest != self.run.get("best", found.digest):
            raise InvalidInputError(f"{self.folder}: the best kernel was changed since it was timed")
        return found

    @property
    def best_row(self) -> Mapping[str, Any]:
        """What attempts.jsonl says of it.

        Raises:
            InvalidInputError: nothing.
        """
        digest = self.run.get("best")
        for one in self.attempts:
            if digest and digest in one["file"]:
                return one
        raise InvalidInputError(f"{self.folder}: no attempt is the best kernel that run.json names")

    def ms(self, name: str) -> float | None:
        """Median milliseconds of an implementation in the final timing."""
        final = self.run.get("final") or {}
        for part in ("samples", "slow"):
            if final.get(part, {}).get(name):
                return median(final[part][name])
        return None

    def ratio(self, name: str) -> float | None:
        """How many times as long a baseline takes, in common rounds; None where it was not timed."""
        final = self.run.get("final") or {}
        for part in ("samples", "slow"):
            taken = final.get(part, {})
            if taken.get(name) and taken.get("candidate"):
                return median(taken[name]) / median(taken["candidate"])
        return None

    @property
    def over_library(self) -> float | None:
        """How many times as long the faster of torch and torch.compile takes, of those that are right."""
        final = self.run.get("final") or {}
        errors = {name: final.get(f"{name}_error") for name in LIBRARIES}
        return over_best_library(final.get("samples", {}), errors)

    @property
    def warm(self) -> dict[str, float | None]:
        """Median milliseconds with a warm cache, and the faster library's time over them; None where not taken."""
        final = self.run.get("final") or {}
        taken = final.get("warm", {})
        errors = {name: final.get(f"{name}_error") for name in LIBRARIES}
        return {"warm_ms": median(taken["candidate"]) if taken.get("candidate") else None,
                "warm_library_over_best": over_best_library(taken, errors)}  # fmt: skip

    def row(self) -> dict[str, Any]:
        """One line of the table."""
        verdicts: dict[str, int] = {}
        for one in self.attempts:
            name = f"{one['verdict']}({one['kind']})" if one["kind"] else one["verdict"]
            verdicts[name] = verdicts.get(name, 0) + 1
        gpu = self.run.get("environment", {}).get("gpu")
        floor = self.task.floor_ms(self.task.bench, self.run["target"])
        ms = self.ms("candidate")
        return {
            "task": self.task.name, "gpu": gpu, "proposer": self.run.get("proposer"), "candidates": len(self.attempts),
            "verdicts": verdicts, "ms": ms, "share_of_roofline": floor / ms if ms else None,
            "naive_over_best": self.ratio("naive"), "library_over_best": self.over_library,
            "torch_over_best": self.ratio("library"), "compiled_over_best": self.ratio("compiled"), **self.warm,
            "over_start": self.run.get("speedup_over_start"), "dollars": self.run.get("dollars"),
            "note": self.run.get("note"),
        }  # fmt: skip


def read_folder(folder: Path) -> list[Found]:
    """All searches in a folder: itself, or one for each task below it.

    Raises:
        InvalidInputError: there is none.
    """
    places = [folder] if (folder / "run.json").is_file() else sorted(one.parent for one in folder.glob("*/run.json"))
    if not places:
        raise InvalidInputError(f"{folder} holds no search: there is no run.json in it, nor in a folder below it")
    found = []
    for place in places:
        run = read_run(place)
        found.append(Found(task=find(str(run.get("task"))), folder=place, run=run, attempts=read_attempts(place)))
    return found


def fast_p(ratios: Mapping[str, float | None], p: float, *, tasks: int | None = None) -> float:
    """Share of tasks with a correct kernel more than `p` times as fast as the baseline.

    Args:
        ratios: by task, baseline over kernel; None where no kernel is right.
        tasks: how many there are, if more than in `ratios`.
    Raises:
        InvalidInputError: p is negative, or there are no tasks.
    """
    count = tasks if tasks is not None else len(ratios)
    if not 0 <= p < math.inf or count < max(len(ratios), 1):
        raise InvalidInputError(f"fast_p of p = {p!r} over {count} tasks makes no sense")
    return sum(ratio is not None and ratio > p for ratio in ratios.values()) / count


# -- FlashInfer's trace format


def definition(task: Task) -> dict[str, Any]:
    """The task as a Definition; sizes that no input's shape tells are constants of the timed shape."""
    told = [name for one in task.inputs for name in one.shape if name in task.dims]
    axes: dict[str, Any] = {
        name: {"type": "var"} if name in told else {"type": "const", "value": task.bench[name]} for name in task.dims
    }
    constraints: list[str] = []

    def spec(buffer: Any, output: bool) -> dict[str, Any]:
        shape = []
        for at, size in enumerate(buffer.shape):
            name = str(size)
            if name not in axes:
                name = f"{buffer.name}_{at}"
                derived = buffer.sizes(task.bench)[at]
                axes[name] = {"type": "const", "value": derived} if output or isinstance(size, int) else {"type": "var"}
                constraints.append(f"{name} == {size}")
            shape.append(name)
        return {"shape": shape, "dtype": buffer.dtype}

    inputs = {one.name: spec(one, False) for one in task.inputs}
    outputs = {one.name: spec(one, True) for one in task.outputs}
    names = ", ".join(inputs)
    sizes = ", ".join(f"{name!r}: {_where(task, name)}" for name in task.dims)
    tensors = ", ".join(f"{name!r}: {name}" for name in inputs)
    casts = ", ".join(f'truth["{one.name}"].value.to(torch.{one.dtype})' for one in task.outputs)
    reference = (
        f"import torch\n\nfrom gpu_accel.cuda_llm import find\n\n\ndef run({names}):\n"
        f'    truth = find("{task.name}").truth({{{tensors}}}, {{{sizes}}})\n    return {casts}\n'
    )
    return {
        "name": f"gpu_accel_{task.name}", "op_type": task.family, "axes": axes, "inputs": inputs, "outputs": outputs,
        "reference": reference, "tags": ["gpu-accel"], "description": task.title, "constraints": constraints,
    }  # fmt: skip


def _where(task: Task, dim: str) -> str:
    for one in task.inputs:
        if dim in one.shape:
            return f"{one.name}.shape[{one.shape.index(dim)}]"
    return str(task.bench[dim])


def workload(task: Task) -> dict[str, Any]:
    """The shape that is timed."""
    axes = {name: value for name, value in _axes(task).items() if definition(task)["axes"][name]["type"] == "var"}
    text = json.dumps([task.name, axes], sort_keys=True)
    return {"axes": axes, "inputs": {one.name: {"type": "random"} for one in task.inputs},
            "uuid": hashlib.sha256(text.encode()).hexdigest()[:32]}  # fmt: skip


def _axes(task: Task) -> dict[str, int]:
    found = dict(task.bench)
    for one in (*task.inputs, *task.outputs):
        for at, (name, size) in enumerate(zip(one.shape, one.sizes(task.bench), strict=True)):
            found.setdefault(name if name in task.dims else f"{one.name}_{at}", size)  # type: ignore[arg-type]
    return found


def solution(task: Task, candidate: Candidate) -> dict[str, Any]:
    """The kernel as a Solution: it is launched by this library, whatever its language."""
    names = ", ".join(one.name for one in task.inputs)
    given = ", ".join(f"{one.name}={one.name}" for one in task.inputs)
    told = {name for one in task.inputs for name in one.shape}
    sizes = "".join(f", {name}={task.bench[name]}" for name in task.dims if name not in told)
    outputs = ", ".join(f'found["{one.name}"]' for one in task.outputs)
    main = (
        "from pathlib import Path\n\nfrom gpu_accel.cuda_llm.deploy import deploy\n\n"
        f'_kernel = deploy(Path(__file__).with_name("kernel.txt").read_text("utf-8"), "{task.name}")\n\n\n'
        f"def run({names}):\n    found = _kernel({given}{sizes})\n    return {outputs}\n"
    )
    return {
        "name": f"gpu_accel_{task.name}_{candidate.digest}", "definition": f"gpu_accel_{task.name}",
        "author": "gpu-accel", "description": f"{candidate.language} kernel with its launch header in kernel.txt",
        "spec": {"language": "python", "target_hardware": ["cuda"], "entry_point": "main.py::run",
                 "dependencies": ["gpu-accel"], "destination_passing_style": False},
        "sources": [{"path": "main.py", "content": main}, {"path": "kernel.txt", "content": candidate.text}],
    }  # fmt: skip


def trace(found: Found) -> dict[str, Any]:
    """The outcome as a Trace, with the faster of torch and torch.compile as its reference latency.

    Raises:
        InvalidInputError: the search timed nothing.
    """
    final = found.run.get("final")
    ms, over = found.ms("candidate"), found.over_library
    if not final or ms is None or over is None:
        raise InvalidInputError(f"{found.folder}: a trace needs times of the best kernel and of the library")
    reference = over * ms
    status = _STATUS.get(Verdict(final["judgement"]["verdict"]), "RUNTIME_ERROR")
    best = found.best_row
    made: dict[str, Any] = {
        "status": status, "timestamp": str(found.run.get("time", "unknown")), "log": found.run.get("note", ""),
        "environment": {"hardware": found.run["environment"].get("gpu", "unknown"),
                        "libs": {k: v for k, v in found.run["environment"].items() if k != "gpu"}},
    }  # fmt: skip
    error = best["error"] or 0.0
    relative = error * found.task.tolerance * UNIT  # of the magnitudes that went into each element
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        made["correctness"] = {"max_relative_error": relative, "max_absolute_error": "NaN",
                               "extra": {"error_over_bound": error}}  # fmt: skip
    if status == "PASSED":
        made["performance"] = {"latency_ms": ms, "reference_latency_ms": reference, "speedup_factor": over}
    return {
        "definition": f"gpu_accel_{found.task.name}", "workload": workload(found.task),
        "solution": f"gpu_accel_{found.task.name}_{found.best.digest}", "evaluation": made,
    }  # fmt: skip


def export_traces(found: Sequence[Found], folder: Path) -> list[Path]:
    """Write definitions, workloads, solutions and traces as FlashInfer's data sets have them; returns the files."""
    written: list[Path] = []

    def put(path: str, text: str) -> None:
        make_folder((folder / path).parent)
        (folder / path).write_text(text, encoding="utf-8")
        written.append(folder / path)

    for one in found:
        task, name = one.task, f"gpu_accel_{one.task.name}"
        put(f"definitions/{task.family}/{name}.json", json.dumps(definition(task), indent=1) + "\n")
        put(f"workloads/{task.family}/{name}.jsonl",
            json.dumps({"definition": name, "workload": workload(task)}) + "\n")  # fmt: skip
        made = solution(task, one.best)
        put(f"solutions/gpu-accel/{task.family}/{name}/{made['name']}.json", json.dumps(made, indent=1) + "\n")
        if one.run.get("final"):
            put(f"traces/{task.family}/{name}.jsonl", json.dumps(trace(one)) + "\n")
    return written


__all__ = ["Found", "definition", "export_traces", "fast_p", "read_folder", "solution", "trace", "workload"]
