"""Compile the Gluon kernels for sm_90 (one set for sm_100) without a GPU, one line of JSON a kernel.

Run by test_hopper_compile.py.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace

import torch
import triton

from gpu_accel.flash_attention3 import blackwell, hopper, hopper_backward, launch, modifier
from gpu_accel.flash_attention3.features import Features
from gpu_accel.testing.compile_only import Compiled, compile_only, use_target
from gpu_accel.testing.modifiers import relative, relative_grad, same_document

CASES = {
    "flagship": [(64, {}), (128, {}), (256, {})],
    "features": [
        (128, {"window_right": 0}),
        (64, {"window_right": 0}),
        (256, {"window_right": 0}),
        (128, {"window_left": 64, "window_right": 0}),
        (128, {"softcap": 20.0, "modified": True}),
    ],
    "ablation": [
        (128, {"config": {"pipelined": False, "ping_pong": False}}),
        (128, {"config": {"specialized": False, "ping_pong": False, "dynamic": False}}),
    ],
    "packed": [
        (128, {"packed": True, "window_right": 0}),
        (256, {"packed": True}),
        (192, {"head_dim_v": 128, "window_right": 0}),
        (64, {"head_dim_v": 256, "packed": True}),
    ],
    "blackwell": [(128, {"window_right": 0})],
    "blackwell-more": [(64, {"window_left": 40}), (256, {"softcap": 9.0})],
    "backward": [(64, {}), (128, {"window_right": 0}), (256, {"window_right": 0})],
    "more-backward": [(64, {"modified": True}), (256, {"packed": True})],
}


def everything() -> Features:
    """A block mask, both modifiers with captured tensors, ALiBi and the largest scores at once."""
    counts, indices = torch.ones(1, 1, 64, dtype=torch.int32), torch.zeros(1, 1, 64, 64, dtype=torch.int32)
    functions = {"score_mod": relative, "score_mod_grad": relative_grad, "mask_mod": same_document}
    return Features(
        **{name: modifier(function).key for name, function in functions.items()},
        aux_tensors=(torch.zeros(4), torch.zeros(8192, dtype=torch.int32)), alibi_slopes=torch.zeros(4),
        block_lists=(counts, indices) * 4, block_size=(128, 128), return_max_logits=True,
    )  # fmt: skip


def loops(sass: str, products: int) -> tuple[list[int], list[int]]:
    """Of each loop with just so many matrix instructions: loads and stores of spilled registers; waits on barriers."""
    at: dict[str, int] = {}  # label -> number of the instruction behind it
    found: list[tuple[str, str]] = []
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(.*)", line)
        if label:
            at[label[1]] = len(found)
        elif instruction:
            found.append((instruction[1], instruction[2]))
    spills, meetings = [], []
    for end, (name, operands) in enumerate(found):
        target = re.search(r"`\((\.L_\w+)\)", operands) if name == "BRA" else None
        body = found[at.get(target[1], end) : end] if target else []
        names = [n for n, _ in body]
        if names.count("HGMMA") == products:
            spills.append(names.count("LDL") + names.count("STL"))
            meetings.append(sum(n == "BAR" and x.startswith(".SYNC") for n, x in body))
    return spills, meetings


def row(which: str, kernel: str, got: Compiled, products: int) -> dict:
    spilled, meetings = loops(got.sass, products)
    return {
        "set": which,
        "name": got.name,
        "kernel": kernel,
        "triton": triton.__version__,
        "registers": got.registers,
        "spills": got.spills,
        "shared": got.shared,
        "wgmma": got.instructions["HGMMA"],
        "tcgen05": got.instructions["UTCHMMA"],
        "tma": got.instructions["UTMALDG"],
        "loop_spills": spilled,
        "loop_meetings": meetings,
        "repacking": got.instructions["PRMT"],
        "warnings": got.warnings,
    }


def compile_set(which: str) -> list[tuple[str, str, Compiled, int]]:
    capability = 100 if which.startswith("blackwell") else 90
    use_target(capability)
    found = []
    for head_dim, options in CASES[which]:
        label = "-".join([f"d{head_dim}", *(f"{n}{x}" for n, x in options.items())])
        options = dict(options)
        if options.pop("modified", False):
            options["features"] = everything()

        def hook(kernel, arguments, constants, label=label, head_dim=head_dim):
            if kernel.__name__.startswith(("prepare", "dq_finish", "fill_")):  # plain Triton
                return
            got = compile_only(kernel, arguments, constants, name=label, capability=capability)
            # a step: S of one block and P V of another
            found.append((which, kernel.__name__, got, (head_dim + constants.get("BLOCK_N", 0)) // 16))

        q = torch.empty(1, 8192, 4, head_dim, dtype=torch.bfloat16)  # long: three consumers at head_dim 64
        with launch.instead_of_launching(hook):
            if capability == 100:
                blackwell.forward(q, q, q, softmax_scale=0.1, **options)
            elif which.endswith("backward"):
                lse = torch.empty(1, 4, q.shape[1])
                if options.pop("packed", False):
                    q, lse = q[0], lse[0]
                    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(3, dtype=torch.int32))
                hopper_backward.backward(q, q, q, q, q, lse, softmax_scale=0.1, **options)
            else:
                packed = options.pop("packed", False)
                v = torch.empty(*q.shape[:-1], options.pop("head_dim_v", head_dim), dtype=q.dtype)
                changes = options.pop("config", None)
                if changes:
                    causal = options.get("window_right", -1) >= 0
                    tuned = hopper.forward_config(head_dim, causal=causal, seqlen_k=q.shape[1])
                    options["config"] = replace(tuned, **changes)
                offsets = torch.zeros(3, dtype=torch.int32)
                if packed:
                    q, v = q[0], v[0]
                    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets)
                hopper.forward(q, q, v, softmax_scale=0.1, **options)
    return found


if __name__ == "__main__":
    # read when everything is compiled, so that it is disassembled at once
    for one in [one for which in sys.argv[1:] for one in compile_set(which)]:
        print(json.dumps(row(*one)), flush=True)
