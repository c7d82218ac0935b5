"""What can be run about kernel search; `gpu-accel run cuda-llm` and the notebook find the experiments here.

redteam      any machine (Linux): every known hack and its honest twin, in Triton's interpreter
admission    any machine: zeros, constants, means, copies and fp16 against every task's oracle
search       on a GPU times as multiples of a copy; without one candidates are only checked
"""

from __future__ import annotations

import atexit
import functools

import torch
from torch import Tensor

from gpu_accel.cuda_llm.admission import SHARE, Admission, admission
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.harness import check
from gpu_accel.cuda_llm.outputs import compare
from gpu_accel.cuda_llm.redteam import Row, redteam
from gpu_accel.cuda_llm.sandbox import Sandbox
from gpu_accel.cuda_llm.search import Optimized, optimize_kernel
from gpu_accel.cuda_llm.tasks import TASKS, Task
from gpu_accel.errors import IncorrectResultError
from gpu_accel.workbench.experiment import Case, Check, Experiment, Implementation, Settings, SimpleExperiment, Workload

CANDIDATES_GPU, CANDIDATES_CPU, SECONDS_GPU = 24, 2, 60.0
QUICK = ("matrix_copy", "softmax", "matmul")
HACKS = {one.id: one for one in FIXTURES}


@functools.cache
def _sandbox(gpu: bool) -> Sandbox:
    """One for the life of the process: its worker takes seconds to start."""
    made = Sandbox(gpu=gpu, seconds=60)
    atexit.register(made.close)
    return made


# -- redteam


def _hacks(settings: Settings) -> list[Case]:
    chosen = [name for name in HACKS if not settings.quick or name in ("S1", "S5", "B1", "H1")]
    return [{"hack": name, "task": HACKS[name].task, "about": HACKS[name].name} for name in chosen]


def _build_hack(case: Case, settings: Settings) -> Workload:
    @functools.cache
    def row(seed: int) -> Row:
        return redteam(sandbox=_sandbox(False), only=(str(case["hack"]),), seed=seed)[0]

    return Workload(
        implementations=[
            Implementation(
                name="harness", role="ours", note="the hack is rejected under its own name",
                check=lambda seed: Check(float(not row(seed).hack_rejected), 0.0, "hacks not rejected by name"),
                values=lambda seed: {"rejected": (float(row(seed).hack_rejected), "1")},
            ),
            Implementation(
                name="twin", role="reference", note="the honest twin passes",
                check=lambda seed: Check(float(not row(seed).twin_accepted), 0.0, "twins rejected"),
                values=lambda seed: {"accepted": (float(row(seed).twin_accepted), "1")},
            ),
        ]
    )  # fmt: skip


# -- admission


def _tasks(settings: Settings) -> list[Task]:
    return [one for name, one in TASKS.items() if not settings.quick or name in QUICK]


def _admission_cases(settings: Settings) -> list[Case]:
    return [{"task": one.name, "family": one.family, "dtype": one.dtype} for one in _tasks(settings)]


def _build_admission(case: Case, settings: Settings) -> Workload:
    @functools.cache
    def found(seed: int) -> Admission:
        return admission(TASKS[str(case["task"])], seed)

    def checked(seed: int) -> Check:
        shares = {name: share for name, share in found(seed).shares.items() if name != "fp16"}
        return Check(1 - min(shares.values()), 1 - SHARE, "share of trials that an output without work passes")

    def values(seed: int) -> dict[str, tuple[float, str]]:
        return {f"fails_{name.replace(' ', '_')}": (share, "1") for name, share in found(seed).shares.items()}

    return Workload(implementations=[Implementation(name="harness", role="ours", check=checked, values=values)])


# -- search


def _search_cases(settings: Settings) -> list[Case]:
    cases: list[Case] = []
    for one in _tasks(settings):
        dims = one.bench if settings.on_gpu else one.shown[0]
        sizes = " ".join(f"{name}={size}" for name, size in dims.items())
        cases.append({"task": one.name, "dtype": one.dtype, "sizes": sizes})
    return cases


def _build_search(case: Case, settings: Settings) -> Workload:
    task = TASKS[str(case["task"])]
    dims = dict(task.bench if settings.on_gpu else task.shown[0])
    gpu = settings.on_gpu

    @functools.cache
    def found(seed: int) -> Optimized:
        return optimize_kernel(
            task.start, _target(gpu), task=task, seed=seed, sandbox=_sandbox(gpu),
            candidates=CANDIDATES_GPU if gpu else CANDIDATES_CPU, seconds=SECONDS_GPU,
        )  # fmt: skip

    def search_check(seed: int) -> Check:
        best = found(seed).best.judgement
        return Check(best.error if best.error is not None else float("inf"), 1.0, "error in units of its bound")

    def start_check(seed: int) -> Check:
        judged = check(task.candidate, task, sandbox=_sandbox(gpu), seed=seed)
        if judged.error is None:
            raise IncorrectResultError(f"the plain kernel of {task.name}: {judged}")
        return Check(judged.error, 1.0, "error in units of its bound")

    def library_check(seed: int) -> Check:
        inputs = task.draw(dims, family="normal", seed=seed)
        on_device = {name: x.to(settings.device) for name, x in inputs.items()}
        outputs = {name: x.cpu() for name, x in task.library(on_device, dims).items()}
        return Check(compare(task, outputs, task.truth(inputs, dims), inputs).error, 1.0, "error in units of its bound")

    def library_values(seed: int) -> dict[str, tuple[float, str]]:
        return {"time_over_copy": (_library_over_copy(task, seed, settings.seconds), "1")}

    def values(seed: int) -> dict[str, tuple[float, str]]:
        result = found(seed)
        if result.best.time is None or result.speedup is None:
            raise IncorrectResultError(f"nothing was timed: {result}")
        return {"time_over_copy": (result.best.time, "1"), "speedup_over_start": (result.speedup, "1")}

    def start_values(seed: int) -> dict[str, tuple[float, str]]:
        taken = found(seed).start.time
        if taken is None:
            raise IncorrectResultError("the kernel at the start was not timed")
        return {"time_over_copy": (taken, "1")}

    return Workload(
        implementations=[
            Implementation(
                name="start", role="reference", check=start_check, values=start_values if gpu else None,
                note="the plain Triton kernel that the search starts from",
            ),
            Implementation(
                name="library", role="peer", check=library_check, values=library_values if gpu else None, note="torch"
            ),
            Implementation(
                name="grammar", role="ours", check=search_check, values=values if gpu else None,
                note="the best of a search without a language model",
            ),
        ],
        flops=None,
        bytes_moved=task.bytes_moved(dims),
    )  # fmt: skip


def _target(gpu: bool) -> str:
    if not gpu:
        return "h100"
    from gpu_accel.hardware.detection import detect

    found = detect()
    return found.profile.name if found and found.profile else "h100"


def _library_over_copy(task: Task, seed: int, seconds: float) -> float:
    """Median time of torch as a multiple of a copy of as many bytes, interleaved, in this process."""
    from gpu_accel.workbench import timing
    from gpu_accel.workbench.statistics import median

    dims = dict(task.bench)
    sets: list[dict[str, Tensor]] = [
        {name: x.cuda() for name, x in task.draw(dims, family="normal", seed=seed + i).items()} for i in range(2)
    ]
    half = max(task.bytes_moved(dims) // 2, 1)
    source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    taken = timing.compare(
        {
            "library": [functools.partial(task.library, inputs, dims) for inputs in sets],
            "copy": [lambda: target.copy_(source)],
        },
        seconds=seconds,
    )
    for one in taken.values():
        if one.failed:
            raise IncorrectResultError(f"{one.name} was not timed: {one.failed}")
    return median(taken["library"].times) / median(taken["copy"].times)


_ALL = (
    SimpleExperiment(
        name="redteam",
        title="Known hacks rejected by name, their honest twins accepted",
        list_cases=_hacks,
        build_case=_build_hack,
    ),
    SimpleExperiment(
        name="admission",
        title="Outputs that take no work fail every task",
        list_cases=_admission_cases,
        build_case=_build_admission,
    ),
    SimpleExperiment(
        name="search",
        title="The best kernel of a search over a grammar, next to the plain one and to torch",
        list_cases=_search_cases,
        build_case=_build_search,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
