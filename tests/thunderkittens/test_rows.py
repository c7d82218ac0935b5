"""Norms, softmax, rotary and gated activations against float64, with gradients; short and long rows."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.rotary import apply_rotary
from gpu_accel.thunderkittens import elements, reference, rows
from tests.thunderkittens.helpers import close, randn, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = {
    "rms-bf16-w300": dict(center=False, width=300, dtype=BF16),
    "layer-fp16-w129-bias": dict(center=True, width=129, dtype=FP16, bias=True),
    "layer-fp32-w1": dict(center=True, width=1, bias=True),
    "rms-fp32-bare": dict(center=False, width=33, weight=False),
    "rms-residual-dropout": dict(center=False, width=70, residual=FP32, dtype=BF16, dropout_p=0.3),
    "layer-residual-dropout": dict(center=True, width=70, residual=FP32, dropout_p=0.5, bias=True),
    "layer-long-residual": dict(center=True, width=77, residual=FP32, bias=True, whole=16),
    "rms-long-dropout": dict(center=False, width=77, dropout_p=0.2, whole=16),
    "rms-no-rows": dict(center=False, width=8, count=0),
}


@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("together", [1024, 0], ids=["", "two-reductions"])
def test_norm(together, case, device, monkeypatch):
    monkeypatch.setattr(rows, "_TOGETHER", together)
    case = dict(dtype=FP32, weight=True, bias=False, residual=None, dropout_p=0.0, count=5, whole=rows.WHOLE) | case
    monkeypatch.setattr(rows, "WHOLE", case["whole"])
    width, dtype, count = case["width"], case["dtype"], case["count"]
    x = (3 + randn(count, width, seed=1, device=device)).to(dtype)
    tensors = [
        x,
        randn(width, seed=2, device=device, dtype=dtype) if case["weight"] else None,
        randn(width, seed=3, device=device, dtype=dtype) if case["bias"] else None,
        randn(count, width, seed=4, device=device, dtype=case["residual"]) if case["residual"] else None,
    ]

    def norm(backend):
        def call(x, weight, bias, residual):
            return rows._norm(x, weight, bias, residual, 1e-5, case["dropout_p"], 2**40 + 11, True, backend,
                              case["center"])  # fmt: skip

        return call

    grads = [randn(count, width, seed=s, device=device) for s in (5, 6)]
    mine = run(norm("portable"), tensors, grads)
    truth, ruler = run(norm("reference"), tensors, grads, torch.float64), run(norm("reference"), tensors, grads)
    for name, *three in zip(("y", "h", "dx", "dw", "db", "dr"), mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three)


def test_the_reference_is_torchs(device):
    x, w, b = randn(4, 9, seed=1).double(), randn(9, seed=2).double(), randn(9, seed=3).double()
    torch.testing.assert_close(
        rows.layer_norm(x, w, b, backend="reference"), torch.nn.functional.layer_norm(x, (9,), w, b)
    )
    torch.testing.assert_close(
        rows.rms_norm(x, w, backend="reference"), torch.nn.functional.rms_norm(x, (9,), w, eps=1e-6)
    )


def test_a_large_mean_does_not_spoil_the_variance(device, monkeypatch):
    x = 1000 + randn(2, 300, seed=1, device=device)
    truth = rows.layer_norm(x.double(), backend="reference")
    for whole in (rows.WHOLE, 64):
        monkeypatch.setattr(rows, "WHOLE", whole)
        assert (rows.layer_norm(x, backend="portable") - truth).abs().max() < 1e-3


def test_dropout_drops_as_many_as_it_says_and_the_same_again(device):
    x = torch.ones(32, 1024, device=device)
    y, h = rows.rms_norm(x, dropout_p=0.25, seed=3, prenorm=True, backend="portable")
    assert h.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (h == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    _, again = rows.rms_norm(x, dropout_p=0.25, seed=3, prenorm=True, backend="portable")
    _, other = rows.rms_norm(x, dropout_p=0.25, seed=4, prenorm=True, backend="portable")
    assert torch.equal(h, again) and not torch.equal(h, other)
    assert torch.equal(h == 0, ~reference.dropout_keep(3, 32, 1024, 0.25, device))


def test_philox_known_answers():
    """The vector of zeros published with Random123 (kat_vectors, philox4x32-10)."""
    zero, ones = torch.tensor([0]), torch.tensor([0xFFFFFFFF])
    assert reference.philox(0, zero, zero).item() == 0x6627E8D5
    assert reference.philox(0, ones, zero).item() != reference.philox(0, zero, ones).item()


@pytest.mark.parametrize("whole", [rows.WHOLE, 16], ids=["whole", "long"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_softmax(whole, dtype, device, monkeypatch):
    monkeypatch.setattr(rows, "WHOLE", whole)
    x = randn(6, 67, seed=1, dtype=dtype, device=device) * 4
    x[1] = 3e4 if dtype != BF16 else 1e30
    x[2, :40] = -torch.inf
    grads = [randn(6, 67, seed=2, device=device)]
    mine = run(lambda t: rows.softmax(t, backend="portable"), [x], grads)
    truth = run(lambda t: rows.softmax(t, backend="reference"), [x], grads, torch.float64)
    ruler = run(lambda t: torch.softmax(t, -1), [x], grads)
    for name, *three in zip(("y", "dx"), mine, truth, ruler, strict=True):
        close(name, *three)


@pytest.mark.parametrize("shape", [(3, 1), (0, 4), (3, 0), (5,), (2, 3, 17)], ids=str)
def test_softmax_shapes(shape, device):
    x = randn(*shape, seed=1, device=device)
    torch.testing.assert_close(rows.softmax(x, backend="portable"), torch.softmax(x, -1))


def test_softmax_of_nothing_but_minus_infinity_is_torchs(device, monkeypatch):
    x = torch.full((1, 40), -torch.inf, device=device)
    for whole in (rows.WHOLE, 16):
        monkeypatch.setattr(rows, "WHOLE", whole)
        assert rows.softmax(x, backend="portable").isnan().all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(16, 16), (20, 12), (6, 2)], ids=["whole", "part", "two"])
def test_rotary(interleaved, dim, rotary_dim, device):
    x = randn(2, 7, 3, dim + 4, seed=1, dtype=FP16, device=device)[..., :dim]
    angles = randn(12, rotary_dim // 2, seed=2, device=device)
    cos, sin = angles.cos(), angles.sin()
    do = [randn(2, 7, 3, dim, seed=3, device=device)]

    def turn(backend, **options):
        return lambda t: elements.rotary(t, cos, sin, interleaved=interleaved, start=3, backend=backend, **options)

    offsets = torch.tensor([0, 2], device=device)
    for options in ({}, {"offsets": offsets}):
        mine = run(turn("portable", **options), [x], do)
        ruler = run(turn("reference", **options), [x], do)
        truth = run(turn("reference", **options), [x], do, torch.float64)
        for name, *three in zip(("y", "dx"), mine, truth, ruler, strict=True):
            close(name, *three)
    alone = apply_rotary(x[1], cos, sin, torch.arange(7, device=device) + 5, interleaved=interleaved)
    torch.testing.assert_close(mine[0][1], alone, rtol=2e-3, atol=2e-3)


# more heads and tokens than a program has, fewer, and one of each
@pytest.mark.parametrize(("batch", "seqlen", "heads", "dim"), [(3, 17, 5, 128), (2, 70, 1, 64), (1, 1, 1, 16)])
def test_rotary_of_whole_heads(batch, seqlen, heads, dim, device):
    x = randn(batch, seqlen, heads + 1, dim + 8, seed=1, dtype=FP16, device=device)[..., 1:, :dim]
    angles = randn(80, dim // 2, seed=2, device=device)
    do = [randn(batch, seqlen, heads, dim, seed=3, device=device)]

    def turn(backend):
        return lambda t: elements.rotary(t, angles.cos(), angles.sin(), start=9, backend=backend)

    mine, ruler = run(turn("portable"), [x], do), run(turn("reference"), [x], do)
    truth = run(turn("reference"), [x], do, torch.float64)
    for name, *three in zip(("y", "dx"), mine, truth, ruler, strict=True):
        close(name, *three)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_what_does_not_turn_is_kept_beside_numbers_that_are_none(interleaved, device):
    x = randn(1, 4, 2, 32, seed=1, dtype=FP16, device=device)
    for row, (column, value) in enumerate(((17, torch.inf), (30, -torch.inf), (20, torch.nan))):
        x[0, row, 0, column] = value
    angles = randn(8, 8, seed=2, device=device)
    leaf = torch.zeros_like(x).requires_grad_()
    y, back = (elements.rotary(t, angles.cos(), angles.sin(), interleaved=interleaved, backend="portable")
               for t in (x, leaf))  # fmt: skip
    for found in (y, torch.autograd.grad(back, leaf, x)[0]):
        torch.testing.assert_close(found[..., 16:], x[..., 16:], rtol=0, atol=0, equal_nan=True)
        assert found[..., :16].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gradients_where_a_square_is_infinite(kind, backend, device):
    sizes = torch.tensor([12.0, 1e4, 1e5, 5e19, 3e38], device=device)
    gate, up = torch.cat([-sizes, sizes]).requires_grad_(), torch.ones(10, device=device)
    elements._gated(gate, up, kind, backend).sum().backward()
    assert torch.equal(gate.grad.round(), torch.cat([torch.zeros(5), torch.ones(5)]).to(device))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activations(kind, dtype, device):
    """Both halves of one fused projection, read where they lie, wider than one block."""
    fused = randn(2, 2 * 1030, seed=1, dtype=dtype, device=device) * 3
    fused[0, :4] = torch.tensor([0.0, 40.0, -40.0, -0.0], dtype=dtype, device=device)
    tensors, grads = list(fused.chunk(2, -1)), [randn(2, 1030, seed=2, device=device)]

    def call(backend):
        return lambda a, b: elements._gated(a, b, kind, backend)

    mine, ruler = run(call("portable"), tensors, grads), run(call("reference"), tensors, grads)
    for name, *three in zip(("y", "da", "db"), mine, run(call("reference"), tensors, grads, torch.float64), ruler,
                            strict=True):  # fmt: skip
        close(name, *three)


def test_opcheck(device):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, w = randn(3, 20, seed=1, device=device).requires_grad_(), randn(20, seed=2, device=device).requires_grad_()
    for args in ((x, None, w, None, 1e-5, False, 0.0, 0, False, 64), (x, x, w, w, 1e-5, True, 0.5, 1, True, 8)):
        torch.library.opcheck(rows.norm_op, args, test_utils=tests)
    torch.library.opcheck(rows.softmax_op, (x, 8), test_utils=tests)
    torch.library.opcheck(elements.gated_op, (x, x.detach(), "silu"), test_utils=tests)
    cos = torch.ones(4, 2, device=device)
    four = randn(1, 3, 1, 4, seed=1, device=device).requires_grad_()
    torch.library.opcheck(elements.rotary_op, (four, cos, cos, None, 0, True, False), test_utils=tests)


WRONG = {
    "weight": (lambda x: rows.rms_norm(x, torch.ones(3)), "weight must be"),
    "dropout-without-a-seed": (lambda x: rows.rms_norm(x, dropout_p=0.1), "needs a seed"),
    "dropout-of-all": (lambda x: rows.rms_norm(x, dropout_p=1.0, seed=1), "below 1"),
    "residual": (lambda x: rows.layer_norm(x, residual=x[:1]), "residual"),
    "gate": (lambda x: elements.silu_mul(x, x[:1]), "one shape"),
    "approximate": (lambda x: elements.gelu_mul(x, x, approximate="erf"), "'tanh' or 'none'"),
    "tables-too-short": (
        lambda x: elements.rotary(x[None, None], torch.ones(1, 2), torch.ones(1, 2), start=1), "positions 1 to 1"
    ),
    "tables-of-transformers": (
        lambda x: elements.rotary(x[None, None], torch.ones(9, 8), torch.ones(9, 8)), "pass the first 4 columns"
    ),
    "tables-elsewhere": (
        lambda x: elements.rotary(x[None, None], torch.ones(9, 2), torch.ones(9, 2).to("meta")), "sin is on meta"
    ),
    "weight-elsewhere": (lambda x: rows.rms_norm(x, torch.ones(8).to("meta")), "weight is on meta"),
    "residual-elsewhere": (lambda x: rows.layer_norm(x, residual=x.to("meta")), "residual is on meta"),
    "up-elsewhere": (lambda x: elements.silu_mul(x, x.to("meta")), "up is on meta"),
    "eps-below-zero": (lambda x: rows.rms_norm(x, eps=-1e-6), "eps must be"),
    "eps-nan": (lambda x: rows.layer_norm(x, eps=float("nan")), "eps must be"),
    "integer-weight": (lambda x: rows.rms_norm(x, torch.ones(8).int()), "floating dtype"),
    "seed": (lambda x: rows.rms_norm(x, dropout_p=0.1, seed=1.5), "seed must be an integer"),
    "list": (lambda x: rows.softmax([1.0]), "must be a torch.Tensor"),
    "nothing": (lambda x: elements.silu_mul(x, None), "must be a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(InvalidInputError, match=message):
        call(torch.ones(2, 8))


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_offsets_of_another_stride_and_before_the_tables(backend, device):
    x, tables = randn(3, 4, 2, 8, seed=1, device=device), randn(2, 9, 4, seed=2, device=device)
    offsets = torch.tensor([[2, 50], [-2, 50], [8, 50]], device=device)[:, 0]
    found = elements.rotary(x, *tables, offsets=offsets, backend=backend)
    assert torch.equal(found, elements.rotary(x, *tables, offsets=offsets.contiguous(), backend=backend))
    for n, first in enumerate((2, 0, 8)):
        rows_in = slice(2, 4) if n == 1 else slice(0, 4 if n == 0 else 1)
        part = x[n : n + 1, rows_in]
        torch.testing.assert_close(found[n : n + 1, rows_in], elements.rotary(part, *tables, start=first))
    assert torch.equal(found[1, :2], x[1, :2]) and torch.equal(found[2, 1:], x[2, 1:])


@pytest.mark.parametrize(("width", "dtype", "loaded", "stages"), [
    (16384, BF16, 3, 3), (16384, BF16, 4, 2), (16384, FP32, 3, 2), (16384, FP32, 4, 1), (1, FP32, 4, 3)
])  # fmt: skip
def test_no_more_rows_ahead_than_fit(width, dtype, loaded, stages, monkeypatch):
    """Compiled for an H100 they took (stages - 1) buffers a tensor: 262 KB for four of 16384 float32, where 227 fit."""
    monkeypatch.setattr(rows, "_ROW_STAGES", 3)
    x = torch.empty(1, dtype=dtype)
    _, options = rows._row_programs(width, x.device, False, *[x] * loaded, None)
    assert options["STAGES"] == stages


def test_rows_in_shared_memory_are_for_hopper():
    x = torch.zeros(2, 128, dtype=torch.bfloat16)
    for call in (rows.softmax, rows.rms_norm, rows.layer_norm):
        with pytest.raises(UnsupportedError, match="backend 'hopper': needs an NVIDIA GPU"):
            call(x, backend="hopper")
    with pytest.raises(UnsupportedError, match="residual or dropout"):
        rows.rms_norm(x, residual=x, backend="hopper")


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_tables_of_angles_get_no_gradient_and_say_so(backend):
    x, cos = torch.ones(1, 3, 2, 4), torch.ones(3, 2)
    leaf = torch.ones(3, 2, requires_grad=True)
    for tables in ((leaf, cos), (cos, leaf)):
        with pytest.raises(UnsupportedError, match="gets no gradient"):
            elements.rotary(x, *tables, backend=backend)
        with torch.no_grad():
            elements.rotary(x, *tables, backend=backend)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rotary_of_offsets(interleaved, device):
    x = randn(14, 2, 3, 16, seed=1, device=device)
    cos, sin = (randn(9, 8, seed=n, device=device) for n in (2, 3))
    offsets = torch.arange(14, device=device) % 5
    for options in ({}, {"offsets": offsets}):
        found, wanted = (
            elements.rotary(x, cos, sin, interleaved=interleaved, backend=backend, **options)
            for backend in ("portable", "reference")
        )
        torch.testing.assert_close(found, wanted)


def test_heads_that_lie_far_apart_turn():
    """Offsets of heads beyond 2^31 elements; nothing but what is read is in memory."""
    step = 2**30 + 8
    memory = torch.empty(2 * step + 64, dtype=torch.bfloat16)
    x = memory.as_strided((1, 2, 3, 16), (0, 16, step, 1))
    x.copy_(randn(1, 2, 3, 16, seed=1))
    cos, sin = (randn(2, 8, seed=n) for n in (2, 3))
    torch.testing.assert_close(
        elements.rotary(x, cos, sin, backend="portable"), elements.rotary(x, cos, sin, backend="reference"),
        rtol=2**-7, atol=2**-7,
    )  # fmt: skip
