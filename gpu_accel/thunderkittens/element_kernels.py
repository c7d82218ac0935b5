"""Rotary embedding and gated activations in plain Triton: one read, one write, nothing in between."""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.flash_attention3.rotary import load_rotated
from gpu_accel.thunderkittens.quick import exp, sigmoid


@triton.jit
def _rotary_kernel(
    x, y, cos, sin, offsets, x_b, x_t, x_h, seqlen, heads, longest, start, blocks,
    DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BACKWARD: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """ROWS (token, head) pairs of one sequence of x (batch, seqlen, heads, DIM), turned at start + token.

    `blocks` programs a sequence, one after the other: of a grid's other dimensions none may have more than 65535.
    The backward of a rotation is the rotation by the opposite angle. offsets: (batch,) starts that differ.
    """
    program = tl.program_id(0)
    batch = (program // blocks).to(tl.int64)
    pairs = (program % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = pairs // heads
    head = pairs - token * heads
    there = token < seqlen
    position = token + start
    if OFFSETS:
        position += tl.load(offsets + batch)
        position = tl.where(position < 0, longest, position)  # as beyond the tables: not turned
    cols = tl.arange(0, BLOCK)
    rows = x + batch * x_b + token * x_t + head * x_h
    if INTERLEAVED:
        out = _turned_pairs(rows, there, position, cos, sin, longest, DIM, ROTARY, BLOCK, BACKWARD)
    elif BACKWARD:
        out = _turned_back(rows, cols, there, position, cos, sin, longest, DIM, ROTARY)
    else:
        out = load_rotated(rows, cols, there, position, cos, sin, longest, DIM, ROTARY, INTERLEAVED, True)
    to = y + (batch * seqlen * heads + pairs)[:, None] * DIM + cols[None, :]
    tl.store(to, out, mask=there[:, None] & (cols < DIM)[None, :])


@triton.jit
def _rotary_halves_kernel(
    x, y, cos, sin, x_b, x_t, x_h, seqlen, heads, pairs, start,
    DIM: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr, BACKWARD: tl.constexpr, ONCE: tl.constexpr,
    GO: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """As `_rotary_kernel`, of heads that turn as a whole, in halves, at the same positions in every sequence, all of
    them in the tables.

    TOKENS tokens of EACH of the `pairs` (sequence, head): their angles are loaded once for all, and x once, since each
    half is a tile of its own. One at a time the tables would be as many bytes as x and y, from the L2 cache.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    if FLAT:
        block, group = block % tl.cdiv(seqlen, TOKENS), block // tl.cdiv(seqlen, TOKENS)
    pair = group * EACH + tl.arange(0, EACH)
    token = block * TOKENS + tl.arange(0, TOKENS)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)  # heads may lie far apart
    cols = tl.arange(0, DIM // 2)
    there = (pair < pairs)[:, None, None] & (token < seqlen)[None, :, None]
    at = (batch * x_b + head * x_h)[:, None, None] + (token.to(tl.int64) * x_t)[None, :, None] + cols[None, None, :]
    first = tl.load(x + at, mask=there, other=0.0, eviction_policy=ONCE)
    second = tl.load(x + at + DIM // 2, mask=there, other=0.0, eviction_policy=ONCE)
    places = (token + start).to(tl.int64)[:, None] * (DIM // 2) + cols[None, :]
    c = tl.load(cos + places, mask=(token < seqlen)[:, None], other=1.0).to(tl.float32)[None, :, :]
    s = tl.load(sin + places, mask=(token < seqlen)[:, None], other=0.0).to(tl.float32)[None, :, :]
    if BACKWARD:
        s = -s
    a, b = first.to(tl.float32), second.to(tl.float32)
    to = (batch * seqlen * heads + head)[:, None, None] + (token.to(tl.int64) * heads)[None, :, None]
    to = y + to * DIM + cols[None, None, :]
    tl.store(to, (a * c - b * s).to(first.dtype), mask=there, eviction_policy=GO)
    tl.store(to + DIM // 2, (b * c + a * s).to(first.dtype), mask=there, eviction_policy=GO)


@triton.jit
def _turned_pairs(
    rows, there, positions, cos, sin, longest, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Neighbours turned: both of a pair are in one thread, so that every element is loaded once, and in one piece."""
    cols = tl.arange(0, BLOCK)
    pairs = tl.arange(0, BLOCK // 2)
    x = tl.load(rows[:, None] + cols[None, :], mask=there[:, None] & (cols < DIM)[None, :], other=0.0)
    first, second = tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], BLOCK // 2, 2)))
    turns = (there & (positions < longest))[:, None] & (pairs < ROTARY // 2)[None, :]
    places = positions.to(tl.int64)[:, None] * (ROTARY // 2) + pairs[None, :]
    c = tl.load(cos + places, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + places, mask=turns, other=0.0).to(tl.float32)
    if BACKWARD:
        s = -s
    # what does not turn is kept, not multiplied: an infinite number would make its neighbour NaN
    turned = tl.join(
        tl.where(turns, first * c - second * s, first), tl.where(turns, second * c + first * s, second)
    )
    return tl.reshape(turned, (x.shape[0], BLOCK)).to(x.dtype)


@triton.jit
def _turned_back(rows, cols, there, positions, cos, sin, longest, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Halves turned by the opposite angles."""
    mask = there[:, None] & (cols < DIM)[None, :]
    x = tl.load(rows[:, None] + cols[None, :], mask=mask, other=0.0)
    first = cols < ROTARY // 2
    angle = tl.where(first, cols, cols - ROTARY // 2)
    partner = tl.where(first, cols + ROTARY // 2, cols - ROTARY // 2)
    turns = there[:, None] & (cols < ROTARY)[None, :]
    other = tl.load(rows[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    turns = turns & (positions < longest)[:, None]
    places = positions.to(tl.int64)[:, None] * (ROTARY // 2) + angle[None, :]
    c = tl.load(cos + places, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + places, mask=turns, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * c + tl.where(first[None, :], s, -s) * other).to(x.dtype)


@triton.jit
def _activation(a, KIND: tl.constexpr, NARROW: tl.constexpr):
    """(f(a), f'(a)) of silu, gelu with erf, gelu with tanh."""
    if KIND == "silu":
        s = sigmoid(a, NARROW)
        value = a * s
        slope = s * (1.0 + a * (1.0 - s))
    elif KIND == "gelu":
        half = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
        value = a * half
        slope = half + a * 0.3989422804014327 * exp(-0.5 * a * a)
    else:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        s = sigmoid(1.5957691216057308 * a * (1.0 + 0.044715 * a * a), NARROW)
        value = a * s
        # where the square of a would be infinite, 1 - s or the value is zero
        slope = s + value * (1.0 - s) * 1.5957691216057308 * (1.0 + tl.minimum(0.134145 * a * a, 1e9))
    return value, slope


@triton.jit
def _gated_kernel(a, b, y, a_row, b_row, width, blocks, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """y = f(a) b, a block of one row a program."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(a + row * a_row + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(b + row * b_row + cols, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activation(gate, KIND, y.dtype.element_ty.primitive_bitwidth < 32)
    tl.store(y + row * width + cols, (value * up).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy, a, b, da, db, dy_row, a_row, b_row, width, blocks, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    grad = tl.load(dy + row * dy_row + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(a + row * a_row + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(b + row * b_row + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activation(gate, KIND, da.dtype.element_ty.primitive_bitwidth < 32)
    tl.store(da + row * width + cols, (grad * up * slope).to(da.dtype.element_ty), mask=mask)
    tl.store(db + row * width + cols, (grad * value).to(db.dtype.element_ty), mask=mask)
