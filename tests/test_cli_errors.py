"""What goes wrong ends with one line, a documented exit code and, with --json, an object on stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from cli import codes, console, ledger, output  # noqa: E402
from cli.main import app  # noqa: E402
from gpu_accel.testing.records import verdict  # noqa: E402
from gpu_accel.workbench.registry import papers  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TOML = """id = "odd"
title = "Odd"
ours = ["plain"]
inputs = ["normal", "outliers"]
[experiments.one]
title = "one"
default = true
"""
HEAD = """
from gpu_accel.workbench.experiment import Check, Implementation, SimpleExperiment, Workload
def cases(settings):
    return [{"n": 1}]
def build(case, settings):
    return Workload(implementations=[Implementation(name="plain", role="ours", check=check)])
def check(seed):
    return Check(0.0, 1.0, "max_abs")
"""
TAIL = 'EXPERIMENTS = {"one": SimpleExperiment(name="one", title="one", list_cases=cases, build_case=build)}\n'
BROKEN = {
    "syntax": "def (:\n",
    "no EXPERIMENTS": "x = 1\n",
    "EXPERIMENTS = None": "EXPERIMENTS = None\n",
    "raises on import": "raise RuntimeError('on import')\n",
    "exits with 0": "raise SystemExit(0)\n",
    "exits with 1": "import sys; sys.exit(1)\n",
    "cases": HEAD + "def cases(settings):\n    raise KeyError('cases')\n" + TAIL,
    "build": HEAD + "def build(case, settings):\n    return 1 / 0\n" + TAIL,
    "memory": HEAD + "def build(case, settings):\n    raise MemoryError\n" + TAIL,
}


def paper_at(folder: Path, code: str) -> Path:
    (folder / "papers" / "odd").mkdir(parents=True)
    (folder / "papers" / "odd" / "paper.toml").write_text(TOML)
    (folder / "papers" / "odd" / "experiment.py").write_text(code)
    return folder / "papers"


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_a_mistake_of_a_paper_is_exit_code_70(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, code)))
    arguments = ["run", "odd", "--device", "cpu", "--results", tmp_path / "results"]
    result = invoke(*arguments)
    assert result.exit_code == codes.INTERNAL, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in result.stderr and result.stdout == ""
    error = json.loads(invoke(*arguments, "--json").stdout)["error"]
    assert error["exit_code"] == codes.INTERNAL and error["type"] in errors[0]
    assert "Traceback" in invoke("--debug", *arguments).stderr
    monkeypatch.setenv("GPU_ACCEL_DEBUG", "1")
    assert "Traceback" in invoke(*arguments).stderr


def test_a_check_that_exits_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = HEAD + "def check(seed):\n    raise SystemExit(0)\n" + TAIL
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, code)))
    result = invoke("run", "odd", "--device", "cpu", "--results", tmp_path / "results")
    assert result.exit_code in (codes.INCORRECT, codes.INTERNAL), result.output


def test_what_a_paper_prints_is_no_result(tmp_path: Path) -> None:
    loud = "import os\nprint('on import')\nos.system('echo from a child')\n" + HEAD.replace(
        "def check(seed):\n", "def check(seed):\n    print('in check')\n"
    )
    environment = os.environ | {"GPU_ACCEL_PAPERS": str(paper_at(tmp_path, loud + TAIL)), "PYTHONPATH": str(ROOT)}
    for extra in (["--dry-run"], ["--results", str(tmp_path / "results")]):
        command = [sys.executable, "-m", "cli", "run", "odd", "--device", "cpu", "--json", *extra]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["paper"] == "odd"
        assert "on import" in done.stderr and "from a child" in done.stderr


@pytest.mark.parametrize("place", ["folder", "below a file", "name too long"])
def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from gpu_accel.workbench import runner

    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("it ran"))
    file = tmp_path / "out.json"
    match place:
        case "folder":
            file.mkdir()
        case "below a file":
            file.write_text("")
            file = file / "x.json"
        case _:
            file = tmp_path / ("x" * 300 + ".json")
    result = invoke("run", "fa3", "--device", "cpu", "-o", file)
    assert result.exit_code == codes.USAGE and "cannot write" in result.stderr, result.output


def test_a_check_of_an_output_changes_nothing(tmp_path: Path) -> None:
    output.check_suffix(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    output.check_suffix(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_results_need_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("run", "fa3", "--device", "cpu", "--results", tmp_path / "file")
    assert result.exit_code == codes.USAGE and "no folder" in result.stderr


@pytest.mark.parametrize("seconds", ["inf", "-inf", "1e400", "nan", "0", "-1"])
def test_seconds_are_finite_and_above_0(seconds: str) -> None:
    assert invoke("run", "fa3", "--device", "cpu", "--dry-run", f"--seconds={seconds}").exit_code == codes.USAGE


@pytest.mark.parametrize(
    ("arguments", "kind", "code"),
    [
        (["show", "fa9", "--json"], "InvalidInputError", 2),
        (["claims", "fa3", "--json", "--bogus"], "NoSuchOption", 2),
        (["--bogus", "list", "--json"], "NoSuchOption", 2),
        (["lists", "--json"], "UsageError", 2),
        (["run", "fa3", "--seed", "x", "--json"], "BadParameter", 2),
        (["compare", "HEAD", "HEAD", "--skip", "portable", "--paper", "nope", "--json"], "InvalidInputError", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_error_is_json_where_json_was_asked_for(arguments: list[str], kind: str, code: int) -> None:
    result = invoke(*arguments)
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"], result.exit_code) == (kind, code, code) and error["message"]


def test_nothing_to_compare_is_json_too(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    result = invoke("compare", tmp_path / "none.jsonl", tmp_path / "none.jsonl", "--json")
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "NothingRan" and "nothing to compare" in error["message"]


def test_a_gate_that_fails_prints_its_result_once() -> None:
    result = invoke("claims", "fa3", "--verdict", "not measured", "--gate", "--json")
    assert result.exit_code == codes.NOTHING_RAN and "claims" in json.loads(result.stdout)


def test_json_has_no_words_that_json_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"a": float("nan"), "b": [float("inf")], "c": {"d": -float("inf"), "e": 1.5}}
    output.print_json(row)
    clean = {"a": None, "b": [None], "c": {"d": None, "e": 1.5}}
    assert json.loads(capsys.readouterr().out) == clean
    for suffix in (".json", ".jsonl"):
        output.write(tmp_path / f"x{suffix}", [row], payload=row)
        assert json.loads((tmp_path / f"x{suffix}").read_text()) == clean


def test_both_gates_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, HEAD + TAIL)))
    arguments = ["run", "odd", "--device", "cpu", "--results", tmp_path / "results"]
    assert invoke(*arguments).exit_code == codes.OK
    result = invoke(*arguments, "--gate")
    assert result.exit_code == codes.NOTHING_RAN and "no claim was settled" in result.stderr
    for word, code in (("not reproduced", codes.GATE), ("reproduced", codes.OK)):
        monkeypatch.setattr(ledger, "settled_by", lambda *a, word=word: [verdict(word)])
        assert invoke(*arguments, "--gate").exit_code == code


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--sustained"], 0, "--sustained without effect"),
        (["--warm-l2"], 0, "--warm-l2 without effect"),
        (["--sustained", "--warm-l2"], 0, "--sustained and --warm-l2 without effect"),
        (["--quick", "--shape", "1x16x1x32"], 0, "--quick without effect"),
        (["--shape", "1x16x1x32"], 0, "--shape without effect: one has sizes of its own"),
        (["--tag", "x"], 0, "--tag without effect"),
        (["--input", "outliers"], 0, "--input outliers without effect: one takes normal"),
        (["--gate"], 2, "--gate would do nothing"),
        (["--resume"], 2, "--resume would do nothing"),
        (["--precision", "fp16"], 2, "no choice of precision"),
        (["--save", "--results", "x"], 0, "--save and --results without effect"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_no_argument_is_ignored_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, words: str
) -> None:
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, HEAD + TAIL)))
    result = invoke("run", "odd", "--device", "cpu", "--dry-run", *options)
    assert result.exit_code == code and words in result.stderr, result.output


def test_sizes_that_an_experiment_does_not_know_are_named() -> None:
    shape = ["--shape", "batch=1,seqlen=64,heads=3,head_dim=64,causal=true"]
    result = invoke("run", "fa3", "quantize", "--device", "cpu", "--dry-run", *shape)
    assert result.exit_code == 0 and "causal of --shape without effect: quantize has no such size" in result.stderr
    assert "without effect" not in invoke("run", "fa3", "forward", "--device", "cpu", "--dry-run", *shape).stderr


def test_a_precision_that_one_experiment_forces_on_another_is_told() -> None:
    run = ["run", "fa3", "decode", "fp8-error", "--shape", "1x16x1x32", "--device", "cpu", "--dry-run"]
    told = "decode in fp8, which all experiments named here have; by itself it takes bf16"
    assert told in invoke(*run).stderr
    for asked in ([*run, "--precision", "fp8"], [one for one in run if one != "fp8-error"]):
        assert "by itself" not in invoke(*asked).stderr


def test_a_precision_among_experiments_is_named_as_one() -> None:
    result = invoke("run", "fa3", "fp8", "quantize", "--device", "cpu", "--dry-run")
    assert result.exit_code == 2 and "fp8 is a precision" in result.stderr


def test_a_run_says_that_its_input_is_not_the_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, HEAD + TAIL)))
    arguments = ["run", "odd", "--device", "cpu", "--results", tmp_path / "results"]
    assert "--input outliers without effect: one takes normal" in invoke(*arguments, "--input", "outliers").stderr
    assert "--input" not in invoke(*arguments).stderr


@pytest.mark.parametrize(
    ("experiment", "asked", "takes"),
    [
        ("train", "outliers", "normal"),
        ("train", "python", ""),
        ("layer", "smollm2", "normal"),
        ("error", "python", "normal, outliers, smollm2"),
        ("error", "normal", "normal, outliers, smollm2"),
        ("error", "outliers", ""),
        ("perplexity", "normal", "smollm2"),
    ],
)
def test_experiments_with_inputs_of_their_own_say_so(experiment: str, asked: str, takes: str) -> None:
    result = invoke("run", "te", experiment, "--input", asked, "--precision", "fp8", "--device", "cpu", "--dry-run")
    noted = f"--input {asked} without effect: {experiment} takes {takes}\n" in result.stderr
    assert noted == bool(takes) and ("--input" in result.stderr) == noted, result.output


def test_save_and_results_exclude_each_other(tmp_path: Path) -> None:
    result = invoke("run", "fa3", "--device", "cpu", "--save", "--results", tmp_path)
    assert result.exit_code == codes.USAGE and "choose one" in result.stderr


def test_list_and_show_count_claims_as_claims_does() -> None:
    for paper, row in zip(papers(), json.loads(invoke("list", "--json").stdout), strict=True):
        judged = json.loads(invoke("claims", paper.id, "--json").stdout)
        assert row["claims"] == sum(judged["counts"].values()) == sum(row["claims_by_kind"].values())
        assert row["against_itself"] == sum(claim["internal"] for claim in judged["claims"])
        text = invoke("show", paper.id).stdout
        assert f"claims    {row['claims']} (" in text
        assert text.splitlines()[2].count(str(paper.year)) == 1


def _full(*arguments: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is shown all the same, and the exit code says that it was not kept."""
    from gpu_accel.workbench import runner

    monkeypatch.setattr(runner, "append_records", _full)
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, HEAD + TAIL)))
    arguments = ["run", "odd", "--device", "cpu", "--results", tmp_path / "results"]
    result = invoke(*arguments)
    assert result.exit_code == codes.INTERNAL and "1 case: 1 result correct" in result.stdout, result.output
    assert "could not be written" in result.stderr and "No space left" in result.stderr
    payload = json.loads(invoke(*arguments, "--json").stdout)
    assert payload["unwritten"] == "No space left on device" and len(payload["records"]) == 1


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "list.json"
    file.write_text("kept")
    monkeypatch.setattr(os, "replace", _full)
    result = invoke("list", "-o", file)
    assert result.exit_code == codes.INTERNAL and f"cannot write {file}: No space left" in result.stderr
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]


def test_a_file_is_replaced_with_its_permissions_and_through_links(tmp_path: Path) -> None:
    file, link = tmp_path / "list.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    assert invoke("list", "-o", link).exit_code == 0
    assert link.is_symlink() and json.loads(file.read_text()) and file.stat().st_mode & 0o777 == 0o640


def test_streams_that_are_closed_are_nobody_s(tmp_path: Path) -> None:
    """As a service may start it; the file that is written would have had the number of stdout."""
    file = tmp_path / "papers.json"
    line = f"exec {sys.executable} -m cli list -o {file} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", line], cwd=ROOT, timeout=100).returncode == 0
    assert len(json.loads(file.read_text())) == len(papers())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["claims", "ring", "--json"]], ids=" ".join)
def test_a_full_stdout_is_said(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cli", *arguments], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=120,
        )  # fmt: skip
    assert done.returncode == codes.INTERNAL and done.stderr.startswith("error: cannot write"), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_path_that_is_no_text_is_still_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(paper_at(tmp_path, HEAD + TAIL)))
    folder = tmp_path / os.fsdecode(b"a\xff")
    done = subprocess.run(
        [sys.executable, "-m", "cli", "run", "odd", "--device", "cpu", "--results", folder, "--json"],
        cwd=ROOT, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert os.fsdecode(b"\xff") in json.loads(done.stdout.decode())["output"]


@pytest.mark.parametrize("text", ["1" * 5000, "0x" + "f" * 5000, "[" * 5000], ids=["digits", "hexadecimal", "nested"])
def test_a_paper_of_endless_numbers_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    folder = paper_at(tmp_path, HEAD + TAIL)
    file = folder / "odd" / "paper.toml"
    file.write_text(TOML.replace("title = ", f"year = {text}\ntitle = ", 1).replace('"Odd"', "0x" + "f" * 5000, 1))
    monkeypatch.setenv("GPU_ACCEL_PAPERS", str(folder))
    result = invoke("show", "odd")
    assert result.exit_code == codes.USAGE and str(file) in result.stderr and len(result.stderr) < 1000, result.output


@pytest.mark.parametrize(
    ("words", "own"), [("ring error", ""), ("ring error predict", "predict"), ("te grouped", "grouped")]
)
def test_shapes_that_an_experiment_does_not_take_are_said(words: str, own: str) -> None:
    options = ("--shape", "1x64x2x64", "--shape", "seqlen=96,heads=2", "--device", "cpu", "--dry-run")
    said = invoke("run", *words.split(), *options).stderr
    assert (f"--shape without effect: {own} has sizes of its own" in said) == bool(own) == ("--shape" in said)


@pytest.mark.parametrize(
    ("words", "shape", "said"),
    [
        ("tk gemm", "q=4", "unknown name 'q', known are m, n, k, layout. Examples: 4096x4096x128  or  m=4096,n=4096,"),
        ("tk gemm", "4x2048x16x128", "4 sizes where 3 are needed (m x n x k)"),
        ("tk gemm", "layout=nx", "layout is 'nx'; choose one of nt, nn"),
        ("tk norms", "op=softmx", "op is 'softmx'; choose one of rms_norm, "),
        ("tk longconv", "gated=1", "gated is '1'; choose one of false, true"),
        ("tk gemm norms", "m=4,rows=4", "no experiment here has all of that: gemm takes m, n, k, layout; norms takes"),
        ("tk gemm longconv", "4x4x256", "give names, for these sizes fit several experiments"),
        ("fa3 forward", "m=4", "unknown name 'm', known are batch, seqlen, heads, head_dim, seqlen_q, seqlen_k"),
    ],
)
def test_a_wrong_shape_is_told_in_the_names_of_the_experiments(words: str, shape: str, said: str) -> None:
    result = invoke("run", *words.split(), "--shape", shape, "--device", "cpu", "--dry-run")
    assert result.exit_code == codes.USAGE and said in result.stderr, result.output


def test_a_shape_is_for_the_experiments_that_have_its_names() -> None:
    shapes = ("--shape", "m=9,n=8,k=7", "--shape", "batch=1,channels=2,length=256")
    result = invoke("run", "tk", "gemm", "longconv", "ladder", *shapes, "--device", "cpu", "--dry-run", "--json")
    cases = {name: [] for name in ("gemm", "longconv", "ladder")}
    for item in json.loads(result.stdout)["items"]:
        cases[item["experiment"]].append(item["case"])
    assert [(case["m"], case["n"], case["k"], case["layout"]) for case in cases["gemm"]] == [(9, 8, 7, "nt")]
    assert [(case["channels"], case["length"]) for case in cases["longconv"]] == [(2, 256)]
    assert "--shape without effect: ladder has sizes of its own" in result.stderr and "gemm" not in result.stderr


@pytest.mark.parametrize("shape", ["tk gemm 8kx8kx8k", "tk norms op=softmax,rows=64k,width=16k"])
def test_shapes_for_a_gpu_are_not_begun_in_the_interpreter(shape: str, tmp_path: Path) -> None:
    *words, sizes = shape.split()
    if "on the CPU" not in invoke("run", *words, "--dry-run").output:
        pytest.skip("there is a GPU")
    result = invoke("run", *words, "--shape", sizes, "--results", tmp_path)
    assert result.exit_code == codes.UNSUPPORTED and "in Triton's interpreter; try smaller shapes" in result.stderr


def test_a_shape_of_ones_own_is_checked(tmp_path: Path) -> None:
    arguments = ["tk", "gemm", "--shape", "5x3x9", "--only", "portable", "--device", "cpu", "--results", tmp_path]
    result = invoke("run", *arguments, "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)["records"]
    assert record["case"] | {"m": 5, "n": 3, "k": 9, "layout": "nt"} == record["case"]


def test_a_file_of_somebody_else_is_told_of_in_one_line_and_does_not_steer_the_terminal(tmp_path: Path) -> None:
    """An interrupted run's last line, bytes that are no text, and words with control characters."""
    file = tmp_path / "some.jsonl"

    def said(content: bytes) -> tuple[int, list[str]]:
        file.write_bytes(content)
        command = [sys.executable, "-m", "cli", "claims", "ring", "--brief", "--results", file]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr.splitlines()

    code, lines = said(b'{"schema": 1, "ki')
    assert code == 0 and lines[0] == f"warning: {file}:1: an interrupted run left an unfinished line; skipped"
    code, lines = said(b"\xff\xfe\n\x00")
    assert code == codes.USAGE and len(lines) == 1 and "not UTF-8" in lines[0]
    code, lines = said(json.dumps({"schema": 1, "kind": "\x1b[2J"}).encode() + b"\n")
    assert code == codes.USAGE and "\x1b" not in "".join(lines)
    assert console.visible("a\x1b[31m\x9b\tb\n") == "a\\x1b[31m\\x9b\tb\n" and console.plain("\x07[x]") == "\\x07\\[x]"
