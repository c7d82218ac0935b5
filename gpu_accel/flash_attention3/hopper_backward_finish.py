"""Before and after the Hopper backward, in plain Triton: statistics of the rows, and dQ out of its fragments.

Both move memory and nothing else, so programs are small and many, all loads of one are under way at once, and none
waits for another thread. They go through memory from its last byte to its first: what one kernel touches last is what
the next one finds in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def prepare(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stat_ptr, dq_ptr, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    heads, seqlen_q, num_m, head_dim,
    D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr,
    DLSE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """stat = (lse in base 2, delta = rowsum(do * o) - dlse); (+inf, 0) where a row sees nothing or is none.

    ROWS rows of HEADS heads, a divisor of `heads`, and with ZERO as much of the sum of dQ, which it zeroes.
    """
    index = tl.program_id(0)
    index = tl.num_programs(0) - 1 - index
    zeros_at = dq_ptr + index.to(tl.int64) * (ROWS * HEADS * D) + tl.arange(0, ROWS * HEADS * D)
    if ZERO:
        tl.store(zeros_at, tl.zeros([ROWS * HEADS * D], tl.float32))
    groups = heads // HEADS
    parts = num_m * (M // ROWS)
    at = index // groups
    batch = at // parts
    row = tl.arange(0, ROWS * HEADS) % ROWS + (at - batch * parts) * ROWS
    head = tl.arange(0, ROWS * HEADS) // ROWS + (index - at * groups) * HEADS
    cols = tl.arange(0, D)
    here = (row < seqlen_q)[:, None]
    if MASK_D:
        here = here & (cols < head_dim)[None, :]
    o_at = batch.to(tl.int64) * o_sb + head.to(tl.int64) * o_sh + row.to(tl.int64) * o_ss
    do_at = batch.to(tl.int64) * do_sb + head.to(tl.int64) * do_sh + row.to(tl.int64) * do_ss
    o_at = o_ptr + (o_at[:, None] + cols[None, :])
    o = tl.load(o_at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)  # the L2 is for do and zeros
    do = tl.load(do_ptr + (do_at[:, None] + cols[None, :]), mask=here, other=0.0).to(tl.float32)
    batch_head = (batch * heads + head).to(tl.int64)
    lse = tl.load(lse_ptr + (batch_head * seqlen_q + row), mask=row < seqlen_q, other=float("inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.sum(o * do, 1)
    if DLSE:
        delta -= tl.load(dlse_ptr + (batch_head * seqlen_q + row), mask=row < seqlen_q, other=0.0)
    delta = tl.where(lse == float("inf"), 0.0, delta)  # whatever do holds there, behind packed sequences for one
    stat_at = (batch_head * num_m + row // M) * (2 * M) + row % M
    tl.store(stat_ptr + stat_at, lse)
    tl.store(stat_ptr + stat_at + M, delta)


@triton.jit
def _two_rows(at):
    """Of four numbers a thread, two columns of a row and of the eighth row behind it: (256, 2) each."""
    return tl.split(tl.permute(tl.reshape(tl.load(at), (256, 2, 2)), (0, 2, 1)))


@triton.jit
def _eight_columns(a, b, c, d):
    """(256, 8), pairs of columns side by side."""
    x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(x, (0, 2, 3, 1)), (256, 8))


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def dq_finish(
    dq_sum, dq_ptr, dq_sb, dq_ss, dq_sh, heads, seqlen_q, num_m, head_dim, softmax_scale,
    D: tl.constexpr, M: tl.constexpr, MASK_D: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for one fragment of 64 rows and 64 columns, out of the order of `_stage_fragment`.

    64 bytes of it are eight columns of two rows: a thread reads them, sorts its registers and writes 16 bytes twice.
    """
    index = tl.program_id(0)
    index = tl.num_programs(0) - 1 - index
    HALVES: tl.constexpr = D // 64
    per_row = heads * HALVES  # fragments of 64 rows of all heads: neighbours, since their rows are
    blocks = num_m * (M // 64)
    at = index // per_row
    batch = at // blocks
    block = at - batch * blocks
    piece = index - at * per_row
    head = piece // HALVES
    fragment = (batch * heads + head).to(tl.int64) * (num_m * 2) + block * HALVES + piece % HALVES
    i = tl.arange(0, 256)  # (row / 16, column / 8, row % 8)
    ptr = dq_sum + fragment * 4096 + (i[:, None] * 16 + tl.arange(0, 4)[None, :])
    a, a8 = _two_rows(ptr)
    b, b8 = _two_rows(ptr + 4)
    c, c8 = _two_rows(ptr + 8)
    d, d8 = _two_rows(ptr + 12)
    row = block * 64 + (i >> 6) * 16 + (i & 7)
    col = piece % HALVES * 64 + ((i >> 3) & 7) * 8
    dq_at = batch.to(tl.int64) * dq_sb + head.to(tl.int64) * dq_sh + row.to(tl.int64) * dq_ss + col
    ptr = dq_ptr + (dq_at[:, None] + tl.arange(0, 8)[None, :])
    here = row < seqlen_q
    here8 = row + 8 < seqlen_q
    if MASK_D:
        here = here & (col < head_dim)  # a multiple of 8
        here8 = here8 & (col < head_dim)
    dtype = dq_ptr.dtype.element_ty
    tl.store(ptr, (_eight_columns(a, b, c, d) * softmax_scale).to(dtype), mask=here[:, None])
    ptr += 8 * dq_ss
    tl.store(ptr, (_eight_columns(a8, b8, c8, d8) * softmax_scale).to(dtype), mask=here8[:, None])
