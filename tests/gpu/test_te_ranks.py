"""Quantised layers on two ranks with GPU kernels: FSDP2 from tapes, and codes that sequence parallelism gathers.

Over NCCL on two GPUs, or on one that ranks share (`one_gpu.py`, by its variable). Right or not, no times.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_accel.testing import generator
from gpu_accel.transformer_engine import sequence, taped
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import LayerNormLinear, LayerNormMLP
from gpu_accel.transformer_engine.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from gpu_accel.transformer_engine.sharded import gather_in_fp8
from tests.gathering import gathering

from .one_gpu import card, collectives_through_the_host, gathered, shared
from .ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
HIDDEN, WIDE, TOKENS = 512, 1024, 512
BF16 = torch.bfloat16
Found = dict[str, list[Tensor]]
RECIPES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "blocks": Float8BlockScaling,
    "current": Float8CurrentScaling,
}


def _begin(rank: int, ranks: int) -> str:
    if shared(ranks):
        collectives_through_the_host()
    return card(rank)


def _values(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, device), device=device).to(BF16)


def _unequal(one: list[Tensor], other: list[Tensor]) -> list[int]:
    """The places of tensors that differ in any bit."""
    assert len(one) == len(other)
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]


# -- weights gathered in FP8


def _stack(recipe: Recipe, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    options = dict(bias=False, normalization="RMSNorm", activation="swiglu", params_dtype=BF16, device=device)
    return nn.Sequential(*(LayerNormMLP(HIDDEN, WIDE, recipe=recipe, **options) for _ in range(2)))


def _sharded(layers: nn.Sequential, mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    gather_in_fp8(layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def _trained(layers: nn.Module, recipe: Recipe, group, device: str, steps: int = 5) -> list[Tensor]:
    """The last step's result and gradients, and the parameters. All ranks see one batch, so that a mean over ranks is
    what one process has."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    for step in range(steps):
        x = _values(TOKENS, HIDDEN, seed=10 + step, device=device).requires_grad_()
        optimizer.zero_grad()
        with autocast(recipe=recipe, amax_reduction_group=group):
            y = layers(x)
        y.backward(_values(TOKENS, HIDDEN, seed=20 + step, device=device))
        gradients = [gathered(p.grad) for p in layers.parameters()]
        optimizer.step()
    return [y.detach(), x.grad, *gradients, *(gathered(p) for p in layers.parameters())]


def _fsdp(rank: int, ranks: int, name: str) -> None:
    device, recipe = _begin(rank, ranks), RECIPES[name]()
    mesh = dist.init_device_mesh(torch.device(device).type, (ranks,))
    whole = _trained(_stack(recipe, device), recipe, None, device)
    assert all(t.isfinite().all() for t in whole)
    for tapes in (False, True):
        taped.GPU_CHECKED = tapes
        layers = _sharded(_stack(recipe, device), mesh)
        found = _trained(layers, recipe, mesh if name == "delayed" else None, device)
        assert not _unequal(found, whole), (tapes, _unequal(found, whole))
        kinds = [kind for m in layers.modules() for kind in getattr(m, "_kinds", {}).values()]
        played = [kind for kind in kinds if getattr(kind, "forward", None) is not None]
        assert bool(played) == tapes, {getattr(kind, "why_not", "") for kind in kinds}


@pytest.mark.parametrize("name", RECIPES)
def test_fsdp2_from_tapes_equals_whole_layers(name):
    run_ranks(_fsdp, 2, name)


# -- codes gathered by sequence parallelism


def _gradients(layer: nn.Module, recipe: Recipe, xs: list[Tensor], dys: list[Tensor], group=None) -> Found:
    """After a few steps: what codes decide (result, gradient of the weight, maxima and scales), and other gradients."""
    for x, dy in zip(xs, dys, strict=True):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        with autocast(recipe=recipe, amax_reduction_group=group if isinstance(recipe, DelayedScaling) else None):
            y = layer(given)
        y.backward(dy)
    states = [t.clone() for name, t in layer.state_dict().items() if "delayed" in name and t.is_floating_point()]
    weights, norms = ([p.grad for p in layer.parameters() if (p.dim() == 1) == norm] for norm in (False, True))
    return {"codes": [y.detach(), *weights, *states], "rest": [given.grad, *norms]}


def _both_ways(
    make: Callable[[], nn.Module], recipe: Recipe, xs: list[Tensor], dys: list[Tensor], group=None
) -> list[Found]:
    """What `_gradients` finds of new layers where 16 bits are gathered, and where codes are."""
    sequence.GPU_CHECKED, found = True, []
    for codes in (False, True):
        with gathering(codes=codes) as taken:
            found.append(_gradients(make(), recipe, xs, dys, group))
        assert taken == [codes] * len(xs)
    return found


def _plain(rank: int, ranks: int, name: str) -> None:
    device, recipe = _begin(rank, ranks), RECIPES[name]()
    for mode in ("column", "row"):

        def make(mode=mode) -> nn.Module:
            torch.manual_seed(rank)
            options = dict(parallel_mode=mode, sequence_parallel=True, tp_group=dist.group.WORLD)
            return Linear(HIDDEN, WIDE, bias=False, params_dtype=BF16, device=device, **options)

        rows = (TOKENS // ranks, TOKENS) if mode == "column" else (TOKENS, TOKENS // ranks)  # of x and of dy
        made = [
            [_values(lines, width, seed=seed + 2 * step + rank, device=device) for step in range(3)]
            for lines, width, seed in zip(rows, reversed(make().weight.shape), (30, 40), strict=True)
        ]
        sixteen, codes = _both_ways(make, recipe, *made)
        for what in sixteen:
            assert not _unequal(sixteen[what], codes[what]), (mode, what, _unequal(sixteen[what], codes[what]))


@pytest.mark.parametrize("name", ["delayed", "blocks"])
def test_gathered_codes_have_the_bits_of_sixteen(name):
    run_ranks(_plain, 2, name)


def _norm(rank: int, ranks: int, name: str) -> None:
    """With a norm before the layer, which runs on all rows where 16 bits are gathered, and on a rank's own otherwise.

    What codes decide is the same. On the way back the one sums over ranks what has been through the norm, the other
    before it goes through the norm, so that they round at other places: both are judged by the layer that is not split,
    in float32 on the same codes.
    """
    device, recipe = _begin(rank, ranks), RECIPES[name]()
    options = dict(bias=False, normalization="RMSNorm", device=device)
    weight = _values(WIDE, HIDDEN, seed=50, device=device)
    gamma = 1 + _values(HIDDEN, seed=51, device=device) / 8
    mine = slice(rank * WIDE // ranks, (rank + 1) * WIDE // ranks)

    def given(layer: nn.Module, rows: slice = slice(None)) -> nn.Module:
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(weight[rows] if p.dim() > 1 else gamma)
        return layer

    def split() -> nn.Module:
        how = dict(parallel_mode="column", sequence_parallel=True, tp_group=dist.group.WORLD)
        return given(LayerNormLinear(HIDDEN, WIDE, params_dtype=BF16, **how, **options), mine)

    whole = given(LayerNormLinear(HIDDEN, WIDE, params_dtype=torch.float32, **options))
    xs = [_values(TOKENS, HIDDEN, seed=60 + i, device=device) for i in range(3)]
    dys = [_values(TOKENS, WIDE, seed=70 + i, device=device) for i in range(3)]
    rows = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    # scales of all of the weight and of dy, as the layer has them that is not split
    its = [x[rows] for x in xs], [dy[:, mine].contiguous() for dy in dys]
    sixteen, codes = _both_ways(split, recipe, *its, dist.group.WORLD)
    assert not _unequal(sixteen["codes"][:2], codes["codes"][:2])  # maxima of the last step are not all reduced yet
    truth = _gradients(whole, recipe, [x.float() for x in xs], [dy.float() for dy in dys])["rest"]
    truth[0] = truth[0][rows]
    for what, exact, ruler, found in zip(("dx", "dgamma"), truth, sixteen["rest"], codes["rest"], strict=True):
        errors = [((t.double() - exact.double()).norm() / exact.double().norm()).item() for t in (ruler, found)]
        print(f"rank {rank}, {name}, {what}: 16 bits {errors[0]:.2e}, codes {errors[1]:.2e}", flush=True)
        assert errors[1] <= 2 * errors[0], (what, errors)


@pytest.mark.parametrize("name", ["delayed", "blocks"])
def test_gathered_codes_of_a_norm_are_as_exact(name):
    run_ranks(_norm, 2, name)
