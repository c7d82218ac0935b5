"""What explain says is what a call does: its steps, its kernels, its refusals."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import gpu_accel.ring_attention as ring
from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import function


def make(seqlen: int = 100, heads: int = 4, heads_kv: int = 2):
    return [torch.zeros(1, n, seqlen, 16, dtype=torch.bfloat16) for n in (heads, heads_kv, heads_kv)]


def test_the_steps_of_a_ring_and_why_no_kernel_is_taken():
    told = ring.RingAttention(4, simulate=True).explain(*make(), causal=True, rank=1).splitlines()
    assert told[0] == "call       kv_ring, zigzag, 100 tokens over 4 ranks, causal, bfloat16"
    assert told[1] == "step 0     its own keys: causal, 26 queries, 26 keys"
    assert told[2] == "step 1     keys of rank 0: full, 26 queries, 13 keys"
    assert told[3] == "step 2     keys of rank 3: full, 13 queries, 26 keys"
    assert told[5].startswith("forward    reference; results of steps are merged by operations of torch")
    assert "only the Hopper kernels add" in told[6]
    assert told[7].startswith("not taken  hopper, portable: of CPU tensors")


def test_kernels_by_name_and_steps_without_work():
    module = ring.RingAttention(4, simulate=True, backend="portable")
    told = module.explain(*make(), window_size=(10, 0), rank=3)
    assert "step 2     keys of rank 1: nothing to see" in told and "not taken" not in told
    assert "forward    portable; results of steps are merged in the kernel's epilogue" in told
    packed = ring.RingAttention(2, "documents", simulate=True).explain(*make(), causal=True, documents=[20] * 5)
    assert "step 0     its own keys: 5 kernel calls" in packed


@pytest.mark.parametrize("schedule", ring.SCHEDULES)
def test_every_schedule_is_told_or_refused(schedule: str):
    q, k, v = make()
    q = q[:, :, :2] if schedule == "tree" else q
    told = ring.RingAttention(4, simulate=True, schedule=schedule).explain(q, k, v, causal=True)
    assert f"call       {schedule}, " in told
    assert ("refused    it balances contiguous shards" in told) == (schedule == "helper")
    assert ("merged" in told) == (schedule not in ("ulysses", "allgather", "helper"))


def test_shards_of_a_rank_and_mistakes():
    q, k, v = (x.transpose(1, 2) for x in make())
    layout = ring.make_layout("striped", seqlen=100, ranks=4)
    shards = [layout.shard(x, 2) for x in (q, k, v)]
    assert "keys of rank 1" in ring.explain(*shards, layout=layout, rank=2, causal=True)
    for rank in (-1, 4, True, "0"):
        with pytest.raises(InvalidInputError, match="rank must be from 0 to 3"):
            ring.explain(*shards, layout=layout, rank=rank)
    with pytest.raises(InvalidInputError, match="no option windowsize here"):
        ring.explain(*shards, layout=layout, windowsize=(1, 0))
    with pytest.raises(InvalidInputError, match="seq_len is 99"):
        ring.RingAttention(4, simulate=True).explain(*make(), seq_len=99)


def test_on_ranks_each_tells_of_itself():
    layout = ring.make_layout("zigzag", seqlen=100, ranks=2)

    def one_rank(transport):
        shards = [layout.shard(x, transport.rank, dim=2) for x in make()]
        return ring.RingAttention(2, transport=transport).explain(*shards, causal=True, seq_len=100)

    from gpu_accel.ring_attention.simulate import simulate

    first, second = simulate(one_rank, 2)
    assert "keys of rank 1" in first and "keys of rank 0" in second


def on_hopper(monkeypatch) -> None:
    """Problems as an H100 would have them; nothing is launched."""
    made = function.problem_of

    def problem_of(*tensors, **options):
        return dataclasses.replace(made(*tensors, **options), device_type="cuda", capability=(9, 0))

    monkeypatch.setattr(function, "problem_of", problem_of)


HOPPER = {
    "whole-blocks": (2048, 128, {}, "kernel's epilogue", "a step's kernel adds to float32 sums that travel"),
    "parts-of-blocks": (2040, 128, {}, "kernel's epilogue", "passes of their own .* rows* .* is not on blocks"),
    "D96": (2048, 96, {}, "passes of their own .merges at head_dim", "passes of their own .adds up gradients"),
    "turns": (2048, 128, dict(deterministic=True), "kernel's epilogue", "passes of their own .taking turns"),
}


@pytest.mark.parametrize(("seqlen", "dim", "options", "forward", "backward"), HOPPER.values(), ids=HOPPER)
def test_on_a_hopper_gpu(seqlen, dim, options, forward, backward, monkeypatch):
    on_hopper(monkeypatch)
    tensors = [torch.zeros(1, n, seqlen, dim, dtype=torch.bfloat16) for n in (4, 2, 2)]
    window = (300, 0) if "deterministic" in options else (-1, 0)
    told = ring.RingAttention(4, simulate=True, **options).explain(*tensors, window_size=window).splitlines()
    assert re.match(f"forward    hopper; results of steps are merged in.*{forward}", told[5]), told
    assert re.match(rf"backward   \w+; .*{backward}", told[6]), told
