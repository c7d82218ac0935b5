"""The `features` experiment: Based and Hedgehog, the linear attentions with feature maps of the paper, forward.

    hopper               ours, in Gluon: Based with its features in registers, the walk behind Hedgehog's map
    portable             ours, plain Triton
    hopper-fused,        with a window, not by flash_attention3: all of it in one kernel in Gluon, or its softmax and
    portable-fused       the sum of both parts in one of plain Triton
    torch                the same chunks as eager torch products (the reference, and the ruler of the check)
    fla-parallel         parallel_based of fla, which the paper compared Based with: quadratic in the length
    fla                  fused_chunk_based; for Hedgehog chunk_linear_attn on an eager map, as fla's users have it
    fla-fused            Hedgehog: fused_chunk_linear_attn on an eager map, as the paper's script called it

Based is without its norm, as ThunderKittens' kernel is. Hedgehog is without its sliding window where fla is beside it,
as in the paper's baseline. ThunderKittens' own kernel has one, of 65 to 128 tokens: "hedgehog-window" has 128, and no
peer.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gpu_accel.thunderkittens import features
from gpu_accel.workbench.experiment import Case, Settings, Workload

from . import judging
from .judging import DTYPES, randn
from .sequences import _implementation, hopper_refusal

# map, batch, heads, key_dim, value_dim: those of the paper's kernels
_SHAPES = [("based", 16, 16, 16, 64), ("hedgehog", 16, 16, 128, 128), ("hedgehog-window", 16, 16, 128, 128)]
_LENGTHS = (1024, 2048, 8192, 16384)
_COUNT = 64  # features of Hedgehog, and their negatives
_WINDOW = 128  # tokens, on a CPU 8
_BACKENDS = ("hopper", "portable")


def list_cases(settings: Settings) -> list[Case]:
    names = ("map", "batch", "heads", "key_dim", "value_dim")
    small = [("based", 1, 2, 8, 24), ("hedgehog", 1, 2, 24, 24), ("hedgehog-window", 1, 2, 24, 24)]
    shapes = _SHAPES if settings.on_gpu else small
    lengths = _LENGTHS[: 1 if settings.quick else None] if settings.on_gpu else (37,)
    return [
        dict(zip(names, shape, strict=True))
        | {"seqlen": seqlen, "pass": "forward", "dtype": settings.precision, "input": "normal"}
        for shape in shapes
        for seqlen in lengths
    ]  # fmt: skip


def _inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    batch, seqlen, heads, key_dim, value_dim = (
        int(case[n]) for n in ("batch", "seqlen", "heads", "key_dim", "value_dim")
    )
    dtype = DTYPES[str(case["dtype"])]
    made = [
        randn(batch, seqlen, heads, d, seed=8 * seed + n, device=device, dtype=dtype)
        for n, d in enumerate((key_dim, key_dim, value_dim))
    ]
    if case["map"] != "based":
        made += [
            (randn(heads, key_dim, _COUNT, seed=8 * seed + n, device=device) / key_dim**0.5).to(dtype) for n in (3, 4)
        ]
    return made


def _ours(case: Case, backend: str, fused: bool | None = None):
    if case["map"] == "based":
        return lambda q, k, v: features.fused_chunk_based(q, k, v, use_norm=False, backend=backend)
    window = None if case["map"] == "hedgehog" else _WINDOW if int(case["seqlen"]) > _WINDOW else 8
    return lambda q, k, v, a, b: features.hedgehog_attention(q, k, v, a, b, window=window, fused=fused, backend=backend)


def _fla(case: Case, kind: str):
    def based(q, k, v):
        from fla.ops.based import fused_chunk_based, parallel_based

        return (parallel_based if kind == "parallel" else fused_chunk_based)(q, k, v, use_norm=False)

    def hedgehog(q, k, v, a, b):
        from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn

        q, k = features.hedgehog_features(q, a), features.hedgehog_features(k, b)
        call = fused_chunk_linear_attn if kind == "fused" else chunk_linear_attn
        return call(q, k, v, scale=1.0, normalize=True)[0]

    return based if case["map"] == "based" else hedgehog


def build(case: Case, settings: Settings) -> Workload:
    make_inputs = functools.partial(_inputs, case, device=settings.device)
    eager = _ours(case, "reference")
    made = functools.partial(
        _implementation, truth=eager, ruler=eager, make_inputs=make_inputs, case=case, settings=settings, shared=(3, 4),
        known={},
    )  # fmt: skip
    why = judging.missing("fla", settings)
    other, note = ("parallel", "quadratic in the length") if case["map"] == "based" else ("fused", "")
    steps = int(case["batch"]) * int(case["seqlen"]) * int(case["heads"])
    key_dim, value_dim = int(case["key_dim"]), int(case["value_dim"])
    wide = 1 + key_dim + key_dim**2 if case["map"] == "based" else 2 * _COUNT
    no_hopper = hopper_refusal(settings, str(case["dtype"]))
    flops = 4.0 * wide * value_dim
    peers = [
        made("fla", "peer", _fla(case, "chunk"), why=why),
        made(f"fla-{other}", "peer", _fla(case, other), why=why, note=note or "as the paper's script called it"),
    ]
    if case["map"] == "hedgehog-window":
        flops += 2.0 * _WINDOW * (key_dim + value_dim)
        peers = []
    ours = [made(name, "ours", _ours(case, name), why=no_hopper if name == "hopper" else "") for name in _BACKENDS]
    if case["map"] == "hedgehog-window":
        for name in _BACKENDS:
            ours.append(made(f"{name}-fused", "ours", _ours(case, name, True), note="the window and both sums in one",
                             why=no_hopper if name == "hopper" else ""))  # fmt: skip
    return Workload(
        implementations=[
            *ours,
            made("torch", "reference", eager, note="chunks of 64 as eager products"),
            *peers,
        ],
        baselines=(*(peer.name for peer in peers), "torch"),
        flops=steps * flops,
        bytes_moved=steps * 2 * (key_dim + value_dim) * torch.empty(0, dtype=DTYPES[str(case["dtype"])]).itemsize,
    )
