"""The plain-Triton attention on a real GPU: every tuned tile, real sizes, huge offsets, graphs and compilation.

    python3 -m pytest tests/gpu/test_flash_attention3.py -q
"""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3 import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    portable_backward,
    portable_forward,
)
from gpu_accel.testing import attention_truth, attention_truth_backward, make_qkv, make_varlen
from gpu_accel.testing.attention import check_attention

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


def hopper_up() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, return_lse=True, backend="portable", **options)


def packed(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, return_lse=True, backend="portable", **options)


def inputs(batch, sq, sk, heads, heads_kv, d, dv=None, dtype=BF16, kind="normal", seed=0):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d,
                    head_dim_v=dv or d, dtype=dtype, device=DEVICE, kind=kind, seed=seed)  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d,dv", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_every_tuned_tile(d, dv, causal, dtype, poisoned_outputs):
    # whole blocks and a tail, grouped heads
    check_attention(dense, *inputs(2, 1024, 1024, 4, 2, d, dv, dtype), causal=causal)
    check_attention(dense, *inputs(1, 777, 1001, 2, 2, d, dv, dtype, seed=1), causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("pass_", configs.PASSES)
def test_every_candidate_that_runs_is_right(pass_, head_dim, causal, poisoned_outputs):
    # compilers are wrong on some tiles: whatever tuning may choose has to be right
    q, k, v = inputs(1, 640, 640, 2, 1, head_dim)
    call = {"softmax_scale": head_dim**-0.5, "window_right": 0 if causal else -1}
    ran = 0
    for config in configs.candidates(pass_, head_dim):
        def attention(q, k, v, config=config, **_):
            if pass_ == "forward":
                return portable_forward.forward(q, k, v, config=config, **call)
            return Backward.apply(q, k, v, call, {pass_.replace("backward", "config"): config})

        try:
            check_attention(attention, q, k, v, gradients=pass_ != "forward", causal=causal)
            ran += 1
        except Exception as error:
            if "out of resource" not in str(error) and "OutOfResources" not in type(error).__name__:
                raise
    assert ran >= 2, "nothing to choose from"


class Backward(torch.autograd.Function):
    """The kernels with a configuration of our choice, below the custom op."""

    @staticmethod
    def forward(ctx, q, k, v, call, chosen):
        o, lse = portable_forward.forward(q, k, v, **call)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call, ctx.chosen = call, chosen
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        grads = portable_backward.backward(do, *ctx.saved_tensors, **ctx.call, **ctx.chosen)
        return (*grads, None, None)


PAIRS = [(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (108, 256), (384, 256), (640, 128),
         (1023, 1024), (1024, 1023)]  # fmt: skip


@pytest.mark.parametrize("sq,sk", PAIRS, ids=[f"{a}x{b}" for a, b in PAIRS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (100, 30)},
        {"causal": True, "window_size": (65, 0), "softcap": 15.0},
    ],
    ids=["full", "causal", "window", "causal-window-softcap"],
)
def test_lengths_and_masks(sq, sk, options, poisoned_outputs):
    check_attention(dense, *inputs(2, sq, sk, 6, 2, 64), **options)


@pytest.mark.parametrize("d", [8, 40, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256])
def test_head_dims(d, poisoned_outputs):
    check_attention(dense, *inputs(1, 300, 333, 2, 1, d), causal=True)


@pytest.mark.parametrize("kind", ["strided", "packed", "broadcast", "poisoned", "outliers"])
@pytest.mark.parametrize("d", [64, 256])
def test_layouts(kind, d, poisoned_outputs):
    # flash-attention 2541: gradients of a fused QKV tensor at head_dim 256
    check_attention(dense, *inputs(2, 321, 321, 4, 4, d, kind=kind), causal=True)


@pytest.mark.parametrize("d", [64, 72, 80, 96])
def test_addresses_off_16_bytes(d, poisoned_outputs):
    # two-byte loads in front of a wgmma of 16 columns came out wrong at 72 and 80, and then ended in illegal accesses
    for seed in range(3):
        check_attention(dense, *inputs(2, 136, 136, 4, 2, d, kind="misaligned", seed=seed))


@pytest.mark.parametrize("path", ["pointer", "tma"])
@pytest.mark.parametrize("name", ["dense", "packed"])
def test_both_memory_paths(path, name, poisoned_outputs):
    if path == "tma" and not hopper_up():
        pytest.skip("TMA needs compute capability 9.0")
    if name == "dense":
        q, k, v = inputs(2, 500, 700, 4, 2, 128)
        extra = {}
    else:
        q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[200, 0, 300, 1], lengths_k=[130, 7, 555, 64], heads=4,
                                                heads_kv=2, head_dim=128, kind="poisoned", device=DEVICE)  # fmt: skip
        extra = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}

    def attention(q, k, v, **_):
        return portable_forward.forward(q, k, v, softmax_scale=128**-0.5, window_right=0, path=path, **extra)

    check_attention(attention, q, k, v, gradients=False, causal=True, **extra)


def test_explain_says_tma():
    q, k, v = inputs(1, 256, 256, 2, 2, 128)
    said = explain(q, k, v, causal=True, backend="portable")
    assert said.path == ("tma" if hopper_up() else "pointer (compute capability below 9.0 has no TMA)")
    assert "tuned/" in said.config and "tuned/" in said.backward_config


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_of_real_size(causal, poisoned_outputs):
    # flash-attention 1254: empty sequences beside long ones, forward and backward
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[0, 0, 1023, 511, 1], lengths_k=[0, 1, 2045, 511, 300], heads=8,
                                            heads_kv=2, head_dim=128, device=DEVICE)  # fmt: skip
    check_attention(packed, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal)


def test_packed_rows_that_see_nothing(poisoned_outputs):
    # flash-attention 443
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[76, 34, 146], lengths_k=[1, 1, 1], heads=2, head_dim=32,
                                            dtype=FP16, device=DEVICE)  # fmt: skip
    check_attention(packed, q * 3, k * 3, v * 3, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)


def test_large_scores_stay_finite():
    # flash-attention 1052; pytorch 196678 (partial last block, every lse below -88)
    q, k, v = (x * 3 for x in inputs(1, 1024, 1024, 1, 1, 128, dtype=FP16))
    check_attention(dense, q, k, v, causal=True)
    q, k, v = inputs(1, 704, 704, 1, 1, 64)
    leaves = [x.requires_grad_() for x in (q.abs() * 10, -k.abs() * 10, v)]
    o, lse = dense(*leaves)
    assert (lse < -90).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.float().square().sum(), leaves))


@pytest.mark.parametrize("d", [64, 72, 128, 256])
def test_same_bits_every_time(d):
    # exllamav3 316 saw uninitialised memory at 72; our backward promises equal bits
    q, k, v = (x.requires_grad_() for x in inputs(2, 512, 512, 16, 4, d))
    do = torch.randn_like(q)
    results = []
    for _ in range(4):
        o, lse = dense(q, k, v, causal=True)
        results.append((o, lse, *torch.autograd.grad(o, (q, k, v), do)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def huge(shape, strides, seed):
    """A view with offsets beyond 2^31 elements (4 GB of bfloat16), filled with random numbers."""
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    assert size > 2**31
    x = torch.empty(size, dtype=BF16, device=DEVICE).as_strided(shape, strides)
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    return x.copy_(torch.randn(shape, generator=g, device=DEVICE))


@pytest.mark.parametrize("path", ["pointer", "tma"])
@pytest.mark.parametrize(
    "strides",
    [(2**31 + 64, 128, 64, 1), (64 * 2, 2**23 + 64 * 2 * 2, 64, 1)],
    ids=["batch", "rows"],
)
def test_offsets_beyond_2_to_the_31(strides, path):
    # flash-attention 2611, 772, SageAttention 386: 32-bit offsets corrupt silently
    if path == "tma" and not hopper_up():
        pytest.skip("TMA needs compute capability 9.0")
    shape = (2, 300, 2, 64)
    q, k, v = (huge(shape, strides, seed) for seed in range(3))
    call = {"softmax_scale": 0.125, "window_right": 0, "path": path}
    o, lse = portable_forward.forward(q, k, v, **call)
    near = [x.contiguous() for x in (q, k, v)]
    near_o, near_lse = portable_forward.forward(*near, **call)
    assert torch.equal(o, near_o) and torch.equal(lse, near_lse)
    truth, _ = attention_truth(*near, causal=True)
    assert (o.double() - truth).abs().max() < 0.02
    do = torch.randn_like(near[0])
    grads = portable_backward.backward(do, q, k, v, o, lse, **call)
    near_grads = portable_backward.backward(do, *near, o, lse, **call)
    truths = attention_truth_backward(do, *near, causal=True)
    for got, same, want in zip(grads, near_grads, truths, strict=True):
        assert torch.equal(got, same)
        assert (got.double() - want).abs().max() < 0.05


def test_outputs_beyond_2_to_the_31():
    batch, seqlen, heads, d = 1040, 128, 128, 128
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GB of free memory")
    q = torch.randn(batch, seqlen, heads, d, dtype=BF16, device=DEVICE)
    assert q.numel() > 2**31
    q.requires_grad_()
    k = torch.randn(batch, seqlen, 8, d, dtype=BF16, device=DEVICE)
    o = flash_attn_func(q, k, k, causal=True, backend="portable")
    (dq,) = torch.autograd.grad(o, q, o.detach())
    for b in (0, batch - 1):
        x, y = q[b : b + 1].detach(), k[b : b + 1]
        truth, _ = attention_truth(x, y, y, causal=True)
        assert (o[b : b + 1].double() - truth).abs().max() < 0.02
        want, _, _ = attention_truth_backward(o[b : b + 1].detach(), x, y, y, causal=True)
        assert (dq[b : b + 1].double() - want).abs().max() < 0.05


def test_memory_is_linear():
    q, k, v = (x.requires_grad_() for x in inputs(1, 32768, 32768, 1, 1, 64))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dense(q, k, v, causal=True)[0].sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 128 * 2**20  # one score matrix would be 2 GB


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_cuda_graph(name):
    if name == "dense":
        q, k, v = inputs(2, 300, 300, 4, 2, 64)
        extra, call = {}, dense
    else:
        q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[300, 200], lengths_k=[300, 200], heads=4, heads_kv=2,
                                                head_dim=64, device=DEVICE)  # fmt: skip
        extra, call = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, packed
    q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))

    def step():
        o, lse = call(q, k, v, causal=True, **extra)
        return o, lse, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():  # other numbers and, packed, other lengths: the grid depends on shapes only
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        if extra:
            for cu in extra.values():
                cu.copy_(torch.tensor([0, 17, 500], dtype=torch.int32))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile(dynamic):
    q, k, v = (x.requires_grad_() for x in inputs(2, 300, 400, 4, 2, 64))

    def call(q, k, v):
        o, lse = flash_attn_func(q * 2, k, v, causal=True, return_lse=True, backend="portable")
        return (o.float() + 1).sum() + lse.sum()

    got = torch.autograd.grad(torch.compile(call, fullgraph=True, dynamic=dynamic)(q, k, v), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(call(q, k, v), (q, k, v)), strict=True):
        assert torch.equal(a, b)  # the same kernel on the same numbers


def test_autocast():
    q, k, v = (x.float() for x in inputs(1, 100, 100, 2, 2, 64))
    with torch.autocast("cuda", FP16):
        assert flash_attn_func(q, k, v).dtype == FP16


def test_validation_of_values_on_the_device():
    from gpu_accel.errors import InvalidInputError

    q = torch.zeros(10, 2, 64, dtype=BF16, device=DEVICE)
    good = torch.tensor([0, 10], dtype=torch.int32, device=DEVICE)
    bad = torch.tensor([0, 12], dtype=torch.int32, device=DEVICE)
    with pytest.raises(InvalidInputError, match="ends at 12"):
        flash_attn_varlen_func(q, q, q, cu_seqlens_q=bad, cu_seqlens_k=good, validate=True)


def test_float64_on_a_gpu_must_be_asked_for():
    from gpu_accel.errors import UnsupportedError

    q = torch.randn(1, 16, 1, 16, dtype=torch.float64, device=DEVICE)
    with pytest.raises(UnsupportedError, match="only when asked for"):
        flash_attn_func(q, q, q)
    assert flash_attn_func(q, q, q, backend="reference").dtype == torch.float64
