"""Rows in plain Triton: RMSNorm, LayerNorm (dropout and residual before them), softmax. One program a row.

A row of at most WHOLE elements stays in registers: it is read once and written once. A longer one is walked in blocks:
norms and softmax take their sums in a first walk (softmax rescales its sum when a larger value comes) and write in a
second one. Programs of long rows are so large that few run at once, and then the second walk reads from the L2 cache.
Everything is computed in float32.

Gradients of weight and bias are sums over rows. Programs of `_norm_backward_rows_kernel` take whole rows in turn and
keep their part of both in registers; those of `_norm_columns_kernel`, for longer rows, take a block of columns and a
part of the rows. The parts are added up afterwards, always in the same order. What is faster on Hopper from shared
memory is in `row_ring_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.thunderkittens.quick import exp


@triton.jit
def _keep(seed, row, cols, limit):
    """Philox-4x32-10 with counter (column, row, 0, 0); dropped below `limit`. The same bits as reference.philox."""
    low = cols.to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, zero + row.to(tl.uint32), zero, zero)
    return word >= limit.to(tl.uint32)


@triton.jit
def _summed(x, residual, row, cols, mask, x_row, r_row, seed, limit, keep_scale, RESIDUAL: tl.constexpr,
            DROPOUT: tl.constexpr, POLICY: tl.constexpr):  # fmt: skip
    """dropout(x) + residual in float32, zeros where masked. POLICY: of both in the L2 cache."""
    h = tl.load(x + row * x_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if DROPOUT:
        h = tl.where(_keep(seed, row, cols, limit), h * keep_scale, 0.0)
    if RESIDUAL:
        h += tl.load(residual + row * r_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    return h


@triton.jit
def _scaled(h, mean, rstd, weight, bias, cols, mask, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    y = (h - mean) * rstd
    if WEIGHT:
        y *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, y, summed, means, rstds, x_row, r_row, width, eps, seed, limit, keep_scale,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, KEEP_SUM: tl.constexpr, STAY: tl.constexpr, GO: tl.constexpr,
):  # fmt: skip
    """y of (rows, width), contiguous; `summed`, what was normalised, where it is not x itself.

    STAY, GO: policies in the L2 cache of what is read first and again, and read for the last time or written.
    """
    row = tl.program_id(0).to(tl.int64)
    y += row * width
    summed += row * width
    cols = tl.arange(0, BLOCK)
    mean = 0.0
    if WHOLE:
        mask = cols < width
        h = _summed(x, residual, row, cols, mask, x_row, r_row, seed, limit, keep_scale, RESIDUAL, DROPOUT, GO)
        if KEEP_SUM:
            h = h.to(summed.dtype.element_ty)
            tl.store(summed + cols, h, mask=mask)
            h = h.to(tl.float32)  # the backward sees the rounded sum, so the norm is that of it
        if CENTER:
            mean = tl.sum(h, 0) / width
        part = tl.where(mask, h - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(part * part, 0) / width + eps)
        out = _scaled(h, mean, rstd, weight, bias, cols, mask, WEIGHT, BIAS)
        tl.store(y + cols, out.to(y.dtype.element_ty), mask=mask)
    else:
        # Welford by blocks: the variance does not suffer from a large mean
        count = 0.0
        square = 0.0
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            h = _summed(x, residual, row, at + cols, mask, x_row, r_row, seed, limit, keep_scale, RESIDUAL, DROPOUT,
                        STAY)  # fmt: skip
            if KEEP_SUM:
                h = h.to(summed.dtype.element_ty)
                tl.store(summed + at + cols, h, mask=mask)
                h = h.to(tl.float32)
            if CENTER:
                fresh = tl.minimum(width - at, BLOCK).to(tl.float32)
                block_mean = tl.sum(h, 0) / fresh
                part = tl.where(mask, h - block_mean, 0.0)
                apart = block_mean - mean
                square += tl.sum(part * part, 0) + apart * apart * count * fresh / (count + fresh)
                mean += apart * fresh / (count + fresh)
                count += fresh
            else:
                square += tl.sum(h * h, 0)
        rstd = tl.rsqrt(square / width + eps)
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            h = _summed(x, residual, row, at + cols, mask, x_row, r_row, seed, limit, keep_scale, RESIDUAL, DROPOUT,
                        GO)  # fmt: skip
            if KEEP_SUM:
                h = h.to(summed.dtype.element_ty).to(tl.float32)
            out = _scaled(h, mean, rstd, weight, bias, at + cols, mask, WEIGHT, BIAS)
            tl.store(y + at + cols, out.to(y.dtype.element_ty), mask=mask, eviction_policy=GO)
    tl.store(rstds + row, rstd)
    if CENTER:
        tl.store(means + row, mean)


@triton.jit
def _norm_parts(h, dy, weight, row, cols, mask, h_row, dy_row, mean, rstd, WEIGHT: tl.constexpr,
                POLICY: tl.constexpr):  # fmt: skip
    """(normalised value, gradient of it), zeros where masked."""
    unit = tl.load(h + row * h_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    unit = (unit - mean) * rstd
    grad = tl.load(dy + row * dy_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if WEIGHT:
        grad *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, unit, 0.0), grad


@triton.jit
def _norm_write(
    unit, grad, along, level, rstd, dsum, dx, dresidual, row, cols, mask, ds_row, width, seed, limit, keep_scale,
    DSUM: tl.constexpr, RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    out = (grad - unit * along - level) * rstd
    if DSUM:
        out += tl.load(dsum + row * ds_row + cols, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        tl.store(dresidual + row * width + cols, out.to(dresidual.dtype.element_ty), mask=mask)
    if DROPOUT:
        out = tl.where(_keep(seed, row, cols, limit), out * keep_scale, 0.0)
    tl.store(dx + row * width + cols, out.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    h, dy, dsum, weight, means, rstds, dx, dresidual, h_row, dy_row, ds_row, width, seed, limit, keep_scale,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, DSUM: tl.constexpr,
    RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, STAY: tl.constexpr, GO: tl.constexpr,
):  # fmt: skip
    """dx and dresidual. h: what was normalised; dsum: the gradient of the sum that went out beside y."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    rstd = tl.load(rstds + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(means + row)
    level = 0.0
    if WHOLE:
        mask = cols < width
        unit, grad = _norm_parts(h, dy, weight, row, cols, mask, h_row, dy_row, mean, rstd, WEIGHT, GO)
        along = tl.sum(unit * grad, 0) / width
        if CENTER:
            level = tl.sum(grad, 0) / width
        _norm_write(unit, grad, along, level, rstd, dsum, dx, dresidual, row, cols, mask, ds_row, width, seed, limit,
                    keep_scale, DSUM, RESIDUAL, DROPOUT)  # fmt: skip
    else:
        along = 0.0
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            unit, grad = _norm_parts(h, dy, weight, row, at + cols, mask, h_row, dy_row, mean, rstd, WEIGHT,
                                     STAY)  # fmt: skip
            along += tl.sum(unit * grad, 0) / width
            if CENTER:
                level += tl.sum(grad, 0) / width
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            unit, grad = _norm_parts(h, dy, weight, row, at + cols, mask, h_row, dy_row, mean, rstd, WEIGHT,
                                     GO)  # fmt: skip
            _norm_write(unit, grad, along, level, rstd, dsum, dx, dresidual, row, at + cols, mask, ds_row, width,
                        seed, limit, keep_scale, DSUM, RESIDUAL, DROPOUT)  # fmt: skip


@triton.jit
def _plus(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _norm_backward_rows_kernel(
    h, dy, dsum, weight, means, rstds, dx, dresidual, dweight, dbias, h_row, dy_row, ds_row, rows, width, programs,
    seed, limit, keep_scale,
    BLOCK: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, DSUM: tl.constexpr,
    RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dx, dresidual, and partial sums (programs, width) float32 of dweight and dbias, over every programs-th row.

    TOGETHER: both sums of a row take one reduction over threads.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    zero = program.to(tl.int64) * 0
    for line in tl.range(program, rows, programs, num_stages=STAGES):
        row = zero + line
        grad = tl.load(dy + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        unit = tl.load(h + row * h_row + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        if CENTER:
            unit -= tl.load(means + row)
        unit = tl.where(mask, unit * rstd, 0.0)
        if BIAS:
            of_bias += grad
        if WEIGHT:
            of_weight += unit * grad
            grad *= tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
        level = 0.0
        if CENTER and TOGETHER:
            along, level = tl.reduce((unit * grad, grad), 0, _plus)
            along /= width
            level /= width
        else:
            along = tl.sum(unit * grad, 0) / width
            if CENTER:
                level = tl.sum(grad, 0) / width
        _norm_write(unit, grad, along, level, rstd, dsum, dx, dresidual, row, cols, mask, ds_row, width, seed, limit,
                    keep_scale, DSUM, RESIDUAL, DROPOUT)  # fmt: skip
    to = program.to(tl.int64) * width + cols
    if WEIGHT:
        tl.store(dweight + to, of_weight, mask=mask)
    if BIAS:
        tl.store(dbias + to, of_bias, mask=mask)


@triton.jit
def _add_parts(parts, out, count, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    lines = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for at in range(0, count, ROWS):
        there = (at + lines < count)[:, None] & (cols < width)[None, :]
        total += tl.load(parts + (at + lines).to(tl.int64)[:, None] * width + cols[None, :], mask=there, other=0.0)
    tl.store(out + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=cols < width)


@triton.jit
def _parts_kernel(first, out, second, other, count, width, wide, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out of `first` (count, width) float32, and where there are programs for it other of `second` (count, wide)."""
    if tl.program_id(1) == 0:
        _add_parts(first, out, count, width, ROWS, COLS)
    else:
        _add_parts(second, other, count, wide, ROWS, COLS)


@triton.jit
def _norm_columns_kernel(
    h, dy, means, rstds, dweight, dbias, h_row, dy_row, rows, width, rows_each,
    ROWS: tl.constexpr, COLS: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Partial sums (parts, width) float32 over the rows of a part; what threads have is added up at the end."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1)
    begin = part * rows_each
    end = tl.minimum(rows, begin + rows_each)
    of_weight = tl.zeros((ROWS, COLS), tl.float32)
    of_bias = tl.zeros((ROWS, COLS), tl.float32)
    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        lines = (at + tl.arange(0, ROWS)).to(tl.int64)
        there = lines < end
        mask = there[:, None] & (cols < width)[None, :]
        grad = tl.load(dy + lines[:, None] * dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHT:
            unit = tl.load(h + lines[:, None] * h_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            if CENTER:
                unit -= tl.load(means + lines, mask=there, other=0.0)[:, None]
            unit *= tl.load(rstds + lines, mask=there, other=0.0)[:, None]
            of_weight += tl.where(mask, unit * grad, 0.0)
        if BIAS:
            of_bias += grad
    to = part.to(tl.int64) * width + cols
    if WEIGHT:
        tl.store(dweight + to, tl.sum(of_weight, 0), mask=cols < width)
    if BIAS:
        tl.store(dbias + to, tl.sum(of_bias, 0), mask=cols < width)


@triton.jit
def _softmax_kernel(x, y, x_row, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of only -inf become NaN, as in torch."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    y += row * width
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        mask = cols < width
        values = tl.load(x + cols, mask=mask, other=float("-inf")).to(tl.float32)
        e = exp(values - tl.max(values, 0))
        tl.store(y + cols, (e * (1.0 / tl.sum(e, 0))).to(y.dtype.element_ty), mask=mask)
    else:
        top = float("-inf")
        total = 0.0
        for at in range(0, width, BLOCK):
            values = tl.load(x + at + cols, mask=at + cols < width, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(values, 0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
            total = total * exp(top - shift) + tl.sum(exp(values - shift), 0)
            top = higher
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            values = tl.load(x + at + cols, mask=mask, other=float("-inf")).to(tl.float32)
            tl.store(y + at + cols, (exp(values - top) * (1.0 / total)).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_kernel(y, dy, dx, y_row, dy_row, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                             STAY: tl.constexpr, GO: tl.constexpr):  # fmt: skip
    """dx = y (dy - sum of y dy)."""
    row = tl.program_id(0).to(tl.int64)
    y += row * y_row
    dy += row * dy_row
    dx += row * width
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        mask = cols < width
        p = tl.load(y + cols, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + cols, (p * (grad - tl.sum(p * grad, 0))).to(dx.dtype.element_ty), mask=mask)
    else:
        along = 0.0
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            p = tl.load(y + at + cols, mask=mask, other=0.0, eviction_policy=STAY).to(tl.float32)
            along += tl.sum(p * tl.load(dy + at + cols, mask=mask, other=0.0, eviction_policy=STAY).to(tl.float32), 0)
        for at in range(0, width, BLOCK):
            mask = at + cols < width
            p = tl.load(y + at + cols, mask=mask, other=0.0, eviction_policy=GO).to(tl.float32)
            grad = tl.load(dy + at + cols, mask=mask, other=0.0, eviction_policy=GO).to(tl.float32)
            tl.store(dx + at + cols, (p * (grad - along)).to(dx.dtype.element_ty), mask=mask, eviction_policy=GO)
