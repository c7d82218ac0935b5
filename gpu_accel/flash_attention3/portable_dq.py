"""Gradient of q in plain Triton: step 3 of `portable_backward.py`.

One program per block of M query rows and head, walking over the keys they see in blocks of N, as the forward does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.flash_attention3.device import (
    block_list,
    dense_query_tile,
    dot_rows,
    find_sequence,
    key_range,
    listed,
    load_stat,
    load_tile,
    packed_lengths,
    seen_keys,
    store_tile,
    tanh,
)


@triton.jit
def _dq_step(
    dq, dq2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv, lo, hi, seqlen_k,
    diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, blocks,
    N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    TMA: tl.constexpr, MASK: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_MOD_GRAD: tl.constexpr, MASK_MOD: tl.constexpr, KV_BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk over the keys [lo, hi), of the listed blocks if there is a list, in blocks of N."""
    NATURAL: tl.constexpr = (slope is not None) or (SCORE_MOD is not None)
    MODIFIED: tl.constexpr = (SCORE_MOD is not None) or (MASK_MOD is not None)
    for i in tl.range(lo, hi, N):
        j = i
        if KV_BLOCK > 0:
            j = listed(i, blocks, KV_BLOCK)
        row = k_row0 + j
        left = seqlen_k - j
        s, k_tile, k_tile2 = dot_rows(q_tile, q_tile2, k, k2, batch, row, head_kv, k_sb, k_ss, k_sh, left, head_dim,
                                      N, D, D2, TMA, MASK, MASK_D, PRECISION)  # fmt: skip
        if MODIFIED:
            kv_idx = tl.minimum(j + tl.arange(0, N), seqlen_k - 1)
        if SOFTCAP:
            t = tanh(s * cap_in)
            s = cap_out * t
        elif NATURAL:
            s = s * cap_in
        if slope is not None:
            s = s - slope * tl.abs(diagonal[:, None] - (j + tl.arange(0, N))[None, :]).to(tl.float32)
        if SCORE_MOD is not None:
            before = s
            s = SCORE_MOD(before, entry, head, q_idx[:, None], kv_idx[None, :], *aux)
            s = tl.broadcast_to(s, before.shape)
        p = tl.exp2(s * qk_scale - row_lse[:, None])
        dp, _, _ = dot_rows(do_tile, do_tile2, v, v2, batch, row, head_kv, v_sb, v_ss, v_sh, left, head_dim_v,
                            N, DV, DV2, TMA, MASK, MASK_DV, PRECISION)  # fmt: skip
        ds = p * (dp - d[:, None])
        if SCORE_MOD is not None:
            ds = SCORE_MOD_GRAD(ds, before, entry, head, q_idx[:, None], kv_idx[None, :], *aux)
            ds = tl.where(p == 0.0, 0.0, ds)
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        if MASK_MOD is not None:
            ds = tl.where(MASK_MOD(entry, head, q_idx[:, None], kv_idx[None, :], *aux), ds, 0.0)
        if MASK:
            cols = j + tl.arange(0, N)
            seen = seen_keys(cols, diagonal, seqlen_k, window_left, window_right, LEFT, RIGHT)
            ds = tl.where(seen, ds, 0.0)
        ds = ds.to(k_tile.dtype)
        dq = dot(ds, k_tile, dq, PRECISION)
        if D2 > 0:
            dq2 = dot(ds, k_tile2, dq2, PRECISION)
    return dq, dq2


@triton.jit(
    do_not_specialize=["batches", "heads", "group", "seqlen_q", "seqlen_k", "heads_together", "window_left",
                       "window_right", "width", "full_width", "blocks_sb", "blocks_sh"]
)  # fmt: skip
def attention_backward_dq(
    q, k, k2, v, v2, do, lse2, delta, dq, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh, dq_sb, dq_ss, dq_sh, stat_sh,
    batches, heads, group, seqlen_q, seqlen_k, heads_together, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, qk_scale, cap_in, cap_out, alibi_slopes, alibi_sb, aux,
    counts, indices, width, full_counts, full_indices, full_width, blocks_sb, blocks_sh,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    BATCH: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    VARLEN: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_MOD_GRAD: tl.constexpr, MASK_MOD: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
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
        entry = tl.minimum(sequence, batches - 1)
    else:
        batch, head, m_block = dense_query_tile(pid, batches, heads, seqlen_q, heads_together, M)
        entry = batch
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
    row_lse = load_stat(lse2, batch_head, q_row0, m0, q_left, stat_sh, float("inf"), M, False, VARLEN)
    d = load_stat(delta, batch_head, q_row0, m0, q_left, stat_sh, 0.0, M, False, VARLEN)
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

    slope = alibi_slopes
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + entry * alibi_sb + head)
    q_idx = tl.maximum(tl.minimum(row, sq - 1), 0)  # sq is 0 where seqused_q is
    if KV_BLOCK > 0:
        for whole in tl.static_range(2):  # blocks of which some is seen, then whole ones
            if not whole or full_counts is not None:
                end, blocks = block_list(
                    full_counts if whole else counts, full_indices if whole else indices, batch, head, m0 // Q_BLOCK,
                    blocks_sb, blocks_sh, full_width if whole else width, KV_BLOCK,
                )  # fmt: skip
                acc, acc2 = _dq_step(
                    acc, acc2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv,
                    0, end, sk, diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, blocks,
                    N, D, D2, DV, DV2, TMA, TAIL, MASK_D, MASK_DV, LEFT, RIGHT, SOFTCAP, PRECISION,
                    SCORE_MOD, SCORE_MOD_GRAD, None if whole else MASK_MOD, KV_BLOCK,
                )  # fmt: skip
    else:
        edges = (lo, full_lo, full_hi, hi)
        for part in tl.static_range(3):  # masked, without a mask, masked
            if (part == 1) or (LEFT if part == 0 else TAIL):
                acc, acc2 = _dq_step(
                    acc, acc2, q_tile, q_tile2, do_tile, do_tile2, row_lse, d, k, k2, v, v2, batch, k_row0, head_kv,
                    edges[part], edges[part + 1], sk, diagonal, window_left, window_right,
                    qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, None,
                    N, D, D2, DV, DV2, TMA, part != 1, MASK_D, MASK_DV, LEFT, RIGHT, SOFTCAP, PRECISION,
                    SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, 0,
                )  # fmt: skip
    store_tile(dq, acc * softmax_scale, batch, q_row0 + m0, head, 0, dq_sb, dq_ss, dq_sh, rows - m0, head_dim,
               M, D, MASK_D)  # fmt: skip
    if D2 > 0:
        store_tile(dq, acc2 * softmax_scale, batch, q_row0 + m0, head, D, dq_sb, dq_ss, dq_sh, rows - m0,
                   head_dim - D, M, D2, MASK_D)  # fmt: skip
