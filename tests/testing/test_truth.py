"""The yardstick must be torch's own attention, with the masks that this library promises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_accel.testing import (
    attention_mask,
    make_qkv,
    make_varlen,
    max_abs,
    random_like,
    split_varlen,
    yardstick_attention,
    yardstick_attention_backward,
)
from gpu_accel.testing import truth as truth_module

MASKS = [
    {},
    {"causal": True},
    {"window_size": (3, 0)},
    {"window_size": (2, 4)},
    {"window_size": (None, 1)},
    {"causal": True, "window_size": (2, 5)},
]


def spelled_out(q, k, v, *, causal=False, window_size=(-1, -1), softcap=0.0, scale=None):
    """Attention in float64 by loops over queries: the slowest and plainest form."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    left, right = ((None if w is None or w < 0 else w) for w in window_size)
    scale = dim**-0.5 if scale is None else scale
    o = torch.zeros(batch, seqlen_q, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                place = i + seqlen_k - seqlen_q
                keys = [
                    j
                    for j in range(seqlen_k)
                    if (not causal or j <= place)
                    and (left is None or j >= place - left)
                    and (right is None or j <= place + right)
                ]
                if not keys:
                    continue
                s = scale * (k[b, keys, h // group].double() @ q[b, i, h].double())
                s = softcap * torch.tanh(s / softcap) if softcap else s
                lse[b, h, i] = torch.logsumexp(s, 0)
                o[b, i, h] = torch.softmax(s, 0) @ v[b, keys, h // group].double()
    return o, lse


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seqlens", [(6, 6), (9, 4), (4, 9)], ids=str)  # longer queries: rows that see no key
def test_yardstick_is_attention_in_float64(mask, seqlens):
    q, k, v = make_qkv(
        batch=2,
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        heads=4,
        heads_kv=2,
        head_dim=8,
        head_dim_v=4,
        dtype=torch.float64,
    )
    o, lse = yardstick_attention(q, k, v, **mask)
    wanted, wanted_lse = spelled_out(q, k, v, **mask)
    torch.testing.assert_close(o, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    assert lse.dtype == torch.float32 and not o.isnan().any()


def test_truth_of_the_library_agrees_with_the_spelled_out_one():
    q, k, v = make_qkv(batch=1, seqlen_q=7, seqlen_k=5, heads=2, head_dim=8)
    for got, wanted in zip(
        truth_module.attention_truth(q, k, v, causal=True), spelled_out(q, k, v, causal=True), strict=True
    ):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_softcap_and_scale():
    q, k, v = make_qkv(batch=1, seqlen_q=5, heads=2, head_dim=8, dtype=torch.float64)
    o, lse = yardstick_attention(q, k, v, softcap=1.5, softmax_scale=0.7)
    wanted, wanted_lse = spelled_out(q, k, v, softcap=1.5, scale=0.7)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_yardstick_errs_like_the_math_backend_of_torch(dtype):
    q, k, v = make_qkv(batch=1, seqlen_q=200, heads=4, head_dim=64, dtype=dtype, layout="bhsd")
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            theirs = F.scaled_dot_product_attention(q, k, v)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
    ours, _ = yardstick_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert ours.dtype == dtype
    ratio = max_abs(ours.transpose(1, 2), wanted) / max_abs(theirs, wanted)
    assert 0.5 < ratio < 2.0


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seqlens", [(6, 6), (9, 4)], ids=str)
def test_backward_is_the_gradient(mask, seqlens):
    q, k, v = make_qkv(
        batch=2, seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads=4, heads_kv=2, head_dim=8, dtype=torch.float64
    )
    do = random_like(q, seed=9)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    allowed = attention_mask(*seqlens, **mask)
    allowed = torch.ones(seqlens, dtype=torch.bool) if allowed is None else allowed
    q4, k4, v4 = (t.transpose(1, 2) for t in leaves)
    k4, v4 = (t.repeat_interleave(2, dim=1) for t in (k4, v4))
    p = torch.exp(q4 @ k4.transpose(-1, -2) / 8**0.5) * allowed
    o = (p / p.sum(-1, keepdim=True).clamp(min=1e-300)) @ v4
    wanted = torch.autograd.grad(o, leaves, do.transpose(1, 2))
    for got, want in zip(yardstick_attention_backward(do, q, k, v, **mask), wanted, strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_varlen_is_each_sequence_on_its_own():
    x = make_varlen(
        lengths_q=[3, 0, 5], lengths_k=[2, 4, 7], heads=4, heads_kv=2, head_dim=8, dtype=torch.float32, kind="poisoned"
    )
    offsets = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    o, lse = yardstick_attention(x.q, x.k, x.v, causal=True, **offsets)
    assert o.shape == x.q.shape and lse.shape == (4, 8)
    parts = [split_varlen(t, c) for t, c in ((x.q, x.cu_seqlens_q), (x.k, x.cu_seqlens_k), (x.v, x.cu_seqlens_k))]
    for i, (a, b) in enumerate(zip([0, 3, 3], [3, 3, 8], strict=True)):
        wanted, wanted_lse = spelled_out(*(p[i] for p in parts), causal=True)
        torch.testing.assert_close(o[a:b].double(), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, a:b].double(), wanted_lse[0], rtol=1e-5, atol=1e-5)
    dq, dk, dv = yardstick_attention_backward(random_like(o, seed=1), x.q, x.k, x.v, causal=True, **offsets)
    assert dq.shape == x.q.shape and dk.shape == x.k.shape and dv.shape == x.v.shape
    assert not any(t.isnan().any() for t in (dq, dk, dv))


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = make_qkv(batch=1, seqlen_q=13, seqlen_k=9, heads=2, head_dim=8, dtype=torch.float64)
    whole = yardstick_attention(q, k, v, causal=True, window_size=(4, 0))
    monkeypatch.setattr(truth_module, "_SCORES_AT_ONCE", 40)
    for a, b in zip(whole, yardstick_attention(q, k, v, causal=True, window_size=(4, 0)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seqlens", [(0, 4), (4, 0)], ids=str)
def test_zero_lengths(seqlens):
    q, k, v = make_qkv(batch=1, seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads=2, head_dim=8)
    o, lse = yardstick_attention(q, k, v)
    assert o.shape == q.shape and not o.any() and bool((lse == -math.inf).all())
    assert all(not g.any() for g in yardstick_attention_backward(torch.ones_like(o), q, k, v))


@pytest.mark.parametrize("heads,heads_kv", [(4, 2), (3, 3), (4, 1)])
def test_heads_at_once_change_nothing(monkeypatch, heads, heads_kv):
    """In float64, where every order of sums is right to 1e-12; groups of heads that the bound does not divide."""
    q, k, v = make_qkv(
        batch=3, seqlen_q=9, seqlen_k=12, heads=heads, heads_kv=heads_kv, head_dim=8, dtype=torch.float64, seed=1
    )
    do = random_like(q, seed=2)
    monkeypatch.setattr(truth_module, "_SCORES_AT_ONCE", 2 * (heads // heads_kv) * 9 * 12)
    for options in ({}, {"causal": True}, {"window_size": (2, 0), "softcap": 3.0}):
        together, alone = (
            yardstick_attention(q, k, v, **options, heads_at_once=at_once)
            + yardstick_attention_backward(do, q, k, v, **options, heads_at_once=at_once)
            for at_once in (True, False)
        )
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
