"""Recipes: Transformer Engine's names and defaults, and a delayed state that only training moves."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import (
    RECIPES,
    ROLES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


@pytest.mark.parametrize(
    ("recipe", "texts"),
    [
        (Float8CurrentScaling(), ("e4m3:0x0:fp32", "e4m3:0x0:fp32", "e5m2:0x0:fp32")),
        (Float8CurrentScaling(fp8_format="E4M3", use_power_2_scales=True), ("e4m3:0x0:pow2",) * 3),
        (DelayedScaling(), ("e4m3:0x0:fp32", "e4m3:0x0:fp32", "e5m2:0x0:fp32")),
        (Float8BlockScaling(), ("e4m3:1x128:pow2", "e4m3:128x128:pow2", "e4m3:1x128:pow2")),
        (Float8BlockScaling(use_f32_scales=True), ("e4m3:1x128:fp32", "e4m3:128x128:fp32", "e4m3:1x128:fp32")),
        (MXFP8BlockScaling(), ("e4m3:1x32:e8m0:rceil",) * 3),
        (NVFP4BlockScaling(), ("e2m1:1x16:nvfp4", "e2m1:16x16:nvfp4", "e2m1:1x16:nvfp4:stochastic")),
        (NVFP4BlockScaling(disable_2d_quantization=True, disable_stochastic_rounding=True), ("e2m1:1x16:nvfp4",) * 3),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, tuple) else "",
)
def test_schemes_of_the_roles(recipe, texts):
    assert tuple(recipe.scheme(role).text for role in ROLES) == texts


def test_the_copy_for_weight_gradients_is_rotated():
    recipe = NVFP4BlockScaling()
    assert recipe.scheme_columnwise("grad").text == "e2m1:1x16:nvfp4:stochastic:hadamard16"
    assert recipe.scheme_columnwise("weight") == recipe.scheme("weight")
    assert NVFP4BlockScaling(disable_rht=True).scheme_columnwise("input").hadamard == 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_quantise(name):
    x = normal(32, 64)
    for role in ROLES:
        seed = 1 if RECIPES[name].scheme(role).rounding == "stochastic" else None
        q = RECIPES[name].quantize(x, role=role, columnwise=True, seed=seed, backend="reference")
        error = ((q.dequantize() - x).square().mean() / x.square().mean()).sqrt()
        assert 0 < error < (0.2 if name == "nvfp4" else 0.06)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float8CurrentScaling(fp8_format="E3M4"),
        lambda: DelayedScaling(amax_compute_algo="mean"),
        lambda: DelayedScaling(amax_history_len=0),
        lambda: Float8BlockScaling(w_block_scaling_dim=3),
        lambda: MXFP8BlockScaling(rule="nearest"),
        lambda: Float8CurrentScaling(use_power_2_scales="no"),
        lambda: Float8BlockScaling(use_f32_scales=None),
        lambda: DelayedScaling(reduce_amax=2),
        lambda: NVFP4BlockScaling(disable_rht="no"),
        lambda: MXFP8BlockScaling().scheme("bias"),
    ],
)
def test_refusals(make):
    with pytest.raises(InvalidInputError):
        make()


# -- delayed scaling


def test_the_first_step_has_scale_one_and_the_second_the_first_maximum(device):
    state = DelayedScaling(amax_history_len=3).state(device=device)
    x = normal(16, 32).to(device) * 100
    first = state.quantize(x)
    assert first.scales.item() == 1.0
    second = state.quantize(x)
    assert second.scales.item() == quantize(x, "fp8").scales.item()
    assert torch.equal(second.codes.view(torch.uint8), quantize(x, "fp8").codes.view(torch.uint8))


def test_overflow_is_counted_and_forgotten(device):
    """One infinite step must neither move the scale nor stay in the history for 1024 steps."""
    state = DelayedScaling().state(device=device)
    x = normal(8, 32).to(device)
    state.quantize(x)
    scale = state.scale.item()
    bad = x.clone()
    bad[0, 0] = math.inf
    q = state.quantize(bad)
    assert q.dequantize()[0, 0].isnan()
    assert (state.scale.item(), state.overflows.item()) == (scale, 1)
    assert state.history.isfinite().all()


def test_a_step_of_zeros_is_no_news(device):
    """A rank that saw no tokens must not reset the scale."""
    state = DelayedScaling(amax_compute_algo="most_recent").state(device=device)
    state.quantize(normal(8, 32).to(device))
    scale = state.scale.item()
    state.quantize(torch.zeros(8, 32, device=device))
    state.quantize(torch.zeros(0, 32, device=device))
    assert state.scale.item() == scale and state.overflows.item() == 0


def test_recomputation_and_evaluation_leave_no_trace():
    """TransformerEngine#1190, PR 3284, PR 3394: the history depended on checkpointing."""
    plain, recomputed = (DelayedScaling(amax_history_len=4).state() for _ in range(2))
    for step in range(3):
        x = normal(8, 32, seed=step) * (step + 1)
        one = plain.quantize(x, backend="reference")
        recomputed.quantize(x, backend="reference", update=False)
        two = recomputed.quantize(x, backend="reference")
        assert torch.equal(one.codes.view(torch.uint8), two.codes.view(torch.uint8))
    assert torch.equal(plain.history, recomputed.history) and plain.scale == recomputed.scale


def test_ranks_with_a_reduced_maximum_have_one_scale():
    """TransformerEngine#600, PR 2245: shards with different scales."""
    shards = [normal(8, 32, seed=s) * (s + 1) for s in range(2)]
    states = [DelayedScaling().state() for _ in shards]
    maxima = [s.quantize(x, update=False, backend="reference").seen_amax for s, x in zip(states, shards, strict=True)]
    for state in states:
        state.update(torch.stack(maxima).amax())
    assert states[0].scale == states[1].scale


def test_the_state_is_tensors_and_comes_back(tmp_path):
    state = DelayedScaling(amax_history_len=5).state("grad")
    state.quantize(normal(8, 32), backend="reference")
    torch.save(state.state_dict(), tmp_path / "state.pt")
    other = DelayedScaling(amax_history_len=5).state("grad")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.history, state.history) and other.scale == state.scale
    with pytest.raises(InvalidInputError, match="length"):
        DelayedScaling(amax_history_len=6).state("grad").load_state_dict(state.state_dict())
