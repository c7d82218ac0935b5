"""The delta rule against its recurrence in float64: values, states and every gradient."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import delta, delta_hopper, reference
from gpu_accel.thunderkittens.delta import chunk_delta_rule, chunk_gated_delta_rule, delta_rule
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run

NAMES = ["o", "state", "dq", "dk", "dv", "dbeta", "dg", "dinitial"]


def make(device, *, batch=1, seqlen=37, heads=2, heads_q=None, key_dim=24, value_dim=40, dtype=torch.float32,
         gates=True, initial=True):  # fmt: skip
    """q, k of unit length, v, beta in 0 .. 2, g, initial and gradients of both results."""
    heads_q = heads_q or heads
    q, k = (randn(batch, seqlen, heads_q, key_dim, seed=s, device=device) for s in (1, 2))
    q, k = ((x / x.norm(dim=-1, keepdim=True)).to(dtype) for x in (q, k))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype, device=device)
    beta = 2 * randn(batch, seqlen, heads, seed=4, device=device).sigmoid()
    g = -randn(batch, seqlen, heads, seed=5, device=device).square() * 0.2 if gates else None
    shape = (batch, heads, key_dim, value_dim)
    h = randn(*shape, seed=6, device=device) if initial else None
    do = randn(batch, seqlen, heads, value_dim, seed=7, dtype=dtype, device=device)
    return [q, k, v, beta, g, h], [do, randn(*shape, seed=8, device=device)]


def truth_of(tensors, grads, scale=0.3):
    def step(q, k, v, beta, g, h):
        return reference.delta_rule_recurrent(q, k, v, beta, g=g, scale=scale, initial=h)

    return run(step, tensors, grads, torch.float64)


def ours(backend, *, scale=0.3, chunk=16, cu=None):
    def call(q, k, v, beta, g, h):
        return delta_rule(q, k, v, beta, g=g, scale=scale, initial_state=h, chunk=chunk, cu_seqlens=cu, backend=backend)

    return call


def compare(mine, truth, ruler):
    for name, *three in zip(NAMES[: len(mine)], mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three, narrow=mine[0].dtype == torch.bfloat16)


CASES = {
    "plain-T37": dict(heads=1, gates=False, initial=False),
    "gated-T17-Hq1-D72x16": dict(seqlen=17, heads_q=1, key_dim=72, value_dim=16),
    "gated-T1": dict(seqlen=1, batch=2),
    "gated-T16-exactly-one-chunk": dict(seqlen=16, key_dim=16, value_dim=1),
    "gated-T0": dict(seqlen=0),
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
    """Five levels of blocks."""
    tensors, _ = make(device, seqlen=70, heads=1)
    o, state = ours("portable", chunk=64)(*tensors)
    wide = [x.double() for x in tensors]
    truth, last = reference.delta_rule_recurrent(*wide[:4], g=wide[4], scale=0.3, initial=wide[5])
    ruler = ours("reference", chunk=64)(*tensors)
    close("o", o, truth, ruler[0])
    close("state", state, last, ruler[1])


def test_a_key_that_repeats(device):
    """Every pair of steps is coupled as strongly as can be: powers of A would reach 1e18."""
    tensors, _ = make(device, seqlen=64, heads=1, gates=False, initial=False)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1])
    tensors[3] = torch.ones_like(tensors[3])
    o, _ = ours("portable", chunk=64)(*tensors)
    truth, _ = reference.delta_rule_recurrent(*(x.double() for x in tensors[:4]), scale=0.3)
    assert (o - truth).abs().max() < 1e-5


def test_what_leaves_a_chunk_is_whole_in_the_gradient_of_gates(device):
    """Orthogonal keys, strength 1, nothing but the final state judged: dg of step t is the sum over s < t of
    exp(g_(s+1) + ..) k_s' dS v_s, as the kernels form it too. dS in bfloat16 would be wrong by 2^-9 of its terms.
    """
    batch, heads, seqlen, dim = 2, 2, 20, 32
    k = torch.eye(dim, dtype=torch.bfloat16, device=device)[:seqlen].expand(batch, heads, seqlen, dim).transpose(1, 2)
    v = randn(batch, seqlen, heads, dim, seed=1, dtype=torch.bfloat16, device=device)
    g = (-randn(batch, seqlen, heads, seed=2, device=device).square() * 0.2).requires_grad_()
    dstate = randn(batch, heads, dim, dim, seed=3, device=device)
    _, state = delta_rule(k, k, v, torch.ones_like(g), g=g, chunk=32, backend="portable")
    (found,) = torch.autograd.grad(state, g, dstate)
    terms = dstate.double()[:, :, :seqlen] * v.double().transpose(1, 2)  # of S: (batch, heads, step, V)
    b = g.detach().double().cumsum(1).transpose(1, 2)
    kept = (b[..., -1:] - b).exp()
    passed = (terms.sum(-1) * kept).cumsum(-1) - terms.sum(-1) * kept
    size = (terms.abs().sum(-1) * kept).cumsum(-1)
    assert ((found.transpose(1, 2) - passed).abs() <= 2**-13 * size + 1e-6).all()


def solved_portably(k, v, beta):
    return delta._solve(delta._Call(k, v, None, None, 64), k, v, None, beta)[2]


def solved_for_hopper(k, v, beta):
    with gluon_in_torch.kernels_on_a_cpu() as done:
        fresh = delta_hopper.solve(None, k, v, None, beta, 1.0)[1]
    assert done == ["delta_solve_kernel"]
    return fresh


@pytest.mark.parametrize("solved, units", [(solved_portably, 1.5 if INTERPRET else 0.75), (solved_for_hopper, 0.75)])
def test_what_a_step_adds_itself_is_rounded_once(solved, units, device):
    """Keys are nearly orthogonal, so nearly all of `fresh` is beta v, which is to be rounded at the end only."""
    k = torch.eye(64, device=device)[None, :, None] + 0.002 * randn(1, 64, 1, 64, seed=1, device=device)
    k, v = k.bfloat16(), randn(1, 64, 1, 64, seed=2, dtype=torch.bfloat16, device=device)
    beta = 2 * randn(1, 64, 1, seed=3, device=device).sigmoid()
    fresh = solved(k, v, beta)
    wide = k[0, :, 0].double()
    system = (wide @ wide.T).tril(-1) * beta[0].double() + torch.eye(64, dtype=torch.float64, device=device)
    right = torch.linalg.solve_triangular(system, v[0, :, 0].double() * beta[0].double(), upper=False)
    unit = torch.exp2(right.abs().log2().floor() - 7)  # of the last place
    off = ((fresh[0, :, 0].double() - right).abs() / unit).quantile(0.99)
    assert off < units  # the interpreter cuts where a GPU rounds; twice would be 2 and 1


def test_packed_sequences_equal_each_alone(device):
    lengths, slack = [5, 0, 17], 3
    total = sum(lengths)
    tensors, grads = make(device, seqlen=total + slack, initial=False)
    shape = (len(lengths), 2, 24, 40)
    tensors[5], grads[1] = randn(*shape, seed=6, device=device), randn(*shape, seed=8, device=device)
    for x in (*tensors[:5], grads[0]):
        x[:, total:] = math.nan  # in the slack: it must not leak into anything
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cu = torch.tensor(edges, dtype=torch.int32, device=device)

    def packed(*given):
        o, state = ours("portable", cu=cu)(*given)
        assert not o[:, total:].any()
        return o[:, :total], state

    mine = run(packed, tensors, [grads[0][:, :total], grads[1]])
    assert not any(x[:, total:].any() for x in mine[2:7])
    for n, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        alone = [x[:, start:stop] for x in tensors[:5]] + [tensors[5][n : n + 1]]
        their = [grads[0][:, start:stop], grads[1][n : n + 1]]
        got = [mine[0][:, start:stop], mine[1][n : n + 1], *(x[:, start:stop] for x in mine[2:7]), mine[7][n : n + 1]]
        compare(got, truth_of(alone, their), run(ours("reference"), alone, their))


def test_a_prefix_and_the_rest_are_the_whole(device):
    (q, k, v, beta, g, _), _ = make(device, seqlen=30, initial=False)
    whole, last = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, backend="portable")
    state, parts = None, []
    for cut in (slice(0, 13), slice(13, 30)):
        q_, k_, v_, beta_, g_ = (x[:, cut] for x in (q, k, v, beta, g))
        o, state = chunk_gated_delta_rule(q_, k_, v_, g_, beta_, None, state, True, backend="portable")
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


def test_keys_are_brought_to_unit_length(device):
    (q, k, v, beta, *_), _ = make(device, seqlen=20)
    one, none = chunk_delta_rule(q, k, v, beta, backend="portable")
    other, _ = chunk_delta_rule(3 * q, 5 * k, v, beta, use_qk_l2norm_in_kernel=True, backend="portable")
    assert none is None
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_refused(device):
    (q, k, v, beta, g, _), _ = make(device)
    with pytest.raises(InvalidInputError, match="w must be|beta must be"):
        delta_rule(q, k, v, beta[:, :5])
    with pytest.raises(InvalidInputError, match="beta must be a tensor"):
        chunk_gated_delta_rule(q, k, v, g, 0.5)
    wide = torch.zeros(1, 4, 1, 160, device=device)
    with pytest.raises(UnsupportedError, match="hold 128"):
        delta_rule(wide, wide, wide, wide[..., 0], backend="portable")
    o, _ = delta_rule(wide, wide, wide, wide[..., 0])  # the reference takes it
    assert o.shape == wide.shape


def test_opcheck(device):
    (q, k, v, beta, g, h), _ = make(device, seqlen=18, key_dim=16, value_dim=16, heads_q=1)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, h)]
    torch.library.opcheck(delta.delta_op, (*leaves, None, 0.25, 16), test_utils=tests)
    args = (torch.ones_like(v), torch.ones_like(h), q, k, v, g, beta, h, None, 0.25, 16)
    torch.library.opcheck(delta.delta_backward_op, args, test_utils=tests)


HOPPER = {
    "gated-T150-Hq1-D72x80": dict(seqlen=150, heads_q=1, key_dim=72, value_dim=80),
    "plain-T64-no-state": dict(seqlen=64, heads=1, gates=False, initial=False),
    "gated-T5-B2": dict(seqlen=5, batch=2, heads=1, key_dim=16, value_dim=8),
    "gated-T0": dict(seqlen=0),
}


@pytest.mark.parametrize("wide", [False, True], ids=["64-columns", "128-columns"])
@pytest.mark.parametrize("case", HOPPER.values(), ids=HOPPER)
def test_on_hopper_by_its_source(case, wide, device, monkeypatch):
    for name, value in dict(machine_refusal=lambda _: None, WIDE=wide, sms=lambda _: 0).items():
        monkeypatch.setattr(delta_hopper, name, value)
    tensors, grads = make(device, dtype=torch.bfloat16, **case)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        found = ours("hopper", chunk=64)(*tensors)
    assert done == ["delta_solve_kernel", "delta_walk_kernel"] * bool(case["seqlen"])
    compare(found, truth_of(tensors, grads)[:2], ours("reference", chunk=64)(*tensors))


GRADIENTS = {
    "gated-T70-D24x40": (dict(seqlen=70, heads=2, key_dim=24, value_dim=40), True),
    "plain-T130-D72x128": (dict(seqlen=130, heads=1, key_dim=72, value_dim=128, gates=False, initial=False), True),
    "gated-T64-D128x64": (dict(seqlen=64, heads=1, key_dim=128, value_dim=64), True),
    "gated-T70-Hq1": (dict(seqlen=70, heads=2, heads_q=1, key_dim=40, value_dim=72), True),
    "gated-V136": (dict(seqlen=5, heads=1, key_dim=16, value_dim=136), False),
}


@pytest.mark.parametrize("walks", [False, True], ids=["walked-portably", "walked"])
@pytest.mark.parametrize("case, in_chunks", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_on_hopper_by_its_source(case, in_chunks, walks, device, monkeypatch):
    wide = dict(WIDE=case["seqlen"] == 130, sms=lambda _: 0)
    for name, value in (wide | dict(machine_refusal=lambda _: None, WALKS_BACK=walks, SHARED=True)).items():
        monkeypatch.setattr(delta_hopper, name, value)
    tensors, grads = make(device, dtype=torch.bfloat16, **case)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = run(ours("hopper", chunk=64), tensors, grads)
    forward = ["delta_solve_kernel", "delta_walk_kernel"]
    back = ["delta_walk_back_kernel"] * walks + ["delta_back_kernel"]
    assert done == [*forward, "delta_solve_kernel"] + back * in_chunks
    # the ruler is not eager torch: the interpreter, which runs both walks, cuts where a GPU rounds
    compare(mine, truth_of(tensors, grads), run(ours("portable", chunk=64), tensors, grads))


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_what_is_solved_on_hopper_for_a_key_that_repeats(strength, device):
    """(I + A)^-1 has 1 and -strength (1 - strength)^n; powers of A would reach 1e18."""
    k = torch.nn.functional.one_hot(torch.zeros(1, 64, 1, dtype=torch.int64), 16).to(device, torch.bfloat16)
    beta = torch.full((1, 64, 1), strength, device=device)
    with gluon_in_torch.kernels_on_a_cpu():
        inverse = delta_hopper.solve(None, k, k, None, beta, 1.0, keep=True)[4][0, :, 0]
    apart = torch.arange(64)[:, None] - torch.arange(64)
    right = torch.where(apart > 0, -strength * (1.0 - strength) ** (apart - 1).clamp_min(0), (apart == 0).float())
    assert torch.equal(inverse.float(), right)


def test_what_the_walk_on_hopper_does_not_take(device, monkeypatch):
    tensors, _ = make(device, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="needs an NVIDIA GPU"):
        ours("hopper", chunk=64)(*tensors)
    monkeypatch.setattr(delta_hopper, "machine_refusal", lambda _: None)
    with pytest.raises(UnsupportedError, match="chunks have 64 steps"):
        ours("hopper")(*tensors)
    with pytest.raises(UnsupportedError, match="packed sequences"):
        ours("hopper", chunk=64, cu=torch.tensor([0, 37]))(*tensors)


def test_which_calls_auto_gives_to_hopper(device, monkeypatch):
    taken = []
    monkeypatch.setattr(delta_hopper, "machine_refusal", lambda _: None)
    monkeypatch.setattr(delta_hopper, "forward", lambda q, k, v, *_: taken.append(v.shape[3]) or (v.clone(), v.sum()))
    for value_dim in (72, 24):
        tensors, _ = make(device, dtype=torch.bfloat16, seqlen=5, heads=1, key_dim=40, value_dim=value_dim)
        ours("auto", chunk=64)(*tensors)
    assert taken == [72]
