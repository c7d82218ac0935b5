"""Latency of memory by pointer chase: one thread, every load needs the address that the one before it brings.

A buffer holds one random cycle over its lines of 128 bytes, so no prefetcher and no row of DRAM helps. What the level is
called follows from the footprint and the kind of load; `curve` leaves that open and walks through all sizes. Where the
walk ends is known from the permutation, and is checked.

The second-level cache of Hopper has two halves. A line has its home in one; when an SM of the other half reads it, that
half keeps a copy, so repeated reads are all near hits. See `_sides` for how the halves are told apart.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import HardwareError
from gpu_accel.workbench.experiment import Case, Check

from .launch import launch, sm_count
from .probe import LAUNCHES, PRELUDE, Kernel, Outcome, Probe, run

if TYPE_CHECKING:
    import torch

LINE = 128  # bytes
UNROLL = 32
STEPS = 4096  # timed loads of one launch
_WARMABLE_KB = 512  # up to here one thread visits every line before each timed walk, for the first level of cache
_WALKABLE_KB = 64 * 1024  # up to here it does before the first, so that the second level keeps what it can; beyond
# that nothing would be left of a line when the walk comes back to it, and the cache is emptied instead
L2_BYTES = 50 * 2**20

# Loads: PTX in which %0 is the pointer (or index), %1 the base, %2 a zero that the compiler does not know.
_LOADS = {
    "ld.global.ca.u64": ("chase_ca", "u64", "ld.global.ca.u64 %0, [%0];", "LDG"),
    "ld.global.cg.u64": ("chase_cg", "u64", "ld.global.cg.u64 %0, [%0];", "LDG"),
    "ld.global.ca.u32+index": (
        "chase_index", "u32", "{.reg .u64 t; mad.wide.u32 t, %0, 4, %1; ld.global.ca.u32 %0, [t];}", "LDG",
    ),
    "ld.shared.u32": ("chase_shared", "u32", "ld.shared.u32 %0, [%0];", "LDS"),
    "ld.u64": ("chase_generic", "u64", "ld.u64 %0, [%0];", "LD"),
    "atom.global.add.u64": ("chase_atom", "u64", "atom.global.add.u64 %0, [%0], %2;", "ATOMG"),
    "atom.shared.add.u32": ("chase_atom_shared", "u32", "atom.shared.add.u32 %0, [%0], %3;", "ATOMS"),
}  # fmt: skip
_SHARED = ("ld.shared.u32", "ld.u64", "atom.shared.add.u32")

_CHASE = """
extern "C" __global__ void {name}(u64* stamps, u64* result, {word}* memory, u64 start, u64 zero, int warm, int passes) {{
    extern __shared__ {word} mine_{name}[];
    {prepare}
    {word} p = ({word})start;
    u64 base = (u64)memory;
    #pragma unroll 1
    for (int i = 0; i < warm; i++) asm volatile("{load}" : "+{letter}"(p) : "l"(base), "l"(zero), "r"((u32)zero) : "memory");
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {{
        #pragma unroll
        for (int j = 0; j < {unroll}; j++) asm volatile("{load}" : "+{letter}"(p) : "l"(base), "l"(zero), "r"((u32)zero) : "memory");
    }}
    u64 end = now();
    {finish}
    result[0] = p;
    asm volatile("{{.reg .u32 t; mov.u32 t, %%smid; cvt.u64.u32 %0, t;}}" : "=l"(result[1]));
    stamp(stamps, begin, end);
}}
"""
# Offsets in bytes become addresses once the block knows where its shared memory lies.
_INTO_SHARED = """
    for (int i = 0; i < {words}; i++) mine_{name}[i] = {origin} + memory[i];
    start += {origin};
"""

# Who reads a line first: the blocks of one SM, chosen by its number; and how long each line then takes another.
_SIDES = """
extern "C" __global__ void touch_by(u32* readers, u64 memory, int lines, u32 wanted) {
    u32 sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (sm != wanted) return;
    u64 sum = 0;
    for (int i = threadIdx.x; i < lines; i += blockDim.x) {
        u64 v;
        asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(memory + (u64)i * 128) : "memory");
        sum += v;
    }
    if (threadIdx.x == 0) atomicAdd(readers, sum == 1 ? 2 : 1);  // an address is even, so no sum is 1
}
extern "C" __global__ void each_line(u64* stamps, u32* cycles, u64 memory, int lines) {
    __shared__ u32 took[4096];
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < lines; i++) {
        u64 p = memory + (u64)i * 128, t = now();
        asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) :: "memory");
        if (p == 0) asm volatile("trap;");
        took[i] = (u32)(now() - t);
    }
    u64 end = now();
    for (int i = 0; i < lines; i++) cycles[i] = took[i];
    asm volatile("mov.u32 %0, %%smid;" : "=r"(cycles[lines]));
    stamp(stamps, begin, end);
}
"""

_TOUCH = """
extern "C" __global__ void touch(const uint4* memory, u64 count, uint4* out) {
    u32 sum = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        uint4 v;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(memory + i));
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) out[0].x = sum;
}
"""
_SHARED_BYTES = 32 * 1024


def source() -> str:
    """All chases in one file."""
    text = PRELUDE
    for load, (name, word, ptx, _) in _LOADS.items():
        prepare = finish = ""
        if load in _SHARED:
            origin = f"(u64)mine_{name}" if word == "u64" else f"shared_address(mine_{name})"
            words = _SHARED_BYTES // (8 if word == "u64" else 4)
            prepare = _INTO_SHARED.format(words=words, name=name, origin=origin)
            finish = f"p -= {origin};"
        text += _CHASE.format(
            name=name,
            word=word,
            load=ptx,
            letter="l" if word == "u64" else "r",
            unroll=UNROLL,
            prepare=prepare,
            finish=finish,
        )
    return text + _SIDES + _TOUCH


def touch(memory: torch.Tensor) -> None:
    """Read all of a tensor through the second-level cache, without the first."""
    count = memory.numel() * memory.element_size() // 16
    launch(source(), "touch", [memory, ctypes.c_uint64(count), memory], grid=4 * sm_count(), block=512)


def flusher() -> Callable[[], None]:
    """A call that drives everything else out of the second-level cache."""
    import torch

    other = torch.zeros(4 * L2_BYTES, dtype=torch.uint8, device="cuda")
    return lambda: touch(other)


def kernel(load: str) -> Kernel:
    name, _, _, opcode = _LOADS[load]
    also = ("LEA", "LDC") if load.endswith("index") else ()
    return Kernel(source=source(), name=name, holds=opcode, at_least=UNROLL, also=also)


def cycle(lines: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, successor) of a random cycle over `lines`, on the GPU: successor[order[i]] = order[i + 1]."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    order = torch.randperm(lines, device="cuda", generator=generator)
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return order, successor


def chase(load: str, footprint: int, flush: bool, seed: int) -> Outcome:
    """Cycles of a load in a footprint of so many bytes; with `flush` the second-level cache is emptied before each walk."""
    import torch

    code = kernel(load)
    code.loop()
    lines = footprint // LINE
    order, successor = cycle(lines, seed)
    shared = load in _SHARED
    if load.endswith("index"):
        memory = torch.zeros(footprint // 4, dtype=torch.int32, device="cuda")
        memory[:: LINE // 4] = (successor * (LINE // 4)).int()
        origin, scale = 0, LINE // 4
    else:
        narrow = code.name in ("chase_shared", "chase_atom_shared")
        memory = torch.zeros(
            footprint // (4 if narrow else 8), dtype=torch.int32 if narrow else torch.int64, device="cuda"
        )
        origin = 0 if shared else memory.data_ptr()
        memory[:: LINE // memory.element_size()] = (successor * LINE + origin).to(memory.dtype)
        scale = LINE
    del successor
    result = torch.zeros(2, dtype=torch.int64, device="cuda")
    visits_all = footprint <= _WARMABLE_KB * 1024
    warm = lines if visits_all and not flush else 0
    once = lines if not visits_all and not flush and footprint <= _WALKABLE_KB * 1024 else 0
    clear = flusher() if flush else None
    state = {"position": 0, "wrong": 0}
    arguments: list[Any] = [result, memory, ctypes.c_uint64(0), ctypes.c_uint64(0), warm, STEPS // UNROLL]

    def where(position: int) -> int:
        return int(order[position % lines]) * scale + origin

    def judge() -> None:
        """Of the launch before this one."""
        if state.get("begun"):
            state["wrong"] += int(result[0]) != where(state["position"])

    def before() -> None:
        judge()
        state["begun"] = True
        result.fill_(-1)
        first = state["position"] == 0
        if clear is not None:
            clear()
        elif not visits_all and not once:
            touch(memory)
        arguments[4] = once if once and first else warm
        # A walk goes on where the last one ended, for its start would be found in the cache.
        arguments[2] = ctypes.c_uint64(where(state["position"]))
        state["position"] += STEPS + arguments[4]

    torch.cuda.synchronize()
    taken = run(code, arguments, block=1, before=before, shared=_SHARED_BYTES if shared else 0)
    judge()
    check = Check(float(state["wrong"]), 0.0, "walks that ended elsewhere")
    return Outcome(check=check, metrics={"latency": taken.series("clk", lambda cycles: cycles / STEPS)})


@dataclass(frozen=True)
class _Sides:
    """A buffer whose lines are told apart by the half of the second-level cache that is their home."""

    memory: torch.Tensor
    near: list[int]  # lines at home in the half of the SM that walks
    far: list[int]
    toucher: int  # an SM of the other half
    walker: int  # the SM that a single block runs on


@functools.cache
def _sides(lines: int) -> _Sides:
    """Find the halves by what a first read costs.

    A half keeps a copy of what its SMs read from the other. So a line is a far hit only the first time, and only if no
    SM of this half read it before. Every SM in turn reads the lines first, then one thread elsewhere: where the first
    reader sits in the other half, the lines at home there are far hits, and the walk is slowest.

    Raises:
        HardwareError: no two halves show.
    """
    import torch

    memory = torch.zeros(lines * LINE // 8, dtype=torch.int64, device="cuda")
    memory[:: LINE // 8] = memory.data_ptr() + torch.arange(lines, device="cuda") * LINE
    clear = flusher()

    def first_reads(sm: int) -> list[int]:
        clear()
        _touch_by(memory, lines, sm)
        cycles = torch.zeros(lines + 1, dtype=torch.int32, device="cuda")
        stamps = torch.zeros(1, 1, 2, dtype=torch.int64, device="cuda")
        launch(source(), "each_line", [stamps, cycles, ctypes.c_uint64(memory.data_ptr()), lines], block=1)
        *each, walker[0] = cycles.tolist()
        return each

    walker = [-1]
    totals = {sm: statistics.fmean(first_reads(sm)) for sm in range(sm_count())}
    toucher = max(totals, key=lambda sm: totals[sm])
    each = [statistics.median(values) for values in zip(*(first_reads(toucher) for _ in range(5)), strict=True)]
    low, high = two_means(each)
    near = [line for line, value in enumerate(each) if value < (low + high) / 2]
    far = [line for line, value in enumerate(each) if value >= (low + high) / 2]
    if min(len(near), len(far)) < lines // 4 or high - low < 40:
        raise HardwareError(
            f"no two halves of the second-level cache show: {len(near)} lines near {low:.0f} cycles, {len(far)} near {high:.0f}"
        )
    return _Sides(memory, near, far, toucher, walker[0])


def _touch_by(memory: torch.Tensor, lines: int, sm: int) -> None:
    """Let one SM read all lines."""
    import torch

    readers = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = [readers, ctypes.c_uint64(memory.data_ptr()), lines, sm]
    launch(source(), "touch_by", arguments, grid=sm_count(), block=1024, shared=120 * 1024)
    if not int(readers):
        raise HardwareError(f"no block ran on SM {sm}")


def by_side(level: str, footprint: int, seed: int) -> Outcome:
    """Cycles of a load by the half of the second-level cache that is the line's home, each line read once after the
    cache was emptied: a hit when an SM of the other half has read the line before, a miss when nobody has."""
    import torch

    code = kernel("ld.global.cg.u64")
    code.loop()
    lines = footprint // LINE
    found = _sides(lines)
    mine = found.near if level.startswith("l2-near") else found.far
    steps = len(mine) // UNROLL * UNROLL
    order = torch.tensor(mine)[torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))]
    addresses = found.memory.data_ptr() + order * LINE
    found.memory[(order * (LINE // 8)).cuda()] = addresses.roll(-1).cuda()
    clear = flusher()
    result = torch.zeros(2, dtype=torch.int64, device="cuda")
    wanted = [int(addresses[steps % len(mine)]), found.walker]
    ends: list[bool] = []

    def before() -> None:
        if int(result[0]):
            ends.append(result.tolist() == wanted)
        result.zero_()
        clear()
        if not level.endswith("miss"):
            _touch_by(found.memory, lines, found.toucher)

    arguments = [result, found.memory, ctypes.c_uint64(int(addresses[0])), ctypes.c_uint64(0), 0, steps // UNROLL]
    taken = run(code, arguments, block=1, before=before)
    before()
    check = Check(
        float(len(ends) - sum(ends) + (len(ends) < LAUNCHES)), 0.0, "walks that ended elsewhere, or ran on another SM"
    )
    series = taken.series("clk", lambda cycles: cycles / steps)
    return Outcome(check=check, metrics={"latency": replace(series, timing=series.timing | {"lines": steps})})


def two_means(values: list[float]) -> tuple[float, float]:
    """Medians of the lower and the upper of two clusters (Lloyd's algorithm from the extremes)."""
    low, high = min(values), max(values)
    for _ in range(50):
        middle = (low + high) / 2
        below = [value for value in values if value <= middle] or [low]
        above = [value for value in values if value > middle] or [high]
        new = statistics.fmean(below), statistics.fmean(above)
        if new == (low, high):
            break
        low, high = new
    return statistics.median(below), statistics.median(above)


CURVE_KB = (
    1, 4, 16, 32, 64, 96, 128, 160, 192, 208, 224, 240, 256, 320, 512,
    1024, 2048, 4096, 8192, 16384, 20480, 24576, 28672, 32768, 40960, 49152, 65536, 98304, 131072, 262144,
)  # fmt: skip
_GB = 1024 * 1024  # in KB
LEVELS = (
    ("l1", "ld.global.ca.u64", 32),
    ("l1", "ld.global.ca.u32+index", 32),
    ("shared", "ld.shared.u32", 32),
    ("shared", "ld.u64", 32),
    ("shared", "atom.shared.add.u32", 32),
    ("l2", "ld.global.cg.u64", 2048),
    ("l2", "atom.global.add.u64", 2048),
    ("l2-near", "ld.global.cg.u64", 512),
    ("l2-far", "ld.global.cg.u64", 512),
    ("l2-near-miss", "ld.global.cg.u64", 512),
    ("l2-far-miss", "ld.global.cg.u64", 512),
    ("dram", "ld.global.cg.u64", _GB),
)


def probes(quick: bool = False) -> list[Probe]:
    """The levels one by one, then the curve."""
    found = []
    curve = [("curve", "ld.global.ca.u64", size) for size in (CURVE_KB[3::8] if quick else CURVE_KB)]
    for level, load, size in (*LEVELS, *curve):
        if level.startswith(("l2-near", "l2-far")):
            measure: Callable[[int], Outcome] = partial(by_side, level, size * 1024)
        else:
            measure = partial(chase, load, size * 1024, size > _WALKABLE_KB)
        case: Case = {"level": level, "load": load, "footprint_kb": size}
        found.append(Probe(case=case, kernels=(kernel(load),), measure=measure))
    return found
