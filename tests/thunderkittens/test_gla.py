"""Gated linear attention against its recurrence in float64: values, states and every gradient."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import gla, linear, reference
from gpu_accel.thunderkittens.gla import chunk_gla, gated_linear_attention
from tests.thunderkittens.helpers import close, randn, run

NAMES = ["o", "state", "dq", "dk", "dv", "dg", "dinitial"]


def make(device, *, batch=1, seqlen=37, heads=2, key_dim=24, value_dim=40, dtype=torch.float32, gates=0.2,
         initial=True):  # fmt: skip
    """q, k, v, g, initial and gradients of both results; gates of about -`gates`."""
    q, k = (randn(batch, seqlen, heads, key_dim, seed=s, dtype=dtype, device=device) for s in (1, 2))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype, device=device)
    g = -randn(batch, seqlen, heads, key_dim, seed=4, device=device).square() * gates
    shape = (batch, heads, key_dim, value_dim)
    h = randn(*shape, seed=5, device=device) if initial else None
    do = randn(batch, seqlen, heads, value_dim, seed=6, dtype=dtype, device=device)
    return [q, k, v, g, h], [do, randn(*shape, seed=7, device=device)]


def truth_of(tensors, grads, scale=0.3):
    def step(q, k, v, g, h):
        return reference.gla_recurrent(q, k, v, g, scale=scale, initial=h)

    return run(step, tensors, grads, torch.float64)


def ours(backend, *, scale=0.3, chunk=16, cu=None):
    def call(q, k, v, g, h):
        return gated_linear_attention(
            q, k, v, g, scale=scale, initial_state=h, chunk=chunk, cu_seqlens=cu, backend=backend
        )

    return call


def compare(mine, truth, ruler):
    for name, *three in zip(NAMES, mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three, narrow=mine[0].dtype == torch.bfloat16)


CASES = {
    "T37": dict(heads=1),
    "T17-D72x16-no-state": dict(seqlen=17, key_dim=72, value_dim=16, initial=False),
    "T1": dict(seqlen=1, batch=2),
    "T16-exactly-one-chunk-V1": dict(seqlen=16, key_dim=16, value_dim=1),
    "T0": dict(seqlen=0),
    "strong-gates": dict(gates=30.0),
    "hardly-any-gates": dict(gates=1e-4, heads=1, seqlen=70),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float32_against_the_recurrence(case, device):
    tensors, grads = make(device, **case)
    compare(run(ours("portable"), tensors, grads), truth_of(tensors, grads), run(ours("reference"), tensors, grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(dtype, device):
    tensors, grads = make(device, dtype=dtype, seqlen=20, heads=1)
    compare(run(ours("portable"), tensors, grads), truth_of(tensors, grads), run(ours("reference"), tensors, grads))


def test_a_chunk_of_64(device):
    """Six levels of pairs, and a chunk that ends within the first block of the last one."""
    tensors, grads = make(device, seqlen=64 + 20, heads=1)
    mine, ruler = (run(ours(backend, chunk=64), tensors, grads) for backend in ("portable", "reference"))
    compare(mine, truth_of(tensors, grads), ruler)


@pytest.mark.parametrize("gate", [-1e4, -math.inf])
def test_gates_that_forget(gate, device):
    """Every third step and every other key dimension; where all forget, a step sees itself alone."""
    tensors, grads = make(device, heads=1)
    tensors[3][:, 2::3, :, ::2] = gate
    mine, ruler = (run(ours(backend), tensors, grads) for backend in ("portable", "reference"))
    compare(mine, truth_of(tensors, grads), ruler)
    tensors[3] = torch.full_like(tensors[3], gate)
    q, k, v, *_ = tensors
    o, state = ours("portable")(*tensors)
    torch.testing.assert_close(o, 0.3 * (q * k).sum(-1, keepdim=True) * v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, k[:, -1, :, :, None] * v[:, -1, :, None, :])


def test_without_gates_it_is_linear_attention(device):
    tensors, grads = make(device, heads=1)
    tensors[3] = torch.zeros_like(tensors[3])

    def plain(backend):
        def call(q, k, v, h):
            return linear.linear_attention(q, k, v, scale=0.3, initial_state=h, chunk=16, backend=backend)

        return call

    mine = run(ours("portable"), tensors, grads)
    del mine[5], tensors[3]
    truth, ruler = run(plain("reference"), tensors, grads, torch.float64), run(plain("reference"), tensors, grads)
    for name, *three in zip(NAMES[:5] + NAMES[6:], mine, truth, ruler, strict=True):
        close(name, *three)


def test_gates_of_a_head_are_those_of_simple_gla(device):
    (q, k, v, g, h), _ = make(device, seqlen=20)
    g = g[..., :1]
    mine = chunk_gla(q, k, v, g.expand_as(k), 0.3, h, True, backend="portable")
    theirs = linear.chunk_simple_gla(q, k, v, g[..., 0], None, 0.3, h, True, backend="reference")
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_packed_sequences_equal_each_alone(device):
    lengths, slack = [5, 0, 17], 3
    total = sum(lengths)
    tensors, grads = make(device, seqlen=total + slack, initial=False)
    shape = (len(lengths), 2, 24, 40)
    tensors[4], grads[1] = randn(*shape, seed=6, device=device), randn(*shape, seed=8, device=device)
    for x in (*tensors[:4], grads[0]):
        x[:, total:] = math.nan  # in the slack: it must not leak into anything
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cu = torch.tensor(edges, dtype=torch.int32, device=device)

    def packed(*given):
        o, state = ours("portable", cu=cu)(*given)
        assert not o[:, total:].any()
        return o[:, :total], state

    mine = run(packed, tensors, [grads[0][:, :total], grads[1]])
    assert not any(x[:, total:].any() for x in mine[2:6])
    for n, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        alone = [x[:, start:stop] for x in tensors[:4]] + [tensors[4][n : n + 1]]
        their = [grads[0][:, start:stop], grads[1][n : n + 1]]
        got = [mine[0][:, start:stop], mine[1][n : n + 1], *(x[:, start:stop] for x in mine[2:6]), mine[6][n : n + 1]]
        compare(got, truth_of(alone, their), run(ours("reference"), alone, their))


def test_a_prefix_and_the_rest_are_the_whole(device):
    """As decoding goes on, one step at the end of it."""
    (q, k, v, g, _), _ = make(device, seqlen=30, initial=False)
    whole, last = chunk_gla(q, k, v, g, output_final_state=True, backend="portable")
    state, parts = None, []
    for cut in (slice(0, 13), slice(13, 29), slice(29, 30)):
        o, state = chunk_gla(*(x[:, cut] for x in (q, k, v, g)), None, state, True, backend="portable")
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


def test_strides_and_dtypes_of_gates(device):
    """Gates may lie in any order and be of another dtype than q; their gradients are of their own."""
    (q, k, v, g, h), _ = make(device, seqlen=20, heads=1, dtype=torch.float16)
    g = g.bfloat16()
    wide = g.float().permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    one, other = (ours("portable")(q, k, v, x, h)[0] for x in (g, wide))
    assert torch.equal(one, other)
    leaf = g.clone().requires_grad_()
    ours("portable")(q, k, v, leaf, h)[0].sum().backward()
    assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.any()


def test_wrong_arguments_are_refused(device):
    (q, k, v, g, _), _ = make(device)
    with pytest.raises(InvalidInputError, match=r"g must be \(batch, seqlen, heads, K\)"):
        chunk_gla(q, k, v, g[..., 0])
    with pytest.raises(InvalidInputError, match="g must be a tensor"):
        chunk_gla(q, k, v, None)
    with pytest.raises(InvalidInputError, match="one number of heads"):
        chunk_gla(q[:, :, :1], k[:, :, :1], v, g[:, :, :1])
    with pytest.raises(UnsupportedError, match="float64"):
        chunk_gla(q.double(), k.double(), v.double(), g, backend="portable")


def test_opcheck(device):
    (q, k, v, g, h), _ = make(device, seqlen=18, key_dim=16, value_dim=16, heads=1)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, h)]
    torch.library.opcheck(gla.gla_op, (*leaves, None, 0.25, 16), test_utils=tests)
    args = (torch.ones_like(v), torch.ones_like(h), q, k, v, g, h, None, 0.25, 16)
    torch.library.opcheck(gla.gla_backward_op, args, test_utils=tests)
