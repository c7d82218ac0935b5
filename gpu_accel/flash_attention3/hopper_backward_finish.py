"""Before and after the Hopper backward, in plain Triton: statistics of the rows, and dQ out of its fragments."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def prepare(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stat_ptr, dq_ptr, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    heads, seqlen_q, num_m, head_dim,
    D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, MASK_D: tl.constexpr, DLSE: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """stat = (lse in base 2, delta = rowsum(do * o) - dlse); (+inf, 0) where a row sees nothing or is none.

    Zeroes the sum of dQ.
    """
    batch_head = tl.program_id(0)
    part = tl.program_id(1)
    batch = batch_head // heads
    head = batch_head - batch * heads
    rows = part * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, D)
    here = (rows < seqlen_q)[:, None]
    if MASK_D:
        here = here & (cols < head_dim)[None, :]
    o_at = batch.to(tl.int64) * o_sb + head.to(tl.int64) * o_sh + rows.to(tl.int64)[:, None] * o_ss + cols[None, :]
    do_at = batch.to(tl.int64) * do_sb + head.to(tl.int64) * do_sh + rows.to(tl.int64)[:, None] * do_ss + cols[None, :]
    o = tl.load(o_ptr + o_at, mask=here, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + do_at, mask=here, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse_at = batch_head.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + lse_at, mask=rows < seqlen_q, other=float("inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if DLSE:
        delta -= tl.load(dlse_ptr + lse_at, mask=rows < seqlen_q, other=0.0)
    delta = tl.where(lse == float("inf"), 0.0, delta)  # whatever do holds there, behind packed sequences for one
    stat_at = (batch_head.to(tl.int64) * num_m + rows // M) * (2 * M) + rows % M
    tl.store(stat_ptr + stat_at, lse)
    tl.store(stat_ptr + stat_at + M, delta)
    if ZERO:
        dq_at = (batch_head.to(tl.int64) * num_m * M + part * ROWS) * D
        tl.store(dq_ptr + dq_at + tl.arange(0, ROWS * D), tl.zeros([ROWS * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def dq_finish(
    dq_sum, dq_ptr, dq_sb, dq_ss, dq_sh, heads, seqlen_q, num_m, head_dim, softmax_scale,
    D: tl.constexpr, M: tl.constexpr, MASK_D: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for one fragment of 64 rows and 64 columns, out of the order of `_add_fragment`."""
    batch_head = tl.program_id(0)
    fragment = tl.program_id(1)
    batch = batch_head // heads
    head = batch_head - batch * heads
    at = (batch_head.to(tl.int64) * num_m * 2 + fragment) * 4096
    x = tl.load(dq_sum + at + tl.arange(0, 4096)) * softmax_scale
    # (row / 16, column / 8, row % 8, column / 2 % 4, row / 8 % 2, column % 2)
    x = tl.reshape(tl.permute(tl.reshape(x, (4, 8, 8, 4, 2, 2)), (0, 4, 2, 1, 3, 5)), (64, 64))
    if M == 128:
        row0 = fragment * 64
        col0 = 0
    else:
        row0 = fragment // 2 * 64
        col0 = fragment % 2 * 64
    rows = row0 + tl.arange(0, 64)
    cols = col0 + tl.arange(0, 64)
    here = (rows < seqlen_q)[:, None]
    if MASK_D:
        here = here & (cols < head_dim)[None, :]
    dq_at = batch.to(tl.int64) * dq_sb + head.to(tl.int64) * dq_sh + rows.to(tl.int64)[:, None] * dq_ss + cols[None, :]
    tl.store(dq_ptr + dq_at, x.to(dq_ptr.dtype.element_ty), mask=here)
