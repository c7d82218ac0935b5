"""Layers split over ranks: the outputs and gradients of the whole layer, in real processes with gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import LayerNormLinear, LayerNormMLP, TransformerLayer, rotary_angles
from gpu_accel.transformer_engine.parallel import parallel
from gpu_accel.transformer_engine.recipes import RECIPES, DelayedScaling
from tests.gathering import gathering

sys.path.append(str(Path(__file__).parents[1] / "ring_attention"))
from processes import results, run_ranks  # noqa: E402

HIDDEN, FFN, HEADS, GROUPS, SEQLEN = 64, 96, 4, 2, 8


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def rows(w: Tensor, rank: int, *sizes: int) -> Tensor:
    """The rank's half of each run of rows of these sizes, joined."""
    return torch.cat([part.chunk(2)[rank] for part in w.split(sizes)])


def layer_of(**more) -> TransformerLayer:
    return TransformerLayer(
        HIDDEN, FFN, HEADS, num_gqa_groups=GROUPS, activation="swiglu", bias=True, backend="reference", **more
    )  # fmt: skip


QKV = (HIDDEN, HIDDEN // HEADS * GROUPS, HIDDEN // HEADS * GROUPS)
# parameter -> how a rank takes its part of the whole one
PARTS = {
    "qkv.linear.weight": lambda t, r: rows(t, r, *QKV), "qkv.linear.bias": lambda t, r: rows(t, r, *QKV),
    "proj.weight": lambda t, r: t.chunk(2, 1)[r],
    "mlp.fc1.weight": lambda t, r: rows(t, r, FFN, FFN), "mlp.fc1.bias": lambda t, r: rows(t, r, FFN, FFN),
    "mlp.fc2.weight": lambda t, r: t.chunk(2, 1)[r],
}  # fmt: skip


def part_of(name: str, t: Tensor, rank: int) -> Tensor:
    return PARTS.get(name, lambda whole, _: whole)(t, rank)


def _layer(rank: int) -> dict[str, float]:
    """Errors relative to the whole layer, of this rank's output and gradients, by recipe and sequence parallelism."""
    angles, errors = rotary_angles(SEQLEN, HIDDEN // HEADS), {}
    recipes = {"none": None, "fp8_current": RECIPES["fp8_current"], "fp8_delayed": DelayedScaling(amax_history_len=2)}
    for parted in (False, True):
        for name, recipe in recipes.items():
            torch.manual_seed(0)
            whole = layer_of()
            with torch.no_grad():
                for i, p in enumerate(whole.parameters()):
                    p.add_(values(*p.shape, seed=i) / 16)
            split = layer_of(set_parallel_mode=True, tp_group=dist.group.WORLD, sequence_parallel=parted)
            with torch.no_grad():
                for key, p in split.named_parameters():
                    p.copy_(part_of(key, whole.get_parameter(key), rank))
            mine = slice(rank * SEQLEN // 2, (rank + 1) * SEQLEN // 2) if parted else slice(None)
            for step in range(2):
                x, dy = values(SEQLEN, 3, HIDDEN, seed=step), values(SEQLEN, 3, HIDDEN, seed=step + 5)
                given = [x.clone().requires_grad_(), x[mine].clone().requires_grad_()]
                made = []
                for layer, z, grad in zip((whole, split), given, (dy, dy[mine]), strict=True):
                    layer.zero_grad()
                    with autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD):
                        y = layer(z, rotary_pos_emb=angles)
                    y.backward(grad)
                    made.append(y.detach())
            pairs = [(made[1], made[0][mine]), (given[1].grad, given[0].grad[mine])]
            pairs += [(p.grad, part_of(key, whole.get_parameter(key).grad, rank))
                      for key, p in split.named_parameters()]  # fmt: skip
            worst = max(float((one - other).norm() / other.norm()) for one, other in pairs)
            errors[f"{name}{'-sequence' if parted else ''}"] = worst
    return errors


def _alone(rank: int) -> list[float]:
    """A column-parallel and a row-parallel layer by themselves, without a recipe: gathered parts are the whole."""
    group, found = dist.group.WORLD, []
    whole = nn.Linear(16, 24)
    with torch.no_grad():
        whole.weight.copy_(values(24, 16))
        whole.bias.copy_(values(24, seed=1))
    x = values(4, 16, seed=2)
    for mode in ("column", "row"):
        layer = Linear(16, 24, parallel_mode=mode, tp_group=group)
        with torch.no_grad():
            layer.weight.copy_(whole.weight.chunk(2, 0 if mode == "column" else 1)[rank])
            layer.bias.copy_(whole.bias.chunk(2)[rank] if mode == "column" else whole.bias)
        y = layer(x if mode == "column" else x.chunk(2, 1)[rank])
        truth = whole(x).chunk(2, 1)[rank] if mode == "column" else whole(x)
        found.append(float((y - truth).abs().max()))
    normed = LayerNormLinear(16, 24, parallel_mode="column", tp_group=group)
    assert normed.linear.weight.shape == (12, 16)
    for make, error in (
        (lambda: Linear(16, 15, parallel_mode="column", tp_group=group), InvalidInputError),
        (lambda: LayerNormLinear(16, 24, parallel_mode="row", tp_group=group), UnsupportedError),
        (lambda: LayerNormLinear(16, 24, parallel_mode="column", tp_group=group, return_layernorm_output=True),
         UnsupportedError),
        (lambda: TransformerLayer(16, 16, 2, attn_input_format="bshd", set_parallel_mode=True, tp_group=group,
                                  sequence_parallel=True), UnsupportedError),
        (lambda: TransformerLayer(16, 16, 1, set_parallel_mode=True, tp_group=group), InvalidInputError),
    ):  # fmt: skip
        with pytest.raises(error):
            make()
    return found


GATHERED = {
    "delayed": DelayedScaling(amax_history_len=2), "blocks": RECIPES["fp8_block"], "mxfp8": RECIPES["mxfp8"],
}  # fmt: skip


def _codes(rank: int) -> dict[str, tuple[float, float, bool, int]]:
    """By recipe: what gathering codes changes in y and in gradients, whether histories are alike, and how many layers
    gathered codes."""
    found, group = {}, dist.group.WORLD
    for name, recipe in GATHERED.items():
        made, layers = [], 0
        for codes in (False, True):
            torch.manual_seed(rank)
            layer = LayerNormMLP(
                32, 128, activation="swiglu", normalization="RMSNorm", set_parallel_mode=True, tp_group=group,
                sequence_parallel=True, backend="reference",
            )  # fmt: skip
            with gathering(codes=codes) as taken:
                for i in range(3):
                    x, dy = (values(128, 1, 32, seed=10 * i + 2 * rank + j) * (1 + rank) for j in (0, 1))
                    x.requires_grad_()
                    layer.zero_grad()
                    with autocast(recipe=recipe):
                        y = layer(x)
                    y.backward(dy)
            made.append([y.detach(), x.grad, *(p.grad for p in layer.parameters()), layer])
            layers = sum(taken)
        (y, *grads, plain), (z, *others, gathered) = made
        states = [[t for key, t in m.state_dict().items() if "delayed" in key] for m in (plain, gathered)]
        alike = all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        worst = max(float((a - b).norm() / a.norm()) for a, b in zip(grads, others, strict=True))
        found[name] = float((y - z).abs().max()), worst, alike, layers
    return found


def test_sequence_parallelism_gathers_codes(tmp_path):
    """The bits of gathering 16 bits and quantising then; gradients differ where a norm's is rounded before the sum."""
    for found in results(run_ranks(_codes, 2, tmp_path)):
        for name, (y, gradients, alike, layers) in found.items():
            assert y == 0 and alike and layers == 6 and gradients < 1e-5, (name, found)


def test_layer_over_two_ranks(tmp_path):
    """Without a recipe the same numbers; with one, what scales of half a weight and of a sum in parts change."""
    for errors in results(run_ranks(_layer, 2, tmp_path)):
        assert len(errors) == 6
        for name, error in errors.items():
            assert error < (2e-5 if name.startswith("none") else 0.12), errors


def test_layers_alone(tmp_path):
    for found in results(run_ranks(_alone, 2, tmp_path)):
        assert max(found) < 1e-5


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("diagonal", None, False), "parallel_mode"), (("row", None, False), "tp_group"), ((None, None, True), "goes"),
        ((None, SimpleNamespace(), False), "process group"), (("row", None, 1), "sequence_parallel"),
    ],
)  # fmt: skip
def test_refusals(arguments, word):
    with pytest.raises(InvalidInputError, match=word):
        parallel(*arguments)
    if arguments[0] is None and arguments[1] is None:
        with pytest.raises(InvalidInputError, match="set_parallel_mode"):
            LayerNormMLP(16, 16, sequence_parallel=True)
