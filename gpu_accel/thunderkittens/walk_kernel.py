"""The forward of chunked linear attention for Hopper (sm_90a) in Gluon: one program walks the chunks of a sequence.

`chunked_kernels` has the formulas and `fused_kernel` the same walk in plain Triton. A program owns a sequence, a head,
a block of v and a segment, and keeps its state in registers; two programs share an SM, and while one waits for its
chain of products the other one works. For a chunk of 64 steps (4 warps, one warpgroup):

    tensor cores | q k'  q S |                | p v   k' v |                |
    the rest     |  decays   | p, k' scaled   | (waits)    | o and S out    |  next chunk's TMA loads

q, k, v and the gates come by TMA, STAGES chunks ahead on one mbarrier a stage (1 arrival and its bytes). k is read a
second time as a register operand, transposed, so that the gates can scale it on the way; S goes through shared memory
in bfloat16, o through shared memory to TMA. Two barriers of the program a chunk are asked for: before S and o are
written over, and after they are written, when the stage is free too. Triton 3.6 adds one before each load that arrives
on the same mbarrier as the one before it; an mbarrier for every tensor took longer (see the paper's README).

Gates come from `gates_kernel.py` as sums in base 2 inside every chunk, so nothing here is a scan. What lies beyond a
sequence is zero by TMA, with weights of zero and sums that stay.

The gradients of q, k and v are the same recurrence of other tensors (`walk_back.py` puts them together):

    dq_t = scale sum_{s<=t} exp(b_t - b_s) w_s (do_t' v_s) k_s     forwards in time, q k v = do v k
    dk_s = scale sum_{t>=s} exp(b_t - b_s) (v_s' do_t) q_t         REVERSE: from the last chunk to the first, v do q
    dv_s = scale w_s sum_{t>=s} exp(b_t - b_s) (k_s' q_t) do_t     REVERSE, k q do, with weights of what comes out
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
from gpu_accel.thunderkittens.chunked_kernels import LOWEST_GATE
from gpu_accel.thunderkittens.gemm_device import count, partial

STEPS = gl.constexpr(64)  # of a chunk: the M of wgmma


@gluon.jit
def ready_barriers(COUNT: gl.constexpr):
    """COUNT mbarriers, in shared memory and seen by TMA, each of which one arrival completes."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    fence_async_shared()
    return made


@gluon.jit
def _load(
    descs, bufs, bar, stage, n, head_v, head_q, head, chunk, line, col, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    NEAR: gl.constexpr, STATES: gl.constexpr,
):  # fmt: skip
    """Ask for a chunk's q, k, v and gates; NEAR: and for its rows of x, with STATES for its state."""
    q_desc, k_desc, v_desc, sums_desc, weights_desc, states_desc, x_desc = descs
    q_bufs, k_bufs, v_bufs, sums_bufs, weights_bufs, states_bufs, x_bufs = bufs
    full = bar.index(stage)
    row = chunk * STEPS
    VECTORS: gl.constexpr = (GATED + WEIGHTED) * STEPS * 4
    MORE: gl.constexpr = NEAR * (x_desc.block_type.nbytes + STATES * states_desc.block_type.nbytes)
    TILES: gl.constexpr = q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes
    mbarrier.expect(full, TILES + VECTORS + MORE)
    tma_load(q_desc, [n, head_q, row, 0], full, q_bufs.index(stage))
    tma_load(k_desc, [n, head_q, row, 0], full, k_bufs.index(stage))
    tma_load(v_desc, [n, head_v, row, col], full, v_bufs.index(stage))
    if GATED:
        tma_load(sums_desc, [line + row], full, sums_bufs.index(stage))
    if WEIGHTED:
        tma_load(weights_desc, [line + row], full, weights_bufs.index(stage))
    if NEAR:
        tma_load(x_desc, [n, head_v, row, col], full, x_bufs.index(stage))
        if STATES:
            ROWS: gl.constexpr = states_desc.block_type.shape[2]
            tma_load(states_desc, [n, head, chunk * ROWS, col], full, states_bufs.index(stage))


@gluon.jit
def _load_turn(
    descs, bufs, bar, stage, n, head, step, chunks, heads, group, group_v, col, GATED: gl.constexpr,
    WEIGHTED: gl.constexpr,
):  # fmt: skip
    """`_load` for step `step` of a program that walks all chunks of `head`, then those of the next one."""
    mine = head + step // chunks
    _load(descs, bufs, bar, stage, n, mine // group_v, mine // group, mine, step % chunks,
          (n * heads + mine) * chunks * STEPS, col, GATED, WEIGHTED, True, True)  # fmt: skip


@gluon.jit
def _piece_after(i, n, head, chunk, chunks, heads, whole, lowest, first):
    """(sequence, head, chunk) of step i + 1 of a program whose share of all chunks is walked from its last head on.

    whole: the step that ends that head's piece, or -1. The share begins with chunk `first` of head number `lowest`.
    """
    if (chunk == chunks - 1) | (i == whole):
        head -= 1
        if head < 0:
            head = heads - 1
            n -= 1
        chunk = gl.where(n * heads + head == lowest, first, 0)
    else:
        chunk += 1
    return n, head, chunk


@gluon.jit
def _wait_for(flag, LAYOUT: gl.constexpr):
    """Every thread waits until the number at `flag` is not 0, and then sees what was written before it was raised."""
    address = gl.arange(0, 128, layout=LAYOUT).to(gl.int64) * 0 + flag.to(gl.int64)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; again: ld.acquire.gpu.global.u32 $0, [$1]; setp.eq.u32 p, $0, 0; @p bra again; }",
        "=&r,l", [address], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _opaque(x):
    """x, of which the compiler does not know what it is: so that it does not keep what was made from x before."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _state_places(number, col, K, V, BK: gl.constexpr, BV: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a tile of state `number` of K x V lies, and which of it exists."""
    rows = gl.arange(0, BK, layout=gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    return number.to(gl.int64) * (K * V) + rows[:, None] * V + cols[None, :], (rows < K)[:, None] & (cols < V)[None, :]


@gluon.jit
def _sums_of(sums, decay, left, LAYOUT: gl.constexpr, STEADY: gl.constexpr):
    """Gates summed up inside a chunk: as they were made, or STEADY, of one gate for all of its `left` steps."""
    if STEADY:
        made = gl.minimum(gl.arange(0, STEPS, layout=LAYOUT) + 1, left).to(gl.float32) * decay
    else:
        made = sums.load(LAYOUT)
    return made


@gluon.jit
def _power(most, LEAST: gl.constexpr, BELOW: gl.constexpr):
    """The power of two (float32) that takes numbers up to `most` to below 2^BELOW; float16 ends above 2^15.

    LEAST: the exponent, with float32's bias of 127, that smaller ones count as; 15 at least.
    """
    exponent = gl.minimum(gl.maximum(most.to(gl.int32, bitcast=True) >> 23, LEAST), 252 + BELOW)
    return ((253 + BELOW - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _inverse(power):
    """1 / power, of a power of two."""
    return (0x7F000000 - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def _power_of_tile(x):
    """`_power` for all of x; NaN where an infinity is, beside which others would be zeros."""
    most = gl.max(gl.max(gl.abs(x), axis=1), axis=0)
    return _power(most, 15, 15) + most * 0.0


@gluon.jit
def _store_scaled(buf, x):
    """Store x times its `_power_of_tile` as an operand in buf, and return what undoes the power."""
    power = _power_of_tile(x)
    buf.store((x * power).to(buf.dtype))
    return _inverse(power)


@gluon.jit
def _powers_of_rows(x):
    """`_power` for every row of x; below 2^-26 they stay, so that what is added to its products stays finite."""
    return _power(gl.max(gl.abs(x), axis=1), 101, 15)


@gluon.jit
def _scaled_keys(
    k_buf, sums, weights, last, LAYOUT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    REVERSE: gl.constexpr, decay=0.0, left=0, STEADY: gl.constexpr = False, HALF: gl.constexpr = False,
):  # fmt: skip
    """k' (K, steps) as a left operand in registers, every step times what the end of the chunk keeps of it, and 1.

    REVERSE: times what the beginning keeps, without weights. HALF: times a power of two, too, so that no factor is
    above 1, and that power.
    """
    keys = k_buf.permute((1, 0)).load(LAYOUT)
    power = 1.0
    if GATED or WEIGHTED:
        wide = keys.to(gl.float32)
        if GATED:
            factor = _sums_of(sums, decay, left, gl.SliceLayout(0, LAYOUT), STEADY)
            factor = gl.exp2(factor) if REVERSE else gl.exp2(last - factor)
            if WEIGHTED:
                factor = factor * weights.load(gl.SliceLayout(0, LAYOUT))
        else:
            factor = weights.load(gl.SliceLayout(0, LAYOUT))
        if HALF:
            power = _power(gl.max(gl.abs(factor), axis=0), 87, 0)
            factor = factor * power
        keys = (wide * factor[None, :]).to(keys.dtype)
    return keys, power


@gluon.jit
def _rows_of(x, x_b, x_t, x_h, n, head, chunk, col, seqlen, V, BV: gl.constexpr, LAYOUT: gl.constexpr):
    """A chunk of x (sequences, seqlen, heads, V), zeros beyond; strides in units of 8, and V a multiple of 8."""
    rows = chunk * STEPS + gl.arange(0, STEPS, layout=gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, BV, layout=gl.SliceLayout(0, LAYOUT))
    x += n.to(gl.int64) * x_b * 8 + head.to(gl.int64) * x_h * 8
    there = (rows < seqlen)[:, None] & (cols < V // 8 * 8)[None, :]
    return gl.load(x + (rows.to(gl.int64) * x_t * 8)[:, None] + cols[None, :], mask=there, other=0.0)


# what gradients alone need comes last: forwards stay the machine code that they were, byte by byte
@gluon.jit(do_not_specialize=["chunks", "heads", "group", "sequences", "segments", "tiles", "K", "V", "scale", "floor",
                              "x_b", "x_t", "x_h", "seqlen", "group_v"])  # fmt: skip
def walk_kernel(
    q_desc, k_desc, v_desc, o_desc, sums_desc, weights_desc, initial, local, decays, final,
    chunks, heads, group, sequences, segments, tiles, K, V, scale, floor,
    states_desc, x_desc, states, across, x, inner, x_b, x_t, x_h, seqlen, group_v, powers,
    BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_LOCAL: gl.constexpr, NORM: gl.constexpr, REVERSE: gl.constexpr,
    GATES: gl.constexpr, LATE: gl.constexpr, TOTALS: gl.constexpr, NEAR: gl.constexpr, TURNS: gl.constexpr,
    DEAL: gl.constexpr, UNIT: gl.constexpr, STEADY: gl.constexpr,
):  # fmt: skip
    """o through o_desc, and final (sequences, heads, K, V) float32. Descriptors of rank 4: (batch, head, row, column).

    initial: as final. local (segments - 1, sequences, heads, K, V) and decays (segments - 1, sequences, heads) float32:
    what every segment but the last adds to the state, and what it leaves of the one before it.
    NORM: o is divided by the sum of its weights, scale q_t' (k_1 + ... + k_t), plus `floor`. TOTALS: those sums go to
    inner (sequences, heads, seqlen) float32.
    GATES, for their gradients: a REVERSE walk keeps the state that enters every chunk, in states (sequences, chunks *
    BK, heads, V) in the dtype of q. A forward one multiplies it with what is left of its own at the end of the chunk,
    and leaves `final` alone: across (tiles, sequences, heads, chunks, BK) float32 are the sums of rows, times scale.
    LATE: q S is asked for after the scores are there. ptxas moves scores * share above the wait that leaves q S on its
    way, and waits for both there; so it runs beside that product instead. Not taken: nobody timed it.
    NEAR: x and those states come by TMA with q, k and v, through x_desc and states_desc, and not by each thread.
    Both: inner (tiles, sequences, heads, chunks, STEPS) float32 are the products of rows of x (sequences, seqlen, heads
    as v, V; strides in units of 8) with what the state adds to o, without weights.
    TURNS: heads that a forward GATES walk takes one after the other, whose o is one (of heads / TURNS): the copy engine
    adds the later ones to the first, in the dtype of o. Without a first state and segments.
    DEAL: the chunks of all heads, one after the other, are dealt evenly to the programs, of which each has as many as a
    head or more. It begins with its last head, whose state it leaves in local (programs, BK, BV) float32 where another
    one goes on, counted in decays (programs,) int32; its first head comes last, when what the program before it did
    first is there. Counters are zero before and after. K is BK, and V is BV.
    UNIT: scale is 1.
    STEADY: a head has one gate for all steps, in x (heads,) float32, and sums_desc is not read.

    In float16, which ends at 65504 and has few bits left below 2^-14, operands that are made here are multiplied with a
    power of two first, and what comes out with its inverse, which is exact: S and the states of chunks so that the
    largest number of a tile is from 2^14 to 2^15, scores so a row, keys so that their largest factor (of gates and
    weights) in a chunk is from 1/2 to 1, for which acc is S in such units. So nothing overflows that is finite in
    float32, what comes out apart; of an operand 2^-25 of 2^14 is lost where bfloat16 loses 2^-9 of each number, and of
    keys 2^-25, which is what q, k and v are rounded to themselves. With GATES what undoes the powers of states is in
    `powers` (tiles, sequences, heads, chunks) float32. o may be float32 where q is float16.
    """
    gl.static_assert(not (DEAL and (GATES or REVERSE or NORM or HAS_LOCAL or TURNS > 1)))
    gl.static_assert(TURNS == 1 or (GATES and NEAR and not (REVERSE or HAS_INITIAL or HAS_LOCAL)))
    gl.static_assert(not STEADY or (GATED and not (WEIGHTED or GATES or REVERSE or DEAL)))
    SUMMED: gl.constexpr = GATED and not STEADY
    gl.static_assert(not (NORM and (GATED or WEIGHTED or HAS_INITIAL or HAS_LOCAL or REVERSE)))
    dtype: gl.constexpr = q_desc.dtype
    HALF: gl.constexpr = dtype == gl.float16
    SCALED: gl.constexpr = HALF and (GATED or (WEIGHTED and not REVERSE))  # keys are
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)

    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BV], VALUES)
    s_buf = gl.allocate_shared_memory(dtype, [BK, BV], gl.NVMMASharedLayout.get_default_for([BK, BV], dtype))
    RESULTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], o_desc.dtype)
    o_buf = gl.allocate_shared_memory(o_desc.dtype, [STEPS, BV], RESULTS)
    sums_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    weights_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    STATES: gl.constexpr = not REVERSE
    states_bufs = sums_bufs
    x_bufs = sums_bufs
    if NEAR:
        x_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BV], VALUES)
        if STATES:
            STATE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BV], dtype)
            states_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BV], STATE)
    full = ready_barriers(STAGES)

    program = gl.program_id(0)
    col = program % tiles * BV
    rest = program // tiles
    if DEAL:
        units = (sequences * heads * chunks).to(gl.int64)
        low = (units * program // gl.num_programs(0)).to(gl.int32)
        high = (units * (program + 1) // gl.num_programs(0)).to(gl.int32)
        whole = high % chunks - 1
        lowest, first = low // chunks, low % chunks
        number = gl.where(whole < 0, high // chunks - 1, high // chunks)
        head, n, position = number % heads, number // heads, 0
    elif TURNS > 1:
        head = rest % (heads // TURNS) * TURNS
        n = rest // (heads // TURNS)
        position = 0
    else:
        head = rest % heads
        n = rest // heads % sequences
        position = rest // heads // sequences
    head_q = head // group
    head_v = head // group_v if GATES or REVERSE else head
    each = gl.cdiv(chunks, segments)
    begin = position * each
    end = gl.minimum(chunks, begin + each)
    if DEAL:
        begin, end = 0, high - low
        n_ahead, head_ahead, chunk_ahead = n, head, 0
    number = n * heads + head
    line = number * chunks * STEPS
    descs = (q_desc, k_desc, v_desc, sums_desc, weights_desc, states_desc, x_desc)
    bufs = (q_bufs, k_bufs, v_bufs, sums_bufs, weights_bufs, states_bufs, x_bufs)
    for i in gl.static_range(STAGES):
        if DEAL:
            if i < end:
                _load(descs, bufs, full, i, n_ahead, head_ahead, head_ahead // group, head_ahead, chunk_ahead,
                      (n_ahead * heads + head_ahead) * chunks * STEPS, col, GATED, WEIGHTED, False, False)  # fmt: skip
            n_ahead, head_ahead, chunk_ahead = _piece_after(
                i, n_ahead, head_ahead, chunk_ahead, chunks, heads, whole, lowest, first
            )
        elif TURNS > 1:
            if i < TURNS * chunks:
                _load_turn(descs, bufs, full, i, n, head, i, chunks, heads, group, group_v, col, GATED, WEIGHTED)
        elif begin + i < end:
            first = chunks - 1 - begin - i if REVERSE else begin + i
            _load(descs, bufs, full, i, n, head_v, head_q, head, first, line, col, SUMMED, WEIGHTED, NEAR, STATES)

    acc = gl.full([BK, BV], 0.0, gl.float32, OUT)
    if HAS_INITIAL:
        places, inside = _state_places(number, col, K, V, BK, BV, OUT)
        acc = gl.load(initial + places, mask=inside, other=0.0)
    if HAS_LOCAL:
        for before in range(0, position):
            one = before * sequences * heads + number
            places, inside = _state_places(one, col, K, V, BK, BV, OUT)
            acc = acc * gl.load(decays + one)
            acc += gl.load(local + places, mask=inside, other=0.0)
    unit = 1.0
    back = 1.0
    if HALF:
        back = _store_scaled(s_buf, acc)
    else:
        s_buf.store(acc.to(dtype))
    if NORM:
        z_buf = gl.allocate_shared_memory(gl.float32, [BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        z = gl.full([BK], 0.0, gl.float32, gl.SliceLayout(1, LEFT))  # the sum of the keys so far
        z_buf.store(z)
    fence_async_shared()
    if GATES and REVERSE:
        barrier()
        if begin < end:
            tma_store(states_desc, [n, head, (chunks - 1 - begin) * BK, col], s_buf)
            if HALF:
                at = ((program % tiles * sequences * heads + number) * chunks + chunks - 1 - begin).to(gl.int64)
                gl.store(powers + at, back)

    steps_t = gl.arange(0, STEPS, layout=gl.SliceLayout(1, SCORES))
    steps_s = gl.arange(0, STEPS, layout=gl.SliceLayout(0, SCORES))
    causal = steps_t[:, None] <= steps_s[None, :] if REVERSE else steps_t[:, None] >= steps_s[None, :]
    no_scores = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    no_out = gl.full([STEPS, BV], 0.0, gl.float32, OUT)
    stage = 0
    phase = 0
    last = 0.0
    if DEAL:
        chunk_now = 0
    decay = 0.0
    left = 0
    if STEADY:
        decay = gl.maximum(gl.load(x + head), LOWEST_GATE) * 1.4426950408889634
    for i in range(begin, end * TURNS):
        chunk = chunks - 1 - i if REVERSE else i
        if DEAL:
            chunk = chunk_now
        if TURNS > 1:
            chunk = i % chunks
            number = n * heads + head + i // chunks
        # asked for early, used after the first products: no registers for x beside it yet
        if GATES and not REVERSE and not NEAR:
            above = ((n.to(gl.int64) * chunks + chunk) * BK + gl.arange(0, BK, layout=gl.SliceLayout(1, OUT))) * heads
            their = _opaque(V) // 8 * 8
            cols = col + gl.arange(0, BV, layout=gl.SliceLayout(0, OUT))
            behind = gl.load(states + ((above + head) * their)[:, None] + cols[None, :],
                             mask=(cols < their)[None, :], other=0.0)  # fmt: skip
        if GATES and REVERSE and not NEAR:
            x_tile = _rows_of(x, x_b, x_t, x_h, n, head_v, chunk, col, seqlen, _opaque(V), BV, OUT)
        mbarrier.wait(full.index(stage), phase)
        k_buf = k_bufs.index(stage)
        v_buf = v_bufs.index(stage)
        scores = warpgroup_mma(q_bufs.index(stage), k_buf.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if not LATE:
            out = warpgroup_mma(q_bufs.index(stage), s_buf, no_out, use_acc=False, is_async=True)

        # what needs no product
        if GATED:
            sums = sums_bufs.index(stage)
            if STEADY:
                left = seqlen - chunk * STEPS
            b_t = _sums_of(sums, decay, left, gl.SliceLayout(1, SCORES), STEADY)
            b_s = _sums_of(sums, decay, left, gl.SliceLayout(0, SCORES), STEADY)
            last = gl.sum(gl.where(steps_s == STEPS - 1, b_s, 0.0), axis=0)
            if STEADY:
                last = gl.minimum(left, STEPS).to(gl.float32) * decay
            between = b_s[None, :] - b_t[:, None] if REVERSE else b_t[:, None] - b_s[None, :]
            share = gl.where(causal, gl.exp2(between), 0.0)
            if WEIGHTED and not REVERSE:
                share = share * weights_bufs.index(stage).load(gl.SliceLayout(0, SCORES))[None, :]
            if not HALF:
                acc = acc * gl.exp2(last)
        elif WEIGHTED and not REVERSE:
            share = gl.where(causal, weights_bufs.index(stage).load(gl.SliceLayout(0, SCORES))[None, :], 0.0)
        if GATES and not REVERSE:
            to = ((program % tiles * sequences * heads + number) * chunks + chunk).to(gl.int64) * BK
            rows = gl.arange(0, BK, layout=gl.SliceLayout(1, OUT))
            if NEAR:
                behind = states_bufs.index(stage).load(OUT)
            if HALF:
                theirs = gl.load(powers + to // BK)
                crossing = gl.sum(acc * behind.to(gl.float32), axis=1)
                gl.store(across + to + rows, crossing * (gl.exp2(last) * unit * theirs * scale))
            else:
                gl.store(across + to + rows, gl.sum(acc * behind.to(gl.float32), axis=1) * scale)
            if not NEAR:
                x_tile = _rows_of(x, x_b, x_t, x_h, n, head_v, chunk, col, seqlen, _opaque(V), BV, OUT)
        if LATE:
            scores = warpgroup_mma_wait(0, deps=[scores])
            out = warpgroup_mma(q_bufs.index(stage), s_buf, no_out, use_acc=False, is_async=True)
        else:
            scores = warpgroup_mma_wait(1, deps=[scores])
        if HALF:
            p = scores * share if SCALED else gl.where(causal, scores, 0.0)
            rowwise = _powers_of_rows(p)
            p = (p * rowwise[:, None]).to(dtype)
            rowwise = gl.convert_layout(rowwise, gl.SliceLayout(1, OUT))
        elif GATED or (WEIGHTED and not REVERSE):
            p = (scores * share).to(dtype)
        else:
            p = gl.where(causal, scores, 0.0).to(dtype)
        # scaled under the first products keys took 4 us longer of 44, and spilled at K = 128
        keys, shrunk = _scaled_keys(k_buf, sums_bufs.index(stage), weights_bufs.index(stage), last, LEFT, GATED,
                                    WEIGHTED and not REVERSE, REVERSE, decay, left, STEADY, HALF)  # fmt: skip
        if SCALED:
            kept = gl.exp2(last) if GATED else 1.0
            acc = acc * (kept * (unit * shrunk))
            unit = _inverse(shrunk)
        if NORM:
            before = q_bufs.index(stage).load(LEFT).to(gl.float32) * z_buf.load(gl.SliceLayout(0, LEFT))[None, :]
            total = gl.convert_layout(gl.sum(before, axis=1), gl.SliceLayout(1, OUT))
            total += gl.convert_layout(gl.sum(gl.where(causal, scores, 0.0), axis=1), gl.SliceLayout(1, OUT))
            z += gl.sum(keys.to(gl.float32), axis=1)
        out = warpgroup_mma_wait(0, deps=[out])
        if GATED:
            b_out = _sums_of(sums_bufs.index(stage), decay, left, gl.SliceLayout(1, OUT), STEADY)
            b_out = last - b_out if REVERSE else b_out
            if HALF:  # noqa: SIM108
                out = out * (gl.exp2(b_out) * back * rowwise)[:, None]
            else:
                out = out * gl.exp2(b_out)[:, None]
        elif HALF:
            out = out * (back * rowwise)[:, None]
        if GATES:
            to = ((program % tiles * sequences * heads + number) * chunks + chunk).to(gl.int64) * STEPS
            rows = gl.arange(0, STEPS, layout=gl.SliceLayout(1, OUT))
            if NEAR:
                x_tile = x_bufs.index(stage).load(OUT)
            if HALF:
                gl.store(inner + to + rows, gl.sum(out * x_tile.to(gl.float32), axis=1) * (_inverse(rowwise) * scale))
            else:
                gl.store(inner + to + rows, gl.sum(out * x_tile.to(gl.float32), axis=1) * scale)
        out = warpgroup_mma(gl.convert_layout(p, LEFT), v_buf, out, is_async=True)
        acc = warpgroup_mma(keys, v_buf, acc, is_async=True)
        tma.store_wait(0)
        barrier()  # S was read by all, and the last o has left
        out = warpgroup_mma_wait(1, deps=[out])
        if HALF:
            out = out * _inverse(rowwise)[:, None]
        if NORM:
            if TOTALS:
                at = chunk * STEPS + gl.arange(0, STEPS, layout=gl.SliceLayout(1, OUT))
                gl.store(inner + number.to(gl.int64) * seqlen + at, total * scale, mask=(at < seqlen) & (col == 0))
            out = out / (total * scale + floor)[:, None]
            z_buf.store(z)
        if WEIGHTED and REVERSE:
            out = out * weights_bufs.index(stage).load(gl.SliceLayout(1, OUT))[:, None]
        if not UNIT:
            out = out * scale
        o_buf.store(out.to(o_desc.dtype))
        acc = warpgroup_mma_wait(0, deps=[acc])
        if TURNS > 1:
            acc = gl.where(chunk == chunks - 1, 0.0, acc)  # the next head begins
        if DEAL:
            n_now, head_now = n, head
            n, head, chunk_now = _piece_after(i, n, head, chunk, chunks, heads, whole, lowest, first)
            if chunk == chunks - 1:
                gl.store(partial(final, number, BK, BV, OUT), acc * unit if HALF else acc)
            if i == whole:
                gl.store(partial(local, _opaque(program), BK, BV, OUT), acc * unit if HALF else acc)
                count(decays + program, 8)
            if (chunk == chunks - 1) | (i == whole):
                number = n * heads + head
                acc = gl.full([BK, BV], 0.0, gl.float32, OUT)
                if HALF:
                    unit = gl.to_tensor(1.0)
                if i + 1 < end:
                    if chunk_now > 0:
                        _wait_for(decays + (program - 1), THREADS)
                        acc = gl.load(partial(local, _opaque(program) - 1, BK, BV, OUT))
                    elif HAS_INITIAL:
                        acc = gl.load(partial(initial, _opaque(number), BK, BV, OUT))
        if HALF:
            back = _store_scaled(s_buf, acc) * unit
        else:
            s_buf.store(acc.to(dtype))
        fence_async_shared()
        barrier()
        if TURNS > 1:
            if i < chunks:
                tma_store(o_desc, [n, head // TURNS, chunk * STEPS, col], o_buf)
            else:
                tma_add(o_desc, [n, head // TURNS, chunk * STEPS, col], o_buf)
            if chunk == chunks - 1:
                tma_written()  # before anything is added to it
            if i + STAGES < end * TURNS:
                _load_turn(descs, bufs, full, stage, n, head, i + STAGES, chunks, heads, group, group_v, col, GATED,
                           WEIGHTED)  # fmt: skip
        elif DEAL:
            tma_store(o_desc, [n_now, head_now, chunk * STEPS, col], o_buf)
            if i + STAGES < end:
                _load(descs, bufs, full, stage, n_ahead, head_ahead, head_ahead // group, head_ahead, chunk_ahead,
                      (n_ahead * heads + head_ahead) * chunks * STEPS, col, GATED, WEIGHTED, False, False)  # fmt: skip
            n_ahead, head_ahead, chunk_ahead = _piece_after(
                i + STAGES, n_ahead, head_ahead, chunk_ahead, chunks, heads, whole, lowest, first
            )
        else:
            tma_store(o_desc, [n, head, chunk * STEPS, col], o_buf)
        if GATES and REVERSE:  # noqa: SIM102
            if i + 1 < end:
                tma_store(states_desc, [n, head, (chunk - 1) * BK, col], s_buf)
                if HALF:
                    at = ((program % tiles * sequences * heads + number) * chunks + chunk - 1).to(gl.int64)
                    gl.store(powers + at, back)
        if not DEAL and TURNS == 1 and i + STAGES < end:
            ahead = chunk - STAGES if REVERSE else chunk + STAGES
            _load(descs, bufs, full, stage, n, head_v, head_q, head, ahead, line, col, SUMMED, WEIGHTED, NEAR, STATES)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if DEAL:
        if first > 0:
            gl.store(decays + (program - 1), 0)
    elif position == segments - 1 and (REVERSE or not GATES):
        places, inside = _state_places(number, col, K, _opaque(V), BK, BV, OUT)
        gl.store(final + places, acc * unit if HALF else acc, mask=inside)
    tma.store_wait(0)
