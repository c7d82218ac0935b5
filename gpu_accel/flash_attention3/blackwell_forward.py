"""FlashAttention forward for Blackwell (sm_100a) in Gluon: tcgen05 products in tensor memory. Experimental, never run.

It compiles for sm_100a with every supported Triton (a test sees to that), and no card was at hand to run it on. One
persistent program per SM, split into partitions by `warp_specialize`; a tile is 128 query rows of one head:

    softmax  4 warps, one thread a row: S out of tensor memory, P into it, O rescaled in it and written out
    products 1 warp: issues S = Q K^T of the next block, then O += P V of this one
    loads    1 warp: every TMA load

    tensor core | S1 | S2 | P1 V1 | S3 | P2 V2 | S4 ...        S has two buffers (one at head_dim 256)
    CUDA cores  |    | softmax1   | softmax2   | ...           P and O have one

O is rescaled only where a row's maximum grew by more than 8 in base 2, so most steps leave it in tensor memory.

Barriers (mbarrier, phase (i // n) & 1): q_full, q_empty; k_full, k_empty, v_full, v_empty one a stage, the full ones
arrived on by TMA and the empty ones by the tensor core (commit); s_full (commit) and s_empty one a buffer of S; p_full
when P is written and O rescaled; o_full (commit) when P V is added, which frees P and V. O leaves through Q's buffer.

Source: FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2; what differs follows from the machine.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from gpu_accel.gluon_compat import tma_load, tma_store

from .hopper_device import LN_2, NEG_LARGE, key_blocks, tanh, tile_of
from .hopper_steps import mask_block

ROWS = gl.constexpr(128)
COLS = gl.constexpr(32)  # of O in registers at a time while P is there too
PANEL = gl.constexpr(64)  # of O on the way out: what 128-byte swizzle stacks


@gluon.jit
def _softmax(
    bufs, tensor_memory, bars, o_desc, lse_ptr, shape, scales,
    BLOCK_N: gl.constexpr, S_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    q_buf, _, _ = bufs
    s_slots, p_slot, o_slot = tensor_memory
    _, q_empty, _, _, _, _, s_full, s_empty, p_full, o_full = bars
    seqlen_q, seqlen_k, heads, _, _, num_tiles, _, left, right = shape
    scale, exp_scale, softcap = scales
    dtype: gl.constexpr = q_buf.dtype
    D: gl.constexpr = q_buf.shape[1]
    S_LAYOUT: gl.constexpr = gl.BlockedLayout([1, BLOCK_N], [32, 1], [4, 1], [0, 1])
    O_LAYOUT: gl.constexpr = gl.BlockedLayout([1, COLS], [32, 1], [4, 1], [0, 1])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, PANEL], [32, 1], [4, 1], [0, 1])
    shift = seqlen_k - seqlen_q
    it = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        m_block, batch, head = tile_of(tile, shape, CAUSAL)
        row0 = m_block * ROWS
        lo, hi = key_blocks(row0, ROWS, shape, BLOCK_N, CAUSAL, WINDOW)
        m_i = gl.full([ROWS], NEG_LARGE, gl.float32, S_ROW)
        l_i = gl.full([ROWS], 0.0, gl.float32, S_ROW)
        for j in range(0, hi - lo):
            block = hi - 1 - j
            slot = it % S_SLOTS
            mbarrier.wait(s_full.index(slot), (it // S_SLOTS) & 1)
            s = s_slots.index(slot).load(S_LAYOUT)
            mbarrier.arrive(s_empty.index(slot), count=1)
            if SOFTCAP:
                s = softcap * tanh(s * scale)
            masked = (block + 1) * BLOCK_N > seqlen_k
            if CAUSAL:
                masked = masked | ((block + 1) * BLOCK_N - 1 > row0 + shift + right)
            if WINDOW:
                masked = masked | (block * BLOCK_N < row0 + ROWS - 1 + shift - left)
            if masked:
                s = mask_block(s, block, row0, shape, CAUSAL, WINDOW)
            m_new = gl.maximum(m_i, gl.max(s, axis=1))
            grew = (m_new - m_i) * exp_scale > 8.0
            m_new = gl.where(grew, m_new, m_i)
            alpha = gl.exp2((m_i - m_new) * exp_scale)
            p = gl.exp2(s * exp_scale - (m_new * exp_scale)[:, None])
            l_i = l_i * alpha + gl.sum(p, axis=1)
            m_i = m_new
            p = p.to(dtype)
            if j > 0:
                mbarrier.wait(o_full, (it + 1) & 1)  # of the block before
                if gl.max(grew.to(gl.int32), axis=0) > 0:
                    factor = gl.convert_layout(alpha, O_ROW)[:, None]
                    for c in gl.static_range(D // COLS):
                        part = o_slot.slice(c * COLS, COLS)
                        part.store(part.load(O_LAYOUT) * factor)
            p_slot.store(p)
            mbarrier.arrive(p_full, count=1)
            it += 1
        mbarrier.wait(o_full, (it + 1) & 1)
        nothing = l_i == 0.0
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / l_i), gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        for c in gl.static_range(D // PANEL):
            part = o_slot.slice(c * PANEL, PANEL).load(OUT_LAYOUT) * factor
            q_buf.slice(c * PANEL, PANEL, dim=1).store(part.to(dtype))
        fence_async_shared()
        tma_store(o_desc, [batch, head, row0, 0], q_buf)
        lse = gl.where(nothing, float("-inf"), (m_i * exp_scale + gl.log2(l_i)) * LN_2)
        rows = row0 + gl.arange(0, ROWS, layout=S_ROW)
        offset = (batch * heads + head).to(gl.int64) * seqlen_q
        gl.store(lse_ptr + offset + rows, lse, mask=rows < seqlen_q)
        tma.store_wait(0)
        mbarrier.arrive(q_empty, count=1)


@gluon.jit
def _products(
    bufs, tensor_memory, bars, shape,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    q_buf, k_bufs, v_bufs = bufs
    s_slots, p_slot, o_slot = tensor_memory
    q_full, _, k_full, k_empty, v_full, v_empty, s_full, s_empty, p_full, o_full = bars
    _, _, _, _, _, num_tiles, _, _, _ = shape
    it = 0  # blocks whose P V was issued
    ahead = 0  # blocks whose S was
    tile = gl.program_id(0)
    q_phase = 0
    while tile < num_tiles:
        m_block, _, _ = tile_of(tile, shape, CAUSAL)
        lo, hi = key_blocks(m_block * ROWS, ROWS, shape, BLOCK_N, CAUSAL, WINDOW)
        mbarrier.wait(q_full, q_phase)
        for j in range(0, hi - lo + 1):
            if j < hi - lo:
                stage = ahead % STAGES
                slot = ahead % S_SLOTS
                mbarrier.wait(k_full.index(stage), (ahead // STAGES) & 1)
                mbarrier.wait(s_empty.index(slot), ((ahead // S_SLOTS) & 1) ^ 1)
                tcgen05_mma(q_buf, k_bufs.index(stage).permute((1, 0)), s_slots.index(slot), use_acc=False)
                tcgen05_commit(s_full.index(slot))
                tcgen05_commit(k_empty.index(stage))
                ahead += 1
            if j > 0:
                stage = it % STAGES
                mbarrier.wait(v_full.index(stage), (it // STAGES) & 1)
                mbarrier.wait(p_full, it & 1)
                tcgen05_mma(p_slot, v_bufs.index(stage), o_slot, use_acc=j > 1)
                tcgen05_commit(o_full)
                tcgen05_commit(v_empty.index(stage))
                it += 1
        tile += gl.num_programs(0)
        q_phase ^= 1


@gluon.jit
def _loads(
    bufs, bars, q_desc, k_desc, v_desc, shape,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    q_buf, k_bufs, v_bufs = bufs
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _, _, _ = bars
    _, _, _, heads_per_kv, _, num_tiles, _, _, _ = shape
    it = 0
    tile = gl.program_id(0)
    q_phase = 0
    while tile < num_tiles:
        m_block, batch, head = tile_of(tile, shape, CAUSAL)
        kv = head // heads_per_kv
        lo, hi = key_blocks(m_block * ROWS, ROWS, shape, BLOCK_N, CAUSAL, WINDOW)
        mbarrier.wait(q_empty, q_phase ^ 1)
        mbarrier.expect(q_full, q_desc.block_type.nbytes)
        tma_load(q_desc, [batch, head, m_block * ROWS, 0], q_full, q_buf)
        for j in range(0, hi - lo):
            stage = it % STAGES
            free = ((it // STAGES) & 1) ^ 1
            row = (hi - 1 - j) * BLOCK_N
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, kv, row, 0], k_full.index(stage), k_bufs.index(stage))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, kv, row, 0], v_full.index(stage), v_bufs.index(stage))
            it += 1
        tile += gl.num_programs(0)
        q_phase ^= 1


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads", "heads_per_kv", "num_m", "num_tiles", "group", "left", "right"]
)
def blackwell_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr,
    seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right, scale, exp_scale, softcap,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_SLOTS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Descriptors are rank 4, (batch, head, row, column), with blocks of one head; lse is (batch, heads, seqlen_q)."""
    dtype: gl.constexpr = q_desc.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_buf = gl.allocate_shared_memory(dtype, [ROWS, HEAD_DIM], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], KV_LAYOUT)
    S_MEMORY: gl.constexpr = TensorMemoryLayout(block=(ROWS, BLOCK_N), col_stride=1)
    O_MEMORY: gl.constexpr = TensorMemoryLayout(block=(ROWS, HEAD_DIM), col_stride=1)
    s_slots = allocate_tensor_memory(gl.float32, [S_SLOTS, ROWS, BLOCK_N], S_MEMORY)
    p_slot = allocate_tensor_memory(dtype, [ROWS, BLOCK_N], S_MEMORY)
    o_slot = allocate_tensor_memory(gl.float32, [ROWS, HEAD_DIM], O_MEMORY)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    o_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    s_full = gl.allocate_shared_memory(gl.int64, [S_SLOTS, 1], BARRIER)
    s_empty = gl.allocate_shared_memory(gl.int64, [S_SLOTS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(o_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    for i in gl.static_range(S_SLOTS):
        mbarrier.init(s_full.index(i), count=1)
        mbarrier.init(s_empty.index(i), count=1)
    bufs = (q_buf, k_bufs, v_bufs)
    tensor_memory = (s_slots, p_slot, o_slot)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, s_full, s_empty, p_full, o_full)
    shape = (seqlen_q, seqlen_k, heads, heads_per_kv, num_m, num_tiles, group, left, right)
    scales = (scale, exp_scale, softcap)
    gl.warp_specialize([
        (_softmax, (bufs, tensor_memory, bars, o_desc, lse_ptr, shape, scales,
                    BLOCK_N, S_SLOTS, CAUSAL, WINDOW, SOFTCAP)),
        (_products, (bufs, tensor_memory, bars, shape, BLOCK_N, STAGES, S_SLOTS, CAUSAL, WINDOW)),
        (_loads, (bufs, bars, q_desc, k_desc, v_desc, shape, BLOCK_N, STAGES, CAUSAL, WINDOW)),
    ], [1, 1], [32, 32])  # fmt: skip
