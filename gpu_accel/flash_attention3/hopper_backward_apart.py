"""The backward of hopper_backward_kernel.py with dQ in a warpgroup of its own, for plain dense attention.

    consumers  2 warpgroups of 4 warps; each owns 64 keys: S^T, dP^T, dV and dK
    dq         1 warpgroup: dQ = dS K from the dS of both, and its way out
    producer   1 warp: that of hopper_backward_producer.py

A consumer never waits for the other one, and dQ is in nobody's way: a step of a consumer is

    tensor cores | dP              | dV          | dK | S'
    CUDA cores   | P = exp2(S-lse) | dS, handed on    |        (EARLY)

    tensor cores | dP  dV | dK | S' |
    CUDA cores   |        | dS      | P' = exp2(S'-lse')       (otherwise)

Named barriers: 6 and 7 free a stage of rows; 8 and 9 say that both dS of a stage are in shared memory (the consumers
arrive, dq waits); 10 to 13 that dq has read them, one for each consumer and stage. A tile begins with no barrier under
way: its first two steps do not wait, and behind its last one a consumer waits for what is left, as K, which dq reads
too, is about to be overwritten by dK.
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

from gpu_accel.gluon_compat import reinterpret, tma_add

from .hopper_backward_device import (
    KEYS,
    first_step,
    free_keys,
    keys_to_memory,
    next_tile,
    probabilities,
    query_blocks,
    stage_fragment,
    tile_at,
)
from .hopper_backward_producer import ROW_FREE, producer, tile_barriers, tile_buffers
from .hopper_device import bar_arrive_at, bar_sync_at, pack_pairs, release, unpack_floats, unpack_pairs

DS_FULL = gl.constexpr(8)  # and 9: both dS of a stage are in shared memory
DS_READ = gl.constexpr(10)  # to 13: dS of consumer (id - 10) // 2 and stage (id - 10) % 2 has been read


@gluon.jit
def _sync_where(wanted, barrier, threads: gl.constexpr):
    """`bar_sync_at` where `wanted`, which all threads agree on: no branch, which products in flight do not survive."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p bar.sync $1, $2; mov.b32 $0, 0; }", "=r,r,n,r",
        [gl.to_tensor(barrier), gl.to_tensor(threads), wanted.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _ds_of(ds_bufs, wg, M: gl.constexpr):
    """The two stages of a consumer's dS."""
    dtype: gl.constexpr = ds_bufs.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], dtype)
    return reinterpret(ds_bufs.index(wg), dtype, [2, KEYS, M], LAYOUT)


@gluon.jit
def _to_gradients(
    dk, dv, dk_desc, dv_desc, bufs, slot, k, tile, shape, scales, places,
    WG: gl.constexpr, D: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer's half of dK and dV, whole, on its way to their rows."""
    _, _, k_bufs, v_bufs, ds_bufs, _, _ = bufs
    k_own = k_bufs.index(slot * 2 + WG)
    if V_SLOTS > 1:  # noqa: SIM108
        v_own = v_bufs.index((k % V_SLOTS) * 2 + WG)
    else:
        v_own = ds_bufs.index(WG)
    keys_to_memory(dk, dv, scales[0], dk_desc, dv_desc, k_own, v_own, tile, shape, WG, CAUSAL)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, dk_desc, dv_desc, shape, scales, places, FINISH: gl.constexpr,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PRELOAD: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles of keys, one after the other; FINISH takes a tile's sums away, through memory that is free by then."""
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, _ = bufs
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    _, qk_scale, cap_in = scales
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    n_block, head, i, blocks = first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)  # fmt: skip
    group_left = per_kv
    it = 0
    k = 0
    step = gl.to_tensor(0)  # of this tile
    dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    s_zero = gl.full([KEYS, M], 0.0, gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s_async = warpgroup_mma(k_bufs.index(WG), q_bufs.index(0).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_async])
    lse = stat_bufs.index(0).load(COLUMNS)
    if not EARLY:
        p, factor = probabilities(s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right,
                                  qk_scale, cap_in, dtype, CAUSAL, WINDOW, False, EVEN_K)  # fmt: skip
    mbarrier.wait(v_full.index(0), 0)
    new_tile = False
    while tile < num_tiles:
        stage = it % 2
        slot = k % K_SLOTS
        last = (blocks == 1) & (group_left == 1)
        mbarrier.wait(do_full.index(stage), (it // 2) & 1)
        do = do_bufs.index(stage)
        v_own = v_bufs.index((k % V_SLOTS) * 2 + WG)
        dp_async = warpgroup_mma(v_own, do.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        if EARLY:
            p, factor = probabilities(s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right,
                                      qk_scale, cap_in, dtype, CAUSAL, WINDOW, False, EVEN_K)  # fmt: skip
        dv_async = warpgroup_mma(unpack_pairs(p, dtype, A_LAYOUT), do, dv, is_async=True)
        if new_tile:
            tma.store_wait(0)
            free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)

        # where the next step is: the next block of rows, the next head of the group, or the next tile
        tile_done = tile
        k_done = k
        it_next = it + 1
        i += 1
        blocks -= 1
        if last:
            k += 1
            tile = next_tile(tile, k_done, queue, queue_full, queue_empty, DYNAMIC)
            if tile < num_tiles:
                n_block, head, i, blocks = first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, 2 * KEYS, CAUSAL, WINDOW)  # fmt: skip
                group_left = per_kv
                mbarrier.wait(k_full.index(k % K_SLOTS), (k // K_SLOTS) & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
                k = k_done
        elif blocks == 0:
            i, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
            blocks = hi - i
            group_left -= 1
        stage_next = it_next % 2

        delta = stat_bufs.index(2 * stage + 1).load(COLUMNS)
        if PRELOAD:
            dp, delta = warpgroup_mma_wait(1, deps=[dp_async, delta])
        else:
            dp = warpgroup_mma_wait(1, deps=[dp_async])
        ds = unpack_floats(p, dtype, S_LAYOUT) * (dp - delta[None, :])
        ds_packed = pack_pairs(ds, dtype)
        _sync_where(step >= 2, DS_READ + 2 * WG + stage, 256)
        _ds_of(ds_bufs, WG, M).index(stage).store(unpack_pairs(ds_packed, dtype, S_LAYOUT))
        fence_async_shared()
        bar_arrive_at(DS_FULL + stage, 384)
        dk_async = warpgroup_mma(unpack_pairs(ds_packed, dtype, A_LAYOUT), q_bufs.index(stage), dk, is_async=True)
        mbarrier.wait(q_full.index(stage_next), (it_next // 2) & 1)
        # S' may not begin before dK is done: its registers are those of dS
        dv, dk = warpgroup_mma_wait(0, deps=[dv_async, dk_async])
        k_next = k_bufs.index((k % K_SLOTS) * 2 + WG)
        s_async = warpgroup_mma(k_next, q_bufs.index(stage_next).permute((1, 0)), s_zero, use_acc=False, is_async=True)
        if V_SLOTS == 1:  # noqa: SIM102
            if last:
                mbarrier.arrive(v_empty.index(0), count=1)
        lse = stat_bufs.index(2 * stage_next).load(COLUMNS)
        if PRELOAD:
            s, lse = warpgroup_mma_wait(0, deps=[s_async, lse])
        else:
            s = warpgroup_mma_wait(0, deps=[s_async])
        release(row_empty, stage, ROW_FREE, 288)
        if not EARLY:
            p, factor = probabilities(s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right,
                                      qk_scale, cap_in, dtype, CAUSAL, WINDOW, False, EVEN_K)  # fmt: skip
        it = it_next
        step += 1
        new_tile = last
        if last:
            # dq has read what is left of this tile's dS, and with it K
            bar_sync_at(DS_READ + 2 * WG + stage, 256)
            _sync_where(step >= 2, DS_READ + 2 * WG + 1 - stage, 256)
            FINISH(dk, dv, dk_desc, dv_desc, bufs, slot, k_done, tile_done, shape, scales, places,
                   WG, D, V_SLOTS, CAUSAL)  # fmt: skip
            if tile < num_tiles:
                mbarrier.wait(v_full.index(k % V_SLOTS), (k // V_SLOTS) & 1)
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            step = gl.to_tensor(0)
    tma.store_wait(0)


@gluon.jit
def _half_of_dq(
    bufs, stage, slot, desc, fragment, HALF: gl.constexpr, D: gl.constexpr, M: gl.constexpr, FREE: gl.constexpr
):
    """Half of a step's dQ, rows or columns (64, 64), from the dS of both consumers, and on its way."""
    _, _, k_bufs, _, ds_bufs, _, dq_bufs = bufs
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dq = gl.full([64, 64], 0.0, gl.float32, Q_LAYOUT)
    for wg in gl.static_range(2):
        a = _ds_of(ds_bufs, wg, M).index(stage)
        b = k_bufs.index(slot * 2 + wg)
        if M == 128:
            a = a.slice(HALF * 64, 64, dim=1)
        else:
            b = b.slice(HALF * 64, 64, dim=1)
        dq = warpgroup_mma(a.permute((1, 0)), b, dq, use_acc=wg > 0, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    if FREE:
        for wg in gl.static_range(2):
            bar_arrive_at(DS_READ + 2 * wg + stage, 256)
    stage_fragment(dq_bufs.index(HALF), dq)
    tma_add(desc, [(fragment * 2 + HALF) * 16, 0], dq_bufs.index(HALF))


@gluon.jit
def _dq(
    bufs, bars, dq_desc, shape, places,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DYNAMIC: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """dQ of every step. With PART its sums have other rows too: `places` says how many blocks and the first of ours."""
    k_full, _, _, _, _, _, _, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        n_block, batch, head_kv = tile_at(tile, num_n, heads_kv, group, CAUSAL)
        lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
        slot = k % K_SLOTS
        mbarrier.wait(k_full.index(slot), (k // K_SLOTS) & 1)
        if PART:
            rows, row0 = places[0], places[1]
            first = (batch * heads_kv + head_kv) * per_kv * rows + row0
        else:
            rows = num_m
            first = (batch * heads_kv + head_kv) * per_kv * rows
        for g in range(0, per_kv):
            for i in range(lo, hi):
                stage = it % 2
                tma.store_wait(0)  # the warps meet right below
                bar_sync_at(DS_FULL + stage, 384)
                fragment = first + g * rows + i
                _half_of_dq(bufs, stage, slot, dq_desc, fragment, 0, D, M, False)
                _half_of_dq(bufs, stage, slot, dq_desc, fragment, 1, D, M, True)
                it += 1
        tile = next_tile(tile, k, queue, queue_full, queue_empty, DYNAMIC)
        k += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads_kv", "per_kv", "num_m", "num_n", "num_tiles", "group", "left",
                       "right"]
)
def attention_backward_apart_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dq_desc, dk_desc, dv_desc, counter,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, softmax_scale, qk_scale, cap_in,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PRELOAD: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, EARLY: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Arguments as of `attention_backward_kernel`; AHEAD is the producer's."""
    dtype: gl.constexpr = q_desc.dtype
    q_bufs, do_bufs, k_bufs, v_bufs = tile_buffers(dtype, D, M, K_SLOTS, V_SLOTS)
    # two stages of each consumer's dS: at head_dim 128 just the size of its dV, which leaves through them
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 2 * M], dtype)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, 2 * M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    bars, fixed = tile_barriers(K_SLOTS, V_SLOTS, 3, DYNAMIC, False, True)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right)
    scales = (softmax_scale, qk_scale, cap_in)
    FINISH: gl.constexpr = _to_gradients
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, dk_desc, dv_desc, shape, scales, (), FINISH,
                     D, M, K_SLOTS, V_SLOTS, PRELOAD, CAUSAL, WINDOW, EVEN_K, DYNAMIC, EARLY)),
        (_consumer, (1, bufs, bars, dk_desc, dv_desc, shape, scales, (), FINISH,
                     D, M, K_SLOTS, V_SLOTS, PRELOAD, CAUSAL, WINDOW, EVEN_K, DYNAMIC, EARLY)),
        (_dq, (bufs, bars, dq_desc, shape, (), D, M, K_SLOTS, CAUSAL, WINDOW, DYNAMIC, False)),
        (producer, (bufs, bars, fixed, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, (num_m, 0),
                    M, K_SLOTS, V_SLOTS, CAUSAL, WINDOW, DYNAMIC, True, False, AHEAD)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip
