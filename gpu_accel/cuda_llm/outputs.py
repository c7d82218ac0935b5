"""Comparing what a candidate left in memory with the truth, and saying in what way it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .image import Layout
from .launch import Launch
from .tasks import Task
from .tasks.task import FLOOR, Dims, Tensors, Truth
from .verdict import Kind, Rejected, Verdict

COARSE = 2.0**-7  # of the scale: an error below this everywhere looks like arithmetic in fewer bits


@dataclass(kw_only=True)
class Trial:
    """One launch: its inputs, its memory before, and what came back."""

    dims: Dims
    family: str
    inputs: Tensors
    layout: Layout
    before: Tensor = field(repr=False)
    hidden: bool  # whether the shape is one that no proposer saw
    repeats: int = -1  # the trial whose inputs these are, on memory with other guards
    after: Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"{' '.join(f'{key}={size}' for key, size in self.dims.items())}, {self.family} inputs"


@dataclass(frozen=True)
class Comparison:
    """The largest share of the tolerance that an error takes up, and the fault where there is one."""

    error: float
    kind: Kind | None = None
    detail: str = ""


def compare(task: Task, outputs: Tensors, truth: dict[str, Truth], inputs: Tensors) -> Comparison:
    """Every element of every output against the oracle."""
    worst = 0.0
    for one in task.outputs:
        out, exact = outputs[one.name], truth[one.name]
        if out.numel() == 0:
            continue
        wide = out.double()
        if not bool(torch.isfinite(wide).all()):
            count = int((~torch.isfinite(wide)).sum())
            why = f"{count} of {out.numel()} elements of {one.name} are no numbers"
            return Comparison(float("inf"), Kind.NON_FINITE, why)
        error = (wide - exact.value).abs()
        wrong = error > task.bound(exact)
        share = float(task.share(error, exact).max())
        worst = max(worst, share)
        if bool(wrong.any()):
            return Comparison(share, *_describe(one.name, out, exact, error, wrong, inputs))
    return Comparison(worst)


def _describe(name: str, out: Tensor, truth: Truth, error: Tensor, wrong: Tensor, inputs: Tensors) -> tuple[Kind, str]:
    at = int((error * wrong).flatten().argmax())
    got, wanted = float(out.flatten()[at]), float(truth.value.flatten()[at])
    count = f"{int(wrong.sum())} of {out.numel()} elements of {name} are wrong"
    example = f"{count}, such as element {at}: {got:.7g} instead of {wanted:.7g}"
    if out.numel() > 1 and bool((out == out.flatten()[0]).all()) and float(truth.value.std()) > 0:
        return Kind.CONSTANT_OUTPUT, f"{name} is {got:.4g} throughout"
    for other, x in inputs.items():
        same = min(x.numel(), out.numel())
        if out.numel() > 1 and x.dtype == out.dtype and torch.equal(x.flatten()[:same], out.flatten()[:same]):
            return Kind.COPIED_INPUT, f"{name} is a copy of {other}"
    if out.is_floating_point() and bool((error <= COARSE * truth.scale + FLOOR).all()):
        return Kind.PRECISION, f"{example}: as if computed in fewer bits than float32"
    return Kind.MISMATCH, example


def judge(task: Task, launch: Launch, trials: Sequence[Trial], *, bits: bool) -> float:
    """All trials of a candidate; returns the largest share of the tolerance that an error takes up.

    Args:
        bits: whether launches on the same inputs must give the same bits. What no bound shows, as a little of what
            memory held before, or of who came first to a place, shows in them.
    Raises:
        Rejected: wrong or cheating.
    """
    found: list[Comparison] = []
    for trial in trials:
        after = trial.after
        assert after is not None
        if changed := trial.layout.changed_inputs(trial.before, after):
            raise Rejected(
                Verdict.CHEATING, Kind.INPUT_MUTATED, f"changed its input {', '.join(changed)}", (trial.name,)
            )
        if count := trial.layout.changed_guards(trial.before, after):
            raise Rejected(
                Verdict.WRONG, Kind.OUT_OF_BOUNDS, f"changed {count} bytes beyond its buffers", (trial.name,)
            )
        if left := trial.layout.unwritten(after, launch):
            name, count = next(iter(left.items()))
            found.append(Comparison(float("inf"), Kind.NEVER_WRITTEN, f"{count} elements of {name} were never written"))
        else:
            truth = task.truth(trial.inputs, trial.dims)
            found.append(compare(task, trial.layout.outputs(after), truth, trial.inputs))
    bad = [number for number, one in enumerate(found) if one.kind]
    if not bad:
        if bits:
            _require_the_same_bits(trials)
        return max(one.error for one in found)
    # what is wrong by more than too few bits in one trial is not a question of bits in the others
    first = next((number for number in bad if found[number].kind is not Kind.PRECISION), bad[0])
    kind, detail = found[first].kind, found[first].detail
    if _always_the_same(task, trials):
        kind, detail = Kind.CONSTANT_OUTPUT, f"gives the same result whatever the input; {detail}"
    elif all(trials[number].hidden for number in bad) and not all(trial.hidden for trial in trials):
        kind, detail = Kind.HELD_OUT, f"right on the shapes shown, not on others: {detail}"
    if all(trials[number].repeats >= 0 and not found[trials[number].repeats].kind for number in bad):
        kind, detail = Kind.NOT_DETERMINISTIC, f"right, but wrong on the same inputs in other memory: {detail}"
    raise Rejected(Verdict.WRONG, kind, detail, tuple(trials[number].name for number in bad[:5]))


def _require_the_same_bits(trials: Sequence[Trial]) -> None:
    for trial in trials:
        if trial.repeats < 0:
            continue
        first = trials[trial.repeats]
        assert first.after is not None and trial.after is not None
        for slot in trial.layout.slots:
            if slot.role == "output" and slot.size:
                one, other = slot.view(first.after).flatten(), slot.view(trial.after).flatten()
                if count := int((one != other).sum()):
                    at = int((one != other).nonzero()[0])
                    raise Rejected(
                        Verdict.WRONG, Kind.NOT_DETERMINISTIC,
                        f"right, but {count} of {one.numel()} elements of {slot.name} differ on the same inputs in "
                        f"other memory, such as element {at}: {float(one[at]):.9g} and {float(other[at]):.9g}",
                        (trial.name,),
                    )  # fmt: skip


def _always_the_same(task: Task, trials: Sequence[Trial]) -> bool:
    """Whether all outputs of all trials are one and the same number."""
    values = [
        trial.layout.outputs(trial.after)[one.name].double().flatten()
        for trial in trials
        for one in task.outputs
        if trial.after is not None
    ]
    together = torch.cat(values)
    return len(trials) > 1 and bool((together == together[0]).all())
