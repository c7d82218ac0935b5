"""`quantize`: checks, choice of kernel and tile, launch, and the custom op that torch.compile sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.hadamard import random_signs
from gpu_accel.flash_attention3.launch import capability, launch
from gpu_accel.transformer_engine import codec, reference, scales
from gpu_accel.transformer_engine.formats import FORMATS, check_seed
from gpu_accel.transformer_engine.quantize_kernels import _amax_kernel, _block_kernel, _cast_kernel
from gpu_accel.transformer_engine.reference import Parts, block_grid, quantize_reference
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.schemes import scheme as find_scheme
from gpu_accel.transformer_engine.tensor import QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("auto", "portable", "reference")
# Whether tests/gpu/test_transformer_engine.py has passed on a GPU. Until then "auto" takes the reference on CUDA, slow
# and right; backend="portable" asks for the kernels.
GPU_CHECKED = False
LONGEST_ROW = 16384  # values of a row that one program holds; longer rows are read twice
_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Matrix:
    """A tensor (..., K) as M rows of K columns, without copying."""

    rows: int
    cols: int
    inner: int
    s_outer: int
    s_row: int
    s_col: int

    @property
    def nested(self) -> bool:
        return self.inner < self.rows


def as_matrix(x: Tensor) -> Matrix:
    """The rows of x. Leading dimensions may need two strides, not more.

    Raises InvalidInputError for strides that need three, and for 2**31 rows or columns.
    """
    cols, rows = x.shape[-1], x.numel() // x.shape[-1] if x.shape[-1] else x[..., :0].shape[:-1].numel()
    if rows > _LIMIT or cols > _LIMIT:
        raise InvalidInputError(f"at most {_LIMIT} rows and columns are supported, got {rows} x {cols}")
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        raise InvalidInputError(
            f"the leading dimensions of shape {tuple(x.shape)}, strides {x.stride()}, need more than two strides: "
            f"call .contiguous()"
        )
    inner, s_row = levels[0] if levels else (rows, cols)
    return Matrix(rows, cols, inner, levels[1][1] if len(levels) == 2 else 0, s_row, x.stride(-1) if cols > 1 else 1)


def native_fp8(device: torch.device) -> bool:
    """Whether kernels for this device convert to fp8 by instruction (what is compiled without a GPU does)."""
    if INTERPRET:
        return False
    return device.type != "cuda" or (torch.version.hip is None and capability(device) >= (8, 9))


def choose_backend(backend: str, x: Tensor, what: str) -> str:
    """Resolve "auto"; refuse what cannot run here. Raises InvalidInputError, HardwareError."""
    if backend not in BACKENDS:
        raise InvalidInputError(f"backend of {what} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    runs = INTERPRET or x.is_cuda
    if backend == "auto":
        return "portable" if INTERPRET or (runs and GPU_CHECKED) else "reference"
    if backend == "portable" and not runs:
        raise HardwareError(
            f"{what}: the portable kernel got a tensor on {x.device.type}: move it to a CUDA device, set "
            f"TRITON_INTERPRET=1 before Python starts, or use backend='reference'"
        )
    return backend


def _power(n: int) -> int:
    return triton.next_power_of_2(max(1, n))


def _numbers(scheme: Scheme) -> dict:
    """Constants of the kernels that follow from a scheme."""
    add, emax = 0, 0
    if scheme.scale == "e8m0":
        add, emax = scales.mx_rounding(scheme), FORMATS[scheme.element].max_exponent
    elif scheme.scale == "pow2":
        add, emax = scales.carry(scheme.largest), scales.exponent_of(scheme.largest)
    return dict(
        ELEMENT=codec.ELEMENTS[scheme.element], SCALE=codec.SCALES[scheme.scale], LARGEST=scheme.largest, ADD=add,
        EMAX=emax, FINITE=scheme.keeps_nan_in_place, STOCHASTIC=scheme.rounding == "stochastic", PACKED=scheme.packed,
    )  # fmt: skip


def block_tile(scheme: Scheme, m: Matrix, columnwise: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of the tile of `_block_kernel`, 32 values a thread.

    With both copies: 32 rows are the fewest that a column-wise store can write in whole sectors of 32 bytes, and few
    rows keep the maxima along columns within few warps. Counted in the compiled kernel for MXFP8: 27 instructions a
    value at 32 x 128, 37 at 64 x 128.
    """
    down, across = scheme.block
    if not across:  # a whole row
        bk = _power(max(16, m.cols))
        bm = max(1, min(_power(m.rows), 4096 // bk))
    elif columnwise:
        bm, bk = max(32, across), 128
    else:
        bk = max(across, min(1024, _power(max(16, m.cols))))
        if down > 1:
            bk = max(across, min(bk, 4096 // down))
        bm = max(down, min(_power(m.rows), 4096 // bk))
    values = 2048 if down == 128 and not columnwise else 1024
    return bm, bk, max(1, min(16, bm * bk // values))


def plain_tile(m: Matrix, columnwise: bool, values: int = 4096) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of which nothing but speed depends on the shape."""
    if columnwise:
        return 64, 128, 8
    bk = min(1024, _power(max(16, m.cols)))
    bm = max(1, min(_power(m.rows), values // bk))
    return bm, bk, max(1, min(4, bm * bk // 1024))


def _grid(m: Matrix, bm: int, bk: int) -> tuple[int, int, bool]:
    tiles = triton.cdiv(m.cols, bk)
    return triton.cdiv(m.rows, bm) * tiles, tiles, m.rows % bm == 0 and m.cols % bk == 0


def _empty_parts(x: Tensor, rows: int, cols: int, scheme: Scheme, made: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scales, tensor scale) of a copy (rows, cols), unwritten; empty when it is not made."""
    if not made:
        return (
            x.new_empty(0, dtype=torch.uint8),
            x.new_empty(0, dtype=torch.float32),
            x.new_empty(0, dtype=torch.float32),
        )
    width = (cols + 1) // 2 if scheme.packed else cols
    wide = scheme.scale in ("fp32", "pow2")
    grid = x.new_empty(block_grid(rows, cols, scheme), dtype=torch.float32 if wide else torch.uint8)
    tensor_scale = x.new_empty(() if scheme.scale == "nvfp4" else 0, dtype=torch.float32)
    return x.new_empty((rows, width), dtype=torch.uint8), grid, tensor_scale


@torch.library.custom_op("gpu_accel::te_quantize", mutates_args=())
def quantize_op(
    x: Tensor, text: str, rowwise: bool, columnwise: bool, seed: int, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels; arguments are checked by `quantize`.

    Returns (data, scales, tensor scale) row-wise, the same column-wise, and () float32 largest magnitude when the scale
    was given. What is not made is empty.
    """
    scheme, m = find_scheme(text), as_matrix(x)
    row = _empty_parts(x, m.rows, m.cols, scheme, rowwise)
    col = _empty_parts(x, m.cols, m.rows, scheme, columnwise)
    per_row, per_tensor = scheme.block == (1, 0), scheme.block == (0, 0)
    known = scale is not None
    maxima = x.new_zeros(m.rows + m.cols if per_row else 2, dtype=torch.int32)
    amax_r, amax_c = (maxima[: m.rows], maxima[m.rows :]) if per_row else (maxima[:1], maxima[1:])
    if not m.rows or not m.cols:
        for parts in (row, col):
            _fill_empty(parts, scheme)
            if scale is not None and parts[1].numel():
                parts[1].copy_(scale)
        return (*row, *col, x.new_zeros((), dtype=torch.float32))
    numbers = _numbers(scheme)
    widths = [(n + 1) // 2 if scheme.packed else n for n in (m.cols, m.rows)]
    place = (m.rows, m.cols, m.inner, m.s_outer, m.s_row, m.s_col)
    signs = random_signs(16, reference.SIGNS_SEED, x.device) if scheme.hadamard else maxima
    shared = dict(NESTED=m.nested, enable_fp_fusion=False)
    native = dict(NATIVE=native_fp8(x.device))
    in_one_tile = not per_tensor and (scheme.block[1] or (m.cols <= LONGEST_ROW and not columnwise))

    if not known and (not in_one_tile or scheme.scale == "nvfp4"):
        bm, bk, warps = plain_tile(m, bool(scheme.hadamard and columnwise) or (per_row and columnwise), 8192)
        programs, tiles, even = _grid(m, bm, bk)
        options = dict(
            BM=bm, BK=bk, AXIS=int(per_row), FINITE=scheme.keeps_nan_in_place or scheme.scale == "nvfp4",
            HADAMARD=bool(scheme.hadamard), ROW=rowwise, COL=columnwise, EVEN=even, num_warps=warps, **shared,
        )  # fmt: skip
        launch(_amax_kernel, programs, (x, amax_r, amax_c, signs, *place, tiles), options)
        if not scheme.hadamard and not per_row:
            amax_c = amax_r
    if in_one_tile:
        bm, bk, warps = block_tile(scheme, m, columnwise)
        programs, tiles, even = _grid(m, bm, bk)
        down, across = scheme.block
        options = dict(
            BM=bm, BK=bk, GR=down, GC=across or bk, HADAMARD=bool(scheme.hadamard), ROW=rowwise, COL=columnwise,
            EVEN=even, num_warps=warps, **numbers, **shared, **native,
        )  # fmt: skip
        arguments = (
            x,
            row[0],
            row[1],
            row[2],
            col[0],
            col[1],
            col[2],
            amax_r,
            amax_c,
            signs,
            *place,
            tiles,
            *widths,
            seed,
        )
        launch(_block_kernel, programs, arguments, options)
        return (*row, *col, x.new_empty((), dtype=torch.float32))
    # the scale is known before the tile is read
    bm, bk, warps = plain_tile(m, columnwise)
    programs, tiles, even = _grid(m, bm, bk)
    if scale is not None:
        for parts, made in ((row, rowwise), (col, columnwise)):
            if made:
                parts[1].copy_(scale)
    mode = 2 if known else int(per_row)
    options = dict(BM=bm, BK=bk, MODE=mode, ROW=rowwise, COL=columnwise, EVEN=even, num_warps=warps,
                   **numbers, **shared, **native)  # fmt: skip
    arguments = (x, row[0], col[0], row[1], col[1], amax_r, amax_c, *place, tiles, *widths, seed)
    launch(_cast_kernel, programs, arguments, options)
    return (
        *row,
        *col,
        amax_r.view(torch.float32).reshape(()).clone() if known else x.new_empty((), dtype=torch.float32),
    )


def _fill_empty(parts: tuple[Tensor, Tensor, Tensor], scheme: Scheme) -> None:
    """The scales of no numbers at all: those of zeros."""
    zero = quantize_reference(torch.zeros(1, 16, device=parts[1].device), scheme.with_(rounding="nearest"))
    parts[1].fill_(zero.scales.flatten()[0].item())
    parts[2].fill_(1.0)


@quantize_op.register_fake
def _(x, text, rowwise, columnwise, seed, scale):
    scheme = find_scheme(text)
    cols = x.shape[-1]
    rows = x.shape[:-1].numel()
    row = _empty_parts(x, rows, cols, scheme, rowwise)
    col = _empty_parts(x, cols, rows, scheme, columnwise)
    return (*row, *col, x.new_empty((), dtype=torch.float32))


def check_input(x: Tensor, what: str = "x") -> None:
    """x must be a strided (..., K) tensor of a supported dtype."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{what} must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(x, QuantizedTensor):
        raise InvalidInputError(
            f"{what} is quantised already: quantise the high-precision tensor, or dequantize() first"
        )
    if x.layout != torch.strided:
        raise InvalidInputError(f"{what} must be a strided tensor, got {x.layout}")
    if x.dtype not in DTYPES:
        raise InvalidInputError(f"{what} must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() < 1:
        raise InvalidInputError(f"{what} must have at least one dimension, got a scalar")


def quantize(
    x: Tensor,
    scheme: str | Scheme = "mxfp8",
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    scale: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantise x (..., K) to eight, six or four bits.

    Args:
        x: float32, bfloat16 or float16; any strides that two leading strides can describe, zero sizes included.
        scheme: a name of `SCHEMES`, a text or a `Scheme`.
        rowwise: make the copy (M, K) with blocks along K. columnwise: make the copy of the transposed matrix (K, M),
            with blocks along M, read in the same pass. At least one.
        seed: of stochastic rounding; needed by it, refused otherwise.
        scale: () float32 to use instead of the current maximum (delayed scaling; e4m3 and e5m2 per tensor only). The
            largest magnitude is then left in `.seen_amax`.
        backend: "portable" (Triton; GPU, or the interpreter), "reference" (plain torch), or "auto": the kernels in the
            interpreter, and on a GPU once they have been checked on one (`GPU_CHECKED`); until then the reference.

    Both backends give the same bits. What happens to zeros, infinities and NaN is written in `scales.py`.

    Raises:
        InvalidInputError: wrong dtype or strides, nothing to make, seed or scale where they do not belong, a Hadamard
            matrix on a length that is no multiple of 16. HardwareError: backend="portable" without a GPU.
    """
    check_input(x)
    scheme = find_scheme(scheme)
    if not isinstance(rowwise, bool) or not isinstance(columnwise, bool):
        raise InvalidInputError(f"rowwise and columnwise must be True or False, got {rowwise!r} and {columnwise!r}")
    if not (rowwise or columnwise):
        raise InvalidInputError("nothing to do: rowwise or columnwise must be True")
    if (seed is None) == (scheme.rounding == "stochastic"):
        raise InvalidInputError("schemes with stochastic rounding need a seed, and others take none")
    if scale is not None and (scheme.block != (0, 0) or not scheme.keeps_nan_in_place):
        raise InvalidInputError(f"only e4m3 and e5m2 with a scale per tensor take a scale, not {scheme}")
    if scale is not None and not (isinstance(scale, Tensor) and scale.numel() == 1 and scale.is_floating_point()):
        got = f"{tuple(scale.shape)} {scale.dtype}" if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(f"scale must be a tensor of one float32, got {got}")
    matrix = as_matrix(x)
    if scheme.hadamard and ((rowwise and matrix.cols % 16) or (columnwise and matrix.rows % 16)):
        raise InvalidInputError(f"the Hadamard matrix needs multiples of 16, got {matrix.rows} x {matrix.cols}")
    number = check_seed(0 if seed is None else seed)
    amax = None
    x = x.detach()
    if choose_backend(backend, x, "quantize") == "portable":
        if scale is not None:
            scale = scale.detach().to(x.device, torch.float32).reshape(1, 1)
        out = quantize_op(x, scheme.text, rowwise, columnwise, number, scale)
        made = [
            Parts(out[i], out[i + 1], out[i + 2] if scheme.scale == "nvfp4" else None) if wanted else None
            for i, wanted in ((0, rowwise), (3, columnwise))
        ]
        amax = out[6] if scale is not None else None
    else:
        wide = x.reshape(matrix.rows, matrix.cols)
        given = None if scale is None else scale.to(x.device)
        made = [
            quantize_reference(part, scheme, seed=seed, stream=stream, scale=given) if wanted else None
            for stream, (wanted, part) in enumerate(((rowwise, wide), (columnwise, wide.t())))
        ]
        if scale is not None:
            bits = scales.amax_bits(wide, finite_only=False)
            amax = (bits.amax() if bits.numel() else bits.new_zeros(())).view(torch.float32)
    return QuantizedTensor.from_parts(row=made[0], col=made[1], scheme=scheme, shape=x.shape, dtype=x.dtype, amax=amax)
