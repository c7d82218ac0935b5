"""What the experiments share: peers that may be missing, one judgement of many results, and timed backwards."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_accel.testing import compare, generator
from gpu_accel.workbench.autotuning import compile_ahead, compiled_together, tuned_anew
from gpu_accel.workbench.experiment import Check, Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Function = Callable[..., Tensor | tuple[Tensor, ...]]
FACTOR, RIVALS_FACTOR = 2.0, 4.0  # how much larger than the ruler's an error may be: ours, and that of others
Part = Callable[[Tensor], Tensor]
MOST = 2**26  # elements of a tensor that is judged: float64 of the whole, with what autograd keeps, would not fit


def missing(package: str, settings: Settings) -> str:
    """Why a peer cannot run here; empty when it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return "" if settings.on_gpu else f"{package} needs a GPU"


def randn(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, device), device=device).to(dtype)


def run(
    function: Function, tensors: Sequence[Tensor], seed: int, backward: bool, dtype: torch.dtype | None = None, *,
    part: Part | None = None, shapes: list[torch.Size] | None = None,
):  # fmt: skip
    """Results, or with `backward` the gradients of every tensor; in `dtype` where given.

    part: `tensors` are parts of whole ones, whose results have `shapes`; so gradients are the same parts of theirs.
    """
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_(backward) for x in tensors]
    out = function(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    if shapes is not None and part is None:
        shapes.extend(o.shape for o in outs)
    if not backward:
        return [o.detach() for o in outs]
    grads = [_grad_of(o, seed, n) for n, o in enumerate(outs)]
    if part is not None:
        wholes = [o.new_empty(shape) for o, shape in zip(outs, shapes or (), strict=True)]
        grads = [part(_grad_of(o, seed, n)) for n, o in enumerate(wholes)]
    return list(torch.autograd.grad(outs, leaves, grads))


def _grad_of(out: Tensor, seed: int, number: int) -> Tensor:
    return randn(*out.shape, seed=1_000_000 + 16 * seed + number, device=out.device.type).bfloat16().to(out.dtype)


def judge(
    mine: Function, truth: Function, ruler: Function, tensors, seed: int, backward: bool, on_gpu: bool, *,
    part: Part | None = None, shared: Sequence[int] = (), factor: float = FACTOR,
    ahead: bool = False, known: dict | None = None,
) -> Check:  # fmt: skip
    """The largest error of any result over its bound: `factor` times the ruler's in the same dtype, against float64.

    Triton's interpreter cuts float32 to bfloat16 instead of rounding it, so on a CPU bfloat16 may err twice that.

    part: what of every tensor and result is judged, where parts do not depend on each other and float64 of the whole
    does not fit. Tensors numbered `shared` are whole in all parts; their gradients, sums over parts, are not judged.

    ahead: compile all kernels of `mine` first, all configurations of those that tune themselves, which they do here.
    known: where to keep the truth and what the ruler gives, of the last seed, for others that are judged by the same.
    """
    cut = not on_gpu and any(x.dtype == torch.bfloat16 for x in tensors)
    worst, why = 0.0, ""
    shapes: list[torch.Size] = []
    if ahead and on_gpu:
        compile_ahead(lambda: run(mine, tensors, seed, backward))
    with contextlib.ExitStack() as tuning:
        if on_gpu:  # peers that tune themselves do it here, for this shape
            tuning.enter_context(compiled_together())
            tuning.enter_context(tuned_anew())
        results = run(mine, tensors, seed, backward, shapes=shapes)
    keep = [n for n in range(len(results)) if not (part and backward and n in shared)]
    if part is not None:
        results = [part(x) if n in keep else x for n, x in enumerate(results)]
        tensors = [x if n in shared else part(x) for n, x in enumerate(tensors)]
    known = {} if known is None else known
    if seed not in known:
        known.clear()
        known[seed] = (run(truth, tensors, seed, backward, torch.float64, part=part, shapes=shapes),
                       run(ruler, tensors, seed, backward, part=part, shapes=shapes))  # fmt: skip
    truths, rulers = known[seed]
    for n in keep:
        out, right, measure = results[n], truths[n], rulers[n]
        floor = torch.finfo(torch.bfloat16).eps * float(right.abs().max()) if cut and right.numel() else None
        found = compare(out, right, measure, factor=2 * factor if cut else factor, floor=floor)
        share = found.error / found.bound if found.bound else (0.0 if found.error == 0 else float("inf"))
        if not share <= worst:
            worst, why = share, found.why
    return Check(worst, 1.0, f"largest error over its bound{': ' + why if why else ''}")


def timed(function: Function, tensors: Sequence[Tensor], seed: int, backward: bool) -> Callable[[], object]:
    """The call that is timed: the forward alone, or the backward alone on one graph that is kept."""
    if not backward:
        return functools.partial(function, *tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    outs = list(out) if isinstance(out, tuple) else [out]
    grads = [_grad_of(o, seed, n) for n, o in enumerate(outs)]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)
