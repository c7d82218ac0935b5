"""Local attention of one step, with its result folded into what earlier steps found.

The state of a block of queries is a pair in float32 (float64 for float64 inputs): o, normalised over the keys seen so
far, and lse, their log-sum-exp. Two states of the same queries over different keys merge exactly:

    lse = log(exp(lse_a) + exp(lse_b)),   o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

and where neither has seen a key, lse stays -inf and o stays 0. Backward needs no merging: with the *final* lse and
delta = rowsum(dO * O), the gradients of each step are computed on their own and add up.

The keys' side of every step is a tuple of `Piece`s (masks.py), so all masks arrive here as plain kernel calls. The
backends are those of `gpu_accel.flash_attention3`. "auto" takes the reference for CPU tensors, because Triton's
interpreter is slower still. Kernels round o of a step and its gradients to the dtype of the inputs; the reference does
not. A kernel that takes and returns (o, lse) in float32, merging in its epilogue, will replace `attend` here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import function
from gpu_accel.flash_attention3.backends import BACKENDS, choose, module
from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_reference
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.masks import Piece


def partial_dtype(x: Tensor) -> torch.dtype:
    """The dtype of o and lse between steps, and of gradients that add up."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass
class Partial:
    """o (batch, rows, heads, head_dim_v) and lse (batch, heads, rows) of some queries over the keys seen so far."""

    o: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, q: Tensor, head_dim_v: int) -> Partial:
        """Nothing seen yet."""
        dtype = partial_dtype(q)
        o = torch.zeros((*q.shape[:-1], head_dim_v), dtype=dtype, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype, device=q.device)
        return cls(o, lse)

    def add(self, o: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """Merge another result for the given rows, in place."""
        merge_(self.o[:, rows], self.lse[:, :, rows], o, lse)


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge (o_new, lse_new) into (o, lse) in place; shapes as in :class:`Partial`."""
    both = torch.logaddexp(lse, lse_new)
    seen = torch.where(both == float("-inf"), 0.0, both)  # exp(-inf - 0) is 0, where -inf - -inf would be NaN
    keep, take = (torch.exp(x - seen).transpose(1, 2)[..., None] for x in (lse, lse_new))
    o.mul_(keep).add_(o_new.to(o.dtype) * take)
    lse.copy_(both)


def _backend(call: Call, q: Tensor, k: Tensor, v: Tensor, piece: Piece, direction: str) -> str:
    if call.backend == "auto" and q.device.type == "cpu":
        return "reference"
    problem = function.problem_of(q, k, v, window_left=piece.left, window_right=piece.right, softcap=call.softcap)
    return choose(problem, call.backend, direction)[0]


def _kernel(name: str, direction: str) -> Callable[..., tuple[Tensor, ...]]:
    return getattr(module(BACKENDS[name], direction), direction)


def _options(call: Call, piece: Piece) -> dict:
    return {
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "window_left": piece.left,
        "window_right": piece.right,
    }


def _reference_options(call: Call, piece: Piece, dtype: torch.dtype) -> dict:
    return {
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "window_size": (piece.left, piece.right),
        "dtype": dtype,
    }


def attend(partial: Partial, q: Tensor, k: Tensor, v: Tensor, found: tuple[Piece, ...], call: Call) -> None:
    """Fold attention of q (batch, rows, heads, head_dim) over the pieces of k, v into `partial`, in place."""
    for piece in found:
        rows = slice(piece.q0, piece.q0 + piece.sq)
        keys = slice(piece.k0, piece.k0 + piece.sk)
        part = (q[:, rows], k[:, keys], v[:, keys])
        name = _backend(call, *part, piece, "forward")
        if name == "reference":
            o, lse = attention_reference(*part, **_reference_options(call, piece, partial.o.dtype))
        else:
            aligned = (function.unit_last_stride(x) for x in part)
            o, lse = _kernel(name, "forward")(*aligned, **_options(call, piece))
        partial.add(o, lse, rows)


def delta_of(do: Tensor, o: Tensor) -> Tensor:
    """rowsum(dO * O), (batch, heads, rows): what the softmax's gradient subtracts."""
    dtype = partial_dtype(do)
    return (do.to(dtype) * o.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    found: tuple[Piece, ...],
    call: Call,
) -> None:
    """Add the gradients of one step to (dq, dk, dv), in place, from the final lse and delta of its queries.

    Backends subtract rowsum(do * o) - dlse. With o = 0 and dlse = -delta that is delta as it is given here, in
    float32, where delta from an o rounded to 16 bits would not be.
    """
    dq, dk, dv = grads
    nothing = do.new_zeros((1, 1, 1, do.shape[-1]))
    for piece in found:
        rows = slice(piece.q0, piece.q0 + piece.sq)
        keys = slice(piece.k0, piece.k0 + piece.sk)
        part = (do[:, rows], q[:, rows], k[:, keys], v[:, keys])
        o = nothing.expand(part[0].shape)
        stats = (lse[:, :, rows], -delta[:, :, rows])
        name = _backend(call, *part[1:], piece, "backward")
        step: tuple[Tensor, ...]
        if name == "reference":
            options = _reference_options(call, piece, dq.dtype)
            step = attention_backward_reference(*part, o=o, lse=stats[0], dlse=stats[1], **options)
        else:
            aligned = (function.unit_last_stride(x) for x in part)
            step = _kernel(name, "backward")(*aligned, o, stats[0], dlse=stats[1], **_options(call, piece))
        dq[:, rows] += step[0]
        dk[:, keys] += step[1]
        dv[:, keys] += step[2]
