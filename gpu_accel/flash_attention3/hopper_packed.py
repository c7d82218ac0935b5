"""Packed sequences in the Hopper forward: a table of tiles, made on the device, and how partitions hand on its entries.

`fill_tile_table` (plain Triton, a few microseconds) looks up which sequence every block of query rows belongs to, so
that the host never reads cu_seqlens and the attention kernel never searches:

    table[0] = number of tiles a head; then 8 integers a tile: block, first row of q, first row of k, rows of q,
    rows of q and of k that count, and for modifiers which sequence it is

The producer reads the entry of a tile and passes it through shared memory together with the tile's number.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gpu_accel.gluon_compat import reinterpret

from .device import find_sequence, packed_lengths

ENTRY = gl.constexpr(8)  # integers a table entry, and a queue slot
FIELDS = gl.constexpr(7)  # of a queue slot: the tile's number and the six of an entry


@triton.jit(do_not_specialize=["batches", "total_q"])
def fill_tile_table(
    table, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batches, total_q,
    BLOCK: tl.constexpr, BATCH: tl.constexpr, USED_Q: tl.constexpr, USED_K: tl.constexpr,
):  # fmt: skip
    """One program a tile. Entries behind the last tile are zeros: no rows, so nothing is written for them."""
    tile = tl.program_id(0)
    sequence, block, q_row0, rows = find_sequence(tile, cu_seqlens_q, batches, total_q, BLOCK, BATCH)
    k_row0, used_q, used_k = packed_lengths(sequence, rows, batches, cu_seqlens_k, seqused_q, seqused_k, USED_Q, USED_K)
    real = rows >= 0
    entry = table + ENTRY * (1 + tile)
    tl.store(entry, tl.where(real, block, 0))
    tl.store(entry + 1, tl.where(real, q_row0, 0))
    tl.store(entry + 2, tl.where(real, k_row0, 0))
    tl.store(entry + 3, tl.where(real, rows, 0))
    tl.store(entry + 4, tl.where(real, used_q, 0))
    tl.store(entry + 5, tl.where(real, used_k, 0))
    tl.store(entry + 6, tl.where(real, tl.minimum(sequence, batches - 1), 0))
    if tile == 0:
        i = tl.arange(0, BATCH)
        start = tl.load(cu_seqlens_q + i, mask=i <= batches, other=0)
        end = tl.load(cu_seqlens_q + i + 1, mask=i < batches, other=0)
        end = tl.where(i == batches, total_q, end)
        length = tl.where(i <= batches, tl.maximum(end - start, 0), 0)
        tl.store(table, tl.sum((length + BLOCK - 1) // BLOCK, 0))


@gluon.jit
def read_entry(index, table, wanted):
    """(block, q_row0, k_row0, rows, used_q, used_k) of a tile; zeros where not `wanted`."""
    entry = table + ENTRY * (1 + index)
    block = gl.load(entry, mask=wanted, other=0)
    q_row0 = gl.load(entry + 1, mask=wanted, other=0)
    k_row0 = gl.load(entry + 2, mask=wanted, other=0)
    rows = gl.load(entry + 3, mask=wanted, other=0)
    used_q = gl.load(entry + 4, mask=wanted, other=0)
    used_k = gl.load(entry + 5, mask=wanted, other=0)
    return block, q_row0, k_row0, rows, used_q, used_k


@gluon.jit
def read_sequence(index, table, wanted):
    """Which sequence a tile belongs to."""
    return gl.load(table + ENTRY * (1 + index) + 6, mask=wanted, other=0)


@gluon.jit
def publish_entry(k, tile, entry, queue, full, empty, sequence=0, SEQUENCE: gl.constexpr = False):
    """Producer: hand a tile's number and entry (SEQUENCE: and sequence) to the consumers through the two-slot queue."""
    slot = k & 1
    mbarrier.wait(empty.index(slot), ((k >> 1) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    queue.index(slot * ENTRY).store(zero + tile)
    for i in gl.static_range(FIELDS - 1):
        queue.index(slot * ENTRY + 1 + i).store(zero + entry[i])
    if SEQUENCE:
        queue.index(slot * ENTRY + FIELDS).store(zero + sequence)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _field(queue, index):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(queue.index(index).load(layout), axis=0)


@gluon.jit
def receive_entry(k, queue, full, empty, SEQUENCE: gl.constexpr = False):
    """Consumer: the k-th tile's number and entry, and with SEQUENCE its sequence."""
    slot = k & 1
    mbarrier.wait(full.index(slot), (k >> 1) & 1)
    at = slot * ENTRY
    tile = _field(queue, at)
    block, q_row0, k_row0 = _field(queue, at + 1), _field(queue, at + 2), _field(queue, at + 3)
    rows, used_q, used_k = _field(queue, at + 4), _field(queue, at + 5), _field(queue, at + 6)
    if SEQUENCE:
        received = (tile, block, q_row0, k_row0, rows, used_q, used_k, _field(queue, at + FIELDS))
    else:
        received = (tile, block, q_row0, k_row0, rows, used_q, used_k)
    mbarrier.arrive(empty.index(slot), count=1)
    return received


@gluon.jit
def zero_rows(buffers, stage, first):
    """Zeros into rows [first, rows) of stage `stage` of a (stages, rows, cols) buffer in 128-byte swizzle, by one warp.

    These rows are the next sequence's, or nobody's: their probability is 0, but 0 times NaN would be NaN. Swizzled
    buffers are stacks of 64 columns, and those of 8 rows, which gives windows with a run-time index.
    """
    STAGES: gl.constexpr = buffers.shape[0]
    ROWS: gl.constexpr = buffers.shape[1]
    PANELS: gl.constexpr = buffers.shape[2] // 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], buffers.dtype)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    windows = reinterpret(buffers, buffers.dtype, [STAGES * PANELS * (ROWS // 8), 8, 64], SHARED)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for i in range(first // 8, ROWS // 8):
        for panel in gl.static_range(PANELS):
            window = windows.index((stage * PANELS + panel) * (ROWS // 8) + i)
            x = window.load(LAYOUT)
            keep = (row + 8 * i < first)[:, None]
            window.store(gl.where(keep, x, gl.full([8, 64], 0.0, buffers.dtype, LAYOUT)))
    fence_async_shared()
