"""Timed launches that are repeated, and clocks beside the events: what they show, on a CPU with launches of ours."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.cuda_llm import Verdict
from gpu_accel.cuda_llm.gpu_jobs import Kept, Launches
from gpu_accel.cuda_llm.other_clocks import ALLOWED, STAMP, count_of, judge_clocks
from gpu_accel.cuda_llm.repeats import Bits, Log, judge_repeats, repeat
from gpu_accel.cuda_llm.verdict import Kind, Rejected


class Memory:
    """An input and an output of a launch."""

    def __init__(self) -> None:
        self.x, self.out = torch.zeros(1000), torch.zeros(1000)
        self.renew(0)

    def refresh(self) -> None:
        self.renew(self.seed + 1)

    def renew(self, seed: int) -> None:
        self.seed = seed
        self.x.copy_(torch.randn(1000, generator=torch.Generator().manual_seed(seed)))
        self.out.fill_(float("nan"))

    def named(self, role: str) -> list[torch.Tensor]:
        return [self.x] if role == "input" else [self.out]


def honest(memory: Memory) -> None:
    memory.out.copy_(memory.x * 2)


class Counting:
    """Right for so many launches since it was loaded, and not after."""

    def __init__(self, right: int) -> None:
        self.left = right

    def __call__(self, memory: Memory) -> None:
        self.left -= 1
        if self.left >= 0:
            honest(memory)


class Remembering:
    """Gives the outputs of its first launch again."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def __call__(self, memory: Memory) -> None:
        if self.first is None:
            self.first = memory.x * 2
        memory.out.copy_(self.first)


def skips_one(memory: Memory) -> None:
    memory.out.copy_(memory.x * 2)
    if memory.seed == 7:  # that of one launch: what a launch knows of its inputs is the same when they come again
        memory.x[3] = 0


def launched(timed, again, count: int = 20) -> dict[str, int]:
    log, memory = Log(lambda: Bits(4000, 5, "cpu")), Memory()
    for seed in range(count):
        memory.renew(seed)
        timed(memory)
        log.note(memory)
    other = Memory()
    return repeat(log, other, lambda: again(other), seed=11)


def test_an_honest_kernel_gives_the_same_bits() -> None:
    found = launched(honest, honest)
    assert found == {"launches": 20, "inputs": 0, "outputs": 0}
    assert judge_repeats(found, bits=True).startswith("20 timed launches repeated bit for bit")
    assert judge_repeats(found | {"outputs": 3}, bits=False) == "inputs of 20 timed launches unchanged"


@pytest.mark.parametrize("made", [lambda: Counting(12), Remembering], ids=["right at first", "remembers"])
def test_a_kernel_with_a_state_does_not(made) -> None:
    found = launched(made(), made())
    assert found["outputs"] > 0
    with pytest.raises(Rejected) as caught:
        judge_repeats(found, bits=True)
    assert (caught.value.verdict, caught.value.kind) == (Verdict.WRONG, Kind.NOT_DETERMINISTIC)


def test_inputs_that_one_timed_launch_changed_are_seen() -> None:
    found = launched(skips_one, skips_one)
    assert found == {"launches": 20, "inputs": 1, "outputs": 0}
    with pytest.raises(Rejected) as caught:
        judge_repeats(found, bits=True)
    assert (caught.value.verdict, caught.value.kind) == (Verdict.CHEATING, Kind.INPUT_MUTATED)


def test_weights_that_a_launch_has_changed_do_not_hide_what_it_does() -> None:
    """All memory of the process is in reach of device code: with weights of zero every sum is zero."""
    log, memory, again = Log(lambda: Bits(4000, 5, "cpu")), Memory(), Memory()
    for seed in range(4):
        memory.renew(seed)
        log._bits._weights.zero_()
        log.note(memory)
    assert all(type(value) is int for row in log.rows for value in row), "what is kept is out of the device's reach"
    found = repeat(log, again, lambda: honest(again), seed=11)
    assert found["outputs"] == 4 and found["inputs"] == 4


def test_every_launch_is_as_likely_to_be_kept_as_any_other() -> None:
    memory, counts = Memory(), [0] * 12
    launches = Launches([memory])  # type: ignore[list-item]
    launches.kept = lambda: (memory.seed, [])  # type: ignore[method-assign]
    for choice in range(600):
        kept = Kept(3, choice)
        for seed in range(12):
            memory.seed = seed
            kept.offer(launches)
        assert len({seed for seed, _ in kept.rows}) == 3
        for seed, _ in kept.rows:
            counts[seed] += 1
    # 150 on average, with a standard deviation of 10.6: 12 values stay within 5 of them
    assert all(97 < count < 203 for count in counts), counts


def test_memory_that_is_made_ready_again_was_not_launched_on() -> None:
    """Between two series of launches all memory is renewed; of what no launch has touched there is nothing to note."""
    log, memories = Log(lambda: Bits(4000, 5, "cpu")), [Memory(), Memory()]
    launches = Launches(memories, log)  # type: ignore[arg-type]
    for round in range(3):
        for memory in memories:
            if round < 2 or memory is memories[0]:
                honest(memory)
                launches.on(memory)  # type: ignore[arg-type]
        launches.pending = list(memories)  # type: ignore[arg-type]
        launches.refresh()
        launches.refresh()
    other = Memory()
    assert repeat(log, other, lambda: honest(other), seed=1) == {"launches": 5, "inputs": 0, "outputs": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.int8], ids=str)
def test_bits_tell_every_change_of_one_element_and_an_exchange(dtype: torch.dtype) -> None:
    bits = Bits(64, 3, "cpu")  # fewer weights than words: they are used again
    x = torch.randint(-90, 90, (45,), generator=torch.Generator().manual_seed(1)).to(dtype)
    told = {int(bits([x]))}
    for at in range(45):
        other = x.clone()
        other[at] += 1
        told.add(int(bits([other])))
    assert len(told) == 46
    a, b = x[:20].clone(), x[20:40].clone()
    assert int(bits([a, b])) != int(bits([b, a]))
    assert int(bits([x[:0]])) == 0


@pytest.mark.parametrize(
    "said",
    [None, [], {}, {"launches": 0, "inputs": 0, "outputs": 0}, {"launches": 3, "inputs": 0, "outputs": -1},
     {"launches": 3.0, "inputs": 0, "outputs": 0}, {"launches": True, "inputs": 0, "outputs": 0}],
)  # fmt: skip
def test_a_process_that_repeated_nothing_has_not_passed(said) -> None:
    with pytest.raises(Rejected) as caught:
        judge_repeats(said, bits=True)
    assert caught.value.verdict is Verdict.CRASHED


def test_clocks_that_agree_and_that_do_not() -> None:
    told = {"events": 0.1, "host": 0.11, "gpu": 0.1}
    assert judge_clocks(told) == "clocks agree: host 0.11, gpu 0.1 and events 0.1 ms a launch, in a row"
    assert "gpu" not in judge_clocks(told | {"gpu": "0"})
    assert judge_clocks({"events": 0.1, "host": ALLOWED * 0.1})
    for late in ({"host": 0.3}, {"gpu": 0.3}):
        with pytest.raises(Rejected) as caught:
            judge_clocks(told | late)
        assert caught.value.verdict is Verdict.UNVERIFIED and "clocks disagree" in caught.value.detail
    for nothing in (None, {}, {"host": 0.1}, {"events": 0.1}, told | {"events": float("inf")}, told | {"events": 1},
                    {"events": 0.1, "host": -1.0}):  # fmt: skip
        with pytest.raises(Rejected) as caught:
            judge_clocks(nothing)
        assert caught.value.verdict is Verdict.CRASHED


def test_enough_launches_fill_the_window() -> None:
    assert [count_of(ms) for ms in (1e-6, 0.04, 1.0, 19.0, 3000.0)] == [500, 500, 20, 2, 1]


def test_the_kernel_that_reads_the_gpus_own_clock_compiles() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install 'gpu-accel[microbenchmarks]'")
    from gpu_accel.cuda_llm.compiled import compile_cuda
    from gpu_accel.hardware.microbenchmarks.compile import disassemble

    binary = compile_cuda(STAMP, "stamp", {"constants": {}, "block": [1], "shared": 0})
    assert "SR_GLOBALTIMER" in disassemble(binary.cubin)
