"""The generated part of a paper's README: figures and tables of what is committed, and nothing else."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from gpu_accel.testing.records import GPU, number
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


def test_sustained_load_has_a_table_of_its_own():
    paper = registry.paper("fa3")
    burst = [r for r in merge(paper.records()) if r.experiment == "forward" and r.case["dtype"] == "bf16"
             and r.case["input"] == "normal" and r.impl in ("hopper", "sdpa-cudnn")
             and "H100" in r.env["gpu"]]  # fmt: skip
    loaded = [replace(r, timing={**r.timing, "mode": "sustained"}, ratio_to={}) for r in burst]
    found = {title: members for title, members, _ in figures([*burst, *loaded])}
    assert set(found) == {"forward · bf16 · input normal", "forward · bf16 · input normal · sustained"}
    (cudnn,) = {f"{r.value('tflops'):.0f}" for r in loaded if r.impl == "sdpa-cudnn" and r.case["seqlen_q"] == 8192
                and r.case["head_dim"] == 128 and r.case["causal"]}  # fmt: skip
    table = pages.best_table(found["forward · bf16 · input normal · sustained"], ours=paper.ours)
    assert re.search(rf"\| 128 \| causal \|.* \d+ \({cudnn}\) ", table), table


def test_our_kernel_in_bf16_is_no_rival_of_itself_in_fp16():
    paper = registry.paper("fa3")
    rows = [r for r in merge(paper.records()) if r.experiment == "forward" and r.case["dtype"] == "fp16"
            and r.impl in ("hopper", "sdpa-cudnn") and "H200" in r.env["gpu"]]  # fmt: skip
    ours = [r for r in rows if r.impl == "hopper"]
    timing = {**rows[0].timing, "interleaved": ["hopper", "sdpa-cudnn", "hopper-bf16"]}
    slower = {"hopper-bf16": {"median": 0.5, "ci95": [0.5, 0.5]}}
    with_it = [replace(r, timing=timing, ratio_to={**r.ratio_to, **slower}) if r in ours else r for r in rows]
    with_it += [replace(r, timing=timing, impl="hopper-bf16", ratio_to={}) for r in ours]
    assert pages.best_table(with_it, ours=paper.ours) == pages.best_table(rows, ours=paper.ours)


def test_errors_of_all_inputs_stand_in_one_table():
    """Of the largest shape of each input, of the newest run on the GPU that ran last."""
    def error(value, impl="portable", gpu=GPU, time="2026-11-26T12:00:00+00:00", **case):
        return replace(number("rmse", value, impl, **case), env={"gpu": gpu}, time=time)

    later = "2026-11-27T12:00:00+00:00"
    records = [
        error(5e-3, input="normal", seqlen_q=512), error(1e-3, input="normal", seqlen_q=2048),
        error(2e-3, input="normal", seqlen_q=2048, time=later), error(4e-3, input="outliers", seqlen_q=1024),
        error(9e-1, input="outliers", seqlen_q=1024, gpu="Another"),
        error(3e-3, "fp8-block", input="outliers", seqlen_q=1024),
    ]  # fmt: skip
    table, shapes = pages.error_table(records)
    assert table.splitlines()[2:] == ["| portable | 2.00e-03 | 4.00e-03 |", "| fp8-block | – | 3.00e-03 |"], table
    assert "normal 2k keys" in shapes and "outliers 1k keys" in shapes and GPU in shapes
    assert pages.error_table([r for r in records if r.case["input"] == "normal"]) == []
    assert pages.error_table([replace(r, kind="checked") for r in records]) == []


def test_a_paper_without_figures_shows_the_claims_that_are_settled(tmp_path, monkeypatch):
    from gpu_accel.workbench.records import Record

    folder = tmp_path / "clocks"
    folder.mkdir()
    (folder / "paper.toml").write_text('id = "clocks"\ntitle = "Clocks"\n[experiments.latency]\ntitle = "Latency"\n')
    head = (
        '[[claim]]\nid = "{}"\nwhere = "t"\nstatement = "{} takes 30"\nsource = "arXiv:1"\nvalue = 30\nunit = "clk"\n'
    )
    measure = 'measure = {{experiment = "latency", impl = "kernel", metric = "latency", case = {{level = "{}"}}}}\n'
    claims = "".join(head.format(level, level) + measure.format(level) for level in ("l1", "l2"))
    (folder / "claims.toml").write_text(claims)
    (folder / "README.md").write_text("# C\n\n<!-- begin generated: results -->\n<!-- end generated: results -->\n")
    record = Record(
        kind="measured", paper="clocks", experiment="latency", case={"level": "l1"}, impl="kernel", metric="latency",
        unit="clk", median=31.0, env={"gpu": "G"}, checked={"error": 0.0, "bound": 0.0, "metric": "wrong elements"},
    )  # fmt: skip
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(tmp_path))
    monkeypatch.setattr(registry.Paper, "records", lambda self: [record])
    pages.refresh(registry.paper("clocks"))
    text = (folder / "README.md").read_text()
    assert "| l1 takes 30 | t | 30 clk | 31 clk | reproduced |" in text and "l2 takes 30" not in text
    assert "2 claims: 1 reproduced" in text
