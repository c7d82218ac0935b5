"""The `replay` experiment: one rank of 2 to 512, on one GPU, with all its steps and no network.

    gpu-accel run ring replay

The rate that a rank keeps, next to that of one GPU with a long sequence, is what the computation of a ring costs by
itself: short blocks, merges, launches. With zigzag shards all ranks have the same work, so any rank will do.

The check gives a rank of as many (at most eight) short shards the true keys, and compares o with float64 attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.replay import replay_rank
from gpu_accel.testing import make_qkv, relative_error, yardstick_attention
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

RANKS = (1, 2, 4, 8, 64, 512)
FACTOR, SHORT, MOST = 2.0, 256, 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def list_cases(settings: Settings) -> list[Case]:
    """8k tokens a GPU, 32 heads, 32 or 8 key heads."""
    rows, heads, kinds, dim = (8192, 32, (32, 8), 128) if settings.on_gpu else (64, 4, (2,), 16)
    ranks = RANKS[2:3] if settings.quick else RANKS if settings.on_gpu else RANKS[:4]
    dtype = settings.precision if settings.precision in _DTYPES else "bf16"
    return [
        {
            "gpus": n, "batch": 1, "seqlen": n * rows, "heads": heads, "heads_kv": kv, "head_dim": dim, "causal": True,
            "dtype": dtype, "input": settings.input,
        }
        for kv in kinds
        for n in ranks
    ]  # fmt: skip


def build(case: Case, settings: Settings) -> Workload:
    """The ring alone; its work is the rank's share of the whole attention."""
    ring = Implementation(
        name="kv_ring",
        role="ours",
        check=lambda seed: _check(case, settings, seed),
        make=lambda seed: _call(case, settings, seed),
        note="one rank's steps on its own keys, zigzag shards, no network",
    )
    n, length = int(case["gpus"]), int(case["seqlen"])
    flops = 2.0 * length**2 * int(case["heads"]) * int(case["head_dim"]) / n
    return Workload(implementations=[ring], flops=flops)


def _shards(case: Case, settings: Settings, *, length: int, seed: int):
    return make_qkv(
        batch=1, seqlen_q=length, heads=int(case["heads"]), heads_kv=int(case["heads_kv"]),
        head_dim=int(case["head_dim"]), dtype=_DTYPES[str(case["dtype"])], device=settings.device, seed=seed,
    )  # fmt: skip


def _call(case: Case, settings: Settings, seed: int) -> Callable[[], object]:
    n, length = int(case["gpus"]), int(case["seqlen"])
    q, k, v = _shards(case, settings, length=length // n, seed=seed)
    layout, rank = make_layout("zigzag", seqlen=length, ranks=n), n // 2
    return lambda: replay_rank(q, k, v, layout=layout, rank=rank, causal=True)


def _check(case: Case, settings: Settings, seed: int) -> Check:
    n = min(int(case["gpus"]), MOST)
    length = n * min(SHORT, int(case["seqlen"]) // int(case["gpus"]))
    whole = _shards(case, settings, length=length, seed=seed)
    layout, rank = make_layout("zigzag", seqlen=length, ranks=n), n // 2
    shards = [[layout.shard(x, r) for x in whole] for r in range(n)]
    o, _ = replay_rank(
        *shards[rank], layout=layout, rank=rank, keys=lambda r: (shards[r][1], shards[r][2]), causal=True
    )
    exact = layout.shard(attention_truth(*whole, causal=True)[0], rank)
    ruler = layout.shard(yardstick_attention(*whole, causal=True)[0], rank)
    bound = FACTOR * relative_error(ruler, exact)
    return Check(
        relative_error(o, exact), bound, "relative error of o of one rank, with the true keys of at most eight"
    )
