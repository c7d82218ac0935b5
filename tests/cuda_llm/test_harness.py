"""Judging: right kernels of every task accepted, wrong ones named, processes that end badly survived."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_accel.cuda_llm import TASKS, Kind, Sandbox, Verdict, check
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.harness import draw
from gpu_accel.cuda_llm.image import GUARD, GUARDS, spoiling
from gpu_accel.cuda_llm.measure import measure
from gpu_accel.cuda_llm.redteam import here, redteam
from gpu_accel.errors import HardwareError, InvalidInputError


@pytest.mark.parametrize("name", TASKS)
def test_the_plain_kernel_is_accepted(name: str, sandbox: Sandbox) -> None:
    judged = check(TASKS[name].candidate, name, sandbox=sandbox, seed=4)
    assert judged.ok, judged
    assert judged.error is not None and judged.error <= 0.5, "the tolerance leaves no room"
    assert "uid" in judged.sandbox and any("interpreter" in one for one in judged.verified_by)


def test_products_of_bfloat16_are_right_in_the_interpreter(sandbox: Sandbox) -> None:
    """The interpreter takes their bits for integers; the worker mends that. Six products are as good as float32."""
    kernel = next(one for one in TASKS["matmul"].templates if "bfloat16" in one.source)
    judged = check(kernel, "matmul", sandbox=sandbox, seed=4)
    assert judged.ok and judged.error is not None and judged.error <= 0.5, judged
    short = kernel.text.replace("        part = tl.dot(l2, r2, part)\n        part = tl.dot(l1, r3, part)\n", "")
    short = short.replace("part = tl.dot(l3, r1)", "part = tl.zeros_like(acc)")
    judged = check(short, "matmul", sandbox=sandbox, seed=4)
    assert judged.kind is Kind.PRECISION, "three products are not"


def test_a_kernel_of_another_task_is_malformed_or_wrong(sandbox: Sandbox) -> None:
    assert check(TASKS["softmax"].start, "matmul", sandbox=sandbox).verdict is Verdict.MALFORMED
    assert check(TASKS["softmax"].start, "scan", sandbox=sandbox).verdict is Verdict.WRONG


def test_the_red_team(sandbox: Sandbox) -> None:
    """All hacks rejected under their own names, all twins accepted."""
    rows = redteam(sandbox=sandbox, seed=9)
    assert len(rows) == len(here()) + 2 >= 44
    assert [(row.fixture.id, row.hack.name) for row in rows if not row.hack_rejected] == []
    assert [(row.fixture.id, row.twin.name) for row in rows if not row.twin_accepted] == []
    assert sandbox.restarts == 0, "a candidate brought the worker down"


@pytest.mark.parametrize("seed", [74, 75, 81])
def test_what_is_left_out_is_not_called_too_few_bits(seed: int, sandbox: Sandbox) -> None:
    """As it was with these seeds where summands of both signs were left out, whose sum happened to be small."""
    rows = redteam(sandbox=sandbox, only=["S13"], seed=seed)
    assert [row.hack.name for row in rows] == ["wrong(mismatch)"]


def test_the_readme_names_the_twins_that_only_a_gpu_runs() -> None:
    named = [one.id for one in FIXTURES if one.expected_twin(False) is Verdict.UNVERIFIED]
    text = " ".join((Path(__file__).parents[2] / "papers" / "cuda_llm" / "README.md").read_text().split())
    total = len(FIXTURES) + 2
    assert f"{total - len(named)} of {total} twins accepted; the other {len(named)} ({', '.join(named)})" in text
    compiled = [one.id for one in FIXTURES if one.compiled]
    assert f"the {len(compiled)} hacks that show in its PTX alone ({', '.join(compiled)})" in text
    assert all(one.expected_twin(True) is Verdict.ACCEPTED for one in FIXTURES)


def test_fixtures_are_distinct() -> None:
    assert len({one.id for one in FIXTURES}) == len(FIXTURES)
    assert all(one.hack != one.twin for one in FIXTURES)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "kind"),
    [
        ("tl.exp(v", "tl.exp((v", Verdict.COMPILE_ERROR, None),
        ("tl.exp(v", "tl.exp2(v", Verdict.WRONG, Kind.MISMATCH),
        ("e / tl.sum(e, 0)", "(e / tl.sum(e, 0)).to(tl.bfloat16)", Verdict.WRONG, Kind.PRECISION),
        ("e / tl.sum(e, 0)", "v", Verdict.WRONG, Kind.COPIED_INPUT),
        ("i = tl.arange(0, BLOCK)", "i = tl.arange(0, cols)", Verdict.COMPILE_ERROR, None),
        ("v = tl.load(", "v = tl.dot(", Verdict.COMPILE_ERROR, None),
        ('grid = ["rows"]', 'grid = ["rows - 1"]', Verdict.WRONG, Kind.NEVER_WRITTEN),
        ('grid = ["rows"]', 'grid = ["rows + 1"]', Verdict.WRONG, Kind.OUT_OF_BOUNDS),
        ('"next_power_of_2(cols)"', "64", Verdict.WRONG, Kind.NEVER_WRITTEN),
        ("def softmax(x, out", "def softmax(x, target, out", Verdict.MALFORMED, None),
        ("def softmax(x, out", "def softmax(out", Verdict.COMPILE_ERROR, None),
        ("# [space]", "# [fill]\n# x = 0\n# [space]", Verdict.MALFORMED, None),
    ],
)
def test_one_change_one_verdict(old: str, new: str, verdict: Verdict, kind: Kind | None, sandbox: Sandbox) -> None:
    source = TASKS["softmax"].start
    assert source.count(old) == 1
    judged = check(source.replace(old, new), "softmax", sandbox=sandbox, seed=2)
    assert (judged.verdict, judged.kind) == (verdict, kind), judged


def test_the_answer_is_not_in_what_a_candidate_sees() -> None:
    """Neither as bytes of the memory it gets, nor as anything in the job."""
    task = TASKS["matmul"]
    for trial in draw(task, task.candidate, seed=1):
        truth = task.truth(trial.inputs, trial.dims)["out"].value.float().flatten()
        memory = trial.before.numpy().tobytes()
        assert truth[:4].numpy().tobytes() not in memory
        outputs = trial.layout.outputs(trial.before)["out"]
        assert torch.isnan(outputs).all()


def test_inputs_are_secret_unless_a_seed_is_given() -> None:
    task = TASKS["dot"]
    first, second = (draw(task, task.candidate, None) for _ in range(2))
    assert not torch.equal(first[0].inputs["x"], second[0].inputs["x"])
    first, second = (draw(task, task.candidate, 7) for _ in range(2))
    assert torch.equal(first[0].inputs["x"], second[0].inputs["x"])
    other = task.candidate.with_(num_warps=8)
    assert not torch.equal(draw(task, other, 7)[0].inputs["x"], first[0].inputs["x"]), "depends on the source"


def test_guards_are_around_every_buffer() -> None:
    task = TASKS["attention"]
    layout = draw(task, task.candidate, 1)[0].layout
    ends = [0, *(slot.offset + slot.size for slot in layout.slots)]
    starts = [*(slot.offset for slot in layout.slots), layout.total]
    assert all(start - end >= GUARD for end, start in zip(ends, starts, strict=True))


@pytest.mark.parametrize(
    ("task", "pairs", "kind"),
    [
        ("relu", ((", mask=i < n)", ")"),), Kind.OUT_OF_BOUNDS),  # what it writes there is what it reads there
        ("relu", (("mask=i < n", "mask=i < n + 4096"),), Kind.OUT_OF_BOUNDS),
        ("relu", (("mask=i < n", "mask=i <= n"),), Kind.OUT_OF_BOUNDS),
        ("relu", (("    tl.store(", "    at, m = out + n + i, i < 64\n"
                   "    tl.store(at, tl.maximum(tl.load(at, mask=m), 0.0), mask=m)\n    tl.store("),),
         Kind.OUT_OF_BOUNDS),
        ("reverse", ((", mask=i < n)", ")"),), Kind.OUT_OF_BOUNDS),
        ("reduction", (("mask=i < n, other=0.0", "mask=i <= n, other=0.0"),), None),  # only reads
        ("dot", (("mask=i < n, other=0.0", "mask=i <= n, other=0.0"),), None),
    ],
)  # fmt: skip
def test_beyond_buffers(
    task: str, pairs: tuple[tuple[str, str], ...], kind: Kind | None, sandbox: Sandbox
) -> None:
    """A kernel that leaves its buffers is wrong, its twin that does not is accepted."""
    source = TASKS[task].start
    for old, new in pairs:
        assert old in source, source
        source = source.replace(old, new)
    assert check(TASKS[task].start, task, sandbox=sandbox, seed=1).ok
    judged = check(source, task, sandbox=sandbox, seed=1)
    assert judged.verdict is Verdict.WRONG and kind in (None, judged.kind), judged


def test_guards_differ_from_each_other_and_from_launch_to_launch() -> None:
    task = TASKS["relu"]
    trials = draw(task, task.candidate, 3)
    for trial in trials:
        x, out = trial.layout.slots
        image = trial.before.view(torch.float32)
        front, behind = image[: GUARD // 4], image[(x.offset + x.size) // 4 : out.offset // 4]
        for part in (front, behind):
            assert bool((part.isnan() | (part.abs() > 3e38)).all())
        last = trial.before[(out.offset + out.size) :]
        first = trial.before[x.offset + x.size :][: len(last)]
        assert (first[: len(last)] == last[: len(first)]).float().mean() < 0.2
        assert not torch.equal(last.view(torch.float32).clamp(min=0), last.view(torch.float32))
    fronts = {trial.before[:GUARD].numpy().tobytes() for trial in trials}
    assert len(fronts) == len(trials)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_lies_beyond_inputs_spoils_a_result(dtype: str) -> None:
    for guard in GUARDS:
        read = spoiling(1 << 16, guard, torch.Generator().manual_seed(0)).view(getattr(torch, dtype)).double()
        if guard == "nan":
            assert bool(read.isnan().all())
        elif dtype in ("float64", "float32"):
            assert bool((read.abs() > 3e38).all()) and bool((read > 0).any()) and bool((read < 0).any())


@pytest.mark.parametrize("name", TASKS)
def test_a_hidden_shape_fills_no_block(name: str) -> None:
    task = TASKS[name]
    for seed in range(20):
        dims = task.held_out(seed)[0]
        for key, size in dims.items():
            least, largest = task.ranges[key]
            assert least <= size <= largest and (size % 2 or least == largest), (key, size)


def test_the_worker_is_replaced_when_it_dies() -> None:
    with Sandbox(seconds=30) as own:
        assert own._worker is not None
        own._worker.kill()
        own._worker.wait()
        judged = check(TASKS["reverse"].start, "reverse", sandbox=own)
        assert judged.verdict is Verdict.CRASHED
        assert own.restarts == 1
        assert check(TASKS["reverse"].start, "reverse", sandbox=own).ok


def test_no_times_without_a_gpu(sandbox: Sandbox) -> None:
    with pytest.raises(HardwareError, match="times need a GPU"):
        measure(TASKS["dot"].candidate, TASKS["dot"], sandbox=sandbox, gpu="h100-sxm")


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(InvalidInputError, match="cannot read"):
        check(tmp_path / "no.py", "dot")
