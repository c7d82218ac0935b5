"""Searches as folders: the report, fast_p, FlashInfer's trace format, and kernels as functions."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import signal
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_accel.cuda_llm import TASKS, Judgement, Verdict, optimize_kernel
from gpu_accel.cuda_llm import search as search_module
from gpu_accel.cuda_llm.deploy import deploy, dims_of
from gpu_accel.cuda_llm.measure import Measured, over_best_library
from gpu_accel.cuda_llm.report import definition, export_traces, fast_p, read_folder, solution, trace, workload
from gpu_accel.errors import HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError
from gpu_accel.workbench.experiment import Settings


class Clocked:
    """A sandbox that says it has a GPU."""

    gpu, described = True, ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search whose kernels take 2 ms, beside torch with 3, torch.compile with 2.5 and a naive kernel with 40."""
    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED, error=0.25))
    monkeypatch.setattr(search_module, "measure", lambda *given, **more: Measured(
        judgement=Judgement(verdict=Verdict.ACCEPTED), compared=2,
        slow={"candidate": (2.0, 2.0), "naive": (40.0, 40.0)},
        samples={"candidate": (2.0, 2.0), "copy": (1.0, 1.0), "library": (3.0, 3.0), "compiled": (2.5, 2.5)},
        warm={"candidate": (1.0, 1.0), "copy": (0.5, 0.5), "library": (1.5, 1.5), "compiled": (3.0, 3.0)},
        method="events", warm_method="graph", library_error=0.5, compiled_error=0.5,
        tensor_cores=("tf32",), repeated=70,
    ))  # fmt: skip
    env = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM", "torch": "2.11"}
    monkeypatch.setattr(search_module, "host", lambda: {"env": env, "commit": "c" * 40, "dirty": False})
    for name in ("softmax", "reverse"):
        optimize_kernel(
            TASKS[name].start, candidates=2, out=tmp_path / name, peers=("library", "compiled", "naive"),
            sandbox=Clocked(),  # type: ignore[arg-type]
        )  # fmt: skip
    return tmp_path


def test_a_report_has_every_ratio_with_its_baseline(folder: Path) -> None:
    rows = {one.task.name: one.row() for one in read_folder(folder)}
    assert list(rows) == ["reverse", "softmax"]
    row = rows["softmax"]
    assert row["naive_over_best"] == 20 and row["verdicts"] == {"accepted": 3}
    assert row["torch_over_best"] == 1.5 and row["compiled_over_best"] == row["library_over_best"] == 1.25
    assert row["share_of_roofline"] == pytest.approx(TASKS["softmax"].floor_ms(TASKS["softmax"].bench, "h100-sxm") / 2)
    assert row["warm_ms"] == 1 and row["warm_library_over_best"] == 1.5
    assert read_folder(folder / "reverse")[0].task.name == "reverse"
    with pytest.raises(InvalidInputError, match="no search"):
        read_folder(folder / "softmax" / "none")


@pytest.mark.parametrize(
    ("errors", "ratio"),
    [
        ({"library": 0.1, "compiled": 0.2}, 1.25),
        ({"library": 0.1, "compiled": 1.5}, 1.5),
        ({"library": 0.1}, 1.5),
        ({"library": 2.0, "compiled": None}, None),
    ],
    ids=["both-right", "compiled-wrong", "not-compiled", "none-right"],
)
def test_the_library_is_the_faster_of_those_that_are_right(errors: dict, ratio: float | None) -> None:
    samples = {"candidate": (2.0, 2.0), "library": (3.0, 3.0), "compiled": (2.5, 2.5)}
    assert over_best_library(samples, errors) == ratio


def test_fast_p_counts_all_tasks_and_is_strict() -> None:
    ratios = {"a": 1.0, "b": 1.5, "c": 3.0, "d": None}
    assert fast_p(ratios, 0) == 0.75 and fast_p(ratios, 1) == 0.5 and fast_p(ratios, 1.5) == 0.25
    assert fast_p(ratios, 0, tasks=6) == 0.5
    for bad in (lambda: fast_p(ratios, -1), lambda: fast_p({}, 1), lambda: fast_p(ratios, 1, tasks=2)):
        with pytest.raises(InvalidInputError, match="makes no sense"):
            bad()


@pytest.mark.parametrize("name", TASKS)
def test_definitions_keep_the_rules_of_the_format(name: str) -> None:
    """Names do not overlap, shapes name axes, constraints and reference parse, variable axes follow from inputs."""
    task = TASKS[name]
    made, shape = definition(task), workload(task)
    assert not set(made["inputs"]) & set(made["outputs"])
    for one in (*made["inputs"].values(), *made["outputs"].values()):
        assert all(axis in made["axes"] for axis in one["shape"])
    told = {axis for one in made["inputs"].values() for axis in one["shape"]}
    variable = {axis for axis, one in made["axes"].items() if one["type"] == "var"}
    assert variable <= told and set(shape["axes"]) == variable
    known = shape["axes"] | {axis: one["value"] for axis, one in made["axes"].items() if one["type"] == "const"}
    for text in made["constraints"]:
        left, right = text.split(" == ")
        assert known[left] == eval(right, {}, known | task.bench)
    for source in (made["reference"], solution(task, task.candidate)["sources"][0]["content"]):
        assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in ast.parse(source).body)


@pytest.mark.parametrize("name", ["dot", "histogram", "matrix_copy"])
def test_a_reference_runs(name: str) -> None:
    task = TASKS[name]
    dims = task.shown[0] | ({"bins": task.bench["bins"]} if name == "histogram" else {})
    if name == "matrix_copy":
        dims = dims | {"cols": task.bench["cols"], "gap": task.bench["gap"]}  # constants of the timed shape
    inputs = task.draw(dims, family="normal", seed=1)
    space: dict = {}
    exec(definition(task)["reference"], space)
    found = space["run"](*inputs.values())
    found = found if isinstance(found, tuple) else (found,)
    assert torch.equal(found[0], task.truth(inputs, dims)["out"].value.to(found[0].dtype))


def test_traces_have_what_their_status_demands(folder: Path, tmp_path: Path) -> None:
    found = read_folder(folder)
    files = export_traces(found, tmp_path / "out")
    assert sorted({one.relative_to(tmp_path / "out").parts[0] for one in files}) == [
        "definitions", "solutions", "traces", "workloads",
    ]  # fmt: skip
    made = trace(found[1])
    outcome = made["evaluation"]
    assert outcome["status"] == "PASSED" and outcome["performance"]["speedup_factor"] == 1.25
    assert outcome["correctness"]["max_relative_error"] == pytest.approx(0.25 * 16 * 2**-24)
    file = next((tmp_path / "out" / "solutions").rglob("*softmax_*.json"))
    assert made["solution"] == json.loads(file.read_text())["name"]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer_bench") is None, reason="flashinfer-bench is not installed")
def test_flashinfer_bench_reads_the_traces(folder: Path, tmp_path: Path) -> None:
    from flashinfer_bench.data import TraceSet

    export_traces(read_folder(folder), tmp_path / "out")
    read = TraceSet.from_path(str(tmp_path / "out"))
    assert set(read.definitions) == {"gpu_accel_softmax", "gpu_accel_reverse"} and len(read.traces) == 2


def test_sizes_of_a_deployed_kernel_follow_from_its_inputs() -> None:
    x = torch.zeros(3, 5)
    assert dims_of(TASKS["softmax"], {"x": x}, {}) == {"rows": 3, "cols": 5}
    assert dims_of(TASKS["matrix_copy"], {"x": x}, {"cols": 4, "gap": 1}) == {"rows": 3, "cols": 4, "gap": 1}
    for inputs, given, why in (
        ({}, {}, "needs the input x"), ({"x": x.double()}, {}, "float32"), ({"x": x.t()}, {}, "contiguous"),
        ({"x": x}, {"cols": 4}, "has the shape"), ({"x": x}, {"depth": 4}, "no size"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=why):
            dims_of(TASKS["softmax"], inputs, given)
    for gap in (-1, "1", 1.0, True, 2**31):
        with pytest.raises(InvalidInputError, match="a size is an integer"):
            dims_of(TASKS["matrix_copy"], {"x": x}, {"cols": 4, "gap": gap})  # type: ignore[dict-item]
    for hostile, why in ((x.clone().requires_grad_(), "no gradient"), (x.to_sparse(), "to_dense"),
                         (torch.complex(x, x).conj().imag.view(3, 5), "negates")):  # fmt: skip
        with pytest.raises(UnsupportedError, match=why):
            dims_of(TASKS["softmax"], {"x": hostile}, {})
    with torch.no_grad():
        dims_of(TASKS["softmax"], {"x": x.clone().requires_grad_()}, {})
    with pytest.raises(InvalidInputError, match="give the size"):
        dims_of(TASKS["matrix_copy"], {"x": x}, {})
    with pytest.raises(InvalidInputError, match="no candidate"):
        deploy("x = 1", "softmax")
    with pytest.raises(HardwareError, match="GPU"):
        deploy(TASKS["softmax"].start, "softmax")(x=x)


def test_records_of_a_search_are_those_of_the_ledger(folder: Path) -> None:
    from gpu_accel.cuda_llm.records_table import by_task, headings, records_of, rows, summary, text

    made = [record for one in read_folder(folder) for record in records_of(one)]
    assert {(one.impl, one.metric) for one in made if one.case["task"] == "softmax"} >= {
        ("grammar", "time"), ("library", "time"), ("naive", "time"), ("compiled", "time"),
        ("grammar", "library_over_best"), ("grammar", "compiled_over_best"),
    }  # fmt: skip
    assert all(one.kind == "measured" and one.commit == "c" * 40 and one.checked for one in made)
    warm = [one for one in made if one.timing.get("l2") == "warm"]
    assert {one.impl for one in warm} == {"grammar", "library", "compiled"} and not any(one.work for one in warm)
    assert {one.key for one in warm}.isdisjoint(one.key for one in made if one.timing.get("l2") == "flushed")
    assert all(bool(one.timing) == (one.metric == "time") for one in made), "as `run` keeps them, under the same keys"
    older = [replace(one, time="2026-01-01T00:00:00+00:00", commit="a" * 40, median=9.0, samples=(), p20=None, p80=None,
                     metric="roof") for one in made if one.metric == "copies"]  # fmt: skip
    assert by_task([*older, *made]) == by_task(made), "a row is of one run"
    assert by_task(made)["softmax"]["naive_over_best"] == 20 and by_task(made)["softmax"]["time"] == 2
    assert [row[0] for row in rows(made)] == ["reverse", "softmax"] and rows(made)[0][8:] == ["1", "1.5"]
    assert "| library / best, warm |" in text(made)
    cold = [one for one in made if one not in warm]
    assert len(rows(cold)[0]) == 8 and "warm" not in text(cold)
    assert [len(headings(some)) for some in (made, cold)] == [len(rows(some)[0]) for some in (made, cold)] == [10, 8]
    assert "2 are faster than the naive kernel" in summary(made) and "2 are faster than both" in summary(made)
    assert by_task(made)["softmax"]["repeated"] == 70 and by_task(made)["softmax"]["on_tensor_cores"] == 1
    assert "computes in plain float32, multiply reverse, softmax. " in summary(made)
    without = [one for one in made if one.metric != "on_tensor_cores"]
    assert "tensor cores" not in summary(without), "records of before say nothing of them"
    assert summary([]) == "No search is on record."
    again = [replace(one, experiment="winners") for one in made]
    assert "by a run of its own (`winners`, commit ccccccc): 2 winners are accepted" in text([*made, *again])
    assert "winners" not in text(made) and by_task(again) == {} and by_task([*made, *again]) == by_task(made)
    other = [replace(one, env=one.env | {"gpu": "NVIDIA H200", "sku": "H200 SXM"}) for one in made]
    both = text([*made, *other])
    assert both.count("| softmax |") == 2 and "on NVIDIA H200:" in both
    assert rows(other)[1][2] != rows(made)[1][2], "the roofline is that of the card"


@pytest.mark.parametrize("verdict", [Verdict.ACCEPTED, Verdict.WRONG])
def test_winners_are_judged_and_timed_again(monkeypatch: pytest.MonkeyPatch, folder: Path, verdict: Verdict) -> None:
    from papers.cuda_llm import experiment

    judged = Judgement(verdict=verdict, error=0.25)
    times = {"candidate": (1.0, 1.0), "copy": (1.0, 1.0), "library": (2.0, 2.0)}
    taken = Measured(judgement=judged, samples=times, slow={"candidate": (1.0,), "naive": (5.0,)}, library_error=0.1,
                     failed={"compiled": "why"}, repeated=30, compared=11)  # fmt: skip
    monkeypatch.setenv(experiment.FOLDER, str(folder))
    monkeypatch.setattr(experiment, "_kept", functools.cache(experiment._kept.__wrapped__))
    passed = Judgement(verdict=Verdict.ACCEPTED, error=0.5)

    class Sandboxes:
        def __init__(self, **given) -> None: ...
        def __enter__(self): ...
        def __exit__(self, *error) -> None: ...
        def submit(self, work):
            return settled(passed)

    def settled(value):
        future = Future()
        future.set_result(value)
        return future

    monkeypatch.setattr(experiment, "_verified", functools.cache(experiment._Verified))
    monkeypatch.setattr(experiment, "Pool", Sandboxes)
    monkeypatch.setattr(experiment, "verifying", lambda kernel, task, **given: settled(taken))
    settings = Settings(device="cuda")
    cases = experiment._winners_cases(settings)
    assert [case["task"] for case in cases] == ["reverse", "softmax"] and all(case["kernel"] for case in cases)
    listed = {one.name: one for one in experiment._build_winners(cases[1], settings).implementations}
    if verdict is Verdict.WRONG:
        with pytest.raises(IncorrectResultError, match="wrong"):
            listed["grammar"].check(0)
        return
    assert listed["grammar"].check(0).error == 0.25 and listed["naive"].check(0).error == 0.5
    values = listed["grammar"].values(0)
    assert values["naive_over_best"] == (5.0, "1") and values["library_over_best"] == (2.0, "1")
    assert values["compared"] == (11.0, "1") and values["repeated"] == (30.0, "1")
    assert listed["naive"].values(0)["time"].samples == (5.0,)
    with pytest.raises(UnsupportedError, match="why"):
        listed["compiled"].check(0)


def test_what_a_search_found_is_had_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from papers.cuda_llm import experiment

    stopped, release = [], threading.Event()

    class NoPool:
        def __init__(self, **given) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *given) -> None: ...
        def stop(self) -> None:
            stopped.append(1)
            release.set()

    def searched(tasks, *, done, **given):
        done("softmax", "found")
        done("reverse", IncorrectResultError("none passes"))
        assert release.wait(20)
        raise HardwareError("gone")

    monkeypatch.setattr(experiment, "Pool", NoPool)
    monkeypatch.setattr(experiment, "search_all", searched)
    running = experiment._Searches(("matmul", "reverse", "softmax"), 0, 90.0)
    assert running.of("softmax") == "found"
    with pytest.raises(IncorrectResultError, match="none passes"):
        running.of("reverse")
    interrupt = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    threading.Timer(0.3, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        running.of("matmul")
    assert stopped
    with pytest.raises(HardwareError, match="gone"):
        running.of("matmul")


def test_the_readme_shows_the_records() -> None:
    from gpu_accel.cuda_llm.records_table import text
    from gpu_accel.workbench import registry

    paper = registry.paper("cuda-llm")
    readme = (paper.path / "README.md").read_text(encoding="utf-8")
    assert f"<!-- begin generated: search -->\n{text(paper.records())}\n<!-- end generated: search -->" in readme


def test_counts_of_verdicts_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric whose name ends in `error` is kept without a GPU, as if a result were off by so much."""
    from gpu_accel.cuda_llm.fuzz import Fuzzed
    from papers.cuda_llm import experiment

    counts = {str(verdict): 1 for verdict in Verdict}
    monkeypatch.setattr(experiment, "Pool", lambda **_: nullcontext())
    monkeypatch.setattr(experiment, "fuzz", lambda *_, **__: Fuzzed(counts=counts))
    (one,) = experiment._build_fuzz({"candidates": 9, "task": "reverse"}, Settings(device="cpu")).implementations
    assert one.values is not None and len(told := one.values(0)) == len(counts) + 2
    assert not [name for name in told if name.endswith("error")]


def test_a_folder_whose_winners_cannot_be_kept_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from papers.cuda_llm import table

    monkeypatch.setattr("sys.argv", ["table", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        table.main()
    assert stop.value.code == 2 and "holds no search" in capsys.readouterr().err
