"""Quantisers, products and the KV cache on a GPU: the same bits as the reference, where only hardware could differ."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.testing import compare, generator
from gpu_accel.thunderkittens.gemm_hopper import machine_refusal
from gpu_accel.transformer_engine import gemm, hopper_gemm, linear_op, quantize_launch, quantizer, taped
from gpu_accel.transformer_engine.activations import (
    ACTIVATIONS,
    activate_reference,
    activation_backward_op,
    activation_op,
)
from gpu_accel.transformer_engine.context import autocast
from gpu_accel.transformer_engine.gemm import scaled_mm
from gpu_accel.transformer_engine.grouped_linear import GroupedLinear
from gpu_accel.transformer_engine.history_kernels import roll, roll_op
from gpu_accel.transformer_engine.kv_cache import ELEMENTS, GRANULARITIES, quantize_kv_cache
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.modules import DotProductAttention, LayerNormMLP, TransformerLayer
from gpu_accel.transformer_engine.optimizers import AdamW8bit, Lion8bit
from gpu_accel.transformer_engine.quantize_launch import Source
from gpu_accel.transformer_engine.quantizer import LONGEST_ROW, quantize
from gpu_accel.transformer_engine.recipes import RECIPES, DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from gpu_accel.transformer_engine.reference_gemm import hopper_fp8_sum, scaled_mm_reference
from gpu_accel.transformer_engine.schemes import SCHEMES, scheme
from gpu_accel.transformer_engine.sharded import largest
from gpu_accel.transformer_engine.sources import operand_op, source_reference
from gpu_accel.transformer_engine.tape import Tape
from gpu_accel.transformer_engine.tensor import QuantizedTensor

MORE = [
    "e4m3:0x0:fp32:stochastic",
    "e5m2:1x128:pow2",
    "e2m1:1x32:e8m0:even",
    "e5m2:1x32:e8m0:floor:stochastic",
    "e2m1:1x16:nvfp4:stochastic",
    "e2m1:1x16:nvfp4:hadamard16",
]


@pytest.fixture(autouse=True)
def kernels_by_default(monkeypatch):
    """These tests are what decides whether "auto" takes the kernels."""
    monkeypatch.setattr(quantizer, "GPU_CHECKED", True)
    monkeypatch.setattr(quantizer, "FUSED_CHECKED", True)


def make(rows: int, cols: int, *, dtype=torch.bfloat16, special: bool = True, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=generator(seed, "cuda"), device="cuda") * 3
    if special:  # every kind of block that the policy names
        x[1] = 0
        x[2, 3], x[3, 5], x[0, 0] = math.nan, -math.inf, 1e-38
        x[4] *= 1e30
        x[5] *= 1e-30
        x[6] *= 1e-39
    return x.to(dtype)


def assert_same_bits(one: QuantizedTensor, other: QuantizedTensor) -> None:
    for name, mine in one._inner.items():
        theirs = other._inner[name]
        assert (mine is None) == (theirs is None), name
        if mine is None or theirs is None:
            continue
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
        else:
            wrong = mine.view(torch.uint8) != theirs.view(torch.uint8)
            assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} bytes differ"


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("name", [*SCHEMES, *MORE])
def test_bits(name, columnwise):
    """A shape that tiles divide (no masks, vectors of 16 bytes) and one that nothing divides."""
    seed = 3 if scheme(name).rounding == "stochastic" else None
    for shape in ((512, 1024), (304, 1104) if "hadamard" in name else (301, 1097)):
        for dtype in (torch.bfloat16, torch.float32):
            x = make(*shape, dtype=dtype)
            one, other = (
                quantize(x, name, columnwise=columnwise, seed=seed, backend=backend)
                for backend in ("portable", "reference")
            )
            assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["fp8_1x128", "e4m3:1x128:pow2", "e5m2:1x128:fp32"])
def test_bits_of_hoppers_own(name, monkeypatch):
    """The kernel that makes both copies of whole tiles: rows apart, zeros of both signs, infinities in every block, and
    blocks of both copies in which no number is finite."""
    if machine_refusal(torch.empty(0, device="cuda")):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setattr(quantize_launch, "TURN_CHECKED", False)  # which would take bf16
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = make(384, 512, dtype=torch.float32)
        x[7], x[200:260, 130:170], x[300, ::32] = -0.0, math.nan, math.inf
        x[8, :128], x[9, 128:256], x[128:256, 5], x[256:384, 6] = math.nan, -math.inf, math.nan, math.inf
        store = torch.full((384, 528), math.nan, dtype=dtype, device="cuda")
        store[:, 8:520] = x.to(dtype)
        for view in (x.to(dtype), store[:, 8:520]):
            matrix = quantize_launch.as_matrix(view)
            assert quantize_launch.takes_both(view, scheme(name), matrix, quantize_launch.PLAIN)
            assert_same_bits(*(quantize(view, name, columnwise=True, backend=b) for b in ("portable", "reference")))


@pytest.mark.parametrize(
    "name",
    ["fp8_1x128", "e5m2:1x128:pow2", "fp8", "fp8_e5m2", "fp8_128x128", "e5m2:128x128:pow2", "mxfp8", "mxfp8_e5m2"],
)
def test_bits_of_copies_turned_in_registers(name, monkeypatch):
    """Rows apart, zeros of both signs, and blocks of zeros, of NaN and of infinities alone."""
    if machine_refusal(torch.empty(0, device="cuda")):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setattr(quantize_launch, "SQUARE_CHECKED", True)
    monkeypatch.setattr(quantize_launch, "MX_CHECKED", True)
    what = scheme(name)
    x = make(384, 512, dtype=torch.float32)
    x[7], x[200:260, 130:170], x[300, ::32], x[310, 5::64] = -0.0, math.nan, math.inf, -math.inf
    x[64:192, 256:384], x[128:256, 384:], x[256:, :128], x[256:, 384:] = 0, 0, math.nan, math.inf
    store = torch.full((384, 528), math.nan, dtype=torch.bfloat16, device="cuda")
    store[:, 8:520] = x.bfloat16()
    given = [None] if what.block != (0, 0) else [torch.tensor(v, device="cuda") for v in (0.37, 3e-3)]
    for view in (x.bfloat16(), store[:, 8:520], store[:128, 8:136]):
        matrix = quantize_launch.as_matrix(view)
        for scale in given:
            assert quantize_launch.takes_turn(view, what, matrix, quantize_launch.PLAIN, scale is not None)
            both = [quantize(view, name, columnwise=True, backend=b, scale=scale) for b in ("portable", "reference")]
            assert_same_bits(*both)
            seen = [q.seen_amax for q in both]
            assert scale is None or torch.equal(*(amax.reshape(()).view(torch.int32) for amax in seen)), seen


@pytest.mark.parametrize("shape", [(4096, 1024), (301, 1097)], ids=str)
def test_codes_turned_round(shape, monkeypatch):
    monkeypatch.setattr(quantize_launch, "CODES_CHECKED", True)
    codes = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    assert torch.equal(quantize_launch.turned_codes(codes), codes.t())


def test_the_reference_gives_the_same_bits_on_a_cpu():
    for name in ("fp8_1x128", "mxfp8", "nvfp4", "int8_row", "fp8_128x128"):
        x = make(130, 300)
        one, other = quantize(x, name), quantize(x.cpu(), name, backend="reference")
        assert_same_bits(one, other.to("cuda"))


def test_rows_longer_than_a_tile():
    x = make(9, 2 * LONGEST_ROW + 5)
    assert_same_bits(*(quantize(x, "fp8_row", backend=b) for b in ("portable", "reference")))


@pytest.mark.parametrize("name", ["fp8", "fp8_row", "mxfp8", "nvfp4"])
def test_offsets_beyond_two_to_the_31(name):
    store = torch.empty(2**32 + 4096, dtype=torch.bfloat16, device="cuda")
    x = store.as_strided((3, 1024), (2**31, 1))
    x.copy_(make(3, 1024, special=False))
    out = quantize(x, name, columnwise=True)
    assert_same_bits(out, quantize(x.clone(), name, columnwise=True, backend="reference"))


def test_transposed_and_sliced_views():
    x = make(512, 768)
    for view in (x.t(), x[:, ::2], x[::3, 1:], x[:1].expand(64, 768)):
        assert_same_bits(*(quantize(view, "mxfp8", columnwise=True, backend=b) for b in ("portable", "reference")))


PAIRS = [
    ("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_e5m2", "fp8"), ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4_16x16"),
    ("mxfp6_e2m3", "mxfp8"),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(256, 384, 1024), (77, 200, 1033), (1, 128, 256)], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_products(pair, shape):
    m, n, k = shape
    a = quantize(make(m, k, special=False), pair[0])
    b = quantize(make(n, k, special=False, seed=1), pair[1])
    truth = scaled_mm_reference(a, b)
    ruler = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    found = compare(scaled_mm(a, b), truth, ruler)
    assert found.ok, found


@pytest.mark.parametrize("shape", [(256, 384, 1024), (77, 200, 1056)], ids=str)
@pytest.mark.parametrize("pair", [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4")], ids="-".join)
def test_products_for_blackwell_elsewhere(pair, shape):
    """The kernel for GPUs with units for MX, which Triton widens to bf16 elsewhere: its addresses, not its units."""
    m, n, k = shape
    a = quantize(make(m, k, special=False), pair[0])
    b = quantize(make(n, k, special=False, seed=1), pair[1])
    out = gemm.scaled_mm_op(
        *gemm._bytes(a), *gemm._bytes(b), None, torch.bfloat16, a.scheme.text, b.scheme.text, k, True
    )
    ruler = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    found = compare(out, scaled_mm_reference(a, b), ruler)
    assert found.ok, found


def test_rows_that_no_tile_of_256_divides():
    """pytorch#133334: a row-wise product of 8352 x 4096 x 1536 read beyond its scales."""
    a = quantize(make(8352, 1536, special=False), "fp8_row")
    b = quantize(make(4096, 1536, special=False, seed=1), "fp8_row")
    truth = scaled_mm_reference(a, b)
    ruler = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    found = compare(scaled_mm(a, b), truth, ruler)
    assert found.ok, found


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
def test_sums_over_a_long_k_keep_their_bits(pair):
    """What leaves the tensor core every 128 of K has lost what the model of its sums says, and no more.

    Left inside to the end, sums of 2**15 positive numbers would lose a third.
    """
    k = 1 << 15
    a = quantize(torch.rand(64, k, device="cuda", generator=generator(0, "cuda")), pair[0])
    b = quantize(torch.rand(64, k, device="cuda", generator=generator(1, "cuda")), pair[1])

    def error(out: torch.Tensor) -> float:
        return float(((out.double() - truth) / truth).abs().max())

    truth = a.codes.double() @ b.codes.double().t()
    modelled = error(hopper_fp8_sum(a.codes.float(), b.codes.float()))
    truth = scaled_mm_reference(a, b)
    found = error(scaled_mm(a, b, out_dtype=torch.float32))
    assert 1e-4 < modelled < 1e-3 and found < 1.5 * modelled, (found, modelled)
    if pair == ("fp8", "fp8") and torch.cuda.get_device_capability() == (9, 0):
        # what is left beside the model: 256 partial sums, added in another order, and a scale
        assert found <= modelled + 258 * 2.0**-24, (found, modelled)
        scale = (a.scales.reshape(()), b.scales.reshape(()))
        theirs, fast = (
            torch._scaled_mm(a.codes, b.codes.t(), *scale, out_dtype=torch.float32, use_fast_accum=fast)
            for fast in (False, True)
        )
        assert found < 2 * error(theirs), (found, error(theirs))
        assert found < error(fast) / 50, (found, error(fast))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_cache(dtype, granularity):
    k, v = (make(2 * 100, 4 * 72, seed=s).view(2, 100, 4, 72) for s in range(2))
    one, other = (
        quantize_kv_cache(k, v, dtype=dtype, granularity=granularity, backend=b) for b in ("portable", "reference")
    )
    assert torch.equal(one.k.view(torch.uint8), other.k.view(torch.uint8))
    assert torch.equal(one.v.view(torch.uint8), other.v.view(torch.uint8))
    torch.testing.assert_close(one.k_scale, other.k_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [AdamW8bit, Lion8bit], ids=["adamw", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizers(dtype, kind):
    """A step of the kernel next to the reference: the same states up to what the last bit of a sum decides."""
    made = []
    for backend in ("portable", "reference"):
        p = torch.nn.Parameter(make(300, 1001, special=False).to(dtype))
        optimizer = kind([p], lr=0.01, backend=backend, bf16_stochastic_rounding=True)
        torch.manual_seed(0)
        for step in range(2):
            p.grad = make(300, 1001, special=False, seed=step + 1).to(dtype)
            optimizer.step()
        made.append((p.detach(), optimizer.state[p]))
    (p, state), (q, other) = made
    torch.testing.assert_close(p, q, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert (p != q).float().mean() < 0.05
    assert (state["exp_avg"] != other["exp_avg"]).float().mean() < 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_linear(name):
    """Values and gradients of the kernels next to those of plain torch, on the same codes."""
    made = []
    for backend in ("portable", "reference"):
        torch.manual_seed(0)
        layer = Linear(264, 200, recipe=RECIPES[name], backend=backend, device="cuda")
        for step in range(2):
            layer.zero_grad()
            x = make(77, 264, special=False, seed=step).requires_grad_()
            torch.manual_seed(1)
            y = layer(x)
            y.backward(make(77, 200, special=False, seed=5 + step))
        made.append((y.detach(), x.grad, layer.weight.grad, layer.bias.grad))
    for one, other in zip(*made, strict=True):
        assert (one.double() - other.double()).norm() < 4e-3 * other.double().norm()  # bf16 rounds to 1.7e-3


@pytest.mark.parametrize("name", ["fp8", "fp8-given", "fp8_1x128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["rms", "layer", "swiglu", "gelu"])
def test_sources(kind, name):
    """Norms and activations computed while they are quantised: both copies as near to the exact result as those of the
    written one, for a shape that tiles divide and for one that nothing divides."""
    for rows, cols in ((256, 512), (77, 200)):
        x = make(rows, 2 * cols if kind == "swiglu" else cols, special=False)
        source = Source(kind)
        if source.is_norm:
            gamma, beta = (make(1, cols, special=False, seed=s)[0] for s in (1, 2))
            source = Source(kind, gamma, beta if kind == "layer" else None, 1e-5)
        what = scheme(name.removesuffix("-given"))
        scale = torch.tensor(0.1, device="cuda") if name.endswith("given") else None
        truth = source_reference(x, source)[0]
        errors, maxima = [], []
        for backend in ("portable", "reference"):
            seen = None if scale is None else torch.zeros((), device="cuda")
            made = operand_op(
                x, scale, seen, what.text, what.text, True, True, 0, backend, kind, source.gamma, source.beta, 1e-5
            )  # fmt: skip
            maxima.append(seen)
            for parts, exact in ((made[:3], truth), (made[3:6], truth.t())):
                found = linear_op._rows(parts, what, tuple(exact.shape), torch.float32).dequantize().double()
                errors.append(float((found - exact.double()).norm() / exact.double().norm()))
        assert 0 < errors[0] < 1.02 * errors[2] and 0 < errors[1] < 1.02 * errors[3], errors
        if scale is not None:
            torch.testing.assert_close(maxima[0], maxima[1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    widening = ACTIVATIONS[name][1]
    x, dy = make(77, widening * 1100, special=False), make(77, 1100, special=False, seed=1)
    z = x.double().requires_grad_()
    truth = activate_reference(z, name)
    truth.backward(dy.double())
    for mine, exact in ((activation_op(x, name), truth.detach()), (activation_backward_op(dy, x, name), z.grad)):
        found = compare(mine, exact, exact.bfloat16())
        assert found.ok, found


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 1024, 5000])
def test_histories(length, algorithm):
    """One launch does, bit for bit, what a dozen of plain torch do."""
    for pair in ((0.5, 0.0), (100.0, math.inf), (math.nan, 1e-42), (1e38, 3.0)):
        states = []
        for pending in pair:
            history = torch.zeros(length, device="cuda")
            drawn = make(1, length, special=False, dtype=torch.float32)[0].abs()
            history[: length // 2] = drawn[: length // 2]
            numbers = [torch.tensor(x, device="cuda") for x in (0.01, pending)]
            states.append([history, *numbers, torch.zeros(2, dtype=torch.int64, device="cuda")])
        truth = [[t.clone() for t in one] for one in states]
        out = roll_op([t for one in states for t in one], [448.0, 57344.0], 1, algorithm, True)
        for i, one in enumerate(truth):
            roll(*one, largest=(448.0, 57344.0)[i], margin=1, algorithm=algorithm)
            for mine, theirs in zip(states[i], one, strict=True):
                assert torch.equal(mine, theirs), (pair[i], mine, theirs)
            assert out[i, 0] == one[1]


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block"])
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_layers_of_norm_and_activation(name, backend):
    """Outputs and gradients of the fused layers next to those of plain torch."""
    made = []
    for chosen in (backend, "reference"):
        torch.manual_seed(0)
        layer = LayerNormMLP(256, 384, activation="swiglu", recipe=RECIPES[name], backend=chosen, device="cuda",
                             params_dtype=torch.bfloat16)  # fmt: skip
        for step in range(2):
            layer.zero_grad()
            x = make(160, 256, special=False, seed=step).requires_grad_()
            y = layer(x)
            y.backward(make(160, 256, special=False, seed=5 + step))
        made.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for one, other in zip(*made, strict=True):
        # a rounding to bf16 that falls otherwise moves a code by up to a step of 6 % (e4m3) or 12 % (e5m2)
        assert (one.double() - other.double()).norm() < 0.02 * other.double().norm()


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_a_training_step_in_a_graph(name):
    """Forward, backward and the histories are captured and replayed without synchronising."""
    torch.manual_seed(0)
    layer = TransformerLayer(
        256, 512, 4, normalization="RMSNorm", activation="swiglu", bias=False, attn_input_format="bshd", device="cuda",
        params_dtype=torch.bfloat16, recipe=RECIPES[name], backend="portable",
    )  # fmt: skip
    x = make(2 * 64, 256, special=False).view(2, 64, 256).requires_grad_()
    dy = make(2 * 64, 256, special=False, seed=1).view(2, 64, 256)

    def step():
        y = layer(x)
        y.backward(dy)
        return y.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            eager = step()
        eager_grad = x.grad.clone()
        layer.zero_grad()
        x.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(y, eager, rtol=0.02, atol=0.02)
    assert (x.grad.double() - eager_grad.double()).norm() < 0.02 * eager_grad.double().norm()


def test_delayed_scaling_in_a_graph():
    """Nothing synchronises, so a step of delayed scaling can be captured and replayed."""
    state = DelayedScaling(amax_history_len=4).state(device="cuda")
    x = make(256, 256, special=False)
    scale = state.scale.clone()
    quantize(x, "fp8", scale=scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = quantize(x, "fp8", scale=scale)
    x.mul_(2)
    graph.replay()
    assert q.seen_amax.item() == x.float().abs().max().item()
    assert_same_bits(q, quantize(x, "fp8", scale=scale, backend="reference"))


def test_what_is_emulated_says_so():
    capability = torch.cuda.get_device_capability()
    assert quantize(make(64, 64), "nvfp4").emulated == (capability < (10, 0))
    assert quantize(make(64, 64), "fp8").emulated == (capability < (9, 0))


def test_largest_magnitude():
    """What ranks agree on before they cast a weight: one read, whatever tiles divide."""
    for shape in ((512, 1024), (301, 1097), (1, 5)):
        x = torch.randn(shape, generator=generator(0, "cuda"), device="cuda")
        for finite_only in (True, False):
            assert largest(x, finite_only=finite_only) == x.abs().max()
            x[0, 0] = math.nan
            assert largest(x, finite_only=finite_only) == (x[~x.isnan()].abs().max() if finite_only else math.inf)
            x[0, 0] = 0


@pytest.mark.parametrize("name", ["fp8", "fp8_128x128"])
def test_a_weight_that_was_gathered(name, monkeypatch):
    """FSDP2 hands a layer the codes of its weight: results and gradients are those of quantising it in the layer, also
    in steps that are played back."""
    monkeypatch.setattr(taped, "GPU_CHECKED", True)
    recipe = Float8BlockScaling(use_f32_scales=True) if name == "fp8_128x128" else Float8CurrentScaling()
    layer = Linear(512, 384, bias=False, params_dtype=torch.bfloat16, device="cuda", recipe=recipe)
    whole, found = layer.weight.detach(), []
    for weight in (whole, quantize(whole, recipe.scheme("weight"))):
        layer.weight, steps = torch.nn.Parameter(weight, requires_grad=True), 5
        for _ in range(steps):
            layer.weight.grad = None
            x = make(256, 512, special=False).requires_grad_()
            y = layer(x)
            y.backward(make(256, 384, special=False, seed=1))
            found.append((y, x.grad, layer.weight.grad))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    kinds = [kind for kind in layer._kinds.values() if isinstance(kind, taped.Kind)]
    assert len(kinds) == 2 and all(isinstance(tape, Tape) for k in kinds for tape in (k.forward, *k.backward.values()))


def layers_of_two_kinds(name, shape, steps, monkeypatch, taped_too):
    """What some steps of a layer give, its histories, and the layer."""
    monkeypatch.setattr(taped, "GPU_CHECKED", taped_too)
    monkeypatch.setattr(hopper_gemm, "SCALES_CHECKED", taped_too)
    torch.manual_seed(3)
    layer = LayerNormMLP(
        shape[-1], 512, bias=False, normalization="RMSNorm", activation="swiglu", params_dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    found = []
    for i in range(steps):
        x = torch.randn(shape, generator=generator(i, "cuda"), device="cuda").bfloat16().requires_grad_()
        layer.zero_grad(set_to_none=True)
        with autocast(recipe=RECIPES[name]):
            y = layer(x)
        y.backward(torch.randn(y.shape, generator=generator(i + 50, "cuda"), device="cuda").bfloat16())
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return found, [value.clone() for value in layer.state_dict().values()], layer


@pytest.mark.parametrize("shape", [(2, 256, 512), (3, 77, 512), (2, 8, 512)], ids=str)
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"])
def test_steps_that_are_played_back(name, shape, monkeypatch):
    """The bits of the ordinary way, histories included, and then in a graph as well."""
    wanted, state, _ = layers_of_two_kinds(name, shape, 6, monkeypatch, False)
    found, again, layer = layers_of_two_kinds(name, shape, 6, monkeypatch, True)
    kinds = [kind for m in (layer.fc1, layer.fc2) for kind in m._kinds.values() if isinstance(kind, taped.Kind)]
    assert len(kinds) == 2
    for kind in kinds:
        assert kind.forward is not None and not kind.why_not
        assert [isinstance(tape, Tape) for tape in kind.backward.values()] == [True]
    for i, (some, others) in enumerate(zip(wanted, found, strict=True)):
        for a, b in zip(some, others, strict=True):
            assert torch.equal(a, b), f"step {i}"
    assert all(torch.equal(a, b) for a, b in zip(state, again, strict=True))
    x = torch.randn(shape, generator=generator(7, "cuda"), device="cuda").bfloat16()
    layer.eval()

    def run():
        with torch.no_grad(), autocast(recipe=RECIPES[name]):
            return layer(x)

    for _ in range(4):
        plain = run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        y = run()
    y.fill_(math.nan)
    graph.replay()
    assert torch.equal(y, plain)


def test_scales_side_by_side_in_one_launch():
    for rows, cols in ((130, 3), (4096, 32), (1, 1), (257, 65)):
        scale = torch.rand(rows, cols, device="cuda")
        for padded, turned in ((False, False), (True, False), (True, True)):
            made = hopper_gemm._by_kernel(scale, padded, turned)
            wanted = hopper_gemm._side_by_side(scale.cpu(), (1, 128), padded=padded, turned=turned)
            assert torch.equal(made.cpu(), wanted)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "fp8_block"])
@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_linear_layers_of_experts(name, backend):
    """Against each expert's own in float64; sizes on the GPU, which nobody looks at, give the same."""
    layer = GroupedLinear(4, 512, 384, params_dtype=torch.bfloat16, device="cuda", backend=backend)
    splits = [300, 0, 128, 72]
    x, dy = (torch.randn(500, n, generator=generator(n, "cuda"), device="cuda").bfloat16() for n in (512, 384))
    x.requires_grad_()
    for sizes in (splits, splits, torch.tensor(splits, device="cuda")):
        layer.zero_grad()
        x.grad = None
        with autocast(recipe=RECIPES[name]):
            y = layer(x, sizes)
        y.backward(dy)
        z, w, b = (t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias))
        parts = zip(z.split(splits), w, b, strict=True)
        truth = torch.cat([part @ one.t() + bias for part, one, bias in parts])
        truth.backward(dy.double())
        pairs = ((y, truth), (x.grad, z.grad), (layer.weight.grad, w.grad), (layer.bias.grad, b.grad))
    for found, wanted in pairs:
        assert (found.double() - wanted).norm() <= 0.08 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_is_played_back(causal, dtype, monkeypatch):
    """q, k and v of one packed tensor; dq is summed in no fixed order, everything else has the same bits."""
    attend = DotProductAttention(attn_mask_type="causal" if causal else "no_mask", qkv_format="bshd")
    found: list[list] = [[], []]
    for i in range(6):
        for taped_too in (False, True):
            monkeypatch.setattr(taped, "GPU_CHECKED", taped_too)
            shape = (2, 300, 6, 128)
            packed = torch.randn(shape, generator=generator(i, "cuda"), device="cuda").to(dtype).requires_grad_()
            o = attend(*packed.split(2, 2))
            o.backward(torch.randn(o.shape, generator=generator(i + 9, "cuda"), device="cuda").to(dtype))
            found[taped_too].append((o.detach(), packed.grad))
    (kind,) = [kind for kind in attend._kinds.values() if isinstance(kind, taped.Attended)]
    if dtype is torch.bfloat16:
        assert isinstance(kind.forward, Tape) and not kind.why_not
        assert [isinstance(tape, Tape) for tape in kind.backward.values()] == [True]
    for (o, d), (p, e) in zip(*found, strict=True):
        assert torch.equal(o, p) and torch.equal(d[:, :, 2:], e[:, :, 2:])
        assert (d[:, :, :2].float() - e[:, :, :2].float()).norm() <= 2**-8 * d[:, :, :2].float().norm()
