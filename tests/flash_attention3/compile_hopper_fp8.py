"""Compile the Hopper FP8 forward for sm_90 without a GPU, a line of JSON a kernel (test_hopper_fp8_compile.py)."""

from __future__ import annotations

import json
import sys

import torch
import triton

from gpu_accel.flash_attention3 import hopper_fp8, launch
from gpu_accel.testing.compile_only import compile_only, use_target
from gpu_accel.testing.descriptors import descriptors_of_two_origins

CASES = {
    "d128": (128, {}),
    "d64": (64, {}),
    "d128-causal": (128, {"window_right": 0}),
    "d128-window-softcap": (128, {"window_left": 64, "window_right": 0, "softcap": 20.0}),
    "d256": (256, {}),
    "d128-e5m2": (128, {"dtype": torch.float8_e5m2}),
}


def main(names: list[str]) -> None:
    use_target(90)
    compiled = []
    for label in names or CASES:
        head_dim, options = CASES[label]

        def hook(kernel, arguments, constants, label=label):
            compiled.append(compile_only(kernel, arguments, constants, name=label, capability=90))

        options = dict(options)
        dtype = options.pop("dtype", torch.float8_e4m3fn)
        q, vt = torch.empty(1, 4, 8192, head_dim, dtype=dtype), torch.empty(1, 4, head_dim, 8192, dtype=dtype)
        o, scale = torch.empty(q.shape, dtype=torch.bfloat16), torch.ones(1, 4, 64)
        with launch.instead_of_launching(hook):
            hopper_fp8.forward(
                q, q, vt, scale, scale, scale, o, q_block=128, k_block=128, softmax_scale=0.1, **options
            )  # fmt: skip
    for got in compiled:  # read last, so that all of it is disassembled at once
        row = {
            "name": got.name,
            "triton": triton.__version__,
            "spills": got.spills,
            "shared": got.shared,
            "qgmma": got.instructions["QGMMA"],
            "hgmma": got.instructions["HGMMA"],
            "tma": got.instructions["UTMALDG"],
            "repacking": got.instructions["PRMT"],
            "shuffles": got.instructions["SHFL"],
            "warnings": got.warnings,
            "descriptors": descriptors_of_two_origins(got.sass),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
