"""What searches on record came to: a row for each task, each ratio with its baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_accel.errors import InvalidInputError
from gpu_accel.hardware.catalog import profiles
from gpu_accel.workbench.records import Record, gpu_slug, merge
from gpu_accel.workbench.report import markdown_table
from gpu_accel.workbench.statistics import bootstrap_ratio, median, percentile

from .measure import LIBRARIES
from .report import Found
from .tasks import TASKS

ERROR = "error in units of its bound"
NOTES = {"naive": "the naive kernel in CUDA C++", "library": "torch", "compiled": "the same through torch.compile"}
HEADINGS = ("task", "best, ms", "roofline", "copies", "start / best", "naive / best", "torch / best", "compiled / best")
WARM_HEADINGS = ("warm, ms", "library / best, warm")  # where they are on record
METRICS = ("copies", "start_over_best", "naive_over_best", "torch_over_best", "compiled_over_best")
SHARE = 0.95  # of the library's speed that counts as reaching it
GAIN = 1.05  # over the plain kernel that counts as faster: its time is of another process


def records_of(found: Found) -> list[Record]:
    """Ledger records of a search's final timing, from its folder: those that `gpu-accel run cuda-llm search` makes.

    Raises:
        InvalidInputError: nothing was timed, or the folder does not say on what.
    """
    run, task = found.run, found.task
    final, host = run.get("final"), run.get("host")
    if not final or not host:
        raise InvalidInputError(f"{found.folder}: records need final times and the description of their machine")
    best = found.best_row
    sizes = " ".join(f"{name}={size}" for name, size in task.bench.items())
    clocks = {key: value for key, value in final["clocks"].items() if key not in ("readings", "unavailable")}
    common: dict[str, Any] = {
        "kind": "measured", "paper": "cuda_llm", "experiment": "search", "commit": host["commit"],
        "case": {"task": task.name, "dtype": task.dtype, "sizes": sizes}, "dirty": host["dirty"], "time": run["time"],
        "env": host["env"] | clocks,
    }  # fmt: skip
    beside = ["grammar", *(name for name in final["samples"] if name != "candidate")]
    # Of times alone: a record's key holds the state of the cache, and that of a ratio must be what `run` gives it.
    cold = {"method": final["method"], "l2": "flushed", "interleaved": beside}

    def error(value: float | None) -> dict[str, Any]:
        return {"error": value, "bound": 1.0, "metric": ERROR}

    made: list[Record] = []
    taken = final["samples"]
    ratio_to = {
        name: bootstrap_ratio(taken[name], taken["candidate"], paired=True).as_dict()
        for name in LIBRARIES if taken.get(name) and final.get(f"{name}_error") is not None
    }  # fmt: skip

    def add(impl: str, checked: float | None, metric: str, unit: str, samples: Sequence[float], note: str) -> None:
        if checked is None or not samples:
            return
        many = tuple(samples) if metric == "time" else ()
        work = {"bytes": float(task.bytes_moved(task.bench))} if metric == "time" else {}
        made.append(Record(
            **common, impl=impl, checked=error(checked), metric=metric, unit=unit, median=median(samples), note=note,
            p20=percentile(many, 20) if many else None, p80=percentile(many, 80) if many else None, samples=many,
            work=work, ratio_to=ratio_to if (impl, metric) == ("grammar", "time") else {},
            timing=cold if metric == "time" else {},
        ))  # fmt: skip

    note = f"{best['change'] or 'the first template'}; {found.best.language}, {run['best']}"
    own = best["error"]
    naive = (run.get("baselines") or {}).get("naive") or {}
    add("naive", naive.get("error"), "time", "ms", final["slow"].get("naive", ()), NOTES["naive"])
    for name in LIBRARIES:
        add(name, final.get(f"{name}_error"), "time", "ms", taken.get(name, ()), NOTES[name])
    add("grammar", own, "time", "ms", final["samples"]["candidate"], note)
    known = {name: found.ratio(name) if final.get(f"{name}_error") is not None else None for name in LIBRARIES}
    ratios = {"naive_over_best": found.ratio("naive"), "library_over_best": found.over_library,
              "torch_over_best": known["library"], "compiled_over_best": known["compiled"],
              "start_over_best": run.get("speedup_over_start")}  # fmt: skip
    for name, ratio in ratios.items():
        add("grammar", own, name, "1", [ratio] if ratio else [], note)
    add("grammar", own, "copies", "1", [median(final["samples"]["candidate"]) / median(
        final["samples"]["copy"])], note)  # fmt: skip
    add("grammar", own, "candidates", "1", [float(len(found.attempts))], note)
    if final.get("tensor_cores") is not None:
        add("grammar", own, "on_tensor_cores", "1", [float(bool(final["tensor_cores"]))], note)
    for name in ("repeated", "compared"):
        if name in final:
            add("grammar", own, name, "1", [float(final[name])], note)
    # Beside, with a warm cache: no work is given, since bytes that the cache holds say nothing of memory.
    names = {"candidate": ("grammar", own, note)}
    names |= {name: (name, final.get(f"{name}_error"), NOTES[name]) for name in LIBRARIES}
    for name, (impl, checked, words) in names.items():
        times = tuple(final.get("warm", {}).get(name, ()))
        if times and checked is not None:
            made.append(Record(
                **common, impl=impl, checked=error(checked), metric="time", unit="ms", median=median(times), note=words,
                p20=percentile(times, 20), p80=percentile(times, 80), samples=times,
                timing={"method": final.get("warm_method"), "l2": "warm", "interleaved": beside},
            ))  # fmt: skip
    return made


def by_task(records: Sequence[Record], experiment: str = "search") -> dict[str, dict[str, float]]:
    """Medians of our implementation's metrics, for each task of a measured search on one GPU, or of its `winners`.

    All of a task are of its newest run: what an older one has beside is of another kernel.
    `warm` and `warm_library` are times with a warm cache, ours and the faster library's; all others had a cold one.
    `surely_over_library` is the lower end of the 95 % interval of the time of the faster library over ours.
    """
    found: dict[str, dict[str, float]] = {}
    samples: dict[str, dict[str, Sequence[float]]] = {}
    merged = [one for one in merge(records) if one.experiment == experiment and one.kind == "measured"]
    newest = {str(one.case["task"]): one.commit for one in sorted(merged, key=lambda one: one.when)}
    for one in merged:
        task = str(one.case["task"])
        if one.median is None or one.commit != newest[task]:
            continue
        if one.timing.get("l2") == "warm":
            own, known = found.setdefault(task, {}), "warm" if one.impl == "grammar" else "warm_library"
            own[known] = min(own.get(known, one.median), one.median)
            continue
        if one.metric == "time":
            samples.setdefault(task, {})[one.impl] = one.samples
        if one.impl == "grammar":
            found.setdefault(task, {})[one.metric] = one.median
    for task, taken in samples.items():
        ours = taken.get("grammar", ())
        lows = [bootstrap_ratio(taken[name], ours, paired=len(taken[name]) == len(ours)).low
                for name in LIBRARIES if len(taken.get(name, ())) > 1 and len(ours) > 1]  # fmt: skip
        if lows and task in found:
            found[task]["surely_over_library"] = min(lows)
    return {name: found[name] for name in TASKS if name in found}


def _gpus(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The measured searches by the name of their GPU."""
    found: dict[str, list[Record]] = {}
    for one in records:
        if one.experiment == "search" and one.kind == "measured":
            found.setdefault(str(one.env.get("gpu")), []).append(one)
    return dict(sorted(found.items()))


def _profile(records: Sequence[Record]) -> str:
    """The hardware profile of records of one GPU: that of its SKU, or else that of an H100."""
    slugs = [gpu_slug(str(one.env["sku"])) for one in records if one.env.get("sku")]
    return slugs[0] if slugs and slugs[0] in {one.name for one in profiles()} else "h100-sxm"


def headings(records: Sequence[Record]) -> tuple[str, ...]:
    """Those of `rows`: with a warm cache too, where it is on record."""
    return (*HEADINGS, *(WARM_HEADINGS if _warm(by_task(records)) else ()))


def rows(records: Sequence[Record]) -> list[list[str]]:
    """The table's rows, of records of one GPU; the roofline is that of its datasheet, modelled."""
    made, gpu = [], _profile(records)
    found = by_task(records)
    for name, values in found.items():
        ms = values.get("time")
        share = f"{TASKS[name].floor_ms(TASKS[name].bench, gpu) / ms:.0%}" if ms else "–"
        cells = [f"{values[key]:.3g}" if key in values else "–" for key in METRICS]
        if _warm(found):
            own, other = values.get("warm"), values.get("warm_library")
            cells += [f"{own:.4g}" if own else "–", f"{other / own:.3g}" if own and other else "–"]
        made.append([name, f"{ms:.4g}" if ms else "–", share, *cells])
    return made


def _warm(found: Mapping[str, Mapping[str, float]]) -> bool:
    return any("warm" in one for one in found.values())


def summary(records: Sequence[Record]) -> str:
    """How many tasks beat each baseline, on one GPU."""
    found = by_task(records)
    if not found:
        return "No search is on record."
    naive = sum(one.get("naive_over_best", 0) > 1 for one in found.values())
    near = sum(one.get("library_over_best", 0) >= SHARE for one in found.values())
    beats = sum(one.get("surely_over_library", 0) > 1 for one in found.values())
    start = sum(one.get("start_over_best", 0) > GAIN for one in found.values())
    told = (
        f"Of {len(found)} tasks, on {', '.join(_gpus(records))}: {start} became more than {GAIN - 1:.0%} faster than "
        "the plain kernel that the search began with. "
    )
    if known := [name for name, one in found.items() if "on_tensor_cores" in one]:
        using = [name for name in known if found[name]["on_tensor_cores"]]
        told += f"On tensor cores, where torch computes in plain float32, multiply {', '.join(using) or 'none'}. "
    if not any("naive_over_best" in one or "library_over_best" in one for one in found.values()):
        return told + "Neither the naive kernels nor torch are timed on record."
    return told + (
        f"{naive} are faster than the naive kernel, {near} reach {SHARE} of the speed of the faster of torch and "
        f"torch.compile or more, {beats} are faster than both (the whole 95 % interval of the ratio)."
    )


def again(records: Sequence[Record]) -> str:
    """What became of the winners where they were judged and timed again, on one GPU; "" where that is not on record."""
    found = by_task(records, "winners")
    if not found:
        return ""
    commits = sorted({one.commit[:7] for one in records if one.experiment == "winners" and one.kind == "measured"})
    compared, repeated = (min(one.get(name, 0) for one in found.values()) for name in ("compared", "repeated"))
    naive = sum(one.get("naive_over_best", 0) > 1 for one in found.values())
    near = sum(one.get("library_over_best", 0) >= SHARE for one in found.values())
    beats = sum(one.get("surely_over_library", 0) > 1 for one in found.values())
    return (
        f"Judged and timed again from their source, by a run of its own (`winners`, commit {', '.join(commits)}): "
        f"{len(found)} winners are accepted, with outputs of at least {compared:.0f} launches of the timed shape "
        f"compared and at least {repeated:.0f} repeated; {naive} are faster than the naive kernel, {near} reach "
        f"{SHARE} of the speed of the faster library, {beats} are faster than both."
    )


def text(records: Sequence[Record]) -> str:
    """The README's block: a table and its summary for each GPU."""
    parts = []
    for gpu, own in _gpus(records).items():
        parts += [markdown_table(headings(own), rows(own), numeric_from=1), summary(own)]
        if told := again([one for one in records if one.env.get("gpu") == gpu]):
            parts.append(told)
    return "\n\n".join(parts or [summary([])])
