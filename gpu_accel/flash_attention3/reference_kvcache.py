"""Attention over a KV cache in plain torch: slow, readable, and what the kernels are compared with.

Every sequence is gathered from its pages, dequantised, and given to `attention_reference`. Appending writes the same
numbers into the cache that the kernel writes. `quantize_cache` makes 8- and 4-bit caches and their scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.fp8_quantize import FORMATS
from gpu_accel.flash_attention3.kvcache_problem import LARGEST, TOKEN_SCALES, KVCall, Scales
from gpu_accel.flash_attention3.reference import attention_reference, without_autocast
from gpu_accel.flash_attention3.rotary import apply_rotary

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8, "int4": torch.uint8}
GRANULARITIES = ("tensor", "head", "page", "token")
_TINY = 2.0**-100


def encode(x: Tensor, kind: str) -> Tensor:
    """Numbers divided by their scale -> codes of "e4m3", "e5m2", "int8" or "int4" (two a byte, low nibble first)."""
    x = x.float().clamp(-LARGEST[kind], LARGEST[kind])
    if kind in FORMATS:
        return x.to(_DTYPES[kind])
    x = x.round().to(torch.int8)
    if kind == "int8":
        return x
    return ((x[..., ::2] & 15) | (x[..., 1::2] << 4)).view(torch.uint8)


def decode(codes: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes stand for, before their scale."""
    if kind != "int4":
        return codes.to(dtype)
    signed = codes.view(torch.int8)
    return torch.stack([(signed << 4) >> 4, signed >> 4], -1).flatten(-2).to(dtype)


def scale_of(largest: Tensor, kind: str) -> Tensor:
    """The scale that brings `largest` to the largest number of the format; 1 where there is nothing but zeros."""
    return torch.where(largest > LARGEST[kind] * _TINY, largest / LARGEST[kind], 1.0).float()


def largest_of(size: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude over `dims`, as the kernels find it: NaN does not count, and of nothing it is 0."""
    if not size.numel():
        return size.sum(dims)
    return size.where(size == size, 0.0).amax(dims)


def quantize_cache(x: Tensor, kind: str, granularity: str = "head", *, groups: int = 1) -> tuple[Tensor, Tensor]:
    """A cache in 8 or 4 bits, and its scales in one of the shapes that `flash_attn_with_kvcache` takes.

    Args:
        x: (pages, page_size, heads_kv, head_dim), or (batch_cache, seqlen, heads_kv, head_dim) without pages. Finite:
            a scale of Inf makes its other numbers 0, and integers have no code for NaN, which becomes 0.
        kind: "e4m3", "e5m2", "int8" or "int4".
        granularity: "tensor" (), "head" (heads_kv,), "page" (pages, 1, heads_kv), "token" (pages, page_size, heads_kv).
        groups: with int4 and "token", scales along head_dim: (pages, page_size, heads_kv, groups).

    Returns:
        Codes of the shape of x (int4: half the last dimension, uint8), and scales in float32.

    Raises:
        InvalidInputError: another kind, granularity, shape or dtype; groups where there are none, or that do not fit.
    """
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInputError(f"x must be a tensor of floats (pages, page_size, heads_kv, head_dim), got {got}")
    for name, given, known in (("kind", kind, tuple(_DTYPES)), ("granularity", granularity, GRANULARITIES)):
        if not isinstance(given, str) or given not in known:
            raise InvalidInputError(f"{name} must be one of {', '.join(known)}, got {shown(given)}")
    if type(groups) is not int or groups < 1 or x.shape[-1] % groups:
        raise InvalidInputError(f"groups must divide head_dim, {x.shape[-1]}, got {shown(groups)}")
    if groups > 1 and (kind, granularity) != ("int4", "token"):
        raise InvalidInputError(f"groups go with int4 and a scale for each token, not {kind} and {granularity}")
    if kind == "int4" and x.shape[-1] % 2:
        raise InvalidInputError(f"int4 keeps two numbers in a byte: head_dim must be even, got {x.shape[-1]}")
    wide = x.float()
    size = wide.abs()
    if granularity == "tensor":
        scales = scale_of(largest_of(size, (0, 1, 2, 3)), kind)
        spread = scales.expand(wide.shape)
    elif granularity == "head":
        scales = scale_of(largest_of(size, (0, 1, 3)), kind)
        spread = scales[:, None].expand(wide.shape)
    elif granularity == "page":
        scales = scale_of(largest_of(size, (1, 3)), kind)[:, None]
        spread = scales[..., None].expand(wide.shape)
    else:
        parts = scale_of(largest_of(size.unflatten(-1, (groups, -1)), (-1,)), kind)
        spread = parts.repeat_interleave(x.shape[-1] // groups, -1)
        scales = parts if groups > 1 else parts[..., 0]
    return encode(wide / spread, kind), scales


def _scales_at(scales: Scales, dim: int, b: int, row: Tensor, place: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Scales of the keys at (row, place) of a cache, as (keys, heads, dim or 1)."""
    if scales.tensor is None:
        return torch.ones(len(row), heads, 1, dtype=dtype, device=row.device)
    s_row, s_place, s_head, s_group = scales.strides
    rows = row * s_row + place * s_place if scales.mode == TOKEN_SCALES else torch.full_like(row, b * s_row)
    head = torch.arange(heads, device=row.device) * s_head
    group = torch.arange(scales.groups, device=row.device) * s_group
    at = rows[:, None, None] + head[None, :, None] + group
    flat = scales.tensor.as_strided((_extent(scales.tensor),), (1,))
    return flat[at].to(dtype).repeat_interleave(dim // scales.groups, -1) if scales.groups > 1 else flat[at].to(dtype)


def _extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _places(call: KVCall, b: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(page or row of the cache, place in it) of positions of sequence b."""
    if call.page_table is not None:
        return call.page_table[b].long()[positions // call.page_size], positions % call.page_size
    row = b if call.cache_batch_idx is None else int(call.cache_batch_idx[b])
    return torch.full_like(positions, row), positions


def lengths(call: KVCall, b: int) -> tuple[int, int, int]:
    """(first key, length before the append, length after it) of sequence b."""
    before = call.length if call.cache_seqlens is None else int(call.cache_seqlens[b])
    before = min(max(before, 0), call.capacity)
    first = 0 if call.cache_leftpad is None else max(0, int(call.cache_leftpad[b]))
    return first, before, min(before + call.new, call.capacity)


def _write(call: KVCall, cache: Tensor, x: Tensor, scales: Scales, b: int, positions: Tensor) -> None:
    row, place = _places(call, b, positions)
    if not call.kind:
        cache[row, place] = x.to(cache.dtype)
        return
    wide = x.float()
    if scales.per_token:
        parts = scale_of(largest_of(wide.abs().unflatten(-1, (scales.groups, -1)), (-1,)), call.kind)
        scales.tensor[row, place] = parts if scales.tensor.dim() == 4 else parts[..., 0]
    spread = _scales_at(scales, x.shape[-1], b, row, place, call.heads_kv, torch.float32)
    codes = encode(wide / spread, call.kind)
    if cache.dtype.itemsize == 1:  # indexed assignment knows no fp8
        cache.view(torch.uint8)[row, place] = codes.view(torch.uint8)


def append(call: KVCall) -> None:
    """Turn the new keys by RoPE and write them and the new values into the cache."""
    for b in range(call.q.shape[0] if call.new else 0):
        _, before, after = lengths(call, b)
        positions = torch.arange(before, after, device=call.q.device)
        k, v = call.k[b, : len(positions)], call.v[b, : len(positions)]
        if call.rotary_dim:
            k = apply_rotary(k, call.rotary_cos, call.rotary_sin, positions, interleaved=call.rotary_interleaved)
        _write(call, call.k_cache, k, call.k_scales, b, positions)
        _write(call, call.v_cache, v, call.v_scales, b, positions)


def gather(call: KVCall, b: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys (n, heads_kv, head_dim) and values of sequence b as numbers of `dtype`, padding on the left left out."""
    first, _, total = lengths(call, b)
    positions = torch.arange(min(first, total), total, device=call.q.device)
    row, place = _places(call, b, positions)
    found = []
    for cache, scales in ((call.k_cache, call.k_scales), (call.v_cache, call.v_scales)):
        codes = cache.view(torch.uint8)[row, place].view(cache.dtype) if call.kind else cache[row, place]
        x = decode(codes, call.kind, dtype) if call.kind else codes.to(dtype)
        if call.kind:
            x = x * _scales_at(scales, x.shape[-1], b, row, place, call.heads_kv, dtype)
        found.append(x)
    return found[0], found[1]


def turned_query(call: KVCall, b: int) -> Tensor:
    """q of sequence b after RoPE, in its own dtype."""
    q = call.q[b]
    if not call.rotary_dim:
        return q
    _, before, _ = lengths(call, b)
    positions = before + torch.arange(q.shape[0], device=q.device) * int(call.advance)
    positions = positions.clamp(max=call.rotary_cos.shape[0] - 1)
    return apply_rotary(q, call.rotary_cos, call.rotary_sin, positions, interleaved=call.rotary_interleaved)


def with_sink(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a key of score `sinks` (heads,) and value 0 to o (batch, seqlen, heads, dim), lse (batch, heads, seqlen)."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    weight = torch.where(lse == float("-inf"), 0.0, torch.exp(lse - both))
    return o * weight.transpose(1, 2)[..., None].to(o.dtype), both


@without_autocast
def forward(call_q: Tensor, call: KVCall, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """o (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q) of a call whose append has been done.

    `call_q` is the q of the call (it tells `without_autocast` the device). dtype: computed and returned in it; default
    float32 (float64 for float64), o in the dtype of q.
    """
    compute = dtype or (torch.float64 if call_q.dtype == torch.float64 else torch.float32)
    outputs, lses = [], []
    for b in range(call_q.shape[0]):
        k, v = gather(call, b, compute)
        q = turned_query(call, b).to(compute)
        o, lse = attention_reference(
            q[None], k[None], v[None], softmax_scale=call.softmax_scale,
            window_size=(call.window_left, call.window_right), softcap=call.softcap, dtype=compute,
        )  # fmt: skip
        if call.sinks is not None:
            o, lse = with_sink(o, lse, call.sinks)
        outputs.append(o)
        lses.append(lse)
    if not outputs:
        batch, sq, heads, _ = call_q.shape
        empty = torch.zeros(batch, sq, heads, call.head_dim_v, dtype=compute, device=call_q.device)
        return empty.to(dtype or call_q.dtype), empty.new_zeros(batch, heads, sq)
    return torch.cat(outputs).to(dtype or call_q.dtype), torch.cat(lses)
