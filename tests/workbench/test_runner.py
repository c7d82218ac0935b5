"""Runs of made-up experiments: what is checked, timed, recorded, skipped, resumed and told."""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_accel.errors import HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError
from gpu_accel.testing.fake_timer import FakeTimer
from gpu_accel.workbench import events
from gpu_accel.workbench.experiment import Check, Implementation, Settings, SimpleExperiment, Timed, Workload
from gpu_accel.workbench.host import Host
from gpu_accel.workbench.records import read_records
from gpu_accel.workbench.runner import plan, run

GOOD = Check(1e-3, 2e-3, "max_abs")
BAD = Check(5e-3, 2e-3, "max_abs")


class FakeHost(Host):
    """Memory that is counted by hand: `made` allocations of `each` bytes."""

    total, each, made, released = 1000, 10, 0, 0

    def free_bytes(self) -> int:
        return self.total

    def allocated_bytes(self) -> int:
        return self.made * self.each

    def release(self) -> None:
        self.released += 1


def gpu(**env) -> FakeHost:
    env = {"gpu": "Test GPU 1"} | env
    return FakeHost(device="cuda", env=env, commit="abc", timer=FakeTimer())


def cpu() -> FakeHost:
    return FakeHost(device="cpu", env={"gpu": None, "cpu": "test"}, commit="abc")


def raises(error: BaseException):
    def function(seed: int):
        raise error

    return function


def implementation(host: FakeHost, name: str = "portable", ms: float = 1.0, check=GOOD, **more) -> Implementation:
    def make(seed: int):
        host.made += 1
        return lambda: host.timer.work(ms, (name, seed))

    function = check if callable(check) else lambda seed: check
    return Implementation(**{"name": name, "role": "ours", "make": make, "check": function} | more)


def peer(host: FakeHost, name: str = "peer", ms: float = 2.0, **more) -> Implementation:
    return implementation(host, name, ms, **{"role": "peer"} | more)


def a_paper(build, cases=({"n": 1, "dtype": "bf16"},), name: str = "forward"):
    """A paper with one experiment; `build(case)` gives implementations or a workload."""

    def build_case(case, settings) -> Workload:
        made = build(case)
        if isinstance(made, Workload):
            return made
        baselines = ("peer",) if "peer" in [impl.name for impl in made] else ()
        return Workload(implementations=made, baselines=baselines, flops=1e9)

    experiment = SimpleExperiment(name=name, title="F", list_cases=lambda settings: list(cases), build_case=build_case)
    return SimpleNamespace(
        id="made_up",
        inputs=("normal",),
        experiments={name: SimpleNamespace(precisions=("bf16",))},
        default_experiments=lambda precision: (name,),
        experiment=lambda wanted: experiment,
    )


def of(result, metric: str = "time") -> dict:
    return {record.impl: record for record in result.records if record.metric == metric}


def test_gpu_run_records_times_checks_and_paired_ratios():
    host = gpu()
    result = run(a_paper(lambda case: [implementation(host), peer(host)]), host=host)
    assert result.status == "ok" and result.exit_code == 0
    ours, theirs = of(result)["portable"], of(result)["peer"]
    assert (ours.kind, ours.unit, ours.paper, ours.experiment) == ("measured", "ms", "made_up", "forward")
    assert ours.median == pytest.approx(1.0) and ours.value("tflops") == pytest.approx(1.0)
    assert ours.checked == {"error": 1e-3, "bound": 2e-3, "metric": "max_abs"}
    assert ours.ratio_to["peer"]["median"] == pytest.approx(2.0), "above 1: ours is faster"
    assert theirs.ratio_to == {}, "a baseline is not compared with itself"
    assert ours.timing["interleaved"] == ["portable", "peer"] and ours.timing["l2"] == "flushed"
    assert ours.env["gpu"] == "Test GPU 1" and ours.env["clock_mhz"]["median"] == 1700
    assert ours.env["throttle"] == ["power-cap"] and ours.commit == "abc" and not ours.dirty
    assert len(ours.samples) == ours.timing["rounds"] >= 10


def test_cpu_run_checks_and_never_times():
    host = cpu()
    never = raises(AssertionError("make must not be called on a CPU"))
    values = lambda seed: {"rmse": (9e-3, "1"), "peak_bytes": (1e6, "bytes")}  # noqa: E731
    build = lambda case: [implementation(host, make=never, values=values)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert [(r.kind, r.metric, r.median) for r in result.records] == [
        ("checked", "correct", None),
        ("checked", "rmse", 9e-3),
    ], "bytes of a CPU run mean nothing"
    assert result.records[0].checked["error"] == 1e-3


def test_gpu_values_are_measured_and_an_experiment_without_times_says_correct():
    host = gpu()
    values = lambda seed: {"rmse": (9e-3, "1"), "peak_bytes": (1e6, "bytes")}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=values)]), host=host)
    assert [(r.kind, r.metric) for r in result.records] == [
        ("checked", "correct"),
        ("measured", "rmse"),
        ("measured", "peak_bytes"),
    ]


def test_wrong_result_is_never_timed_and_never_recorded():
    host = gpu()
    build = lambda case: [implementation(host, check=BAD), peer(host)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert [(o.impl, o.case["n"]) for o in result.incorrect] == [("portable", 1)]
    assert "0.005 is above the bound 0.002" in result.incorrect[0].why
    assert list(of(result)) == ["peer"] and result.status == "incorrect" and result.exit_code == 3
    assert not any(entry[0] == "portable" for entry in host.timer.log if isinstance(entry, tuple))


@pytest.mark.parametrize(("role", "code"), [("ours", 3), ("peer", 0), ("reference", 0)])
def test_a_wrong_result_fails_the_run_only_when_it_is_ours(role: str, code: int):
    host = gpu()
    for others in ([peer(host)], []):
        result = run(a_paper(lambda case, o=others: [implementation(host, "x", role=role, check=BAD), *o]), host=host)
        assert result.exit_code == code
        assert [(o.impl, o.role, o.check) for o in result.incorrect] == [("x", role, BAD)]


@pytest.mark.parametrize(
    ("role", "error", "where"),
    [
        ("ours", UnsupportedError("head_dim 512"), "skipped"),
        ("ours", HardwareError("needs sm_90"), "skipped"),
        ("ours", MemoryError("out of memory"), "skipped"),
        ("ours", RuntimeError("illegal instruction"), "incorrect"),
        ("ours", IncorrectResultError("o differs"), "incorrect"),
        ("peer", RuntimeError("no kernel image"), "skipped"),
        ("peer", IncorrectResultError("o differs"), "incorrect"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_exceptions_of_a_check_are_sorted(role: str, error: Exception, where: str):
    host = gpu()
    build = lambda case: [implementation(host, "x", role=role, check=raises(error)), peer(host)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert [o.impl for o in getattr(result, where)] == ["x"] and str(error) in getattr(result, where)[0].why
    assert list(of(result)) == ["peer"]


def test_out_of_memory_of_one_leaves_the_others_their_times():
    host = gpu()

    big = lambda seed: lambda: raises(MemoryError("CUDA out of memory"))(seed)  # noqa: E731
    build = lambda case: [implementation(host), implementation(host, "big", make=big), peer(host)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert sorted(of(result)) == ["peer", "portable"] and of(result)["portable"].ratio_to["peer"]
    assert [(o.impl, o.why) for o in result.skipped] == [("big", "not timed: CUDA out of memory")]
    assert result.status == "ok"


def test_out_of_memory_while_making_inputs_is_skipped_too():
    host = gpu()
    build = lambda case: [implementation(host), implementation(host, "big", make=raises(MemoryError("0 free")))]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert list(of(result)) == ["portable"]
    assert [(o.impl, o.why) for o in result.skipped] == [("big", "out of memory: 0 free")]


def test_kernel_that_passes_and_then_fails_under_timing_is_incorrect():
    host = gpu()
    build = lambda case: [implementation(host, make=lambda seed: lambda: raises(RuntimeError("misaligned"))(0))]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert "misaligned" in result.incorrect[0].why and not result.records and result.exit_code == 3


def test_rate_above_the_peak_is_refused_and_lends_no_ratio():
    host = gpu(peak_tflops={"bf16": 0.9})
    build = lambda case: [implementation(host, ms=2.0), peer(host, ms=1.0)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert [o.impl for o in result.incorrect] == ["peer"] and "above the device peak" in result.incorrect[0].why
    assert of(result)["portable"].ratio_to == {}


def test_bandwidth_bounds_only_cold_large_traffic():
    def result_of(size: float, **settings):
        host = gpu(peak_gbps=100.0)
        build = lambda case: Workload(implementations=[implementation(host)], bytes_moved=size)  # noqa: E731
        return run(a_paper(build), settings=Settings(**settings), host=host)

    assert result_of(1e9).status == "incorrect", "1 GB in 1 ms is 1000 GB/s"
    assert result_of(1e8 * 1.5).status == "ok", "may have stayed in the cache"
    assert result_of(1e9, flush_l2=False).status == "ok"


def test_sustained_mode_has_no_ratio():
    host = gpu()
    settings = Settings(mode="sustained")
    result = run(a_paper(lambda case: [implementation(host), peer(host)]), settings=settings, host=host)
    record = of(result)["portable"]
    assert record.timing["mode"] == "sustained" and record.ratio_to == {}
    assert host.timer.device_ms > 3000, "1.5 s of load for each of two"


@pytest.mark.parametrize(("total", "sets"), [(1000, 3), (100, 2), (50, 1), (1, 1)])
def test_input_sets_fit_in_half_of_the_free_memory(total: int, sets: int):
    host = gpu()
    host.total = total  # one set of two implementations takes 20
    result = run(a_paper(lambda case: [implementation(host), peer(host)]), host=host)
    assert of(result)["portable"].timing["inputs"] == sets
    assert {entry[1] for entry in host.timer.log if isinstance(entry, tuple)} == set(range(sets)), "seeds differ"


def test_seed_reaches_checks_values_and_inputs():
    host, seen = gpu(), []
    check = lambda seed: seen.append(("check", seed)) or GOOD  # noqa: E731
    values = lambda seed: seen.append(("values", seed)) or {}  # noqa: E731
    run(a_paper(lambda case: [implementation(host, check=check, values=values)]), settings=Settings(seed=7), host=host)
    assert seen == [("check", 7), ("values", 7)]
    assert {entry[1] for entry in host.timer.log if isinstance(entry, tuple)} == {7, 8, 9}


def test_only_and_skip():
    host = gpu()
    paper = a_paper(lambda case: [implementation(host), implementation(host, "hopper"), peer(host)])
    assert list(of(run(paper, settings=Settings(only=("hopper", "peer")), host=host))) == ["hopper", "peer"]
    assert list(of(run(paper, settings=Settings(skip=("hopper", "peer")), host=host))) == ["portable"]
    meant = r"only names hoper; available here: portable, hopper, peer\. Did you mean hopper"
    with pytest.raises(InvalidInputError, match=meant):
        run(paper, settings=Settings(only=("hoper",)), host=host)
    nothing = run(paper, settings=Settings(only=("peer",), skip=("peer",)), host=host)
    assert nothing.status == "nothing_ran" and nothing.exit_code == 5 and not nothing.skipped


def test_name_that_only_some_cases_have_may_be_chosen():
    host = gpu()
    build = lambda case: [peer(host)] + ([implementation(host)] if case["n"] == 2 else [])  # noqa: E731
    cases = [{"n": 1, "dtype": "bf16"}, {"n": 2, "dtype": "bf16"}]
    result = run(a_paper(build, cases), settings=Settings(only=("portable",)), host=host)
    assert [(r.impl, r.case["n"]) for r in result.records] == [("portable", 2)]


def test_unavailable_is_skipped_with_its_reason_and_alone_means_unsupported():
    host = gpu()
    gone = Implementation(name="hopper", role="ours", unavailable="needs sm_90")
    result = run(a_paper(lambda case: [gone]), host=host)
    assert result.skipped[0][:3] == ("hopper", {"n": 1, "dtype": "bf16"}, "needs sm_90")
    assert result.status == "unsupported" and result.exit_code == 4


def test_case_that_cannot_be_built_is_skipped_as_a_whole():
    host = gpu()

    def build(case):
        if case["n"] == 1:
            raise UnsupportedError("head_dim 512 has no kernel")
        return [implementation(host)]

    result = run(a_paper(build, [{"n": 1, "dtype": "bf16"}, {"n": 2, "dtype": "bf16"}]), host=host)
    assert [(o.impl, o.case["n"], o.why) for o in result.skipped] == [("*", 1, "head_dim 512 has no kernel")]
    assert len(result.records) == 1


def test_wrong_arguments():
    host = cpu()
    paper = a_paper(lambda case: [implementation(host)])
    with pytest.raises(InvalidInputError, match="has no precision 'fp8'; it has bf16"):
        run(paper, settings=Settings(precision="fp8"), host=host)
    with pytest.raises(InvalidInputError, match="no input 'smollm2'; it has normal"):
        run(paper, settings=Settings(input="smollm2"), host=host)
    with pytest.raises(InvalidInputError, match="give a list"):
        run(paper, "forward", host=host)


THREE = [{"n": n, "dtype": "bf16"} for n in (1, 2, 3)]


def test_interruption_keeps_finished_cases_and_resume_does_only_the_rest(tmp_path):
    output = tmp_path / "results.jsonl"
    settings = Settings(output=str(output))
    host = gpu()
    stop = [2]

    def build(case):
        check = raises(KeyboardInterrupt()) if case["n"] in stop else GOOD
        return [implementation(host, check=check), peer(host)]

    first = run(a_paper(build, THREE), settings=settings, host=host)
    assert first.interrupted and first.status == "interrupted" and first.exit_code == 130
    assert [r.case["n"] for r in first.records] == [1, 1] == [r.case["n"] for r in read_records(output)]
    stop.clear()
    second = run(a_paper(build, THREE), settings=settings, resume_from=output, host=host)
    assert [r.case["n"] for r in second.records] == [2, 2, 3, 3] and [r.case["n"] for r in second.resumed] == [1, 1]
    assert len(read_records(output)) == 6
    third = run(a_paper(build, THREE), resume_from=output, host=host)
    assert not third.records and third.status == "ok" and len(third.resumed) == 6


def test_resume_repeats_baselines_for_a_new_implementation_but_nobody_else(tmp_path):
    output = tmp_path / "results.jsonl"
    host = gpu()
    paper = a_paper(lambda case: [implementation(host), implementation(host, "hopper"), peer(host)])
    run(paper, settings=Settings(output=str(output), skip=("hopper",)), host=host)
    second = run(paper, resume_from=output, host=host)
    assert sorted(of(second)) == ["hopper", "peer"] and of(second)["hopper"].ratio_to["peer"]


def unsupported(host: FakeHost, when: str) -> Implementation:
    """An implementation that cannot run here, which is known beforehand or found out by its check."""
    if when == "known":
        return Implementation(name="gone", role="ours", unavailable="needs sm_90")
    return implementation(host, "gone", check=raises(UnsupportedError("needs sm_90")))


@pytest.mark.parametrize("when", ["known", "found"])
@pytest.mark.parametrize("device", [gpu, cpu])
def test_resume_does_nothing_twice_beside_what_can_never_run(tmp_path, device, when: str):
    output = tmp_path / "results.jsonl"
    host, checked, stop = device(), [], [2]

    def build(case):
        def check(name: str):
            def function(seed: int) -> Check:
                if case["n"] in stop and name == "portable":
                    raise KeyboardInterrupt
                checked.append((case["n"], name))
                return GOOD

            return function

        ours, rival = implementation(host, check=check("portable")), peer(host, check=check("peer"))
        return [unsupported(host, when), rival, ours]

    assert run(a_paper(build, THREE), settings=Settings(output=str(output)), host=host).interrupted
    stop.clear()
    checked.clear()
    second = run(a_paper(build, THREE), resume_from=output, host=host)
    assert sorted(checked) == [(n, name) for n in (2, 3) for name in ("peer", "portable")]
    checked.clear()
    third = run(a_paper(build, THREE), resume_from=output, host=host)
    assert checked == [] and not third.records and third.status == "ok"
    assert len(second.records) == 4 and len(second.resumed) == 2 and len(third.resumed) == 6
    kept = [(r.case["n"], r.impl) for r in read_records(output)]
    assert len(kept) == len(set(kept)) == 6
    assert [outcome.impl for outcome in third.skipped] == ["gone"] * 3, "it is still said why"


def test_resume_repeats_no_baseline_where_nothing_is_compared(tmp_path):
    """On a CPU there are no ratios, and neither are there under sustained load or without times."""
    for number, (host, mode, timed) in enumerate(
        [(cpu(), "burst", True), (gpu(), "sustained", True), (gpu(), "burst", False)]
    ):
        output = tmp_path / f"{number}.jsonl"
        more = {} if timed else {"make": None}
        build = lambda case, h=host, m=more: [implementation(h, **m), implementation(h, "new", **m), peer(h, **m)]  # noqa: E731
        settings = Settings(output=str(output), skip=("new",), mode=mode)
        run(a_paper(build), settings=settings, host=host)
        second = run(a_paper(build), settings=Settings(output=str(output), mode=mode), resume_from=output, host=host)
        assert [record.impl for record in second.records] == ["new"], (host.device, mode, timed)
        assert sorted(record.impl for record in second.resumed) == ["peer", "portable"]


def test_resume_ignores_other_commits_devices_and_ways_of_timing(tmp_path):
    output = tmp_path / "results.jsonl"
    paper = lambda host: a_paper(lambda case: [implementation(host)])  # noqa: E731
    host = gpu()
    run(paper(host), settings=Settings(output=str(output)), host=host)
    others = [gpu(), gpu(gpu="Test GPU 2"), gpu()]
    others[0].commit, others[2].dirty = "def", True
    elsewhere = Settings(output=str(tmp_path / "elsewhere.jsonl"))
    for other in others:
        assert len(run(paper(other), settings=elsewhere, resume_from=output, host=other).records) == 1
    warm = Settings(output=str(tmp_path / "warm.jsonl"), flush_l2=False)
    assert len(run(paper(host), settings=warm, resume_from=output, host=host).records) == 1


def test_resume_from_a_file_that_is_not_there_starts_it(tmp_path):
    host = gpu()
    output = tmp_path / "new" / "results.jsonl"
    result = run(a_paper(lambda case: [implementation(host)]), resume_from=output, host=host)
    assert result.output == output and len(read_records(output)) == 1


def test_events_tell_the_story():
    host, told = gpu(), []
    gone = Implementation(name="gone", role="peer", unavailable="not installed")
    build = lambda case: [implementation(host), peer(host, check=BAD), gone]  # noqa: E731
    result = run(a_paper(build), on_event=told.append, host=host)
    assert [type(event).__name__ for event in told] == [
        "RunStarted",
        "CaseStarted",
        *("CheckStarted", "ImplementationChecked"),
        *("CheckStarted", "ImplementationChecked", "ImplementationIncorrect"),
        "ImplementationSkipped",
        "TimingStarted",
        "CaseFinished",
        "RunFinished",
    ]
    assert told[0] == events.RunStarted(
        paper="made_up", experiments=("forward",), cases=1, device="cuda", gpu="Test GPU 1"
    )
    assert told[1].implementations == ("portable", "peer", "gone") and told[-3].implementations == ("portable",)
    assert told[-2].records == tuple(result.records)
    assert told[-1].status == "ok" and result.incorrect, "a rival's error is told, and is no failure of the run"


def test_listener_that_raises_is_reported_once_and_changes_nothing():
    host, calls = gpu(), []

    def listener(event) -> None:
        calls.append(event)
        raise ValueError("terminal is gone")

    with pytest.warns(RuntimeWarning, match="terminal is gone") as caught:
        result = run(a_paper(lambda case: [implementation(host)]), on_event=listener, host=host)
    assert result.status == "ok" and len(calls) == 1 and len(caught) == 1


def test_memory_is_released_between_implementations_and_cases():
    host = gpu()
    run(a_paper(lambda case: [implementation(host), peer(host)], THREE), host=host)
    assert host.released >= 3 * 3


def test_plan_is_json_and_touches_nothing():
    host = gpu()
    never = raises(AssertionError("a plan allocates nothing"))
    build = lambda case: [  # noqa: E731
        implementation(host, make=never, check=never),
        peer(host, unavailable="not installed"),
        implementation(host, "left-out"),
    ]
    made = plan(a_paper(build, THREE), settings=Settings(skip=("left-out",), seconds=0.5), host=host)
    as_dict = json.loads(json.dumps(made.as_dict()))
    assert (as_dict["device"], as_dict["gpu"], as_dict["seconds"]) == ("cuda", "Test GPU 1", 1.5)
    assert as_dict["items"][0] == {
        "experiment": "forward",
        "case": {"n": 1, "dtype": "bf16"},
        "work": {"flops": 1e9},
        "refused": "",
        "implementations": [
            {"name": "portable", "role": "ours", "runs": True, "why": ""},
            {"name": "peer", "role": "peer", "runs": False, "why": "not installed"},
        ],
    }
    assert plan(a_paper(build, THREE), host=cpu()).seconds == 0, "nothing is timed on a CPU"


def test_plan_says_how_long_an_interpreter_takes():
    build = lambda case: Workload(implementations=[implementation(cpu()), peer(cpu())], flops=4e9)  # noqa: E731
    made = plan(a_paper(build, THREE), host=cpu())
    assert 60 < made.interpreted_seconds < 6000 and made.as_dict()["interpreted_seconds"] > 0
    assert plan(a_paper(build, THREE), host=gpu()).interpreted_seconds == 0, "a GPU compiles"
    assert plan(a_paper(build, THREE), settings=Settings(only=("peer",)), host=cpu()).interpreted_seconds == 0
    shape = {"batch": 4, "heads": 16, "seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 128, "causal": False}
    unrated = lambda case: Workload(implementations=[implementation(cpu())])  # noqa: E731
    assert plan(a_paper(unrated, [shape]), host=cpu()).interpreted_seconds > 3600, "work is known from the shape alone"
    assert plan(a_paper(unrated, THREE), host=cpu()).interpreted_seconds == 0


def test_module_that_is_missing_is_named_and_a_bug_stays_one():
    paper = a_paper(lambda case: [])
    paper.package, paper.path = "made_up_package.kernels", Path("/papers/made_up")

    def missing(name: str):
        def experiment(wanted):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return experiment

    paper.experiment = missing("made_up_package")
    with pytest.raises(UnsupportedError, match=r"made_up_package.kernels.*paper\.toml.*PYTHONPATH"):
        run(paper, host=cpu())
    paper.experiment = missing("some_other_package.part")
    with pytest.raises(UnsupportedError, match="needs the module 'some_other_package'"):
        run(paper, host=cpu())
    paper.experiment = missing("gpu_accel.misspelt")
    with pytest.raises(ModuleNotFoundError):
        run(paper, host=cpu())
    building = a_paper(lambda case: importlib.import_module("some_other_package"))
    building.package = ""
    with pytest.raises(UnsupportedError, match="some_other_package"):
        run(building, host=cpu())


def test_paper_from_a_folder_on_this_cpu(tmp_path, monkeypatch):
    folder = tmp_path / "papers" / "tiny"
    folder.mkdir(parents=True)
    (folder / "paper.toml").write_text(
        'id = "tiny"\ntitle = "Tiny"\naliases = ["t"]\n[experiments.sum]\ntitle = "Sums"\ndefault = true\n'
    )
    (folder / "experiment.py").write_text(
        textwrap.dedent("""
        from gpu_accel.workbench.experiment import Check, Implementation, SimpleExperiment, Workload

        def build(case, settings):
            assert settings.device == "cpu" and not settings.on_gpu
            check = lambda seed: Check(abs(sum(range(case["n"])) - case["n"] * (case["n"] - 1) / 2), 0.5, "max_abs")
            return Workload(implementations=[Implementation(name="ours", role="ours", check=check)])

        EXPERIMENTS = {"sum": SimpleExperiment(name="sum", title="Sums", build_case=build,
                                               list_cases=lambda settings: [{"n": 10}, {"n": 11}])}
        """)
    )
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(folder.parent))
    output = tmp_path / "out.jsonl"
    result = run("t", settings=Settings(device="cpu", output=str(output)))
    assert result.status == "ok" and [r.kind for r in read_records(output)] == ["checked", "checked"]
    assert result.records[0].env["python"] and "commit" not in result.records[0].env


EXITS = raises(SystemExit(0))
FOREIGN = [None, (1e-3, 2e-3, "m"), True, Check("a", 1.0, "m"), Check(0.0, None, "m"), Check(0.0, 1.0, 3)]


@pytest.mark.parametrize("role", ["ours", "peer"])
@pytest.mark.parametrize(
    "bad",
    [{"check": EXITS}, {"make": EXITS}, {"values": EXITS}, {"make": lambda seed: lambda: EXITS(seed)}]
    + [{"check": lambda seed, found=found: found} for found in FOREIGN]
    + [{"values": lambda seed, found=found: found} for found in (None, [], 1.0, {"m": 1.0}, {"m": ("a", "1")}, {1: 2})]
    + [{"make": lambda seed: None}],
)
def test_what_breaks_its_promises_fails_alone(role: str, bad: dict):
    host = gpu()
    build = lambda case: [implementation(host, "x", **({"role": role} | bad)), peer(host)]  # noqa: E731
    result = run(a_paper(build, THREE), host=host)
    assert [r.impl for r in result.records if r.metric == "time"] == ["peer"] * 3
    assert [o.impl for o in (result.incorrect if role == "ours" else result.skipped)] == ["x"] * 3
    assert result.exit_code == (3 if role == "ours" else 0)


def test_exit_while_cases_are_listed_or_built_is_no_success():
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        run(a_paper(EXITS), host=cpu())
    paper = a_paper(lambda case: [])
    paper.experiment = lambda name: SimpleExperiment(name=name, title="", list_cases=EXITS, build_case=EXITS)
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        run(paper, host=cpu())


def test_record_that_cannot_be_written_loses_no_other(tmp_path):
    host, output = gpu(), tmp_path / "r.jsonl"
    values = lambda seed: {"rmse": (float("nan"), "1"), "max_abs": (0.5, "1")}  # noqa: E731
    build = lambda case: [implementation(host, values=values), implementation(host, "odd", note={1}), peer(host)]  # noqa: E731
    result = run(a_paper(build), settings=Settings(output=str(output)), host=host)
    found = [(r.impl, r.metric) for r in read_records(output)]
    assert found == [("portable", "time"), ("portable", "max_abs"), ("peer", "time")]
    assert sorted(o.impl for o in result.incorrect) == ["odd", "portable"] and result.exit_code == 3


@pytest.mark.parametrize("changed", [{"seed": 1}, {"input": "other"}, {"precision": "fp16"}], ids=str)
def test_resume_takes_only_results_of_the_same_settings(tmp_path, changed: dict):
    for host in (gpu(), cpu()):
        output = tmp_path / f"{host.device}.jsonl"
        paper = a_paper(lambda case, h=host: [implementation(h, values=lambda seed: {"rmse": (0.1, "1")})])
        paper.inputs, paper.experiments = ("normal", "other"), {"forward": SimpleNamespace(precisions=())}
        run(paper, settings=Settings(output=str(output)), host=host)
        other = run(paper, settings=Settings(**changed), resume_from=output, host=host)
        assert len(other.records) == 2 and not other.resumed
        again = run(paper, settings=Settings(seconds=0.5), resume_from=output, host=host)
        assert not again.records and len(again.resumed) == 2


def test_resume_takes_nothing_of_other_software(tmp_path):
    output, host = tmp_path / "r.jsonl", gpu(torch="2.13")
    run(a_paper(lambda case: [implementation(host)]), settings=Settings(output=str(output)), host=host)
    newer = gpu(torch="2.14")
    assert run(a_paper(lambda case: [implementation(newer)]), resume_from=output, host=newer).records


def test_resume_takes_nothing_in_a_dirty_tree_and_says_so(tmp_path):
    output, host, told = tmp_path / "r.jsonl", gpu(), []
    host.dirty = True
    paper = a_paper(lambda case: [implementation(host)])
    run(paper, settings=Settings(output=str(output)), host=host)
    result = run(paper, on_event=told.append, resume_from=output, host=host)
    assert len(result.records) == 1 and not result.resumed
    assert "uncommitted changes" in result.resume_refused == told[0].resume_refused


@pytest.mark.parametrize("role", ["ours", "peer"])
@pytest.mark.parametrize(
    ("verify", "where"),
    [
        (lambda: BAD, "incorrect"),
        (raises(IncorrectResultError("changed its input")), "incorrect"),
        (lambda: None, "incorrect or skipped"),
        (lambda: GOOD, ""),
    ],
)
def test_time_whose_call_fails_its_verification_is_not_recorded(role: str, verify, where: str):
    host = gpu()
    verify = verify if verify.__name__ == "<lambda>" else lambda: raises(IncorrectResultError("changed its input"))(0)
    make = lambda seed: Timed(lambda: host.timer.work(1.0, ("timed", seed)), verify)  # noqa: E731
    build = lambda case: [implementation(host, "x", role=role, make=make), implementation(host), peer(host)]  # noqa: E731
    result = run(a_paper(build), host=host)
    assert ("x" in of(result)) == (not where) and {"portable", "peer"} <= of(result).keys()
    assert all("x" not in record.ratio_to for record in result.records)
    failed = [o.impl for o in result.incorrect] + [o.impl for o in result.skipped if "skipped" in where]
    assert failed == (["x"] if where else [])


def test_only_real_lack_of_memory_excuses_a_failure():
    for error, excused in [
        (RuntimeError("the kernel ran out of memory bounds"), False),
        (ValueError("CUDA out of memory"), False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError("x"), True),
    ]:
        host = gpu()
        for bad in ({"check": raises(error)}, {"make": lambda seed, e=error: lambda: raises(e)(0)}):
            result = run(a_paper(lambda case, h=host, b=bad: [implementation(h, **b)]), host=host)
            assert bool(result.skipped) == excused and bool(result.incorrect) != excused, (error, bad)


def timed_attention(experiment: str, name: str, **shape):
    """A contender of the paper's own experiments and what it gives to be timed, on this CPU."""
    from gpu_accel.workbench import registry

    precision = shape.pop("precision", "bf16")
    case = {"batch": 1, "seqlen": 64, "heads": 1, "head_dim": 64, "causal": True} | shape
    settings = Settings(device="cpu", precision=precision, shapes=(case,))
    found = registry.paper("fa3").experiment(experiment)
    workload = found.build(found.cases(settings)[0], settings)
    return next(impl for impl in workload.implementations if impl.name == name).make(3)


@pytest.mark.parametrize(
    ("experiment", "name", "precision"),
    [
        ("forward", "sdpa-math", "bf16"),
        ("backward", "sdpa-math", "bf16"),
        ("forward", "portable", "fp8"),
        ("forward", "portable+quantize", "fp8"),
    ],
)
def test_attention_as_timed_is_verified_on_its_own_inputs(experiment: str, name: str, precision: str):
    torch = pytest.importorskip("torch")
    if precision == "fp8" and torch.cuda.is_available():
        pytest.skip("Triton interprets here only where there is no GPU")
    timed = timed_attention(experiment, name, precision=precision, seqlen=67)
    timed()
    assert timed.verify().ok


@pytest.mark.parametrize("fault", ["remembers", "overwrites"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_that_is_right_once_only_is_not_verified(direction: str, fault: str):
    torch = pytest.importorskip("torch")
    from papers.flash_attention3 import attention
    from papers.flash_attention3.judging import Judge
    from papers.flash_attention3.peers import Contender

    kept: list = []

    class Remembering(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
            ctx.p = scores.softmax(-1)
            o = torch.einsum("bhqk,bkhd->bqhd", ctx.p, v.double()).to(q.dtype)
            if fault == "remembers" and direction == "forward":
                kept.append(o)
                return kept[0]
            if direction == "forward":
                k.zero_()
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v = (t.double() for t in ctx.saved_tensors)
            p, g = ctx.p, do.double()
            dp = torch.einsum("bqhd,bkhd->bhqk", g, v)
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
            found = [torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)]
            found = [t.to(do.dtype) for t in (*found, torch.einsum("bhqk,bqhd->bkhd", p, g))]
            kept.append(found)
            if fault == "overwrites":
                do.zero_()
                return tuple(found)
            return tuple(kept[0])

    case = {"pass": direction, "batch": 1, "seqlen_q": 33, "seqlen_k": 33, "heads": 1, "heads_kv": 1, "head_dim": 64}
    case |= {"causal": False, "dtype": "bf16", "input": "normal"}
    contender = Contender(name="c", role="peer", layout="bshd", attend=Remembering.apply)
    judge = Judge(case, "cpu")
    make = attention.forward_implementation if direction == "forward" else attention._backward_implementation
    impl = make(contender, judge)
    assert impl.check(3).ok, "the check alone sees nothing"
    kept.clear()
    timed = impl.make(3)
    timed()
    if fault == "overwrites":
        with pytest.raises(IncorrectResultError, match="changed its input"):
            timed.verify()
    else:
        assert not timed.verify().ok
