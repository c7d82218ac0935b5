"""The backward of hopper_backward_kernel.py with dQ in a warpgroup of its own, for full and causal steps without turns.

Consumers and dq are those of `flash_attention3/hopper_backward_apart.py`: read its head first, and that of
hopper_backward_kernel.py for where results go. Where a tile ends, the consumers' float32 sums leave through the buffers
of their dS and, at head_dim 128, of their half of K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpu_accel.flash_attention3.hopper_backward_apart import _consumer, _dq
from gpu_accel.flash_attention3.hopper_backward_device import KEYS, put_fragment, tile_at
from gpu_accel.flash_attention3.hopper_backward_producer import producer, tile_barriers, tile_buffers
from gpu_accel.gluon_compat import reinterpret

from .hopper_backward_kernel import send_halves


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
    q_bufs, do_bufs, k_bufs, v_bufs = tile_buffers(dtype, D, M, K_SLOTS, V_SLOTS)
    # two stages of each consumer's dS, the room of one fragment at head_dim 128 and of two at 64
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 2 * M], dtype)
    ds_bufs = gl.allocate_shared_memory(dtype, [2, KEYS, 2 * M], DS_LAYOUT)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [4, M], stat_desc.layout)
    bars, _ = tile_barriers(K_SLOTS, V_SLOTS, 3, DYNAMIC, False, True)
    dq_bufs = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq_desc.layout)
    bufs = (q_bufs, do_bufs, k_bufs, v_bufs, ds_bufs, stat_bufs, dq_bufs)
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
        (producer, (bufs, bars, None, q_desc, do_desc, k_desc, v_desc, stat_desc, counter, shape, places,
                    M, K_SLOTS, V_SLOTS, CAUSAL, False, DYNAMIC, True)),
    ], [4, 4, 1], [208, 72, 24])  # fmt: skip
