"""Hopper's DPX instructions (minimum and maximum of sums, for dynamic programming) against the same in plain operations.

"dpx" calls CUDA's intrinsic. "software" is what a GPU without the instructions has to do: one operation at a time, kept
apart so that the assembler does not put them together again, and halves unpacked for the pairs of 16 bits. A step is
one call, whatever it takes; the disassembly of either is checked and kept. Of functions of two arguments the assembler
puts two calls into one VIMNMX3, which takes 4 cycles: so a call takes 2, less than any instruction.
"""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from .alu import UNROLL, Step, compiled_with
from .alu_steps import wrap
from .probe import Probe

if TYPE_CHECKING:
    import torch

# Halves of 3 and -3, and of 241 and -24012: with inputs in the middle of the range no sum overflows, for whether the
# addition inside the instruction wraps is not what is measured here.
A, B = 0x0003FFFD, 0x00F1A234


def _middle(generator: torch.Generator, count: int) -> torch.Tensor:
    """Words whose halves lie in [-8192, 8192)."""
    import torch

    return torch.randint(-(2**13), 2**13, (2 * count,), generator=generator).to(torch.int16).view(torch.int32)


# Written plainly, ptxas 13 finds the DPX instruction by itself, also in the code of a GPU that has none. A predicate of
# its own for each operation, true at run time and unknown before, keeps them apart and costs no instruction.
_APART = r"""
#define APART(name, condition, instruction) \
__device__ __forceinline__ int name(int x, int y) { \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p " instruction " %0, %0, %1;}" : "+r"(x) : "r"(y), "r"(condition)); \
    return x; \
}
APART(slow_add, blockDim.y, "add.s32")
APART(slow_max, gridDim.y, "max.s32")
APART(slow_min, gridDim.y, "min.s32")
APART(then_max, gridDim.z, "max.s32")
APART(then_min, gridDim.z, "min.s32")
APART(last_max, blockDim.z, "max.s32")
__device__ __forceinline__ int low(int x) { return (short)(x & 0xffff); }
__device__ __forceinline__ int high(int x) { return x >> 16; }
__device__ __forceinline__ int pack(int h, int l) { return (int)__byte_perm((u32)l, (u32)h, 0x5410); }
"""


@dataclass(frozen=True, kw_only=True)
class Function:
    """One DPX function f(x, a, b), in which x is the running value.

    Args:
        name: CUDA's name for it.
        holds: the SASS instruction that it becomes.
        software: the same on 32-bit ints `x`, `a`, `b` by plain operations; for pairs it is used on either half.
        model: the same on signed numbers in int64.
    """

    name: str
    holds: str
    software: str
    model: Callable[[Any, int, int], Any]
    operations: int = 2  # minima and maxima in one call
    call: str = ""  # CUDA's call, where it has not three arguments: "name(x, a)"
    folded: bool = False  # the assembler makes one instruction of two calls in a row

    @property
    def pairs(self) -> bool:
        return "16x2" in self.name


def _steps(function: Function) -> tuple[Step, Step]:
    kind = "u32" if function.pairs else "int"
    intrinsic = f"x[c] = (u32){function.name}(({kind})x[c], ({kind})a, ({kind})b);"
    if function.call:
        intrinsic = f"bool p, q; x[c] = (u32){function.call};".replace("x,", f"({kind})x[c], ({kind})")
    parts = ("high", "low") if function.pairs else ("int",)
    one = [f"[](int x, int a, int b) {{ return {function.software}; }}({p}(x[c]), {p}(a), {p}(b))" for p in parts]
    software = f"x[c] = (u32)pack({one[0]}, {one[1]});" if function.pairs else f"x[c] = (u32){one[0]};"
    shared: dict[str, Any] = {
        "name": function.name,
        "type": "u32",
        "model": _model(function),
        "draw": _middle,
        "a": A,
        "b": B,
    }
    halves = 2 if function.pairs else 1
    return (
        (FoldedStep if function.folded else Step)(code=intrinsic, holds=function.holds, **shared),
        SoftwareStep(code=software, holds="VIMNMX", operations=halves * function.operations, purity=0.0, **shared),
    )


@dataclass(frozen=True, kw_only=True)
class FoldedStep(Step):
    """A step of which two make one instruction; figures are for a step."""

    @property
    def least(self) -> int:
        return UNROLL // 2


@dataclass(frozen=True, kw_only=True)
class SoftwareStep(Step):
    """A step of plain operations; one call may take several minima and maxima."""

    operations: int = 1
    helpers: ClassVar[str] = _APART
    variant: ClassVar[str] = "_software"

    @property
    def least(self) -> int:
        return UNROLL * self.operations


def _model(function: Function) -> Callable[[torch.Tensor, Any, Any], torch.Tensor]:
    def on_words(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        return wrap(function.model(x.long(), _signed(int(a), 32), _signed(int(b), 32)))

    def on_halves(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        found = []
        for shift in (16, 0):
            half = (x.long() >> shift) & 0xFFFF
            half = half - ((half >> 15) << 16)
            mine, theirs = (_signed(int(value) >> shift, 16) for value in (a, b))
            found.append(function.model(half, mine, theirs) & 0xFFFF)
        return wrap(found[0] << 16 | found[1])

    return on_halves if function.pairs else on_words


def _signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (value >> (width - 1) << width)


def _cut(x: Any, width: int) -> Any:
    """The low bits of a sum, as a signed number: the addition wraps."""
    low = x & ((1 << width) - 1)
    return low - ((low >> (width - 1)) << width)


def _max(x: Any, y: Any) -> Any:
    import torch

    return torch.maximum(x, torch.as_tensor(y))


def _min(x: Any, y: Any) -> Any:
    import torch

    return torch.minimum(x, torch.as_tensor(y))


Model = Callable[[Any, int, int], Any]


def _of_sum(choose: Callable[[Any, Any], Any], width: int) -> Model:
    return lambda x, a, b: choose(_cut(x + a, width), b)


def _of_three(choose: Callable[[Any, Any], Any]) -> Model:
    return lambda x, a, b: choose(choose(x, a), b)


def _relu(model: Model) -> Model:
    return lambda x, a, b: _max(model(x, a, b), 0)


def _of_two(choose: Callable[[Any, Any], Any]) -> Model:
    return lambda x, a, b: choose(x, a)


def _functions() -> tuple[Function, ...]:
    made = []
    for width, suffix, sass, total in (
        (32, "s32", "", "slow_add(x, a)"),
        (16, "s16x2", ".S16x2", "low(slow_add(x, a))"),
    ):
        made += [
            Function(
                name=f"__viaddmax_{suffix}", holds=f"VIADDMNMX{sass}", operations=1,
                software=f"slow_max({total}, b)", model=_of_sum(_max, width),
            ),
            Function(
                name=f"__viaddmax_{suffix}_relu", holds=f"VIADDMNMX{sass}.RELU",
                software=f"then_max(slow_max({total}, b), 0)", model=_relu(_of_sum(_max, width)),
            ),
            Function(
                name=f"__viaddmin_{suffix}", holds=f"VIADDMNMX{sass}", operations=1,
                software=f"slow_min({total}, b)", model=_of_sum(_min, width),
            ),
            Function(
                name=f"__vimax3_{suffix}", holds=f"VIMNMX3{sass}",
                software="then_max(slow_max(x, a), b)", model=_of_three(_max),
            ),
            Function(
                name=f"__vimax3_{suffix}_relu", holds=f"VIMNMX3{sass}.RELU", operations=3,
                software="last_max(then_max(slow_max(x, a), b), 0)", model=_relu(_of_three(_max)),
            ),
            Function(
                name=f"__vimin3_{suffix}", holds=f"VIMNMX3{sass}",
                software="then_min(slow_min(x, a), b)", model=_of_three(_min),
            ),
            Function(
                name=f"__vimax_{suffix}_relu", holds=f"VIMNMX3{sass}.RELU", call=f"__vimax_{suffix}_relu(x, a)", folded=True,
                software="then_max(slow_max(x, a), 0)", model=_relu(_of_two(_max)),
            ),
            Function(
                name=f"__vibmax_{suffix}", holds=f"VIMNMX3{sass}", folded=True, operations=1,
                call=f"__vibmax_{suffix}(x, a, &p{'' if width == 32 else ', &q'})",
                software="slow_max(x, a)", model=_of_two(_max),
            ),
        ]  # fmt: skip
    return tuple(made)


FUNCTIONS = _functions()
STEPS = tuple(_steps(function) for function in FUNCTIONS)


def probes(quick: bool = False) -> list[Probe]:
    """Every function, by its instruction and by plain operations."""
    every = tuple(step for pair in STEPS for step in pair)
    found = []
    for pair in STEPS[:: 6 if quick else 1]:
        for name, step in zip(("dpx", "software"), pair, strict=True):
            among = compiled_with(step, every, 4)
            measure = partial(step.measure, among=among)
            found.append(Probe(case={"function": step.name}, name=name, kernels=step.kernels(among), measure=measure))
    return found
