"""Scores of the reference: what stands between q k^T and the softmax, and its derivative, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """(q blocks, columns) true where a block is among the first `counts` of its row of `indices`."""
    mask = torch.zeros(indices.shape[0], columns, dtype=torch.bool, device=indices.device)
    for row, (n, listed) in enumerate(zip(counts.tolist(), indices.tolist(), strict=True)):
        mask[row, listed[:n]] = True
    return mask


@dataclass(frozen=True)
class Scores:
    """One block of scores (heads, rows, keys): `masked` has -inf where a key is not seen."""

    masked: Tensor
    mask: Tensor
    tanh: Tensor | None  # of the soft cap
    before: Tensor | None  # what score_mod was given
    where: tuple[Tensor, ...]  # and its indices


@dataclass(frozen=True)
class Scoring:
    """How scores are made of q and k."""

    scale: float
    left: int
    right: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    aux_tensors: tuple[Tensor, ...]
    block_mask: Any

    @classmethod
    def of(cls, q, softmax_scale, causal, window_size, softcap, sinks, alibi_slopes, score_mod, mask_mod, aux_tensors,
           block_mask) -> Scoring:  # fmt: skip
        left, right = (-1 if w is None or w < 0 else int(w) for w in window_size)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        right = 0 if causal else right
        aux: Sequence[Tensor] = tuple(aux_tensors)
        return cls(scale, left, right, softcap, sinks, alibi_slopes, score_mod, mask_mod, aux, block_mask)

    @property
    def same_everywhere(self) -> bool:
        """Whether batch entries and heads differ by q and k alone."""
        return (self.sinks, self.alibi_slopes, self.score_mod, self.mask_mod, self.block_mask) == (None,) * 5

    def scores(self, q: Tensor, k: Tensor, rows: Tensor, sq: int, entry: int, heads: slice) -> Scores:
        """q (..., rows, g, d), k (..., sk, d), `rows` their indices in batch entry `entry`, `heads` the g heads.

        More than one entry or key head, in front, only where they are all the same (`same_everywhere`).
        """
        sk = k.shape[-2]
        s = torch.einsum("...rgd,...kd->...grk", q, k) * self.scale
        tanh, before = None, None
        if self.softcap > 0:
            tanh = torch.tanh(s / self.softcap)
            s = tanh * self.softcap
        keys = torch.arange(sk, device=q.device)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.dim() == 1 else self.alibi_slopes[entry]
            distance = (rows[:, None] + sk - sq - keys).abs()
            s = s - slopes[heads].to(s.dtype)[:, None, None] * distance
        heads_ = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
        entry_ = torch.full_like(heads_, entry)
        where = (entry_, heads_, rows[None, :, None], keys[None, None, :])
        if self.score_mod is not None:
            before = s
            s = self._modified(before, where)
        mask = self._mask(rows, sq, sk, entry, heads, where)
        return Scores(s.masked_fill(~mask, float("-inf")), mask, tanh, before, where)

    def _modified(self, s: Tensor, where: tuple[Tensor, ...]) -> Tensor:
        assert self.score_mod is not None
        return self.score_mod(s, *where, *self.aux_tensors).to(s.dtype).expand_as(s)

    def _mask(self, rows, sq, sk, entry, heads, where) -> Tensor:
        mask = visible(rows, sq, sk, self.left, self.right)[None]
        mod = None if self.mask_mod is None else self.mask_mod(*where, *self.aux_tensors)
        if self.block_mask is None:
            return mask if mod is None else mask & mod
        partial, full = (self._blocks(kind, rows, sk, entry, heads) for kind in ("", "full_"))
        return mask & (full | (partial if mod is None else partial & mod))

    def _blocks(self, kind: str, rows: Tensor, sk: int, entry: int, heads: slice) -> Tensor:
        """(g, rows, sk) true inside the partial ("") or the full ("full_") blocks of the block mask."""
        counts = getattr(self.block_mask, kind + "kv_num_blocks")
        indices = getattr(self.block_mask, kind + "kv_indices")
        group = heads.stop - heads.start
        if counts is None:
            return torch.zeros(group, len(rows), sk, dtype=torch.bool, device=rows.device)
        q_block, kv_block = self.block_mask.BLOCK_SIZE
        columns = -(-sk // kv_block)
        entry = min(entry, counts.shape[0] - 1)  # broadcast over the batch and the heads
        masks = []
        for head in range(heads.start, heads.stop):
            at = min(head, counts.shape[1] - 1)
            blocks = _listed(counts[entry, at], indices[entry, at], columns)
            masks.append(blocks[rows // q_block].repeat_interleave(kv_block, 1)[:, :sk])
        return torch.stack(masks)

    def gradient(self, ds: Tensor, made: Scores) -> Tensor:
        """The gradient of scale * q k^T from that of the scores that the softmax saw."""
        if self.score_mod is not None and made.before is not None:
            with torch.enable_grad():
                before = made.before.detach().requires_grad_()
                after = self._modified(before, made.where)
                ds = torch.where(made.mask, ds, 0.0)
                (ds,) = torch.autograd.grad(after, before, ds) if after.requires_grad else (torch.zeros_like(ds),)
        return ds if made.tanh is None else ds * (1 - made.tanh * made.tanh)
