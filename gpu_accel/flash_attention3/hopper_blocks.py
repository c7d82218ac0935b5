"""Block masks for the Hopper kernels: which blocks each tile walks over, worked out on the device in plain Triton.

A block mask names blocks of its own size, the kernels work in tiles of 64 or 128 rows, a consumer for 64 of them, and
walk over blocks of 64 or 128 columns. `fill_block_table` writes for every tile

    number of blocks, at least one; then for each: block | kind for the first 64 rows << 24 | for the second << 26

in ascending order, kind 0 for nothing, 1 for a partial block (mask_mod decides), 2 for a whole one. The forward and dQ
walk over keys (rows are queries), dK and dV over queries: the same kernel, from the transposed lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .features import Features
from .launch import launch

KIND_SHIFT = tl.constexpr(24)
KIND_BITS = tl.constexpr(2)
_CHUNK = 128


@triton.jit
def _kinds(at, counts, indices, width, n_blocks, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """KIND for those of the candidates n_blocks (CHUNK,) that row `at` lists, else 0."""
    found = tl.zeros([CHUNK], tl.int32)
    count = tl.load(counts + at)
    first = indices + at.to(tl.int64) * width
    for i in range(0, count, CHUNK):
        j = i + tl.arange(0, CHUNK)
        listed = tl.load(first + j, mask=j < count, other=-1)
        found += tl.sum((n_blocks[:, None] == listed[None, :]).to(tl.int32), 1)
    return tl.where(found > 0, KIND, 0)


@triton.jit(do_not_specialize=["width", "full_width", "tiles", "rows", "columns", "table_width"])
def fill_block_table(
    table, counts, indices, width, full_counts, full_indices, full_width, tiles, rows, columns, table_width,
    PARTS: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    FULL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program a tile of 64 * PARTS rows, tiles of one head of the mask after the other.

    `rows` are rows of the lists (of ROW_BLOCK), `columns` blocks of COLUMNS, which divides COLUMN_BLOCK.
    """
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    line = table + (batch_head * tiles + tile).to(tl.int64) * table_width
    written = tl.full((), 0, tl.int32)
    for start in range(0, columns, CHUNK):
        block = start + tl.arange(0, CHUNK)
        n_block = block * COLUMNS // COLUMN_BLOCK
        entry = block
        for part in tl.static_range(PARTS):
            row = (tile * PARTS + part) * 64 // ROW_BLOCK
            exists = row < rows
            at = batch_head * rows + tl.minimum(row, rows - 1)
            kind = _kinds(at, counts, indices, width, n_block, 1, CHUNK)
            if FULL:
                kind += _kinds(at, full_counts, full_indices, full_width, n_block, 2, CHUNK)
            kind = tl.where(exists & (block < columns), kind, 0)
            entry = entry | (kind << (KIND_SHIFT + KIND_BITS * part))
        wanted = (entry >> KIND_SHIFT) > 0
        place = tl.cumsum(wanted.to(tl.int32), 0)
        tl.store(line + written + place, entry, mask=wanted)
        written += tl.sum(wanted.to(tl.int32), 0)
    if written == 0:
        tl.store(line + 1, 0)
    tl.store(line, tl.maximum(written, 1))


def block_table(
    features: Features, *, transposed: bool, tile: int, step: int, seqlen_rows: int, seqlen_columns: int
) -> tuple[Tensor, tuple[int, int, int]]:
    """The table for tiles of `tile` rows and blocks of `step` columns, and (width, batch stride, head stride).

    Args:
        transposed: rows are keys. tile: 64 or 128. step: divides the columns of the mask's blocks.
    """
    counts, indices, full_counts, full_indices = features.block_lists[4 if transposed else 0 :][:4]
    row_block, column_block = reversed(features.block_size) if transposed else features.block_size
    batches, heads, rows = counts.shape
    tiles, columns = -(-seqlen_rows // tile), -(-seqlen_columns // step)
    full = full_counts.numel() > 0
    table = torch.empty(batches * heads * tiles * (columns + 1), dtype=torch.int32, device=counts.device)
    lists = (counts, indices, indices.shape[-1])
    more = (full_counts, full_indices, full_indices.shape[-1]) if full else lists
    launch(
        fill_block_table,
        tiles * batches * heads,
        (table, *lists, *more, tiles, rows, columns, columns + 1),
        dict(PARTS=tile // 64, ROW_BLOCK=row_block, COLUMN_BLOCK=column_block, COLUMNS=step, FULL=full, CHUNK=_CHUNK),
    )
    by_head = tiles if heads > 1 else 0
    return table, (columns + 1, heads * tiles if batches > 1 else 0, by_head)


def refuse_blocks(block_size: tuple[int, int]) -> str | None:
    """Why the Hopper kernels cannot walk over blocks of this size, or None."""
    if any(n % 64 for n in block_size):
        return f"takes block masks whose blocks are multiples of 64, got {block_size[0]} x {block_size[1]}"
    return None
