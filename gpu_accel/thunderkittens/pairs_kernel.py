"""Gradients of gates and weights from walks backwards (`walk_back`), a chunk and some heads a program, plain Triton.

What step s passes to step t inside the chunk, for all pairs s <= t: m_ts = scale exp(b_t - b_s) (q_t' k_s) (do_t' v_s).

    dw_s = out_s + sum_t m_ts
    dg_t = across + sum_{s<t} w_s out_s + sum_{u>=t} (into_u + sum_s w_s m_us - w_u sum_r m_ru)

with across what the whole chunk passes by, out_s what s passes to later chunks and into_u what u got from earlier ones.
Sums over rows and over columns of one matrix cancel where they should; q' dq and k' dk, rounded on their own, do not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.chunked_kernels import _load_tile


@triton.jit
def _parts(x, at, between, tiles, SIZE: tl.constexpr):
    """SIZE numbers from x + at on, added up over `tiles` planes."""
    total = tl.zeros((SIZE,), tl.float32)
    for _ in range(0, tiles):
        total += tl.load(x + at + tl.arange(0, SIZE))
        at += between
    return total


@triton.jit
def _pairs_kernel(
    q, k, v, do, sums, weights, into, out_of, across, dg, dw,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
    seqlen, chunks, heads, group, tiles, scale,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    BA: tl.constexpr, HAS_W: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dg, dw (batch, seqlen, heads) float32.

    sums, weights (batch, heads, chunks * BT) of `gates_kernel`; into, out_of (tiles, batch, heads, chunks, BT) and
    across (tiles, batch, heads, chunks, BA) float32, in parts. BH: heads of a group that a program takes.
    """
    blocks = (group + BH - 1) // BH
    program = tl.program_id(0)
    block = program % blocks
    head_q = program // blocks % (heads // group)
    rest = program // blocks // (heads // group)
    chunk = rest % chunks
    batch = (rest // chunks).to(tl.int64)
    steps = tl.arange(0, BT)
    rows = (chunk * BT + steps).to(tl.int64)
    mask = rows < seqlen
    cols_k, cols_v = tl.arange(0, BK), tl.arange(0, BV)
    q += batch * q_b + head_q.to(tl.int64) * q_h
    k += batch * k_b + head_q.to(tl.int64) * k_h
    queries = _load_tile(q, rows, q_t, cols_k, mask, K)
    keys = _load_tile(k, rows, k_t, cols_k, mask, K)
    alike = dot(queries, tl.trans(keys), tl.zeros((BT, BT), tl.float32), PRECISION) * scale
    causal = steps[:, None] >= steps[None, :]
    alike = tl.where(causal, alike, 0.0)
    numbers = (tl.num_programs(0) // (blocks * (heads // group) * chunks)).to(tl.int64) * heads
    for head in range(head_q * group + block * BH, tl.minimum(head_q * group + block * BH + BH, (head_q + 1) * group)):
        wide_head = tl.full((), 0, tl.int64) + head
        number = batch * heads + wide_head
        outputs = _load_tile(do + batch * do_b + wide_head * do_h, rows, do_t, cols_v, mask, V)
        values = _load_tile(v + batch * v_b + wide_head * v_h, rows, v_t, cols_v, mask, V)
        pairs = dot(outputs, tl.trans(values), tl.zeros((BT, BT), tl.float32), PRECISION) * alike
        line = (number * chunks + chunk) * BT
        b = tl.load(sums + line + steps)
        pairs = pairs * tl.exp2(tl.where(causal, b[:, None] - b[None, :], float("-inf")))
        passed = tl.sum(pairs, 0)
        out = _parts(out_of, line, numbers * chunks * BT, tiles, BT)
        to = (batch * seqlen + rows) * heads + head
        if HAS_W:
            tl.store(dw + to, passed + out, mask=mask)
            own = tl.load(weights + line + steps)
            passed = passed * own
            out = out * own
            pairs = pairs * own[None, :]
        inside = _parts(into, line, numbers * chunks * BT, tiles, BT) + tl.sum(pairs, 1) - passed
        by = tl.sum(_parts(across, (number * chunks + chunk) * BA, numbers * chunks * BA, tiles, BA), 0)
        grad = tl.cumsum(inside, 0, reverse=True) + (tl.cumsum(out, 0) - out) + by
        tl.store(dg + to, grad, mask=mask)


@triton.jit
def _gate_sums_kernel(
    sums_of_pairs, got, out_of, weights, into, across, dg, dw, seqlen, chunks, heads, tiles,
    raw, rates, low, high, raw_b, raw_t, raw_h,
    BT: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, HAS_W: tl.constexpr, PARTS: tl.constexpr,
    HAS_RATES: tl.constexpr,
):  # fmt: skip
    """The same dg and dw where `both_kernel` has summed up the pairs: BH heads of a chunk a program.

    sums_of_pairs (what a step passes on), out_of (batch, heads, chunks, PARTS, BT) and got (.., 4, BT), the rest as
    above. HAS_RATES: weights are of raw (batch, seqlen, heads), between low and high, and gates weights * rates
    (heads,): dw is the gradient of raw, by both, and dg (batch, chunks, heads) that of rates.
    """
    blocks = (heads + BH - 1) // BH
    program = tl.program_id(0)
    head = program % blocks * BH + tl.arange(0, BH)
    chunk = program // blocks % chunks
    batch = (program // blocks // chunks).to(tl.int64)
    steps = tl.arange(0, BT)
    there = (head < heads)[:, None] & (steps < BT)[None, :]
    number = batch * heads + head
    line = (number[:, None] * chunks + chunk) * BT + steps[None, :]
    planes = (tl.num_programs(0) // blocks // chunks).to(tl.int64) * heads * chunks
    parts = (line - steps[None, :]) * PARTS + steps[None, :]
    passed = tl.load(sums_of_pairs + parts, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        passed += tl.load(sums_of_pairs + parts + part * BT, mask=there, other=0.0)
    inside = tl.zeros((BH, BT), tl.float32)
    for part in tl.static_range(4):
        inside += tl.load(got + (line - steps[None, :]) * 4 + part * BT + steps[None, :], mask=there, other=0.0)
    out = tl.load(out_of + parts, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        out += tl.load(out_of + parts + part * BT, mask=there, other=0.0)
    by = tl.zeros((BH,), tl.float32)
    at = (number[:, None] * chunks + chunk) * BA + tl.arange(0, BA)[None, :]
    here = (head < heads)[:, None] & (tl.arange(0, BA) < BA)[None, :]
    for _ in range(0, tiles):
        inside += tl.load(into + line, mask=there, other=0.0)
        by += tl.sum(tl.load(across + at, mask=here, other=0.0), 1)
        into += planes * BT
        across += planes * BA
    rows = chunk * BT + steps
    to = (batch * seqlen + rows)[None, :] * heads + head[:, None]
    mask = there & (rows < seqlen)[None, :]
    of_weights = passed + out
    if HAS_W:
        own = tl.load(weights + (number[:, None] * chunks + chunk) * BT + steps[None, :], mask=there, other=0.0)
        passed = passed * own
        out = out * own
    grad = tl.cumsum(inside - passed, 1, reverse=True) + (tl.cumsum(out, 1) - out) + by[:, None]
    if HAS_RATES:
        rate = tl.load(rates + head, mask=head < heads, other=0.0)
        at = raw + batch * raw_b + rows.to(tl.int64)[None, :] * raw_t + head.to(tl.int64)[:, None] * raw_h
        given = tl.load(at, mask=mask, other=0.0)
        of_both = of_weights + grad * rate[:, None]
        tl.store(dw + to, tl.where((given >= low) & (given <= high), of_both, 0.0), mask=mask)
        at = (batch * chunks + chunk) * heads + head
        tl.store(dg + at, tl.sum(tl.where(mask, grad * own, 0.0), 1), mask=head < heads)
    else:
        if HAS_W:
            tl.store(dw + to, of_weights, mask=mask)
        tl.store(dg + to, grad, mask=mask)
