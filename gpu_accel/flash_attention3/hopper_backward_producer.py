"""What feeds the Hopper backward kernels: shared memory of their tiles, barriers, and the warp that loads.

All of it serves the kernels of one pass, hopper_backward_kernel.py and hopper_backward_apart.py here and in ring
attention: the head of the first says who waits for what. `load_64_rows` is for those of two passes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpu_accel.gluon_compat import tma_load

from .hopper_backward_device import KEYS, hand_out_tile, listed_tile, query_blocks, reset_counter, tile_at
from .hopper_backward_packed import packed_range
from .hopper_device import bar_sync_at, draw, publish_tile
from .hopper_modifiers import listed_number
from .hopper_packed import zero_rows

ROW_FREE = gl.constexpr(6)  # and 7: named barriers of a stage of rows that has been read (NAMED)


@gluon.jit
def tile_buffers(
    dtype: gl.constexpr, D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr
):
    """Shared memory of Q and dO, two stages of M rows, and of K and V, slots of 64 keys for each of two consumers."""
    ROWS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    KEYS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2, M, D], ROWS_LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, M, D], ROWS_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, KEYS, D], KEYS_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [2 * V_SLOTS, KEYS, D], KEYS_LAYOUT)
    return q_bufs, do_bufs, k_bufs, v_bufs


@gluon.jit
def tile_barriers(
    K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, READERS: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr,
    NAMED: gl.constexpr,
):  # fmt: skip
    """All barriers and the queue, which READERS partitions read; and the barrier of loads with rows to be zeroed."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    row_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fixed = queue_full.index(0)
    if PACKED:
        fixed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(fixed, count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        # where nobody uses a barrier, its memory goes to others, which must not find one there
        if not NAMED:
            mbarrier.init(row_empty.index(i), count=2)
        if DYNAMIC:
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=READERS)
    return (k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue), fixed


@gluon.jit
def _load(desc, at, stat, bar, bufs, slot):
    """A block of rows, with their lse or delta where `stat` is (descriptor, place, buffers) and not None."""
    if stat is None:
        mbarrier.expect(bar, desc.block_type.nbytes)
        tma_load(desc, at, bar, bufs.index(slot))
    else:
        mbarrier.expect(bar, desc.block_type.nbytes + stat[0].block_type.nbytes)
        tma_load(desc, at, bar, bufs.index(slot))
        tma_load(stat[0], [stat[1]], bar, stat[2].index(slot))


@gluon.jit
def load_64_rows(
    desc, batch, head, row, stat, full, empty, bufs, slot, turn, fixed, fixes, used, PACKED: gl.constexpr
):
    """64 rows, as soon as their slot is free; those behind the last of packed sequences become zeros.

    `stat`: see `_load`. Returns how many loads had such rows.
    """
    mbarrier.wait(empty.index(slot), (turn & 1) ^ 1)
    if PACKED:
        short = row + 64 > used
        if short:
            _load(desc, [batch, head, row, 0], stat, fixed, bufs, slot)
            mbarrier.wait(fixed, fixes & 1)
            zero_rows(bufs, slot, gl.maximum(used - row, 0))
            mbarrier.arrive(full.index(slot), count=1)
            fixes += 1
        else:
            _load(desc, [batch, head, row, 0], stat, full.index(slot), bufs, slot)
    else:
        _load(desc, [batch, head, row, 0], stat, full.index(slot), bufs, slot)
    return fixes


@gluon.jit
def _whole_rows(bars, bufs, descs, batch, head, i, stage, fragment, M: gl.constexpr):
    """One step's Q, lse and delta on one barrier, dO on another."""
    q_full, do_full, _ = bars
    q_bufs, do_bufs, stat_bufs = bufs
    q_desc, do_desc, stat_desc = descs
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, i * M, 0], q_full.index(stage), q_bufs.index(stage))
    tma_load(stat_desc, [fragment * (2 * M)], q_full.index(stage), stat_bufs.index(2 * stage))
    tma_load(stat_desc, [fragment * (2 * M) + M], q_full.index(stage), stat_bufs.index(2 * stage + 1))
    mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
    tma_load(do_desc, [batch, head, i * M, 0], do_full.index(stage), do_bufs.index(stage))


@gluon.jit
def _load_rows(
    bars, bufs, descs, batch, head, i, it, fragment, fixed, fixes, used_q,
    M: gl.constexpr, PACKED: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """The rows of a step, as soon as their stage is free. Returns how many loads had rows behind the last."""
    q_full, do_full, row_empty = bars
    q_bufs, do_bufs, stat_bufs = bufs
    q_desc, do_desc, stat_desc = descs
    stage = it % 2
    if NAMED:
        if it >= 2:
            bar_sync_at(ROW_FREE + stage, 288)
    else:
        mbarrier.wait(row_empty.index(stage), ((it // 2) & 1) ^ 1)
    if fixed is None:
        _whole_rows(bars, bufs, descs, batch, head, i, stage, fragment, M)
    else:
        short = False
        if PACKED:
            short = (i + 1) * M > used_q
        if short:
            mbarrier.expect(
                fixed, q_desc.block_type.nbytes + do_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
            tma_load(q_desc, [batch, head, i * M, 0], fixed, q_bufs.index(stage))
            tma_load(do_desc, [batch, head, i * M, 0], fixed, do_bufs.index(stage))
            tma_load(stat_desc, [fragment * (2 * M)], fixed, stat_bufs.index(2 * stage))
            tma_load(stat_desc, [fragment * (2 * M) + M], fixed, stat_bufs.index(2 * stage + 1))
            mbarrier.wait(fixed, fixes & 1)
            rows = gl.maximum(used_q - i * M, 0)
            zero_rows(q_bufs, stage, rows)
            zero_rows(do_bufs, stage, rows)
            mbarrier.arrive(q_full.index(stage), count=1)
            mbarrier.arrive(do_full.index(stage), count=1)
            fixes += 1
        else:
            _whole_rows(bars, bufs, descs, batch, head, i, stage, fragment, M)
    return fixes


@gluon.jit
def _whole_keys(desc, batch, head, key0, bar, bufs, first):
    """A tile of K or V, a buffer for each consumer."""
    mbarrier.expect(bar, 2 * desc.block_type.nbytes)
    for c in gl.static_range(2):
        tma_load(desc, [batch, head, key0 + c * KEYS, 0], bar, bufs.index(first + c))


@gluon.jit
def _load_keys(desc, batch, head, key0, full, bufs, first, fixed, fixes, used_k, PACKED: gl.constexpr):
    """A tile of K or V. Returns how many loads had rows behind the last."""
    if fixed is None:
        _whole_keys(desc, batch, head, key0, full, bufs, first)
    else:
        short = False
        if PACKED:
            short = key0 + 2 * KEYS > used_k
        if short:
            _whole_keys(desc, batch, head, key0, fixed, bufs, first)
            mbarrier.wait(fixed, fixes & 1)
            for c in gl.static_range(2):
                zero_rows(bufs, first + c, gl.maximum(used_k - key0 - c * KEYS, 0))
            mbarrier.arrive(full, count=1)
            fixes += 1
        else:
            _whole_keys(desc, batch, head, key0, full, bufs, first)
    return fixes


@gluon.jit
def producer(
    bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
    M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DYNAMIC: gl.constexpr, NAMED: gl.constexpr = False, ORDERED: gl.constexpr = False, AHEAD: gl.constexpr = False,
    PACKED: gl.constexpr = False, BLOCKS: gl.constexpr = False, table=None, mods=None,
):  # fmt: skip
    """Loads keys and rows. Statistics have places[0] blocks of rows a head, of which the call's begin at places[1].

    ORDERED: blocks of `group` heads side by side, under a causal mask last keys first (the ring's turns). AHEAD: the
    next tile is drawn behind the keys of this one, not behind its last rows. PACKED, BLOCKS, `table` and `mods`: as in
    hopper_backward_kernel.py. `fixed` is the barrier of PACKED; None leaves out the code for it, needed or not.
    """
    q_bufs, do_bufs, k_bufs, v_bufs, _, stat_bufs, _ = bufs
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    shift = seqlen_k - seqlen_q
    all_m, m0 = places[0], places[1]
    HEAVY_FIRST: gl.constexpr = CAUSAL or BLOCKS or ORDERED
    LAST_FIRST: gl.constexpr = CAUSAL and ORDERED
    heads = heads_kv * per_kv
    it = 0
    k = 0
    fixes = gl.to_tensor(0)
    used_q, used_k = seqlen_q, seqlen_k
    if PACKED:
        used_q, used_k = gl.load(table), gl.load(table + 1)
    tile = gl.program_id(0)
    while tile < num_tiles:
        n_block, batch, head_kv = tile_at(tile, num_n, heads_kv, group, HEAVY_FIRST, LAST_FIRST)
        lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
        if PACKED:
            lo, blocks = packed_range(table, n_block, num_m, M)
            hi = lo + blocks
        first_row = lo
        if BLOCKS:
            row, hi = listed_tile(table, mods, (batch * heads_kv + head_kv) * per_kv, heads, n_block)
            first_row = listed_number(row, 0)
        key0 = n_block * 2 * KEYS
        slot = k % K_SLOTS
        mbarrier.wait(k_empty.index(slot), ((k // K_SLOTS) & 1) ^ 1)
        fixes = _load_keys(
            k_desc, batch, head_kv, key0, k_full.index(slot), k_bufs, slot * 2, fixed, fixes, used_k, PACKED
        )
        if DYNAMIC and AHEAD:
            drawn = draw(counter, num_tiles > 0)
        head = head_kv * per_kv
        first = (batch * heads_kv + head_kv) * per_kv * all_m + m0 + first_row
        fixes = _load_rows(
            (q_full, do_full, row_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc), batch,
            head, first_row, it, first, fixed, fixes, used_q, M, PACKED, NAMED
        )  # fmt: skip
        it += 1
        slot = k % V_SLOTS
        mbarrier.wait(v_empty.index(slot), ((k // V_SLOTS) & 1) ^ 1)
        fixes = _load_keys(
            v_desc, batch, head_kv, key0, v_full.index(slot), v_bufs, slot * 2, fixed, fixes, used_k, PACKED
        )
        for g in range(0, per_kv):
            head = head_kv * per_kv + g
            first = (batch * heads_kv * per_kv + head) * all_m + m0
            if BLOCKS:
                row, hi = listed_tile(table, mods, batch * heads + head, heads, n_block)
            for i in range(gl.where(g == 0, lo + 1, lo), hi):
                block = i
                if BLOCKS:
                    block = listed_number(row, i)
                fixes = _load_rows(
                    (q_full, do_full, row_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc), batch,
                    head, block, it, first + block, fixed, fixes, used_q, M, PACKED, NAMED
                )  # fmt: skip
                it += 1
        if DYNAMIC and AHEAD:
            tile = gl.max(drawn, axis=0) + gl.num_programs(0)
            publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile = hand_out_tile(tile, k, counter, queue, queue_full, queue_empty, DYNAMIC)
        k += 1
    if NAMED:
        # The last two arrivals, which nobody waited for: named barriers end as they began.
        for i in range(gl.maximum(it, 2), it + 2):
            bar_sync_at(ROW_FREE + i % 2, 288)
    if DYNAMIC:
        reset_counter(tile, counter, num_tiles)
