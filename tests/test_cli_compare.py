"""`gpu-accel compare`: like is compared with like, and the word points the right way for every metric."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from cli import codes  # noqa: E402
from cli.main import app  # noqa: E402
from gpu_accel.testing.records import number, timed  # noqa: E402
from gpu_accel.workbench.records import Record, append_records  # noqa: E402


def refuse_constant(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def compared(tmp_path: Path, a: list[Record], b: list[Record], *options: str, code: int = codes.OK) -> dict:
    for name, records in (("a.jsonl", a), ("b.jsonl", b)):
        (tmp_path / name).unlink(missing_ok=True)
        append_records(tmp_path / name, records)
    files = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    table = CliRunner().invoke(app, ["compare", *files, *options])
    assert table.exit_code == code, table.output
    result = CliRunner().invoke(app, ["compare", *files, "--json", *options])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout, parse_constant=refuse_constant)


def taken(record: Record, *, mode: str = "burst", l2: str = "flushed") -> Record:
    return dataclasses.replace(record, timing=record.timing | {"mode": mode, "l2": l2})


def in_unit(record: Record, unit: str, scale: float) -> Record:
    return dataclasses.replace(
        record,
        unit=unit,
        median=record.median * scale,
        p20=record.p20 * scale,
        p80=record.p80 * scale,
        samples=tuple(sample * scale for sample in record.samples),
    )


def steady(**changes) -> Record:
    record = timed(**changes)
    return dataclasses.replace(record, samples=(record.median,) * 8, p20=record.median, p80=record.median)


@pytest.mark.parametrize(
    ("metric", "unit", "a", "b", "word"),
    [
        ("cosine", "1", 0.9, 0.5, "slower"),
        ("cosine", "1", 0.5, 0.9, "faster"),
        ("cosine", "1", 0.5, -0.5, "slower"),
        ("cosine", "1", -0.5, 0.5, "faster"),
        ("sqnr", "dB", 40.0, 20.0, "slower"),
        ("sqnr", "dB", -3.0, 10.0, "faster"),
        ("sqnr", "dB", 30.0, 30.0, "same"),
        ("rmse", "1", 1e-3, 2e-3, "slower"),
        ("rmse", "1", 2e-3, 1e-3, "faster"),
        ("rmse", "1", 0.0, 1e-3, "slower"),
        ("rmse", "1", 1e-3, 0.0, "faster"),
        ("rmse", "1", 0.0, 0.0, "same"),
        ("bias", "1", -1e-4, -2e-4, "slower"),
        ("bias", "1", -1e-4, 1e-4, "same"),
        ("bias", "1", 5e-4, -1e-4, "faster"),
        ("bias", "1", 0.0, -1e-4, "slower"),
        ("peak_bytes", "bytes", 100.0, 200.0, "slower"),
        ("peak_bytes", "bytes", 0.0, 200.0, "slower"),
        ("bias", "1", 1e300, 1e-300, "faster"),
    ],
)
def test_the_word_points_the_way_of_the_metric(
    tmp_path: Path, metric: str, unit: str, a: float, b: float, word: str
) -> None:
    sides = [[dataclasses.replace(number("peak", 1.0, unit=unit), metric=metric, median=x, p20=x, p80=x)]
             for x in (a, b)]  # fmt: skip
    sides = [[dataclasses.replace(side[0], p20=None, p80=None)] for side in sides]
    row = compared(tmp_path, *sides)["rows"][0]
    assert row["verdict"] == word, row
    assert row["difference"] == b - a
    assert row["ratio"] is None or math.isfinite(row["ratio"])
    gate = codes.GATE if word == "slower" else codes.OK
    compared(tmp_path, *sides, "--fail-on", "slower", code=gate)


@pytest.mark.parametrize("other", [{"mode": "sustained", "l2": "warm"}, {"l2": "warm"}])
def test_what_was_taken_differently_is_left_out_and_said(tmp_path: Path, other: dict) -> None:
    common = taken(steady(head_dim=128))
    made = compared(tmp_path, [common, taken(steady())], [common, taken(steady(tflops=50.0), **other)])
    assert made["counts"] == {"same": 1, "faster": 0, "slower": 0, "ambiguous": 0}
    assert len(made["left_out"]) == 1 and "warm" in made["left_out"][0]["b"] and made["left_out"][0]["count"] == 1
    append_records(tmp_path / "c.jsonl", [taken(steady(), **other)])
    append_records(tmp_path / "d.jsonl", [taken(steady())])
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "c.jsonl"), str(tmp_path / "d.jsonl")])
    assert result.exit_code == codes.NOTHING_RAN
    assert "not compared" in result.stderr and "warm" in result.stderr and "flushed" in result.stderr


def test_a_longer_call_is_not_a_slower_one(tmp_path: Path) -> None:
    """A benchmark whose loop runs ten times as long since; its rate is compared all the same."""
    short = steady()
    longer = dataclasses.replace(
        in_unit(short, "ms", 10.0), work={name: 10 * amount for name, amount in short.work.items()}
    )
    assert short.work, "a time without its work"
    rate = number("throughput", 64.0, "kernel", unit="instr/clk/SM")
    made = compared(tmp_path, [short, rate], [longer, rate])
    assert [row["impl"] for row in made["rows"]] == ["kernel"] and made["counts"]["slower"] == 0
    assert made["left_out"] == [{"a": "one amount of work a call", "b": "another", "count": 1}]
    assert made["only_in_a"] == made["only_in_b"] == 0
    unknown = dataclasses.replace(longer, work={})  # what says nothing of its work is compared as ever
    assert compared(tmp_path, [short], [unknown])["counts"]["slower"] == 1


@pytest.mark.parametrize(("unit", "scale"), [("us", 1e3), ("s", 1e-3)])
def test_units_of_time_are_converted(tmp_path: Path, unit: str, scale: float) -> None:
    one = steady()
    row = compared(tmp_path, [one], [in_unit(one, unit, scale)])["rows"][0]
    assert row["verdict"] == "same" and row["ratio"] == pytest.approx(1) and row["b"] == pytest.approx(row["a"])
    row = compared(tmp_path, [in_unit(one, unit, scale)], [steady(tflops=50.0)])["rows"][0]
    assert row["verdict"] == "slower" and row["ratio"] == pytest.approx(0.5) and row["unit"] == unit


def test_units_of_different_quantities_are_refused(tmp_path: Path) -> None:
    common = steady()
    sides = [[common, number("peak", 5.0, unit=unit)] for unit in ("bytes", "J")]
    made = compared(tmp_path, *sides)
    assert [row["metric"] for row in made["rows"]] == ["time"]
    assert made["left_out"] == [{"a": "unit bytes", "b": "unit J", "count": 1}]


def test_the_same_gpus_are_paired(tmp_path: Path) -> None:
    """The newest record of B is of the slow card; it must not be held against the fast one."""
    a = [steady(gpu="Fast", tflops=400.0), steady(gpu="Slow", tflops=100.0)]
    b = [steady(gpu="Fast", tflops=400.0), steady(gpu="Slow", tflops=100.0, time="2026-11-28T12:00:00+00:00")]
    made = compared(tmp_path, a, b)
    assert made["counts"]["same"] == 2 == len(made["rows"])
    assert all(row["gpu_a"] == row["gpu_b"] for row in made["rows"])
    made = compared(tmp_path, a, b[:1])
    assert [row["gpu_b"] for row in made["rows"]] == ["Fast"] and made["only_in_a"] == 1
    result = CliRunner().invoke(app, ["compare", *_files(tmp_path, a, [steady(gpu="Third")])])
    assert result.exit_code == codes.NOTHING_RAN and "GPU Third" in result.stderr


def test_two_single_gpus_are_compared_and_named(tmp_path: Path) -> None:
    files = _files(tmp_path, [steady(gpu="Fast", tflops=400.0)], [steady(gpu="Slow")])
    result = CliRunner().invoke(app, ["compare", *files])
    assert result.exit_code == codes.OK and "different GPUs: Fast in A, Slow in B" in result.stderr


def _files(tmp_path: Path, a: list[Record], b: list[Record]) -> list[str]:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, records in zip(files, (a, b), strict=True):
        append_records(file, records)
    return [str(file) for file in files]


@pytest.mark.parametrize("width", [72, 100, 200])
def test_what_is_said_stays_whole_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name, speed in (("a.jsonl", 100.0), ("b.jsonl", 107.0)):
        long = [timed(impl="portable-with-a-name", tflops=speed, batch=batch) for batch in (2, 4)]
        append_records(tmp_path / name, [taken(long[0]), taken(long[1], mode="sustained", l2="warm")])
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert shown.exit_code == codes.OK, shown.output
    for word in ("portable-with-a-name", "sustained", "ambiguous", "0.02147", "0.02007"):
        assert word in shown.stdout, shown.stdout
    assert max(map(len, shown.stdout.split("2 compared")[0].splitlines())) <= width
