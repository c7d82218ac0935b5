"""Distributed shared memory: latency and bandwidth of reading another block's shared memory in a cluster.

Latency is a pointer chase by one thread of one block through its own memory or its neighbour's, by addresses of the
cluster. Bandwidth: 1024 threads of every block read 16 bytes at a time from themselves, from the next block (ring), from
the block beside them (pair) or all from the first block (broadcast).
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from gpu_accel.workbench.experiment import Case, Check

from . import latency as memory
from .launch import sm_count
from .probe import PRELUDE, Kernel, Outcome, Probe, equal, run

if TYPE_CHECKING:
    pass

WORDS = 8192  # 32 KB of shared memory a block
LINKS = 4096  # pointers in the same
_STRIDE = 16  # pointers from one link of the chase to the next: a line of 128 bytes
STEPS, UNROLL, PASSES = 4096, 32, 64
THREADS = 1024

_SOURCE = (
    PRELUDE
    + """
__device__ __forceinline__ u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 size() { u32 r; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ u32 of_rank(u32 address, u32 r) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(r));
    return there;
}
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive;\\nbarrier.cluster.wait;" ::: "memory");
}

extern "C" __global__ void chase(u64* stamps, u64* result, const u32* successor, int away, int passes) {
    extern __shared__ u64 links[];
    u64 here, from;  // generic addresses, which are good anywhere in the cluster
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(here) : "l"(links), "r"(rank()));
    for (int i = threadIdx.x; i < 4096; i += blockDim.x) links[i] = here + 8 * successor[i];
    meet();
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(from) : "l"(links), "r"((rank() + away) % size()));
    u64 p = from, begin = 1, end = 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        #pragma unroll 1
        for (int i = 0; i < 256; i++) asm volatile("ld.u64 %0, [%0];" : "+l"(p) :: "memory");
        begin = now();
        #pragma unroll 1
        for (int i = 0; i < passes; i++) {
            #pragma unroll
            for (int j = 0; j < 32; j++) asm volatile("ld.u64 %0, [%0];" : "+l"(p) :: "memory");
        }
        end = now();
        result[0] = p - from;
    }
    meet();
    stamp(stamps, begin, end);
}

// pattern 0: own, 1: ring, 2: pair, 3: broadcast
extern "C" __global__ void __launch_bounds__(1024) stream(u64* stamps, u32* sums, const u32* words, int pattern, int passes) {
    extern __shared__ __align__(16) u32 mine[];
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) mine[i] = words[i] + blockIdx.x;
    meet();
    u32 r = rank();
    u32 other = pattern == 0 ? r : pattern == 1 ? (r + 1) % size() : pattern == 2 ? (r ^ 1) : 0;
    u32 from = of_rank(shared_address(mine), other), at = threadIdx.x * 16;
    u32 total = 0;
    meet();
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++, at += 512) {  // moves on, or the loads would be the same in every pass
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; j++)
            asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "r"(from + ((at + j * 4096) & 32767)) : "memory");
        #pragma unroll
        for (int j = 0; j < 8; j++) total += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    u64 end = now();
    sums[blockIdx.x * blockDim.x + threadIdx.x] = total;
    meet();
    stamp(stamps, begin, end);
}
"""
)
PATTERNS = {"own-bandwidth": 0, "ring": 1, "pair": 2, "broadcast": 3}
CHASE = Kernel(source=_SOURCE, name="chase", holds="LD", at_least=UNROLL)
STREAM = Kernel(
    source=_SOURCE, name="stream", holds="LD", at_least=8, also=("IADD3", "LOP3", "MOV", "IMAD"), purity=0.7
)


def latency(cluster: int, away: int, seed: int) -> Outcome:
    """Cycles of a load from the shared memory of the block `away` ranks further in a cluster."""
    import torch

    CHASE.loop()
    lines = LINKS // _STRIDE
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(lines, generator=generator)
    order = order.roll(-int((order == 0).nonzero()[0]))  # the walk begins at word 0
    successor = torch.zeros(LINKS, dtype=torch.int32)
    successor[order * _STRIDE] = (order.roll(-1) * _STRIDE).int()
    result = torch.zeros(1, dtype=torch.int64, device="cuda")
    found: list[int] = []

    def keep() -> None:
        found.append(int(result))
        result.fill_(-1)

    arguments = [result, successor.cuda(), away, STEPS // UNROLL]
    taken = run(CHASE, arguments, grid=cluster, block=32, shared=4 * WORDS, cluster=cluster, before=keep, pick="first")
    keep()
    wanted = 8 * int(order[(256 + STEPS) % lines]) * _STRIDE
    wrong = sum(one != wanted for one in found[1:])
    check = Check(float(wrong), 0.0, "walks that ended elsewhere")
    return Outcome(check=check, metrics={"latency": taken.series("clk", lambda cycles: cycles / STEPS)})


def bandwidth(cluster: int, pattern: str, seed: int) -> Outcome:
    """Bytes that each block reads in a cycle, all SMs that clusters of this size reach at work."""
    import torch

    STREAM.loop()
    grid = cluster * (sm_count() // cluster)
    if cluster > 8:  # not every GPC has as many SMs; more clusters than fit would only come later
        grid = 4 * cluster
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2**20, (WORDS,), generator=generator).int()
    sums = torch.zeros(grid * THREADS, dtype=torch.int32, device="cuda")
    arguments = [sums, words.cuda(), PATTERNS[pattern], PASSES]
    taken = run(
        STREAM, arguments, grid=grid, block=THREADS, shared=4 * WORDS, cluster=cluster, before=lambda: sums.fill_(-1)
    )
    block = torch.arange(grid)
    rank = block % cluster
    other = {"own-bandwidth": rank, "ring": (rank + 1) % cluster, "pair": rank ^ 1, "broadcast": rank * 0}[pattern]
    owner = block - rank + other
    once = words.long().sum() + owner * WORDS
    wanted = once * 4 * PASSES  # eight loads of a pass read all words four times
    found = sums.view(grid, THREADS).long().sum(1).cpu()
    check = equal(found & 0xFFFFFFFF, wanted & 0xFFFFFFFF, "blocks with a wrong sum of what they read")
    per_block = 8 * 16 * THREADS * PASSES
    # In a broadcast the first block of a cluster reads its own memory: the slowest one is among those that it serves.
    rate = taken.series("B/clk/SM", lambda cycles: per_block / cycles, slowest=pattern == "broadcast")
    return Outcome(check=check, metrics={"bandwidth": rate})


def probes(quick: bool = False) -> list[Probe]:
    """Latency to oneself and to a neighbour, bandwidth by pattern and size of the cluster."""
    sizes = (2,) if quick else (2, 4, 8, 16)
    found: list[Probe] = []
    measure: Callable[[int], Outcome]
    for pattern, cluster in [("own", 2), *(("remote", size) for size in sizes)]:
        measure = partial(latency, cluster, int(pattern == "remote"))
        found.append(Probe(case={"pattern": pattern, "cluster": cluster}, kernels=(CHASE,), measure=measure))
    # To compare with: a load that the second-level cache serves.
    load = "ld.global.cg.u64"
    compared: Case = {"pattern": "l2", "cluster": 2}
    measure = partial(memory.chase, load, 2 * 2**20, False)
    found.append(Probe(case=compared, kernels=(memory.kernel(load),), measure=measure))
    for cluster in sizes:
        for pattern in PATTERNS:
            measure = partial(bandwidth, cluster, pattern)
            found.append(Probe(case={"pattern": pattern, "cluster": cluster}, kernels=(STREAM,), measure=measure))
    return found
