"""Feature maps: the features are what they say, and attention on them is the quadratic sum of its weights."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.thunderkittens import based_hopper, features
from gpu_accel.thunderkittens.features import fused_chunk_based, hedgehog_attention, parallel_based
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run


def quadratic(weights, v):
    weights = weights.tril()
    return torch.einsum("bhts,bshv->bthv", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)


def based_truth(q, k, v):
    x = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    return quadratic(1 + x + x * x / 2, v)


def hedgehog_truth(q, k, v, q_map, k_map):
    a, b = features.hedgehog_features(q, q_map), features.hedgehog_features(k, k_map)
    return quadratic(torch.einsum("bthf,bshf->bhts", a, b), v)


def test_products_of_features_are_the_series(device):
    x, y = randn(7, 16, seed=1, device=device).double(), randn(7, 16, seed=2, device=device).double()
    a, b = features.taylor_features(x), features.taylor_features(y)
    assert a.shape == (7, 153)
    inner = (x * y).sum(-1)
    torch.testing.assert_close((a * b).sum(-1), 1 + inner + inner**2 / 2)


def test_features_of_hedgehog_are_two_distributions(device):
    x, w = randn(1, 5, 2, 8, seed=1, device=device), randn(2, 8, 6, seed=2, device=device)
    found = features.hedgehog_features(x, w)
    assert found.shape == (1, 5, 2, 12) and (found > 0).all()
    torch.testing.assert_close(found.unflatten(-1, (2, 6)).sum(-1), torch.ones(1, 5, 2, 2, device=device))
    torch.testing.assert_close(found[0, 3, 1, 6:], (-(x[0, 3, 1] @ w[1])).softmax(0))


@pytest.mark.parametrize("seqlen", [1, 21])
def test_based(seqlen, device):
    q, k = (randn(1, seqlen, 2, 8, seed=s, device=device) for s in (1, 2))
    v, do = (randn(1, seqlen, 2, 24, seed=s, device=device) for s in (3, 4))

    def function(backend):
        return lambda q, k, v: fused_chunk_based(q, k, v, backend=backend)

    truth, ruler = run(based_truth, [q, k, v], [do], torch.float64), run(function("reference"), [q, k, v], [do])
    for name, *three in zip(["o", "dq", "dk", "dv"], run(function("portable"), [q, k, v], [do]), truth, ruler,
                            strict=True):  # fmt: skip
        close(name, *three)
    assert torch.equal(parallel_based(q, k, v), fused_chunk_based(q, k, v))


def test_hedgehog(device):
    q, k = (randn(1, 21, 2, 8, seed=s, device=device) for s in (1, 2))
    v, do = (randn(1, 21, 2, 24, seed=s, device=device) for s in (3, 4))
    maps = [randn(2, 8, 8, seed=s, device=device) for s in (5, 6)]

    def function(backend):
        return lambda *given: hedgehog_attention(*given, backend=backend)

    given = [q, k, v, *maps]
    truth, ruler = run(hedgehog_truth, given, [do], torch.float64), run(function("reference"), given, [do])
    names = ["o", "dq", "dk", "dv", "dq_map", "dk_map"]
    for name, *three in zip(names, run(function("portable"), given, [do]), truth, ruler, strict=True):
        close(name, *three)


@pytest.mark.parametrize(("seqlen", "key_dim", "count", "blocks"), [(21, 24, 8, 1), (1, 16, 40, 1), (85, 16, 8, 4)])
def test_hedgehog_map_in_a_kernel(seqlen, key_dim, count, blocks, device, monkeypatch):
    """bfloat16, as the kernel takes it: rows that are not a block, dimensions that are no power of two."""
    monkeypatch.setattr(features, "_MAP_BLOCKS", blocks)
    x = randn(2, seqlen, 2, key_dim, seed=1, device=device, dtype=torch.bfloat16)
    w = randn(2, key_dim, count, seed=2, device=device, dtype=torch.bfloat16)
    truth = features.hedgehog_features(x.double(), w.double())
    close("features", features.hedgehog_op(x, w), truth, features.hedgehog_features(x, w))
    grads = [randn(*truth.shape, seed=3, device=device)]
    ours, eager = (run(f, [x, w], grads) for f in (features.hedgehog_op, features.hedgehog_features))
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], eager[1:], strict=True))


@pytest.mark.parametrize(("seqlen", "key_dim", "value_dim"), [(150, 16, 72), (300, 8, 16)], ids=["K16", "K8"])
def test_based_by_the_source_of_its_walk(seqlen, key_dim, value_dim):
    """The Hopper kernel as it stands, in torch, with two heads a query."""
    q, k = (randn(2, seqlen, 1, key_dim, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    v = randn(2, seqlen, 2, value_dim, seed=3, dtype=torch.bfloat16)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        o = based_hopper.walk(q, k, v, 0.25, False)
    assert done == ["based_walk_kernel"]
    x = torch.einsum("btk,bsk->bts", q[:, :, 0].double(), k[:, :, 0].double()) * 0.25
    truth = torch.einsum("bts,bshv->bthv", (1 + x + x * x / 2).tril(), v.double())
    assert float((o - truth).norm()) <= 4e-3 * float(truth.norm())  # half a unit of bfloat16 is 2e-3 at most


@pytest.mark.parametrize(("seqlen", "key_dim", "value_dim", "norm"), [(70, 12, 24, True), (66, 16, 64, False)])
def test_based_with_features_in_registers(seqlen, key_dim, value_dim, norm, device):
    q, k = (randn(1, seqlen, 2, key_dim, seed=s, device=device, dtype=torch.bfloat16) for s in (1, 2))
    v, do = (randn(1, seqlen, 2, value_dim, seed=s, device=device, dtype=torch.bfloat16) for s in (3, 4))

    def function(backend):
        return lambda q, k, v: fused_chunk_based(q, k, v, use_norm=norm, backend=backend)

    def truth(q, k, v):
        x = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        w = (1 + x + x * x / 2).tril()
        return torch.einsum("bhts,bshv->bthv", w / (w.sum(-1, keepdim=True) + 1e-6) if norm else w, v)

    right, ruler = run(truth, [q, k, v], [do], torch.float64), run(function("reference"), [q, k, v], [do])
    found = run(function("portable"), [q, k, v], [do])
    close("o", found[0], right[0], ruler[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1:], ruler[1:], strict=True))


def test_without_the_norm_and_packed(device):
    q, k = (randn(1, 12, 1, 4, seed=s, device=device) for s in (1, 2))
    v = randn(1, 12, 1, 16, seed=3, device=device)
    x = torch.einsum("bthk,bshk->bhts", q, k)
    o = fused_chunk_based(q, k, v, 1.0, False)
    torch.testing.assert_close(o, torch.einsum("bhts,bshv->bthv", (1 + x + x * x / 2).tril(), v), rtol=1e-4, atol=1e-4)
    cu = torch.tensor([0, 5, 12], device=device)
    packed = fused_chunk_based(q, k, v, cu_seqlens=cu)
    torch.testing.assert_close(packed[:, 5:], fused_chunk_based(q[:, 5:], k[:, 5:], v[:, 5:]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_rows_behind_the_last_sequence_reach_nothing(backend, device):
    """Nor do they reach gradients, of the maps among them; a NaN of one sequence stays in it."""
    q, k, v, do = (randn(1, 20, 1, 8, seed=s, device=device) for s in range(4))
    maps = [randn(1, 8, 4, seed=s, device=device) for s in (5, 6)]
    cu = torch.tensor([0, 5, 16], device=device)
    for x in (q, k, v, do):
        x[:, 16:] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v, *maps)]
    for call, count in ((fused_chunk_based, 3), (hedgehog_attention, 5)):
        o = call(*leaves[:count], cu_seqlens=cu, backend=backend)
        assert (o[:, 16:] == 0).all()
        grads = torch.autograd.grad(o, leaves[:count], do)
        assert all(x.isfinite().all() for x in (o, *grads))
        bad = v.detach().clone()
        bad[:, 8] = torch.nan
        o = call(q, k, bad, *leaves[3:count], cu_seqlens=cu, backend=backend)
        assert o[:, :5].isfinite().all() and o[:, 8:16].isnan().all()


def test_wrong_arguments_are_refused(device):
    q, w = randn(1, 5, 2, 32, seed=1, device=device), randn(2, 32, 8, seed=2, device=device)
    with pytest.raises(InvalidInputError, match="561 features"):
        fused_chunk_based(q, q, q)
    with pytest.raises(InvalidInputError, match="k_map must be"):
        hedgehog_attention(q, q, q, w, w[:1])
    with pytest.raises(InvalidInputError, match="one number F"):
        hedgehog_attention(q, q, q, w, w[..., :4])
