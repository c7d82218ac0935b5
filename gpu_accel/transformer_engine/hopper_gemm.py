"""Host side of the Hopper FP8 product: what it takes, its tiles and launch, and its place behind `scaled_mm`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import launch as launching
from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors
from gpu_accel.thunderkittens import gemm_skinny
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.thunderkittens.gemm_hopper import (
    ACTIVATIONS,
    dealt_tiles,
    machine_refusal,
    matrix_map,
    on_device,
    zero_counters,
)
from gpu_accel.transformer_engine.quantize_kernels import scales_kernel
from gpu_accel.transformer_engine.quantize_launch import quick
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

# What has been right on an H100 or H200 in tests/gpu/test_gemm_fp8.py: "auto" takes the portable kernel for the rest.
# "grouped-finished" is what groups have with a bias, an activation or rounding to fp8.
GPU_CHECKED: tuple[str, ...] = ("dense", "grouped", "grouped-finished", "along")
SCALES_CHECKED = True  # the same of the one launch that lays scales of blocks side by side
_ALIGNMENT = 16  # bytes
_SKINNY = 64  # rows up to which the kernel that deals slices of K is taken
_SMS = 132
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCKS = ((0, 0), (1, 0), (1, 128), (128, 128))  # rows and columns that share a scale; 0 is all


@dataclass(frozen=True, kw_only=True)
class Fp8GemmConfig:
    """Tiles of the persistent kernel: 128 x 128 * `parts`; columns of `group` tile rows at a time.

    `every`: slices of 128 of K that one sum in the tensor core has. 1 is as exact as cuBLAS without fast accumulation;
    2 (not with scales of blocks) is up to 4 % faster and loses three times as much. `deal`: as in
    thunderkittens/gemm_hopper.py. `staged` (A in 1x128): scales come through shared memory, with the slice that they
    belong to, and not a slice ahead into registers. With scales of columns (B in 1x128) `parts` must be 1.
    """

    parts: int = 2
    every: int = 1
    stages: int = 4
    group: int = 16
    deal: bool = False
    staged: bool = False


@functools.cache
def _kernel() -> QuickLaunch:
    from .hopper_gemm_kernel import fp8_gemm_kernel

    return QuickLaunch(fp8_gemm_kernel)


def fp8_gemm_config(
    m: int, n: int, lines_b: bool = False, plain: bool = True, lines_a: bool = False, alone: bool = True
) -> Fp8GemmConfig:  # fmt: skip
    """The tiles for a product: narrow ones where a wide one would be half empty, or half the SMs without one, or the
    last round of wide ones nearly so.

    lines_a, lines_b: scales of 1x128; those of columns take the registers of half a tile. plain: nothing but the
    product leaves the kernel, in 16 bits; narrow tiles with more than that have not run on a GPU. alone: no groups.
    """
    tiles, wide = -(-m // 128) * -(-n // 128), -(-m // 128) * -(-n // 256)
    # a round of narrow tiles takes 0.57 of one of wide ones in blocks, 0.53 else (H200): 4096 x 2112 x 7168 in 127.6 us
    # for 135.7, 2048 x 4608 x 4096 in 76.4 for 83.3
    shorter = alone and -(-tiles // _SMS) * (0.58 if lines_a else 0.55) < -(-wide // _SMS)
    if lines_b or n <= 128 or (plain and (tiles <= _SMS or shorter)):
        staged = lines_a and m > _SKINNY
        # scales of rows and columns take the place of a sixth slice
        return Fp8GemmConfig(parts=1, stages=5 if staged else 6, group=8, deal=m <= _SKINNY, staged=staged)
    return Fp8GemmConfig(staged=lines_a)


def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    block_a: tuple[int, int] = (0, 0),
    block_b: tuple[int, int] = (0, 0),
    bias: Tensor | None = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Tensor | None = None,
    amax: Tensor | None = None,
    accumulate: bool = False,
    groups: Tensor | None = None,
    along: Tensor | None = None,
    config: Fp8GemmConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """activation((a * scale_a) (M, K) times the transpose of (b * scale_b) (N, K), plus bias (N,)), times out_scale.

    Args:
        a, b: float8_e4m3fn or float8_e5m2 each; rows contiguous, at multiples of 16 bytes.
        scale_a, scale_b: float32, what a code is multiplied with: one element, (rows,) or (rows, K / 128).
        block_a, block_b: rows and columns that share a scale, of `BLOCKS`.
        out_dtype: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2 (saturating).
        out_scale: () float32. amax: () float32, raised to the largest magnitude before `out_scale`.
        accumulate: add to `out`, which is float32.
        out: (M, N), contiguous, or None. bias is (G, N) with `groups`.
        groups: int32 (M,), for b of G matrices, (G * N, K): which one 128 rows are multiplied with, read at every
            128th; rows of a negative group become 0.
        along: int32 (G + 1,): the result is (G * M, N), a product for each group over the slices of 128 of K from
            along[g] to along[g + 1]; M is a multiple of 128.
    """
    m, k = a.shape
    height = m
    stacked = groups is not None
    if along is not None:
        m *= along.shape[0] - 1
    n = (out.shape[1] if out is not None else b.shape[0]) if stacked else b.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    direct = out.dtype == torch.float32
    if not direct and (out.stride(0) * out.element_size() % _ALIGNMENT or out.data_ptr() % _ALIGNMENT):
        # TMA cannot write such rows, and to write them from registers under the next products spills 1 KB a thread
        room = torch.empty(m, -(-n // _ALIGNMENT) * _ALIGNMENT, dtype=out.dtype, device=a.device)[:, :n]
        gemm(
            a, b, scale_a, scale_b, block_a=block_a, block_b=block_b, bias=bias, activation=activation,
            out_scale=out_scale, amax=amax, groups=groups, along=along, config=config, out=room,
        )  # fmt: skip
        return out.copy_(room)
    plain = bias is None and activation == "none" and out_scale is None and amax is None
    plain = plain and out.element_size() == 2
    alone = groups is None and along is None
    config = config or fp8_gemm_config(m, n, block_b == (1, 128), plain, block_a == (1, 128), alone)
    a_desc, b_desc = matrix_map(a, 64, 128), matrix_map(b, 128, 128)
    out_desc = a_desc if direct else matrix_map(out, 64, 128)
    tiles_m, tiles_n = -(-m // 128), -(-n // (128 * config.parts))
    blocked = block_a[1] == 128
    staged = config.staged and block_a == (1, 128)
    scale_a = _side_by_side(scale_a, block_a, padded=staged)
    scale_b = _side_by_side(scale_b, block_b, padded=True, turned=staged)
    row_a, row_b = (scale.stride(0) if block[0] else 0 for scale, block in ((scale_a, block_a), (scale_b, block_b)))
    k_a, k_b = (scale.stride(1) if blocked else 0 for scale in (scale_a, scale_b))
    stack_b = row_b * (-(-n // block_b[0])) if stacked and block_b[0] else 0
    stack_b = height if along is not None else stack_b
    k_steps, programs = -(-k // 128), multiprocessors(a.device)
    dealt = dealt_tiles(tiles_m * tiles_n, k_steps, programs) if config.deal and along is None else 0
    partials = counters = scale_a
    if dealt:
        counters = zero_counters(a.device, dealt * 2)
        partials = torch.empty(8 * programs * 64 * 128, dtype=torch.float32, device=a.device)
    else:
        programs = min(programs, tiles_m * tiles_n)
    given, factor = out if bias is None else bias, scale_a if out_scale is None else out_scale
    largest = scale_a.view(torch.int32) if amax is None else amax.view(torch.int32)
    members = along if along is not None else largest if groups is None else groups
    arguments = (a_desc, b_desc, out_desc, out, given, factor, largest, members, scale_a, scale_b, partials, counters,
                 m, n, k_steps, tiles_m, tiles_n, dealt, stack_b, row_a, k_a, row_b, k_b)  # fmt: skip
    constants = dict(
        PARTS=config.parts,
        EVERY=1 if blocked else config.every,
        STAGES=config.stages,
        GROUP=config.group,
        BLOCKED=blocked,
        ROW_A=block_a[0] == 1,
        ROW_B=block_b[0] == 1,
        ROWS_A=max(1, block_a[0]),
        ROWS_B=max(1, block_b[0]),
        BIAS=bias is not None,
        ACTIVATION=ACTIVATIONS[activation],
        SCALE_OUT=out_scale is not None,
        LARGEST=amax is not None,
        GROUPED=2 if along is not None else int(stacked),
        ACCUMULATE=accumulate,
        DIRECT=direct,
        DEAL=dealt > 0,
        STAGED=staged,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
    )
    key = (a.dtype, b.dtype, out.dtype, given.dtype, partials.data_ptr() % 16, counters.dtype)
    _kernel()(key, programs, arguments, constants, dict(num_warps=4, maxnreg=168))
    return out


def _side_by_side(scale: Tensor, block: tuple[int, int], *, padded: bool = False, turned: bool = False) -> Tensor:
    """Scales as the kernel reads them: those of 1x128 blocks side by side by rows, 128 of them in 4 lines, not in 128.

    padded: with zeros behind the last row, for reads of 128 that no mask stops. turned: in the order of the threads
    that have them, as columns of an accumulator: of each 16 thread i of 4 has 2i, 2i + 1, 2i + 8 and 2i + 9.
    """
    if block != (1, 128):
        return scale.contiguous()
    if SCALES_CHECKED and scale.is_cuda and launching._hook is None and scale.numel():
        return _by_kernel(scale.contiguous(), padded, turned)
    if not padded:
        return scale.t().contiguous().t()
    rows, cols = scale.shape
    wide = scale.new_zeros(cols, -(-rows // 128) * 128 + 128)
    if turned:
        if rows % 16:
            scale = torch.nn.functional.pad(scale, (0, 0, 0, -rows % 16))
        sixteens = wide.view(cols, -1, 4, 2, 2).permute(0, 1, 3, 2, 4)
        sixteens[:, : -(-rows // 16)] = scale.t().unflatten(1, (-1, 2, 4, 2))
    else:
        wide[:, :rows] = scale.t()
    return wide.t()


def _by_kernel(scale: Tensor, padded: bool, turned: bool) -> Tensor:
    """The same in one launch."""
    rows, cols = scale.shape
    wide = -(-rows // 128) * 128 + 128 if padded else rows
    out, tiles = scale.new_empty(cols, wide), -(-cols // 32)
    options = dict(TURNED=turned, ROWS=128, COLS=32, num_warps=4)
    with on_device(scale):
        quick(scales_kernel, -(-wide // 128) * tiles, (scale, out, rows, cols, wide, tiles), options)
    return out.t()


def scheme_refusal(a: QuantizedTensor, b: QuantizedTensor) -> str | None:
    """Why the Hopper kernels cannot multiply two fp8 operands with float32 scales, or None: they take every pair."""
    return machine_refusal(a) or machine_refusal(b)


def chosen(a: QuantizedTensor, b: QuantizedTensor, backend: str, *, kind: str = "dense") -> bool:
    """Whether a product goes to these kernels. Raises UnsupportedError where "hopper" is asked for and cannot be.

    kind: "dense", "grouped" or "grouped-finished" (by rows), or "along" (groups share out K).
    """
    if backend not in ("auto", "hopper") or (backend == "auto" and _why_not_auto(b, kind)):
        return False
    why = scheme_refusal(a, b)
    if why is not None and backend == "hopper":
        raise UnsupportedError(f"hopper: {why}; use backend='portable'")
    return why is None


def _why_not_auto(b: QuantizedTensor, kind: str = "dense") -> str:
    """Why "auto" leaves these kernels alone, or nothing."""
    if kind not in GPU_CHECKED:
        return "not yet checked on a GPU: ask for it by name"
    if kind.startswith("grouped") and b.scheme.block == (1, 128):
        return "with scales of b in 1x128 it is not checked in groups: ask for it by name"
    return ""


def explain(a: QuantizedTensor, b: QuantizedTensor, backend: str = "auto") -> str:
    """What `scaled_mm` does with two operands that have fp8 products, in a clause; backend "auto" or "hopper"."""
    why = scheme_refusal(a, b)
    why = why or ("" if backend == "hopper" else _why_not_auto(b))
    if why:
        return f"plain Triton; hopper refused: {why}"
    rows, cols = a.shape[:-1].numel(), a.shape[-1]
    few = takes_few_rows(rows, b.shape[:-1].numel(), cols, a.scheme.block, b.scheme.block)
    how = "slices of K dealt evenly to the SMs" if few else "tiles of 128x256 or 128x128"
    gaps = f"; operands are copied first, since rows of K = {cols} codes do not start at multiples of 16 bytes"
    return f"Gluon for sm_90a, {how}{gaps if cols % _ALIGNMENT else ''}"


def takes_few_rows(m: int, n: int, k: int, block_a: tuple[int, int], block_b: tuple[int, int]) -> bool:
    """Whether the kernel that deals slices of K takes a product of m rows, of which nothing but bias and activation is
    asked besides.

    With 65 to 128 rows (a tile is 64 columns by all of them) where its tiles are shared evenly by the SMs, or are about
    as many, K is long enough to be cut, and all scales of A fit beside the slices. In blocks an H200 takes 23.3 us for
    32.1 (2112 x 7168), 25.3 for 32.2 (4096 x 7168), 16.4 for 18.9 (7168 x 2048) and 35.0 for 37.3 (8192 x 8192), but
    27.6 for 24.5 at 6144 x 4096, 35.7 for 26.1 at 12288 x 4096 and 88.9 for 60.4 at 7168 x 16384; with scales of the
    tensor 19.3 for 27.7, 20.5 for 27.9, 13.1 for 15.5 and 26.9 for 31.3.
    """
    if block_a[0] == 128 or block_b == (1, 128):
        return False
    if m <= _SKINNY:
        return True
    tiles = -(-n // 64)
    even = 2 * tiles <= _SMS or 0.8 * _SMS <= tiles <= _SMS
    return m <= 128 and even and 2048 <= k <= 8192


def run(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, activation: str, text_a: str,
    text_b: str, **options,
) -> Tensor:  # fmt: skip
    """The kernel for codes (M, K) and (N, K) given as bytes; M, N and K are at least 1."""
    schemes = find_scheme(text_a), find_scheme(text_b)
    a, b = (_addressable(x).view(ELEMENTS[what.element]) for x, what in zip((a, b), schemes, strict=True))
    bias = None if bias is None else bias.contiguous()
    block_a, block_b = (what.block for what in schemes)
    plain = not {"accumulate", "amax", "out_scale", "groups", "along"} & set(options)
    few = plain and takes_few_rows(a.shape[0], b.shape[0], a.shape[1], block_a, block_b)
    with on_device(a):
        if few:
            return gemm_skinny.gemm(
                a, b.t(), bias, activation=activation, scale_x=scale_a, scale_w=scale_b, block_x=block_a,
                block_w=block_b, **options,
            )  # fmt: skip
        return gemm(
            a, b, scale_a, scale_b, block_a=block_a, block_b=block_b, bias=bias, activation=activation, **options
        )


def _without_product(a: Tensor, b: Tensor, bias: Tensor | None, activation: str) -> Tensor | None:
    """float32 (M, N) where there is nothing to multiply, else None."""
    m, n = a.shape[0], b.shape[0]
    if m and n and a.shape[1]:
        return None
    out = torch.zeros((m, n), dtype=torch.float32, device=a.device)
    return activated(out if bias is None else out.copy_(bias), activation)


@torch.library.custom_op("gpu_accel::te_scaled_mm_hopper", mutates_args=())
def hopper_mm_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, activation: str,
    out_dtype: torch.dtype, text_a: str, text_b: str,
) -> Tensor:  # fmt: skip
    """(M, N) from codes (M, K) and (N, K) as bytes; `chosen` has said yes."""
    nothing = _without_product(a, b, bias, activation)
    if nothing is not None:
        return nothing.to(out_dtype)
    return run(a, scale_a, b, scale_b, bias, activation, text_a, text_b, out_dtype=out_dtype)


@hopper_mm_op.register_fake
def _(a, scale_a, b, scale_b, bias, activation, out_dtype, text_a, text_b):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


@torch.library.custom_op("gpu_accel::te_scaled_mm_hopper_add", mutates_args=("out",))
def hopper_mm_add_op(
    out: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, activation: str,
    text_a: str, text_b: str,
) -> None:  # fmt: skip
    """The same, added to `out` (M, N), float32 and contiguous."""
    nothing = _without_product(a, b, bias, activation)
    if nothing is not None:
        out.add_(nothing)
    else:
        run(a, scale_a, b, scale_b, bias, activation, text_a, text_b, out=out, accumulate=True)


@torch.library.custom_op("gpu_accel::te_scaled_mm_hopper_fp8", mutates_args=("amax",))
def hopper_mm_fp8_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, activation: str, scale: Tensor,
    amax: Tensor | None, element: str, text_a: str, text_b: str,
) -> Tensor:  # fmt: skip
    """The same in codes of `element`, of the result / `scale`; `amax` is raised to the result's largest magnitude."""
    nothing = _without_product(a, b, bias, activation)
    if nothing is not None:
        if amax is not None and nothing.numel():
            amax.copy_(torch.maximum(amax, nothing.abs().amax()))
        limit = torch.finfo(ELEMENTS[element]).max
        return (nothing / scale).clamp(-limit, limit).to(ELEMENTS[element])
    factor = (1.0 / scale).reshape(())
    options = dict(out_dtype=ELEMENTS[element], out_scale=factor, amax=amax)
    return run(a, scale_a, b, scale_b, bias, activation, text_a, text_b, **options)


@hopper_mm_fp8_op.register_fake
def _(a, scale_a, b, scale_b, bias, activation, scale, amax, element, text_a, text_b):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=ELEMENTS[element])


def _addressable(x: Tensor) -> Tensor:
    """x, or one copy where its rows do not start at multiples of 16 bytes; the copy has gaps behind its rows."""
    rows, cols = x.shape
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 and cols % _ALIGNMENT == 0:
        return x
    copy = torch.empty(rows, -(-cols // _ALIGNMENT) * _ALIGNMENT, dtype=x.dtype, device=x.device)[:, :cols]
    return copy.copy_(x)
