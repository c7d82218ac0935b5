"""Steps played back from tapes: the same bits, histories included, and the ordinary way wherever a tape cannot go."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import launch as launching
from gpu_accel.transformer_engine import tape as taping
from gpu_accel.transformer_engine import taped
from gpu_accel.transformer_engine.context import autocast, checkpoint
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import LayerNormLinear, LayerNormMLP
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from gpu_accel.transformer_engine.tape import Tape

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
LAYERS = {
    "linear": lambda: Linear(32, 48, bias=True, params_dtype=torch.bfloat16, backend="portable"),
    "norm": lambda: LayerNormLinear(32, 48, bias=False, params_dtype=torch.bfloat16, backend="portable"),
    "mlp": lambda: LayerNormMLP(
        32, 48, bias=False, normalization="RMSNorm", activation="swiglu", params_dtype=torch.bfloat16,
        backend="portable",
    ),
}  # fmt: skip


def steps(layer, recipe, count=4, shape=(2, 8, 32), seed=0):
    """y, dx and gradients of parameters of some steps, each on other numbers."""
    found = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        layer.zero_grad(set_to_none=True)
        with autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return found


def linears(layer):
    return [m for m in layer.modules() if isinstance(m, Linear)]


def kinds(layer):
    return [kind for m in linears(layer) for kind in m._kinds.values() if isinstance(kind, taped.Kind)]


PAIRS = [("delayed", "mlp"), ("current", "norm"), ("blocks", "linear"), ("mxfp8", "linear")]


@pytest.mark.parametrize(("recipe", "name"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_bits_and_histories(monkeypatch, recipe, name):
    torch.manual_seed(1)
    plain = LAYERS[name]()
    played = copy.deepcopy(plain)
    wanted = steps(plain, RECIPES[recipe])
    monkeypatch.setattr(taped, "ON_CPU", True)
    found = steps(played, RECIPES[recipe])
    for i, (some, others) in enumerate(zip(wanted, found, strict=True)):
        for a, b in zip(some, others, strict=True):
            assert torch.equal(a, b), f"step {i}"
    for (key, a), (_, b) in zip(plain.state_dict().items(), played.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    assert len(kinds(played)) == len(linears(played)) and not kinds(plain)
    for kind in kinds(played):
        assert isinstance(kind.forward, Tape), kind.why_not
        assert [isinstance(tape, Tape) for tape in kind.backward.values()] == [True], kind.why_not


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(use_f32_scales=True)], ids=["t", "b"])
def test_a_weight_that_was_gathered(monkeypatch, recipe):
    """Codes as FSDP2 hands them over, in other memory each time."""
    monkeypatch.setattr(taped, "ON_CPU", True)
    torch.manual_seed(1)
    layer = Linear(128, 256, bias=False, params_dtype=torch.bfloat16, recipe=recipe, backend="portable")
    whole, found = layer.weight.detach(), []
    x, dy = torch.randn(4, 128).bfloat16(), torch.randn(4, 256).bfloat16()
    for on in [False] + [True] * 4:
        monkeypatch.setattr(taped, "ON_CPU", on)
        codes = quantize(whole, recipe.scheme("weight"), backend="reference")
        layer.weight = torch.nn.Parameter(codes)
        z = x.clone().requires_grad_()
        y = layer(z)
        y.backward(dy)
        found.append((y, z.grad, layer.weight.grad))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    (kind,) = kinds(layer)
    assert isinstance(kind.forward, Tape) and isinstance(next(iter(kind.backward.values())), Tape), kind.why_not


def test_two_steps_before_their_backward_passes(monkeypatch):
    """What is kept belongs to a step, not to a layer."""
    torch.manual_seed(1)
    plain = LAYERS["norm"]()
    played = copy.deepcopy(plain)
    recipe, outs = RECIPES["current"], []
    for layer, on in ((plain, False), (played, True)):
        monkeypatch.setattr(taped, "ON_CPU", on)
        steps(layer, recipe, 3)
        generator = torch.Generator().manual_seed(3)
        xs = [torch.randn(2, 8, 32, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
        with autocast(recipe=recipe):
            ys = [layer(x) for x in xs]
        for y in ys:
            y.float().square().sum().backward()
        outs.append([*ys, *(x.grad for x in xs)])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_evaluation_and_no_gradient(monkeypatch):
    monkeypatch.setattr(taped, "ON_CPU", True)
    torch.manual_seed(1)
    layer = LAYERS["linear"]()
    steps(layer, RECIPES["delayed"], 3)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    x = torch.randn(2, 8, 32).bfloat16()
    with torch.no_grad(), autocast(recipe=RECIPES["delayed"]):
        ys = [layer(x) for _ in range(4)]
    assert all(torch.equal(ys[0], y) for y in ys)
    assert len(kinds(layer)) == 2
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("recipe", ["delayed", "blocks", "mxfp8"])
def test_weights_that_are_kept(monkeypatch, recipe):
    """The codes of the first call, whatever became of the weight since; another first call has those of then."""
    torch.manual_seed(1)
    layer, x = LAYERS["linear"]().eval(), torch.randn(4, 32).bfloat16()
    with torch.no_grad(), autocast(recipe=RECIPES[recipe]):
        first = layer(x, True)
        monkeypatch.setattr(taped, "ON_CPU", True)
        layer.weight *= 2
        ys = [layer(x, False) for _ in range(4)]
        assert all(torch.equal(first, y) for y in ys) and len(kinds(layer)) == 1
        assert not torch.equal(layer(x, True), first)
        assert torch.equal(layer(x, False), layer(x)) and not torch.equal(layer(x, False), first)


def test_checkpoints_go_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(taped, "ON_CPU", True)
    torch.manual_seed(1)
    layer = LAYERS["linear"]()

    def run(x):
        with autocast(recipe=RECIPES["delayed"]):
            return layer(x)

    for _ in range(3):
        x = torch.randn(2, 8, 32).bfloat16().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
        with autocast(recipe=RECIPES["delayed"]):
            z = checkpoint(layer, x)
        (y + z).sum().backward()
    assert not kinds(layer)


def test_what_is_random_goes_the_ordinary_way(monkeypatch):
    monkeypatch.setattr(taped, "ON_CPU", True)
    layer = LAYERS["linear"]()
    steps(layer, NVFP4BlockScaling(), 3)
    assert not layer._kinds


def test_copies_start_anew(monkeypatch):
    monkeypatch.setattr(taped, "ON_CPU", True)
    layer = LAYERS["linear"]()
    steps(layer, RECIPES["current"], 3)
    assert layer._kinds and not copy.deepcopy(layer)._kinds and not pickle.loads(pickle.dumps(layer))._kinds


def test_a_function_that_no_tape_repeats():
    x = torch.ones(4)
    results, _, tape, why = Tape.record(lambda t: ((t.exp(),), ()), (x,))
    assert torch.equal(results[0], x.exp()) and tape is None and "exp" in why

    def copied(t):
        wide = torch.empty(4, 16)[:, :3]
        wide.copy_(t)
        return (wide.clone().sum(0),), ()

    y = torch.randn(4, 3)
    (total,), _, tape, why = Tape.record(copied, (torch.zeros(4, 3),))
    assert tape is not None and not why and not total.any() and torch.equal(tape.play((y,))[0][0], y.sum(0))
    outside = torch.zeros(4)
    _, _, tape, why = Tape.record(lambda t: ((outside,), ()), (x,))
    assert tape is None and "in no argument" in why


def test_launches_of_another_thread_are_on_no_tape():
    """Nor does another thread skip its custom ops, or leave what sees launches behind."""
    seen = []

    def other():
        seen.append(taping.recording())
        launching._seen(None, None, (1,), (torch.zeros(4),), {})  # which would make it no tape

    def run(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        seen.append(taping.recording())
        return (x.clone(),), ()

    _, _, tape, why = Tape.record(run, (torch.ones(4),))
    assert tape is not None and not why and len(tape.steps) == 1
    assert seen == [False, True] and launching._seen is None and not taping.recording()


def test_one_thread_writes_down_at_a_time():
    """Two at once would miss each other's launches."""
    inside, most = [], []

    def run(x):
        inside.append(None)
        most.append(len(inside))
        go.wait(0.05)
        inside.pop()
        return (x.clone(),), ()

    go = threading.Event()
    threads = [threading.Thread(target=Tape.record, args=(run, (torch.ones(4),))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1] and launching._seen is None


def test_parameters_of_another_size(monkeypatch):
    """A kernel, or a tape of the layer as it was, would read behind the end of them."""
    monkeypatch.setattr(taped, "ON_CPU", True)
    for name in ("linear", "mlp"):
        layer = LAYERS[name]()
        steps(layer, RECIPES["current"], 3)
        last = linears(layer)[-1]
        for wrong in (last.weight[:16], last.weight[:, :16]):
            last.weight = torch.nn.Parameter(wrong.detach().clone())
            with pytest.raises(InvalidInputError, match="weight of this layer must be"):
                steps(layer, RECIPES["current"], 1)
