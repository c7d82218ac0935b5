"""FlashAttention-3 forward for Hopper (sm_90a) in Gluon: warp specialisation, ping-pong and pipelining across tiles.

One persistent program per SM, split into partitions by `warp_specialize`:

    consumers  2 (head_dim 128, 256) or 3 (head_dim 64) warpgroups of 4 warps, 240 or 160 registers; each owns 64 query rows
    producer   1 warp, 24 or 32 registers: draws tiles, issues every TMA load

    consumer 0 | S1 . softmax1 . O+=P0 V0 | S2 . softmax2 . O+=P1 V1 | ... | S0' . softmax0' . O+=Pn Vn, write O | ...
    consumer 1 |  (the same, half an iteration later: named barriers 8 and 9 let one issue its GEMMs while the other runs softmax)

S = Q K^T of a block is issued before O += P V of the block before, both asynchronous (paper, Algorithm 2), and softmax runs under them.
The pipeline does not drain between tiles: S0' above is the first block of the next tile, so prologue and epilogue are hidden too, which
is where short sequences spend their time.

Barriers (mbarrier, phase (i // n) & 1): q_full/q_empty one a consumer and slot; k_full, v_full one a stage, arrived on by TMA; kv_empty
one a stage, arrived on by every consumer after its P V product, which frees the K of this step and the V of the step before; queue_full/
queue_empty hand tile numbers from the producer to the consumers. Key blocks are walked right to left, so masks come first.

P stays in registers as the A operand. ptxas moves pure arithmetic below `wgmma.wait_group`; passing P through the wait's operands, behind
a redundant wait on a completed mbarrier that opens a basic block, keeps the exponentials overlapped with P V (17 % at head_dim 128).

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2.
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

from .hopper_device import (
    LN_2,
    NEG_LARGE,
    bar_arrive,
    bar_sync,
    key_blocks,
    mask_columns,
    mask_left,
    mask_right,
    pack_pairs,
    publish_tile,
    receive_tile,
    tanh,
    thread_row_sum,
    tile_of,
    unpack_pairs,
)

PING_PONG_BARRIER = gl.constexpr(8)
ROWS = gl.constexpr(64)  # query rows of one consumer: the M of wgmma


@gluon.jit
def _mask_block(s, block, row0, shift, seqlen_k, left, right, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    col0 = block * BLOCK_N
    if CAUSAL:
        s = mask_right(s, row0 + shift + right - col0, seqlen_k - 1 - col0)
    else:
        s = mask_columns(s, seqlen_k - 1 - col0)
    if WINDOW:
        s = mask_left(s, row0 + shift - left - col0)
    return s


@gluon.jit
def _first_scores(
    q, k, block, row0, shift, seqlen_k, left, right, scale, exp_scale, softcap,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, PING_PONG: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of the very first block of a program, with nothing to overlap them with."""
    if PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(0, deps=[s])
    return _first_softmax(s, block, row0, shift, seqlen_k, left, right, scale, exp_scale, softcap, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, MASK)


@gluon.jit
def _first_softmax(
    s, block, row0, shift, seqlen_k, left, right, scale, exp_scale, softcap,
    BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    if SOFTCAP:
        s = softcap * tanh(s * scale)
    if MASK:
        s = _mask_block(s, block, row0, shift, seqlen_k, left, right, BLOCK_N, CAUSAL, WINDOW)
    m = gl.maximum(gl.max(s, axis=1), NEG_LARGE)
    p = gl.exp2(s * exp_scale - (m * exp_scale)[:, None])
    return p, m, thread_row_sum(p)


@gluon.jit
def _step(
    q, k_bufs, v_bufs, k_full, v_full, kv_empty, opened, opened_phase,
    acc, p_packed, m_i, l_i, it, block, masked, row0, shift, seqlen_k, left, right, scale, exp_scale, softcap,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, PING_PONG: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One key block: issue S of this block, then P V of the block before, then softmax of this block under both."""
    v_stage = it % STAGES
    v_phase = (it // STAGES) & 1
    it += 1
    stage = it % STAGES
    phase = (it // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    if PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s_async = warpgroup_mma(q, k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc_async = warpgroup_mma(unpack_pairs(p_packed, q.dtype, P_LAYOUT), v_bufs.index(v_stage), acc, is_async=True)
    if PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
    s = warpgroup_mma_wait(1, deps=[s_async])
    if SOFTCAP:
        s = softcap * tanh(s * scale)
    if CAUSAL or WINDOW:
        if masked:
            s = _mask_block(s, block, row0, shift, seqlen_k, left, right, BLOCK_N, CAUSAL, WINDOW)
    m_new = gl.maximum(m_i, gl.max(s, axis=1))
    alpha = gl.exp2((m_i - m_new) * exp_scale)
    p = gl.exp2(s * exp_scale - (m_new * exp_scale)[:, None])
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    l_i = l_i * alpha_l[:, None] + thread_row_sum(p)
    mbarrier.wait(opened, opened_phase)  # completed long ago; opens the basic block that pins the exponentials above the wait
    acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
    mbarrier.arrive(kv_empty.index(stage), count=1)
    acc = acc * gl.convert_layout(alpha, ROW_LAYOUT)[:, None]
    return acc, pack_pairs(p, q.dtype), m_new, l_i, it


@gluon.jit
def _store_tile(acc, m_i, l_i, o_bufs, o_desc, lse_ptr, batch, head, heads, row0, seqlen_q, exp_scale,
                WG: gl.constexpr, O_CHUNKS: gl.constexpr, ROW_LAYOUT: gl.constexpr):  # fmt: skip
    """O = acc / l through shared memory and TMA, in O_CHUNKS column chunks, and LSE = m + log l; rows without keys give 0 and -inf."""
    dtype: gl.constexpr = o_bufs.dtype
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), ROW_LAYOUT)
    m_row = gl.convert_layout(m_i, ROW_LAYOUT)
    masked = l_row == 0.0
    acc = acc * gl.where(masked, 0.0, 1.0 / l_row)[:, None]
    if row0 < seqlen_q:
        lse = gl.where(masked, float("-inf"), (m_row * exp_scale + gl.log2(l_row)) * LN_2)
        rows = row0 + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        offset = (batch * heads + head).to(gl.int64) * seqlen_q
        gl.store(lse_ptr + offset + rows, lse, mask=rows < seqlen_q)
        if O_CHUNKS == 1:
            tma.store_wait(0)
            o_bufs.index(WG).store(acc.to(dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, row0, 0], o_bufs.index(WG))
        else:
            # two half-width buffers a consumer would not fit beside Q, K and V: quarters, two buffers in turn
            COLS: gl.constexpr = acc.shape[1] // 4
            CHUNK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
            low, high = gl.split(acc.reshape((ROWS, 2, 2 * COLS)).permute((0, 2, 1)))
            c0, c1 = gl.split(low.reshape((ROWS, 2, COLS)).permute((0, 2, 1)))
            c2, c3 = gl.split(high.reshape((ROWS, 2, COLS)).permute((0, 2, 1)))
            first = o_bufs.index(2 * WG)
            second = o_bufs.index(2 * WG + 1)
            tma.store_wait(1)
            first.store(gl.convert_layout(c0.to(dtype), CHUNK))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, row0, 0], first)
            tma.store_wait(1)
            second.store(gl.convert_layout(c1.to(dtype), CHUNK))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, row0, COLS], second)
            tma.store_wait(1)
            first.store(gl.convert_layout(c2.to(dtype), CHUNK))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, row0, 2 * COLS], first)
            tma.store_wait(1)
            second.store(gl.convert_layout(c3.to(dtype), CHUNK))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [batch, head, row0, 3 * COLS], second)


@gluon.jit
def _consumer(
    WG: gl.constexpr, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr,
    seqlen_q, seqlen_k, heads, num_m, num_tiles, group, left, right, scale, exp_scale, softcap,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    O_CHUNKS: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    dtype: gl.constexpr = q_bufs.dtype
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    if PING_PONG:
        if WG == CONSUMERS - 1:
            bar_arrive(PING_PONG_BARRIER, 256)  # lets consumer 0 start
    m_block, batch, head = tile_of(tile, num_m, heads, group, CAUSAL)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shift, seqlen_k, left, right, BLOCK_N, CAUSAL, WINDOW)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    p, m_i, l_i = _first_scores(
        q_bufs.index(WG), k_bufs.index(0), hi - 1, m_block * BLOCK_M + WG * ROWS, shift, seqlen_k, left, right, scale, exp_scale, softcap,
        WG, CONSUMERS, BLOCK_N, PING_PONG, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST, S_LAYOUT)  # fmt: skip
    mbarrier.arrive(kv_empty.index(0), count=1)
    p_packed = pack_pairs(p, dtype)
    while tile < num_tiles:
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % Q_SLOTS) * CONSUMERS + WG
        q = q_bufs.index(slot)
        q_phase = (k // Q_SLOTS) & 1
        # Blocks [lo, left_end) need the left mask, blocks [first, hi) the right one; block hi - 1 is done. One loop with a branch
        # around the masks, not one loop for each kind: ptxas 12.8 hoists the address of Q into the first loop's preheader only.
        first = hi - 1
        left_end = lo
        if CAUSAL:
            first = gl.minimum(first, gl.maximum(row0 + shift + right + 1, 0) // BLOCK_N)
        if WINDOW:
            left_end = gl.cdiv(gl.maximum(row0 + ROWS - 1 + shift - left, 0), BLOCK_N)
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        for j in range(0, hi - 1 - lo):
            block = hi - 2 - j
            acc, p_packed, m_i, l_i, it = _step(
                q, k_bufs, v_bufs, k_full, v_full, kv_empty, q_full.index(slot), q_phase, acc, p_packed, m_i, l_i, it,
                block, (block >= first) | (block < left_end), row0, shift, seqlen_k, left, right, scale, exp_scale, softcap,
                WG, CONSUMERS, STAGES, BLOCK_N, PING_PONG, CAUSAL, WINDOW, SOFTCAP, S_LAYOUT, P_LAYOUT, ROW_LAYOUT)  # fmt: skip
        mbarrier.arrive(q_empty.index(slot), count=1)
        if DYNAMIC:
            tile = receive_tile(k, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        v_stage = it % STAGES
        v_phase = (it // STAGES) & 1
        it += 1
        m_done = m_i
        l_done = l_i
        batch_done = batch
        head_done = head
        if tile < num_tiles:
            # the first block of the next tile runs under the last P V product of this one
            m_block, batch, head = tile_of(tile, num_m, heads, group, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shift, seqlen_k, left, right, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            q_phase = (k // Q_SLOTS) & 1
            stage = it % STAGES
            zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
            if Q_SLOTS > 1:
                mbarrier.wait(q_full.index(slot), q_phase)
                mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
                if PING_PONG:
                    bar_sync(PING_PONG_BARRIER + WG, 256)
                s_async = warpgroup_mma(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_async = warpgroup_mma(unpack_pairs(p_packed, dtype, P_LAYOUT), v_bufs.index(v_stage), acc, is_async=True)
                if PING_PONG:
                    bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
                s = warpgroup_mma_wait(1, deps=[s_async])
                p, m_i, l_i = _first_softmax(
                    s, hi - 1, m_block * BLOCK_M + WG * ROWS, shift, seqlen_k, left, right, scale, exp_scale, softcap,
                    BLOCK_N, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)  # fmt: skip
                mbarrier.wait(q_full.index(slot), q_phase)
                acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
                mbarrier.arrive(kv_empty.index(stage), count=1)
                p_packed = pack_pairs(p, dtype)
                _store_tile(acc, m_done, l_done, o_bufs, o_desc, lse_ptr, batch_done, head_done, heads, row0, seqlen_q, exp_scale,
                            WG, O_CHUNKS, ROW_LAYOUT)  # fmt: skip
            else:
                # one Q buffer: its reload hides under P V, and the write-back of O under S of the next tile
                if PING_PONG:
                    bar_sync(PING_PONG_BARRIER + WG, 256)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_async = warpgroup_mma(unpack_pairs(p_packed, dtype, P_LAYOUT), v_bufs.index(v_stage), acc, is_async=True)
                mbarrier.wait(q_full.index(slot), q_phase)
                mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
                s_async = warpgroup_mma(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                if PING_PONG:
                    bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
                acc = warpgroup_mma_wait(1, deps=[acc_async])
                _store_tile(acc, m_done, l_done, o_bufs, o_desc, lse_ptr, batch_done, head_done, heads, row0, seqlen_q, exp_scale,
                            WG, O_CHUNKS, ROW_LAYOUT)  # fmt: skip
                s = warpgroup_mma_wait(0, deps=[s_async])
                mbarrier.arrive(kv_empty.index(stage), count=1)
                p, m_i, l_i = _first_softmax(
                    s, hi - 1, m_block * BLOCK_M + WG * ROWS, shift, seqlen_k, left, right, scale, exp_scale, softcap,
                    BLOCK_N, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST)  # fmt: skip
                p_packed = pack_pairs(p, dtype)
        else:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc_async = warpgroup_mma(unpack_pairs(p_packed, dtype, P_LAYOUT), v_bufs.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_async])
            _store_tile(acc, m_done, l_done, o_bufs, o_desc, lse_ptr, batch_done, head_done, heads, row0, seqlen_q, exp_scale,
                        WG, O_CHUNKS, ROW_LAYOUT)  # fmt: skip
    tma.store_wait(0)
    if PING_PONG:
        if WG == 0:
            bar_sync(PING_PONG_BARRIER, 256)  # takes the last arrival, so that the barrier is balanced


@gluon.jit
def _producer(
    q_bufs, k_bufs, v_bufs, bars, q_desc, k_desc, v_desc, counter,
    seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        m_block, batch, head = tile_of(tile, num_m, heads, group, CAUSAL)
        head_kv = head // heads_per_kv
        lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shift, seqlen_k, left, right, BLOCK_N, CAUSAL, WINDOW)
        slot0 = (k % Q_SLOTS) * CONSUMERS
        q_phase = (k // Q_SLOTS) & 1
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(slot0 + c), q_phase ^ 1)
            mbarrier.expect(q_full.index(slot0 + c), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, m_block * BLOCK_M + c * ROWS, 0], q_full.index(slot0 + c), q_bufs.index(slot0 + c))  # fmt: skip
            if c == 0:
                stage = it % STAGES
                mbarrier.wait(kv_empty.index(stage), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [batch, head_kv, (hi - 1) * BLOCK_N, 0], k_full.index(stage), k_bufs.index(stage))  # fmt: skip
        for j in range(0, hi - 1 - lo):
            v_stage = it % STAGES
            it += 1
            stage = it % STAGES
            # One barrier frees both: K of a step is released after P V of the step before, so the V slot is free too.
            mbarrier.wait(kv_empty.index(stage), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [batch, head_kv, (hi - 2 - j) * BLOCK_N, 0], k_full.index(stage), k_bufs.index(stage))  # fmt: skip
            mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [batch, head_kv, (hi - 1 - j) * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))  # fmt: skip
        if DYNAMIC:
            # Drawn before the wait for the last V slot, under which the atomic's round trip hides.
            tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
            publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        v_stage = it % STAGES
        it += 1
        mbarrier.wait(kv_empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, [batch, head_kv, lo * BLOCK_N, 0], v_full.index(v_stage), v_bufs.index(v_stage))  # fmt: skip
    if DYNAMIC:
        # Every program draws exactly one number past the end; the last of them resets the counter for the next launch.
        if tile == num_tiles + gl.num_programs(0) - 1:
            gl.store(counter, 0)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads", "heads_per_kv", "num_m", "num_tiles", "group", "left", "right"]
)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter,
    seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, scale, exp_scale, softcap,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    O_CHUNKS: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q, k, v, o descriptors are rank 4, (batch, head, row, column) with one-head row blocks; lse (batch, heads, seqlen_q) float32."""
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    O_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM // O_CHUNKS], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    # with chunks, two buffers a consumer
    o_bufs = gl.allocate_shared_memory(dtype, [CONSUMERS if O_CHUNKS == 1 else 2 * CONSUMERS, ROWS, HEAD_DIM // O_CHUNKS], O_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS * CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(Q_SLOTS * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(queue_full.index(i), count=1)
        mbarrier.init(queue_empty.index(i), count=CONSUMERS)
    bars = (q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr, seqlen_q, seqlen_k, heads, num_m, num_tiles, group,
                         left, right, scale, exp_scale, softcap, CONSUMERS, HEAD_DIM, BLOCK_N, STAGES, Q_SLOTS,
                         O_CHUNKS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
            (_consumer, (1, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr, seqlen_q, seqlen_k, heads, num_m, num_tiles, group,
                         left, right, scale, exp_scale, softcap, CONSUMERS, HEAD_DIM, BLOCK_N, STAGES, Q_SLOTS,
                         O_CHUNKS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
            (_producer, (q_bufs, k_bufs, v_bufs, bars, q_desc, k_desc, v_desc, counter, seqlen_q, seqlen_k, heads, heads_per_kv, num_m,
                         num_tiles, group, left, right, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, CAUSAL, WINDOW, DYNAMIC)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (0, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr, seqlen_q, seqlen_k, heads, num_m, num_tiles, group,
                         left, right, scale, exp_scale, softcap, CONSUMERS, HEAD_DIM, BLOCK_N, STAGES, Q_SLOTS,
                         O_CHUNKS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
            (_consumer, (1, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr, seqlen_q, seqlen_k, heads, num_m, num_tiles, group,
                         left, right, scale, exp_scale, softcap, CONSUMERS, HEAD_DIM, BLOCK_N, STAGES, Q_SLOTS,
                         O_CHUNKS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
            (_consumer, (2, q_bufs, k_bufs, v_bufs, o_bufs, bars, o_desc, lse_ptr, seqlen_q, seqlen_k, heads, num_m, num_tiles, group,
                         left, right, scale, exp_scale, softcap, CONSUMERS, HEAD_DIM, BLOCK_N, STAGES, Q_SLOTS,
                         O_CHUNKS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
            (_producer, (q_bufs, k_bufs, v_bufs, bars, q_desc, k_desc, v_desc, counter, seqlen_q, seqlen_k, heads, heads_per_kv, num_m,
                         num_tiles, group, left, right, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, CAUSAL, WINDOW, DYNAMIC)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
