"""The `ablation` experiment: the Hopper forward kernel with its ideas switched off one by one (paper, table 2).

    hopper                the kernel as tuned
    no-ping-pong          warpgroups take no turns: nothing keeps one's softmax under the other's products
    no-pipelining         inside a warpgroup, P V, then S of the next block, then its softmax, each after the other
    no-overlap            neither of these two: what warp specialisation, WGMMA and TMA give alone
    no-specialization     no producer warp: the warps that compute issue the loads; that has no ping-pong either
    sdpa-flash, sdpa-cudnn   for scale

Every row is one kernel source with one compile-time switch changed; what follows from a switch changes with it (without
specialisation there is no queue of tiles).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpu_accel.workbench.experiment import Case, Settings, Workload

from . import cases
from .attention import forward_implementation, workload
from .judging import Judge
from .peers import Contender, contenders, problem_of

SWITCHES: dict[str, dict[str, bool]] = {
    "hopper": {},
    "no-ping-pong": {"ping_pong": False},
    "no-pipelining": {"pipelined": False},
    "no-overlap": {"ping_pong": False, "pipelined": False},
    "no-specialization": {"specialized": False, "ping_pong": False, "dynamic": False},
}
PEERS = ("sdpa-flash", "sdpa-cudnn")
TABLE_2 = {"batch": 4, "seqlen_q": 8448, "seqlen_k": 8448, "heads": 16, "head_dim": 128, "causal": False}


def list_cases(settings: Settings) -> list[Case]:
    """Table 2's shape, and 8192 keys of 16k tokens with and without a causal mask; the shapes asked for instead."""
    if settings.shapes or settings.input == "smollm2":
        return cases.attention_cases(settings, direction="forward")
    if not settings.on_gpu:  # the kernel is for Hopper only: what is left is torch's own, on one small shape
        return cases.attention_cases(settings, direction="forward")[:1]
    grid = [TABLE_2]
    if not settings.quick:
        grid += [cases.paper_shape(8192, head_dim=128, causal=causal) for causal in (False, True)]
    return [cases.make_case(shape, settings) for shape in grid]


def build(case: Case, settings: Settings) -> Workload:
    """The variants that the case has, and torch's attention."""
    judge = Judge(case, settings.device)
    peers = [c for c in contenders(case, settings) if c.name in PEERS]
    return workload(
        case, [forward_implementation(c, judge) for c in (*(_variant(n, case, settings) for n in SWITCHES), *peers)]
    )


def _variant(name: str, case: Case, settings: Settings) -> Contender:
    from gpu_accel.flash_attention3 import hopper

    causal, keys, head_dim = bool(case["causal"]), int(case["seqlen_k"]), int(case["head_dim"])
    unavailable = hopper.refuse(problem_of(case, settings.device)) or ""
    switches = SWITCHES[name]
    tuned = None
    if head_dim <= 256:
        tuned = hopper.forward_config(head_dim, causal=causal and case["seqlen_q"] != 1, seqlen_k=keys)
        if not tuned.ping_pong and name in ("no-ping-pong", "no-overlap"):
            unavailable = unavailable or "the tuned configuration of this shape has no ping-pong to switch off"
        if (tuned.o_chunks > 1 or tuned.consumers > 2) and name == "no-specialization":
            unavailable = unavailable or "without specialisation tiles have 128 rows and o leaves as a whole"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert tuned is not None
        scale, right = head_dim**-0.5, 0 if causal else -1
        o, _ = hopper.forward(q, k, v, softmax_scale=scale, window_right=right, config=replace(tuned, **switches))
        return o

    said = ", ".join(f"{switch} off" for switch in switches) or "as tuned"
    return Contender(
        name=name,
        role="ours",
        layout="bshd",
        attend=torch.no_grad()(attend),
        unavailable=unavailable,
        note=f"the Hopper forward kernel, {said}; layout (batch, seqlen, heads, head_dim)",
    )
