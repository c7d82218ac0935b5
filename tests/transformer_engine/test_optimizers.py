"""Optimizers with eight-bit states: the kernel against the reference, and both against torch's with float32 states."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine.optimizers import AdamW8bit, Lion8bit, round_stochastically

KINDS = {"adamw": AdamW8bit, "lion": Lion8bit}


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("rounding", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_and_reference_agree(kind, dtype, rounding):
    """Three steps of 2 x 2051 values, which blocks of 256 do not divide; one block has only zeros as gradients."""
    made = []
    for backend in ("portable", "reference"):
        p = nn.Parameter(values(2, 2051).to(dtype))
        optimizer = KINDS[kind]([p], lr=0.01, weight_decay=0.1, backend=backend, bf16_stochastic_rounding=rounding)
        torch.manual_seed(1)
        for step in range(3):
            g = values(2, 2051, seed=step + 1) * torch.logspace(-6, 2, 2051)
            g.view(-1)[256:512] = 0
            p.grad = g.to(dtype)
            optimizer.step()
        made.append((p, optimizer.state[p]))
    (p, state), (q, other) = made
    # the factors of a step are float64 here and float32 there
    torch.testing.assert_close(p, q, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)
    # last bits of float32 depend on the processor, too: AdamW's differ in up to 2.2 % of the numbers
    assert (p != q).float().mean() < (0.05 if dtype == torch.float32 else 0.01)
    for name, value in state.items():
        if name.endswith("_scale"):
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=0)
        elif isinstance(value, torch.Tensor):
            assert (value != other[name]).float().mean() < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_as_well_as_with_wide_states(kind):
    """A regression: the loss after 60 steps is within a tenth of that with float32 states, and far below the start."""
    losses = {}
    target = values(64, 64, seed=1)
    x = values(256, 64, seed=2)
    for name, size in (("narrow", 0), ("wide", 1 << 30)):
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False)
        optimizer = KINDS[kind](layer.parameters(), lr=0.02, weight_decay=0.0, min_8bit_size=size, backend="reference")
        for _ in range(60):
            loss = (layer(x) - x @ target.t()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    start = (x @ target.t()).square().mean().item()
    assert losses["wide"] < 0.3 * start
    assert losses["narrow"] == pytest.approx(losses["wide"], rel=0.1)


def test_wide_states_are_torch():
    """Below min_8bit_size nothing is rounded: torch.optim.AdamW, step by step."""
    ours, theirs = (nn.Parameter(values(7, 33)) for _ in range(2))
    a = AdamW8bit([ours], lr=0.01, weight_decay=0.1, backend="reference")
    b = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for step in range(5):
        ours.grad = values(7, 33, seed=step)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_one_rounded_state_stays_close_to_exact():
    """m and v after ten steps, each of which rounded, next to float64: e4m3 errs 3.7 % stochastically."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([p], lr=0.0, backend="reference")
    m = v = torch.zeros(4096, dtype=torch.float64)
    for step in range(10):
        g = values(4096, seed=step)
        p.grad = g
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
    state = optimizer.state[p]
    from gpu_accel.transformer_engine.optimizers import _wide

    root = _wide(state["exp_avg_root"], state["exp_avg_root_scale"]).double()
    mean = _wide(state["exp_avg"], state["exp_avg_scale"]).double()
    assert ((mean - m).norm() / m.norm()) < 0.1
    assert ((root - v.sqrt()).norm() / v.sqrt().norm()) < 0.1


def test_states_do_not_stand_still():
    """v loses a thousandth a step: to nearest it would never change. After 300 steps without gradients 0.86 is left."""
    p = nn.Parameter(torch.zeros(1024))
    optimizer = AdamW8bit([p], lr=0.0, min_8bit_size=0, backend="reference")
    p.grad = 1 + values(1024).abs()
    optimizer.step()
    p.grad = torch.zeros(1024)
    p.grad[::256] = 4.0  # the largest of each block stays, so that no scale does it
    for _ in range(300):
        optimizer.step()
    from gpu_accel.transformer_engine.optimizers import _wide

    state = optimizer.state[p]
    root = _wide(state["exp_avg_root"], state["exp_avg_root_scale"]).view(-1, 256)[:, 1:]
    exact = math.sqrt(0.001 * 0.999**300) * (1 + values(1024).abs()).view(-1, 256)[:, 1:]
    assert root.mean().item() == pytest.approx(exact.mean().item(), rel=0.05)


def test_small_second_moments_do_not_vanish_beside_large_ones():
    """2**-14 of the largest gradient in a block: e4m3 of v itself would have rounded its square (2**-28) to zero."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW8bit([p], lr=1.0, eps=1e-12, weight_decay=0.0, backend="reference")
    for _ in range(3):
        p.grad = torch.full((4096,), 2.0**-14)
        p.grad[::256] = 1.0
        before = p.detach().clone()
        optimizer.step()
        # with equal gradients each step has the size of the learning rate, up to what rounding m and v does
        assert (p - before).abs().max() < 1.3


def test_stochastic_rounding_keeps_small_updates_on_average():
    x = torch.full((4096,), 1.0 + 2.0**-10)  # an eighth of a step of bfloat16 above 1
    near = x.bfloat16().float()
    out = torch.stack([round_stochastically(x, seed).float() for seed in range(8)])
    assert (near == 1).all() and set(out.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert out.mean().item() == pytest.approx(1.0 + 2.0**-10, abs=1e-4)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    kept = round_stochastically(special, 0).float()
    assert kept[0].isnan() and kept[1:].tolist() == special[1:].tolist()


def test_states_are_saved_and_loaded():
    grads = [values(64, 80, seed=s) for s in range(4)]
    first = nn.Parameter(values(64, 80).bfloat16())
    optimizer = AdamW8bit([first], lr=0.01, backend="reference")
    for g in grads[:2]:
        first.grad = g.bfloat16()
        optimizer.step()
    assert optimizer.state_bytes() == 2 * (64 * 80 + 4 * 20)
    second = nn.Parameter(first.detach().clone())
    again = AdamW8bit([second], lr=0.01, backend="reference")
    again.load_state_dict(optimizer.state_dict())
    assert again.state[second]["exp_avg"].dtype == torch.uint8
    assert again.state[second]["exp_avg_scale"].dtype == torch.float32
    for p, o in ((first, optimizer), (second, again)):
        torch.manual_seed(2)
        for g in grads[2:]:
            p.grad = g.bfloat16()
            o.step()
    assert torch.equal(first, second)


def test_nothing_to_do_and_closures():
    empty, idle, used = (nn.Parameter(torch.zeros(n)) for n in (0, 3, 3))
    optimizer = Lion8bit([empty, idle, used], lr=0.5)
    empty.grad = torch.zeros(0)

    def closure():
        used.grad = torch.tensor([1.0, -2.0, 0.0])
        return 7

    assert optimizer.step(closure) == 7
    assert used.tolist() == [-0.5, 0.5, 0.0] and not idle.any() and idle not in optimizer.state


@pytest.mark.parametrize("size", [0, 1 << 30], ids=["narrow", "wide"])
@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_propagates(kind, backend, size):
    p = nn.Parameter(values(300))
    optimizer = KINDS[kind]([p], lr=0.1, min_8bit_size=size, backend=backend)
    for wrong in (True, False):
        p.grad = values(300, seed=1)
        if wrong:
            p.grad[5] = math.nan
        optimizer.step()
        assert p.isnan().nonzero().flatten().tolist() == [5]


def test_groups_schedulers_and_names():
    p, q = nn.Parameter(values(3)), nn.Parameter(values(4))
    groups = [{"params": [p], "lr": 0.5, "name": "first"}, {"params": q, "betas": [0.8, 0.9]}]
    optimizer = AdamW8bit(groups, lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5 / 3, 0.1 / 3])
    again = AdamW8bit([("p", p), ("q", q)])
    assert again.param_groups[0]["param_names"] == ["p", "q"]


@pytest.mark.parametrize(
    "make, error, word",
    [
        (lambda p: AdamW8bit([p], lr=-1), InvalidInputError, "lr"),
        (lambda p: AdamW8bit([p], lr=math.nan), InvalidInputError, "lr"),
        (lambda p: AdamW8bit([p], betas=(0.9, 1.0)), InvalidInputError, "betas"),
        (lambda p: AdamW8bit([p], min_8bit_size=-1), InvalidInputError, "min_8bit_size"),
        (lambda p: Lion8bit([p], bf16_stochastic_rounding=1), InvalidInputError, "stochastic"),
        (lambda p: Lion8bit([p], backend="cuda"), InvalidInputError, "backend"),
        (lambda p: AdamW8bit([p], betas=None), InvalidInputError, "betas"),
        (lambda p: AdamW8bit([p], betas=("a", 0.9)), InvalidInputError, "betas"),
        (lambda p: AdamW8bit([{"params": [p], "betas": (2.0, 0.9)}]), InvalidInputError, "betas"),
        (lambda p: AdamW8bit([{"params": [p], "lr": -1}]), InvalidInputError, "lr"),
        (lambda p: AdamW8bit([{"params": [p], "wd": 2}]), InvalidInputError, "wd"),
        (lambda p: Lion8bit([{"params": [p], "eps": 1e-3}]), InvalidInputError, "eps"),
        (lambda p: Lion8bit([{"lr": 1.0}]), InvalidInputError, "params"),
        (lambda p: Lion8bit([p, p * 2]), InvalidInputError, "leaf"),
        (lambda p: Lion8bit([3]), InvalidInputError, "group|param"),
        (lambda p: Lion8bit([]), InvalidInputError, "params"),
        (lambda p: Lion8bit(p), InvalidInputError, "params"),
        (lambda p: Lion8bit([nn.Parameter(p.detach().t())]), InvalidInputError, "contiguous"),
        (lambda p: Lion8bit([nn.Parameter(p.detach().double())]), InvalidInputError, "float32"),
        (lambda p: Lion8bit([p]), UnsupportedError, "sparse"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_refusals(make, error, word):
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.zeros(3, 4)
    if word == "sparse":
        p.grad = p.grad.to_sparse()
    with pytest.raises(error, match=word):
        optimizer = make(p)
        for q in optimizer.param_groups[0]["params"]:
            q.grad = torch.zeros_like(q) if q.grad is None else q.grad
        optimizer.step()


def stepped(kind, *shape, **more):
    p = nn.Parameter(values(*shape))
    optimizer = KINDS[kind]([p], **more)
    p.grad = values(*shape, seed=1)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_others_are_refused(kind):
    """The kernel trusts their sizes: states of a smaller parameter would be read and written beyond their end."""
    mine, other = stepped(kind, 4, 2048), "lion" if kind == "adamw" else "adamw"
    before = {name: value for name, value in mine.state_dict()["state"][0].items()}
    for state_dict, why in (
        (stepped(kind, 2, 2048).state_dict(), "4096 values, and 8192 belong there"),
        (stepped(other, 4, 2048).state_dict(), "of another optimizer"),
        (torch.optim.AdamW([nn.Parameter(values(4, 2048))]).state_dict() | {"state": {0: {"step": torch.ones(())}}},
         "number of steps"),
        (KINDS[kind]([nn.Parameter(values(3)), nn.Parameter(values(3))]).state_dict(), "other groups"),
        ({"state": {}}, "param_groups and state"), (None, "param_groups and state"),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=why):
            mine.load_state_dict(state_dict)
    for name, value, why in (
        ("exp_avg", torch.zeros(8192, dtype=torch.float16), "lacks exp_avg"), ("exp_avg_scale", None, "without scales"),
        ("exp_avg_scale", torch.ones(31), "other scales"), ("exp_avg_scale", torch.ones(32).double(), "other scales"),
        ("step", -1, "number of steps"), ("more", 3, "another optimizer"),
    ):  # fmt: skip
        found = stepped(kind, 4, 2048).state_dict()
        found["state"][0][name] = value
        if value is None:
            del found["state"][0][name]
        with pytest.raises(InvalidInputError, match=why):
            mine.load_state_dict(found)
    after = mine.state_dict()["state"][0]
    assert all(torch.equal(torch.as_tensor(after[name]), torch.as_tensor(value)) for name, value in before.items())
    for size in (0, 10**9):  # states of 8 and of 32 bits, whatever a new one would have
        mine.load_state_dict(stepped(kind, 4, 2048, min_8bit_size=size).state_dict())
        mine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_on_as_the_original(kind):
    p = nn.Parameter(values(300))
    p.grad = values(300, seed=1)
    optimizer = KINDS[kind]([p], lr=0.1, min_8bit_size=0, seed=5)
    optimizer.step()
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    optimizer.step()
    for one in copies:
        twin = one.param_groups[0]["params"][0]
        twin.grad = p.grad.clone()
        one.step()
        assert torch.equal(twin, p) and one.seed == 5 and one.min_8bit_size == 0


def test_a_compiled_step_is_a_step():
    p, twin = (nn.Parameter(values(300)) for _ in range(2))
    p.grad, twin.grad = values(300, seed=1), values(300, seed=1)
    compiled, plain = (AdamW8bit([one], lr=0.1, min_8bit_size=0, seed=5) for one in (p, twin))
    torch.compile(compiled.step, backend="eager")()
    plain.step()
    assert torch.equal(p, twin)
