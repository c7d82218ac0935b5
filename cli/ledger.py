"""`gpu-accel claims`: every claim of a paper with its verdict, or with the reason that it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, output
from .console import note, out, plain, table
from .options import JsonOption, OutputOption, PaperArgument
from .render import number
from .results import ResultsOption, gather

if TYPE_CHECKING:
    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.records import Record

# the groups of verdict words, in the order they are told, and how each is coloured
GROUPS = {
    "reproduced": "green",
    "within": "yellow",
    "not reproduced": "red",
    "not measured": "dim",
    "unsupported": "magenta",
}
FOLD = 5  # figures with more cells than this are one line, unless asked for


def claims(
    paper: PaperArgument,
    verdict: Annotated[
        list[str] | None,
        typer.Option("--verdict", help="Only these verdicts: " + ", ".join(GROUPS) + ". Repeatable.",
                     autocompletion=lambda incomplete: [group for group in GROUPS if group.startswith(incomplete)]),
    ] = None,
    id_: Annotated[
        list[str] | None, typer.Option("--id", metavar="PATTERN", help="Only claims with this id, such as 'fig5*'. Repeatable.")
    ] = None,
    where: Annotated[str, typer.Option("--where", help="Only claims from this place, such as 'Table 3'.")] = "",
    settled: Annotated[bool, typer.Option("--settled", help="Only claims that a record settles.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every cell of every figure, on a line of its own.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Only the counts.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 if one of the claims shown is not reproduced.")] = False,
    results: ResultsOption = None,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:  # fmt: skip
    """The claims of a paper and their verdicts.

    Judged from the committed results, or from --results. A figure with many cells is one line; --all or --id shows them.
    """
    from gpu_accel.workbench import registry

    output.check_suffix(output_)
    groups = [_group_asked(word) for word in verdict or []]
    one = registry.paper(paper)
    verdicts = judge_all(one.claims(), gather(one, results))
    chosen = [
        v
        for v in verdicts
        if (not groups or group(v.word) in groups)
        and (not id_ or any(fnmatchcase(v.claim.id, pattern) for pattern in id_))
        and where.lower() in v.claim.where.lower()
        and (not settled or is_settled(v))
    ]
    rows = [as_row(v) for v in chosen]
    payload = {"paper": one.id, "counts": counts(chosen), "claims": rows}
    if output_:
        output.write(output_, rows, payload=payload, title=f"Claims of {one.title}")
    if json_:
        output.print_json(payload)
    elif not chosen:
        note(f"none of {len(verdicts)} claims fits", style="yellow")
    else:
        if not brief:
            out().print(verdict_table(chosen, fold=not (every or id_)))
        out().print(sentence(chosen, f"{one.alias}: "))
        if brief:
            note(f"each with its reason: gpu-accel claims {one.alias}")
    if gate and (failed := [v.claim.id for v in chosen if group(v.word) == "not reproduced"]):
        note(f"gate: {len(failed)} not reproduced: {', '.join(failed[:8])}{' ...' if len(failed) > 8 else ''}", style="bold red")
        raise typer.Exit(codes.GATE)
    if gate and not any(is_settled(v) for v in chosen):
        note("gate: no claim was settled", style="yellow")
        raise typer.Exit(codes.NOTHING_RAN)


def judge_all(claims: Sequence[Any], records: Sequence[Record]) -> list[Verdict]:
    """Every claim's verdict from these records."""
    from gpu_accel.workbench.claims import judge
    from gpu_accel.workbench.records import merge

    newest = merge(records)
    return [judge(claim, newest) for claim in claims]


def group(word: str) -> str:
    """`within 7%` and `not measured (needs a B200)` belong to "within" and "not measured"."""
    return next((name for name in GROUPS if word == name or word.startswith((f"{name} ", f"{name}("))), word)


def _group_asked(word: str) -> str:
    wanted = word.lower().replace("-", " ").replace("_", " ").strip()
    if wanted not in GROUPS:
        raise InvalidInputError(f"--verdict {word!r}: choose {', '.join(GROUPS)}")
    return wanted


def is_settled(verdict: Verdict) -> bool:
    """Whether a record decided the claim, one way or another."""
    return group(verdict.word) in ("reproduced", "within", "not reproduced")


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many verdicts of each group there are, none left out."""
    found = Counter(group(v.word) for v in verdicts)
    return {name: found[name] for name in GROUPS}


def sentence(verdicts: Sequence[Verdict], start: str = "") -> str:
    """`fa3: 61 claims: 20 reproduced, 9 within N %, ...`, coloured."""
    names = {"within": "within N %"}
    parts = [f"[{GROUPS[name]}]{count} {names.get(name, name)}[/]" for name, count in counts(verdicts).items() if count]
    return f"{start}{len(verdicts)} claim{'' if len(verdicts) == 1 else 's'}: {', '.join(parts)}"


def as_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    claim = verdict.claim
    return {
        "id": claim.id,
        "where": claim.where,
        "statement": claim.statement,
        "kind": claim.kind,
        "value": claim.value,
        "unit": claim.unit,
        "source": claim.source,
        "verdict": verdict.word,
        "measured": verdict.measured,
        "interval": list(verdict.interval) if verdict.interval else None,
        "detail": verdict.detail,
    }


def value(of: Any, unit: str = "") -> str:
    """A claimed or measured value: a number, a range, or nothing."""
    if of is None:
        return ""
    ends = of if isinstance(of, list | tuple) else [of]
    text = " to ".join(number(end) if isinstance(end, int | float) else str(end) for end in ends)
    return text if unit in ("", "1") else f"{text} {unit}"


def verdict_table(verdicts: Sequence[Verdict], *, fold: bool = True) -> Any:
    """The claims as a table; the cells of a large figure folded into one line when asked."""
    made = table("id", "where", "claim", "paper", "here", "verdict", right=("paper", "here"))
    figures: dict[str, list[Verdict]] = {}
    for v in verdicts:
        figures.setdefault(v.claim.figure or v.claim.id, []).append(v)
    for name, cells in figures.items():
        if fold and len(cells) > FOLD:
            made.add_row(f"[bold]{name}.*[/]", plain(cells[0].claim.where), f"[dim]{len(cells)} cells, --id '{name}*' shows them[/]",
                         "", "", _cell_summary(cells))  # fmt: skip
            continue
        for v in cells:
            claim = v.claim
            style = GROUPS.get(group(v.word), "")
            made.add_row(claim.id, plain(claim.where), plain(claim.statement), plain(value(claim.value, claim.unit)),
                         plain(value(v.measured, claim.unit)), f"[{style}]{plain(v.word)}[/]")  # fmt: skip
    return made


def _cell_summary(cells: Sequence[Verdict]) -> str:
    return ", ".join(f"[{GROUPS[name]}]{count} {name}[/]" for name, count in counts(cells).items() if count)
