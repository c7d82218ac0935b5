"""What the command line prints: labels of cases, times, tables, and widths of terminals."""

from __future__ import annotations

import json
import os

import pytest

pytest.importorskip("typer")

from cli import codes, render  # noqa: E402
from gpu_accel.testing.records import timed  # noqa: E402
from gpu_accel.workbench.records import Record  # noqa: E402
from gpu_accel.workbench.registry import papers  # noqa: E402

from .test_cli import call, complain, shell  # noqa: E402

SELF = {"batch": 2, "seqlen_q": 64, "seqlen_k": 64, "heads": 4, "heads_kv": 4, "head_dim": 64, "causal": True}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (SELF, "B2 S64 H4 D64 causal"),
        (SELF | {"seqlen_q": 1, "heads_kv": 2, "causal": False}, "B2 Sq1 Sk64 H4 Hkv2 D64 not causal"),
        ({"n": 257, "dtype": "fp32"}, "n=257 fp32"),
    ],
)
def test_cases_have_short_labels(case: dict, text: str) -> None:
    assert render.label(case) == text


def test_what_all_cases_share_is_said_once() -> None:
    cases = [{"n": n, "dtype": "fp8", "input": "normal"} for n in (1, 2)]
    assert render.split_cases(cases) == ("fp8 normal", ["n=1", "n=2"])


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345, "12.35 us"), (1.23456, "1.235 ms"), (2345.6, "2.346 s")]
)  # fmt: skip
def test_times_have_the_unit_that_reads_best(value: float, text: str) -> None:
    assert render.duration(value) == text


@pytest.mark.parametrize("timed_", [True, False], ids=["gpu", "cpu"])
def test_a_wrong_result_has_a_row(timed_: bool) -> None:
    from rich.console import Console

    from gpu_accel.workbench.experiment import Check
    from gpu_accel.workbench.runner import Outcome

    record = timed("portable", tflops=200.0)
    wrong = Outcome("sdpa-flash", record.case, "too far off", record.experiment, "peer", Check(0.5, 0.25, "max_abs"))
    failed = Outcome("hopper", record.case, "illegal instruction", record.experiment, "ours")
    screen = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for made in render.result_tables([record] if timed_ else [], [wrong, failed]):
        screen.print(made)
    lines = screen.export_text().splitlines()
    row = next(line for line in lines if "sdpa-flash" in line)
    assert "0.5" in row and "0.25" in row and row.rstrip().endswith("WRONG")
    assert next(line for line in lines if "hopper" in line).rstrip().endswith("WRONG")
    assert not timed_ or next(line for line in lines if "portable" in line).rstrip().endswith("correct")


@pytest.mark.parametrize(
    ("seconds", "text"), [(40, "40 seconds"), (700, "12 minutes"), (10000, "3 hours"), (5e6, "58 days")]
)
def test_waiting_is_said_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert render.span(seconds) == text


def test_a_table_of_measurements_shows_time_rate_and_ratio() -> None:
    from rich.console import Console

    records = [timed("portable", tflops=200.0, against={"sdpa-flash": 2.0}), timed("sdpa-flash", tflops=100.0)]
    screen = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for made in render.result_tables(records):
        screen.print(made)
    text = screen.export_text()
    assert "200" in text and "2.00x [1.98, 2.02]" in text and "measured on Test GPU 1" in text


def printed(parts: list, width: int) -> str:
    from rich.console import Console

    screen = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for part in parts:
        screen.print(part)
    return screen.export_text()


def test_cases_of_one_line_have_no_gaps_and_kinds_of_error_are_told_apart() -> None:
    one, two = (timed("portable", n=n) for n in (64, 128))
    one.checked["metric"], two.checked["metric"] = "largest error, of o", "largest error, of dq"
    lines = printed(render.result_tables([one, two]), 160).splitlines()
    at = next(n for n, line in enumerate(lines) if "portable" in line)
    assert "portable" in lines[at + 1] and "error: largest error, of o; largest error, of dq" in "".join(lines)
    rows = printed(render.result_tables([one, timed("rival", n=64), two]), 160).splitlines()[at:]
    assert "rival" in rows[1] and not rows[2].strip() and "portable" in rows[3]


def test_many_metrics_are_read_beside_each_other_or_in_one_cell() -> None:
    """A table of 26 columns had a letter of each heading in a line."""
    names = [f"cheating(way_{at})" for at in range(24)]
    first = timed("harness[b]", tflops=200.0, against={"sdpa-flash": 2.0, "portable": 1.5}, layout="[red]")
    counts = [Record(**{**vars(first), "metric": name, "unit": "1", "median": 100.0 + at, "p20": None, "p80": None,
                        "samples": (), "work": {}, "ratio_to": {}}) for at, name in enumerate(names)]  # fmt: skip
    shown = render.result_tables([first, *counts])
    for width in (80, 160, 1000):
        text = printed(shown, width)
        assert max(map(len, text.splitlines())) <= width and "1.50x [1.48, 1.52]" in text
        assert "harness[b]" in text and "[red]" in text, "brackets are no markup"
        if width == 1000:
            row = next(line for line in text.splitlines() if "harness" in line)
            assert "against portable" in text and all(f" {100 + at} " in row for at in range(24)), text
        else:
            assert all(f"cheating(way {at}) {100 + at}" in text for at in range(24)), text


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("paper", papers(), ids=lambda paper: paper.id)
def test_names_and_numbers_of_results_stay_whole(paper, width: int) -> None:
    """On every experiment's newest results."""
    newest: dict[str, list[Record]] = {}
    for record in sorted(paper.records(), key=lambda one: one.when):
        group = newest.setdefault(record.experiment, [])
        if group and group[-1].commit != record.commit:
            group.clear()
        group.append(record)
    for experiment, records in ((name, group[:120]) for name, group in newest.items()):
        text = printed(render.result_tables(records), width)
        assert max(map(len, text.splitlines())) <= width
        for record in records:
            parts = [record.impl]
            if record.median is not None:
                parts += [render.quantity(record.value(), record.unit)]
            parts += [f"{one['median']:.2f}x [{one['ci95'][0]:.2f}, {one['ci95'][1]:.2f}]"
                      for one in record.ratio_to.values()]  # fmt: skip
            assert all(part in text for part in parts), (experiment, parts)


# -- terminals


def test_streams_that_are_not_utf_8() -> None:
    shown = shell("optimize", "tasks", PYTHONIOENCODING="ascii")
    assert "x ? out" in shown.stdout and not shown.stderr
    listed = json.loads(shell("list", "--json", PYTHONIOENCODING="ascii").stdout)
    assert not any("?" in row["title"] + "".join(row["authors"]) for row in listed)


@pytest.mark.parametrize("width", [76, 80, 90, 100])
def test_heads_stay_whole_where_columns_are_left_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = call("hardware", "list")
    assert "too narrow for" in found and "memory   bandwidth" in found


def test_names_stay_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what is typed next, so prose gives way, and then the columns that a table can spare."""
    monkeypatch.setenv("COLUMNS", "80")
    for words, name in ((("hardware", "list"), "a100-pcie-80gb"), (("claims", "ring"), "exact.allgather")):
        lines = call(*words).splitlines()
        table = lines[1 : lines.index("", 1)]
        assert any(line.startswith(f" {name} ") for line in table) and max(map(len, table)) <= 80


def test_claims_leave_room_for_prose_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a long id there had been three letters of each word in a line."""
    monkeypatch.setenv("COLUMNS", "60")
    text = call("claims", "ring", "--verdict", "reproduced")
    assert " exact.kv-ring " in text and " The KV ring computes attention and " in text


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_width_of_nothing_is_none(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert "FlashAttention-3: Fast and" in call("list")


def test_a_paragraph_of_help_has_no_breaks_of_its_own() -> None:
    words = call("run", "--help").split("Finished cases", 1)[0].split("\n")
    assert "timed. Without a GPU the same kernels run" in "\n".join(words)


def test_colons_are_no_pictures() -> None:
    assert "nope:x:" in complain("conformance", "--against", "nope:x", code=codes.USAGE)
