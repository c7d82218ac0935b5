"""Gates of linear attention, summed up inside every chunk and laid out for TMA, and retention's, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.thunderkittens.chunked_kernels import LOWEST_GATE


@triton.jit
def _gates_kernel(
    g, w, sums, weights, g_b, g_t, g_h, w_b, w_t, w_h, seqlen, chunks, heads, rates, low, high,
    BT: tl.constexpr, BH: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr, HAS_RATES: tl.constexpr,
):  # fmt: skip
    """sums, weights (batch, heads, chunks * BT) float32 of g, w (batch, seqlen, heads).

    sums: of g / ln 2 from the beginning of the chunk; weights: w, zeros beyond the sequence.
    HAS_RATES: w is kept between low and high, and g is w * rates (heads,) float32.
    """
    blocks = (heads + BH - 1) // BH
    program = tl.program_id(0)
    block = program % blocks
    chunk = program // blocks % chunks
    batch = (program // blocks // chunks).to(tl.int64)
    rows = (chunk * BT + tl.arange(0, BT)).to(tl.int64)
    cols = (block * BH + tl.arange(0, BH)).to(tl.int64)
    mask = (rows < seqlen)[:, None] & (cols < heads)[None, :]
    to = (batch * heads + cols[None, :]) * (chunks * BT) + rows[:, None]
    inside = (rows < chunks * BT)[:, None] & (cols < heads)[None, :]
    if HAS_W:
        at = w + batch * w_b + rows[:, None] * w_t + cols[None, :] * w_h
        own = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if HAS_RATES:  # comparisons that leave NaN as it is
            own = tl.where(mask & (own < low), low, own)
            own = tl.where(mask & (own > high), high, own)
        tl.store(weights + to, own, mask=inside)
    if HAS_G:
        if HAS_RATES:
            gates = own * tl.load(rates + cols, mask=cols < heads, other=0.0)[None, :]
        else:
            at = g + batch * g_b + rows[:, None] * g_t + cols[None, :] * g_h
            gates = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        added = tl.cumsum(tl.maximum(gates, LOWEST_GATE) * 1.4426950408889634, 0)
        tl.store(sums + to, added, mask=inside)


@triton.jit
def _retention_kernel(out, heads, BLOCK: tl.constexpr):
    """log(1 - 2^(-5 - head)) float32: -(x + x^2 / 2 + ... + x^12 / 12) of x = 2^(-5 - head) in float64.

    What is left out is below x^12 / 13 of it, 2^-63; libraries' log1p is not there in Triton's interpreter.
    """
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exponent = tl.maximum(1018 - head, 0).to(tl.int64)  # of float64, with its bias
    x = (exponent << 52).to(tl.float64, bitcast=True)
    total = x * 0.0
    for n in tl.static_range(12, 0, -1):
        total = x * (1.0 / n + total)
    tl.store(out + head, (-total).to(tl.float32), mask=head < heads)
