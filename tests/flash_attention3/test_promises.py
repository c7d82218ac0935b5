"""Promises about bits: the same every time, and a row's own affair; and about what surrounds attention in training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import config as configs
from gpu_accel.flash_attention3 import explain, flash_attn_func, flash_attn_varlen_func, function, portable_forward
from gpu_accel.flash_attention3.features import Features
from gpu_accel.testing import attention_truth_backward, make_qkv

FP32 = torch.float32


def inputs(batch, sq, sk, heads=2, heads_kv=1, d=16, dtype=FP32, device="cpu", kind="normal"):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, dtype=dtype,
                    device=device, kind=kind)  # fmt: skip


def same(*results):
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def packed(rows, lengths, device, **options):
    """Attention over the first `lengths` rows of each sequence in `rows`: a list of (q, k, v) without a batch."""
    q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    ends = torch.tensor([0, *(len(x[0]) for x in rows)], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, seqused_q=used, seqused_k=used,
                                  return_lse=True, batch_invariant=True, **options)  # fmt: skip


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (5, 3)}], ids=["causal", "window"])
def test_rows_do_not_depend_on_the_batch(options, device):
    # vllm 51902, flash-attention 1897: the tile or the split depended on the neighbours
    q, k, v = inputs(3, 33, 33, heads=1, dtype=torch.float16, device=device)
    call = {"return_lse": True, "batch_invariant": True, **options}
    o, lse = flash_attn_func(q, k, v, **call)
    alone = flash_attn_func(q[1:2], k[1:2], v[1:2], **call)
    assert same((o[1:2], lse[1:2]), alone)
    twice = flash_attn_func(*(x[[1, 0, 1]] for x in (q, k, v)), **call)
    for at in (0, 2):
        assert same((twice[0][at : at + 1], twice[1][at : at + 1]), alone)


def test_packed_rows_do_not_depend_on_neighbours_or_padding(device):
    rows = [tuple(x[0] for x in inputs(1, n, n, heads=1, dtype=torch.float16, device=device)) for n in (10, 33, 50)]
    o, lse = packed(rows[1:2], [33], device, causal=True)
    for before, after, length in ((rows[:1], rows[2:], 33), (rows[2:], [], 33), ([], rows[:1], 33)):
        sequences = [*before, rows[1], *after]
        start = sum(len(x[0]) for x in before)
        got_o, got_lse = packed(sequences, [len(x[0]) for x in sequences], device, causal=True)
        assert same((got_o[start : start + length], got_lse[:, start : start + length]), (o, lse))
    padded = tuple(torch.cat([x, torch.full_like(x[:1], 9.0).expand(17, -1, -1)]) for x in rows[1])
    got_o, got_lse = packed([padded], [33], device, causal=True)
    assert same((got_o[:33], got_lse[:, :33]), (o, lse))


def test_padding_behind_a_causal_row_changes_nothing(device):
    q, k, v = inputs(1, 37, 37, dtype=torch.float16, device=device)
    call = {"causal": True, "return_lse": True, "batch_invariant": True}
    o, lse = flash_attn_func(q, k, v, **call)
    longer = flash_attn_func(*(torch.cat([x, x[:, :20]], 1) for x in (q, k, v)), **call)
    assert same((longer[0][:, :37], longer[1][..., :37]), (o, lse))


@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_is_pinned(causal, monkeypatch):
    # on a GPU: few queries, or a window that turns out to hide nothing, would choose other tiles
    seen = []

    def lookup(pass_, dtype, head_dim, head_dim_v, **how):
        how.pop("seqlen_q")
        seen.append((pass_, how))
        return configs.INTERPRETER[pass_]

    monkeypatch.setattr(configs, "lookup", lookup)
    switches = []
    monkeypatch.setattr(portable_forward, "launch", lambda *launch: switches.append(launch[3]))
    for sq, sk in ((1, 1), (1, 64), (33, 64), (64, 64)):
        q, k, v = inputs(1, sq, sk)
        window = {"window_left": 40, "window_right": 0 if causal else 3}
        portable_forward.forward(q, k, v, softmax_scale=0.25, features=Features(batch_invariant=True), **window)
    assert all(x == seen[0] for x in seen) and seen[0][1]["varlen"] and seen[0][1]["causal"] == causal
    assert all(x == switches[0] for x in switches)


def test_short_queries_choose_the_same_tile_when_pinned():
    key = ("forward", torch.bfloat16, 128, 128)
    table = configs.table("sm90")
    assert configs.SHORT[True] not in table.values()  # what an unpinned short query would get
    cpu = torch.device("cpu")
    pinned = [configs.lookup(*key, causal=True, seqlen_q=n, varlen=True, device=cpu) for n in (1, 4096)]
    assert pinned[0] == pinned[1]


def test_only_kernels_that_promise_it_are_taken(device, monkeypatch):
    q, k, v = inputs(1, 8, 8, device=device)
    assert explain(q, k, v, batch_invariant=True).backend == "portable"
    monkeypatch.setattr(portable_forward, "FEATURES", portable_forward.FEATURES - {"batch_invariant"})
    with pytest.raises(UnsupportedError, match="does not do batch_invariant"):
        explain(q, k, v, batch_invariant=True, backend="portable")


def test_a_backward_without_features_serves_what_only_the_forward_has_to_know(device, monkeypatch):
    # maxima and batch invariance are the forward's affair: any backward will do, and is not told
    told = []
    real = function.module

    def module(backend, pass_):
        found = real(backend, pass_)
        if pass_ == "forward":
            return found

        def backward(*tensors, **options):
            told.append(options)
            return found.backward(*tensors, **options)

        return SimpleNamespace(backward=backward)

    monkeypatch.setattr(function, "module", module)
    q, k, v = (x.requires_grad_() for x in inputs(1, 8, 8, device=device))
    o, maxima = flash_attn_func(q, k, v, return_max_logits=True, batch_invariant=True)
    o.sum().backward()
    flash_attn_func(q, k, v, sinks=torch.zeros(2, device=device)).sum().backward()
    assert ["features" in options for options in told] == [False, True] and maxima.shape == (2,)


@pytest.mark.parametrize("d", [16, 24, 128])
def test_deterministic_backward(d, device):
    q, k, v = (x.requires_grad_() for x in inputs(1, 20, 35, d=d, dtype=torch.float16, device=device))
    sinks = torch.zeros(2, device=device, requires_grad=True)
    do = torch.randn(1, 20, 2, d, device=device, dtype=torch.float16)

    def run():
        o = flash_attn_func(q, k, v, causal=True, sinks=sinks, deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v, sinks), do)

    assert same(run(), run())


# ---- training


def test_autocast_with_features(device):
    q, k, v = (x.requires_grad_() for x in inputs(1, 20, 20, device=device))
    sinks = torch.zeros(2, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        o = flash_attn_func(q, k, v, sinks=sinks, causal=True)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == sinks.grad.dtype == FP32
    assert all(x.grad.isfinite().all() for x in (q, k, v, sinks))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_activation_checkpointing(with_sinks, reentrant, device):
    leaves = [x.requires_grad_() for x in inputs(1, 20, 20, device=device)]
    if with_sinks:
        leaves.append(torch.zeros(2, device=device, requires_grad=True))

    def block(q, k, v, sinks=None):
        return flash_attn_func(q * 2, k, v, causal=True, sinks=sinks)

    direct = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    checkpoint(block, *leaves, use_reentrant=reentrant).square().sum().backward()
    assert same(direct, [x.grad for x in leaves])


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_views_of_one_projection_and_a_broadcast_gradient(with_sinks, device):
    # flash-attention 2541, 355, pytorch 138529: q, k, v are slices of (batch, seqlen, 3, heads, d), dout is expand()ed
    torch.manual_seed(0)
    qkv = torch.randn(2, 18, 3, 2, 16, device=device, requires_grad=True)
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True) if with_sinks else None
    o = flash_attn_func(*qkv.unbind(2), causal=True, sinks=sinks)
    assert not qkv.unbind(2)[0].is_contiguous()
    o.sum().backward()
    q, k, v = (x.detach() for x in qkv.unbind(2))
    options = {} if sinks is None else {"sinks": sinks.detach()}
    truth = attention_truth_backward(torch.ones_like(q), q, k, v, causal=True, **options)
    torch.testing.assert_close(qkv.grad.double(), torch.stack(truth[:3], 2), rtol=0, atol=2e-5)
    if sinks is not None:
        torch.testing.assert_close(sinks.grad.double(), truth[3], rtol=0, atol=2e-4)


def test_packed_views_of_one_projection(device):
    torch.manual_seed(0)
    qkv = torch.randn(30, 3, 2, 16, device=device, requires_grad=True)
    cu = torch.tensor([0, 0, 13, 30], dtype=torch.int32, device=device)
    o = flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    do = torch.ones(1, 1, 1, device=device).expand_as(o)
    (grad,) = torch.autograd.grad(o, qkv, do)
    q, k, v = (x.detach() for x in qkv.unbind(1))
    truth = attention_truth_backward(torch.ones_like(q), q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    torch.testing.assert_close(grad.double(), torch.stack(truth, 1), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("d", "dv"), [(16, 128), (128, 16), (40, 104), (192, 128), (8, 256)], ids=lambda x: str(x)
)
def test_head_dims_of_q_and_v_are_free(d, dv, device):
    from gpu_accel.testing.features import check_features

    q, k, v = make_qkv(batch=1, seqlen_q=18, seqlen_k=20, heads=2, heads_kv=1, head_dim=d, head_dim_v=dv, dtype=FP32,
                       device=device)  # fmt: skip
    check_features(flash_attn_func, q, k, v, causal=True)
