"""What the delta rule solves in every chunk, for Hopper (sm_90a) in Gluon: T, decay, fresh and the pairs of a chunk.

`delta_kernels` has the formulas. One program (4 warps) has a chunk and a head; three share an SM. With A and the sums b
of gates,

    T = (I + A)^-1        decay = T (beta exp(b) K)        fresh = T (beta V)        P = scale exp(b_t - b_s) q_t' k_s

come of one read of q, k and v by TMA, and leave by TMA from where those lay.

**The inverse.** The four diagonal blocks of 16 are inverted by substitution in float32, a warp a block and a lane a
column, 16 numbers of it in registers: row i, once it is there, is taken off those below it. So it costs 256
multiplications a thread and no product. Two levels of products double the blocks, [[P, 0], [X, Q]]^-1 = [[P^-1, 0],
[-Q^-1 X P^-1, Q^-1]], with every operand in two bfloat16 numbers, which is three products of 16 bits for one.

T has a diagonal of ones: what a step adds itself is beta v in float32, where the products begin, and only what it has
of others is a weight in bfloat16.

What lies beyond a sequence is zero by TMA, with weights of zero and sums that stay.
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

from gpu_accel.gluon_compat import barrier, reinterpret, tma_load, tma_store
from gpu_accel.thunderkittens.walk_kernel import STEPS, ready_barriers

ROWS = gl.constexpr(16)  # of the blocks that are inverted in registers
BLOCKS = gl.constexpr(4)


@gluon.jit
def _in_two(x, dtype: gl.constexpr):
    """x as a bfloat16 number, cut so that its bits are the upper half of those of x, and what is left."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@gluon.jit
def _keep(bufs, x):
    high, low = _in_two(x, bufs.dtype)
    bufs.index(0).store(high)
    bufs.index(1).store(low)
    fence_async_shared()
    barrier()


@gluon.jit
def _product(high, low, bufs, acc, ADDS: gl.constexpr):
    """high + low times what `_keep` stored, without the product of both low parts; added to acc with ADDS."""
    acc = warpgroup_mma(high, bufs.index(0), acc, use_acc=ADDS, is_async=True)
    acc = warpgroup_mma(low, bufs.index(0), acc, is_async=True)
    acc = warpgroup_mma(high, bufs.index(1), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _doubled(t, below, t_bufs, r_bufs, LEFT: gl.constexpr):
    """The inverse of blocks twice as long, t + t (below t). below: -A between two blocks, else 0."""
    _keep(t_bufs, t)
    high, low = _in_two(below, t_bufs.dtype)
    _keep(r_bufs, _product(gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT), t_bufs, t, False))
    t = _product(t_bufs.index(0), t_bufs.index(1), r_bufs, t, True)
    barrier()  # all have read t_bufs
    return t


@gluon.jit
def place_of_chunk(chunks, heads, group):
    """(sequence, head, head of q, first step in its sequence, and among all) of a program: a chunk and a head."""
    program = gl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    n = program // heads // chunks
    row = chunk * STEPS
    return n, head, head // group, row, (n * heads + head) * chunks * STEPS + row


@gluon.jit(do_not_specialize=["chunks", "heads", "group", "tiles", "scale"])
def delta_solve_kernel(
    q_desc, k_desc, v_desc, sums_desc, strengths_desc, decay_desc, fresh_desc, pairs_desc, inverse_desc,
    chunks, heads, group, tiles, scale,
    BK: gl.constexpr, BV: gl.constexpr, GATED: gl.constexpr, PAIRS: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """decay (.., K) and fresh (.., V) of every step; with PAIRS P (.., rows, STEPS), of q; with KEEP rows of T.

    sums, strengths: lines of b in base 2 and of beta, as `gates_kernel` makes them. tiles: of BV columns of v.
    """
    dtype: gl.constexpr = k_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEPS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    OF_K: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BK, 16])
    OF_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_COL: gl.constexpr = gl.SliceLayout(0, SCORES)
    COLUMN: gl.constexpr = gl.BlockedLayout([1, ROWS, 1], [1, 1, 32], [BLOCKS, 1, 1], [2, 1, 0])  # of a block, a lane
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BK], dtype)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, BV], dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STEPS, STEPS], dtype)
    LINE: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)

    r_bufs = gl.allocate_shared_memory(dtype, [2, STEPS, STEPS], SQUARE)
    # until its product is there
    q_buf = r_bufs.index(0) if BK == STEPS else reinterpret(r_bufs, dtype, [STEPS, BK], KEYS)
    t_bufs = gl.allocate_shared_memory(dtype, [2, STEPS, STEPS], SQUARE)
    p_buf = t_bufs.index(1)  # until it has left
    k_buf = gl.allocate_shared_memory(dtype, [STEPS, BK], KEYS)
    v_buf = gl.allocate_shared_memory(dtype, [STEPS, BV], VALUES)
    a_buf = gl.allocate_shared_memory(gl.float32, [STEPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x_buf = gl.allocate_shared_memory(gl.float32, [STEPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sums_buf = gl.allocate_shared_memory(gl.float32, [STEPS], LINE)
    strengths_buf = gl.allocate_shared_memory(gl.float32, [STEPS], LINE)
    full = ready_barriers(2)

    n, head, head_q, row, line = place_of_chunk(chunks, heads, group)
    mbarrier.expect(full.index(0), (1 + PAIRS) * k_desc.block_type.nbytes + (1 + GATED) * STEPS * 4)
    tma_load(k_desc, [n, head_q, row, 0], full.index(0), k_buf)
    tma_load(strengths_desc, [line], full.index(0), strengths_buf)
    if GATED:
        tma_load(sums_desc, [line], full.index(0), sums_buf)
    if PAIRS:
        tma_load(q_desc, [n, head_q, row, 0], full.index(0), q_buf)
    mbarrier.expect(full.index(1), v_desc.block_type.nbytes)
    tma_load(v_desc, [n, head, row, 0], full.index(1), v_buf)

    t_of = gl.arange(0, STEPS, layout=BY_ROW)[:, None]
    s_of = gl.arange(0, STEPS, layout=BY_COL)[None, :]
    nothing = gl.full([STEPS, STEPS], 0.0, gl.float32, SCORES)
    mbarrier.wait(full.index(0), 0)
    a = warpgroup_mma(k_buf, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if PAIRS:
        pairs = warpgroup_mma(q_buf, k_buf.permute((1, 0)), nothing, use_acc=False, is_async=True)
        a, pairs = warpgroup_mma_wait(0, deps=[a, pairs])
    else:
        a = warpgroup_mma_wait(0, deps=[a])
    if GATED:
        left = gl.exp2(gl.where(t_of >= s_of, sums_buf.load(BY_ROW)[:, None] - sums_buf.load(BY_COL)[None, :],
                                float("-inf")))  # fmt: skip
        a = a * left
        if PAIRS:
            pairs = pairs * left
    if PAIRS:
        p_buf.store((gl.where(t_of >= s_of, pairs, 0.0) * scale).to(dtype))
    a = gl.where(t_of > s_of, a * -strengths_buf.load(BY_ROW)[:, None], 0.0)

    # diagonal blocks; in shared memory by column, then by block and row
    by_block = gl.reshape(a, [STEPS, BLOCKS, ROWS])
    APART: gl.constexpr = by_block.type.layout
    of_row = gl.arange(0, STEPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, APART)))[:, None]
    of_block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, APART)))[None, :]
    own = (of_row // ROWS == of_block)[:, :, None]
    diagonal = gl.reshape(gl.sum(gl.where(own, by_block, 0.0), axis=1), [BLOCKS, ROWS, ROWS])
    a_buf.store(gl.reshape(gl.permute(diagonal, (2, 0, 1)), [STEPS, ROWS]))
    fence_async_shared()
    barrier()
    if PAIRS:
        tma_store(pairs_desc, [n, head, row, 0], p_buf)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMN)))[None, :][:, :, None]
    cols = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, :][:, None, :]
    x = gl.where(rows == cols, 1.0, gl.full([BLOCKS, ROWS, ROWS], 0.0, gl.float32, COLUMN))
    for i in gl.static_range(ROWS - 1):
        done = gl.sum(gl.where(rows == i, x, -0.0), axis=1)  # of one register: -0.0 can be added at no cost
        column = a_buf.slice(i * BLOCKS, BLOCKS).load(gl.SliceLayout(2, COLUMN))
        x = x + column[:, :, None] * done[:, None, :]
    x_buf.store(gl.reshape(x, [STEPS, ROWS]))
    tma.store_wait(0)  # P has left
    barrier()
    found = gl.where(own, x_buf.load(gl.SliceLayout(1, APART))[:, None, :], 0.0)
    t = gl.convert_layout(gl.reshape(found, [STEPS, STEPS]), SCORES, assert_trivial=True)
    t = _doubled(t, gl.where((t_of ^ s_of) >> 4 == 1, a, 0.0), t_bufs, r_bufs, LEFT)
    t = _doubled(t, gl.where((t_of ^ s_of) >> 5 == 1, a, 0.0), t_bufs, r_bufs, LEFT)
    if KEEP:
        t_bufs.index(0).store(t.to(dtype))

    weights = gl.where(t_of > s_of, t, 0.0) * strengths_buf.load(BY_COL)[None, :]
    strength = strengths_buf.load(gl.SliceLayout(1, OF_K))
    of_others = gl.convert_layout(weights.to(dtype), LEFT)
    others = weights
    if GATED:
        others = weights * gl.exp2(sums_buf.load(BY_COL))[None, :]
        strength = strength * gl.exp2(sums_buf.load(gl.SliceLayout(1, OF_K)))
    acc = k_buf.load(OF_K).to(gl.float32) * strength[:, None]
    acc = warpgroup_mma(gl.convert_layout(others.to(dtype), LEFT), k_buf, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()  # all have read k
    k_buf.store(acc.to(dtype))
    fence_async_shared()
    barrier()
    tma_store(decay_desc, [n, head, row, 0], k_buf)
    if KEEP:
        tma_store(inverse_desc, [n, head, row, 0], t_bufs.index(0))
    strength = strengths_buf.load(gl.SliceLayout(1, OF_V))
    for tile in range(0, tiles):
        mbarrier.wait(full.index(1), tile & 1)
        acc_v = v_buf.load(OF_V).to(gl.float32) * strength[:, None]
        acc_v = warpgroup_mma(of_others, v_buf, acc_v, is_async=True)
        acc_v = warpgroup_mma_wait(0, deps=[acc_v])
        barrier()
        v_buf.store(acc_v.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(fresh_desc, [n, head, row, tile * BV], v_buf)
        tma.store_wait(0)
        if tile + 1 < tiles:
            barrier()
            mbarrier.expect(full.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [n, head, row, (tile + 1) * BV], full.index(1), v_buf)
    k_buf._keep_alive()  # it has left now
    t_bufs._keep_alive()
