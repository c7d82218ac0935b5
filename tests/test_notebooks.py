"""The notebooks: their form, and that they also run when there are records, which nbmake alone does not show.

nbmake executes each notebook as committed (`pytest --nbmake notebooks`). Here the cells run once more in this process
with made-up records in place of the committed ones.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from gpu_accel.testing.records import grid, number
from gpu_accel.workbench import registry

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ORDER = ["## The claims", "## Parameters", "## The idea", "## How far from the roof", "## The sweep", "## What differs",
         "## Exercises"]  # fmt: skip
H100 = "NVIDIA H100 80GB HBM3"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
paper_notebook = pytest.mark.parametrize(
    "path", [p for p in NOTEBOOKS if not p.stem.startswith("00")], ids=lambda p: p.stem
)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def sources(path, kind="code"):
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == kind]


def test_there_is_a_start_and_each_paper_has_its_own():
    names = {path.name for path in NOTEBOOKS}
    assert "00_start.ipynb" in names
    assert {Path(paper.notebook).name for paper in registry.papers()} <= names


@every_notebook
class TestForm:
    def test_valid_with_ids_and_clean_metadata(self, path):
        nbformat = pytest.importorskip("nbformat")
        book = read(path)
        nbformat.validate(book)
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in book["cells"]]
        assert len(set(ids)) == len(ids)
        assert book["metadata"] == {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        assert all(set(cell["metadata"]) <= {"tags"} for cell in book["cells"])

    def test_no_outputs_are_committed(self, path):
        for cell in read(path)["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None

    def test_cells_are_short_and_define_nothing(self, path):
        for source in sources(path):
            assert len(source.splitlines()) <= 15, source
            assert all(len(line) <= 120 for line in source.splitlines()), source
            defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            assert not any(isinstance(node, defined) for node in ast.walk(ast.parse(source))), source

    def test_no_figure_widget_no_shell_no_paths(self, path):
        for source in sources(path):
            assert "FigureWidget" not in source
            assert not re.search(r"^\s*[!%]", source, re.M)
            assert not re.search(r"['\"](/|~)", source)

    def test_every_code_cell_follows_text_and_the_last_asserts(self, path):
        assert read(path)["cells"][0]["cell_type"] == "markdown"
        assert sources(path)[-1].count("assert ") >= 3

    def test_start_comes_before_kernels_are_imported(self, path):
        code = sources(path)
        assert "nb.start()" in code[0]
        assert "gpu_accel.flash_attention3" not in code[0]


@paper_notebook
class TestPaperNotebook:
    def test_order(self, path):
        headings = [line for text in sources(path, "markdown") for line in text.splitlines() if line.startswith("## ")]
        places = [next(i for i, h in enumerate(headings) if h.startswith(wanted)) for wanted in ORDER]
        assert places == sorted(places)
        code = sources(path)
        assert "verdict_line" in code[0] and "claims_table" in code[1]

    def test_parameters_are_literals_in_one_tagged_cell_before_the_work(self, path):
        tagged = [c for c in read(path)["cells"] if "parameters" in c["metadata"].get("tags", [])]
        assert len(tagged) == 1
        names = {}
        for statement in ast.parse("".join(tagged[0]["source"])).body:
            names[statement.targets[0].id] = ast.literal_eval(statement.value)
        assert {"mode", "precision", "input", "seed"} <= names.keys()
        assert sources(path).index("".join(tagged[0]["source"])) == 2


def run_cells(path, monkeypatch, **parameters):
    """Run the code cells as a kernel would, showing what each ends with; returns the namespace."""
    pytest.importorskip("plotly")
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("PLOTLY_RENDERER", "json")
    space: dict = {}
    for source in sources(path):
        body = ast.parse(source)
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, path.name, "exec"), space)
        if parameters and parameters.keys() <= space.keys():  # after the cell that sets them
            space |= parameters
            parameters = {}
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), path.name, "eval"), space)
            for method in ("_ipython_display_", "_repr_html_"):
                if hasattr(shown, method):
                    getattr(shown, method)()
                    break
    return space


def made_up_records():
    """Records of every experiment of FlashAttention-3."""
    times = grid({"portable": 200.0, "sdpa-flash": 100.0, "sdpa-cudnn": 250.0}, gpu=H100)
    kinds = {("normal", "fp8 block"): 4e-3, ("outliers", "fp8 block"): 9e-3, ("outliers", "fp8 tensor"): 2e-2}
    errors = [number("rmse", value, impl, dtype="e4m3", input=kind) for (kind, impl), value in kinds.items()]
    bytes_ = [number("peak_bytes", 2.0**20 * n, unit="bytes", seqlen_q=n, seqlen_k=n) for n in (512, 1024)]
    return [*times, *errors, *bytes_]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("02_thunderkittens", dict(seqlen=7, key_dim=5, value_dim=3)), ("03_ring_attention", dict(seqlen=7, ranks=3)),
     ("03_ring_attention", dict(seqlen=24, ranks=1)), ("08_gpu_cores", dict(latency_cycles=2))],
    ids=["tk", "ring", "ring-alone", "cores"],
)  # fmt: skip
def test_runs_with_parameters_that_its_exercises_ask_for(name, parameters, monkeypatch):
    monkeypatch.delenv("GPU_ACCEL_NOTEBOOK_MODE", raising=False)
    path = next(path for path in NOTEBOOKS if path.stem == name)
    space = run_cells(path, monkeypatch, **parameters)
    assert all(space[key] == value for key, value in parameters.items())


@every_notebook
def test_runs_with_records(path, monkeypatch, capsys):
    monkeypatch.setattr(registry.Paper, "records", lambda self: made_up_records())
    monkeypatch.delenv("GPU_ACCEL_NOTEBOOK_MODE", raising=False)
    space = run_cells(path, monkeypatch)
    if "explorer" in space:
        assert H100 in space["explorer"].figure.layout.meta["stamp"]
        assert len(space["explorer"].figure.data) >= 12
        assert "measured on" in capsys.readouterr().out
