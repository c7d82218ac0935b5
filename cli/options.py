"""Arguments and options that several commands share, with the completion that needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpu_accel.errors import GpuAccelError, InvalidInputError

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

PRECISIONS = ("bf16", "fp16", "fp8")
DEFAULT_RESULTS = Path("gpu-accel-results")

Complete = Callable[[typer.Context, str], list[str]]


def _papers(ctx: typer.Context, incomplete: str) -> list[str]:
    from gpu_accel.workbench.registry import papers

    try:
        names = [name for paper in papers() for name in (*paper.aliases, paper.id)]
    except GpuAccelError:  # a broken paper.toml must not break the shell
        return []
    return [name for name in names if name.startswith(incomplete)]


def _typed_paper(papers: Iterable[Paper]) -> str | None:
    """The paper among the words typed so far, as the shell hands them on: behind an option without its value the parser
    gives up before it has seen the arguments."""
    words = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or "").split()
    known = {name for one in papers for name in (*one.aliases, one.id)}
    return next((word for word in words[2:] if word in known), None)


def _of_paper(choices: Callable[[Paper], Iterable[str]]) -> Complete:
    """Completion of what a paper offers: that of the paper already typed, or of all."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from gpu_accel.workbench.registry import paper, papers

        try:
            typed = ctx.params.get("paper") or _typed_paper(papers())
            names = [name for one in ([paper(typed)] if typed else papers()) for name in choices(one)]
        except GpuAccelError:
            return []
        return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]

    return complete


def _implementations(paper: Paper) -> list[str]:
    """Those of the paper, and those that its committed records name: what else a run knows takes torch to find out."""
    return list(dict.fromkeys([*paper.ours, *(record.impl for record in paper.records())]))


complete_implementation = _of_paper(_implementations)


def _precisions(paper: Paper) -> list[str]:
    known = {precision for experiment in paper.experiments.values() for precision in experiment.precisions}
    return [precision for precision in PRECISIONS if precision in known] or list(PRECISIONS)


def checked_precision(paper: Paper, asked: str, experiments: Sequence[str]) -> str:
    """The precision to run with: the one asked for, if the paper knows it, or the default.

    Raises:
        InvalidInputError: no experiment of the paper has it, or what is to run knows no precisions.
    """
    known = {precision for experiment in paper.experiments.values() for precision in experiment.precisions}
    if asked and known and asked not in known:
        from gpu_accel.workbench.experiment import did_you_mean

        raise InvalidInputError(
            f"--precision {asked!r}: {paper.id} has {', '.join(sorted(known))}{did_you_mean(asked, known)}"
        )
    named = [paper.experiments[name] for name in experiments if name in paper.experiments]
    if asked and not any(experiment.precisions for experiment in named or paper.experiments.values()):
        what = ", ".join(experiment.name for experiment in named) or paper.id
        raise InvalidInputError(f"--precision {asked!r}: {what} has no choice of precision; leave it out")
    return asked or default_precision(paper, experiments)


def default_precision(paper: Paper, experiments: Sequence[str]) -> str:
    """The precision when none is given: the first that every experiment named has, bf16 where there is a choice."""
    named = [paper.experiments[name] for name in experiments if name in paper.experiments]
    offered = [
        set(experiment.precisions) for experiment in named or paper.experiments.values() if experiment.precisions
    ]
    if not offered:
        return PRECISIONS[0]
    common = set.intersection(*offered) if named else set.union(*offered)
    ordered = [precision for precision in PRECISIONS if precision in common] + sorted(common - set(PRECISIONS))
    return ordered[0] if ordered else PRECISIONS[0]


def _profiles(ctx: typer.Context, incomplete: str) -> list[str]:
    from gpu_accel.hardware import profiles

    return [profile.name for profile in profiles() if profile.name.startswith(incomplete)]


PaperArgument = Annotated[
    str, typer.Argument(help="A paper's id or alias, such as fa3; `gpu-accel list` shows them.", autocompletion=_papers)
]
ExperimentsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT]...",
        help="Experiments of the paper, or a precision alone; those that suit the precision when none is named.",
        autocompletion=_of_paper(lambda paper: list(paper.experiments)),
    ),
]
ProfileArgument = Annotated[str, typer.Argument(help="A profile, such as h100-sxm.", autocompletion=_profiles)]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision", "-p", help="bf16, fp16 or fp8, as the paper offers.", autocompletion=_of_paper(_precisions)
    ),
]
InputOption = Annotated[
    str,
    typer.Option(
        "--input",
        help="The data: normal, or another input of the paper (outliers, smollm2, ...).",
        autocompletion=_of_paper(lambda paper: list(paper.inputs)),
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Also write to FILE: .json, .jsonl, .csv, .md or .html."),
]
