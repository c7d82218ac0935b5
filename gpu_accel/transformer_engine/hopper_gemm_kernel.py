"""FP8 matrix product for Hopper (sm_90a) in Gluon: out (M, N) = A (M, K) B (N, K)^T with scales, sums in float32.

Hopper's tensor cores sum products of eight-bit floats with about 14 bits. So sums leave the tensor core every 128 of K
and are added up in float32 registers, where the scales of 1x128 and 128x128 blocks are multiplied in as well. A
consumer holds two accumulators of 64 x 128 (128 registers) and one partial sum (64): the additions of one consumer run
under the products of the other.

    consumers  2 warpgroups of 4 warps, 240 registers; each owns a quarter and a quarter of a tile, its halves:
               128 rows of 256 x 128, or (COLS) 64 rows of 128 x 256, whose A is read from shared memory once, into
               registers, for both
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
from gpu_accel.thunderkittens.gemm_device import (
    NOWHERE,
    add_bias,
    advance,
    count,
    item,
    own_slot,
    pack,
    partial,
    pieces_of,
    place,
    program_of,
    slot_of,
    store_direct,
    write_packed,
)

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
def _block_scales(rows0, rows1, col, step, shape, scales, COLS: gl.constexpr, ROWS_A: gl.constexpr):
    """Scales at slice `step` of K: (of the rows of half 0, of half 1, of the columns of half 0, of half 1)."""
    M, N, _, _, _ = shape
    scale_a, scale_b, sa_m, sa_k, sb_n, sb_k = scales
    sa0 = _row_scale(scale_a, rows0, M, sa_m, step * sa_k, ROWS_A)
    sb = scale_b + (col // BLOCK).to(gl.int64) * sb_n + step * sb_k
    sb0 = gl.load(sb)
    if COLS:
        return sa0, sa0, sb0, gl.load(sb + sb_n, mask=col + BLOCK < N, other=0.0)
    else:
        return sa0, _row_scale(scale_a, rows1, M, sa_m, step * sa_k, ROWS_A), sb0, sb0


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
def _share(acc0, acc1, tile, k0, shape, dealt, partials, counters, WG: gl.constexpr):
    """Leave the sums of a shared tile, and if all are there add them up: (sums, sums, whether they are complete)."""
    _, _, k_steps, tiles_m, tiles_n = shape
    tile -= tiles_m * tiles_n - dealt
    LAYOUT: gl.constexpr = acc0.type.layout
    slot = (own_slot(gl.program_id(0), k0) * 2 + WG) * 2
    gl.store(partial(partials, slot, ROWS, BLOCK, LAYOUT), acc0)
    gl.store(partial(partials, slot + 1, ROWS, BLOCK, LAYOUT), acc1)
    first = program_of(tile * k_steps, dealt * k_steps)
    last = program_of(tile * k_steps + k_steps - 1, dealt * k_steps)
    complete = count(counters + tile * 2 + WG, 8 + WG) == last - first
    if complete:
        acc0 = gl.full(acc0.shape, 0.0, gl.float32, LAYOUT)
        acc1 = acc0
        for p in range(first, last + 1):
            slot = (slot_of(p, first) * 2 + WG) * 2
            acc0 += gl.load(partial(partials, slot, ROWS, BLOCK, LAYOUT), cache_modifier=".cg")
            acc1 += gl.load(partial(partials, slot + 1, ROWS, BLOCK, LAYOUT), cache_modifier=".cg")
        gl.store(counters + tile * 2 + WG, 0)
    return acc0, acc1, complete


@gluon.jit
def _operands(a_bufs, b_bufs, stage, WG: gl.constexpr, COLS: gl.constexpr, ACC: gl.constexpr):
    """(a, b) of half 0 and (a, b) of half 1 of a stage."""
    if COLS:
        a = a_bufs.index(stage * 2 + WG).load(gl.DotOperandLayout(0, ACC, 4))
        return a, b_bufs.index(stage * 2).permute((1, 0)), a, b_bufs.index(stage * 2 + 1).permute((1, 0))
    else:
        b = b_bufs.index(stage).permute((1, 0))
        return a_bufs.index((stage * 2 + WG) * 2), b, a_bufs.index((stage * 2 + WG) * 2 + 1), b


@gluon.jit
def _write(
    packed0, packed1, out_bufs, out_desc, out, row, col, shape,
    WG: gl.constexpr, COLS: gl.constexpr, OUT_SLOTS: gl.constexpr, ACC: gl.constexpr, dtype: gl.constexpr,
    DIRECT: gl.constexpr,
):  # fmt: skip
    """Both halves of a packed tile."""
    M, N, _, _, _ = shape
    FIRST: gl.constexpr = WG * OUT_SLOTS
    write_packed(packed0, out_bufs, FIRST, out_desc, out, row, col, M, N, ACC, 1, dtype, DIRECT)
    if COLS:
        col += BLOCK
    else:
        row += ROWS
    write_packed(packed1, out_bufs, FIRST + OUT_SLOTS - 1, out_desc, out, row, col, M, N, ACC, 1, dtype, DIRECT)


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, out_desc, out, bias, shape, scales, dealt, partials, counters,
    COLS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, OUT_SLOTS: gl.constexpr,
    BLOCKED: gl.constexpr, ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, BIAS: gl.constexpr,
    DIRECT: gl.constexpr, WIDE: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, out_bufs = bufs
    full, empty = bars
    M, N, k_steps, tiles_m, tiles_n = shape
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    OWN_ROWS: gl.constexpr = ROWS if COLS else 2 * ROWS
    BN: gl.constexpr = 2 * BLOCK if COLS else BLOCK
    dtype: gl.constexpr = out.dtype.element_ty
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, ACC)
    stage = 0
    phase = 0
    if not WIDE:
        packed0 = pack(zero, dtype)
        packed1 = packed0
        row = 0 + NOWHERE
        col = 0
    items, pieces, begin, end = pieces_of(k_steps, tiles_m * tiles_n, dealt)
    for number in range(items):
        tile, k0, k1 = item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row_now = (tile_m * 2 + WG) * OWN_ROWS
        col_now = tile_n * BN
        rows0 = row_now + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        rows1 = rows0 if COLS else rows0 + ROWS
        col1 = col_now + BLOCK if COLS else col_now
        if BLOCKED:
            sa0, sa1, sb0, sb1 = _block_scales(rows0, rows1, col_now, k0, shape, scales, COLS, ROWS_A)
        mbarrier.wait(full.index(stage), phase)
        a0, b0, a1, b1 = _operands(a_bufs, b_bufs, stage, WG, COLS, ACC)
        acc0 = warpgroup_mma(a0, b0, zero, use_acc=False, is_async=True)
        acc1 = warpgroup_mma(a1, b1, zero, use_acc=False, is_async=True)
        if not WIDE:
            _write(packed0, packed1, out_bufs, out_desc, out, row, col, shape, WG, COLS, OUT_SLOTS, ACC, dtype, DIRECT)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        mbarrier.arrive(empty.index(stage), count=1)
        if BLOCKED:
            acc0 = acc0 * (sa0 * sb0)[:, None]
            acc1 = acc1 * (sa1 * sb1)[:, None]
            after = gl.minimum(k0 + 1, k1 - 1)
            sa0, sa1, sb0, sb1 = _block_scales(rows0, rows1, col_now, after, shape, scales, COLS, ROWS_A)
        stage, phase = advance(stage, phase, STAGES)
        for step in range(k0 + 1, k1):
            if BLOCKED:
                # the next slice's are on their way while this slice's are used: nothing waits for memory
                f0 = sa0 * sb0
                f1 = sa1 * sb1
                after = gl.minimum(step + 1, k1 - 1)
                sa0, sa1, sb0, sb1 = _block_scales(rows0, rows1, col_now, after, shape, scales, COLS, ROWS_A)
            mbarrier.wait(full.index(stage), phase)
            a0, b0, a1, b1 = _operands(a_bufs, b_bufs, stage, WG, COLS, ACC)
            part = warpgroup_mma(a0, b0, zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            if BLOCKED:
                acc0 += part * f0[:, None]
            else:
                acc0 += part
            # Completed long ago. It opens a block, and with the operand of the next wait that keeps the additions above
            # the next product, whose partial sum then takes the registers of this one.
            mbarrier.wait(full.index(stage), phase)
            part = warpgroup_mma(a1, b1, zero, use_acc=False, is_async=True)
            part, acc0 = warpgroup_mma_wait(0, deps=[part, acc0])
            mbarrier.arrive(empty.index(stage), count=1)
            if BLOCKED:
                acc1 += part * f1[:, None]
            else:
                acc1 += part
            stage, phase = advance(stage, phase, STAGES)
        if DEAL:  # noqa: SIM102 - a run-time branch inside a compile-time one
            if k1 - k0 < k_steps:
                acc0, acc1, complete = _share(acc0, acc1, tile, k0, shape, dealt, partials, counters, WG)
                row_now = gl.where(complete, row_now, NOWHERE)
        acc0 = _finished(acc0, rows0, col_now, bias, shape, scales, BLOCKED, ROW_A, ROW_B, BIAS)
        acc1 = _finished(acc1, rows1, col1, bias, shape, scales, BLOCKED, ROW_A, ROW_B, BIAS)
        if WIDE:
            store_direct(acc0, out, row_now, col_now, M, N, N)
            store_direct(acc1, out, row_now if COLS else row_now + ROWS, col1, M, N, N)
        else:
            packed0 = pack(acc0, dtype)
            packed1 = pack(acc1, dtype)
            row = row_now
            col = col_now
    if not WIDE:
        _write(packed0, packed1, out_bufs, out_desc, out, row, col, shape, WG, COLS, OUT_SLOTS, ACC, dtype, DIRECT)
        if not DIRECT:
            tma.store_wait(0)


@gluon.jit
def _producer(bufs, bars, a_desc, b_desc, shape, dealt, COLS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    a_bufs, b_bufs, _ = bufs
    full, empty = bars
    _, _, k_steps, tiles_m, tiles_n = shape
    A_BOXES: gl.constexpr = 2 if COLS else 4
    B_BOXES: gl.constexpr = 2 if COLS else 1
    stage = 0
    phase = 0
    items, pieces, begin, end = pieces_of(k_steps, tiles_m * tiles_n, dealt)
    for number in range(items):
        tile, k0, k1 = item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        for step in range(k0, k1):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (A_BOXES * ROWS + B_BOXES * BLOCK) * BLOCK)
            for i in gl.static_range(A_BOXES):
                tma_load(
                    a_desc, [(tile_m * A_BOXES + i) * ROWS, step * BLOCK], full.index(stage),
                    a_bufs.index(stage * A_BOXES + i),
                )  # fmt: skip
            for i in gl.static_range(B_BOXES):
                tma_load(
                    b_desc, [(tile_n * B_BOXES + i) * BLOCK, step * BLOCK], full.index(stage),
                    b_bufs.index(stage * B_BOXES + i),
                )  # fmt: skip
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(
    do_not_specialize=[
        "scale_a", "scale_b", "out", "bias", "counters", "dealt", "M", "N", "k_steps", "tiles_m", "tiles_n",
        "sa_m", "sa_k", "sb_n", "sb_k",
    ]
)  # fmt: skip
def fp8_gemm_kernel(
    a_desc, b_desc, out_desc, out, bias, scale_a, scale_b, partials, counters,
    M, N, k_steps, tiles_m, tiles_n, dealt, sa_m, sa_k, sb_n, sb_k,
    COLS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, OUT_SLOTS: gl.constexpr,
    BLOCKED: gl.constexpr, ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, BIAS: gl.constexpr,
    DIRECT: gl.constexpr, DEAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc in blocks of 64 x 128, b_desc of 128 x 128; out (M, N), contiguous, 16-bit or float32; k_steps >= 1.

    BLOCKED: scales change every 128 of K; `ROWS_A` rows of A and 128 of B share one. Else ROW_A, ROW_B: one a row, or
    one in all. DIRECT: `out` is written from registers, `out_desc` is unused.
    """
    WIDE: gl.constexpr = out.dtype.element_ty == gl.float32
    OUT_BUFS: gl.constexpr = 1 if DIRECT else 2 * OUT_SLOTS
    OUT_ROWS: gl.constexpr = 8 if DIRECT else ROWS
    A_BOXES: gl.constexpr = 2 if COLS else 4
    B_BOXES: gl.constexpr = 2 if COLS else 1
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * A_BOXES] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * B_BOXES] + b_desc.block_shape, b_desc.layout)
    OUT_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT_ROWS, BLOCK], out_desc.dtype)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [OUT_BUFS, OUT_ROWS, BLOCK], OUT_LAYOUT)
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
        (_consumer, (0, bufs, bars, out_desc, out, bias, shape, scales, dealt, partials, counters, COLS, STAGES, GROUP,
                     OUT_SLOTS, BLOCKED, ROW_A, ROW_B, ROWS_A, BIAS, DIRECT, WIDE, DEAL)),
        (_consumer, (1, bufs, bars, out_desc, out, bias, shape, scales, dealt, partials, counters, COLS, STAGES, GROUP,
                     OUT_SLOTS, BLOCKED, ROW_A, ROW_B, ROWS_A, BIAS, DIRECT, WIDE, DEAL)),
        (_producer, (bufs, bars, a_desc, b_desc, shape, dealt, COLS, STAGES, GROUP)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
