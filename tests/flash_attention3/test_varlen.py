"""Packed sequences: each like by itself, whatever lies beside it in memory."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func, portable_forward
from gpu_accel.testing.attention import check_attention

FP16, FP32 = torch.float16, torch.float32


def packed(lengths_q, lengths_k, heads=2, heads_kv=None, d=16, dtype=FP32, device="cpu", extra=0, seed=0):
    """q, k, v and offsets; `extra` rows of NaN behind the last sequence."""
    g = torch.Generator().manual_seed(seed)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))

    def rows(n, h):
        x = torch.randn(n + extra, h, d, generator=g).to(dtype)
        x[n:] = float("nan")
        return x.to(device)

    heads_kv = heads_kv or heads
    tensors = rows(int(cu_q[-1]), heads), rows(int(cu_k[-1]), heads_kv), rows(int(cu_k[-1]), heads_kv)
    return *tensors, {"cu_seqlens_q": cu_q.to(device), "cu_seqlens_k": cu_k.to(device)}


def attention(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, return_lse=True, backend="portable", **options)


CASES = {
    "one-sequence": ([40], [40], {}),
    "unequal-lengths": ([5, 33, 1], [40, 3, 17], {}),
    "causal": ([5, 33, 20], [40, 33, 17], {"causal": True}),
    "zero-lengths-everywhere": ([0, 7, 0, 5, 0], [3, 0, 0, 20, 0], {"causal": True}),
    "nothing-at-all": ([0, 0], [0, 0], {}),
    "decode-steps": ([1, 1, 1], [33, 1, 40], {"causal": True}),
    "window": ([20, 40], [30, 40], {"causal": True, "window_size": (5, 0)}),
    "softcap": ([20, 7], [30, 9], {"softcap": 2.0}),
    # flash-attention issue 443: far more queries than keys, so that most rows see nothing
    "rows-see-nothing": ([38, 17, 30], [1, 1, 1], {"causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_case_with_gradients(name, device):
    lengths_q, lengths_k, options = CASES[name]
    q, k, v, cu = packed(lengths_q, lengths_k, device=device, heads=2, heads_kv=1)
    check_attention(attention, q, k, v, **cu, **options)


@pytest.mark.parametrize("name", ["unequal-lengths", "causal", "zero-lengths-everywhere", "window"])
def test_forward_through_descriptors(name, kernel_path, device):
    lengths_q, lengths_k, options = CASES[name]
    q, k, v, cu = packed(lengths_q, lengths_k, device=device, dtype=FP16)
    options = dict(options)
    left, right = options.pop("window_size", (-1, -1))
    right = 0 if options.pop("causal", False) else right

    def run(q, k, v, *, cu_seqlens_q, cu_seqlens_k, **_):
        return portable_forward.forward(
            q, k, v, softmax_scale=0.25, window_left=left, window_right=right, path=kernel_path,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        )  # fmt: skip

    check_attention(run, q, k, v, gradients=False, softmax_scale=0.25, window_size=(left, right), **cu)


def test_neighbours_do_not_leak(device):
    # NaN in one sequence must not reach the others, forward or backward: 0 * NaN is NaN
    lengths_q, lengths_k = [7, 20, 9], [18, 21, 5]
    q, k, v, cu = packed(lengths_q, lengths_k, device=device)
    for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        x[lengths[0] : lengths[0] + lengths[1]] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, causal=True, **cu)
    grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
    for x, lengths in ((o, lengths_q), (lse.T, lengths_q), (grads[0], lengths_q), *((g, lengths_k) for g in grads[1:])):
        middle = slice(lengths[0], lengths[0] + lengths[1])
        assert not x[: lengths[0]].isnan().any() and not x[middle.stop :].isnan().any()
    assert o[lengths_q[0] + 5].isnan().any()


def test_neighbours_do_not_leak_through_descriptors(kernel_path, device):
    q, k, v, cu = packed([7, 20, 9], [18, 21, 5], device=device)
    k[18:39], v[18:39] = float("nan"), float("nan")
    o, _ = portable_forward.forward(q, k, v, softmax_scale=0.25, path=kernel_path, **cu)
    assert not o[:7].isnan().any() and not o[27:].isnan().any() and o[7:27].isnan().all()


def test_rows_behind_the_last_sequence_are_zero(device):
    # flash-attention issue 1661: what happens there is part of the contract
    q, k, v, cu = packed([5, 12], [9, 20], extra=40, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves, **cu)
    grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert not o[17:].any() and (lse[:, 17:] == float("-inf")).all()
    assert not grads[0][17:].any() and not grads[1][29:].any() and not grads[2][29:].any()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_seqused(causal, device):
    q, k, v, cu = packed([10, 40, 5], [35, 20, 8], device=device)
    used_q = torch.tensor([3, 40, 0], dtype=torch.int32, device=device)
    used_k = torch.tensor([20, 17, 8], dtype=torch.int32, device=device)
    check_attention(attention, q, k, v, seqused_q=used_q, seqused_k=used_k, causal=causal, **cu)


@pytest.mark.parametrize("options", [{"window_size": (0, 0)}, {"window_size": (4, -1), "causal": True}], ids=str)
def test_windows_of_tiles_behind_the_last_row_that_counts(options, device):
    # 70 rows of which 20 count, 40 keys of which 2 do: the window of row 64 would begin at key 46, beyond all of them
    q, k, v, cu = packed([70, 9], [40, 9], device=device)
    used_q, used_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([20, 9], [2, 9]))
    k[2:40], v[2:40] = float("nan"), float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = attention(*leaves, seqused_q=used_q, seqused_k=used_k, **options, **cu)
    grads = torch.autograd.grad(o.square().sum(), leaves)
    assert o.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert not o[20:70].any() and not grads[0][20:70].any()


def test_seqused_hides_poison(device):
    # FlashInfer issue 941: NaN in the unused slots of a page
    q, k, v, cu = packed([6], [16], device=device)
    k[13:], v[13:] = float("nan"), float("nan")
    used = torch.tensor([13], dtype=torch.int32, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, _ = attention(*leaves, seqused_k=used, **cu)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert o.isfinite().all() and all(g.isfinite().all() for g in grads)
    assert not grads[1][13:].any() and not grads[2][13:].any()


def test_equal_lengths_are_the_dense_call(device):
    q, k, v, cu = packed([20, 20], [33, 33], device=device, dtype=FP16)
    o = flash_attn_varlen_func(q, k, v, **cu, causal=True, backend="portable")
    dense = flash_attn_func(*(x.unflatten(0, (2, -1)) for x in (q, k, v)), causal=True, backend="portable")
    torch.testing.assert_close(o, dense.flatten(0, 1), rtol=0, atol=2e-3)


def test_maximum_lengths_are_not_needed_and_do_not_change_anything(device):
    q, k, v, cu = packed([5, 30], [9, 20], device=device)
    o = flash_attn_varlen_func(q, k, v, **cu)
    assert torch.equal(o, flash_attn_varlen_func(q, k, v, **cu, max_seqlen_q=30, max_seqlen_k=20))
    assert torch.equal(o, flash_attn_varlen_func(q, k, v, **cu, max_seqlen_q=torch.tensor(999)))


PUBLIC_REPORTS = {
    # flash-attention 1214: leading values of some heads unwritten
    "fa1214-hdim192": ([3], [7], 16, 16, 192),
    # flash-attention 1537: one query at most, and empty sequences
    "fa1537-empty-and-decode": ([0, 1, 0, 1], [0, 3, 0, 5], 9, 3, 64),
    # flash-attention 1619: fewer rows than sequences
    "fa1619-total-below-batch": ([0, 0, 0, 1], [0, 0, 0, 1], 21, 7, 120),
    # flash-attention 1254 (shortened): backward with empty sequences beside a long one
    "fa1254-empty-beside-long": ([0, 0, 43], [0, 1, 85], 2, 2, 16),
}


@pytest.mark.parametrize("name", PUBLIC_REPORTS)
def test_public_reports(name, device):
    lengths_q, lengths_k, heads, heads_kv, d = PUBLIC_REPORTS[name]
    q, k, v, cu = packed(lengths_q, lengths_k, heads, heads_kv, d, FP16, device)
    check_attention(attention, q, k, v, causal=True, **cu)


def test_many_sequences(device):
    # more sequences than one lookup of 32, most of them shorter than a block
    lengths = [i % 5 for i in range(45)]
    q, k, v, cu = packed(lengths, lengths[::-1], heads=1, device=device)
    check_attention(attention, q, k, v, causal=True, **cu)


def _column(x):
    """The same numbers with stride 2 and other numbers between them."""
    return torch.stack([x, torch.full_like(x, 3)], 1)[:, 0]


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_index_tensors_of_any_stride(name, backend, device):
    q, k, v, cu = packed([5, 5, 5], [9, 9, 9], device=device)
    used = torch.tensor([3, 3, 3], dtype=torch.int32, device=device)
    given = {**cu, "seqused_q": used, "seqused_k": used + 1}

    def run(options):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o, lse = flash_attn_varlen_func(*leaves, return_lse=True, backend=backend, **options)
        return o, lse, *torch.autograd.grad(o.square().sum(), leaves)

    expected = run(given)
    views = [_column(given[name])]
    if name.startswith("seqused"):
        views.append(given[name][:1].expand(3))
    for view in views:
        assert view.stride(0) != 1 and torch.equal(view, given[name])
        for got, want in zip(run({**given, name: view}), expected, strict=True):
            assert torch.equal(got, want)
