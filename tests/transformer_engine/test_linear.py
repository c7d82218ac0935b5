"""Quantised linear layers: values and gradients against float64 on what the codes mean, and what a recipe must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.transformer_engine import linear_op
from gpu_accel.transformer_engine.context import autocast, checkpoint, fp8_autocast
from gpu_accel.transformer_engine.grouped_linear import GroupedLinear
from gpu_accel.transformer_engine.linear import Linear as AnyLinear
from gpu_accel.transformer_engine.linear_op import Plan
from gpu_accel.transformer_engine.modules import LayerNormLinear, LayerNormMLP, TransformerLayer
from gpu_accel.transformer_engine.overflow import OverflowGuard
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from gpu_accel.transformer_engine.reference_gemm import scaled_mm_reference
from gpu_accel.transformer_engine.schemes import scheme
from gpu_accel.transformer_engine.sources import operand_op

SHAPES = {"ragged": (37, 96, 72), "small": (3, 16, 8), "one": (1, 1, 1), "long-k": (17, 300, 33)}
DELAYED = DelayedScaling(amax_history_len=4)


def Linear(*arguments, **keywords) -> AnyLinear:
    """The kernels give the bits of the reference (other tests), which is faster than Triton's interpreter."""
    return AnyLinear(*arguments, **{"backend": "reference"} | keywords)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def meaning(x, scheme, scheme_t, *, scale=None, seed=None):
    """(what the row-wise codes of x mean, what the column-wise ones mean), float64, rotations left in."""
    given = [dict(scale=scale, seed=seed if s.rounding == "stochastic" else None) for s in (scheme, scheme_t)]
    row = quantize(x, scheme, backend="reference", **given[0]).dequantize(torch.float32, rotated=True)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16 if scheme_t.hadamard else 0))
    col = quantize(padded, scheme_t, rowwise=False, columnwise=True, backend="reference", **given[1])
    return row.double(), col.dequantize_columns(torch.float32, rotated=True).double()


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_and_reference_agree(name, monkeypatch):
    monkeypatch.setattr(linear_op, "next_seed", lambda: 7)
    x, dy = values(17, 48), values(17, 24, seed=1)
    results = []
    for backend in ("portable", "reference"):
        torch.manual_seed(0)
        layer = Linear(48, 24, recipe=RECIPES[name], backend=backend)
        z = x.clone().requires_grad_()
        y = layer(z)
        y.backward(dy)
        results.append((y, z.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RECIPES)
def test_products_of_what_the_codes_mean(name, shape, dtype, monkeypatch):
    """y, dx and dW are float64 products of the dequantised operands, up to float32 sums and the output's rounding."""
    monkeypatch.setattr(linear_op, "next_seed", lambda: 7)
    recipe, (m, k, n) = RECIPES[name], SHAPES[shape]
    plan = Plan.of(recipe)
    layer = Linear(k, n, recipe=recipe)
    x = values(m, k, dtype=dtype).requires_grad_()
    dy = values(m, n, seed=1, dtype=dtype)
    y = layer(x)
    y.backward(dy)
    one = torch.ones(()) if name == "fp8_delayed" else None  # a history without entries
    a, a_t = meaning(x.detach(), plan.input, plan.input_t, scale=one)
    w, w_t = meaning(layer.weight.detach(), plan.weight, plan.weight_t, scale=one)
    g, g_t = meaning(dy, plan.grad, plan.grad_t, scale=one, seed=7)
    for what, out, left, right, bias in (
        ("y", y, a, w, layer.bias),
        ("dx", x.grad, g, w_t, None),
        ("dW", layer.weight.grad, g_t, a_t, None),
    ):
        truth = left @ right.t() + (0 if bias is None else bias.double())
        ruler = (left.float() @ right.float().t() + (0 if bias is None else bias.float())).to(out.dtype)
        floor = 1e-6 * (left.abs() @ right.abs().t()).max().item() + 1e-30
        assert_close_to_truth(what, out.detach(), truth.detach(), ruler.detach(), factor=3.0, floor=floor)
    assert_close_to_truth("dbias", layer.bias.grad, dy.double().sum(0), dy.float().sum(0))
    assert y.dtype == x.grad.dtype == dtype and layer.weight.grad.dtype == torch.float32


# Relative error of y, dx and dW from products of what was not quantised. Of N(0, 1) e4m3 errs 2.6 % (2-norm),
# a product of two such operands sqrt(2) times that; e5m2 twice as much; e2m1 in blocks of 16 about 9 %.
EXPECTED = {"fp8_current": 0.07, "fp8_delayed": 0.07, "fp8_block": 0.05, "mxfp8": 0.05, "nvfp4": 0.22}


@pytest.mark.parametrize("name", RECIPES)
def test_error_from_exact_products(name):
    layer = Linear(256, 128, recipe=RECIPES[name])
    plain = nn.Linear(256, 128).double()
    plain.load_state_dict({k: v.double() for k, v in layer.state_dict().items() if "delayed" not in k})
    for step in range(2):  # the second step has histories
        x, dy = values(4, 16, 256, seed=step).requires_grad_(), values(4, 16, 128, seed=5 + step)
        layer.zero_grad()
        y = layer(x)
        y.backward(dy)
    z = x.detach().double().requires_grad_()
    truth = plain(z)
    truth.backward(dy.double())
    for out, want in ((y, truth), (x.grad, z.grad), (layer.weight.grad, plain.weight.grad)):
        error = ((out - want).norm() / want.norm()).item()
        assert 0.005 < error < EXPECTED[name], error


def test_gradients_of_random_rounding_are_unbiased():
    """Averaged over seeds, NVFP4's gradient comes close to what one draw misses."""
    layer = Linear(64, 64, bias=False, recipe=NVFP4BlockScaling())
    x, dy = values(32, 64).requires_grad_(), values(32, 64, seed=1)
    torch.manual_seed(0)
    draws = []
    for _ in range(24):
        x.grad = None
        layer(x).backward(dy)
        draws.append(x.grad.double())
    plan = Plan.of(layer.recipe)
    _, w_t = meaning(layer.weight.detach(), plan.weight, plan.weight_t)
    truth = dy.double() @ w_t.t()
    one = ((draws[0] - truth).norm() / truth.norm()).item()
    mean = ((torch.stack(draws).mean(0) - truth).norm() / truth.norm()).item()
    assert mean < one / 3, (one, mean)
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(0)
    x.grad = None
    layer(x).backward(dy)
    assert torch.equal(x.grad.double(), draws[0])  # torch's seed fixes it


def test_no_rows_and_odd_strides():
    layer = Linear(48, 40, recipe=Float8CurrentScaling())
    x = values(0, 5, 48).requires_grad_()
    y = layer(x)
    assert y.shape == (0, 5, 40)
    y.sum().backward()
    assert x.grad.shape == x.shape and not layer.weight.grad.any()
    wide = values(7, 96)[:, ::2].requires_grad_()
    layer(wide).sum().backward()  # its gradient is expanded from one number
    again = wide.detach().contiguous().requires_grad_()
    layer(again).backward(torch.ones(7, 40))
    assert torch.equal(layer(wide), layer(again)) and torch.equal(wide.grad, again.grad)


def test_only_wanted_gradients_are_made():
    x = values(8, 32)
    for name, recipe in RECIPES.items():
        frozen = Linear(32, 16, recipe=recipe).requires_grad_(False)
        z = x.clone().requires_grad_()
        frozen(z).sum().backward()
        assert z.grad is not None and frozen.weight.grad is None, name
        layer = Linear(32, 16, recipe=recipe)
        layer(x).sum().backward()
        assert layer.weight.grad is not None and layer.bias.grad is not None
        with torch.no_grad():
            assert not layer(x).requires_grad


def test_second_derivatives_are_refused():
    layer = Linear(32, 16, recipe=Float8CurrentScaling())
    x = values(4, 32).requires_grad_()
    (gx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=False)
    assert gx.shape == x.shape
    with pytest.raises(UnsupportedError, match="first gradients"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "norm alone"])
def test_second_derivatives_are_refused_where_the_gradient_that_comes_in_is_constant(name):
    """Gradients are made of codes, which do not say that they were made of x and of the weight."""
    made: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: Linear(32, 16, recipe=Float8CurrentScaling()),
        "LayerNormLinear": lambda: LayerNormLinear(32, 16, recipe=Float8CurrentScaling()),
        "LayerNormMLP": lambda: LayerNormMLP(32, 32, recipe=Float8CurrentScaling()),
        "GroupedLinear": lambda: GroupedLinear(2, 32, 16, recipe=Float8CurrentScaling()),
        "norm alone": lambda: LayerNormLinear(32, 16, recipe=Float8CurrentScaling()),
    }
    layer = made[name]()
    if name == "norm alone":
        for p in layer.parameters():  # then dx does not depend on what wants gradients but by the norm
            p.requires_grad_(p.dim() == 1)
    x = values(4, 32).requires_grad_()
    y = layer(x, [1, 3]) if name == "GroupedLinear" else layer(x)
    with pytest.raises(UnsupportedError, match="first gradients"):
        torch.autograd.grad(y.sum(), [x, *(p for p in layer.parameters() if p.requires_grad)], create_graph=True)


def test_second_gradients_of_attention_between_layers_are_refused_in_the_same_words():
    """Products of a layer without a recipe are torch's; gradients of attention come from kernels."""
    layer = TransformerLayer(32, 64, 2, bias=False, attn_input_format="bshd", params_dtype=torch.float32)
    x = values(1, 4, 32).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first gradients"):
        dx.sum().backward()


def test_create_graph_is_taken_where_gradients_do_not_depend_on_what_wants_them():
    layer = Linear(32, 16, recipe=Float8CurrentScaling())
    layer.weight.requires_grad_(False)
    x = values(4, 32).requires_grad_()
    first, second = (torch.autograd.grad(layer(x).sum(), x, create_graph=again)[0] for again in (False, True))
    assert torch.equal(first, second) and not second.requires_grad


# -- what decides the recipe


def test_what_decides_the_recipe():
    x = values(8, 64)
    layer = Linear(64, 32)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)
    with autocast(recipe=Float8CurrentScaling()):
        fp8 = layer(x)
        with autocast(enabled=False):
            assert torch.equal(layer(x), plain)
        with autocast(recipe=NVFP4BlockScaling()):
            fp4 = layer(x)
        assert torch.equal(layer(x), fp8)
    assert torch.equal(layer(x), plain)
    assert not torch.equal(fp8, plain) and not torch.equal(fp4, fp8)
    layer.recipe = NVFP4BlockScaling()
    assert torch.equal(layer(x), fp4)
    with autocast(enabled=False):
        assert torch.equal(layer(x), plain)
    with fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
        assert torch.equal(layer(x), fp8)
    with pytest.raises(ZeroDivisionError), autocast(recipe=Float8CurrentScaling()):
        raise ZeroDivisionError
    layer.recipe = None
    assert torch.equal(layer(x), plain)


def test_torch_autocast_decides_the_dtype():
    layer = Linear(64, 32, recipe=MXFP8BlockScaling())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(values(8, 64)).dtype == torch.bfloat16
    assert layer(values(8, 64, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: Linear(0, 4), "in_features"),
        (lambda: Linear(4, True), "out_features"),
        (lambda: Linear(4, 4, recipe="fp8"), "recipe"),
        (lambda: Linear(4, 4, backend="cuda"), "backend"),
        (lambda: Linear(4, 4, recipe=MXFP8BlockScaling())(torch.ones(2, 5)), "x must be"),
        (lambda: Linear(4, 4, recipe=MXFP8BlockScaling())(torch.ones(2, 4).double()), "float32"),
        (lambda: Linear(4, 4)(torch.ones(2, 4).long()), "floats"),
        (lambda: autocast(recipe=3).__enter__(), "recipe"),
        (lambda: autocast(enabled=1).__enter__(), "enabled"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals(make, word):
    with pytest.raises(InvalidInputError, match=word):
        make()


# -- delayed scaling


def test_scales_follow_the_maxima_before():
    layer = Linear(32, 16, recipe=DELAYED)
    histories = layer.delayed
    maxima = []
    for step in range(6):
        x = values(8, 32, seed=step) * (step + 1)
        maxima.append(x.abs().max().item())
        dy = values(8, 16, seed=20 + step)
        layer(x).backward(dy)
        before = maxima[:-1][-4:]  # what had been entered when this step's scale was made
        want = max(before) / 448 if before else 1.0
        assert histories.input.scale.item() == pytest.approx(want, rel=1e-6), step
    assert histories.input.history.tolist() == pytest.approx(maxima[:-1][::-1][:4])
    assert histories.input.pending.item() == pytest.approx(maxima[-1])
    assert histories.grad.scale.item() == pytest.approx(histories.grad.history.max().item() / 57344, rel=1e-6)
    # each step but the first was larger than all before; the last is counted when it is entered
    assert histories.overflowed().tolist()[0] == [0, 4]


def test_evaluation_and_recomputation_change_no_history():
    layer = Linear(32, 16, recipe=DELAYED)
    layer(values(8, 32)).sum().backward()
    layer(values(8, 32, seed=1)).sum().backward()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.eval()
    with torch.no_grad():
        layer(values(8, 32) * 100)
    layer(values(8, 32) * 100)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("how", ["ours", "torch", "torch-reentrant"])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_changes_nothing(name, how):
    """TransformerEngine#1190: equal gradients, histories and scales with and without, over several steps."""
    recipe = DELAYED if name == "fp8_delayed" else RECIPES[name]
    results = []
    for keep in (True, False):
        torch.manual_seed(3)
        block = nn.Sequential(Linear(32, 48), nn.GELU(), Linear(48, 32))
        torch.manual_seed(4)  # of random rounding

        def run(x, block=block):
            with autocast(recipe=recipe):
                return block(x)

        grads = []
        for step in range(3):
            block.zero_grad()
            x = (values(8, 32, seed=step) * (1 + step)).requires_grad_()
            if keep:
                y = run(x)
            elif how == "ours":
                with autocast(recipe=recipe):
                    y = checkpoint(block, x)
            else:
                y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=how == "torch-reentrant")
            y.square().sum().backward()
            grads += [x.grad, *(p.grad.clone() for p in block.parameters())]
        results.append((grads, block.state_dict()))
    for one, other in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, other)
    for key, value in results[0][1].items():
        assert torch.equal(value, results[1][1][key]), key


def test_checkpoint_keeps_scales_of_a_layer_used_again_in_between():
    """Two microbatches forward, then both backward: the first is recomputed after the second changed the scales."""
    grads = []
    for keep in (True, False):
        torch.manual_seed(3)
        layer = Linear(32, 16, recipe=DELAYED)
        layer(values(8, 32, seed=9)).sum().backward()
        layer.zero_grad()
        xs = [(values(8, 32, seed=s) * (10 ** (2 * s))).requires_grad_() for s in range(3)]
        ys = [layer(x) if keep else checkpoint(layer, x) for x in xs]
        for y in ys:
            y.square().sum().backward()
        grads.append([layer.weight.grad.clone(), *(x.grad for x in xs)])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_state_is_saved_and_loaded():
    layer = Linear(32, 16, recipe=DELAYED)
    for step in range(3):
        layer(values(8, 32, seed=step)).sum().backward()
    saved = {k: v.clone() for k, v in layer.state_dict().items()}
    assert all(isinstance(v, torch.Tensor) for v in saved.values())
    fresh = Linear(32, 16)  # knows of no recipe yet
    fresh.load_state_dict(saved)
    fresh.recipe = DELAYED
    x = values(8, 32, seed=4)
    assert torch.equal(layer(x), fresh(x))
    for key, value in layer.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key]), key
    with pytest.raises(InvalidInputError, match="length 4"), autocast(recipe=DelayedScaling(amax_history_len=8)):
        fresh(x)
    half = layer.to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16 and half.delayed.input.scale.dtype == torch.float32
    assert torch.equal(half.delayed.input.history, fresh.delayed.input.history)


def test_weights_are_kept_between_microbatches():
    layer = Linear(32, 16, recipe=Float8CurrentScaling())
    x = values(8, 32)
    first = layer(x, is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(x, is_first_microbatch=False), first)
    assert not torch.equal(layer(x, is_first_microbatch=True), first)


@pytest.mark.parametrize("name", RECIPES)
def test_evaluation_sees_every_change_of_the_weight(name):
    """Edits through .data do not change the version of a tensor, so nothing is kept unless asked for."""
    layer = Linear(32, 16, bias=False, recipe=RECIPES[name]).eval()
    with torch.no_grad():
        before = layer(values(8, 32))
        layer.weight.data.mul_(-1)
        assert torch.equal(layer(values(8, 32)), -before)


@pytest.mark.parametrize("assign", [False, True])
def test_histories_of_a_checkpoint_in_bfloat16_are_float32(assign):
    """Whoever halves a whole checkpoint halves them too; a kernel reads four bytes of each."""
    layers = [Linear(32, 32) for _ in range(2)]
    x = values(32, 32).requires_grad_()
    with autocast(recipe=DelayedScaling(amax_history_len=4)):
        for layer in layers:
            layer(x).sum().backward()
        state = {name: t.bfloat16() if t.is_floating_point() else t for name, t in layers[0].state_dict().items()}
        layers[1].load_state_dict(state, assign=assign)
        assert all(t.dtype in (torch.float32, torch.int64) for t in layers[1].delayed.state_dict().values())
        assert layers[1](x.to(layers[1].weight.dtype)).isfinite().all()


def test_a_state_without_histories_leaves_them():
    layer, plain = Linear(8, 8, recipe=DELAYED), nn.Linear(8, 8)
    layer(values(4, 8)).sum().backward()
    layer(values(4, 8)).sum().backward()
    before = {k: v.clone() for k, v in layer.delayed.state_dict().items()}
    assert before["input.history"].any()
    nn.Sequential(layer).load_state_dict({f"0.{k}": v for k, v in plain.state_dict().items()})
    assert torch.equal(layer.weight, plain.weight)
    assert all(torch.equal(v, before[k]) for k, v in layer.delayed.state_dict().items())
    some = layer.state_dict()
    del some["delayed.grad.scale"]
    with pytest.raises(RuntimeError, match="delayed.grad.scale"):
        layer.load_state_dict(some)


# -- overflow


def test_overflow_is_skipped_counted_and_recovered_from():
    torch.manual_seed(0)
    layer = Linear(32, 16, recipe=DELAYED)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    guard = OverflowGuard(layer, optimizer, limit=3)

    def step(factor: float) -> bool:
        optimizer.zero_grad()
        layer(values(8, 32)).backward(values(8, 16, seed=1) * factor)
        return guard.step()

    assert step(1.0) and step(1.0)
    before = layer.weight.clone()
    scale = layer.delayed.grad.scale.item()
    assert not step(math.inf)
    assert torch.equal(layer.weight, before) and guard.skipped == 1
    assert layer.delayed.grad.scale.item() == pytest.approx(2 * scale)  # room for a factor of two
    assert step(1.0) and not torch.equal(layer.weight, before)
    assert guard.report()[""]["grad"] == (1, 0)
    assert layer.delayed.grad.history[0].item() > 0
    for _ in range(4):
        assert step(1.0)
    assert layer.delayed.grad.scale.item() == pytest.approx(scale)  # and the room is given back
    assert not step(math.nan) and not step(math.nan)
    with pytest.raises(RuntimeError, match="in a row"):
        step(math.nan)


def test_the_short_way_to_hoppers_product(monkeypatch):
    """From the second step on, with the operands that the product has had in the first."""
    calls = []

    class Stub:
        @staticmethod
        def _init_fn(a, scale_a, b, scale_b, bias, activation, out_dtype, text_a, text_b):
            calls.append((text_a, text_b))
            pair = [linear_op._rows((t, s, t[:0, 0]), scheme(w), tuple(t.shape), torch.float32)
                    for t, s, w in ((a, scale_a, text_a), (b, scale_b, text_b))]  # fmt: skip
            return scaled_mm_reference(*pair, bias=bias, out_dtype=out_dtype)

    def product(a, b, backend, out_dtype, bias):
        return scaled_mm_reference(a, b, bias=bias, out_dtype=out_dtype)

    monkeypatch.setattr(linear_op, "_ways", {})
    monkeypatch.setattr(linear_op.hopper_gemm, "scheme_refusal", lambda a, b: None)
    monkeypatch.setattr(linear_op.hopper_gemm, "chosen", lambda a, b, backend: True)
    monkeypatch.setattr(linear_op.hopper_gemm, "hopper_mm_op", Stub)
    monkeypatch.setattr(linear_op, "_product", product)
    layer, made = Linear(48, 32, recipe=Float8BlockScaling()), []
    for _ in range(2):
        layer.zero_grad()
        x = values(5, 48).requires_grad_()
        y = layer(x)
        y.backward(values(5, 32, seed=1))
        made.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    assert len(calls) == 3 and len(set(calls)) == 2
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
    made[0] = layer(values(0, 48))
    layer(values(0, 48))
    assert len(calls) == 3


# -- torch.compile


@pytest.mark.parametrize("name", RECIPES)
def test_compiles_to_one_graph(name):
    """TransformerEngine#705: fullgraph, with delayed scaling too, whose histories change alike."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "nvfp4" else RECIPES[name]
    torch._dynamo.reset()
    layer, other = Linear(48, 32, recipe=recipe), Linear(48, 32, recipe=recipe)
    other.load_state_dict(layer.state_dict())
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = values(3, 5, 48, seed=step).requires_grad_()
        z = x.detach().clone().requires_grad_()
        y, y2 = layer(x), compiled(z)
        y.square().sum().backward()
        y2.square().sum().backward()
        assert torch.equal(y, y2) and torch.equal(x.grad, z.grad)
        assert torch.equal(layer.weight.grad, other.weight.grad)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def test_compile_refuses_a_frozen_seed():
    layer = Linear(48, 32, recipe=NVFP4BlockScaling())
    with pytest.raises((UnsupportedError, torch._dynamo.exc.Unsupported), match="stochastic|seed"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(values(4, 48))


def test_custom_ops_keep_their_word():
    layer = Linear(32, 16)
    gamma = torch.nn.Parameter(torch.ones(32))
    for recipe, kind in ((Float8CurrentScaling(), ""), (Float8BlockScaling(), "rms")):
        p = Plan.of(recipe)
        given = gamma if kind else None
        x = values(4, 32).requires_grad_()
        inputs = (x.detach(), None, None, p.input.text, p.input_t.text, True, True, 0, "reference", kind)
        inputs = (*inputs, None if given is None else given.detach(), None, 1e-5)
        weights = (layer.weight.detach(), None, None, p.weight.text, p.weight_t.text, True, True, 0, "reference", "")
        *kept, _, _ = operand_op(*weights, None, None, 0.0)
        arguments = (x, layer.weight, layer.bias, given, None, *operand_op(*inputs), *kept, *(None,) * 4)
        settings = (p.text, kind, 1e-5, 0, "max", "reference")
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operand_op, inputs, test_utils=tests)
        torch.library.opcheck(linear_op.linear_op, (*arguments, *settings), test_utils=tests)


@pytest.mark.parametrize(
    "recipe", [DELAYED, Float8CurrentScaling(), MXFP8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_evaluation_in_inference_mode_before_training(recipe):
    """What a layer keeps of a first call there, histories and quantised weights, serves training afterwards."""
    layer, x = Linear(32, 16), torch.ones(4, 32, requires_grad=True)
    for mode in (torch.inference_mode(), torch.enable_grad()):
        with mode, autocast(recipe=recipe):
            y = layer(x)
    y.sum().backward()
    assert x.grad.isfinite().all() and layer.weight.grad.any()


def test_a_first_step_with_histories_may_be_compiled():
    """They are made outside of the graph, and the second step has one graph."""
    torch._dynamo.reset()
    layers = [Linear(32, 16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for step in range(2):
        x = values(4, 32, seed=step)
        with autocast(recipe=DELAYED):
            found = [run(x) for run in (layers[0], torch.compile(layers[1], backend="aot_eager"))]
        for y in found:
            y.square().sum().backward()
        assert torch.equal(*found) and torch.equal(*(layer.weight.grad for layer in layers))


def test_the_guard_reads_sparse_gradients():
    table = nn.Embedding(5, 4, sparse=True)
    guard = OverflowGuard(table, torch.optim.SparseAdam(table.parameters()))
    for factor, made in ((1.0, True), (math.inf, False)):
        guard.optimizer.zero_grad()
        (table(torch.tensor([1, 1])) * factor).sum().backward()
        assert guard.step() == made


def test_histories_of_a_layer_from_the_meta_device_are_empty():
    layer = Linear(32, 16, recipe=DELAYED, device="meta").to_empty(device="cpu")
    fresh = Linear(32, 16, recipe=DELAYED)
    for one, other in zip(layer.delayed.buffers(), fresh.delayed.buffers(), strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype
