"""Loads of 16 bytes with an eviction policy, written in PTX, and what becomes of them in registers.

Triton can ask for a policy, too, but makes it anew for each load (5 instructions) and zeroes what a mask leaves out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_to_go():
    """The policy of loads that are first to be evicted, made once."""
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", [], dtype=gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def as_usual():
    """The policy of loads that are not."""
    return gl.inline_asm_elementwise(
        "createpolicy.fractional.L2::evict_normal.b64 $0, 1.0;", "=l", [], dtype=gl.int64, is_pure=True, pack=1
    )


@gluon.jit
def load_16_bytes(at, seen, policy, ZERO: gl.constexpr):
    """Four tensors of words from addresses `at`; where not `seen`, zeros or (not ZERO) whatever there was."""
    LOAD: gl.constexpr = """{
        .reg .pred %seen;
        setp.ne.s32 %seen, $5, 0;
        @%seen ld.global.L1::evict_first.L2::cache_hint.v4.b32 {$0, $1, $2, $3}, [$4], $6;
        }"""
    NOTHING: gl.constexpr = "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    return gl.inline_asm_elementwise(
        NOTHING + LOAD if ZERO else LOAD,
        "=&r,=&r,=&r,=&r,l,r,l" if ZERO else "=r,=r,=r,=r,l,r,l",
        [at, seen, policy],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def halves(words, C: gl.constexpr):
    """The two numbers of 16 bits in each word."""
    low = (words & 0xFFFF).to(gl.int16).to(C, bitcast=True)
    return low, (words >> 16).to(gl.int16).to(C, bitcast=True)
