"""The `longconv` experiment: convolutions as long as the sequence, forward, next to torch.fft in the same run.

    portable             ours, plain Triton; the filter is transformed in every call
    portable-kept        the same with the transform of the filter kept, as ThunderKittens' timings have it
    torch                torch.fft, the filter transformed in every call
    torch-kept           the same with the transform of the filter kept

FlashFFTConv's own kernels are CUDA sources that are not built here; its published times are claims (`longconv.ffc.*`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.thunderkittens.long_conv import SIZES, FlashFFTConv, long_conv_reference
from gpu_accel.workbench.experiment import (
    TRUE_OR_FALSE,
    Case,
    Check,
    Implementation,
    Settings,
    Workload,
    completed,
    refuse_beyond_memory,
)

from . import judging
from .judging import DTYPES, randn

# batch, channels, length of the transform, gated: the paper's, and two of FlashFFTConv's table
_SHAPES = [(16, 1024, 1024, False), (16, 1024, 4096, False), (64, 768, 1024, True), (64, 768, 4096, True)]
AXES = {"batch": 16, "channels": 1024, "length": 4096}
WORDS = {"gated": TRUE_OR_FALSE}


def list_cases(settings: Settings) -> list[Case]:
    """The paper's shapes, on a CPU a small one; `settings.shapes` take their place."""
    shapes = _SHAPES[: 2 if settings.quick else None] if settings.on_gpu else [(2, 3, 256, True)]
    names = ("batch", "channels", "length", "gated")
    own: list[Case] = [
        dict(zip(names, shape, strict=True)) | {"pass": "forward", "dtype": settings.precision, "input": "normal"}
        for shape in shapes
    ]
    return completed(settings.shapes, own[0]) if settings.shapes else own


def _inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    """u, k (float32) and, where gated, two gates; circular over the whole length, as the paper's timings."""
    batch, channels, length = (int(case[n]) for n in ("batch", "channels", "length"))
    shape, dtype = (batch, channels, length), DTYPES[str(case["dtype"])]
    count = 3 if case["gated"] else 1
    u, *gates = (randn(*shape, seed=8 * seed + n, device=device, dtype=dtype) for n in range(count))
    return [u, randn(channels, length, seed=8 * seed + 5, device=device) / length**0.5, *gates]


def _torch(length: int, kept: bool) -> Callable[..., Tensor]:
    spectra: list[tuple[Tensor, Tensor]] = []

    def call(u, k, pre=None, post=None):
        if not kept:
            return long_conv_reference(u, k, pre, post, length)
        if not spectra or spectra[0][0] is not k:
            spectra[:] = [(k, torch.fft.rfft(k.float(), n=length))]
        x = u.float() if pre is None else u.float() * pre
        y = torch.fft.irfft(torch.fft.rfft(x, n=length) * spectra[0][1], n=length)
        return (y if post is None else y * post).to(u.dtype)

    return call


def build(case: Case, settings: Settings) -> Workload:
    length, on_gpu = int(case["length"]), settings.on_gpu
    make_inputs = functools.partial(_inputs, case, device=settings.device)
    refuse_beyond_memory(int(case["batch"]) * int(case["channels"]) * length)
    if length not in SIZES:
        raise UnsupportedError(f"transforms of {', '.join(map(str, SIZES))} are made, not of {length}")
    exact = _torch(length, False)

    def made(name: str, role: str, fresh: Callable[[], Callable[..., Tensor]], note: str = ""):
        """`fresh` makes a function that keeps nothing of other inputs."""

        def check(seed: int) -> Check:
            return judging.judge(fresh(), exact, exact, make_inputs(seed), seed, False, on_gpu)

        def make(seed: int):
            return judging.timed(fresh(), make_inputs(seed), seed, False)

        return Implementation(name=name, role=role, check=check, make=make, note=note)

    def ours(kept: bool):
        return lambda: FlashFFTConv(length, keep_spectrum=kept, backend="portable")

    steps = int(case["batch"]) * int(case["channels"]) * length
    size = DTYPES[str(case["dtype"])].itemsize
    return Workload(
        implementations=[
            made("portable", "ours", ours(False), "the filter is transformed in every call"),
            made("portable-kept", "ours", ours(True), "the transform of the filter is kept"),
            made("torch", "peer", lambda: _torch(length, False), "the filter is transformed in every call"),
            made("torch-kept", "peer", lambda: _torch(length, True), "the transform of the filter is kept"),
        ],
        baselines=("torch", "torch-kept"),
        flops=20.0 * steps * (length.bit_length() - 1),
        bytes_moved=steps * size * (4 if case["gated"] else 2) + 4.0 * int(case["channels"]) * length,
    )
