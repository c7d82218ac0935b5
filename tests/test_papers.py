"""Every folder in papers/: readable, its experiments buildable, its claims about things that its experiments offer."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from gpu_accel.errors import UnsupportedError
from gpu_accel.workbench.claims import UNSUPPORTED, judge_all
from gpu_accel.workbench.experiment import Experiment, Settings
from gpu_accel.workbench.registry import Paper, papers

ROOT = Path(__file__).resolve().parents[1]
PAPERS = {paper.id: paper for paper in papers()}
EXPERIMENTS = [(one.id, name) for one in PAPERS.values() for name in one.experiments]


@pytest.fixture(params=PAPERS)
def paper(request) -> Paper:
    return PAPERS[request.param]


def settings_of(paper: Paper, experiment: str, **changes) -> list[Settings]:
    """Every precision and input that a paper offers for an experiment."""
    precisions = paper.experiments[experiment].precisions or ("bf16",)
    pairs = itertools.product(precisions, paper.inputs)
    return [Settings(precision=precision, input=kind, **changes) for precision, kind in pairs]


def test_there_are_papers():
    assert "flash_attention3" in PAPERS


def test_every_folder_with_code_is_a_paper():
    folders = {file.parent.name for file in (ROOT / "papers").glob("*/*.py")} - {"papers"}
    assert folders <= PAPERS.keys()


def test_the_description_is_complete(paper):
    for field in ("title", "authors", "year", "summary", "package", "notebook", "experiments", "inputs", "ours"):
        assert getattr(paper, field), f"{paper.path}/paper.toml lacks {field}"
    assert importlib.util.find_spec(paper.package), f"package {paper.package} does not exist"
    assert any(one.default for one in paper.experiments.values()), "no experiment runs by default"


def test_the_readme_says_how_to_run_it(paper):
    text = (paper.path / "README.md").read_text()
    assert text.startswith("# ")
    assert f"gpu-accel run {paper.alias}" in text
    for name in paper.experiments:
        assert f"`{name}`" in text, f"README.md does not mention the experiment {name}"


@pytest.mark.parametrize(("name", "experiment"), EXPERIMENTS)
def test_experiments_build_on_a_cpu(name, experiment):
    found: Experiment = PAPERS[name].experiment(experiment)
    assert found.name == experiment
    assert found.title == PAPERS[name].experiments[experiment].title
    for settings in settings_of(PAPERS[name], experiment, device="cpu"):
        cases = found.cases(settings)
        assert cases, f"no cases for {settings.precision}, {settings.input}"
        keys = {frozenset(case) for case in cases}
        assert len(keys) == 1, "cases of one experiment have the same keys"
        for case in cases:
            assert json.loads(json.dumps(case)) == case
            try:
                workload = found.build(case, settings)
            except UnsupportedError as why:  # an input that has to be fetched first
                assert settings.input != "normal" or case["input"] != "normal", why
                continue
            assert any(one.role == "ours" for one in workload.implementations)
            assert all(one.unavailable or one.check for one in workload.implementations)
            assert set(workload.baselines) <= set(workload.names)


@pytest.mark.parametrize(("name", "experiment"), EXPERIMENTS)
def test_cases_of_a_gpu_are_distinct(name, experiment):
    for settings in settings_of(PAPERS[name], experiment, device="cuda"):
        cases = [json.dumps(case, sort_keys=True) for case in PAPERS[name].experiment(experiment).cases(settings)]
        assert cases and len(set(cases)) == len(cases)


def test_claims_name_what_the_experiments_offer(paper):
    """A misspelt implementation would leave a claim "not measured" for ever."""
    offered: dict[str, set[str]] = {}
    for name in paper.experiments:
        found = paper.experiment(name)
        for settings in settings_of(paper, name, device="cpu", quick=True):
            for case in found.cases(settings):
                try:
                    offered.setdefault(name, set()).update(found.build(case, settings).names)
                except UnsupportedError:
                    continue
    for claim in paper.claims():
        measure = claim.measure
        if measure is None or claim.internal:
            continue
        assert measure.experiment in offered, f"{claim.id}: experiment {measure.experiment!r}"
        for impl in filter(None, (measure.impl, measure.other)):
            assert impl == "ours" or impl in offered[measure.experiment], f"{claim.id}: no implementation {impl!r}"


def test_every_claim_has_a_verdict_or_the_reason_it_has_none(paper):
    verdicts = judge_all(paper.claims(), paper.records())
    assert verdicts, "a paper without claims"
    for verdict in verdicts:
        if verdict.category == "not measured":
            assert len(verdict.word) > len("not measured ()"), f"{verdict.claim.id} has no reason"
        if verdict.word == UNSUPPORTED:
            assert verdict.claim.source == "seed" and verdict.claim.note, f"{verdict.claim.id}: say what was looked for"


def test_results_are_readable_and_belong_to_the_paper(paper):
    for record in paper.records():
        assert record.paper == paper.id, record.name
        assert record.experiment in paper.experiments, record.name
        of_a_gpu = record.kind == "measured" or record.env.get("gpu")
        of_errors = record.metric.endswith("error") or record.metric in ("sqnr", "correct")
        arithmetic = record.kind == "checked" and of_errors  # which needs no GPU, and says so
        assert of_a_gpu or arithmetic, f"{record.name}: results of a CPU are not committed, but for errors"
