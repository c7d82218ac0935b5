"""What a microbenchmark is: kernels, the instructions they must hold, a measurement that checks its own result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import IncorrectResultError
from gpu_accel.workbench.experiment import Case, Check, Sampled

from . import compile as compiling
from . import launch as launching
from .sass import Loop, loop_holds

if TYPE_CHECKING:
    import torch

LAUNCHES = 12  # timed launches of a measurement; each is one sample
_UNTIMED = 2  # launches before them

# Every source begins with this. `stamp` keeps the start and end of each warp, from which `run` takes the time of a
# block: clock64 counts for a whole SM, so the warps of one block may be compared.
PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
__device__ __forceinline__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void stamp(u64* stamps, u64 start, u64 end) {
    if (threadIdx.x % 32 == 0) {
        u64* mine = stamps + 2 * (blockIdx.x * ((blockDim.x + 31) / 32) + threadIdx.x / 32);
        mine[0] = start;
        mine[1] = end;
    }
}
"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel and the promise about its timed loop.

    Args:
        source: CUDA C++ that holds it (and often its relatives).
        name: its name there.
        holds: the SASS instruction that is measured, such as "FFMA" or "HGMMA.64x256x16.F32.BF16".
        at_least: how many of them one pass of the timed loop has.
        also: other opcodes that belong to the work.
        purity: least share of `holds` and `also` among what does not keep the loop going.
    """

    source: str
    name: str
    holds: str
    at_least: int
    also: tuple[str, ...] = ()
    purity: float = 0.9

    def loop(self) -> Loop:
        """The timed loop.

        Raises:
            IncorrectResultError: it does not hold what it should.
        """
        function = compiling.build(self.source).functions[self.name]
        return loop_holds(function, self.holds, self.at_least, also=self.also, purity=self.purity)

    @property
    def digest(self) -> str:
        """Identifies the machine code of the source."""
        return compiling.build(self.source).digest


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A judged measurement: the check of its result, and its metrics by name."""

    check: Check
    metrics: dict[str, Sampled]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One implementation of one case.

    `measure(seed)` runs on a GPU; it draws its inputs from the seed and judges the results of the launches that it
    times. `kernels` are compiled and their loops checked first.
    """

    case: Case
    kernels: tuple[Kernel, ...]
    measure: Callable[[int], Outcome]
    name: str = "kernel"
    role: str = "ours"
    note: str = ""

    def sources(self) -> list[str]:
        return list(dict.fromkeys(kernel.source for kernel in self.kernels))


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What some launches of one kernel took: SM cycles (median over blocks) and milliseconds, one of each a launch."""

    cycles: tuple[float, ...]
    ms: tuple[float, ...]
    env: dict[str, Any]
    slowest: tuple[float, ...] = ()  # SM cycles of the block that took longest

    def series(self, unit: str, convert: Callable[[float], float], *, slowest: bool = False) -> Sampled:
        """A metric that follows from the cycles of the median block, or of the slowest."""
        cycles = self.slowest if slowest else self.cycles
        return Sampled(samples=tuple(map(convert, cycles)), unit=unit, env=self.env, timing={"method": "clock64"})

    def time(self, *, l2: str, flops: float = 0.0, bytes_moved: float = 0.0) -> Sampled:
        """The time of a launch, from which rates follow."""
        work = {name: value for name, value in (("flops", flops), ("bytes", bytes_moved)) if value}
        timing = {"method": "events", "calls": 1, "l2": l2, "mode": "burst"}
        return Sampled(samples=self.ms, unit="ms", work=work, timing=timing, env=self.env)


def run(
    kernel: Kernel,
    arguments: Sequence[Any],
    *,
    grid: int = 1,
    block: int = 32,
    shared: int = 0,
    cluster: int = 1,
    launches: int = LAUNCHES,
    untimed: int = _UNTIMED,
    before: Callable[[], object] | None = None,
    busy_ms: float = launching.WARM_UP_MS,
    pick: str = "median",
) -> Launches:
    """Launch a kernel that keeps stamps in its first argument, and read how long each launch took.

    Args:
        arguments: without the stamps.
        untimed: launches before the timed ones, without a pause between them and those.
        before: called before every launch, outside of the timed region (flushing a cache, poisoning an output).
        pick: which block's cycles count: the "median" of all, or those of the "first".
        busy_ms: how long the card is kept busy before the first launch.
    Raises:
        IncorrectResultError: a warp left no stamp.
    """
    import torch

    from gpu_accel.workbench.clocks import ClockSampler

    warps = -(-block // 32)
    stamps = torch.empty(grid, warps, 2, dtype=torch.int64, device="cuda")
    taken: list[torch.Tensor] = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ms = []
    if busy_ms:
        launching.warm_up(busy_ms)
    with ClockSampler() as clocks:
        for index in range(untimed + launches):
            stamps.fill_(-1)
            if before is not None:
                before()
            launching.hold()
            start.record()
            launching.launch(
                kernel.source, kernel.name, [stamps, *arguments], grid=grid, block=block, shared=shared, cluster=cluster
            )
            end.record()
            end.synchronize()
            if index >= untimed:
                ms.append(start.elapsed_time(end))
                taken.append(stamps.cpu())
    cycles, slowest = [], []
    for one in taken:
        if (one <= 0).any():
            raise IncorrectResultError(f"{kernel.name}: a warp left no time stamp")
        per_block = one[:, :, 1].amax(1) - one[:, :, 0].amin(1)
        cycles.append(float(per_block[0] if pick == "first" else per_block.double().median()))
        slowest.append(float(per_block.max()))
    return Launches(cycles=tuple(cycles), ms=tuple(ms), env=_clocks(clocks.summary()), slowest=tuple(slowest))


def _clocks(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in summary.items() if key in ("clock_mhz", "power_w", "temperature_c", "throttle")
    }


def slope(
    kernel: Kernel,
    arguments: Callable[[int], Sequence[Any]],
    *,
    short: int,
    long: int,
    steps: int,
    launches: int = LAUNCHES,
    busy_ms: float = launching.WARM_UP_MS,
    **launch: Any,
) -> Sampled:
    """Cycles of one step: the difference between a long and a short run, so that what both share cancels.

    Args:
        arguments: those of a launch with so many passes of the loop.
        steps: steps in one pass.
    """
    few = run(kernel, arguments(short), launches=launches, busy_ms=busy_ms, **launch)
    many = run(kernel, arguments(long), launches=launches, busy_ms=0, **launch)
    difference = (long - short) * steps
    pairs = zip(few.cycles, many.cycles, strict=True)
    samples = tuple((more - less) / difference for less, more in pairs)
    timing = {"method": "clock64", "difference": [short * steps, long * steps]}
    return Sampled(samples=samples, unit="clk", env=many.env, timing=timing)


def worst(*checks: Check) -> Check:
    """The check that is nearest to its bound, or furthest beyond it."""
    return max(checks, key=lambda one: (not one.ok, one.error / one.bound if one.bound else one.error))


def equal(found: torch.Tensor, wanted: torch.Tensor, what: str) -> Check:
    """A check that every element is the same; the error counts those that are not."""
    wrong = int((found.cpu() != wanted.cpu()).sum())
    return Check(float(wrong), 0.0, what)


def close(found: torch.Tensor, wanted: torch.Tensor, bound: float, what: str) -> Check:
    """A check of the largest error relative to the largest true value; NaN never passes."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    scale = float(wanted.abs().max()) or 1.0
    return Check(float((found - wanted).abs().max()) / scale, bound, what)
