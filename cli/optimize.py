"""`gpu-accel optimize`: judge kernels, search for better ones, and show that known cheats do not pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import shown

from . import codes, output
from .console import note, out, plain, table
from .options import JsonOption, OutputOption

if TYPE_CHECKING:
    from gpu_accel.cuda_llm.proposers import Attempt
    from gpu_accel.cuda_llm.redteam import Row
    from gpu_accel.cuda_llm.tasks import Task

ENDPOINTS = ("openai-compatible", "anthropic")
PROPOSERS = ("grammar", "openai-compatible", "anthropic", "transformers", "file", "replay")
STRATEGIES = ("random", "evolutionary", "pattern", "bandit", "surrogate")  # of grammar.py, which imports numpy

app = typer.Typer(
    no_args_is_help=True, help="Kernel search that cannot be cheated: tasks, check, run, bench, report, redteam."
)

SeedOption = Annotated[int | None, typer.Option("--seed", help="Of inputs and hidden shapes.", show_default="secret")]


@app.command("tasks")
def tasks(json_: JsonOption = False, output_: OutputOption = None) -> None:
    """Every task: the buffers its kernels take, its sizes on a GPU, and the least time there by an H100's datasheet."""
    from gpu_accel.cuda_llm.tasks import TASKS

    output.check_suffix(output_)
    rows: list[dict[str, Any]] = [
        {
            "name": one.name,
            "title": one.title,
            "family": one.family,
            "inputs": [buffer.name for buffer in one.inputs],
            "outputs": [buffer.name for buffer in one.outputs],
            "bench": one.bench,
            "bytes": one.bytes_moved(one.bench),
            "floor_ms": one.floor_ms(one.bench, "h100-sxm"),
        }
        for one in TASKS.values()
    ]
    if output_:
        output.write(output_, rows, title="Tasks")
    if json_:
        return output.print_json(rows)
    made = table("task", "what", "buffers", "sizes", "least ms (modelled)", right=("least ms (modelled)",))
    for one, row in zip(TASKS.values(), rows, strict=True):
        sizes = " ".join(f"{key}={size}" for key, size in one.bench.items())
        buffers = f"{', '.join(row['inputs'])} → {', '.join(row['outputs'])}"
        made.add_row(f"[bold]{one.name}[/]", plain(one.title), buffers, sizes, f"{row['floor_ms']:.3g}")
    out().print(made)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A kernel with its launch header, in Triton or CUDA C++.")],
    task: Annotated[str, typer.Option("--task", help="What it computes, if its header does not say.")] = "",
    host: Annotated[
        bool, typer.Option("--host", help="The file is Python: run(x, ...) or custom_kernel(data). Untrusted.")
    ] = False,
    problem: Annotated[
        Path | None, typer.Option("--problem", help="A KernelBench problem; the file has its ModelNew. Untrusted.")
    ] = None,
    seed: SeedOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Wall clock that it may take.")] = 60.0,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Judge one candidate.

    Exit code 0 accepted, 1 rejected, 4 when nothing here can run it.
    """
    from gpu_accel.cuda_llm import harness
    from gpu_accel.cuda_llm.host import check_host, check_model
    from gpu_accel.cuda_llm.tasks import find
    from gpu_accel.cuda_llm.verdict import Verdict
    from gpu_accel.errors import InvalidInputError

    output.check_suffix(output_)
    if problem is not None and (host or task):
        raise InvalidInputError("--problem says what is computed: leave --task and --host out")
    text = harness.read(file)
    if problem is None:
        task = task or ("" if host else _task_in(text))
        if not task:
            raise InvalidInputError("say what the kernel computes: --task NAME; `optimize tasks` lists them")
    if problem is not None:
        source = harness.read(problem).decode(errors="replace")
        found = check_model(source, text.decode(errors="replace"), seed=seed, seconds=seconds)
    elif host:
        found = check_host(text.decode(errors="replace"), find(task), seed=seed, seconds=seconds)
    else:
        found = harness.check(text, find(task), seed=seed, seconds=seconds)
    untrusted = host or problem is not None
    row = {"file": str(file), "task": task or str(problem), "untrusted_host_code": untrusted, **found.as_dict()}
    if output_:
        output.write(output_, [row], payload=row, title=f"{file.name} as {row['task']}")
    if json_:
        output.print_json(row)
    else:
        screen = out()
        screen.print(f"[bold]{found.name}[/]  {plain(found.detail)}", soft_wrap=True)
        if untrusted:
            screen.print("  [yellow]untrusted host code: never timed, never ranked[/]")
        for words, lines in (("evidence", found.evidence), ("verified by", found.verified_by)):
            for line in lines:
                screen.print(f"  {words}: {line}", markup=False, soft_wrap=True)
        if found.sandbox:
            screen.print(f"  sandbox: {found.sandbox}", markup=False, soft_wrap=True, style="dim")
    if not found.ok:
        raise typer.Exit(codes.UNSUPPORTED if found.verdict is Verdict.UNVERIFIED else codes.GATE)


def _task_in(text: bytes) -> str:
    """The task that a candidate's header names; "" for none."""
    from gpu_accel.cuda_llm.candidate import Candidate
    from gpu_accel.cuda_llm.verdict import Rejected

    try:
        return Candidate.parse(text).launch.task
    except Rejected:
        return ""


@app.command("redteam")
def redteam(
    only: Annotated[list[str] | None, typer.Option("--only", help="Ids of the hacks to try, such as S5.")] = None,
    fuzz: Annotated[
        int, typer.Option("--fuzz", min=0, help="Judge so many malformed candidates as well, such as 1000.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the malformed candidates.")] = 20261128,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Try every known hack and its honest twin: all hacks rejected by name, all twins accepted.

    Exit code 3 when one is not.
    """
    from gpu_accel.cuda_llm import redteam as team
    from gpu_accel.cuda_llm.fixtures import FIXTURES
    from gpu_accel.errors import InvalidInputError

    output.check_suffix(output_)
    known = [*(one.id for one in FIXTURES), "C12", "T1"]
    if unknown := [one for one in only or () if one not in known]:
        raise InvalidInputError(f"--only names {shown(unknown[0], 40)}; the hacks are {', '.join(known)}")

    def tell(row: Row) -> None:
        if not row.ok:
            note(f"{row.fixture.id}: {row.hack.name}, twin {row.twin.name}: {row.hack.detail}", style="bold red")

    if (lacking := len(FIXTURES) - len(team.here())) and not only:
        note(f"{lacking} hacks are left out: they show in what NVRTC makes of them, and it is not here", style="yellow")
    found = team.redteam(only=only or (), tell=tell)
    rows = [row.as_dict() for row in found]
    rejected, accepted = sum(row.hack_rejected for row in found), sum(row.twin_accepted for row in found)
    summary: dict[str, Any] = {"hacks": len(found), "rejected_by_name": rejected, "twins_accepted": accepted}
    fuzzed = _fuzzed(fuzz, seed) if fuzz else None
    if fuzzed:
        summary["fuzzed"] = fuzzed
    if output_:
        output.write(output_, rows, payload={"summary": summary, "rows": rows}, title="Red team")
    if json_:
        output.print_json({"summary": summary, "rows": rows})
    else:
        made = table("", "hack", "verdict", "as expected", "honest twin")
        for row in found:
            twin = "accepted" if row.twin.ok else row.twin.name
            made.add_row(
                row.fixture.id, plain(row.fixture.name), row.hack.name, "yes" if row.hack_rejected else "[red]NO[/]",
                twin if row.twin_accepted else f"[red]{twin}[/]",
            )  # fmt: skip
        out().print(made)
        out().print(f"{rejected} of {len(found)} hacks rejected by name, {accepted} of {len(found)} twins pass")
        if fuzzed:
            told = ", ".join(f"{count} {name}" for name, count in fuzzed["counts"].items())
            out().print(f"{fuzz} malformed: {told}; {len(fuzzed['untyped'])} without a verdict", soft_wrap=True)
            out().print(f"honest kernels in between: {fuzzed['healthy']} accepted, {fuzzed['sick']} not")
        if any(not row.twin.ok and row.twin_accepted for row in found):
            out().print("unverified: CUDA C++ compiles here and is not run", style="dim")
    if rejected != len(found) or accepted != len(found) or (fuzzed and not fuzzed["ok"]):
        raise typer.Exit(codes.INCORRECT)


def _fuzzed(count: int, seed: int) -> dict[str, Any]:
    from gpu_accel.cuda_llm.fuzz import fuzz
    from gpu_accel.cuda_llm.pool import Pool

    def tell(number: int, judged: Any) -> None:
        if number % 50 == 0:
            note(f"{number} of {count}: {judged.name}")

    with Pool() as pool:
        return fuzz(count, pool=pool, seed=seed, tell=tell).as_dict()


@app.command("run")
def run(
    task: Annotated[
        list[str], typer.Option("--task", help="What the kernel computes; several times for several, or `all`.")
    ],
    kernel: Annotated[Path | None, typer.Option("--kernel", help="Start from this file instead of ours.")] = None,
    target: Annotated[str, typer.Option("--target", help="The GPU to optimise for.")] = "h100",
    proposer: Annotated[str, typer.Option("--proposer", help="; ".join(PROPOSERS))] = "grammar",
    strategy: Annotated[
        str, typer.Option("--strategy", help=f"Of the grammar: {', '.join(STRATEGIES)}.")
    ] = "evolutionary",
    model: Annotated[str, typer.Option("--model", help="A language model's name, or a local folder of one.")] = "",
    base_url: Annotated[
        str, typer.Option("--base-url", help="Of an endpoint, such as http://127.0.0.1:8000/v1.")
    ] = "",
    key: Annotated[str, typer.Option("--key", help="Name of the environment variable with the endpoint's key.")] = "",
    from_: Annotated[
        Path | None, typer.Option("--from", help="Folder of kernels (file) or of a recorded search (replay).")
    ] = None,
    candidates: Annotated[int, typer.Option("--candidates", min=1, help="How many to try for each task.")] = 20,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="How long, all tasks together.")] = 600.0,
    dollars: Annotated[float | None, typer.Option("--dollars", help="How much a model may cost; by --price.")] = None,
    price: Annotated[
        str, typer.Option("--price", help="Dollars per million tokens, read,written: 0.5,1.5.")
    ] = "0,0",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of a model's reply.")] = 4096,
    depth: Annotated[int | None, typer.Option("--depth", min=1, help="How many rounds, the paper's D.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Proposals a round, the paper's N.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the proposals.")] = 0,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep every candidate and the log here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is in the folder.")] = False,
    against: Annotated[
        str, typer.Option("--against", help="Baselines to time with the best: library, compiled, naive, start.")
    ] = "library,compiled,naive",
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Search for faster kernels. Without a GPU candidates are judged and not timed.

    Exit code 3 when the kernel at the start of a search is not right, 1 when one of several searches failed.
    """
    from gpu_accel.cuda_llm import optimize_kernel
    from gpu_accel.cuda_llm.models import prices_of
    from gpu_accel.cuda_llm.search import Optimized
    from gpu_accel.cuda_llm.tasks import TASKS, find
    from gpu_accel.cuda_llm.verdict import printable
    from gpu_accel.errors import InvalidInputError

    output.check_suffix(output_)
    if folder is not None:
        output.check_folder(folder)
    prices = prices_of(price)  # also for what costs nothing: a mistake in it is not passed over
    if dollars is not None and not any(prices) and proposer in ENDPOINTS:
        raise InvalidInputError("--dollars ends nothing without what tokens cost: give --price")
    if resume and folder is None:
        raise InvalidInputError("--resume goes on with a search that was kept: name its --folder")
    chosen = list(TASKS.values()) if task == ["all"] else [find(name) for name in task]
    if len(set(task)) < len(task):
        raise InvalidInputError("--task names one task twice")
    peers = _peers(against)
    make = _proposer(proposer, model=model, base_url=base_url, key=key, folder=from_, price=price,
                     max_tokens=max_tokens, seed=seed, strategy=strategy)  # fmt: skip

    def tell(name: str, attempt: Attempt) -> None:
        took = f", {attempt.time:.3g} x a copy" if attempt.time else ""
        why = "" if attempt.ok else f": {attempt.judgement.detail[:100]}"
        note(f"{name} {attempt.number:4} {attempt.judgement.name}{took}  {attempt.change}{why}")

    one_by_one = f"--task {chosen[0].name} --folder {folder}/{chosen[0].name} --resume"
    if len(chosen) > 1 and resume:
        raise InvalidInputError(f"--resume goes on with the search of one task, such as {one_by_one}")
    if len(chosen) > 1 and (kernel is not None or dollars is not None or depth is not None):
        raise InvalidInputError("--kernel, --dollars and --depth are for a search of one task")
    found: dict[str, Optimized | Exception]
    try:
        if len(chosen) == 1:
            one = chosen[0]
            found = {one.name: optimize_kernel(
                kernel if kernel is not None else one.start, target, task=one, proposer=make(one),
                candidates=candidates, seconds=seconds, dollars=dollars, depth=depth, batch=batch, out=folder,
                resume=resume, peers=peers, tell=lambda attempt: tell(one.name, attempt),
            )}  # fmt: skip
        else:
            found = _search_all(chosen, make, target, candidates=candidates, seconds=seconds, batch=batch,
                                folder=folder, peers=peers, tell=tell)  # fmt: skip
    except KeyboardInterrupt:
        if folder is not None:
            how = "the same command with --resume" if len(chosen) == 1 else f"task by task, {one_by_one},"
            note(f"what was judged is in {folder}; {how} goes on from there", style="yellow")
        raise
    rows = [_outcome(name, one) for name, one in found.items()]
    payload: Any = {"searches": rows}
    if len(chosen) == 1:
        only = next(iter(found.values()))
        assert isinstance(only, Optimized)
        attempts = [
            {"number": one.number, "change": one.change, "time_over_copy": one.time, **one.judgement.as_dict()}
            for one in only.attempts
        ]
        payload = rows[0] | {"summary": str(only), "timed": only.timed, "best": only.source, "attempts": attempts}
    if output_:
        output.write(output_, rows, payload=payload, title="Kernel search")
    if json_:
        output.print_json(payload)
    elif len(chosen) == 1 and isinstance(only, Optimized):
        out().print(str(only), markup=False, soft_wrap=True)
        if only.timed:
            lines = "\n".join(printable(line) for line in only.source.split("\n"))
            out().print(lines, markup=False, highlight=False, soft_wrap=True)
    else:
        _table_of(rows)
    if any(isinstance(one, Exception) for one in found.values()):
        raise typer.Exit(codes.GATE)


@app.command("bench")
def bench(
    path: Annotated[
        Path, typer.Argument(help="A kernel, the folder of a search or of several, or a .json file of winners.")
    ],
    task: Annotated[str, typer.Option("--task", help="What the kernel computes, if its file does not say.")] = "",
    target: Annotated[str, typer.Option("--target", help="The GPU whose roofline holds.")] = "h100",
    against: Annotated[
        str, typer.Option("--against", help="Baselines: library, compiled, naive, start.")
    ] = "library,compiled,naive",
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Timing budget of each.")] = 0.25,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Judge kernels and time them next to their baselines, from nothing but their files.

    So what a search found is verified in another process, or on another machine. Exit code 1 when a kernel is not
    accepted, 4 without a GPU of that kind.
    """
    from gpu_accel.cuda_llm.artefact import best_of
    from gpu_accel.cuda_llm.progress import read as read_winners
    from gpu_accel.cuda_llm.report import read_folder
    from gpu_accel.cuda_llm.search import as_candidate, gpu_here
    from gpu_accel.cuda_llm.searches import verify
    from gpu_accel.cuda_llm.tasks import find
    from gpu_accel.errors import HardwareError, InvalidInputError
    from gpu_accel.hardware.catalog import profile

    output.check_suffix(output_)
    wanted, peers = profile(target), _peers(against)
    if path.is_dir():
        kernels = [(one.task, best_of(one.folder)) for one in read_folder(path)]
    elif path.suffix == ".json":
        kernels = [(one.task, one.best) for one in read_winners(path) if one.best]
    else:
        kernel = as_candidate(path)
        if not (task or kernel.launch.task):
            raise InvalidInputError("say what the kernel computes: --task NAME")
        kernels = [(find(task or kernel.launch.task), kernel)]
    if not gpu_here(wanted.architecture):
        raise HardwareError(f"times need {wanted.title}, and there is none here; `optimize check` needs none")
    found = verify(kernels, target=wanted.name, peers=peers, seconds=seconds)
    rows: list[dict[str, Any]] = [
        {
            "task": one.name, "verdict": measured.judgement.name, "detail": measured.judgement.detail,
            "ms": measured.ms, "share_of_roofline": one.floor_ms(one.bench, wanted) / measured.ms if measured.ms else
            None, "naive_over_best": measured.ratio("naive"), "library_over_best": measured.over_best_library,
            "torch_over_best": measured.ratio("library"), "compiled_over_best": measured.ratio("compiled"),
            "warm_ms": measured.warm_ms, "warm_library_over_best": measured.warm_over_best_library,
            "verified_by": list(measured.judgement.verified_by), "failed": dict(measured.failed),
        }
        for (one, _), measured in zip(kernels, found, strict=True)
    ]  # fmt: skip
    if output_:
        output.write(output_, rows, title="Kernels, judged and timed")
    if json_:
        output.print_json(rows)
    else:
        columns = ("ms", "roofline", "naive / kernel", "library / kernel", "warm ms", "library / kernel, warm")
        made = table("task", "verdict", *columns, right=columns)
        for row in rows:
            share = f"{row['share_of_roofline']:.0%}" if row["share_of_roofline"] else ""
            made.add_row(row["task"], row["verdict"], _number(row["ms"]), share, _number(row["naive_over_best"]),
                         _number(row["library_over_best"]), _number(row["warm_ms"]),
                         _number(row["warm_library_over_best"]))  # fmt: skip
        out().print(made)
    if not all(one.judgement.ok for one in found):
        raise typer.Exit(codes.GATE)


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(help="Of a search, or of several.")],
    p: Annotated[str, typer.Option("--p", help="Thresholds of fast_p.")] = "1,1.5,2",
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write FlashInfer's trace format into this folder.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", help="Append the final times to this file as records of the ledger.")
    ] = None,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """What searches came to: times, shares of the roofline, fast_p over each baseline."""
    from gpu_accel.cuda_llm.artefact import make_folder
    from gpu_accel.cuda_llm.records_table import records_of
    from gpu_accel.cuda_llm.report import export_traces, fast_p, read_folder
    from gpu_accel.errors import InvalidInputError
    from gpu_accel.workbench.records import append_records

    output.check_suffix(output_)
    if trace is not None:
        output.check_folder(trace)
    try:
        thresholds = [float(one) for one in p.split(",")]
    except ValueError as error:
        raise InvalidInputError(f"--p is {shown(p, 40)}; it is a list of numbers, such as 1,1.5,2") from error
    if wrong := [one for one in thresholds if not 0 <= one < math.inf]:
        raise InvalidInputError(f"--p has {wrong[0]:g}; thresholds are finite and not negative, such as 1,1.5,2")
    found = read_folder(folder)
    if trace is not None:
        make_folder(trace)
    rows = [one.row() for one in found]
    ratios = {
        "naive": {one.task.name: one.ratio("naive") for one in found},
        "library": {one.task.name: one.over_library for one in found},
    }
    shares = {
        name: {f"fast_{at:g}": fast_p(values, at) for at in thresholds}
        for name, values in ratios.items() if any(values.values())
    }  # fmt: skip
    payload = {"searches": rows, "fast_p": shares}
    if records is not None:
        append_records(records, [record for one in found for record in records_of(one)])
    if trace is not None:
        payload["traces"] = [str(one) for one in export_traces(found, trace)]
    if output_:
        output.write(output_, rows, payload=payload, title="Kernel searches")
    if json_:
        return output.print_json(payload)
    made = table("task", "tried", "ms", "roofline", "naive / best", "library / best", "why it ended",
                 right=("tried", "ms", "roofline", "naive / best", "library / best"))  # fmt: skip
    for row in rows:
        share = f"{row['share_of_roofline']:.0%}" if row["share_of_roofline"] else ""
        made.add_row(row["task"], str(row["candidates"]), _number(row["ms"]), share, _number(row["naive_over_best"]),
                     _number(row["library_over_best"]), plain(str(row["note"] or "")))  # fmt: skip
    out().print(made)
    for name, values in shares.items():
        out().print(f"over {name}: " + ", ".join(f"{key} {value:.0%}" for key, value in values.items()))
    if trace is not None:
        note(f"{len(payload['traces'])} files in {trace}")


def _search_all(chosen: list[Task], make: Any, target: str, *, candidates: int, seconds: float, batch: int,
                folder: Path | None, peers: tuple[str, ...], tell: Any) -> dict[str, Any]:  # fmt: skip
    from gpu_accel.cuda_llm.pool import Pool
    from gpu_accel.cuda_llm.search import gpu_here
    from gpu_accel.cuda_llm.searches import search_all
    from gpu_accel.hardware.catalog import profile

    wanted = profile(target)
    with Pool(gpu=gpu_here(wanted.architecture)) as pool:
        note(f"{pool.workers} sandbox{'es' if pool.workers > 1 else ''}: {pool.described}")
        return search_all(
            chosen, pool=pool, target=wanted.name, seconds=seconds, proposer=make, candidates=candidates, batch=batch,
            out=folder, peers=peers, tell=tell,
        )  # fmt: skip


def _peers(text: str) -> tuple[str, ...]:
    from gpu_accel.cuda_llm.measure import PEERS
    from gpu_accel.errors import InvalidInputError

    peers = tuple(filter(None, (one.strip() for one in text.split(","))))
    if unknown := [one for one in peers if one not in PEERS]:
        raise InvalidInputError(f"--against names {shown(unknown[0], 40)}; choose from {', '.join(PEERS)}")
    return peers


def _outcome(name: str, found: Any) -> dict[str, Any]:
    """One row: what a search came to."""
    if isinstance(found, Exception):
        return {"task": name, "failed": str(found)}
    final = found.final
    return {
        "task": name, "candidates": len(found.attempts), "accepted": sum(one.ok for one in found.attempts),
        "ms": final.ms if final else None, "over_copy": final.over_copy if final else None,
        "over_start": found.speedup, "naive_over_best": final.ratio("naive") if final else None,
        "library_over_best": final.over_best_library if final else None, "best": found.best.change,
        "language": found.candidate.language, "note": found.note,
    }  # fmt: skip


def _table_of(rows: list[dict[str, Any]]) -> None:
    made = table("task", "tried", "ms", "naive / best", "library / best", "best",
                 right=("tried", "ms", "naive / best", "library / best"))  # fmt: skip
    for row in rows:
        if "failed" in row:
            made.add_row(row["task"], "", "", "", "", f"[red]{plain(row['failed'])}[/]")
            continue
        made.add_row(
            row["task"], str(row["candidates"]), *(_number(row[key]) for key in ("ms", "naive_over_best",
            "library_over_best")), plain(row["best"]),
        )  # fmt: skip
    out().print(made)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _proposer(name: str, *, model: str, base_url: str, key: str, folder: Path | None, price: str, max_tokens: int,
              seed: int, strategy: str) -> Any:  # fmt: skip
    """A function that makes the proposer of one task.

    Raises:
        InvalidInputError: there is no such proposer, or it lacks something.
    """
    from gpu_accel.cuda_llm.grammar import Grammar
    from gpu_accel.cuda_llm.proposers import Files, Replay
    from gpu_accel.errors import InvalidInputError

    if name not in PROPOSERS:
        raise InvalidInputError(f"--proposer is {shown(name, 40)}; choose one of {', '.join(PROPOSERS)}")
    given = {"--model": model, "--base-url": base_url, "--key": key, "--from": folder, "--price": price != "0,0"}
    endpoint = ("--model", "--base-url", "--key", "--price")
    reads = {"file": ("--from",), "replay": ("--from",), "transformers": ("--model", "--price"),
             **dict.fromkeys(ENDPOINTS, endpoint)}  # fmt: skip
    if idle := [one for one, value in given.items() if value and one not in reads.get(name, ())]:
        raise InvalidInputError(f"{idle[0]} is not for --proposer {name}: leave it out, or choose another proposer")
    if name == "grammar":
        made: Any = Grammar(strategy, seed)
    elif name in ("file", "replay"):
        if folder is None:
            raise InvalidInputError(f"--proposer {name} needs --from FOLDER")
        made = Files(folder) if name == "file" else Replay(folder)
    else:
        from gpu_accel.cuda_llm import models

        made = models.make(name, model=model, base_url=base_url, key=key, price=price, max_tokens=max_tokens)
    return lambda task: made
