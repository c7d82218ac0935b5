"""Device functions shared by the Hopper (sm_90a) attention kernels, written in Gluon.

Named barriers, tile order, masks, softmax steps and the way out. Gluon has no call for PTX named barriers, so they are
inline PTX; ids 0 to 4 are for Triton itself, ours start at 8.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from gpu_accel.gluon_compat import tma_store

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
PLACE = gl.constexpr(4)  # integers of a queue slot with a tile's number and place
NEG_LARGE = gl.constexpr(-1.0e30)  # finite stand-in for -inf in running maxima: exp2(-inf - finite) = 0, never NaN


@gluon.jit
def _on_barrier(INSTRUCTION: gl.constexpr, PLACE_OF: gl.constexpr, barrier, threads: gl.constexpr):
    """bar.sync or bar.arrive of PTX; the barrier's number stands in the instruction ("n") or in a register ("r")."""
    gl.inline_asm_elementwise(INSTRUCTION + " $1, $2; mov.b32 $0, 0;", "=r," + PLACE_OF + ",n",
                              [gl.to_tensor(barrier), gl.to_tensor(threads)],
                              dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def bar_sync(barrier: gl.constexpr, threads: gl.constexpr):
    """Wait on named barrier `barrier` until `threads` threads have arrived (this one included)."""
    _on_barrier("bar.sync", "n", barrier, threads)


@gluon.jit
def bar_arrive(barrier: gl.constexpr, threads: gl.constexpr):
    """Arrive on named barrier `barrier` without waiting."""
    _on_barrier("bar.arrive", "n", barrier, threads)


@gluon.jit
def bar_sync_at(barrier, threads: gl.constexpr):
    """`bar_sync` on a barrier whose number is not known at compile time."""
    _on_barrier("bar.sync", "r", barrier, threads)


@gluon.jit
def bar_arrive_at(barrier, threads: gl.constexpr):
    """`bar_arrive` on a barrier whose number is not known at compile time."""
    _on_barrier("bar.arrive", "r", barrier, threads)


@gluon.jit
def release(empty, index, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Consumer: buffer `index` has been read.

    On named barrier BARRIER + index, where there is one, each warp for itself; the producer waits there, THREADS with
    its own 32. Else on mbarrier `empty`, for which the warps meet first.
    """
    if BARRIER is None:
        mbarrier.arrive(empty.index(index), count=1)
    else:
        bar_arrive_at(BARRIER + index, THREADS)


@gluon.jit
def tile_of(index, shape, HEAVY_FIRST: gl.constexpr):
    """Tile number -> (query block, batch, head); `shape` as in hopper_forward.py.

    With HEAVY_FIRST (causal) the tiles of `group` heads, whose K and V fit in L2 together, come longest rows first.
    """
    _, _, heads, _, num_m, _, group, _, _ = shape
    if HEAVY_FIRST:
        per_group = num_m * group
        g = index // per_group
        r = index - g * per_group
        m = num_m - 1 - r // group
        batch_head = g * group + r % group
    else:
        batch_head = index // num_m
        m = index - batch_head * num_m
    batch = batch_head // heads
    return m, batch, batch_head - batch * heads


@gluon.jit
def key_blocks(row0, rows, shape, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """First and one-past-last key block that rows [row0, row0 + rows) see; one at least, so masked rows get written."""
    seqlen_q, seqlen_k, _, _, _, _, _, left, right = shape
    shift = seqlen_k - seqlen_q
    hi = gl.cdiv(seqlen_k, BLOCK_N)
    lo = 0
    if CAUSAL:
        hi = gl.minimum(hi, gl.cdiv(gl.maximum(row0 + rows + shift + right, 0), BLOCK_N))
    if WINDOW:
        lo = gl.maximum(row0 + shift - left, 0) // BLOCK_N
    hi = gl.maximum(hi, 1)
    lo = gl.minimum(lo, hi - 1)
    return lo, hi


@gluon.jit
def mask_ends(
    row0, rows, shift, lo, hi, left, right, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """(first, left_end) of the blocks [lo, hi) that rows [row0, row0 + rows) see, of which hi - 1 is done: [first, hi)
    need the right mask, [lo, left_end) the left one. `shift`: keys less queries."""
    first = hi - 1
    left_end = lo
    if CAUSAL:
        first = gl.minimum(first, gl.maximum(row0 + shift + right + 1, 0) // BLOCK_N)
    if WINDOW:
        left_end = gl.cdiv(gl.maximum(row0 + rows - 1 + shift - left, 0), BLOCK_N)
    return first, left_end


@gluon.jit
def issue_product(a, b, LAYOUT: gl.constexpr):
    """a b, asynchronous, in float32; b, and perhaps a, in shared memory."""
    zero = gl.full([a.shape[0], b.shape[1]], 0.0, gl.float32, LAYOUT)
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def columns_of(s):
    """(c0, c1) of all columns c = c0 + c1 of a wgmma accumulator: a constant for each register, one number a thread.

    Comparisons then take constants. The sum would be kept in a register for each column, over all of the loop.
    """
    c = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    return (c & -7)[None, :], (c & 6)[None, :]


@gluon.jit
def mask_right(s, limit_base, col_limit):
    """Keep column c of row r where c <= min(r + limit_base, col_limit)."""
    rows: gl.constexpr = s.shape[0]
    limit = gl.minimum(gl.arange(0, rows, layout=gl.SliceLayout(1, s.type.layout)) + limit_base, col_limit)
    constant, lane = columns_of(s)
    return gl.where(constant <= limit[:, None] - lane, s, float("-inf"))


@gluon.jit
def mask_columns(s, col_limit):
    """Keep columns c <= col_limit."""
    constant, lane = columns_of(s)
    return gl.where(constant <= col_limit - lane, s, float("-inf"))


@gluon.jit
def mask_left(s, limit_base):
    """Keep column c of row r where c >= r + limit_base."""
    rows: gl.constexpr = s.shape[0]
    limit = gl.arange(0, rows, layout=gl.SliceLayout(1, s.type.layout)) + limit_base
    constant, lane = columns_of(s)
    return gl.where(constant >= limit[:, None] - lane, s, float("-inf"))


@gluon.jit
def thread_row_sum(p):
    """Row sums over the columns that each thread owns, (rows, 4): one column per thread of a quad, no shuffle."""
    rows: gl.constexpr = p.shape[0]
    cols: gl.constexpr = p.shape[1]
    q = p.reshape((rows, cols // 8, 4, 2))
    return gl.sum(gl.sum(q, axis=3), axis=1)


@gluon.jit
def pack_pairs(p, dtype: gl.constexpr):
    """(rows, cols) float32 -> (rows, cols / 2) int32, two neighbours of a row in bf16 or fp16 in each.

    Values that live across loops are kept packed: carried as 16-bit scalars, ptxas takes them apart and together again
    with 64 PRMT a step.
    """
    rows: gl.constexpr = p.shape[0]
    cols: gl.constexpr = p.shape[1]
    even, odd = gl.split(p.reshape((rows, cols // 2, 2)))
    if dtype == gl.bfloat16:
        CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        CONVERT: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x, dtype: gl.constexpr, layout: gl.constexpr):
    """Inverse of `pack_pairs`, in `layout`; costs no instruction next to a wgmma."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = 2 * x.shape[1]
    low = x.to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape((rows, cols)), layout, assert_trivial=True)


@gluon.jit
def unpack_floats(x, dtype: gl.constexpr, layout: gl.constexpr):
    """`unpack_pairs` as float32. bfloat16 is its upper half, so one shift or one mask a number is enough."""
    if dtype == gl.bfloat16:
        low = (x << 16).to(gl.float32, bitcast=True)
        high = (x & -65536).to(gl.float32, bitcast=True)
        y = gl.join(low, high).reshape((x.shape[0], 2 * x.shape[1]))
        return gl.convert_layout(y, layout, assert_trivial=True)
    else:
        return unpack_pairs(x, dtype, layout).to(gl.float32)


@gluon.jit
def tanh(x):
    """tanh in float32 from exp2 and a division: unlike tanh.approx its error stays far below bfloat16's."""
    e = gl.exp2(x * 2.8853900817779268)  # exp(2x); inf for large x gives 1, 0 for very negative x gives -1
    return 1.0 - 2.0 / (e + 1.0)


# Two rows a thread: their factors are operands 64 (elements 0, 1 of every four) and 66. Nobody in the warp has a factor
# other than 1 in most steps, and then all of them skip the multiplications.
_RESCALE = gl.constexpr(
    "{ .reg .pred p, q; setp.neu.f32 p, $64, 0f3F800000; setp.neu.or.f32 p, $66, 0f3F800000, p; "
    "vote.sync.any.pred q, p, 0xffffffff; @!q bra DONE; "
    + " ".join(f"mul.f32 ${i}, ${i}, ${64 + (i & 2)};" for i in range(32))
    + " DONE: }"
)
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))


@gluon.jit
def rescale(acc, alpha):
    """acc * alpha[:, None] for a wgmma accumulator (rows, cols >= 64) in float32, with a branch around it."""
    factors = gl.full(acc.shape, 0.0, gl.float32, acc.type.layout) + alpha[:, None]
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_OPERANDS, [acc, factors], dtype=gl.float32, is_pure=False, pack=32
    )


@gluon.jit
def draw(counter, wanted):
    """Where `wanted`, count up by one: lane 0 of (32,) gets the old count, all others 0. One warp.

    Unlike a scalar atomic it doesn't wait: the first use of the result does.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    address = gl.full([32], 0, gl.int64, layout) + counter.to(gl.int64)
    wanted = gl.full([32], 0, gl.int32, layout) + wanted.to(gl.int32)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; setp.ne.and.u32 p, $2, 0, p; "
        "mov.u32 $0, 0; @p atom.global.add.u32 $0, [$1], 1; }",
        "=&r,l,r",
        [address, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def rewind(counter, tile, num_tiles):
    """Each program draws one number past the end; the last of them resets the counter for the next launch."""
    if tile == num_tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def publish_tile(k, tile, schedule, full, empty):
    """Producer: hand tile number `tile` to the consumers through the two-slot queue."""
    slot = k & 1
    mbarrier.wait(empty.index(slot), ((k >> 1) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    schedule.index(slot).store(gl.full([1], 0, gl.int32, layout) + tile)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def receive_tile(k, schedule, full, empty):
    """Consumer: the k-th tile number that the producer published."""
    slot = k & 1
    mbarrier.wait(full.index(slot), (k >> 1) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = gl.max(schedule.index(slot).load(layout), axis=0)
    mbarrier.arrive(empty.index(slot), count=1)
    return tile


@gluon.jit
def publish_place(k, tile, place, queue, full):
    """Producer: hand on a tile's number and (query block, batch, head), which takes divisions to find.

    Nothing is waited for: that tile k - 2's entry has been read follows from a barrier passed on the way here.
    """
    slot = k & 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    queue.index(slot * PLACE).store(zero + tile)
    for i in gl.static_range(PLACE - 1):
        queue.index(slot * PLACE + 1 + i).store(zero + place[i])
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def receive_place(k, queue, full):
    """Consumer: the k-th tile's number, query block, batch and head."""
    slot = k & 1
    mbarrier.wait(full.index(slot), (k >> 1) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = gl.max(queue.index(slot * PLACE).load(layout), axis=0)
    m_block = gl.max(queue.index(slot * PLACE + 1).load(layout), axis=0)
    batch = gl.max(queue.index(slot * PLACE + 2).load(layout), axis=0)
    head = gl.max(queue.index(slot * PLACE + 3).load(layout), axis=0)
    return tile, m_block, batch, head


@gluon.jit
def quarters(x):
    """(rows, cols) as an accumulator holds it -> four times (rows, cols / 4), from the left; nothing moves."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = x.shape[1] // 4
    low, high = gl.split(x.reshape((rows, 2, 2 * cols)).permute((0, 2, 1)))
    c0, c1 = gl.split(low.reshape((rows, 2, cols)).permute((0, 2, 1)))
    c2, c3 = gl.split(high.reshape((rows, 2, cols)).permute((0, 2, 1)))
    return c0, c1, c2, c3


@gluon.jit
def _store_quarter(chunk, buffer, o_desc, batch, head, row0, col):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, chunk.shape[1], 16])
    tma.store_wait(1)  # the copy before the last has read its buffer, which is this one
    buffer.store(gl.convert_layout(chunk.to(buffer.dtype), LAYOUT))
    fence_async_shared()
    tma_store(o_desc, [batch, head, row0, col], buffer)


@gluon.jit
def store_whole(acc, o_bufs, o_desc, batch, head, row0, WG: gl.constexpr):
    """acc to o through shared memory and TMA: whole, or in quarters where consumer WG has two buffers of that size."""
    COLS: gl.constexpr = o_bufs.shape[2]
    if acc.shape[1] == COLS:
        tma.store_wait(0)
        o_bufs.index(WG).store(acc.to(o_bufs.dtype))
        fence_async_shared()
        tma_store(o_desc, [batch, head, row0, 0], o_bufs.index(WG))
    else:
        # a whole tile would not fit beside Q, K and V: quarters, through two buffers in turn
        gl.static_assert(acc.shape[1] == 4 * COLS)
        c0, c1, c2, c3 = quarters(acc)
        _store_quarter(c0, o_bufs.index(2 * WG), o_desc, batch, head, row0, 0)
        _store_quarter(c1, o_bufs.index(2 * WG + 1), o_desc, batch, head, row0, COLS)
        _store_quarter(c2, o_bufs.index(2 * WG), o_desc, batch, head, row0, 2 * COLS)
        _store_quarter(c3, o_bufs.index(2 * WG + 1), o_desc, batch, head, row0, 3 * COLS)
