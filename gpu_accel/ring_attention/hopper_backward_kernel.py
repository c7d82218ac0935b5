"""The Hopper backward for one step of a ring: gradients are added, in float32, to what other steps have found.

Loop, partitions and barriers are those of `flash_attention3/hopper_backward_kernel.py`: read its head first. What is
the same is imported, the producer as a whole. What differs is where results go. dQ, dK and dV are all sums in float32
that outlive the call, in fragments of 64 x 64 numbers in the order in which threads hold them; the copy engine adds to
them as tiles are finished (dQ: as steps are). So a step needs no passes before it or after it: statistics of the rows
are made once, and fragments are put in order, scaled and rounded once, when all steps are done (both: `fragments.py`).

Rows and keys of a call may be any whole blocks of the shard: `places` says where they lie in the sums. dK and dV of a
tile are added by one program, in the order of the calls, so they have the same bits every time; dQ has them where
ORDERED asks for it:

    turns (one number a fragment of dQ, 0 at first)       who has added to it: the tiles of keys take turns
    a step before an addition                             look whose turn it is
    before it                                             wait for the own turn, if it had not come
    a step after it, when the copy engine is done         pass the turn on

Nothing of this needs a fence: additions to dQ and to turns meet in L2, where the former have been made when the copy
engine says that it is done, and nobody reads dQ before the kernel has ended.

A tile waits for tiles only that were handed out before it, so somebody can always go on. Under a causal mask tiles of
the last keys come first, both in the order of work and in their turns: they start two blocks of rows ahead of the tile
that follows, and nobody waits. Without a mask all start at the first rows, and a tile begins two steps or so after the
one before; many heads at once keep this line short (`group`), and rows that come by all tiles in a line stay in L2.
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

from gpu_accel.flash_attention3.hopper_backward_device import (
    EXCHANGED,
    FINISHED,
    KEYS,
    TURN,
    first_step,
    free_keys,
    half_of_dq,
    next_tile,
    probabilities,
    put_fragment,
    query_blocks,
    send_fragment,
    stage_fragment,
    tile_at,
)
from gpu_accel.flash_attention3.hopper_backward_producer import ROW_FREE, producer, tile_barriers, tile_buffers
from gpu_accel.flash_attention3.hopper_device import (
    bar_arrive,
    bar_arrive_at,
    bar_sync,
    bar_sync_at,
    pack_pairs,
    release,
    unpack_floats,
    unpack_pairs,
)
from gpu_accel.gluon_compat import barrier, reinterpret, tma_add


@gluon.jit
def _turn(n_block, i, num_n, shift, right, M: gl.constexpr, CAUSAL: gl.constexpr):
    """Four (warps that pass on a turn) times the number of tiles of keys that add to row block i before this one."""
    if CAUSAL:
        last = gl.minimum((i * M + (M - 1) + shift + right) // (2 * KEYS), num_n - 1)  # whose keys row block i sees
        return 4 * (last - n_block)
    else:
        return 4 * n_block


@gluon.jit
def _look(turns, slot):
    """How far the turns of a fragment have come."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [(turns + slot).to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _await_turn(turns, slot, turn, seen):
    """Until the turn of a fragment has come to `turn`; it had come to `seen` a while ago.

    Branches are uniform (vote, bra.uni): with others the compiler spills what is in registers.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 done;
        mov.b32 done, $3;
        again:
        setp.lt.s32 early, done, $2;
        vote.sync.any.pred early, early, 0xffffffff;
        @!early bra.uni come;
        ld.relaxed.gpu.global.b32 done, [$1];
        bra.uni again;
        come:
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r", [(turns + slot).to(gl.int64), gl.to_tensor(turn), gl.to_tensor(seen)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(turns, slot):
    """All additions of this warpgroup are complete: the next tile may add to fragment `slot`."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(slot)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    barrier()  # one thread has issued the copies, and is the only one to have waited
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one red.relaxed.gpu.global.add.s32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l", [(turns + slot).to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_halves(desc, fragment, even_buf, odd_buf, x, FREE: gl.constexpr):
    """A (64, 128) accumulator as two fragments, through two buffers in turn.

    FREE: how many of the last copies need not be over for `even_buf` to be free.
    """
    low, high = gl.split(x.reshape((64, 2, 64)).permute((0, 2, 1)))
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tma.store_wait(FREE)
    put_fragment(desc, fragment, even_buf, gl.convert_layout(low, HALF, assert_trivial=True))
    tma.store_wait(1)
    put_fragment(desc, fragment + 1, odd_buf, gl.convert_layout(high, HALF, assert_trivial=True))


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, dq_desc, dk_desc, dv_desc, turns, shape, scales, places,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PING_PONG: gl.constexpr,
    PRELOAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    DYNAMIC: gl.constexpr, ORDERED: gl.constexpr, NAMED: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs = bufs
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    qk_scale, cap_in = scales
    all_m, m0, all_n, n0 = places
    dtype: gl.constexpr = q_bufs.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OTHER: gl.constexpr = 1 - WG
    HEAVY_FIRST: gl.constexpr = CAUSAL or ORDERED
    LAST_FIRST: gl.constexpr = CAUSAL and ORDERED
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    # where a step is: row block i of a head (batch and head in one), `blocks` to go there, `group_left` heads to go
    n_block, head, i, blocks = first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW,
        HEAVY_FIRST, LAST_FIRST)  # fmt: skip
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
    p, factor = probabilities(
        s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in,
        dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K)  # fmt: skip
    mbarrier.wait(v_full.index(0), 0)
    dq = q_zero
    dq_buf = dq_bufs.index(WG)
    new_tile = False
    fragment = head * all_m + m0 + i
    if ORDERED:
        turn = gl.to_tensor(-1)  # dq is 0 now: it may be added at any time, and no turn passes
        seen = gl.to_tensor(0)
        sent = gl.to_tensor(-1)  # the fragment added to last; -1 is a place that nobody waits for
    while tile < num_tiles:
        stage = it % 2
        slot = k % K_SLOTS
        last = (blocks == 1) & (group_left == 1)
        mbarrier.wait(do_full.index(stage), (it // 2) & 1)
        do = do_bufs.index(stage)
        v_own = v_bufs.index((k % V_SLOTS) * 2 + WG)
        dp_async = warpgroup_mma(v_own, do.permute((1, 0)), s_zero, use_acc=False, is_async=True)
        dv_async = warpgroup_mma(unpack_pairs(p, dtype, A_LAYOUT), do, dv, is_async=True)
        if ORDERED:
            _pass_turn(turns, sent)
            _await_turn(turns, fragment * 2 + WG, turn, seen)
            sent = gl.where(turn < 0, -1, fragment * 2 + WG)
        if LEAN:
            # see flash_attention3/hopper_backward_kernel.py: the wait for this copy stands before this step's dQ
            if new_tile:
                tma.store_wait(0)
            stage_fragment(dq_buf, dq)
            if new_tile:
                free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)
            tma_add(dq_desc, [(fragment * 2 + WG) * 16, 0], dq_buf)
        else:
            send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
            if new_tile:
                free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)

        # where the next step is: the next block of rows, the next head of the group, or the next tile
        fragment = head * all_m + m0 + i
        if ORDERED:
            turn = _turn(n_block, i, num_n, shift, right, M, CAUSAL)
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
                    M, 2 * KEYS, CAUSAL, WINDOW, HEAVY_FIRST, LAST_FIRST)  # fmt: skip
                group_left = per_kv
                mbarrier.wait(k_full.index(k % K_SLOTS), (k // K_SLOTS) & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
                k = k_done
        elif blocks == 0:
            i, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
            blocks = hi - i
            head += 1
            group_left -= 1
        stage_next = it_next % 2
        phase_next = (it_next // 2) & 1

        delta = stat_bufs.index(2 * stage + 1).load(COLUMNS)
        if PRELOAD:
            dp, delta = warpgroup_mma_wait(1, deps=[dp_async, delta])
        else:
            dp = warpgroup_mma_wait(1, deps=[dp_async])
        if V_SLOTS == 1 and not LEAN:  # noqa: SIM102
            if last:
                mbarrier.arrive(v_empty.index(0), count=1)
        if LEAN:
            ds = unpack_floats(factor if SOFTCAP else p, dtype, S_LAYOUT) * (dp - delta[None, :])
        else:
            ds = unpack_pairs(factor if SOFTCAP else p, dtype, S_LAYOUT).to(gl.float32) * (dp - delta[None, :])
        ds_packed = pack_pairs(ds, dtype)
        ds_own = ds_bufs.index(stage * 2 + WG)
        ds_own.store(unpack_pairs(ds_packed, dtype, S_LAYOUT))
        fence_async_shared()
        bar_arrive_at(EXCHANGED + 2 * WG + stage, 256)
        dk_async = warpgroup_mma(unpack_pairs(ds_packed, dtype, A_LAYOUT), q_bufs.index(stage), dk, is_async=True)
        mbarrier.wait(q_full.index(stage_next), phase_next)
        k_next = k_bufs.index((k % K_SLOTS) * 2 + WG)
        s_async = warpgroup_mma(k_next, q_bufs.index(stage_next).permute((1, 0)), s_zero, use_acc=False, is_async=True)
        if ORDERED:
            seen = _look(turns, fragment * 2 + WG)
        dv, dk = warpgroup_mma_wait(1, deps=[dv_async, dk_async])
        if LEAN:
            if V_SLOTS == 1:  # noqa: SIM102
                if last:
                    mbarrier.arrive(v_empty.index(0), count=1)
            tma.store_wait(0)
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
        p, f = probabilities(
            s, lse, n_block * 2 * KEYS + WG * KEYS, i * M, shift, seqlen_k, left, right, qk_scale, cap_in,
            dtype, CAUSAL, WINDOW, SOFTCAP, EVEN_K)  # fmt: skip
        if PING_PONG:
            bar_arrive(TURN + OTHER, 256)
        # completed long ago; opens the basic block that pins the exponentials above the wait
        mbarrier.wait(q_full.index(stage_next), phase_next)
        if SOFTCAP:
            dq, p, factor = warpgroup_mma_wait(0, deps=[dq_async, p, f])
        else:
            dq, p = warpgroup_mma_wait(0, deps=[dq_async, p])
        release(row_empty, stage, ROW_FREE if NAMED else None, 288)
        it = it_next
        new_tile = last
        if last:
            n_done, batch_done, head_done = tile_at(tile_done, num_n, heads_kv, group, HEAVY_FIRST, LAST_FIRST)
            block = (batch_done * heads_kv + head_done) * all_n + n0 + 2 * n_done + WG
            if D == 128:
                # The other consumer has read K for its last dQ. One barrier each way: synccheck takes two partitions
                # that wait on the same one for threads gone astray.
                bar_arrive(FINISHED + WG, 256)
                bar_sync(FINISHED + OTHER, 256)
                spare = reinterpret(k_bufs.index(slot * 2 + WG), gl.float32, [16, 256], dq_desc.layout)
                send_halves(dv_desc, 2 * block, dq_buf, spare, dv, 0)
                send_halves(dk_desc, 2 * block, dq_buf, spare, dk, 1)
            else:
                send_fragment(dv_desc, block, dq_buf, dv)
                send_fragment(dk_desc, block, dq_buf, dk)
            if tile < num_tiles:
                mbarrier.wait(v_full.index(k % V_SLOTS), (k // V_SLOTS) & 1)
            dk = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
            dv = gl.full([KEYS, D], 0.0, gl.float32, D_LAYOUT)
    if ORDERED:
        _pass_turn(turns, sent)
        _await_turn(turns, fragment * 2 + WG, turn, seen)
    send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
    if ORDERED:
        _pass_turn(turns, fragment * 2 + WG)
    if PING_PONG:  # noqa: SIM102
        if WG == 0:
            bar_sync(TURN, 256)  # takes the last arrival, so that the barrier is balanced
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "heads_kv",
        "per_kv",
        "num_m",
        "num_n",
        "num_tiles",
        "group",
        "left",
        "right",
        "all_m",
        "m0",
        "all_n",
        "n0",
    ]
)
def ring_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dq_desc, dk_desc, dv_desc, counter,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, all_m, m0, all_n, n0,
    qk_scale, cap_in, turns,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PING_PONG: gl.constexpr,
    PRELOAD: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    DYNAMIC: gl.constexpr, ORDERED: gl.constexpr, NAMED: gl.constexpr, LEAN: gl.constexpr,
):  # fmt: skip
    """Row blocks of the call are m0 ... of all_m in stat (batch, heads, all_m, 2, M) and dq (batch, heads, all_m, 2,
    4096); its blocks of 64 keys are n0 ... of all_n in dk and dv (batch, heads_kv, all_n, D / 64, 4096)."""
    dtype: gl.constexpr = q_desc.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, M], dtype)
    q_bufs, do_bufs, k_bufs, v_bufs = tile_buffers(dtype, D, M, K_SLOTS, V_SLOTS)
    ds_bufs = gl.allocate_shared_memory(dtype, [4, KEYS, M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    bars, _ = tile_barriers(K_SLOTS, V_SLOTS, 2, DYNAMIC, False, NAMED)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right)
    scales = (qk_scale, cap_in)
    places = (all_m, m0, all_n, n0)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, dq_desc, dk_desc, dv_desc, turns, shape, scales, places,
                     D, M, K_SLOTS, V_SLOTS, PING_PONG, PRELOAD, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC,
                     ORDERED, NAMED, LEAN)),
        (_consumer, (1, bufs, bars, dq_desc, dk_desc, dv_desc, turns, shape, scales, places,
                     D, M, K_SLOTS, V_SLOTS, PING_PONG, PRELOAD, CAUSAL, WINDOW, SOFTCAP, EVEN_K, DYNAMIC,
                     ORDERED, NAMED, LEAN)),
        (producer, (bufs, bars, None, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
                    M, K_SLOTS, V_SLOTS, CAUSAL, WINDOW, DYNAMIC, NAMED, ORDERED)),
    ], [4, 1], [240, 24])  # fmt: skip
