"""`gpu-accel claims`: every claim of a paper with its verdict, or with the reason that it has none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_accel.errors import InvalidInputError

from . import codes, output
from .console import Fittest, note, out, plain, table
from .options import JsonOption, OutputOption, PaperArgument
from .render import number
from .results import ResultsOption, gather

if TYPE_CHECKING:
    from gpu_accel.workbench.claims import Verdict
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.registry import Paper

# How each of claims.WORDS is coloured, by what is typed for --verdict.
STYLES = {
    "reproduced": "green",
    "within": "yellow",
    "not reproduced": "red",
    "not measured": "dim",
    "unsupported": "magenta",
}
FOLD = 5  # figures with more cells than this are one line, unless asked for
FEW = 3  # up to so many claims are shown with everything that is known of them


def _complete_verdict(incomplete: str) -> list[str]:
    return [word for word in STYLES if word.startswith(incomplete)]


def claims(
    paper: PaperArgument,
    verdict: Annotated[
        list[str] | None,
        typer.Option(help=f"Only these verdicts: {', '.join(STYLES)}. Repeatable.", autocompletion=_complete_verdict),
    ] = None,
    id_: Annotated[
        list[str] | None, typer.Option("--id", metavar="PATTERN", help="Only these ids, such as 'fig5*'. Repeatable.")
    ] = None,
    where: Annotated[str, typer.Option("--where", help="Only claims from this place, such as 'Table 3'.")] = "",
    settled: Annotated[bool, typer.Option("--settled", help="Only claims that evidence decides.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every cell of every figure, on a line of its own.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Only the counts.")] = False,
    gate: Annotated[bool, typer.Option("--gate", help="Exit 1 if one of these claims is not reproduced.")] = False,
    results: ResultsOption = None,
    json_: JsonOption = False,
    output_: OutputOption = None,
) -> None:
    """The claims of a paper and their verdicts.

    Judged from the committed results, or from --results. A large figure is one line; --all or --id shows its cells.
    """
    from gpu_accel.workbench import registry
    from gpu_accel.workbench.claims import summary

    output.check_suffix(output_)
    words = [_word_asked(word) for word in verdict or []]
    one = registry.paper(paper)
    verdicts = judge_all(one, gather(one, results))
    chosen = [
        v
        for v in verdicts
        if (not words or word_of(v) in words)
        and (not id_ or any(fnmatchcase(v.claim.id, pattern) for pattern in id_))
        and where.lower() in v.claim.where.lower()
        and (not settled or v.settled)
    ]
    payload: dict[str, Any] = {"paper": one.id, "counts": summary(chosen), "claims": [v.as_dict() for v in chosen]}
    if output_:
        rows = payload["claims"]
        if output_.suffix not in (".json", ".jsonl"):  # hundreds of names would drown a table
            rows = [row | {"records": len(row["records"])} for row in rows]
        output.write(output_, rows, payload=payload, title=f"Claims of {one.title}")
    if json_:
        output.print_json(payload)
    elif not chosen:
        note(f"none of {len(verdicts)} claims fits", style="yellow")
    else:
        source = "these results" if results else "committed results"
        if len(chosen) < len(verdicts):
            source += f", only the {len(chosen)} of {len(verdicts)} that fit"
        _show(one, chosen, fold=not (every or id_), brief=brief, source=source)
    if verdicts and not chosen:
        raise typer.Exit(codes.NOTHING_RAN)
    leave(chosen, gate=gate)


def judge_all(paper: Paper, records: Sequence[Record]) -> list[Verdict]:
    """The verdict on every claim of a paper, from the newest of these records that can settle it."""
    from gpu_accel.workbench.claims import judge_all

    return judge_all(paper.claims(), records)


def settled_by(paper: Paper, records: Sequence[Record]) -> list[Verdict]:
    """The verdicts that rest on these records, and not on the paper's own figures."""
    return [v for v in judge_all(paper, records) if v.settled and not v.claim.internal]


def word_of(verdict: Verdict) -> str:
    """The verdict as it is typed for --verdict: one of STYLES."""
    return next(word for word in STYLES if verdict.category.startswith(word))


def _word_asked(word: str) -> str:
    wanted = word.lower().replace("-", " ").replace("_", " ").strip()
    if wanted not in STYLES:
        raise InvalidInputError(f"--verdict {word!r}: choose {', '.join(STYLES)}")
    return wanted


def _show(paper: Paper, chosen: Sequence[Verdict], *, fold: bool, brief: bool, source: str) -> None:
    screen = out()
    if not brief:
        screen.print(verdict_table(chosen, fold=fold))
        for v in chosen if len(chosen) <= FEW else ():
            detail = ". ".join(filter(None, [v.detail.rstrip("."), f"Source: {v.claim.source}"]))
            screen.print(f"{v.claim.id}: {detail}", markup=False, soft_wrap=True)
            for record in v.records[:FEW]:
                screen.print(f"  {record.name}", markup=False, style="dim", soft_wrap=True)
    screen.print(sentence(chosen, f"{paper.alias}, {source}: "), soft_wrap=True)
    if not brief and (commands := _commands(chosen)):
        screen.print("To measure more:")
        for command in commands:
            screen.print(command, markup=False, soft_wrap=True)
    if brief:
        note(f"each with its reason: gpu-accel claims {paper.alias}")


def _short(word: str) -> str:
    """A verdict whose reason is cut at the first semicolon; --id and --json give all of it."""
    reason, cut, _ = word.partition(";")
    return f"{reason})" if cut else word


def _commands(verdicts: Sequence[Verdict]) -> list[str]:
    """The runs that would measure what is not measured, and how many claims each is named by."""
    named = Counter(command for v in verdicts for command in re.findall(r"`(gpu-accel run [^`]+)`", v.word))
    return [f"  {command}  # {count} claim{'' if count == 1 else 's'}" for command, count in named.most_common()]


def leave(chosen: Sequence[Verdict], *, gate: bool) -> None:
    """The exit code of a gate: 1 when a claim is not reproduced, 5 when evidence decides none of them."""
    if not gate:
        return
    chosen = [v for v in chosen if not v.internal]  # arithmetic on a paper's own figures is no result of ours
    if failed := [v.claim.id for v in chosen if word_of(v) == "not reproduced"]:
        first = ", ".join(failed[:8]) + (" ..." if len(failed) > 8 else "")
        note(f"gate: {len(failed)} not reproduced: {first}", style="bold red")
        raise typer.Exit(codes.GATE)
    if not any(v.settled for v in chosen):
        note("gate: no claim was settled", style="yellow")
        raise typer.Exit(codes.NOTHING_RAN)


def _counted(verdicts: Sequence[Verdict]) -> str:
    from gpu_accel.workbench.claims import summary

    counts = zip(STYLES.values(), summary(verdicts).items(), strict=True)
    return ", ".join(f"[{style}]{count} {word}[/]" for style, (word, count) in counts if count)


def sentence(verdicts: Sequence[Verdict], start: str = "") -> str:
    """`fa3: 61 claims: 20 reproduced, 9 within 25%, ...`, coloured."""
    from gpu_accel.workbench.claims import against_itself

    total, (hold, fail) = sum(not v.internal for v in verdicts), against_itself(verdicts)
    parts = [f"{total} claim{'' if total == 1 else 's'}: {_counted(verdicts)}"] if total else []
    parts += [f"the paper against itself: {hold} hold, {fail} do not"] if hold + fail else []
    return start + "; ".join(parts)


def value(of: Any, unit: str = "") -> str:
    """A claimed or measured value: a number, a range, or nothing."""
    if of is None:
        return ""
    ends = of if isinstance(of, list | tuple) else [of]
    text = " to ".join(number(end) for end in ends)
    return text if unit in ("", "1") else f"{text} {unit}"


def verdict_table(verdicts: Sequence[Verdict], *, fold: bool = True) -> Any:
    """The claims as a table; the cells of a large figure folded into one line when asked. On a narrow terminal a claim
    stands below its id."""
    numbers = ("paper", "here")
    wide = table("id", "where", "claim", *numbers, "verdict", right=numbers, spare=("where",))
    narrow = table("claim", *numbers, "verdict", right=numbers)

    def add(name: str, where: str, claim: str, *rest: str) -> None:
        wide.add_row(name, where, claim, *rest)
        narrow.add_row(f"{name}\n{claim}", *rest)

    figures: dict[str, list[Verdict]] = {}
    for v in verdicts:
        figures.setdefault(v.claim.figure or v.claim.id, []).append(v)
    for name, cells in figures.items():
        if fold and len(cells) > FOLD:
            hint = f"[dim]{len(cells)} cells, --id '{name}.*' shows them[/]"
            add(f"[bold]{name}.*[/]", plain(cells[0].claim.where), hint, "", "", _counted(cells))
            continue
        for v in cells:
            claim = v.claim
            claimed, here = value(claim.value, claim.unit), value(v.measured, claim.unit)
            if v.expected is not None:
                claimed += f" (here {value(v.expected)})"
            word = f"[{STYLES[word_of(v)]}]{plain(_short(v.shown))}[/]"
            add(claim.id, plain(claim.where), plain(claim.statement), claimed, here, word)
    return Fittest(wide, narrow)
