"""Templates whose structure matters: what their machine code for Hopper has, and both ways through those with TMA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_accel.cuda_llm import TASKS, Sandbox, check
from gpu_accel.cuda_llm.harness import Program, draw
from gpu_accel.cuda_llm.tasks.task import Task

SCRIPT = Path(__file__).with_name("compile_templates.py")


def numbered(task: Task, word: str) -> int:
    return next(at for at, one in enumerate(task.templates) if word in one.source)


TMA = {name: numbered(TASKS[name], "tensor_descriptor") for name in ("matrix_copy", "transpose", "matmul")}


def test_machine_code_has_what_the_templates_are_for(request, compile_environment: dict[str, str]) -> None:
    """TMA with its scratch memory and its parameter, with every Triton; with the one installed also cp.async."""
    wanted = [f"matmul:{TMA['matmul']}"]
    if whole := request.node.callspec.params["compile_environment"] == "installed":
        wanted = [*(f"{name}:{number}" for name, number in TMA.items()), f"matmul:{numbered(TASKS['matmul'], 'GROUP')}"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *wanted], env=compile_environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(wanted)
    if whole:
        row = rows.pop()
        assert row["cp_async"] and not row["tma"] and not row["barriers"] and row["scratch"] == 0
    for row in rows:
        assert row["tma"] and row["barriers"], row
        assert row["scratch"] == 256 and row["parameters"] == 2, "two descriptors; their address and a null pointer"


@pytest.mark.parametrize("name", [*TMA, "matvec"])
def test_templates_with_tma_or_split_sums_are_right(name: str, sandbox: Sandbox) -> None:
    """In the interpreter: shown shapes go through descriptors, a hidden one of odd sizes goes without."""
    task = TASKS[name]
    numbers = [at for at, one in enumerate(task.templates) if "SPLIT_K" in one.source or at == TMA.get(name)]
    assert numbers
    for number in numbers:
        judged = check(task.templates[number], task, sandbox=sandbox, seed=4)
        assert judged.ok and judged.error is not None and judged.error <= 0.5, judged


@pytest.mark.parametrize("name", TMA)
def test_a_shape_that_is_shown_goes_through_descriptors(name: str) -> None:
    task = TASKS[name]
    rows = {"matrix_copy": ("cols", "gap"), "transpose": ("rows", "cols"), "matmul": ("k", "n")}[name]
    assert any(all(dims[one] % 4 == 0 for one in rows) for dims in (*task.shown, task.bench))
    assert any(all(dims[one] % 4 == 0 for one in rows) for dims in task.shown)
    assert any(trial.dims[rows[0]] % 4 for trial in draw(task, task.candidate, 4)), "and one goes without"
    assert "tensor_descriptor" in Program.of(task.templates[TMA[name]]).source
