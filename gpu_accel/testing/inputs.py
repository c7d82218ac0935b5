"""Inputs for attention that find bugs: odd memory layouts, outliers, and NaN wherever no kernel may read.

Every maker takes an explicit seed or generator and draws the same values whatever the `kind` of memory, so that the
result on `packed`, `strided`, `poisoned`, ... memory can be compared bit for bit with the result on `normal` memory.
Only `outliers` (other values) and `broadcast` (repeated values) differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing.poison import poison_

Layout = Literal["bshd", "bhsd", "thd"]
Kind = Literal["normal", "outliers", "strided", "packed", "broadcast", "transposed", "poisoned", "misaligned"]

KINDS: tuple[str, ...] = (
    "normal",  # N(0, 1), contiguous
    "outliers",  # N(0, 1) + N(0, 100) * Bernoulli(0.001): FlashAttention-3, section 4.3
    "strided",  # rows of a wider and longer buffer, with ordinary numbers in the slack
    "packed",  # q, k, v are views of one fused tensor, as a fused projection leaves them
    "broadcast",  # stride 0: q over the batch, k and v over their heads
    "transposed",  # the memory order of the other layout
    "poisoned",  # NaN before, after and between the valid rows
    "misaligned",  # contiguous, but starting one element into its storage
)
LAYOUTS: tuple[str, ...] = ("bshd", "bhsd", "thd")

OUTLIER_RATE = 0.001
OUTLIER_STD = 10.0
SLACK = 16  # elements, so that rows stay 16-byte aligned even for one-byte dtypes, as TMA demands
GUARD_ROWS = 3  # rows of NaN on both sides of the valid region


class QKV(NamedTuple):
    """Inputs of attention in one layout; unpacks as `q, k, v`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class VarlenInputs(NamedTuple):
    """Packed sequences: q (total_q, heads, d), k and v (total_k, heads_kv, d), int32 offsets (batch + 1,)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seeded generator of a device. The same seed gives different numbers on a CPU and on a GPU."""
    return torch.Generator(device=device).manual_seed(seed)


def random_values(
    shape: Sequence[int],
    *,
    kind: Kind = "normal",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    generator: torch.Generator,
) -> torch.Tensor:
    """Contiguous random numbers: N(0, 1), or with `kind="outliers"` the outlier distribution. fp8 dtypes saturate."""
    values = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
    if kind == "outliers":
        hit = torch.rand(*shape, generator=generator, device=device) < OUTLIER_RATE
        values += OUTLIER_STD * torch.randn(*shape, generator=generator, device=device) * hit
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values.clamp_(-limit, limit)  # whether torch's own cast saturates depends on its version
    return values.to(dtype)


def random_like(tensor: torch.Tensor, *, seed: int, kind: Kind = "normal") -> torch.Tensor:
    """Contiguous random numbers of the shape, dtype and device of `tensor`; for output gradients."""
    source = generator(seed, tensor.device)
    return random_values(tensor.shape, kind=kind, dtype=tensor.dtype, device=tensor.device, generator=source)


def make_qkv(
    *,
    batch: int,
    seqlen_q: int,
    heads: int,
    head_dim: int,
    seqlen_k: int | None = None,
    heads_kv: int | None = None,
    head_dim_v: int | None = None,
    layout: Layout = "bshd",
    kind: Kind = "normal",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    source: torch.Generator | None = None,
) -> QKV:
    """Make q, k and v for attention.

    Shapes, for layout "bshd": q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v). "bhsd" swaps the middle dimensions; "thd" joins the first two (sequences
    of equal length; `make_varlen` makes unequal ones). The last dimension always has stride 1.

    `seqlen_k`, `heads_kv` and `head_dim_v` default to those of q. `source`, a generator on `device`, takes the place of
    `seed`. With kind "packed" q joins the fused tensor only where its sequence length is that of k; k and v always
    share one. Raises InvalidInputError for an unknown layout or kind, and for "packed" with head_dim_v != head_dim.
    """
    if layout not in LAYOUTS:
        raise InvalidInputError(f"layout {layout!r} is unknown; one of {', '.join(LAYOUTS)}")
    if kind not in KINDS:
        raise InvalidInputError(f"kind {kind!r} is unknown; one of {', '.join(KINDS)}")
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_kv = heads if heads_kv is None else heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    if kind == "packed" and head_dim_v != head_dim:
        raise InvalidInputError(f"kind 'packed' needs head_dim_v == head_dim, got {head_dim_v} and {head_dim}")
    source = generator(seed, device) if source is None else source
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
    )
    values = [random_values(s, kind=kind, dtype=dtype, device=device, generator=source) for s in shapes]
    if layout == "thd":
        values = [t.reshape(1, -1, *t.shape[2:]) for t in values]
    if kind == "packed":
        placed = _pack(*values)
    elif kind == "broadcast":
        q, k, v = values
        placed = [q[:1].expand_as(q), k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)]
    else:
        placed = [_place(t, kind, layout) for t in values]
    if layout == "bhsd":
        return QKV(*(t.transpose(1, 2) for t in placed))
    return QKV(*(t[0] for t in placed)) if layout == "thd" else QKV(*placed)


def make_varlen(
    *,
    lengths_q: Sequence[int],
    heads: int,
    head_dim: int,
    lengths_k: Sequence[int] | None = None,
    heads_kv: int | None = None,
    head_dim_v: int | None = None,
    kind: Kind = "normal",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> VarlenInputs:
    """Sequences of given lengths (zeros allowed) one after another in layout "thd", with their int32 offsets.

    With kind "poisoned" there is NaN before the first and after the last sequence and between rows.
    """
    lengths_k = lengths_q if lengths_k is None else lengths_k
    if len(lengths_q) != len(lengths_k):
        raise InvalidInputError(
            f"{len(lengths_q)} query lengths but {len(lengths_k)} key lengths; give one per sequence"
        )
    q, k, v = make_qkv(
        batch=1,
        seqlen_q=sum(lengths_q),
        seqlen_k=sum(lengths_k),
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        layout="thd",
        kind=kind,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    return VarlenInputs(
        q,
        k,
        v,
        _offsets(lengths_q, device),
        _offsets(lengths_k, device),
        max(lengths_q, default=0),
        max(lengths_k, default=0),
    )


def split_varlen(tensor: torch.Tensor, cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """The sequences of a packed (total, heads, d) tensor as views of shape (1, length, heads, d)."""
    edges = cu_seqlens.tolist()
    return [tensor[start:stop].unsqueeze(0) for start, stop in zip(edges, edges[1:], strict=False)]


def _offsets(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    return torch.tensor(edges, dtype=torch.int32, device=device)


def _pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    heads, heads_kv = q.shape[2], k.shape[2]
    if q.shape[1] == k.shape[1]:
        return list(torch.cat([q, k, v], dim=2).split([heads, heads_kv, heads_kv], dim=2))
    return [q, *torch.cat([k, v], dim=2).split([heads_kv, heads_kv], dim=2)]


def _place(tensor: torch.Tensor, kind: Kind, layout: Layout) -> torch.Tensor:
    """Copy contiguous bshd values into the memory that `kind` asks for; returns the bshd view of it."""
    batch, seqlen, heads, dim = tensor.shape
    head_major = layout == "bhsd"
    if kind == "transposed":
        head_major = not head_major
    if kind in ("normal", "outliers", "transposed"):
        return tensor.transpose(1, 2).contiguous().transpose(1, 2) if head_major else tensor
    if kind == "misaligned":
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        view = poison_(flat)[1:].view(tensor.shape)
    elif kind == "strided":
        size = (batch, 2 * seqlen + 1, heads, dim + SLACK)
        view = torch.full(size, 3.0, device=tensor.device).to(tensor.dtype)[:, 1::2, :, :dim]
    else:
        size = (batch, seqlen + 2 * GUARD_ROWS, heads + 1, dim + SLACK)
        buffer = poison_(torch.empty(size, dtype=tensor.dtype, device=tensor.device))
        view = buffer[:, GUARD_ROWS : GUARD_ROWS + seqlen, :heads, :dim]
    return view.copy_(tensor)
