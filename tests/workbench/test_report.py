"""Reports hold every number and verdict they were given, escaped; generated blocks are replaced whole or not at all."""

from __future__ import annotations

import dataclasses
import html.parser
import re
import types

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing.records import GPU, correct, grid, number, quote, timed, verdict
from gpu_accel.workbench import report, series

PAPER = types.SimpleNamespace(id="p1", title="A <fast> paper", arxiv="1234.5678", year=2024, aliases=("p",), alias="p")
VERDICTS = [
    verdict("reproduced"),
    verdict("within 7%", value=[1.5, 2.0], interval=None),
    verdict("not measured (needs another GPU)", measured=None, interval=None, value=740, unit="tflops"),
    verdict("unsupported (no source found)", measured=None, interval=None, value=None, unit=""),
]


class Balanced(html.parser.HTMLParser):
    """Fails on a tag that is closed wrongly."""

    VOID = ("meta", "br", "rect", "line", "circle", "polygon", "polyline", "path")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "x", "–"),
        (740, "tflops", "740 TFLOP/s"),
        ([1.5, 2.0], "x", "1.5 to 2 x"),
        (3.2e-4, "1", "3.2e-4"),
        (0.0123456, "", "0.01235"),
        (123456, "bytes", "123456 bytes"),
        (0, "1", "0"),
        ("fast", "", "fast"),
    ],
)
def test_numbers_are_written_for_people(value, unit, text):
    assert report.number(value, unit) == text


def test_summary_counts():
    assert report.summary(VERDICTS) == "4 claims: 1 reproduced, 1 within 25%, 1 not measured, 1 unsupported"
    assert report.summary(VERDICTS[:1]) == "1 claim: 1 reproduced"


def test_markdown_has_each_claim_and_each_result():
    text = report.markdown(PAPER, [*grid(), correct(error=1.5e-3), correct()], VERDICTS)
    rows = [line for line in text.splitlines() if line.startswith("| faster")]
    assert len(rows) == len(VERDICTS)
    assert rows[0] == "| faster \\| than <before> | Section 1 | 1.5 x | 1.5 x [1.4 to 1.6] | reproduced |"
    assert "not measured (needs another GPU)" in rows[2]
    assert "| 64 | full | gpu-accel, plain Triton | 200 | 300 | 400 |" in text
    assert f"*Measured on {GPU}, 2026-11-27, commit abcdef0*" in text
    assert "| forward | gpu-accel, plain Triton | 2 | 0.0015 | 0.002 | max_abs |" in text  # the worst of two
    assert "gpu-accel run p" in text


def test_tables_never_join_gpus_or_precisions():
    records = [timed(), timed(gpu="Other GPU 2"), timed(dtype="fp16")]
    text = report.markdown(PAPER, records, [])
    assert text.count("### TFLOP/s") == 3
    assert "*Measured on Other GPU 2, 2026-11-27" in text


def test_passes_of_one_experiment_are_tables_of_their_own():
    both = [
        number("peak_bytes", size, unit="bytes", **{"pass": name})
        for name, size in (("forward", 1e6), ("backward", 3e6))
    ]
    text = report.markdown(PAPER, both, [])
    assert "### peak bytes: memory · forward · bf16" in text and "### peak bytes: memory · backward · bf16" in text


def test_a_report_without_records_says_so():
    assert "Nothing is measured yet." in report.markdown(PAPER, [], VERDICTS)
    assert "Nothing is measured yet." in report.html(PAPER, [], VERDICTS)


def test_html_is_balanced_escaped_and_self_contained():
    claims = [quote(300.0)]
    records = [
        *grid(),
        *grid(dtype="fp16"),
        number("rmse", 1e-2, dtype="e4m3"),
        number("peak_bytes", 1e6, unit="bytes"),
    ]
    page = report.html(PAPER, records, VERDICTS, claims=claims)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    assert "A &lt;fast&gt; paper" in page and "<fast>" not in page
    assert "why &amp; how" in page
    assert 'src="' not in page and "@import" not in page
    assert page.count("<svg ") == 2 and 'id="figure-0"' in page and 'id="figure-1"' in page
    assert "quoted from arXiv:1234.5678" in page
    ids = [part.split('"')[0] for part in page.split(' id="')[1:] if not part.startswith("c1")]
    assert len(ids) == len(set(ids))


def test_cells_of_a_figure_fold_and_stay_complete():
    cells = [verdict("not measured (no run)", measured=None, where="Figure 5", figure="fig5") for _ in range(30)]
    text = report.claims_html([*VERDICTS, *cells])
    parser = Balanced()
    parser.feed(text)
    assert not parser.open
    assert text.count("<details>") == 1 and "<b>Figure 5</b>: 30 claims: 30 not measured" in text
    assert text.count("<tr id=") == 30 + len(VERDICTS)
    assert text.index("faster") < text.index("<details>")


def test_long_reasons_wrap_below_a_verdict_that_does_not():
    text = report.claims_html([verdict("not measured (no record; `gpu-accel run p --precision fp8` measures it)")])
    words = re.findall(r"white-space:nowrap[^>]*>(.*?)</span>(?:[^<]*</span>)?", text)
    assert any("not measured" in text[m.start() : m.end() + 60] for m in re.finditer("white-space:nowrap", text))
    assert all(len(re.sub("<[^>]*>", "", word)) < 20 for word in words), words
    assert "`" not in re.sub(r'title="[^"]*"', "", text) and "<code>" in text and "min-width:22em" in text


def test_charts_come_before_the_ledger_and_forward_before_backward():
    page = report.html(PAPER, [*grid(**{"pass": "backward"}), *grid()], VERDICTS)
    places = [page.index(part) for part in (">Forward ·", ">Backward ·", "<h2>Claims", "<h2>Results")]
    assert places == sorted(places)
    assert ". Measured on" in page


@pytest.mark.parametrize(
    ("shown", "parts"),
    [
        ("reproduced", ("reproduced", "")),
        ("within 20%, above", ("within 20%", "above")),
        ("not reproduced: above, 1.8 to 2.1", ("not reproduced", "above, 1.8 to 2.1")),
        ("not measured (needs a (large) GPU)", ("not measured", "needs a (large) GPU")),
        ("unsupported (no source found)", ("unsupported", "no source found")),
    ],
)
def test_a_verdict_splits_into_word_and_reason(shown, parts):
    assert report.split_word(shown) == parts


def test_what_the_papers_own_figures_decide_is_counted_and_folded_apart():
    inside = [verdict(word, internal=True) for word in ("reproduced", "reproduced", "within 3%", "not reproduced")]
    assert (
        report.summary([*VERDICTS, *inside])
        == report.summary(VERDICTS) + "; the paper against itself: 2 hold, 2 do not"
    )
    assert report.summary(inside) == "the paper against itself: 2 hold, 2 do not"
    text = report.claims_html([*VERDICTS, *inside])
    assert "own figures</b>: the paper against itself: 2 hold" in text.replace("&#x27;", "'")


def test_html_with_plotly_loads_it_once():
    pytest.importorskip("plotly")
    page = report.html(PAPER, [*grid(), *grid(dtype="fp16")], VERDICTS, plotly="cdn")
    assert page.count("<script charset") + page.count("cdn.plot.ly") >= 1
    assert page.count("https://cdn.plot.ly/plotly-") == 1
    with pytest.raises(InvalidInputError, match="plotly"):
        report.html(PAPER, [], [], plotly="inline")


def test_update_block_replaces_between_markers_only(tmp_path):
    file = tmp_path / "README.md"
    before = "# Title\n<!-- begin generated: table -->\nold\n<!-- end generated: table -->\nrest\n"
    file.write_text(before)
    file.chmod(0o644)
    assert report.update_block(file, "table", "new\n")
    assert file.read_text() == before.replace("old", "new")
    assert not report.update_block(file, "table", "new")
    assert file.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- begin generated: t -->",
        "<!-- end generated: t --> <!-- begin generated: t -->",
        "<!-- begin generated: t --><!-- begin generated: t --><!-- end generated: t -->",
    ],
    ids=["none", "no-end", "reversed", "twice"],
)
def test_update_block_refuses_a_file_without_one_pair(tmp_path, text):
    file = tmp_path / "README.md"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match="exactly one pair"):
        report.update_block(file, "t", "new")
    assert file.read_text() == text


def cycles(value, *, level="l1", size=32, impl="kernel", time="2026-11-27T12:00:00+00:00"):
    from gpu_accel.workbench.records import Record

    return Record(
        kind="measured", paper="p", experiment="latency", case={"level": level, "footprint_kb": size, "width": 4},
        impl=impl, metric="latency", unit="clk", median=value, env={"gpu": GPU}, time=time,
        checked={"error": 0.0, "bound": 0.0, "metric": "wrong elements"},
    )  # fmt: skip


def test_work_without_sequences_has_a_row_for_each_case():
    again = cycles(31.0, time="2026-11-28T12:00:00+00:00")
    found = [cycles(32.0), cycles(270.0, level="l2", size=2048), cycles(40.0, impl="other"), again]
    headings, rows = report.pivot(found, "latency")
    assert headings == ["level", "footprint kb", "implementation", "latency, clk"], "what never differs is left out"
    assert rows == [["l2", "2048", "kernel", "270"], ["l1", "32", "other", "40"], ["l1", "32", "kernel", "31"]]


def test_sizes_that_are_words_are_shown_and_break_nothing():
    """In records of somebody else's case a size may be anything."""
    one = timed()
    odd = [dataclasses.replace(one, case=one.case | {name: "x"}) for name in ("seqlen_q", "head_dim")]
    headings, rows = report.pivot([one, *odd], "tflops")
    assert any("x" in str(cell) for row in (headings, *rows) for cell in row)
    assert series.short("x") == "x" and sorted([None, "x", 2, 0.5], key=series.in_order) == [0.5, 2, "x", None]
