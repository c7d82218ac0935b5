"""FlashAttention-3 forward in FP8 for Hopper (sm_90a) in Gluon, planned around the exponentials.

A warpgroup's step of `hopper_fp8_forward.py` is a chain: products, row maxima, exponentials, packing, sums. The unit of
the exponentials works in a third of it, and two warpgroups do not fill the rest. Here, per step of a warpgroup:

    S of the next block     issued first; its row maxima are found between exponentials
    P of this block         in SLICES runs of columns: exponentials, packing, and at once P V of the slice, which runs
                            under the exponentials of the next
    O                       stays in the tensor cores for CHUNK blocks, then is added up in float32: second level of
                            the sum, in registers (head_dim 64), shared memory, or global memory (TOTALS)

so that between the last exponential of a block and the first of the next there are a wait, two shuffles a row and the
multiplication of O. AHEAD off issues S of the next block after the last exponential instead of before the first: one
block of S in registers, which leaves room for a third consumer.

v_scale. O is kept in a unit of its own, that of the last block's v: where v_scale changes, O is multiplied, as where a
maximum grows. P itself carries no part of v_scale: its largest numbers are powers of two, which FP8 holds exactly, and
times a v_scale they would be rounded. Only where v_scale falls 2**DEPTH below the largest so far does P take the rest,
so that O cannot overflow.

Operand layouts, barriers, producer, tile queue and the pipeline across tiles: see `hopper_fp8_forward.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_device import (
    NEG_LARGE,
    bar_arrive,
    bar_sync,
    key_blocks,
    receive_tile,
    thread_row_sum,
    tile_of,
)
from .hopper_fp8_device import (
    ROWS,
    block_scales,
    columns,
    head_scales,
    log2_fast,
    mask_block,
    pack_quads,
    pin_rows,
    put_aside,
    put_aside_shared,
    row_scales,
    scale_by_change,
    scale_sums_by_change,
    store_tile,
    take_in,
    take_in_shared,
    unpack_quads,
)
from .hopper_fp8_forward import _producer

PING_PONG_BARRIER = gl.constexpr(8)
DEPTH = gl.constexpr(96.0)  # log2 of how far the unit of O may fall below its highest: beyond, O might overflow


@gluon.jit
def _probabilities(s, factor, offset):
    ROWS_OF_S: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    factor = gl.convert_layout(factor, ROWS_OF_S, assert_trivial=True)
    offset = gl.convert_layout(offset, ROWS_OF_S, assert_trivial=True)
    return gl.exp2(s * factor[:, None] - offset[:, None])


@gluon.jit
def _products(
    q, k_bufs, v_bufs, bars, acc, s, factor, offset, it,
    WG: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, TURNS: gl.constexpr,
    AHEAD: gl.constexpr, E5M2: gl.constexpr, PIN: gl.constexpr, NEXT: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """P and P V of the block whose scores are `s`, and, if NEXT, the scores of the next block."""
    _, _, k_full, v_full, kv_empty, _, _, _ = bars
    BLOCK_N: gl.constexpr = k_bufs.shape[1]
    COLS: gl.constexpr = BLOCK_N // SLICES
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    v_stage = it % STAGES
    v_phase = (it // STAGES) & 1
    it += 1
    stage = it % STAGES
    phase = (it // STAGES) & 1
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s_next = s
    if NEXT and AHEAD:
        mbarrier.wait(k_full.index(stage), phase)
    if TURNS:
        bar_sync(PING_PONG_BARRIER + WG, 256)
    if NEXT and AHEAD:
        s_async = warpgroup_mma(q, k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    v = v_bufs.index(v_stage)
    row_sum = 0.0
    for c in gl.static_range(SLICES):
        p = _probabilities(columns(s, c, SLICES), factor, offset)
        row_sum = thread_row_sum(p) if c == 0 else row_sum + thread_row_sum(p)
        p_a = unpack_quads(pack_quads(p, E5M2), q.dtype, P_LAYOUT)
        acc = warpgroup_mma(p_a, v.slice(c * COLS, COLS, dim=1).permute((1, 0)), acc, is_async=True)
        if NEXT and AHEAD and c == (SLICES - 1) // 2:
            s_next = warpgroup_mma_wait(c + 1, deps=[s_async])
    if TURNS:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)
    if NEXT and not AHEAD:
        mbarrier.wait(k_full.index(stage), phase)
        s_async = warpgroup_mma(q, k_bufs.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc, s_next = warpgroup_mma_wait(0, deps=[acc, s_async])
        highest = gl.max(s_next, axis=1)
    else:
        highest = gl.max(s_next, axis=1)
        if PIN and NEXT:
            pin_rows(highest)
        acc, highest = warpgroup_mma_wait(0, deps=[acc, highest])
    if NEXT:
        mbarrier.arrive(kv_empty.index(stage), count=1)
    return acc, s_next, highest, row_sum, it


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, outputs, aside, shape, scales,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr,
    Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, TURNS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, SHIFT: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr,
    CHUNK: gl.constexpr, TOTALS: gl.constexpr, PAIRS: gl.constexpr, BRANCH: gl.constexpr,
):  # fmt: skip
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, k_full, _, kv_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, _, heads_per_kv, _, num_tiles, _, left, right = shape
    HEAD_DIM: gl.constexpr = v_bufs.shape[1]
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    E5M2: gl.constexpr = q_bufs.dtype == gl.float8e5
    # the branch around masks would let ptxas put the maxima of every step behind the wait for P V
    PIN: gl.constexpr = AHEAD and (CAUSAL or WINDOW)
    totals = aside
    if TOTALS == "global":
        # this consumer's own (ROWS, HEAD_DIM), which only its threads touch, each its own numbers
        r = gl.arange(0, ROWS, layout=ROW_LAYOUT)
        c = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, O_LAYOUT))
        totals = aside + ((gl.program_id(0) * CONSUMERS + WG) * ROWS + r)[:, None] * HEAD_DIM + c[None, :]
    elif TOTALS == "shared":
        totals = aside.index(WG)
    it = 0
    k = 0
    tile = gl.program_id(0)
    shift = seqlen_k - seqlen_q
    if TURNS and WG == CONSUMERS - 1:
        bar_arrive(PING_PONG_BARRIER, 256)  # lets consumer 0 start
    # The first block of the first tile has nothing to overlap with.
    m_block, batch, head = tile_of(tile, shape, CAUSAL)
    lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
    row0 = m_block * BLOCK_M + WG * ROWS
    row_scale = row_scales(scales, batch, head, row0, seqlen_q, Q_BLOCK, S_ROWS)
    kv_scale = head_scales(scales, batch, head // heads_per_kv)
    k_scale, v_scale = block_scales(kv_scale, hi - 1, BLOCK_N, K_BLOCK)
    v_log = log2_fast(v_scale)
    unit = v_log
    unit_max = v_log
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_bufs.index(WG), k_bufs.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(kv_empty.index(0), count=1)
    if MASK_FIRST:
        s = mask_block(s, hi - 1, row0, shape, CAUSAL, WINDOW)
    factor = row_scale * k_scale
    m_i = gl.maximum(gl.max(s, axis=1) * factor, NEG_LARGE)
    offset = m_i - SHIFT
    while tile < num_tiles:
        row0 = m_block * BLOCK_M + WG * ROWS
        slot = (k % Q_SLOTS) * CONSUMERS + WG
        q = q_bufs.index(slot)
        # Blocks [lo, left_end) need the left mask, blocks [first, hi) the right one; block hi - 1 is done.
        first = hi - 1
        left_end = lo
        if CAUSAL:
            first = gl.minimum(first, gl.maximum(row0 + shift + right + 1, 0) // BLOCK_N)
        if WINDOW:
            left_end = gl.cdiv(gl.maximum(row0 + ROWS - 1 + shift - left, 0), BLOCK_N)
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
        total = acc
        l_i = thread_row_sum(columns(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S_LAYOUT), 0, SLICES))
        L_ROWS: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
        m_total = gl.convert_layout(m_i, ROW_LAYOUT) + unit
        chunks = gl.to_tensor(0)
        k_next, v_next = block_scales(kv_scale, gl.maximum(hi - 2, lo), BLOCK_N, K_BLOCK)
        steps = hi - 1 - lo
        for start in range(0, steps, PAIRS):
            for half in gl.static_range(PAIRS):
                j = start + half
                if half == 0 or j < steps:
                    block = hi - 2 - j  # the one whose scores are computed here
                    k_this = k_next
                    v_this = v_next
                    k_next, v_next = block_scales(kv_scale, gl.maximum(block - 1, lo), BLOCK_N, K_BLOCK)
                    acc, s, highest, row_sum, it = _products(
                        q, k_bufs, v_bufs, bars, acc, s, factor, offset, it,
                        WG, CONSUMERS, STAGES, SLICES, TURNS, AHEAD, E5M2, PIN, True, S_LAYOUT, O_LAYOUT)  # fmt: skip
                    l_i += row_sum * gl.exp2(unit - v_log)
                    if CAUSAL or WINDOW:  # noqa: SIM102 - a run-time branch inside a compile-time one
                        if (block >= first) | (block < left_end):
                            s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
                            highest = gl.max(s, axis=1)
                    factor = row_scale * k_this
                    m_new = gl.maximum(m_i, highest * factor)
                    change = m_i - m_new
                    m_i = m_new
                    v_log = log2_fast(v_this)
                    unit_new = gl.maximum(v_log, unit_max - DEPTH)
                    unit_max = gl.maximum(unit_max, unit_new)
                    offset = m_i - (SHIFT + v_log - unit_new)
                    if BRANCH:
                        l_i = scale_sums_by_change(l_i, gl.convert_layout(change, L_ROWS, assert_trivial=True))
                        acc = scale_by_change(acc, gl.convert_layout(change, ROW_LAYOUT) + (unit - unit_new))
                    else:
                        alpha = gl.exp2(change)
                        l_i *= gl.convert_layout(alpha, L_ROWS, assert_trivial=True)[:, None]
                        acc = acc * (gl.convert_layout(alpha, ROW_LAYOUT) * gl.exp2(unit - unit_new))[:, None]
                    unit = unit_new
                    if CHUNK > 0:  # noqa: SIM102
                        if (j % CHUNK == CHUNK - 1) & (j + 1 < steps):
                            m_row = gl.convert_layout(m_i, ROW_LAYOUT) + unit
                            if TOTALS == "registers":
                                total = total * gl.exp2(m_total - m_row)[:, None] + acc
                            elif TOTALS == "shared":
                                put_aside_shared(totals, acc, gl.exp2(m_total - m_row), chunks)
                            else:
                                put_aside(totals, acc, m_total, m_row, chunks)
                            acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, O_LAYOUT)
                            m_total = m_row
                            chunks += 1
        mbarrier.arrive(q_empty.index(slot), count=1)
        m_done, unit_done, log_done, where = m_i, unit, v_log, (batch, head)
        if DYNAMIC:
            tile = receive_tile(k, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
        if tile < num_tiles:
            # The scores of the next tile's first block are computed under the last P V of this one.
            m_block, batch, head = tile_of(tile, shape, CAUSAL)
            lo, hi = key_blocks(m_block * BLOCK_M, BLOCK_M, shape, BLOCK_N, CAUSAL, WINDOW)
            slot = (k % Q_SLOTS) * CONSUMERS + WG
            next_row0 = m_block * BLOCK_M + WG * ROWS
            row_scale = row_scales(scales, batch, head, next_row0, seqlen_q, Q_BLOCK, S_ROWS)
            kv_scale = head_scales(scales, batch, head // heads_per_kv)
            k_scale, v_scale = block_scales(kv_scale, hi - 1, BLOCK_N, K_BLOCK)
            v_log = log2_fast(v_scale)
            unit = v_log
            unit_max = v_log
            mbarrier.wait(q_full.index(slot), (k // Q_SLOTS) & 1)
            acc, s, highest, row_sum, it = _products(
                q_bufs.index(slot), k_bufs, v_bufs, bars, acc, s, factor, offset, it,
                WG, CONSUMERS, STAGES, SLICES, TURNS, AHEAD, E5M2, PIN, True, S_LAYOUT, O_LAYOUT)  # fmt: skip
            if MASK_FIRST:
                s = mask_block(s, hi - 1, next_row0, shape, CAUSAL, WINDOW)
                highest = gl.max(s, axis=1)
            factor = row_scale * k_scale
            m_i = gl.maximum(highest * factor, NEG_LARGE)
            offset = m_i - SHIFT
        else:
            acc, s, highest, row_sum, it = _products(
                q, k_bufs, v_bufs, bars, acc, s, factor, offset, it,
                WG, CONSUMERS, STAGES, SLICES, TURNS, AHEAD, E5M2, PIN, False, S_LAYOUT, O_LAYOUT)  # fmt: skip
        l_i += row_sum * gl.exp2(unit_done - log_done)
        if CHUNK > 0:
            m_row = gl.convert_layout(m_done, ROW_LAYOUT) + unit_done
            if TOTALS == "registers":
                acc += total * gl.exp2(m_total - m_row)[:, None]
            elif TOTALS == "shared":
                acc = take_in_shared(acc, totals, gl.exp2(m_total - m_row), chunks)
            else:
                acc = take_in(acc, totals, m_total, m_row, chunks)
        acc *= gl.exp2(unit_done)
        store_tile(acc, m_done, l_i, o_bufs, outputs, where, row0, shape, WG, SHIFT, ROW_LAYOUT)
    tma.store_wait(0)
    if TURNS and WG == 0:
        bar_sync(PING_PONG_BARRIER, 256)  # takes the last arrival, so that the barrier is balanced


@gluon.jit(
    do_not_specialize=[
        "q_b", "q_h", "q_step", "k_b", "k_h", "k_step", "v_b", "v_h", "v_step", "k_heads", "k_pitch", "seqlen_q",
        "seqlen_k", "heads", "heads_per_kv", "num_m", "num_tiles", "group", "left", "right",
    ],
    do_not_specialize_on_alignment=["q_scale", "k_scale", "v_scale", "lse_ptr"],
)  # fmt: skip
def fp8_sliced_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter, aside,
    q_scale, q_b, q_h, q_step, k_scale, k_b, k_h, k_step, v_scale, v_b, v_h, v_step,
    k_heads, k_pitch, seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, exp_scale,
    CONSUMERS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr, Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, TURNS: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, SHIFT: gl.constexpr, SLICES: gl.constexpr,
    AHEAD: gl.constexpr, CHUNK: gl.constexpr, TOTALS: gl.constexpr, PAIRS: gl.constexpr, BRANCH: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as of `fp8_forward_kernel`."""
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    V_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEAD_DIM, BLOCK_N], dtype)
    O_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], o_desc.dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [Q_SLOTS * CONSUMERS, ROWS, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], K_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, HEAD_DIM, BLOCK_N], V_LAYOUT)
    o_bufs = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, ROWS, HEAD_DIM], O_LAYOUT)
    totals = aside
    if TOTALS == "shared":
        # accumulators are written 32 bytes of 8 rows at a time: rows take turns at the banks
        T_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        totals = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, HEAD_DIM], T_LAYOUT)
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
    if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
        for i in gl.static_range(2):
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=CONSUMERS)
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    bars = (q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (
        q_scale, q_b, q_h, q_step, k_scale, k_b, k_h, k_step, v_scale, v_b, v_h, v_step, exp_scale, 0.0,
    )  # fmt: skip
    outputs = (o_desc, lse_ptr)
    k_groups = (k_heads, k_pitch)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, outputs, totals, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, Q_BLOCK,
                         K_BLOCK, TURNS, CAUSAL, WINDOW, EVEN_K, DYNAMIC, SHIFT, SLICES, AHEAD, CHUNK, TOTALS, PAIRS,
                         BRANCH)),
            (_consumer, (1, bufs, bars, outputs, totals, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, Q_BLOCK,
                         K_BLOCK, TURNS, CAUSAL, WINDOW, EVEN_K, DYNAMIC, SHIFT, SLICES, AHEAD, CHUNK, TOTALS, PAIRS,
                         BRANCH)),
            (_producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, k_groups, CONSUMERS, BLOCK_N, STAGES,
                         CAUSAL, WINDOW, DYNAMIC, Q_SLOTS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3 and not TURNS)
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, outputs, totals, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, Q_BLOCK,
                         K_BLOCK, TURNS, CAUSAL, WINDOW, EVEN_K, DYNAMIC, SHIFT, SLICES, AHEAD, CHUNK, TOTALS, PAIRS,
                         BRANCH)),
            (_consumer, (1, bufs, bars, outputs, totals, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, Q_BLOCK,
                         K_BLOCK, TURNS, CAUSAL, WINDOW, EVEN_K, DYNAMIC, SHIFT, SLICES, AHEAD, CHUNK, TOTALS, PAIRS,
                         BRANCH)),
            (_consumer, (2, bufs, bars, outputs, totals, shape, scales, CONSUMERS, BLOCK_N, STAGES, Q_SLOTS, Q_BLOCK,
                         K_BLOCK, TURNS, CAUSAL, WINDOW, EVEN_K, DYNAMIC, SHIFT, SLICES, AHEAD, CHUNK, TOTALS, PAIRS,
                         BRANCH)),
            (_producer, (bufs, bars, q_desc, k_desc, v_desc, counter, shape, k_groups, CONSUMERS, BLOCK_N, STAGES,
                         CAUSAL, WINDOW, DYNAMIC, Q_SLOTS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
