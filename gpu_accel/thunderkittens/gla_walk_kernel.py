"""The forward of gated linear attention for Hopper (sm_90a) in Gluon: pairs of all chunks at once, then a walk.

`gla_kernels` has the formulas, and pairs by levels. Here two kernels share the work:

    gla_pairs_kernel  one program a chunk and head: P, q' = scale q exp(b), k' = k exp(b_last - b), exp(b_last)
    gla_walk_kernel   one program a sequence, head, 64 columns of v and segment: o and the state

**Pairs** (4 warps for K up to 64, 8 up to 128). q and k come by TMA. A warp has 16 steps and 64 columns, a thread two
of those columns in registers, where gates are multiplied up, not summed up: of every block of 2^l steps, what is left
from its first step on (`kept`, with the step itself) and to its last one (`passed`, without it), from those of its
halves by one factor each. So there is one exponential an element for six levels and both ends, nothing is subtracted,
and a gate of -inf is a factor of zero. Blocks of up to 16 steps are in registers of one thread; what the four blocks
of 16 leave goes through shared memory. X of a level, k passed in first blocks and q kept in second ones, goes to one
of two buffers:

    tensor cores | q k' |               | X X' of level 0 |                | X X' of level 1 | ...
    the rest     | gates| X of level 0  | longer blocks   | sum up, next X | longer blocks   | ...

with a barrier of the program before each product. Of the first one the diagonal is taken, which no gate touches. Other
programs of the SM fill in. q' and k' go back to where q and k were, and to memory by TMA with P.

**The walk** (4 warps) has S transposed, v by k: S' in bfloat16 is a left operand in registers, the same as it was
summed up in, so the state never goes through shared memory. A chunk is

    o' = S' q'' + v' P'        S' = S' exp(b_last) + v' k'

with q', k', P, v and exp(b_last) by TMA, STAGES chunks ahead on one mbarrier a stage (1 arrival and its bytes), and o
through shared memory to TMA. Two programs share an SM. LOCAL: only what a segment adds to the state and leaves of it.

What lies beyond a sequence is zero by TMA, with gates of one.
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

from gpu_accel.gluon_compat import barrier, tma_load, tma_store
from gpu_accel.thunderkittens.walk_kernel import STEPS, _opaque, ready_barriers

COLUMNS = gl.constexpr(64)  # of k that are in registers at a time, and of v that a walk takes
LEVELS = gl.constexpr(6)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _halves(x, LEVEL: gl.constexpr):
    """Steps of first and of second blocks of 2^LEVEL steps, each (pairs of blocks, 2^LEVEL, columns)."""
    blocks = gl.reshape(x, [STEPS >> (LEVEL + 1), 2, 1 << LEVEL, x.shape[1]])
    return gl.split(gl.permute(blocks, (0, 2, 3, 1)))


@gluon.jit
def _whole(first, second, LAYOUT: gl.constexpr):
    """All steps, as they were before `_halves`."""
    blocks = gl.permute(gl.join(first, second), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(blocks, [STEPS, first.shape[2]]), LAYOUT, assert_trivial=True)


@gluon.jit
def _apart(LAYOUT: gl.constexpr):
    """t ^ s of steps t and s: its highest bit is the level of their pair. Made anew each time, not kept."""
    steps_t = gl.arange(0, STEPS, layout=gl.SliceLayout(1, LAYOUT)) ^ _opaque(0)
    return steps_t[:, None] ^ gl.arange(0, STEPS, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _total(of_blocks, WHICH: gl.constexpr, ALL: gl.constexpr, LAYOUT: gl.constexpr):
    """What a block of 16 steps leaves, of the four of a chunk."""
    rows = gl.arange(0, 4, layout=gl.SliceLayout(1, ALL))
    return gl.convert_layout(gl.sum(gl.where((rows == WHICH)[:, None], of_blocks, 0.0), axis=0), LAYOUT)


@gluon.jit(do_not_specialize=["g_b", "g_t", "g_h", "seqlen", "chunks", "heads", "K", "scale"])
def gla_pairs_kernel(
    q_desc, k_desc, queries_desc, keys_desc, pairs_desc, g, ends, g_b, g_t, g_h, seqlen, chunks, heads, K, scale,
    BK: gl.constexpr,
):  # fmt: skip
    """queries = q', keys = k' (.., chunks * STEPS, K) and pairs = P (.., chunks * STEPS, STEPS), times scale, through
    their descriptors; ends (batch, heads, chunks, BK) float32. g: strides in units of 4, and K a multiple of 8.
    """
    dtype: gl.constexpr = q_desc.dtype
    GROUPS: gl.constexpr = BK // 64  # warpgroups
    OWN: gl.constexpr = gl.BlockedLayout([16, 2], [1, 32], [4, GROUPS], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, STEPS // GROUPS, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, OWN)
    ALL: gl.constexpr = gl.BlockedLayout([4, 2], [1, 32], [4, GROUPS], [1, 0])  # every four warps have all of it

    q_buf = gl.allocate_shared_memory(dtype, [STEPS, BK], TILE)
    k_buf = gl.allocate_shared_memory(dtype, [STEPS, BK], TILE)
    x_bufs = (gl.allocate_shared_memory(dtype, [STEPS, BK], TILE),
              gl.allocate_shared_memory(dtype, [STEPS, BK], TILE))  # fmt: skip
    p_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS],
                                      gl.NVMMASharedLayout.get_default_for([STEPS, STEPS], dtype))  # fmt: skip
    totals = gl.allocate_shared_memory(gl.float32, [4, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()

    program = gl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    n = program // heads // chunks
    row = chunk * STEPS
    mbarrier.expect(full, 2 * q_desc.block_type.nbytes)
    tma_load(q_desc, [n, head, row, 0], full, q_buf)
    tma_load(k_desc, [n, head, row, 0], full, k_buf)

    steps = gl.arange(0, STEPS, layout=gl.SliceLayout(1, OWN))
    cols = gl.arange(0, BK, layout=BY_COLUMN)
    own = g + n.to(gl.int64) * g_b * 4 + head.to(gl.int64) * g_h * 4 + row.to(gl.int64) * g_t * 4
    gates = own + steps.to(gl.int64)[:, None] * g_t * 4 + cols[None, :]
    inside = (row + steps < seqlen)[:, None] & (cols < K // 8 * 8)[None, :]
    ends += ((n.to(gl.int64) * heads + head) * chunks + chunk) * BK
    found = gl.load(gates, mask=inside, other=0.0)
    kept = gl.exp2(found.to(gl.float32) * LOG2_E)
    passed = gl.full([STEPS, BK], 1.0, gl.float32, OWN)
    total = kept  # of its block, in every step
    nothing = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    mbarrier.wait(full, 0)
    found = warpgroup_mma(q_buf, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    for level in gl.static_range(LEVELS):
        found = warpgroup_mma_wait(0, deps=[found])
        if level == 0:
            scores = gl.where(_apart(SCORES) == 0, found, 0.0)
        else:
            scores = gl.where(_apart(SCORES) >> level - 1 == 1, found, scores)
        # q and k are read anew: registers that hold them all along would be too many
        queries = q_buf.load(OWN)
        keys = k_buf.load(OWN)
        second = ((steps >> level) & 1 == 1)[:, None]
        if level < 4:
            _, q_second = _halves(queries, level)
            k_first, _ = _halves(keys, level)
            kept_first, kept_second = _halves(kept, level)
            passed_first, passed_second = _halves(passed, level)
            x = _whole((k_first.to(gl.float32) * passed_first).to(dtype),
                       (q_second.to(gl.float32) * kept_second).to(dtype), OWN)  # fmt: skip
        else:
            x = (gl.where(second, queries, keys).to(gl.float32) * gl.where(second, kept, passed)).to(dtype)
        x_buf = x_bufs[level % 2]
        x_buf.store(x)
        fence_async_shared()
        barrier()
        found = warpgroup_mma(x_buf, x_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # of blocks twice as long
        if level < 4:
            total_first, total_second = _halves(total, level)
            kept = _whole(kept_first, kept_second * total_first, OWN)
            passed = _whole(passed_first * total_second, passed_second, OWN)
            both = total_first * total_second
            total = _whole(both, both, OWN)
            if level == 3:
                totals.store(gl.max(gl.reshape(total, [4, 16, BK]), axis=1))  # the same 16 times
        elif level == 4:
            late = (steps >> 5 == 1)[:, None]
            of_blocks = totals.load(ALL)
            t_0, t_1 = _total(of_blocks, 0, ALL, BY_COLUMN), _total(of_blocks, 1, ALL, BY_COLUMN)
            t_2, t_3 = _total(of_blocks, 2, ALL, BY_COLUMN), _total(of_blocks, 3, ALL, BY_COLUMN)
            kept = kept * gl.where(second, gl.where(late, t_2[None, :], t_0[None, :]), 1.0)
            passed = passed * gl.where(second, 1.0, gl.where(late, t_3[None, :], t_1[None, :]))
            first, last = t_0 * t_1, t_2 * t_3
    gl.store(ends + cols, first * last)
    kept = kept * gl.where(late, (first * scale)[None, :], scale)
    q_buf.store((q_buf.load(OWN).to(gl.float32) * kept).to(dtype))
    passed = passed * gl.where(late, 1.0, last[None, :])
    k_buf.store((k_buf.load(OWN).to(gl.float32) * passed).to(dtype))
    found = warpgroup_mma_wait(0, deps=[found])
    scores = gl.where(_apart(SCORES) >> LEVELS - 1 == 1, found, scores)
    steps_t = gl.arange(0, STEPS, layout=gl.SliceLayout(1, SCORES))[:, None]
    steps_s = gl.arange(0, STEPS, layout=gl.SliceLayout(0, SCORES))[None, :]
    p_buf.store((gl.where(steps_t >= steps_s, scores, 0.0) * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(queries_desc, [n, head, row, 0], q_buf)
    tma_store(keys_desc, [n, head, row, 0], k_buf)
    tma_store(pairs_desc, [n, head, row, 0], p_buf)
    tma.store_wait(0)


@gluon.jit
def _ask(descs, bufs, bar, stage, n, head, chunk, line, col, LOCAL: gl.constexpr):
    """Ask for what a chunk needs; line: of its first number in ends."""
    q_desc, k_desc, p_desc, v_desc, ends_desc = descs
    q_bufs, k_bufs, p_bufs, v_bufs, ends_bufs = bufs
    full = bar.index(stage)
    row = chunk * STEPS
    BYTES: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes + ends_desc.block_type.nbytes
    MORE: gl.constexpr = 0 if LOCAL else q_desc.block_type.nbytes + p_desc.block_type.nbytes
    mbarrier.expect(full, BYTES + MORE)
    if not LOCAL:
        tma_load(q_desc, [n, head, row, 0], full, q_bufs.index(stage))
        tma_load(p_desc, [n, head, row, 0], full, p_bufs.index(stage))
    tma_load(k_desc, [n, head, row, 0], full, k_bufs.index(stage))
    tma_load(v_desc, [n, head, row, col], full, v_bufs.index(stage))
    tma_load(ends_desc, [line], full, ends_bufs.index(stage))


@gluon.jit
def _turned_places(number, col, K, V, BK: gl.constexpr, LAYOUT: gl.constexpr, COLS: gl.constexpr = COLUMNS):
    """Where COLS columns of v, by k, of state `number` of K x V lie, and which of them exist."""
    of_v = col + gl.arange(0, COLS, layout=gl.SliceLayout(1, LAYOUT))
    of_k = gl.arange(0, BK, layout=gl.SliceLayout(0, LAYOUT))
    inside = (of_v < V)[:, None] & (of_k < K)[None, :]
    return number.to(gl.int64) * (K * V) + of_k[None, :] * V + of_v[:, None], inside


@gluon.jit(do_not_specialize=["chunks", "heads", "sequences", "segments", "tiles", "K", "V", "has_initial"])
def gla_walk_kernel(
    q_desc, k_desc, p_desc, v_desc, ends_desc, o_desc, initial, local, decays, final,
    chunks, heads, sequences, segments, tiles, K, V, has_initial,
    BK: gl.constexpr, STAGES: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """o through o_desc, and final (sequences, heads, K, V) float32, of v and what `gla_pairs_kernel` made.

    initial: as final, or has_initial is 0. local (segments - 1, sequences, heads, K, V) and decays (segments - 1,
    sequences, heads, BK) float32: what every segment but the last adds to the state, and what it leaves of the one
    before it; with LOCAL they are what is written, and o and final are left alone.
    """
    dtype: gl.constexpr = k_desc.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, COLUMNS], dtype)

    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, COLUMNS], VALUES)
    ends_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BK], gl.NVMMASharedLayout(0, 32, 1))
    q_bufs = k_bufs
    p_bufs = v_bufs
    o_buf = v_bufs
    if not LOCAL:
        q_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
        p_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, STEPS], VALUES)
        o_buf = gl.allocate_shared_memory(dtype, [STEPS, COLUMNS], VALUES)
    full = ready_barriers(STAGES)

    program = gl.program_id(0)
    col = program % tiles * COLUMNS
    rest = program // tiles
    head = rest % heads
    n = rest // heads % sequences
    position = rest // heads // sequences
    each = gl.cdiv(chunks, segments)
    begin = position * each
    end = gl.minimum(chunks, begin + each)
    number = n * heads + head
    line = number * chunks * BK
    descs = (q_desc, k_desc, p_desc, v_desc, ends_desc)
    bufs = (q_bufs, k_bufs, p_bufs, v_bufs, ends_bufs)
    for i in gl.static_range(STAGES):
        if begin + i < end:
            _ask(descs, bufs, full, i, n, head, begin + i, line + (begin + i) * BK, col, LOCAL)

    acc = gl.full([COLUMNS, BK], 0.0, gl.float32, STATE)
    if not LOCAL:
        # Both asked at run time: of a state that begins with zeros that it knows, or with nothing but this load, ptxas
        # 12.8 makes no left operand, but crashes.
        places, inside = _turned_places(number, col, K, V, BK, STATE)
        acc = gl.load(initial + places, mask=inside & (has_initial != 0), other=0.0)
    keys_of = gl.arange(0, BK, layout=gl.SliceLayout(0, STATE))
    if not LOCAL:
        for before in range(0, position):
            one = before * sequences * heads + number
            places, inside = _turned_places(one, col, K, V, BK, STATE)
            acc = acc * gl.load(decays + one.to(gl.int64) * BK + keys_of)[None, :]
            acc += gl.load(local + places, mask=inside, other=0.0)
    left = gl.full([BK], 1.0, gl.float32, gl.SliceLayout(0, STATE))
    nothing = gl.full([COLUMNS, STEPS], 0.0, gl.float32, OUT)
    stage = 0
    phase = 0
    for chunk in range(begin, end):
        if not LOCAL:
            state = gl.convert_layout(acc.to(dtype), LEFT)
        mbarrier.wait(full.index(stage), phase)
        values = v_bufs.index(stage).permute((1, 0))
        if not LOCAL:
            out = warpgroup_mma(state, q_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            out = warpgroup_mma(values, p_bufs.index(stage).permute((1, 0)), out, is_async=True)
        decay = ends_bufs.index(stage).load(gl.SliceLayout(0, STATE))
        acc = acc * decay[None, :]
        acc = warpgroup_mma(values, k_bufs.index(stage), acc, is_async=True)
        if LOCAL:
            left = left * decay
        else:
            tma.store_wait(0)
            barrier()  # the last o has left
            out = warpgroup_mma_wait(1, deps=[out])
            o_buf.permute((1, 0)).store(out.to(dtype))
            fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        if not LOCAL:
            tma_store(o_desc, [n, head, chunk * STEPS, col], o_buf)
        if chunk + STAGES < end:
            _ask(descs, bufs, full, stage, n, head, chunk + STAGES, line + (chunk + STAGES) * BK, col, LOCAL)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if LOCAL:
        one = position * sequences * heads + number
        places, inside = _turned_places(one, col, K, _opaque(V), BK, STATE)
        gl.store(local + places, acc, mask=inside)
        gl.store(decays + one.to(gl.int64) * BK + keys_of, left)
    else:
        if position == segments - 1:
            places, inside = _turned_places(number, col, K, _opaque(V), BK, STATE)
            gl.store(final + places, acc, mask=inside)
        tma.store_wait(0)
