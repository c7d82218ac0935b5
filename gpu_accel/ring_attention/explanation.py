"""What a call would do, in words: the steps of a rank, the kernels that run them, and why others do not.

    print(explain(q, k, v, layout=layout, rank=1, causal=True))          # the shards of rank 1; nothing is sent
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.backends import choose
from gpu_accel.ring_attention import attention, hopper_merge, portable_merge
from gpu_accel.ring_attention.call import Call
from gpu_accel.ring_attention.layouts import Layout
from gpu_accel.ring_attention.masks import Piece, pieces
from gpu_accel.ring_attention.schedules import ring_backward
from gpu_accel.ring_attention.schedules import schedule as find_schedule
from gpu_accel.ring_attention.schedules.kv_ring import ring_of
from gpu_accel.ring_attention.step import kernel_of
from gpu_accel.ring_attention.transport import LocalTransport, World

_ONE_CALL = ("ulysses", "allgather")  # whose results need no merging
_FEW = 4  # pieces that a line lists
_MERGING = {"hopper": hopper_merge, "portable": portable_merge}


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, rank: int = 0, schedule: str = "kv_ring", **options: Any
) -> str:  # fmt: skip
    """How `distributed_attention` would compute this on one rank; nothing is computed or sent.

    Args:
        q, k, v: the shards of `rank`, (batch, local_length, heads, head_dim).
        layout, schedule, options: as there.

    Raises:
        InvalidInputError, UnsupportedError: as there, but for what only another rank can know.
    """
    module = find_schedule(schedule)
    call = attention.make_call(q, k, v, layout, replicated_q=schedule == "tree", **options)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < layout.ranks:
        raise InvalidInputError(f"rank must be from 0 to {layout.ranks - 1}, got {shown(rank)}")
    lines = [("call", f"{schedule}, {layout}, {call.mask}, {str(q.dtype).removeprefix('torch.')}")]
    if refused := module.refuse(call, q, k, v):
        return _told([*lines, ("refused", refused)])
    if schedule == "kv_ring":
        lines += [(f"step {s}", text) for s, text in enumerate(_steps(layout, rank, call))]
    else:
        lines.append(("steps", " ".join((module.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")))
    refusals: dict[str, str] = {}
    for direction in ("forward", "backward"):
        problem, name = kernel_of(call, q, k, v, direction)
        if call.backend == "auto" and problem.device_type == "cpu":
            refusals["hopper, portable"] = "of CPU tensors auto takes the reference: Triton's interpreter is slower"
        else:
            refusals |= choose(problem, call.backend, direction)[1]
        how = ""
        if direction == "forward" and schedule not in _ONE_CALL:
            how = f"; {_merge(name, problem)}"
        elif direction == "backward" and schedule == "kv_ring":
            how = f"; {_sums(layout, rank, q, k, v, call)}"
        lines.append((direction, f"{name}{how}"))
    return _told([*lines, *(("not taken", f"{name}: {why}") for name, why in refusals.items())])


def _told(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:10} {text}" for name, text in lines)


def _steps(layout: Layout, rank: int, call: Call) -> list[str]:
    found = []
    for step in range(layout.ranks):
        source = (rank - step) % layout.ranks
        calls = pieces(layout.runs(rank), layout.runs(source), call.mask)
        whose = "its own keys" if step == 0 else f"keys of rank {source}"
        few = "; ".join(map(_piece, calls)) or "nothing to see"
        found.append(f"{whose}: {few if len(calls) <= _FEW else f'{len(calls)} kernel calls'}")
    return found


def _piece(piece: Piece) -> str:
    return f"{piece.kind}, {piece.sq:,} queries, {piece.sk:,} keys"


def _merge(name: str, problem: Any) -> str:
    if name not in _MERGING:
        return "results of steps are merged by operations of torch"
    if why := _MERGING[name].refuse(problem):
        return f"results of steps are merged in passes of their own ({why})"
    return "results of steps are merged in the kernel's epilogue"


def _sums(layout: Layout, rank: int, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    ring = ring_of(call, LocalTransport(World(layout.ranks), rank))
    why = ring_backward.refuse(ring, q, k, v, call)
    if why is None:
        return "a step's kernel adds to float32 sums that travel"
    return f"gradients of a step are added up in passes of their own ({why})"


__all__ = ["explain"]
