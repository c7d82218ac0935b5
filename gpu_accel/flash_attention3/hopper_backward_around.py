"""The two kernels around the Hopper backward in other shapes of programs, to come nearer to a copy's speed.

hopper_backward_finish.py takes 64 rows of one head a program: pieces of 128 or 256 bytes, a row of all heads apart.
Here a program takes the same rows of several heads, and programs go through memory from one end to the other;
`reverse`: from its last byte to its first, since what one kernel touches last is what the next finds in the L2 cache.

    prepare_rows   lse in base 2 and delta, as `prepare`; zeroes the float32 sum of dQ
    dq_rows        dQ out of its fragments, as `dq_finish`
    dq_eights      the same without shared memory

Same results bit for bit where sums of a row run in the same order (in the interpreter they do).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .hopper_backward_finish import LOG2_E
from .launch import launch


@dataclass(frozen=True, kw_only=True)
class Around:
    """Shapes of the programs of both kernels.

    A program that prepares takes the same rows of at most `heads` heads (the largest power of two that divides their
    number), as many rows as make up `numbers` numbers of o; `zeros` are written "first", "last", or by a "memset" of
    its own. One that finishes takes 64 rows of `finish_heads` heads; `direct`: of one, by `dq_eights`. `reverse`:
    (prepare, finish) go backwards.
    """

    numbers: int = 4096
    heads: int = 4
    warps: int = 4
    zeros: str = "first"
    finish_heads: int = 2
    finish_warps: int = 4
    direct: bool = False
    reverse: tuple[bool, bool] = (False, False)


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def prepare_rows(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stat_ptr, dq_ptr, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    heads, seqlen_q, num_m, head_dim,
    D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr,
    DLSE: tl.constexpr, ZEROS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """stat = (lse in base 2, delta = rowsum(do * o) - dlse); (+inf, 0) where a row sees nothing or is none.

    Zeroes its share of the sum of dQ, as many numbers as it has of o, before or after that ("first", "last").
    """
    index = tl.program_id(0)
    if REVERSE:
        index = tl.num_programs(0) - 1 - index
    zeros_at = dq_ptr + index.to(tl.int64) * (ROWS * HEADS * D) + tl.arange(0, ROWS * HEADS * D)
    if ZEROS == "first":
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
    if ZEROS == "last":
        tl.store(zeros_at, tl.zeros([ROWS * HEADS * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def dq_rows(
    dq_sum, dq_ptr, dq_sb, dq_ss, dq_sh, heads, seqlen_q, num_m, head_dim, softmax_scale,
    D: tl.constexpr, M: tl.constexpr, HEADS: tl.constexpr, MASK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for 64 rows of several heads, out of the order of `_stage_fragment`."""
    index = tl.program_id(0)
    if REVERSE:
        index = tl.num_programs(0) - 1 - index
    HALVES: tl.constexpr = D // 64  # fragments of 64 columns side by side
    groups = heads // HEADS
    blocks = num_m * (M // 64)
    at = index // groups
    batch = at // blocks
    block = at - batch * blocks
    head0 = (index - at * groups) * HEADS
    piece = tl.arange(0, HEADS * HALVES)
    fragment = (batch * heads + head0 + piece // HALVES).to(tl.int64) * (num_m * 2) + block * HALVES + piece % HALVES
    x = tl.load(dq_sum + (fragment * 4096)[:, None] + tl.arange(0, 4096)[None, :]) * softmax_scale
    # (head, half, row / 16, column / 8, row % 8, column / 2 % 4, row / 8 % 2, column % 2)
    x = tl.reshape(x, (HEADS * HALVES, 4, 8, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (1, 5, 3, 0, 2, 4, 6)), (64, HEADS * D))
    row = block * 64 + tl.arange(0, 64)
    j = tl.arange(0, HEADS * D)
    here = (row < seqlen_q)[:, None]
    if MASK_D:
        here = here & (j % D < head_dim)[None, :]
    row_at = batch.to(tl.int64) * dq_sb + head0.to(tl.int64) * dq_sh + row.to(tl.int64) * dq_ss
    col_at = (j // D).to(tl.int64) * dq_sh + j % D
    tl.store(dq_ptr + (row_at[:, None] + col_at[None, :]), x.to(dq_ptr.dtype.element_ty), mask=here)


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
def dq_eights(
    dq_sum, dq_ptr, dq_sb, dq_ss, dq_sh, heads, seqlen_q, num_m, head_dim, softmax_scale,
    D: tl.constexpr, M: tl.constexpr, MASK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for one fragment of 64 rows and 64 columns.

    64 bytes of it are eight columns of two rows: a thread reads them, sorts its registers and writes 16 bytes twice.
    """
    index = tl.program_id(0)
    if REVERSE:
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


def _together(heads: int, wanted: int) -> int:
    """The largest power of two up to `wanted` that divides the number of heads."""
    return min(wanted, heads & -heads)


def launch_prepare(inputs: tuple, stat: Tensor, dq_sum: Tensor | None, d: int, around: Around) -> None:
    """Fill `stat` (batch, heads, blocks, 2, rows) and zero `dq_sum`; inputs as of `hopper_backward._prepare`."""
    do, q, _, _, o, lse, dlse = inputs
    batch, seqlen_q, heads, head_dim = q.shape
    blocks, rows = stat.shape[2], stat.shape[4]
    together = _together(heads, around.heads)
    per_program = min(rows, max(1, around.numbers // (together * d)))
    zeros = "no" if dq_sum is None else around.zeros
    if dq_sum is not None and zeros == "memset":
        dq_sum.zero_()
    launch(
        prepare_rows,
        batch * (heads // together) * blocks * (rows // per_program),
        (o, do, lse, lse if dlse is None else dlse, stat, stat if dq_sum is None else dq_sum, *o.stride()[:3],
         *do.stride()[:3], heads, seqlen_q, blocks, head_dim),
        dict(D=d, M=rows, ROWS=per_program, HEADS=together, MASK_D=head_dim != d, DLSE=dlse is not None, ZEROS=zeros,
             REVERSE=around.reverse[0], num_warps=around.warps),
    )  # fmt: skip


def launch_finish(dq_sum: Tensor, dq: Tensor, softmax_scale: float, d: int, m: int, around: Around) -> None:
    """dq (batch, seqlen, heads, head_dim) from its sums (batch, heads, blocks, 2, 4096)."""
    batch, seqlen_q, heads, head_dim = dq.shape
    num_m = dq_sum.shape[2]
    arguments = (dq_sum, dq, *dq.stride()[:3], heads, seqlen_q, num_m, head_dim, softmax_scale)
    options = dict(D=d, M=m, MASK_D=head_dim != d, REVERSE=around.reverse[1], num_warps=around.finish_warps)
    if around.direct:
        launch(dq_eights, batch * heads * num_m * 2, arguments, options)
        return
    together = _together(heads, around.finish_heads)
    launch(dq_rows, batch * (heads // together) * num_m * (m // 64), arguments, {**options, "HEADS": together})


__all__ = ["Around", "launch_finish", "launch_prepare"]
