"""What a sandboxed process does on a GPU: compile, launch on small memory that the controller filled, and time.

Timing (`bench`) is the only part that needs the GPU for itself; it holds a file lock that all processes of a search
share, so kernels compile side by side and are timed one after the other. While it holds the lock an alarm ends the
process, whatever the driver waits for.

Before every timed launch, and outside of the time, inputs get new contents from a seed that the controller drew,
outputs are poisoned and the second-level cache is flushed, and the launch after it gets other addresses: a kernel that
remembers, or that finds its work done, has nothing to find. Of some launches, drawn from all alike, the outputs are
kept for the controller to compare. Of all the others the bits are, where a winner is timed: every launch is repeated to
see them again (`repeats.py`), inputs of other families come at the timed shape, and two more clocks are asked
(`other_clocks.py`). Baselines are timed between the candidate's launches on other inputs, so that no memory here ever
holds what the candidate should compute. Device code can write to all of it: what lies around buffers, and what
baselines are given, must be as it was.

Times with a warm cache are taken beside, on request, and decide nothing: each timed launch gets new inputs too, and
poisoned outputs, which are read once for it, so that the cache holds what it can of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_accel.workbench.statistics import median

from . import cuda_source, other_clocks
from .compiled import TENSOR_TYPES, Binary, compile_cuda, compile_triton, ptx_of, tensor_types, triton_key
from .repeats import Bits, Log, repeat

HIDDEN = 4  # null pointers that Triton's kernels may want beyond their own parameters; 2 since 3.4
CAPABILITY = 90
GUARD_BYTE = 0xFF  # what lies around buffers of the timed shape
PLACES = 2  # sets of buffers that the candidate is launched on in turn
APART = 10**5  # between their seeds
COMPILE_MIB = 16 * 1024  # more than before, while a kernel is compiled
LARGEST_WEIGHTS = 2**28  # bytes of a buffer beyond which weights of its words are used again
WARM_SHARE, WARM_ROUNDS = 0.5, 40  # of the budget of cold times, and rounds at most


class Compiler:
    """Compiles what each launch needs, once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._made: dict[Any, Binary] = {}

    def __call__(self, trial: Mapping[str, Any]) -> Binary:
        with addresses(COMPILE_MIB):
            first, then = self._one(self.name, trial), [self._one(one["entry"], one) for one in trial.get("then", ())]
        return replace(first, then=tuple(then)) if then else first

    def _one(self, name: str, trial: Mapping[str, Any]) -> Binary:
        if trial["language"] == "triton":
            key: Any = name, triton_key(trial)
            if key not in self._made:
                self._made[key] = compile_triton(self.folder / "kernel.py", name, trial, CAPABILITY)
        else:
            key = name, json.dumps([trial["constants"], trial["block"], trial["shared"]])
            if key not in self._made:
                source = (self.folder / "kernel.cu").read_text(encoding="utf-8")
                cuda_source.check_ptx(ptx_of(source, trial))
                self._made[key] = compile_cuda(source, name, trial)
        return self._made[key]


def compile_only(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Machine code of every launch, without a GPU."""
    compiler = Compiler(folder, job["name"])
    made = [compiler(trial) for trial in job["trials"]]
    return {"compiler": made[0].compiler, "binaries": len({part.cubin for one in made for part in one.passes})}


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Launch once on each image, in order, and write each back whole."""
    compiler = Compiler(folder, job["name"])
    # Before there is a context: nothing to be broken yet. Where times are taken, a compiler bomb is not waited for.
    with limited(job["bench"]["compile_seconds"] if "bench" in job else None):
        binaries = [compiler(trial) for trial in job["trials"]]
        bench_binary = compiler(job["bench"]["trial"]) if "bench" in job else None
    _small(job, folder, binaries)
    result: dict[str, Any] = {"ran": len(binaries)}
    if bench_binary is not None:
        result |= bench(job, folder, bench_binary)
    return result


def _small(job: dict[str, Any], folder: Path, binaries: list[Binary]) -> None:
    import torch

    from .device import Module, launch_on

    for number, (trial, binary) in enumerate(zip(job["trials"], binaries, strict=True)):
        data = bytearray((folder / f"in{number}.bin").read_bytes())
        image = torch.frombuffer(data, dtype=torch.uint8).cuda()
        launch_on(Module(binary), trial, image, hidden=HIDDEN)()
        torch.cuda.synchronize()
        (folder / f"out{number}.bin").write_bytes(image.cpu().numpy().tobytes())


def sanitize(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Launch the kernel under compute-sanitizer; returns what its tools said, or why one was not asked."""
    compiler = Compiler(folder, job["name"])
    launches = []
    for number, trial in enumerate(job["trials"]):
        binary = compiler(trial)
        buffers = {
            slot["name"]: [f"in{number}.bin", slot["offset"], slot["size"],
                           slot["role"] == "input" or slot["fill"] is not None]
            for slot in trial["buffers"]
        }  # fmt: skip
        passes = []
        for at, (one, how) in enumerate(zip(binary.passes, (trial, *trial.get("then", ())), strict=True)):
            if 0 in how["grid"]:
                continue
            cubin = f"kernel{number}-{at}.cubin"
            (folder / cubin).write_bytes(one.cubin)
            named = [name for name in how["arguments"]
                     if name not in how["constants"] or how["language"] == "cuda"]  # fmt: skip
            passes.append({
                "cubin": cubin, "entry": one.entry, "grid": how["grid"], "threads": list(one.threads),
                "shared": one.shared, "scratch": one.scratch,
                "parameters": [name if name in buffers else int(how["scalars"][name]) for name in named],
            })  # fmt: skip
        launches.append({"buffers": buffers, "passes": passes})
    (folder / "launches.json").write_text(json.dumps(launches))
    found: dict[str, Any] = {"launches": len(launches), "memcheck": _tool(job["tool"], "memcheck", folder)}
    if any(slot["role"] == "workspace" and slot["fill"] is None for slot in job["trials"][0]["buffers"]):
        found["initcheck"] = _tool(job["tool"], "initcheck", folder, "unwritten")
    if any(one.barriers for one in binary.passes):
        found["racecheck_not"] = "not asked, it does not follow the mbarriers of this kernel"
    elif any(one.shared for one in binary.passes) or job["shared"]:
        found["racecheck"] = _tool(job["tool"], "racecheck", folder)
    else:
        found["racecheck_not"] = "not asked, the kernel has no shared memory"
    return found


def _tool(path: str, name: str, folder: Path, *more: str) -> str:
    program = [sys.executable, "-I", "sanitized.py", "launches.json", *more]
    command = [path, "--tool", name, "--print-limit", "5", *program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=40)
    return (done.stdout + done.stderr)[-20_000:]


# -- timing


class Memory:
    """Device memory of the shape that is timed: fresh inputs and poisoned outputs whenever they are asked for."""

    def __init__(self, bench: Mapping[str, Any], trial: Mapping[str, Any], seed: int) -> None:
        import torch

        from .image import Slot
        from .tasks.task import Buffer

        self.dims = bench["dims"]
        self.inputs = {one["name"]: Buffer(**one) for one in bench["inputs"]}
        self.slots = [Slot(**{key: slot[key] for key in Slot.__dataclass_fields__}) for slot in trial["buffers"]]
        self.fill = {slot["name"]: slot["fill"] for slot in trial["buffers"] if slot["fill"] is not None}
        self.image = torch.full((trial["total"],), GUARD_BYTE, dtype=torch.uint8, device="cuda")
        self.base, self.count, self.seed = seed, 0, seed
        self.views = {slot.name: slot.view(self.image) for slot in self.slots}
        self.refresh()

    def refresh(self) -> None:
        """New contents for inputs, poison for outputs and scratch."""
        self.renew(self.base + self.count)
        self.count += 1

    def renew(self, seed: int, family: str = "normal") -> None:
        """The contents that inputs have by that seed, poison for outputs and scratch."""
        from gpu_accel.testing.poison import poison_

        self.seed = seed
        for slot in self.slots:
            if slot.role == "output" or (slot.role == "workspace" and slot.name not in self.fill):
                poison_(self.views[slot.name])
        for name, drawn in draw_on(self.inputs, self.dims, self.seed, "cuda", family).items():
            self.views[name].copy_(drawn)

    def prepared(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch with the fills that belong to its time."""
        fills = [(self.views[name], value) for name, value in self.fill.items()]
        if not fills:
            return launch

        def call() -> None:
            for view, value in fills:
                view.fill_(value)
            launch()

        return call

    def touch(self) -> None:
        """Read outputs, then inputs, so that the cache holds what it can of them."""
        import torch

        for role in ("output", "input"):
            for view in self.named(role):
                view.view(-1).view(torch.uint8).sum()

    def around(self) -> int:
        """How many bytes outside of all buffers are not as they were."""
        changed, at = 0, 0
        for slot in [*self.slots, None]:
            end = slot.offset if slot else self.image.numel()
            changed += int((self.image[at:end] != GUARD_BYTE).sum())
            at = slot.offset + slot.size if slot else end
        return changed

    def named(self, role: str) -> list[Any]:
        """Its buffers of one role."""
        return [self.views[slot.name] for slot in self.slots if slot.role == role]

    def outputs(self) -> list[Any]:
        return [one.clone() for one in self.named("output")]


def draw_on(
    inputs: Mapping[str, Any], dims: Mapping[str, int], seed: int, device: str, family: str = "normal"
) -> dict[str, Any]:  # fmt: skip
    """Inputs of one launch on the timed shape; equal wherever the same kind of device draws them."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    return {name: one.draw(dims, family, generator) for name, one in inputs.items()}


class Launches:
    """How often the candidate was launched, and on which memory since that was last made ready.

    Args:
        memories: its sets of buffers.
        log: of the bits that launches leave behind, if they are to be repeated.
    """

    def __init__(self, memories: Sequence[Memory], log: Log | None = None) -> None:
        self.memories, self.log, self.count, self.last = memories, log, 0, memories[0]
        self.pending: list[Memory] = []  # to be made ready
        self.used: list[Memory] = []  # what has been launched on since it was

    def on(self, memory: Memory) -> None:
        """It was."""
        self.count, self.last = self.count + 1, memory
        for listed in (self.pending, self.used):
            if memory not in listed:
                listed.append(memory)

    def kept(self) -> tuple[int, list[Any]]:
        """Seed of the inputs and outputs of the last launch."""
        return self.last.seed, self.last.outputs()

    def refresh(self) -> None:
        """Make all memory ready that a launch has used; the log, if there is one, sees before what was left there."""
        for memory in self.used if self.log else ():
            self.log.note(memory)  # type: ignore[union-attr]
        for memory in self.pending:
            memory.refresh()
        self.pending, self.used = [], []


class Kept:
    """Outputs of a few of the launches that are offered, each as likely as any other.

    A kernel that is wrong in a part of its timed launches, by count, by state or by what its inputs happen to be, is
    seen with the same chance whichever these are.

    Args:
        count: how many.
        seed: of the choice, which nothing on the device knows.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.offered, self._chance = count, 0, random.Random(seed)
        self.rows: list[tuple[int, list[Any]]] = []

    def offer(self, launches: Launches) -> None:
        """The last launch, before its memory is made ready again."""
        self.offered += 1
        if len(self.rows) < self.count:
            self.rows.append(launches.kept())
        elif (at := self._chance.randrange(self.offered)) < self.count:
            self.rows[at] = launches.kept()


class Counted:
    """The candidate's call on one memory."""

    def __init__(self, run: Callable[[], object], memory: Memory, launches: Launches) -> None:
        self.run, self.memory, self.launches = run, memory, launches

    def __call__(self) -> None:
        self.run()
        self.launched()

    def launched(self) -> None:
        self.launches.on(self.memory)


def _timer(launches: Launches, kept: Kept, *, warm: bool = False) -> Any:
    """A timer whose flush also renews the candidate's memory, and offers outputs to be kept before it does.

    With `warm` nothing is flushed; memory is renewed, and read, between an untimed launch and the timed one.
    """
    from gpu_accel.workbench.cuda_timer import CudaTimer

    class Fresh(CudaTimer):
        def flush(self, *, clean: bool = False) -> None:
            if launches.pending:
                if launches.last in launches.used:  # memory that is only to be made ready holds nothing of a launch
                    kept.offer(launches)
                launches.refresh()
            super().flush(clean=clean)

        def lead(self, microseconds: float) -> None:
            if warm and launches.pending:
                launches.last.refresh()
                launches.last.touch()
                launches.pending = []
            super().lead(microseconds)

        def mark(self) -> Any:
            if warm:  # after a timed launch: what follows is another implementation's
                launches.pending = []
            return super().mark()

        def capture(self, call: Callable[[], object], repeats: int) -> Callable[[], object]:
            if not isinstance(call, Counted):
                return super().capture(call, repeats)
            replay = super().capture(call.run, repeats)

            def again() -> None:
                replay()
                call.launched()

            return again

    return Fresh()


@contextlib.contextmanager
def addresses(mib: int) -> Iterator[None]:
    """Within the block this process, and what it starts, may have so much more memory than it has.

    What CUDA reserves is more than any limit, so there is none where kernels run; what compilers take is not.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = now + mib * 2**20
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """SIGALRM ends the process when the block takes longer."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def shared(descriptor: int | None) -> Iterator[None]:
    """Hold the lock of the GPU together with others that do; nothing is timed meanwhile."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def alone(descriptor: int | None, seconds: float) -> Iterator[None]:
    """Hold the lock of the GPU; SIGALRM ends the process when it is held too long."""
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with limited(seconds):
            yield
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def bench(job: dict[str, Any], folder: Path, binary: Binary) -> dict[str, Any]:
    """Time the kernel between launches of its baselines, and write kept outputs to keptN.bin."""
    import torch

    from gpu_accel.workbench.timing import compare

    from .device import Module, launch_on, without_persisting_cache

    what = job["bench"]
    plain_float32()
    compiled, failed = _compiled(what, folder, job["lock_descriptor"])
    memories = [Memory(what, what["trial"], what["seed"] + APART * place) for place in range(PLACES)]
    log = _log(what, memories[0].slots) if what["repeat"] else None
    launches, module = Launches(memories, log), Module(binary)
    calls: list[Callable[[], object]] = [
        Counted(memory.prepared(launch_on(module, what["trial"], memory.image, hidden=HIDDEN)), memory, launches)
        for memory in memories
    ]
    half = max(what["bytes"] // 2, 1)
    source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    fast: dict[str, list[Callable[[], object]]] = {"candidate": calls, "copy": [lambda: target.copy_(source)]}
    slow: dict[str, list[Callable[[], object]]] = {}
    kept = Kept(what["keep"], what["choice"])
    given: list[Any] = []  # to baselines
    if "library" in what["peers"]:
        fast["library"], prepared = _library(what)
        given += _tensors(prepared)
    if compiled:
        fast["compiled"] = compiled
    for name, peer in what["others"].items():
        (folder / name).mkdir()
        file = folder / name / ("kernel.py" if peer["trial"]["language"] == "triton" else "kernel.cu")
        file.write_text(peer["source"], encoding="utf-8")
        own = Memory(what, peer["trial"], what["seed"] + 3 * 10**6)
        given += own.named("input")
        made = Module(Compiler(folder / name, peer["entry"])(peer["trial"]))
        (slow if name == "naive" else fast)[name] = [
            own.prepared(launch_on(made, peer["trial"], own.image, hidden=HIDDEN))
        ]
    torch.cuda.synchronize()
    without_persisting_cache()
    before = _sums(what, given)
    timer = _timer(launches, kept)
    limits = {"seconds": what["seconds"], "min_rounds": 10, "max_rounds": what["rounds"], "noise": 0.005}
    with alone(job["lock_descriptor"], what["alone_seconds"]):
        timed = compare(fast, timer=timer, **limits)
        if slow:
            slow = {"candidate": calls, **slow}
            launches.pending = list(memories)
            second = compare(
                slow, timer=timer, seconds=what["seconds"] / 2, min_rounds=3, max_rounds=10, method="events"
            )
        while len(kept.rows) < what["keep"]:
            launches.pending = list(memories)
            launches.refresh()
            calls[len(kept.rows) % PLACES]()
            kept.offer(launches)
        if what["warm"]:
            launches.pending = list(memories)
            launches.refresh()
            warm = compare(
                fast, timer=_timer(launches, Kept(0, 0), warm=True), flush_l2=False, noise=0.01, min_rounds=10,
                seconds=what["seconds"] * WARM_SHARE, max_rounds=WARM_ROUNDS, most_repeats=1,
            )  # fmt: skip
            kept.rows.append(launches.kept())
        more: dict[str, Any] = {"around": sum(one.around() for one in memories), "given": before == _sums(what, given)}
        if log:
            again, others = _again(what, binary, log, timed)
            more, kept.rows = more | again, kept.rows + others
        if compiled:
            _write(folder / "compiled.bin", list(compiled[0]().values()))  # type: ignore[attr-defined]
        torch.cuda.synchronize()
    for number, (_, outputs) in enumerate(kept.rows):
        _write(folder / f"kept{number}.bin", outputs)
    times = _told(timed) | ({"compiled": {"failed": failed}} if failed else {})
    result = {"kept": [seed for seed, _ in kept.rows], "launches": launches.count, "times": times} | more
    if what["peers"]:
        with contextlib.suppress(Exception):  # no disassembler, or one that does not know the code: it stays unsaid
            types = {name for one in binary.passes for name in tensor_types(one.cubin)}
            result["tensor_cores"] = [name for name in TENSOR_TYPES if name in types]
    if slow:
        result["slow"] = _told(second)
    if what["warm"]:
        result["warm"] = _told(warm)
    return result


def _log(what: Mapping[str, Any], slots: Sequence[Any]) -> Log:
    sizes = [slot.size for slot in slots if slot.role != "workspace"]
    return Log(lambda: Bits(min(max(sizes), LARGEST_WEIGHTS), what["repeat"], "cuda"))


def _sums(what: Mapping[str, Any], tensors: Sequence[Any]) -> list[int]:
    """A number over all bits of each tensor, on the host."""
    if not tensors or not what["repeat"]:
        return []
    bits = Bits(min(max(one.numel() * one.itemsize for one in tensors), LARGEST_WEIGHTS), what["repeat"], "cuda")
    return [int(bits([one])) for one in tensors]


def _tensors(value: Any) -> list[Any]:
    """Dense tensors within what a library is given."""
    import torch

    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    if not isinstance(value, torch.Tensor):
        return []
    if value.layout is torch.sparse_csr:
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value] if value.layout is torch.strided and value.is_contiguous() else []


def _again(
    what: Mapping[str, Any], binary: Binary, log: Log, timed: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[int, list[Any]]]]:
    """Every timed launch again, by a module and on memory that were not there before, and what other clocks say.

    Also (seed, outputs) of launches on inputs of other families at the timed shape.
    """
    from .device import Module, launch_on

    memory = Memory(what, what["trial"], what["seed"] + APART * PLACES)
    call = memory.prepared(launch_on(Module(binary), what["trial"], memory.image, hidden=HIDDEN))
    found: dict[str, Any] = {"repeats": repeat(log, memory, call, seed=what["repeat"])}
    others = []
    for number, family in enumerate(what["families"]):
        memory.renew(what["seed"] + APART * (PLACES + 1) + number, family)
        call()
        others.append((memory.seed, memory.outputs()))
    if times := [ms for ms in timed["candidate"].times if 0 < ms < math.inf]:
        count = other_clocks.count_of(median(times))
        replay = _timer(Launches([memory]), Kept(0, 0)).capture(call, count)
        found["clocks"] = other_clocks.read(replay, launches=count)
    return found, others


def plain_float32() -> None:
    """Let torch compute float32 as float32: its bound is the candidate's, and TF32 would not keep it."""
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def library_seed(seed: int, number: int = 0) -> int:
    """Of the inputs of libraries: others than any that the candidate sees."""
    return seed + (number + 1) * 10**6


def _library_inputs(what: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    from .tasks import TASKS
    from .tasks.task import Buffer

    task = TASKS[what["task"]]
    inputs = {one["name"]: Buffer(**one) for one in what["inputs"]}
    sets = [draw_on(inputs, what["dims"], library_seed(what["seed"], number), "cuda") for number in range(2)]
    return task, [task.prepare(x, what["dims"]) if task.prepare else x for x in sets]


def _library(what: Mapping[str, Any]) -> tuple[list[Callable[[], object]], list[Any]]:
    """Its calls, and what they are given."""
    task, prepared = _library_inputs(what)
    return [functools.partial(task.library, x, what["dims"]) for x in prepared], prepared


def _compiled(
    what: Mapping[str, Any], folder: Path, descriptor: int | None
) -> tuple[list[Callable[[], object]], str]:  # fmt: skip
    """The library's function through torch.compile, compiled and tuned before anything is timed; or why it is not.

    Compiling launches kernels (Inductor tries a few configurations), so it excludes timing, but not other compiling.
    """
    if "compiled" not in what["peers"]:
        return [], ""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    import torch

    try:
        import torch._inductor.config as inductor

        inductor.compile_threads = 1
        task, prepared = _library_inputs(what)
        function = torch.compile(functools.partial(task.library, d=what["dims"]), fullgraph=True, dynamic=False)
        calls: list[Callable[[], object]] = [functools.partial(function, x) for x in prepared]
        with shared(descriptor):
            for call in calls:
                call()
            torch.cuda.synchronize()
        return calls, ""
    except Exception as error:  # whatever the compiler says: the other baselines are timed
        return [], f"torch.compile: {type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _write(path: Path, outputs: list[Any]) -> None:
    import torch

    with path.open("wb") as file:
        for one in outputs:
            file.write(memoryview(one.cpu().contiguous().view(-1).view(torch.uint8).numpy()))


def _told(timed: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, one in timed.items():
        times = [float(ms) for ms in one.times if math.isfinite(ms)]
        found[name] = {"ms": times, "failed": one.failed, "method": one.method, "clocks": dict(one.clocks or {}),
                       "note": one.note}  # fmt: skip
    return found
