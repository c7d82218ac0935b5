"""The `attention` experiment: attention at the lengths of ThunderKittens' chart, multiples of 192.

    hopper          ours, of the paper flash_attention3 (Gluon)
    sdpa-cudnn      torch's scaled_dot_product_attention by cuDNN
    sdpa-flash      the same by FlashAttention-2

ThunderKittens' own kernels and FlashAttention-3's are CUDA sources that are not built here. Judged is one head of one
sequence: heads do not depend on each other, and the products of all in float64 would not fit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_accel.flash_attention3 import flash_attn_func
from gpu_accel.hardware.work import attention_bytes, attention_flops
from gpu_accel.workbench.experiment import Case, Implementation, Settings, Workload

from . import judging
from .judging import DTYPES, randn
from .sequences import PASSES, hopper_refusal

_LENGTHS = (768, 1536, 3072, 6144, 12288)
_BATCH, _HEADS, _HEAD_DIM = 16, 16, 128


def list_cases(settings: Settings) -> list[Case]:
    lengths = _LENGTHS[: 2 if settings.quick else None] if settings.on_gpu else (48,)
    batch, heads, head_dim = (_BATCH, _HEADS, _HEAD_DIM) if settings.on_gpu else (1, 2, 16)
    return [
        {"batch": batch, "seqlen": n, "heads": heads, "head_dim": head_dim, "causal": causal, "pass": pass_,
         "dtype": settings.precision, "input": "normal"}
        for pass_ in PASSES
        for causal in (False, True)
        for n in lengths
    ]  # fmt: skip


def _inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    shape = [int(case[n]) for n in ("batch", "seqlen", "heads", "head_dim")]
    dtype = DTYPES[str(case["dtype"])]
    return [randn(*shape, seed=8 * seed + n, device=device, dtype=dtype) for n in range(3)]


def _eager(causal: bool):
    def call(q, k, v):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        if causal:
            steps = torch.arange(q.shape[1], device=q.device)
            scores = scores.masked_fill(steps[:, None] < steps, float("-inf"))
        return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)

    return call


def _ours(causal: bool, backend: str):
    return lambda q, k, v: flash_attn_func(q, k, v, causal=causal, backend=backend)


def _sdpa(causal: bool, kind: SDPBackend):
    def call(q, k, v):
        with sdpa_kernel(kind):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def build(case: Case, settings: Settings) -> Workload:
    causal, backward = bool(case["causal"]), case["pass"] == "backward"
    make_inputs = functools.partial(_inputs, case, device=settings.device)
    eager = _eager(causal)

    def made(name: str, role: str, function, why: str = ""):
        def check(seed: int):
            return judging.judge(
                function, eager, eager, make_inputs(seed), seed, backward, settings.on_gpu,
                part=lambda x: x[:1, :, :1], factor=judging.RIVALS_FACTOR if role == "peer" else judging.FACTOR,
            )  # fmt: skip

        def make(seed: int):
            return judging.timed(function, make_inputs(seed), seed, backward)

        return Implementation(name=name, role=role, check=check, make=make, unavailable=why)

    elsewhere = "" if settings.on_gpu else "needs a GPU"
    shape = {n: int(case[m]) for n, m in (("batch", "batch"), ("seqlen_q", "seqlen"), ("seqlen_k", "seqlen"),
                                          ("heads", "heads"), ("head_dim", "head_dim"))}  # fmt: skip
    return Workload(
        implementations=[
            made("hopper", "ours", _ours(causal, "hopper"), hopper_refusal(settings, str(case["dtype"]))),
            made("portable", "ours", _ours(causal, "portable")),
            made("sdpa-cudnn", "peer", _sdpa(causal, SDPBackend.CUDNN_ATTENTION), elsewhere),
            made("sdpa-flash", "peer", _sdpa(causal, SDPBackend.FLASH_ATTENTION), elsewhere),
        ],
        baselines=("sdpa-cudnn", "sdpa-flash"),
        flops=attention_flops(**shape, causal=causal, which=str(case["pass"]), convention="paper"),
        bytes_moved=attention_bytes(
            **shape, heads_kv=int(case["heads"]), dtype=str(case["dtype"]), which=str(case["pass"])
        ),
    )
