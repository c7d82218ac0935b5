"""What every segment of a sequence adds to the state of linear attention, for Hopper (sm_90a) in Gluon.

`walk_kernel` cuts sequences into segments where there are too few of them to fill a GPU, and begins each with what
those before it add. This makes that, a program a sequence, head, block of v and segment, with k and v by TMA some
chunks ahead and one product a chunk, of values scaled on their way to registers:

    S = sum over s of exp(b_end - b_s) w_s k_s v_s'         REVERSE: exp(b_s), b from the beginning of the segment

Chunks are taken from the one that `walk_kernel` takes last to the one that it takes first. So what is kept of a step is
known when its chunk is met, sums are never scaled, and a chunk's values are made while the product before is on its
way. And what was read last is what the walk reads first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpu_accel.gluon_compat import barrier, tma_load
from gpu_accel.thunderkittens.chunked_kernels import LOWEST_GATE
from gpu_accel.thunderkittens.walk_kernel import (
    STEPS,
    _inverse,
    _power,
    _sums_of,
    ready_barriers,
)


@gluon.jit
def _load(
    descs, bufs, bar, stage, n, head_v, head_k, chunk, line, col, SUMMED: gl.constexpr, WEIGHTED: gl.constexpr
):  # fmt: skip
    """Ask for a chunk's k, v and gates."""
    k_desc, v_desc, sums_desc, weights_desc = descs
    k_bufs, v_bufs, sums_bufs, weights_bufs = bufs
    full = bar.index(stage)
    row = chunk * STEPS
    VECTORS: gl.constexpr = (SUMMED + WEIGHTED) * STEPS * 4
    mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes + VECTORS)
    tma_load(k_desc, [n, head_k, row, 0], full, k_bufs.index(stage))
    tma_load(v_desc, [n, head_v, row, col], full, v_bufs.index(stage))
    if SUMMED:
        tma_load(sums_desc, [line + row], full, sums_bufs.index(stage))
    if WEIGHTED:
        tma_load(weights_desc, [line + row], full, weights_bufs.index(stage))


@gluon.jit
def _next_full(full, stage, phase, STAGES: gl.constexpr):
    """The stage after this one and its phase, when what was asked for is there."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    mbarrier.wait(full.index(stage), phase)
    return stage, phase


@gluon.jit
def _scaled_values(
    v_buf, sums, weights, after, decay, left, LAYOUT: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    REVERSE: gl.constexpr, STEADY: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """(v' (V, steps) as a left operand in registers, every step times what the segment keeps of it; the power of two
    that HALF has it multiplied with; the sum of gates of this chunk and of those taken before, which are `after`)."""
    values = v_buf.permute((1, 0)).load(LAYOUT)
    STEP: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    power = 1.0
    if GATED:
        kept = _sums_of(sums, decay, left, STEP, STEADY)
        if STEADY:
            last = gl.minimum(left, STEPS).to(gl.float32) * decay
        else:
            last = gl.sum(gl.where(gl.arange(0, STEPS, layout=STEP) == STEPS - 1, kept, 0.0), axis=0)
        factor = gl.exp2(after + kept) if REVERSE else gl.exp2(after + (last - kept))
        after += last
        if WEIGHTED:
            factor = factor * weights.load(STEP)
    else:
        factor = weights.load(STEP)
    if HALF:
        power = _power(gl.max(gl.abs(factor), axis=0), 55, 0)  # down to 2^-72: what many chunks leave of a step
        factor = factor * power
    return (values.to(gl.float32) * factor[None, :]).to(values.dtype), power, after


@gluon.jit(do_not_specialize=["chunks", "heads", "group_k", "group_v", "sequences", "segments", "tiles", "K", "V",
                              "seqlen"])  # fmt: skip
def segments_kernel(
    k_desc, v_desc, sums_desc, weights_desc, gate, local, turned, decays,
    chunks, heads, group_k, group_v, sequences, segments, tiles, K, V, seqlen,
    BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    REVERSE: gl.constexpr, STEADY: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """local (.., sequences, heads, K, V), decays (.., sequences, heads), float32, of as many segments as are launched.

    Descriptors, gates, STEADY and powers of two in float16 as in `walk_kernel`, gate for its x. group_k, group_v: heads
    that share k, or v. TURNED: local goes to `turned`, too, as (.., V, K).
    """
    gl.static_assert(not STEADY or (GATED and not WEIGHTED))
    gl.static_assert(not (WEIGHTED and REVERSE))
    SUMMED: gl.constexpr = GATED and not STEADY
    dtype: gl.constexpr = k_desc.dtype
    MADE: gl.constexpr = GATED or WEIGHTED  # values are, else they are an operand as they lie
    SCALED: gl.constexpr = dtype == gl.float16 and MADE
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_bufs = gl.allocate_shared_memory(
        dtype, [STAGES, STEPS, BK], gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    )
    v_bufs = gl.allocate_shared_memory(
        dtype, [STAGES, STEPS, BV], gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    )
    sums_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    weights_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], VECTOR)
    full = ready_barriers(STAGES)

    program = gl.program_id(0)
    col = program % tiles * BV
    head = program // tiles % heads
    n = program // tiles // heads % sequences
    position = program // tiles // heads // sequences
    head_k = head // group_k
    head_v = head // group_v
    each = gl.cdiv(chunks, segments)
    begin = position * each
    # a segment without chunks takes one beyond the sequence: zeros, times what lies beside the gates and weights
    count = gl.maximum(gl.minimum(chunks, begin + each) - begin, 1)
    final = begin + count - 1
    first = chunks - 1 - final if REVERSE else final
    TURN: gl.constexpr = 1 if REVERSE else -1
    line = (n * heads + head) * chunks * STEPS
    descs = (k_desc, v_desc, sums_desc, weights_desc)
    bufs = (k_bufs, v_bufs, sums_bufs, weights_bufs)
    for i in gl.static_range(STAGES):
        if i < count:
            _load(descs, bufs, full, i, n, head_v, head_k, first + TURN * i, line, col, SUMMED, WEIGHTED)

    acc = gl.full([BV, BK], 0.0, gl.float32, OUT)
    total = 0.0
    decay = 0.0
    unit = 1.0
    if STEADY:
        decay = gl.maximum(gl.load(gate + head), LOWEST_GATE) * 1.4426950408889634
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    if MADE:
        values, power, total = _scaled_values(
            v_bufs.index(0), sums_bufs.index(0), weights_bufs.index(0), total, decay, seqlen - first * STEPS, LEFT,
            GATED, WEIGHTED, REVERSE, STEADY, SCALED,
        )  # fmt: skip
        if SCALED:
            unit = _inverse(power)
        for j in range(0, count - 1):
            acc = warpgroup_mma(values, k_bufs.index(stage), acc, is_async=True)
            done = stage
            stage, phase = _next_full(full, stage, phase, STAGES)
            following, power, total = _scaled_values(
                v_bufs.index(stage), sums_bufs.index(stage), weights_bufs.index(stage), total, decay,
                seqlen - (first + TURN * (j + 1)) * STEPS, LEFT, GATED, WEIGHTED, REVERSE, STEADY, SCALED,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()  # the stage before was read by all
            if j + STAGES < count:
                _load(descs, bufs, full, done, n, head_v, head_k, first + TURN * (j + STAGES), line, col, SUMMED,
                      WEIGHTED)  # fmt: skip
            if SCALED:
                acc = acc * (unit * power)
                unit = _inverse(power)
            values = following
        acc = warpgroup_mma(values, k_bufs.index(stage), acc, is_async=True)
    else:
        acc = warpgroup_mma(v_bufs.index(0).permute((1, 0)), k_bufs.index(0), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # waits for nothing
        for j in range(1, count):
            done = stage
            stage, phase = _next_full(full, stage, phase, STAGES)
            acc = warpgroup_mma(v_bufs.index(stage).permute((1, 0)), k_bufs.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            barrier()  # the stage before was read by all
            if j - 1 + STAGES < count:
                _load(descs, bufs, full, done, n, head_v, head_k, first + TURN * (j - 1 + STAGES), line, col, SUMMED,
                      WEIGHTED)  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    if SCALED:
        acc = acc * unit
    number = (position * sequences + n) * heads + head
    rows = col + gl.arange(0, BV, layout=gl.SliceLayout(1, OUT))
    cols = gl.arange(0, BK, layout=gl.SliceLayout(0, OUT))
    inside = (rows < V)[:, None] & (cols < K)[None, :]
    state = number.to(gl.int64) * (K * V)
    gl.store(local + (state + cols[None, :] * V + rows[:, None]), acc, mask=inside)
    if TURNED:
        gl.store(turned + (state + rows[:, None] * K + cols[None, :]), acc, mask=inside)
    gl.store(decays + number, gl.where(begin < chunks, gl.exp2(gl.to_tensor(total)), 1.0))  # the same from every tile
