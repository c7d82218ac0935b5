"""Taking turns to add to dQ: the device functions that say whose turn it is, run as plain Python."""

from __future__ import annotations

import types
from types import SimpleNamespace

import pytest
import torch

from gpu_accel.flash_attention3 import hopper_backward_device
from gpu_accel.ring_attention import hopper_backward_kernel as kernel
from gpu_accel.ring_attention.attention import make_call
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.schedules import ring_backward
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.transport import LocalTransport, World

KEYS, WARPS = 128, 4
_GL = SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b))


def plain(function, **others):
    """A device function on Python numbers."""
    return types.FunctionType(function.fn.__code__, {"gl": _GL, "KEYS": KEYS // 2, **others})


tile_at = plain(hopper_backward_device.tile_at)
query_blocks = plain(hopper_backward_device.query_blocks)
turn_of = plain(kernel._turn)


@pytest.mark.parametrize("rows", [64, 128], ids=lambda x: f"M{x}")
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "right"),
    [(1024, 1024, 0), (1024, 512, -1), (512, 1024, -1), (512, 1000, 0), (1000, 512, 0), (320, 832, 0), (512, 512, 70),
     (64, 64, 0), (64, 2048, -1)],
    ids=lambda x: str(x),
)  # fmt: skip
def test_turns_follow_the_order_in_which_tiles_are_handed_out(seqlen_q: int, seqlen_k: int, right: int, rows: int):
    """So a tile waits for such only that have been handed out before: whoever is first of all can go on."""
    heads_kv, causal = 4, right >= 0
    num_m, num_n, shift = -(-seqlen_q // rows), -(-seqlen_k // KEYS), seqlen_k - seqlen_q
    came: dict[tuple[int, int], list[int]] = {}
    tiles = set()
    for index in range(num_n * heads_kv):
        n, batch, head = tile_at(index, num_n, heads_kv, 2, True, causal)
        tiles.add((n, head))
        lo, hi = query_blocks(n * KEYS, shift, num_m, -1, right, rows, KEYS, causal, False)
        for i in range(lo, hi):
            came.setdefault((head, i), []).append(turn_of(n, i, num_n, shift, right, rows, causal))
    assert len(tiles) == num_n * heads_kv  # every tile, once
    for turns in came.values():
        assert turns == [WARPS * place for place in range(len(turns))]


def test_last_blocks_first_is_the_usual_order_turned_round():
    for heavy_first in (True, False):
        for index in range(24):
            n, batch, head = tile_at(index, 6, 4, 2, heavy_first, False)
            assert tile_at(index, 6, 4, 2, heavy_first, True) == (5 - n, batch, head)


def test_who_asks_for_the_same_bits_keeps_the_ring_that_adds(monkeypatch):
    """Also where the backward of one GPU refuses; a left bound sends it to the slower kernels."""
    layout = make_layout("zigzag", seqlen=1024, ranks=2)
    q = torch.zeros(1, 512, 2, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(
        ring_backward, "kernel_of", lambda call, *_: ("a problem", "portable" if call.deterministic else "hopper")
    )
    monkeypatch.setattr(ring_backward.hopper_backward, "refuse", lambda problem: None)
    call = make_call(q, q, q, layout, causal=True, deterministic=True)
    ring = ring_of(call, LocalTransport(World(2), 0))
    assert ring_backward.refuse(ring, q, q, q, call) is None
    bounded = make_call(q, q, q, layout, causal=True, deterministic=True, window_size=(256, 0))
    assert "without a left bound" in ring_backward.refuse(ring, q, q, q, bounded)
