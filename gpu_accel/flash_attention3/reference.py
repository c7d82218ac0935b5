"""Attention in plain torch: slow, readable, and the truth that every kernel is compared with.

    s = softcap * tanh(scale * q k^T / softcap)        (softcap = 0: no cap)
    s = score_mod(s - slope * |i + sk - sq - j|, b, h, i, j)        (ALiBi, then FlexAttention's modifier)
    p = softmax over the visible keys of s and the sink,  o = p v,  lse = log sum exp of the same   (natural logarithm)

Key `j` is visible to query `i` when  `i + sk - sq - left <= j <= i + sk - sq + right`  (bottom-right aligned, both
ends included, a negative bound is no bound; causal is right = 0) and `mask_mod(b, h, i, j)`, if given, is true. A sink
is one more logit a head, with no value: it takes probability away from the keys. A row that sees nothing has o = 0,
lse = -inf (with a sink: the sink) and zero gradients. Everything runs in chunks of query rows, so memory stays bounded,
and in float64 when asked to. How scores are made is in `reference_scores.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference_scores import Scoring, visible

__all__ = [
    "attention_backward_reference",
    "attention_reference",
    "attention_truth",
    "attention_truth_backward",
    "visible",
    "without_autocast",
]

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


def _row_chunks(sq: int, sk: int, group: int, device: torch.device) -> Iterator[Tensor]:
    step = max(1, _CHUNK // max(1, sk * group))
    for start in range(0, sq, step):
        yield torch.arange(start, min(sq, start + step), device=device)


def _one_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, entry: int, heads: slice):
    """One sequence and key head: q (..., sq, g, d), k (..., sk, d) -> o (..., sq, g, dv), lse, maximum (..., g, sq).

    What stands in front are sequences and key heads that differ by their numbers alone.
    """
    sq, group, _ = q.shape[-3:]
    sk = k.shape[-2]
    outputs, lses, maxima = [], [], []
    for rows in _row_chunks(sq, sk, group, q.device):
        s = scoring.scores(q[..., rows, :, :], k, rows, sq, entry, heads).masked
        nothing = s.new_full((*s.shape[:-1], 1), float("-inf"))
        maximum = s.detach().amax(-1, keepdim=True) if sk else nothing
        m, extra = maximum, None
        if scoring.sinks is not None:
            extra = scoring.sinks[heads].view(-1, 1, 1).to(s.dtype)
            m = torch.maximum(m, extra.detach())
        m = torch.where(m == float("-inf"), 0.0, m)
        p = torch.exp(s - m)
        total = p.sum(-1, keepdim=True)
        if extra is not None:
            total = total + torch.exp(extra - m)
        empty = total == 0
        total = torch.where(empty, 1.0, total)  # an empty row divides 0 by 1: no NaN, and no gradient either
        outputs.append(torch.einsum("...grk,...kd->...rgd", p / total, v))
        lses.append(torch.where(empty, float("-inf"), m + total.log()).squeeze(-1))
        maxima.append(maximum.squeeze(-1))
    if not outputs:
        empty = q.new_zeros(*q.shape[:-3], group, 0)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), empty, empty
    return torch.cat(outputs, -3), torch.cat(lses, -1), torch.cat(maxima, -1)


def _pairs(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Dense tensors (batch, seqlen, heads_kv, ...) as pairs of entry and key head, (pairs, seqlen, ...).

    As many at once as the score matrix has room for: launched one by one, those of short sequences leave a GPU idle.
    """
    q, k = tensors[:2]
    each = max(1, q.shape[1] * q.shape[3] * k.shape[1])
    return list(zip(*(x.transpose(1, 2).flatten(0, 1).split(max(1, _CHUNK // each)) for x in tensors), strict=True))


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, entry: int):
    """One sequence with all heads: q (sq, h, d), k (sk, hk, d) -> o (sq, h, dv), lse and row maximum (h, sq)."""
    heads_kv = k.shape[1]
    group = q.shape[1] // max(1, heads_kv)
    groups = [slice(h * group, (h + 1) * group) for h in range(heads_kv)]
    parts = [_one_forward(q[:, at], k[:, h], v[:, h], scoring, entry, at) for h, at in enumerate(groups)]
    if not parts:
        nothing = q.new_zeros(0, q.shape[0])
        return q.new_zeros(q.shape[0], 0, v.shape[-1]), nothing, nothing
    o, lse, maximum = zip(*parts, strict=True)
    return torch.cat(o, 1), torch.cat(lse, 0), torch.cat(maximum, 0)


def _spans(cu: Tensor, used: Tensor | None) -> list[tuple[int, int]]:
    """(start, end) of each sequence, shortened to `used` rows when given."""
    ends = cu.tolist()
    lengths = used.tolist() if used is not None else [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return [(start, start + length) for start, length in zip(ends, lengths, strict=False)]


def _sequences(q: Tensor, k: Tensor, cu_q, cu_k, used_q, used_k) -> tuple[list, list]:
    """Row spans of every sequence in q and k flattened to (total, heads, dim)."""
    if cu_q is not None:
        return _spans(cu_q, used_q), _spans(cu_k, used_k)
    return tuple([(b * x.shape[1], (b + 1) * x.shape[1]) for b in range(x.shape[0])] for x in (q, k))


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
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    aux_tensors: Sequence[Tensor] = (),
    block_mask: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_max_logits: bool = False,
) -> tuple[Tensor, ...]:
    """Attention and its log-sum-exp, differentiable by autograd.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens_*`. The heads of q are
            a multiple of those of k and v; the head_dim of v may differ.
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right) keys visible beside the diagonal; None or negative: all.
        sinks: (heads,) logits that join the softmax without a value. alibi_slopes: (heads,) or (batch, heads).
        score_mod, mask_mod: Python functions with FlexAttention's signatures on tensors that broadcast to
            (heads, rows, keys), followed by `aux_tensors`. Packed: b is the sequence, indices count inside it.
        block_mask: torch's BlockMask (dense inputs): only its blocks are seen, `mask_mod` applies to the partial ones.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of packed sequences; `seqused_*` (batch,) shortens them.
        dtype: computed in this dtype and returned in it. Default: float64 for float64 inputs, otherwise computed in
            float32 and o returned in the dtype of q.
        return_max_logits: also return (heads,), the largest score that any row sees.

    Returns:
        o like q with the head_dim of v; lse (batch, heads, seqlen_q), packed (heads, total_q), natural logarithm.
    """
    compute = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    out_dtype = dtype or q.dtype
    scoring = Scoring.of(
        q, softmax_scale, causal, window_size, softcap, sinks, alibi_slopes, score_mod, mask_mod, aux_tensors,
        block_mask,
    )  # fmt: skip
    qc, kc, vc = q.to(compute), k.to(compute), v.to(compute)
    heads, dv = q.shape[-2], v.shape[-1]
    if cu_seqlens_q is None and scoring.same_everywhere and min(*q.shape[:3], *k.shape[:3]) > 0:
        grouped = qc.unflatten(2, (k.shape[2], -1))  # (batch, sq, heads_kv, g, d)
        parts = [_one_forward(*at, scoring, 0, slice(0, grouped.shape[3])) for at in _pairs(grouped, kc, vc)]
        o, lse, maximum = (torch.cat(x).unflatten(0, (q.shape[0], -1)) for x in zip(*parts, strict=True))
        o = o.transpose(1, 2).flatten(2, 3).to(out_dtype).contiguous()
        lse, maximum = lse.flatten(1, 2).contiguous(), maximum.flatten(1, 2)
        return (o, lse, maximum.amax((0, 2))) if return_max_logits else (o, lse)
    spans_q, spans_k = _sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    qc, kc, vc = (x.flatten(0, 1) if x.dim() == 4 else x for x in (qc, kc, vc))
    total = qc.shape[0]
    o_parts, lse_parts, maxima, done = [], [], [qc.new_full((heads, 1), float("-inf"))], 0

    def pad_to(row: int) -> None:
        nonlocal done
        if row > done:  # rows that belong to no sequence
            o_parts.append(qc.new_zeros(row - done, heads, dv))
            lse_parts.append(qc.new_full((heads, row - done), float("-inf")))
            done = row

    for entry, ((q0, q1), (k0, k1)) in enumerate(zip(spans_q, spans_k, strict=True)):
        pad_to(q0)
        o, lse, maximum = _dense_forward(qc[q0:q1], kc[k0:k1], vc[k0:k1], scoring, entry)
        o_parts.append(o)
        lse_parts.append(lse)
        maxima.append(maximum)
        done = q1
    pad_to(total)
    o = torch.cat(o_parts).to(out_dtype) if o_parts else q.new_zeros(0, heads, dv).to(out_dtype)
    lse = torch.cat(lse_parts, -1) if lse_parts else qc.new_zeros(heads, 0)
    if cu_seqlens_q is None:
        batch, sq = q.shape[:2]
        o = o.view(batch, sq, heads, dv)
        lse = lse.view(heads, batch, sq).transpose(0, 1).contiguous()
    return (o, lse, torch.cat(maxima, -1).amax(-1)) if return_max_logits else (o, lse)


def attention_truth(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    """:func:`attention_reference` in float64: the truth of every test and experiment."""
    return attention_reference(q, k, v, dtype=torch.float64, **options)


def _one_backward(do, dlse, q, k, v, o, lse, scoring: Scoring, entry: int, heads: slice):
    """One sequence, one key head -> dq (..., sq, g, d), dk (..., sk, d), dv (..., sk, dv), dsinks (g,)."""
    sq, group, _ = q.shape[-3:]
    sk = k.shape[-2]
    dq, dk, dv, dsinks = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.new_zeros(group)
    for rows in _row_chunks(sq, sk, group, q.device):
        rows_lse = lse[..., rows, None]
        rows_lse = torch.where(rows_lse == float("-inf"), float("inf"), rows_lse)
        delta = (do[..., rows, :, :] * o[..., rows, :, :]).sum(-1).mT[..., None]
        if dlse is not None:
            delta = delta - dlse[..., rows, None]
        if scoring.sinks is not None:
            sink = scoring.sinks[heads].view(-1, 1, 1).to(q.dtype)
            dsinks -= (torch.exp(sink - rows_lse) * delta).sum((1, 2))
        if sk == 0:
            continue
        made = scoring.scores(q[..., rows, :, :], k, rows, sq, entry, heads)
        p = torch.exp(made.masked - rows_lse)
        dp = torch.einsum("...rgd,...kd->...grk", do[..., rows, :, :], v)
        ds = scoring.gradient(p * (dp - delta), made)
        dq[..., rows, :, :] = torch.einsum("...grk,...kd->...rgd", ds, k) * scoring.scale
        dk += torch.einsum("...grk,...rgd->...kd", ds, q[..., rows, :, :]) * scoring.scale
        dv += torch.einsum("...grk,...rgd->...kd", p, do[..., rows, :, :])
    return dq, dk, dv, dsinks


def _dense_backward(do, dlse, q, k, v, o, lse, scoring: Scoring) -> tuple[Tensor, ...]:
    """dq, dk, dv of (batch, seqlen, heads, d) tensors whose entries and heads are all alike."""
    batch, _, heads_kv, _ = k.shape
    do, q, o = (x.unflatten(2, (heads_kv, -1)) for x in (do, q, o))  # (batch, sq, heads_kv, g, d)
    rows = [lse, *([] if dlse is None else [dlse])]  # (batch, sq, heads_kv, g), for the moment
    rows = [x.unflatten(1, (heads_kv, -1)).permute(0, 3, 1, 2) for x in rows]
    heads, parts = slice(0, q.shape[3]), []
    for q_, k_, v_, do_, o_, *rows_ in _pairs(q, k, v, do, o, *rows):
        lse_, dlse_ = (rows_[0].mT, None if dlse is None else rows_[1].mT)
        parts.append(_one_backward(do_, dlse_, q_, k_, v_, o_, lse_, scoring, 0, heads))
    dq, dk, dv = (torch.cat(x) for x in tuple(zip(*parts, strict=True))[:3])
    dq, dk, dv = (x.unflatten(0, (batch, heads_kv)).transpose(1, 2) for x in (dq, dk, dv))
    return dq.flatten(2, 3).contiguous(), dk.contiguous(), dv.contiguous()


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
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    aux_tensors: Sequence[Tensor] = (),
    block_mask: Any = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Gradients (dq, dk, dv), with sinks (dq, dk, dv, dsinks), of :func:`attention_reference`, in bounded memory.

    `do` is the gradient of o and `dlse` (optional) that of lse; o and lse are recomputed when either is missing.
    Written out, except for the derivative of `score_mod`, which autograd takes.
    """
    compute = dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q,
              "seqused_k": seqused_k}  # fmt: skip
    if o is None or lse is None:
        with torch.no_grad():
            o, lse = attention_reference(
                q, k, v, dtype=compute, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, score_mod=score_mod, mask_mod=mask_mod,
                aux_tensors=aux_tensors, block_mask=block_mask, **packed,
            )  # fmt: skip
    scoring = Scoring.of(
        q, softmax_scale, causal, window_size, softcap, sinks, alibi_slopes, score_mod, mask_mod, aux_tensors,
        block_mask,
    )  # fmt: skip
    do_, q_, k_, v_, o_, lse_ = (x.to(compute) for x in (do, q, k, v, o, lse))
    dlse_ = None if dlse is None else dlse.to(compute)
    dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    dsinks = q_.new_zeros(q.shape[-2])
    group = q.shape[-2] // max(1, k.shape[-2])

    if cu_seqlens_q is None and scoring.same_everywhere and min(*q.shape[:3], *k.shape[:3]) > 0:
        found = _dense_backward(do_, dlse_, q_, k_, v_, o_, lse_, scoring)
        return found if dtype is not None else tuple(g.to(x.dtype) for g, x in zip(found, (q, k, v), strict=True))
    if cu_seqlens_q is None:
        pieces = [((b, slice(None)), (b, slice(None)), (b,)) for b in range(q.shape[0])]
    else:
        spans = zip(_spans(cu_seqlens_q, seqused_q), _spans(cu_seqlens_k, seqused_k), strict=True)
        pieces = [((slice(*a),), (slice(*b),), ()) for a, b in spans]
    for entry, (at_q, at_k, at_lse) in enumerate(pieces):
        for h in range(k.shape[-2]):
            heads = slice(h * group, (h + 1) * group)
            lse_at = (*at_lse, heads, at_q[-1])
            dq[(*at_q, heads)], dk[(*at_k, h)], dv[(*at_k, h)], part = _one_backward(
                do_[(*at_q, heads)],
                None if dlse_ is None else dlse_[lse_at],
                q_[(*at_q, heads)],
                k_[(*at_k, h)],
                v_[(*at_k, h)],
                o_[(*at_q, heads)],
                lse_[lse_at],
                scoring,
                entry,
                heads,
            )
            dsinks[heads] += part
    out, inputs = (dq, dk, dv), (q, k, v)
    if sinks is not None:
        out, inputs = (*out, dsinks), (*inputs, sinks)
    return out if dtype is not None else tuple(g.to(x.dtype) for g, x in zip(out, inputs, strict=True))


def attention_truth_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, ...]:
    """:func:`attention_backward_reference` in float64."""
    return attention_backward_reference(do, q, k, v, dtype=torch.float64, **options)
