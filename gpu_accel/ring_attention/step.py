"""Local attention of one step, with its result folded into what earlier steps found.

The state of a block of queries is a pair in float32 (float64 for float64 inputs): o, normalised over the keys seen so
far, and lse, their log-sum-exp. Two states of the same queries over different keys merge exactly:

    lse = log(exp(lse_a) + exp(lse_b)),   o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

and where neither has seen a key, lse stays -inf and o stays 0. Backward needs no merging: with the *final* lse and
delta = rowsum(dO * O), the gradients of each step are computed on their own and add up.

The keys' side of every step is a tuple of `Piece`s (masks.py), so all masks arrive here as plain kernel calls. The
backends are those of `gpu_accel.flash_attention3`. Where a backend has a kernel that merges in its epilogue
(hopper_merge.py, portable_merge.py), a step reads and writes o once, inside the kernel, and rows that will see no more
keys leave it rounded; elsewhere o of the step is merged by one more pass. "auto" takes the reference for CPU tensors,
because Triton's interpreter is slower still.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import function
from gpu_accel.flash_attention3.backends import BACKENDS, choose, module
from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.flash_attention3.reference import attention_backward_reference, attention_reference
from gpu_accel.ring_attention import hopper_merge, portable_merge
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.fragments import row_delta
from gpu_accel.ring_attention.masks import Piece
from gpu_accel.ring_attention.spans import Spans

_MERGING: dict[str, ModuleType] = {"hopper": hopper_merge, "portable": portable_merge}


def partial_dtype(x: Tensor) -> torch.dtype:
    """The dtype of o and lse between steps, and of gradients that add up."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass
class Partial:
    """o (batch, rows, heads, head_dim_v) and lse (batch, heads, rows) of some queries over the keys seen so far.

    `result`: where rows that see no more keys go, in the dtype of q. `seen`: rows that have met a key. `left`: those
    that have gone to `result`. `queued`: kernels that merge draw their tiles from a queue (lanes.py).
    """

    o: Tensor
    lse: Tensor
    result: Tensor | None = None
    seen: Spans = field(default_factory=Spans)
    left: Spans = field(default_factory=Spans)
    queued: bool = False

    @classmethod
    def empty(cls, q: Tensor, head_dim_v: int) -> Partial:
        """Nothing seen yet: o is 0 and lse -inf."""
        dtype = partial_dtype(q)
        o = torch.zeros((*q.shape[:-1], head_dim_v), dtype=dtype, device=q.device)
        return cls(o, _nothing(q, dtype))

    def add(self, o: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """Merge another result for the given rows, in place."""
        if o.is_cuda and self.o.dtype == torch.float32 and self.o.is_contiguous() and self.lse.is_contiguous():
            portable_merge.merge_into(self.o, self.lse, self.o, o, lse, row=rows.start or 0)
        else:
            merge_(self.o[:, rows], self.lse[:, :, rows], o, lse)


def _nothing(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype, device=q.device)


class Running:
    """o and lse of some queries over keys that come in steps, each of known pieces.

    Knowing them, it sends rows on to the result as soon as they are complete, and o is never filled before.

    `result`: where o goes in the end, any view of its shape; then these are half of the heads (lanes.py).
    """

    def __init__(
        self, q: Tensor, head_dim_v: int, steps: Sequence[tuple[Piece, ...]], call: Call, result: Tensor | None = None
    ) -> None:
        self.q, self.steps, self.call = q, steps, call
        self.done = _completed(tuple(steps))
        shape = (*q.shape[:-1], head_dim_v)
        self.kernels = q.dtype != torch.float64 and _in_kernels(call, q)
        if not self.kernels:
            self.partial = Partial.empty(q, head_dim_v)
            return
        at_once = all(a == 0 and b == piece.sq for ends, found in zip(self.done, steps, strict=True)
                      for (a, b), piece in zip(ends, found, strict=True))  # fmt: skip
        # where every row is complete after its first piece, nobody needs o
        o = torch.empty((1,) * 4 if at_once else shape, dtype=torch.float32, device=q.device).expand(shape)
        queued = result is not None
        if result is None:
            result = torch.empty(shape, dtype=q.dtype, device=q.device)
        self.partial = Partial(o, _nothing(q, torch.float32), result, queued=queued)

    def attend(self, step: int, k: Tensor, v: Tensor) -> None:
        """Fold in the keys of one step."""
        attend(self.partial, self.q, k, v, self.steps[step], self.call, self.done[step])

    def finish(self) -> tuple[Tensor, Tensor]:
        """(o of the dtype of q, lse); rows that have seen nothing are 0 and -inf."""
        o, lse, result = self.partial.o, self.partial.lse, self.partial.result
        if result is None:
            return o.to(self.q.dtype), lse
        for a, b in self.partial.seen.without(self.partial.left):
            result[:, a:b] = o[:, a:b]
        for a, b in Spans([(0, self.q.shape[1])]).without(self.partial.seen):
            result[:, a:b] = 0
        return result, lse


def _in_kernels(call: Call, q: Tensor) -> bool:
    """Whether steps run in kernels rather than in the reference."""
    return call.backend in ("hopper", "portable") or (call.backend == "auto" and q.device.type != "cpu")


@functools.lru_cache(1024)
def _completed(steps: tuple[tuple[Piece, ...], ...]) -> list[list[tuple[int, int]]]:
    """For every piece the rows [a, b) of it that no later piece has, the longest stretch of them."""
    later, found = Spans(), []
    for pieces in reversed(steps):
        ends = []
        for piece in reversed(pieces):
            stretches = Spans([(piece.q0, piece.q0 + piece.sq)]).without(later)
            a, b = max(stretches, key=lambda s: s[1] - s[0], default=(piece.q0, piece.q0))
            ends.append((a - piece.q0, b - piece.q0))
            later.add(piece.q0, piece.q0 + piece.sq)
        found.append(ends[::-1])
    return found[::-1]


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge (o_new, lse_new) into (o, lse) in place; shapes as in :class:`Partial`."""
    both = torch.logaddexp(lse, lse_new)
    seen = torch.where(both == float("-inf"), 0.0, both)  # exp(-inf - 0) is 0, where -inf - -inf would be NaN
    keep, take = (torch.exp(x - seen).transpose(1, 2)[..., None] for x in (lse, lse_new))
    o.mul_(keep).add_(o_new.to(o.dtype) * take)
    lse.copy_(both)


@functools.lru_cache(4096)
def _chosen(problem: Problem, backend: str, direction: str) -> str:
    return choose(problem, backend, direction)[0]


def _problem(call: Call, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Problem:
    return function.problem_of(
        q, k, v, window_left=piece.left, window_right=piece.right, softcap=call.softcap,
        deterministic=call.deterministic,
    )  # fmt: skip


def kernel_of(call: Call, q: Tensor, k: Tensor, v: Tensor, direction: str) -> tuple[Problem, str]:
    """The problem of whole blocks without a mask, and the backend that runs it."""
    problem = _problem(call, q, k, v, Piece(0, q.shape[1], 0, k.shape[1]))
    return problem, _backend(call, problem, direction)


def _backend(call: Call, problem: Problem, direction: str) -> str:
    if call.backend == "auto" and problem.device_type == "cpu":
        return "reference"
    return _chosen(problem, call.backend, direction)


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


def attend(
    partial: Partial,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: tuple[Piece, ...],
    call: Call,
    done: Sequence[tuple[int, int]] = (),
) -> None:
    """Fold attention of q (batch, rows, heads, head_dim) over the pieces of k, v into `partial`, in place.

    `done`: for each piece the rows [a, b) of it that are complete afterwards and go to `partial.result`.
    """
    for i, piece in enumerate(found):
        rows = slice(piece.q0, piece.q0 + piece.sq)
        keys = slice(piece.k0, piece.k0 + piece.sk)
        part: tuple[Tensor, Tensor, Tensor] = (q[:, rows], k[:, keys], v[:, keys])
        problem = _problem(call, *part, piece)
        name = _backend(call, problem, "forward")
        if name == "reference":
            o, lse = attention_reference(*part, **_reference_options(call, piece, partial.o.dtype))
            partial.add(o, lse, rows)
            continue
        part = (*(function.unit_last_stride(x) for x in part),)  # type: ignore[assignment]
        ends = done[i] if done else (0, 0)
        first = not partial.seen.meets(rows.start, rows.stop)
        target = q if partial.result is None else partial.result  # q: nothing is written, but a place is wanted
        whole = first and ends == (0, piece.sq) and piece.sq == q.shape[1]
        if name == "hopper" and whole and target.is_contiguous():
            _kernel(name, "forward")(*part, **_options(call, piece), out=target, lse=partial.lse)
        elif _merges(name, problem):
            options = {"row": piece.q0, "first": first, "done": ends, **_options(call, piece)}
            if partial.queued:
                options["queued"] = True
            ends = _MERGING[name].forward_merge(*part, partial.o, partial.lse, target, **options)
        else:
            o, lse = _kernel(name, "forward")(*part, **_options(call, piece))
            portable_merge.merge_into(partial.o, partial.lse, target, o, lse, row=piece.q0, done=ends)
        partial.seen.add(rows.start, rows.stop)
        partial.left.add(rows.start + ends[0], rows.start + ends[1])


def attend_apart(
    q: Tensor, k: Tensor, v: Tensor, found: tuple[Piece, ...], call: Call
) -> list[tuple[Tensor, Tensor]]:
    """(o, lse) of each piece by itself, by the kernels that do not merge: what a step costs without its merges."""
    results: list[tuple[Tensor, Tensor]] = []
    for piece in found:
        rows, keys = slice(piece.q0, piece.q0 + piece.sq), slice(piece.k0, piece.k0 + piece.sk)
        part: tuple[Tensor, Tensor, Tensor] = (q[:, rows], k[:, keys], v[:, keys])
        name = _backend(call, _problem(call, *part, piece), "forward")
        if name == "reference":
            o, lse = attention_reference(*part, **_reference_options(call, piece, partial_dtype(q)))
        else:
            aligned = (function.unit_last_stride(x) for x in part)
            o, lse = _kernel(name, "forward")(*aligned, **_options(call, piece))
        results.append((o, lse))
    return results


@functools.lru_cache(4096)
def _merges(name: str, problem: Problem) -> bool:
    return name in _MERGING and _MERGING[name].refuse(problem) is None


def delta_of(do: Tensor, o: Tensor) -> Tensor:
    """rowsum(dO * O), (batch, heads, rows): what the softmax's gradient subtracts."""
    if do.is_cuda and do.dtype != torch.float64 and o.stride(-1) == do.stride(-1) == 1:
        return row_delta(do, o)
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
        name = _backend(call, _problem(call, *part[1:], piece), "backward")
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
