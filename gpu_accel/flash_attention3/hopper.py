"""Host side of the Hopper kernels: which problems they take, their configurations, tensor-map cache and launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .gluon_launch import (
    QuickLaunch,
    addressable,
    heads_per_group,
    multiprocessors,
    refusal,
    tensor_map,
    tile_counter,
)
from .problem import Problem, effective_window

NAME = "hopper"
KERNEL = "Gluon, warp-specialised, wgmma and TMA (sm_90a)"
_LOG2_E = 1.4426950408889634
_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """Tiles and switches of one forward kernel; a program works on `64 * consumers` query rows."""

    head_dim: int
    consumers: int
    block_n: int
    stages: int
    q_slots: int
    o_chunks: int
    ping_pong: bool
    dynamic: bool

    def registers(self) -> tuple[int, int, int]:
        """(cap at launch, per consumer thread, per producer thread) that share one SM's 65536 registers."""
        threads = 32 * (4 * self.consumers + 4)
        producer = 24 if self.consumers <= 2 else 32
        return 65536 // threads // 8 * 8, min(240, (512 - producer) // self.consumers // 8 * 8), producer


def forward_config(head_dim: int, *, causal: bool, seqlen_k: int) -> ForwardConfig:
    """The configuration for a head_dim up to 256 (rounded up to 64, 128 or 256 by zero fill)."""
    padded = next(d for d in _HEAD_DIMS if head_dim <= d)
    # head_dim 64 is bound by exponentials and issue slots, so a third consumer pays (542 against 459 TFLOP/s at 8k
    # keys), but not where a tile has few steps: 170 against 210 causal at 512 keys, 420 against 435 at 4k (H100, bf16;
    # development readings, see the paper's README)
    few_steps = seqlen_k <= (4096 if causal else 1024)
    consumers = 3 if padded == 64 and not few_steps else 2
    return ForwardConfig(
        head_dim=padded,
        consumers=consumers,
        block_n=64 if padded == 256 else 128,
        stages=2,
        # head_dim 256 has room for one copy of Q, and for O in quarters only
        q_slots=1 if padded == 256 else 2,
        o_chunks=4 if padded == 256 else 1,
        ping_pong=consumers == 2,
        dynamic=causal,
    )


def refuse(problem: Problem) -> str | None:
    """Why the Hopper forward cannot run this problem, or None."""
    if problem.head_dim > 256:
        return f"takes head_dim up to 256, got {problem.head_dim}"
    return refusal(problem)


@functools.cache
def _forward_kernel() -> QuickLaunch:
    from .hopper_forward import attention_forward_kernel

    return QuickLaunch(attention_forward_kernel)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    config: ForwardConfig | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention forward of (batch, seqlen, heads, head_dim) bf16/fp16 tensors on sm_90.

    Args:
        q, k, v: any strides; a view that the copy engine can't address is copied once. heads % heads_kv == 0.
        softmax_scale: multiplies q k^T.
        window_left, window_right: keys that a query sees to either side of the bottom-right diagonal, -1 for all;
            causal is right 0.
        softcap: caps the scaled scores at +-softcap by tanh; 0 is off.
        config: tiles to use instead of the tuned ones.
        out, lse: results to write into.

    Returns:
        out like q, and lse (batch, heads, seqlen_q) float32, natural logarithm.
    """
    q, k, v = (addressable(x) for x in (q, k, v))
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or seqlen_k == 0:
        return out.zero_(), lse.fill_(-math.inf)
    window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    causal = window_right >= 0
    config = config or forward_config(head_dim, causal=causal, seqlen_k=seqlen_k)
    num_m = -(-seqlen_q // (64 * config.consumers))
    num_tiles = num_m * batch * heads
    grid = min(multiprocessors(q.device), num_tiles)
    launch_registers, consumer_registers, producer_registers = config.registers()
    scale, exp_scale = softmax_scale, softmax_scale * _LOG2_E
    if softcap > 0:
        scale, exp_scale = softmax_scale / softcap, _LOG2_E
    d = config.head_dim
    arguments = (
        tensor_map(q, 64, d),
        tensor_map(k, config.block_n, d),
        tensor_map(v, config.block_n, d),
        tensor_map(out, 64, d // config.o_chunks),
        lse,
        tile_counter(q.device) if config.dynamic else lse,
        seqlen_q,
        seqlen_k,
        heads,
        heads // heads_kv,
        num_m,
        num_tiles,
        heads_per_group(batch * heads, 2 * seqlen_k * head_dim * q.element_size()),
        window_left,
        window_right,
        scale,
        exp_scale,
        softcap,
    )
    constants = dict(
        CONSUMERS=config.consumers,
        HEAD_DIM=d,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        Q_SLOTS=config.q_slots,
        O_CHUNKS=config.o_chunks,
        PING_PONG=config.ping_pong,
        CAUSAL=causal,
        WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0,
        EVEN_K=seqlen_k % config.block_n == 0,
        DYNAMIC=config.dynamic,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
    )
    variant = (q.dtype, lse.data_ptr() % 16)  # all that Triton would specialise on
    options = dict(num_warps=4, maxnreg=launch_registers)
    _forward_kernel()(variant, grid, arguments, constants, options)
    return out, lse


def describe(problem: Problem) -> str:
    """The tiles `forward` takes for a problem it does not refuse."""
    _, right = effective_window(problem.window_left, problem.window_right, problem.seqlen_q, problem.seqlen_k)
    c = forward_config(problem.head_dim, causal=right >= 0, seqlen_k=problem.seqlen_k)
    order = "tiles drawn from a queue, longest first" if c.dynamic else "tiles in order"
    return f"{64 * c.consumers}x{c.block_n}, {c.consumers} consumer warpgroups, {c.stages} stages, {order}"
