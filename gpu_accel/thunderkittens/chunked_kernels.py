"""Linear attention with scalar gates, chunk by chunk, in plain Triton: four kernels.

The recurrence, a head at a time (arXiv 2312.06635 section 4, arXiv 2405.21060 section 6):

    S_t = exp(g_t) S_{t-1} + w_t k_t v_t'        o_t = scale q_t' S_t

With b the running sum of g inside a chunk, a chunk that S enters gives

    o_t = scale exp(b_t) q_t' S + sum_{s<=t} scale exp(b_t - b_s) (q_t' k_s) w_s v_s

    _states_kernel   one program a sequence, head, tile of S and segment: walks its chunks and stores what enters each
                     of them. Backwards in time, with q and do in place of k and v: the gradients of the states.
    _output_kernel   one program a chunk, head and block of v: the formula above
    _dv_kernel       one program a chunk, head and block of v: dv and dw
    _dqk_kernel      one program a chunk, head and block of k: dq, dk and dg

Every tl.dot has a left operand that was loaded, or computed, the way round it is used: A' is a product of its own and
never a transposed register tile (some Tritons miscompile those on Hopper, see gpu_accel.compat).

Segments: a long sequence with few heads is cut; a first pass gives the state that each segment adds, and the second
starts every segment from the sum of those before it. So (1, 16 heads, 16384) fills a GPU too.

The gradient of g_t is the sum over s < t <= u of what s passes to u. It is formed from pairs inside the chunk, pairs
that reach into it, out of it and across it, so that nothing large cancels over the sequence. What crosses a chunk is
the sum over S * dS, K V terms of both signs: their states are kept in float32 for it (rounded to bfloat16 they miss
the gradient of a gate by 8 times what torch does, since its error is the same for all steps of a chunk).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot

# A gate of -inf forgets all. exp(-88) is the smallest normal float32; below it differences would be inf - inf.
LOWEST_GATE = tl.constexpr(-88.0)


@triton.jit
def _program(heads, BLOCKS: tl.constexpr):
    """(chunk or sequence, head, block) of this program: all blocks of a head, then the next head."""
    program = tl.program_id(0)
    block = program % BLOCKS
    head = program // BLOCKS % heads
    return program // BLOCKS // heads, head, block


@triton.jit
def _sequence(n, cu_seqlens, seqlen, VARLEN: tl.constexpr):
    """(batch, first row in memory, length) of a sequence."""
    if VARLEN:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - start).to(tl.int32)
        batch = start * 0
    else:
        start = (n * 0).to(tl.int64)
        length = seqlen
        batch = n.to(tl.int64)
    return batch, start, length


@triton.jit
def _place(chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN: tl.constexpr, BT: tl.constexpr):
    """(batch, first row in memory, first row in the sequence, length, whether the chunk exists) of a chunk."""
    if VARLEN:
        n = tl.load(seq_of_chunk + chunk)
        there = n >= 0
        n = tl.maximum(n, 0)
        batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
        first = (chunk - tl.load(chunk_offsets + n)).to(tl.int32) * BT
    else:
        n = chunk // chunks
        batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
        first = (chunk - n * chunks) * BT
        there = first < length
    return batch, start, first, length, there


@triton.jit
def _load_scalars(x, stride, row_mask, rows, DEFAULT: tl.constexpr):
    return tl.load(x + rows * stride, mask=row_mask, other=DEFAULT).to(tl.float32)


@triton.jit
def _load_tile(x, rows, stride, cols, row_mask, WIDTH: tl.constexpr):
    """x[rows, cols], zeros beyond the sequence and beyond WIDTH."""
    return tl.load(
        x + rows[:, None] * stride + cols[None, :], mask=row_mask[:, None] & (cols < WIDTH)[None, :], other=0.0
    )


@triton.jit
def _load_turned(x, rows, stride, cols, row_mask, WIDTH: tl.constexpr):
    """The transpose of `_load_tile`, loaded so: a left operand as it is used."""
    mask = row_mask[None, :] & (cols < WIDTH)[:, None]
    return tl.load(x + rows[None, :] * stride + cols[:, None], mask=mask, other=0.0)


@triton.jit
def _store_tile(x, tile, rows, stride, cols, row_mask, WIDTH: tl.constexpr):
    """x[rows, cols] = tile, in the dtype of x; nothing beyond the sequence and beyond WIDTH."""
    mask = row_mask[:, None] & (cols < WIDTH)[None, :]
    tl.store(x + rows[:, None] * stride + cols[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _gate_sums(g, stride, rows, mask):
    """(running sum, whole sum) of the gates of a chunk."""
    gates = tl.maximum(_load_scalars(g, stride, mask, rows, 0.0), LOWEST_GATE)
    return tl.cumsum(gates, 0), tl.sum(gates, 0)


@triton.jit
def _state_tile(cols_k, cols_v, K: tl.constexpr, V: tl.constexpr):
    """(places of a tile in a state (K, V), which of them there are)."""
    return cols_k[:, None] * V + cols_v[None, :], (cols_k < K)[:, None] & (cols_v < V)[None, :]


@triton.jit
def _first_state(given, own, tile, mask, GIVEN: tl.constexpr):
    """The tile of the state that is given, or zeros, float32."""
    acc = tl.zeros(mask.shape, tl.float32)
    if GIVEN:
        acc = tl.load(given + own + tile, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _for_products(state, like: tl.constexpr):
    """A state as operand: bfloat16 beside bfloat16, whatever it was stored in; else as it is."""
    if like == tl.bfloat16:
        state = state.to(tl.bfloat16)
    return state


@triton.jit
def _states_kernel(
    k, v, g, w, initial, local, decays, states, final, cu_seqlens, chunk_offsets,
    k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h,
    seqlen, chunks, sequences, heads, group, segments, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_INITIAL: tl.constexpr, VARLEN: tl.constexpr,
    REVERSE: tl.constexpr, LOCAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """LOCAL: only what this segment adds, into local (segments, sequences, heads, K, V) float32, and its decay.

    Otherwise states (chunks, heads, K, V) and, by the last segment, final (sequences, heads, K, V) float32.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block_v = program % blocks_v
    block_k = program // blocks_v % blocks_k
    rest = program // (blocks_v * blocks_k)
    head = rest % heads
    n = rest // heads % sequences
    position = rest // heads // sequences  # of the segment, in the order of walking

    batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
    chunk0 = tl.load(chunk_offsets + n).to(tl.int64) if VARLEN else n.to(tl.int64) * chunks
    count = (length + BT - 1) // BT
    each = (count + segments - 1) // segments
    begin = position * each
    end = tl.minimum(count, begin + each)

    head_k = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    k += batch * k_b + start * k_t + head_k * k_h
    v += batch * v_b + start * v_t + wide_head * v_h
    if HAS_G:
        g += batch * g_b + start * g_t + wide_head * g_h
    if HAS_W:
        w += batch * w_b + start * w_t + wide_head * w_h

    cols_k = block_k * BK + tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    tile, tile_mask = _state_tile(cols_k, cols_v, K, V)
    own = (n.to(tl.int64) * heads + head) * (K * V)  # of this sequence and head
    acc = _first_state(initial, own, tile, tile_mask, HAS_INITIAL and not LOCAL)
    total = tl.full((), 0.0, tl.float32)
    if not LOCAL:
        line = n.to(tl.int64) * heads + head
        for _ in range(0, position):
            acc = acc * tl.load(decays + line)
            acc += tl.load(local + line * (K * V) + tile, mask=tile_mask, other=0.0)
            line += sequences * heads

    for i in range(begin, end):
        chunk = count - 1 - i if REVERSE else i
        if not LOCAL:
            to = states + ((chunk0 + chunk) * heads + head) * (K * V) + tile
            tl.store(to, acc.to(states.dtype.element_ty), mask=tile_mask)
        rows = (chunk * BT + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        kt = _load_turned(k, rows, k_t, cols_k, mask, K)
        values = _load_tile(v, rows, v_t, cols_v, mask, V)
        factor = tl.zeros((BT,), tl.float32) + 1.0
        if HAS_G:
            b, last = _gate_sums(g, g_t, rows, mask)
            factor = tl.exp(b) if REVERSE else tl.exp(last - b)
            acc = acc * tl.exp(last)
            total += last
        if REVERSE:
            factor = factor * scale
        elif HAS_W:
            factor = factor * _load_scalars(w, w_t, mask, rows, 0.0)
        values = (values.to(tl.float32) * factor[:, None]).to(values.dtype)
        acc = dot(kt, values, acc, PRECISION)

    if LOCAL:
        before = position.to(tl.int64) * sequences * heads
        tl.store(local + before * (K * V) + own + tile, acc, mask=tile_mask)
        tl.store(decays + before + n * heads + head, tl.exp(total))  # the same from every tile
    elif position == segments - 1:
        tl.store(final + own + tile, acc, mask=tile_mask)


@triton.jit
def _output_kernel(
    q, k, v, g, w, states, o, cu_seqlens, chunk_offsets, seq_of_chunk,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h,
    seqlen, chunks, heads, group, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o (batch, seqlen, heads, V), contiguous."""
    chunk, head, block_v = _program(heads, (V + BV - 1) // BV)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        head_k = (head // group).to(tl.int64)
        wide_head = head.to(tl.int64)
        q += batch * q_b + start * q_t + head_k * q_h
        k += batch * k_b + start * k_t + head_k * k_h
        v += batch * v_b + start * v_t + wide_head * v_h
        o += ((batch * seqlen + start) * heads + head) * V
        states += (chunk.to(tl.int64) * heads + head) * (K * V)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        cols_v = block_v * BV + tl.arange(0, BV)
        scores = tl.zeros((BT, BT), tl.float32)
        acc = tl.zeros((BT, BV), tl.float32)
        for block_k in tl.static_range(0, (K + BK - 1) // BK):
            cols_k = block_k * BK + tl.arange(0, BK)
            queries = _load_tile(q, rows, q_t, cols_k, mask, K)
            keys = _load_tile(k, rows, k_t, cols_k, mask, K)
            scores = dot(queries, tl.trans(keys), scores, PRECISION)
            entering = _for_products(_load_tile(states, cols_k, V, cols_v, cols_k < K, V), queries.dtype)
            acc = dot(queries.to(entering.dtype), entering, acc, PRECISION)
        steps = tl.arange(0, BT)
        causal = steps[:, None] >= steps[None, :]
        if HAS_G:
            g += batch * g_b + start * g_t + wide_head * g_h
            b, _ = _gate_sums(g, g_t, rows, mask)
            acc = acc * tl.exp(b)[:, None]
            scores = scores * tl.exp(tl.where(causal, b[:, None] - b[None, :], float("-inf")))
        if HAS_W:
            w += batch * w_b + start * w_t + wide_head * w_h
            scores = scores * _load_scalars(w, w_t, mask, rows, 0.0)[None, :]
        scores = tl.where(causal, scores, 0.0)
        values = _load_tile(v, rows, v_t, cols_v, mask, V)
        acc = dot((scores * scale).to(values.dtype), values, acc * scale, PRECISION)
        _store_tile(o, acc, rows * heads, V, cols_v, mask, V)


@triton.jit
def _dv_kernel(
    q, k, v, g, w, do, dstates, dv, dw, cu_seqlens, chunk_offsets, seq_of_chunk,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h, do_b, do_t, do_h,
    seqlen, chunks, heads, group, scale, rows_in_all,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv (batch, seqlen, heads, V) and, a plane a block of v, dw (blocks, batch, seqlen, heads) float32."""
    chunk, head, block_v = _program(heads, (V + BV - 1) // BV)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        head_k = (head // group).to(tl.int64)
        wide_head = head.to(tl.int64)
        q += batch * q_b + start * q_t + head_k * q_h
        k += batch * k_b + start * k_t + head_k * k_h
        do += batch * do_b + start * do_t + wide_head * do_h
        place = (batch * seqlen + start) * heads + head
        dstates += (chunk.to(tl.int64) * heads + head) * (K * V)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        cols_v = block_v * BV + tl.arange(0, BV)
        scores = tl.zeros((BT, BT), tl.float32)  # row s, column t: the other way round than in the forward
        acc = tl.zeros((BT, BV), tl.float32)
        for block_k in tl.static_range(0, (K + BK - 1) // BK):
            cols_k = block_k * BK + tl.arange(0, BK)
            queries = _load_tile(q, rows, q_t, cols_k, mask, K)
            keys = _load_tile(k, rows, k_t, cols_k, mask, K)
            scores = dot(keys, tl.trans(queries), scores, PRECISION)
            leaving = _for_products(_load_tile(dstates, cols_k, V, cols_v, cols_k < K, V), keys.dtype)
            acc = dot(keys.to(leaving.dtype), leaving, acc, PRECISION)
        steps = tl.arange(0, BT)
        causal = steps[None, :] >= steps[:, None]
        if HAS_G:
            g += batch * g_b + start * g_t + wide_head * g_h
            b, last = _gate_sums(g, g_t, rows, mask)
            acc = acc * tl.exp(last - b)[:, None]
            scores = scores * tl.exp(tl.where(causal, b[None, :] - b[:, None], float("-inf")))
        scores = tl.where(causal, scores, 0.0) * scale
        outputs = _load_tile(do, rows, do_t, cols_v, mask, V)
        acc = dot(scores.to(outputs.dtype), outputs, acc, PRECISION)
        if HAS_W:
            v += batch * v_b + start * v_t + wide_head * v_h
            w += batch * w_b + start * w_t + wide_head * w_h
            values = _load_tile(v, rows, v_t, cols_v, mask, V).to(tl.float32)
            plane = block_v.to(tl.int64) * rows_in_all * heads
            tl.store(dw + plane + place + rows * heads, tl.sum(acc * values, 1), mask=mask)
            acc = acc * _load_scalars(w, w_t, mask, rows, 0.0)[:, None]
        _store_tile(dv + place * V, acc, rows * heads, V, cols_v, mask, V)


@triton.jit
def _dqk_kernel(
    q, k, v, g, w, do, states, dstates, dq, dk, dg, cu_seqlens, chunk_offsets, seq_of_chunk,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h, do_b, do_t, do_h,
    seqlen, chunks, heads, group, scale, rows_in_all,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, VARLEN: tl.constexpr, WANT_DG: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """dq, dk (batch, seqlen, heads, K) of every head; a plane a block of k, dg (blocks, batch, seqlen, heads).

    WHOLE: dstates are not rounded to bfloat16 for dk, but taken as two such numbers.
    """
    chunk, head, block_k = _program(heads, (K + BK - 1) // BK)
    batch, start, first, length, there = _place(
        chunk, seq_of_chunk, chunk_offsets, cu_seqlens, seqlen, chunks, VARLEN, BT
    )
    if there:
        head_k = (head // group).to(tl.int64)
        wide_head = head.to(tl.int64)
        q += batch * q_b + start * q_t + head_k * q_h
        k += batch * k_b + start * k_t + head_k * k_h
        v += batch * v_b + start * v_t + wide_head * v_h
        do += batch * do_b + start * do_t + wide_head * do_h
        place = (batch * seqlen + start) * heads + head
        own = (chunk.to(tl.int64) * heads + head) * (K * V)
        rows = (first + tl.arange(0, BT)).to(tl.int64)
        mask = rows < length
        cols_k = block_k * BK + tl.arange(0, BK)
        da = tl.zeros((BT, BT), tl.float32)  # row t, column s
        dat = tl.zeros((BT, BT), tl.float32)  # row s, column t
        grad_q = tl.zeros((BT, BK), tl.float32)
        grad_k = tl.zeros((BT, BK), tl.float32)
        across = 0.0
        for block_v in range(0, (V + BV - 1) // BV):
            cols_v = block_v * BV + tl.arange(0, BV)
            outputs = _load_tile(do, rows, do_t, cols_v, mask, V)
            values = _load_tile(v, rows, v_t, cols_v, mask, V)
            da = dot(outputs, tl.trans(values), da, PRECISION)
            dat = dot(values, tl.trans(outputs), dat, PRECISION)
            entering = _load_tile(states + own, cols_k, V, cols_v, cols_k < K, V)
            leaving = _load_tile(dstates + own, cols_k, V, cols_v, cols_k < K, V)
            if WANT_DG:
                across += tl.sum(tl.sum(entering.to(tl.float32) * leaving.to(tl.float32), 1), 0)
            entering = _for_products(entering, outputs.dtype)
            rounded = _for_products(leaving, outputs.dtype)
            grad_q = dot(outputs.to(entering.dtype), tl.trans(entering), grad_q, PRECISION)
            grad_k = dot(values.to(rounded.dtype), tl.trans(rounded), grad_k, PRECISION)
            if WHOLE and rounded.dtype != leaving.dtype:
                rest = (leaving - rounded.to(tl.float32)).to(rounded.dtype)
                grad_k = dot(values, tl.trans(rest), grad_k, PRECISION)
        steps = tl.arange(0, BT)
        causal = steps[:, None] >= steps[None, :]
        anticausal = steps[None, :] >= steps[:, None]
        queries = _load_tile(q, rows, q_t, cols_k, mask, K)
        keys = _load_tile(k, rows, k_t, cols_k, mask, K)
        grad_q = grad_q * scale
        if HAS_G:
            g += batch * g_b + start * g_t + wide_head * g_h
            b, last = _gate_sums(g, g_t, rows, mask)
            grad_q = grad_q * tl.exp(b)[:, None]
            grad_k = grad_k * tl.exp(last - b)[:, None]
            across = across * tl.exp(last)
            da = da * tl.exp(tl.where(causal, b[:, None] - b[None, :], float("-inf")))
        if HAS_W:
            w += batch * w_b + start * w_t + wide_head * w_h
            weights = _load_scalars(w, w_t, mask, rows, 0.0)
            grad_k = grad_k * weights[:, None]
            da = da * weights[None, :]
        da = tl.where(causal, da, 0.0) * scale
        to = place * K + rows[:, None] * heads * K + cols_k[None, :]
        whole = mask[:, None] & (cols_k < K)[None, :]
        if WANT_DG:
            # pairs inside the chunk once more, since da is rounded in what dq and dk have of them
            pairs = dot(queries, tl.trans(keys), None, PRECISION) * da
            inside = tl.sum(grad_q * queries.to(tl.float32), 1) + tl.sum(pairs, 1) - tl.sum(pairs, 0)
            out_of = tl.sum(grad_k * keys.to(tl.float32), 1)
            grad_g = tl.cumsum(inside, 0, reverse=True) + (tl.cumsum(out_of, 0) - out_of) + across
            plane = block_k.to(tl.int64) * rows_in_all * heads
            tl.store(dg + plane + place + rows * heads, grad_g, mask=mask)
        grad_q = dot(da.to(keys.dtype), keys, grad_q, PRECISION)
        tl.store(dq + to, grad_q.to(dq.dtype.element_ty), mask=whole)
        if HAS_G:
            dat = dat * tl.exp(tl.where(anticausal, b[None, :] - b[:, None], float("-inf")))
        if HAS_W:
            dat = dat * weights[:, None]
        dat = tl.where(anticausal, dat, 0.0) * scale
        grad_k = dot(dat.to(queries.dtype), queries, grad_k, PRECISION)
        tl.store(dk + to, grad_k.to(dk.dtype.element_ty), mask=whole)
