"""Host side of `delta_solve_kernel` and `delta_walk_kernel`: which calls they take, tensor maps and launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, addressable, tensor_map
from gpu_accel.thunderkittens.walk_hopper import CHUNK, _line_map, gate_vectors, machine_refusal, size_refusal, sms

COLUMNS = 64  # of v that a program of a walk takes, with 4 warps
# Whether it takes 128 with 8 for K above 64, where there would be more programs of 64 than SMs, which each of them
# fills. No GPU has seen it.
WIDE = False
# Chunks ahead, of K up to 64 and up to 128: two programs an SM and one. With one stage three fit at K = 128.
STAGES = {64: 2, 128: 2}
SHARED = False  # whether gradients of heads that share q and k are made by `delta_back_kernel`; no GPU has seen it
WALKS_BACK = False  # whether gradients are walked by `delta_walk_back_kernel`; no GPU has seen it
BACK_STAGES = {64: 1, 128: 1}  # chunks ahead of a walk back, by its columns of v
REGISTERS = 168  # of a thread that solves: three programs an SM, 136 us; two with all that it wants take 155
_quick: dict[str, QuickLaunch] = {}


def refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why this kernel cannot run a forward, or None. What TMA cannot address is copied first."""
    return machine_refusal(v) or size_refusal(q, v, cu_seqlens, chunk)


def auto_refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why "auto" does not take it, or None: timed with K and V of 64 and 128, to which less is padded."""
    if min(q.shape[3], v.shape[3]) <= 32:
        return "timed with K and V of 64 and 128, to which 33 to 127 are padded, and with no less"
    return refusal(q, v, cu_seqlens, chunk)


def _columns(v: Tensor, block: int) -> int:
    """Of v that a program of a walk takes, with keys padded to `block`."""
    batch, _, heads, value_dim = v.shape
    tiles = triton.cdiv(value_dim, COLUMNS)
    return 2 * COLUMNS if WIDE and block == 128 and tiles % 2 == 0 and batch * heads * tiles > sms(v) else COLUMNS


def solve(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float, *, keep: bool = False
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """(decay, fresh, sums of gates and beta in lines, pairs (batch, rows, heads, 64), T (batch, seqlen, heads, 64)).

    rows: whole chunks. Pairs of q, with `keep` T, a row a step; else they are no tensors of their own.
    """
    from gpu_accel.thunderkittens import delta_solve_kernel

    if "solve" not in _quick:
        _quick["solve"] = QuickLaunch(delta_solve_kernel.delta_solve_kernel)
    k, v = addressable(k), addressable(v)
    batch, seqlen, heads, value_dim = v.shape
    heads_q, key_dim = k.shape[2:]
    chunks, block, tile = triton.cdiv(seqlen, CHUNK), *(64 if n <= 64 else 128 for n in (key_dim, value_dim))
    decay, fresh = v.new_empty((*v.shape[:3], key_dim)), v.new_empty(v.shape)
    sums, strengths = gate_vectors(g, beta, v, chunks)
    pairs = fresh if q is None else q.new_empty((batch, heads, chunks * CHUNK, CHUNK)).transpose(1, 2)
    inverse = v.new_empty((batch, heads, seqlen, CHUNK)).transpose(1, 2) if keep else fresh
    maps = [tensor_map(x, CHUNK, n) for x, n in ((k if q is None else addressable(q), block), (k, block), (v, tile))]
    made = [tensor_map(x, CHUNK, n) for x, n in ((decay, block), (fresh, tile), (pairs, CHUNK), (inverse, CHUNK))]
    _quick["solve"](
        (REGISTERS,), batch * heads * chunks,
        (*maps, _line_map(sums), _line_map(strengths), *made, chunks, heads, heads // heads_q,
         triton.cdiv(value_dim, tile), scale),
        dict(BK=block, BV=tile, GATED=g is not None, PAIRS=q is not None, KEEP=keep),
        dict(num_warps=4, maxnreg=REGISTERS),
    )  # fmt: skip
    return decay, fresh, (sums, strengths), pairs, inverse


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32)."""
    decay, fresh, (sums, _), pairs, _ = solve(q, k, v, g, beta, scale)
    return walk(q, k, decay, fresh, sums, pairs, initial, scale, gated=g is not None)


def walk(
    q: Tensor, k: Tensor, decay: Tensor, fresh: Tensor, sums: Tensor, pairs: Tensor, initial: Tensor | None,
    scale: float, *, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32) of what a chunk solved."""
    from gpu_accel.thunderkittens import delta_walk_kernel

    if "walk" not in _quick:
        _quick["walk"] = QuickLaunch(delta_walk_kernel.delta_walk_kernel)
    q, k = addressable(q), addressable(k)
    batch, seqlen, heads, value_dim = fresh.shape
    heads_q, key_dim = q.shape[2:]
    chunks, block = triton.cdiv(seqlen, CHUNK), 64 if key_dim <= 64 else 128
    o = torch.empty(fresh.shape, dtype=fresh.dtype, device=fresh.device)
    final = torch.empty((batch, heads, key_dim, value_dim), dtype=torch.float32, device=fresh.device)
    cols = _columns(fresh, block)
    tiles = triton.cdiv(value_dim, cols)
    maps = [tensor_map(x, CHUNK, n) for x, n in ((decay, block), (q, block), (k, block), (pairs, CHUNK),
                                                 (fresh, cols))]  # fmt: skip
    given = final if initial is None else initial
    _quick["walk"](
        (given.data_ptr() % 16 == 0,), batch * heads * tiles,
        (*maps, _line_map(sums), tensor_map(o, CHUNK, cols), given, final,
         chunks, heads, heads // heads_q, tiles, key_dim, value_dim, scale, int(initial is not None), 0),
        dict(BK=block, COLS=cols, STAGES=STAGES[block], GATED=gated), dict(num_warps=cols // 16),
    )  # fmt: skip
    return o, final


def walk_back(
    q: Tensor, k: Tensor, do: Tensor, decay: Tensor, sums: Tensor, pairs: Tensor, dfinal: Tensor | None,
    du: Tensor, dstates: Tensor, low: Tensor | None, dinitial: Tensor, scale: float,
) -> None:  # fmt: skip
    """Into du, dstates and low (chunks, heads, K, V), dinitial (batch, heads, K, V); gated where there is a low."""
    from gpu_accel.thunderkittens import delta_walk_back_kernel

    if "walk back" not in _quick:
        _quick["walk back"] = QuickLaunch(delta_walk_back_kernel.delta_walk_back_kernel)
    q, k, do = (addressable(x) for x in (q, k, do))
    batch, seqlen, heads, value_dim = do.shape
    heads_q, key_dim = q.shape[2:]
    chunks, block = triton.cdiv(seqlen, CHUNK), 64 if key_dim <= 64 else 128
    cols = _columns(do, block)
    tiles = triton.cdiv(value_dim, cols)
    read = ((decay, block), (q, block), (k, block), (pairs, CHUNK), (do, cols))
    states = [_state_map(dstates if x is None else x, block, cols) for x in (dstates, low)]
    given = dinitial if dfinal is None else dfinal
    _quick["walk back"](
        (given.data_ptr() % 16 == 0,), batch * heads * tiles,
        (*(tensor_map(x, CHUNK, n) for x, n in read), _line_map(sums), tensor_map(du, CHUNK, cols), *states, given,
         dinitial, chunks, heads, heads // heads_q, tiles, key_dim, value_dim, scale, int(dfinal is not None), 0),
        dict(BK=block, COLS=cols, STAGES=BACK_STAGES[cols], GATED=low is not None, LOW=low is not None),
        dict(num_warps=cols // 16),
    )  # fmt: skip


def back_refusal(q: Tensor, v: Tensor) -> str | None:
    """Why `delta_back_kernel` cannot make the gradients of a forward that these kernels took, or None."""
    if v.shape[3] > 128:
        return f"its tiles of states hold 128 columns of v, not {v.shape[3]}"
    return "no GPU has seen it for heads that share q and k" if q.shape[2] != v.shape[2] and not SHARED else None


def _state_map(x: Tensor, rows: int, cols: int):
    """TMA map over states (chunks, heads, K, V), a state a block."""
    return tensor_map(x.transpose(1, 2), rows, cols)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, do: Tensor, du: Tensor, inverse: Tensor,
    states: tuple[Tensor, Tensor | None], dstates: tuple[Tensor, Tensor | None], sums: Tensor, strengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dbeta, dg, which is empty without gates) of what a walk back made; dq, dk a head, float32 if shared.

    states, dstates: (chunks, heads, K, V), and with gates what bfloat16 leaves of them.
    """
    from gpu_accel.thunderkittens import delta_back_kernel

    if "back" not in _quick:
        _quick["back"] = QuickLaunch(delta_back_kernel.delta_back_kernel)
    q, k, v, do = (addressable(x) for x in (q, k, v, do))
    batch, seqlen, heads, value_dim = v.shape
    key_dim, chunks = q.shape[3], triton.cdiv(seqlen, CHUNK)
    block, tile = (64 if n <= 64 else 128 for n in (key_dim, value_dim))
    group = heads // q.shape[2]
    dv = v.new_empty(v.shape)
    dq, dk = (
        x.new_empty((batch, seqlen, heads, key_dim), dtype=torch.float32 if group > 1 else x.dtype) for x in (q, k)
    )
    dbeta = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    (high, low), (dhigh, dlow) = states, dstates
    gated = low is not None
    dg = torch.empty_like(dbeta) if gated else dbeta.new_empty(0)
    wide = {"q": (q, block), "k": (k, block), "v": (v, tile), "u": (u, tile), "do": (do, tile), "du": (du, tile)}
    maps = [tensor_map(x, CHUNK, n) for x, n in (*wide.values(), (inverse, CHUNK))]
    maps += [_state_map(x, block, tile) for x in (high, dhigh, dhigh if dlow is None else dlow)]
    out = (q, k) if group > 1 else (dq, dk)  # a map of anything where none is used
    made = [tensor_map(x, CHUNK, n) for x, n in ((out[0], block), (out[1], block), (dv, tile))]
    _quick["back"](
        (), batch * heads * chunks,
        (*maps, _line_map(sums), _line_map(strengths), *made, dq, dk, high if low is None else low, dbeta,
         dg if gated else dbeta, seqlen, chunks, heads, group, scale, key_dim, value_dim),
        dict(BK=block, BV=tile, GATED=gated, SHARED=group > 1), dict(num_warps=8),
    )  # fmt: skip
    return dq, dk, dv, dbeta, dg
