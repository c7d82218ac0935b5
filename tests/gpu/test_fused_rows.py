"""Norms, softmax, dropout, gated activations and rotary embedding on a GPU."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.thunderkittens import elements, reference, rows

from .judging import BF16, FP16, FP32, judge, randn


@pytest.mark.parametrize("width", [1, 1000, 4096, 50_001])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
def test_norms(center, dtype, width):
    tensors = [1 + randn(67, width, seed=1, dtype=dtype), randn(width, seed=2, dtype=dtype), randn(67, width, seed=3)]

    def function(backend):
        return lambda x, w, r: rows._norm(x, w, None, r, 1e-5, 0.25, 2**40 + 7, True, backend, center)

    grads = [randn(67, width, seed=s) for s in (4, 5)]
    judge(["y", "h", "dx", "dw", "dr"], function, tensors, grads)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("height", "width"), [(1, 16384), (4000, 1000), (999, 4096)])
@pytest.mark.parametrize("center", [False, True], ids=["rms", "layer"])
def test_norms_with_three_rows_ahead(center, height, width, dtype, monkeypatch):
    """Programs that take none, one and more rows than are on their way at once."""
    monkeypatch.setattr(rows, "_ROW_STAGES", 3)
    tensors = [1 + randn(height, width, seed=1, dtype=dtype), randn(width, seed=2, dtype=dtype)]

    def function(backend):
        return lambda x, w: rows._norm(x, w, None, None, 1e-5, 0.0, 0, False, backend, center)

    judge(["y", "dx", "dw"], function, tensors, [randn(height, width, seed=3)])


@pytest.mark.parametrize("width", [1, 4097, 100_000])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_softmax(dtype, width):
    x = randn(33, width, seed=1, dtype=dtype) * 4
    judge(["y", "dx"], lambda backend: lambda t: rows.softmax(t, backend=backend), [x], [randn(33, width, seed=2)])


# one row, and several for each program; blocks that end with the row, one of a single line behind them, all that fits
@pytest.mark.parametrize(("height", "width"), [(1, 65536), (300, 65536), (140, 24640), (7, 81920), (1000, 128)])
@pytest.mark.parametrize("op", ["softmax", "rms", "layer"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_rows_in_shared_memory(height, width, op, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    x = 3 + 2 * randn(height, width, seed=1, dtype=dtype)
    more = {"softmax": [], "rms": [randn(width, seed=2, dtype=dtype)], "layer": [randn(width, seed=s) for s in (2, 3)]}
    tensors = [x, *(t.to(dtype) for t in more[op])]

    def function(backend):
        backend = "hopper" if backend == "portable" else backend
        if op == "softmax":
            return lambda x: rows.softmax(x, backend=backend)
        if op == "rms":
            return lambda x, w: rows.rms_norm(x, w, backend=backend)
        return lambda x, w, b: rows.layer_norm(x, w, b, backend=backend)

    grads = [randn(height, width, seed=4)]
    floors = {}
    if op == "softmax" and dtype == FP16:  # bfloat16 keeps the plain bound
        # dx = y (dy - sum of y dy) of y as it was kept, rounded, and rounded itself: half an epsilon of dx each
        y = torch.softmax(x.double(), 1)
        dx = y * (grads[0].double() - (y * grads[0].double()).sum(1, keepdim=True))
        floors["dx"] = torch.finfo(dtype).eps * dx.abs().max().item()
    judge(["y", "dx", "dw", "db"][: 1 + len(tensors)], function, tensors, grads, floors=floors)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_softmax_of_long_rows(dtype):
    """Eights, threads and blocks of nothing; numbers that only differences keep in range."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    x = randn(3, 65536, seed=1, dtype=dtype) * 4
    x[0, 100:] = -torch.inf
    x[1, ::3] = 3e4
    x[2] = -torch.inf
    found, wanted = rows.softmax(x, backend="hopper"), torch.softmax(x.double(), -1)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activations(kind):
    pair = list(randn(33, 2 * 3001, seed=1, dtype=BF16).chunk(2, -1))
    judge(["y", "da", "db"], lambda b: lambda x, y: elements._gated(x, y, kind, b), pair, [randn(33, 3001, seed=2)])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_gradients_where_a_square_is_infinite(dtype, kind):
    sizes = torch.tensor([20.0, 1e4, 1e5, 5e19, 3e38], device="cuda", dtype=dtype)
    gate = torch.cat([-sizes, sizes]).requires_grad_()
    elements._gated(gate, torch.ones_like(gate), kind, "portable").sum().backward()
    assert torch.equal(gate.grad.float().round().abs(), (gate > 0).float())


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rotary_of_more_sequences_than_a_grid_has(interleaved):
    angles, x = randn(9, 16, seed=1), randn(70_000, 2, 5, 32, seed=2)
    for offsets in (None, torch.arange(70_000, device="cuda") % 5):
        found, wanted = (
            elements.rotary(x, angles.cos(), angles.sin(), interleaved=interleaved, offsets=offsets, backend=backend)
            for backend in ("portable", "reference")
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rotary(interleaved):
    angles = randn(700, 32, seed=1)
    x = randn(2, 515, 5, 128, seed=2, dtype=BF16)
    judge(
        ["y", "dx"],
        lambda b: lambda t: elements.rotary(t, angles.cos(), angles.sin(), interleaved=interleaved, start=9, backend=b),
        [x],
        [randn(2, 515, 5, 128, seed=3)],
    )


@pytest.mark.parametrize(("batch", "seqlen", "heads", "dim"), [(2, 515, 5, 128), (9, 70, 1, 64), (1, 1, 1, 16)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_rotary_of_whole_heads(dtype, batch, seqlen, heads, dim):
    angles = randn(700, dim // 2, seed=1)
    judge(
        ["y", "dx"],
        lambda b: lambda t: elements.rotary(t[..., 1:, :], angles.cos(), angles.sin(), start=9, backend=b),
        [randn(batch, seqlen, heads + 1, dim, seed=2, dtype=dtype)],
        [randn(batch, seqlen, heads, dim, seed=3)],
    )


@pytest.mark.parametrize(("height", "width"), [(700, 1000), (999, 4096), (300, 16384), (70, 50_001)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_gradients_of_weight_and_bias(dtype, height, width):
    tensors = [1 + randn(height, width, seed=1, dtype=dtype), *(randn(width, seed=s, dtype=dtype) for s in (2, 3))]
    for center in (True, False):
        judge(["y", "dx", "dw", "db"][: 3 + center],
              lambda b, c=center: lambda x, w, s=None: rows._norm(x, w, s, None, 1e-5, 0.0, 0, False, b, c),
              tensors[: 2 + center], [randn(height, width, seed=4)])  # fmt: skip


def test_dropout_bits():
    x = torch.ones(700, 5000, device="cuda")
    _, h = rows.rms_norm(x, dropout_p=0.3, seed=2**50 + 3, prenorm=True, backend="portable")
    assert torch.equal(h != 0, reference.dropout_keep(2**50 + 3, 700, 5000, 0.3, "cuda"))
