"""One block of keys, and the producer, of the Hopper forward that merges: dense tensors only, in Gluon.

The inner loop is that of `flash_attention3/hopper_forward.py`, which explains it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.flash_attention3.hopper_device import (
    NEG_LARGE,
    bar_arrive,
    bar_sync,
    bar_sync_at,
    draw,
    key_blocks,
    mask_columns,
    mask_left,
    mask_right,
    pack_pairs,
    publish_place,
    publish_tile,
    release,
    rescale,
    tanh,
    thread_row_sum,
    tile_of,
    unpack_pairs,
)
from gpu_accel.gluon_compat import tma_load

PING_PONG_BARRIER = gl.constexpr(8)  # and 9
Q_FREE = gl.constexpr(10)  # and 11: a slot of Q, with all consumers' rows, has been read (SEAMLESS)
KV_FREE = gl.constexpr(12)  # to 15: a stage of K, and the one before of V, have been read (SEAMLESS)
EARLY_DRAW = gl.constexpr(4)  # key blocks of a tile up to which the next tile is drawn at its start
ROWS = gl.constexpr(64)  # query rows of one consumer: the M of wgmma


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
def first_softmax(
    s, block, row0, shape, scales,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """P, row maximum and thread-wise row sum of the first block of a tile."""
    scale, exp_scale, softcap = scales
    if SOFTCAP:
        s = softcap * tanh(s * scale)
    if MASK:
        s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
    m = gl.maximum(gl.max(s, axis=1), NEG_LARGE)
    p = gl.exp2(s * exp_scale - (m * exp_scale)[:, None])
    return p, m, thread_row_sum(p)


@gluon.jit
def step(
    q, k_bufs, v_bufs, bars, opened, opened_phase, acc, p_packed, m_i, l_i, it, block, masked, row0, shape, scales,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, LAZY: gl.constexpr, SEAMLESS: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One key block: issue S of this block, then P V of the block before, then softmax of this block under both."""
    _, _, k_full, v_full, kv_empty, _, _, _ = bars
    scale, exp_scale, softcap = scales
    v_stage = it % STAGES
    v_phase = (it // STAGES) & 1
    it += 1
    stage = it % STAGES
    mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
    if PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)
    zero = gl.full([ROWS, k_bufs.shape[1]], 0.0, gl.float32, S_LAYOUT)
    s_async = warpgroup_mma(q, k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    p_a = unpack_pairs(p_packed, q.dtype, P_LAYOUT)
    acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
    if PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=[s_async])
    if SOFTCAP:
        s = softcap * tanh(s * scale)
    if CAUSAL or WINDOW:  # noqa: SIM102
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
    mbarrier.wait(opened, opened_phase)  # completed long ago: opens the block that pins the exponentials above the wait
    acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
    release(kv_empty, stage, KV_FREE if SEAMLESS else None, 128 * CONSUMERS + 32)
    alpha = gl.convert_layout(alpha, ROW_LAYOUT)
    acc = rescale(acc, alpha) if LAZY else acc * alpha[:, None]
    return acc, pack_pairs(p, q.dtype), m_new, l_i, it


@gluon.jit
def _wait_free(kv_empty, it, STAGES: gl.constexpr, FREE: gl.constexpr, SEAMLESS: gl.constexpr):
    """Wait until block `it - STAGES`, whose K's stage block `it` takes, has been read. SEAMLESS: once an `it`."""
    if SEAMLESS:
        if it >= STAGES:
            bar_sync_at(KV_FREE + it % STAGES, FREE)
    else:
        mbarrier.wait(kv_empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)


@gluon.jit
def producer(
    bufs, bars, q_desc, k_desc, v_desc, counter, shape,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, SEAMLESS: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, _ = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    _, _, _, heads_per_kv, _, num_tiles, _, _, _ = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    FREE: gl.constexpr = 128 * CONSUMERS + 32
    PLACED: gl.constexpr = SEAMLESS and DYNAMIC
    it = 0
    k = 0
    tile = gl.program_id(0)
    m_block, batch, head = tile_of(tile, shape, CAUSAL)
    while tile < num_tiles:
        if not PLACED:
            m_block, batch, head = tile_of(tile, shape, CAUSAL)
        kv = head // heads_per_kv
        lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
        if DYNAMIC:
            early = draw(counter, hi - lo <= EARLY_DRAW)
        slot0 = (k % Q_SLOTS) * CONSUMERS
        q_phase = (k // Q_SLOTS) & 1
        for c in gl.static_range(CONSUMERS):
            slot = slot0 + c
            if not SEAMLESS:
                mbarrier.wait(q_empty.index(slot), q_phase ^ 1)
            elif c == 0:  # noqa: SIM102
                if k >= Q_SLOTS:
                    bar_sync_at(Q_FREE + k % Q_SLOTS, FREE)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, m_block * BLOCK_M + c * ROWS, 0], q_full.index(slot), q_bufs.index(slot))
            if c == 0:
                stage = it % STAGES
                if not SEAMLESS:  # waited for behind the tile before
                    mbarrier.wait(kv_empty.index(stage), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, [batch, kv, (hi - 1) * BLOCK_N, 0], k_full.index(stage), k_bufs.index(stage))
        for j in range(0, hi - 1 - lo):
            v_stage = it % STAGES
            it += 1
            stage = it % STAGES
            # one barrier frees both: K of a step is released after P V of the step before
            _wait_free(kv_empty, it, STAGES, FREE, SEAMLESS)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, kv, (hi - 2 - j) * BLOCK_N, 0], k_full.index(stage), k_bufs.index(stage))
            mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, (hi - 1 - j) * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))
        v_stage = it % STAGES
        v_batch = batch
        it += 1
        if DYNAMIC:
            tile = gl.max(early + draw(counter, hi - lo > EARLY_DRAW), axis=0) + gl.num_programs(0)
            if PLACED:
                m_block, batch, head = tile_of(tile, shape, CAUSAL)
                publish_place(k, tile, (m_block, batch, head), queue, queue_full)
            else:
                publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        _wait_free(kv_empty, it, STAGES, FREE, SEAMLESS)
        mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [v_batch, kv, lo * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))
    if SEAMLESS:
        # The last arrivals, which nobody waited for: named barriers end as they began.
        for i in range(gl.maximum(it + 1, STAGES), it + STAGES + 1):
            bar_sync_at(KV_FREE + i % STAGES, FREE)
        for i in range(gl.maximum(k, Q_SLOTS), k + Q_SLOTS):
            bar_sync_at(Q_FREE + i % Q_SLOTS, FREE)
    if DYNAMIC:  # noqa: SIM102
        # Each program draws one number past the end; the last of them resets the counter for the next launch.
        if tile == num_tiles + gl.num_programs(0) - 1:
            gl.store(counter, 0)
