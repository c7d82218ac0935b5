"""Host side of the Blackwell forward (sm_100a), chosen by `backend="blackwell"` only: experimental, not measured.

It has never run: no card was at hand. It compiles for sm_100a with every supported Triton.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .gluon_launch import (
    QuickLaunch,
    addressable,
    heads_per_group,
    machine_refusal,
    multiprocessors,
    score_scales,
    tensor_map,
)
from .problem import Problem, effective_window

NAME = "blackwell"
KERNEL = "Gluon, warp-specialised, tcgen05 and TMA (sm_100a); experimental, not measured"
_ROWS = 128
_OPTIONS = dict(num_warps=4, maxnreg=136)  # 8 warps: 4 that load and issue give their registers to softmax


def refuse(problem: Problem) -> str | None:
    """Why the Blackwell forward cannot run this problem, or None."""
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"takes head_dim up to 256, got {problem.head_dim} and {problem.head_dim_v} (v)"
    if (why := machine_refusal(problem, (10, 0), "B200, GB200")) is not None:
        return why
    return "packed sequences (cu_seqlens) are not in this kernel" if problem.varlen else None


@functools.cache
def _kernel() -> QuickLaunch:
    from .blackwell_forward import blackwell_forward_kernel

    return QuickLaunch(blackwell_forward_kernel)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention forward of (batch, seqlen, heads, head_dim) bf16/fp16 tensors; arguments and results as in `hopper.py`.

    head_dim and that of v are filled with zeros up to the larger one's 64, 128 or 256.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    out = torch.empty((batch, seqlen_q, heads, head_dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or seqlen_k == 0:
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = (addressable(x) for x in (q, k, v))
    window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    d = next(n for n in (64, 128, 256) if max(head_dim, head_dim_v) <= n)
    block_n = 64 if d == 256 else 128
    num_m = -(-seqlen_q // _ROWS)
    num_tiles = num_m * batch * heads
    arguments = (
        tensor_map(q, _ROWS, d),
        tensor_map(k, block_n, d),
        tensor_map(v, block_n, d),
        tensor_map(out, _ROWS, d),
        lse,
        seqlen_q,
        seqlen_k,
        heads,
        heads // heads_kv,
        num_m,
        num_tiles,
        heads_per_group(batch * heads, seqlen_k * (head_dim + head_dim_v) * q.element_size()),
        window_left,
        window_right,
        *score_scales(softmax_scale, softcap),
        softcap,
    )
    constants = dict(
        HEAD_DIM=d,
        BLOCK_N=block_n,
        STAGES=2,
        S_SLOTS=2,
        CAUSAL=window_right >= 0,
        WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0,
    )
    variant = (q.dtype, lse.data_ptr() % 16)
    _kernel()(variant, min(multiprocessors(q.device), num_tiles), arguments, constants, _OPTIONS)
    return out, lse


def describe(problem: Problem) -> str:
    """The tiles `forward` takes for a problem it does not refuse."""
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    return f"{_ROWS}x{64 if wide else 128}, one softmax warpgroup, 2 stages, tiles in order"
