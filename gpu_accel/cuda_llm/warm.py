"""A kernel of ours that touches what the interpreter imports lazily."""

from __future__ import annotations

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


def run() -> None:
    """Run it once on the CPU, in the interpreter."""
    x, out = torch.ones(16), torch.zeros(1)
    _touch[(1,)](x, out, 16, BLOCK=16)
