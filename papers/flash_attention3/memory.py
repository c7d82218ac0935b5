"""The `memory` experiment: how much device memory attention takes beyond its inputs, and how that grows.

    peak_bytes         the allocator's peak during the call, minus what was allocated before it (inputs and, for the
                       backward pass, the output's gradient); outputs count
    growth_exponent    log2(peak at N / peak at N / 2): 1 is linear in the sequence length, 2 is quadratic

"backward" is a whole training step, forward then backward, because what forward keeps is part of the bill. Memory comes
from `torch.cuda.max_memory_allocated`; on a CPU there is no such account, so there the experiment only checks results.
"""

from __future__ import annotations

import math

import torch

from gpu_accel.workbench.experiment import Case, Implementation, Settings, Workload

from . import attention, cases
from .judging import Judge
from .peers import Contender, contenders, refusals

SEQLENS = (1024, 2048, 4096, 8192, 16384)
_CPU_SEQLENS = (96,)
_NAMES = ("hopper", "portable", "sdpa-flash", "sdpa-math")


def list_cases(settings: Settings) -> list[Case]:
    """One head size, batch 1, forward and backward, over sequence lengths (or the shapes asked for)."""
    if settings.shapes or settings.input == "smollm2":
        found = [cases.attention_cases(settings, direction=which) for which in ("forward", "backward")]
        return [case for some in found for case in some]
    lengths = SEQLENS if settings.on_gpu else _CPU_SEQLENS
    if settings.quick:
        lengths = lengths[:2]
    heads, head_dim = (16, 128) if settings.on_gpu else (1, 64)
    return [
        cases.make_case(
            {"batch": 1, "seqlen_q": n, "seqlen_k": n, "heads": heads, "head_dim": head_dim, "causal": False},
            settings,
            direction=which,
        )
        for which in ("forward", "backward")
        for n in lengths
    ]


def build(case: Case, settings: Settings) -> Workload:
    """Ours, torch's flash attention and the N x N math backend."""
    whole = attention.build_backward if case["pass"] == "backward" else attention.build_forward
    made = whole(case, settings)
    by_name = {contender.name: contender for contender in contenders(case, settings)}
    kept = [_with_memory(one, by_name[one.name], case, settings) for one in made.implementations if one.name in _NAMES]
    return Workload(implementations=kept, input_source=made.input_source)


def _with_memory(one: Implementation, contender: Contender, case: Case, settings: Settings) -> Implementation:
    def values(seed: int) -> dict[str, tuple[float, str]]:
        with refusals(contender):
            peak = peak_bytes(contender, case, settings.device, seed)
            half = {**case, "seqlen_q": int(case["seqlen_q"]) // 2, "seqlen_k": int(case["seqlen_k"]) // 2}
            before = peak_bytes(contender, half, settings.device, seed)
        return {"peak_bytes": (peak, "bytes"), "growth_exponent": (math.log2(peak / before), "1")}

    what = "one forward and backward pass" if case["pass"] == "backward" else "one forward pass"
    note = f"peak of torch's allocator during {what}, beyond the inputs; {one.note}" if settings.on_gpu else one.note
    return Implementation(
        name=one.name,
        role=one.role,
        unavailable=one.unavailable,
        check=one.check,
        values=values if settings.on_gpu and int(case["seqlen_q"]) > 1 else None,
        note=note,
    )


def peak_bytes(contender: Contender, case: Case, device: str, seed: int) -> float:
    """The allocator's peak during one call, beyond what the inputs hold."""
    judge = Judge(case, device)
    training = case["pass"] == "backward"
    qkv = judge.inputs(seed)
    do = judge.output_gradient(qkv, seed)
    q, k, v, do = contender.place(*qkv, do)
    del qkv
    leaves = [t.requires_grad_(training) for t in (q, k, v)]

    def call() -> object:
        if not training:
            with torch.no_grad():
                return contender.attend(*leaves)
        return torch.autograd.grad(contender.attend(*leaves), leaves, do)

    call()  # compiles, tunes and sets up workspaces that later calls share
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)
