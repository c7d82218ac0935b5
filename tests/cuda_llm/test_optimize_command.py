"""`gpu-accel optimize`: exit codes and JSON."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from cli import codes  # noqa: E402
from cli.main import app  # noqa: E402
from gpu_accel.cuda_llm import TASKS, Pool, Sandbox, harness, host, search  # noqa: E402
from gpu_accel.cuda_llm.fixtures import FIXTURES  # noqa: E402
from gpu_accel.errors import InvalidInputError  # noqa: E402


@pytest.fixture(autouse=True)
def one_sandbox(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of this file share one: starting a worker takes seconds."""

    @contextlib.contextmanager
    def shared(*given, **more):
        yield sandbox

    for module in (harness, host):
        monkeypatch.setattr(module, "Sandbox", shared)
    monkeypatch.setattr(search, "Pool", lambda *given, **more: Pool(own=(sandbox,)))


def call(*words: str, code: int = 0):
    done = CliRunner().invoke(app, ["optimize", *words])
    assert done.exit_code == code, (done.stdout, done.stderr)
    return done.stdout


def errors(*words: str) -> str:
    """What a command says that refuses, in one line."""
    done = CliRunner().invoke(app, ["optimize", *words])
    assert isinstance(done.exception, InvalidInputError) or done.exit_code == codes.USAGE, (words, done.output)
    return " ".join(f"{done.output} {done.exception}".split())


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
    assert "accepted" in call("check", str(file), "--seed", "3"), "the header names the task"


def test_redteam_with_one_hack() -> None:
    found = json.loads(call("redteam", "--only", "C12", "--only", "T1", "--json"))
    assert found["summary"] == {"hacks": 2, "rejected_by_name": 2, "twins_accepted": 2}
    call("redteam", "--only", "Z9", code=codes.USAGE)


def test_host_code_is_labelled(tmp_path: Path) -> None:
    file = tmp_path / "host.py"
    file.write_text("import torch\n\ndef run(x):\n    return x.flip(0)\n")
    found = json.loads(call("check", str(file), "--task", "reverse", "--host", "--json"))
    assert found["verdict"] == "accepted" and found["untrusted_host_code"] and "untrusted host code" in found["detail"]
    call("check", str(file), "--host", code=codes.USAGE)
    call("check", str(file), "--task", "reverse", "--problem", str(file), code=codes.USAGE)


def test_a_search_leaves_a_folder_that_can_be_reported(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    made = json.loads(
        call("run", "--task", "reverse", "--candidates", "1", "--strategy", "pattern", "--folder", str(kept), "--json")
    )
    assert made["candidates"] == 2 and not made["timed"]
    found = json.loads(call("report", str(kept), "--json"))
    assert found["searches"][0]["task"] == "reverse" and found["fast_p"] == {}
    call("report", str(kept), "--records", str(tmp_path / "r.jsonl"), code=codes.USAGE)  # nothing was timed
    call("report", str(tmp_path), "--p", "x", code=codes.USAGE)
    call("report", str(tmp_path / "none"), code=codes.USAGE)
    for wrong in ("nan", "-1", "1,inf"):
        call("report", str(kept), "--p", wrong, code=codes.USAGE)
    call("report", str(kept), "--trace", "/proc/x", code=codes.USAGE)
    call("bench", str(kept), code=codes.UNSUPPORTED)
    before = (kept / "attempts.jsonl").read_bytes()
    again = ("run", "--task", "reverse", "--candidates", "1", "--folder")
    assert "--resume" in errors(*again, str(kept))
    assert "is for 'h100-sxm', not for a100" in errors(*again, str(kept), "--resume", "--target", "a100")
    call(*again, str(kept), "--resume")
    (tmp_path / "all").mkdir()
    kept.rename(tmp_path / "all" / "reverse")
    assert "--resume" in errors(*again, str(tmp_path / "all"), "--task", "softmax")
    assert (tmp_path / "all" / "reverse" / "attempts.jsonl").read_bytes() == before, "nothing was mixed in"


def test_a_search_that_was_stopped_before_its_first_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be gone on with, and is no obstacle to a report of those beside it."""

    def stop(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    kept = ("--task", "reverse", "--candidates", "1", "--folder", str(tmp_path / "reverse"))
    with monkeypatch.context() as patch:
        patch.setattr("gpu_accel.cuda_llm.search._Search.judged", stop)
        done = CliRunner().invoke(app, ["optimize", "run", *kept])
    assert done.exit_code == codes.INTERRUPTED and "with --resume goes on from there" in " ".join(done.output.split())
    assert {one.name for one in (tmp_path / "reverse").iterdir()} == {"run.json", ".lock"}
    found = json.loads(call("report", str(tmp_path), "--json"))["searches"]
    assert [(one["task"], one["candidates"]) for one in found] == [("reverse", 0)]
    call("report", str(tmp_path))
    assert "--task reverse --folder" in errors("run", *kept, "--task", "relu", "--resume")
    call("run", *kept, "--resume")
    assert json.loads(call("report", str(tmp_path), "--json"))["searches"][0]["candidates"] == 2


def test_a_log_that_was_damaged_is_refused_with_its_line(tmp_path: Path) -> None:
    kept = tmp_path / "run"
    call("run", "--task", "reverse", "--candidates", "1", "--strategy", "pattern", "--folder", str(kept), "--json")
    log = kept / "attempts.jsonl"
    whole = log.read_text()
    first, second = whole.splitlines()
    file = json.loads(second)["file"]

    def edited(**what) -> bytes:
        return (json.dumps(json.loads(first) | what) + "\n" + second + "\n").encode()

    for damaged, line in (
        (b"\xff\xfe\x00", "line 1"), (b"\xff\xfe\x00\n" + whole.encode(), "line 1"), (b"", "no attempt"),
        (first[:40].encode(), "line 1"), (b"[" * 100000, "line 1"), (b"3\n" + whole.encode(), "line 1"),
        (second.encode(), "no attempt 0"), (edited(verdict="zzz"), "line 1"), (edited(verdict=[]), "line 1"),
        (edited(kind="zzz"), "line 1"), (edited(file="../../etc/passwd"), "line 1"), (edited(file=file), "line 1"),
        (edited(file="0000-0123456789abcdef.py"), "line 1"), (edited(tokens=3), "line 1"),
        (edited(number=True), "line 1"), (edited(time="1"), "line 1"), (edited(dollars=float("nan")), "line 1"),
    ):  # fmt: skip
        log.write_bytes(damaged)
        for words in (("report", str(kept)), ("bench", str(kept)),
                      ("run", "--task", "reverse", "--folder", str(kept), "--resume"),
                      ("run", "--task", "reverse", "--proposer", "replay", "--from", str(kept))):  # fmt: skip
            said = errors(*words)
            assert "attempts.jsonl" in said and line in said, (damaged[:60], words, said)
    log.write_text(whole)
    (kept / file).write_bytes(b"\xff\xfe")
    for words in (("--folder", str(kept), "--resume"), ("--proposer", "replay", "--from", str(kept))):
        assert "cannot be read" in errors("run", "--task", "reverse", *words)
    log.write_text(whole + second[:30])
    assert json.loads(call("report", str(kept), "--json"))["searches"][0]["candidates"] == 2, "a torn last line"
    run = json.loads((kept / "run.json").read_text())
    for final in (3, {"samples": 3}, {"samples": {"candidate": "x"}}, {"samples": {"candidate": [0.0]}},
                  {"warm": {"candidate": [None]}}, {"library_error": "x"}):  # fmt: skip
        (kept / "run.json").write_text(json.dumps(run | {"final": final}))
        assert "run.json: final" in errors("report", str(kept)), final


@pytest.mark.parametrize(
    "words",
    [
        ("--proposer", "oracle"), ("--proposer", "file"), ("--proposer", "openai-compatible"),
        ("--strategy", "annealing"), ("--against", "cublas"), ("--task", "softmax", "--depth", "2"),
        ("--resume", "--folder", "nowhere"), ("--resume",), ("--price", "abc"), ("--price", "-1,-1"),
        ("--price", "nan,0"), ("--folder", "/proc/zz"), ("--folder", "/proc/zz", "--task", "softmax"),
    ],
)  # fmt: skip
def test_runs_that_make_no_sense(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("run", "--task", "reverse", *words, code=codes.USAGE)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--model", "m"), "--model is not for --proposer grammar"),
        (("--price", "1,2"), "--price is not for"),
        (("--proposer", "file", "--from", ".", "--base-url", "http://x"), "--base-url is not for --proposer file"),
        (("--proposer", "anthropic", "--model", "m", "--from", "."), "--from is not for"),
        (("--proposer", "anthropic", "--model", "m", "--dollars", "5"), "give --price"),
        (("--task", "relu"), "one task twice"),
        (("--dollars", "0"), "dollars is 0.0; it must be a positive number"),
    ],
)
def test_options_that_would_do_nothing(words: tuple[str, ...], why: str) -> None:
    assert why in errors("run", "--task", "relu", *words)


@pytest.mark.parametrize(
    "given",
    [{"candidates": 1.5}, {"candidates": True}, {"batch": None}, {"batch": 0}, {"seconds": "9"}, {"depth": 2.0}],
)
def test_budgets_that_are_none(given: dict) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(given))):
        search.Budget(**given)
