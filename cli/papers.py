"""`gpu-accel list` and `gpu-accel show`: which papers there are, and what one of them offers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from . import output
from .console import out, plain, table
from .options import JsonOption, OutputOption, PaperArgument

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper


def list_papers(json_: JsonOption = False, output_: OutputOption = None) -> None:
    """All papers."""
    from gpu_accel.workbench.registry import papers

    output.check_suffix(output_)
    rows = [describe(paper) for paper in papers()]
    if output_:
        output.write(output_, rows, title="Papers")
    if json_:
        return output.print_json(rows)
    made = table("paper", "title", "arXiv", "experiments", "claims", "against itself", "results on",
                 right=("experiments", "claims", "against itself"), spare=("against itself", "results on"))  # fmt: skip
    for row, paper in zip(rows, papers(), strict=True):
        made.add_row(
            f"[bold]{paper.alias}[/]", row["title"], row["arxiv"], str(len(row["experiments"])), str(row["claims"]),
            str(row["against_itself"] or ""), ", ".join(row["results"]) or "[dim]none yet[/]",
        )  # fmt: skip
    for name in (made.columns[0], made.columns[2]):
        name.no_wrap = True  # what is typed
    out().print(made)
    out().print("Next: gpu-accel show PAPER, gpu-accel run PAPER, gpu-accel claims PAPER", style="dim")


def show(paper: PaperArgument, json_: JsonOption = False, output_: OutputOption = None) -> None:
    """One paper: what it offers and how to run it."""
    from gpu_accel.workbench import registry

    output.check_suffix(output_)
    one = registry.paper(paper)
    row = describe(one)
    if output_:
        output.write(output_, [row], payload=row, title=one.title)
    if json_:
        return output.print_json(row)
    screen = out()
    screen.print(f"\n[bold]{plain(one.title)}[/]")
    by = ", ".join(one.authors[:3]) + (" and others" if len(one.authors) > 3 else "")
    year = str(one.year) if one.year and str(one.year) not in one.venue else ""
    screen.print("  ".join(filter(None, [by, one.venue, year, one.arxiv and f"arXiv:{one.arxiv}"])))
    if one.summary:
        screen.print(f"\n{plain(one.summary)}")
    made = table("experiment", "precisions", "what it does")
    for name, experiment in one.experiments.items():
        made.add_row(f"[bold]{name}[/]", " ".join(experiment.precisions), plain(experiment.title))
    screen.print(made)
    facts = {
        "package": one.package,
        "notebook": row["notebook"],
        "inputs": " ".join(one.inputs),
        "claims": _claims(row) or "none",
        "results": ", ".join(f"{gpu} ({count} records)" for gpu, count in row["results"].items()) or "none yet",
        "folder": str(one.path),
    }
    for name, fact in facts.items():
        if fact:
            screen.print(f"  {name:9} {fact}", markup=False, soft_wrap=True)
    screen.print("\n[bold]Run it[/]")
    for command in row["commands"]:
        screen.print(f"  {command}", markup=False, soft_wrap=True)


def _claims(row: dict[str, Any]) -> str:
    """`370 (300 with a figure, 70 bound); the paper against itself: 13`."""
    # A claim of kind "measured" states a figure; whether it was measured here is its verdict.
    kinds = ", ".join(
        f"{count} {'with a figure' if kind == 'measured' else kind}" for kind, count in row["claims_by_kind"].items()
    )
    parts = [f"{row['claims']} ({kinds})"] if row["claims"] else []
    parts += [f"the paper against itself: {row['against_itself']}"] if row["against_itself"] else []
    return "; ".join(parts)


def describe(paper: Paper) -> dict[str, Any]:
    """Everything the registry knows of a paper, as JSON."""
    every = paper.claims()
    claims = [claim for claim in every if not claim.internal]
    measured = [record.env.get("sku") or record.env.get("gpu") for record in paper.records()]
    return {
        "id": paper.id,
        "aliases": list(paper.aliases),
        "title": paper.title,
        "arxiv": paper.arxiv,
        "authors": list(paper.authors),
        "year": paper.year,
        "summary": paper.summary,
        "package": paper.package,
        "notebook": f"notebooks/{paper.notebook}" if paper.notebook else "",
        "inputs": list(paper.inputs),
        "experiments": {
            name: {"title": experiment.title, "precisions": list(experiment.precisions)}
            for name, experiment in paper.experiments.items()
        },
        "claims": len(claims),
        "claims_by_kind": dict(Counter(claim.kind for claim in claims)),
        "against_itself": len(every) - len(claims),  # claims that the paper's own figures decide
        "results": dict(Counter(gpu for gpu in measured if gpu)),
        "commands": commands(paper),
    }


def commands(paper: Paper) -> list[str]:
    """Command lines that make sense for this paper, the plainest first."""
    lines = [f"gpu-accel run {paper.alias}"]
    precisions = dict.fromkeys(p for experiment in paper.experiments.values() for p in experiment.precisions)
    if len(precisions) > 1:
        lines.append(f"gpu-accel run {paper.alias} --precision {list(precisions)[-1]}")
    if paper.experiments:
        lines.append(f"gpu-accel run {paper.alias} {next(iter(paper.experiments))} --dry-run")
    lines.append(f"gpu-accel claims {paper.alias}")
    if paper.notebook:
        lines.append(f"gpu-accel notebook {paper.alias}")
    return lines


def readme_table() -> str:
    """The papers as Markdown, for the generated block in README.md."""
    from gpu_accel.workbench.claims import judge_all
    from gpu_accel.workbench.registry import papers
    from gpu_accel.workbench.report import markdown_table, summary

    rows = []
    for paper in papers():
        verdicts = judge_all(paper.claims(), paper.records())
        title = f"[{paper.title}](papers/{paper.id})"
        arxiv = f"[{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})"
        notebook = f"[{paper.notebook.removesuffix('.ipynb')}](notebooks/{paper.notebook})"
        rows.append((f"`{paper.alias}`", title, arxiv, f"`{paper.package}`", notebook, summary(verdicts)))
    return markdown_table(("", "paper", "arXiv", "kernels", "notebook", "claims"), rows)
