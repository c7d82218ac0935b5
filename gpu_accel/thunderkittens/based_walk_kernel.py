"""Based's attention on Hopper (sm_90a) in Gluon: one program walks a sequence, its features live in registers.

`based_kernel` has the formulas, `walk_kernel` the walk: one warpgroup a sequence, head and 64 columns of v, with q, k
and v by TMA some chunks ahead, and two barriers a chunk.

The 256 products x_i x_j are left operands of wgmma in registers, four i and every j at a time (64 columns of q's, 64
rows of k's). x_j is read from shared memory in the layout that the operand has in (i, j); the four x_i of q are split
off registers, those of k are rows of a transposed copy, so that neighbours in time share a register. Two products of
16 bits are one instruction. S2 has 256 rows in four accumulators; S1, with 16 rows, takes the smaller mma, and S0, the
sum of v, the same with ones for k; all three are scaled on their way to shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpu_accel.gluon_compat import barrier, tma_load, tma_store
from gpu_accel.thunderkittens.walk_kernel import ready_barriers

STEPS = gl.constexpr(64)  # of a chunk: the M of wgmma
KEYS = gl.constexpr(16)  # what K is padded to


@gluon.jit
def _products(a, b):
    """a b of bfloat16, two at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _quarters(x):
    """(a, b, 4) as four (a, b)."""
    even, odd = gl.split(x.reshape((x.shape[0], x.shape[1], 2, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _row_products(four, every, LAYOUT: gl.constexpr, BY: gl.constexpr):
    """(steps, 64) x_i x_j for four i and every j, as a left operand. four (steps, 4), every (steps, KEYS)."""
    four = gl.convert_layout(four, gl.SliceLayout(2, BY), assert_trivial=True)
    x = _products(four[:, :, None], every[:, None, :])
    return gl.convert_layout(x.reshape((STEPS, 4 * KEYS)), LAYOUT, assert_trivial=True)


@gluon.jit
def _column_products(kt_buf, FIRST: gl.constexpr, every, LAYOUT: gl.constexpr, BY: gl.constexpr):
    """(64, steps), the same of transposed keys: four i from FIRST on. every (KEYS, steps)."""
    four = kt_buf.slice(FIRST, 4).load(gl.SliceLayout(1, BY))
    x = _products(four[:, None, :], every[None, :, :])
    return gl.convert_layout(x.reshape((4 * KEYS, STEPS)), LAYOUT, assert_trivial=True)


@gluon.jit
def _load(descs, bufs, bar, stage, n, head, head_q, chunk, col):
    """Ask for a chunk's q, k and v."""
    q_desc, k_desc, v_desc = descs
    q_bufs, k_bufs, v_bufs = bufs
    full = bar.index(stage)
    row = chunk * STEPS
    mbarrier.expect(full, q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(q_desc, [n, head_q, row, 0], full, q_bufs.index(stage))
    tma_load(k_desc, [n, head_q, row, 0], full, k_bufs.index(stage))
    tma_load(v_desc, [n, head, row, col], full, v_bufs.index(stage))


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "tiles", "scale"])
def based_walk_kernel(
    q_desc, k_desc, v_desc, o_desc, chunks, heads, group, tiles, scale,
    BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """o through o_desc. Descriptors of rank 4: (batch, head, row, column)."""
    dtype: gl.constexpr = q_desc.dtype
    PAIRS: gl.constexpr = KEYS * KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SMALL: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, KEYS], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, KEYS], NARROW)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, KEYS], NARROW)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, STEPS, BV], VALUES)
    s2_buf = gl.allocate_shared_memory(dtype, [PAIRS, BV], gl.NVMMASharedLayout.get_default_for([PAIRS, BV], dtype))
    s1_buf = gl.allocate_shared_memory(dtype, [KEYS, BV], gl.NVMMASharedLayout.get_default_for([KEYS, BV], dtype))
    o_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)
    s0_buf = gl.allocate_shared_memory(gl.float32, [BV], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kt_buf = gl.allocate_shared_memory(dtype, [KEYS, STEPS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full = ready_barriers(STAGES)

    program = gl.program_id(0)
    col = program % tiles * BV
    head = program // tiles % heads
    n = program // tiles // heads
    head_q = head // group
    descs = (q_desc, k_desc, v_desc)
    bufs = (q_bufs, k_bufs, v_bufs)
    for i in gl.static_range(STAGES):
        if i < chunks:
            _load(descs, bufs, full, i, n, head, head_q, i, col)

    # layouts of products, so that their last step into an operand moves nothing
    BY_Q: gl.constexpr = gl.full([STEPS, PAIRS], 0.0, dtype, LEFT).reshape((STEPS, KEYS, KEYS)).type.layout
    BY_Q4: gl.constexpr = gl.full([STEPS, 4 * KEYS], 0.0, dtype, LEFT).reshape((STEPS, 4, KEYS)).type.layout
    BY_K4: gl.constexpr = gl.full([4 * KEYS, STEPS], 0.0, dtype, LEFT).reshape((4, KEYS, STEPS)).type.layout
    no_out = gl.full([STEPS, BV], 0.0, gl.float32, OUT)
    a0 = no_out  # S2 in four pieces of 64 rows
    a1 = no_out
    a2 = no_out
    a3 = no_out
    s1 = gl.full([KEYS, BV], 0.0, gl.float32, SMALL)
    s0 = s1  # in every row
    ones = gl.full([KEYS, STEPS], 1.0, dtype, gl.DotOperandLayout(0, SMALL, 2))
    for i in gl.static_range(4):
        s2_buf.slice(i * 64, 64).store(no_out.to(dtype))
    s1_buf.store(s1.to(dtype))
    s0_buf.store(gl.max(s0, axis=0))
    fence_async_shared()
    steps_t = gl.arange(0, STEPS, layout=gl.SliceLayout(1, SCORES))
    steps_s = gl.arange(0, STEPS, layout=gl.SliceLayout(0, SCORES))
    causal = steps_t[:, None] >= steps_s[None, :]
    no_scores = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    half = scale * scale * 0.5
    stage = 0
    phase = 0
    for chunk in range(0, chunks):
        mbarrier.wait(full.index(stage), phase)
        q_buf = q_bufs.index(stage)
        k_buf = k_bufs.index(stage)
        v_buf = v_bufs.index(stage)
        scores = warpgroup_mma(q_buf, k_buf.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        out = no_out + s0_buf.load(gl.SliceLayout(0, OUT))[None, :]
        out = warpgroup_mma(q_buf, s1_buf, out, is_async=True)
        kt = k_buf.permute((1, 0))
        every_k = kt.load(gl.SliceLayout(0, BY_K4))
        kt_buf.store(every_k)
        every = q_buf.load(gl.SliceLayout(1, BY_Q4))
        r0, r1, r2, r3 = _quarters(q_buf.load(gl.SliceLayout(2, BY_Q)).reshape((STEPS, 4, 4)).permute((0, 2, 1)))
        scores = warpgroup_mma_wait(1, deps=[scores])
        x = scores * scale
        p = gl.where(causal, 1.0 + x + 0.5 * x * x, 0.0).to(dtype)
        out = warpgroup_mma(gl.convert_layout(p, LEFT), v_buf, out, is_async=True)
        out = warpgroup_mma(_row_products(r0, every, LEFT, BY_Q4), s2_buf.slice(0, 64), out, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        out = warpgroup_mma(_row_products(r1, every, LEFT, BY_Q4), s2_buf.slice(64, 64), out, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        out = warpgroup_mma(_row_products(r2, every, LEFT, BY_Q4), s2_buf.slice(128, 64), out, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        out = warpgroup_mma(_row_products(r3, every, LEFT, BY_Q4), s2_buf.slice(192, 64), out, is_async=True)
        a0 = warpgroup_mma(_column_products(kt_buf, 0, every_k, LEFT, BY_K4), v_buf, a0, is_async=True)
        out = warpgroup_mma_wait(1, deps=[out])
        a1 = warpgroup_mma(_column_products(kt_buf, 4, every_k, LEFT, BY_K4), v_buf, a1, is_async=True)
        a0 = warpgroup_mma_wait(1, deps=[a0])
        a2 = warpgroup_mma(_column_products(kt_buf, 8, every_k, LEFT, BY_K4), v_buf, a2, is_async=True)
        a1 = warpgroup_mma_wait(1, deps=[a1])
        a3 = warpgroup_mma(_column_products(kt_buf, 12, every_k, LEFT, BY_K4), v_buf, a3, is_async=True)
        right = v_buf.load(gl.DotOperandLayout(1, SMALL, 2))
        s1 = mma_v2(kt.load(gl.DotOperandLayout(0, SMALL, 2)), right, s1)
        s0 = mma_v2(ones, right, s0)
        tma.store_wait(0)
        barrier()  # the states were read by all, and the last o has left
        o_buf.store(out.to(dtype))
        s1_buf.store((s1 * scale).to(dtype))
        s0_buf.store(gl.max(s0, axis=0))
        a2, a3 = warpgroup_mma_wait(0, deps=[a2, a3])
        s2_buf.slice(0, 64).store((a0 * half).to(dtype))
        s2_buf.slice(64, 64).store((a1 * half).to(dtype))
        s2_buf.slice(128, 64).store((a2 * half).to(dtype))
        s2_buf.slice(192, 64).store((a3 * half).to(dtype))
        fence_async_shared()
        barrier()
        tma_store(o_desc, [n, head, chunk * STEPS, col], o_buf)
        if chunk + STAGES < chunks:
            _load(descs, bufs, full, stage, n, head, head_q, chunk + STAGES, col)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    tma.store_wait(0)
