"""A paper is added by one folder, one package and one notebook, and by no edit anywhere else.

`tests/tiny_paper` holds the three; they are copied to a temporary folder, away from this checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Shell:
    """Runs `gpu-accel` as a user would, in a folder of its own that has the tiny paper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(ROOT), str(folder)])
        self.environment = {**os.environ, "PYTHONPATH": path, "GPU_ACCEL_PAPERS": str(folder / "papers")}
        self.environment.pop("TRITON_INTERPRET", None)  # the command line decides that by itself

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        self.stderr = done.stderr
        return done.stdout

    def json(self, *arguments: str, code: int = 0):
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(ROOT / "tests" / "tiny_paper", folder, dirs_exist_ok=True)
    return Shell(folder)


def test_list_and_show_find_it(shell: Shell) -> None:
    assert "tiny" in [paper["id"] for paper in shell.json("list")]
    shown = shell.json("show", "axpy")
    assert shown["id"] == "tiny"
    assert list(shown["experiments"]) == ["add"]
    assert shown["notebook"] == "notebooks/02_tiny.ipynb"


def test_its_claims_all_have_a_verdict(shell: Shell) -> None:
    claims = {claim["id"]: claim["verdict"] for claim in shell.json("claims", "tiny")["claims"]}
    assert set(claims) == {"exact", "fast", "no-source"}
    assert claims["exact"].startswith("not measured")
    assert claims["no-source"].startswith("unsupported")


def test_a_run_keeps_records_that_settle_a_claim(shell: Shell) -> None:
    made = shell.json("run", "tiny", "--device", "cpu")
    assert made["status"] == "ok"
    assert {record["kind"] for record in made["records"]} == {"checked"}
    assert {record["impl"] for record in made["records"]} == {"portable", "torch"}
    assert all(record["checked"]["error"] <= record["checked"]["bound"] for record in made["records"])
    assert [(claim["id"], claim["verdict"]) for claim in made["claims"]] == [("exact", "reproduced")]
    kept = shell.folder / made["output"]
    assert kept.is_relative_to(shell.folder / "gpu-accel-results" / "tiny" / "cpu")
    judged = shell.json("claims", "tiny", "--results", str(kept), "--id", "exact")
    assert judged["counts"]["reproduced"] == 1


def test_resume_does_no_work_twice(shell: Shell) -> None:
    first = shell.json("run", "tiny", "--device", "cpu", "--tag", "resume")
    again = shell.json("run", "tiny", "--device", "cpu", "--tag", "resume", "--resume")
    if first["records"][0]["dirty"]:  # a checkout at work: everything runs again, and says why
        assert "uncommitted changes" in again["resume_refused"] and again["output"]
        shell("run", "tiny", "--device", "cpu", "--tag", "resume", "--resume")
        assert "nothing is resumed: the tree has uncommitted changes" in shell.stderr
    else:
        assert again["resume_refused"] is None and again["output"] is None  # nothing new
        assert again["records"] == first["records"]


def test_a_wrong_kernel_is_reported_and_not_kept(shell: Shell) -> None:
    package = shell.folder / "tiny_axpy" / "__init__.py"
    right = package.read_text()
    package.write_text(right.replace("a * x + y, mask", "a * x - y, mask"))
    try:
        made = shell.json("run", "tiny", "--device", "cpu", "--results", "wrong", "-o", "rows.csv", code=3)
        text = shell("run", "tiny", "--device", "cpu", "--results", "wrong", code=3)
    finally:
        package.write_text(right)
    assert made["status"] == "incorrect"
    assert [(row["impl"], "max_abs" in row["why"]) for row in made["incorrect"]] == [("portable", True)]
    assert {record["impl"] for record in made["records"]} == {"torch"}
    assert made["counts"]["wrong"] == len(made["incorrect"]) and made["counts"]["correct"] == 1
    assert all(row["checked"]["error"] > row["checked"]["bound"] for row in made["incorrect"])
    assert "WRONG" in (shell.folder / "rows.csv").read_text()
    assert [line.split()[-1] for line in text.splitlines() if "portable" in line][0] == "WRONG"
    assert f"{made['counts']['correct']} result" in text and "correct, 1 wrong (portable)" in text


def test_a_wrong_rival_is_told_and_fails_nothing(shell: Shell) -> None:
    experiment = shell.folder / "papers" / "tiny" / "experiment.py"
    right = experiment.read_text()
    experiment.write_text(right.replace('"portable", "ours"', '"portable", "peer"'))
    package = shell.folder / "tiny_axpy" / "__init__.py"
    kernel = package.read_text()
    package.write_text(kernel.replace("a * x + y, mask", "a * x - y, mask"))
    try:
        text = shell("run", "tiny", "--device", "cpu", "--results", "rival")
    finally:
        experiment.write_text(right)
        package.write_text(kernel)
    assert "1 wrong (portable, a rival)" in text and "WRONG" in shell.stderr


def test_a_package_that_is_not_importable_is_one_line(shell: Shell) -> None:
    package = shell.folder / "tiny_axpy"
    package.rename(shell.folder / "elsewhere")
    try:
        assert shell("run", "tiny", "--device", "cpu", code=4) == ""
        assert shell("run", "tiny", "--device", "cpu", "--dry-run", code=4) == ""
    finally:
        (shell.folder / "elsewhere").rename(package)
    assert "tiny_axpy" in shell.stderr and "paper.toml" in shell.stderr and "PYTHONPATH" in shell.stderr
    assert len(shell.stderr.splitlines()) == 1


def test_a_gate_that_settles_nothing_fails(shell: Shell) -> None:
    shell("claims", "tiny", "--id", "fast", "--gate", code=5)


def test_its_notebook_runs_with_parameters(shell: Shell) -> None:
    pytest.importorskip("nbclient")
    shell("notebook", "tiny", "--execute", "-p", "size=300", "-p", "scale=2", "-o", "made.ipynb")
    cells = json.loads((shell.folder / "made.ipynb").read_text())["cells"]
    printed = "".join(text for cell in cells for out in cell.get("outputs", []) for text in out.get("text", []))
    assert "size 300" in printed
    shell("notebook", "tiny", "--execute", "-p", "sise=300", code=2)
    shell("notebook", "tiny", "--execute", "-p", "size=large", code=2)
