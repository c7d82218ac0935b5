"""A matrix product in seven levels, one idea a level, written with the tiles of `tiles.py` and, last, in Gluon.

    naive        a column times a row at a time, on the ordinary cores
    tensor-cores tiles of 64 x 64, products of tiles; memory is waited for before every product
    pipelined    tiles of 128 x 128, and a ring of stages that loads ahead
    ordered      tiles of 128 x 256, eight rows of tiles at a time, so that L2 holds what the next tile needs
    tma          the same by TMA, in programs that stay and take one tile after the other
    template     some warps load and others compute: the load-compute-finish template, in Gluon (`template.py`)
    specialised  by hand, and results leave under the next tile's first product: `tk.gemm(backend="hopper")`

`run(name, a, b)` computes a (M, K) b (K, N), bfloat16 or float16, any sizes and strides where the level takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.launch import capability, launch
from gpu_accel.thunderkittens import tiles
from gpu_accel.thunderkittens.arguments import check_tensors, integer
from gpu_accel.thunderkittens.chunked import _device


@triton.jit
def _naive_kernel(a, b, c, m, n, k, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr):
    program, rows = tl.program_id(0), tl.cdiv(m, BM)  # in one dimension, which alone may have more than 65535
    row = program % rows * BM
    col = program // rows * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k):
        left = tiles.load(tiles.tile(a, row, at, m, k, am, ak, BM, 1)).to(tl.float32)
        right = tiles.load(tiles.tile(b, at, col, k, n, bk, bn, 1, BN)).to(tl.float32)
        acc += left * right
    tiles.store(tiles.tile(c, row, col, m, n, n, 1, BM, BN), acc)


@triton.jit
def _tiled_kernel(
    a, b, c, m, n, k, am, ak, bk, bn, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i, j = tiles.block_scheduler(tl.program_id(0), tiles_m, tiles_n, GROUP)
    acc = tiles.block_gemm(a, b, i * BM, j * BN, m, n, k, am, ak, bk, bn, BM, BN, BK)
    tiles.store(tiles.tile(c, i * BM, j * BN, m, n, n, 1, BM, BN), acc)


@triton.jit
def _tma_kernel(
    a, b, c, k, tiles_m, tiles_n, programs, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):
    for number in range(tl.program_id(0), tiles_m * tiles_n, programs):
        i, j = tiles.block_scheduler(number, tiles_m, tiles_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        for at in range(0, k, BK):
            left = tiles.tma_async_load(a, i * BM, at)
            right = tiles.tma_async_load(b, at, j * BN)
            acc = tiles.mma_AB(left, right, acc)
        tiles.tma_store_async(c, i * BM, j * BN, acc)


def _naive(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    side = 32
    if c.numel():
        launch(_naive_kernel, -(-m // side) * -(-n // side), (a, b, c, m, n, k, *a.stride(), *b.stride()),
               dict(BM=side, BN=side, num_warps=4))  # fmt: skip
    return c


def _tiled(a: Tensor, b: Tensor, bm: int, bn: int, bk: int, group: int, warps: int, stages: int) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    tiles_m, tiles_n = -(-m // bm), -(-n // bn)
    if c.numel():
        launch(_tiled_kernel, tiles_m * tiles_n, (a, b, c, m, n, k, *a.stride(), *b.stride(), tiles_m, tiles_n),
               dict(BM=bm, BN=bn, BK=bk, GROUP=group, num_warps=warps, num_stages=stages))  # fmt: skip
    return c


def tma_refusal(a: Tensor, b: Tensor) -> str | None:
    """Why TMA cannot read these operands, or None."""
    if a.is_cuda and capability(a.device) < (9, 0):
        return "compute capability below 9.0 has no TMA"
    for name, x in (("a", a), ("b", b)):
        if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
            return f"{name} must have contiguous rows that start at multiples of 16 bytes"
    return "N must be a multiple of 8 for the result" if b.shape[1] * b.element_size() % 16 else None


def _tma(a: Tensor, b: Tensor) -> Tensor:
    refusal = tma_refusal(a, b)
    if refusal:
        raise UnsupportedError(f"level 'tma': {refusal}")
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    if not c.numel():
        return c
    if not k:
        return c.zero_()
    bm, bn, bk = (16, 16, 16) if INTERPRET else (128, 256, 64)
    tiles_m, tiles_n = -(-m // bm), -(-n // bn)
    multiprocessors = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 3
    programs = min(multiprocessors, tiles_m * tiles_n)
    descriptors = [
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block)
        for x, block in ((a, [bm, bk]), (b, [bk, bn]), (c, [bm, bn]))
    ]
    launch(_tma_kernel, programs, (*descriptors, k, tiles_m, tiles_n, programs),
           dict(BM=bm, BN=bn, BK=bk, GROUP=8, num_warps=8, num_stages=3))  # fmt: skip
    return c


def _template(a: Tensor, b: Tensor) -> Tensor:
    from gpu_accel.thunderkittens import gemm_hopper, template

    refusal = gemm_hopper.machine_refusal(a) or tma_refusal(a, b)
    if refusal:
        raise UnsupportedError(f"level 'template': {refusal}")
    return template.product(a, b)


def _specialised(a: Tensor, b: Tensor) -> Tensor:
    from gpu_accel.thunderkittens.gemm_api import gemm

    return gemm(a, b, backend="hopper")


@dataclass(frozen=True)
class Level:
    """A runnable step: what it adds to the one before it, and the function."""

    name: str
    idea: str
    run: Callable[[Tensor, Tensor], Tensor]
    interpreted: bool = True  # whether it runs without a GPU


LEVELS = (
    Level("naive", "a column times a row at a time, no tensor cores", _naive),
    Level("tensor-cores", "products of tiles of 64 x 64 x 32", lambda a, b: _tiled(a, b, 64, 64, 32, 1, 4, 1)),
    Level("pipelined", "128 x 128 x 64, four stages in flight", lambda a, b: _tiled(a, b, 128, 128, 64, 1, 8, 4)),
    Level("ordered", "128 x 256 x 64, eight rows of tiles at a time", lambda a, b: _tiled(a, b, 128, 256, 64, 8, 8, 3)),
    Level("tma", "loads and stores by TMA, programs that stay", _tma),
    Level("template", "warps that load beside warps that compute", _template, interpreted=False),
    Level("specialised", "results leave under the next tile's first product", _specialised, interpreted=False),
)
_BY_NAME = {level.name: level for level in LEVELS}


def run(name: str, a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N) at a level, in the dtype of a, summed in float32.

    Raises:
        InvalidInputError: an unknown level, or operands that do not fit. UnsupportedError: the level cannot run here.
    """
    if name not in _BY_NAME:
        raise InvalidInputError(f"there is no level {name!r}; choose one of {', '.join(_BY_NAME)}")
    check_tensors({"a": a, "b": b})
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise InvalidInputError(
            f"a must be (M, K) and b (K, N) of one dtype, got {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}"
        )
    if a.dtype not in (torch.bfloat16, torch.float16):
        raise InvalidInputError(f"the ladder takes bfloat16 and float16, got {a.dtype}")
    interpreted = _BY_NAME[name].interpreted
    if not a.is_cuda and not (INTERPRET and interpreted):
        needs = "a GPU, or TRITON_INTERPRET=1" if interpreted else "a Hopper GPU"
        raise UnsupportedError(f"level {name!r} needs {needs}")
    with _device(a):
        return _BY_NAME[name].run(a, b)


def warp_specialized_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) b (K, N), bfloat16 or float16, by the last level of the ladder: `tk.gemm(a, b, backend="hopper")`.

    Raises UnsupportedError without a GPU of compute capability 9.0, InvalidInputError for other shapes and dtypes.
    """
    return run("specialised", a, b)


def pingpong_schedule(steps: int, consumers: int = 2) -> list[tuple[str, ...]]:
    """What every consumer does at each step when they take turns: products of one beside the epilogue of the other.

    Row t has an entry a consumer: "mma i" or "epilogue i" of its tile i, or "wait". Raises InvalidInputError for
    steps below 0 or consumers below 1.
    """
    steps, consumers = integer("steps", steps, 0), integer("consumers", consumers, 1)
    rows = []
    for step in range(steps):
        row = []
        for consumer in range(consumers):
            turn, phase = divmod(step - consumer, consumers)
            number = turn * consumers + consumer
            row.append("wait" if step < consumer else f"mma {number}" if phase == 0 else f"epilogue {number}")
        rows.append(tuple(row))
    return rows
