"""The Gluon FP8 forward on an H100 against float64: scales, masks, odd lengths, formats, long sums, graphs.

python3 -m pytest tests/gpu/test_hopper_fp8.py -q
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.flash_attention3 import hopper_fp8
from gpu_accel.flash_attention3.fp8 import fp8_attention, fp8_attention_quantized, fp8_block_quantize
from gpu_accel.flash_attention3.fp8_error import RECIPES, run_recipe
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_outputs"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]
CONFIG = hopper_fp8.forward_config(128, causal=False, seqlen_k=1024)


def draw(batch, heads, seqlen, dim, seed):
    """Blocks of 128 rows of very different size."""
    source = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(batch, heads, seqlen, dim, device="cuda", generator=source)
    size = torch.rand(batch, heads, -(-seqlen // 128), 1, device="cuda", generator=source) * 1.5 + 0.25
    return (x * size.repeat_interleave(128, 2)[:, :, :seqlen]).to(torch.bfloat16)


def quantized(batch, heads, heads_kv, sq, sk, dim, *, seed=0, per_block=True, dtype="e4m3"):
    shapes = (heads, sq), (heads_kv, sk), (heads_kv, sk)
    q, k, v = (draw(batch, h, s, dim, 3 * seed + i) for i, (h, s) in enumerate(shapes))
    options = {"scale_per_block": per_block, "dtype": dtype}
    (q8, qs), (k8, ks) = (fp8_block_quantize(x, **options) for x in (q, k))
    v8, vs = fp8_block_quantize(v, transpose=True, **options)
    return q8, k8, v8, qs, ks, vs


def check(tensors, *, config=None, q_block=128, k_block=128, causal=False, window=(-1, -1), softcap=0.0,
          out=torch.bfloat16, scaled_by=1.0):  # fmt: skip
    """At most 1.15 times as far from float64 as the recipe in plain torch; the quantised numbers are given.

    `scaled_by`: how many times larger q_scale * k_scale is than the quantiser made it, at most.
    """
    left, right = window
    right = 0 if causal else right
    o = torch.empty(tensors[0].shape, dtype=out, device="cuda")
    lse = hopper_fp8.forward(
        *tensors, o, q_block=q_block, k_block=k_block, softmax_scale=o.shape[-1] ** -0.5, window_left=left,
        window_right=right, softcap=softcap, config=config,
    )  # fmt: skip
    options = dict(q_block=q_block, k_block=k_block, window_size=(left, right), softcap=softcap, v_transposed=True)
    truth, lse_truth = fp8_attention_reference(*tensors, quantize_p=False, dtype=torch.float64, **options)
    twin, _ = fp8_attention_reference(*tensors, **options)
    empty = lse_truth == float("-inf")
    assert torch.equal(lse == float("-inf"), empty) and (o[empty] == 0).all()
    error = (o.double() - truth).square().mean().sqrt().item()
    ruler = (twin.to(out).double() - truth).square().mean().sqrt().item()
    worst = ((o.double() - truth).abs().max() / truth.abs().max()).item()
    lse_error = (lse.double() - lse_truth)[~empty].abs().max().item() if (~empty).any() else 0.0
    # The tensor cores add up q k^T with about 14 bits too: the longer the sum, the more lse sees of it. What they cut
    # off is a part of q8 k8^T, so scales multiply it: of sums cut towards zero at 13 bits, these inputs lose 2e-3 of
    # lse with the quantiser's scales and 1.4e-2 with four times those.
    lse_bound = 6e-3 * max(1, o.shape[-1] / 128) * max(1, scaled_by)
    assert error <= 1.15 * ruler and worst < 0.04 and lse_error < lse_bound, (error, ruler, worst, lse_error)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_every_head_dim(dim, causal):
    check(quantized(3, 8, 8, 1024, 1024, dim), causal=causal)  # several tiles a program
    check(quantized(2, 4, 2, 777, 1001, dim, seed=1), causal=causal)


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 777), (129, 700), (700, 129), (65, 191), (300, 16), (128, 4096)])
def test_lengths(sq, sk):
    for causal in (False, True):
        check(quantized(2, 4, 1, sq, sk, 128, seed=sq), causal=causal)


@pytest.mark.parametrize("change", [
    {"under": 1}, {"under": 2}, {"ahead": False}, {"under": 1, "ahead": False}, {"ping_pong": False}, {"dynamic": True},
    {"named": True}, {"stages": 4}, {"named": True, "stages": 4, "dynamic": True},
    {"stages": 2, "ahead": False}, {"two_level": False}, {"fold": True}, {"fold": True, "two_level": False},
], ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items()))  # fmt: skip
def test_switches_change_speed_not_results(change):
    for causal in (False, True):
        check(quantized(2, 8, 4, 900, 1000, 128), causal=causal, config=replace(CONFIG, **change))


@pytest.mark.parametrize("dim", [128, 256])
def test_every_number_of_key_blocks(dim):
    """One block a tile, two, odd, even; the first of a tile runs under the tile before."""
    for sk in range(64, 900, 128):
        check(quantized(3, 16, 8, 512, sk, dim, seed=sk))
        check(quantized(3, 16, 8, 512, sk, dim, seed=sk), causal=True)


def test_sums_that_leave_the_tensor_cores_in_pieces():
    for sk in (1000, 1024, 1300, 2048, 2176, 5000):
        check(quantized(2, 4, 2, 300, sk, 256, seed=sk))
        check(quantized(2, 4, 2, 300, sk, 256, seed=sk), causal=True, window=(1500, 0))


def test_sums_put_aside_survive_maxima_that_grow_by_far():
    """By more than 2**64, where what was put aside is scaled anew; small whole numbers make scores exact."""
    source = torch.Generator(device="cuda").manual_seed(0)
    for sk in (2048, 5000):
        _, _, v8, qs, ks, vs = quantized(2, 4, 2, 300, sk, 256)
        q8, k8 = (
            torch.randint(-1, 2, (2, h, s, 256), device="cuda", generator=source).float().to(torch.float8_e4m3fn)
            for h, s in ((4, 300), (2, sk))
        )
        qs, ks = torch.ones_like(qs), torch.ones_like(ks)
        ks[..., : ks.shape[-1] // 2] = 100.0  # keys are walked from the last to the first
        ks[..., : ks.shape[-1] // 4] = 10000.0
        for causal in (False, True):
            check((q8, k8, v8, qs, ks, vs), causal=causal)


def test_a_block_of_zeros_among_tiny_values():
    """Its scale is 1, which must not push the probabilities of the others below what fp8 holds."""
    for dim in (128, 256):
        q8, k8, v8, qs, ks, vs = quantized(1, 2, 2, 256, 512, dim)
        zeros = v8.view(torch.uint8).clone()
        zeros[..., 128:256] = 0
        vs = vs * 2.0**-20
        vs[..., 1] = 1.0
        check((q8, k8, zeros.view(v8.dtype), qs, ks, vs), out=torch.float32)


@pytest.mark.parametrize("window", [(100, 0), (200, 50), (64, -1), (-1, 30), (0, 0), (5, 1000)])
def test_windows(window):
    check(quantized(1, 2, 2, 900, 700, 128), window=window)
    check(quantized(1, 2, 1, 500, 1100, 64), window=window)
    check(quantized(1, 2, 1, 500, 1500, 256), window=window)


def test_softcap():
    check(quantized(1, 2, 2, 500, 600, 128), causal=True, softcap=5.0)
    check(quantized(1, 2, 2, 500, 600, 256), causal=True, softcap=5.0)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_output_types(out):
    check(quantized(1, 2, 2, 300, 400, 128), out=out)
    check(quantized(1, 2, 2, 300, 400, 128, dtype="e5m2"), out=out, causal=True)
    check(quantized(1, 2, 2, 300, 400, 256), out=out, causal=True)


def test_scales_of_a_tensor_of_heads_and_of_other_blocks():
    q8, k8, v8, *one = quantized(2, 4, 2, 500, 700, 128, per_block=False)
    check((q8, k8, v8, *one))
    source = torch.Generator(device="cuda").manual_seed(11)
    factors = [torch.rand(2, h, device="cuda", generator=source) * 2 for h in (4, 2, 2)]
    heads = [s * factor for s, factor in zip(one, factors, strict=True)]
    larger = (factors[0].amax() * factors[1].amax()).item()
    check((q8, k8, v8, *heads), causal=True, k_block=64, scaled_by=larger)  # one a head: blocks do not matter
    q_scale, k_scale, v_scale = (
        s[..., None] * torch.rand(2, s.shape[1], n, device="cuda", generator=source)
        for s, n in zip(heads, (8, 3, 3), strict=True)
    )
    check((q8, k8, v8, q_scale, k_scale, v_scale), q_block=64, k_block=256, scaled_by=larger)


@pytest.mark.parametrize(("dim", "bound"), [(128, 4e-3), (256, 2e-2)])
@pytest.mark.parametrize("sk", [1024, 16384, 102400])
def test_long_sums_are_not_biased_towards_zero(sk, dim, bound):
    """A constant v must come back: a sum of 4096 keys in the tensor cores lost 5 % of it, and one over all keys more.

    Up to head_dim 128 sums leave them every 128 keys; at 256 every 1024, which by a model of them costs 0.9 to 1.7 %.
    """
    q8, k8, v8, qs, ks, vs = quantized(1, 1, 1, 256, sk, dim)
    ones = torch.ones(v8.shape, device="cuda").to(v8.dtype)
    o = torch.empty(q8.shape, dtype=torch.float32, device="cuda")
    hopper_fp8.forward(
        q8, k8, ones, qs, ks, torch.ones_like(vs), o, q_block=128, k_block=128, softmax_scale=dim**-0.5
    )  # fmt: skip
    assert (o.mean() - 1).abs() < bound, o.mean().item()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_error_does_not_grow_with_the_context(dim):
    """100k keys: the error relative to float64 is that of the same recipe summed in float32."""
    check(quantized(1, 1, 1, 128, 102400, dim))


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-tensor-hadamard", "fp8-block", "fp8-block-hadamard"])
def test_error_against_float64_is_that_of_the_recipe(name):
    source = torch.Generator(device="cuda").manual_seed(5)
    q, k, v = (
        torch.randn(1, 2, s, 128, device="cuda", generator=source)
        + 10 * torch.randn(1, 2, s, 128, device="cuda", generator=source)
        * (torch.rand(1, 2, s, 128, device="cuda", generator=source) < 0.001)
        for s in (1024, 4096, 4096)
    )  # fmt: skip
    recipe = next(r for r in RECIPES if r.name == name)
    o = fp8_attention(
        q, k, v, block_scale=recipe.block_scale, hadamard=recipe.hadamard, out_dtype=torch.float32, backend="hopper"
    )
    truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    emulated = run_recipe(recipe, q, k, v, softmax_scale=128**-0.5)
    error, ruler = ((x.double() - truth).square().mean().sqrt().item() for x in (o, emulated))
    assert error < 1.1 * ruler + 1e-4, (error, ruler)


def test_nan_stays_in_its_head_and_layouts_agree():
    q, k, v = (draw(2, 2, s, 128, i) for i, s in enumerate((300, 391, 391)))
    clean = fp8_attention(q, k, v, backend="hopper", causal=True)
    bad = k.clone()
    bad[0, 1] = float("nan")
    o = fp8_attention(q, bad, v, backend="hopper", causal=True)
    assert torch.isnan(o[0, 1]).all() and torch.equal(o[0, 0], clean[0, 0]) and torch.equal(o[1], clean[1])
    moved = fp8_attention(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)), backend="hopper", causal=True, layout="bshd"
    )
    assert torch.equal(moved.transpose(1, 2), clean)


def test_views_of_a_cache():
    q8, k8, v8, qs, ks, vs = quantized(1, 2, 1, 64, 256, 128)
    v8 = v8.view(torch.uint8).transpose(2, 3).contiguous().view(v8.dtype)
    options = {"backend": "hopper"}
    part = fp8_attention_quantized(q8, k8[:, :, :128], v8[:, :, :128], qs, ks[..., :1], vs[..., :1], **options)
    copies = (x.clone() for x in (k8[:, :, :128], v8[:, :, :128]))
    assert torch.equal(part, fp8_attention_quantized(q8, *copies, qs, ks[..., :1], vs[..., :1], **options))


def test_repeatable_capturable_and_compilable():
    q, k, v = (draw(1, 4, 1024, 128, i) for i in range(3))
    options = {"causal": True, "backend": "hopper"}
    first = fp8_attention(q, k, v, **options)
    for _ in range(3):
        assert torch.equal(fp8_attention(q, k, v, **options), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = fp8_attention(q, k, v, **options)
    for i, x in enumerate((q, k, v)):
        x.copy_(draw(1, 4, 1024, 128, 7 + i))
    graph.replay()
    fresh = fp8_attention(q, k, v, **options)
    assert torch.equal(o, fresh) and not torch.equal(o, first)
    assert torch.equal(torch.compile(fp8_attention, fullgraph=True)(q, k, v, **options), fresh)


def test_zero_lengths():
    for sq, sk in ((0, 64), (64, 0)):
        q, k = draw(2, 2, max(sq, 1), 128, 0)[:, :, :sq], draw(2, 2, max(sk, 1), 128, 1)[:, :, :sk]
        o, lse = fp8_attention(q, k, k, return_lse=True, backend="hopper")
        assert o.shape == q.shape and (o == 0).all() and (lse == float("-inf")).all()


def test_auto_takes_it_where_it_is_faster():
    for dim, seqlen in ((64, 1100), (128, 300), (128, 1100), (192, 300), (256, 300)):
        q, k, v = (draw(1, 2, seqlen, dim, i) for i in range(3))
        chosen = "hopper" if dim > 128 or (dim == 128 and seqlen > 1024) else "portable"
        assert torch.equal(fp8_attention(q, k, v), fp8_attention(q, k, v, backend=chosen))
    q, k, v = (draw(1, 2, 300, 64, i) for i in range(3))
    assert torch.equal(fp8_attention(q, k, v, causal=True), fp8_attention(q, k, v, causal=True, backend="hopper"))
