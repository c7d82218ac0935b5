"""Short causal convolutions: against the formula in float64, gradients, states, packed rows, decoding step by step."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.thunderkittens import causal_conv1d as c
from gpu_accel.thunderkittens.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from tests.thunderkittens.helpers import close, randn, run


def make(device, *, batch=2, dim=19, seqlen=30, width=4, dtype=torch.float32):
    x = randn(batch, dim, seqlen, seed=1, dtype=dtype, device=device)
    weight, bias = (randn(*s, seed=n, dtype=dtype, device=device) for n, s in ((2, (dim, width)), (3, (dim,))))
    return x, weight, bias, randn(batch, dim, width - 1, seed=4, dtype=dtype, device=device)


def judge(function, tensors, grads, names):
    mine, truth = run(function("portable"), tensors, grads), run(function("reference"), tensors, grads, torch.float64)
    ruler = run(function("reference"), tensors, grads)
    for name, *three in zip(names, mine, truth, ruler, strict=True):
        if three[0] is not None:
            close(name, *three, narrow=tensors[0].dtype == torch.bfloat16)


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(None, torch.float32), ("silu", torch.float32), ("silu", torch.bfloat16)],
    ids=["none-fp32", "silu-fp32", "silu-bf16"],
)
def test_values_and_gradients(activation, dtype, device):
    x, weight, bias, initial = make(device, dim=5, seqlen=20, dtype=dtype)

    def function(backend):
        return lambda x, w, b, h: causal_conv1d_fn(x, w, b, None, h, activation=activation, backend=backend)

    judge(function, [x, weight, bias, initial], [randn(*x.shape, seed=5, device=device)], ["y", "dx", "dw", "db", "dh"])


@pytest.mark.parametrize(
    ("seqlen", "width"), [(1, 4), (2, 4), (33, 2), (32, 3), (0, 4)], ids=["T1", "T2", "T33-W2", "T32-W3", "T0"]
)
def test_lengths_and_widths(seqlen, width, device):
    x, weight, *_ = make(device, seqlen=seqlen, width=width)

    def function(backend):
        return lambda x, w: causal_conv1d_fn(x, w, backend=backend)

    judge(function, [x, weight], [randn(*x.shape, seed=5, device=device)], ["y", "dx", "dw"])


def test_channels_innermost_and_slices(device):
    """As Mamba has it: a transposed slice of a projection."""
    wide = randn(2, 33, 40, seed=1, device=device)
    weight, bias = randn(19, 4, seed=2, device=device), randn(19, seed=3, device=device)

    def function(backend):
        return lambda t, w, b: causal_conv1d_fn(t[..., 7:26].transpose(1, 2), w, b, activation="silu", backend=backend)

    judge(function, [wide, weight, bias], [randn(2, 19, 33, seed=5, device=device)], ["y", "dx", "dw", "db"])


@pytest.mark.parametrize(("seqlen", "width", "bias", "activation", "dtype"), [
    (33, 4, True, "silu", torch.float32), (16, 3, False, None, torch.float32), (2, 2, True, None, torch.float32),
    (1, 4, False, "silu", torch.float32), (18, 4, True, "silu", torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_by_walks(ahead, seqlen, width, bias, activation, dtype, device, monkeypatch):
    """Channels side by side; several programs in time, and the steps that they walk beyond their own."""
    for way in ("", "_BACK"):
        monkeypatch.setattr(c, f"{way}_AHEAD", ahead)
        monkeypatch.setattr(c, f"{way}_STEPS", 8)
        monkeypatch.setattr(c, f"{way}_CHANNELS", 16)
    wide = randn(2, seqlen, 40, seed=1, dtype=dtype, device=device)
    vectors = (randn(*size, seed=n, dtype=dtype, device=device) for n, size in ((2, (19, width)), (3, (19,))))
    tensors = [wide, *vectors][: 2 + bias]

    def function(backend):
        return lambda t, w, b=None: causal_conv1d_fn(t[..., 7:26].transpose(1, 2), w, b, activation=activation,
                                                     backend=backend)  # fmt: skip

    dy = randn(2, seqlen, 19, seed=5, device=device).transpose(1, 2)
    judge(function, tensors, [dy], ["y", "dx", "dw", "db"][: 3 + bias])


@pytest.mark.parametrize(
    ("layout", "width"), [("walks", 2), ("walks", 4), ("states", 4), ("packed", 3), ("steps", 2)]
)
def test_infinity_reaches_what_it_is_added_to_and_no_more(layout, width, device, monkeypatch):
    """No zero stands in for what is not there, which times infinity is no number. Several programs in time."""
    for way in ("", "_BACK"):
        monkeypatch.setattr(c, f"{way}_STEPS", 8)
    x, weight, bias, initial = make(device, dim=5, seqlen=12, width=width)
    x, weight = x.abs() + 1, weight.abs() + 1
    x[0, 1, 8], x[1, 2, 3], weight[3, width - 1] = torch.inf, -torch.inf, torch.inf
    dy = randn(2, 5, 12, seed=5, device=device).abs() + 1
    if layout != "steps":
        x, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy))

    seq = (torch.arange(12, device=device) >= 9).int().expand(2, 12) if layout == "packed" else None

    def function(backend):
        return lambda x, w, b, h=None: causal_conv1d_fn(x, w, b, seq, h, backend=backend)

    tensors = [x, weight, bias, initial.abs()][: 4 if layout == "states" else 3]
    found, wanted = (run(function(backend), tensors, [dy]) for backend in ("portable", "reference"))
    for name, one, other in zip(("y", "dx", "dw", "db", "dh")[: 1 + len(tensors)], found, wanted, strict=True):
        assert other.isinf().any() or name in ("db", "dh")
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, name=name: name + m)


def test_packed_rows_equal_each_alone(device):
    x, weight, bias, _ = make(device, batch=1, seqlen=30)
    seq = torch.tensor([[0] * 2 + [1] * 17 + [2] * 11], dtype=torch.int32, device=device)

    def function(backend):
        return lambda x, w, b: causal_conv1d_fn(x, w, b, seq, activation="silu", backend=backend)

    grad = randn(*x.shape, seed=5, device=device)
    judge(function, [x, weight, bias], [grad], ["y", "dx", "dw", "db"])
    y = function("portable")(x, weight, bias)
    alone = causal_conv1d_fn(x[..., 2:19], weight, bias, activation="silu", backend="portable")
    torch.testing.assert_close(y[..., 2:19], alone)


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("ring", [False, True], ids=["shifted", "ring"])
def test_decoding_continues_a_sequence(ring, backend, device):
    """A prefix at once, then one step, three steps, one step: the same as all at once."""
    x, weight, bias, _ = make(device, seqlen=20)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu", backend="reference")
    state = torch.full((3, 19, 5), float("nan"), device=device)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=device)
    seen = 7
    for step in range(seen - 5, seen):
        at = step % 5 if ring else step - (seen - 5)
        state[rows.long(), :, at] = x[..., step]
    for count in (1, 3, 1, 8):
        lengths = torch.full((2,), seen, dtype=torch.int32, device=device) if ring else None
        part = x[..., seen] if count == 1 else x[..., seen : seen + count]
        y = causal_conv1d_update(part, state, weight, bias, "silu", lengths, rows, backend=backend)
        torch.testing.assert_close(y.reshape(2, 19, count), whole[..., seen : seen + count])
        seen += count
    assert state[1].isnan().all() and not state[[0, 2]].isnan().any()


def test_final_states(device):
    x, weight, *_ = make(device, seqlen=9)
    _, last = causal_conv1d_fn(x[..., :2], weight, return_final_states=True, backend="portable")
    assert torch.equal(last, torch.cat([torch.zeros_like(x[..., :1]), x[..., :2]], -1))
    y = causal_conv1d_fn(x[..., 2:], weight, initial_states=last, backend="portable")
    torch.testing.assert_close(y, causal_conv1d_fn(x, weight, backend="portable")[..., 2:])


def test_final_states_are_written_where_the_caller_wants_them(device):
    x, weight, bias, initial = make(device)
    room = torch.full((2, 3, x.shape[1]), torch.nan, device=device).transpose(1, 2)  # as in causal_conv1d's own calls
    y, last = causal_conv1d_fn(x, weight, bias, None, initial, True, room, "silu")
    same, theirs = causal_conv1d_fn(x, weight, bias, None, initial, True, None, "silu")
    assert last is room and torch.equal(room, theirs) and torch.equal(y, same)
    _, again = causal_conv1d_fn(x[..., :2], weight, initial_states=initial, return_final_states=True,
                                final_states_out=initial)  # fmt: skip
    assert again is initial and torch.equal(initial[..., 1:], x[..., :2])


@pytest.mark.parametrize("seqlen", [1, 2])
def test_states_of_sequences_shorter_than_the_filter(seqlen, device):
    """Final states are partly the initial ones, whose gradients come both ways (fla#1140 has them at other places)."""
    x, weight, bias, initial = make(device, dim=5, seqlen=seqlen)

    def function(backend):
        return lambda x, w, b, h: causal_conv1d_fn(x, w, b, None, h, True, None, "silu", backend=backend)

    grads = [randn(*x.shape, seed=5, device=device), randn(*initial.shape, seed=6, device=device)]
    judge(function, [x, weight, bias, initial], grads, ["y", "last", "dx", "dw", "db", "dh"])


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("lengths", [(7, 2), (8, 1), (1, 1, 1, 6), (2,)], ids=str)
def test_final_states_of_packed_rows_are_of_the_last_sequence(lengths, backend, device):
    x, weight, *_ = make(device, seqlen=sum(lengths))
    seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(len(x), -1).to(device)
    _, last = causal_conv1d_fn(x, weight, None, seq, None, True, backend=backend)
    _, alone = causal_conv1d_fn(x[..., sum(lengths[:-1]) :], weight, return_final_states=True, backend=backend)
    assert torch.equal(last, alone)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_numbers_of_sequences_need_no_order(backend, device):
    """A step sees those before it that have its number, as in causal_conv1d."""
    x, weight, *_ = make(device, seqlen=40, width=3)
    seq = torch.randint(-3, 3, (len(x), 40), generator=torch.Generator().manual_seed(0)).to(device)
    expected = weight[:, 2, None] * x
    for back in (1, 2):
        same = (seq[:, back:] == seq[:, :-back])[:, None]
        expected[..., back:] += weight[:, 2 - back, None] * x[..., :-back] * same
    torch.testing.assert_close(causal_conv1d_fn(x, weight, None, seq, backend=backend), expected)


def test_final_states_are_written_where_they_are_wanted(device):
    x, weight, bias, initial = make(device, seqlen=9)
    x.requires_grad_()
    expected = causal_conv1d_fn(x, weight, bias, None, initial, True)
    out = torch.full_like(initial, float("nan"))
    y, last = causal_conv1d_fn(x, weight, bias, None, initial, True, out)
    assert last is out and torch.equal(y, expected[0]) and torch.equal(last, expected[1])
    (dx,) = torch.autograd.grad(last.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(expected[1].sum(), x)[0])
    for wrong, message in [
        (dict(return_final_states=False), "needs return_final_states=True"),
        (dict(final_states_out=out[..., 1:]), "final_states_out must be"),
        (dict(final_states_out=out.double()), "final_states_out must be"),
        (dict(final_states_out=initial[..., :1].expand(initial.shape)), "share memory"),
        (dict(final_states_out=x.detach()[..., :3]), "shares memory with x"),
        (dict(final_states_out=initial.clone().requires_grad_()), "gradients are wanted of it"),
        (dict(final_states_out=[1.0]), "must be a torch.Tensor"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            causal_conv1d_fn(x, weight, **dict(return_final_states=True, final_states_out=out.detach()) | wrong)


def test_wrong_arguments_are_refused(device):
    x, weight, bias, initial = make(device)
    seq = torch.zeros(2, 30, dtype=torch.int32, device=device)
    for given, message in [
        (dict(x=x[0]), "x must be"), (dict(weight=weight[:5]), "weight must be"), (dict(bias=bias[:3]), "bias must be"),
        (dict(activation="relu"), "activation is 'relu'"), (dict(seq_idx=seq, initial_states=initial), "seq_idx"),
        (dict(initial_states=initial[..., :1]), "initial_states must be"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInputError, match=message):
            causal_conv1d_fn(**dict(x=x, weight=weight) | given)
    with pytest.raises(InvalidInputError, match="at least width - 1"):
        causal_conv1d_update(x[..., 0], initial[..., :2], weight)


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_vectors_of_another_stride(backend, device):
    x, weight, bias, initial = make(device)
    state = initial.clone()
    lengths, rows = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([1, 2], [1, 0]))
    others = [torch.stack([t, t + 7], 1)[:, 0] for t in (bias, lengths, rows)]
    assert not any(t.is_contiguous() for t in others)
    one = causal_conv1d_fn(x, weight, bias, backend=backend)
    assert torch.equal(causal_conv1d_fn(x, weight, others[0], backend=backend), one)
    one = causal_conv1d_update(x[..., 0], state, weight, bias, None, lengths, rows, backend=backend)
    again = initial.clone()
    other = causal_conv1d_update(x[..., 0], again, weight, others[0], None, *others[1:], backend=backend)
    assert torch.equal(one, other) and torch.equal(state, again)


def test_rows_and_lengths_that_do_not_exist(device, monkeypatch):
    x, weight, bias, initial = make(device)
    rows = lambda *n: torch.tensor(n, dtype=torch.int32, device=device)  # noqa: E731
    if device == "cpu":
        for given, message in [
            (dict(conv_state_indices=rows(0, 2)), "from 0 to 1"), (dict(conv_state_indices=rows(-1, 0)), "got -1"),
            (dict(conv_state_indices=rows(1, 1)), "all be different"), (dict(cache_seqlens=rows(-1, 0)), "got -1"),
        ]:  # fmt: skip
            with pytest.raises(InvalidInputError, match=message):
                causal_conv1d_update(x[..., 0], initial, weight, **given)
    monkeypatch.setattr(c, "check_values", lambda *_: None)
    monkeypatch.setattr(c, "readable", lambda _: False)
    for wrong in (-1, 2, 1 << 20):
        state = initial.clone()
        y = causal_conv1d_update(x[..., 0], state, weight, bias, conv_state_indices=rows(wrong, 0), backend="portable")
        assert y[0].isnan().all() and y[1].isfinite().all() and torch.equal(state[1], initial[1])
    for one, other in ((-1, 2), (-4, 2)):  # of a ring of three
        found = []
        for seen in (one, other):
            state = initial.clone()
            y = causal_conv1d_update(x[..., 0], state, weight, bias, None, rows(seen, 1), backend="portable")
            found.append((y, state))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


WRONG = {
    "weight-elsewhere": lambda x, w, s: causal_conv1d_fn(x, w.to("meta")),
    "bias-elsewhere": lambda x, w, s: causal_conv1d_fn(x, w, w[:, 0].to("meta")),
    "state-elsewhere": lambda x, w, s: causal_conv1d_update(x[..., 0], s.to("meta"), w),
    "seq_idx-of-floats": lambda x, w, s: causal_conv1d_fn(x, w, seq_idx=torch.zeros_like(x[:, 0])),
    "integer-weight": lambda x, w, s: causal_conv1d_fn(x, w.int()),
    "integer-state": lambda x, w, s: causal_conv1d_update(x[..., 0], s.int(), w),
    "boolean-indices": lambda x, w, s: causal_conv1d_update(
        x[..., 0], s, w, conv_state_indices=torch.ones(2, device=x.device) > 0
    ),
    "expanded-state": lambda x, w, s: causal_conv1d_update(x[..., 0], s[:1].expand(s.shape), w),
    "list": lambda x, w, s: causal_conv1d_fn([1.0], w),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_kinds_dtypes_and_devices_are_refused(call, device):
    x, weight, _, initial = make(device)
    with pytest.raises(InvalidInputError):
        call(x, weight, initial)


def test_opcheck(device):
    x, weight, bias, initial = (t.requires_grad_() for t in make(device, batch=1, dim=3, seqlen=5))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(c.conv_op, (x, weight, bias, initial, None, True), test_utils=tests)
    torch.library.opcheck(c.conv_op, (x.detach().transpose(1, 2).contiguous().transpose(1, 2), weight.detach(), None,
                                      None, None, False), test_utils=tests)  # fmt: skip
    plain = [t.detach() for t in (x, weight, bias, initial)]
    torch.library.opcheck(c.conv_backward_op, (plain[0], *plain, None, True), test_utils=tests)
    torch.library.opcheck(c.update_op, (*plain[:1], plain[3].clone(), *plain[1:3], None, None, True), test_utils=tests)


def test_a_state_shares_no_memory_with_what_is_read(device):
    """Threads would read what others have written."""
    state, weight = torch.zeros(2, 3, 4, device=device), torch.ones(3, 4, device=device)
    for given in ((state[:, :, :2], state, weight), (state[..., 0].clone(), state, state[0])):
        with pytest.raises(InvalidInputError, match="shares memory"):
            causal_conv1d_update(*given)


def test_channels_that_lie_far_apart():
    """As (batch, dim, seqlen) of millions of steps is; nothing but what is read is in memory."""
    step = 2**31 // 3 + 8
    memory = torch.empty(3 * step + 64, dtype=torch.bfloat16)
    x = memory.as_strided((2, 4, 6), (6, step, 1))
    x.copy_(randn(2, 4, 6, seed=1))
    weight = randn(4, 4, seed=2).bfloat16().requires_grad_()
    for given in (x, x.detach().requires_grad_()):
        found = []
        for backend in ("portable", "reference"):
            y = causal_conv1d_fn(given, weight, activation="silu", backend=backend)
            found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), weight)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    states = [torch.zeros(2, 4, 3, dtype=torch.bfloat16) for _ in range(2)]
    one, other = (
        causal_conv1d_update(x, state, weight, backend=backend)
        for state, backend in zip(states, ("portable", "reference"), strict=True)
    )
    torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert torch.equal(*states) and torch.equal(states[0], x[..., 3:])
