"""N ranks in one process: the same code, the same numbers, no network. For tests, notebooks and looking closely.

    o, lse = simulate_attention(q, k, v, ranks=8, schedule="kv_ring", layout="zigzag", causal=True)
    results = simulate(lambda transport: my_function(transport), ranks=4)

Ranks are threads of which one runs at a time, so nothing is gained in speed and the results are the same bits every
time. `LocalTransport` finds what a network would make a hang of: deadlocks, ranks that have ended, messages of the
wrong shape, buffers that are overwritten too early.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.problem import check_flag, check_strided, check_tensors
from gpu_accel.ring_attention import attention
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.schedules import schedule as find_schedule
from gpu_accel.ring_attention.transport import LocalTransport, World

T = TypeVar("T")
MOST_RANKS = 4096  # each is a thread


def simulate(function: Callable[[LocalTransport], T], ranks: int, *, world: World | None = None) -> list[T]:
    """`function(transport)` on each rank; the results in rank order.

    Ranks run as the caller would: with its gradient mode, inference mode, autocast, context variables, and CUDA stream.

    Pass a `World` of that size to read afterwards what each rank has sent (`world.bytes_sent`), in all its calls.

    Raises:
        Whatever the first rank to fail raised; the other ranks end with CommunicationError.
    """
    if not callable(function):
        raise InvalidInputError(f"function must be a function of a transport, got {shown(function)}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise InvalidInputError(f"ranks must be a whole number from 1 to {MOST_RANKS}, got {shown(ranks)}")
    world = World(ranks) if world is None else world
    if not isinstance(world, World):
        raise InvalidInputError(f"world must be a World or None, got {shown(world)}")
    if world.size != ranks:
        raise InvalidInputError(f"the world has {world.size} ranks, not {ranks}")
    world.begin()
    results: dict[int, T] = {}
    like_here = _modes()
    contexts = [contextvars.copy_context() for _ in range(ranks)]

    def run(rank: int) -> None:
        with world.changed:
            try:
                with like_here():
                    results[rank] = contexts[rank].run(function, LocalTransport(world, rank))
                world.leave(rank)
            except BaseException as error:  # handed to the caller below
                world.leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failed:
        raise world.failed[1]
    return [results[rank] for rank in range(ranks)]


def _modes() -> Callable[[], ExitStack]:
    """What torch keeps for each thread, as it is in this one: to be entered in another."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind, dtype, enabled in casts:
            if enabled:
                stack.enter_context(torch.autocast(kind, dtype))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter


def simulate_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranks: int,
    schedule: str = "kv_ring",
    layout: str = "zigzag",
    documents: Sequence[int] | None = None,
    do: Tensor | None = None,
    world: World | None = None,
    check_finite: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Attention of whole tensors, cut into shards, computed by N ranks and put together again.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), whole. documents: lengths of packed documents.
        do: gradient of o; then gradients are computed too.
        options: causal, window_size, ... as in :func:`~gpu_accel.ring_attention.attention.distributed_attention`.

    Returns:
        (o, lse), whole; with `do` (o, lse, dq, dk, dv).
    """
    attention.check_names(options)
    check_tensors(q, k, v, varlen=False)
    if do is not None:
        if not isinstance(do, Tensor) or do.shape != (*q.shape[:-1], v.shape[-1]) or do.device != q.device:
            got = f"{tuple(do.shape)} on {do.device}" if isinstance(do, Tensor) else type(do).__name__
            expected = f"{(*q.shape[:-1], v.shape[-1])} on {q.device}"
            raise InvalidInputError(f"do must be a tensor {expected} like o, or None; got {got}")
        check_strided("do", do)
    attention.check_held(q, k, v)
    find_schedule(schedule)
    if schedule != "tree" and q.shape[1] != k.shape[1]:
        raise InvalidInputError(
            f"q has {q.shape[1]} tokens, k and v have {k.shape[1]}: ranks hold the same tokens of all three; few "
            "queries over many keys take schedule='tree'"
        )
    cut = make_layout(layout, seqlen=k.shape[1], ranks=ranks, documents=documents)
    replicated = schedule == "tree"  # every rank holds the few queries

    def one_rank(transport: LocalTransport) -> tuple[Tensor, ...]:
        ql = q if replicated else cut.shard(q, transport.rank)
        kl, vl = (cut.shard(x, transport.rank) for x in (k, v))
        call = attention.make_call(ql, kl, vl, cut, replicated_q=replicated, **options)
        if check_flag("check_finite", check_finite):
            attention.require_finite(kl if replicated else ql, kl, vl, cut, transport.rank)
        with torch.no_grad():
            o, lse = attention.forward(ql, kl, vl, call, transport, schedule=schedule)
            if do is None:
                return o, lse
            dol = do if replicated else cut.shard(do, transport.rank)
            return o, lse, *attention.backward(dol, ql, kl, vl, o, lse, call, transport, schedule=schedule)

    results = simulate(one_rank, ranks, world=world)
    if replicated:
        return results[0]
    dims = (1, 2, 1, 1, 1)  # lse is (batch, heads, seqlen)
    return tuple(cut.unshard([r[i] for r in results], dim=dims[i]) for i in range(len(results[0])))
