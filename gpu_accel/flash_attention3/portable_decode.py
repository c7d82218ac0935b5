"""Attention of few queries over a long KV cache in plain Triton, for any GPU and for the interpreter.

Decoding reads every key and value once and computes little, so it is as fast as memory is read: what counts is that
all processors have enough 16-byte loads in flight all the time.

    program (sequence, key head, rows, split):      rows: group x seqlen_q, packed -> M >= 16 rows of one matrix product
        q (M, D), turned by RoPE on the way         keys: [start, stop), blocks of N
        for each block of N keys:  page numbers -> K (N, D) -> S = q K^T -> softmax, running -> V (N, DV) -> acc
    o, lse of the split  -> float32 in memory -> the last program of a tile to arrive merges them all, in split order

* Query heads that share a key head are rows of one tile, so keys and values are read once for all of them.
* Keys are split over programs until the machine is full. How many programs there are depends on shapes only, so a
  captured graph stays right when lengths grow; each program reads its own length and finds its keys, or nothing to do.
* Whoever arrives last merges: a counter per tile, raised by an atomic that releases the partial results and acquires
  those of the others, and set back to zero by the last. A second kernel (`fused=False`) costs a launch, 2 to 3 us of
  the 12 that a short decode may take. Merging goes in split order, so results do not depend on who was last.
* Loads of K and V feed `tl.dot`, so Triton turns them into asynchronous copies, `num_stages` blocks ahead. Page
  numbers are loaded one block ahead of their keys. One masked loop: a second one for the tail would drain the pipeline.
* Keys that are not seen are not loaded: zeros take their place, so that NaN in a free slot of a page goes nowhere.
* 8- and 4-bit caches: fp16 products (every e4m3, e5m2 and int8 is exact in fp16; q is scaled by a power of two into its
  range), float32 ones where q is float32. One scale for a head goes into the softmax scale and the result. One for each
  key multiplies its column of S, and its column of P after division by the largest of the block. int4 with several
  groups in a head is dequantised element by element. int4 holds two neighbours of head_dim in a byte, low nibble
  first: even and odd dimensions are two tiles, with two products. 8-bit codes are read the same way, two in 16 bits,
  because matrix operands come out of shared memory in units of 16 bits: byte by byte, a step of 128 keys took 169 loads
  from there where it now takes 9, and V came in asynchronous copies of 8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET, dot, widen
from gpu_accel.flash_attention3 import decode_config
from gpu_accel.flash_attention3.decode_config import DecodeConfig
from gpu_accel.flash_attention3.device import LOG2E, tanh
from gpu_accel.flash_attention3.kvcache_append import append_kv
from gpu_accel.flash_attention3.kvcache_device import (
    LN2,
    TOKEN_SCALES,
    block_pages,
    cache_lengths,
    cache_rows,
    merge_splits,
    page_of,
    split_range,
)
from gpu_accel.flash_attention3.kvcache_problem import LARGEST, KVCall
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2
from gpu_accel.flash_attention3.rotary import load_rotated

NAME = "portable"
KERNEL = "decode_attention (plain Triton)"


@triton.jit
def _pairs(
    packed, scales, N: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """(N, HALF) of two codes each -> the low and the high ones in C, times their group's scale (N, G).

    CODES: int4 in int8, or int8, e4m3, e5m2 in int16.
    """
    if CODES == "int4":
        low = ((packed << 4) >> 4).to(C)
        high = (packed >> 4).to(C)
    elif CODES == "int8":
        low = packed.to(tl.int8).to(C)
        high = (packed >> 8).to(C)
    else:
        KIND: tl.constexpr = tl.float8e4nv if CODES == "e4m3" else tl.float8e5
        low = widen((packed & 255).to(tl.uint8).to(KIND, bitcast=True), C)
        high = widen(((packed >> 8) & 255).to(tl.uint8).to(KIND, bitcast=True), C)
    if GROUPS > 1:
        wide = scales.to(C)[:, :, None]
        low = tl.reshape(tl.reshape(low, [N, GROUPS, HALF // GROUPS]) * wide, [N, HALF])
        high = tl.reshape(tl.reshape(high, [N, GROUPS, HALF // GROUPS]) * wide, [N, HALF])
    return low, high


@triton.jit
def _load_keys(rows, cols, seen, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """A tile of keys or values from pointers to their rows; zeros for those not seen."""
    mask = seen[:, None]
    if MASKED:
        mask = mask & (cols < WIDTH)[None, :]
    return tl.load(rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _power(largest):
    """2^e and 2^-e with |x| / 2^e < 2 for |x| <= largest."""
    e = tl.floor(tl.log2(tl.where(largest > 0, largest, 1.0)))
    return tl.exp2(e), tl.exp2(-e)


@triton.jit(do_not_specialize=["splits", "tiles_m", "seqlen_q", "capacity", "length", "new", "window_left",
                               "window_right", "longest"])  # fmt: skip
def decode_attention(
    q, k, v, o, lse, o_parts, lse_parts, counters, cache_seqlens, cache_leftpad, cache_batch_idx, page_table,
    k_scale, v_scale, sinks, cos, sin,
    q_sb, q_ss, q_sh, k_sp, k_st, k_sh, v_sp, v_st, v_sh, o_sb, o_ss, o_sh, lse_sb, lse_sh, table_sb,
    ks_sp, ks_st, ks_sh, ks_sg, vs_sp, vs_st, vs_sh, vs_sg,
    splits, tiles_m, seqlen_q, capacity, length, new, window_left, window_right, longest, softmax_scale, softcap,
    HEADS: tl.constexpr, SEVERAL_TILES: tl.constexpr, ALIKE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr,
    PAGE: tl.constexpr, SPLIT_KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, GROUPS_V: tl.constexpr,
    LENS: tl.constexpr, LEFTPAD: tl.constexpr, BATCH_IDX: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ADVANCE: tl.constexpr,
    SPLIT: tl.constexpr, FUSED: tl.constexpr, CHUNK: tl.constexpr, PREFETCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of one tile. FORMAT: 16 is the dtype of q, 8 is fp8 or int8, 4 is packed int4.

    CODES: what pairs of neighbours of head_dim are packed into one number of k and v, even ones low; "" where each is
    a number of its own. Neighbouring programs have neighbouring key heads, whose rows lie side by side in memory.
    """
    pid = tl.program_id(0)
    head = pid % HEADS
    pid = pid // HEADS
    tile_m = 0
    if SEVERAL_TILES:
        tile_m = pid % tiles_m
        pid = pid // tiles_m
    split = pid % splits
    b = pid // splits

    m0 = tile_m * M
    rows = seqlen_q * GROUP
    row = m0 + tl.arange(0, M)
    query = row // GROUP
    q_head = head * GROUP + row % GROUP
    live = row < rows
    HALF: tl.constexpr = 1 if CODES == "" else 2
    KD: tl.constexpr = D // HALF
    VD: tl.constexpr = DV // HALF
    C: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16  # of 8- and 4-bit products
    MASK_K: tl.constexpr = DIM != D
    MASK_V: tl.constexpr = DIM_V != DV

    # -- loads that need nothing but the program's number go out together, before anything waits for the lengths: each
    #    is a trip to memory, of which a short decode has time for few
    q_rows = q + b.to(tl.int64) * q_sb + query.to(tl.int64) * q_ss + q_head.to(tl.int64) * q_sh
    q_cols = tl.arange(0, KD) * HALF
    if ROTARY == 0:
        q_tile = load_rotated(q_rows, q_cols, live, query, cos, sin, longest, DIM, 0, INTERLEAVED, MASK_K)
        q_tile2 = q_tile
        if CODES != "":
            q_tile2 = load_rotated(q_rows, q_cols + 1, live, query, cos, sin, longest, DIM, 0, INTERLEAVED, MASK_K)
    head_scale = tl.full((), 1.0, tl.float32)
    out_scale = tl.full((), 1.0, tl.float32)
    if SCALES == 1:
        head_scale = tl.load(k_scale + b.to(tl.int64) * ks_sp + head * ks_sh)
        out_scale = tl.load(v_scale + b.to(tl.int64) * vs_sp + head * vs_sh)
    batch_row = b.to(tl.int64)
    if BATCH_IDX:
        batch_row = tl.load(cache_batch_idx + b).to(tl.int64)
    first_key, before, total = cache_lengths(b, cache_seqlens, cache_leftpad, length, new, capacity, LENS, LEFTPAD)

    # -- the keys of this split
    last_query = (tl.minimum(m0 + M, rows) - 1) // GROUP
    lo = first_key
    hi = total
    if LEFT:
        lo = tl.maximum(lo, m0 // GROUP + total - seqlen_q - window_left)
    if RIGHT:
        hi = tl.minimum(hi, last_query + total - seqlen_q + window_right + 1)
    start, stop, used = split_range(split, splits, lo, hi, N, SPLIT_KEYS, MIN_BLOCKS)
    if (split > 0) & (split >= used):
        return

    # -- q, turned and scaled
    if ROTARY > 0:
        position = tl.full([M], 0, tl.int32) + before
        if ADVANCE:
            position += query
        q_tile = load_rotated(q_rows, q_cols, live, position, cos, sin, longest, DIM, ROTARY, INTERLEAVED, MASK_K)
        q_tile2 = q_tile
        if CODES != "":
            q_tile2 = load_rotated(q_rows, q_cols + 1, live, position, cos, sin, longest, DIM, ROTARY, INTERLEAVED,
                                   MASK_K)  # fmt: skip
    score_scale = tl.full([M], 1.0, tl.float32) * softmax_scale
    score_scale *= head_scale
    if FORMAT != 16:
        q_tile = q_tile.to(tl.float32)
        q_tile2 = q_tile2.to(tl.float32)
        largest = tl.max(tl.abs(q_tile), 1)
        if CODES != "":
            largest = tl.maximum(largest, tl.max(tl.abs(q_tile2), 1))
        power, inverse_power = _power(largest)
        score_scale *= power
        q_tile = (q_tile * inverse_power[:, None]).to(C)
        q_tile2 = (q_tile2 * inverse_power[:, None]).to(C)
    if not SOFTCAP:
        score_scale *= LOG2E

    # -- where keys and values are
    table = page_table
    if PAGE > 0:
        table = page_table + b.to(tl.int64) * table_sb
    k_base = k + head.to(tl.int64) * k_sh
    v_base = v + head.to(tl.int64) * v_sh
    k_cols = tl.arange(0, KD)
    v_cols = tl.arange(0, VD)
    diagonal = query + (total - seqlen_q)

    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    if SINKS:  # a key of this score and of value zero, seen once
        sink = tl.load(sinks + q_head, mask=live, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, m_i)
        l_i += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([M, VD], tl.float32)
    acc2 = l_i
    if CODES != "":
        acc2 = tl.zeros([M, VD], tl.float32)

    offsets = tl.arange(0, N)
    p0, p1, p2, p3 = block_pages(table, start, lo, stop, N, PAGE)
    for j in tl.range(start, stop, N):
        cols = j + offsets
        seen = (cols >= lo) & (cols < stop)
        if PREFETCH:
            n0, n1, n2, n3 = block_pages(table, j + N, lo, stop, N, PAGE)
        else:
            p0, p1, p2, p3 = block_pages(table, j, lo, stop, N, PAGE)
        page = page_of(p0, p1, p2, p3, N, PAGE)
        places = cache_rows(cols, seen, page, batch_row, k_sp, k_st, PAGE)
        k_tile = _load_keys(k_base + places, k_cols, seen, DIM // HALF, MASK_K)
        if SCALES == TOKEN_SCALES:
            ks_rows = k_scale + head * ks_sh + cache_rows(cols, seen, page, batch_row, ks_sp, ks_st, PAGE)
            vs_rows = v_scale + head * vs_sh + cache_rows(cols, seen, page, batch_row, vs_sp, vs_st, PAGE)
        if CODES != "":
            ks = offsets
            if GROUPS > 1:
                ks = tl.load(ks_rows[:, None] + tl.arange(0, GROUPS)[None, :] * ks_sg, mask=seen[:, None], other=0.0)
            k_low, k_high = _pairs(k_tile, ks, N, KD, GROUPS, C, CODES)
            s = dot(q_tile, tl.trans(k_low), None, PRECISION)
            s = dot(q_tile2, tl.trans(k_high), s, PRECISION)
        else:
            s = dot(q_tile, tl.trans(widen(k_tile, q_tile.dtype)), None, PRECISION)
        s = s * score_scale[:, None]
        if (SCALES == TOKEN_SCALES) and (GROUPS == 1):
            s = s * tl.load(ks_rows, mask=seen, other=0.0)[None, :]
        if SOFTCAP:
            s = (softcap * LOG2E) * tanh(s / softcap)
        visible = seen[None, :]
        if LEFT:
            visible = visible & (cols[None, :] >= diagonal[:, None] - window_left)
        if RIGHT:
            visible = visible & (cols[None, :] <= diagonal[:, None] + window_right)
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_use[:, None])
        alpha = tl.exp2(m_i - m_use)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new

        if not ALIKE:
            places = cache_rows(cols, seen, page, batch_row, v_sp, v_st, PAGE)
        v_tile = _load_keys(v_base + places, v_cols, seen, DIM_V // HALF, MASK_V)
        acc = acc * alpha[:, None]
        if (SCALES == TOKEN_SCALES) and (GROUPS_V == 1):
            vs = tl.load(vs_rows, mask=seen, other=0.0)
            largest_v = tl.max(tl.abs(vs), 0)
            ratio = vs / tl.where(largest_v > 0, largest_v, 1.0)
            p16 = (p * ratio[None, :]).to(C)
            if CODES != "":
                v_low, v_high = _pairs(v_tile, offsets, N, VD, 1, C, CODES)
                acc += dot(p16, v_low, None, PRECISION) * largest_v
                acc2 = acc2 * alpha[:, None] + dot(p16, v_high, None, PRECISION) * largest_v
            else:
                acc += dot(p16, widen(v_tile, C), None, PRECISION) * largest_v
        elif CODES != "":
            vs = offsets
            if GROUPS_V > 1:
                vs = tl.load(vs_rows[:, None] + tl.arange(0, GROUPS_V)[None, :] * vs_sg, mask=seen[:, None], other=0.0)
            v_low, v_high = _pairs(v_tile, vs, N, VD, GROUPS_V, C, CODES)
            acc = dot(p.to(C), v_low, acc, PRECISION)
            acc2 = dot(p.to(C), v_high, acc2 * alpha[:, None], PRECISION)
        else:
            acc = dot(p.to(q_tile.dtype), widen(v_tile, q_tile.dtype), acc, PRECISION)
        if PREFETCH:
            p0 = n0
            p1 = n1
            p2 = n2
            p3 = n3

    # -- the result of this split, and of the tile if this is all of it
    safe = tl.where(l_i == 0.0, 1.0, l_i)  # not "l > 0": NaN has to stay NaN
    inverse = out_scale / safe
    lse2 = m_i + tl.log2(safe)
    acc = acc * inverse[:, None]
    if CODES != "":
        acc2 = acc2 * inverse[:, None]
    o_cols = v_cols * HALF
    if used <= 1:
        o_rows = o + b.to(tl.int64) * o_sb + query.to(tl.int64) * o_ss + q_head.to(tl.int64) * o_sh
        mask_o = live[:, None]
        if MASK_V:
            mask_o = mask_o & (o_cols < DIM_V)[None, :]
        tl.store(o_rows[:, None] + o_cols[None, :], acc.to(o.dtype.element_ty), mask=mask_o)
        if CODES != "":
            tl.store(o_rows[:, None] + o_cols[None, :] + 1, acc2.to(o.dtype.element_ty), mask=mask_o)
        tl.store(lse + b.to(tl.int64) * lse_sb + q_head.to(tl.int64) * lse_sh + query, lse2 * LN2, mask=live)
    elif SPLIT:
        tile = (b * HEADS + head) * tiles_m + tile_m
        part = tile.to(tl.int64) * splits + split
        local = tl.arange(0, M)
        mask_p = local < R  # rows above R are never alive
        tl.store(lse_parts + part * R + local, lse2, mask=mask_p)
        p_rows = o_parts + (part * R + local)[:, None] * DV + o_cols[None, :]
        tl.store(p_rows, acc, mask=mask_p[:, None])
        if CODES != "":
            tl.store(p_rows + 1, acc2, mask=mask_p[:, None])
        if FUSED:
            tl.debug_barrier()  # all threads have stored, then one of them releases
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == used - 1:
                tl.store(counters + tile, 0)
                _store_merged(
                    o, lse, o_parts, lse_parts, tile.to(tl.int64) * splits, used, b, head, m0, rows,
                    o_sb, o_ss, o_sh, lse_sb, lse_sh, R, GROUP, DIM_V, DV, CHUNK,
                )  # fmt: skip


@triton.jit
def _store_merged(
    o, lse, o_parts, lse_parts, first_part, used, b, head, m0, rows, o_sb, o_ss, o_sh, lse_sb, lse_sh,
    R: tl.constexpr, GROUP: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one tile and write o and lse."""
    acc, lse2 = merge_splits(o_parts, lse_parts, first_part, used, R, DV, CHUNK)
    row = m0 + tl.arange(0, R)
    live = row < rows
    query = row // GROUP
    q_head = head * GROUP + row % GROUP
    d = tl.arange(0, DV)
    o_rows = o + b.to(tl.int64) * o_sb + query.to(tl.int64) * o_ss + q_head.to(tl.int64) * o_sh
    mask = live[:, None] & (d < DIM_V)[None, :]
    tl.store(o_rows[:, None] + d[None, :], acc.to(o.dtype.element_ty), mask=mask)
    tl.store(lse + b.to(tl.int64) * lse_sb + q_head.to(tl.int64) * lse_sh + query, lse2 * LN2, mask=live)


@triton.jit(do_not_specialize=["splits", "tiles_m", "seqlen_q", "capacity", "length", "new", "window_left",
                               "window_right"])  # fmt: skip
def decode_merge(
    o, lse, o_parts, lse_parts, cache_seqlens, cache_leftpad, o_sb, o_ss, o_sh, lse_sb, lse_sh,
    splits, tiles_m, heads_kv, seqlen_q, capacity, length, new, window_left, window_right,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MIN_BLOCKS: tl.constexpr, LENS: tl.constexpr, LEFTPAD: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The merge as a kernel of its own, one program a tile; tiles of one split have been written already."""
    tile = tl.program_id(0)
    tile_m = tile % tiles_m
    head = (tile // tiles_m) % heads_kv
    b = tile // (tiles_m * heads_kv)
    first_key, before, total = cache_lengths(b, cache_seqlens, cache_leftpad, length, new, capacity, LENS, LEFTPAD)
    m0 = tile_m * M
    rows = seqlen_q * GROUP
    lo = first_key
    hi = total
    if LEFT:
        lo = tl.maximum(lo, m0 // GROUP + total - seqlen_q - window_left)
    if RIGHT:
        hi = tl.minimum(hi, (tl.minimum(m0 + M, rows) - 1) // GROUP + total - seqlen_q + window_right + 1)
    _, _, used = split_range(0, splits, lo, hi, N, SPLIT_KEYS, MIN_BLOCKS)
    if used > 1:
        _store_merged(
            o, lse, o_parts, lse_parts, tile.to(tl.int64) * splits, used, b, head, m0, rows,
            o_sb, o_ss, o_sh, lse_sb, lse_sh, R, GROUP, DIM_V, DV, CHUNK,
        )  # fmt: skip


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class _Counters:
    """Counters, one per tile, that kernels find at zero and leave at zero.

    Two launches that may run at the same time must not share any: eager calls share it per stream, on which they run
    one after the other, and every call that is captured into a graph keeps a piece of its own for ever.
    """

    def __init__(self, of_stream: int, of_graphs: int) -> None:
        self._of_stream, self._of_graphs = of_stream, of_graphs
        self._streams: dict[tuple[torch.device, int], Tensor] = {}
        self._pool: dict[torch.device, Tensor] = {}
        self._spent: list[Tensor] = []  # graphs do not keep what they use alive

    def take(self, device: torch.device, count: int) -> Tensor:
        if device.type != "cuda":
            return self._zeros(count, device)
        if torch.cuda.is_current_stream_capturing():
            return self._piece(device, count)
        key = device, torch.cuda.current_stream(device).cuda_stream
        found = self._streams.get(key)
        if found is None or len(found) < count:
            found = self._streams[key] = self._zeros(max(self._of_stream, count), device)
        left = self._pool.get(device)
        if left is None or len(left) < count:  # for captures to come: memory cannot be filled once during one
            if left is not None:
                self._spent.append(left)
            self._pool[device] = self._zeros(max(self._of_graphs, count), device)
        return found

    def _piece(self, device: torch.device, count: int) -> Tensor:
        left = self._pool.get(device)
        if left is None or len(left) < count:
            return self._zeros(count, device)  # filled in every replay: right, but slower
        self._pool[device] = left[count:]
        return left[:count]

    def _zeros(self, count: int, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)


_counters = _Counters(of_stream=4096, of_graphs=1 << 20)


def counters_of(device: torch.device, count: int) -> Tensor:
    """Zeroed counters for one launch, which has to leave them at zero."""
    return _counters.take(device, count)


def visible_span(call: KVCall, tile: int) -> int:
    """The most keys that a tile of `tile` rows can see, from shapes and window alone."""
    if call.window_left < 0 or call.window_right < 0:
        return call.capacity
    queries = min(call.q.shape[1], -(-tile // call.group) + 1)
    return min(call.capacity, call.window_left + call.window_right + queries)


@dataclass(frozen=True)
class Plan:
    """What a call launches."""

    config: DecodeConfig
    tile: int
    tiles_m: int
    tiles: int
    splits: int
    split_keys: int

    def __str__(self) -> str:
        how = f"{self.splits} splits" + (f" of {self.split_keys} keys" if self.split_keys else "")
        return f"{self.tile} rows x {self.config}; {self.tiles} tiles, {how}"


def plan(call: KVCall, config: DecodeConfig | None = None) -> Plan:
    """Tiles and splits of a call: shapes decide, never values on the device."""
    batch, sq, _, head_dim = call.q.shape
    rows = sq * call.group
    if config is None:
        dim, tokens = max(head_dim, call.head_dim_v), call.k_scales.mode == TOKEN_SCALES.value
        wide = call.q.dtype == torch.float32
        config = decode_config.lookup(rows, call.bits, dim, token_scales=tokens, float32=wide)
        config = decode_config.fitted(config, call.q.device)
    tile = decode_config.tile_rows(rows)
    tiles_m = _cdiv(rows, tile)
    tiles = batch * call.heads_kv * tiles_m
    span = visible_span(call, tile)
    split_keys = 0
    if call.num_splits:
        splits = call.num_splits
    elif call.batch_invariant:
        split_keys = max(config.block_n, 4 * config.block_n if INTERPRET else decode_config.FIXED_SPLIT_KEYS)
        splits = min(_cdiv(call.capacity, split_keys), _cdiv(span, split_keys) + 1)
    else:
        slots = decode_config.processors(call.q.device) * config.per_sm
        splits = decode_config.automatic_splits(tiles, _cdiv(span, config.block_n), slots, config.min_blocks)
    return Plan(config, tile, tiles_m, tiles, max(1, splits), split_keys)


def _format(call: KVCall) -> int:
    return {"": 16, "int4": 4}.get(call.kind, 8)


def _codes(x: Tensor) -> Tensor:
    return x.view(torch.int8) if x.dtype == torch.uint8 else x


def _paired(call: KVCall) -> tuple[Tensor, Tensor, str]:
    """The caches as `decode_attention` reads them, and its CODES: pairs of bytes wherever addresses allow it."""
    caches = call.k_cache, call.v_cache
    if call.kind == "int4":
        return _codes(caches[0]), _codes(caches[1]), call.kind
    even = (n % 2 == 0 for x in caches for n in (x.storage_offset(), x.data_ptr(), *x.stride()[:3]))
    if call.kind and all(even):
        return caches[0].view(torch.int16), caches[1].view(torch.int16), call.kind
    return *caches, ""


def refuse(call: KVCall) -> str | None:
    """Why the plain-Triton kernels cannot run this call, or None."""
    device = call.q.device
    if device.type == "cpu" and not INTERPRET:
        return (
            "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before gpu_accel is imported, "
            "move the tensors to a GPU, or use backend='reference'"
        )
    if device.type not in ("cpu", "cuda"):
        return f"device {device.type!r} is not one that Triton compiles for here"
    needed = (8, 9) if call.kind in ("e4m3", "e5m2") else (8, 0)
    if device.type == "cuda" and capability(device) < needed:
        return f"compute capability {capability(device)} is below {needed}"
    if call.q.dtype == torch.float64:
        return "dtype torch.float64 is not float16, bfloat16 or float32"
    for name, dim in (("head_dim", call.q.shape[3]), ("head_dim_v", call.head_dim_v)):
        if dim > 256:
            return f"{name} {dim} is above 256"
        if max(call.k_scales.groups, call.v_scales.groups) > 1 and dim != max(32, next_power_of_2(dim)):
            return f"{name} {dim} is not a power of two from 32 up, which int4 with several groups in a head needs"
    return None


def _padded(call: KVCall) -> tuple[int, int]:
    dims = tuple(max(16, next_power_of_2(d)) for d in (call.q.shape[3], call.head_dim_v))
    if call.kind:  # a product of even and one of odd dimensions, each at least 16 long
        dims = tuple(max(32, d) for d in dims)
    return dims[0], dims[1]


def append(call: KVCall) -> None:
    """Write new keys and values to the cache, turned and quantised; nothing where there are none."""
    if not call.new or not call.q.shape[0]:
        return
    padded = _padded(call)
    rows = call.new * call.heads_kv
    tile = min(16, next_power_of_2(rows))
    programs = call.q.shape[0] * _cdiv(rows, tile)
    cos = call.rotary_cos if call.rotary_dim else call.q
    arguments = (
        call.k, call.v, _codes(call.k_cache), _codes(call.v_cache), call.cache_seqlens, call.cache_batch_idx,
        call.page_table, call.k_scales.tensor, call.v_scales.tensor, cos, call.rotary_sin if call.rotary_dim else cos,
        *call.k.stride()[:3], *call.v.stride()[:3], *call.k_cache.stride()[:3], *call.v_cache.stride()[:3],
        call.page_table.stride(0) if call.page_size else 0, *call.k_scales.strides, *call.v_scales.strides,
        call.heads_kv, call.capacity, call.length, call.new, cos.shape[0],
    )  # fmt: skip
    options = dict(
        T=tile, DIM=call.q.shape[3], D=padded[0], DIM_V=call.head_dim_v, DV=padded[1], PAGE=call.page_size,
        FORMAT=_format(call), SCALES=call.k_scales.mode, GROUPS=call.k_scales.groups, GROUPS_V=call.v_scales.groups,
        DYNAMIC=call.k_scales.per_token, KIND=call.kind, QMAX=LARGEST[call.kind],
        LENS=call.cache_seqlens is not None, BATCH_IDX=call.cache_batch_idx is not None, ROTARY=call.rotary_dim,
        INTERLEAVED=call.rotary_interleaved, num_warps=4 if tile >= 8 else 1,
    )  # fmt: skip
    launch(append_kv, programs, arguments, options)


def forward(call: KVCall, o: Tensor, lse: Tensor, config: DecodeConfig | None = None) -> None:
    """Append, then attend: writes o (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q)."""
    batch, sq, _, head_dim = call.q.shape
    padded = _padded(call)
    append(call)
    if not lse.numel():
        return
    if call.capacity == 0:
        call = without_keys(call)
    p = plan(call, config)
    k, v, codes = _paired(call)
    device, several = call.q.device, p.splits > 1
    live_rows = min(p.tile, next_power_of_2(sq * call.group))
    dv = padded[1]
    o_parts, lse_parts, counters = o, lse, lse
    if several:
        o_parts = torch.empty(p.tiles * p.splits * live_rows * dv, dtype=torch.float32, device=device)
        lse_parts = torch.empty(p.tiles * p.splits * live_rows, dtype=torch.float32, device=device)
        if p.config.fused:
            counters = counters_of(device, p.tiles)
    cos = call.rotary_cos if call.rotary_dim else call.q
    right = call.window_right
    if right >= sq - 1:  # the last query ends at the last key, so this bound hides nothing
        right = -1
    left = -1 if call.window_left >= call.capacity else call.window_left
    scalars = (call.capacity, call.length, call.new, left, right)
    chunk = p.config.merge_chunk(p.splits, live_rows * dv)
    shared = dict(
        M=p.tile, N=p.config.block_n, R=live_rows, GROUP=call.group, DIM_V=call.head_dim_v, DV=dv,
        SPLIT_KEYS=p.split_keys, MIN_BLOCKS=p.config.min_blocks, LENS=call.cache_seqlens is not None,
        LEFTPAD=call.cache_leftpad is not None, LEFT=left >= 0, RIGHT=right >= 0, CHUNK=chunk,
    )  # fmt: skip
    arguments = (
        call.q, k, v, o, lse, o_parts, lse_parts, counters,
        call.cache_seqlens, call.cache_leftpad, call.cache_batch_idx, call.page_table,
        call.k_scales.tensor, call.v_scales.tensor, call.sinks, cos, call.rotary_sin if call.rotary_dim else cos,
        *call.q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
        lse.stride(0), lse.stride(1), call.page_table.stride(0) if call.page_size else 0,
        *call.k_scales.strides, *call.v_scales.strides,
        p.splits, p.tiles_m, sq, *scalars, cos.shape[0], call.softmax_scale, call.softcap,
    )  # fmt: skip
    # offsets that K and V share have not been checked on a GPU together with pages
    alike = not call.page_size and k.stride()[:2] == v.stride()[:2]
    options = dict(
        shared, HEADS=call.heads_kv, SEVERAL_TILES=p.tiles_m > 1, ALIKE=alike,
        DIM=head_dim, D=padded[0], PAGE=call.page_size, FORMAT=_format(call), CODES=codes,
        SCALES=call.k_scales.mode, GROUPS=call.k_scales.groups, GROUPS_V=call.v_scales.groups,
        BATCH_IDX=call.cache_batch_idx is not None, SOFTCAP=call.softcap > 0, SINKS=call.sinks is not None,
        ROTARY=call.rotary_dim, INTERLEAVED=call.rotary_interleaved, ADVANCE=call.advance, SPLIT=several,
        FUSED=p.config.fused, PREFETCH=p.config.prefetch,
        PRECISION="tf32x3" if call.q.dtype == torch.float32 else "tf32",
        num_warps=p.config.num_warps, num_stages=p.config.num_stages,
    )  # fmt: skip
    launch(decode_attention, p.tiles * p.splits, arguments, options)
    if several and not p.config.fused:
        arguments = (
            o, lse, o_parts, lse_parts, call.cache_seqlens, call.cache_leftpad, *o.stride()[:3],
            lse.stride(0), lse.stride(1), p.splits, p.tiles_m, call.heads_kv, sq, *scalars,
        )  # fmt: skip
        launch(decode_merge, p.tiles, arguments, shared | {"num_warps": 4})


def without_keys(call: KVCall) -> KVCall:
    """The same call where no sequence has a key: a cache of length 0 has no memory to point at."""
    return replace(call, k=None, v=None, cache_seqlens=None, length=0, page_table=None, cache_leftpad=None,
                   cache_batch_idx=None)  # fmt: skip
