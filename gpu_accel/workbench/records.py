"""Results as JSON lines: one record per (experiment, implementation, case, metric).

A record says by its ``kind`` how far its number may be trusted, and the constructor refuses a record that claims more
than it can show: a time without a passed correctness check, a rate above the peak of the device, a model without an
interval, a quotation without a source.

    measured   run on a GPU                          needs env.gpu, and for a speed also checks, samples and L2 state
    checked    run on a CPU, correctness only        carries no speed of any sort
    modelled   from a cost model                     needs its interval, held in p20 and p80
    quoted     somebody else's number                needs its source
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.workbench.invariants import MILLISECONDS, SCHEMA, Invariants, Scalar, is_speed

try:  # Windows has no fcntl; there, appending relies on O_APPEND alone.
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


def utc_now() -> str:
    """The time as an ISO 8601 string in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One result; see the module docstring for what each ``kind`` must carry.

    ``median``, ``p20``, ``p80`` and ``samples`` are in ``unit``. ``ratio_to[other]`` is other's time / this time, so
    above 1 means that this implementation is faster; only implementations interleaved in one run have a ratio.
    ``env`` may hold ``peak_tflops`` (a number, or one per dtype) and ``peak_gbps``, both at the highest clock.
    Raises InvalidInputError (a ValueError) when an invariant does not hold.
    """

    kind: str
    paper: str
    experiment: str
    case: dict[str, Scalar]
    impl: str
    metric: str
    unit: str
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    samples: tuple[float, ...] = ()
    work: dict[str, float] = field(default_factory=dict)
    checked: dict[str, Any] | None = None
    ratio_to: dict[str, dict[str, Any]] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    commit: str = ""
    dirty: bool = False
    time: str = field(default_factory=utc_now)
    input_source: str = ""
    note: str = ""
    schema: int = SCHEMA
    location: str = field(default="", compare=False)  # "file:line" where it was read; never written

    def __post_init__(self) -> None:
        if not isinstance(self.samples, list | tuple):
            raise InvalidInputError(f"samples must be a list of numbers, not {shown(self.samples)}")
        object.__setattr__(self, "samples", tuple(self.samples))
        Invariants(self).hold()

    # -- reading a value

    @property
    def is_speed(self) -> bool:
        """Whether the metric is a time or a rate."""
        return is_speed(self.metric, self.unit)

    @property
    def name(self) -> str:
        """Where the record was read, or what it is about: how a verdict cites it."""
        if self.location:
            return self.location
        case = ",".join(f"{key}={value}" for key, value in sorted(self.case.items()))
        return f"{self.paper}/{self.experiment}/{self.impl}/{self.metric}[{case}]"

    def has(self, metric: str) -> bool:
        """Whether ``value(metric)`` gives a number."""
        return self.median is not None and self._convert(metric, self.median) is not None

    def value(self, metric: str | None = None) -> float:
        """The median of ``metric`` (default: the record's own), or of one derived from it.

        Derived from a time: "ms", "tflops" (work.flops / time, in 1e12/s) and "gbps" (work.bytes / time, in 1e9/s).
        """
        wanted = self.metric if metric is None else metric
        if self.median is None:
            raise InvalidInputError(f"{self.name}: a record of {self.metric!r} without a value has no {wanted!r}")
        converted = self._convert(wanted, self.median)
        if converted is None:
            raise InvalidInputError(
                f"{self.name}: {wanted!r} does not follow from {self.metric!r} in {self.unit} and work {self.work}"
            )
        return converted

    def interval(self, metric: str | None = None) -> tuple[float, float] | None:
        """(low, high) of ``value(metric)`` between the 20th and 80th percentile, or None when they are not known."""
        if self.p20 is None or self.p80 is None:
            return None
        wanted = self.metric if metric is None else metric
        ends = [self._convert(wanted, end) for end in (self.p20, self.p80)]
        known = sorted(end for end in ends if end is not None)
        return (known[0], known[1]) if len(known) == 2 else None

    def _convert(self, metric: str, value: float) -> float | None:
        if metric == self.metric:
            return value
        if self.metric != "time" or self.unit not in MILLISECONDS:
            return None
        ms = value * MILLISECONDS[self.unit]
        if metric == "ms":
            return ms
        work = {"tflops": ("flops", 1e9), "gbps": ("bytes", 1e6)}.get(metric)
        if work is None or not self.work.get(work[0]) or ms <= 0:
            return None
        return self.work[work[0]] / (ms * work[1])

    # -- identity

    @property
    def key(self) -> tuple[str, ...]:
        """What the record is about: two records with one key are two runs of the same thing, and the newest counts.

        The kind belongs to it, so that a model or a quotation never replaces a measurement, and so do the load (burst
        or sustained) and the state of the cache, since those are different quantities.
        """
        case = json.dumps(self.case, sort_keys=True)
        gpu, mode, l2 = (str(x or "") for x in (self.env.get("gpu"), self.timing.get("mode"), self.timing.get("l2")))
        return (self.kind, self.paper, self.experiment, self.impl, case, self.metric, gpu, mode, l2)

    @property
    def when(self) -> datetime:
        """``time`` as an aware datetime."""
        return datetime.fromisoformat(self.time)

    # -- JSON

    def to_json(self) -> str:
        """One line of JSON without a newline, fields in the order of the class."""
        return json.dumps({name: getattr(self, name) for name in _FIELDS}, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str, *, location: str = "") -> Record:
        """Read one line; refuses other schemas, unknown or missing fields, and records that break an invariant."""
        where = f"{location}: " if location else ""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:  # also integers of too many digits, and nesting without end
            raise InvalidInputError(f"{where}not JSON: {error}") from error
        if "\\ud" in line.lower():  # half a surrogate pair, as of a path that is no text, can be written nowhere again
            data = json.loads(json.dumps(data, ensure_ascii=False).encode("utf-8", "replace"))
        if not isinstance(data, dict):
            raise InvalidInputError(f"{where}a record is a JSON object, not {type(data).__name__}")
        if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
            raise InvalidInputError(f"{where}schema {shown(data.get('schema'))}; only schema {SCHEMA} is read here")
        if unknown := sorted(data.keys() - _FIELDS.keys()):
            raise InvalidInputError(f"{where}unknown fields {unknown}")
        if missing := sorted(_REQUIRED - data.keys()):
            raise InvalidInputError(f"{where}missing fields {missing}")
        try:
            return cls(**data, location=location)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"{where}{error}") from error


_FIELDS = {f.name: f for f in dataclasses.fields(Record) if f.name != "location"}
_REQUIRED = {
    name for name, f in _FIELDS.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
} | {"schema", "time"}


# -- files


def gpu_slug(sku: str) -> str:
    """The folder name of a GPU: "H100 SXM" -> "h100-sxm"."""
    slug = re.sub(r"[^a-z0-9]+", "-", sku.lower()).strip("-")
    if not slug:
        raise InvalidInputError(f"no folder name can be made from the GPU name {sku!r}")
    return slug


def result_file(paper: Path, *, sku: str, commit: str, tag: str = "", day: str = "") -> Path:
    """Where results of a paper go: <paper>/results/<gpu>/<YYYY-MM-DD>-<short commit>[-tag].jsonl."""
    name = "-".join(part for part in (day or utc_now()[:10], commit[:7] or "uncommitted", tag) if part)
    return paper / "results" / gpu_slug(sku) / f"{name}.jsonl"


def append_records(path: str | Path, records: Iterable[Record]) -> None:
    """Append whole lines in one write, under a lock, so that rows finished before an interruption survive it."""
    data = "".join(record.to_json() + "\n" for record in records).encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        head, newline, tail = file.read().rpartition(b"\n")
        if tail:  # an earlier writer died inside a line: keep the line if it is whole, else drop the fragment
            if _is_whole(tail):
                data = b"\n" + data
            else:
                file.truncate(len(head) + len(newline))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_records(path: str | Path) -> list[Record]:
    """Every record of a .jsonl file, or of all of them below a folder (in the order of their paths).

    A last line without a newline that does not parse is the trace of an interrupted run: it is skipped with a warning.
    Anything else that is wrong raises InvalidInputError naming file and line.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.jsonl") if not file.is_dir())  # what lies in one is found itself
        return [record for file in files for record in read_records(file)]
    if not path.is_file():
        raise InvalidInputError(f"no results at {path}")
    lines = path.read_bytes().split(b"\n")  # bytes, since an interruption may cut a line inside a character
    torn = lines.pop()
    if whole := torn and _is_whole(torn):
        lines.append(torn)
    records = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if torn and not whole:
        warnings.warn(f"{path}:{len(lines) + 1}: an interrupted run left an unfinished line; skipped", stacklevel=2)
    return records


def _read_line(line: bytes, location: str) -> Record:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{location}: not UTF-8: {error}") from error
    return Record.from_json(text, location=location)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return False
    return True


def merge(records: Iterable[Record]) -> list[Record]:
    """The newest record of every key (a later one in the input wins a tie), in the order in which keys first appear."""
    newest: dict[tuple[str, ...], Record] = {}
    for record in records:
        known = newest.get(record.key)
        if known is None or record.when >= known.when:
            newest[record.key] = record
    return list(newest.values())
