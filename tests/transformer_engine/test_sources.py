"""Norms and activations that are computed while their results are quantised, and the launch for histories."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.transformer_engine import linear_op
from gpu_accel.transformer_engine.activations import (
    ACTIVATIONS,
    activate_reference,
    activation_backward_op,
    activation_op,
    gradient_reference,
)
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.history_kernels import LONGEST, roll, roll_op, roll_together
from gpu_accel.transformer_engine.modules import LayerNormLinear, LayerNormMLP
from gpu_accel.transformer_engine.quantize_launch import Source
from gpu_accel.transformer_engine.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from gpu_accel.transformer_engine.schemes import scheme
from gpu_accel.transformer_engine.sources import operand_op, source_backward, source_reference


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Kernels against float64, and their gradients against autograd's."""
    widening = ACTIVATIONS[name][1]
    x, dy = values(3, widening * 37) * 4, values(3, 37, seed=1)
    z = x.double().requires_grad_()
    truth = activate_reference(z, name)
    truth.backward(dy.double())
    y, dx = activation_op(x, name), activation_backward_op(dy, x, name)
    assert_close_to_truth(name, y, truth.detach(), truth.detach().float(), factor=8)
    assert z.grad is not None
    assert_close_to_truth(f"gradient of {name}", dx, z.grad, z.grad.float(), factor=8)


def norm(x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    wide = x if beta is None else x - x.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma
    return wide if beta is None else wide + beta


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_of_norms(kind, kernels):
    x, dy = values(5, 48), values(5, 48, seed=1)
    gamma, beta = 1 + values(48, seed=2) / 4, values(48, seed=3) if kind == "layer" else None
    given = [None if t is None else t.double().requires_grad_() for t in (x, gamma, beta)]
    norm(*given).backward(dy.double())
    source = Source(kind, gamma, beta, 1e-5)
    _, means, rstds = source_reference(x, source)
    for name, mine, z in zip("xgb", source_backward(dy, x, source, means, rstds, kernels=kernels), given, strict=True):
        if z is not None:
            assert mine is not None and z.grad is not None
            torch.testing.assert_close(mine.double(), z.grad, rtol=1e-4, atol=1e-5, msg=f"gradient of {name}")


SCHEMES = ("fp8", "fp8-given", "fp8_1x128", "mxfp8", "nvfp4")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["rms", "layer", "swiglu", "gelu"])
def test_quantised_on_the_way(kind, name):
    """Both copies are as near to the exact norm or activation as those of the written one are (Triton's interpreter
    does not round to bf16 as a GPU does, which costs a few percent)."""
    rows, cols = 33, 80
    x = (values(rows, 2 * cols if kind == "swiglu" else cols) * 3).bfloat16()
    source = Source(kind)
    if source.is_norm:
        source = Source(kind, 1 + values(cols, seed=1) / 4, values(cols, seed=2) if kind == "layer" else None, 1e-5)
        exact = norm(x.double(), *(None if t is None else t.double() for t in (source.gamma, source.beta)))
    else:
        exact = activate_reference(x.double(), kind)
    what = scheme(name.removesuffix("-given"))
    scale = torch.tensor(0.05) if name.endswith("given") else None
    errors, maxima = [], []
    for backend in ("portable", "reference"):
        seen = None if scale is None else torch.tensor(0.25)
        made = operand_op(
            x, scale, seen, what.text, what.text, True, True, 0, backend, kind, source.gamma, source.beta, source.eps
        )  # fmt: skip
        maxima.append(seen)
        for parts, shape in ((made[:3], (rows, cols)), (made[3:6], (cols, rows))):
            found = linear_op._rows(parts, what, shape, torch.float32).dequantize().double()
            truth = exact if shape[0] == rows else exact.t()
            errors.append((found - truth).norm() / truth.norm())
    assert 0 < errors[0] < 1.05 * errors[2] and 0 < errors[1] < 1.05 * errors[3], errors
    if scale is not None:
        assert maxima[1] > 0.25
        torch.testing.assert_close(maxima[0], maxima[1], rtol=1e-2, atol=0)


def state(length: int, pending: float) -> list[Tensor]:
    history = torch.zeros(length)
    history[: length // 2] = values(length // 2).abs()
    return [history, torch.tensor(0.01), torch.tensor(pending), torch.zeros(2, dtype=torch.int64)]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 1024, LONGEST + 1])
def test_one_launch_for_histories(length, algorithm):
    """Bit for bit what plain torch does: a usual maximum, none, a clipped one, Inf and NaN."""
    for pair in ((0.5, 0.0), (100.0, math.inf), (math.nan, 1e-42), (1e38, 3.0)):
        ours = [state(length, p) for p in pair]
        truth = [state(length, p) for p in pair]
        largest = [448.0, 57344.0]
        out = roll_op([t for one in ours for t in one], largest, 1, algorithm, True)
        for i, one in enumerate(truth):
            roll(*one, largest=largest[i], margin=1, algorithm=algorithm)
            for mine, theirs in zip(ours[i], one, strict=True):
                assert torch.equal(mine, theirs), (pair[i], mine, theirs)
            assert out[i, 0] == one[1]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_all_histories_of_a_model_together(algorithm):
    """Bit for bit `roll` of each, whatever lengths and formats are mixed; the maxima given count, not those pending."""
    cases = [(length, p, top) for length in (1, 4, 16) for p in (0.5, 0.0, 100.0, math.inf, math.nan, 1e-42, 1e38)
             for top in (448.0, 57344.0)]  # fmt: skip
    ours, truth = [state(length, 7.0) for length, *_ in cases], [state(length, p) for length, p, _ in cases]
    roll_together(ours, [torch.tensor(p) for _, p, _ in cases], [top for *_, top in cases], 1, algorithm)
    for one, other, (_, _, top) in zip(ours, truth, cases, strict=True):
        roll(*other, largest=top, margin=1, algorithm=algorithm)
        assert all(map(torch.equal, one, other)), (one, other)


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()],
                         ids=lambda r: type(r).__name__)  # fmt: skip
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_fused_layers_are_the_unfused_ones(normalization, recipe):
    """A hook that wants to see the norm's output keeps it from being fused; nothing else differs but rounding."""

    def run(kind: str, hooked: bool, backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        more = dict(normalization=normalization, bias=True, recipe=recipe, backend=backend, zero_centered_gamma=True)
        if kind == "linear":
            layer = LayerNormLinear(48, 40, **more)
        else:
            layer = LayerNormMLP(48, 32, activation="swiglu", **more)
        with torch.no_grad():
            layer.norm.weight.add_(values(48, seed=5) / 8)
        seen = []
        if hooked:
            layer.norm.register_forward_hook(lambda *_: seen.append(1))
        for step in range(2):
            x = values(2, 9, 48, seed=step).requires_grad_()
            layer.zero_grad()
            y = layer(x)
            y.backward(values(*y.shape, seed=7))
        assert len(seen) == 2 * hooked
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    # the kernels in the interpreter take seconds, and differ by recipe only where other tests look
    kernels = normalization == "RMSNorm" and isinstance(recipe, DelayedScaling)
    backends = ("reference", "portable") if kernels else ("reference",)
    for kind in ("linear", "mlp"):
        plain = run(kind, True, "reference")
        for backend in backends:
            for one, other in zip(run(kind, False, backend), plain, strict=True):
                assert (one - other).norm() <= 0.02 * other.norm() + 1e-6


def test_no_gradient_of_x_but_of_the_norm():
    layer = LayerNormLinear(32, 16, backend="reference")
    with autocast(recipe=Float8CurrentScaling()):
        layer(values(4, 32)).sum().backward()
    assert layer.norm.weight.grad is not None and layer.norm.weight.grad.abs().sum() > 0
    with torch.no_grad(), autocast(recipe=Float8CurrentScaling()):
        assert not layer(values(0, 32)).numel()


def test_gradients_of_gelu_where_a_square_is_infinite(device):
    sizes = torch.tensor([[12.0, 1e4, 5e19, 3e38]], device=device)
    x = torch.cat([-sizes, sizes], 1).requires_grad_()
    activate_reference(x, "gelu").sum().backward()
    for found in (x.grad, gradient_reference(torch.ones_like(x), x, "gelu"),
                  activation_backward_op(torch.ones_like(x), x.detach(), "gelu")):  # fmt: skip
        assert (found - (x > 0).float()).abs().max() < 1e-9
