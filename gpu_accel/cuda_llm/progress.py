"""A search as it went: what each candidate came to, the winner beside the kernel at the start, and both as a file.

    live = Live("softmax", "h100-sxm")
    found = optimize_kernel(task.start, "h100-sxm", tell=live.add)   # in a notebook the figure grows with the search
    print(diff(task.candidate, found.candidate))

`keep` writes the winners of several searches with their course as JSON, `read` reads them; `gpu-accel optimize bench
FILE.json` judges and times those winners again.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import InvalidInputError, shown

from .candidate import Candidate
from .folders import read_plain
from .proposers import Attempt
from .report import Found
from .tasks import Task, find
from .verdict import Rejected

if TYPE_CHECKING:
    import plotly.graph_objects as go

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """One candidate: its verdict, and its time as a multiple of a copy of as many bytes, None where it has none."""

    verdict: str
    time: float | None = None
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The course of one search; the first step is the kernel at the start.

    Args:
        gpu: its name, "" where nothing was timed.
        copy_ms: what the copy took that times are multiples of.
        library: the faster right library's time as a multiple of the copy.
        best: the winner, None while there is none.
        tensor_cores: types that its machine code multiplies on tensor cores, None where that was not looked at.
        repeated: how many of its timed launches were repeated bit for bit.
    """

    task: Task
    target: str
    steps: tuple[Step, ...] = ()
    gpu: str = ""
    taken: str = ""  # when
    copy_ms: float | None = None
    library: float | None = None
    best: Candidate | None = None
    tensor_cores: tuple[str, ...] | None = None
    repeated: int = 0

    @property
    def speedups(self) -> list[float | None]:
        """Each accepted candidate's speed over that of the kernel at the start."""
        first = self.steps[0].time if self.steps else None
        return [first / one.time if first and one.time and one.verdict == "accepted" else None for one in self.steps]

    @property
    def best_so_far(self) -> list[float]:
        """The largest of them up to each candidate; 1 before anything is faster."""
        found, top = [], 1.0
        for one in self.speedups:
            top = max(top, one or 0.0)
            found.append(top)
        return found

    @property
    def roof(self) -> float | None:
        """The speed-up at the roofline of the datasheet, None where the copy's time is not known."""
        first = self.steps[0].time if self.steps else None
        if not first or not self.copy_ms:
            return None
        return first * self.copy_ms / self.task.floor_ms(self.task.bench, self.target)

    def with_(self, attempt: Attempt) -> Progress:
        """One candidate more, or again."""
        step = Step(verdict=attempt.judgement.name, time=attempt.time, change=attempt.change)
        steps = [*self.steps[: attempt.number], step, *self.steps[attempt.number + 1 :]]
        copy = attempt.ms / attempt.time if attempt.ms and attempt.time else None
        return replace(self, steps=tuple(steps), copy_ms=self.copy_ms or copy)


def of_folder(found: Found) -> Progress:
    """The course of a search from its folder."""
    final = found.run.get("final") or {}
    copy, ms = found.ms("copy"), found.ms("candidate")
    over = found.over_library
    steps = [Step(verdict=f"{one['verdict']}({one['kind']})" if one["kind"] else one["verdict"], time=one["time"],
                  change=one["change"]) for one in found.attempts]  # fmt: skip
    return Progress(
        task=found.task, target=found.run["target"], steps=tuple(steps), best=found.best, copy_ms=copy,
        gpu=str((found.run.get("host") or {}).get("env", {}).get("gpu", "")) if final else "",
        taken=str(found.run.get("time", "")), library=over * ms / copy if over and ms and copy else None,
        tensor_cores=tuple(final["tensor_cores"]) if final.get("tensor_cores") is not None else None,
        repeated=int(final.get("repeated") or 0),
    )  # fmt: skip


def keep(courses: Iterable[Progress], path: Path) -> None:
    """Write searches as one file.

    Raises:
        InvalidInputError: it cannot be written.
    """
    rows = [
        {
            "task": one.task.name, "target": one.target, "gpu": one.gpu, "taken": one.taken, "copy_ms": one.copy_ms,
            "library": one.library, "best": one.best.text if one.best else None,
            "tensor_cores": one.tensor_cores, "repeated": one.repeated,
            "steps": [[step.verdict, step.time, step.change] for step in one.steps],
        }
        for one in courses
    ]  # fmt: skip
    lines = ",\n".join(json.dumps(row) for row in rows)
    try:
        path.write_text(f'{{"schema": {SCHEMA}, "searches": [\n{lines}\n]}}\n', encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> list[Progress]:
    """Searches from a file.

    Raises:
        InvalidInputError: it cannot be read, or is none of `keep`.
    """
    try:
        found = json.loads(read_plain(path).decode("utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"of another schema, {shown(found['schema'], 20)}")
        made = [
            Progress(
                task=find(row["task"]), target=row["target"], gpu=row["gpu"], taken=row["taken"],
                copy_ms=row["copy_ms"], library=row["library"], repeated=row.get("repeated", 0),
                tensor_cores=tuple(row["tensor_cores"]) if row.get("tensor_cores") is not None else None,
                best=Candidate.parse(row["best"]) if row["best"] is not None else None,
                steps=tuple(Step(verdict=verdict, time=time, change=change) for verdict, time, change in row["steps"]),
            )
            for row in found["searches"]
        ]  # fmt: skip
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError, Rejected) as error:
        raise InvalidInputError(f"{path} holds no searches: {error}") from error
    return made


def diff(start: Candidate, best: Candidate) -> str:
    """What separates two kernels, as a unified diff of their files."""
    lines = difflib.unified_diff(start.text.splitlines(), best.text.splitlines(), "start", "best", lineterm="", n=2)
    return "\n".join(lines)


def figure(course: Progress) -> go.Figure:
    """Speed over that of the kernel at the start, candidate by candidate, with the library and the roof."""
    from gpu_accel.workbench import plots

    go = plots._plotly()
    stamp = f"measured on {course.gpu}, {course.taken}" if course.gpu else "checked: without a GPU nothing is timed"
    drawn = go.Figure(layout={
        "template": plots.template(), "height": 420, "meta": {"stamp": stamp}, "title": {
            "text": f"{course.task.title}: {len(course.steps)} candidates",
            "subtitle": {"text": stamp, "font": {"size": 12, "color": "#5b6673"}},
        },
    })  # fmt: skip
    numbers = list(range(len(course.steps)))
    fine = [at for at, speed in enumerate(course.speedups) if speed]
    bad = [at for at, one in enumerate(course.steps) if one.verdict != "accepted"]

    def add(name: str, at: Sequence[int], y: Sequence[float | None], **more: Any) -> None:
        words = [f"{course.steps[n].change or 'the kernel at the start'}<br>{course.steps[n].verdict}" for n in at]
        drawn.add_trace(go.Scatter(x=list(at), y=list(y), name=name, text=words, hovertemplate="%{x}: %{y:.3g} x<br>"
                                   "%{text}<extra></extra>", **more))  # fmt: skip

    if fine:
        add("candidate", fine, [course.speedups[at] for at in fine], mode="markers")
        add("best so far", numbers, course.best_so_far, mode="lines", line={"shape": "hv"})
    if bad:
        add("rejected", bad, [1.0] * len(bad), mode="markers", marker={"symbol": "x", "color": "#c2410c"})
    first = course.steps[0].time if course.steps else None
    for name, speed in (("roofline", course.roof), ("library", first / course.library if first and course.library
                                                    else None)):  # fmt: skip
        if speed:
            drawn.add_hline(y=speed, line={"dash": "dot", "width": 1, "color": "#5b6673"}, annotation_text=name)
    drawn.update_xaxes(title_text="candidate")
    drawn.update_yaxes(type="log", title_text="speed over that at the start")
    return plots._note_if_empty(drawn, not fine, f"{len(course.steps) - len(bad)} accepted, {len(bad)} rejected")


class Live:
    """A figure that is drawn again with every candidate: `tell=live.add`. Outside of a notebook it draws nothing."""

    def __init__(self, task: Task | str, target: str) -> None:
        self.course = Progress(task=find(task) if isinstance(task, str) else task, target=target)
        self._display: Any = None

    def add(self, attempt: Attempt) -> None:
        """Take one candidate in and draw."""
        self.course = self.course.with_(attempt)
        if self._display is not None:
            self._display.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, Any]:
        from gpu_accel.workbench.notebook import _bundle

        return _bundle(figure(self.course))

    def _ipython_display_(self) -> None:
        from IPython.display import display

        self._display = display(self._drawn(), raw=True, display_id=True)
