"""FlashAttention-3 forward for Hopper (sm_90a) in Gluon: warp specialisation, ping-pong and pipelining across tiles.

One persistent program per SM, split into partitions by `warp_specialize`:

    consumers  2 or 3 (head_dim 64, long) warpgroups of 4 warps, 240 or 160 registers; each owns 64 query rows
    producer   1 warp, 24 or 32 registers: draws tiles, issues every TMA load

    consumer 0 | S1 . softmax1 . O+=P0 V0 | S2 . softmax2 . O+=P1 V1 | ... | S0' . softmax0' . O+=Pn Vn, write O | ...
    consumer 1 |  the same, half a step later: named barriers 8 and 9 let one issue GEMMs while the other runs softmax

S = Q K^T of a block is issued before O += P V of the block before, both asynchronous (paper, Algorithm 2), and softmax
runs under them. The pipeline does not drain between tiles: S0' above is the first block of the next tile, so prologue
and epilogue are hidden too, which is where short sequences spend their time.

Barriers (mbarrier, phase (i // n) & 1): q_full/q_empty one a consumer and slot; k_full, v_full one a stage, arrived on
by TMA; kv_empty one a stage, arrived on by every consumer after its P V product, which frees the K of this step and the
V of the step before; queue_full/queue_empty hand tile numbers from the producer to the consumers. Key blocks are walked
right to left, so masks come first.

SEAMLESS (dense tensors, no modifiers) leaves less between steps and between tiles. Buffers are freed on named barriers,
10 and 11 for the slots of Q and the queue's entries, 12 to 15 for the stages of K and V: there every warp arrives for
itself, where Triton has the four warps meet before an mbarrier. The queue hands on a tile's query block, batch and
head, so that consumers divide nothing. And the last P V of a tile is issued before the next tile is known.

Packed sequences (PACKED): tiles come from a table (hopper_packed.py), K and V blocks may reach into the next sequence,
whose scores are masked and whose V rows the producer zeros, and only whole tiles of O leave through TMA.

P stays in registers as the A operand. ptxas moves pure arithmetic below `wgmma.wait_group`; passing P through the
wait's operands, behind a redundant wait on a completed mbarrier that opens a basic block, keeps the exponentials
overlapped with P V (17 % at head_dim 128).

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import tma_load

from .hopper_alone import attend_alone
from .hopper_device import (
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
    tile_of,
    unpack_pairs,
)
from .hopper_handover import (
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
from .hopper_modifiers import list_of, listed_block, listed_number
from .hopper_packed import ENTRY, publish_entry, read_entry, read_sequence, receive_entry, zero_rows
from .hopper_steps import first_softmax, first_tile, own_lengths, step, store_tile

ROWS = gl.constexpr(64)  # query rows of one consumer: the M of wgmma


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, outputs, table, shape, scales, mods,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    DYNAMIC: gl.constexpr, LAZY: gl.constexpr, PACKED: gl.constexpr, PIPELINED: gl.constexpr, SEAMLESS: gl.constexpr,
    SINKS: gl.constexpr, ALIBI: gl.constexpr, ROW_MAX: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    _, _, _, _, num_m, num_tiles, _, left, right = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    FREE: gl.constexpr = 128 * CONSUMERS + 32  # all consumers and the producer
    KV_BARRIER: gl.constexpr = KV_FREE if SEAMLESS else None
    PLACED: gl.constexpr = SEAMLESS and DYNAMIC
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_bufs.shape[2], 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    MASK: gl.constexpr = CAUSAL or WINDOW or (BLOCKS and not EVEN_K)
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS  # block masks are causal more often than not
    SEQUENCE: gl.constexpr = PACKED and (ALIBI or SCORE_MOD is not None or MASK_MOD is not None)
    dtype: gl.constexpr = q_bufs.dtype
    it = 0
    k = 0
    tile = gl.program_id(0)
    if WG == CONSUMERS - 1:
        pass_turn(WG, CONSUMERS, PING_PONG)  # lets consumer 0 start
    # The first block of the first tile has nothing to overlap with.
    m_block, batch, head, q_row0, _, rows_q, used_q, used_k = first_tile(tile, table, shape, LONG_FIRST, PACKED)
    own = own_lengths(shape, used_q, used_k)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, own, BLOCK_N, CAUSAL, WINDOW)
    entry0 = batch  # what modifiers call b: packed, the sequence
    if SEQUENCE:
        j, batch, head = tile_of(tile, shape, True)
        sequence = read_sequence(num_m - 1 - j, table, tile >= 0)
        entry0 = sequence
    block0 = hi - 1
    kind0 = 2
    if BLOCKS:
        row = list_of(table, mods, batch, head, m_block)
        hi = gl.load(row)
        block0, kind0 = listed_block(row, hi - 1, WG)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    take_turn(WG, PING_PONG)
    s = issue_product(q_bufs.index(WG), k_bufs.index(0).permute((1, 0)), S_LAYOUT)
    pass_turn(WG, CONSUMERS, PING_PONG)
    s = warpgroup_mma_wait(0, deps=[s])
    release(kv_empty, 0, KV_BARRIER, FREE)
    p, m_i, l_i = first_softmax(
        s, block0, kind0, m_block * BLOCK_M + WG * ROWS, own, scales, (entry0, head), mods, CAUSAL, WINDOW, SOFTCAP,
        MASK_FIRST, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)  # fmt: skip
    p_packed = pack_pairs(p, dtype)
    while tile < num_tiles:
        own = own_lengths(shape, used_q, used_k)
        shift = used_k - used_q
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % Q_SLOTS) * CONSUMERS + WG
        q = q_bufs.index(slot)
        q_phase = (k // Q_SLOTS) & 1
        # Blocks [lo, left_end) need the left mask, blocks [first, hi) the right one; block hi - 1 is done. One loop,
        # with a branch around the masks, not one for each: ptxas 12.8 then finds Q's address only for the first.
        first, left_end = mask_ends(row0, ROWS, shift, lo, hi, left, right, BLOCK_N, CAUSAL, WINDOW)
        acc = gl.full([ROWS, v_bufs.shape[2]], 0.0, gl.float32, O_LAYOUT)
        entry = batch
        if SEQUENCE:
            entry = sequence
        for j in range(0, hi - 1 - lo):
            block = hi - 2 - j
            kind = 2
            masked = (block >= first) | (block < left_end)
            if BLOCKS:
                block, kind = listed_block(row, block, WG)
                masked = (block + 1) * BLOCK_N > used_k
            acc, p_packed, m_i, l_i, it = step(
                q, k_bufs, v_bufs, bars, q_full.index(slot), q_phase,
                acc, p_packed, m_i, l_i, it, block, kind, masked, row0, own, scales, (entry, head), mods,
                WG, CONSUMERS, STAGES, PING_PONG, CAUSAL, WINDOW, SOFTCAP, MASK, LAZY, SEAMLESS,
                S_LAYOUT, P_LAYOUT, ROW_LAYOUT, PIPELINED, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)  # fmt: skip
        if SEAMLESS:
            mbarrier.wait(v_full.index(it % STAGES), (it // STAGES) & 1)
            take_turn(WG, PING_PONG)
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            acc_async = warpgroup_mma(p_a, v_bufs.index(it % STAGES), acc, is_async=True)
        if not SEAMLESS:
            mbarrier.arrive(q_empty.index(slot), count=1)
        m_done, l_done, where = m_i, l_i, (batch, head, q_row0, rows_q, used_q)
        if SEQUENCE:
            tile, m_block, q_row0, _, rows_q, used_q, used_k, sequence = receive_entry(
                k, queue, queue_full, queue_empty, True
            )
        elif PACKED:
            tile, m_block, q_row0, _, rows_q, used_q, used_k = receive_entry(k, queue, queue_full, queue_empty)
        elif PLACED:
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
                m_block, batch, head = tile_of(tile, shape, LONG_FIRST)
            own = own_lengths(shape, used_q, used_k)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, own, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            next_row0 = m_block * BLOCK_M + WG * ROWS
            mbarrier.wait(q_full.index(slot), (k // Q_SLOTS) & 1, pred=more)
            mbarrier.wait(k_full.index(stage), k_phase, pred=more)
            s_async = issue_product(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
            pass_turn(WG, CONSUMERS, PING_PONG)
            acc = warpgroup_mma_wait(1, deps=[acc_async])
            store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, scales, mods,
                       WG, PACKED, SINKS, ROW_MAX, ROW_LAYOUT)  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s_async])
            release(kv_empty, stage, KV_BARRIER, FREE)
            p, m_i, l_i = first_softmax(
                s, hi - 1, 2, next_row0, own, scales, (batch, head), mods, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST
            )
            p_packed = pack_pairs(p, dtype)
        elif tile < num_tiles:
            # The first block of the next tile runs under the last P V product of this one.
            if PACKED:
                _, batch, head = tile_of(tile, shape, True)
            else:
                m_block, batch, head = tile_of(tile, shape, LONG_FIRST)
            own = own_lengths(shape, used_q, used_k)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, own, BLOCK_N, CAUSAL, WINDOW)
            next_block = hi - 1
            next_kind = 2
            next_entry = batch
            if SEQUENCE:
                next_entry = sequence
            if BLOCKS:
                row = list_of(table, mods, batch, head, m_block)
                hi = gl.load(row)
                next_block, next_kind = listed_block(row, hi - 1, WG)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            q_phase = (k // Q_SLOTS) & 1
            k_next = k_bufs.index(stage).permute((1, 0))
            next_row0 = m_block * BLOCK_M + WG * ROWS
            if Q_SLOTS > 1 and PIPELINED:
                p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
                mbarrier.wait(q_full.index(slot), q_phase)
                mbarrier.wait(k_full.index(stage), k_phase)
                take_turn(WG, PING_PONG)
                s_async = issue_product(q_bufs.index(slot), k_next, S_LAYOUT)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
                pass_turn(WG, CONSUMERS, PING_PONG)
                s = warpgroup_mma_wait(1, deps=[s_async])
                p, m_i, l_i = first_softmax(
                    s, next_block, next_kind, next_row0, own, scales, (next_entry, head), mods,
                    CAUSAL, WINDOW, SOFTCAP, MASK_FIRST, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)  # fmt: skip
                mbarrier.wait(q_full.index(slot), q_phase)
                acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
                release(kv_empty, stage, KV_BARRIER, FREE)
                p_packed = pack_pairs(p, dtype)
                store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, scales, mods,
                           WG, PACKED, SINKS, ROW_MAX, ROW_LAYOUT)  # fmt: skip
            else:
                # One Q buffer: its reload hides under P V, and writing O under S of the next tile.
                p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
                take_turn(WG, PING_PONG)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
                mbarrier.wait(q_full.index(slot), q_phase)
                mbarrier.wait(k_full.index(stage), k_phase)
                s_async = issue_product(q_bufs.index(slot), k_next, S_LAYOUT)
                pass_turn(WG, CONSUMERS, PING_PONG)
                acc = warpgroup_mma_wait(1, deps=[acc_async])
                store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, scales, mods,
                           WG, PACKED, SINKS, ROW_MAX, ROW_LAYOUT)  # fmt: skip
                s = warpgroup_mma_wait(0, deps=[s_async])
                release(kv_empty, stage, KV_BARRIER, FREE)
                p, m_i, l_i = first_softmax(
                    s, next_block, next_kind, next_row0, own, scales, (next_entry, head), mods,
                    CAUSAL, WINDOW, SOFTCAP, MASK_FIRST, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS)  # fmt: skip
                p_packed = pack_pairs(p, dtype)
        else:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
            acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc_async])
            store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, scales, mods,
                       WG, PACKED, SINKS, ROW_MAX, ROW_LAYOUT)  # fmt: skip
    tma.store_wait(0)
    if WG == 0:
        take_turn(WG, PING_PONG)  # takes the last arrival, so that the barrier is balanced


@gluon.jit
def _load_v(v_bufs, v_full, fixed, fixes, v_desc, batch, kv, k_row0, block, used_k, stage, PACKED: gl.constexpr):
    """Start a V block; rows behind the end of a packed sequence become zeros. Returns how many blocks had such rows."""
    BLOCK_N: gl.constexpr = v_bufs.shape[1]
    row = block * BLOCK_N
    if PACKED:
        ragged = row + BLOCK_N > used_k
        if ragged:
            mbarrier.expect(fixed, v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, k_row0 + row, 0], fixed, v_bufs.index(stage))
            mbarrier.wait(fixed, fixes & 1)
            zero_rows(v_bufs, stage, used_k - row)
            mbarrier.arrive(v_full.index(stage), count=1)
            fixes += 1
        else:
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, k_row0 + row, 0], v_full.index(stage), v_bufs.index(stage))
    else:
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, kv, row, 0], v_full.index(stage), v_bufs.index(stage))
    return fixes


@gluon.jit
def _producer(
    bufs, bars, fixed, q_desc, k_desc, v_desc, counter, table, shape, mods,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr,
    SEQUENCE: gl.constexpr, BLOCKS: gl.constexpr, SEAMLESS: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, _ = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    _, _, _, heads_per_kv, num_m, num_tiles, _, _, _ = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    FREE: gl.constexpr = 128 * CONSUMERS + 32
    KV_BARRIER: gl.constexpr = KV_FREE if SEAMLESS else None
    PLACED: gl.constexpr = SEAMLESS and DYNAMIC
    it = 0
    k = 0
    fixes = gl.to_tensor(0)
    tile = gl.program_id(0)
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    m_block, batch, head, q_row0, k_row0, _, used_q, used_k = first_tile(tile, table, shape, LONG_FIRST, PACKED)
    while tile < num_tiles:
        if not PACKED and not PLACED:
            m_block, batch, head = tile_of(tile, shape, LONG_FIRST)
        kv = head // heads_per_kv
        own = own_lengths(shape, used_q, used_k)
        lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, own, BLOCK_N, CAUSAL, WINDOW)
        if BLOCKS:
            row = list_of(table, mods, batch, head, m_block)
            hi = gl.load(row)
            listed = listed_number(row, hi - 1)
        if DYNAMIC:
            early = draw_early(counter, hi - lo)
        slot0 = (k % Q_SLOTS) * CONSUMERS
        q_phase = (k // Q_SLOTS) & 1
        for c in gl.static_range(CONSUMERS):
            slot = slot0 + c
            row0 = q_row0 + m_block * BLOCK_M + c * ROWS
            if not SEAMLESS:
                mbarrier.wait(q_empty.index(slot), q_phase ^ 1)
            elif c == 0:  # noqa: SIM102
                if k >= Q_SLOTS:
                    bar_sync_at(Q_FREE + k % Q_SLOTS, FREE)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, row0, 0], q_full.index(slot), q_bufs.index(slot))
            if c == 0:
                stage = it % STAGES
                col0 = k_row0 + (hi - 1) * BLOCK_N
                if BLOCKS:
                    col0 = listed * BLOCK_N
                if not SEAMLESS:  # waited for behind the tile before
                    mbarrier.wait(kv_empty.index(stage), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, [batch, kv, col0, 0], k_full.index(stage), k_bufs.index(stage))
        for j in range(0, hi - 1 - lo):
            v_stage = it % STAGES
            it += 1
            stage = it % STAGES
            col0 = k_row0 + (hi - 2 - j) * BLOCK_N
            if BLOCKS:
                v_listed = listed
                listed = listed_number(row, hi - 2 - j)
                col0 = listed * BLOCK_N
            # One barrier frees both: K of a step is released after P V of the step before, so the V slot is free too.
            wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, kv, col0, 0], k_full.index(stage), k_bufs.index(stage))
            block = hi - 1 - j
            if BLOCKS:
                block = v_listed
            fixes = _load_v(v_bufs, v_full, fixed, fixes, v_desc, batch, kv, k_row0, block, used_k, v_stage, PACKED)
        v_stage = it % STAGES
        it += 1
        v_args = (batch, kv, k_row0, lo, used_k)
        if BLOCKS:
            v_args = (batch, kv, k_row0, listed, used_k)
        if DYNAMIC:
            tile = draw_late(early, counter, hi - lo)
            if PACKED:
                j, batch, head = tile_of(tile, shape, True)
                entry = read_entry(num_m - 1 - j, table, tile < num_tiles)
                m_block, q_row0, k_row0, _, used_q, used_k = entry
                if SEQUENCE:
                    sequence = read_sequence(num_m - 1 - j, table, tile < num_tiles)
                    publish_entry(k, tile, entry, queue, queue_full, queue_empty, sequence, True)
                else:
                    publish_entry(k, tile, entry, queue, queue_full, queue_empty)
            elif PLACED:
                m_block, batch, head = tile_of(tile, shape, LONG_FIRST)
                publish_place(k, tile, (m_block, batch, head), queue, queue_full)
            else:
                publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
        v_batch, v_kv, v_row0, v_block, v_used = v_args
        fixes = _load_v(v_bufs, v_full, fixed, fixes, v_desc, v_batch, v_kv, v_row0, v_block, v_used, v_stage, PACKED)
    if SEAMLESS:
        take_last_arrivals(it, k, STAGES, Q_SLOTS, FREE)
    if DYNAMIC:
        rewind(counter, tile, num_tiles)


@gluon.jit(
    do_not_specialize=[
        "o_ptr",
        "sinks",
        "cols_v",
        "seqlen_q",
        "seqlen_k",
        "heads",
        "heads_per_kv",
        "num_m",
        "num_tiles",
        "group",
        "left",
        "right",
        "slopes",
        "slopes_sb",
        "aux",
        "row_max",
        "table_width",
        "table_sb",
        "table_sh",
    ]
)
def attention_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, sinks, counter, table, cols_v,
    seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, scale, exp_scale, softcap,
    slopes, slopes_sb, aux, row_max, table_width, table_sb, table_sh,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, O_CHUNKS: gl.constexpr, PING_PONG: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
    LAZY: gl.constexpr, PACKED: gl.constexpr, PIPELINED: gl.constexpr, SPECIALIZED: gl.constexpr,
    SEAMLESS: gl.constexpr, SINKS: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors are rank 4, (batch, head, row, column), with blocks of one head; lse is (batch, heads, seqlen_q),
    sinks (heads,) in float32.

    PACKED: seqlen_q and seqlen_k are totals, the batch is 1, `table` is that of hopper_packed.py, and num_m and
    num_tiles come from it. `o_ptr` and `cols_v` (o, contiguous, and its true head_dim) are for the last rows of such
    sequences.

    `slopes` to `table_sh` are None where a call has no such thing. With a table width, `table` is that of
    hopper_blocks.py for tiles of 128 query rows and blocks of BLOCK_N keys, DYNAMIC is on and PACKED off. SCORE_MOD and
    MASK_MOD are users' functions or None.

    PIPELINED, SPECIALIZED and PING_PONG are on but for the ablation of the paper; without SPECIALIZED one partition of
    4 * CONSUMERS warps does everything (hopper_alone.py).
    """
    dtype: gl.constexpr = q_desc.dtype
    O_COLS: gl.constexpr = HEAD_DIM_V // O_CHUNKS
    PARTS: gl.constexpr = CONSUMERS if SPECIALIZED else 1  # of a tile's rows, each with buffers of its own
    PART: gl.constexpr = ROWS * CONSUMERS // PARTS
    O_BUFS: gl.constexpr = PARTS if O_CHUNKS == 1 else 2 * PARTS
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, HEAD_DIM], dtype)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM_V], dtype)
    O_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, O_COLS], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [Q_SLOTS * PARTS, PART, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], K_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM_V], V_LAYOUT)
    o_bufs = gl.allocate_shared_memory(dtype, [O_BUFS, PART, O_COLS], O_LAYOUT)
    bars = allocate_bars(Q_SLOTS * PARTS, STAGES, 2 * ENTRY if PACKED else 2 * PLACE)
    if PACKED:
        fixed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(fixed, count=1)
        # Programs without a tile get one without rows, so that all of them run the same code.
        num_m = gl.maximum(gl.load(table), gl.cdiv(gl.num_programs(0), heads))
        num_tiles = num_m * heads
    else:
        fixed: gl.constexpr = None
    ready_bars(bars, PARTS, DYNAMIC, SPECIALIZED and not SEAMLESS, not SEAMLESS)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (scale, exp_scale, softcap)
    outputs = (o_desc, o_ptr, lse_ptr, cols_v, sinks)
    ALIBI: gl.constexpr = slopes is not None
    ROW_MAX: gl.constexpr = row_max is not None
    BLOCKS: gl.constexpr = table_width is not None
    # Q's two slots, so that no consumer waits for the next tile's rows while it holds a turn that another needs to free
    # them; modifiers would read what they captured for the tile behind the last.
    gl.static_assert(not SEAMLESS or (SPECIALIZED and PIPELINED and Q_SLOTS == 2 and STAGES <= 4))
    gl.static_assert(not SEAMLESS or not (PACKED or BLOCKS or ALIBI or SCORE_MOD is not None or MASK_MOD is not None))
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out. The last
    # partition is the producer.
    if not SPECIALIZED:
        gl.static_assert(O_CHUNKS == 1 and not PACKED and not DYNAMIC and not PING_PONG)
        attend_alone(bufs, bars, q_desc, k_desc, v_desc, outputs, table, shape, scales, BLOCK_N, STAGES,
                     CAUSAL, WINDOW, SOFTCAP, EVEN_K, LAZY, PIPELINED, SINKS)  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 2 or CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (part, bufs, bars, outputs, table, shape, scales,
                         (slopes, slopes_sb, aux, row_max, table_width, table_sb, table_sh),
                         CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K,
                         DYNAMIC, LAZY, PACKED, PIPELINED, SEAMLESS, SINKS, ALIBI, ROW_MAX, SCORE_MOD, MASK_MOD,
                         BLOCKS))
            if part < CONSUMERS else
            (_producer, (bufs, bars, fixed, q_desc, k_desc, v_desc, counter, table, shape,
                         (slopes, slopes_sb, aux, row_max, table_width, table_sb, table_sh),
                         CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, CAUSAL, WINDOW, DYNAMIC, PACKED,
                         PACKED and (ALIBI or SCORE_MOD is not None or MASK_MOD is not None), BLOCKS,
                         SEAMLESS))
            for part in ((0, 1, 2) if CONSUMERS == 2 else (0, 1, 2, 3))
        ], [4, 1] if CONSUMERS == 2 else [4, 4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS] if CONSUMERS == 2 else
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
