"""Writing new keys and values into a KV cache: RoPE, rounding to the format of the cache, pages; one small kernel.

Row i of the new tokens of sequence b goes to position `cache_seqlens[b] + i`. What would lie beyond the cache is not
written. Rounding to 8 and 4 bits is to nearest even with the scale given, or, where every token has a scale of its own,
with the largest magnitude of its row (or group), whose scale is written too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.flash_attention3.fp8_quantize import to_fp8
from gpu_accel.flash_attention3.kvcache_device import cache_lengths
from gpu_accel.flash_attention3.rotary import load_rotated

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer, to nearest even
_TINY = tl.constexpr(2.0**-100)  # smaller scales are replaced by 1: their numbers become zero


@triton.jit
def _row_scale(largest, QMAX: tl.constexpr):
    return tl.where(largest > QMAX * _TINY, largest / QMAX, 1.0)


@triton.jit
def _encode(x, QMAX: tl.constexpr, KIND: tl.constexpr):
    """float32, already divided by its scale -> the number in the cache; KIND: e4m3, e5m2 or an integer."""
    x = tl.minimum(tl.maximum(x, -QMAX), QMAX)
    if KIND == "e4m3":
        return to_fp8(x, False)
    elif KIND == "e5m2":
        return to_fp8(x, True)
    else:
        return ((x + _ROUND) - _ROUND).to(tl.int8)


@triton.jit
def _append_one(
    new, cache, scale, new_rows, cache_offsets, scale_offsets, live, position, cos, sin, longest, s_group,
    T: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    GROUPS: tl.constexpr, DYNAMIC: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """T rows of k or v."""
    HALF: tl.constexpr = 2 if FORMAT == 4 else 1
    W: tl.constexpr = D // HALF
    MASK: tl.constexpr = D != DIM
    cols = tl.arange(0, W) * HALF
    x = load_rotated(new + new_rows, cols, live, position, cos, sin, longest, DIM, ROTARY, INTERLEAVED, MASK)
    x = x.to(tl.float32)
    y = x
    if FORMAT == 4:
        y = load_rotated(new + new_rows, cols + 1, live, position, cos, sin, longest, DIM, ROTARY, INTERLEAVED, MASK)
        y = y.to(tl.float32)
    if FORMAT != 16:
        g = tl.arange(0, GROUPS)
        if SCALES > 0:
            scales = scale + scale_offsets[:, None] + g[None, :] * s_group
        if DYNAMIC:
            size = tl.maximum(tl.abs(x), tl.abs(y))
            s = _row_scale(tl.max(tl.reshape(size, [T, GROUPS, W // GROUPS]), 2), QMAX)
            tl.store(scales, s, mask=live[:, None])
        elif SCALES > 0:
            s = tl.load(scales, mask=live[:, None], other=1.0)
        else:
            s = tl.full([T, GROUPS], 1.0, tl.float32)
        wide = s[:, :, None]
        x = tl.reshape(tl.reshape(x, [T, GROUPS, W // GROUPS]) / wide, [T, W])
        y = tl.reshape(tl.reshape(y, [T, GROUPS, W // GROUPS]) / wide, [T, W])
    mask = live[:, None]
    if MASK:
        mask = mask & (cols < DIM)[None, :]
    out = cache + cache_offsets[:, None] + tl.arange(0, W)[None, :]
    if FORMAT == 16:
        tl.store(out, x.to(cache.dtype.element_ty), mask=mask)
    elif FORMAT == 8:
        tl.store(out, _encode(x, QMAX, KIND), mask=mask)
    else:
        low = _encode(x, QMAX, KIND)
        high = _encode(y, QMAX, KIND)
        tl.store(out, (low & 15) | (high << 4), mask=mask)


@triton.jit(do_not_specialize=["capacity", "length", "new", "longest"])
def append_kv(
    k_new, v_new, k, v, cache_seqlens, cache_batch_idx, page_table, k_scale, v_scale, cos, sin,
    kn_sb, kn_ss, kn_sh, vn_sb, vn_ss, vn_sh, k_sp, k_st, k_sh, v_sp, v_st, v_sh, table_sb,
    ks_sp, ks_st, ks_sh, ks_sg, vs_sp, vs_st, vs_sh, vs_sg, heads_kv, capacity, length, new, longest,
    T: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, GROUPS_V: tl.constexpr,
    DYNAMIC: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr, LENS: tl.constexpr, BATCH_IDX: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """T rows (token, head) of one sequence, heads fastest."""
    tiles = tl.cdiv(new * heads_kv, T)
    pid = tl.program_id(0)
    b = pid // tiles
    row = (pid % tiles) * T + tl.arange(0, T)
    token = row // heads_kv
    head = (row % heads_kv).to(tl.int64)
    _, before, _ = cache_lengths(b, cache_seqlens, cache_seqlens, length, new, capacity, LENS, False)
    position = before + token
    live = (token < new) & (position < capacity)
    batch_row = b.to(tl.int64)
    if BATCH_IDX:
        batch_row = tl.load(cache_batch_idx + b).to(tl.int64)
    page = batch_row
    place = position.to(tl.int64)
    if PAGE > 0:
        page = tl.load(page_table + b.to(tl.int64) * table_sb + position // PAGE, mask=live, other=0).to(tl.int64)
        place = (position % PAGE).to(tl.int64)
    if SCALES == 1:  # one for each head of each sequence
        ks_rows = b.to(tl.int64) * ks_sp + head * ks_sh
        vs_rows = b.to(tl.int64) * vs_sp + head * vs_sh
    else:
        ks_rows = page * ks_sp + place * ks_st + head * ks_sh
        vs_rows = page * vs_sp + place * vs_st + head * vs_sh
    wide_b = b.to(tl.int64)
    wide_token = token.to(tl.int64)
    _append_one(
        k_new, k, k_scale, wide_b * kn_sb + wide_token * kn_ss + head * kn_sh, page * k_sp + place * k_st + head * k_sh,
        ks_rows, live, position, cos, sin, longest, ks_sg, T, DIM, D, FORMAT, SCALES, GROUPS, DYNAMIC, KIND, QMAX,
        ROTARY, INTERLEAVED,
    )  # fmt: skip
    _append_one(
        v_new, v, v_scale, wide_b * vn_sb + wide_token * vn_ss + head * vn_sh, page * v_sp + place * v_st + head * v_sh,
        vs_rows, live, position, cos, sin, longest, vs_sg, T, DIM_V, DV, FORMAT, SCALES, GROUPS_V, DYNAMIC, KIND, QMAX,
        0, INTERLEAVED,
    )  # fmt: skip
