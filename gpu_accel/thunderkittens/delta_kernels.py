"""The delta rule, gated or not, chunk by chunk, in plain Triton: four kernels beside those of linear attention.

The recurrence (arXiv 2102.11174; with gates arXiv 2412.06464, section 3), a head at a time:

    u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t)        S_t = exp(g_t) S_{t-1} + k_t u_t'        o_t = scale S_t' q_t

Given u it is linear attention with u in place of v. Inside a chunk that S enters, with b the running sum of g,

    (I + A) U = beta (V - exp(b) K S)        A[t, s] = beta_t exp(b_t - b_s) k_t' k_s  for s < t, else 0

so with T = (I + A)^-1 every chunk has U = T (beta V) - T (beta exp(b) K) S = fresh - decay S (arXiv 2406.06484).

    _solve_kernel     one program a chunk and head: T, decay and fresh
    _pairs_kernel     one program a chunk and head: what U is weighted with in o, for the walk of `delta_walk_kernel`
    _walk_kernel      one program a sequence, head and block of v: U and the states that enter every chunk
    _walk_back_kernel the same from the end: the gradients of U and of the states
    _inputs_kernel    one program a chunk and head: what k, v, beta and g get through U

T comes from 1 x 1 blocks, which are inverted as they stand, by doubling: [[P, 0], [X, Q]]^-1 has -Q^-1 X P^-1 below.
That is substitution by blocks. A product of (I + A^(2^i)) would cost as much, but its terms grow to 1e18 where keys
repeat and cancel to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.chunked_kernels import (
    _first_state,
    _for_products,
    _gate_sums,
    _load_scalars,
    _load_tile,
    _load_turned,
    _place,
    _program,
    _sequence,
    _state_tile,
    _store_tile,
)


@triton.jit
def _gates(g, stride, rows, mask, HAS_G: tl.constexpr, BT: tl.constexpr):
    """(running sum, whole sum) of the gates of a chunk, zeros where there are none."""
    b = tl.zeros((BT,), tl.float32)
    last = 0.0
    if HAS_G:
        b, last = _gate_sums(g, stride, rows, mask)
    return b, last


@triton.jit
def _coupling(keys, b, BT: tl.constexpr, PRECISION: tl.constexpr):
    """exp(b_t - b_s) k_t' k_s for s < t: A without beta."""
    steps = tl.arange(0, BT)
    below = steps[:, None] > steps[None, :]
    inner = dot(keys, tl.trans(keys), None, PRECISION)
    return tl.where(below, inner * tl.exp(tl.where(below, b[:, None] - b[None, :], float("-inf"))), 0.0)


@triton.jit
def _solve_kernel(
    k, v, g, beta, inverse, decay, fresh, cu_seqlens, chunk_offsets, seq_of_chunk,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    seqlen, chunks, heads, group,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, VARLEN: tl.constexpr, KEEP: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """inverse (batch, seqlen, heads, BT), written with KEEP: rows of T; decay (..., K); fresh (..., V)."""
    chunk, head, _block = _program(heads, 1)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        wide_head = head.to(tl.int64)
        k += batch * k_b + start * k_t + (head // group).to(tl.int64) * k_h
        v += batch * v_b + start * v_t + wide_head * v_h
        beta += batch * beta_b + start * beta_t + wide_head * beta_h
        if HAS_G:
            g += batch * g_b + start * g_t + wide_head * g_h
        place = (batch * seqlen + start) * heads + head
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        steps = tl.arange(0, BT)
        cols_k = tl.arange(0, BK)
        b, _ = _gates(g, g_t, rows, mask, HAS_G, BT)
        strength = _load_scalars(beta, beta_t, mask, rows, 0.0)
        keys = _load_tile(k, rows, k_t, cols_k, mask, K)
        a = _coupling(keys, b, BT, PRECISION) * strength[:, None]
        row, col = steps[:, None], steps[None, :]
        t = tl.where(row == col, 1.0, 0.0) - tl.where((row % 2 == 1) & (col == row - 1), a, 0.0)
        for level in tl.static_range(1, 6):
            if (1 << level) < BT:
                below = (row // (1 << level) % 2 == 1) & (col // (1 << level) == row // (1 << level) - 1)
                off = tl.where(below, a, 0.0)
                t -= dot(t, dot(off, t, None, EXACT), None, EXACT)
        t = t.to(inverse.dtype.element_ty)
        if KEEP:
            tl.store(inverse + (place + rows * heads)[:, None] * BT + steps[None, :], t, mask=mask[:, None])
        left = keys.to(tl.float32) * (strength * tl.exp(b))[:, None]
        out = dot(t, left.to(t.dtype), None, PRECISION)
        _store_tile(decay, out, place + rows * heads, K, cols_k, mask, K)
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            values = _load_tile(v, rows, v_t, cols_v, mask, V).to(tl.float32) * strength[:, None]
            rounded = values.to(t.dtype)
            rest = None
            if t.dtype == tl.bfloat16:
                # T has a diagonal of 1: what a step adds itself is rounded once, which the gradient of gates shows
                rest = values - rounded.to(tl.float32)
            fresh_v = dot(t, rounded, rest, PRECISION)
            _store_tile(fresh, fresh_v, place + rows * heads, V, cols_v, mask, V)


@triton.jit
def _walk_kernel(
    k, g, decay, fresh, initial, states, low, u, final, cu_seqlens, chunk_offsets,
    k_b, k_t, k_h, g_b, g_t, g_h, seqlen, chunks, sequences, heads, group,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u (batch, seqlen, heads, V); states (chunks, heads, K, V); final (sequences, heads, K, V) float32.

    low: None, or what is left of states, in their dtype.
    """
    n, head, block_v = _program(heads, (V + BV - 1) // BV)
    batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
    chunk0 = tl.load(chunk_offsets + n).to(tl.int64) if VARLEN else n.to(tl.int64) * chunks
    wide_head = head.to(tl.int64)
    k += batch * k_b + start * k_t + (head // group).to(tl.int64) * k_h
    if HAS_G:
        g += batch * g_b + start * g_t + wide_head * g_h
    place = (batch * seqlen + start) * heads + head
    cols_k = tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    tile, tile_mask = _state_tile(cols_k, cols_v, K, V)
    own = (n.to(tl.int64) * heads + head) * (K * V)
    acc = _first_state(initial, own, tile, tile_mask, HAS_INITIAL)
    for chunk in range(0, (length + BT - 1) // BT):
        to = ((chunk0 + chunk) * heads + head) * (K * V) + tile
        rounded = acc.to(states.dtype.element_ty)
        tl.store(states + to, rounded, mask=tile_mask)
        if low is not None:
            tl.store(low + to, (acc - rounded.to(tl.float32)).to(low.dtype.element_ty), mask=tile_mask)
        rows = (chunk * BT + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        kt = _load_turned(k, rows, k_t, cols_k, mask, K)
        decays = _load_tile(decay, place + rows * heads, K, cols_k, mask, K)
        values = _load_tile(fresh, place + rows * heads, V, cols_v, mask, V).to(tl.float32)
        entering = _for_products(acc, decays.dtype)
        values -= dot(decays.to(entering.dtype), entering, None, PRECISION)
        rounded = values.to(u.dtype.element_ty)
        _store_tile(u, rounded, place + rows * heads, V, cols_v, mask, V)
        b, last = _gates(g, g_t, rows, mask, HAS_G, BT)
        if HAS_G:
            rounded = (values * tl.exp(last - b)[:, None]).to(u.dtype.element_ty)
            acc = acc * tl.exp(last)
        acc = dot(kt, rounded, acc, PRECISION)
    tl.store(final + own + tile, acc, mask=tile_mask)


@triton.jit
def _walk_back_kernel(
    q, k, g, decay, do, dfinal, dstates, du, dinitial, cu_seqlens, chunk_offsets,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, do_b, do_t, do_h, seqlen, chunks, sequences, heads, group, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_FINAL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du (batch, seqlen, heads, V); dstates (chunks, heads, K, V): of what leaves every chunk; dinitial."""
    n, head, block_v = _program(heads, (V + BV - 1) // BV)
    batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
    chunk0 = tl.load(chunk_offsets + n).to(tl.int64) if VARLEN else n.to(tl.int64) * chunks
    head_k = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    q += batch * q_b + start * q_t + head_k * q_h
    k += batch * k_b + start * k_t + head_k * k_h
    do += batch * do_b + start * do_t + wide_head * do_h
    if HAS_G:
        g += batch * g_b + start * g_t + wide_head * g_h
    place = (batch * seqlen + start) * heads + head
    steps = tl.arange(0, BT)
    later = steps[None, :] >= steps[:, None]
    cols_k = tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    tile, tile_mask = _state_tile(cols_k, cols_v, K, V)
    own = (n.to(tl.int64) * heads + head) * (K * V)
    acc = _first_state(dfinal, own, tile, tile_mask, HAS_FINAL)
    count = (length + BT - 1) // BT
    for i in range(0, count):
        chunk = count - 1 - i
        to = dstates + ((chunk0 + chunk) * heads + head) * (K * V) + tile
        tl.store(to, acc.to(dstates.dtype.element_ty), mask=tile_mask)
        rows = (chunk * BT + steps).to(tl.int64)
        mask = rows < length
        keys = _load_tile(k, rows, k_t, cols_k, mask, K)
        qt = _load_turned(q, rows, q_t, cols_k, mask, K)
        outputs = _load_tile(do, rows, do_t, cols_v, mask, V)
        scores = dot(keys, qt, None, PRECISION)  # row s, column t
        leaving = _for_products(acc, keys.dtype)
        grad = dot(keys.to(leaving.dtype), leaving, None, PRECISION)
        b, last = _gates(g, g_t, rows, mask, HAS_G, BT)
        left = outputs.to(tl.float32) * scale
        if HAS_G:
            grad = grad * tl.exp(last - b)[:, None]
            scores = scores * tl.exp(tl.where(later, b[None, :] - b[:, None], float("-inf")))
            left = left * tl.exp(b)[:, None]
            acc = acc * tl.exp(last)
        scores = tl.where(later, scores, 0.0) * scale
        grad = dot(scores.to(outputs.dtype), outputs, grad, PRECISION)
        rounded = grad.to(du.dtype.element_ty)
        _store_tile(du, rounded, place + rows * heads, V, cols_v, mask, V)
        decay_t = _load_turned(decay, place + rows * heads, K, cols_k, mask, K)
        acc = dot(qt, left.to(qt.dtype), acc, PRECISION)
        acc -= dot(decay_t, rounded.to(decay_t.dtype), None, PRECISION)
    tl.store(dinitial + own + tile, acc, mask=tile_mask)


@triton.jit
def _inputs_kernel(
    k, v, g, beta, inverse, u, du, states, direct, planes, dk, dv, dg, dbeta, cu_seqlens, chunk_offsets, seq_of_chunk,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    seqlen, chunks, heads, group, rows_in_all,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, VARLEN: tl.constexpr, PLANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (batch, seqlen, heads, K), dv, dbeta and, where there are gates, dg: what goes through U, and what does not.

    The latter is direct, float32 and like dk, and for dg PLANES planes of (batch, seqlen, heads).
    """
    chunk, head, _block = _program(heads, 1)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        wide_head = head.to(tl.int64)
        k += batch * k_b + start * k_t + (head // group).to(tl.int64) * k_h
        v += batch * v_b + start * v_t + wide_head * v_h
        beta += batch * beta_b + start * beta_t + wide_head * beta_h
        if HAS_G:
            g += batch * g_b + start * g_t + wide_head * g_h
        place = (batch * seqlen + start) * heads + head
        states += (chunk.to(tl.int64) * heads + head) * (K * V)
        steps = tl.arange(0, BT)
        rows = (first + steps).to(tl.int64)
        mask = rows < length
        at = (place + rows * heads)[:, None]
        cols_k = tl.arange(0, BK)
        b, _ = _gates(g, g_t, rows, mask, HAS_G, BT)
        strength = _load_scalars(beta, beta_t, mask, rows, 0.0)
        keys = _load_tile(k, rows, k_t, cols_k, mask, K)
        # T' by its address: row s, column t
        there_t = mask[None, :] & mask[:, None]
        t = tl.load(inverse + (place + rows * heads)[None, :] * BT + steps[:, None], mask=there_t, other=0.0)
        da = tl.zeros((BT, BT), tl.float32)  # row t, column s, without its minus
        dat = tl.zeros((BT, BT), tl.float32)
        grad_k = tl.zeros((BT, BK), tl.float32)
        grad_beta = tl.zeros((BT,), tl.float32)
        grad_b = tl.zeros((BT,), tl.float32)
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            whole = mask[:, None] & (cols_v < V)[None, :]
            grads = _load_tile(du, place + rows * heads, V, cols_v, mask, V)
            right = dot(t, grads.to(t.dtype), None, PRECISION)  # of beta (V - exp(b) K S)
            tl.store(dv + at * V + cols_v[None, :], (right * strength[:, None]).to(dv.dtype.element_ty), mask=whole)
            rounded = right.to(grads.dtype)
            given = _load_tile(u, place + rows * heads, V, cols_v, mask, V)
            da = dot(rounded, tl.trans(given), da, PRECISION)
            dat = dot(given, tl.trans(rounded), dat, PRECISION)
            entering = _for_products(_load_tile(states, cols_k, V, cols_v, cols_k < K, V), keys.dtype)
            left = keys
            if keys.dtype != entering.dtype:
                # Widened keys are an operand in registers. Kept for all turns of the loop, ptxas (12.8 to 13.0, sm_90)
                # has others written over them after the first: gpu_accel.testing.overwritten.
                left = _load_tile(k, rows, k_t, cols_k, mask, K)
            known = dot(left.to(entering.dtype), entering, None, PRECISION) * tl.exp(b)[:, None]
            values = _load_tile(v, rows, v_t, cols_v, mask, V).to(tl.float32)
            grad_beta += tl.sum(right * (values - known), 1)
            grad_b -= tl.sum(right * known, 1) * strength
            grad_k = dot(rounded.to(entering.dtype), tl.trans(entering), grad_k, PRECISION)
        grad_k = -grad_k * (strength * tl.exp(b))[:, None]
        inner = _coupling(keys, b, BT, PRECISION)
        row, col = steps[:, None], steps[None, :]
        step = tl.exp(tl.where(row > col, b[:, None] - b[None, :], float("-inf")))
        step_t = tl.exp(tl.where(col > row, b[None, :] - b[:, None], float("-inf")))
        da = tl.where(row > col, -da, 0.0)
        dat = tl.where(col > row, -dat, 0.0)
        grad_beta += tl.sum(da * inner, 1)
        pairs = da * inner * strength[:, None]
        grad_b += tl.sum(pairs, 1) - tl.sum(pairs, 0)
        grad_k = dot((da * step * strength[:, None]).to(keys.dtype), keys, grad_k, PRECISION)
        grad_k = dot((dat * step_t * strength[None, :]).to(keys.dtype), keys, grad_k, PRECISION)
        grad_k += _load_tile(direct, place + rows * heads, K, cols_k, mask, K)
        _store_tile(dk, grad_k, place + rows * heads, K, cols_k, mask, K)
        tl.store(dbeta + place + rows * heads, grad_beta, mask=mask)
        if HAS_G:
            grad_g = tl.cumsum(grad_b, 0, reverse=True)
            for plane in tl.static_range(PLANES):
                to = planes + (wide_head * 0 + plane * rows_in_all) * heads + place  # 64 bits
                grad_g += tl.load(to + rows * heads, mask=mask, other=0.0)
            tl.store(dg + place + rows * heads, grad_g, mask=mask)
