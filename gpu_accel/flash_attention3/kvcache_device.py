"""Device functions of attention over a KV cache: which keys a split sees, cache rows and scales, merging splits."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
TOKEN_SCALES = tl.constexpr(2)  # one scale for every key (or page) of a head; see `portable_decode`


@triton.jit
def cache_lengths(b, cache_seqlens, cache_leftpad, length, new, capacity, LENS: tl.constexpr, LEFTPAD: tl.constexpr):
    """(first key, length before the new keys, length with them), in positions of the cache."""
    before = length
    if LENS:
        before = tl.load(cache_seqlens + b)
    before = tl.minimum(tl.maximum(before, 0), capacity)
    first = tl.full((), 0, tl.int32)
    if LEFTPAD:
        first = tl.maximum(tl.load(cache_leftpad + b), 0)
    return first, before, tl.minimum(before + new, capacity)


@triton.jit
def split_range(split, splits, lo, hi, N: tl.constexpr, SPLIT_KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Keys [start, stop) of one split, and how many splits of [lo, hi) hold any key. `start` is a multiple of N.

    SPLIT_KEYS > 0: boundaries are multiples of it, so where a split ends depends on nothing but the sequence itself.
    Otherwise the blocks are dealt out evenly over the `splits` there are, at least MIN_BLOCKS to each.
    """
    some = hi > lo
    if SPLIT_KEYS > 0:
        first = lo // SPLIT_KEYS
        used = tl.where(some, tl.cdiv(hi, SPLIT_KEYS) - first, 0)
        start = (first + split) * SPLIT_KEYS
        stop = tl.minimum(start + SPLIT_KEYS, hi)
        start = tl.maximum(start, lo // N * N)
    else:
        first = lo // N
        blocks = tl.where(some, tl.cdiv(hi, N) - first, 0)
        each = tl.maximum(tl.cdiv(blocks, splits), MIN_BLOCKS)
        used = tl.cdiv(blocks, each)
        start = (first + split * each) * N
        stop = tl.minimum(start + each * N, hi)
    return start, stop, used


@triton.jit
def cache_rows(cols, seen, page, batch_row, s_page, s_token, PAGE: tl.constexpr):
    """Element offsets (int64) of the keys `cols` in a tensor (pages, page, ...) or (batch, seqlen, ...)."""
    if PAGE > 0:
        return page * s_page + (cols % PAGE).to(tl.int64) * s_token
    return batch_row * s_page + cols.to(tl.int64) * s_token


@triton.jit
def block_pages(table, j, lo, hi, N: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers (int64) of the block of keys j to j + N - 1, j a multiple of N; see `page_of`.

    Four numbers where a block consists of at most four whole pages or lies in one: which of them a key takes is then
    known when the kernel is compiled, and nothing has to be exchanged between threads. Otherwise one tensor of N, four
    times. Entries of pages without a key from lo to hi - 1 are not read: page 0.
    """
    if PAGE == 0:
        first = tl.full((), 0, tl.int64)
        return first, first, first, first
    elif PAGE % N == 0:
        first = tl.load(table + j // PAGE, mask=j < hi, other=0).to(tl.int64)
        return first, first, first, first
    elif _few(N, PAGE):
        first = _page(table, j, lo, hi, PAGE)
        second = first
        third = first
        fourth = first
        if N // PAGE > 1:
            second = _page(table, j + PAGE, lo, hi, PAGE)
        if N // PAGE > 2:
            third = _page(table, j + 2 * PAGE, lo, hi, PAGE)
            fourth = _page(table, j + 3 * PAGE, lo, hi, PAGE)
        return first, second, third, fourth
    else:
        cols = j + tl.arange(0, N)
        pages = tl.load(table + cols // PAGE, mask=(cols >= lo) & (cols < hi), other=0).to(tl.int64)
        return pages, pages, pages, pages


@triton.constexpr_function
def _few(n: int, page: int) -> bool:
    return n % page == 0 and n // page in (1, 2, 4)


@triton.jit
def _page(table, key, lo, hi, PAGE: tl.constexpr):
    return tl.load(table + key // PAGE, mask=(key + PAGE > lo) & (key < hi), other=0).to(tl.int64)


@triton.jit
def page_of(first, second, third, fourth, N: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of the N keys of a block (or one for all of them) from those of `block_pages`."""
    if PAGE == 0 or PAGE % N == 0:
        return first
    elif _few(N, PAGE):
        which = tl.arange(0, N) // PAGE
        return tl.where(which < 2, tl.where(which == 0, first, second), tl.where(which == 2, third, fourth))
    else:
        return first


@triton.jit
def merge_splits(o_parts, lse_parts, first_part, used, R: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr):
    """Merge `used` partial results of one tile: o (used, R, DV) and base-2 lse (used, R), contiguous, float32.

    In ascending order whoever arrived last, so the bits are the same in every run. Returns o (R, DV), lse (R), base 2.
    Loads bypass the first-level cache: other processors have written what is read here.
    """
    r = tl.arange(0, R)
    d = tl.arange(0, DV)
    m = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, DV], tl.float32)
    for c in range(0, used, CHUNK):
        s = c + tl.arange(0, CHUNK)
        here = s < used
        rows = (first_part + s)[:, None].to(tl.int64) * R + r[None, :]
        lse = tl.load(lse_parts + rows, mask=here[:, None], other=float("-inf"), cache_modifier=".cg")
        o = tl.load(
            o_parts + rows[:, :, None] * DV + d[None, None, :], mask=here[:, None, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - m_use[None, :])
        alpha = tl.exp2(m - m_use)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(o * weight[:, :, None], 0)
        m = m_new
    safe = tl.where(total == 0.0, 1.0, total)
    return acc / safe[:, None], m + tl.log2(safe)
