"""The generated part of a paper's README: figures and tables of what is committed, and nothing else."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from gpu_accel.workbench import pages, registry
from gpu_accel.workbench.records import merge
from gpu_accel.workbench.report import figures


@pytest.mark.parametrize("paper", registry.papers(), ids=lambda p: p.id)
def test_committed_readme_and_figures_are_up_to_date(paper, tmp_path):
    shutil.copytree(paper.path, tmp_path / paper.id)
    written = pages.refresh(replace(paper, path=tmp_path / paper.id))
    assert written or not figures(merge(paper.records()))
    for path in written:
        committed = paper.path / path.name
        assert committed.read_text() == path.read_text(), f"{committed.name} is stale: run `make readme`"


def test_table_shows_the_best_of_ours_against_the_fastest_rival():
    paper = registry.paper("fa3")
    rows = [r for r in merge(paper.records()) if r.experiment == "forward" and r.case["head_dim"] == 128]
    table = pages.best_table(rows, ours=paper.ours)
    assert "| 128 | full |" in table and "| 128 | causal |" in table
    best = max(r.value("tflops") for r in rows if r.impl == "hopper" and not r.case["causal"])
    assert re.search(rf"\b{best:.0f} \(1\.\d\d\)", table), table
