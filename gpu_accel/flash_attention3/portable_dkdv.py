"""Gradients of k and v in plain Triton: step 2 of `portable_backward.py`.

One program per block of N keys and key head, walking over the blocks of M query rows that see them, for every query
head of the group. Everything is transposed, (keys, rows), so that left operands need no transposition in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot
from gpu_accel.flash_attention3.device import (
    block_list,
    dot_rows,
    find_sequence,
    listed,
    load_stat,
    load_tile,
    store_tile,
    tanh,
)


@triton.jit
def _dkdv_step(
    dk, dk2, dv, dv2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2, lse2, delta, batch_head, stat_sh, batch,
    q_row0, head, lo, hi, seqlen_q, key_diagonal, window_left, window_right, qk_scale, cap_in, cap_out,
    head_dim, head_dim_v, q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, slope, entry, kv_idx, aux, blocks,
    M: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    TMA: tl.constexpr, MASK: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr, VARLEN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_MOD_GRAD: tl.constexpr, MASK_MOD: tl.constexpr, Q_BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk over the query rows [lo, hi), of the listed blocks if there is a list, in blocks of M."""
    NATURAL: tl.constexpr = (slope is not None) or (SCORE_MOD is not None)
    MODIFIED: tl.constexpr = (SCORE_MOD is not None) or (MASK_MOD is not None)
    for i in tl.range(lo, hi, M):
        if Q_BLOCK > 0:
            i = listed(i, blocks, Q_BLOCK)
        i = tl.multiple_of(i, M)  # true wherever the loop runs at all; the compiler cannot see it through the bounds
        row = q_row0 + i
        left = seqlen_q - i
        st, q_tile, q_tile2 = dot_rows(k_tile, k_tile2, q, q2, batch, row, head, q_sb, q_ss, q_sh, left, head_dim,
                                       M, D, D2, TMA, True, MASK_D, PRECISION)  # fmt: skip
        row_lse = load_stat(lse2, batch_head, q_row0, i, left, stat_sh, float("inf"), M, TMA, VARLEN)
        if MODIFIED:
            q_idx = tl.minimum(i + tl.arange(0, M), seqlen_q - 1)
        if SOFTCAP:
            t = tanh(st * cap_in)
            st = cap_out * t
        elif NATURAL:
            st = st * cap_in
        if slope is not None:
            st = st - slope * tl.abs((i + tl.arange(0, M))[None, :] - key_diagonal[:, None]).to(tl.float32)
        if SCORE_MOD is not None:
            before = st
            st = SCORE_MOD(before, entry, head, q_idx[None, :], kv_idx[:, None], *aux)
            st = tl.broadcast_to(st, before.shape)
        pt = tl.exp2(st * qk_scale - row_lse[None, :])
        if MASK_MOD is not None:
            pt = tl.where(MASK_MOD(entry, head, q_idx[None, :], kv_idx[:, None], *aux), pt, 0.0)
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
        d = load_stat(delta, batch_head, q_row0, i, left, stat_sh, 0.0, M, TMA, VARLEN)
        dst = pt * (dpt - d[None, :])
        if SCORE_MOD is not None:
            dst = SCORE_MOD_GRAD(dst, before, entry, head, q_idx[None, :], kv_idx[:, None], *aux)
            dst = tl.where(pt == 0.0, 0.0, dst)
        if SOFTCAP:
            dst = dst * (1.0 - t * t)
        dst = dst.to(q_tile.dtype)
        dk = dot(dst, q_tile, dk, PRECISION)
        if D2 > 0:
            dk2 = dot(dst, q_tile2, dk2, PRECISION)
    return dk, dk2, dv, dv2


@triton.jit(
    do_not_specialize=["batches", "heads_kv", "group", "seqlen_q", "seqlen_k", "window_left", "window_right",
                       "width", "full_width", "blocks_sb", "blocks_sh"]
)  # fmt: skip
def attention_backward_dkdv(
    q, q2, k, v, do, do2, lse2, delta, dk, dv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, do_sb, do_ss, do_sh,
    dk_sb, dk_ss, dk_sh, dv_sb, dv_ss, dv_sh, stat_sh,
    batches, heads_kv, group, seqlen_q, seqlen_k, head_dim, head_dim_v,
    window_left, window_right, softmax_scale, qk_scale, cap_in, cap_out, alibi_slopes, alibi_sb, aux,
    counts, indices, width, full_counts, full_indices, full_width, blocks_sb, blocks_sh,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    BATCH: tl.constexpr, TMA: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    VARLEN: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, SCORE_MOD_GRAD: tl.constexpr, MASK_MOD: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
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
        entry = tl.minimum(sequence, batches - 1)
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
        entry = batch
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

    kv_idx = tl.minimum(keys, sk - 1)
    for g in range(0, group):
        head = head_kv * group + g
        batch_head = batch * heads_kv * group + head
        slope = alibi_slopes
        if alibi_slopes is not None:
            slope = tl.load(alibi_slopes + entry * alibi_sb + head)
        if Q_BLOCK > 0:
            for whole in tl.static_range(2):  # blocks of which some is seen, then whole ones
                if not whole or full_counts is not None:
                    end, blocks = block_list(
                        full_counts if whole else counts, full_indices if whole else indices, batch, head,
                        n0 // KV_BLOCK, blocks_sb, blocks_sh, full_width if whole else width, Q_BLOCK,
                    )  # fmt: skip
                    dk_acc, dk_acc2, dv_acc, dv_acc2 = _dkdv_step(
                        dk_acc, dk_acc2, dv_acc, dv_acc2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2,
                        lse2, delta, batch_head, stat_sh, batch, q_row0, head, 0, end, sq, key_diagonal,
                        window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                        q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, slope, entry, kv_idx, aux, blocks,
                        M, D, D2, DV, DV2, TMA, False, MASK_D, MASK_DV, VARLEN, LEFT, RIGHT, SOFTCAP, PRECISION,
                        SCORE_MOD, SCORE_MOD_GRAD, None if whole else MASK_MOD, Q_BLOCK,
                    )  # fmt: skip
        else:
            edges = (lo, full_lo, full_hi, hi)
            for part in tl.static_range(3):  # masked, without a mask, masked
                if (part == 1) or (RIGHT if part == 0 else LEFT):
                    dk_acc, dk_acc2, dv_acc, dv_acc2 = _dkdv_step(
                        dk_acc, dk_acc2, dv_acc, dv_acc2, k_tile, k_tile2, v_tile, v_tile2, q, q2, do, do2,
                        lse2, delta, batch_head, stat_sh, batch, q_row0, head, edges[part], edges[part + 1],
                        sq, key_diagonal, window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                        q_sb, q_ss, q_sh, do_sb, do_ss, do_sh, slope, entry, kv_idx, aux, None,
                        M, D, D2, DV, DV2, TMA, part != 1, MASK_D, MASK_DV, VARLEN, LEFT, RIGHT, SOFTCAP, PRECISION,
                        SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, 0,
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
