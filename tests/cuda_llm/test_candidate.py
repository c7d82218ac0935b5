"""Reading candidates: headers, launch specs, and the arithmetic of sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_accel.cuda_llm import TASKS, Candidate, Verdict
from gpu_accel.cuda_llm.launch import evaluate
from gpu_accel.cuda_llm.verdict import Rejected

KERNEL = "@triton.jit\ndef k(x, out, n, BLOCK: tl.constexpr):\n    pass\n"


def header(*lines: str) -> str:
    return "\n".join(["# /// launch", *(f"# {line}" for line in lines), "# ///", KERNEL])


@pytest.mark.parametrize("name", TASKS)
def test_text_reads_back(name: str) -> None:
    for one in (TASKS[name].candidate, TASKS[name].naive):
        assert Candidate.parse(one.text) == one
        assert Candidate.parse(one.text.encode()).digest == one.digest


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("7", 7), ("n", 10), (12, 12), ("cdiv(n, 4)", 3), ("next_power_of_2(n)", 16), ("next_power_of_2(1)", 1)),
        *(("n // 3 * 2 + 1", 7), ("max(n, 16) % 7", 2), ("min(n, 3) - 3", 0), ("-n + 11", None)),
    ],
)
def test_sizes(text: int | str, value: int | None) -> None:
    if value is None:
        with pytest.raises(Rejected, match="sizes are"):
            evaluate(text, {"n": 10})
    else:
        assert evaluate(text, {"n": 10}) == value


@pytest.mark.parametrize(
    "text",
    ["n ** 99", "__import__('os')", "m", "n // 0", "cdiv(n, 0)", "n.real", "[n][0]", "1 << 50", "n" * 201, "",
     "n if n else 1", "lambda: 1", "99999999999999", "1.5", "True", "n\0", "(" * 150 + "n" + ")" * 150 + "("],
)  # fmt: skip
def test_other_expressions_are_malformed(text: str) -> None:
    with pytest.raises(Rejected) as caught:
        evaluate(text, {"n": 10})
    assert caught.value.verdict is Verdict.MALFORMED


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((), "needs grid"),
        (("grid = []",), "needs grid"),
        (('grid = ["n"]', "num_warps = 3"), "num_warps is 3"),
        (('grid = ["n"]', "num_stages = 99"), "num_stages is 99"),
        (('grid = ["n"]', "warps = 4"), "no 'warps'"),
        (('grid = ["n"]', "[constants]", "BLOCK = [1]"), "constant BLOCK"),
        (('grid = ["n"]', "[constants]", "__class__ = 1"), "no plain name"),
        (('grid = ["n"]', "[space]", "BLOCK = [1]"), "no constant"),
        (('grid = ["n"]', "[workspace.w]", 'dtype = "float32"'), "needs shape"),
        (('grid = ["n"]', "[fill]", "out = true"), "not a number"),
        (("grid = [",), "no TOML"),
        (('grid = ["n"]', "shared = 999999999"), "shared is"),
    ],
)
def test_broken_launch_specs_say_what_is_wrong(lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(Rejected, match=why) as caught:
        Candidate.parse(header(*lines))
    assert caught.value.verdict is Verdict.MALFORMED


@pytest.mark.parametrize(
    "text",
    ["", KERNEL, header('grid = ["n"]') * 2, b"\xff\xfe\x00", "x\0", "#" * 70_000, b"#" * 70_000],
    ids=["empty", "no-header", "two-headers", "no-utf8", "zero-byte", "too-long", "too-long-bytes"],
)
def test_no_candidate_at_all(text: str | bytes) -> None:
    with pytest.raises(Rejected) as caught:
        Candidate.parse(text)
    assert caught.value.verdict is Verdict.MALFORMED


@settings(max_examples=60)
@given(st.text(max_size=60))
def test_expressions_never_raise_anything_else(text: str) -> None:
    try:
        assert isinstance(evaluate(text, {"n": 3}), int)
    except Rejected as rejected:
        assert rejected.verdict is Verdict.MALFORMED


def test_edits_make_new_candidates() -> None:
    start = TASKS["softmax"].candidate
    other = start.with_(num_warps=8)
    assert other.launch.num_warps == 8 and start.launch.num_warps == 4 and other.digest != start.digest
    with pytest.raises(Rejected, match="no constant"):
        start.with_(TILE=3)
