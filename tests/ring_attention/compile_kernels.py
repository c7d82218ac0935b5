"""Compile the Gluon kernels of ring attention for sm_90 without a GPU, a line of JSON a kernel. See test_compile.py."""

from __future__ import annotations

import json
import re

import torch
import triton

from gpu_accel.flash_attention3 import launch
from gpu_accel.ring_attention import hopper_backward, hopper_merge, wire_kernels
from gpu_accel.ring_attention.masks import Piece
from gpu_accel.testing.compile_only import Compiled, compile_only, use_target

compiled: list[Compiled] = []  # read last, so that all of it is disassembled at once


def hook(kernel, arguments: tuple, options: dict) -> None:
    if kernel.__name__ == "statistics_kernel":  # plain Triton
        return
    compiled.append(compile_only(kernel, arguments, options, name=kernel.__name__, capability=90))


def unwritten(ptx: str) -> list[str]:
    """Halves of words that are read and never written. ptxas (of Triton 3.6) took bytes of the other half of such a
    word from a register that has nothing to do with it."""
    body = ptx[ptx.index(".entry") :]
    written = set()
    for line in body.splitlines():
        found = re.match(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^,]*),", line)
        if found and not re.match(r"\s*(?:@!?%p\d+\s+)?st\.", line):
            written |= set(re.findall(r"%rs\d+", found[1]))
    return sorted(set(re.findall(r"%rs\d+", body)) - written)


def main() -> None:
    use_target(90)
    q = torch.empty(1, 1024, 4, 128, dtype=torch.bfloat16)
    o, lse = torch.empty(q.shape), torch.empty(1, 4, 1024)
    with launch.instead_of_launching(hook):
        hopper_merge.forward_merge(q, q, q, o, lse, q, row=0, first=False, done=(0, 512), softmax_scale=0.1)
        for turns in (False, True):
            work = hopper_backward.Gradients(q, q, lse, lse, softmax_scale=0.1, softcap=0.0, deterministic=turns)
            work.add(Piece(0, 1024, 0, 1024), q, q, torch.empty(hopper_backward.sum_size(q)))
        q, coded = torch.empty(1, 64, 32, 128).bfloat16(), torch.empty(1, 64, 32, 132, dtype=torch.uint8)
        wire_kernels.encode_into(q, torch.float8_e4m3fn, coded)
        wire_kernels.decode_into(coded, torch.float8_e4m3fn, q)
    for got in compiled:
        row = {"kernel": got.name, "triton": triton.__version__, "spills": got.spills, "shared": got.shared}
        row["unwritten"] = unwritten(got.ptx) if "code_kernel" in got.name else []
        print(json.dumps(row | {"warnings": got.warnings, "wgmma": got.instructions["HGMMA"]}), flush=True)


if __name__ == "__main__":
    main()
