"""The `forward` and `backward` experiments: every contender on the paper's grid, checked, then timed side by side.

After timing, the very call that was timed has to give the right result on its own inputs, which must be unchanged, and
the negative of it when the input that the result is linear in is negated, so that no remembered output can pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_accel.errors import IncorrectResultError, UnsupportedError
from gpu_accel.hardware.work import attention_bytes, attention_flops
from gpu_accel.testing import QKV
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Timed, Workload

from . import fp8_forward, inputs
from .judging import FACTOR, RIVALS_FACTOR, Judge
from .peers import Contender, contenders, refusals

BESIDE = "hopper-bf16"
BACKWARD_NOTE = "only torch.autograd.grad on a graph kept from one forward pass is timed, for all alike"


def build_forward(case: Case, settings: Settings) -> Workload:
    """All contenders for one shape, forward; with dtype e4m3 the FP8 kernels next to bf16 attention."""
    if case["dtype"] == "e4m3":
        return fp8_forward.build(case, settings)
    judge = Judge(case, settings.device)
    found = [forward_implementation(c, judge) for c in contenders(case, settings)]
    if in_bf16 := _beside(case, settings):
        found.append(forward_implementation(*in_bf16, name=BESIDE))
    return workload(case, found)


def build_backward(case: Case, settings: Settings) -> Workload:
    """All contenders for one shape, backward: dq, dk and dv from the gradient of o."""
    judge = Judge(case, settings.device)
    found = [_backward_implementation(c, judge) for c in contenders(case, settings)]
    if in_bf16 := _beside(case, settings):
        found.append(_backward_implementation(*in_bf16, name=BESIDE))
    return workload(case, found)


def _beside(case: Case, settings: Settings) -> tuple[Contender, Judge] | None:
    """For a case in fp16 the same kernel in bf16, judged by itself: only one run can say which of them is faster.

    It runs where it is asked for (`--only hopper-bf16`), since it is no rival.
    """
    if case["dtype"] != "fp16" or BESIDE not in settings.only:
        return None
    in_bf16 = {**case, "dtype": "bf16"}
    return next(c for c in contenders(in_bf16, settings) if c.name == "hopper"), Judge(in_bf16, settings.device)


def workload(case: Case, implementations: list[Implementation]) -> Workload:
    """The work of a case by the papers' convention (causal counts half, backward 2.5 times), and who does it.

    Raises UnsupportedError when the inputs of the case cannot be had here.
    """
    if why := inputs.why_not(case):
        raise UnsupportedError(why)
    which = str(case["pass"])
    shape = {key: int(case[key]) for key in ("batch", "seqlen_q", "seqlen_k", "heads", "head_dim")}
    return Workload(
        implementations=implementations,
        baselines=tuple(one.name for one in implementations),
        flops=attention_flops(**shape, causal=bool(case["causal"]), which=which, convention="paper"),
        bytes_moved=attention_bytes(
            **shape,
            heads_kv=int(case["heads_kv"]),
            dtype="fp8" if case["dtype"] == "e4m3" else case["dtype"],
            which=which,
        ),
        input_source=inputs.source_of(case),
    )


def forward_implementation(contender: Contender, judge: Judge, *, name: str = "") -> Implementation:
    """A contender's forward pass as the runner wants it."""

    def check(seed: int) -> Check:
        def run(qkv: QKV) -> Tensor:
            with torch.no_grad(), refusals(contender):
                return contender.to_bshd(contender.attend(*contender.place(*qkv)))

        return judge.forward(seed, run)

    def make(seed: int) -> Callable[[], object]:
        q, k, v = contender.place(*judge.inputs(seed))
        call = torch.no_grad()(lambda: contender.attend(q, k, v))

        def as_timed(fresh: QKV) -> Tensor:
            refuse_changes(contender.place(*fresh), (q, k, v))
            return contender.to_bshd(call())

        def negated(fresh: QKV) -> Tensor:  # o is linear in v
            v.neg_()
            return -contender.to_bshd(call())

        return Timed(call, lambda: worse(judge.forward(seed, as_timed), judge.forward(seed, negated)))

    return Implementation(
        name=name or contender.name,
        role=contender.role,
        unavailable=contender.unavailable,
        check=check,
        make=make,
        note=contender.note,
    )


def refuse_changes(fresh: Sequence[Tensor], timed: Sequence[Tensor]) -> None:
    """Raise IncorrectResultError unless the inputs that were timed are still bit for bit what they were made as."""
    for number, (before, after) in enumerate(zip(fresh, timed, strict=True)):
        if not torch.equal(_bits(before), _bits(after)):
            raise IncorrectResultError(f"the timed call has changed its input {number}")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)  # NaN equals itself, and FP8 has no comparison


def worse(*checks: Check) -> Check:
    """The first that fails, else the first."""
    return next((check for check in checks if not check.ok), checks[0])


def _backward_implementation(contender: Contender, judge: Judge, *, name: str = "") -> Implementation:
    def prepare(qkv: QKV, do: Tensor) -> tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]:
        """The call, and the tensors that it reads: q, k, v and do in the contender's layout."""
        leaves = tuple(t.detach().requires_grad_() for t in contender.place(*qkv))
        (placed,) = contender.place(do)
        o = contender.attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, placed, retain_graph=True), (*leaves, placed)

    factor = FACTOR if contender.role == "ours" else RIVALS_FACTOR

    def check(seed: int) -> Check:
        def run(qkv: QKV, do: Tensor) -> list[Tensor]:
            with refusals(contender):
                return [contender.to_bshd(gradient) for gradient in prepare(qkv, do)[0]()]

        return judge.backward(seed, run, factor=factor)

    def make(seed: int) -> Callable[[], object]:
        qkv = judge.inputs(seed)
        call, read = prepare(qkv, judge.output_gradient(qkv, seed))

        def as_timed(fresh: QKV, do: Tensor) -> list[Tensor]:
            refuse_changes(contender.place(*fresh, do), read)
            return [contender.to_bshd(gradient) for gradient in call()]

        def negated(fresh: QKV, do: Tensor) -> list[Tensor]:  # gradients are linear in do
            read[-1].neg_()
            return [-contender.to_bshd(gradient) for gradient in call()]

        def verify() -> Check:
            return worse(*(judge.backward(seed, run, factor=factor) for run in (as_timed, negated)))

        return Timed(call, verify)

    return Implementation(
        name=name or contender.name,
        role=contender.role,
        unavailable=contender.unavailable,
        check=check,
        make=make,
        note=f"{contender.note}; {BACKWARD_NOTE}",
    )
