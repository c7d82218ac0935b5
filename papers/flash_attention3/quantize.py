"""The `quantize` experiment: rounding to e4m3 with a scale per 128 rows, which is to be as fast as a copy.

    hopper      our Gluon kernels: times the Hadamard matrix, or transposed, on tensor cores
    portable    the same in plain Triton, by butterflies
    copy        a device-to-device copy that moves as many bytes: half of them read, half written

Cases are 16-bit tensors of 8, 67 and 268 MB as q and k (with the random-sign Hadamard matrix) and as v (transposed, as
FP8 tensor cores want it). Rates count 2 bytes read and 1 written for each number, and the scales.

Source: FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.fp8 import BLOCK, fp8_block_quantize
from gpu_accel.flash_attention3.fp8_quantize import tensor_core_refusal
from gpu_accel.flash_attention3.reference_fp8 import quantize_reference
from gpu_accel.testing import generator, random_values
from gpu_accel.testing.quantized import hadamard_excess
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Timed, Workload

from .attention import refuse_changes, worse
from .cases import DTYPES, HIDDEN
from .decode import copying
from .judging import poison_free_memory

SIGNS = 0  # seed of the random signs of the Hadamard matrix
HEAD_DIMS = (64, 128)
SIZES = ((1, 2048), (2, 8192), (4, 16384))  # (batch, seqlen): 8, 67 and 268 MB
SIZES_QUICK = ((2, 8192),)
_CPU = (
    {"batch": 1, "seqlen": 131, "heads": 2, "head_dim": 64},
    {"batch": 1, "seqlen": 67, "heads": 1, "head_dim": 128},
)


def list_cases(settings: Settings) -> list[Case]:
    """Size x head_dim, times the Hadamard matrix and transposed; on a CPU two small ones; `settings.shapes` instead."""
    if settings.shapes:
        grid = [dict(given) for given in settings.shapes]
    elif settings.on_gpu:
        dims, sizes = ((128,), SIZES_QUICK) if settings.quick else (HEAD_DIMS, SIZES)
        grid = [{"batch": b, "seqlen": n, "head_dim": d} for d in dims for b, n in sizes]
    else:
        grid = [dict(shape) for shape in (_CPU[:1] if settings.quick else _CPU)]
    found = []
    for shape in grid:
        dim = int(shape.get("head_dim", 128))
        seqlen = next((int(shape[key]) for key in ("seqlen", "seqlen_k", "seqlen_q") if key in shape), 8192)
        made = {
            "pass": "quantize",
            "batch": int(shape.get("batch", 1)),
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "heads": int(shape.get("heads", max(1, HIDDEN // dim))),
            "head_dim": dim,
            "dtype": DTYPES[settings.precision],
            "input": settings.input,
        }
        found += [{**made, "with": what} for what in ("hadamard", "transpose")]
    return found


def build(case: Case, settings: Settings) -> Workload:
    """Our quantisers and a copy of as many bytes."""
    if case["input"] == "smollm2":
        raise UnsupportedError(
            "quantize draws its tensors, normal or with outliers: what bounds it is their size, not what is in them"
        )
    batch, heads, seqlen, dim = (int(case[key]) for key in ("batch", "heads", "seqlen_q", "head_dim"))
    moved = float(3 * batch * heads * seqlen * dim + 4 * batch * heads * -(-seqlen // BLOCK))
    found = [*(_ours(name, case, settings) for name in ("hopper", "portable")), copying(settings.device, moved)]
    return Workload(implementations=found, baselines=tuple(one.name for one in found), bytes_moved=moved)


def draw(case: Case, seed: int, device: str) -> Tensor:
    """(batch, heads, seqlen, head_dim) bfloat16, contiguous, in fresh memory."""
    shape = tuple(int(case[key]) for key in ("batch", "heads", "seqlen_q", "head_dim"))
    source = generator(seed, device)
    return random_values(shape, kind=str(case["input"]), dtype=torch.bfloat16, device=device, generator=source)


def judge(case: Case, x: Tensor, values: Tensor, scales: Tensor, *, exact: bool) -> Check:
    """Codes and scales against plain torch bit for bit (`exact`), or against the bound of sums on tensor cores."""
    hadamard = case["with"] == "hadamard"
    if hadamard and not exact:
        from gpu_accel.flash_attention3.hopper_quantize import sum_error  # needs a Triton with Gluon

        excess = hadamard_excess(x, values, scales, sum_error=sum_error(x.shape[-1]), seed=SIGNS)
        found = zip(excess, ("scales", "codes"), strict=True)
        # NaN stays first in max, and so does not pass
        return worse(*(Check(max(one, 0.0), 1.0, f"share of what {what} may be off") for one, what in found))
    twin, twin_scales = quantize_reference(x, hadamard=hadamard, seed=SIGNS, transpose=not hadamard)
    different = values.view(torch.uint8) != twin.view(torch.uint8)
    if not exact:  # transposed on tensor cores -0 becomes 0
        different &= (values.view(torch.uint8) | twin.view(torch.uint8)) & 0x7F != 0
    return Check(float(different.sum() + (scales != twin_scales).sum()), 0.0, "codes and scales that differ")


def _ours(name: str, case: Case, settings: Settings) -> Implementation:
    hadamard = case["with"] == "hadamard"
    options = dict(hadamard=hadamard, seed=SIGNS, transpose=not hadamard, backend=name)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_block_quantize(x, **options)

    def judged(x: Tensor, run: Callable[[], tuple[Tensor, Tensor]]) -> Check:
        poison_free_memory([x.view(torch.float8_e4m3fn)[..., : x.shape[-1]]])
        return judge(case, x, *run(), exact=name == "portable")

    def check(seed: int) -> Check:
        x = draw(case, seed, settings.device)
        return judged(x, lambda: quantize(x))

    def make(seed: int) -> Callable[[], object]:
        x = draw(case, seed, settings.device)

        def call() -> tuple[Tensor, Tensor]:
            return quantize(x)

        def verify() -> Check:
            refuse_changes([draw(case, seed, settings.device)], [x])
            return judged(x, call)

        return Timed(call, verify)

    how = "random-sign Hadamard matrix" if hadamard else "transposed"
    return Implementation(
        name=name, role="ours", unavailable=_refusal(name, case, settings), check=check, make=make,
        note=f"bfloat16 to e4m3, a scale per {BLOCK} rows, {how}",
    )  # fmt: skip


def _refusal(name: str, case: Case, settings: Settings) -> str:
    """Why a kernel of ours does not run here; empty when it does."""
    if name != "hopper":
        return ""
    hadamard = case["with"] == "hadamard"
    x = torch.empty(0, 1, 1, int(case["head_dim"]), dtype=torch.bfloat16, device=settings.device)
    return tensor_core_refusal(x, BLOCK, True, hadamard, not hadamard, False) or ""
