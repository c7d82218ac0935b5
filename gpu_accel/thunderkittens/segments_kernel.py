"""What every segment of a sequence adds to the state of linear attention, for Hopper (sm_90a) in Gluon.

`walk_kernel` cuts sequences into segments where there are too few of them to fill a GPU, and begins each with what
those before it add. This makes that: the same walk without queries, a program a sequence, head, block of v and segment,
with k and v by TMA some chunks ahead, keys scaled on their way to registers, one product a chunk:

    S = sum over s of exp(b_end - b_s) w_s k_s v_s'         REVERSE: exp(b_s), from the last chunk to the first
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
    _scaled_keys,
    _state_places,
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


@gluon.jit(do_not_specialize=["chunks", "heads", "group_k", "group_v", "sequences", "segments", "tiles", "K", "V",
                              "seqlen"])  # fmt: skip
def segments_kernel(
    k_desc, v_desc, sums_desc, weights_desc, gate, local, decays,
    chunks, heads, group_k, group_v, sequences, segments, tiles, K, V, seqlen,
    BK: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, WEIGHTED: gl.constexpr,
    REVERSE: gl.constexpr, STEADY: gl.constexpr,
):  # fmt: skip
    """local (.., sequences, heads, K, V), decays (.., sequences, heads), float32, of as many segments as are launched.

    Descriptors, gates, STEADY and powers of two in float16 as in `walk_kernel`, gate for its x. group_k, group_v: heads
    that share k, or v.
    """
    gl.static_assert(not STEADY or (GATED and not WEIGHTED))
    gl.static_assert(not (WEIGHTED and REVERSE))
    SUMMED: gl.constexpr = GATED and not STEADY
    dtype: gl.constexpr = k_desc.dtype
    SCALED: gl.constexpr = dtype == gl.float16 and (GATED or WEIGHTED)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    STEP: gl.constexpr = gl.SliceLayout(0, LEFT)
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
    end = gl.minimum(chunks, begin + each)
    line = (n * heads + head) * chunks * STEPS
    descs = (k_desc, v_desc, sums_desc, weights_desc)
    bufs = (k_bufs, v_bufs, sums_bufs, weights_bufs)
    for i in gl.static_range(STAGES):
        if begin + i < end:
            first = chunks - 1 - begin - i if REVERSE else begin + i
            _load(descs, bufs, full, i, n, head_v, head_k, first, line, col, SUMMED, WEIGHTED)

    acc = gl.full([BK, BV], 0.0, gl.float32, OUT)
    steps = gl.arange(0, STEPS, layout=STEP)
    total = 0.0
    last = 0.0
    decay = 0.0
    left = 0
    unit = 1.0
    if STEADY:
        decay = gl.maximum(gl.load(gate + head), LOWEST_GATE) * 1.4426950408889634
    stage = 0
    phase = 0
    for i in range(begin, end):
        chunk = chunks - 1 - i if REVERSE else i
        mbarrier.wait(full.index(stage), phase)
        if STEADY:
            left = seqlen - chunk * STEPS
            last = gl.minimum(left, STEPS).to(gl.float32) * decay
        elif GATED:
            sums = _sums_of(sums_bufs.index(stage), decay, left, STEP, STEADY)
            last = gl.sum(gl.where(steps == STEPS - 1, sums, 0.0), axis=0)
        if GATED:
            total += last
            if not SCALED:
                acc = acc * gl.exp2(last)
        keys, shrunk = _scaled_keys(k_bufs.index(stage), sums_bufs.index(stage), weights_bufs.index(stage), last, LEFT,
                                    GATED, WEIGHTED, REVERSE, decay, left, STEADY, SCALED)  # fmt: skip
        if SCALED:
            kept = gl.exp2(last) if GATED else 1.0
            acc = acc * (kept * (unit * shrunk))
            unit = _inverse(shrunk)
        acc = warpgroup_mma(keys, v_bufs.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()  # the stage was read by all
        if i + STAGES < end:
            ahead = chunk - STAGES if REVERSE else chunk + STAGES
            _load(descs, bufs, full, stage, n, head_v, head_k, ahead, line, col, SUMMED, WEIGHTED)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    number = (position * sequences + n) * heads + head
    places, inside = _state_places(number, col, K, V, BK, BV, OUT)
    gl.store(local + places, acc * unit if SCALED else acc, mask=inside)
    gl.store(decays + number, gl.exp2(gl.to_tensor(total)))  # the same from every tile
