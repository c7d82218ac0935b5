"""Host side of the quantising kernels: a tensor as a matrix, tiles, and launches without detours.

`kernel[grid](...)` looks at every argument of every call to choose a compiled variant, 50 us of Python for thirty
arguments. What it looks at is few: dtypes, alignment of addresses, whether integers are 1 or multiples of 16. So
`quick` keeps the variants by a key of these.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import launch as launching
from gpu_accel.flash_attention3.hadamard import random_signs
from gpu_accel.flash_attention3.launch import capability
from gpu_accel.thunderkittens.gemm_hopper import machine_refusal
from gpu_accel.transformer_engine import codec, reference, scales
from gpu_accel.transformer_engine.activations import ACTIVATIONS
from gpu_accel.transformer_engine.formats import FORMATS
from gpu_accel.transformer_engine.quantize_kernels import (
    _amax_kernel,
    _block_kernel,
    _cast_kernel,
    _norm_kernel,
    _turn_kernel,
)
from gpu_accel.transformer_engine.reference import block_grid, quantize_reference
from gpu_accel.transformer_engine.schemes import Scheme

# Whether these have given the bits of the reference on a GPU (an H200). 8192 x 8192 in 1x128: plain Triton 191 us, the
# former 131, the latter 89, a copy 68; with a scale that is known 79 and 75.
BOTH_CHECKED = True  # hopper_quantize_kernel.py
TURN_CHECKED = True  # hopper_turn_kernel.py
SQUARE_CHECKED = True  # the same, in blocks of 128 x 128
MX_CHECKED = False  # the same, in MX blocks of 1 x 32: right on an H200, and not timed
CODES_CHECKED = True  # `turned_codes`
LONGEST_ROW = 16384  # values of a row that one program holds; longer rows are read twice
_LIMIT = 2**31 - 1
Three = tuple[Tensor, Tensor, Tensor]  # codes, scales, tensor scale; what does not exist is empty
_compiled: dict[tuple, Any] = {}


def _looked_at(argument: Any) -> tuple:
    """What Triton looks at to choose a variant."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return ()


def quick(kernel: Any, programs: int, arguments: tuple, options: dict) -> None:
    """Run a kernel whose run-time arguments come before its constants, on the device that is current."""
    if INTERPRET or launching._hook is not None:
        launching.launch(kernel, programs, arguments, options)
        return
    device = torch.cuda.current_device()
    key = (kernel.fn.__name__, device, tuple(map(_looked_at, arguments)), tuple(options.items()))
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = kernel[(programs,)](*arguments, **options)
    else:
        constants = [options[name] for name in kernel.arg_names[len(arguments) :]]
        compiled[(programs, 1, 1)](*arguments, *constants)
    if (seen := launching._seen) is not None:
        seen(kernel, compiled, (programs,), arguments, options)


def on_device(x: Tensor) -> Any:
    """A context in which the device of x is current."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


@dataclass(frozen=True)
class Source:
    """What is quantised, as a function of the tensor that is read: itself, a norm, or an activation.

    kind: "", "rms" or "layer" (with gamma, and beta for "layer"), or a name of `ACTIVATIONS`.
    """

    kind: str = ""
    gamma: Tensor | None = None
    beta: Tensor | None = None
    eps: float = 0.0

    @property
    def is_norm(self) -> bool:
        return self.kind in ("rms", "layer")

    @property
    def gated(self) -> bool:
        return self.kind in ACTIVATIONS and ACTIVATIONS[self.kind][1] == 2

    def width(self, cols: int) -> int:
        """Columns of what is quantised."""
        return cols // 2 if self.gated else cols


PLAIN = Source()


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


def _power(n: int) -> int:
    return 1 << (max(1, n) - 1).bit_length()


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
    if columnwise and down == 1 and scheme.element in ("e4m3", "e5m2"):
        # on an H200, share of a copy: MXFP8 0.58 at 32 x 64, 0.49 at 32 x 128; 1x128 0.37 with 8 warps, 0.30 with 16
        bk, values = (64, 1024) if scheme.scale == "e8m0" else (bk, 2048)
    return bm, bk, max(1, min(16, bm * bk // values))


def plain_tile(m: Matrix, columnwise: bool, values: int = 4096) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of which nothing but speed depends on the shape."""
    if columnwise:
        return 64, 128, 8
    bk = min(1024, _power(max(16, m.cols)))
    bm = max(1, min(_power(m.rows), values // bk))
    return bm, bk, max(1, min(4, bm * bk // 1024))


def _grid(m: Matrix, bm: int, bk: int) -> tuple[int, int, bool]:
    tiles = -(-m.cols // bk)
    return -(-m.rows // bm) * tiles, tiles, m.rows % bm == 0 and m.cols % bk == 0


def _empty_parts(x: Tensor, rows: int, cols: int, scheme: Scheme, made: bool) -> Three:
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


def takes_both(x: Tensor, scheme: Scheme, m: Matrix, source: Source) -> bool:
    """Whether the kernel of `hopper_quantize_kernel.py` makes both copies: of whole tiles in blocks of 1x128. It can do
    MX (1x32) too, with the right bits, but was slower there: 165 us against 142 for 8192 x 8192."""
    if not (BOTH_CHECKED and x.is_cuda) or machine_refusal(x) is not None:
        return False
    blocks = scheme.block == (1, 128) and scheme.scale in ("fp32", "pow2")
    plain = scheme.element in ("e4m3", "e5m2") and scheme.rounding == "nearest"
    whole = m.rows % 128 == 0 and m.cols % 128 == 0 and m.s_col == 1 and not m.nested
    return blocks and plain and whole and m.s_row % 8 == 0 and x.data_ptr() % 16 == 0


def takes_turn(x: Tensor, scheme: Scheme, m: Matrix, source: Source, known: bool) -> bool:
    """Whether the kernel of `hopper_turn_kernel.py` makes both copies: of whole tiles of bf16, not of a norm of it, in
    blocks of 1x128 or 128x128 or with one scale that is known, or in MX (1x32)."""
    if not (TURN_CHECKED and x.is_cuda) or machine_refusal(x) is not None:
        return False
    blocks = scheme.block == (1, 128) or (scheme.block == (0, 0) and known)
    blocks = blocks or (SQUARE_CHECKED and scheme.block == (128, 128) and not known)
    plain = scheme.element in ("e4m3", "e5m2") and scheme.rounding == "nearest" and not source.kind
    whole = m.rows % 128 == 0 and m.cols % 128 == 0 and m.s_col == 1 and not m.nested and m.s_row % 8 == 0
    wide = scheme.scale in ("fp32", "pow2")
    if MX_CHECKED and scheme.block == (1, 32):
        blocks = wide = scheme.scale == "e8m0"
    return x.dtype == torch.bfloat16 and blocks and wide and plain and whole and x.data_ptr() % 16 == 0


def _turn(x: Tensor, scheme: Scheme, m: Matrix, row: Three, col: Three, scale: Tensor, seen: Tensor | None) -> None:
    """Both copies (unwritten) by the kernel of `hopper_turn_kernel.py`.

    scale: the one that is known, of a scheme per tensor. seen: raised to the largest magnitude.
    """
    from gpu_accel.transformer_engine.hopper_turn_kernel import turn_kernel

    numbers, square = _numbers(scheme), scheme.block == (128, 128)
    across = 0 if square else scheme.block[1]
    tall = 128 if across or square else 64  # with a known scale 64 was faster: 75 us against 78 for 8192 x 8192, H200
    kept = ("SCALE", "LARGEST", "ADD", "EMAX", "FINITE")
    options = dict(
        GC=across, **{name: numbers[name] for name in kept}, E5M2=scheme.element == "e5m2", AMAX=seen is not None,
        TALL=tall, SQUARE=square, num_warps=tall // 16, maxnreg=128 if tall == 128 else 96, enable_fp_fusion=False,
    )  # fmt: skip
    pairs = x.as_strided((m.rows, m.cols), (m.s_row, 1)).view(torch.int32)
    codes = row[0].view(torch.int16), col[0].view(torch.int16)
    grids = [part[1].view(torch.int32) if across == 32 else part[1] for part in (row, col)]  # of MX four in a word
    arguments = (pairs, codes[0], grids[0], codes[1], grids[1], scale,
                 pairs if seen is None else seen.view(torch.int32),
                 m.rows, m.cols, m.s_row // 2, m.cols // 128)  # fmt: skip
    quick(turn_kernel, m.rows // tall * (m.cols // 128), arguments, options)


def run_quantize(
    x: Tensor, scheme: Scheme, rowwise: bool, columnwise: bool, *, seed: int = 0, scale: Tensor | None = None,
    seen: Tensor | None = None, source: Source = PLAIN, statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Three, Three]:  # fmt: skip
    """Launch the kernels: (row-wise, column-wise) copies, empty where not wanted. Arguments are checked by callers.

    scale: () float32 that is known. seen: () float32, raised to the largest magnitude of what is quantised, where the
    scale is known. statistics: means and 1 / deviations of the rows, float32, which a norm as source writes.
    """
    m = as_matrix(x)
    m = Matrix(m.rows, source.width(m.cols), m.inner, m.s_outer, m.s_row, m.s_col)
    row = _empty_parts(x, m.rows, m.cols, scheme, rowwise)
    col = _empty_parts(x, m.cols, m.rows, scheme, columnwise)
    per_row, per_tensor = scheme.block == (1, 0), scheme.block == (0, 0)
    known = scale is not None
    if not m.rows or not m.cols:
        for parts in (row, col):
            _fill_empty(parts, scheme)
            if scale is not None and parts[1].numel():
                parts[1].copy_(scale)
        return row, col
    in_one_tile = not per_tensor and (scheme.block[1] or (m.cols <= LONGEST_ROW and not columnwise))
    in_two_passes = not known and (not in_one_tile or scheme.scale == "nvfp4")
    if in_two_passes:
        maxima = x.new_zeros(m.rows + m.cols if per_row else 2, dtype=torch.int32)
        amax_r, amax_c = (maxima[: m.rows], maxima[m.rows :]) if per_row else (maxima[:1], maxima[1:])
    else:
        amax_r = amax_c = row[0] if seen is None else seen.view(torch.int32)
    numbers = _numbers(scheme)
    widths = [(n + 1) // 2 if scheme.packed else n for n in (m.cols, m.rows)]
    place = (m.rows, m.cols, m.inner, m.s_outer, m.s_row, m.s_col)
    signs = random_signs(16, reference.SIGNS_SEED, x.device) if scheme.hadamard else row[0]
    means, rstds = statistics or (x, x)
    given = (x if source.gamma is None else source.gamma, x if source.beta is None else source.beta, means, rstds)
    curve = ACTIVATIONS[source.kind][0] if source.kind in ACTIVATIONS else source.kind
    shared = dict(NESTED=m.nested, SOURCE=curve, GATED=source.gated, enable_fp_fusion=False)
    native = dict(NATIVE=native_fp8(x.device))
    counted = source.is_norm and in_two_passes and not per_row and not scheme.hadamard
    with on_device(x):
        if source.is_norm:
            options = dict(
                BK=_power(m.cols), NESTED=m.nested, SOURCE=curve, AMAX=counted,
                FINITE=scheme.keeps_nan_in_place or scheme.scale == "nvfp4", enable_fp_fusion=False,
                num_warps=max(1, min(16, _power(m.cols) // 512)),
            )  # fmt: skip
            quick(_norm_kernel, m.rows, (x, *given, amax_r, *place, source.eps), options)
        if in_two_passes:
            bm, bk, warps = plain_tile(m, bool(scheme.hadamard and columnwise) or (per_row and columnwise), 8192)
            programs, tiles, even = _grid(m, bm, bk)
            options = dict(
                BM=bm, BK=bk, AXIS=int(per_row), FINITE=scheme.keeps_nan_in_place or scheme.scale == "nvfp4",
                HADAMARD=bool(scheme.hadamard), ROW=rowwise, COL=columnwise, EVEN=even, num_warps=warps, **shared,
            )  # fmt: skip
            if not counted:
                quick(_amax_kernel, programs, (x, *given, amax_r, amax_c, signs, *place, tiles), options)
            if not scheme.hadamard and not per_row:
                amax_c = amax_r
        if rowwise and columnwise and takes_turn(x, scheme, m, source, known):
            _turn(x, scheme, m, row, col, row[1] if scale is None else scale, seen if known else None)
            return row, col
        if in_one_tile and rowwise and columnwise and takes_both(x, scheme, m, source):
            from gpu_accel.transformer_engine.hopper_quantize_kernel import both_kernel

            kept = ("SCALE", "LARGEST", "ADD", "EMAX", "FINITE")
            options = dict(
                GC=scheme.block[1], **{name: numbers[name] for name in kept}, E5M2=scheme.element == "e5m2",
                SOURCE=curve if source.is_norm else "", CURVE="" if source.is_norm else curve, GATED=source.gated,
                num_warps=8, maxnreg=128, enable_fp_fusion=False,
            )  # fmt: skip
            tile = (x, *given, *row[:2], *col[:2], m.rows, m.cols, m.s_row, m.cols // 128)
            quick(both_kernel, m.rows * m.cols // 128**2, tile, options)
            return row, col
        if in_one_tile:
            bm, bk, warps = block_tile(scheme, m, columnwise)
            programs, tiles, even = _grid(m, bm, bk)
            down, across = scheme.block
            options = dict(
                BM=bm, BK=bk, GR=down, GC=across or bk, HADAMARD=bool(scheme.hadamard), ROW=rowwise, COL=columnwise,
                EVEN=even, num_warps=warps, **numbers, **shared, **native,
            )  # fmt: skip
            blocks = (x, *given, *row, *col, amax_r, amax_c, signs, *place, tiles, *widths, seed)
            quick(_block_kernel, programs, blocks, options)
            return row, col
        # the scale is known before the tile is read
        bm, bk, warps = plain_tile(m, columnwise)
        programs, tiles, even = _grid(m, bm, bk)
        options = dict(
            BM=bm, BK=bk, MODE=2 if known else int(per_row), ROW=rowwise, COL=columnwise, EVEN=even,
            AMAX=seen is not None and known, num_warps=warps, **numbers, **shared, **native,
        )  # fmt: skip
        known_scale = x if scale is None else scale
        arguments = (x, *given, row[0], col[0], row[1], col[1], amax_r, amax_c, known_scale, known_scale, *place, tiles,
                     *widths, seed)  # fmt: skip
        quick(_cast_kernel, programs, arguments, options)
    return row, col


def turned_codes(codes: Tensor) -> Tensor:
    """uint8 (rows, cols), contiguous, as (cols, rows), contiguous: plain torch takes a byte at a time."""
    if not (INTERPRET or (codes.is_cuda and CODES_CHECKED)) or not codes.numel():
        return codes.t().contiguous()
    rows, cols = codes.shape
    out, tiles = codes.new_empty((cols, rows)), -(-cols // 128)
    options = dict(BM=64, BK=128, EVEN=rows % 64 == 0 and cols % 128 == 0, num_warps=8)
    with on_device(codes):
        quick(_turn_kernel, -(-rows // 64) * tiles, (codes, out, rows, cols, tiles), options)
    return out


def _fill_empty(parts: Three, scheme: Scheme) -> None:
    """The scales of no numbers at all: those of zeros."""
    zero = quantize_reference(torch.zeros(1, 16, device=parts[1].device), scheme.with_(rounding="nearest"))
    parts[1].fill_(zero.scales.flatten()[0].item())
    parts[2].fill_(1.0)
