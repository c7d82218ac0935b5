"""The static figure: well-formed, honest about its source, and drawn where the numbers say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing.records import GPU, SEQLENS, correct, grid, quote, timed
from gpu_accel.workbench import series
from gpu_accel.workbench.svg import static_svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parse(text):
    return ElementTree.fromstring(text)


def texts(root):
    return [element.text for element in root.iter(f"{NAMESPACE}text")]


def quotes():
    return [quote(300.0, head_dim=64, causal=False, seqlen_q=n, seqlen_k=n) for n in SEQLENS]


def test_one_chart_per_head_dim_and_mask_with_everything_named():
    root = parse(static_svg(grid(), title="Forward <bf16> & more"))
    shown = texts(root)
    for expected in (
        "Forward <bf16> & more",
        "head dim 64, full",
        "head dim 64, causal",
        "head dim 128, full",
        "head dim 128, causal",
        "gpu-accel, plain Triton",
        "SDPA, FlashAttention-2",
        "SDPA, cuDNN",
        "TFLOP/s",
        f"Measured on {GPU}, 2026-11-27, commit abcdef0",
    ):
        assert expected in shown
    lines = list(root.iter(f"{NAMESPACE}polyline"))
    assert len(lines) == 4 * 3
    assert all(len(line.get("points").split()) == len(SEQLENS) for line in lines)


def test_height_is_proportional_to_the_value():
    records = [timed("portable", tflops=v, seqlen_q=n, seqlen_k=n) for n, v in ((512, 100), (1024, 200), (2048, 300))]
    root = parse(static_svg(records))
    ys = [float(p.split(",")[1]) for p in next(root.iter(f"{NAMESPACE}polyline")).get("points").split()]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.11)
    zero = max(float(line.get("y1")) for line in root.iter(f"{NAMESPACE}line") if "axis" in line.get("class"))
    assert (zero - ys[0]) * 3 == pytest.approx(zero - ys[2], abs=0.3)


def test_whiskers_span_p20_to_p80():
    root = parse(static_svg([timed(tflops=100)]))
    whisker = next(p for p in root.iter(f"{NAMESPACE}path"))
    low, high = (float(v) for v in re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)", whisker.get("d")).groups())
    zero = max(float(line.get("y1")) for line in root.iter(f"{NAMESPACE}line") if "axis" in line.get("class"))
    # times of 0.8 and 1.25 of the median are rates of 125 and 80
    assert (zero - high) / (zero - low) == pytest.approx(125 / 80, rel=0.01)


def test_the_papers_curve_is_dashed_and_named_as_quoted():
    root = parse(static_svg(grid(), quotes=quotes()))
    dashed = [line for line in root.iter(f"{NAMESPACE}polyline") if line.get("stroke-dasharray")]
    assert len(dashed) == 1  # only one chart has a quoted curve
    assert "New in the paper, fp16 (quoted)" in texts(root)
    assert any("quoted from arXiv:1234.5678" in (text or "") for text in texts(root))


def test_quotes_alone_never_look_measured():
    root = parse(static_svg([], quotes=quotes()))
    assert "Quoted from arXiv:1234.5678" in texts(root)
    assert not any("measured" in (text or "") for text in texts(root))
    assert not list(root.iter(f"{NAMESPACE}circle"))


def test_nothing_to_draw_is_an_error_and_checks_are_not_timings():
    with pytest.raises(InvalidInputError, match="nothing to draw"):
        static_svg([correct()])


def test_a_chart_without_our_fast_kernel_says_so():
    records = [*grid(), timed("hopper", tflops=500.0, head_dim=64, causal=False)]
    found = texts(parse(static_svg(records)))
    assert found.count("no Gluon result") == 3 and "no plain Triton result" not in found
    assert not any("result" in (text or "") for text in texts(parse(static_svg(grid()))))


def test_two_gpus_are_refused_until_one_is_chosen():
    records = grid() + grid(gpu="Other GPU 2")
    with pytest.raises(InvalidInputError, match="Other GPU 2, Test GPU 1"):
        static_svg(records)
    chosen = static_svg(records, gpu="other")
    assert "Measured on Other GPU 2" in chosen and GPU not in chosen


def test_mixed_precisions_are_refused():
    with pytest.raises(InvalidInputError, match="mix dtype bf16, fp16"):
        static_svg([timed(), timed(dtype="fp16")])


def test_newest_record_of_a_point_counts():
    old = timed(tflops=100, time="2026-11-01T00:00:00+00:00")
    new = timed(tflops=150, time="2026-11-02T00:00:00+00:00")
    for records in ([old, new], [new, old]):
        panel = series.sweep(records)[0]
        assert [round(p.y) for p in panel.lines[0].points] == [150]


def test_themes_and_names_keep_figures_apart():
    auto = static_svg(grid(), name="first")
    assert "prefers-color-scheme: dark" in auto
    assert "prefers-color-scheme" not in static_svg(grid(), theme="dark")
    rules = re.search(r"<style>(.*?)</style>", auto, re.S).group(1)
    assert all(
        rule.startswith("#first .")
        for rule in re.findall(r"[#.][^{}]*(?=\{[a-z]+:)", rules.replace("\n", " "))
        if rule.strip()
    )
    with pytest.raises(InvalidInputError, match="theme"):
        static_svg(grid(), theme="sepia")


def test_every_colour_can_be_told_from_its_background():
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pair in (*series.COLOURS.values(), *series.SPARE_COLOURS):
        for colour, background in zip(pair, ("#ffffff", "#0d1117"), strict=True):
            bright, dark = sorted((luminance(colour), luminance(background)), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 3, (pair, background)


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512"), (1024, "1k"), (4224, "4224"), (16384, "16k"), (1 << 20, "1M")]
)
def test_short_sequence_lengths(value, text):
    assert series.short(value) == text


@pytest.mark.parametrize("top", [0.003, 0.9, 7, 100, 763, 1171, 25000])
def test_ticks_are_round_and_few(top):
    step = series.nice_step(top, 4)
    assert 2 <= top / step <= 5
    assert float(f"{step:.0e}") == pytest.approx(step) or f"{step:.1e}".startswith("2.5")


def test_panels_of_sizes_that_are_no_numbers():
    """A record of somebody else may call a size anything: it gets its panel, behind those that count."""
    from gpu_accel.workbench.plots import throughput

    records = [timed(head_dim=size) for size in (128, 96, 64)]
    records[1] = replace(records[1], case=records[1].case | {"head_dim": "many"})
    shown = [text for text in texts(parse(static_svg(records))) if text and text.startswith("head dim")]
    assert [text.split(",")[0] for text in shown] == ["head dim 64", "head dim 128", "head dim many"]
    throughput(records)
