"""Host side of the plain-Triton kernels: TMA descriptors, how a head dimension is cut, how heads are grouped."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.compat import INTERPRET

if TYPE_CHECKING:
    from gpu_accel.flash_attention3.features import Features

_LOG2E = 1.4426950408889634
_TMA_ALIGNMENT = 16  # bytes, for addresses and for every stride but the last
_TMA_MAX_STRIDE = 1 << 40  # bytes
_TILE_BYTES = 128  # see `narrowest_tile`
_target: tuple[int, int] | None = None  # what testing/compile_only.py compiles for, without such a GPU
_hook: Callable[[Any, int, tuple, dict], None] | None = None  # see `instead_of_launching`, `recording`
_seen: Callable[[Any, Any, tuple, tuple, dict], None] | None = None  # transformer_engine/tape.py
_thread = threading.local()
_L2_SHARE = 16 << 20  # bytes of keys and values that the heads walked together may take


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def split_dim(dim: int, narrowest: int = 16) -> tuple[int, int]:
    """Cut `dim` into two powers of two (at least `narrowest` each, the second may be 0) that pad it least.

    192 -> (128, 64); 96 -> (64, 32); 72 -> (64, 16); 112 -> (128, 0); 64 -> (64, 0)
    """
    first = max(narrowest, 1 << (dim.bit_length() - 1))
    if dim <= first:
        return first, 0
    second = max(narrowest, next_power_of_2(dim - first))
    return (first, second) if second < first else (2 * first, 0)


def narrowest_tile(x: Tensor) -> int:
    """How many columns a tile of x has at least: on Hopper 128 bytes, elsewhere 16.

    A product reads narrower tiles by descriptors whose upper half is negative, and of those ptxas 12.8 (Triton 3.6) may
    lose the address: packed attention at head_dim 72, 80 and 96 read values somewhere else (testing/overwritten.py).
    """
    on_hopper = _target == (9, 0) or (x.device.type == "cuda" and capability(x.device)[0] == 9)
    return _TILE_BYTES // x.element_size() if on_hopper else 16


def tma_refusal(*tensors: Tensor) -> str | None:
    """Why TMA cannot read these (batch, seqlen, heads, dim) tensors, or None."""
    device = tensors[0].device
    if INTERPRET or device.type != "cuda":
        return "no GPU"
    if capability(device) < (9, 0):
        return "compute capability below 9.0 has no TMA"
    for x in tensors:
        size = x.element_size()
        if x.data_ptr() % _TMA_ALIGNMENT:
            return "an address is not 16-byte aligned"
        for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if n == 1:
                continue
            if stride == 0:
                return "a broadcast (stride 0) dimension"
            if stride * size % _TMA_ALIGNMENT:
                return f"a stride of {stride * size} bytes is not a multiple of 16"
            if stride * size >= _TMA_MAX_STRIDE:
                return f"a stride of {stride * size} bytes is too large"
    return None


def off_16_bytes(x: Tensor) -> bool:
    """Whether the address of x, or a stride of a dimension that is walked, is no multiple of 16 bytes."""
    size = x.element_size()
    walked = (stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    return x.data_ptr() % _TMA_ALIGNMENT != 0 or any(stride * size % _TMA_ALIGNMENT for stride in walked)


def aligned(x: Tensor) -> Tensor:
    """x, or on a GPU one contiguous copy of it where it is off 16 bytes.

    Loads of two bytes are slow, and what ptxas 12.8 makes of them in front of a wgmma of 16 columns is wrong.
    """
    return x.clone(memory_format=torch.contiguous_format) if x.device.type == "cuda" and off_16_bytes(x) else x


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; (8, 0) on ROCm, where nothing was tried.

    ROCm counts alike (gfx942 is (9, 4)) but has neither TMA nor wgmma: it gets the plain kernels, without FP8.
    """
    return (8, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Blocks of (1, rows, 1, cols) over a (batch, seqlen, heads, dim) view, zeros outside."""
    unit = _TMA_ALIGNMENT // x.element_size()
    strides = [s if n > 1 else unit for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, cols])


def operands(x: Tensor, rows: int, first: int, second: int, tma: bool) -> tuple[Any, Any]:
    """By what a kernel reads both parts of x (batch, seqlen, heads, first + second): two descriptors, or x itself."""
    if not tma:
        return x, x
    a = descriptor(x, rows, first)
    return a, descriptor(x, rows, second) if second else a


def compact_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, seqlen and heads; those of dimensions of size 1 do not matter, so they never recompile."""
    return tuple(s if n > 1 else 0 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))


def heads_per_group(k: Tensor, v: Tensor, group: int) -> int:
    """How many query heads to walk together, heaviest tiles first, so that their keys and values stay in L2."""
    per_head = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1, min(64, _L2_SHARE // max(1, per_head))) * group


def score_scales(softmax_scale: float, softcap: float, features: Features) -> tuple[float, float, float]:
    """(qk_scale, cap_in, cap_out): what takes q k^T to exponents of 2, as the kernels use them.

    Plain: qk_scale alone. Soft cap: cap_out * tanh(cap_in * s) is in base 2. Biases and modifiers: natural scores,
    cap_in * s or cap_out * tanh(cap_in * s), which qk_scale takes to base 2 afterwards.
    """
    if features.alibi_slopes is not None or features.score_mod:
        return (_LOG2E, softmax_scale / softcap, softcap) if softcap > 0 else (_LOG2E, softmax_scale, 0.0)
    if softcap > 0:
        return 1.0, softmax_scale / softcap, softcap * _LOG2E
    return softmax_scale * _LOG2E, 0.0, 0.0


def bias_arguments(features: Features) -> tuple:
    """(alibi_slopes, its batch stride, aux_tensors) for a kernel; None where there is none."""
    slopes = features.alibi_slopes
    by_batch = None if slopes is None else slopes.stride(0) if slopes.dim() == 2 else 0
    return slopes, by_batch, features.aux_tensors if features.score_mod or features.mask_mod else None


def block_arguments(lists: tuple[Tensor, ...]) -> tuple:
    """(counts, indices, width, full counts, full indices, full width, batch stride, head stride) for a kernel."""
    if not lists:
        return (None,) * 8
    counts, indices, full_counts, full_indices = lists
    full = (None, None, None)
    if full_counts.numel():
        full = (full_counts, full_indices, full_indices.shape[-1])
    strides = (counts.stride(0) if counts.shape[0] > 1 else 0, counts.stride(1) if counts.shape[1] > 1 else 0)
    return (counts, indices, indices.shape[-1], *full, *strides)


def have_context() -> None:
    """Make the GPU's context current in this thread, before the first launch with a tensor map: none is made without.

    A thread, such as autograd's for a backward, has no context until it calls CUDA. Memory that torch has at hand takes
    no such call, and Triton looks after the context when it launches, which is after it has made the maps.
    """
    if not hasattr(_thread, "has_context") and torch.cuda.is_initialized():
        torch.cuda.Event().record()
        _thread.has_context = True


def launch(kernel: Any, programs: int | tuple[int, ...], arguments: tuple, options: dict) -> None:
    """Run `kernel` on a grid of `programs`."""
    if _hook is not None:
        _hook(kernel, programs, arguments, options)
        return
    have_context()
    grid = programs if isinstance(programs, tuple) else (programs,)
    seen = _seen  # which another thread may set
    if seen is None:
        kernel[grid](*arguments, **options)
        return
    with _disable_current_modes():  # the interpreter copies tensors
        compiled = kernel[grid](*arguments, **options)
    seen(kernel, compiled, grid, arguments, options)


@contextlib.contextmanager
def _hooked(hook: Callable[[Any, int, tuple, dict], None]) -> Iterator[None]:
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before


@contextlib.contextmanager
def instead_of_launching(hook: Callable[[Any, tuple, dict], None]) -> Iterator[None]:
    """Hand every kernel with its arguments and options to `hook` instead of the GPU; compile-only tests use it."""
    with _hooked(lambda kernel, programs, arguments, options: hook(kernel, arguments, options)):
        yield


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Any, int, tuple, dict]]]:
    """Collect (kernel, programs, arguments, options) instead of launching; `launch(*entry)` runs one afterwards."""
    entries: list[tuple[Any, int, tuple, dict]] = []
    with _hooked(lambda *entry: entries.append(entry)):
        yield entries
