"""The `ladder` experiment: one product, level by level (gpu_accel/thunderkittens/ladder.py), next to cuBLAS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import compare
from gpu_accel.thunderkittens import gemm_hopper, ladder
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from .judging import DTYPES, randn

LEVELS = tuple(level.name for level in ladder.LEVELS)


def list_cases(settings: Settings) -> list[Case]:
    """4096 cubed, the product that everybody quotes, and twice that; without a GPU a small rectangle."""
    sizes = [(size,) * 3 for size in (4096, 8192)][: 1 if settings.quick else 2] if settings.on_gpu else [(40, 24, 48)]
    return [{"m": m, "n": n, "k": k, "dtype": settings.precision, "input": "normal"} for m, n, k in sizes]


def build(case: Case, settings: Settings) -> Workload:
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    dtype, device = DTYPES[str(case["dtype"])], settings.device

    def operands(seed: int) -> tuple[Tensor, Tensor]:
        return (randn(m, k, seed=2 * seed, device=device, dtype=dtype),
                randn(k, n, seed=2 * seed + 1, device=device, dtype=dtype))  # fmt: skip

    def made(name: str, role: str, run: Callable[[Tensor, Tensor], Tensor], why: str = "", note: str = ""):
        def check(seed: int) -> Check:
            a, b = operands(seed)
            # Triton's interpreter cuts float32 to bfloat16 instead of rounding it
            found = compare(run(a, b), a.double() @ b.double(), a @ b, factor=2.0 if settings.on_gpu else 4.0)
            return Check(found.error, found.bound, f"max error{': ' + found.why if found.why else ''}")

        def make(seed: int) -> Callable[[], object]:
            a, b = operands(seed)
            return lambda: run(a, b)

        return Implementation(name=name, role=role, check=check, make=make, unavailable=why, note=note)

    def level(number: int):
        one = ladder.LEVELS[number]
        why = "" if one.interpreted else gemm_hopper.machine_refusal(torch.empty(0, device=device)) or ""
        return made(one.name, "ours", lambda a, b: ladder.run(one.name, a, b), why, one.idea)

    size = dtype.itemsize
    return Workload(
        implementations=[*map(level, range(len(LEVELS))), made("torch", "peer", torch.mm, note="cuBLAS")],
        baselines=("torch",),
        flops=gemm_flops(m, n, k),
        bytes_moved=size * (m * k + k * n + m * n),
    )
