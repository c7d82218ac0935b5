"""FP8 on the card: the bits of the quantiser, attention on fp8 tensor cores, odd memory, graphs."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import portable_fp8
from gpu_accel.flash_attention3.blockwise import blockwise_softmax
from gpu_accel.flash_attention3.fp8 import (
    fp8_attention,
    fp8_attention_quantized,
    fp8_block_quantize,
    hadamard_transform,
)
from gpu_accel.flash_attention3.fp8_error import RECIPES, run_recipe
from gpu_accel.flash_attention3.hadamard import hadamard_reference
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference, quantize_reference
from gpu_accel.testing.quantized import hadamard_excess

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("fp8 tensor cores need compute capability 8.9", allow_module_level=True)

NAN = float("nan")


def draw(*shape, seed=0, outliers=False, dtype=torch.bfloat16):
    source = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(*shape, device="cuda", generator=source)
    if outliers:
        hit = torch.rand(*shape, device="cuda", generator=source) < 0.001
        x = x + 10 * torch.randn(*shape, device="cuda", generator=source) * hit
    return x.to(dtype)


def qkv(batch, heads, heads_kv, sq, sk, dim, seed=0, **options):
    shapes = (batch, heads, sq, dim), (batch, heads_kv, sk, dim), (batch, heads_kv, sk, dim)
    return [draw(*s, seed=3 * seed + i, **options) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("options", [
    {}, {"hadamard": True}, {"transpose": True}, {"hadamard": True, "dtype": "e5m2"}, {"scale_per_block": False},
    {"scale_per_block": False, "hadamard": True, "transpose": True}, {"block_size": 48, "transpose": True},
    {"block_size": 4096, "hadamard": True}, {"block_size": 1}, {"dtype": "e5m2"},
], ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "default")  # fmt: skip
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_quantiser_bits(dim, options):
    x = draw(2, 3, 1157, dim, outliers=True) * torch.exp(4 * draw(2, 3, 1157, 1, seed=1).float()).to(torch.bfloat16)
    x[0, 1, :128] = 0
    x[1, 0, 3, 5], x[1, 1, 200, 1], x[1, 2, 300] = float("inf"), NAN, NAN
    values, scales = fp8_block_quantize(x, backend="portable", **options)
    twin, twin_scales = quantize_reference(x, **options)
    assert torch.equal(scales, twin_scales)
    different = values.view(torch.uint8) != twin.view(torch.uint8)
    # the sign of a NaN is the only freedom
    nan = torch.isnan(values.float()) & torch.isnan(twin.float())
    assert not (different & ~nan).any(), f"{(different & ~nan).sum().item()} of {values.numel()} bytes differ"


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper"
)
SHAPES = {
    "one-row": (1, 1, 1),
    "last-block-shorter": (2, 3, 1157),
    "more-blocks-than-programs": (3, 8, 8192 + 7),
    "even": (1, 4, 512),
}


@on_hopper
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_quantiser_on_tensor_cores(shape, dim, source, dtype):
    """Within half a step of the format of the exact product, but for what `sum_error` allows the sums to be off."""
    from gpu_accel.flash_attention3.hopper_quantize import sum_error

    batch, heads, seqlen = shape
    x = draw(batch, seqlen, heads, dim, outliers=True).transpose(1, 2)  # a view, as q and k come
    spread = 0.5 if source == torch.float16 else 4.0
    x = (x.float() * torch.exp(spread * draw(batch, heads, seqlen, 1, seed=1).float())).to(source)
    values, scales = fp8_block_quantize(x, hadamard=True, dtype=dtype, seed=2, backend="hopper")
    again = fp8_block_quantize(x.contiguous(), hadamard=True, dtype=dtype, seed=2, backend="hopper")
    assert values.is_contiguous() and torch.equal(values.view(torch.uint8), again[0].view(torch.uint8))
    assert torch.equal(scales, again[1])

    excess = hadamard_excess(x, values, scales, sum_error=sum_error(dim), dtype=dtype, seed=2)
    assert all(one <= 1 for one in excess), f"{excess} of what scales and codes may be off"
    # beside the butterflies' numbers: sums off by 2**-20 or so turn hardly one rounding in 2**16
    twin, _ = quantize_reference(x, dtype=dtype, hadamard=True, seed=2)
    assert (twin.view(torch.uint8) != values.view(torch.uint8)).double().mean() < 1e-3


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_quantiser_on_tensor_cores_and_odd_values(dim):
    """Zeros, Inf, NaN, tiny values and memory off 16 bytes, as the butterflies do it.

    The largest sum of a block of normal values is about half of the magnitudes of its row: scales within 2**-14.
    """
    x = draw(1, 2, 6 * 128, dim)
    x[:, :, :128] = 0
    x[0, 0, 128 + 5, 3], x[0, 1, 256 + 7, 4] = float("inf"), NAN
    x[:, :, 384:512] *= 1e-38
    x[:, :, 512:640] *= 1e35
    x[:, :, 640:] = NAN
    how = {"hadamard": True, "seed": 1}
    twin, twin_scales = quantize_reference(x, **how)
    exact = twin.float().nan_to_num()
    for y in (x, torch.nn.functional.pad(x, (3, 5))[..., 3:-5]):
        values, scales = fp8_block_quantize(y, backend="hopper", **how)
        assert (scales / twin_scales - 1).abs().max() < 2.0**-14 and (scales >= 2.0**-126).all()
        assert (scales[..., 0] == 1).all() and (scales[..., 5] == 1).all()
        assert torch.equal(torch.isnan(values.float()), torch.isnan(twin.float()))
        off = (values.float().nan_to_num() - exact).abs()
        assert (off <= 0.125 * exact.abs() + 2.0**-9).all() and (values[:, :, :128].float() == 0).all()
    empty = fp8_block_quantize(x[:, :, :0], backend="hopper", **how)
    assert empty[0].shape == (1, 2, 0, dim) and empty[1].shape == (1, 2, 0)
    for options in ({"transpose": True}, {"block_size": 64}, {"scale_per_block": False}, {"hadamard": False}):
        with pytest.raises(UnsupportedError, match="backend='hopper'"):
            fp8_block_quantize(x, backend="hopper", **{**how, **options})


@on_hopper
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_transposing_quantiser_on_tensor_cores(shape, dim, source, dtype):
    """The bits of plain torch, but for the sign of NaN and of what was -0: Inf and NaN spoil nobody else."""
    batch, heads, seqlen = shape
    x = draw(batch, seqlen, heads, dim, outliers=True).transpose(1, 2)
    spread = 0.5 if source == torch.float16 else 4.0
    x = (x.float() * torch.exp(spread * draw(batch, heads, seqlen, 1, seed=1).float())).to(source)
    if seqlen > 300:
        x[0, 0, 3, 5], x[0, -1, 200, 1], x[-1, 0, 300] = float("inf"), NAN, NAN
        x[0, 0, 128:256] = 0
    how = {"dtype": dtype, "transpose": True}
    values, scales = fp8_block_quantize(x, backend="hopper", **how)
    twin, twin_scales = quantize_reference(x, **how)
    assert values.shape == twin.shape and values.is_contiguous() and torch.equal(scales, twin_scales)
    different = values.view(torch.uint8) != twin.view(torch.uint8)
    a, b = values.float(), twin.float()
    free = (torch.isnan(a) & torch.isnan(b)) | ((a == 0) & (b == 0))
    assert not (different & ~free).any(), f"{(different & ~free).sum().item()} of {values.numel()} bytes differ"


@on_hopper
def test_quantiser_on_tensor_cores_in_a_graph_and_compiled():
    """The same bits on a stream, from a graph whose input changes, and under torch.compile."""
    x, y = draw(2, 4, 1000, 128), draw(2, 4, 1000, 128, seed=1)

    def quantize(x):
        return fp8_block_quantize(x, hadamard=True, backend="hopper")

    wanted = quantize(y)
    quantize(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = quantize(x)
    x.copy_(y)
    graph.replay()
    assert torch.equal(values.view(torch.uint8), wanted[0].view(torch.uint8)) and torch.equal(scales, wanted[1])
    compiled = torch.compile(quantize, fullgraph=True)(y)
    assert torch.equal(compiled[0].view(torch.uint8), wanted[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"hadamard": True}, {"block_size": 4096}, {"transpose": True}], ids=str)
def test_quantiser_turns_by_the_rotary_embedding(options, interleaved, dtype):
    """The bits of turning first, by plain torch, and quantising then."""
    for dim, turned in ((64, 64), (128, 96), (80, 16)):
        x = draw(2, 3, 1157, dim, outliers=True, dtype=dtype)
        angle = torch.outer(torch.arange(1200), 10000.0 ** (-torch.arange(turned // 2) / (turned // 2))).cuda()
        how = dict(options, rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=interleaved)
        values, scales = fp8_block_quantize(x, **how)
        twin, twin_scales = quantize_reference(x, **how)
        assert torch.equal(scales, twin_scales)
        assert torch.equal(values.view(torch.uint8), twin.view(torch.uint8))


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 4096])
def test_hadamard_bits_and_inverse(dim):
    x = draw(3, 333, dim, dtype=torch.float32)
    y = hadamard_transform(x, seed=7)
    assert torch.equal(y, hadamard_reference(x, seed=7))
    assert (hadamard_transform(y, seed=7, inverse=True) - x).abs().max() < 1e-5


def compare(tensors, config, *, causal, window=(-1, -1), softcap=0.0, k_block=128, per_block=True, out=torch.bfloat16):
    """The kernel against the emulation of the same arithmetic; what may differ are sums in 14 bits on Hopper."""
    q, k, v = tensors
    q8, qs = quantize_reference(q, 128, per_block)
    k8, ks = quantize_reference(k, k_block, per_block)
    v8, vs = quantize_reference(v, k_block, per_block, transpose=True)
    left, right = window
    right = 0 if causal else right
    o = torch.full(q.shape, NAN, dtype=out, device="cuda")
    scale = q.shape[-1] ** -0.5
    lse = portable_fp8.forward(
        q8, k8, v8, qs, ks, vs, o, q_block=128, k_block=k_block, softmax_scale=scale, window_left=left,
        window_right=right, softcap=softcap, config=config,
    )  # fmt: skip
    block_n = portable_fp8.tile_n(
        config or portable_fp8.lookup(q.shape[-1], causal=right == 0, seqlen_q=q.shape[2], device=q.device),
        k_block, not per_block,
    )  # fmt: skip
    truth, lse_truth = fp8_attention_reference(
        q8, k8, v8, qs, ks, vs, k_block=k_block, window_size=(left, right), softcap=softcap, v_transposed=True,
        block_n=block_n, dtype=torch.float64,
    )  # fmt: skip
    empty = lse_truth == float("-inf")
    assert torch.equal(lse == float("-inf"), empty) and (o[empty] == 0).all()
    size = truth.square().mean().sqrt()
    error = o.double() - truth
    assert torch.isfinite(error).all()
    rms = (error.square().mean().sqrt() / size).item()
    worst = (error.abs().max() / truth.abs().max()).item()
    lse_worst = (lse.double() - lse_truth)[~empty].abs().max().item()
    assert rms < 0.02 and worst < 0.03 and lse_worst < 5e-3, (rms, worst, lse_worst)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", portable_fp8.BUCKETS)
def test_every_candidate_tile_is_correct(dim, causal):
    configs = [*portable_fp8.candidates(dim), portable_fp8.table()[dim, causal], portable_fp8.SHORT[dim], None]
    for config in dict.fromkeys(configs):
        compare(qkv(1, 2, 1, 1000, 1337, dim), config, causal=causal)


def test_tensor_core_sums_are_an_option():
    for config in portable_fp8.candidates(128):
        faster = portable_fp8.Fp8Config(config.block_m, config.block_n, config.num_warps, config.num_stages, False)
        compare(qkv(1, 2, 2, 512, 512, 128), faster, causal=True)


CASES = {
    "gqa": ((2, 8, 2, 300, 300, 128), {"causal": True}),
    "mqa-one-query": ((3, 4, 1, 1, 777, 128), {"causal": True}),
    "more-queries-than-keys": ((1, 2, 2, 700, 300, 64), {"causal": True}),
    "window": ((1, 2, 1, 900, 1100, 128), {"causal": False, "window": (100, 37)}),
    "causal-window": ((1, 2, 1, 900, 900, 64), {"causal": True, "window": (100, -1)}),
    "softcap": ((1, 2, 1, 300, 500, 128), {"causal": True, "softcap": 8.0}),
    "one-scale": ((1, 2, 1, 300, 500, 128), {"causal": True, "per_block": False}),
    "k-block-64": ((1, 2, 1, 300, 500, 128), {"causal": True, "k_block": 64}),
    "k-block-32": ((1, 2, 1, 300, 500, 64), {"causal": False, "k_block": 32}),
    "fp32-out": ((1, 2, 1, 300, 500, 64), {"causal": False, "out": torch.float32}),
    **{f"D{d}": ((1, 2, 1, 257, 391, d), {"causal": True}) for d in (16, 32, 48, 80, 96, 112, 144, 160, 192, 224, 240)},
}


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES.keys())
def test_follows_the_emulated_arithmetic(shape, options):
    compare(qkv(*shape), None, **options)


def test_e5m2():
    """With two bits of mantissa p is rounded differently when blocks differ, so errors are compared, not values."""
    q, k, v = qkv(1, 2, 1, 300, 400, 128)
    options = {"causal": True, "dtype": "e5m2", "return_lse": True, "out_dtype": torch.float32}
    o, lse = fp8_attention(q, k, v, **options)
    emulated, lse_emulated = fp8_attention(q, k, v, backend="reference", **options)
    truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0].transpose(1, 2)

    def rmse(x):
        return (x.double() - truth).square().mean().sqrt().item()

    assert rmse(o) < 1.1 * rmse(emulated), (rmse(o), rmse(emulated))
    assert (lse - lse_emulated).abs().max() < 5e-3


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-tensor-hadamard", "fp8-block", "fp8-block-hadamard"])
def test_error_against_float64_is_that_of_the_recipe(name):
    q, k, v = qkv(1, 2, 2, 1024, 4096, 128, outliers=True, dtype=torch.float32)
    recipe = next(r for r in RECIPES if r.name == name)
    o = fp8_attention(q, k, v, block_scale=recipe.block_scale, hadamard=recipe.hadamard, out_dtype=torch.float32)
    truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    emulated = run_recipe(recipe, q, k, v, softmax_scale=128**-0.5)

    def rmse(x):
        return (x.double() - truth).square().mean().sqrt().item()

    assert rmse(o) < 1.1 * rmse(emulated) + 1e-4, (rmse(o), rmse(emulated))


def test_long_sums_are_not_biased_towards_zero():
    """A constant v must come back: sums over 16k keys in the tensor core alone would lose about a percent."""
    q, k, _ = qkv(1, 1, 1, 256, 16384, 128)
    v = torch.ones(1, 1, 16384, 128, device="cuda", dtype=torch.bfloat16)
    o = fp8_attention(q, k, v, out_dtype=torch.float32)
    assert (o.mean() - 1).abs() < 4e-3, o.mean().item()


def test_nan_stays_where_it_is():
    q, k, v = qkv(2, 2, 2, 300, 391, 80)
    clean = fp8_attention(q, k, v)
    for poisoned in ((1, k), (2, v)):
        x = poisoned[1].clone()
        x[0, 1] = NAN
        arguments = [q, k, v]
        arguments[poisoned[0]] = x
        o = fp8_attention(*arguments)
        assert torch.isnan(o[0, 1]).all() and torch.equal(o[0, 0], clean[0, 0]) and torch.equal(o[1], clean[1])
    wide = torch.full((2, 500, 6, 96), NAN, device="cuda", dtype=torch.bfloat16)
    wide[:, 50:350, :2, :80], wide[:, 50:441, 2:4, :80], wide[:, 50:441, 4:, :80] = (
        x.transpose(1, 2) for x in (q, k, v)
    )
    views = wide[:, 50:350, :2, :80], wide[:, 50:441, 2:4, :80], wide[:, 50:441, 4:, :80]
    assert torch.equal(fp8_attention(*views, layout="bshd").transpose(1, 2), clean)


def test_repeatable_and_capturable():
    q, k, v = qkv(1, 4, 4, 1024, 1024, 128)
    first = fp8_attention(q, k, v, causal=True)
    for _ in range(3):
        assert torch.equal(fp8_attention(q, k, v, causal=True), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fp8_attention(q, k, v, causal=True)
    for x, y in zip((q, k, v), qkv(1, 4, 4, 1024, 1024, 128, seed=5), strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(o, fp8_attention(q, k, v, causal=True)) and not torch.equal(o, first)


def test_compiles_as_one_graph():
    q, k, v = qkv(1, 2, 2, 300, 300, 64)
    compiled = torch.compile(fp8_attention, fullgraph=True)
    assert torch.equal(compiled(q, k, v, causal=True), fp8_attention(q, k, v, causal=True))


def test_offsets_beyond_32_bits():
    """A view whose last rows lie more than 2**31 elements behind its first."""
    stride = (1 << 31) // 200 + 8 - ((1 << 31) // 200) % 8
    buffer = torch.empty(stride * 255 + 64, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((1, 1, 256, 64), (0, 0, stride, 1))
    x.copy_(draw(1, 1, 256, 64))
    q = fp8_attention(x, x, x, out_dtype=torch.float32)
    y = x.contiguous()
    assert torch.equal(q, fp8_attention(y, y, y, out_dtype=torch.float32))


@pytest.mark.parametrize("block_size", [512, 4096])
@pytest.mark.parametrize("length", [1, 1000, 4096, 50257])
def test_softmax(length, block_size):
    x = (4 * draw(67, length, dtype=torch.float32)).requires_grad_()
    g = draw(67, length, seed=1, dtype=torch.float32)
    y = blockwise_softmax(x, block_size)
    y.backward(g)
    b = x.detach().double().requires_grad_()
    truth = torch.softmax(b, -1)
    truth.backward(g.double())
    assert (y.double() - truth).abs().max() < 1e-6 and (x.grad.double() - b.grad).abs().max() < 2e-6


def test_quantised_attention_takes_views_of_a_larger_cache():
    q, k, v = qkv(1, 2, 1, 64, 256, 64)
    q8, qs = fp8_block_quantize(q)
    k8, ks = fp8_block_quantize(k)
    v8, vs = fp8_block_quantize(v)
    part = fp8_attention_quantized(q8, k8[:, :, :128], v8[:, :, :128], qs, ks[..., :1], vs[..., :1])
    again = fp8_attention_quantized(
        q8, k8[:, :, :128].contiguous(), v8[:, :, :128].contiguous(), qs, ks[..., :1].clone(), vs[..., :1].clone()
    )
    assert torch.equal(part, again)
