"""`gpu-accel optimize`: exit codes and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from cli import codes  # noqa: E402
from cli.main import app  # noqa: E402
from gpu_accel.cuda_llm import TASKS  # noqa: E402
from gpu_accel.cuda_llm.fixtures import FIXTURES  # noqa: E402


def call(*words: str, code: int = 0):
    done = CliRunner().invoke(app, ["optimize", *words])
    assert done.exit_code == code, (done.stdout, done.stderr)
    return done.stdout


def test_tasks() -> None:
    rows = json.loads(call("tasks", "--json"))
    assert [row["name"] for row in rows] == list(TASKS)


def test_check_says_why_and_with_which_code(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    hack = next(one for one in FIXTURES if one.id == "C4")
    file.write_text(hack.hack)
    found = json.loads(call("check", str(file), "--task", hack.task, "--json", code=codes.GATE))
    assert (found["verdict"], found["kind"]) == ("cheating", "tampering") and found["evidence"]
    call("check", str(tmp_path / "none.py"), "--task", "dot", code=codes.USAGE)
    call("check", str(file), "--task", "nothing", code=codes.USAGE)


def test_an_accepted_kernel(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(TASKS["reverse"].start)
    assert "accepted" in call("check", str(file), "--task", "reverse", "--seed", "3")


def test_redteam_with_one_hack() -> None:
    found = json.loads(call("redteam", "--only", "C12", "--only", "T1", "--json"))
    assert found["summary"] == {"hacks": 2, "rejected_by_name": 2, "twins_accepted": 2}
    call("redteam", "--only", "Z9", code=codes.USAGE)
