"""Latency and throughput of arithmetic instructions.

Latency: one warp, every instruction needs the result of the one before. Throughput: 32 warps on every SM with four
independent chains a thread, counted as instructions of threads per cycle and SM (an FFMA unit for each of 128 lanes
gives 128). Some chains take two instructions a step (a conversion there and back); then the figures are for one of the
two, on average.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .launch import launch, sm_count
from .probe import PRELUDE, Kernel, Outcome, Probe, Sampled, close, equal, run, slope, worst

if TYPE_CHECKING:
    import torch

UNROLL = 128  # steps in one pass of the loop
CHAINS = 4  # independent chains a thread, in the throughput kernel
_WARPS = 32
_SHORT, _LONG, _THROUGHPUT = 8, 40, 96  # passes of the loop; the code is fetched in the first
_C_TYPES = {"float": ("f", ctypes.c_float), "double": ("d", ctypes.c_double), "u32": ("r", ctypes.c_uint32)}

_CHAIN = """
extern "C" __global__ void {kernel}(u64* stamps, const {type}* values, {type}* out, {type} a, {type} b, int passes) {{
    {type} x[{chains}];
    int first = (blockIdx.x * blockDim.x + threadIdx.x) * {chains};
    #pragma unroll
    for (int c = 0; c < {chains}; c++) x[c] = values[first + c];
    __syncthreads();
    u64 start = now();
    #pragma unroll 1
    for (int i = 0; i < passes; i++) {{
        #pragma unroll
        for (int j = 0; j < {steps}; j++) {{
            #pragma unroll
            for (int c = 0; c < {chains}; c++) {{ {step} }}
        }}
    }}
    u64 end = now();
    #pragma unroll
    for (int c = 0; c < {chains}; c++) out[first + c] = x[c];
    stamp(stamps, start, end);
}}
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One link of a chain: x = f(x, a, b).

    Args:
        name: what the case is called, after SASS.
        type: C type of x, a and b: "float", "double" or "u32".
        code: C++ that replaces x[c]; PTX in it where the instruction must not be left to the compiler.
        holds: the SASS instruction that is counted.
        count: how many of it one step takes.
        also: other opcodes in a step.
        a, b: the constants, as numbers of the type.
        model: the same on CPU tensors, in float64 or int64 where that is exact enough.
        draw: x at the start, from a generator and a count.
        bound: largest error allowed, relative to the largest value; 0 means equality.
        purity: share of the loop that must be what is counted.
    """

    name: str
    type: str
    code: str
    holds: str
    model: Callable[[Any, Any, Any], Any]
    draw: Callable[[torch.Generator, int], torch.Tensor]
    count: int = 1
    also: tuple[str, ...] = ()
    a: float = 0.0
    b: float = 0.0
    bound: float = 0.0
    purity: float = 0.9

    helpers: ClassVar[str] = ""  # CUDA C++ that `code` calls
    variant: ClassVar[str] = ""  # tells kernels of one name apart

    @property
    def label(self) -> str:
        """The end of its kernels' names."""
        return re.sub(r"\W", "_", self.name) + self.variant

    def code_of_kernels(self) -> str:
        shared = {"type": self.type, "step": self.code}
        return _CHAIN.format(kernel=f"latency_{self.label}", chains=1, steps=UNROLL, **shared) + _CHAIN.format(
            kernel=f"throughput_{self.label}", chains=CHAINS, steps=UNROLL // CHAINS, **shared
        )

    def kernels(self, among: tuple[Step, ...] = ()) -> tuple[Kernel, Kernel]:
        """(latency, throughput), compiled together with those of other steps."""
        shared: dict[str, Any] = {"holds": self.holds, "at_least": self.least, "also": self.also, "purity": self.purity}
        source = source_of(among or (self,))
        return (
            Kernel(source=source, name=f"latency_{self.label}", **shared),
            Kernel(source=source, name=f"throughput_{self.label}", **shared),
        )

    @property
    def least(self) -> int:
        """How many of `holds` one pass of the loop has."""
        return UNROLL * self.count

    def measure(self, seed: int, among: tuple[Step, ...] = ()) -> Outcome:
        """Both checks, then both measurements."""
        import torch

        latency, throughput = self.kernels(among)
        for kernel in (latency, throughput):
            kernel.loop()
        generator = torch.Generator().manual_seed(seed)
        checks = [
            self._check(latency, self.draw(generator, 32), grid=1, block=32, chains=1),
            self._check(throughput, self.draw(generator, 2 * 1024 * CHAINS), grid=2, block=1024, chains=CHAINS),
        ]
        values, out = (
            self.draw(generator, 32).cuda(),
            torch.empty(32, dtype=self.draw(generator, 1).dtype, device="cuda"),
        )
        single = slope(
            latency,
            lambda passes: [values, out, *self._constants(), passes],
            short=_SHORT,
            long=_LONG,
            steps=UNROLL * self.count,
        )
        sms = sm_count()
        many = self.draw(generator, 1024 * CHAINS).cuda().repeat(sms)
        full = run(
            throughput,
            [many, torch.empty_like(many), *self._constants(), _THROUGHPUT],
            grid=sms,
            block=32 * _WARPS,
            busy_ms=0,
        )
        work = _THROUGHPUT * UNROLL * self.count * 32 * _WARPS
        metrics: dict[str, Sampled] = {
            "latency": single,
            "throughput": full.series("instr/clk/SM", lambda cycles: work / cycles),
        }
        return Outcome(check=worst(*checks), metrics=metrics)

    def _constants(self) -> list[Any]:
        made = _C_TYPES[self.type][1]
        number: type = int if self.type == "u32" else float
        return [made(number(self.a)), made(number(self.b))]

    def _check(self, kernel: Kernel, x: torch.Tensor, *, grid: int, block: int, chains: int) -> Any:
        """One pass of the loop against the model, on every thread."""
        import torch

        values = x.cuda()
        out = torch.full_like(values, -1)  # a result that nobody writes must not pass
        stamps = torch.empty(grid, block // 32, 2, dtype=torch.int64, device="cuda")
        launch(kernel.source, kernel.name, [stamps, values, out, *self._constants(), 1], grid=grid, block=block)
        wanted = x.reshape(-1, chains)  # a row is a thread
        for _ in range(UNROLL // chains):
            wanted = self.model(wanted, self.a, self.b)
        found = out.cpu().reshape(-1, chains)
        what = f"{self.name} after {UNROLL // chains} steps"
        if self.bound:
            return close(_numbers(self, found), _numbers(self, wanted), self.bound, f"max relative error of {what}")
        return equal(found, wanted, f"wrong elements of {what}")


def compiled_with(step: Step, steps: tuple[Step, ...], size: int = 10) -> tuple[Step, ...]:
    """The steps that share a source with `step`: few sources compile fast, several of them side by side."""
    first = steps.index(step) // size * size
    return steps[first : first + size]


@functools.cache
def source_of(steps: tuple[Step, ...]) -> str:
    """The kernels of some steps in one file: compiled and disassembled in one go."""
    helpers = "".join(dict.fromkeys(step.helpers for step in steps))
    return PRELUDE + helpers + "".join(step.code_of_kernels() for step in steps)


def _numbers(step: Step, values: torch.Tensor) -> torch.Tensor:
    """Packed halves as the numbers they hold."""
    import torch

    if "HFMA2" in step.name:
        return values.view(torch.bfloat16 if "BF16" in step.name else torch.float16)
    return values


def probes(quick: bool = False) -> list[Probe]:
    """One for every instruction."""
    from .alu_steps import STEPS

    chosen = [step for step in STEPS if not quick or step.name in ("FFMA", "IMAD", "DFMA", "MUFU.EX2")]
    return [
        Probe(
            case={"instruction": step.name},
            kernels=step.kernels(compiled_with(step, STEPS)),
            measure=functools.partial(step.measure, among=compiled_with(step, STEPS)),
        )
        for step in chosen
    ]
