"""`gpu-accel run`: run a paper's experiments here, show the results, and say which claims they settle."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError, UnsupportedError

from . import codes, ledger, output, torchrun
from .console import note, out, plain, table
from .options import (
    DEFAULT_RESULTS,
    ExperimentsArgument,
    InputOption,
    JsonOption,
    OutputOption,
    PaperArgument,
    PrecisionOption,
    checked_precision,
    complete_implementation,
    default_precision,
)
from .progress import Progress
from .render import label, result_tables, span
from .results import record_file, unfinished

if TYPE_CHECKING:
    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.experiment import Settings
    from gpu_accel.workbench.host import Host
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.registry import Paper
    from gpu_accel.workbench.runner import Outcome, Plan, RunResult

EVERYTHING = "every implementation"
MOST_INTERPRETED_SECONDS = 300  # longer than that only who asks for the CPU by name waits
MOSTLY_IDLE = 0.9  # share of cases that cannot run on a CPU from which only who asks for it by name gets the rest
LONGEST_TAG = 100  # characters, for a file's name has an end
MOST_REMARKS = 12  # skipped rows of different reasons that are told before the rest is only counted


def run(
    paper: PaperArgument,
    experiments: ExperimentsArgument = None,
    precision: PrecisionOption = "",
    input_: InputOption = "",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="Instead of the paper's: 4x2048x16x128 (batch, seqlen, heads, head_dim), or "
            "seqlen=16k,head_dim=64,causal=true; names and order are the experiment's, such as m=4096,n=4096,k=128. "
            "Repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only this implementation. Repeatable.", autocompletion=complete_implementation),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Not this implementation. Repeatable.", autocompletion=complete_implementation),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", help="auto, cuda, cuda:N, or cpu: checked, not timed, however long that takes."),
    ] = "auto",
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Start so many processes, one a GPU, by torchrun.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few and small cases, for a first look.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    seconds: Annotated[float, typer.Option(help="Time to measure one implementation in one case, at most.")] = 0.25,
    sustained: Annotated[bool, typer.Option("--sustained", help="Time under continuous load.")] = False,
    warm_l2: Annotated[bool, typer.Option("--warm-l2", help="Do not flush the L2 cache between timed calls.")] = False,
    results: Annotated[
        Path | None,
        typer.Option("--results", metavar="DIR", help="Where records go.", show_default=str(DEFAULT_RESULTS)),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write records to papers/<id>/results of this checkout, to be committed.")
    ] = False,
    tag: Annotated[str, typer.Option("--tag", help="A word for the name of the records' file.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 if this run does not reproduce a claim.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")] = False,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:  # fmt: skip
    """Run experiments: measured on a GPU, checked on a CPU.

    Every result is compared with a float64 truth first; only what passes is timed. Without a GPU the same kernels
    run in Triton's interpreter on small shapes. Finished cases survive Ctrl-C; --resume continues.

    A wrong result of ours is exit code 3. One of a rival is reported just as loudly, and is no failure of this run.
    """
    from gpu_accel.workbench import registry, runner
    from gpu_accel.workbench.experiment import Settings
    from gpu_accel.workbench.planning import shapes_for

    output.check_suffix(output_)
    if tag and not tag.replace("-", "").replace("_", "").isalnum():
        raise InvalidInputError(f"--tag {tag!r}: letters, digits, - and _ only, for it becomes part of a file's name")
    if len(tag) > LONGEST_TAG:
        raise InvalidInputError(f"--tag has {len(tag)} characters; at most {LONGEST_TAG}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInputError(f"--seconds {seconds:g}: the seconds are a finite number above 0, such as 0.25")
    if save and results and not dry_run:
        raise InvalidInputError("--results and --save both say where records go: choose one")
    made = {"--tag": bool(tag), "--resume": resume, "--gate": gate, "--save": save, "--results": results is not None}
    if dry_run and (idle := [name for name, given in made.items() if given]):
        if gate or resume:
            raise InvalidInputError(f"--dry-run makes no records, so {' and '.join(idle)} would do nothing")
        note(f"{' and '.join(idle)} without effect: --dry-run makes no records", style="yellow")
    if quick and shape:
        note("--quick without effect: --shape says what runs", style="yellow")
    one = registry.paper(paper)
    if experiments and len(experiments) == 1 and experiments[0] in one.default_for and not precision:
        precision, experiments = experiments[0], None  # `run fa3 fp8` is `run fa3 --precision fp8`
    if nproc is not None:
        _need_processes(one, experiments or one.default_experiments(precision or "bf16"))
        torchrun.relaunch(nproc, device)
    torchrun.join(device)
    settings = Settings(
        device=device,
        precision=checked_precision(one, precision, experiments or []),
        input=input_ or one.inputs[0],
        only=tuple(only or []),
        skip=tuple(skip or []),
        seed=seed,
        seconds=seconds,
        quick=quick,
        mode="sustained" if sustained else "burst",
        flush_l2=not warm_l2,
    )
    host = _host(settings.device)
    settings = dataclasses.replace(settings, shapes=shapes_for(one, experiments, settings.precision, shape or []))
    timing = [name for name, given in (("--sustained", sustained), ("--warm-l2", warm_l2)) if given]
    if timing and host.device == "cpu":
        note(f"{' and '.join(timing)} without effect: nothing is timed on a CPU", style="yellow")
    elif sustained and warm_l2:
        note("--warm-l2 without effect: --sustained never flushes the L2 cache", style="yellow")
    if not precision:
        _note_precision(one, experiments or [], settings.precision)
    if dry_run:
        return _dry_run(one, experiments, settings, host, asked=input_, json_=json_, file=output_)
    file = record_file(
        one,
        sku=host.env.get("sku") or host.device,
        commit=host.commit,
        folder=results or DEFAULT_RESULTS,
        save=save,
        tag=tag,
    )
    output.check_folder(file.parent)
    with output.stdout_to_stderr():
        intended = runner.plan(one, experiments, settings, host=host)
    _note_input(one, intended, input_)
    _note_shapes(intended, settings.shapes)
    if device != "cpu":
        _refuse_to_take_hours(intended)
        if not experiments:
            _refuse_what_hardly_runs(one, intended, host)
    earlier = unfinished(file) if resume else None
    settings = dataclasses.replace(settings, output=None if torchrun.helper() else str(earlier or file))
    result = _run(one, experiments, settings, host, resume_from=earlier, quiet=json_ or not intended.runs)
    records = [*result.resumed, *result.records]
    settled = ledger.settled_by(one, records)
    if output_:
        _write(output_, one, result, records, settled)
    if json_:
        output.print_json(as_payload(one, result, records, settled))
    else:
        _show(one, result, records, settled)
    _leave(result, settled, gate=gate)


def _host(device: str) -> Host:
    from .device import prepare

    resolved = prepare(device)
    from gpu_accel.workbench.host import Host

    return Host.here(resolved)


def _note_input(paper: Paper, made: Plan, asked: str) -> None:
    """Say of which experiments the cases are what they would be without --input; "" was not given."""
    taken: dict[str, dict[str, None]] = {}
    for item in made.items:
        taken.setdefault(item["experiment"], {})[str(item["case"].get("input", "normal"))] = None
    for name, inputs in taken.items():
        if asked and (asked not in inputs or asked == paper.inputs[0] and len(inputs) > 1):
            note(f"--input {asked} without effect: {name} takes {', '.join(inputs)}", style="yellow")


def _note_precision(paper: Paper, named: Sequence[str], taken: str) -> None:
    """Say which experiments take the only precision that all of those named have, and not their own default."""
    for name in [name for name in named if name in paper.experiments]:
        alone = default_precision(paper, [name])
        if alone != taken and taken in paper.experiments[name].precisions:
            why = "which all experiments named here have; by itself it takes"
            note(f"{name} in {taken}, {why} {alone}", style="yellow")


def _note_shapes(made: Plan, shapes: Sequence[Mapping[str, Any]]) -> None:
    """Say of which experiments no case has the sizes of --shape: they have their own, or know no such name."""
    taken: dict[str, bool] = {}
    unknown: dict[str, set[str]] = {}
    for item in made.items:
        sizes = [(type(size), size) for size in item["case"].values()]  # True is no 1
        missing = [[name for name, size in shape.items() if (type(size), size) not in sizes] for shape in shapes]
        nearest = min(missing, key=len, default=[])
        taken[item["experiment"]] = taken.get(item["experiment"], False) or not nearest
        named = any(name in item["case"] for shape in shapes for name in shape)
        if named and not any(name in item["case"] for name in nearest):
            unknown[item["experiment"]] = unknown.get(item["experiment"], set(nearest)) & set(nearest)
    for experiment in [name for name in unknown if unknown[name]]:
        names = ", ".join(sorted(unknown[experiment]))
        note(f"{names} of --shape without effect: {experiment} has no such size", style="yellow")
        taken[experiment] = True
    if shapes and (own := [name for name, found in taken.items() if not found]):
        has = "has sizes of its own" if len(own) == 1 else "have sizes of their own"
        note(f"--shape without effect: {', '.join(own)} {has}", style="yellow")


def _refuse_to_take_hours(made: Plan) -> None:
    """Shapes made for a GPU would keep an interpreter busy for hours or months.

    Raises:
        UnsupportedError: says how long, and what can be done instead.
    """
    if made.interpreted_seconds <= MOST_INTERPRETED_SECONDS:
        return
    attention = any("head_dim" in item["case"] for item in made.items)
    smaller = "--shape 1x128x2x64" if attention else "smaller shapes"
    raise UnsupportedError(
        f"without a GPU this takes about {span(made.interpreted_seconds)} in Triton's interpreter; try {smaller}, or "
        "--device cpu to do it all the same"
    )


def _refuse_what_hardly_runs(paper: Paper, made: Plan, host: Host) -> None:
    """A paper that needs a GPU, of which a few cases could be checked without one: whoever wants those says so.

    Raises:
        UnsupportedError: why the others do not run here, and what does.
    """
    running = {item["experiment"] for item in made.items if any(one["runs"] for one in item["implementations"])}
    idle = [item for item in made.items if not any(one["runs"] for one in item["implementations"])]
    if host.device != "cpu" or not running or len(idle) < MOSTLY_IDLE * len(made.items):
        return
    reasons = dict.fromkeys(one["why"] for item in idle for one in item["implementations"] if one["why"])
    raise UnsupportedError(
        f"{len(idle)} of the {len(made.items)} cases do not run without a GPU: {'; '.join(reasons)}. What does: "
        f"`gpu-accel run {paper.alias} {' '.join(sorted(running))}`, checked and not timed"
    )


def _run(
    paper: Paper,
    experiments: Sequence[str] | None,
    settings: Settings,
    host: Host,
    *,
    resume_from: Path | None,
    quiet: bool,
) -> RunResult:
    from gpu_accel.workbench import events, runner

    with output.stdout_to_stderr(), Progress(quiet=quiet) as progress:
        skips: list[str] = []
        begun: list[str] = []

        def show(event: events.Event) -> None:
            match event:
                case events.RunStarted():  # not before: until here the arguments may still be wrong
                    progress.expect(event.cases, f"{paper.alias} {settings.precision}, {_place(host)}")
                    if event.resume_refused:
                        progress.remark(f"nothing is resumed: {event.resume_refused}", style="yellow")
                case events.ImplementationSkipped():
                    skips.append(event.impl)
                case events.CaseStarted():
                    skips.clear()
                    begun.clear()
                case events.CheckStarted():
                    if not begun:
                        progress.begin(f"{event.experiment} {label(event.case, event.experiment)} ...")
                    begun.append(event.impl)
                    progress.doing(f"{event.experiment} {label(event.case, event.experiment)}: checking {event.impl}")
                case events.TimingStarted():
                    progress.doing(
                        f"{event.experiment} {label(event.case, event.experiment)}: timing {len(event.implementations)}"
                    )
                case events.ImplementationIncorrect():
                    progress.remark(
                        f"WRONG {event.impl} in {event.experiment} {label(event.case, event.experiment)}: {event.why}",
                        style="bold red",
                    )
                case events.CaseFinished():
                    names = dict.fromkeys(record.impl for record in event.records)
                    done = ", ".join(names) if len(names) <= 5 else f"{len(names)} implementations"
                    if not done and skips:
                        if not begun:  # of these the reasons are told once, at the end
                            progress.pass_over()
                            return
                        done = f"{', '.join(skips)} not run here"
                    progress.step(f"{event.experiment} {label(event.case, event.experiment)}: {done or 'nothing new'}")

        return runner.run(paper, experiments, settings, on_event=show, resume_from=resume_from, host=host)


def _need_processes(paper: Paper, chosen: Sequence[str]) -> None:
    """Refuse --nproc where every process would do the same, and rank 0 keep it."""
    several = [name for name, info in paper.experiments.items() if info.processes]
    for name in chosen:
        paper.experiment(name)  # a wrong name is refused here, and not by every process
    if not any(name in several for name in chosen):
        what, run = ("experiment", "runs") if len(chosen) == 1 else ("experiments", "run")
        run_of_one = f"the {what} {', '.join(chosen)} of {paper.alias} {run} in one process"
        there = f"--nproc is for {', '.join(several)}" if several else "no experiment of it takes --nproc"
        raise InvalidInputError(f"{run_of_one}; {there}")


def _place(host: Host) -> str:
    if host.device == "cpu":
        return "on the CPU: checked and not timed, kernels in Triton's interpreter"
    return f"on {host.gpu}"


def as_payload(
    paper: Paper, result: RunResult, records: Sequence[Record], settled: Sequence[Verdict]
) -> dict[str, Any]:
    """What `--json` prints."""
    import json

    return {
        "paper": paper.id,
        "status": result.status,
        "output": str(result.output) if result.records else None,
        "resume_refused": result.resume_refused or None,
        "unwritten": result.unwritten or None,
        "records": [json.loads(record.to_json()) for record in records],
        "counts": counts(records, result.incorrect),
        "skipped": [_outcome(outcome) for outcome in result.skipped],
        "incorrect": [
            _outcome(outcome) | {"role": outcome.role, "checked": outcome.check and outcome.check.as_dict()}
            for outcome in result.incorrect
        ],
        "claims": [verdict.as_dict() for verdict in settled],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {"experiment": outcome.experiment, "impl": outcome.impl, "case": outcome.case, "why": outcome.why}


def counts(records: Sequence[Record], incorrect: Sequence[Outcome]) -> dict[str, int]:
    """How many cases there were, and how many results (an implementation in a case) are correct and wrong."""
    from .render import case_key

    right = {(record.experiment, case_key(record.case), record.impl) for record in records}
    wrong = {(outcome.experiment, case_key(outcome.case), outcome.impl) for outcome in incorrect}
    return {
        "cases": len({key[:2] for key in right | wrong}),
        "correct": len(right - wrong),
        "wrong": len(wrong),
    }


def _write(file: Path, paper: Paper, result: RunResult, records: Sequence[Record], settled: Sequence[Verdict]) -> None:
    payload = as_payload(paper, result, records, settled)
    rows = payload["records"]
    if file.suffix not in (".json", ".jsonl"):  # raw samples and the whole environment would drown a table
        rows = [{key: row[key] for key in TABLE_FIELDS} | {"gpu": row["env"].get("gpu")} for row in rows]
        rows += [{"kind": "WRONG", **{k: row[k] for k in WRONG_FIELDS}} for row in payload["incorrect"]]
    output.write(file, rows, payload=payload, title=f"{paper.title}: results")


TABLE_FIELDS = (
    "kind",
    "experiment",
    "case",
    "impl",
    "metric",
    "unit",
    "median",
    "p20",
    "p80",
    "checked",
    "ratio_to",
    "commit",
)


WRONG_FIELDS = ("experiment", "case", "impl", "checked", "why")


def _show(paper: Paper, result: RunResult, records: Sequence[Record], settled: Sequence[Verdict]) -> None:
    screen = out()
    for made in result_tables(records, result.incorrect):
        screen.print(made)
    if records or result.incorrect:
        screen.print(_total(records, result.incorrect))
    if result.resumed:
        note(f"{len(result.resumed)} of {len(records)} records are from the earlier run")
    _remarks(result)
    if settled:
        screen.print("[bold]Claims that this run settles[/]")
        screen.print(ledger.verdict_table(settled))
        screen.print(ledger.sentence(settled, "this run: "), soft_wrap=True)
    elif records and paper.claims():
        screen.print("This run settles no claim of the paper.")
    if result.records and not result.unwritten:
        note(f"records: {result.output}")
    if result.interrupted:
        note("interrupted; the same command with --resume goes on from here", style="yellow")


def _total(records: Sequence[Record], incorrect: Sequence[Outcome]) -> str:
    """`10 cases: 27 results correct, 1 wrong (sdpa-flash, a rival)`."""
    count = counts(records, incorrect)
    text = f"{count['cases']} case{'' if count['cases'] == 1 else 's'}: "
    text += f"{count['correct']} result{'' if count['correct'] == 1 else 's'} correct"
    if not incorrect:
        return text
    names = dict.fromkeys(f"{one.impl}{'' if one.role == 'ours' else ', a rival'}" for one in incorrect)
    return f"{text}, [bold red]{count['wrong']} wrong[/] ({plain('; '.join(names))})"


def _remarks(result: RunResult) -> None:
    """Every reason once, with how many rows it concerns."""
    skipped = ((EVERYTHING if outcome.impl == "*" else outcome.impl, outcome.why) for outcome in result.skipped)
    _tell(Counter(skipped), "not supported here:" if result.status == "unsupported" else "skipped")
    for outcome in result.incorrect:
        note(
            f"WRONG {outcome.impl} in {outcome.experiment} {label(outcome.case, outcome.experiment)}: {outcome.why}",
            style="bold red",
        )


def _tell(reasons: Counter[tuple[str, str]], word: str) -> None:
    for (impl, why), count in list(reasons.items())[:MOST_REMARKS]:
        note(f"{word} {impl}{f' in {count} cases' if count > 1 else ''}: {why}")
    if len(reasons) > MOST_REMARKS:
        note(f"and {len(reasons) - MOST_REMARKS} more reasons; --json lists every one")


def _leave(result: RunResult, settled: Sequence[Verdict], *, gate: bool) -> None:
    if result.unwritten:
        note(f"error: records could not be written to {result.output}: {result.unwritten}", style="bold red")
        raise typer.Exit(codes.INTERNAL)
    if result.status == "nothing_ran":
        note("nothing ran: no case is left to do", style="yellow")
    if result.exit_code:
        raise typer.Exit(result.exit_code)
    ledger.leave(settled, gate=gate)


def _dry_run(
    paper: Paper, experiments: Sequence[str] | None, settings: Settings, host: Host, *, asked: str, json_: bool,
    file: Path | None,
) -> None:  # fmt: skip
    from gpu_accel.workbench.runner import plan

    with output.stdout_to_stderr():
        made: Plan = plan(paper, experiments, settings, host=host)
    _note_input(paper, made, asked)
    _note_shapes(made, settings.shapes)
    rows = [
        {"experiment": item["experiment"], "case": item["case"], "impl": impl["name"], "role": impl["role"],
         "runs": impl["runs"], "why": impl["why"]}
        for item in made.items for impl in item["implementations"]
    ]  # fmt: skip
    if file:
        output.write(file, rows, payload=made.as_dict(), title=f"{paper.title}: plan")
    if json_:
        return output.print_json(made.as_dict())
    grid = table("experiment", "case", "runs", "does not run")
    reasons: Counter[tuple[str, str]] = Counter()
    for item in made.items:
        running = [impl["name"] for impl in item["implementations"] if impl["runs"]]
        refused = {impl["name"]: impl["why"] for impl in item["implementations"] if not impl["runs"]}
        refused |= {EVERYTHING: item["refused"]} if item["refused"] else {}
        reasons.update(refused.items())
        case = plain(label(item["case"], item["experiment"]))
        grid.add_row(item["experiment"], case, ", ".join(running), ", ".join(refused), style="" if running else "dim")
    out().print(grid)
    _tell(reasons, "does not run:")
    runs = sum(row["runs"] for row in rows)
    measuring = f", {made.seconds:.0f} s of measuring" if made.seconds else ""
    if made.interpreted_seconds > MOST_INTERPRETED_SECONDS:
        measuring = f", about {span(made.interpreted_seconds)} of interpreting"
    cases = f"{len(made.items)} case{'' if len(made.items) == 1 else 's'}"
    out().print(f"{cases}, {runs} results to make{measuring}, {_place(host)}.")
    if not made.items:
        raise typer.Exit(codes.NOTHING_RAN)
