"""Host side of the product with few rows on Hopper: tiles, workspace and launch, for 16 and 8 bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors

from .gemm_hopper import ACTIVATIONS, k_major, matrix_map, zero_counters

_ROWS = 64  # columns of W that an accumulator has
_RING = 200 * 1024  # bytes of shared memory on their way
_KEPT = 8192  # scales of blocks of X that may lie beside them
_HELD = 256  # scales of blocks of W beside them
_ROOM = 225 * 1024  # bytes for slices, scales of X and a result on its way out; barriers and W's have the rest


@dataclass(frozen=True, kw_only=True)
class SkinnyConfig:
    """A tile is 64 * `halves` columns of W; a slice is `sub` boxes of 128 bytes of K, of `box` columns each.

    `stages`: slices on their way, 0 for as many as fit. `programs`: 0 for as many as balance best. `early`: all that
    can be asked of memory before it is needed is: slices before partitions start, scales and bias before the slices.
    `lean`: tiles that programs share cost one fence each, and several parts are on their way when they are added up.
    `held` (with `early`, in blocks): W's scales come to shared memory at the start, too, and not two blocks ahead.
    """

    halves: int = 1
    sub: int = 2
    box: int = 64
    stages: int = 0
    programs: int = 0
    early: bool = False
    lean: bool = False
    held: bool = False

    def depth(self, bm: int, kept: int = 0, size: int = 4) -> int:
        """Slices on their way: a slice has `sub` boxes of W's and X's rows. kept: scales that lie beside them. size: of
        an element of the result, in bytes."""
        ring = min(_RING, _ROOM - 4 * kept - _ROWS * bm * size)
        return self.stages or max(2, min(16, ring // ((_ROWS * self.halves + bm) * 128 * self.sub)))


def skinny_config(m: int, w_k: bool, element_size: int = 2) -> SkinnyConfig:
    """The configuration for a product with m rows; `w_k`: W is contiguous along K."""
    if not w_k:
        return SkinnyConfig(halves=2, sub=1)  # 128 bytes of a row of W are 64 columns: two boxes lie side by side
    # early, on an H200 with 8192 x 8192 in eight bits: 21.4 us became 20.6 (one row), 28.4 became 24.9 (64 rows in
    # blocks). In sixteen bits it is right too (tests/gpu), and not timed
    # lean and held: 20.8 became 19.9 (64 x 4096 x 7168 in blocks), 17.3 became 15.9 (one row), 26.0 25.3 (128 rows)
    if m > 64 and element_size == 1:
        return SkinnyConfig(sub=1, early=True, lean=True, held=True)
    eight = dict(early=True, lean=True, held=True) if element_size == 1 else {}
    return SkinnyConfig(halves=1 if m <= 64 else 2, sub=4 if m <= 16 else 2, **eight)


def padded_rows(m: int) -> int:
    """Rows of X in a tile: a power of two from 16 to 128."""
    return min(128, max(16, 1 << (m - 1).bit_length()))


def programs_for(tiles: int, k_steps: int, processors: int, fewest: int = 4, *, whole: bool = False) -> int:
    """How many programs share the slices: a whole number a tile where that leaves few SMs idle, else one an SM.

    fewest: slices that a program is worth starting for. whole: as many whole tiles for each, if they divide so and a
    fifth of the SMs or less stays idle; with 64 rows in blocks an H200 took 11.2 us for 16.5 (7168 x 2048, 112
    programs), 18.1 for 22.6 (24576 x 1536, 128).
    """
    most = min(processors, max(tiles, tiles * k_steps // fewest))
    even = most // tiles * tiles
    if even >= 0.9 * most:
        return even
    dividing = (p for p in range(most, 4 * most // 5, -1) if tiles % p == 0)
    return next(dividing, most) if whole else most


def tall_programs(tiles: int, k_blocks: int, processors: int) -> int:
    """The same with 65 to 128 rows: as many programs for each tile.

    On an H200 a block of 128 of K takes a program about 0.23 us, and a program more to share a tile 0.9: at 1024 x 4096
    8 a tile took 21.1 us and 2 18.6, at 2112 x 7168 4 23.3 and 2 23.8, at 2048 x 2048 4 17.3 and 2 15.7.
    """
    if tiles > processors:
        return programs_for(tiles, k_blocks, processors, whole=True)
    return tiles * max(1, min(processors // tiles, round(math.sqrt(0.26 * k_blocks))))


@functools.cache
def _kernel() -> QuickLaunch:
    from .gemm_skinny_kernel import skinny_gemm_kernel

    return QuickLaunch(skinny_gemm_kernel)


def gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    scale_x: Tensor | None = None,
    scale_w: Tensor | None = None,
    block_x: tuple[int, int] = (0, 0),
    block_w: tuple[int, int] = (0, 0),
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """activation(x (M, K) w (K, N) + bias) for a small M, or a small M N; x must be K-major, w as `k_major` says.

    float8 operands (w K-major) need scales: scale_x (M ...), scale_w (N ...), as transformer_engine/hopper_gemm.py.
    """
    m, k = x.shape
    n = w.shape[1]
    fp8 = x.element_size() == 1
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    w_k = bool(k_major(w, 0))
    config = config or skinny_config(m, w_k, x.element_size())
    bm, bk, sub, box = padded_rows(m), 128 // x.element_size(), config.sub, config.box if w_k else _ROWS
    x_desc = matrix_map(x, bm, bk)
    w_desc = matrix_map(w.t(), box, bk) if w_k else matrix_map(w, bk, _ROWS)
    tiles_m, k_steps = -(-m // bm), -(-k // (bk * sub))
    tiles = -(-n // (_ROWS * config.halves)) * tiles_m
    programs, processors = config.programs, multiprocessors(x.device)
    if not programs and fp8 and bm == 128 and tiles_m == 1:
        programs = tall_programs(tiles, -(-k // 128), processors)
    programs = programs or programs_for(tiles, k_steps, processors, max(1, 4 // sub), whole=fp8 and bm == _ROWS)
    partials = torch.empty(2 * programs * _ROWS * config.halves * bm, dtype=torch.float32, device=x.device)
    counters = zero_counters(x.device, tiles)
    blocked = fp8 and block_x[1] == 128
    early, kept = config.early, 0
    if early and blocked:
        kept = max(8, 1 << (-(-k // 128) - 1).bit_length())
        if tiles_m > 1 or kept * bm > _KEPT:
            early, kept = False, 0
    held = _HELD if config.held and kept and -(-tiles * k_steps // programs) * sub <= _HELD else 0
    strides = (0, 0, 0, 0)
    if scale_x is not None and scale_w is not None:
        across = (scale_x.stride(1), scale_w.stride(1)) if blocked else (0, 0)
        strides = (scale_x.stride(0) if block_x[0] else 0, across[0], scale_w.stride(0) if block_w[0] else 0, across[1])
    given = out if bias is None else bias
    arguments = (
        x_desc, w_desc, out, given, partials, counters, partials if scale_x is None else scale_x,
        partials if scale_w is None else scale_w, m, n, k_steps, tiles, tiles_m, -(-k // 128),
        *divmod(tiles * k_steps, programs), *strides,
    )  # fmt: skip
    constants = dict(
        BM=bm,
        BK=bk,
        HALVES=config.halves,
        SUB=sub,
        BOX=box,
        STAGES=config.depth(bm, kept * bm, out.element_size()),
        W_K=w_k,
        FP8=fp8,
        BLOCKED=blocked,
        ROW_X=block_x[0] == 1,
        ROW_W=block_w[0] == 1,
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        EARLY=early,
        KEPT=kept,
        LEAN=config.lean,
        HELD=held,
    )
    key = (x.dtype, w.dtype, out.dtype, given.dtype)
    _kernel()(key, programs, arguments, constants, dict(num_warps=4, maxnreg=240))
    return out
