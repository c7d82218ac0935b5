"""Ring attention on GPUs: simulated ranks with the GPU kernels on one, and real ranks over NCCL and symmetric memory.

The tests with several ranks start their own processes and are skipped with fewer GPUs, or share one (`one_gpu.py`).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.multiprocessing

from gpu_accel.flash_attention3 import flash_attn_func
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention, capture_step, hopper_backward, lanes, make_layout, wire_kernels
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence, make_call
from gpu_accel.ring_attention.masks import Piece, pieces
from gpu_accel.ring_attention.replay import Replay
from gpu_accel.ring_attention.simulate import simulate_attention
from gpu_accel.ring_attention.step import Running, delta_of
from gpu_accel.ring_attention.wire import decode, encode
from gpu_accel.testing import (
    assert_close_to_truth,
    make_qkv,
    random_like,
    relative_error,
    yardstick_attention,
    yardstick_attention_backward,
)

from .one_gpu import card, make_transport, shared, start, why_not

NAMES = ("o", "dq", "dk", "dv")
SHAPE = {"batch": 1, "seqlen_q": 1000, "heads": 8, "heads_kv": 4, "head_dim": 128}


def inputs(device: str = "cuda") -> list[torch.Tensor]:
    qkv = make_qkv(**SHAPE, dtype=torch.bfloat16, device=device, seed=0)
    return [*qkv, random_like(qkv.q, seed=1)]


@pytest.mark.parametrize("schedule", ["kv_ring", "q_ring", "allgather", "ulysses", "usp", "mesh", "double_ring"])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_simulated_ranks_with_the_kernels_of_this_gpu(schedule: str, layout: str):
    q, k, v, do = inputs()
    found = simulate_attention(q, k, v, do=do, ranks=4, schedule=schedule, layout=layout, causal=True)
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    rulers = (
        yardstick_attention(q, k, v, causal=True)[0],
        *yardstick_attention_backward(do, q, k, v, causal=True),
    )
    for name, x, truth, ruler in zip(NAMES, (found[0], *found[2:]), exact, rulers, strict=True):
        assert_close_to_truth(name, x, truth, ruler, floor=8e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sums_of_gradients_on_whole_blocks(ranks: int, heads_kv: int, head_dim: int):
    """Shards that lie on whole blocks: the backward is the kernel that adds to what has arrived."""
    shape = {"batch": 2, "seqlen_q": 256 * ranks, "heads": 8, "heads_kv": heads_kv, "head_dim": head_dim}
    qkv = make_qkv(**shape, dtype=torch.bfloat16, device="cuda", seed=2)
    q, k, v, do = *qkv, random_like(qkv.q, seed=3)
    found = simulate_attention(q, k, v, do=do, ranks=ranks, causal=True)
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    rulers = (
        yardstick_attention(q, k, v, causal=True)[0],
        *yardstick_attention_backward(do, q, k, v, causal=True),
    )
    for name, x, truth, ruler in zip(NAMES, (found[0], *found[2:]), exact, rulers, strict=True):
        assert_close_to_truth(name, x, truth, ruler, floor=8e-3)
    again = simulate_attention(q, k, v, do=do, ranks=ranks, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(found[:2] + found[3:], again[:2] + again[3:], strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("ranks", "heads", "heads_kv", "head_dim", "softcap"),
    [(1, 16, 16, 128, 0.0), (2, 16, 4, 128, 15.0), (4, 12, 12, 128, 0.0), (2, 16, 16, 64, 0.0), (3, 6, 2, 64, 0.0)],
)
def test_turns_give_the_same_bits(ranks: int, heads: int, heads_kv: int, head_dim: int, softcap: float, causal: bool):
    """More tiles than multiprocessors, ranks that do not divide evenly, groups of heads: dq has the same bits too."""
    shape = {"batch": 1, "seqlen_q": 1024 * ranks, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim}
    qkv = make_qkv(**shape, dtype=torch.bfloat16, device="cuda", seed=2)
    q, k, v, do = *qkv, random_like(qkv.q, seed=3)
    options = {"ranks": ranks, "causal": causal, "do": do, "softcap": softcap}
    plain = simulate_attention(q, k, v, **options)
    first, *others = (simulate_attention(q, k, v, deterministic=True, **options) for _ in range(3))
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for name, a, b in zip(("dk", "dv"), first[3:], plain[3:], strict=True):
        assert torch.equal(a, b), name  # the same kernel, so the same sums
    assert relative_error(first[2], plain[2]) < 1e-2  # dq: rounded sums in another order


def test_the_same_bits_by_request():
    q, k, v, do = inputs()
    options = {"ranks": 4, "causal": True, "deterministic": True, "do": do}
    first, second = (simulate_attention(q, k, v, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seqlen", [1024, 1000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_merge_in_the_epilogue(head_dim: int, seqlen: int):
    """Each rank's steps in turn, against float64; o and lse of rows that have seen nothing may hold anything."""
    q, k, v = make_qkv(
        **{**SHAPE, "seqlen_q": seqlen, "head_dim": head_dim}, dtype=torch.bfloat16, device="cuda", seed=5
    )
    layout = make_layout("zigzag", seqlen=seqlen, ranks=4)
    call = make_call(*(layout.shard(x, 0) for x in (q, k, v)), layout, causal=True, backend="hopper")
    exact, exact_lse = attention_truth(q, k, v, causal=True)
    ruler, _ = yardstick_attention(q, k, v, causal=True)
    shards, sums = [], []
    for rank in range(4):
        order = [(rank - i) % 4 for i in range(4)]
        steps = [pieces(layout.runs(rank), layout.runs(source), call.mask) for source in order]
        running = Running(layout.shard(q, rank), head_dim, steps, call)
        running.partial.o.fill_(float("nan"))
        for step, source in enumerate(order):
            running.attend(step, layout.shard(k, source), layout.shard(v, source))
        o, lse = running.finish()
        shards.append(o)
        sums.append(lse)
    assert_close_to_truth("o", layout.unshard(shards), exact, ruler, floor=8e-3)
    assert relative_error(layout.unshard(sums, dim=2), exact_lse) < 1e-6


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_in_eight_bits_on_the_wire(kind: torch.dtype):
    """All keys arrive through the wire, so results are those of the keys that it makes of them."""
    q, k, v, do = inputs()
    found = simulate_attention(q, k, v, do=do, ranks=4, schedule="allgather", causal=True, wire=kind)
    k, v = (decode(encode(x.cpu(), kind), kind, x.dtype).cuda() for x in (k, v))  # by torch's operations
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    rulers = (
        yardstick_attention(q, k, v, causal=True)[0],
        *yardstick_attention_backward(do, q, k, v, causal=True),
    )
    for name, x, truth, ruler in zip(NAMES, (found[0], *found[2:]), exact, rulers, strict=True):
        assert_close_to_truth(name, x, truth, ruler, floor=8e-3)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_wire_has_the_bytes_of_the_cpu(dtype: torch.dtype, kind: torch.dtype):
    """Encoding and decoding by kernels, of rows of heads of every size and any strides."""
    for dim, heads in ((22, 3), (24, 3), (128, 32)):  # bytes, words, whole programs
        x = torch.randn(2, 301, heads + 2, dim, generator=torch.Generator().manual_seed(1))[:, :300, :heads]
        sizes = torch.logspace(-30, 30, 300 * heads) if dtype != torch.float16 else torch.logspace(-4, 3, 300 * heads)
        x = x * sizes.view(300, heads, 1)
        x = x.to(dtype)
        x[0, 0, 0], x[1, 7, 1], x[0, 5, 2, 3], x[1, 9, 0, 0] = 0, 448 * 2.0**-4, float("nan"), float("inf")
        finite, there = x.isfinite().all(-1), x.cuda()
        assert wire_kernels.refuse(there, there, kind) is None
        coded, expected = encode(there, kind), encode(x, kind)
        assert torch.equal(coded.cpu()[finite], expected[finite])
        y = decode(coded, kind, dtype).cpu()
        assert torch.equal(y[finite], decode(expected, kind, dtype)[finite]) and y[~finite].isnan().all()


@pytest.mark.parametrize("heads_kv", [32, 8])
def test_one_rank_in_lanes(heads_kv: int, monkeypatch):
    """Of four ranks, with its own keys: the halves of the heads on two streams, and all of them on one."""
    make = torch.Generator("cuda").manual_seed(4)
    shapes = [(1, 8192, heads, 128) for heads in (32, heads_kv, heads_kv, 32)]
    q, k, v, do = (torch.randn(s, device="cuda", generator=make).bfloat16() for s in shapes)
    replay = Replay(q, k, v, layout=make_layout("zigzag", seqlen=4 * 8192, ranks=4), rank=2, causal=True)
    found = []
    for wanted in (False, True, True):
        monkeypatch.setattr(lanes, "WANTED", wanted)
        with lanes.of_any_length():
            assert lanes.useful(q, k, 4) == wanted
            o, lse = replay.forward()
            found.append((o, lse, replay.backward(do, o, lse)))
    with lanes.in_a_graph():
        assert lanes.useful(q, k, 1)  # in a graph a step by itself is long enough

    def both() -> tuple[torch.Tensor, ...]:
        o, lse = replay.forward()
        return o, lse, replay.backward(do, o, lse)

    step = capture_step(both)
    found += [tuple(x.clone() for x in step()) for _ in range(2)]
    for o, lse, dq in found[1:]:
        assert torch.equal(o, found[0][0]) and torch.equal(lse, found[0][1])
        assert relative_error(dq, found[0][2]) < 1e-2


@pytest.mark.parametrize("heads_kv", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.bfloat16, 512), (torch.float16, 512), (torch.bfloat16, 300), (torch.float16, 300)],
    ids=["bf16", "fp16", "bf16-tails", "fp16-tails"],
)
def test_dq_apart_gives_what_one_kernel_gives(dtype, length: int, head_dim: int, heads_kv: int, monkeypatch):
    """In float16 and where a tile of keys is cut off too; dk and dv have the same bits."""
    shape = {"batch": 1, "seqlen_q": 2 * length, "heads": 8, "heads_kv": heads_kv, "head_dim": head_dim}
    qkv = make_qkv(**shape, dtype=dtype, device="cuda", seed=2)
    q, k, v, do = *qkv, random_like(qkv.q, seed=3)
    launched, kernel = [], hopper_backward._kernel
    monkeypatch.setattr(hopper_backward, "_kernel", lambda apart=False: (launched.append(apart), kernel(apart))[1])
    found = []
    for apart in (False, True, True):
        monkeypatch.setattr(hopper_backward, "_APART", apart)
        launched.clear(), hopper_backward._known.clear()
        found.append(simulate_attention(q, k, v, do=do, ranks=2, layout="contiguous", causal=True)[2:])
        assert set(launched) == {apart}
    exact = attention_truth_backward(do, q, k, v, causal=True)
    rulers = yardstick_attention_backward(do, q, k, v, causal=True)
    for name, x, truth, ruler in zip(NAMES[1:], found[1], exact, rulers, strict=True):
        assert_close_to_truth(name, x, truth, ruler, floor=8e-3 if dtype == torch.bfloat16 else 1e-3)
    for again in (found[0], found[2]):
        assert all(torch.equal(a, b) for a, b in zip(found[1][1:], again[1:], strict=True))


def test_sums_of_half_of_the_heads():
    make = torch.Generator("cuda").manual_seed(5)
    q, do = (torch.randn(1, 1024, 8, 128, device="cuda", generator=make).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, 1024, 4, 128, device="cuda", generator=make).bfloat16() for _ in range(2))
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    found = []
    for halves in ((None,), (0, 1), (1, 0)):
        work = hopper_backward.Gradients(do, q, lse, delta_of(do, o), softmax_scale=128**-0.5, softcap=0.0)
        into = torch.zeros(hopper_backward.sum_size(k), device="cuda")
        for half in halves:
            work.add(Piece(0, 1024, 0, 1024), k, v, into, half)
        found.append((work.dq_sum, into))
    for dq, sums in found[1:]:
        assert torch.equal(sums, found[0][1]) and relative_error(dq, found[0][0]) < 1e-5


def test_more_steps_allocate_no_more():
    """Of a rank of four and of one of eight: what a step needs is there before the first."""
    make = torch.Generator("cuda").manual_seed(6)
    q, k, v, do = (torch.randn(1, 1024, 8, 128, device="cuda", generator=make).bfloat16() for _ in range(4))
    counts = []
    for ranks in (4, 8):
        replay = Replay(q, k, v, layout=make_layout("zigzag", seqlen=1024 * ranks, ranks=ranks), rank=1, causal=True)
        for _ in range(2):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            o, lse = replay.forward()
            replay.backward(do, o, lse)
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
    assert counts[0] == counts[1] > 0


def test_a_captured_step_keeps_what_it_reads():
    """Also where nobody else does: its memory had gone back, and a replay read what came after it."""

    def make():
        x = torch.full((1 << 24,), 2.0, device="cuda")
        return capture_step(lambda: x * 3)

    step = make()
    torch.cuda.empty_cache()
    others = [torch.zeros(1 << 24, device="cuda") for _ in range(4)]
    assert bool((step() == 6).all()) and not any(x.any() for x in others)


def test_a_ring_of_one_with_documents_of_64k_tokens():
    """ring-flash-attention #53: one process, and more tokens than it had been tried with."""
    make = torch.Generator("cuda").manual_seed(7)
    q, k, v = (torch.randn(1, 65536, 1, 128, device="cuda", generator=make).bfloat16() for _ in range(3))
    o, _ = simulate_attention(q, k, v, ranks=1, layout="documents", documents=(5536, 60000), causal=True)[:2]
    for part in (slice(0, 5536), slice(5536, 65536)):
        alone = flash_attn_func(q[:, part], k[:, part], v[:, part], causal=True)
        assert relative_error(o[:, part], alone) < 2e-3


def test_the_module_on_one_gpu():
    q, k, v, _ = (x.transpose(1, 2) for x in inputs())
    o = RingAttention(num_gpus=8, simulate=True)(q, k, v, causal=True)
    exact, _ = attention_truth(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    assert relative_error(o.transpose(1, 2), exact) < 5e-3


# -- one GPU that processes share by time slices


def _sums_of_gradients():
    """A call that adds up dq, dk and dv of 8192 unmasked rows and 32 heads, a few milliseconds of one kernel."""
    rows, heads, dim = 8192, 32, 128
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (torch.randn(1, rows, heads, dim, device="cuda", generator=make).bfloat16() for _ in range(4))
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    delta = delta_of(do, o)
    into = torch.empty(hopper_backward.sum_size(k), device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        work = hopper_backward.Gradients(do, q, lse, delta, softmax_scale=dim**-0.5, softcap=0.0)
        work.add(Piece(0, rows, 0, rows), k, v, into.zero_())
        return work.dq_sum, *into.view(2, -1)

    return run


def _share_a_gpu(number: int, barrier, seconds: float) -> None:
    run = _sums_of_gradients()
    first = [x.clone() for x in run()]
    allowed = [1e-2 * float(x.abs().mean()) for x in first]  # sums in another order differ by much less
    torch.cuda.synchronize()
    barrier.wait(120)
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end or rounds < 5:
        for name, x, before, most in zip(("dq", "dk", "dv"), run(), first, allowed, strict=True):
            wrong = int((~((x - before).abs() <= most)).sum())  # also where it is NaN
            assert not wrong, f"process {number}, round {rounds}: {wrong} numbers of {name}"
        rounds += 1


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
def test_sums_are_right_where_processes_share_the_gpu():
    """A time slice puts shared memory away and back. What had been an mbarrier and held dq next came back with words of
    a barrier in it: five processes saw that in about every launch."""
    _sums_of_gradients()()  # compiles, once
    torch.cuda.empty_cache()
    barrier = torch.multiprocessing.get_context("spawn").Barrier(4)
    torch.multiprocessing.spawn(_share_a_gpu, (barrier, 5.0), nprocs=4)


# -- several GPUs


def _meeting_point():
    """Where ranks find one another. The system picks a port and it is taken from then on: no two tests are given it."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _rank(rank: int, ranks: int, port: int, function, arguments: tuple) -> None:
    import torch.distributed as dist

    start(rank, ranks, port)
    function(rank, ranks, *arguments)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def run_ranks(function, ranks: int, *arguments) -> None:
    if reason := why_not(ranks):
        pytest.skip(reason)
    store = _meeting_point()
    running = torch.multiprocessing.spawn(_rank, (ranks, store.port, function, arguments), nprocs=ranks, join=False)
    end = time.monotonic() + 150
    while not running.join(timeout=1):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            pytest.fail(f"{function.__name__}: ranks that wait for one another, or take more than 150 s")


_LAYOUTS = {"": ("zigzag", "striped"), "helper": ("contiguous",)}


def _equals_one_device(rank: int, ranks: int, kind: str) -> None:
    transport = make_transport(kind, ranks)
    whole = inputs(card(rank))
    exact = (
        attention_truth(*whole[:3], causal=True)[0],
        *attention_truth_backward(whole[3], *whole[:3], causal=True),
    )
    several = ("double_ring", "concentric") if ranks >= 4 else ()
    for schedule in ("kv_ring", "q_ring", "allgather", "ulysses", "usp", "mesh", *several, "helper"):
        for layout in (make_layout(name, seqlen=1000, ranks=ranks) for name in _LAYOUTS.get(schedule, _LAYOUTS[""])):
            for repeat in range(3):  # buffers and flags are used again
                *qkv, do = (layout.shard(x, rank) for x in whole)
                leaves = [x.requires_grad_() for x in qkv]
                o, _ = distributed_attention(
                    *leaves, layout=layout, transport=transport, schedule=schedule, causal=True
                )
                grads = torch.autograd.grad(o, leaves, do)
                for name, x, truth in zip(NAMES, (o, *grads), exact, strict=True):
                    error = relative_error(gather_sequence(x, layout, transport), truth)
                    assert error < 1e-2, (schedule, layout, repeat, name, error)
    layout = make_layout("zigzag", seqlen=1000, ranks=ranks)
    keys, values = (layout.shard(x, rank) for x in whole[1:3])
    options = {"layout": layout, "transport": transport, "schedule": "tree", "causal": True}
    for queries in (1, 5):  # decoded: every rank has them
        o, _ = distributed_attention(whole[0][:, -queries:].contiguous(), keys, values, **options)
        assert relative_error(o, exact[0][:, -queries:]) < 1e-2, queries


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["nccl", "symmetric"])
def test_ranks_equal_one_device(kind: str, ranks: int):
    run_ranks(_equals_one_device, ranks, kind)


def _sums_go_round(rank: int, ranks: int) -> None:
    """Shards on whole blocks, where dK and dV are sums that travel: against float64, as one device is judged."""
    transport, layout = make_transport("symmetric", ranks), make_layout("zigzag", seqlen=1024 * ranks, ranks=ranks)
    qkv = make_qkv(**{**SHAPE, "seqlen_q": 1024 * ranks}, dtype=torch.bfloat16, device=card(rank), seed=2)
    q, k, v, do = whole = [*qkv, random_like(qkv.q, seed=3)]
    exact = (attention_truth(q, k, v, causal=True)[0], *attention_truth_backward(do, q, k, v, causal=True))
    rulers = (
        yardstick_attention(q, k, v, causal=True)[0],
        *yardstick_attention_backward(do, q, k, v, causal=True),
    )
    *shards, mine = (layout.shard(x, rank) for x in whole)
    leaves = [x.requires_grad_() for x in shards]
    for schedule in ("kv_ring", "concentric") if ranks >= 4 else ("kv_ring",):
        for _ in range(3):  # buffers and flags are used again
            o, _ = distributed_attention(*leaves, layout=layout, transport=transport, schedule=schedule, causal=True)
            found = (o.detach(), *torch.autograd.grad(o, leaves, mine))
            for name, x, truth, ruler in zip(NAMES, found, exact, rulers, strict=True):
                assert_close_to_truth(
                    f"{schedule} {name}", x, layout.shard(truth, rank), layout.shard(ruler, rank), floor=8e-3
                )


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_that_go_round_on_whole_blocks(ranks: int):
    run_ranks(_sums_go_round, ranks)


def _hop_content(rank: int, ranks: int) -> None:
    """Many exchanges in a row, each with other content, beside a stream that is busy."""
    transport = make_transport("symmetric", ranks)
    transport.agree("start")
    here, there = transport.buffers(2, (1 << 22,), torch.empty(0, device=card(rank), dtype=torch.bfloat16))
    here.fill_(float(rank))
    busy = torch.randn(2048, 2048, device=card(rank))
    for step in range(1, 3 * ranks):
        pending = transport.exchange(here, there, to=(rank + 1) % ranks, source=(rank - 1) % ranks)
        for _ in range(4):
            busy = busy @ busy * 1e-3
        pending.wait()
        here, there = there, here
        assert bool((here == float((rank - step) % ranks)).all()), step


@pytest.mark.parametrize("ranks", [2, 4])
def test_symmetric_hops_bring_the_right_content(ranks: int):
    run_ranks(_hop_content, ranks)


def _push_content(rank: int, ranks: int) -> None:
    """Many rounds of blocks that others write here, each with other content, beside a stream that is busy."""
    transport = make_transport("symmetric", ranks)
    transport.agree("start")
    two = transport.buffers(2, (1 << 20,), torch.empty(0, device=card(rank), dtype=torch.bfloat16))
    mine = torch.empty(1 << 20, device=card(rank), dtype=torch.bfloat16)
    busy = torch.randn(2048, 2048, device=card(rank))
    for turn in range(5):
        mine.fill_(float(rank + ranks * turn))
        mail = transport.mail()
        for step in range(1, ranks):
            into, source = two[step % 2], (rank - step) % ranks
            into.fill_(-1.0)
            pending = mail.expect(source, into)
            mail.send((rank + step) % ranks, [(mine[:100], 0), (mine[1 << 19 :], 1 << 19)], into)
            for _ in range(4):
                busy = busy @ busy * 1e-3
            pending.wait()
            wanted = float(source + ranks * turn)
            assert bool((into[:100] == wanted).all()), (turn, source)
            assert bool((into[100 : 1 << 19] == -1.0).all()), (turn, source)
            assert bool((into[1 << 19 :] == wanted).all()), (turn, source)
        mail.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_pushes_bring_the_right_content(ranks: int):
    run_ranks(_push_content, ranks)


def _survive(rank: int, ranks: int, port: int, queue, replayed: bool) -> None:
    """Rank 1 is killed between two calls; the others make the second, and tell how that ends."""
    import signal
    import time
    import warnings

    import torch.distributed as dist

    from gpu_accel.ring_attention import CommunicationError

    start(rank, ranks, port)
    transport = make_transport("symmetric", ranks, timeout=2.0)
    layout = make_layout("zigzag", seqlen=1000, ranks=ranks)
    q, k, v = (layout.shard(x, rank) for x in inputs(card(rank))[:3])

    def call() -> torch.Tensor:
        return distributed_attention(q, k, v, layout=layout, transport=transport, causal=True)[0]

    if replayed:
        call = capture_step(call, transport)
        for _ in range(3):  # that a wait comes again in every replay does not make it a long one
            call()
            torch.cuda.synchronize()
            time.sleep(0.8)
    good = call().clone()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    found = call()
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun
    try:
        call()
        error = ""
    except CommunicationError as again:
        error = str(again)
    queue.put((rank, bool(good.isfinite().all()), bool(found.isnan().any()), seconds, error))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.parametrize("replayed", [False, True], ids=["issued", "replayed"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_leaves_no_one_waiting_for_its_memory(ranks: int, replayed: bool):
    if reason := why_not(ranks):
        pytest.skip(reason)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    store = _meeting_point()
    processes = [
        context.Process(target=_survive, args=(rank, ranks, store.port, queue, replayed), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        told = [queue.get(timeout=90) for _ in range(ranks - 1)]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    assert sorted(rank for rank, *_ in told) == [rank for rank in range(ranks) if rank != 1]
    for rank, good, poisoned, seconds, error in told:
        assert good and poisoned, f"rank {rank}: what came of a lost rank must not look like a result"
        assert 1.5 < seconds < 20, rank
        # of more than two a rank may be left waiting for one that waits itself
        assert ("rank 1 did" if ranks == 2 else "did") + " not answer within 2 s" in error, rank


def _mistakes(rank: int, ranks: int) -> None:
    """Mistakes of one rank, each an error on all of them, and a good call at the end."""
    from gpu_accel.errors import InvalidInputError

    transport, layout = make_transport("symmetric", ranks), make_layout("zigzag", seqlen=1000, ranks=ranks)
    odd = rank == ranks - 1
    shards = [layout.shard(x, rank) for x in inputs(card(rank))[:3]]
    poisoned = [shards[0], shards[1], shards[2].clone()]
    poisoned[2][0, 7, 1, 3] = float("nan")
    options = {"layout": layout, "transport": transport}
    wrong = {
        "mask": lambda: distributed_attention(*shards, causal=not odd, **options),
        "shape": lambda: distributed_attention(*(x[:, : 7 if odd else None] for x in shards), **options),
        "dtype": lambda: distributed_attention(*(x.half() if odd else x for x in shards), **options),
        "nan": lambda: distributed_attention(*(poisoned if odd else shards), check_finite=True, **options),
    }
    for name, call in wrong.items():
        with pytest.raises(InvalidInputError):
            call()
            pytest.fail(name)
        o, _ = distributed_attention(*shards, causal=True, **options)
        assert bool(o.isfinite().all()), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mistake_of_one_rank_is_an_error_on_all(ranks: int):
    run_ranks(_mistakes, ranks)


def _graph(rank: int, ranks: int, seqlen: int, heads: int, how: str) -> None:
    """The ring in a CUDA graph, replayed with other inputs: the bits of the ring outside it, dq in turns."""
    both = how in ("both", "both-lanes", "nccl")
    transport = make_transport("nccl" if how == "nccl" else "symmetric", ranks)
    layout = make_layout("zigzag", seqlen=seqlen, ranks=ranks)
    shape = {**SHAPE, "seqlen_q": seqlen, "heads": heads, "heads_kv": heads // 2}
    qkv = make_qkv(**shape, dtype=torch.bfloat16, device=card(rank), seed=0)
    *shards, do = (layout.shard(x, rank) for x in (*qkv, random_like(qkv.q, seed=1)))
    leaves = [x.requires_grad_(both) for x in shards]
    options = {"layout": layout, "transport": transport, "causal": True, "deterministic": how != "both-lanes"}

    def run() -> tuple[torch.Tensor, ...]:
        o, _ = distributed_attention(*leaves, **options)
        return (o.detach(), *torch.autograd.grad(o, leaves, do)) if both else (o,)

    if how == "by hand":
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    else:
        with lanes.in_a_graph():
            assert lanes.useful(*shards[:2], ranks) == ("lanes" in how)
        step = capture_step(run, transport)
    for scale in (1.0, 0.5, 0.5):
        with torch.no_grad():
            shards[2].mul_(scale)
        if how == "by hand":
            graph.replay()
        else:
            found = step()
        torch.cuda.synchronize()
        for name, x, expected in zip(NAMES, found, run(), strict=False):
            same = torch.equal(x, expected) or (name == "dq" and how == "both-lanes")
            assert same, (name, scale)
            assert relative_error(x, expected) < 1e-2, (name, scale)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("seqlen", "heads", "how"),
    [(1000, 8, "by hand"), (1024, 8, "both"), (16384, 64, "lanes"), (16384, 64, "both-lanes"), (1024, 8, "nccl")],
    ids=["forward", "both", "lanes", "both-lanes", "nccl"],
)
def test_the_ring_in_a_cuda_graph(seqlen: int, heads: int, how: str, ranks: int):
    if how == "nccl" and shared(ranks):
        pytest.skip("NCCL refuses two ranks on one GPU")
    run_ranks(_graph, ranks, seqlen, heads, how)


def _in_lanes(rank: int, ranks: int) -> None:
    """Halves of the heads on two streams, against all of them on one: everything but dq has the same bits."""
    transport, layout = make_transport("symmetric", ranks), make_layout("zigzag", seqlen=8192 * ranks, ranks=ranks)
    make = torch.Generator(card(rank)).manual_seed(rank)
    shapes = [(1, 8192, heads, 128) for heads in (32, 8, 8, 32)]
    q, k, v, do = (torch.randn(s, device=card(rank), generator=make).bfloat16() for s in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = None
    for lanes.WANTED in (False, True, True, True):
        with lanes.of_any_length():
            assert lanes.useful(q, k, ranks) == lanes.WANTED
            o, lse = distributed_attention(*leaves, layout=layout, transport=transport, causal=True)
            found = (o.detach(), lse, *torch.autograd.grad(o, leaves, do))
        first = first or found
        for name, x, before in zip(("o", "lse", "dq", "dk", "dv"), found, first, strict=True):
            assert torch.equal(x, before) if name != "dq" else relative_error(x, before) < 1e-2, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_lanes_of_the_ring_give_the_same_bits(ranks: int):
    run_ranks(_in_lanes, ranks)


def _same_bits(rank: int, ranks: int) -> None:
    """Both passes, again and again: every bit but those of dq; with deterministic=True those too."""
    transport, layout = make_transport("symmetric", ranks), make_layout("zigzag", seqlen=1024 * ranks, ranks=ranks)
    qkv = make_qkv(**{**SHAPE, "seqlen_q": 1024 * ranks}, dtype=torch.bfloat16, device=card(rank), seed=0)
    *shards, do = (layout.shard(x, rank) for x in (*qkv, random_like(qkv.q, seed=1)))
    leaves = [x.requires_grad_() for x in shards]
    for deterministic in (False, True):
        first = None
        for _ in range(5):
            o, lse = distributed_attention(
                *leaves, layout=layout, transport=transport, causal=True, deterministic=deterministic
            )
            found = (o.detach(), lse, *torch.autograd.grad(o, leaves, do))
            first = first or found
            for i, (x, before) in enumerate(zip(found, first, strict=True)):
                assert torch.equal(x, before) or (i == 2 and not deterministic), (deterministic, i)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_bits_every_time(ranks: int):
    run_ranks(_same_bits, ranks)


def _llama(device: str, dtype: torch.dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).to(device, dtype)


def _model_in_shards(rank: int, ranks: int, group: int) -> None:
    """Parameters in shards over all ranks (FSDP2), each sequence in shards over `group` of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from gpu_accel.ring_attention import choose_transport, context_parallel

    device, length = card(rank), 1000
    mesh = init_device_mesh("cuda", (ranks // group, group), mesh_dim_names=("data", "sequence"))
    make = torch.Generator().manual_seed(1)
    batch = torch.randint(1, 512, (ranks // group, length), generator=make).to(device)

    def alone(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        model = _llama(device, dtype)
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.double().flatten() for p in model.parameters()])

    exact, ruler = alone(torch.float32), alone(torch.bfloat16)
    model = _llama(device, torch.bfloat16)
    everyone = init_device_mesh("cuda", (ranks,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=everyone, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    transport = choose_transport(mesh["sequence"].get_group())
    assert transport.name == "symmetric" and transport.size == group
    layout, mine = make_layout("zigzag", seqlen=length, ranks=group), batch[rank // group][None]
    for _ in range(2):
        model.zero_grad()
        with context_parallel(model, layout=layout, transport=transport, gradients="mean") as cp:
            loss = cp.loss(model(**cp.inputs(mine), use_cache=False).logits, mine)
            loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        # gradients="mean" makes a rank's loss `group` times its part; over `ranks` of them that is the mean
        assert abs(total / ranks - exact[0]) <= 2 * abs(ruler[0] - exact[0]) + 1e-3 * exact[0]
        found = torch.cat([p.grad.full_tensor().double().flatten() for p in model.parameters()])
        assert relative_error(found, exact[1]) <= 2 * relative_error(ruler[1], exact[1])


@pytest.mark.parametrize(("ranks", "group"), [(2, 2), (4, 4), (4, 2)], ids=lambda x: str(x))
def test_a_model_in_shards_with_its_sequence_in_shards(ranks: int, group: int):
    pytest.importorskip("transformers")
    if shared(ranks):
        pytest.skip("FSDP2 gathers parameters over NCCL, which refuses two ranks on one GPU")
    run_ranks(_model_in_shards, ranks, group)


def _model_in_a_graph(rank: int, ranks: int) -> None:
    """Loss and gradients of a model whose sequence is in shards, replayed with other tokens."""
    from gpu_accel.ring_attention import context_parallel

    device, length = card(rank), 1024
    transport, layout = make_transport("symmetric", ranks), make_layout("zigzag", seqlen=length, ranks=ranks)
    model, make = _llama(device, torch.bfloat16), torch.Generator().manual_seed(1)
    batch = torch.randint(1, 512, (1, length), generator=make).to(device)
    with context_parallel(model, layout=layout, transport=transport) as cp:

        def run() -> tuple[torch.Tensor, ...]:
            loss = cp.loss(model(**cp.inputs(batch), use_cache=False).logits, batch)
            return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

        step, losses = capture_step(run, transport), []
        for _ in range(3):
            batch.copy_(torch.randint(1, 512, (1, length), generator=make))
            found, expected = [x.clone() for x in step()], run()
            for x, wanted in zip(found, expected, strict=True):
                assert relative_error(x, wanted) < 1e-2
            losses.append(found[0].item())
        assert len(set(losses)) == 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_in_a_cuda_graph_with_its_sequence_in_shards(ranks: int):
    pytest.importorskip("transformers")
    run_ranks(_model_in_a_graph, ranks)
