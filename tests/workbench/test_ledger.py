"""claims.toml is read strictly: every mistake is an error that names file, id and key."""

from __future__ import annotations

import time

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.claims import _miss
from gpu_accel.workbench.figures import quoted_records
from gpu_accel.workbench.ledger import Claim, Term, load_claims

CLAIM = """
[[claim]]
id = "speed"
where = "abstract"
statement = "fast"
source = "arXiv:0000.00001v2"
value = [1.5, 2.0]
unit = "x"
conditions = {dtype = "fp16"}
needs = ["H100 SXM"]
contradicts = ["fig1", "fig1.ours.1024"]
measure = {experiment = "forward", impl = "ours", ratio_to = "fa2", aggregate = "range", case = {head_dim = [64, 128]}}
"""
FIGURE = """
[[figure]]
id = "fig1"
where = "Figure 1"
source = "arXiv:0000.00001v2"
unit = "tflops"
experiment = "forward"
axis = "seqlen_q"
columns = [512, 1024, 4224]
tokens = 16384
case = {head_dim = 64}
conditions = {dtype = "fp16"}
rows = [
  {label = "Ours", impl = "ours", values = [1, 2.5, 3]},
  {label = "cuDNN 9", impl = "sdpa-cudnn", version = "9.1", values = [nan, "-", 3]},
  {label = "Triton", unmeasurable = "not run here", direction = "about", values = [7, 8, 9]},
]
"""
OTHER = """
[[claim]]
id = "order"
where = "section 4"
statement = "faster"
source = "seed"
kind = "qualitative"
measure = {experiment = "forward", impl = "ours", predicate = "faster", than = "fa2", where = "seqlen_q >= 1024"}
[[claim]]
id = "inside"
where = "section 4"
statement = "top speed"
source = "arXiv:0000.00001v2"
value = 3
unit = "tflops"
internal = true
measure = {figure = "fig1", impl = "Ours", aggregate = "max"}
[[claim]]
id = "never"
where = "section 5"
statement = "on another device"
source = "https://example.org/paper"
value = 3
unit = "ms"
unmeasurable = "needs a device that nobody has"
"""
WHOLE = CLAIM + OTHER + FIGURE


@pytest.fixture
def load(tmp_path):
    def read(text, **options):
        file = tmp_path / "claims.toml"
        file.write_text(text)
        return load_claims(file, **{"paper": "toy", "alias": "t", "ours": ("hopper",), **options})

    return read


def test_a_claim(load):
    claim = load(WHOLE)[0]
    assert (claim.id, claim.value, claim.numbers, claim.direction) == ("speed", (1.5, 2.0), (1.5, 2.0), "between")
    assert (claim.kind, claim.tolerance, claim.needs) == ("measured", 0.05, ("h100-sxm",))
    assert (claim.paper, claim.alias, claim.ours) == ("toy", "t", ("hopper",))
    assert claim.measure.metric == "time" and claim.measure.get("case") == {"head_dim": [64, 128]}
    assert claim.measure.covers({"head_dim": 64}) and not claim.measure.covers({"head_dim": 256})


def test_figures_become_cells(load):
    cells = {claim.id: claim for claim in load(WHOLE) if claim.figure}
    assert list(cells) == [
        *("fig1.ours.512", "fig1.ours.1024", "fig1.ours.4224", "fig1.cudnn-9.4224"),
        *("fig1.triton.512", "fig1.triton.1024", "fig1.triton.4224"),
    ]
    first = cells["fig1.ours.512"]
    case = {"head_dim": 64, "seqlen_q": 512, "seqlen_k": 512, "batch": 32}
    assert first.measure.case == first.cell == case and first.measure.metric == "tflops"
    assert first.direction == "at_least" and first.value == 1
    assert first.statement == "Ours at seqlen_q 512: 1 tflops"
    assert cells["fig1.ours.4224"].cell["batch"] == 4
    rival = cells["fig1.cudnn-9.4224"]
    assert rival.conditions == {"dtype": "fp16", "baseline": "cuDNN 9", "baseline_version": "9.1"}
    assert cells["fig1.triton.512"].measure is None and cells["fig1.triton.512"].direction == "about"


def test_less_is_better_where_it_is(load):
    figure = FIGURE.replace('unit = "tflops"', 'unit = "1"\nmetric = "rmse"')
    assert load(figure)[0].direction == "at_most" and load(figure)[0].statement == "Ours at seqlen_q 512: 1"
    assert load(figure.replace("rmse", "cosine"))[0].direction == "at_least"


def test_quoted_records(load):
    records = quoted_records(load(WHOLE))
    assert len(records) == 7 and {r.kind for r in records} == {"quoted"}
    first = records[0]
    assert (first.impl, first.value("tflops"), first.case["dtype"]) == ("Ours", 1.0, "fp16")
    assert first.source == "arXiv:0000.00001v2, Figure 1" and first.note == "fig1.ours.512"


def test_panels_of_a_figure_are_found_by_their_number(load):
    panels = (
        FIGURE.replace('"fig1"', '"fig1a"') + FIGURE.replace('"fig1"', '"fig1b"') + FIGURE.replace("fig1", "fig10a")
    )
    inside = OTHER[OTHER.index('[[claim]]\nid = "inside"') :]
    claim = next(c for c in load(inside + panels) if c.id == "inside")
    assert {cell.figure for cell in claim.cells} == {"fig1a", "fig1b"}


@pytest.mark.parametrize(
    ("term", "case", "holds"),
    [
        (Term("n", ">=", 1024), {"n": 1024}, True),
        (Term("n", ">", 1024), {"n": 1024}, False),
        (Term("n", "<=", 1024), {"n": 512.0}, True),
        (Term("n", "<", 1024), {"n": 2048}, False),
        (Term("n", "<", 2), {"n": True}, False),  # true is no number
        (Term("n", "<", 2), {"n": "1"}, False),
        (Term("n", "<", 2), {}, False),
        (Term("c", "==", True), {"c": True}, True),
        (Term("c", "==", True), {"c": 1}, False),
        (Term("c", "!=", True), {"c": False}, True),
        (Term("c", "!=", True), {}, False),
        (Term("d", "==", "fp16"), {"d": "fp16"}, True),
    ],
)
def test_terms(term, case, holds):
    assert term.holds(case) is holds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('where = "abstract"', "", "speed: key 'where' is missing"),
        ('id = "speed"', "", "claim 1: key 'id' is missing"),
        ('id = "speed"', 'id = "Speed!"', "'id'"),
        ('id = "speed"', 'id = "order"', "order: this id is used twice"),
        ('id = "speed"', 'id = "fig1"', "fig1: this id is used twice"),
        ('id = "speed"', 'id = "speed"\nspede = 1', "speed: unknown key 'spede'"),
        ('source = "arXiv:0000.00001v2"\nvalue = [', 'source = "somewhere"\nvalue = [', "speed: 'source'"),
        ('unit = "x"', 'unit = "TFLOPS"', "speed: 'unit' must be one of"),
        ('unit = "x"', 'unit = "tflops"', "speed: measure: 'ratio_to' and the unit 'x'"),
        ("value = [1.5, 2.0]", "value = [2.0, 1.5]", "speed: 'value'"),
        ("value = [1.5, 2.0]", 'value = "fast"', "speed: 'value'"),
        ("value = [1.5, 2.0]", "value = nan", "speed: 'value'"),
        ("value = [1.5, 2.0]", "value = true", "speed: 'value'"),
        ("value = [1.5, 2.0]", "value = 1.5", "speed: measure: aggregate 'range'"),
        ("value = [1.5, 2.0]", 'value = [1.5, 2.0]\ndirection = "at_least"', "speed: 'direction'"),
        ("value = [1.5, 2.0]", "value = [1.5, 2.0]\ntolerance = 5", "speed: 'tolerance'"),
        ("value = [1.5, 2.0]", 'value = [1.5, 2.0]\nkind = "guess"', "speed: 'kind' must be one of"),
        ("value = [1.5, 2.0]", 'value = [1.5, 2.0]\nkind = "qualitative"', "speed: a qualitative claim has no 'value'"),
        ("value = [1.5, 2.0]", 'value = [1.5, 2.0]\nunmeasurable = "x"', "speed: give either 'measure' or"),
        ("value = [1.5, 2.0]", "value = [1.5, 2.0]\ninternal = true", "speed: measure: 'figure' and internal"),
        ('conditions = {dtype = "fp16"}\nneeds', "conditions = {dtype = []}\nneeds", "speed: 'conditions'"),
        ('needs = ["H100 SXM"]', 'needs = "h100"', "speed: 'needs'"),
        ('"fig1.ours.1024"]', '"fig2"]', "speed: contradicts names 'fig2'"),
        ('aggregate = "range"', 'aggregate = "mean"', "speed: measure: 'aggregate' must be one of"),
        ('impl = "ours", ratio_to', 'imp = "ours", ratio_to', "speed: measure: key 'impl' is missing"),
        ("head_dim = [64, 128]", "head_dim = []", "speed: measure: case: 'head_dim'"),
        ("head_dim = [64, 128]", "head_dim = {a = 1}", "speed: measure: case: 'head_dim'"),
        ('experiment = "forward", impl = "ours", ratio_to', 'impl = "ours", ratio_to', "'experiment' is missing"),
        (', than = "fa2"', "", "order: measure: the predicates 'faster' and 'lower' need 'than'"),
        ('predicate = "faster"', 'predicate = "best"', "order: measure: 'predicate' must be one of"),
        ('predicate = "faster", ', "", "order: measure: a qualitative claim needs a 'predicate'"),
        ('predicate = "faster"', 'predicate = "lower"', "order: measure: key 'metric' is missing"),
        ("seqlen_q >= 1024", "seqlen_q => 1024", "order: measure: 'where' must be comparisons"),
        ("seqlen_q >= 1024", "dtype > fp16", "order: measure: where: 'fp16' has no order"),
        ('figure = "fig1"', 'figure = "fig2"', "inside: measure: no figure is named 'fig2'"),
        ('impl = "Ours", aggregate', 'impl = "ours", aggregate', "inside: measure: no row is labelled 'ours'"),
        ('unmeasurable = "needs a device that nobody has"', "", "never: give either 'measure' or 'unmeasurable'"),
        ('label = "Ours", impl = "ours"', 'label = "Ours"', "fig1: row Ours: give either 'impl'"),
        ('label = "Ours", impl = "ours"', 'label = "Ours", impl = "a", x = 1', "row Ours: unknown key 'x'"),
        ("values = [1, 2.5, 3]", "values = [1, 2.5]", "fig1: row Ours: 'values' must be a list of 3"),
        ("values = [1, 2.5, 3]", 'values = [1, "2", 3]', "fig1: row Ours: a value must be a number"),
        ("columns = [512, 1024, 4224]", "columns = []", "fig1: 'columns'"),
        ("columns = [512, 1024, 4224]", 'columns = ["a", "b", "c"]', "fig1: 'tokens' needs"),
        ('axis = "seqlen_q"', "", "fig1: key 'axis' is missing"),
        ('unit = "tflops"\nexperiment', 'unit = "bytes"\nexperiment', "fig1: key 'metric' is missing"),
        ('unit = "tflops"\nexperiment', 'unit = "x"\nexperiment', "fig1: 'unit' must be one of"),
        ('label = "Triton"', 'label = "Ours"', "fig1.ours.512: this id is used twice"),
        ("[[figure]]", "[[figures]]", "contradicts names 'fig1'|unknown key 'figures'"),
        ("[[figure]]", "[[figure", "claims.toml"),
    ],
)
def test_mistakes_name_file_id_and_key(load, old, new, message):
    assert WHOLE.count(old) >= 1
    load(WHOLE)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load(WHOLE.replace(old, new, 1))
    assert "claims.toml" in str(caught.value)


def test_names_of_the_paper_are_checked(load):
    load(WHOLE, experiments=("forward", "backward"))
    with pytest.raises(InvalidInputError, match="speed: measure: experiment 'forward' is none of backward"):
        load(WHOLE, experiments=("backward",))
    with pytest.raises(InvalidInputError, match="speed: measure: impl = 'ours', but the paper names no"):
        load(WHOLE, ours=())


def test_a_claim_of_the_seed_may_have_nothing_behind_it(load):
    text = CLAIM[: CLAIM.index("contradicts")].replace("arXiv:0000.00001v2", "seed")
    assert load(text)[0].measure is None
    with pytest.raises(InvalidInputError, match="give either"):
        load(text.replace('"seed"', '"arXiv:1"'))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no file at .*gone\.toml"):
        load_claims(tmp_path / "gone.toml")


def test_a_large_ledger_loads_quickly(load):
    figures = "".join(FIGURE.replace('id = "fig1"', f'id = "table{n}"') for n in range(30))
    start = time.process_time()
    assert len(load(figures)) == 210
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1" + "0" * 400, "[1.0, inf]", "[-inf, 2.0]", "[1.0, nan]"])
def test_every_value_is_finite(load, number):
    text = CLAIM.replace("value = [1.5, 2.0]", f"value = {number}") + FIGURE
    with pytest.raises(InvalidInputError, match=r"claims\.toml: speed: 'value' must be a finite number"):
        load(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("values = [1, 2.5, 3]", "values = [1, inf, 3]", r"fig1.*'values' must be finite"),
        ("values = [1, 2.5, 3]", f"values = [1, 1{'0' * 400}, 3]", r"fig1.*'values' must be finite"),
        ("head_dim = [64, 128]", "head_dim = [64, nan]", "speed: measure: case: 'head_dim'"),
        ('conditions = {dtype = "fp16"}\nneeds', "conditions = {clocks = inf}\nneeds", "speed: conditions: 'clocks'"),
        ("seqlen_q >= 1024", "seqlen_q >= inf", "order: measure: where: 'inf' is not finite"),
        ("seqlen_q >= 1024", "seqlen_q >= nan", "order: measure: where: 'nan' is not finite"),
    ],
)
def test_no_number_anywhere_is_infinite(load, old, new, message):
    assert old in WHOLE
    with pytest.raises(InvalidInputError, match=message):
        load(WHOLE.replace(old, new))


@pytest.mark.parametrize("direction", ["at_least", "at_most", "about"])
@pytest.mark.parametrize(("claimed", "value"), [(float("inf"), 3.0), (float("nan"), 3.0), (3.0, float("nan"))])
def test_a_miss_that_is_no_number_is_not_no_miss(direction, claimed, value):
    claim = Claim(id="a", where="b", statement="c", source="seed", value=claimed, direction=direction)
    assert _miss(claim, value) == float("inf")
    assert _miss(Claim(id="a", where="b", statement="c", source="seed", value=3.0, direction=direction), 3.0) == 0.0
