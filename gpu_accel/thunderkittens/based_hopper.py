"""Host side of `based_walk_kernel`: which calls it takes, tensor maps and launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, tensor_map
from gpu_accel.flash_attention3.launch import tma_refusal
from gpu_accel.thunderkittens.walk_hopper import CHUNK, machine_refusal

KEYS = 16  # what K is padded to
_quick: list[QuickLaunch] = []


@dataclass(frozen=True, kw_only=True)
class BasedConfig:
    """Columns of v that a program takes, and how many chunks ahead it loads."""

    block_v: int = 64
    stages: int = 3


CONFIG = BasedConfig()


def size_refusal(q: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot take these sizes, or None."""
    if q.shape[-1] not in (8, KEYS) or v.shape[-1] % 8:
        return f"K must be 8 or {KEYS} and V a multiple of 8, got {q.shape[-1]} and {v.shape[-1]}"
    return None


def problem_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel cannot take these sizes and strides, or None."""
    why = size_refusal(q, v)
    if why is not None:
        return why
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "a last dimension is not contiguous"
    why = tma_refusal(q, k, v)
    return None if why == "no GPU" else why


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Hopper kernel cannot run this call, or None."""
    return machine_refusal(v) or problem_refusal(q, k, v)


def walk(q: Tensor, k: Tensor, v: Tensor, scale: float, norm: bool, config: BasedConfig | None = None) -> Tensor:
    """o (batch, seqlen, heads, V) of q, k (batch, seqlen, heads of q, K) and v.

    norm: divided by the sum of weights, which a second walk over ones makes: columns for it in the first one spilled,
    and took as long.
    """
    if norm:
        ones = v.new_ones(*v.shape[:3], 8)
        total = walk(q, k, ones, scale, False, config)[..., :1].float()
        return (walk(q, k, v, scale, False, config).float() / (total + 1e-6)).to(v.dtype)
    from gpu_accel.thunderkittens import based_walk_kernel

    if not _quick:
        _quick.append(QuickLaunch(based_walk_kernel.based_walk_kernel))
    config = config or CONFIG
    batch, seqlen, heads, value_dim = v.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not o.numel():
        return o
    tiles = triton.cdiv(value_dim, config.block_v)
    keys = [tensor_map(x, CHUNK, KEYS) for x in (q, k)]
    values = [tensor_map(x, CHUNK, config.block_v) for x in (v, o)]
    _quick[0](
        (), batch * heads * tiles,
        (*keys, *values, triton.cdiv(seqlen, CHUNK), heads, heads // q.shape[2], tiles, scale),
        dict(BV=config.block_v, STAGES=config.stages), dict(num_warps=4),
    )  # fmt: skip
    return o
