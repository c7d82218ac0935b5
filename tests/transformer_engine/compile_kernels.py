"""Compiles kernels of the package for an H100 that is not there and prints what came out, a list in JSON for each set.

python compile_kernels.py quantize fp8-given,mxfp8-both    of (4096, 4096) bf16; rows alone or both copies
python compile_kernels.py quantize fp8-both-fp32           the same of float32
python compile_kernels.py quantize nvfp4-both-ragged       of (304, 1104), which tiles do not divide
python compile_kernels.py operand rms-fp8-given-both       of a norm or an activation of (4096, 4096) bf16
python compile_kernels.py hopper fp8_1x128,mxfp8-rms        both copies by the kernel for Hopper
python compile_kernels.py turn fp8_1x128,fp8                both copies turned in registers; the scale of fp8 is given
python compile_kernels.py step roll,swiglu                 two histories; an activation and its gradient
python compile_kernels.py optimizer adamw,lion             a step of a million bf16 values
python compile_kernels.py gemm fp8_row-fp8_row             products of 4096 x 4096 x 4096; sm_100 where the name ends
                                                           in "-native"
"""

from __future__ import annotations

import json
import re
import sys

import torch

from gpu_accel.flash_attention3.launch import instead_of_launching, launch
from gpu_accel.testing.compile_only import Compiled, compile_only
from gpu_accel.transformer_engine import (
    activations,
    gemm,
    history_kernels,
    optimizers,
    quantize_launch,
    quantizer,
    sources,
)
from gpu_accel.transformer_engine.hopper_quantize_kernel import both_kernel
from gpu_accel.transformer_engine.quantize_launch import Source
from gpu_accel.transformer_engine.schemes import scheme

compiled: list[tuple[str, Compiled, int]] = []  # label, kernel, values a thread; read last: disassembled at once
label = ""


def used_twice(ptx: str) -> int:
    """How many conversions to fp8 are both half of a packed word and read by themselves, which ptxas gets wrong."""
    made = set(re.findall(r"cvt\.\S*e[45]m[23]x2\.f32\s+(%rs\d+)", ptx))
    packed, alone = set(), set()
    for line in ptx.splitlines():
        for register in made.intersection(re.findall(r"%rs\d+", line)):
            if re.match(r"\s*mov\.b32\s+%r\d+, \{", line):
                packed.add(register)
            elif not re.match(rf"\s*cvt\.\S*x2\.f32\s+{register}\b", line):
                alone.add(register)
    return len(packed & alone)


def hook(kernel, arguments, options) -> None:
    c = compile_only(
        kernel, arguments, options, name=kernel.fn.__name__, capability=100 if label.endswith("-native") else 90
    )
    values = options.get("BM", options.get("ROWS", 1)) * options.get("BK", 256 if "ROWS" in options else 1)
    values = options["TALL"] * 128 if "TALL" in options else values
    compiled.append((label, c, values // (32 * c.num_warps)))


def described(label: str, c: Compiled, values: int) -> dict:
    count = c.instructions
    return dict(
        name=label, kernel=c.name, registers=c.registers, spills=c.spills, shared=c.shared, warps=c.num_warps,
        values=values, instructions=sum(count.values()),
        wide_loads=len(re.findall(r"LDG\.E\S*\.128", c.sass)), loads=count["LDG"], stores=count["STG"],
        wide_stores=len(re.findall(r"STG\.E\S*\.64", c.sass)),
        narrow_stores=len(re.findall(r"STG\.E\S*\.U8", c.sass)),
        conversions=len(re.findall(r"F2FP\.\S*E4M3", c.sass)),
        casts=sorted(set(re.findall(r"cvt\.\S*e[45]m[23]x2\S*", c.ptx))),
        used_twice=used_twice(c.ptx), qgmma=c.sass.count("QGMMA"), hgmma=c.sass.count("HGMMA"),
        faults=c.faults,
        tcgen05=sorted(set(re.findall(r"tcgen05\.mma\S*kind::(\w+)\.block_scale", c.ptx))),
    )  # fmt: skip


def compile_set(which: str, names: str) -> None:
    global label
    for label in names.split(","):
        if which == "quantize":
            what, *extra = label.split("-")
            known = torch.ones(1, 1) if "given" in extra else None
            shape = (304, 1104) if "ragged" in extra else (4096, 4096)
            x = torch.empty(shape, dtype=torch.float32 if "fp32" in extra else torch.bfloat16)
            quantizer.quantize_op._init_fn(x, scheme(what).text, True, "both" in extra, 0, known)
        elif which == "operand":
            kind, what, *extra = label.split("-")
            x = torch.empty(4096, 8192 if Source(kind).gated else 4096, dtype=torch.bfloat16)
            known, seen = (torch.ones(()), torch.ones(())) if "given" in extra else (None, None)
            gamma, beta = torch.ones(4096), torch.ones(4096) if kind == "layer" else None
            text = scheme(what).text
            sources.operand_op._init_fn(
                x, known, seen, text, text, True, "both" in extra, 0, "portable", kind, gamma, beta, 1e-5
            )
        elif which == "hopper":
            what = scheme(label.partition("-")[0])
            x, codes = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.uint8)
            wide = what.scale != "e8m0"
            scales = torch.empty(4096, 4096 // what.block[1], dtype=torch.float32 if wide else torch.uint8)
            numbers = quantize_launch._numbers(what)
            kept = ("SCALE", "LARGEST", "ADD", "EMAX", "FINITE")
            options = dict(
                GC=what.block[1], **{key: numbers[key] for key in kept}, E5M2=what.element == "e5m2",
                SOURCE="rms" if label.endswith("rms") else "", CURVE="silu" if label.endswith("silu") else "",
                GATED=label.endswith("silu"), num_warps=8, maxnreg=128, enable_fp_fusion=False,
            )  # fmt: skip
            arguments = (x, *(torch.ones(4096),) * 4, codes, scales, codes, scales, 4096, 4096, 4096, 32)
            launch(both_kernel, 1, arguments, options)
        elif which == "turn":
            what = scheme(label)
            x = torch.empty(4096, 4096, dtype=torch.bfloat16)
            m = quantize_launch.as_matrix(x)
            row, col = (quantize_launch._empty_parts(x, 4096, 4096, what, True) for _ in range(2))
            given = row[1] if what.block[1] else torch.ones(())
            seen = None if what.block[1] else torch.zeros(())
            quantize_launch._turn(x, what, m, row, col, given, seen)
        elif which == "step":
            state = [torch.ones(1024), torch.ones(()), torch.ones(()), torch.zeros(2, dtype=torch.int64)]
            if label == "roll":
                history_kernels.roll_op._init_fn([*state, *(t.clone() for t in state)], [448.0, 448.0], 0, "max", True)
            else:
                x = torch.empty(4096, 8192 if Source(label).gated else 4096, dtype=torch.bfloat16)
                activations.run_gradient(activations.run_activation(x, label), x, label)
        elif which == "optimizer":
            p = torch.nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
            p.grad = torch.zeros_like(p)
            optimizers.choose_backend = lambda *_: "portable"
            kind = {"adamw": optimizers.AdamW8bit, "lion": optimizers.Lion8bit}[label]
            kind([p], bf16_stochastic_rounding=True).step()
        else:
            parts, native = label.split("-")[:2], label.endswith("-native")
            pair = [quantizer.quantize(torch.zeros(256, 4096), part, backend="reference") for part in parts]
            a, b = (gemm._bytes(q) for q in pair)
            gemm.scaled_mm_op._init_fn(*a, *b, None, torch.bfloat16, *(q.scheme.text for q in pair), 4096, native)


sets = []
with instead_of_launching(hook):
    for which, names in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compile_set(which, names)
        sets.append(compiled.copy())
        compiled.clear()
for one in sets:
    print(json.dumps([described(*kernel) for kernel in one]))
