"""Windows of softmax beside linear attention, against the quadratic sum of their weights in float64."""

from __future__ import annotations

import pytest
import torch

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import hedgehog_fused, hedgehog_hopper, windowed
from gpu_accel.thunderkittens.features import fused_chunk_based, hedgehog_attention, hedgehog_features, hedgehog_op
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ["o", "dq", "dk", "dv", "dq_map", "dk_map", "dwindow_factor", "dlinear_factor"]


def masks(seqlen, window, device):
    row = torch.arange(seqlen, device=device)
    late = row[:, None] - row[None, :]
    return (late >= 0) & (late < window), late >= window


def scores(q, k, group, scale=None):
    s = torch.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return s.repeat_interleave(group, 1)


def hedgehog_truth(window, scale=None):
    def call(q, k, v, q_map, k_map, window_factor=None, linear_factor=None):
        near, far = masks(q.shape[1], window, q.device)
        group = v.shape[2] // q.shape[2]
        s = scores(q, k, group, scale).masked_fill(~near, -torch.inf)
        before = torch.einsum("bthf,bshf->bhts", hedgehog_features(q, q_map), hedgehog_features(k, k_map))
        before = before.repeat_interleave(group, 1) * far
        inside = (s - s.amax(-1, keepdim=True)).exp()
        if window_factor is not None:
            inside, before = inside * window_factor[:, None, None], before * linear_factor[:, None, None]
        total = (inside + before).sum(-1, keepdim=True) + windowed.FLOOR
        return torch.einsum("bhts,bshv->bthv", (inside + before) / total, v)

    return call


def based_truth(window):
    def call(q, k, v):
        near, far = masks(q.shape[1], window, q.device)
        x = scores(q, k, v.shape[2] // q.shape[2])
        w = torch.where(near, x, -torch.inf).exp() + (1 + x + x * x / 2) * far
        return torch.einsum("bhts,bshv->bthv", w / w.sum(-1, keepdim=True), v)

    return call


def hedgehog(window, backend, **more):
    def call(q, k, v, q_map, k_map, window_factor=None, linear_factor=None):
        return tk.hedgehog_attention(
            q, k, v, q_map, k_map, window=window, window_factor=window_factor, linear_factor=linear_factor,
            backend=backend, **more,
        )  # fmt: skip

    return call


def judge(names, mine, truth, ruler):
    for name, *three in zip(names, mine, truth, ruler, strict=True):
        close(name, *three, narrow=mine[0].dtype == BF16)


def tensors(seqlen, heads, key_dim, value_dim, count, device, dtype=FP32, group=1):
    q, k = (randn(2, seqlen, heads, key_dim, seed=s, device=device, dtype=dtype) for s in (1, 2))
    v = randn(2, seqlen, heads * group, value_dim, seed=3, device=device, dtype=dtype)
    maps = [(randn(heads, key_dim, count, seed=s, device=device) / key_dim**0.5).to(dtype) for s in (4, 5)]
    factors = [1.5 + torch.tanh(randn(heads * group, seed=s, device=device)) for s in (6, 7)]
    return [q, k, v, *maps, *factors], [randn(*v.shape, seed=8, device=device)]


# 12 is no multiple of 8, as the window's kernels want; windows that end in a block, that are one token, and all of it
@pytest.mark.parametrize(
    ("seqlen", "window", "key_dim", "dtype"),
    [(37, 5, 8, FP32), (21, 1, 12, FP32), (21, 40, 8, FP32), (40, 17, 16, BF16)],
)
def test_hedgehog_with_a_window(seqlen, window, key_dim, dtype, device):
    given, grads = tensors(seqlen, 2, key_dim, 24, 8, device, dtype)
    truth = run(hedgehog_truth(window), given, grads, torch.float64)
    ruler = run(hedgehog(window, "reference"), given, grads)
    judge(NAMES, run(hedgehog(window, "portable"), given, grads), truth, ruler)


# the window ends in a block, is a block, is longer than the sequence; heads that share queries
@pytest.mark.parametrize(("seqlen", "window", "group"), [(37, 5, 1), (33, 16, 3), (9, 40, 1)])
def test_hedgehog_with_a_window_in_one_kernel(seqlen, window, group, device):
    given, grads = tensors(seqlen, 2, 12, 24, 8, device, torch.float16, group)
    mine = run(hedgehog(window, "portable", fused=True), given, grads)
    truth = run(hedgehog_truth(window), given, grads, torch.float64)
    judge(NAMES, mine, truth, run(hedgehog(window, "reference"), given, grads))


# two blocks behind the window and a tail, with factors; the window has all; K and V that are padded, heads that share
@pytest.mark.parametrize(("seqlen", "key_dim", "value_dim", "group", "factors"), [
    (270, 128, 128, 1, True), (70, 64, 128, 1, False), (200, 40, 72, 2, True)
])  # fmt: skip
def test_hedgehog_in_one_walk(seqlen, key_dim, value_dim, group, factors, monkeypatch):
    """The Hopper kernel as it stands, in torch."""
    given, _ = tensors(seqlen, 1, key_dim, value_dim, 64, "cpu", BF16, group)
    given = given if factors else given[:5]
    monkeypatch.setattr(hedgehog_fused, "WHOLE", True)
    monkeypatch.setattr(hedgehog_hopper, "machine_refusal", lambda _: None)
    options = [*given, None, None][:7]
    with gluon_in_torch.kernels_on_a_cpu() as done:
        o = hedgehog_fused.window_op(*options, 128, key_dim**-0.5, True)
    assert done == ["hedgehog_walk_kernel"]
    close("o", o, hedgehog_truth(128)(*(x.double() for x in given)), hedgehog(128, "reference")(*given), narrow=True)


def test_what_the_walk_refuses():
    q, m = torch.zeros(1, 300, 2, 64, dtype=BF16), torch.zeros(2, 64, 64, dtype=BF16)

    def why(q=q, v=q, m=m, window=128, scale=0.1):
        return hedgehog_hopper.size_refusal(q, v, m, window, scale)

    assert why() is None and "window has 128" in why(window=64) and "64 features" in why(m=m[..., :32])
    assert "K must be" in why(q=q[..., :12]) and "above 0" in why(scale=-1.0) and "above 0" in why(scale=0.0)


def test_one_kernel_is_refused_where_it_is_not(device):
    given, _ = tensors(9, 1, 8, 8, 4, device)
    with pytest.raises(UnsupportedError, match=r"fused=True: takes bfloat16 and float16, got torch.float32"):
        hedgehog(4, "portable", fused=True)(*given)
    with pytest.raises(UnsupportedError, match="fused=True: backend 'reference'"):
        hedgehog(4, "reference", fused=True)(*(x.half() for x in given[:5]))
    with pytest.raises(InvalidInputError, match="fused belongs to a window"):
        tk.hedgehog_attention(*given[:5], fused=True)


@pytest.mark.parametrize("scale", [0.7, -2.0, 0.0])
def test_heads_that_share_queries_and_a_scale(scale, device):
    given, grads = tensors(19, 1, 8, 16, 8, device, group=3)
    truth = run(hedgehog_truth(6, scale), given, grads, torch.float64)
    ruler = run(hedgehog(6, "reference", scale=scale), given, grads)
    judge(NAMES, run(hedgehog(6, "portable", scale=scale), given, grads), truth, ruler)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_any_scale_of_based(scale, device):
    given, grads = tensors(19, 1, 8, 16, 8, device)

    def function(backend):
        return lambda q, k, v: tk.fused_chunk_based(q, k, v, scale, window=3, backend=backend)

    given = given[:3]
    truth, ruler = run(function("reference"), given, grads, torch.float64), run(function("reference"), given, grads)
    judge(NAMES[:4], run(function("portable"), given, grads), truth, ruler)


@pytest.mark.parametrize(("seqlen", "window", "dtype"), [(37, 5, FP32), (35, 16, BF16), (5, 9, FP32)])
def test_based_with_a_window(seqlen, window, dtype, device):
    given, grads = tensors(seqlen, 2, 8, 24, 8, device, dtype)

    def function(backend):
        return lambda q, k, v: tk.fused_chunk_based(q, k, v, window=window, backend=backend)

    given = given[:3]
    truth, ruler = run(based_truth(window), given, grads, torch.float64), run(function("reference"), given, grads)
    judge(NAMES[:4], run(function("portable"), given, grads), truth, ruler)


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_a_key_that_is_not_finite_does_not_reach_the_past(backend, device):
    q, k, v = (randn(1, 20, 1, 8, seed=s, device=device) for s in range(3))
    k[:, 10] = torch.nan
    w = randn(1, 8, 4, seed=4, device=device)
    for o in (
        tk.linear_attention(q, k, v, backend=backend)[0],
        tk.fused_chunk_based(q, k, v, window=3, backend=backend),
        tk.hedgehog_attention(q, k, v, w, w, window=3, backend=backend),
    ):
        assert o[:, :10].isfinite().all() and o[:, 10:].isnan().all()


def test_in_float64_the_reference_is_the_truth(device):
    given, grads = tensors(37, 2, 8, 24, 8, device)
    mine, truth = (run(f, given, grads, torch.float64) for f in (hedgehog(5, "reference"), hedgehog_truth(5)))
    for one, other in zip(mine, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [-200.0, 200.0])
def test_scores_beyond_the_range_of_exp(size, device):
    """All scores of a window are `size` or so: exp of them is 0 or infinite, and the shares of both parts are not."""
    q = torch.full((1, 24, 1, 8), 1.0, device=device)
    k = torch.full((1, 24, 1, 8), size / 8, device=device) + randn(1, 24, 1, 8, seed=1, device=device)
    v, do = randn(1, 24, 1, 16, seed=2, device=device), [randn(1, 24, 1, 16, seed=3, device=device)]

    def function(backend):
        return lambda q, k, v: tk.fused_chunk_based(q, k, v, 1.0, window=6, backend=backend)

    def truth(q, k, v):
        near, far = masks(24, 6, device)
        x = scores(q, k, 1, 1.0)
        w = torch.where(near, x, -torch.inf).exp() + (1 + x + x * x / 2) * far
        return torch.einsum("bhts,bshv->bthv", w / w.sum(-1, keepdim=True), v)

    right = run(truth, [q, k, v], do, torch.float64)  # float64 reaches exp(709)
    for backend in ("reference", "portable"):
        found = run(function(backend), [q, k, v], do)
        assert all(x.isfinite().all() for x in found)
        torch.testing.assert_close(found[0], right[0].float(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["hedgehog", "based"])
@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_packed_sequences_are_as_one_by_one(backend, name, device):
    """Lengths 13, 0, 7 and 2 of 26 rows; what lies behind them is NaN, and reaches nothing."""
    given, grads = tensors(26, 2, 8, 16, 8, device)
    given, grads = [x[:1].clone() if x.dim() == 4 else x for x in given], [grads[0][:1].clone()]
    edges = [0, 13, 13, 20, 22]
    cu = torch.tensor(edges, device=device)
    for x in (*given[:3], *grads):
        x[:, 22:] = torch.nan
    grads[0][:, 22:] = 0.0

    def call(q, k, v, *others, cu=None):
        if name == "based":
            return tk.fused_chunk_based(q, k, v, window=4, cu_seqlens=cu, backend=backend)
        return tk.hedgehog_attention(
            q, k, v, *others[:2], window=4, window_factor=others[2], linear_factor=others[3], cu_seqlens=cu,
            backend=backend,
        )  # fmt: skip

    def one_by_one(*leaves):
        parts = zip(edges, edges[1:], strict=False)
        outs = [call(*(x[:, a:b] for x in leaves[:3]), *leaves[3:]) for a, b in parts]
        return torch.cat([*outs, torch.zeros_like(leaves[2][:, 22:])], 1)

    leaves = given if name == "hedgehog" else given[:3]
    mine, wanted = run(lambda *x: call(*x, cu=cu), leaves, grads), run(one_by_one, leaves, grads)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_custom_ops(device):
    q, k = (randn(1, 9, 2, 8, seed=s, device=device).requires_grad_() for s in (1, 2))
    low = windowed.Places(q, 4, None).low
    torch.library.opcheck(windowed.maximum_op, (q, k, low, 0.5))
    o, n = randn(1, 9, 2, 8, seed=3, device=device), randn(1, 5, 2, 8, seed=4, device=device)
    a, b = (randn(1, 9, 2, seed=s, device=device) for s in (5, 6))
    leaves = [x.requires_grad_() for x in (o, n, a, b)]
    torch.library.opcheck(windowed.mix_op, leaves)
    do = [randn(1, 9, 2, 8, seed=7, device=device)]
    for one, other in zip(run(windowed.mix_op, leaves, do), run(windowed.mix_reference, leaves, do), strict=True):
        torch.testing.assert_close(one, other)


def test_the_largest_score_is_found_with_its_key(device):
    """Ties go to the first key; a row without keys has 0 and none."""
    q, k = randn(1, 40, 1, 8, seed=1, device=device), randn(1, 40, 1, 8, seed=2, device=device)
    k[:, 20:23] = 5 * q[:, 25:26]
    places = windowed.Places(q, 7, torch.tensor([0, 30, 38], device=device))
    largest, where = windowed.maximum_op(q, k, places.low, 1.0)
    s = (q[0, :, 0] @ k[0, :, 0].T).masked_fill(~masks(40, 7, device)[0], -torch.inf)
    torch.testing.assert_close(largest[0, :30, 0], s[:30].amax(1), rtol=1e-5, atol=1e-5)
    assert where[0, 25, 0] == 20 and where[0, 30, 0] == 30
    assert (where[0, 38:] == -1).all() and (largest[0, 38:] == 0).all()


@pytest.mark.parametrize("change", [
    dict(window=0), dict(window=True), dict(window=2.0), dict(window=-1), dict(scale=1.0),
    dict(window_factor=torch.ones(2)), dict(window=3, linear_factor=torch.ones(3)), dict(window=3, scale=float("nan")),
    dict(window=3, window_factor=[1.0, 1.0]), dict(window=3, scale=1e39), dict(k_map=torch.zeros(2, 8, 5)),
    dict(k_map=torch.zeros(2, 8, 5), window=3),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_refused(change):
    q, w = torch.zeros(1, 4, 2, 8), torch.zeros(2, 8, 4)
    with pytest.raises(InvalidInputError, match="|".join(change)):
        tk.hedgehog_attention(**dict(q=q, k=q, v=q, q_map=w, k_map=w) | change)


def test_a_window_of_numpy():
    number = torch.tensor(3).numpy()[()]
    assert type(number).__name__ == "int64" and windowed.check_window(number) == 3


def test_based_has_a_window_with_its_norm_only():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InvalidInputError, match="use_norm"):
        tk.fused_chunk_based(q, q, q, use_norm=False, window=2)


@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 3, 2, 8), (2, 3, 0, 8)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_nothing_to_attend_to(backend, shape):
    q, w = torch.zeros(shape, requires_grad=True), torch.zeros(shape[2], 8, 4)
    o = tk.hedgehog_attention(q, q, q, w, w, window=2, backend=backend)
    assert o.shape == shape
    (o.sum() + tk.fused_chunk_based(q, q, q, window=2, backend=backend).sum()).backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("name", ["hedgehog", "window", "based"])
def test_second_gradients_are_refused(name):
    """Not left out of a sum without a word: these backward passes compute from copies."""
    q = torch.randn(1, 8, 1, 4).bfloat16().requires_grad_()
    mapping = torch.randn(1, 4, 4).bfloat16()
    if name == "based":
        y = fused_chunk_based(q, q, q, backend="portable")
    elif name == "hedgehog":
        y = hedgehog_op(q, mapping)
    else:
        y = hedgehog_attention(q, q, q, mapping, mapping, window=4, fused=True, backend="portable")
    for function in (torch.sum, torch.norm):
        with pytest.raises(UnsupportedError, match="first gradients"):
            torch.autograd.grad(function(y), q, create_graph=True)
