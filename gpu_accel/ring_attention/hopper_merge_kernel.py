"""The Hopper forward with a merge in its epilogue: it takes and returns (o, lse) in float32.

Main loop, producer, barriers and partitions are those of `flash_attention3/hopper_forward.py`: read its head first.
What differs is where a tile of 64 rows ends:

    o_new = acc / l,  lse_new                         of the keys of this call
    o, lse = merge of (o_new, lse_new) with (o, lse)  of the keys before, from global memory, straight into registers
    rows that meet no more keys                       leave rounded, through shared memory and TMA, to the result
    all others                                        stay in float32, straight from registers

So a step of a ring reads and writes o once, under the products of the other warpgroup, and no pass over o is left
outside the kernel. FIRST: nothing was computed before, and o and lse are only written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.flash_attention3.hopper_device import (
    LN_2,
    LOG2_E,
    PLACE,
    bar_arrive_at,
    bar_sync_at,
    issue_product,
    key_blocks,
    mask_ends,
    pack_pairs,
    publish_place,
    publish_tile,
    receive_place,
    receive_tile,
    release,
    rewind,
    store_whole,
    tile_of,
    unpack_pairs,
)
from gpu_accel.flash_attention3.hopper_handover import (
    KV_FREE,
    Q_FREE,
    allocate_bars,
    draw_early,
    draw_late,
    pass_turn,
    ready_bars,
    take_last_arrivals,
    take_turn,
    wait_free,
)
from gpu_accel.flash_attention3.hopper_steps import first_softmax, step
from gpu_accel.gluon_compat import tma_load

ROWS = gl.constexpr(64)  # query rows of one consumer: the M of wgmma

# Beside the `shape` and `scales` of hopper_forward.py:
#   outputs = (result, o_ptr, lse_ptr, total, done_lo, done_hi): the map of the result; o (batch, total, heads,
#             head_dim) and lse (batch, heads, total) from the first row of this call on; rows of it done afterwards


@gluon.jit
def _store_merged(
    acc, m_i, l_i, o_bufs, outputs, batch, head, row0, shape, scales,
    WG: gl.constexpr, FIRST: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    result, o_ptr, lse_ptr, total, done_lo, done_hi = outputs
    seqlen_q, _, heads, _, _, _, _, _, _ = shape
    _, exp_scale, _ = scales
    DIM: gl.constexpr = acc.shape[1]
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), ROW_LAYOUT)
    m_row = gl.convert_layout(m_i, ROW_LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    here = rows < seqlen_q
    empty = l_row == 0.0
    lse = gl.where(empty, float("-inf"), m_row * exp_scale + gl.log2(l_row))
    factor = gl.where(empty, 0.0, 1.0 / l_row)
    if row0 < seqlen_q:
        lse_at = lse_ptr + ((batch * heads + head).to(gl.int64) * total + rows)
        cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc.type.layout))
        o_row = ((batch.to(gl.int64) * total + rows) * heads + head) * DIM
        o_at = o_ptr + (o_row[:, None] + cols[None, :])
        if FIRST:
            acc = acc * factor[:, None]
        else:
            old = gl.load(lse_at, mask=here, other=float("-inf")) * LOG2_E
            top = gl.maximum(lse, old)
            top = gl.where(top == float("-inf"), 0.0, top)
            new_weight = gl.exp2(lse - top)
            old_weight = gl.exp2(old - top)
            both = new_weight + old_weight
            share = gl.where(both == 0.0, 0.0, 1.0 / both)
            # rows that have seen nothing may hold anything: they are not read
            before = gl.load(o_at, mask=(here & (old > float("-inf")))[:, None], other=0.0)
            acc = acc * (factor * new_weight * share)[:, None] + before * (old_weight * share)[:, None]
            lse = top + gl.log2(both)
        gl.store(lse_at, lse * LN_2, mask=here)
        if (row0 >= done_lo) & ((row0 + ROWS <= done_hi) | (done_hi >= seqlen_q)):
            store_whole(acc, o_bufs, result, batch, head, row0, WG)
        else:
            gl.store(o_at, acc, mask=here[:, None])


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, outputs, shape, scales,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, LAZY: gl.constexpr, FIRST: gl.constexpr, SEAMLESS: gl.constexpr,
):  # fmt: skip
    """As `_consumer` of hopper_forward.py, for tensors that are not packed and two slots of Q or more."""
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, _, _, _, num_tiles, _, left, right = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    FREE: gl.constexpr = 128 * CONSUMERS + 32  # all consumers and the producer
    KV_BARRIER: gl.constexpr = KV_FREE if SEAMLESS else None
    PLACED: gl.constexpr = SEAMLESS and DYNAMIC
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_bufs.shape[2], 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    dtype: gl.constexpr = q_bufs.dtype
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    if WG == CONSUMERS - 1:
        pass_turn(WG, CONSUMERS, PING_PONG)
    m_block, batch, head = tile_of(tile, shape, CAUSAL)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    take_turn(WG, PING_PONG)
    s = issue_product(q_bufs.index(WG), k_bufs.index(0).permute((1, 0)), S_LAYOUT)
    pass_turn(WG, CONSUMERS, PING_PONG)
    s = warpgroup_mma_wait(0, deps=[s])
    release(kv_empty, 0, KV_BARRIER, FREE)
    p, m_i, l_i = first_softmax(s, hi - 1, 2, m_block * BLOCK_M + WG * ROWS, shape, scales, (batch, head), (),
                                CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)  # fmt: skip
    p_packed = pack_pairs(p, dtype)
    while tile < num_tiles:
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % Q_SLOTS) * CONSUMERS + WG
        q = q_bufs.index(slot)
        q_phase = (k // Q_SLOTS) & 1
        first, left_end = mask_ends(row0, ROWS, shift, lo, hi, left, right, BLOCK_N, CAUSAL, WINDOW)
        acc = gl.full([ROWS, v_bufs.shape[2]], 0.0, gl.float32, O_LAYOUT)
        for j in range(0, hi - 1 - lo):
            block = hi - 2 - j
            acc, p_packed, m_i, l_i, it = step(
                q, k_bufs, v_bufs, bars, q_full.index(slot), q_phase, acc, p_packed, m_i, l_i, it,
                block, 2, (block >= first) | (block < left_end), row0, shape, scales, (batch, head), (),
                WG, CONSUMERS, STAGES, PING_PONG, CAUSAL, WINDOW, SOFTCAP, CAUSAL or WINDOW, LAZY, SEAMLESS,
                S_LAYOUT, P_LAYOUT, ROW_LAYOUT)  # fmt: skip
        if SEAMLESS:
            mbarrier.wait(v_full.index(it % STAGES), (it // STAGES) & 1)
            take_turn(WG, PING_PONG)
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            acc_async = warpgroup_mma(p_a, v_bufs.index(it % STAGES), acc, is_async=True)
        else:
            mbarrier.arrive(q_empty.index(slot), count=1)
        m_done, l_done, batch_done, head_done = m_i, l_i, batch, head
        if PLACED:
            tile, m_block, batch, head = receive_place(k, queue, queue_full)
        elif DYNAMIC:
            tile = receive_tile(k, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        if SEAMLESS:  # says of the queue's entry too that it has been read
            bar_arrive_at(Q_FREE + k % Q_SLOTS, FREE)
        k += 1
        v_stage = it % STAGES
        v_phase = (it // STAGES) & 1
        it += 1
        stage = it % STAGES
        k_phase = (it // STAGES) & 1
        if SEAMLESS:
            # P V is in flight: no branch before it is done, so after the last tile S of stale buffers is computed.
            more = tile < num_tiles
            if not PLACED:
                m_block, batch, head = tile_of(tile, shape, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            next_row0 = m_block * BLOCK_M + WG * ROWS
            mbarrier.wait(q_full.index(slot), (k // Q_SLOTS) & 1, pred=more)
            mbarrier.wait(k_full.index(stage), k_phase, pred=more)
            s_async = issue_product(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
            pass_turn(WG, CONSUMERS, PING_PONG)
            acc = warpgroup_mma_wait(1, deps=[acc_async])
            _store_merged(acc, m_done, l_done, o_bufs, outputs, batch_done, head_done, row0, shape, scales,
                          WG, FIRST, ROW_LAYOUT)  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s_async])
            release(kv_empty, stage, KV_BARRIER, FREE)
            p, m_i, l_i = first_softmax(s, hi - 1, 2, next_row0, shape, scales, (batch, head), (),
                                        CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)  # fmt: skip
            p_packed = pack_pairs(p, dtype)
        elif tile < num_tiles:
            m_block, batch, head = tile_of(tile, shape, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            q_phase = (k // Q_SLOTS) & 1
            next_row0 = m_block * BLOCK_M + WG * ROWS
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            mbarrier.wait(q_full.index(slot), q_phase)
            mbarrier.wait(k_full.index(stage), k_phase)
            take_turn(WG, PING_PONG)
            s_async = issue_product(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
            pass_turn(WG, CONSUMERS, PING_PONG)
            s = warpgroup_mma_wait(1, deps=[s_async])
            p, m_i, l_i = first_softmax(s, hi - 1, 2, next_row0, shape, scales, (batch, head), (),
                                        CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)  # fmt: skip
            mbarrier.wait(q_full.index(slot), q_phase)
            acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
            release(kv_empty, stage, KV_BARRIER, FREE)
            p_packed = pack_pairs(p, dtype)
        else:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_async])
        if not SEAMLESS:
            _store_merged(acc, m_done, l_done, o_bufs, outputs, batch_done, head_done, row0, shape, scales,
                          WG, FIRST, ROW_LAYOUT)  # fmt: skip
    tma.store_wait(0)
    if WG == 0:
        take_turn(WG, PING_PONG)


@gluon.jit
def _producer(
    bufs, bars, q_desc, k_desc, v_desc, counter, shape,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, SEAMLESS: gl.constexpr,
):  # fmt: skip
    """As `_producer` of hopper_forward.py, for the same."""
    q_bufs, k_bufs, v_bufs, _ = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    _, _, _, heads_per_kv, _, num_tiles, _, _, _ = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    FREE: gl.constexpr = 128 * CONSUMERS + 32
    KV_BARRIER: gl.constexpr = KV_FREE if SEAMLESS else None
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
            early = draw_early(counter, hi - lo)
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
            wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, kv, (hi - 2 - j) * BLOCK_N, 0], k_full.index(stage), k_bufs.index(stage))
            mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, (hi - 1 - j) * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))
        v_stage = it % STAGES
        v_batch = batch
        it += 1
        if DYNAMIC:
            tile = draw_late(early, counter, hi - lo)
            if PLACED:
                m_block, batch, head = tile_of(tile, shape, CAUSAL)
                publish_place(k, tile, (m_block, batch, head), queue, queue_full)
            else:
                publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
        mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [v_batch, kv, lo * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))
    if SEAMLESS:
        take_last_arrivals(it, k, STAGES, Q_SLOTS, FREE)
    if DYNAMIC:
        rewind(counter, tile, num_tiles)


@gluon.jit(
    do_not_specialize=[
        "total",
        "done_lo",
        "done_hi",
        "seqlen_q",
        "seqlen_k",
        "heads",
        "heads_per_kv",
        "num_m",
        "num_tiles",
        "group",
        "left",
        "right",
    ]
)
def attention_merge_kernel(
    q_desc, k_desc, v_desc, result_desc, o_ptr, lse_ptr, counter, total, done_lo, done_hi,
    seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, scale, exp_scale, softcap,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, LAZY: gl.constexpr, FIRST: gl.constexpr, SEAMLESS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """`o_ptr` (batch, total, heads, HEAD_DIM) and `lse_ptr` (batch, heads, total), float32, at the first row of q."""
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], K_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], K_LAYOUT)
    o_bufs = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    bars = allocate_bars(Q_SLOTS * CONSUMERS, STAGES, 2 * PLACE)
    ready_bars(bars, CONSUMERS, DYNAMIC, not SEAMLESS, not SEAMLESS)
    gl.static_assert(not SEAMLESS or (Q_SLOTS == 2 and STAGES <= 4))
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (scale, exp_scale, softcap)
    outputs = (result_desc, o_ptr, lse_ptr, total, done_lo, done_hi)
    gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out. The last
    # partition is the producer.
    gl.warp_specialize([
        (_consumer, (part, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                     PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS))
        if part < CONSUMERS else
        (_producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, CONSUMERS, BLOCK_N, STAGES,
                     Q_SLOTS, CAUSAL, WINDOW, DYNAMIC, SEAMLESS))
        for part in ((0, 1, 2) if CONSUMERS == 2 else (0, 1, 2, 3))
    ], [4, 1] if CONSUMERS == 2 else [4, 4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS] if CONSUMERS == 2 else
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
