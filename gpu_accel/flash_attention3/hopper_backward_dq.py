"""dQ in Gluon for Hopper (sm_90a): the second of the two kernels of the backward above head_dim 128.

Why two kernels: see hopper_backward_dkdv.py.

One persistent program per SM; a tile is 128 query rows of one head:

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 rows: their Q and dO stay in shared memory, their dQ
               in its registers
    producer   1 warp, 24 registers: draws tiles, issues every TMA load

A step is one block of 64 keys:

    issue dQ += dS K, dP' = dO V'^T, S' = Q K'^T | (last step of a tile: dQ to memory) | dS' = P' (dP' - delta)

dS is the left operand straight from registers. The two consumers drift apart by themselves, so that the products of one
run under the exponentials of the other; making them take turns was 1 % slower.

V and K pass in turn, V first, through a ring of three slots of 32 KB, all that Q and dO leave. In this order V is free
after dP and K after the dQ of the next step, and each slot has a whole step for its next load.

Barriers (mbarrier): full and empty one a slot of the ring; q_full, q_empty, do_full, do_empty one a consumer, whose
next rows are loaded when its own last product with the old ones is done; queue_full/queue_empty hand tile numbers to
the consumers. TMA arrives on the full ones, the consumers that read the buffer on the empty ones.

Rows that do not exist or see nothing have lse = +inf here, so that P = exp2(S - inf) = 0 without a mask.

Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B.1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_backward_device import (
    KEYS,
    exponentials,
    hand_out_tile,
    here_and_now,
    next_tile,
    reset_counter,
    store_rows,
    tile_at,
    times_slopes,
)
from .hopper_backward_packed import keep_seen, packed_range, packed_tile
from .hopper_backward_producer import load_64_rows
from .hopper_device import columns_of, pack_pairs, unpack_pairs
from .hopper_modifiers import list_of, listed_block, listed_number

ROWS = gl.constexpr(64)  # query rows of one consumer; a tile has two of these
SLOTS = gl.constexpr(3)  # of the ring through which V and K pass in turn


@gluon.jit
def _key_blocks(row0, seqlen_k, shift, left, right, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """First and one-past-last key block that rows [row0, row0 + 128) see; at least one: zeros must be written."""
    hi = gl.cdiv(seqlen_k, KEYS)
    lo = 0
    if CAUSAL:
        hi = gl.maximum(gl.minimum(hi, gl.cdiv(row0 + 2 * ROWS + shift + right, KEYS)), 1)
    if WINDOW:
        lo = gl.minimum(gl.maximum(row0 + shift - left, 0) // KEYS, hi - 1)
    return lo, hi


@gluon.jit
def _ds(
    s, dp, lse, delta, row0, key0, shift, seqlen_k, left, right, qk_scale, cap_in, kind, at, seen, mods,
    DTYPE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    PACKED: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr,
    MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """dS = P (dP - delta) of a (64, 64) block, packed; `at` is (batch, head), `seen` as from `packed_tile`."""
    LAYOUT: gl.constexpr = s.type.layout
    p, capped, before = exponentials(s, lse[:, None], row0, key0, shift, seqlen_k, qk_scale, cap_in, kind, at, mods,
                                     SOFTCAP, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS, 0)  # fmt: skip
    if PACKED:
        p = keep_seen(p, key0, seen)
    elif CAUSAL or WINDOW or not EVEN_K:
        masked = key0 + KEYS > seqlen_k
        if CAUSAL:
            masked = masked | (key0 + KEYS - 1 > row0 + shift + right)
        if WINDOW:
            masked = masked | (key0 < row0 + ROWS - 1 + shift - left)
        if masked:
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)) + (row0 + shift - key0)
            col, lane = columns_of(p)
            end = row * 0 + (seqlen_k - key0 - 1)
            if CAUSAL:
                end = gl.minimum(end, row + right)
            p = gl.where(col <= end[:, None] - lane, p, 0.0)
            if WINDOW:
                p = gl.where(col >= (row - left)[:, None] - lane, p, 0.0)
    p = times_slopes(p, capped, before, row0, key0, shift, seqlen_k, at, mods, SOFTCAP, SCORE_MOD, SCORE_MOD_GRAD, 0)
    return pack_pairs(p * (dp - delta[:, None]), DTYPE)


@gluon.jit
def _listed(table, mods, batch, head, m):
    """A tile's list of key blocks, and how many there are."""
    row = list_of(table, mods, batch, head, m)
    return row, gl.load(row)


@gluon.jit
def _statistics(stat_ptr, batch_head, block, stat_blocks, LAYOUT: gl.constexpr):
    """lse in base 2 and delta of 64 rows."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    ptr = stat_ptr + (batch_head.to(gl.int64) * stat_blocks + block) * (2 * ROWS)
    return gl.load(ptr + row), gl.load(ptr + ROWS + row)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, stat_ptr, dq_ptr, table, shape, scales, mods,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    MASK_D: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, ring = bufs
    q_full, q_empty, do_full, do_empty, full, empty, queue_full, queue_empty, queue = bars
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    seqlen_q, seqlen_k, heads, _, num_m, num_tiles, group, left, right, units, stat_blocks = shape
    softmax_scale, qk_scale, cap_in = scales
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    m, batch, head = tile_at(tile, num_m, heads, group, LONG_FIRST, LONG_FIRST)
    j, hi = _key_blocks(m * 2 * ROWS, seqlen_k, shift, left, right, CAUSAL, WINDOW)
    block0 = j
    kind0 = 2
    if PACKED:
        j, blocks, seen = packed_tile(
            table, m, num_m, gl.cdiv(seqlen_k, KEYS), WG, KEYS, gl.SliceLayout(1, S_LAYOUT))  # fmt: skip
        hi = j + blocks
        block0 = j
    else:
        seen = (shift,)
    if BLOCKS:
        row, hi = _listed(table, mods, batch, head, m)
        j = gl.to_tensor(0)
        block0, kind0 = listed_block(row, 0, WG)
    it = 0
    k = 0
    dq = gl.full([ROWS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([ROWS, KEYS], 0.0, gl.float32, S_LAYOUT)
    lse, delta = _statistics(stat_ptr, batch * heads + head, m * 2 + WG, stat_blocks, S_LAYOUT)
    mbarrier.wait(do_full.index(WG), 0)
    mbarrier.wait(full.index(0), 0)
    dp_async = warpgroup_mma(do_bufs.index(WG), ring.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(full.index(1), 0)
    s_async = warpgroup_mma(q_bufs.index(WG), ring.index(1).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    dp, s = warpgroup_mma_wait(0, deps=[dp_async, s_async])
    mbarrier.arrive(empty.index(0), count=1)
    if j + 1 == hi:
        mbarrier.arrive(do_empty.index(WG), count=1)
        mbarrier.arrive(q_empty.index(WG), count=1)
    ds = _ds(s, dp, lse, delta, (m * 2 + WG) * ROWS, block0 * KEYS, shift, seqlen_k, left, right, qk_scale, cap_in,
             kind0, (batch, head), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K, PACKED,
             ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
    while tile < num_tiles:
        k_slot = (2 * it + 1) % SLOTS
        own = here_and_now(WG)
        last = j + 1 == hi
        dq_async = warpgroup_mma(unpack_pairs(ds, dtype, A_LAYOUT), ring.index(k_slot), dq, is_async=True)
        tile_done = tile
        it_next = it + 1
        j += 1
        if last:
            tile = next_tile(tile, k, queue, queue_full, queue_empty, DYNAMIC)
            k += 1
            if tile < num_tiles:
                m, batch, head = tile_at(tile, num_m, heads, group, LONG_FIRST, LONG_FIRST)
                j, hi = _key_blocks(m * 2 * ROWS, seqlen_k, shift, left, right, CAUSAL, WINDOW)
                if PACKED:
                    j, blocks, seen = packed_tile(
                        table, m, num_m, gl.cdiv(seqlen_k, KEYS), WG, KEYS, gl.SliceLayout(1, S_LAYOUT))  # fmt: skip
                    hi = j + blocks
                if BLOCKS:
                    row, hi = _listed(table, mods, batch, head, m)
                    j = gl.to_tensor(0)
                mbarrier.wait(do_full.index(WG), k & 1)
                mbarrier.wait(q_full.index(WG), k & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
        block = j
        kind = 2
        if BLOCKS:
            block, kind = listed_block(row, gl.minimum(j, hi - 1), WG)
        v_at = 2 * it_next
        v_slot = v_at % SLOTS
        mbarrier.wait(full.index(v_slot), (v_at // SLOTS) & 1)
        v = ring.index(v_slot).permute((1, 0))
        dp_async = warpgroup_mma(do_bufs.index(own), v, s_zero, use_acc=False, is_async=True)
        next_slot = (v_at + 1) % SLOTS
        mbarrier.wait(full.index(next_slot), ((v_at + 1) // SLOTS) & 1)
        key = ring.index(next_slot).permute((1, 0))
        s_async = warpgroup_mma(q_bufs.index(own), key, s_zero, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq_async])
        mbarrier.arrive(empty.index(k_slot), count=1)
        if last:
            m_done, batch_done, head_done = tile_at(tile_done, num_m, heads, group, LONG_FIRST, LONG_FIRST)
            store_rows(dq_ptr, dq * softmax_scale, batch_done, (m_done * 2 + WG) * ROWS, head_done, seqlen_q, heads,
                       units, dtype, MASK_D)  # fmt: skip
            dq = gl.full([ROWS, D], 0.0, gl.float32, D_LAYOUT)
            if tile < num_tiles:
                lse, delta = _statistics(stat_ptr, batch * heads + head, m * 2 + WG, stat_blocks, S_LAYOUT)
        dp = warpgroup_mma_wait(1, deps=[dp_async])
        mbarrier.arrive(empty.index(v_slot), count=1, pred=tile < num_tiles)  # not of the repeated step
        if j + 1 == hi:
            mbarrier.arrive(do_empty.index(WG), count=1)
        s = warpgroup_mma_wait(0, deps=[s_async])
        if j + 1 == hi:
            mbarrier.arrive(q_empty.index(WG), count=1)
        ds = _ds(s, dp, lse, delta, (m * 2 + WG) * ROWS, block * KEYS, shift, seqlen_k, left, right, qk_scale, cap_in,
                 kind, (batch, head), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K, PACKED,
                 ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
        it = it_next


@gluon.jit
def _producer(
    bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, table, counter, shape, mods,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, ring = bufs
    q_full, q_empty, do_full, do_empty, full, empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads, per_kv, num_m, num_tiles, group, left, right, _, _ = shape
    shift = seqlen_k - seqlen_q
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    at = 0
    k = 0
    fixes = gl.to_tensor(0)
    used_q, used_k = seqlen_q, seqlen_k
    if PACKED:  # the table is one of keys seen by queries
        used_k, used_q = gl.load(table), gl.load(table + 1)
    tile = gl.program_id(0)
    while tile < num_tiles:
        m, batch, head = tile_at(tile, num_m, heads, group, LONG_FIRST, LONG_FIRST)
        lo, hi = _key_blocks(m * 2 * ROWS, seqlen_k, shift, left, right, CAUSAL, WINDOW)
        if PACKED:
            lo, blocks = packed_range(table, m, gl.cdiv(seqlen_k, KEYS), KEYS)
            hi = lo + blocks
        if BLOCKS:
            row, hi = _listed(table, mods, batch, head, m)
            lo = gl.to_tensor(0)
        head_kv = head // per_kv
        row0 = m * 2 * ROWS
        for j in range(lo, hi):
            block = j
            if BLOCKS:
                block = listed_number(row, j)
            fixes = load_64_rows(v_desc, batch, head_kv, block * KEYS, None, full, empty, ring, at % SLOTS, at // SLOTS,
                                 fixed, fixes, used_k, PACKED)  # fmt: skip
            at += 1
            if j == lo:
                for c in gl.static_range(2):
                    fixes = load_64_rows(do_desc, batch, head, row0 + c * ROWS, None, do_full, do_empty, do_bufs, c, k,
                                         fixed, fixes, used_q, PACKED)  # fmt: skip
            fixes = load_64_rows(k_desc, batch, head_kv, block * KEYS, None, full, empty, ring, at % SLOTS, at // SLOTS,
                                 fixed, fixes, used_k, PACKED)  # fmt: skip
            at += 1
            if j == lo:
                for c in gl.static_range(2):
                    fixes = load_64_rows(q_desc, batch, head, row0 + c * ROWS, None, q_full, q_empty, q_bufs, c, k,
                                         fixed, fixes, used_q, PACKED)  # fmt: skip
        tile = hand_out_tile(tile, k, counter, queue, queue_full, queue_empty, DYNAMIC)
        k += 1
    if DYNAMIC:
        reset_counter(tile, counter, num_tiles)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads", "per_kv", "num_m", "num_tiles", "group", "left", "right",
                       "units", "stat_blocks", "table", "slopes", "slopes_sb", "aux", "cap_out", "table_width",
                       "table_sb", "table_sh"]
)
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_ptr, dq_ptr, counter, table,
    seqlen_q, seqlen_k, heads, per_kv, num_m, num_tiles, group, left, right, units, stat_blocks,
    softmax_scale, qk_scale, cap_in, slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    MASK_D: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr,
):  # fmt: skip
    """q, do, k, v descriptors are rank 4, (batch, head, row, column); dq contiguous, as int32.

    `table` is None, or (PACKED) that of hopper_backward_packed.py with queries and keys exchanged, or (with a table
    width) that of hopper_blocks.py for tiles of 128 queries and blocks of 64 keys. The rest: hopper_backward_kernel.py.
    """
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [2, ROWS, D], LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, ROWS, D], LAYOUT)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, KEYS, D], LAYOUT)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fixed = queue_full.index(0)
    if PACKED:
        fixed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(fixed, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=1)
        if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bufs = (q_bufs, do_bufs, ring)
    bars = (q_full, q_empty, do_full, do_empty, full, empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads, per_kv, num_m, num_tiles, group, left, right, units, stat_blocks)
    scales = (softmax_scale, qk_scale, cap_in)
    ALIBI: gl.constexpr = slopes is not None
    BLOCKS: gl.constexpr = table_width is not None
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, stat_ptr, dq_ptr, table, shape, scales,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     D, CAUSAL, WINDOW, SOFTCAP, EVEN_K, MASK_D, DYNAMIC, PACKED,
                     ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)),
        (_consumer, (1, bufs, bars, stat_ptr, dq_ptr, table, shape, scales,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     D, CAUSAL, WINDOW, SOFTCAP, EVEN_K, MASK_D, DYNAMIC, PACKED,
                     ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)),
        (_producer, (bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, table, counter, shape,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     CAUSAL, WINDOW, DYNAMIC, PACKED, BLOCKS)),
    ], [4, 1], [240, 24])  # fmt: skip
