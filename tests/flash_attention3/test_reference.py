"""The reference is what everything else is compared with, so it is compared with other people's definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from gpu_accel.flash_attention3 import reference
from gpu_accel.flash_attention3.reference import (
    attention_backward_reference,
    attention_reference,
    attention_truth,
    visible,
)


def qkv(sq=7, sk=9, heads=4, heads_kv=2, d=8, dv=8, batch=2, requires_grad=False):
    g = torch.Generator().manual_seed(sq * 31 + sk)
    shapes = ((batch, sq, heads, d), (batch, sk, heads_kv, d), (batch, sk, heads_kv, dv))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).requires_grad_(requires_grad) for s in shapes)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_is_scaled_dot_product_attention(causal):
    q, k, v = qkv(sq=9, sk=9)
    o, _ = attention_reference(q, k, v, causal=causal)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(o, expected.transpose(1, 2))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 1), "softcap": 2.0}], ids=str)
def test_pieces_are_the_whole(options, monkeypatch):
    """All pairs of entries and key heads at once, some at a time, one by one, and one in pieces of rows."""
    q, k, v = qkv(sq=9, sk=8, dv=16)
    do, dlse = torch.randn(2, 9, 4, 16).double(), torch.randn(2, 4, 9).double()
    found = []
    for elements in (1 << 25, 300, 200, 40):
        monkeypatch.setattr(reference, "_CHUNK", elements)
        o, lse = attention_truth(q, k, v, **options)
        found.append((o, lse, *attention_backward_reference(do, q, k, v, dlse=dlse, dtype=torch.float64, **options)))
    sequences = dict.fromkeys(("cu_seqlens_q",), torch.tensor([0, 9, 18])) | {"cu_seqlens_k": torch.tensor([0, 8, 16])}
    packed = (x.flatten(0, 1) for x in (q, k, v))  # one sequence and key head after the other
    o, lse = attention_truth(*packed, **sequences, **options)
    found.append((o.view(2, 9, 4, 16), lse.view(4, 2, 9).transpose(0, 1), *found[0][2:]))
    for one in found[1:]:
        for a, b in zip(one, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_bottom_right_alignment_by_hand():
    # two queries, five keys: the last query sees all, the one before it all but the last
    assert visible(torch.arange(2), 2, 5, -1, 0).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    # more queries than keys: the first ones see nothing
    assert visible(torch.arange(3), 3, 1, -1, 0).tolist() == [[0], [0], [1]]


def test_window_includes_both_ends():
    # a sliding window of three keys with the query itself is left = 2
    assert visible(torch.arange(4), 4, 4, 2, 0)[3].tolist() == [0, 1, 1, 1]
    assert visible(torch.arange(4), 4, 4, 1, 1)[1].tolist() == [1, 1, 1, 0]
    assert visible(torch.arange(4), 4, 4, 0, 0).tolist() == torch.eye(4).tolist()


@pytest.mark.parametrize("none", [(-1, -1), (None, None), (-7, None)])
def test_no_window(none):
    q, k, v = qkv()
    torch.testing.assert_close(attention_reference(q, k, v, window_size=none), attention_reference(q, k, v))


def test_lse_is_the_natural_logarithm():
    q, k, v = qkv(heads_kv=4)
    _, lse = attention_reference(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_softcap_by_hand():
    q, k, v = qkv(heads_kv=4)
    o, _ = attention_reference(q, k, v, softcap=1.5, softmax_scale=0.7)
    scores = 1.5 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.7 / 1.5)
    torch.testing.assert_close(o, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))


def test_rows_that_see_nothing_are_zero_and_harmless():
    q, k, v = qkv(sq=6, sk=2, requires_grad=True)
    o, lse = attention_reference(q, k, v, causal=True)
    assert torch.equal(o[:, :4], torch.zeros_like(o[:, :4]))
    assert (lse[..., :4] == float("-inf")).all() and lse[..., 4:].isfinite().all()
    grads = torch.autograd.grad(o.square().sum() + lse[..., 4:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert torch.equal(grads[0][:, :4], torch.zeros_like(grads[0][:, :4]))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 2.0, "causal": True}],
    ids=["full", "causal", "window", "softcap"],
)
def test_gradcheck_of_output_and_lse(options):
    inputs = qkv(sq=3, sk=4, heads=2, heads_kv=1, d=4, dv=3, batch=1, requires_grad=True)

    def call(q, k, v):
        o, lse = attention_reference(q, k, v, **options)
        return o, torch.where(lse == float("-inf"), 0.0, lse)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 0), "softcap": 3.0}])
def test_written_out_backward_is_autograd(options, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK", 20)  # several chunks of rows
    q, k, v = qkv(sq=11, sk=6, requires_grad=True)
    o, lse = attention_reference(q, k, v, **options)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    live = torch.where(lse == float("-inf"), 0.0, lse)
    expected = torch.autograd.grad((o * do).sum() + (live * dlse).sum(), (q, k, v))
    dlse = torch.where(lse == float("-inf"), 0.0, dlse)
    got = attention_backward_reference(do, q.detach(), k.detach(), v.detach(), dlse=dlse, **options)
    torch.testing.assert_close(got, expected)


def test_chunks_change_nothing(monkeypatch):
    q, k, v = qkv(sq=13)
    whole = attention_reference(q, k, v, causal=True)
    monkeypatch.setattr(reference, "_CHUNK", 1)
    torch.testing.assert_close(attention_reference(q, k, v, causal=True), whole)


def test_packed_is_each_sequence_by_itself():
    lengths_q, lengths_k = [3, 0, 5], [4, 2, 1]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    q, k, v = (x[0] for x in qkv(sq=10, sk=9, batch=1))  # two rows of each belong to nobody
    o, lse = attention_reference(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:], strict=False), zip(cu_k, cu_k[1:], strict=False), strict=True):
        one, one_lse = attention_reference(q[None, a:b], k[None, c:d], v[None, c:d], causal=True)
        torch.testing.assert_close(o[a:b], one[0])
        torch.testing.assert_close(lse[:, a:b], one_lse[0])
    assert torch.equal(o[8:], torch.zeros_like(o[8:])) and (lse[:, 8:] == float("-inf")).all()


def test_seqused_shortens_sequences():
    q, k, v = (x[0] for x in qkv(sq=8, sk=8, batch=1))
    cu = torch.tensor([0, 8], dtype=torch.int32)
    used_q, used_k = torch.tensor([5], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    o, _ = attention_reference(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used_q, seqused_k=used_k, causal=True
    )
    expected, _ = attention_reference(q[None, :5], k[None, :6], v[None, :6], causal=True)
    torch.testing.assert_close(o[:5], expected[0])
    assert torch.equal(o[5:], torch.zeros_like(o[5:]))


def test_truth_is_float64_whatever_comes_in():
    q, k, v = (x.to(torch.bfloat16) for x in qkv())
    o, lse = attention_truth(q, k, v)
    assert o.dtype == lse.dtype == torch.float64
    o, lse = attention_reference(q, k, v)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32


@pytest.mark.parametrize("sq,sk,batch", [(0, 3, 2), (3, 0, 2), (3, 3, 0)], ids=["no-queries", "no-keys", "no-batch"])
def test_nothing_in_nothing_out(sq, sk, batch):
    q, k, v = qkv(sq=sq, sk=sk, batch=batch)
    o, lse = attention_reference(q, k, v)
    assert o.shape == (batch, sq, 4, 8) and lse.shape == (batch, 4, sq)
    assert not o.any() and (lse == float("-inf")).all() if sk == 0 else True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_references_ignore_autocast(dtype, device):
    from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_reference
    from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference, quantize_reference

    g = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 12, 2, 16, generator=g).to(device) for _ in range(4))

    def everything():
        o, lse = attention_reference(q, k, v, causal=True)
        fp8 = [y for x in (q, k, v) for y in quantize_reference(x.transpose(1, 2), 128, hadamard=True)]
        p = fp8_attention_reference(*fp8[0::2], *fp8[1::2], causal=True)
        return o, lse, *attention_backward_reference(do, q, k, v, o=o, lse=lse, causal=True), *p

    expected = everything()
    with torch.autocast(device, dtype):
        got = everything()
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_gradients_of_the_reference_backend_under_autocast(device):
    from gpu_accel.flash_attention3 import flash_attn_func

    q = torch.randn(1, 6, 2, 16, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        o = flash_attn_func(q, q, q, backend="reference")
        o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and q.grad.dtype == torch.float32
