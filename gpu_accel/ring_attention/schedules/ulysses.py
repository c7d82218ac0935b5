"""Ulysses (arXiv 2309.14509): all ranks exchange tokens for heads, attend to the whole sequence, and exchange back.

Two all-to-alls each way and one kernel call, without merges. Grouped heads are sent to several ranks where there are
more ranks than key heads (see heads.py), so any numbers of heads go.
"""

from __future__ import annotations

from torch import Tensor

from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.schedules import usp
from gpu_accel.ring_attention.transport import Transport


def refuse(call: Call, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, transport: Transport) -> tuple[Tensor, Tensor]:
    return usp.forward(q, k, v, call, transport, degree=call.ranks)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: Call, transport: Transport
) -> tuple[Tensor, Tensor, Tensor]:
    return usp.backward(do, q, k, v, o, lse, call, transport, degree=call.ranks)
