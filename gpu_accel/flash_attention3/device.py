"""Device functions shared by the plain-Triton attention kernels: tiles, sequences, soft caps, sinks, block lists."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot

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
def dot_rows(
    left, left2, x, x2, batch, row, head, sb, ss, sh, rows_left, dim,
    ROWS: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, TMA: tl.constexpr, MASK_ROWS: tl.constexpr,
    MASK_COLS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(left times ROWS rows of x, transposed, and those rows), with dim cut in two parts, D and D2."""
    tile = load_tile(x, batch, row, head, 0, sb, ss, sh, rows_left, dim, ROWS, D, TMA, MASK_ROWS, MASK_COLS)
    product = dot(left, tl.trans(tile), None, PRECISION)
    tile2 = tile
    if D2 > 0:
        tile2 = load_tile(
            x2, batch, row, head, D, sb, ss, sh, rows_left, dim - D, ROWS, D2, TMA, MASK_ROWS, MASK_COLS
        )
        product = dot(left2, tl.trans(tile2), product, PRECISION)
    return product, tile, tile2


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


@triton.jit
def dense_query_tile(pid, batches, heads, seqlen_q, heads_together, M: tl.constexpr):
    """Program number -> (batch, head, query block): `heads_together` heads at a time, their longest rows first."""
    m_blocks = tl.cdiv(seqlen_q, M)
    in_group = heads_together * m_blocks
    first = (pid // in_group) * heads_together
    width = tl.minimum(batches * heads - first, heads_together)
    m_block = m_blocks - 1 - (pid % in_group) // width
    batch_head = first + (pid % in_group) % width
    return batch_head // heads, batch_head % heads, m_block


@triton.jit
def packed_lengths(
    sequence, rows, batches, cu_seqlens_k, seqused_q, seqused_k, USED_Q: tl.constexpr, USED_K: tl.constexpr
):
    """(first key, queries that count, keys that count) of a packed sequence of `rows` queries.

    Sequence number `batches` is the rows behind the last sequence, which see nothing.
    """
    here = sequence < batches
    k_row0 = tl.load(cu_seqlens_k + sequence, mask=here, other=0)
    sk = tl.load(cu_seqlens_k + sequence + 1, mask=here, other=0) - k_row0
    sq = rows
    if USED_Q:
        sq = tl.load(seqused_q + sequence, mask=here, other=0)
    if USED_K:
        sk = tl.load(seqused_k + sequence, mask=here, other=0)
    return k_row0, sq, sk


@triton.jit
def key_range(
    m0, sq, sk, window_left, window_right, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, USED_Q: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Keys [lo, hi) that query rows [m0, m0 + M) see at all, and [full_lo, full_hi), whole blocks that need no mask."""
    m_last = tl.minimum(m0 + M, sq) - 1
    lo = tl.full((), 0, tl.int32)
    hi = sk
    full_lo = tl.full((), 0, tl.int32)
    full_hi = sk
    if LEFT:
        lo = tl.maximum(m0 + sk - sq - window_left, 0) // N * N
        full_lo = tl.cdiv(tl.maximum(m_last + sk - sq - window_left, 0), N) * N
    if RIGHT:
        hi = tl.minimum(sk, m_last + sk - sq + window_right + 1)
        full_hi = tl.minimum(sk, tl.maximum(m0 + sk - sq + window_right + 1, 0))
    if TAIL:
        full_hi = tl.maximum(full_hi // N * N, lo)
    full_lo = tl.minimum(full_lo, full_hi)
    if USED_Q:
        # A tile behind the last row that counts: where a window would begin for it there need be no keys.
        counts = m0 < sq
        lo, hi = tl.where(counts, lo, 0), tl.where(counts, hi, 0)
        full_lo, full_hi = tl.where(counts, full_lo, 0), tl.where(counts, full_hi, 0)
    return lo, hi, full_lo, full_hi


@triton.jit
def seen_keys(cols, diagonal, seqlen_k, window_left, window_right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Which keys `cols` the rows see whose own key is `diagonal`: (rows, keys)."""
    seen = cols[None, :] < seqlen_k
    if LEFT:
        seen = seen & (cols[None, :] >= diagonal[:, None] - window_left)
    if RIGHT:
        seen = seen & (cols[None, :] <= diagonal[:, None] + window_right)
    return seen


@triton.jit
def join_sink(m_i, l_i, sink, exists):
    """The running maximum (base 2) and sum with a sink as one more logit, and the factor that acc is rescaled by.

    Rows that do not exist stay as they are: their log-sum-exp is -inf.
    """
    m_new = tl.maximum(m_i, sink)
    m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_use)
    l_new = l_i * alpha + tl.exp2(sink - m_use)
    return tl.where(exists, m_new, m_i), tl.where(exists, l_new, l_i), tl.where(exists, alpha, 1.0)


@triton.jit
def block_list(counts, indices, batch, head, block, sb, sh, width, BLOCK: tl.constexpr):
    """How many rows or keys the blocks listed for `block` have together, and where their list begins."""
    at = batch * sb + head * sh + block
    return tl.load(counts + at) * BLOCK, indices + at.to(tl.int64) * width


@triton.jit
def listed(i, blocks, BLOCK: tl.constexpr):
    """Row `i` of the listed blocks laid end to end, as a row of the sequence."""
    return tl.load(blocks + i // BLOCK) * BLOCK + i % BLOCK


@triton.jit
def load_stat(
    x, batch_head, row0, row, rows_left, stat_sh, other: tl.constexpr,
    ROWS: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One number a query row. Packed sequences need the mask: behind their end come the numbers of the next."""
    if TMA:
        stat = x.load([batch_head, row]).reshape([ROWS])
    else:
        r = tl.arange(0, ROWS)
        pointers = x + batch_head.to(tl.int64) * stat_sh + row0 + row + r
        stat = tl.load(pointers, mask=r < rows_left, other=other) if MASK else tl.load(pointers)
    return stat
