"""Layouts and masks, exhaustively at small sizes: every token once, every visible pair once, causal work balanced."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_accel.errors import InvalidInputError
from gpu_accel.ring_attention.layouts import LAYOUTS, _ends_on, block_runs, make_layout, positions_on
from gpu_accel.ring_attention.masks import Mask, pieces, work

LENGTHS = (0, 1, 6, 13, 24)
RANKS = (1, 2, 3, 4, 8)
PACKED = {  # documents of a total length: one token, empty ones, longer and shorter than the chunks
    13: [(13,), (1, 5, 0, 7), (6, 7)],
    6: [(1,) * 6],
    24: [(17, 7), (2, 3, 11, 8)],
}


def each_layout():
    for name, seqlen, ranks in itertools.product(LAYOUTS, LENGTHS, RANKS):
        for documents in (None, *PACKED.get(seqlen, ())):
            yield make_layout(name, seqlen=seqlen, ranks=ranks, documents=documents)


def test_every_token_is_in_one_shard_and_comes_back():
    for layout in each_layout():
        x = torch.arange(2 * layout.seqlen * 3).reshape(2, layout.seqlen, 3)
        shards = [layout.shard(x, r, padding=-9) for r in range(layout.ranks)]
        assert all(s.shape == (2, layout.local_length, 3) for s in shards), layout
        assert torch.equal(layout.unshard(shards), x), layout
        assert sum(layout.valid(r) for r in range(layout.ranks)) == layout.seqlen, layout
        padded = sum(int((s == -9).all(0).all(-1).sum()) for s in shards)
        assert padded == layout.ranks * layout.local_length - layout.seqlen, layout


def test_positions_name_the_tokens_of_the_shard():
    for layout in each_layout():
        index = torch.arange(layout.seqlen)[None]
        starts = torch.tensor(layout._document_starts())
        document = torch.repeat_interleave(torch.arange(len(layout.documents)), torch.tensor(layout.documents))
        for r in range(layout.ranks):
            positions = layout.positions(r)
            assert torch.equal(positions, layout.shard(index, r, padding=-1)[0]), layout
            inner = layout.positions(r, within_document=True)
            held = positions[positions >= 0]
            assert torch.equal(inner[positions >= 0], held - starts[document[held]]), layout
            if layout.name != "documents":
                assert torch.equal(held, held.sort().values), layout


@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(right=0), Mask(left=0, right=0), Mask(left=3, right=0), Mask(left=2, right=1), Mask(left=1),
     Mask(right=4), Mask(left=30, right=30)],
    ids=str,
)  # fmt: skip
def test_pieces_cover_every_visible_pair_once(mask: Mask):
    for layout in each_layout():
        if layout.ranks in (2, 4):
            continue  # 1, 3 and 8 remain: alone, odd, more ranks than some documents have tokens
        document = torch.repeat_interleave(torch.arange(len(layout.documents)), torch.tensor(layout.documents))
        where = [layout.positions(r) for r in range(layout.ranks)]
        for q, k in itertools.product(range(layout.ranks), repeat=2):
            assert_covers(where[q], where[k], layout.runs(q), layout.runs(k), document, mask, layout)


def assert_covers(positions_q, positions_k, runs_q, runs_k, document, mask, layout):
    covered = torch.zeros(len(positions_q), len(positions_k), dtype=torch.int64)
    for p in pieces(runs_q, runs_k, mask):
        i, j = torch.arange(p.sq)[:, None], torch.arange(p.sk)[None]
        seen = torch.ones(p.sq, p.sk, dtype=torch.bool)
        if p.left >= 0:
            seen &= j >= i + p.sk - p.sq - p.left
        if p.right >= 0:
            seen &= j <= i + p.sk - p.sq + p.right
        covered[p.q0 : p.q0 + p.sq, p.k0 : p.k0 + p.sk] += seen
        assert p.area == int(seen.sum()) > 0, (layout, p)
    qp, kp = positions_q[:, None], positions_k[None]
    visible = (qp >= 0) & (kp >= 0)
    if mask.left >= 0:
        visible &= kp >= qp - mask.left
    if mask.right >= 0:
        visible &= kp <= qp + mask.right
    if len(document):
        visible &= document[qp.clamp(min=0)] == document[kp.clamp(min=0)]
    assert torch.equal(covered, visible.long()), (layout, mask)


def test_blocks_of_several_ranks_are_in_order():
    for layout in each_layout():
        if layout.ranks < 4:
            continue
        document = torch.repeat_interleave(torch.arange(len(layout.documents)), torch.tensor(layout.documents))
        for members in ((0, 1), (1, 3), tuple(range(layout.ranks))):
            runs, order = block_runs(layout, members)
            positions = torch.cat([layout.positions(r) for r in members])
            positions = positions if order is None else positions[order]
            assert_covers(positions, positions, runs, runs, document, Mask(right=0), layout)
            if len(members) == layout.ranks and layout.seqlen:
                assert len(runs) == sum(n > 0 for n in layout.documents)  # one run a document: no merge is needed


def causal_share(layout) -> list[float]:
    """Work of each rank against the mean."""
    total = [
        sum(work(layout.runs(q), layout.runs(k), Mask(right=0)) for k in range(layout.ranks))
        for q in range(layout.ranks)
    ]
    return [w * layout.ranks / sum(total) for w in total]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zigzag_and_documents_balance_causal_work_exactly(ranks: int):
    seqlen = 2 * ranks * 6
    assert causal_share(make_layout("zigzag", seqlen=seqlen, ranks=ranks)) == pytest.approx([1.0] * ranks)
    packed = make_layout("documents", seqlen=3 * seqlen, ranks=ranks, documents=(seqlen, 2 * seqlen))
    assert causal_share(packed) == pytest.approx([1.0] * ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_contiguous_leaves_half_the_machine_idle_and_striped_does_not(ranks: int):
    rows = 16
    contiguous = causal_share(make_layout("contiguous", seqlen=ranks * rows, ranks=ranks))
    # the slowest rank does N - 1/2 blocks (and half a row) where the mean is N / 2
    assert max(contiguous) == pytest.approx((2 * ranks - 1) / ranks, rel=0.05)
    striped = causal_share(make_layout("striped", seqlen=ranks * rows, ranks=ranks))
    assert max(striped) - min(striped) <= 2 / rows


def test_a_causal_zigzag_step_is_one_kernel_call():
    layout = make_layout("zigzag", seqlen=64, ranks=4)
    for q, k in itertools.product(range(4), repeat=2):
        found = pieces(layout.runs(q), layout.runs(k), Mask(right=0))
        assert len(found) == 1
        rows = {"causal": (16, 16)} if q == k else {"full": (16, 8) if k < q else (8, 16)}
        assert (found[0].sq, found[0].sk) == rows[found[0].kind]


def test_striped_steps_are_causal_or_strictly_causal():
    layout = make_layout("striped", seqlen=32, ranks=4)
    for q, k in itertools.product(range(4), repeat=2):
        (piece,) = pieces(layout.runs(q), layout.runs(k), Mask(right=0))
        assert piece.kind == "causal" and piece.sq == piece.sk == (8 if k <= q else 7)


def test_labels_shift_across_ranks_and_stop_at_documents():
    labels = torch.arange(100, 113)[None]
    for name, documents in itertools.product(LAYOUTS, [None, (1, 5, 0, 7)]):
        layout = make_layout(name, seqlen=13, ranks=3, documents=documents)
        shards = [layout.shift_labels(labels, r) for r in range(3)]
        ends = {12} if documents is None else {0, 5, 12}
        expected = torch.tensor([[-100 if t in ends else 101 + t for t in range(13)]])
        assert torch.equal(layout.unshard(shards), expected), (name, documents)
        for r, shard in enumerate(shards):
            assert (shard[0][layout.positions(r) < 0] == -100).all()


def test_scaled_losses_add_up_to_the_mean_over_all_tokens():
    layout = make_layout("zigzag", seqlen=13, ranks=4)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 13, 5, dtype=torch.float64)
    (whole,) = torch.autograd.grad((x @ weight)[:, :-1].mean(), weight)  # the last token has no label
    counts = [int((layout.shift_labels(torch.ones(1, 13, dtype=torch.long), r) >= 0).sum()) for r in range(4)]
    for gradients, over in (("sum", 1), ("mean", 4)):
        total = torch.zeros_like(weight)
        for r, count in enumerate(counts):
            labelled = (layout.shift_labels(torch.ones(1, 13, dtype=torch.long), r) >= 0)[0]
            local = (layout.shard(x, r) @ weight)[:, labelled].mean() if count else weight.sum() * 0
            scaled = local * layout.loss_scale(count, sum(counts), gradients=gradients)
            total += torch.autograd.grad(scaled, weight)[0] / over
        assert torch.allclose(total, whole, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "spiral", "seqlen": 8, "ranks": 2}, "layout must be one of"),
        ({"name": "zigzag", "seqlen": -1, "ranks": 2}, "seqlen must be a whole number from 0"),
        ({"name": "zigzag", "seqlen": 8, "ranks": 0}, "ranks must be a whole number from 1"),
        ({"name": "zigzag", "seqlen": 8, "ranks": True}, "ranks must be a whole number"),
        ({"name": "documents", "seqlen": 8, "ranks": 2, "documents": (3, 4)}, "add up to 7 tokens"),
    ],
)
def test_wrong_layouts_are_refused(arguments: dict, message: str):
    with pytest.raises(InvalidInputError, match=message):
        make_layout(**arguments)


def test_wrong_lengths_are_refused():
    layout = make_layout("zigzag", seqlen=8, ranks=2)
    with pytest.raises(InvalidInputError, match="7 tokens, but the layout is for 8"):
        layout.shard(torch.zeros(1, 7), 0)
    with pytest.raises(InvalidInputError, match="needs 2 shards of 4 rows"):
        layout.unshard([torch.zeros(1, 4)])
    with pytest.raises(InvalidInputError, match="rank must be from 0 to 1"):
        layout.positions(2)


def test_documents_are_cut_without_looking_at_all_of_them_for_each():
    """10,000 short ones in well under a second; every pair of a document and a chunk would be 200 million."""
    start = time.process_time()
    for name in LAYOUTS:
        layout = make_layout(name, seqlen=30_000, ranks=2, documents=[3, 0, 5, 4] * 2_500)
        assert sum(layout.valid(rank) for rank in range(2)) == 30_000
    assert time.process_time() - start < 5


def test_what_is_kept_of_a_layout_serves_every_later_call():
    """The order of rows is worked out once: also where that was in inference mode, beside fake tensors, or with
    another default device."""
    def whole(x: torch.Tensor, layout) -> torch.Tensor:
        return layout.unshard([layout.shard(x, rank) for rank in range(layout.ranks)])

    for i, mode in enumerate((torch.inference_mode(), FakeTensorMode(), torch.device("meta"))):
        layout = make_layout("zigzag", seqlen=101 + i, ranks=3)
        with mode:
            rows = torch.ones(1, layout.seqlen, 2, device="cpu")
            assert whole(rows, layout).shape == rows.shape
            if not isinstance(mode, FakeTensorMode):  # which attention refuses
                block_runs(layout, range(3))
            positions_on(layout, 1, rows.device)
            layout.shifted(rows.long())
        x = torch.randn(1, layout.seqlen, 2, requires_grad=True)
        found = whole(x, layout)
        found.sum().backward()
        assert torch.equal(found, x) and torch.equal(x.grad, torch.ones_like(x))
        kept = [positions_on(layout, 1, x.device), _ends_on(layout, x.device), block_runs(layout, range(3))[1]]
        for index in kept:
            assert type(index) is torch.Tensor and index.device.type == "cpu" and not index.is_inference()
        assert kept[0] is positions_on(layout, 1, x.device)
