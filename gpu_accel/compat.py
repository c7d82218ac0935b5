"""Everything that differs between Triton versions, or between the compiler and the interpreter, in one place.

* `INTERPRET` says whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the kernels are imported).
* `dot` is `tl.dot`, except that the interpreter (seen on 3.7.1 and 3.8.0) returns garbage for bfloat16 operands,
  so they are widened to float32 there; products of bfloat16 are exact in float32, so results mean the same.
* `widen` is a cast, except that the interpreter (seen on 3.7.1) takes Inf and NaN of fp8 for numbers (480, 65536...),
  and in float16 the three smallest numbers of e5m2 for others.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

from gpu_accel.interpreter import quicken

INTERPRET: bool = bool(triton.knobs.runtime.interpret)
if INTERPRET:
    quicken()
TRITON_VERSION: tuple[int, ...] = tuple(int(x) for x in re.findall(r"\d+", triton.__version__)[:3])

# Gluon moves between versions: what the kernels were compiled and run with.
TRITON_TESTED = ((3, 6), (3, 7), (3, 8))

# A tl.dot whose left operand is a transposed register tile can be miscompiled on Hopper by these versions
# (flash-linear-attention issue 640). Our kernels avoid that form, so this is only reported, never branched on.
TRANSPOSED_LEFT_OPERAND_MISCOMPILES: bool = (3, 4) <= TRITON_VERSION < (3, 7, 1)

_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """`acc + a @ b` with float32 accumulation; `acc` may be None. PRECISION matters for float32 operands only."""
    if _INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """`x`, fp8 or any other dtype, as DTYPE (float32, float16 or bfloat16). Inf and NaN stay what they are."""
    if _INTERPRET:
        if x.dtype == tl.float8e5:  # the upper half of a float16
            half = x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8
            return half.to(tl.float16, bitcast=True).to(tl.float32).to(DTYPE)
        elif x.dtype == tl.float8e4nv:
            nan = (x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
            return tl.where(nan, float("nan"), x.to(tl.float32)).to(DTYPE)
        else:
            return x.to(DTYPE)
    else:
        return x.to(DTYPE)


def supported_triton() -> bool:
    """Whether the installed Triton is one of the versions that the kernels are tested with."""
    return TRITON_VERSION[:2] in TRITON_TESTED
