"""The `norms` experiment: what memory bounds (fused rows, rotary, gated activations, short convolutions, losses) next
to a copy of as many bytes (the ceiling) and to torch.

    portable         ours, plain Triton
    hopper           ours, rows in shared memory (Gluon), where there is a kernel for them
    copy             torch's copy, on the device, of as many bytes as the case must move
    copy-kernel      as many bytes by an elementwise kernel of torch (every bit turned): copies of 256 MB, which the
                     driver does, read 2.7 of 4.3 TB/s on an H200
    torch            torch's own functions, eager
    torch-compile    the same under torch.compile

Bytes: every input read once, every result written once. So the ratio of times to a copy is the share of its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.rotary import apply_rotary
from gpu_accel.thunderkittens import causal_conv1d, elements, losses, row_ring, rows
from gpu_accel.workbench.experiment import (
    Case,
    Check,
    Implementation,
    Settings,
    Workload,
    completed,
    refuse_beyond_memory,
)

from . import judging
from .judging import DTYPES, Function, randn
from .sequences import PASSES, hopper_refusal

OPS = ("rms_norm", "layer_norm", "add_rms_norm", "softmax", "swiglu")
# At one width: what has no row to reduce, or one whose length its model sets. Channels of the short convolution are
# innermost, as Mamba-2 has them.
ONCE = {"rotary": 128, "geglu": 16384, "conv1d": 4096, "cross_entropy": 32768}
_LONG = ("rms_norm", "layer_norm", "softmax")  # which have a kernel for long rows
_RINGS = {"rms_norm": "rms", "layer_norm": "layer", "add_rms_norm": "add_rms", "softmax": "softmax"}  # of row_ring
_TAPS = 4  # of the short convolution
_BASE = 10000.0
AXES = {"rows": 4096, "width": 4096}
WORDS = {"op": (*OPS, *ONCE), "pass": PASSES}


def list_cases(settings: Settings) -> list[Case]:
    """2^27 elements on a GPU, at the widths where others drop first; on a CPU a few odd rows.

    `settings.shapes` take their place, for every op where they name none.
    """
    widths = [16384, 4096, 65536, 1024, 8192][: 2 if settings.quick else None] if settings.on_gpu else [48]
    total = 2**27 if settings.on_gpu else 48 * 5
    once = [(op, width if settings.on_gpu else 48) for op, width in ONCE.items()]
    pairs = [(op, width) for width in widths for op in OPS]
    own: list[Case] = [
        {"op": op, "rows": total // width, "width": width, "pass": pass_, "dtype": settings.precision,
         "input": "normal"}
        for op, width in pairs[: len(OPS)] + once + pairs[len(OPS) :]
        for pass_ in PASSES
    ]  # fmt: skip
    if not settings.shapes:
        return own
    firsts = [next(case for case in own if case["op"] == op) for op in WORDS["op"]]
    return [
        case
        for first in firsts
        for case in completed(
            [shape for shape in settings.shapes if shape.get("op", first["op"]) == first["op"]], first, {"pass": PASSES}
        )
    ]


def _inputs(case: Case, seed: int, device: str) -> list[Tensor]:
    count, width, dtype = int(case["rows"]), int(case["width"]), DTYPES[str(case["dtype"])]

    def whole(n: int) -> Tensor:
        return randn(count, width, seed=8 * seed + n, device=device, dtype=dtype)

    def vector(n: int) -> Tensor:
        return randn(width, seed=8 * seed + n, device=device, dtype=dtype)

    return {
        "rms_norm": lambda: [whole(0), vector(1)],
        "layer_norm": lambda: [whole(0), vector(1), vector(2)],
        "add_rms_norm": lambda: [whole(0), vector(1), whole(2)],
        "softmax": lambda: [whole(0)],
        "rotary": lambda: [whole(0)],
        "swiglu": lambda: [whole(0), whole(1)],
        "geglu": lambda: [whole(0), whole(1)],
        "conv1d": lambda: [whole(0), randn(width, _TAPS, seed=8 * seed + 1, device=device, dtype=dtype), vector(2)],
        "cross_entropy": lambda: [whole(0)],
    }[str(case["op"])]()


def _tables(count: int, width: int, device) -> tuple[Tensor, Tensor]:
    inverse = _BASE ** -(torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angles = torch.arange(count, device=device, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


_SEQLEN = 4096


def _seqlen(rows: int) -> int:
    """Steps of a sequence: all rows are one where they are not made of such as long as usual."""
    return rows if rows % _SEQLEN else _SEQLEN


def _turned(x: Tensor) -> Tensor:
    """(rows, width) as (batch, seqlen, one head, width)."""
    return x.view(-1, _seqlen(x.shape[0]), 1, x.shape[1])


def _filtered(backend: str) -> Function:
    def call(x, weight, bias):
        # views alone: an index would have its gradient written into zeros, twice the bytes of the case beside it
        channels = x.view(-1, _seqlen(x.shape[0]), x.shape[1]).transpose(1, 2)
        y = causal_conv1d.causal_conv1d_fn(channels, weight, bias, activation="silu", backend=backend)
        return y.transpose(1, 2).reshape(x.shape)

    return call


def _targets(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device) * 7919 % x.shape[1]


def _losses(backend: str) -> Function:
    known: list[Tensor] = []  # made once, not in what is timed

    def call(x):
        if not known:
            known.append(_targets(x))
        return losses.cross_entropy(x, known[0], reduction="none", backend=backend)

    return call


def _ours(case: Case, device: str, backend: str) -> Function:
    cos_sin: list[Tensor] = []

    def turn(x):
        four = _turned(x)
        if not cos_sin:
            cos_sin.extend(_tables(four.shape[1], four.shape[3], x.device))
        return elements.rotary(four, *cos_sin, backend=backend).view(x.shape)

    return {
        "rms_norm": lambda x, w: rows.rms_norm(x, w, backend=backend),
        "layer_norm": lambda x, w, b: rows.layer_norm(x, w, b, backend=backend),
        "add_rms_norm": lambda x, w, r: rows.rms_norm(x, w, residual=r, prenorm=True, backend=backend),
        "softmax": lambda x: rows.softmax(x, backend=backend),
        "rotary": turn,
        "swiglu": lambda a, b: elements.silu_mul(a, b, backend=backend),
        "geglu": lambda a, b: elements.gelu_mul(a, b, backend=backend),
        "conv1d": _filtered(backend),
        "cross_entropy": _losses(backend),
    }[str(case["op"])]


def _torch(case: Case) -> Function:
    width = int(case["width"])
    cos_sin: list[Tensor] = []

    def add(x, w, r):
        h = x + r
        return F.rms_norm(h, (width,), w, 1e-6), h

    def turn(x):
        four = _turned(x)
        if not cos_sin:
            cos_sin.extend(_tables(four.shape[1], width, x.device))
        positions = torch.arange(four.shape[1], device=x.device).repeat(four.shape[0])
        return apply_rotary(four.flatten(0, 1), *cos_sin, positions, interleaved=False).view(x.shape)

    return {
        "rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
        "layer_norm": lambda x, w, b: F.layer_norm(x, (width,), w, b),
        "add_rms_norm": add,
        "softmax": lambda x: torch.softmax(x, -1),
        "rotary": turn,
        "swiglu": lambda a, b: F.silu(a) * b,
        "geglu": lambda a, b: F.gelu(a, approximate="tanh") * b,
        "conv1d": _filtered("reference"),
        "cross_entropy": lambda x: F.cross_entropy(x.float(), _targets(x), reduction="none"),
    }[str(case["op"])]


def bytes_moved(case: Case) -> int:
    """Tensors of the whole size that must be read and written; vectors and statistics do not count."""
    forward = {"rms_norm": 2, "layer_norm": 2, "add_rms_norm": 4, "softmax": 2, "rotary": 2, "swiglu": 3, "geglu": 3,
               "conv1d": 2, "cross_entropy": 1}  # fmt: skip
    # x or y and the gradient in, the gradient out; two gradients each way beside a residual, whose own is a copy
    backward = {"rms_norm": 3, "layer_norm": 3, "add_rms_norm": 5, "softmax": 3, "rotary": 2, "swiglu": 5, "geglu": 5,
                "conv1d": 3, "cross_entropy": 2}  # fmt: skip
    count = (forward if case["pass"] == "forward" else backward)[str(case["op"])]
    return count * int(case["rows"]) * int(case["width"]) * DTYPES[str(case["dtype"])].itemsize


def build(case: Case, settings: Settings) -> Workload:
    """Ours, the copy, torch eager and compiled."""
    backward, device = case["pass"] == "backward", settings.device
    refuse_beyond_memory(int(case["rows"]) * int(case["width"]))
    if case["op"] == "rotary" and int(case["width"]) % 2:
        raise UnsupportedError(f"rotary turns pairs, so its width is even, not {case['width']}")
    eager = _torch(case)
    exact = _ours(case, device, "reference")
    # Softmax's gradient reads y, which torch too keeps in the dtype of x. Beside a ruler that keeps it in float32, y
    # right and rounded once, with float64 after it, erred 1.054 of the bound (8192 x 16384, seed 0, H200).
    ruler = eager if case["op"] == "softmax" and backward else exact
    known: dict = {}

    def compiled() -> Function:
        torch._dynamo.reset()  # a width or a pass more of the same code: after eight of them it would be left eager
        return torch.compile(_torch(case), dynamic=False)

    def made(name: str, role: str, function: Callable[[], Function], why: str = ""):
        def check(seed: int) -> Check:
            return judging.judge(function(), exact, ruler, _inputs(case, seed, device), seed, backward,
                                 settings.on_gpu, known=known)  # fmt: skip

        def make(seed: int):
            return judging.timed(function(), _inputs(case, seed, device), seed, backward)

        return Implementation(name=name, role=role, check=check, make=make, unavailable=why)

    def buffers() -> tuple[Tensor, Tensor]:
        source = torch.randint(0, 256, (bytes_moved(case) // 2,), dtype=torch.uint8, device=device)
        return source, torch.empty_like(source)

    def check_copy(seed: int) -> Check:
        source, target = buffers()
        target.copy_(source)
        return Check(float((source != target).sum()), 0.0, "bytes that differ")

    def make_copy(seed: int):
        source, target = buffers()
        return lambda: target.copy_(source)

    def words() -> tuple[Tensor, Tensor]:
        source, target = buffers()
        whole = source.numel() % 4 == 0
        return (source.view(torch.int32), target.view(torch.int32)) if whole else (source, target)

    def check_turned(seed: int) -> Check:
        source, target = words()
        torch.bitwise_not(source, out=target)
        return Check(float((~source != target).sum()), 0.0, "words that differ")

    def make_turned(seed: int):
        source, target = words()
        return lambda: torch.bitwise_not(source, out=target)

    hopper = []
    long = case["op"] in _LONG and int(case["width"]) > rows.WHOLE and not backward
    if long or (case["pass"], _RINGS.get(str(case["op"])), case["width"]) in row_ring.CHOSEN:
        why = hopper_refusal(settings, str(case["dtype"]))
        hopper = [made("hopper", "ours", lambda: _ours(case, device, "hopper"), why)]
    return Workload(
        implementations=[
            made("portable", "ours", lambda: _ours(case, device, "portable")),
            *hopper,
            Implementation(
                name="copy", role="reference", check=check_copy, make=make_copy, note="torch copy_ of as many bytes"
            ),
            Implementation(
                name="copy-kernel", role="reference", check=check_turned, make=make_turned, note="torch.bitwise_not"
            ),
            made("torch", "peer", lambda: eager),
            made("torch-compile", "peer", compiled, why="" if settings.on_gpu else "torch.compile is for GPUs here"),
        ],
        baselines=("copy-kernel", "copy", "torch", "torch-compile"),
        bytes_moved=bytes_moved(case),
    )
