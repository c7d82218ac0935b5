"""Records: what each kind must carry, JSON round trip, files that survive an interruption, and merging."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.records import Record, append_records, gpu_slug, merge, read_records, result_file

CASE = {"pass": "forward", "batch": 4, "seqlen_q": 4096, "causal": False, "dtype": "bf16"}
CHECKED = {"error": 1e-3, "bound": 2e-3, "metric": "max_abs"}


def measured(**changes):
    fields = dict(
        kind="measured",
        paper="toy",
        experiment="forward",
        case=dict(CASE),
        impl="hopper",
        metric="time",
        unit="ms",
        median=2.0,
        p20=1.9,
        p80=2.1,
        samples=(1.9, 2.0, 2.1),
        work={"flops": 1e12, "bytes": 2e9},
        checked=dict(CHECKED),
        ratio_to={"sdpa": {"median": 1.5, "ci95": [1.45, 1.55]}},
        env={"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM"},
        timing={"method": "events", "l2": "flushed", "rounds": 3, "interleaved": ["sdpa"]},
        commit="0123456789",
        time="2026-11-27T10:00:00+00:00",
    )
    return Record(**{**fields, **changes})


def checked(**changes):
    fields = dict(
        kind="checked",
        paper="toy",
        experiment="forward",
        case=dict(CASE),
        impl="portable",
        metric="correct",
        unit="1",
        checked=dict(CHECKED),
        time="2026-11-27T10:00:00+00:00",
    )
    return Record(**{**fields, **changes})


def modelled(**changes):
    return measured(kind="modelled", samples=(), checked=None, ratio_to={}, **changes)


def quoted(**changes):
    fields = dict(kind="quoted", metric="tflops", unit="tflops", median=648.0, p20=None, p80=None, source="arXiv:1")
    return checked(**{**fields, "checked": None, **changes})


def test_derived_values():
    record = measured()
    assert record.value() == 2.0 and record.value("ms") == 2.0
    assert record.value("tflops") == pytest.approx(500.0)  # 1e12 flop in 2 ms
    assert record.value("gbps") == pytest.approx(1000.0)  # 2e9 bytes in 2 ms
    assert measured(unit="us").value("ms") == pytest.approx(2e-3)
    assert record.interval("tflops") == pytest.approx((1e3 / 2.1, 1e3 / 1.9))  # low and high swap with the inversion
    assert checked().interval() is None


def test_a_value_that_does_not_follow_is_refused():
    assert not measured(work={}).has("tflops")
    with pytest.raises(InvalidInputError, match="tflops"):
        measured(work={}).value("tflops")
    with pytest.raises(InvalidInputError, match="rmse"):
        measured().value("rmse")
    with pytest.raises(InvalidInputError, match="without a value"):
        checked().value()


def test_cycles_are_no_time_but_need_a_check_and_a_gpu():
    fields = dict(metric="latency", unit="clk", median=29.0, p20=None, p80=None, samples=(), timing={}, ratio_to={})
    record = measured(**fields)
    assert not record.is_speed and record.value("latency") == 29.0
    assert not measured(**{**fields, "metric": "throughput", "unit": "B/clk/SM"}).is_speed
    with pytest.raises(InvalidInputError, match="needs checked"):
        measured(**fields, checked=None)
    with pytest.raises(InvalidInputError, match="above 0"):
        measured(**{**fields, "median": 0.0})
    with pytest.raises(InvalidInputError, match="is a speed"):
        measured(**{**fields, "unit": "cycles/s"})


@pytest.mark.parametrize(
    ("build", "changes", "message"),
    [
        (measured, {"kind": "guessed"}, "kind"),
        (measured, {"schema": 2}, "schema"),
        (measured, {"impl": ""}, "impl"),
        (measured, {"case": {"shape": [1, 2]}}, "case"),
        (measured, {"time": "2026-11-27T10:00:00"}, "UTC"),
        (measured, {"time": "yesterday"}, "UTC"),
        (measured, {"time": "2026-11-27T10:00:00+02:00"}, "UTC"),
        (measured, {"unit": "bytes"}, "a time is in"),
        (measured, {"median": float("nan")}, "median"),
        (measured, {"samples": (1.9, float("inf"))}, "sample"),
        (measured, {"median": 5.0, "p80": 6.0}, "outside its own samples"),
        (measured, {"p20": 2.05}, "p20"),
        (measured, {"p20": None}, "go together"),
        (measured, {"work": {"flops": -1.0}}, "work"),
        (measured, {"env": {}}, "env.gpu"),
        (measured, {"median": None, "p20": None, "p80": None}, "median"),
        (measured, {"checked": None}, "needs checked"),
        (measured, {"checked": {"error": 3e-3, "bound": 2e-3, "metric": "max_abs"}}, "above its bound"),
        (measured, {"checked": {"error": float("nan"), "bound": 2e-3, "metric": "max_abs"}}, "above its bound"),
        (measured, {"checked": {"error": 0.0, "bound": float("inf"), "metric": "max_abs"}}, "above its bound"),
        (measured, {"checked": {"error": 1e-3, "bound": 2e-3}}, "checked must have"),
        (measured, {"samples": ()}, "samples"),
        (measured, {"samples": (-1.0, 2.0, 3.0)}, "above 0"),
        (measured, {"metric": "tflops", "unit": "tflops"}, "derived"),
        (measured, {"timing": {"method": "events", "interleaved": ["sdpa"]}}, "l2"),
        (measured, {"timing": {"l2": "warm", "interleaved": ["sdpa"]}}, "method"),
        (measured, {"timing": {"method": "events", "l2": "warm", "interleaved": []}}, "not interleaved"),
        (measured, {"ratio_to": {"sdpa": {"median": 1.5, "ci95": [1.6, 1.7]}}}, "no interval"),
        (measured, {"ratio_to": {"sdpa": 1.5}}, "ratio_to"),
        (measured, {"env": {"gpu": "H100", "peak_tflops": 400.0}}, "above the device peak"),
        (measured, {"env": {"gpu": "H100", "peak_tflops": {"bf16": 400.0}}}, "above the device peak"),
        (measured, {"env": {"gpu": "H100", "peak_gbps": 999.0}}, "above the device peak"),
        (checked, {"checked": None}, "needs checked"),
        (checked, {"metric": "time", "unit": "ms", "median": 1.0}, "no time"),
        (checked, {"metric": "speed", "unit": "tflops", "median": 1.0}, "no time"),
        (checked, {"median": 1.0}, "no median"),
        (checked, {"metric": "rmse"}, "needs a median"),
        (
            checked,
            {"ratio_to": {"sdpa": {"median": 1.5, "ci95": [1, 2]}}, "timing": {"interleaved": ["sdpa"]}},
            "ratio",
        ),
        (checked, {"metric": "latency", "unit": "clk", "median": 29.0}, "counts no cycles"),
        (modelled, {"p20": None, "p80": None}, "interval"),
        (modelled, {"env": {"gpu": "H100", "peak_tflops": 400.0}}, "above the device peak"),
        (quoted, {"source": ""}, "source"),
        (quoted, {"median": None}, "median"),
    ],
)
def test_invariants(build, changes, message):
    build()  # the unchanged record is fine, so that only the change can be at fault
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_a_rate_at_the_peak_is_allowed():
    measured(env={"gpu": "H100", "peak_tflops": 500.0, "peak_gbps": 1000.0})
    measured(env={"gpu": "H100", "peak_tflops": {"bf16": 500.0, "e4m3": 1.0}})  # each dtype has its own
    measured(env={"gpu": "H100", "peak_tflops": None, "peak_gbps": 0})  # not known


def test_a_dtype_without_a_peak_is_held_against_the_highest_known():
    env = {"gpu": "H100", "peak_tflops": {"bf16": 400.0, "fp32": 50.0}}
    for dtype in ("BF16", "mxfp4"):
        with pytest.raises(InvalidInputError, match=f"above the device peak, 400 .the highest known.*{dtype!r}"):
            measured(case={**CASE, "dtype": dtype}, env=env)
        measured(case={**CASE, "dtype": dtype}, env={"gpu": "H100", "peak_tflops": {"bf16": 50.0, "e4m3": 600.0}})
    with pytest.raises(InvalidInputError, match="highest known"):
        measured(case={"batch": 1}, env=env)


SPEEDS = [
    ("throughput", "TFLOP/s"),
    ("latency", "msec"),
    ("speedup", "x"),
    ("error", "TFLOP/s"),
    ("rel_error", "x"),
    ("throughput", "1"),
    ("kernel-latency", "1"),
    ("tokens", "tokens/s"),
    ("anything", "furlongs"),
]


@pytest.mark.parametrize(("metric", "unit"), SPEEDS)
def test_a_speed_by_any_name_or_unit_is_no_plain_value(metric, unit):
    plain = dict(samples=(), p20=None, p80=None, ratio_to={}, median=9.0)
    with pytest.raises(InvalidInputError, match=r"is a speed|in ms, us or s"):
        measured(metric=metric, unit=unit, **plain)
    with pytest.raises(InvalidInputError, match="is a speed"):
        measured(metric=metric, unit=unit)  # nor with samples: it is the time that is recorded
    with pytest.raises(InvalidInputError, match="no time"):
        checked(metric=metric, unit=unit, median=9.0)


@pytest.mark.parametrize(
    ("metric", "unit"), [("rmse", "1"), ("peak_bytes", "bytes"), ("sqnr", "dB"), ("energy", "J"), ("draw", "W")]
)
def test_plain_values_are_accepted(metric, unit):
    assert not measured(
        metric=metric, unit=unit, samples=(), p20=None, p80=None, ratio_to={}, checked=None, timing={}
    ).is_speed


def test_a_model_in_an_unknown_unit_or_above_the_peak_is_refused():
    env = {"gpu": "H100", "peak_tflops": 400.0}
    modelled(metric="rate", unit="tflops", median=300.0, p20=290.0, p80=310.0, env=env)
    with pytest.raises(InvalidInputError, match="above the device peak"):
        modelled(metric="rate", unit="tflops", median=500.0, p20=490.0, p80=510.0, env=env)
    with pytest.raises(InvalidInputError, match="unit 'TFLOP/s' is unknown"):
        modelled(metric="rate", unit="TFLOP/s", env=env)


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"note": object()}, "note must be a string"),
        ({"source": 3}, "source must be a string"),
        ({"commit": None}, "commit must be a string"),
        ({"input_source": ["x"]}, "input_source must be a string"),
        ({"time": 3}, "time must be"),
        ({"case": {**CASE, "scale": float("nan")}}, "JSON"),
        ({"case": {**CASE, 3: 4}}, "strings as keys"),
        ({"env": {"gpu": "H100", "power_w": float("nan")}}, "JSON"),
        ({"env": {"gpu": "H100", "thing": object()}}, "JSON"),
        ({"env": {"gpu": "H100", "deep": DEEP}}, "JSON"),
        ({"env": {"gpu": ["H100"]}}, "env.gpu"),
        ({"env": {"gpu": "H100", "peak_tflops": "abc"}}, "env.peak_tflops must be a number"),
        ({"env": {"gpu": "H100", "peak_tflops": {"bf16": float("nan")}}}, "env.peak_tflops must be a number"),
        ({"metric": object()}, "metric must be"),
        ({"checked": [1, 2]}, "checked must be a dict"),
        ({"checked": {**CHECKED, "metric": object()}}, "checked.metric"),
        ({"median": 10**400}, "median must be a finite number"),
        ({"samples": (1.9, 2.0, 10**5000)}, "every sample"),
        ({"samples": 3}, "samples must be"),
        ({"work": {"flops": 10**400}}, "work"),
        ({"schema": True}, "schema"),
        ({"timing": {"method": "events", "l2": "flushed", "interleaved": 3}}, "interleaved must be"),
        ({"ratio_to": {"sdpa": {"median": 1.5, "ci95": 3}}}, "ratio_to"),
    ],
)
def test_what_could_not_be_written_or_read_again_is_refused_at_once(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        measured(**changes)


@pytest.mark.parametrize("metric", ["rmse", "max_abs", "rel_error"])
def test_an_error_is_not_negative(metric):
    checked(metric=metric, median=0.0)
    checked(metric="bias", median=-1.0)
    with pytest.raises(InvalidInputError, match="negative"):
        checked(metric=metric, median=-1e-3)


def test_json_round_trip():
    for record in (measured(), checked(), modelled(), quoted()):
        line = record.to_json()
        assert "\n" not in line and "location" not in json.loads(line)
        assert Record.from_json(line) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": None}, "schema"),
        ({"speed": 1}, r"unknown fields \['speed'\]"),
        ({"location": "x"}, "unknown fields"),
        ({"median": "fast"}, "median"),
        ({"samples": None}, "x.jsonl:3"),
        ({"schema": True}, "schema True"),
        ({"schema": 1.0}, "schema 1.0"),
        ({"checked": [1]}, "checked must be a dict"),
        ({"note": {"a": 1}}, "note"),
        ({"median": 10**400}, "median"),
        ({"env": {"gpu": "H100", "peak_tflops": "abc"}}, "peak_tflops"),
        ({"env": {"gpu": "H100", "power_w": float("nan")}}, "JSON"),
    ],
)
def test_from_json_is_strict(change, message):
    line = json.dumps({**json.loads(measured().to_json()), **change})
    with pytest.raises(InvalidInputError, match=message) as caught:
        Record.from_json(line, location="x.jsonl:3")
    assert str(caught.value).startswith("x.jsonl:3")


def test_from_json_refuses_missing_fields_and_other_json():
    fields = json.loads(measured().to_json())
    for name in ("unit", "time", "schema"):
        with pytest.raises(InvalidInputError, match=name):
            Record.from_json(json.dumps({k: v for k, v in fields.items() if k != name}))
    for text in ("[]", "3", "{", "", "[" * 100_000, '{"a":' * 100_000, "1" * 10_000):
        with pytest.raises(InvalidInputError):
            Record.from_json(text)


def test_files(tmp_path):
    path = tmp_path / "results" / "h100-sxm" / "a.jsonl"
    append_records(path, [measured()])
    append_records(path, [checked(), quoted()])
    append_records(path, [])
    records = read_records(tmp_path)
    assert records == [measured(), checked(), quoted()]
    assert [record.name for record in records] == [f"{path}:{line}" for line in (1, 2, 3)]
    with pytest.raises(InvalidInputError, match="no results"):
        read_records(tmp_path / "missing.jsonl")


def test_an_interrupted_line_is_dropped_and_finished_rows_are_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(measured().to_json() + "\n" + measured().to_json()[:40])
    with pytest.warns(UserWarning, match="a.jsonl:2"):
        assert read_records(path) == [measured()]
    append_records(path, [checked()])
    assert read_records(path) == [measured(), checked()]

    path.write_text(measured().to_json())  # whole, only its newline is missing
    append_records(path, [checked()])
    assert read_records(path) == [measured(), checked()]


def test_a_broken_line_inside_a_file_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{torn\n" + measured().to_json() + "\n")
    with pytest.raises(InvalidInputError, match="a.jsonl:1"):
        read_records(path)


def test_a_line_cut_inside_a_character_is_an_interrupted_line(tmp_path):
    path = tmp_path / "a.jsonl"
    whole = measured().to_json().encode() + b"\n"
    path.write_bytes(whole + '{"note":"µ'.encode()[:-1])
    with pytest.warns(UserWarning, match="a.jsonl:2"):
        assert read_records(path) == [measured()]
    append_records(path, [checked()])
    assert read_records(path) == [measured(), checked()]
    path.write_bytes(whole + whole.replace(b"forward", b"f\xffrward", 1) + whole)
    with pytest.raises(InvalidInputError, match="a.jsonl:2: not UTF-8"):
        read_records(path)


def _write_many(path, impl):
    for _ in range(40):
        append_records(path, [measured(impl=impl)])


def test_two_writers_do_not_mix_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(record.impl for record in read_records(path)) == ["a"] * 40 + ["b"] * 40


def test_merge_keeps_the_newest_of_each_key():
    old, new = measured(time="2026-11-26T10:00:00+00:00", note="old"), measured(note="new")
    other_gpu = measured(env={"gpu": "NVIDIA H200"})
    assert merge([old, new]) == [new] and merge([new, old]) == [new]
    assert merge([old, other_gpu, modelled(), quoted()]) == [old, other_gpu, modelled(), quoted()]
    warm = measured(timing={**old.timing, "l2": "warm"})
    sustained = measured(timing={**old.timing, "mode": "sustained"})
    assert merge([old, warm, sustained]) == [old, warm, sustained]
    again = measured(note="same second, written later")
    assert merge([new, again]) == [again]
    reordered = measured(case=dict(reversed(CASE.items())))
    assert merge([old, reordered]) == [reordered]


def test_places(tmp_path):
    assert gpu_slug("H100 SXM") == "h100-sxm"
    assert gpu_slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    with pytest.raises(InvalidInputError):
        gpu_slug(" ")
    path = result_file(tmp_path, sku="H100 SXM", commit="0123456789abcdef", tag="fp8", day="2026-11-27")
    assert path == tmp_path / "results" / "h100-sxm" / "2026-11-27-0123456-fp8.jsonl"


def test_a_sparse_product_may_count_what_it_skips():
    env = {"gpu": "Test", "peak_tflops": {"fp16": 1000.0}}
    timing = {"l2": "warm", "method": "events"}
    common = dict(
        kind="measured", paper="p", experiment="e", impl="i", metric="time", unit="ms", median=1.0, samples=(1.0,),
        work={"flops": 1.5e12}, checked={"error": 0.0, "bound": 1.0, "metric": "m"}, env=env, timing=timing,
    )  # fmt: skip
    assert Record(case={"dtype": "fp16", "sparse": True}, **common).value("tflops") == pytest.approx(1500)
    with pytest.raises(InvalidInputError, match="above the device peak"):
        Record(case={"dtype": "fp16", "sparse": False}, **common)
    with pytest.raises(InvalidInputError, match="above the device peak"):
        Record(case={"dtype": "fp16", "sparse": True}, **(common | {"work": {"flops": 2.1e12}}))


def test_half_a_surrogate_pair_is_read_as_what_can_be_written():
    line = measured().to_json().replace('"NVIDIA', '"\\udcff NVIDIA', 1)
    assert "\\udcff" in line and "\udcff" not in Record.from_json(line).to_json()
    Record.from_json(line).to_json().encode()


def test_a_folder_with_the_name_of_a_file_is_read_once(tmp_path):
    append_records(tmp_path / "kept.jsonl" / "inner.jsonl", [measured()])
    assert len(read_records(tmp_path)) == len(read_records(tmp_path / "kept.jsonl")) == 1
