"""What a consumer of the Hopper forward does with one block of keys and with a finished tile, in Gluon.

`step` is the inner loop of FlashAttention-3: S of this block and P V of the block before are issued together, and
softmax of this block runs under both. Rows come from shapes: 64 for one warpgroup, more where several share a tile.

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_device import (
    LN_2,
    LOG2_E,
    NEG_LARGE,
    issue_product,
    mask_columns,
    mask_left,
    mask_right,
    pack_pairs,
    release,
    rescale,
    store_whole,
    tanh,
    thread_row_sum,
    tile_of,
    unpack_pairs,
)
from .hopper_handover import KV_FREE, pass_turn, take_turn
from .hopper_modifiers import add_alibi, call_mask_mod, call_score_mod
from .hopper_packed import read_entry

# Run-time scalars travel in two tuples:
#   shape  = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
#   scales = (scale, exp_scale, softcap): scores * scale go into tanh under softcap or are what a bias or a score_mod
#            sees, logits * exp_scale into exp2
#   at     = (batch, query head), for modifiers; mods: see hopper_modifiers.py, () where there are none


@gluon.jit
def own_lengths(shape, used_q, used_k):
    """`shape` with the lengths of a tile's own sequence."""
    _, _, heads, heads_per_kv, num_m, num_tiles, group, left, right = shape
    return used_q, used_k, heads, heads_per_kv, num_m, num_tiles, group, left, right


@gluon.jit
def first_tile(tile, table, shape, CAUSAL: gl.constexpr, PACKED: gl.constexpr):
    """(query block, batch, head, first rows of q and k, rows of q, rows of q and of k that count) of tile `tile`."""
    if PACKED:
        _, _, _, _, num_m, _, _, _, _ = shape
        j, batch, head = tile_of(tile, shape, True)
        m_block, q_row0, k_row0, rows_q, used_q, used_k = read_entry(num_m - 1 - j, table, tile >= 0)
    else:
        seqlen_q, seqlen_k, _, _, _, _, _, _, _ = shape
        m_block, batch, head = tile_of(tile, shape, CAUSAL)
        q_row0, k_row0 = 0, 0
        rows_q, used_q, used_k = seqlen_q, seqlen_q, seqlen_k
    return m_block, batch, head, q_row0, k_row0, rows_q, used_q, used_k


@gluon.jit
def mask_block(s, block, row0, shape, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    seqlen_q, seqlen_k, _, _, _, _, _, left, right = shape
    shift = seqlen_k - seqlen_q
    col0 = block * s.shape[1]
    if CAUSAL:
        s = mask_right(s, row0 + shift + right - col0, seqlen_k - 1 - col0)
    else:
        s = mask_columns(s, seqlen_k - 1 - col0)
    if WINDOW:
        s = mask_left(s, row0 + shift - left - col0)
    return s


@gluon.jit
def modified(
    s, block, kind, row0, shape, scales, at, mods,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scores with soft cap, ALiBi, score_mod and mask_mod, in this order."""
    scale, _, softcap = scales
    seqlen_q, seqlen_k, _, _, _, _, _, _, _ = shape
    batch, head = at
    key0 = block * s.shape[1]
    if SOFTCAP:
        s = softcap * tanh(s * scale)
    elif ALIBI or SCORE_MOD is not None:
        s = s * scale
    if ALIBI:
        s = add_alibi(s, row0, key0, seqlen_k - seqlen_q, batch, head, mods, 0)
    if SCORE_MOD is not None:
        s = call_score_mod(s, row0, key0, seqlen_q - 1, seqlen_k - 1, batch, head, mods, SCORE_MOD, 0)
    if BLOCKS or MASK_MOD is not None:
        s = call_mask_mod(s, row0, key0, seqlen_q - 1, seqlen_k - 1, batch, head, mods, kind, float("-inf"), MASK_MOD,
                          BLOCKS, 0)  # fmt: skip
    return s


@gluon.jit
def first_softmax(
    s, block, kind, row0, shape, scales, at, mods,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr,
    ALIBI: gl.constexpr = False, SCORE_MOD: gl.constexpr = None, MASK_MOD: gl.constexpr = None,
    BLOCKS: gl.constexpr = False,
):  # fmt: skip
    """P, row maximum and thread-wise row sum of the first block of a tile."""
    _, exp_scale, _ = scales
    s = modified(s, block, kind, row0, shape, scales, at, mods, SOFTCAP, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)
    if MASK:
        s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
    m = gl.maximum(gl.max(s, axis=1), NEG_LARGE)
    p = gl.exp2(s * exp_scale - (m * exp_scale)[:, None])
    return p, m, thread_row_sum(p)


@gluon.jit
def step(
    q, k_bufs, v_bufs, bars, opened, opened_phase, acc, p_packed, m_i, l_i, it, block, kind, masked, row0, shape,
    scales, at, mods,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, LAZY: gl.constexpr,
    SEAMLESS: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, ROW_LAYOUT: gl.constexpr,
    PIPELINED: gl.constexpr = True, ALIBI: gl.constexpr = False, SCORE_MOD: gl.constexpr = None,
    MASK_MOD: gl.constexpr = None, BLOCKS: gl.constexpr = False,
):  # fmt: skip
    """One key block: issue S of this block, then P V of the block before, then softmax of this block under both.

    Without PIPELINED (for the ablation) each of the three waits for the one before.
    """
    _, _, k_full, v_full, kv_empty, _, _, _ = bars
    _, exp_scale, _ = scales
    v_stage = it % STAGES
    v_phase = (it // STAGES) & 1
    it += 1
    stage = it % STAGES
    mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
    take_turn(WG, PING_PONG)
    if PIPELINED:
        s_async = issue_product(q, k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        p_a = unpack_pairs(p_packed, q.dtype, P_LAYOUT)
        acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
        pass_turn(WG, CONSUMERS, PING_PONG)
        s = warpgroup_mma_wait(1, deps=[s_async])
    else:
        mbarrier.wait(v_full.index(v_stage), v_phase)
        p_a = unpack_pairs(p_packed, q.dtype, P_LAYOUT)
        acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
        acc_async = warpgroup_mma_wait(0, deps=[acc_async])
        s_async = issue_product(q, k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
        pass_turn(WG, CONSUMERS, PING_PONG)
        s = warpgroup_mma_wait(0, deps=[s_async])
    s = modified(s, block, kind, row0, shape, scales, at, mods, SOFTCAP, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)
    if MASK:  # noqa: SIM102 - a run-time branch inside a compile-time one
        if masked:
            s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
    m_new = gl.maximum(m_i, gl.max(s, axis=1))
    if LAZY:
        # A maximum that is up to 8 too small (in base 2) only makes P up to 256 times larger, and O / l stays the same.
        m_new = gl.where((m_new - m_i) * exp_scale > 8.0, m_new, m_i)
    alpha = gl.exp2((m_i - m_new) * exp_scale)
    p = gl.exp2(s * exp_scale - (m_new * exp_scale)[:, None])
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    l_i = l_i * alpha_l[:, None] + thread_row_sum(p)
    if PIPELINED:
        mbarrier.wait(opened, opened_phase)  # completed long ago: opens the block that pins softmax above the wait
        acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
    else:
        acc = acc_async
    release(kv_empty, stage, KV_FREE if SEAMLESS else None, 128 * CONSUMERS + 32)
    alpha = gl.convert_layout(alpha, ROW_LAYOUT)
    acc = rescale(acc, alpha) if LAZY else acc * alpha[:, None]
    return acc, pack_pairs(p, q.dtype), m_new, l_i, it


@gluon.jit
def store_tile(
    acc, m_i, l_i, o_bufs, outputs, where, row0, shape, scales, mods,
    WG: gl.constexpr, PACKED: gl.constexpr, SINKS: gl.constexpr, ROW_MAX: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """O = acc / l through shared memory and TMA, and LSE = m + log l; rows without keys give 0 and -inf.

    ROW_MAX: the rows' largest scores too, which LAZY would make too small.

    A sink is one more term of l, without a value; it is all of l in rows without keys.
    """
    ROWS: gl.constexpr = acc.shape[0]
    o_desc, o_ptr, lse_ptr, cols_v, sinks = outputs
    total_q, _, heads, _, _, _, _, _, _ = shape
    batch, head, q_row0, rows_q, used_q = where
    _, exp_scale, _ = scales
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), ROW_LAYOUT)
    m_row = gl.convert_layout(m_i, ROW_LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    m_row = m_row * exp_scale
    if ROW_MAX:
        _, _, _, row_max, _, _, _ = mods
        unseen = l_row == 0.0
        if PACKED:
            unseen = unseen | (rows >= used_q)
        largest = gl.where(unseen, float("-inf"), m_row * LN_2)
        max_offset = (batch * heads + head).to(gl.int64) * total_q + q_row0
        gl.store(row_max + max_offset + rows, largest, mask=rows < rows_q)
    if SINKS:
        sink = gl.load(sinks + head) * LOG2_E
        m_new = gl.maximum(m_row, sink)
        scale = gl.exp2(m_row - m_new)
        l_row = l_row * scale + gl.exp2(sink - m_new)
        m_row = m_new
    masked = l_row == 0.0
    if PACKED:
        masked = masked | (rows >= used_q)
    factor = gl.where(masked, 0.0, 1.0 / l_row)
    if SINKS:
        factor = factor * scale
    acc = acc * factor[:, None]
    if PACKED:
        # rows that don't count may have met NaN in q, and 0 times NaN is NaN
        acc = gl.where(masked[:, None], 0.0, acc)
    if row0 < rows_q:
        lse = gl.where(masked, float("-inf"), (m_row + gl.log2(l_row)) * LN_2)
        offset = (batch * heads + head).to(gl.int64) * total_q + q_row0
        gl.store(lse_ptr + offset + rows, lse, mask=rows < rows_q)
        if PACKED:
            if row0 + ROWS <= rows_q:
                store_whole(acc, o_bufs, o_desc, batch, head, q_row0 + row0, WG)
            else:
                # the rows behind the sequence's last are the next one's: no TMA
                cols = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
                o_rows = o_ptr + ((q_row0 + rows).to(gl.int64) * heads + head) * cols_v
                mask = (rows < rows_q)[:, None] & (cols < cols_v)[None, :]
                gl.store(o_rows[:, None] + cols[None, :], acc.to(o_bufs.dtype), mask=mask)
        else:
            store_whole(acc, o_bufs, o_desc, batch, head, row0, WG)
