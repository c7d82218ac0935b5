"""FlashAttention-3 forward in FP8 for Hopper (sm_90a) in Gluon; the plan of `hopper_forward.py` with 8-bit operands.

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 query rows
    producer   1 warp, 24 registers: draws tiles, issues every TMA load

    S = q8 k8^T          FP8 wgmma; q_scale * k_scale * softmax_scale * log2(e) is the factor of the exponent
    P = exp2(... + SHIFT) -> fp8 in registers, the A operand of the next product
    part = P v8          FP8 wgmma over one block of keys
    acc += part * v_scale in float32: the second level of the sum. FP8 wgmma adds with about 14 bits and truncates, so
                         one sum over 16k keys would lose a percent; per-block scales of v come at no extra cost

With TWO_LEVEL off the tensor cores add up to CHUNK blocks, in the scale of the next one's v, before the sum moves on:
to registers, or at head_dim 256, where O alone takes half of them, to global memory (which stays in L2). 32 products
and the sum so far are cut off at 14 bits of the largest, so what is added late to a long sum loses most.

Layouts. FP8 wgmma wants its B operand with the summed dimension innermost, so v comes transposed, (head_dim, keys):
the quantiser writes it that way (one pass over v that is made anyway), where a transposition on chip would cost shared
memory traffic and registers in every tile of query rows. An accumulator holds keys 8 g + 2 t + e of every 16 in thread
t of a quad, an A operand holds keys 4 t + 2 g + e. So K's rows are put in the order that makes the first the second: S
then *is* an A operand. That is a tensor map of rank 5 (see hopper_fp8.py), not a copy, and only masks have to know
which key a column of S belongs to.

Barriers, tile queue and the pipeline across tiles are those of `hopper_forward.py`. One more number a block, k_scale
and v_scale, is read by the consumers one block ahead.

A step is one chain of instructions of one warp, with one other warp to fill its gaps: what counts is its length. So
maxima are found pairwise, O is rescaled under S of the next step, and exponentials, sums, packing and the addition of
P V stand in one run of instructions without a branch, which ptxas mixes: 1150 clocks by the stall counts, not 1460.

Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import tma_load

from .hopper_device import (
    bar_sync_at,
    issue_product,
    key_blocks,
    mask_ends,
    publish_tile,
    receive_tile,
    release,
    rescale,
    rewind,
    tanh,
    thread_row_sum,
    tile_of,
)
from .hopper_fp8_device import (
    ROWS,
    block_scales,
    first_softmax,
    head_scales,
    log2_fast,
    mask_block,
    pack_halves,
    pack_quads,
    put_aside,
    row_scales,
    store_tile,
    take_in,
    unpack_quads,
)
from .hopper_handover import allocate_bars, draw_early, draw_late, pass_turn, ready_bars, take_turn, wait_free

KV_FREE = gl.constexpr(10)  # and one more for each stage


@gluon.jit
def _issue_part(p, v, acc, TWO_LEVEL: gl.constexpr):
    """P V of one block, asynchronous: alone with TWO_LEVEL, otherwise added to acc."""
    LAYOUT: gl.constexpr = acc.type.layout
    if TWO_LEVEL:
        return issue_product(p, v.permute((1, 0)), LAYOUT)
    else:
        return warpgroup_mma(p, v.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _step(
    q, k_bufs, v_bufs, bars, acc, pend, m_i, l_i, it, block, more, masked, row0, shape, row_scale, kv, cap,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr, E5M2: gl.constexpr,
    MASK: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SHIFT: gl.constexpr,
    GROWTH: gl.constexpr, UNDER: gl.constexpr, AHEAD: gl.constexpr, TWO_LEVEL: gl.constexpr, FOLD: gl.constexpr,
    NAMED: gl.constexpr, K_BLOCK: gl.constexpr,
    S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One key block: issue S of this block and P V of the block before, then softmax of this block.

    UNDER: what of softmax runs under P V: its maxima (0), half of its exponentials too (1), all of them (2). What is
    left is one run of instructions, in which the exponentials' unit, additions and packing overlap.
    """
    p_packed, k_next, v_next, v_scale, alpha_o = pend
    kv_scale, lo, opened, opened_phase = kv  # scales, first block; a barrier completed long ago
    _, _, k_full, v_full, kv_empty, _, _, _ = bars
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    v_stage = it % STAGES
    v_phase = (it // STAGES) & 1
    it += 1
    stage = it % STAGES
    k_scale = k_next
    v_this = v_next
    if not AHEAD:
        mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
    take_turn(WG, PING_PONG)
    s_async = issue_product(q, k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
    # under S of this block: what the one before has left
    acc = rescale(acc, alpha_o)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    p_a = unpack_quads(p_packed, q.dtype, P_LAYOUT)
    part_async = _issue_part(p_a, v_bufs.index(v_stage), acc, TWO_LEVEL)
    pass_turn(WG, CONSUMERS, PING_PONG)
    k_next, v_next = block_scales(kv_scale, gl.maximum(block - 1, lo), BLOCK_N, K_BLOCK)
    v_log = log2_fast(v_this) if FOLD else 0.0
    factor = row_scale * k_scale
    s = warpgroup_mma_wait(1, deps=[s_async])
    if SOFTCAP:
        s = cap * tanh(s * factor[:, None])
    if MASK:  # noqa: SIM102 - a run-time branch inside a compile-time one
        if masked:
            s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
    even, odd = gl.split(s.reshape((ROWS, BLOCK_N // 2, 2)))
    highest = gl.max(gl.maximum(even, odd), axis=1)
    highest = gl.convert_layout(highest, gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    if not SOFTCAP:
        highest = highest * factor
    if FOLD:
        highest += v_log
    # A maximum up to GROWTH too small (base 2) makes P up to 2**GROWTH times larger, for which SHIFT leaves room.
    m_new = gl.maximum(highest, m_i) if GROWTH == 0 else gl.where(highest - m_i > GROWTH, highest, m_i)
    alpha = gl.exp2(m_i - m_new)
    offset = m_new - SHIFT
    if FOLD:
        offset -= v_log
    HALF: gl.constexpr = gl.SliceLayout(1, even.type.layout)
    factor = gl.convert_layout(factor, HALF, assert_trivial=True)
    offset = gl.convert_layout(offset, HALF, assert_trivial=True)
    if not SOFTCAP:
        even = even * factor[:, None]
        odd = odd * factor[:, None]
    even = even - offset[:, None]
    odd = odd - offset[:, None]
    if UNDER >= 1:
        even = gl.exp2(even)
    if UNDER == 2:
        odd = gl.exp2(odd)
    # A wait opens a basic block, and ptxas doesn't move what is above it below the wait for P V.
    if AHEAD:  # for K of the next step, if it is one of this tile
        after = it + gl.where(more, 1, 0)
        mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1)
    elif UNDER >= 1:  # for Q, which came long ago
        mbarrier.wait(opened, opened_phase)
    part, even, odd = warpgroup_mma_wait(0, deps=[part_async, even, odd])
    if UNDER == 0:
        even = gl.exp2(even)
    if UNDER <= 1:
        odd = gl.exp2(odd)
    release(kv_empty, stage, KV_FREE if NAMED else None, 128 * CONSUMERS + 32)
    alpha_l = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout), assert_trivial=True)
    row_sum = gl.sum((even + odd).reshape((ROWS, BLOCK_N // 8, 4)), axis=1)
    row_sum = gl.convert_layout(row_sum, l_i.type.layout, assert_trivial=True)
    if FOLD:
        row_sum *= gl.exp2(-v_log)
    l_i = l_i * alpha_l[:, None] + row_sum
    alpha_o = gl.convert_layout(alpha, ROW_LAYOUT)
    if TWO_LEVEL:
        acc = acc + part if FOLD else acc + part * v_scale
    else:
        acc = part
        if not FOLD:
            alpha_o = alpha_o * (v_scale / v_this)
    return acc, (pack_halves(even, odd, E5M2), k_next, v_next, v_this, alpha_o), m_new, l_i, it


@gluon.jit
def _add_part(acc, part, v_scale, TWO_LEVEL: gl.constexpr, FOLD: gl.constexpr):
    """The last block's P V, which TWO_LEVEL adds here and the tensor cores have added otherwise, in the unit of v."""
    if not FOLD:
        part = part * v_scale
    if TWO_LEVEL:
        part = acc + part
    return part


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, outputs, aside, shape, scales,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_BLOCK: gl.constexpr,
    K_BLOCK: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, SHIFT: gl.constexpr, GROWTH: gl.constexpr,
    UNDER: gl.constexpr, AHEAD: gl.constexpr, TWO_LEVEL: gl.constexpr, CHUNK: gl.constexpr, FOLD: gl.constexpr,
    ALIGNED: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, _, heads_per_kv, _, num_tiles, _, left, right = shape
    _, _, _, _, _, _, _, _, _, _, _, _, _, cap = scales
    HEAD_DIM: gl.constexpr = v_bufs.shape[1]
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    FREE: gl.constexpr = 128 * CONSUMERS + 32  # all consumers and the producer
    KV_BARRIER: gl.constexpr = KV_FREE if NAMED else None
    MASK: gl.constexpr = (CAUSAL or WINDOW) and not ALIGNED
    dtype: gl.constexpr = q_bufs.dtype
    E5M2: gl.constexpr = dtype == gl.float8e5
    TOTALS: gl.constexpr = CHUNK > 0 and not TWO_LEVEL and HEAD_DIM == 256
    RUN: gl.constexpr = CHUNK if CHUNK > 0 else 1 << 30
    HELD: gl.constexpr = CHUNK > 0 and not TWO_LEVEL and HEAD_DIM < 256
    totals = aside
    if TOTALS:
        totals = aside + (gl.program_id(0) * CONSUMERS + WG) * (ROWS * HEAD_DIM)
    it = 0
    k = 0
    tile = gl.program_id(0)
    shift = seqlen_k - seqlen_q
    if WG == CONSUMERS - 1:
        pass_turn(WG, CONSUMERS, PING_PONG)  # lets consumer 0 start
    # The first block of the first tile has nothing to overlap with.
    m_block, batch, head = tile_of(tile, shape, CAUSAL)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
    row0 = m_block * BLOCK_M + WG * ROWS
    row_scale = row_scales(scales, batch, head, row0, seqlen_q, Q_BLOCK, S_ROWS)
    kv_scale = head_scales(scales, batch, head // heads_per_kv)
    k_scale, v_scale = block_scales(kv_scale, hi - 1, BLOCK_N, K_BLOCK)
    v_log = log2_fast(v_scale) if FOLD else 0.0
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    take_turn(WG, PING_PONG)
    s = issue_product(q_bufs.index(WG), k_bufs.index(0).permute((1, 0)), S_LAYOUT)
    pass_turn(WG, CONSUMERS, PING_PONG)
    s = warpgroup_mma_wait(0, deps=[s])
    release(kv_empty, 0, KV_BARRIER, FREE)
    p, m_i = first_softmax(
        s, row_scale * k_scale, v_log, hi - 1, row0, shape, cap, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST, SHIFT
    )
    l_i = thread_row_sum(p)
    if FOLD:
        l_i *= gl.exp2(-v_log)
    p_packed = pack_quads(p, E5M2)
    while tile < num_tiles:
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % 2) * CONSUMERS + WG
        q = q_bufs.index(slot)
        q_phase = (k // 2) & 1
        first, left_end = mask_ends(row0, ROWS, shift, lo, hi, left, right, BLOCK_N, CAUSAL, WINDOW)
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        alpha_o = gl.full([ROWS], 1.0, gl.float32, ROW_LAYOUT)
        m_total = gl.convert_layout(m_i, ROW_LAYOUT)
        total = acc
        chunks = gl.to_tensor(0)
        k_next, v_next = block_scales(kv_scale, gl.maximum(hi - 2, lo), BLOCK_N, K_BLOCK)
        steps = hi - 1 - lo
        if AHEAD:  # noqa: SIM102
            if steps > 0:
                mbarrier.wait(k_full.index((it + 1) % STAGES), ((it + 1) // STAGES) & 1)
        for start in range(0, steps, RUN):
            stop = gl.minimum(start + RUN, steps)
            for j in range(start, stop):
                block = hi - 2 - j
                acc, pend, m_i, l_i, it = _step(
                    q, k_bufs, v_bufs, bars, acc, (p_packed, k_next, v_next, v_scale, alpha_o), m_i, l_i, it,
                    block, j < steps - 1, (block >= first) | (block < left_end), row0, shape, row_scale,
                    (kv_scale, lo, q_full.index(slot), q_phase), cap,
                    WG, CONSUMERS, STAGES, PING_PONG, E5M2, MASK, CAUSAL, WINDOW, SOFTCAP, SHIFT, GROWTH, UNDER, AHEAD,
                    TWO_LEVEL, FOLD, NAMED, K_BLOCK, S_LAYOUT, P_LAYOUT, ROW_LAYOUT)  # fmt: skip
                p_packed, k_next, v_next, v_scale, alpha_o = pend
            if CHUNK > 0:  # noqa: SIM102 - a run-time branch inside a compile-time one
                if stop < steps:
                    m_row = gl.convert_layout(m_i, ROW_LAYOUT)
                    acc = rescale(acc, alpha_o)
                    unit = 1.0 if FOLD else v_scale
                    if TOTALS:
                        m_total = put_aside(totals, acc, unit, m_total, m_row, chunks)
                    else:
                        total = total * gl.exp2(m_total - m_row)[:, None] + acc * unit
                        m_total = m_row
                    acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
                    alpha_o = gl.full([ROWS], 1.0, gl.float32, ROW_LAYOUT)
                    chunks += 1
        acc = rescale(acc, alpha_o)
        mbarrier.arrive(q_empty.index(slot), count=1)
        m_done, l_done, where = m_i, l_i, (batch, head)
        if DYNAMIC:
            tile = receive_tile(k, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        v_stage = it % STAGES
        v_phase = (it // STAGES) & 1
        it += 1
        stage = it % STAGES
        k_phase = (it // STAGES) & 1
        v_last = v_scale
        if tile < num_tiles:
            # The first block of the next tile runs under the last P V product of this one.
            m_block, batch, head = tile_of(tile, shape, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % 2) * CONSUMERS + WG
            q_phase = (k // 2) & 1
            next_row0 = m_block * BLOCK_M + WG * ROWS
            row_scale = row_scales(scales, batch, head, next_row0, seqlen_q, Q_BLOCK, S_ROWS)
            kv_scale = head_scales(scales, batch, head // heads_per_kv)
            k_scale, v_scale = block_scales(kv_scale, hi - 1, BLOCK_N, K_BLOCK)
            v_log = log2_fast(v_scale) if FOLD else 0.0
            p_a = unpack_quads(p_packed, dtype, P_LAYOUT)
            mbarrier.wait(q_full.index(slot), q_phase)
            mbarrier.wait(k_full.index(stage), k_phase)
            take_turn(WG, PING_PONG)
            s_async = issue_product(q_bufs.index(slot), k_bufs.index(stage).permute((1, 0)), S_LAYOUT)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            part_async = _issue_part(p_a, v_bufs.index(v_stage), acc, TWO_LEVEL)
            pass_turn(WG, CONSUMERS, PING_PONG)
            factor = row_scale * k_scale
            s = warpgroup_mma_wait(1, deps=[s_async])
            p, m_i = first_softmax(
                s, factor, v_log, hi - 1, next_row0, shape, cap, CAUSAL, WINDOW, SOFTCAP, MASK_FIRST, SHIFT
            )
            mbarrier.wait(q_full.index(slot), q_phase)
            part, p = warpgroup_mma_wait(0, deps=[part_async, p])
            l_i = thread_row_sum(p)
            if FOLD:
                l_i *= gl.exp2(-v_log)
            release(kv_empty, stage, KV_BARRIER, FREE)
            p_packed = pack_quads(p, E5M2)
            acc = _add_part(acc, part, v_last, TWO_LEVEL, FOLD)
            if HELD:
                acc += total * gl.exp2(m_total - gl.convert_layout(m_done, ROW_LAYOUT))[:, None]
            if TOTALS:
                acc = take_in(acc, totals, m_total, gl.convert_layout(m_done, ROW_LAYOUT), chunks)
            store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, WG, SHIFT, ROW_LAYOUT)
        else:
            mbarrier.wait(v_full.index(v_stage), v_phase)
            p_a = unpack_quads(p_packed, dtype, P_LAYOUT)
            part_async = _issue_part(p_a, v_bufs.index(v_stage), acc, TWO_LEVEL)
            part = warpgroup_mma_wait(0, deps=[part_async])
            acc = _add_part(acc, part, v_last, TWO_LEVEL, FOLD)
            if HELD:
                acc += total * gl.exp2(m_total - gl.convert_layout(m_done, ROW_LAYOUT))[:, None]
            if TOTALS:
                acc = take_in(acc, totals, m_total, gl.convert_layout(m_done, ROW_LAYOUT), chunks)
            store_tile(acc, m_done, l_done, o_bufs, outputs, where, row0, shape, WG, SHIFT, ROW_LAYOUT)
    tma.store_wait(0)
    if WG == 0:
        take_turn(WG, PING_PONG)  # takes the last arrival, so that the barrier is balanced


@gluon.jit
def _load_k(k_desc, batch, kv, block, k_groups, k_full, k_bufs, stage):
    """K's rows, every 16 in the order that makes S an A operand, by a tensor map of rank 5 over groups of 16 rows."""
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    k_heads, k_pitch = k_groups
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    group = (batch * k_heads + kv) * k_pitch + block * (BLOCK_N // 16)
    tma_load(k_desc, [group, 0, 0, 0, 0], k_full.index(stage), k_bufs.index(stage))


@gluon.jit
def _producer(
    bufs, bars, q_desc, k_desc, v_desc, counter, shape, k_groups,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    FREE: gl.constexpr = 128 * CONSUMERS + 32
    KV_BARRIER: gl.constexpr = KV_FREE if NAMED else None
    q_bufs, k_bufs, v_bufs, _ = bufs
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue = bars
    _, seqlen_k, _, heads_per_kv, _, num_tiles, _, _, _ = shape
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    it = 0
    k = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        m_block, batch, head = tile_of(tile, shape, CAUSAL)
        kv = head // heads_per_kv
        lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
        if DYNAMIC:
            early = draw_early(counter, hi - lo)
        slot0 = (k & 1) * CONSUMERS
        q_phase = (k >> 1) & 1
        for c in gl.static_range(CONSUMERS):
            slot = slot0 + c
            mbarrier.wait(q_empty.index(slot), q_phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, m_block * BLOCK_M + c * ROWS, 0], q_full.index(slot), q_bufs.index(slot))
            if c == 0:
                stage = it % STAGES
                if not NAMED:  # waited for behind the tile before
                    mbarrier.wait(kv_empty.index(stage), ((it // STAGES) & 1) ^ 1)
                _load_k(k_desc, batch, kv, hi - 1, k_groups, k_full, k_bufs, stage)
        for j in range(0, hi - 1 - lo):
            v_stage = it % STAGES
            it += 1
            stage = it % STAGES
            # One release frees both: K of a step is released after P V of the step before, so the V slot is free too.
            wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
            _load_k(k_desc, batch, kv, hi - 2 - j, k_groups, k_full, k_bufs, stage)
            mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, 0, (hi - 1 - j) * BLOCK_N], v_full.index(v_stage), v_bufs.index(v_stage))
        v_stage = it % STAGES
        it += 1
        if DYNAMIC:
            tile = draw_late(early, counter, hi - lo)
            publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        wait_free(kv_empty, it, STAGES, KV_BARRIER, FREE)
        mbarrier.expect(v_full.index(v_stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, kv, 0, lo * BLOCK_N], v_full.index(v_stage), v_bufs.index(v_stage))
    if NAMED:  # the last arrivals, which nobody waited for: named barriers end as they began
        for i in range(gl.maximum(it + 1, STAGES), it + STAGES):
            bar_sync_at(KV_FREE + i % STAGES, FREE)
    if DYNAMIC:
        rewind(counter, tile, num_tiles)


@gluon.jit(
    do_not_specialize=[
        "q_b", "q_h", "q_step", "k_b", "k_h", "k_step", "v_b", "v_h", "v_step", "k_heads", "k_pitch", "seqlen_q",
        "seqlen_k", "heads", "heads_per_kv", "num_m", "num_tiles", "group", "left", "right",
    ],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale", "lse_ptr"],
)  # fmt: skip
def fp8_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter, aside,
    q_scale, q_b, q_h, q_step, k_scale, k_b, k_h, k_step, v_scale, v_b, v_h, v_step,
    k_heads, k_pitch, seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, exp_scale, cap,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, PING_PONG: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
    SHIFT: gl.constexpr, GROWTH: gl.constexpr, UNDER: gl.constexpr, AHEAD: gl.constexpr,
    TWO_LEVEL: gl.constexpr, O_CHUNKS: gl.constexpr, CHUNK: gl.constexpr, FOLD: gl.constexpr,
    ALIGNED: gl.constexpr, NAMED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors of q, o: (batch, head, row, column); v: (batch, head, column, key); k: groups of 16 rows in rank 5.

    ALIGNED: under the causal mask, only the first block that a tile walks over is masked.
    The scales are float32 with strides by batch, head and block; `k_pitch` is how many groups of 16 keys a head has.
    """
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_N], dtype)
    O_COLS: gl.constexpr = HEAD_DIM // O_CHUNKS
    O_BUFS: gl.constexpr = CONSUMERS if O_CHUNKS == 1 else 2 * CONSUMERS
    O_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, O_COLS], o_desc.dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], K_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, HEAD_DIM, BLOCK_N], V_LAYOUT)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [O_BUFS, ROWS, O_COLS], O_LAYOUT)
    bars = allocate_bars(2 * CONSUMERS, STAGES, 2)
    ready_bars(bars, CONSUMERS, DYNAMIC, True, not NAMED)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (
        q_scale, q_b, q_h, q_step, k_scale, k_b, k_h, k_step, v_scale, v_b, v_h, v_step, exp_scale, cap,
    )  # fmt: skip
    outputs = (o_desc, lse_ptr)
    k_groups = (k_heads, k_pitch)
    gl.static_assert(CONSUMERS == 2)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out. The last
    # partition is the producer.
    gl.warp_specialize([
        (_consumer, (part, bufs, bars, outputs, aside, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_BLOCK, K_BLOCK,
                     PING_PONG, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, SHIFT, GROWTH, UNDER, AHEAD, TWO_LEVEL,
                     CHUNK, FOLD, ALIGNED, NAMED))
        if part < CONSUMERS else
        (_producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, k_groups, CONSUMERS, BLOCK_N, STAGES,
                     CAUSAL, WINDOW, DYNAMIC, NAMED))
        for part in (0, 1, 2)
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
