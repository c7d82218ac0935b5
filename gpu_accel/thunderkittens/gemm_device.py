"""Device functions shared by the Hopper (sm_90a) matrix products, written in Gluon.

Order of the tiles, the ring of stages, and what happens to a finished accumulator: bias, activation, packing to 16 bits
and the way out through shared memory and TMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from gpu_accel.flash_attention3.hopper_device import pack_pairs, unpack_pairs
from gpu_accel.gluon_compat import tma_store

NOWHERE = gl.constexpr(1 << 30)  # a row behind every matrix: TMA writes nothing there

# Activations, by number
NONE = gl.constexpr(0)
RELU = gl.constexpr(1)
GELU = gl.constexpr(2)
GELU_TANH = gl.constexpr(3)
SILU = gl.constexpr(4)


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Tile number -> (tile row, tile column): column after column of GROUP rows, so that both operands stay in L2."""
    per_group = GROUP * tiles_n
    group = tile // per_group
    first = group * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    rest = tile - group * per_group
    column = rest // rows
    return first + rest - column * rows, column


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The stage after `stage` of a ring, and the phase of its barriers."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def previous(stage, STAGES: gl.constexpr):
    """The stage before `stage` of a ring.

    To be computed, not kept: Triton takes a variable that a loop sets to what it held before the loop, at the first
    turn (`before = stage`), for one that the loop does not change.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def first_slice(program, slices):
    """Where the piece of `program` begins, of `slices` dealt evenly to all programs."""
    return ((slices + 0).to(gl.int64) * program // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def program_of(unit, slices):
    """The program whose piece has slice `unit`."""
    return (((unit + 1).to(gl.int64) * gl.num_programs(0) - 1) // slices).to(gl.int32)


@gluon.jit
def pieces_of(k_steps, tiles, dealt):
    """(items of this program, how many of them are pieces, where these begin, where they end): see `item`."""
    program = gl.program_id(0)
    begin = first_slice(program, dealt * k_steps)
    end = first_slice(program + 1, dealt * k_steps)
    pieces = gl.cdiv(end, k_steps) - begin // k_steps
    whole = gl.cdiv(gl.maximum(tiles - dealt - program, 0), gl.num_programs(0))
    return pieces + whole, pieces, begin, end


@gluon.jit
def item(number, tiles, k_steps, dealt, items, pieces, begin, end):
    """(tile, first slice, one past the last slice) of an item of this program.

    The last `dealt` tiles are dealt to all programs in slices, so that all finish together. The others come whole, and
    first: programs that stay in step share what they read in L2, and those that start with pieces never are.
    """
    whole = gl.num_programs(0) * number + gl.program_id(0)
    number -= items - pieces
    tile = begin // k_steps + number
    k0 = gl.maximum(begin - tile * k_steps, 0)
    k1 = gl.minimum(end - tile * k_steps, k_steps)
    is_piece = number >= 0
    return gl.where(is_piece, tiles - dealt + tile, whole), gl.where(is_piece, k0, 0), gl.where(is_piece, k1, k_steps)


@gluon.jit
def own_slot(program, k0):
    """Where a program leaves its part of a shared tile: it has at most one that it begins, and one begun by another."""
    return program * 2 + gl.where(k0 == 0, 1, 0)


@gluon.jit
def slot_of(program, first):
    """Where `program` left its part of a tile that `first` began."""
    return program * 2 + gl.where(program == first, 1, 0)


@gluon.jit
def partial(partials, slot, ROWS: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Pointers (ROWS, COLS) to a slot of `partials`."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    return partials + slot.to(gl.int64) * (ROWS * COLS) + rows[:, None] * COLS + cols[None, :]


_COUNT = gl.constexpr(
    "{ .reg .pred p; fence.acq_rel.gpu; bar.sync $3, 128; setp.eq.u32 p, $2, 0; mov.u32 $0, 0; "
    "@p atom.global.acq_rel.gpu.add.u32 $0, [$1], 1; bar.sync $3, 128; fence.acq_rel.gpu; }"
)
_COUNT_BY_ONE = gl.constexpr(
    "{ .reg .pred p; bar.sync $3, 128; setp.eq.u32 p, $2, 0; mov.u32 $0, 0; "
    "@p atom.global.acq_rel.gpu.add.u32 $0, [$1], 1; bar.sync $3, 128; }"
)


@gluon.jit
def count(counter, BARRIER: gl.constexpr, ONE: gl.constexpr = False):
    """Count up by one after everything that this warpgroup wrote is visible; the count before, in all threads.

    BARRIER: a named barrier for this warpgroup alone.
    ONE: with one fence, that of the thread that counts, in place of two of every thread: the barrier before it makes
    what the others wrote its thread's own, and the one behind it hands on what it has seen.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, 128, layout=layout)
    address = gl.full([128], 0, gl.int64, layout) + counter.to(gl.int64)
    barrier = gl.full([128], BARRIER, gl.int32, layout)
    how: gl.constexpr = _COUNT_BY_ONE if ONE else _COUNT
    old = gl.inline_asm_elementwise(
        how, "=&r,l,r,r", [address, thread, barrier], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.sum(old, axis=0)


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    """The activation of a float32 tensor."""
    if ACTIVATION == RELU:
        x = gl.where(x < 0.0, 0.0, x)  # keeps NaN, which a maximum would drop
    elif ACTIVATION == GELU:
        # erfc by Abramowitz and Stegun 7.1.26, error 1.5e-7: libdevice's erf of 128 sums spills and is long to compile
        z = gl.abs(x) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.3275911 * z)
        p = 1.061405429 * t - 1.453152027
        p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * p)))
        tail = 0.5 * p * gl.exp2(-1.4426950408889634 * z * z)
        x = x * gl.where(x < 0.0, tail, 1.0 - tail)
    elif ACTIVATION == GELU_TANH:
        # 0.5 (1 + tanh y) is 1 / (1 + exp(-2y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
        x = x / (1.0 + gl.exp2(-2.302208198144325 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == SILU:
        x = x / (1.0 + gl.exp2(-1.4426950408889634 * x))
    return x


@gluon.jit
def add_bias(acc, bias, col0, N, BIAS: gl.constexpr):
    """acc + bias[col0 ...] along its columns."""
    if BIAS:
        cols = col0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def store_direct(acc, out, row0, col0, M, N, pitch):
    """Write an accumulator from registers, where TMA cannot or the pieces are too large for shared memory."""
    layout: gl.constexpr = acc.type.layout
    rows = row0 + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    pointers = out + rows.to(gl.int64)[:, None] * pitch + cols[None, :]
    gl.store(pointers, acc.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])


@gluon.jit
def add_direct(acc, out, row0, col0, M, N, pitch):
    """out += acc, float32, by the memory system: to load what is there would take 64 registers more."""
    layout: gl.constexpr = acc.type.layout
    rows = row0 + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col0 + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    pointers = out + rows.to(gl.int64)[:, None] * pitch + cols[None, :]
    gl.atomic_add(pointers, acc, mask=(rows < M)[:, None] & (cols < N)[None, :], sem="relaxed")


@gluon.jit
def store_packed(packed, buffers, first, out_desc, row, col, LAYOUT: gl.constexpr, CHUNKS: gl.constexpr):
    """Write packed rows through shared memory and TMA, in CHUNKS column pieces that take turns in one buffer."""
    x = unpack(packed, out_desc.dtype, LAYOUT)
    if CHUNKS == 1:
        tma.store_wait(0)
        buffers.index(first).store(x)
        fence_async_shared()
        tma_store(out_desc, [row, col], buffers.index(first))
    else:
        gl.static_assert(CHUNKS == 2)
        ROWS: gl.constexpr = x.shape[0]
        COLS: gl.constexpr = x.shape[1] // 2
        CHUNK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        low, high = gl.split(x.reshape((ROWS, 2, COLS)).permute((0, 2, 1)))
        tma.store_wait(0)
        buffers.index(first).store(gl.convert_layout(low, CHUNK))
        fence_async_shared()
        tma_store(out_desc, [row, col], buffers.index(first))
        tma.store_wait(0)
        buffers.index(first).store(gl.convert_layout(high, CHUNK))
        fence_async_shared()
        tma_store(out_desc, [row, col + COLS], buffers.index(first))


@gluon.jit
def write_packed(
    packed, buffers, first, out_desc, out, row, col, M, N,
    LAYOUT: gl.constexpr, CHUNKS: gl.constexpr, dtype: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Write packed rows of a finished tile, by TMA or (DIRECT) from registers."""
    if DIRECT:
        store_direct(unpack(packed, dtype, LAYOUT), out, row, col, M, N, N)
    else:
        store_packed(packed, buffers, first, out_desc, row, col, LAYOUT, CHUNKS)


@gluon.jit
def pack(acc, dtype: gl.constexpr):
    """float32 accumulator -> pairs in bf16 or fp16, half the registers, or fours in fp8 (saturating), a quarter."""
    if dtype.primitive_bitwidth == 8:
        return pack_fours(acc, dtype)
    else:
        return pack_pairs(acc, dtype)


@gluon.jit
def unpack(packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Inverse of `pack`, in `LAYOUT`."""
    if dtype.primitive_bitwidth == 8:
        return unpack_fours(packed, dtype, LAYOUT)
    else:
        return unpack_pairs(packed, dtype, LAYOUT)


@gluon.jit
def pack_fours(p, dtype: gl.constexpr):
    """(rows, cols) float32 -> (rows, cols / 16, 4) int32: columns 0, 1, 8 and 9 behind each of four places in 16, which
    one thread of a wgmma accumulator holds."""
    rows: gl.constexpr = p.shape[0]
    cols: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape((rows, cols // 16, 2, 4, 2)))
    even0, even1 = gl.split(even.permute((0, 1, 3, 2)))
    odd0, odd1 = gl.split(odd.permute((0, 1, 3, 2)))
    E4M3: gl.constexpr = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
        "mov.b32 $0, {l, h}; }"
    )
    E5M2: gl.constexpr = (
        "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; "
        "mov.b32 $0, {l, h}; }"
    )
    CONVERT: gl.constexpr = E4M3 if dtype == gl.float8e4nv else E5M2
    parts = [even0, odd0, even1, odd1]
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f,f,f", parts, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_fours(x, dtype: gl.constexpr, layout: gl.constexpr):
    """Inverse of `pack_fours`, in `layout`."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = 16 * x.shape[1]
    even0 = x.to(gl.int8).to(dtype, bitcast=True)
    odd0 = (x >> 8).to(gl.int8).to(dtype, bitcast=True)
    even1 = (x >> 16).to(gl.int8).to(dtype, bitcast=True)
    odd1 = (x >> 24).to(gl.int8).to(dtype, bitcast=True)
    both = gl.join(gl.join(even0, even1), gl.join(odd0, odd1))  # (rows, cols / 16, 4, half of 16, neighbour)
    return gl.convert_layout(both.permute((0, 1, 3, 2, 4)).reshape((rows, cols)), layout, assert_trivial=True)


@gluon.jit
def note_largest(acc, rows, M, largest):
    """Raise `largest` (int32, the bits of a float32) to the largest magnitude in `acc`; rows behind M don't count."""
    bits = acc.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # in the order of magnitudes, and NaN above all
    bits = gl.where((rows < M)[:, None], bits, 0)
    gl.atomic_max(largest, gl.max(gl.max(bits, axis=1), axis=0), sem="relaxed")
