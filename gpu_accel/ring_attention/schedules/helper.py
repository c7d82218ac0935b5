"""Helpers for causal attention over contiguous shards (DISTFLASHATTN, arXiv 2310.03294).

With contiguous shards rank p has p + 1 blocks to compute and rank 0 one. At step t the ranks p >= t compute their own
queries against the keys of rank p - t; ranks p < t, whose own work is done, take the queries of rank p - t + N and
compute them against their own keys, and send back the partial (o, lse). floor(N/2) steps beyond the first do all the
work; idle remains only half of the last step for even N: 1 / (2 N) of the time.

Backward is the same plan: helpers get q, dO, lse and delta and return dQ; the others return dK and dV to the owner.
Sums are formed in the order of the steps. Messages differ from rank to rank, so this needs `transfer`, which symmetric
memory does not have. A step's messages are waited for before it is computed: nothing is hidden yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.schedules.ring import Message, Ring
from gpu_accel.ring_attention.step import Partial, add_gradients, attend, delta_of, partial_dtype
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if call.layout.name != "contiguous":
        return f"it balances contiguous shards; {call.layout.name} ones are balanced as they are: use kv_ring"
    if not call.mask.causal:
        return f"it fills the idle time of causal attention, and the mask is {call.mask}: use kv_ring"
    if call.wire is not None:
        return "queries and keys share its messages, so wire must be None"
    return None


class _Step:
    """Who does what at step t: me <- the keys of `source`, or helping the queries of `source`."""

    def __init__(self, ring: Ring, t: int) -> None:
        n, p = ring.size, ring.me
        self.source, self.to = (p - t) % n, (p + t) % n
        last_half = n % 2 == 0 and t == n // 2  # both sides of a pair would do the same block
        self.working = p >= t
        self.helping = p < t and not last_half
        self.sends_keys = p + t < n  # the receiver p + t works
        self.sends_queries = p + t >= n and not last_half  # the receiver p + t - n helps


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    ring = ring_of(call, transport)
    partial = Partial.empty(q, v.shape[-1])
    attend(partial, q, k, v, ring.pieces(0, 0, call.mask), call)
    keys, queries, results = Message((k, v)), Message((q,)), Message((partial.o, partial.lse))
    for t in range(1, ring.size // 2 + 1):
        step = _Step(ring, t)
        sends = _outgoing(step, (keys, (k, v)), (queries, (q,)))
        inbox = q.new_empty(keys.numel if step.working else queries.numel if step.helping else 0)
        transport.transfer(sends, [(inbox, step.source)] if inbox.numel() else []).wait()
        returns = []
        if step.working:
            other_k, other_v = keys.unpack(inbox)
            attend(partial, q, other_k, other_v, ring.pieces(0, -t, call.mask), call)
        elif step.helping:
            (other,) = queries.unpack(inbox)
            found = Partial.empty(other, v.shape[-1])
            attend(found, other, k, v, ring.pieces(-t, 0, call.mask), call)
            mine = found.o.new_empty(results.numel)
            results.pack((found.o, found.lse), mine)
            returns = [(mine, step.source)]
        arriving = partial.o.new_empty(results.numel if step.sends_queries else 0)
        transport.transfer(returns, [(arriving, step.to)] if step.sends_queries else []).wait()
        if step.sends_queries:
            o, lse = results.unpack(arriving)
            partial.add(o, lse)
    return partial.o.to(q.dtype), partial.lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    ring = ring_of(call, transport)
    dtype = partial_dtype(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    delta = delta_of(do, o)
    add_gradients((dq, dk, dv), do, q, k, v, lse, delta, ring.pieces(0, 0, call.mask), call)
    keys, queries, stats = Message((k, v)), Message((q, do)), Message((lse, delta))
    for t in range(1, ring.size // 2 + 1):
        step = _Step(ring, t)
        sends = _outgoing(step, (keys, (k, v)), (queries, (q, do)))
        inbox = q.new_empty(keys.numel if step.working else queries.numel if step.helping else 0)
        figures = lse.new_empty(stats.numel if step.helping else 0)
        if step.sends_queries:
            mine = lse.new_empty(stats.numel)
            stats.pack((lse, delta), mine)
            sends.append((mine, step.to))
        receives = [(x, step.source) for x in (inbox, figures) if x.numel()]
        transport.transfer(sends, receives).wait()
        returns, expected = [], []
        if step.working:
            other_k, other_v = keys.unpack(inbox)
            sums = torch.zeros(keys.numel, dtype=dtype, device=q.device)
            part_k, part_v = keys.unpack(sums)
            found = ring.pieces(0, -t, call.mask)
            add_gradients((dq, part_k, part_v), do, q, other_k, other_v, lse, delta, found, call)
            returns = [(sums, step.source)]
        elif step.helping:
            (other_q, other_do), (other_lse, other_delta) = queries.unpack(inbox), stats.unpack(figures)
            part_q = torch.zeros_like(dq)
            found = ring.pieces(-t, 0, call.mask)
            add_gradients((part_q, dk, dv), other_do, other_q, k, v, other_lse, other_delta, found, call)
            returns = [(part_q.view(-1), step.source)]
        if step.sends_keys or step.sends_queries:
            expected = [(dk.new_empty(keys.numel if step.sends_keys else q.numel()), step.to)]
        transport.transfer(returns, expected).wait()
        if step.sends_keys:
            for total, part in zip((dk, dv), keys.unpack(expected[0][0]), strict=True):
                total += part
        elif step.sends_queries:
            dq += expected[0][0].view(dq.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _outgoing(step: _Step, keys: tuple[Message, tuple], queries: tuple[Message, tuple]) -> list[tuple[Tensor, int]]:
    if not (step.sends_keys or step.sends_queries):
        return []
    packed, tensors = keys if step.sends_keys else queries
    message = tensors[0].new_empty(packed.numel)
    packed.pack(tensors, message)
    return [(message, step.to)]
