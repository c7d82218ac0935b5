"""Long convolutions against the sum itself in float64; gradients of everything; the kept transform of a filter."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import long_conv
from gpu_accel.thunderkittens.long_conv import FlashFFTConv
from tests.thunderkittens.helpers import close, randn, run


def direct(u, k, pre, post):
    """The causal sum, one lag at a time."""
    x = u * pre if pre is not None else u
    y = torch.zeros_like(x)
    for lag in range(min(k.shape[1], x.shape[2])):
        y[..., lag:] = y[..., lag:] + x[..., : x.shape[2] - lag] * k[:, lag, None]
    return y * post if post is not None else y


def make(device, *, batch=3, channels=2, seqlen=100, taps=100, dtype=torch.float32, gated=True):
    u, pre, post, dy = (randn(batch, channels, seqlen, seed=s, dtype=dtype, device=device) for s in (1, 2, 3, 4))
    k = randn(channels, taps, seed=5, device=device) / 10
    return [u, k, pre if gated else None, post if gated else None], [dy]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_values_and_gradients(gated, dtype, device):
    """An odd number of sequences, so that one of a pair is missing."""
    tensors, grads = make(device, dtype=dtype, gated=gated)
    mine = run(FlashFFTConv(256, dtype, backend="portable"), tensors, grads)
    truth = run(direct, tensors, grads, torch.float64)
    ruler = run(FlashFFTConv(256, backend="reference"), tensors, grads)
    for name, *three in zip(["y", "du", "dk", "dpre", "dpost"], mine, truth, ruler, strict=True):
        if three[0] is None:
            continue
        if dtype == torch.float32:
            torch.testing.assert_close(three[0].double(), three[1], rtol=1e-4, atol=1e-4)
        else:
            close(name, *three, narrow=dtype == torch.bfloat16)


@pytest.mark.parametrize(("size", "batch"), [(256, 19), (512, 3)], ids=["several-turns", "unequal-sides"])
@pytest.mark.parametrize("magnitudes", [(1, 1), (1e30, 1e-25), (1e-30, 1e20)], ids=["normal", "loud", "quiet"])
def test_products_of_float16(size, batch, magnitudes, device, monkeypatch):
    """bfloat16 by products of float16, which holds neither 1e30 nor 1e-30; a program has several pairs of sequences."""
    monkeypatch.setattr(long_conv, "_PROGRAMS", 1)
    tensors, grads = make(device, batch=batch, dtype=torch.bfloat16)
    tensors[0], tensors[1] = (x * m for x, m in zip(tensors[:2], magnitudes, strict=True))
    mine = run(FlashFFTConv(size, backend="portable"), tensors, grads)
    truth = run(direct, tensors, grads, torch.float64)
    ruler = run(FlashFFTConv(size, backend="reference"), tensors, grads)
    for name, *three in zip(["y", "du", "dk", "dpre", "dpost"], mine, truth, ruler, strict=True):
        close(name, *three, narrow=True)
    nothing = FlashFFTConv(size, backend="portable")(torch.zeros_like(tensors[0]), tensors[1])
    assert not nothing.any()


@pytest.mark.parametrize("size", [512, 1024])
def test_sizes_of_unequal_sides(size, device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=size // 2, taps=7)
    y = FlashFFTConv(size, backend="portable")(u, k)
    torch.testing.assert_close(y.double(), direct(u.double(), k.double(), None, None), rtol=1e-4, atol=1e-4)


def test_it_is_made_as_flashfftconv_is(device):
    u, k = randn(1, 3, 256, seed=1, dtype=torch.float16, device=device), randn(3, 256, seed=2, device=device)
    module = FlashFFTConv(256, torch.float16, False)
    assert torch.equal(module(u, k), FlashFFTConv(256)(u, k))
    with pytest.raises(InvalidInputError, match="use_32_butterfly"):
        FlashFFTConv(256, torch.float16, "no")


def test_longer_than_half_is_circular(device):
    (u, k, *_), _ = make(device, batch=2, channels=1, seqlen=256, taps=256)
    y = FlashFFTConv(256, backend="portable")(u, k)
    torch.testing.assert_close(y, long_conv.long_conv_reference(u, k, None, None, 256), rtol=1e-4, atol=1e-4)
    lag = torch.zeros_like(k)
    lag[:, 3] = 1.0
    torch.testing.assert_close(FlashFFTConv(256, backend="portable")(u, lag), u.roll(3, -1), rtol=1e-4, atol=1e-5)


def test_lengths_one_and_zero_and_strides(device):
    conv = FlashFFTConv(256, backend="portable")
    for seqlen in (0, 1):
        (u, k, *_), _ = make(device, seqlen=seqlen, taps=4)
        torch.testing.assert_close(conv(u, k), u * k[:, :1])
    wide = randn(2, 50, 3, seed=1, device=device).transpose(1, 2)
    k = randn(3, 9, seed=2, device=device)
    torch.testing.assert_close(conv(wide, k), conv(wide.contiguous(), k))


def test_a_filter_is_transformed_once_until_it_changes(device, monkeypatch):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv, calls = FlashFFTConv(256, keep_spectrum=True, backend="portable"), []
    true = long_conv.filter_spectrum
    monkeypatch.setattr(long_conv, "filter_spectrum", lambda *given: calls.append(1) or true(*given))
    first = conv(u, k)
    conv(u, k)
    assert len(calls) == 1
    k.mul_(2.0)
    torch.testing.assert_close(conv(u, k), 2 * first)
    conv(u, k.clone())
    assert len(calls) == 3


def test_wrong_arguments_are_refused(device):
    (u, k, pre, _), _ = make(device)
    with pytest.raises(UnsupportedError, match="not of 300"):
        FlashFFTConv(300)
    conv = FlashFFTConv(256, torch.float32)
    for given, message in [
        ((u.half(), k), "made for torch.float32"), ((u, k[:1]), "k must be"), ((u, k, pre[:1]), "pregate must be"),
        ((torch.zeros(1, 2, 257, device=device), k), "u must be"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            conv(*given)


def test_a_filter_may_change_unseen(device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv = FlashFFTConv(256, backend="portable")
    first = conv(u, k)
    k.data.mul_(2.0)
    torch.testing.assert_close(conv(u, k), 2 * first)


CHANGES = {
    "in-place": lambda k: k.mul_(2),
    "view": lambda k: k.view(-1).mul_(2),
    "detached": lambda k: k.detach().mul_(2),
    "other-memory": lambda k: setattr(k, "data", 2 * k),
    "other-dtype": lambda k: setattr(k, "data", (2 * k).bfloat16()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_kept_transform_is_made_anew(change, device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv = FlashFFTConv(256, keep_spectrum=True, backend="portable")
    conv(u, k)
    change(k)
    assert torch.equal(conv(u, k), FlashFFTConv(256, backend="portable")(u, k))


def test_a_kept_transform_between_steps_of_training(device):
    """torch's fused optimizers change a filter without that its version counts it."""
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv, anew = FlashFFTConv(256, keep_spectrum=True, backend="portable"), FlashFFTConv(256, backend="portable")
    k.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(conv(u, k), anew(u, k))
        conv(u, k).square().sum().backward()
        torch.optim.SGD([k], lr=1.0, fused=True).step()
    assert torch.equal(conv(u, k), anew(u, k))


def test_a_kept_transform_is_for_one_order_of_sides(device):
    """Of 512 = 16 x 32 the longer side is another one in bfloat16."""
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv, anew = FlashFFTConv(512, keep_spectrum=True, backend="portable"), FlashFFTConv(512, backend="portable")
    for x in (u, u.bfloat16(), u):
        assert torch.equal(conv(x, k), anew(x, k))


@pytest.mark.parametrize("keep", [False, True], ids=["anew", "kept"])
def test_copies_after_a_call(keep, device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv = FlashFFTConv(256, keep_spectrum=keep, backend="portable")
    y = conv(u, k)
    for other in (pickle.loads(pickle.dumps(conv)), copy.deepcopy(conv)):
        assert torch.equal(other(u, k), y)
    assert (conv._kept is not None) == keep


WRONG = {
    "backend": lambda u, k: FlashFFTConv(256, backend="zzz"),
    "dtype": lambda u, k: FlashFFTConv(256, "bf16"),
    "integer-dtype": lambda u, k: FlashFFTConv(256, torch.int32),
    "k-elsewhere": lambda u, k: FlashFFTConv(256)(u, k.to("meta")),
    "gate-elsewhere": lambda u, k: FlashFFTConv(256)(u, k, u.to("meta")),
    "integer-k": lambda u, k: FlashFFTConv(256)(u, k.int()),
    "list": lambda u, k: FlashFFTConv(256)(u, [1.0]),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_kinds_dtypes_and_devices_are_refused(call, device):
    (u, k, *_), _ = make(device)
    with pytest.raises(InvalidInputError):
        call(u, k)


def test_opcheck(device):
    (u, k, pre, post), _ = make(device, seqlen=9)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        long_conv.fft_conv_op, (u, long_conv.filter_spectrum(k, 256), pre, post, False), test_utils=tests
    )


def test_a_kept_transform_and_inference_mode(device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv = FlashFFTConv(256, keep_spectrum=True, backend="portable")
    with torch.inference_mode():
        y = conv(u, k)
        assert torch.equal(conv(u, k.clone()), y)  # a tensor that does not count its changes is not kept
    leaf = u.clone().requires_grad_()
    again = conv(leaf, k)
    again.sum().backward()
    assert torch.equal(again, y) and leaf.grad is not None


def test_a_graph_keeps_no_transform(device, monkeypatch):
    """Memory of a graph is its own, and what it reads must live as long as it does."""
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    conv = FlashFFTConv(256, keep_spectrum=True, backend="portable")
    y = conv(u, k)
    kept = conv._kept
    monkeypatch.setattr(long_conv, "_captured", lambda x: True)
    assert torch.equal(conv(u, 2 * k), 2 * y) and torch.equal(conv(u, k), y) and conv._kept is kept


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("shape", [(0, 2, 9), (2, 0, 9), (2, 2, 0)], ids=["batch", "channels", "steps"])
def test_sizes_of_zero(shape, backend, device):
    u, k = torch.ones(shape, device=device, requires_grad=True), torch.ones(shape[1], 5, device=device).requires_grad_()
    y = FlashFFTConv(256, backend=backend)(u, k)
    y.sum().backward()
    assert y.shape == shape and u.grad.shape == shape and not k.grad.any()


def test_gradients_of_gradients_are_refused_where_they_would_lack_a_part(device):
    (u, k, *_), _ = make(device, batch=1, channels=1, seqlen=9, taps=9)
    u, k = u.requires_grad_(), k.requires_grad_()
    y = FlashFFTConv(256, backend="portable")(u, k)
    of_u, of_k = torch.autograd.grad(y.sum(), (u, k), create_graph=True)
    with pytest.raises(UnsupportedError, match="first gradients only"):
        of_u.square().sum().backward()
    of_k.square().sum().backward()  # made by torch
    assert u.grad.any()
