"""Ring attention (arXiv 2310.01889) and its relatives: exact attention over a sequence that many GPUs hold in shards.

    from gpu_accel.ring_attention import make_layout, distributed_attention, choose_transport
    layout = make_layout("zigzag", seqlen=S, ranks=8)
    q, k, v = (layout.shard(x, rank) for x in (q, k, v))           # (batch, seqlen, heads, head_dim)
    o, lse = distributed_attention(q, k, v, layout=layout, transport=choose_transport(), causal=True)

Read `layouts.py`, `masks.py` and `step.py`, then `schedules/kv_ring.py`. Without GPUs or torchrun, `simulate.py` runs
all ranks in one process, and `plan.py` says before it runs what a choice will cost. `graphs.py` makes a CUDA graph of a
step, so that no GPU waits for a host.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "RingAttention": "api",
    "ring_attention_forward": "api",
    "ring_attention_backward": "api",
    "shard_sequence": "api",
    "block_shard": "api",
    "ring_communicate_kv": "api",
    "ring_send_recv": "api",
    "local_attention": "api",
    "accumulate_attention_outputs": "api",
    "distributed_attention_exact": "api",
    "global_accumulate": "api",
    "overlap_comm_compute": "api",
    "ring_flash_attn_func": "flash_attn_names",
    "ring_flash_attn_kvpacked_func": "flash_attn_names",
    "ring_flash_attn_qkvpacked_func": "flash_attn_names",
    "zigzag_ring_flash_attn_func": "flash_attn_names",
    "zigzag_ring_flash_attn_kvpacked_func": "flash_attn_names",
    "zigzag_ring_flash_attn_qkvpacked_func": "flash_attn_names",
    "zigzag_ring_flash_attn_varlen_func": "flash_attn_names",
    "zigzag_ring_flash_attn_varlen_kvpacked_func": "flash_attn_names",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func": "flash_attn_names",
    "stripe_flash_attn_func": "flash_attn_names",
    "stripe_flash_attn_kvpacked_func": "flash_attn_names",
    "stripe_flash_attn_qkvpacked_func": "flash_attn_names",
    "context_parallel": "models",
    "CapturedStep": "graphs",
    "capture_step": "graphs",
    "SymmetricTransport": "symmetric",
    "choose_transport": "symmetric",
    "LAYOUTS": "layouts",
    "Layout": "layouts",
    "make_layout": "layouts",
    "Mask": "masks",
    "Plan": "plan",
    "SCHEDULES": "schedules",
    "CommunicationError": "faults",
    "LocalTransport": "transport",
    "TorchTransport": "transport",
    "Transport": "transport",
    "distributed_attention": "attention",
    "explain": "explanation",
    "gather_sequence": "attention",
    "replay_rank": "replay",
    "simulate_attention": "simulate",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
