"""Linear attention, convolutions, losses and the ladder on a GPU: what "auto" may take the kernels on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_accel.testing import assert_close_to_truth
from gpu_accel.thunderkittens import (
    ladder,
    linear,
    long_conv,
    losses,
    rows,
    template,
)
from gpu_accel.thunderkittens.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from gpu_accel.thunderkittens.delta import delta_rule
from gpu_accel.thunderkittens.features import fused_chunk_based, hedgehog_attention
from gpu_accel.thunderkittens.long_conv import FlashFFTConv
from gpu_accel.thunderkittens.losses import cross_entropy, fused_linear_cross_entropy

from .judging import BF16, FP16, FP32, judge, randn, run

SHAPES = [
    pytest.param((2, 1023, 4, 4, 128, 128), 0, id="B2-T1023-H4-K128-V128"),
    pytest.param((1, 4096, 2, 1, 64, 96), 0, id="B1-T4096-H2q1-K64-V96-segments"),
    pytest.param((3, 65, 2, 2, 24, 40), 3, id="B3-T65-H2-K24-V40"),
    pytest.param((1, 43884, 1, 1, 64, 64), 0, id="T43884-K64-V64"),  # where another project's kernels gave NaN
    # one step is one number a head, and the yardstick may hit a few by luck: so there are many
    pytest.param((1, 1, 32, 32, 128, 256), 0, id="T1-H32-K128-V256"),
]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("shape", "segments"), SHAPES)
def test_linear_attention(shape, segments, dtype):
    batch, seqlen, heads, heads_q, key_dim, value_dim = shape
    tensors = [
        randn(batch, seqlen, heads_q, key_dim, seed=1, dtype=dtype),
        randn(batch, seqlen, heads_q, key_dim, seed=2, dtype=dtype),
        randn(batch, seqlen, heads, value_dim, seed=3, dtype=dtype),
        -randn(batch, seqlen, heads, seed=4).square() * 0.1,
        randn(batch, seqlen, heads, seed=5).abs(),
        randn(batch, heads, key_dim, value_dim, seed=6),
    ]
    grads = [randn(batch, seqlen, heads, value_dim, seed=7), randn(batch, heads, key_dim, value_dim, seed=8)]

    def function(backend):
        return lambda q, k, v, g, w, h: linear.linear_attention(
            q, k, v, g=g, w=w, initial_state=h, segments=segments if backend == "portable" else 0, backend=backend
        )

    # three products of tf32 keep about 22 bits of float32, and torch's own products 24
    factor = 8.0 if dtype == FP32 else 2.0
    judge(["o", "state", "dq", "dk", "dv", "dg", "dw", "dinitial"], function, tensors, grads, factor)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("key_dim", [16, 64, 128])
def test_one_walk_and_two_kernels(key_dim, dtype):
    """Both forwards are right; at K = 128 float16 has two kernels only."""
    tensors = [randn(2, 515, 4, d, seed=s, dtype=dtype) for s, d in ((1, key_dim), (2, key_dim), (3, 128))]
    gates = {"g": -randn(2, 515, 4, seed=4).square() * 0.1, "w": randn(2, 515, 4, seed=5).abs()}
    state = randn(2, 4, key_dim, 128, seed=6)

    def call(options, backend="portable", wide=None):
        qkv = [x if wide is None else x.to(wide) for x in tensors]
        return linear.linear_attention(*qkv, **gates | options, initial_state=state, backend=backend)

    for given in ({}, {"g": None}, {"w": None}, {"g": None, "w": None}):
        truth, ruler = call(given, "reference", torch.float64), call(given, "reference")
        for how in ({"fused": False}, {"fused": None, "segments": 1}, {"fused": None, "segments": 3}):
            for name, *three in zip(["o", "state"], call(given | how), truth, ruler, strict=True):
                assert_close_to_truth(f"{name} {how}", *three)


def test_packed_sequences():
    lengths = [1, 0, 300, 64, 129]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    total = sum(lengths)
    tensors = [randn(1, total, 2, d, seed=s, dtype=BF16) for s, d in ((1, 64), (2, 64), (3, 128))]
    tensors.append(-randn(1, total, 2, seed=4).square())
    grads = [randn(1, total, 2, 128, seed=5), randn(len(lengths), 2, 64, 128, seed=6)]

    def function(backend):
        return lambda q, k, v, g: linear.linear_attention(q, k, v, g=g, cu_seqlens=cu, backend=backend)

    judge(["o", "states", "dq", "dk", "dv", "dg"], function, tensors, grads)


def alone(code):
    """Run a check in a process of its own: one that ends in an illegal access would fail all tests after it."""
    code = f"from tests.gpu.test_thunderkittens import *; {code}"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_delta_rule(gated):
    delta_rule_of(gated, BF16)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", ["FP16", "FP32"])
def test_delta_rule_in_other_dtypes(dtype, gated):
    """In processes of their own."""
    alone(f"delta_rule_of({gated}, {dtype})")


def delta_rule_of(gated, dtype):
    q, k = (torch.nn.functional.normalize(randn(2, 515, 4, 64, seed=s), dim=-1).to(dtype) for s in (1, 2))
    tensors = [q, k, randn(2, 515, 4, 128, seed=3, dtype=dtype), randn(2, 515, 4, seed=4).sigmoid()]
    tensors += [randn(2, 4, 64, 128, seed=5)] + ([-randn(2, 515, 4, seed=6).square() * 0.1] if gated else [])

    def function(backend):
        return lambda q, k, v, beta, h, g=None: delta_rule(q, k, v, beta, g=g, initial_state=h, backend=backend)

    grads = [randn(2, 515, 4, 128, seed=7), randn(2, 4, 64, 128, seed=8)]
    # in fp16 three roundings show, of T, of what it multiplies and of the product: the yardstick rounds the product
    factor = {FP32: 8.0, FP16: 3.0}.get(dtype, 2.0)
    judge(["o", "state", "dq", "dk", "dv", "dbeta", "dinitial", "dg"][: 8 if gated else 7], function, tensors, grads,
          factor)  # fmt: skip


def test_delta_rule_of_packed_sequences():
    lengths = [1, 0, 300, 64, 129]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k = (torch.nn.functional.normalize(randn(1, 494, 2, 128, seed=s), dim=-1).to(BF16) for s in (1, 2))
    tensors = [q, k, randn(1, 494, 4, 128, seed=3, dtype=BF16), randn(1, 494, 4, seed=4).sigmoid()]
    tensors.append(-randn(1, 494, 4, seed=5).square())
    grads = [randn(1, 494, 4, 128, seed=6), randn(len(lengths), 4, 128, 128, seed=7)]

    def function(backend):
        return lambda q, k, v, beta, g: delta_rule(q, k, v, beta, g=g, cu_seqlens=cu, backend=backend)

    judge(["o", "states", "dq", "dk", "dv", "dbeta", "dg"], function, tensors, grads)


@pytest.mark.parametrize(("batch", "seqlen", "dim", "width"), [(2, 515, 300, 4), (1, 2000, 520, 3), (3, 2, 64, 4)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_causal_conv1d_by_walks(dtype, batch, seqlen, dim, width):
    shapes = (batch, seqlen, dim + 8), (dim, width), (dim,)
    tensors = [randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]

    def function(backend):
        def call(x, w, b):
            return causal_conv1d_fn(x[..., 8:].transpose(1, 2), w, b, activation="silu", backend=backend)

        return call

    judge(["y", "dx", "dw", "db"], function, tensors, [randn(batch, seqlen, dim, seed=5).transpose(1, 2)])


@pytest.mark.parametrize("innermost", ["steps", "channels"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_causal_conv1d(dtype, innermost):
    x, weight, bias = (randn(*s, seed=n, dtype=dtype) for n, s in ((1, (2, 515, 300)), (2, (300, 4)), (3, (300,))))
    state = randn(2, 300, 3, seed=4, dtype=dtype)

    def function(backend):
        def call(x, w, b, h):
            x = x.transpose(1, 2) if innermost == "channels" else x.transpose(1, 2).contiguous()
            return causal_conv1d_fn(x, w, b, None, h, activation="silu", backend=backend)

        return call

    judge(["y", "dx", "dw", "db", "dh"], function, [x, weight, bias, state], [randn(2, 300, 515, seed=5)])
    x = x.transpose(1, 2)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu", backend="portable")
    ring, shifted = (torch.zeros(2, 300, 5, dtype=dtype, device="cuda") for _ in range(2))
    for t in range(9):
        seen = torch.full((2,), t, dtype=torch.int32, device="cuda")
        a = causal_conv1d_update(x[..., t], ring, weight, bias, "silu", seen, backend="portable")
        b = causal_conv1d_update(x[..., t], shifted, weight, bias, "silu", backend="portable")
        assert torch.equal(a, b)
        torch.testing.assert_close(a, whole[..., t])


@pytest.mark.parametrize("layout", ["walks", "states", "steps"])
def test_causal_conv1d_of_many_sequences_and_infinite_numbers(layout):
    """More than the 65535 programs that a grid's other dimensions may have; infinity reaches what it is added to."""
    x, weight = randn(70_000, 16, 5, seed=1).abs() + 1, randn(16, 3, seed=2).abs() + 1
    x[69_999, 1, 1], weight[3, 2] = torch.inf, torch.inf
    dy, state = randn(70_000, 16, 5, seed=3).abs() + 1, randn(70_000, 16, 2, seed=4).abs()
    if layout != "steps":
        x, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy))
    found = []
    for backend in ("portable", "reference"):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = causal_conv1d_fn(*leaves, None, None, state if layout == "states" else None, backend=backend)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
        kept = state.clone()
        found[-1] += (causal_conv1d_update(x[..., 0], kept, weight, backend=backend), kept)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert found[1][0].isinf().any() and not found[1][0].isnan().any()


def test_decays_of_retention_in_one_kernel():
    for heads in (1, 16, 100):
        v = randn(2, 200, heads, 64, seed=1, dtype=BF16)
        decay = linear.retention_decay(heads, "cuda")
        assert torch.equal(linear.retention_op(v), decay)
        for backend in ("auto", "portable"):
            one, other = linear.chunk_retention(v, v, v, backend=backend), linear.chunk_simple_gla(
                v, v, v, g_gamma=decay, backend=backend)  # fmt: skip
            assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_cross_entropy(dtype):
    x, w = randn(700, 256, seed=1, dtype=dtype), randn(50_257, 256, seed=2, dtype=dtype) / 16
    y = torch.arange(700, device="cuda") * 7919 % 50_257
    y[5] = -100
    one = torch.ones((), device="cuda")
    options = dict(label_smoothing=0.1, lse_square_scale=1e-3, softcap=30.0)

    def fused(backend):
        return lambda x, w: fused_linear_cross_entropy(x, w, y, backend=backend, **options)

    judge(["loss", "dx", "dw"], fused, [x, w], [one])
    judge(["loss", "dx"], lambda b: lambda t: cross_entropy(t, y, backend=b), [x @ w.T], [one])


def test_cross_entropy_four_at_a_time(monkeypatch):
    monkeypatch.setattr(losses, "FOUR", True)
    for dtype in (BF16, FP16, FP32):
        test_cross_entropy(dtype)


def odd_sizes(key_dim, value_dim, dtype, skip=0):
    """q, k and v whose rows are read two bytes at a time; with `skip`, v begins off 16 bytes."""
    tensors = [randn(2, 515, 4, d, seed=s, dtype=dtype) for s, d in ((1, key_dim), (2, key_dim), (3, value_dim + skip))]
    grads = [randn(2, 515, 4, value_dim, seed=4), randn(2, 4, key_dim, value_dim, seed=5)]

    def function(backend):
        return lambda q, k, v: linear.linear_attention(q, k, v[..., skip:], scale=0.1, backend=backend)

    judge(["o", "state", "dq", "dk", "dv"], function, tensors, grads)


@pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(153, 64, BF16), (192, 33, FP16)])
def test_odd_sizes(key_dim, value_dim, dtype):
    odd_sizes(key_dim, value_dim, dtype)


@pytest.mark.parametrize("arguments", ["64, 1, BF16", "9, 16, FP16", "16, 64, BF16", "64, 16, BF16, 1"])
def test_tiles_of_16_columns(arguments):
    """What they are replaced by (chunked._block), in a process of its own: such tiles ended in illegal accesses."""
    alone(f"odd_sizes({arguments})")


# one step divided by its own weight is v, and what is left of gradients of q and k is rounding
@pytest.mark.parametrize(("seqlen", "key_dim", "value_dim", "norm"), [
    (515, 16, 64, True), (515, 16, 64, False), (1, 16, 64, False), (130, 8, 72, True), (130, 8, 72, False)
])  # fmt: skip
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_based(backend, seqlen, key_dim, value_dim, norm):
    q, k = (randn(2, seqlen, 16, key_dim, seed=s, dtype=BF16) for s in (1, 2))
    v = randn(2, seqlen, 16, value_dim, seed=3, dtype=BF16)

    def function(given):
        given = backend if given == "portable" else given
        return lambda q, k, v: fused_chunk_based(q, k, v, use_norm=norm, backend=given)

    judge(["o", "dq", "dk", "dv"], function, [q, k, v], [randn(2, seqlen, 16, value_dim, seed=4)])


@pytest.mark.parametrize(("backend", "dtype"), [("hopper", BF16), ("portable", BF16), ("portable", FP16)])
@pytest.mark.parametrize(("key_dim", "count", "value_dim"), [(128, 64, 128), (24, 40, 72)])
def test_hedgehog(key_dim, count, value_dim, backend, dtype):
    q, k = (randn(2, 300, 4, key_dim, seed=s, dtype=dtype) for s in (1, 2))
    v = randn(2, 300, 4, value_dim, seed=3, dtype=dtype)
    maps = [(randn(4, key_dim, count, seed=s) / key_dim**0.5).to(dtype) for s in (4, 5)]

    def function(given):
        given = backend if given == "portable" else given
        return lambda *tensors: hedgehog_attention(*tensors, backend=given)

    names = ["o", "dq", "dk", "dv", "dq_map", "dk_map"]
    judge(names, function, [q, k, v, *maps], [randn(2, 300, 4, value_dim, seed=6)])


@pytest.mark.parametrize("size", [256, 2048, 4096])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_long_convolution(dtype, size):
    convolve(dtype, size, 3)


@pytest.mark.parametrize(("size", "batch"), [(256, 19), (512, 3), (1024, 3), (2048, 1), (4096, 19)])
def test_long_convolution_by_products_of_float16(size, batch, monkeypatch):
    """Sizes with sides that are equal and not, by both kinds of tensor-core instructions; one turn and several."""
    monkeypatch.setattr(long_conv, "_PROGRAMS", 1)
    convolve(BF16, size, batch)


def convolve(dtype, size, batch):
    u, pre, post = (randn(batch, 5, size // 2, seed=s, dtype=dtype) for s in (1, 2, 3))
    k = randn(5, size // 2, seed=4) / size**0.5

    def function(backend):
        return FlashFFTConv(size, backend=backend)

    factor = 16.0 if dtype == FP32 else 2.0  # torch's transforms are float32, ours tf32 in three products
    judge(["y", "du", "dk", "dpre", "dpost"], function, [u, k, pre, post], [randn(batch, 5, size // 2, seed=5)], factor)


def test_offsets_beyond_two_to_the_31():
    """A view whose last token lies more than 2^31 elements from its first."""
    step = 2**31 // 63 + 64
    buffer = torch.empty(63 * step + 64, dtype=BF16, device="cuda")
    x = buffer.as_strided((1, 64, 1, 64), (0, step, 64, 1))
    x.copy_(randn(1, 64, 1, 64, seed=1))
    near = x.contiguous()
    far_o, far_state = linear.linear_attention(x, x, x, backend="portable")
    o, state = linear.linear_attention(near, near, near, backend="portable")
    assert torch.equal(far_o, o) and torch.equal(far_state, state)


def test_the_same_bits_again():
    q, k, v = (randn(2, 777, 4, 64, seed=s, dtype=BF16) for s in (1, 2, 3))
    g = -randn(2, 777, 4, seed=4).square()
    grads = [randn(2, 777, 4, 64, seed=5), randn(2, 4, 64, 64, seed=6)]

    def call(q, k, v, g):
        return linear.linear_attention(q, k, v, g=g, backend="portable")

    for one, other in zip(run(call, [q, k, v, g], grads), run(call, [q, k, v, g], grads), strict=True):
        assert torch.equal(one, other)


def test_compiled_by_torch():
    q, k, v = (randn(1, 300, 2, 64, seed=s, dtype=BF16) for s in (1, 2, 3))
    g = -randn(1, 300, 2, seed=4).square()

    def call(q, k, v, g):
        return linear.linear_attention(q, k, v, g=g, backend="portable")[0]

    compiled = torch.compile(call, fullgraph=True)
    assert torch.equal(compiled(q, k, v, g), call(q, k, v, g))
    x = randn(9, 1000, seed=1, dtype=BF16)
    norm = torch.compile(lambda t: rows.rms_norm(t, backend="portable"), fullgraph=True)
    assert torch.equal(norm(x), rows.rms_norm(x, backend="portable"))


@pytest.mark.parametrize("shape", [(300, 520, 200), (4096, 512, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_template_from_registers(shape, dtype, monkeypatch):
    """What it does where TMA cannot write the rows of a result."""
    monkeypatch.setattr(template, "_BY_TMA", False)
    test_levels_of_the_ladder("template", shape, dtype)


@pytest.mark.parametrize("level", [level.name for level in ladder.LEVELS])
@pytest.mark.parametrize("shape", [(300, 520, 200), (4096, 512, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_levels_of_the_ladder(level, shape, dtype):
    """Edges in every direction, and more tiles than programs that stay."""
    m, n, k = shape
    if level in ("template", "specialised") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    a, b = randn(m, k, seed=1, dtype=dtype), randn(k, n, seed=2, dtype=dtype)
    assert_close_to_truth("product", ladder.run(level, a, b), a.double() @ b.double(), a @ b)
