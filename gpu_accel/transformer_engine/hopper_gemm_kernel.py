"""FP8 matrix product for Hopper (sm_90a) in Gluon: out (M, N) = A (M, K) B (N, K)^T with scales, sums in float32.

Hopper's tensor cores sum products of eight-bit floats with about 14 bits. So sums leave the tensor core every 128 of K
and are added up in float32 registers, where the scales of blocks are multiplied in as well. A consumer holds two
accumulators of 64 x 128 (128 registers) and one partial sum (64): the additions of one consumer run under the products
of the other.

    consumers  2 warpgroups of 4 warps, 240 registers; each owns 64 rows of a tile of 128 x 256 (or of 128 x 128, with
               one accumulator)
    producer   1 warp, 24 registers: issues every TMA load into a ring of STAGES slices of A and B, 128 of K each

    consumer 0 | half 0 . add . half 1 . add | half 0 . add ...
    consumer 1 |      half 0 . add . half 1 . add | ...          (tensor core: 0 1 0 1 ...)

The first slice of a tile goes straight into the accumulators; under it the packed tile before is written (see
thunderkittens/gemm_kernel.py, whose ring and epilogue this shares). What can happen to sums on their way out: scales of
tensors and rows, bias, activation, the largest magnitude noted, a scale and rounding to fp8; or they are added to a
float32 result that is there already.

GROUPED 1: B is a stack of matrices, and each 128 rows of A are multiplied with the one that `groups` names (a mixture
of experts); rows of a negative group become 0. GROUPED 2: groups share out K: the result is a stack of products, each
over the slices of K from groups[g] to groups[g + 1] (gradients of experts' weights).

Barriers (mbarrier): full one a stage, arrived on by TMA, and with STAGED scales by the 32 threads of the producer too,
whose copies of scales are there; empty one a stage, arrived on by both consumers.

Sources: FP8 formats for deep learning, arXiv 2209.05433; two-level sums: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import cp_async, tma_load
from gpu_accel.thunderkittens.gemm_device import (
    NOWHERE,
    activate,
    add_bias,
    add_direct,
    advance,
    count,
    item,
    note_largest,
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

# Run-time scalars travel in tuples:
#   shape  = (M, N, k_steps, tiles_m, tiles_n)
#   scales = (scale_a, scale_b, sa_m, sa_k, sb_n, sb_k): where they are, and strides by row, by 128 of K
#   ends   = (bias, scale_out, largest): what the epilogue reads and writes beside `out`
#   stack  = (groups, sb_g): of each 128 rows the matrix of B; the stride of its scales. Of GROUPED 2 the first slice of
#            each matrix of the result and one more; its rows


@gluon.jit
def _row_scale(scale, rows, limit, stride, k, ROWS: gl.constexpr):
    """Scales of some rows at slice k of K, ROWS of them sharing one; 0 for rows behind the last."""
    return gl.load(scale + (rows // ROWS).to(gl.int64) * stride + k, mask=rows < limit, other=0.0)


@gluon.jit
def _block_scales(rows, col, step, shape, scales, PARTS: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr,
                  ACC: gl.constexpr):  # fmt: skip
    """Scales at slice `step` of K: (of the rows, of the columns of half 0, of half 1)."""
    M, N, _, _, _ = shape
    scale_a, scale_b, sa_m, sa_k, sb_n, sb_k = scales
    sa = _row_scale(scale_a, rows, M, sa_m, step * sa_k, ROWS_A)
    if ROWS_B == 1:  # side by side, and there up to a multiple of 128: neither masks nor addresses take registers
        sb0 = gl.load(scale_b + step * sb_k + col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, ACC)))
        return sa, sb0, sb0
    else:
        sb = scale_b + (col // BLOCK).to(gl.int64) * sb_n + step * sb_k
        sb0 = gl.load(sb)
        return sa, sb0, gl.load(sb + sb_n, mask=col + BLOCK < N, other=0.0) if PARTS == 2 else sb0


@gluon.jit
def _staged_rows(bufs, stage, WG: gl.constexpr, ACC: gl.constexpr):
    """Scales of rows that came with a stage."""
    _, _, _, sa_bufs, _ = bufs
    return sa_bufs.index(stage).slice(WG * ROWS, ROWS).load(gl.SliceLayout(1, ACC))


@gluon.jit
def _staged_columns(bufs, stage, col, step, shape, scales, PART: gl.constexpr, ROWS_B: gl.constexpr,
                    ACC: gl.constexpr):  # fmt: skip
    """Scales of the columns of a half: that came with a stage (PART is 0), or one of a square, from memory."""
    _, _, _, _, sb_bufs = bufs
    _, N, _, _, _ = shape
    _, scale_b, _, _, sb_n, sb_k = scales
    if ROWS_B == 1:
        FOURS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [16], [32], [64]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [BLOCK]
        )
        fours = sb_bufs.index(stage).load(FOURS)
        sb = gl.reshape(gl.permute(gl.reshape(fours, [8, 4, 2, 2]), (0, 2, 1, 3)), [BLOCK])
        return gl.convert_layout(sb, gl.SliceLayout(0, ACC), assert_trivial=True)
    else:
        sb = scale_b + (col // BLOCK).to(gl.int64) * sb_n + step * sb_k
        return gl.load(sb + sb_n, mask=col + BLOCK < N, other=0.0) if PART == 1 else gl.load(sb)


@gluon.jit
def _stage_scales(bufs, barrier, stage, row, col, step, scales, ROWS_B: gl.constexpr):
    """Ask for the scales of a stage: 128 of rows, and of columns where each has its own. Each of 32 threads arrives
    when what it asked for is there; the barrier counts them."""
    _, _, _, sa_bufs, sb_bufs = bufs
    scale_a, scale_b, _, sa_k, _, sb_k = scales
    at = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [1], [0]))
    cp_async(sa_bufs.index(stage), gl.multiple_of(scale_a + gl.multiple_of(step * sa_k + row, 16), 16) + at)
    if ROWS_B == 1:
        cp_async(sb_bufs.index(stage), gl.multiple_of(scale_b + gl.multiple_of(step * sb_k + col, 16), 16) + at)
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def _scaled(part, sa, sb, ROWS_B: gl.constexpr):
    """A product of 128 of K times the scales of its blocks."""
    if ROWS_B == 1:
        return part * sa[:, None] * sb[None, :]
    else:
        return part * (sa * sb)[:, None]


@gluon.jit
def _slices_of(row, k_steps, stack):
    """(row within its matrix of the result, first slice of K, one past the last, -1 where there is none, else 0)."""
    starts, height = stack
    matrix = row // height
    k0 = gl.load(starts + matrix)
    k1 = gl.load(starts + matrix + 1)
    group = gl.where(k1 > k0, 0, -1)
    k0 = gl.minimum(k0, k_steps - 1)
    return row - matrix * height, k0, gl.maximum(k1, k0 + 1), group  # one slice at least; its sums are not used then


@gluon.jit
def _finished(acc, rows, col, ends, shape, scales, group, BLOCKED: gl.constexpr, ROW_A: gl.constexpr,
              ROW_B: gl.constexpr, GROUPED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
              SCALE_OUT: gl.constexpr, LARGEST: gl.constexpr):  # fmt: skip
    """An accumulator times the scales that do not change along K, then bias, activation and what belongs to fp8."""
    M, N, _, _, _ = shape
    scale_a, scale_b, sa_m, _, _, _ = scales
    bias, scale_out, largest = ends
    if not BLOCKED:
        if ROW_A:  # noqa: SIM108 - branches at compile time
            acc = acc * _row_scale(scale_a, rows, M, sa_m, 0, 1)[:, None]
        else:
            acc = acc * gl.load(scale_a)
        if ROW_B:
            cols = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
            acc = acc * gl.load(scale_b + cols, mask=cols < N, other=0.0)[None, :]
        else:
            acc = acc * gl.load(scale_b)
    if GROUPED == 1 and BIAS:
        bias += gl.maximum(group, 0).to(gl.int64) * N
    acc = activate(add_bias(acc, bias, col, N, BIAS), ACTIVATION)
    if GROUPED:
        acc = gl.where(group < 0, 0.0, acc)
    if LARGEST:
        note_largest(acc, rows, M, largest)
    if SCALE_OUT:
        acc = acc * gl.load(scale_out)
    return acc


@gluon.jit
def _share(acc0, acc1, tile, k0, shape, dealt, partials, counters, WG: gl.constexpr, PARTS: gl.constexpr):
    """Leave the sums of a shared tile, and if all are there add them up: (sums, sums, whether they are complete)."""
    _, _, k_steps, tiles_m, tiles_n = shape
    tile -= tiles_m * tiles_n - dealt
    LAYOUT: gl.constexpr = acc0.type.layout
    slot = (own_slot(gl.program_id(0), k0) * 2 + WG) * 2
    gl.store(partial(partials, slot, ROWS, BLOCK, LAYOUT), acc0)
    if PARTS == 2:
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
            if PARTS == 2:
                acc1 += gl.load(partial(partials, slot + 1, ROWS, BLOCK, LAYOUT), cache_modifier=".cg")
        gl.store(counters + tile * 2 + WG, 0)
    return acc0, acc1, complete


@gluon.jit
def _write(
    packed0, packed1, out_bufs, out_desc, out, row, col, shape,
    WG: gl.constexpr, PARTS: gl.constexpr, ACC: gl.constexpr, dtype: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """The halves of a packed tile."""
    M, N, _, _, _ = shape
    write_packed(packed0, out_bufs, WG, out_desc, out, row, col, M, N, ACC, 1, dtype, DIRECT)
    if PARTS == 2:
        write_packed(packed1, out_bufs, WG, out_desc, out, row, col + BLOCK, M, N, ACC, 1, dtype, DIRECT)


@gluon.jit
def _write_wide(acc, out, row, col, shape, ACCUMULATE: gl.constexpr):
    """Half a tile in float32, from registers."""
    M, N, _, _, _ = shape
    if ACCUMULATE:
        add_direct(acc, out, row, col, M, N, N)
    else:
        store_direct(acc, out, row, col, M, N, N)


@gluon.jit
def _multiply(a, next_a, b_bufs, stage, next_stage, acc, PART: gl.constexpr, PARTS: gl.constexpr, EVERY: gl.constexpr,
              USE_ACC: gl.constexpr):  # fmt: skip
    """Start 64 rows times 128 columns of a slice, or of two (EVERY = 2) in one sum."""
    acc = warpgroup_mma(a, b_bufs.index(stage * PARTS + PART).permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
    if EVERY == 2:
        acc = warpgroup_mma(next_a, b_bufs.index(next_stage * PARTS + PART).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _consumer(
    WG: gl.constexpr, bufs, bars, out_desc, out, ends, shape, scales, stack, dealt, partials, counters,
    PARTS: gl.constexpr, EVERY: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BLOCKED: gl.constexpr,
    ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_OUT: gl.constexpr, LARGEST: gl.constexpr, GROUPED: gl.constexpr,
    ACCUMULATE: gl.constexpr, DIRECT: gl.constexpr, WIDE: gl.constexpr, DEAL: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    # no `_`: a run-time branch below has one of another type
    a_bufs, b_bufs, out_bufs, sa_bufs, sb_bufs = bufs
    EARLY: gl.constexpr = BLOCKED and not STAGED
    full, empty, opened = bars
    M, N, k_steps, tiles_m, tiles_n = shape
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    dtype: gl.constexpr = out.dtype.element_ty
    zero = gl.full([ROWS, BLOCK], 0.0, gl.float32, ACC)
    stage = 0
    phase = 0
    group = 0
    if not WIDE:
        packed0 = pack(zero, dtype)
        packed1 = packed0
        row = 0 + NOWHERE
        col = 0
    items, pieces, begin, end = pieces_of(k_steps, tiles_m * tiles_n, dealt)
    for number in range(items):
        tile, k0, k1 = item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row_now = (tile_m * 2 + WG) * ROWS
        col_now = tile_n * (BLOCK * PARTS)
        rows = row_now + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        own = scales
        if GROUPED == 2:
            row_in, k0, k1, group = _slices_of(row_now, k_steps, stack)
            rows = row_in + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        if GROUPED == 1:
            scale_a, scale_b, sa_m, sa_k, sb_n, sb_k = scales
            groups, sb_g = stack
            group = gl.load(groups + tile_m.to(gl.int64) * (2 * ROWS))
            k1 = gl.where(group < 0, k0 + 1, k1)  # one slice, and its sums are not used
            own = (scale_a, scale_b + gl.maximum(group, 0).to(gl.int64) * sb_g, sa_m, sa_k, sb_n, sb_k)
        if EARLY:
            sa, sb0, sb1 = _block_scales(rows, col_now, k0, shape, own, PARTS, ROWS_A, ROWS_B, ACC)
        mbarrier.wait(full.index(stage), phase)
        a = a_bufs.index(stage * 2 + WG)
        if STAGED:
            sa = _staged_rows(bufs, stage, WG, ACC)
            sb0 = _staged_columns(bufs, stage, col_now, k0, shape, own, 0, ROWS_B, ACC)
            if PARTS == 2:
                sb1 = _staged_columns(bufs, stage, col_now, k0, shape, own, 1, ROWS_B, ACC)
        acc0 = _multiply(a, a, b_bufs, stage, stage, zero, 0, PARTS, 1, False)
        if PARTS == 2:
            acc1 = _multiply(a, a, b_bufs, stage, stage, zero, 1, PARTS, 1, False)
        if not WIDE:
            _write(packed0, packed1, out_bufs, out_desc, out, row, col, shape, WG, PARTS, ACC, dtype, DIRECT)
        if PARTS == 2:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(0, deps=[acc0])
        mbarrier.arrive(empty.index(stage), count=1)
        if BLOCKED:
            acc0 = _scaled(acc0, sa, sb0, ROWS_B)
            if PARTS == 2:
                acc1 = _scaled(acc1, sa, sb1, ROWS_B)
        if EARLY:
            after = gl.minimum(k0 + 1, k1 - 1)
            sa, sb0, sb1 = _block_scales(rows, col_now, after, shape, own, PARTS, ROWS_A, ROWS_B, ACC)
        stage, phase = advance(stage, phase, STAGES)
        first = k0 + 1
        if EVERY == 2:  # noqa: SIM102 - a run-time branch inside a compile-time one
            if (k1 - k0) % 2 == 0:  # the other slices come in pairs
                mbarrier.wait(full.index(stage), phase)
                a = a_bufs.index(stage * 2 + WG)
                acc0 = _multiply(a, a, b_bufs, stage, stage, acc0, 0, PARTS, 1, True)
                if PARTS == 2:
                    acc1 = _multiply(a, a, b_bufs, stage, stage, acc1, 1, PARTS, 1, True)
                    acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                else:
                    acc0 = warpgroup_mma_wait(0, deps=[acc0])
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
                first += 1
        for step in range(first, k1, EVERY):
            if EARLY:
                # the next slice's are on their way while this slice's are used: nothing waits for memory
                ta = sa
                tb0 = sb0
                tb1 = sb1
                after = gl.minimum(step + 1, k1 - 1)
                sa, sb0, sb1 = _block_scales(rows, col_now, after, shape, own, PARTS, ROWS_A, ROWS_B, ACC)
            mbarrier.wait(full.index(stage), phase)
            later, later_phase = stage, phase
            if EVERY == 2:
                later, later_phase = advance(stage, phase, STAGES)
                mbarrier.wait(full.index(later), later_phase)
            a = a_bufs.index(stage * 2 + WG)
            next_a = a_bufs.index(later * 2 + WG)
            if STAGED:
                # Before the product, which all four warps must have begun for it to end: so every warp has asked for
                # its scales when one thread says that the stage may be filled anew.
                ta = _staged_rows(bufs, stage, WG, ACC)
                tb0 = _staged_columns(bufs, stage, col_now, step, shape, own, 0, ROWS_B, ACC)
                if PARTS == 2:
                    tb1 = _staged_columns(bufs, stage, col_now, step, shape, own, 1, ROWS_B, ACC)
            part = _multiply(a, next_a, b_bufs, stage, later, zero, 0, PARTS, EVERY, False)
            if PARTS == 2:
                part = warpgroup_mma_wait(0, deps=[part])
            else:
                part, acc0 = warpgroup_mma_wait(0, deps=[part, acc0])
                mbarrier.arrive(empty.index(stage), count=1)
                if EVERY == 2:
                    mbarrier.arrive(empty.index(later), count=1)
            if BLOCKED:
                acc0 += _scaled(part, ta, tb0, ROWS_B)
            else:
                acc0 += part
            if PARTS == 2:
                # Completed long ago. It opens a block, and with the operand of the next wait that keeps the additions
                # above the next product, whose partial sum then takes the registers of this one.
                mbarrier.wait(opened, 0)
                part = _multiply(a, next_a, b_bufs, stage, later, zero, 1, PARTS, EVERY, False)
                part, acc0 = warpgroup_mma_wait(0, deps=[part, acc0])
                mbarrier.arrive(empty.index(stage), count=1)
                if EVERY == 2:
                    mbarrier.arrive(empty.index(later), count=1)
                if BLOCKED:
                    acc1 += _scaled(part, ta, tb1, ROWS_B)
                else:
                    acc1 += part
            stage, phase = advance(later, later_phase, STAGES)
        if DEAL:  # noqa: SIM102 - a run-time branch inside a compile-time one
            if k1 - k0 < k_steps:
                if PARTS == 2:
                    acc0, acc1, complete = _share(acc0, acc1, tile, k0, shape, dealt, partials, counters, WG, PARTS)
                else:
                    acc0, _, complete = _share(acc0, acc0, tile, k0, shape, dealt, partials, counters, WG, PARTS)
                row_now = gl.where(complete, row_now, NOWHERE)
                rows = gl.where(complete, rows, NOWHERE)  # parts of sums are nobody's largest
        acc0 = _finished(acc0, rows, col_now, ends, shape, own, group, BLOCKED, ROW_A, ROW_B, GROUPED, BIAS, ACTIVATION,
                         SCALE_OUT, LARGEST)  # fmt: skip
        if WIDE:
            _write_wide(acc0, out, row_now, col_now, shape, ACCUMULATE)
        else:
            packed0 = pack(acc0, dtype)
            row = row_now
            col = col_now
        if PARTS == 2:
            col1 = col_now + BLOCK
            acc1 = _finished(acc1, rows, col1, ends, shape, own, group, BLOCKED, ROW_A, ROW_B, GROUPED, BIAS,
                             ACTIVATION, SCALE_OUT, LARGEST)  # fmt: skip
            if WIDE:
                _write_wide(acc1, out, row_now, col1, shape, ACCUMULATE)
            else:
                packed1 = pack(acc1, dtype)
    if not WIDE:
        _write(packed0, packed1, out_bufs, out_desc, out, row, col, shape, WG, PARTS, ACC, dtype, DIRECT)
        if not DIRECT:
            tma.store_wait(0)


@gluon.jit
def _producer(bufs, bars, a_desc, b_desc, shape, scales, stack, dealt, PARTS: gl.constexpr, STAGES: gl.constexpr,
              GROUP: gl.constexpr, GROUPED: gl.constexpr, ROWS_B: gl.constexpr, STAGED: gl.constexpr):  # fmt: skip
    a_bufs, b_bufs, _, _, _ = bufs
    full, empty, _ = bars
    _, N, k_steps, tiles_m, tiles_n = shape
    stage = 0
    phase = 0
    items, pieces, begin, end = pieces_of(k_steps, tiles_m * tiles_n, dealt)
    for number in range(items):
        tile, k0, k1 = item(number, tiles_m * tiles_n, k_steps, dealt, items, pieces, begin, end)
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * (2 * ROWS)
        col = tile_n * (BLOCK * PARTS)
        if GROUPED == 2:
            row, k0, k1, _ = _slices_of(row, k_steps, stack)
        if GROUPED == 1:
            groups, _ = stack
            group = gl.load(groups + row.to(gl.int64))
            col += gl.maximum(group, 0) * N
            k1 = gl.where(group < 0, k0 + 1, k1)
        for step in range(k0, k1):
            k = step * BLOCK
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if STAGED:
                _stage_scales(bufs, full.index(stage), stage, row, col, step, scales, ROWS_B)
            mbarrier.expect(full.index(stage), (2 * ROWS + PARTS * BLOCK) * BLOCK)
            for i in gl.static_range(2):
                tma_load(a_desc, [row + i * ROWS, k], full.index(stage), a_bufs.index(stage * 2 + i))
            for i in gl.static_range(PARTS):
                tma_load(b_desc, [col + i * BLOCK, k], full.index(stage), b_bufs.index(stage * PARTS + i))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit(
    do_not_specialize=[
        "scale_a", "scale_b", "out", "bias", "scale_out", "largest", "groups", "counters", "dealt", "M", "N", "k_steps",
        "tiles_m", "tiles_n", "sa_m", "sa_k", "sb_n", "sb_k", "sb_g",
    ]
)  # fmt: skip
def fp8_gemm_kernel(
    a_desc, b_desc, out_desc, out, bias, scale_out, largest, groups, scale_a, scale_b, partials, counters,
    M, N, k_steps, tiles_m, tiles_n, dealt, sb_g, sa_m, sa_k, sb_n, sb_k,
    PARTS: gl.constexpr, EVERY: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BLOCKED: gl.constexpr,
    ROW_A: gl.constexpr, ROW_B: gl.constexpr, ROWS_A: gl.constexpr, ROWS_B: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_OUT: gl.constexpr, LARGEST: gl.constexpr, GROUPED: gl.constexpr,
    ACCUMULATE: gl.constexpr, DIRECT: gl.constexpr, DEAL: gl.constexpr, STAGED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """a_desc in boxes of 64 x 128, b_desc of 128 x 128; out (M, N), contiguous, fp8, 16-bit or float32; k_steps >= 1.

    BLOCKED: scales change every 128 of K; `ROWS_A` rows of A and `ROWS_B` of B share one (with ROWS_B = 1 scales of
    neighbours lie side by side, N of them rounded up to 128, and PARTS must be 1). They are read a slice ahead into
    registers; STAGED (ROWS_A = 1): those of rows, and of columns with ROWS_B = 1, in the order of threads, come with
    the slice that they belong to, through shared memory, and lie side by side up to a multiple of 128. Else ROW_A,
    ROW_B: one a row, or one in all. LARGEST: `largest` (int32) is raised to the bits of the largest magnitude before
    `scale_out`. ACCUMULATE: added to `out`, float32. DIRECT: `out` is written from registers, `out_desc` is unused
    (float32). PARTS: halves of 128 columns. EVERY: slices of K that one partial sum has.
    """
    WIDE: gl.constexpr = out.dtype.element_ty == gl.float32
    OUT_BUFS: gl.constexpr = 1 if DIRECT else 2
    OUT_ROWS: gl.constexpr = 8 if DIRECT else ROWS
    gl.static_assert(ROWS_B != 1 or not BLOCKED or PARTS == 1)
    gl.static_assert(EVERY == 1 or not BLOCKED)
    gl.static_assert(not STAGED or (BLOCKED and ROWS_A == 1))
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2] + a_desc.block_shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PARTS] + b_desc.block_shape, b_desc.layout)
    OUT_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT_ROWS, BLOCK], out_desc.dtype)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [OUT_BUFS, OUT_ROWS, BLOCK], OUT_LAYOUT)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    opened = empty
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33 if STAGED else 1)  # with 32 threads that bring scales
        mbarrier.init(empty.index(i), count=2)
    if PARTS == 2:
        # Only wide tiles wait for it. In narrow ones it would be dead from here on, and its place be given to others;
        # memory that still is a barrier may be written by the hardware at any time: scales there became NaN.
        opened = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(opened, count=1)
        mbarrier.arrive(opened, count=1)  # nobody touches it again
    sa_bufs = out_bufs
    sb_bufs = out_bufs
    if STAGED:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
        sb_bufs = sa_bufs
        if ROWS_B == 1:
            sb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], FLAT)
    bufs = (a_bufs, b_bufs, out_bufs, sa_bufs, sb_bufs)
    bars = (full, empty, opened)
    shape = (M, N, k_steps, tiles_m, tiles_n)
    scales = (scale_a, scale_b, sa_m, sa_k, sb_n, sb_k)
    ends = (bias, scale_out, largest)
    stack = (groups, sb_g)
    # A constexpr stored in a tuple under a name stops being one, hence the argument lists written out.
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, out_desc, out, ends, shape, scales, stack, dealt, partials, counters, PARTS, EVERY,
                     STAGES, GROUP, BLOCKED, ROW_A, ROW_B, ROWS_A, ROWS_B, BIAS, ACTIVATION, SCALE_OUT, LARGEST,
                     GROUPED, ACCUMULATE, DIRECT, WIDE, DEAL, STAGED)),
        (_consumer, (1, bufs, bars, out_desc, out, ends, shape, scales, stack, dealt, partials, counters, PARTS, EVERY,
                     STAGES, GROUP, BLOCKED, ROW_A, ROW_B, ROWS_A, ROWS_B, BIAS, ACTIVATION, SCALE_OUT, LARGEST,
                     GROUPED, ACCUMULATE, DIRECT, WIDE, DEAL, STAGED)),
        (_producer, (bufs, bars, a_desc, b_desc, shape, scales, stack, dealt, PARTS, STAGES, GROUP, GROUPED, ROWS_B,
                     STAGED)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
