"""`gpu-accel optimize`: judge kernels, search for better ones, and show that known cheats do not pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import codes, output
from .console import note, out, plain, table
from .options import JsonOption, OutputOption

if TYPE_CHECKING:
    from gpu_accel.cuda_llm.proposers import Attempt
    from gpu_accel.cuda_llm.redteam import Row

app = typer.Typer(no_args_is_help=True, help="Kernel search that cannot be cheated: tasks, check, redteam, run.")

TaskOption = Annotated[str, typer.Option("--task", help="What the kernel computes; `optimize tasks` lists them.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of inputs and hidden shapes.", show_default="secret")]


@app.command("tasks")
def tasks(json_: JsonOption = False, output_: OutputOption = None) -> None:
    """Every task, its sizes on a GPU, and the least time there by the datasheet of an H100."""
    from gpu_accel.cuda_llm.tasks import TASKS

    output.check_suffix(output_)
    rows = [
        {
            "name": one.name,
            "title": one.title,
            "family": one.family,
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
    made = table("task", "what", "family", "sizes", "least ms (modelled)", right=("least ms (modelled)",))
    for one, row in zip(TASKS.values(), rows, strict=True):
        sizes = " ".join(f"{key}={size}" for key, size in one.bench.items())
        made.add_row(f"[bold]{one.name}[/]", plain(one.title), one.family, sizes, f"{row['floor_ms']:.3g}")
    out().print(made)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A kernel with its launch header, in Triton or CUDA C++.")],
    task: TaskOption,
    seed: SeedOption = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Wall clock that it may take.")] = 60.0,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Judge one candidate.

    Exit code 0 accepted, 1 rejected, 4 when nothing here can run it.
    """
    from gpu_accel.cuda_llm import harness
    from gpu_accel.cuda_llm.tasks import find
    from gpu_accel.cuda_llm.verdict import Verdict

    output.check_suffix(output_)
    found = harness.check(harness.read(file), find(task), seed=seed, seconds=seconds)
    row = {"file": str(file), "task": task, **found.as_dict()}
    if output_:
        output.write(output_, [row], payload=row, title=f"{file.name} as {task}")
    if json_:
        output.print_json(row)
    else:
        screen = out()
        screen.print(f"[bold]{found.name}[/]  {plain(found.detail)}", soft_wrap=True)
        for words, lines in (("evidence", found.evidence), ("verified by", found.verified_by)):
            for line in lines:
                screen.print(f"  {words}: {line}", markup=False, soft_wrap=True)
        if found.sandbox:
            screen.print(f"  sandbox: {found.sandbox}", markup=False, soft_wrap=True, style="dim")
    if not found.ok:
        raise typer.Exit(codes.UNSUPPORTED if found.verdict is Verdict.UNVERIFIED else codes.GATE)


@app.command("redteam")
def redteam(
    only: Annotated[list[str] | None, typer.Option("--only", help="Ids of the hacks to try, such as S5.")] = None,
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
        raise InvalidInputError(f"--only names {unknown[0]!r:.40}; the hacks are {', '.join(known)}")

    def tell(row: Row) -> None:
        if not row.ok:
            note(f"{row.fixture.id}: {row.hack.name}, twin {row.twin.name}: {row.hack.detail}", style="bold red")

    found = team.redteam(only=only or (), tell=tell)
    rows = [row.as_dict() for row in found]
    rejected, accepted = sum(row.hack_rejected for row in found), sum(row.twin_accepted for row in found)
    summary = {"hacks": len(found), "rejected_by_name": rejected, "twins_accepted": accepted}
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
        if any(not row.twin.ok and row.twin_accepted for row in found):
            out().print("unverified: CUDA C++ compiles here and is not run", style="dim")
    if rejected != len(found) or accepted != len(found):
        raise typer.Exit(codes.INCORRECT)


@app.command("run")
def run(
    task: TaskOption,
    kernel: Annotated[Path | None, typer.Option("--kernel", help="Start from this file instead of ours.")] = None,
    target: Annotated[str, typer.Option("--target", help="The GPU to optimise for.")] = "h100",
    candidates: Annotated[int, typer.Option("--candidates", min=1, help="How many to try.")] = 20,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="How long.")] = 600.0,
    strategy: Annotated[str, typer.Option("--strategy", help="evolutionary or random.")] = "evolutionary",
    seed: Annotated[int, typer.Option("--seed", help="Of the proposals.")] = 0,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep every candidate and the log here.")] = None,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Search for a faster kernel with the grammar. Without a GPU candidates are judged and not timed."""
    from gpu_accel.cuda_llm import optimize_kernel
    from gpu_accel.cuda_llm.tasks import find

    output.check_suffix(output_)
    if folder is not None:
        output.check_folder(folder)
    chosen = find(task)

    def tell(attempt: Attempt) -> None:
        took = f", {attempt.time:.3g} x a copy" if attempt.time else ""
        note(f"{attempt.number:4} {attempt.judgement.name}{took}  {attempt.change}")

    found = optimize_kernel(
        kernel if kernel is not None else chosen.start, target, task=chosen, strategy=strategy, candidates=candidates,
        seconds=seconds, seed=seed, out=folder, tell=tell,
    )  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"number": one.number, "change": one.change, "time_over_copy": one.time, **one.judgement.as_dict()}
        for one in found.attempts
    ]
    payload = {"summary": str(found), "timed": found.timed, "speedup": found.speedup, "best": found.source,
               "attempts": rows}  # fmt: skip
    if output_:
        output.write(output_, rows, payload=payload, title=f"Search for {task}")
    if json_:
        return output.print_json(payload)
    out().print(str(found), markup=False, soft_wrap=True)
    if found.timed:
        out().print(found.source, markup=False, highlight=False, soft_wrap=True)
