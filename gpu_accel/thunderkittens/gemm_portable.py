"""Matrix product in plain Triton: out = activation(A B + bias), any sizes and strides, float32 sums.

A program computes one tile of BM x BN; tiles are walked in groups of rows, so that B stays in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET, dot
from gpu_accel.flash_attention3.launch import launch, next_power_of_2

from .gemm_hopper import ACTIVATIONS

_GROUP = 8


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """Numbers as in gemm_device.py."""
    if ACTIVATION == 1:
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 3:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == 4:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _gemm_kernel(
    a, b, bias, out, M, N, K, tiles_m, tiles_n, a_m, a_k, b_k, b_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out (M, N), contiguous; strides in elements."""
    pid = tl.program_id(0)
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    m = (first + pid % per_group % high) * BM + tl.arange(0, BM)
    n = pid % per_group // high * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = a + m.to(tl.int64)[:, None] * a_m
    cols = b + n.to(tl.int64)[None, :] * b_n
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + k
        x = tl.load(rows + at.to(tl.int64)[None, :] * a_k, mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
        y = tl.load(cols + at.to(tl.int64)[:, None] * b_k, mask=(at < K)[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(x, y, acc, "ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = _activate(acc, ACTIVATION)
    pointers = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def tiles(m: int, n: int, element_size: int) -> tuple[int, int, int, int]:
    """(BM, BN, BK, num_warps)."""
    bm = min(128, max(16, next_power_of_2(m)))
    bn = min(128, max(16, next_power_of_2(n)))
    bk = 64 if element_size == 2 else 32
    return bm, bn, bk, 8 if bm * bn >= 128 * 128 else 4


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(a (M, K) b (K, N) + bias (N,)); bf16, fp16 or float32, any strides, K at least 1."""
    m, k = a.shape
    n = b.shape[1]
    out = torch.empty(m, n, dtype=out_dtype or a.dtype, device=a.device)
    bm, bn, bk, warps = tiles(m, n, a.element_size())
    tiles_m, tiles_n = -(-m // bm), -(-n // bn)
    given = out if bias is None else bias
    arguments = (a, b, given, out, m, n, k, tiles_m, tiles_n, *a.stride(), *b.stride())
    options = dict(BM=bm, BN=bn, BK=bk, GROUP=_GROUP, BIAS=bias is not None, ACTIVATION=ACTIVATIONS[activation])
    if not INTERPRET:
        options |= dict(num_warps=warps, num_stages=3 if a.element_size() == 2 else 2)
    launch(_gemm_kernel, tiles_m * tiles_n, arguments, options)
    return out
