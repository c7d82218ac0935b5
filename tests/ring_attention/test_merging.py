"""What goes with kernels that merge: completed rows, sums that travel two steps, split pieces, the Triton kernels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_accel.flash_attention3.hopper_backward import _finish
from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_truth
from gpu_accel.ring_attention import fragments, hopper_backward, portable_merge
from gpu_accel.ring_attention.attention import make_call
from gpu_accel.ring_attention.layouts import Run, make_layout
from gpu_accel.ring_attention.masks import Mask, Piece, pieces
from gpu_accel.ring_attention.schedules import ring_backward
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.ring_attention.spans import Spans
from gpu_accel.ring_attention.step import _completed, _problem, merge_
from gpu_accel.testing import relative_error


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_spans_are_sets_of_rows(ours: list, theirs: list):
    a, b = (Spans((s, s + n) for s, n in some) for some in (ours, theirs))
    one, two = ({row for s, n in some for row in range(s, s + n)} for some in (ours, theirs))
    assert {row for s, e in a for row in range(s, e)} == one
    assert {row for s, e in a.without(b) for row in range(s, e)} == one - two
    assert [a.meets(row, row + 1) for row in range(40)] == [row in one for row in range(40)]
    ends = list(a)
    assert all(e < s for (_, e), (s, _) in zip(ends, ends[1:], strict=False))  # in order, and joined where they touch


def test_rows_of_a_zigzag_ring_are_complete_after_the_step_that_ends_them():
    layout = make_layout("zigzag", seqlen=64, ranks=4)  # shards of two chunks of 8
    steps = tuple(pieces(layout.runs(1), layout.runs((1 - i) % 4), Mask(-1, 0)) for i in range(4))
    # rank 1: its front chunk ends with the keys of rank 0, its back chunk with the last step
    assert _completed(steps) == [[(0, 0)], [(0, 8)], [(0, 0)], [(0, 8)]]
    assert [(p.q0, p.sq) for found in steps for p in found] == [(0, 16), (0, 16), (8, 8), (8, 8)]


def seen(piece: Piece) -> set[tuple[int, int]]:
    """(query row, key row) pairs of a piece."""
    shift = piece.sk - piece.sq
    return {
        (piece.q0 + i, piece.k0 + j)
        for i in range(piece.sq)
        for j in range(piece.sk)
        if piece.right < 0 or j <= i + shift + piece.right
    }


@pytest.mark.parametrize("piece", [Piece(4, 12, 8, 12, -1, 0), Piece(0, 9, 0, 20), Piece(2, 8, 0, 24, -1, 3)], ids=str)
@pytest.mark.parametrize("at", [1, 5, 7])
def test_the_rows_of_a_split_piece_see_the_same_keys(piece: Piece, at: int):
    upper, lower = ring_backward.split(piece, at)
    assert seen(upper) | seen(lower) == seen(piece) and not seen(upper) & seen(lower)


class Plain:
    """`hopper_backward.Gradients` in plain torch: sums of dK and dV one behind the other, in natural order."""

    def __init__(self, do, q, lse, delta, *, softmax_scale, softcap, deterministic):
        self.do, self.q, self.lse, self.delta = do, q, lse, delta
        self.options = {"softmax_scale": softmax_scale, "softcap": softcap, "dtype": torch.float64}
        self.dq = torch.zeros_like(q)

    def add(self, piece, k, v, into):
        rows, keys = slice(piece.q0, piece.q0 + piece.sq), slice(piece.k0, piece.k0 + piece.sk)
        part = (self.do[:, rows], self.q[:, rows], k[:, keys], v[:, keys])
        found = attention_backward_reference(
            *part, o=torch.zeros_like(part[0]), lse=self.lse[:, :, rows], dlse=-self.delta[:, :, rows],
            window_size=(piece.left, piece.right), **self.options,
        )  # fmt: skip
        self.dq[:, rows] += found[0]
        for total, x in zip(into.view(2, *k.shape), found[1:], strict=True):
            total[:, keys] += x

    def finish(self, k, first, second, dtype):
        total = first if second is None else first + second
        return self.dq.to(dtype), *(x.to(dtype, copy=True) for x in total.view(2, *k.shape))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        ("zigzag", {"causal": True}),
        ("striped", {"causal": True}),
        ("zigzag", {}),
        ("contiguous", {"window_size": (20, 0)}),
    ],
    ids=["zigzag", "striped", "full", "window"],
)
def test_sums_that_travel_two_steps_come_home(ranks: int, layout: str, mask: dict, monkeypatch):
    monkeypatch.setattr(hopper_backward, "Gradients", Plain)
    monkeypatch.setattr(hopper_backward, "sum_size", lambda k: 2 * k.numel())
    generator = torch.Generator().manual_seed(ranks)
    q, k, v, do = (torch.randn(1, 50, h, 8, generator=generator, dtype=torch.float64) for h in (2, 1, 1, 2))
    options = {"ranks": ranks, "layout": layout, "do": do, **mask}
    expected = simulate_attention(q, k, v, **options)
    monkeypatch.setattr(ring_backward, "refuse", lambda *_: None)
    monkeypatch.setattr(ring_backward, "halves", lambda found, block: _halves(found, 2))
    monkeypatch.setattr(torch, "float32", torch.float64)  # the sums, which the kernels want in float32
    found = simulate_attention(q, k, v, **options)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10), name


_halves = ring_backward.halves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 2)], ids=["full", "causal", "window"])
def test_the_triton_kernel_merges_what_it_computes(dtype: torch.dtype, window: tuple[int, int], device: str):
    """Two calls over two halves of the keys, the second one merging and rounding some of its rows."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 24, generator=generator).to(device, dtype) for n, h in ((37, 4), (37, 2), (37, 2)))
    options = {"softmax_scale": 0.2, "softcap": 0.0}
    o = torch.full((2, 41, 4, 24), math.nan, device=device)  # four rows before those of q
    lse, result = torch.full((2, 4, 41), -math.inf, device=device), torch.zeros_like(o, dtype=dtype)
    queries = (Run(0, 37, 0),)
    halves = ((Run(20, 17, 20),), (Run(0, 20, 0),))
    touched = Spans()
    for index, keys in enumerate(halves):
        for piece in pieces(queries, keys, Mask(*window)):
            rows, cols = slice(piece.q0, piece.q0 + piece.sq), slice(piece.k0, piece.k0 + piece.sk)
            portable_merge.forward_merge(
                q[:, rows], k[:, cols], v[:, cols], o, lse, result, row=4 + piece.q0,
                first=not touched.meets(rows.start, rows.stop), done=(0, 10) if index and piece.sq > 10 else (0, 0),
                window_left=piece.left, window_right=piece.right, **options,
            )  # fmt: skip
            touched.add(rows.start, rows.stop)
    window_size = tuple(window)
    exact, exact_lse = attention_truth(q, k, v, window_size=window_size, **options)
    found = torch.where(o[:, 4:].isnan(), result[:, 4:].float(), o[:, 4:])
    rounded = (result[:, 4:] != 0).any(-1).any(-1).any(0)
    found[:, rounded] = result[:, 4:][:, rounded].float()
    assert relative_error(found, exact) < (4e-3 if dtype == torch.bfloat16 else 2e-6)
    assert relative_error(lse[:, :, 4:], exact_lse) < 1e-5
    assert o[:, :4].isnan().all() and (lse[:, :, :4] == -math.inf).all()  # nothing beside its rows


def test_one_pass_merges_what_another_kernel_found(device: str):
    generator = torch.Generator().manual_seed(4)
    o, new = (torch.randn(2, n, 3, 24, generator=generator).to(device) for n in (19, 13))
    lse, new_lse = (torch.randn(2, 3, n, generator=generator).to(device) for n in (19, 13))
    lse[0, 1, 6:9] = new_lse[1, 2, 3] = new_lse[0, 1, 2] = -math.inf  # row 7 of head 1: on neither side
    o[0, 6:9, 1] = new[1, 3, 2] = math.nan
    clean, clean_new = (torch.where(x.isnan(), 0.0, x).double() for x in (o, new))
    expected, expected_lse = clean.clone(), lse.double()
    merge_(expected[:, 5:18], expected_lse[:, :, 5:18], clean_new, new_lse.double())
    result = torch.zeros(2, 19, 3, 24, device=device, dtype=torch.bfloat16)
    portable_merge.merge_into(o, lse, result, new.bfloat16(), new_lse, row=5, done=(2, 4))
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)
    assert (
        relative_error(result[:, 7:9], expected[:, 7:9]) < 5e-3 and not result[:, 9:].any() and not result[:, :7].any()
    )
    o[:, 7:9] = result[:, 7:9].float()
    assert relative_error(o, expected) < 5e-3


def test_statistics_and_delta(device: str):
    generator = torch.Generator().manual_seed(5)
    o, do = (torch.randn(2, 70, 3, 24, generator=generator).to(device) for _ in range(2))
    lse = torch.randn(2, 70, 3, generator=generator).to(device).transpose(1, 2)
    lse[1, 2, 5] = -math.inf
    delta = fragments.row_delta(do, o)
    assert torch.allclose(delta, (do * o).sum(-1).transpose(1, 2), atol=1e-4)
    stat = fragments.statistics(lse, delta, 64)
    assert stat.shape == (2, 3, 2, 2, 64)
    found, found_delta = stat.transpose(2, 3).reshape(2, 3, 2, 128).unbind(2)
    assert torch.equal(found_delta[..., :70], delta) and (found[..., 70:] == math.inf).all()
    assert found[1, 2, 5] == math.inf  # a row that sees nothing has P = exp2(S - inf) = 0
    seen = lse > -math.inf
    assert torch.allclose(found[..., :70][seen], lse[seen] * math.log2(math.e), atol=1e-5)


@pytest.mark.parametrize("dim", [64, 128])
def test_fragments_come_out_in_order(dim: int, device: str):
    """As `dq_finish` puts them in order, and the sum of two of them."""
    rows, heads = 100, 2
    blocks = 1 if dim == 64 else 2  # of 128 or of 64 rows
    sums = torch.randn(2, heads, blocks, 2, 4096, generator=torch.Generator().manual_seed(6)).to(device)
    expected = torch.zeros(1, rows, heads, dim, device=device)
    block = 128 if dim == 64 else 64
    _finish(sums[:1], expected, 0.5, dim, block)
    out = torch.zeros_like(expected)
    fragments.gather(sums[0], None, out, scale=0.5)
    assert torch.equal(out, expected) and out.any()
    _finish(sums[:1] + sums[1:], expected, 0.5, dim, block)
    fragments.gather(sums[0], sums[1], out, scale=0.5)
    assert torch.equal(out, expected)


def test_ranks_must_agree_on_fixed_bits():
    layout = make_layout("zigzag", seqlen=64, ranks=2)
    q = torch.zeros(1, layout.local_length, 2, 8)
    plain, fixed = (make_call(q, q, q, layout, deterministic=x) for x in (False, True))
    assert plain.statement("kv_ring", q) != fixed.statement("kv_ring", q)
    hopper = dataclasses.replace(_problem(fixed, q, q, q, Piece(0, 32, 0, 32)), device_type="cuda", capability=(9, 0))
    assert hopper.deterministic and hopper_backward.refuse(hopper) is not None
