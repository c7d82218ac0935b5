"""The `gemm` experiment: FP8 products next to torch's, with and without the time of quantising.

    hopper               `scaled_mm` on operands that are quantised already, Gluon (sm_90a)
    hopper-fused         the same with bias, GELU and rounding to e4m3 on its way out (what is noted: the amax)
    hopper-quantize      the same with the activations quantised in the timed call (weights beforehand)
    portable             the first in plain Triton
    portable-quantize    the second in plain Triton
    torch-scaled-mm      torch._scaled_mm on the same codes, sums as exact as it offers (use_fast_accum=False)
    torch-fast           torch._scaled_mm with use_fast_accum=True: sums stay in the tensor core
    torch-fused          torch-scaled-mm, then torch's bias, GELU and rounding, eager
    bf16                 torch's bf16 product of the tensors before quantising
    copy                 with few rows, which are bound by memory: torch's copy of as many bytes as the case must move

With few rows the cache is left without lines to be written back (`Workload.l2`), which a reader would have to wait for.

`scales`: how both operands are scaled. "mixed" is what a gradient of activations is: e5m2 times e4m3; "lines" what a
gradient of weights is with scales of 1x128: both along what is summed. Grouped products are in grouped.py.

Every result is compared with float64 on the numbers that it was given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import compare, generator
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.thunderkittens.gemm_hopper import machine_refusal
from gpu_accel.transformer_engine.gemm import scaled_mm, scaled_mm_fp8
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference
from gpu_accel.transformer_engine.tensor import QuantizedTensor
from gpu_accel.workbench.experiment import (
    Case,
    Check,
    Implementation,
    Settings,
    Workload,
    completed,
    refuse_beyond_memory,
)

from . import inputs

PAIRS = {
    "tensor": ("fp8", "fp8"),
    "row": ("fp8_row", "fp8_row"),
    "block": ("fp8_1x128", "fp8_128x128"),
    "mixed": ("fp8_e5m2", "fp8"),
    "lines": ("fp8_1x128", "fp8_1x128"),
}
_CUBES = ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384))
FEW_ROWS = 64
_FEW = ((1, 8192, 8192), (16, 8192, 8192), (64, 8192, 8192))
_LAYERS = ((2048, 2048, 2048), (4096, 6144, 2048), (8192, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336))
# N and K of the dense products in DeepGEMM's first README, each with as many rows
_DEEPGEMM = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
_DEEPGEMM_ROWS = (4096, 64, 128)


AXES = {"m": 4096, "n": 4096, "k": 4096}
WORDS = {"scales": tuple(PAIRS)}


def list_cases(settings: Settings) -> list[Case]:
    """Cubes, few rows, layers' products and DeepGEMM's; on a CPU one small ragged product for each scaling.

    `settings.shapes` take their place, with every scaling where they name none.
    """
    if settings.on_gpu:
        sizes = {name: [*_CUBES, *_FEW] for name in ("tensor", "row", "block")}
        sizes["tensor"] += _LAYERS
        sizes["block"] += [(m, n, k) for m in _DEEPGEMM_ROWS for n, k in _DEEPGEMM]
        sizes["mixed"] = sizes["lines"] = list(_CUBES[:2])
        sizes = {name: found[: 1 if settings.quick else None] for name, found in sizes.items()}
    else:
        sizes = {name: [(48, 64, 160)] for name in PAIRS}
    kind = inputs.drawn(settings)
    own: list[Case] = [
        {"scales": name, "m": m, "n": n, "k": k, "dtype": "e4m3", "input": kind}
        for name, found in sizes.items()
        for m, n, k in found
    ]
    return completed(settings.shapes, own[0], WORDS) if settings.shapes else own


def build(case: Case, settings: Settings) -> Workload:
    """Ours, with and without quantising, torch's FP8 and torch's bf16."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    first, second = PAIRS[str(case["scales"])]
    refuse_beyond_memory(m * n + n * k + m * k)

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

    def for_torch(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Tensor, ...]:
        """(codes, codes, scales, scales) as torch._scaled_mm wants them."""
        assert a.codes is not None and b.codes is not None and a.scales is not None and b.scales is not None
        if case["scales"] in ("block", "lines"):  # scales of rows lie side by side; 128x128 ones in fours
            scales = [a.scales.t().contiguous().t(), b.scales.t().contiguous()]
            if case["scales"] == "block":
                rows, cols = b.scales.shape
                wide = b.scales.new_zeros(rows, -(-cols // 4) * 4)[:, :cols]
                scales[1] = wide.copy_(b.scales).t()
            return a.codes, b.codes.t(), scales[0], scales[1]
        first = a.scales if a.scales.numel() > 1 else a.scales.reshape(())
        return a.codes, b.codes.t(), first, b.scales.t() if b.scales.numel() > 1 else b.scales.reshape(())

    def torch_mm(given: tuple[Tensor, ...], fast: bool) -> Tensor:
        try:
            return torch._scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=fast)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(f"torch._scaled_mm refuses: {str(error).splitlines()[0]}") from error

    def make_torch(fast: bool) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            given = for_torch(*codes(seed))
            return lambda: torch_mm(given, fast)

        return make

    def prepared(run: Callable[[QuantizedTensor, QuantizedTensor], Tensor]) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            a, b = codes(seed)
            return lambda: run(a, b)

        return make

    def ours(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return scaled_mm(a, b, backend="portable")

    def hopper(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return scaled_mm(a, b, backend="hopper")

    def make_whole(run: Callable[[QuantizedTensor, QuantizedTensor], Tensor]) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            x, w = data(seed)
            b = quantize(w, second, backend="portable")
            return lambda: run(quantize(x, first, backend="portable"), b)

        return make

    def check_bf16(seed: int) -> Check:
        x, w = data(seed)
        found = compare(x @ w.t(), x.double() @ w.double().t(), (x.float() @ w.float().t()).bfloat16())
        return Check(found.error, found.bound, "max error")

    def make_bf16(seed: int) -> Callable[[], object]:
        x, w = data(seed)
        return lambda: x @ w.t()

    def fused_parts(seed: int) -> tuple[QuantizedTensor, QuantizedTensor, Tensor, Tensor, Tensor]:
        """Both operands, a bias, a scale that fits the results, and a place for their largest magnitude."""
        a, b = codes(seed)
        bias = torch.randn(n, generator=generator(seed, settings.device), device=settings.device).bfloat16()
        scale = torch.full((), 8 * k**0.5 / 448, device=settings.device)
        return a, b, bias, scale, torch.zeros((), device=settings.device)

    def fused(parts) -> QuantizedTensor:
        a, b, bias, scale, amax = parts
        return scaled_mm_fp8(a, b, scale, bias=bias, activation="gelu_tanh", amax=amax, backend="hopper")

    def torch_fused(parts) -> tuple[Tensor, Tensor]:
        a, b, bias, scale, _ = parts
        out = torch_mm(for_torch(a, b), False) + bias
        out = torch.nn.functional.gelu(out, approximate="tanh")
        return (out.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), out.abs().amax()

    def judge_fused(seed: int, values: Callable[[tuple], Tensor]) -> Check:
        parts = fused_parts(seed)
        a, b, bias, scale, _ = parts
        truth = activated(scaled_mm_reference(a, b, bias=bias), "gelu_tanh")
        error = (values(parts).double() - truth).abs()
        # a code may be half a step off, bf16 a little more, sums 2**-11 of the largest
        bound = 2.0**-4 * 1.1 * truth.abs() + 2.0**-10 * scale.double() + 2.0**-10 * truth.abs().max()
        return Check((error / bound).max().item(), 1.0, "largest share of the bound")

    def check_fused(seed: int) -> Check:
        return judge_fused(seed, lambda parts: fused(parts).dequantize(torch.float32))

    def check_torch_fused(seed: int) -> Check:
        return judge_fused(seed, lambda parts: torch_fused(parts)[0].float() * parts[3])

    def make_fused(run: Callable[[tuple], object]) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            parts = fused_parts(seed)
            return lambda: run(parts)

        return make

    few = m <= FEW_ROWS
    moved = m * k + n * k + 2 * m * n

    def halves(seed: int) -> tuple[Tensor, Tensor]:
        source = torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device=settings.device)
        return source, torch.full_like(source, 0xFF)

    def check_copy(seed: int) -> Check:
        source, target = halves(seed)
        target.copy_(source)
        return Check(float((source != target).sum()), 0.0, "bytes that differ")

    def make_copy(seed: int) -> Callable[[], object]:
        source, target = halves(seed)
        return lambda: target.copy_(source)

    machine = machine_refusal(torch.empty(0, device=settings.device)) or ""
    elsewhere = "" if case["scales"] == "tensor" and not few else "only with scales of tensors and many rows"
    refused = "" if settings.on_gpu else "torch._scaled_mm on a CPU has rules of its own; the GPU's is the rival"
    peers = [
        Implementation(
            name=name, role="peer", unavailable=refused,
            check=lambda seed, fast=fast: judge(
                seed, lambda a, b: torch_mm(for_torch(a, b), fast), 64.0 if fast else 4.0
            ),
            make=make_torch(fast), note=note,
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
                unavailable=machine, note="operands quantised beforehand",
            ),
            Implementation(
                name="hopper-fused", role="ours", check=check_fused, make=make_fused(fused),
                unavailable=machine or elsewhere, note="with bias, GELU and rounding to e4m3 on its way out",
            ),
            Implementation(
                name="hopper-quantize", role="ours", check=lambda seed: judge(seed, hopper), make=make_whole(hopper),
                unavailable=machine, note="activations quantised in the timed call",
            ),
            Implementation(
                name="portable", role="ours", check=lambda seed: judge(seed, ours), make=prepared(ours),
                note="operands quantised beforehand",
            ),
            Implementation(
                name="portable-quantize", role="ours", check=lambda seed: judge(seed, ours), make=make_whole(ours),
                note="activations quantised in the timed call",
            ),
            *peers,
            Implementation(
                name="torch-fused", role="peer", check=check_torch_fused, make=make_fused(torch_fused),
                unavailable=refused or elsewhere, note="torch._scaled_mm, then bias, GELU and rounding, eager",
            ),
            Implementation(name="bf16", role="reference", check=check_bf16, make=make_bf16, note="torch, bf16"),
            Implementation(
                name="copy", role="reference", check=check_copy, make=make_copy, note="torch copy_ of as many bytes",
                unavailable="" if few else "only with few rows, which are bound by memory",
            ),
        ],
        baselines=("torch-scaled-mm", "bf16", "copy") if few else ("torch-scaled-mm", "bf16"),
        flops=gemm_flops(m, n, k),
        bytes_moved=moved,
        l2="clean" if few and settings.on_gpu else "flushed",
    )  # fmt: skip
