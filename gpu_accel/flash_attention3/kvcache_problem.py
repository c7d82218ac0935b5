"""A checked call of `flash_attn_with_kvcache`: what the kernels, the reference and the launcher look at.

Scales of 8- and 4-bit caches come in any of these shapes and are seen as strides over (page or batch, token, head,
group), 0 where one scale serves all:

    ()                                            one for the cache
    (heads_kv,), (batch, heads_kv)                one for a head [of a sequence]; the second is FlashAttention-3's
    (pages, 1, heads_kv)                          one for a page and head     (batch_cache, 1, heads_kv) without pages
    (pages, page_size, heads_kv)                  one for every token         (batch_cache, seqlen, heads_kv)
    (pages, page_size, heads_kv, groups)          int4 only: one for every head_dim / groups neighbours of head_dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INTEGERS = {torch.int8: "int8", torch.uint8: "int4"}
EIGHT_BITS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0, "int4": 7.0, "": 0.0}
NO_SCALES, HEAD_SCALES, TOKEN_SCALES = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Scales:
    """A tensor of scales and its strides over (page or batch, token, head, group)."""

    tensor: Tensor | None
    mode: int
    strides: tuple[int, int, int, int]
    groups: int = 1
    per_token: bool = False  # every token and head has its own: an append writes it


@dataclass(frozen=True, kw_only=True)
class KVCall:
    """Validated arguments, in the shapes that `flash_attn_with_kvcache` documents."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    cache_seqlens: Tensor | None
    length: int  # of every sequence before the append, when there is no cache_seqlens
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    sinks: Tensor | None
    num_splits: int
    batch_invariant: bool
    k_scales: Scales
    v_scales: Scales

    @property
    def kind(self) -> str:
        """e4m3, e5m2, int8, int4; empty for a cache in the dtype of q."""
        return "int4" if self.k_cache.dtype == torch.uint8 else EIGHT_BITS.get(self.k_cache.dtype, "")

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8 * self.k_cache.element_size()

    @property
    def heads_kv(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.heads_kv

    @property
    def head_dim_v(self) -> int:
        return self.v_cache.shape[3] * (2 if self.kind == "int4" else 1)

    @property
    def page_size(self) -> int:
        """0 without pages."""
        return self.k_cache.shape[1] if self.page_table is not None else 0

    @property
    def capacity(self) -> int:
        """Positions that a sequence can have."""
        if self.page_table is None:
            return self.k_cache.shape[1]
        return self.page_table.shape[1] * self.page_size

    @property
    def new(self) -> int:
        """Tokens appended to each sequence."""
        return 0 if self.k is None else self.k.shape[1]

    @property
    def rotary_dim(self) -> int:
        return 0 if self.rotary_cos is None else 2 * self.rotary_cos.shape[1]

    @property
    def advance(self) -> bool:
        """Whether each query is turned by its place (causal or windowed), as in flash-attn, or all by the first."""
        return self.window_left >= 0 or self.window_right >= 0
