"""The search: deterministic, within its budget, and never better than what it has measured."""

from __future__ import annotations

import json

import pytest
import triton
import triton.language as tl

from gpu_accel.cuda_llm import TASKS, Grammar, Judgement, Kind, Sandbox, Verdict, check, optimize_kernel
from gpu_accel.cuda_llm import search as search_module
from gpu_accel.cuda_llm.proposers import Attempt, point_of, size_of, space_of
from gpu_accel.errors import IncorrectResultError, InvalidInputError

REVERSE = TASKS["reverse"]


@triton.jit
def backwards(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (n - 1 - i), mask=i < n), mask=i < n)


def attempt(number: int, candidate, time: float | None, ok: bool = True) -> Attempt:
    verdict = Judgement(verdict=Verdict.ACCEPTED if ok else Verdict.WRONG, kind=None if ok else Kind.MISMATCH)
    return Attempt(number=number, candidate=candidate, judgement=verdict, time=time)


@pytest.mark.parametrize("strategy", ["random", "evolutionary"])
def test_proposals_are_new_in_the_space_and_repeatable(strategy: str) -> None:
    start = TASKS["matmul"].candidate
    history = [attempt(0, start, 2.0)]
    for _ in range(10):
        made = Grammar(strategy, seed=3).propose(start, history, 4)
        assert [one.digest for one in made] == [one.digest for one in Grammar(strategy, 3).propose(start, history, 4)]
        history += [attempt(len(history) + i, one, 1.0 + i) for i, one in enumerate(made)]
    assert len({one.candidate.digest for one in history}) == 41
    for one in history[1:]:
        assert all(one.candidate.launch.constants[name] in space_of(start)[name] for name in ("BLOCK_M", "BLOCK_K"))
    other = [one.digest for one in Grammar(strategy, 4).propose(start, history[:1], 4)]
    assert other != [one.candidate.digest for one in history[1:5]]


def test_a_small_space_is_used_up() -> None:
    start = REVERSE.candidate
    history = [attempt(0, start, None)]
    while made := Grammar("random", 0).propose(start, history, 8):
        history += [attempt(len(history) + i, one, None) for i, one in enumerate(made)]
    assert len(history) == size_of(space_of(start))


def lowest(strategy: str, seed: int) -> float:
    """The least of a made-up cost after 48 of 576 points; 1 at the minimum, 1 more for each step away from it."""
    start = TASKS["matmul"].candidate
    space = space_of(start)
    wanted = {"BLOCK_M": 128, "BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}

    def cost(candidate) -> float:
        point = point_of(candidate, space)
        return 1.0 + sum(abs(space[name].index(point[name]) - space[name].index(best)) for name, best in wanted.items())

    history = [attempt(0, start, cost(start))]
    for _ in range(12):
        made = Grammar(strategy, seed).propose(start, history, 4)
        history += [attempt(len(history) + i, one, cost(one)) for i, one in enumerate(made)]
    return min(one.time for one in history if one.time)


def test_evolution_beats_chance_where_neighbours_are_alike() -> None:
    evolved, random = ([lowest(strategy, seed) for seed in range(6)] for strategy in ("evolutionary", "random"))
    assert sum(evolved) < sum(random)
    assert min(evolved) == 1


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="choose one of"):
        Grammar("annealing")


def test_without_a_gpu_nothing_is_ranked(sandbox: Sandbox, tmp_path) -> None:
    found = optimize_kernel(REVERSE.start, target_hardware="h100", candidates=3, sandbox=sandbox, out=tmp_path)
    assert not found.timed and found.speedup is None and "no GPU" in found.note
    assert found.best is found.start and found.counts == {"accepted": 4}
    rows = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["accepted"] * 4
    assert check(tmp_path / rows[2]["file"], "reverse", sandbox=sandbox).ok


def test_a_triton_function_with_its_launch(sandbox: Sandbox) -> None:
    launch = {"grid": ["cdiv(n, BLOCK)"], "constants": {"BLOCK": 128}}
    found = optimize_kernel(backwards, "h100", task="reverse", launch=launch, candidates=1, sandbox=sandbox)
    assert found.best.ok and "def backwards" in found.source


def test_what_cannot_be_optimised_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInputError, match="needs launch"):
        optimize_kernel(backwards, task="reverse", sandbox=sandbox)
    with pytest.raises(InvalidInputError, match="what the kernel computes"):
        optimize_kernel(REVERSE.start.replace('# task = "reverse"\n', ""), sandbox=sandbox)
    with pytest.raises(InvalidInputError, match="no candidate"):
        optimize_kernel("def k(): pass", task="reverse", sandbox=sandbox)
    with pytest.raises(InvalidInputError, match="CUDA C"):
        optimize_kernel(REVERSE.naive, task="reverse", sandbox=sandbox)
    with pytest.raises(IncorrectResultError, match="not right"):
        optimize_kernel(REVERSE.start.replace("n - 1 - i", "i"), candidates=1, sandbox=sandbox)


class Clocked:
    """A sandbox that says it has a GPU; `check` and `bench` are replaced in these tests."""

    gpu, described = True, ""


def test_the_best_ever_is_kept_and_impossible_times_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2.0, 3.0, 1.0, None, 1.5])
    fine = Judgement(verdict=Verdict.ACCEPTED)
    fast = Judgement(verdict=Verdict.FASTER_THAN_PHYSICS)

    def timed(*given, **more):
        taken = next(times)
        return (fast if taken is None else fine), taken

    monkeypatch.setattr(search_module, "check", lambda *given, **more: fine)
    monkeypatch.setattr(search_module, "bench", timed)
    found = optimize_kernel(REVERSE.start, candidates=4, sandbox=Clocked())  # type: ignore[arg-type]
    assert found.timed and found.best.number == 2 and found.speedup == 2.0
    assert found.counts == {"accepted": 4, "faster_than_physics": 1}


def test_a_proposer_that_repeats_itself_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        name = "stubborn"

        def propose(self, start, history, count):
            return [start]

    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "bench", lambda *given, **more: (Judgement(verdict=Verdict.ACCEPTED), 1.0))
    found = optimize_kernel(REVERSE.start, proposer=Stubborn(), sandbox=Clocked())  # type: ignore[arg-type]
    assert len(found.attempts) == 1 and "Nothing new" in found.note
