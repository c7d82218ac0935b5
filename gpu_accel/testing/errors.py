"""How far a result is from the truth, and how far it may be.

The bound is never a bare tolerance: a result may err at most `factor` times as much as torch's own implementation in
the same dtype (the yardstick) errs on the same input, plus a floor of a rounding or so. Both are measured against
float64 truth. The same shape of rule is used by the tests of flash-attention (Dao-AILab).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gpu_accel.errors import IncorrectResultError, InvalidInputError
from gpu_accel.testing.poison import never_written

# Half a unit in the last place for results rounded once to a narrow dtype; sums in float32 have no such last rounding
# to hide behind, so they are allowed a few units.
_NARROW_FLOOR_EPS = 0.5
_WIDE_FLOOR_EPS = 16.0
# The worst element of the yardstick counts for no more than this times its error in all but a thousandth of the
# elements: errors of rounding have no longer tails, and one bad element must not excuse every other.
_TAIL = 8.0
_TAIL_SHARE = 1000


def max_abs(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest |out - reference| in float64; 0 for empty tensors, NaN if any difference is NaN."""
    return _difference(out, reference).abs().max().item() if out.numel() else 0.0


def rmse(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The root of the mean squared difference in float64; 0 for empty tensors, NaN if any difference is NaN."""
    return _difference(out, reference).square().mean().sqrt().item() if out.numel() else 0.0


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64 (2-norms); against zeros it is 0 when equal and inf otherwise."""
    difference = torch.linalg.vector_norm(_difference(out, reference)).item() if out.numel() else 0.0
    scale = torch.linalg.vector_norm(reference.detach().double()).item() if out.numel() else 0.0
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf


def default_floor(dtype: torch.dtype, scale: float) -> float:
    """The floor under the bound: half an ulp of `scale` for 8- and 16-bit results, 16 epsilons of it for wider ones."""
    units = _NARROW_FLOOR_EPS if dtype.itemsize <= 2 else _WIDE_FLOOR_EPS
    return units * torch.finfo(dtype).eps * scale


@dataclass(frozen=True)
class Comparison:
    """The worst place of a result: its error and bound there, and what is wrong in words when it fails."""

    error: float
    bound: float
    index: tuple[int, ...] | None = None
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and self.error <= self.bound  # NaN is never ok


def compare(
    out: torch.Tensor,
    truth: torch.Tensor,
    yardstick: torch.Tensor | None,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    by_scale: bool = False,
) -> Comparison:
    """Compare every element of `out` with `truth` (float64 or float32, same shape).

    Without `by_scale` there is one bound for the tensor: factor * max|yardstick - truth| + floor, where in tensors of
    more than 1000 elements that maximum counts for at most 8 times the 99.9th percentile, so that a single bad element
    of the yardstick does not set the bound for all. With `by_scale` rows
    (last dimension) whose truth has about the same size, within a factor of two, are judged together and the worst
    group is returned. Use it for the output of causal attention, whose first rows are a hundred times larger than its
    last, so that one bound for all would let a last row be wholly wrong; not for gradients, where rows may cancel to
    nothing.

    `floor` defaults to `default_floor(out.dtype, max|truth|)` of the tensor or group. `yardstick=None` leaves the floor
    alone as bound, which must then be given. Infinities must be equal; NaN is accepted only where the truth is NaN, and
    poison never. Yardstick elements that are not finite do not widen the bound. `error` is inf where values do not
    match at all (shape, dtype, NaN, infinity, unwritten). Raises InvalidInputError for an unusable truth or yardstick.
    """
    _validate(truth, yardstick, floor)
    for what, got, expected in (
        ("shape", tuple(out.shape), tuple(truth.shape)),
        ("dtype", out.dtype, out.dtype if yardstick is None else yardstick.dtype),
    ):
        if got != expected:
            return Comparison(math.inf, 0.0, None, f"{what} is {got}, expected {expected}")
    if not out.numel():
        return Comparison(0.0, floor or 0.0)
    wide_truth = truth.detach().to(out.device, torch.float64)
    wide = out.detach().double()
    finite = wide_truth.isfinite()
    same = (wide == wide_truth) | (wide.isnan() & wide_truth.isnan())
    unwritten = never_written(out)
    if out.dtype.itemsize == 1:
        unwritten &= ~wide_truth.isnan()  # a one-byte format has no NaN code to spare for poison
    for mask, why in (
        (unwritten, "were never written"),
        (~finite & ~same, "should be NaN or infinite and are not so"),
        (finite & ~wide.isfinite(), "are NaN or infinite where the truth is finite"),
    ):
        count = int(mask.sum())
        if count:
            return Comparison(math.inf, 0.0, _first(mask), f"{count} of {out.numel()} elements {why}")

    error = (wide - wide_truth).abs().masked_fill_(~finite, 0.0)
    slack = torch.zeros_like(error)
    if yardstick is not None:
        slack = (yardstick.detach().to(out.device, torch.float64) - wide_truth).abs()
        slack.masked_fill_(~slack.isfinite(), 0.0)
    size = wide_truth.abs().masked_fill_(~finite, 0.0)
    groups = _groups(size) if by_scale else [None]
    return max((_judge(error, slack, size, out.dtype, factor, floor, g) for g in groups), key=_badness)


def error_and_bound(
    out: torch.Tensor,
    truth: torch.Tensor,
    yardstick: torch.Tensor | None,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    by_scale: bool = False,
) -> tuple[float, float]:
    """(error, bound) of `compare`: right when error <= bound; the error is inf for NaN, shape and dtype mismatches."""
    result = compare(out, truth, yardstick, factor=factor, floor=floor, by_scale=by_scale)
    return result.error, result.bound


def assert_close_to_truth(
    name: str,
    out: torch.Tensor,
    truth: torch.Tensor,
    yardstick: torch.Tensor | None,
    *,
    factor: float = 2.0,
    floor: float | None = None,
    by_scale: bool = False,
) -> None:
    """Raise IncorrectResultError (an AssertionError) unless `compare` finds the result within its bound.

    The message names the tensor, its error and bound, the worst index and the values there.
    """
    result = compare(out, truth, yardstick, factor=factor, floor=floor, by_scale=by_scale)
    if result.ok:
        return
    lines = [f"{name}: {result.why or 'too far from the truth'}"]
    lines.append(f"  error {result.error:.3e}, bound {result.bound:.3e}")
    if yardstick is not None and not result.why:
        lines.append(f"  (bound = {factor:g} x the error of the yardstick + floor)")
    if result.index is not None:
        where = list(result.index)
        values = f"out {out[result.index].item():.9g}, truth {truth[result.index].item():.9g}"
        if yardstick is not None:
            values += f", yardstick {yardstick[result.index].item():.9g}"
        lines.append(f"  worst at {where} of shape {list(out.shape)}: {values}")
    raise IncorrectResultError("\n".join(lines))


def _difference(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    if out.shape != reference.shape:
        raise InvalidInputError(f"shapes differ: {tuple(out.shape)} and {tuple(reference.shape)}")
    return out.detach().double() - reference.detach().to(out.device, torch.float64)


def _validate(truth: torch.Tensor, yardstick: torch.Tensor | None, floor: float | None) -> None:
    if truth.dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(f"the truth must be float64 (or float32), got {truth.dtype}")
    if yardstick is None and floor is None:
        raise InvalidInputError("without a yardstick a floor is needed: pass floor=")
    if yardstick is not None and yardstick.shape != truth.shape:
        raise InvalidInputError(f"yardstick has shape {tuple(yardstick.shape)}, truth {tuple(truth.shape)}")


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return _unravel(int(mask.reshape(-1).int().argmax()), mask.shape)


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def _groups(size: torch.Tensor) -> list[torch.Tensor]:
    """Masks (..., 1) of the rows whose largest |truth| lies in the same power of two; rows of zeros are one group."""
    exponent = torch.frexp(size.amax(-1, keepdim=True)).exponent
    zero = size.amax(-1, keepdim=True) == 0
    masks = [(exponent == e) & ~zero for e in exponent[~zero].unique().tolist()]
    return [*masks, zero] if bool(zero.any()) else masks


def _judge(
    error: torch.Tensor,
    slack: torch.Tensor,
    size: torch.Tensor,
    dtype: torch.dtype,
    factor: float,
    floor: float | None,
    rows: torch.Tensor | None,
) -> Comparison:
    if rows is not None:
        error, size = error.masked_fill(~rows, 0.0), size.masked_fill(~rows, 0.0)
        slack = slack[rows.expand_as(slack)]
    flat = int(error.reshape(-1).argmax())
    least = default_floor(dtype, size.max().item()) if floor is None else floor
    worst = error.reshape(-1)[flat].item()
    widest = _widest(slack, size[rows.expand_as(size)] if rows is not None else size)
    return Comparison(worst, factor * widest + least, _unravel(flat, error.shape))


def _widest(slack: torch.Tensor, size: torch.Tensor) -> float:
    """The largest error of the yardstick, cut to `_TAIL` times that of all but a thousandth of the elements.

    Elements that are zero in truth and yardstick alike, as in padding, say nothing of rounding and do not count.
    """
    widest = slack.max().item()
    telling = slack[(slack > 0) | (size > 0)]
    beyond = telling.numel() // _TAIL_SHARE
    if not beyond or telling.numel() == _TAIL_SHARE:
        return widest
    usual = telling.topk(beyond + 1, sorted=False).values.min().item()  # kthvalue takes one SM of a GPU, and seconds
    return min(widest, _TAIL * usual)


def _badness(result: Comparison) -> float:
    if result.error == 0.0:
        return 0.0
    return result.error / result.bound if result.bound else math.inf
