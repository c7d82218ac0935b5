"""What attention results are judged by: the float64 truth, and the yardstick that torch's own operations set.

`attention_truth` and `attention_truth_backward` come from `gpu_accel.flash_attention3.reference`. The yardstick is the
plain chain matmul, mask, softmax, matmul in the dtype of the inputs: what `scaled_dot_product_attention` does with its
math backend when half-precision reductions are allowed, written out because that backend knows neither soft caps nor
bottom-right causal masks nor log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from gpu_accel.testing.inputs import split_varlen

if TYPE_CHECKING:
    from gpu_accel.flash_attention3.reference import attention_truth as attention_truth

_FROM_REFERENCE = ("attention_truth", "attention_truth_backward")
_SCORES_AT_ONCE = 1 << 27  # elements of one block of scores, 256 MiB in bfloat16


def __getattr__(name: str) -> Any:
    if name in _FROM_REFERENCE:  # lazily, because the reference imports from the library that these helpers test
        from gpu_accel.flash_attention3 import reference

        return getattr(reference, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def attention_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    device: torch.device | str = "cpu",
    first_row: int = 0,
    rows: int | None = None,
) -> torch.Tensor | None:
    """True where query i may see key j, shape (rows, seqlen_k), or None when every pair is allowed.

    Bottom-right aligned: query i stands at key i + seqlen_k - seqlen_q. The window counts keys to the left and right of
    that place, both ends inclusive; -1 or None is without limit. Causal means nothing to the right of it.
    """
    left, right = (None if side is None or side < 0 else side for side in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    rows = seqlen_q - first_row if rows is None else rows
    place = torch.arange(first_row, first_row + rows, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    allowed = torch.ones(rows, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        allowed &= key >= place - left
    if right is not None:
        allowed &= key <= place + right
    return allowed


def yardstick_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    heads_at_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain torch operations, each rounding to the dtype of the inputs.

    q (batch, seqlen_q, heads, d), k (batch, seqlen_k, heads_kv, d), v (batch, seqlen_k, heads_kv, d_v); with
    `cu_seqlens_*` (total, heads, d). Returns o, like q but with d_v, and the natural-log lse in float32,
    (batch, heads, seqlen_q) or (heads, total_q). The lse is computed in float32 from the inputs as given, because that
    is how every kernel keeps it: a yardstick rounded to bfloat16 would excuse errors a thousand times too large. Rows
    that see no key give 0 and -inf. `heads_at_once` computes as many heads as fit in one product each, which batches of
    many short sequences want; a library may round that differently, by no more than it errs one by one.
    """
    options = _Options(q, softmax_scale, causal, window_size, softcap)
    with torch.no_grad():
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            pairs = zip(
                split_varlen(q, cu_seqlens_q), split_varlen(k, cu_seqlens_k), split_varlen(v, cu_seqlens_k), strict=True
            )
            parts = [_forward(*each, options) for each in pairs]
            return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], dim=-1)
        return _forward(q, k, v, options, heads_at_once)


def yardstick_attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    heads_at_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of `yardstick_attention` by torch's autograd, in the dtype of the inputs; same options."""
    options = _Options(q, softmax_scale, causal, window_size, softcap)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        parts = zip(
            split_varlen(do, cu_seqlens_q),
            split_varlen(q, cu_seqlens_q),
            split_varlen(k, cu_seqlens_k),
            split_varlen(v, cu_seqlens_k),
            strict=True,
        )
        grads = [_backward(*each, options) for each in parts]
        dq, dk, dv = (torch.cat([g[i][0] for g in grads]) for i in range(3))
        return dq, dk, dv
    return _backward(do, q, k, v, options, heads_at_once)


class _Options:
    def __init__(
        self,
        q: torch.Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        softcap: float,
    ) -> None:
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
        self.causal, self.window_size, self.softcap = causal, window_size, softcap

    def mask(self, seqlen_q: int, seqlen_k: int, device: torch.device, first: int, rows: int) -> torch.Tensor | None:
        return attention_mask(
            seqlen_q,
            seqlen_k,
            causal=self.causal,
            window_size=self.window_size,
            device=device,
            first_row=first,
            rows=rows,
        )

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = _product(q * self.scale, k.transpose(-1, -2))
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores


def _groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at_once: bool
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(which, q, k, v) of each group of heads that share keys: one at a time bounds the memory; `at_once` takes as many
    as the bound allows, for a thousand groups of short sequences are a thousand times the launches.

    q (group, rows, d), k (seqlen_k, d), v (seqlen_k, d_v), with one more dimension in front where there are several.
    """
    by_group, keys, values = (_by_group(t, k.shape[2]) for t in (q, k, v))
    keys, values = keys[:, 0], values[:, 0]
    each = by_group.shape[1] * q.shape[1] * k.shape[1]
    many = max(1, _SCORES_AT_ONCE // max(each, 1)) if at_once else 1
    for first in range(0, len(by_group), many):
        which = slice(first, min(first + many, len(by_group)))
        parts = (t[which] for t in (by_group, keys, values))
        one, two, three = parts if which.stop - first > 1 else (t.squeeze(0) for t in parts)
        yield which, one, two, three


def _by_group(t: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """(batch, seqlen, heads, d) -> (batch * heads_kv, heads / heads_kv, seqlen, d)."""
    batch, seqlen, heads, d = t.shape
    return t.reshape(batch, seqlen, heads_kv, heads // max(heads_kv, 1), d).permute(0, 2, 3, 1, 4).flatten(0, 1)


def _from_groups(t: torch.Tensor, batch: int) -> torch.Tensor:
    """(batch * heads_kv, heads / heads_kv, seqlen, d) -> (batch, seqlen, heads, d), contiguous."""
    return t.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: _Options
) -> torch.Tensor:
    """q (..., group, rows, d), k (..., seqlen_k, d), v (..., seqlen_k, d_v) -> (..., group, rows, d_v)."""
    scores = options.scores(q, k)
    if mask is None:
        return _product(torch.softmax(scores, dim=-1), v)
    blind = ~mask.any(-1, keepdim=True)
    # A row of -inf alone would make its softmax and all gradients NaN: leave it unmasked and zero it afterwards.
    scores = scores.masked_fill(~(mask | blind), -math.inf)
    return _product(torch.softmax(scores, dim=-1).masked_fill(blind, 0.0), v)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(..., group, rows, n) times (..., n, m): the heads of a group are rows of one product."""
    return (a.flatten(-3, -2) @ b).unflatten(-2, a.shape[-3:-1])


def _lse(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, options: _Options) -> torch.Tensor:
    scores = options.scores(q.float(), k.float())
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.logsumexp(scores, dim=-1)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options, at_once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    o = q.new_zeros(batch, seqlen_q, heads, v.shape[-1])
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float32, device=q.device)
    if not seqlen_k or not o.numel() and not lse.numel():
        return o, lse
    outs = o.new_zeros(batch * k.shape[2], heads // k.shape[2], seqlen_q, v.shape[-1])
    lses = lse.view(batch * k.shape[2], -1, seqlen_q)
    for which, query, key, value in _groups(q, k, v, at_once):
        step = max(1, _SCORES_AT_ONCE // (seqlen_k * max(query.shape[:-2].numel(), 1)))
        for first in range(0, seqlen_q, step):
            rows = slice(first, min(first + step, seqlen_q))
            mask = options.mask(seqlen_q, seqlen_k, q.device, first, rows.stop - first)
            block = query[..., rows, :]
            outs[which, :, rows] = _attend(block, key, value, mask, options)
            lses[which, :, rows] = _lse(block, key, mask, options)
    return _from_groups(outs, batch), lse


def _backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: _Options, at_once: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if not k.numel() or not q.numel():
        return dq, dk, dv
    mask = options.mask(q.shape[1], k.shape[1], q.device, 0, q.shape[1])
    heads_kv = k.shape[2]
    found, given = [torch.empty_like(_by_group(t, heads_kv)) for t in (q, k, v)], _by_group(do, heads_kv)
    for which, *inputs in _groups(q, k, v, at_once):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        with torch.enable_grad():
            o = _attend(leaves[0], leaves[1], leaves[2], mask, options)
            grads = torch.autograd.grad(o, leaves, given[which].reshape(o.shape))
        for whole, part in zip(found, grads, strict=True):
            whole[which] = part.reshape(whole[which].shape)
    dq, dk, dv = (_from_groups(t, q.shape[0]) for t in found)
    return dq, dk, dv
