"""Device functions of the Hopper FP8 forward, in Gluon: packing P, masks in the order of K's rows, scales, O.

Run-time scalars travel in tuples:

    shape  = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (q_scale, its strides by batch, head and block, the same of k and of v, exp_scale, cap): exp_scale takes
             q8 k8^T * q_scale * k_scale to base 2, or under softcap into tanh, whose result times cap is in base 2
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_device import LN_2, NEG_LARGE, quarters, store_whole, tanh

ROWS = gl.constexpr(64)  # query rows of one consumer: the M of wgmma


@gluon.jit
def pack_quads(p, E5M2: gl.constexpr):
    """(rows, cols) float32 as an accumulator holds it -> (rows, cols / 4) int32 of four fp8 numbers of one thread."""
    even, odd = gl.split(p.reshape((p.shape[0], p.shape[1] // 2, 2)))
    return pack_halves(even, odd, E5M2)


@gluon.jit
def pack_halves(even, odd, E5M2: gl.constexpr):
    """`pack_quads` of the columns 2 n and 2 n + 1, each (rows, cols / 2)."""
    rows: gl.constexpr = even.shape[0]
    cols: gl.constexpr = 2 * even.shape[1]
    # 8 g + 2 t + e -> 4 t + 2 g + e
    a, c = gl.split(even.reshape((rows, cols // 16, 2, 4)).permute((0, 1, 3, 2)))
    b, d = gl.split(odd.reshape((rows, cols // 16, 2, 4)).permute((0, 1, 3, 2)))
    if E5M2:
        CONVERT: gl.constexpr = (
            "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; "
            "mov.b32 $0, {l, h}; }"
        )
    else:
        CONVERT: gl.constexpr = (
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
            "mov.b32 $0, {l, h}; }"
        )
    packed = gl.inline_asm_elementwise(CONVERT, "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)
    return packed.reshape((rows, cols // 4))


@gluon.jit
def unpack_quads(x, dtype: gl.constexpr, layout: gl.constexpr):
    """Inverse of `pack_quads`, as the A operand `layout`; costs no instruction next to a wgmma."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = 4 * x.shape[1]
    a = x.to(gl.int8).to(dtype, bitcast=True)
    b = (x >> 8).to(gl.int8).to(dtype, bitcast=True)
    c = (x >> 16).to(gl.int8).to(dtype, bitcast=True)
    d = (x >> 24).to(gl.int8).to(dtype, bitcast=True)
    quads = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.convert_layout(quads.reshape((rows, cols)), layout, assert_trivial=True)


@gluon.jit
def mask_block(s, block, row0, shape, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """-inf where a row does not see a key. Column 16 a + 8 g + 2 t + e of s is key 16 a + 4 t + 2 g + e of the block.

    Thread t of a quad compares constants, the keys but for 4 t, with two limits of its own.
    """
    seqlen_q, seqlen_k, _, _, _, _, _, left, right = shape
    rows: gl.constexpr = s.shape[0]
    cols: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    x = s.reshape((rows, cols // 16, 2, 4, 2))
    AGTE: gl.constexpr = x.type.layout
    AGT: gl.constexpr = gl.SliceLayout(4, AGTE)
    R: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, AGT)))
    A: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, AGT)))
    G: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, AGT)))
    T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, AGT)))
    E: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, AGTE))))
    a = 16 * gl.arange(0, cols // 16, layout=A)[None, :, None, None, None]
    g = 2 * gl.arange(0, 2, layout=G)[None, None, :, None, None]
    t = 4 * gl.arange(0, 4, layout=T)[None, None, None, :, None]
    key = a + g + gl.arange(0, 2, layout=E)[None, None, None, None, :]
    col0 = block * cols
    diagonal = row0 + seqlen_k - seqlen_q - col0 + gl.arange(0, rows, layout=R)
    last = seqlen_k - 1 - col0
    limit = gl.minimum(diagonal + right, last)[:, None, None, None, None] - t if CAUSAL else last - t
    x = gl.where(key <= limit, x, float("-inf"))
    if WINDOW:
        x = gl.where(key >= (diagonal - left)[:, None, None, None, None] - t, x, float("-inf"))
    return gl.convert_layout(x.reshape((rows, cols)), layout, assert_trivial=True)


@gluon.jit
def block_scales(kv_scale, block, BLOCK_N: gl.constexpr, K_BLOCK: gl.constexpr):
    """(k_scale, v_scale) of key block `block`; `kv_scale` as of `head_scales`."""
    k_scale, v_scale, k_step, v_step = kv_scale
    at = block * BLOCK_N // K_BLOCK
    return gl.load(k_scale + at * k_step), gl.load(v_scale + at * v_step)


@gluon.jit
def log2_fast(x):
    """log2 of a positive normal number, off by at most 2**-22; a full log2 costs 20 instructions."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def head_scales(scales, batch, kv):
    _, _, _, _, k_scale, k_b, k_h, k_step, v_scale, v_b, v_h, v_step, _, _ = scales
    k_at = k_scale + batch.to(gl.int64) * k_b + kv.to(gl.int64) * k_h
    v_at = v_scale + batch.to(gl.int64) * v_b + kv.to(gl.int64) * v_h
    return k_at, v_at, k_step, v_step


@gluon.jit
def row_scales(scales, batch, head, row0, seqlen_q, Q_BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """q_scale * softmax_scale * log2(e) (or into tanh) of the rows from row0 on."""
    q_scale, q_b, q_h, q_step, _, _, _, _, _, _, _, _, exp_scale, _ = scales
    row = row0 + gl.arange(0, ROWS, layout=LAYOUT)
    at = q_scale + batch.to(gl.int64) * q_b + head.to(gl.int64) * q_h
    return gl.load(at + row // Q_BLOCK * q_step, mask=row < seqlen_q, other=1.0) * exp_scale


@gluon.jit
def first_softmax(
    s, factor, v_log, block, row0, shape, cap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, MASK: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """P, row maximum (base 2) and thread-wise row sum of the first block of a tile."""
    if SOFTCAP:
        s = cap * tanh(s * factor[:, None])
    if MASK:
        s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
    if SOFTCAP:
        m = gl.maximum(gl.max(s, axis=1) + v_log, NEG_LARGE)
        p = gl.exp2(s - (m - SHIFT - v_log)[:, None])
    else:
        m = gl.maximum(gl.max(s, axis=1) * factor + v_log, NEG_LARGE)
        p = gl.exp2(s * factor[:, None] - (m - SHIFT - v_log)[:, None])
    return p, m


# Sums in global memory. Every thread has its own 8 bytes of each KB, two neighbours of a row; 64 columns are 16 KB.
# Operands: 32 numbers (in and out), their rows' factors from $64 on, what is kept of the sums from $96 on, the address
# $128. Kept 1: added in the L2 cache, which nobody waits for. Below 1: read, scaled and written. Below 0: written.
_ADD_ASIDE = gl.constexpr(
    "{ .reg .pred p, q, r; .reg .f32 a, b; "
    + " ".join(
        f"setp.lt.f32 p, ${96 + x}, 0f3F800000; setp.ge.and.f32 q, ${96 + x}, 0f00000000, p; "
        f"mul.f32 ${x}, ${x}, ${64 + x}; mul.f32 ${x + 1}, ${x + 1}, ${64 + x}; mov.b32 a, 0; mov.b32 b, 0; "
        f"@!p red.relaxed.gpu.global.add.v2.f32 [$128 + {512 * x}], {{${x}, ${x + 1}}}; "
        f"@q ld.relaxed.gpu.global.v2.f32 {{a, b}}, [$128 + {512 * x}]; "
        f"@p fma.rn.f32 a, a, ${96 + x}, ${x}; @p fma.rn.f32 b, b, ${96 + x}, ${x + 1}; "
        f"@p st.relaxed.gpu.global.v2.f32 [$128 + {512 * x}], {{a, b}};"
        for x in range(0, 32, 2)
    )
    + " }"
)
_TAKE_IN = gl.constexpr(
    "{ .reg .f32 a, b; "
    + " ".join(
        f"ld.relaxed.gpu.global.v2.f32 {{a, b}}, [$96 + {512 * x}]; "
        f"fma.rn.f32 ${x}, a, ${64 + x}, ${x}; fma.rn.f32 ${x + 1}, b, ${64 + x}, ${x + 1};"
        for x in range(0, 32, 2)
    )
    + " }"
)
_TIED = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))
_ADD_ASIDE_OPERANDS = gl.constexpr(_TIED.value + "," + ",".join(["f"] * 32 + ["l"] * 32))
_TAKE_IN_OPERANDS = gl.constexpr(_TIED.value + "," + ",".join(["l"] * 32))
_FAR = gl.constexpr(64.0)  # how much (base 2) a maximum may grow before totals are scaled anew: 2**64 is far from inf


@gluon.jit
def _of_rows(part, x):
    """x of the rows, for each number of `part`."""
    LAYOUT: gl.constexpr = part.type.layout
    x = gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    return gl.full(part.shape, 0.0, gl.float32, LAYOUT) + x[:, None]


@gluon.jit
def _places(totals, part, i: gl.constexpr):
    """The address of this thread's first number of columns [64 i, 64 i + 64), for each of them."""
    LAYOUT: gl.constexpr = part.type.layout
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    thread = (r // 16 * 32 + r % 8 * 4)[:, None] + (c // 2 % 4)[None, :]
    return totals.to(gl.int64) + 16384 * i + 8 * thread.to(gl.int64)


@gluon.jit
def _put(part, factor, kept, totals, i: gl.constexpr):
    gl.inline_asm_elementwise(
        _ADD_ASIDE, _ADD_ASIDE_OPERANDS, [part, _of_rows(part, factor), _of_rows(part, kept), _places(totals, part, i)],
        dtype=gl.float32, is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def put_aside(totals, acc, unit, m_total, m_row, chunks):
    """totals += acc * unit * exp2(m_row - m_total), in global memory: the second level where registers are full.

    Returns the rows' m_total, that of their first chunk unless maxima have grown very much since. A consumer's totals
    are 64 KB, which only its threads touch, each its own numbers.
    """
    far = (m_row - m_total > _FAR) | (chunks == 0)
    kept = gl.where(far, gl.exp2(m_total - m_row), 1.0)
    kept = gl.where(chunks == 0, -1.0, kept)
    factor = gl.where(far, 1.0, gl.exp2(m_row - m_total)) * unit
    c0, c1, c2, c3 = quarters(acc)
    _put(c0, factor, kept, totals, 0)
    _put(c1, factor, kept, totals, 1)
    _put(c2, factor, kept, totals, 2)
    _put(c3, factor, kept, totals, 3)
    return gl.where(far, m_row, m_total)


@gluon.jit
def _take(part, factor, totals, i: gl.constexpr):
    return gl.inline_asm_elementwise(
        _TAKE_IN, _TAKE_IN_OPERANDS, [part, _of_rows(part, factor), _places(totals, part, i)], dtype=gl.float32,
        is_pure=False, pack=32,
    )  # fmt: skip


@gluon.jit
def take_in(acc, totals, m_total, m_row, chunks):
    """acc + totals * exp2(m_total - m_row)."""
    if chunks > 0:
        rows: gl.constexpr = acc.shape[0]
        factor = gl.exp2(m_total - m_row)
        c0, c1, c2, c3 = quarters(acc)
        low = gl.join(_take(c0, factor, totals, 0), _take(c1, factor, totals, 1))
        high = gl.join(_take(c2, factor, totals, 2), _take(c3, factor, totals, 3))
        low = low.permute((0, 2, 1)).reshape((rows, 128))
        high = high.permute((0, 2, 1)).reshape((rows, 128))
        whole = gl.join(low, high).permute((0, 2, 1)).reshape((rows, 256))
        acc = gl.convert_layout(whole, acc.type.layout, assert_trivial=True)
    return acc


@gluon.jit
def store_tile(
    acc, m_i, l_i, o_bufs, outputs, where, row0, shape,
    WG: gl.constexpr, SHIFT: gl.constexpr, ROW_LAYOUT: gl.constexpr,
):  # fmt: skip
    """O = acc / l through shared memory and TMA, and LSE = m + log l; rows without keys give 0 and -inf."""
    o_desc, lse_ptr = outputs
    seqlen_q, _, heads, _, _, _, _, _, _ = shape
    batch, head = where
    l_row = gl.convert_layout(gl.sum(l_i, axis=1), ROW_LAYOUT)
    m_row = gl.convert_layout(m_i, ROW_LAYOUT)
    rows = row0 + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    empty = l_row == 0.0
    acc = acc * gl.where(empty, 0.0, 1.0 / l_row)[:, None]
    if row0 < seqlen_q:
        lse = gl.where(empty, float("-inf"), (m_row - SHIFT + gl.log2(l_row)) * LN_2)
        offset = (batch * heads + head).to(gl.int64) * seqlen_q
        gl.store(lse_ptr + offset + rows, lse, mask=rows < seqlen_q)
        store_whole(acc, o_bufs, o_desc, batch, head, row0, WG)
