"""`convert`: make the linear layers of a model quantised ones; and functions under the names of the first documents."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.transformer_engine.checks import check_bias, check_choice, check_floats, check_one_device, check_size
from gpu_accel.transformer_engine.context import check_recipe
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.linear_op import BACKENDS, Plan, layer_backend, linear_op
from gpu_accel.transformer_engine.modules import TransformerLayer
from gpu_accel.transformer_engine.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from gpu_accel.transformer_engine.sources import operand_op


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
    they do besides would be lost, so `out_proj` of torch.nn.MultiheadAttention stays as it is. A model that is itself a
    torch.nn.Linear comes back as a new object. Hooks and attributes of a layer come along.

    torch.nn.TransformerEncoderLayer has a fast path for evaluation that reads the weights and calls no layer: where
    `linear1` or `linear2` is quantised it is turned off, for good.

    Raises:
        InvalidInputError: a model, recipe, filter or backend that is none. UnsupportedError: a torch.nn.Linear with
            parameters, modules or a `forward` of its own; the model stays as it was.
    """
    check_recipe(recipe)
    if filter is not None and not callable(filter):
        raise InvalidInputError(f"filter must be a function of a name and a layer, or None, got {shown(filter)}")
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend of a layer must be one of {', '.join(BACKENDS)}, got {shown(backend)}")
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = filter if filter is not None else lambda name, _: name.rsplit(".", 1)[-1] not in ("lm_head", "head")
    if type(model) is nn.Linear:
        return Linear.from_torch(model, recipe=recipe, backend=backend) if wanted("", model) else model
    if isinstance(model, Linear) and recipe is not None and wanted("", model):
        model.recipe = recipe
    made: dict[int, Linear] = {}  # one layer under several names stays one
    places: list[tuple[nn.Module, str, Linear]] = []
    for name, module in list(model.named_modules(remove_duplicate=True)):
        for child_name, child in list(module._modules.items()):  # named_children leaves out what has two names
            full = f"{name}.{child_name}" if name else child_name
            if isinstance(child, Linear):
                if wanted(full, child) and recipe is not None:
                    child.recipe = recipe
            elif type(child) is nn.Linear and wanted(full, child):
                if id(child) not in made:
                    made[id(child)] = Linear.from_torch(child, recipe=recipe, backend=backend)
                places.append((module, child_name, made[id(child)]))
    for module, child_name, layer in places:
        setattr(module, child_name, layer)
    _leave_fast_paths(model)
    return model


def _leave_fast_paths(model: nn.Module) -> None:
    """Make torch's encoder layers call their linear layers, and encoders pad instead of nesting."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer):
            layers = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)]
            if any(isinstance(one, Linear) for layer in layers for one in layer.children()):
                # 0 is what torch sets for an activation that its fast path lacks
                whole = isinstance(module, nn.TransformerEncoder)
                setattr(module, "use_nested_tensor" if whole else "activation_relu_or_gelu", 0)


def _once(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, backend: str) -> Tensor:
    check_floats("x", x)
    check_floats("weight", weight)
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise InvalidInputError(
            f"x must be (..., K) and weight (N, K), got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    check_bias(bias, weight.shape[0])
    check_one_device(x=x, weight=weight, bias=bias)
    chosen = layer_backend(backend, x)
    plan = Plan.of(recipe)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    grads = torch.is_grad_enabled()
    wanted = ((flat, plan.input, plan.input_t, grads and weight.requires_grad),
              (weight, plan.weight, plan.weight_t, grads and x.requires_grad))  # fmt: skip
    operand, (*kept, _, _) = (
        operand_op(t.detach(), None, None, s.text, s_t.text, True, col, 0, chosen, "", None, None, 0.0)
        for t, s, s_t, col in wanted
    )
    y = linear_op(flat, weight, bias, None, None, *operand, *kept, None, None, None, None, plan.text, "", 0.0, 0, "max",
                  chosen)  # fmt: skip
    return y.view(*x.shape[:-1], weight.shape[0])


def transformer_engine_fp8(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe | None = None, backend: str = "auto"
) -> Tensor:
    """x (..., K) W (N, K)^T + bias in FP8 with scales from the tensors themselves; has gradients, in FP8 too.

    recipe: None is `Float8CurrentScaling()`; `MXFP8BlockScaling` and `Float8BlockScaling` go as well. A history needs
    somewhere to live: use `Linear` for `DelayedScaling`. backend and errors as of `Linear`.
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
    """x (..., K) W (N, K)^T + bias in NVFP4, with gradients. Emulated on every GPU so far: the numbers are right, the
    speed is bf16's. recipe: None is `NVFP4BlockScaling()`. backend and errors as of `Linear`."""
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
    """A `TransformerLayer` with products in "fp8", "mxfp8", "fp4" or "bf16"; (batch, seqlen, hidden) in and out.

    ffn_hidden_size: None is 4 hidden_size. dtype, device: of the parameters. "fp8" is delayed scaling.
    Raises InvalidInputError for another precision, or heads that do not divide hidden_size.
    """
    check_choice("precision", precision, PRECISIONS)
    check_size("hidden_size", hidden_size)
    return TransformerLayer(
        hidden_size, 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size, num_heads,
        attn_input_format="bshd", params_dtype=dtype, device=device, recipe=PRECISIONS[precision],
    )  # fmt: skip
