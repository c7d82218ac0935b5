"""Exponentials and sigmoids with fewer instructions, in plain Triton.

`tl.exp` makes numbers below 2^-126 too, which takes three instructions more than what multiplies and calls ex2 alone; a
division looks after divisors above 2^126. Sigmoids of 16 bits are the square of a reciprocal root: 2^-21 off.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """exp(x), 0 where that is below 2^-126."""
    return tl.exp2(x * _LOG2E)


@triton.jit
def sigmoid(x, NARROW: tl.constexpr):
    """1 / (1 + exp(-x)); NARROW: for what is rounded to 16 bits."""
    if NARROW:
        root = tl.rsqrt(1.0 + tl.exp2(x * -_LOG2E))
        out = root * root
    else:
        out = 1.0 / (1.0 + exp(-x))
    return out


@triton.jit
def silu(x, NARROW: tl.constexpr):
    return x * sigmoid(x, NARROW)
