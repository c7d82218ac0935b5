"""FlashAttention-3 backward for Hopper (sm_90a) in Gluon: one pass over the scores gives dQ, dK and dV.

One persistent program per SM, split into partitions by `warp_specialize`; a tile is 128 keys of one key head:

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 keys: their dK and dV stay in its registers
    producer   1 warp, 24 registers: draws tiles, issues every TMA load

A step is one block of M query rows (128 at head_dim 64, 64 at head_dim 128) of one query head; grouped heads are
walked in turn, so dK and dV of a key head are summed in registers. Scores are transposed, so that P^T and dS^T are A
operands straight from registers:

    dP^T = V dO^T    dV += P^T dO    dS^T = P^T (dP^T - delta)    dK += dS^T Q    dQ = dS K       of this step
    S^T = K Q^T      P^T = exp2(S^T - lse)                                                       of the next one

    tensor cores | dP      | dV           | dK | S' | dQ                   | dP' ...
    CUDA cores   | send dQ | dS, store it |         | P' = exp2(S' - lse') | send dQ' ...

The next step may be the first one of the next tile: the pipeline does not drain between tiles. The loop is cut where
nothing is in flight, with P (two 16-bit values a register) and dQ in registers.

dQ of the 128 keys is computed by both warpgroups, half each (of the rows or of the columns), from the dS of both, which
they exchange through shared memory. It is added to a float32 scratch array by the copy engine, as fragments of 4096
numbers in the order in which threads hold them: stores without bank conflicts, and `dq_finish` puts them in order.
Atomic adds straight from the registers were 2-15 % slower (8k tokens, H100). That sum has no fixed order.

Barriers (mbarrier, phase (i // n) & 1): k_full, k_empty, v_full, v_empty one a slot; q_full (Q, lse, delta), do_full
and row_empty one a stage; queue_full/queue_empty hand tile numbers from the producer to the consumers. TMA arrives on
the full ones, both consumers on the empty ones. V has one slot at head_dim 128, freed after the last dP of a tile.
Named barriers: 8 and 9 take turns at the exponentials; 10 to 13 when a dS is in shared memory; 14 and 15 before K of a
done tile is overwritten by dK on its way out.

Plain calls have dQ in a warpgroup of its own: hopper_backward_apart.py. The producer is that of
hopper_backward_producer.py, in which NAMED, named barriers 6 and 7 free a stage of rows instead of row_empty.

Rows that do not exist or see nothing have lse = +inf here, so that P = exp2(S - inf) = 0 without a mask.

Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B.1.
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

from gpu_accel.gluon_compat import reinterpret

from .hopper_backward_device import (
    EXCHANGED,
    FINISHED,
    KEYS,
    TURN,
    first_step,
    free_keys,
    half_of_dq,
    keys_to_memory,
    listed_tile,
    modified_probabilities,
    next_tile,
    query_blocks,
    send_fragment,
)
from .hopper_backward_packed import packed_range, packed_tile
from .hopper_backward_producer import producer, tile_barriers, tile_buffers
from .hopper_device import bar_arrive, bar_arrive_at, bar_sync, bar_sync_at, pack_pairs, unpack_pairs
from .hopper_modifiers import listed_block


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, dq_desc, dk_desc, dv_desc, table, shape, scales, mods,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PING_PONG: gl.constexpr,
    PRELOAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    DYNAMIC: gl.constexpr, PACKED: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs = bufs
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    softmax_scale, qk_scale, cap_in = scales
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    N_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OTHER: gl.constexpr = 1 - WG
    LONG_FIRST: gl.constexpr = CAUSAL or BLOCKS
    TWO_FACTORS: gl.constexpr = SOFTCAP or SCORE_MOD is not None
    heads = heads_kv * per_kv
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    # where a step is: row block i of a head (batch and head in one), `blocks` to go there, `group_left` heads to go
    n_block, head, i, blocks = first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW,
        LONG_FIRST)  # fmt: skip
    kind0 = 2
    if BLOCKS:
        row, blocks = listed_tile(table, mods, head, heads, n_block)
        at = gl.to_tensor(0)
        i, kind0 = listed_block(row, 0, WG)
    if PACKED:
        i, blocks, seen = packed_tile(table, n_block, num_n, num_m, WG, M, gl.SliceLayout(1, S_LAYOUT))
    else:
        seen = ()
    group_left = per_kv
    it = 0
    k = 0
    dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([KEYS, M], 0.0, gl.float32, S_LAYOUT)
    q_zero = gl.full([64, 64], 0.0, gl.float32, Q_LAYOUT)
    if PING_PONG:  # noqa: SIM102
        if WG == 1:
            bar_arrive(TURN, 256)  # consumer 0 computes exponentials first
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_async = warpgroup_mma(k_bufs.index(WG), q_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_async])
    lse = stat_bufs.index(0).load(COLUMNS)
    p, factor = modified_probabilities(
        s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind0,
        (head // heads, head % heads), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K,
        PACKED, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
    mbarrier.wait(v_full.index(0), 0)
    dq = q_zero
    dq_buf = dq_bufs.index(WG)
    new_tile = False
    fragment = head * num_m + i
    while tile < num_tiles:
        stage = it % 2
        slot = k % K_SLOTS
        last = (blocks == 1) & (group_left == 1)
        mbarrier.wait(do_full.index(stage), (it // 2) & 1)
        do = do_bufs.index(stage)
        v_own = v_bufs.index((k % V_SLOTS) * 2 + WG)
        dp_async = warpgroup_mma(v_own, do.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        dv_async = warpgroup_mma(unpack_pairs(p, dtype, A_LAYOUT), do, dv, is_async=True)
        send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
        if new_tile:
            free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)

        # where the next step is: the next block of rows, the next head of the group, or the next tile
        fragment = head * num_m + i
        tile_done = tile
        k_done = k
        it_next = it + 1
        i += 1
        blocks -= 1
        if BLOCKS:
            at += 1
        if last:
            k += 1
            tile = next_tile(tile, k_done, queue, queue_full, queue_empty, DYNAMIC)
            if tile < num_tiles:
                n_block, head, i, blocks = first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, 2 * KEYS, CAUSAL, WINDOW, LONG_FIRST)  # fmt: skip
                if PACKED:
                    i, blocks, seen = packed_tile(table, n_block, num_n, num_m, WG, M, gl.SliceLayout(1, S_LAYOUT))
                if BLOCKS:
                    row, blocks = listed_tile(table, mods, head, heads, n_block)
                group_left = per_kv
                mbarrier.wait(k_full.index(k % K_SLOTS), (k // K_SLOTS) & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
                k = k_done
            if BLOCKS:
                at = gl.to_tensor(0)
        elif blocks == 0:
            if PACKED:
                i, blocks = packed_range(table, n_block, num_m, M)
            else:
                i, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
                blocks = hi - i
            head += 1
            group_left -= 1
            if BLOCKS:
                row, blocks = listed_tile(table, mods, head, heads, n_block)
                at = gl.to_tensor(0)
        kind = 2
        if BLOCKS:
            i, kind = listed_block(row, at, WG)
        stage_next = it_next % 2
        phase_next = (it_next // 2) & 1

        delta = stat_bufs.index(2 * stage + 1).load(COLUMNS)
        if PRELOAD:
            dp, delta = warpgroup_mma_wait(1, deps=[dp_async, delta])
        else:
            dp = warpgroup_mma_wait(1, deps=[dp_async])
        if V_SLOTS == 1:  # noqa: SIM102
            if last:
                mbarrier.arrive(v_empty.index(0), count=1)
        ds = unpack_pairs(factor if TWO_FACTORS else p, dtype, S_LAYOUT).to(gl.float32) * (dp - delta[None, :])
        ds_packed = pack_pairs(ds, dtype)
        ds_own = ds_bufs.index(stage * 2 + WG)
        ds_own.store(unpack_pairs(ds_packed, dtype, S_LAYOUT))
        fence_async_shared()
        bar_arrive_at(EXCHANGED + 2 * WG + stage, 256)
        dk_async = warpgroup_mma(unpack_pairs(ds_packed, dtype, A_LAYOUT), q_bufs.index(stage), dk, is_async=True)
        mbarrier.wait(q_full.index(stage_next), phase_next)
        k_next = k_bufs.index((k % K_SLOTS) * 2 + WG)
        s_async = warpgroup_mma(k_next, q_bufs.index(stage_next).permute((1, 0)), s_zero, use_acc=False, is_async=True)
        dv, dk = warpgroup_mma_wait(1, deps=[dv_async, dk_async])
        bar_sync_at(EXCHANGED + 2 * OTHER + stage, 256)
        dq_async = half_of_dq(ds_own, ds_bufs.index(stage * 2 + OTHER), k_bufs.index(slot * 2 + WG),
                              k_bufs.index(slot * 2 + OTHER), q_zero, WG, M)  # fmt: skip
        if PRELOAD:
            lse = stat_bufs.index(2 * stage_next).load(COLUMNS)
            s, lse = warpgroup_mma_wait(2, deps=[s_async, lse])
        else:
            s = warpgroup_mma_wait(2, deps=[s_async])
            lse = stat_bufs.index(2 * stage_next).load(COLUMNS)
        if PING_PONG:
            bar_sync(TURN + WG, 256)
        p, f = modified_probabilities(
            s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind,
            (head // heads, head % heads), seen, mods, dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K,
            PACKED, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
        if PING_PONG:
            bar_arrive(TURN + OTHER, 256)
        # completed long ago; opens the basic block that pins the exponentials above the wait
        mbarrier.wait(q_full.index(stage_next), phase_next)
        if TWO_FACTORS:
            dq, p, factor = warpgroup_mma_wait(0, deps=[dq_async, p, f])
        else:
            dq, p = warpgroup_mma_wait(0, deps=[dq_async, p])
        mbarrier.arrive(row_empty.index(stage), count=1)
        it = it_next
        new_tile = last
        if last:
            # one barrier each way: synccheck takes two partitions that wait on the same one for threads gone astray
            bar_arrive(FINISHED + WG, 256)
            bar_sync(FINISHED + OTHER, 256)
            k_own = k_bufs.index(slot * 2 + WG)
            if V_SLOTS > 1:
                v_own = v_bufs.index((k_done % V_SLOTS) * 2 + WG)
            else:
                tma.store_wait(0)
                v_own = reinterpret(dq_buf, dtype, [KEYS, D], N_LAYOUT)
            keys_to_memory(dk, dv, softmax_scale, dk_desc, dv_desc, k_own, v_own, tile_done, shape, WG, LONG_FIRST)
            if tile < num_tiles:
                mbarrier.wait(v_full.index(k % V_SLOTS), (k // V_SLOTS) & 1)
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
    if PING_PONG:  # noqa: SIM102
        if WG == 0:
            bar_sync(TURN, 256)  # takes the last arrival, so that the barrier is balanced
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads_kv", "per_kv", "num_m", "num_n", "num_tiles", "group", "left",
                       "right", "slopes", "slopes_sb", "aux", "cap_out", "table_width", "table_sb", "table_sh"]
)
def attention_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dq_desc, dk_desc, dv_desc, counter, table,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, softmax_scale, qk_scale, cap_in,
    slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PING_PONG: gl.constexpr,
    PRELOAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    DYNAMIC: gl.constexpr, PACKED: gl.constexpr,
    SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr,
):  # fmt: skip
    """q, do, k, v, dk, dv descriptors are rank 4, (batch, head, row, column); stat (batch, heads, num_m, 2, M) and dq
    (batch, heads, num_m, 2, 4096) are float32 scratch: lse in base 2 and delta, and the sum of dQ in fragments.

    PACKED: one batch of all rows; which queries see a key is in `table` (hopper_backward_packed.py), so that tiles need
    not begin where sequences do, and masks and order are told nothing else.

    `slopes` to `table_sh` are None where a call has no such thing. With a table width, `table` is that of
    hopper_blocks.py for tiles of 128 keys and blocks of M query rows, DYNAMIC is on and PACKED off. SCORE_MOD, its
    gradient and MASK_MOD are users' functions or None.
    """
    dtype: gl.constexpr = q_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], dtype)
    q_bufs, do_bufs, k_bufs, v_bufs = tile_buffers(dtype, D, M, K_SLOTS, V_SLOTS)
    ds_bufs = gl.allocate_shared_memory(dtype, [4, KEYS, M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    bars, fixed = tile_barriers(K_SLOTS, V_SLOTS, 2, DYNAMIC, PACKED, False)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right)
    scales = (softmax_scale, qk_scale, cap_in)
    ALIBI: gl.constexpr = slopes is not None
    BLOCKS: gl.constexpr = table_width is not None
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, dq_desc, dk_desc, dv_desc, table, shape, scales,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     D, M, K_SLOTS, V_SLOTS, PING_PONG, PRELOAD, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, PACKED,
                     ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)),
        (_consumer, (1, bufs, bars, dq_desc, dk_desc, dv_desc, table, shape, scales,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     D, M, K_SLOTS, V_SLOTS, PING_PONG, PRELOAD, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC, PACKED,
                     ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)),
        (producer, (bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, (num_m, 0),
                    M, K_SLOTS, V_SLOTS, CAUSAL, WINDOW, DYNAMIC, False, False, False, PACKED, BLOCKS, table,
                    (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh))),
    ], [4, 1], [240, 24])  # fmt: skip
