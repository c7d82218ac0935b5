"""`convert`: make the linear layers of a model quantised ones; and functions under the names of the first documents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine.checks import check_bias, check_floats, check_one_device, check_rows
from gpu_accel.transformer_engine.context import check_recipe
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.linear_op import Plan, layer_backend, linear_op, weight_op
from gpu_accel.transformer_engine.modules import TransformerLayer
from gpu_accel.transformer_engine.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    filter: Callable[[str, nn.Module], bool] | None = None,
    *,
    backend: str = "auto",
) -> nn.Module:
    """Replace torch.nn.Linear by `Linear` in place, sharing the parameters, and return the model.

    Args:
        recipe: what the layers use on their own; None leaves that to an `autocast` around the calls.
        filter: called with the full name and the layer, False leaves it as it is. None converts all but those named
            "lm_head" or "head", which recipes keep in high precision (arXiv:2509.25149, section 4).

    Layers that share a parameter (tied embeddings) still share it. Subclasses of torch.nn.Linear are left alone: what
    they do besides would be lost. A model that is itself a torch.nn.Linear comes back as a new object.
    """
    check_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = filter if filter is not None else lambda name, _: name.rsplit(".", 1)[-1] not in ("lm_head", "head")
    if type(model) is nn.Linear:
        return Linear.from_torch(model, recipe=recipe, backend=backend) if wanted("", model) else model
    made: dict[int, Linear] = {}  # one layer under several names stays one
    for name, module in list(model.named_modules(remove_duplicate=True)):
        for child_name, child in list(module._modules.items()):  # named_children leaves out what has two names
            full = f"{name}.{child_name}" if name else child_name
            if isinstance(child, Linear):
                if wanted(full, child) and recipe is not None:
                    child.recipe = recipe
            elif type(child) is nn.Linear and wanted(full, child):
                if id(child) not in made:
                    made[id(child)] = Linear.from_torch(child, recipe=recipe, backend=backend)
                setattr(module, child_name, made[id(child)])
    return model


def _once(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, backend: str) -> Tensor:
    check_floats("weight", weight)
    if weight.dim() != 2:
        raise InvalidInputError(f"weight must be (N, K), got shape {tuple(weight.shape)}")
    check_rows("x", x, weight.shape[1])
    check_bias(bias, weight.shape[0])
    check_one_device(x=x, weight=weight, bias=bias)
    chosen = layer_backend(backend, x)
    plan = Plan.of(recipe)
    *copies, _ = weight_op(weight.detach(), None, plan.text, x.requires_grad, chosen)
    y, *_ = linear_op(
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, bias, *copies, None, None, None, None, None, plan.text,
        0, "max", torch.is_grad_enabled() and weight.requires_grad, chosen,
    )  # fmt: skip
    return y.view(*x.shape[:-1], weight.shape[0])


def transformer_engine_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None, backend: str = "auto"
) -> Tensor:
    """x (..., K) W (N, K)^T + bias in FP8 with scales from the tensors themselves; has gradients, in FP8 too.

    recipe: None is `Float8CurrentScaling()`; `MXFP8BlockScaling` and `Float8BlockScaling` go as well. A history needs
    somewhere to live: use `Linear` for `DelayedScaling`.
    """
    recipe = Float8CurrentScaling() if recipe is None else recipe
    check_recipe(recipe)
    if isinstance(recipe, DelayedScaling | NVFP4BlockScaling):
        raise InvalidInputError("recipe must be one of FP8 that keeps no history, such as Float8CurrentScaling()")
    return _once(x, weight, bias, recipe, backend)


def transformer_engine_fp4(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: NVFP4BlockScaling | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """The same in NVFP4, with gradients. Emulated on every GPU so far: the numbers are right, the speed is bf16's."""
    recipe = NVFP4BlockScaling() if recipe is None else recipe
    if not isinstance(recipe, NVFP4BlockScaling):
        raise InvalidInputError(f"recipe must be an NVFP4BlockScaling, got {type(recipe).__name__}")
    return _once(x, weight, bias, recipe, backend)


PRECISIONS: dict[str, Recipe | None] = {
    "bf16": None, "fp8": DelayedScaling(), "mxfp8": MXFP8BlockScaling(), "fp4": NVFP4BlockScaling(),
}  # fmt: skip


def transformer_engine_layer(
    hidden_size: int, num_heads: int, *, ffn_hidden_size: int | None = None, precision: str = "fp8",
    dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
) -> TransformerLayer:  # fmt: skip
    """A `TransformerLayer` with products in "fp8", "mxfp8", "fp4" or "bf16"; (batch, seqlen, hidden) in and out."""
    if precision not in PRECISIONS:
        raise InvalidInputError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return TransformerLayer(
        hidden_size, ffn_hidden_size or 4 * hidden_size, num_heads, attn_input_format="bshd", params_dtype=dtype,
        device=device, recipe=PRECISIONS[precision],
    )  # fmt: skip
