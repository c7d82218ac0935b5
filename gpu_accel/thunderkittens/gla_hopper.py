"""Host side of `gla_walk_kernel`: which calls it takes, its tiles, tensor maps and launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, addressable, tensor_map
from gpu_accel.thunderkittens import chunked
from gpu_accel.thunderkittens.walk_hopper import CHUNK, machine_refusal, size_refusal

COLUMNS = 64  # of v that a program of the walk takes
_MOST_NUMBERS = 2**31  # of ends: their coordinate is one 32-bit number
# The most registers of a thread that makes pairs, by what K is padded to, for as many programs an SM as are fastest (8
# x 2048 steps, 16 heads, on an H200). ptxas wants 195, which is one program at K = 128; with 128 it is two, 219 us for
# 261, though 330 bytes spill. At K = 64 168 are three for two: 97 us for 112, and 155 with 128.
_REGISTERS: dict[int, int | None] = {64: 168, 128: 128}
# A sequence is cut while there are fewer programs than SMs, not than two an SM: what segments leave is a walk of its
# own. 1 x 16384 steps, 16 heads, K and V 128, on an H200: 238, 188, 128 and 136 us with 1, 2, 4 and 8 segments; 8 x
# 2048 with K and V 64: 49 us whole and 62 with 2.
_PROGRAMS = 132
_quick: list[QuickLaunch] = []


def block_keys(key_dim: int) -> int:
    """What K is padded to."""
    return 64 if key_dim <= 64 else 128


def segments_for(v: Tensor, chunk: int) -> int:
    """Into how many segments the walk cuts every sequence."""
    batch, seqlen, heads, value_dim = v.shape
    return chunked.segments_for(
        batch, heads, triton.cdiv(value_dim, COLUMNS), triton.cdiv(seqlen, chunk), programs=_PROGRAMS
    )


def refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why these kernels cannot run this forward, or None. What TMA cannot address is copied first."""
    why = machine_refusal(v) or size_refusal(q, v, cu_seqlens, chunk)
    if why is not None:
        return why
    if v.shape[0] * v.shape[2] * triton.cdiv(v.shape[1], CHUNK) * block_keys(q.shape[3]) >= _MOST_NUMBERS:
        return "what its chunks leave is 2^31 numbers or more"
    return None


def auto_refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why "auto" does not take them, or None: timed with K and V of 64 (170 us for 358) and of 128 (302 us for 555).

    K and V between are padded to these, here and in the portable kernels.
    """
    if not all(32 < n <= 128 for n in (q.shape[3], v.shape[3])):
        return "timed with K and V of 64 and 128, to which 33 to 127 are padded, and with no other"
    return refusal(q, v, cu_seqlens, chunk)


def _ends_map(x: Tensor):
    """TMA map over float32 numbers one after the other, in blocks of its last dimension."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, [x.numel()], [1], [x.shape[-1]], gl.NVMMASharedLayout(0, 32, 1))


def pairs(q: Tensor, k: Tensor, g: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q', k' (batch, rows, heads, K), P (batch, rows, heads, 64) and ends (batch, heads, chunks, 64 or 128) float32.

    rows: whole chunks. g of the shape of q, in any dtype.
    """
    from gpu_accel.thunderkittens import gla_walk_kernel

    if not _quick:
        _quick.extend(map(QuickLaunch, (gla_walk_kernel.gla_pairs_kernel, gla_walk_kernel.gla_walk_kernel)))
    batch, seqlen, heads, key_dim = q.shape
    chunks, block = triton.cdiv(seqlen, CHUNK), block_keys(key_dim)
    most = _REGISTERS[block]
    g = addressable(g)  # rows that begin at multiples of 16 bytes, for loads of two gates at a time
    queries, keys, weights = (
        q.new_empty((batch, heads, chunks * CHUNK, n)).transpose(1, 2) for n in (key_dim, key_dim, CHUNK)
    )
    ends = torch.empty((batch, heads, chunks, block), dtype=torch.float32, device=q.device)
    maps = [tensor_map(x, CHUNK, n) for x, n in zip((q, k, queries, keys, weights), (*[block] * 4, CHUNK), strict=True)]
    _quick[0](
        (g.dtype, max(g.stride()) // 4 >= 2**31, most), batch * heads * chunks,
        (*maps, g, ends, *(s // 4 for s in g.stride()[:3]), seqlen, chunks, heads, key_dim, scale),
        dict(BK=block), dict(num_warps=block // 16) | ({} if most is None else dict(maxnreg=most)),
    )  # fmt: skip
    return queries, keys, weights, ends


def walk(
    made: tuple[Tensor, Tensor, Tensor, Tensor], v: Tensor, initial: Tensor | None, segments: int
) -> tuple[Tensor, Tensor]:
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32) of what `pairs` made and v."""
    queries, keys, weights, ends = made
    batch, seqlen, heads, value_dim = v.shape
    key_dim, chunks, block = keys.shape[3], ends.shape[2], ends.shape[3]
    tiles = triton.cdiv(value_dim, COLUMNS)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final, *sums = (
        torch.empty(shape, dtype=torch.float32, device=v.device)
        for shape in ((batch, heads, key_dim, value_dim), (segments - 1, batch, heads, key_dim, value_dim),
                      (segments - 1, batch, heads, block))
    )  # fmt: skip
    optional = [final if initial is None else initial, *(sums if segments > 1 else (final, final))]
    maps = [tensor_map(x, CHUNK, n) for x, n in ((queries, block), (keys, block), (weights, CHUNK), (v, COLUMNS))]
    arguments = (*maps, _ends_map(ends), tensor_map(o, CHUNK, COLUMNS), *optional, final,
                 chunks, heads, batch, segments, tiles, key_dim, value_dim, int(initial is not None))  # fmt: skip
    aligned = optional[0].data_ptr() % 16 == 0  # the others are made here
    for local in (True, False) if segments > 1 else (False,):
        _quick[1](
            (aligned,), batch * heads * tiles * (segments - local), arguments,
            dict(BK=block, STAGES=3 if local or block == 64 else 2, LOCAL=local),
            dict(num_warps=4),
        )  # fmt: skip
    return o, final


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, *, scale: float, segments: int
) -> tuple[Tensor, Tensor]:
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32); at least one step, head and sequence."""
    q, k, v = (addressable(x) for x in (q, k, v))
    return walk(pairs(q, k, g, scale), v, initial, segments)
