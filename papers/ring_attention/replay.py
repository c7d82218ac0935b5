"""The `replay` experiment: one rank of 1 to 512, on one GPU, with all its steps and no network.

    gpu-accel run ring replay

The rate that a rank keeps, next to that of one GPU with a long sequence, is what the computation of a ring costs by
itself: short blocks, merges, launches. With zigzag shards all ranks have the same work, so any rank will do.

Next to it, the same from a CUDA graph, where nobody issues anything and short shards are in lanes; and with keys that
arrive in 8 bits: what encoding and decoding take of what shorter messages save.

The check gives a rank of as many (at most eight) short shards the true keys, and compares o (and dq) with float64
attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import lanes
from gpu_accel.ring_attention.graphs import capture_step
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.replay import Replay
from gpu_accel.testing import make_qkv, random_like, relative_error, yardstick_attention, yardstick_attention_backward
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from .arrival import WIRE, arrived

RANKS = (1, 2, 4, 8, 64, 512)
FACTOR, SHORT, MOST = 2.0, 256, 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def list_cases(settings: Settings) -> list[Case]:
    """8k tokens a GPU, 32 heads, 32 or 8 key heads: the backward alone of a rank of 2, 4 and 8, then forward; then both
    passes, also of 16k and 32k, on one to eight."""
    rows = _rows(settings)
    heads, kinds, dim = (32, (32, 8), 128) if settings.on_gpu else (4, (2,), 16)
    ranks = RANKS[2:3] if settings.quick else RANKS if settings.on_gpu else RANKS[:4]
    dtype = settings.precision if settings.precision in _DTYPES else "bf16"
    wanted = [(n, kv, rows, "forward") for kv in kinds for n in ranks]
    if not settings.quick:
        wanted = [(n, kv, rows, "backward") for kv in kinds for n in (2, 4, 8)] + wanted
        longer = (rows, 2 * rows, 4 * rows) if settings.on_gpu else (rows,)
        wanted += [
            (n, kinds[0], c, d)
            for c in longer
            for n in (1, 2, 4, 8)[: 4 if c == rows else 3]
            for d in ("both", "forward")
        ]
    return [
        {
            "gpus": n, "batch": 1, "seqlen": n * c, "heads": heads, "heads_kv": kv, "head_dim": dim, "causal": True,
            "pass": d, "dtype": dtype, "input": settings.input,
        }
        for n, kv, c, d in dict.fromkeys(wanted)
    ]  # fmt: skip


def _rows(settings: Settings) -> int:
    """The fewest tokens a GPU."""
    return 8192 if settings.on_gpu else 64


def build(case: Case, settings: Settings) -> Workload:
    """The ring, and with several ranks and the shortest blocks the ring from a CUDA graph, and whose keys arrive in 8
    bits; the work is the rank's share of the whole attention."""
    n, length = int(case["gpus"]), int(case["seqlen"])

    def of(name: str, note: str, wire: torch.dtype | None = None, graph: bool = False) -> Implementation:
        return Implementation(
            name=name,
            role="ours",
            unavailable="a CUDA graph needs a GPU" if graph and not settings.on_gpu else "",
            check=lambda seed: _check(case, settings, seed, wire, graph),
            make=lambda seed: _call(case, settings, seed, wire, graph),
            note=f"one rank's steps on its own keys, zigzag shards, no network{note}",
        )

    rings = [of("kv_ring", "")]
    if case["pass"] != "backward" and 1 < n <= MOST and length // n == _rows(settings):
        rings.append(of("kv_ring-graph", "; from a CUDA graph", graph=True))
        rings.append(of("kv_ring-fp8", "; keys encoded and decoded as float8_e4m3fn", WIRE))
    flops = 2.0 * length**2 * int(case["heads"]) * int(case["head_dim"]) / n
    flops *= {"forward": 1.0, "backward": 2.5, "both": 3.5}[str(case["pass"])]
    return Workload(implementations=rings, baselines=["kv_ring"], flops=flops)


def _shards(case: Case, settings: Settings, *, length: int, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of o."""
    qkv = make_qkv(
        batch=1, seqlen_q=length, heads=int(case["heads"]), heads_kv=int(case["heads_kv"]),
        head_dim=int(case["head_dim"]), dtype=_DTYPES[str(case["dtype"])], device=settings.device, seed=seed,
    )  # fmt: skip
    return [*qkv, random_like(qkv.q, seed=seed + 1_000_003)]


def _call(
    case: Case, settings: Settings, seed: int, wire: torch.dtype | None, graph: bool = False
) -> Callable[[], object]:
    n, length = int(case["gpus"]), int(case["seqlen"])
    *qkv, do = _shards(case, settings, length=length // n, seed=seed)
    layout = make_layout("zigzag", seqlen=length, ranks=n)
    replay = Replay(*qkv, layout=layout, rank=n // 2, causal=True, wire=wire)
    if graph:
        return capture_step(functools.partial(_passes, replay, do, case))
    if case["pass"] != "backward":
        return lambda: _passes(replay, do, case)
    o, lse = replay.forward()
    return lambda: replay.backward(do, o, lse)


def _passes(replay: Replay, do: Tensor, case: Case) -> list[Tensor]:
    """o, and with backward dq."""
    o, lse = replay.forward()
    return [o, replay.backward(do, o, lse)] if case["pass"] != "forward" else [o]


def _check(case: Case, settings: Settings, seed: int, wire: torch.dtype | None, graph: bool = False) -> Check:
    n = min(int(case["gpus"]), MOST)
    length = n * min(SHORT, int(case["seqlen"]) // int(case["gpus"]))
    *qkv, do = whole = _shards(case, settings, length=length, seed=seed)
    layout, rank = make_layout("zigzag", seqlen=length, ranks=n), n // 2
    shards = [[layout.shard(x, r) for x in whole] for r in range(n)]
    replay = Replay(
        *shards[rank][:3], layout=layout, rank=rank, keys=lambda r: (shards[r][1], shards[r][2]), causal=True, wire=wire
    )
    rows = int(case["batch"]) * int(case["heads"]) * int(case["seqlen"]) // int(case["gpus"])
    with lanes.in_a_graph(graph):
        timed_in_lanes = settings.on_gpu and lanes.long_enough(rows, int(case["gpus"]), do.device)
    with lanes.of_any_length(timed_in_lanes):
        run = functools.partial(_passes, replay, shards[rank][3], case)
        found = capture_step(run)() if graph else run()
    if wire is not None:  # the truth is that of the keys which arrive
        qkv = [qkv[0], *(arrived(x, layout, rank, wire) for x in qkv[1:])]
    exact = [attention_truth(*qkv, causal=True)[0], attention_truth_backward(do, *qkv, causal=True)[0]]
    ruler = [yardstick_attention(*qkv, causal=True)[0], yardstick_attention_backward(do, *qkv, causal=True)[0]]
    exact, ruler = ([layout.shard(x, rank) for x in part] for part in (exact, ruler))
    errors = zip(found, exact, ruler, strict=False)
    worst = max(relative_error(x, e) / (FACTOR * relative_error(r, e)) for x, e, r in errors)
    what = "relative error of o (and dq) of one rank, with the true keys of at most eight, in units of its bound"
    return Check(worst, 1.0, what)
