"""Layers around quantised products: against the same layers of torch, converted models, and several processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.transformer_engine.context import autocast, checkpoint
from gpu_accel.transformer_engine.conversion import (
    convert,
    transformer_engine_fp4,
    transformer_engine_fp8,
    transformer_engine_layer,
)
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import (
    ACTIVATIONS,
    DotProductAttention,
    LayerNormLinear,
    LayerNormMLP,
    Norm,
    TransformerLayer,
    rotary_angles,
)
from gpu_accel.transformer_engine.recipes import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

sys.path.append(str(Path(__file__).parents[1] / "ring_attention"))
from processes import results, run_ranks  # noqa: E402


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("centered", [False, True], ids=["", "zero-centered"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind, centered):
    norm = Norm(48, kind, eps=1e-4, zero_centered_gamma=centered)
    with torch.no_grad():
        norm.weight.add_(values(48) / 8)
    x = values(5, 48, seed=1).bfloat16()
    y = x.double()
    if kind == "LayerNorm":
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-4).sqrt() * (norm.weight.double() + centered)
    assert_close_to_truth("norm", norm(x).detach(), y.detach(), y.detach().bfloat16())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_without_a_recipe_is_torch(activation):
    torch.manual_seed(0)
    mlp = LayerNormMLP(32, 48, activation=activation)
    x = values(3, 7, 32)
    hidden = F.linear(F.layer_norm(x, (32,)), mlp.fc1.weight, mlp.fc1.bias)
    if activation in ("geglu", "reglu", "swiglu"):
        gate, value = hidden.chunk(2, -1)
        plain = {"geglu": lambda t: F.gelu(t, approximate="tanh"), "reglu": F.relu, "swiglu": F.silu}[activation]
        hidden = plain(gate) * value
    else:
        plain = {"gelu": lambda t: F.gelu(t, approximate="tanh"), "srelu": lambda t: F.relu(t) ** 2}
        hidden = plain.get(activation, getattr(F, activation, None))(hidden)
    torch.testing.assert_close(mlp(x), F.linear(hidden, mlp.fc2.weight, mlp.fc2.bias))


def test_layernorm_linear_returns_the_norm():
    layer = LayerNormLinear(32, 16, return_layernorm_output=True, normalization="RMSNorm", bias=False)
    y, normed = layer(values(4, 32))
    torch.testing.assert_close(normed, F.rms_norm(values(4, 32), (32,), eps=1e-5))
    torch.testing.assert_close(y, normed @ layer.linear.weight.t())


class Plain(nn.Module):
    """A Llama block in plain torch, with the weights of a TransformerLayer."""

    def __init__(self, layer: TransformerLayer, angles: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.angles = layer, angles

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, seqlen, hidden)
        la = self.layer
        d, h, g = la.head_dim, la.heads, la.groups

        def rotate(t):  # (batch, heads, seqlen, d)
            cos, sin = torch.cat((self.angles.cos(),) * 2, -1), torch.cat((self.angles.sin(),) * 2, -1)
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        n = F.rms_norm(x, (x.shape[-1],), la.qkv.norm.weight.to(x), 1e-5)
        q, k, v = (n @ la.qkv.linear.weight.to(x).t()).split([h * d, g * d, g * d], -1)
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + o.transpose(1, 2).flatten(2) @ la.proj.weight.to(x).t()
        n = F.rms_norm(x, (x.shape[-1],), la.mlp.norm.weight.to(x), 1e-5)
        gate, value = (n @ la.mlp.fc1.weight.to(x).t()).chunk(2, -1)
        return x + (F.silu(gate) * value) @ la.mlp.fc2.weight.to(x).t()


def block(form: str, **more) -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(
        64, 96, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False, attn_input_format=form,
        backend="reference", **more,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_transformer_layer_is_a_llama_block(form):
    layer, angles = block(form), rotary_angles(9, 16)
    x = values(2, 9, 64).requires_grad_()
    z = x.detach().double().requires_grad_()
    truth = Plain(layer, angles.double())(z)
    out = layer(x.transpose(0, 1) if form == "sbhd" else x, rotary_pos_emb=angles)
    out = out.transpose(0, 1) if form == "sbhd" else out
    dy = values(2, 9, 64, seed=1)
    out.backward(dy)
    truth.backward(dy.double())
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), z.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_transformer_layer_quantised(name):
    """Close to the exact layer, not equal; checkpointing changes nothing; every product has its gradient."""
    allowed = 0.15 if name == "nvfp4" else 0.05
    recipe = DelayedScaling(amax_history_len=3) if name == "fp8_delayed" else RECIPES[name]
    grads = []
    for keep in (True, False):
        torch.manual_seed(0)
        layer = block("bshd")
        x, dy = values(2, 9, 64).requires_grad_(), values(2, 9, 64, seed=1)
        exact = layer(x)
        torch.manual_seed(1)
        with autocast(recipe=recipe):
            y = layer(x) if keep else checkpoint(layer, x)
        y.backward(dy)
        error = ((y - exact).norm() / exact.norm()).item()
        assert 1e-4 < error < allowed, error
        grads.append([x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_window_and_masks():
    attention = DotProductAttention(qkv_format="bshd", attn_mask_type="no_mask")
    q = values(1, 5, 2, 16)
    o = F.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(q, q, q), o, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make, error, word",
    [
        (lambda: Norm(4, "BatchNorm"), InvalidInputError, "normalization"),
        (lambda: LayerNormMLP(4, 4, activation="tanh"), InvalidInputError, "activation"),
        (lambda: TransformerLayer(10, 8, 3), InvalidInputError, "multiple"),
        (lambda: TransformerLayer(8, 8, 2, num_gqa_groups=3), InvalidInputError, "multiple"),
        (lambda: TransformerLayer(8, 8, 2, attention_dropout=0.1), UnsupportedError, "dropout"),
        (lambda: TransformerLayer(8, 8, 2, self_attn_mask_type="padding"), UnsupportedError, "attn_mask_type"),
        (lambda: TransformerLayer(8, 8, 2, attn_input_format="thd"), InvalidInputError, "qkv_format"),
        (lambda: rotary_angles(4, 3), InvalidInputError, "even"),
        (lambda: transformer_engine_layer(64, 4, precision="int8"), InvalidInputError, "precision"),
        (lambda: convert(3), InvalidInputError, "model"),
        (lambda: convert(nn.Linear(4, 4), "fp8"), InvalidInputError, "recipe"),
        (lambda: transformer_engine_fp8(values(2, 4), values(3, 5)), InvalidInputError, "weight"),
        (lambda: transformer_engine_fp8(values(2, 4), values(3, 4), recipe=DelayedScaling()), InvalidInputError, "FP8"),
        (lambda: transformer_engine_fp4(values(2, 4), values(3, 4), recipe=DelayedScaling()), InvalidInputError, "N"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_refusals(make, error, word):
    with pytest.raises(error, match=word):
        make()


# -- convert, and the functions


def test_convert_replaces_linear_layers_and_shares_parameters():
    class Sub(nn.Linear):
        pass

    shared = nn.Linear(16, 16)
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), "b": shared, "c": shared,
         "own": Sub(16, 16), "lm_head": nn.Linear(16, 50, bias=False)}
    )  # fmt: skip
    parameters = dict(model.named_parameters())
    assert convert(model, Float8CurrentScaling(), backend="reference") is model
    assert {k: v for k, v in model.named_parameters() if parameters[k] is not v} == {}
    assert isinstance(model["a"][0], Linear) and isinstance(model["a"][2], Linear)
    assert model["b"] is model["c"] and isinstance(model["b"], Linear)
    assert type(model["own"]) is Sub and type(model["lm_head"]) is nn.Linear
    assert model["a"][0].recipe == Float8CurrentScaling()
    convert(model, NVFP4BlockScaling(), lambda name, module: name.startswith("a."))
    assert model["a"][0].recipe == NVFP4BlockScaling() and model["b"].recipe == Float8CurrentScaling()
    assert isinstance(convert(nn.Linear(4, 4)), Linear)
    x = values(4, 16)
    error = model["a"](x) - F.linear(F.relu(F.linear(x, *model["a"][0].parameters())), *model["a"][2].parameters())
    assert 0 < error.abs().max() < 0.5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_convert_leaves_the_fast_path_of_encoder_layers():
    torch.manual_seed(0)
    one = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(one, 2).eval()
    x, padding = values(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        before, padded = encoder(x), encoder(x, src_key_padding_mask=padding)
        convert(encoder, MXFP8BlockScaling(), backend="reference")
        after, padded_after = encoder(x), encoder(x, src_key_padding_mask=padding)
    for was, now in ((before, after), (padded[1, :3], padded_after[1, :3])):
        assert 0 < (was - now).abs().max() < 0.5
    with torch.enable_grad():
        torch.testing.assert_close(encoder(x), after, rtol=0, atol=0.1)  # the path that training takes


def test_convert_keeps_hooks_and_attributes():
    seen = []
    linear = nn.Linear(4, 4)
    handle = linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_forward_pre_hook(lambda *_, **k: seen.append("before"), with_kwargs=True)
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    linear.tag = "mine"
    model = convert(nn.Sequential(linear))
    model(values(2, 4).requires_grad_()).sum().backward()
    assert seen == ["before", "forward", "backward"] and model[0].tag == "mine"
    handle.remove()
    assert not model[0]._forward_hooks and isinstance(model[0], Linear)


def test_convert_refuses_what_would_be_lost():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_buffer("mask", torch.ones(4))
    with pytest.raises(UnsupportedError, match="mask"):
        convert(model)
    assert type(model[0]) is nn.Linear
    for wrong in ({"backend": "zz"}, {"filter": "x"}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            convert(nn.ReLU(), **wrong)


def test_functions_have_the_gradients_of_layers():
    x, w, b = values(6, 48), values(32, 48, seed=1), values(32, seed=2)
    for function, recipe in (
        (transformer_engine_fp8, Float8CurrentScaling()),
        (transformer_engine_fp4, NVFP4BlockScaling()),
    ):
        grads = []
        for way in ("function", "layer"):
            torch.manual_seed(5)
            leaf = [t.clone().requires_grad_() for t in (x, w, b)]
            if way == "function":
                y = function(*leaf, backend="reference")
            else:
                layer = Linear(48, 32, recipe=recipe, backend="reference")
                torch.manual_seed(5)
                layer.weight, layer.bias = nn.Parameter(leaf[1].detach()), nn.Parameter(leaf[2].detach())
                leaf[1], leaf[2] = layer.weight, layer.bias
                y = layer(leaf[0])
            y.square().sum().backward()
            grads.append([y, *(t.grad for t in leaf)])
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8", "fp4"])
def test_layer_by_name(precision):
    layer = transformer_engine_layer(32, 2, precision=precision)
    layer.backend = "reference"
    for module in layer.modules():
        if isinstance(module, Linear):
            module.backend = "reference"
    x = values(2, 5, 32).bfloat16()
    y = layer(x)
    assert y.shape == x.shape and y.dtype == torch.bfloat16 and y.isfinite().all()


# -- several processes


def _tensor_parallel(rank: int) -> list:
    """Each rank sees other values, up to none at all; scales and histories must agree."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Linear(32, 16, backend="reference") for _ in range(2))
    recipe, scales = DelayedScaling(amax_history_len=3), []
    for step in range(4):
        x = values(8, 32, seed=10 * step + rank) * (1 + 3 * rank + step)
        with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            for layer in layers:
                if rank == 0 or step != 2:  # in step 2 the other rank has no tokens
                    layer(x).square().sum().backward()
        scales.append([layer.delayed.of(role).scale.item() for layer in layers for role in ("input", "grad")])
    with autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
        for layer in layers:
            layer(x)
    return [layer.delayed.of(role).history.tolist() for layer in layers for role in ("input", "weight")]


def _current(rank: int) -> list:
    torch.manual_seed(0)
    layer = Linear(32, 16, bias=False, backend="reference")
    x = values(8, 32)[4 * rank : 4 * rank + 4].requires_grad_()
    with autocast(recipe=Float8CurrentScaling(), amax_reduction_group=dist.group.WORLD):
        y = layer(x)
    return y.tolist()


def _sharded(rank: int) -> list:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        *(Linear(32, 32, recipe=DelayedScaling(amax_history_len=3), backend="reference") for _ in range(2))
    )
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        x = values(8, 32, seed=step)[4 * rank : 4 * rank + 4]
        with autocast(recipe=DelayedScaling(amax_history_len=3), amax_reduction_group=dist.group.WORLD):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, model[0].delayed.input.history.tolist(), model[0].delayed.weight.scale.item()]


def test_ranks_agree_on_scales(tmp_path):
    """TransformerEngine#600: the same histories on all ranks, also where one saw nothing."""
    one, other = results(run_ranks(_tensor_parallel, 2, tmp_path))
    assert one == other and all(any(h) for h in one)


def test_current_scaling_reduces_over_ranks(tmp_path):
    parts = results(run_ranks(_current, 2, tmp_path))
    torch.manual_seed(0)
    layer = Linear(32, 16, bias=False, recipe=Float8CurrentScaling(), backend="reference")
    torch.testing.assert_close(torch.tensor(parts[0] + parts[1]), layer(values(8, 32)).detach(), rtol=0, atol=0)


def test_fully_sharded_parameters(tmp_path):
    """FSDP2: what one process does with the whole batch, up to the scales of its gradients."""
    one, other = results(run_ranks(_sharded, 2, tmp_path))
    assert one[1:] == other[1:] and all(loss > 0 for loss in one[0])
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=3)
    model = nn.Sequential(*(Linear(32, 32, recipe=recipe, backend="reference") for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        loss = model(values(8, 32, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx((one[0][step] + other[0][step]) / 2, rel=0.02)
    assert model[0].delayed.input.history.tolist() == pytest.approx(one[1])


def test_the_package_offers_functions_and_not_modules():
    import gpu_accel.transformer_engine as te

    assert all(not isinstance(getattr(te, name), type(sys)) for name in te.__all__)
