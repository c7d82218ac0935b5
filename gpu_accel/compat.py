"""Everything that differs between Triton versions, or between the compiler and the interpreter, in one place.

* `INTERPRET` says whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the kernels are imported).
* `dot` is `tl.dot`, except that the interpreter (seen on 3.7.1 and 3.8.0) returns garbage for bfloat16 operands,
  so they are widened to float32 there; products of bfloat16 are exact in float32, so results mean the same.
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


def supported_triton() -> bool:
    """Whether the installed Triton is one of the versions that the kernels are tested with."""
    return TRITON_VERSION[:2] in TRITON_TESTED
