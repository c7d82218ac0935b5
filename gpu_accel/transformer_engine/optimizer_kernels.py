"""One step of AdamW or Lion on a flat parameter, its states in eight bits: everything read once and written once.

    m    e4m3 with a float32 scale per block of 256
    v    its square root, likewise: a block may then span 2**36 instead of 2**18 before small values vanish, and a
         vanished one would make the step m / eps

States are rounded stochastically. To nearest they would stand still: v changes by a thousandth a step, and numbers of
e4m3 lie 6 to 12 % apart. On average nothing is lost so.

A program does ROWS blocks. Per value of a bf16 parameter: 2 + 2 + 1 + 1 bytes read and 2 + 1 + 1 written, where AdamW
with float32 states moves 22. Parameters in bfloat16 are rounded stochastically if asked (`STOCHASTIC`): an update below
half a step is then kept on average, and not lost every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import widen
from gpu_accel.transformer_engine.codec import bits_of, encode, number_of, random_words, scale_and_inverse

BLOCK = 256


@triton.jit
def _widen(codes):
    """e4m3 codes as float32."""
    return widen(codes.to(tl.float8e4nv, bitcast=True), tl.float32)


@triton.jit
def _narrow(
    x, codes, scales, offsets, rows, mask, row_mask, first, seed, STREAM: tl.constexpr, ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Write x (ROWS, 256) as e4m3 with a scale per row, rounded stochastically."""
    size = bits_of(x) & 0x7FFFFFFF
    size = tl.where(size < 0x7F800000, size, 0)
    stored, inverse = scale_and_inverse(tl.max(size, 1), 1.0, 0, 448.0, 0, 0)
    tl.store(scales + rows, stored, mask=row_mask)
    words = random_words(first, 0, 256, seed, STREAM, ROWS, 256)
    tl.store(codes + offsets, encode(x * inverse[:, None], words, 0, True, NATIVE), mask=mask)


@triton.jit
def _round_bf16(x, words, STOCHASTIC: tl.constexpr):
    """bfloat16 nearest to x, or below or above it, the nearer the likelier. NaN and Inf stay.

    By integers, to nearest too: the interpreter (seen on 3.7.1) cuts off where it should round."""
    bits = bits_of(x)
    if STOCHASTIC:
        moved = number_of((bits + (words & 0xFFFF).to(tl.int32)) & -65536)
    else:
        moved = number_of((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)
    return tl.where(tl.abs(x) < float("inf"), moved, x).to(tl.bfloat16)


@triton.jit(do_not_specialize=["seed"])
def _step_kernel(
    p, g, m_codes, m_scales, v_codes, v_scales, n, seed, lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay,
    step_size, inverse_sqrt_bias,
    ROWS: tl.constexpr, LION: tl.constexpr, STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """decay: 1 - lr * weight_decay. step_size: lr / (1 - beta1**t). inverse_sqrt_bias: 1 / sqrt(1 - beta2**t)."""
    WIDTH: tl.constexpr = 256
    first = tl.program_id(0).to(tl.int64) * ROWS
    rows = first + tl.arange(0, ROWS)
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = offsets < n
    row_mask = rows * WIDTH < n
    value = tl.load(p + offsets, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(m_scales + rows, mask=row_mask, other=1.0)
    m = _widen(tl.load(m_codes + offsets, mask=mask, other=0)) * scale[:, None]
    value = value * decay
    if LION:
        blend = m * beta1 + grad * one_minus_beta1
        sign = tl.where(blend > 0, 1.0, tl.where(blend < 0, -1.0, blend))  # NaN stays
        value = value - lr * sign
        m = m * beta2 + grad * one_minus_beta2
    else:
        m = m * beta1 + grad * one_minus_beta1
        scale_v = tl.load(v_scales + rows, mask=row_mask, other=1.0)
        root = _widen(tl.load(v_codes + offsets, mask=mask, other=0)) * scale_v[:, None]
        root = tl.sqrt_rn(root * root * beta2 + grad * grad * one_minus_beta2)
        value = value - step_size * tl.div_rn(m, root * inverse_sqrt_bias + eps)
        _narrow(root, v_codes, v_scales, offsets, rows, mask, row_mask, first, seed, 2, ROWS, NATIVE)
    _narrow(m, m_codes, m_scales, offsets, rows, mask, row_mask, first, seed, 1, ROWS, NATIVE)
    if STOCHASTIC:
        words = random_words(first, 0, WIDTH, seed, 0, ROWS, WIDTH)
        tl.store(p + offsets, _round_bf16(value, words, True), mask=mask)
    elif p.dtype.element_ty == tl.bfloat16:
        tl.store(p + offsets, _round_bf16(value, 0, False), mask=mask)
    else:
        tl.store(p + offsets, value.to(p.dtype.element_ty), mask=mask)
