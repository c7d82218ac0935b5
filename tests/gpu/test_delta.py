"""The delta rule in Gluon, on a Hopper GPU. Other kernels of it: test_thunderkittens.py."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.thunderkittens import delta_hopper
from gpu_accel.thunderkittens.delta import delta_rule

from .judging import BF16, FP16, assert_repeats, between_nan, judge, judge_values, randn

NAMES = ["o", "state", "dq", "dk", "dv", "dbeta", "dinitial", "dg"]


def on_hopper(backend):
    """`judge` asks for "portable" and for the reference, which is the truth and the ruler."""
    backend = "hopper" if backend == "portable" else backend
    return lambda q, k, v, beta, h=None, g=None: delta_rule(q, k, v, beta, g=g, initial_state=h, backend=backend)


def on_portable(backend):
    return lambda q, k, v, beta, h=None, g=None: delta_rule(q, k, v, beta, g=g, initial_state=h, backend=backend)


def make(batch, seqlen, heads, heads_q, key_dim, value_dim, gated, dtype=BF16, first_seed=0):
    def some(*shape, seed, dtype=torch.float32):
        return randn(*shape, seed=first_seed + seed, dtype=dtype)

    q, k = (torch.nn.functional.normalize(some(batch, seqlen, heads_q, key_dim, seed=s), dim=-1) for s in (1, 2))
    tensors = [q.to(dtype), k.to(dtype), some(batch, seqlen, heads, value_dim, seed=3, dtype=dtype)]
    tensors += [some(batch, seqlen, heads, seed=4).sigmoid(), some(batch, heads, key_dim, value_dim, seed=5)]
    tensors += [-some(batch, seqlen, heads, seed=6).square() * 0.1] if gated else []
    grads = [some(batch, seqlen, heads, value_dim, seed=7), some(batch, heads, key_dim, value_dim, seed=8)]
    return tensors, grads


SHAPES = [
    pytest.param((2, 515, 4, 4, 64, 128), id="T515-K64-V128"),
    pytest.param((2, 300, 4, 2, 128, 64), id="T300-H4q2-K128-V64"),
    pytest.param((1, 1023, 2, 1, 128, 192), id="T1023-H2q1-K128-V192"),
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_walk_on_hopper(shape, gated, stages, monkeypatch):
    monkeypatch.setattr(delta_hopper, "STAGES", {64: stages, 128: stages})
    tensors, _ = make(*shape, gated)
    judge_values(NAMES, on_hopper, tensors)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_on_hopper(shape, gated):
    """Of one head of q for two, and of more than 128 columns of v, mostly by the portable kernels."""
    tensors, grads = make(*shape, gated)
    judge(NAMES[: 8 if gated else 7], on_hopper, tensors, grads)


WIDE = dict(WIDE=True, sms=lambda _: 0)
FORMS = {
    "walked_portably": dict(WALKS_BACK=False), "walked": dict(WALKS_BACK=True),
    "wide": dict(WALKS_BACK=True, SHARED=True) | WIDE,
    "two_stages": dict(WALKS_BACK=True, BACK_STAGES={64: 1, 128: 2}) | WIDE,
}  # fmt: skip
BACK = [
    pytest.param((2, 300, 4, 4, 128, 128), id="T300-K128-V128"),
    pytest.param((2, 130, 3, 3, 64, 64), id="T130-H3-K64-V64"),
    pytest.param((1, 1023, 2, 2, 72, 104), id="T1023-K72-V104"),
    pytest.param((2, 65, 8, 8, 128, 40), id="T65-K128-V40"),
    pytest.param((2, 300, 4, 2, 128, 128), id="T300-H4q2-K128-V128"),
    pytest.param((1, 200, 8, 2, 40, 64), id="T200-H8q2-K40-V64"),
]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", [(2, 300, 4, 2, 128, 128), (1, 130, 2, 2, 72, 104)])
def test_wide_walk_on_hopper(shape, gated, monkeypatch):
    for name, value in WIDE.items():
        monkeypatch.setattr(delta_hopper, name, value)
    judge_values(NAMES, on_hopper, make(*shape, gated)[0])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", BACK)
def test_gradients_in_chunks_on_hopper(shape, form, gated, monkeypatch):
    for name, value in form.items():
        monkeypatch.setattr(delta_hopper, name, value)
    for seed in (0, 10):
        tensors, grads = make(*shape, gated, first_seed=seed)
        judge(NAMES[: 8 if gated else 7], on_hopper, tensors, grads)


def test_gradients_on_hopper_with_views_and_the_same_bits_again(monkeypatch):
    """NaN before and behind q, k and v, steps apart, also where TMA cannot address them; twenty runs."""
    for name, value in FORMS["wide"].items():
        monkeypatch.setattr(delta_hopper, name, value)
    tensors, grads = make(2, 200, 8, 8, 128, 128, True)

    def gradients(*given):
        leaves = [x.detach().requires_grad_() for x in given]
        out = on_hopper("hopper")(*leaves)
        return torch.autograd.grad(out, leaves, [d.to(o.dtype) for o, d in zip(out, grads, strict=True)])

    expected = gradients(*tensors)
    others = [[between_nan(x, shift) for x in tensors[:3]] + tensors[3:] for shift in (8, 3)]
    for given in [*others, *[tensors] * 20]:
        assert all(torch.equal(a, b) for a, b in zip(gradients(*given), expected, strict=True))


@pytest.mark.parametrize("part", ["values", "gradients"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_tiles_that_are_not_full(gated, part):
    tensors, grads = make(1, 1023, 2, 1, 72, 200, gated)
    if part == "gradients":
        judge(NAMES[: 8 if gated else 7], on_portable, tensors, grads)
    else:
        judge_values(NAMES, on_portable, tensors)
        judge_values(NAMES, on_hopper, tensors)


@pytest.mark.parametrize("shape", [(2, 300, 8, 4, 128, 64), (2, 515, 8, 8, 64, 128), (2, 1023, 4, 4, 72, 200)])
def test_gradients_of_gates_of_many(shape):
    """Their largest errors are few, near the end, where the gradient of the final state comes in: many seeds."""
    for seed in range(10, 60, 10):
        tensors, grads = make(*shape, True, first_seed=seed)
        for backend in (on_portable, on_hopper):
            judge(NAMES, backend, tensors, grads)


@pytest.mark.parametrize("seqlen", [1, 16, 63, 64, 65, 128])
def test_lengths_on_hopper(seqlen):
    """Many heads: one step is one number a head and column, and the yardstick may hit a few by luck."""
    tensors, grads = make(1, seqlen, 32, 32, 128, 128, False)
    judge(NAMES[:6], on_hopper, tensors[:4], grads)


def test_views_on_hopper():
    """NaN before and behind q, k and v, steps apart; then views that TMA cannot address."""
    tensors, _ = make(2, 200, 3, 3, 64, 64, True)
    expected = on_hopper("hopper")(*tensors)
    for shift in (8, 3):
        given = [between_nan(x, shift) for x in tensors[:3]]
        for one, other in zip(on_hopper("hopper")(*given, *tensors[3:]), expected, strict=True):
            assert torch.equal(one, other)


def test_the_same_bits_again_on_hopper():
    assert_repeats(on_hopper("hopper"), make(2, 300, 4, 4, 128, 128, True)[0])


def test_what_is_refused_on_hopper():
    with pytest.raises(UnsupportedError, match="takes bfloat16"):
        on_hopper("hopper")(*make(1, 64, 2, 2, 64, 64, True, FP16)[0])
    with pytest.raises(UnsupportedError, match="from 16 to 128"):
        on_hopper("hopper")(*make(1, 64, 2, 2, 136, 64, True)[0])


def test_what_auto_takes():
    """The walk in Gluon where K and V are above 32, with its bits; else the portable kernels, with theirs."""
    for dims, backend in (((64, 72), "hopper"), ((24, 64), "portable")):
        tensors, _ = make(2, 130, 3, 3, *dims, True)
        for one, other in zip(on_hopper("auto")(*tensors), on_portable(backend)(*tensors), strict=True):
            assert torch.equal(one, other)
