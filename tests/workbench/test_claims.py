"""Verdicts: each word at its boundary, what may settle a claim and what may not, and what a verdict must say."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from gpu_accel.workbench.claims import WORDS, judge, judge_all, summary
from gpu_accel.workbench.ledger import load_claims
from gpu_accel.workbench.records import Record, append_records, read_records

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM", "driver": "580.95.05", "torch": "2.11.0+cu130"}
H100 |= {"cudnn": "9.19.0", "clock_mhz": {"median": 1702.0, "min": 1600.0, "max": 1755.0}, "throttle": ["sw_power_cap"]}
PCIE = {"gpu": "NVIDIA H100 PCIe", "sku": "H100 PCIe"}
NOON = "2026-11-27T12:00:00+00:00"
OURS = ("hopper", "portable")


def shape(**changes):
    known = {"pass": "forward", "batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, "heads": 16, "heads_kv": 16}
    return {**known, "head_dim": 128, "causal": False, "dtype": "fp16", "input": "normal", **changes}


def timed(impl="hopper", *, tflops=600.0, ratio=None, env=H100, when=NOON, mode="burst", l2="flushed", **case):
    """A measured time that gives ``tflops``; ``ratio`` = {other: (median, low, high)}."""
    ms = 1e12 / tflops / 1e9
    ratios = {name: {"median": m, "ci95": [low, high]} for name, (m, low, high) in (ratio or {}).items()}
    return Record(
        kind="measured",
        paper="toy",
        experiment="forward",
        case=shape(**case),
        impl=impl,
        metric="time",
        unit="ms",
        median=ms,
        p20=ms * 0.99,
        p80=ms * 1.01,
        samples=(ms * 0.99, ms, ms * 1.01),
        work={"flops": 1e12},
        checked={"error": 1e-3, "bound": 2e-3, "metric": "max_abs"},
        ratio_to=ratios,
        env=env,
        timing={"method": "events", "l2": l2, "mode": mode, "interleaved": list(ratios)},
        commit="0123456789",
        time=when,
    )


def rmse(value, impl="hopper", *, kind="checked", metric="rmse", unit="1", env=None, **case):
    return Record(
        kind=kind,
        paper="toy",
        experiment="forward",
        case=shape(**case),
        impl=impl,
        metric=metric,
        unit=unit,
        median=value,
        checked={"error": 1e-3, "bound": 2e-3, "metric": "max_abs"},
        env=env or ({} if kind == "checked" else H100),
        time=NOON,
    )


def sure(ratio):
    """A ratio with an interval of 1 %."""
    return (ratio, ratio * 0.995, ratio * 1.005)


HEAD = """
[[claim]]
id = "c"
where = "section 1"
statement = "as stated"
source = "arXiv:0000.00001"
"""
SPEED = HEAD + 'value = 600\nunit = "tflops"\ndirection = "at_least"\n'
FASTER = HEAD + 'kind = "qualitative"\nmeasure = {experiment = "forward", impl = "ours", predicate = "faster", '
RATIO = HEAD + 'unit = "x"\n'
SINGLE = 'measure = {experiment = "forward", impl = "ours", case = {seqlen_q = 4096}}\n'


@pytest.fixture
def claim(tmp_path):
    def load(text, name="c"):
        file = tmp_path / "claims.toml"
        file.write_text(text)
        claims = load_claims(file, paper="toy", alias="t", ours=OURS)
        return next(one for one in claims if one.id == name)

    return load


# -- words of a single value


@pytest.mark.parametrize(
    ("direction", "tflops", "word"),
    [
        ("at_least", 601, "reproduced"),
        ("at_least", 900, "reproduced"),
        ("at_least", 570.1, "reproduced"),  # the tolerance is 5 %
        ("at_least", 569, "within 6%"),
        ("at_least", 540, "within 10%"),
        ("at_least", 451, "within 25%"),
        ("at_least", 449, "not reproduced"),
        ("at_most", 400, "reproduced"),
        ("at_most", 629, "reproduced"),
        ("at_most", 660, "within 10%"),
        ("at_most", 751, "not reproduced"),
        ("about", 571, "reproduced"),
        ("about", 629, "reproduced"),
        ("about", 660, "within 10%"),
        ("about", 540, "within 10%"),
        ("about", 400, "not reproduced"),
        ("about", 800, "not reproduced"),
    ],
)
def test_words_at_their_boundaries(claim, direction, tflops, word):
    verdict = judge(claim(SPEED.replace("at_least", direction) + SINGLE), [timed(tflops=tflops)])
    assert verdict.word == word
    assert verdict.measured == pytest.approx(tflops)
    low, high = verdict.interval
    assert low < tflops < high


@pytest.mark.parametrize(
    ("tflops", "word"), [(610, "reproduced"), (575, "reproduced"), (676, "within 8%"), (400, "not reproduced")]
)
def test_a_single_value_between_two_ends(claim, tflops, word):
    text = SPEED.replace("600", "[600, 630]").replace("at_least", "between")
    assert judge(claim(text + SINGLE), [timed(tflops=tflops)]).word == word


def test_the_tolerance_of_the_claim_counts(claim):
    assert judge(claim(SPEED + "tolerance = 0.1\n" + SINGLE), [timed(tflops=545)]).word == "reproduced"
    assert judge(claim(SPEED + "tolerance = 0.0\n" + SINGLE), [timed(tflops=599)]).word == "within 1%"


def test_a_limit_inside_the_interval_is_said(claim):
    assert "across the limit" in judge(claim(SPEED + SINGLE), [timed(tflops=571)]).detail
    assert "across the limit" not in judge(claim(SPEED + SINGLE), [timed(tflops=620)]).detail


# -- what settles a claim


def test_the_best_own_implementation_settles_and_is_named(claim):
    both = [timed("portable", tflops=400), timed("hopper", tflops=620), timed("sdpa-cudnn", tflops=900)]
    verdict = judge(claim(SPEED + SINGLE), both)
    assert verdict.measured == pytest.approx(620) and [r.impl for r in verdict.records] == ["hopper"]
    assert "hopper on H100 SXM" in verdict.detail
    only_portable = judge(claim(SPEED + SINGLE.replace("ours", "portable")), both)
    assert only_portable.measured == pytest.approx(400)


def test_the_newest_run_counts_even_if_it_is_slower(claim):
    old = timed(tflops=700, when="2026-11-26T12:00:00+00:00")
    assert judge(claim(SPEED + SINGLE), [timed(tflops=500), old]).measured == pytest.approx(500)


def test_other_papers_experiments_and_cases_do_not_count(claim):
    for other in (timed(seqlen_q=8192), timed("sdpa-flash")):
        verdict = judge(claim(SPEED + SINGLE), [other])
        assert verdict.word == "not measured (no record; `gpu-accel run t forward` measures it)"
        assert verdict.measured is None and verdict.records == ()
    elsewhere = json.loads(timed().to_json())
    for changes in ({"paper": "other"}, {"experiment": "backward"}):
        record = Record.from_json(json.dumps(elsewhere | changes))
        assert judge(claim(SPEED + SINGLE), [record]).category == "not measured"


def test_only_measured_records_settle_a_speed(claim):
    fields = json.loads(timed().to_json()) | {"samples": [], "checked": None}
    modelled = Record.from_json(json.dumps(fields | {"kind": "modelled"}))
    quoted = Record.from_json(json.dumps(fields | {"kind": "quoted", "source": "arXiv:1"}))
    assert "modelled records only" in judge(claim(SPEED + SINGLE), [modelled]).word
    assert "quoted records only" in judge(claim(SPEED + SINGLE), [quoted]).word
    assert judge(claim(SPEED + SINGLE), [modelled, quoted, timed()]).word == "reproduced"


def test_another_variant_of_the_gpu_is_refused(claim):
    needs = claim(SPEED + 'needs = ["H100 SXM"]\n' + SINGLE)
    verdict = judge(needs, [timed(env=PCIE)])
    assert verdict.category == "not measured"
    assert "recorded on H100 PCIe only" in verdict.word and "on h100-sxm" in verdict.word
    both = judge(needs, [timed(env=PCIE, tflops=900, when="2026-11-28T12:00:00+00:00"), timed(tflops=601)])
    assert both.measured == pytest.approx(601)
    any_h100 = claim(SPEED + 'needs = ["h100"]\n' + SINGLE)
    assert judge(any_h100, [timed(env=PCIE)]).word == "reproduced"
    mig = {"gpu": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sku": "H100 SXM MIG 1g.10gb"}
    h200 = {"gpu": "NVIDIA H200", "sku": "H200 SXM"}
    for env in (mig, h200):
        assert judge(any_h100, [timed(env=env)]).category == "not measured"


def test_gpus_are_never_mixed_in_one_verdict(claim):
    text = RATIO + "value = [1.4, 2.1]\n"
    text += 'measure = {experiment = "forward", impl = "ours", ratio_to = "fa2", aggregate = "range"}\n'
    records = [timed(ratio={"fa2": sure(r)}, seqlen_q=n) for r, n in ((1.5, 512), (2.0, 1024))]
    records.append(timed(ratio={"fa2": sure(3.0)}, seqlen_q=2048, env=PCIE))
    verdict = judge(claim(text), records)
    assert verdict.word == "reproduced" and verdict.measured == (1.5, 2.0)
    assert "also recorded on H100 PCIe" in verdict.detail


def test_bf16_may_stand_for_fp16_and_says_so(claim):
    text = SPEED + 'conditions = {dtype = "fp16"}\n' + SINGLE
    verdict = judge(claim(text), [timed(dtype="bf16")])
    assert verdict.word == "reproduced" and "dtype: fp16 in the claim, bf16 here" in verdict.differs
    exact = judge(claim(text), [timed(dtype="bf16", tflops=900), timed(dtype="fp16", tflops=610)])
    assert exact.measured == pytest.approx(610) and not exact.differs
    fp8 = judge(claim(text), [timed(dtype="e4m3", tflops=900)])
    assert "recorded with dtype e4m3" in fp8.word and "--precision fp16" in fp8.word


def test_an_ambiguous_case_is_refused_not_guessed(claim):
    verdict = judge(claim(SPEED + SINGLE), [timed(head_dim=64), timed(head_dim=128)])
    assert verdict.word == "not measured (2 cases fit and differ in head_dim; the claim must say which)"


def test_burst_and_sustained_are_not_mixed(claim):
    records = [timed(tflops=610), timed(tflops=500, mode="sustained", when="2026-11-28T12:00:00+00:00")]
    assert judge(claim(SPEED + SINGLE), records).measured == pytest.approx(610)
    only = judge(claim(SPEED + SINGLE), records[1:])
    assert only.measured == pytest.approx(500) and "load: sustained here" in only.differs


def test_two_ways_of_flushing_are_not_mixed(claim):
    fits = claim(RANGE + ", case = {seqlen_q = [512, 1024, 2048]}}\n")
    ratio = {"fa2": sure(1.7)}
    old = [timed(ratio=ratio, seqlen_q=n) for n in (512, 1024)]
    new = [timed(ratio=ratio, seqlen_q=n, l2="clean", when="2026-11-28T12:00:00+00:00") for n in (1024, 2048)]
    assert "1 of 3 cells have no record" in judge(fits, old + new).word, "each way has two cells, together three"
    old.append(timed(ratio=ratio, seqlen_q=2048))
    verdict = judge(fits, old + new)
    assert verdict.word == "reproduced" and {r.timing["l2"] for r in verdict.records} == {"flushed"}
    assert judge(fits, [*new, timed(ratio=ratio, seqlen_q=512, l2="clean")]).word == "reproduced"


# -- ratios


def test_a_newer_run_without_the_rival_leaves_an_older_ratio_standing(claim):
    from cli import ledger

    text = RATIO + 'value = 1.5\nconditions = {dtype = "fp16"}\n'
    text += 'measure = {experiment = "forward", impl = "ours", ratio_to = "sdpa-flash"}\n'
    one = claim(text)
    both = timed(ratio={"sdpa-flash": (1.5, 1.49, 1.51)})
    alone = timed(tflops=700, when="2026-11-28T12:00:00+00:00")
    later = timed(ratio={"sdpa-flash": (1.6, 1.59, 1.61)}, when="2026-11-29T12:00:00+00:00")
    paper = SimpleNamespace(claims=lambda: [one], records=lambda: [both, alone])
    (verdict,) = ledger.judge_all(paper, paper.records())
    assert verdict.word == "reproduced" and verdict.records == (both,)
    assert judge(one, [both, alone, later]).records == (later,)


def test_a_ratio_needs_a_common_run(claim):
    text = RATIO + 'value = 1.5\nconditions = {dtype = "fp16"}\n'
    text += 'measure = {experiment = "forward", impl = "ours", ratio_to = "sdpa-flash"}\n'
    apart = [timed(tflops=600), timed("sdpa-flash", tflops=400)]
    verdict = judge(claim(text), apart)
    assert verdict.category == "not measured"
    assert "hopper and sdpa-flash were not interleaved" in verdict.word
    assert "`gpu-accel run t forward --precision fp16`" in verdict.word
    together = judge(claim(text), [timed(ratio={"sdpa-flash": sure(1.52)})])
    assert together.word == "reproduced" and together.measured == 1.52
    assert together.interval == pytest.approx((1.52 * 0.995, 1.52 * 1.005))
    assert "95 % interval" in together.detail


def test_a_ratio_kept_by_the_other_side_is_inverted(claim):
    text = RATIO + 'value = 2.0\nmeasure = {experiment = "forward", impl = "hopper", ratio_to = "sdpa-flash"}\n'
    verdict = judge(claim(text), [timed(), timed("sdpa-flash", tflops=300, ratio={"hopper": (0.5, 0.4, 0.625)})])
    assert verdict.measured == 2.0 and verdict.interval == (1.6, 2.5)


def test_ratios_of_errors_need_no_common_run(claim):
    text = (
        RATIO + 'value = 2.6\nmeasure = {experiment = "forward", impl = "ours", ratio_to = "plain", metric = "rmse"}\n'
    )
    verdict = judge(claim(text), [rmse(1e-2), rmse(2.6e-2, "plain")])
    assert verdict.word == "reproduced" and verdict.measured == pytest.approx(2.6)
    assert {r.impl for r in verdict.records} == {"hopper", "plain"}
    assert judge(claim(text), [rmse(1e-2), rmse(2.6e-2, "plain", seqlen_q=64)]).category == "not measured"


# -- several cells


def cells(*ratios, other="fa2"):
    return [timed(ratio={other: sure(r)}, seqlen_q=2**i) for i, r in enumerate(ratios, 9)]


RANGE = (
    RATIO
    + 'value = [1.5, 2.0]\nmeasure = {experiment = "forward", impl = "ours", ratio_to = "fa2", aggregate = "range"'
)


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ((1.5, 1.7, 2.0), "reproduced"),
        ((1.43, 2.09), "reproduced"),  # tolerance 5 %
        ((1.3, 1.7, 2.2), "not reproduced"),
        ((1.42, 1.7), "not reproduced"),
        ((1.6, 2.11), "not reproduced"),  # better than claimed is not what was claimed
    ],
)
def test_a_range_holds_only_with_both_ends(claim, ratios, word):
    verdict = judge(claim(RANGE + "}\n"), cells(*ratios))
    assert verdict.word == word and verdict.measured == (min(ratios), max(ratios))
    assert f"{min(ratios):.4g} to {max(ratios):.4g} x over {len(ratios)} cells" in verdict.detail
    assert len(verdict.records) == len(ratios)


def test_listed_cells_must_all_be_there(claim):
    listed = claim(RANGE + ", case = {seqlen_q = [512, 1024, 2048]}}\n")
    assert judge(listed, cells(1.5, 1.7, 2.0)).word == "reproduced"
    missing = judge(listed, cells(1.5, 1.7))
    assert missing.word == "not measured (1 of 3 cells have no record; `gpu-accel run t forward`)"
    refuted = judge(listed, cells(1.1, 1.7))  # what is missing cannot repair this
    assert refuted.word == "not reproduced" and "1 of 3 cells have no record" in refuted.detail


@pytest.mark.parametrize(
    ("aggregate", "direction", "ratios", "word"),
    [
        ("max", "at_least", (1.2, 2.0), "reproduced"),
        ("max", "at_least", (1.2, 1.3), "not measured"),
        ("max", "at_most", (1.2, 2.0), "not reproduced"),
        ("max", "at_most", (1.2, 1.3), "not measured"),
        ("min", "at_least", (1.0, 2.0), "not reproduced"),
        ("min", "at_least", (1.6, 2.0), "not measured"),
        ("min", "at_most", (1.2, 2.0), "reproduced"),
        ("median", "at_least", (1.6, 2.0), "not measured"),
    ],
)
def test_partial_evidence_decides_only_what_it_can(claim, aggregate, direction, ratios, word):
    text = RATIO + f'value = 1.5\ndirection = "{direction}"\nmeasure = {{experiment = "forward", impl = "ours", '
    text += f'ratio_to = "fa2", aggregate = "{aggregate}", case = {{seqlen_q = [512, 1024, 2048]}}}}\n'
    assert judge(claim(text), cells(*ratios)).category == word


@pytest.mark.parametrize(("aggregate", "value"), [("max", 2.0), ("min", 1.2), ("median", 1.7)])
def test_aggregates(claim, aggregate, value):
    text = RATIO + f'value = {value}\nmeasure = {{experiment = "forward", impl = "ours", ratio_to = "fa2", '
    verdict = judge(claim(text + f'aggregate = "{aggregate}"}}\n'), cells(1.7, 2.0, 1.2))
    assert verdict.word == "reproduced" and verdict.measured == value


def test_where_selects_cells(claim):
    text = FASTER + 'than = "cudnn", where = "seqlen_q >= 1024 and causal == false"}\n'
    records = [*cells(0.8, 1.2, 1.3, other="cudnn"), timed(ratio={"cudnn": sure(0.5)}, causal=True)]
    verdict = judge(claim(text), records)
    assert verdict.word == "reproduced" and verdict.measured == 1.2 and "2 of 2 cells" in verdict.detail


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ((1.1, 1.5), "reproduced"),
        ((1.0, 1.5), "within 2%"),  # equal within noise in one cell
        ((0.9, 1.5), "not reproduced"),
        ((1.1, 0.97), "not reproduced"),
    ],
)
def test_faster_means_in_every_cell_and_beyond_noise(claim, ratios, word):
    verdict = judge(claim(FASTER + 'than = "cudnn"}\n'), cells(*ratios, other="cudnn"))
    assert verdict.word == word and verdict.measured == min(ratios)
    if word == "not reproduced":
        assert f"seqlen_q {2 ** (9 + ratios.index(min(ratios)))}: {min(ratios):.4g} x" in verdict.detail


def test_an_ambiguous_interval_is_no_proof_either_way(claim):
    unsure = [timed(ratio={"cudnn": (0.93, 0.7, 1.2)})]
    assert judge(claim(FASTER + 'than = "cudnn"}\n'), unsure).word == "within 7%"


def test_lower_and_correct(claim):
    lower = FASTER.replace('"faster"', '"lower", metric = "rmse"') + 'than = "plain"}\n'
    assert judge(claim(lower), [rmse(1e-2), rmse(2e-2, "plain")]).word == "reproduced"
    assert judge(claim(lower), [rmse(3e-2), rmse(2e-2, "plain")]).word == "not reproduced"
    correct = judge(claim(FASTER.replace('"faster", ', '"correct"}\n')), [timed()])
    assert correct.word == "reproduced" and "max_abs 0.001 of 0.002 allowed" in correct.detail
    assert judge(claim(FASTER.replace('"faster", ', '"correct"}\n')), []).category == "not measured"


# -- numerics


def test_numerics_may_be_settled_on_a_cpu_unless_a_gpu_is_needed(claim):
    text = HEAD + 'value = 9e-3\nunit = "1"\ndirection = "at_most"\nNEEDS'
    text += 'measure = {experiment = "forward", impl = "ours", metric = "rmse"}\n'
    verdict = judge(claim(text.replace("NEEDS", "")), [rmse(9.1e-3)])
    assert verdict.word == "reproduced" and "checked on a CPU" in verdict.detail
    needs = judge(claim(text.replace("NEEDS", 'needs = ["h100"]\n')), [rmse(9.1e-3)])
    assert "checked records only" in needs.word
    both = judge(claim(text.replace("NEEDS", "")), [rmse(8e-3), rmse(9e-3, kind="measured")])
    assert both.measured == 9e-3  # a GPU's record comes before a CPU's


def test_memory_is_not_settled_on_a_cpu_and_units_must_agree(claim):
    text = HEAD + 'value = 1000\nunit = "bytes"\ndirection = "at_most"\n'
    text += 'measure = {experiment = "forward", impl = "ours", metric = "peak_bytes"}\n'
    on_cpu = rmse(500.0, metric="peak_bytes", unit="bytes")
    assert "checked records only" in judge(claim(text), [on_cpu]).word
    assert judge(claim(text), [rmse(500.0, metric="peak_bytes", unit="bytes", kind="measured")]).word == "reproduced"
    wrong_unit = rmse(0.5, metric="peak_bytes", unit="MiB", kind="measured")
    assert "recorded in MiB only" in judge(claim(text), [wrong_unit]).word


# -- figures and the paper against itself

FIGURE = """
[[figure]]
id = "fig1a"
where = "Figure 1a"
source = "arXiv:0000.00001"
unit = "tflops"
experiment = "forward"
axis = "seqlen_q"
columns = [512, 1024]
tokens = 16384
case = {head_dim = 64, causal = false}
conditions = {dtype = "fp16", gpu = "H100 SXM", clocks = "locked 1830 MHz"}
needs = ["h100-sxm"]
rows = [
  {label = "FA3", impl = "ours", values = [300, 400]},
  {label = "cuDNN", impl = "sdpa-cudnn", version = "9.1.1", values = [250, 410]},
  {label = "Triton", unmeasurable = "that kernel is not run here", values = [200, "-"]},
]
"""
ARITHMETIC = HEAD + 'internal = true\nunit = "x"\nvalue = VALUE\n'
ARITHMETIC += 'measure = {figure = "fig1", impl = "FA3", ratio_to = "cuDNN", aggregate = "range"}\n' + FIGURE


def test_cells_of_a_figure_are_claims(claim):
    cell = claim(FIGURE, "fig1a.fa3.512")
    record = timed(tflops=290, seqlen_q=512, seqlen_k=512, batch=32, head_dim=64)
    assert judge(cell, [record]).word == "reproduced"
    assert judge(cell, [timed(tflops=290, seqlen_q=512, seqlen_k=512, batch=8, head_dim=64)]).category == "not measured"


def test_a_peer_is_settled_by_the_peer_and_the_version_is_said(claim):
    record = timed("sdpa-cudnn", tflops=300, seqlen_q=512, seqlen_k=512, batch=32, head_dim=64)
    verdict = judge(claim(FIGURE, "fig1a.cudnn.512"), [record])
    assert verdict.word == "reproduced"
    assert "baseline: cuDNN 9.1.1 in the claim, sdpa-cudnn (cuDNN 9.19.0) here" in verdict.differs
    assert "clocks: locked 1830 MHz in the claim, not locked here (1702 MHz sampled)" in verdict.differs


def test_a_row_that_nothing_runs_is_not_measured(claim):
    assert judge(claim(FIGURE, "fig1a.triton.512"), []).word == "not measured (that kernel is not run here)"


@pytest.mark.parametrize(("value", "word"), [("[0.95, 1.2]", "reproduced"), ("[1.1, 1.2]", "not reproduced")])
def test_the_paper_against_its_own_figures(claim, value, word):
    verdict = judge(claim(ARITHMETIC.replace("VALUE", value)), [timed(tflops=900)])
    assert verdict.word == word
    assert verdict.measured == pytest.approx((400 / 410, 300 / 250))
    assert "arithmetic on the paper's own figures (fig1), nothing was run" in verdict.detail
    assert {r.kind for r in verdict.records} == {"quoted"} and len(verdict.records) == 4


def test_an_ordering_against_the_papers_own_figures(claim):
    text = HEAD + 'kind = "qualitative"\ninternal = true\nmeasure = {predicate = "faster", figure = ["fig1a"], '
    text += 'impl = "FA3", than = "cuDNN"WHERE}\n' + FIGURE
    assert judge(claim(text.replace("WHERE", ', where = "seqlen_q < 1024"')), []).word == "reproduced"
    verdict = judge(claim(text.replace("WHERE", "")), [])
    assert verdict.word == "not reproduced" and "1024" in verdict.detail and "1 of 2 cells" in verdict.detail


def test_the_greatest_cell_of_a_figure(claim):
    text = HEAD + 'internal = true\nunit = "tflops"\nvalue = 400\n'
    text += 'measure = {figure = "fig1a", impl = "FA3", aggregate = "max"}\n' + FIGURE
    verdict = judge(claim(text), [])
    assert verdict.word == "reproduced" and verdict.measured == 400 and verdict.records[0].note == "fig1a.fa3.1024"


# -- the seed, and what a verdict carries


def test_claims_of_the_seed(claim):
    seed = SPEED.replace("arXiv:0000.00001", "seed")
    assert judge(claim(seed), [timed()]).word == "unsupported (no source found)"
    measured = judge(claim(seed + SINGLE), [timed()])
    assert measured.word == "reproduced" and "names no source" in measured.detail
    assert judge(claim(seed + 'unmeasurable = "no such device"\n'), []).word == "not measured (no such device)"


def test_a_verdict_carries_its_records_and_conditions(claim, tmp_path):
    results = tmp_path / "results.jsonl"
    append_records(results, [timed("portable", tflops=100), timed(tflops=610)])
    text = SPEED + 'conditions = {gpu = "H200 SXM", torch = "2.3.0"}\ncontradicts = ["fig1a"]\nnote = "see text"\n'
    verdict = judge(claim(text + SINGLE + FIGURE), read_records(results))
    data = verdict.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["records"] == [f"{results}:2"] and data["verdict"] == "reproduced" and data["value"] == 600
    assert data["differs"] == [
        "gpu: H200 SXM in the claim, H100 SXM here",
        "torch: 2.3.0 in the claim, 2.11.0+cu130 here",
    ]
    for said in (
        "610 tflops (20th to 80th percentile",
        "hopper on H100 SXM, driver 580.95.05, torch 2.11.0+cu130, SM clock 1702 MHz, throttled (sw_power_cap)",
        "L2 flushed, commit 0123456",
        "contradicts fig1a",
        "see text",
    ):
        assert said in verdict.detail


@pytest.mark.parametrize(
    ("way", "tflops", "shown"),
    [
        ("about", 700, "within 17%, above"),
        ("about", 540, "within 10%, below"),
        ("about", 1000, "not reproduced, above"),
        ("at_most", 700, "within 17%, above"),
        ("at_least", 100, "not reproduced, below"),
        ("at_least", 900, "reproduced"),
    ],
)
def test_a_miss_says_on_which_side(claim, way, tflops, shown):
    verdict = judge(claim(SPEED.replace("at_least", way) + SINGLE), [timed(tflops=tflops)])
    assert verdict.shown == shown and not verdict.internal
    assert verdict.as_dict()["side"] == verdict.side


def test_summary_counts_every_word(claim):
    one = claim(SPEED + SINGLE)
    speeds = [[timed(tflops=t)] for t in (600, 540, 100)]
    verdicts = [judge(one, records) for records in (*speeds, [], [])]
    verdicts += judge_all([claim(SPEED.replace("arXiv:0000.00001", "seed"))], [timed()])
    assert summary(verdicts) == dict(zip(WORDS, (1, 1, 1, 2, 1), strict=True))
    assert [v.settled for v in verdicts] == [True, True, True, False, False, False]
    assert summary([]) == dict.fromkeys(WORDS, 0)


# -- numbers of another card


def on_h800(value, unit, by, measure, extra=""):
    return (
        HEAD + f'value = {value}\nunit = "{unit}"\n{extra}'
        f'measure = {{experiment = "forward", impl = "ours", {measure}}}\n'
        f'scale = {{from = "h800-pcie", by = "{by}"}}\n'
    )


def cycles(value, *, unit="clk", metric="latency", env=H100):
    return Record(
        kind="measured", paper="toy", experiment="forward", case=shape(), impl="hopper", metric=metric, unit=unit,
        median=value, checked={"error": 0.0, "bound": 0.0, "metric": "max_abs"}, env=env, time=NOON,
    )  # fmt: skip


def test_a_rate_is_scaled_to_the_card_of_the_record_and_says_so(claim):
    text = on_h800(729.3, "tflops", "fp16", 'case = {dtype = "fp16"}')
    verdict = judge(claim(text), [timed(tflops=950.0)])
    factor = 989.4 / 756.5
    assert verdict.word == "reproduced" and f"times {factor:.4g}" in verdict.detail
    assert "h800-pcie" in verdict.detail and "H100 SXM" in verdict.detail
    assert verdict.claim.value == 729.3, "the claim itself stays as the paper has it"
    assert judge(claim(text), [timed(tflops=729.3)]).word == "within 24%"
    assert judge(claim(text), [timed(tflops=729.3, env=PCIE)]).word == "reproduced"


def test_sms_times_clock_scale_too(claim):
    text = on_h800(100, "B/clk", "sm_clock", 'metric = "rate"')
    factor = 132 * 1980 / (114 * 1755)
    found = judge(claim(text), [cycles(100 * factor, unit="B/clk", metric="rate")])
    assert found.word == "reproduced" and f"{factor:.4g}" in found.detail


def test_a_card_without_profile_cannot_be_scaled_to(claim):
    text = on_h800(729.3, "tflops", "fp16", 'case = {dtype = "fp16"}')
    found = judge(claim(text), [timed(env={"gpu": "Strange 9000", "sku": "Strange 9000"})])
    assert found.category == "not measured" and "cannot be scaled" in found.word


def test_cycles_compare_across_cards_as_they_are(claim):
    text = HEAD + 'value = 29\nunit = "clk"\nmeasure = {experiment = "forward", impl = "ours", metric = "latency"}\n'
    assert judge(claim(text), [cycles(29.5)]).word == "reproduced"
    found = judge(claim(text), [cycles(33.0)])
    assert (found.word, found.side) == ("within 14%", "above")
    assert judge(claim(text), [cycles(29.0, metric="other")]).category == "not measured"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (on_h800(1, "tflops", "fp17", "aggregate = 'max'"), "fp17"),
        (on_h800(1, "tflops", "fp64", "aggregate = 'max'"), "no fp64 peak"),
        (on_h800(1, "tflops", "fp16", "aggregate = 'max'").replace("h800-pcie", "h900"), "h900"),
        (on_h800(2, "x", "fp16", 'ratio_to = "fa2"'), "'scale' is for a number"),
    ],
)
def test_a_scale_that_means_nothing_is_refused(text, message, claim):
    with pytest.raises(ValueError, match=message):
        claim(text)


# -- two cases of one implementation


def between(change, value, unit="1", metric="latency"):
    return (
        HEAD + f'value = {value}\nunit = "{unit}"\nmeasure = {{experiment = "forward", impl = "hopper", '
        f'metric = "{metric}", case = {{causal = false}}, {change}}}\n'
    )


def two(metric="latency", unit="clk", first=150.0, second=100.0, env=H100):
    return [
        Record(
            kind="measured", paper="toy", experiment="forward", case=shape(causal=causal), impl="hopper", metric=metric,
            unit=unit, median=value, checked={"error": 0.0, "bound": 0.0, "metric": "max_abs"}, env=where, time=NOON,
        )
        for causal, value, where in ((False, first, H100), (True, second, env))
    ]  # fmt: skip


def test_a_case_over_another(claim):
    found = judge(claim(between("over = {causal = true}", 1.5)), two())
    assert found.word == "reproduced" and found.measured == 1.5 and len(found.records) == 2
    assert found.detail.startswith("1.5, against"), "a plain number has no unit to show"
    assert judge(claim(between("over = {causal = true}", 3)), two()).word == "not reproduced"
    rate = between("over = {causal = true}", 1.25, metric="tflops")
    assert judge(claim(rate), [timed(tflops=500), timed(tflops=400, causal=True)]).word == "reproduced"


def test_a_case_minus_another(claim):
    found = judge(claim(between("minus = {causal = true}", 50, unit="clk")), two())
    assert found.word == "reproduced" and found.measured == 50


def test_both_cases_must_be_there_and_of_one_gpu(claim):
    text = between("over = {causal = true}", 1.5)
    assert judge(claim(text), two()[:1]).category == judge(claim(text), two()[1:]).category == "not measured"
    assert "do not compare" in judge(claim(text), two(env=PCIE)).word


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (between("over = {causal = true}", 1, unit="clk"), "the unit is '1'"),
        (between("over = {causal = true}, minus = {causal = true}", 1), "goes with no other"),
        (between("over = {causal = true}, aggregate = 'max'", 1), "goes with no other"),
        (between("over = {dtype = 'fp16'}", 1), "must say what 'dtype' is"),
    ],
)
def test_comparisons_of_cases_that_mean_nothing_are_refused(text, message, claim):
    with pytest.raises(ValueError, match=message):
        claim(text)
