"""`gpu-accel conformance`: attention on inputs that have broken attention libraries; who passes what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, device, output
from .console import note, out, plain, table
from .options import JsonOption, OutputOption

if TYPE_CHECKING:
    from gpu_accel.testing.conformance import Outcome

STYLES = {"pass": "green", "refused": "yellow", "not run": "dim"}  # everything else is red
BROKEN = ("wrong", "error", "crashed", "hung")


def conformance(
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="LIBRARIES",
            help="Others to try beside ours: sdpa-flash,flex, or my_module:attend, or all.",
        ),
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CASE", help="Only this case. Repeatable.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Say what the cases are, and run nothing.")] = False,
    device_: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that one case may take.")] = 120.0,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """Attention on inputs that have broken attention libraries: who passes what.

    Cases come from public reports, which --list names. Each library runs in a process of its own. Exit code 3 when ours
    fails one.
    """
    output.check_suffix(output_)
    where = "cpu" if list_ else device.prepare(device_)
    from gpu_accel.testing.conformance import CASES, LIBRARIES, resolve, run_library

    cases = list(dict.fromkeys(only or CASES))
    for name in cases:
        if name not in CASES:
            raise InvalidInputError(f"no case {name!r}; the cases are {', '.join(CASES)}")
    if list_:
        rows = [{key: getattr(CASES[name], key) for key in ("name", "report", "right", "gpu_only")} for name in cases]
        _finish(rows, output_, json_)
        if not json_:
            made = table("case", "seen in", "what is right")
            for name in cases:
                made.add_row(name, plain(CASES[name].report or "-"), plain(CASES[name].right))
            out().print(made)
        return
    others = list(LIBRARIES) if against == "all" else [name.strip() for name in against.split(",") if name.strip()]
    libraries = list(dict.fromkeys(["gpu-accel", *others]))
    ours = {library: resolve(library).ours for library in libraries}
    outcomes: list[Outcome] = []
    for library in libraries:
        for outcome in run_library(library, device=where, cases=cases, timeout=timeout):
            outcomes.append(outcome)
            note(f"{library}: {outcome.case}: {outcome.verdict} {outcome.detail}".rstrip())
    judged = [{**one.as_dict(), "report": CASES[one.case].report, "device": where} for one in outcomes]
    _finish(judged, output_, json_)
    if not json_:
        _print(cases, libraries, outcomes)
    if any(one.verdict in BROKEN and ours[one.library] for one in outcomes):
        raise typer.Exit(codes.INCORRECT)


def _finish(rows: list[dict[str, Any]], output_: Path | None, json_: bool) -> None:
    if output_:
        output.write(output_, rows, title="gpu-accel conformance")
    if json_:
        output.print_json(rows)


def _print(cases: list[str], libraries: list[str], outcomes: list[Outcome]) -> None:
    found = {(one.case, one.library): one.verdict for one in outcomes}
    made = table("case", *libraries)
    for case in cases:
        words = (found.get((case, library), "not run") for library in libraries)
        made.add_row(case, *(f"[{STYLES.get(word, 'bold red')}]{word}[/]" for word in words))
    counts = (sum(found.get((case, library)) == "pass" for case in cases) for library in libraries)
    made.add_row("passed", *(f"{count} of {len(cases)}" for count in counts))
    out().print(made)
