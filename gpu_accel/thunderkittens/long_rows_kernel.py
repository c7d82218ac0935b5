"""Softmax and norms of rows that registers do not hold, for Hopper (sm_90a) in Gluon: the row stays in shared memory.

A program stays on its SM and takes rows in turn. TMA brings a row in blocks of LINES x 64 numbers into a ring of STAGES
buffers, which holds a whole row and the first blocks of the next one. The row is read from there two or three times:
for what it sums to (softmax finds its largest number on the way, LayerNorm its mean before), and on the way out, when
each block makes place for one of the next row.

    TMA      | row 0 | blocks of row 1 ......................... | of row 2 ...
    program  |       | sums of row 0 | row 0 out (frees blocks)  | sums of row 1 | ...

x is seen as lines of 64 numbers, since a box of TMA has at most 256 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gpu_accel.gluon_compat import barrier, tma_load

SOFTMAX = gl.constexpr(0)
RMS = gl.constexpr(1)
LAYER = gl.constexpr(2)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _ask(x_desc, bufs, full, number, rows, lines, blocks, STAGES: gl.constexpr, LINES: gl.constexpr):
    """Ask for block `number` of this program, if there is one."""
    row = gl.program_id(0) + number // blocks * gl.num_programs(0)
    stage = number % STAGES
    if row < rows:
        mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
        tma_load(x_desc, [row * lines + number % blocks * LINES, 0], full.index(stage), bufs.index(stage))


@gluon.jit
def _block(bufs, stage, block, lines, other, LAYOUT: gl.constexpr, LINES: gl.constexpr, EXACT: gl.constexpr):
    """A block in float32; `other` behind the end of the row."""
    x = bufs.index(stage).load(LAYOUT).to(gl.float32)
    if not EXACT:
        line = block * LINES + gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))
        x = gl.where((line < lines)[:, None], x, other)
    return x


@gluon.jit
def _eights(x, LINES: gl.constexpr):
    """A block as eights of numbers, each in one thread."""
    return gl.reshape(x, [LINES, 8, 8])


@gluon.jit
def _add_exponentials(x, top, total, LINES: gl.constexpr):
    """(largest number so far, sum of exp2 below it) of every eight, with block x."""
    x = _eights(x, LINES)
    higher = gl.maximum(top, gl.max(x, axis=2))
    shift = gl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
    total = total * gl.exp2((top - shift) * _LOG2E) + gl.sum(gl.exp2((x - shift[:, :, None]) * _LOG2E), axis=2)
    return higher, total


@gluon.jit(do_not_specialize=["rows", "lines", "blocks", "eps"])
def long_rows_kernel(
    x_desc, y, weight, bias, means, rstds, rows, lines, blocks, eps,
    OP: gl.constexpr, STAGES: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr, WEIGHT: gl.constexpr,
    BIAS: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """y of x (rows, 64 lines), contiguous. blocks: of LINES lines in a row, up to STAGES; EXACT: all are whole."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, LINES, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in range(STAGES):
        _ask(x_desc, bufs, full, i, rows, lines, blocks, STAGES, LINES)
    places = gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))
    inside = places[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    width = lines * 64
    first = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        out = y + gl.to_tensor(row).to(gl.int64) * width
        mean = 0.0
        if OP == SOFTMAX:
            top = gl.max(_eights(gl.full([LINES, 64], float("-inf"), gl.float32, LAYOUT), LINES), axis=2)
            sums = gl.where(top == 0.0, 1.0, 0.0)
            for block in range(blocks):
                number = first + block
                mbarrier.wait(full.index(number % STAGES), number // STAGES & 1)
                x = _block(bufs, number % STAGES, block, lines, float("-inf"), LAYOUT, LINES, EXACT)
                top, sums = _add_exponentials(x, top, sums, LINES)
            mean = gl.max(gl.max(top, axis=1), axis=0)
            total = gl.sum(gl.sum(sums * gl.exp2((top - mean) * _LOG2E), axis=1), axis=0)
        else:
            most = gl.full([LINES, 64], 0.0, gl.float32, LAYOUT)
            for block in range(blocks):
                number = first + block
                mbarrier.wait(full.index(number % STAGES), number // STAGES & 1)
                x = _block(bufs, number % STAGES, block, lines, 0.0, LAYOUT, LINES, EXACT)
                if OP == LAYER:
                    most += x
                else:
                    most += x * x
            if OP == LAYER:
                mean = gl.sum(gl.sum(most, axis=1), axis=0) / width
                most = gl.full([LINES, 64], 0.0, gl.float32, LAYOUT)
                for block in range(blocks):
                    stage = (first + block) % STAGES
                    x = _block(bufs, stage, block, lines, mean, LAYOUT, LINES, EXACT) - mean
                    most += x * x
            total = gl.sum(gl.sum(most, axis=1), axis=0)
        if OP == SOFTMAX:
            share = -gl.log2(total)
        else:
            factor = gl.rsqrt(total / width + eps)
            gl.store(rstds + row, factor)
            if OP == LAYER:
                gl.store(means + row, mean)
        for block in range(blocks):
            number = first + block
            x = bufs.index(number % STAGES).load(LAYOUT).to(gl.float32)
            barrier()  # all have read the block
            _ask(x_desc, bufs, full, number + STAGES, rows, lines, blocks, STAGES, LINES)
            at = block * (LINES * 64) + inside
            there = at < width
            if OP == SOFTMAX:
                x = gl.exp2((x - mean) * _LOG2E + share)
            else:
                x = (x - mean) * factor
                if WEIGHT:
                    x = x * gl.load(weight + at, mask=there, other=0.0).to(gl.float32)
                if BIAS:
                    x = x + gl.load(bias + at, mask=there, other=0.0).to(gl.float32)
            gl.store(out + at, x.to(y.dtype.element_ty), mask=there)
        first += blocks
