"""The registry: papers are found by their folder, read strictly, and imported only when an experiment is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.registry import paper, papers, survey

ROOT = Path(__file__).resolve().parents[2]
TOY = """
id = "toy_paper"
title = "Toys"
arxiv = "0000.00001"
authors = ["A. Author"]
year = 2026
aliases = ["toy", "tp"]
ours = ["portable"]
inputs = ["normal", "outliers"]
[experiments.forward]
title = "Forward"
precisions = ["bf16", "fp8"]
default = true
[experiments.memory]
title = "Memory"
[default_for]
fp8 = ["forward", "memory"]
"""
EXPERIMENT = """
from . import shapes
from .shapes import SHAPES
EXPERIMENTS = {"forward": (shapes.__name__, SHAPES)}
"""


def add_paper(folder: Path, text: str = TOY, name: str = "toy_paper") -> Path:
    place = folder / name
    place.mkdir(parents=True)
    (place / "paper.toml").write_text(text)
    (place / "experiment.py").write_text(EXPERIMENT)
    (place / "shapes.py").write_text(f"SHAPES = [{str(folder)!r}]\n")
    return place


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(tmp_path))
    return tmp_path


def test_a_folder_is_a_paper(folder):
    place = add_paper(folder)
    toy = paper("toy")
    assert toy in papers()
    assert (toy.id, toy.title, toy.year, toy.authors) == ("toy_paper", "Toys", 2026, ("A. Author",))
    assert (toy.alias, toy.path, toy.ours, toy.inputs) == ("toy", place, ("portable",), ("normal", "outliers"))
    assert list(toy.experiments) == ["forward", "memory"]
    assert toy.experiments["forward"].precisions == ("bf16", "fp8")
    assert toy.claims() == [] and toy.records() == []


def test_names_ignore_case_and_dashes_and_suggest(folder):
    add_paper(folder)
    assert paper("TOY-paper").id == paper("tp").id == paper("Toy_Paper").id == "toy_paper"
    with pytest.raises(InvalidInputError, match=r"no paper is named 'toy_papr'.*Did you mean toy_paper"):
        paper("toy_papr")
    with pytest.raises(InvalidInputError, match=r"toy_paper has no experiment 'forwrd'.*Did you mean forward"):
        paper("toy").experiment("forwrd")


def test_default_experiments(folder):
    add_paper(folder)
    toy = paper("toy")
    assert toy.default_experiments("fp8") == ("forward", "memory")
    assert toy.default_experiments("bf16") == ("forward",)
    assert toy.default_experiments("fp4") == ()


def test_experiments_import_their_siblings_under_their_own_name(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    add_paper(one)
    add_paper(two)
    seen = []
    for folder in (one, two):  # two folders with one paper id must not share modules
        monkeypatch.setenv("GPU_ACCEL_PAPERS", str(folder))
        name, shapes = paper("toy").experiment("forward")
        assert shapes == [str(folder)]
        assert paper("toy").experiment("forward") == (name, shapes)  # imported once, under one name
        seen.append(name)
    assert seen[0] != seen[1] and "shapes" not in sys.modules


def test_experiment_files_that_do_not_fit(folder):
    place = add_paper(folder)
    with pytest.raises(InvalidInputError, match="EXPERIMENTS lacks 'memory'"):
        paper("toy").experiment("memory")
    (place / "experiment.py").unlink()
    with pytest.raises(InvalidInputError, match=r"no .*experiment\.py"):
        paper("toy").experiment("forward")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('title = "Toys"', ""), "'title' is missing"),
        (('title = "Toys"', "title = 3"), "'title'"),
        (("year = 2026", 'year = "2026"'), "'year'"),
        (("year = 2026", "yeer = 2026"), "unknown key 'yeer'"),
        (("default = true", "default = 1"), "experiments: forward: 'default'"),
        (("default = true", "defualt = true"), "unknown key 'defualt'"),
        (('aliases = ["toy", "tp"]', 'aliases = "toy"'), "'aliases'"),
        (('fp8 = ["forward", "memory"]', 'fp8 = ["backward"]'), "no experiment is named 'backward'"),
        (('fp8 = ["forward", "memory"]', 'fp4 = ["forward"]'), "'forward' runs in bf16, fp8 only"),
        (('id = "toy_paper"', 'id = "toy-paper"'), "identifier"),
        (('id = "toy_paper"', 'id = "toys"'), "the folder is named 'toy_paper'"),
        (('id = "toy_paper"', 'id = "../toy_paper"'), "identifier"),
        (("year = 2026", "year = 2026\nnotebook = '../../x.ipynb'"), "plain file name"),
        (("year = 2026", "year = 2026\nnotebook = '/x.ipynb'"), "plain file name"),
        (("year = 2026", "year = 2026\nnotebook = '..'"), "plain file name"),
        (("year = 2026", "year = 2026\nnotebook = 'a\\b.ipynb'"), "plain file name"),
        (("year = 2026", f"year = {'1' * 5000}"), "paper.toml"),
        (("year = 2026", f"year = {'[' * 5000}"), "paper.toml"),
        (("[default_for]", "[default_for"), "paper.toml"),
    ],
)
def test_paper_toml_is_read_strictly(folder, change, message):
    assert change[0] in TOY
    place = add_paper(folder, TOY.replace(*change))
    with pytest.raises(InvalidInputError, match=message) as caught:
        paper("toy_paper")
    assert str(place / "paper.toml") in str(caught.value)


@pytest.mark.parametrize("content", [b"[broken", b'title = "\xff"', b"", b"id = 3"])
def test_a_broken_paper_leaves_the_others_alone(folder, content):
    add_paper(folder)
    (add_paper(folder, name="aaa") / "paper.toml").write_bytes(content)
    assert paper("toy").id == "toy_paper" and paper("fa3").id == "flash_attention3"
    with pytest.warns(UserWarning, match=r"left out: .*aaa/paper\.toml"):
        assert {"toy_paper", "flash_attention3"} <= {one.id for one in papers()}
    found, (broken,) = survey()
    assert broken.path == folder / "aaa" and "paper.toml" in broken.why and paper("toy") in found
    with pytest.raises(InvalidInputError, match=r"no paper is named 'other'.*Not readable: .*aaa/paper\.toml"):
        paper("other")


def test_an_extra_paper_cannot_take_the_name_of_one_that_comes_with_the_library(folder):
    add_paper(folder, TOY.replace('["toy", "tp"]', '["fa3"]'))
    assert paper("fa3").id == "flash_attention3"
    with pytest.raises(InvalidInputError, match="both named 'fa3'"):
        paper("toy_paper")


def test_a_name_belongs_to_one_paper(folder):
    add_paper(folder)
    add_paper(folder, TOY.replace("toy_paper", "zother").replace('["toy", "tp"]', '["Toy-Paper"]'), "zother")
    with pytest.warns(UserWarning, match="both named 'toy-paper'"):
        papers()
    assert paper("toy-paper").id == "toy_paper"
    with pytest.raises(InvalidInputError, match="both named 'toy-paper'"):
        paper("zother")


def test_a_missing_extra_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_ACCEL_PAPERS", os.pathsep.join([str(tmp_path), str(tmp_path / "gone")]))
    with pytest.raises(InvalidInputError, match="GPU_ACCEL_PAPERS names .*gone"):
        papers()


def test_the_same_folder_twice_is_one_folder(tmp_path, monkeypatch):
    add_paper(tmp_path)
    monkeypatch.setenv("GPU_ACCEL_PAPERS", os.pathsep.join([str(tmp_path), str(tmp_path / ".." / tmp_path.name)]))
    assert [one.id for one in papers()].count("toy_paper") == 1


def test_installed_papers_are_found_without_a_checkout(tmp_path):
    site = tmp_path / "site"
    add_paper(site / "gpu_accel_papers")
    program = "from gpu_accel.workbench.registry import papers; print([p.id for p in papers()])"
    # -P and a copied package, so that neither this checkout nor the working folder is on the path.
    for module in ("__init__", "errors", "workbench/__init__", "workbench/registry", "workbench/strict_toml"):
        target = site / "gpu_accel" / f"{module}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / "gpu_accel" / f"{module}.py"
        target.write_text(source.read_text() if module != "__init__" else "")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    out = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, cwd=tmp_path, text=True, capture_output=True
    )
    assert out.stdout.strip() == "['toy_paper']", out.stderr


def test_reading_papers_is_fast_and_imports_no_torch(folder):
    for number in range(8):
        add_paper(folder, TOY.replace("toy_paper", f"p{number}").replace('["toy", "tp"]', "[]"), f"p{number}")
    program = textwrap.dedent(
        """
        import sys, time
        from gpu_accel.workbench.registry import papers
        times = []
        for _ in range(5):
            start = time.process_time()
            count = len(papers())
            times.append(time.process_time() - start)
        heavy = {"torch", "triton", "numpy"} & sys.modules.keys()
        assert count >= 8 and not heavy, (count, heavy)
        assert min(times) < 0.030, times
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


BORROWER = """
id = "second_paper"
title = "More toys"
[experiments.forward]
title = "Forward"
of = "toy_paper"
default = true
"""


def result(paper, experiment, time="2026-11-27T12:00:00+00:00"):
    from gpu_accel.workbench.records import Record

    return Record(
        kind="measured", paper=paper, experiment=experiment, case={}, impl="a", metric="rmse", unit="1", median=1.0,
        env={"gpu": "G"}, time=time,
    )  # fmt: skip


def test_an_experiment_is_borrowed_with_its_records(folder):
    from gpu_accel.workbench.records import append_records, merge

    lender = add_paper(folder)
    borrower = add_paper(folder, BORROWER, "second_paper")
    (borrower / "experiment.py").unlink()  # it needs no code of its own
    second = paper("second_paper")
    assert second.experiments["forward"].of == "toy_paper"
    assert second.experiment("forward") == paper("toy").experiment("forward")
    lent = [result("toy_paper", name) for name in ("forward", "memory")]
    append_records(lender / "results" / "g" / "r.jsonl", lent)
    found = second.records()
    assert [(r.paper, r.experiment) for r in found] == [("second_paper", "forward")], "not what was not borrowed"
    assert "toy_paper" in found[0].location, "the verdict says where it was measured"
    own = result("second_paper", "forward", time="2026-11-28T12:00:00+00:00")
    append_records(borrower / "results" / "g" / "r.jsonl", [own])
    assert [r.when.day for r in merge(second.records())] == [28], "the newest of either counts"
    assert len(paper("toy").records()) == 2, "the lender's are its own"


def test_a_loan_of_a_loan_and_of_oneself_are_refused(folder):
    add_paper(folder, BORROWER.replace('of = "toy_paper"', 'of = "second_paper"'), "second_paper")
    with pytest.raises(InvalidInputError, match="from the paper itself"):
        paper("second_paper")
    third = BORROWER.replace("second_paper", "third_paper").replace("toy_paper", "second_paper")
    add_paper(folder, third, "third_paper")
    (folder / "second_paper" / "paper.toml").write_text(BORROWER.replace("toy_paper", "third_paper"))
    with pytest.raises(InvalidInputError, match="only borrows it too"):
        paper("second_paper").experiment("forward")


def test_a_command_names_no_precision_where_there_is_no_choice(folder):
    from gpu_accel.workbench.evidence import command

    place = add_paper(folder)
    head = '[[claim]]\nid = "{0}"\nwhere = "t"\nstatement = "s"\nsource = "arXiv:1"\nvalue = 1\nunit = "1"\n'
    measure = 'measure = {{experiment = "{0}", impl = "a", metric = "rmse", case = {{dtype = "e4m3"}}}}\n'
    (place / "claims.toml").write_text("".join((head + measure).format(name) for name in ("forward", "memory")))
    forward, memory = paper("toy").claims()
    assert command(forward) == "gpu-accel run toy forward --precision fp8"
    assert command(memory) == "gpu-accel run toy memory"


def test_a_command_says_how_many_processes_it_takes():
    from gpu_accel.workbench.evidence import command

    claims = {claim.id: claim for claim in paper("ring").claims()}
    assert command(claims["pk.copy-engine"]) == "gpu-accel run ring links --nproc 2"
    assert command(claims["error-flat.o"]) == "gpu-accel run ring error"
