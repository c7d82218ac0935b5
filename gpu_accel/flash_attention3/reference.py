"""Attention in plain torch: slow, readable, and the truth that every kernel is compared with.

    s = softcap * tanh(scale * q k^T / softcap)        (softcap = 0: no cap)
    p = softmax over the visible keys of s,  o = p v,  lse = log sum exp s   (natural logarithm)

Key `j` is visible to query `i` when  `i + sk - sq - left <= j <= i + sk - sq + right`  (bottom-right aligned, both
ends included, a negative bound is no bound; causal is right = 0). A row that sees nothing has o = 0, lse = -inf and
zero gradients. Everything runs in chunks of query rows, so memory stays bounded, and in float64 when asked to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_CHUNK = 1 << 25  # elements of the score matrix held at once


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function with torch.autocast off on the device of its first tensor: a reference computes as it says."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        with torch.autocast("cuda" if x is not None and x.is_cuda else "cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def _bounds(window_size: tuple[int | None, int | None], causal: bool) -> tuple[int, int]:
    left, right = (-1 if w is None or w < 0 else int(w) for w in window_size)
    if causal:
        right = 0
    return left, right


def visible(rows: Tensor, sq: int, sk: int, left: int, right: int) -> Tensor:
    """Boolean mask (len(rows), sk): which keys the query rows see. Negative `left` or `right` is no bound."""
    keys = torch.arange(sk, device=rows.device)
    diagonal = rows[:, None] + (sk - sq)
    mask = torch.ones(len(rows), sk, dtype=torch.bool, device=rows.device)
    if left >= 0:
        mask &= keys >= diagonal - left
    if right >= 0:
        mask &= keys <= diagonal + right
    return mask


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Masked scores (g, rows, sk) and, with softcap, the tanh they came from."""
    s = torch.einsum("rgd,kd->grk", q, k) * scale
    t = None
    if softcap > 0:
        t = torch.tanh(s / softcap)
        s = t * softcap
    return s.masked_fill(~mask, float("-inf")), t


def _row_chunks(sq: int, sk: int, group: int, device: torch.device) -> Iterator[Tensor]:
    step = max(1, _CHUNK // max(1, sk * group))
    for start in range(0, sq, step):
        yield torch.arange(start, min(sq, start + step), device=device)


def _one_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, softcap: float):
    """One sequence, one key head: q (sq, g, d), k (sk, d), v (sk, dv) -> o (sq, g, dv), lse (g, sq)."""
    sq, group, _ = q.shape
    outputs, lses = [], []
    for rows in _row_chunks(sq, len(k), group, q.device):
        s, _ = _scores(q[rows], k, visible(rows, sq, len(k), left, right), scale, softcap)
        if len(k) == 0:
            outputs.append(q.new_zeros(len(rows), group, v.shape[-1]))
            lses.append(q.new_full((group, len(rows)), float("-inf")))
            continue
        m = s.detach().amax(-1, keepdim=True)
        m = torch.where(m == float("-inf"), 0.0, m)
        p = torch.exp(s - m)
        total = p.sum(-1, keepdim=True)
        empty = total == 0
        total = torch.where(empty, 1.0, total)  # an empty row divides 0 by 1: no NaN, and no gradient either
        outputs.append(torch.einsum("grk,kd->rgd", p / total, v))
        lses.append(torch.where(empty, float("-inf"), m + total.log()).squeeze(-1))
    if not outputs:
        return q.new_zeros(0, group, v.shape[-1]), q.new_zeros(group, 0)
    return torch.cat(outputs), torch.cat(lses, -1)


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, softcap: float):
    """One sequence with all heads: q (sq, h, d), k (sk, hk, d) -> o (sq, h, dv), lse (h, sq)."""
    heads_kv = k.shape[1]
    group = q.shape[1] // max(1, heads_kv)
    parts = [
        _one_forward(q[:, h * group : (h + 1) * group], k[:, h], v[:, h], scale, left, right, softcap)
        for h in range(heads_kv)
    ]
    if not parts:
        return q.new_zeros(q.shape[0], 0, v.shape[-1]), q.new_zeros(0, q.shape[0])
    return torch.cat([o for o, _ in parts], 1), torch.cat([lse for _, lse in parts], 0)


def _spans(cu: Tensor, used: Tensor | None) -> list[tuple[int, int]]:
    """(start, end) of each sequence, shortened to `used` rows when given."""
    ends = cu.tolist()
    lengths = used.tolist() if used is not None else [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return [(start, start + length) for start, length in zip(ends, lengths, strict=False)]


@without_autocast
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, differentiable by autograd.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens_*`. The heads of q are
            a multiple of those of k and v; the head_dim of v may differ.
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right) keys visible beside the diagonal; None or negative: all.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of packed sequences; `seqused_*` (batch,) shortens them.
        dtype: computed in this dtype and returned in it. Default: float64 for float64 inputs, otherwise computed in
            float32 and o returned in the dtype of q.

    Returns:
        o like q with the head_dim of v; lse (batch, heads, seqlen_q), packed (heads, total_q), natural logarithm.
    """
    compute = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out_dtype = dtype or q.dtype
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = _bounds(window_size, causal)
    qc, kc, vc = q.to(compute), k.to(compute), v.to(compute)
    if cu_seqlens_q is None:
        parts = [_dense_forward(qc[b], kc[b], vc[b], scale, left, right, softcap) for b in range(q.shape[0])]
        if not parts:
            batch, sq, heads, _ = q.shape
            return q.new_zeros(batch, sq, heads, v.shape[-1]).to(out_dtype), qc.new_zeros(batch, heads, sq)
        return torch.stack([o for o, _ in parts]).to(out_dtype), torch.stack([lse for _, lse in parts])

    o_parts, lse_parts, done = [], [], 0
    total, heads, dv = q.shape[0], q.shape[1], v.shape[-1]

    def pad_to(row: int) -> None:
        nonlocal done
        if row > done:  # rows that belong to no sequence
            o_parts.append(qc.new_zeros(row - done, heads, dv))
            lse_parts.append(qc.new_full((heads, row - done), float("-inf")))
            done = row

    for (q0, q1), (k0, k1) in zip(_spans(cu_seqlens_q, seqused_q), _spans(cu_seqlens_k, seqused_k), strict=True):
        pad_to(q0)
        o, lse = _dense_forward(qc[q0:q1], kc[k0:k1], vc[k0:k1], scale, left, right, softcap)
        o_parts.append(o)
        lse_parts.append(lse)
        done = q1
    pad_to(total)
    if not o_parts:
        return q.new_zeros(0, heads, dv).to(out_dtype), qc.new_zeros(heads, 0)
    return torch.cat(o_parts).to(out_dtype), torch.cat(lse_parts, -1)


def attention_truth(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor]:
    """:func:`attention_reference` in float64: the truth of every test and experiment."""
    return attention_reference(q, k, v, dtype=torch.float64, **options)


def _one_backward(do, dlse, q, k, v, o, lse, scale, left, right, softcap):
    """One sequence, one key head -> dq (sq, g, d), dk (sk, d), dv (sk, dv)."""
    sq, group, _ = q.shape
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if len(k) == 0:
        return dq, dk, dv
    for rows in _row_chunks(sq, len(k), group, q.device):
        s, t = _scores(q[rows], k, visible(rows, sq, len(k), left, right), scale, softcap)
        rows_lse = lse[:, rows, None]
        p = torch.exp(s - torch.where(rows_lse == float("-inf"), float("inf"), rows_lse))
        dp = torch.einsum("rgd,kd->grk", do[rows], v)
        delta = (do[rows] * o[rows]).sum(-1).T[..., None]
        if dlse is not None:
            delta = delta - dlse[:, rows, None]
        ds = p * (dp - delta)
        if t is not None:
            ds = ds * (1 - t * t)
        dq[rows] = torch.einsum("grk,kd->rgd", ds, k) * scale
        dk += torch.einsum("grk,rgd->kd", ds, q[rows]) * scale
        dv += torch.einsum("grk,rgd->kd", p, do[rows])
    return dq, dk, dv


@without_autocast
def attention_backward_reference(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    dlse: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of :func:`attention_reference`, written out and in bounded memory.

    `do` is the gradient of o and `dlse` (optional) that of lse; o and lse are recomputed when either is missing.
    """
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    compute = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    if o is None or lse is None:
        with torch.no_grad():
            o, lse = attention_reference(q, k, v, dtype=compute, **options, **packed)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = _bounds(window_size, causal)
    do_, q_, k_, v_, o_, lse_ = (x.to(compute) for x in (do, q, k, v, o, lse))
    dlse_ = None if dlse is None else dlse.to(compute)
    dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    group = q.shape[-2] // max(1, k.shape[-2])

    if cu_seqlens_q is None:
        pieces = [((b, slice(None)), (b, slice(None)), (b,)) for b in range(q.shape[0])]
    else:
        spans = zip(_spans(cu_seqlens_q, seqused_q), _spans(cu_seqlens_k, seqused_k), strict=True)
        pieces = [((slice(*a),), (slice(*b),), ()) for a, b in spans]
    for at_q, at_k, at_lse in pieces:
        for h in range(k.shape[-2]):
            heads = slice(h * group, (h + 1) * group)
            rows = at_q[-1]
            lse_at = (*at_lse, heads, rows)
            dq[(*at_q, heads)], dk[(*at_k, h)], dv[(*at_k, h)] = _one_backward(
                do_[(*at_q, heads)],
                None if dlse_ is None else dlse_[lse_at],
                q_[(*at_q, heads)],
                k_[(*at_k, h)],
                v_[(*at_k, h)],
                o_[(*at_q, heads)],
                lse_[lse_at],
                scale,
                left,
                right,
                softcap,
            )
    out = (dq, dk, dv)
    return out if dtype is not None else tuple(g.to(x.dtype) for g, x in zip(out, (q, k, v), strict=True))


def attention_truth_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attention_backward_reference` in float64."""
    return attention_backward_reference(do, q, k, v, dtype=torch.float64, **options)
