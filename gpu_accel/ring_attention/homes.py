"""Keys and values that lie where other ranks can read them from the start, so that a ring need not copy them there.

    k, v = transport.home((1, rows, heads_kv, 128), (1, rows, heads_kv, 128), dtype=torch.bfloat16, device="cuda")
    torch.mm(x, w_k.T, out=k.view(rows, -1))                 # whatever makes keys and values writes them there
    o, lse = distributed_attention(q, k, v, layout=layout, transport=transport, causal=True)

A home is asked for once, by all ranks together, and used again and again: each call reads it until it has ended on the
stream. What has to outlive the next one (keys of a layer, until its backward) needs a home of its own; autograd finds
out where that is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Homes:
    """The homes of one rank, in the order in which they were made: the same on all ranks."""

    def __init__(self) -> None:
        self._places: list[tuple[Tensor, int, int]] = []  # flat memory, numbers of k and of v

    @staticmethod
    def size(k_shape: Sequence[int], v_shape: Sequence[int]) -> int:
        """Numbers of both together."""
        return math.prod(k_shape) + math.prod(v_shape)

    def add(self, flat: Tensor, k_shape: Sequence[int], v_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """k and v as views of `flat`, which has `size` numbers."""
        sizes = math.prod(k_shape), math.prod(v_shape)
        self._places.append((flat, *sizes))
        k, v = flat.split(sizes)
        return k.view(tuple(k_shape)), v.view(tuple(v_shape))

    def find(self, k: Tensor, v: Tensor) -> tuple[int, Tensor] | None:
        """The number and the flat memory of the home that exactly k and v fill, or None."""
        if not (k.is_contiguous() and v.is_contiguous() and k.dtype == v.dtype):
            return None
        for number, (flat, n_k, n_v) in enumerate(self._places):
            starts = flat.data_ptr(), flat.data_ptr() + n_k * flat.element_size()
            same = (k.numel(), v.numel(), k.dtype) == (n_k, n_v, flat.dtype)
            if same and (k.data_ptr(), v.data_ptr()) == starts:
                return number, flat
        return None


def home_number(transport: object, tensors: Sequence[Tensor]) -> int | None:
    """The home of the last two tensors (k, v), which all ranks have to agree on."""
    homes = getattr(transport, "homes", None)
    found = homes.find(*tensors[-2:]) if isinstance(homes, Homes) and len(tensors) >= 2 else None
    return None if found is None else found[0]


def unused(k_shape: Sequence[int], v_shape: Sequence[int], dtype: torch.dtype, device: object) -> tuple[Tensor, Tensor]:
    """Where no rank reads another's memory: tensors like any others."""
    return tuple(torch.empty(tuple(s), dtype=dtype, device=device) for s in (k_shape, v_shape))  # type: ignore
