"""Cross-entropy and the linear layer fused with it: against torch in float64, with every option and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import losses as ce
from gpu_accel.thunderkittens.losses import cross_entropy, fused_linear_cross_entropy
from tests.thunderkittens.helpers import close, randn, run

OPTIONS = {
    "plain": {},
    "sum": dict(reduction="sum"),
    "none": dict(reduction="none"),
    "smoothed": dict(label_smoothing=0.1),
    "squared": dict(lse_square_scale=0.05),
    "capped": dict(softcap=3.0),
    "all": dict(label_smoothing=0.2, lse_square_scale=0.1, softcap=2.0),
}


def targets(rows: int, classes: int, device: str) -> torch.Tensor:
    y = torch.arange(rows, device=device) * 7919 % classes
    y[rows // 2] = -100
    return y


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_the_formula_in_float64(options, device):
    x, y = 4 * randn(7, 5001, seed=1, device=device), targets(7, 5001, device)
    grad = randn(7, seed=2, device=device) if options.get("reduction") == "none" else torch.ones((), device=device)

    def function(backend):
        return lambda t: cross_entropy(t, y, backend=backend, **options)

    truth = run(function("reference"), [x], [grad], torch.float64)
    ruler = run(function("reference"), [x], [grad])
    for name, *three in zip(["loss", "dx"], run(function("portable"), [x], [grad]), truth, ruler, strict=True):
        close(name, *three)


def test_the_formula_is_that_of_torch(device):
    x, y = randn(9, 33, seed=1, device=device).double(), targets(9, 33, device)
    for reduction in ("mean", "sum", "none"):
        mine = cross_entropy(x, y, label_smoothing=0.3, reduction=reduction, backend="reference")
        torch.testing.assert_close(mine, F.cross_entropy(x, y, label_smoothing=0.3, reduction=reduction))


@pytest.mark.parametrize("classes", [1, 2, 17, 4096])
def test_numbers_of_classes(classes, device):
    x, y = randn(5, classes, seed=1, device=device), targets(5, classes, device)
    mine = cross_entropy(x, y, reduction="none", backend="portable")
    torch.testing.assert_close(mine, F.cross_entropy(x, y, reduction="none"))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_four_logits_at_a_time(options, device, monkeypatch):
    monkeypatch.setattr(ce, "FOUR", True)
    monkeypatch.setattr(ce, "_BLOCK", 64)
    test_numbers_of_classes(150, device)
    test_against_the_formula_in_float64(options, device)
    test_large_and_infinite_logits(device)


def test_large_and_infinite_logits(device):
    """exp would overflow; a class at -inf is impossible and has no gradient."""
    x = torch.tensor([[1e4, -1e4, 1e4], [-torch.inf, 0.0, 1.0]], device=device, requires_grad=True)
    loss = cross_entropy(x, torch.tensor([0, 1], device=device), reduction="none", backend="portable")
    torch.testing.assert_close(loss, F.cross_entropy(x, torch.tensor([0, 1], device=device), reduction="none"))
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad.isfinite().all() and grad[1, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"] | {"reduction": "sum"}], ids=["plain", "all-sum"])
def test_fused_with_the_linear_layer(options, dtype, device):
    x, w, b = (randn(*s, seed=n, dtype=dtype, device=device) for n, s in ((1, (21, 24)), (2, (67, 24)), (3, (67,))))
    y = targets(21, 67, device)
    grad = torch.full((), 1.5, device=device)

    def function(backend):
        return lambda x, w, b: fused_linear_cross_entropy(x, w, y, b, backend=backend, **options)

    truth = run(function("reference"), [x, w, b], [grad], torch.float64)
    ruler = run(function("reference"), [x, w, b], [grad])
    mine = run(function("portable"), [x, w, b], [grad])
    for name, *three in zip(["loss", "dx", "dw", "db"], mine, truth, ruler, strict=True):
        close(name, *three, narrow=dtype == torch.bfloat16)


def test_pieces_do_not_change_the_result(device, monkeypatch):
    assert ce._pieces(8192, 4096, 131072) == 256 and ce._pieces(3, 64, 2) == 3
    x, w = randn(21, 24, seed=1, device=device), randn(67, 24, seed=2, device=device)
    found = []
    for step in (21, 4):
        monkeypatch.setattr(ce, "_pieces", lambda *_, step=step: step)
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        loss = fused_linear_cross_entropy(*leaves, targets(21, 67, device), backend="portable")
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_only_the_gradients_that_are_asked_for(device):
    x, w, y = randn(5, 8, seed=1, device=device), randn(9, 8, seed=2, device=device), targets(5, 9, device)
    assert not fused_linear_cross_entropy(x, w, y, backend="portable").requires_grad
    frozen = fused_linear_cross_entropy(x.requires_grad_(), w, y, backend="portable")
    frozen.backward()
    leaf = x.detach().requires_grad_()
    F.cross_entropy(leaf @ w.T, y).backward()
    torch.testing.assert_close(x.grad, leaf.grad)


def test_wrong_arguments_are_refused(device):
    x, y = randn(5, 8, seed=1, device=device), targets(5, 8, device)
    with pytest.raises(InvalidInputError, match="target must be"):
        cross_entropy(x, y[:3])
    with pytest.raises(InvalidInputError, match="reduction is 'max'"):
        cross_entropy(x, y, reduction="max")
    with pytest.raises(InvalidInputError, match="softcap must be positive"):
        cross_entropy(x, y, softcap=0.0)
    with pytest.raises(InvalidInputError, match="softcap must be at most 65536"):
        cross_entropy(x, y, softcap=1e6)
    with pytest.raises(UnsupportedError, match="use cross_entropy"):
        fused_linear_cross_entropy(x, x, y, reduction="none")
    with pytest.raises(InvalidInputError, match="one dtype"):
        fused_linear_cross_entropy(x, x.double(), y)


def test_targets_that_are_no_class(device, monkeypatch):
    """Refused where their values can be read; NaN, and no foreign memory, where not."""
    x, w = randn(3, 5, seed=1, device=device), randn(5, 5, seed=2, device=device)
    calls = [
        lambda y, backend: cross_entropy(x, y, backend=backend),
        lambda y, backend: fused_linear_cross_entropy(x, w, y, backend=backend),
    ]
    for wrong in (7, -1, 1 << 40):
        y = torch.tensor([0, wrong, -100], device=device)
        for call in calls:
            for backend in ("auto", "portable"):
                if device == "cpu":
                    with pytest.raises(InvalidInputError, match=f"from 0 to 4, or ignore_index .* got {wrong}"):
                        call(y, backend)
                with monkeypatch.context() as patch:
                    patch.setattr(ce, "readable", lambda _: False)
                    assert call(y, backend).isnan()
        with monkeypatch.context() as patch:
            patch.setattr(ce, "readable", lambda _: False)
            for backend in ("reference", "portable"):
                leaf = x.clone().requires_grad_()
                loss = cross_entropy(leaf, y, reduction="none", backend=backend)
                assert loss.isnan().tolist() == [False, True, False]
                (grad,) = torch.autograd.grad(loss.sum(), leaf)
                assert grad.isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_an_impossible_class_is_not_in_the_mean(backend, device):
    x, y = randn(3, 5, seed=1, device=device), torch.tensor([0, 1, 2], device=device)
    x[1, 3] = -torch.inf
    torch.testing.assert_close(cross_entropy(x, y, backend=backend), F.cross_entropy(x, y))


WRONG = {
    "target-elsewhere": lambda x, y: cross_entropy(x, y.to("meta")),
    "boolean-target": lambda x, y: cross_entropy(x, y.bool()),
    "infinite-softcap": lambda x, y: cross_entropy(x, y, softcap=float("inf")),
    "ignore_index": lambda x, y: cross_entropy(x, y, ignore_index=1.5),
    "lse_square_scale": lambda x, y: cross_entropy(x, y, lse_square_scale=float("nan")),
    "list": lambda x, y: cross_entropy(x.tolist(), y),
    "weight-elsewhere": lambda x, y: fused_linear_cross_entropy(x, x.to("meta"), y),
    "no-classes": lambda x, y: fused_linear_cross_entropy(x, x[:0], y, backend="portable"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_kinds_and_devices_are_refused(call, device):
    with pytest.raises(InvalidInputError):
        call(randn(5, 8, seed=1, device=device), targets(5, 8, device))


def test_opcheck(device):
    x, y = randn(5, 8, seed=1, device=device).requires_grad_(), targets(5, 8, device)
    w, b, scale = (randn(*s, seed=2, device=device) for s in ((9, 8), (9,), (5,)))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ce.cross_entropy_op, (x, y, -100, 0.1, 0.0, 0.0), test_utils=tests)
    args = (x, w.requires_grad_(), y, b, scale, -100, 0.0, 0.0, 0.0)
    torch.library.opcheck(ce.linear_cross_entropy_op, (*args, True, True), test_utils=tests)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_fused_under_autocast(backend, device):
    """As a linear layer and the loss are: in the dtype of autocast, gradients in that of the parameters."""
    leaves = [randn(5, 8, seed=1, device=device).bfloat16(), randn(9, 8, seed=2, device=device)]
    x, w = (t.requires_grad_() for t in leaves)
    y = targets(5, 9, device)
    with torch.autocast(device, torch.bfloat16):
        loss = fused_linear_cross_entropy(x, w, y, backend=backend)
    loss.backward()
    assert loss.dtype == w.grad.dtype == torch.float32
    twin = [t.detach().bfloat16().requires_grad_() for t in leaves]
    same = fused_linear_cross_entropy(*twin, y, backend=backend)
    same.backward()
    assert torch.equal(loss, same) and torch.equal(w.grad, twin[1].grad.float())


def test_gradients_of_gradients_are_refused(device):
    x, w, y = randn(5, 8, seed=1, device=device), randn(9, 8, seed=2, device=device), targets(5, 9, device)
    x.requires_grad_()
    loss = fused_linear_cross_entropy(x, w, y, backend="portable")
    with pytest.raises(UnsupportedError, match="first gradients only"):
        torch.autograd.grad(loss, x, create_graph=True)
    (first,) = torch.autograd.grad(cross_entropy(x, y % 8, backend="portable"), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="first gradients only"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_rows_that_count_for_nothing(backend, device):
    """They may be NaN; the mean of no rows is NaN as torch's is."""
    z = randn(5, 8, seed=1, device=device)
    y = targets(5, 8, device)
    z[2] = torch.nan
    z.requires_grad_()
    cross_entropy(z, y, backend=backend).backward()
    assert z.grad.isfinite().all() and not z.grad[2].any()
    assert fused_linear_cross_entropy(z[:0], z.detach(), y[:0], backend=backend).isnan()
    assert not fused_linear_cross_entropy(z[:0], z.detach(), y[:0], reduction="sum", backend=backend)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_the_loss_is_float32_whatever_is_usual(backend):
    z, y = randn(5, 8, seed=1), targets(5, 8, "cpu")
    torch.set_default_dtype(torch.float64)
    try:
        assert cross_entropy(z, y, backend=backend).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
