"""Ring attention on one GPU: simulated ranks with the GPU kernels. Real ranks: test_ring_ranks.py."""

from __future__ import annotations

import time

import pytest
import torch
import torch.multiprocessing

from gpu_accel.flash_attention3 import flash_attn_func
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import RingAttention, capture_step, hopper_backward, lanes, make_layout, wire_kernels
from gpu_accel.ring_attention.attention import make_call
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
