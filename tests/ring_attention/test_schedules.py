"""Every schedule, layout and mask on 1 to 8 simulated ranks, forward and backward, against one device in float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import attention
from gpu_accel.ring_attention.layouts import LAYOUTS, make_layout
from gpu_accel.ring_attention.simulate import simulate, simulate_attention
from gpu_accel.ring_attention.transport import World
from gpu_accel.testing import assert_close_to_truth, relative_error, yardstick_attention, yardstick_attention_backward

COMPLETE = ("kv_ring", "q_ring", "allgather", "ulysses", "usp")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 0)},
    "softcap": {"window_size": (9, 2), "softcap": 2.0},
    "documents": {"causal": True, "documents": (9, 0, 1, 13)},
}
NAMES = ("o", "lse", "dq", "dk", "dv")


def make(seqlen: int, *, heads=4, heads_kv=2, dtype=torch.float64, batch=1, seed=0) -> list[Tensor]:
    """q, k, v and the gradient of o, with another head_dim for v."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(heads, 8), (heads_kv, 8), (heads_kv, 16), (heads, 16)]
    return [torch.randn(batch, seqlen, *s, generator=source, dtype=torch.float64).to(dtype) for s in shapes]


def truth(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, documents=None, **options) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv) of a single device in float64."""
    if documents is None:
        return *attention_truth(q, k, v, **options), *attention_truth_backward(do, q, k, v, **options)
    cu = torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int32)
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    one_by_one = [
        (*attention_truth(*x[:3], **offsets, **options), *attention_truth_backward(x[3], *x[:3], **offsets, **options))
        for x in zip(q, k, v, do, strict=True)
    ]
    return tuple(torch.stack(parts) for parts in zip(*one_by_one, strict=True))


@functools.cache
def case(mask: str, seqlen: int, heads: int = 4, heads_kv: int = 2):
    tensors = make(seqlen, heads=heads, heads_kv=heads_kv)
    return tensors, truth(*tensors, **MASKS[mask])


def assert_exact(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], about: object) -> None:
    for name, a, b in zip(NAMES, found, expected, strict=False):
        assert a.shape == b.shape, (name, about)
        assert torch.equal(a.isneginf(), b.isneginf()), (name, about)
        error = (a - b).masked_fill(b.isneginf(), 0).abs().max().item() if a.numel() else 0.0
        assert error < 1e-12, (name, error, about)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", COMPLETE)
def test_exact_in_float64(schedule: str, mask: str):
    tensors, expected = case(mask, 23)
    for layout, ranks in [*itertools.product(LAYOUTS, (3, 4)), ("zigzag", 1), ("striped", 2), ("zigzag", 8)]:
        found = simulate_attention(
            *tensors[:3], do=tensors[3], ranks=ranks, schedule=schedule, layout=layout, **MASKS[mask]
        )
        assert_exact(found, expected, (schedule, layout, ranks))


@pytest.mark.parametrize("schedule", COMPLETE)
@pytest.mark.parametrize("seqlen", [0, 1, 3, 6])
def test_fewer_tokens_than_chunks(schedule: str, seqlen: int):
    tensors, expected = case("causal", seqlen)
    for layout in LAYOUTS:
        found = simulate_attention(*tensors[:3], do=tensors[3], ranks=4, schedule=schedule, layout=layout, causal=True)
        assert_exact(found, expected, layout)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 3), (8, 8), (10, 2)], ids=lambda h: f"H{h[0]}kv{h[1]}")
@pytest.mark.parametrize("schedule", ["kv_ring", "ulysses", "usp"])
def test_any_numbers_of_heads(schedule: str, heads: tuple[int, int]):
    tensors, expected = case("causal", 13, *heads)
    for ranks, options in ((3, {}), (4, {}), (4, {"ulysses": 2} if schedule == "usp" else {})):
        found = simulate_attention(*tensors[:3], do=tensors[3], ranks=ranks, schedule=schedule, causal=True, **options)
        assert_exact(found, expected, (ranks, options))


@pytest.mark.parametrize("schedule", COMPLETE)
def test_error_is_flat_in_the_number_of_ranks(schedule: str):
    """bf16 inputs, float32 partial results: 8 ranks err as much as one, and no more than torch in bf16 does."""
    q, k, v, do = make(64, dtype=torch.bfloat16, seed=3)
    expected = truth(q, k, v, do, causal=True)
    ruler_o, _ = yardstick_attention(q, k, v, causal=True)
    rulers = yardstick_attention_backward(do, q, k, v, causal=True)
    errors = {}
    for ranks in (1, 2, 8):
        o, _, *grads = simulate_attention(q, k, v, do=do, ranks=ranks, schedule=schedule, causal=True)
        assert o.dtype == torch.bfloat16 and grads[1].dtype == torch.bfloat16
        assert_close_to_truth("o", o, expected[0], ruler_o, by_scale=True)
        for name, grad, exact, ruler in zip(NAMES[2:], grads, expected[2:], rulers, strict=True):
            assert_close_to_truth(name, grad, exact, ruler, floor=8e-3)
        errors[ranks] = [relative_error(x, e) for x, e in zip((o, *grads), (expected[0], *expected[2:]), strict=True)]
    for ranks, found in errors.items():
        for name, error, alone in zip(("o", *NAMES[2:]), found, errors[1], strict=True):
            assert error < 1.02 * alone, (name, ranks, error, alone)


@pytest.mark.parametrize("schedule", COMPLETE)
def test_the_same_bits_every_time(schedule: str):
    q, k, v, do = make(37, dtype=torch.bfloat16)
    first, second = (
        simulate_attention(q, k, v, do=do, ranks=4, schedule=schedule, layout="zigzag", causal=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_padding_is_never_read():
    q, k, v, do = make(13)
    layout = make_layout("zigzag", seqlen=13, ranks=4)

    def one_rank(transport):
        shards = [layout.shard(x, transport.rank, padding=float("nan")) for x in (q, k, v, do)]
        call = attention.make_call(*shards[:3], layout, causal=True)
        o, lse = attention.forward(*shards[:3], call, transport)
        clean = torch.nan_to_num(shards[3])  # the gradient of padding is 0, as that of a loss that leaves it out
        return o, lse, *attention.backward(clean, *shards[:3], o, lse, call, transport)

    results = simulate(one_rank, 4)
    expected = truth(q, k, v, do, causal=True)
    whole = [layout.unshard([r[i] for r in results], dim=2 if i == 1 else 1) for i in range(5)]
    assert_exact(tuple(whole), expected, "NaN in padding")
    for rank, (o, lse, *_) in enumerate(results):
        padding = layout.positions(rank) < 0
        assert (o[:, padding] == 0).all() and lse[:, :, padding].isneginf().all()


def test_a_narrow_window_stops_the_ring_early():
    q, k, v, do = make(64)
    sent = {}
    for window in (-1, 3):
        world = World(8)
        simulate_attention(q, k, v, ranks=8, layout="contiguous", causal=True, window_size=(window, 0), world=world)
        sent[window] = world.bytes_sent[0]
    assert sent[-1] == 7 * sent[3] == 7 * (8 + 16) * 2 * 8 * 8  # (d + dv) * heads_kv * rows * 8 bytes a hop


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_are_those_of_the_formulas(ranks: int):
    """Forward volumes of schedules/__init__.py, per rank."""
    seqlen, heads, heads_kv, d, dv, e = 32, 4, 2, 8, 16, 8
    q, k, v, _ = make(seqlen)
    c = seqlen // ranks
    kv = (d + dv) * heads_kv * c * e
    expected = {
        "kv_ring": kv * (ranks - 1),
        "allgather": kv * (ranks - 1),
        # q over, then o and its partial results as they are reduced: o and lse in float64 here
        "q_ring": d * heads * c * e * (ranks - 1) + (dv + 1) * heads * c * e * ranks,
    }
    if ranks <= heads_kv:
        qkv = (d * heads + (d + dv) * heads_kv) * c * e
        expected["ulysses"] = (qkv + (dv + 1) * heads * c * e) * (ranks - 1) // ranks
    for schedule, volume in expected.items():
        world = World(ranks)
        simulate_attention(q, k, v, ranks=ranks, schedule=schedule, world=world)
        assert world.bytes_sent[0] == volume, schedule


def test_keys_travel_in_16_bits_when_asked_to():
    q, k, v, do = make(24, dtype=torch.float32)
    world, half = World(4), World(4)
    exact = simulate_attention(q, k, v, do=do, ranks=4, causal=True, world=world)
    rounded = simulate_attention(q, k, v, do=do, ranks=4, causal=True, wire=torch.bfloat16, world=half)
    assert half.bytes_sent[0] < world.bytes_sent[0]
    assert 1e-4 < relative_error(rounded[0], exact[0]) < 1e-2
    with pytest.raises(UnsupportedError, match="wire must be one of .*float8_e5m2, got torch.float64"):
        simulate_attention(q, k, v, ranks=2, wire=torch.float64)


def test_unknown_names_are_refused():
    q, k, v, _ = make(8)
    with pytest.raises(InvalidInputError, match="schedule must be one of"):
        simulate_attention(q, k, v, ranks=2, schedule="star")
    with pytest.raises(InvalidInputError, match="ulysses must divide the 4 ranks"):
        simulate_attention(q, k, v, ranks=4, schedule="usp", ulysses=3)
