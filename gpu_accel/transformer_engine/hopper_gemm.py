"""Host side of the Hopper FP8 product: what it takes, its tiles and launch, and its place behind `scaled_mm`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, multiprocessors
from gpu_accel.thunderkittens import gemm_skinny
from gpu_accel.thunderkittens.gemm_hopper import dealt_tiles, machine_refusal, matrix_map, on_device, zero_counters
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

# Scales (of a, of b) that have been right on an H100 so far, for e4m3. Of the rest "auto" takes the portable kernel,
# until tests/gpu/test_gemm_fp8.py passes.
_CHECKED = {((0, 0), (0, 0)), ((1, 128), (128, 128))}
_ALIGNMENT = 16  # bytes
_SKINNY = 64  # rows up to which the kernel that deals slices of K is taken
_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCKS = ((0, 0), (1, 0), (1, 128), (128, 128))  # rows and columns that share a scale; 0 is all


@dataclass(frozen=True, kw_only=True)
class Fp8GemmConfig:
    """Tiles of the persistent kernel: 128 x 256 with `cols`, else 256 x 128; columns of `group` tile rows at a time.

    `out_slots`: buffers in which a consumer writes its halves. `deal`: as in thunderkittens/gemm_hopper.py.
    """

    cols: bool = True
    stages: int = 4
    group: int = 16
    out_slots: int = 1
    deal: bool = False


@functools.cache
def _kernel() -> QuickLaunch:
    from .hopper_gemm_kernel import fp8_gemm_kernel

    return QuickLaunch(fp8_gemm_kernel)


def fp8_gemm_config(m: int, n: int, k: int) -> Fp8GemmConfig:
    """The tiles for a product: narrow ones where a wide one would be half empty."""
    return Fp8GemmConfig(cols=False, group=8) if n <= 128 else Fp8GemmConfig()


def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    block_a: tuple[int, int] = (0, 0),
    block_b: tuple[int, int] = (0, 0),
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Fp8GemmConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(a * scale_a) (M, K) times the transpose of (b * scale_b) (N, K), plus bias (N,).

    Args:
        a, b: float8_e4m3fn or float8_e5m2 each; rows contiguous, at multiples of 16 bytes.
        scale_a, scale_b: float32, what a code is multiplied with: one element, (rows,) or (rows, K / 128).
        block_a, block_b: rows and columns that share a scale, of `BLOCKS`.
    """
    m, k = a.shape
    n = b.shape[0]
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    config = config or fp8_gemm_config(m, n, k)
    direct = out.dtype == torch.float32 or n * out.element_size() % _ALIGNMENT != 0 or out.data_ptr() % _ALIGNMENT != 0
    a_desc, b_desc = matrix_map(a, 64, 128), matrix_map(b, 128, 128)
    out_desc = a_desc if direct else matrix_map(out, 64, 128)
    tiles_m, tiles_n = (-(-m // 128), -(-n // 256)) if config.cols else (-(-m // 256), -(-n // 128))
    blocked = block_a[1] == 128
    if blocked and block_a[0] == 1 and m > 1:
        scale_a = scale_a.t().contiguous().t()  # rows side by side: 256 of them in 8 lines, not in 256
    row_a, row_b = (scale.stride(0) if block[0] else 0 for scale, block in ((scale_a, block_a), (scale_b, block_b)))
    k_a, k_b = (scale.stride(1) if blocked else 0 for scale in (scale_a, scale_b))
    given = out if bias is None else bias
    k_steps, programs = -(-k // 128), multiprocessors(a.device)
    dealt = dealt_tiles(tiles_m * tiles_n, k_steps, programs) if config.deal else 0
    partials = counters = scale_a
    if dealt:
        counters = zero_counters(a.device, dealt * 2)
        partials = torch.empty(8 * programs * 64 * 128, dtype=torch.float32, device=a.device)
    else:
        programs = min(programs, tiles_m * tiles_n)
    arguments = (a_desc, b_desc, out_desc, out, given, scale_a, scale_b, partials, counters, m, n, k_steps, tiles_m,
                 tiles_n, dealt, row_a, k_a, row_b, k_b)  # fmt: skip
    constants = dict(
        COLS=config.cols,
        STAGES=config.stages,
        GROUP=config.group,
        OUT_SLOTS=config.out_slots,
        BLOCKED=blocked,
        ROW_A=block_a[0] == 1,
        ROW_B=block_b[0] == 1,
        ROWS_A=max(1, block_a[0]),
        BIAS=bias is not None,
        DIRECT=direct,
        DEAL=dealt > 0,
        CONSUMER_REGISTERS=240,
        PRODUCER_REGISTERS=24,
    )
    key = (a.dtype, b.dtype, out.dtype, given.dtype, partials.data_ptr() % 16, counters.dtype)
    _kernel()(key, programs, arguments, constants, dict(num_warps=4, maxnreg=168))
    return out


def scheme_refusal(a: QuantizedTensor, b: QuantizedTensor) -> str | None:
    """Why the Hopper kernels cannot multiply two operands with float32 scales, as far as shapes tell, or None."""
    why = machine_refusal(a)
    if why is None and b.scheme.block == (1, 128):
        why = "scales of b in 1x128: it takes 128x128, or one scale a row or tensor"
    if why is None and a.shape[-1] % _ALIGNMENT:
        why = f"rows of K = {a.shape[-1]} codes do not start at multiples of 16 bytes"
    return why


def chosen(a: QuantizedTensor, b: QuantizedTensor, backend: str) -> bool:
    """Whether `scaled_mm` goes to these kernels. Raises UnsupportedError where "hopper" is asked for and cannot be."""
    if backend not in ("auto", "hopper") or (backend == "auto" and not _checked(a, b)):
        return False
    why = scheme_refusal(a, b)
    if why is not None and backend == "hopper":
        raise UnsupportedError(f"hopper: {why}; use backend='portable'")
    return why is None


def _checked(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return a.scheme.element == b.scheme.element == "e4m3" and (a.scheme.block, b.scheme.block) in _CHECKED


def explain(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """What `scaled_mm` does with two operands that have fp8 products, in a clause."""
    why = scheme_refusal(a, b)
    if why is None and not _checked(a, b):
        why = "not yet checked on a GPU: ask for it by name"
    if why is not None:
        return f"plain Triton; hopper refused: {why}"
    rows = a.shape[:-1].numel()
    return "Gluon for sm_90a, " + ("slices of K dealt evenly to the SMs" if rows <= _SKINNY else "128x256 tiles")


@torch.library.custom_op("gpu_accel::te_scaled_mm_hopper", mutates_args=())
def hopper_mm_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, text_a: str,
    text_b: str,
) -> Tensor:  # fmt: skip
    """(M, N) from codes (M, K) and (N, K) as bytes; `chosen` has said yes."""
    m, n = a.shape[0], b.shape[0]
    schemes = find_scheme(text_a), find_scheme(text_b)
    if not m or not n or not a.shape[1]:
        out = torch.zeros((m, n), dtype=out_dtype, device=a.device)
        return out if bias is None else out.copy_(bias)
    a, b = (_addressable(x).view(_ELEMENTS[what.element]) for x, what in zip((a, b), schemes, strict=True))
    bias = None if bias is None else bias.contiguous()
    block_a, block_b = (what.block for what in schemes)
    with on_device(a):
        if m <= _SKINNY and block_a[0] != 128:
            return gemm_skinny.gemm(
                a, b.t(), bias, scale_x=scale_a, scale_w=scale_b, block_x=block_a, block_w=block_b, out_dtype=out_dtype
            )
        return gemm(a, b, scale_a, scale_b, block_a=block_a, block_b=block_b, bias=bias, out_dtype=out_dtype)


@hopper_mm_op.register_fake
def _(a, scale_a, b, scale_b, bias, out_dtype, text_a, text_b):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _addressable(x: Tensor) -> Tensor:
    """x, or one copy where it does not start at a multiple of 16 bytes."""
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
