"""Attention forward in plain Triton: one program per block of query rows, for any GPU and for the interpreter.

    q block (M rows) stays in registers or shared memory; the program walks over blocks of N keys and keeps the running
    maximum m, the running sum l and the unnormalised output acc (online softmax, in base 2 with the scale folded in).

                 keys ->   lo      full_lo            full_hi      hi
    rows m0..m0+M           | masked |   no mask at all  | masked |        blocks outside [lo, hi) are never touched

* Causal and windowed tiles are visited heaviest first, in groups of heads whose keys and values fit in L2.
* TMA path (capability 9.0 up, 16-byte aligned strides): K and V come through rank-4 host descriptors over the
  (batch, seqlen, heads, dim) view, zeros outside. Pointer path: everything else, with masks. Q and O always go through
  masked pointers: they move once, and a Q that came through such a descriptor would be kept in registers by Triton
  (64 of them at head_dim 256, enough to serialise the matrix instructions) instead of in shared memory.
* Packed sequences: the grid depends on shapes only, and each program finds its sequence itself (`find_sequence`), so
  nothing waits for the device. Rows of a neighbour may be loaded at the end of a sequence; scores of such keys are
  masked and their values zeroed, because 0 * NaN would poison the row.
* head_dim 192 is 128 + 64, 96 is 64 + 32, 72 is 64 + 16 ...: two accumulators instead of padding to a power of two
  (on Hopper no tile is narrower than 128 bytes: `narrowest_tile`).
* Sinks join the sum after the last block. ALiBi and score_mod work on natural scores, so the scale is no longer folded
  into the exponent. A block mask replaces the three ranges above by its two lists, partial blocks and whole ones; its
  last block may reach beyond the keys by more than a tile, hence TAIL. All of these are compile-time switches (a None,
  mostly): without them the machine code is what it was.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET, dot
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3.device import (
    LN2,
    LOG2E,
    block_list,
    dense_query_tile,
    dot_rows,
    find_sequence,
    join_sink,
    key_range,
    listed,
    load_tile,
    packed_lengths,
    seen_keys,
    store_tile,
    tanh,
)
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
from gpu_accel.flash_attention3.problem import FLOAT_DTYPES, Problem, effective_window

NAME = "portable"
KERNEL = "attention_forward (plain Triton)"
FEATURES = frozenset({
    "sinks", "alibi_slopes", "score_mod", "score_mod_grad", "mask_mod", "block_mask", "return_max_logits",
    "batch_invariant",
})  # fmt: skip


@triton.jit
def _attend(
    acc, acc2, l_i, m_i, q, q2, k, k2, v, v2, batch, k_row0, head_kv, lo, hi, seqlen_k, diagonal,
    window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, blocks,
    N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    TMA: tl.constexpr, MASK: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr, VARLEN: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, KV_BLOCK: tl.constexpr,
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
        s, _, _ = dot_rows(q, q2, k, k2, batch, row, head_kv, k_sb, k_ss, k_sh, left, head_dim,
                           N, D, D2, TMA, MASK, MASK_D, PRECISION)  # fmt: skip
        if SOFTCAP:
            s = cap_out * tanh(s * cap_in)
        elif NATURAL:
            s = s * cap_in
        if slope is not None:
            s = s - slope * tl.abs(diagonal[:, None] - (j + tl.arange(0, N))[None, :]).to(tl.float32)
        if MODIFIED:
            kv_idx = tl.minimum(j + tl.arange(0, N), seqlen_k - 1)
        if SCORE_MOD is not None:
            s = tl.broadcast_to(SCORE_MOD(s, entry, head, q_idx[:, None], kv_idx[None, :], *aux), s.shape)
        if MASK_MOD is not None:
            s = tl.where(MASK_MOD(entry, head, q_idx[:, None], kv_idx[None, :], *aux), s, float("-inf"))
        if MASK:
            cols = j + tl.arange(0, N)
            seen = seen_keys(cols, diagonal, seqlen_k, window_left, window_right, LEFT, RIGHT)
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        m_use = m_new
        if MASK or MODIFIED:  # a row that has seen nothing yet: -inf - -inf would be NaN
            m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * qk_scale - m_use[:, None])
        alpha = tl.exp2(m_i - m_use)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        acc = acc * alpha[:, None]
        v_tile = load_tile(v, batch, row, head_kv, 0, v_sb, v_ss, v_sh, left, head_dim_v, N, DV, TMA, MASK, MASK_DV)
        if MASK and TMA and VARLEN:
            v_tile = tl.where(tl.arange(0, N)[:, None] < left, v_tile, 0.0)
        p = p.to(v_tile.dtype)
        acc = dot(p, v_tile, acc, PRECISION)
        if DV2 > 0:
            acc2 = acc2 * alpha[:, None]
            v_tile2 = load_tile(
                v2, batch, row, head_kv, DV, v_sb, v_ss, v_sh, left, head_dim_v - DV, N, DV2, TMA, MASK, MASK_DV
            )
            if MASK and TMA and VARLEN:
                v_tile2 = tl.where(tl.arange(0, N)[:, None] < left, v_tile2, 0.0)
            acc2 = dot(p, v_tile2, acc2, PRECISION)
    return acc, acc2, l_i, m_i


@triton.jit(
    do_not_specialize=["batches", "heads", "group", "seqlen_q", "seqlen_k", "heads_together", "window_left",
                       "window_right", "lse_sb", "lse_sh", "blocks_sb", "blocks_sh", "width", "full_width"]
)  # fmt: skip
def attention_forward(
    q, k, k2, v, v2, o, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
    q_sb, q_ss, q_sh, k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, o_sb, o_ss, o_sh, lse_sb, lse_sh,
    batches, heads, group, seqlen_q, seqlen_k, heads_together, head_dim, head_dim_v,
    window_left, window_right, qk_scale, cap_in, cap_out,
    sinks, row_max, alibi_slopes, alibi_sb, aux,
    counts, indices, width, full_counts, full_indices, full_width, blocks_sb, blocks_sh,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    BATCH: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr, MASK_D: tl.constexpr, MASK_DV: tl.constexpr,
    VARLEN: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
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

    q_left = rows - m0
    q_tile = load_tile(q, batch, q_row0 + m0, head, 0, q_sb, q_ss, q_sh, q_left, head_dim, M, D, False, True, MASK_D)
    q_tile2 = q_tile
    if D2 > 0:
        q_tile2 = load_tile(
            q, batch, q_row0 + m0, head, D, q_sb, q_ss, q_sh, q_left, head_dim - D, M, D2, False, True, MASK_D
        )
    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    acc2 = l_i
    if DV2 > 0:
        acc2 = tl.zeros([M, DV2], tl.float32)

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
                acc, acc2, l_i, m_i = _attend(
                    acc, acc2, l_i, m_i, q_tile, q_tile2, k, k2, v, v2, batch, k_row0, head_kv, 0, end, sk, diagonal,
                    window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, blocks,
                    N, D, D2, DV, DV2, TMA, TAIL, MASK_D, MASK_DV, VARLEN,
                    LEFT, RIGHT, SOFTCAP, PRECISION, SCORE_MOD, None if whole else MASK_MOD, KV_BLOCK,
                )  # fmt: skip
    else:
        edges = (lo, full_lo, full_hi, hi)
        for part in tl.static_range(3):  # masked, without a mask, masked
            if (part == 1) or (LEFT if part == 0 else TAIL):
                acc, acc2, l_i, m_i = _attend(
                    acc, acc2, l_i, m_i, q_tile, q_tile2, k, k2, v, v2, batch, k_row0, head_kv,
                    edges[part], edges[part + 1], sk, diagonal,
                    window_left, window_right, qk_scale, cap_in, cap_out, head_dim, head_dim_v,
                    k_sb, k_ss, k_sh, v_sb, v_ss, v_sh, slope, entry, head, q_idx, aux, None,
                    N, D, D2, DV, DV2, TMA, part != 1, MASK_D, MASK_DV, VARLEN,
                    LEFT, RIGHT, SOFTCAP, PRECISION, SCORE_MOD, MASK_MOD, 0,
                )  # fmt: skip

    if USED_Q:  # rows that are allocated but unused: as if they saw nothing
        used = row < sq
        acc = tl.where(used[:, None], acc, 0.0)
        if DV2 > 0:
            acc2 = tl.where(used[:, None], acc2, 0.0)
        l_i = tl.where(used, l_i, 0.0)
        m_i = tl.where(used, m_i, float("-inf"))
    if row_max is not None:
        row_max_rows = row_max + batch.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + q_row0 + row
        tl.store(row_max_rows, m_i * LN2, mask=row < rows)
    if sinks is not None:
        exists = row < sq
        if VARLEN:
            exists = exists & (sequence < batches)
        m_i, l_i, rescale = join_sink(m_i, l_i, tl.load(sinks + head) * LOG2E, exists)
        acc = acc * rescale[:, None]
        if DV2 > 0:
            acc2 = acc2 * rescale[:, None]
    total = tl.where(l_i == 0.0, 1.0, l_i)  # not "l > 0": NaN has to stay NaN
    inverse = 1.0 / total
    store_tile(o, acc * inverse[:, None], batch, q_row0 + m0, head, 0, o_sb, o_ss, o_sh, q_left, head_dim_v,
               M, DV, MASK_DV)  # fmt: skip
    if DV2 > 0:
        store_tile(o, acc2 * inverse[:, None], batch, q_row0 + m0, head, DV, o_sb, o_ss, o_sh, q_left,
                   head_dim_v - DV, M, DV2, MASK_DV)  # fmt: skip
    lse_rows = lse + batch.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + q_row0 + row
    tl.store(lse_rows, (m_i + tl.log2(total)) * LN2, mask=row < rows)


def refuse(problem: Problem) -> str | None:
    """Why the plain-Triton kernels cannot run this, or None."""
    if problem.device_type == "cpu" and not INTERPRET:
        return (
            "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before gpu_accel is imported, "
            "move the tensors to a GPU, or use backend='reference'"
        )
    if problem.device_type not in ("cpu", "cuda", "xpu"):  # xpu, Intel: meant to run, not tried
        return f"device {problem.device_type!r} is not one that Triton compiles for here"
    if problem.dtype not in FLOAT_DTYPES or problem.dtype == torch.float64:
        return f"dtype {problem.dtype} is not float16, bfloat16 or float32"
    if problem.capability is not None and problem.capability < (8, 0):
        return f"compute capability {problem.capability[0]}.{problem.capability[1]} is below 8.0"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8 or not 8 <= dim <= 256:
            return f"{name} {dim} is not a multiple of 8 from 8 to 256"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    features: Features | None = None,
    config: configs.Config | None = None,
    path: str | None = None,
) -> tuple[Tensor, ...]:
    """Launch. Inputs are already validated; last strides are 1; `window_right` 0 is causal.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens_*`.
        features: sinks, biases, modifiers, block masks; validated.
        config: tile sizes and warps; default: the tuned table. path: "tma" or "pointer"; default: tma where possible.

    Returns:
        o like q with the head_dim of v, contiguous; lse float32 (batch, heads, seqlen_q) or (heads, total_q); with
        `features.return_max_logits` also the largest score of each head, (heads,) float32.
    """
    features = features or NONE
    varlen = cu_seqlens_q is not None
    if varlen:
        batches = cu_seqlens_q.shape[0] - 1
        q4, k4, v4 = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    else:
        batches = q.shape[0]
        q4, k4, v4 = q, k, v
    q4, k4, v4 = aligned(q4), aligned(k4), aligned(v4)
    (_, sq, heads, head_dim), (_, sk, heads_kv, head_dim_v) = q4.shape, v4.shape
    o = torch.empty((*q.shape[:-1], head_dim_v), dtype=q.dtype, device=q.device)
    lse_shape = (heads, sq) if varlen else (batches, heads, sq)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    row_max = torch.empty_like(lse) if features.return_max_logits else None
    if lse.numel() == 0 or batches == 0 or (sk == 0 and features.sinks is None):
        o, lse = o.zero_(), lse.fill_(float("-inf"))
        return (o, lse) if row_max is None else (o, lse, lse.new_full((heads,), float("-inf")))
    pinned = features.batch_invariant  # no choice below may depend on how long the tensors are
    if not varlen and not pinned:
        window_left, window_right = effective_window(window_left, window_right, sq, sk)
    if config is None:
        config = configs.lookup("forward", q.dtype, head_dim, head_dim_v, causal=window_right == 0, seqlen_q=sq,
                                varlen=varlen or pinned, device=q.device)  # fmt: skip
        config = configs.within_blocks(config, *features.block_size)
    m, n = config.block_m, config.block_n
    tma = path == "tma" or (path is None and tma_refusal(q4, k4, v4) is None)
    tma = tma and sk > 0
    (d, d2), (dv, dv2) = (split_dim(dim, narrowest_tile(q)) for dim in (head_dim, head_dim_v))
    o4, lse3 = (o.unsqueeze(0), lse.unsqueeze(0)) if varlen else (o, lse)
    together = heads_per_group(k4, v4, heads // heads_kv) if window_right >= 0 else 1
    tiles = (triton.cdiv(sq, m) + batches) * heads if varlen else triton.cdiv(sq, m) * heads * batches
    scales = score_scales(softmax_scale, softcap, features)

    arguments = (
        q4, *operands(k4, n, d, d2, tma), *operands(v4, n, dv, dv2, tma), o4, lse3,
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        *compact_strides(q4), *compact_strides(k4), *compact_strides(v4), *compact_strides(o4),
        lse3.stride(0), lse3.stride(1),
        batches, heads, heads // heads_kv, sq, sk, together, head_dim, head_dim_v,
        window_left, window_right, *scales, features.sinks, row_max, *bias_arguments(features),
        *block_arguments(features.block_lists[:4]),
    )  # fmt: skip
    options = dict(
        M=m, N=n, D=d, D2=d2, DV=dv, DV2=dv2, BATCH=next_power_of_2(batches + 1) if varlen else 1,
        TMA=tma, TAIL=varlen or pinned or window_right >= 0 or sk % max(n, features.block_size[1]) != 0,
        MASK_D=d + d2 != head_dim, MASK_DV=dv + dv2 != head_dim_v,
        VARLEN=varlen, USED_Q=seqused_q is not None, USED_K=seqused_k is not None,
        LEFT=window_left >= 0, RIGHT=window_right >= 0, SOFTCAP=softcap > 0,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        SCORE_MOD=device_function(features.score_mod), MASK_MOD=device_function(features.mask_mod),
        Q_BLOCK=features.block_size[0], KV_BLOCK=features.block_size[1],
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    launch(attention_forward, tiles, arguments, options)
    if row_max is None:
        return o, lse
    return o, lse, row_max.amax(-1) if varlen else row_max.amax((0, 2))
