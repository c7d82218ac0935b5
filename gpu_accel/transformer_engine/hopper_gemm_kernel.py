"""FP8 matrix product for Hopper (sm_90a) in Gluon: out (M, N) = A (M, K) B (N, K)^T with scales, sums in float32.

Hopper's tensor cores sum products of eight-bit floats with about 14 bits. So sums leave the tensor core every 128 of K
and are added up in float32 registers, where the scales of 1x128 and 128x128 blocks are multiplied in as well. A
consumer holds two accumulators of 64 x 128 (128 registers) and one partial sum (64): the additions of one consumer run
under the products of the other.

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 * HALVES rows of a tile
    producer   1 warp, 24 registers: issues every TMA load into a ring of STAGES slices of A and B, 128 of K each

    consumer 0 | half 0 . add . half 1 . add | half 0 . add ...
    consumer 1 |      half 0 . add . half 1 . add | ...          (tensor core: 0 1 0 1 ...)

The first slice of a tile goes straight into the accumulators; under it the packed tile before is written (see
thunderkittens/gemm_kernel.py, whose ring and epilogue this shares).

Barriers (mbarrier): full one a stage, arrived on by TMA; empty one a stage, arrived on by both consumers.

Sources: FP8 formats for deep learning, arXiv 2209.05433; two-level sums: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import tma_load
from gpu_accel.thunderkittens.gemm_device import NOWHERE, add_bias, advance, pack, place, store_direct, write_packed

ROWS = gl.constexpr(64)  # rows of one half: the M of wgmma
BLOCK = gl.constexpr(128)  # of K that the tensor core may sum up

# Run-time scalars travel in two tuples:
#   shape  = (M, N, k_steps, tiles_m, tiles_n)
#   scales = (scale_a, scale_b, sa_m, sa_k, sb_n, sb_k): where they are, and strides by row, by 128 of K


@gluon.jit
def _row_scale(scale, rows, limit, stride, k, ROWS_A: gl.constexpr):
    """Scales of 64 rows at slice k of K; 0 for rows behind the last."""
    return gl.load(scale + (rows // ROWS_A).to(gl.int64) * stride + k, mask=rows < limit, other=0.0)


@gluon.jit
def _finished(acc, rows, col, bias, shape, scales, BLOCKED: gl.constexpr, ROW_A: gl.constexpr, ROW_B: gl.constexpr,
              BIAS: gl.constexpr):  # fmt: skip
    """An accumulator times the scales that do not change along K, plus bias."""
    M, N, _, _, _ = shape
    scale_a, scale_b, sa_m, _, sb_n, _ = scales
    if not BLOCKED:
        if ROW_A:  # noqa: SIM108 - branches at compile time
            acc = acc * _row_scale(scale_a, rows, M, sa_m, 0, 1)[:, None]
        else:
            acc = acc * gl.load(scale_a)
        if ROW_B:
            cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
            acc = acc * gl.load(scale_b + cols * sb_n, mask=cols < N, other=0.0)[None, :]
        else:
            acc = acc * gl.load(scale_b)
    return add_bias(acc, bias, col, N, BIAS)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, out_desc, out, bias, shape, scales,
    HALVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr, OUT_SLOTS: gl.constexpr,
    BLOCKED: gl.constexpr, ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, BIAS: gl.constexpr,
    DIRECT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, out_bufs = bufs
    full, empty = bars
    M, N, k_steps, tiles_m, tiles_n = shape
    scale_a, scale_b, sa_m, sa_k, sb_n, sb_k = scales
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    BM: gl.constexpr = 2 * HALVES * ROWS
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    dtype: gl.constexpr = out.dtype.element_ty
    zero = gl.full([ROWS, BN], 0.0, gl.float32, ACC)
    stage = 0
    phase = 0
    if not WIDE:
        packed0 = pack(zero, dtype)
        packed1 = packed0
        row = 0 + NOWHERE
        col = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row_now = tile_m * BM + WG * HALVES * ROWS
        col_now = tile_n * BN
        rows0 = row_now + gl.arange(0, ROWS, layout=ROW)
        rows1 = rows0 + ROWS
        sb = scale_b + (col_now // BLOCK).to(gl.int64) * sb_n
        mbarrier.wait(full.index(stage), phase)
        b = b_bufs.index(stage).permute((1, 0))
        acc0 = warpgroup_mma(a_bufs.index((stage * 2 + WG) * HALVES), b, zero, use_acc=False, is_async=True)
        if HALVES == 2:
            acc1 = warpgroup_mma(a_bufs.index((stage * 2 + WG) * HALVES + 1), b, zero, use_acc=False, is_async=True)
        if not WIDE:
            write_packed(packed0, out_bufs, WG * OUT_SLOTS, out_desc, out, row, col, M, N, ACC, 1, dtype, DIRECT)
            if HALVES == 2:
                write_packed(
                    packed1, out_bufs, WG * OUT_SLOTS + OUT_SLOTS - 1, out_desc, out, row + ROWS, col, M, N, ACC, 1,
                    dtype, DIRECT,
                )  # fmt: skip
        if HALVES == 2:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
        mbarrier.arrive(empty.index(stage), count=1)
        if BLOCKED:
            s = gl.load(sb)
            acc0 = acc0 * (_row_scale(scale_a, rows0, M, sa_m, 0, ROWS_A) * s)[:, None]
            if HALVES == 2:
                acc1 = acc1 * (_row_scale(scale_a, rows1, M, sa_m, 0, ROWS_A) * s)[:, None]
        stage, phase = advance(stage, phase, STAGES)
        for step in range(1, k_steps):
            if BLOCKED:
                s = gl.load(sb + step * sb_k)
                s0 = _row_scale(scale_a, rows0, M, sa_m, step * sa_k, ROWS_A)
                if HALVES == 2:
                    s1 = _row_scale(scale_a, rows1, M, sa_m, step * sa_k, ROWS_A)
            mbarrier.wait(full.index(stage), phase)
            b = b_bufs.index(stage).permute((1, 0))
            part = warpgroup_mma(a_bufs.index((stage * 2 + WG) * HALVES), b, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            if BLOCKED:
                acc0 += part * (s0 * s)[:, None]
            else:
                acc0 += part
            if HALVES == 2:
                mbarrier.wait(full.index(stage), phase)
                part = warpgroup_mma(a_bufs.index((stage * 2 + WG) * HALVES + 1), b, zero, use_acc=False, is_async=True)
                part, acc0 = warpgroup_mma_wait(0, deps=[part, acc0])
            mbarrier.arrive(empty.index(stage), count=1)
            if HALVES == 2:
                if BLOCKED:
                    acc1 += part * (s1 * s)[:, None]
                else:
                    acc1 += part
            stage, phase = advance(stage, phase, STAGES)
        acc0 = _finished(acc0, rows0, col_now, bias, shape, scales, BLOCKED, ROW_A, ROW_B, BIAS)
        if HALVES == 2:
            acc1 = _finished(acc1, rows1, col_now, bias, shape, scales, BLOCKED, ROW_A, ROW_B, BIAS)
        if WIDE:
            store_direct(acc0, out, row_now, col_now, M, N, N)
            if HALVES == 2:
                store_direct(acc1, out, row_now + ROWS, col_now, M, N, N)
        else:
            packed0 = pack(acc0, dtype)
            if HALVES == 2:
                packed1 = pack(acc1, dtype)
            row = row_now
            col = col_now
    if not WIDE:
        write_packed(packed0, out_bufs, WG * OUT_SLOTS, out_desc, out, row, col, M, N, ACC, 1, dtype, DIRECT)
        if HALVES == 2:
            write_packed(
                packed1, out_bufs, WG * OUT_SLOTS + OUT_SLOTS - 1, out_desc, out, row + ROWS, col, M, N, ACC, 1,
                dtype, DIRECT,
            )  # fmt: skip
        if not DIRECT:
            tma.store_wait(0)


@gluon.jit
def _producer(
    bufs, bars, a_desc, b_desc, shape, HALVES: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr
):
    a_bufs, b_bufs, _ = bufs
    full, empty = bars
    _, _, k_steps, tiles_m, tiles_n = shape
    BM: gl.constexpr = 2 * HALVES * ROWS
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(k_steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (BM + BN) * BLOCK)
            for i in gl.static_range(2 * HALVES):
                tma_load(
                    a_desc, [tile_m * BM + i * ROWS, step * BLOCK], full.index(stage),
                    a_bufs.index(stage * 2 * HALVES + i),
                )  # fmt: skip
            tma_load(b_desc, [tile_n * BN, step * BLOCK], full.index(stage), b_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(
    do_not_specialize=[
        "scale_a", "scale_b", "out", "bias", "M", "N", "k_steps", "tiles_m", "tiles_n", "sa_m", "sa_k", "sb_n", "sb_k",
    ]
)  # fmt: skip
def fp8_gemm_kernel(
    a_desc, b_desc, out_desc, out, bias, scale_a, scale_b, M, N, k_steps, tiles_m, tiles_n, sa_m, sa_k, sb_n, sb_k,
    HALVES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, OUT_SLOTS: gl.constexpr,
    BLOCKED: gl.constexpr, ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, BIAS: gl.constexpr,
    DIRECT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc in blocks of 64 x 128, b_desc of BN x 128; out (M, N), contiguous, 16-bit or float32; k_steps >= 1.

    BLOCKED: scales change every 128 of K; `ROWS_A` rows of A and BN of B share one. Else ROW_A, ROW_B: one a row, or
    one in all. DIRECT: `out` is written from registers, `out_desc` is unused.
    """
    WIDE: gl.constexpr = out.dtype.element_ty == gl.float32
    OUT_BUFS: gl.constexpr = 1 if DIRECT else 2 * OUT_SLOTS
    OUT_ROWS: gl.constexpr = 8 if DIRECT else ROWS
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2 * HALVES] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    OUT_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT_ROWS, BN], out_desc.dtype)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [OUT_BUFS, OUT_ROWS, BN], OUT_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bufs = (a_bufs, b_bufs, out_bufs)
    bars = (full, empty)
    shape = (M, N, k_steps, tiles_m, tiles_n)
    scales = (scale_a, scale_b, sa_m, sa_k, sb_n, sb_k)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, out_desc, out, bias, shape, scales, HALVES, STAGES, GROUP, BN, OUT_SLOTS, BLOCKED,
                     ROW_A, ROW_B, ROWS_A, BIAS, DIRECT, WIDE)),
        (_consumer, (1, bufs, bars, out_desc, out, bias, shape, scales, HALVES, STAGES, GROUP, BN, OUT_SLOTS, BLOCKED,
                     ROW_A, ROW_B, ROWS_A, BIAS, DIRECT, WIDE)),
        (_producer, (bufs, bars, a_desc, b_desc, shape, HALVES, STAGES, GROUP, BN)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
