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
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.problem import FLOAT_DTYPES


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


def four_sizes(name: str, shape: object) -> tuple[int, int, int, int]:
    """The shape of keys or values: four sizes, none of them 0."""
    if isinstance(shape, tuple | list) and len(shape) == 4 and all(type(n) is int and n > 0 for n in shape):
        return tuple(shape)  # type: ignore[return-value]
    raise InvalidInputError(f"{name} must be four sizes from 1 up, got {shape!r:.80}")


def check_home(k_shape: object, v_shape: object, dtype: object, device: Any, own: torch.device | None = None) -> None:
    """What a home is asked for with. own: the one device whose memory ranks share, if it is one.

    Raises:
        InvalidInputError: no shapes, dtype or device, or not the device of this rank. HardwareError: no such GPU.
    """
    four_sizes("k_shape", k_shape)
    four_sizes("v_shape", v_shape)
    if dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"dtype must be a floating torch.dtype, float16 to float64, got {dtype!r:.80}")
    if device is None:
        return
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"device must be one of torch's, as 'cuda' or 'cpu', got {device!r:.80}") from error
    if own is not None and (found.type, own.index if found.index is None else found.index) != (own.type, own.index):
        raise InvalidInputError(f"the memory that ranks share here is that of {own}, not of {found}: leave device out")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise HardwareError(f"there is no {found} here ({count} CUDA devices): pass device='cpu' or another one")


def home_number(transport: object, tensors: Sequence[Tensor]) -> int | None:
    """The home of the last two tensors (k, v), which all ranks have to agree on."""
    homes = getattr(transport, "homes", None)
    found = homes.find(*tensors[-2:]) if isinstance(homes, Homes) and len(tensors) >= 2 else None
    return None if found is None else found[0]


def unused(k_shape: Sequence[int], v_shape: Sequence[int], dtype: torch.dtype, device: object) -> tuple[Tensor, Tensor]:
    """Where no rank reads another's memory: tensors like any others."""
    check_home(k_shape, v_shape, dtype, device)
    like: dict[str, Any] = {"dtype": dtype, "device": device}  # both checked
    return torch.empty(tuple(k_shape), **like), torch.empty(tuple(v_shape), **like)
