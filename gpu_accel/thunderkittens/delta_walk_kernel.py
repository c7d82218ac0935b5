"""The walk of the delta rule's forward for Hopper (sm_90a) in Gluon: U, o and the state, chunk by chunk.

`delta_kernels` has the formulas, and `delta_solve_kernel` makes decay, fresh and the pairs P of a chunk beforehand. One
program has a sequence, a head and 64 columns of v with 4 warps, or 128 with 8. Everything is transposed, v by k and v
by step, so that all that is made on the way is a left operand in the registers that it was made in, S' and U' alike,
and nothing of it goes through shared memory:

    U' = fresh' - S' decay'        o' = scale exp(b) (S' q') + U' P'
    S' = exp(b_last) S' + (exp(b_last - b) U') k

decay, q, k, P, fresh and the gates come by TMA, STAGES chunks ahead on one mbarrier a stage (1 arrival and its bytes),
o leaves through shared memory. What lies beyond a sequence is zero by TMA, with sums that stay.
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
from gpu_accel.thunderkittens.gla_walk_kernel import _turned_places
from gpu_accel.thunderkittens.walk_kernel import STEPS, _opaque, ready_barriers


@gluon.jit
def _load_chunk(descs, bufs, bar, stage, n, head, head_q, chunk, line, col, GATED: gl.constexpr):
    """Ask for what a chunk needs."""
    w_desc, q_desc, k_desc, p_desc, u_desc, sums_desc = descs
    w_bufs, q_bufs, k_bufs, p_bufs, u_bufs, sums_bufs = bufs
    full = bar.index(stage)
    row = chunk * STEPS
    TILES: gl.constexpr = 3 * k_desc.block_type.nbytes + p_desc.block_type.nbytes + u_desc.block_type.nbytes
    mbarrier.expect(full, TILES + GATED * STEPS * 4)
    tma_load(w_desc, [n, head, row, 0], full, w_bufs.index(stage))
    tma_load(u_desc, [n, head, row, col], full, u_bufs.index(stage))
    tma_load(q_desc, [n, head_q, row, 0], full, q_bufs.index(stage))
    tma_load(p_desc, [n, head, row, 0], full, p_bufs.index(stage))
    tma_load(k_desc, [n, head_q, row, 0], full, k_bufs.index(stage))
    if GATED:
        tma_load(sums_desc, [line + row], full, sums_bufs.index(stage))


@gluon.jit
def _tiles_of_chunks(dtype: gl.constexpr, BK: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of STAGES chunks: decay, q, k (steps, BK), pairs (steps, steps), and (steps, COLS) of v."""
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, COLS], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, STEPS], dtype)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BK], KEYS)
    p_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, STEPS], SQUARE)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, COLS], VALUES)
    return w_bufs, q_bufs, k_bufs, p_bufs, v_bufs


@gluon.jit
def _place(chunks, heads, group, tiles, COLS: gl.constexpr):
    """(sequence, head, head of q, column of v, number of the state, first step among all) of a program."""
    program = gl.program_id(0)
    col = program % tiles * COLS
    head = program // tiles % heads
    n = program // tiles // heads
    number = n * heads + head
    return n, head, head // group, col, number, number * chunks * STEPS


@gluon.jit
def _first_state(
    given, last, is_given, nothing_before, number, col, K, V, BK: gl.constexpr, STATE: gl.constexpr, COLS: gl.constexpr
):
    """What `given` has, or zeros, transposed.

    Asked at run time, and with a loop that does nothing: of a state that begins with zeros that it knows, or with
    nothing but this load, ptxas 12.8 makes no left operand, but crashes.
    """
    places, inside = _turned_places(number, col, K, V, BK, STATE, COLS)
    acc = gl.load(given + places, mask=inside & (is_given != 0), other=0.0)
    for _ in range(0, nothing_before):
        acc = acc + gl.load(last + places, mask=inside, other=0.0)
    return acc


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "tiles", "K", "V", "scale", "has_initial", "nothing_before"])
def delta_walk_kernel(
    w_desc, q_desc, k_desc, p_desc, u_desc, sums_desc, o_desc, initial, final,
    chunks, heads, group, tiles, K, V, scale, has_initial, nothing_before,
    BK: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """o through o_desc, and final (sequences, heads, K, V) float32. w and u: decay and fresh of `delta_solve_kernel`.

    initial: as final, or has_initial is 0. nothing_before is 0.
    """
    dtype: gl.constexpr = k_desc.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [COLS // 16, 1], [16, BK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [COLS // 16, 1], [16, STEPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    BY_STEP: gl.constexpr = gl.SliceLayout(0, OUT)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, COLS], dtype)

    w_bufs, q_bufs, k_bufs, p_bufs, u_bufs = _tiles_of_chunks(dtype, BK, COLS, STAGES)
    o_buf = gl.allocate_shared_memory(dtype, [STEPS, COLS], VALUES)
    sums_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], gl.NVMMASharedLayout(0, 32, 1))
    full = ready_barriers(STAGES)

    n, head, head_q, col, number, line = _place(chunks, heads, group, tiles, COLS)
    descs = (w_desc, q_desc, k_desc, p_desc, u_desc, sums_desc)
    bufs = (w_bufs, q_bufs, k_bufs, p_bufs, u_bufs, sums_bufs)
    for i in gl.static_range(STAGES):
        if i < chunks:
            _load_chunk(descs, bufs, full, i, n, head, head_q, i, line, col, GATED)

    acc = _first_state(initial, final, has_initial, nothing_before, number, col, K, V, BK, STATE, COLS)
    nothing = gl.full([COLS, STEPS], 0.0, gl.float32, OUT)
    stage = 0
    phase = 0
    for chunk in range(0, chunks):
        state = gl.convert_layout(acc.to(dtype), LEFT)
        mbarrier.wait(full.index(stage), phase)
        known = warpgroup_mma(state, w_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        out = warpgroup_mma(state, q_bufs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        fresh = u_bufs.index(stage).permute((1, 0)).load(OUT).to(gl.float32)
        if GATED:
            b = sums_bufs.index(stage).load(BY_STEP)
            steps = gl.arange(0, STEPS, layout=BY_STEP)
            last = gl.sum(gl.where(steps == STEPS - 1, b, 0.0), axis=0)
            acc = acc * gl.exp2(last)
        known = warpgroup_mma_wait(1, deps=[known])
        values = fresh - known
        given = gl.convert_layout(values.to(dtype), LEFT)
        kept = given
        if GATED:
            kept = gl.convert_layout((values * gl.exp2(last - b)[None, :]).to(dtype), LEFT)
        acc = warpgroup_mma(kept, k_bufs.index(stage), acc, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        if GATED:  # noqa: SIM108
            out = out * (gl.exp2(b) * scale)[None, :]
        else:
            out = out * scale
        out = warpgroup_mma(given, p_bufs.index(stage).permute((1, 0)), out, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        tma.store_wait(0)
        barrier()  # the last o has left
        out = warpgroup_mma_wait(0, deps=[out])
        o_buf.permute((1, 0)).store(out.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(o_desc, [n, head, chunk * STEPS, col], o_buf)
        if chunk + STAGES < chunks:
            _load_chunk(descs, bufs, full, stage, n, head, head_q, chunk + STAGES, line, col, GATED)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    places, inside = _turned_places(number, col, K, _opaque(V), BK, STATE, COLS)
    gl.store(final + places, acc, mask=inside)
    tma.store_wait(0)
