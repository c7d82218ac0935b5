"""Copies from global to shared memory: the TMA unit by boxes of a tensor and in one piece, cp.async, and plain loads.

Latency: one thread asks for a box and waits for it, again and again. Throughput: every block keeps one or four boxes in flight
and walks through its share of the tensor. Every box that arrives last in its place is compared with the tensor.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.workbench.experiment import Case, Check

from .latency import L2_BYTES, flusher, touch
from .launch import sm_count, tensor_map
from .probe import PRELUDE, Kernel, Outcome, Probe, Sampled, run

if TYPE_CHECKING:
    import torch

STAGES = 4  # boxes in flight of cp.async and plain loads
ROW = 1024  # elements of the innermost dimension of a 2-D tensor
PLANE = 256  # rows and columns of a 3-D tensor
_L2_MB, _DRAM_MB = 16, 1024
_LATENCY_LOADS = 512
_CP_THREADS = 128
BY_THREADS = ("cp.async", "load", "ldg")

_HELPERS = """
struct __align__(64) Map { u64 words[16]; };
__device__ __forceinline__ void barrier_init(u32 bar) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory"); }
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 bar, u32 phase) {
    asm volatile("{.reg .pred p;\\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@p bra DONE;\\nbra AGAIN;\\nDONE: }"
        :: "r"(bar), "r"(phase) : "memory");
}
"""
# `load(to, bar, index)` starts the copy of box `index`; `across` and `down` are boxes of a row and of a plane.
_LOADERS = {
    "tma1": """
        int x = index * across;
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];"
            :: "r"(to), "l"(&map), "r"(x), "r"(bar) : "memory");""",
    "tma2": """
        int x = index % across * wide, y = index / across * high;
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(bar) : "memory");""",
    "tma3": """
        int x = index % across * wide, y = index / across % down * high, z = index / across / down * deep;
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
            :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(bar) : "memory");""",
    "bulk": """
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            :: "r"(to), "l"(memory + (u64)index * bytes), "r"(bytes), "r"(bar) : "memory");""",
}
_PARAMETERS = "int across, int down, int wide, int high, int deep"
_LATENCY = """
extern "C" __global__ void latency_{name}(u64* stamps, char* out, const char* memory, const __grid_constant__ Map map, int bytes, int boxes, int count, {parameters}) {{
    extern __shared__ __align__(1024) char buffer[];
    __shared__ u64 barrier;
    u32 bar = shared_address(&barrier), to = shared_address(buffer);
    if (threadIdx.x == 0) barrier_init(bar);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u64 begin = 1, end = 1;
    if (threadIdx.x == 0) {{
        u32 phase = 0;
        int index = 0;
        begin = now();
        #pragma unroll 1
        for (int i = 0; i < count; i++) {{
            expect(bar, bytes);
            {load}
            wait(bar, phase);
            phase ^= 1;
            index += 17;
            if (index >= boxes) index -= boxes;
        }}
        end = now();
    }}
    __syncthreads();
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = buffer[i];
    stamp(stamps, begin, end);
}}
"""
_STREAM = """
extern "C" __global__ void stream_{name}(u64* stamps, char* out, const char* memory, const __grid_constant__ Map map, int bytes, int boxes, int count, int stages, {parameters}) {{
    extern __shared__ __align__(1024) char buffer[];
    __shared__ u64 barriers[8];
    if (threadIdx.x == 0) for (int s = 0; s < stages; s++) barrier_init(shared_address(barriers + s));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u64 begin = now();
    if (threadIdx.x == 0) {{
        #pragma unroll 1
        for (int i = 0; i < count + stages; i++) {{
            int s = i % stages;
            u32 bar = shared_address(barriers + s), to = shared_address(buffer) + s * bytes;
            if (i >= stages) wait(bar, (i / stages - 1) & 1);
            if (i < count) {{
                int index = (i * gridDim.x + blockIdx.x) % boxes;
                expect(bar, bytes);
                {load}
            }}
        }}
    }}
    __syncthreads();
    u64 end = now();
    for (int i = threadIdx.x; i < stages * bytes; i += blockDim.x) out[(u64)blockIdx.x * stages * bytes + i] = buffer[i];
    stamp(stamps, begin, end);
}}
"""
# The same walks by threads: 16 bytes each, `bytes` of a block at a time.
_CP_ASYNC = """
extern "C" __global__ void latency_{name}(u64* stamps, char* out, const char* memory, int bytes, int boxes, int count) {{
    extern __shared__ __align__(1024) char buffer[];
    u32 to = shared_address(buffer) + threadIdx.x * 16;
    int index = 0;
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < count; i++) {{
        const char* from = memory + (u64)index * bytes + threadIdx.x * 16;
        {one}
        index += 17;
        if (index >= boxes) index -= boxes;
    }}
    u64 end = now();
    __syncthreads();
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = buffer[i];
    stamp(stamps, begin, end);
}}
extern "C" __global__ void stream_{name}(u64* stamps, char* out, const char* memory, int bytes, int boxes, int count) {{
    extern __shared__ __align__(1024) char buffer[];
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < count; i++) {{
        int index = (i * gridDim.x + blockIdx.x) % boxes;
        u32 first = shared_address(buffer) + i % {stages} * bytes;
        {many}
    }}
    {drain}
    __syncthreads();
    u64 end = now();
    for (int i = threadIdx.x; i < {stages} * bytes; i += blockDim.x) out[(u64)blockIdx.x * {stages} * bytes + i] = buffer[i];
    stamp(stamps, begin, end);
}}
"""
_COPY_16 = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"({to}), "l"({at}) : "memory");'
_LOAD_16 = """{{ uint4 v;
            asm volatile("ld.global.cg.v4.u32 {{%0, %1, %2, %3}}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"({at}) : "memory");
            asm volatile("st.shared.v4.u32 [%4], {{%0, %1, %2, %3}};" :: "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"({to}) : "memory"); }}"""


def _each(one: str, per_thread: int = 8) -> str:
    where = {"to": "first + o", "at": "memory + (u64)index * bytes + o"}
    return (
        f"#pragma unroll {per_thread}\n        for (int o = threadIdx.x * 16; o < bytes; o += {_CP_THREADS * 16}) "
        + one.format(**where)
    )


def source() -> str:
    """Every kernel of this module."""
    text = PRELUDE + _HELPERS
    for name, load in _LOADERS.items():
        for form in (_LATENCY, _STREAM):
            # A label may stand once in a function, and the waits are inlined: PTX scopes it by the braces around.
            text += form.format(name=name, load=load, parameters=_PARAMETERS, stages=STAGES)
    commit = 'asm volatile("cp.async.commit_group;" ::: "memory");'
    done = 'asm volatile("cp.async.wait_group {};" ::: "memory");'
    own = {"to": "to", "at": "from"}
    text += _CP_ASYNC.format(
        name="cp_async", one=_COPY_16.format(**own) + commit + done.format(0),
        many=_each(_COPY_16) + "\n        " + commit + done.format(STAGES - 1), drain=done.format(0), stages=STAGES,
    )  # fmt: skip
    back = 'u32 seen; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(seen) : "r"(to) : "memory"); if (seen == 0x7fc01234u) index++;'
    # One load until its value may be read, which its store to shared memory waits for; nobody waits for the store.
    text += _CP_ASYNC.format(
        name="ldg", one=_LOAD_16.format(**own), many=_each(_LOAD_16), drain="", stages=STAGES
    )  # fmt: skip
    text += _CP_ASYNC.format(
        name="load", one=_LOAD_16.format(**own) + back, many=_each(_LOAD_16), drain="", stages=STAGES
    )
    return text


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What is copied at once: `box` in elements of 4 bytes, innermost first."""

    engine: str  # "tma", "bulk", "cp.async", "load" (to shared memory), "ldg" (to registers)
    box: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.box)

    @property
    def label(self) -> str:
        return "x".join(map(str, self.box)) if self.engine == "tma" else "1-D"

    @property
    def kernel_name(self) -> str:
        return {"tma": f"tma{len(self.box)}", "bulk": "bulk", "cp.async": "cp_async"}.get(self.engine, self.engine)

    def kernel(self, which: str) -> Kernel:
        holds = {"tma": "UTMALDG", "bulk": "UBLKCP", "cp.async": "LDGSTS"}.get(self.engine, "LDG")
        return Kernel(source=source(), name=f"{which}_{self.kernel_name}", holds=holds, at_least=1, purity=0.0)

    def tensor(self, megabytes: int, seed: int) -> torch.Tensor:
        """Distinct words, in the shape that the box is cut from; float32, so that a tensor map fits (never computed with)."""
        import torch

        count = megabytes * 2**18
        generator = torch.Generator(device="cuda").manual_seed(seed)
        words = torch.randint(1, 2**30, (count,), dtype=torch.int32, device="cuda", generator=generator).view(
            torch.float32
        )
        if self.engine != "tma" or len(self.box) == 1:
            return words
        return words.view(-1, ROW) if len(self.box) == 2 else words.view(-1, PLANE, PLANE)

    def boxes(self, tensor: torch.Tensor) -> int:
        return tensor.numel() * 4 // self.bytes

    def layout(self, tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
        """across, down, wide, high, deep; for one dimension `across` is the step."""
        if self.engine != "tma" or len(self.box) == 1:
            return (self.box[0], 1, 1, 1, 1)
        wide, high, deep = (*self.box, 1)[:3]
        return (tensor.shape[-1] // wide, tensor.shape[-2] // high, wide, high, deep)

    def cut(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """The words of one box, as they should arrive."""
        if self.engine != "tma" or len(self.box) == 1:
            size = math.prod(self.box)
            return tensor.view(-1)[index * size : (index + 1) * size]
        across, down, wide, high, deep = self.layout(tensor)
        x, rest = index % across * wide, index // across
        if len(self.box) == 2:
            return tensor[rest * high : (rest + 1) * high, x : x + wide].reshape(-1)
        y, z = rest % down * high, rest // down * deep
        return tensor[z : z + deep, y : y + high, x : x + wide].reshape(-1)

    def arguments(self, out: torch.Tensor, tensor: torch.Tensor, boxes: int, count: int, stages: int = 0) -> list[Any]:
        if self.engine in BY_THREADS:
            return [out, tensor, self.bytes, boxes, count]
        described = tensor_map(tensor, self.box) if self.engine == "tma" else bytes(128)
        depth = [stages] if stages else []
        return [out, tensor, described, self.bytes, boxes, count, *depth, *self.layout(tensor)]


def _same(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """Words that differ, as bits."""
    import torch

    return int((found.view(torch.int32) != wanted.view(torch.int32)).sum())


def latency(copy: Copy, where: str, seed: int) -> Outcome:
    """Cycles from asking for a box to having it."""
    import torch

    code = copy.kernel("latency")
    code.loop()
    tensor = copy.tensor(_L2_MB if where == "l2" else 4 * L2_BYTES // 2**20, seed)
    boxes = copy.boxes(tensor)
    out = torch.zeros(copy.bytes // 4, dtype=torch.float32, device="cuda")
    threads = copy.bytes // 16 if copy.engine in BY_THREADS else 32
    clear = flusher() if where == "dram" else partial(touch, tensor)

    def before() -> None:
        out.zero_()
        clear()

    taken = run(
        code, copy.arguments(out, tensor, boxes, _LATENCY_LOADS), block=threads, shared=copy.bytes, before=before
    )
    last = 17 * (_LATENCY_LOADS - 1) % boxes
    check = Check(float(_same(out, copy.cut(tensor, last))), 0.0, "words that arrived wrong")
    return Outcome(check=check, metrics={"latency": taken.series("clk", lambda cycles: cycles / _LATENCY_LOADS)})


def throughput(copy: Copy, where: str, ctas: int, stages: int, seed: int) -> Outcome:
    """Bytes per cycle and SM with `ctas` blocks that have `stages` boxes in flight each.

    The cycles end with the last box; the time of the launch also holds its begin and the boxes that are written out for
    the check, some 15 microseconds, so the rate that follows from it is the lower one.
    """
    import torch

    code = copy.kernel("stream")
    code.loop()
    sms = sm_count()
    tensor = copy.tensor(_L2_MB if where == "l2" else _DRAM_MB, seed)
    boxes = copy.boxes(tensor)
    moved = 2**30 if where == "dram" else 2**28
    count = max(2 * stages, min(boxes if where == "dram" else 10**9, moved // copy.bytes) // ctas)
    out = torch.zeros(ctas * stages * copy.bytes // 4, dtype=torch.float32, device="cuda")
    threads = _CP_THREADS if copy.engine in BY_THREADS else 32
    clear = flusher() if where == "dram" else partial(touch, tensor)
    arguments = copy.arguments(out, tensor, boxes, count, stages)
    taken = run(code, arguments, grid=ctas, block=threads, shared=stages * copy.bytes, before=clear)
    arrived = out.view(ctas, stages, -1)
    wrong = 0
    for block in {0, 1, ctas // 2, ctas - 1}:
        for back in range(1, stages + 1):
            turn = count - back
            wrong += _same(arrived[block, turn % stages], copy.cut(tensor, (turn * ctas + block) % boxes))
    check = Check(float(wrong), 0.0, "words that arrived wrong")
    together = max(1, ctas // sms)  # blocks of one SM, which run at the same time
    per_sm = count * copy.bytes * together
    metrics: dict[str, Sampled] = {"bandwidth": taken.series("B/clk/SM", lambda cycles: per_sm / cycles)}
    l2 = "flushed" if where == "dram" else "warm"
    metrics["time"] = taken.time(l2=l2, bytes_moved=float(count * ctas * copy.bytes))
    return Outcome(check=check, metrics=metrics)


BOXES = (
    (256,), (16, 16), (32, 32), (64, 16), (64, 64), (256, 16), (16, 16, 16), (64, 64, 1), (256, 16, 1), (16, 256, 1),
    (4, 4, 256),
)  # fmt: skip
BULK_KB = (1, 2, 4, 8, 16)


def probes(quick: bool = False) -> list[Probe]:
    """Latencies from both places, then throughput from DRAM (and L2 for the largest boxes) with one and four blocks an SM."""
    latencies = [Copy(engine="tma", box=box) for box in ((4,), (32,), (16, 16), (64, 64))]
    latencies += [Copy(engine="bulk", box=(words,)) for words in (4, 32, 256)]
    latencies += [Copy(engine=engine, box=(words,)) for engine in BY_THREADS for words in (4, 128)]
    streams = [Copy(engine="tma", box=box) for box in BOXES] + [Copy(engine="bulk", box=(kb * 256,)) for kb in BULK_KB]
    streams += [Copy(engine="cp.async", box=(kb * 256,)) for kb in (4, 16)] + [
        Copy(engine="load", box=(kb * 256,)) for kb in (4, 16)
    ]
    found = []

    def put(copy: Copy, where: str, ctas: int, stages: int = 1) -> None:
        case: Case = {
            "engine": copy.engine, "box": copy.label, "bytes": copy.bytes, "source": where, "ctas": ctas, "in_flight": stages,
        }  # fmt: skip
        which = "latency" if ctas == 1 else "stream"
        measure = partial(latency, copy, where) if ctas == 1 else partial(throughput, copy, where, ctas, stages)
        found.append(Probe(case=case, kernels=(copy.kernel(which),), measure=measure))

    for copy in latencies[2:3] if quick else latencies:
        for where in ("l2", "dram"):
            put(copy, where, 1)
    for copy in streams[4:5] if quick else streams:
        if copy.engine in ("tma", "bulk"):
            put(copy, "dram", 132)
            put(copy, "dram", 528)
        if copy.bytes == 16384 or copy.engine != "tma":
            put(copy, "dram", 132, STAGES)
        if copy.bytes == 16384 and copy.box[-1] < PLANE:  # 256 planes are more than the cache holds
            put(copy, "l2", 132, STAGES)
    return found
