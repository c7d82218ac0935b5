"""Linear attention with a gate for every step and key dimension (GLA), chunk by chunk, in plain Triton: four kernels.

The recurrence, a head at a time (arXiv 2312.06635, section 4):

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t'        o_t = scale S_t' q_t

With b the running sum of g inside a chunk, a chunk that S enters gives

    o_t = scale (q_t exp(b_t))' S + scale sum_{s<=t} P[t, s] v_s        P[t, s] = sum_d q_td k_sd exp(b_td - b_sd)

exp(b_t - b_s) does not come out of the sum over d, and exp(b_t) exp(-b_s) overflows. So pairs are taken by levels: at
level l they are those of two neighbouring blocks of 2^l steps, s in the first and t in the second, that is those with
(s ^ t) >> l == 1. Every s < t is in one level. With m the last step of the first block,

    P[t, s] = (q_t exp(b_t - b_m))' (k_s exp(b_m - b_s))        both exponents are at most 0, whatever the gates

and as a row is in the first or in the second block, X = (q or k) exp(-|b - b_m|) is one tile a level and P, below the
diagonal and above it alike, is X X' there. Chunks of 64 take six such products, one exponential an element each.

Backwards, D[t, s] = scale do_t' v_s, mirrored, gives from the same X both dq (rows of second blocks) and dk (of first
ones) as exp(-|b - b_m|) (D X). The gradient of g_u is the sum over s < u <= t of what s passes to t: in a level, a sum
over the rows of its block that is formed from one side only. Nothing is subtracted, so nothing cancels. What reaches
into the chunk, out of it and across it (the sum over S * dS) is added alike, anew for every chunk.

    _sums_kernel       one program a chunk, head and block of k: b
    _states_kernel     one program a sequence, head and tile of S: what enters every chunk; reversed, dS
    _rows_kernel       one program a chunk and head: o; reversed, dv
    _ones_kernel       one program a level: the masks of those sums
    _mirrored_kernel   one program a chunk and head: D
    _gradients_kernel  one program a chunk, head and block of k: dq, dk, dg
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.chunked_kernels import (
    LOWEST_GATE,
    _first_state,
    _for_products,
    _load_tile,
    _load_turned,
    _place,
    _program,
    _sequence,
    _state_tile,
    _store_tile,
)


@triton.jit
def _sums_kernel(
    g, sums, cu_seqlens, chunk_offsets, seq_of_chunk, g_b, g_t, g_h, g_k, seqlen, chunks, heads,
    K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """sums (batch, seqlen, heads, K) float32: of the gates from the first step of the chunk on."""
    chunk, head, block_k = _program(heads, (K + BK - 1) // BK)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        g += batch * g_b + start * g_t + head.to(tl.int64) * g_h
        sums += ((batch * seqlen + start) * heads + head) * K
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        cols = block_k * BK + tl.arange(0, BK)
        mask = (rows < length)[:, None] & (cols < K)[None, :]
        gates = tl.load(g + rows[:, None] * g_t + cols.to(tl.int64)[None, :] * g_k, mask=mask, other=0.0)
        b = tl.cumsum(tl.maximum(gates.to(tl.float32), LOWEST_GATE), 0)
        tl.store(sums + rows[:, None] * heads * K + cols[None, :], b, mask=mask)


@triton.jit
def _load_sums(sums, rows, end, stride, cols, K: tl.constexpr):
    """Sums of rows; beyond the end those of the end, so that differences stay differences of the chunk."""
    at = tl.minimum(rows, end).to(tl.int64)
    return tl.load(sums + at[:, None] * stride + cols[None, :], mask=(cols < K)[None, :], other=0.0)


@triton.jit
def _states_kernel(
    x, values, sums, initial, states, final, cu_seqlens, chunk_offsets,
    x_b, x_t, x_h, values_b, values_t, values_h, seqlen, chunks, sequences, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """states (chunks, heads, K, V) and final (sequences, heads, K, V) float32; x and values are k and v, or q and do.

    REVERSE: from the end to the beginning, the gradient of what leaves every chunk, and of the initial state.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block_v = program % blocks_v
    block_k = program // blocks_v % blocks_k
    head = program // (blocks_v * blocks_k) % heads
    n = program // (blocks_v * blocks_k) // heads
    batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
    chunk0 = tl.load(chunk_offsets + n).to(tl.int64) if VARLEN else n.to(tl.int64) * chunks
    wide_head = head.to(tl.int64)
    x += batch * x_b + start * x_t + wide_head * x_h
    values += batch * values_b + start * values_t + wide_head * values_h
    sums += ((batch * seqlen + start) * heads + head) * K
    cols_k = block_k * BK + tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    in_k = cols_k < K
    tile, tile_mask = _state_tile(cols_k, cols_v, K, V)
    own = (n.to(tl.int64) * heads + head) * (K * V)
    acc = _first_state(initial, own, tile, tile_mask, HAS_INITIAL)
    count = (length + BT - 1) // BT
    for i in range(0, count):
        chunk = count - 1 - i if REVERSE else i
        to = states + ((chunk0 + chunk) * heads + head) * (K * V) + tile
        tl.store(to, acc.to(states.dtype.element_ty), mask=tile_mask)
        rows = (chunk * BT + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        xt = _load_turned(x, rows, x_t, cols_k, mask, K)
        end = tl.minimum(length, (chunk + 1) * BT) - 1
        at = tl.minimum(rows, end).to(tl.int64)
        bt = tl.load(sums + at[None, :] * heads * K + cols_k[:, None], mask=in_k[:, None], other=0.0)
        last = tl.load(sums + end.to(tl.int64) * heads * K + cols_k, mask=in_k, other=0.0)
        acc = acc * tl.exp(last)[:, None]
        left = xt.to(tl.float32) * (tl.exp(bt) * scale if REVERSE else tl.exp(last[:, None] - bt))
        right = _load_tile(values, rows, values_t, cols_v, mask, V)
        acc = dot(left.to(right.dtype), right, acc, PRECISION)
    tl.store(final + own + tile, acc, mask=tile_mask)


@triton.jit
def _to_the_middle(sums, b, first, end, steps, stride, cols, LEVEL, K: tl.constexpr):
    """exp(-|b - b_m|) of every row, m the middle of its pair of blocks of 2^LEVEL rows."""
    middle = first + ((steps >> (LEVEL + 1)) << (LEVEL + 1)) + (1 << LEVEL) - 1
    anchor = _load_sums(sums, middle, end, stride, cols, K)
    second = ((steps >> LEVEL) & 1) == 1
    return tl.exp(tl.where(second[:, None], b - anchor, anchor - b))


@triton.jit
def _ones_kernel(ones, BT: tl.constexpr, LEVELS: tl.constexpr):
    """ones (LEVELS + 2, BT, BT), 1 or 0: which steps x of a level count for the gate of step u, row u and column x.

    In a second block those from u on, in a first one those before u. Then, for a chunk as a whole, both in turn.
    Made once a call and read from memory: a mask that is computed is an operand in registers, of which none are left.
    """
    level = tl.program_id(0)
    row, col = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    from_here = col >= row
    near = ((row >> level) == (col >> level)) & (from_here == (((row >> level) & 1) == 1))
    which = tl.where(level == LEVELS, from_here, tl.where(level > LEVELS, col < row, near))
    tl.store(ones + level * BT * BT + row * BT + col, tl.where(which, 1.0, 0.0).to(ones.dtype.element_ty))


@triton.jit
def _sums_over(ones, plane, terms, acc, BT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + sums of rows of terms, those that a plane of ones has, by tensor cores.

    Beside 16 bits by two products of bfloat16: terms rounded, and what that left of them.
    """
    steps = tl.arange(0, BT)
    which = tl.load(ones + plane * BT * BT + steps[:, None] * BT + steps[None, :])
    if which.dtype == tl.bfloat16:
        rounded = terms.to(tl.bfloat16)
        acc = dot(which, rounded, acc, PRECISION)
        acc = dot(which, (terms - rounded.to(tl.float32)).to(tl.bfloat16), acc, PRECISION)
    else:
        acc = dot(which, terms, acc, PRECISION)
    return acc


@triton.jit
def _rows_kernel(
    q, k, values, sums, states, out, cu_seqlens, chunk_offsets, seq_of_chunk,
    q_b, q_t, q_h, k_b, k_t, k_h, values_b, values_t, values_h, seqlen, chunks, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    VARLEN: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (batch, seqlen, heads, V), contiguous: o from values = v, or with REVERSE dv from values = do and dS."""
    chunk, head, _block = _program(heads, 1)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        wide_head = head.to(tl.int64)
        q += batch * q_b + start * q_t + wide_head * q_h
        k += batch * k_b + start * k_t + wide_head * k_h
        values += batch * values_b + start * values_t + wide_head * values_h
        place = (batch * seqlen + start) * heads + head
        sums += place * K
        out += place * V
        states += (chunk.to(tl.int64) * heads + head) * (K * V)
        steps = tl.arange(0, BT)
        rows = (first + steps).to(tl.int64)
        mask = rows < length
        row, col = steps[:, None], steps[None, :]
        end = tl.minimum(length, first + BT) - 1
        scores = tl.zeros((BT, BT), tl.float32)
        same = tl.zeros((BT,), tl.float32)
        for block_k in tl.static_range(0, (K + BK - 1) // BK):
            cols_k = block_k * BK + tl.arange(0, BK)
            queries = _load_tile(q, rows, q_t, cols_k, mask, K)
            keys = _load_tile(k, rows, k_t, cols_k, mask, K)
            b = _load_sums(sums, rows, end, heads * K, cols_k, K)
            same += tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
            for level in tl.range(0, LEVELS, num_stages=1):
                near = _to_the_middle(sums, b, first, end, steps, heads * K, cols_k, level, K)
                second = ((steps >> level) & 1) == 1
                x = (tl.where(second[:, None], queries, keys).to(tl.float32) * near).to(queries.dtype)
                pairs = dot(x, tl.trans(x), None, PRECISION)
                scores += tl.where(((row ^ col) >> level) == 1, pairs, 0.0)
        scores = tl.where(col > row if REVERSE else row > col, scores, tl.where(row == col, same[:, None], 0.0)) * scale
        left = scores.to(values.dtype.element_ty)
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            right = _load_tile(values, rows, values_t, cols_v, mask, V)
            acc = dot(left, right, None, PRECISION)
            for block_k in tl.static_range(0, (K + BK - 1) // BK):
                cols_k = block_k * BK + tl.arange(0, BK)
                b = _load_sums(sums, rows, end, heads * K, cols_k, K)
                if REVERSE:
                    last = tl.load(sums + end.to(tl.int64) * heads * K + cols_k, mask=cols_k < K, other=0.0)
                    decayed = _load_tile(k, rows, k_t, cols_k, mask, K).to(tl.float32) * tl.exp(last[None, :] - b)
                else:
                    decayed = _load_tile(q, rows, q_t, cols_k, mask, K).to(tl.float32) * tl.exp(b) * scale
                state = _for_products(_load_tile(states, cols_k, V, cols_v, cols_k < K, V), right.dtype)
                acc = dot(decayed.to(state.dtype), state, acc, PRECISION)
            _store_tile(out, acc, rows * heads, V, cols_v, mask, V)


@triton.jit
def _mirrored_kernel(
    do, v, mirrored, same, cu_seqlens, chunk_offsets, seq_of_chunk, do_b, do_t, do_h, v_b, v_t, v_h,
    seqlen, chunks, heads, scale,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mirrored (chunks, heads, BT, BT) in the dtype of v: D[t, s] and D[s, t] alike; same (.., BT) float32: D[t, t]."""
    chunk, head, _block = _program(heads, 1)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        wide_head = head.to(tl.int64)
        do += batch * do_b + start * do_t + wide_head * do_h
        v += batch * v_b + start * v_t + wide_head * v_h
        steps = tl.arange(0, BT)
        rows = (first + steps).to(tl.int64)
        mask = rows < length
        row, col = steps[:, None], steps[None, :]
        lower = tl.zeros((BT, BT), tl.float32)  # row t, column s
        upper = tl.zeros((BT, BT), tl.float32)  # row s, column t
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            outputs = _load_tile(do, rows, do_t, cols_v, mask, V)
            values = _load_tile(v, rows, v_t, cols_v, mask, V)
            lower = dot(outputs, tl.trans(values), lower, PRECISION)
            upper = dot(values, tl.trans(outputs), upper, PRECISION)
        own = (chunk.to(tl.int64) * heads + head) * BT
        tl.store(same + own + steps, tl.sum(tl.where(row == col, lower, 0.0), 1) * scale)
        both = tl.where(row > col, lower, upper) * scale
        tl.store(mirrored + own * BT + row * BT + col, both.to(mirrored.dtype.element_ty))


@triton.jit
def _gradients_kernel(
    q, k, v, sums, ones, do, states, dstates, mirrored, same, dq, dk, dg, cu_seqlens, chunk_offsets, seq_of_chunk,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, seqlen, chunks, heads, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEVELS: tl.constexpr,
    VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg (batch, seqlen, heads, K), contiguous; dg float32. mirrored, same: of `_mirrored_kernel`."""
    chunk, head, block_k = _program(heads, (K + BK - 1) // BK)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        wide_head = head.to(tl.int64)
        q += batch * q_b + start * q_t + wide_head * q_h
        k += batch * k_b + start * k_t + wide_head * k_h
        v += batch * v_b + start * v_t + wide_head * v_h
        do += batch * do_b + start * do_t + wide_head * do_h
        place = (batch * seqlen + start) * heads + head
        sums += place * K
        number = chunk.to(tl.int64) * heads + head
        own = number * (K * V)
        steps = tl.arange(0, BT)
        rows = (first + steps).to(tl.int64)
        mask = rows < length
        row, col = steps[:, None], steps[None, :]
        cols_k = block_k * BK + tl.arange(0, BK)
        grad_q = tl.zeros((BT, BK), tl.float32)
        grad_k = tl.zeros((BT, BK), tl.float32)
        across = tl.zeros((BK,), tl.float32)
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            outputs = _load_tile(do, rows, do_t, cols_v, mask, V)
            values = _load_tile(v, rows, v_t, cols_v, mask, V)
            entering = _load_tile(states + own, cols_k, V, cols_v, cols_k < K, V)
            leaving = _load_tile(dstates + own, cols_k, V, cols_v, cols_k < K, V)
            across += tl.sum(entering.to(tl.float32) * leaving.to(tl.float32), 1)
            entering = _for_products(entering, outputs.dtype)
            leaving = _for_products(leaving, outputs.dtype)
            grad_q = dot(outputs.to(entering.dtype), tl.trans(entering), grad_q, PRECISION)
            grad_k = dot(values.to(leaving.dtype), tl.trans(leaving), grad_k, PRECISION)
        queries = _load_tile(q, rows, q_t, cols_k, mask, K)
        keys = _load_tile(k, rows, k_t, cols_k, mask, K)
        end = tl.minimum(length, first + BT) - 1
        b = _load_sums(sums, rows, end, heads * K, cols_k, K)
        last = tl.load(sums + end.to(tl.int64) * heads * K + cols_k, mask=cols_k < K, other=0.0)
        grad_q = grad_q * tl.exp(b) * scale
        grad_k = grad_k * tl.exp(last[None, :] - b)
        # what reaches steps from u on, what leaves steps before u, what passes through: sums by products with ones
        grad_g = _sums_over(ones, LEVELS, queries.to(tl.float32) * grad_q, None, BT, PRECISION)
        grad_g = _sums_over(ones, LEVELS + 1, keys.to(tl.float32) * grad_k, grad_g, BT, PRECISION)
        grad_g += (across * tl.exp(last))[None, :]
        weights = tl.load(mirrored + number * (BT * BT) + row * BT + col)
        for level in tl.range(0, LEVELS, num_stages=1):
            near = _to_the_middle(sums, b, first, end, steps, heads * K, cols_k, level, K)
            second = (((steps >> level) & 1) == 1)[:, None]
            mine = tl.where(second, queries, keys).to(tl.float32)
            x = (mine * near).to(weights.dtype)
            pairs = tl.where(((row ^ col) >> level) == 1, weights, 0.0).to(weights.dtype)
            grad = dot(pairs, x, None, PRECISION) * near
            grad_q += tl.where(second, grad, 0.0)
            grad_k += tl.where(second, 0.0, grad)
            grad_g = _sums_over(ones, level, mine * grad, grad_g, BT, PRECISION)
        own_weight = tl.load(same + number * BT + steps)[:, None]
        grad_q += own_weight * keys.to(tl.float32)
        grad_k += own_weight * queries.to(tl.float32)
        to = place * K + rows[:, None] * heads * K + cols_k[None, :]
        whole = mask[:, None] & (cols_k < K)[None, :]
        tl.store(dq + to, grad_q.to(dq.dtype.element_ty), mask=whole)
        tl.store(dk + to, grad_k.to(dk.dtype.element_ty), mask=whole)
        tl.store(dg + to, grad_g, mask=whole)
