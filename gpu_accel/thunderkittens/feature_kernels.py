"""Hedgehog's feature map (arXiv 2402.04347) in plain Triton: softmax of x W and of its negative, side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.thunderkittens.quick import exp


@triton.jit
def _softmax_rows(x, in_f):
    x = tl.where(in_f[None, :], x, float("-inf"))
    x = exp(x - tl.max(x, 1)[:, None])
    return x * (1.0 / tl.sum(x, 1))[:, None]


@triton.jit
def _hedgehog_kernel(
    x, mapping, out, x_b, x_t, x_h, m_h, m_k, m_f, seqlen, heads,
    K: tl.constexpr, F: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """out (batch, seqlen, heads, 2 F), contiguous. BK >= K, BF >= F. EACH: blocks of BT rows of a program."""
    program = tl.program_id(0)
    head = program % heads
    blocks = (seqlen + BT * EACH - 1) // (BT * EACH)
    block = program // heads % blocks
    batch = (program // heads // blocks).to(tl.int64)
    cols_k = tl.arange(0, BK)
    cols_f = tl.arange(0, BF)
    in_k = cols_k < K
    in_f = cols_f < F
    wide_head = head.to(tl.int64)
    x += batch * x_b + wide_head * x_h
    weights = tl.load(mapping + wide_head * m_h + cols_k[:, None] * m_k + cols_f[None, :] * m_f,
                      mask=in_k[:, None] & in_f[None, :], other=0.0)  # fmt: skip
    for part in tl.range(0, EACH, num_stages=2):
        rows = ((block * EACH + part) * BT + tl.arange(0, BT)).to(tl.int64)
        mask = rows < seqlen
        given = tl.load(x + rows[:, None] * x_t + cols_k[None, :], mask=mask[:, None] & in_k[None, :], other=0.0)
        projected = dot(given, weights, None, PRECISION)
        to = out + ((batch * seqlen + rows[:, None]) * heads + wide_head) * (2 * F) + cols_f[None, :]
        whole = mask[:, None] & in_f[None, :]
        tl.store(to, _softmax_rows(projected, in_f).to(out.dtype.element_ty), mask=whole)
        tl.store(to + F, _softmax_rows(-projected, in_f).to(out.dtype.element_ty), mask=whole)
