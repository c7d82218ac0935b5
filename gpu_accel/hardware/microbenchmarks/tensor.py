"""Latency and throughput of the matrix instructions: wgmma of a warpgroup and mma.sync of a warp.

    latency      one warpgroup (or warp); every instruction adds to the accumulators of the one before it, and nothing
                 waits in between: cycles from one to the next
    completion   the same with a wait for the result after every instruction
    throughput   all SMs, two warpgroups (or 32 warps) each, in floating-point operations per cycle and SM; what a sparse
                 instruction skips counts too, as in the vendor's figures

Operands lie in shared memory without swizzle, as tiles of 8 rows of 16 bytes, or in registers; four different tiles take
turns, so that data toggle as in a real product. The result is compared with a float64 product of the same numbers.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.workbench.experiment import Case

from .launch import launch, sm_count
from .probe import PRELUDE, Kernel, Outcome, Probe, Sampled, close, equal, run, slope, worst

if TYPE_CHECKING:
    import torch

SLOTS = 4  # tiles that take turns
ROW = 32  # bytes of a row of A, of every dtype
META = 0x44444444  # sparse: the first two of every four elements are there
_CORE = 128  # bytes of 8 rows of 16
_SUSTAINED_LAUNCHES = 25  # some 100 ms at full load before the timed ones, for the clock to settle

# dtype: (PTX name, bytes, SASS name of wgmma, of mma.sync)
_TYPES = {
    "bf16": ("bf16", 2, "HGMMA", "HMMA"),
    "fp16": ("f16", 2, "HGMMA", "HMMA"),
    "tf32": ("tf32", 4, "HGMMA", "HMMA"),
    "e4m3": ("e4m3", 1, "QGMMA", ""),
    "e5m2": ("e5m2", 1, "QGMMA", ""),
    "int8": ("s8", 1, "IGMMA", "IMMA"),
}
# Largest error relative to the largest value: float32 sums are cut, not rounded, in the tensor cores; those of 8-bit
# floats keep about 13 bits.
_BOUNDS = {"bf16": 1e-4, "fp16": 1e-4, "tf32": 1e-4, "e4m3": 2e-2, "e5m2": 2e-2, "int8": 0.0}
_BOUND_F16 = 2e-2  # sums kept in float16

_WGMMA = """
extern "C" __global__ void __launch_bounds__({threads}) {name}(u64* stamps, u32* out, const uint4* a, const uint4* b, u32 meta, int passes) {{
    extern __shared__ __align__(1024) char tiles[];
    for (int i = threadIdx.x; i < {a_vectors}; i += blockDim.x) ((uint4*)tiles)[i] = a[i];
    for (int i = threadIdx.x; i < {b_vectors}; i += blockDim.x) ((uint4*)tiles)[{a_vectors} + i] = b[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u32 base = shared_address(tiles);
    {operands}
    {word} d[{registers}];
    #pragma unroll
    for (int i = 0; i < {registers}; i++) d[i] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {{
        {steps}
    }}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    u64 end = now();
    #pragma unroll
    for (int i = 0; i < {registers}; i++) {{
        u32 bits;
        asm volatile("mov.b32 %0, %1;" : "=r"(bits) : "{letter}"(d[i]));
        out[(blockIdx.x * blockDim.x + threadIdx.x) * {registers} + i] = bits;
    }}
    stamp(stamps, begin, end);
}}
"""
_COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");'

_MMA = """
extern "C" __global__ void __launch_bounds__({threads}) {name}(u64* stamps, u32* out, const u32* a, const u32* b, u32 meta, int passes) {{
    int lane = threadIdx.x % 32;
    u32 x[{slots}][4], y[{slots}][{b_registers}];
    {word} d[{chains}][{registers}];
    #pragma unroll
    for (int s = 0; s < {slots}; s++) {{
        #pragma unroll
        for (int r = 0; r < 4; r++) x[s][r] = a[(s * 4 + r) * 32 + lane];
        #pragma unroll
        for (int r = 0; r < {b_registers}; r++) y[s][r] = b[(s * {b_registers} + r) * 32 + lane];
    }}
    #pragma unroll
    for (int c = 0; c < {chains}; c++)
        #pragma unroll
        for (int r = 0; r < {registers}; r++) d[c][r] = 0;
    __syncthreads();
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {{
        #pragma unroll
        for (int j = 0; j < {unroll}; j++)
            #pragma unroll
            for (int c = 0; c < {chains}; c++) {{ const int s = j % {slots}; {step} }}
    }}
    u64 end = now();
    #pragma unroll
    for (int c = 0; c < {chains}; c++)
        #pragma unroll
        for (int r = 0; r < {registers}; r++) {{
            u32 bits;
            asm volatile("mov.b32 %0, %1;" : "=r"(bits) : "{letter}"(d[c][r]));
            out[((blockIdx.x * blockDim.x + threadIdx.x) * {chains} + c) * {registers} + r] = bits;
        }}
    stamp(stamps, begin, end);
}}
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One instruction: `n` columns, `dtype` of the operands, where A lies, whether A is 2:4 sparse."""

    n: int
    dtype: str
    accumulator: str = "f32"  # "f32", "f16" or "s32"
    a: str = "shared"  # "shared" or "registers"
    sparse: bool = False
    instruction: str = "wgmma"

    @property
    def m(self) -> int:
        return 64 if self.instruction == "wgmma" else 16

    @property
    def k(self) -> int:
        """Elements of a row, those that a sparse A leaves out included."""
        return ROW // _TYPES[self.dtype][1] * (2 if self.sparse else 1)

    @property
    def b_row(self) -> int:
        """Bytes of a column of B."""
        return ROW * (2 if self.sparse else 1)

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return (
            self.m * self.n // (128 if self.instruction == "wgmma" else 32) // (2 if self.accumulator == "f16" else 1)
        )

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def chains(self) -> int:
        """Independent sums of a warp in the throughput kernel of mma.sync."""
        return 4

    @property
    def unroll(self) -> int:
        """Instructions in one pass of the loop. Large ones hide the loop behind them and take long to compile."""
        return SLOTS if self.n >= 64 else 16

    def ptx(self) -> str:
        kind = _TYPES[self.dtype][0]
        sparse = ".sp" if self.sparse else ""
        shape = f"m{self.m}n{self.n}k{self.k}"
        if self.instruction == "wgmma":
            return f"wgmma.mma_async{sparse}.sync.aligned.{shape}.{self.accumulator}.{kind}.{kind}"
        ordered = ".sp::ordered_metadata" if self.sparse else ""
        return f"mma{ordered}.sync.aligned.{shape}.row.col.{self.accumulator}.{kind}.{kind}.{self.accumulator}"

    def sass(self) -> str:
        if self.instruction != "wgmma":
            return _TYPES[self.dtype][3]
        return f"{_TYPES[self.dtype][2]}{'.SP' if self.sparse else ''}.64x{self.n}x{self.k}"

    # -- sources

    def source(self) -> str:
        if self.instruction == "wgmma":
            kernels = (("latency", 128, ""), ("throughput", 256, _COMMIT + _WAIT), ("completion", 128, None))
            return PRELUDE + "".join(self._wgmma(name, threads, after) for name, threads, after in kernels)
        made = (("latency", 32, 1, self.unroll), ("throughput", 1024, self.chains, SLOTS))
        return PRELUDE + "".join(self._mma(name, threads, chains, unroll) for name, threads, chains, unroll in made)

    def _word(self) -> tuple[str, str]:
        return ("float", "f") if self.accumulator == "f32" else ("u32", "r")

    def _wgmma(self, name: str, threads: int, after: str | None) -> str:
        """`after`: what follows the instructions of a pass; None waits after each."""
        word, letter = self._word()
        in_registers = self.a == "registers"
        count = self.registers
        listed = ", ".join(f"%{i}" for i in range(count))
        outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
        at = count
        if in_registers:
            left, at = "{" + ", ".join(f"%{i}" for i in range(at, at + 4)) + "}", at + 4
        else:
            left, at = f"%{at}", at + 1
        right, at = f"%{at}", at + 1
        meta = ""
        if self.sparse:
            meta, at = f", %{at}, 0", at + 1
        tail = "1" if self.dtype == "int8" else "1, 1, 1"
        if self.dtype in ("bf16", "fp16"):
            tail += ", 0" if in_registers else ", 0, 0"
        text = f"{self.ptx()} {{{listed}}}, {left}, {right}{meta}, {tail};"
        steps = []
        for j in range(self.unroll):
            slot = j % SLOTS
            inputs = ", ".join(f'"r"(a{slot}_{r})' for r in range(4)) if in_registers else f'"l"(a{slot})'
            inputs += f', "l"(b{slot})' + (', "r"(meta)' if self.sparse else "")
            steps.append(f'asm volatile("{text}" : {outputs} : {inputs});')
        waited = _COMMIT + _WAIT
        body = waited.join(steps) + waited if after is None else "\n        ".join(steps) + after
        a_bytes = 0 if in_registers else SLOTS * self.m * ROW
        b_tile = self.n * self.b_row
        declared = []
        for slot in range(SLOTS):
            if in_registers:
                declared += [
                    f"u32 a{slot}_{r} = ((const u32*)a)[{slot * 4 + r} * 128 + threadIdx.x % 128];" for r in range(4)
                ]
            else:
                declared.append(f"u64 a{slot} = {_descriptor(f'base + {slot * self.m * ROW}', 2 * _CORE)};")
            declared.append(
                f"u64 b{slot} = {_descriptor(f'base + {a_bytes + slot * b_tile}', self.b_row // 16 * _CORE)};"
            )
        return _WGMMA.format(
            threads=threads, name=name, a_vectors=a_bytes // 16, b_vectors=SLOTS * b_tile // 16, word=word, letter=letter,
            operands="\n    ".join(declared), registers=count, steps=body,
        )  # fmt: skip

    def _mma(self, name: str, threads: int, chains: int, unroll: int) -> str:
        word, letter = self._word()
        count, b_registers = self.registers, self.b_row // 16
        numbers = iter(range(100))
        d = "{" + ", ".join(f"%{next(numbers)}" for _ in range(count)) + "}"
        left = "{" + ", ".join(f"%{next(numbers)}" for _ in range(4)) + "}"
        right = "{" + ", ".join(f"%{next(numbers)}" for _ in range(b_registers)) + "}"
        tail = f", %{next(numbers)}, 0" if self.sparse else ""
        outputs = ", ".join(f'"+{letter}"(d[c][{i}])' for i in range(count))
        inputs = ", ".join([f'"r"(x[s][{i}])' for i in range(4)] + [f'"r"(y[s][{i}])' for i in range(b_registers)])
        inputs += ', "r"(meta)' if self.sparse else ""
        step = f'asm volatile("{self.ptx()} {d}, {left}, {right}, {d}{tail};" : {outputs} : {inputs});'
        return _MMA.format(
            threads=threads, name=name, slots=SLOTS, b_registers=b_registers, word=word, letter=letter, chains=chains,
            registers=count, unroll=unroll, step=step,
        )  # fmt: skip

    def kernels(self) -> tuple[Kernel, ...]:
        names = ("latency", "throughput", "completion") if self.instruction == "wgmma" else ("latency", "throughput")
        # Half of the timed loop of a small wgmma with registers may be moves; what is unexpected shows in the count.
        also = ("WARPGROUP", "R2UR", "UMOV", "ULOP3", "USHF", "WARPSYNC")
        one = Kernel(source=self.source(), name="", holds=self.sass(), at_least=self.unroll, also=also, purity=0.5)
        return tuple(replace(one, name=name) for name in names)

    @property
    def shared_bytes(self) -> int:
        if self.instruction != "wgmma":
            return 0
        return SLOTS * (self.n * self.b_row + (self.m * ROW if self.a == "shared" else 0))


def _descriptor(address: str, group: int) -> str:
    """Of a tile without swizzle whose 16-byte columns lie 128 bytes apart and whose groups of 8 rows lie `group` apart."""
    return f"((u64)((({address}) & 0x3ffff) >> 4) | {_CORE >> 4}ull << 16 | {group >> 4}ull << 32)"


# -- data


def operands(shape: Shape, data: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A of (slots, m, row bytes), B of (slots, n, row bytes)) as bytes; zeros, or numbers that the dtype holds exactly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, row in ((shape.m, ROW), (shape.n, shape.b_row)):
        size = (SLOTS, rows, row // _TYPES[shape.dtype][1])
        if shape.dtype == "int8":
            values = torch.randint(-128, 128, size, generator=generator).to(torch.int8)
        else:
            scale = 1 / 64 if shape.accumulator == "f16" and shape.dtype == "fp16" else 1 / 8
            # tf32 keeps 10 bits of a float32, so 7 of them are exact.
            kind = {
                "bf16": "bfloat16",
                "fp16": "float16",
                "tf32": "bfloat16",
                "e4m3": "float8_e4m3fn",
                "e5m2": "float8_e5m2",
            }
            values = (torch.randn(size, generator=generator) * scale).to(getattr(torch, kind[shape.dtype]))
            if shape.dtype == "tf32":
                values = values.float()
        if data == "zeros":
            values = torch.zeros_like(values)
        found.append(values.contiguous().view(torch.uint8))
    return found[0], found[1]


def numbers(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Bytes as float64 numbers."""
    import torch

    kind = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2, "int8": torch.int8,
    }[dtype]  # fmt: skip
    return raw.view(kind).to(torch.float64)


def truth(shape: Shape, a: torch.Tensor, b: torch.Tensor, times: int) -> torch.Tensor:
    """`times` / SLOTS times the sum of the products of all slots, (m, n) in float64."""
    import torch

    left, right = numbers(a, shape.dtype), numbers(b, shape.dtype)
    if shape.sparse:  # two stored elements stand for four, of which they are the first two
        full = torch.zeros(*left.shape[:2], left.shape[2] * 2, dtype=torch.float64)
        full.view(*left.shape[:2], -1, 4)[..., :2] = left.view(*left.shape[:2], -1, 2)
        left = full
    return torch.einsum("smk,snk->mn", left, right) * (times // SLOTS)


def tiled(raw: torch.Tensor) -> torch.Tensor:
    """(slots, rows, bytes) in the order of shared memory: groups of 8 rows, in them columns of 16 bytes."""
    slots, rows, row = raw.shape
    return raw.view(slots, rows // 8, 8, row // 16, 16).permute(0, 1, 3, 2, 4).contiguous()


def fragments(raw: torch.Tensor, warps: int) -> torch.Tensor:
    """A (slots, 16 * warps, 32) in the order of registers: (slots, 4 registers, warps, 32 lanes) of 4 bytes."""
    slots = raw.shape[0]
    # row = 16 * warp + 8 * (register & 1) + lane / 4, byte = 16 * (register >> 1) + 4 * (lane % 4)
    view = raw.view(slots, warps, 2, 8, 2, 4, 4)  # slot, warp, half, lane / 4, column half, lane % 4, byte
    return view.permute(0, 4, 2, 1, 3, 5, 6).contiguous()


def columns(raw: torch.Tensor) -> torch.Tensor:
    """B of mma.sync (slots, 8, row bytes) in the order of registers: (slots, registers, 32 lanes) of 4 bytes."""
    slots, n, row = raw.shape
    return raw.view(slots, n, row // 16, 4, 4).permute(0, 2, 1, 3, 4).contiguous()


def gather(shape: Shape, out: torch.Tensor, warpgroup: int = 4) -> torch.Tensor:
    """Accumulators (copies, threads of one, registers) as matrices (copies, m, n) in float64."""
    import torch

    copies = out.shape[0]
    warps = shape.m // 16
    if shape.accumulator == "f16":  # a register holds two neighbours of a row
        values = out.contiguous().view(torch.float16).to(torch.float64)
    elif shape.accumulator == "f32":
        values = out.view(torch.float32).to(torch.float64)
    else:
        values = out.to(torch.float64)
    # Per thread: n / 8 blocks, rows 0 and 8, two neighbours.
    view = values.view(copies, warps, 8, 4, shape.n // 8, 2, 2)
    # copy, warp, half (row + 8), lane / 4, block, lane % 4, neighbour
    return view.permute(0, 1, 5, 2, 4, 3, 6).reshape(copies, shape.m, shape.n)


# -- measuring


def _placed(shape: Shape, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands on the GPU, in the order in which the kernels read them."""
    if shape.instruction != "wgmma":
        return fragments(a, 1).cuda(), columns(b).cuda()
    left = fragments(a, 4) if shape.a == "registers" else tiled(a)
    return left.cuda(), tiled(b).cuda()


def _passes(shape: Shape, cycles: float) -> int:
    """Passes of the throughput kernel's loop that take about so many cycles."""
    of_one = max(4.0, shape.flops / {4: 2048, 2: 4096, 1: 8192}[_TYPES[shape.dtype][1]])
    return max(4, int(cycles / (shape.unroll * (2 if shape.instruction == "wgmma" else 32) * of_one)))


_LOAD_CYCLES = 4e6  # some 2 ms


def load(shape: Shape, data: str, seed: int) -> Callable[[], None]:
    """A call that keeps all SMs at one instruction for some 2 ms: for the experiment `energy`."""
    import torch

    kernel = next(one for one in shape.kernels() if one.name == "throughput")
    kernel.loop()
    left, right = _placed(shape, *operands(shape, data, seed))
    sms, threads = sm_count(), 256 if shape.instruction == "wgmma" else 1024
    chains = 1 if shape.instruction == "wgmma" else shape.chains
    stamps = torch.zeros(sms, threads // 32, 2, dtype=torch.int64, device="cuda")
    out = torch.zeros(sms * threads * chains * shape.registers, dtype=torch.int32, device="cuda")
    arguments = [stamps, out, left, right, ctypes.c_uint32(META), _passes(shape, _LOAD_CYCLES)]
    return lambda: launch(
        kernel.source, kernel.name, arguments, grid=sms, block=threads, shared=shape.shared_bytes
    )  # fmt: skip


def load_flops(shape: Shape) -> float:
    """Operations of one call of `load` on the current device."""
    teams = 2 if shape.instruction == "wgmma" else 32
    return float(sm_count() * teams * _passes(shape, _LOAD_CYCLES) * shape.unroll * shape.flops)


def measure(shape: Shape, data: str, seed: int) -> Outcome:
    """Latency and throughput; from n = 64 on, and of mma.sync, the rate is that under sustained load."""
    import torch

    by_name = {kernel.name: kernel for kernel in shape.kernels()}
    for kernel in by_name.values():
        kernel.loop()
    a, b = operands(shape, data, seed)
    wide = shape.instruction == "wgmma"
    left, right = _placed(shape, a, b)
    sms = sm_count()
    threads = {"latency": 128, "throughput": 256, "completion": 128} if wide else {"latency": 32, "throughput": 1024}
    chains = {"latency": 1, "throughput": 1 if wide else shape.chains, "completion": 1}
    out = torch.zeros(
        sms * threads["throughput"] * chains["throughput"] * shape.registers, dtype=torch.int32, device="cuda"
    )
    arguments: list[Any] = [out, left, right, ctypes.c_uint32(META)]
    checks = []
    # Every wgmma of a pass adds; of mma.sync a chain gets all of them alone and SLOTS where there are several.
    for name, kernel in by_name.items():
        grid = 2 if name == "throughput" else 1
        out.fill_(-1)
        stamps = torch.empty(grid, threads[name] // 32, 2, dtype=torch.int64, device="cuda")
        launch(kernel.source, name, [stamps, *arguments, 1], grid=grid, block=threads[name], shared=shape.shared_bytes)
        lanes = 128 if wide else 32
        copies = grid * threads[name] // lanes
        used = out[: copies * lanes * chains[name] * shape.registers].cpu()
        if wide:
            found = gather(shape, used.view(copies, lanes, shape.registers))
        else:
            view = (
                used.view(copies, lanes, chains[name], shape.registers)
                .transpose(1, 2)
                .reshape(-1, lanes, shape.registers)
            )
            found = gather(shape, view)
        adds = shape.unroll if chains[name] == 1 else SLOTS
        wanted = truth(shape, a, b, adds)[None].expand_as(found)
        what = f"{shape.ptx()}, {name}"
        bound = _BOUND_F16 if shape.accumulator == "f16" else _BOUNDS[shape.dtype]
        checks.append(
            close(found, wanted, bound, f"max relative error of {what}")
            if bound
            else equal(found, wanted, f"wrong elements of {what}")
        )
    metrics: dict[str, Sampled] = {}
    for name in ("latency", "completion"):
        if name in by_name:
            call = slope(
                by_name[name], lambda passes: [*arguments, passes], short=4, long=36, steps=shape.unroll,
                block=threads[name], shared=shape.shared_bytes, busy_ms=5,
            )  # fmt: skip
            metrics[name] = call
    loaded = not wide or shape.n >= 64
    passes = _passes(shape, 6e6 if loaded else 2e6)  # the time also holds the writing of the accumulators, some 50 us
    taken = run(
        by_name["throughput"], [*arguments, passes], grid=sms, block=threads["throughput"], shared=shape.shared_bytes,
        untimed=_SUSTAINED_LAUNCHES if loaded else 2, busy_ms=5,
    )  # fmt: skip
    per_block = passes * shape.unroll * shape.flops * (2 if wide else 32)
    metrics["throughput"] = taken.series("flop/clk/SM", lambda cycles: per_block / cycles)
    mode = "sustained" if loaded else "burst"
    metrics["time"] = replace(
        taken.time(l2="warm", flops=float(per_block * sms)),
        timing={"method": "events", "calls": 1, "l2": "warm", "mode": mode},
    )
    return Outcome(check=worst(*checks), metrics=metrics)


def shapes(quick: bool = False) -> list[tuple[Shape, str]]:
    """(instruction, data) of every case."""
    wgmma = [
        Shape(n=n, dtype="bf16", a=a) for n in (8, 16, 32, 64, 128, 256) for a in ("shared", "registers")
    ] + [
        Shape(n=256, dtype=dtype, accumulator=accumulator, a=a)
        for dtype, accumulator in (
            ("fp16", "f32"), ("fp16", "f16"), ("tf32", "f32"), ("e4m3", "f32"), ("e4m3", "f16"), ("e5m2", "f32"), ("int8", "s32"),
        )
        for a in ("shared", "registers")
    ] + [
        Shape(n=256, dtype=dtype, accumulator=accumulator, a=a, sparse=True)
        for dtype, accumulator in (("fp16", "f32"), ("e4m3", "f32"), ("int8", "s32"))
        for a in ("shared", "registers")
    ]  # fmt: skip
    mma = [
        Shape(n=8, dtype=dtype, accumulator=accumulator, a="registers", instruction="mma.sync", sparse=sparse)
        for dtype, accumulator, sparse in (
            ("bf16", "f32", False), ("fp16", "f32", False), ("fp16", "f16", False), ("tf32", "f32", False),
            ("int8", "s32", False), ("fp16", "f32", True),
        )
    ]  # fmt: skip
    if quick:
        wgmma = [s for s in wgmma if s.n == 256 and s.a == "shared" and s.dtype in ("bf16", "e4m3") and not s.sparse]
        mma = mma[:1]
    found = [(shape, data) for shape in wgmma + mma for data in ("zeros", "random")]
    return [(s, d) for s, d in found if d == "random" or s.instruction == "wgmma" and (s.n in (8, 64, 128, 256))]


def probes(quick: bool = False) -> list[Probe]:
    """Every instruction, on zeros and on random numbers."""
    found = []
    for shape, data in shapes(quick):
        case: Case = {
            "instruction": shape.instruction, "n": shape.n, "k": shape.k, "dtype": shape.dtype,
            "accumulator": shape.accumulator, "a": shape.a, "sparse": shape.sparse, "data": data,
        }  # fmt: skip
        found.append(Probe(case=case, kernels=shape.kernels(), measure=partial(measure, shape, data)))
    return found
