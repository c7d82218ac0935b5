"""Gradients put together from walks (`walk_back`), with the walks themselves done by torch: they need a Hopper GPU.

What is tested is which tensors go through which walk, segments, and the kernel of pairs; then the source of the walks
(`gluon_in_torch`).
"""

from __future__ import annotations

import pytest
import torch

from gpu_accel.thunderkittens import chunked, reference, walk_back, walk_hopper
from tests import gluon_in_torch
from tests.thunderkittens.helpers import close, randn, run

CHUNK = 64
NAMES = ["dq", "dk", "dv", "dg", "dw", "dinitial"]


def walk_in_torch(q, k, v, g, w, initial, local, decays, *, scale, segments, config=None, norm=None, reverse=False,
                  vectors=None, states=None, across=None, x=None, inner=None, turns=1, powers=None,
                  wide=False):  # fmt: skip
    """What `walk_kernel` says it does, a chunk at a time, with its roundings to the dtype of q."""
    assert norm is None and (segments == 1) == (local is None) and powers is None and not wide
    batch, seqlen, heads = v.shape[0], v.shape[1], max(q.shape[2], v.shape[2])
    dtype, chunks = q.dtype, -(-seqlen // CHUNK)
    rounded = (lambda x: x.to(dtype).double())  # noqa: E731
    rows, pad = 64 * -(-k.shape[3] // 64), chunks * CHUNK - seqlen

    def laid_out(t):
        t = t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2).double()
        return torch.nn.functional.pad(t, (0, 0, 0, pad))

    q, k, v = laid_out(q), laid_out(k), laid_out(v)
    x = None if x is None else laid_out(x)
    sums, weights = vectors
    b = torch.zeros(batch, heads, chunks * CHUNK).double() if g is None else sums.double() * 0.6931471805599453
    weight = torch.ones_like(b) if w is None else weights.double()
    out = torch.zeros(batch, heads, chunks * CHUNK, v.shape[3])
    final = torch.full((batch, heads, k.shape[3], v.shape[3]), torch.nan)
    each = -(-chunks // segments)
    for position in range(segments):
        state = torch.zeros_like(final).double() if initial is None else initial.double()
        for before in range(position):
            state = state * decays[before].double()[..., None, None] + local[before].double()
        for i in range(position * each, min(chunks, position * each + each)):
            chunk = chunks - 1 - i if reverse else i
            at = slice(chunk * CHUNK, chunk * CHUNK + CHUNK)
            qc, kc, vc, bc, wc = q[:, :, at], k[:, :, at], v[:, :, at], b[:, :, at], weight[:, :, at]
            last = bc[..., -1:]
            between = bc[..., :, None] - bc[..., None, :]
            between = (-between).triu() if reverse else between.tril()
            share = between.exp() if reverse else between.exp() * wc[..., None, :]
            share = share.triu() if reverse else share.tril()
            into = (last - bc).exp() if reverse else bc.exp()
            p = rounded((qc @ kc.mT) * share)
            o = (qc @ rounded(state)) * into[..., None]
            if inner is not None:
                inner[:, :, :, chunk] = 0.0
                inner[0, :, :, chunk] = (o * x[:, :, at]).sum(-1) * scale
            out[:, :, at] = (o + p @ vc) * scale * (wc[..., None] if reverse else 1.0)
            kept = bc.exp() if reverse else (last - bc).exp() * wc
            if states is not None and reverse:
                states[:, chunk * rows : chunk * rows + state.shape[2]] = state.transpose(1, 2).to(dtype)
            state = state * last[..., None].exp()
            if states is not None and not reverse:
                behind = states[:, chunk * rows : chunk * rows + state.shape[2]].transpose(1, 2).double()
                across[:, :, :, chunk] = 0.0
                across[0, :, :, chunk, : state.shape[2]] = (state * behind).sum(-1) * scale
            state = state + rounded(kc * kept[..., None]).mT @ vc
        if position == segments - 1 and across is None:
            final = state.float()
    return added_up(out[:, :, :seqlen].transpose(1, 2).to(dtype), turns), final


def added_up(x, turns):
    """Every `turns` heads (dim 2) added up one after the other, with a rounding after each, as the copy engine does."""
    first, *others = x.unflatten(2, (-1, turns)).unbind(3)
    for one in others:
        first = (first.float() + one.float()).to(x.dtype)
    return first.contiguous()


def both_in_torch(do, q, k, v, vectors, initial, local, decays, states, *, weighted, scale, segments, config, turns=1,
                  powers=None, wide=False):  # fmt: skip
    """What `both_kernel` says it does: the two walks backwards, and the sums of pairs inside chunks."""
    assert powers is None and not wide
    (batch, seqlen, heads), chunks = v.shape[:3], -(-v.shape[1] // CHUNK)
    out_of, passed = torch.zeros(2, 1, batch, heads, chunks, CHUNK)
    got = torch.zeros(batch, heads, chunks, 4, CHUNK)
    common = dict(scale=scale, segments=segments, reverse=True, vectors=vectors)
    w = vectors[1] if weighted else None
    seen = dict(states=states, x=k, inner=out_of)
    dk, final = walk_in_torch(v, do, q, vectors[0], w, initial, local, decays, **seen, **common)
    turned = (None if x is None else x.mT for x in (initial, local))
    dv, _ = walk_in_torch(k, q, do, vectors[0], w, *turned, decays, **common)

    def cut(t):
        t = t.repeat_interleave(heads // t.shape[2], 2).transpose(1, 2).float()
        return torch.nn.functional.pad(t, (0, 0, 0, chunks * CHUNK - seqlen)).unflatten(2, (chunks, CHUNK))

    b = vectors[0].unflatten(2, (chunks, CHUNK))
    decay = torch.exp2(b[..., None, :] - b[..., :, None]).triu()  # step that passes on, step that gets it
    pairs = (cut(k) @ cut(q).mT) * (cut(v) @ cut(do).mT) * decay * scale
    passed[0] = pairs.sum(-1)
    got += (pairs * (w.unflatten(2, (chunks, CHUNK))[..., None] if weighted else 1)).unflatten(3, (4, 16)).sum(4)
    whole = torch.nn.functional.pad(torch.stack((out_of[0], passed[0])), (0, (config[0] // 4 - 1) * CHUNK))
    return added_up(dk, turns), dv, final, *whole.contiguous(), got


CASES = {
    "g-w-q1-K128": dict(seqlen=70, heads=3, heads_q=1, key_dim=128, value_dim=64),
    "g-segments2-initial-K24-V72": dict(seqlen=130, heads=1, heads_q=1, key_dim=24, value_dim=72, w=False, segments=2,
                                        initial=True),
    "g-w-q1-K128-both": dict(seqlen=70, heads=3, heads_q=1, key_dim=128, value_dim=64, both=True),
    "g-segments2-initial-K24-both": dict(seqlen=130, heads=1, heads_q=1, key_dim=24, value_dim=64, w=False, segments=2,
                                         initial=True, both=True),
}


def problem(device, seqlen, heads, heads_q, key_dim, value_dim, w=True, initial=False, segments=1,
            dtype=torch.bfloat16):  # fmt: skip
    q, k = (randn(2, seqlen, heads_q, key_dim, seed=s, dtype=dtype, device=device) for s in (1, 2))
    v, do = (randn(2, seqlen, heads, value_dim, seed=s, dtype=dtype, device=device) for s in (3, 7))
    gates = -randn(2, seqlen, heads, seed=4, device=device).square() * 0.1
    weights = randn(2, seqlen, heads, seed=5, device=device).abs() if w else None
    h, dfinal = (randn(2, heads, key_dim, value_dim, seed=s, device=device) if initial else None for s in (6, 8))
    return [q, k, v, gates, weights, h], do, dfinal, segments


def sums_in_triton(k, v, g, w, *, segments, reverse=False, vectors=None, turned=True):
    """What `walk_hopper.segment_sums` says it gives, by the walk of plain Triton."""
    if k.shape[2] > v.shape[2]:
        local, decays, other = sums_in_triton(v, k, g, w, segments=segments, reverse=reverse)
        return other, decays, local
    common = dict(scale=1.0, chunk=CHUNK, segments=segments, heads=v.shape[2], group=v.shape[2] // k.shape[2])
    places = chunked._Places(v, None, CHUNK)
    local, decays = chunked._walk(k, v, g, w, None, places, reverse=reverse, sums_only=True, **common)
    return local[:-1], decays[:-1], local[:-1].mT.contiguous()


def by_walks(tensors, do, dfinal, segments, scale, monkeypatch, want_dg=True, walk=walk_in_torch):
    q, k, v, g, w, h = tensors
    if walk is walk_in_torch:
        monkeypatch.setattr(walk_hopper, "segment_sums", sums_in_triton)
    monkeypatch.setattr(walk_hopper, "walk", walk)
    monkeypatch.setattr(walk_back, "refusal", lambda *_: None)
    monkeypatch.setattr(walk_back, "unseen", lambda *_: None)
    monkeypatch.setattr(walk_back, "plain_unseen", lambda *_: None)
    monkeypatch.setattr(walk_back, "_HEADS", 2)
    return chunked.chunked_backward._init_fn(
        do, dfinal, q, k, v, g, w, h, None, scale, CHUNK, segments, want_dg, "hopper or chunks"
    )


def by_torch(tensors, do, dfinal, scale, dtype=None):
    """Gradients of the reference, in float64 or as eager torch makes them."""

    def call(q, k, v, g, w, h):
        how = reference.linear_attention_chunked
        return how(q, k, v, g=g, w=w, scale=scale, initial=h)

    grads = [do, torch.zeros_like(randn(do.shape[0], do.shape[2], tensors[0].shape[3], do.shape[3], seed=0))
             if dfinal is None else dfinal]  # fmt: skip
    return run(call, tensors, grads, dtype)[2:]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case, device, monkeypatch):
    case = dict(case)
    monkeypatch.setattr(walk_back, "BOTH", {64: (4, 2), 128: (8, 3)} if case.pop("both", False) else {})
    monkeypatch.setattr(walk_back, "both", both_in_torch)
    tensors, do, dfinal, segments = problem(device, **case)
    mine = by_walks(tensors, do, dfinal, segments, 0.3, monkeypatch)
    truth, ruler = by_torch(tensors, do, dfinal, 0.3, torch.float64), by_torch(tensors, do, dfinal, 0.3)
    for name, one, *two in zip(NAMES, mine, truth, ruler, strict=True):
        if two[0] is not None:
            close(name, one, *two, narrow=True)


@pytest.mark.parametrize("heads_q", [1, 2])
def test_gradients_of_heads_in_turns(heads_q, device, monkeypatch):
    """dq and dk of heads that a program walks one after the other are added up there, the rest afterwards."""
    turns = []
    monkeypatch.setattr(walk_back, "IN_TURNS", True)
    monkeypatch.setattr(walk_hopper, "sms", lambda _: 1)
    monkeypatch.setattr(walk_back, "both", lambda *a, **o: turns.append(o["turns"]) or both_in_torch(*a, **o))
    tensors, do, dfinal, segments = problem(device, 70, 6 * heads_q, heads_q, 128, 64)
    mine = by_walks(tensors, do, dfinal, segments, 0.3, monkeypatch)
    assert turns == [6]
    truth, ruler = by_torch(tensors, do, dfinal, 0.3, torch.float64), by_torch(tensors, do, dfinal, 0.3)
    for name, one, *two in zip(NAMES[:5], mine, truth, ruler, strict=False):
        close(name, one, *two, narrow=True)


@pytest.mark.parametrize(("programs", "group", "slots", "turns"), [
    (640, 80, 132, 5),  # Mamba-2's own shape on an H200: five turns of the GPU either way
    (1280, 80, 264, 5),
    (256, 16, 264, 1),  # one turn: nothing to put one after the other
    (640, 7, 132, 1),
    (0, 80, 132, 1),
])  # fmt: skip
def test_how_many_heads_in_turns(programs, group, slots, turns):
    assert walk_back._turns(programs, group, slots) == turns


@pytest.mark.parametrize(("case", "dtype"), [
    *((case, torch.bfloat16) for case in CASES), *((case, torch.float16) for case in list(CASES)[1:])
])  # fmt: skip
def test_gradients_by_the_source_of_the_walks(case, dtype, device, monkeypatch):
    """As above, with what `walk_kernel`, `both_kernel` and `segments_kernel` say instead of what is said of them."""
    case = dict(CASES[case])
    both = case.pop("both", False)
    monkeypatch.setattr(walk_back, "BOTH", {64: (4, 2), 128: (8, 3)} if both else {})
    tensors, do, dfinal, segments = problem(device, dtype=dtype, **case)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = by_walks(tensors, do, dfinal, segments, 0.3, monkeypatch, walk=walk_hopper.walk)
    summed = ["segments_kernel"] * 2 if segments > 1 else []
    assert sorted(done) == sorted(summed + (["both_kernel", "walk_kernel"] if both else ["walk_kernel"] * 3))
    truth, ruler = by_torch(tensors, do, dfinal, 0.3, torch.float64), by_torch(tensors, do, dfinal, 0.3)
    for name, one, *two in zip(NAMES, mine, truth, ruler, strict=True):
        if two[0] is not None:
            close(name, one, *two, narrow=dtype == torch.bfloat16)


# Powers of two of what is given, and of the sum of o * do. Large: S, its gradient and scores are beyond 65504, as with
# losses scaled by 2^16; small: of what is rounded float16 would have few bits, or none.
POWERS = {
    "large": (dict(q=5, k=9, v=8, w=0, do=9), 9),
    "small": (dict(q=-4, k=-4, v=-4, w=-18, do=-4), -4),
    "weights": (dict(q=0, k=6, v=0, w=18, do=3), 4),
}


def of_few_bits(*tensors):
    """Multiples of 2^-4, and for the last two gates and weights that leave these normal numbers times 2^-4, as well."""
    *tensors, g, w = tensors
    return *((x * 16).round() / 16 for x in tensors), 0.02 * g, None if w is None else 1 + w.clamp(max=1)


SMALL = dict(seqlen=70, heads=2, heads_q=1, key_dim=24, value_dim=40)
CASES_OF_RANGE = {  # the last one without gradients of gates
    "g-segments2-initial-small": ("g-segments2-initial-K24-both", "small"),
    "g-w-large": (SMALL, "large"),
    "g-w-both-large": (SMALL | dict(both=True), "large"),
    "g-w-both-weights": (SMALL | dict(both=True), "weights"),
    "plain-small": (SMALL | dict(w=False), "small"),
}


@pytest.mark.parametrize("name", CASES_OF_RANGE)
def test_gradients_in_float16_do_not_depend_on_its_range(name, device, monkeypatch):
    """The same bits but for the powers: nothing overflows, and nothing made on the way gets coarser."""
    case, powers = CASES_OF_RANGE[name]
    case = dict(CASES[case] if isinstance(case, str) else case)
    want_dg, (powers, whole) = not name.startswith("plain"), POWERS[powers]
    monkeypatch.setattr(walk_back, "BOTH", {64: (4, 2), 128: (8, 3)} if case.pop("both", False) else {})
    (q, k, v, g, w, h), do, dfinal, segments = problem(device, dtype=torch.float16, **case)
    q, k, v, do, g, w = of_few_bits(q, k, v, do, g, w)
    powers = powers if w is not None else powers | dict(w=0)
    state = powers["k"] + powers["v"] + powers["w"]
    of = [powers["q"], powers["k"], powers["v"], 0, powers["w"], state]

    def gradients(on):
        tensors = [None if x is None else x * 2.0 ** (on * n) for n, x in zip(of, (q, k, v, g, w, h), strict=True)]
        last = None if dfinal is None else dfinal * 2.0 ** (on * (whole - state))
        scale = 0.5 * 2.0 ** (on * (whole - powers["q"] - state - powers["do"]))
        made = by_walks(tensors, do * 2.0 ** (on * powers["do"]), last, segments, scale, monkeypatch, want_dg=want_dg,
                        walk=walk_hopper.walk)  # fmt: skip
        return [(x.double() * 2.0 ** (on * (n - whole)), x.dtype) for n, x in zip(of, made, strict=True)]

    with gluon_in_torch.kernels_on_a_cpu():
        found = zip(NAMES, of, gradients(0), gradients(1), strict=True)
    for name, n, (one, dtype), (other, _) in found:
        assert one.isfinite().all() and other.isfinite().all(), name
        # results themselves have few bits below 2^-14
        coarsest = 2.0 ** (max(0, n - whole) - 24) if dtype == torch.float16 else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=coarsest, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("heads_q", "key_dim", "dtype"), [
    (1, 128, torch.bfloat16), (2, 64, torch.bfloat16), (1, 72, torch.float16)
])  # fmt: skip
def test_heads_in_turns_by_the_source_of_the_walks(heads_q, key_dim, dtype, device, monkeypatch):
    """Nothing is added before what it is added to has been written."""
    monkeypatch.setattr(walk_back, "IN_TURNS", True)
    monkeypatch.setattr(walk_hopper, "sms", lambda _: 1)
    tensors, do, dfinal, segments = problem(device, 150, 3 * heads_q, heads_q, key_dim, 64, dtype=dtype)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        mine = by_walks(tensors, do, dfinal, segments, 0.3, monkeypatch, walk=walk_hopper.walk)
    assert sorted(done) == ["both_kernel", "walk_kernel"]
    truth, ruler = by_torch(tensors, do, dfinal, 0.3, torch.float64), by_torch(tensors, do, dfinal, 0.3)
    for name, one, *two in zip(NAMES[:5], mine, truth, ruler, strict=False):
        close(name, one, *two, narrow=True)


@pytest.mark.parametrize(("shape", "gates", "reverse", "segments", "dtype"), [
    pytest.param((2, 300, 2, 1, 128, 72), "g-w", False, 3, torch.bfloat16, id="q1-g-w"),
    pytest.param((1, 520, 2, 2, 24, 128), "g", True, 3, torch.bfloat16, id="g-reverse"),
    pytest.param((2, 520, 2, 2, 64, 64), "steady", True, 3, torch.bfloat16, id="steady-reverse"),
    pytest.param((1, 520, 2, 1, 64, 64), "steady", False, 3, torch.bfloat16, id="q1-steady"),
    pytest.param((1, 300, 2, 2, 64, 64), "", False, 3, torch.bfloat16, id="none"),
    pytest.param((1, 300, 2, 2, 64, 64), "", True, 8, torch.bfloat16, id="none-reverse-8-of-5-chunks"),
    pytest.param((2, 300, 2, 1, 64, 64), "g-w", False, 8, torch.bfloat16, id="q1-g-w-8-of-5-chunks"),
    pytest.param((1, 300, 2, 1, 24, 72), "g-w", False, 3, torch.float16, id="q1-g-w-fp16"),
    pytest.param((1, 520, 2, 2, 64, 64), "g", True, 2, torch.float16, id="g-reverse-fp16"),
    pytest.param((1, 256, 1, 1, 64, 64), "faded", False, 2, torch.float16, id="faded-fp16"),
])  # fmt: skip
def test_what_segments_add_by_the_source(shape, gates, reverse, segments, dtype, device):
    """Either way round: heads share what is on the left, or on the right. Backwards the first segment has a tail."""
    batch, seqlen, heads, heads_k, key_dim, value_dim = shape
    k = randn(batch, seqlen, heads_k, key_dim, seed=1, dtype=dtype)
    v = randn(batch, seqlen, heads, value_dim, seed=2, dtype=dtype)
    g = -randn(batch, seqlen, heads, seed=3).square() * 0.1 if "g" in gates.split("-") else None
    g = torch.tensor([-0.05, -0.2])[None, None].expand(v.shape[:3]) if gates == "steady" else g
    if gates == "faded":  # 2^-69 is left of what the first chunk adds, and nothing else is added
        g, v[:, CHUNK : 2 * CHUNK] = torch.full(v.shape[:3], -0.75), 0.0
    w = randn(batch, seqlen, heads, seed=4).abs() if "w" in gates.split("-") else None
    with gluon_in_torch.kernels_on_a_cpu() as done:
        found = [walk_hopper.segment_sums(*x, g, w, segments=segments, reverse=reverse, turned=True)
                 for x in ((k, v), (v, k))]
    assert done == ["segments_kernel"] * 2
    local, decays, _ = sums_in_triton(k.float(), v.float(), g, w, segments=segments, reverse=reverse)
    for one in (found[0][0], found[1][0].mT):
        # an operand is rounded once, to 2^-9 or 2^-12, and Triton's interpreter cuts it instead
        assert float((one - local).norm()) <= torch.finfo(dtype).eps * float(local.norm())
    for one in found:
        torch.testing.assert_close(one[1], decays, rtol=1e-5, atol=1e-7)
        assert torch.equal(one[2], one[0].mT)


def test_one_gate_a_head_by_the_source_of_the_walk(device, monkeypatch):
    """Summed up where they are used: as summed up before, with a state, segments, a tail and gates below the lowest."""
    (q, k, v, *_, h), *_ = problem(device, seqlen=150, heads=2, heads_q=1, key_dim=24, value_dim=72, initial=True)
    g = torch.tensor([-0.05, -100.0])[None, None].expand(v.shape[:3])
    local, decays = torch.ones(3, 2, 2, 24, 72), torch.full((3, 2, 2), 0.5)
    found = []
    for steady in (False, True):
        monkeypatch.setattr(walk_hopper, "STEADY", steady)
        with gluon_in_torch.kernels_on_a_cpu() as done:
            found.append(walk_hopper.walk(q, k, v, g, None, h, local, decays, scale=0.3, segments=3))
        assert done == ["walk_kernel"]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)  # bfloat16; in float32 they differ by 1e-6


@pytest.mark.parametrize(("programs", "places", "worth"), [
    (640, 264, True), (256, 264, False), (528, 264, False), (520, 264, False), (265, 264, True), (0, 264, False),
])  # fmt: skip
def test_what_is_worth_dealing(programs, places, worth):
    assert walk_hopper._worth_dealing(programs, places) == worth


BF16, FP16 = torch.bfloat16, torch.float16
CASES_DEALT = [(3, 250, False, BF16), (3, 200, True, BF16), (7, 130, True, BF16), (9, 70, False, BF16),
               (3, 200, True, FP16)]  # fmt: skip


@pytest.mark.parametrize(("heads", "seqlen", "initial", "dtype"), CASES_DEALT)
def test_chunks_dealt_by_the_source_of_the_walk(heads, seqlen, initial, dtype, device, monkeypatch):
    """Two sequences by four programs: the same bits as a program a head, and counters that are zero again."""
    (q, k, v, g, w, h), *_ = problem(device, seqlen, heads, 1, 128, 64, initial=initial, dtype=dtype)
    common = dict(scale=1.0 if initial else 0.3, segments=1)
    common["vectors"] = walk_hopper.gate_vectors(g, w, v, -(-seqlen // CHUNK))
    monkeypatch.setattr(walk_hopper, "sms", lambda _: 2)
    counters = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(walk_hopper, "zero_counters", lambda *_: counters)
    found, launched = [], []
    run = gluon_in_torch.run
    monkeypatch.setattr(gluon_in_torch, "run", lambda *a: launched.append(a[1]) or run(*a))
    for deal in (False, True):
        monkeypatch.setattr(walk_hopper, "DEAL", deal)
        with gluon_in_torch.kernels_on_a_cpu():
            found.append(walk_hopper.walk(q, k, v, g, w, h, None, None, **common))
    assert launched == [2 * heads, 4] and not counters.any()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("given", "dtype"), [
    *((given, BF16) for given in ("g-w", "g", "w", "none", "norm")), *((given, FP16) for given in ("g-w", "w", "norm"))
])  # fmt: skip
def test_the_source_of_the_walk_forwards(given, dtype, device):
    """Two heads a query; with gates a state and an empty third segment, with a norm the sums of weights."""
    (q, k, v, g, w, h), *_ = problem(device, 150, 2, 1, 24, 72, initial=True, dtype=dtype)
    g, w = (x if name in given.split("-") else None for name, x in (("g", g), ("w", w)))
    segments, chunks = (4 if g is not None else 1), 3
    local = decays = None
    if segments > 1:
        local, decays = torch.ones(segments, 2, 2, 24, 72), torch.full((segments, 2, 2), 0.5)
    common = dict(scale=0.3, segments=segments, vectors=walk_hopper.gate_vectors(g, w, v, chunks))
    if given == "norm":
        q, k, h = q.abs(), k.abs(), None
        sums = torch.full((2, 2, 150), torch.nan)
        common |= dict(norm=0.5, inner=sums)
    with gluon_in_torch.kernels_on_a_cpu() as done:
        found = walk_hopper.walk(q, k, v, g, w, h, local, decays, **common)
    assert done == ["walk_kernel"]
    common.pop("norm", None), common.pop("inner", None)
    out, final = walk_in_torch(q, k, v, g, w, h, local, decays, **common)
    if given == "norm":
        weights = 0.3 * (q.double() * k.double().cumsum(1)).sum(-1).expand(2, 150, 2)
        torch.testing.assert_close(sums.double(), weights.transpose(1, 2), rtol=1e-2, atol=1e-2)
        out = (out.double() / (weights + 0.5)[..., None]).to(out.dtype)
    for one, other in zip(found, (out, final), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        near = 6e-3 if dtype == BF16 else 6e-3 / 8
        assert float((one.double() - other.double()).norm()) <= near * float(other.double().norm())


def test_the_walk_forwards_in_float16_does_not_depend_on_its_range(device):
    """The same bits but for powers of two, of which o has none: S and scores beyond 65504, or next to nothing."""
    (q, k, v, g, w, h), *_ = problem(device, 70, 2, 1, 24, 40, initial=True, dtype=FP16)
    q, k, v, g, w = of_few_bits(q, k, v, g, w)
    for gates, weights, powers in ((g, w, ((5, 9, 8, 0), (-4, -4, -4, 0), (0, 4, -2, 20), (0, 0, 0, -30))),
                                   (None, None, ((5, 9, 8, 0),))):  # fmt: skip
        found = []
        for a, b, c, d in ((0, 0, 0, 0), *powers):
            wide = None if weights is None else weights * 2.0**d
            vectors = walk_hopper.gate_vectors(gates, wide, v, 2)
            given = (q * 2.0**a, k * 2.0**b, v * 2.0**c, gates, wide, h * 2.0 ** (b + c + d), None, None)
            with gluon_in_torch.kernels_on_a_cpu():
                o, final = walk_hopper.walk(*given, scale=2.0 ** -(a + b + c + d), segments=1, vectors=vectors)
            found.append((o, final * 2.0 ** -(b + c + d)))
        assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("gates", [True, False], ids=["g", "none"])
@pytest.mark.parametrize("case", [
    dict(seqlen=70, heads=4, heads_q=2, key_dim=24, value_dim=72),
    dict(seqlen=130, heads=1, heads_q=1, key_dim=128, value_dim=64, segments=2, initial=True),
], ids=["q2-K24-V72", "segments2-initial-K128"])  # fmt: skip
def test_gradients_without_those_of_gates(case, gates, device, monkeypatch):
    tensors, do, dfinal, segments = problem(device, w=False, **case)
    tensors[3] = tensors[3] if gates else None
    mine = by_walks(tensors, do, dfinal, segments, 0.3, monkeypatch, want_dg=False)
    assert not mine[3].numel() and not mine[4].numel()
    truth, ruler = by_torch(tensors, do, dfinal, 0.3, torch.float64), by_torch(tensors, do, dfinal, 0.3)
    for n in (0, 1, 2, 5):
        if truth[n] is not None:
            close(NAMES[n], mine[n], truth[n], ruler[n], narrow=True)


def test_plain_walks_are_taken_where_seen_right():
    assert not walk_back.plain_unseen(128, 128, False) and not walk_back.plain_unseen(16, 64, False)
    assert walk_back.plain_unseen(128, 128, True) and walk_back.plain_unseen(24, 40, False)


def test_taken_where_seen_right(device, monkeypatch):
    """With gradients of gates, as Mamba-2 and gated linear attention need them; other forms have not run on a GPU."""
    taken = (128, 64, True, True, 1), (128, 64, True, False, 2), (128, 128, False, True, 3), (64, 64, True, False, 1)
    assert not any(walk_back.unseen(*form) for form in taken)
    others = (64, 64, True, True, 1), (64, 64, True, False, 2), (128, 64, False, False, 1), (96, 72, False, True, 1)
    assert all(walk_back.unseen(*form) for form in others)

    def done_by(name):
        def stop(*_, **__):
            raise RuntimeError(name)

        return stop

    monkeypatch.setattr(walk_back, "refusal", lambda *_: None)
    monkeypatch.setattr(walk_back, "gradients", done_by("walks"))
    monkeypatch.setattr(chunked, "_walk", done_by("chunks"))
    tensors, do, dfinal, _ = problem(device, 1, 1, 1, 128, 64)
    for want_dg, way, by in ((True, "hopper or chunks", "walks"), (False, "hopper or chunks", "chunks"),
                             (True, "chunks", "chunks")):  # fmt: skip
        with pytest.raises(RuntimeError, match=by):
            chunked.chunked_backward._init_fn(do, dfinal, *tensors, None, 1.0, CHUNK, 1, want_dg, way)
