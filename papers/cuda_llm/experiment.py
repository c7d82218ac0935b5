"""What can be run about kernel search; `gpu-accel run cuda-llm` and the notebook find the experiments here.

redteam      any machine (Linux): every known hack and its honest twin, in Triton's interpreter
admission    any machine: zeros, constants, means, copies and fp16 against every task's oracle
fuzz         any machine (Linux): a thousand malformed candidates, on the GPU where there is one
search       on a GPU the best kernel next to the naive one, the plain one and torch, all checked and timed again after
             the search in processes of their own; without a GPU candidates are only checked
winners      the kernels that searches left in winners/, or in their folder, judged and timed again from their source
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from gpu_accel.cuda_llm.admission import SHARE, Admission, admission
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.fuzz import Fuzzed, fuzz
from gpu_accel.cuda_llm.gpu_jobs import draw_on
from gpu_accel.cuda_llm.harness import check
from gpu_accel.cuda_llm.measure import Measured
from gpu_accel.cuda_llm.outputs import compare
from gpu_accel.cuda_llm.pool import Pool
from gpu_accel.cuda_llm.progress import read as read_winners
from gpu_accel.cuda_llm.records_table import ERROR, NOTES
from gpu_accel.cuda_llm.redteam import Row, here, redteam
from gpu_accel.cuda_llm.report import read_folder
from gpu_accel.cuda_llm.sandbox import Sandbox
from gpu_accel.cuda_llm.search import Optimized, optimize_kernel
from gpu_accel.cuda_llm.searches import search_all, verifying
from gpu_accel.cuda_llm.tasks import TASKS, Task
from gpu_accel.cuda_llm.verdict import Judgement
from gpu_accel.errors import HardwareError, IncorrectResultError, UnsupportedError
from gpu_accel.hardware.detection import detect
from gpu_accel.workbench.experiment import (
    Case,
    Check,
    Experiment,
    Implementation,
    Sampled,
    Settings,
    SimpleExperiment,
    Workload,
)

R = TypeVar("R")
CANDIDATES_GPU, CANDIDATES_CPU = 60, 2
SEARCH_SHARE = 30.0  # seconds of search for each task, as a multiple of the timing budget
FOLDER = "GPU_ACCEL_SEARCH_FOLDER"  # where a search keeps its artefacts, if set
PEERS = ("library", "compiled", "naive")
QUICK = ("matrix_copy", "softmax", "matmul")
WINNERS = Path(__file__).with_name("winners")
MALFORMED, MALFORMED_QUICK = 1000, 40
KEPT = 4  # launches of a winner whose outputs are compared, or more
HACKS = {one.id: one for one in FIXTURES}


@functools.cache
def _sandbox(gpu: bool) -> Sandbox:
    """One for the life of the process: its worker takes seconds to start."""
    made = Sandbox(gpu=gpu, seconds=60)
    atexit.register(made.close)
    return made


# -- redteam


def _hacks(settings: Settings) -> list[Case]:
    chosen = [name for name in (one.id for one in here()) if not settings.quick or name in ("S1", "S5", "B1", "H1")]
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


# -- fuzz


def _fuzz_cases(settings: Settings) -> list[Case]:
    return [{"candidates": MALFORMED_QUICK if settings.quick else MALFORMED, "task": "matrix_copy"}]


def _build_fuzz(case: Case, settings: Settings) -> Workload:
    @functools.cache
    def found(seed: int) -> Fuzzed:
        with Pool(gpu=settings.on_gpu) as pool:
            return fuzz(int(case["candidates"]), pool=pool, task=str(case["task"]), seed=20261128 + seed)

    def checked(seed: int) -> Check:
        one = found(seed)
        return Check(float(len(one.untyped) + one.sick), 0.0, "without a verdict, or honest and refused")

    def values(seed: int) -> dict[str, tuple[float, str]]:
        one = found(seed)
        # a count, and not the error of a result, as which metrics of such a name are kept and compared
        names = {"compile_error": "not compiled"}
        told = {names.get(name, name): (float(count), "1") for name, count in sorted(one.counts.items())}
        return told | {"honest accepted": (float(one.healthy), "1"), "workers replaced": (float(one.restarts), "1")}

    return Workload(implementations=[Implementation(name="harness", role="ours", check=checked, values=values)])


# -- search


def _search_cases(settings: Settings) -> list[Case]:
    cases: list[Case] = []
    for one in _tasks(settings):
        dims = one.bench if settings.on_gpu else one.shown[0]
        sizes = " ".join(f"{name}={size}" for name, size in dims.items())
        cases.append({"task": one.name, "dtype": one.dtype, "sizes": sizes})
    return cases


class _Searches:
    """All searches of a run at once: kernels of every task compile side by side. The GPU is theirs until they end.

    They run in a thread, so that what one has found can be recorded while others go on, and stays if a run is stopped.
    """

    def __init__(self, names: tuple[str, ...], seed: int, seconds: float) -> None:
        self._names, self._pool = names, Pool(gpu=True)
        self._found: dict[str, Optimized | Exception] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, args=(seed, seconds), daemon=True).start()

    def of(self, name: str) -> Optimized:
        """What one task's search found, once it is over.

        Raises:
            Exception: what ended it.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: name in self._found)
        except BaseException:  # Ctrl-C: nobody waits for the others
            self._pool.stop()
            raise
        one = self._found[name]
        if isinstance(one, Exception):
            raise one
        return one

    def _run(self, seed: int, seconds: float) -> None:
        ended: Exception = HardwareError("its search did not end")
        try:
            with self._pool as pool:
                search_all(
                    [TASKS[name] for name in self._names], pool=pool, target=_target(), seconds=seconds, seed=seed,
                    peers=PEERS, candidates=CANDIDATES_GPU, final_seconds=seconds / SEARCH_SHARE / len(self._names),
                    out=Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None, done=self._keep,
                )  # fmt: skip
        except Exception as error:
            ended = error
        for name in self._names:
            if name not in self._found:
                self._keep(name, ended)

    def _keep(self, name: str, one: Optimized | Exception) -> None:
        with self._changed:
            self._found[name] = one
            self._changed.notify_all()


_searched = functools.cache(_Searches)


def _build_search(case: Case, settings: Settings) -> Workload:
    task = TASKS[str(case["task"])]
    gpu = settings.on_gpu
    names = tuple(one.name for one in _tasks(settings))

    @functools.cache
    def found(seed: int) -> Optimized:
        if not gpu:
            return optimize_kernel(task.start, task=task, seed=seed, sandbox=_sandbox(False), candidates=CANDIDATES_CPU)
        return _searched(names, seed, SEARCH_SHARE * settings.seconds * len(names)).of(task.name)

    def search_check(seed: int) -> Check:
        best = found(seed).best.judgement
        return Check(best.error if best.error is not None else float("inf"), 1.0, ERROR)

    def start_check(seed: int) -> Check:
        return _passed(task, check(task.candidate, task, sandbox=_sandbox(False), seed=seed))

    def naive_check(seed: int) -> Check:
        return _passed(task, found(seed).baselines.get("naive"))

    def library_check(seed: int) -> Check:
        if gpu:
            error = final(seed).library_error
            return Check(float("inf") if error is None else error, 1.0, ERROR)
        dims = dict(task.shown[0])
        inputs = draw_on({one.name: one for one in task.inputs}, dims, seed, "cpu")
        outputs = task.baseline(inputs, dims)
        return Check(compare(task, outputs, task.truth(inputs, dims), inputs).error, 1.0, ERROR)

    def compiled_check(seed: int) -> Check:
        error = final(seed).compiled_error
        if error is None:
            raise UnsupportedError(_why(final(seed), "compiled"))
        return Check(error, 1.0, ERROR)

    def final(seed: int) -> Measured:
        taken = found(seed).final
        assert taken is not None
        return taken

    def times(name: str, seed: int) -> dict[str, Any]:
        return _times(task, name, final(seed))

    def best_values(seed: int) -> dict[str, Any]:
        result = found(seed)
        more: dict[str, Any] = {"candidates": (float(len(result.attempts)), "1")}
        if result.speedup is not None:
            more["start_over_best"] = (result.speedup, "1")
        return _best_values(task, final(seed)) | more

    def implementation(name: str, role: str, judge: Any, note: str, values: Any = None) -> Implementation:
        return Implementation(
            name=name, role=role, check=judge, note=note,
            values=(values or functools.partial(times, name)) if gpu else None,
        )  # fmt: skip

    naive = implementation("naive", "reference", naive_check, NOTES["naive"])
    start = implementation("start", "reference", start_check, "the plain Triton kernel that the search starts from")
    listed = [
        naive if gpu else start,
        implementation("library", "peer", library_check, NOTES["library"]),
        *([implementation("compiled", "peer", compiled_check, NOTES["compiled"])] if gpu else []),
        implementation("grammar", "ours", search_check, "the best of a search without a language model", best_values),
    ]
    dims = dict(task.bench if gpu else task.shown[0])
    return Workload(implementations=listed, flops=None, bytes_moved=task.bytes_moved(dims))


def _times(task: Task, name: str, taken: Measured) -> dict[str, Any]:
    """Milliseconds of one implementation, from the rounds that it shared with the best kernel."""
    samples = taken.slow.get(name) if name == "naive" else taken.samples.get(name)
    if samples is None:
        raise UnsupportedError(f"{name} was not timed: {taken.failed.get(name, 'it is the best kernel itself')}")
    made = {"time": _sampled(task, samples, taken)}
    if warm := taken.warm.get(name):  # beside; no work is given, for what the cache holds says nothing of memory
        timing = {"method": taken.warm_method, "l2": "warm"}
        made["time, warm"] = Sampled(samples=warm, unit="ms", metric="time", timing=timing, env=dict(taken.clocks))
    return made


def _best_values(task: Task, taken: Measured) -> dict[str, Any]:
    """Times of the best kernel, its ratios, and how much of it was verified."""
    more: dict[str, Any] = {}
    for name, ratio in (
        ("naive", taken.ratio("naive")), ("library", taken.over_best_library), ("torch", taken.ratio("library")),
        ("compiled", taken.ratio("compiled")),
    ):  # fmt: skip
        if ratio is not None:
            more[f"{name}_over_best"] = (ratio, "1")
    if taken.over_copy is not None:
        more["copies"] = (taken.over_copy, "1")
    if taken.tensor_cores is not None:
        more["on_tensor_cores"] = (float(bool(taken.tensor_cores)), "1")
    more |= {"repeated": (float(taken.repeated), "1"), "compared": (float(taken.compared), "1")}
    return _times(task, "candidate", taken) | more


# -- winners


@functools.cache
def _kept(gpu: bool) -> dict[str, Candidate]:
    """What searches left behind: in their folder, if it is named, or else in winners/, first on this kind of GPU."""
    folder = Path(os.environ.get(FOLDER) or os.devnull)
    files = sorted(WINNERS.glob("*.json"), key=lambda path: (path.stem != _target(), path.name))
    if folder.is_dir():
        found = {one.task.name: one.best for one in read_folder(folder) if one.run.get("best")}
    else:
        found = {one.task.name: one.best for one in read_winners(files[0]) if one.best} if files else {}
    return {name: one for name, one in found.items() if gpu or one.language == "triton"}


def _winners_cases(settings: Settings) -> list[Case]:
    known = _kept(settings.on_gpu)
    return [case | {"kernel": known[str(case["task"])].digest} for case in _search_cases(settings)
            if case["task"] in known]  # fmt: skip


class _Verified:
    """Verdicts on winners and on naive kernels, which are all judged at once; what has ended can be recorded."""

    def __init__(self, names: tuple[str, ...], seconds: float) -> None:
        self._pool, known = Pool(gpu=True), _kept(True)
        self._pool.__enter__()
        atexit.register(self._pool.__exit__, None, None, None)
        self._kernels: dict[str, Future[Measured]] = {}
        self._naive: dict[str, Future[Judgement]] = {}
        for name in names:
            task = TASKS[name]
            self._kernels[name] = verifying(
                known[name], task, target=_target(), peers=PEERS, seconds=seconds, keep=KEPT, pool=self._pool
            )
            self._naive[name] = self._pool.submit(functools.partial(self._checked, task))

    @staticmethod
    def _checked(task: Task, sandbox: Sandbox) -> Judgement:
        return check(task.naive, task, sandbox=sandbox)

    def kernel(self, name: str) -> Measured:
        """The winner of a task, once that is known."""
        return self._result(self._kernels[name])

    def naive(self, name: str) -> Judgement:
        """Its naive kernel."""
        return self._result(self._naive[name])

    def _result(self, future: Future[R]) -> R:
        try:
            return future.result()
        except BaseException:  # Ctrl-C: nobody waits for the others
            if not future.done():
                self._pool.stop()
            raise


_verified = functools.cache(_Verified)


def _build_winners(case: Case, settings: Settings) -> Workload:
    task, gpu = TASKS[str(case["task"])], settings.on_gpu
    kernel = _kept(gpu)[task.name]
    if not gpu:
        def in_interpreter(seed: int) -> Check:
            return _passed(task, check(kernel, task, sandbox=_sandbox(False), seed=seed))

        return Workload(implementations=[Implementation(name="grammar", role="ours", check=in_interpreter)])
    names = tuple(str(one["task"]) for one in _winners_cases(settings))

    def taken() -> Measured:
        return _verified(names, settings.seconds).kernel(task.name)

    def judged(seed: int) -> Check:
        one = taken().judgement
        if not one.ok:
            raise IncorrectResultError(f"{task.name}: {one}")
        return Check(one.error if one.error is not None else float("inf"), 1.0, ERROR)

    def naive(seed: int) -> Check:
        return _passed(task, _verified(names, settings.seconds).naive(task.name))

    def peer(name: str) -> Any:
        def checked(seed: int) -> Check:
            error = taken().library_error if name == "library" else taken().compiled_error
            if error is None:
                raise UnsupportedError(_why(taken(), name))
            return Check(error, 1.0, ERROR)

        return Implementation(name=name, role="peer", check=checked, note=NOTES[name],
                              values=lambda seed: _times(task, name, taken()))  # fmt: skip

    listed = [
        Implementation(name="naive", role="reference", check=naive, note=NOTES["naive"],
                       values=lambda seed: _times(task, "naive", taken())),
        peer("library"), peer("compiled"),
        Implementation(name="grammar", role="ours", check=judged, note=f"{kernel.language}, {kernel.digest}",
                       values=lambda seed: _best_values(task, taken())),
    ]  # fmt: skip
    return Workload(implementations=listed, flops=None, bytes_moved=task.bytes_moved(dict(task.bench)))


def _why(taken: Measured, name: str) -> str:
    """Why a library has no times; some reasons begin with its name already."""
    word = {"compiled": "torch.compile", "library": "torch"}[name]
    return f"{word}: {taken.failed.get(name, 'not timed').removeprefix(f'{word}: ')}"


def _passed(task: Task, judged: Judgement | None) -> Check:
    if judged is None or judged.error is None:
        raise IncorrectResultError(f"{task.name}: {judged or 'not checked'}")
    return Check(judged.error, 1.0, ERROR)


def _sampled(task: Task, samples: tuple[float, ...], taken: Measured) -> Sampled:
    dims = dict(task.bench)
    return Sampled(
        samples=samples, unit="ms", work={"bytes": float(task.bytes_moved(dims))},
        timing={"method": taken.method, "l2": "flushed"}, env=dict(taken.clocks),
    )  # fmt: skip


def _target() -> str:
    found = detect()
    return found.profile.name if found and found.profile else "h100-sxm"


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
        name="fuzz",
        title="Malformed candidates by the thousand: a verdict each, and the harness lives on",
        list_cases=_fuzz_cases,
        build_case=_build_fuzz,
    ),
    SimpleExperiment(
        name="winners",
        title="The kernels that searches found, judged and timed again from their source",
        list_cases=_winners_cases,
        build_case=_build_winners,
    ),
    SimpleExperiment(
        name="search",
        title="The best kernel of a search over a grammar, next to the plain one and to torch",
        list_cases=_search_cases,
        build_case=_build_search,
    ),
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in _ALL}
