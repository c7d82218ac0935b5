"""Single steps: fp8 with a history, fp4, widening sums, the KV cache, and the choice of a precision."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.kv_cache import ELEMENTS, GRANULARITIES, quantize_kv_cache
from gpu_accel.transformer_engine.ops import dequantize_and_accumulate, fp4_quantize, fp8_quantize
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.select import SENSITIVE, dynamic_precision_select, product_error


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


# -- fp8, fp4


def test_fp8_with_a_history(device):
    x = normal(8, 64).to(device)
    history = torch.zeros(3, device=device)
    first = fp8_quantize(x, history)
    assert first.scales.item() == 1.0 and history.tolist()[0] == x.abs().max().item()
    second = fp8_quantize(2 * x, history)
    assert second.scales.item() == quantize(x, "fp8").scales.item()
    assert history.tolist() == [2 * x.abs().max().item(), x.abs().max().item(), 0.0]
    before = history.clone()
    fp8_quantize(x * math.inf, history)
    assert torch.equal(history, before)


def test_fp8_without_a_history_is_current_scaling():
    x = normal(8, 64)
    for dtype, name in (("e4m3", "fp8"), ("e5m2", "fp8_e5m2")):
        assert torch.equal(bits(fp8_quantize(x, dtype=dtype).codes), bits(quantize(x, name).codes))


def test_fp4_with_and_without_scales_per_block():
    x = normal(8, 64)
    x[0, 0] = 100
    blocks, whole = fp4_quantize(x), fp4_quantize(x, scale_per_block=False)
    assert blocks.scheme.scale == "nvfp4" and whole.scales.shape == (1, 1)
    error = [(q.dequantize() - x).square()[1:].mean().item() for q in (blocks, whole)]
    assert error[0] < error[1] / 4


def test_dequantize_and_accumulate():
    x, scale = normal(4, 6), torch.rand(4, 1)
    assert torch.equal(dequantize_and_accumulate(x, scale), x * scale)
    total = torch.ones(4, 6)
    assert dequantize_and_accumulate(x.bfloat16(), 2.0, total) is total
    assert torch.equal(total, 1 + x.bfloat16().float() * 2)
    q = quantize(normal(4, 32), "mxfp8")
    assert torch.equal(dequantize_and_accumulate(q), q.dequantize(torch.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fp8_quantize(torch.ones(4, 4), dtype="e2m1"),
        lambda: fp8_quantize(torch.ones(4, 4), margin=1),
        lambda: fp8_quantize(torch.ones(4, 4), torch.ones(0)),
        lambda: fp8_quantize(torch.ones(4, 4), torch.ones(2, dtype=torch.float64)),
        lambda: fp4_quantize(torch.ones(4, 4), 16),
        lambda: dequantize_and_accumulate(torch.ones(4, 4), torch.ones(3)),
        lambda: dequantize_and_accumulate(torch.ones(4, 4), 1.0, torch.ones(4)),
        lambda: dequantize_and_accumulate(torch.ones(4, 4), 1.0, torch.ones(4, 1).expand(4, 4)),
    ],
)
def test_refusals(call):
    with pytest.raises(InvalidInputError):
        call()


# -- the KV cache


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_cache_kernel_and_reference_agree(dtype, granularity, device):
    k, v = normal(1, 37, 2, 24).to(device), normal(1, 37, 2, 24, seed=1).to(device)
    k[0, 3, 1, 5], v[0, 36, 1, 0], k[0, 16:32] = math.nan, math.inf, 0
    one, other = (
        quantize_kv_cache(k, v, dtype=dtype, granularity=granularity, page_size=16, backend=backend)
        for backend in ("portable", "reference")
    )
    assert one.k.shape == (1, 37, 2, 12 if dtype == "int4" else 24)
    assert one.k_scale.shape == (1, {"head": 1, "token": 37, "page": 3}[granularity], 2)
    for name in ("k", "v"):
        assert torch.equal(bits(getattr(one, name)), bits(getattr(other, name)))
    for name in ("k_scale", "v_scale"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "bound"), [("fp8", 0.04), ("fp8_e5m2", 0.08), ("int8", 0.06), ("int4", 0.4)])
def test_cache_errors(dtype, bound):
    k, v = normal(1, 40, 2, 64), normal(1, 40, 2, 64, seed=1)
    k[..., 0] *= 20  # keys have channels that are always large
    error = {}
    for granularity in GRANULARITIES:
        got, _ = quantize_kv_cache(k, v, dtype=dtype, granularity=granularity).dequantize(torch.float32)
        error[granularity] = ((got - k).norm() / k.norm()).item()
    assert max(error.values()) < bound
    assert error["token"] <= error["head"] * 1.05


def test_cache_sizes():
    k = normal(1, 64, 2, 64).bfloat16()
    sizes = {d: quantize_kv_cache(k, k, dtype=d, granularity="head").nbytes for d in ("fp8", "int8", "int4")}
    values = 2 * k.numel()
    assert sizes == {"fp8": values + 16, "int8": values + 16, "int4": values // 2 + 16}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (1, 0, 2, 16), (1, 4, 0, 16), (1, 1, 1, 1)], ids=str)
def test_small_caches(shape, granularity):
    k = torch.ones(shape)
    got = quantize_kv_cache(k, k, granularity=granularity)
    assert torch.equal(got.dequantize(torch.float32)[0], k)


def test_cache_strides_are_read_in_place(device):
    k = (
        normal(2, 3, 20, 16).to(device).transpose(1, 2)
    )  # (batch, seqlen, heads, dim) inside (batch, heads, seqlen, dim)
    one, other = (quantize_kv_cache(x, x, granularity="page") for x in (k, k.contiguous()))
    assert torch.equal(bits(one.k), bits(other.k))


@pytest.mark.parametrize(
    "options",
    [
        dict(dtype="int3"), dict(granularity="layer"), dict(page_size=0), dict(k=torch.ones(2, 2, 2)),
        dict(k=torch.ones(1, 4, 2, 8).transpose(2, 3)), dict(k=torch.ones(1, 5, 2, 8)),
        dict(k=torch.ones(1, 4, 2, 8, dtype=torch.int32)),
    ],
)  # fmt: skip
def test_cache_refusals(options):
    with pytest.raises(InvalidInputError):
        quantize_kv_cache(**{"k": torch.ones(1, 4, 2, 8), "v": torch.ones(1, 4, 2, 8), **options})


# -- the choice


def test_a_hopper_gpu_takes_fp8_for_large_products_and_says_why_not_fp4():
    choice = dynamic_precision_select({"name": "linear", "m": 8192, "n": 8192, "k": 8192}, "h100", max_error=0.5)
    assert choice.precision == "fp8" and choice.scheme == "fp8_row"
    assert "nvfp4" in choice.refused and "mxfp8" in choice.refused
    assert "modelled" in str(choice)


def test_a_product_that_reads_more_than_it_computes_is_not_worth_quantising():
    """A narrow weight against many tokens: writing and reading the quantised input costs more than it saves."""
    choice = dynamic_precision_select({"name": "matmul", "m": 1 << 20, "n": 16, "k": 4096}, "h100")
    assert choice.precision == "bf16" and "more than" in choice.why


def test_blackwell_takes_fp4_where_the_error_is_allowed():
    assert dynamic_precision_select("matmul", "b200", max_error=0.2).precision == "nvfp4"
    strict = dynamic_precision_select("matmul", "b200", max_error=0.05)
    assert strict.precision in ("fp8", "mxfp8") and "error" in strict.refused["nvfp4"]


def test_ampere_stays_in_bf16():
    choice = dynamic_precision_select("matmul", "a100")
    assert choice.precision == "bf16" and "no fp8 peak" in choice.refused["fp8"]


@pytest.mark.parametrize("name", SENSITIVE)
def test_sensitive_operations_stay_in_float32(name):
    choice = dynamic_precision_select(name, "h100")
    assert choice.precision == "fp32" and SENSITIVE[name] in choice.why


def test_errors_of_products_are_ordered():
    assert 1e-4 < product_error("") < product_error("fp8_row") < product_error("nvfp4") < 0.3


@pytest.mark.parametrize(
    "arguments",
    [
        ("conv", "h100"),
        ("matmul", "h999"),
        ({"name": "matmul", "m": 0}, "h100"),
        ({"name": "matmul", "batch": 2}, "h100"),
    ],
)
def test_choice_refusals(arguments):
    with pytest.raises(InvalidInputError):
        dynamic_precision_select(*arguments)
    with pytest.raises(InvalidInputError):
        dynamic_precision_select("matmul", "h100", max_error=0)
