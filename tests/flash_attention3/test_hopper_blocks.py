"""Block tables of the Hopper kernels: what every tile walks over, against the mask written out block by block."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from gpu_accel.flash_attention3 import hopper, hopper_backward
from gpu_accel.flash_attention3.block_mask import block_mask_lists
from gpu_accel.flash_attention3.features import Features
from gpu_accel.flash_attention3.hopper_blocks import block_table
from gpu_accel.flash_attention3.problem import Problem

WHOLE = 2


def band(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 200 + 150 * h) & (kv_idx - q_idx < 40) & (kv_idx >= 128 * b)


def features_of(mask, sq, sk, batch=2, heads=2):
    lists, size = block_mask_lists(mask, batch=batch, heads=heads, seqlen_q=sq, seqlen_k=sk,
                                   device=torch.device("cpu"), has_mask_mod=True)  # fmt: skip
    return Features(block_lists=lists, block_size=size)


def written_out(counts, indices, columns):
    """(batch, heads, rows, columns) bool: listed or not."""
    listed = torch.zeros(*counts.shape, columns, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, counts.shape)).view(-1, 3).tolist():
        listed[(*at, indices[(*at,)][: int(counts[(*at,)])].long())] = True
    return listed


def kinds_of(features, transposed, rows, columns, step):
    """(batch, heads, 64 rows, steps): 0, 1 or 2 by the mask's own lists."""
    lists = features.block_lists[4 if transposed else 0 :][:4]
    row_block, column_block = features.block_size[::-1] if transposed else features.block_size
    blocks = -(-columns // column_block)
    kinds = written_out(lists[0], lists[1], blocks).int()
    if lists[2].numel():
        kinds += WHOLE * written_out(lists[2], lists[3], blocks).int()
    kinds = kinds.repeat_interleave(row_block // 64, 2).repeat_interleave(column_block // step, 3)
    return kinds[:, :, : -(-rows // 64), : -(-columns // step)]


CASES = {
    "keys-batch-heads-128": ((2, 2), 260, 330, 128, 128, False),
    "queries-batch-heads-128": ((2, 2), 260, 330, 128, 64, True),
    "keys-broadcast-64": ((None, None), 300, 200, 64, 128, False),
    "queries-broadcast-64": ((None, None), 300, 200, 64, 128, True),
    "keys-batch-128x64": ((2, None), 140, 500, (128, 64), 64, False),
    "keys-heads-two-chunks": ((None, 2), 10, 64 * 131, 64, 128, False),
}


@pytest.mark.parametrize("name", CASES)
def test_table(name):
    (batch, heads), sq, sk, size, tile, transposed = CASES[name]
    features = features_of(create_block_mask(band, batch, heads, sq, sk, device="cpu", BLOCK_SIZE=size), sq, sk)
    rows, columns = (sk, sq) if transposed else (sq, sk)
    column_block = features.block_size[0 if transposed else 1]
    step = 128 if column_block % 128 == 0 and tile == 128 else 64
    table, (width, by_batch, by_head) = block_table(
        features, transposed=transposed, tile=tile, step=step, seqlen_rows=rows, seqlen_columns=columns
    )
    expected = kinds_of(features, transposed, rows, columns, step)
    for b in range(2):
        for h in range(2):
            for t in range(-(-rows // tile)):
                line = table[(b * by_batch + h * by_head + t) * width :][:width].tolist()
                of = expected[b % expected.shape[0], h % expected.shape[1], t * tile // 64 :][: tile // 64]
                wanted = [j for j in range(of.shape[1]) if of[:, j].any()]
                assert [x & 0xFFFFFF for x in line[1 : line[0] + 1]] == (wanted or [0])
                for part in range(of.shape[0]):
                    found = [x >> (24 + 2 * part) & 3 for x in line[1 : line[0] + 1]]
                    assert found == ([int(of[part, j]) for j in wanted] or [0])


def test_tiles_without_blocks_get_one_that_nobody_sees():
    counts = torch.zeros(1, 1, 2, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, torch.zeros(1, 1, 2, 3, dtype=torch.int32), BLOCK_SIZE=128)
    table, (width, *_) = block_table(features_of(mask, 256, 384), transposed=False, tile=128, step=64,
                                     seqlen_rows=256, seqlen_columns=384)  # fmt: skip
    assert table.view(2, width)[:, :2].tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("pass_", [hopper, hopper_backward])
def test_what_the_kernels_refuse(pass_):
    problem = Problem(
        device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=1, seqlen_q=8, seqlen_k=8, heads=1,
        heads_kv=1, head_dim=64, head_dim_v=64, causal=False, window_left=-1, window_right=-1, softcap=0.0,
        varlen=False, features=frozenset({"mask_mod", "block_mask"}), block_size=(128, 64),
    )  # fmt: skip
    assert problem.features <= pass_.FEATURES and pass_.refuse(problem) is None
    assert "multiples of 64" in str(pass_.refuse(replace(problem, block_size=(128, 48))))
    packed = replace(problem, varlen=True, features=frozenset({"mask_mod"}), block_size=(0, 0))
    if pass_ is hopper:  # a tile of the packed backward belongs to several sequences
        assert pass_.refuse(packed) is None
    else:
        assert "dense" in str(pass_.refuse(packed))
    # the largest scores are the forward's affair
    maxima = replace(packed, features=frozenset({"return_max_logits"}))
    assert hopper_backward.refuse(maxima) is None
