"""The `quantize` experiment: our kernels next to a copy of as many bytes (the ceiling) and to plain torch.

    portable    `quantize`, Triton
    copy        torch's copy, on the device, of exactly as many bytes as the case must move
    torch       the same quantisation in eager torch, as people write it
    torch-compile  that by torch.compile, of three schemes, rows alone (compiling takes longer than everything else)

The bytes of a case: the tensor read once, codes and scales written once, whatever an implementation really moves.
So the ratio of times to `copy` is the share of a copy's bandwidth that was reached. With a scale per tensor from the
tensor itself ("fp8") it has to be read twice, so about 0.6 is the most there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference import block_grid, quantize_reference
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import inputs

# name of the case -> (scheme, whether the scale is given)
SCHEMES = {
    "fp8": ("fp8", False),
    "fp8-delayed": ("fp8", True),
    "fp8_e5m2": ("fp8_e5m2", False),
    "fp8_row": ("fp8_row", False),
    "fp8_1x128": ("fp8_1x128", False),
    "fp8_128x128": ("fp8_128x128", False),
    "mxfp8": ("mxfp8", False),
    "mxfp4": ("mxfp4", False),
    "nvfp4": ("nvfp4", False),
    "int8_row": ("int8_row", False),
    "int4_128": ("int4_128", False),
}
QUICK = ("fp8-delayed", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
COMPILED = ("fp8-delayed", "fp8_row", "fp8_1x128")
GIVEN_SCALE = 2.0**-6  # of N(0, 1) and its outliers nothing saturates


def list_cases(settings: Settings) -> list[Case]:
    """Every scheme, rows alone and both copies; on a CPU one small ragged tensor."""
    sizes = ((8192, 8192),) if settings.on_gpu else ((37, 160),)
    names = QUICK if settings.quick else tuple(SCHEMES)
    kind = inputs.drawn(settings)  # nothing here depends on the values
    copies = ("rows", "both") if not settings.quick else ("rows",)
    found: list[Case] = [
        {"scheme": name, "copies": c, "m": m, "k": k, "n": 1, "dtype": "bf16", "input": kind}
        for name in names
        for c in copies
        for m, k in sizes
    ]
    if settings.quick and settings.on_gpu:
        found += [{**found[0], "scheme": name, "copies": "both"} for name in ("fp8_1x128", "mxfp8")]
    return found


def bytes_moved(case: Case) -> int:
    """Bytes that must be read and written."""
    m, k = int(case["m"]), int(case["k"])
    what = find_scheme(SCHEMES[str(case["scheme"])][0])
    total = 2 * m * k
    for rows, cols in ((m, k), (k, m))[: 2 if case["copies"] == "both" else 1]:
        down, across = block_grid(rows, cols, what)
        total += rows * (-(-cols // 2) if what.packed else cols)
        total += down * across * (4 if what.scale in ("fp32", "pow2") else 1)
    return total


def build(case: Case, settings: Settings) -> Workload:
    """Ours, the copy, and plain torch."""
    name, given = SCHEMES[str(case["scheme"])]
    what, both = find_scheme(name), case["copies"] == "both"
    device = settings.device

    def data(seed: int) -> tuple[Tensor, Tensor | None]:
        x, _ = inputs.make(case, seed, device)
        return x, torch.full((), GIVEN_SCALE, device=device) if given else None

    def ours(x: Tensor, scale: Tensor | None):
        return quantize(x, what, columnwise=both, scale=scale, backend="portable")

    def check_ours(seed: int) -> Check:
        x, scale = data(seed)
        wrong = 0
        q = ours(x, scale)
        for prefix, matrix in (("", x), ("col_", x.t()))[: 1 + both]:
            truth = quantize_reference(matrix, what, scale=scale)
            codes, scales = getattr(q, f"{prefix}codes"), getattr(q, f"{prefix}scales")
            wrong += int((codes.view(torch.uint8) != truth.codes).sum())
            wrong += int((scales.reshape(-1).view(torch.uint8) != truth.scales.reshape(-1).view(torch.uint8)).sum())
        return Check(float(wrong), 0.0, "bytes that differ from the reference")

    def check_copy(seed: int) -> Check:
        source = torch.randint(0, 256, (bytes_moved(case) // 2,), dtype=torch.uint8, device=device)
        target = torch.full_like(source, 0xFF)
        target.copy_(source)
        return Check(float((source != target).sum()), 0.0, "bytes that differ")

    def make_copy(seed: int) -> Callable[[], object]:
        source = torch.randint(0, 256, (bytes_moved(case) // 2,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def make_ours(seed: int) -> Callable[[], object]:
        x, scale = data(seed)
        return lambda: ours(x, scale)

    plain = PLAIN.get(what.element if what.element in ("e4m3", "int8") else "")
    why = "" if plain else f"torch has no {what.element}"

    def check_torch(seed: int) -> Check:
        assert plain is not None
        x, scale = data(seed)
        values = plain(x, what, scale)
        error = (values - x.float()).norm() / x.float().norm()
        truth = quantize(x, what, scale=scale, backend="reference").dequantize(torch.float32)
        ruler = (truth - x.float()).norm() / x.float().norm()
        return Check(float(error), 1.1 * float(ruler), "relative error of the values")

    def make_torch(seed: int) -> Callable[[], object]:
        x, scale = data(seed)
        codes = CODES[what.element]
        return lambda: [codes(part, what, scale) for part in ((x, x.t()) if both else (x,))]

    def compiled() -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
        return torch.compile(lambda x, scale: torch_codes(x, what, scale), dynamic=False)

    def check_compiled(seed: int) -> Check:
        x, scale = data(seed)
        codes, made = compiled()(x, scale)
        values = (codes.float() * made).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
        truth = quantize(x, what, scale=scale, backend="reference").dequantize(torch.float32)
        error, ruler = ((v - x.float()).norm() / x.float().norm() for v in (values, truth))
        return Check(float(error), 1.1 * float(ruler), "relative error of the values")

    def make_compiled(seed: int) -> Callable[[], object]:
        x, scale = data(seed)
        run = compiled()
        return lambda: run(x, scale)

    why_compiled = "" if settings.on_gpu else "compiled on a GPU only"
    if case["scheme"] not in COMPILED or both:
        why_compiled = f"compiled for {', '.join(COMPILED)} only, rows alone"
    return Workload(
        implementations=[
            Implementation(name="portable", role="ours", check=check_ours, make=make_ours, note=f"scheme {what.text}"),
            Implementation(
                name="copy", role="reference", check=check_copy, make=make_copy, note="torch copy_ of as many bytes"
            ),
            Implementation(
                name="torch", role="peer", unavailable=why, check=check_torch, make=make_torch,
                note="eager torch operations",
            ),
            Implementation(
                name="torch-compile", role="peer", unavailable=why_compiled, check=check_compiled, make=make_compiled,
                note="the same operations by torch.compile",
            ),
        ],
        baselines=("copy", "torch", "torch-compile"),
        bytes_moved=bytes_moved(case),
    )  # fmt: skip


# -- plain torch


def _blocks(x: Tensor, what: Scheme) -> Tensor:
    """x (M, K) padded and cut into (row blocks, rows, column blocks, columns)."""
    rows, cols = x.shape
    r, c = what.block[0] or rows, what.block[1] or cols
    padded = torch.nn.functional.pad(x, (0, -cols % c, 0, -rows % r))
    return padded.view(padded.shape[0] // r, r, padded.shape[1] // c, c)


def torch_codes(x: Tensor, what: Scheme, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes in blocks, scales) as eager torch makes them."""
    blocks = _blocks(x, what)
    if scale is None:
        amax = blocks.abs().amax((1, 3), keepdim=True).float()
        scale = amax / what.largest
        if what.scale == "e8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scale = torch.where(amax > 0, scale, 1.0)
    scaled = (blocks / scale).clamp(-what.largest, what.largest)
    if what.element == "int8":
        return scaled.round().to(torch.int8), scale
    return scaled.to(formats.FORMATS[what.element].dtype), scale


def torch_values(x: Tensor, what: Scheme, scale: Tensor | None) -> Tensor:
    """What those codes mean, (M, K) float32."""
    codes, made = torch_codes(x, what, scale)
    values = codes.float() * made
    return values.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]


PLAIN = {"e4m3": torch_values, "int8": torch_values}
CODES = {"e4m3": torch_codes, "int8": torch_codes}
