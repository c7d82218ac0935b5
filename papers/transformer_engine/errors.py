"""The `error` experiment: what every scheme makes of activations, of weights, and of their product.

    rel_error           of the activations, 2-norm relative to theirs
    weight_rel_error    of the weights
    product_rel_error   of the product of both, in exact arithmetic on the numbers that the codes mean
    sqnr                of the activations in decibels, -20 log10(rel_error)
    bits                a value of the activations takes, scales included, six-bit codes packed

Nothing here depends on a GPU: codes are the same bits everywhere. The bound of the check: twice what rounding each
value to the element's significand costs at most, or for integers half a step of its block for every value.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference import block_amax, spread
from gpu_accel.transformer_engine.reference_gemm import exact_values
from gpu_accel.transformer_engine.scales import amax_bits
from gpu_accel.transformer_engine.schemes import INTEGERS, SCHEMES, Scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import inputs

# name -> (scheme of activations, scheme of weights); by default both alike
PAIRS = {name: (name, name) for name in SCHEMES} | {
    "fp8_block": ("fp8_1x128", "fp8_128x128"),
    "nvfp4_2d": ("nvfp4", "nvfp4_16x16"),
    "nvfp4_hadamard": ("e2m1:1x16:nvfp4:hadamard16", "e2m1:1x16:nvfp4:hadamard16"),
    "mxfp4_floor": ("e2m1:1x32:e8m0:floor", "e2m1:1x32:e8m0:floor"),
    "mxfp8_floor": ("e4m3:1x32:e8m0:floor", "e4m3:1x32:e8m0:floor"),
}


def list_cases(settings: Settings) -> list[Case]:
    """All three inputs when none in particular is asked for (`normal` is the default of --input)."""
    m, n, k = (1024, 1024, 4096) if settings.on_gpu else (64, 64, 512)
    tokens = inputs.TOKENS if settings.on_gpu else 128
    found: list[Case] = []
    for kind in ("normal", "outliers", "smollm2") if settings.input in ("normal", "python") else (settings.input,):
        if kind != "smollm2":
            found.append({"operand": "drawn", "m": m, "n": n, "k": k, "dtype": "bf16", "input": kind})
            continue
        for name, (rows, cols) in inputs.MODULES.items():
            found.append(
                {"operand": name, "m": tokens, "n": rows, "k": cols, "dtype": "bf16", "input": kind}
            )  # fmt: skip
    return found


def _relative(out: Tensor, truth: Tensor) -> float:
    return float((out - truth).norm() / truth.norm())


def bound_of(what: Scheme, x: Tensor) -> float:
    """Twice the worst relative error of the element's significand; for integers half a step of its block everywhere."""
    if what.element in INTEGERS:
        amax = block_amax(amax_bits(x, finite_only=True), what).view(torch.float32)
        half = spread(amax, *x.shape, what).double() / what.largest / 2
        return 1.001 * float(half.norm() / x.double().norm())  # the scale itself is rounded to float32
    return 2 * 2.0 ** -(formats.FORMATS[what.element].mantissa_bits + 1)


def bits_of(q: QuantizedTensor) -> float:
    """Bits a value takes, of what is kept row-wise."""
    assert q.codes is not None and q.scales is not None
    codes = formats.pack_sixes(q.codes) if q.scheme.bits == 6 else q.codes
    parts = (codes, q.scales, q.tensor_scale)
    return 8 * sum(t.numel() * t.element_size() for t in parts if t is not None) / q.numel()


def build(case: Case, settings: Settings) -> Workload:
    """Every scheme on one input."""
    if why := inputs.why_not(case):
        raise UnsupportedError(why)
    backend = "portable" if settings.on_gpu else "reference"

    @functools.lru_cache(maxsize=1)
    def truths(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        x, w = inputs.make(case, seed, settings.device)
        return x, w, x.double() @ w.double().t()

    @functools.lru_cache(maxsize=64)
    def errors(name: str, seed: int) -> tuple[float, float, float, float]:
        x, w, truth = truths(seed)
        a, b = (quantize(t, s, backend=backend) for t, s in zip((x, w), PAIRS[name], strict=True))
        product = exact_values(a) @ exact_values(b).t()
        values = [_relative(q.dequantize(torch.float32).double(), t.double()) for q, t in ((a, x), (b, w))]
        return values[0], values[1], _relative(product, truth), bits_of(a)

    def check(name: str, seed: int) -> Check:
        from gpu_accel.transformer_engine.schemes import scheme

        return Check(errors(name, seed)[0], bound_of(scheme(PAIRS[name][0]), truths(seed)[0]), "relative error")

    def values(name: str, seed: int) -> dict[str, tuple[float, str]]:
        own, weights, product, bits = errors(name, seed)
        return {
            "rel_error": (own, "1"),
            "weight_rel_error": (weights, "1"),
            "product_rel_error": (product, "1"),
            "sqnr": (-20 * math.log10(own), "dB"),
            "bits": (bits, "bits"),
        }

    return Workload(
        implementations=[
            Implementation(
                name=name,
                role="ours",
                check=functools.partial(check, name),
                values=functools.partial(values, name),
                note=f"activations {PAIRS[name][0]}, weights {PAIRS[name][1]}",
            )
            for name in PAIRS
        ],
        input_source=inputs.source_of(case),
    )
