"""Based's attention (arXiv 2402.18668) in one walk, in plain Triton: features are made in registers, never in memory.

A program owns a sequence, a head and a block of v. With x = scale q't k_s a weight is 1 + x + x^2 / 2. Inside a chunk
that is a function of the products q k'. What lies before the chunk is in three states,

    S2 = sum of (k (x) k) v'      S1 = sum of k v'      S0 = sum of v

of D^2, D and 1 rows, D = K padded to a power of two: 256 rows for 16 dimensions. The products x_i x_j and x_j x_i are
the same number, but leaving half of them out (`features.taylor_features`) makes tiles of 153 rows, which take as much
as 256. The sums of weights that results are divided by are kept in the same way, in vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot


@triton.jit
def _based_kernel(
    q, k, v, o, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, seqlen, sequences, heads, group, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o (batch, seqlen, heads, V), contiguous. BK >= K."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    block_v = program % blocks_v
    head = program // blocks_v % heads
    n = (program // blocks_v // heads).to(tl.int64)
    head_k = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    steps = tl.arange(0, BT)
    cols_k = tl.arange(0, BK)
    cols_v = block_v * BV + tl.arange(0, BV)
    in_k = cols_k < K
    in_v = cols_v < V
    q += n * q_b + head_k * q_h
    k += n * k_b + head_k * k_h
    v += n * v_b + wide_head * v_h
    o += (n * seqlen * heads + head) * V
    half = scale * scale * 0.5
    s2 = tl.zeros((BK * BK, BV), tl.float32)
    s1 = tl.zeros((BK, BV), tl.float32)
    s0 = tl.zeros((BV,), tl.float32)
    z2 = tl.zeros((BK * BK,), tl.float32)
    z1 = tl.zeros((BK,), tl.float32)
    causal = steps[:, None] >= steps[None, :]
    for chunk in range(0, (seqlen + BT - 1) // BT):
        rows = (chunk * BT + steps).to(tl.int64)
        mask = rows < seqlen
        queries = tl.load(q + rows[:, None] * q_t + cols_k[None, :], mask=mask[:, None] & in_k[None, :], other=0.0)
        kt = tl.load(k + rows[None, :] * k_t + cols_k[:, None], mask=mask[None, :] & in_k[:, None], other=0.0)
        values = tl.load(v + rows[:, None] * v_t + cols_v[None, :], mask=mask[:, None] & in_v[None, :], other=0.0)
        x = dot(queries, kt, None, PRECISION) * scale
        x = tl.where(causal, 1.0 + x + 0.5 * x * x, 0.0)
        wide = queries.to(tl.float32)
        pairs = tl.reshape((wide[:, :, None] * wide[:, None, :]).to(values.dtype), (BT, BK * BK))
        out = dot(pairs, s2.to(values.dtype), None, PRECISION) * half
        out += dot(queries, s1.to(values.dtype), None, PRECISION) * scale + s0[None, :]
        out = dot(x.to(values.dtype), values, out, PRECISION)
        if NORM:
            total = tl.sum(x, 1) + half * tl.sum(pairs.to(tl.float32) * z2[None, :], 1)
            total += scale * tl.sum(wide * z1[None, :], 1) + chunk * BT * 1.0
            out = out / (total + 1e-6)[:, None]
        tl.store(o + rows[:, None] * heads * V + cols_v[None, :], out.to(o.dtype.element_ty),
                 mask=mask[:, None] & in_v[None, :])  # fmt: skip
        wide_t = kt.to(tl.float32)
        pairs_t = tl.reshape((wide_t[:, None, :] * wide_t[None, :, :]).to(values.dtype), (BK * BK, BT))
        s2 = dot(pairs_t, values, s2, PRECISION)
        s1 = dot(kt, values, s1, PRECISION)
        s0 += tl.sum(values.to(tl.float32), 0)
        if NORM:
            z2 += tl.sum(pairs_t.to(tl.float32), 1)
            z1 += tl.sum(wide_t, 1)
