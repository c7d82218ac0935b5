"""FP8 attention: against an emulation of the same arithmetic (tight), and against float64 (the recipe's own error)."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import portable_fp8
from gpu_accel.flash_attention3.fp8 import (
    describe,
    fp8_attention,
    fp8_attention_quantized,
    fp8_block_quantize,
    refuse,
)
from gpu_accel.flash_attention3.fp8_error import RECIPES, run_recipe
from gpu_accel.flash_attention3.portable_fp8 import Fp8Config
from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.flash_attention3.reference import attention_truth
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference, quantize_reference, transpose_values

NAN = float("nan")
# Hopper adds fp8 products with about 14 bits, so scores differ in their last bits and probabilities near a rounding
# boundary of fp8 fall to the other side; the interpreter adds in float32.
RMS, LSE = (0.02, 5e-3) if torch.cuda.is_available() else (2e-4, 1e-5)


def draw(batch, heads, heads_kv, sq, sk, dim, seed=0, dtype=torch.bfloat16):
    """q, k, v (batch, heads, seqlen, dim); the rows of v differ in size, so that its block scales matter."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, sq, dim), (batch, heads_kv, sk, dim), (batch, heads_kv, sk, dim))
    q, k, v = (torch.randn(s, generator=source) for s in shapes)
    v = v * torch.linspace(0.2, 3.0, max(sk, 1))[:sk, None]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def assert_follows(o, lse, truth, lse_truth):
    """Equal up to the rounding of sums, except where that carries a probability over a rounding boundary of fp8."""
    scale = truth.abs().max().clamp_min(1e-6)
    error = (o.float() - truth.float()).abs() / scale
    assert torch.isfinite(o.float()).all()
    assert error.max() < 0.03 and error.square().mean().sqrt() < RMS, (error.max(), error.square().mean().sqrt())
    empty = lse_truth == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert (~empty).any() and (lse - lse_truth)[~empty].abs().max() < LSE
    assert (o.float()[empty] == 0).all()


CASES = {  # (batch, heads, heads_kv, sq, sk, dim), options, (q_block, k_block, per_block, dtype), tile
    "D64": ((1, 2, 2, 64, 96, 64), {}, (128, 128, True, "e4m3"), None),
    "D128-causal-gqa-odd": ((2, 4, 2, 70, 133, 128), {"causal": True}, (32, 64, True, "e4m3"), None),
    "D80-causal-more-queries-than-keys": ((1, 3, 1, 100, 33, 80), {"causal": True}, (128, 128, True, "e4m3"), None),
    "D192-window": ((1, 1, 1, 90, 130, 192), {"window_size": (20, 7)}, (128, 32, True, "e4m3"), None),
    "D256-window-causal-softcap": (
        (1, 1, 1, 33, 90, 256), {"causal": True, "window_size": (9, 0), "softcap": 5.0}, (128, 128, True, "e4m3"), None
    ),
    "D16-one-query": ((2, 2, 1, 1, 77, 16), {}, (128, 128, True, "e4m3"), None),
    "D96-one-key": ((1, 2, 2, 65, 1, 96), {"causal": True}, (128, 128, True, "e4m3"), None),
    "D64-e5m2": ((1, 2, 1, 40, 140, 64), {"causal": True}, (128, 128, True, "e5m2"), None),
    "D64-one-scale": ((1, 2, 1, 40, 140, 64), {}, (128, 128, False, "e4m3"), None),
    "D64-wide-tile": ((1, 1, 1, 60, 300, 64), {"causal": True}, (128, 128, True, "e4m3"), Fp8Config(32, 128, 4, 1)),
    "D144-tensor-core-sums": (
        (1, 1, 1, 60, 200, 144), {"causal": True}, (128, 64, True, "e4m3"), Fp8Config(64, 64, 4, 1, two_level=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "options", "scales", "config"), CASES.values(), ids=CASES.keys())
def test_follows_the_emulated_arithmetic(shape, options, scales, config, device, monkeypatch):
    q_block, k_block, per_block, dtype = scales
    q, k, v = draw(*shape)
    q8, qs = quantize_reference(q, q_block, per_block, dtype)
    k8, ks = quantize_reference(k, k_block, per_block, dtype)
    v8, vs = quantize_reference(v, k_block, per_block, dtype)
    config = config or portable_fp8.INTERPRETER
    monkeypatch.setattr(portable_fp8, "lookup", lambda *a, **k: config)
    options = {"q_block": q_block, "k_block": k_block, **options}
    tensors = [x.to(device) for x in (q8, k8, v8, qs, ks, vs)]
    o, lse = fp8_attention_quantized(*tensors, **options, return_lse=True, out_dtype=torch.float32, backend="portable")
    block_n = portable_fp8.tile_n(config, k_block, not per_block)
    truth, lse_truth = fp8_attention_reference(q8, k8, v8, qs, ks, vs, **options, block_n=block_n)
    assert_follows(o.cpu(), lse.cpu(), truth, lse_truth)


def recipe_error(name, q, k, v, truth, causal):
    recipe = next(r for r in RECIPES if r.name == name)
    o = run_recipe(recipe, q, k, v, softmax_scale=q.shape[-1] ** -0.5, causal=causal)
    return (o.double() - truth).square().mean().sqrt().item()


@pytest.mark.parametrize("block_scale", [True, False], ids=["block", "tensor"])
@pytest.mark.parametrize("hadamard", [True, False], ids=["hadamard", "plain"])
def test_error_against_float64_is_that_of_the_recipe(hadamard, block_scale, device):
    source = torch.Generator().manual_seed(1)

    def outliers(*shape):
        x = torch.randn(*shape, generator=source)
        return x + 10 * torch.randn(*shape, generator=source) * (torch.rand(*shape, generator=source) < 0.01)

    q, k, v = outliers(1, 2, 130, 64), outliers(1, 1, 200, 64), outliers(1, 1, 200, 64)
    truth, lse_truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    truth = truth.transpose(1, 2)
    o, lse = fp8_attention(
        q.to(device), k.to(device), v.to(device), causal=True, hadamard=hadamard, block_scale=block_scale,
        return_lse=True, out_dtype=torch.float32,
    )  # fmt: skip
    error = (o.cpu().double() - truth).square().mean().sqrt().item()
    name = f"fp8-{'block' if block_scale else 'tensor'}{'-hadamard' if hadamard else ''}"
    expected = recipe_error(name, q, k, v, truth, True)
    assert 0.5 * expected < error < 1.1 * expected + 1e-4, (error, expected)
    assert (lse.cpu() - lse_truth).abs().max() < 0.05 * lse_truth.abs().max()


def test_hadamard_helps_where_one_channel_is_large(device):
    """Without it every score hangs on the rounding of one product."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 128, generator=source) for n in (64, 256, 256))
    q[..., 5] *= 6
    k[..., 5] *= 6
    truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    error = {}
    for hadamard in (True, False):
        o = fp8_attention(q.to(device), k.to(device), v.to(device), hadamard=hadamard, out_dtype=torch.float32)
        error[hadamard] = (o.cpu().double() - truth).square().mean().sqrt().item()
    assert error[True] < 0.5 * error[False] and error[True] < 0.03, error


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_and_strides_agree(layout, device):
    q, k, v = (x.to(device) for x in draw(2, 4, 2, 45, 70, 64))
    expected = fp8_attention(q, k, v, causal=True)
    fused = torch.randn(2, 70, 8, 64, device=device).to(torch.bfloat16)
    fused[:, :45, :4], fused[:, :, 4:6], fused[:, :, 6:] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    views = fused[:, :45, :4], fused[:, :, 4:6], fused[:, :, 6:]
    if layout == "bhsd":
        views = tuple(x.transpose(1, 2) for x in views)
    o = fp8_attention(*views, causal=True, layout=layout)
    assert o.is_contiguous() and o.shape == views[0].shape
    assert torch.equal(o if layout == "bhsd" else o.transpose(1, 2), expected)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_nan_of_one_head_or_batch_stays_there(dtype, device):
    # 70 keys: a tile of keys runs into the next head's rows
    q, k, v = (x.to(device) for x in draw(2, 2, 2, 45, 70, 48))
    clean = fp8_attention(q, k, v, dtype=dtype)
    for x in (k, v):
        poisoned = x.clone()
        poisoned[0, 1] = NAN
        o = fp8_attention(q, *((poisoned, v) if x is k else (k, poisoned)), dtype=dtype)
        assert torch.isnan(o[0, 1]).all()
        assert torch.equal(o[0, 0], clean[0, 0]) and torch.equal(o[1], clean[1])


def test_nan_of_one_row_of_q_stays_there(device):
    q, k, v = (x.to(device) for x in draw(1, 1, 1, 45, 70, 64))
    clean = fp8_attention(q, k, v)
    q[0, 0, 7, 3] = NAN
    o = fp8_attention(q, k, v)
    assert torch.isnan(o[0, 0, 7]).all()
    rest = torch.arange(45) != 7
    # the NaN does not count for the scale; without it the block's largest value may have been in that row
    assert torch.isfinite(o[0, 0, rest]).all() and (o - clean)[0, 0, rest].abs().max() < 0.2


def test_nan_hidden_by_the_mask_does_not_matter(device):
    q, k, v = (x.to(device) for x in draw(1, 1, 1, 64, 64, 64))
    k[0, 0, 40:] = NAN  # only rows from 40 on see these keys
    o = fp8_attention(q, k, v, causal=True)
    assert torch.isfinite(o[0, 0, :40]).all() and torch.isnan(o[0, 0, 40:]).all()


def test_rows_that_see_nothing_are_zero(device):
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 100, 30, 64))
    o, lse = fp8_attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :, :70] == 0).all() and (lse[:, :, :70] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 70:]).all() and (o[:, :, 70:] != 0).any(-1).all()


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_zero_lengths(backend, device):
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 5, 0, 64))
    o, lse = fp8_attention(q, k, v, return_lse=True, backend=backend)
    assert (o == 0).all() and (lse == float("-inf")).all() and o.dtype == torch.bfloat16
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 0, 5, 64))
    assert fp8_attention(q, k, v, backend=backend).shape == (1, 2, 0, 64)
    q, k, v = (x.to(device) for x in draw(0, 2, 1, 4, 5, 64))
    assert fp8_attention(q, k, v, backend=backend).shape == (0, 2, 4, 64)


def test_extreme_scales(device):
    """Tiny and huge blocks side by side; the scores stay finite, and so must the result."""
    q, k, v = (x.float() for x in draw(1, 1, 1, 64, 256, 64))
    q[0, 0, :32] *= 1e-20
    k[0, 0, :128] *= 1e-20
    v[0, 0, 128:] *= 1e15
    o, lse = fp8_attention(q.to(device), k.to(device), v.to(device), return_lse=True, out_dtype=torch.float32)
    truth, lse_truth = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)))
    assert (lse.cpu() - lse_truth).abs().max() < 0.5
    error = (o.cpu() - truth.transpose(1, 2)).abs().max() / truth.abs().max()
    assert error < 0.1


def test_all_zero_inputs_average_v(device):
    v = draw(1, 1, 1, 1, 50, 32)[2].to(device)
    zero = torch.zeros(1, 1, 50, 32, device=device, dtype=torch.bfloat16)
    o, lse = fp8_attention(zero, zero, v, return_lse=True, out_dtype=torch.float32)
    assert (lse - torch.tensor(50.0).log().to(device)).abs().max() < 1e-5
    assert (o - v.float().mean(2, keepdim=True)).abs().max() < 0.05


def test_quantised_inputs_in_every_form(device):
    q, k, v = (x.to(device) for x in draw(2, 2, 1, 40, 50, 64))
    (q8, qs), (k8, ks), (v8, vs) = (fp8_block_quantize(x, scale_per_block=False) for x in (q, k, v))
    one = fp8_attention_quantized(q8, k8, v8, qs, ks, vs)
    per_head = fp8_attention_quantized(q8, k8, v8, qs.expand(2, 2), ks.expand(2, 1), vs.expand(2, 1))
    blocks = [s.expand(2, h, 1).contiguous() for s, h in ((qs, 2), (ks, 1), (vs, 1))]
    per_block = fp8_attention_quantized(q8, k8, transpose_values(v8), *blocks, v_transposed=True)
    assert torch.equal(one, per_head) and torch.equal(one, per_block)
    odd = q8.view(torch.uint8).flatten()
    shifted = torch.cat([odd[:1], odd])[1:].view(q8.shape).view(q8.dtype)  # not on a 16-byte boundary
    assert torch.equal(fp8_attention_quantized(shifted, k8, v8, qs, ks, vs), one)


def test_reference_backend_agrees(device):
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 40, 70, 64))
    a, la = fp8_attention(q, k, v, causal=True, return_lse=True, backend="portable", layout="bhsd")
    b, lb = fp8_attention(q, k, v, causal=True, return_lse=True, backend="reference")
    assert (a.float() - b.float()).abs().max() < 0.06 and (la - lb).abs().max() < LSE


def test_same_bits_every_time(device):
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 70, 70, 64))
    first = fp8_attention(q, k, v, causal=True)
    assert torch.equal(first, fp8_attention(q, k, v, causal=True))
    assert not torch.equal(first, fp8_attention(q, k, v, causal=True, seed=1))


def test_compiles_as_one_graph_and_ops_are_well_formed(device):
    q, k, v = (x.to(device) for x in draw(1, 2, 1, 40, 50, 64))
    compiled = torch.compile(fp8_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, causal=True), fp8_attention(q, k, v, causal=True))
    q8, qs = fp8_block_quantize(q)
    k8, ks = fp8_block_quantize(k)
    v8, vs = fp8_block_quantize(v, transpose=True)
    arguments = (q8, k8, v8, qs, ks, vs, 128, 128, 0.125, -1, 0, 0.0, torch.bfloat16, True)
    torch.library.opcheck(
        torch.ops.gpu_accel.fp8_attention_forward.default, arguments,
        test_utils=("test_faketensor", "test_autograd_registration"),  # test_schema multiplies inputs: not in fp8
    )  # fmt: skip


BAD = {
    "dims": ({"q": torch.zeros(1, 4, 64)}, InvalidInputError, "4 dimensions"),
    "heads": ({"q": torch.zeros(1, 3, 8, 64)}, InvalidInputError, "multiple of the heads"),
    "batch": ({"q": torch.zeros(2, 2, 8, 64)}, InvalidInputError, "batch and head_dim"),
    "k-and-v": ({"v": torch.zeros(1, 2, 9, 64)}, InvalidInputError, "k and v must have one shape"),
    "mixed": ({"v": torch.zeros(1, 2, 8, 64, dtype=torch.float16)}, InvalidInputError, "one dtype"),
    "float64": ({"q": torch.zeros(1, 2, 8, 64, dtype=torch.float64)}, InvalidInputError, "float64"),
    "layout": ({"layout": "sbhd"}, InvalidInputError, "layout"),
    "scale": ({"softmax_scale": 0.0}, InvalidInputError, "softmax_scale"),
    "window": ({"window_size": 3}, InvalidInputError, "window_size"),
    "out": ({"out_dtype": torch.float64}, InvalidInputError, "out_dtype"),
    "hopper": ({"backend": "hopper"}, UnsupportedError, "portable"),
    "gradient": (
        {"q": torch.zeros(1, 2, 8, 64, requires_grad=True)},
        UnsupportedError,
        "forward only.*flash_attn_func",
    ),
}


@pytest.mark.parametrize(("change", "error", "words"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments_are_named(change, error, words, device):
    good = {n: torch.zeros(1, 2, 8, 64) for n in "qkv"}
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in {**good, **change}.items()}
    if change.get("q") is not None and change["q"].requires_grad:
        arguments["q"] = change["q"].detach().to(device).requires_grad_()
    with pytest.raises(error, match=words):
        fp8_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_head_dims_that_do_not_fit(device):
    for dim in (8, 40, 272):
        x = torch.zeros(1, 1, 4, dim, device=device)
        with pytest.raises(UnsupportedError, match=f"head_dim {dim} is not a multiple of 16"):
            fp8_attention(x, x, x)


def test_quantised_arguments_are_checked(device):
    x = torch.zeros(1, 2, 40, 64, device=device)
    x8, s = fp8_block_quantize(x)
    with pytest.raises(InvalidInputError, match="float8"):
        fp8_attention_quantized(x, x8, x8, s, s, s)
    with pytest.raises(InvalidInputError, match="v_scale must be float32 of shape"):
        fp8_attention_quantized(x8, x8, x8, s, s, s[..., None])
    with pytest.raises(UnsupportedError, match="v_scale has layout torch.sparse_coo"):
        fp8_attention_quantized(x8, x8, x8, s, s, s.to_sparse())
    with pytest.raises(InvalidInputError, match="k_block must be a multiple of 32"):
        fp8_attention_quantized(x8, x8, x8, s, s, s, k_block=48)
    with pytest.raises(InvalidInputError, match="transposed v8 must be"):
        fp8_attention_quantized(x8, x8, x8, s, s, s, v_transposed=True)
    for backend in ("portable", "reference"):
        with pytest.raises(UnsupportedError, match="forward only.*k_scale requires a gradient"):
            fp8_attention_quantized(x8, x8, x8, s, s.clone().requires_grad_(), s, backend=backend)


def problem(**change) -> Problem:
    base = dict(
        device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=1, seqlen_q=8, seqlen_k=8, heads=2,
        heads_kv=1, head_dim=64, head_dim_v=64, causal=True, window_left=-1, window_right=0, softcap=0.0, varlen=False,
    )  # fmt: skip
    return Problem(**{**base, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"varlen": True}, "packed"),
        ({"requires_grad": True}, "forward only"),
        ({"head_dim_v": 128}, "differs"),
        ({"head_dim": 40, "head_dim_v": 40}, "multiple of 16"),
        ({"capability": (8, 6)}, "8.9"),
    ],
)
def test_refusals_say_why(change, words):
    assert words in refuse(problem(**change))
    assert refuse(problem()) is None


def test_describe_names_kernel_and_tile():
    words = describe(96, causal=True)
    assert "fp8_attention_forward" in words["kernel"] and "64 + 32" in words["head_dim"]
    assert describe(100)["kernel"] == "none" and "multiple of 16" in describe(100)["refused"]


def test_every_head_dim_is_cut_into_tiles_that_cover_it():
    for dim in portable_fp8.HEAD_DIMS:
        for largest in (128, 256):
            first, second = portable_fp8.parts(dim, largest)
            assert first + second >= dim and first <= largest and second <= largest
            assert all(p == 0 or (p >= 32 and p & (p - 1) == 0) for p in (first, second)), (dim, first, second)


def test_the_tuned_table_is_complete_and_has_no_unknown_rows():
    assert set(portable_fp8.table()) == {(d, c) for d in portable_fp8.BUCKETS for c in (False, True)}
    for key, config in portable_fp8.table().items():
        assert config.two_level and config.block_n % 32 == 0, key


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_blocks_longer_than_the_sequence(backend, device):
    q = torch.randn(1, 2, 70, 32, device=device)
    (q8, scale), (v8, v_scale) = fp8_block_quantize(q), fp8_block_quantize(q)
    expected = fp8_attention_quantized(q8, q8, v8, scale, scale, v_scale, backend=backend)
    long = {"q_block": 2**40, "k_block": 2**40}
    assert torch.equal(fp8_attention_quantized(q8, q8, v8, scale, scale, v_scale, backend=backend, **long), expected)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_values_whose_sum_may_overflow_are_refused_and_smaller_ones_are_finite(backend, dtype):
    """Kernels hold p times a power of two until the end: one value of 1e38 made o infinite, without an error."""
    q = torch.randn(1, 1, 32, 16)
    exponent = {"e4m3": 8, "e5m2": 15}[dtype] if backend == "portable" else 0
    limit = torch.finfo(torch.float32).max / 32 / 2.0**exponent
    v = torch.full_like(q, 0.9 * limit)
    o = fp8_attention(q, q, v, dtype=dtype, backend=backend, out_dtype=torch.float32)
    assert o.isfinite().all() and (o / v - 1).abs().max() < 0.1
    v[0, 0, 3, 5] = 1.1 * limit
    with pytest.raises(InvalidInputError, match="divide v by a power of two"):
        fp8_attention(q, q, v, dtype=dtype, backend=backend)


def test_compiled_for_any_size():
    torch._dynamo.reset()
    compiled = torch.compile(fp8_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (24, 40):
        q = torch.randn(1, 2, seqlen, 16, generator=torch.Generator().manual_seed(seqlen))
        assert torch.equal(compiled(q, q, q, causal=True), fp8_attention(q, q, q, causal=True))
