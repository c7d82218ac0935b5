"""The command line: exit codes, JSON, files, speed of starting, and what each command says."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from cli import codes, output  # noqa: E402
from cli.main import app, exit_code  # noqa: E402
from cli.notebook import defaults, parse, run_headless  # noqa: E402
from gpu_accel import errors  # noqa: E402
from gpu_accel.testing.records import timed  # noqa: E402
from gpu_accel.workbench.records import Record, append_records  # noqa: E402
from gpu_accel.workbench.registry import papers  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("list", "show", "run", "claims", "compare", "report", "doctor", "hardware", "notebook")


def call(*arguments: str, code: int = codes.OK) -> str:
    """Run a command in this process and return what it wrote to stdout."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, f"{arguments}: exit code {result.exit_code}\n{result.output}\n{result.exception}"
    return result.stdout


def complain(*arguments: str, code: int) -> str:
    """Run a command that fails, and return what it wrote to stderr; stdout must stay empty."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, f"{arguments}: exit code {result.exit_code}\n{result.output}\n{result.exception}"
    assert result.stdout == ""
    return result.stderr


def shell(*arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cli` as a process of its own in the checkout."""
    command = [sys.executable, "-m", "cli", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


# -- starting


def test_help_lists_every_command_and_its_exit_codes() -> None:
    text = shell("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)
    assert "130 interrupted" in text


def processor_time(run: Callable[[], object]) -> float:
    """Seconds of children that `run` waits for."""
    before = os.times()
    run()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_is_fast() -> None:
    """Below half a second of processor time, which other tests lengthen less than they do the clock on the wall.

    Still they do, on processors that share a core: so the best of some tries counts, and the first good one is enough.
    On a machine where typer and rich alone take over a quarter of a second, twice that (it is 1.6 times): numpy alone
    takes as long as they do, torch ten times.
    """
    library = [sys.executable, "-c", "import typer, typer.rich_utils, rich.console, rich.table, rich.panel"]
    times: list[float] = []
    alone: list[float] = []
    while len(times) < 8 and not (times and min(times) < max(0.5, 2 * min(alone))):
        times.append(processor_time(lambda: shell("--help")))
        alone.append(processor_time(lambda: subprocess.run(library, check=True, timeout=60)))
    assert min(times) < max(0.5, 2 * min(alone)), (times, alone)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list"], ["show", "fa3"], ["claims", "fa3"], ["hardware", "list"]], ids=" ".join
)
def test_reading_imports_neither_torch_nor_triton(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom cli.main import app\n"
        f"try: app({arguments!r})\nexcept SystemExit as stop: assert not stop.code, stop.code\n"
        "print(sorted({'torch', 'triton', 'numpy', 'plotly'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_version_is_that_of_the_library() -> None:
    import gpu_accel

    assert call("--version") == f"gpu-accel {gpu_accel.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "expected", "other"),
    [
        ("gpu-accel show f", "fa3", "tk"),
        ("gpu-accel run fa3 fo", "forward", "backward"),
        ("gpu-accel run fa3 --precision f", "fp8", "bf16"),
        ("gpu-accel run fa3 --input ", "smollm2", "python"),  # which is an input of te
        ("gpu-accel hardware show h100-s", "h100-sxm", "h200-sxm"),
        ("gpu-accel claims fa3 --verdict not", "not reproduced", "within"),
        ("gpu-accel run fa3 --only ", "hopper", "kv_ring"),
    ],
)
def test_completion(typed: str, expected: str, other: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from cli.main import main; main()"],
        cwd=ROOT,
        env={**os.environ, "_GPU_ACCEL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert expected in done.stdout, done.stderr[-2000:]
    assert other not in done.stdout
    assert "| torch\n" not in done.stderr


# -- exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInputError("x"), 2),
        (errors.IncorrectResultError("x"), 3),
        (errors.UnsupportedError("x"), 4),
        (errors.HardwareError("x"), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code(error: errors.GpuAccelError, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "fa9"], ["no paper is named 'fa9'", "fa3"]),
        (["run", "fa3", "forwards", "--dry-run", "--device", "cpu"], ["forwards", "forward"]),
        (["run", "fa3", "--precision", "fp7", "--dry-run", "--device", "cpu"], ["fp7"]),
        (["run", "fa3", "backward", "--precision", "fp8", "--dry-run", "--device", "cpu"], ["fp8", "bf16"]),
        (["run", "fa3", "--input", "lognormal", "--dry-run", "--device", "cpu"], ["lognormal", "outliers"]),
        (["run", "fa3", "--shape", "2x3", "--dry-run", "--device", "cpu"], ["2x3", "4x2048x16x128"]),
        (["run", "fa3", "--only", "fa4", "--dry-run", "--device", "cpu"], ["fa4", "portable"]),
        (["run", "fa3", "--only", "hoper", "--device", "cpu"], ["hoper", "Did you mean hopper?"]),
        (["run", "fa3", "--skip", "portabel", "--device", "cpu"], ["portabel", "Did you mean portable?"]),
        (["run", "fa3", "--precision", "fp9", "--device", "cpu"], ["fp9", "Did you mean"]),
        (["run", "fa3", "--input", "outlier", "--device", "cpu"], ["outlier", "Did you mean outliers?"]),
        (["run", "fa3", "forwrd", "--device", "cpu"], ["forwrd", "Did you mean forward?"]),
        (["run", "fa3", "--seconds", "0", "--dry-run"], ["seconds"]),
        (["run", "fa3", "--device", "tpu"], ["tpu", "cuda"]),
        (["run", "fa3", "--tag", "../x"], ["../x"]),
        (["run", "fa3", "-o", "out.xlsx"], [".xlsx", ".csv"]),
        (["list", "-o", "no/such/folder/list.json"], ["no/such/folder"]),
        (["claims", "fa3", "--verdict", "maybe"], ["maybe", "reproduced"]),
        (["claims", "fa3", "--results", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["compare", "nowhere.jsonl", "HEAD"], ["nowhere.jsonl", "git revision"]),
        (["compare", "HEAD", "HEAD", "--fail-on", "worse"], ["worse", "slower, ambiguous, faster"]),
        (["compare", "HEAD", "HEAD", "--fail-on", "same"], ["same", "slower, ambiguous, faster"]),
        (["report", "fa3", "-o", "report.pdf"], ["report.pdf", ".html"]),
        (["hardware", "show", "h100-smx"], ["h100-smx", "h100-sxm"]),
        (["notebook", "fa3", "--execute", "-p", "presicion=fp8"], ["presicion", "precision"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors_say_what_is_allowed(arguments: list[str], words: list[str]) -> None:
    text = complain(*arguments, code=codes.USAGE)
    assert all(word in text for word in words), text
    assert "Traceback" not in text
    assert text.startswith("error: "), "nothing says that a run has begun"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_exit_code_4() -> None:
    text = shell("run", "fa3", "--device", "cuda", code=4, TRITON_INTERPRET="").stderr
    assert "no GPU" in text and "cpu" in text and "doctor" in text
    assert "error" in complain("hardware", "detect", code=4)


def test_a_missing_torch_is_exit_code_4() -> None:
    code = "import sys; sys.modules['torch'] = None; from cli.main import app; app(['run', 'fa3', '--device', 'cpu'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == codes.UNSUPPORTED and "torch is not installed" in done.stderr, done.stderr


def test_a_missing_typer_is_exit_code_4_and_says_what_to_install() -> None:
    blocked = (
        "import sys, importlib.util as util, runpy\n"
        "known = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'typer' else known(name, package)\n"
        "runpy.run_module('cli', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == codes.UNSUPPORTED and "pip install typer" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_an_interrupt_while_the_application_is_imported_is_one_like_any_other() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from cli.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (codes.INTERRUPTED, "")


def test_a_missing_rich_is_exit_code_4() -> None:
    code = "import sys; sys.modules['rich'] = None; from cli.main import app; app(['list'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == codes.UNSUPPORTED and "rich is not installed" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["claims", "fa3"], ["claims", "fa3", "--json"], ["report", "fa3"]], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    """As in `gpu-accel claims fa3 | head -2`, here with a reader that has left before the first line."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (codes.BROKEN_PIPE, "")


def test_what_would_take_hours_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_accel.workbench import runner

    big = ["run", "fa3", "forward", "--shape", "4x2048x16x128", "--only", "portable", "--only", "sdpa-cudnn"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran = []
    monkeypatch.setattr(runner, "run", lambda *a, **k: ran.append(a) or runner.RunResult())
    text = complain(*big, code=codes.UNSUPPORTED)
    assert re.search(r"about \d+ hours in Triton's interpreter; try --shape 1x128x2x64", text) and not ran
    complain(*big, "--device", "cpu", code=codes.NOTHING_RAN)
    complain("run", "fa3", "forward", "--shape", "1x128x2x64", code=codes.NOTHING_RAN)
    complain(*big[:5], "--only", "sdpa-math", code=codes.NOTHING_RAN)  # torch's own kernels are not interpreted
    assert len(ran) == 3


def test_what_cannot_run_here_is_said_once_with_its_reason() -> None:
    lines = complain("run", "fa3", "--only", "hopper", "--device", "cpu", code=codes.UNSUPPORTED).splitlines()
    assert len(lines) == 1 and lines[0].startswith("not supported here: hopper") and "compute capability" in lines[0]


def test_an_interruption_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpu_accel.workbench.registry.papers", interrupt)
    assert "interrupted" in complain("list", code=130)


# -- json and files


def test_list_is_json_of_every_paper() -> None:
    rows = json.loads(call("list", "--json"))
    assert [row["id"] for row in rows] == [paper.id for paper in papers()]
    for row in rows:
        assert row["experiments"] and row["commands"], row["id"]


def test_claims_are_json_with_a_verdict_each() -> None:
    made = json.loads(call("claims", "fa3", "--json"))
    assert made["claims"] and sum(made["counts"].values()) == sum(not claim["internal"] for claim in made["claims"])
    assert len({claim["id"] for claim in made["claims"]}) == len(made["claims"])
    assert all(claim["verdict"] and claim["source"] for claim in made["claims"])


def test_claims_can_be_filtered() -> None:
    everything = json.loads(call("claims", "fa3", "--json"))["claims"]
    unsupported = json.loads(call("claims", "fa3", "--verdict", "unsupported", "--json"))["claims"]
    assert [claim["id"] for claim in unsupported] == [
        claim["id"] for claim in everything if claim["verdict"].startswith("unsupported")
    ]
    first = everything[0]
    assert json.loads(call("claims", "fa3", "--id", first["id"], "--json"))["claims"] == [first]
    places = {claim["where"] for claim in json.loads(call("claims", "fa3", "--where", "FIGURE", "--json"))["claims"]}
    assert places and all("figure" in place.lower() for place in places)


def test_a_precision_alone_is_the_experiments_that_suit_it() -> None:
    plan = ("--device", "cpu", "--dry-run", "--json")
    made = call("run", "fa3", "fp8", *plan)
    assert made == call("run", "fa3", "--precision", "fp8", *plan)
    assert {item["experiment"] for item in json.loads(made)["items"]} == {"forward", "fp8-error"}


def test_a_plan_is_json_and_runs_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results"
    made = json.loads(call("run", "fa3", "--device", "cpu", "--dry-run", "--json", "--results", results))
    assert made["device"] == "cpu" and made["seconds"] == 0
    assert made["items"] and all(item["case"] for item in made["items"])
    assert not results.exists()


def test_a_run_on_the_cpu_is_checked_and_never_timed(tmp_path: Path) -> None:
    arguments = ["run", "fa3", "forward", "--device", "cpu", "--shape", "1x33x2x32", "--only", "portable"]
    made = json.loads(call(*arguments, "--json", "--results", tmp_path, "-o", tmp_path / "rows.csv"))
    assert made["status"] == "ok" and made["records"]
    assert {record["kind"] for record in made["records"]} == {"checked"}
    assert {record["case"]["seqlen_q"] for record in made["records"]} == {33}
    assert not {"time", "tflops"} & {record["metric"] for record in made["records"]}
    kept = [Record.from_json(line) for line in Path(made["output"]).read_text().splitlines()]
    assert [json.loads(record.to_json()) for record in kept] == made["records"]
    assert (tmp_path / "rows.csv").read_text().count("portable") == len(made["records"])
    text = call(*arguments, "--results", tmp_path)
    assert "not timed" in text and "TFLOP/s" not in text


def test_a_log_tells_of_a_case_when_it_begins(tmp_path: Path) -> None:
    arguments = ["run", "fa3", "forward", "--device", "cpu", "--shape", "1x16x1x32", "--only", "portable"]
    lines = shell(*arguments, "--results", str(tmp_path)).stderr.splitlines()
    assert lines[0].startswith("fa3 bf16, on the CPU")
    assert lines[1].startswith("[1/2] forward") and lines[1].endswith(" ...")
    assert lines[2].startswith("[1/2] forward") and lines[2].endswith(": portable")


@pytest.mark.parametrize("arguments", [["list"], ["claims", "fa3"], ["hardware", "list"]], ids=" ".join)
def test_piped_tables_are_not_padded(arguments: list[str]) -> None:
    text = shell(*arguments).stdout
    assert len(text.splitlines()) > 3
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_counts_of_some_claims_say_that_they_are_of_some() -> None:
    """Also those of the paper against itself, which a filter cuts too."""
    everything = json.loads(call("claims", "fa3", "--json"))["claims"]
    some = json.loads(call("claims", "fa3", "--verdict", "not reproduced", "--json"))["claims"]
    told = " ".join(call("claims", "fa3", "--verdict", "not reproduced", "--brief").split())
    assert told.startswith(f"fa3, committed results, only the {len(some)} of {len(everything)} that fit: ")
    assert "that fit" not in call("claims", "fa3", "--brief")


def test_claims_that_nothing_fits_are_no_success() -> None:
    assert "none of" in complain("claims", "fa3", "--id", "nope*", code=codes.NOTHING_RAN)
    assert "none of" in complain("claims", "fa3", "--where", "page 99", code=codes.NOTHING_RAN)


@pytest.mark.parametrize("suffix", [".csv", ".md", ".html"])
def test_tables_of_claims_count_their_records(tmp_path: Path, suffix: str) -> None:
    call("claims", "fa3", "-o", tmp_path / f"claims{suffix}")
    text = (tmp_path / f"claims{suffix}").read_text()
    assert "records" in text and max(map(len, text.splitlines())) < 4000
    call("claims", "fa3", "-o", tmp_path / "claims.json")
    judged = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert all(isinstance(claim["records"], list) for claim in judged)


def test_the_two_counts_of_make_fa3_say_what_they_count() -> None:
    assert call("claims", "fa3", "--brief").startswith("fa3, committed results: ")


@pytest.mark.parametrize("suffix", output.SUFFIXES)
def test_rows_are_written_by_suffix(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"papers{suffix}"
    stdout = call("list", "--json", "-o", file)
    assert json.loads(stdout)
    text = file.read_text()
    assert "flash_attention3" in text
    match suffix:
        case ".json":
            assert json.loads(text) == json.loads(stdout)
        case ".jsonl":
            assert [json.loads(line) for line in text.splitlines()] == json.loads(stdout)
        case ".csv":
            assert text.startswith("id,")
        case ".html":
            assert text.startswith("<!doctype html>") and "</table>" in text


def test_cells_cannot_break_a_table(tmp_path: Path) -> None:
    rows = [{"a": "x|y\nz", "b": {"c": [1, 2], "d": '<b>,"'}}]
    output.write(tmp_path / "t.md", rows)
    assert (tmp_path / "t.md").read_text().splitlines()[-1] == '| x\\|y z | 1 2 | <b>," |'
    output.write(tmp_path / "t.html", rows)
    assert "&lt;b&gt;" in (tmp_path / "t.html").read_text()
    output.write(tmp_path / "t.csv", rows)
    assert "a,b.c,b.d" in (tmp_path / "t.csv").read_text()


# -- compare


def _pair(tmp_path: Path, factor: float, **changes) -> tuple[Path, Path]:
    """Two result files; in the second everything takes `factor` times as long, with little noise."""
    import dataclasses

    one = timed(**changes)
    samples = [
        tuple(scale * ms * (1 + 0.0005 * i) for i in range(20)) for scale, ms in ((1, one.median), (factor, one.median))
    ]
    files = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for file, times in zip(files, samples, strict=True):
        middle = statistics.median(times)
        record = dataclasses.replace(one, samples=times, median=middle, p20=times[3], p80=times[16])
        append_records(file, [record])
    return files


@pytest.mark.parametrize(("factor", "word"), [(1.0, "same"), (1.5, "slower"), (0.5, "faster")])
def test_compare_names_what_changed(tmp_path: Path, factor: float, word: str) -> None:
    a, b = _pair(tmp_path, factor)
    made = json.loads(call("compare", a, b, "--json"))
    assert made["counts"][word] == 1 and len(made["rows"]) == 1
    assert made["rows"][0]["ratio"] == pytest.approx(1 / factor, rel=1e-6)


def test_compare_fails_only_where_asked(tmp_path: Path) -> None:
    a, b = _pair(tmp_path, 1.5)
    call("compare", a, b)
    assert "1 slower" in CliRunner().invoke(app, ["compare", str(a), str(b), "--fail-on", "slower"]).stderr
    call("compare", a, b, "--fail-on", "slower", code=codes.GATE)
    call("compare", b, a, "--fail-on", "slower")


def test_compare_of_one_measurement_with_itself_is_the_same(tmp_path: Path) -> None:
    import dataclasses

    noisy = tuple(1.0 + 0.2 * (i % 5) for i in range(20))
    file = tmp_path / "noisy.jsonl"
    append_records(file, [dataclasses.replace(timed(), samples=noisy, median=1.4, p20=1.0, p80=1.8)])
    made = json.loads(call("compare", file, file, "--json", "--fail-on", "ambiguous"))
    assert made["counts"]["same"] == 1 == len(made["rows"])


def test_compare_says_which_side_has_no_times(tmp_path: Path) -> None:
    import dataclasses

    a, _ = _pair(tmp_path, 1.0)
    record = dataclasses.replace(
        timed(), kind="checked", metric="correct", unit="1", median=None, p20=None, p80=None, samples=(), work={},
        ratio_to={}, timing={}, env={},
    )  # fmt: skip
    append_records(tmp_path / "cpu.jsonl", [record])
    text = complain("compare", a, tmp_path / "cpu.jsonl", code=codes.NOTHING_RAN)
    assert "a.jsonl: 1 timed records" in text and "cpu.jsonl: 1 checked, 0 timed (CPU)" in text


def test_compare_of_nothing_is_not_a_success(tmp_path: Path) -> None:
    a, _ = _pair(tmp_path, 1.0)
    call("compare", a, a, "--skip", "portable", code=codes.NOTHING_RAN)


def test_compare_reads_committed_results_of_a_revision() -> None:
    git = shutil.which("git")
    if not git or subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    names = subprocess.run(
        [git, "ls-tree", "-r", "--name-only", "HEAD", "papers"], cwd=ROOT, capture_output=True, text=True
    )
    if ".jsonl" not in names.stdout:
        pytest.skip("no results are committed")
    made = json.loads(call("compare", "HEAD", "HEAD", "--json"))
    assert made["rows"] and not made["counts"]["slower"] and not made["counts"]["faster"]


# -- report, doctor, hardware, notebook


def test_report_is_markdown_or_html(tmp_path: Path) -> None:
    assert call("report", "fa3").startswith("# ")
    call("report", "fa3", "-o", tmp_path / "fa3.html")
    assert (tmp_path / "fa3.html").read_text().startswith("<!doctype html>")


def test_doctor_finds_this_python_and_every_paper() -> None:
    rows = json.loads(call("doctor", "--json"))
    assert {row["level"] for row in rows} <= {"ok", "warn", "fail"}
    assert any(row["what"].startswith("Python") for row in rows)
    assert any("paper flash_attention3" in row["what"] for row in rows)
    line = call("doctor", "--line").strip()
    assert "\n" not in line and line.startswith("gpu-accel ") and "| Python" in line
    assert all(row["remedy"] for row in rows if row["level"] != "ok")


def test_hardware_profiles_are_listed_with_their_sources() -> None:
    names = [row["name"] for row in json.loads(call("hardware", "list", "--json"))]
    assert "h100-sxm" in names
    shown = json.loads(call("hardware", "show", "h100", "--json"))
    assert shown["name"] == "h100-sxm"
    assert {quantity["source"] for quantity in shown["peaks"].values()} <= set(shown["sources"])


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("from gpu_accel.errors import InvalidInputError as E; raise E('precision is fp9')", codes.USAGE),
        ("from gpu_accel.errors import IncorrectResultError as E; raise E('o differs')", codes.INCORRECT),
        ("assert 1 == 2", codes.INCORRECT),
        ("from gpu_accel.errors import HardwareError as E; raise E('no GPU')", codes.UNSUPPORTED),
        ("import some_module_that_is_missing", codes.UNSUPPORTED),
        ("import time; time.sleep(60)", codes.UNSUPPORTED),
    ],
)
def test_a_failing_cell_has_the_exit_code_of_its_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], statement: str, code: int
) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(statement)])
    with pytest.raises(errors.GpuAccelError) as caught:
        run_headless(book, folder=tmp_path, timeout=5 if "sleep" in statement else 60, target=tmp_path / "x.ipynb")
    assert exit_code(caught.value) == code and (tmp_path / "x.ipynb").is_file()
    assert "WARNING" not in capfd.readouterr().err


def test_parameters_take_the_types_of_the_notebook() -> None:
    known = {"precision": "bf16", "seqlen": 512, "scale": 1.0, "causal": True, "computed": None}
    given = ["precision=fp8", "seqlen=1024", "scale=2", "causal=False", "computed=[1, 2]"]
    assert parse(given, known) == {
        "precision": "fp8",
        "seqlen": 1024,
        "scale": 2.0,
        "causal": False,
        "computed": [1, 2],
    }
    for wrong in ("seqlen=long", "causal=1", "precison=fp8", "precision"):
        with pytest.raises(errors.InvalidInputError):
            parse([wrong], known)


def test_parameters_are_those_of_the_tagged_cell() -> None:
    nbformat = pytest.importorskip("nbformat")
    cell = nbformat.v4.new_code_cell("a = 1\nb: str = 'x'\nc = len('abc')", metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("z = 9"), cell])
    assert defaults(book, Path("x.ipynb")) == {"a": 1, "b": "x", "c": None}
