"""`gpu-accel report`: a paper's claims and results as one Markdown or HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpu_accel.errors import InvalidInputError

from .console import note
from .options import PaperArgument
from .output import check_suffix, replace
from .results import ResultsOption, gather


def report(
    paper: PaperArgument,
    results: ResultsOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write FILE, .md or .html, instead of Markdown on stdout."),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="HTML with plotly figures from its CDN instead of static ones.")
    ] = False,
) -> None:
    """Claims and results of a paper as one page.

    Made from the committed results, or from --results.
    """
    from gpu_accel.workbench import registry
    from gpu_accel.workbench import report as pages
    from gpu_accel.workbench.claims import judge_all
    from gpu_accel.workbench.records import merge

    if output and output.suffix not in (".md", ".html"):
        raise InvalidInputError(f"cannot write {output}: a report is .md or .html")
    if interactive and not (output and output.suffix == ".html"):
        raise InvalidInputError("--interactive needs -o FILE.html")
    if output:
        check_suffix(output)
    one = registry.paper(paper)
    claims, everything = one.claims(), gather(one, results)
    verdicts, records = judge_all(claims, everything), merge(everything)
    if output and output.suffix == ".html":
        text = pages.html(one, records, verdicts, claims=claims, plotly="cdn" if interactive else "svg")
    else:
        text = pages.markdown(one, records, verdicts)
    if output is None:
        sys.stdout.write(text)
        return
    replace(output, text)
    note(f"wrote {output}")
