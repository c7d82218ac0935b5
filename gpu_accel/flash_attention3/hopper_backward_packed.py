"""Packed sequences in the Hopper backward: which queries see a key, worked out on the device before the main kernel.

Seen from a key, causal masks, windows, sequences and `seqused` all say one thing: it is seen by the queries of one
interval of the packed rows. `fill_key_intervals` (plain Triton, a few microseconds) writes these intervals, so that the
main kernel runs as over one long sequence, its tiles of 128 keys cut regardless of where sequences begin. Seen from a
query it is the same with queries and keys, left and right exchanged, which is the table of dQ above head_dim 128:

    table = used_q, used_k, 0 ...      rows up to the end of the last sequence
            a line for 64 keys:        smallest first, largest last, largest first, smallest last query of its keys
            first query of every key, then last query of every key (none: first = NEVER, last = -1)
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_device import columns_of

HEAD = tl.constexpr(8)
LINE = tl.constexpr(4)
NEVER = tl.constexpr(1 << 30)


def table_size(num_n: int) -> int:
    """Integers of the table for `num_n` tiles of 128 keys."""
    return HEAD.value + 2 * num_n * (LINE.value + 128)


@triton.jit(do_not_specialize=["batches", "left", "right", "num_n"])
def fill_key_intervals(
    table, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batches, left, right, num_n,
    STEPS: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
):  # fmt: skip
    """One program for 64 keys. 2 ** STEPS is more than the number of sequences; left, right: -1 for no bound."""
    block = tl.program_id(0)
    key = block * 64 + tl.arange(0, 64)
    # the last sequence that begins at or before the key, by halving: sequences may be empty
    low = tl.zeros([64], tl.int32)
    high = low + batches
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        later = tl.load(cu_seqlens_k + middle) <= key
        go = high - low > 1
        low = tl.where(go & later, middle, low)
        high = tl.where(go & (later == 0), middle, high)
    q_row0 = tl.load(cu_seqlens_q + low)
    k_row0 = tl.load(cu_seqlens_k + low)
    sq = tl.load(cu_seqlens_q + low + 1) - q_row0
    sk = tl.load(cu_seqlens_k + low + 1) - k_row0
    if USED_Q:
        sq = tl.load(seqused_q + low)
    if USED_K:
        sk = tl.load(seqused_k + low)
    diagonal = key - k_row0 - (sk - sq)  # the query, inside its sequence, on whose diagonal the key lies
    first = tl.where(right >= 0, tl.maximum(diagonal - right, 0), 0)
    last = tl.where(left >= 0, tl.minimum(diagonal + left, sq - 1), sq - 1)
    seen = (key - k_row0 < sk) & (first <= last)
    first = tl.where(seen, first + q_row0, NEVER)
    last = tl.where(seen, last + q_row0, -1)
    line = table + HEAD + LINE * block
    tl.store(line, tl.min(first, 0))
    tl.store(line + 1, tl.max(last, 0))
    tl.store(line + 2, tl.max(first, 0))
    tl.store(line + 3, tl.min(last, 0))
    firsts = table + HEAD + LINE * 2 * num_n
    tl.store(firsts + key, first)
    tl.store(firsts + 128 * num_n + key, last)
    if block == 0:
        tl.store(table, tl.load(cu_seqlens_q + batches))
        tl.store(table + 1, tl.load(cu_seqlens_k + batches))


@gluon.jit
def packed_range(table, n_block, num_m, M: gl.constexpr):
    """First query block that sees a tile of keys, and how many; at least one: zeros must be written."""
    line = table + HEAD + 2 * LINE * n_block
    first = gl.minimum(gl.load(line), gl.load(line + LINE))
    last = gl.maximum(gl.load(line + 1), gl.load(line + LINE + 1))
    lo = gl.minimum(first // M, num_m - 1)
    return lo, gl.maximum(last // M + 1 - lo, 1)


@gluon.jit
def packed_range_of_64(table, block, num_m, M: gl.constexpr):
    """`packed_range` of a tile of 64 keys."""
    line = table + HEAD + LINE * block
    lo = gl.minimum(gl.load(line) // M, num_m - 1)
    return lo, gl.maximum(gl.load(line + 1) // M + 1 - lo, 1)


@gluon.jit
def _intervals(table, block, num_n, LAYOUT: gl.constexpr):
    """Of 64 keys: first and last query of each, largest first and smallest last."""
    line = table + HEAD + LINE * block
    key = block * 64 + gl.arange(0, 64, layout=LAYOUT)
    firsts = table + HEAD + LINE * 2 * num_n
    first = gl.load(firsts + key)
    last = gl.load(firsts + 128 * num_n + key)
    return first, last, gl.load(line + 2), gl.load(line + 3)


@gluon.jit
def packed_tile_of_64(table, block, num_n, num_m, M: gl.constexpr, LAYOUT: gl.constexpr):
    """`packed_tile` of a tile of 64 keys; num_n is still the number of 128 keys."""
    lo, blocks = packed_range_of_64(table, block, num_m, M)
    return lo, blocks, _intervals(table, block, num_n, LAYOUT)


@gluon.jit
def packed_tile(table, n_block, num_n, num_m, WG: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """`packed_range`, and of this consumer's 64 keys: first and last query of each, largest first and smallest last."""
    lo, blocks = packed_range(table, n_block, num_m, M)
    return lo, blocks, _intervals(table, 2 * n_block + WG, num_n, LAYOUT)


@gluon.jit
def keep_seen(p, column0, seen):
    """P where a key and a query see each other, else 0: columns from `column0` on, intervals of rows `seen`."""
    first, last, latest, earliest = seen
    if (column0 < latest) | (column0 + p.shape[1] - 1 > earliest):
        column, lane = columns_of(p)
        lane += column0
        p = gl.where(column >= first[:, None] - lane, p, 0.0)
        p = gl.where(column <= last[:, None] - lane, p, 0.0)
    return p
