"""Rows for Hopper (sm_90a) in Gluon: norms, softmax and their gradients, read from memory once whatever their length.

A program stays on its SM and takes tiles of rows in turn, or of one row a part of LINES x 64 numbers; the other parts
are then those of the PARTS - 1 programs beside it. TMA keeps a ring of STAGES tiles full; a tile is read from there
twice, for what it sums to and on its way out, so that registers hold nothing of it in between, and what gradients of
weight and bias need stays in registers over all rows.

    TMA      | tile 0 | tile 1 | tile 2 ..
    program  |        | sums of 0 | sums of 1, tile 0 out | sums of 2, tile 1 out ..      PARTS > 1
    program  |        | sums of 0, tile 0 out | sums of 1, tile 1 out ..                  PARTS == 1

Programs of a row tell each other their sums by notes in memory, a number and the turn it belongs to in one word of 64
bits, which are waited for LATE turns later (`_tell`, `_hear`). A note is written over RING turns later, when all have
read it; the last program of a row's that ends leaves zeros. All programs must be on the GPU at once: it is a
cooperative launch.

x is seen as (rows, lines, 64), of which TMA brings LINES lines, with zeros behind the last one; EXACT: there are none.
A thread has K lines of 8 numbers of a tile: `_spread` gives (rows, threads, 8 K).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gpu_accel.gluon_compat import barrier, reinterpret, tma_load

SOFTMAX = gl.constexpr(0)
RMS = gl.constexpr(1)
LAYER = gl.constexpr(2)
RING = gl.constexpr(8)  # notes that a program has; a turn's is read by all before turn 2 + 2 LATE after it
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _ask(descs, bufs, full, number, where, tiles, COUNT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """Ask for tile `number` of this program, of COUNT tensors, if there is one."""
    first, step, lines, at = where
    tile = first + number * step
    stage = number % STAGES
    if tile < tiles:
        mbarrier.expect(full.index(stage), COUNT * descs[0].block_type.nbytes)
        for i in gl.static_range(COUNT):
            tma_load(descs[i], [tile * ROWS, at, 0], full.index(stage), bufs[i].index(stage))


@gluon.jit
def _float(x):
    """x in float32. ptxas takes three instructions for two numbers of bfloat16 where these are two."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def _rounded(x, kind: gl.constexpr):
    """float32 that `kind` has, nearest to x."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
                .reg .b32 both;
                cvt.rn.bf16x2.f32 both, $3, $2;
                shl.b32 $0, both, 16;
                and.b32 $1, both, 0xffff0000;
            }""",
            "=r,=r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(kind).to(gl.float32)


@gluon.jit
def _spread(x, ROWS: gl.constexpr, K: gl.constexpr):
    """(lines, 64) as (ROWS, threads of a row, 8 K), in float32."""
    return _threads(_float(x), ROWS, K)


@gluon.jit
def _threads(x, ROWS: gl.constexpr, K: gl.constexpr):
    LINES: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x, [LINES // K, K, 8, 8]), [0, 2, 1, 3])
    return gl.reshape(x, [ROWS, LINES * 8 // K // ROWS, K * 8])


@gluon.jit
def _there(shape, at, lines, ROWS: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Which numbers of a tile of `shape` (lines, 64) from line `at` of its row on are there, as `_spread` has them."""
    LINES: gl.constexpr = shape[0]
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT)) % (LINES // ROWS)
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    return _threads(at + line[:, None] + 0 * col[None, :], ROWS, K) < lines


@gluon.jit
def _gather(x, kind, K: gl.constexpr, LAYOUT: gl.constexpr):
    """What `_spread` made, as (lines, 64) of dtype `kind`."""
    LINES: gl.constexpr = x.shape[0] * x.shape[1] * K // 8
    x = gl.permute(gl.reshape(x.to(kind), [LINES // K, 8, K, 8]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(x, [LINES, 64]), LAYOUT)


@gluon.jit
def _piece(buf, piece, PIECES: gl.constexpr):
    """One of PIECES pieces of a tile's lines."""
    LINES: gl.constexpr = buf.shape[0] // PIECES
    return buf.slice(piece * LINES, LINES, 0)


@gluon.jit
def _nothing():
    return ()


@gluon.jit
def _with(many, x):
    return many + (x,)


@gluon.jit
def _in_turn():
    """Loads of the next piece stay behind this: ptxas has all pieces in registers at once otherwise."""
    gl.inline_asm_elementwise(
        "bar.warp.sync -1; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _vector(buf, LAYOUT: gl.constexpr, K: gl.constexpr, SPREAD: gl.constexpr):
    """Weight or bias, one row of (lines, 64) in shared memory, as (1, threads of a row, 8 K) in float32."""
    LINES: gl.constexpr = buf.shape[0]
    x = gl.permute(gl.reshape(_float(buf.load(LAYOUT)), [LINES // K, K, 8, 8]), [0, 2, 1, 3])
    x = gl.reshape(x, [LINES * 8 // K, K * 8])
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, SPREAD), assert_trivial=True), 0)


@gluon.jit
def _tell(notes, number, a, b, PARTS: gl.constexpr):
    """Note for turn `number`: a and b, tensors of one number."""
    tag = gl.to_tensor(number + 1).to(gl.int64) << 32
    word_a = (a.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | tag
    word_b = (b.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | tag
    part = gl.program_id(0) % PARTS
    place = notes + ((number % RING) * PARTS + part) * 2
    gl.inline_asm_elementwise(
        """{
            .reg .pred first; .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.relaxed.gpu.global.b64 [$1], $2;
            @first st.relaxed.gpu.global.b64 [$1+8], $3;
            mov.b32 $0, 0;
        }""",
        "=r,l,l,l", [place, word_a, word_b], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _places(notes, number, PARTS: gl.constexpr, PADDED: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part = gl.minimum(gl.arange(0, PADDED, layout=one), PARTS - 1)
    return notes + ((number % RING) * PARTS + part) * 2


@gluon.jit
def _listen(notes, number, PARTS: gl.constexpr, PADDED: gl.constexpr):
    """What notes for turn `number` say now: for `_hear`, after something else was done while it is on its way."""
    place = _places(notes, number, PARTS, PADDED)
    return gl.inline_asm_elementwise(
        """{
            .reg .b64 a, b;
            ld.relaxed.gpu.global.v2.b64 {a, b}, [$4];
            mov.b64 {$0, $1}, a;
            mov.b64 {$2, $3}, b;
        }""",
        "=r,=r,=r,=r,l", [place], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _hear(heard, notes, number, PARTS: gl.constexpr, PADDED: gl.constexpr):
    """(a, b) of all parts for turn `number`, tensors of PADDED numbers, of which the last part's are repeated."""
    a, tag_a, b, tag_b = heard
    place = _places(notes, number, PARTS, PADDED)
    return gl.inline_asm_elementwise(
        """{
            .reg .pred early; .reg .b64 a, b; .reg .b32 x, y, tag, other;
            mov.b32 x, $2;
            mov.b32 tag, $3;
            mov.b32 y, $4;
            mov.b32 other, $5;
            again:
            setp.ne.b32 early, tag, $7;
            @!early setp.ne.b32 early, other, $7;
            @!early bra done;
            ld.relaxed.gpu.global.v2.b64 {a, b}, [$6];
            mov.b64 {x, tag}, a;
            mov.b64 {y, other}, b;
            bra again;
            done:
            mov.b32 $0, x;
            mov.b32 $1, y;
        }""",
        "=&r,=&r,r,r,r,r,l,r", [a, tag_a, b, tag_b, place, gl.to_tensor(number + 1)],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _end(notes, PARTS: gl.constexpr):
    """The last of a row's programs clears its notes, and the count of those that have ended, which lies behind them."""
    barrier()  # all threads have heard
    gl.inline_asm_elementwise(
        """{
            .reg .pred go; .reg .u32 x; .reg .b64 at;
            mov.u32 x, %tid.x;
            setp.ne.u32 go, x, 0;
            @go bra done;
            atom.acq_rel.gpu.global.add.u32 x, [$1], 1;
            setp.ne.u32 go, x, $3;
            @go bra done;
            mov.b64 at, $2;
            clear:
            st.relaxed.gpu.global.b64 [at], 0;
            add.s64 at, at, 8;
            setp.le.u64 go, at, $1;
            @go bra clear;
            done:
            mov.b32 $0, 0;
        }""",
        "=r,l,l,r", [notes + RING * PARTS * 2, notes, gl.to_tensor(PARTS - 1)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _notes_of(notes, PARTS: gl.constexpr):
    """Those of this program's row: RING x PARTS pairs of words, and one for the count."""
    return notes + gl.program_id(0) // PARTS * (RING * PARTS * 2 + 2)


@gluon.jit
def _join_exponentials(top, total, other_top, other_total):
    higher = gl.maximum(top, other_top)
    shift = gl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far
    total = total * gl.exp2((top - shift) * _LOG2E) + other_total * gl.exp2((other_top - shift) * _LOG2E)
    return higher, total


@gluon.jit
def _join_moments(mean, square, half, other_mean, other_square, other_half):
    """Of as many numbers each: `half` is half of how many one side has."""
    apart = other_mean - mean
    return 0.5 * (mean + other_mean), square + other_square + apart * apart * half, half + other_half


@gluon.jit
def _plus(a, b, other_a, other_b):
    return a + other_a, b + other_b


@gluon.jit
def _wide(x, PARTS: gl.constexpr):
    """What rows have, to go with (rows, threads, numbers); of one row in parts it is a number."""
    return x[:, None, None] if PARTS == 1 else x


@gluon.jit
def _join_unequal(mean, square, count, other_mean, other_square, other_count):
    both = count + other_count
    share = other_count / gl.maximum(both, 1.0)
    apart = other_mean - mean
    return mean + apart * share, square + other_square + apart * apart * count * share, both


@gluon.jit
def _thread_sums(x, there, OP: gl.constexpr, EXACT: gl.constexpr):
    """Numbers of a thread: largest, and sum of exponentials; mean, sum of squares about it, and count; or squares."""
    if OP == SOFTMAX:
        if not EXACT:
            x = gl.where(there, x, float("-inf"))
        top = gl.max(x, axis=2)
        shift = gl.where(top == float("-inf"), 0.0, top)
        return top, gl.sum(gl.exp2((x - shift[:, :, None]) * _LOG2E), axis=2), top
    elif OP == LAYER:
        if EXACT:
            mean = gl.sum(x, axis=2) * (1.0 / x.shape[2])
            count = mean * 0.0 + x.shape[2]
            x = x - mean[:, :, None]
        else:
            count = gl.sum(gl.where(there, 1.0, 0.0), axis=2)
            mean = gl.sum(x, axis=2) / gl.maximum(count, 1.0)
            x = gl.where(there, x - mean[:, :, None], 0.0)
        return mean, gl.sum(x * x, axis=2), count
    else:
        square = gl.sum(x * x, axis=2)
        return square, square, square


@gluon.jit
def _row_sums(a, b, count, OP: gl.constexpr, EXACT: gl.constexpr):
    """The first two of rows, of what threads have."""
    if OP == SOFTMAX:
        return gl.reduce((a, b), 1, _join_exponentials)
    elif OP == LAYER:
        if EXACT:
            a, b, count = gl.reduce((a, b, 0.5 * count), 1, _join_moments)
        else:
            a, b, count = gl.reduce((a, b, count), 1, _join_unequal)
        return a, b
    else:
        a = gl.sum(a, axis=1)
        return a, a


@gluon.jit
def _once(x, PARTS: gl.constexpr):
    """What `_hear` gave, zeros for what it repeats."""
    if x.shape[0] == PARTS:
        return x
    else:
        return gl.where(gl.arange(0, x.shape[0], layout=x.type.layout) < PARTS, x, 0.0)


@gluon.jit
def _all_sums(a, b, lines, OP: gl.constexpr, PARTS: gl.constexpr, LINES: gl.constexpr):
    """The same of a row of `lines`, of what its parts of LINES lines have; numbers."""
    if OP == SOFTMAX:
        top = gl.max(a, axis=0)
        shift = gl.where(top == float("-inf"), 0.0, top)
        return top, gl.sum(_once(b * gl.exp2((a - shift) * _LOG2E), PARTS), axis=0)
    elif OP == LAYER:
        first = gl.arange(0, a.shape[0], layout=a.type.layout) * LINES
        count = _once((gl.minimum(lines - first, LINES) * 64).to(gl.float32), PARTS)
        mean = gl.sum(a * count, axis=0) / (lines * 64)
        return mean, gl.sum(_once(b, PARTS) + (a - mean) * (a - mean) * count, axis=0)
    else:
        a = gl.sum(_once(a, PARTS), axis=0)
        return a, a


@gluon.jit
def _write(out, x, row, at, lines, rows, ROWS: gl.constexpr, EXACT: gl.constexpr, LAYOUT: gl.constexpr):
    """x (lines, 64) to `out` (rows, lines, 64) from its `row` and line `at` on."""
    LINES: gl.constexpr = x.shape[0] // ROWS
    line = gl.arange(0, ROWS * LINES, layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    begin = out + (gl.to_tensor(row).to(gl.int64) * lines + at) * 64
    if ROWS > 1:
        place = (line // LINES * lines + line % LINES)[:, None] * 64 + col[None, :]
        there = row + line // LINES < rows
        if not EXACT:
            there = there & (at + line % LINES < lines)
        gl.store(begin + place, x, mask=there[:, None] & (col < 64)[None, :])
    elif EXACT:
        gl.store(begin + (line[:, None] * 64 + col[None, :]), x)
    else:
        there = (at + line < lines)[:, None] & (col < 64)[None, :]
        gl.store(begin + (line[:, None] * 64 + col[None, :]), x, mask=there)


@gluon.jit
def _begin(descs, full, lines, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """(where this program is: its first tile, how many it steps on, lines of a row, its first one), barriers ready."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    LINES: gl.constexpr = descs[0].block_shape[1]
    return (gl.program_id(0) // PARTS, gl.num_programs(0) // PARTS, lines, gl.program_id(0) % PARTS * LINES)


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    """(buffers as TMA fills them, the same as (lines, 64))."""
    SIZE: gl.constexpr = desc.block_shape[0] * desc.block_shape[1]
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIZE, 64], desc.dtype)
    bufs = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_shape, desc.layout)
    return bufs, reinterpret(bufs, desc.dtype, [STAGES, SIZE, 64], FLAT)


@gluon.jit
def _keep(vector, desc, at, lines, EXACT: gl.constexpr, LAYOUT: gl.constexpr):
    """Weight or bias of this program's part, in shared memory."""
    LINES: gl.constexpr = desc.block_shape[1]
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LINES, 64], desc.dtype)
    buf = gl.allocate_shared_memory(desc.dtype, [LINES, 64], FLAT)
    line = at + gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT))
    place = line[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    if EXACT:
        buf.store(gl.load(vector + place))
    else:
        buf.store(gl.load(vector + place, mask=place < lines * 64, other=0.0))
    return buf


@gluon.jit
def _forward_out(
    bufs, vectors, stage, tile, where, outs, a, b, eps, rows,
    OP: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, EXACT: gl.constexpr,
    WEIGHT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, LAYOUT: gl.constexpr, SPREAD: gl.constexpr,
):  # fmt: skip
    first, step, lines, at = where
    y, summed, means, rstds = outs
    width = lines * 64
    x = _spread(bufs[0].index(stage).load(LAYOUT), ROWS, K)
    if RESIDUAL:
        kind: gl.constexpr = summed.dtype.element_ty
        x = _rounded(x + _spread(bufs[1].index(stage).load(LAYOUT), ROWS, K), kind)  # what the backward sees
        _write(summed, _gather(x, kind, K, LAYOUT), tile * ROWS, at, lines, rows, ROWS, EXACT, LAYOUT)
    if OP == SOFTMAX:
        x = gl.exp2((x - _wide(a, PARTS)) * _LOG2E - _wide(gl.log2(b), PARTS))
    else:
        if OP == LAYER:
            factor = gl.rsqrt(b / width + eps)
            x = (x - _wide(a, PARTS)) * _wide(factor, PARTS)
        else:
            factor = gl.rsqrt(a / width + eps)
            x = x * _wide(factor, PARTS)
        if WEIGHT:
            x = x * _vector(vectors[0], LAYOUT, K, SPREAD)
        if BIAS:
            x = x + _vector(vectors[1], LAYOUT, K, SPREAD)
        if PARTS == 1:
            line = tile * ROWS + gl.arange(0, ROWS, layout=factor.type.layout)
            gl.store(rstds + line, factor, mask=line < rows)
            if OP == LAYER:
                gl.store(means + line, a, mask=line < rows)
        else:  # each part writes the same
            gl.store(rstds + tile, factor)
            if OP == LAYER:
                gl.store(means + tile, a)
    _write(y, _gather(x, y.dtype.element_ty, K, LAYOUT), tile * ROWS, at, lines, rows, ROWS, EXACT, LAYOUT)


@gluon.jit(do_not_specialize=["notes", "rows", "tiles", "lines", "eps"])
def forward_rows_kernel(
    x_desc, r_desc, weight, bias, y, summed, means, rstds, notes, rows, tiles, lines, eps,
    OP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PADDED: gl.constexpr,
    LATE: gl.constexpr, WARPS: gl.constexpr, EXACT: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
):  # fmt: skip
    """y of x (rows, 64 lines) and of the residual, contiguous; tiles of ROWS rows, or of one of PARTS parts of a row.

    summed: x + residual, as it was normalised. means and rstds (rows,) float32 of norms. PADDED: PARTS, or the next
    power of two.
    """
    LINES: gl.constexpr = x_desc.block_shape[1]
    SIZE: gl.constexpr = ROWS * LINES
    K: gl.constexpr = SIZE // (4 * WARPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([K, 8], [4, 8], [WARPS, 1], [1, 0])
    COUNT: gl.constexpr = 2 if RESIDUAL else 1
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_bufs, x_flat = _ring(x_desc, STAGES)
    r_bufs = x_bufs
    r_flat = x_flat
    if RESIDUAL:
        r_bufs, r_flat = _ring(r_desc, STAGES)
    filled = (x_bufs, r_bufs)
    bufs = (x_flat, r_flat)
    descs = (x_desc, r_desc)
    where = _begin(descs, full, lines, STAGES, PARTS)
    first, step, lines, at = where
    for i in range(STAGES):
        _ask(descs, filled, full, i, where, tiles, COUNT, STAGES, ROWS)
    w_buf = x_flat.index(0)
    b_buf = w_buf
    if WEIGHT:
        w_buf = _keep(weight, x_desc, at, lines, EXACT, LAYOUT)
    if BIAS:
        b_buf = _keep(bias, x_desc, at, lines, EXACT, LAYOUT)
    vectors = (w_buf, b_buf)
    outs = (y, summed, means, rstds)
    there = _there([SIZE, 64], at, lines, ROWS, K, LAYOUT)
    SPREAD: gl.constexpr = there.type.layout
    mine = _notes_of(notes, PARTS)
    count = gl.cdiv(gl.maximum(tiles - first, 0), step)
    for number in range(count):
        stage = number % STAGES
        if PARTS > 1:
            heard = _listen(mine, gl.maximum(number - LATE, 0), PARTS, PADDED)
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        x = _spread(bufs[0].index(stage).load(LAYOUT), ROWS, K)
        if RESIDUAL:
            x = _rounded(x + _spread(bufs[1].index(stage).load(LAYOUT), ROWS, K), summed.dtype.element_ty)
        a, b, each = _thread_sums(x, there, OP, EXACT)
        barrier()  # all are through with the tile before
        if number > LATE:
            _ask(descs, filled, full, number - 1 - LATE + STAGES, where, tiles, COUNT, STAGES, ROWS)
        a, b = _row_sums(a, b, each, OP, EXACT)
        if PARTS > 1:
            _tell(mine, number, a, b, PARTS)
            if number >= LATE:
                before = number - LATE
                all_a, all_b = _hear(heard, mine, before, PARTS, PADDED)
                all_a, all_b = _all_sums(all_a, all_b, lines, OP, PARTS, LINES)
                _forward_out(bufs, vectors, before % STAGES, first + before * step, where, outs, all_a, all_b, eps,
                             rows, OP, ROWS, K, PARTS, EXACT, WEIGHT, BIAS, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
        else:
            _forward_out(bufs, vectors, stage, first + number * step, where, outs, a, b, eps, rows, OP, ROWS, K, PARTS,
                         EXACT, WEIGHT, BIAS, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
    if PARTS > 1:
        for before in range(gl.maximum(count - LATE, 0), count):
            heard = _listen(mine, before, PARTS, PADDED)
            all_a, all_b = _hear(heard, mine, before, PARTS, PADDED)
            all_a, all_b = _all_sums(all_a, all_b, lines, OP, PARTS, LINES)
            _forward_out(bufs, vectors, before % STAGES, first + before * step, where, outs, all_a, all_b, eps, rows,
                         OP, ROWS, K, PARTS, EXACT, WEIGHT, BIAS, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
        _end(mine, PARTS)


@gluon.jit
def _unit(bufs, vectors, stage, piece, mean, rstd, OP: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
          PIECES: gl.constexpr, WEIGHT: gl.constexpr, LAYOUT: gl.constexpr, SPREAD: gl.constexpr):  # fmt: skip
    """(softmax, or what was normalised; the gradient of y; weight) of a piece."""
    x = _spread(_piece(bufs[0].index(stage), piece, PIECES).load(LAYOUT), ROWS, K)
    dy = _spread(_piece(bufs[1].index(stage), piece, PIECES).load(LAYOUT), ROWS, K)
    scale = 1.0
    if OP == LAYER:
        x = x * rstd[:, None, None] - (mean * rstd)[:, None, None]
    elif OP == RMS:
        x = x * rstd[:, None, None]
    if WEIGHT:
        scale = _vector(_piece(vectors[0], piece, PIECES), LAYOUT, K, SPREAD)
    return x, dy, scale


@gluon.jit
def _backward_out(
    bufs, vectors, stage, tile, where, outs, mean, rstd, a, b, rows,
    OP: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr,
    EXACT: gl.constexpr, WEIGHT: gl.constexpr, DSUM: gl.constexpr, RESIDUAL: gl.constexpr, LAYOUT: gl.constexpr,
    SPREAD: gl.constexpr,
):  # fmt: skip
    first, step, lines, at = where
    dx, dresidual = outs
    width = lines * 64
    for piece in gl.static_range(PIECES):
        x, dy, scale = _unit(bufs, vectors, stage, piece, mean, rstd, OP, ROWS, K, PIECES, WEIGHT, LAYOUT, SPREAD)
        if OP == SOFTMAX:
            x = x * (dy - _wide(a, PARTS))
        else:
            x = x * _wide(a * (-1.0 / width), PARTS)
            if OP == LAYER:
                x = x - _wide(b * (1.0 / width), PARTS)
            x = (dy * scale + x) * rstd[:, None, None]
            if DSUM:
                x = x + _spread(_piece(bufs[2].index(stage), piece, PIECES).load(LAYOUT), ROWS, K)
            if RESIDUAL:
                copy = _gather(x, dresidual.dtype.element_ty, K, LAYOUT)
                _write(dresidual, copy, tile * ROWS, at, lines, rows, ROWS, EXACT, LAYOUT)
        _write(dx, _gather(x, dx.dtype.element_ty, K, LAYOUT), tile * ROWS, at, lines, rows, ROWS, EXACT, LAYOUT)
        at += bufs[0].shape[1] // PIECES
        if PIECES > 1:
            _in_turn()


@gluon.jit
def _known(means, rstds, tile, rows, OP: gl.constexpr, ROWS: gl.constexpr, EACH: gl.constexpr):
    """(means, rstds) of a tile; zeros behind the last row."""
    if OP == SOFTMAX:
        return 0.0, 0.0
    else:
        line = tile * ROWS + gl.arange(0, ROWS, layout=EACH)
        rstd = gl.load(rstds + line, mask=line < rows, other=0.0)
        mean = gl.load(means + line, mask=line < rows, other=0.0) if OP == LAYER else rstd
        return mean, rstd


@gluon.jit
def _store_sums(out, pieces, at, lines, K: gl.constexpr, LAYOUT: gl.constexpr, PARTS: gl.constexpr,
                PIECES: gl.constexpr, EXACT: gl.constexpr):  # fmt: skip
    """Sums over rows of a part, pieces of (rows, threads, numbers), to its line of `out` (programs, width)."""
    for piece in gl.static_range(PIECES):
        x = _gather(gl.expand_dims(gl.sum(pieces[piece], axis=0), 0), gl.float32, K, LAYOUT)
        _write(out, x, gl.program_id(0) // PARTS, at, lines, 0, 1, EXACT, LAYOUT)
        at += x.shape[0]


@gluon.jit(do_not_specialize=["notes", "rows", "tiles", "lines"])
def backward_rows_kernel(
    x_desc, dy_desc, ds_desc, weight, means, rstds, dx, dresidual, dweight, dbias, notes, rows, tiles, lines,
    OP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, PADDED: gl.constexpr,
    LATE: gl.constexpr, WARPS: gl.constexpr, EXACT: gl.constexpr, PIECES: gl.constexpr, WEIGHT: gl.constexpr,
    BIAS: gl.constexpr,
    DSUM: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """dx of x (rows, 64 lines), softmax or what was normalised, and of dy; tiles as in the forward.

    ds: the gradient of the sum that went out beside y, which is added to dx and to dresidual, a copy of it in its
    dtype. dweight, dbias: float32 sums of this program's rows, a line for every PARTS programs. PIECES: of a tile, for
    fewer registers; 1 with several rows.
    """
    LINES: gl.constexpr = x_desc.block_shape[1]
    SIZE: gl.constexpr = ROWS * LINES
    K: gl.constexpr = SIZE // (4 * WARPS * PIECES)
    LAYOUT: gl.constexpr = gl.BlockedLayout([K, 8], [4, 8], [WARPS, 1], [1, 0])
    COUNT: gl.constexpr = 3 if DSUM else 2
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_bufs, x_flat = _ring(x_desc, STAGES)
    dy_bufs, dy_flat = _ring(dy_desc, STAGES)
    ds_bufs = x_bufs
    ds_flat = x_flat
    if DSUM:
        ds_bufs, ds_flat = _ring(ds_desc, STAGES)
    filled = (x_bufs, dy_bufs, ds_bufs)
    bufs = (x_flat, dy_flat, ds_flat)
    descs = (x_desc, dy_desc, ds_desc)
    where = _begin(descs, full, lines, STAGES, PARTS)
    first, step, lines, at = where
    for i in range(STAGES):
        _ask(descs, filled, full, i, where, tiles, COUNT, STAGES, ROWS)
    w_buf = x_flat.index(0)
    if WEIGHT:
        w_buf = _keep(weight, x_desc, at, lines, EXACT, LAYOUT)
    vectors = (w_buf, w_buf)
    outs = (dx, dresidual)
    zeros = _spread(gl.full([SIZE // PIECES, 64], 0.0, gl.float32, LAYOUT), ROWS, K)
    SPREAD: gl.constexpr = zeros.type.layout
    EACH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SPREAD))
    of_weight = _nothing()
    for _ in gl.static_range(PIECES):
        of_weight = _with(of_weight, zeros)
    of_bias = of_weight
    mine = _notes_of(notes, PARTS)
    count = gl.cdiv(gl.maximum(tiles - first, 0), step)
    mean, rstd = _known(means, rstds, first, rows, OP, ROWS, EACH)
    for number in range(count):
        stage = number % STAGES
        tile = first + number * step
        mean_next, rstd_next = _known(means, rstds, tile + step, rows, OP, ROWS, EACH)
        if PARTS > 1:
            heard = _listen(mine, gl.maximum(number - LATE, 0), PARTS, PADDED)
            # loaded again, not kept: Triton 3.6 takes what is `mean` a turn late for what it is at first
            mean_out, rstd_out = _known(means, rstds, gl.maximum(tile - LATE * step, 0), rows, OP, ROWS, EACH)
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        a = gl.sum(zeros, axis=2)
        b = a
        sums_w = _nothing()
        sums_b = _nothing()
        for piece in gl.static_range(PIECES):
            x, dy, scale = _unit(bufs, vectors, stage, piece, mean, rstd, OP, ROWS, K, PIECES, WEIGHT, LAYOUT, SPREAD)
            x = x * dy
            if WEIGHT:
                sums_w = _with(sums_w, of_weight[piece] + x)
            if BIAS:
                sums_b = _with(sums_b, of_bias[piece] + dy)
            a += gl.sum(x * scale, axis=2)
            if OP == LAYER:
                b += gl.sum(dy * scale, axis=2)
            if PIECES > 1:
                _in_turn()
        if WEIGHT:
            of_weight = sums_w
        if BIAS:
            of_bias = sums_b
        barrier()  # all are through with the tile before
        if number > LATE:
            _ask(descs, filled, full, number - 1 - LATE + STAGES, where, tiles, COUNT, STAGES, ROWS)
        if OP == LAYER:
            a, b = gl.reduce((a, b), 1, _plus)
        else:
            a = gl.sum(a, axis=1)
            b = a
        if PARTS > 1:
            _tell(mine, number, a, b, PARTS)
            if number >= LATE:
                all_a, all_b = _hear(heard, mine, number - LATE, PARTS, PADDED)
                _backward_out(bufs, vectors, (number - LATE) % STAGES, tile - LATE * step, where, outs, mean_out,
                              rstd_out, gl.sum(_once(all_a, PARTS), axis=0), gl.sum(_once(all_b, PARTS), axis=0), rows,
                              OP, ROWS, K, PARTS, PIECES, EXACT, WEIGHT, DSUM, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
        else:
            _backward_out(bufs, vectors, stage, tile, where, outs, mean, rstd, a, b, rows, OP, ROWS, K, PARTS, PIECES,
                          EXACT, WEIGHT, DSUM, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
        mean = mean_next
        rstd = rstd_next
    if PARTS > 1:
        for before in range(gl.maximum(count - LATE, 0), count):
            mean_out, rstd_out = _known(means, rstds, first + before * step, rows, OP, ROWS, EACH)
            heard = _listen(mine, before, PARTS, PADDED)
            all_a, all_b = _hear(heard, mine, before, PARTS, PADDED)
            _backward_out(bufs, vectors, before % STAGES, first + before * step, where, outs, mean_out, rstd_out,
                          gl.sum(_once(all_a, PARTS), axis=0), gl.sum(_once(all_b, PARTS), axis=0), rows, OP, ROWS, K,
                          PARTS, PIECES, EXACT, WEIGHT, DSUM, RESIDUAL, LAYOUT, SPREAD)  # fmt: skip
        _end(mine, PARTS)
    if WEIGHT:
        _store_sums(dweight, of_weight, at, lines, K, LAYOUT, PARTS, PIECES, EXACT)
    if BIAS:
        _store_sums(dbias, of_bias, at, lines, K, LAYOUT, PARTS, PIECES, EXACT)
