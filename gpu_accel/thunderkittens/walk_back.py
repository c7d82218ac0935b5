"""Gradients of chunked linear attention on Hopper: three walks of `walk_kernel`, without float32 states of chunks.

    1  dk a head, from the last chunk to the first; keeps the gradient of the state of every chunk in bfloat16 for dg
    2  dq a head, from the first chunk to the last; multiplies its state with those
    3  dv, from the last chunk to the first
    4  `pairs_kernel`: dg and dw, from pairs inside chunks and from what the walks say of pairs between chunks

dq and dk of a head are rounded to bfloat16 and then added up in float32 over the heads that share them, as torch does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import addressable
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.thunderkittens import pairs_kernel, walk_hopper
from gpu_accel.thunderkittens.walk_hopper import CHUNK, WalkConfig

# Whether tests/gpu/test_thunderkittens.py passed on a card: backwards of the walk in Gluon take these walks then.
CHECKED = False
_LEAST_SCALE = 2.0**-60  # the gradient of a final state is divided by the scale
_SHORT = CHUNK  # steps: with fewer, two states given weigh so much in dg that bfloat16 is not enough for them
Local = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, kw_only=True)
class BackConfig:
    """Columns of k that a program of walks 1 and 2 takes, without and with dg or dw, and heads of `pairs_kernel`."""

    block_k: int = 128
    inner_k: int = 64
    heads: int = 8


CONFIG = BackConfig()


def refusal(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int, scale: float, both_states: bool
) -> str | None:
    """Why these walks cannot make the gradients, or None. both_states: a first one, and the gradient of a last one."""
    if not 16 <= v.shape[-1] <= 128:
        return f"V must be from 16 to 128, got {v.shape[-1]}"
    if abs(scale) < _LEAST_SCALE:
        return f"a scale of {scale:g}"
    if both_states and v.shape[1] < _SHORT:
        return f"{v.shape[1]} steps between two states"
    return walk_hopper.refusal(q, k, v, cu_seqlens, chunk)


def _walk_of_keys(key_dim: int, value_dim: int, block_k: int) -> WalkConfig:
    """Walks 1 and 2, whose keys are v and whose values are k: two programs an SM, as in the forward."""
    if value_dim <= 64 and key_dim > 64 and block_k > 64:  # a state of 64 x 128, as of 128 x 64
        return WalkConfig(block_v=128, stages=2)
    return WalkConfig(block_v=64, stages=3 if value_dim <= 64 else 2)


def _flipped(x: Tensor | None) -> Tensor | None:
    """States (..., K, V) as (..., V, K)."""
    return None if x is None else x.mT.contiguous()


def gradients(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None,
    initial: Tensor | None, local: Local, dlocal: Local, *, scale: float, segments: int, want_dg: bool,
    config: BackConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg, dw, dinitial as of `chunked.chunked_backward`.

    local, dlocal: (what a segment adds to the state, its decay) forwards and, for q and do with scale 1, backwards.
    """
    do, config = addressable(do), config or CONFIG
    batch, seqlen, heads, value_dim = v.shape
    heads_q, key_dim = q.shape[2:]
    chunks, group = triton.cdiv(seqlen, CHUNK), heads // heads_q
    want_dg = want_dg and g is not None
    want_inner = want_dg or w is not None
    vectors = walk_hopper.gate_vectors(g, w, v, chunks)
    ending = None if dfinal is None else dfinal / scale
    keys = _walk_of_keys(key_dim, value_dim, config.inner_k if want_inner else config.block_k)
    rows, tiles = 64 * triton.cdiv(value_dim, 64), triton.cdiv(key_dim, keys.block_v)

    def wide(has: bool, *shape: int) -> Tensor | None:
        return torch.empty(shape, dtype=torch.float32, device=v.device) if has else None

    parts = (tiles, batch, heads, chunks)
    out_of, into, across = wide(want_inner, *parts, CHUNK), wide(want_dg, *parts, CHUNK), wide(want_dg, *parts, rows)
    states = v.new_empty((batch, chunks * rows, heads, key_dim)) if want_dg else None
    common: dict[str, Any] = dict(vectors=vectors, segments=segments, scale=scale)
    dsum, ddecay = dlocal or (None, None)
    dk, _ = walk_hopper.walk(v, do, q, g, w, _flipped(ending), _flipped(dsum), ddecay, reverse=True, config=keys,
                             states=states, x=k if want_inner else None, inner=out_of, **common)  # fmt: skip
    added, decay = local or (None, None)
    dq, _ = walk_hopper.walk(do, v, k, g, w, _flipped(initial), _flipped(added), decay, config=keys, states=states,
                             across=across, x=q if want_dg else None, inner=into, **common)  # fmt: skip
    dv, dstate = walk_hopper.walk(k, q, do, g, w, ending, dsum, ddecay, reverse=True, **common)
    if group > 1:
        dq, dk = (x.unflatten(2, (heads_q, group)).sum(3) for x in (dq, dk))
    dg, dw = (torch.empty(v.shape[:3] if has else (0,), dtype=torch.float32, device=v.device)
              for has in (want_dg, w is not None))  # fmt: skip
    if want_inner:
        block = min(group, config.heads)
        launch(
            pairs_kernel._pairs_kernel, batch * chunks * heads_q * triton.cdiv(group, block),
            (q, k, v, do, *vectors, into, out_of, across, dg, dw, *(s for x in (q, k, v, do) for s in x.stride()[:3]),
             seqlen, chunks, heads, group, tiles, scale),
            dict(K=key_dim, V=value_dim, BT=CHUNK, BK=max(64, next_power_of_2(key_dim)),
                 BV=max(64, next_power_of_2(value_dim)), BH=block, BA=rows, HAS_G=g is not None, HAS_W=w is not None,
                 WANT_DG=want_dg, PRECISION="tf32", num_warps=4, num_stages=2),
        )  # fmt: skip
    return dq, dk, dv, dg, dw, dstate * scale
