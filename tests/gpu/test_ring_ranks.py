"""Ring attention by real ranks over NCCL and symmetric memory, a process each.

They are skipped with fewer GPUs than ranks, or share one (`one_gpu.py`).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.multiprocessing

from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.ring_attention import capture_step, lanes, make_layout
from gpu_accel.ring_attention.attention import distributed_attention, gather_sequence
from gpu_accel.testing import (
    assert_close_to_truth,
    make_qkv,
    random_like,
    relative_error,
    yardstick_attention,
    yardstick_attention_backward,
)

from .one_gpu import card, make_transport, shared, start, why_not
from .ranks import meeting_point, run_ranks
from .test_ring_attention import NAMES, SHAPE, inputs

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
    store = meeting_point()
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
