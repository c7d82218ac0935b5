"""One launch for what delayed scaling does to its histories before a tensor is quantised: `roll`.

In plain torch that is a dozen kernels of one number each, for every tensor. Here each history has a program, which
enters the pending maximum, finds the next scale, counts overflows and starts a new maximum, in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.flash_attention3.launch import next_power_of_2
from gpu_accel.transformer_engine.quantize_launch import on_device, quick
from gpu_accel.transformer_engine.scales import next_history, update_history

LONGEST = 8192  # entries of a history that a program holds
_MIN_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _roll(
    history, scale, pending, overflows, out, length, largest, factor, BLOCK: tl.constexpr, NEWEST: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, BLOCK)
    inside = index < length
    amax = tl.load(pending)
    used = tl.load(scale)
    old = tl.load(history + index, mask=inside, other=0.0)
    before = tl.load(history + index - 1, mask=inside & (index > 0), other=0.0)
    finite = amax < float("inf")  # False for NaN
    usable = finite & (amax > 0)
    entered = tl.where(usable, tl.where(index == 0, amax, before), old)
    chosen = tl.sum(tl.where(index == 0, entered, 0.0), 0) if NEWEST else tl.max(entered, 0)
    chosen *= factor
    fresh = tl.where(chosen > 0, tl.maximum(tl.div_rn(chosen, largest), _MIN_SCALE), 1.0)
    next_scale = tl.where(usable & (fresh < float("inf")), fresh, used)
    clipped = (amax > used * largest) & finite
    first = tl.load(overflows)
    second = tl.load(overflows + 1)
    tl.debug_barrier()  # the history is written where others have just read it
    tl.store(history + index, entered, mask=inside)
    tl.store(scale, next_scale)
    tl.store(out, next_scale)
    tl.store(pending, 0.0)
    tl.store(overflows, first + tl.where(finite, 0, 1))
    tl.store(overflows + 1, second + tl.where(clipped, 1, 0))


@triton.jit
def _roll_kernel(
    history, scale, pending, overflows, history2, scale2, pending2, overflows2, out, length, length2, largest, largest2,
    factor, BLOCK: tl.constexpr, NEWEST: tl.constexpr,
):  # fmt: skip
    """Up to two histories, a program each; their scales go to out[0] and out[4] as well."""
    if tl.program_id(0) == 0:
        _roll(history, scale, pending, overflows, out, length, largest, factor, BLOCK, NEWEST)
    else:
        _roll(history2, scale2, pending2, overflows2, out + 4, length2, largest2, factor, BLOCK, NEWEST)


def roll(history: Tensor, scale: Tensor, pending: Tensor, overflows: Tensor, *, largest: float, margin: int,
         algorithm: str) -> None:  # fmt: skip
    """Enter the maximum that is pending, in place, and with it find the next scale, in plain torch. Without one nothing
    changes.

    overflows (2,): how often a tensor held NaN or Inf, and how often finite values were clipped.
    """
    clipped = (pending > scale * largest) & (pending < float("inf"))
    fresh, next_scale, over = update_history(
        history, pending, scale, largest=largest, margin=margin, algorithm=algorithm
    )  # fmt: skip
    history.copy_(fresh)
    scale.copy_(next_scale)
    overflows.add_(torch.stack((over, clipped.long())))
    pending.zero_()


def roll_together(states: list[tuple[Tensor, ...]], amax: list[Tensor], largest: list[float], margin: int,
                  algorithm: str) -> None:  # fmt: skip
    """`roll` of all histories of a model, (history, scale, pending, overflows) each, with the maxima given.

    Some twenty operations for all of one length and format, where `roll` has as many for each.
    """
    groups: dict[tuple, list[int]] = {}
    for i, (history, *_) in enumerate(states):
        groups.setdefault((history.device, history.shape[0], largest[i]), []).append(i)
    for (_, _, top), some in groups.items():
        seen = torch.stack([amax[i] for i in some])
        histories, scales, pending, overflows = zip(*(states[i] for i in some), strict=True)
        history, scale, count = (torch.stack(x) for x in (histories, scales, overflows))
        finite = seen < float("inf")
        clipped = finite & (seen > scale * top)
        history, scale = next_history(history, seen, scale, largest=top, margin=margin, algorithm=algorithm)
        torch._foreach_copy_(list(histories), list(history.unbind()))
        torch._foreach_copy_(list(scales), list(scale.unbind()))
        torch._foreach_copy_(list(overflows), list((count + torch.stack((~finite, clipped), 1)).unbind()))
        torch._foreach_zero_(list(pending))


@torch.library.custom_op("gpu_accel::te_roll", mutates_args=("states",))
def roll_op(states: list[Tensor], largest: list[float], margin: int, algorithm: str, kernels: bool) -> Tensor:
    """`roll` of one or two histories, given as (history, scale, pending, overflows) each.

    Returns (histories, 4) float32, whose first column is a snapshot of the next scales (rows of 16 bytes each).
    """
    count = len(largest)
    out = states[0].new_empty((count, 4))
    groups = [states[4 * i : 4 * i + 4] for i in range(count)]
    lengths = [group[0].shape[0] for group in groups]
    if not kernels or max(lengths) > LONGEST:
        for i, group in enumerate(groups):
            roll(*group, largest=largest[i], margin=margin, algorithm=algorithm)
            out[i, 0] = group[1]
        return out
    arguments = (*groups[0], *groups[-1], out, lengths[0], lengths[-1], largest[0], largest[-1], 2.0**margin)
    options = dict(BLOCK=next_power_of_2(max(lengths)), NEWEST=algorithm == "most_recent", num_warps=4)
    with on_device(out):
        quick(_roll_kernel, count, arguments, options)
    return out


@roll_op.register_fake
def _(states, largest, margin, algorithm, kernels):
    return states[0].new_empty((len(largest), 4))
