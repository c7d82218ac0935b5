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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpu_accel.flash_attention3.hopper_device import (
    LN_2,
    PLACE,
    bar_arrive,
    bar_arrive_at,
    bar_sync,
    key_blocks,
    pack_pairs,
    receive_place,
    receive_tile,
    release,
    tile_of,
    unpack_pairs,
)
from gpu_accel.gluon_compat import tma_store
from gpu_accel.ring_attention.hopper_merge_steps import (
    KV_FREE,
    PING_PONG_BARRIER,
    Q_FREE,
    ROWS,
    first_softmax,
    producer,
    step,
)

LOG2_E = gl.constexpr(1.4426950408889634)

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
            tma.store_wait(0)
            o_bufs.index(WG).store(acc.to(o_bufs.dtype))
            fence_async_shared()
            tma_store(result, [batch, head, row0, 0], o_bufs.index(WG))
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
    if PING_PONG and WG == CONSUMERS - 1:
        bar_arrive(PING_PONG_BARRIER, 256)
    m_block, batch, head = tile_of(tile, shape, CAUSAL)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    if PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_bufs.index(WG), k_bufs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    if PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(0, deps=[s])
    release(kv_empty, 0, KV_FREE if SEAMLESS else None, FREE)
    p, m_i, l_i = first_softmax(
        s, hi - 1, m_block * BLOCK_M + WG * ROWS, shape, scales, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST
    )
    p_packed = pack_pairs(p, dtype)
    while tile < num_tiles:
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % Q_SLOTS) * CONSUMERS + WG
        q = q_bufs.index(slot)
        q_phase = (k // Q_SLOTS) & 1
        first = hi - 1
        left_end = lo
        if CAUSAL:
            first = gl.minimum(first, gl.maximum(row0 + shift + right + 1, 0) // BLOCK_N)
        if WINDOW:
            left_end = gl.cdiv(gl.maximum(row0 + ROWS - 1 + shift - left, 0), BLOCK_N)
        acc = gl.full([ROWS, v_bufs.shape[2]], 0.0, gl.float32, O_LAYOUT)
        for j in range(0, hi - 1 - lo):
            block = hi - 2 - j
            acc, p_packed, m_i, l_i, it = step(
                q, k_bufs, v_bufs, bars, q_full.index(slot), q_phase, acc, p_packed, m_i, l_i, it,
                block, (block >= first) | (block < left_end), row0, shape, scales,
                WG, CONSUMERS, STAGES, PING_PONG, CAUSAL, WINDOW, SOFTCAP, LAZY, SEAMLESS,
                S_LAYOUT, P_LAYOUT, ROW_LAYOUT)  # fmt: skip
        if SEAMLESS:
            mbarrier.wait(v_full.index(it % STAGES), (it // STAGES) & 1)
            if PING_PONG:
                bar_sync(PING_PONG_BARRIER + WG, 256)
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
            zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
            mbarrier.wait(q_full.index(slot), (k // Q_SLOTS) & 1, pred=more)
            mbarrier.wait(k_full.index(stage), k_phase, pred=more)
            s_async = warpgroup_mma(
                q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            if PING_PONG:
                bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
            acc = warpgroup_mma_wait(1, deps=[acc_async])
            _store_merged(acc, m_done, l_done, o_bufs, outputs, batch_done, head_done, row0, shape, scales,
                          WG, FIRST, ROW_LAYOUT)  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s_async])
            release(kv_empty, stage, KV_FREE, FREE)
            p, m_i, l_i = first_softmax(s, hi - 1, next_row0, shape, scales, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)
            p_packed = pack_pairs(p, dtype)
        elif tile < num_tiles:
            m_block, batch, head = tile_of(tile, shape, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            q_phase = (k // Q_SLOTS) & 1
            next_row0 = m_block * BLOCK_M + WG * ROWS
            zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            mbarrier.wait(q_full.index(slot), q_phase)
            mbarrier.wait(k_full.index(stage), k_phase)
            if PING_PONG:
                bar_sync(PING_PONG_BARRIER + WG, 256)
            s_async = warpgroup_mma(
                q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
            if PING_PONG:
                bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
            s = warpgroup_mma_wait(1, deps=[s_async])
            p, m_i, l_i = first_softmax(s, hi - 1, next_row0, shape, scales, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)
            mbarrier.wait(q_full.index(slot), q_phase)
            acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
            mbarrier.arrive(kv_empty.index(stage), count=1)
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
    if PING_PONG and WG == 0:
        bar_sync(PING_PONG_BARRIER, 256)


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
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2 * PLACE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(Q_SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        if not SEAMLESS:
            mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        if not SEAMLESS:
            mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
        for i in gl.static_range(2):
            mbarrier.init(queue_full.index(i), count=1)
            if not SEAMLESS:
                mbarrier.init(queue_empty.index(i), count=CONSUMERS)
    gl.static_assert(not SEAMLESS or (Q_SLOTS == 2 and STAGES <= 4))
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    bars = (q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (scale, exp_scale, softcap)
    outputs = (result_desc, o_ptr, lse_ptr, total, done_lo, done_hi)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                         PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS)),
            (_consumer, (1, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                         PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS)),
            (producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, CONSUMERS, BLOCK_N, STAGES,
                        Q_SLOTS, CAUSAL, WINDOW, DYNAMIC, SEAMLESS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                         PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS)),
            (_consumer, (1, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                         PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS)),
            (_consumer, (2, bufs, bars, outputs, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS,
                         PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, LAZY, FIRST, SEAMLESS)),
            (producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, CONSUMERS, BLOCK_N, STAGES,
                        Q_SLOTS, CAUSAL, WINDOW, DYNAMIC, SEAMLESS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
