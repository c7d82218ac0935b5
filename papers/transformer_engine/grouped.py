"""The `grouped` experiment: products of experts in one launch, DeepGEMM's contiguous layout, next to torch's.

    hopper           `grouped_mm`, Gluon (sm_90a)
    hopper-quantize  the same with the activations (`along`: and the gradient) quantised in the timed call
    portable         the first in plain Triton
    torch            torch._scaled_grouped_mm (scales of rows only)
    bf16             torch._grouped_mm on the tensors before quantising

`along`: what gradients of experts' weights are, sums over the rows of each expert (`k_grouped_mm`): both operands lie
contiguous along rows, with scales per row of them or of 1x128 ("lines").

Shapes: those that DeepGEMM publishes for DeepSeek-V3 (groups, rows of each, N, K), and one with uneven groups, whose
padding rows count as work for nobody. Every result is compared with float64 on the numbers that it was given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.hardware import gemm_flops
from gpu_accel.testing import compare
from gpu_accel.thunderkittens.gemm_hopper import machine_refusal
from gpu_accel.transformer_engine.gemm_grouped import (
    BLOCK,
    group_rows,
    grouped_mm,
    grouped_mm_reference,
    k_grouped_mm,
    k_grouped_mm_reference,
)
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.tensor import QuantizedTensor
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import inputs

PAIRS = {"row": ("fp8_row", "fp8_row"), "block": ("fp8_1x128", "fp8_128x128"), "lines": ("fp8_1x128", "fp8_1x128")}
WAYS = (("row", False), ("block", False), ("row", True), ("lines", True))  # scales, along
_SHAPES = ((4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048))


def list_cases(settings: Settings) -> list[Case]:
    """Even groups as published, and uneven ones; on a CPU three small ones."""
    if settings.on_gpu:
        shapes = [(*shape, True) for shape in _SHAPES] + [(8, 4096, 4096, 7168, False)]
        shapes = shapes[: 1 if settings.quick else None]
    else:
        shapes = [(3, 64, 128, 160, False)]
    kind = inputs.drawn(settings)
    return [
        {
            "scales": name, "along": along, "groups": g, "rows": rows, "n": n, "k": k, "even": even, "dtype": "e4m3",
            "input": kind,
        }
        for name, along in WAYS
        for g, rows, n, k, even in shapes
    ]  # fmt: skip


def sizes_of(case: Case) -> list[int]:
    """Rows of each group; uneven ones have the mean of the even ones, from near 0 to near twice as many."""
    groups, rows = int(case["groups"]), int(case["rows"])
    if case["even"]:
        return [rows] * groups
    return [(2 * i + 1) * rows // groups for i in range(groups)]


def _build_along(case: Case, settings: Settings, sizes: list[int], padded: list[int]) -> Workload:
    """The same of sums over the rows of each expert. Padding is zeros in one operand, as `GroupedLinear` makes it."""
    count, n, k = (int(case[key]) for key in ("groups", "n", "k"))
    first, second = PAIRS[str(case["scales"])]
    kind, rows = "portable" if settings.on_gpu else "reference", sum(padded)
    ends = torch.tensor(padded, device=settings.device).cumsum(0).to(torch.int32)
    real = torch.cat([torch.arange(p, device=settings.device) < size for size, p in zip(sizes, padded, strict=True)])

    def tensors(seed: int) -> tuple[Tensor, Tensor]:
        dy, x = inputs.make({**case, "m": n, "n": k, "k": rows}, seed, settings.device)
        return dy * real, x

    def codes(seed: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        dy, x = tensors(seed)
        return quantize(dy, first, backend=kind), quantize(x, second, backend=kind)

    def judge(seed: int, run: Callable[..., Tensor]) -> Check:
        a, b = codes(seed)
        truth = k_grouped_mm_reference(a, b, ends)
        ruler = k_grouped_mm_reference(a, b, ends, dtype=torch.float32, out_dtype=torch.bfloat16)
        found = compare(run(a, b), truth, ruler)
        return Check(found.error, found.bound, f"max error{': ' + found.why if found.why else ''}")

    def ours(name: str) -> Callable[..., Tensor]:
        return lambda a, b: k_grouped_mm(a, b, ends, backend=name)

    def whole(seed: int) -> Callable[[], object]:
        dy, x = tensors(seed)
        return lambda: ours("hopper")(quantize(dy, first, backend=kind), quantize(x, second, backend=kind))

    def for_torch(a: QuantizedTensor, b: QuantizedTensor) -> tuple[Tensor, ...]:
        assert a.codes is not None and b.codes is not None and a.scales is not None and b.scales is not None
        scales = [q.scales.view(-1).repeat(count) for q in (a, b) if q.scales is not None]  # one of each row and group
        return a.codes, b.codes.t(), *scales

    def torch_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16)

    def bf16(dy: Tensor, x: Tensor) -> Tensor:
        return torch._grouped_mm(dy, x.t(), offs=ends)

    def check_bf16(seed: int) -> Check:
        dy, x = tensors(seed)
        edges = [0, *ends.tolist()]
        parts = [slice(s, e) for s, e in zip(edges, edges[1:], strict=False)]
        truth, ruler = (
            torch.stack([dy[:, part].to(d) @ x[:, part].to(d).t() for part in parts]).to(o)
            for d, o in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16))
        )
        found = compare(bf16(dy, x), truth, ruler)
        return Check(found.error, found.bound, "max error")

    return Workload(
        implementations=_contenders(
            case, settings, ours=ours, judge=judge, operands=codes, whole=whole, torch_mm=torch_mm, for_torch=for_torch,
            bf16=bf16, bf16_operands=tensors, check_bf16=check_bf16,
        ),
        baselines=("torch", "bf16"),
        flops=sum(gemm_flops(size, n, k) for size in sizes),
        bytes_moved=rows * (k + n) + 2 * count * n * k,
    )  # fmt: skip


def build(case: Case, settings: Settings) -> Workload:
    """Ours and torch's."""
    count, n, k = (int(case[key]) for key in ("groups", "n", "k"))
    sizes = sizes_of(case)
    padded = [-(-size // BLOCK) * BLOCK for size in sizes]
    first, second = PAIRS[str(case["scales"])]
    backend = "portable" if settings.on_gpu else "reference"

    if case["along"]:
        return _build_along(case, settings, sizes, padded)

    def tensors(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        groups, _ = group_rows(torch.tensor(sizes, device=settings.device))
        x, w = inputs.make({**case, "m": len(groups), "n": count * n}, seed, settings.device)
        return x, w.view(count, n, k), groups

    def codes(seed: int) -> tuple[QuantizedTensor, QuantizedTensor, Tensor]:
        x, w, groups = tensors(seed)
        return quantize(x, first, backend=backend), quantize(w, second, backend=backend), groups

    def judge(seed: int, run: Callable[..., Tensor]) -> Check:
        a, b, groups = codes(seed)
        truth = grouped_mm_reference(a, b, groups)
        ruler = grouped_mm_reference(a, b, groups, dtype=torch.float32, out_dtype=torch.bfloat16)
        real = (groups >= 0)[:, None]
        found = compare(torch.where(real, run(a, b, groups), 0), torch.where(real, truth, 0), ruler * real)
        return Check(found.error, found.bound, f"max error{': ' + found.why if found.why else ''}")

    def ours(name: str) -> Callable[..., Tensor]:
        return lambda a, b, groups: grouped_mm(a, b, groups, backend=name)

    def whole(seed: int) -> Callable[[], object]:
        x, w, groups = tensors(seed)
        b = quantize(w, second, backend=backend)
        return lambda: ours("hopper")(quantize(x, first, backend=backend), b, groups)

    ends = torch.tensor(padded).cumsum(0).to(torch.int32)

    def for_torch(a: QuantizedTensor, b: QuantizedTensor, groups: Tensor) -> tuple[Tensor, ...]:
        assert a.codes is not None and b.codes is not None and a.scales is not None and b.scales is not None
        return a.codes, b.codes.transpose(1, 2), a.scales.view(-1), b.scales.view(count, n), ends.to(a.codes.device)

    def torch_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)

    def bf16_operands(seed: int) -> tuple[Tensor, ...]:
        x, w, _ = tensors(seed)
        return x, w.transpose(1, 2), ends.to(x.device)

    def bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=offs)

    def check_bf16(seed: int) -> Check:
        x, w, groups = tensors(seed)
        at, members = 0, []
        for size in padded:
            members.append(slice(at, at + size))
            at += size
        truth, ruler = (
            torch.cat([(x[rows].to(d) @ one.to(d).t()).to(o) for rows, one in zip(members, w, strict=True)])
            for d, o in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16))
        )
        found = compare(bf16(*bf16_operands(seed)), truth, ruler)
        return Check(found.error, found.bound, "max error")

    return Workload(
        implementations=_contenders(
            case, settings, ours=ours, judge=judge, operands=codes, whole=whole, torch_mm=torch_mm, for_torch=for_torch,
            bf16=bf16, bf16_operands=bf16_operands, check_bf16=check_bf16,
        ),
        baselines=("torch", "bf16"),
        flops=sum(gemm_flops(size, n, k) for size in sizes),
        bytes_moved=sum(sizes) * (k + 2 * n) + count * n * k,
    )  # fmt: skip


def _contenders(
    case: Case, settings: Settings, *, ours: Callable[[str], Callable[..., Tensor]],
    judge: Callable[[int, Callable[..., Tensor]], Check], operands: Callable[[int], tuple],
    whole: Callable[[int], Callable[[], object]],
    check_bf16: Callable[[int], Check], torch_mm: Callable[..., Tensor], for_torch: Callable[..., tuple],
    bf16: Callable[..., Tensor], bf16_operands: Callable[[int], tuple],
) -> list[Implementation]:  # fmt: skip
    """Our kernels, torch's on the same codes, and torch's in bf16 on what was quantised."""

    def prepared(run: Callable[..., Tensor], given: Callable[[int], tuple]) -> Callable[[int], Callable[[], object]]:
        def make(seed: int) -> Callable[[], object]:
            arguments = given(seed)
            return lambda: run(*arguments)

        return make

    machine = machine_refusal(torch.empty(0, device=settings.device)) or ""
    cpu = "" if settings.on_gpu else "torch's grouped products need a GPU"
    only_rows = "" if case["scales"] == "row" else "torch._scaled_grouped_mm takes scales of rows on Hopper"
    return [
        *(
            Implementation(
                name=name, role="ours", check=lambda seed, name=name: judge(seed, ours(name)),
                make=prepared(ours(name), operands), unavailable=machine if name == "hopper" else "",
            )
            for name in ("hopper", "portable")
        ),
        Implementation(
            name="hopper-quantize", role="ours", check=lambda seed: judge(seed, ours("hopper")), make=whole,
            unavailable=machine, note="quantised in the timed call",
        ),
        Implementation(
            name="torch", role="peer", check=lambda seed: judge(seed, lambda *x: torch_mm(*for_torch(*x))),
            make=prepared(torch_mm, lambda seed: for_torch(*operands(seed))), unavailable=cpu or only_rows,
            note="torch._scaled_grouped_mm, use_fast_accum=False",
        ),
        Implementation(
            name="bf16", role="reference", check=check_bf16, make=prepared(bf16, bf16_operands), unavailable=cpu,
            note="torch._grouped_mm",
        ),
    ]  # fmt: skip
