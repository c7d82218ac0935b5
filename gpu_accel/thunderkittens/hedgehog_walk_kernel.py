"""Hedgehog with a window of 128 for Hopper (sm_90a) in Gluon, in one kernel: features never leave the chip.

`windowed.py` has the formula. A program has a sequence and a head, and walks over its chunks of 64 steps with two
warpgroups, each a partition with half of v's columns. The window of chunk c ends in block c - 2: there a step has
softmax's weights with keys that come later in their block than itself in its own, and linear ones with all others.

    warpgroup 0 | features of q, what they weigh before | q k' of three blocks, softmax | f f' | o | S += features' v
    warpgroup 1 | features of block c - 2's keys        | the same                      | f f' | o | S, its sums

Scores and exponentials are done by both, each for its half of o: to hand them over takes more barriers. The two meet
once a chunk, when features are there. That q and the oldest keys were read one tells the other, which asks for the next
by TMA; that features were read each tells the other before it makes its next ones. In block c - 2 both masks are
triangles, so one product with v has both kinds of weights. Half of S stays in registers, and is in shared memory in 16
bits for the next chunk.

Shared memory: both maps, q, features of q and of keys, 3 blocks of k and of v, S and o, 14 tiles of 16 KiB at K = 128.
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

from gpu_accel.flash_attention3.hopper_device import bar_arrive, bar_sync
from gpu_accel.gluon_compat import barrier, tma_load, tma_store
from gpu_accel.thunderkittens.walk_kernel import _opaque

STEPS = gl.constexpr(64)  # of a chunk: the M of wgmma
FEATURES = gl.constexpr(64)  # of a map, and as many of its negative
HALF = gl.constexpr(64)  # columns of v of a warpgroup
LOG2E = gl.constexpr(1.4426950408889634)
MAPPED = gl.constexpr(8)  # named barriers: features are there,
READ = gl.constexpr(9)  # q and the oldest keys were read,
OVER = gl.constexpr(10)  # and, of warpgroup 0 and of 1, the chunk's features: 345 us for 353 by one that both wait at


@gluon.jit
def _load(descs, bufs, full, n, head_q, chunk, slot):
    """Ask for a chunk's q and k; beyond the sequence they are zeros."""
    q_desc, k_desc = descs
    q_buf, k_bufs = bufs
    mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes)
    tma_load(q_desc, [n, head_q, chunk * STEPS, 0], full, q_buf)
    tma_load(k_desc, [n, head_q, chunk * STEPS, 0], full, k_bufs.index(slot))


@gluon.jit
def _softmax(x, there, z_buf, BY: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr):
    """softmax(x) of rows, rounded, times `there`. BY: log2(e), and of the negative softmax -log2(e).

    SUMS: and the products of its rows with z_buf.
    """
    top = gl.max(x, axis=1) if BY > 0 else gl.min(x, axis=1)
    y = gl.exp2(x * BY - (top * BY)[:, None])
    share = there / gl.sum(y, axis=1)
    weight = share
    if SUMS:
        weight = gl.sum(y * z_buf.load(gl.SliceLayout(0, y.type.layout))[None, :], axis=1) * share
    return (y * share[:, None]).to(DTYPE), weight


@gluon.jit
def _half(
    WG: gl.constexpr, descs, bufs, bars, vectors, place, chunks, scale, floor, factors, HAS_A: gl.constexpr,
    HAS_B: gl.constexpr,
):  # fmt: skip
    """Half WG of o's columns, and the features of q (0) or of keys (1)."""
    q_desc, k_desc, v_desc, o_desc = descs
    q_bufs, k_bufs, v_bufs, map_bufs, f_bufs, s_bufs, o_bufs, ones_buf = bufs
    full, v_full = bars
    z_bufs, sums_buf = vectors
    n, head, head_q = place
    dtype: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    COLS: gl.constexpr = gl.SliceLayout(0, TILE)
    steps_t = gl.arange(0, STEPS, layout=ROWS)
    steps_s = gl.arange(0, STEPS, layout=COLS)
    none = gl.full([STEPS, 64], 0.0, gl.float32, TILE)
    first = none  # S: features of the map,
    second = none  # and of its negative
    if HAS_A:
        by = gl.load(factors[0] + head)
    if HAS_B:
        by_linear = gl.load(factors[1] + head)
    narrow = gl.full([FEATURES, 8], 0.0, gl.float32, NARROW)
    bar_arrive(OVER + WG, 256)
    for c in range(0, chunks):
        now = c % 3
        near = (c + 2) % 3
        late = (c + 1) % 3
        phase = c & 1
        at = _opaque(0)  # addresses are made anew in every turn: kept, they take more registers than there are
        mbarrier.wait(full, phase)
        if WG == 0:
            projected = warpgroup_mma(q_bufs.index(at), map_bufs.index(at), none, use_acc=False, is_async=True)
        else:
            projected = warpgroup_mma(k_bufs.index(late), map_bufs.index(at + 1), none, use_acc=False, is_async=True)
        s2 = warpgroup_mma(q_bufs.index(at), k_bufs.index(late).permute((1, 0)), none, use_acc=False, is_async=True)
        s1 = warpgroup_mma(q_bufs.index(at), k_bufs.index(near).permute((1, 0)), none, use_acc=False, is_async=True)
        projected = warpgroup_mma_wait(2, deps=[projected])
        bar_sync(OVER + 1 - WG, 256)
        there = 1.0
        if WG == 1:
            there = gl.where(c < 2, 0.0, 1.0)  # keys before the first one have no features
        a, weight = _softmax(projected, there, z_bufs.index(0), LOG2E, WG == 0, dtype)
        f_bufs.index(at + 2 * WG).store(a)
        b, more = _softmax(projected, there, z_bufs.index(1), -LOG2E, WG == 0, dtype)
        f_bufs.index(at + 2 * WG + 1).store(b)
        if WG == 0:  # of what lies before the oldest block
            sums_buf.store(weight + more)
        s0 = warpgroup_mma(q_bufs.index(at), k_bufs.index(now).permute((1, 0)), none, use_acc=False, is_async=True)
        tma.store_wait(0)
        fence_async_shared()
        bar_sync(MAPPED, 256)
        s2 = warpgroup_mma_wait(2, deps=[s2])
        causal = steps_t[:, None] >= (steps_s + _opaque(0))[None, :]  # and linear in the oldest block, else in softmax
        top = gl.where(c < 2, float("-inf"), gl.max(gl.where(causal, float("-inf"), s2), axis=1))
        s1 = warpgroup_mma_wait(1, deps=[s1])
        top = gl.maximum(top, gl.where(c < 1, float("-inf"), gl.max(s1, axis=1)))
        s0 = warpgroup_mma_wait(0, deps=[s0])
        if WG == 0:
            bar_sync(READ, 256)
            _load((q_desc, k_desc), (q_bufs.index(at), k_bufs), full, n, head_q, c + 1, late)
        else:
            bar_arrive(READ, 256)
        s0 = gl.where(causal, s0, float("-inf"))
        top = gl.maximum(top, gl.max(s0, axis=1)) * scale
        p0 = gl.exp2(s0 * scale - top[:, None])
        total = gl.sum(p0, axis=1)
        if HAS_A:
            p0 = p0 * by
        p0 = gl.convert_layout(p0.to(dtype), LEFT)
        p1 = gl.exp2(s1 * scale - gl.where(c < 1, float("inf"), top)[:, None])
        total += gl.sum(p1, axis=1)
        if HAS_A:
            p1 = p1 * by
            total = total * by
        p1 = gl.convert_layout(p1.to(dtype), LEFT)
        # under the products of features
        keys = f_bufs.index(at + 2).permute((1, 0))
        more_keys = f_bufs.index(at + 3).permute((1, 0))
        pairs = warpgroup_mma(f_bufs.index(at), keys, none, use_acc=False, is_async=True)
        pairs = warpgroup_mma(f_bufs.index(at + 1), more_keys, pairs, is_async=True)
        p2 = gl.exp2(s2 * scale - gl.where(c < 2, float("inf"), top)[:, None])
        if HAS_A:
            p2 = p2 * by
        pairs = warpgroup_mma_wait(0, deps=[pairs])
        before = sums_buf.load(ROWS)
        if HAS_B:  # S has it
            before = before * by_linear
            pairs = pairs * by_linear
        p2 = gl.where(causal, pairs, p2)
        total += gl.sum(p2, axis=1) + before + floor
        p2 = gl.convert_layout(p2.to(dtype), LEFT)
        out = warpgroup_mma(f_bufs.index(at), s_bufs.index(at + 2 * WG), none, use_acc=False, is_async=True)
        out = warpgroup_mma(f_bufs.index(at + 1), s_bufs.index(at + 2 * WG + 1), out, is_async=True)
        mbarrier.wait(v_full.index(WG), phase)
        v_late = v_bufs.index(2 * late + WG)
        out = warpgroup_mma(p2, v_late, out, is_async=True)
        out = warpgroup_mma(p1, v_bufs.index(2 * near + WG), out, is_async=True)
        out = warpgroup_mma(p0, v_bufs.index(2 * now + WG), out, is_async=True)
        first = warpgroup_mma(keys, v_late, first, is_async=True)
        second = warpgroup_mma(more_keys, v_late, second, is_async=True)
        if WG == 1:
            ones = ones_buf.permute((1, 0))
            sum_a = warpgroup_mma(keys, ones, narrow, use_acc=False, is_async=True)
            sum_b = warpgroup_mma(more_keys, ones, narrow, use_acc=False, is_async=True)
            out = warpgroup_mma_wait(4, deps=[out])
        else:
            out = warpgroup_mma_wait(2, deps=[out])
        o_bufs.index(at + WG).store((out * (1.0 / total)[:, None]).to(dtype))
        if WG == 1:
            first, second, sum_a, sum_b = warpgroup_mma_wait(0, deps=[first, second, sum_a, sum_b])
            z_bufs.index(0).store(z_bufs.index(0).load(gl.SliceLayout(1, NARROW)) + gl.max(sum_a, axis=1))
            z_bufs.index(1).store(z_bufs.index(1).load(gl.SliceLayout(1, NARROW)) + gl.max(sum_b, axis=1))
        else:
            first, second = warpgroup_mma_wait(0, deps=[first, second])
        barrier()
        bar_arrive(OVER + WG, 256)
        mbarrier.expect(v_full.index(WG), v_desc.block_type.nbytes)
        tma_load(v_desc, [n, head, (c + 1) * STEPS, WG * HALF], v_full.index(WG), v_late)
        if HAS_B:
            s_bufs.index(at + 2 * WG).store((first * by_linear).to(dtype))
            s_bufs.index(at + 2 * WG + 1).store((second * by_linear).to(dtype))
        else:
            s_bufs.index(at + 2 * WG).store(first.to(dtype))
            s_bufs.index(at + 2 * WG + 1).store(second.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(o_desc, [n, head, c * STEPS, WG * HALF], o_bufs.index(at + WG))
    bar_sync(OVER + 1 - WG, 256)
    # what was asked for last comes to memory that may not be given back before
    mbarrier.wait(v_full.index(WG), chunks & 1)
    if WG == 0:
        mbarrier.wait(full, chunks & 1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "scale", "floor"])
def hedgehog_walk_kernel(
    q_desc, k_desc, v_desc, o_desc, q_map_desc, k_map_desc, window_factor, linear_factor,
    chunks, heads, group, scale, floor, BK: gl.constexpr, HAS_A: gl.constexpr, HAS_B: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """o through o_desc. Descriptors of rank 4: (batch, head, row, column), of the maps (1, head, K, FEATURES).

    window_factor, linear_factor: (heads,) float32, with HAS_A and HAS_B. scale: in base 2, above 0. chunks: 1 or more.
    REGISTERS: of a thread.
    """
    dtype: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [1, STEPS, BK], KEYS)
    k_bufs = gl.allocate_shared_memory(dtype, [3, STEPS, BK], KEYS)
    v_bufs = gl.allocate_shared_memory(dtype, [6, STEPS, HALF], SQUARE)
    map_bufs = gl.allocate_shared_memory(
        dtype, [2, BK, FEATURES], gl.NVMMASharedLayout.get_default_for([BK, FEATURES], dtype)
    )
    f_bufs = gl.allocate_shared_memory(dtype, [4, STEPS, FEATURES], SQUARE)
    s_bufs = gl.allocate_shared_memory(dtype, [4, FEATURES, HALF], SQUARE)
    o_bufs = gl.allocate_shared_memory(dtype, [2, STEPS, HALF], SQUARE)
    ones_buf = gl.allocate_shared_memory(dtype, [8, STEPS], gl.NVMMASharedLayout.get_default_for([8, STEPS], dtype))
    z_bufs = gl.allocate_shared_memory(gl.float32, [2, FEATURES], VECTOR)
    sums_buf = gl.allocate_shared_memory(gl.float32, [STEPS], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(full, count=1)
    mbarrier.init(v_full.index(0), count=1)
    mbarrier.init(v_full.index(1), count=1)

    # what the first chunks see before the first step
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    zeros = gl.full([64, 64], 0.0, dtype, TILE)
    for i in gl.static_range(2):
        k_bufs.index(1 + i).store(gl.full([STEPS, BK], 0.0, dtype, WIDE))
        z_bufs.index(i).store(gl.full([FEATURES], 0.0, gl.float32, gl.SliceLayout(1, TILE)))
    for i in gl.static_range(4):
        v_bufs.index(2 + i).store(zeros)
        s_bufs.index(i).store(zeros)
    ones_buf.store(gl.full([8, STEPS], 1.0, dtype, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    fence_async_shared()
    barrier()

    program = gl.program_id(0)
    head = program % heads
    n = program // heads
    head_q = head // group
    mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes + 2 * q_map_desc.block_type.nbytes)
    tma_load(q_map_desc, [0, head_q, 0, 0], full, map_bufs.index(0))
    tma_load(k_map_desc, [0, head_q, 0, 0], full, map_bufs.index(1))
    tma_load(q_desc, [n, head_q, 0, 0], full, q_bufs.index(0))
    tma_load(k_desc, [n, head_q, 0, 0], full, k_bufs.index(0))
    for i in gl.static_range(2):
        mbarrier.expect(v_full.index(i), v_desc.block_type.nbytes)
        tma_load(v_desc, [n, head, 0, i * HALF], v_full.index(i), v_bufs.index(i))
    descs = (q_desc, k_desc, v_desc, o_desc)
    bufs = (q_bufs, k_bufs, v_bufs, map_bufs, f_bufs, s_bufs, o_bufs, ones_buf)
    bars = (full, v_full)
    vectors = (z_bufs, sums_buf)
    place = (n, head, head_q)
    factors = (window_factor, linear_factor)
    gl.warp_specialize([
        (_half, (0, descs, bufs, bars, vectors, place, chunks, scale, floor, factors, HAS_A, HAS_B)),
        (_half, (1, descs, bufs, bars, vectors, place, chunks, scale, floor, factors, HAS_A, HAS_B)),
    ], [4], [REGISTERS])  # fmt: skip
