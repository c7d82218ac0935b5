"""Host side of the product with few rows on Hopper: tiles, workspace and launch, for 16 and 8 bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors

from .gemm_hopper import ACTIVATIONS, k_major, matrix_map, zero_counters

_TILE = 128


@dataclass(frozen=True, kw_only=True)
class SkinnyConfig:
    """`bk`: a slice of K; `stages`: slices on their way; `programs`: 0 for as many as balance best."""

    bk: int
    stages: int
    programs: int = 0


def skinny_config(m: int, element_size: int) -> SkinnyConfig:
    """The configuration for a product with m rows."""
    bk = 128 // element_size
    per_stage = (_TILE + padded_rows(m)) * 128
    return SkinnyConfig(bk=bk, stages=min(8, 200 * 1024 // per_stage))


def padded_rows(m: int) -> int:
    """Rows of X in a tile: a power of two from 16 to 128."""
    return min(128, max(16, 1 << (m - 1).bit_length()))


def programs_for(tiles: int, k_steps: int, processors: int) -> int:
    """How many programs share the slices: a whole number a tile where that leaves few SMs idle, else one an SM."""
    most = min(processors, max(tiles, tiles * k_steps // 4))
    even = most // tiles * tiles
    return even if even >= 0.9 * most else most


@functools.cache
def _kernel() -> QuickLaunch:
    from .gemm_skinny_kernel import skinny_gemm_kernel

    return QuickLaunch(skinny_gemm_kernel)


def gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    block_x: tuple[int, int] = (0, 0),
    block_w: tuple[int, int] = (0, 0),
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """activation(x (M, K) w (K, N) + bias) for a small M, or a small M N; x must be K-major, w as `k_major` says.

    float8 operands (w K-major) need scales: scale_x (M ...), scale_w (N ...), as transformer_engine/hopper_gemm.py.
    """
    m, k = x.shape
    n = w.shape[1]
    fp8 = x.element_size() == 1
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    config = config or skinny_config(m, x.element_size())
    bm, bk = padded_rows(m), config.bk
    w_k = bool(k_major(w, 0))
    x_desc = matrix_map(x, bm, bk)
    w_desc = matrix_map(w.t(), 64, bk) if w_k else matrix_map(w, bk, 64)
    tiles_m, k_steps = -(-m // bm), -(-k // bk)
    tiles = -(-n // _TILE) * tiles_m
    programs = config.programs or programs_for(tiles, k_steps, multiprocessors(x.device))
    partials = torch.empty(2 * programs * _TILE * bm, dtype=torch.float32, device=x.device)
    counters = zero_counters(x.device, tiles)
    blocked = fp8 and block_x[1] == 128
    strides = (0, 0, 0, 0)
    if scale_x is not None and scale_w is not None:
        across = (scale_x.stride(1), scale_w.stride(1)) if blocked else (0, 0)
        strides = (scale_x.stride(0) if block_x[0] else 0, across[0], scale_w.stride(0) if block_w[0] else 0, across[1])
    given = out if bias is None else bias
    arguments = (
        x_desc, w_desc, out, given, partials, counters, partials if scale_x is None else scale_x,
        partials if scale_w is None else scale_w, m, n, k_steps, tiles, tiles_m, *strides,
    )  # fmt: skip
    constants = dict(
        BM=bm,
        BK=bk,
        STAGES=config.stages,
        W_K=w_k,
        FP8=fp8,
        BLOCKED=blocked,
        ROW_X=block_x[0] == 1,
        ROW_W=block_w[0] == 1,
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
    )
    key = (x.dtype, w.dtype, out.dtype, given.dtype)
    _kernel()(key, programs, arguments, constants, dict(num_warps=4, maxnreg=240))
    return out
