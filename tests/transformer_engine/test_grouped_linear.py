"""Linear layers of experts: against each expert's own in float64, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.context import autocast, checkpoint
from gpu_accel.transformer_engine.grouped_linear import GroupedLinear, Rows
from gpu_accel.transformer_engine.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}


def values(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float32)


def experts(count, k, n, bias=True):
    torch.manual_seed(2)
    return [nn.Linear(k, n, bias=bias) for _ in range(count)]


def run(layer, x, splits, dy, recipe):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, splits)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def truth(layers, x, splits, dy):
    layers = copy.deepcopy(layers)
    x = x.double().requires_grad_()
    y = torch.cat([e.double()(part) for e, part in zip(layers, x.split(splits), strict=True)])
    y.backward(dy.double())
    found = [y.detach(), x.grad, torch.stack([e.weight.grad for e in layers])]
    return found if layers[0].bias is None else [*found, torch.stack([e.bias.grad for e in layers])]


@pytest.mark.parametrize(
    ("recipe", "backend"), [("delayed", "reference"), ("current", "reference"), ("blocks", "portable")]
)
def test_against_each_experts_own(recipe, backend):
    layers, splits = experts(3, 128, 128), [130, 0, 30]
    layer = GroupedLinear.from_experts(layers, backend=backend)
    x, dy = values(160, 128), values(160, 128, seed=1)
    wanted = truth(layers, x, splits, dy)
    for _ in range(2 if recipe == "delayed" else 1):  # which has scales from the second step on
        found = run(layer, x, splits, dy, RECIPES[recipe])
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= 0.08 * b.norm()  # the bound of papers/transformer_engine for FP8
    assert not found[2][1].any() and not found[3][1].any()  # an expert without rows
    assert torch.equal(run(layer, x, torch.tensor(splits), dy, RECIPES[recipe])[1], found[1]) or recipe == "delayed"


def test_without_a_recipe():
    layers, splits = experts(2, 24, 40, bias=False), [3, 4]
    x, dy = values(7, 24), values(7, 40, seed=1)
    found = run(GroupedLinear.from_experts(layers), x, splits, dy, None)
    for a, b in zip(found, truth(layers, x, splits, dy), strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5)


def test_histories_are_saved_and_evaluation_changes_none():
    layer = GroupedLinear(2, 32, 16, backend="reference")
    x, dy = values(5, 32), values(5, 16, seed=1)
    run(layer, x, [2, 3], dy, RECIPES["delayed"])
    run(layer, x, [2, 3], dy, RECIPES["delayed"])
    other = GroupedLinear(2, 32, 16, backend="reference")
    other.load_state_dict(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))
    before = [t.clone() for t in layer.state_dict().values()]
    layer.eval()
    with torch.no_grad(), autocast(recipe=RECIPES["delayed"]):
        assert torch.equal(layer(x, [2, 3]), other.eval()(x, [2, 3]))
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), before, strict=True))


def test_rows():
    rows = Rows.of(torch.tensor([1, 0, 129]), 130)
    assert rows.room == 384 and rows.ends.tolist() == [128, 128, 384]
    assert rows.place.tolist() == [0, *range(128, 257)] and rows.expert.tolist() == [0] + [2] * 129
    assert rows.groups.tolist() == [0] * 128 + [2] * 256
    assert Rows.of(torch.tensor([0, 0]), 0).room == 0


def test_what_it_refuses():
    layer, x = GroupedLinear(2, 32, 16), values(5, 32)
    wrong_splits = (
        [5], [2, 4], [6, -1], [2.0, 3.0], torch.tensor([2.0, 3.0]), [True, 4], None, 5, "ab", [2, 2**70],
        torch.tensor([True, True]), torch.tensor([2, 3], device="meta"), torch.tensor([2, 3], dtype=torch.uint64),
        torch.tensor([2 + 0j, 3]),
    )  # fmt: skip
    for wrong in wrong_splits:
        with pytest.raises(InvalidInputError, match="m_splits"):
            layer(x, wrong)
    with pytest.raises(InvalidInputError, match="m_splits"):
        layer._plain(x, torch.tensor([2, 4]))  # of splits on a GPU
    with pytest.raises(InvalidInputError, match=r"x must be"):
        layer(x[None], [2, 3])
    with autocast(recipe=MXFP8BlockScaling()), pytest.raises(UnsupportedError, match="MXFP8"):
        layer(x, [2, 3])
    with autocast(recipe=Float8BlockScaling()), pytest.raises(UnsupportedError, match="multiples of 128"):
        layer(x, [2, 3])
    with pytest.raises(InvalidInputError, match="one shape"):
        GroupedLinear.from_experts([nn.Linear(4, 4), nn.Linear(4, 8)])
    with pytest.raises(InvalidInputError, match="one dtype"):
        GroupedLinear.from_experts([nn.Linear(4, 4), nn.Linear(4, 4).double()])
    for wrong in (3, [1], [nn.Conv1d(4, 4, 1)]):
        with pytest.raises(InvalidInputError, match=r"torch\.nn\.Linear"):
            GroupedLinear.from_experts(wrong)
    with pytest.raises(InvalidInputError, match="num_gemms"):
        GroupedLinear(0, 4, 4)
    assert layer(x[:0], [0, 0]).shape == (0, 16)
    layer.weight = nn.Parameter(layer.weight[:1].detach().clone())
    with pytest.raises(InvalidInputError, match="weight of this layer"):
        layer(x, [2, 3])


@pytest.mark.parametrize("around", [True, False], ids=["te", "torch"])
def test_checkpoints(around):
    torch.manual_seed(3)
    layer, x, found = GroupedLinear(2, 32, 16, backend="reference"), values(5, 32), []

    def plain(x):
        with autocast(recipe=RECIPES["current"]):
            return layer(x, [2, 3])

    def kept(x):
        if not around:
            return torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        with autocast(recipe=RECIPES["current"]):
            return checkpoint(layer, x, [2, 3])

    for function in (plain, kept):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        function(leaf).square().sum().backward()
        found.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_of_torch_decides_the_dtype():
    layer, x = GroupedLinear(2, 32, 16, backend="reference"), values(5, 32)
    for recipe in (None, RECIPES["current"]):
        with torch.autocast("cpu", torch.bfloat16), autocast(enabled=recipe is not None, recipe=recipe):
            assert layer(x, [2, 3]).dtype == torch.bfloat16
