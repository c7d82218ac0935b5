"""Short causal convolutions, one filter a channel, in plain Triton: what Mamba has before its scan.

    pre[t] = bias + sum over w of weight[w] x[t - (WIDTH - 1 - w)]        y = pre, or silu(pre)

A program has a tile of steps and channels. It loads x once a tap: the same lines again, from L1. The backward computes
pre anew for every tap that it needs, instead of writing its gradient to memory in between; the gradients of the
filters are sums over steps, a part a program, which are added up afterwards in the same order every time.

`_conv_walk_kernel` is the forward for channels that lie side by side in memory, without first states and seq_idx: a
program walks steps with the last three of x in registers, so x is read once, in wider pieces.

`_conv_walk_back_kernel` is the backward for channels that lie side by side in memory: a program walks steps with the
last three of x and of the gradient of pre in registers, so x and dy are read once and pre is made once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.thunderkittens.quick import sigmoid, silu

_SCALE = tl.constexpr(-1.4426950408889634)  # -log2(e)


@triton.jit
def _numbers(first, second):
    """A program's numbers in three dimensions, the third in int64, of `first`, `second` and as many as there are.

    Grids have one dimension: of the others none may have more than 65535 programs.
    """
    n = tl.program_id(0)
    return n % first, n // first % second, (n // first // second).to(tl.int64)


@triton.jit
def _at(x, initial, t, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """x[t] of a tile of channels in float32; before the sequence the initial states, or zeros."""
    inside = ((t >= 0) & (t < seqlen))[:, None] & in_dim
    value = tl.load(x + t.to(tl.int64)[:, None] * x_t + cols[None, :] * x_c, mask=inside, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        early = ((t < 0) & (t > -WIDTH))[:, None] & in_dim
        place = (t + (WIDTH - 1))[:, None] * i_t + cols[None, :] * i_c
        value += tl.load(initial + place, mask=early, other=0.0).to(tl.float32)
    return value


@triton.jit
def _pre(
    x, initial, weight, bias, seq, t, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, dim,
    WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((t.shape[0], cols.shape[0]), tl.float32)  # not of x: zero times infinity is no number
    for w in tl.static_range(WIDTH):
        tap = t - (WIDTH - 1 - w)
        value = _at(x, initial, tap, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, WIDTH, HAS_INITIAL)
        if HAS_SEQ:
            value = tl.where(_same(seq, t, tap, seqlen)[:, None], value, 0.0)
        acc += value * tl.load(weight + cols * WIDTH + w, mask=cols < dim, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < dim, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _same(seq, t, tap, seqlen):
    """Whether two steps belong to one sequence."""
    one = tl.load(seq + t, mask=(t >= 0) & (t < seqlen), other=-1)
    other = tl.load(seq + tap, mask=(tap >= 0) & (tap < seqlen), other=-2)
    return one == other


@triton.jit
def _conv_kernel(
    x, initial, weight, bias, seq, y, x_b, x_t, x_c, i_b, i_t, i_c, y_b, y_t, y_c, seqlen, dim,
    WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """FAR: channels lie 2^31 elements apart or more."""
    block, across, batch = _numbers(tl.cdiv(seqlen, BT), tl.cdiv(dim, BC))
    t = block * BT + tl.arange(0, BT)
    cols = across * BC + tl.arange(0, BC)
    if FAR:
        cols = cols.to(tl.int64)
    in_dim = (cols < dim)[None, :]
    acc = _pre(
        x + batch * x_b, initial + batch * i_b if HAS_INITIAL else initial, weight, bias,
        seq + batch * seqlen if HAS_SEQ else seq, t, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, dim,
        WIDTH, HAS_INITIAL, HAS_BIAS, HAS_SEQ,
    )  # fmt: skip
    if SILU:
        acc = silu(acc, x.dtype.element_ty.primitive_bitwidth < 32)
    to = y + batch * y_b + t.to(tl.int64)[:, None] * y_t + cols[None, :] * y_c
    tl.store(to, acc.to(y.dtype.element_ty), mask=(t < seqlen)[:, None] & in_dim)


@triton.jit
def _tap(weight, cols, dim, back, WIDTH: tl.constexpr):
    """The weights of what lies `back` steps before, zeros beyond the filter."""
    there = (cols < dim) & (back < WIDTH)
    return tl.load(weight + cols * WIDTH + (WIDTH - 1 - back), mask=there, other=0.0).to(tl.float32)


@triton.jit
def _row(x, t, stride, cols, there):
    return tl.load(x + t * stride + cols, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _filter(weight, bias, cols, in_dim, dim, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
            TOGETHER: tl.constexpr):  # fmt: skip
    """Taps of 0 to 3 steps before, and what is added always, each (channels,) in float32.

    SCALED: all of it times -log2(e), so that what they add up to is the exponent of 2 that a sigmoid takes.
    """
    if TOGETHER and WIDTH == 4:  # eight bytes a channel at once; beside copies ahead its layout would be the loop's
        taps = tl.load(weight + cols[:, None] * 4 + tl.arange(0, 4)[None, :], mask=in_dim[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(taps.to(tl.float32), (cols.shape[0], 2, 2)))
        w3, w1 = tl.split(even)
        w2, w0 = tl.split(odd)
    else:
        w0 = _tap(weight, cols, dim, 0, WIDTH)
        w1 = _tap(weight, cols, dim, 1, WIDTH)
        w2 = _tap(weight, cols, dim, 2, WIDTH)
        w3 = _tap(weight, cols, dim, 3, WIDTH)
    always = tl.zeros(cols.shape, tl.float32)
    if HAS_BIAS:
        always = tl.load(bias + cols, mask=in_dim, other=0.0).to(tl.float32)
    if SCALED:
        w0, w1, w2, w3, always = w0 * _SCALE, w1 * _SCALE, w2 * _SCALE, w3 * _SCALE, always * _SCALE
    return w0, w1, w2, w3, always


@triton.jit
def _taps(start, w0, w1, w2, w3, x0, x1, x2, x3, WIDTH: tl.constexpr):
    """start + w0 x0 + .. of as many taps as there are: a zero in place of others would spoil what is infinite."""
    if WIDTH > 3:
        start += w3 * x3
    if WIDTH > 2:
        start += w2 * x2
    if WIDTH > 1:
        start += w1 * x1
    return start + w0 * x0


@triton.jit
def _three_before(x, x_t, cols, in_dim, begin):
    """One, two and three steps before x's own first, which is step `begin` of its sequence; zeros before step 0."""
    x1 = _row(x, -1, x_t, cols, in_dim & (begin >= 1))
    x2 = _row(x, -2, x_t, cols, in_dim & (begin >= 2))
    x3 = _row(x, -3, x_t, cols, in_dim & (begin >= 3))
    return x1, x2, x3


@triton.jit
def _four(x, t, stride, cols, in_dim, left):
    """Steps t to t + 3, as they are stored; zeros beyond `left`."""
    x += t * stride + cols
    a0 = tl.load(x, mask=in_dim & (t < left), other=0.0)
    a1 = tl.load(x + stride, mask=in_dim & (t + 1 < left), other=0.0)
    a2 = tl.load(x + 2 * stride, mask=in_dim & (t + 2 < left), other=0.0)
    a3 = tl.load(x + 3 * stride, mask=in_dim & (t + 3 < left), other=0.0)
    return a0, a1, a2, a3


@triton.jit
def _silu(pre, SILU: tl.constexpr, SCALED: tl.constexpr):
    """silu(pre) where SILU; of _SCALE pre where SCALED, whose factor the root takes away again."""
    if SCALED:
        root = tl.rsqrt(tl.exp2(pre) * -_SCALE - _SCALE)
        pre *= -(root * root)
    elif SILU:
        pre = silu(pre, False)
    return pre


@triton.jit
def _conv_walk_kernel(
    x, weight, bias, y, x_b, x_t, y_b, y_t, seqlen, dim, steps,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, GO: tl.constexpr,
):  # fmt: skip
    """y (batch, seqlen, dim) of x with channels side by side in both, `steps` steps (a multiple of four) a program.

    STAGES: copies of the next steps are on their way to shared memory while these are multiplied.
    AHEAD: the next four of x are asked for before these are multiplied, into registers.
    """
    SCALED: tl.constexpr = SILU and x.dtype.element_ty.primitive_bitwidth < 32
    across, block, batch = _numbers(tl.cdiv(dim, BC), tl.cdiv(seqlen, steps))  # neighbours have the same steps
    cols = across * BC + tl.arange(0, BC)
    in_dim = cols < dim
    begin = block * steps
    left = tl.minimum(seqlen - begin, steps)
    x += batch * x_b + begin.to(tl.int64) * x_t  # from here on offsets are of steps of its own, in 32 bits
    y += batch * y_b + begin.to(tl.int64) * y_t
    w0, w1, w2, w3, always = _filter(weight, bias, cols, in_dim, dim, WIDTH, HAS_BIAS, SCALED, STAGES == 1)
    x1, x2, x3 = _three_before(x, x_t, cols, in_dim, begin)
    if AHEAD:
        n0, n1, n2, n3 = _four(x, 0, x_t, cols, in_dim, left)
    for t in tl.range(0, left, 4, num_stages=STAGES):
        if AHEAD:
            a0, a1, a2, a3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
            n0, n1, n2, n3 = _four(x, t + 4, x_t, cols, in_dim, left)
        else:
            n0, n1, n2, n3 = _four(x, t, x_t, cols, in_dim, left)
            a0, a1, a2, a3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        to = y + t * y_t + cols
        p0 = _taps(always, w0, w1, w2, w3, a0, x1, x2, x3, WIDTH)
        p1 = _taps(always, w0, w1, w2, w3, a1, a0, x1, x2, WIDTH)
        p2 = _taps(always, w0, w1, w2, w3, a2, a1, a0, x1, WIDTH)
        p3 = _taps(always, w0, w1, w2, w3, a3, a2, a1, a0, WIDTH)
        _put(to, _silu(p0, SILU, SCALED), in_dim, GO)
        _put(to + y_t, _silu(p1, SILU, SCALED), in_dim & (t + 1 < left), GO)
        _put(to + 2 * y_t, _silu(p2, SILU, SCALED), in_dim & (t + 2 < left), GO)
        _put(to + 3 * y_t, _silu(p3, SILU, SCALED), in_dim & (t + 3 < left), GO)
        x1, x2, x3 = a3, a2, a1


@triton.jit
def _through_silu(grad, pre, NARROW: tl.constexpr, SCALED: tl.constexpr):
    """The gradient of pre for that of silu(pre); SCALED: over _SCALE, for _SCALE pre."""
    if SCALED:
        root = tl.rsqrt(1.0 + tl.exp2(pre))
        s = root * root
        once: tl.constexpr = 1.0 / _SCALE
        twice: tl.constexpr = once * once
        out = grad * s * (pre * (s * -twice + twice) + once)
    else:
        s = sigmoid(pre, NARROW)
        out = grad * s * (1.0 + pre * (1.0 - s))
    return out


@triton.jit
def _kept(one, other, keep):
    return tl.where(keep, one, 0.0), tl.where(keep, other, 0.0)


@triton.jit
def _put(to, value, there, GO: tl.constexpr):
    tl.store(to, value.to(to.dtype.element_ty), mask=there, eviction_policy=GO)


@triton.jit
def _conv_walk_back_kernel(
    x, weight, bias, dy, dx, dweight, dbias, x_b, x_t, dy_b, dy_t, seqlen, dim, steps,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, GO: tl.constexpr,
):  # fmt: skip
    """dx (batch, seqlen, dim) contiguous, dweight (parts, dim, WIDTH) and dbias (parts, dim), of `steps` steps each.

    x and dy (batch, seqlen, dim) with channels side by side. Three steps more are walked than are a program's own:
    their gradients belong to x of its last ones.
    """
    SCALED: tl.constexpr = SILU and x.dtype.element_ty.primitive_bitwidth < 32
    blocks = tl.cdiv(seqlen, steps)
    across, block, batch = _numbers(tl.cdiv(dim, BC), blocks)
    part = batch * blocks + block
    cols = across * BC + tl.arange(0, BC)
    in_dim = cols < dim
    begin = block * steps
    own = tl.minimum(seqlen - begin, steps)
    left = seqlen - begin
    x += batch * x_b + begin.to(tl.int64) * x_t  # from here on offsets are of steps of its own, in 32 bits
    dy += batch * dy_b + begin.to(tl.int64) * dy_t
    dx += (batch * seqlen + begin) * dim
    w0, w1, w2, w3, always = _filter(weight, bias, cols, in_dim, dim, WIDTH, HAS_BIAS, SCALED, False)
    x1, x2, x3 = _three_before(x, x_t, cols, in_dim, begin)
    none = tl.zeros((BC,), tl.float32)
    g1 = tl.zeros((BC,), tl.float32)
    g2 = tl.zeros((BC,), tl.float32)
    g3 = tl.zeros((BC,), tl.float32)
    d0 = tl.zeros((BC,), tl.float32)
    d1 = tl.zeros((BC,), tl.float32)
    d2 = tl.zeros((BC,), tl.float32)
    d3 = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    if AHEAD:
        n0, n1, n2, n3 = _four(x, 0, x_t, cols, in_dim, left)
        m0, m1, m2, m3 = _four(dy, 0, dy_t, cols, in_dim, left)
    for t in tl.range(0, own + 3, 4, num_stages=STAGES):  # four steps, so that nothing is moved from x1 to x2
        if not AHEAD:
            n0, n1, n2, n3 = _four(x, t, x_t, cols, in_dim, left)
            m0, m1, m2, m3 = _four(dy, t, dy_t, cols, in_dim, left)
        a0, a1, a2, a3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        h0, h1, h2, h3 = m0.to(tl.float32), m1.to(tl.float32), m2.to(tl.float32), m3.to(tl.float32)
        if AHEAD:
            n0, n1, n2, n3 = _four(x, t + 4, x_t, cols, in_dim, left)
            m0, m1, m2, m3 = _four(dy, t + 4, dy_t, cols, in_dim, left)
        if SILU:
            h0 = _through_silu(h0, _taps(always, w0, w1, w2, w3, a0, x1, x2, x3, WIDTH), False, SCALED)
            h1 = _through_silu(h1, _taps(always, w0, w1, w2, w3, a1, a0, x1, x2, WIDTH), False, SCALED)
            h2 = _through_silu(h2, _taps(always, w0, w1, w2, w3, a2, a1, a0, x1, WIDTH), False, SCALED)
            h3 = _through_silu(h3, _taps(always, w0, w1, w2, w3, a3, a2, a1, a0, WIDTH), False, SCALED)
        to = dx + (t - 3) * dim + cols
        there = own + 3 - t  # steps that are left
        _put(to, _taps(none, w0, w1, w2, w3, g3, g2, g1, h0, WIDTH), in_dim & (t >= 3), GO)
        _put(to + dim, _taps(none, w0, w1, w2, w3, g2, g1, h0, h1, WIDTH), in_dim & (t >= 2) & (there > 1), GO)
        _put(to + 2 * dim, _taps(none, w0, w1, w2, w3, g1, h0, h1, h2, WIDTH), in_dim & (t >= 1) & (there > 2), GO)
        _put(to + 3 * dim, _taps(none, w0, w1, w2, w3, h0, h1, h2, h3, WIDTH), in_dim & (there > 3), GO)
        g1, g2, g3 = h3, h2, h1
        if t + 3 >= own:  # the others are of the next program
            h0, a0 = _kept(h0, a0, t < own)
            h1, a1 = _kept(h1, a1, t + 1 < own)
            h2, a2 = _kept(h2, a2, t + 2 < own)
            h3, a3 = _kept(h3, a3, t + 3 < own)
        d0 = d0 + h0 * a0 + h1 * a1 + h2 * a2 + h3 * a3
        d1 = d1 + h0 * x1 + h1 * a0 + h2 * a1 + h3 * a2
        d2 = d2 + h0 * x2 + h1 * x1 + h2 * a0 + h3 * a1
        d3 = d3 + h0 * x3 + h1 * x2 + h2 * x1 + h3 * a0
        if HAS_BIAS:
            total += h0 + h1 + h2 + h3
        x1, x2, x3 = a3, a2, a1
    if SCALED:
        d0, d1, d2, d3, total = d0 * _SCALE, d1 * _SCALE, d2 * _SCALE, d3 * _SCALE, total * _SCALE
    to = dweight + (part * dim + cols) * WIDTH + (WIDTH - 1)
    tl.store(to, d0, mask=in_dim)
    tl.store(to - 1, d1, mask=in_dim & (WIDTH > 1))
    tl.store(to - 2, d2, mask=in_dim & (WIDTH > 2))
    tl.store(to - 3, d3, mask=in_dim & (WIDTH > 3))
    if HAS_BIAS:
        tl.store(dbias + part * dim + cols, total, mask=in_dim)


@triton.jit
def _conv_backward_kernel(
    x, initial, weight, bias, seq, dy, dx, dinitial, dweight, dbias,
    x_b, x_t, x_c, i_b, i_t, i_c, dy_b, dy_t, dy_c, seqlen, dim,
    WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ: tl.constexpr,
    SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dx with the strides of x, dinitial (batch, dim, WIDTH - 1), dweight (parts, dim, WIDTH) and dbias (parts, dim).

    Tiles begin WIDTH - 1 steps before the sequence, where the gradients of the initial states are.
    """
    blocks = tl.cdiv(seqlen + (WIDTH - 1), BT)
    block, across, batch = _numbers(blocks, tl.cdiv(dim, BC))
    part = batch * blocks + block
    t = block * BT + tl.arange(0, BT) - (WIDTH - 1)
    cols = across * BC + tl.arange(0, BC)
    if FAR:
        cols = cols.to(tl.int64)
    in_dim = (cols < dim)[None, :]
    x += batch * x_b
    dy += batch * dy_b
    if HAS_INITIAL:
        initial += batch * i_b
    if HAS_SEQ:
        seq += batch * seqlen
    own = _at(x, initial, t, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, WIDTH, HAS_INITIAL)
    grad = tl.zeros((BT, BC), tl.float32)
    of_bias = tl.zeros((BC,), tl.float32)
    for w in tl.static_range(WIDTH):
        later = t + (WIDTH - 1 - w)  # pre[later] has x[t] at tap w
        inside = ((later >= 0) & (later < seqlen))[:, None] & in_dim
        place = later.to(tl.int64)[:, None] * dy_t + cols[None, :] * dy_c
        g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            pre = _pre(x, initial, weight, bias, seq, later, cols, in_dim, x_t, x_c, i_t, i_c, seqlen, dim, WIDTH,
                       HAS_INITIAL, HAS_BIAS, HAS_SEQ)  # fmt: skip
            g = _through_silu(g, pre, x.dtype.element_ty.primitive_bitwidth < 32, False)
        if HAS_BIAS and w == WIDTH - 1:
            of_bias = tl.sum(tl.where((t >= 0)[:, None], g, 0.0), 0)
        if HAS_SEQ:
            inside = inside & _same(seq, later, t, seqlen)[:, None]
        tap = tl.load(weight + cols * WIDTH + w, mask=cols < dim, other=0.0).to(tl.float32)[None, :]
        grad += tl.where(inside, g * tap, 0.0)
        to = dweight + (part * dim + cols) * WIDTH + w
        tl.store(to, tl.sum(tl.where(inside, g * own, 0.0), 0), mask=cols < dim)
    to = dx + batch * x_b + t.to(tl.int64)[:, None] * x_t + cols[None, :] * x_c
    tl.store(to, grad.to(dx.dtype.element_ty), mask=((t >= 0) & (t < seqlen))[:, None] & in_dim)
    if HAS_BIAS:
        tl.store(dbias + part * dim + cols, of_bias, mask=cols < dim)
    if HAS_INITIAL:
        to = dinitial + (batch * dim + cols[None, :]) * (WIDTH - 1) + (t + (WIDTH - 1))[:, None]
        tl.store(to, grad, mask=(t < 0)[:, None] & in_dim)


@triton.jit
def _update_kernel(
    x, state, weight, bias, lengths, indices, y, x_b, x_c, x_t, s_b, s_c, s_t, seqlen, dim, state_len, rows,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, CIRCULAR: tl.constexpr, INDEXED: tl.constexpr, SILU: tl.constexpr,
    BS: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """A few steps of every sequence; y (batch, dim, seqlen), contiguous. state is changed in place.

    CIRCULAR: step number n lies at n modulo state_len. Otherwise the last state_len steps, the newest at the end.
    A sequence whose row is not one of state has y of NaN.
    """
    across, _, batch = _numbers(tl.cdiv(dim, BC), 1)
    row = batch
    if INDEXED:
        row = tl.load(indices + batch).to(tl.int64)
    seen = 0
    if CIRCULAR:
        seen = tl.load(lengths + batch).to(tl.int32)
        seen = (seen % state_len + state_len) % state_len  # not negative
    x += batch * x_b
    known = (row >= 0) & (row < rows)
    state += row * s_b
    cols = across * BC + tl.arange(0, BC)
    if FAR:
        cols = cols.to(tl.int64)
    in_dim = cols < dim
    in_state = in_dim & known
    for t in range(0, seqlen):
        acc = tl.zeros((BC,), tl.float32)
        if HAS_BIAS:
            acc += tl.load(bias + cols, mask=in_dim, other=0.0).to(tl.float32)
        for w in tl.static_range(WIDTH):
            tap = t - (WIDTH - 1 - w)
            at = (seen + tap + state_len) % state_len if CIRCULAR else state_len + tap
            old = tl.load(state + cols * s_c + at * s_t, mask=in_state & (tap < 0), other=0.0).to(tl.float32)
            new = tl.load(x + cols * x_c + tap * x_t, mask=in_dim & (tap >= 0), other=0.0).to(tl.float32)
            acc += (old + new) * tl.load(weight + cols * WIDTH + w, mask=in_dim, other=0.0).to(tl.float32)
        if SILU:
            acc = silu(acc, x.dtype.element_ty.primitive_bitwidth < 32)
        acc = tl.where(known, acc, float("nan"))
        tl.store(y + (batch * dim + cols) * seqlen + t, acc.to(y.dtype.element_ty), mask=in_dim)
    slot = tl.arange(0, BS)
    mask = (slot < state_len)[:, None] & in_state[None, :]
    if CIRCULAR:
        # the newest step that belongs into this slot, if one of the new ones does
        behind = (seen + seqlen - 1 - slot + BS * state_len) % state_len  # of something positive
        time = seqlen - 1 - behind
        mask = mask & (time >= 0)[:, None]
        kept = tl.load(x + cols[None, :] * x_c + time[:, None] * x_t, mask=mask, other=0.0).to(tl.float32)
    else:
        time = seqlen - state_len + slot
        kept = tl.load(x + cols[None, :] * x_c + time[:, None] * x_t, mask=mask & (time >= 0)[:, None], other=0.0)
        place = cols[None, :] * s_c + (state_len + time)[:, None] * s_t
        kept = kept.to(tl.float32) + tl.load(state + place, mask=mask & (time < 0)[:, None], other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has read the old state
    tl.store(state + cols[None, :] * s_c + slot[:, None] * s_t, kept.to(state.dtype.element_ty), mask=mask)
