"""What a run consists of: the cases of the experiments chosen, and which implementations are to run in each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError
from gpu_accel.workbench.experiment import (
    Case,
    Experiment,
    Settings,
    Workload,
    did_you_mean,
    for_experiment,
    select,
    shape_for,
)
from gpu_accel.workbench.host import Host

if TYPE_CHECKING:
    from gpu_accel.workbench.registry import Paper

SUSTAINED_SECONDS = 1.5  # below this a card has not settled at its power limit
# What Triton's interpreter does on one core. Attention of 1x128x2x64 to 1x512x2x128 went at 8e6 to 3e7 flop/s forward
# and backward, faster where tiles are larger; which kernels run matters less than the size of the problem.
INTERPRETED_FLOPS_PER_SECOND = 2e7
INTERPRETED_FLOPS_PER_BYTE = 10.0  # kernels that move bytes: quantising 3 to 50 MB went at 0.7e6 to 4.6e6 a second


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
        return each * self.runs

    @property
    def runs(self) -> int:
        """How many results there are to make: implementations that can run here, in all cases together."""
        return sum(entry["runs"] for item in self.items for entry in item["implementations"])

    @property
    def interpreted_seconds(self) -> float:
        """Roughly how long Triton's interpreter takes over our kernels; 0 on a GPU, which compiles them."""
        if self.device != "cpu":
            return 0.0
        ours = [sum(e["runs"] and e["role"] == "ours" for e in item["implementations"]) for item in self.items]
        flops = [item["work"].get("flops") or _flops_of(item["case"], item["work"].get("bytes")) for item in self.items]
        return sum(map(float.__mul__, flops, map(float, ours))) / INTERPRETED_FLOPS_PER_SECOND

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "seconds": self.seconds,
            "interpreted_seconds": round(self.interpreted_seconds, 1),
        }


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


def _flops_of(case: Case, moved: float | None) -> float:
    """The two products of attention, for an experiment that is not about rates and so names no work; else 0.

    One that counts bytes alone does little with each, however many pairs of rows there would be.
    """
    axes = [case.get(axis, 0) for axis in ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim")]
    if moved is not None and not any(axes):  # nothing of attention
        return INTERPRETED_FLOPS_PER_BYTE * moved
    product = 4.0
    for size in axes:
        product *= size if isinstance(size, int) else 0
    return product if moved is None else min(product, INTERPRETED_FLOPS_PER_BYTE * moved)


def find_paper(paper: str | Paper) -> Paper:
    if not isinstance(paper, str):
        return paper
    from gpu_accel.workbench import registry

    return registry.paper(paper)


class MissingModuleError(UnsupportedError):
    """A paper needs a module that Python does not find; nothing of the paper can run."""


@contextlib.contextmanager
def _importable(paper: Paper) -> Iterator[None]:
    """A module that is missing as a whole becomes one line saying what to do; a wrong name within one stays a bug.

    Raises:
        MissingModuleError: names the module, and `package` of paper.toml where that is it.
        RuntimeError: the paper's code asked Python to exit, which would pass for a run that went well.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if not top or top in ("torch", "triton", "numpy") or importlib.util.find_spec(top) is not None:
            raise
        if top == paper.package.partition(".")[0]:
            raise MissingModuleError(
                f"paper {paper.id} needs its package {paper.package!r} (`package` in {paper.path / 'paper.toml'}), "
                "which Python does not find: install it, or put the folder that holds it on PYTHONPATH"
            ) from error
        raise MissingModuleError(f"paper {paper.id} needs the module {top!r}, which is not installed") from error
    except SystemExit as error:
        raise RuntimeError(f"paper {paper.id} raised SystemExit({error.code!r}) while its cases were built") from error


def settle(settings: Settings | None, host: Host | None) -> tuple[Host, Settings]:
    settings = settings or Settings()
    host = host or Host.here(settings.device)
    return host, dataclasses.replace(settings, device=host.device)


def shapes_for(paper: Paper, names: Sequence[str] | None, precision: str, texts: Sequence[str]) -> tuple[Case, ...]:
    """What --shape says, in the names of the experiments that are to run; imports them only where there is a shape.

    Raises:
        InvalidInputError: a text that is no shape of these experiments, or an experiment that the paper has not.
    """
    if not texts:
        return ()
    with _importable(paper):
        experiments = [paper.experiment(name) for name in names or paper.default_experiments(precision)]
    return tuple(shape_for(text, experiments) for text in texts)


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
                + did_you_mean(settings.precision, allowed)
            )
    if settings.input not in paper.inputs:
        raise InvalidInputError(
            f"paper {paper.id} has no input {settings.input!r}; it has {', '.join(paper.inputs)}"
            + did_you_mean(settings.input, paper.inputs)
        )
    items: list[Item] = []
    known: dict[str, None] = {}
    with _importable(paper):
        experiments = [paper.experiment(name) for name in dict.fromkeys(chosen)]
    for experiment in experiments:
        with _importable(paper):
            cases = list(experiment.cases(for_experiment(settings, experiment)))
        for case in cases:
            try:
                with _importable(paper):
                    workload = experiment.build(case, settings)
            except MissingModuleError:
                raise
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
