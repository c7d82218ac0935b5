"""`precision_report`: run a model on a batch and say for each linear layer what every recipe would cost and bring.

    report = precision_report(model, batch, hardware="h100")
    print(report)
    convert(model, MXFP8BlockScaling(), lambda name, _: report.recommended(name) == "mxfp8")

Errors are those of the layer's output, in exact arithmetic on the rounded operands, on the activations of this very
batch. Times are modelled (`dynamic_precision_select`) and say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.hardware import detect, profile
from gpu_accel.transformer_engine.checks import check_size
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import RECIPES, Recipe
from gpu_accel.transformer_engine.report import error_report
from gpu_accel.transformer_engine.select import _refused, modelled_time

# recipe -> the precision of `select.CANDIDATES` whose time it has
_TIMED_AS = {"fp8_current": "fp8", "fp8_delayed": "fp8", "fp8_block": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """One layer. m, n, k: of its product in this batch. amax: of its inputs and its weight. clipped: the share of the
    inputs that each recipe clips. error: of its output, 2-norm, by recipe. modelled_ms: by precision."""

    name: str
    m: int
    n: int
    k: int
    amax: tuple[float, float]
    clipped: Mapping[str, float]
    error: Mapping[str, float]
    modelled_ms: Mapping[str, float]
    recommended: str  # a recipe, or "bf16"

    @property
    def modelled_speedup(self) -> float:
        """Of the recommended recipe over bf16, quantising the activations counted."""
        return self.modelled_ms["bf16"] / self.modelled_ms[_TIMED_AS.get(self.recommended, "bf16")]


@dataclass(frozen=True)
class PrecisionReport:
    """The layers of a model in the order in which they ran."""

    layers: tuple[LayerReport, ...]
    hardware: str
    max_error: float

    def __getitem__(self, name: str) -> LayerReport:
        found = next((layer for layer in self.layers if layer.name == name), None)
        if found is None:
            ran = ", ".join(repr(layer.name) for layer in self.layers)
            raise InvalidInputError(f"no layer {shown(name)} ran; there are {ran}")
        return found

    def recommended(self, name: str) -> str:
        """The recipe for a layer; "bf16" for layers that did not run."""
        return next((layer.recommended for layer in self.layers if layer.name == name), "bf16")

    def __str__(self) -> str:
        recipes = list(self.layers[0].error) if self.layers else []
        width = max([5, *(len(layer.name) for layer in self.layers)])
        head = f"{'layer':<{width}} {'m x n x k':>18} {'amax':>9} {'weight':>9}"
        lines = [head + "".join(f"{name:>13}" for name in recipes) + f"  best (modelled, {self.hardware})"]
        for one in self.layers:
            line = f"{one.name:<{width}} {f'{one.m} x {one.n} x {one.k}':>18} {one.amax[0]:>9.3g} {one.amax[1]:>9.3g}"
            line += "".join(f"{one.error[name]:>13.2%}" for name in recipes)
            lines.append(f"{line}  {one.recommended} ({one.modelled_speedup:.2f}x)")
        return "\n".join(lines)


def _operands(x: Tensor, weight: Tensor, recipe: Recipe, backend: str) -> tuple[Tensor, Tensor]:
    """What the codes of both mean; delayed scaling as with a history that has just seen x."""
    a = quantize(x, recipe.scheme("input"), backend=backend)
    b = quantize(weight, recipe.scheme("weight"), backend=backend)
    return a.dequantize(torch.float32), b.dequantize(torch.float32)


def _judge(
    name: str,
    x: Tensor,
    rows: int,
    weight: Tensor,
    recipes: Mapping[str, Recipe],
    hardware: str,
    max_error: float,
    backend: str,
) -> LayerReport:
    gpu = profile(hardware)
    n, k = weight.shape
    truth = x.double() @ weight.double().t()
    scale = truth.norm().clamp_min(torch.finfo(torch.float64).tiny)
    errors, clipped = {}, {}
    for key, recipe in recipes.items():
        a, b = _operands(x, weight, recipe, backend)
        errors[key] = float((a.double() @ b.double().t() - truth).norm() / scale)
        clipped[key] = error_report(x, [recipe.scheme("input")], backend=backend).rows[0].clipped
    precisions = {"bf16", *(_TIMED_AS[key] for key in recipes if key in _TIMED_AS)}
    times = {p: modelled_time(p, gpu, rows, n, k) for p in sorted(precisions) if not _refused(p, gpu, 1.0)}
    fit = [key for key in recipes if errors[key] <= max_error and _TIMED_AS.get(key) in times]
    best = min(fit, key=lambda key: (times[_TIMED_AS[key]], errors[key]), default="bf16")
    if best != "bf16" and times[_TIMED_AS[best]] >= times["bf16"]:
        best = "bf16"
    amax = (float(x.abs().amax()) if x.numel() else 0.0, float(weight.abs().amax()))
    return LayerReport(name=name, m=rows, n=n, k=k, amax=amax, clipped=clipped, error=errors, modelled_ms=times,
                       recommended=best)  # fmt: skip


def precision_report(
    model: nn.Module,
    batch: Any,
    *,
    hardware: str | None = None,
    recipes: Iterable[str] = tuple(RECIPES),
    max_error: float = 0.06,
    rows: int = 512,
    backend: str = "auto",
) -> PrecisionReport:
    """Look at every linear layer of a model on one batch.

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments, or a dictionary of keywords.
        hardware: a profile whose times are modelled, such as "h100"; None is the GPU at hand, or an H100 where there is
            none that has a profile. recipes: names of `RECIPES`.
        max_error: largest relative error of a layer's output that is acceptable. FP8 errs 3.7 % of normal values.
        rows: at most so many rows of a layer's input are judged, spread evenly over all that it got. backend: as of
            `quantize`.

    Nothing is changed: the model runs once, unquantised and without gradients, in the mode it is in.

    Raises:
        InvalidInputError: unknown recipes or hardware, numbers out of range, a model without linear layers that run.
    """
    if not isinstance(recipes, Iterable) or isinstance(recipes, Tensor):
        raise InvalidInputError(f"recipes must be names, got {type(recipes).__name__}")
    wanted = list(recipes)
    if unknown := [name for name in wanted if name not in tuple(RECIPES)]:  # compared, not hashed
        raise InvalidInputError(f"no recipe {', '.join(map(repr, unknown))}; there are {', '.join(RECIPES)}")
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_size("rows", rows)
    if isinstance(max_error, bool) or not isinstance(max_error, int | float) or not max_error > 0:
        raise InvalidInputError(f"max_error must be a positive number, got {shown(max_error)}")
    if not isinstance(batch, Tensor | tuple | Mapping):
        raise InvalidInputError(
            f"batch must be a tensor, a tuple of arguments or a dictionary of keywords, got {type(batch).__name__}: "
            f"(batch,) is a tuple of one argument"
        )
    if hardware is None:
        found = detect()
        hardware = found.profile.name if found and found.profile else "h100"
    profile(hardware)
    seen: dict[str, tuple[Tensor, int]] = {}
    handles = []

    def keep(name: str):
        def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = arguments[0] if arguments else keywords.get("input" if isinstance(module, nn.Linear) else "x")
            if not isinstance(given, Tensor) or given.dim() < 1:
                return  # the layer itself says what is wrong
            x = given.detach().reshape(math.prod(given.shape[:-1]), given.shape[-1])
            pick = torch.linspace(0, max(0, x.shape[0] - 1), min(rows, x.shape[0]), device=x.device).long()
            if name not in seen:  # a layer that runs several times is judged by its first
                seen[name] = (x[pick].float(), x.shape[0])

        return hook

    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Linear)}
    for name, module in layers.items():
        handles.append(module.register_forward_pre_hook(keep(name), with_kwargs=True))
    try:
        with torch.no_grad(), autocast(enabled=False):
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*(batch if isinstance(batch, tuple) else (batch,)))
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise InvalidInputError("no torch.nn.Linear or gpu_accel Linear of the model ran on this batch")
    chosen = {name: RECIPES[name] for name in wanted}
    judged = [
        _judge(name, x, total, layers[name].weight.detach().float(), chosen, hardware, max_error, backend)
        for name, (x, total) in seen.items()
    ]
    return PrecisionReport(tuple(judged), hardware, max_error)
