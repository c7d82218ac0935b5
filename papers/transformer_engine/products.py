"""The `gemm` experiment: FP8 products next to torch's, with and without the time of quantising.

    hopper               `scaled_mm` on operands that are quantised already, Gluon (sm_90a)
    portable             the same in plain Triton
    portable-quantize    the same with the activations quantised in the timed call (weights beforehand)
    torch-scaled-mm      torch._scaled_mm on the same codes, sums as exact as it offers (use_fast_accum=False)
    torch-fast           torch._scaled_mm with use_fast_accum=True: sums stay in the tensor core
    bf16                 torch's bf16 product of the tensors before quantising

Every result is compared with float64 on the numbers that it was given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import compare
from gpu_accel.thunderkittens.gemm_hopper import machine_refusal
from gpu_accel.transformer_engine.gemm import scaled_mm
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference
from gpu_accel.transformer_engine.tensor import QuantizedTensor
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import inputs

PAIRS = {"tensor": ("fp8", "fp8"), "row": ("fp8_row", "fp8_row"), "block": ("fp8_1x128", "fp8_128x128")}


def list_cases(settings: Settings) -> list[Case]:
    """Square products, and a skinny one; on a CPU one small ragged product."""
    if settings.on_gpu:
        sizes = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (16, 8192, 8192)]
        sizes = sizes[: 1 if settings.quick else None]
    else:
        sizes = [(48, 64, 160)]
    kind = "normal" if settings.input == "smollm2" else settings.input
    return [
        {"scales": name, "m": m, "n": n, "k": k, "dtype": "e4m3", "input": kind} for name in PAIRS for m, n, k in sizes
    ]


def build(case: Case, settings: Settings) -> Workload:
    """Ours, with and without quantising, torch's FP8 and torch's bf16."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    first, second = PAIRS[str(case["scales"])]

    def data(seed: int) -> tuple[Tensor, Tensor]:
        return inputs.make(case, seed, settings.device)

    def codes(seed: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        x, w = data(seed)
        backend = "portable" if settings.on_gpu else "reference"
        return quantize(x, first, backend=backend), quantize(w, second, backend=backend)

    def judge(seed: int, run: Callable[[QuantizedTensor, QuantizedTensor], Tensor], factor: float = 2.0) -> Check:
        a, b = codes(seed)
        truth = scaled_mm_reference(a, b)
        ruler = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
        found = compare(run(a, b), truth, ruler, factor=factor)
        return Check(found.error, found.bound, f"max error{': ' + found.why if found.why else ''}")

    def torch_mm(a: QuantizedTensor, b: QuantizedTensor, fast: bool) -> Tensor:
        assert a.codes is not None and b.codes is not None and a.scales is not None and b.scales is not None
        try:
            return torch._scaled_mm(
                a.codes, b.codes.t(), a.scales if a.scales.numel() > 1 else a.scales.reshape(()),
                b.scales.t() if b.scales.numel() > 1 else b.scales.reshape(()),
                out_dtype=torch.bfloat16, use_fast_accum=fast,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(f"torch._scaled_mm refuses: {str(error).splitlines()[0]}") from error

    def prepared(run: Callable[[QuantizedTensor, QuantizedTensor], Tensor]) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            a, b = codes(seed)
            return lambda: run(a, b)

        return make

    def ours(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return scaled_mm(a, b, backend="portable")

    def hopper(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return scaled_mm(a, b, backend="hopper")

    def make_whole(seed: int) -> Callable[[], object]:
        x, w = data(seed)
        b = quantize(w, second, backend="portable")
        return lambda: ours(quantize(x, first, backend="portable"), b)

    def check_bf16(seed: int) -> Check:
        x, w = data(seed)
        found = compare(x @ w.t(), x.double() @ w.double().t(), (x.float() @ w.float().t()).bfloat16())
        return Check(found.error, found.bound, "max error")

    def make_bf16(seed: int) -> Callable[[], object]:
        x, w = data(seed)
        return lambda: x @ w.t()

    blocked = case["scales"] == "block"
    refused = ""
    if blocked:
        refused = "torch._scaled_mm with scales of blocks wants other layouts of scales; not tried"
    elif not settings.on_gpu:
        refused = "torch._scaled_mm on a CPU has rules of its own; the GPU's is the rival"
    peers = [
        Implementation(
            name=name, role="peer", unavailable=refused,
            check=lambda seed, fast=fast: judge(seed, lambda a, b: torch_mm(a, b, fast), 64.0 if fast else 4.0),
            make=prepared(lambda a, b, fast=fast: torch_mm(a, b, fast)), note=note,
        )
        for name, fast, note in (
            ("torch-scaled-mm", False, "use_fast_accum=False"),
            ("torch-fast", True, "use_fast_accum=True: about 14 bits of sums, so it may err more"),
        )
    ]  # fmt: skip
    return Workload(
        implementations=[
            Implementation(
                name="hopper", role="ours", check=lambda seed: judge(seed, hopper), make=prepared(hopper),
                unavailable=machine_refusal(torch.empty(0, device=settings.device)) or "",
                note="operands quantised beforehand",
            ),
            Implementation(
                name="portable", role="ours", check=lambda seed: judge(seed, ours), make=prepared(ours),
                note="operands quantised beforehand",
            ),
            Implementation(
                name="portable-quantize", role="ours", check=lambda seed: judge(seed, ours), make=make_whole,
                note="activations quantised in the timed call",
            ),
            *peers,
            Implementation(name="bf16", role="reference", check=check_bf16, make=make_bf16, note="torch, bf16"),
        ],
        baselines=("torch-scaled-mm", "bf16"),
        flops=gemm_flops(m, n, k),
        bytes_moved=m * k + n * k + 2 * m * n,
    )  # fmt: skip
