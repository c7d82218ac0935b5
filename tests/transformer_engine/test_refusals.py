"""What a hostile caller passes: strided and foreign tensors are read right or refused with an error of this library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import (
    Float8BlockScaling,
    Scheme,
    decode,
    dynamic_precision_select,
    encode,
    error_report,
    fp8_quantize,
    precision_report,
    quantize,
    quantize_kv_cache,
    scaled_mm,
    scaled_mm_fp8,
    swizzle_scales,
    unswizzle_scales,
)
from gpu_accel.transformer_engine.attention import mixed_precision_attention
from gpu_accel.transformer_engine.context import autocast, checkpoint
from gpu_accel.transformer_engine.conversion import (
    transformer_engine_fp4,
    transformer_engine_fp8,
    transformer_engine_layer,
)
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import (
    DotProductAttention,
    LayerNormLinear,
    LayerNormMLP,
    Norm,
    TransformerLayer,
    rotary_angles,
)
from gpu_accel.transformer_engine.ops import dequantize_and_accumulate
from gpu_accel.transformer_engine.recipes import Float8CurrentScaling

FUNCTIONS = {"fp8": transformer_engine_fp8, "fp4": transformer_engine_fp4}


def r(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, every other place in memory a 7."""
    return torch.stack([t, torch.full_like(t, 7)], -1)[..., 0]


@pytest.mark.parametrize("scheme", ["fp8", "fp8_row", "mxfp8", "nvfp4"])
def test_a_strided_bias_is_read_by_its_strides(scheme):
    a, b, bias = quantize(r(3, 32), scheme), quantize(r(5, 32, seed=1), scheme), r(5, seed=2)
    one, other = (scaled_mm(a, b, bias=t, out_dtype=torch.float32, backend="portable") for t in (bias, strided(bias)))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_read_strided_tensors(name):
    x, w, bias = r(3, 32), r(5, 32, seed=1), r(5, seed=2)
    one = FUNCTIONS[name](x, w, bias, backend="portable")
    assert torch.equal(FUNCTIONS[name](strided(x), strided(w), strided(bias), backend="portable"), one)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("which", range(3), ids=["x", "weight", "bias"])
def test_functions_want_one_device(name, which):
    tensors = [r(3, 4), r(5, 4), r(5)]
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(InvalidInputError, match="one device"):
        FUNCTIONS[name](*tensors, backend="portable")


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "fp8"])
def test_layers_want_one_device(recipe):
    with pytest.raises(InvalidInputError, match="one device"):
        Linear(4, 5, recipe=recipe)(r(3, 4).to("meta"))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("m, n, k", [(3, 5, 0), (0, 5, 4), (3, 0, 4)], ids=["no-k", "no-rows", "no-columns"])
def test_functions_of_nothing(name, m, n, k):
    bias = r(n)
    got = FUNCTIONS[name](r(m, k), r(n, k), bias, backend="portable")
    assert got.shape == (m, n) and (k or torch.equal(got, bias.expand(m, n)))


REFUSED = {
    "x-number": lambda: Linear(4, 5)(1.0),
    "x-0d": lambda: Linear(4, 5)(torch.tensor(1.0)),
    "x-width-without-recipe": lambda: Linear(4, 5)(r(3, 3)),
    "x-width": lambda: Linear(4, 5, recipe=Float8CurrentScaling())(r(3, 3)),
    "x-sparse": lambda: Linear(4, 5)(r(3, 4).to_sparse()),
    "microbatch-text": lambda: Linear(4, 5)(r(3, 4), is_first_microbatch="no"),
    "dtype-int": lambda: Linear(4, 5, params_dtype=torch.int8),
    "dtype-text": lambda: Linear(4, 5, params_dtype="bf16"),
    "layer-bias-list": lambda: Linear(4, 5, [1.0]),
    "bias-list": lambda: transformer_engine_fp8(r(3, 4), r(5, 4), [1.0] * 5),
    "bias-shape": lambda: transformer_engine_fp8(r(3, 4), r(5, 4), r(4)),
    "bias-int": lambda: transformer_engine_fp4(r(3, 4), r(5, 4), torch.ones(5, dtype=torch.int32)),
    "weight-list": lambda: transformer_engine_fp8(r(3, 4), [[1.0] * 4]),
    "accumulator-elsewhere": lambda: dequantize_and_accumulate(r(3, 4), accumulator=r(3, 4).to("meta")),
    "accumulator-list": lambda: dequantize_and_accumulate(r(3, 4), accumulator=[1.0]),
    "scales-elsewhere": lambda: dequantize_and_accumulate(r(3, 4), r(4).to("meta")),
    "norm-width": lambda: Norm(8)(r(3, 4)),
    "norm-of-a-list": lambda: Norm(8)([1.0] * 8),
    "norm-eps": lambda: Norm(8, eps=-1.0),
    "norm-linear-width": lambda: LayerNormLinear(8, 5)(r(3, 4)),
    "mlp-width": lambda: LayerNormMLP(8, 16)(r(3, 4)),
    "mlp-size": lambda: LayerNormMLP(8, 0, activation="swiglu"),
    "block-width": lambda: TransformerLayer(16, 32, 2)(r(3, 2, 8)),
    "block-rank": lambda: TransformerLayer(16, 32, 2)(r(3, 16)),
    "block-heads-text": lambda: TransformerLayer(16, 32, "2"),
    "block-epsilon": lambda: TransformerLayer(16, 32, 2, layernorm_epsilon=-1),
    "block-dropout-nan": lambda: TransformerLayer(16, 32, 2, hidden_dropout=math.nan),
    "block-dropout": lambda: TransformerLayer(16, 32, 2, hidden_dropout=2.0),
    "block-window": lambda: TransformerLayer(16, 32, 2, window_size=3),
    "block-microbatch": lambda: TransformerLayer(16, 32, 2)(r(3, 2, 16), is_first_microbatch="no"),
    "block-dtype": lambda: TransformerLayer(16, 32, 2, params_dtype=torch.int8),
    "named-layer-ffn": lambda: transformer_engine_layer(16, 2, ffn_hidden_size=0),
    "named-layer-size": lambda: transformer_engine_layer("16", 2),
    "named-layer-dtype": lambda: transformer_engine_layer(16, 2, dtype="bf16"),
    "activation-list": lambda: scaled_mm(quantize(r(3, 32), "fp8"), quantize(r(5, 32), "fp8"), activation=["relu"]),
    "activation-fp8-list": lambda: scaled_mm_fp8(
        quantize(r(3, 32), "fp8"), quantize(r(5, 32), "fp8"), torch.ones(()), activation=["relu"]
    ),
    "element-list": lambda: scaled_mm_fp8(
        quantize(r(3, 32), "fp8"), quantize(r(5, 32), "fp8"), torch.ones(()), element=["e4m3"]
    ),
    "mlp-activation-list": lambda: LayerNormMLP(4, 5, activation=["gelu"]),
    "block-activation-list": lambda: TransformerLayer(16, 32, 2, activation=["gelu"]),
    "named-layer-precision-list": lambda: transformer_engine_layer(16, 2, precision=["fp8"]),
    "cache-dtype-list": lambda: quantize_kv_cache(r(1, 2, 1, 32), r(1, 2, 1, 32), dtype=["fp8"]),
    "recipes-lists": lambda: precision_report(Linear(4, 5), r(3, 4), recipes=[["fp8"]]),
    "recipes-number": lambda: precision_report(Linear(4, 5), r(3, 4), recipes=5),
    "schemes-number": lambda: error_report(r(3, 4), 5),
    "operation-list": lambda: dynamic_precision_select({"name": ["matmul"]}, "h100"),
    "operation-number": lambda: dynamic_precision_select(5, "h100"),
    "operation-error-text": lambda: dynamic_precision_select("matmul", "h100", max_error="0.1"),
    "swizzled-none": lambda: swizzle_scales(None),
    "unswizzled-none": lambda: unswizzle_scales(None, 4, 4),
    "unswizzled-text": lambda: unswizzle_scales(torch.zeros(512, dtype=torch.uint8), "4", 4),
    "scale-without-value": lambda: quantize(r(3, 4), "fp8", scale=torch.ones((), device="meta")),
    "checkpoint-of-nothing": lambda: checkpoint(None, r(3, 4)),
    "reduction-over-a-number": lambda: autocast(amax_reduction_group=3).__enter__(),
    "attention-precision": lambda: mixed_precision_attention(*[r(1, 3, 2, 16)] * 3, precision="fp4"),
    "attention-of-rows": lambda: mixed_precision_attention(r(3, 16), r(3, 16), r(3, 16)),
    "history-without-values": lambda: fp8_quantize(r(3, 4), torch.zeros(4, device="meta")),
    "result-none": lambda: dequantize_and_accumulate(None),
    "scale-text": lambda: dequantize_and_accumulate(r(3, 4), "2"),
    "accumulator-gradient": lambda: dequantize_and_accumulate(
        r(3, 4), accumulator=torch.zeros(3, 4, requires_grad=True)
    ),
    "angles-list": lambda: TransformerLayer(16, 32, 2)(r(3, 2, 16), rotary_pos_emb=[1.0]),
    "angles-length": lambda: TransformerLayer(16, 32, 2)(r(3, 2, 16), rotary_pos_emb=r(2, 4)),
    "angles-elsewhere": lambda: TransformerLayer(16, 32, 2)(r(3, 2, 16), rotary_pos_emb=r(3, 4).to("meta")),
    "angles-seqlen-text": lambda: rotary_angles("3", 4),
    "angles-base-zero": lambda: rotary_angles(3, 4, base=0),
    "attention-of-lists": lambda: DotProductAttention()([1.0], [1.0], [1.0]),
    "attention-rank": lambda: DotProductAttention()(r(3, 8), r(3, 8), r(3, 8)),
    "attention-device": lambda: DotProductAttention()(r(3, 1, 2, 8), r(3, 1, 2, 8), r(3, 1, 2, 8).to("meta")),
}


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "fp8"])
@pytest.mark.parametrize("x", [None, 5, [1.0] * 4, torch.ones(4, dtype=torch.int32)], ids=["none", "5", "list", "ints"])
@pytest.mark.parametrize("layer", [Linear, LayerNormLinear, LayerNormMLP])
def test_layers_look_at_their_input_first(layer, x, recipe):
    with pytest.raises(InvalidInputError, match="x must be a tensor of floats"):
        layer(4, 5, recipe=recipe)(x)


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED.keys())
def test_refused(use):
    with pytest.raises((InvalidInputError, UnsupportedError)):
        use()


def test_caches_are_quantised_where_others_look():
    """torch.compile in one graph, fake tensors, views that negate: the kernel was launched past all of them."""
    k = r(2, 8, 2, 32)
    wanted = quantize_kv_cache(k, k, backend="portable")
    compiled = torch.compile(lambda a: quantize_kv_cache(a, a, backend="portable").k_scale, backend="aot_eager",
                             fullgraph=True)  # fmt: skip
    assert torch.equal(compiled(k), wanted.k_scale)
    for granularity in ("head", "token", "page"):
        for dtype in ("fp8", "int4"):
            whole = quantize_kv_cache(k[:, :7], k[:, :7], dtype=dtype, granularity=granularity, page_size=4)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = mode.from_tensor(k)[:, :7]
                made = quantize_kv_cache(fake, fake, dtype=dtype, granularity=granularity, page_size=4)
            for one, other in ((made.k, whole.k), (made.v_scale, whole.v_scale)):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
    negated = torch.complex(k, k).conj().imag
    with pytest.raises(UnsupportedError, match="negates"):
        quantize_kv_cache(negated, negated)
    codes = quantize(k, "fp8")
    with pytest.raises(UnsupportedError, match="codes"):
        quantize_kv_cache(codes, codes)


def test_codes_are_no_array_of_others():
    """Their tensor has no memory of its own: numpy read somebody else's."""
    with pytest.raises(UnsupportedError, match="no array"):
        np.from_dlpack(quantize(r(4, 32), "mxfp8"))


def test_tangents_stay_with_torch_or_are_refused():
    """Without a recipe a layer is torch's own and has derivatives in forward mode; under one they would be lost."""
    layer, x = Linear(32, 32), r(4, 32)
    with torch.no_grad():
        y, tangent = torch.func.jvp(layer, (x,), (x,))
        assert torch.equal(y, layer(x))
        torch.testing.assert_close(tangent, x @ layer.weight.t())
    weights = dict(layer.named_parameters())

    def called(new):
        return torch.func.functional_call(layer, new, (x,))

    with autocast(recipe=Float8CurrentScaling()):
        with pytest.raises(UnsupportedError, match="x has a tangent"):
            torch.func.jvp(layer, (x,), (x,))
        with pytest.raises(UnsupportedError, match="no rule for the transforms"):
            torch.func.jvp(called, (weights,), ({name: torch.ones_like(w) for name, w in weights.items()},))
        with pytest.raises(UnsupportedError, match="no rule for the transforms"):
            torch.vmap(layer)(x[None])
        assert Linear(32, 32, device="meta")(x.to("meta")).shape == (4, 32), "sizes can be asked for"


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode(torch.zeros(3), "e4m3", saturate=torch.ones(2)), lambda: decode(None, "e4m3"),
        lambda: dequantize_and_accumulate(torch.zeros(2), 10**400), lambda: LayerNormMLP(8, 8, sequence_parallel="no"),
        lambda: Float8BlockScaling(x_block_scaling_dim=torch.ones(2)), lambda: error_report(r(2, 32).to("meta")),
        lambda: error_report(r(2, 32), torch.ones(())),
        lambda: precision_report(Linear(8, 8), r(2, 8), recipes=torch.ones(())),
        lambda: Scheme(element="e2m1", block=(1, 16), scale="nvfp4", hadamard=torch.ones(2)),
        lambda: fp8_quantize(r(2, 32).to("meta"), torch.zeros(4)),
    ],
)  # fmt: skip
def test_arguments_of_no_sense(call):
    with pytest.raises(InvalidInputError):
        call()
