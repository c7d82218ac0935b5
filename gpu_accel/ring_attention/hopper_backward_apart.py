"""The backward of hopper_backward_kernel.py with dQ in a warpgroup of its own, for full and causal steps without turns.

Consumers and dq are those of `flash_attention3/hopper_backward_apart.py`: read its head first, and that of
hopper_backward_kernel.py for where results go. Where a tile ends, the consumers' float32 sums leave through the buffers
of their dS and, at head_dim 128, of their half of K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpu_accel.flash_attention3.hopper_backward_apart import _consumer, _dq
from gpu_accel.flash_attention3.hopper_backward_device import KEYS, tile_at
from gpu_accel.gluon_compat import reinterpret

from .hopper_backward_kernel import _producer, put_fragment, send_halves


@gluon.jit
def _to_sums(
    dk, dv, dk_desc, dv_desc, bufs, slot, k, tile, shape, scales, places,
    WG: gl.constexpr, D: gl.constexpr, V_SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A consumer's half of dK and dV, on its way to be added to the float32 sums."""
    _, _, k_bufs, _, ds_bufs, _, _ = bufs
    _, _, heads_kv, _, _, num_n, _, group, _, _ = shape
    _, _, all_n, n0 = places
    n_block, batch, head = tile_at(tile, num_n, heads_kv, group, CAUSAL)
    block = (batch * heads_kv + head) * all_n + n0 + 2 * n_block + WG
    SUMS: gl.constexpr = dk_desc.layout
    if D == 128:
        even = reinterpret(ds_bufs.index(WG), gl.float32, [16, 256], SUMS)
        odd = reinterpret(k_bufs.index(slot * 2 + WG), gl.float32, [16, 256], SUMS)
        send_halves(dv_desc, 2 * block, even, odd, dv, 0)
        send_halves(dk_desc, 2 * block, even, odd, dk, 1)
    else:
        both = reinterpret(ds_bufs.index(WG), gl.float32, [2, 16, 256], SUMS)
        put_fragment(dv_desc, block, both.index(0), dv)
        put_fragment(dk_desc, block, both.index(1), dk)


@gluon.jit(
    do_not_specialize=["seqlen_q", "seqlen_k", "heads_kv", "per_kv", "num_m", "num_n", "num_tiles", "group", "left",
                       "right", "all_m", "m0", "all_n", "n0"]
)
def ring_backward_apart_kernel(
    q_desc, do_desc, k_desc, v_desc, stat_desc, dq_desc, dk_desc, dv_desc, counter,
    seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right, all_m, m0, all_n, n0,
    qk_scale, cap_in, turns,
    D: gl.constexpr, M: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr, PRELOAD: gl.constexpr,
    CAUSAL: gl.constexpr, EVEN_K: gl.constexpr, DYNAMIC: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Arguments as of `ring_backward_kernel`."""
    dtype: gl.constexpr = q_desc.dtype
    M_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    N_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    do_bufs = gl.allocate_shared_memory(dtype, [2, M, D], M_LAYOUT)
    k_bufs = gl.allocate_shared_memory(dtype, [2 * K_SLOTS, KEYS, D], N_LAYOUT)
    v_bufs = gl.allocate_shared_memory(dtype, [2 * V_SLOTS, KEYS, D], N_LAYOUT)
    # two stages of each consumer's dS, the room of one fragment at head_dim 128 and of two at 64
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 2 * M], dtype)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, 2 * M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    row_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        if DYNAMIC:  # where nobody uses a barrier, its memory goes to others, which must not find one there
            mbarrier.init(queue_full.index(i), count=1)
            mbarrier.init(queue_empty.index(i), count=3)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
    bars = (k_full, k_empty, v_full, v_empty, q_full, do_full, row_empty, queue_full, queue_empty, queue)
    shape = (seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_tiles, group, left, right)
    scales = ((), qk_scale, cap_in)
    places = (all_m, m0, all_n, n0)
    FINISH: gl.constexpr = _to_sums
    gl.warp_specialize([
        (_consumer, (0, bufs, bars, dk_desc, dv_desc, shape, scales, places, FINISH,
                     D, M, K_SLOTS, V_SLOTS, PRELOAD, CAUSAL, False, EVEN_K, DYNAMIC, EARLY)),
        (_consumer, (1, bufs, bars, dk_desc, dv_desc, shape, scales, places, FINISH,
                     D, M, K_SLOTS, V_SLOTS, PRELOAD, CAUSAL, False, EVEN_K, DYNAMIC, EARLY)),
        (_dq, (bufs, bars, dq_desc, shape, places, D, M, K_SLOTS, CAUSAL, False, DYNAMIC, True)),
        (_producer, (bufs, bars, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
                     M, K_SLOTS, V_SLOTS, CAUSAL, False, DYNAMIC, False, True)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip
