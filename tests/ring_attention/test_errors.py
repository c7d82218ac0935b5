"""What makes no sense is refused, no argument is ignored, and a rank that is wrong on its own tells the others."""

from __future__ import annotations

import contextvars
import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.ring_attention import (
    RingAttention,
    replay_rank,
    ring_attention_backward,
    ring_attention_forward,
    shard_sequence,
)
from gpu_accel.ring_attention.api import (
    accumulate_attention_outputs,
    distributed_attention_exact,
    global_accumulate,
    local_attention,
    overlap_comm_compute,
    ring_communicate_kv,
    ring_send_recv,
)
from gpu_accel.ring_attention.attention import distributed_attention, forward, gather_sequence, make_call
from gpu_accel.ring_attention.faults import CommunicationError
from gpu_accel.ring_attention.flash_attn_names import (
    ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
)
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.simulate import simulate, simulate_attention
from gpu_accel.ring_attention.transport import LocalTransport, Pending, TorchTransport, World, check_group

RANKS, ROWS = 3, 6
X = torch.ones(1, 2, RANKS * ROWS, 8)  # (batch, heads, seqlen, head_dim)
ROW = torch.ones(1, 4, 2, 8)  # (batch, seqlen, heads, head_dim)
OUT, LSE = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)


def module(**options):
    return RingAttention(RANKS, simulate=True, **options)(X, X, X)


REFUSED = {
    "transport-number": lambda: distributed_attention(
        ROW, ROW, ROW, layout=make_layout("zigzag", seqlen=8, ranks=2), transport=3
    ),
    "transport-none": lambda: distributed_attention(
        ROW, ROW, ROW, layout=make_layout("zigzag", seqlen=8, ranks=2), transport=None
    ),
    "transport-of-gather": lambda: gather_sequence(ROW, make_layout("zigzag", seqlen=8, ranks=2), "nccl"),
    "transport-of-forward": lambda: forward(ROW, ROW, ROW, None, object()),
    "ulysses-of-a-ring": lambda: module(schedule="kv_ring", ulysses=3),
    "mesh-of-a-ring": lambda: module(schedule="kv_ring", mesh=(3, 1)),
    "inner-of-ulysses": lambda: module(schedule="ulysses", inner=3),
    "wire-of-queries": lambda: module(schedule="q_ring", wire=torch.float16),
    "ulysses-true": lambda: module(schedule="usp", ulysses=True),
    "mesh-number": lambda: module(schedule="mesh", mesh=3),
    "mesh-halves": lambda: module(schedule="mesh", mesh=(1.5, 2)),
    "do-elsewhere": lambda: simulate_attention(ROW, ROW, ROW, do=ROW.to("meta"), ranks=2),
    "threads": lambda: simulate_attention(ROW, ROW, ROW, ranks=2**40),
    "matrix-of-results": lambda: accumulate_attention_outputs([(OUT[0, 0], LSE[0])]),
    "padding-below-bytes": lambda: shard_sequence(torch.ones(1, 5, dtype=torch.uint8), 2, padding=-5),
    "padding-half": lambda: shard_sequence(torch.ones(1, 5, dtype=torch.int64), 2, padding=0.5),
    "padding-nan-of-integers": lambda: shard_sequence(torch.ones(1, 5, dtype=torch.int64), 2, padding=float("nan")),
    "padding-two-of-flags": lambda: shard_sequence(torch.ones(1, 5) > 0, 2, padding=2),
    "padding-beyond-half": lambda: shard_sequence(torch.ones(1, 5, dtype=torch.float16), 2, padding=1e300),
    "padding-beyond-all": lambda: shard_sequence(torch.ones(1, 5), 2, padding=10**400),
    "padding-of-positions": lambda: make_layout("zigzag", seqlen=5, ranks=2).positions(0, padding=None),
    "ignored-label": lambda: make_layout("zigzag", seqlen=4, ranks=2).shift_labels(
        torch.ones(1, 4, dtype=torch.int32), 0, ignore_index=2**40
    ),
    "half-a-label": lambda: make_layout("zigzag", seqlen=4, ranks=2).loss_scale(1.5, 3),
    "labels-in-a-row": lambda: make_layout("zigzag", seqlen=4, ranks=2).loss_scale(torch.ones(2).int(), 3),
    "documents-number": lambda: make_layout("documents", seqlen=10, ranks=3, documents=10),
    "seq-len-of-simulated-forward": lambda: ring_attention_forward(X, X, X, 2, seq_len=3),
    "seq-len-of-simulated-backward": lambda: ring_attention_backward(X, X, X, X, 2, seq_len=3),
    "devices-text": lambda: ring_attention_forward(X, X, X, "2"),
    "no-shards": lambda: shard_sequence(X, 0),
    "results-that-would-broadcast": lambda: accumulate_attention_outputs([(OUT, LSE), (OUT[:, :1], LSE[..., :1])]),
    "results-number": lambda: accumulate_attention_outputs(5),
    "results-tensor": lambda: accumulate_attention_outputs(OUT),
    "results-iterator": lambda: accumulate_attention_outputs(iter([(OUT, LSE)])),
    "result-without-lse": lambda: accumulate_attention_outputs([(OUT,)]),
    "result-none": lambda: accumulate_attention_outputs([None]),
    "result-of-nones": lambda: accumulate_attention_outputs([(None, None)]),
    "result-of-integers": lambda: accumulate_attention_outputs([(OUT.int(), LSE.int())]),
    "result-elsewhere": lambda: accumulate_attention_outputs([(OUT, LSE), (OUT.to("meta"), LSE.to("meta"))]),
    "final-number": lambda: accumulate_attention_outputs([(OUT, LSE)], 5),
    "final-without-lse": lambda: accumulate_attention_outputs([(OUT, LSE)], (OUT,)),
    "final-of-integers": lambda: accumulate_attention_outputs([(OUT, LSE)], (OUT.int(), LSE.int())),
    "final-that-wants-gradients": lambda: accumulate_attention_outputs(
        [(OUT, LSE)], (OUT.clone().requires_grad_(), LSE.clone())
    ),
    "final-expanded": lambda: accumulate_attention_outputs([(OUT, LSE)], (OUT[:, :1].expand(1, 4, 2, 8), LSE.clone())),
    "final-among-results": lambda: accumulate_attention_outputs([(OUT, LSE)], (OUT, LSE.clone())),
    "final-beside-results": lambda: accumulate_attention_outputs([(OUT[:, :, :, :8], LSE)], (OUT.clone(), LSE)),
    "blocks-none": lambda: distributed_attention_exact(X, None, 1),
    "block-without-values": lambda: distributed_attention_exact(X, [(X,)], 1),
    "rank-text": lambda: distributed_attention_exact(X, [(X, X)], 1, rank="x"),
    "transport-of-send": lambda: ring_send_recv(OUT, transport=3),
    "transport-of-communicate": lambda: ring_communicate_kv(OUT, 0, 0, transport="nccl"),
    "transport-of-accumulate": lambda: global_accumulate(OUT, LSE, transport=3),
    "group-text": lambda: check_group("world"),
    "group-number": lambda: check_group(3),
    "simulated-option-that-is-not-there": lambda: simulate_attention(ROW, ROW, ROW, ranks=2, foo=1),
    "simulated-sinks": lambda: simulate_attention(ROW, ROW, ROW, ranks=2, sinks=torch.zeros(2)),
    "keys-without-dimensions": lambda: simulate_attention(ROW, ROW[0, 0, 0, 0], ROW, ranks=2),
    "keys-of-one-dimension": lambda: simulate_attention(ROW, ROW[0, 0, 0], ROW, ranks=2),
    "queries-list": lambda: simulate_attention([1.0], ROW, ROW, ranks=2),
    "do-list": lambda: simulate_attention(ROW, ROW, ROW, ranks=2, do=[1.0]),
    "do-shape": lambda: simulate_attention(ROW, ROW, ROW, ranks=2, do=ROW[..., :4]),
    "world-of-none": lambda: World(0),
    "world-text": lambda: World("2"),
    "keys-number": lambda: replay_rank(ROW, ROW, ROW, layout=make_layout("zigzag", seqlen=8, ranks=2), rank=0, keys=3),
    "no-function-to-simulate": lambda: simulate(None, 2),
    "nothing-to-communicate": lambda: overlap_comm_compute(None, lambda: 1),
    "nothing-to-compute": lambda: overlap_comm_compute(lambda: Pending(lambda: 1), 1),
    "nothing-to-wait-for": lambda: overlap_comm_compute(lambda: 3, lambda: 1),
    "world-number": lambda: simulate_attention(ROW, ROW, ROW, ranks=2, world=2),
    "local-keys-of-one-dimension": lambda: local_attention(ROW, ROW[0, 0, 0], ROW),
    "dim-too-far": lambda: shard_sequence(X, 2, dim=9),
    "dim-text": lambda: shard_sequence(X, 2, dim="x"),
    "padding-text": lambda: shard_sequence(X, 2, padding="x"),
    "tokens-list": lambda: shard_sequence([1, 2], 2, dim=0),
    "block-size-text": lambda: shard_sequence(X, 2, "x"),
    "shard-dim-text": lambda: make_layout("zigzag", seqlen=18, ranks=3).shard(X, 0, dim="x"),
    "shards-of-numbers": lambda: make_layout("zigzag", seqlen=18, ranks=3).unshard([1, 2, 3]),
    "labels-list": lambda: make_layout("zigzag", seqlen=18, ranks=3).shift_labels([1], 0),
    "labels-that-cannot-be-ignored": lambda: make_layout("zigzag", seqlen=10, ranks=3).shift_labels(
        torch.zeros(1, 10, dtype=torch.uint8), 0
    ),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED.keys())
def test_refused(use):
    with pytest.raises(InvalidInputError):
        use()


UNSUPPORTED = {
    "results-that-want-gradients": lambda: accumulate_attention_outputs([(OUT.clone().requires_grad_(), LSE)]),
    "quantised-shard": lambda: shard_sequence(torch.quantize_per_tensor(ROW, 1.0, 0, torch.qint8), 3),
    "sparse-shard": lambda: shard_sequence(ROW.to_sparse(), 3),
    "nested": lambda: ring_attention_forward(*3 * [torch.nested.nested_tensor([torch.ones(4, 2, 8)])], 2),
    "negative-view": lambda: simulate_attention(torch._neg_view(ROW), ROW, ROW, ranks=2),
    "do-sparse": lambda: simulate_attention(ROW, ROW, ROW, do=ROW.to_sparse(), ranks=2),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantize_per_tensor|quantized).*")
@pytest.mark.parametrize("use", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_memory_that_is_not_read_by_strides(use):
    with pytest.raises(UnsupportedError):
        use()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
def test_any_dtype_travels(dtype):
    """NaN too, and as the number that a view means."""
    whole = torch.tensor([[float("nan"), 1.0, 0.0, 2.0]]).to(dtype)
    cut = make_layout("zigzag", seqlen=4, ranks=2)
    for found in simulate(lambda t: gather_sequence(cut.shard(whole, t.rank), cut, t), 2):
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))
    turned = torch._neg_view(torch.arange(4.0)[None])
    for found in simulate(lambda t: t.all_gather(turned).wait(), 2):
        assert torch.equal(found, -torch.arange(4.0).expand(2, 1, 4))


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "x", None, -1, 0, True, 1e-9, 1e30], ids=str)
def test_a_timeout_is_a_time(timeout):
    """Refused before the process group is looked at, of which there is none here."""
    with pytest.raises(InvalidInputError, match="timeout must be"):
        TorchTransport(timeout=timeout)


CONSTRUCTED = {
    "no-such-option": {"foo": 3},
    "ulysses-that-does-not-divide": {"schedule": "usp", "ulysses": 7},
    "ulysses-of-a-ring": {"ulysses": 7},
    "inner": {"schedule": "double_ring", "inner": 2},
    "mesh": {"schedule": "mesh", "mesh": (2, 2)},
    "simulate-text": {"simulate": "no"},
    "overlap-text": {"overlap": "no"},
    "finite-number": {"check_finite": 1},
    "scale": {"softmax_scale": -1.0},
    "backend": {"backend": "fast"},
    "transport": {"transport": 3},
    "layout-list": {"layout": ["zigzag"]},
    "told-in-each-call": {"causal": True},
}


@pytest.mark.parametrize("options", CONSTRUCTED.values(), ids=CONSTRUCTED.keys())
def test_a_module_is_refused_when_it_is_made(options):
    with pytest.raises(InvalidInputError):
        RingAttention(RANKS, **options)


def test_a_module_may_be_made_before_the_ranks_are_counted():
    RingAttention(schedule="usp", ulysses=7)
    with pytest.raises(InvalidInputError):
        RingAttention(schedule="usp", ulysses=0)


def test_a_copy_keeps_the_transport_and_a_pickle_does_not():
    transport = LocalTransport(World(RANKS), 0)
    module = RingAttention(RANKS, "striped", transport=transport, overlap=False)
    for again in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert (again.layout, again.options) == ("striped", {"overlap": False})
    assert copy.copy(module).transport() is copy.deepcopy(module).transport() is transport
    assert pickle.loads(pickle.dumps(module))._transport is None


def _shards(rank: int):
    """(wrong on rank 1 alone, right) in (batch, heads, rows, head_dim)."""
    right = torch.ones(1, 2, ROWS, 8)
    return (right[0] if rank == 1 else right), right


ALONE = {
    "schedule": lambda t, layout: distributed_attention(
        *(torch.ones(1, ROWS, 2, 8),) * 3, layout=layout, transport=t, schedule="ring" if t.rank == 1 else "kv_ring"
    ),
    "module": lambda t, _: RingAttention(RANKS, transport=t)(_shards(t.rank)[0], *(_shards(t.rank)[1],) * 2),
    "module-seq-len": lambda t, _: RingAttention(RANKS, transport=t)(
        *(_shards(0)[1],) * 3, seq_len=-3 if t.rank == 1 else 18
    ),
    "forward": lambda t, _: ring_attention_forward(_shards(t.rank)[0], *(_shards(t.rank)[1],) * 2, t),
    "backward": lambda t, _: ring_attention_backward(_shards(t.rank)[0], *(_shards(t.rank)[1],) * 3, t),
    "communicate": lambda t, _: ring_communicate_kv(OUT, 7 if t.rank == 1 else 0, 0, transport=t),
    "communicate-none": lambda t, _: ring_communicate_kv(None if t.rank == 1 else OUT, 0, 0, transport=t),
    "send-none": lambda t, _: ring_send_recv(None if t.rank == 1 else OUT, transport=t),
    "send-list": lambda t, _: ring_send_recv([1.0] if t.rank == 1 else OUT, transport=t),
    "accumulate-none": lambda t, _: global_accumulate(OUT, None if t.rank == 1 else LSE, transport=t),
    "accumulate-integers": lambda t, _: global_accumulate(OUT.int() if t.rank == 1 else OUT, LSE, transport=t),
    "accumulate": lambda t, _: global_accumulate(OUT.double() if t.rank == 1 else OUT, LSE, transport=t),
    "packed-keys": lambda t, _: zigzag_ring_flash_attn_kvpacked_func(
        torch.ones(1, ROWS, 2, 8), torch.ones(1, ROWS, 3 if t.rank == 1 else 2, 2, 8), group=t
    ),
    "packed": lambda t, _: zigzag_ring_flash_attn_qkvpacked_func(
        torch.ones(1, ROWS, 4 if t.rank == 1 else 3, 2, 8), group=t
    ),
    "no-queries": lambda t, _: ring_flash_attn_func(
        None if t.rank == 1 else torch.ones(1, ROWS, 2, 8), *(torch.ones(1, ROWS, 2, 8),) * 2, group=t
    ),
    "dropout": lambda t, _: ring_flash_attn_func(
        *(torch.ones(1, ROWS, 2, 8),) * 3, dropout_p=torch.zeros(2) if t.rank == 1 else 0.0, group=t
    ),
    "offsets": lambda t, _: zigzag_ring_flash_attn_varlen_func(
        *(torch.ones(ROWS, 2, 8),) * 3, torch.tensor([0, ROWS], device="meta" if t.rank == 1 else "cpu"), group=t
    ),
    "backward-schedule": lambda t, _: ring_attention_backward(
        *(_shards(0)[1],) * 4, t, schedule="ring" if t.rank == 1 else "kv_ring"
    ),
    "forward-itself": lambda t, layout: forward(
        *(torch.ones(1, ROWS, 2, 8),) * 3, _call(layout), t, schedule="ring" if t.rank == 1 else "kv_ring"
    ),
    "meta": lambda t, _: ring_attention_forward(
        *(torch.ones(1, 2, ROWS, 8, device="meta" if t.rank == 1 else "cpu"),) * 3, t
    ),
    "option": lambda t, layout: distributed_attention(
        *(torch.ones(1, ROWS, 2, 8),) * 3, layout=layout, transport=t, **({"foo": 1} if t.rank == 1 else {})
    ),
    "gather-list": lambda t, layout: gather_sequence([1.0] if t.rank == 1 else torch.ones(1, ROWS), layout, t),
    "gather-layout": lambda t, layout: gather_sequence(torch.ones(1, ROWS), None if t.rank == 1 else layout, t),
    "gather": lambda t, layout: gather_sequence(torch.ones(1, ROWS + t.rank, 2), layout, t),
}


def _call(layout):
    return make_call(*(torch.ones(1, ROWS, 2, 8),) * 3, layout)


SHAPE = (1, 2, ROWS, 8)  # of do and O
RESULTS = {
    "lse-whole-numbers": {"lse": torch.zeros(SHAPE[:3], dtype=torch.int64)},
    "lse-half": {"lse": torch.zeros(SHAPE[:3], dtype=torch.float16)},
    "lse-complex": {"lse": torch.zeros(SHAPE[:3], dtype=torch.complex64)},
    "lse-sparse": {"lse": torch.zeros(SHAPE[:3]).to_sparse()},
    "lse-meta": {"lse": torch.zeros(SHAPE[:3], device="meta")},
    "lse-turned": {"lse": torch.zeros(1, ROWS, 2)},
    "o-meta": {"O": torch.zeros(SHAPE, device="meta")},
    "o-double": {"O": torch.zeros(SHAPE, dtype=torch.float64)},
    "do-meta": {"dO": torch.zeros(SHAPE, device="meta")},
    "do-double": {"dO": torch.zeros(SHAPE, dtype=torch.float64)},
    "both-double": {"dO": torch.zeros(SHAPE, dtype=torch.float64), "O": torch.zeros(SHAPE, dtype=torch.float64)},
    "both-wide": {"dO": torch.zeros(*SHAPE[:3], 16), "O": torch.zeros(*SHAPE[:3], 16)},
}


@pytest.mark.parametrize("wrong", RESULTS.values(), ids=RESULTS.keys())
@pytest.mark.parametrize("ranks", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_what_a_backward_is_given_fits_its_inputs(wrong: dict, ranks: tuple):
    right = {"dO": torch.ones(SHAPE), "O": torch.ones(SHAPE), "lse": torch.zeros(SHAPE[:3])}

    def rank(transport):
        given = right | (wrong if transport.rank in ranks else {})
        try:
            ring_attention_backward(given.pop("dO"), *(_shards(0)[1],) * 3, transport, **given)
        except (InvalidInputError, CommunicationError) as error:
            return type(error)
        return None

    assert simulate(rank, RANKS) == [InvalidInputError] * RANKS


def test_a_module_of_the_wrong_size_on_one_rank_is_an_error_on_all():
    def rank(transport):
        try:
            RingAttention(RANKS + (transport.rank == 1), transport=transport)(*(_shards(0)[1],) * 3)
        except (InvalidInputError, HardwareError) as error:
            return type(error)
        return None

    assert simulate(rank, RANKS) == [InvalidInputError, HardwareError, InvalidInputError]


@pytest.mark.parametrize("simulated", [True, False], ids=["simulated", "ranks"])
@pytest.mark.parametrize("power", [1, 2], ids=["constant", "other"])
def test_second_gradients_are_refused_not_left_out(simulated: bool, power: int):
    """Also where the gradient that comes in is a constant: what was made of q would be missing in any sum with it."""

    def take(attention, x):
        q = torch.randn(x.shape, requires_grad=True)
        (dq,) = torch.autograd.grad(attention(q, x, x).pow(power).sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match="first gradients only"):
            torch.autograd.grad(dq.sum() + q.square().sum(), q)

    if simulated:
        take(RingAttention(RANKS, simulate=True), X)
    else:
        simulate(lambda t: take(RingAttention(RANKS, transport=t), _shards(0)[1]), RANKS)


def test_tensors_that_only_stand_for_others():
    with FakeTensorMode(), pytest.raises(InvalidInputError, match="hold nothing"):
        simulate_attention(*(torch.ones(1, 4, 2, 8),) * 3, ranks=2)
    with pytest.raises(UnsupportedError, match="transform"):
        torch.func.vmap(lambda x: simulate_attention(x, x, x, ranks=2)[0])(torch.ones(2, 1, 4, 2, 8))
    with pytest.raises(UnsupportedError, match="transform"):
        torch.func.vmap(lambda x: local_attention(x, x, x)[0])(torch.ones(2, 1, 4, 2, 8))


def test_a_world_can_be_used_again_also_after_an_error_but_not_within_itself():
    world = World(2)
    rows = torch.randn(1, 8, 2, 8)

    def fail(transport):
        if transport.rank == 1:
            raise ValueError
        transport.all_gather(rows).wait()

    first = simulate_attention(rows, rows, rows, ranks=2, world=world)
    sent = list(world.bytes_sent)
    with pytest.raises(ValueError):
        simulate(fail, 2, world=world)
    before = list(world.bytes_sent)
    again = simulate_attention(rows, rows, rows, ranks=2, world=world)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [b - a for a, b in zip(before, world.bytes_sent, strict=True)] == sent
    with pytest.raises(InvalidInputError, match="running"):
        simulate(lambda _: simulate_attention(rows, rows, rows, ranks=2, world=world), 2, world=world)


def test_ranks_run_in_the_modes_of_the_caller():
    told = contextvars.ContextVar("told", default=0)

    def modes(_):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), told.get()

    assert simulate(modes, 2) == [(True, False, False, 0)] * 2
    token = told.set(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert simulate(modes, 2) == [(False, False, True, 3)] * 2
    told.reset(token)
    with torch.inference_mode():
        assert simulate(modes, 2) == [(False, True, False, 0)] * 2


@pytest.mark.parametrize("use", ALONE.values(), ids=ALONE.keys())
def test_a_rank_that_is_wrong_alone_tells_the_others(use):
    """All of them raise InvalidInputError; none is left waiting, which would be CommunicationError."""
    layout = make_layout("zigzag", seqlen=RANKS * ROWS, ranks=RANKS)

    def rank(transport):
        try:
            use(transport, layout)
        except (InvalidInputError, CommunicationError) as error:
            return type(error)
        return None

    assert simulate(rank, RANKS) == [InvalidInputError] * RANKS
