"""The Hopper backward for one step of a ring: gradients are added, in float32, to what other steps have found.

Loop, partitions and barriers are those of `flash_attention3/hopper_backward_kernel.py`: read its head first. What
differs is where results go. dQ, dK and dV are all sums in float32 that outlive the call, in fragments of 64 x 64
numbers in the order in which threads hold them; the copy engine adds to them as tiles are finished (dQ: as steps are).
So a step needs no passes before it or after it: statistics of the rows are made once (`prepare`), and fragments are
put in order, scaled and rounded once, when all steps are done (`ring_finish.py`).

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
    KEYS,
    probabilities,
    query_blocks,
    tile_at,
)
from gpu_accel.flash_attention3.hopper_backward_kernel import tma_reduce_add
from gpu_accel.flash_attention3.hopper_device import (
    bar_arrive,
    bar_arrive_at,
    bar_sync,
    bar_sync_at,
    pack_pairs,
    publish_tile,
    receive_tile,
    release,
    unpack_floats,
    unpack_pairs,
)
from gpu_accel.gluon_compat import reinterpret, tma_load

EXCHANGED = gl.constexpr(10)  # to 13: dS of consumer (id - 10) // 2 and stage (id - 10) % 2 is in shared memory
FINISHED = gl.constexpr(14)  # and 15: consumer (id - 14) has read K for the last dQ of a tile
ROW_FREE = gl.constexpr(6)  # and 7: a stage of rows has been read (NAMED)
TURN = gl.constexpr(8)  # and 9: whose turn it is to compute exponentials


thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.6, and later ones


@gluon.jit
def _tile(index, num_n, heads_kv, group, CAUSAL: gl.constexpr, ORDERED: gl.constexpr):
    """Tile number -> (block of keys, batch, head). ORDERED and causal: last keys first, whose rows are few."""
    n, batch, head = tile_at(index, num_n, heads_kv, group, CAUSAL or ORDERED)
    if CAUSAL and ORDERED:
        n = num_n - 1 - n
    return n, batch, head


@gluon.jit
def _first_step(
    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
    M: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Key block of a tile, its first query head (of all batches), first query block and number of blocks."""
    n_block, batch, head_kv = _tile(tile, num_n, heads_kv, group, CAUSAL, ORDERED)
    lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
    return n_block, (batch * heads_kv + head_kv) * per_kv, lo, hi - lo


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
    thread_barrier()  # one thread has issued the copies, and is the only one to have waited
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
def _stage_fragment(buf, x):
    """Put a (64, 64) accumulator into a buffer that nobody reads any more, in the order that threads hold it."""
    # (row / 16, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2) -> four numbers of a thread side by side
    buf.store(x.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5)).reshape((16, 256)))
    fence_async_shared()


@gluon.jit
def put_fragment(desc, fragment, buf, x):
    """Add a (64, 64) accumulator to fragment number `fragment`, out of a buffer that nobody reads any more."""
    _stage_fragment(buf, x)
    tma_reduce_add(desc, [fragment * 16, 0], buf)


@gluon.jit
def send_fragment(desc, fragment, buf, x):
    tma.store_wait(0)
    put_fragment(desc, fragment, buf, x)


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
def _free_keys(k_empty, v_empty, k, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr):
    """dK and dV of the tile before have left shared memory."""
    mbarrier.arrive(k_empty.index((k + K_SLOTS - 1) % K_SLOTS), count=1)
    if V_SLOTS > 1:
        mbarrier.arrive(v_empty.index((k + V_SLOTS - 1) % V_SLOTS), count=1)


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
    SPLIT_ROWS: gl.constexpr = M == 128  # dQ: each consumer takes half of the rows, otherwise half of the columns
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OTHER: gl.constexpr = 1 - WG
    shift = seqlen_k - seqlen_q
    tile = gl.program_id(0)
    # where a step is: row block i of a head (batch and head in one), `blocks` to go there, `group_left` heads to go
    n_block, head, i, blocks = _first_step(
        tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right, M, CAUSAL, WINDOW, ORDERED)  # fmt: skip
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
            _stage_fragment(dq_buf, dq)
            if new_tile:
                _free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)
            tma_reduce_add(dq_desc, [(fragment * 2 + WG) * 16, 0], dq_buf)
        else:
            send_fragment(dq_desc, fragment * 2 + WG, dq_buf, dq)
            if new_tile:
                _free_keys(k_empty, v_empty, k, K_SLOTS, V_SLOTS)

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
            if DYNAMIC:
                tile = receive_tile(k_done, queue, queue_full, queue_empty)
            else:
                tile += gl.num_programs(0)
            if tile < num_tiles:
                n_block, head, i, blocks = _first_step(
                    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
                    M, CAUSAL, WINDOW, ORDERED)  # fmt: skip
                group_left = per_kv
                mbarrier.wait(k_full.index(k % K_SLOTS), (k // K_SLOTS) & 1)
            else:
                # nothing follows: the step is repeated and thrown away, which keeps branches away from the products
                it_next = it
                k = k_done
        elif blocks == 0:
            lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
            i = lo
            blocks = hi - lo
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
            n_done, batch_done, head_done = _tile(tile_done, num_n, heads_kv, group, CAUSAL, ORDERED)
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


@gluon.jit
def _load_rows(bars, bufs, descs, batch, head, i, it, fragment, M: gl.constexpr, NAMED: gl.constexpr):
    """One step's Q, lse and delta on one barrier, dO on another."""
    q_full, do_full, row_empty = bars
    q_bufs, do_bufs, stat_bufs = bufs
    q_desc, do_desc, stat_desc = descs
    stage = it % 2
    if NAMED:
        if it >= 2:
            bar_sync_at(ROW_FREE + stage, 288)
    else:
        mbarrier.wait(row_empty.index(stage), ((it // 2) & 1) ^ 1)
    mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + 2 * stat_desc.block_type.nbytes)
    tma_load(q_desc, [batch, head, i * M, 0], q_full.index(stage), q_bufs.index(stage))
    tma_load(stat_desc, [fragment * (2 * M)], q_full.index(stage), stat_bufs.index(2 * stage))
    tma_load(
        stat_desc, [fragment * (2 * M) + M], q_full.index(stage), stat_bufs.index(2 * stage + 1))  # fmt: skip
    mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
    tma_load(do_desc, [batch, head, i * M, 0], do_full.index(stage), do_bufs.index(stage))


@gluon.jit
def _producer(
    bufs, bars, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
    M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    DYNAMIC: gl.constexpr, ORDERED: gl.constexpr, NAMED: gl.constexpr,
):  # fmt: skip
    q_bufs, do_bufs, k_bufs, v_bufs, _, stat_bufs, _ = bufs
    all_m, m0, _, _ = places
    k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue = bars
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right = shape
    shift = seqlen_k - seqlen_q
    it = 0
    k = 0
    tile = gl.program_id(0)
    while tile < num_tiles:
        n_block, batch, head_kv = _tile(tile, num_n, heads_kv, group, CAUSAL, ORDERED)
        lo, hi = query_blocks(n_block * 2 * KEYS, shift, num_m, left, right, M, 2 * KEYS, CAUSAL, WINDOW)
        key0 = n_block * 2 * KEYS
        slot = k % K_SLOTS
        mbarrier.wait(k_empty.index(slot), ((k // K_SLOTS) & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), 2 * k_desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma_load(
                k_desc, [batch, head_kv, key0 + c * KEYS, 0], k_full.index(slot), k_bufs.index(slot * 2 + c)
            )  # fmt: skip
        first = (batch * heads_kv + head_kv) * per_kv * all_m + m0 + lo
        _load_rows((q_full, do_full, row_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc),
                   batch, head_kv * per_kv, lo, it, first, M, NAMED)  # fmt: skip
        it += 1
        slot = k % V_SLOTS
        mbarrier.wait(v_empty.index(slot), ((k // V_SLOTS) & 1) ^ 1)
        mbarrier.expect(v_full.index(slot), 2 * v_desc.block_type.nbytes)
        for c in gl.static_range(2):
            tma_load(
                v_desc, [batch, head_kv, key0 + c * KEYS, 0], v_full.index(slot), v_bufs.index(slot * 2 + c)
            )  # fmt: skip
        for g in range(0, per_kv):
            head = head_kv * per_kv + g
            first = (batch * heads_kv * per_kv + head) * all_m + m0
            for i in range(gl.where(g == 0, lo + 1, lo), hi):
                _load_rows((q_full, do_full, row_empty), (q_bufs, do_bufs, stat_bufs), (q_desc, do_desc, stat_desc),
                           batch, head, i, it, first + i, M, NAMED)  # fmt: skip
                it += 1
        if DYNAMIC:
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
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        if not NAMED:
            mbarrier.init(row_empty.index(i), count=2)
        if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=2)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    bars = (k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue)
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
        (_producer, (bufs, bars, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
                     M, K_SLOTS, V_SLOTS, CAUSAL, WINDOW, DYNAMIC, ORDERED, NAMED)),
    ], [4, 1], [240, 24])  # fmt: skip
