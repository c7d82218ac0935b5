"""Sinks, ALiBi, modifiers, block masks and promises about bits on a real GPU, at real sizes, in plain Triton.

    python3 -m pytest tests/gpu/test_attention_features.py -q
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask

from gpu_accel.flash_attention3 import explain, flash_attn_func, flash_attn_varlen_func, modifier
from gpu_accel.testing import make_qkv, make_varlen
from gpu_accel.testing.features import check_features
from gpu_accel.testing.modifiers import relative, relative_grad, relative_twin, same_document, same_document_twin

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_outputs")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda"


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, backend="portable", **options)


def packed(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, backend="portable", **options)


def inputs(batch, sq, sk, heads, heads_kv, d, dv=None, dtype=BF16, kind="normal", seed=0):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d,
                    head_dim_v=dv or d, dtype=dtype, device=DEVICE, kind=kind, seed=seed)  # fmt: skip


def some_sinks(heads):
    return torch.linspace(-2.0, 5.0, heads, device=DEVICE)


def slopes(heads, batch=None):
    geometric = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=DEVICE, dtype=FP32) / heads)
    return geometric if batch is None else geometric * torch.arange(1, batch + 1, device=DEVICE)[:, None]


# ---- device functions and their twins


@triton.jit
def curved(score, b, h, q_idx, kv_idx):
    return tl.where((kv_idx + h) % 3 == 1, float("-inf"), score + 0.05 * (b + 1) * score * score)


@triton.jit
def curved_grad(grad, score, b, h, q_idx, kv_idx):
    return grad * (1.0 + 0.1 * (b + 1) * score)


def curved_twin(score, b, h, q_idx, kv_idx):
    return torch.where((kv_idx + h) % 3 == 1, float("-inf"), score + 0.05 * (b + 1) * score * score)


@triton.jit
def band(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 200 + 100 * h) & (kv_idx - q_idx < 50)


def band_twin(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 200 + 100 * h) & (kv_idx - q_idx < 50)


@triton.jit
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_twin(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


SHAPES = {
    "d64": (2, 500, 700, 4, 2, 64, 64, BF16),
    "d128-causal-sq-gt-sk": (1, 777, 300, 4, 1, 128, 128, FP16),
    "d192-v128": (1, 333, 513, 2, 2, 192, 128, BF16),
    "d256": (1, 300, 300, 2, 1, 256, 256, BF16),
    "d72-fp32": (1, 130, 260, 2, 1, 72, 72, FP32),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window-softcap": {"window_size": (100, 20), "softcap": 10.0},
}


def shaped(name):
    *shape, dtype = SHAPES[name]
    return inputs(*shape, dtype=dtype), shape


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_sinks_and_alibi(name, options):
    (q, k, v), shape = shaped(name)
    heads, batch = shape[3], shape[0]
    check_features(dense, q, k, v, sinks=some_sinks(heads), lse_gradient=True, **options)
    check_features(dense, q, k, v, alibi_slopes=slopes(heads, batch), **options)
    check_features(dense, q, k, v, sinks=some_sinks(heads), alibi_slopes=slopes(heads), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_score_mod(name, options):
    (q, k, v), shape = shaped(name)
    aux = (torch.randn(shape[3], device=DEVICE) * 0.01, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    check_features(dense, q, k, v, score_mod=relative, score_mod_grad=relative_grad, aux_tensors=aux,
                   truth={"score_mod": relative_twin}, **options)  # fmt: skip
    check_features(dense, q, k, v, score_mod=curved, score_mod_grad=curved_grad, truth={"score_mod": curved_twin},
                   **options)  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_mask_mod(name):
    (q, k, v), shape = shaped(name)
    longest = max(shape[1], shape[2])
    document = (torch.arange(longest, device=DEVICE) // 90).to(torch.int32)
    aux = (torch.zeros(shape[3], device=DEVICE), document)
    check_features(dense, q, k, v, mask_mod=same_document, aux_tensors=aux, truth={"mask_mod": same_document_twin})
    check_features(dense, q, k, v, mask_mod=band, truth={"mask_mod": band_twin}, causal=True)


@pytest.mark.parametrize("size", [128, 64, (128, 64), (48, 96)], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "band"])
def test_block_mask(mask, d, size):
    mod, twin = {"causal": (causal, causal_twin), "band": (band, band_twin)}[mask]
    sq, sk, heads = 500, 700, 4
    made = create_block_mask(twin, None, heads, sq, sk, device=DEVICE, BLOCK_SIZE=size)
    q, k, v = inputs(2, sq, sk, heads, 2, d)
    check_features(dense, q, k, v, mask_mod=mod, block_mask=made, truth={"mask_mod": twin})


def test_block_mask_of_long_sequences_skips_blocks():
    # 8k tokens, 1 in 8 blocks: one call takes far less than the same call with all blocks. The best of some calls in
    # turn, since other processes may use this GPU too.
    sq = 8192
    q, k, v = inputs(2, sq, sq, 8, 8, 128)
    made = create_block_mask(band_twin, None, 8, sq, sq, device=DEVICE, BLOCK_SIZE=128)
    calls = {"blocks": {"mask_mod": band, "block_mask": made}, "all": {"mask_mod": band}}
    results = {name: dense(q, k, v, **options) for name, options in calls.items()}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(20):
        for name, options in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)  # the host gets ahead: what is timed is the device
            start.record()
            dense(q, k, v, **options)
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end))
    assert best["blocks"] < 0.5 * best["all"], best
    assert (results["blocks"] - results["all"]).abs().max() < 0.02


def test_is_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = inputs(2, 1024, 1024, 4, 4, 64)
    made = create_block_mask(causal_twin, None, None, 1024, 1024, device=DEVICE)
    got = dense(q, k, v, mask_mod=causal, block_mask=made)
    expected = torch.compile(flex_attention)(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=made)
    assert (got - expected.transpose(1, 2)).abs().max() < 0.03


@pytest.mark.parametrize("d", [64, 128])
def test_packed(d):
    lengths_q, lengths_k = [0, 300, 1, 513, 77], [5, 300, 200, 640, 0]
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=lengths_q, lengths_k=lengths_k, heads=4, heads_kv=2, head_dim=d,
                                            device=DEVICE)  # fmt: skip
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    check_features(packed, q, k, v, sinks=some_sinks(4), alibi_slopes=slopes(4, 5), softcap=8.0, window_size=(90, 3),
                   lse_gradient=True, **call)  # fmt: skip
    check_features(packed, q, k, v, sinks=some_sinks(4), causal=True, **call)
    check_features(packed, q, k, v, score_mod=curved, score_mod_grad=curved_grad, mask_mod=band,
                   truth={"score_mod": curved_twin, "mask_mod": band_twin}, **call)  # fmt: skip


@pytest.mark.parametrize("kind", ["strided", "packed", "broadcast", "poisoned", "outliers"])
def test_layouts(kind):
    check_features(dense, *inputs(2, 321, 321, 4, 4, 64, kind=kind), causal=True, sinks=some_sinks(4))


@pytest.mark.parametrize("d,dv", [(64, 128), (128, 64), (192, 128), (40, 104), (256, 64), (8, 256)])
def test_head_dims_of_q_and_v_are_free(d, dv):
    check_features(dense, *inputs(1, 300, 333, 2, 1, d, dv), causal=True)


# ---- bits


def same(*results):
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_deterministic_backward_with_features(d):
    q, k, v = (x.requires_grad_() for x in inputs(2, 700, 700, 8, 2, d))
    sinks = some_sinks(8).requires_grad_()
    do = torch.randn_like(q)

    def run():
        o = dense(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes(8), deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v, sinks), do)

    first = run()
    assert all(same(first, run()) for _ in range(30))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 0)}], ids=["full", "causal", "window"])
def test_rows_do_not_depend_on_the_batch(d, options):
    call = {"return_lse": True, "batch_invariant": True, **options}
    for seqlen in (1, 9, 64, 65, 500):
        q, k, v = inputs(7, seqlen, 500, 4, 2, d)
        together = dense(q, k, v, **call)
        for b in (0, 3, 6):
            alone = dense(q[b : b + 1], k[b : b + 1], v[b : b + 1], **call)
            assert same([x[b : b + 1] for x in together], alone)


@pytest.mark.parametrize("d", [64, 128])
def test_packed_rows_do_not_depend_on_neighbours(d):
    # vllm 51902: a neighbour that grew from 9 to 10 tokens changed a row
    def run(lengths):
        rows = [inputs(1, n, n, 4, 2, d, seed=n) for n in lengths]
        q, k, v = (torch.cat([x[i][0] for x in rows]) for i in range(3))
        cu = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        o, lse = packed(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True, batch_invariant=True)
        at = lengths.index(333)
        start = int(cu[at])
        return o[start : start + 333], lse[:, start : start + 333]

    alone = run([333])
    for lengths in ([9, 333], [10, 333], [333, 1000], [1, 64, 333, 65, 2000]):
        assert same(run(lengths), alone)


def test_decoding_is_prefill():
    # the last row of a causal prefill equals the one-query call, bit by bit
    q, k, v = inputs(1, 300, 300, 4, 2, 128)
    call = {"causal": True, "return_lse": True, "batch_invariant": True}
    o, lse = dense(q, k, v, **call)
    last_o, last_lse = dense(q[:, -1:], k, v, **call)
    assert same((o[:, -1:], lse[..., -1:]), (last_o, last_lse))


# ---- around it


def test_torch_compile():
    q, k, v = (x.requires_grad_() for x in inputs(2, 300, 300, 4, 2, 64))
    sinks = some_sinks(4).requires_grad_()
    made = create_block_mask(band_twin, None, 4, 300, 300, device=DEVICE)
    mod, grad, mask = modifier(curved), modifier(curved_grad), modifier(band)

    def call(q, k, v, sinks, made):
        o, lse = flash_attn_func(q * 2, k, v, score_mod=mod, score_mod_grad=grad, mask_mod=mask, block_mask=made,
                                 sinks=sinks, return_lse=True, deterministic=True)  # fmt: skip
        return (o.float() + 1).sum() + lse.sum()

    leaves = (q, k, v, sinks)
    got = torch.autograd.grad(torch.compile(call, fullgraph=True)(*leaves, made), leaves)
    for a, b in zip(got, torch.autograd.grad(call(*leaves, made), leaves), strict=True):
        assert torch.equal(a, b)


def test_cuda_graph():
    q, k, v = (x.contiguous().requires_grad_() for x in inputs(2, 300, 300, 4, 2, 64))
    sinks = some_sinks(4).requires_grad_()
    made = create_block_mask(band_twin, None, 4, 300, 300, device=DEVICE)

    def step():
        o, maxima = dense(q, k, v, mask_mod=band, block_mask=made, sinks=sinks, return_max_logits=True)
        return o, maxima, *torch.autograd.grad(o, (q, k, v, sinks), torch.ones_like(o))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    assert same(captured, step())


def test_activation_checkpointing_and_autocast():
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x.float().requires_grad_() for x in inputs(1, 300, 300, 4, 2, 64))
    sinks = some_sinks(4).requires_grad_()

    def block(q, k, v, sinks):
        with torch.autocast("cuda", BF16):
            return dense(q, k, v, causal=True, sinks=sinks).float()

    leaves = (q, k, v, sinks)
    direct = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    again = checkpoint(block, *leaves, use_reentrant=False).square().sum()
    assert same(direct, torch.autograd.grad(again, leaves))


def test_explain():
    q, k, v = inputs(1, 256, 256, 2, 2, 128)
    made = create_block_mask(causal_twin, None, None, 256, 256, device=DEVICE, BLOCK_SIZE=64)
    said = explain(q, k, v, mask_mod=causal, block_mask=made, sinks=some_sinks(2), backend="portable")
    assert said.problem.features == {"block_mask", "mask_mod", "sinks"}
    assert "cut to the block mask's 64x64" in said.config and said.config.startswith("64x64")
