"""The `gemm` experiment: products of bf16 and fp16 next to cuBLAS.

    hopper             ours, Gluon (sm_90a): persistent tiles, or slices of K dealt to the SMs where rows are few
    hopper-2-stages    the same with a ring of 2 or 3 slices instead of 4 (4096 cubed, the paper's table 1)
    hopper-3-stages
    hopper-by-rows     the same with tiles in plain row order (cubes; the paper's table 3)
    portable           ours, plain Triton
    torch              torch.mm, which is cuBLAS

Layouts are those of BLAS: "nt" is A (M, K) times B (N, K) transposed, "nn" B (K, N) as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import compare
from gpu_accel.thunderkittens import gemm_hopper
from gpu_accel.thunderkittens.gemm_api import gemm, gemm_reference
from gpu_accel.workbench.experiment import (
    Case,
    Check,
    Implementation,
    Settings,
    Workload,
    completed,
    refuse_beyond_memory,
)

from .judging import DTYPES, randn

_CUBES = (4096, 8192, 16384)
_DEPTHS = (64, 128, 256, 512, 1024)  # of the paper's table 2
_ROWS = (1, 16, 64)
AXES = {"m": 4096, "n": 4096, "k": 128}
WORDS = {"layout": ("nt", "nn")}


def list_cases(settings: Settings) -> list[Case]:
    """Cubes, the paper's 4096 x 4096 x K, and few rows; on a CPU one ragged product of each layout.

    `settings.shapes` take their place, in the layout "nt" where they name none.
    """
    if not settings.on_gpu:
        sizes = [((37, 40, 72), "nt"), ((37, 40, 72), "nn")]
    else:
        sizes = [((n, n, n), "nt") for n in _CUBES]
        sizes += [((8192, 8192, 8192), "nn")]
        sizes += [((4096, 4096, k), "nt") for k in _DEPTHS]
        sizes += [((m, 8192, 8192), "nt") for m in _ROWS]
        sizes = sizes[:: 4 if settings.quick else 1]
    own: list[Case] = [
        {"m": m, "n": n, "k": k, "layout": layout, "dtype": settings.precision, "input": "normal"}
        for (m, n, k), layout in sizes
    ]
    return completed(settings.shapes, own[0]) if settings.shapes else own


def _operands(case: Case, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """A and B; on "meta" without their numbers."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    dtype = DTYPES[str(case["dtype"])]
    if device == "meta":
        a, b = torch.empty(m, k, dtype=dtype, device=device), torch.empty(n, k, dtype=dtype, device=device).t()
        return a, b if case["layout"] == "nt" else torch.empty(k, n, dtype=dtype, device=device)
    a = randn(m, k, seed=2 * seed, device=device, dtype=dtype)
    if case["layout"] == "nt":
        return a, randn(n, k, seed=2 * seed + 1, device=device, dtype=dtype).t()
    return a, randn(k, n, seed=2 * seed + 1, device=device, dtype=dtype)


def build(case: Case, settings: Settings) -> Workload:
    """Ours, in its variants where the paper has them, and cuBLAS."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    refuse_beyond_memory(m * k + k * n + m * n)
    machine = gemm_hopper.machine_refusal(torch.empty(0, device=settings.device))

    def made(name: str, role: str, run: Callable[[Tensor, Tensor], Tensor], why: str = "", note: str = ""):
        def check(seed: int) -> Check:
            a, b = _operands(case, seed, settings.device)
            truth = gemm_reference(a.double(), b.double())
            # Triton's interpreter cuts float32 to bfloat16 instead of rounding it
            found = compare(run(a, b), truth, a @ b, factor=2.0 if settings.on_gpu else 4.0)
            return Check(found.error, found.bound, f"max error{': ' + found.why if found.why else ''}")

        def make(seed: int) -> Callable[[], object]:
            a, b = _operands(case, seed, settings.device)
            return lambda: run(a, b)

        return Implementation(name=name, role=role, check=check, make=make, unavailable=why, note=note)

    def with_tiles(**options) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda a, b: gemm_hopper.gemm(a, b, config=gemm_hopper.GemmConfig(**options))

    refused = machine or gemm_hopper.layout_refusal(*_operands(case, 0, "meta")) or ""
    found = [
        made("hopper", "ours", lambda a, b: gemm(a, b, backend="hopper"), refused),
        made("portable", "ours", lambda a, b: gemm(a, b, backend="portable"), note="plain Triton"),
        made("torch", "peer", torch.mm, note="cuBLAS"),
    ]
    elsewhere = "" if m == n == k == 4096 else "the paper has it at 4096 cubed"
    found += [made(f"hopper-{s}-stages", "ours", with_tiles(stages=s), refused or elsewhere) for s in (2, 3)]
    uneven = "" if m == n == k else "the paper has it for cubes"
    uneven = uneven or ("" if m % 8 == 0 else "TMA reads rows of multiples of 16 bytes, and here nothing copies others")
    found.append(made("hopper-by-rows", "ours", with_tiles(group=1), refused or uneven))
    size = DTYPES[str(case["dtype"])].itemsize
    return Workload(
        implementations=found,
        baselines=("torch",),
        flops=gemm_flops(m, n, k),
        bytes_moved=size * (m * k + k * n + m * n),
    )
