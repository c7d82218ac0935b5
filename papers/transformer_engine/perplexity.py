"""The experiment `perplexity`: SmolLM2-135M reads the Constitution with all its linear layers but the head quantised.

    nll_error           nats a token (mean over windows of 512 tokens) more than float32 has
    perplexity_error    the same as an increase of the perplexity, in percent

The nats themselves are what each record was checked with.

Activations and weights are replaced by the numbers that their codes mean, and multiplied in float32: the products of
`scaled_mm` up to the order of sums. Codes are the same bits on every machine, so this needs no GPU: minutes without
one, seconds on one.
Delayed scaling takes the scales of a window from the maxima of the windows before (the first one from its own).

The weights come from a GGUF file of four bits (see `papers/flash_attention3/capture.py`): the increases here are those
on top of that, and a model of full precision may lose more or less.
"""

from __future__ import annotations

import functools
import importlib
import math

import torch
from torch import Tensor, nn

from gpu_accel.errors import UnsupportedError
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import RECIPES, DelayedScaling
from gpu_accel.transformer_engine.scales import scale_fp32
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.workbench import registry
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload

WINDOW = 512
WORST = 5.0  # nats a token, as of a capture: more, and the weights were read wrongly
# name -> (scheme of activations, scheme of weights), or the dtype that both are rounded to
PAIRS: dict[str, tuple[Scheme, Scheme] | torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16,
                                                         "fp16": torch.float16}  # fmt: skip
PAIRS |= {name: (recipe.scheme("input"), recipe.scheme("weight")) for name, recipe in RECIPES.items()}
PAIRS |= {name: (find_scheme(name), find_scheme(name)) for name in ("fp8_row", "mxfp6_e2m3", "mxfp4", "int8_row")}


def _capture():
    return importlib.import_module(f"{registry.paper('flash_attention3')._package()}.capture")


def list_cases(settings: Settings) -> list[Case]:
    windows = 1 if settings.quick else 4
    return [
        {"model": "SmolLM2-135M-Instruct", "windows": windows, "window": WINDOW, "dtype": "fp32", "input": "smollm2"}
    ]


class Shorter(nn.Module):
    """A linear layer whose operands are rounded to 16 bits."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias, self.dtype = linear.bias, dtype
        self.weight = linear.weight.detach().to(dtype).float()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.dtype).float(), self.weight, self.bias)


class Rounded(nn.Module):
    """A linear layer whose operands are the numbers that codes mean."""

    def __init__(self, linear: nn.Linear, activations: Scheme, weights: Scheme, delayed: bool) -> None:
        super().__init__()
        self.scheme, self.bias, self.delayed, self.amax = activations, linear.bias, delayed, 0.0
        self.weight = quantize(linear.weight.detach(), weights, backend="reference").dequantize(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        scale = None
        if self.delayed:
            if self.amax:
                scale = scale_fp32(torch.tensor(self.amax, device=x.device), self.scheme.largest)
            self.amax = max(self.amax, float(x.abs().max()))
        flat = x.reshape(-1, x.shape[-1])
        y = quantize(flat, self.scheme, scale=scale, backend="reference").dequantize(torch.float32)
        return nn.functional.linear(y, self.weight, self.bias).view(*x.shape[:-1], -1)


@functools.lru_cache(maxsize=1)
def _model() -> tuple[Tensor, nn.Module, str]:
    capture = _capture()
    tokenizer, model, name = capture._load_model()
    return tokenizer(capture.TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0], model, name


def nll(name: str, windows: int, window: int, device: str = "cpu") -> float:
    """Nats a token under the schemes of `name`."""
    capture = _capture()
    ids, model, _ = _model()
    ids, model = ids.to(device), model.to(device)
    if len(ids) < windows * window:
        raise UnsupportedError(f"the text has {len(ids)} tokens, {windows * window} were asked for")
    pair = PAIRS[name]
    places = [
        (parent, key, child)
        for parent in model.modules()
        for key, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not model.lm_head
    ]
    try:
        delayed = isinstance(RECIPES.get(name), DelayedScaling)
        for parent, key, child in places:
            if isinstance(pair, tuple):
                setattr(parent, key, Rounded(child, *pair, delayed=delayed))
            elif pair != torch.float32:
                setattr(parent, key, Shorter(child, pair))
        total = 0.0
        with torch.inference_mode():
            for i in range(windows):
                part = ids[i * window : (i + 1) * window]
                total += capture._nll(model.lm_head, model.model(part[None]).last_hidden_state[0], part)
        return total / windows
    finally:
        for parent, key, child in places:
            setattr(parent, key, child)


def build(case: Case, settings: Settings) -> Workload:
    """float32, every recipe, and some schemes beside them."""
    if why := _capture()._no_model():
        raise UnsupportedError(why)
    windows, window = int(case["windows"]), int(case["window"])

    @functools.cache
    def found(name: str) -> float:
        return nll(name, windows, window, settings.device)

    def check(name: str, seed: int) -> Check:
        return Check(found(name), WORST, "nats a token")

    def values(name: str, seed: int) -> dict[str, tuple[float, str]]:
        mine, exact = found(name), found("fp32")
        return {
            "nll_error": (mine - exact, "1"),
            "perplexity_error": (100 * (math.exp(mine - exact) - 1), "%"),
        }

    def note(name: str) -> str:
        pair = PAIRS[name]
        if isinstance(pair, tuple):
            return f"activations {pair[0].text}, weights {pair[1].text}"
        return "nothing rounded" if name == "fp32" else f"activations and weights rounded to {name}"

    return Workload(
        implementations=[
            Implementation(
                name=name,
                role="ours" if isinstance(PAIRS[name], tuple) else "reference",
                check=functools.partial(check, name),
                values=functools.partial(values, name),
                note=note(name),
            )
            for name in PAIRS
        ],
        input_source=f"text.txt, {windows} x {window} tokens; SmolLM2-135M-Instruct from GGUF Q4_1",
    )
