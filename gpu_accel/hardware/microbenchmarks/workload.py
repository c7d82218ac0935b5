"""Probes as experiments of the workbench: compiled side by side, checked, measured once, their machine code kept."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

from gpu_accel.errors import IncorrectResultError, InvalidInputError
from gpu_accel.workbench.experiment import Case, Check, Implementation, Sampled, Settings, SimpleExperiment, Workload

from . import compile as compiling
from . import launch as launching
from .probe import Outcome, Probe

SASS_FOLDER = "sass"  # beside the file of records


def experiment(name: str, title: str, list_probes: Callable[[bool], list[Probe]]) -> SimpleExperiment:
    """An experiment whose cases are those of the probes; probes of one case compete in it.

    Args:
        list_probes: all probes, or with True a few for a first look.
    """
    list_probes = functools.cache(list_probes)
    return SimpleExperiment(
        name=name,
        title=title,
        list_cases=functools.partial(_cases, list_probes),
        build_case=functools.partial(_build, name, list_probes),
    )


def _cases(list_probes: Callable[[bool], list[Probe]], settings: Settings) -> list[Case]:
    if settings.shapes:
        raise InvalidInputError("the microbenchmarks have their own sizes; --shape does not apply")
    seen: dict[str, Case] = {}
    for probe in list_probes(settings.quick):
        seen.setdefault(_key(probe.case), probe.case)
    return [dict(case) for case in seen.values()]


def _build(name: str, list_probes: Callable[[bool], list[Probe]], case: Case, settings: Settings) -> Workload:
    probes = list_probes(settings.quick)
    mine = [probe for probe in probes if _key(probe.case) == _key(case)]
    why = _unavailable(settings.device)

    def sources() -> list[str]:
        return [source for probe in probes for source in probe.sources()]

    return Workload(implementations=[_implementation(name, probe, sources, why, settings) for probe in mine])


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


@functools.cache
def _unavailable(device: str) -> str:
    return launching.unavailable(device)


def _implementation(
    experiment_name: str, probe: Probe, sources: Callable[[], list[str]], why: str, settings: Settings
) -> Implementation:
    kept: dict[int, Outcome] = {}

    def check(seed: int) -> Check:
        compiling.build_all(sources())  # all of the experiment side by side; ready at once when it was done before
        kept[seed] = outcome = probe.measure(seed)
        return outcome.check

    def values(seed: int) -> dict[str, Sampled]:
        """Of the very launches that were checked."""
        outcome = kept.pop(seed, None) or probe.measure(seed)
        if not outcome.check.ok:
            raise IncorrectResultError(f"{outcome.check.metric}: {outcome.check.error:g}")
        machine_code = _keep_sass(experiment_name, probe, settings)
        return {
            name: dataclasses.replace(one, timing=one.timing | machine_code) for name, one in outcome.metrics.items()
        }

    return Implementation(
        name=probe.name, role=probe.role, unavailable=why, check=check, values=values, note=probe.note
    )


def _keep_sass(experiment_name: str, probe: Probe, settings: Settings) -> dict[str, str]:
    """What a record says of the machine code; the disassembly goes beside the records, under the hash in its name."""
    if not probe.kernels:
        return {}
    found = {}
    for kernel in probe.kernels:
        binary = compiling.build(kernel.source)
        found[kernel.holds] = binary
        if settings.output:
            folder = Path(settings.output).parent / SASS_FOLDER
            file = folder / f"{experiment_name}-{binary.digest}.sass"
            if not file.exists():
                folder.mkdir(parents=True, exist_ok=True)
                file.write_text(binary.sass, encoding="utf-8")
    holds = ", ".join(dict.fromkeys(kernel.holds for kernel in probe.kernels))
    digests = ", ".join(dict.fromkeys(binary.digest for binary in found.values()))
    return {"holds": holds, "sass": digests, "compiler": next(iter(found.values())).compiler}
