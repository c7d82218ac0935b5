"""Gradients of k and v in one walk for Hopper (sm_90a) in Gluon, and what gates need of the pairs inside chunks.

The two walks from the last chunk to the first that `walk_back` needs for dk and dv have the same state, one the other's
transpose, the same decays and the same tensors. One program has both, a sequence, a head and a segment:

    D (V, K) = sum over later t of exp(b_t) do_t q_t', in registers, and in shared memory in bfloat16
    dk = scale w ((v do' * decays) q + v D)         dv = scale w ((k q' * decays) do + k D')

Seven products a chunk for eight, q, k, v and do once for twice; and of (k q') (v do') * decays, whose factors both are
here, the sums over rows and columns that `pairs_kernel` would otherwise read v and do once more for.

    tensor cores | k q'  v do'  v D  k D' |                 | dk dv | D |
    the rest     |  decays                | pairs, do'      | D: next chunk's TMA loads
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

from gpu_accel.gluon_compat import barrier, tma_add, tma_load, tma_store, tma_written
from gpu_accel.thunderkittens.walk_kernel import (
    STEPS,
    _inverse,
    _opaque,
    _powers_of_rows,
    _scaled_keys,
    _state_places,
    _store_scaled,
)


@gluon.jit
def _load(descs, bufs, bars, stage, n, head, head_q, chunk, line, WEIGHTED: gl.constexpr, EACH: gl.constexpr):
    """Ask for a chunk's q, k, v, do and gates. EACH: with a barrier for every one of them."""
    q_desc, k_desc, v_desc, do_desc, sums_desc, weights_desc = descs
    q_bufs, k_bufs, v_bufs, do_bufs, sums_bufs, weights_bufs = bufs
    q_full, k_full, v_full, do_full, sums_full, weights_full = bars
    row = chunk * STEPS
    VECTORS: gl.constexpr = (1 + WEIGHTED) * STEPS * 4
    if EACH:
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
        mbarrier.expect(sums_full.index(stage), STEPS * 4)
        if WEIGHTED:
            mbarrier.expect(weights_full.index(stage), STEPS * 4)
    else:
        mbarrier.expect(q_full.index(stage), 2 * q_desc.block_type.nbytes + 2 * v_desc.block_type.nbytes + VECTORS)
    tma_load(k_desc, [n, head_q, row, 0], k_full.index(stage), k_bufs.index(stage))
    tma_load(q_desc, [n, head_q, row, 0], q_full.index(stage), q_bufs.index(stage))
    tma_load(v_desc, [n, head, row, 0], v_full.index(stage), v_bufs.index(stage))
    tma_load(do_desc, [n, head, row, 0], do_full.index(stage), do_bufs.index(stage))
    tma_load(sums_desc, [line + row], sums_full.index(stage), sums_bufs.index(stage))
    if WEIGHTED:
        tma_load(weights_desc, [line + row], weights_full.index(stage), weights_bufs.index(stage))


@gluon.jit
def _load_turn(
    descs, bufs, bars, stage, n, head, step, chunks, heads, group, WEIGHTED: gl.constexpr, EACH: gl.constexpr
):
    """`_load` for step `step` of a program that walks all chunks of `head`, then those of the next one."""
    mine = head + step // chunks
    _load(descs, bufs, bars, stage, n, mine, mine // group, chunks - 1 - step % chunks,
          (n * heads + mine) * chunks * STEPS, WEIGHTED, EACH)  # fmt: skip


@gluon.jit
def _store_parts(to, x, scale, COLS: gl.constexpr):
    """Sums over each of COLS parts of the columns of x, times scale, at to (COLS, rows)."""
    parts = gl.sum(x.reshape((x.shape[0], COLS, x.shape[1] // COLS)), axis=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, parts.type.layout)
    rows = gl.arange(0, x.shape[0], layout=ROWS)[:, None]
    gl.store(to + rows + gl.arange(0, COLS, layout=COLUMNS)[None, :] * x.shape[0], parts * scale)


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "sequences", "segments", "K", "V", "scale"])
def both_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, states_desc, sums_desc, weights_desc,
    initial, local, decays, final, out_of, passed, got, chunks, heads, group, sequences, segments, K, V, scale, powers,
    BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, WEIGHTED: gl.constexpr, HAS_INITIAL: gl.constexpr,
    HAS_LOCAL: gl.constexpr, WARPS: gl.constexpr, TURNS: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """dk (batch, seqlen, heads, K), dv (.., V) through descriptors of rank 4 as in `walk_kernel`, of 64 steps each.

    initial, final (sequences, heads, V, K), local (segments - 1, sequences, heads, V, K) float32: D, as there.
    states_desc: (sequences, chunks * BV, heads, K), the D that enters every chunk, in the dtype of q.
    out_of, passed (sequences, heads, chunks, WARPS // 4, STEPS) float32, without weights, in parts: what a step passes
    to later chunks, and what it passes on inside its own. got (.., 4, STEPS): what it gets there of each 16 steps, with
    their weights.
    TURNS: heads that a program walks one after the other, whose dk is one, as o in `walk_kernel`.

    With 8 warps each warpgroup has half of the columns. Whatever both have a part of costs barriers of all, and nobody
    else is there to fill the gap: so sums over columns are left in parts, P goes through shared memory as a left
    operand, and every tensor arrives on an mbarrier of its own (between loads that arrive on the same one Triton 3.6
    puts a barrier of all): 6 of them a chunk for 25.
    UNIT: scale is 1.
    In float16 D, both P and do' are multiplied with powers of two as in `walk_kernel`, which explains `powers`: here
    all tiles of 64 columns of K have the same. dk may be float32 then.
    """
    gl.static_assert(TURNS == 1 or not (HAS_INITIAL or HAS_LOCAL))
    dtype: gl.constexpr = q_desc.dtype
    HALF: gl.constexpr = dtype == gl.float16
    COLS: gl.constexpr = WARPS // 4
    EACH: gl.constexpr = COLS > 1
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLS], [16, 64 // COLS, 16])
    EVERY: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4 * COLS, 1], [16, 64, 16]))
    OUT_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLS], [16, BK // COLS, 16])
    OUT_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, COLS], [16, BV // COLS, 16])
    LEFT_K: gl.constexpr = gl.DotOperandLayout(0, OUT_K, 2)
    LEFT_V: gl.constexpr = gl.DotOperandLayout(0, OUT_V, 2)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    gl.static_assert(BV == 64)  # rows of D: the M of wgmma

    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BV], VALUES)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BV], VALUES)
    s_buf = gl.allocate_shared_memory(dtype, [BV, BK], gl.NVMMASharedLayout.get_default_for([BV, BK], dtype))
    RESULTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dk_desc.dtype)
    dk_buf = gl.allocate_shared_memory(dk_desc.dtype, [STEPS, BK], RESULTS)
    dv_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)
    sums_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    weights_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    bars = (full, full, full, full, full, full)
    if COLS > 1:
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        sums_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        weights_full = full  # of weights that are not there: of nobody
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(do_full.index(i), count=1)
            mbarrier.init(sums_full.index(i), count=1)
        if WEIGHTED:
            weights_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
            for i in gl.static_range(STAGES):
                mbarrier.init(weights_full.index(i), count=1)
        bars = (full, k_full, v_full, do_full, sums_full, weights_full)
    if COLS > 1:
        PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, STEPS], dtype)
        p_k_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS], PAIRS)
        p_v_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS], PAIRS)
    fence_async_shared()

    program = gl.program_id(0)
    if TURNS > 1:
        head = program % (heads // TURNS) * TURNS
        n = program // (heads // TURNS)
        position = 0
    else:
        head = program % heads
        n = program // heads % sequences
        position = program // heads // sequences
    head_q = head // group
    each = gl.cdiv(chunks, segments)
    begin = position * each
    end = gl.minimum(chunks, begin + each)
    number = n * heads + head
    line = number * chunks * STEPS
    descs = (q_desc, k_desc, v_desc, do_desc, sums_desc, weights_desc)
    bufs = (q_bufs, k_bufs, v_bufs, do_bufs, sums_bufs, weights_bufs)
    for i in gl.static_range(STAGES):
        if TURNS > 1:
            if i < TURNS * chunks:
                _load_turn(descs, bufs, bars, i, n, head, i, chunks, heads, group, WEIGHTED, EACH)
        elif begin + i < end:
            _load(descs, bufs, bars, i, n, head, head_q, chunks - 1 - begin - i, line, WEIGHTED, EACH)

    acc = gl.full([BV, BK], 0.0, gl.float32, OUT_K)
    if HAS_INITIAL:
        places, inside = _state_places(number, 0, V, K, BV, BK, OUT_K)
        acc = gl.load(initial + places, mask=inside, other=0.0)
    if HAS_LOCAL:
        for before in range(0, position):
            one = before * sequences * heads + number
            places, inside = _state_places(one, 0, V, K, BV, BK, OUT_K)
            acc = acc * gl.load(decays + one)
            acc += gl.load(local + places, mask=inside, other=0.0)
    unit = 1.0
    back = 1.0
    if HALF:
        back = _store_scaled(s_buf, acc)
    else:
        s_buf.store(acc.to(dtype))
    fence_async_shared()
    barrier()
    if begin < end:
        tma_store(states_desc, [n, head, (chunks - 1 - begin) * BV, 0], s_buf)
        if HALF:
            for tile in gl.static_range(BK // 64):
                place = (tile * sequences * heads + number) * chunks + chunks - 1 - begin
                gl.store(powers + place.to(gl.int64), back)

    steps_s = gl.arange(0, STEPS, layout=gl.SliceLayout(1, SCORES))
    steps_t = gl.arange(0, STEPS, layout=gl.SliceLayout(0, SCORES))
    causal = steps_s[:, None] <= steps_t[None, :]
    no_scores = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    no_keys = gl.full([STEPS, BK], 0.0, gl.float32, OUT_K)
    no_values = gl.full([STEPS, BV], 0.0, gl.float32, OUT_V)
    stage = 0
    phase = 0
    for i in range(begin, end * TURNS):
        chunk = chunks - 1 - i
        mine = head
        if TURNS > 1:
            chunk = chunks - 1 - i % chunks
            mine = head + i // chunks
            number = n * heads + mine
        q_buf = q_bufs.index(stage)
        k_buf = k_bufs.index(stage)
        v_buf = v_bufs.index(stage)
        do_buf = do_bufs.index(stage)
        sums = sums_bufs.index(stage)
        mbarrier.wait(full.index(stage), phase)
        if COLS > 1:
            mbarrier.wait(k_full.index(stage), phase)
        alike = warpgroup_mma(k_buf, q_buf.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if COLS > 1:
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.wait(do_full.index(stage), phase)
        asked = warpgroup_mma(v_buf, do_buf.permute((1, 0)), no_scores, use_acc=False, is_async=True)

        # what needs no product
        if COLS > 1:
            mbarrier.wait(sums_full.index(stage), phase)
            if WEIGHTED:
                mbarrier.wait(weights_full.index(stage), phase)
        b_s = sums.load(gl.SliceLayout(1, SCORES))
        b_t = sums.load(gl.SliceLayout(0, SCORES))
        if COLS > 1:  # in a layout of which every warp has all
            ends = gl.arange(0, STEPS, layout=EVERY) == STEPS - 1
            last = gl.sum(gl.where(ends, sums.load(EVERY), 0.0), axis=0)
        else:
            last = gl.sum(gl.where(steps_t == STEPS - 1, b_t, 0.0), axis=0)
        share = gl.where(causal, gl.exp2(b_t[None, :] - b_s[:, None]), 0.0)
        if not HALF:
            acc = acc * gl.exp2(last)
        # ptxas moves products of scores above a wait that leaves others on their way, and waits for all of them there
        alike, asked = warpgroup_mma_wait(0, deps=[alike, asked])
        dk = warpgroup_mma(v_buf, s_buf, no_keys, use_acc=False, is_async=True)
        dv = warpgroup_mma(k_buf, s_buf.permute((1, 0)), no_values, use_acc=False, is_async=True)
        alike = alike * share
        pairs = alike * asked
        if HALF:
            asked = asked * share
        else:
            p_k = (asked * share).to(dtype)
            p_v = alike.to(dtype)
        if COLS > 1 and not HALF:
            p_k_buf.store(p_k)
            p_v_buf.store(p_v)
            fence_async_shared()
        to = (number * chunks + chunk).to(gl.int64) * STEPS
        if COLS > 1:
            _store_parts(passed + COLS * to, pairs, scale, COLS)
        else:
            gl.store(passed + to + steps_s, gl.sum(pairs, axis=1) * scale)
        if WEIGHTED:
            pairs = pairs * weights_bufs.index(stage).load(gl.SliceLayout(1, SCORES))[:, None]
        quarters = gl.sum(pairs.reshape((4, STEPS // 4, STEPS)), axis=1)  # the rows of a warp: no barriers
        ROWS: gl.constexpr = gl.SliceLayout(1, quarters.type.layout)
        COLUMNS: gl.constexpr = gl.SliceLayout(0, quarters.type.layout)
        at = gl.arange(0, 4, layout=ROWS)[:, None] * STEPS + gl.arange(0, STEPS, layout=COLUMNS)[None, :]
        gl.store(got + 4 * to + at, quarters * scale)
        if HALF:  # not before pairs are summed up: registers
            of_k = _powers_of_rows(asked)
            of_v = _powers_of_rows(alike)
            p_k = (asked * of_k[:, None]).to(dtype)
            p_v = (alike * of_v[:, None]).to(dtype)
            of_k = gl.convert_layout(of_k, gl.SliceLayout(1, OUT_K))
            of_v = gl.convert_layout(of_v, gl.SliceLayout(1, OUT_V))
            if COLS > 1:
                p_k_buf.store(p_k)
                p_v_buf.store(p_v)
                fence_async_shared()
        asks, shrunk = _scaled_keys(do_buf, sums, sums, last, LEFT_K, True, False, True, HALF=HALF)
        if HALF:
            acc = acc * (gl.exp2(last) * (unit * shrunk))
            unit = _inverse(shrunk)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        if HALF:
            dk = dk * (gl.exp2(last - sums.load(gl.SliceLayout(1, OUT_K))) * back)[:, None]
            dv = dv * (gl.exp2(last - sums.load(gl.SliceLayout(1, OUT_V))) * back * of_v)[:, None]
        else:
            dk = dk * gl.exp2(last - sums.load(gl.SliceLayout(1, OUT_K)))[:, None]
            dv = dv * gl.exp2(last - sums.load(gl.SliceLayout(1, OUT_V)))[:, None]
        into = dk * k_buf.load(OUT_K).to(gl.float32)
        if HALF:
            dk = dk * of_k[:, None]
        if COLS > 1:
            _store_parts(out_of + COLS * to, into, scale, COLS)
            barrier()  # P is there
            dk = warpgroup_mma(p_k_buf, q_buf, dk, is_async=True)
            dv = warpgroup_mma(p_v_buf, do_buf, dv, is_async=True)
        else:
            rows = gl.arange(0, STEPS, layout=gl.SliceLayout(1, OUT_K))
            gl.store(out_of + to + rows, gl.sum(into, axis=1) * scale)
            dk = warpgroup_mma(gl.convert_layout(p_k, LEFT_K), q_buf, dk, is_async=True)
            dv = warpgroup_mma(gl.convert_layout(p_v, LEFT_V), do_buf, dv, is_async=True)
        acc = warpgroup_mma(asks, q_buf, acc, is_async=True)
        tma.store_wait(0)
        barrier()  # D was read by all, and the last dk, dv and D have left
        dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
        if HALF:
            dk = dk * _inverse(of_k)[:, None]
            dv = dv * _inverse(of_v)[:, None]
        if WEIGHTED:
            weights = weights_bufs.index(stage)
            dk = dk * weights.load(gl.SliceLayout(1, OUT_K))[:, None]
            dv = dv * weights.load(gl.SliceLayout(1, OUT_V))[:, None]
        if not UNIT:
            dk = dk * scale
            dv = dv * scale
        dk_buf.store(dk.to(dk_desc.dtype))
        dv_buf.store(dv.to(dtype))
        acc = warpgroup_mma_wait(0, deps=[acc])
        if TURNS > 1:
            if chunk == 0:
                places, inside = _state_places(number, 0, V, _opaque(K), BV, BK, OUT_K)
                gl.store(final + places, acc * unit if HALF else acc, mask=inside)
            acc = gl.where(chunk == 0, 0.0, acc)  # the next head begins
        if HALF:
            back = _store_scaled(s_buf, acc) * unit
        else:
            s_buf.store(acc.to(dtype))
        fence_async_shared()
        barrier()
        if TURNS > 1:
            if i < chunks:
                tma_store(dk_desc, [n, head // TURNS, chunk * STEPS, 0], dk_buf)
            else:
                tma_add(dk_desc, [n, head // TURNS, chunk * STEPS, 0], dk_buf)
        else:
            tma_store(dk_desc, [n, head, chunk * STEPS, 0], dk_buf)
        tma_store(dv_desc, [n, mine, chunk * STEPS, 0], dv_buf)
        if TURNS > 1:
            if i + 1 < end * TURNS:
                after = chunks - 1 - (i + 1) % chunks
                tma_store(states_desc, [n, head + (i + 1) // chunks, after * BV, 0], s_buf)
                if HALF:
                    for tile in gl.static_range(BK // 64):
                        place = ((tile * sequences + n) * heads + head + (i + 1) // chunks) * chunks + after
                        gl.store(powers + place.to(gl.int64), back)
            if chunk == 0:
                tma_written()  # before anything is added to it
            if i + STAGES < end * TURNS:
                _load_turn(descs, bufs, bars, stage, n, head, i + STAGES, chunks, heads, group, WEIGHTED, EACH)
        else:
            if i + 1 < end:
                tma_store(states_desc, [n, head, (chunk - 1) * BV, 0], s_buf)
                if HALF:
                    for tile in gl.static_range(BK // 64):
                        place = (tile * sequences * heads + number) * chunks + chunk - 1
                        gl.store(powers + place.to(gl.int64), back)
            if i + STAGES < end:
                _load(descs, bufs, bars, stage, n, head, head_q, chunk - STAGES, line, WEIGHTED, EACH)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if TURNS == 1 and position == segments - 1:
        places, inside = _state_places(number, 0, V, _opaque(K), BV, BK, OUT_K)
        gl.store(final + places, acc * unit if HALF else acc, mask=inside)
    tma.store_wait(0)
