"""What an SM core does with instructions (Huerta et al., 2503.20481), as far as a kernel can show it.

    raw-latency        cycles from an instruction to one that needs its result
    issue-rate         FFMA per cycle when all active warps share one sub-core (warp index % 4), or are spread over four
    bank-conflict      FFMA whose three sources lie in one register bank, with and without reuse bits, or in both
    stall-count        dependent FFMA whose stall count is set lower, or higher, than the compiler's
    memory-burst       cycles to issue so many independent loads from shared memory, with stall counts of 1
    instruction-cache  cycles of an FFMA in a loop of growing code

The cubins of the middle three are patched: single fields of 128-bit instructions, which are register numbers (bits 24
to 39) and the control word. Otherwise the compiler's stall counts would be measured.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_accel.errors import IncorrectResultError
from gpu_accel.workbench.experiment import Check

from . import alu, latency
from .alu_steps import STEPS as ALU_STEPS
from .compile import build
from .launch import launch_cubin
from .probe import LAUNCHES, PRELUDE, Kernel, Outcome, Probe, Sampled, close, run
from .sass import Function, Instruction, is_opcode

if TYPE_CHECKING:
    import torch

    from .compile import Binary

_ISSUE = (
    PRELUDE
    + """
extern "C" __global__ void __launch_bounds__(1024) issue(u64* stamps, float* values, float a, float b, int apart, int active, int passes) {
    int warp = threadIdx.x / 32;
    float x[4];
    #pragma unroll
    for (int c = 0; c < 4; c++) x[c] = values[threadIdx.x * 4 + c];
    __syncthreads();
    u64 begin = now(), end = begin + 1;
    if (warp % apart == 0 && warp / apart < active) {
        #pragma unroll 1
        for (int i = 0; i < passes; i++) {
            #pragma unroll
            for (int j = 0; j < 32; j++) {
                #pragma unroll
                for (int c = 0; c < 4; c++) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[c]) : "f"(a), "f"(b));
            }
        }
        end = now();
    }
    #pragma unroll
    for (int c = 0; c < 4; c++) values[threadIdx.x * 4 + c] = x[c];
    stamp(stamps, begin, end);
}
"""
)
ISSUE = Kernel(source=_ISSUE, name="issue", holds="FFMA", at_least=128)

# Two copies of either constant, side by side in an even and an odd register, so that a patch can choose the bank of a
# source and the result stays the same.
_BANKS = (
    PRELUDE
    + """
extern "C" __global__ void banks(u64* stamps, float* values, const float2* constants, int passes) {
    float x[8];
    #pragma unroll
    for (int c = 0; c < 8; c++) x[c] = values[threadIdx.x * 8 + c];
    float2 a = constants[0], b = constants[1];
    u64 begin = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {
        #pragma unroll
        for (int j = 0; j < 16; j++) {
            #pragma unroll
            for (int c = 0; c < 8; c++)
                asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(x[c]) : "f"(j % 2 ? a.x : a.y), "f"(j % 2 ? b.x : b.y));
        }
    }
    u64 end = now();
    #pragma unroll
    for (int c = 0; c < 8; c++) values[threadIdx.x * 8 + c] = x[c];
    stamp(stamps, begin, end);
}
"""
)
BANKS = Kernel(source=_BANKS, name="banks", holds="FFMA", at_least=128)

_BURST = """
extern "C" __global__ void burst_{count}(u64* stamps, u32* out, int zero, int passes) {{
    __shared__ u32 mine[2048];
    for (int i = threadIdx.x; i < 2048; i += blockDim.x) mine[i] = i;
    __syncthreads();
    u32 at = shared_address(mine) + threadIdx.x * 4, sum = 0;
    u64 spent = 0;
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {{
        u32 v[{room}];
        __syncthreads();
        u64 begin = now();
        {loads}
        u64 end = now();
        {uses}
        spent += end - begin;
        at += zero;
    }}
    out[threadIdx.x] = sum;
    stamp(stamps, 1, 1 + spent);
}}
"""
BURSTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_STEPS_PER_KB = 64  # instructions of 16 bytes
CODE_KB = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)

_CODE = """
extern "C" __global__ void code(u64* stamps, float* values, float a, float b, int passes) {{
    float x[4];
    #pragma unroll
    for (int c = 0; c < 4; c++) x[c] = values[threadIdx.x * 4 + c];
    u64 begin = 1;
    #pragma unroll 1
    for (int i = 0; i <= passes; i++) {{
        if (i == 1) begin = now();  // the first pass fetches the code
        {body}
    }}
    u64 end = now();
    #pragma unroll
    for (int c = 0; c < 4; c++) values[threadIdx.x * 4 + c] = x[c];
    stamp(stamps, begin, end);
}}
"""


@functools.cache
def burst_source() -> str:
    text = PRELUDE
    for count in BURSTS:
        loads = "".join(
            f'asm volatile("ld.shared.u32 %0, [%1 + {128 * i}];" : "=r"(v[{i}]) : "r"(at) : "memory");'
            for i in range(count)
        )
        uses = "".join(f"sum += v[{i}];" for i in range(count))
        text += _BURST.format(count=count, room=max(1, count), loads=loads, uses=uses)
    return text


def burst_kernel(count: int) -> Kernel:
    holds, least = ("LDS", count) if count else ("CS2R", 2)
    return Kernel(source=burst_source(), name=f"burst_{count}", holds=holds, at_least=least, purity=0.0)


@functools.cache
def code_source(kilobytes: int) -> str:
    """A loop of so much code; one asm statement is a kilobyte, for the compiler is slow with thousands of statements."""
    one = "".join(f"fma.rn.f32 %{i % 4}, %{i % 4}, %4, %5;" for i in range(_STEPS_PER_KB))
    outputs = ", ".join(f'"+f"(x[{c}])' for c in range(4))
    body = f'asm volatile("{one}" : {outputs} : "f"(a), "f"(b));\n' * kilobytes
    return PRELUDE + _CODE.format(body=body)


def code_kernel(kilobytes: int) -> Kernel:
    return Kernel(source=code_source(kilobytes), name="code", holds="FFMA", at_least=kilobytes * _STEPS_PER_KB)


# -- measuring


def _iterate(x: torch.Tensor, a: float, b: float, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = (x.double() * a + b).float()
    return x


def _random(count: int, seed: int) -> torch.Tensor:
    import torch

    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) / 2 + 0.5


def issue_rate(variant: str, warps: int, seed: int) -> Outcome:
    """FFMA of threads per cycle and SM with `warps` active warps."""
    import torch

    ISSUE.loop()
    apart, passes = (4 if variant == "one-sub-core" else 1), 240
    active = torch.arange(1024) // 32
    runs = (active % apart == 0) & (active // apart < warps)
    x = _random(4096, seed)
    values = x.cuda()
    taken = run(ISSUE, [values, 0.75, 0.2, apart, warps, passes], block=1024, before=lambda: values.copy_(x))
    # x is settled after some hundred of the 7680 steps.
    wanted = torch.where(runs[:, None], _iterate(x.view(1024, 4), 0.75, 0.2, 400), x.view(1024, 4))
    check = close(values.view(1024, 4), wanted, 1e-5, "max relative error, and idle warps untouched")
    work = passes * 128 * 32 * warps
    return Outcome(check=check, metrics={"throughput": taken.series("instr/clk/SM", lambda cycles: work / cycles)})


CHAIN = next(step for step in ALU_STEPS if step.name == "FFMA").kernels()[0]


@functools.cache
def patched(kernel: Kernel, variant: str) -> tuple[bytes, int]:
    """(cubin of a kernel with what its loop holds rewritten, how many): "stall-N", or of FFMA "no-conflict", "same-bank"
    or "same-bank-reuse"."""
    body = [one for one in kernel.loop().body if is_opcode(one, kernel.holds)]
    binary = build(kernel.source)
    changes = {one: _rewritten(one, variant) for one in body}
    return rewrite(binary, binary.functions[kernel.name], changes), len(body)


def _field(one: Instruction, bit: int) -> int:
    return one.encoding >> bit & 0xFF


def _rewritten(one: Instruction, variant: str) -> int:
    """Sources 0 and 1 (bits 24 and 32) moved into a bank, relative to the third source (bit 64). No register is reused,
    or those two; and the next instruction may follow in the next cycle: eight chains take turns, so that none waits for
    its own."""
    encoding, control = one.encoding, one.control
    if variant.startswith("stall-"):
        return dataclasses.replace(control, stall=int(variant[6:]), reuse=frozenset()).encode(encoding)
    third = _field(one, 64) % 2
    bank = 1 - third if variant == "no-conflict" else third
    reuse = frozenset({0, 1}) if variant == "same-bank-reuse" else frozenset()
    for bit in (24, 32):
        register = _field(one, bit)
        encoding = encoding & ~(0xFF << bit) | (register & ~1 | bank) << bit
    return dataclasses.replace(control, stall=1, reuse=reuse).encode(encoding)


def rewrite(binary: Binary, function: Function, changes: dict[Instruction, int]) -> bytes:
    """A cubin with some instructions replaced.

    Raises:
        IncorrectResultError: the function is not found in the cubin.
    """
    cubin = bytearray(binary.cubin)
    code = b"".join(one.encoding.to_bytes(16, "little") for one in function.instructions)
    start = cubin.find(code)
    if start < 0 or cubin.find(code, start + 1) >= 0:
        raise IncorrectResultError(f"the code of {function.name} is not once in its cubin as disassembled")
    for one, encoding in changes.items():
        place = start + one.address
        cubin[place : place + 16] = encoding.to_bytes(16, "little")
    return bytes(cubin)


def bank_conflict(variant: str, seed: int) -> Outcome:
    """Cycles of an FFMA of one warp, eight independent chains, by where its sources lie."""
    import torch

    x = _random(32 * 8, seed)
    wanted = x
    for _ in range(_PASSES * 128 // 8):  # the kernel multiplies the two constants and adds them to x
        wanted = (wanted.double() + 0.75 * 0.2).float()
    constants = torch.tensor([0.75, 0.75, 0.2, 0.2], device="cuda")
    found, timed = _run_patched(BANKS, variant, x, [constants])
    return Outcome(
        check=close(found, wanted, 1e-4, "max relative error of the patched kernel"), metrics={"latency": timed}
    )


def stall_count(stall: int, seed: int) -> Outcome:
    """Cycles of a dependent FFMA with that stall count, and which share of the results is then wrong."""
    x = _random(32, seed)
    a, b = -0.999, 1.7  # converges slowly, so that an old value of x shows in the result
    wanted = _iterate(x, a, b, _PASSES * alu.UNROLL)
    found, timed = _run_patched(CHAIN, f"stall-{stall}", x, [a, b], arrays=2)
    wrong = float(((found - wanted).abs() > 1e-3 * wanted.abs()).double().mean())
    rounding = close(found, wanted, 1e-3, "max relative error of the patched kernel")
    check = (
        rounding if stall >= 4 else Check(0.0, 1.0, "the kernel ended; whether its result is right is what is measured")
    )
    compared = Sampled(samples=(wrong,), unit="1", timing={"method": "compared with the same sums on the host"})
    return Outcome(check=check, metrics={"latency": timed, "wrong_fraction": compared})


_PASSES = 16


def _run_patched(
    kernel: Kernel, variant: str, x: torch.Tensor, more: list[Any], *, arrays: int = 1
) -> tuple[torch.Tensor, Sampled]:
    """(x after the patched kernel, cycles of one of its FFMA); it is passed `arrays` times, as input and output."""
    cubin, count = patched(kernel, variant)
    values = x.cuda()

    def cycles(passes: int) -> list[int]:
        arguments = [*[values] * arrays, *more, passes]
        return _launch_patched(cubin, kernel, arguments, block=32, before=lambda: values.copy_(x))

    few = cycles(_PASSES)
    found = values.cpu()
    # The difference to a longer run: the first pass, which fetches the code, cancels.
    pairs = zip(few, cycles(3 * _PASSES), strict=True)
    return found, _patched_series([(more - less) / (2 * _PASSES * count) for less, more in pairs], variant)


def _launch_patched(
    cubin: bytes, kernel: Kernel, arguments: list[Any], *, block: int, before: Callable[[], object]
) -> list[int]:
    """Cycles of the slowest warp in each timed launch.

    Raises:
        IncorrectResultError: a warp left no stamp.
    """
    import torch

    stamps = torch.zeros(1, block // 32, 2, dtype=torch.int64, device="cuda")
    taken = []
    for _ in range(LAUNCHES + 2):
        before()
        stamps.zero_()
        launch_cubin(cubin, kernel.name, [stamps, *arguments], block=block)
        if bool((stamps <= 0).any()):
            raise IncorrectResultError(f"{kernel.name}: a warp left no time stamp")
        taken.append(int((stamps[..., 1] - stamps[..., 0]).max()))
    return taken[2:]


def _patched_series(samples: list[float], variant: str) -> Sampled:
    return Sampled(samples=tuple(samples), unit="clk", timing={"method": "clock64", "patched": variant})


def memory_burst(variant: str, count: int, seed: int) -> Outcome:
    """Cycles between two readings of the clock with `count` loads from shared memory in between, by one warp or by one
    in each sub-core. The compiler puts 4 cycles between them; patched to 1, the hardware decides."""
    import torch

    code, passes = burst_kernel(count), 64
    threads = 128 if variant.endswith("four-sub-cores") else 32
    cubin = patched(code, "stall-1")[0] if count else build(code.source).cubin
    out = torch.zeros(threads, dtype=torch.int32, device="cuda")
    cycles = _launch_patched(cubin, code, [out, 0, passes], block=threads, before=lambda: out.fill_(-1))
    lane = torch.arange(threads)
    wanted = passes * sum((lane + 32 * i for i in range(count)), start=torch.zeros(threads, dtype=torch.int64))
    check = Check(float((out.cpu().long() != wanted).sum()), 0.0, "threads with a wrong sum")
    return Outcome(check=check, metrics={"latency": _patched_series([one / passes for one in cycles], "stall-1")})


def instruction_cache(kilobytes: int, seed: int) -> Outcome:
    """Cycles of an FFMA of one warp in a loop of so much code."""
    code = code_kernel(kilobytes)
    code.loop()
    passes = max(2, 512 // kilobytes)
    x = _random(128, seed)
    values = x.cuda()
    taken = run(code, [values, 0.75, 0.2, passes], before=lambda: values.copy_(x))
    wanted = _iterate(x, 0.75, 0.2, min(400, (passes + 1) * kilobytes * _STEPS_PER_KB // 4))  # settled long before
    check = close(values, wanted, 1e-5, "max relative error")
    steps = passes * kilobytes * _STEPS_PER_KB
    return Outcome(check=check, metrics={"latency": taken.series("clk", lambda cycles: cycles / steps)})


def raw_latency(variant: str, seed: int) -> Outcome:
    """The latency alone of what `instructions` and `latency` measure."""
    if variant in _MEMORY:
        return latency.chase(_MEMORY[variant], 32 * 1024, False, seed)
    step = next(step for step in ALU_STEPS if step.name == variant)
    found = step.measure(seed, among=alu.compiled_with(step, ALU_STEPS))
    return Outcome(check=found.check, metrics={"latency": found.metrics["latency"]})


_MEMORY = {"LDS": "ld.shared.u32", "LDG": "ld.global.ca.u64", "ATOMS": "atom.shared.add.u32"}


def probes(quick: bool = False) -> list[Probe]:
    """All findings, each with what it varies."""
    found = []

    def put(probe: str, variant: str, size: int, kernels: tuple[Kernel, ...], measure: Any) -> None:
        found.append(Probe(case={"probe": probe, "variant": variant, "size": size}, kernels=kernels, measure=measure))

    by_name: dict[str, alu.Step] = {step.name: step for step in ALU_STEPS}
    for variant in ("FFMA",) if quick else ("FFMA", "IADD3", "IMAD", "HFMA2", "DFMA", "MUFU.EX2"):
        step = by_name[variant]
        kernels = step.kernels(alu.compiled_with(step, ALU_STEPS))
        put("raw-latency", variant, 0, kernels, partial(raw_latency, variant))
    for variant, load in _MEMORY.items():
        put("raw-latency", variant, 0, (latency.kernel(load),), partial(raw_latency, variant))
    for variant, counts in (("one-sub-core", (1, 2, 4, 8)), ("four-sub-cores", (4, 8, 16, 32))):
        for warps in counts[-1:] if quick else counts:
            put("issue-rate", variant, warps, (ISSUE,), partial(issue_rate, variant, warps))
    for variant in ("no-conflict", "same-bank", "same-bank-reuse"):
        put("bank-conflict", variant, 0, (BANKS,), partial(bank_conflict, variant))
    for stall in (1, 2, 3, 4, 5):
        put("stall-count", "FFMA", stall, (CHAIN,), partial(stall_count, stall))
    for variant in ("LDS", "LDS-four-sub-cores"):
        for count in BURSTS[::5] if quick else BURSTS:
            put("memory-burst", variant, count, (burst_kernel(count),), partial(memory_burst, variant, count))
    for size in CODE_KB[:2] if quick else CODE_KB:
        put("instruction-cache", "FFMA", size, (code_kernel(size),), partial(instruction_cache, size))
    return found
