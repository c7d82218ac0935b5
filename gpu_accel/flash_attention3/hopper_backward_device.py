"""Device functions shared by the Hopper backward kernels: order of tiles, masks, fragments."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_device import columns_of, pack_pairs, tanh, unpack_pairs
from .hopper_modifiers import add_alibi, call_mask_mod, call_score_mod, call_score_mod_grad, cap_out, list_of

KEYS = gl.constexpr(64)  # keys of S^T that one warpgroup works on: the M of wgmma


@gluon.jit
def here_and_now(x):
    """x, in a way that the compiler cannot move out of a loop: addresses hoisted for every product get spilled."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(x)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def tile_at(index, num_n, heads, group, HEAVY_FIRST: gl.constexpr):
    """Tile number -> (block, batch, head); with HEAVY_FIRST block 0 of `group` heads first, then block 1 and so on."""
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
    return n, batch, batch_head - batch * heads


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
    HEAVY_FIRST: gl.constexpr = None,
):  # fmt: skip
    """Key block of a tile, its first query head (of all batches), first query block and number of blocks."""
    ORDER: gl.constexpr = CAUSAL if HEAVY_FIRST is None else HEAVY_FIRST
    n_block, batch, head_kv = tile_at(tile, num_n, heads_kv, group, ORDER)
    lo, hi = query_blocks(n_block * TILE, shift, num_m, left, right, M, TILE, CAUSAL, WINDOW)
    return n_block, (batch * heads_kv + head_kv) * per_kv, lo, hi - lo


@gluon.jit
def listed_tile(table, mods, head, heads, n_block):
    """Of a tile of keys and a query head (of all batches): its list of query blocks, and how many there are."""
    row = list_of(table, mods, head // heads, head % heads, n_block)
    return row, gl.load(row)


@gluon.jit
def probabilities(
    s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in,
    DTYPE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """P^T of a block of scores S^T, packed, and the factor of dS^T, which is P^T but for softcap."""
    return modified_probabilities(
        s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in, 2, (0, 0), (),
        DTYPE, CAUSAL, WINDOW, SOFTCAP, EVEN_K, False, None, None, None, False)  # fmt: skip


@gluon.jit
def modified_probabilities(
    s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, cap_in, kind, at, mods,
    DTYPE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, EVEN_K: gl.constexpr,
    ALIBI: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_GRAD: gl.constexpr, MASK_MOD: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """`probabilities` with biases, modifiers and block lists; `kind` and `mods`: see hopper_modifiers.py.

    `at` is (batch, query head).
    """
    batch, head = at
    NATURAL: gl.constexpr = ALIBI or SCORE_MOD is not None
    if SOFTCAP:
        t = tanh(s * cap_in)
        s = t
        if NATURAL:
            s = cap_out(s, mods)
    elif NATURAL:
        s = s * cap_in
    if ALIBI:
        s = add_alibi(s, row0, key0, shift, batch, head, mods, 1)
    if SCORE_MOD is not None:
        before = s
        s = call_score_mod(s, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods, SCORE_MOD, 1)
    p = gl.exp2(s * qk_scale - lse[None, :])
    if BLOCKS or MASK_MOD is not None:
        p = call_mask_mod(p, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods, kind, 0.0, MASK_MOD,
                          BLOCKS, 1)  # fmt: skip
    M: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    if CAUSAL or WINDOW or not EVEN_K:
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
    if SCORE_MOD is not None:
        # a derivative is linear in the gradient that it is given, so it can be taken of P before dP is there
        p = call_score_mod_grad(p, before, row0, key0, seqlen_k - shift - 1, seqlen_k - 1, batch, head, mods,
                                SCORE_MOD_GRAD, 1)  # fmt: skip
    if SOFTCAP:
        p = p * (1.0 - t * t)
    if SOFTCAP or SCORE_MOD is not None:
        factor = pack_pairs(p, DTYPE)
    return packed, factor


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
