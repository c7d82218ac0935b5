"""Finalists under compute-sanitizer, where it is installed (it comes with the CUDA toolkit).

    judgement = sanitize(candidate, task, sandbox=sandbox, judged=check(candidate, task, sandbox=sandbox))

The kernel is launched on small shapes, shown and hidden, with every buffer an allocation of its own: memcheck sees
reads behind a buffer too, which the guards of the check see only if they spoil a result. Kernels with shared memory run
under racecheck as well, those with scratch memory that nobody fills under initcheck. What a machine could not do is
said in the judgement's detail: nothing is passed over in silence.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import sanitized
from .candidate import Candidate
from .harness import Program, bind, draw, ended, job, write
from .sandbox import Sandbox
from .tasks import Task
from .verdict import Judgement, Kind, Rejected, Verdict

LAUNCHES = 4
SECONDS = 90.0
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_RACES = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_MEMORY = re.compile(r"Invalid __\w+__ (?:read|write|atomic)|[Mm]isaligned|out of bounds")
_UNWRITTEN = re.compile(r"Uninitialized __\w+__ memory read")
_FOUND = re.compile(r"^=+ ((?:Invalid|Uninitialized|Error|Race|Potential|Misaligned|Program hit|Address)\b.*)$", re.M)


@functools.cache
def tool() -> str:
    """Where compute-sanitizer is; "" if it is not installed."""
    folders = [os.environ.get("PATH", ""), *(f"{one}/bin" for one in (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
                                             if one)]  # fmt: skip
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders)) or ""


def level() -> str:
    """What finalists go through here, in words."""
    return f"memcheck, racecheck and initcheck of finalists ({tool()})" if tool() else f"none: {_ABSENT}"


_ABSENT = "compute-sanitizer is not installed"


def sanitize(candidate: Candidate, task: Task, *, sandbox: Sandbox, judged: Judgement) -> Judgement:
    """The judgement of a candidate that passed `check`, after the tools that there are; another if one objects.

    wrong(out_of_bounds) for what memcheck reports, wrong(not_deterministic) for what initcheck does, wrong(race) for
    races in shared memory. Those of Triton's kernels
    are reported and decide nothing: their barriers are the compiler's. Kernels that wait at mbarriers are not run under
    racecheck, which does not follow them.
    """
    if not judged.ok or not sandbox.gpu:
        return judged
    if not tool():
        return replace(judged, detail=_more(judged.detail, _ABSENT))
    try:
        result = _run(candidate, task, sandbox)
    except Rejected as rejected:  # the kernel has passed without the tool: that it ends badly with it decides nothing
        return replace(judged, detail=_more(judged.detail, f"compute-sanitizer did not run: {rejected.detail}"))
    return read(result, candidate.language, judged)


def read(result: Mapping[str, Any], language: str, judged: Judgement) -> Judgement:
    """What reports of the tools mean; a report that is none is said to be none."""
    passed, remarks = [], []
    for name in ("memcheck", "racecheck", *(["initcheck"] if "initcheck" in result else [])):
        text, why = str(result.get(name, "")), str(result.get(f"{name}_not", ""))
        if why:
            remarks.append(f"{name}: {why[:100]}")
            continue
        counted = _RACES.search(text) if name == "racecheck" else _SUMMARY.search(text)
        launched = text.count("launched\n")
        found = tuple(" ".join(one.split())[:120] for one in _FOUND.findall(text)[:5])
        if counted is None or (launched < result.get("launches", 1) and not int(counted[1])):
            remarks.append(f"{name} did not run: {' '.join(text.split())[-200:] or 'it said nothing'}")
        elif not int(counted[1]):
            passed.append(f"compute-sanitizer {name} of {launched} launches")
        elif name == "memcheck" and not _MEMORY.search(text):
            remarks.append(f"memcheck reports {counted[1]} errors, none of memory: {found[:1]}")
        elif name == "initcheck":
            if not _UNWRITTEN.search(text):
                remarks.append(f"initcheck reports {counted[1]} errors, none of memory: {found[:1]}")
                continue
            detail = f"initcheck reports {counted[1]} reads of memory that was never written"
            return replace(judged, verdict=Verdict.WRONG, kind=Kind.NOT_DETERMINISTIC, detail=detail, evidence=found)
        elif name == "memcheck":
            detail = f"memcheck reports {counted[1]} errors on small shapes"
            return replace(judged, verdict=Verdict.WRONG, kind=Kind.OUT_OF_BOUNDS, detail=detail, evidence=found)
        elif language == "cuda":
            detail = f"racecheck reports {counted[1]} errors in shared memory"
            return replace(judged, verdict=Verdict.WRONG, kind=Kind.RACE, detail=detail, evidence=found)
        else:
            remarks.append(f"racecheck reports {counted[1]} errors between barriers that Triton placed: {found[:1]}")
    detail = functools.reduce(_more, remarks, judged.detail)
    return replace(judged, detail=detail, verified_by=(*judged.verified_by, *passed))


def _run(candidate: Candidate, task: Task, sandbox: Sandbox) -> dict[str, Any]:
    program = Program.of(candidate)
    bind(program, candidate.launch, task)
    trials = [one for one in draw(task, candidate, None) if one.repeats < 0]
    chosen = [*trials[: LAUNCHES - 2], *[one for one in trials if one.hidden][-2:]]
    chosen = [one for one in chosen if 0 not in candidate.launch.resolve(one.dims)[0]]
    with sandbox.folder() as folder:
        write(program, folder)
        (folder / "sanitized.py").write_text(Path(sanitized.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        for number, trial in enumerate(chosen):
            (folder / f"in{number}.bin").write_bytes(trial.before.numpy().tobytes())
        more = {"tool": tool(), "shared": "__shared__" in program.source}
        outcome = sandbox.run("sanitize", folder, seconds=SECONDS, **job(program, candidate.launch, chosen), **more)
        return ended(outcome)


def _more(detail: str, remark: str) -> str:
    return f"{detail}; {remark}" if detail else remark
