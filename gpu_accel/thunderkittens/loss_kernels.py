"""Cross-entropy of rows of logits in plain Triton, one program a row; any number of classes.

With z = softcap tanh(x / softcap) where there is a cap, lse = log(sum of exp z), y the target and e the smoothing,

    loss = lse - (1 - e) z_y - e mean(z) + square lse^2
    dz = softmax(z) (1 + 2 square lse) - (1 - e) [is y] - e / classes
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.thunderkittens.quick import exp


@triton.jit
def _capped(x, cap, CAP: tl.constexpr):
    """cap tanh(x / cap) without overflow."""
    if CAP:
        e = exp(-2.0 * tl.abs(x / cap))
        t = cap * (1.0 - e) / (1.0 + e)
        x = tl.where(x < 0, -t, t)
    return x


@triton.jit
def _logits(line, at, classes, cap, CAP: tl.constexpr):
    x = tl.load(line + at, mask=at < classes, other=float("-inf")).to(tl.float32)
    return tl.where(at < classes, _capped(x, cap, CAP), float("-inf")) if CAP else x


@triton.jit
def _cross_entropy_kernel(
    logits, target, loss, lse, row_stride, classes, ignore, smoothing, square, cap,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """loss (rows,) and lse (rows, 2) float32: the largest z, and log of the sum of exp(z - largest), whose sum would
    lose what is small beside 1e4. The loss of a row whose target is `ignore` is 0, and NaN
    where the target is no class. FOUR: four blocks at a time. The SIDE logits that lie side by side, which one thread
    has, of each of them have one largest value: one exponential more than there are logits, and not one for each.
    """
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    cols = tl.arange(0, BLOCK // SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    line = logits + row * row_stride
    top = tl.full((BLOCK // SIDE,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK // SIDE,), tl.float32)
    plain = tl.zeros((BLOCK // SIDE, SIDE), tl.float32)
    for at in range(0, classes, 4 * BLOCK if FOUR else BLOCK):
        x = _logits(line, at + cols, classes, cap, CAP)
        most = x
        if FOUR:
            x1 = _logits(line, at + BLOCK + cols, classes, cap, CAP)
            x2 = _logits(line, at + 2 * BLOCK + cols, classes, cap, CAP)
            x3 = _logits(line, at + 3 * BLOCK + cols, classes, cap, CAP)
            most = tl.maximum(tl.maximum(x, x1), tl.maximum(x2, x3))
        if SMOOTH:
            plain += tl.where(at + cols < classes, x, 0.0)
            if FOUR:
                plain += tl.where(at + BLOCK + cols < classes, x1, 0.0)
                plain += tl.where(at + 2 * BLOCK + cols < classes, x2, 0.0)
                plain += tl.where(at + 3 * BLOCK + cols < classes, x3, 0.0)
        higher = tl.maximum(top, tl.max(most, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        part = exp(x - shift[:, None])
        if FOUR:
            part += exp(x1 - shift[:, None]) + exp(x2 - shift[:, None]) + exp(x3 - shift[:, None])
        total = total * exp(top - shift) + tl.sum(part, 1)
        top = higher
    most = tl.max(top, 0)
    rest = tl.log(tl.sum(total * exp(top - most), 0))
    tl.store(lse + 2 * row, most)
    tl.store(lse + 2 * row + 1, rest)
    counted = y != ignore
    known = (y >= 0) & (y < classes)
    at_y = _capped(tl.load(line + y, mask=counted & known, other=0.0).to(tl.float32), cap, CAP)
    value = (1.0 - smoothing) * ((most - at_y) + rest) + square * (most + rest) * (most + rest)
    if SMOOTH:
        value += smoothing * ((most - tl.sum(tl.sum(plain, 1), 0) / classes) + rest)
    value = tl.where(known, value, float("nan"))
    tl.store(loss + row, tl.where(counted, value, 0.0))


@triton.jit
def _cross_entropy_backward_kernel(
    logits, target, lse, scale, grad, row_stride, grad_stride, classes, blocks, ignore, smoothing, square, cap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad = scale[row] * d loss / d logits, a block of a row a program; grad may be logits themselves."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < classes
    y = tl.load(target + row)
    most = tl.load(lse + 2 * row)
    rest = tl.load(lse + 2 * row + 1)
    z = _capped(tl.load(logits + row * row_stride + cols, mask=mask, other=0.0).to(tl.float32), cap, CAP)
    out = exp((z - most) - rest) * (1.0 + 2.0 * square * (most + rest)) - smoothing / classes
    known = (y >= 0) & (y < classes)
    out -= tl.where(cols == tl.where(known, y, -1).to(tl.int32), 1.0 - smoothing, 0.0)
    if CAP:
        out = out * (1.0 - (z / cap) * (z / cap))
    out = tl.where(y != ignore, out * tl.where(known, tl.load(scale + row), float("nan")), 0.0)
    tl.store(grad + row * grad_stride + cols, out.to(grad.dtype.element_ty), mask=mask)
