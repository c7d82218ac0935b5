"""Host side of `hedgehog_walk_kernel`: which calls it takes, tensor maps and launch."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, tensor_map
from gpu_accel.flash_attention3.launch import tma_refusal
from gpu_accel.thunderkittens.walk_hopper import CHUNK, machine_refusal

WINDOW = 128  # two chunks
FEATURES = 64
_REGISTERS = 248  # of a thread: two warpgroups, one program an SM
_KEYS = (64, 128)  # what K is padded to
_quick: list[QuickLaunch] = []


def size_refusal(q: Tensor, v: Tensor, q_map: Tensor, window: int, scale: float) -> str | None:
    """Why the kernel cannot take these sizes, or None."""
    if window != WINDOW:
        return f"its window has {WINDOW} tokens, not {window}"
    if q_map.shape[2] != FEATURES:
        return f"its maps have {FEATURES} features, not {q_map.shape[2]}"
    if not 16 <= q.shape[3] <= _KEYS[-1] or q.shape[3] % 8 or not 8 <= v.shape[3] <= 128 or v.shape[3] % 8:
        return f"K must be a multiple of 8 from 16 to 128 and V one up to 128, got {q.shape[3]} and {v.shape[3]}"
    if not scale >= torch.finfo(torch.float32).tiny:
        return f"scale must be above 0, got {scale:g}"
    return None


def refusal(q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, window: int, scale: float) -> str | None:
    """Why the kernel cannot run this call, or None."""
    why = machine_refusal(v) or size_refusal(q, v, q_map, window, scale)
    if why is not None:
        return why
    if any(x.stride(-1) != 1 for x in (q, k, v, q_map, k_map)):
        return "a last dimension is not contiguous"
    why = tma_refusal(q, k, v, *map(_rows, (q_map, k_map)))
    return None if why == "no GPU" else why


def _rows(mapping: Tensor) -> Tensor:
    """(heads, K, F) as (1, K, heads, F), what `tensor_map` takes."""
    return mapping.transpose(0, 1)[None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, window_factor: Tensor | None,
    linear_factor: Tensor | None, scale: float, floor: float,
) -> Tensor:  # fmt: skip
    """o (batch, seqlen, heads of v, V); arguments as of `hedgehog_fused.window_op`, factors float32 and contiguous."""
    from gpu_accel.thunderkittens import hedgehog_walk_kernel

    if not _quick:
        _quick.append(QuickLaunch(hedgehog_walk_kernel.hedgehog_walk_kernel))
    batch, seqlen, heads, _ = v.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_k = next(n for n in _KEYS if q.shape[3] <= n)
    keys = [tensor_map(x, CHUNK, block_k) for x in (q, k)]
    values = [tensor_map(x, CHUNK, 64) for x in (v, o)]
    maps = [tensor_map(_rows(x), block_k, FEATURES) for x in (q_map, k_map)]
    factors = [window_factor, linear_factor]
    given = [x if x is not None else torch.empty(0, device=v.device) for x in factors]
    _quick[0](
        tuple(x.data_ptr() % 16 == 0 for x in given), batch * heads,
        (*keys, *values, *maps, *given, triton.cdiv(seqlen, CHUNK), heads, heads // q.shape[2],
         scale * math.log2(math.e), floor),
        dict(BK=block_k, HAS_A=window_factor is not None, HAS_B=linear_factor is not None, REGISTERS=_REGISTERS),
        dict(num_warps=4, maxnreg=_REGISTERS),
    )  # fmt: skip
    return o
