"""The walks of linear attention and of Mamba-2 in Gluon, both passes, on a GPU: what "auto" may take them on."""

from __future__ import annotations

import functools

import pytest
import torch

from gpu_accel.testing import assert_close_to_truth
from gpu_accel.thunderkittens import linear, walk_back, walk_hopper
from gpu_accel.thunderkittens.mamba2 import mamba_chunk_scan_combined

from .judging import BF16, FP16, FP32, judge, randn, run

# batch, seqlen, heads, heads of q, K, V; gates and weights, a first state, segments
WALKS = [
    pytest.param((2, 1000, 4, 1, 64, 64), "gw", False, 0, id="K64-gw"),
    pytest.param((2, 1, 32, 2, 64, 64), "gw", True, 0, id="T1-K64-gw-initial"),
    pytest.param((2, 515, 4, 4, 128, 128), "g", True, 0, id="K128-V128-g-initial"),
    pytest.param((2, 130, 4, 4, 96, 72), "g", True, 0, id="K96-V72-g-initial"),
    pytest.param((1, 2000, 4, 2, 128, 64), "gw", True, 3, id="K128-gw-initial-segments3"),
    pytest.param((1, 4096, 4, 4, 128, 64), "g", False, 0, id="K128-g-segments"),
    pytest.param((2, 515, 4, 4, 128, 128), "", False, 0, id="K128-V128"),
    pytest.param((2, 515, 4, 4, 48, 64), "w", False, 0, id="K48-w"),
    pytest.param((2, 515, 4, 4, 16, 64), "", True, 0, id="K16-initial"),
]


@pytest.mark.parametrize(("shape", "given", "initial", "segments"), WALKS)
def test_walk_on_hopper(shape, given, initial, segments):
    check_walk(shape, given, initial, segments, BF16)


@pytest.mark.parametrize(("shape", "given", "initial", "segments"), WALKS)
def test_walk_on_hopper_in_float16(shape, given, initial, segments):
    check_walk(shape, given, initial, segments, FP16)


def check_walk(shape, given, initial, segments, kind):
    batch, seqlen, heads, heads_q, key_dim, value_dim = shape
    q, k = (randn(batch, seqlen, heads_q, key_dim, seed=s, dtype=kind) for s in (1, 2))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=kind)
    g = -randn(batch, seqlen, heads, seed=4).square() * 0.1 if "g" in given else None
    w = randn(batch, seqlen, heads, seed=5).abs() if "w" in given else None
    h = randn(batch, heads, key_dim, value_dim, seed=6) if initial else None

    def call(backend, dtype=kind):
        return linear.linear_attention(
            *(x.to(dtype) for x in (q, k, v)), g=g, w=w, scale=0.3, initial_state=h, backend=backend,
            segments=segments if backend == "hopper" else 0,
        )  # fmt: skip

    found, again = call("hopper"), call("hopper")
    for name, out, same, *two in zip(["o", "state"], found, again, call("reference", torch.float64), call("reference"),
                                     strict=True):  # fmt: skip
        assert_close_to_truth(name, out, *two)
        assert torch.equal(out, same)


# powers of two of q, k, v, weights and gradients, and of the sum of o * do: S, its gradient and scores beyond 65504,
# and numbers of which float16 has few bits
POWERS = {
    "large": (dict(q=5, k=9, v=8, w=0, do=9), 9),
    "small": (dict(q=-4, k=-4, v=-4, w=-18, do=-4), -4),
    "weights": (dict(q=0, k=6, v=0, w=18, do=3), 4),
}


@pytest.mark.parametrize(("powers", "whole"), POWERS.values(), ids=POWERS)
@pytest.mark.parametrize("case", [
    ((2, 1000, 4, 1, 64, 64), True), ((1, 65, 80, 1, 128, 64), True), ((2, 515, 4, 4, 128, 128), True),
    ((2, 515, 4, 4, 128, 128), False), ((1, 4096, 4, 4, 128, 128), True),
], ids=["K64-gw", "H80q1-T65-K128-gw", "K128-V128-g", "K128-V128-none", "K128-V128-g-segments"])  # fmt: skip
def test_walks_in_float16_do_not_depend_on_its_range(case, powers, whole, walks_back, monkeypatch):
    """The same bits but for the powers, forwards and backwards: nothing overflows, nothing on the way gets coarser."""
    (batch, seqlen, heads, heads_q, key_dim, value_dim), gated = case
    weighted = value_dim == 64
    powers = powers if weighted else powers | dict(w=0)
    # multiples of 2^-4, that with such gates and weights stay normal numbers times 2^-4, as well
    q, k = ((randn(batch, seqlen, heads_q, key_dim, seed=s) * 16).round() / 16 for s in (1, 2))
    v, do = ((randn(batch, seqlen, heads, value_dim, seed=s) * 16).round() / 16 for s in (3, 7))
    g = -randn(batch, seqlen, heads, seed=4).square() * 0.002 if gated else None
    w = 1 + randn(batch, seqlen, heads, seed=5).abs().clamp(max=1) if weighted else None
    state = powers["k"] + powers["v"] + powers["w"]
    of = [powers["q"], powers["k"], powers["v"], *([0] if gated else []), *([powers["w"]] if weighted else [])]
    back = whole - powers["q"] - state - powers["do"]

    def call(on):
        given = [q, k, v, *(x for x in (g, w) if x is not None)]
        given = [(x * 2.0 ** (on * n)).to(FP16 if i < 3 else FP32).requires_grad_()
                 for i, (n, x) in enumerate(zip(of, given, strict=True))]  # fmt: skip
        more = dict(zip([name for name, x in (("g", g), ("w", w)) if x is not None], given[3:], strict=True))
        o, final = linear.linear_attention(*given[:3], **more, scale=0.25 * 2.0 ** (on * back), backend="hopper")
        grads = torch.autograd.grad(o, given, (do * 2.0 ** (on * powers["do"])).to(FP16))
        made = zip([powers["q"] + state + back, state, *(whole - n for n in of)], (o, final, *grads), strict=True)
        return [(n, x.double() * 2.0 ** (-on * n), x.dtype) for n, x in made]

    names = ["o", "state", "dq", "dk", "dv", "dg or dw", "dw"]
    for name, (n, one, dtype), (_, other, _) in zip(names, call(0), call(1), strict=False):
        assert one.isfinite().all() and other.isfinite().all(), name
        coarsest = 2.0 ** (max(0, -n) - 24) if dtype == FP16 else 0.0  # results themselves have few bits below 2^-14
        torch.testing.assert_close(one, other, rtol=0, atol=coarsest, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "initial", "segments"), [
    pytest.param((2, 1000, 4, 4, 128, 128), False, 1, id="K128"),
    pytest.param((1, 130, 4, 2, 64, 72), True, 2, id="K64-V72-initial-segments"),
    pytest.param((1, 65, 1, 1, 24, 64), False, 1, id="H1-T65-K24"),
])  # fmt: skip
def test_one_gate_a_head(shape, initial, segments, dtype, monkeypatch):
    """Retention's decays as the walk takes them, one of them below the lowest gate."""
    batch, seqlen, heads, heads_q, key_dim, value_dim = shape
    q, k = (randn(batch, seqlen, heads_q, key_dim, seed=s, dtype=dtype) for s in (1, 2))
    v = randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype)
    decay = torch.cat([linear.retention_decay(heads, "cuda")[1:], torch.tensor([-100.0], device="cuda")])
    h = randn(batch, heads, key_dim, value_dim, seed=6) if initial else None
    vectors, seen = walk_hopper.gate_vectors, []
    monkeypatch.setattr(walk_hopper, "gate_vectors", lambda g, *a, **k: seen.append(g) or vectors(g, *a, **k))

    def call(backend, dtype=dtype):
        return linear.linear_attention(
            *(x.to(dtype) for x in (q, k, v)), g=decay[None, None].expand(v.shape[:3]), scale=0.3, initial_state=h,
            backend=backend, segments=segments if backend == "hopper" else 0,
        )  # fmt: skip

    found, again = call("hopper"), call("hopper")
    assert not any(g is not None for g in seen)
    for name, out, same, *two in zip(["o", "state"], found, again, call("reference", torch.float64), call("reference"),
                                     strict=True):  # fmt: skip
        assert_close_to_truth(name, out, *two)
        assert torch.equal(out, same)


@pytest.fixture
def walks_back(monkeypatch):
    """Gradients by `walk_back` for "hopper", also of forms that are not taken unasked yet; those that were made."""
    made, gradients = [], walk_back.gradients

    def counted(*arguments, **options):
        made.append(options["segments"])
        return gradients(*arguments, **options)

    monkeypatch.setattr(walk_back, "unseen", lambda *form: None)
    monkeypatch.setattr(walk_back, "gradients", counted)
    return made


# as WALKS; T65 has one step in its last chunk, H80q1 ten blocks of heads in the kernel of pairs
WALKS_BACK = [
    pytest.param((2, 1000, 4, 1, 64, 64), "gw", False, 0, id="K64-gw"),
    pytest.param((1, 65, 80, 1, 128, 64), "gw", False, 0, id="H80q1-T65-K128-gw"),
    pytest.param((2, 515, 4, 4, 128, 128), "g", True, 0, id="K128-V128-g-initial"),
    pytest.param((2, 130, 4, 4, 96, 72), "g", True, 0, id="K96-V72-g-initial"),
    pytest.param((1, 2000, 4, 2, 128, 64), "gw", True, 3, id="K128-gw-initial-segments3"),
    pytest.param((1, 4096, 4, 4, 128, 128), "g", False, 0, id="K128-V128-g-segments"),
    pytest.param((2, 515, 8, 2, 48, 64), "g", True, 0, id="K48-q2-g-initial"),
    pytest.param((2, 1, 32, 32, 16, 16), "gw", False, 0, id="T1-K16-V16-gw"),
]


@pytest.mark.parametrize(("shape", "given", "initial", "segments"), WALKS_BACK)
def test_walks_back_on_hopper(shape, given, initial, segments, walks_back, monkeypatch):
    """Keys and values by a walk each."""
    monkeypatch.setattr(walk_back, "BOTH", {})
    check_walks_back(shape, given, initial, segments, walks_back)


@pytest.mark.parametrize(("shape", "given", "initial", "segments"), [p for p in WALKS_BACK if p.values[0][5] <= 64])
def test_keys_and_values_in_one_walk(shape, given, initial, segments, walks_back):
    check_walks_back(shape, given, initial, segments, walks_back)


@pytest.mark.parametrize("both", [False, True], ids=["apart", "both"])
@pytest.mark.parametrize(("shape", "given", "initial", "segments"), WALKS_BACK)
def test_walks_back_on_hopper_in_float16(shape, given, initial, segments, both, walks_back, monkeypatch):
    if not both:
        monkeypatch.setattr(walk_back, "BOTH", {})
    elif shape[5] > 64:
        pytest.skip("keys and values in one walk: V up to 64")
    check_walks_back(shape, given, initial, segments, walks_back, FP16)


def check_walks_back(shape, given, initial, segments, walks_back, dtype=BF16):
    batch, seqlen, heads, heads_q, key_dim, value_dim = shape
    tensors = [randn(batch, seqlen, heads_q, key_dim, seed=s, dtype=dtype) for s in (1, 2)]
    tensors.append(randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype))
    grads = [randn(batch, seqlen, heads, value_dim, seed=7), randn(batch, heads, key_dim, value_dim, seed=8)]
    names = ["o", "state", "dq", "dk", "dv"]
    optional = {
        "g": -randn(batch, seqlen, heads, seed=4).square() * 0.1 if "g" in given else None,
        "w": randn(batch, seqlen, heads, seed=5).abs() if "w" in given else None,
        "initial_state": randn(batch, heads, key_dim, value_dim, seed=6) if initial else None,
    }
    present = [name for name, x in optional.items() if x is not None]
    tensors += [optional[name] for name in present]

    def function(backend):
        backend = "hopper" if backend == "portable" else backend

        def call(q, k, v, *more):
            return linear.linear_attention(
                q, k, v, **dict(zip(present, more, strict=True)), scale=0.3, backend=backend,
                segments=segments if backend == "hopper" else 0,
            )  # fmt: skip

        return call

    # Of a single step nothing is left in dg: what it passes to itself and what it passes to the last state are each in
    # two sums that cancel, and the truth is 0. Each of both is one number in float32 times the weight, which one sum
    # rounds and the other one may not (a fused multiply-add): half an epsilon from what they stand for, each.
    floors = {}
    if seqlen == 1:
        q, k, v, do = (x.double().repeat_interleave(heads // x.shape[2], 2)[:, 0] for x in (*tensors[:3], grads[0]))
        itself = 0.3 * (q * k).sum(-1) * (do * v).sum(-1)
        onwards = (k * (grads[1].double() @ v[..., None])[..., 0]).sum(-1)
        both = (itself.abs() + onwards.abs()) * (1.0 if optional["w"] is None else optional["w"][:, 0])
        floors["dg"] = torch.finfo(FP32).eps * both.max().item()
    judge(names + ["d" + name for name in present], function, tensors, grads, floors=floors)
    assert len(walks_back) == 1
    once, again = (run(function("hopper"), tensors, grads) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("gates", [True, False], ids=["decay", "none"])
@pytest.mark.parametrize(("shape", "initial", "segments"), [
    pytest.param((2, 1000, 4, 4, 128, 128), False, 0, id="K128-V128"),
    pytest.param((1, 4096, 4, 4, 128, 128), True, 0, id="K128-V128-initial-segments"),
    pytest.param((2, 515, 4, 2, 64, 64), True, 1, id="q2-K64-V64-initial"),
    pytest.param((3, 65, 2, 2, 24, 40), False, 0, id="K24-V40"),
    pytest.param((1, 4096, 4, 4, 64, 128), True, 0, id="K64-V128-initial-segments"),
    pytest.param((2, 300, 4, 2, 128, 64), True, 2, id="q2-K128-V64-initial-segments2"),
    pytest.param((2, 4096, 16, 16, 16, 64), False, 0, id="K16-V64"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_walks_back_without_gradients_of_gates(shape, initial, segments, gates, dtype, monkeypatch):
    batch, seqlen, heads, heads_q, key_dim, value_dim = shape
    tensors = [randn(batch, seqlen, heads_q, key_dim, seed=s, dtype=dtype) for s in (1, 2)]
    tensors.append(randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype))
    tensors += [randn(batch, heads, key_dim, value_dim, seed=6)] if initial else []
    g = -randn(batch, seqlen, heads, seed=4).square() * 0.1 if gates else None
    made, plain = [], walk_back.plain

    def counted(*arguments, **options):
        made.append(options["segments"])
        return plain(*arguments, **options)

    monkeypatch.setattr(walk_back, "plain_unseen", lambda *_: None)
    monkeypatch.setattr(walk_back, "plain", counted)

    def function(backend):
        backend = "hopper" if backend == "portable" else backend
        return lambda q, k, v, h=None: linear.linear_attention(
            q, k, v, g=g.double() if gates and q.dtype == torch.float64 else g, initial_state=h, backend=backend,
            scale=0.3, segments=segments if backend == "hopper" else 0,
        )  # fmt: skip

    grads = [randn(batch, seqlen, heads, value_dim, seed=7), randn(batch, heads, key_dim, value_dim, seed=8)]
    judge(["o", "state", "dq", "dk", "dv", "dinitial"][: 2 + len(tensors)], function, tensors, grads)
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("seqlen", "key_dim", "value_dim"), [(515, 128, 128), (1, 128, 64), (300, 64, 72)])
def test_normalised_walk(seqlen, key_dim, value_dim, dtype):
    q, k = (randn(2, seqlen, 16, key_dim, seed=s, dtype=dtype).abs() for s in (1, 2))
    v = randn(2, seqlen, 16, value_dim, seed=3, dtype=dtype)

    def function(backend):
        backend = "hopper" if backend == "portable" else backend
        return lambda q, k, v: linear.chunk_linear_attn(q, k, v, backend=backend)[0]

    judge(["o", "dq", "dk", "dv"], function, [q, k, v], [randn(2, seqlen, 16, value_dim, seed=4)])


def test_mamba():
    mamba("portable")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["hopper", "auto"])
def test_mamba_of_walks_back(backend, dtype, monkeypatch):
    made, gradients = [], walk_back.gradients
    monkeypatch.setattr(walk_back, "gradients", lambda *a, **options: made.append(1) or gradients(*a, **options))
    mamba(backend, dtype)
    assert made


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("initial", [False, True], ids=["", "initial"])
@pytest.mark.parametrize(("heads", "seqlen"), [(96, 200), (100, 2000), (176, 65), (270, 64)])
def test_chunks_dealt(heads, seqlen, initial, dtype, monkeypatch):
    """More programs than an H100 or H200 holds, each with an even share of all chunks: the same bits, again and again.

    Few steps leave a program as little as one chunk before the next one needs its state.
    """
    q, k = (randn(3, seqlen, 1, 128, seed=s, dtype=dtype) for s in (1, 2))
    v, g = randn(3, seqlen, heads, 64, seed=3, dtype=dtype), -randn(3, seqlen, heads, seed=4).square()
    h = randn(3, heads, 128, 64, seed=5) if initial else None
    call = functools.partial(walk_hopper.walk, q, k, v, g, -g, h, None, None, scale=1.0, segments=1)
    monkeypatch.setattr(walk_hopper, "DEAL", False)
    whole = call()
    monkeypatch.setattr(walk_hopper, "DEAL", True)
    counts, launch = [], walk_hopper.QuickLaunch.__call__

    def counted(self, key, count, *arguments):
        counts.append(count)
        launch(self, key, count, *arguments)

    monkeypatch.setattr(walk_hopper.QuickLaunch, "__call__", counted)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(whole, call(), strict=True))
    places = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    if walk_hopper._worth_dealing(3 * heads, places):
        assert set(counts) == {places}
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("turns", [2, 16])
def test_mamba_of_heads_in_turns(turns, dtype, monkeypatch):
    """Several heads a program, whose dq and dk the copy engine adds up; the same bits again."""
    seen = []
    monkeypatch.setattr(walk_back, "IN_TURNS", True)
    monkeypatch.setattr(walk_back, "_turns", lambda *_: seen.append(1) or turns)
    mamba("hopper", dtype)
    assert seen
    q, k = (randn(3, 1000, 1, 128, seed=s, dtype=dtype) for s in (1, 2))
    v, do = (randn(3, 1000, 16, 64, seed=s, dtype=dtype) for s in (3, 4))
    g, w = -randn(3, 1000, 16, seed=5).square() * 0.1, randn(3, 1000, 16, seed=6).abs()
    tail = (q, k, v, g, w, None, None, None)
    first = walk_back.gradients(do, None, *tail, scale=1.0, segments=1)
    for _ in range(20):
        again = walk_back.gradients(do, None, *tail, scale=1.0, segments=1)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(walk_back, "IN_TURNS", False)
    apart = walk_back.gradients(do, None, *tail, scale=1.0, segments=1)
    assert torch.equal(first[2], apart[2])
    for a, b in zip(first[3:], apart[3:], strict=True):  # dg, dw and the gradient of the states
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def mamba(kernels, dtype=BF16):
    heads = 32  # dA and dbias are one number a head: enough of them that the yardstick does not hit all by luck
    x, z = (randn(2, 500, heads, 64, seed=s, dtype=dtype) for s in (1, 2))
    B, C = (randn(2, 500, 2, 128, seed=s, dtype=dtype) for s in (3, 4))
    dt, (a, d, bias) = randn(2, 500, heads, seed=5), (randn(heads, seed=s) for s in (6, 7, 8))
    tensors = [x, dt, -a.exp(), B, C, d, z, bias]

    def function(backend):
        backend = kernels if backend == "portable" else backend
        return lambda x, dt, A, B, C, D, z, bias: mamba_chunk_scan_combined(
            x, dt, A, B, C, 256, D, z, bias, dt_softplus=True, backend=backend
        )

    names = ["y", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "dbias"]
    judge(names, function, tensors, [randn(2, 500, heads, 64, seed=9)])
