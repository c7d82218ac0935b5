"""Gradients of gated linear attention on Hopper: three walks of `walk_kernel`, without float32 states of chunks.

    1  dk a head, from the last chunk to the first; keeps the gradient of the state of every chunk in bfloat16 for dg
    2  dq a head, from the first chunk to the last; multiplies its state with those
    3  dv, from the last chunk to the first
    4  `pairs_kernel`: dg and dw, from pairs inside chunks and from what the walks say of pairs between chunks

Or, of forms in BOTH, `both_kernel` for 1, 3 and the pairs of 4: it has both factors of every pair.

dq and dk of a head are rounded to bfloat16 and then added up in float32 over the heads that share them, as torch does.
In float16, where one head's may be beyond 65504 and their sum not, they are float32 until they are added up.

Where nothing but q, k, v and the first state needs a gradient (no weights, gates that are constants or none), nothing
is kept for gates: `plain`, three walks as the forward's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, addressable, tensor_map
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.thunderkittens import pairs_kernel, walk_hopper
from gpu_accel.thunderkittens.walk_hopper import CHUNK, WalkConfig

# What tests/gpu found right on an H200: (K, V, whether there are weights), and what may be beside them. Anything else
# is off. With (128, 64), Mamba-2 as below took 4331 us in plain Triton.
CHECKED: dict[tuple[int, int, bool], tuple[str, ...]] = {
    (128, 64, True): ("states", "segments"),
    (128, 128, False): ("states", "segments"),
    (64, 64, True): (),
}
# K, padded to 64 or 128, of what takes `both_kernel` (with V up to 64): its warps and stages. Mamba-2 on an H200, 8 x
# 2048 steps with 80 heads, K 128: 1522 us for 1893 by a walk each; 16 x 4096 with 16 heads, K 64: 639 for 971.
BOTH: dict[int, tuple[int, int]] = {64: (4, 2), 128: (8, 3)}
HALF_BOTH = (8, 3)  # the same in float16, of which 4 warps spill 308 bytes at K = 64
# (K, V) of `plain` that tests/gpu found right on an H200, with states and segments: 237 us for 500 at 8 x 2048 steps,
# 16 heads, K = V = 128, without gates, and 263 for 752 with decays. Others were right, too, and nobody timed them.
PLAIN_CHECKED: tuple[tuple[int, int], ...] = ((128, 128), (16, 64))
_LEAST_SCALE = 2.0**-60  # the gradient of a final state is divided by the scale
_SHORT = CHUNK  # steps: with fewer, two states given weigh so much in dg that bfloat16 is not enough for them
_COLUMNS = 64  # of k that a program of walks 1 and 2 takes; 128 took 3 % longer
# Whether programs walk several heads that share q and k one after the other, and add up their dq and dk in the dtype of
# these, where that takes no more turns of the GPU: at 80 heads a fifth is left to be added up.
IN_TURNS = True
_HEADS = 8  # of a group that a program of `pairs_kernel` takes; 4 and 16 are as good
Turned = tuple[Tensor, Tensor] | None  # what segments add (.., V, K), their decays
Local = tuple[Tensor, Tensor, Tensor] | None  # as (.., K, V), their decays, as (.., V, K)
_quick: list[QuickLaunch] = []


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


def unseen(key_dim: int, value_dim: int, weighted: bool, states: bool, segments: int) -> str | None:
    """Which form of these gradients this is that no GPU has run, or None. states: one or both are given."""
    beside = CHECKED.get((key_dim, value_dim, weighted))
    if beside is None:
        return f"K = {key_dim}, V = {value_dim}, {'gates and weights' if weighted else 'gates without weights'}"
    if states and "states" not in beside:
        return "states given"
    return f"{segments} segments" if segments > 1 and "segments" not in beside else None


def plain_unseen(key_dim: int, value_dim: int, shared: bool) -> str | None:
    """Why `plain` is not taken for these sizes, or None. shared: heads of v share queries and keys."""
    if (key_dim, value_dim) not in PLAIN_CHECKED:
        return f"K = {key_dim}, V = {value_dim} without gates' gradients"
    return "heads that share queries and keys" if shared else None


def _turns(programs: int, group: int, slots: int) -> int:
    """Heads of a group that a program may walk while all take as long: `programs` of one head, `slots` at a time."""
    rounds = max(1, triton.cdiv(programs, slots))
    fits = [n for n in range(1, rounds + 1) if group % n == 0 and triton.cdiv(programs // n, slots) * n <= rounds]
    return max(fits)


def _flipped(x: Tensor | None) -> Tensor | None:
    """States (..., K, V) as (..., V, K)."""
    return None if x is None else x.mT.contiguous()


def both(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, vectors: tuple[Tensor, Tensor], initial: Tensor | None,
    local: Tensor | None, decays: Tensor | None, states: Tensor, *, weighted: bool, scale: float, segments: int,
    config: tuple[int, int], turns: int = 1, powers: Tensor | None = None, wide: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dk and dv of every head, the last D (batch, heads, V, K) float32, and out_of, passed and got of `both_kernel`.

    turns: heads whose dk are added up, so that dk has heads / turns.
    initial, local, decays: of D, as `walk_hopper.walk` takes them. states: memory for the D that enters every chunk.
    powers: in float16, what those were multiplied with, see `walk_kernel`. wide: dk is float32, of float16.
    """
    from gpu_accel.thunderkittens import both_kernel

    if not _quick:
        _quick.append(QuickLaunch(both_kernel.both_kernel))
    batch, seqlen, heads, value_dim = v.shape
    heads_q, key_dim = q.shape[2:]
    warps, stages = config
    parts = warps // 4  # of sums over columns
    chunks, block_k = triton.cdiv(seqlen, CHUNK), 64 if key_dim <= 64 else 128
    dk = v.new_empty((batch, seqlen, heads // turns, key_dim), dtype=torch.float32 if wide else v.dtype)
    dv = v.new_empty((batch, seqlen, heads, value_dim))
    final = v.new_empty((batch, heads, value_dim, key_dim), dtype=torch.float32)
    sums = [v.new_empty((batch, heads, chunks, n * CHUNK), dtype=torch.float32) for n in (parts, parts, 4)]
    blocks = (block_k, block_k, 64, 64, block_k, 64)
    maps = [tensor_map(x, CHUNK, n) for x, n in zip((q, k, v, do, dk, dv), blocks, strict=True)]
    optional = [final if x is None else x for x in (initial, local, decays)]
    aligned = initial is None or initial.data_ptr() % 16 == 0  # the others are made here
    _quick[0](
        (warps, aligned, v.dtype, wide), batch * heads // turns * segments,
        (*maps, tensor_map(states, 64, block_k), *map(walk_hopper._line_map, vectors), *optional, final, *sums,
         chunks, heads, heads // heads_q, batch, segments, key_dim, value_dim, scale, powers),
        dict(BK=block_k, BV=64, STAGES=stages, WEIGHTED=weighted, HAS_INITIAL=initial is not None,
             HAS_LOCAL=local is not None, WARPS=warps, TURNS=turns, UNIT=scale == 1),
        dict(num_warps=warps),
    )  # fmt: skip
    return dk, dv, final, *sums


def gradients(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: Tensor | None,
    initial: Tensor | None, local: Turned, dlocal: Local, *, scale: float, segments: int,
    rates: walk_hopper.Rates = None, vectors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg, dw, dinitial as of `chunked.chunked_backward`.

    rates: as `walk_hopper.gate_vectors` takes them; then dw is all of the gradient of w, and that of rates stands for
    dg. Only for forms in BOTH.
    local, dlocal: what segments add to the state forwards and, of q and do with scale 1, backwards, by
    `walk_hopper.segment_sums`. vectors: of `walk_hopper.gate_vectors`.
    """
    do = addressable(do)
    batch, seqlen, heads, value_dim = v.shape
    heads_q, key_dim = q.shape[2:]
    chunks, group = triton.cdiv(seqlen, CHUNK), heads // heads_q
    vectors = vectors or walk_hopper.gate_vectors(g, w, v, chunks, rates)
    ending = None if dfinal is None else dfinal / scale
    # walks 1 and 2, whose keys are v and whose values are k: two programs an SM, as in the forward
    keys = WalkConfig(block_v=_COLUMNS, stages=2)
    rows, tiles = 64 * triton.cdiv(value_dim, 64), triton.cdiv(key_dim, _COLUMNS)
    parts = (tiles, batch, heads, chunks)
    into, across = (v.new_empty((*parts, n), dtype=torch.float32) for n in (CHUNK, rows))
    states = v.new_empty((batch, chunks * rows, heads, key_dim))
    half = v.dtype == torch.float16
    powers = v.new_empty(parts, dtype=torch.float32) if half else None  # of states
    wide = half and group > 1
    common: dict[str, Any] = dict(vectors=vectors, segments=segments, scale=scale)
    dsum, ddecay, dturned = dlocal or (None, None, None)
    gates = v.shape[:3] if rates is None else (batch, chunks, heads)
    dg, dw = (torch.empty(shape, dtype=torch.float32, device=v.device)
              for shape in (gates, (0,) if w is None else v.shape[:3]))  # fmt: skip
    config = BOTH.get(64 if key_dim <= 64 else 128) if value_dim <= 64 else None
    config = HALF_BOTH if config and half else config
    of_q = of_k = 1
    if IN_TURNS and key_dim > 64 and config and group > 1 and segments == 1 and initial is dfinal is None:
        sms = walk_hopper.sms(v)
        of_q = _turns(batch * heads * tiles, group, 2 * sms)
        of_k = _turns(batch * heads, group, 8 // config[0] * sms)
    if config:
        dk, dv, dstate, out_of, *pairs = both(do, q, k, v, vectors, _flipped(ending), dturned, ddecay, states,
                                              weighted=w is not None, scale=scale, segments=segments,
                                              config=config, turns=of_k, powers=powers, wide=wide)  # fmt: skip
        dstate = dstate.mT
    else:
        out_of = v.new_empty((*parts, CHUNK), dtype=torch.float32)
        dk, _ = walk_hopper.walk(v, do, q, g, w, _flipped(ending), dturned, ddecay, reverse=True, config=keys,
                                 states=states, x=k, inner=out_of, powers=powers, wide=wide, **common)  # fmt: skip
        dv, dstate = walk_hopper.walk(k, q, do, g, w, ending, dsum, ddecay, reverse=True, **common)
    turned, decay = local or (None, None)
    dq, _ = walk_hopper.walk(do, v, k, g, w, _flipped(initial), turned, decay, config=keys, states=states,
                             across=across, x=q, inner=into, turns=of_q, powers=powers, wide=wide,
                             **common)  # fmt: skip
    if group > 1:
        dq, dk = (x.unflatten(2, (heads_q, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    if config:
        block = min(16, next_power_of_2(heads))
        launch(
            pairs_kernel._gate_sums_kernel, batch * chunks * triton.cdiv(heads, block),
            (*pairs, out_of, vectors[1], into, across, dg, dw, seqlen, chunks, heads, tiles, w,
             *(rates or (None, 0.0, 0.0)), *((0, 0, 0) if w is None else w.stride())),
            dict(BT=CHUNK, BH=block, BA=rows, HAS_W=w is not None, PARTS=config[0] // 4, HAS_RATES=rates is not None,
                 num_warps=4),
        )  # fmt: skip
        dg = dg if rates is None else dg.sum((0, 1))
        return dq, dk, dv, dg, dw, dstate if scale == 1 else dstate * scale
    block = min(group, _HEADS)
    launch(
        pairs_kernel._pairs_kernel, batch * chunks * heads_q * triton.cdiv(group, block),
        (q, k, v, do, *vectors, into, out_of, across, dg, dw, *(s for x in (q, k, v, do) for s in x.stride()[:3]),
         seqlen, chunks, heads, group, tiles, scale),
        dict(K=key_dim, V=value_dim, BT=CHUNK, BK=max(64, next_power_of_2(key_dim)),
             BV=max(64, next_power_of_2(value_dim)), BH=block, BA=rows, HAS_W=w is not None, PRECISION="tf32",
             num_warps=4, num_stages=2),
    )  # fmt: skip
    return dq, dk, dv, dg, dw, dstate if scale == 1 else dstate * scale


def plain(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None,
    local: Turned, dlocal: Local, *, scale: float, segments: int, vectors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and dinitial, without weights; arguments as in `gradients`."""
    do = addressable(do)
    heads, heads_q = v.shape[2], q.shape[2]
    vectors = vectors or walk_hopper.gate_vectors(g, None, v, triton.cdiv(v.shape[1], CHUNK))
    ending = None if dfinal is None else dfinal / scale
    common: dict[str, Any] = dict(vectors=vectors, segments=segments, scale=scale)
    (turned, decay), (dsum, ddecay, dturned) = local or (None, None), dlocal or (None, None, None)
    # forwards, the walk takes one head of its values for each of its queries
    each = k if heads == heads_q else k.repeat_interleave(heads // heads_q, 2)
    wide = v.dtype == torch.float16 and heads > heads_q
    dq, _ = walk_hopper.walk(do, v, each, g, None, _flipped(initial), turned, decay, wide=wide, **common)
    dk, _ = walk_hopper.walk(v, do, q, g, None, _flipped(ending), dturned, ddecay, reverse=True, wide=wide,
                             **common)  # fmt: skip
    dv, dstate = walk_hopper.walk(k, q, do, g, None, ending, dsum, ddecay, reverse=True, **common)
    if heads > heads_q:
        dq, dk = (x.unflatten(2, (heads_q, heads // heads_q)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dstate * scale
