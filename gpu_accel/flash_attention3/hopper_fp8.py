"""Host side of the Hopper FP8 forward: what it refuses, configurations, tensor maps, launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fp8_quantize import fp8_format
from .gluon_launch import (
    QuickLaunch,
    addressable,
    block_map,
    capability_refusal,
    gluon_available,
    heads_per_group,
    multiprocessors,
    tile_counter,
)
from .problem import effective_window
from .reference_fp8 import expand_scales

NAME = "hopper"
KERNEL = "Gluon, warp-specialised, FP8 wgmma and TMA (sm_90a)"
_NOT_FASTER = (
    "not faster than plain Triton up to head_dim 96 (but for causal calls at 64), nor up to 128 for less than 1024 "
    "keys: backend='hopper'"
)
_LOG2_E = 1.4426950408889634
_HEAD_DIMS = (64, 128, 256)
_ONE_SUM = 1024  # keys that the tensor cores may add up alone: of equal values they lose about a percent
_GROUP = 16  # keys whose order a tensor map changes together


@dataclass(frozen=True, kw_only=True)
class Fp8ForwardConfig:
    """Tiles and switches; a program works on 64 * `consumers` query rows.

    `two_level`: every block's P V is added in float32; otherwise the tensor cores add `chunk` blocks (1024 keys at
    head_dim 256) first. `fold`: v_scale goes into the exponents of P instead of the sum. `under`: what of softmax runs
    under P V of the block before: maxima (0), half of the exponentials too (1), all (2). `ahead`: K of the next step is
    waited for there; more than two stages. `named`: stages are freed on named barriers, each warp for itself.
    `growth`: how much (base 2) a row's maximum may grow before O is rescaled; above 0 the largest probabilities are
    rounded too, which makes the error 1.3 times larger. `o_chunks`: O leaves in that many pieces.
    """

    block_n: int
    stages: int
    ping_pong: bool
    dynamic: bool
    under: int = 0
    ahead: bool = True
    named: bool = False
    two_level: bool = True
    chunk: int = 8
    fold: bool = False
    o_chunks: int = 1
    growth: float = 0.0
    consumers: int = 2

    def registers(self) -> tuple[int, int, int]:
        """(cap at launch, per consumer thread, per producer thread) that share one SM's 65536 registers."""
        return 168, 240, 24


def forward_config(head_dim: int, *, causal: bool, seqlen_k: int, out_bytes: int = 2) -> Fp8ForwardConfig:
    """The configuration for a head_dim up to 256 (filled up to 64, 128 or 256 with zeros by the copy engine)."""
    if head_dim > 128:
        return Fp8ForwardConfig(
            block_n=128 if out_bytes == 2 else 64,
            stages=2,
            ping_pong=True,
            dynamic=causal,
            two_level=False,
            o_chunks=4,
            ahead=False,
        )
    stages = 4 if head_dim <= 64 or seqlen_k > 1024 else 3
    return Fp8ForwardConfig(
        block_n=128, stages=stages, ping_pong=True, dynamic=causal, under=2 if head_dim <= 64 else 0
    )  # fmt: skip


def shift_of(largest: float, growth: float) -> float:
    """log2 of what P is scaled by: the largest whole number for which P may grow by 2**growth within the format."""
    return float(math.floor(math.log2(largest) - growth))


def refuse(
    device_type: str, capability: tuple[int, int] | None, head_dim: int, k_block: int, one_scale: bool
) -> str | None:
    """Why this kernel cannot run a call, or None; `one_scale`: k and v have one scale a head or a tensor."""
    if (why := capability_refusal(device_type, capability)) is not None:
        return why
    if head_dim > _HEAD_DIMS[-1] or head_dim % 16:
        return f"takes head_dim up to 256 in multiples of 16, got {head_dim}"
    if not one_scale and k_block % 128:
        return f"takes scales of k and v per multiple of 128 keys, got k_block {k_block}"
    if not gluon_available():
        return "this Triton has no usable Gluon dialect"
    return None


def not_chosen(head_dim: int, seqlen_k: int, causal: bool = False) -> str | None:
    """Why "auto" leaves this kernel out where it could run, or None."""
    if head_dim == 64 and causal:
        return None
    return _NOT_FASTER if head_dim <= 96 or (head_dim <= 128 and seqlen_k < 1024) else None


@functools.cache
def _forward_kernel() -> QuickLaunch:
    from .hopper_fp8_forward import fp8_forward_kernel

    return QuickLaunch(fp8_forward_kernel)


def rows_map(x: Tensor, rows: int, cols: int):
    """Blocks of one head, `rows` x `cols`, of (batch, heads, rows, cols) with any strides but the last."""
    return block_map(x, x.shape, x.stride(), (1, 1, rows, cols))


def keys_map(k8: Tensor, rows: int, cols: int):
    """Blocks of `rows` keys of (batch, heads, 16 n, dim), contiguous, every 16 in the order that FP8 products want.

    Row 8 g + 2 t + e of 16 in shared memory is key 4 t + 2 g + e: the map's dimensions are (groups of 16 of all heads,
    g, t, e, dim).
    """
    dim = k8.shape[-1]
    groups = k8.numel() // (_GROUP * dim)
    shape, strides = (groups, 2, 4, 2, dim), (_GROUP * dim, 2 * dim, 4 * dim, dim, 1)
    return block_map(k8, shape, strides, (rows // _GROUP, 2, 4, 2, cols))


def grouped_keys(k8: Tensor) -> Tensor:
    """k8 contiguous, with its number of rows padded to a multiple of 16: itself where it is that already."""
    rest = -k8.shape[2] % _GROUP
    if rest:
        k8 = torch.nn.functional.pad(k8.view(torch.uint8), (0, 0, 0, rest)).view(k8.dtype)
    k8 = k8.contiguous()
    return k8 if k8.data_ptr() % 16 == 0 else k8.clone()


def forward(
    q8: Tensor,
    k8: Tensor,
    vt8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    o: Tensor,
    *,
    seqlen_k: int | None = None,
    q_block: int,
    k_block: int,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    config: Fp8ForwardConfig | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Launch into `o`; returns lse (batch, heads, seqlen_q) float32. Arguments are validated and not refused.

    Args:
        q8, k8: (batch, heads, seqlen, head_dim) fp8. vt8: (batch, heads_kv, head_dim, seqlen_k padded to 16) fp8.
        q_scale, k_scale, v_scale: float32 of shape (), (batch, heads) or (batch, heads, blocks).
        o: (batch, heads, seqlen_q, head_dim) in bfloat16, float16 or float32, any strides with last stride 1.
        seqlen_k: how many rows of k8 count, where it is padded.
        window_right: 0 is causal, -1 is no bound.
    """
    batch, heads, seqlen_q, head_dim = q8.shape
    heads_kv = k8.shape[1]
    seqlen_k = k8.shape[2] if seqlen_k is None else seqlen_k
    if lse is None:
        lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q8.device)
    if lse.numel() == 0:
        return lse
    if seqlen_k == 0:
        o.zero_()
        return lse.fill_(-math.inf)
    window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    causal = window_right >= 0
    if config is None:
        config = forward_config(head_dim, causal=causal, seqlen_k=seqlen_k, out_bytes=o.element_size())
    fmt = fp8_format(vt8.dtype)
    padded = next(d for d in _HEAD_DIMS if head_dim <= d)
    n = config.block_n
    q8, vt8, k8 = addressable(q8), addressable(vt8), grouped_keys(k8)
    q_scale = expand_scales(q_scale, batch, heads, -(-seqlen_q // q_block))
    k_scale = expand_scales(k_scale, batch, heads_kv, -(-seqlen_k // k_block))
    v_scale = expand_scales(v_scale, batch, heads_kv, -(-seqlen_k // k_block))
    num_m = -(-seqlen_q // (64 * config.consumers))
    num_tiles = num_m * batch * heads
    exp_scale, cap = softmax_scale * _LOG2_E, 0.0
    if softcap > 0:
        exp_scale, cap = softmax_scale / softcap, softcap * _LOG2_E
    grid = min(multiprocessors(q8.device), num_tiles)
    chunk, aside = 0, lse
    if not config.two_level and padded < 256:
        chunk = config.chunk
    elif not config.two_level and seqlen_k > _ONE_SUM:
        chunk = _ONE_SUM // n
        aside = torch.empty(grid * config.consumers * 64 * padded, dtype=torch.float32, device=q8.device)
    launch_registers, consumer_registers, producer_registers = config.registers()
    arguments = (
        rows_map(q8, 64, padded),
        keys_map(k8, n, padded),
        rows_map(vt8, padded, n),
        rows_map(o, 64, padded // config.o_chunks),
        lse,
        tile_counter(q8.device) if config.dynamic else lse,
        aside,
        q_scale, *q_scale.stride(), k_scale, *k_scale.stride(), v_scale, *v_scale.stride(),
        heads_kv, k8.shape[2] // _GROUP, seqlen_q, seqlen_k, heads, heads // heads_kv, num_m, num_tiles,
        heads_per_group(batch * heads, 2 * seqlen_k * head_dim, (8 if seqlen_k <= 512 else 16) << 20),
        window_left, window_right, exp_scale, cap,
    )  # fmt: skip
    constants = dict(
        CONSUMERS=config.consumers,
        HEAD_DIM=padded,
        BLOCK_N=n,
        STAGES=config.stages,
        Q_BLOCK=q_block,
        K_BLOCK=k_block,
        PING_PONG=config.ping_pong,
        CAUSAL=causal,
        WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0,
        EVEN_K=seqlen_k % n == 0,
        DYNAMIC=config.dynamic,
        SHIFT=shift_of(fmt.largest, config.growth),
        GROWTH=config.growth,
        UNDER=config.under,
        AHEAD=config.ahead,
        TWO_LEVEL=config.two_level,
        O_CHUNKS=config.o_chunks,
        CHUNK=chunk,
        FOLD=config.fold,
        NAMED=config.named,
        ALIGNED=window_right == 0 and window_left < 0 and (seqlen_k - seqlen_q) % n == 0 and 64 * config.consumers <= n,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
    )
    variant = (q8.dtype, o.dtype, lse.data_ptr() % 16)
    _forward_kernel()(variant, grid, arguments, constants, dict(num_warps=4, maxnreg=launch_registers))
    return lse


def describe(head_dim: int, *, causal: bool, seqlen_k: int) -> str:
    """The tiles `forward` takes (without softcap)."""
    c = forward_config(head_dim, causal=causal, seqlen_k=seqlen_k)
    order = "tiles drawn from a queue" if c.dynamic else "tiles in order"
    return f"{64 * c.consumers}x{c.block_n}, {c.consumers} consumer warpgroups, {c.stages} stages, {order}"
