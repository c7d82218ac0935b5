"""Device functions shared by the plain-Triton attention kernels: loading tiles, finding sequences, soft capping."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    x, batch, row, head, col, sb, ss, sh, rows_left, cols_left,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLS) of x (batch, seqlen, heads, dim) from `row`, `col` on.

    With TMA, x is a descriptor and the hardware writes zeros outside the tensor. Otherwise x is a pointer, and rows
    beyond `rows_left` and columns beyond `cols_left` are zeros where the MASK flags say that they can occur.
    """
    if TMA:
        tile = x.load([batch, row, head, col]).reshape([ROWS, COLS])
    else:
        base = x + batch.to(tl.int64) * sb + row.to(tl.int64) * ss + head.to(tl.int64) * sh + col
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLS)
        pointers = base + (r.to(tl.int64)[:, None] * ss + c[None, :])
        if MASK_ROWS and MASK_COLS:
            tile = tl.load(pointers, mask=(r[:, None] < rows_left) & (c[None, :] < cols_left), other=0.0)
        elif MASK_ROWS:
            tile = tl.load(pointers, mask=r[:, None] < rows_left, other=0.0)
        elif MASK_COLS:
            tile = tl.load(pointers, mask=c[None, :] < cols_left, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    x, tile, batch, row, head, col, sb, ss, sh, rows_left, cols_left,
    ROWS: tl.constexpr, COLS: tl.constexpr, MASK_COLS: tl.constexpr,
):  # fmt: skip
    """The first `rows_left` rows of a (ROWS, COLS) tile into x (batch, seqlen, heads, dim)."""
    base = x + batch.to(tl.int64) * sb + row.to(tl.int64) * ss + head.to(tl.int64) * sh + col
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    pointers = base + (r.to(tl.int64)[:, None] * ss + c[None, :])
    mask = r[:, None] < rows_left
    if MASK_COLS:
        mask = mask & (c[None, :] < cols_left)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def find_sequence(tile, cu, batch, total, BLOCK: tl.constexpr, BATCH: tl.constexpr):
    """Which packed sequence the tile number `tile` of BLOCK rows belongs to.

    Every sequence has ceil(length / BLOCK) tiles, and the rows behind the last sequence form one more sequence, so
    that somebody writes them. No maximum length is needed, hence no synchronisation with the host.

    Returns (sequence, tile inside it counted from its end, first row, length); length -1: no such tile.
    """
    i = tl.arange(0, BATCH)
    start = tl.load(cu + i, mask=i <= batch, other=0)
    end = tl.load(cu + i + 1, mask=i < batch, other=0)
    end = tl.where(i == batch, total, end)
    length = tl.where(i <= batch, tl.maximum(end - start, 0), 0)
    tiles = (length + BLOCK - 1) // BLOCK
    last = tl.cumsum(tiles, 0)
    sequence = tl.sum((last <= tile).to(tl.int32), 0)
    here = i == sequence
    row0 = tl.sum(tl.where(here, start, 0), 0)
    rows = tl.sum(tl.where(here, length, 0), 0)
    from_end = tl.sum(tl.where(here, last, 0), 0) - 1 - tile
    rows = tl.where(sequence > batch, -1, rows)
    return sequence, from_end, row0, rows


@triton.jit
def tanh(x):
    """Hyperbolic tangent from one exp2; right at both infinities."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
