"""`dynamic_precision_select`: which precision for an operation on a GPU, and why, from the hardware profiles.

The choice is the fastest precision that the GPU has units for and whose error is allowed. Times are modelled (roofline
of the product plus reading and writing what is quantised) and say so; they are no measurements. Errors are those of a
product of normal values, made by `product_error` below on this machine when the table is asked for; real layers
differ, so measure those (`papers/transformer_engine`, experiment `error`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.hardware import Profile, Roofline, gemm_flops, profile

# precision -> (peak of the profile that it needs, scheme, bytes of a value, first NVIDIA compute capability with units)
CANDIDATES: dict[str, tuple[str, str, float, tuple[int, int]]] = {
    "bf16": ("bf16", "", 2.0, (8, 0)),
    "fp8": ("fp8", "fp8_row", 1.0, (8, 9)),
    "mxfp8": ("fp8", "mxfp8", 1.03125, (10, 0)),
    "nvfp4": ("fp4", "nvfp4", 0.5625, (10, 0)),
}
MATMULS = ("matmul", "linear", "gemm", "qkv", "mlp")
SENSITIVE = {
    "softmax": "sums of exponentials need the range and bits of float32",
    "layernorm": "a mean and a variance are differences of sums",
    "rmsnorm": "a sum of squares needs float32",
    "loss": "logarithms of small probabilities",
    "router": "a wrong expert costs more than the product saves",
    "embedding": "a lookup has no product to speed up",
    "optimizer": "small updates vanish beside large weights",
}


@dataclass(frozen=True)
class PrecisionChoice:
    """What was chosen. `scheme` is for `quantize` ("" for none), `modelled_ms` the modelled times by precision."""

    precision: str
    scheme: str
    why: str
    modelled_ms: Mapping[str, float]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.precision}: {self.why}"]
        lines += [f"  {name}: {time:.4f} ms (modelled)" for name, time in self.modelled_ms.items()]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


@functools.cache
def product_error(name: str) -> float:
    """Relative error (2-norm) of a product of normal values under a scheme: exact arithmetic on rounded operands."""
    from gpu_accel.transformer_engine.quantizer import quantize
    from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 512, generator=generator) for _ in range(2))
    truth = a.double() @ b.double().t()
    if not name:
        out = a.bfloat16().double() @ b.bfloat16().double().t()
    else:
        out = scaled_mm_reference(*(quantize(x, name, backend="reference") for x in (a, b)))
    return float((out - truth).norm() / truth.norm())


def _refused(name: str, gpu: Profile, allowed: float) -> str:
    peak, scheme, _, needed = CANDIDATES[name]
    try:
        gpu.peak(peak)
    except UnsupportedError as why:  # no units, or no figure for them: the profile knows which
        return str(why)
    major, _, minor = gpu.capability.partition(".")
    if gpu.vendor == "NVIDIA" and (int(major), int(minor or 0)) < needed:
        return f"its block scales need compute capability {needed[0]}.{needed[1]}, this is {gpu.capability}"
    if gpu.vendor != "NVIDIA" and name in ("mxfp8", "nvfp4"):
        return "the kernels here know its units on NVIDIA GPUs only"
    error = product_error(scheme)
    if error > allowed:
        return f"its error on normal values is {error:.1%}, more than the {allowed:.1%} allowed"
    return ""


def modelled_time(name: str, gpu: Profile, m: int, n: int, k: int) -> float:
    """Milliseconds of a (m, k) x (k, n) product: the roofline of the product, plus quantising the (m, k) operand.

    Weights are taken as quantised beforehand; quantising reads two bytes a value and writes the narrow one.
    """
    peak, scheme, size, _ = CANDIDATES[name]
    roof = Roofline(gpu)
    product = roof.time(gemm_flops(m, n, k), size * (m * k + n * k) + 2.0 * m * n, peak)
    return product + (roof.memory_time((2.0 + size) * m * k) if scheme else 0.0)


def dynamic_precision_select(
    operation: str | Mapping[str, Any], hardware: str, *, max_error: float = 0.05
) -> PrecisionChoice:
    """The precision for an operation on a GPU, with the reason.

    Args:
        operation: a name ("matmul", "linear", "qkv", "mlp", "softmax", "layernorm", "loss", ...), or a mapping with
            `name` and, for products, `m`, `n`, `k` (default 4096 each).
        hardware: a profile such as "h100" or "b200" (`gpu-accel hardware`).
        max_error: the largest relative error of a product that is acceptable.

    Raises:
        InvalidInputError: an unknown operation, GPU or size.
    """
    if not isinstance(operation, str | Mapping):
        raise InvalidInputError(f"operation must be a name or a mapping, got {type(operation).__name__}")
    given = {"name": operation} if isinstance(operation, str) else dict(operation)
    name = given.pop("name", "matmul")
    sizes: list[Any] = [given.pop(key, 4096) for key in ("m", "n", "k")]
    if given:
        raise InvalidInputError(f"an operation has name, m, n and k, not {', '.join(map(str, given))}")
    if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in sizes):
        raise InvalidInputError(f"m, n and k must be positive integers, got {sizes}")
    if isinstance(max_error, bool) or not isinstance(max_error, int | float) or not max_error > 0:
        raise InvalidInputError(f"max_error must be a positive number, got {shown(max_error)}")
    gpu = profile(hardware)
    if name in tuple(SENSITIVE):  # compared, not hashed: it may be anything
        return PrecisionChoice("fp32", "", f"{name} stays in float32: {SENSITIVE[name]}", {}, {})
    if name not in MATMULS:
        raise InvalidInputError(f"operation {name!r} is unknown; one of {', '.join((*MATMULS, *SENSITIVE))}")
    refused = {one: why for one in CANDIDATES if (why := _refused(one, gpu, max_error))}
    times = {one: modelled_time(one, gpu, *sizes) for one in CANDIDATES if one not in refused}
    if not times:
        return PrecisionChoice("fp32", "", "no narrower precision is allowed", {}, refused)
    best = min(times, key=lambda one: times[one])
    m, n, k = sizes
    why = f"least modelled time for {m} x {k} by {k} x {n} on {gpu.title}"
    if best != "bf16" and "bf16" in times:
        why += f", {times['bf16'] / times[best]:.2f} times as fast as bf16 with quantising counted"
    elif len(times) > 1:
        why += ": quantising would cost more than the narrower product saves"
    return PrecisionChoice(best, CANDIDATES[best][1], why, times, refused)
