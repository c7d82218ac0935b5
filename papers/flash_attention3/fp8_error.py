"""The `fp8-error` experiment: how far from float64 each recipe of the paper's table 3 ends, on three kinds of input.

    recipe                        table 3                       here
    fp16-standard                 standard attention, fp16      emulated: fp16 operands, scores and P; float32 sums
    portable-fp16                 FlashAttention-3, fp16        our kernel
    sdpa-flash-fp16               FlashAttention-2, fp16        torch's flash attention
    fp8-baseline                  FP8, a scale per tensor       emulated: softmax values in fp16, P in e4m3
    portable                      FP8 FlashAttention-3          our kernel: block scales and Hadamard
    portable-tensor-hadamard      ... without block scales      our kernel
    portable-block                ... without Hadamard          our kernel
    hopper, hopper-...            the same four                 our Gluon kernel, on inputs in fp16 already
    fp8-..., fp16-flash           -                             the kernels' recipes emulated in torch, for comparison

Metrics: rmse against float64 attention of the inputs before any rounding (they are drawn in float32; rounding them to
fp16 is part of every recipe), and rel_error, the rmse divided by the root mean square of the true output.

The paper does not give the shape. Ours is batch 1, 16 heads, 8192 keys, head_dim 128, no mask, and seed 0; a shorter
one is beside it, because the error of the FP8 recipes grows with the number of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import fp8, hopper_fp8
from gpu_accel.flash_attention3.fp8_error import RECIPES, Recipe, run_recipe
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.testing import QKV, relative_error, rmse, yardstick_attention
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

from . import cases, fp8_forward, inputs
from .judging import poison_free_memory
from .peers import contenders, problem_of, refusals

INPUTS = ("normal", "outliers", "smollm2")
SHAPE = {"batch": 1, "seqlen_q": 8192, "seqlen_k": 8192, "heads": 16, "head_dim": 128, "causal": False}
SHORTER = {**SHAPE, "seqlen_q": 2048, "seqlen_k": 2048}
_CPU_SHAPE = {"batch": 1, "seqlen_q": 160, "seqlen_k": 160, "heads": 1, "head_dim": 64, "causal": False}
_CPU_TEXT = 128
FACTOR = 2.0  # how much worse than the yardstick a recipe may be
# name in records -> (backend, scale per block, Hadamard) of `fp8_attention`
KERNELS = {
    f"{backend}{suffix}": (backend, block_scale, hadamard)
    for backend in ("portable", "hopper")
    for suffix, block_scale, hadamard in (
        ("", True, True),
        ("-tensor-hadamard", False, True),
        ("-block", True, False),
        ("-tensor", False, False),
    )
}
_SIXTEEN_BIT = ("portable", "sdpa-flash")


def list_cases(settings: Settings) -> list[Case]:
    """All three inputs when none in particular is asked for (`normal` is the default of --input)."""
    if settings.shapes:
        return cases.attention_cases(settings, direction="forward")
    found = []
    for kind in INPUTS if settings.input == "normal" else (settings.input,):
        if kind == "smollm2":
            longest = cases.SEQLENS_TEXT[-1 if not settings.quick else 1] if settings.on_gpu else _CPU_TEXT
            shapes = [cases.text_shape(longest, layers=4 if settings.on_gpu else 1)]
        else:
            shapes = [SHORTER, SHAPE][: 1 if settings.quick else 2] if settings.on_gpu else [_CPU_SHAPE]
        found += [{**cases.make_case(shape, settings), "input": kind} for shape in shapes]
    return found


class ErrorJudge:
    """Results of one case against float64 attention of the unrounded inputs; keeps the truth of the last seed."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.causal = bool(case["causal"])
        self.scale = int(case["head_dim"]) ** -0.5
        self._result = functools.lru_cache(maxsize=2)(self._run)
        self._truths = functools.lru_cache(maxsize=1)(self._truth)

    def inputs(self, seed: int, dtype: torch.dtype = torch.float32) -> QKV:
        """q, k, v (batch, seqlen, heads, head_dim): drawn in float32, then rounded to `dtype`."""
        return QKV(*(t.to(dtype) for t in inputs.make(self.case, seed, self.device, dtype=torch.float32)))

    def _truth(self, seed: int) -> tuple[Tensor, float, float]:
        """(o in float64, rmse of the FP8 yardstick, rmse of the fp16 yardstick).

        The yardsticks know none of the recipes: torch's cast of q, k, v to e4m3 without scales, then attention in fp16;
        and attention in fp16, each in plain torch operations.
        """
        exact, _ = attention_truth(*self.inputs(seed), causal=self.causal)
        halves = self.inputs(seed, torch.float16)
        limit = torch.finfo(torch.float8_e4m3fn).max
        eighths = (t.clamp(-limit, limit).to(torch.float8_e4m3fn).to(torch.float16) for t in halves)
        rulers = (rmse(yardstick_attention(*some, causal=self.causal)[0], exact) for some in (eighths, halves))
        return exact, next(rulers), next(rulers)

    def _run(self, recipe: Callable[[int], Tensor], seed: int) -> tuple[float, float]:
        exact, _, _ = self._truths(seed)
        with torch.no_grad():
            o = recipe(seed)
        return rmse(o, exact), relative_error(o, exact)

    def check(self, recipe: Callable[[int], Tensor], seed: int, *, eight_bit: bool) -> Check:
        """A recipe may be at most twice as far from the truth as the yardstick of its width."""
        error, _ = self._result(recipe, seed)
        _, ruler_8, ruler_16 = self._truths(seed)
        return Check(error, FACTOR * (ruler_8 if eight_bit else ruler_16), "rmse of o against float64")

    def values(self, recipe: Callable[[int], Tensor], seed: int) -> dict[str, tuple[float, str]]:
        """What the records keep."""
        error, relative = self._result(recipe, seed)
        return {"rmse": (error, "1"), "rel_error": (relative, "1")}


def build(case: Case, settings: Settings) -> Workload:
    """Every recipe on one input."""
    if why := inputs.why_not(case):
        raise UnsupportedError(why)
    judge = ErrorJudge(case, settings.device)
    found = [_kernel(name, judge, settings) for name in KERNELS]
    case_16 = {**case, "dtype": "fp16"}
    found += [_sixteen_bit(one, judge) for one in contenders(case_16, settings) if one.name in _SIXTEEN_BIT]
    found += [_emulation(recipe, judge) for recipe in RECIPES]
    return Workload(implementations=found, input_source=inputs.source_of(case))


def _implementation(
    name: str,
    role: str,
    judge: ErrorJudge,
    recipe: Callable[[int], Tensor],
    *,
    eight_bit: bool,
    note: str,
    unavailable: str = "",
) -> Implementation:
    return Implementation(
        name=name,
        role=role,
        unavailable=unavailable,
        check=lambda seed: judge.check(recipe, seed, eight_bit=eight_bit),
        values=lambda seed: judge.values(recipe, seed),
        note=note,
    )


def _kernel(name: str, judge: ErrorJudge, settings: Settings) -> Implementation:
    backend, block_scale, hadamard = KERNELS[name]

    def recipe(seed: int) -> Tensor:
        # in 16 bits, as a model has them, tensor cores quantise for the Gluon kernel
        qkv = judge.inputs(seed, torch.float16 if backend == "hopper" else torch.float32)
        poison_free_memory([qkv.q])
        return fp8.fp8_attention(
            *qkv, causal=judge.causal, block_scale=block_scale, hadamard=hadamard, layout="bshd",
            out_dtype=torch.float16, seed=fp8_forward.SIGNS, backend=backend,
        )  # fmt: skip

    words = f"{'a scale per 128 rows' if block_scale else 'a scale per tensor'}, {'' if hadamard else 'no '}Hadamard"
    problem = problem_of(judge.case, settings.device)
    refused = fp8.refuse(problem)
    if refused is None and backend == "hopper":
        refused = hopper_fp8.refuse(problem.device_type, problem.capability, problem.head_dim, fp8.BLOCK, True)
    return _implementation(
        name,
        "ours",
        judge,
        recipe,
        eight_bit=True,
        unavailable=refused or "",
        note=f"kernel: e4m3, {words}; float16 out",
    )


def _sixteen_bit(contender, judge: ErrorJudge) -> Implementation:
    def recipe(seed: int) -> Tensor:
        qkv = judge.inputs(seed, torch.float16)
        poison_free_memory([qkv.q])
        with refusals(contender):
            return contender.to_bshd(contender.attend(*contender.place(*qkv)))

    return _implementation(
        f"{contender.name}-fp16",
        contender.role,
        judge,
        recipe,
        eight_bit=False,
        unavailable=contender.unavailable,
        note=contender.note,
    )


def _emulation(recipe: Recipe, judge: ErrorJudge) -> Implementation:
    def run(seed: int) -> Tensor:
        return emulate(recipe, judge.inputs(seed), scale=judge.scale, causal=judge.causal)

    return _implementation(
        recipe.name, "reference", judge, run, eight_bit=recipe.fp8, note="emulated in torch, float16 out"
    )


def emulate(recipe: Recipe, qkv: QKV, *, scale: float, causal: bool) -> Tensor:
    """o (batch, seqlen, heads, head_dim) of a recipe in plain torch.

    One group of heads at a time, because the emulation holds whole score matrices; only a recipe with one scale for the
    whole tensor must see all heads at once.
    """
    q, k, v = (t.transpose(1, 2) for t in qkv)
    if recipe.fp8 and not recipe.block_scale:
        return run_recipe(recipe, q, k, v, softmax_scale=scale, causal=causal, seed=fp8_forward.SIGNS).transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    rows = []
    for b in range(q.shape[0]):
        heads = [
            run_recipe(
                recipe,
                q[b : b + 1, h * group : (h + 1) * group],
                k[b : b + 1, h : h + 1],
                v[b : b + 1, h : h + 1],
                softmax_scale=scale,
                causal=causal,
                seed=fp8_forward.SIGNS,
            )
            for h in range(k.shape[1])
        ]
        rows.append(torch.cat(heads, 1))
    return torch.cat(rows).transpose(1, 2)
