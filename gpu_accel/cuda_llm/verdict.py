"""What the harness says of a candidate: one word, the kind of fault where there is one, and the evidence.

`wrong` and `cheating` differ in what is on record. A kernel whose output is wrong is `wrong`, with a kind that says in
what way (never written, constant, a copy of an input); a bug looks the same, so nothing is alleged. `cheating` is for
candidates that reach beyond a kernel: host code that meddles, changed inputs, caches, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The outcome of one check."""

    ACCEPTED = "accepted"
    MALFORMED = "malformed"  # not a candidate at all: no kernel, a broken launch spec, constructs outside the language
    COMPILE_ERROR = "compile_error"
    WRONG = "wrong"
    CHEATING = "cheating"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    OOM = "oom"
    FASTER_THAN_PHYSICS = "faster_than_physics"
    UNVERIFIED = "unverified"  # it compiles, and nothing on this machine can run it


class Kind(StrEnum):
    """In what way a candidate is wrong or cheats."""

    # beyond a kernel
    HOST_CODE = "host_code"  # statements beside the kernel
    LIBRARY_CALL = "library_call"  # torch or another library does the work
    FALLBACK = "fallback"  # try/except around the kernel
    CLOCK = "clock"  # reads or replaces a clock
    SIDE_STREAM = "side_stream"
    BACKGROUND_WORK = "background_work"  # threads, processes
    LAZY_OUTPUT = "lazy_output"  # classes whose result is computed when it is looked at
    INTROSPECTION = "introspection"  # gc, frames, ctypes, eval
    TAMPERING = "tampering"  # assigns to attributes of other objects
    INPUT_OUTPUT = "input_output"  # files, sockets, processes, printing
    FORGED_VERDICT = "forged_verdict"  # ends the process, prints a verdict
    STATE = "state"  # keeps values between calls: globals, mutable defaults, __device__ variables
    CACHE_POLICY = "cache_policy"  # keeps lines in the second-level cache past the flush
    INLINE_CODE = "inline_code"  # assembly or other code that the check cannot read
    INPUT_MUTATED = "input_mutated"
    # wrong results
    NEVER_WRITTEN = "never_written"
    NON_FINITE = "non_finite"
    CONSTANT_OUTPUT = "constant_output"
    COPIED_INPUT = "copied_input"
    OUT_OF_BOUNDS = "out_of_bounds"  # wrote beyond a buffer
    PRECISION = "precision"  # close, but not as close as the dtype demands
    HELD_OUT = "held_out"  # right on the shapes that are shown, wrong on others
    RACE = "race"  # threads of a block meet in shared memory without a barrier
    NOT_DETERMINISTIC = "not_deterministic"  # reads memory that was never written, or races
    MISMATCH = "mismatch"


def printable(text: str) -> str:
    """The text with escapes such as \\x1b for what a terminal would not show as a letter."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its reasons.

    Args:
        detail: one sentence, with numbers.
        evidence: lines of source or shapes that show it.
        verified_by: the checks that were passed, in order; what a verdict rests on.
        sandbox: the level of isolation that the candidate ran under.
    """

    verdict: Verdict
    kind: Kind | None = None
    detail: str = ""
    evidence: tuple[str, ...] = ()
    verified_by: tuple[str, ...] = ()
    sandbox: str = ""
    error: float | None = None  # the largest, as a share of the tolerance, where outputs were compared

    def __post_init__(self) -> None:
        """What quotes a candidate, or what a compiler says of it, is shown in terminals: none of it moves a cursor."""
        object.__setattr__(self, "detail", printable(self.detail))
        object.__setattr__(self, "evidence", tuple(printable(one) for one in self.evidence))

    @property
    def ok(self) -> bool:
        return self.verdict is Verdict.ACCEPTED

    @property
    def name(self) -> str:
        """`cheating(clock)`, `wrong(precision)`, `accepted`."""
        return f"{self.verdict}({self.kind})" if self.kind else str(self.verdict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": str(self.verdict),
            "kind": str(self.kind) if self.kind else None,
            "detail": self.detail,
            "evidence": list(self.evidence),
            "verified_by": list(self.verified_by),
            "sandbox": self.sandbox,
            "error": self.error,
        }

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


@dataclass(eq=False)
class Rejected(Exception):
    """Raised inside the harness where a check ends with a verdict; `check` returns its judgement."""

    verdict: Verdict
    kind: Kind | None
    detail: str
    evidence: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.detail

    @property
    def judgement(self) -> Judgement:
        return Judgement(verdict=self.verdict, kind=self.kind, detail=self.detail, evidence=self.evidence)
