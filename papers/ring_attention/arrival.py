"""The keys that reach a rank when they travel in 8 bits: what `replay` and `overlap` are judged by.

A rank's own keys do not travel and stay exact; those of all others are encoded once and decoded, by torch's operations
on the CPU: kernels are not judged by themselves. What 8 bits lose is in the truth as well and not counted: a check says
that the right bytes arrived and that attention to them is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.ring_attention.layouts import Layout
from gpu_accel.ring_attention.wire import decode, encode

WIRE = torch.float8_e4m3fn


def arrived(x: Tensor, layout: Layout, rank: int, wire: torch.dtype) -> Tensor:
    """Keys or values of the whole sequence as this rank computes with them."""
    shards = [layout.shard(x, r) for r in range(layout.ranks)]
    return layout.unshard([own if r == rank else _sent(own, wire) for r, own in enumerate(shards)])


def _sent(x: Tensor, wire: torch.dtype) -> Tensor:
    return decode(encode(x.cpu(), wire), wire, x.dtype).to(x.device)
