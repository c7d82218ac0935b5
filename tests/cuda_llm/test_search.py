"""The search: deterministic, within its budget, and never better than what it has measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl

from gpu_accel.cuda_llm import TASKS, Grammar, Judgement, Kind, Pool, Sandbox, Verdict, check, optimize_kernel, searches
from gpu_accel.cuda_llm import search as search_module
from gpu_accel.cuda_llm.artefact import attempts_of, best_of, read_run
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.grammar import STRATEGIES, point_of, size_of, space_of
from gpu_accel.cuda_llm.measure import Measured
from gpu_accel.cuda_llm.proposers import Attempt, Brief, Proposal
from gpu_accel.errors import IncorrectResultError, InvalidInputError

REVERSE = TASKS["reverse"]


@triton.jit
def backwards(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (n - 1 - i), mask=i < n), mask=i < n)


def attempt(number: int, candidate: Candidate, time: float | None, ok: bool = True) -> Attempt:
    verdict = Judgement(verdict=Verdict.ACCEPTED if ok else Verdict.WRONG, kind=None if ok else Kind.MISMATCH)
    return Attempt(number=number, candidate=candidate, judgement=verdict, time=time)


def brief(name: str) -> Brief:
    return Brief(task=TASKS[name], start=TASKS[name].candidate, target="h100-sxm")


def proposed(strategy: str, seed: int, given: Brief, history: list[Attempt], count: int = 4) -> list[Candidate]:
    return [Candidate.parse(one.text) for one in Grammar(strategy, seed).propose(given, history, count)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_proposals_are_new_in_the_space_and_repeatable(strategy: str) -> None:
    given = brief("matmul")
    history = [attempt(0, given.start, 2.0)]
    for _ in range(10):
        made = proposed(strategy, 3, given, history)
        assert [one.digest for one in made] == [one.digest for one in proposed(strategy, 3, given, history)]
        history += [attempt(len(history) + i, one, 1.0 + i, ok=i < 3) for i, one in enumerate(made)]
    assert len({one.digest for one in history}) == 41
    space = space_of(given.start)
    for one in history[1:]:
        assert one.candidate and one.candidate.launch.constants["BLOCK_K"] in space["BLOCK_K"]
    if strategy not in ("pattern", "bandit"):
        assert proposed(strategy, 4, given, history[:1]) != [one.candidate for one in history[1:5]]


def test_a_small_space_is_used_up() -> None:
    given = brief("reverse")
    history = [attempt(0, given.start, None)]
    while made := proposed("random", 0, given, history, 8):
        history += [attempt(len(history) + i, one, None) for i, one in enumerate(made)]
    assert len(history) == size_of(space_of(given.start))


def test_every_template_is_tried_as_it_is_written_first() -> None:
    given = brief("reverse")
    other = given.start.with_(num_warps=1)
    twice = Candidate.parse(other.text.replace("def reverse", "def other"))
    given = dataclasses.replace(given, templates=(given.start, twice))
    first = proposed("random", 0, given, [attempt(0, given.start, 1.0)], 3)[0]
    assert first == twice


def lowest(strategy: str, seed: int) -> float:
    """The least of a made-up cost after 48 of 576 points; 1 at the minimum, 1 more for each step away from it."""
    given = brief("matmul")
    space = space_of(given.start)
    wanted = {"BLOCK_M": 128, "BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}

    def cost(candidate: Candidate) -> float:
        point = point_of(candidate, space)
        return 1.0 + sum(abs(space[name].index(point[name]) - space[name].index(best)) for name, best in wanted.items())

    history = [attempt(0, given.start, cost(given.start))]
    for _ in range(12):
        made = proposed(strategy, seed, given, history)
        history += [attempt(len(history) + i, one, cost(one)) for i, one in enumerate(made)]
    return min(one.time for one in history if one.time)


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if one != "random"])
def test_strategies_beat_chance_where_neighbours_are_alike(strategy: str) -> None:
    found, random = ([lowest(one, seed) for seed in range(4)] for one in (strategy, "random"))
    assert sum(found) < sum(random), (found, random)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="choose one of"):
        Grammar("annealing")


def test_without_a_gpu_nothing_is_ranked(sandbox: Sandbox, tmp_path) -> None:
    found = optimize_kernel(REVERSE.start, target_hardware="h100", candidates=3, sandbox=sandbox, out=tmp_path)
    assert not found.timed and found.speedup is None and "no GPU" in found.note
    assert found.best == found.start and found.counts == {"accepted": 4}
    assert read_run(tmp_path)["note"].startswith("The budget of candidates")
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
    with pytest.raises(InvalidInputError, match="candidates is 0"):
        optimize_kernel(REVERSE.start, candidates=0, sandbox=sandbox)
    with pytest.raises(IncorrectResultError, match="not right"):
        optimize_kernel(REVERSE.start.replace("n - 1 - i", "i"), candidates=1, sandbox=sandbox)


class Clocked:
    """A sandbox that says it has a GPU; `check` and `measure` are replaced in these tests."""

    gpu, described = True, ""


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search with a GPU writes of its machine."""
    monkeypatch.setattr(search_module, "host", lambda: {"env": {}, "commit": "", "dirty": True})


def clocked(times: dict[int, float | None]):
    """A `measure` that takes the given times for BLOCK, as multiples of a copy; None is impossibly fast."""

    def measured(candidate: Candidate, *given, **more) -> Measured:
        taken = times[candidate.launch.constants["BLOCK"]]
        verdict = Verdict.FASTER_THAN_PHYSICS if taken is None else Verdict.ACCEPTED
        return Measured(
            judgement=Judgement(verdict=verdict), samples={"candidate": (taken or 1e-9,), "copy": (1.0,)}, compared=2
        )

    return measured


TIMES = {128: 2.0, 256: 2.0, 512: 1.0, 1024: None, 2048: 1.5, 4096: 3.0}


def test_the_best_ever_is_kept_and_impossible_times_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "measure", clocked(TIMES))
    found = optimize_kernel(REVERSE.start, candidates=40, sandbox=Clocked(), out=tmp_path)  # type: ignore[arg-type]
    assert found.timed and found.best.confirmed and found.speedup == 2.0
    assert found.candidate.launch.constants["BLOCK"] == 512
    assert found.counts["faster_than_physics"] == 4 and len(found.attempts) == 24, "every point of the space"
    assert best_of(tmp_path) == found.candidate
    assert [one.number for one in attempts_of(tmp_path)] == list(range(24))


def test_a_kernel_that_fails_the_whole_check_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(candidate: Candidate, *given, **more) -> Judgement:
        bad = candidate.launch.constants["BLOCK"] == 512
        return Judgement(verdict=Verdict.WRONG, kind=Kind.HELD_OUT) if bad else Judgement(verdict=Verdict.ACCEPTED)

    monkeypatch.setattr(search_module, "check", judged)
    monkeypatch.setattr(search_module, "measure", clocked(TIMES))
    found = optimize_kernel(REVERSE.start, candidates=40, sandbox=Clocked())  # type: ignore[arg-type]
    assert found.candidate.launch.constants["BLOCK"] == 2048
    assert found.counts["wrong(held_out)"] == 4


@pytest.mark.parametrize(("failing", "block"), [(0, 512), (1, 512), (2, 256), (3, None)])
def test_a_kernel_that_fails_where_it_is_timed_again_is_not_the_best(
    monkeypatch: pytest.MonkeyPatch, failing: int, block: int | None
) -> None:
    """On inputs that only winners get, say. Then the next best is timed again, and at last the kernel at the start."""
    fine, again = clocked(TIMES), []

    def measured(candidate: Candidate, *given, **more) -> Measured:
        found = fine(candidate)
        if not more.get("again"):
            return found
        again.append(candidate)
        bad = Judgement(verdict=Verdict.WRONG, kind=Kind.PRECISION)
        return replace(found, judgement=bad) if len(again) <= failing else found

    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "measure", measured)
    if block is None:
        with pytest.raises(IncorrectResultError, match=r"timed again: wrong\(precision\)"):
            optimize_kernel(REVERSE.start, candidates=40, sandbox=Clocked())  # type: ignore[arg-type]
        return
    found = optimize_kernel(REVERSE.start, candidates=40, sandbox=Clocked())  # type: ignore[arg-type]
    assert found.candidate.launch.constants["BLOCK"] == block and found.final and found.final.judgement.ok
    assert found.counts.get("wrong(precision)", 0) == failing and found.best.confirmed
    assert (found.candidate.digest == found.start.digest) == (failing == 2)


def test_a_search_goes_on_from_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "measure", clocked(TIMES))
    more = {"sandbox": Clocked(), "out": tmp_path}
    with pytest.raises(InvalidInputError, match=r"run\.json"):
        optimize_kernel(REVERSE.start, resume=True, **more)
    first = optimize_kernel(REVERSE.start, candidates=5, **more)
    again = optimize_kernel(REVERSE.start, candidates=9, resume=True, **more)
    assert len(first.attempts) == 6 and len(again.attempts) == 10
    assert [one.digest for one in again.attempts[:6]] == [one.digest for one in first.attempts]
    assert len({one.digest for one in again.attempts}) == 10
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"number": 99, "fi')  # cut short when the machine went down
    assert len(attempts_of(tmp_path)) == 10
    changed = next(tmp_path.glob("0003-*.py"))
    changed.write_text(changed.read_text().replace("n - 1", "n - 2"))
    with pytest.raises(InvalidInputError, match="was changed"):
        optimize_kernel(REVERSE.start, resume=True, **more)


def test_budgets_end_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "measure", clocked(TIMES))
    more = {"sandbox": Clocked(), "candidates": None}
    found = optimize_kernel(REVERSE.start, depth=2, batch=3, **more)
    assert len(found.attempts) == 7 and "2 rounds" in found.note
    assert "1e-09 s is spent" in optimize_kernel(REVERSE.start, seconds=1e-9, **more).note

    def slowly(*given, **passed) -> Measured:
        time.sleep(0.05)
        return clocked(TIMES)(*given, **passed)

    monkeypatch.setattr(search_module, "measure", slowly)
    found = optimize_kernel(REVERSE.start, seconds=0.4, batch=10**15, **more)
    assert "0.4 s is spent" in found.note and len(found.attempts) < 20, "a round of all points ends in time too"
    assert all(one.at < 0.4 for one in found.attempts[1:-1]), "none begins when time is over"


def test_a_proposer_that_repeats_itself_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn:
        name = "stubborn"

        def propose(self, brief, history, count):
            return [Proposal(text=brief.start.text)]

    monkeypatch.setattr(search_module, "check", lambda *given, **more: Judgement(verdict=Verdict.ACCEPTED))
    monkeypatch.setattr(search_module, "measure", clocked(TIMES))
    found = optimize_kernel(REVERSE.start, proposer=Stubborn(), sandbox=Clocked())  # type: ignore[arg-type]
    assert len(found.attempts) == 1 and "Nothing new" in found.note


def test_searches_side_by_side_are_timed_again_when_all_have_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fails, one has nothing to try: neither keeps the others waiting, and no last timing begins before the end."""
    events: list[tuple[str, str]] = []

    def judged(candidate: Candidate, task, **more) -> Judgement:
        bad = task.name == "softmax"
        return Judgement(verdict=Verdict.WRONG, kind=Kind.MISMATCH) if bad else Judgement(verdict=Verdict.ACCEPTED)

    def measured(candidate: Candidate, task, **more) -> Measured:
        events.append(("last" if more.get("peers") else "screen", task.name))
        return Measured(judgement=Judgement(verdict=Verdict.ACCEPTED),
                        samples={"candidate": (2.0,), "copy": (1.0,)}, compared=2)  # fmt: skip

    for module in (search_module, searches):
        monkeypatch.setattr(module, "check", judged)
        monkeypatch.setattr(module, "measure", measured)
    tasks = [TASKS[name] for name in ("reverse", "softmax", "scan")]
    with Pool(own=(Clocked(), Clocked())) as pool:  # type: ignore[arg-type]
        found = searches.search_all(tasks, pool=pool, target="h100-sxm", seconds=60, candidates=6)
    assert isinstance(found["softmax"], IncorrectResultError)
    assert found["reverse"].final and found["scan"].final  # type: ignore[union-attr]
    kinds = [kind for kind, _ in events]
    assert kinds == sorted(kinds, reverse=True) and kinds.count("last") == 2


def test_an_interrupted_search_of_several_tasks_ends_all(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at its next attempt, not after its budget."""
    seen: list[str] = []
    begun = threading.Event()

    def tell(task: str, attempt: Attempt) -> None:
        seen.append(task)
        begun.set()

    class Interrupted(searches.ThreadPoolExecutor):
        def map(self, function, items):  # type: ignore[override]
            for item in items:
                self.submit(function, item)
            begun.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(searches, "ThreadPoolExecutor", Interrupted)
    with Pool(own=(sandbox,)) as pool, pytest.raises(KeyboardInterrupt):
        searches.search_all([TASKS["relu"], TASKS["reverse"]], pool=pool, target="h100-sxm", seconds=60,
                            candidates=100, tell=tell)  # fmt: skip
    assert 1 <= len(seen) < 10


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"task": 3}, "task is 3"), ({"task": "reverse", "proposer": 3}, "proposer is 3"),
        ({"task": "reverse", "out": 3}, "a folder is a path"), ({"task": "reverse", "peers": ("cublas",)}, "peers has"),
        ({"task": "reverse", "launch": {"grid": [1]}}, "launch is for a @triton.jit function"),
    ],
)  # fmt: skip
def test_arguments_that_are_none(given: dict, why: str, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidInputError, match=why):
        optimize_kernel(REVERSE.start, sandbox=sandbox, **given)


@pytest.mark.parametrize("made", [None, 3, ["x"], [None], [Proposal(text=b"x")], [Proposal(text="x", dollars=-1.0)],
                                  [Proposal(text="x", note=3)]])  # fmt: skip
def test_proposals_that_are_none(made: object, sandbox: Sandbox) -> None:
    class Mine:
        name = "mine"

        def propose(self, *given):
            return made

    with pytest.raises(InvalidInputError, match="mine (must propose|proposes)"):
        optimize_kernel(REVERSE.start, proposer=Mine(), candidates=1, sandbox=sandbox)


@pytest.mark.parametrize("text", [None, 3, [], "\ud800" + REVERSE.start])
def test_what_is_no_text_is_malformed(text: object, sandbox: Sandbox) -> None:
    assert check(text, "reverse", sandbox=sandbox).verdict is Verdict.MALFORMED


def test_ctrl_c_ends_what_searches_wait_for(tmp_path: Path) -> None:
    """A kernel that never ends would be waited for a minute; its process ends with the worker that started it."""
    endless = next(one.hack for one in FIXTURES if one.id == "R3")
    jobs: list[str] = []

    def interrupt() -> None:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if path.read_text().rpartition(")")[2].split()[1] == str(worker.pid):
                    jobs.append(path.parent.name)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    class Once:
        name = "once"

        def propose(self, brief: Brief, history: list[Attempt], count: int) -> list[Proposal]:
            threading.Timer(2.0, interrupt).start()
            return [Proposal(text=endless, note="endless")]

    with Pool(1, seconds=60) as pool:
        worker = pool._all[0]._worker
        assert worker
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            searches.search_all([TASKS["matrix_copy"]], pool=pool, target="h100-sxm", seconds=100,
                                proposer=lambda task: Once(), out=tmp_path)  # fmt: skip
        assert time.monotonic() - begin < 30 and worker.wait(5) == -signal.SIGKILL
    assert len(attempts_of(tmp_path / "matrix_copy")) == 1, "what was there stays"
    time.sleep(0.5)
    assert len(jobs) == 1 and not Path(f"/proc/{jobs[0]}/exe").exists(), "nothing that it started is left"
