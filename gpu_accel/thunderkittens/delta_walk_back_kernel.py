"""The walk of the delta rule's gradients for Hopper (sm_90a) in Gluon: dU and dS, from the last chunk to the first.

As in `delta_walk_kernel` one program has a sequence, a head and 64 or 128 columns of v, everything is transposed, and
the state is a left operand in the registers that it was summed up in:

    dU' = exp(b_last - b) (dS' k') + do' P        dS' = exp(b_last) dS' + (scale exp(b) do') q - dU' decay

What P, decay and the sums b are is said there. do' P and do' q wait for no state. What leaves a chunk goes to memory as
one bfloat16 number, or with LOW as two, through shared memory, where it is turned.
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

from gpu_accel.gluon_compat import barrier, tma_store
from gpu_accel.thunderkittens.delta_walk_kernel import _first_state, _load_chunk, _place, _tiles_of_chunks
from gpu_accel.thunderkittens.gla_walk_kernel import _turned_places
from gpu_accel.thunderkittens.walk_kernel import STEPS, _opaque, ready_barriers


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "tiles", "K", "V", "scale", "has_final", "nothing_before"])
def delta_walk_back_kernel(
    w_desc, q_desc, k_desc, p_desc, do_desc, sums_desc, du_desc, dstates_desc, low_desc, dfinal, dinitial,
    chunks, heads, group, tiles, K, V, scale, has_final, nothing_before,
    BK: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, LOW: gl.constexpr,
):  # fmt: skip
    """du, dstates and what 16 bits leave of them through their descriptors, dinitial (sequences, heads, K, V) float32.

    dfinal: as dinitial, or has_final is 0. nothing_before is 0.
    """
    dtype: gl.constexpr = k_desc.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [COLS // 16, 1], [16, BK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [COLS // 16, 1], [16, STEPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    BY_STEP: gl.constexpr = gl.SliceLayout(0, OUT)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, COLS], dtype)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, COLS], dtype)

    w_bufs, q_bufs, k_bufs, p_bufs, do_bufs = _tiles_of_chunks(dtype, BK, COLS, STAGES)
    du_buf = gl.allocate_shared_memory(dtype, [STEPS, COLS], VALUES)
    s_buf = gl.allocate_shared_memory(dtype, [BK, COLS], STATES)
    low_buf = s_buf
    if LOW:
        low_buf = gl.allocate_shared_memory(dtype, [BK, COLS], STATES)
    sums_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, STEPS], gl.NVMMASharedLayout(0, 32, 1))
    full = ready_barriers(STAGES)

    n, head, head_q, col, number, line = _place(chunks, heads, group, tiles, COLS)
    descs = (w_desc, q_desc, k_desc, p_desc, do_desc, sums_desc)
    bufs = (w_bufs, q_bufs, k_bufs, p_bufs, do_bufs, sums_bufs)
    for i in gl.static_range(STAGES):
        if i < chunks:
            _load_chunk(descs, bufs, full, i, n, head, head_q, chunks - 1 - i, line, col, GATED)

    acc = _first_state(dfinal, dinitial, has_final, nothing_before, number, col, K, V, BK, STATE, COLS)
    nothing = gl.full([COLS, STEPS], 0.0, gl.float32, OUT)
    stage = 0
    phase = 0
    for i in range(0, chunks):
        chunk = chunks - 1 - i
        rounded = acc.to(dtype)
        mbarrier.wait(full.index(stage), phase)
        do_buf = do_bufs.index(stage).permute((1, 0))
        k_buf = k_bufs.index(stage).permute((1, 0))
        grad = warpgroup_mma(do_buf, p_bufs.index(stage), nothing, use_acc=False, is_async=True)
        passed = warpgroup_mma(gl.convert_layout(rounded, LEFT), k_buf, nothing, use_acc=False, is_async=True)
        tma.store_wait(0)
        barrier()  # what the chunk before left has gone
        s_buf.permute((1, 0)).store(rounded)
        if LOW:
            low_buf.permute((1, 0)).store((acc - rounded.to(gl.float32)).to(dtype))
        given = do_buf.load(OUT).to(gl.float32) * scale
        if GATED:
            b = sums_bufs.index(stage).load(BY_STEP)
            steps = gl.arange(0, STEPS, layout=BY_STEP)
            last = gl.sum(gl.where(steps == STEPS - 1, b, 0.0), axis=0)
            given = given * gl.exp2(b)[None, :]
            acc = acc * gl.exp2(last)
        left = gl.convert_layout(given.to(dtype), LEFT)
        grad, passed = warpgroup_mma_wait(0, deps=[grad, passed])
        acc = warpgroup_mma(left, q_bufs.index(stage), acc, is_async=True)
        if GATED:
            passed = passed * gl.exp2(last - b)[None, :]
        grad = (grad + passed).to(dtype)
        acc = warpgroup_mma(gl.convert_layout(-grad, LEFT), w_bufs.index(stage), acc, is_async=True)
        du_buf.permute((1, 0)).store(grad)
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        tma_store(du_desc, [n, head, chunk * STEPS, col], du_buf)
        tma_store(dstates_desc, [n * chunks + chunk, head, 0, col], s_buf)
        if LOW:
            tma_store(low_desc, [n * chunks + chunk, head, 0, col], low_buf)
        if i + STAGES < chunks:
            _load_chunk(descs, bufs, full, stage, n, head, head_q, chunk - STAGES, line, col, GATED)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    places, inside = _turned_places(number, col, K, _opaque(V), BK, STATE, COLS)
    gl.store(dinitial + places, acc, mask=inside)
    tma.store_wait(0)
