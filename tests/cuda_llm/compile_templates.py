"""Compiles the templates named on the command line for Hopper and says what their machine code has: one JSON line each.

Run by test_templates.py in a process of its own, with the Triton that is asked for and without its interpreter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import triton

from gpu_accel.cuda_llm.compiled import compile_triton
from gpu_accel.cuda_llm.harness import Program, described
from gpu_accel.cuda_llm.image import Layout
from gpu_accel.cuda_llm.tasks import TASKS


def main() -> None:
    import triton.compiler.compiler as compiler

    texts: list[str] = []
    plain = compiler.compile

    def kept(*given, **more):
        made = plain(*given, **more)
        texts.append(made.asm["ptx"])
        return made

    triton.compile = kept
    for name, number in (one.split(":") for one in sys.argv[1:]):
        task = TASKS[name]
        kernel = task.templates[int(number)]
        if name == "matmul":  # smaller tiles compile faster
            kernel = kernel.with_(BLOCK_M=64, BLOCK_N=64, BLOCK_K=16)
        program = Program.of(kernel)
        _, constants = kernel.launch.resolve(task.bench)
        layout = Layout.of(task, kernel.launch, task.bench, constants)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "kernel.py")
            file.write_text(program.source)
            made = compile_triton(file, program.entry, described(program, kernel.launch, task.bench, layout), 90)
        ptx = texts[-1]
        found = {"name": name, "number": int(number), "scratch": made.scratch, "barriers": made.barriers,
                 "tma": "cp.async.bulk.tensor" in ptx, "cp_async": "cp.async.c" in ptx,
                 "parameters": ptx.split(".entry")[1].split(")")[0].count(".param") - len(program.parameters)
                 + len(program.constants)}  # fmt: skip
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
