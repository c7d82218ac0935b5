"""The forward of chunked linear attention in one walk, in plain Triton: the state never leaves the registers.

`chunked_kernels` has the formulas. There a first kernel stores the state that enters every chunk and a second one reads
it, which lets all chunks run at once and costs K V / chunk values a token and head, twice: more than q, k, v and o
together when K = V = 128. Here one program walks the chunks of a sequence, head, block of v and segment, and memory
sees q, k, v and o alone. A walk is slow where there are few programs, so a long sequence with few heads is cut into
segments, whose first states `_states_kernel` with LOCAL finds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.chunked_kernels import (
    LOWEST_GATE,
    _first_state,
    _for_products,
    _sequence,
    _state_tile,
)


@triton.jit
def _fused_kernel(
    q, k, v, g, w, initial, local, decays, o, final, cu_seqlens,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, w_b, w_t, w_h,
    seqlen, sequences, heads, group, segments, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_LOCAL: tl.constexpr,
    VARLEN: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o (batch, seqlen, heads, V), contiguous, and final (sequences, heads, K, V) float32.

    BK >= K. FAR: a chunk spans 2^31 elements or more.
    """
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block_v = program % blocks_v
    rest = program // blocks_v
    head = rest % heads
    n = rest // heads % sequences
    position = rest // heads // sequences  # of the segment
    batch, start, length = _sequence(n, cu_seqlens, seqlen, VARLEN)
    count = (length + BT - 1) // BT
    each = (count + segments - 1) // segments
    begin = position * each
    end = tl.minimum(count, begin + each)

    head_k = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    steps = tl.arange(0, BT)
    far = steps.to(tl.int64) if FAR else steps
    cols_k = tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    in_k = cols_k < K
    in_v = cols_v < V
    q += batch * q_b + start * q_t + head_k * q_h
    k += batch * k_b + start * k_t + head_k * k_h
    v += batch * v_b + start * v_t + wide_head * v_h
    o += ((batch * seqlen + start) * heads + head) * V
    # places inside a chunk, the same for every chunk
    q_in = far[:, None] * q_t + cols_k[None, :]
    k_in = far[None, :] * k_t + cols_k[:, None]
    v_in = far[:, None] * v_t + cols_v[None, :]
    o_in = far[:, None] * heads * V + cols_v[None, :]
    if HAS_G:
        g += batch * g_b + start * g_t + wide_head * g_h
    if HAS_W:
        w += batch * w_b + start * w_t + wide_head * w_h

    tile, tile_mask = _state_tile(cols_k, cols_v, K, V)
    line = n.to(tl.int64) * heads + head
    own = line * (K * V)
    acc = _first_state(initial, own, tile, tile_mask, HAS_INITIAL)
    if HAS_LOCAL:
        for _ in range(0, position):
            acc = acc * tl.load(decays + line)
            acc += tl.load(local + line * (K * V) + tile, mask=tile_mask, other=0.0)
            line += sequences * heads

    causal = steps[:, None] >= steps[None, :]
    for chunk in range(begin, end):
        first = start * 0 + chunk * BT  # int64
        mask = steps < length - chunk * BT
        queries = tl.load(q + first * q_t + q_in, mask=mask[:, None] & in_k[None, :], other=0.0)
        kt = tl.load(k + first * k_t + k_in, mask=mask[None, :] & in_k[:, None], other=0.0)
        values = tl.load(v + first * v_t + v_in, mask=mask[:, None] & in_v[None, :], other=0.0)
        scores = dot(queries, kt, None, PRECISION) * scale
        entering = _for_products(acc, queries.dtype)
        out = dot(queries.to(entering.dtype), entering, None, PRECISION)
        left = values
        if HAS_G:
            gates = tl.maximum(tl.load(g + first * g_t + far * g_t, mask=mask, other=0.0).to(tl.float32), LOWEST_GATE)
            b = tl.cumsum(gates, 0)
            last = tl.sum(gates, 0)
            out = out * (tl.exp(b) * scale)[:, None]
            scores = scores * tl.exp(tl.where(causal, b[:, None] - b[None, :], float("-inf")))
            factor = tl.exp(last - b)
            acc = acc * tl.exp(last)
        else:
            out = out * scale
            scores = tl.where(causal, scores, 0.0)
        if HAS_W:
            weights = tl.load(w + first * w_t + far * w_t, mask=mask, other=0.0).to(tl.float32)
            scores = scores * weights[None, :]
            factor = factor * weights if HAS_G else weights
        if HAS_G or HAS_W:
            left = (values.to(tl.float32) * factor[:, None]).to(values.dtype)
        out = dot(scores.to(values.dtype), values, out, PRECISION)
        tl.store(o + first * heads * V + o_in, out.to(o.dtype.element_ty), mask=mask[:, None] & in_v[None, :])
        acc = dot(kt, left, acc, PRECISION)
    if position == segments - 1:
        tl.store(final + own + tile, acc, mask=tile_mask)
