"""Convolution by a Fourier transform made of matrix products, in plain Triton: two sequences of a channel at a time.

A transform of N = A B numbers, n = B i + j and frequency f = p + A r, is (Cooley and Tukey; on tensor cores
arXiv 2311.05908):

    Y[p, r] = sum over j of (W[p, j] * sum over i of F_A[p, i] X[i, j]) F_B[j, r]

with F_N[a, b] = exp(-2 pi i a b / N) and W[p, j] = exp(-2 pi i p j / N). All three are symmetric or elementwise, so the
way back is the same with conjugates and in reverse. Frequencies stay in the order [p, r]: filters are stored so too.

Two real sequences x, z with one real filter are one complex sequence x + i z: the real and the imaginary part of the
result are theirs. Nothing goes to memory between the transforms. A complex product of matrices is four real ones:
Triton has no complex tensor core.

    _half_fft_conv_kernel   bfloat16: products of float16, numbers scaled to fit
    _fft_conv_kernel        float16 and float32: every product is three of tf32
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot


@triton.jit
def _times(ar, ai, br, bi, PRECISION: tl.constexpr):
    """(a b) of complex matrices."""
    re = dot(ar, br, None, PRECISION) - dot(ai, bi, None, PRECISION)
    im = dot(ai, br, dot(ar, bi, None, PRECISION), PRECISION)
    return re, im


@triton.jit
def _pair(x, gate, first, second, channel, x_b, x_c, g_b, g_c, place, inside, has_second, GATED: tl.constexpr):
    """Two sequences of a channel as (real, imaginary) of one, times their gates; zeros beyond their length."""
    re = tl.load(x + first * x_b + channel * x_c + place, mask=inside, other=0.0).to(tl.float32)
    im = tl.load(x + second * x_b + channel * x_c + place, mask=inside & has_second, other=0.0).to(tl.float32)
    if GATED:
        re *= tl.load(gate + first * g_b + channel * g_c + place, mask=inside, other=0.0).to(tl.float32)
        im *= tl.load(gate + second * g_b + channel * g_c + place, mask=inside & has_second, other=0.0).to(tl.float32)
    return re, im


@triton.jit
def _fft_conv_kernel(
    x, filters, pre, post, y, tables, x_b, x_c, pre_b, pre_c, post_b, post_c, seqlen, batch, channels,
    A: tl.constexpr, B: tl.constexpr, CONJUGATE: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y (batch, channels, seqlen) = post * (x pre convolved with the filter), of circular length A B.

    filters: (2, channels, A, B) float32, real and imaginary parts of the transform, over A B. tables: F_A (2, A, A),
    F_B (2, B, B) and W (2, A, B), one after the other. CONJUGATE: correlation, which the backward needs.
    """
    channel = (tl.program_id(0) % channels).to(tl.int64)
    first = (tl.program_id(0) // channels).to(tl.int64) * 2
    second = first + 1
    has_second = second < batch
    i = tl.arange(0, A)
    j = tl.arange(0, B)
    place = i[:, None] * B + j[None, :]
    inside = place < seqlen
    at_a = i[:, None] * A + i[None, :]
    at_b = j[:, None] * B + j[None, :]
    far, fai = tl.load(tables + at_a), tl.load(tables + A * A + at_a)
    tables += 2 * A * A
    fbr, fbi = tl.load(tables + at_b), tl.load(tables + B * B + at_b)
    tables += 2 * B * B
    wr, wi = tl.load(tables + place), tl.load(tables + A * B + place)

    re, im = _pair(x, pre, first, second, channel, x_b, x_c, pre_b, pre_c, place, inside, has_second, PRE)
    re, im = _times(far, fai, re, im, PRECISION)
    re, im = re * wr - im * wi, re * wi + im * wr
    re, im = _times(re, im, fbr, fbi, PRECISION)
    spectrum = filters + channel * (A * B) + place
    kr = tl.load(spectrum)
    ki = tl.load(spectrum + channels.to(tl.int64) * (A * B))
    if CONJUGATE:
        ki = -ki
    re, im = re * kr - im * ki, re * ki + im * kr
    re, im = _times(re, im, fbr, -fbi, PRECISION)
    re, im = re * wr + im * wi, im * wr - re * wi
    re, im = _times(far, -fai, re, im, PRECISION)
    if POST:
        gr, gi = _pair(post, post, first, second, channel, post_b, post_c, post_b, post_c, place, inside, has_second,
                       False)  # fmt: skip
        re *= gr
        im *= gi
    to = y + (first * channels + channel) * seqlen + place
    tl.store(to, re.to(y.dtype.element_ty), mask=inside)
    to = y + (second * channels + channel) * seqlen + place
    tl.store(to, im.to(y.dtype.element_ty), mask=inside & has_second)


@triton.jit
def _half(re, im):
    """(re, im) in float16 over their largest magnitude, and that.

    A transform by F makes at most 64 sqrt(2) of numbers up to 1, and W keeps magnitudes: float16 holds them.
    """
    top = tl.max(tl.maximum(tl.max(tl.abs(re), 1), tl.max(tl.abs(im), 1)), 0)
    top = tl.maximum(top, 1e-30)  # of zeros
    scale = 1.0 / top
    return (re * scale).to(tl.float16), (im * scale).to(tl.float16), top


@triton.jit
def _left(fr, fi, minus_fi, re, im):
    """F (re + i im) of float16, sums in float32."""
    return dot(minus_fi, im, dot(fr, re, None, "ieee"), "ieee"), dot(fi, re, dot(fr, im, None, "ieee"), "ieee")


@triton.jit
def _right(re, im, fr, fi, minus_fi):
    """(re + i im) F of float16, sums in float32."""
    return dot(im, minus_fi, dot(re, fr, None, "ieee"), "ieee"), dot(im, fr, dot(re, fi, None, "ieee"), "ieee")


@triton.jit
def _three(at, count: tl.constexpr):
    """The real part, the imaginary one, and the imaginary one's negative of a table."""
    return tl.load(at), tl.load(at + count), tl.load(at + 2 * count)


@triton.jit
def _half_fft_conv_kernel(
    x, filters, pre, post, y, tables, halves, x_b, x_c, pre_b, pre_c, post_b, post_c, seqlen, batch, channels, pairs,
    A: tl.constexpr, B: tl.constexpr, CONJUGATE: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """As `_fft_conv_kernel`, with products of float16; one program has up to `pairs` pairs of sequences of a channel.

    halves: F_A (3, A, A) and F_B (3, B, B) float16. Before the first product of each way numbers are divided by their
    largest magnitude. float16 has the 11 bits of tf32, half its bytes, and transposes in shared memory on the way.
    """
    channel = (tl.program_id(0) % channels).to(tl.int64)
    begin = tl.program_id(0) // channels * pairs
    zero = begin.to(tl.int64) * 0
    i = tl.arange(0, A)
    j = tl.arange(0, B)
    place = i[:, None] * B + j[None, :]
    inside = place < seqlen
    fa, fai, minus_fai = _three(halves + i[:, None] * A + i[None, :], A * A)
    if A == B:
        fb, fbi, minus_fbi = fa, fai, minus_fai
    else:
        fb, fbi, minus_fbi = _three(halves + 3 * A * A + j[:, None] * B + j[None, :], B * B)
    twiddle = tables + 2 * A * A + 2 * B * B + place
    spectrum = filters + channel * (A * B) + place
    for pair in range(begin, tl.minimum(begin + pairs, (batch + 1) // 2)):
        first = zero + pair * 2
        second = first + 1
        has_second = second < batch
        re, im = _pair(x, pre, first, second, channel, x_b, x_c, pre_b, pre_c, place, inside, has_second, PRE)
        re, im, top = _half(re, im)
        re, im = _left(fa, fai, minus_fai, re, im)
        wr, wi = tl.load(twiddle), tl.load(twiddle + A * B)
        re, im = re * wr - im * wi, re * wi + im * wr
        re, im = _right(re.to(tl.float16), im.to(tl.float16), fb, fbi, minus_fbi)
        kr = tl.load(spectrum)
        ki = tl.load(spectrum + channels.to(tl.int64) * (A * B))
        if CONJUGATE:
            ki = -ki
        re, im = re * kr - im * ki, re * ki + im * kr
        re, im, more = _half(re, im)
        re, im = _right(re, im, fb, minus_fbi, fbi)
        # W again from the first level: a load of other words is not merged with the one above, to be kept in registers
        wr, wi = tl.load(twiddle, cache_modifier=".ca"), tl.load(twiddle + A * B, cache_modifier=".ca")
        re, im = re * wr + im * wi, im * wr - re * wi
        re, im = _left(fa, minus_fai, fai, re.to(tl.float16), im.to(tl.float16))
        top *= more
        re, im = re * top, im * top
        if POST:
            gr, gi = _pair(post, post, first, second, channel, post_b, post_c, post_b, post_c, place, inside,
                           has_second, False)  # fmt: skip
            re *= gr
            im *= gi
        to = y + (first * channels + channel) * seqlen + place
        tl.store(to, re.to(y.dtype.element_ty), mask=inside)
        to = y + (second * channels + channel) * seqlen + place
        tl.store(to, im.to(y.dtype.element_ty), mask=inside & has_second)
