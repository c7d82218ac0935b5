"""Interrupted runs go on where they stopped, with results of the same code, settings and machine only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing.fake_runs import GOOD, THREE, FakeHost, a_paper, cpu, gpu, implementation, of, peer, raises
from gpu_accel.workbench.experiment import Check, Implementation, Settings
from gpu_accel.workbench.records import read_records
from gpu_accel.workbench.runner import run


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
