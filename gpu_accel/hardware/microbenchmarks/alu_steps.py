"""The instructions of the `instructions` experiment: PTX, the SASS it must become, and the same in Python."""

# ruff: noqa: E501 - the long lines are CUDA
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .alu import Step

if TYPE_CHECKING:
    import torch

_HALVES = 0x3C003C00  # (1, 1) in fp16


def asm(text: str, type: str) -> str:
    """PTX in which %0 is x (read and written), %1 is a and %2 is b."""
    letter = {"float": "f", "double": "d", "u32": "r"}[type]
    return f'asm volatile("{text}" : "+{letter}"(x[c]) : "{letter}"(a), "{letter}"(b));'


def uniform(low: float, high: float, dtype: str = "float32") -> Any:
    def draw(generator: torch.Generator, count: int) -> torch.Tensor:
        import torch

        return (torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low).to(
            getattr(torch, dtype)
        )

    return draw


def bits(generator: torch.Generator, count: int) -> torch.Tensor:
    """Any 32 bits."""
    import torch

    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def halves(dtype: str) -> Any:
    """Pairs of numbers in [0.5, 1), packed."""

    def draw(generator: torch.Generator, count: int) -> torch.Tensor:
        import torch

        return (torch.rand(2 * count, generator=generator) / 2 + 0.5).to(getattr(torch, dtype)).view(torch.int32)

    return draw


def _float(function: str) -> Any:
    """A function of torch, computed in float64 and rounded."""

    def model(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        import torch

        return getattr(torch, function)(x.double()).to(x.dtype)

    return model


def fma(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return (x.double() * a + b).to(x.dtype)


def add(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return (x.double() + a).to(x.dtype)


def mul(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return (x.double() * a).to(x.dtype)


def half_fma(dtype: str) -> Any:
    def model(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
        import torch

        kind = getattr(torch, dtype)
        factor, term = (torch.tensor([int(value)], dtype=torch.int64).to(torch.int32).view(kind)[0] for value in (a, b))
        return (x.view(kind).double() * float(factor) + float(term)).to(kind).view(torch.int32)

    return model


def integer(function: Any) -> Any:
    """A function on unsigned 32-bit numbers held in int64; its result is cut to 32 bits."""

    def model(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return wrap(function(x.long() & 0xFFFFFFFF, int(a), int(b)))

    return model


def wrap(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits as int32."""
    import torch

    low = values & 0xFFFFFFFF
    return (low - ((low >> 31) << 32)).to(torch.int32)


def signed(values: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit numbers in int64, read as signed."""
    return values - ((values >> 31) << 32)


def _popcount(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    return sum((x >> bit) & 1 for bit in range(32))  # type: ignore[return-value]


def _reverse(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    return sum(((x >> bit) & 1) << (31 - bit) for bit in range(32))  # type: ignore[return-value]


def _dot4(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    total = x * 0 + b
    for shift in (0, 8, 16, 24):
        mine, theirs = (x >> shift) & 255, (a >> shift) & 255
        total = total + (mine - ((mine >> 7) << 8)) * (theirs - ((theirs >> 7) << 8))
    return total


def _bytes(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """prmt 0x4021: bytes 1, 2, 0 of x and byte 0 of a, from the lowest."""
    return (x >> 8) & 255 | ((x >> 16) & 255) << 8 | (x & 255) << 16 | (a & 255) << 24


def _exchange(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Lane i gets the value of lane i ^ 1; rows are threads, columns are chains."""
    return x.reshape(-1, 2, x.shape[-1]).flip(1).reshape(x.shape)


def _through(dtype: str, packed: bool = False) -> Any:
    """Rounding to a narrower type and back."""

    def model(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        import torch

        if not packed:
            return x.to(getattr(torch, dtype)).to(x.dtype)
        return x.view(torch.float16).float().to(getattr(torch, dtype)).to(torch.float16).view(torch.int32)

    return model


def _pack(dtype: str) -> Any:
    """(x, a) rounded and packed, x above; read as a float again."""

    def model(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
        import torch

        kind = getattr(torch, dtype)
        low = torch.full_like(x, a).to(kind)
        return torch.stack([low, x.to(kind)], dim=-1).view(torch.float32).squeeze(-1)

    return model


def _integer_and_back(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return x.double().round().to(x.dtype)


def _float_step(name: str, text: str, model: Any, **options: Any) -> Step:
    known: dict[str, Any] = {"draw": uniform(0.5, 1.0), "bound": 1e-5, "holds": name} | options
    return Step(name=name, type="float", code=asm(text, "float"), model=model, **known)


def _double_step(name: str, text: str, model: Any, **options: Any) -> Step:
    known: dict[str, Any] = {"draw": uniform(0.5, 1.0, "float64"), "bound": 1e-13, "holds": name} | options
    return Step(name=name, type="double", code=asm(text, "double"), model=model, **known)


def _word_step(name: str, text: str, model: Any, **options: Any) -> Step:
    known: dict[str, Any] = {"draw": bits, "holds": name} | options
    return Step(name=name, type="u32", code=asm(text, "u32"), model=model, **known)


_NEGATED_EXP = "{.reg .f32 t; neg.f32 t, %0; ex2.approx.ftz.f32 %0, t;}"
# Without the sign the assembler would see that two reciprocals cancel, and leave the loop out.
_NEGATED_RCP = "{.reg .f32 t; neg.f32 t, %0; rcp.approx.ftz.f32 %0, t;}"


def _half_power(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    import torch

    return torch.exp2(-x.double()).to(x.dtype)


def _negated_reciprocal(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return (-1.0 / x.double()).to(x.dtype)


STEPS = (
    _float_step("FFMA", "fma.rn.f32 %0, %0, %1, %2;", fma, a=0.75, b=0.2),
    _float_step("FADD", "add.rn.f32 %0, %0, %1;", add, a=0.3),
    _float_step("FMUL", "mul.rn.f32 %0, %0, %1;", mul, a=0.99),
    _double_step("DFMA", "fma.rn.f64 %0, %0, %1, %2;", fma, a=0.75, b=0.2),
    _double_step("DADD", "add.rn.f64 %0, %0, %1;", add, a=0.3),
    _double_step("DMUL", "mul.rn.f64 %0, %0, %1;", mul, a=0.99),
    _word_step(
        "HFMA2", "fma.rn.f16x2 %0, %0, %1, %2;", half_fma("float16"), draw=halves("float16"),
        a=0x3A003A00, b=0x32003200, bound=2e-3,
    ),
    _word_step(
        "HFMA2.BF16", "fma.rn.bf16x2 %0, %0, %1, %2;", half_fma("bfloat16"), draw=halves("bfloat16"), holds="HFMA2",
        a=0x3F403F40, b=0x3E403E40, bound=2e-2,
    ),
    _word_step(
        "IADD3", "{.reg .u32 t; add.u32 t, %0, %1; add.u32 %0, t, %2;}", integer(lambda x, a, b: x + a + b),
        a=12345, b=987654321,
    ),
    _word_step("IMAD", "mad.lo.u32 %0, %0, %1, %2;", integer(lambda x, a, b: x * a + b), a=1664525, b=1013904223),
    _word_step(
        "IMAD.HI", "mad.hi.u32 %0, %0, %1, %2;", integer(lambda x, a, b: ((x * a) >> 32) + b), a=0x7FFFFFFF, b=1013904223
    ),
    _word_step("LOP3", "lop3.b32 %0, %0, %1, %2, 0xca;", integer(lambda x, a, b: x & a | ~x & b), a=0x5A5AF00F, b=0x1234ABCD),
    _word_step("SHF", "shf.l.wrap.b32 %0, %1, %0, 7;", integer(lambda x, a, b: x << 7 | a >> 25), a=0xDEADBEEF),
    _word_step("PRMT", "prmt.b32 %0, %0, %1, 0x4021;", integer(_bytes), a=0x000000A7),
    _word_step("POPC", "popc.b32 %0, %0;", integer(_popcount)),
    _word_step("BREV", "brev.b32 %0, %0;", integer(_reverse)),
    _word_step("IDP.4A", "dp4a.s32.s32 %0, %0, %1, %2;", integer(_dot4), a=0x7F81FE03, b=1013904223),
    _word_step("SHFL", "shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;", integer(_exchange)),
    _float_step("MUFU.EX2", _NEGATED_EXP, _half_power),
    _float_step("MUFU.RCP", _NEGATED_RCP, _negated_reciprocal, bound=1e-4),
    _float_step("MUFU.RSQ", "rsqrt.approx.ftz.f32 %0, %0;", _float("rsqrt")),
    _float_step("MUFU.SQRT", "sqrt.approx.ftz.f32 %0, %0;", _float("sqrt")),
    _float_step(
        "MUFU.SIN+FMUL", "sin.approx.ftz.f32 %0, %0;", _float("sin"), holds="MUFU.SIN", also=("FMUL",), bound=1e-2
    ),
    _float_step("MUFU.TANH", "tanh.approx.f32 %0, %0;", _float("tanh"), bound=5e-2),
    _float_step(
        "F2F.F64", "{.reg .f64 t; cvt.f64.f32 t, %0; cvt.rn.f32.f64 %0, t;}", _through("float64"), holds="F2F", count=2,
        bound=0.0,
    ),
    _float_step(
        "F2I+I2F", "{.reg .s32 t; cvt.rni.s32.f32 t, %0; cvt.rn.f32.s32 %0, t;}", _integer_and_back, holds="F2I",
        also=("I2FP",), draw=uniform(-1e5, 1e5), bound=0.0, count=1,
    ),
    _float_step(
        "F2FP.BF16", "{.reg .b32 t; cvt.rn.bf16x2.f32 t, %0, %1; mov.b32 %0, t;}", _pack("bfloat16"),
        holds="F2FP.BF16", a=0.5, bound=0.0,
    ),
    _float_step(
        "F2FP.F16", "{.reg .b32 t; cvt.rn.f16x2.f32 t, %0, %1; mov.b32 %0, t;}", _pack("float16"),
        holds="F2FP.F16", a=0.5, bound=0.0,
    ),
    _word_step(
        "F2FP.E4M3", "{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, %0; cvt.rn.f16x2.e4m3x2 %0, h;}",
        _through("float8_e4m3fn", packed=True), draw=halves("float16"), holds="F2FP", count=2,
    ),
    _word_step(
        "F2FP.E5M2", "{.reg .b16 h; cvt.rn.satfinite.e5m2x2.f16x2 h, %0; cvt.rn.f16x2.e5m2x2 %0, h;}",
        _through("float8_e5m2", packed=True), draw=halves("float16"), holds="F2FP", count=2,
    ),
)  # fmt: skip
