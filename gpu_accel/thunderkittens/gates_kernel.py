"""Gates of linear attention, summed up inside every chunk and laid out for TMA, and retention's, in plain Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.thunderkittens.chunked_kernels import LOWEST_GATE


@triton.jit
def _gates_kernel(
    g, w, sums, weights, g_b, g_t, g_h, w_b, w_t, w_h, seqlen, chunks, heads,
    BT: tl.constexpr, BH: tl.constexpr, HAS_G: tl.constexpr, HAS_W: tl.constexpr,
):  # fmt: skip
    """sums, weights (batch, heads, chunks * BT) float32 of g, w (batch, seqlen, heads).

    sums: of g / ln 2 from the beginning of the chunk; weights: w, zeros beyond the sequence.
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
    if HAS_G:
        at = g + batch * g_b + rows[:, None] * g_t + cols[None, :] * g_h
        gates = tl.maximum(tl.load(at, mask=mask, other=0.0).to(tl.float32), LOWEST_GATE)
        tl.store(sums + to, tl.cumsum(gates * 1.4426950408889634, 0), mask=inside)
    if HAS_W:
        at = w + batch * w_b + rows[:, None] * w_t + cols[None, :] * w_h
        tl.store(weights + to, tl.load(at, mask=mask, other=0.0).to(tl.float32), mask=inside)


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
