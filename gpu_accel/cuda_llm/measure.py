"""Times of candidates on a GPU, and the comparison of what the timed launches computed.

    measured = measure(candidate, task, sandbox=sandbox, gpu="h100-sxm", peers=("library", "naive"))
    measured.judgement, measured.over_copy, measured.ratio("library")

A candidate is timed in its own process (`gpu_jobs.py`), interleaved with a copy of as many bytes, so that times taken
by two processes can be compared as multiples of it, and on request with torch, the same through torch.compile, the
naive baseline and the plain kernel. Seeds, and with them the launches whose outputs are compared, are drawn here, after
the source is fixed; the comparison with the float64 oracle happens here too, on this process' own memory of the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gpu_accel.errors import HardwareError
from gpu_accel.workbench.statistics import median

from .candidate import Candidate
from .compiled import TENSOR_TYPES
from .gpu_jobs import draw_on, library_seed, plain_float32
from .harness import Program, bind, described, draw, ended, job, judge_time, read_memory, write
from .image import Layout
from .other_clocks import NAMES as CLOCKS
from .other_clocks import judge_clocks
from .outputs import Trial, compare, judge
from .repeats import judge_repeats
from .sandbox import Sandbox
from .tasks import TASKS, Task
from .verdict import Judgement, Kind, Rejected, Verdict

PEERS = ("library", "compiled", "naive", "start")
LIBRARIES = ("library", "compiled")  # torch as it is, and the same function through torch.compile
PRECISION = "torch without TF32; all bounds in units of float32 rounding"
SMALL, MORE = 1 << 20, 8  # bytes of outputs below which so many times as many launches are compared
ALONE_SECONDS, COMPILE_SECONDS = 12.0, 15.0
FINAL_LIMIT = 300.0  # wall clock of a process with peers: torch.compile, and waiting for others that are timed


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A verdict on the timed launches, and samples in ms by implementation.

    Args:
        samples: "candidate", "copy" and peers, interleaved in common rounds.
        slow: "candidate" and "naive", in common rounds of their own: naive kernels may take many times as long.
        warm: as `samples`, each call right after itself, so that the cache holds what it can of its inputs; beside the
            others, which decide.
        failed: why a peer has no times.
        library_error, compiled_error: largest error of torch, and of its compiled function, as a share of the task's
            tolerance, on inputs of one timed launch.
        tensor_cores: types that the machine code multiplies on tensor cores, next to libraries that compute in plain
            float32; None if it was not looked at. It decides nothing: results do.
        repeated: how many of the timed launches were repeated.
        other_clocks: ms a launch of many in a row, by events, the host's clock and the one that the GPU counts itself.
    """

    judgement: Judgement
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    slow: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    warm: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    method: str = ""
    warm_method: str = ""
    clocks: Mapping[str, Any] = field(default_factory=dict)
    launches: int = 0
    compared: int = 0
    library_error: float | None = None
    compiled_error: float | None = None
    tensor_cores: tuple[str, ...] | None = None
    repeated: int = 0
    other_clocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def ms(self) -> float | None:
        """Median time of the candidate."""
        return median(self.samples["candidate"]) if self.samples.get("candidate") else None

    @property
    def over_copy(self) -> float | None:
        """Its time as a multiple of a copy of as many bytes."""
        taken = self.samples.get("candidate"), self.samples.get("copy")
        return median(taken[0]) / median(taken[1]) if taken[0] and taken[1] else None

    def ratio(self, peer: str) -> float | None:
        """How many times as long the peer takes; None if it has no times."""
        found = self.slow if peer in self.slow else self.samples
        if not found.get(peer) or not found.get("candidate"):
            return None
        return median(found[peer]) / median(found["candidate"])

    @property
    def over_best_library(self) -> float | None:
        """The same over the faster of torch and torch.compile, of those that are right."""
        return over_best_library(self.samples, self._errors)

    @property
    def warm_ms(self) -> float | None:
        """Median time of the candidate with a warm cache."""
        return median(self.warm["candidate"]) if self.warm.get("candidate") else None

    @property
    def warm_over_best_library(self) -> float | None:
        """`over_best_library` with a warm cache."""
        return over_best_library(self.warm, self._errors)

    @property
    def _errors(self) -> dict[str, float | None]:
        return {"library": self.library_error, "compiled": self.compiled_error}

    def as_dict(self) -> dict[str, Any]:
        return {
            "judgement": self.judgement.as_dict(), "samples": {k: list(v) for k, v in self.samples.items()},
            "slow": {k: list(v) for k, v in self.slow.items()}, "warm": {k: list(v) for k, v in self.warm.items()},
            "failed": dict(self.failed), "method": self.method, "warm_method": self.warm_method,
            "clocks": dict(self.clocks), "launches": self.launches, "compared": self.compared,
            "library_error": self.library_error, "compiled_error": self.compiled_error, "precision": PRECISION,
            "tensor_cores": None if self.tensor_cores is None else list(self.tensor_cores),
            "repeated": self.repeated, "other_clocks": dict(self.other_clocks),
        }  # fmt: skip


def over_best_library(
    samples: Mapping[str, Sequence[float]], errors: Mapping[str, float | None]
) -> float | None:  # fmt: skip
    """Time of the faster library over the candidate's, both medians; a library that is not right is none."""
    right = [median(samples[name]) for name in LIBRARIES if samples.get(name) and (errors.get(name) or 0.0) <= 1.0
             and errors.get(name) is not None]  # fmt: skip
    return min(right) / median(samples["candidate"]) if right and samples.get("candidate") else None


def measure(
    candidate: Candidate,
    task: Task,
    *,
    sandbox: Sandbox,
    gpu: str,
    peers: Sequence[str] = (),
    screen: bool = False,
    seconds: float = 0.25,
    rounds: int = 200,
    keep: int = 2,
    warm: bool = False,
    again: bool = False,
    lock: Path | None = None,
    limit: float | None = None,
) -> Measured:
    """Time a candidate on the shape that its task is timed at, and compare outputs of timed launches.

    Args:
        gpu: profile whose roofline no time may beat.
        peers: of PEERS, timed between the candidate's launches.
        screen: launch it on a small shape first, where a wrong or endless kernel is cheap.
        seconds, rounds: timing budget of each implementation.
        keep: how many launches, drawn from all alike, have their outputs compared; more, where outputs are small.
        warm: time everything but the naive baseline with a warm cache too, beside.
        again: repeat every launch that was timed with a cold cache in a freshly loaded module, in another order, and
            compare bits of outputs and inputs; launch on inputs of all other families at the timed shape; and let other
            clocks than events say how long launches take.
        lock: file that all users of this GPU lock while they time; outputs are compared under it as well.
        limit: wall clock of the process; that of the sandbox if not given, or FINAL_LIMIT with peers.
    Raises:
        HardwareError: the sandbox has no GPU.
    """
    if not sandbox.gpu:
        raise HardwareError("times need a GPU; without one only correctness is judged")
    try:
        program = Program.of(candidate)
        bind(program, candidate.launch, task)
        trials = [one for one in draw(task, candidate, None) if one.dims == task.shown[0]][:2] if screen else []
        what = _order(program, candidate, task, peers, seconds=seconds, rounds=rounds, keep=keep)
        families = _families(task) if again else []
        what |= {"warm": warm, "repeat": 1 + secrets.randbelow(2**31) if again else 0, "families": families}
        with sandbox.folder() as folder:
            write(program, folder)
            for number, trial in enumerate(trials):
                (folder / f"in{number}.bin").write_bytes(trial.before.numpy().tobytes())
            request = job(program, candidate.launch, trials) | {"bench": what, "lock": str(lock) if lock else None}
            limit = limit or (max(FINAL_LIMIT, sandbox.seconds) if peers else None)
            result = ended(sandbox.run("run", folder, seconds=limit, **request))
            measured = _read(result, gpu, task)
            _require_untouched(result)
            if again and measured.judgement.ok:
                measured = _again(measured, result, families, bits=program.repeats(task))
            library = "library" in what["peers"]
            drawn = ["normal"] * (what["keep"] + warm) + families  # with a warm cache the outputs of the last launch
            compared, error = _compare(task, candidate, folder, trials, result, drawn, lock, library)
            compiled = None
            if "compiled" in measured.samples:
                compiled = _compare_compiled(task, folder, library_seed(what["seed"]), lock)
        if not measured.judgement.ok:
            return measured
        return replace(measured, compared=compared, library_error=error, compiled_error=compiled)
    except Rejected as rejected:
        return Measured(judgement=replace(rejected.judgement, sandbox=sandbox.described))


def _order(
    program: Program, candidate: Candidate, task: Task, peers: Sequence[str], *, seconds: float, rounds: int, keep: int
) -> dict[str, Any]:
    """What the process is told of the timed part."""
    drawn = random.Random(secrets.randbits(64))
    few = keep > 1 and _output_bytes(task) <= SMALL
    own = TASKS.get(task.name) is task  # the worker finds a library only by the name of a task
    others = {
        name: _other(one, task)
        for name, one in (("naive", task.naive), ("start", task.candidate))
        if name in peers and one.digest != candidate.digest
    }
    return {
        "task": task.name, "dims": dict(task.bench), "bytes": task.bytes_moved(task.bench),
        "inputs": [dataclasses.asdict(one) for one in task.inputs],
        "trial": described(program, candidate.launch, task.bench, _layout(task, candidate)),
        "seed": drawn.randrange(10**12), "keep": keep * (MORE if few else 1), "choice": drawn.randrange(10**12),
        "peers": [name for name in LIBRARIES if name in peers and own], "others": others,
        "seconds": seconds, "rounds": rounds, "alone_seconds": ALONE_SECONDS, "compile_seconds": COMPILE_SECONDS,
    }  # fmt: skip


def _families(task: Task) -> list[str]:
    """Its families of inputs but the one that times are taken with; none where inputs have but one."""
    real = any(one.kind == "real" for one in task.inputs)
    return [one for one in task.families if one != "normal" and real]


def _require_untouched(result: Mapping[str, Any]) -> None:
    """Device code can write to all memory of its process: what is no buffer of its own must be as it was."""
    around, given = result.get("around"), result.get("given")
    if type(around) is not int or type(given) is not bool:
        raise Rejected(Verdict.CRASHED, None, "its process did not look at the memory around its buffers")
    if around:
        detail = f"changed {around} bytes beyond its buffers where it is timed"
        raise Rejected(Verdict.WRONG, Kind.OUT_OF_BOUNDS, detail)
    if not given:
        raise Rejected(Verdict.CHEATING, Kind.TAMPERING, "changed what its baselines are given")


def _other(candidate: Candidate, task: Task) -> dict[str, Any]:
    program = Program.of(candidate)
    trial = described(program, candidate.launch, task.bench, _layout(task, candidate))
    return {"source": program.source, "entry": program.entry, "trial": trial}


def _layout(task: Task, candidate: Candidate) -> Layout:
    _, constants = candidate.launch.resolve(task.bench)
    return Layout.of(task, candidate.launch, task.bench, constants)


def _compare(
    task: Task, candidate: Candidate, folder: Path, trials: Sequence[Trial], result: dict[str, Any],
    families: Sequence[str], lock: Path | None, library: bool,
) -> tuple[int, float | None]:  # fmt: skip
    """Judge the small trials, then the outputs that were kept; returns how many, and the library's error on the first.

    Args:
        families: of the inputs of each launch whose outputs were kept.

    Raises:
        Rejected: wrong or cheating.
    """
    for number, trial in enumerate(trials):
        trial.after = read_memory(folder / f"out{number}.bin", trial.layout.total)
    if trials:
        judge(task, candidate.launch, trials, bits=False)
    seeds = result.get("kept")
    if not isinstance(seeds, list) or len(seeds) != len(families) or not all(type(seed) is int for seed in seeds):
        raise Rejected(Verdict.CRASHED, None, "its process kept no outputs of timed launches")
    inputs_of = {one.name: one for one in task.inputs}
    error = None
    for number, (seed, family) in enumerate(zip(seeds, families, strict=True)):
        memory = read_memory(folder / f"kept{number}.bin", _output_bytes(task))
        with alone(lock):
            inputs = draw_on(inputs_of, task.bench, seed, "cuda", family)
            truth = task.truth(inputs, task.bench)
            found = compare(task, _outputs(task, memory), truth, inputs)
            if library and number == 0:
                plain_float32()
                error = compare(task, task.baseline(inputs, task.bench), truth, inputs).error
            del inputs, truth
        if found.kind is not None:
            sizes_ = " ".join(f"{key}={size}" for key, size in task.bench.items())
            where = "in a timed launch" if family == "normal" else f"on {family} inputs of the timed shape"
            raise Rejected(Verdict.WRONG, found.kind, f"{where}: {found.detail}", (sizes_,))
    return len(seeds), error


def _compare_compiled(task: Task, folder: Path, seed: int, lock: Path | None) -> float:
    """The error of the compiled library, in units of the bound."""
    memory = read_memory(folder / "compiled.bin", _output_bytes(task))
    with alone(lock):
        inputs = draw_on({one.name: one for one in task.inputs}, task.bench, seed, "cuda")
        return compare(task, _outputs(task, memory), task.truth(inputs, task.bench), inputs).error


def _output_bytes(task: Task) -> int:
    return sum(one.elements(task.bench) * getattr(torch, one.dtype).itemsize for one in task.outputs)


def _outputs(task: Task, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of the timed shape, on the GPU, from their bytes one after the other."""
    found, at = {}, 0
    for one in task.outputs:
        size = one.elements(task.bench) * getattr(torch, one.dtype).itemsize
        found[one.name] = memory[at : at + size].cuda().view(getattr(torch, one.dtype)).view(one.sizes(task.bench))
        at += size
    return found


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the lock of the GPU in this process."""
    if lock is None:
        yield
        return
    descriptor = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        torch.cuda.synchronize()
    finally:
        os.close(descriptor)


def _read(result: Mapping[str, Any], gpu: str, task: Task) -> Measured:
    """Samples from a result, which is untrusted, and whether they can be true."""
    samples: dict[str, tuple[float, ...]] = {}
    slow: dict[str, tuple[float, ...]] = {}
    warm: dict[str, tuple[float, ...]] = {}
    failed: dict[str, str] = {}
    method = warm_method = ""
    clocks: dict[str, Any] = {}
    for part, into in (("times", samples), ("slow", slow), ("warm", warm)):
        found = result.get(part, {})
        for name, one in found.items() if isinstance(found, dict) else ():
            times = one.get("ms") if isinstance(one, dict) else None
            if isinstance(times, list) and times and all(isinstance(ms, float) and ms > 0 for ms in times):
                into[name] = tuple(times)
            else:
                why = one.get("failed") if isinstance(one, dict) else one
                failed[name if part != "warm" else f"{name}, warm"] = str(why)[:200]
            if name == "candidate" and part == "times" and isinstance(one, dict):
                method, clocks = str(one.get("method")), one.get("clocks") or {}
            if name == "candidate" and part == "warm" and isinstance(one, dict):
                warm_method = str(one.get("method"))
    if "candidate" not in samples or "copy" not in samples:
        raise Rejected(Verdict.CRASHED, None, f"no times: {failed.get('candidate') or failed.get('copy')}")
    launches, types = result.get("launches"), result.get("tensor_cores")
    known = tuple(types) if isinstance(types, list) and all(one in TENSOR_TYPES for one in types) else None
    judgement = judge_time(task, task.bench, median(samples["candidate"]), gpu)
    if known is not None:
        words = f"machine code {'with tensor cores in ' + ', '.join(known) if known else 'without tensor cores'}"
        judgement = replace(judgement, verified_by=(*judgement.verified_by, words))
    return Measured(
        judgement=judgement, samples=samples, slow=slow,
        warm=warm, failed=failed, method=method, warm_method=warm_method, clocks=clocks,
        launches=launches if type(launches) is int else 0, tensor_cores=known,
    )  # fmt: skip


def _again(measured: Measured, result: Mapping[str, Any], families: Sequence[str], *, bits: bool) -> Measured:
    """The same, with what repeats and other clocks say."""
    words = [judge_repeats(result.get("repeats"), bits=bits), judge_clocks(result.get("clocks"))]
    words += [f"{', '.join(families)} inputs at the timed shape"] if families else []
    judgement = measured.judgement
    clocks = {name: float(result["clocks"][name]) for name in ("events", *CLOCKS) if name in result["clocks"]}
    return replace(
        measured, judgement=replace(judgement, verified_by=(*judgement.verified_by, *words)),
        repeated=result["repeats"]["launches"], other_clocks=clocks,
    )  # fmt: skip


__all__ = ["LIBRARIES", "PEERS", "Measured", "alone", "measure", "over_best_library"]
