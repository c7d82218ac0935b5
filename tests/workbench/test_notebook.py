"""What notebooks import: modes, records through the one runner, tables, and the explorer driven by its widgets."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.testing.records import GPU, correct, grid, number, quote, timed
from gpu_accel.workbench import notebook as nb
from gpu_accel.workbench import plots
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.records import append_records

PAPER = """
id = "toy"
title = "A toy paper"
arxiv = "1234.5678"
year = 2024
aliases = ["ty"]
package = "gpu_accel"
notebook = "99_toy.ipynb"
ours = ["portable"]
inputs = ["normal", "outliers"]

[experiments.forward]
title = "Forward"
precisions = ["bf16", "fp8"]
default = true
"""
EXPERIMENT = """
from gpu_accel.workbench.experiment import Check, Implementation, SimpleExperiment, Workload


def cases(settings):
    return [{"seqlen_q": 8, "dtype": "bf16", "input": settings.input, "quick": settings.quick}]


def build(case, settings):
    check = lambda seed: Check(0.25, 0.5, "max_abs")
    lost = Implementation(name="lost", role="peer", unavailable="not installed")
    return Workload(implementations=[Implementation(name="portable", role="ours", check=check), lost])


EXPERIMENTS = {"forward": SimpleExperiment(name="forward", title="Forward", list_cases=cases, build_case=build)}
"""
CLAIMS = """
[[claim]]
id = "a"
where = "abstract"
statement = "Ours is at least as fast as FlashAttention-2"
source = "arXiv:1234.5678"
value = 2.0
unit = "x"
direction = "at_least"
measure = {experiment = "forward", impl = "portable", ratio_to = "sdpa-flash", case = {seqlen_q = 1024}}

[[claim]]
id = "b"
where = "table 9"
statement = "Pigs fly"
source = "seed"
value = 1
unit = "x"
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A paper in a folder of its own, found by the registry; returns its folder."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "paper.toml").write_text(PAPER)
    (folder / "experiment.py").write_text(EXPERIMENT)
    (folder / "claims.toml").write_text(CLAIMS)
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(tmp_path))
    return folder


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(nb, "has_gpu", lambda: False)


class TestMode:
    def test_default_variable_and_explicit_value(self, monkeypatch, no_gpu):
        monkeypatch.delenv(nb.MODE_VARIABLE, raising=False)
        assert nb.mode() == nb.mode("") == "recorded"
        monkeypatch.setenv(nb.MODE_VARIABLE, "smoke")
        assert nb.mode() == nb.mode("") == "smoke"
        assert nb.mode("recorded") == "recorded"

    def test_live_needs_a_gpu(self, monkeypatch, no_gpu):
        with pytest.raises(HardwareError, match="'recorded'"):
            nb.mode("live")
        monkeypatch.setattr(nb, "has_gpu", lambda: True)
        assert nb.mode("live") == "live"

    def test_unknown(self):
        with pytest.raises(InvalidInputError, match="recorded, live, smoke"):
            nb.mode("fast")


class TestStart:
    CODE = "import sys\n{before}\nfrom gpu_accel.workbench import notebook as nb\nnb.has_gpu = lambda: False\n{after}"

    def run(self, before, after):
        code = self.CODE.format(before=before, after=after)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=self.env(), timeout=120)

    @staticmethod
    def env():
        import os

        return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.getcwd()}

    def test_interpreter_is_chosen_before_kernels_are_imported(self):
        done = self.run("", "print(nb.start())\nimport gpu_accel.compat as c, os\nprint(c.INTERPRET)")
        assert done.stdout.splitlines()[-1] == "True", done.stderr
        assert "interpreter" in done.stdout

    def test_too_late_is_an_error_that_says_restart(self):
        done = self.run("import gpu_accel.compat", "nb.start()")
        assert done.returncode and "restart the notebook's kernel" in done.stderr


class TestRunOrLoad:
    def test_nothing_recorded_yet(self, toy, capsys):
        assert nb.run_or_load("ty", "forward", "recorded") == []
        assert capsys.readouterr().out.splitlines() == [
            "$ gpu-accel run ty forward --precision bf16 --input normal --seed 0",
            "not measured yet",
        ]

    def test_recorded_selects_precision_and_input_and_keeps_the_newest(self, toy, capsys):
        old, new = timed(time="2026-01-01T00:00:00+00:00"), timed(tflops=120.0)
        others = [timed(input="outliers"), timed(dtype="e4m3")]
        append_records(toy / "results" / "gpu" / "x.jsonl", [old, new, *others])
        found = nb.run_or_load("ty", "forward", "recorded", input="normal")
        assert [round(r.value("tflops")) for r in found] == [120]
        assert {r.case["input"] for r in nb.run_or_load("ty", "forward", "recorded")} == {"normal", "outliers"}
        assert [r.case["dtype"] for r in nb.run_or_load("ty", "forward", "recorded", precision="fp8")] == ["e4m3"]
        assert f"1 records, measured on {GPU}, 2026-11-27" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("paper", "experiment", "options"),
        [("hopper", "latency", {}), ("te", "error", {"precision": "fp8"}), ("cuda-llm", "search", {})],
    )
    def test_records_of_experiments_without_a_choice_of_precision(self, paper, experiment, options):
        """A latency has no dtype, and what is quantised to eight bits had sixteen."""
        assert nb.run_or_load(paper, experiment, "recorded", **options)

    def test_smoke_runs_the_paper_on_the_cpu_without_times(self, toy, capsys):
        records = nb.run_or_load("ty", "forward", "smoke", input="outliers", seed=3)
        assert [(r.impl, r.kind, r.metric, r.case["quick"], r.case["input"]) for r in records] == [
            ("portable", "checked", "correct", True, "outliers")
        ]
        said = capsys.readouterr().out
        assert "--input outliers --seed 3 --device cpu --quick" in said
        assert "no result of lost in 1 case: not installed" in said
        assert not plots.throughput(records).data

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"experiment": "sideways"}, "has no experiment 'sideways'"),
            ({"input": "strange"}, "input is 'strange'"),
            ({"precision": "fp16"}, "precision is 'fp16'"),
            ({"mode": "quick"}, "mode is 'quick'"),
        ],
    )
    def test_wrong_arguments(self, toy, arguments, message):
        with pytest.raises(InvalidInputError, match=message):
            nb.run_or_load("ty", **({"experiment": "forward"} | arguments))

    def test_the_printed_command_is_one_that_the_command_line_takes(self, toy):
        shapes = ({"seqlen_q": 64, "causal": True},)
        settings = Settings(device="cpu", precision="bf16", shapes=shapes, quick=True)
        command = nb.command_line("ty", "forward", settings)
        assert command.split()[:4] == ["gpu-accel", "run", "ty", "forward"]
        from typer.testing import CliRunner

        from cli.main import app

        result = CliRunner().invoke(app, [*command.split()[1:], "--dry-run", "--json"])
        assert result.exit_code == 0, result.output


class TestTables:
    def test_every_claim_has_a_row_and_a_verdict(self, toy):
        append_records(
            toy / "results" / "gpu" / "x.jsonl", [timed(against={"sdpa-flash": 2.1}, seqlen_q=1024, paper="toy")]
        )
        table = nb.claims_table("ty")
        assert len(table.rows) == 2
        words = {row[0]: row[-1] for row in table.rows}
        assert words["Ours is at least as fast as FlashAttention-2"] == "reproduced"
        assert words["Pigs fly"] == "unsupported (no source found)"
        assert "Pigs fly" in table._repr_html_() and "Pigs fly" in str(table)
        assert str(nb.verdict_line("ty")).startswith("2 claims: 1 reproduced, 1 unsupported\n(measured on")

    def test_without_records_every_claim_still_has_a_verdict(self, toy):
        assert all(row[-1] for row in nb.claims_table("ty").rows)
        assert "nothing measured yet" in str(nb.verdict_line("ty"))

    def test_ledger_and_papers_list_every_paper(self, toy):
        from gpu_accel.workbench.registry import papers

        assert len(nb.ledger().rows) == len(nb.papers_table().rows) == len(papers())
        row = next(r for r in nb.ledger().rows if r[0] == "A toy paper")
        assert row[2] == "2" and sum(int(count) for count in row[3:8]) == 2

    def test_machine_says_why_not(self, no_gpu):
        can = {row[0]: row[1:] for row in nb.machine().rows}
        assert can["measure kernels"][0] == "no" and "doctor" in can["measure kernels"][1]
        assert can["read every result and verdict"][0] == "yes"

    def test_environment_and_doctor_have_rows(self, no_gpu):
        assert {"python", "torch"} <= {row[0] for row in nb.environment().rows}
        assert all(row[1] for row in nb.doctor().rows) and nb.doctor().rows


def test_recorded_is_the_best_with_interval_and_stamp():
    text = nb.recorded([timed(tflops=100), timed(tflops=150, seqlen_q=2048)], impl="portable")
    assert text.startswith("150 TFLOP/s [120 to 187.5] (seqlen_q 2048, head_dim 64, causal False)")
    assert GPU in text
    assert nb.recorded([correct()], impl="portable") == "not measured yet"


def test_one_gpu_takes_the_newest_where_none_is_here(no_gpu):
    old, new = timed(gpu="A", time="2026-01-01T00:00:00+00:00"), timed(gpu="B")
    assert nb.one_gpu([new, old, correct()]) == [new]
    assert nb.one_gpu([correct()]) == []


def test_largest_keeps_one_shape_for_each_input():
    rows = [number("rmse", 1.0, seqlen_q=n, input=i) for n in (64, 128) for i in ("normal", "outliers")]
    assert [(r.case["seqlen_q"], r.case["input"]) for r in nb.largest(rows, "rmse")] == [
        (128, "normal"),
        (128, "outliers"),
    ]


class TestExplorer:
    @pytest.fixture(autouse=True)
    def needs(self):
        pytest.importorskip("plotly")
        pytest.importorskip("ipywidgets")

    def records(self):
        return [
            *grid(),
            *grid({"portable": 400.0}, dtype="e4m3"),
            *grid({"portable": 50.0}, gpu="Other GPU 2"),
            correct(),
        ]

    def test_view_is_a_function_of_its_parameters(self):
        explorer = nb.explorer(self.records(), claims=[quote(300.0)])
        figure = explorer.view({"gpu": GPU, "precision": "bf16", "head_dim": 64, "causal": False, "impl": "portable"})
        assert [t.name for t in figure.data] == ["gpu-accel, plain Triton", "New in the paper, fp16 (quoted)"]
        assert list(figure.data[0].y) == pytest.approx([200, 300, 400])
        assert explorer.figure is None and not explorer.controls  # nothing was kept
        with pytest.raises(InvalidInputError, match="unknown choice presicion"):
            explorer.view({"presicion": "bf16"})

    def test_setting_a_widget_redraws(self):
        explorer = nb.explorer(self.records())
        assert explorer.widget is explorer.widget
        explorer.controls["gpu"].value = GPU
        explorer.controls["precision"].value = "bf16"
        assert len(explorer.figure.data) == 4 * 3
        explorer.controls["causal"].value = True
        assert len(explorer.figure.data) == 2 * 3
        explorer.controls["head_dim"].value = 128
        explorer.controls["impl"].value = ("sdpa-flash",)
        assert [t.name for t in explorer.figure.data] == ["SDPA, FlashAttention-2"]
        explorer.controls["precision"].value = "e4m3"  # no peer has such records
        assert not explorer.figure.data
        assert "not measured yet" in [a.text for a in explorer.figure.layout.annotations]

    def test_what_is_shown_is_updated_in_place(self):
        explorer = nb.explorer(self.records())
        shown = []
        explorer.widget  # noqa: B018
        explorer._display = types.SimpleNamespace(update=lambda bundle, raw: shown.append((bundle, raw)))
        explorer.controls["gpu"].value = GPU
        (bundle, raw), *_ = shown
        figure = bundle["application/vnd.plotly.v1+json"]
        assert raw and figure["layout"]["meta"]["stamp"] == explorer.figure.layout.meta["stamp"]
        assert json.loads(json.dumps(bundle)) == bundle

    def test_gpus_are_a_choice_and_never_joined(self):
        explorer = nb.explorer(self.records())
        assert explorer.choices()["gpu"] == ["Other GPU 2", GPU]
        assert "Other GPU 2" in explorer.view({}).layout.meta["stamp"]
        assert GPU not in explorer.view({}).layout.meta["stamp"]

    def test_no_figure_widget(self):
        from plotly.graph_objects import Figure

        explorer = nb.explorer(self.records())
        assert explorer.widget is not None and type(explorer.figure) is Figure

    def test_without_records_it_says_so(self):
        explorer = nb.explorer([])
        assert explorer.widget is not None
        assert "not measured yet" in [a.text for a in explorer.figure.layout.annotations]


class TestRenderer:
    CODE = (
        "import plotly.graph_objects as go\nfrom gpu_accel.workbench import notebook as nb\n"
        "nb.has_gpu = lambda: False\nnb.start()\nimport plotly.io as pio\nprint(pio.renderers.default)\n"
        "bundle = pio.renderers._build_mime_bundle(go.Figure(go.Bar(y=[1])).to_dict())\nprint(*bundle)\n"
        "print(max(len(str(v)) for v in bundle.values()))"
    )

    def run(self, **env):
        clean = {k: v for k, v in TestStart.env().items() if k != "PLOTLY_RENDERER"} | env
        return subprocess.run([sys.executable, "-c", self.CODE], capture_output=True, text=True, env=clean, timeout=120)

    def test_plots_show_in_exported_html_and_stay_small(self):
        pytest.importorskip("plotly")
        _, kinds, size = self.run().stdout.splitlines()[-3:]
        assert {"application/vnd.plotly.v1+json", "text/html"} <= set(kinds.split())
        assert int(size) < 100_000

    def test_the_variable_wins(self):
        pytest.importorskip("plotly")
        done = self.run(PLOTLY_RENDERER="json")
        assert done.stdout.splitlines()[-3:-1] == ["json", "application/json"], done.stderr


def test_claims_about_an_experiment():
    whole = nb.claims_table("fa3").rows
    some = nb.claims_about("fa3", "fp8-error").rows
    assert 0 < len(some) < len(whole) and set(some) <= set(whole)
    with pytest.raises(InvalidInputError, match="no experiment 'fp9'"):
        nb.claims_about("fa3", "fp9")
