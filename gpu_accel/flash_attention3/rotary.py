"""Rotary position embedding (RoPE, arXiv 2104.09864): plain torch, and the device function that kernels fuse it with.

Dimensions 0 to rotary_dim - 1 of a head are turned in pairs by angles that grow with the position; the others stay.
Pairs are (0, 1), (2, 3), ... when `interleaved` (GPT-J), else (0, rotary_dim / 2), (1, rotary_dim / 2 + 1) ... (Llama).
Products are made in float32 and the result is rounded once, to the dtype of the input.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, *, interleaved: bool) -> Tensor:
    """Turn x (seqlen, heads, head_dim) at `positions` (seqlen,); cos, sin (longest, rotary_dim / 2).

    Computed in float32, or float64 where x is; returned in the dtype of x.
    """
    half = cos.shape[-1]
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (t[positions.long()].to(compute)[:, None] for t in (cos, sin))
    turned, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    a, b = a * c - b * s, a * s + b * c
    out = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([out.to(x.dtype), rest], -1)


@triton.jit
def load_rotated(
    rows, cols, row_mask, positions, cos, sin, longest,
    DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, MASK_COLS: tl.constexpr,
):  # fmt: skip
    """A tile of `rows` (pointers, R) at columns `cols` (C), turned at `positions` (R).

    ROTARY is how many dimensions turn (0: none). Every element needs its partner in the pair, which is loaded a second
    time: it comes from the cache, and this happens once in a program.
    """
    mask = row_mask[:, None]
    if MASK_COLS:
        mask = mask & (cols < DIM)[None, :]
    x = tl.load(rows[:, None] + cols[None, :], mask=mask, other=0.0)
    if ROTARY > 0:
        if INTERLEAVED:
            partner = cols ^ 1
            angle = cols // 2
            first = (cols & 1) == 0
        else:
            first = cols < ROTARY // 2
            angle = tl.where(first, cols, cols - ROTARY // 2)
            partner = tl.where(first, cols + ROTARY // 2, cols - ROTARY // 2)
        turns = row_mask[:, None] & (cols < ROTARY)[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        turns = turns & (positions < longest)[:, None]
        places = positions.to(tl.int64)[:, None] * (ROTARY // 2) + angle[None, :]
        c = tl.load(cos + places, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + places, mask=turns, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        x = (wide * c + tl.where(first[None, :], -s, s) * other).to(x.dtype)
    return x
