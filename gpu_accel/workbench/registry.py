"""Which papers there are. Adding one means adding a folder; nothing else lists papers.

A paper is a folder with a `paper.toml`. They are looked for in `papers/` of the checkout, or else in the installed
package `gpu_accel_papers`, and in the folders of the environment variable GPU_ACCEL_PAPERS. Reading them
imports nothing: only `Paper.experiment` imports the paper's code, and with it torch.

A paper that asks what another one asks too borrows the experiment: `of = "hopper_microbenchmarks"` in the experiment's
table. The code stays where it is, and records of either paper count for both.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_accel.errors import InvalidInputError
from gpu_accel.workbench.strict_toml import Table, read_toml

if TYPE_CHECKING:
    from gpu_accel.workbench.experiment import Experiment
    from gpu_accel.workbench.ledger import Claim
    from gpu_accel.workbench.records import Record

EXTRA_FOLDERS = "GPU_ACCEL_PAPERS"


@dataclass(frozen=True, kw_only=True)
class ExperimentInfo:
    """What paper.toml says about one experiment, known without importing it."""

    name: str
    title: str
    precisions: tuple[str, ...] = ()  # what --precision may be; empty when the experiment has no such choice
    default: bool = False  # whether `gpu-accel run <paper>` runs it when no `default_for` says otherwise
    summary: str = ""
    processes: bool = False  # whether it is about several processes, one a GPU (`gpu-accel run --nproc N`)
    of: str = ""  # id of the paper whose experiment of that name it is; "" for one of its own


@dataclass(frozen=True, kw_only=True)
class Paper:
    """One paper, as its paper.toml describes it."""

    id: str
    title: str
    path: Path
    arxiv: str = ""
    authors: tuple[str, ...] = ()
    year: int = 0
    venue: str = ""
    summary: str = ""
    code: str = ""  # address of the authors' own code
    aliases: tuple[str, ...] = ()
    package: str = ""
    notebook: str = ""
    ours: tuple[str, ...] = ()  # implementations of this repository: the best of them settles a claim with impl="ours"
    inputs: tuple[str, ...] = ("normal",)
    experiments: dict[str, ExperimentInfo]
    default_for: dict[str, tuple[str, ...]]

    @property
    def alias(self) -> str:
        """The shortest name for command lines."""
        return self.aliases[0] if self.aliases else self.id

    def default_experiments(self, precision: str) -> tuple[str, ...]:
        """The experiments that run when none is named."""
        if precision in self.default_for:
            return self.default_for[precision]
        wanted = [e for e in self.experiments.values() if not e.precisions or precision in e.precisions]
        return tuple(e.name for e in wanted if e.default)

    def claims(self) -> list[Claim]:
        """The paper's claims.toml, figures expanded; empty when there is none."""
        from gpu_accel.workbench.ledger import load_claims

        file = self.path / "claims.toml"
        if not file.is_file():
            return []
        fixed = tuple(one.name for one in self.experiments.values() if not one.precisions)
        return load_claims(
            file,
            paper=self.id,
            alias=self.alias,
            ours=self.ours,
            experiments=tuple(self.experiments),
            one_precision=fixed,
            processes=tuple(one.name for one in self.experiments.values() if one.processes),
        )

    def records(self) -> list[Record]:
        """Every committed result, oldest runs included; see `records.merge` for the newest of each.

        What was measured for the paper that an experiment is borrowed from counts here too. It bears this paper's id,
        so that the newest run of either settles a claim, and its `location` says where it lies.
        """
        from gpu_accel.workbench.records import read_records

        found = [read_records(folder) if (folder := one.path / "results").is_dir() else [] for one in self._lenders()]
        borrowed = {(one.of, one.name) for one in self.experiments.values() if one.of}
        taken = [
            dataclasses.replace(record, paper=self.id)
            for record in itertools.chain(*found)
            if (record.paper, record.experiment) in borrowed
        ]
        own = self.path / "results"
        return [*taken, *(read_records(own) if own.is_dir() else [])]

    def _lenders(self) -> list[Paper]:
        return [paper(name) for name in dict.fromkeys(one.of for one in self.experiments.values() if one.of)]

    def experiment(self, name: str) -> Experiment:
        """Import the paper's `experiment.py` and return one of its experiments.

        The folder becomes a package under a name of its own, so `from . import shapes` in it works wherever it lies.
        """
        if name not in self.experiments:
            precisions = {precision for one in self.experiments.values() for precision in one.precisions}
            raise InvalidInputError(
                f"paper {self.id} has no experiment {name!r}; it has {', '.join(self.experiments) or 'none'}"
                + (f". {name} is a precision: name it alone, or with --precision" if name in precisions else "")
                + ("" if name in precisions else _suggestion(name, self.experiments))
            )
        if self.experiments[name].of:
            lender = paper(self.experiments[name].of)
            if name in lender.experiments and lender.experiments[name].of:
                raise InvalidInputError(f"{self.id} borrows {name!r} of {lender.id}, which only borrows it too")
            return lender.experiment(name)
        file = self.path / "experiment.py"
        if not file.is_file():
            raise InvalidInputError(f"paper {self.id} names experiments, but there is no {file}")
        experiments = importlib.import_module(f"{self._package()}.experiment").EXPERIMENTS
        if name not in experiments:
            raise InvalidInputError(f"{file}: EXPERIMENTS lacks {name!r}, which paper.toml names")
        experiment: Experiment = experiments[name]
        return experiment

    def _package(self) -> str:
        name = f"_gpu_accel_paper_{self.id}_{zlib.crc32(str(self.path).encode()):08x}"
        if name not in sys.modules:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(self.path)]
            sys.modules[name] = importlib.util.module_from_spec(spec)
        return name


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A folder with a paper.toml that cannot be used, and why."""

    path: Path
    why: str


def survey() -> tuple[list[Paper], list[Broken]]:
    """Every paper in the order of their notebooks, and what could not be read: one mistake must not hide the others.

    Two papers may not share a name. The paper of the checkout or of the installed package keeps it; among those of
    GPU_ACCEL_PAPERS it is the first.
    """
    found: list[Paper] = []
    broken: list[Broken] = []
    owners: dict[str, Paper] = {}
    own, extra = _folders()
    for file in [file for folder in (*own, *extra) for file in sorted(folder.glob("*/paper.toml"))]:
        try:
            one = _read(file)
        except (ValueError, OSError, RecursionError) as error:
            why = (
                str(error) if isinstance(error, InvalidInputError) else f"{file}: {str(error) or type(error).__name__}"
            )
            broken.append(Broken(path=file.parent, why=why))
            continue
        names = {_normal(name) for name in (one.id, *one.aliases)}
        if taken := sorted(names & owners.keys()):
            why = f"{one.path} and {owners[taken[0]].path} are both named {taken[0]!r}"
            broken.append(Broken(path=one.path, why=why))
            continue
        owners |= dict.fromkeys(names, one)
        found.append(one)
    return sorted(found, key=lambda one: (one.notebook or "~", one.id)), broken


def papers() -> list[Paper]:
    """Every paper that can be read, in the order of their notebooks; warns of each that cannot."""
    found, broken = survey()
    for one in broken:
        warnings.warn(f"left out: {one.why}", stacklevel=2)
    return found


def paper(name: str) -> Paper:
    """The paper with this id or alias (case, "-" and "_" do not matter); raises InvalidInputError with suggestions.

    Papers that cannot be read matter only to who asks for one of them, or for a name that no paper has.
    """
    everything, broken = survey()
    names = {known: one for one in everything for known in (one.id, *one.aliases)}
    for known, one in names.items():
        if _normal(known) == _normal(name):
            return one
    for lost in broken:
        if _normal(lost.path.name) == _normal(name):
            raise InvalidInputError(lost.why)
    listed = ", ".join(one.id for one in everything) or "none found"
    message = f"no paper is named {name!r}; there are: {listed}" + _suggestion(name, names)
    if broken:
        message += ". Not readable: " + "; ".join(lost.why for lost in broken)
    raise InvalidInputError(message)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _suggestion(name: str, known: dict[str, Paper] | dict[str, ExperimentInfo]) -> str:
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(close)}?" if close else ""


def _folders() -> tuple[list[Path], list[Path]]:
    """(folders of the checkout or the installed package, folders of the environment variable)."""
    extra = [Path(part) for part in os.environ.get(EXTRA_FOLDERS, "").split(os.pathsep) if part]
    for folder in extra:
        if not folder.is_dir():
            raise InvalidInputError(f"{EXTRA_FOLDERS} names {folder}, which is no folder")
    own = []
    root = Path(__file__).resolve().parents[2]
    if (root / "papers").is_dir() and (root / "pyproject.toml").is_file():
        own.append(root / "papers")
    elif (spec := importlib.util.find_spec("gpu_accel_papers")) and spec.submodule_search_locations:
        own += [Path(place) for place in spec.submodule_search_locations]
    own = list(dict.fromkeys(folder.resolve() for folder in own))
    return own, [folder for folder in dict.fromkeys(folder.resolve() for folder in extra) if folder not in own]


def _read(file: Path) -> Paper:
    table = read_toml(file)
    year = table.take("year", 0)
    if not isinstance(year, int) or isinstance(year, bool):
        table.fail(f"'year' must be an integer, not {year!r}")
    experiments = _experiments(table.table("experiments", {}))
    if itself := [name for name, one in experiments.items() if one.of == file.parent.name]:
        table.fail(f"experiment {itself[0]!r} is borrowed from the paper itself; leave out 'of'")
    one = Paper(
        id=table.text("id"),
        title=table.text("title"),
        path=file.parent,
        arxiv=table.text("arxiv", ""),
        authors=table.texts("authors"),
        year=year,
        venue=table.text("venue", ""),
        summary=table.text("summary", ""),
        code=table.text("code", ""),
        aliases=table.texts("aliases"),
        package=table.text("package", ""),
        notebook=table.text("notebook", ""),
        ours=table.texts("ours"),
        inputs=table.texts("inputs", ("normal",)),
        experiments=experiments,
        default_for=_defaults(table.table("default_for", {}), experiments),
    )
    table.end()
    if not one.id.isidentifier():
        table.fail(f"id {one.id!r} must be a Python identifier, because its folder is imported as a package")
    if one.notebook in (".", "..") or any(mark in one.notebook for mark in "/\\:\0"):
        table.fail(f"'notebook' must be a plain file name, not {one.notebook!r}")
    if one.id != file.parent.name:
        table.fail(f"id is {one.id!r}, but the folder is named {file.parent.name!r}")
    return one


def _experiments(table: Table) -> dict[str, ExperimentInfo]:
    experiments = {}
    for name, entry in table.items():
        experiments[name] = ExperimentInfo(
            name=name,
            title=entry.text("title"),
            precisions=entry.texts("precisions"),
            default=entry.flag("default"),
            summary=entry.text("summary", ""),
            processes=entry.flag("processes"),
            of=entry.text("of", ""),
        )
        entry.end()
    return experiments


def _defaults(table: Table, experiments: dict[str, ExperimentInfo]) -> dict[str, tuple[str, ...]]:
    defaults = {}
    for precision in table.names():
        names = table.texts(precision)
        for name in names:
            if name not in experiments:
                table.fail(f"{precision}: no experiment is named {name!r}; there are: {', '.join(experiments)}")
            allowed = experiments[name].precisions
            if allowed and precision not in allowed:
                table.fail(f"{precision}: experiment {name!r} runs in {', '.join(allowed)} only")
        defaults[precision] = names
    return defaults
