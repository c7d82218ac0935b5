"""What is read out of a compiled kernel's text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_accel.testing.compile_only import idle_barriers

ROOT = Path(__file__).resolve().parents[2]

BARRIER = "!ttg.memdesc<2x1xi64, #shared4, #smem, mutable>"
TTGIR = f"""
    %full = ttg.local_alloc : () -> {BARRIER} loc(#loc1)
    %queue = ttg.local_alloc : () -> {BARRIER} loc(#loc2)
    %dq_bufs = ttg.local_alloc : () -> !ttg.memdesc<2x16x256xf32, #shared2, #smem, mutable> loc(#loc3)
    %0 = ttg.memdesc_index %full[%c0_i32] : {BARRIER} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc4)
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc4)
    %1 = ttg.memdesc_index %queue[%c0_i32] : {BARRIER} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc5)
    ttng.init_barrier %1, 2 : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc5)
    ttg.warp_specialize(%full, %dq_bufs) attributes {{requestedRegisters = array<i32: 240>}}
"""


def test_a_barrier_that_nobody_waits_for_is_found():
    assert idle_barriers(TTGIR) == ["%queue"]
    assert idle_barriers(TTGIR.replace("(%full, ", "(%full, %queue, ")) == []
    arrives = "    ttng.arrive_barrier %1, 2 : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc6)\n"
    assert idle_barriers(TTGIR + arrives) == ["%queue"]
    waits = "    ttng.wait_barrier %1, %phase : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc6)\n"
    assert idle_barriers(TTGIR + waits) == []


_CODE = """
import re, subprocess, torch
from gpu_accel.flash_attention3.launch import instead_of_launching
from gpu_accel.testing import compile_only as c
from gpu_accel.thunderkittens import elements, rows

kernels = []
def hook(kernel, arguments, options):
    kernels.append(c.compile_only(kernel, arguments, options, name=kernel.fn.__name__, capability=90))
x = torch.empty(64, 512)
with instead_of_launching(hook):
    elements.gated_op._init_fn(x, x, "silu")
    rows.softmax_op._init_fn(x, rows.WHOLE)
    assert not any("sass" in kernel.__dict__ for kernel in kernels)
    assert kernels[0].instructions["LDG"] and "sass" in kernels[1].__dict__
    elements.gated_op._init_fn(x.bfloat16(), x.bfloat16(), "gelu")
for kernel in kernels:
    with open("alone.cubin", "wb") as file:
        file.write(kernel.cubin)
    alone = subprocess.run([c._nvdisasm(90), "-c", "alone.cubin"], capture_output=True, text=True, check=True).stdout
    opcodes = [re.findall(r"/[*][0-9a-f]{4,}[*]/ *(?:@!?U?P\\\\w+ *)?([A-Z0-9_.]+)", x) for x in (alone, kernel.sass)]
    assert len(opcodes[0]) > 20 and opcodes[0] == opcodes[1], kernel
    said = c.inspect(type("Made", (), dict(asm=dict(ptx=kernel.ptx, cubin=kernel.cubin), metadata=kernel)), "", 90)
    assert (said.registers, said.spills) == (kernel.registers, kernel.spills) and said.registers > 8
print(len(kernels), "kernels")
"""


def test_kernels_that_are_disassembled_together_have_each_their_own_instructions(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "3 kernels\n"
