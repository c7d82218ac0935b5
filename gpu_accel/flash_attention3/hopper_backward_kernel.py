"""FlashAttention-3 backward for Hopper (sm_90a) in Gluon: one pass over the scores gives dQ, dK and dV.

One persistent program per SM, split into partitions by `warp_specialize`; a tile is 128 keys of one key head:

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 keys: their dK and dV stay in its registers
    producer   1 warp, 24 registers: draws tiles, issues every TMA load

A step is one block of M query rows (128 at head_dim 64, 64 at head_dim 128) of one query head; grouped heads are walked in turn, so
dK and dV of a key head are summed in registers. Scores are transposed, so P^T and dS^T are A operands straight from registers:

    dV += P^T dO . dS^T = P^T (dP^T - delta) -> shared . dK += dS^T Q . dQ = dS K      of this step
    S^T = K Q^T . dP^T = V dO^T . P^T = exp2(S^T - lse)                               of the next step, maybe of the next tile

    tensor cores | dV | dK . dQ own keys . dQ other keys . S' | dP' |  dV ...
    CUDA cores   |  dS  |            store, add dQ             |  P' |  dS ...

The loop is cut where nothing is in flight, with P (float32 and packed) and dP of the next step in registers. dQ of the 128 keys is
computed by both warpgroups, half each (of the rows or of the columns), from the dS of both, which they exchange through shared memory;
it leaves the registers as 16-byte atomic adds to a float32 scratch array in the order in which the threads hold it, so every warp
adds 512 consecutive bytes and shared memory, as busy here as the tensor cores, is not touched. That sum has no fixed order.

Barriers (mbarrier, phase (i // n) & 1): kv_full/kv_empty one a K and V slot, q_full/q_empty and do_full/do_empty one a stage, arrived on by
TMA and by both consumers; queue_full/queue_empty hand tile numbers from the producer to the consumers. Named barriers: 10 when both dS
are in shared memory, 11 before K of a finished tile is overwritten by dK on its way out.

Rows that do not exist or see nothing have lse = +inf here, so that P = exp2(S - inf) = 0 without a mask.

Source: FlashAttention-3, arXiv 2407.08608, section 3.1 and appendix B.1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_device import bar_sync, pack_pairs, publish_tile, receive_tile, tanh, unpack_pairs

KEYS = gl.constexpr(64)  # keys of one consumer: the M of wgmma
EXCHANGED = gl.constexpr(10)
FINISHED = gl.constexpr(11)
LOG2_E = tl.constexpr(1.4426950408889634)


@gluon.jit
def _tile(index, num_n, heads_kv, group, HEAVY_FIRST: gl.constexpr):
    """Tile number -> (key block, batch, key head); causal: the first keys, which most rows see, come first within `group` heads."""
    if HEAVY_FIRST:
        per_group = num_n * group
        g = index // per_group
        r = index - g * per_group
        n = r // group
        batch_head = g * group + r - n * group
    else:
        batch_head = index // num_n
        n = index - batch_head * num_n
    batch = batch_head // heads_kv
    return n, batch, batch_head - batch * heads_kv


@gluon.jit
def _query_blocks(key0, shift, num_m, left, right, M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """First and one-past-last query block that sees keys [key0, key0 + 128); at least one, so that zero gradients get written."""
    lo = 0
    hi = num_m
    if CAUSAL:
        lo = gl.minimum(gl.maximum(key0 - shift - right, 0) // M, num_m - 1)
    if WINDOW:
        hi = gl.minimum(hi, gl.maximum(key0 + 2 * KEYS - 1 - shift + left, 0) // M + 1)
        hi = gl.maximum(hi, lo + 1)
    return lo, hi


@gluon.jit
def _first_step(tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Key block of a tile, its first query head (of all batches), first query block and number of blocks."""
    n_block, batch, head_kv = _tile(tile, num_n, heads_kv, group, CAUSAL)
    lo, hi = _query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, CAUSAL, WINDOW)
    return n_block, (batch * heads_kv + head_kv) * per_kv, lo, hi - lo


@gluon.jit
def _probabilities(s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in,
                   CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr):  # fmt: skip
    """P^T of a block of scores and the factor of dS^T, which is P^T but for softcap."""
    if SOFTCAP:
        t = tanh(s * cap_in)
        s = t
    p = gl.exp2(s * qk_scale - lse[None, :])
    M: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    if CAUSAL or WINDOW or not EVEN_K:
        masked = key0 + KEYS > seqlen_k
        if CAUSAL:
            masked = masked | (key0 + KEYS - 1 > row0 + shift + right)
        if WINDOW:
            masked = masked | (key0 < row0 + M - 1 + shift - left)
        if masked:
            row = gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))
            key = key0 + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
            first = key - shift - row0
            if CAUSAL:
                first -= right
            else:
                first = first * 0
            first = gl.where(key < seqlen_k, first, M)
            p = gl.where(row[None, :] >= first[:, None], p, 0.0)
            if WINDOW:
                last = key - shift - row0 + left
                p = gl.where(row[None, :] <= last[:, None], p, 0.0)
    f = p
    if SOFTCAP:
        f = p * (1.0 - t * t)
    return p, f


@gluon.jit
def _add_fragment(ptr, x):
    """ptr[...] += x for a (64, 64) accumulator, in the order that the threads hold it: see `dq_finish`."""
    ROWS: gl.constexpr = x.shape[0]
    GROUPS: gl.constexpr = x.shape[1] // 16
    y = x.reshape((ROWS, GROUPS, 2, 4, 2)).permute((0, 1, 3, 2, 4)).reshape((ROWS, GROUPS * 4, 2, 2))
    even, odd = gl.split(y)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    LAYOUT: gl.constexpr = a.type.layout
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    col = gl.arange(0, GROUPS * 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    at = ((row // 8 * GROUPS + col // 4) * 32 + row % 8 * 4 + col % 4) * 4
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,l,f,f,f,f",
        [(ptr + at).to(gl.int64), a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, dq_ptr, dk_desc, dv_desc, shape, scales,
    D: gl.constexpr, M: gl.constexpr, KV_SLOTS: gl.constexpr, DS_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs = bufs
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    softmax_scale, qk_scale, cap_in = scales
    dtype: gl.constexpr = q_bufs.dtype
    SPLIT_ROWS: gl.constexpr = M == 128  # dQ: each consumer takes half of the rows, otherwise half of the columns
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OTHER: gl.constexpr = 1 - WG
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    # step within a tile: row block i of head (batch and head in one number), with `blocks` to go in this head and `group_left` heads
    n_block, head, i, blocks = _first_step(tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, CAUSAL, WINDOW)
    group_left = per_kv
    it = 0
    k = 0
    dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([KEYS, M], 0.0, gl.float32, S_LAYOUT)
    q_zero = gl.full([64, 64], 0.0, gl.float32, Q_LAYOUT)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_async = warpgroup_mma(k_bufs.index(WG), q_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(0), 0)
    dp_async = warpgroup_mma(v_bufs.index(WG), do_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_async])
    p, f = _probabilities(s, stat_bufs.index(0).load(COLUMNS), n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right,
                          qk_scale, cap_in, CAUSAL, WINDOW, SOFTCAP, EVEN_K)  # fmt: skip
    packed = pack_pairs(p, dtype)
    dp = warpgroup_mma_wait(0, deps=[dp_async])
    while tile < num_tiles:
        stage = it % 2
        slot = k % KV_SLOTS
        last = (blocks == 1) & (group_left == 1)
        dv_async = warpgroup_mma(unpack_pairs(packed, dtype, A_LAYOUT), do_bufs.index(stage), dv, is_async=True)
        ds = f * (dp - stat_bufs.index(2 * stage + 1).load(COLUMNS)[None, :])
        ds_packed = pack_pairs(ds, dtype)
        ds_a = unpack_pairs(ds_packed, dtype, A_LAYOUT)
        ds_slot = (it % DS_SLOTS) * 2
        if DS_SLOTS == 1:
            bar_sync(FINISHED, 256)
        ds_bufs.index(ds_slot + WG).store(unpack_pairs(ds_packed, dtype, gl.DotOperandLayout(0, S_LAYOUT, 2)))
        fence_async_shared()
        dk_async = warpgroup_mma(ds_a, q_bufs.index(stage), dk, is_async=True)
        bar_sync(EXCHANGED, 256)
        ds_own = ds_bufs.index(ds_slot + WG)
        ds_other = ds_bufs.index(ds_slot + OTHER)
        k_own = k_bufs.index(slot * 2 + WG)
        k_other = k_bufs.index(slot * 2 + OTHER)
        if SPLIT_ROWS:
            dq_async = warpgroup_mma(ds_own.slice(WG * 64, 64, dim=1).permute((1, 0)), k_own, q_zero, use_acc=False, is_async=True)
            dq_async = warpgroup_mma(ds_other.slice(WG * 64, 64, dim=1).permute((1, 0)), k_other, dq_async, is_async=True)
        else:
            dq_async = warpgroup_mma(ds_own.permute((1, 0)), k_own.slice(WG * 64, 64, dim=1), q_zero, use_acc=False, is_async=True)
            dq_async = warpgroup_mma(ds_other.permute((1, 0)), k_other.slice(WG * 64, 64, dim=1), dq_async, is_async=True)

        # where the next step is: the next block of rows, the next head of the group, or the next tile
        fragment = head * num_m + i
        tile_done = tile
        k_done = k
        it_next = it + 1
        i += 1
        blocks -= 1
        if last:
            k += 1
            if DYNAMIC:
                tile = receive_tile(k_done, queue, queue_full, queue_empty)
            else:
                tile += gl.num_programs(0)
            if tile < num_tiles:
                n_block, head, i, blocks = _first_step(tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, CAUSAL, WINDOW)
                group_left = per_kv
                mbarrier.wait(kv_full.index(k % KV_SLOTS), (k // KV_SLOTS) & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
                k = k_done
        elif blocks == 0:
            lo, hi = _query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, CAUSAL, WINDOW)
            i = lo
            blocks = hi - lo
            head += 1
            group_left -= 1
        stage_next = it_next % 2
        phase_next = (it_next // 2) & 1
        slot_next = k % KV_SLOTS
        dv = warpgroup_mma_wait(3, deps=[dv_async])  # long done; gives P's registers to S
        mbarrier.arrive(do_empty.index(stage), count=1)
        mbarrier.wait(q_full.index(stage_next), phase_next)
        s_async = warpgroup_mma(
            k_bufs.index(slot_next * 2 + WG), q_bufs.index(stage_next).permute((1, 0)), s_zero, use_acc=False, is_async=True)  # fmt: skip
        dk, dq = warpgroup_mma_wait(1, deps=[dk_async, dq_async])
        mbarrier.arrive(q_empty.index(stage), count=1)
        _add_fragment(dq_ptr + (fragment * 2 + WG).to(gl.int64) * 4096, dq)
        mbarrier.wait(do_full.index(stage_next), phase_next)
        dp_async = warpgroup_mma(
            v_bufs.index(slot_next * 2 + WG), do_bufs.index(stage_next).permute((1, 0)), s_zero, use_acc=False, is_async=True)  # fmt: skip
        s = warpgroup_mma_wait(1, deps=[s_async])
        p, f = _probabilities(s, stat_bufs.index(2 * stage_next).load(COLUMNS), n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k,
                              left, right, qk_scale, cap_in, CAUSAL, WINDOW, SOFTCAP, EVEN_K)  # fmt: skip
        packed = pack_pairs(p, dtype)
        mbarrier.wait(do_full.index(stage_next), phase_next)  # completed: opens the basic block that pins the exponentials above the wait
        dp, f, packed = warpgroup_mma_wait(0, deps=[dp_async, f, packed])
        it = it_next
        if last:
            bar_sync(FINISHED, 256)  # the other consumer has read K for its last dQ
            v_own = v_bufs.index(slot * 2 + WG)
            k_own = k_bufs.index(slot * 2 + WG)
            v_own.store(dv.to(dtype))
            k_own.store((dk * softmax_scale).to(dtype))
            fence_async_shared()
            n_done, batch_done, head_done = _tile(tile_done, num_n, heads_kv, group, CAUSAL)
            key0 = n_done * 2 * KEYS + WG * KEYS
            tma.async_copy_shared_to_global(dv_desc, [batch_done, head_done, key0, 0], v_own)
            tma.async_copy_shared_to_global(dk_desc, [batch_done, head_done, key0, 0], k_own)
            if KV_SLOTS > 1:
                tma.store_wait(0)
                mbarrier.arrive(kv_empty.index(slot), count=1)
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    tma.store_wait(0)


@gluon.jit
def _load_rows(bars, bufs, descs, batch, head, i, it, fragment, M: gl.constexpr):
    """One step's Q, lse and delta on one barrier, dO on another."""
    q_full, q_empty, do_full, do_empty = bars
    q_bufs, do_bufs, stat_bufs = bufs
    q_desc, do_desc, stat_desc = descs
    stage = it % 2
    phase = ((it // 2) & 1) ^ 1
    mbarrier.wait(q_empty.index(stage), phase)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, head, i * M, 0], q_full.index(stage), q_bufs.index(stage))
    tma.async_copy_global_to_shared(stat_desc, [fragment * (2 * M)], q_full.index(stage), stat_bufs.index(2 * stage))
    tma.async_copy_global_to_shared(stat_desc, [fragment * (2 * M) + M], q_full.index(stage), stat_bufs.index(2 * stage + 1))
    mbarrier.wait(do_empty.index(stage), phase)
    mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(do_desc, [batch, head, i * M, 0], do_full.index(stage), do_bufs.index(stage))


@gluon.jit
def _producer(
    bufs, bars, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape,
    M: gl.constexpr, KV_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_bufs, v_bufs, _, stat_bufs = bufs
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        n_block, batch, head_kv = _tile(tile, num_n, heads_kv, group, CAUSAL)
        lo, hi = _query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, CAUSAL, WINDOW)
        slot = k % KV_SLOTS
        mbarrier.wait(kv_empty.index(slot), ((k // KV_SLOTS) & 1) ^ 1)
        mbarrier.expect(kv_full.index(slot), 2 * k_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes)
        for c in gl.static_range(2):
            at = n_block * 2 * KEYS + c * KEYS
            tma.async_copy_global_to_shared(k_desc, [batch, head_kv, at, 0], kv_full.index(slot), k_bufs.index(slot * 2 + c))
            tma.async_copy_global_to_shared(v_desc, [batch, head_kv, at, 0], kv_full.index(slot), v_bufs.index(slot * 2 + c))
        for g in range(0, per_kv):
            head = head_kv * per_kv + g
            first = (batch * heads_kv * per_kv + head) * num_m
            for i in range(lo, hi):
                _load_rows((q_full, q_empty, do_full, do_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc),
                           batch, head, i, it, first + i, M)  # fmt: skip
                it += 1
        if DYNAMIC:
            tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
            publish_tile(k, tile, queue, queue_full, queue_empty)
        else:
            tile += gl.num_programs(0)
        k += 1
    if DYNAMIC:
        # Every program draws exactly one number past the end; the last of them resets the counter for the next launch.
        if tile == num_tiles + gl.num_programs(0) - 1:
            gl.store(counter, 0)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads_kv", "per_kv", "num_m", "num_n", "num_tiles", "group", "left", "right"]
)
def attention_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dq_ptr, dk_desc, dv_desc, counter,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, softmax_scale, qk_scale, cap_in,
    D: gl.constexpr, M: gl.constexpr, KV_SLOTS: gl.constexpr, DS_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr,
):  # fmt: skip
    """q, do, k, v, dk, dv descriptors are rank 4, (batch, head, row, column); stat (batch, heads, num_m, 2, M) and dq
    (batch, heads, num_m, 2, 4096) are float32 scratch: lse in base 2 and delta, and the sum of dQ in fragments."""
    dtype: gl.constexpr = q_desc.dtype
    M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    N_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [2 * KV_SLOTS, KEYS, D], N_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [2 * KV_SLOTS, KEYS, D], N_LAYOUT)
    ds_bufs = gl.allocate_shared_memory(dtype, [2 * DS_SLOTS, KEYS, M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_SLOTS, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_SLOTS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(KV_SLOTS):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
        mbarrier.init(queue_full.index(i), count=1)
        mbarrier.init(queue_empty.index(i), count=2)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs)
    bars = (kv_full, kv_empty, q_full, q_empty, do_full, do_empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right)
    scales = (softmax_scale, qk_scale, cap_in)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, dq_ptr, dk_desc, dv_desc, shape, scales,
                     D, M, KV_SLOTS, DS_SLOTS, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
        (_consumer, (1, bufs, bars, dq_ptr, dk_desc, dv_desc, shape, scales,
                     D, M, KV_SLOTS, DS_SLOTS, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC)),
        (_producer, (bufs, bars, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, M, KV_SLOTS, CAUSAL, WINDOW, DYNAMIC)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def prepare(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stat_ptr, dq_ptr, o_sb, o_ss, o_sh, do_sb, do_ss, do_sh,
    heads, seqlen_q, num_m, head_dim,
    D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, MASK_D: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """stat = (lse in base 2, delta = rowsum(do * o) - dlse) of ROWS rows, +inf and 0 where there is no row; zeroes their dQ."""
    part = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch = batch_head // heads
    head = batch_head - batch * heads
    rows = part * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, D)
    here = (rows < seqlen_q)[:, None]
    if MASK_D:
        here = here & (cols < head_dim)[None, :]
    o_at = batch.to(tl.int64) * o_sb + head.to(tl.int64) * o_sh + rows.to(tl.int64)[:, None] * o_ss + cols[None, :]
    do_at = batch.to(tl.int64) * do_sb + head.to(tl.int64) * do_sh + rows.to(tl.int64)[:, None] * do_ss + cols[None, :]
    o = tl.load(o_ptr + o_at, mask=here, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + do_at, mask=here, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    lse_at = batch_head.to(tl.int64) * seqlen_q + rows
    lse = tl.load(lse_ptr + lse_at, mask=rows < seqlen_q, other=float("inf")) * LOG2_E
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if DLSE:
        delta -= tl.load(dlse_ptr + lse_at, mask=rows < seqlen_q, other=0.0)
    stat_at = (batch_head.to(tl.int64) * num_m + rows // M) * (2 * M) + rows % M
    tl.store(stat_ptr + stat_at, lse)
    tl.store(stat_ptr + stat_at + M, delta)
    dq_at = (batch_head.to(tl.int64) * num_m * M + part * ROWS) * D
    tl.store(dq_ptr + dq_at + tl.arange(0, ROWS * D), tl.zeros([ROWS * D], tl.float32))


@triton.jit(do_not_specialize=["heads", "seqlen_q", "num_m", "head_dim"])
def dq_finish(
    dq_sum, dq_ptr, dq_sb, dq_ss, dq_sh, heads, seqlen_q, num_m, head_dim, softmax_scale,
    D: tl.constexpr, M: tl.constexpr, MASK_D: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * dq_sum for one fragment of 64 rows and 64 columns, out of the order of `_add_fragment`."""
    fragment = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch = batch_head // heads
    head = batch_head - batch * heads
    at = (batch_head.to(tl.int64) * num_m * 2 + fragment) * 4096
    x = tl.load(dq_sum + at + tl.arange(0, 4096)) * softmax_scale
    # (row / 8, column / 16, row % 8, column / 2 % 4, column / 8 % 2, column % 2)
    x = tl.reshape(tl.permute(tl.reshape(x, (8, 4, 8, 4, 2, 2)), (0, 2, 1, 4, 3, 5)), (64, 64))
    if M == 128:
        row0 = fragment * 64
        col0 = 0
    else:
        row0 = fragment // 2 * 64
        col0 = fragment % 2 * 64
    rows = row0 + tl.arange(0, 64)
    cols = col0 + tl.arange(0, 64)
    here = (rows < seqlen_q)[:, None]
    if MASK_D:
        here = here & (cols < head_dim)[None, :]
    dq_at = batch.to(tl.int64) * dq_sb + head.to(tl.int64) * dq_sh + rows.to(tl.int64)[:, None] * dq_ss + cols[None, :]
    tl.store(dq_ptr + dq_at, x.to(dq_ptr.dtype.element_ty), mask=here)
