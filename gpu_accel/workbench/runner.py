"""Run a paper's experiments: check first, time only what passed, keep every finished case.

The command line and the notebooks both call `run`; `plan` says what it would do. A result that fails its check is never
timed. Records of a case are appended to the output file as the case finishes, so that an interruption loses at most the
case at hand, and `resume_from` continues from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_accel.errors import GpuAccelError, HardwareError, IncorrectResultError, InvalidInputError, UnsupportedError
from gpu_accel.workbench import events, statistics, timing
from gpu_accel.workbench.events import Event, Listener
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload
from gpu_accel.workbench.host import Host, resolve_device
from gpu_accel.workbench.planning import SUSTAINED_SECONDS, Item, Plan, find_paper, list_items, plan, settle
from gpu_accel.workbench.records import Record, append_records, read_records
from gpu_accel.workbench.samples import Samples, reason

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

__all__ = ["Event", "Outcome", "Plan", "RunResult", "plan", "resolve_device", "run"]

EXIT_CODES = {"ok": 0, "incorrect": 3, "unsupported": 4, "nothing_ran": 5, "interrupted": 130}
INPUT_SETS = 3
MEMORY_BOUND_BYTES = 2**29
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
            commit and device are not run again, except as baselines of others. It is also the output, when
            `settings.output` names none.
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

    def go(self, items: list[Item], earlier: list[Record]) -> None:
        names = tuple(dict.fromkeys(item.experiment.name for item in items))
        self.tell(
            events.RunStarted(
                paper=self.paper, experiments=names, cases=len(items), device=self.host.device, gpu=self.host.gpu
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
            if records and self.result.output is not None:
                append_records(self.result.output, records)
            self.result.records += records
            item.workload = None  # its closures may hold tensors
            self.host.release()
            self.tell(events.CaseFinished(**item.where, index=index, total=len(items), records=tuple(records)))

    # -- resuming

    def _finished(self, earlier: list[Record]) -> dict[tuple[str, str, str], list[Record]]:
        """Records of the same commit, device and way of timing, by (experiment, case, implementation)."""
        settings = self.settings
        l2 = "flushed" if settings.flush_l2 and settings.mode == "burst" else "warm"
        found: dict[tuple[str, str, str], list[Record]] = {}
        for record in earlier:
            same_code = (record.paper, record.commit, record.dirty) == (self.paper, self.host.commit, self.host.dirty)
            same_device = str(record.env.get("gpu") or "") == self.host.gpu
            how = record.timing.get("mode"), record.timing.get("l2")
            if same_code and same_device and (not record.timing or how == (settings.mode, l2)):
                found.setdefault((record.experiment, _case_key(record.case), record.impl), []).append(record)
        return found

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
        values: dict[str, dict[str, tuple[float, str]]] = {}
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
                values[impl.name] = impl.values(self.settings.seed) if impl.values is not None else {}
            except Exception as error:
                self._failed(item, impl, error)
                self.host.release()
                continue
            passed.append((impl, check))
            self.host.release()
        passed.sort(key=lambda pair: impls.index(pair[0]))
        timed: dict[str, Samples] = {}
        if self.host.device == "cuda":
            timed = self._time(item, [impl for impl, _ in passed if impl.make is not None])
        while True:
            records, refused = [], []
            for impl, check in passed:
                try:
                    records += self._records(item, impl, check, values[impl.name], timed)
                except InvalidInputError as error:  # such as a rate above the peak of the device
                    self._wrong(item, impl.name, f"the record was refused: {error}")
                    refused.append(impl.name)
            if not refused:
                return records
            # Once more without them, for the others' ratios must not lean on a time that cannot be.
            passed = [(impl, check) for impl, check in passed if impl.name not in refused]
            timed = {name: samples for name, samples in timed.items() if name not in refused}

    def _check(self, item: Item, impl: Implementation) -> Check | None:
        if impl.unavailable or impl.check is None:
            self._skip(item, impl.name, impl.unavailable)
            return None
        self.tell(events.CheckStarted(**item.where, impl=impl.name))
        try:
            check = impl.check(self.settings.seed)
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
        calls = self._inputs(item, impls)
        if not calls:
            return {}
        self.tell(events.TimingStarted(**item.where, implementations=tuple(calls)))
        settings = self.settings
        try:
            if settings.mode == "sustained":
                seconds = max(settings.seconds, SUSTAINED_SECONDS)
                timed = timing.sustained(calls, seconds=seconds, timer=self.host.timer)
            else:
                timed = timing.compare(
                    calls,
                    seconds=settings.seconds,
                    flush_l2=settings.flush_l2,
                    noise=settings.noise,
                    timer=self.host.timer,
                )
        except HardwareError as error:  # the device itself failed: nobody's time can be believed
            timed = {name: Samples(name=name, failed=str(error)) for name in calls}
        for name, samples in timed.items():
            if samples.ok:
                continue
            ours = next(impl.role for impl in impls if impl.name == name) == "ours"
            wrong = ours and "out of memory" not in samples.failed
            (self._wrong if wrong else self._skip)(item, name, f"not timed: {samples.failed}")
        return timed

    def _inputs(self, item: Item, impls: list[Implementation]) -> dict[str, list[Callable[[], object]]]:
        """Calls with fresh inputs for each implementation, as many sets as fit in half of the free memory."""
        calls: dict[str, list[Callable[[], object]]] = {}
        if not impls:
            return calls
        free, before = self.host.free_bytes(), self.host.allocated_bytes()
        makers = [(impl, impl.make) for impl in impls if impl.make is not None]
        for impl, make in makers:
            try:
                calls[impl.name] = [make(self.settings.seed)]
            except Exception as error:
                self._failed(item, impl, error)
                self.host.release()
        one_set = max(self.host.allocated_bytes() - before, 1)
        for extra in range(1, max(1, min(INPUT_SETS, free // 2 // one_set))):
            try:
                more = {impl.name: make(self.settings.seed + extra) for impl, make in makers if impl.name in calls}
            except Exception:  # one set is enough to go on; the estimate was too bold
                self.host.release()
                break
            for name, call in more.items():
                calls[name].append(call)
        return calls

    # -- records

    def _records(
        self,
        item: Item,
        impl: Implementation,
        check: Check,
        values: dict[str, tuple[float, str]],
        timed: dict[str, Samples],
    ) -> list[Record]:
        assert item.workload is not None
        on_gpu = self.host.device == "cuda"
        common: dict[str, Any] = {
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
        records = []
        samples = timed.get(impl.name)
        if samples is not None and samples.ok:
            records.append(self._time_record(item.workload, impl, samples, timed, common))
        elif not on_gpu or impl.make is None:
            records.append(Record(kind="checked", metric="correct", unit="1", env=self.host.env, **common))
        for metric, (value, unit) in values.items():
            if on_gpu or metric in ERROR_METRICS or metric.endswith("error"):
                kind = "measured" if on_gpu else "checked"
                median = float(value)
                records.append(Record(kind=kind, metric=metric, unit=unit, median=median, env=self.host.env, **common))
        return records

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
            timing=samples.as_timing(),
            **common,
        )

    # -- what did not work

    def _failed(self, item: Item, impl: Implementation, error: Exception) -> None:
        """Sort an exception: not supported here, or wrong. A rival that fails is missing, ours that fails is wrong."""
        why = reason(error)
        missing = isinstance(error, UnsupportedError | HardwareError) or "out of memory" in why
        wrong = isinstance(error, IncorrectResultError) or (impl.role == "ours" and not missing)
        if isinstance(error, GpuAccelError):
            why = str(error)
        error.__traceback__ = None  # its frames hold tensors
        (self._wrong if wrong else self._skip)(item, impl.name, why)

    def _skip(self, item: Item, name: str, why: str) -> None:
        self.result.skipped.append(Outcome(name, dict(item.case), why, item.experiment.name, _role(item, name)))
        self.tell(events.ImplementationSkipped(**item.where, impl=name, why=why))

    def _wrong(self, item: Item, name: str, why: str, check: Check | None = None) -> None:
        role = _role(item, name)
        self.result.incorrect.append(Outcome(name, dict(item.case), why, item.experiment.name, role, check))
        self.tell(events.ImplementationIncorrect(**item.where, impl=name, why=why))


def _role(item: Item, name: str) -> str:
    impls = item.workload.implementations if item.workload is not None else []
    return next((impl.role for impl in impls if impl.name == name), "")


def _env(env: dict[str, Any], samples: Samples, work: dict[str, float]) -> dict[str, Any]:
    """The environment of one time: the host's, with the clocks read beside it."""
    clocks = {key: value for key, value in samples.clocks.items() if key not in ("readings", "unavailable")}
    if "unavailable" in samples.clocks:
        clocks["clocks_unavailable"] = samples.clocks["unavailable"]
    known = {**env, **clocks}
    # Traffic may stay in the second-level cache, so memory bandwidth bounds only what is cold and far larger than that.
    if samples.l2 == "warm" or work.get("bytes", 0.0) < MEMORY_BOUND_BYTES:
        known.pop("peak_gbps", None)
    return known


def _case_key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
