"""Attention backward in plain Triton: three kernels, no atomics, so the same inputs give the same bits.

1. `attention_delta`: delta_i = sum_d o_id do_id - dlse_i, one number a query row. The gradient of the log-sum-exp
   enters here and nowhere else: d lse_i / d s_ij = p_ij. Also lse in base 2, both padded to whole blocks, so that the
   loops of the other two load them without a mask.
2. `attention_backward_dkdv` (portable_dkdv.py): one program per block of N keys and key head. It walks over the query
   blocks that see these keys, for every query head of the group, so grouped heads are summed in registers in a fixed
   order.
       s^T = k q^T    p^T = exp2(s^T - lse)    dv += p^T do    dp^T = v do^T    dk += (p^T * (dp^T - delta)) q
   Transposed scores make p^T and ds^T left operands as they are; a transposed left operand in registers is what some
   Triton versions miscompile on Hopper.
3. `attention_backward_dq` (portable_dq.py): one program per block of M query rows, walking over keys as the forward
   does.
       dq += (p * (do v^T - delta)) k
Seven matrix products instead of the five of a kernel that adds dq with atomics: the price of determinism.

Rows that do not exist or see nothing get lse = +inf, so that p = exp2(s - inf) = 0 without a mask. Keys beyond the
end need none in (2), where they only reach rows that are not stored, and a mask in (3), where exp2(0 - lse) may
overflow.

A sink is in lse, so nothing changes for q, k and v; its own gradient, -exp(sink - lse) * delta summed over the rows,
needs the numbers of (1) only. Past a score modifier ds goes through `SCORE_MOD_GRAD`; where p is 0, so is ds, whatever
that derivative gives. A block mask replaces the ranges of query rows (2) and keys (3) by its lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3.device import LOG2E, load_tile
from gpu_accel.flash_attention3.features import NONE, Features
from gpu_accel.flash_attention3.launch import (
    aligned,
    bias_arguments,
    block_arguments,
    compact_strides,
    heads_per_group,
    launch,
    narrowest_tile,
    next_power_of_2,
    operands,
    score_scales,
    split_dim,
    tma_refusal,
)
from gpu_accel.flash_attention3.modifiers import device_function
from gpu_accel.flash_attention3.portable_dkdv import attention_backward_dkdv
from gpu_accel.flash_attention3.portable_dq import attention_backward_dq
from gpu_accel.flash_attention3.portable_forward import FEATURES, refuse
from gpu_accel.flash_attention3.problem import effective_window

NAME = "portable"
KERNEL = "attention_delta, attention_backward_dkdv, attention_backward_dq (plain Triton)"
__all__ = ["FEATURES", "backward", "refuse"]
_DELTA_ROWS = 32
_STAT_ROWS = 128  # the largest block_m of a backward configuration


@triton.jit(do_not_specialize=["heads", "rows_total", "rows_padded", "lse_sb", "lse_sh"])
def attention_delta(
    o, do, lse, dlse, lse2, delta, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh, lse_sb, lse_sh, stat_sh,
    heads, rows_total, rows_padded, dim,
    ROWS: tl.constexpr, DV: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(rows_padded, ROWS)
    pid = tl.program_id(0)
    batch = (pid // blocks) // heads
    head = (pid // blocks) % heads
    row0 = (pid % blocks) * ROWS
    left = rows_total - row0
    o_tile = load_tile(o, batch, row0, head, 0, o_sb, o_ss, o_sh, left, dim, ROWS, DV, False, True, True)
    do_tile = load_tile(do, batch, row0, head, 0, do_sb, do_ss, do_sh, left, dim, ROWS, DV, False, True, True)
    total = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    rows = row0 + tl.arange(0, ROWS)
    at = batch.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + rows
    if DLSE:
        total -= tl.load(dlse + at, mask=rows < rows_total, other=0.0)
    log_sum = tl.load(lse + at, mask=rows < rows_total, other=float("-inf"))
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum * LOG2E)
    at = (batch * heads + head).to(tl.int64) * stat_sh + rows
    tl.store(delta + at, total, mask=rows < rows_padded)
    tl.store(lse2 + at, log_sum, mask=rows < rows_padded)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    features: Features | None = None,
    config_dkdv: configs.Config | None = None,
    config_dq: configs.Config | None = None,
    path: str | None = None,
) -> tuple[Tensor, ...]:
    """Launch. Shapes as in the forward; `dlse` like lse or None; last strides are 1.

    Returns:
        dq, dk, dv: contiguous, shaped like q, k, v and of their dtype; with `features.sinks` also dsinks (heads,).
    """
    features = features or NONE
    sinks = features.sinks
    varlen = cu_seqlens_q is not None
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    views = (x.unsqueeze(0) if varlen else x for x in (do, q, k, v, o, dq, dk, dv))
    do4, q4, k4, v4, o4, dq4, dk4, dv4 = views
    do4, q4, k4, v4 = aligned(do4), aligned(q4), aligned(k4), aligned(v4)
    batches = cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0]
    (_, sq, heads, head_dim), (_, sk, heads_kv, head_dim_v) = q4.shape, v4.shape
    if batches == 0 or q.numel() == 0 or (k.numel() == 0 and sinks is None):
        grads = (dq.zero_(), dk.zero_(), dv.zero_())
        return grads if sinks is None else (*grads, torch.zeros_like(sinks))
    if not varlen:
        window_left, window_right = effective_window(window_left, window_right, sq, sk)

    lse = lse.contiguous()
    lse3 = lse.unsqueeze(0) if varlen else lse
    q_block = features.block_size[0] or 1
    walked = triton.cdiv(sq, q_block) * q_block  # dkdv walks over whole blocks of a block mask
    padded = triton.cdiv(walked, _STAT_ROWS) * _STAT_ROWS
    delta, lse2 = (torch.empty(*lse3.shape[:2], padded, dtype=torch.float32, device=q.device) for _ in range(2))
    if dlse is not None:
        dlse = dlse.contiguous()
    launch(
        attention_delta,
        padded // _DELTA_ROWS * heads * q4.shape[0],
        (o4, do4, lse, dlse, lse2, delta, *compact_strides(o4), *compact_strides(do4), lse3.stride(0), lse3.stride(1),
         padded, heads, sq, padded, head_dim_v),
        {"ROWS": _DELTA_ROWS, "DV": max(16, next_power_of_2(head_dim_v)), "DLSE": dlse is not None, "num_warps": 4},
    )  # fmt: skip
    dsinks: tuple[Tensor, ...] = ()
    if sinks is not None:
        dsinks = (-(torch.exp2(sinks[:, None] * LOG2E.value - lse2) * delta).sum((0, 2)),)
        if k.numel() == 0:
            return dq.zero_(), dk.zero_(), dv.zero_(), *dsinks

    at = {"causal": window_right == 0, "seqlen_q": sq, "varlen": varlen, "device": q.device}
    config_dkdv = config_dkdv or configs.lookup("backward_dkdv", q.dtype, head_dim, head_dim_v, **at)
    config_dq = config_dq or configs.lookup("backward_dq", q.dtype, head_dim, head_dim_v, **at)
    config_dkdv, config_dq = (configs.within_blocks(c, *features.block_size) for c in (config_dkdv, config_dq))
    # Packed sequences keep to pointers: a neighbour's rows at the end of a block would have to be zeroed in every loop.
    tma = path == "tma" or (path is None and not varlen and tma_refusal(q4, k4, v4, do4) is None)
    tma = tma and not varlen
    (d, d2), (dv1, dv2) = (split_dim(dim, narrowest_tile(q)) for dim in (head_dim, head_dim_v))
    options = dict(
        D=d, D2=d2, DV=dv1, DV2=dv2, TMA=tma, MASK_D=d + d2 != head_dim, MASK_DV=dv1 + dv2 != head_dim_v,
        BATCH=next_power_of_2(batches + 1) if varlen else 1,
        VARLEN=varlen, USED_Q=seqused_q is not None, USED_K=seqused_k is not None,
        LEFT=window_left >= 0, RIGHT=window_right >= 0, SOFTCAP=softcap > 0,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        SCORE_MOD=device_function(features.score_mod), SCORE_MOD_GRAD=device_function(features.score_mod_grad),
        MASK_MOD=device_function(features.mask_mod), Q_BLOCK=features.block_size[0], KV_BLOCK=features.block_size[1],
    )  # fmt: skip
    strides = [s for x in (q4, k4, v4, do4) for s in compact_strides(x)]
    packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    scalars = (head_dim, head_dim_v, window_left, window_right, softmax_scale,
               *score_scales(softmax_scale, softcap, features), *bias_arguments(features))  # fmt: skip

    m, n = config_dkdv.block_m, config_dkdv.block_n
    stats = [TensorDescriptor.from_tensor(x.flatten(0, 1), [1, m]) for x in (lse2, delta)] if tma else (lse2, delta)
    tiles = (triton.cdiv(sk, n) + batches) * heads_kv if varlen else triton.cdiv(sk, n) * heads_kv * batches
    launch(
        attention_backward_dkdv,
        tiles,
        (*operands(q4, m, d, d2, tma), k4, v4, *operands(do4, m, dv1, dv2, tma), *stats, dk4, dv4, *packed, *strides,
         *compact_strides(dk4), *compact_strides(dv4), padded, batches, heads_kv, heads // heads_kv, sq, sk, *scalars,
         *block_arguments(features.block_lists[4:])),
        dict(M=m, N=n, num_warps=config_dkdv.num_warps, num_stages=config_dkdv.num_stages, **options),
    )  # fmt: skip
    m, n = config_dq.block_m, config_dq.block_n
    tiles = (triton.cdiv(sq, m) + batches) * heads if varlen else triton.cdiv(sq, m) * heads * batches
    together = heads_per_group(k4, v4, heads // heads_kv) if window_right >= 0 else 1
    launch(
        attention_backward_dq,
        tiles,
        (q4, *operands(k4, n, d, d2, tma), *operands(v4, n, dv1, dv2, tma), do4, lse2, delta, dq4, *packed, *strides,
         *compact_strides(dq4), padded, batches, heads, heads // heads_kv, sq, sk, together, *scalars,
         *block_arguments(features.block_lists[:4])),
        dict(M=m, N=n, num_warps=config_dq.num_warps, num_stages=config_dq.num_stages,
             TAIL=varlen or window_right >= 0 or sk % max(n, features.block_size[1]) != 0, **options),
    )  # fmt: skip
    return dq, dk, dv, *dsinks
