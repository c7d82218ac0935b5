"""Attention of Hugging Face models: `register()`, then `attn_implementation="gpu_accel_fa3"`.

transformers asks two registries: one for the attention function, one for the function that makes its mask; a name that
is only in the first gets no mask at all, padding included. Ours gives None where every key counts, and otherwise a
tensor of four dimensions, because transformers takes a mask of two for padding that is yet to become one:

    int32 (batch, 1, 1 + w, keys)   causal: the number of the segment that each key belongs to, -1 for padding; queries
                                    are the last columns; w > 0 is a sliding window of w keys (the rows are one row)
    bool (batch, 1, 1, keys)        both directions (encoders, cross attention): whether a key counts, for every query

The window is in the mask because not every model says it to its attention function (PhiMoE does not).

Attention then packs what counts and runs on sequences of their own lengths, so padded batches, packed sequences and
chunked attention need no dense mask. Rows of padding are 0 (eager attention lets them see something): leave them out
of a loss, the last one before a sequence begins too, which would predict its first token. A mask that these cannot
express is refused, never approximated. As in transformers, `is_causal` says what None means, and only that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.api import flash_attn_func, flash_attn_varlen_func

NAME = "gpu_accel_fa3"
_PROBES = 8  # random keys per query that a mask is tried at, besides the edges of what it should allow


def register(name: str = NAME) -> str:
    """Make `name` known to transformers as an attention implementation, with its mask, and return it.

    Raises:
        UnsupportedError: transformers is missing, or older than its two registries (4.53).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedError(f"needs transformers 4.53 (pip install 'gpu-accel[models]'): {error}") from error
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, segments_of_mask)
    return name


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v (batch, heads, seqlen, head_dim) -> o (batch, seqlen, heads, head_dim).

    `attention_mask` is what :func:`segments_of_mask` gave. Outputs of padded queries of a causal model are 0.

    Raises:
        UnsupportedError: dropout, attention weights, or a bias are asked for; or a mask that this library did not make.
    """
    if dropout:
        raise UnsupportedError(f"no dropout inside attention: set attention_dropout=0.0 (it is {dropout})")
    for option in ("output_attentions", "position_bias", "head_mask"):
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise UnsupportedError(f"{option} needs the matrix of probabilities: use attn_implementation='eager'")
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if attention_mask is not None:
        causal = attention_mask.dtype != torch.bool
        if causal and attention_mask.dim() == 4 and attention_mask.shape[2] > 1:
            sliding_window = attention_mask.shape[2] - 1
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0}
    if sliding_window is not None:  # w keys, the query among them
        options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if s_aux is not None:
        options["sinks"] = s_aux
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        return flash_attn_func(q, k, v, **options), None
    rows = attention_mask.shape[2] if causal and attention_mask.dim() == 4 else 1
    if attention_mask.dtype not in (torch.int32, torch.bool) or attention_mask.shape[1:-1] != (1, rows):
        raise UnsupportedError(
            f"a mask of shape {tuple(attention_mask.shape)}, {attention_mask.dtype}: only masks that transformers asks "
            f"{NAME} for are understood; pass a padding mask (batch, seqlen) to the model, or use 'sdpa'"
        )
    if not causal:
        return _padded(q, k, v, attention_mask[:, 0, 0], **options), None
    if attention_mask.stride(-1) == 0 and attention_mask.shape[-1] == k.shape[1]:  # a window and nothing else
        return flash_attn_func(q, k, v, **options), None
    return _segmented(q, k, v, attention_mask[:, 0, 0], windowed=sliding_window is not None, **options), None


def _padded(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """Attention of every query to the keys that count, (batch, keys) bool, in both directions."""
    batch, queries = q.shape[:2]
    if counts.shape[1] != k.shape[1]:
        raise InvalidInputError(f"{k.shape[1]} keys, but a mask of {counts.shape[1]}")
    if 0 <= options.pop("window_size", (-1, -1))[0] < k.shape[1] - 1:
        raise UnsupportedError("a window in both directions with a mask: use 'sdpa' or 'eager'")
    counts = counts.expand(batch, -1)
    cu_q = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * queries
    cu_k = torch.nn.functional.pad(counts.sum(1).cumsum(0), (1, 0)).int()
    o = flash_attn_varlen_func(
        q.flatten(0, 1), k[counts], v[counts], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options
    )
    return o.unflatten(0, (batch, queries))  # type: ignore[union-attr]


def _segmented(q: Tensor, k: Tensor, v: Tensor, segments: Tensor, *, windowed: bool, **options: Any) -> Tensor:
    """Attention within segments (batch, keys); the queries are their last columns."""
    batch, queries = q.shape[:2]
    keys = segments.shape[1]
    if queries > keys or k.shape[1] < keys:
        raise InvalidInputError(f"{queries} queries, {k.shape[1]} keys, but a mask of {keys}")
    k, v = k[:, :keys], v[:, :keys]  # a static cache is longer than what it holds
    kept_k = segments >= 0
    kept_q = kept_k[:, keys - queries :]
    numbered = segments + torch.arange(batch, device=segments.device, dtype=torch.int32)[:, None] * keys
    of_q, of_k = numbered[:, keys - queries :][kept_q], numbered[kept_k]
    if windowed:
        place = torch.arange(keys, device=segments.device).expand(batch, keys)[kept_k]
        if bool(((place.diff() != 1) & (of_k.diff() == 0)).any()):
            raise UnsupportedError("padding between the tokens of a sequence changes distances inside a sliding window")
    names = of_k.unique_consecutive()
    cu_k = torch.searchsorted(of_k, torch.cat([names, names[-1:] + 1])).int()
    cu_q = torch.searchsorted(of_q, torch.cat([names, names[-1:] + 1])).int()
    shape = (batch, queries, q.shape[2], v.shape[-1])
    if not len(of_q):
        return q.new_zeros(shape)
    found = flash_attn_varlen_func(q[kept_q], k[kept_k], v[kept_k], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert isinstance(found, Tensor)  # without lse
    o = found.new_zeros(shape)  # not q: autocast chooses the dtype
    o[kept_q] = found
    return o


def segments_of_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """transformers' mask function: None, or which keys count and in what segments, see the head of this file.

    `mask_function(batch, head, query, key)` says who sees whom. Where it is not plainly causal, every edge of the
    segments found and some random pairs are compared with it.

    Raises:
        UnsupportedError: the mask is no set of segments, or depends on more than indices.
    """
    if use_vmap:
        raise UnsupportedError(f"{NAME} understands masks of segments, not functions added to the mask of a model")
    if mask_function is not None and mask_function is _both_directions():
        return _counts(attention_mask, batch_size, kv_length, kv_offset, allow_is_bidirectional_skip, device)
    start = int(q_offset) - kv_offset
    keys = start + q_length  # a static cache has more room than keys
    if not 0 < keys <= kv_length:
        raise UnsupportedError(f"queries at {start} to {keys} of {kv_length} keys")
    plain = mask_function is None or (allow_is_causal_skip and (local_size is None or keys <= local_size))
    segments = torch.zeros((), dtype=torch.int32, device=device).expand(batch_size, keys)
    window = 0
    if not plain:
        assert mask_function is not None
        found, ahead, window = _segments(mask_function, batch_size, keys, start, kv_offset, local_size, device)
        several = bool(found.any())
        segments = found if several else segments
        if ahead:
            if keys != kv_length or several or window:
                raise UnsupportedError("segments, a window, or part of a cache in both directions: use 'sdpa'")
            return _counts(attention_mask, batch_size, kv_length, kv_offset, allow_is_bidirectional_skip, device)
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + keys].bool()
        if padding.shape[1] != keys:
            raise UnsupportedError(f"a padding mask of {attention_mask.shape[1]} columns for {kv_offset + keys} keys")
        padding = None if bool(padding.all()) else padding
    if padding is None and keys == kv_length and not window and segments.stride(-1) == 0:
        return None
    if padding is not None:
        segments = segments.masked_fill(~padding.to(segments.device), -1)
    return segments[:, None, None].expand(-1, -1, 1 + window, -1)


def _both_directions() -> Callable[..., Tensor] | None:
    """transformers' own mask function of encoders and cross attention, in versions that have one."""
    from transformers import masking_utils

    return getattr(masking_utils, "bidirectional_mask_function", None)


def _counts(
    padding: Tensor | None, batch: int, keys: int, kv_offset: int, may_skip: bool, device: torch.device | str
) -> Tensor | None:
    """The mask in both directions: whether a key counts, bool (batch, 1, 1, keys)."""
    if padding is None:
        return None if may_skip else torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=device)
    counts = padding[:, kv_offset : kv_offset + keys].bool()
    if counts.shape[1] != keys:
        raise UnsupportedError(f"a padding mask of {padding.shape[1]} columns for {kv_offset + keys} keys")
    return None if may_skip and bool(counts.all()) else counts[:, None, None].to(device)


def _segments(
    sees: Callable[..., Tensor],
    batch: int,
    keys: int,
    start: int,
    kv_offset: int,
    local_size: int | None,
    device: torch.device | str,
) -> tuple[Tensor, bool, int]:
    """The segments, whether queries see ahead, and the sliding window or 0.

    A key begins a segment where it does not see the one before it; then everything else is checked.
    """
    rows = torch.arange(batch, device=device)[:, None, None]
    place = torch.arange(keys, device=device)

    def ask(query: Tensor, key: Tensor) -> Tensor:
        """(batch, queries, keys a query), from query (queries,) and key (batch or 1, queries, keys a query)."""
        at = sees(rows, torch.zeros_like(rows), query[None, :, None] + kv_offset, key + kv_offset)
        return torch.as_tensor(at, device=device).expand(batch, *key.shape[1:])

    joined = ask(place[1:], place[None, :-1, None])[..., 0]
    segments = torch.nn.functional.pad((~joined).cumsum(-1), (1, 0)).int()
    first = torch.where(torch.nn.functional.pad(~joined, (1, 0), value=True), place, 0).cummax(-1).values

    queries = place[start:]
    first = first[:, start:]
    edges = [queries.expand_as(first), first, first - 1, queries + 1 + torch.zeros_like(first)]
    if local_size is not None:
        edges += [queries - local_size + torch.zeros_like(first), queries - local_size + 1 + torch.zeros_like(first)]
    generator = torch.Generator().manual_seed(keys)
    tried = torch.randint(keys, (batch, len(queries), _PROBES), generator=generator).to(device)
    tried = torch.cat([torch.stack(edges, -1).clamp(0, keys - 1), tried], -1)
    seen = ask(queries, tried)
    ahead = bool(ask(place[:-1], place[None, 1:, None]).any())  # a bidirectional model
    distance = queries[None, :, None] - tried
    same = segments.gather(1, tried.flatten(1)).view_as(tried) == segments[:, start:, None]
    allowed = same if ahead else same & (distance >= 0)
    windowed = allowed if local_size is None else allowed & (distance.abs() < local_size)
    whole = torch.equal(seen, allowed)
    if not (whole or torch.equal(seen, windowed)):
        raise UnsupportedError("this mask is no causal or full attention within segments: use 'sdpa' or 'eager'")
    return segments, ahead, 0 if whole or local_size is None else local_size
