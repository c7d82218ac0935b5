"""dK and dV in Gluon for Hopper (sm_90a): the first of the two kernels of the backward above head_dim 128.

Why two kernels. At head_dim 256 dK and dV of only 64 keys fill 128 registers of every thread of two warpgroups, so a
kernel that goes over the scores once would load 64 KB of Q and dO, and add 64 KB of dQ in float32, for every 64 x 64
scores. Going over them twice takes seven products instead of five, but less of everything else. Estimated clocks an SM
for 64 x 64 scores (2048 multiplications and 128 bytes of shared memory a clock, 24.5 bytes of L2 a clock and SM):

                   tensor cores   shared memory       L2
    one pass               2560            3520     5350
    two passes             3584            3700     4010      this kernel 2048, 2180, 2670, the other 1536, 1540, 1340

Nothing is added in an order that changes, so the gradients are the same bits in every run, and there is no sum of dQ to
zero and to convert. Measured, it runs at the rate of a large matrix product (see the paper's README).

One persistent program per SM; a tile is 64 keys of one key head:

    dV consumer  1 warpgroup, 240 registers: S^T = K Q^T, P^T = exp2(S^T - lse), dV += P^T dO
    dK consumer  1 warpgroup, 240 registers: dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q
    producer     1 warp, 24 registers: draws tiles, issues every TMA load

Each consumer holds one accumulator of 64 x head_dim and uses its own left operands from registers; only P^T goes from
one to the other, 8 KB through shared memory, from each thread to its twin. A step is 64 query rows of one query head;
grouped heads are walked in turn, so dK and dV of a key head are summed in registers. Order of a step:

    dV consumer | issue dV += P dO, S' | (last step of a tile: dV to memory) | wait S', P' = exp2(S' - lse'), send P'
    dK consumer | receive P, dS | issue dK += dS Q, dP' | (last: dK to memory) | wait dP'

so each consumer's CUDA-core work runs under the products of the other. The next step may be the first of the next tile:
K is free once S of the last step is done, and its successor arrives under the product that follows. For the same reason
two stages of Q and of dO leave a whole step for each load.

Barriers (mbarrier, phase (i // n) & 1): k_full, k_empty, v_full, v_empty; q_full, q_empty (Q and lse), do_full and
do_empty (dO and delta) one a stage; queue_full/queue_empty hand tile numbers to the consumers. TMA arrives on the full
ones; both consumers on the empty ones of stages, the one that reads it on k_empty and v_empty. Named barriers 10 and
11: P of a stage is in shared memory. That its buffer is free again follows from q_full of the step after next: the dK
consumer lets go of Q only when it has read P.

Rows that do not exist or see nothing have lse = +inf here, so that P = exp2(S - inf) = 0 without a mask.

Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B.1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_backward_device import (
    KEYS,
    first_step,
    hand_out_tile,
    hand_over,
    listed_tile,
    modified_probabilities,
    next_tile,
    query_blocks,
    reset_counter,
    store_rows,
    take_over,
    tile_at,
)
from .hopper_backward_packed import packed_range_of_64, packed_tile_of_64
from .hopper_backward_producer import load_64_rows
from .hopper_device import bar_arrive, bar_arrive_at, bar_sync_at, pack_pairs, unpack_pairs
from .hopper_modifiers import listed_block, listed_number

M = gl.constexpr(64)  # query rows of a step
P_READY = gl.constexpr(10)  # and 11: P of stage (id - 10) is in shared memory


@gluon.jit
def _dv_consumer(
    bufs, bars, dv_ptr, table, shape, scales, mods,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    MASK_D: gl.constexpr, DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr,
    MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_buf, _, p_bufs, lse_bufs, _ = bufs
    k_full, k_empty, _, _, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, units, _ = shape
    _, qk_scale, cap_in = scales
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    heads = heads_kv * per_kv
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    n_block, head, i, blocks = first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, KEYS, CAUSAL, WINDOW,
        LONG_FIRST)  # fmt: skip
    kind0 = 2
    if PACKED:
        i, blocks, seen = packed_tile_of_64(
            table, n_block, (num_n + 1) // 2, num_m, M, gl.SliceLayout(1, S_LAYOUT))  # fmt: skip
    else:
        seen = ()
    if BLOCKS:
        row, blocks = listed_tile(table, mods, head, heads, n_block)
        at = gl.to_tensor(0)
        i, kind0 = listed_block(row, 0, 0)
    group_left = per_kv
    it = 0
    k = 0
    dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([KEYS, M], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_async = warpgroup_mma(k_buf.index(0), q_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    lse = lse_bufs.index(0).load(COLUMNS)
    s, lse = warpgroup_mma_wait(0, deps=[s_async, lse])
    mbarrier.arrive(q_empty.index(0), count=1)
    if (blocks == 1) & (group_left == 1):
        mbarrier.arrive(k_empty.index(0), count=1)
    p, factor = modified_probabilities(
        s, lse, n_block * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind0,
        (head // heads, head % heads), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K,
        PACKED, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
    hand_over(p_bufs.index(0), factor)
    bar_arrive(P_READY, 256)
    while tile < num_tiles:
        stage = it % 2
        last = (blocks == 1) & (group_left == 1)
        mbarrier.wait(do_full.index(stage), (it // 2) & 1)
        dv_async = warpgroup_mma(unpack_pairs(p, dtype, A_LAYOUT), do_bufs.index(stage), dv, is_async=True)
        tile_done = tile
        it_next = it + 1
        i += 1
        blocks -= 1
        if BLOCKS:
            at += 1
        if last:
            tile = next_tile(tile, k, queue, queue_full, queue_empty, DYNAMIC)
            k += 1
            if tile < num_tiles:
                n_block, head, i, blocks = first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, KEYS, CAUSAL, WINDOW, LONG_FIRST)  # fmt: skip
                if PACKED:
                    i, blocks, seen = packed_tile_of_64(
                        table, n_block, (num_n + 1) // 2, num_m, M, gl.SliceLayout(1, S_LAYOUT))  # fmt: skip
                if BLOCKS:
                    row, blocks = listed_tile(table, mods, head, heads, n_block)
                group_left = per_kv
                mbarrier.wait(k_full.index(0), k & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
            if BLOCKS:
                at = gl.to_tensor(0)
        elif blocks == 0:
            if PACKED:
                i, blocks = packed_range_of_64(table, n_block, num_m, M)
            else:
                i, hi = query_blocks(n_block * KEYS, shift, num_m, left, right, M, KEYS, CAUSAL, WINDOW)
                blocks = hi - i
            head += 1
            group_left -= 1
            if BLOCKS:
                row, blocks = listed_tile(table, mods, head, heads, n_block)
                at = gl.to_tensor(0)
        kind = 2
        if BLOCKS:
            i, kind = listed_block(row, at, 0)
        stage_next = it_next % 2
        mbarrier.wait(q_full.index(stage_next), (it_next // 2) & 1)
        q_next = q_bufs.index(stage_next).permute((1, 0))
        s_async = warpgroup_mma(k_buf.index(0), q_next, s_zero, use_acc=False, is_async=True)
        lse = lse_bufs.index(stage_next).load(COLUMNS)
        dv = warpgroup_mma_wait(1, deps=[dv_async])
        mbarrier.arrive(do_empty.index(stage), count=1)
        if last:
            n_done, batch_done, head_done = tile_at(tile_done, num_n, heads_kv, group, LONG_FIRST)
            store_rows(dv_ptr, dv, batch_done, n_done * KEYS, head_done, seqlen_k, heads_kv, units, dtype, MASK_D)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
        s, lse = warpgroup_mma_wait(0, deps=[s_async, lse])
        # not of the repeated step at the end: it would free the rows a second time
        mbarrier.arrive(q_empty.index(stage_next), count=1, pred=tile < num_tiles)
        if (blocks == 1) & (group_left == 1):
            mbarrier.arrive(k_empty.index(0), count=1)
        p, factor = modified_probabilities(
            s, lse, n_block * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind,
            (head // heads, head % heads), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K,
            PACKED, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
        if tile < num_tiles:
            hand_over(p_bufs.index(stage_next), factor)
            bar_arrive_at(P_READY + stage_next, 256)
        it = it_next


@gluon.jit
def _dk_consumer(
    bufs, bars, dk_ptr, table, shape, scales, mods,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK_D: gl.constexpr, DYNAMIC: gl.constexpr,
    PACKED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, _, v_buf, p_bufs, _, delta_bufs = bufs
    _, _, v_full, v_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, units, _ = shape
    softmax_scale, _, _ = scales
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    heads = heads_kv * per_kv
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    n_block, head, i, blocks = first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, KEYS, CAUSAL, WINDOW,
        LONG_FIRST)  # fmt: skip
    if PACKED:
        lo, blocks = packed_range_of_64(table, n_block, num_m, M)
    if BLOCKS:
        row, blocks = listed_tile(table, mods, head, heads, n_block)
    group_left = per_kv
    it = 0
    k = 0
    dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([KEYS, M], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(v_full.index(0), 0)
    mbarrier.wait(do_full.index(0), 0)
    dp_async = warpgroup_mma(v_buf.index(0), do_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    delta = delta_bufs.index(0).load(COLUMNS)
    dp, delta = warpgroup_mma_wait(0, deps=[dp_async, delta])
    mbarrier.arrive(do_empty.index(0), count=1)
    if (blocks == 1) & (group_left == 1):
        mbarrier.arrive(v_empty.index(0), count=1)
    while tile < num_tiles:
        stage = it % 2
        last = (blocks == 1) & (group_left == 1)
        bar_sync_at(P_READY + stage, 256)
        ds = take_over(p_bufs.index(stage), dtype, S_LAYOUT).to(gl.float32) * (dp - delta[None, :])
        ds_packed = pack_pairs(ds, dtype)
        mbarrier.wait(q_full.index(stage), (it // 2) & 1)
        dk_async = warpgroup_mma(unpack_pairs(ds_packed, dtype, A_LAYOUT), q_bufs.index(stage), dk, is_async=True)
        tile_done = tile
        it_next = it + 1
        i += 1
        blocks -= 1
        if last:
            tile = next_tile(tile, k, queue, queue_full, queue_empty, DYNAMIC)
            k += 1
            if tile < num_tiles:
                n_block, head, i, blocks = first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, KEYS, CAUSAL, WINDOW, LONG_FIRST)  # fmt: skip
                if PACKED:
                    lo, blocks = packed_range_of_64(table, n_block, num_m, M)
                if BLOCKS:
                    row, blocks = listed_tile(table, mods, head, heads, n_block)
                group_left = per_kv
                mbarrier.wait(v_full.index(0), k & 1)
            else:
                it_next = it
        elif blocks == 0:
            if PACKED:
                i, blocks = packed_range_of_64(table, n_block, num_m, M)
            else:
                i, hi = query_blocks(n_block * KEYS, shift, num_m, left, right, M, KEYS, CAUSAL, WINDOW)
                blocks = hi - i
            head += 1
            group_left -= 1
            if BLOCKS:
                row, blocks = listed_tile(table, mods, head, heads, n_block)
        stage_next = it_next % 2
        mbarrier.wait(do_full.index(stage_next), (it_next // 2) & 1)
        do_next = do_bufs.index(stage_next).permute((1, 0))
        dp_async = warpgroup_mma(v_buf.index(0), do_next, s_zero, use_acc=False, is_async=True)
        delta = delta_bufs.index(stage_next).load(COLUMNS)
        dk = warpgroup_mma_wait(1, deps=[dk_async])
        mbarrier.arrive(q_empty.index(stage), count=1)
        if last:
            n_done, batch_done, head_done = tile_at(tile_done, num_n, heads_kv, group, LONG_FIRST)
            store_rows(dk_ptr, dk * softmax_scale, batch_done, n_done * KEYS, head_done, seqlen_k, heads_kv, units,
                       dtype, MASK_D)  # fmt: skip
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
        dp, delta = warpgroup_mma_wait(0, deps=[dp_async, delta])
        mbarrier.arrive(do_empty.index(stage_next), count=1, pred=tile < num_tiles)
        if (blocks == 1) & (group_left == 1):
            mbarrier.arrive(v_empty.index(0), count=1)
        it = it_next


@gluon.jit
def _producer(
    bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, table, counter, shape, mods,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_buf, v_buf, _, lse_bufs, delta_bufs = bufs
    k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, _, stat_blocks = shape
    shift = seqlen_k - seqlen_q
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    heads = heads_kv * per_kv
    it = 0
    k = 0
    fixes = gl.to_tensor(0)
    used_q, used_k = seqlen_q, seqlen_k
    if PACKED:
        used_q, used_k = gl.load(table), gl.load(table + 1)
    tile = gl.program_id(0)
    while tile < num_tiles:
        n_block, batch, head_kv = tile_at(tile, num_n, heads_kv, group, LONG_FIRST)
        lo, hi = query_blocks(n_block * KEYS, shift, num_m, left, right, M, KEYS, CAUSAL, WINDOW)
        if PACKED:
            lo, blocks = packed_range_of_64(table, n_block, num_m, M)
            hi = lo + blocks
        if BLOCKS:
            lo = gl.to_tensor(0)
        head = head_kv * per_kv
        for g in range(0, per_kv):
            first = ((batch * heads_kv * per_kv + head) * stat_blocks) * (2 * M)
            if BLOCKS:
                row, hi = listed_tile(table, mods, batch * heads + head, heads, n_block)
            for j in range(lo, hi):
                start = (g == 0) & (j == lo)
                i = j
                if BLOCKS:
                    i = listed_number(row, j)
                if start:
                    fixes = load_64_rows(k_desc, batch, head_kv, n_block * KEYS, None, k_full, k_empty, k_buf, 0, k,
                                         fixed, fixes, used_k, PACKED)  # fmt: skip
                fixes = load_64_rows(q_desc, batch, head, i * M, (stat_desc, first + i * (2 * M), lse_bufs),
                                     q_full, q_empty, q_bufs, it % 2, it // 2, fixed, fixes, used_q,
                                     PACKED)  # fmt: skip
                if start:
                    fixes = load_64_rows(v_desc, batch, head_kv, n_block * KEYS, None, v_full, v_empty, v_buf, 0, k,
                                         fixed, fixes, used_k, PACKED)  # fmt: skip
                fixes = load_64_rows(do_desc, batch, head, i * M, (stat_desc, first + i * (2 * M) + M, delta_bufs),
                                     do_full, do_empty, do_bufs, it % 2, it // 2, fixed, fixes, used_q,
                                     PACKED)  # fmt: skip
                it += 1
            head += 1
        tile = hand_out_tile(tile, k, counter, queue, queue_full, queue_empty, DYNAMIC)
        k += 1
    if DYNAMIC:
        reset_counter(tile, counter, num_tiles)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads_kv", "per_kv", "num_m", "num_n", "num_tiles", "group", "left",
                       "right", "units", "stat_blocks", "table", "slopes", "slopes_sb", "aux", "cap_out", "table_width",
                       "table_sb", "table_sh"]
)
def dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dk_ptr, dv_ptr, counter, table,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, units, stat_blocks,
    softmax_scale, qk_scale, cap_in, slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    MASK_D: gl.constexpr, DYNAMIC: gl.constexpr, PACKED: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr,
):  # fmt: skip
    """q, do, k, v descriptors are rank 4, (batch, head, row, column); dk and dv contiguous, as int32.

    `table`, `slopes` to `table_sh`, PACKED and the modifiers: as in hopper_backward_kernel.py, for tiles and blocks of
    64; `table` is None without need.
    """
    dtype: gl.constexpr = q_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [2, M, D], LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, M, D], LAYOUT)
    k_buf = gl.allocate_shared_memory(dtype, [1, KEYS, D], LAYOUT)
    v_buf = gl.allocate_shared_memory(dtype, [1, KEYS, D], LAYOUT)
    p_bufs = gl.allocate_shared_memory(gl.int32, [2, 4, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    lse_bufs = gl.allocate_shared_memory(gl.float32, [2, M], stat_desc.layout)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [2, M], stat_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fixed = queue_full.index(0)
    if PACKED:
        fixed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(fixed, count=1)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(k_empty.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(v_empty.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
        if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=2)
    bufs = (q_bufs, do_bufs, k_buf, v_buf, p_bufs, lse_bufs, delta_bufs)
    bars = (k_full, k_empty, v_full, v_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, units, stat_blocks)
    scales = (softmax_scale, qk_scale, cap_in)
    ALIBI: gl.constexpr = slopes is not None
    BLOCKS: gl.constexpr = table_width is not None
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_dv_consumer, (bufs, bars, dv_ptr, table, shape, scales,
                        (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                        D, CAUSAL, WINDOW, SOFTCAP, EVEN_K, MASK_D, DYNAMIC, PACKED,
                        ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)),
        (_dk_consumer, (bufs, bars, dk_ptr, table, shape, scales,
                        (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                        D, CAUSAL, WINDOW, MASK_D, DYNAMIC, PACKED, BLOCKS)),
        (_producer, (bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, table, counter, shape,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     CAUSAL, WINDOW, DYNAMIC, PACKED, BLOCKS)),
    ], [4, 1], [240, 24])  # fmt: skip
