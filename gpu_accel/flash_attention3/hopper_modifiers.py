"""Biases, score and mask modifiers and block lists inside the Hopper kernels, in Gluon.

`mods` holds what they need at run time, None where a call does not: (alibi_slopes, their batch stride, aux_tensors,
row maxima or (backward) the soft cap, width, batch stride and head stride of the block table). Users' functions
(modifiers.py) are compiled into the kernel, in its register layouts: they work element by element and need not know.

A block table (hopper_blocks.py) replaces the range of blocks that a tile walks over by a list; what a consumer of 64
rows does with a block is its `kind`: 0 sees nothing of it, 1 asks mask_mod, 2 sees all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_blocks import KIND_BITS, KIND_SHIFT

_BLOCK = gl.constexpr((1 << KIND_SHIFT.value) - 1)


@gluon.jit
def list_of(table, mods, batch, head, tile):
    """Where the list of a tile begins: the number of its blocks, at least one, then an entry each."""
    _, _, _, _, width, sb, sh = mods
    return table + (batch * sb + head * sh + tile).to(gl.int64) * width


@gluon.jit
def listed_block(row, at, PART: gl.constexpr):
    """Block number `at` of a list, and its kind for the 64 rows `PART` of the tile."""
    entry = gl.load(row + 1 + at)
    return entry & _BLOCK, (entry >> (KIND_SHIFT + KIND_BITS * PART)) & 3


@gluon.jit
def listed_number(row, at):
    """Block number `at` of a list alone."""
    return gl.load(row + 1 + at) & _BLOCK


@gluon.jit
def _indices(start, last, s, AXIS: gl.constexpr):
    """Rows (AXIS 0) or columns of a block s, clamped to 0 to `last`, as (rows, 1) or (1, columns)."""
    SIZE: gl.constexpr = s.shape[AXIS]
    LAYOUT: gl.constexpr = s.type.layout
    if AXIS == 0:
        index = gl.minimum(start + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LAYOUT)), last)[:, None]
    else:
        index = gl.minimum(start + gl.arange(0, SIZE, layout=gl.SliceLayout(0, LAYOUT)), last)[None, :]
    return gl.maximum(index, 0)  # sequences without keys have a last one of -1


@gluon.jit
def _distance(q0, k0, shift, Q_AXIS: gl.constexpr, s):
    """|query on the bottom-right diagonal - key|, in float32."""
    big: gl.constexpr = 1 << 30
    q = _indices(q0, big, s, Q_AXIS)
    k = _indices(k0, big, s, 1 - Q_AXIS)
    return gl.abs(q + shift - k).to(gl.float32)


@gluon.jit
def cap_out(t, mods):
    """Natural scores of their tanh."""
    _, _, _, softcap, _, _, _ = mods
    return t * softcap


@gluon.jit
def like(x, s):
    """x, what a user's function returned, in float32 and of the shape of s."""
    return gl.where(s == s, x, x).to(gl.float32)


@gluon.jit
def add_alibi(s, q0, k0, shift, batch, head, mods, Q_AXIS: gl.constexpr):
    """Natural scores less slope * distance; queries along axis Q_AXIS."""
    slopes, slopes_sb, _, _, _, _, _ = mods
    return s - gl.load(slopes + batch * slopes_sb + head) * _distance(q0, k0, shift, Q_AXIS, s)


@gluon.jit
def call_score_mod(s, q0, k0, last_q, last_k, batch, head, mods, FUNCTION: gl.constexpr, Q_AXIS: gl.constexpr):
    """score_mod of natural scores; queries along axis Q_AXIS."""
    _, _, aux, _, _, _, _ = mods
    q = _indices(q0, last_q, s, Q_AXIS)
    k = _indices(k0, last_k, s, 1 - Q_AXIS)
    return like(FUNCTION(s, batch, head, q, k, *aux), s)


@gluon.jit
def call_score_mod_grad(
    grad, s, q0, k0, last_q, last_k, batch, head, mods, FUNCTION: gl.constexpr, Q_AXIS: gl.constexpr
):
    """score_mod_grad; zeros stay zeros, whatever it makes of a score of -inf."""
    _, _, aux, _, _, _, _ = mods
    q = _indices(q0, last_q, s, Q_AXIS)
    k = _indices(k0, last_k, s, 1 - Q_AXIS)
    return gl.where(grad == 0.0, 0.0, like(FUNCTION(grad, s, batch, head, q, k, *aux), s))


@gluon.jit
def call_mask_mod(
    s, q0, k0, last_q, last_k, batch, head, mods, kind, OTHER: gl.constexpr, FUNCTION: gl.constexpr,
    BLOCKS: gl.constexpr, Q_AXIS: gl.constexpr,
):  # fmt: skip
    """s where a key is seen, OTHER elsewhere."""
    _, _, aux, _, _, _, _ = mods
    if BLOCKS:
        if kind < 2:
            if FUNCTION is not None:
                q = _indices(q0, last_q, s, Q_AXIS)
                k = _indices(k0, last_k, s, 1 - Q_AXIS)
                s = gl.where(FUNCTION(batch, head, q, k, *aux), s, OTHER)
            s = gl.where(kind > 0, s, OTHER)
    else:
        q = _indices(q0, last_q, s, Q_AXIS)
        k = _indices(k0, last_k, s, 1 - Q_AXIS)
        s = gl.where(FUNCTION(batch, head, q, k, *aux), s, OTHER)
    return s
