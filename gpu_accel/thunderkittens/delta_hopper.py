"""Host side of `delta_walk_kernel`: which calls it takes, tensor maps and the launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, addressable, tensor_map
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.thunderkittens import delta_kernels
from gpu_accel.thunderkittens.walk_hopper import CHUNK, _line_map, gate_vectors, machine_refusal, size_refusal

COLUMNS = 64  # of v that a program takes
# Chunks ahead, of K up to 64 and up to 128: two programs an SM and one. With one stage three fit at K = 128.
STAGES = {64: 2, 128: 2}
_quick: list[QuickLaunch] = []


def refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why this kernel cannot run a forward, or None. What TMA cannot address is copied first."""
    return machine_refusal(v) or size_refusal(q, v, cu_seqlens, chunk)


def auto_refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why "auto" does not take it, or None: timed with K and V of 64 and 128, to which less is padded."""
    if min(q.shape[3], v.shape[3]) <= 32:
        return "timed with K and V of 64 and 128, to which 33 to 127 are padded, and with no less"
    return refusal(q, v, cu_seqlens, chunk)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay: Tensor, fresh: Tensor, initial: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32) of what `delta._solve` made."""
    from gpu_accel.thunderkittens import delta_walk_kernel

    if not _quick:
        _quick.append(QuickLaunch(delta_walk_kernel.delta_walk_kernel))
    q, k = addressable(q), addressable(k)
    batch, seqlen, heads, value_dim = v.shape
    heads_q, key_dim = q.shape[2:]
    chunks, block = triton.cdiv(seqlen, CHUNK), 64 if key_dim <= 64 else 128
    pairs = q.new_empty((batch, heads, chunks * CHUNK, CHUNK)).transpose(1, 2)
    strides = [s for x in (q, k) for s in x.stride()[:3]] + ([0, 0, 0] if g is None else list(g.stride()))
    launch(
        delta_kernels._pairs_kernel, batch * heads * chunks,
        (q, k, g, pairs, *strides, seqlen, chunks, heads, heads // heads_q, scale),
        dict(K=key_dim, BT=CHUNK, BK=block, HAS_G=g is not None, PRECISION="tf32", num_warps=4, num_stages=1),
    )  # fmt: skip
    sums, _ = gate_vectors(g, None, v, chunks)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final = torch.empty((batch, heads, key_dim, value_dim), dtype=torch.float32, device=v.device)
    tiles = triton.cdiv(value_dim, COLUMNS)
    maps = [tensor_map(x, CHUNK, n) for x, n in ((decay, block), (q, block), (k, block), (pairs, CHUNK),
                                                 (fresh, COLUMNS))]  # fmt: skip
    given = final if initial is None else initial
    _quick[0](
        (given.data_ptr() % 16 == 0,), batch * heads * tiles,
        (*maps, _line_map(sums), tensor_map(o, CHUNK, COLUMNS), given, final,
         chunks, heads, heads // heads_q, tiles, key_dim, value_dim, scale, int(initial is not None), 0),
        dict(BK=block, STAGES=STAGES[block], GATED=g is not None), dict(num_warps=4),
    )  # fmt: skip
    return o, final
