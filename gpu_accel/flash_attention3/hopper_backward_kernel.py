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

Plain calls have dQ in a warpgroup of its own: hopper_backward_apart.py, with the producer of this file, in which NAMED,
named barriers 6 and 7 free a stage of rows instead of row_empty.

Rows that do not exist or see nothing have lse = +inf here, so that P = exp2(S - inf) = 0 without a mask.

Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B.1.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpu_accel.gluon_compat import reinterpret, tma_load, tma_store

from .hopper_backward_device import (
    KEYS,
    first_step,
    listed_tile,
    modified_probabilities,
    query_blocks,
    tile_at,
)
from .hopper_backward_packed import packed_probabilities, packed_range, packed_tile
from .hopper_device import (
    bar_arrive,
    bar_arrive_at,
    bar_sync,
    bar_sync_at,
    draw,
    pack_pairs,
    publish_tile,
    receive_tile,
    unpack_pairs,
)
from .hopper_modifiers import listed_block, listed_number
from .hopper_packed import zero_rows

EXCHANGED = gl.constexpr(10)  # to 13: dS of consumer (id - 10) // 2 and stage (id - 10) % 2 is in shared memory
FINISHED = gl.constexpr(14)  # and 15: consumer (id - 14) has read K for the last dQ of a tile
ROW_FREE = gl.constexpr(6)  # and 7: a stage of rows has been read (NAMED)
TURN = gl.constexpr(8)  # and 9: whose turn it is to compute exponentials


@builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """desc[coord] += src by the copy engine. Triton 3.6 and 3.7 have the operation but no function for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.jit
def _stage_fragment(buf, x):
    """Put a (64, 64) accumulator into shared memory, in the order that threads hold it: see `dq_finish`."""
    # (row / 16, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2) -> four numbers of a thread side by side
    buf.store(x.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5)).reshape((16, 256)))
    fence_async_shared()


@gluon.jit
def _send_fragment(desc, fragment, buf, x):
    """Add a (64, 64) accumulator to fragment number `fragment`."""
    tma.store_wait(0)
    _stage_fragment(buf, x)
    tma_reduce_add(desc, [fragment * 16, 0], buf)


@gluon.jit
def _free_keys(k_empty, v_empty, k, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr):
    """dK and dV of the tile before have left shared memory."""
    mbarrier.arrive(k_empty.index((k + K_SLOTS - 1) % K_SLOTS), count=1)
    if V_SLOTS > 1:
        mbarrier.arrive(v_empty.index((k + V_SLOTS - 1) % V_SLOTS), count=1)


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
    SPLIT_ROWS: gl.constexpr = M == 128  # dQ: each consumer takes half of the rows, otherwise half of the columns
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
        lo, blocks, seen = packed_tile(table, n_block, num_n, num_m, WG, M, gl.SliceLayout(1, S_LAYOUT))
        i = lo
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
    if PACKED:
        p, factor = packed_probabilities(s, lse, i * M, seen, qk_scale, cap_in, dtype, SOFTCAP)
    else:
        p, factor = modified_probabilities(
            s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind0,
            (head // heads, head % heads), mods,
            dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD, BLOCKS)  # fmt: skip
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
        _send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
        if new_tile:
            _free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)

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
            if DYNAMIC:
                tile = receive_tile(k_done, queue, queue_full, queue_empty)
            else:
                tile += gl.num_programs(0)
            if tile < num_tiles:
                n_block, head, i, blocks = first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, 2 * KEYS, CAUSAL, WINDOW, LONG_FIRST)  # fmt: skip
                if PACKED:
                    lo, blocks, seen = packed_tile(table, n_block, num_n, num_m, WG, M, gl.SliceLayout(1, S_LAYOUT))
                    i = lo
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
                lo, blocks = packed_range(table, n_block, num_m, M)
            else:
                lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
                blocks = hi - lo
            i = lo
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
        ds_other = ds_bufs.index(stage * 2 + OTHER)
        k_own = k_bufs.index(slot * 2 + WG)
        k_other = k_bufs.index(slot * 2 + OTHER)
        if SPLIT_ROWS:
            a_own = ds_own.slice(WG * 64, 64, dim=1).permute((1, 0))
            a_other = ds_other.slice(WG * 64, 64, dim=1).permute((1, 0))
            dq_async = warpgroup_mma(a_own, k_own, q_zero, use_acc=False, is_async=True)
            dq_async = warpgroup_mma(a_other, k_other, dq_async, is_async=True)
        else:
            b_own = k_own.slice(WG * 64, 64, dim=1)
            b_other = k_other.slice(WG * 64, 64, dim=1)
            dq_async = warpgroup_mma(ds_own.permute((1, 0)), b_own, q_zero, use_acc=False, is_async=True)
            dq_async = warpgroup_mma(ds_other.permute((1, 0)), b_other, dq_async, is_async=True)
        if PRELOAD:
            lse = stat_bufs.index(2 * stage_next).load(COLUMNS)
            s, lse = warpgroup_mma_wait(2, deps=[s_async, lse])
        else:
            s = warpgroup_mma_wait(2, deps=[s_async])
            lse = stat_bufs.index(2 * stage_next).load(COLUMNS)
        if PING_PONG:
            bar_sync(TURN + WG, 256)
        if PACKED:
            p, f = packed_probabilities(s, lse, i * M, seen, qk_scale, cap_in, dtype, SOFTCAP)
        else:
            p, f = modified_probabilities(
                s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in, kind,
                (head // heads, head % heads), mods,
                dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K, ALIBI, SCORE_MOD, SCORE_MOD_GRAD, MASK_MOD,
                BLOCKS)  # fmt: skip
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
            v_own.store(dv.to(dtype))
            k_own.store((dk * softmax_scale).to(dtype))
            fence_async_shared()
            n_done, batch_done, head_done = tile_at(tile_done, num_n, heads_kv, group, LONG_FIRST)
            key0 = n_done * 2 * KEYS + WG * KEYS
            tma_store(dv_desc, [batch_done, head_done, key0, 0], v_own)
            tma_store(dk_desc, [batch_done, head_done, key0, 0], k_own)
            if tile < num_tiles:
                mbarrier.wait(v_full.index(k % V_SLOTS), (k // V_SLOTS) & 1)
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    _send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
    if PING_PONG:  # noqa: SIM102
        if WG == 0:
            bar_sync(TURN, 256)  # takes the last arrival, so that the barrier is balanced
    tma.store_wait(0)


@gluon.jit
def _load_rows(
    bars, bufs, descs, batch, head, i, it, fragment, fixed, fixes, used_q,
    M: gl.constexpr, PACKED: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    """One step's Q, lse and delta on one barrier, dO on another. Returns how many loads had rows behind the last."""
    q_full, do_full, row_empty = bars
    q_bufs, do_bufs, stat_bufs = bufs
    q_desc, do_desc, stat_desc = descs
    stage = it % 2
    if NAMED:
        if it >= 2:
            bar_sync_at(ROW_FREE + stage, 288)
    else:
        mbarrier.wait(row_empty.index(stage), ((it // 2) & 1) ^ 1)
    short = False
    if PACKED:
        short = (i + 1) * M > used_q
    if short:
        mbarrier.expect(fixed, q_desc.block_type.nbytes + do_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
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
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
        tma_load(q_desc, [batch, head, i * M, 0], q_full.index(stage), q_bufs.index(stage))
        tma_load(stat_desc, [fragment * (2 * M)], q_full.index(stage), stat_bufs.index(2 * stage))
        tma_load(stat_desc, [fragment * (2 * M) + M], q_full.index(stage), stat_bufs.index(2 * stage + 1))
        mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
        tma_load(do_desc, [batch, head, i * M, 0], do_full.index(stage), do_bufs.index(stage))
    return fixes


@gluon.jit
def _load_keys(desc, batch, head, key0, full, bufs, first, fixed, fixes, used_k, PACKED: gl.constexpr):
    """A tile of K or V, a buffer for each consumer."""
    short = False
    if PACKED:
        short = key0 + 2 * KEYS > used_k
    if short:
        mbarrier.expect(fixed, 2 * desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma_load(desc, [batch, head, key0 + c * KEYS, 0], fixed, bufs.index(first + c))
        mbarrier.wait(fixed, fixes & 1)
        for c in gl.static_range(2):
            zero_rows(bufs, first + c, gl.maximum(used_k - key0 - c * KEYS, 0))
        mbarrier.arrive(full, count=1)
        fixes += 1
    else:
        mbarrier.expect(full, 2 * desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma_load(desc, [batch, head, key0 + c * KEYS, 0], full, bufs.index(first + c))
    return fixes


@gluon.jit
def _producer(
    bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, table, counter, shape, mods,
    M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DYNAMIC: gl.constexpr, PACKED: gl.constexpr, NAMED: gl.constexpr, BLOCKS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Loads keys and rows. AHEAD: the next tile is drawn behind the keys of this one, not behind its last rows."""
    q_bufs, do_bufs, k_bufs, v_bufs, _, stat_bufs, _ = bufs
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
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
        fixes = _load_rows(
            (q_full, do_full, row_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc), batch,
            head_kv * per_kv, first_row, it, (batch * heads_kv + head_kv) * per_kv * num_m + first_row, fixed, fixes,
            used_q, M, PACKED, NAMED
        )  # fmt: skip
        it += 1
        slot = k % V_SLOTS
        mbarrier.wait(v_empty.index(slot), ((k // V_SLOTS) & 1) ^ 1)
        fixes = _load_keys(
            v_desc, batch, head_kv, key0, v_full.index(slot), v_bufs, slot * 2, fixed, fixes, used_k, PACKED
        )
        for g in range(0, per_kv):
            head = head_kv * per_kv + g
            first = (batch * heads_kv * per_kv + head) * num_m
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
        if DYNAMIC:
            if AHEAD:
                tile = gl.max(drawn, axis=0) + gl.num_programs(0)
            else:
                tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
            publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
    if NAMED:
        # The last two arrivals, which nobody waited for: named barriers end as they began.
        for i in range(gl.maximum(it, 2), it + 2):
            bar_sync_at(ROW_FREE + i % 2, 288)
    if DYNAMIC:  # noqa: SIM102
        # Every program draws exactly one number past the end; the last of them resets the counter for the next launch.
        if tile == num_tiles + gl.num_programs(0) - 1:
            gl.store(counter, 0)


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
    M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    N_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, KEYS, D], N_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [2 * V_SLOTS, KEYS, D], N_LAYOUT)
    ds_bufs = gl.allocate_shared_memory(dtype, [4, KEYS, M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
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
        mbarrier.init(row_empty.index(i), count=2)
        if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=2)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    bars = (k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue)
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
        (_producer, (bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, table, counter, shape,
                     (slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh),
                     M, K_SLOTS, V_SLOTS, CAUSAL, WINDOW, DYNAMIC, PACKED, False, BLOCKS, False)),
    ], [4, 1], [240, 24])  # fmt: skip
