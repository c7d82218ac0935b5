"""Compile the plain-Triton kernels with features for sm_90 and print one JSON object a kernel. Run by test_compile.py.

The first argument names the set, of which there is one: "features".
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from gpu_accel.flash_attention3 import config, launch, modifier, portable_backward, portable_forward
from gpu_accel.flash_attention3.features import Features
from gpu_accel.testing.compile_only import Compiled, compile_only, use_target
from gpu_accel.testing.modifiers import relative, relative_grad, same_document

BF16, SQ, SK, HEADS, D = torch.bfloat16, 1000, 1000, 4, 64


def block_lists() -> tuple[torch.Tensor, ...]:
    counts, indices = torch.ones(1, 1, 8, dtype=torch.int32), torch.zeros(1, 1, 8, 8, dtype=torch.int32)
    return (counts, indices) * 4


def cases() -> dict[str, Features]:
    slopes, bias, document = torch.zeros(2, HEADS), torch.zeros(HEADS), torch.zeros(SK, dtype=torch.int32)
    score = {"score_mod": modifier(relative).key, "score_mod_grad": modifier(relative_grad).key}
    mask = {"mask_mod": modifier(same_document).key, "aux_tensors": (bias, document)}
    return {
        "sinks": Features(sinks=bias, return_max_logits=True),
        "alibi": Features(alibi_slopes=slopes),
        "score": Features(**score, aux_tensors=(bias, document)),
        "mask": Features(**mask),
        "blocks": Features(**mask, block_lists=block_lists(), block_size=(128, 128)),
        "everything": Features(**score, **mask, sinks=bias, alibi_slopes=slopes),
    }


def tuned(pass_: str, features: Features) -> config.Config:
    return config.within_blocks(config.table("sm90")[pass_, config.bucket(D, D), False, 2], *features.block_size)


compiled: list[Compiled] = []  # read last, so that all of it is disassembled at once


def compile_case(name: str, features: Features, *, varlen: bool = False) -> None:
    def hook(kernel, arguments, options):
        if kernel.__name__ == "attention_delta":
            return
        compiled.append(compile_only(kernel, arguments, options, name=f"{name}-{kernel.__name__}", capability=90))

    q, k = torch.empty(2, SQ, HEADS, D, dtype=BF16), torch.empty(2, SK, 2, D, dtype=BF16)
    lse = torch.zeros(2, HEADS, SQ)
    packed = {}
    if varlen:
        q, k, lse = q.flatten(0, 1), k.flatten(0, 1), torch.zeros(HEADS, 2 * SQ)
        packed = {n: torch.zeros(3, dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    call = {"softmax_scale": 0.1, "features": features, **packed}
    with launch.instead_of_launching(hook):
        portable_forward.forward(q, k, k, config=tuned("forward", features), path="tma", **call)
        portable_backward.backward(
            q, q, k, k, q, lse, path="tma", config_dkdv=tuned("backward_dkdv", features),
            config_dq=tuned("backward_dq", features), **call,
        )  # fmt: skip


if __name__ == "__main__":
    which = sys.argv[1]
    use_target(90)
    if which == "features":
        for case, asked in cases().items():
            compile_case(case, asked)
        compile_case("packed", cases()["everything"], varlen=True)
    else:
        raise SystemExit(f"unknown set {which!r}")
    for got in compiled:
        row = {"name": got.name, "triton": triton.__version__, "registers": got.registers, "spills": got.spills,
               "shared": got.shared, "wgmma": got.instructions["HGMMA"], "tma": got.instructions["UTMALDG"],
               "warnings": got.warnings}  # fmt: skip
        print(json.dumps(row), flush=True)
