"""Attention that takes and returns (o, lse) in float32, in plain Triton, and the merge alone as one pass.

A program owns a block of query rows. It starts from what the rows have found so far, as if that were one key more:

    m = lse,  l = 1,  acc = o             nothing found (lse = -inf):  m = -inf,  l = 0,  acc = 0

and goes on with online softmax over the keys of this call. So merging costs reading o once, and no pass of its own.
Rows that see no more keys afterwards are written to `result` in its dtype instead of to o.

`merge_into` does the same for a partial result that another kernel has computed: one pass, in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import dot
from gpu_accel.flash_attention3.device import LN2, LOG2E, tanh
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import Problem, effective_window

_COUNTS = [
    "total",
    "seqlen_q",
    "seqlen_k",
    "heads",
    "heads_per_kv",
    "window_left",
    "window_right",
    "done_lo",
    "done_hi",
]


@triton.jit(do_not_specialize=_COUNTS)
def attend_merge_kernel(
    q, k, v, o, lse, result, q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    total, seqlen_q, seqlen_k, heads, heads_per_kv, window_left, window_right, done_lo, done_hi,
    qk_scale, cap_in, cap_out,
    M: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M rows of one head; windows are bottom-right aligned. o, lse and result begin with the first row of q."""
    blocks = tl.cdiv(seqlen_q, M)  # one head's after another's: a grid's other dimensions end at 65535
    block = blocks - 1 - tl.program_id(0) % blocks
    batch = tl.program_id(0) // blocks // heads
    head = tl.program_id(0) // blocks % heads
    rows = block * M + tl.arange(0, M)
    here = rows < seqlen_q
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, N)
    q_at = q + batch.to(tl.int64) * q_sb + rows.to(tl.int64)[:, None] * q_ss + head.to(tl.int64) * q_sh + d[None, :]
    k_base = k + batch.to(tl.int64) * k_sb + (head // heads_per_kv).to(tl.int64) * k_sh
    v_base = v + batch.to(tl.int64) * v_sb + (head // heads_per_kv).to(tl.int64) * v_sh
    o_row = (batch.to(tl.int64) * total + rows) * heads + head
    o_at = o_row[:, None] * DIM_V + dv[None, :]
    lse_at = lse + (batch * heads + head).to(tl.int64) * total + rows
    x = tl.load(q_at, mask=here[:, None] & (d < DIM)[None, :], other=0.0)
    if FIRST:
        m_i = tl.full([M], float("-inf"), tl.float32)
        l_i = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DV], tl.float32)
    else:
        m_i = tl.load(lse_at, mask=here, other=float("-inf")) * LOG2E
        seen = m_i > float("-inf")
        l_i = tl.where(seen, 1.0, 0.0)
        acc = tl.load(o + o_at, mask=seen[:, None] & (dv < DIM_V)[None, :], other=0.0)
    diagonal = rows + seqlen_k - seqlen_q
    lo = 0
    hi = seqlen_k
    if LEFT:
        lo = tl.maximum(block * M + seqlen_k - seqlen_q - window_left, 0) // N * N
    if RIGHT:
        hi = tl.minimum(seqlen_k, tl.maximum(block * M + M + seqlen_k - seqlen_q + window_right, 0))
    for start in tl.range(lo, hi, N):
        cols = start + n
        there = cols < seqlen_k
        k_at = k_base + cols.to(tl.int64)[:, None] * k_ss + d[None, :]
        s = dot(x, tl.trans(tl.load(k_at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)), None, PRECISION)
        if SOFTCAP:
            s = cap_out * tanh(s * cap_in)
        visible = there[None, :]
        if LEFT:
            visible = visible & (cols[None, :] >= diagonal[:, None] - window_left)
        if RIGHT:
            visible = visible & (cols[None, :] <= diagonal[:, None] + window_right)
        s = tl.where(visible, s * qk_scale, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_use[:, None])
        alpha = tl.exp2(m_i - m_use)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        v_at = v_base + cols.to(tl.int64)[:, None] * v_ss + dv[None, :]
        y = tl.load(v_at, mask=there[:, None] & (dv < DIM_V)[None, :], other=0.0)
        acc = dot(p.to(y.dtype), y, acc * alpha[:, None], PRECISION)
    safe = tl.where(l_i == 0.0, 1.0, l_i)
    acc = acc / safe[:, None]
    tl.store(lse_at, (m_i + tl.log2(safe)) * LN2, mask=here)
    done = (rows >= done_lo) & (rows < done_hi)
    inside = (dv < DIM_V)[None, :]
    tl.store(result + o_at, acc.to(result.dtype.element_ty), mask=(here & done)[:, None] & inside)
    tl.store(o + o_at, acc, mask=(here & (done == 0))[:, None] & inside)


@triton.jit(do_not_specialize=["total", "rows", "heads", "done_lo", "done_hi"])
def merge_kernel(
    o, lse, result, new, new_lse, n_sb, n_ss, n_sh, l_sb, l_sh, l_ss, total, rows, heads, done_lo, done_hi,
    M: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """M rows (batch, row, head), heads fastest."""
    blocks = tl.cdiv(rows * heads, M)
    batch = tl.program_id(0) // blocks
    index = tl.program_id(0) % blocks * M + tl.arange(0, M)
    row = index // heads
    head = index % heads
    here = row < rows
    dv = tl.arange(0, DV)
    lse_at = lse + (batch * heads + head).to(tl.int64) * total + row
    old = tl.load(lse_at, mask=here, other=float("-inf")) * LOG2E
    new_at = new_lse + batch.to(tl.int64) * l_sb + head.to(tl.int64) * l_sh + row.to(tl.int64) * l_ss
    x = tl.load(new_at, mask=here, other=float("-inf")) * LOG2E
    top = tl.maximum(old, x)
    top = tl.where(top == float("-inf"), 0.0, top)
    old_weight = tl.exp2(old - top)
    new_weight = tl.exp2(x - top)
    both = old_weight + new_weight
    safe = tl.where(both == 0.0, 1.0, both)
    inside = (dv < DIM_V)[None, :]
    o_at = ((batch.to(tl.int64) * total + row) * heads + head)[:, None] * DIM_V + dv[None, :]
    found = batch.to(tl.int64) * n_sb + row.to(tl.int64) * n_ss + head.to(tl.int64) * n_sh
    before = tl.load(o + o_at, mask=(here & (old > float("-inf")))[:, None] & inside, other=0.0)
    taken = (here & (x > float("-inf")))[:, None] & inside
    after = tl.load(new + found[:, None] + dv[None, :], mask=taken, other=0.0).to(tl.float32)
    merged = before * (old_weight / safe)[:, None] + after * (new_weight / safe)[:, None]
    tl.store(lse_at, (top + tl.log2(both)) * LN2, mask=here)
    done = (row >= done_lo) & (row < done_hi)
    tl.store(result + o_at, merged.to(result.dtype.element_ty), mask=(here & done)[:, None] & inside)
    tl.store(o + o_at, merged, mask=(here & (done == 0))[:, None] & inside)


def refuse(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    if problem.dtype == torch.float64:
        return "takes float16, bfloat16 and float32"
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"takes head_dim up to 256, got {problem.head_dim} and {problem.head_dim_v} (v)"
    return None


def forward_merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    result: Tensor,
    *,
    row: int,
    first: bool,
    done: tuple[int, int],
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[int, int]:
    """As `hopper_merge.forward_merge`, for any GPU and head_dim up to 256; every row of `done` goes to `result`."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[-1]
    window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    qk_scale, cap_in, cap_out = softmax_scale * LOG2E.value, 0.0, 0.0
    if softcap > 0:
        qk_scale, cap_in, cap_out = 1.0, softmax_scale / softcap, softcap * LOG2E.value
    d, dv = (max(16, next_power_of_2(n)) for n in (head_dim, head_dim_v))
    wide = max(d, dv) > 128 or q.dtype == torch.float32
    m, n = (64, 32) if wide else (128, 64)
    arguments = (
        q, k, v, o[:, row:], lse[:, :, row:], result[:, row:], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        o.shape[1], seqlen_q, seqlen_k, heads, heads // heads_kv, window_left, window_right, *done,
        qk_scale, cap_in, cap_out,
    )  # fmt: skip
    options = dict(
        M=m, N=n, DIM=head_dim, DIM_V=head_dim_v, D=d, DV=dv, LEFT=window_left >= 0, RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0, FIRST=first, PRECISION="ieee", num_warps=8 if m == 128 else 4, num_stages=2,
    )  # fmt: skip
    launch(attend_merge_kernel, triton.cdiv(seqlen_q, m) * batch * heads, arguments, options)
    return done


def merge_into(
    o: Tensor, lse: Tensor, result: Tensor, new: Tensor, new_lse: Tensor, *, row: int, done: tuple[int, int] = (0, 0)
) -> None:
    """Merge (new, new_lse) into rows [row, row + rows) of (o, lse), in one pass.

    Args:
        o: (batch, total, heads, head_dim) float32, contiguous. lse: (batch, heads, total) float32, contiguous.
        result: like o, of any dtype, where rows `done` (counted from `row`) go instead.
        new: (batch, rows, heads, head_dim) of any dtype and strides; new_lse: (batch, heads, rows) float32.
    """
    new = new if new.stride(-1) == 1 else new.contiguous()
    batch, rows, heads, dim = new.shape
    dv = next_power_of_2(dim)
    m = max(1, 2048 // dv)
    arguments = (
        o[:, row:], lse[:, :, row:], result[:, row:], new, new_lse, *new.stride()[:3], *new_lse.stride(),
        o.shape[1], rows, heads, *done,
    )  # fmt: skip
    launch(merge_kernel, triton.cdiv(rows * heads, m) * batch, arguments, dict(M=m, DIM_V=dim, DV=dv, num_warps=4))
