"""Chunked linear attention against the recurrence in float64: values, states and every gradient."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import chunked, linear, reference, walk_hopper
from gpu_accel.thunderkittens.linear import (
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    retention_decay,
)
from tests.thunderkittens.helpers import close, randn, run

NAMES = ["o", "state", "dq", "dk", "dv", "dg", "dw", "dinitial"]


def make(device, *, batch=1, seqlen=37, heads=2, heads_q=None, key_dim=24, value_dim=40, dtype=torch.float32,
         gates=True, weights=True, initial=True):  # fmt: skip
    """q, k, v, g, w, initial and gradients of both results."""
    heads_q = heads_q or heads
    q, k = (randn(batch, seqlen, heads_q, key_dim, seed=s, dtype=dtype, device=device) for s in (1, 2))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype, device=device)
    g = -randn(batch, seqlen, heads, seed=4, device=device).square() * 0.2 if gates else None
    w = randn(batch, seqlen, heads, seed=5, device=device).abs() if weights else None
    state = (batch, heads, key_dim, value_dim)
    h = randn(*state, seed=6, device=device) if initial else None
    do = randn(batch, seqlen, heads, value_dim, seed=7, dtype=dtype, device=device)
    return [q, k, v, g, w, h], [do, randn(*state, seed=8, device=device)]


def truth_of(tensors, grads, scale=0.3):
    def step(q, k, v, g, w, h):
        return reference.linear_attention_recurrent(q, k, v, g=g, w=w, scale=scale, initial=h)

    return run(step, tensors, grads, torch.float64)


def ours(backend, *, scale=0.3, chunk=16, segments=0, cu=None, fused=None):
    def call(q, k, v, g, w, h):
        return linear.linear_attention(
            q, k, v, g=g, w=w, scale=scale, initial_state=h, chunk=chunk, segments=segments, cu_seqlens=cu,
            fused=fused, backend=backend,
        )  # fmt: skip

    return call


def compare(mine, truth, ruler):
    for name, *three in zip(NAMES[: len(mine)], mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three, narrow=mine[0].dtype == torch.bfloat16)


CASES = {
    "plain-T37": dict(heads=1, gates=False, weights=False, initial=False),
    "gated-T37": dict(weights=False),
    "all-T17-Hq1-D72x16": dict(seqlen=17, heads_q=1, key_dim=72, value_dim=16),
    "all-T1": dict(seqlen=1, batch=2),
    "all-T16-exactly-one-chunk": dict(seqlen=16, key_dim=16, value_dim=1),
    "all-T0": dict(seqlen=0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_float32_against_the_recurrence(case, device):
    tensors, grads = make(device, **case)
    compare(run(ours("portable"), tensors, grads), truth_of(tensors, grads),
            run(ours("reference"), tensors, grads))  # fmt: skip


def test_a_negative_scale(device):
    """fla#47: a scale that is not one."""
    tensors, grads = make(device)
    compare(run(ours("portable", scale=-1.0), tensors, grads), truth_of(tensors, grads, -1.0),
            run(ours("reference", scale=-1.0), tensors, grads))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision(dtype, device):
    tensors, grads = make(device, dtype=dtype, seqlen=40)
    truth, ruler = truth_of(tensors, grads), run(ours("reference"), tensors, grads)
    compare(run(ours("portable", fused=False), tensors, grads), truth, ruler)
    for segments in (1, 2):
        one_walk = ours("portable", segments=segments, fused=True)(*tensors)
        compare(list(one_walk), truth[:2], ruler[:2])


def test_one_walk_of_packed_sequences(device):
    """The same numbers as by two kernels, where both round alike: float16 inputs, a plain recurrence."""
    tensors, _ = make(device, seqlen=28, dtype=torch.float16, initial=False, heads_q=1)
    cu = torch.tensor([0, 5, 5, 22, 23], dtype=torch.int32, device=device)
    tensors[5] = randn(4, 2, 24, 40, seed=6, device=device)
    for segments in (1, 3):
        two = ours("portable", cu=cu, fused=False)(*tensors)
        one = ours("portable", cu=cu, segments=segments, fused=True)(*tensors)
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_one_walk_is_refused_where_it_cannot_be(device):
    (q, k, v, *_), _ = make(device)
    with pytest.raises(UnsupportedError, match="float32"):
        linear.linear_attention(q, k, v, fused=True, backend="portable")
    wide = torch.zeros(1, 4, 1, 160, dtype=torch.float16, device=device)
    with pytest.raises(UnsupportedError, match="160 rows in"):
        linear.linear_attention(wide, wide, wide, fused=True, backend="portable")


def test_the_gradient_of_a_gate_that_a_large_state_crosses(device):
    """dg is a sum over the K V entries of S dS with both signs: states rounded to bfloat16 miss it 13 times as much."""
    tensors, grads = make(device, seqlen=1, heads=12, key_dim=64, value_dim=32, dtype=torch.bfloat16, weights=False)
    mine, ruler = (run(ours(b, scale=0.1), tensors, grads)[5] for b in ("portable", "reference"))
    close("dg", mine, truth_of(tensors, grads, 0.1)[5], ruler, narrow=True)


@pytest.mark.parametrize("segments", [2, 5], ids=["2", "more-than-chunks"])
def test_segments_give_the_same(segments, device):
    tensors, grads = make(device, seqlen=50, heads=1)
    compare(run(ours("portable", segments=segments), tensors, grads), truth_of(tensors, grads),
            run(ours("reference"), tensors, grads))  # fmt: skip


@pytest.mark.parametrize("segments", [1, 2])
def test_packed_sequences_equal_each_alone(segments, device):
    """Lengths that are no multiples of the chunk, an empty sequence, and rows that belong to none."""
    lengths, slack = [5, 0, 17, 1], 3
    total = sum(lengths)
    tensors, grads = make(device, seqlen=total + slack, initial=False)
    shape = (len(lengths), 2, 24, 40)
    tensors[5], grads[1] = randn(*shape, seed=6, device=device), randn(*shape, seed=8, device=device)
    for x in (*tensors[:5], grads[0]):
        x[:, total:] = math.nan  # in the slack: it must not leak into anything
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cu = torch.tensor(edges, dtype=torch.int32, device=device)

    def packed(q, k, v, g, w, h):
        o, state = ours("portable", segments=segments, cu=cu)(q, k, v, g, w, h)
        assert not o[:, total:].any()
        return o[:, :total], state

    mine = run(packed, tensors, [grads[0][:, :total], grads[1]])
    assert not any(x[:, total:].any() for x in mine[2:7])
    for n, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        alone = [x[:, start:stop] for x in tensors[:5]] + [tensors[5][n : n + 1]]
        their = [grads[0][:, start:stop], grads[1][n : n + 1]]
        got = [mine[0][:, start:stop], mine[1][n : n + 1], *(x[:, start:stop] for x in mine[2:7]), mine[7][n : n + 1]]
        compare(got, truth_of(alone, their), run(ours("reference"), alone, their))


def test_the_reference_takes_packed_sequences_too(device):
    (q, k, v, g, w, _), _ = make(device, seqlen=20, initial=False)
    cu = torch.tensor([0, 7, 7, 18], device=device)
    o, state = ours("reference", cu=cu)(q, k, v, g, w, None)
    alone, last = ours("reference")(*(x[:, 7:18] for x in (q, k, v, g, w)), None)
    torch.testing.assert_close(o[:, 7:18], alone)
    torch.testing.assert_close(state[2:], last)
    assert not o[:, 18:].any() and not state[1].any() and state.shape[0] == 3


def test_an_infinite_gate_forgets_all(device):
    tensors, grads = make(device, seqlen=20, weights=False)
    tensors[3][:, 11] = -math.inf
    alone = [None if x is None else x[:, 11:] for x in tensors[:5]] + [torch.zeros_like(tensors[5])]
    mine = run(ours("portable"), tensors, grads)
    theirs = truth_of(alone, [grads[0][:, 11:], grads[1]])
    close("o", mine[0][:, 11:], theirs[0], theirs[0].float())
    close("state", mine[1], theirs[1], theirs[1].float())
    assert all(x.isfinite().all() for x in mine if x is not None)


def test_strided_and_broadcast_views(device):
    """Views of a fused projection, and a gate that is one number a head, are read where they lie."""
    fused = randn(1, 19, 2, 16 * 3, seed=1, device=device)
    q, k, v = fused.split(16, -1)
    gamma = torch.tensor([-0.1, -0.7], device=device)
    for step in (1, 2):
        parts = [x[:, ::step] for x in (q, k, v)]
        g = gamma.expand(parts[0].shape[:3])
        o, state = ours("portable")(*parts, g, None, None)
        again, same = ours("portable")(*(x.contiguous() for x in (*parts, g)), None, None)
        assert torch.equal(o, again) and torch.equal(state, same)


def test_a_prefix_and_the_rest_are_the_whole(device):
    """The final state continues a sequence, as in serving."""
    (q, k, v, g, w, _), _ = make(device, seqlen=30, initial=False)
    whole, last = ours("portable")(q, k, v, g, w, None)
    state, parts = None, []
    for cut in (slice(0, 13), slice(13, 14), slice(14, 30)):
        o, state = ours("portable")(*(x[:, cut] for x in (q, k, v, g, w)), state)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


class TestNames:
    def test_retention_is_a_constant_gate(self, device):
        (q, k, v, *_), _ = make(device, seqlen=18, gates=False, weights=False, initial=False)
        decay = retention_decay(2, device)
        assert decay.tolist() == pytest.approx([math.log(1 - 2**-5), math.log(1 - 2**-6)])
        o, state = chunk_retention(q, k, v, output_final_state=True, backend="portable")
        truth, last = reference.linear_attention_recurrent(
            q.double(), k.double(), v.double(), g=decay.double().expand(q.shape[:3]), scale=24**-0.5
        )
        close("o", o, truth, truth.float())
        close("state", state, last, last.float())

    @pytest.mark.parametrize("heads", [0, 1, 16, 100])
    def test_decays_of_retention_in_one_kernel(self, heads, device):
        """To the bit, since both round float64 once; heads from 51 on are too close to 0 for 1 - x, not for log1p."""
        made = linear.retention_op(torch.empty(1, 2, heads, 3, device=device))
        assert torch.equal(made, retention_decay(heads, device))

    def test_gla_takes_gates_and_decays_together(self, device):
        (q, k, v, g, *_), _ = make(device, seqlen=9)
        gamma = torch.tensor([-0.5, -0.25], device=device)
        both, none = chunk_simple_gla(q, k, v, g, gamma, backend="portable")
        summed, _ = chunk_simple_gla(q, k, v, g + gamma, backend="portable")
        assert none is None
        torch.testing.assert_close(both, summed)

    def test_gradient_of_a_decay(self, device):
        (q, k, v, *_), (do, _) = make(device, seqlen=20, gates=False)
        gamma = torch.tensor([-0.5, -0.25], device=device, dtype=torch.float64)
        found = []
        for backend, dtype in (("portable", torch.float32), ("reference", torch.float64)):
            leaf = gamma.to(dtype).requires_grad_()
            o, _ = chunk_simple_gla(*(x.to(dtype) for x in (q, k, v)), g_gamma=leaf, backend=backend)
            found.append(torch.autograd.grad((o * do.to(dtype)).sum(), leaf)[0].double())
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
    def test_normalize_divides_by_the_sum_of_weights(self, packed, device):
        """With values of one everywhere the normalised output is one."""
        (q, k, v, *_), _ = make(device, seqlen=23, gates=False)
        cu = torch.tensor([0, 9, 9, 23], device=device) if packed else None
        o, _ = chunk_linear_attn(q.abs(), k.abs(), torch.ones_like(v), cu_seqlens=cu, backend="portable")
        torch.testing.assert_close(o, torch.ones_like(o), rtol=1e-5, atol=1e-5)

    def test_normalize_refuses_an_initial_state(self, device):
        (q, k, v, _, _, h), _ = make(device)
        with pytest.raises(UnsupportedError, match="initial state"):
            chunk_linear_attn(q, k, v, initial_state=h)

    def test_the_default_backend_computes_the_same(self, device):
        (q, k, v, g, *_), _ = make(device, seqlen=9)
        auto, _ = chunk_simple_gla(q, k, v, g)
        portable, _ = chunk_simple_gla(q, k, v, g, backend="portable")
        torch.testing.assert_close(auto, portable, rtol=1e-4, atol=1e-4)


WRONG = {
    "backend": (dict(backend="fast"), "backend is 'fast'"),
    "gates": (dict(g=torch.zeros(1, 37, 3)), "g must be"),
    "state": (dict(initial_state=torch.zeros(1, 2, 24, 24)), "initial_state must be"),
    "batch-with-cu_seqlens": (dict(cu_seqlens=torch.zeros(3)), "cu_seqlens must be"),
    "chunk": (dict(chunk=50), "chunk must be"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(changed, message):
    (q, k, v, *_), _ = make("cpu")
    with pytest.raises(InvalidInputError, match=message):
        linear.linear_attention(q, k, v, **changed)


@pytest.mark.parametrize(
    "spoil",
    [lambda q, k, v: (q[0], k, v), lambda q, k, v: (q, k[:, :5], v), lambda q, k, v: (q, k, v.double()),
     lambda q, k, v: (q[:, :, [0, 0, 1]], k[:, :, [0, 0, 1]], v)],
    ids=["three-dimensions", "shapes-differ", "dtypes-differ", "heads-do-not-divide"],
)  # fmt: skip
def test_wrong_tensors_are_refused(spoil):
    (q, k, v, *_), _ = make("cpu")
    with pytest.raises(InvalidInputError):
        linear.linear_attention(*spoil(q, k, v))


def test_float64_is_for_the_reference(device):
    (q, k, v, *_), _ = make(device)
    with pytest.raises(UnsupportedError, match="float64"):
        linear.linear_attention(*(x.double() for x in (q, k, v)), backend="portable")


def test_how_many_segments():
    assert chunked.segments_for(8, 16, 4, 64) == 1  # enough programs
    assert chunked.segments_for(1, 16, 4, 256) == 4  # one long sequence of 16 heads: 64 programs are too few
    assert chunked.segments_for(1, 1, 1, 256) == 16
    assert chunked.segments_for(16, 16, 1, 256) == 1  # 256 programs are nearly as many as fit
    assert chunked.segments_for(1, 1, 1, 3) == 1 and chunked.segments_for(0, 0, 0, 0) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_opcheck(packed, device):
    tensors, _ = make(device, seqlen=18, key_dim=16, value_dim=16, heads_q=1)
    cu = torch.tensor([0, 18], dtype=torch.int32, device=device) if packed else None
    leaves = [x.requires_grad_() for x in tensors]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(chunked.chunked, (*leaves, cu, 0.25, 16, 1, "chunks"), test_utils=tests)
    q, k, v, g, w, h = (x.detach() for x in tensors)
    args = (torch.ones_like(v), torch.ones_like(h), q, k, v, g, w, h, cu, 0.25, 16, 1, True, "chunks")
    torch.library.opcheck(chunked.chunked_backward, args, test_utils=tests)


def test_aot_dispatch(device):
    tensors, _ = make(device, seqlen=5, heads=1, key_dim=16, value_dim=16)
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(
        chunked.chunked, (*leaves, None, 0.25, 16, 1, "chunks"), test_utils=("test_aot_dispatch_dynamic",)
    )  # fmt: skip


def test_gates_of_the_walk(device):
    """Sums in base 2 inside every chunk, head by head; what lies beyond the sequence adds and weighs nothing."""
    g, w = -randn(2, 70, 5, seed=1, device=device).abs(), randn(2, 70, 5, seed=2, device=device)
    g[0, 3, 1] = -torch.inf
    v = torch.empty(2, 70, 5, 16, device=device)
    sums, weights = walk_hopper.gate_vectors(g.transpose(1, 2).contiguous().transpose(1, 2), w, v, 2)
    inside = torch.nn.functional.pad(g.clamp_min(-88), (0, 0, 0, 58)).double() / math.log(2)
    right = inside.view(2, 2, 64, 5).cumsum(2).view(2, 128, 5).transpose(1, 2)
    torch.testing.assert_close(sums.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(weights, torch.nn.functional.pad(w, (0, 0, 0, 58)).transpose(1, 2))


def test_hopper_is_refused_where_it_cannot_run(device):
    q = randn(1, 70, 2, 64, seed=1, device=device, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="fused is for the portable kernels"):
        linear.linear_attention(q, q, q, fused=True, backend="hopper")
    wide = randn(1, 70, 2, 136, seed=1, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, 70], device=device)
    assert "packed" in walk_hopper.problem_refusal(q, q, q, cu, 64)
    assert "64 steps" in walk_hopper.problem_refusal(q, q, q, None, 32)
    assert "from 16 to 128" in walk_hopper.problem_refusal(wide, wide, q, None, 64)
    assert "one of 8" in walk_hopper.problem_refusal(q, q, q[..., :12], None, 64)
    assert walk_hopper.problem_refusal(q, q, q, None, 64) is None
    if device == "cpu":
        assert "needs an NVIDIA GPU" in walk_hopper.machine_refusal(q)
        with pytest.raises(UnsupportedError, match="backend 'hopper'"):
            linear.linear_attention(q, q, q, backend="hopper")
