"""How the partitions of the Hopper forwards hand buffers, turns and tiles to each other, in Gluon.

Run-time barriers travel in a tuple, `bars` = (q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty,
queue); hopper_forward.py says who arrives on which.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_device import bar_arrive, bar_sync, bar_sync_at, draw

PING_PONG_BARRIER = gl.constexpr(8)  # and 9
Q_FREE = gl.constexpr(10)  # and 11: a slot of Q, with all consumers' rows, has been read (SEAMLESS)
KV_FREE = gl.constexpr(12)  # to 15: a stage of K, and the one before of V, have been read (SEAMLESS)
EARLY_DRAW = gl.constexpr(4)  # key blocks of a tile up to which the next tile is drawn at its start


@gluon.jit
def allocate_bars(Q_SLOTS: gl.constexpr, STAGES: gl.constexpr, QUEUE: gl.constexpr):
    """`bars` of a forward with Q_SLOTS buffers of Q, STAGES of K and of V (which become empty together), and a queue of
    tiles, two slots of QUEUE integers in all."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, queue


@gluon.jit
def ready_bars(
    bars, CONSUMERS: gl.constexpr, DYNAMIC: gl.constexpr, EMPTY_Q: gl.constexpr, EMPTY_KV: gl.constexpr
):  # fmt: skip
    """Initialise those that are used: of the queue if DYNAMIC, EMPTY_Q and EMPTY_KV if no named barriers stand in.

    Where nobody uses a barrier, its memory goes to others, which must not find one there.
    """
    q_full, q_empty, k_full, v_full, kv_empty, queue_full, queue_empty, _ = bars
    Q_SLOTS: gl.constexpr = q_full.shape[0]
    STAGES: gl.constexpr = k_full.shape[0]
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        if EMPTY_Q:
            mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        if EMPTY_KV:
            mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    if DYNAMIC:
        for i in gl.static_range(2):
            mbarrier.init(queue_full.index(i), count=1)
            if EMPTY_Q:
                mbarrier.init(queue_empty.index(i), count=CONSUMERS)


@gluon.jit
def wait_free(empty, it, STAGES: gl.constexpr, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Producer: wait until block `it - STAGES`, whose stage block `it` takes, has been released; BARRIER and THREADS as
    in `release`. With a named barrier, once an `it`."""
    if BARRIER is None:
        mbarrier.wait(empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)
    else:  # noqa: PLR5501
        if it >= STAGES:
            bar_sync_at(BARRIER + it % STAGES, THREADS)


@gluon.jit
def take_last_arrivals(it, k, STAGES: gl.constexpr, Q_SLOTS: gl.constexpr, THREADS: gl.constexpr):
    """Producer, SEAMLESS, behind `it` blocks and k tiles: those which nobody waited for, so that named barriers end as
    they began."""
    for i in range(gl.maximum(it + 1, STAGES), it + STAGES + 1):
        bar_sync_at(KV_FREE + i % STAGES, THREADS)
    for i in range(gl.maximum(k, Q_SLOTS), k + Q_SLOTS):
        bar_sync_at(Q_FREE + i % Q_SLOTS, THREADS)


@gluon.jit
def take_turn(WG: gl.constexpr, PING_PONG: gl.constexpr):
    """Consumer WG: wait until its turn to issue products has come. Once more at the end, by consumer 0."""
    if PING_PONG:
        bar_sync(PING_PONG_BARRIER + WG, 256)


@gluon.jit
def pass_turn(WG: gl.constexpr, CONSUMERS: gl.constexpr, PING_PONG: gl.constexpr):
    """Consumer WG: the next one's turn. Once more at the beginning, by the last, which lets consumer 0 start."""
    if PING_PONG:
        bar_arrive(PING_PONG_BARRIER + (WG + 1) % CONSUMERS, 256)


@gluon.jit
def draw_early(counter, blocks):
    """Producer: the next tile's number where a tile has few blocks, under whose loads the round trip hides; of a long
    one it would come too early."""
    return draw(counter, blocks <= EARLY_DRAW)


@gluon.jit
def draw_late(early, counter, blocks):
    """The next tile: what `draw_early` gave, or drawn now, before the wait for the last V slot, which hides it too."""
    return gl.max(early + draw(counter, blocks > EARLY_DRAW), axis=0) + gl.num_programs(0)
