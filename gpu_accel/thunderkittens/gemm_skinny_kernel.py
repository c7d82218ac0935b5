"""Products with few rows, or few tiles, for Hopper (sm_90a) in Gluon: reading B once, at the speed of memory.

out (M, N) = activation(X (M, K) W + bias): W is the M operand of wgmma (64 of its columns, twice with HALVES = 2, a
tile), the few rows of X are its N operand, so a single row is not padded to 64. The work is one line of
tiles * k_steps slices that is cut into equal pieces, one a program ("stream-K", arXiv 2301.03598), so that every SM
reads as much as any other; where tiles of 64 columns are as many as SMs, or nearly, a piece is a tile and nothing is
shared:

    program 0 | tile 0 ......... tile 1 .. |      a program that has all slices of a tile writes its results; of
    program 1 | .. tile 1 ...... tile 2 .. |      programs that share a tile each leaves its sums in `partials`, and the
    program 2 | .... tile 2 .. tile 3 .... |      last to come adds all, in the order of programs, and writes.

Nobody waits for another program, results don't depend on who comes last, and counters are left at 0.

    consumer   1 warpgroup, HALVES accumulators of 64 x BM;     producer   1 warp: TMA loads, STAGES slices ahead

A slice is SUB boxes of 128 bytes of K. A box of W has BOX rows: with few rows and many boxes along K, what is asked of
memory at any time lies in long pieces of few rows, not in 128 bytes of many.

Eight-bit operands are summed in float32 every 128 of K, with scales as in transformer_engine/hopper_gemm_kernel.py.

EARLY: nothing waits for memory that could have been asked before. All stages are asked for before the partitions start;
scales and the bias before the slices of a tile; of blocks, all scales of X go to shared memory at the start, from where
each thread reads those of its rows. Pieces are dealt without dividing: the first `extra` programs have one slice more.

Barriers (mbarrier): full one a stage, arrived on by TMA; empty one a stage, arrived on by the consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import reinterpret, tma_load

from .gemm_device import (
    activate,
    advance,
    count,
    first_slice,
    own_slot,
    partial,
    previous,
    program_of,
    slot_of,
)

ROWS = gl.constexpr(64)  # columns of W, rows of an accumulator
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Run-time scalars travel in tuples:
#   shape  = (M, N, k_steps, tiles, tiles_m, k_blocks): tile number = (column of W) * tiles_m + (block of BM rows of X)
#   scales = (scale_x, scale_w, sx_m, sx_k, sw_n, sw_k), as in hopper_gemm_kernel.py
#   outputs = (out, bias, partials, counters)
#   share = (base, extra): slices of a program, and how many programs have one more (EARLY)


@gluon.jit
def _begin(program, slices, share, EARLY: gl.constexpr):
    """Where the piece of `program` begins."""
    if EARLY:
        base, extra = share
        return program * base + gl.minimum(program, extra)
    else:
        return first_slice(program, slices)


@gluon.jit
def _program_of(unit, slices, share, EARLY: gl.constexpr):
    """The program whose piece has slice `unit`."""
    if EARLY:
        base, extra = share
        longer = extra * (base + 1)
        return gl.where(unit < longer, unit // (base + 1), extra + (unit - longer) // gl.maximum(base, 1))
    else:
        return program_of(unit, slices)


@gluon.jit
def _factors_of_sums(row0, m0, shape, scales, ACC: gl.constexpr, BM: gl.constexpr, SCALED: gl.constexpr,
                     ROW_X: gl.constexpr, ROW_W: gl.constexpr):  # fmt: skip
    """Scales of a tile that do not change along K: (of BM rows of X, of 64 columns of W), if it has some."""
    M, N, _, _, _, _ = shape
    scale_x, scale_w, sx_m, _, sw_n, _ = scales
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, ACC))
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    x = m
    w = n
    if SCALED:
        if ROW_X:  # noqa: SIM108 - branches at compile time
            x = gl.load(scale_x + m * sx_m, mask=m < M, other=0.0)
        else:
            x = gl.load(scale_x)
        if ROW_W:  # noqa: SIM108
            w = gl.load(scale_w + n * sw_n, mask=n < N, other=0.0)
        else:
            w = gl.load(scale_w)
    return x, w


@gluon.jit
def _bias_of_sums(row0, N, bias, ACC: gl.constexpr, BIAS: gl.constexpr):
    """The bias of 64 columns of W, if there is one."""
    n = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    if BIAS:
        return gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)
    else:
        return n


@gluon.jit
def _finish(acc, factors, added, row0, m0, shape, out, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
            SCALED: gl.constexpr, ROW_X: gl.constexpr, ROW_W: gl.constexpr):  # fmt: skip
    """Scales, bias and activation of 64 columns of W by BM rows of X; then out, whose rows are those of X."""
    M, N, _, _, _, _ = shape
    if SCALED:
        x, w = factors
        acc = acc * (x[None, :] if ROW_X else x)
        acc = acc * (w[:, None] if ROW_W else w)
    if BIAS:
        acc += added[:, None]
    # neighbours along N go to one thread, so that whole lines are written
    OUT: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    x = gl.convert_layout(activate(acc, ACTIVATION).to(out.dtype.element_ty), OUT)
    n = row0 + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, OUT))
    m = m0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, OUT))
    pointers = out + m.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(pointers, x, mask=(m < M)[None, :] & (n < N)[:, None])


@gluon.jit
def _operand(w_bufs, at, W_K: gl.constexpr):
    """64 columns of W by a box along K, with the columns first."""
    w = w_bufs.index(at)
    if not W_K:
        w = w.permute((1, 0))
    return w


@gluon.jit
def _factors(scales, tile_w, m, M, block, HALVES: gl.constexpr):
    """Scales of rows of X times that of a tile of W, at 128 of K number `block`; 128x128 has two tiles of 64."""
    scale_x, scale_w, sx_m, sx_k, sw_n, sw_k = scales
    factor = gl.load(scale_x + m.to(gl.int64) * sx_m + block * sx_k, mask=m < M, other=0.0)
    return factor * gl.load(scale_w + (tile_w * HALVES // 2).to(gl.int64) * sw_n + block * sw_k)


@gluon.jit
def _scale_of(scales, tile_w, block, HALVES: gl.constexpr):
    """The scale of a tile of W at 128 of K number `block`; 128x128 has two tiles of 64."""
    _, scale_w, _, _, sw_n, sw_k = scales
    return gl.load(scale_w + (tile_w * HALVES // 2).to(gl.int64) * sw_n + block * sw_k)


@gluon.jit
def _next_factors(scales, kept, tile_w, m, M, block, k_blocks, HALVES: gl.constexpr, EARLY: gl.constexpr):
    """What is asked for ahead of a block of K, the last one's past the last: its factors, or (EARLY) W's scale."""
    block = gl.minimum(block, k_blocks - 1)
    if EARLY:
        return _scale_of(scales, tile_w, block, HALVES)
    else:
        return _factors(scales, tile_w, m, M, block, HALVES)


@gluon.jit
def _whole_factors(ahead, kept, held, block, at, ACC: gl.constexpr, EARLY: gl.constexpr, HELD: gl.constexpr):
    """The factors of a block of K, for every row of X. at: the number of the block among those of this program."""
    if HELD:
        return kept.index(block).load(gl.SliceLayout(0, ACC)) * held.index(at).load(gl.SliceLayout(0, ACC))
    elif EARLY:
        return kept.index(block).load(gl.SliceLayout(0, ACC)) * ahead
    else:
        return ahead


@gluon.jit
def _left_by(partials, p, last, first, half, BM: gl.constexpr, HALVES: gl.constexpr, ACC: gl.constexpr):
    """What program p left of (a half of) a tile that `first` began, 0 past the last program."""
    slot = slot_of(gl.minimum(p, last), first) * HALVES + half
    return gl.where(p <= last, gl.load(partial(partials, slot, ROWS, BM, ACC), cache_modifier=".cg"), 0.0)


@gluon.jit
def _sum_of_all(partials, first, last, half, BM: gl.constexpr, HALVES: gl.constexpr, ACC: gl.constexpr):
    """What all programs left of a tile, in their order; of 64 rows four, of more two are on their way at a time."""
    acc = gl.full([ROWS, BM], 0.0, gl.float32, ACC)
    STEP: gl.constexpr = 4 if BM <= 64 else 2
    for p in range(first, last + 1, STEP):
        x0 = _left_by(partials, p, last, first, half, BM, HALVES, ACC)
        x1 = _left_by(partials, p + 1, last, first, half, BM, HALVES, ACC)
        if STEP == 4:
            x2 = _left_by(partials, p + 2, last, first, half, BM, HALVES, ACC)
            x3 = _left_by(partials, p + 3, last, first, half, BM, HALVES, ACC)
            acc = acc + x0 + x1 + x2 + x3
        else:
            acc = acc + x0 + x1
    return acc


@gluon.jit
def _consumer(
    bufs, bars, outputs, shape, scales, share, kept, held,
    STAGES: gl.constexpr, W_K: gl.constexpr, BM: gl.constexpr, HALVES: gl.constexpr, SUB: gl.constexpr,
    FP8: gl.constexpr, BLOCKED: gl.constexpr, ROW_X: gl.constexpr, ROW_W: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, EARLY: gl.constexpr, LEAN: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    w_bufs, x_bufs = bufs
    full, empty = bars
    M, N, k_steps, tiles, tiles_m, k_blocks = shape
    out, bias, partials, counters = outputs
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32 if FP8 else 16])
    SCALED: gl.constexpr = FP8 and not BLOCKED
    LATE: gl.constexpr = HELD > 0 and BM == 128  # registers have no room for the factors of two parts
    if EARLY and BLOCKED:  # in here: Triton 3.6 cannot hand such a view to another partition
        kept = reinterpret(kept, gl.float32, [kept.shape[0], BM], FLAT)
        if HELD:
            held = reinterpret(held, gl.float32, [HELD, 1], FLAT)
    zero = gl.full([ROWS, BM], 0.0, gl.float32, ACC)
    program = gl.program_id(0)
    begin = _begin(program, tiles * k_steps, share, EARLY)
    end = _begin(program + 1, tiles * k_steps, share, EARLY)
    stage = 0
    phase = 0
    for tile in range(begin // k_steps, gl.cdiv(end, k_steps)):
        tile_w = tile // tiles_m
        m0 = (tile - tile_w * tiles_m) * BM
        m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(0, ACC))
        k0 = gl.maximum(begin - tile * k_steps, 0)
        k1 = gl.minimum(end - tile * k_steps, k_steps)
        acc0 = zero
        acc1 = zero
        row0 = tile_w * (ROWS * HALVES)
        if EARLY:
            factors = _factors_of_sums(row0, m0, shape, scales, ACC, BM, SCALED, ROW_X, ROW_W)
            added = _bias_of_sums(row0, N, bias, ACC, BIAS)
            if HALVES == 2:
                factors1 = _factors_of_sums(row0 + ROWS, m0, shape, scales, ACC, BM, SCALED, ROW_X, ROW_W)
                added1 = _bias_of_sums(row0 + ROWS, N, bias, ACC, BIAS)
        ahead = 0.0
        ahead1 = 0.0
        if BLOCKED and not HELD:
            ahead = _next_factors(scales, kept, tile_w, m, M, k0 * SUB, k_blocks, HALVES, EARLY)
            ahead1 = _next_factors(scales, kept, tile_w, m, M, k0 * SUB + 1, k_blocks, HALVES, EARLY)
        for step in range(k0, k1):
            mbarrier.wait(full.index(stage), phase)
            if FP8 and HALVES == 1 and SUB % 2 == 0:
                for s in gl.static_range(0, SUB, 2):
                    at = stage * SUB + s
                    x0 = x_bufs.index(at).permute((1, 0))
                    x1 = x_bufs.index(at + 1).permute((1, 0))
                    part0 = warpgroup_mma(_operand(w_bufs, at, W_K), x0, zero, use_acc=False, is_async=True)
                    part1 = warpgroup_mma(_operand(w_bufs, at + 1, W_K), x1, zero, use_acc=False, is_async=True)
                    if BLOCKED:
                        # the next ones are on their way while these are used; past the last, the last
                        block = step * SUB + s
                        at0 = (tile * k_steps - begin) * SUB + block
                        factor0 = _whole_factors(ahead, kept, held, block, at0, ACC, EARLY, HELD)
                        if not LATE:
                            factor1 = _whole_factors(ahead1, kept, held, block + 1, at0 + 1, ACC, EARLY, HELD)
                        if not HELD:
                            ahead = _next_factors(scales, kept, tile_w, m, M, block + 2, k_blocks, HALVES, EARLY)
                            ahead1 = _next_factors(scales, kept, tile_w, m, M, block + 3, k_blocks, HALVES, EARLY)
                    part0 = warpgroup_mma_wait(1, deps=[part0])
                    acc0 += part0 * factor0[None, :] if BLOCKED else part0
                    if LATE:
                        factor1 = _whole_factors(ahead1, kept, held, block + 1, at0 + 1, ACC, EARLY, HELD)
                    part1 = warpgroup_mma_wait(0, deps=[part1])
                    acc0 += part1 * factor1[None, :] if BLOCKED else part1
            for s in gl.static_range(0 if FP8 and HALVES == 1 and SUB % 2 == 0 else SUB):
                w0 = _operand(w_bufs, (stage * SUB + s) * HALVES, W_K)
                x = x_bufs.index(stage * SUB + s).permute((1, 0))
                if FP8:
                    part0 = warpgroup_mma(w0, x, zero, use_acc=False, is_async=True)
                    if HALVES == 2:
                        w1 = _operand(w_bufs, (stage * SUB + s) * HALVES + 1, W_K)
                        part1 = warpgroup_mma(w1, x, zero, use_acc=False, is_async=True)
                    if BLOCKED:
                        # the next one is on its way while this one is used; past the last, the last
                        block = step * SUB + s
                        at0 = (tile * k_steps - begin) * SUB + block
                        factor = _whole_factors(ahead, kept, held, block, at0, ACC, EARLY, HELD)
                        if not HELD:
                            ahead = _next_factors(scales, kept, tile_w, m, M, block + 1, k_blocks, HALVES, EARLY)
                    if HALVES == 2:
                        part0, part1 = warpgroup_mma_wait(0, deps=[part0, part1])
                    else:
                        part0 = warpgroup_mma_wait(0, deps=[part0])
                    acc0 += part0 * factor[None, :] if BLOCKED else part0
                    if HALVES == 2:
                        acc1 += part1 * factor[None, :] if BLOCKED else part1
                else:
                    acc0 = warpgroup_mma(w0, x, acc0, is_async=True)
                    if HALVES == 2:
                        w1 = _operand(w_bufs, (stage * SUB + s) * HALVES + 1, W_K)
                        acc1 = warpgroup_mma(w1, x, acc1, is_async=True)
            if FP8:
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                if HALVES == 2:
                    acc0, acc1 = warpgroup_mma_wait(SUB * HALVES, deps=[acc0, acc1])
                else:
                    acc0 = warpgroup_mma_wait(SUB * HALVES, deps=[acc0])
                if step > k0:
                    mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
            stage, phase = advance(stage, phase, STAGES)
        if not FP8:
            if HALVES == 2:
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            else:
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(empty.index(previous(stage, STAGES)), count=1)
        last = True
        if k1 - k0 < k_steps:
            first_program = _program_of(tile * k_steps, tiles * k_steps, share, EARLY)
            last_program = _program_of(tile * k_steps + k_steps - 1, tiles * k_steps, share, EARLY)
            slot = own_slot(program, k0) * HALVES
            gl.store(partial(partials, slot, ROWS, BM, ACC), acc0)
            if HALVES == 2:
                gl.store(partial(partials, slot + 1, ROWS, BM, ACC), acc1)
            last = count(counters + tile, 8, LEAN) == last_program - first_program
            if last:
                acc0 = zero
                acc1 = zero
                if LEAN:
                    acc0 = _sum_of_all(partials, first_program, last_program, 0, BM, HALVES, ACC)
                    if HALVES == 2:
                        acc1 = _sum_of_all(partials, first_program, last_program, 1, BM, HALVES, ACC)
                else:
                    for p in range(first_program, last_program + 1):
                        slot = slot_of(p, first_program) * HALVES
                        acc0 += gl.load(partial(partials, slot, ROWS, BM, ACC), cache_modifier=".cg")
                        if HALVES == 2:
                            acc1 += gl.load(partial(partials, slot + 1, ROWS, BM, ACC), cache_modifier=".cg")
                gl.store(counters + tile, 0)
        if last:
            if not EARLY:
                factors = _factors_of_sums(row0, m0, shape, scales, ACC, BM, SCALED, ROW_X, ROW_W)
                added = _bias_of_sums(row0, N, bias, ACC, BIAS)
            _finish(acc0, factors, added, row0, m0, shape, out, BIAS, ACTIVATION, SCALED, ROW_X, ROW_W)
            if HALVES == 2:
                if not EARLY:
                    factors1 = _factors_of_sums(row0 + ROWS, m0, shape, scales, ACC, BM, SCALED, ROW_X, ROW_W)
                    added1 = _bias_of_sums(row0 + ROWS, N, bias, ACC, BIAS)
                _finish(acc1, factors1, added1, row0 + ROWS, m0, shape, out, BIAS, ACTIVATION, SCALED, ROW_X, ROW_W)


@gluon.jit
def _load(boxes, full, x_desc, w_desc, tile, step, stage, tiles_m, W_K: gl.constexpr, BM: gl.constexpr,
          HALVES: gl.constexpr, SUB: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Ask for a slice."""
    w_boxes, x_bufs = boxes
    BYTES: gl.constexpr = (ROWS * HALVES + BM) * SUB * BK * x_desc.dtype.primitive_bitwidth // 8
    PIECES: gl.constexpr = ROWS * HALVES // BOX if W_K else HALVES
    tile_w = tile // tiles_m
    row = tile_w * (ROWS * HALVES)
    k = step * (SUB * BK)
    mbarrier.expect(full.index(stage), BYTES)
    for i in gl.static_range(PIECES):
        for s in gl.static_range(SUB):
            at = (stage * SUB + s) * PIECES + i
            if W_K:
                tma_load(w_desc, [row + i * BOX, k + s * BK], full.index(stage), w_boxes.index(at))
            else:
                tma_load(w_desc, [k + s * BK, row + i * ROWS], full.index(stage), w_boxes.index(at))
    for s in gl.static_range(SUB):
        x_row = (tile - tile_w * tiles_m) * BM
        tma_load(x_desc, [x_row, k + s * BK], full.index(stage), x_bufs.index(stage * SUB + s))


@gluon.jit
def _producer(
    boxes, bars, x_desc, w_desc, shape, share, STAGES: gl.constexpr, W_K: gl.constexpr, BM: gl.constexpr,
    HALVES: gl.constexpr, SUB: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    full, empty = bars
    _, _, k_steps, tiles, tiles_m, _ = shape
    program = gl.program_id(0)
    begin = _begin(program, tiles * k_steps, share, EARLY)
    stage = 0
    phase = 0
    if EARLY:  # all stages are on their way already
        begin += STAGES
        phase = 1
    tile = begin // k_steps
    step = begin - tile * k_steps
    for _ in range(begin, _begin(program + 1, tiles * k_steps, share, EARLY)):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _load(boxes, full, x_desc, w_desc, tile, step, stage, tiles_m, W_K, BM, HALVES, SUB, BOX, BK)
        stage, phase = advance(stage, phase, STAGES)
        step += 1
        wrapped = step == k_steps
        tile = gl.where(wrapped, tile + 1, tile)
        step = gl.where(wrapped, 0, step)


@gluon.jit
def _fill(boxes, full, x_desc, w_desc, shape, share, STAGES: gl.constexpr, W_K: gl.constexpr, BM: gl.constexpr,
          HALVES: gl.constexpr, SUB: gl.constexpr, BOX: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Ask for the first STAGES slices."""
    _, _, k_steps, tiles, tiles_m, _ = shape
    program = gl.program_id(0)
    begin = _begin(program, tiles * k_steps, share, True)
    end = _begin(program + 1, tiles * k_steps, share, True)
    tile = begin // k_steps
    step = begin - tile * k_steps
    for stage in range(gl.minimum(end - begin, STAGES)):
        _load(boxes, full, x_desc, w_desc, tile, step, stage, tiles_m, W_K, BM, HALVES, SUB, BOX, BK)
        step += 1
        wrapped = step == k_steps
        tile = gl.where(wrapped, tile + 1, tile)
        step = gl.where(wrapped, 0, step)


@gluon.jit
def _keep_scales(kept, shape, scales, BLOCKS: gl.constexpr, BM: gl.constexpr):
    """All scales of X to shared memory, (BLOCKS, BM): of M rows, whose blocks lie side by side in memory."""
    M, _, _, _, _, k_blocks = shape
    scale_x, _, sx_m, sx_k, _, _ = scales
    # four neighbours along K and eight rows a warp: half of each sector is used, and four of eight banks' words collide
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, 4], [0, 1])
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, LAYOUT))
    m = gl.arange(0, BM, layout=gl.SliceLayout(0, LAYOUT))
    places = scale_x + m.to(gl.int64)[None, :] * sx_m + block[:, None] * sx_k
    kept.store(gl.load(places, mask=(m < M)[None, :] & (block < k_blocks)[:, None], other=0.0))


@gluon.jit
def _hold_scales(held, shape, scales, share, HELD: gl.constexpr, HALVES: gl.constexpr, SUB: gl.constexpr):
    """Scales of W of all slices of this program to shared memory, (HELD, 1), in the order in which they are used."""
    _, _, k_steps, tiles, tiles_m, k_blocks = shape
    _, scale_w, _, _, sw_n, sw_k = scales
    program = gl.program_id(0)
    begin = _begin(program, tiles * k_steps, share, True)
    end = _begin(program + 1, tiles * k_steps, share, True)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    at = begin * SUB + gl.arange(0, HELD, layout=gl.SliceLayout(1, LAYOUT))
    tile = at // (k_steps * SUB)
    block = at - tile * (k_steps * SUB)
    places = scale_w + (tile // tiles_m * HALVES // 2).to(gl.int64) * sw_n + block * sw_k
    held.store(gl.load(places, mask=(at < end * SUB) & (block < k_blocks), other=0.0)[:, None])


@gluon.jit(
    do_not_specialize=[
        "out", "bias", "counters", "scale_x", "scale_w", "M", "N", "k_steps", "tiles", "tiles_m", "k_blocks",
        "base", "extra", "sx_m", "sx_k", "sw_n", "sw_k",
    ]
)  # fmt: skip
def skinny_gemm_kernel(
    x_desc, w_desc, out, bias, partials, counters, scale_x, scale_w, M, N, k_steps, tiles, tiles_m, k_blocks, base,
    extra, sx_m, sx_k, sw_n, sw_k,
    BM: gl.constexpr, BK: gl.constexpr, HALVES: gl.constexpr, SUB: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, W_K: gl.constexpr, FP8: gl.constexpr, BLOCKED: gl.constexpr, ROW_X: gl.constexpr,
    ROW_W: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, EARLY: gl.constexpr, KEPT: gl.constexpr,
    LEAN: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """x_desc in boxes of BM x BK, BK 128 bytes; w_desc of BOX x BK (W_K) or BK x 64; k_steps >= 1 slices of SUB boxes.

    partials: float32, 2 * programs * 64 * HALVES * BM. counters: int32, one a tile, 0. k_blocks: scales along K.
    base, extra: tiles * k_steps divided by programs, and the rest. KEPT: with EARLY and BLOCKED (tiles_m 1) a power of
    two, k_blocks or more, else 0.
    """
    BOXES: gl.constexpr = STAGES * SUB * HALVES * (ROWS // BOX if W_K else 1)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [BOXES] + w_desc.block_shape, w_desc.layout)
    w_bufs = w_boxes
    if W_K and BOX != ROWS:
        # boxes of 8 rows or more follow each other as a box of 64 has its rows
        WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BK], w_desc.dtype)
        w_bufs = reinterpret(w_boxes, w_desc.dtype, [STAGES * SUB * HALVES, ROWS, BK], WHOLE)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SUB] + x_desc.block_shape, x_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    bufs = (w_bufs, x_bufs)
    boxes = (w_boxes, x_bufs)
    bars = (full, empty)
    outputs = (out, bias, partials, counters)
    shape = (M, N, k_steps, tiles, tiles_m, k_blocks)
    scales = (scale_x, scale_w, sx_m, sx_k, sw_n, sw_k)
    share = (base, extra)
    kept = x_bufs
    held = x_bufs
    if EARLY:
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        _fill(boxes, full, x_desc, w_desc, shape, share, STAGES, W_K, BM, HALVES, SUB, BOX, BK)
        for i in gl.static_range(STAGES):
            mbarrier.init(empty.index(i), count=1)
        if KEPT:
            lines = gl.allocate_shared_memory(gl.float32, [KEPT, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            _keep_scales(lines, shape, scales, KEPT, BM)
            kept = lines
        if HELD:
            own = gl.allocate_shared_memory(gl.float32, [HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
            _hold_scales(own, shape, scales, share, HELD, HALVES, SUB)
            held = own
    else:
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([
        (_consumer, (bufs, bars, outputs, shape, scales, share, kept, held, STAGES, W_K, BM, HALVES, SUB, FP8, BLOCKED,
                     ROW_X, ROW_W, BIAS, ACTIVATION, EARLY, LEAN, HELD)),
        (_producer, (boxes, bars, x_desc, w_desc, shape, share, STAGES, W_K, BM, HALVES, SUB, BOX, BK, EARLY)),
    ], [1], [32])  # fmt: skip
