"""Run a paper's experiments: check first, time only what passed, keep every finished case.

The command line and the notebooks both call `run`; `plan` says what it would do. A result that fails its check is never
timed. Records of a case are appended to the output file as the case finishes, so that an interruption loses at most the
case at hand, and `resume_from` continues from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_accel.errors import GpuAccelError, HardwareError, IncorrectResultError, UnsupportedError, shown
from gpu_accel.workbench import events, statistics, timing
from gpu_accel.workbench.events import Event, Listener
from gpu_accel.workbench.experiment import Case, Check, Implementation, Sampled, Settings, Timed, Workload
from gpu_accel.workbench.host import Host, resolve_device
from gpu_accel.workbench.invariants import COLD_L2
from gpu_accel.workbench.planning import SUSTAINED_SECONDS, Item, Plan, find_paper, list_items, plan, settle
from gpu_accel.workbench.records import Record, append_records, read_records
from gpu_accel.workbench.samples import Samples, reason

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

__all__ = ["Event", "Outcome", "Plan", "RunResult", "plan", "resolve_device", "run"]

EXIT_CODES = {"ok": 0, "incorrect": 3, "unsupported": 4, "nothing_ran": 5, "interrupted": 130}
INPUT_SETS = 3
MEMORY_BOUND_BYTES = 2**29
# What has to be the same for an earlier result to stand in for a new one, beside commit, GPU and way of timing.
SAME_ENVIRONMENT = ("torch", "triton", "cuda", "cudnn", "driver", "python", "cpu")
DIRTY = "the tree has uncommitted changes, so nobody can tell whether earlier results come from the same code"
Calls = dict[str, list[Callable[[], object]]]
# Values that depend on arithmetic alone, so that a CPU may report them; bytes and rates it may not.
ERROR_METRICS = frozenset({"rmse", "max_abs", "mean_abs", "cosine", "sqnr", "bias"})


class Outcome(NamedTuple):
    """An implementation that gave no record in a case, and why. `impl` is "*" where the whole case is meant.

    `check` is there when a comparison with the truth has failed, and not when something else went wrong.
    """

    impl: str
    case: Case
    why: str
    experiment: str
    role: str = ""
    check: Check | None = None


@dataclass(kw_only=True)
class RunResult:
    """What a run produced. `resumed` are records that were there already and made work unnecessary."""

    records: list[Record] = field(default_factory=list)
    skipped: list[Outcome] = field(default_factory=list)
    incorrect: list[Outcome] = field(default_factory=list)
    resumed: list[Record] = field(default_factory=list)
    interrupted: bool = False
    output: Path | None = None
    resume_refused: str = ""  # why earlier results, though given, were not looked at
    unwritten: str = ""  # why the last records are not in the output: of a full disk, say

    @property
    def status(self) -> str:
        """ "ok", "incorrect" (one of ours), "unsupported" (only skipped), "nothing_ran" or "interrupted".

        The error of a peer or a reference is a finding like any other: it is in `incorrect`, and the run is "ok".
        """
        if self.interrupted:
            return "interrupted"
        if any(outcome.role == "ours" for outcome in self.incorrect):
            return "incorrect"
        if self.records or self.resumed or self.incorrect:
            return "ok"
        return "unsupported" if self.skipped else "nothing_ran"

    @property
    def exit_code(self) -> int:
        """0 ok, 3 incorrect result, 4 not supported here, 5 nothing ran, 130 interrupted."""
        return EXIT_CODES[self.status]


def run(
    paper: str | Paper,
    experiments: Sequence[str] | None = None,
    settings: Settings | None = None,
    on_event: Callable[[Event], object] | None = None,
    resume_from: str | Path | None = None,
    *,
    host: Host | None = None,
) -> RunResult:
    """Run experiments of a paper and return their records.

    Args:
        paper: id, alias or the paper itself.
        experiments: names; default those that the paper runs for the precision asked for.
        settings: what the user chose; `settings.output` is the JSON Lines file that finished records go to.
        on_event: called with each event of `workbench.events`; it cannot break the run.
        resume_from: a JSON Lines file of an earlier run. Implementations that have records there for the same case,
            commit, device, software, seed, input and precision are not run again, except as baselines of others.
            With uncommitted changes all are run again. It is also the output, when `settings.output` names none.
        host: the machine; default this one.
    Raises:
        InvalidInputError: unknown paper, experiment or implementation, or a setting that makes no sense.
        HardwareError: the device asked for is not there.
    """
    the_paper = find_paper(paper)
    host, settings = settle(settings, host)
    items = list_items(the_paper, experiments, settings)
    output = settings.output or resume_from
    earlier = read_records(resume_from) if resume_from is not None and Path(resume_from).exists() else []
    result = RunResult(output=Path(output) if output is not None else None)
    if earlier and host.dirty:
        earlier, result.resume_refused = [], DIRTY
    runner = _Runner(paper=the_paper.id, settings=settings, host=host, result=result, tell=Listener(on_event))
    try:
        runner.go(items, earlier)
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        items.clear()
        host.release()
    runner.tell(events.RunFinished(status=result.status, records=len(result.records)))
    return result


@dataclass(kw_only=True)
class _Runner:
    paper: str
    settings: Settings
    host: Host
    result: RunResult
    tell: Listener
    # Records of the current case that are made again only to be compared with, by implementation.
    _repeated: dict[str, list[Record]] = field(default_factory=dict)
    _pending: list[Record] = field(default_factory=list)  # not in the output yet

    def go(self, items: list[Item], earlier: list[Record]) -> None:
        names = tuple(dict.fromkeys(item.experiment.name for item in items))
        self.tell(
            events.RunStarted(
                paper=self.paper,
                experiments=names,
                cases=len(items),
                device=self.host.device,
                gpu=self.host.gpu,
                resume_refused=self.result.resume_refused,
            )
        )
        finished = self._finished(earlier)
        for index, item in enumerate(items, 1):
            self._resume(item, finished)
            self.tell(
                events.CaseStarted(**item.where, index=index, total=len(items), implementations=tuple(item.selected))
            )
            if item.workload is None:
                self._skip(item, "*", item.refused)
            records = self._case(item) if item.workload is not None and item.selected else []
            self._pending += records
            self.write()
            self.result.records += records
            held = item.workload is not None and any(
                one.on_device and not one.unavailable for one in item.workload.implementations
            )
            item.workload = None  # its closures may hold tensors
            if held:  # to collect garbage takes longer than to skip a case, or a little arithmetic
                self.host.release()
            self.tell(events.CaseFinished(**item.where, index=index, total=len(items), records=tuple(records)))

    def write(self) -> None:
        """Append what is not in the output yet. A disk that is full ends no run: what it found is still reported."""
        if not self._pending or self.result.output is None:
            return
        try:
            append_records(self.result.output, self._pending)
        except OSError as error:
            self.result.unwritten = error.strerror or str(error)
        else:
            self._pending, self.result.unwritten = [], ""

    # -- resuming

    def _finished(self, earlier: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
        """Records of the same commit, device and way of timing, by (experiment, case, implementation)."""
        settings = self.settings
        states = COLD_L2 if settings.flush_l2 and settings.mode == "burst" else ("warm",)
        found: dict[tuple[str, str, str], list[Record]] = {}
        for record in earlier:
            same_code = (record.paper, record.commit, record.dirty) == (self.paper, self.host.commit, self.host.dirty)
            same_device = str(record.env.get("gpu") or "") == self.host.gpu
            same_device &= all(record.env.get(name) == self.host.env.get(name) for name in SAME_ENVIRONMENT)
            same_run = all(record.timing.get(name) == value for name, value in self._asked().items())
            mode, l2 = record.timing.get("mode", settings.mode), record.timing.get("l2", states[0])  # of times only
            if same_code and same_device and same_run and mode == settings.mode and l2 in states:
                found.setdefault((record.experiment, _case_key(record.case), record.impl), []).append(record)
        return found

    def _asked(self) -> dict[str, Any]:
        """The settings that decide what a result is about, kept in every record's `timing`."""
        return {"seed": self.settings.seed, "input": self.settings.input, "precision": self.settings.precision}

    def _resume(self, item: Item, finished: dict[tuple[str, str, str], list[Record]]) -> None:
        """Leave out what is finished. Baselines stay while a time is missing, for ratios come from common rounds.

        What cannot run here never finishes: it stays only to be reported, and holds nobody else back.
        """
        if item.workload is None:
            return
        self._repeated = {}
        impls = {impl.name: impl for impl in item.workload.implementations if impl.name in item.selected}
        done = {name: finished.get((item.experiment.name, _case_key(item.case), name), []) for name in impls}
        missing = [name for name in impls if not done[name]]
        compares = self.host.device == "cuda" and self.settings.mode == "burst"
        if compares and any(impls[name].make is not None and not impls[name].unavailable for name in missing):
            for name in item.workload.baselines:
                if done.get(name) and impls[name].make is not None:
                    self._repeated[name] = done[name]
        keep = [name for name in impls if name in missing or name in self._repeated]
        self.result.resumed += [record for name in impls if name not in keep for record in done[name]]
        item.selected = keep

    # -- one case

    def _case(self, item: Item) -> list[Record]:
        assert item.workload is not None
        passed: list[tuple[Implementation, Check]] = []
        values: dict[str, dict[str, Sampled]] = {}
        impls = [impl for impl in item.workload.implementations if impl.name in item.selected]
        for impl in sorted(impls, key=lambda impl: impl.name in self._repeated):
            if impl.name in self._repeated and not any(other.make is not None for other, _ in passed):
                # What was missing gives no time, so there is nothing to compare its baselines with once more.
                self.result.resumed += self._repeated[impl.name]
                continue
            check = self._check(item, impl)
            if check is None:
                continue
            try:
                with _no_exit():
                    found = impl.values(self.settings.seed) if impl.values is not None else {}
                    values[impl.name] = _validated_values(found)
            except Exception as error:
                self._failed(item, impl, error)
                self.host.release()
                continue
            passed.append((impl, check))
            if impl.on_device:
                self.host.release()
        passed.sort(key=lambda pair: impls.index(pair[0]))
        timed: dict[str, Samples] = {}
        if self.host.device == "cuda":
            timed = self._time(item, [impl for impl, _ in passed if impl.make is not None])
        while True:
            records, refused = [], []
            for impl, check in passed:
                try:
                    records += self._records(item, impl, check, timed, values[impl.name])
                except Exception as error:  # such as a rate above the peak of the device
                    self._wrong(item, impl.name, f"the record was refused: {error}")
                    refused.append(impl.name)
            if not refused:
                break
            # Once more without them, for the others' ratios must not lean on a time that cannot be.
            passed = [(impl, check) for impl, check in passed if impl.name not in refused]
            timed = {name: samples for name, samples in timed.items() if name not in refused}
        for impl, check in passed:
            for metric, sampled in values[impl.name].items():
                try:
                    records += self._value_records(item, impl, check, metric, sampled)
                except Exception as error:
                    self._wrong(item, impl.name, f"the record of {metric} was refused: {error}")
        order = [impl.name for impl in impls]
        return sorted(records, key=lambda record: order.index(record.impl))

    def _check(self, item: Item, impl: Implementation) -> Check | None:
        if impl.unavailable or impl.check is None:
            self._skip(item, impl.name, impl.unavailable)
            return None
        self.tell(events.CheckStarted(**item.where, impl=impl.name))
        try:
            with _no_exit():
                check = Check.validated(impl.check(self.settings.seed))
        except Exception as error:
            self._failed(item, impl, error)
            return None
        self.tell(events.ImplementationChecked(**item.where, impl=impl.name, check=check))
        if not check.ok:
            why = f"{check.metric} {check.error:.3g} is above the bound {check.bound:.3g}"
            self._wrong(item, impl.name, why, check)
            return None
        return check

    def _time(self, item: Item, impls: list[Implementation]) -> dict[str, Samples]:
        made = self._inputs(item, impls)
        if not made:
            return {}
        self.tell(events.TimingStarted(**item.where, implementations=tuple(made)))
        calls = {name: [one.call if isinstance(one, Timed) else one for one in sets] for name, sets in made.items()}
        try:
            try:
                timed = self._compare(calls, item)
            except SystemExit:  # once more with every call guarded, which costs time but names the one that exits
                timed = self._compare({name: [_guarded(call) for call in sets] for name, sets in calls.items()}, item)
        except HardwareError as error:  # the device itself failed: nobody's time can be believed
            timed = {name: Samples(name=name, failed=str(error)) for name in calls}
        for name, samples in timed.items():
            if samples.ok:
                continue
            ours = next(impl.role for impl in impls if impl.name == name) == "ours"
            wrong = ours and not _says_out_of_memory(samples.failed)
            (self._wrong if wrong else self._skip)(item, name, f"not timed: {samples.failed}")
        calls.clear()
        for impl in impls:
            # The first set has the seed of the check, whose truth is at hand; the others make room for the comparison.
            sets = made.pop(impl.name, [])
            if sets and isinstance(sets[0], Timed) and timed[impl.name].ok and not self._verified(item, impl, sets[0]):
                del timed[impl.name]
        return timed

    def _compare(self, calls: Calls, item: Item) -> dict[str, Samples]:
        settings = self.settings
        if settings.mode == "sustained":
            seconds = max(settings.seconds, SUSTAINED_SECONDS)
            return timing.sustained(calls, seconds=seconds, timer=self.host.timer)
        return timing.compare(
            calls, seconds=settings.seconds, flush_l2=settings.flush_l2, noise=settings.noise, timer=self.host.timer,
            clean_l2=item.workload is not None and item.workload.l2 == "clean",
        )  # fmt: skip

    def _verified(self, item: Item, impl: Implementation, timed: Timed) -> bool:
        """Whether the very call that was timed gives a correct result; says so when it does not."""
        try:
            with _no_exit():
                check = Check.validated(timed.verify())
        except Exception as error:
            self._failed(item, impl, error, what="after timing: ")
            return False
        if not check.ok:
            why = f"after timing, {check.metric} {check.error:.3g} is above the bound {check.bound:.3g}"
            self._wrong(item, impl.name, why, check)
        return check.ok

    def _inputs(self, item: Item, impls: list[Implementation]) -> Calls:
        """Calls with fresh inputs for each implementation, as many sets as fit in half of the free memory."""
        calls: Calls = {}
        if not impls:
            return calls
        free, before = self.host.free_bytes(), self.host.allocated_bytes()
        makers = [(impl, impl.make) for impl in impls if impl.make is not None]
        for impl, make in makers:
            try:
                with _no_exit():
                    calls[impl.name] = [_validated_call(make(self.settings.seed))]
            except Exception as error:
                self._failed(item, impl, error)
                self.host.release()
        one_set = max(self.host.allocated_bytes() - before, 1)
        for extra in range(1, max(1, min(INPUT_SETS, free // 2 // one_set))):
            try:
                with _no_exit():
                    more = {
                        impl.name: _validated_call(make(self.settings.seed + extra))
                        for impl, make in makers
                        if impl.name in calls
                    }
            except Exception:  # one set is enough to go on; the estimate was too bold
                self.host.release()
                break
            for name, call in more.items():
                calls[name].append(call)
        return calls

    # -- records

    def _common(self, item: Item, impl: Implementation, check: Check) -> dict[str, Any]:
        assert item.workload is not None
        return {
            "paper": self.paper,
            "experiment": item.experiment.name,
            "case": dict(item.case),
            "impl": impl.name,
            "checked": check.as_dict(),
            "commit": self.host.commit,
            "dirty": self.host.dirty,
            "input_source": item.workload.input_source,
            "note": impl.note,
        }

    def _records(
        self, item: Item, impl: Implementation, check: Check, timed: dict[str, Samples], values: dict[str, Sampled]
    ) -> list[Record]:
        """The time, or that the result is correct where nothing is timed and no reading of its own says so."""
        assert item.workload is not None
        common = self._common(item, impl, check)
        samples = timed.get(impl.name)
        if samples is not None and samples.ok:
            return [_writable(self._time_record(item.workload, impl, samples, timed, common))]
        if self.host.device == "cuda" and (impl.make is not None or impl.values is not None):
            return []  # its time was not taken, or its values carry the check
        record = Record(kind="checked", metric="correct", unit="1", env=self.host.env, timing=self._asked(), **common)
        return [_writable(record)]

    def _value_records(
        self, item: Item, impl: Implementation, check: Check, metric: str, sampled: Sampled
    ) -> list[Record]:
        metric = sampled.metric or metric
        on_gpu = self.host.device == "cuda" and impl.on_device
        if not on_gpu and metric not in ERROR_METRICS and not metric.endswith("error"):
            return []
        samples = sampled.samples if len(sampled.samples) > 1 or metric == "time" else ()
        record = Record(
            kind="measured" if on_gpu else "checked",
            metric=metric,
            unit=sampled.unit,
            median=statistics.median(sampled.samples),
            p20=statistics.percentile(samples, 20) if samples else None,
            p80=statistics.percentile(samples, 80) if samples else None,
            samples=samples,
            work=sampled.work,
            env=_known_env({**self.host.env, **sampled.env}, sampled.timing.get("l2", ""), sampled.work),
            timing=sampled.timing | self._asked(),
            **self._common(item, impl, check),
        )
        return [_writable(record)]

    def _time_record(
        self,
        workload: Workload,
        impl: Implementation,
        samples: Samples,
        timed: dict[str, Samples],
        common: dict[str, Any],
    ) -> Record:
        ratios = {}
        for name in workload.baselines:
            other = timed.get(name)
            # Only times of common rounds are compared: a sustained load runs alone.
            if name != impl.name and other is not None and other.ok and name in samples.interleaved:
                ratios[name] = statistics.bootstrap_ratio(other.times, samples.times, paired=True).as_dict()
        times = samples.times
        return Record(
            kind="measured",
            metric="time",
            unit="ms",
            median=statistics.median(times),
            p20=statistics.percentile(times, 20),
            p80=statistics.percentile(times, 80),
            samples=times,
            work=workload.work,
            ratio_to=ratios,
            env=_env(self.host.env, samples, workload.work),
            timing=samples.as_timing() | self._asked(),
            **common,
        )

    # -- what did not work

    def _failed(self, item: Item, impl: Implementation, error: Exception, *, what: str = "") -> None:
        """Sort an exception: not supported here, or wrong. A rival that fails is missing, ours that fails is wrong."""
        missing = isinstance(error, UnsupportedError | HardwareError) or _is_out_of_memory(error)
        wrong = isinstance(error, IncorrectResultError) or (impl.role == "ours" and not missing)
        try:
            why = str(error) if isinstance(error, GpuAccelError) else reason(error)
        except Exception:  # str() of an exception is the paper's code too, and may fail itself
            why = type(error).__name__
        error.__traceback__ = None  # its frames hold tensors
        (self._wrong if wrong else self._skip)(item, impl.name, what + why)

    def _skip(self, item: Item, name: str, why: str) -> None:
        self.result.skipped.append(Outcome(name, dict(item.case), why, item.experiment.name, _role(item, name)))
        self.tell(events.ImplementationSkipped(**item.where, impl=name, why=why))

    def _wrong(self, item: Item, name: str, why: str, check: Check | None = None) -> None:
        role = _role(item, name)
        self.result.incorrect.append(Outcome(name, dict(item.case), why, item.experiment.name, role, check))
        self.tell(events.ImplementationIncorrect(**item.where, impl=name, why=why))


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Code of a paper that asks Python to exit has failed; without this the run would end and look well."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and what else is no Exception
        raise RuntimeError(f"raised {type(error).__name__}({', '.join(map(repr, error.args))})") from None


def _guarded(call: Callable[[], object]) -> Callable[[], object]:
    def guarded() -> object:
        with _no_exit():
            return call()

    return guarded


def _validated_call(call: object) -> Callable[[], object]:
    if not callable(call):
        raise TypeError(f"make returned a {type(call).__name__}, not a call to be timed")
    return call


def _validated_values(found: object) -> dict[str, Sampled]:
    """What `Implementation.values` returned, with plain floats in it; TypeError or ValueError where it is no such."""
    if not isinstance(found, dict):
        raise TypeError(f"values returned a {type(found).__name__}, not a dict of metric: (value, unit)")
    values = {}
    for metric, one in found.items():
        if isinstance(metric, str) and isinstance(one, Sampled):
            if not one.samples:
                raise ValueError(f"{metric} has no samples")
            values[metric] = dataclasses.replace(one, samples=tuple(map(float, one.samples)))
            continue
        if not isinstance(metric, str) or not isinstance(one, tuple | list) or len(one) != 2:
            raise TypeError(f"values must map a metric to (value, unit), not {shown(metric, 60)} to {shown(one, 60)}")
        value, unit = one
        if isinstance(value, bool | str | bytes) or not isinstance(unit, str):
            raise TypeError(f"{metric} is {shown(value, 60)} in {shown(unit, 60)}, not a number and a unit")
        values[metric] = Sampled(samples=(float(value),), unit=unit)
    return values


def _writable(record: Record) -> Record:
    """The record itself; raises when it cannot be written as JSON, so that others are not lost with it."""
    record.to_json()
    return record


OUT_OF_MEMORY = ("CUDA out of memory", "CUDA error: out of memory")
_NAMED_ERROR = re.compile(r"[A-Za-z_]\w*: ")


def _is_out_of_memory(error: BaseException) -> bool:
    """By type, or by the very words of torch's allocators; a kernel that merely speaks of memory has failed."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _allocator_says_so(str(error))


def _allocator_says_so(text: str) -> bool:
    return text.startswith(OUT_OF_MEMORY) or (text.startswith("[enforce fail") and "DefaultCPUAllocator" in text)


def _says_out_of_memory(why: str) -> bool:
    """The same for the words of `samples.reason`, which names every type of exception but those of memory."""
    kind, _, text = why.partition(": ")
    if kind in ("RuntimeError", "AcceleratorError"):
        return _allocator_says_so(text)
    return not _NAMED_ERROR.match(why) and "out of memory" in why.lower()


def _role(item: Item, name: str) -> str:
    impls = item.workload.implementations if item.workload is not None else []
    return next((impl.role for impl in impls if impl.name == name), "")


def _env(env: dict[str, Any], samples: Samples, work: dict[str, float]) -> dict[str, Any]:
    """The environment of one time: the host's, with the clocks read beside it."""
    clocks = {key: value for key, value in samples.clocks.items() if key not in ("readings", "unavailable")}
    if "unavailable" in samples.clocks:
        clocks["clocks_unavailable"] = samples.clocks["unavailable"]
    return _known_env({**env, **clocks}, samples.l2, work)


def _known_env(env: dict[str, Any], l2: str, work: dict[str, float]) -> dict[str, Any]:
    """Without the peak of memory where it bounds nothing: what may stay in the second-level cache is faster."""
    # in a clean one a copy leaves a cache full of its results behind, which adds to its rate
    least = MEMORY_BOUND_BYTES * (4 if l2 == "clean" else 1)
    if l2 == "warm" or work.get("bytes", 0.0) < least:
        return {key: value for key, value in env.items() if key != "peak_gbps"}
    return env


def _case_key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
