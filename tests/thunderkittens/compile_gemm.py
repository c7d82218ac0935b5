"""Compile the Hopper products for sm_90 without a GPU, one line of JSON a kernel. Run by the tests beside it.

python compile_gemm.py NAME ...     names of CASES
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
import triton

from gpu_accel.flash_attention3.launch import instead_of_launching
from gpu_accel.testing.compile_only import compile_only, use_target
from gpu_accel.thunderkittens import gemm_hopper, gemm_skinny
from gpu_accel.transformer_engine import hopper_gemm

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, LINE, SQUARE = hopper_gemm.BLOCKS


def tile(layout: str = "nt", n: int = 1024, **options) -> None:
    a = torch.empty(512, 512, dtype=BF16)
    b = torch.empty(n, 512, dtype=BF16).t() if layout == "nt" else torch.empty(512, n, dtype=BF16)
    bias = torch.empty(n, dtype=BF16) if options.pop("bias", False) else None
    gemm_hopper.gemm(a, b, bias, **{"config": gemm_hopper.GemmConfig(), **options})


def scales(rows: int, block: tuple[int, int]) -> torch.Tensor:
    return torch.empty({TENSOR: (1,), ROW: (rows,), LINE: (rows, 4), SQUARE: (-(-rows // 128), 4)}[block])


def fp8(block_a: tuple[int, int], block_b: tuple[int, int], a_dtype: torch.dtype = E4M3, **options) -> None:
    n, m = options["out"].shape[1] if "out" in options else 5120, options.pop("m", 512)
    a, b = torch.empty(m, 512, dtype=a_dtype), torch.empty(n, 512, dtype=E4M3)
    blocks = dict(block_a=block_a, block_b=block_b)
    if options.pop("stacked", False):
        options |= dict(groups=torch.zeros(512, dtype=torch.int32), out=torch.empty(512, 2560, dtype=torch.bfloat16))
    if options.pop("along", False):
        options |= dict(along=torch.zeros(3, dtype=torch.int32))
        options.setdefault("out", torch.empty(1024, n, dtype=torch.bfloat16))
    hopper_gemm.gemm(a, b, scales(m, block_a), scales(n, block_b), **blocks, **options)


def skinny(rows: int, dtype: torch.dtype = BF16, block_x=TENSOR, block_w=TENSOR, **options) -> None:
    x, w = torch.empty(rows, 512, dtype=dtype), torch.empty(1024, 512, dtype=dtype).t()
    if dtype == E4M3:
        options |= dict(scale_x=scales(rows, block_x), scale_w=scales(1024, block_w), block_x=block_x, block_w=block_w)
    gemm_skinny.gemm(x, w, out_dtype=BF16, **options)


LEAN = gemm_skinny.SkinnyConfig(sub=1, early=True, lean=True, held=True)
CASES = {
    "tile": lambda: tile(),
    "tile-nn-bias-silu": lambda: tile("nn", bias=True, activation="silu"),
    "tile-gelu": lambda: tile(bias=True, activation="gelu"),
    "tile-fp32": lambda: tile(out_dtype=torch.float32),
    "tile-odd-n": lambda: tile(n=1023),
    "skinny-64": lambda: skinny(64),
    "skinny-16": lambda: skinny(16),
    "skinny-16-pieces": lambda: skinny(16, config=gemm_skinny.SkinnyConfig(sub=4, box=16)),
    "skinny-128-gelu": lambda: skinny(128, activation="gelu"),
    "skinny-128-blocks": lambda: skinny(128, E4M3, LINE, SQUARE),
    "skinny-128-pairs": lambda: skinny(128, E4M3, LINE, SQUARE, config=replace(LEAN, sub=2)),
    "skinny-128-pairs-row": lambda: skinny(128, E4M3, ROW, ROW, config=replace(LEAN, sub=2)),
    "skinny-64-blocks": lambda: skinny(64, E4M3, LINE, SQUARE),
    "fp8": lambda: fp8(TENSOR, TENSOR),
    "fp8-256": lambda: fp8(TENSOR, TENSOR, config=hopper_gemm.Fp8GemmConfig(every=2)),
    "fp8-row-bias": lambda: fp8(ROW, ROW, bias=torch.empty(5120)),
    "fp8-blocks": lambda: fp8(LINE, SQUARE),
    "fp8-blocks-fp32": lambda: fp8(LINE, SQUARE, out_dtype=torch.float32),
    "fp8-lines": lambda: fp8(LINE, LINE, out_dtype=torch.float32),
    "fp8-add": lambda: fp8(TENSOR, TENSOR, E5M2, out=torch.empty(512, 5120), accumulate=True),
    "fp8-to-fp8": lambda: fp8(
        TENSOR,
        TENSOR,
        bias=torch.empty(5120),
        activation="gelu",
        out_dtype=E4M3,
        out_scale=torch.ones(()),
        amax=torch.zeros(()),
    ),
    "fp8-narrow": lambda: fp8(ROW, ROW, m=2500, config=hopper_gemm.Fp8GemmConfig(parts=1, stages=6, deal=True)),
    "fp8-mixed": lambda: fp8(TENSOR, TENSOR, E5M2),
    "fp8-wide-stacked": lambda: fp8(LINE, SQUARE, stacked=True, config=hopper_gemm.Fp8GemmConfig()),
    "fp8-odd-n": lambda: fp8(LINE, SQUARE, out=torch.empty(512, 5119, dtype=BF16)),
    "fp8-lines-add": lambda: fp8(LINE, LINE, out=torch.empty(512, 5120), accumulate=True),
    "fp8-gelu": lambda: fp8(TENSOR, TENSOR, activation="gelu", config=hopper_gemm.Fp8GemmConfig(deal=True)),
    "fp8-blocks-deal": lambda: fp8(LINE, SQUARE, m=2500, config=hopper_gemm.Fp8GemmConfig(deal=True, staged=True)),
    "fp8-stacked": lambda: fp8(LINE, SQUARE, stacked=True),
    "fp8-stacked-row": lambda: fp8(ROW, ROW, stacked=True, bias=torch.empty(2, 2560), activation="silu"),
    "fp8-along": lambda: fp8(TENSOR, TENSOR, along=True),
    "fp8-along-lines": lambda: fp8(LINE, LINE, along=True),
    "fp8-along-lines-add": lambda: fp8(LINE, LINE, along=True, out=torch.empty(1024, 5120), accumulate=True),
    "fp8-lines-bf16": lambda: fp8(LINE, LINE),
    "fp8-blocks-gelu": lambda: fp8(LINE, SQUARE, bias=torch.empty(5120), activation="gelu"),
    "fp8-blocks-to-fp8": lambda: fp8(
        LINE,
        SQUARE,
        out_dtype=E4M3,
        out_scale=torch.ones(()),
        amax=torch.zeros(()),
        bias=torch.empty(5120),
        activation="gelu",
    ),
    "fp8-blocks-add": lambda: fp8(LINE, SQUARE, out=torch.empty(512, 5120), accumulate=True),
    "fp8-lines-gelu": lambda: fp8(LINE, LINE, bias=torch.empty(5120), activation="gelu"),
    "fp8-lines-to-fp8": lambda: fp8(
        LINE,
        LINE,
        out_dtype=E4M3,
        out_scale=torch.ones(()),
        amax=torch.zeros(()),
        bias=torch.empty(5120),
        activation="gelu",
    ),
    "fp8-skinny-blocks": lambda: skinny(16, E4M3, LINE, SQUARE),
}


def main(names: list[str]) -> None:
    use_target(90)
    compiled = []
    for name in names:

        def hook(kernel, arguments, constants, name=name):
            got = compile_only(kernel, arguments, constants, name=name, capability=90)
            compiled.append((kernel.__name__, got))

        with instead_of_launching(hook):
            CASES[name]()
    for kernel, got in compiled:  # read last, so that all of it is disassembled at once
        row = {
            "name": got.name,
            "kernel": kernel,
            "triton": triton.__version__,
            "registers": got.registers,
            "spills": got.spills,
            "shared": got.shared,
            "wgmma": got.instructions["HGMMA"] + got.instructions["QGMMA"],
            "tma_loads": got.instructions["UTMALDG"],
            "tma_stores": got.instructions["UTMASTG"],
            "faults": got.faults,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
