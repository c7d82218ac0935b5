"""Windows of softmax beside linear attention on a GPU: what decides whether "auto" may take the kernels."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing import assert_close_to_truth, default_floor, generator
from gpu_accel.thunderkittens import hedgehog_fused, hedgehog_hopper, windowed
from gpu_accel.thunderkittens.features import fused_chunk_based, hedgehog_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


def randn(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, "cuda"), device="cuda").to(dtype)


def run(function, tensors, grads, dtype=None):
    leaves = [(x.detach().clone() if dtype is None else x.detach().to(dtype)).requires_grad_() for x in tensors]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad((o.double() * grads.double()).sum(), leaves)]


def judge(names, function, backend, tensors, grads):
    """Against float64, by what the reference errs in the dtype of the tensors."""
    mine, ruler = (run(function(b), tensors, grads) for b in (backend, "reference"))
    truth = run(function("reference"), tensors, grads, torch.float64)
    # A factor's gradient sums products of grads with o in its dtype, a half unit off each: four deviations of that.
    walk = 4 * torch.finfo(mine[0].dtype).eps / 2 * (grads * truth[0]).square().sum((0, 1, 3)).sqrt().max().item()
    for name, out, right, measure in zip(names, mine, truth, ruler, strict=True):
        floor = walk if name.endswith("factor") else default_floor(out.dtype, right.abs().max().item())
        assert_close_to_truth(name, out, right, measure, floor=floor)


def hedgehog_inputs(batch, seqlen, heads, key_dim, value_dim, count, dtype):
    q, k = (randn(batch, seqlen, heads, key_dim, seed=s, dtype=dtype) for s in (1, 2))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype)
    maps = [(randn(heads, key_dim, count, seed=s) / key_dim**0.5).to(dtype) for s in (4, 5)]
    factors = [1.5 + torch.tanh(randn(heads, seed=s)) for s in (6, 7)]
    return [q, k, v, *maps, *factors], randn(*v.shape, seed=8)


NAMES = ["o", "dq", "dk", "dv", "dq_map", "dk_map", "dwindow_factor", "dlinear_factor"]


def hedgehog(window, cu=None):
    def function(backend):
        return lambda q, k, v, a, b, x, y: hedgehog_attention(
            q, k, v, a, b, window=window, window_factor=x, linear_factor=y, cu_seqlens=cu, backend=backend
        )

    return function


# 300 and 65 end within a block; 20 is padded for the window's kernels, and the last window has all. In a window of one
# token what comes by lse and what comes by the largest score cancel, but for their roundings: it is tested in float32.
@pytest.mark.parametrize(("seqlen", "window", "key_dim", "count", "value_dim", "dtype"), [
    pytest.param(300, 128, 128, 64, 128, BF16, id="T300-W128-K128-bf16"),
    pytest.param(300, 65, 20, 40, 72, FP16, id="T300-W65-K20-fp16"),
    pytest.param(130, 7, 64, 32, 64, FP16, id="T130-W7-K64-fp16"),
    pytest.param(130, 7, 64, 32, 64, BF16, id="T130-W7-K64-bf16"),
    pytest.param(100, 200, 64, 32, 64, BF16, id="T100-W200-K64-bf16"),
])  # fmt: skip
def test_hedgehog(seqlen, window, key_dim, count, value_dim, dtype):
    judge(NAMES, hedgehog(window), "portable", *hedgehog_inputs(2, seqlen, 16, key_dim, value_dim, count, dtype))


@pytest.mark.parametrize(("seqlen", "window", "key_dim", "value_dim", "dtype", "backend"), [
    pytest.param(1000, 128, 128, 128, BF16, "hopper", id="T1000-W128-bf16-hopper", marks=hopper),
    pytest.param(300, 65, 64, 64, BF16, "hopper", id="T300-W65-bf16-hopper", marks=hopper),
    pytest.param(300, 128, 128, 128, BF16, "portable", id="T300-W128-bf16"),
    pytest.param(300, 65, 24, 72, FP16, "portable", id="T300-W65-K24-fp16"),
    pytest.param(300, 128, 128, 128, FP16, "portable", id="T300-W128-fp16"),
    pytest.param(100, 200, 64, 64, BF16, "portable", id="T100-W200-bf16"),
])  # fmt: skip
def test_hedgehog_in_one_kernel(seqlen, window, key_dim, value_dim, dtype, backend):
    def function(backend):
        return lambda q, k, v, a, b, x, y: hedgehog_attention(
            q, k, v, a, b, window=window, window_factor=x, linear_factor=y, backend=backend,
            fused=None if backend == "reference" else True,
        )  # fmt: skip

    judge(NAMES, function, backend, *hedgehog_inputs(2, seqlen, 16, key_dim, value_dim, 64, dtype))


# whole chunks and a tail, fewer steps than a window and than a chunk, padded K and V, heads that share queries, more
# programs than SMs
@hopper
@pytest.mark.parametrize(("batch", "seqlen", "heads", "group", "key_dim", "value_dim", "factors"), [
    pytest.param(2, 1000, 8, 1, 128, 128, True, id="T1000"),
    pytest.param(2, 512, 4, 2, 128, 128, False, id="T512-shared"),
    pytest.param(1, 300, 4, 1, 64, 72, True, id="T300-K64-V72"),
    pytest.param(1, 4109, 2, 1, 40, 128, False, id="T4109-K40"),
    pytest.param(2, 100, 4, 1, 128, 128, True, id="T100"),
    pytest.param(1, 1, 3, 1, 128, 128, True, id="T1"),
    pytest.param(16, 577, 16, 1, 128, 128, False, id="T577-256-programs"),
])  # fmt: skip
def test_hedgehog_in_one_walk(batch, seqlen, heads, group, key_dim, value_dim, factors, monkeypatch):
    """Of views between NaN; every launch gives the same bits."""
    monkeypatch.setattr(hedgehog_fused, "WHOLE", True)
    given, _ = hedgehog_inputs(batch, seqlen, heads, key_dim, value_dim, 64, BF16)
    if group > 1:
        given[2] = randn(batch, seqlen, heads * group, value_dim, seed=3, dtype=BF16)
    given = given if factors else given[:5]
    between = [torch.full((x.shape[0], x.shape[1] + 2, *x.shape[2:]), torch.nan, dtype=BF16, device="cuda")
               for x in given[:3]]  # fmt: skip
    views = [x[:, 1:-1].copy_(y) for x, y in zip(between, given[:3], strict=True)]
    scale = key_dim**-0.5
    assert hedgehog_hopper.refusal(*views, *given[3:5], 128, scale) is None
    options = [*views, *given[3:], None, None][:7]
    outs = [hedgehog_fused.window_op(*options, 128, scale, True) for _ in range(5)]
    assert all(torch.equal(x, outs[0]) for x in outs)

    def reference(*tensors):
        factors = dict(zip(("window_factor", "linear_factor"), tensors[5:], strict=False))
        return hedgehog_attention(*tensors[:5], window=128, backend="reference", **factors)

    for i in {0, batch - 1}:
        part = [x[i : i + 1] for x in given[:3]] + given[3:]
        assert_close_to_truth("o", outs[0][i : i + 1], reference(*(x.double() for x in part)), reference(*part))


@hopper
@pytest.mark.parametrize(("seqlen", "window", "value_dim"), [(1000, 128, 128), (300, 65, 64)])
def test_hedgehog_by_the_kernels_for_hopper(seqlen, window, value_dim):
    judge(NAMES, hedgehog(window), "hopper", *hedgehog_inputs(1, seqlen, 16, value_dim, value_dim, 64, BF16))


@pytest.mark.parametrize(("seqlen", "window", "key_dim", "value_dim", "dtype"), [
    (515, 64, 16, 64, BF16), (515, 64, 16, 64, FP16), (130, 33, 8, 72, BF16)
], ids=["K16-bf16", "K16-fp16", "K8-bf16"])  # fmt: skip
def test_based(seqlen, window, key_dim, value_dim, dtype):
    q, k = (randn(2, seqlen, 16, key_dim, seed=s, dtype=dtype) for s in (1, 2))
    v = randn(2, seqlen, 16, value_dim, seed=3, dtype=dtype)

    def function(backend):
        return lambda q, k, v: fused_chunk_based(q, k, v, window=window, backend=backend)

    judge(NAMES[:4], function, "portable", [q, k, v], randn(*v.shape, seed=4))


def test_packed_sequences():
    """Lengths 150, 0, 65 and 70; NaN behind the last of them reaches nothing."""
    tensors, grads = hedgehog_inputs(1, 300, 16, 64, 64, 32, BF16)
    cu = torch.tensor([0, 150, 150, 215, 285], dtype=torch.int32, device="cuda")
    for x in tensors[:3]:
        x[:, 285:] = torch.nan
    grads[:, 285:] = 0.0
    judge(NAMES, hedgehog(64, cu), "portable", tensors, grads)


@pytest.mark.parametrize("key_dim", [16, 200])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_the_largest_score_is_found_with_its_key(dtype, key_dim):
    q, k = (randn(2, 200, 3, key_dim, seed=s, dtype=dtype) for s in (1, 2))
    places = windowed.Places(q, 70, None)
    largest, where = windowed.maximum_op(q, k, places.low, 0.3)
    late = torch.arange(200, device="cuda")[:, None] - torch.arange(200, device="cuda")
    s = torch.einsum("bthk,bshk->bths", q.double(), k.double()) * 0.3
    s = s.masked_fill(~((late >= 0) & (late < 70))[None, :, None], -torch.inf)
    # Products of 16 bits are exact, and those of float32, three of tf32, off by 2^-20; each addition of 16 or 8 terms
    # of K keeps 22 bits.
    additions = key_dim / 16 + 1 if dtype != FP32 else 3 * key_dim / 8 + 4
    size = float(torch.einsum("bthk,bshk->bths", q.double().abs(), k.double().abs()).max()) * 0.3
    bound = size * additions * 2.0**-22
    assert (largest.double() - s.amax(3)).abs().max() <= bound
    assert (s.gather(3, where.long()[..., None])[..., 0] - s.amax(3)).abs().max() <= 2 * bound


@pytest.mark.parametrize("batch", [1, 16], ids=["few-heads", "many-heads"])
def test_auto_is_right_and_there_is_nothing_for_hopper_in_fp16(batch):
    """Many heads go through one kernel."""
    tensors, _ = hedgehog_inputs(batch, 200, 16, 64, 64, 32, FP16)
    one, other = (hedgehog(64)(b)(*tensors) for b in ("auto", "reference"))
    assert_close_to_truth("o", one, hedgehog(64)("reference")(*(x.double() for x in tensors)), other)
    with pytest.raises(UnsupportedError):
        hedgehog(64)("hopper")(*tensors)
