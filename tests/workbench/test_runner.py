"""Runs of made-up experiments: what is checked, timed, recorded, skipped and told."""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path

import pytest

from gpu_accel.errors import HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError
from gpu_accel.testing.fake_runs import BAD, GOOD, THREE, a_paper, cpu, gpu, implementation, of, peer, raises
from gpu_accel.workbench import events
from gpu_accel.workbench.experiment import Implementation, Sampled, Settings, Workload
from gpu_accel.workbench.records import read_records
from gpu_accel.workbench.runner import plan, run


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


def test_gpu_values_are_measured_and_carry_the_check():
    host = gpu()
    values = lambda seed: {"rmse": (9e-3, "1"), "peak_bytes": (1e6, "bytes")}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=values)]), host=host)
    assert [(r.kind, r.metric) for r in result.records] == [("measured", "rmse"), ("measured", "peak_bytes")]
    assert all(r.checked["error"] == 1e-3 for r in result.records)


def test_gpu_cycles_are_values_and_no_times():
    host = gpu()
    values = lambda seed: {"latency": (29.0, "clk"), "throughput": (64.0, "instr/clk/SM")}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=values)]), host=host)
    assert [(r.kind, r.metric, r.unit) for r in result.records] == [
        ("measured", "latency", "clk"),
        ("measured", "throughput", "instr/clk/SM"),
    ]


def test_an_experiment_without_times_and_values_says_correct():
    host = gpu()
    result = run(a_paper(lambda case: [implementation(host, make=None)]), host=host)
    assert [(r.kind, r.metric) for r in result.records] == [("checked", "correct")]


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


def test_a_workload_that_reads_gets_a_clean_cache_and_its_records_say_so():
    def result_of(l2: str, size: float, **settings):
        host = gpu(peak_gbps=500.0)
        build = lambda case: Workload(implementations=[implementation(host)], bytes_moved=size, l2=l2)  # noqa: E731
        return run(a_paper(build), settings=Settings(**settings), host=host), host.timer.log

    result, log = result_of("clean", 1.0)
    assert of(result)["portable"].timing["l2"] == "clean" and "flush, clean" in log and "flush" not in log
    assert of(result_of("clean", 1.0, flush_l2=False)[0])["portable"].timing["l2"] == "warm"
    assert result_of("flushed", 1e9)[0].status == "incorrect", "1 GB in 1 ms is above the peak"
    assert result_of("clean", 1e9)[0].status == "ok", "a twentieth of it may wait in the cache to be written"
    assert result_of("clean", 3e9)[0].status == "incorrect"
    with pytest.raises(InvalidInputError, match="l2 is 'warm'"):
        Workload(implementations=[], l2="warm")


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


def test_arithmetic_leaves_no_memory_to_release():
    """To look through all objects that there are takes 0.1 to 0.2 s; a paper's formula has a hundred cases."""
    host = gpu()
    run(a_paper(lambda case: [implementation(host, make=None, on_device=False)], THREE), host=host)
    assert host.released == 1


def test_records_that_could_not_be_written_are_written_with_the_next(tmp_path, monkeypatch):
    host, tried = cpu(), []

    def append(path, records):
        tried.append(len(records))
        if len(tried) < 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(importlib.import_module("gpu_accel.workbench.runner"), "append_records", append)
    settings = Settings(output=str(tmp_path / "x.jsonl"))
    result = run(a_paper(lambda case: [implementation(host, make=None)], THREE), settings=settings, host=host)
    assert tried == [1, 2, 3] and len(result.records) == 3 and not result.unwritten and result.exit_code == 0


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
    moving = lambda case: Workload(implementations=[implementation(cpu())], bytes_moved=5e7)  # noqa: E731
    assert 5 < plan(a_paper(moving, [shape]), host=cpu()).interpreted_seconds < 100, "bytes are not pairs of rows"


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


def test_readings_of_its_own_keep_their_samples_method_and_clocks():
    host = gpu()
    cycles = Sampled(
        samples=(30.0, 29.0, 31.0), unit="clk", timing={"method": "clock64", "sass": "abc"}, env={"clock_mhz": 1980}
    )
    took = Sampled(samples=(1.0, 2.0, 3.0), unit="ms", work={"flops": 2e9}, timing={"method": "events", "l2": "warm"})
    cold = Sampled(samples=(4.0, 5.0), unit="ms", metric="time", timing={"method": "events", "l2": "flushed"})
    values = lambda seed: {"latency": cycles, "time": took, "time, cold": cold}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=values)]), host=host)
    latency, time, other = result.records
    assert (other.metric, other.median, other.timing["l2"]) == ("time", 4.5, "flushed") and other.key != time.key
    assert (latency.kind, latency.metric, latency.unit, latency.median) == ("measured", "latency", "clk", 30.0)
    assert latency.samples == (30.0, 29.0, 31.0) and latency.p20 < 30 < latency.p80
    assert latency.timing["method"] == "clock64" and latency.timing["sass"] == "abc" and latency.timing["seed"] == 0
    assert latency.env["clock_mhz"] == 1980 and latency.checked
    assert time.value("tflops") == pytest.approx(1e-12 * 2e9 / 2e-3)


def test_readings_that_cannot_be_are_refused_and_the_others_stay():
    host = gpu()
    timing = {"method": "clock64"}
    good, bad = (Sampled(samples=(value,), unit="clk", timing=timing) for value in (4.0, 0.0))
    values = lambda seed: {"latency": good, "throughput": bad}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=values)]), host=host)
    assert [r.metric for r in result.records] == ["latency"]
    assert "must be above 0" in result.incorrect[0].why
    empty = lambda seed: {"latency": Sampled(samples=(), unit="clk")}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(host, make=None, values=empty)]), host=host)
    assert not result.records and "no samples" in result.incorrect[0].why


def test_a_cpu_reports_no_readings_of_a_gpu():
    values = lambda seed: {"latency": Sampled(samples=(4.0,), unit="clk", timing={"method": "clock64"})}  # noqa: E731
    result = run(a_paper(lambda case: [implementation(cpu(), make=None, values=values)]), host=cpu())
    assert [(r.kind, r.metric) for r in result.records] == [("checked", "correct")]
