"""What the Blackwell papers measure on Blackwell cards, as cases that say why they do not run.

    tcgen05             tcgen05.mma by tile and dtype, and reads of tensor memory; sm_100 (B200, GB200)
    mma-block-scaled    mma.sync in fp4, fp6 and fp8, with and without block scales; sm_120 (RTX 50)

No such card was at hand. A kernel that nobody has run would measure nothing that could be believed, so none is here;
the cases are those of the papers' tables, for whoever has a card. What the papers say of Hopper is measured by
experiments of papers/hopper_microbenchmarks, which paper.toml borrows.
"""

from __future__ import annotations

from functools import partial

from gpu_accel.workbench.experiment import Case, Experiment, Implementation, Settings, SimpleExperiment, Workload

CARDS = {"tcgen05": ((10, 0), "sm_100 (B200, GB200)"), "mma-block-scaled": ((12, 0), "sm_120 (RTX 50)")}
_DTYPES = {"tcgen05": ("fp16", "e4m3", "e2m3", "e2m1", "int8"), "mma-block-scaled": ("e4m3", "e2m3", "e2m1")}


def list_cases(settings: Settings, *, experiment: str) -> list[Case]:
    """The rows of the papers' tables: tiles of 64 to 256 columns, or block scales on and off, in every dtype."""
    key, choices = ("n", (64, 128, 256)) if experiment == "tcgen05" else ("block_scale", (False, True))
    return [{"dtype": dtype, key: choice} for dtype in _DTYPES[experiment] for choice in choices]


def build(case: Case, settings: Settings, *, experiment: str) -> Workload:
    """One implementation that is not available, and why."""
    why = refuse(experiment, _capability() if settings.on_gpu else None)
    return Workload(implementations=[Implementation(name="kernel", role="ours", unavailable=why)])


def refuse(experiment: str, capability: tuple[int, int] | None) -> str:
    """Why a case does not run on a card of this capability; None is a CPU."""
    wanted, words = CARDS[experiment]
    if capability is None:
        return f"needs {words}"
    if capability[0] != wanted[0]:
        return f"needs {words}; this card is sm_{capability[0]}{capability[1]}"
    return f"this card is {words}, but no kernel is written yet, for none could be tried"


def _capability() -> tuple[int, int]:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return (0, 0) if torch.version.hip else (major, minor)


_TITLES = {
    "tcgen05": "tcgen05.mma and tensor memory of sm_100",
    "mma-block-scaled": "mma.sync in fp4, fp6 and fp8 of sm_120",
}
EXPERIMENTS: dict[str, Experiment] = {
    name: SimpleExperiment(
        name=name,
        title=title,
        list_cases=partial(list_cases, experiment=name),
        build_case=partial(build, experiment=name),
    )
    for name, title in _TITLES.items()
}
