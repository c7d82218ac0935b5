"""Keys and values that travel in 8 bits: what arrives is exactly what their scales say, in every schedule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.ring_attention import wire, wire_kernels
from gpu_accel.ring_attention.attention import forward, make_call
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.simulate import simulate, simulate_attention
from gpu_accel.ring_attention.transport import World
from gpu_accel.testing import relative_error

sys.path.insert(0, str(Path(__file__).parent))
from test_pushed import Pushing  # noqa: E402
from test_schedules import assert_exact, make, truth  # noqa: E402

EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
RUNS = [
    ("allgather", "zigzag", 3, {}),
    ("ulysses", "striped", 3, {}),
    ("usp", "zigzag", 4, {"ulysses": 2}),  # encoded twice: in the group, and again on the ring
    ("mesh", "zigzag", 4, {"mesh": (2, 2)}),
    ("double_ring", "zigzag", 4, {"inner": 2}),
]


def arrived(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return wire.decode(wire.encode(x, kind), kind, x.dtype)


@pytest.mark.parametrize("kind", EIGHT, ids=str)
def test_numbers_of_any_size_arrive(kind: torch.dtype):
    x = torch.randn(2, 5, 3, 24, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-30, 30, 15).view(1, 5, 3, 1)  # a scale for each row of a head
    y = arrived(x, kind)
    step = 2.0**-4 if kind == torch.float8_e4m3fn else 2.0**-3
    largest = x.abs().amax(-1, keepdim=True)
    assert ((x - y).abs() <= step * x.abs() + 1e-3 * largest * (kind == torch.float8_e4m3fn)).all()
    assert relative_error(y, x) > step / 8, "these are no 8 bits"
    assert torch.equal(arrived(y.bfloat16(), kind), y.bfloat16()), "sent on, it must stay as it is"
    assert torch.equal(arrived(torch.zeros(1, 1, 1, 4), kind), torch.zeros(1, 1, 1, 4))


@pytest.mark.parametrize("kind", EIGHT, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [22, 24, 128])
def test_kernels_make_the_same_bytes(dim: int, dtype: torch.dtype, kind: torch.dtype):
    """Rows of heads of any strides: small, zero, on the edge of a scale, next to the largest, not finite."""
    x = torch.randn(2, 7, 5, dim, generator=torch.Generator().manual_seed(3))[:, 1:6, :3]
    x[0, 0, 0], x[1, 1, 1], x[0, 2, 2] = 0, 448 * 2.0**-4, x[0, 2, 2] * 1e-6
    if dtype != torch.float16:
        x *= torch.logspace(-30, 30, 15).view(1, 5, 3, 1)
    x = x.to(dtype)
    x[0, 1, 1, 0], x[0, 1, 2, dim - 1], x[1, 4, 0, 3] = float("nan"), float("inf"), float("-inf")
    finite = x.isfinite().all(-1)
    expected = wire.encode(x, kind)
    coded = torch.full((2, 9, 3, dim + 4), 7, dtype=torch.uint8)[:, 2:7]
    wire_kernels.encode_into(x, kind, coded)
    assert torch.equal(coded[finite], expected[finite]) and int((~finite).sum()) == 3
    y = torch.full((2, 5, 6, dim), 9.0, dtype=dtype)[:, :, ::2]
    wire_kernels.decode_into(coded, kind, y)
    assert torch.equal(y[finite], wire.decode(expected, kind, dtype)[finite]) and y[~finite].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_arrives_as_nan(bad: float):
    x = torch.ones(1, 2, 1, 8)
    x[0, 1, 0, 3] = bad
    y = arrived(x, EIGHT[0])
    assert torch.equal(y[0, 0], x[0, 0]) and y[0, 1].isnan().all()


@pytest.mark.parametrize("kind", EIGHT, ids=str)
@pytest.mark.parametrize(("schedule", "layout", "ranks", "options"), RUNS, ids=[run[0] for run in RUNS])
def test_schedules_compute_with_what_arrives(schedule: str, layout: str, ranks: int, options: dict, kind: torch.dtype):
    q, k, v, do = make(23)
    expected = truth(q, arrived(k, kind), arrived(v, kind), do, causal=True)
    found = simulate_attention(
        q, k, v, do=do, ranks=ranks, schedule=schedule, layout=layout, causal=True, wire=kind, **options
    )
    assert_exact(found, expected, schedule)


@pytest.mark.parametrize("pushes", [False, True], ids=["passed on", "pushed"])
def test_a_ring_keeps_its_own_block_as_it_is(pushes: bool):
    kind, ranks = EIGHT[0], 3
    q, k, v, _ = make(24)
    layout = make_layout("zigzag", seqlen=24, ranks=ranks)

    def one_rank(transport):
        transport = Pushing(transport.world, transport.rank) if pushes else transport
        shards = [layout.shard(x, transport.rank) for x in (q, k, v)]
        return forward(*shards, make_call(*shards, layout, causal=True, wire=kind), transport)[0]

    for rank, o in enumerate(simulate(one_rank, ranks)):
        own = layout.positions(rank)
        keys, values = arrived(k, kind), arrived(v, kind)
        keys[:, own], values[:, own] = k[:, own], v[:, own]
        exact = truth(q, keys, values, torch.zeros(*q.shape[:-1], v.shape[-1]).double(), causal=True)[0]
        assert (o - exact[:, own]).abs().max() < 1e-12, rank


def test_gradients_of_a_ring_and_what_it_saves():
    q, k, v, do = make(24, dtype=torch.float32)
    sent = {}
    for kind in (None, torch.bfloat16, torch.float8_e4m3fn):
        world = World(4)
        found = simulate_attention(q, k, v, ranks=4, causal=True, wire=kind, world=world)
        sent[kind] = world.bytes_sent[0]
    numbers = 3 * 6 * 2 * (8 + 16)  # hops, rows, heads, dim and dim of v
    assert sent == {None: 4 * numbers, torch.bfloat16: 2 * numbers, torch.float8_e4m3fn: numbers + 3 * 6 * 2 * 8}
    exact = simulate_attention(q, k, v, do=do, ranks=4, causal=True)
    found = simulate_attention(q, k, v, do=do, ranks=4, causal=True, wire=torch.float8_e4m3fn)
    for name, x, y in zip(("o", "dq", "dk", "dv"), (found[0], *found[2:]), (exact[0], *exact[2:]), strict=True):
        assert 1e-3 < relative_error(x, y) < 0.1, name


def test_ulysses_rounds_keys_where_it_is_asked_to():
    """A wire of 16 bits: keys and values in it, queries as they are."""
    q, k, v, do = make(23)
    expected = truth(q, k.half().double(), v.half().double(), do, causal=True)
    for schedule, options in (("ulysses", {}), ("usp", {"ulysses": 2})):
        found = simulate_attention(
            q, k, v, do=do, ranks=4, schedule=schedule, causal=True, wire=torch.float16, **options
        )
        assert_exact(found, expected, schedule)
