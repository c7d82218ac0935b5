"""Weights that FSDP2 gathers in FP8, and eight-bit optimizers of sharded parameters, in real processes with gloo.

All ranks see the same batch, so that a mean over ranks is what one process has: every number must be the same.
"""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP2's hooks import it: once here, and not in every process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import sharded, taped
from gpu_accel.transformer_engine.context import autocast, checkpoint
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import LayerNormMLP
from gpu_accel.transformer_engine.optimizers import AdamW8bit, Lion8bit
from gpu_accel.transformer_engine.overflow import OverflowGuard
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from gpu_accel.transformer_engine.sharded import ShardedWeight, gather_in_fp8, largest, local, precompute_scales
from gpu_accel.transformer_engine.tensor import QuantizedTensor

sys.path.append(str(Path(__file__).parents[1] / "ring_attention"))
from processes import results, run_ranks  # noqa: E402

DELAYED = DelayedScaling(amax_history_len=3)
# recipe, and the width of its layers: 5 rows on two ranks are 3 and 2, blocks of 128 need whole ones
RECIPES = {
    "current": (Float8CurrentScaling(), 48),
    "current-pow2-e5m2-uneven": (Float8CurrentScaling(fp8_format="E5M2", use_power_2_scales=True), 5),
    "delayed": (DELAYED, 48),
    "block": (Float8BlockScaling(), 256),
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def build(recipe, width: int) -> nn.Sequential:
    """Two layers; the first rows of each weight, which are one rank's, are much larger than the others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear(width, width, recipe=recipe, backend="reference") for _ in range(2)))
    with torch.no_grad():
        for layer in model:
            layer.weight[: width // 2].mul_(4)
    return model


def shard(model: nn.Sequential, **options) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(t: Tensor) -> Tensor:
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def step(model, optimizer, x: Tensor, recipe=None, *, recompute: bool = False) -> list[Tensor]:
    """The result and the gradients of a step."""
    with autocast(enabled=recipe is not None, recipe=recipe) if recipe else autocast(recipe=model[0].recipe):
        y = checkpoint(model, x, determinism_check="none") if recompute else model(x)
    y.square().mean().backward()
    found = [y.detach(), *(full(p.grad).clone() for p in model.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def noting(gather, sent: list[Tensor]):
    def spy(self, mesh, outer_size, outer_stride, module, mp_policy):  # FSDP2 looks at the names
        inputs, metadata = gather(self, mesh, outer_size, outer_stride, module, mp_policy)
        sent.extend(inputs)
        return inputs, metadata

    return spy


def counting(function, calls: list[str]):
    def counted(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


def _equal(rank: int) -> dict[str, list]:
    """By recipe: whether two steps have the same results, gradients and parameters; what was sent and kept."""
    found = {}
    for name, (recipe, width) in RECIPES.items():
        sent: list[Tensor] = []
        casts: list[str] = []
        gather, sharded.quantize = ShardedWeight.fsdp_pre_all_gather, counting(quantize, casts)
        ShardedWeight.fsdp_pre_all_gather = noting(gather, sent)  # in this process only, which ends with this function
        model, whole = shard(gather_in_fp8(build(recipe, width))), build(recipe, width)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, whole)]
        equal = []
        for i in range(2):
            x = values(8, width, seed=i)
            equal.append(same(step(model, optimizers[0], x), step(whole, optimizers[1], x)))
        equal.append(same([full(p) for p in model.parameters()], list(whole.parameters())))
        for m in (model, whole):
            m.eval()
        with torch.no_grad():  # delayed scaling has entered the last maximum of the weight here, and not yet there
            for _ in range(2):
                equal.append(name == "delayed" or torch.equal(model(x), whole(x)))
        ShardedWeight.fsdp_pre_all_gather = gather
        weights = sum(t.numel() for t in sent if t.dtype == torch.uint8)
        # of two layers, for two steps, forward and backward, and two evaluations; cast once for each value of a weight
        times = 4 if name == "delayed" else 6
        few = weights == 2 * times * -(-width // 2) * width and len(casts) == 2 * (2 if name == "delayed" else 3)
        found[name] = [equal, few, {t.dtype for t in sent}]
    return found


def test_equal_to_whole_layers(tmp_path):
    for found in results(run_ranks(_equal, 2, tmp_path)):
        assert list(found) == list(RECIPES)
        for name, (equal, few, dtypes) in found.items():
            assert equal == [True] * 5, name
            assert few and dtypes == ({torch.uint8, torch.float32} if name == "block" else {torch.uint8}), name


def _from_tapes(rank: int) -> dict[str, tuple[bool, int]]:
    """By recipe: whether steps that play back launches have the bits of those that don't, and how many do."""
    found = {}
    for name in ("delayed", "current"):
        recipe, made = RECIPES[name][0], []
        for tapes in (False, True):
            taped.ON_CPU = tapes  # in this process only, which ends with this function
            torch.manual_seed(0)
            model = shard(gather_in_fp8(nn.Sequential(Linear(16, 32, recipe=recipe, bias=False, backend="portable"))))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            steps = [step(model, optimizer, values(4, 16, seed=i)) for i in range(4)]
            made.append([t for one in steps for t in one])
        played = sum(getattr(kind, "forward", None) is not None for kind in model[0]._kinds.values())
        found[name] = same(*made), played
    return found


def test_steps_from_tapes(tmp_path):
    """In Triton's interpreter: the third step of a kind and later ones, of a weight that comes anew each time."""
    if not INTERPRET:
        pytest.skip("needs Triton's interpreter")
    for found in results(run_ranks(_from_tapes, 2, tmp_path)):
        assert found == {"delayed": (True, 1), "current": (True, 1)}


def _kept(rank: int) -> tuple[bool, bool]:
    """(whether what a forward pass keeps holds no whole weight; whether its backward pass is that of whole layers)."""
    recipe, width = RECIPES["current"]
    model, whole = gather_in_fp8(build(recipe, width)), build(recipe, width)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)  # and not the model: the root is not sharded again behind its forward pass
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    x = values(4, width)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        first = model[0](x.requires_grad_())
        y = model[1](first)
    model[0].reshard()
    model[1].reshard()
    bytes_of = [t.codes.untyped_storage().size() if isinstance(t, QuantizedTensor) else t.nbytes for t in kept]
    mine = x.grad
    y.square().sum().backward()
    mine, x.grad = x.grad, None
    whole(x).square().sum().backward()
    return max(bytes_of) < width * width, torch.equal(mine, x.grad)


def _memory_and_recomputation(rank: int) -> list[bool]:
    recipe, width = RECIPES["current"]
    found = list(_kept(rank))
    for its in (recipe, DELAYED):
        model, whole = shard(gather_in_fp8(build(its, width))), build(its, width)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, whole)]
        for i in range(2):
            x = values(8, width, seed=i)
            found.append(same(step(model, optimizers[0], x, recompute=True), step(whole, optimizers[1], x)))
    return found


def test_no_whole_weight_is_kept_and_recomputation_changes_nothing(tmp_path):
    for found in results(run_ranks(_memory_and_recomputation, 2, tmp_path)):
        assert found == [True] * 6


def _batches(rank: int) -> dict[str, list]:
    """Each rank has half of a batch, of another size: with maxima reduced over the mesh the rows of the whole layer."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name in ("current", "delayed"):
        recipe, width = RECIPES[name]
        model, whole = shard(gather_in_fp8(build(recipe, width))), build(recipe, width)
        equal = []
        for i in range(2):
            x = torch.cat([values(4, width, seed=i), 8 * values(4, width, seed=i + 9)])
            with autocast(recipe=recipe, amax_reduction_group=mesh):
                y = model(x.chunk(2)[rank])
            with autocast(recipe=recipe):
                equal.append(torch.equal(y, whole(x).chunk(2)[rank]))
            y.sum().backward()
        equal.append(model[0].delayed.weight.scale.item() if name == "delayed" else 0)
        found[name] = equal
    return found


def test_ranks_with_other_batches_use_one_scale(tmp_path):
    one, other = results(run_ranks(_batches, 2, tmp_path))
    assert one == other and all(equal[:2] == [True, True] for equal in one.values())


def _states(rank: int, folder: str) -> dict[str, object]:
    """Saving, loading, copying; and what a mixed-precision policy does."""
    recipe, width = RECIPES["current"]
    model, whole = shard(gather_in_fp8(build(recipe, width))), build(recipe, width)
    found: dict[str, object] = {}
    file = io.BytesIO()
    torch.save({key: full(p) for key, p in model.state_dict().items()}, file)
    file.seek(0)
    saved = torch.load(file)
    found["saved"] = all(type(t) is Tensor and torch.equal(t, whole.state_dict()[key]) for key, t in saved.items())
    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(model, options=options)
    found["gathered"] = all(torch.equal(t, saved[key]) for key, t in gathered.items())
    double = {key: 2 * t for key, t in saved.items()}
    set_model_state_dict(model, dict(double), options=options)
    whole.load_state_dict(double)
    x = values(4, width)
    found["loaded"] = torch.equal(model(x), whole(x)) and isinstance(local(model[0].weight), ShardedWeight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mixed, narrow = shard(gather_in_fp8(build(recipe, width)), mp_policy=policy), build(recipe, width).bfloat16()
    with torch.no_grad():  # codes are those of the float32 weights, biases are rounded
        for layer, other in zip(narrow, build(recipe, width), strict=True):
            layer.weight = other.weight
    y, z = mixed(x.bfloat16()), narrow(x.bfloat16())
    y.sum().backward()
    found["mixed"] = y.dtype == torch.bfloat16 and torch.equal(y, z)
    found["gradient"] = mixed[0].weight.grad.dtype == torch.float32

    for kind in (AdamW8bit, Lion8bit):  # from a checkpoint the next steps are the same, states in 8 bits included
        models = [shard(gather_in_fp8(build(recipe, width))) for _ in range(2)]
        optimizers = [kind(m.parameters(), lr=0.01, min_8bit_size=100, backend="reference", seed=3) for m in models]
        step(models[0], optimizers[0], x)
        step(models[1], optimizers[1], 3 * x)
        state = dict(zip(("model", "optimizer"), get_state_dict(models[0], optimizers[0]), strict=True))
        dcp.save(state, checkpoint_id=f"{folder}/{kind.__name__}")
        other = dict(zip(("model", "optimizer"), get_state_dict(models[1], optimizers[1]), strict=True))
        dcp.load(other, checkpoint_id=f"{folder}/{kind.__name__}")
        set_state_dict(
            models[1], optimizers[1], model_state_dict=other["model"], optim_state_dict=other["optimizer"]
        )  # fmt: skip
        equal = [same(step(models[0], optimizers[0], x), step(models[1], optimizers[1], x)) for _ in range(2)]
        found[f"resumed {kind.__name__}"] = equal == [True, True]
    return found


@pytest.mark.filterwarnings("ignore")  # of torch's own checkpoints
def test_states(tmp_path):
    for found in results(run_ranks(_states, 2, tmp_path, str(tmp_path))):
        assert all(found.values()), found


def _optimizers(rank: int) -> dict[str, object]:
    """Eight-bit optimizers of sharded parameters, what they send, and steps that all ranks skip."""
    recipe, width = RECIPES["current"]
    found: dict[str, object] = {}
    # states of float32: the same numbers; of 8 bits: other blocks and other random words
    for kind, size in ((AdamW8bit, 10**6), (AdamW8bit, 0), (Lion8bit, 0)):
        models = [shard(gather_in_fp8(build(recipe, width))), build(recipe, width)]
        optimizers = [kind(m.parameters(), lr=1e-3, min_8bit_size=size, backend="reference", seed=1) for m in models]
        for i in range(2):
            made = [step(m, o, values(8, width, seed=i)) for m, o in zip(models, optimizers, strict=True)]
        pairs = [(full(p), q.detach()) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True)]
        worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        found[f"{kind.__name__} {size}"] = worst < 3e-3 if size == 0 else worst == 0 and same(*made)
        if size == 0:  # half of the codes, and the scales of half of the blocks
            found["bytes"] = optimizers[0].state_bytes() < 0.6 * optimizers[1].state_bytes()

    model = shard(gather_in_fp8(build(recipe, width)))
    optimizer = AdamW8bit(model.parameters(), backend="reference")
    sums, all_reduce = [], dist.all_reduce

    def spy(*args, **kwargs):
        sums.append(args[0].numel())
        return all_reduce(*args, **kwargs)

    dist.all_reduce = spy
    step(model, optimizer, values(8, width))
    alone = list(sums)
    precompute_scales(model)
    sums.clear()
    step(model, optimizer, values(8, width))
    found["one by one, and none after precompute_scales"] = (alone, sums) == ([1, 1], [])
    dist.all_reduce = all_reduce
    precompute_scales(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    try:
        model(values(8, width))
    except InvalidInputError as error:
        found["stale"] = "precompute_scales" in str(error)

    model = shard(gather_in_fp8(build(DELAYED, width)))
    guard = OverflowGuard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    made = []
    for i in range(3):
        x = values(8, width, seed=i)
        if i == 1 and rank == 1:
            x[0, 0] = float("nan")
        model(x).sum().backward()
        if i == 2 and rank == 0:  # a gradient of a part that is one rank's
            local(model[0].bias.grad)[0] = float("inf")
        made.append(guard.step())
        guard.optimizer.zero_grad()
    found["skipped"] = made == [True, False, False] and guard.skipped == 2
    return found


def test_optimizers(tmp_path):
    one, other = results(run_ranks(_optimizers, 2, tmp_path))
    assert all(one.values()) and all(other.values()), (one, other)


def _alone(rank: int) -> list[bool]:
    """One rank, where FSDP2 gathers nothing."""
    recipe, width = RECIPES["block"]
    model, whole = shard(gather_in_fp8(build(recipe, width))), build(recipe, width)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, whole)]
    return [same(*(step(m, o, values(8, width, seed=i)) for m, o in zip((model, whole), optimizers, strict=True)))
            for i in range(2)]  # fmt: skip


def test_one_rank(tmp_path):
    assert results(run_ranks(_alone, 1, tmp_path)) == [[True] * 2]


class Traced(TorchDispatchMode):
    """Calls reach operators as they do under torch.compile, which would take 15 seconds here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_gathered_weight_as_operators_see_it():
    layer = Linear(16, 24, bias=False, recipe=Float8CurrentScaling(), backend="reference")
    whole, found = layer.weight.detach(), []
    for weight in (whole, quantize(whole, "fp8", backend="reference")):
        layer.weight = nn.Parameter(weight, requires_grad=True)
        x = values(4, 16).requires_grad_()
        with Traced():
            y = layer(x)
            y.sum().backward()
        found.append([y.detach(), x.grad, layer.weight.grad])
    assert same(*found)


def test_without_fsdp_it_computes_as_before():
    recipe, width = RECIPES["current"]
    plain, wrapped = build(recipe, width), gather_in_fp8(build(recipe, width))
    other = copy.deepcopy(wrapped)
    assert isinstance(other[0].weight, ShardedWeight) and other[0].weight.casting is not wrapped[0].weight.casting
    x = values(4, width)
    for model in (wrapped, other):
        y = model(x)
        y.sum().backward()
        assert torch.equal(y, plain(x)) and type(model[0].weight.grad) is Tensor
        with autocast(enabled=False):
            torch.testing.assert_close(model(x), nn.Sequential(*plain)(x), rtol=0.1, atol=0.5)
    assert wrapped[0].weight.dtype == torch.float32 and "ShardedWeight" in repr(wrapped[0].weight)
    assert gather_in_fp8(wrapped)[0].weight is wrapped[0].weight  # twice is once


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("finite_only", [True, False])
def test_largest(finite_only, backend, device):
    x = values(3, 70).to(device)  # no tile divides it
    x[2, 69], x[1, 1] = -30, float("nan")
    options = dict(finite_only=finite_only, backend=backend)
    assert largest(x, **options) == (30 if finite_only else float("inf"))
    assert largest(x[2:], **options) == 30 and largest(x[:0], **options) == 0
    assert largest(x.t(), **options) == largest(x, **options)


@pytest.mark.parametrize("name", list(RECIPES))
def test_kernels_cast_rows_as_the_reference_does(name, monkeypatch, device):
    """What is gathered, and the history, over steps in which the weight changes; NaN enters none."""

    class Mesh:
        size, get_group = staticmethod(lambda: 2), staticmethod(lambda: None)

    monkeypatch.setattr(sharded, "reduced", lambda maxima, group: maxima)
    recipe, width = RECIPES[name]
    found = []
    for backend in ("portable", "reference"):
        layer = Linear(width, width, recipe=recipe, backend=backend, device=device)
        gather_in_fp8(layer)
        rows = values(-(-width // 2), width).to(device)
        weight, made = ShardedWeight(rows, layer.weight.casting), []
        for factor in (1.0, 3.0, float("nan") if name == "delayed" else 0.5):
            with torch.no_grad():
                weight[:1] *= factor
                inputs, (_, scales) = weight.fsdp_pre_all_gather(Mesh(), (width, width), (width, 1), layer, None)
            made += [t.clone() for t in (*inputs, *([] if scales is None else [scales]))]
        found.append(made + (list(layer.delayed.weight.state()) if name == "delayed" else []))
    assert len(found[0]) == len(found[1]) >= 6 and all(map(torch.equal, *found))


def test_what_a_gathered_weight_is():
    """What FSDP2 asks of it, and what a layer without the right recipe says."""
    q = quantize(values(4, 8), "fp8", backend="reference")
    assert torch.equal(torch.as_strided(q, (4, 8), (8, 1)).dequantize(), q.dequantize())
    assert torch.equal(torch.zeros_like(q), torch.zeros(4, 8))
    with pytest.raises(UnsupportedError, match="dequantize"):
        torch.as_strided(q, (2, 8), (8, 1))
    layer = Linear(8, 4, recipe=Float8CurrentScaling(), backend="reference")
    layer.weight = nn.Parameter(q, requires_grad=False)
    assert layer(values(3, 8)).shape == (3, 4)
    for recipe in (None, MXFP8BlockScaling()):
        layer.recipe = recipe
        with pytest.raises(UnsupportedError, match="gather_in_fp8"):
            layer(values(3, 8))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 16), "head": Linear(16, 8, recipe=Float8CurrentScaling())})
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize(
    "model, recipe, error, word",
    [
        (lambda: nn.Linear(8, 8), None, InvalidInputError, "convert"),
        (lambda: Linear(8, 8), None, InvalidInputError, "recipe"),
        (lambda: Linear(8, 8), "fp8", InvalidInputError, "recipe"),
        (lambda: LayerNormMLP(8, 8, recipe=MXFP8BlockScaling()), None, UnsupportedError, "travel"),
        (lambda: Linear(8, 8), NVFP4BlockScaling(), UnsupportedError, "e4m3"),
        (lambda: Linear(8, 8), Float8BlockScaling(w_block_scaling_dim=1), UnsupportedError, "travel"),
        (tied, None, UnsupportedError, "head"),
    ],
    ids=["no-layer", "no-recipe", "text", "mx", "nvfp4", "rows-of-blocks", "tied"],
)
def test_refusals(model, recipe, error, word):
    with pytest.raises(error, match=word):
        gather_in_fp8(model(), recipe)


def _refused(rank: int) -> list[str]:
    said = []
    model, blocks = shard(build(DELAYED, 48)), shard(gather_in_fp8(build(Float8BlockScaling(), 48)))
    for call in (lambda: gather_in_fp8(model), lambda: blocks(values(4, 48))):
        try:
            call()
        except (InvalidInputError, UnsupportedError) as error:
            said.append(str(error))
    with pytest.warns(UserWarning, match="nothing"):
        precompute_scales(model)
    return said


def test_refusals_of_what_is_sharded(tmp_path):
    for said in results(run_ranks(_refused, 2, tmp_path)):
        assert len(said) == 2 and "before fully_shard" in said[0] and "cut blocks" in said[1]
