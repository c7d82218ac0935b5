"""Attention sinks, ALiBi and maxima of the scores, alone and with everything they meet, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import FlashAttention3, explain, flash_attn_func, flash_attn_varlen_func
from gpu_accel.testing import make_qkv, make_varlen
from gpu_accel.testing.features import check_features

BF16, FP32 = torch.bfloat16, torch.float32


def inputs(shape, device, dtype=FP32, kind="normal"):
    batch, sq, sk, heads, heads_kv, d, dv = shape
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, head_dim_v=dv,
                    kind=kind, dtype=dtype, device=device)  # fmt: skip


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, backend="portable", **options)


def packed(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, backend="portable", **options)


def some_sinks(heads, device):
    return torch.linspace(-2.0, 3.0, heads, device=device)


def slopes(heads, device, batch=None):
    geometric = 2.0 ** -torch.arange(1, heads + 1, device=device, dtype=torch.float32)
    return geometric if batch is None else geometric * torch.arange(1, batch + 1, device=device)[:, None]


CASES = {
    "one-query-one-key": ((1, 1, 1, 1, 1, 16, 16), {}),
    "whole-blocks": ((1, 32, 32, 2, 2, 16, 16), {}),
    "grouped-odd-lengths": ((2, 20, 35, 2, 1, 16, 24), {}),
    "causal-rows-that-see-only-the-sink": ((1, 40, 21, 2, 1, 16, 16), {"causal": True}),
    "window-and-softcap": ((1, 37, 37, 2, 1, 16, 16), {"causal": True, "window_size": (9, 0), "softcap": 2.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_sinks(name, device):
    shape, options = CASES[name]
    check_features(dense, *inputs(shape, device), sinks=some_sinks(shape[3], device), lse_gradient=True, **options)


@pytest.mark.parametrize("name", [n for n in CASES if n != "whole-blocks"])
def test_alibi(name, device):
    shape, options = CASES[name]
    alibi = slopes(shape[3], device, batch=shape[0] if shape[0] > 1 else None)
    check_features(dense, *inputs(shape, device), alibi_slopes=alibi, **options)


def test_everything_at_once_in_half_precision(device):
    q, k, v = inputs((1, 20, 35, 2, 1, 192, 128), device, BF16)
    check_features(dense, q, k, v, sinks=some_sinks(2, device), alibi_slopes=slopes(2, device), softcap=5.0,
                   window_size=(30, 5))  # fmt: skip


def test_a_sink_is_a_key_of_value_zero(device):
    # what gpt-oss computes: one more column in the softmax, dropped afterwards
    q, k, v = inputs((1, 9, 12, 2, 2, 16, 16), device)
    sinks = some_sinks(2, device)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4.0
    column = sinks.view(1, 2, 1, 1).expand(1, 2, 9, 1)
    p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    got = flash_attn_func(q, k, v, sinks=sinks)
    torch.testing.assert_close(got, torch.einsum("bhqk,bkhd->bqhd", p, v), rtol=0, atol=1e-5)


def test_a_sink_at_minus_infinity_is_none(device):
    q, k, v = inputs((1, 20, 9, 2, 2, 16, 16), device)
    sinks = torch.full((2,), float("-inf"), device=device, requires_grad=True)
    o, lse = dense(q, k, v, sinks=sinks, causal=True, return_lse=True)
    plain, plain_lse = dense(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(o, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-6)
    (grad,) = torch.autograd.grad(o.sum(), sinks)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sinks_have_their_own_dtype(dtype, device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device, torch.float16)
    sinks = torch.ones(2, dtype=dtype, device=device, requires_grad=True)
    flash_attn_func(q, k, v, sinks=sinks).float().sum().backward()
    assert sinks.grad.dtype == dtype and sinks.grad.isfinite().all()


def test_no_keys_at_all(device):
    q, k, v = inputs((2, 5, 0, 2, 1, 16, 16), device)
    sinks = some_sinks(2, device).requires_grad_()
    o, lse, maxima = dense(q, k, v, sinks=sinks, return_lse=True, return_max_logits=True)
    assert torch.equal(o, torch.zeros_like(o))
    torch.testing.assert_close(lse, sinks.detach()[None, :, None].expand_as(lse), rtol=0, atol=1e-6)
    assert (maxima == float("-inf")).all()
    (grad,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(grad, torch.full_like(grad, 10.0), rtol=0, atol=1e-5)


VARLEN = {
    "empty-sequences": ([0, 7, 33, 0], [5, 0, 20, 0], 0, {"causal": True}),
    "rows-behind-the-last": ([20, 13], [11, 37], 6, {"window_size": (12, 3), "softcap": 3.0}),
}


@pytest.mark.parametrize("name", VARLEN)
def test_packed(name, device):
    lengths_q, lengths_k, behind, options = VARLEN[name]
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=lengths_q, lengths_k=lengths_k, heads=2, heads_kv=1, head_dim=16,
                                            dtype=FP32, device=device)  # fmt: skip
    if behind:
        q = torch.cat([q, torch.randn(behind, *q.shape[1:], device=device)])
    check_features(packed, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=some_sinks(2, device),
                   alibi_slopes=slopes(2, device, batch=len(lengths_q)), lse_gradient=True, **options)  # fmt: skip


def test_packed_with_unused_rows(device):
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[20, 13], lengths_k=[11, 37], heads=2, head_dim=16, dtype=FP32,
                                            device=device)  # fmt: skip
    used = {n: torch.tensor(x, dtype=torch.int32, device=device)
            for n, x in (("seqused_q", [15, 0]), ("seqused_k", [11, 30]))}  # fmt: skip
    check_features(packed, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=some_sinks(2, device),
                   alibi_slopes=slopes(2, device), causal=True, **used)  # fmt: skip


def test_maxima_alone(device):
    q, k, v = inputs((2, 40, 33, 4, 2, 16, 16), device)
    q.requires_grad_()
    o, maxima = dense(q, k, v, causal=True, return_max_logits=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 16**-0.5
    seen = torch.ones(40, 33, dtype=torch.bool, device=device).tril(33 - 40)
    expected = scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(maxima, expected, rtol=0, atol=1e-5)
    assert not maxima.requires_grad and o.requires_grad


def test_backends_agree(device):
    q, k, v = inputs((1, 10, 12, 2, 2, 16, 16), device)
    call = {"sinks": some_sinks(2, device), "alibi_slopes": slopes(2, device), "return_lse": True,
            "return_max_logits": True}  # fmt: skip
    for a, b in zip(dense(q, k, v, **call), flash_attn_func(q, k, v, backend="reference", **call), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_module_learns_sinks(device):
    q, k, v = (x.transpose(1, 2) for x in inputs((1, 8, 8, 2, 2, 16, 16), device))
    sinks = torch.nn.Parameter(torch.zeros(2, device=device))
    attention = FlashAttention3("bf16")
    attention(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes(2, device)).sum().backward()
    assert sinks.grad.abs().sum() > 0
    with pytest.raises(UnsupportedError, match="fp8 attention has no sinks: use precision"):
        FlashAttention3("fp8")(q, k, v, sinks=sinks)


WRONG = {
    "sinks-list": ({"sinks": [0.0, 0.0]}, "sinks must be a floating-point tensor .* got list"),
    "sinks-int": ({"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks must be .* got torch.int32"),
    "sinks-shape": ({"sinks": torch.zeros(3)}, r"shape \(heads,\) = \(2,\).* got torch.float32 \(3\)"),
    "sinks-device": ({"sinks": torch.zeros(2, device="meta")}, "sinks must be on the device of q"),
    "slopes-half": ({"alibi_slopes": torch.zeros(2, dtype=BF16)}, "alibi_slopes must be a float32 tensor"),
    "slopes-shape": ({"alibi_slopes": torch.zeros(2, 3)}, r"\(batch, heads\) = \(1, 2\), got torch.float32 \(2, 3\)"),
    "slopes-learned": ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes gets no gradient"),
    "maxima-flag": ({"return_max_logits": 1}, "return_max_logits must be True or False"),
    "invariant-flag": ({"batch_invariant": "yes"}, "batch_invariant must be True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    options, message = WRONG[name]
    q = torch.zeros(1, 5, 2, 16)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_func(q, q, q, **options)
    with pytest.raises(InvalidInputError, match=message):
        explain(q, q, q, **options)
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **options)


def test_explain_and_refusals(device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device)
    said = explain(q, k, v, sinks=some_sinks(2, device), return_max_logits=True)
    assert said.problem.features == {"sinks", "return_max_logits"} and "+sinks" in str(said.problem)
    assert said.backend == "portable" and "NVIDIA" in said.refused["hopper"]
    with pytest.raises(UnsupportedError, match="does not do alibi_slopes"):
        flash_attn_func(q, k, v, sinks=some_sinks(2, device), alibi_slopes=slopes(2, device), backend="blackwell")


def test_alibi_is_a_bias_of_torch(device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device)
    alibi = slopes(2, device)
    i = torch.arange(8, device=device)
    bias = -alibi[:, None, None] * (i[:, None] - i).abs()
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias[None])
    got = flash_attn_func(q, k, v, alibi_slopes=alibi)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)
