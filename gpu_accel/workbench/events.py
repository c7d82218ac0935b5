"""What a run tells while it goes on, for a progress bar, a notebook or a log. Listening can never break the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_accel.workbench.experiment import Case, Check

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """Everything is settled; `cases` counts those of all experiments.

    `resume_refused` says why earlier results are not reused, when some were given.
    """

    paper: str
    experiments: tuple[str, ...]
    cases: int
    device: str
    gpu: str
    resume_refused: str = ""


@dataclass(frozen=True, kw_only=True)
class CaseStarted:
    """Case `index` (from 1) of `total` begins; `implementations` are those that will be tried."""

    experiment: str
    case: Case
    index: int
    total: int
    implementations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckStarted:
    """The implementation is about to be checked, which may compile it."""

    experiment: str
    case: Case
    impl: str


@dataclass(frozen=True, kw_only=True)
class ImplementationChecked:
    """The check is done; `check.ok` says whether it passed."""

    experiment: str
    case: Case
    impl: str
    check: Check


@dataclass(frozen=True, kw_only=True)
class ImplementationSkipped:
    """The implementation does not run in this case, and why."""

    experiment: str
    case: Case
    impl: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ImplementationIncorrect:
    """The result is wrong, or the implementation failed where it should work, and why."""

    experiment: str
    case: Case
    impl: str
    why: str


@dataclass(frozen=True, kw_only=True)
class TimingStarted:
    """The implementations that passed are being timed together."""

    experiment: str
    case: Case
    implementations: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CaseFinished:
    """The case is done and its `records` are saved."""

    experiment: str
    case: Case
    index: int
    total: int
    records: tuple[Record, ...]


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """The end, also after an interruption; `status` as in `RunResult.status`."""

    status: str
    records: int


Event = (
    RunStarted
    | CaseStarted
    | CheckStarted
    | ImplementationChecked
    | ImplementationSkipped
    | ImplementationIncorrect
    | TimingStarted
    | CaseFinished
    | RunFinished
)


class Listener:
    """Passes events on; a listener that raises is reported once and not called again."""

    def __init__(self, on_event: Callable[[Event], object] | None) -> None:
        self._on_event = on_event

    def __call__(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:
            self._on_event = None
            warnings.warn(f"progress display stopped: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
