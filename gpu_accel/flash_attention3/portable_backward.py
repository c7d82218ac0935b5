"""Attention backward in plain Triton: three kernels, no atomics, so the same inputs give the same bits.

1. `attention_delta`: delta_i = sum_d o_id do_id - dlse_i, one number a query row. The gradient of the log-sum-exp
   enters here and nowhere else: d lse_i / d s_ij = p_ij. Also lse in base 2, both padded to whole blocks, so that the
   loops of the other two load them without a mask.
2. `attention_backward_dkdv`: one program per block of N keys and key head. It walks over the query blocks that see
   these keys, for every query head of the group, so grouped heads are summed in registers in a fixed order.
       s^T = k q^T    p^T = exp2(s^T - lse)    dv += p^T do    dp^T = v do^T    dk += (p^T * (dp^T - delta)) q
   Transposed scores make p^T and ds^T left operands as they are; a transposed left operand in registers is what some
   Triton versions miscompile on Hopper.
3. `attention_backward_dq`: one program per block of M query rows, walking over keys as the forward does.
       dq += (p * (do v^T - delta)) k
Seven matrix products instead of the five of a kernel that adds dq with atomics: the price of determinism.

Rows that do not exist or see nothing get lse = +inf, so that p = exp2(s - inf) = 0 without a mask. Keys beyond the
end need none in (2), where they only reach rows that are not stored, and a mask in (3), where exp2(0 - lse) may
overflow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.compat import dot
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3.device import (
    LOG2E,
    dense_query_tile,
    find_sequence,
    key_range,
    load_tile,
    packed_lengths,
    store_tile,
    tanh,
)
from gpu_accel.flash_attention3.launch import (
    compact_strides,
    descriptor,
    heads_per_group,
    launch,
    next_power_of_2,
    split_dim,
    tma_refusal,
)
from gpu_accel.flash_attention3.portable_forward import refuse
from gpu_accel.flash_attention3.problem import effective_window

NAME = "portable"
KERNEL = "attention_delta, attention_backward_dkdv, attention_backward_dq (plain Triton)"
__all__ = ["backward", "refuse"]
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


@triton.jit
def _load_stat(
    x, batch_head, row0, row, rows_left, stat_sh, other: tl.constexpr,
    ROWS: tl.constexpr, TMA: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One number a query row. Packed sequences need the mask: behind their end come the numbers of the next."""
    if TMA:
        stat = x.load([batch_head, row]).reshape([ROWS])
    else:
        r = tl.arange(0, ROWS)
        pointers = x + batch_head.to(tl.int64) * stat_sh + row0 + row + r
        stat = tl.load(pointers, mask=r < rows_left, other=other) if MASK else tl.load(pointers)
    return stat


@triton.jit
def _dkdv_step(
    dk, dk2, dv, dv2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2, lse2, delta, batch_head, stat_sh, batch,
    q_row0, head, lo, hi, seqlen_q, key_diagonal, window_left, window_right, qk_scale, cap_in, cap_out,
    head_dim, head_dim_v, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh,
    M: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    TMA: tl.constexpr, MASK: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr, VARLEN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the query rows [lo, hi) in blocks of M."""
    for i in tl.range(lo, hi, M):
        i = tl.multiple_of(i, M)  # true wherever the loop runs at all; the compiler cannot see it through the bounds
        row = q_row0 + i
        left = seqlen_q - i
        q_tile = load_tile(q, batch, row, head, 0, q_sb, q_ss, q_sh, left, head_dim, M, D, TMA, True, MASK_D)
        st = dot(k_tile, tl.trans(q_tile), None, PRECISION)
        if D2 > 0:
            q_tile2 = load_tile(
                q2, batch, row, head, D, q_sb, q_ss, q_sh, left, head_dim - D, M, D2, TMA, True, MASK_D
            )
            st = dot(k_tile2, tl.trans(q_tile2), st, PRECISION)
        row_lse = _load_stat(lse2, batch_head, q_row0, i, left, stat_sh, float("inf"), M, TMA, VARLEN)
        if SOFTCAP:
            t = tanh(st * cap_in)
            st = cap_out * t
        pt = tl.exp2(st * qk_scale - row_lse[None, :])
        if MASK:
            rows = i + tl.arange(0, M)
            if LEFT:
                pt = tl.where(key_diagonal[:, None] >= rows[None, :] - window_left, pt, 0.0)
            if RIGHT:
                pt = tl.where(key_diagonal[:, None] <= rows[None, :] + window_right, pt, 0.0)
        do_tile = load_tile(
            do, batch, row, head, 0, do_sb, do_ss, do_sh, left, head_dim_v, M, DV, TMA, True, MASK_DV
        )
        dv = dot(pt.to(do_tile.dtype), do_tile, dv, PRECISION)
        dpt = dot(v_tile, tl.trans(do_tile), None, PRECISION)
        if DV2 > 0:
            do_tile2 = load_tile(
                do2, batch, row, head, DV, do_sb, do_ss, do_sh, left, head_dim_v - DV, M, DV2, TMA, True, MASK_DV
            )
            dv2 = dot(pt.to(do_tile.dtype), do_tile2, dv2, PRECISION)
            dpt = dot(v_tile2, tl.trans(do_tile2), dpt, PRECISION)
        d = _load_stat(delta, batch_head, q_row0, i, left, stat_sh, 0.0, M, TMA, VARLEN)
        dst = pt * (dpt - d[None, :])
        if SOFTCAP:
            dst = dst * (1.0 - t * t)
        dst = dst.to(q_tile.dtype)
        dk = dot(dst, q_tile, dk, PRECISION)
        if D2 > 0:
            dk2 = dot(dst, q_tile2, dk2, PRECISION)
    return dk, dk2, dv, dv2


@triton.jit(
    do_not_specialize=["batches", "heads_kv", "group", "seqlen_q", "seqlen_k", "window_left", "window_right"]
)
def attention_backward_dkdv(
    q, q2, k, v, do, do2, lse2, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh,
    dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, stat_sh,
    batches, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, qk_scale, cap_in, cap_out,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    BATCH: tl.constexpr, TMA: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    VARLEN: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if VARLEN:
        tiles = tl.cdiv(seqlen_k, N) + batches
        head_kv = pid // tiles
        sequence, from_end, k_row0, rows = find_sequence(pid % tiles, cu_seqlens_k, batches, seqlen_k, N, BATCH)
        if rows < 0:
            return
        n_block = tl.cdiv(rows, N) - 1 - from_end  # causal: the first keys are seen by most rows
        batch = tl.full((), 0, tl.int32)
        here = sequence < batches
        q_row0 = tl.load(cu_seqlens_q + sequence, mask=here, other=0)
        sq = tl.load(cu_seqlens_q + sequence + 1, mask=here, other=0) - q_row0
        sk = rows
        if USED_Q:
            sq = tl.load(seqused_q + sequence, mask=here, other=0)
        if USED_K:
            sk = tl.load(seqused_k + sequence, mask=here, other=0)
    else:
        n_blocks = tl.cdiv(seqlen_k, N)
        n_block = pid % n_blocks
        batch = (pid // n_blocks) // heads_kv
        head_kv = (pid // n_blocks) % heads_kv
        q_row0 = tl.full((), 0, tl.int32)
        k_row0 = tl.full((), 0, tl.int32)
        rows = seqlen_k
        sq = seqlen_q
        sk = seqlen_k
    n0 = n_block * N
    keys = n0 + tl.arange(0, N)
    key_diagonal = keys - (sk - sq)  # the query row that this key stands opposite to

    # Which query rows see these keys at all, and between which ones do all rows see all keys?
    n_last = tl.minimum(n0 + N, sk) - 1
    lo = tl.full((), 0, tl.int32)
    hi = sq
    full_lo = tl.full((), 0, tl.int32)
    full_hi = sq
    if RIGHT:
        lo = tl.maximum(n0 - (sk - sq) - window_right, 0) // M * M
        full_lo = tl.cdiv(tl.maximum(n_last - (sk - sq) - window_right, 0), M) * M
    if LEFT:
        hi = tl.minimum(sq, n_last - (sk - sq) + window_left + 1)
        full_hi = tl.maximum(tl.minimum(sq, n0 - (sk - sq) + window_left + 1), 0) // M * M
        full_hi = tl.maximum(full_hi, lo)
    if USED_K:
        hi = tl.where(n0 < sk, hi, 0)
        full_hi = tl.minimum(full_hi, hi)
    full_lo = tl.minimum(full_lo, full_hi)

    k_left = sk - n0
    k_tile = load_tile(k, batch, k_row0 + n0, head_kv, 0, k_sb, k_ss, k_sh, k_left, head_dim, N, D, False, True, MASK_D)
    v_tile = load_tile(
        v, batch, k_row0 + n0, head_kv, 0, v_sb, v_ss, v_sh, k_left, head_dim_v, N, DV, False, True, MASK_DV
    )
    dk_acc = tl.zeros([N, D], tl.float32)
    dv_acc = tl.zeros([N, DV], tl.float32)
    k_tile2 = k_tile
    v_tile2 = v_tile
    dk_acc2 = tl.zeros([N], tl.float32)
    dv_acc2 = tl.zeros([N], tl.float32)
    if D2 > 0:
        k_tile2 = load_tile(
            k, batch, k_row0 + n0, head_kv, D, k_sb, k_ss, k_sh, k_left, head_dim - D, N, D2, False, True, MASK_D
        )
        dk_acc2 = tl.zeros([N, D2], tl.float32)
    if DV2 > 0:
        v_tile2 = load_tile(
            v, batch, k_row0 + n0, head_kv, DV, v_sb, v_ss, v_sh, k_left, head_dim_v - DV, N, DV2, False, True, MASK_DV
        )
        dv_acc2 = tl.zeros([N, DV2], tl.float32)

    for g in range(0, group):
        head = head_kv * group + g
        batch_head = batch * heads_kv * group + head
        if RIGHT:
            dk_acc, dk_acc2, dv_acc, dv_acc2 = _dkdv_step(
                dk_acc, dk_acc2, dv_acc, dv_acc2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2,
                lse2, delta, batch_head, stat_sh, batch, q_row0, head, lo, full_lo, sq, key_diagonal, window_left,
                window_right,
                qk_scale, cap_in, cap_out, head_dim, head_dim_v, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh,
                M, D, D2, DV, DV2, TMA, True, MASK_D, MASK_DV, VARLEN, LEFT, RIGHT, SOFTCAP, PRECISION,
            )  # fmt: skip
        dk_acc, dk_acc2, dv_acc, dv_acc2 = _dkdv_step(
            dk_acc, dk_acc2, dv_acc, dv_acc2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2,
            lse2, delta, batch_head, stat_sh, batch, q_row0, head, full_lo, full_hi, sq, key_diagonal, window_left,
            window_right,
            qk_scale, cap_in, cap_out, head_dim, head_dim_v, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh,
            M, D, D2, DV, DV2, TMA, False, MASK_D, MASK_DV, VARLEN, LEFT, RIGHT, SOFTCAP, PRECISION,
        )  # fmt: skip
        if LEFT:
            dk_acc, dk_acc2, dv_acc, dv_acc2 = _dkdv_step(
                dk_acc, dk_acc2, dv_acc, dv_acc2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2,
                lse2, delta, batch_head, stat_sh, batch, q_row0, head, full_hi, hi, sq, key_diagonal, window_left,
                window_right,
                qk_scale, cap_in, cap_out, head_dim, head_dim_v, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh,
                M, D, D2, DV, DV2, TMA, True, MASK_D, MASK_DV, VARLEN, LEFT, RIGHT, SOFTCAP, PRECISION,
            )  # fmt: skip

    store_left = rows - n0
    if USED_K:
        used = (keys < sk)[:, None]
        dk_acc = tl.where(used, dk_acc, 0.0)
        dv_acc = tl.where(used, dv_acc, 0.0)
    store_tile(dk, dk_acc * softmax_scale, batch, k_row0 + n0, head_kv, 0, dk_sb, dk_ss, dk_sh, store_left, head_dim,
               N, D, MASK_D)  # fmt: skip
    store_tile(dv, dv_acc, batch, k_row0 + n0, head_kv, 0, dv_sb, dv_ss, dv_sh, store_left, head_dim_v,
               N, DV, MASK_DV)  # fmt: skip
    if D2 > 0:
        if USED_K:
            dk_acc2 = tl.where((keys < sk)[:, None], dk_acc2, 0.0)
        store_tile(dk, dk_acc2 * softmax_scale, batch, k_row0 + n0, head_kv, D, dk_sb, dk_ss, dk_sh, store_left,
                   head_dim - D, N, D2, MASK_D)  # fmt: skip
    if DV2 > 0:
        if USED_K:
            dv_acc2 = tl.where((keys < sk)[:, None], dv_acc2, 0.0)
        store_tile(dv, dv_acc2, batch, k_row0 + n0, head_kv, DV, dv_sb, dv_ss, dv_sh, store_left,
                   head_dim_v - DV, N, DV2, MASK_DV)  # fmt: skip


@triton.jit
def _dq_step(
    dq, dq2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv, lo, hi, seqlen_k,
    diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh,
    N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    TMA: tl.constexpr, MASK: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the keys [lo, hi) in blocks of N."""
    for j in tl.range(lo, hi, N):
        row = k_row0 + j
        left = seqlen_k - j
        k_tile = load_tile(k, batch, row, head_kv, 0, k_sb, k_ss, k_sh, left, head_dim, N, D, TMA, MASK, MASK_D)
        s = dot(q_tile, tl.trans(k_tile), None, PRECISION)
        if D2 > 0:
            k_tile2 = load_tile(
                k2, batch, row, head_kv, D, k_sb, k_ss, k_sh, left, head_dim - D, N, D2, TMA, MASK, MASK_D
            )
            s = dot(q_tile2, tl.trans(k_tile2), s, PRECISION)
        if SOFTCAP:
            t = tanh(s * cap_in)
            s = cap_out * t
        p = tl.exp2(s * qk_scale - row_lse[:, None])
        v_tile = load_tile(v, batch, row, head_kv, 0, v_sb, v_ss, v_sh, left, head_dim_v, N, DV, TMA, MASK, MASK_DV)
        dp = dot(do_tile, tl.trans(v_tile), None, PRECISION)
        if DV2 > 0:
            v_tile2 = load_tile(
                v2, batch, row, head_kv, DV, v_sb, v_ss, v_sh, left, head_dim_v - DV, N, DV2, TMA, MASK, MASK_DV
            )
            dp = dot(do_tile2, tl.trans(v_tile2), dp, PRECISION)
        ds = p * (dp - d[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        if MASK:
            cols = j + tl.arange(0, N)
            seen = cols[None, :] < seqlen_k
            if LEFT:
                seen = seen & (cols[None, :] >= diagonal[:, None] - window_left)
            if RIGHT:
                seen = seen & (cols[None, :] <= diagonal[:, None] + window_right)
            ds = tl.where(seen, ds, 0.0)
        ds = ds.to(k_tile.dtype)
        dq = dot(ds, k_tile, dq, PRECISION)
        if D2 > 0:
            dq2 = dot(ds, k_tile2, dq2, PRECISION)
    return dq, dq2


@triton.jit(
    do_not_specialize=["batches", "heads", "group", "seqlen_q", "seqlen_k", "heads_together", "window_left",
                       "window_right"]
)  # fmt: skip
def attention_backward_dq(
    q, k, k2, v, v2, do, lse2, delta, dq, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh, dq_sb, dq_ss, dq_sh, stat_sh,
    batches, heads, group, seqlen_q, seqlen_k, heads_together, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, qk_scale, cap_in, cap_out,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    BATCH: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    VARLEN: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if VARLEN:
        tiles = tl.cdiv(seqlen_q, M) + batches
        head = pid // tiles
        sequence, m_block, q_row0, rows = find_sequence(pid % tiles, cu_seqlens_q, batches, seqlen_q, M, BATCH)
        if rows < 0:
            return
        batch = tl.full((), 0, tl.int32)
        k_row0, sq, sk = packed_lengths(
            sequence, rows, batches, cu_seqlens_k, seqused_q, seqused_k, USED_Q, USED_K
        )
    else:
        batch, head, m_block = dense_query_tile(pid, batches, heads, seqlen_q, heads_together, M)
        q_row0 = tl.full((), 0, tl.int32)
        k_row0 = tl.full((), 0, tl.int32)
        rows = seqlen_q
        sq = seqlen_q
        sk = seqlen_k
    head_kv = head // group
    m0 = m_block * M
    row = m0 + tl.arange(0, M)
    diagonal = row + (sk - sq)

    lo, hi, full_lo, full_hi = key_range(m0, sq, sk, window_left, window_right, M, N, LEFT, RIGHT, USED_Q, TAIL)

    q_left = sq - m0
    q_tile = load_tile(q, batch, q_row0 + m0, head, 0, q_sb, q_ss, q_sh, q_left, head_dim, M, D, False, True, MASK_D)
    do_tile = load_tile(
        do, batch, q_row0 + m0, head, 0, do_sb, do_ss, do_sh, q_left, head_dim_v, M, DV, False, True, MASK_DV
    )
    batch_head = batch * heads + head
    row_lse = _load_stat(lse2, batch_head, q_row0, m0, q_left, stat_sh, float("inf"), M, False, VARLEN)
    d = _load_stat(delta, batch_head, q_row0, m0, q_left, stat_sh, 0.0, M, False, VARLEN)
    acc = tl.zeros([M, D], tl.float32)
    acc2 = tl.zeros([M], tl.float32)
    q_tile2 = q_tile
    do_tile2 = do_tile
    if D2 > 0:
        q_tile2 = load_tile(
            q, batch, q_row0 + m0, head, D, q_sb, q_ss, q_sh, q_left, head_dim - D, M, D2, False, True, MASK_D
        )
        acc2 = tl.zeros([M, D2], tl.float32)
    if DV2 > 0:
        do_tile2 = load_tile(
            do, batch, q_row0 + m0, head, DV, do_sb, do_ss, do_sh, q_left, head_dim_v - DV, M, DV2, False, True, MASK_DV
        )

    if LEFT:
        acc, acc2 = _dq_step(
            acc, acc2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv, lo,
            full_lo,
            sk, diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
            k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, N, D, D2, DV, DV2, TMA, True, MASK_D, MASK_DV,
            LEFT, RIGHT, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, acc2 = _dq_step(
        acc, acc2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv, full_lo,
        full_hi,
        sk, diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
        k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, N, D, D2, DV, DV2, TMA, False, MASK_D, MASK_DV,
        LEFT, RIGHT, SOFTCAP, PRECISION,
    )  # fmt: skip
    if TAIL:
        acc, acc2 = _dq_step(
            acc, acc2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv, full_hi,
            hi,
            sk, diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
            k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, N, D, D2, DV, DV2, TMA, True, MASK_D, MASK_DV,
            LEFT, RIGHT, SOFTCAP, PRECISION,
        )  # fmt: skip
    store_tile(dq, acc * softmax_scale, batch, q_row0 + m0, head, 0, dq_sb, dq_ss, dq_sh, rows - m0, head_dim,
               M, D, MASK_D)  # fmt: skip
    if D2 > 0:
        store_tile(dq, acc2 * softmax_scale, batch, q_row0 + m0, head, D, dq_sb, dq_ss, dq_sh, rows - m0,
                   head_dim - D, M, D2, MASK_D)  # fmt: skip


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
    config_dkdv: configs.Config | None = None,
    config_dq: configs.Config | None = None,
    path: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch. Shapes as in the forward; `dlse` like lse or None; last strides are 1.

    Returns:
        dq, dk, dv: contiguous, shaped like q, k, v and of their dtype.
    """
    varlen = cu_seqlens_q is not None
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    views = (x.unsqueeze(0) if varlen else x for x in (do, q, k, v, o, dq, dk, dv))
    do4, q4, k4, v4, o4, dq4, dk4, dv4 = views
    batches = cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0]
    (_, sq, heads, head_dim), (_, sk, heads_kv, head_dim_v) = q4.shape, v4.shape
    if batches == 0 or q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if not varlen:
        window_left, window_right = effective_window(window_left, window_right, sq, sk)

    lse = lse.contiguous()
    lse3 = lse.unsqueeze(0) if varlen else lse
    padded = triton.cdiv(sq, _STAT_ROWS) * _STAT_ROWS
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

    at = {"causal": window_right == 0, "seqlen_q": sq, "varlen": varlen, "device": q.device}
    config_dkdv = config_dkdv or configs.lookup("backward_dkdv", q.dtype, head_dim, head_dim_v, **at)
    config_dq = config_dq or configs.lookup("backward_dq", q.dtype, head_dim, head_dim_v, **at)
    # Packed sequences keep to pointers: a neighbour's rows at the end of a block would have to be zeroed in every loop.
    tma = path == "tma" or (path is None and not varlen and tma_refusal(q4, k4, v4, do4) is None)
    tma = tma and not varlen
    (d, d2), (dv1, dv2) = split_dim(head_dim), split_dim(head_dim_v)
    cap_in, cap_out = (softmax_scale / softcap, softcap * LOG2E.value) if softcap > 0 else (0.0, 0.0)
    qk_scale = 1.0 if softcap > 0 else softmax_scale * LOG2E.value
    options = dict(
        D=d, D2=d2, DV=dv1, DV2=dv2, TMA=tma, MASK_D=d + d2 != head_dim, MASK_DV=dv1 + dv2 != head_dim_v,
        BATCH=next_power_of_2(batches + 1) if varlen else 1,
        VARLEN=varlen, USED_Q=seqused_q is not None, USED_K=seqused_k is not None,
        LEFT=window_left >= 0, RIGHT=window_right >= 0, SOFTCAP=softcap > 0,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    strides = [s for x in (q4, k4, v4, do4) for s in compact_strides(x)]
    packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    scalars = (head_dim, head_dim_v, window_left, window_right, softmax_scale, qk_scale, cap_in, cap_out)

    def operand(x: Tensor, rows: int, first: int, second: int):
        if not tma:
            return x, x
        a = descriptor(x, rows, first)
        return a, (descriptor(x, rows, second) if second else a)

    m, n = config_dkdv.block_m, config_dkdv.block_n
    stats = [TensorDescriptor.from_tensor(x.flatten(0, 1), [1, m]) for x in (lse2, delta)] if tma else (lse2, delta)
    tiles = (triton.cdiv(sk, n) + batches) * heads_kv if varlen else triton.cdiv(sk, n) * heads_kv * batches
    launch(
        attention_backward_dkdv,
        tiles,
        (*operand(q4, m, d, d2), k4, v4, *operand(do4, m, dv1, dv2), *stats, dk4, dv4, *packed, *strides,
         *compact_strides(dk4), *compact_strides(dv4), padded, batches, heads_kv, heads // heads_kv, sq, sk, *scalars),
        dict(M=m, N=n, num_warps=config_dkdv.num_warps, num_stages=config_dkdv.num_stages, **options),
    )  # fmt: skip
    m, n = config_dq.block_m, config_dq.block_n
    tiles = (triton.cdiv(sq, m) + batches) * heads if varlen else triton.cdiv(sq, m) * heads * batches
    together = heads_per_group(k4, v4, heads // heads_kv) if window_right >= 0 else 1
    launch(
        attention_backward_dq,
        tiles,
        (q4, *operand(k4, n, d, d2), *operand(v4, n, dv1, dv2), do4, lse2, delta, dq4, *packed, *strides,
         *compact_strides(dq4), padded, batches, heads, heads // heads_kv, sq, sk, together, *scalars),
        dict(M=m, N=n, num_warps=config_dq.num_warps, num_stages=config_dq.num_stages,
             TAIL=varlen or window_right >= 0 or sk % n != 0, **options),
    )  # fmt: skip
    return dq, dk, dv
