"""Compile the tuned kernels for a GPU that is not there and print one JSON object a kernel. Run by test_compile.py.

The arguments name sets of one GPU: "flagship" (what is asserted to be free of spills) and "large" (head_dim 256,
packed, backward) for sm_90, "ampere" for sm_80, "blackwell" (a few) for sm_100.
"""

from __future__ import annotations

import json
import sys

import torch
import triton

from gpu_accel.flash_attention3 import config, launch, portable_backward, portable_forward
from gpu_accel.testing.compile_only import Compiled, compile_only, use_target

BF16 = torch.bfloat16


def tuned(pass_: str, head_dim: int, causal: bool, capability: int) -> config.Config:
    name = {90: "sm90"}.get(capability, "default")
    return config.table(name)[pass_, config.bucket(head_dim, head_dim), causal, 2]


compiled: list[Compiled] = []


def compile_calls(label: str, capability: int, call) -> None:
    def hook(kernel, arguments, options):
        if kernel.__name__ == "attention_delta":
            return
        name = f"{label}-{kernel.__name__}"
        compiled.append(compile_only(kernel, arguments, options, name=name, capability=capability))

    use_target(capability)
    with launch.instead_of_launching(hook):
        call()


def forward(head_dim: int, causal: bool, *, capability=90, path="tma", varlen=False, head_dim_v=None, seqlen=1024):
    head_dim_v = head_dim_v or head_dim
    q = torch.empty(1, seqlen, 4, head_dim, dtype=BF16)
    v = torch.empty(1, seqlen, 4, head_dim_v, dtype=BF16)
    packed = {}
    if varlen:
        q, v = q[0], v[0]
        packed = {n: torch.zeros(3, dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    label = f"d{head_dim}{'-causal' if causal else ''}{'-varlen' if varlen else ''}-{path}"
    compile_calls(
        label,
        capability,
        lambda: portable_forward.forward(
            q, q, v, softmax_scale=0.1, window_right=0 if causal else -1, path=path,
            config=tuned("forward", max(head_dim, head_dim_v), causal, capability), **packed,
        ),
    )  # fmt: skip


def backward(head_dim: int, causal: bool, *, capability=90, path="tma"):
    q = torch.empty(1, 1024, 4, head_dim, dtype=BF16)
    compile_calls(
        f"d{head_dim}{'-causal' if causal else ''}-{path}",
        capability,
        lambda: portable_backward.backward(
            q, q, q, q, q, torch.empty(1, 4, 1024), softmax_scale=0.1, window_right=0 if causal else -1, path=path,
            config_dkdv=tuned("backward_dkdv", head_dim, causal, capability),
            config_dq=tuned("backward_dq", head_dim, causal, capability),
        ),
    )  # fmt: skip


def compile_set(which: str) -> list[Compiled]:
    compiled.clear()
    if which == "flagship":
        for d in (64, 128):
            for c in (False, True):
                forward(d, c)
    elif which == "large":
        forward(256, True)
        forward(192, True, head_dim_v=128)
        forward(128, True, varlen=True)
        forward(128, True, path="pointer")
        backward(128, True)
    elif which == "ampere":
        forward(128, True, capability=80, path="pointer")
        backward(64, False, capability=80, path="pointer")
    elif which == "blackwell":
        forward(128, True, capability=100)
    else:
        raise SystemExit(f"unknown set {which!r}")
    return compiled.copy()


if __name__ == "__main__":
    for which, found in [(which, compile_set(which)) for which in sys.argv[1:]]:
        for got in found:
            row = {"set": which, "name": got.name, "triton": triton.__version__, "registers": got.registers,
                   "spills": got.spills, "shared": got.shared, "wgmma": got.instructions["HGMMA"],
                   "tma": got.instructions["UTMALDG"], "warnings": got.warnings}  # fmt: skip
            print(json.dumps(row), flush=True)
