"""Attention of few queries over a KV cache in Gluon: keys and values go from memory to tensor cores through registers.

Nothing is staged in shared memory and no warp waits for another before the end of its keys:

    program (sequence, key head, split), W warps       keys: [start, stop), W x N a step, N of them for each warp
        each warp:  K (D, N), V (N, DV) by 16-byte loads, straight into the registers that `mma` wants them in
                    S = q K^T -> softmax, running, of this warp alone -> acc += P V
                    K of the next step is loaded as soon as S is made of this one's, V as soon as acc is
        then        the warps' acc, m, l -> shared memory -> o, lse of the split
    o, lse of the split -> merged with the others of the tile by whoever arrives last

* An mma sums over dimensions, and in which order is free as long as both operands agree. Here a thread's share of a key
  are 16 bytes that lie side by side, two neighbouring words for each mma, so what a load of K fills are operands.
* Operand V has its keys in pairs, memory has them in rows: a thread loads 8 (or 16 of 8 bits) neighbouring dimensions
  of each of its keys, and the columns of acc are numbered so that these are the columns it owns. Bytes of two keys are
  put together by byte permutations, nothing is exchanged between threads. `_dimension` undoes the numbering at the end.
* Loads are marked as first to be evicted: a cache that is read once should leave L2 to what is read again, and does
  not have to wait for dirty lines of others to be written back to make room. See `hopper_loads.py`;
  of what a mask leaves out K needs no zeros.
* Scores of N = 16 keys of a warp lie where `mma` wants the probabilities: no exchange either.
* 16 rows of a tile: query heads of one key head, times queries. Of no more than 8, softmax and sums are of the upper
  half alone, which is a matter of registers. Caches in 16 bits, or e4m3 with a scale a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from gpu_accel.flash_attention3 import decode_config, portable_decode
from gpu_accel.flash_attention3.hopper_loads import first_to_go, halves, load_16_bytes
from gpu_accel.flash_attention3.kvcache_problem import HEAD_SCALES, NO_SCALES, KVCall
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2
from gpu_accel.gluon_compat import barrier

KERNEL = "decode_registers (Gluon)"
ROWS = 16  # of an mma
WARPS = 4  # of a program, and
PER_SM = 2  # programs that fit on a processor at once, which splits are counted for

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _key_words(W, N, WORDS):
    """K (W, WORDS, N) in registers, words of 4 bytes: what 16-bit operands of `k_width` 16 bytes need."""
    registers = [[0, 1, 0], [0, 2, 0]] + [[0, 16 << i, 0] for i in range(_log2(WORDS // 16))]
    registers += [[0, 0, 8 << i] for i in range(_log2(N // 8))]
    lanes = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0, 0] for i in range(_log2(W))], [], [W, WORDS, N])


@gluon.constexpr_function
def _query_dims(W, D, KW):
    """q (W, 16, D) in registers: KW neighbouring dimensions of rows i and i + 8, four threads beside each other."""
    registers = [[0, 0, 1 << i] for i in range(_log2(KW))] + [[0, 8, 0]]
    registers += [[0, 0, (4 * KW) << i] for i in range(_log2(D // (4 * KW)))]
    lanes = [[0, 0, KW], [0, 0, 2 * KW], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0, 0] for i in range(_log2(W))], [], [W, 16, D])


@gluon.constexpr_function
def _value_words(W, N, WORDS, J):
    """V (W, N, WORDS) in registers: J neighbouring words of keys 2i, 2i + 1, 2i + 8, 2i + 9, i = lane % 4, ...

    A warp reads 4 keys x 8 J words with one load.
    """
    registers = [[0, 0, 1 << i] for i in range(_log2(J))] + [[0, 1, 0], [0, 8, 0]]
    registers += [[0, 0, (8 * J) << i] for i in range(_log2(WORDS // (8 * J)))]
    registers += [[0, 16 << i, 0] for i in range(_log2(N // 16))]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, J], [0, 0, 2 * J], [0, 0, 4 * J]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0, 0] for i in range(_log2(W))], [], [W, N, WORDS])


@gluon.constexpr_function
def _key_vectors(W, N, WORDS):
    """`_key_words` where four words are one: (W, WORDS // 4, N)."""
    registers = [[0, 4 << i, 0] for i in range(_log2(WORDS // 16))] + [[0, 0, 8 << i] for i in range(_log2(N // 8))]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warps = [[1 << i, 0, 0] for i in range(_log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [W, WORDS // 4, N])


@gluon.constexpr_function
def _value_vectors(W, N, WORDS):
    """`_value_words` where four words are one: (W, N, WORDS // 4)."""
    registers = [[0, 1, 0], [0, 8, 0]] + [[0, 0, 8 << i] for i in range(_log2(WORDS // 32))]
    registers += [[0, 16 << i, 0] for i in range(_log2(N // 16))]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    warps = [[1 << i, 0, 0] for i in range(_log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [W, N, WORDS // 4])


@gluon.constexpr_function
def _upper_rows(W, N):
    """Rows 0 to 7 of scores (W, 16, N) where an mma leaves them: (W, 8, N)."""
    registers = [[0, 0, 1]] + [[0, 0, 8 << i] for i in range(_log2(N // 8))]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1 << i, 0, 0] for i in range(_log2(W))], [], [W, 8, N])


@gluon.constexpr_function
def _parts(PAGE, N):
    """How many pages a warp's N keys of a step are known to lie in; 0 if pages are looked up key by key."""
    if PAGE > 0 and PAGE % N == 0:
        return 1
    return 2 if N == 2 * PAGE else 0


@gluon.jit
def _dimension(n, J: gl.constexpr):
    """Column n of acc -> dimension of v: bits (h, j, g) become (h, g, j). J dimensions of a key lie in one thread."""
    return n // (8 * J) * (8 * J) + n % 8 * J + n // 8 % J


@gluon.jit
def _widened(words):
    """Four codes of e4m3 in a word -> two words of two fp16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _widened_pairs(even, odd):
    """Four codes of e4m3 of each of two keys -> four words of fp16, a number of both keys in each."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 first, second;
        .reg .b16 c0, c1, c2, c3;
        prmt.b32 first, $4, $5, 0x5140;
        prmt.b32 second, $4, $5, 0x7362;
        mov.b32 {c0, c1}, first;
        mov.b32 {c2, c3}, second;
        cvt.rn.f16x2.e4m3x2 $0, c0;
        cvt.rn.f16x2.e4m3x2 $1, c1;
        cvt.rn.f16x2.e4m3x2 $2, c2;
        cvt.rn.f16x2.e4m3x2 $3, c3;
        }""",
        "=r,=r,=r,=r,r,r",
        [even, odd],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _queries_as_operand(q, W: gl.constexpr, D: gl.constexpr, KW: gl.constexpr, L: gl.constexpr):
    """(W, 16, D) -> the order of dimensions in which `_keys_as_operand` has them."""
    q = gl.permute(gl.reshape(q, [W, 16, D // (4 * KW), 4, KW // 4, 2, 2]), (0, 1, 2, 4, 5, 3, 6))
    return gl.convert_layout(gl.reshape(q, [W, 16, D]), L, assert_trivial=True)


@gluon.jit
def _keys_as_operand(
    words, W: gl.constexpr, N: gl.constexpr, D: gl.constexpr, C: gl.constexpr, NARROW: gl.constexpr, KW: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Words of K -> (W, D, N) in C; nothing moves.

    What an mma takes from a thread are two neighbouring words, which a load leaves in neighbouring registers.
    """
    if NARROW:
        low, high = _widened(words)
        words = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [W, D // 2, N])
    low, high = halves(words, C)
    k = gl.permute(gl.join(low, high), (0, 1, 3, 2))
    k = gl.permute(gl.reshape(k, [W, D // (4 * KW), 4, KW // 4, 2, 2, N]), (0, 1, 3, 4, 2, 5, 6))
    k = gl.reshape(k, [W, D, N])
    return gl.convert_layout(k, L, assert_trivial=True)


@gluon.jit
def _values_as_operand(
    words, W: gl.constexpr, N: gl.constexpr, DV: gl.constexpr, J: gl.constexpr, C: gl.constexpr, NARROW: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Words of V -> (W, N, DV) in C, columns in the order of `_dimension`; a thread only pairs its own numbers.

    Codes of 8 bits are paired before they become fp16, with half of the permutations.
    """
    if NARROW:
        even, odd = gl.split(gl.permute(gl.reshape(words, [W, N // 2, 2, DV // 4]), (0, 1, 3, 2)))
        n0, n1, n2, n3 = _widened_pairs(even, odd)
        pairs = gl.reshape(gl.join(gl.join(n0, n2), gl.join(n1, n3)), [W, N // 2, DV])
        low, high = halves(pairs, C)
        v = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [W, N, DV // (8 * J), 8, J])
    else:
        low, high = halves(words, C)
        v = gl.reshape(gl.join(low, high), [W, N, DV // (8 * J), 8, J])
    return gl.convert_layout(gl.reshape(gl.permute(v, (0, 1, 2, 4, 3)), [W, N, DV]), L, assert_trivial=True)


@gluon.jit
def _wide(j):
    """j as int64, by which LLVM does not know that it could compare keys in 64 bits, too."""
    return gl.inline_asm_elementwise("cvt.s64.s32 $0, $1;", "=l,r", [j], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def _pages(table, cols, stop, PAGE: gl.constexpr):
    """Page numbers (int64) of the keys `cols`; page 0 beyond the end, where nothing is read."""
    return gl.load(table + cols // PAGE, mask=cols < stop, other=0).to(gl.int64)


@gluon.jit
def _of_warp(table, j, stop, PAGE: gl.constexpr, W: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """Page numbers (W,) of the first and of the second half of each warp's keys of a step; zeros if not by halves."""
    first = j + N * gl.arange(0, W, layout=L)
    PARTS: gl.constexpr = _parts(PAGE, N)
    page = first.to(gl.int64) * 0 if PARTS == 0 else _pages(table, first, stop, PAGE)
    if PARTS == 2:
        return page, _pages(table, first + PAGE, stop, PAGE)
    else:
        return page, page


@gluon.jit
def _places(
    table, j, stop, page, batch, s_page, s_token,
    PAGE: gl.constexpr, W: gl.constexpr, N: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Keys (W, N) of a step and their element offsets, in layout L; `page` is of `_of_warp`.

    A warp's keys begin at a multiple of N, so their places in a page are that of the first and a constant each.
    """
    cols = (j + N * gl.arange(0, W, layout=gl.SliceLayout(1, L)))[:, None]
    cols = cols + gl.arange(0, N, layout=gl.SliceLayout(0, L))[None, :]
    if PAGE == 0:
        begin = N * gl.arange(0, W, layout=gl.SliceLayout(1, L))[:, None]
        begin = begin + gl.arange(0, N, layout=gl.SliceLayout(0, L))[None, :]
        at = (batch * s_page + begin.to(gl.int64) * s_token) + _wide(j) * s_token
    elif _parts(PAGE, N) > 0:
        first = gl.convert_layout(page[0], gl.SliceLayout(1, L), assert_trivial=True)
        at = first[:, None] * s_page
        if _parts(PAGE, N) == 2:  # which half a key is in depends on its register, not on its lane
            second = gl.convert_layout(page[1], gl.SliceLayout(1, L), assert_trivial=True)
            half = gl.arange(0, N, layout=gl.SliceLayout(0, L)) // PAGE
            # a product and not a choice, of which Triton 3.8 doesn't know that it is a multiple of 16 bytes
            at = at + half.to(gl.int64)[None, :] * ((second - first) * s_page)[:, None]
        if PAGE > N:
            begin = (j + N * gl.arange(0, W, layout=gl.SliceLayout(1, L))) % PAGE
            at = at + (begin.to(gl.int64) * s_token)[:, None]
        within = gl.arange(0, N, layout=gl.SliceLayout(0, L)) % PAGE
        at = at + (within.to(gl.int64) * s_token)[None, :]
    else:
        at = _pages(table, cols, stop, PAGE) * s_page + (cols % PAGE).to(gl.int64) * s_token
    return cols, at


@gluon.jit
def _load_keys(
    k, j, stop, table, page, batch, s_page, s_token, policy,
    PAGE: gl.constexpr, W: gl.constexpr, N: gl.constexpr, WORDS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Words of K (W, WORDS, N); for keys beyond the end anything, since their scores are replaced.
    Carried as words: LLVM would take 16-bit numbers apart as soon as they arrive, and thereby wait for them."""
    cols, at = _places(table, j, stop, page, batch, s_page, s_token, PAGE, W, N, gl.SliceLayout(1, L))
    at = (k + at).to(gl.pointer_type(gl.int32), bitcast=True)
    V: gl.constexpr = _key_vectors(W, N, WORDS)
    at = gl.convert_layout(at, gl.SliceLayout(1, V), assert_trivial=True)
    seen = gl.convert_layout((cols < stop).to(gl.int32), gl.SliceLayout(1, V), assert_trivial=True)
    words = 4 * gl.arange(0, WORDS // 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, V)))
    at = gl.expand_dims(at, 1) + words[None, :, None]
    w0, w1, w2, w3 = load_16_bytes(at, gl.expand_dims(seen, 1), policy, False)
    found = gl.permute(gl.join(gl.join(w0, w2), gl.join(w1, w3)), (0, 1, 3, 4, 2))
    return gl.convert_layout(gl.reshape(found, [W, WORDS, N]), L, assert_trivial=True)


@gluon.jit
def _load_values(
    v, j, stop, table, page, batch, s_page, s_token, policy,
    PAGE: gl.constexpr, W: gl.constexpr, N: gl.constexpr, WORDS: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Words of V (W, N, WORDS); zeros for keys beyond the end."""
    cols, at = _places(table, j, stop, page, batch, s_page, s_token, PAGE, W, N, gl.SliceLayout(2, L))
    at = (v + at).to(gl.pointer_type(gl.int32), bitcast=True)
    if WORDS >= 32:  # four words of a key lie in one thread
        V: gl.constexpr = _value_vectors(W, N, WORDS)
        at = gl.convert_layout(at, gl.SliceLayout(2, V), assert_trivial=True)
        seen = gl.convert_layout((cols < stop).to(gl.int32), gl.SliceLayout(2, V), assert_trivial=True)
        words = 4 * gl.arange(0, WORDS // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, V)))
        at = gl.expand_dims(at, 2) + words[None, None, :]
        w0, w1, w2, w3 = load_16_bytes(at, gl.expand_dims(seen, 2), policy, True)
        found = gl.reshape(gl.join(gl.join(w0, w2), gl.join(w1, w3)), [W, N, WORDS])
        return gl.convert_layout(found, L, assert_trivial=True)
    else:
        words = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        seen = gl.expand_dims(cols < stop, 2)
        return gl.load(gl.expand_dims(at, 2) + words[None, None, :], mask=seen, other=0, eviction_policy="evict_first")


@gluon.jit
def _upper(x, W: gl.constexpr, WIDTH: gl.constexpr):
    """Rows 0 to 7 of (W, 16, WIDTH), or of (W, 16) where WIDTH is 0."""
    if WIDTH == 0:
        first, _ = gl.split(gl.permute(gl.reshape(x, [W, 2, 8]), (0, 2, 1)))
    else:
        first, _ = gl.split(gl.permute(gl.reshape(x, [W, 2, 8, WIDTH]), (0, 2, 3, 1)))
    return first


@gluon.jit
def _both(upper, lower, W: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Rows 0 to 7 and 8 to 15 -> (W, 16, WIDTH) in layout L; nothing moves."""
    x = gl.reshape(gl.permute(gl.join(upper, lower), (0, 3, 1, 2)), [W, 16, WIDTH])
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def _times(acc, alpha, W: gl.constexpr, DV: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Rows of acc (W, 16, DV) times alpha (W, ROWS); the lower ones of eight are zeros."""
    if ROWS == 16:
        return acc * alpha[:, :, None]
    else:
        UPPER: gl.constexpr = _upper_rows(W, DV)
        upper, lower = gl.split(gl.permute(gl.reshape(acc, [W, 2, 8, DV]), (0, 2, 3, 1)))
        upper = gl.convert_layout(upper, UPPER, assert_trivial=True)
        lower = gl.convert_layout(lower, UPPER, assert_trivial=True)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(2, UPPER), assert_trivial=True)
        return _both(upper * alpha[:, :, None], lower, W, DV, L)


@gluon.jit(do_not_specialize=["splits", "seqlen_q", "capacity", "length", "new"])
def decode_registers(
    q, k, v, o, lse, o_parts, lse_parts, counters, cache_seqlens, page_table, k_scale, v_scale,
    q_sb, q_ss, q_sh, k_sp, k_st, k_sh, v_sp, v_st, v_sh, o_sb, o_ss, o_sh, lse_sb, lse_sh, table_sb,
    ks_sb, ks_sh, vs_sb, vs_sh, splits, seqlen_q, capacity, length, new, softmax_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, PAGE: gl.constexpr,
    W: gl.constexpr, N: gl.constexpr, R: gl.constexpr, LENS: gl.constexpr, RIGHT: gl.constexpr, SCALES: gl.constexpr,
    SPLIT_KEYS: gl.constexpr, MERGE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """One split of one tile. R: rows of the tile, a power of two. CHUNK: partial results that are merged at once."""
    TYPE: gl.constexpr = k.dtype.element_ty
    NARROW: gl.constexpr = TYPE.primitive_bitwidth == 8
    C: gl.constexpr = gl.float16 if NARROW else TYPE  # of products; every e4m3 is exact in fp16
    KW: gl.constexpr = 128 // TYPE.primitive_bitwidth
    J: gl.constexpr = KW if DV >= 8 * KW else DV // 8
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    K: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=S, k_width=2)
    LOADED: gl.constexpr = _query_dims(W, D, KW)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    V: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=S, k_width=2)
    PACK: gl.constexpr = 32 // TYPE.primitive_bitwidth  # numbers in a word
    KN: gl.constexpr = D // PACK
    VN: gl.constexpr = DV // PACK
    KWORDS: gl.constexpr = _key_words(W, N, KN)
    VWORDS: gl.constexpr = _value_words(W, N, VN, J // PACK)
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, KWORDS))

    pid = gl.program_id(0)
    head = pid % HEADS
    split = pid // HEADS % splits
    b = pid // (HEADS * splits)
    rows = seqlen_q * GROUP

    # -- loads that need nothing but the program's number
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))
    none = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED))) * 0
    at = b.to(gl.int64) * q_sb + (row // GROUP).to(gl.int64) * q_ss + (head * GROUP + row % GROUP).to(gl.int64) * q_sh
    q_at = q + at[None, :, None] + (none[:, None, None] + dims[None, None, :])
    q_tile = gl.load(q_at, mask=(row < rows)[None, :, None], other=0.0)
    score_scale = softmax_scale * LOG2E
    out_scale = 1.0
    if SCALES:
        score_scale = score_scale * gl.load(k_scale + b.to(gl.int64) * ks_sb + head * ks_sh)
        out_scale = gl.load(v_scale + b.to(gl.int64) * vs_sb + head * vs_sh)
    before = length
    if LENS:
        before = gl.load(cache_seqlens + b)
    total = gl.minimum(gl.minimum(gl.maximum(before, 0), capacity) + new, capacity)

    # -- the keys of this split: as `kvcache_device.split_range`, from key 0
    if SPLIT_KEYS > 0:
        used = gl.cdiv(total, SPLIT_KEYS)
        start = split * SPLIT_KEYS
        stop = gl.minimum(start + SPLIT_KEYS, total)
    else:
        each = gl.maximum(gl.cdiv(gl.cdiv(total, W * N), splits), 1)
        used = gl.cdiv(gl.cdiv(total, W * N), each)
        start = split * each * (W * N)
        stop = gl.minimum(start + each * (W * N), total)
    if (split > 0) & (split >= used):
        return

    table = page_table
    if PAGE > 0:
        table = page_table + b.to(gl.int64) * table_sb
    k_base = k + head.to(gl.int64) * k_sh
    v_base = v + head.to(gl.int64) * v_sh
    batch = b.to(gl.int64)

    policy = first_to_go()
    page = _of_warp(table, start, stop, PAGE, W, N, OF_WARP)
    k_tile = _load_keys(k_base, start, stop, table, page, batch, k_sp, k_st, policy, PAGE, W, N, KN, KWORDS)
    v_tile = _load_values(v_base, start, stop, table, page, batch, v_sp, v_st, policy, PAGE, W, N, VN, VWORDS)
    page = _of_warp(table, start + W * N, stop, PAGE, W, N, OF_WARP)

    # scores: of 16 rows, or of the upper 8 where no more are asked for
    T: gl.constexpr = 8 if R <= 8 else 16
    SL: gl.constexpr = _upper_rows(W, N) if T == 8 else S
    scale = gl.full([W, T], score_scale, gl.float32, layout=gl.SliceLayout(2, SL))
    if NARROW:  # into the range of fp16, by a power of two
        wide = q_tile.to(gl.float32)
        largest = gl.max(gl.abs(wide), 2)
        exponent = gl.floor(gl.log2(gl.where(largest > 0, largest, 1.0)))
        q_tile = wide * gl.exp2(-exponent)[:, :, None]
        if T == 8:
            exponent = _upper(exponent, W, 0)
        scale = scale * gl.exp2(gl.convert_layout(exponent, gl.SliceLayout(2, SL)))
    q_tile = q_tile.to(C)
    q_tile = _queries_as_operand(q_tile, W, D, KW, Q)

    m_i = gl.full([W, T], float("-inf"), gl.float32, layout=gl.SliceLayout(2, SL))
    l_i = gl.zeros([W, T], gl.float32, layout=gl.SliceLayout(2, SL))
    acc = gl.zeros([W, 16, DV], gl.float32, layout=S)
    offsets = (N * gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(1, SL))))[:, None]
    offsets = offsets + gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, SL)))[None, :]
    diagonal = gl.arange(0, T, layout=gl.SliceLayout(0, gl.SliceLayout(2, SL))) // GROUP + (total - seqlen_q)

    for j in range(start, stop, W * N):
        after = j + W * N
        operand = _keys_as_operand(k_tile, W, N, D, C, NARROW, KW, K)
        s = mma_v2(q_tile, operand, gl.zeros([W, 16, N], gl.float32, layout=S))
        if T == 8:
            s = gl.convert_layout(_upper(s, W, N), SL, assert_trivial=True)
        k_tile = _load_keys(k_base, after, stop, table, page, batch, k_sp, k_st, policy, PAGE, W, N, KN, KWORDS)
        cols = j + offsets
        visible = gl.expand_dims(cols < stop, 1)
        if RIGHT:
            visible = visible & (gl.expand_dims(cols, 1) <= diagonal[None, :, None])
        s = gl.where(visible, s * scale[:, :, None], float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 2))
        m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - m_use[:, :, None])
        alpha = gl.exp2(m_i - m_use)
        l_i = l_i * alpha + gl.sum(p, 2)
        m_i = m_new
        p = p.to(C)
        if T == 8:
            p = _both(p, gl.zeros([W, 8, N], C, layout=SL), W, N, P)
        else:
            p = gl.convert_layout(p, P, assert_trivial=True)
        operand = _values_as_operand(v_tile, W, N, DV, J, C, NARROW, V)
        acc = mma_v2(p, operand, _times(acc, alpha, W, DV, T, S))
        v_tile = _load_values(v_base, after, stop, table, page, batch, v_sp, v_st, policy, PAGE, W, N, VN, VWORDS)
        page = _of_warp(table, after + W * N, stop, PAGE, W, N, OF_WARP)

    # -- the warps' results become one
    if T == 8:
        acc = _upper(acc, W, DV)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    F: gl.constexpr = gl.BlockedLayout([W, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    acc_shared = gl.allocate_shared_memory(gl.float32, [W, T, DV], SHARED, acc)
    m_shared = gl.allocate_shared_memory(gl.float32, [W, T], FLAT, m_i)
    l_shared = gl.allocate_shared_memory(gl.float32, [W, T], FLAT, l_i)
    barrier()
    m_all = m_shared.load(gl.SliceLayout(2, F))
    m = gl.max(m_all, 0)
    weight = gl.exp2(m_all - gl.expand_dims(gl.where(m == float("-inf"), 0.0, m), 0))
    l = gl.sum(l_shared.load(gl.SliceLayout(2, F)) * weight, 0)  # noqa: E741
    result = gl.sum(acc_shared.load(F) * weight[:, :, None], 0)
    safe = gl.where(l == 0.0, 1.0, l)  # not "l > 0": NaN has to stay NaN
    OUT: gl.constexpr = gl.SliceLayout(0, F)
    result = result * gl.convert_layout(out_scale / safe, gl.SliceLayout(1, OUT))[:, None]
    lse2 = gl.convert_layout(m + gl.log2(safe), gl.SliceLayout(1, OUT))

    # -- the result of this split, and of the tile if this is all of it
    local = gl.arange(0, T, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, DV, layout=gl.SliceLayout(0, OUT))
    if used <= 1:
        _store(o, lse, result, lse2, local, n, b, head, rows, o_sb, o_ss, o_sh, lse_sb, lse_sh, GROUP, J)
    elif MERGE:
        tile = b * HEADS + head
        part = tile.to(gl.int64) * splits + split
        gl.store(lse_parts + part * R + local, lse2, mask=local < R)
        gl.store(o_parts + (part * R + local)[:, None] * DV + n[None, :], result, mask=(local < R)[:, None])
        barrier()  # all threads have stored, then one of them releases
        arrived = gl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            gl.store(counters + tile, 0)
            _merge_last(
                o, lse, o_parts, lse_parts, tile.to(gl.int64) * splits, used, b, head, rows,
                o_sb, o_ss, o_sh, lse_sb, lse_sh, GROUP, R, DV, J, W, CHUNK,
            )  # fmt: skip


@gluon.jit
def _store(
    o, lse, result, lse2, row, n, b, head, rows, o_sb, o_ss, o_sh, lse_sb, lse_sh, GROUP: gl.constexpr, J: gl.constexpr
):  # fmt: skip
    """Rows `row` and columns `n` of a tile."""
    query = row // GROUP
    q_head = head * GROUP + row % GROUP
    at = b.to(gl.int64) * o_sb + query.to(gl.int64) * o_ss + q_head.to(gl.int64) * o_sh
    out = result.to(o.dtype.element_ty)
    gl.store(o + at[:, None] + _dimension(n, J)[None, :], out, mask=(row < rows)[:, None])
    gl.store(lse + b.to(gl.int64) * lse_sb + q_head.to(gl.int64) * lse_sh + query, lse2 * LN2, mask=row < rows)


@gluon.jit
def _merge_last(
    o, lse, o_parts, lse_parts, first_part, used, b, head, rows, o_sb, o_ss, o_sh, lse_sb, lse_sh,
    GROUP: gl.constexpr, R: gl.constexpr, DV: gl.constexpr, J: gl.constexpr, W: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Whoever arrived last merges all splits, in their order; every thread has its numbers of all of them."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    row = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    n = gl.arange(0, DV, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    m = gl.full([R], float("-inf"), gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    total = gl.zeros([R], gl.float32, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    OUT: gl.constexpr = gl.SliceLayout(0, L)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    acc = gl.zeros([R, DV], gl.float32, layout=OUT)
    for c in range(0, used, CHUNK):
        s = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        # one address a thread, and a constant for each of the splits
        here = (s < used - c)[:, None]
        lse_at = (lse_parts + (first_part + c) * R + row)[None, :] + (s * R)[:, None]
        o_at = o_parts + (first_part + c) * (R * DV) + (gl.expand_dims(row[None, :] * DV, 2) + n[None, None, :])
        o_at = o_at + gl.expand_dims((s * (R * DV))[:, None], 2)
        found = gl.load(lse_at, mask=here, other=float("-inf"), cache_modifier=".cg")
        parts = gl.load(o_at, mask=gl.expand_dims(here, 2), other=0.0, cache_modifier=".cg")
        m_new = gl.maximum(m, gl.max(found, 0))
        m_use = gl.where(m_new == float("-inf"), 0.0, m_new)
        weight = gl.exp2(found - m_use[None, :])
        alpha = gl.exp2(m - m_use)
        total = total * alpha + gl.sum(weight, 0)
        acc = acc * gl.convert_layout(alpha, BY_ROW)[:, None] + gl.sum(parts * gl.expand_dims(weight, 2), 0)
        m = m_new
    safe = gl.where(total == 0.0, 1.0, total)
    result = acc / gl.convert_layout(safe, BY_ROW)[:, None]
    row = gl.convert_layout(row, BY_ROW)
    n = gl.convert_layout(n, gl.SliceLayout(0, OUT))
    lse2 = gl.convert_layout(m + gl.log2(safe), BY_ROW)
    _store(o, lse, result, lse2, row, n, b, head, rows, o_sb, o_ss, o_sh, lse_sb, lse_sh, GROUP, J)


@dataclass(frozen=True)
class Config:
    """`keys` a warp and step: 16 or 32."""

    keys: int

    @property
    def block(self) -> int:
        return WARPS * self.keys

    def __str__(self) -> str:
        return f"Gluon, {self.keys} keys"


@dataclass(frozen=True)
class Plan:
    """What a call launches."""

    config: Config
    rows: int  # of a tile, a power of two
    tiles: int
    splits: int
    split_keys: int

    def __str__(self) -> str:
        how = f"{self.splits} splits" + (f" of {self.split_keys} keys" if self.split_keys else "")
        return f"{WARPS} warps of {self.config.keys} keys, {PER_SM} per SM; {self.tiles} tiles, {how}"


def refuse(call: KVCall) -> str | None:
    """Why this kernel cannot run the call, or None."""
    device = call.q.device
    if device.type == "cuda" and capability(device) != (9, 0):
        return "needs compute capability 9.0 (H100, H200), got {}.{}".format(*capability(device))
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes q in bfloat16 and float16, got {call.q.dtype}"
    if call.kind not in ("", "e4m3"):
        return f"takes caches in the dtype of q and e4m3, got {call.kind}"
    for scales in (call.k_scales, call.v_scales):
        if scales.mode not in (NO_SCALES, HEAD_SCALES):
            return "takes one scale for a head, a sequence's head or a cache"
    if call.k_scales.mode != call.v_scales.mode:
        return "takes scales of both k and v or of none"
    for name, dim in (("head_dim", call.q.shape[3]), ("head_dim_v", call.head_dim_v)):
        if dim not in (64, 128):  # at 256 keys, values and the sums of a warp do not fit in its registers
            return f"takes a {name} of 64 or 128, got {dim}"
    if call.q.shape[1] * call.group > ROWS:
        return f"takes at most {ROWS} queries x query heads of a key head, got {call.q.shape[1] * call.group}"
    if 0 <= call.window_left < call.capacity or 0 < call.window_right < call.q.shape[1] - 1:
        return "takes no window"
    if call.softcap > 0 or call.sinks is not None or call.rotary_dim:
        return "takes no soft cap, sinks or rotary embedding"
    if call.cache_leftpad is not None or call.cache_batch_idx is not None:
        return "takes no cache_leftpad or cache_batch_idx"
    unit = 16 // call.k_cache.element_size()
    for name, x in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if x.data_ptr() % 16 or any(n > 1 and s % unit for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)):
            return f"an address or a stride of {name} is not a multiple of 16 bytes"
    return None


def untimed(call: KVCall) -> str | None:
    """Why nobody knows that this kernel is the faster one for a call that it can run; None where a GPU has said so."""
    if call.q.dtype != torch.bfloat16:
        return f"q in {call.q.dtype} was not timed on a GPU"
    if (call.q.shape[3], call.head_dim_v) != (128, 128):
        return "a head_dim other than 128 was not timed on a GPU"
    if call.q.shape[1] > 1:
        return "several queries of a sequence were not timed on a GPU"
    if call.num_splits or call.batch_invariant:
        return "splits other than its own were not timed on a GPU"
    return None


def default_config(call: KVCall) -> Config:
    """8 KB in flight a warp: 16 keys of 128 dimensions in 16 bits, 32 in 8 bits, unless they lie in many pages."""
    wide = call.kind == "e4m3" and call.page_size % 16 == 0
    return Config(32 if wide else 16)


def candidates(kind: str) -> list[Config]:
    """What `tune_decode.py` times on a GPU. 32 keys of 16 bits spill 152 bytes."""
    return [Config(16), Config(32)] if kind == "e4m3" else [Config(16)]


def plan(call: KVCall, config: Config | None = None) -> Plan:
    """Tiles and splits of a call: shapes decide, never values on the device."""
    config = config or default_config(call)
    rows = next_power_of_2(call.q.shape[1] * call.group)
    tiles = call.q.shape[0] * call.heads_kv
    slots = (decode_config.processors(call.q.device) if call.q.device.type == "cuda" else 132) * PER_SM
    split_keys = 0
    if call.num_splits:
        splits = call.num_splits
    elif call.batch_invariant:
        split_keys = max(config.block, decode_config.FIXED_SPLIT_KEYS)
        splits = -(-call.capacity // split_keys)
    else:
        blocks = -(-call.capacity // config.block)
        splits = decode_config.automatic_splits(tiles, blocks, slots)
    return Plan(config, rows, tiles, max(1, splits), split_keys)


def forward(call: KVCall, o: Tensor, lse: Tensor, config: Config | None = None) -> None:
    """Append, then attend: writes o (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q)."""
    portable_decode.append(call)
    if not lse.numel():
        return
    p = plan(call, config)
    _, sq, _, head_dim = call.q.shape
    device, dv = call.q.device, call.head_dim_v
    o_parts, lse_parts, counters, chunk = o, lse, lse, 1
    if p.splits > 1:
        o_parts = torch.empty(p.tiles * p.splits * p.rows * dv, dtype=torch.float32, device=device)
        lse_parts = torch.empty(p.tiles * p.splits * p.rows, dtype=torch.float32, device=device)
        counters = portable_decode.counters_of(device, p.tiles)
        # 128 numbers a thread: 32 splits of 4 rows of 128 are one wait for memory
        chunk = max(1, min(next_power_of_2(p.splits), 128 * 32 * WARPS // (p.rows * dv)))
    arguments = (
        call.q, call.k_cache, call.v_cache, o, lse, o_parts, lse_parts, counters, call.cache_seqlens, call.page_table,
        call.k_scales.tensor, call.v_scales.tensor,
        *call.q.stride()[:3], *call.k_cache.stride()[:3], *call.v_cache.stride()[:3], *o.stride()[:3],
        lse.stride(0), lse.stride(1), call.page_table.stride(0) if call.page_size else 0,
        call.k_scales.strides[0], call.k_scales.strides[2], call.v_scales.strides[0], call.v_scales.strides[2],
        p.splits, sq, call.capacity, call.length, call.new, call.softmax_scale,
    )  # fmt: skip
    options = dict(
        HEADS=call.heads_kv, GROUP=call.group, D=head_dim, DV=dv, PAGE=call.page_size, W=WARPS,
        N=p.config.keys, R=p.rows, LENS=call.cache_seqlens is not None, RIGHT=call.window_right == 0 and sq > 1,
        SCALES=call.k_scales.mode != NO_SCALES, SPLIT_KEYS=p.split_keys, MERGE=p.splits > 1, CHUNK=chunk,
        num_warps=WARPS,
    )  # fmt: skip
    launch(decode_registers, p.tiles * p.splits, arguments, options)
