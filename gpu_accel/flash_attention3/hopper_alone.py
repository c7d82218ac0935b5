"""The Hopper forward without warp specialisation, for the paper's ablation: the warps that compute also load.

One partition of 8 warps (two warpgroups) or 12 shares a tile of rows. It issues the loads of the block that comes
STAGES later as soon as a block's buffers are free, so memory is read as far ahead as with a producer; but its warps
meet at a barrier in every step, and none of them runs softmax while another issues matrix products. The pipeline
drains between tiles.

Source: FlashAttention-3, arXiv 2407.08608, table 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gpu_accel.gluon_compat import tma_load

from .hopper_device import bar_sync, issue_product, key_blocks, mask_ends, pack_pairs, tile_of, unpack_pairs
from .hopper_handover import PING_PONG_BARRIER
from .hopper_steps import first_softmax, step, store_tile


@gluon.jit
def _load(desc, batch, head, row, full, buffer, wanted):
    if wanted:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, [batch, head, row, 0], full, buffer)


@gluon.jit
def attend_alone(
    bufs, bars, q_desc, k_desc, v_desc, outputs, table, shape, scales,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    EVEN_K: gl.constexpr, LAZY: gl.constexpr, PIPELINED: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """All tiles of a program, in static order. Block i of a tile is block hi - 1 - i of keys, in stage (it + i)."""
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, _, k_full, v_full, kv_empty, _, _, _ = bars
    seqlen_q, seqlen_k, _, heads_per_kv, _, num_tiles, _, left, right = shape
    ROWS: gl.constexpr = q_bufs.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, v_bufs.shape[2], 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    MASK_FIRST: gl.constexpr = CAUSAL or WINDOW or not EVEN_K
    dtype: gl.constexpr = q_bufs.dtype
    shift = seqlen_k - seqlen_q
    q = q_bufs.index(0)
    it = 0
    tile = gl.program_id(0)
    q_phase = 0
    while tile < num_tiles:
        m_block, batch, head = tile_of(tile, shape, CAUSAL)
        kv = head // heads_per_kv
        row0 = m_block * ROWS
        lo, hi = key_blocks(row0, ROWS, shape, BLOCK_N, CAUSAL, WINDOW)
        _load(q_desc, batch, head, row0, q_full.index(0), q, True)
        for i in gl.static_range(STAGES):
            stage = (it + i) % STAGES
            row = (hi - 1 - i) * BLOCK_N
            _load(k_desc, batch, kv, row, k_full.index(stage), k_bufs.index(stage), hi - 1 - i >= lo)
            _load(v_desc, batch, kv, row, v_full.index(stage), v_bufs.index(stage), hi - 1 - i >= lo)
        first, left_end = mask_ends(row0, ROWS, shift, lo, hi, left, right, BLOCK_N, CAUSAL, WINDOW)
        stage = it % STAGES
        mbarrier.wait(q_full.index(0), q_phase)
        mbarrier.wait(k_full.index(stage), (it // STAGES) & 1)
        s = warpgroup_mma_wait(0, deps=[issue_product(q, k_bufs.index(stage).permute((1, 0)), S_LAYOUT)])
        mbarrier.arrive(kv_empty.index(stage), count=1)
        mbarrier.wait(kv_empty.index(stage), (it // STAGES) & 1)
        row = (hi - 1 - STAGES) * BLOCK_N
        _load(k_desc, batch, kv, row, k_full.index(stage), k_bufs.index(stage), hi - 1 - STAGES >= lo)
        p, m_i, l_i = first_softmax(
            s, hi - 1, 2, row0, shape, scales, (batch, head), (), CAUSAL, WINDOW, SOFTCAP, MASK_FIRST
        )
        p_packed = pack_pairs(p, dtype)
        acc = gl.full([ROWS, v_bufs.shape[2]], 0.0, gl.float32, O_LAYOUT)
        for j in range(0, hi - 1 - lo):
            block = hi - 2 - j
            v_stage = it % STAGES
            acc, p_packed, m_i, l_i, it = step(
                q, k_bufs, v_bufs, bars, q_full.index(0), q_phase, acc, p_packed, m_i, l_i, it,
                block, 2, (block >= first) | (block < left_end), row0, shape, scales, (batch, head), (),
                0, 1, STAGES, False, CAUSAL, WINDOW, SOFTCAP, CAUSAL or WINDOW, LAZY, False,
                S_LAYOUT, P_LAYOUT, ROW_LAYOUT, PIPELINED)  # fmt: skip
            stage = it % STAGES
            mbarrier.wait(kv_empty.index(stage), (it // STAGES) & 1)  # everybody is through with both buffers
            next_k = block - STAGES
            next_v = block + 1 - STAGES
            _load(k_desc, batch, kv, next_k * BLOCK_N, k_full.index(stage), k_bufs.index(stage), next_k >= lo)
            _load(v_desc, batch, kv, next_v * BLOCK_N, v_full.index(v_stage), v_bufs.index(v_stage), next_v >= lo)
        v_stage = it % STAGES
        mbarrier.wait(v_full.index(v_stage), (it // STAGES) & 1)
        p_a = unpack_pairs(p_packed, dtype, P_LAYOUT)
        acc_async = warpgroup_mma(p_a, v_bufs.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc_async])
        bar_sync(PING_PONG_BARRIER, 32 * WARPS)  # the next tile's loads overwrite Q and V
        where = (batch, head, 0, seqlen_q, seqlen_q)
        store_tile(acc, m_i, l_i, o_bufs, outputs, where, row0, shape, scales, (), 0, False, SINKS, False, ROW_LAYOUT)
        it += 1
        q_phase ^= 1
        tile += gl.num_programs(0)
    tma.store_wait(0)
