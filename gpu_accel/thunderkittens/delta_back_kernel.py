"""The gradients of the delta rule inside every chunk, for Hopper (sm_90a) in Gluon: dq, dk, dv, dbeta and dg at once.

`delta_kernels` has the formulas. What walks the chunks has made U and dU, the states S that enter and the gradients dS
of those that leave. One program (8 warps, one an SM) has a chunk and a head. With D[t, s] = exp(b_t - b_s) for s <= t,

    X = T' dU                    dv = beta X
    W = scale D (do U')          dq = scale exp(b) do S' + W k
    M = -beta D (X U'), s < t    dk = exp(b_last - b) U dS' + W' q - beta exp(b) X S' + (M + M') k

Whoever multiplies lies in shared memory: all of it comes by TMA at once, in the order in which it is used, so what is
late comes while the program works; X, W and M are written there, and gradients leave from where their operands lay.
The two warpgroups have half of the columns of every product each.

Gradients of gates are sums of pairs inside the chunk, of what comes into it and goes out of it, by row, and of what
crosses it, <S, dS>, whose terms cancel: so both states are two bfloat16 numbers, S_low only for that sum.
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
from gpu_accel.thunderkittens.delta_solve_kernel import place_of_chunk
from gpu_accel.thunderkittens.walk_kernel import STEPS, ready_barriers

WARPS = gl.constexpr(8)


@gluon.jit(do_not_specialize=["seqlen", "chunks", "heads", "group", "scale", "K", "V"])
def delta_back_kernel(
    q_desc, k_desc, v_desc, u_desc, do_desc, du_desc, inverse_desc, states_desc, dstates_desc, dlow_desc, sums_desc,
    strengths_desc, dq_desc, dk_desc, dv_desc, dq, dk, low, dbeta, dg, seqlen, chunks, heads, group, scale, K, V,
    BK: gl.constexpr, BV: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dv through their descriptors; dbeta and, with GATED, dg (batch, seqlen, heads) float32.

    SHARED: heads share q and k, `group` of them, so each has a dq and a dk (batch, seqlen, heads, K) float32.
    states, low: S as two numbers (batch * chunks, heads, K, V), dstates and dlow dS; low and dlow are read with GATED.
    """
    dtype: gl.constexpr = k_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, STEPS // 2, 16])
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BK // 2, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BV // 2, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_COL: gl.constexpr = gl.SliceLayout(0, SCORES)
    ROW_K: gl.constexpr = gl.SliceLayout(1, OF_K)
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [WARPS, 1], [1, 0])
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, STEPS], dtype)
    STATES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BV], dtype)
    LINE: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)

    x_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)  # dU, then X
    v_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)  # then dv
    t_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS], SQUARE)
    u_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)
    k_buf = gl.allocate_shared_memory(dtype, [STEPS, BK], KEYS)
    do_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)
    q_buf = gl.allocate_shared_memory(dtype, [STEPS, BK], KEYS)
    s_buf = gl.allocate_shared_memory(dtype, [BK, BV], STATES)
    d_buf = gl.allocate_shared_memory(dtype, [BK, BV], STATES)
    low_buf = d_buf
    if GATED:
        low_buf = gl.allocate_shared_memory(dtype, [BK, BV], STATES)
    w_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS], SQUARE)
    m_buf = gl.allocate_shared_memory(dtype, [STEPS, STEPS], SQUARE)
    sums_buf = gl.allocate_shared_memory(gl.float32, [STEPS], LINE)
    strengths_buf = gl.allocate_shared_memory(gl.float32, [STEPS], LINE)
    full = ready_barriers(5)

    n, head, head_q, row, line = place_of_chunk(chunks, heads, group)
    state = gl.program_id(0) // heads
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    S_BYTES: gl.constexpr = states_desc.block_type.nbytes
    mbarrier.expect(full.index(0), 2 * V_BYTES + inverse_desc.block_type.nbytes + (1 + GATED) * STEPS * 4)
    tma_load(inverse_desc, [n, head, row, 0], full.index(0), t_buf)
    tma_load(du_desc, [n, head, row, 0], full.index(0), x_buf)
    tma_load(v_desc, [n, head, row, 0], full.index(0), v_buf)
    tma_load(strengths_desc, [line], full.index(0), strengths_buf)
    if GATED:
        tma_load(sums_desc, [line], full.index(0), sums_buf)
    mbarrier.expect(full.index(1), V_BYTES + K_BYTES)
    tma_load(u_desc, [n, head, row, 0], full.index(1), u_buf)
    tma_load(k_desc, [n, head_q, row, 0], full.index(1), k_buf)
    mbarrier.expect(full.index(2), V_BYTES + K_BYTES)
    tma_load(do_desc, [n, head, row, 0], full.index(2), do_buf)
    tma_load(q_desc, [n, head_q, row, 0], full.index(2), q_buf)
    mbarrier.expect(full.index(3), S_BYTES)
    tma_load(states_desc, [state, head, 0, 0], full.index(3), s_buf)
    mbarrier.expect(full.index(4), (1 + GATED) * S_BYTES)
    tma_load(dstates_desc, [state, head, 0, 0], full.index(4), d_buf)
    if GATED:
        tma_load(dlow_desc, [state, head, 0, 0], full.index(4), low_buf)
        of_k = gl.arange(0, BK, layout=gl.SliceLayout(1, STATE))
        of_v = gl.arange(0, BV, layout=gl.SliceLayout(0, STATE))
        at = (state.to(gl.int64) * heads + head) * K * (V // 8 * 8) + of_k[:, None] * (V // 8 * 8) + of_v[None, :]
        rest = gl.load(low + at, mask=(of_k < K)[:, None] & (of_v < V // 8 * 8)[None, :], other=0.0)

    # X and dv
    mbarrier.wait(full.index(0), 0)
    nothing_v = gl.full([STEPS, BV], 0.0, gl.float32, OF_V)
    x = warpgroup_mma(t_buf.permute((1, 0)), x_buf, nothing_v, use_acc=False, is_async=True)
    x = warpgroup_mma_wait(0, deps=[x])
    of_beta = gl.convert_layout(gl.sum(x * v_buf.load(OF_V).to(gl.float32), axis=1), BY_ROW)
    barrier()  # all have read dU and v
    x_buf.store(x.to(dtype))
    v_buf.store((x * strengths_buf.load(gl.SliceLayout(1, OF_V))[:, None]).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(dv_desc, [n, head, row, 0], v_buf)

    # pairs of steps: M, then W
    t_of = gl.arange(0, STEPS, layout=BY_ROW)[:, None]
    s_of = gl.arange(0, STEPS, layout=BY_COL)[None, :]
    strength = strengths_buf.load(BY_ROW)
    nothing = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    mbarrier.wait(full.index(1), 0)
    pairs = warpgroup_mma(x_buf, u_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    inner = warpgroup_mma(k_buf, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    pairs, inner = warpgroup_mma_wait(0, deps=[pairs, inner])
    pairs = gl.where(t_of > s_of, -pairs, 0.0)
    if GATED:
        left = gl.exp2(gl.where(t_of >= s_of, sums_buf.load(BY_ROW)[:, None] - sums_buf.load(BY_COL)[None, :],
                                float("-inf")))  # fmt: skip
        pairs = pairs * left
    of_beta += gl.sum(pairs * inner, axis=1)
    pairs = pairs * strength[:, None]
    m_buf.store(pairs.to(dtype))
    if GATED:
        both = pairs * inner
    mbarrier.wait(full.index(2), 0)
    pairs = warpgroup_mma(do_buf, u_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    inner = warpgroup_mma(q_buf, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    pairs, inner = warpgroup_mma_wait(0, deps=[pairs, inner])
    pairs = gl.where(t_of >= s_of, pairs, 0.0) * scale
    if GATED:
        pairs = pairs * left
        both += pairs * inner
        # what a row has of others less what others have of it
        by_col = gl.convert_layout(gl.sum(both, axis=1), BY_COL) - gl.sum(both, axis=0)
    w_buf.store(pairs.to(dtype))
    fence_async_shared()
    barrier()

    # dq, and what dk has by U
    strength_k = strengths_buf.load(ROW_K)
    mbarrier.wait(full.index(3), 0)
    nothing_k = gl.full([STEPS, BK], 0.0, gl.float32, OF_K)
    grad_q = warpgroup_mma(do_buf, s_buf.permute((1, 0)), nothing_k, use_acc=False, is_async=True)
    known = warpgroup_mma(x_buf, s_buf.permute((1, 0)), nothing_k, use_acc=False, is_async=True)
    grad_q, known = warpgroup_mma_wait(0, deps=[grad_q, known])
    grad_q = grad_q * scale
    keys = k_buf.load(OF_K).to(gl.float32)
    if GATED:
        sums = sums_buf.load(ROW_K)
        entered = gl.exp2(sums)[:, None]
        grad_q = grad_q * entered
        known = known * entered
    of_known = gl.sum(known * keys, axis=1)
    known = known * -strength_k[:, None]
    of_beta -= gl.convert_layout(of_known, BY_ROW)
    if GATED:
        inside = gl.sum(grad_q * q_buf.load(OF_K).to(gl.float32), axis=1) - strength_k * of_known
    grad_q = warpgroup_mma(w_buf, k_buf, grad_q, is_async=True)
    known = warpgroup_mma(m_buf, k_buf, known, is_async=True)
    known = warpgroup_mma(m_buf.permute((1, 0)), k_buf, known, is_async=True)
    known = warpgroup_mma(w_buf.permute((1, 0)), q_buf, known, is_async=True)
    mbarrier.wait(full.index(4), 0)
    grad_k = warpgroup_mma(u_buf, d_buf.permute((1, 0)), nothing_k, use_acc=False, is_async=True)
    if GATED:
        grad_k = warpgroup_mma(u_buf, low_buf.permute((1, 0)), grad_k, is_async=True)
        whole = (s_buf.load(STATE).to(gl.float32) + rest.to(gl.float32)) * (
            d_buf.load(STATE).to(gl.float32) + low_buf.load(STATE).to(gl.float32)
        )
        across = gl.sum(whole, axis=1)
    grad_q, known, grad_k = warpgroup_mma_wait(0, deps=[grad_q, known, grad_k])
    tma.store_wait(0)
    # what products and the copy engine were reading may lend its place to sums from here on
    x_buf._keep_alive()
    v_buf._keep_alive()
    u_buf._keep_alive()
    do_buf._keep_alive()
    s_buf._keep_alive()
    d_buf._keep_alive()
    w_buf._keep_alive()
    m_buf._keep_alive()
    if GATED:
        low_buf._keep_alive()
    barrier()
    if GATED:
        steps = gl.arange(0, STEPS, layout=ROW_K)
        last = gl.sum(gl.where(steps == STEPS - 1, sums, 0.0), axis=0)
        grad_k = grad_k * gl.exp2(last - sums)[:, None]
        out_of = gl.convert_layout(gl.sum(grad_k * keys, axis=1), BY_COL)
        inside = gl.convert_layout(inside, BY_COL) + by_col
        grad_g = gl.sum(gl.where(s_of >= t_of, inside[None, :], out_of[None, :]), axis=1)
        grad_g += gl.sum(across, axis=0) * gl.exp2(last)
    grad_k = grad_k + known
    if SHARED:
        rows_k = row + gl.arange(0, STEPS, layout=ROW_K)
        cols = gl.arange(0, BK, layout=gl.SliceLayout(0, OF_K))[None, :]
        at = ((n.to(gl.int64) * seqlen + rows_k) * heads + head)[:, None] * (K // 8 * 8) + cols
        inside_k = (rows_k < seqlen)[:, None] & (cols < K // 8 * 8)
        gl.store(dq + at, grad_q, mask=inside_k)
        gl.store(dk + at, grad_k, mask=inside_k)
    else:
        barrier()  # all have read q and k
        q_buf.store(grad_q.to(dtype))
        k_buf.store(grad_k.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dq_desc, [n, head, row, 0], q_buf)
        tma_store(dk_desc, [n, head, row, 0], k_buf)
    rows = row + gl.arange(0, STEPS, layout=BY_ROW)
    to = (n.to(gl.int64) * seqlen + rows) * heads + head
    gl.store(dbeta + to, of_beta, mask=rows < seqlen)
    if GATED:
        gl.store(dg + to, grad_g, mask=rows < seqlen)
    tma.store_wait(0)
