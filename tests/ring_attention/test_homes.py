"""Blocks that come straight from their owners, and keys that lie where others can read them; simulated ranks."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention, make_layout
from gpu_accel.ring_attention.attention import distributed_attention, make_call
from gpu_accel.ring_attention.homes import Homes, home_number
from gpu_accel.ring_attention.schedules import kv_ring
from gpu_accel.ring_attention.simulate import simulate
from gpu_accel.ring_attention.symmetric import SymmetricTransport
from gpu_accel.ring_attention.transport import LocalTransport, Pending, World
from gpu_accel.testing import relative_error

HEADS = (4, 2, 2, 4)


class Pulling(LocalTransport):
    """Ranks of one process that read one another's buffers, as SymmetricTransport does. Counts what it hands out."""

    pulls = True

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.homes, self.asked = Homes(), 0

    def buffers(self, count, shape, like, dtype=None):
        self.asked += count
        return super().buffers(count, shape, like, dtype)

    def home(self, k_shape, v_shape, *, dtype, device="cpu"):
        flat = torch.full((self.homes.size(k_shape, v_shape),), float("nan"), dtype=dtype, device=device)
        return self.homes.add(flat, k_shape, v_shape)

    def share(self, buffer, *, readers, sources):
        for rank in readers:
            self.world.post(self.rank, rank, "shared", buffer)
        return _Round(self, tuple(readers), set(sources))

    def taken(self, source: int, kind: str):
        return self.world.take(self.rank, source, kind, self.world.number(source, self.rank, kind, "asked"))


class Pushing(Pulling):
    """Ranks of one process that write to one another's buffers."""

    pushes = True

    def mail(self):
        return _Mail(self)


class _Mail:
    """Sends wait until they are expected, buffers hold NaN until the block is there, what is sent must not change."""

    def __init__(self, transport: Pushing) -> None:
        self.transport, self.sent = transport, []

    def expect(self, source, into):
        self.transport.world.post(self.transport.rank, source, "free", into.numel())
        into.view(torch.uint8).fill_(0xFF)  # NaN in every format

        def copy() -> None:
            for x, at in self.transport.taken(source, "sent"):
                into[at : at + x.numel()] = x.view(-1)

        return Pending(copy)

    def send(self, to, parts, into):
        assert self.transport.taken(to, "free") == into.numel()
        assert all(x.is_contiguous() and x.dtype == into.dtype for x, _ in parts)
        copies = [(x.clone(), at) for x, at in parts]
        self.sent += zip(parts, copies, strict=True)
        self.transport.world.post(self.transport.rank, to, "sent", copies)

    def close(self):
        assert all(torch.equal(x, copy) for (x, _), (copy, _) in self.sent)


class _Round:
    def __init__(self, transport: Pulling, readers: tuple[int, ...], left: set[int]) -> None:
        self.transport, self.readers, self.left = transport, readers, left

    def pull(self, source, into, spans):
        self.left.remove(source)

        def copy() -> None:
            theirs = self.transport.taken(source, "shared")
            into.view(torch.uint8).fill_(0xFF)  # NaN in every format
            for a, b in spans:
                into[a:b] = theirs[a:b]
            self.transport.world.post(self.transport.rank, source, "read", None)

        return Pending(copy)

    def close(self):
        assert not self.left
        for rank in self.readers:
            self.transport.taken(rank, "read")


def inputs(length: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, h, 8, generator=source, dtype=torch.float64) for h in HEADS]


def run(ranks: int, length: int, layout: str, way: str, options: dict):
    """Both passes on every rank; the buffers that each asked for; twice, so that a home is used again."""
    cut = make_layout(layout, seqlen=length, ranks=ranks)
    whole = inputs(length)
    at_home = way == "at home"

    def rank(local: LocalTransport):
        transport = (Pulling if way == "copied" else Pushing)(local.world, local.rank)
        q, k, v, do = (cut.shard(x, local.rank) for x in whole)
        if way == "pushed, strided" and local.rank == 0:  # each rank for itself
            k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        if at_home:
            shards = k, v
            k, v = transport.home(k.shape, v.shape, dtype=k.dtype)
        for _ in range(2):
            if at_home:
                for place, x in zip((k, v), shards, strict=True):
                    place.copy_(x)
            transport.asked = 0
            call = make_call(q, k, v, cut, **options)
            transport.agree(call.statement("kv_ring", q, k, v))
            o, lse = kv_ring.forward(q, k, v, call, transport)
            asked = transport.asked
            grads = kv_ring.backward(do, q, k, v, o, lse, call, transport)
        return (o, *grads), asked

    return cut, simulate(rank, ranks)


@pytest.mark.parametrize("way", ["pushed", "pushed, strided", "copied", "at home"])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "window_size": (9, 0)}], ids=str)
@pytest.mark.parametrize(("ranks", "layout"), [(2, "zigzag"), (5, "zigzag"), (3, "striped")])
def test_blocks_from_their_owners_give_what_one_device_gives(ranks: int, layout: str, options: dict, way: str):
    cut, found = run(ranks, 37, layout, way, options)
    q, k, v, do = inputs(37)
    exact = (attention_truth(q, k, v, **options)[0], *attention_truth_backward(do, q, k, v, **options))
    for i, truth in enumerate(exact):
        assert relative_error(cut.unshard([tensors[i] for tensors, _ in found]), truth) < 1e-12


def test_hops_are_waited_for_one_by_one_where_nothing_is_to_overlap():
    cut, found = run(4, 24, "zigzag", "pushed", {"causal": True, "overlap": False})
    exact, _ = attention_truth(*inputs(24)[:3], causal=True)
    assert relative_error(cut.unshard([tensors[0] for tensors, _ in found]), exact) < 1e-12


def test_keys_in_eight_bits_are_pushed_as_the_bytes_that_they_travel_as():
    options = {"causal": True, "wire": torch.float8_e4m3fn}
    ways = [run(3, 24, "zigzag", way, options)[1] for way in ("pushed", "copied")]
    for pushed, pulled in zip(*ways, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pushed[0], pulled[0], strict=True))


def test_only_blocks_that_others_read_are_copied_first():
    """One buffer less where they are pushed, or where the other ranks read the tensors themselves."""
    asked = [
        [n for _, n in run(3, 24, "zigzag", way, {"causal": True})[1]] for way in ("copied", "pushed", "at home")
    ]
    assert asked == [[3] * 3, [2] * 3, [2] * 3]


def test_a_home_is_found_by_exactly_what_fills_it():
    homes = Homes()
    k, v = homes.add(torch.zeros(48), (1, 3, 2, 4), (1, 3, 2, 4))
    other, values = homes.add(torch.zeros(48), (1, 3, 2, 4), (1, 3, 2, 4))
    assert homes.find(k, v)[0] == 0 and homes.find(other, values)[0] == 1
    swapped = k.transpose(1, 2).transpose(1, 2)  # as RingAttention gets it
    assert homes.find(swapped, v)[0] == 0
    assert homes.find(v, k) is homes.find(k, values) is homes.find(k.clone(), v) is homes.find(k[:, :2], v) is None
    assert homes.find(k.transpose(1, 2), v) is None


def test_ranks_that_differ_in_it_say_so():
    """Else one of them would read what another has not written."""
    cut = make_layout("zigzag", seqlen=16, ranks=2)

    def rank(local: LocalTransport) -> str:
        transport = Pulling(local.world, local.rank)
        q, k, v = (torch.ones(1, 8, 2, 8) for _ in range(3))
        home = transport.home(k.shape, v.shape, dtype=k.dtype)
        if local.rank == 0:
            k, v = (place.copy_(x) for place, x in zip(home, (k, v), strict=True))
        assert home_number(transport, (q, k, v)) == (0 if local.rank == 0 else None)
        try:
            distributed_attention(q, k, v, layout=cut, transport=transport)
        except Exception as error:
            return str(error)
        return ""

    assert all("the ranks do not agree" in text and "keys at home 0" in text for text in simulate(rank, 2))


def test_what_is_overwritten_before_its_backward_is_found_out():
    transport = Pulling(World(1), 0)
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    k, v = transport.home((1, 4, 2, 8), (1, 4, 2, 8), dtype=torch.float32)
    k.fill_(1.0), v.fill_(1.0)
    with transport.world.changed:
        o = RingAttention(1, transport=transport)(q, k.transpose(1, 2), v.transpose(1, 2))
        k.fill_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_the_module_has_homes_in_its_own_order():
    transport = Pulling(World(1), 0)
    module = RingAttention(1, transport=transport)
    k, v = module.home((1, 2, 4, 8), dtype=torch.float32, device="cpu")
    assert k.shape == v.shape == (1, 2, 4, 8)
    assert home_number(transport, (k.transpose(1, 2), v.transpose(1, 2))) == 0
    for wrong in ((1, 2, 4), (1, 2, 4, 0), (1, 2, 4, 8.0), None, 5, "abcd", {1, 2, 4, 8}):
        with pytest.raises(InvalidInputError, match="shape must be four sizes"):
            module.home(wrong, dtype=torch.float32)


def test_other_transports_give_tensors_like_any_others():
    k, v = LocalTransport(World(2), 0).home((1, 4, 2, 8), (1, 4, 2, 16), dtype=torch.bfloat16, device="cpu")
    assert (k.shape, v.shape, k.dtype) == ((1, 4, 2, 8), (1, 4, 2, 16), torch.bfloat16)


SHAPE = (1, 4, 2, 8)
WRONG = {
    "no-shape": dict(k_shape=None),
    "shape-number": dict(v_shape=5),
    "negative-size": dict(k_shape=(1, 4, -2, 8)),
    "three-sizes": dict(v_shape=(1, 4, 2)),
    "text-for-dtype": dict(dtype="bf16"),
    "no-dtype": dict(dtype=None),
    "integers": dict(dtype=torch.int32),
    "no-such-device": dict(device="foo"),
    "device-of-another-kind": dict(device=1.5),
}


@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_a_home_that_makes_no_sense_is_refused(changed):
    given = dict(k_shape=SHAPE, v_shape=SHAPE, dtype=torch.float32, device="cpu") | changed
    with pytest.raises(InvalidInputError):
        LocalTransport(World(1), 0).home(given.pop("k_shape"), given.pop("v_shape"), **given)


def test_a_gpu_that_is_not_there_is_said_so():
    module = RingAttention(1, transport=LocalTransport(World(1), 0))
    with pytest.raises(HardwareError, match="pass device='cpu'"):
        module.home((1, 2, 4, 8), dtype=torch.float32, device="cuda:99")


def test_memory_that_ranks_share_is_on_one_device():
    """Before anything is allocated: no GPU is needed to say so."""
    transport = object.__new__(SymmetricTransport)
    transport._device = torch.device("cuda", 1)
    for elsewhere in ("cpu", "cuda:0", torch.device("cuda", 2)):
        with pytest.raises(InvalidInputError, match="is that of cuda:1"):
            transport.home(SHAPE, SHAPE, dtype=torch.bfloat16, device=elsewhere)
