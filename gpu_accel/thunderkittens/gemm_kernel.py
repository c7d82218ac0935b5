"""Matrix product for Hopper (sm_90a) in Gluon: out = activation(A B + bias) of bf16 or fp16, sums in float32.

One persistent program per SM, split into partitions by `warp_specialize`:

    consumers  2 or 3 warpgroups of 4 warps, 240 or 160 registers; each owns 64 rows of a tile (64 x BN accumulator)
    producer   1 warp, 24 or 32 registers: issues every TMA load into a ring of STAGES slices of A and B

    consumer | k0 . k1 . k2 ... kn, pack | k0 (writes the packed tile before under it) . k1 ... | ...
    producer | load . load . load ............................. (up to STAGES ahead, across tiles) ...

One wgmma is always in flight: the slice before the newest is done when the newest has been issued, and its stage goes
back to the producer. A finished tile is rounded to 16 bits and stays packed in 64 registers, so that the next tile's
first product is issued before the way out (shared memory, TMA) is taken; the first tile of a program writes "nothing",
to rows behind the matrix. float32 results, and rows that TMA cannot write, leave from registers instead.

Barriers (mbarrier): full one a stage, arrived on by TMA; empty one a stage, arrived on by every consumer.

Operands are K-major or not, as their descriptors say: A (M, K) or (K, M), B (N, K) or (K, N).

Source: the load-compute-finish template of ThunderKittens, arXiv 2410.20399, section 4.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import tma_load

from .gemm_device import (
    NOWHERE,
    activate,
    add_bias,
    advance,
    count,
    item,
    own_slot,
    pack,
    partial,
    pieces_of,
    place,
    previous,
    program_of,
    slot_of,
    store_direct,
    write_packed,
)

ROWS = gl.constexpr(64)  # rows of one consumer: the M of wgmma


@gluon.jit
def _items(k_steps, tiles, dealt, DEAL: gl.constexpr):
    """(first, behind the last, step) of a program's items, and `pieces_of` where tiles are dealt in slices.

    Without DEAL all are whole, and numbered as tiles: no division, which would be done before anything is loaded.
    """
    if DEAL:
        items, pieces, begin, end = pieces_of(k_steps, tiles, dealt)
        first, last, by = 0, items, 1
    else:
        items, pieces, begin, end = 0, 0, 0, 0
        first, last, by = gl.program_id(0), tiles, gl.num_programs(0)
    return first, last, by, items, pieces, begin, end


@gluon.jit
def _item(number, tiles, k_steps, dealt, items, pieces, begin, end, DEAL: gl.constexpr):
    if DEAL:
        tile, k0, k1 = item(number, tiles, k_steps, dealt, items, pieces, begin, end)
    else:
        tile = number
        k0 = 0
        k1 = k_steps
    return tile, k0, k1


@gluon.jit
def _operands(a_bufs, b_bufs, stage, WG: gl.constexpr, CONSUMERS: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr):
    """(rows, k) and (k, cols) views of a stage."""
    a = a_bufs.index(stage * CONSUMERS + WG)
    b = b_bufs.index(stage)
    if not A_K:
        a = a.permute((1, 0))
    if B_K:
        b = b.permute((1, 0))
    return a, b


@gluon.jit
def _share(acc, tile, k0, shape, dealt, partials, counters, WG: gl.constexpr, CONSUMERS: gl.constexpr):
    """Leave the sums of a shared tile, and if all are there add them up: (sums, whether they are complete)."""
    _, _, k_steps, tiles_m, tiles_n = shape
    tile -= tiles_m * tiles_n - dealt
    LAYOUT: gl.constexpr = acc.type.layout
    BN: gl.constexpr = acc.shape[1]
    slot = own_slot(gl.program_id(0), k0) * CONSUMERS + WG
    gl.store(partial(partials, slot, ROWS, BN, LAYOUT), acc)
    first = program_of(tile * k_steps, dealt * k_steps)
    last = program_of(tile * k_steps + k_steps - 1, dealt * k_steps)
    complete = count(counters + tile * CONSUMERS + WG, 8 + WG) == last - first
    if complete:
        acc = gl.full(acc.shape, 0.0, gl.float32, LAYOUT)
        for p in range(first, last + 1):
            slot = slot_of(p, first) * CONSUMERS + WG
            acc += gl.load(partial(partials, slot, ROWS, BN, LAYOUT), cache_modifier=".cg")
        gl.store(counters + tile * CONSUMERS + WG, 0)
    return acc, complete


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, GROUP: gl.constexpr,
    BN: gl.constexpr, CHUNKS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, DIRECT: gl.constexpr,
    WIDE: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, out_bufs = bufs
    full, empty = bars
    M, N, k_steps, tiles_m, tiles_n = shape
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 256 // a_bufs.dtype.primitive_bitwidth])
    BM: gl.constexpr = ROWS * CONSUMERS
    stage = 0
    phase = 0
    zero = gl.full([ROWS, BN], 0.0, gl.float32, ACC)
    dtype: gl.constexpr = out.dtype.element_ty
    if not WIDE:
        packed = pack(zero, dtype)
        row = 0 + NOWHERE
        col = 0
    first, last, by, items, pieces, begin, end = _items(k_steps, tiles_m * tiles_n, dealt, DEAL)
    for number in range(first, last, by):
        tile, k0, k1 = _item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end, DEAL)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        mbarrier.wait(full.index(stage), phase)
        a, b = _operands(a_bufs, b_bufs, stage, WG, CONSUMERS, A_K, B_K)
        acc = warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
        if not WIDE:
            write_packed(packed, out_bufs, WG, out_desc, out, row, col, M, N, ACC, CHUNKS, dtype, DIRECT)
        acc = warpgroup_mma_wait(1, deps=[acc])  # waits for nothing
        stage, phase = advance(stage, phase, STAGES)
        for _ in range(k0 + 1, k1):
            mbarrier.wait(full.index(stage), phase)
            a, b = _operands(a_bufs, b_bufs, stage, WG, CONSUMERS, A_K, B_K)
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        row_now = tile_m * BM + WG * ROWS
        if DEAL:  # noqa: SIM102
            if k1 - k0 < k_steps:
                acc, complete = _share(acc, tile, k0, shape, dealt, partials, counters, WG, CONSUMERS)
                row_now = gl.where(complete, row_now, NOWHERE)
        col_now = tile_n * BN
        x = activate(add_bias(acc, bias, col_now, N, BIAS), ACTIVATION)
        if WIDE:
            store_direct(x, out, row_now, col_now, M, N, N)
        else:
            packed = pack(x, dtype)
            row = row_now
            col = col_now
    if not WIDE:
        write_packed(packed, out_bufs, WG, out_desc, out, row, col, M, N, ACC, CHUNKS, dtype, DIRECT)
        if not DIRECT:
            tma.store_wait(0)


@gluon.jit
def _producer(
    bufs, bars, a_desc, b_desc, shape, dealt,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr, GROUP: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, _ = bufs
    full, empty = bars
    _, _, k_steps, tiles_m, tiles_n = shape
    BM: gl.constexpr = ROWS * CONSUMERS
    BYTES: gl.constexpr = (BM + BN) * BK * a_desc.dtype.primitive_bitwidth // 8
    stage = 0
    phase = 0
    first, last, by, items, pieces, begin, end = _items(k_steps, tiles_m * tiles_n, dealt, DEAL)
    for number in range(first, last, by):
        tile, k0, k1 = _item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end, DEAL)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BM
        col = tile_n * BN
        for step in range(k0, k1):
            k = step * BK
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for i in gl.static_range(CONSUMERS):
                if A_K:
                    tma_load(a_desc, [row + i * ROWS, k], full.index(stage), a_bufs.index(stage * CONSUMERS + i))
                else:
                    tma_load(a_desc, [k, row + i * ROWS], full.index(stage), a_bufs.index(stage * CONSUMERS + i))
            if B_K:
                tma_load(b_desc, [col, k], full.index(stage), b_bufs.index(stage))
            else:
                tma_load(b_desc, [k, col], full.index(stage), b_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["out", "bias", "M", "N", "k_steps", "tiles_m", "tiles_n", "dealt", "counters"])
def gemm_kernel(
    a_desc, b_desc, out_desc, out, bias, partials, counters, M, N, k_steps, tiles_m, tiles_n, dealt,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, A_K: gl.constexpr,
    B_K: gl.constexpr, GROUP: gl.constexpr, CHUNKS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    DIRECT: gl.constexpr, DEAL: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out is (M, N), contiguous; k_steps >= 1. DIRECT: `out` is written from registers, `out_desc` is unused."""
    dtype: gl.constexpr = a_desc.dtype
    WIDE: gl.constexpr = out.dtype.element_ty == gl.float32
    OUT_BUFS: gl.constexpr = 1 if DIRECT else CONSUMERS
    OUT_ROWS: gl.constexpr = 8 if DIRECT else ROWS
    OUT_COLS: gl.constexpr = 64 if DIRECT else BN // CHUNKS
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    OUT_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT_ROWS, OUT_COLS], out_desc.dtype)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [OUT_BUFS, OUT_ROWS, OUT_COLS], OUT_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    bufs = (a_bufs, b_bufs, out_bufs)
    bars = (full, empty)
    shape = (M, N, k_steps, tiles_m, tiles_n)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters, CONSUMERS, STAGES, A_K,
                         B_K, GROUP, BN, CHUNKS, BIAS, ACTIVATION, DIRECT, WIDE, DEAL)),
            (_consumer, (1, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters, CONSUMERS, STAGES, A_K,
                         B_K, GROUP, BN, CHUNKS, BIAS, ACTIVATION, DIRECT, WIDE, DEAL)),
            (_producer, (bufs, bars, a_desc, b_desc, shape, dealt, CONSUMERS, STAGES, A_K, B_K, GROUP, BN, BK, DEAL)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (_consumer, (0, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters, CONSUMERS, STAGES, A_K,
                         B_K, GROUP, BN, CHUNKS, BIAS, ACTIVATION, DIRECT, WIDE, DEAL)),
            (_consumer, (1, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters, CONSUMERS, STAGES, A_K,
                         B_K, GROUP, BN, CHUNKS, BIAS, ACTIVATION, DIRECT, WIDE, DEAL)),
            (_consumer, (2, bufs, bars, out_desc, out, bias, shape, dealt, partials, counters, CONSUMERS, STAGES, A_K,
                         B_K, GROUP, BN, CHUNKS, BIAS, ACTIVATION, DIRECT, WIDE, DEAL)),
            (_producer, (bufs, bars, a_desc, b_desc, shape, dealt, CONSUMERS, STAGES, A_K, B_K, GROUP, BN, BK, DEAL)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
