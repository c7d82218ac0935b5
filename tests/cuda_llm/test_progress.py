"""A search as a figure and as one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_accel.cuda_llm import TASKS, Candidate, Judgement, Kind, Verdict
from gpu_accel.cuda_llm.progress import Live, Progress, Step, diff, figure, keep, read
from gpu_accel.cuda_llm.proposers import Attempt
from gpu_accel.errors import InvalidInputError

TASK = TASKS["softmax"]
STEPS = (
    Step(verdict="accepted", time=4.0), Step(verdict="wrong(precision)", change="num_warps 4 -> 1"),
    Step(verdict="accepted", time=2.0, change="num_warps 4 -> 8"), Step(verdict="accepted", time=3.0),
)  # fmt: skip


def course(**more) -> Progress:
    return Progress(task=TASK, target="h100-sxm", steps=STEPS, copy_ms=0.09, library=2.5, gpu="H100",
                    best=TASK.candidate.with_(num_warps=8), **more)  # fmt: skip


def test_speeds_are_over_that_of_the_start_and_the_best_is_kept() -> None:
    one = course()
    assert one.speedups == [1.0, None, 2.0, 4 / 3] and one.best_so_far == [1.0, 1.0, 2.0, 2.0]
    assert one.roof == pytest.approx(4 * 0.09 / TASK.floor_ms(TASK.bench, "h100-sxm"))
    empty = Progress(task=TASK, target="h100-sxm")
    assert empty.speedups == [] and empty.best_so_far == [] and empty.roof is None


def test_searches_survive_a_file(tmp_path: Path) -> None:
    listed = [course(), Progress(task=TASKS["reverse"], target="h100-sxm", steps=STEPS[1:2])]
    keep(listed, tmp_path / "all.json")
    assert read(tmp_path / "all.json") == listed


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 9}', '{"schema": 1, "searches": [{}]}'])
def test_what_is_no_such_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InvalidInputError, match="holds no searches"):
        read(tmp_path / "x.json")
    with pytest.raises(InvalidInputError, match="cannot read"):
        read(tmp_path / "none.json")
    with pytest.raises(InvalidInputError, match="cannot write"):
        keep([], tmp_path / "none" / "x.json")


def test_a_diff_shows_what_was_changed() -> None:
    told = diff(TASK.candidate, TASK.candidate.with_(num_warps=8)).splitlines()
    assert "-# num_warps = 4" in told and "+# num_warps = 8" in told
    assert diff(TASK.candidate, TASK.candidate) == ""


def test_a_figure_has_candidates_rejections_and_two_lines() -> None:
    pytest.importorskip("plotly")
    drawn = figure(course())
    by_name = {trace.name: trace for trace in drawn.data}
    assert list(by_name["candidate"].x) == [0, 2, 3] and list(by_name["candidate"].y) == [1.0, 2.0, 4 / 3]
    assert list(by_name["rejected"].x) == [1] and "wrong(precision)" in by_name["rejected"].text[0]
    assert {note.text for note in drawn.layout.annotations} == {"roofline", "library"}
    plain = figure(Progress(task=TASK, target="h100-sxm", steps=(Step(verdict="accepted"),)))
    assert [note.text for note in plain.layout.annotations] == ["1 accepted, 0 rejected"]


def test_a_live_figure_grows_with_its_search() -> None:
    pytest.importorskip("plotly")
    live, drawn = Live("softmax", "h100-sxm"), []
    for number, (verdict, time) in enumerate([(Verdict.ACCEPTED, 2.0), (Verdict.WRONG, None), (Verdict.ACCEPTED, 1.0)]):
        kind = Kind.MISMATCH if verdict is Verdict.WRONG else None
        live.add(Attempt(number=number, candidate=TASK.candidate, judgement=Judgement(verdict=verdict, kind=kind),
                         time=time, ms=time and 0.1 * time))  # fmt: skip
        if live._display is None:
            live._display = type("Shown", (), {"update": lambda self, bundle, raw: drawn.append(bundle)})()
    assert live.course.speedups == [1.0, None, 2.0] and live.course.copy_ms == pytest.approx(0.1)
    assert len(drawn) == 2 and all("application/vnd.plotly.v1+json" in bundle for bundle in drawn)


WINNERS = sorted((Path(__file__).parents[2] / "papers" / "cuda_llm" / "winners").glob("*.json"))


@pytest.mark.parametrize("path", WINNERS, ids=lambda path: path.stem)
def test_committed_winners_are_candidates_for_their_tasks(path: Path) -> None:
    from gpu_accel.cuda_llm.harness import Program, bind

    for one in read(path):
        assert isinstance(one.best, Candidate) and one.steps[0].verdict == "accepted"
        bind(Program.of(one.best), one.best.launch, one.task)
        assert max(one.best_so_far) >= 1 and one.roof is not None
