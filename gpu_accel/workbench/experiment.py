"""What an experiment is: cases, the implementations that compete in each, and how each of them is checked.

A paper's `experiment.py` offers `EXPERIMENTS: dict[str, Experiment]`. An experiment lists its cases and builds, for one
case, a `Workload`: implementations with a way to make inputs, to check the result and, where it is about more than
time, to produce other values. Everything else (checking first, timing, records) is the runner's business.

Building a workload must be cheap and allocate nothing on the device: `--dry-run` builds too. Memory is allocated by
`Implementation.make` and `Implementation.check`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.workbench.invariants import COLD_L2

Scalar = str | int | float | bool
Case = dict[str, Scalar]

ROLES = ("ours", "peer", "reference")
ATTENTION_AXES = {"batch": 4, "seqlen": 2048, "heads": 16, "head_dim": 128}  # with the sizes of examples
ATTENTION_EXTRA = ("seqlen_q", "seqlen_k", "heads_kv", "causal")
SWITCHES = ("causal",)
TRUE_OR_FALSE = ("false", "true")  # words of a shape that are read as bool
LARGEST_SIZE = 2**40  # of one axis; nothing larger fits in any memory
MOST_NUMBERS = 2**44  # of the tensors of a case; 32 TiB in 16 bits
SEEDS = 2**63


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user chose for one run; the same fields are the CLI's options and the notebook's parameter cell."""

    device: str = "auto"  # "auto" | "cuda" | "cuda:N" | "cpu"; experiments see it resolved to "cuda" or "cpu"
    precision: str = "bf16"  # "bf16" | "fp16" | "fp8"
    input: str = "normal"  # kind of input data, one of the paper's inputs
    shapes: tuple[Case, ...] = ()  # shapes asked for instead of the experiment's own, see parse_shape
    only: tuple[str, ...] = ()  # implementations to run; empty means all
    skip: tuple[str, ...] = ()  # implementations to leave out
    seed: int = 0
    seconds: float = 0.25  # timing budget for each implementation in each case
    quick: bool = False  # few and small cases, for a first look
    mode: str = "burst"  # "burst" | "sustained" (back-to-back load, what a long job sees)
    flush_l2: bool = True  # cold second-level cache before every timed call
    noise: float = 0.01  # stop when the relative half-width of the 95 % interval is below this
    output: str | None = None  # JSON Lines file that finished records are appended to

    def __post_init__(self) -> None:
        if self.mode not in ("burst", "sustained"):
            raise InvalidInputError(f"mode is {self.mode!r}; choose 'burst' or 'sustained'")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < SEEDS:
            raise InvalidInputError(f"seed is {shown(self.seed)}; it must be an integer from 0 to 2**63 - 1")
        if not _is_number(self.seconds) or not 0 < self.seconds < math.inf:
            raise InvalidInputError(
                f"seconds is {shown(self.seconds)}; it must be a positive finite number, for example 0.25"
            )
        if not _is_number(self.noise) or not 0 < self.noise < 1:
            raise InvalidInputError(f"noise is {self.noise!r}; it must lie between 0 and 1, for example 0.01")

    @property
    def on_gpu(self) -> bool:
        """Whether the (resolved) device is a GPU, so that times mean something."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Check:
    """The outcome of a comparison with the truth: `error` in the unit of `metric`, and the largest error allowed."""

    error: float
    bound: float
    metric: str

    @property
    def ok(self) -> bool:
        """True when 0 <= error <= bound; NaN and infinity never pass, neither as error nor as bound."""
        return math.isfinite(self.bound) and 0 <= self.error <= self.bound

    @classmethod
    def validated(cls, check: object) -> Check:
        """What a check function returned, with plain floats in it.

        Raises:
            TypeError: it is no Check, or a field has the wrong type.
        """
        if not isinstance(check, cls):
            raise TypeError(f"the check returned {shown(check)}, not a Check")
        for name in ("error", "bound"):
            if not _is_number(getattr(check, name)):
                raise TypeError(f"the {name} of the check is {shown(getattr(check, name))}, not a number")
        if not isinstance(check.metric, str):
            raise TypeError(f"the metric of the check is {shown(check.metric)}, not a string")
        return cls(float(check.error), float(check.bound), check.metric)

    def as_dict(self) -> dict[str, float | str]:
        """The form kept in records."""
        return {"error": self.error, "bound": self.bound, "metric": self.metric}


@dataclass(frozen=True)
class Timed:
    """What `Implementation.make` may return to tie the time to a correct result.

    `call` is what is timed. `verify()` is called once after timing: it judges an output of that very `call`, on the
    inputs that were timed, and raises IncorrectResultError when these have changed. A time is kept only if it passes.
    """

    call: Callable[[], object]
    verify: Callable[[], Check]

    def __call__(self) -> object:
        return self.call()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A metric that was read more than once, with what its record keeps beside it.

    Args:
        samples: one reading each, all in `unit`; the record's value is their median.
        work: {"flops", "bytes"} of one call, for the metric "time", from which rates follow.
        timing: how the samples were taken: "method", for a time also "l2".
        env: clocks, power and throttling beside them, as `ClockSampler.summary` gives them.
        metric: what was read, if not the name it is given under: "time" is read with a cold and with a warm cache.
    """

    samples: tuple[float, ...]
    unit: str
    metric: str = ""
    work: dict[str, float] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Implementation:
    """One competitor in a case.

    Args:
        name: name in records, such as "portable" or "sdpa-flash".
        role: "ours", "peer" or "reference".
        unavailable: why it cannot run here; empty when it can.
        check: `check(seed)` draws fresh inputs from the seed, poisons the outputs, runs once and compares every
            element with a float64 truth. May raise UnsupportedError or HardwareError (skipped with that reason).
        make: `make(seed)` allocates fresh inputs and returns the zero-argument call that is timed, with nothing in it
            but the work. None when the experiment is not about time. A `Timed` has the call verified after timing.
        values: `values(seed)` returns metrics that it takes itself, `{"rmse": (9e-3, "1")}` as (value, unit), or as
            `Sampled` where there are several readings of one.
        on_device: False for arithmetic that runs nothing on the GPU: its values are "checked" there too.
        note: a remark kept in its records.
    """

    name: str
    role: str
    unavailable: str = ""
    check: Callable[[int], Check] | None = None
    make: Callable[[int], Callable[[], object]] | None = None
    values: Callable[[int], dict[str, Any]] | None = None
    on_device: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidInputError(f"role of {self.name!r} is {self.role!r}; choose one of {', '.join(ROLES)}")
        if self.check is None and not self.unavailable:
            raise InvalidInputError(f"{self.name!r} has no check; only an unavailable implementation may go without")


@dataclass(kw_only=True)
class Workload:
    """One case, ready to run: the competitors and the work that any of them has to do.

    Args:
        implementations: the competitors, in the order of tables.
        baselines: names that each implementation is compared with (`Record.ratio_to`).
        flops: floating-point operations of the case, None when rates make no sense.
        bytes_moved: compulsory device-memory traffic in bytes, each input read once and each output written once.
        input_source: where the inputs come from, when not random ("smollm2 layer 12", ...).
        l2: "flushed", or "clean" where the competitors mostly read and the cache must not make them wait for lines
            that are not theirs; see `timing.compare`.
    """

    implementations: list[Implementation]
    baselines: tuple[str, ...] = ()
    flops: float | None = None
    bytes_moved: float | None = None
    input_source: str = ""
    l2: str = "flushed"

    def __post_init__(self) -> None:
        names = self.names
        if self.l2 not in COLD_L2:
            raise InvalidInputError(f"l2 is {self.l2!r}; choose one of {', '.join(COLD_L2)}")
        if len(set(names)) != len(names):
            raise InvalidInputError(f"implementation names must differ, got {', '.join(names)}")
        if unknown := [name for name in self.baselines if name not in names]:
            raise InvalidInputError(
                f"baselines name {', '.join(map(str, unknown))}; implementations here: {', '.join(names) or 'none'}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(implementation.name for implementation in self.implementations)

    @property
    def work(self) -> dict[str, float]:
        """`{"flops": ..., "bytes": ...}`, only what is known."""
        amounts = {"flops": self.flops, "bytes": self.bytes_moved}
        return {key: float(amount) for key, amount in amounts.items() if amount is not None}


@runtime_checkable
class Experiment(Protocol):
    """One experiment of a paper."""

    name: str
    title: str

    def cases(self, settings: Settings) -> list[Case]:
        """The cases to run: flat dictionaries of JSON scalars holding every condition (shape, dtype, causal, ...)."""
        ...

    def build(self, case: Case, settings: Settings) -> Workload:
        """The competitors of one case. Allocates nothing on the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class SimpleExperiment:
    """An experiment made of two functions, for those that need no class of their own.

    Args:
        axes: the sizes that --shape may give, in the order of its positional form, each with that of an example. Empty
            where the experiment has sizes of its own, or takes those of attention.
        words: what else a shape may say, and the words that it may be.
    """

    name: str
    title: str
    axes: Mapping[str, int] = field(default_factory=dict, hash=False)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    list_cases: Callable[[Settings], list[Case]] = field(repr=False)
    build_case: Callable[[Case, Settings], Workload] = field(repr=False)

    def cases(self, settings: Settings) -> list[Case]:
        return self.list_cases(settings)

    def build(self, case: Case, settings: Settings) -> Workload:
        return self.build_case(case, settings)


def select(names: Iterable[str], *, only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[str]:
    """The names that `only` and `skip` leave, in their own order.

    Raises:
        InvalidInputError: a name in `only` or `skip` is not among `names`.
    """
    names, only, skip = list(names), list(only), list(skip)
    for option, chosen in (("only", only), ("skip", skip)):
        unknown = [name for name in chosen if name not in names]
        if unknown:
            raise InvalidInputError(
                f"{option} names {', '.join(unknown)}; available here: {', '.join(names) or 'none'}"
                + did_you_mean(unknown[0], names)
            )
    return [name for name in names if (not only or name in only) and name not in skip]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`. Did you mean hopper?` for a word that is nearly one of those known, else nothing; the end of an error."""
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.5)
    return f". Did you mean {' or '.join(close)}?" if close else ""


def parse_shape(
    text: str,
    axes: Mapping[str, int] = ATTENTION_AXES,
    extra: tuple[str, ...] = ATTENTION_EXTRA,
    words: Mapping[str, tuple[str, ...]] | None = None,
) -> Case:
    """Read a shape as people type it: `4x2048x16x128`, or `batch=4,seqlen=16k,heads=16,head_dim=128`.

    The positional form gives all of `axes` in order; the named form any of `axes`, `extra` and `words`. Sizes are
    positive integers, `16k` is 16384; `true` and `false` are allowed for switches such as `causal`, and what `words`
    says for each of its names.

    Args:
        axes: names, each with the size of an example.

    Raises:
        InvalidInputError: the text does not follow either form, with examples that do.
    """
    words = words or {}
    known = (*axes, *extra, *words)
    examples = f"{'x'.join(map(str, axes.values()))}  or  {_named(axes)}"

    def wrong(why: str) -> InvalidInputError:
        return InvalidInputError(f"cannot read shape {shown(text)}: {why}. Examples: {examples}")

    shape: Case = {}
    if "=" not in text:
        parts = _parts(text)
        if len(parts) != len(axes):
            raise wrong(f"{len(parts)} sizes where {len(axes)} are needed ({' x '.join(axes)})")
        pairs = list(zip(axes, parts, strict=True))
    else:
        pairs = []
        for key, equals, value in _items(text):
            if not equals:
                raise wrong(f"{key!r} has no '='")
            if key not in known:
                raise wrong(f"unknown name {key!r}, known are {', '.join(known)}")
            if key in [seen for seen, _ in pairs]:
                raise wrong(f"{key!r} is given twice")
            pairs.append((key, value))
    for key, value in pairs:
        word = value.strip().lower()
        if key in words:
            if word not in words[key]:
                raise wrong(f"{key} is {shown(value.strip())}; choose one of {', '.join(words[key])}")
            shape[key] = word == "true" if words[key] == TRUE_OR_FALSE else word
            continue
        parsed = _size_or_switch(word)
        if parsed is None or isinstance(parsed, bool) != (key in SWITCHES):
            raise wrong(
                f"{key} is {shown(value.strip())}, not {'true or false' if key in SWITCHES else 'a positive integer'}"
            )
        if parsed > LARGEST_SIZE:
            raise wrong(f"{key} is {shown(value.strip())}, above the largest size, 2**40")
        shape[key] = parsed
    if "seqlen" in shape and (twice := [key for key in ("seqlen_q", "seqlen_k") if key in shape]):
        raise wrong(f"seqlen sets seqlen_q and seqlen_k, so {' and '.join(twice)} cannot be given beside it")
    return shape


def shape_for(text: str, experiments: Iterable[Experiment]) -> Case:
    """A shape as `parse_shape` reads it, in the names of those experiments that have some; else in attention's.

    Where experiments have different names, all in a shape must be those of one.

    Raises:
        InvalidInputError: as parse_shape; no experiment has all the names, or sizes alone fit several.
    """
    able = [one for one in experiments if _axes(one)]
    forms: dict[tuple[str, ...], Experiment] = {}
    for one in able:
        forms.setdefault(_names(one), one)
    if not forms:
        return parse_shape(text)
    if len(forms) > 1:
        if "=" in text:
            given = {key for key, _, _ in _items(text)}
            forms = {names: one for names, one in forms.items() if given <= set(names)}
        else:
            forms = {names: one for names, one in forms.items() if len(_parts(text)) == len(_axes(one))}
        if not forms or "=" not in text and len(forms) > 1:
            why = (
                "give names, for these sizes fit several experiments" if forms else "no experiment here has all of that"
            )
            takes = "; ".join(f"{one.name} takes {', '.join(_names(one))}" for one in able)
            raise InvalidInputError(
                f"cannot read shape {shown(text)}: {why}: {takes}. Example: {_named(_axes(able[0]))}"
            )
    one = next(iter(forms.values()))
    return parse_shape(text, _axes(one), (), getattr(one, "words", {}))


def for_experiment(settings: Settings, experiment: Experiment) -> Settings:
    """Settings without the shapes that are for other experiments: those with names that it does not have."""
    if not _axes(experiment):
        return settings
    names = set(_names(experiment))
    return dataclasses.replace(settings, shapes=tuple(shape for shape in settings.shapes if names.issuperset(shape)))


def completed(shapes: Iterable[Case], first: Case, every: Mapping[str, Sequence[Scalar]] | None = None) -> list[Case]:
    """The cases of shapes that were asked for: what they leave out is each of `every`, or else as in `first`."""
    found: list[Case] = []
    for shape in shapes:
        open_ = {name: values for name, values in (every or {}).items() if name not in shape}
        for chosen in itertools.product(*open_.values()):
            case = {**first, **shape, **dict(zip(open_, chosen, strict=True))}
            if case not in found:
                found.append(case)
    return found


def refuse_beyond_memory(numbers: int) -> None:
    """Before anything has such a size: torch would count its bytes wrongly, or have no words of memory for it.

    Raises:
        UnsupportedError: so many numbers fit nowhere.
    """
    if numbers > MOST_NUMBERS:
        raise UnsupportedError(f"tensors of {numbers:.2g} numbers are beyond any memory")


def _axes(experiment: Experiment) -> Mapping[str, int]:
    return getattr(experiment, "axes", {})


def _names(experiment: Experiment) -> tuple[str, ...]:
    return (*_axes(experiment), *getattr(experiment, "words", {}))


def _named(axes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _parts(text: str) -> list[str]:
    return text.lower().replace("×", "x").split("x")


def _items(text: str) -> list[tuple[str, str, str]]:
    """(name, "=", value) of each item; ("item", "", "") of one without "="."""
    split = (item.strip().partition("=") for item in text.split(",") if item.strip())
    return [(key.strip(), equals, value) for key, equals, value in split]


def _size_or_switch(word: str) -> int | bool | None:
    if word in ("true", "false"):
        return word == "true"
    scale = 1024 if word.endswith("k") else 1
    digits = word.removesuffix("k")
    if not (digits.isascii() and digits.isdigit()):
        return None
    digits = digits.lstrip("0")
    if len(digits) > 20:  # int() refuses thousands of digits; the caller refuses this
        return LARGEST_SIZE + 1
    return int(digits) * scale if digits else None


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
