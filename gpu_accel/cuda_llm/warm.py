"""A kernel of ours that touches what the interpreter imports lazily."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def _touch(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, 2):
        total += tl.exp(v - tl.max(v, 0)) + tl.cumsum(v, 0)
    p = tl.dot(v[:, None] + v[None, :], v[None, :] + v[:, None], input_precision="ieee")
    total += tl.sum(p, 1) + tl.where(total > 0, tl.erf(total), tl.sqrt(tl.abs(total))) + tl.sum(v, 0)
    tl.atomic_add(out, tl.sum(total, 0))


def mend_dot() -> None:
    """Let the interpreter multiply bfloat16, whose bits it takes for integers (3.7.1 and 3.8.0)."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    plain = builder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return plain(self, widened(a), widened(b), *more)

    builder.create_dot = create_dot


def run() -> None:
    """Run it once on the CPU, in the interpreter."""
    x, out = torch.ones(16), torch.zeros(1)
    _touch[(1,)](x, out, 16, BLOCK=16)
