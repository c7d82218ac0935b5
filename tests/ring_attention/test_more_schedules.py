"""Mesh, concentric and double rings, helpers, tree decoding: exact where they run, refused with a reason elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.ring_attention.masks import Mask, work
from gpu_accel.ring_attention.schedules import SCHEDULES, schedule
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.ring_attention.sizes import default_mesh
from gpu_accel.ring_attention.transport import World

sys.path.insert(0, str(Path(__file__).parent))
from test_schedules import MASKS, assert_exact, case, make  # noqa: E402

RUNS = [
    ("mesh", "zigzag", 4, {}),
    ("mesh", "documents", 6, {}),
    ("mesh", "striped", 6, {"mesh": (3, 2)}),
    ("mesh", "contiguous", 3, {"mesh": (3, 1)}),
    ("concentric", "zigzag", 4, {}),
    ("concentric", "documents", 6, {"mesh": (2, 3)}),
    ("concentric", "striped", 6, {"mesh": (3, 2)}),
    ("concentric", "contiguous", 3, {"mesh": (3, 1)}),
    ("concentric", "contiguous", 8, {"mesh": (2, 4)}),
    ("double_ring", "contiguous", 6, {}),
    ("double_ring", "striped", 8, {}),
    ("double_ring", "documents", 6, {"inner": 2}),
    ("double_ring", "zigzag", 3, {"inner": 1}),
    ("double_ring", "zigzag", 3, {"inner": 3}),
    ("double_ring", "zigzag", 1, {}),
    *(("helper", "contiguous", ranks, {}) for ranks in (1, 2, 3, 4, 5, 8)),
]


@pytest.mark.parametrize(
    ("name", "layout", "ranks", "options"), RUNS, ids=lambda x: str(x) if not isinstance(x, dict) else ""
)
def test_exact_in_float64(name: str, layout: str, ranks: int, options: dict):
    for mask in ("causal", "window", "documents") if name == "helper" else MASKS:
        tensors, expected = case(mask, 23)
        found = simulate_attention(
            *tensors[:3], do=tensors[3], ranks=ranks, schedule=name, layout=layout, **options, **MASKS[mask]
        )
        assert_exact(found, expected, (mask, options))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "documents"])
@pytest.mark.parametrize("queries", [1, 4])
def test_tree_decodes_the_last_tokens(queries: int, layout: str):
    q, k, v, _ = make(23)
    q = q[:, -queries:].contiguous()
    for options in ({}, {"causal": True}, {"window_size": (6, 0)}):
        if layout == "striped" and queries > 1 and options:
            with pytest.raises(UnsupportedError, match="striped keys"):
                simulate_attention(q, k, v, ranks=3, schedule="tree", layout=layout, **options)
            continue
        found = simulate_attention(q, k, v, ranks=3, schedule="tree", layout=layout, **options)
        assert_exact(found, attention_truth(q, k, v, **options), options)


def test_tree_sends_results_and_not_keys():
    q, k, v, _ = make(64)
    world = World(4)
    simulate_attention(q[:, -1:].contiguous(), k, v, ranks=4, schedule="tree", causal=True, world=world)
    assert world.bytes_sent[0] == 3 * 4 * (16 + 1) * 8  # to 3 ranks, 4 heads, o and lse in float64


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("helper", {"layout": "zigzag", "causal": True}, "zigzag ones are balanced as they are"),
        ("helper", {"layout": "contiguous"}, "the mask is full"),
        ("double_ring", {}, "3 ranks have no groups: give inner="),
        ("tree", {"do": make(8)[3]}, "tree decoding has no backward"),
    ],
)
def test_what_is_not_there_is_refused_on_every_rank_before_sending(name: str, options: dict, message: str):
    q, k, v, _ = make(8)
    world = World(3)
    with pytest.raises(UnsupportedError, match=message):
        simulate_attention(q, k, v, ranks=3, schedule=name, world=world, **options)
    assert name == "tree" or sum(world.bytes_sent) == 0


@pytest.mark.parametrize(
    ("ranks", "heads", "heads_kv", "expected"), [(256, 32, 32, (16, 16)), (64, 64, 8, (2, 32)), (8, 32, 4, (1, 8))]
)
def test_the_mesh_leans_towards_the_smaller_side(ranks: int, heads: int, heads_kv: int, expected: tuple[int, int]):
    assert default_mesh(ranks, heads, heads_kv) == expected


def test_a_square_mesh_sends_less_than_the_ring():
    """Mesh-Attention's claim in miniature: with heads = heads_kv, 16 ranks, forward."""
    q, k, v, _ = make(64, heads=4, heads_kv=4)
    sent = {}
    for name in ("kv_ring", "mesh"):
        world = World(16)
        simulate_attention(q, k, v, ranks=16, schedule=name, world=world)
        sent[name] = world.bytes_sent[0]
    assert sent["mesh"] < 0.5 * sent["kv_ring"]


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_helpers_even_out_the_work(ranks: int):
    """The busiest rank does ceil((N + 1) / 2) blocks, where without helpers it does N (DISTFLASHATTN, section 3.1)."""
    from gpu_accel.ring_attention.layouts import make_layout
    from gpu_accel.ring_attention.schedules.helper import _Step
    from gpu_accel.ring_attention.schedules.ring import Ring

    layout = make_layout("contiguous", seqlen=ranks, ranks=ranks)
    blocks = tuple(layout.runs(r) for r in range(ranks))
    done = []
    for me in range(ranks):
        ring = Ring(None, tuple(range(ranks)), blocks, me)  # type: ignore[arg-type]
        steps = [_Step(ring, t) for t in range(1, ranks // 2 + 1)]
        done.append(1 + sum(s.working or s.helping for s in steps))
    assert sum(done) == sum(work(q, k, Mask(right=0)) for q in blocks for k in blocks)
    assert max(done) == ranks // 2 + 1


def test_every_schedule_has_the_three_functions():
    for name in SCHEDULES:
        module = schedule(name)
        assert all(callable(getattr(module, function)) for function in ("refuse", "forward", "backward")), name


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "tree"])
@pytest.mark.parametrize("empty", [{"seqlen": 0}, {"seqlen": 1}, {"seqlen": 5, "heads": 0}, {"seqlen": 5, "batch": 0}],
                         ids=["no tokens", "one token", "no query heads", "no sequences"])  # fmt: skip
def test_nothing_to_attend(name: str, empty: dict):
    """Gradients of the shapes of their inputs, and zeros where no query is left."""
    q, k, v, do = make(**empty)
    o, lse, dq, dk, dv = simulate_attention(
        q, k, v, do=do, ranks=8, schedule=name, layout="contiguous", causal=name == "helper"
    )
    assert [x.shape for x in (o, dq, dk, dv)] == [x.shape for x in (do, q, k, v)]
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert empty == {"seqlen": 1} or not any(x.any() for x in (o, dq, dk, dv))
