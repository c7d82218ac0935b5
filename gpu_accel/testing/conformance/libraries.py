"""Attention libraries behind one signature.

    attend(q, k, v, *, causal, window_size, softcap, softmax_scale, cu_seqlens_q, cu_seqlens_k) -> (o, lse or None)

q, k, v are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens_*`. Causal is bottom-right
aligned. What a library has no argument for raises UnsupportedError before anything runs: a refusal, not a failure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_accel.errors import InvalidInputError, UnsupportedError

Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Library:
    """An attention library. `missing` says why it cannot run on a device at all; empty when it can."""

    name: str
    attend: Callable[..., Result]
    missing: Callable[[torch.device], str]
    ours: bool = False


def _ours(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func

    if options.get("cu_seqlens_q") is not None:
        return flash_attn_varlen_func(q, k, v, return_lse=True, backend=backend, **options)  # type: ignore[return-value]
    options = {name: value for name, value in options.items() if not name.startswith("cu_seqlens")}
    return flash_attn_func(q, k, v, return_lse=True, backend=backend, **options)  # type: ignore[return-value]


def _refuse(name: str, **given: object) -> None:
    for what, value in given.items():
        if value:
            raise UnsupportedError(f"{name} has no {what.replace('_', ' ')}")


def _windowed(window_size: tuple[int | None, int | None]) -> bool:
    return any(side is not None and side >= 0 for side in window_size)


def _sdpa(
    backend: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Result:
    _refuse(
        "scaled_dot_product_attention",
        sliding_window=_windowed(window_size),
        soft_cap=softcap,
        packed_sequences=cu_seqlens_q is not None or cu_seqlens_k is not None,
    )
    mask = None
    if causal and q.shape[1] != k.shape[1]:  # its own is_causal is top-left aligned
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        o = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return o.transpose(1, 2), None


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Result:
    from torch.nn.attention.flex_attention import create_block_mask

    _refuse("flex_attention", packed_sequences=cu_seqlens_q is not None or cu_seqlens_k is not None)
    rows, keys = q.shape[1], k.shape[1]
    left, right = (-1 if side is None else side for side in window_size)
    right = 0 if causal else right

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        place = row + (keys - rows)
        after = key >= place - left if left >= 0 else key >= 0
        return after & (key <= place + right) if right >= 0 else after

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    mask = None
    if left >= 0 or right >= 0:
        mask = create_block_mask(seen, None, None, rows, keys, device=q.device)
    torch.compiler.reset()  # one compilation a case: the limit on recompilations would leave later ones uncompiled
    o, lse = _compiled_flex()(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=cap if softcap else None,
        block_mask=mask,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_lse=True,
    )
    return o.transpose(1, 2), lse


def _flash_attn_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Result:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    left, right = (None if side is None or side < 0 else side for side in window_size)
    options = {"causal": causal, "window_size": (left, right), "softcap": softcap, "softmax_scale": softmax_scale}
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        lengths = [int(cu.diff().max()) for cu in (cu_seqlens_q, cu_seqlens_k)]
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=lengths[0],
            max_seqlen_k=lengths[1], return_lse=True, **options,
        )  # fmt: skip
    return flash_attn_func(q, k, v, return_lse=True, **options)


def _always(_: torch.device) -> str:
    return ""


def _gpu(what: str) -> Callable[[torch.device], str]:
    return lambda device: "" if device.type == "cuda" else f"{what} needs an NVIDIA GPU"


def _hopper(device: torch.device) -> str:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0 (H100, H200)"
    return ""


def _flash_attn_4_missing(device: torch.device) -> str:
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        found = False
    return _gpu("flash-attn-4")(device) if found else "not installed (pip install flash-attn-4)"


LIBRARIES: dict[str, Library] = {
    one.name: one
    for one in (
        Library(name="gpu-accel", attend=functools.partial(_ours, "auto"), missing=_always, ours=True),
        Library(name="portable", attend=functools.partial(_ours, "portable"), missing=_always, ours=True),
        Library(name="hopper", attend=functools.partial(_ours, "hopper"), missing=_hopper, ours=True),
        Library(name="reference", attend=functools.partial(_ours, "reference"), missing=_always, ours=True),
        Library(name="sdpa-math", attend=functools.partial(_sdpa, SDPBackend.MATH), missing=_always),
        Library(name="sdpa-flash", attend=functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION), missing=_always),
        Library(name="sdpa-cudnn", attend=functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION), missing=_gpu("cuDNN")),
        Library(name="flex", attend=_flex, missing=_gpu("compiled FlexAttention")),
        Library(name="flash-attn-4", attend=_flash_attn_4, missing=_flash_attn_4_missing),
    )
}


def resolve(name: str) -> Library:
    """A library by its name, or `module:function`, any function with the signature above that can be imported.

    Raises:
        InvalidInputError: neither.
    """
    if name in LIBRARIES:
        return LIBRARIES[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise InvalidInputError(f"no library {name!r}: known are {', '.join(LIBRARIES)}; yours is module:function")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what an import prints is no result
            attend = getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code
        raise InvalidInputError(f"cannot import {name}: {type(error).__name__}: {error}") from error
    if not callable(attend):
        raise InvalidInputError(f"{name} is no function, but {type(attend).__name__}")
    return Library(name=name, attend=attend, missing=_always)
