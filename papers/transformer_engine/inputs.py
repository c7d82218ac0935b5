"""Activations and weights: drawn, or those of a real language model.

    normal     N(0, 1)
    outliers   N(0, 1) + N(0, 100) * Bernoulli(0.001), the outliers of FlashAttention-3's section 4.3
    smollm2    layer 10 of SmolLM2-135M on the Constitution of the United States: what goes into its query projection
               ("q_proj", after the norm) and into its down projection ("down_proj", a product of two activations, which
               has the largest outliers), with their weights
    python     a text for `train` alone, see there; elsewhere the same as normal

The model, the text and where both come from: `papers/flash_attention3/capture.py`. What was taken is cached.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.testing.inputs import random_values
from gpu_accel.workbench import registry
from gpu_accel.workbench.experiment import Case, Settings

LAYER = 10
TOKENS = 512
MODULES = {"q_proj": (576, 576), "down_proj": (576, 1536)}  # name -> (N, K)


DRAWN = {"smollm2": "normal", "python": "normal"}  # what stands in where an experiment has no use for an input


def drawn(settings: Settings) -> str:
    """The kind of input of an experiment that knows only drawn ones."""
    return DRAWN.get(settings.input, settings.input)


def _capture():
    """The module of FlashAttention-3's paper that knows the model."""
    return importlib.import_module(f"{registry.paper('flash_attention3')._package()}.capture")


def cache_file() -> Path:
    """Where the activations and weights lie once they were taken."""
    capture = _capture()
    return capture.cache_folder() / f"smollm2-135m-{capture.text_hash()}-linear-layer{LAYER}-{TOKENS}.pt"


def why_not(case: Case) -> str:
    """Why the input of a case cannot be had here; empty when it can. Loads nothing."""
    if case["input"] != "smollm2" or cache_file().is_file():
        return ""
    why = _capture()._no_model()
    return f"{cache_file()} is missing, and {why}" if why else ""


def source_of(case: Case) -> str:
    """The words of `Record.input_source`; empty for drawn inputs."""
    if case["input"] != "smollm2":
        return ""
    return f"SmolLM2-135M-Instruct, layer {LAYER}, {case['operand']}; text.txt, {TOKENS} tokens"


@functools.lru_cache(maxsize=1)
def _taken() -> dict[str, Tensor]:
    file = cache_file()
    if not file.is_file():
        _take(file)
    content = torch.load(file, map_location="cpu", weights_only=True)
    if set(content) != {f"{name}.{part}" for name in MODULES for part in ("input", "weight")}:
        raise InvalidInputError(f"{file} is no such capture; remove it")
    return content


def _take(file: Path) -> None:
    """Run the model over the first tokens of the text (float32, CPU) and keep what two projections see."""
    capture = _capture()
    if why := capture._no_model():
        raise UnsupportedError(why)
    tokenizer, model, _ = capture._load_model()
    ids = tokenizer(capture.TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :TOKENS]
    layer = model.model.layers[LAYER]
    modules = {"q_proj": layer.self_attn.q_proj, "down_proj": layer.mlp.down_proj}
    kept: dict[str, Tensor] = {}

    def keep(name):
        def hook(module, arguments):
            kept[f"{name}.input"] = arguments[0][0].to(torch.bfloat16).clone()
            kept[f"{name}.weight"] = module.weight.detach().to(torch.bfloat16).clone()

        return hook

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        with torch.inference_mode():
            model.model(ids)
    finally:
        for handle in handles:
            handle.remove()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(kept, part)
    part.replace(file)


def make(case: Case, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """(activations (m, k), weights (n, k)) in bf16, fresh memory."""
    m, n, k = (int(case[key]) for key in ("m", "n", "k"))
    if case["input"] == "smollm2":
        taken = _taken()
        x, w = (taken[f"{case['operand']}.{part}"] for part in ("input", "weight"))
        if m > TOKENS or (n, k) != tuple(w.shape):
            raise UnsupportedError(f"{case['operand']} of smollm2 has m up to {TOKENS}, n and k {tuple(w.shape)}")
        return x[:m].to(device).clone(), w.to(device).clone()
    kind = str(case["input"])
    x, w = (
        random_values(shape, kind=kind, device=device, generator=generator(number, device))  # type: ignore[arg-type]
        for number, shape in ((2 * seed, (m, k)), (2 * seed + 1, (n, k)))
    )
    return x, w
