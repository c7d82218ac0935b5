"""Tree decoding (arXiv 2408.04093): a few new queries that every rank holds, against keys that are spread over ranks.

Each rank attends to its own keys; then o and lse, not keys, are exchanged: heads (head_dim + 1) numbers a query from
each rank, merged in rank order by all alike. The paper reduces along a tree, log N steps; an all-gather of numbers this
few takes one, and gives every rank the same bits.

The queries are the last tokens of the sequence, so under a causal mask the last one sees everything. No backward:
decoding needs none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.merging import combine
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Run
from gpu_accel.ring_attention.masks import pieces
from gpu_accel.ring_attention.schedules.ring import Message
from gpu_accel.ring_attention.step import Partial, attend
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.shape[1] > call.layout.seqlen:
        return f"{q.shape[1]} queries are more than the {call.layout.seqlen} tokens whose last ones they are"
    if len([n for n in call.layout.documents if n]) > 1:
        return "it decodes one document; the layout has several"
    if call.layout.name == "striped" and q.shape[1] > 1 and call.mask.left + call.mask.right > -2:
        return "several queries and striped keys under a mask make no single diagonal: use another layout"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    """q (batch, queries, heads, head_dim), the same on all ranks; k, v this rank's shard."""
    count, layout = q.shape[1], call.layout
    partial = Partial.empty(q, v.shape[-1])
    document = next((i for i, n in enumerate(layout.documents) if n), 0)
    stride = layout.ranks if layout.name == "striped" and count > 1 else 1
    queries = (Run(layout.seqlen - count, count, 0, stride, document),) if count else ()
    attend(partial, q, k, v, pieces(queries, layout.runs(transport.rank), call.mask), call)
    packed = Message((partial.o, partial.lse))
    mine = partial.o.new_empty(packed.numel)
    packed.pack((partial.o, partial.lse), mine)
    parts, lses = zip(*map(packed.unpack, transport.all_gather(mine).wait()), strict=True)
    return combine(torch.stack(parts), torch.stack(lses), out_dtype=q.dtype)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    raise UnsupportedError("tree decoding has no backward: use kv_ring or ulysses to train")
