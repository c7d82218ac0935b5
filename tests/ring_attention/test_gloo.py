"""Real processes over gloo: the same results as one device, and clear errors instead of hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from gpu_accel.errors import GpuAccelError, HardwareError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.transport import TorchTransport
from gpu_accel.testing import relative_error

sys.path.insert(0, str(Path(__file__).parent))
from processes import results, run_ranks  # noqa: E402

RANKS, SEQLEN = 3, 23
SCHEDULES = ("kv_ring", "q_ring", "allgather", "ulysses", "usp")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """What the first use of autograd imports, before processes are forked that would each do it again."""
    q, k, v, do = inputs()
    q.requires_grad_()
    o = RingAttention(2, simulate=True)(*(x.transpose(1, 2) for x in (q, k, v)))
    torch.autograd.grad(o, q, do.transpose(1, 2))


def inputs(dtype=torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, SEQLEN, heads, 8, generator=source).to(dtype) for heads in (4, 2, 2, 4)]


def shards_of(rank: int, layout, dtype=torch.float32) -> list[torch.Tensor]:
    return [layout.shard(x, rank) for x in inputs(dtype)]


def forward_and_backward(rank: int) -> dict[str, list[torch.Tensor]]:
    transport = TorchTransport(timeout=20)
    layout = make_layout("zigzag", seqlen=SEQLEN, ranks=RANKS)
    found = {}
    for schedule in SCHEDULES:
        *qkv, do = shards_of(rank, layout)
        for x in qkv:
            x.requires_grad_()
        o, _ = distributed_attention(*qkv, layout=layout, transport=transport, schedule=schedule, causal=True)
        grads = torch.autograd.grad(o, qkv, do)
        found[schedule] = [gather_sequence(x, layout, transport).numpy() for x in (o, *grads)]
    return found


def test_every_schedule_equals_one_device(tmp_path: Path):
    q, k, v, do = inputs()
    expected = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    found = results(run_ranks(forward_and_backward, RANKS, tmp_path))
    for schedule in SCHEDULES:
        for name, x, exact in zip(("o", "dq", "dk", "dv"), found[0][schedule], expected, strict=True):
            assert relative_error(torch.from_numpy(x), exact) < 1e-6, (schedule, name)
            assert all((x == other[schedule][("o", "dq", "dk", "dv").index(name)]).all() for other in found)


def disagree(rank: int) -> list[str]:
    """Mistakes of one rank, one after the other, and a good call at the end: nothing is left behind by the errors."""
    transport = TorchTransport(timeout=20)
    layout = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    odd = rank == 1

    def attempt(**changes) -> str:
        settings = {"layout": layout, "schedule": "kv_ring", "causal": True, **changes}
        q, k, v, _ = shards_of(rank, settings["layout"], changes.get("dtype", torch.float32))
        settings.pop("dtype", None)
        if settings.pop("poison", False):
            v[0, 2, 1, 3] = float("nan")
        try:
            o, _ = distributed_attention(q, k, v, transport=transport, **settings)
        except GpuAccelError as error:
            return f"{type(error).__name__}: {error}"
        return f"fine {float(o.abs().sum()) > 0}"

    return [
        attempt(causal=not odd),
        attempt(schedule="allgather" if odd else "kv_ring"),
        attempt(layout=make_layout("striped" if odd else "contiguous", seqlen=SEQLEN, ranks=2)),
        attempt(dtype=torch.bfloat16 if odd else torch.float32),
        attempt(softmax_scale=-1.0 if odd else 1.0),
        attempt(poison=odd, check_finite=True),
        attempt(check_finite=True),
    ]


def test_ranks_that_differ_all_raise_and_can_go_on(tmp_path: Path):
    first, second = results(run_ranks(disagree, 2, tmp_path))
    for told, said in ((first, "rank 0"), (second, "rank 1")):
        for message in told[:4]:
            assert message.startswith("InvalidInputError: the ranks do not agree, so nothing was sent"), message
            assert said in message
        assert told[-1] == "fine True"
    assert "rank 1: v holds NaN or Inf in tokens" in first[5] and second[5].startswith("InvalidInputError: v holds NaN")
    assert "bfloat16" in first[3] and "float32" in first[3]
    assert "softmax_scale must be positive" in second[4]  # its own error, in its own words
    assert first[4].startswith("InvalidInputError: nothing was sent, because another rank refused") and (
        "rank 1: softmax_scale must be positive" in first[4]
    )


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# what rank 1 does no more, after how many times, and the schedule
DEATHS = {
    "hop": ("exchange", 1, "kv_ring", False),  # the first succeeds, the second never comes
    "hop-of-the-backward": ("exchange", 3, "kv_ring", True),
    "all-gather": ("all_gather", 0, "allgather", False),
    "all-to-all-of-the-backward": ("all_to_all", 2, "ulysses", True),
    "agreement": ("agree", 1, "kv_ring", True),
}


def die_on_the_way(rank: int, what: str, times: int, schedule: str, backward: bool) -> None:
    transport = TorchTransport(timeout=20)
    layout = make_layout("zigzag", seqlen=SEQLEN, ranks=RANKS)
    *qkv, do = shards_of(rank, layout)
    for x in qkv:
        x.requires_grad_(backward)
    if rank == 1:
        action, left = getattr(transport, what), [times]

        def last(*arguments, **places):
            if left[0] == 0:
                die()
            left[0] -= 1
            return action(*arguments, **places)

        setattr(transport, what, last)
    try:
        o, _ = distributed_attention(*qkv, layout=layout, transport=transport, schedule=schedule)
        torch.autograd.grad(o, qkv, do)
    except GpuAccelError as error:
        try:  # the transport is known to be broken: no second wait
            distributed_attention(*qkv, layout=layout, transport=transport)
        except GpuAccelError as again:
            assert "this transport failed before" in str(again)
        raise error


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_a_killed_rank_ends_the_others_with_an_error(death: tuple, tmp_path: Path):
    outcomes = run_ranks(die_on_the_way, RANKS, tmp_path, *death, lost=(1,))
    assert sorted(outcomes) == [0, 2]
    for outcome in outcomes.values():
        assert outcome.error == "CommunicationError", outcome.trace
        assert "another rank is gone, failed or did not answer within 20 s" in outcome.message
        assert outcome.seconds < 20


def come_late(rank: int) -> None:
    transport = TorchTransport(timeout=1.0)
    layout = make_layout("zigzag", seqlen=SEQLEN, ranks=2)
    q, k, v, _ = shards_of(rank, layout)
    if rank == 1:
        time.sleep(2.5)
        return
    distributed_attention(q, k, v, layout=layout, transport=transport)


def test_a_late_rank_is_waited_for_no_longer_than_the_timeout(tmp_path: Path):
    outcomes = run_ranks(come_late, 2, tmp_path)
    assert outcomes[0].error == "CommunicationError" and "within 1 s" in outcomes[0].message
    assert outcomes[0].seconds < 3


def say_much(rank: int) -> str:
    """Statements that differ behind what fits."""
    transport = TorchTransport(timeout=20)
    transport.agree("the same " * 1000)
    try:
        transport.agree("the same " * 1000 + str(rank))
    except GpuAccelError as error:
        return type(error).__name__
    return "they agree"


def test_long_statements_are_compared_whole(tmp_path: Path):
    assert results(run_ranks(say_much, 2, tmp_path)) == ["InvalidInputError"] * 2


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(HardwareError, match="start with torchrun .*simulate"):
        TorchTransport()
