"""Matrix product for Hopper (sm_90a) in Gluon where K is a slice or two, a program a tile: activation(A B + bias).

All of K is loaded at once, multiplied, and written by TMA. Several programs share an SM, so that some write while
others load: what bounds such a product is how fast its result is written. The persistent kernel (`gemm_kernel.py`)
takes longer to begin, and nothing of its ring is needed.
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

from .gemm_device import activate, add_bias, place


@gluon.jit(do_not_specialize=["bias", "N", "tiles_m", "tiles_n"])
def gemm_short_kernel(
    a_desc, b_desc, out_desc, bias, N, tiles_m, tiles_n,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STEPS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr,
    GROUP: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out is (M, N), K at most STEPS * BK; descriptors of BM x BK of A, BN x BK of B (or turned) and BM x BN of out."""
    dtype: gl.constexpr = a_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [STEPS] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STEPS] + b_desc.block_shape, b_desc.layout)
    out_buf = gl.allocate_shared_memory(out_desc.dtype, [BM, BN], out_desc.layout)
    a_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)  # one each: see EACH in `walk_kernel`
    b_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(a_full, count=1)
    mbarrier.init(b_full, count=1)
    fence_async_shared()
    tile_m, tile_n = place(gl.program_id(0), tiles_m, tiles_n, GROUP)
    row = tile_m * BM
    col = tile_n * BN
    mbarrier.expect(a_full, STEPS * a_desc.block_type.nbytes)
    mbarrier.expect(b_full, STEPS * b_desc.block_type.nbytes)
    for step in gl.static_range(STEPS):
        if A_K:
            tma_load(a_desc, [row, step * BK], a_full, a_bufs.index(step))
        else:
            tma_load(a_desc, [step * BK, row], a_full, a_bufs.index(step))
        if B_K:
            tma_load(b_desc, [col, step * BK], b_full, b_bufs.index(step))
        else:
            tma_load(b_desc, [step * BK, col], b_full, b_bufs.index(step))
    mbarrier.wait(a_full, 0)
    mbarrier.wait(b_full, 0)
    acc = gl.full([BM, BN], 0.0, gl.float32, ACC)
    for step in gl.static_range(STEPS):
        a = a_bufs.index(step)
        b = b_bufs.index(step)
        if not A_K:
            a = a.permute((1, 0))
        if B_K:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    out_buf.store(activate(add_bias(acc, bias, col, N, BIAS), ACTIVATION).to(out_desc.dtype))
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, col], out_buf)
    tma.store_wait(0)
