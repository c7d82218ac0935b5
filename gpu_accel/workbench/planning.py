"""What a run consists of: the cases of the experiments chosen, and which implementations are to run in each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import GpuAccelError, InvalidInputError
from gpu_accel.workbench.experiment import Case, Experiment, Settings, Workload, select
from gpu_accel.workbench.host import Host

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

SUSTAINED_SECONDS = 1.5  # below this a card has not settled at its power limit


@dataclass(kw_only=True)
class Item:
    """One case of one experiment, ready to run; `refused` says why it cannot be built here."""

    experiment: Experiment
    case: Case
    workload: Workload | None
    selected: list[str]
    refused: str = ""

    @property
    def where(self) -> dict[str, Any]:
        """What every event about it says."""
        return {"experiment": self.experiment.name, "case": self.case}


@dataclass(kw_only=True)
class Plan:
    """What a run would do. `items` are JSON-able: experiment, case, work, and each implementation with its reason."""

    paper: str
    device: str
    gpu: str
    settings: dict[str, Any]
    items: list[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Time spent on measuring, at most; compiling and checking come on top. 0 on a CPU, where nothing is timed."""
        if self.device == "cpu":
            return 0.0
        each = self.settings["seconds"]
        if self.settings["mode"] == "sustained":
            each = max(each, SUSTAINED_SECONDS)
        return each * sum(entry["runs"] for item in self.items for entry in item["implementations"])

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": self.seconds}


def plan(
    paper: str | Paper,
    experiments: Sequence[str] | None = None,
    settings: Settings | None = None,
    *,
    host: Host | None = None,
) -> Plan:
    """What `run` with the same arguments would do, without allocating or compiling anything."""
    the_paper = find_paper(paper)
    host, settings = settle(settings, host)
    items = []
    for item in list_items(the_paper, experiments, settings):
        workload = item.workload
        entry = {
            "experiment": item.experiment.name,
            "case": item.case,
            "work": workload.work if workload else {},
            "refused": item.refused,
            "implementations": [
                {"name": impl.name, "role": impl.role, "runs": not impl.unavailable, "why": impl.unavailable}
                for impl in (workload.implementations if workload else ())
                if impl.name in item.selected
            ],
        }
        items.append(entry)
    return Plan(
        paper=the_paper.id, device=host.device, gpu=host.gpu, settings=dataclasses.asdict(settings), items=items
    )


def find_paper(paper: str | Paper) -> Paper:
    if not isinstance(paper, str):
        return paper
    from gpu_accel.workbench import registry

    return registry.paper(paper)


def settle(settings: Settings | None, host: Host | None) -> tuple[Host, Settings]:
    settings = settings or Settings()
    host = host or Host.here(settings.device)
    return host, dataclasses.replace(settings, device=host.device)


def list_items(paper: Paper, names: Sequence[str] | None, settings: Settings) -> list[Item]:
    """Every case of the experiments named, built; `only` and `skip` are checked against all of them together."""
    if isinstance(names, str):
        raise InvalidInputError(f"experiments is the string {names!r}; give a list of names")
    chosen = list(names) if names else list(paper.default_experiments(settings.precision))
    for name in chosen:
        allowed = paper.experiments[name].precisions if name in paper.experiments else ()
        if allowed and settings.precision not in allowed:
            raise InvalidInputError(
                f"experiment {name!r} has no precision {settings.precision!r}; it has {', '.join(allowed)}"
            )
    if settings.input not in paper.inputs:
        raise InvalidInputError(f"paper {paper.id} has no input {settings.input!r}; it has {', '.join(paper.inputs)}")
    items: list[Item] = []
    known: dict[str, None] = {}
    for experiment in [paper.experiment(name) for name in dict.fromkeys(chosen)]:
        for case in experiment.cases(settings):
            try:
                workload = experiment.build(case, settings)
            except InvalidInputError:
                raise
            except GpuAccelError as error:
                items.append(Item(experiment=experiment, case=case, workload=None, selected=[], refused=str(error)))
                continue
            known |= dict.fromkeys(workload.names)
            items.append(Item(experiment=experiment, case=case, workload=workload, selected=list(workload.names)))
    if known:
        kept = select(known, only=settings.only, skip=settings.skip)
        for item in items:
            item.selected = [name for name in item.selected if name in kept]
    return items
