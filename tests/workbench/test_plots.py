"""plotly figures: pure functions of records that carry their stamp and never mix what does not belong together."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("plotly")

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing.records import GPU, SEQLENS, correct, grid, number, quote, timed, verdict
from gpu_accel.workbench import plots, series


def stamp(figure):
    text = figure.layout.meta["stamp"]
    assert figure.layout.title.subtitle.text == text[0].upper() + text[1:]
    return text


def test_importing_plots_does_not_import_plotly_or_torch():
    code = "import sys, gpu_accel.workbench.plots; print([m for m in ('plotly', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_throughput_has_a_trace_per_chart_and_implementation_in_tflops():
    figure = plots.throughput(grid(), quotes=[quote(300.0, head_dim=64, causal=False)])
    assert len(figure.data) == 4 * 3 + 1
    ours = next(t for t in figure.data if t.name == "gpu-accel, plain Triton")
    assert list(ours.x) == ["512", "1k", "2k"]
    assert list(ours.y) == pytest.approx([200, 300, 400])
    assert list(ours.error_y.array) == pytest.approx([50, 75, 100])  # p20 of the time is 0.8 of its median
    assert list(ours.error_y.arrayminus) == pytest.approx([40, 60, 80])
    assert stamp(figure) == f"measured on {GPU}, 2026-11-27, commit abcdef0, quoted from arXiv:1234.5678"
    assert sorted(t.legendgroup for t in figure.data if t.showlegend) == [
        "portable",
        "quoted",
        "sdpa-cudnn",
        "sdpa-flash",
    ]


def test_hover_says_shape_interval_clock_and_check():
    text = plots.hover(timed())
    for part in (
        "batch=2",
        "seqlen_q=1024",
        "p20 to p80",
        "TFLOP/s",
        "clock 1700 MHz",
        "error 0.001 of 0.002 allowed",
        "measured",
    ):
        assert part in text


def test_quoted_line_is_dashed_and_last_in_the_legend():
    figure = plots.throughput(grid(), quotes=[quote(300.0)])
    dashed = [t for t in figure.data if t.line.dash == "dash"]
    assert [t.name for t in dashed] == ["New in the paper, fp16 (quoted)"]


@pytest.mark.parametrize("draw", [plots.throughput, plots.memory, plots.errors, plots.claims_overview])
def test_no_records_gives_a_figure_that_says_so(draw):
    figure = draw([])
    assert stamp(figure) == "nothing measured yet"
    assert [a.text for a in figure.layout.annotations][-1] in ("not measured yet", "no claims")


def test_checked_records_are_never_drawn_as_timings():
    assert not plots.throughput([correct()]).data


@pytest.mark.parametrize("draw", [plots.throughput, lambda r, **k: plots.ratios(r, baseline="sdpa-flash", **k)])
def test_gpus_are_never_mixed(draw):
    records = grid() + grid(gpu="Other GPU 2")
    with pytest.raises(InvalidInputError, match="choose one with gpu="):
        draw(records)
    draw(records, gpu="Other")


def test_quotes_of_eight_bit_never_stand_for_sixteen_and_seeds_are_no_paper():
    claims = [
        quote(1.0),
        quote(2.0, dtype="e4m3"),
        quote(3.0, impl="sdpa-flash"),
        quote(6.0, impl="portable"),
        quote(4.0, source="seed"),
        quote(5.0, unit="gbps"),
    ]
    assert [c.value for c in series.paper_curve(claims, dtype="bf16")] == [1.0]
    assert [c.value for c in series.paper_curve(claims, dtype="e4m3")] == [2.0]
    assert not series.paper_curve(claims, pass_="backward", dtype="bf16")


def test_ratio_map_shows_the_interleaved_ratios():
    records = [
        timed(against={"sdpa-flash": r}, seqlen_q=n, seqlen_k=n) for n, r in zip(SEQLENS, (0.5, 1.0, 2.0), strict=True)
    ]
    figure = plots.ratios([*records, timed("portable", seqlen_q=4096, seqlen_k=4096)], baseline="sdpa-flash")
    heat = figure.data[0]
    assert list(heat.x) == ["512", "1k", "2k"]  # a shape without such a ratio has no cell
    assert [list(row) for row in heat.text] == [["0.50", "1.00", "2.00"]]
    assert list(heat.z[0]) == pytest.approx([-1, 0, 1]) and heat.zmax == -heat.zmin  # 1 lies in the middle
    assert "0.495 to 0.505" in heat.customdata[0][0]
    assert not plots.ratios(records, baseline="nobody").data


def test_errors_are_grouped_by_input_and_prefer_the_measured():
    records = [
        number("rmse", 2e-2, "fp8 per tensor", input="outliers", dtype="e4m3", spread=0.1),
        number("rmse", 1e-2, "fp8 block", input="outliers", dtype="e4m3"),
        number("rmse", 5e-3, "fp8 block", input="outliers", dtype="e4m3", kind="checked"),
        number("rmse", 4e-3, "fp8 block", input="normal", dtype="e4m3", kind="checked"),
    ]
    figure = plots.errors(records)
    dots = {d.name.split()[0]: dict(zip(d.y, d.x, strict=True)) for d in figure.data}
    assert dots == {"outliers": {"fp8 per tensor": 2e-2, "fp8 block": 1e-2}, "normal": {"fp8 block": 4e-3}}
    assert figure.data[0].name == "normal (length 1k, head dim 64, full)"
    assert figure.layout.xaxis.type == "log"
    assert list(figure.layout.yaxis.categoryarray) == ["fp8 per tensor", "fp8 block"]  # from below: the best on top
    assert list(figure.data[1].error_x.array) == pytest.approx([0, 2e-3])
    assert "measured" in stamp(figure) and "checked on CPU" in stamp(figure)


def test_errors_of_operands_are_apart():
    both = [replace(number("rmse", x, input="model"), case={"input": "model", "operand": name})
            for name, x in (("q_proj", 0.1), ("down_proj", 0.2))]  # fmt: skip
    drawn = {d.name.partition(" (")[0]: d.x[0] for d in plots.errors([*both, number("rmse", 0.3)]).data}
    assert drawn == {"model down_proj": 0.2, "model q_proj": 0.1, "normal": 0.3}


def test_errors_of_two_shapes_are_refused():
    with pytest.raises(InvalidInputError, match="mix seqlen_q"):
        plots.errors([number("rmse", 1.0), number("rmse", 1.0, seqlen_q=8)])


def test_memory_is_log_log_in_mib():
    records = [number("peak_bytes", n * 2**20, seqlen_q=n, unit="bytes") for n in (2048, 512)]
    figure = plots.memory(records)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert list(figure.data[0].x) == [512, 2048] and list(figure.data[0].y) == [512, 2048]


def test_claims_overview_counts_every_verdict_once():
    judged = [
        verdict("reproduced", figure="fig5a"),
        verdict("within 7%", figure="fig5b"),
        verdict("not reproduced", figure="table3"),
        verdict("not measured (no GPU)"),
        verdict("unsupported (no source found)", source="seed"),
        verdict("reproduced"),
    ]
    figure = plots.claims_overview(judged)
    counted = {bar.name: {y: x for y, x in zip(bar.y, bar.x, strict=True) if x} for bar in figure.data}
    assert counted == {
        "reproduced": {"Figure 5": 1, "the text": 1},
        "within 25%": {"Figure 5": 1},
        "not reproduced": {"Table 3": 1},
        "not measured": {"the text": 1},
        "unsupported": {"earlier documents of this project": 1},
    }
    with pytest.raises(InvalidInputError, match="verdict word"):
        plots.claims_overview([verdict("splendid")])


def test_template_is_small():
    assert len(plots.template().to_plotly_json().__repr__()) < 2000
    assert math.isfinite(plots.throughput([]).layout.height)


class TestRoofline:
    H100 = "NVIDIA H100 80GB HBM3"

    def test_roofs_and_points_of_the_gpu_that_the_records_name(self):
        records = [timed(gpu=self.H100, tflops=400), timed("sdpa-flash", gpu=self.H100, tflops=200)]
        figure = plots.roofline(records, dtypes=("e4m3",))
        roofs = [t for t in figure.data if t.name.startswith("roof")]
        assert [max(t.y) for t in roofs] == pytest.approx([989.4, 1978.9])
        for roof in roofs:  # slanted up to the ridge, then flat
            assert roof.y[0] / roof.x[0] == pytest.approx(3.352, rel=1e-3) and roof.y[1] == pytest.approx(roof.y[2])
        points = {t.name: t for t in figure.data if t not in roofs}
        assert list(points["gpu-accel, plain Triton"].y) == pytest.approx([400])
        assert list(points["gpu-accel, plain Triton"].x) == pytest.approx([100])  # as made: flops / 100 bytes
        # at 100 FLOP/byte the roof is 335 TFLOP/s, so 200 are 60 % of it
        assert "60% of the roof" in points["SDPA, FlashAttention-2"].customdata[0]
        assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
        assert stamp(figure).startswith(f"measured on {self.H100}")

    def test_roofs_without_records_name_their_profile_and_claim_no_measurement(self):
        figure = plots.roofline([], profile="h200")
        assert "H200" in figure.layout.title.text and stamp(figure) == "nothing measured yet"
        assert len(figure.data) == 1

    def test_measured_roofs_lie_beside_those_of_the_datasheet(self):
        sheet, measured = plots.roofline([], profile="h100-sxm").data
        assert sheet.line.dash != "dash" and measured.line.dash == "dash"
        assert max(measured.y) < max(sheet.y)

    def test_unknown_gpu_needs_a_profile(self):
        with pytest.raises(InvalidInputError, match="profile="):
            plots.roofline([timed()])
        assert plots.roofline([timed()], profile="h100-sxm").data


def test_a_curve_has_a_line_for_each_implementation_and_marks():
    figure = plots.curve(grid(), x="seqlen_q", metric="tflops", marks={"theirs": 300.0}, title="rate")
    names = {trace.name for trace in figure.data}
    assert len(figure.data) == 3 == len(names)
    assert all(list(trace.x) == sorted(trace.x) for trace in figure.data)
    assert any("theirs" in str(note.text) for note in figure.layout.annotations)
    by_dim = plots.curve(grid({"portable": 100.0}), x="seqlen_q", metric="tflops", by="head_dim")
    assert {trace.name for trace in by_dim.data} == {"64", "128"}


def test_an_empty_curve_says_so():
    figure = plots.curve([], x="footprint_kb", metric="latency")
    assert any("not measured yet" in note.text for note in figure.layout.annotations)
