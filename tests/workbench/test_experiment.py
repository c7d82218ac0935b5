"""Settings, checks and the reading of shapes."""

from __future__ import annotations

import math

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.experiment import (
    Check,
    Experiment,
    Implementation,
    Settings,
    SimpleExperiment,
    Workload,
    completed,
    did_you_mean,
    for_experiment,
    parse_shape,
    select,
    shape_for,
)


def test_positional_shape():
    assert parse_shape("4x2048x16x128") == {"batch": 4, "seqlen": 2048, "heads": 16, "head_dim": 128}
    assert parse_shape(" 4X16k×16x128 ") == {"batch": 4, "seqlen": 16384, "heads": 16, "head_dim": 128}


def test_named_shape():
    assert parse_shape("batch=4,seqlen=2048,heads=16,head_dim=128") == parse_shape("4x2048x16x128")
    assert parse_shape("seqlen_q=1, seqlen_k=8k, heads_kv=2, causal=true") == {
        "seqlen_q": 1,
        "seqlen_k": 8192,
        "heads_kv": 2,
        "causal": True,
    }


def test_what_is_nearly_a_known_word_is_suggested():
    assert did_you_mean("Hoper", ["hopper", "portable"]) == ". Did you mean hopper?"
    assert did_you_mean("xyz", ["hopper", "portable"]) == ""


def test_other_axes():
    axes = {"m": 64, "n": 32}
    assert parse_shape("128x256", axes, ()) == {"m": 128, "n": 256}
    with pytest.raises(InvalidInputError, match="unknown name 'q', known are m, n. Examples: 64x32  or  m=64,n=32"):
        parse_shape("q=4", axes, ())


def test_words_of_a_shape():
    words = {"layout": ("nt", "nn"), "gated": ("false", "true")}
    assert parse_shape("m=2,layout=NN, gated=true", {"m": 4}, (), words) == {"m": 2, "layout": "nn", "gated": True}
    with pytest.raises(InvalidInputError, match="layout is '3'; choose one of nt, nn"):
        parse_shape("layout=3", {"m": 4}, (), words)


def an_experiment(name: str, **options) -> SimpleExperiment:
    return SimpleExperiment(
        name=name, title="", list_cases=lambda _: [], build_case=lambda *_: Workload(implementations=[]), **options
    )


def test_a_shape_is_read_in_the_names_of_the_experiments():
    product, rows = an_experiment("product", axes={"m": 4, "n": 8}), an_experiment("rows", axes={"rows": 2, "m": 3})
    plain = an_experiment("plain")
    assert shape_for("1x16x1x32", [plain]) == parse_shape("1x16x1x32")
    assert shape_for("2x3", [plain, product]) == {"m": 2, "n": 3}
    assert shape_for("rows=2", [product, rows]) == {"rows": 2}
    with pytest.raises(InvalidInputError, match="fit several experiments: product takes m, n; rows takes rows, m"):
        shape_for("2x3", [product, rows])
    with pytest.raises(InvalidInputError, match="no experiment here has all of that.*Example: m=4,n=8"):
        shape_for("n=2,rows=3", [product, rows])
    with pytest.raises(InvalidInputError, match="n is '0'"):
        shape_for("n=0", [product, rows])
    asked = Settings(shapes=({"m": 2}, {"rows": 3}, {"batch": 1}))
    assert for_experiment(asked, product).shapes == ({"m": 2},)
    assert for_experiment(asked, rows).shapes == ({"m": 2}, {"rows": 3})
    assert for_experiment(asked, plain) == asked, "what an experiment without names of its own gets does not change"


def test_what_a_shape_leaves_out():
    first = {"m": 1, "n": 2, "pass": "forward"}
    every = {"pass": ("forward", "backward")}
    assert completed([{"m": 5}], first) == [{"m": 5, "n": 2, "pass": "forward"}]
    found = completed([{"n": 7}, {"n": 7, "pass": "backward"}], first, every)
    assert found == [{"m": 1, "n": 7, "pass": "forward"}, {"m": 1, "n": 7, "pass": "backward"}]
    assert list(found[0]) == list(first), "the order of a case's names is that of the experiment"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("4x2048", "2 sizes where 4 are needed"),
        ("", "1 sizes"),
        ("4x2048x16x-128", "head_dim is '-128'"),
        ("0x2048x16x128", "batch is '0'"),
        ("4x2.5x16x128", "seqlen is '2.5'"),
        ("batch=4,seqln=2048", "unknown name 'seqln'"),
        ("batch=4,batch=5", "'batch' is given twice"),
        ("batch=4,2048", "'2048' has no '='"),
        ("batch=true", "batch is 'true', not a positive integer"),
        ("causal=3", "not true or false"),
        ("batch=", "batch is ''"),
        ("²x2048x16x128", "batch is '²'"),
        ("4x" + "9" * 5000 + "x16x128", "above the largest size"),
        ("4x1099511627777x16x128", "above the largest size"),
        ("4x2147483648kx16x128", "above the largest size"),
        ("seqlen=64,seqlen_q=32", "seqlen_q cannot be given beside it"),
        ("seqlen_k=32,seqlen=64", "seqlen_k cannot be given beside it"),
    ],
)
def test_wrong_shapes_are_explained_with_examples(text: str, what: str):
    with pytest.raises(InvalidInputError) as error:
        parse_shape(text)
    assert what in str(error.value)
    assert "4x2048x16x128" in str(error.value) and "batch=4,seqlen=2048,heads=16,head_dim=128" in str(error.value)


def test_check_passes_only_within_a_finite_bound():
    assert Check(1e-3, 1e-3, "max_abs").ok
    assert not Check(1.1e-3, 1e-3, "max_abs").ok
    for error, bound in [(math.nan, 1.0), (0.0, math.nan), (math.inf, math.inf), (1.0, math.inf), (-1.0, 1.0)]:
        assert not Check(error, bound, "max_abs").ok


def test_select_keeps_order_and_refuses_unknown_names():
    names = ["portable", "hopper", "sdpa-flash"]
    assert select(names) == names
    assert select(names, only=["sdpa-flash", "portable"]) == ["portable", "sdpa-flash"]
    assert select(names, only=["portable"], skip=["portable"]) == []
    with pytest.raises(InvalidInputError, match="skip names hoper; available here: portable, hopper, sdpa-flash"):
        select(names, skip=["hoper"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "slow"},
        *({"seconds": seconds} for seconds in (0, -1, math.nan, math.inf, "1", None, True)),
        *({"noise": noise} for noise in (0, 1.5, "a")),
        *({"seed": seed} for seed in (-1, 2**63, 10**23, 10**5000, 1.0, True, None)),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_refuse_nonsense(wrong: dict):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        Settings(**wrong)


def test_implementation_needs_a_role_and_a_check():
    with pytest.raises(InvalidInputError, match="role"):
        Implementation(name="a", role="friend", check=lambda seed: Check(0, 1, "m"))
    with pytest.raises(InvalidInputError, match="no check"):
        Implementation(name="a", role="ours")
    assert Implementation(name="a", role="peer", unavailable="not installed").unavailable


def test_workload_refuses_twins_and_lists_known_work():
    twin = {"role": "ours", "unavailable": "x"}
    with pytest.raises(InvalidInputError, match="a, a"):
        Workload(implementations=[Implementation(name="a", **twin), Implementation(name="a", **twin)])
    with pytest.raises(InvalidInputError, match="baselines name b; implementations here: a"):
        Workload(implementations=[Implementation(name="a", **twin)], baselines=("a", "b"))
    assert Settings(seed=2**63 - 1).seed and Workload(implementations=[], flops=10).work == {"flops": 10.0}
    assert Workload(implementations=[], bytes_moved=5).work == {"bytes": 5.0}


def test_simple_experiment_is_an_experiment():
    simple = SimpleExperiment(
        name="s",
        title="S",
        list_cases=lambda settings: [{"n": 1}],
        build_case=lambda case, settings: Workload(implementations=[]),
    )
    assert isinstance(simple, Experiment)
    assert simple.cases(Settings()) == [{"n": 1}] and simple.build({"n": 1}, Settings()).names == ()
