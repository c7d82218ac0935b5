"""Where records come from and where they go: the committed ones, files of one's own, or a git revision."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpu_accel.errors import InvalidInputError

if TYPE_CHECKING:
    from gpu_accel.workbench.records import Record
    from gpu_accel.workbench.registry import Paper

ResultsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--results",
        metavar="PATH",
        help="Judge these records (a .jsonl file, or a folder of them) instead of the committed ones. Repeatable.",
    ),
]


def gather(paper: Paper, paths: list[Path] | None) -> list[Record]:
    """The records of one paper: those in `paths`, or the committed ones when none is given."""
    from gpu_accel.workbench.records import read_records

    if not paths:
        return paper.records()
    return [record for path in paths for record in read_records(path) if record.paper == paper.id]


def load(source: str, paper: str = "") -> list[Record]:
    """Records from a file, from a folder, or from the results committed at a git revision.

    Args:
        source: a path, or what git understands as a commit (`main`, `HEAD~3`, a hash).
        paper: keep this paper's records only; empty for all.

    Raises:
        InvalidInputError: neither a path nor a revision.
    """
    from gpu_accel.workbench.records import Record, read_records

    if Path(source).exists():
        records = read_records(source)
    else:
        root = Path(__file__).resolve().parents[1]
        commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{source}^{{commit}}").strip()
        if not commit:
            raise InvalidInputError(f"{source!r} is neither a file, nor a folder, nor a git revision of {root}")
        names = _git(root, "ls-tree", "-r", "--name-only", commit, "--", "papers").splitlines()
        records = [
            Record.from_json(line, location=f"{source}:{name}:{number}")
            for name in names
            if name.endswith(".jsonl") and "/results/" in name
            for number, line in enumerate(_git(root, "show", f"{commit}:{name}").splitlines(), 1)
            if line.strip()
        ]
    return [record for record in records if not paper or record.paper == paper]


def _git(root: Path, *arguments: str) -> str:
    """What git prints, or "" when it fails or is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, encoding="utf-8",
                              errors="replace", check=False)  # fmt: skip
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def record_file(paper: Paper, *, sku: str, commit: str, folder: Path, save: bool, tag: str = "") -> Path:
    """Where the records of a run go: `<folder>/<paper>/<gpu>/<day>-<commit>[-tag].jsonl`, or the paper's own results.

    Args:
        sku: the GPU's variant, "H100 SXM", or "cpu".
        save: write into `papers/<id>/results` of this checkout, to be committed.

    Raises:
        InvalidInputError: `save` outside a checkout.
    """
    from gpu_accel.workbench.records import result_file

    file = result_file(paper.path, sku=sku, commit=commit, tag=tag)
    if not save:
        return folder / paper.id / file.parent.name / file.name
    if not (paper.path.parent.parent / "pyproject.toml").is_file():
        raise InvalidInputError(
            f"--save writes into a checkout, but {paper.id} lies in {paper.path}; use --results DIR"
        )
    return file


def unfinished(file: Path) -> Path | None:
    """What `--resume` goes on with: the newest file beside `file` of the same commit and tag, whatever its day."""
    same = file.name[len("2000-01-01") :]
    files = [other for other in file.parent.glob("*.jsonl") if other.name[len("2000-01-01") :] == same]
    return max(files, key=lambda other: other.stat().st_mtime, default=None)
