"""Host side of the Hopper forward that merges into earlier results: see `hopper_merge_kernel.py`."""

from __future__ import annotations

import functools

from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import (
    Known,
    QuickLaunch,
    addressable,
    heads_per_group,
    machine_refusal,
    multiprocessors,
    score_scales,
    tensor_map,
    tile_counter,
)
from gpu_accel.flash_attention3.hopper import forward_config
from gpu_accel.flash_attention3.problem import Problem, effective_window

_ROWS = 64  # of a tile of one warpgroup
_known = Known()


def refuse(problem: Problem) -> str | None:
    """Why this kernel cannot run the problem, or None."""
    if (why := machine_refusal(problem)) is not None:
        return why
    if problem.head_dim != problem.head_dim_v or problem.head_dim not in (64, 128):
        return f"merges at head_dim 64 and 128 only, got {problem.head_dim} and {problem.head_dim_v} (v)"
    if problem.varlen or problem.features:
        return "takes plain attention only"
    return None


@functools.cache
def _kernel() -> QuickLaunch:
    from .hopper_merge_kernel import attention_merge_kernel

    return QuickLaunch(attention_merge_kernel)


def forward_merge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    result: Tensor,
    *,
    row: int,
    first: bool,
    done: tuple[int, int],
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    queued: bool = False,
) -> tuple[int, int]:
    """Merge attention of q over k, v into (o, lse), in place.

    Args:
        q: (batch, seqlen_q, heads, head_dim) of 16 bits, rows [row, row + seqlen_q) of the queries that o and lse are
            of; k, v: (batch, seqlen_k, heads_kv, head_dim). Any strides.
        o: (batch, rows, heads, head_dim) float32, contiguous; may hold anything where lse is -inf. result: like o, of
            the dtype of q.
        lse: (batch, heads, rows) float32, contiguous.
        first: no row of q has seen a key yet: o and lse are not read.
        done: rows [a, b) of q that see no more keys afterwards; whole tiles of them go to `result` and not to o.
        softmax_scale, window_left, window_right, softcap: as in `flash_attention3.hopper.forward`.
        queued: tiles are drawn from a queue, also where they are all alike.

    Returns:
        the rows [a, b) of q that went to `result`.
    """
    key = (
        *(x.data_ptr() for x in (q, k, v, o, lse, result)), q.device, q.dtype, q.shape, k.shape, q.stride(), k.stride(),
        v.stride(), o.shape, o.stride(), lse.stride(), result.stride(), row, first, done, softmax_scale, window_left,
        window_right, softcap, queued,
    )  # fmt: skip
    if (ends := _known.again(key, q.device)) is not None:
        return ends
    given = q, k, v
    q, k, v = (addressable(x) for x in given)
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    causal = window_right >= 0
    config = forward_config(head_dim, causal=causal, seqlen_k=seqlen_k)
    # where full calls at head_dim 128 draw their tiles too, which was timed without merging only
    dynamic = (config.dynamic and (causal or head_dim <= 64)) or queued
    # a tail of keys without a mask is slower so at head_dim 128, and bounds were not timed
    whole = causal or head_dim == 64 or seqlen_k % config.block_n == 0
    plain = window_left < 0 and window_right <= 0 and softcap == 0 and whole
    low, high = -(-done[0] // _ROWS) * _ROWS, done[1]
    high = seqlen_q if high >= seqlen_q else high // _ROWS * _ROWS
    low, high = (low, high) if low < high else (0, 0)
    num_m = -(-seqlen_q // (64 * config.consumers))
    num_tiles = num_m * batch * heads
    launch_registers, consumer_registers, producer_registers = config.registers()
    arguments = (
        tensor_map(q, 64, head_dim),
        tensor_map(k, config.block_n, head_dim),
        tensor_map(v, config.block_n, head_dim),
        tensor_map(result[:, row : row + seqlen_q], 64, head_dim),
        o[:, row:],
        lse[:, :, row:],
        tile_counter(q.device) if dynamic else lse,
        o.shape[1],
        low,
        high,
        seqlen_q,
        seqlen_k,
        heads,
        heads // heads_kv,
        num_m,
        num_tiles,
        heads_per_group(
            batch * heads, seqlen_k * 2 * head_dim * q.element_size(), (8 if seqlen_k <= 512 else 16) << 20
        ),
        window_left,
        window_right,
        *score_scales(softmax_scale, softcap),
        softcap,
    )
    constants = dict(
        CONSUMERS=config.consumers,
        HEAD_DIM=head_dim,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        Q_SLOTS=config.q_slots,
        PING_PONG=config.ping_pong,
        CAUSAL=causal,
        WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0,
        EVEN_K=seqlen_k % config.block_n == 0,
        DYNAMIC=dynamic,
        LAZY=config.lazy,
        FIRST=first,
        SEAMLESS=config.seamless and plain,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
    )
    counter = arguments[6] if dynamic else None
    variant = (q.dtype, arguments[5].data_ptr() % 16)  # all that Triton would specialise on; o is always aligned
    options = dict(num_warps=4, maxnreg=launch_registers)
    made = _kernel()(variant, min(multiprocessors(q.device), num_tiles), arguments, constants, options)
    if all(a is b for a, b in zip(given, (q, k, v), strict=True)):
        _known.keep(key, made, counter, (low, high))
    return low, high
