"""Bandwidth of every level of memory, and throughput of atomics.

One block of 1024 threads on every SM; the loads of a pass are independent, and every byte read goes into a sum that is
checked. Bytes per cycle and SM come from the clock of the SM, the rate of the whole chip from events.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.workbench.experiment import Case, Check

from .latency import flusher, touch
from .launch import sm_count
from .probe import PRELUDE, Kernel, Outcome, Probe, Sampled, equal, run

if TYPE_CHECKING:
    import torch

THREADS = 1024
UNROLL = 8
_SHARED_KB, _L1_KB, _L2_SAME_KB, _L2_OWN_KB, _DRAM_KB = 128, 128, 16 * 1024, 20 * 1024, 1024 * 1024

# A block walks `span` bytes, of its own or of all, `count` times; a thread's accesses lie 1024 accesses apart.
_READ = """
extern "C" __global__ void __launch_bounds__(1024) read_{space}_{width}(u64* stamps, u32* sums, const char* memory, u64 apart, u32 span, int count, u32 turn) {{
    extern __shared__ char mine[];
    const char* from = memory + blockIdx.x * apart;
    {prepare}
    u32 total = 0;
    {address} first = {origin} + threadIdx.x * {width};
    {warm}
    turn = blockIdx.x * turn % span;
    __syncthreads();
    u64 begin = now();
    #pragma unroll 1
    for (int c = 0; c < count; c++) {{
        #pragma unroll 1
        for (u32 at = 0; at < span; at += 1024 * {width} * {unroll}) {{
            u32 place = at + turn < span ? at + turn : at + turn - span;
            {vector} v[{unroll}];
            #pragma unroll
            for (int j = 0; j < {unroll}; j++) asm volatile("{load}" : {outputs} : "{letter}"(first + place + j * 1024 * {width}));
            #pragma unroll
            for (int j = 0; j < {unroll}; j++) total += {sum};
        }}
    }}
    __syncthreads();
    u64 end = now();
    sums[blockIdx.x * blockDim.x + threadIdx.x] = total;
    stamp(stamps, begin, end);
}}
"""
_WRITE = """
extern "C" __global__ void __launch_bounds__(1024) write_{space}_{width}(u64* stamps, u32* out, char* memory, u64 apart, u32 span, int count) {{
    extern __shared__ char mine[];
    char* to = memory + blockIdx.x * apart;
    {address} first = {origin} + threadIdx.x * {width};
    uint4 v;
    v.x = blockIdx.x * blockDim.x + threadIdx.x + 1;
    v.y = v.x + blockDim.y - 1, v.z = v.x + gridDim.y - 1, v.w = v.x + gridDim.z - 1;  // equal, which ptxas cannot know
    __syncthreads();
    u64 begin = now();
    #pragma unroll 1
    for (int c = 0; c < count; c++) {{
        #pragma unroll 1
        for (u32 at = 0; at < span; at += 1024 * {width} * {unroll}) {{
            #pragma unroll
            for (int j = 0; j < {unroll}; j++) asm volatile("{store}" :: "{letter}"(first + at + j * 1024 * {width}), {inputs} : "memory");
        }}
    }}
    __syncthreads();
    u64 end = now();
    {finish}
    stamp(stamps, begin, end);
}}
"""
_COPY = """
extern "C" __global__ void __launch_bounds__(1024) copy_global_16(u64* stamps, uint4* to, const uint4* from, u64 apart, u32 span, int count) {
    from += blockIdx.x * apart / 16;
    to += blockIdx.x * apart / 16;
    __syncthreads();
    u64 begin = now();
    #pragma unroll 1
    for (u32 at = threadIdx.x; at < span / 16; at += 1024 * 8) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(from + at + j * 1024));
        #pragma unroll
        for (int j = 0; j < 8; j++) asm volatile("st.global.cs.v4.u32 [%4], {%0, %1, %2, %3};"
            :: "r"(v[j].x), "r"(v[j].y), "r"(v[j].z), "r"(v[j].w), "l"(to + at + j * 1024) : "memory");
    }
    __syncthreads();
    stamp(stamps, begin, now());
}
"""
_ATOMIC = """
extern "C" __global__ void __launch_bounds__(1024) atomic_{space}(u64* stamps, u32* counters, int own, int count) {{
    __shared__ u32 mine[1024];
    mine[threadIdx.x] = 0;
    u32 slot = own ? threadIdx.x : 0, one = blockDim.y;  // 1, which ptxas cannot know
    {address} where = {origin};
    __syncthreads();
    u64 begin = now();
    #pragma unroll 1
    for (int c = 0; c < count; c++) {{
        #pragma unroll
        for (int j = 0; j < 16; j++) asm volatile("red.{space}.add.u32 [%0], %1;" :: "{letter}"(where), "r"(one) : "memory");
    }}
    __syncthreads();
    u64 end = now();
    {finish}
    stamp(stamps, begin, end);
}}
"""
_LOADS = {"shared": "ld.shared", "ca": "ld.global.ca", "cg": "ld.global.cg"}


def source() -> str:
    """Every kernel of this module."""
    text = PRELUDE
    for width, vector, parts in ((4, "u32", ("v[j]",)), (16, "uint4", ("v[j].x", "v[j].y", "v[j].z", "v[j].w"))):
        outputs = ", ".join(f'"=r"({part})' for part in parts)
        into = "{" + ", ".join(f"%{i}" for i in range(len(parts))) + "}" if len(parts) > 1 else "%0"
        kind = "v4.u32" if len(parts) > 1 else "u32"
        where = f"[%{len(parts)}]"
        shared = {"width": width, "vector": vector, "outputs": outputs, "sum": " + ".join(parts), "unroll": UNROLL}
        for space, load in _LOADS.items():
            local = space == "shared"
            text += _READ.format(
                space=space, load=f"{load}.{kind} {into}, {where};", letter="r" if local else "l",
                address="u32" if local else "u64", origin="shared_address(mine)" if local else "(u64)from",
                prepare="for (u32 i = threadIdx.x; i < span / 4; i += 1024) ((u32*)mine)[i] = ((const u32*)from)[i];"
                if local else "",
                warm="for (u32 i = threadIdx.x * 4; i < span; i += 4096) { u32 v; asm volatile("
                '"ld.global.ca.u32 %0, [%1];" : "=r"(v) : "l"(from + i)); total += v - v; }' if space == "ca" else "",
                **shared,
            )  # fmt: skip
        values = "{%1, %2, %3, %4}" if len(parts) > 1 else "%1"
        for space, store in (("shared", "st.shared"), ("global", "st.global.cg")):
            local = space == "shared"
            text += _WRITE.format(
                space=space, width=width, unroll=UNROLL, store=f"{store}.{kind} [%0], {values};",
                letter="r" if local else "l", address="u32" if local else "u64",
                origin="shared_address(mine)" if local else "(u64)to", inputs='"r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)',
                finish="for (u32 i = threadIdx.x; i < span / 4; i += 1024) ((u32*)to)[i] = ((u32*)mine)[i];" if local else "",
            )  # fmt: skip
    text += _COPY
    for space, address, letter, origin, finish in (
        ("shared", "u32", "r", "shared_address(mine + slot)", "counters[blockIdx.x * blockDim.x + threadIdx.x] = mine[threadIdx.x];"),
        ("global", "u64", "l", "(u64)(counters + blockIdx.x * blockDim.x * own + slot)", ""),
    ):  # fmt: skip
        text += _ATOMIC.format(space=space, address=address, letter=letter, origin=origin, finish=finish)
    return text


def _kernel(name: str) -> Kernel:
    op, _, rest = name.partition("_")
    space, _, width = rest.partition("_")
    load = {"shared": "LDS", "ca": "LDG", "cg": "LDG"}.get(space, "LDG")
    store = "STS" if space == "shared" else "STG"
    wide = ".128" if width == "16" and space == "shared" else ""
    if op == "read":
        return Kernel(
            source=source(), name=name, holds=load + wide, at_least=UNROLL, also=("IADD3", "IMAD.IADD"), purity=0.7
        )
    if op == "write":
        return Kernel(source=source(), name=name, holds=store + wide, at_least=UNROLL, purity=0.7)
    if op == "copy":
        return Kernel(source=source(), name=name, holds="LDG", at_least=UNROLL, also=("STG",), purity=0.5)
    holds = "ATOMS" if space == "shared" else "REDG"
    return Kernel(source=source(), name=name, holds=holds, at_least=16, purity=0.7)


def _words(kilobytes: int, seed: int) -> torch.Tensor:
    """Random words on the GPU."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    count = kilobytes * 256
    return torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device="cuda", generator=generator)


def _low(total: int) -> int:
    return total & 0xFFFFFFFF


def read(level: str, name: str, width: int, kilobytes: int, seed: int) -> Outcome:
    """Reads of `width` bytes: the same bytes for every block (shared, l1), a part of its own, again and again (l2) or
    once (dram); or all of one buffer by every block (l2-same), where requests of several SMs for one line merge."""
    import torch

    code = _kernel(name)
    code.loop()
    sms = sm_count()
    chunk = THREADS * width * UNROLL
    if level in ("l2", "dram"):
        span = kilobytes * 1024 // sms // chunk * chunk
        memory, apart, count = _words(kilobytes, seed), span, 1 if level == "dram" else 64
    else:
        memory, apart, span = _words(kilobytes, seed), 0, kilobytes * 1024
        count = {"shared": 256, "l1": 256, "l2-same": 1}[level]
    sums = torch.zeros(sms * THREADS, dtype=torch.int32, device="cuda")
    clear = flusher() if level == "dram" else partial(touch, memory)
    shared = span if level == "shared" else 0
    # Blocks that all read one buffer begin at different places, or they would ask for the same line at once.
    turn = chunk if level == "l2-same" else 0
    arguments = [sums, memory, ctypes.c_uint64(apart), ctypes.c_uint32(span), count, turn]
    taken = run(code, arguments, grid=sms, block=THREADS, shared=shared, before=clear)
    found = sums.view(sms, THREADS).long().sum(1).cpu()
    wanted = [
        _low(int(memory[block * apart // 4 : block * apart // 4 + span // 4].sum(dtype=torch.int64)) * count)
        for block in (range(sms) if apart else [0] * 1)
    ]
    expected = torch.tensor(wanted * (1 if apart else sms))
    check = equal(found & 0xFFFFFFFF, expected, "blocks with a wrong sum of what they read")
    return Outcome(check=check, metrics=_rates(taken, level, span * count, sms))


def _rates(taken: Any, level: str, per_block: int, sms: int) -> dict[str, Sampled]:
    metrics = {
        "bandwidth": taken.series("B/clk/SM", lambda cycles: per_block / cycles),
        # Of the slowest block: where they share a path, blocks end at different times.
        "bandwidth_chip": taken.series("B/clk", lambda cycles: per_block * sms / cycles, slowest=True),
    }
    if level not in ("shared", "l1"):
        l2 = "flushed" if level == "dram" else "warm"
        metrics["time"] = taken.time(l2=l2, bytes_moved=float(per_block * sms))
    return metrics


def write(level: str, name: str, width: int, kilobytes: int, seed: int) -> Outcome:
    """Writes of `width` bytes, each block to a part of its own."""
    import torch

    code = _kernel(name)
    code.loop()
    sms = sm_count()
    chunk = THREADS * width * UNROLL
    local = level == "shared"
    span = kilobytes * 1024 if local else kilobytes * 1024 // sms // chunk * chunk
    count = {"shared": 256, "l2": 8, "dram": 1}[level]
    memory = torch.zeros(span // 4 * sms, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    clear = flusher() if level == "dram" else lambda: memory.fill_(-1)
    shared = span if local else 0
    arguments = [out, memory, ctypes.c_uint64(span), ctypes.c_uint32(span), count]
    taken = run(code, arguments, grid=sms, block=THREADS, shared=shared, before=clear)
    # Thread t writes its number to every access of its own, `width` bytes each.
    thread = torch.arange(THREADS, device="cuda").repeat_interleave(width // 4).repeat(span // width // THREADS)
    wanted = (torch.arange(sms, device="cuda")[:, None] * THREADS + 1 + thread[None]).int()
    wrong = int((memory.view(sms, -1) != wanted).sum())
    check = Check(float(wrong), 0.0, "words that hold something else")
    return Outcome(check=check, metrics=_rates(taken, level, span * count, sms))


def copy(level: str, kilobytes: int, seed: int) -> Outcome:
    """A copy in device memory; bytes read and bytes written both count."""
    import torch

    code = _kernel("copy_global_16")
    code.loop()
    sms = sm_count()
    chunk = THREADS * 16 * UNROLL
    span = kilobytes * 1024 // sms // chunk * chunk
    source_, target = _words(kilobytes, seed), torch.zeros(kilobytes * 256, dtype=torch.int32, device="cuda")
    arguments = [target, source_, ctypes.c_uint64(span), ctypes.c_uint32(span), 1]
    clear = flusher() if level == "dram" else None
    taken = run(code, arguments, grid=sms, block=THREADS, before=clear)
    done = span * sms // 4
    check = Check(float(int((source_[:done] != target[:done]).sum())), 0.0, "words that differ")
    return Outcome(check=check, metrics=_rates(taken, level, 2 * span, sms))


def atomics(space: str, own: bool, seed: int) -> Outcome:
    """Additions to a word of each thread's own, or all to one word; counted as atomic operations of threads."""
    import torch

    code = _kernel(f"atomic_{space}")
    code.loop()
    sms = sm_count()
    local = space == "shared"
    count = 16 if own or local else 4
    counters = torch.zeros(sms * THREADS, dtype=torch.int32, device="cuda")
    taken = run(code, [counters, int(own), count], grid=sms, block=THREADS, before=counters.zero_)
    each = count * 16
    wanted = torch.zeros(sms, THREADS, dtype=torch.int64)
    if own:
        wanted[:] = each
    elif local:
        wanted[:, 0] = each * THREADS
    else:
        wanted[0, 0] = each * THREADS * sms
    check = equal(counters.view(sms, THREADS).long(), wanted, "counters with a wrong sum")
    done = count * 16 * THREADS
    return Outcome(check=check, metrics={"throughput": taken.series("instr/clk/SM", lambda cycles: done / cycles)})


def probes(quick: bool = False) -> list[Probe]:
    """Reads of every level in both widths, writes, the copy, and atomics."""
    reads = [
        ("shared", "shared", _SHARED_KB), ("l1", "ca", _L1_KB), ("l2", "cg", _L2_OWN_KB), ("l2-same", "cg", _L2_SAME_KB),
        ("dram", "cg", _DRAM_KB),
    ]  # fmt: skip
    writes = [("shared", "shared", _SHARED_KB), ("l2", "global", _L2_OWN_KB), ("dram", "global", _DRAM_KB)]
    found = []

    def put(level: str, op: str, width: int, kilobytes: int, name: str, measure: Any) -> None:
        case: Case = {"level": level, "op": op, "width": width, "footprint_kb": kilobytes}
        found.append(Probe(case=case, kernels=(_kernel(name),), measure=measure))

    for level, space, size in reads:
        for width in (16,) if quick else (4, 16):
            name = f"read_{space}_{width}"
            put(level, "read", width, size, name, partial(read, level, name, width, size))
    for level, space, size in writes[: 1 if quick else None]:
        name = f"write_{space}_16"
        put(level, "write", 16, size, name, partial(write, level, name, 16, size))
    put("dram", "copy", 16, _DRAM_KB, "copy_global_16", partial(copy, "dram", _DRAM_KB))
    for level, space in (("shared", "shared"), ("l2", "global"))[: 1 if quick else None]:
        for op, own in (("atomic-add", True), ("atomic-add-same", False)):
            put(level, op, 4, 4, f"atomic_{space}", partial(atomics, space, own))
    return found
