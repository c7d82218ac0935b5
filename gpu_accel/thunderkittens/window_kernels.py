"""What joins a sliding window to linear attention, in plain Triton: largest scores of windows, sums of two results.

    _window_maximum_kernel     the largest score of each query in its window, and which key has it
    _window_join_kernel        softmax in the window and the sum with a linear part that is there, in one kernel
    _mix_kernel                a o + b n, with two numbers a row; n may start later than o
    _mix_backward_kernel       its gradients in o, n, a and b
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.chunked_kernels import _load_tile


@triton.jit
def _window_maximum_kernel(
    q, k, low, largest, where, q_b, q_t, q_h, k_b, k_t, k_h, seqlen, heads, scale,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program has BT queries of one head and walks over blocks of BT keys, from the first that any of them sees.

    low (seqlen,) int32, not decreasing: query t sees the keys low[t] to t. largest, where (batch, seqlen, heads); a
    query that sees none has 0 and -1. BK of the dimensions are multiplied at once.
    """
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    blocks = (seqlen + BT - 1) // BT
    block = program // heads % blocks
    batch = (program // heads // blocks).to(tl.int64)
    rows = block * BT + tl.arange(0, BT)
    dims = tl.arange(0, BK)
    mask = rows < seqlen
    first = tl.load(low + rows, mask=mask, other=seqlen)
    q += batch * q_b + head * q_h + rows.to(tl.int64)[:, None] * q_t
    k += batch * k_b + head * k_h
    best = tl.full([BT], float("-inf"), tl.float32)
    at = tl.full([BT], -1, tl.int32)
    for start in range(tl.load(low + block * BT) // BT * BT, tl.minimum((block + 1) * BT, seqlen), BT):
        cols = start + tl.arange(0, BT)
        scores = tl.zeros([BT, BT], tl.float32)
        for part in tl.static_range(0, K, BK):
            d = part + dims
            given = tl.load(q + d[None, :], mask=mask[:, None] & (d < K)[None, :], other=0.0)
            keys = tl.load(k + cols.to(tl.int64)[None, :] * k_t + d[:, None],
                           mask=(cols < seqlen)[None, :] & (d < K)[:, None], other=0.0)  # fmt: skip
            scores = dot(given, keys, scores, PRECISION)
        scores *= scale
        scores = tl.where((cols[None, :] >= first[:, None]) & (cols[None, :] <= rows[:, None]), scores, float("-inf"))
        most = tl.max(scores, 1)
        # the first key that has it; a row that sees nothing here has no better one
        found = tl.min(tl.where(scores == most[:, None], cols[None, :], seqlen), 1)
        better = most > best
        best = tl.where(better, most, best)
        at = tl.where(better, found, at)
    to = (batch * seqlen + rows) * heads + head
    tl.store(largest + to, tl.where(at >= 0, best, 0.0), mask=mask)
    tl.store(where + to, at, mask=mask)


@triton.jit
def _window_join_kernel(
    q, k, v, n, weight, window_factor, linear_factor, o,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, seqlen, heads, group, window, scale, floor,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_A: tl.constexpr,
    HAS_B: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """o (batch, seqlen, heads, V), contiguous; scale in base 2. A program has BT queries of one head. BK >= K, BV >= V.

    n (batch, seqlen - window, heads, V) and weight (batch, heads, seqlen - window) float32, contiguous: the average of
    the values before the window, and what their weights sum to, of the queries from `window` on. EARLY: they are
    asked for before the window is walked.
    """
    program = tl.program_id(0)
    blocks = (seqlen + BT - 1) // BT
    block = program % blocks
    head = program // blocks % heads
    batch = (program // blocks // heads).to(tl.int64)
    head_k = (head // group).to(tl.int64)
    rows = block * BT + tl.arange(0, BT)
    cols_k, cols_v = tl.arange(0, BK), tl.arange(0, BV)
    mask = rows < seqlen
    q += batch * q_b + head_k * q_h
    k += batch * k_b + head_k * k_h
    v += batch * v_b + head.to(tl.int64) * v_h
    queries = _load_tile(q, rows.to(tl.int64), q_t, cols_k, mask, K)
    moved = rows - window
    has = mask & (moved >= 0)
    weight += (batch * heads + head) * (seqlen - window) + moved
    n += (batch * (seqlen - window) * heads + head) * V
    if EARLY:
        before = _load_tile(n, moved.to(tl.int64), heads * V, cols_v, has, V)
        by = tl.load(weight, mask=has, other=0.0)
    top = tl.full((BT,), float("-inf"), tl.float32)
    total = tl.zeros((BT,), tl.float32)
    out = tl.zeros((BT, BV), tl.float32)
    first = tl.maximum(0, block * BT - window + 1) // BT * BT
    # the block of the queries comes first: each of them sees itself, so that `top` is a number from then on
    for step in range(0, (block * BT - first) // BT + 1):
        cols = (block - step) * BT + tl.arange(0, BT)
        there = cols < seqlen
        keys = _load_tile(k, cols.to(tl.int64), k_t, cols_k, there, K)
        values = _load_tile(v, cols.to(tl.int64), v_t, cols_v, there, V)
        scores = dot(queries, tl.trans(keys), None, PRECISION) * scale
        late = rows[:, None] - cols[None, :]
        scores = tl.where((late >= 0) & (late < window), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        out = dot(p.to(values.dtype), values, out * shrink[:, None], PRECISION)
        top = higher
    if HAS_A:
        factor = tl.load(window_factor + head)
        out, total = out * factor, total * factor
    if not EARLY:
        before = _load_tile(n, moved.to(tl.int64), heads * V, cols_v, has, V)
        by = tl.load(weight, mask=has, other=0.0)
    if HAS_B:
        by *= tl.load(linear_factor + head)
    out = (out + before.to(tl.float32) * by[:, None]) / (total + by + floor)[:, None]
    to = o + ((batch * seqlen + rows) * heads + head)[:, None] * V + cols_v[None, :]
    tl.store(to, out.to(o.dtype.element_ty), mask=mask[:, None] & (cols_v < V)[None, :])


@triton.jit
def _mix_kernel(
    o, n, a, b, out, o_b, o_t, o_h, n_b, n_t, n_h, seqlen, heads, late, rows,
    R: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """R rows (batch, token, head), heads fastest, of out, a and b; n has no tokens before `late`. BV >= V."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < rows
    head, token, batch = row % heads, row // heads % seqlen, row // heads // seqlen
    cols = tl.arange(0, BV)
    inside = live[:, None] & (cols < V)[None, :]
    x = tl.load(o + (batch * o_b + token * o_t + head * o_h)[:, None] + cols[None, :], mask=inside, other=0.0)
    y = tl.load(n + (batch * n_b + (token - late) * n_t + head * n_h)[:, None] + cols[None, :],
                mask=inside & (token >= late)[:, None], other=0.0)  # fmt: skip
    first, second = tl.load(a + row, mask=live, other=0.0), tl.load(b + row, mask=live, other=0.0)
    mixed = x.to(tl.float32) * first[:, None] + y.to(tl.float32) * second[:, None]
    tl.store(out + row[:, None] * V + cols[None, :], mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward_kernel(
    dout, o, n, a, b, do, dn, da, db, d_b, d_t, d_h, o_b, o_t, o_h, n_b, n_t, n_h, seqlen, heads, late, rows,
    R: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """do, dn, da and db are contiguous; dn has the tokens of n."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < rows
    head, token, batch = row % heads, row // heads % seqlen, row // heads // seqlen
    cols = tl.arange(0, BV)
    inside = live[:, None] & (cols < V)[None, :]
    has = inside & (token >= late)[:, None]
    g = tl.load(dout + (batch * d_b + token * d_t + head * d_h)[:, None] + cols[None, :], mask=inside, other=0.0)
    x = tl.load(o + (batch * o_b + token * o_t + head * o_h)[:, None] + cols[None, :], mask=inside, other=0.0)
    y = tl.load(n + (batch * n_b + (token - late) * n_t + head * n_h)[:, None] + cols[None, :], mask=has, other=0.0)
    first, second = tl.load(a + row, mask=live, other=0.0), tl.load(b + row, mask=live, other=0.0)
    g = g.to(tl.float32)
    tl.store(do + row[:, None] * V + cols[None, :], (g * first[:, None]).to(do.dtype.element_ty), mask=inside)
    kept = (batch * (seqlen - late) + token - late) * heads + head
    tl.store(dn + kept[:, None] * V + cols[None, :], (g * second[:, None]).to(dn.dtype.element_ty), mask=has)
    tl.store(da + row, tl.sum(g * x.to(tl.float32), 1), mask=live)
    tl.store(db + row, tl.sum(g * y.to(tl.float32), 1), mask=live)
