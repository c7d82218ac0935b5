"""The functions that users of the ring-flash-attention package know, with its names and argument order.

Tensors are this rank's shards, (batch, local_length, heads, head_dim), of a sequence of ranks * local_length tokens,
cut by `contiguous` for ring_*, `zigzag` for zigzag_ring_*, `striped` for stripe_*. What the kernels do not do (dropout,
ALiBi) is refused, on every rank. Unlike there, window_size works in all of them. With `varlen` in its name a function
takes packed documents, (local_length, heads, head_dim), each of them in zigzag shards of its own.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.problem import check_flag, check_number, check_tensors
from gpu_accel.ring_attention.attention import Window, distributed_attention, told
from gpu_accel.ring_attention.layouts import make_layout
from gpu_accel.ring_attention.symmetric import choose_transport
from gpu_accel.ring_attention.transport import Transport


def _transport(group: Any) -> Transport:
    return group if isinstance(group, Transport) else choose_transport(group)


def _run(
    layout: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, alibi_slopes: Any, deterministic: bool, return_attn_probs: bool, group: Any,
    documents: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    transport = _transport(group)
    with told(transport):
        check_tensors(q, k, v, varlen=False)
        check_flag("return_attn_probs", return_attn_probs)
        check_flag("deterministic", deterministic)
        if check_number("dropout_p", dropout_p, zero="off"):
            raise UnsupportedError("dropout_p is not supported: pass 0.0")
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes is not supported: pass None")
        cut = make_layout(layout, seqlen=q.shape[1] * transport.size, ranks=transport.size, documents=documents)
        if cut.local_length != q.shape[1]:
            raise InvalidInputError(
                f"zigzag shards have an even number of rows, got {q.shape[1]}: pad, or use RingAttention"
            )
    o, lse = distributed_attention(
        q, k, v, layout=cut, transport=transport, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
        deterministic=deterministic,
    )  # fmt: skip
    return (o, lse, None) if return_attn_probs else o


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
):  # fmt: skip
    """Ring attention of contiguous shards. `group`: a process group (None: the default one) or a transport."""
    return _run("contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                return_attn_probs, group)  # fmt: skip


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
):  # fmt: skip
    """Ring attention of zigzag shards."""
    return _run("zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                return_attn_probs, group)  # fmt: skip


def stripe_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
):  # fmt: skip
    """Ring attention of striped shards."""
    return _run("striped", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                return_attn_probs, group)  # fmt: skip


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | Sequence[int], max_seqlen: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
):  # fmt: skip
    """Ring attention of packed documents. `cu_seqlens`: where they begin and end among the rows of this rank, that is
    those of the whole sequence divided by the ranks; every rank has as many rows, an even number, of each document.
    An integer tensor or a list. `max_seqlen` is not needed. lse is (heads, local_length)."""
    transport = _transport(group)
    with told(transport):
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.dim() != 3:
                got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise InvalidInputError(f"{name} must be a tensor (local_length, heads, head_dim), got {got}")
        documents = _documents(cu_seqlens, len(q), transport.size)
    found = _run("documents", q[None], k[None], v[None], dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                 deterministic, return_attn_probs, transport, documents)  # fmt: skip
    if isinstance(found, Tensor):
        return found[0]
    return found[0][0], found[1][0], None


def _documents(cu_seqlens: Tensor | Sequence[int], rows: int, ranks: int) -> list[int]:
    """The lengths of the whole documents. Nothing is rounded, nor read as a number that is none."""
    if isinstance(cu_seqlens, Tensor) and (cu_seqlens.is_meta or cu_seqlens.layout != torch.strided):
        raise InvalidInputError("cu_seqlens must have values in plain memory: they are read here")
    found: Any = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    listed = isinstance(found, Sequence) and not isinstance(found, str | bytes)
    if not listed or any(isinstance(x, bool) or not isinstance(x, numbers.Integral) for x in found):
        raise InvalidInputError(f"cu_seqlens must be a row of whole numbers, got {shown(cu_seqlens)}")
    ends = [int(x) for x in found]
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != rows or any(n < 0 or n % 2 for n in lengths):
        raise InvalidInputError(
            f"cu_seqlens must go from 0 to the {rows} rows of this rank in even steps, got {ends!s:.80}: pad documents "
            "to a multiple of twice the ranks, or use RingAttention with documents="
        )
    return [ranks * n for n in lengths]


def ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any):
    """kv (batch, local_length, 2, heads_kv, head_dim)."""
    k, v = _parts(kv, 2, arguments, options)
    return ring_flash_attn_func(q, k, v, *arguments, **options)


def ring_flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any):
    """qkv (batch, local_length, 3, heads, head_dim)."""
    q, k, v = _parts(qkv, 3, arguments, options)
    return ring_flash_attn_func(q, k, v, *arguments, **options)


def zigzag_ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any):
    """kv (batch, local_length, 2, heads_kv, head_dim)."""
    k, v = _parts(kv, 2, arguments, options)
    return zigzag_ring_flash_attn_func(q, k, v, *arguments, **options)


def zigzag_ring_flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any):
    """qkv (batch, local_length, 3, heads, head_dim)."""
    q, k, v = _parts(qkv, 3, arguments, options)
    return zigzag_ring_flash_attn_func(q, k, v, *arguments, **options)


def stripe_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any):
    """kv (batch, local_length, 2, heads_kv, head_dim)."""
    k, v = _parts(kv, 2, arguments, options)
    return stripe_flash_attn_func(q, k, v, *arguments, **options)


def stripe_flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any):
    """qkv (batch, local_length, 3, heads, head_dim)."""
    q, k, v = _parts(qkv, 3, arguments, options)
    return stripe_flash_attn_func(q, k, v, *arguments, **options)


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor | Sequence[int], *arguments: Any, **options: Any
):  # fmt: skip
    """kv (local_length, 2, heads_kv, head_dim), of packed documents."""
    k, v = _parts(kv, 2, arguments[1:], options, "local_length")
    return zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, *arguments, **options)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor | Sequence[int], *arguments: Any, **options: Any
):  # fmt: skip
    """qkv (local_length, 3, heads, head_dim), of packed documents."""
    q, k, v = _parts(qkv, 3, arguments[1:], options, "local_length")
    return zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, *arguments, **options)


def _parts(
    x: Tensor, count: int, arguments: tuple, options: dict[str, Any], rows: str = "batch, local_length"
) -> tuple[Tensor, ...]:  # fmt: skip
    dims = 3 + len(rows.split(","))
    if isinstance(x, Tensor) and x.dim() == dims and x.shape[-3] == count:
        return x.unbind(-3)
    got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    error = InvalidInputError(f"expected a tensor ({rows}, {count}, heads, head_dim), got {got}")
    group = options.get("group", arguments[7] if len(arguments) > 7 else None)
    _transport(group).agree("", error)  # raises it, here and on the other ranks
    raise error
