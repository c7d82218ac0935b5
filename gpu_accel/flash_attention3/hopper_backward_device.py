"""Device functions shared by the Hopper backward kernels: order of tiles, masks, fragments, ways out."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from gpu_accel.gluon_compat import tma_add, tma_store

from .hopper_backward_packed import keep_seen
from .hopper_device import columns_of, pack_pairs, publish_tile, receive_tile, tanh, unpack_pairs
from .hopper_modifiers import add_alibi, call_mask_mod, call_score_mod, call_score_mod_grad, cap_out, list_of

KEYS = gl.constexpr(64)  # keys of S^T that one warpgroup works on: the M of wgmma

# Named barriers of the kernels of one pass with dQ among the consumers
TURN = gl.constexpr(8)  # and 9: whose turn it is to compute exponentials
EXCHANGED = gl.constexpr(10)  # to 13: dS of consumer (id - 10) // 2 and stage (id - 10) % 2 is in shared memory
FINISHED = gl.constexpr(14)  # and 15: consumer (id - 14) has read K for the last dQ of a tile


@gluon.jit
def here_and_now(x):
    """x, in a way that the compiler cannot move out of a loop: addresses hoisted for every product get spilled."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def tile_at(index, num_n, heads, group, HEAVY_FIRST: gl.constexpr, LAST_FIRST: gl.constexpr = False):
    """Tile number -> (block, batch, head); with HEAVY_FIRST block 0 of `group` heads first, then block 1 and so on.

    LAST_FIRST: blocks of a head from the last one to block 0.
    """
    if HEAVY_FIRST:
        per_group = num_n * group
        g = index // per_group
        r = index - g * per_group
        n = r // group
        batch_head = g * group + r - n * group
    else:
        batch_head = index // num_n
        n = index - batch_head * num_n
    batch = batch_head // heads
    head = batch_head - batch * heads
    if LAST_FIRST:
        n = num_n - 1 - n
    return n, batch, head


@gluon.jit
def next_tile(tile, k, queue, full, empty, DYNAMIC: gl.constexpr):
    """Consumer: the tile after the k-th, from the queue (DYNAMIC) or as they are dealt in order."""
    if DYNAMIC:
        tile = receive_tile(k, queue, full, empty)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def hand_out_tile(tile, k, counter, queue, full, empty, DYNAMIC: gl.constexpr):
    """Producer: the tile after the k-th, drawn and handed to the consumers (DYNAMIC), or as they are dealt in order."""
    if DYNAMIC:
        tile = gl.atomic_add(counter, 1) + gl.num_programs(0)
        publish_tile(k, tile, queue, full, empty)
    else:
        tile += gl.num_programs(0)
    return tile


@gluon.jit
def reset_counter(tile, counter, num_tiles):
    """Every program draws exactly one number past the end; the last of them resets the counter for the next launch."""
    if tile == num_tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def query_blocks(
    key0, shift, num_m, left, right,
    M: gl.constexpr, TILE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """First and one-past-last query block that sees keys [key0, key0 + TILE); at least one: zeros must be written."""
    lo = 0
    hi = num_m
    if CAUSAL:
        lo = gl.minimum(gl.maximum(key0 - shift - right, 0) // M, num_m - 1)
    if WINDOW:
        hi = gl.minimum(hi, gl.maximum(key0 + TILE - 1 - shift + left, 0) // M + 1)
        hi = gl.maximum(hi, lo + 1)
    return lo, hi


@gluon.jit
def first_step(
    tile, num_n, heads_kv, per_kv, group, shift, num_m, left, right,
    M: gl.constexpr, TILE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    HEAVY_FIRST: gl.constexpr = None, LAST_FIRST: gl.constexpr = False,
):  # fmt: skip
    """Key block of a tile, its first query head (of all batches), first query block and number of blocks."""
    ORDER: gl.constexpr = CAUSAL if HEAVY_FIRST is None else HEAVY_FIRST
    n_block, batch, head_kv = tile_at(tile, num_n, heads_kv, group, ORDER, LAST_FIRST)
    lo, hi = query_blocks(n_block * TILE, shift, num_m, left, right, M, TILE, CAUSAL, WINDOW)
    return n_block, (batch * heads_kv + head_kv) * per_kv, lo, hi - lo


@gluon.jit
def listed_tile(table, mods, head, heads, n_block):
    """Of a tile of keys and a query head (of all batches): its list of query blocks, and how many there are."""
    row = list_of(table, mods, head // heads, head % heads, n_block)
    return row, gl.load(row)


@gluon.jit
def exponentials(
    s, lse, row0, key0, shift, seqlen_k, qk_scale, cap_in, kind, at, mods,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
    ROWS_DIM: gl.constexpr,
):  # fmt: skip
    """P of a block of scores, not masked by position yet, and what `times_slopes` asks for: tanh of capped scores, and
    scores before SCORE_MOD. Queries are in dimension ROWS_DIM; the rest as in `modified_probabilities`."""
    NATURAL: gl.constexpr = ALIBI or SCORE_MOD is not None
    batch, head = at
    capped = s
    if SOFTCAP:
        capped = tanh(s * cap_in)
        s = capped
        if NATURAL:
            s = cap_out(s, mods)
    elif NATURAL:
        s = s * cap_in
    if ALIBI:
        s = add_alibi(s, row0, key0, shift, batch, head, mods, ROWS_DIM)
    before = s
    if SCORE_MOD is not None:
        s = call_score_mod(s, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods, SCORE_MOD, ROWS_DIM)
    p = gl.exp2(s * qk_scale - lse)
    if BLOCKS or MASK_MOD is not None:
        p = call_mask_mod(p, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods, kind, 0.0, MASK_MOD,
                          BLOCKS, ROWS_DIM)  # fmt: skip
    return p, capped, before


@gluon.jit
def times_slopes(
    p, capped, before, row0, key0, shift, seqlen_k, at, mods,
    SOFTCAP: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr, ROWS_DIM: gl.constexpr,
):  # fmt: skip
    """P times the derivatives of what became of scores: see `exponentials`.

    A derivative is linear in the gradient that it is given, so it can be taken of P before dP is there.
    """
    batch, head = at
    if SCORE_MOD is not None:
        p = call_score_mod_grad(p, before, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods,
                                SCORE_MOD_GRAD, ROWS_DIM)  # fmt: skip
    if SOFTCAP:
        p = p * (1.0 - capped * capped)
    return p


@gluon.jit
def probabilities(
    s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in,
    DTYPE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """P^T of a block of scores S^T, packed, and the factor of dS^T, which is P^T but for softcap."""
    return modified_probabilities(
        s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in, 2, (0, 0), (), (),
        DTYPE, CAUSAL, WINDOW, SOFTCAP, EVEN_K, False, False, None, None, None, False)  # fmt: skip


@gluon.jit
def modified_probabilities(
    s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in, kind, at, seen, mods,
    DTYPE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    PACKED: gl.constexpr, ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr,
    MASK_MOD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """`probabilities` with biases, modifiers and block lists; `kind` and `mods`: see hopper_modifiers.py.

    `at` is (batch, query head); `seen` as from `packed_tile`, where PACKED.
    """
    p, capped, before = exponentials(s, lse[None, :], row0, key0, shift, seqlen_k, qk_scale, cap_in, kind, at, mods,
                                     SOFTCAP, ALIBI, SCORE_MOD, MASK_MOD, BLOCKS, 1)  # fmt: skip
    M: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    if PACKED:
        p = keep_seen(p, row0, seen)
    elif CAUSAL or WINDOW or not EVEN_K:
        masked = key0 + KEYS > seqlen_k
        if CAUSAL:
            masked = masked | (key0 + KEYS - 1 > row0 + shift + right)
        if WINDOW:
            masked = masked | (key0 < row0 + M - 1 + shift - left)
        if masked:
            row, lane = columns_of(p)
            key = key0 + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
            first = key - shift - row0
            if CAUSAL:
                first -= right
            else:
                first = first * 0
            first = gl.where(key < seqlen_k, first, M)
            p = gl.where(row >= first[:, None] - lane, p, 0.0)
            if WINDOW:
                last = key - shift - row0 + left
                p = gl.where(row <= last[:, None] - lane, p, 0.0)
    packed = pack_pairs(p, DTYPE)
    factor = packed
    if SOFTCAP or SCORE_MOD is not None:
        p = times_slopes(p, capped, before, row0, key0, shift, seqlen_k, at, mods,
                         SOFTCAP, SCORE_MOD, SCORE_MOD_GRAD, 1)  # fmt: skip
        factor = pack_pairs(p, DTYPE)
    return packed, factor


@gluon.jit
def stage_fragment(buf, x):
    """Put a (64, 64) accumulator into a buffer that nobody reads any more, in the order that threads hold it.

    See `dq_finish`.
    """
    # (row / 16, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2) -> four numbers of a thread side by side
    buf.store(x.reshape((4, 2, 8, 8, 4, 2)).permute((0, 3, 2, 4, 1, 5)).reshape((16, 256)))
    fence_async_shared()


@gluon.jit
def put_fragment(desc, fragment, buf, x):
    """Add a (64, 64) accumulator to fragment number `fragment`, out of a buffer that nobody reads any more."""
    stage_fragment(buf, x)
    tma_add(desc, [fragment * 16, 0], buf)


@gluon.jit
def send_fragment(desc, fragment, buf, x):
    """`put_fragment` when the last copy out of the buffer is over."""
    tma.store_wait(0)
    put_fragment(desc, fragment, buf, x)


@gluon.jit
def half_of_dq(ds, other_ds, keys, other_keys, zero, HALF: gl.constexpr, M: gl.constexpr):
    """Half of a step's dQ = dS K, rows (M of 128) or columns (64, 64), from dS and K of both consumers: under way."""
    if M == 128:
        ds, other_ds = ds.slice(HALF * 64, 64, dim=1), other_ds.slice(HALF * 64, 64, dim=1)
    else:
        keys, other_keys = keys.slice(HALF * 64, 64, dim=1), other_keys.slice(HALF * 64, 64, dim=1)
    dq = warpgroup_mma(ds.permute((1, 0)), keys, zero, use_acc=False, is_async=True)
    return warpgroup_mma(other_ds.permute((1, 0)), other_keys, dq, is_async=True)


@gluon.jit
def free_keys(k_empty, v_empty, k, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr):
    """dK and dV of the tile before have left shared memory."""
    mbarrier.arrive(k_empty.index((k + K_SLOTS - 1) % K_SLOTS), count=1)
    if V_SLOTS > 1:
        mbarrier.arrive(v_empty.index((k + V_SLOTS - 1) % V_SLOTS), count=1)


@gluon.jit
def keys_to_memory(
    dk, dv, scale, dk_desc, dv_desc, k_own, v_own, tile, shape, WG: gl.constexpr, HEAVY_FIRST: gl.constexpr
):
    """A consumer's half of a tile's dV and dK (times `scale`), through buffers that nobody reads any more."""
    _, _, heads_kv, _, _, num_n, _, group, _, _ = shape
    v_own.store(dv.to(v_own.dtype))
    k_own.store((dk * scale).to(k_own.dtype))
    fence_async_shared()
    n_block, batch, head = tile_at(tile, num_n, heads_kv, group, HEAVY_FIRST)
    key0 = n_block * 2 * KEYS + WG * KEYS
    tma_store(dv_desc, [batch, head, key0, 0], v_own)
    tma_store(dk_desc, [batch, head, key0, 0], k_own)


@gluon.constexpr_function
def _handed_layout():
    """16 numbers of each thread in four rows of 16 bytes a thread: no bank is hit twice."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]],
        [],
        [4, 512],
    )


@gluon.jit
def hand_over(buf, packed):
    """Put a (64, 32) packed block into shared memory, for the same thread of another warpgroup."""
    LAYOUT: gl.constexpr = _handed_layout()
    # (row / 16, row / 8 % 2, row % 8, column / 8, column / 4 % 2, column % 4)
    y = packed.reshape((4, 2, 8, 4, 2, 4)).permute((3, 0, 2, 5, 4, 1)).reshape((4, 512))
    buf.store(gl.convert_layout(y, LAYOUT, assert_trivial=True))


@gluon.jit
def take_over(buf, DTYPE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """The other end of `hand_over`: (64, 64) numbers."""
    LAYOUT: gl.constexpr = _handed_layout()
    x = buf.load(LAYOUT).reshape((4, 4, 8, 4, 2, 2)).permute((1, 5, 2, 0, 4, 3)).reshape((64, 32))
    return unpack_pairs(x, DTYPE, S_LAYOUT)


@gluon.jit
def transpose_quads(a, b, c, d):
    """Four threads of a quad, four numbers each: thread t gets number t of every thread instead of every t-th one."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p, q;
        .reg .b32 l, u, v;
        mov.u32 l, %laneid;
        and.b32 u, l, 1;
        setp.ne.u32 p, u, 0;
        and.b32 u, l, 2;
        setp.ne.u32 q, u, 0;
        selp.b32 u, $4, $5, p;
        selp.b32 v, $6, $7, p;
        shfl.sync.bfly.b32 u, u, 1, 31, 0xffffffff;
        shfl.sync.bfly.b32 v, v, 1, 31, 0xffffffff;
        selp.b32 $0, u, $4, p;
        selp.b32 $1, $5, u, p;
        selp.b32 $2, v, $6, p;
        selp.b32 $3, $7, v, p;
        selp.b32 u, $0, $2, q;
        selp.b32 v, $1, $3, q;
        shfl.sync.bfly.b32 u, u, 2, 31, 0xffffffff;
        shfl.sync.bfly.b32 v, v, 2, 31, 0xffffffff;
        selp.b32 $0, u, $0, q;
        selp.b32 $2, $2, u, q;
        selp.b32 $1, v, $1, q;
        selp.b32 $3, $3, v, q;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [a, b, c, d],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _stored_layout(pairs):
    """(64, pairs), four neighbours a thread."""
    far = [[0, n] for n in (16, 32, 64) if n < pairs]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *far],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, pairs],
    )


@gluon.jit
def store_rows(ptr, x, batch, row0, head, rows, heads, units, DTYPE: gl.constexpr, MASK_D: gl.constexpr):
    """Write a (64, D) accumulator to rows [row0, row0 + 64) of a contiguous (batch, rows, heads, 8 * units) tensor.

    `ptr` is of int32: two 16-bit numbers. Quads swap what they hold by shuffles, so that a thread writes 16 bytes.
    """
    PAIRS: gl.constexpr = x.shape[1] // 2
    LAYOUT: gl.constexpr = _stored_layout(PAIRS)
    # (row, column / 32, column / 16 % 2, column / 8 % 2, column / 2 % 4); a thread of a quad holds one of the last four
    y = pack_pairs(x, DTYPE).reshape((64, PAIRS // 16, 2, 2, 4)).permute((0, 1, 4, 2, 3))
    even, odd = gl.split(y)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    a, b, c, d = transpose_quads(a, b, c, d)
    y = gl.join(gl.join(a, c), gl.join(b, d)).reshape((64, PAIRS))
    y = gl.convert_layout(y, LAYOUT, assert_trivial=True)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, LAYOUT))
    first = ((batch.to(gl.int64) * rows + row0) * heads + head) * units
    here = (row < rows - row0)[:, None]
    if MASK_D:
        here = here & (col // 4 < units)[None, :]
    at = (row * (heads * units))[:, None] * 4 + col[None, :]
    gl.store(ptr + first * 4 + at, y, mask=here)
