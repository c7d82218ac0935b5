"""Incoherent processing: multiply the rows of q and k by one random orthogonal matrix M before rounding them to fp8.

M = diag(random +-1) x Hadamard / sqrt(d) (FlashAttention-3, arXiv:2407.08608, section 3.3). Since M M^T = 1, q k^T does
not change, but one outlier among d values becomes d values of ordinary size, so that the scale of the block follows
the many and not the one. The product costs d log2 d additions a row.

A head dimension that is no power of two gets a block-diagonal Hadamard matrix: equal blocks of the largest power of
two that divides it (96 = 3 x 32, 80 = 5 x 16, 192 = 3 x 64). It stays orthogonal, and spreads an outlier over its
block only. Nothing is padded.

The butterflies run from stride 1 upwards in float32, in the kernel and in the reference alike: results are bit-equal.
"""

from __future__ import annotations

import functools
import math
import random

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.flash_attention3.problem import check_flag, check_seed, check_strided

_INTERPRET = tl.constexpr(INTERPRET)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_DIM = 16384


def hadamard_block(dim: int) -> int:
    """The size of the Hadamard blocks for a last dimension `dim`: the largest power of two dividing it."""
    return dim & -dim


def sign_values(dim: int, seed: int) -> tuple[float, ...]:
    """`dim` random values of +-1 in plain Python: those of torch.randint on a CPU generator of this seed.

    That generator is the Mersenne twister (low 32 bits of the seed), as is Python's, which only starts differently.
    """
    state = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) & 0xFFFFFFFF)
    twister = random.Random()
    twister.setstate((3, (*state, 624), None))
    return tuple(1.0 - 2.0 * (twister.getrandbits(32) & 1) for _ in range(dim))


@functools.lru_cache(maxsize=64)
def _signs(dim: int, seed: int, device: torch.device) -> Tensor:
    # The tensor outlives this call, so no mode of the caller may leave its mark on it. It is kept because a copy from
    # the host could not be captured in a CUDA graph.
    with torch.inference_mode(False), _disable_current_modes():
        return torch.tensor(sign_values(dim, seed), dtype=torch.float32, device=device)


def random_signs(dim: int, seed: int, device: torch.device) -> Tensor:
    """The random diagonal of M: (dim,) float32 of +-1, the same on every device. Shared: not to be written to."""
    return _signs(dim, seed, torch.device(device))


@torch.library.custom_op("gpu_accel::hadamard_signs", mutates_args=())
def _signs_op(like: Tensor, seed: int) -> Tensor:
    """`random_signs` for the last dimension of `like`, as something that compilers and modes see through a fake."""
    return random_signs(like.shape[-1], seed, like.device).clone()


@_signs_op.register_fake
def _(like: Tensor, seed: int) -> Tensor:
    return torch.empty(like.shape[-1:], dtype=torch.float32, device=like.device)


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _stage(x, ROWS: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr):
    """One butterfly of stride H: (a, b) -> (a + b, a - b)."""
    y = tl.reshape(x, (ROWS, COLS // (2 * H), 2, H))
    if _INTERPRET:  # the same sums; the interpreter reduces with a user's function one element at a time
        a, b = tl.split(tl.permute(y, (0, 1, 3, 2)))
        y = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    else:
        # The xor of a pair, xor oneself, is the partner: one warp shuffle or nothing, where a split and a join would
        # go through shared memory at every stride.
        bits = y.to(tl.int32, bitcast=True)
        both = tl.broadcast_to(tl.reduce(bits, 2, _xor, keep_dims=True), y.shape)
        partner = (both ^ bits).to(tl.float32, bitcast=True)
        side = tl.arange(0, 2)[None, None, :, None]
        y = tl.where(side == 0, 1.0, -1.0) * y + partner
    return tl.reshape(y, (ROWS, COLS))


@triton.jit
def butterflies(x, ROWS: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of every run of 2**LOG2 columns of x (ROWS, COLS) float32."""
    for i in tl.static_range(LOG2):
        x = _stage(x, ROWS, COLS, 2**i)
    return x


@triton.jit
def mix_rows(
    tile, signs, ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr, FACTOR: tl.constexpr
):
    """A tile (ROWS, COLS) float32 times M."""
    c = tl.arange(0, COLS)
    tile = tile * tl.load(signs + c, mask=c < D, other=0.0)[None, :]
    return butterflies(tile, ROWS, COLS, LOG2) * FACTOR


@triton.jit
def load_rows(
    x, stride, row, rows_left, signs,
    ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr, FACTOR: tl.constexpr,
    HADAMARD: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS) of x as float32 (ROWS, COLS), zeros outside, times M if HADAMARD."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    pointers = x + (row + r).to(tl.int64)[:, None] * stride + c[None, :]
    tile = tl.load(pointers, mask=(r < rows_left)[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
    if HADAMARD:
        tile = mix_rows(tile, signs, ROWS, D, COLS, LOG2, FACTOR)
    return tile


@triton.jit
def _hadamard_kernel(
    x, signs, out, sb, sh, ss, heads, seqlen, row_blocks,
    ROWS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr, FACTOR: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // row_blocks
    row = (pid % row_blocks) * ROWS
    x += (bh // heads) * sb + (bh % heads) * sh
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    if INVERSE:  # M is (signs, then Hadamard) and Hadamard is symmetric: (Hadamard, then signs) undoes it
        tile = load_rows(x, ss, row, seqlen - row, signs, ROWS, D, COLS, LOG2, FACTOR, False)
        tile = butterflies(tile, ROWS, COLS, LOG2) * FACTOR
        tile = tile * tl.load(signs + c, mask=c < D, other=0.0)[None, :]
    else:
        tile = load_rows(x, ss, row, seqlen - row, signs, ROWS, D, COLS, LOG2, FACTOR, True)
    pointers = out + (bh * seqlen + row + r)[:, None] * D + c[None, :]
    tl.store(pointers, tile.to(out.dtype.element_ty), mask=(row + r < seqlen)[:, None] & (c < D)[None, :])


def tile_shape(rows: int, dim: int, largest: int = 32768) -> tuple[int, int, int]:
    """(ROWS, COLS, num_warps) of a tile of at most `largest` values: 32 a thread, up to 16 warps."""
    cols = triton.next_power_of_2(dim)
    tile_rows = min(triton.next_power_of_2(max(1, rows)), max(1, largest // cols))
    return tile_rows, cols, max(1, min(16, tile_rows * cols // 1024))


def as_bhsd(x: Tensor) -> Tensor:
    """(..., seqlen, dim) as (batch, heads, seqlen, dim); a view wherever strides allow one."""
    if x.dim() == 4:
        return x
    if x.dim() < 4:
        return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    return x.reshape(-1, *x.shape[-3:])


@torch.library.custom_op("gpu_accel::hadamard_transform", mutates_args=())
def _hadamard_op(x: Tensor, seed: int, inverse: bool) -> Tensor:
    dim = x.shape[-1]
    block = hadamard_block(dim)
    view = as_bhsd(x)
    batch, heads, seqlen, _ = view.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, cols, warps = tile_shape(64, dim)
        row_blocks = triton.cdiv(seqlen, rows)
        arguments = (
            view, random_signs(dim, seed, x.device), out, *view.stride()[:3], heads, seqlen, row_blocks,
        )  # fmt: skip
        options = dict(
            ROWS=rows, D=dim, COLS=cols, LOG2=block.bit_length() - 1, FACTOR=1 / math.sqrt(block), INVERSE=inverse,
            num_warps=warps,
        )  # fmt: skip
        launch(_hadamard_kernel, batch * heads * row_blocks, arguments, options)
    return out


@_hadamard_op.register_fake
def _(x: Tensor, seed: int, inverse: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:
    _, ctx.seed, ctx.inverse = inputs


def _hadamard_backward(ctx, grad: Tensor):
    # M is orthogonal: its transpose is its inverse
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    return _hadamard_op(grad, ctx.seed, not ctx.inverse), None, None


_hadamard_op.register_autograd(_hadamard_backward, setup_context=_save)


def hadamard_reference(
    x: Tensor, *, seed: int = 0, inverse: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`hadamard_transform` in plain torch, computed and returned in `dtype`; bit-equal to the kernel in float32."""
    dim = x.shape[-1]
    block = hadamard_block(dim)
    signs = _signs_op(x.detach(), seed).to(dtype)
    factor = torch.full((), 1 / math.sqrt(block), dtype=dtype, device=x.device)
    y = x.to(dtype) if inverse else x.to(dtype) * signs
    h = 1
    while h < block:
        pair = y.reshape(*x.shape[:-1], dim // (2 * h), 2, h)
        a, b = pair[..., 0, :], pair[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        h *= 2
    y = y * factor
    return y * signs if inverse else y


def check_rows(name: str, x: Tensor) -> None:
    """`name` must be a (..., seqlen, dim) tensor of a supported float dtype with last stride 1."""
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_strided(name, x)
    shape = tuple(x.shape)
    if x.dim() < 2:
        raise InvalidInputError(f"{name} must be (..., seqlen, head_dim), got shape {shape}")
    if x.dtype not in DTYPES:
        raise InvalidInputError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if not 1 <= x.shape[-1] <= MAX_DIM:
        raise InvalidInputError(f"the last dimension of {name} must be 1 to {MAX_DIM}, got shape {shape}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise InvalidInputError(
            f"the last dimension of {name} must have stride 1, got strides {x.stride()}: call .contiguous()"
        )


def choose_backend(backend: str, x: Tensor, *, what: str, allowed: tuple[str, ...] = ("auto", "portable", "reference")):
    """Resolve "auto" to "portable" (GPU, or a CPU under the interpreter) or "reference"; refuse what cannot run."""
    if backend not in allowed:
        raise InvalidInputError(f"backend of {what} must be one of {', '.join(allowed)}, got {backend!r}")
    runs_here = INTERPRET or x.is_cuda
    if backend == "auto":
        return "portable" if runs_here else "reference"
    if backend == "portable" and not runs_here:
        raise HardwareError(
            f"{what}: the portable kernel got a tensor on {x.device.type}: move it to a CUDA device, set "
            f"TRITON_INTERPRET=1 before Python starts, or use backend='reference'"
        )
    return backend


def hadamard_transform(x: Tensor, *, seed: int = 0, inverse: bool = False, backend: str = "auto") -> Tensor:
    """x times the random orthogonal matrix M of incoherent processing, along the last dimension.

    Args:
        x: (..., seqlen, dim) bfloat16, float16 or float32, any strides with last stride 1, dim at most 16384.
        seed: chooses the random signs; q and k must share it. The same signs on every device.
        inverse: multiply by M^T instead, which undoes it.

    Returns:
        a contiguous tensor of the shape and dtype of x, computed in float32. Differentiable (with the inverse).
        Dimensions that are no power of two: see the head of this file.

    Raises:
        InvalidInputError: wrong dtype, rank or strides. HardwareError: backend="portable" without a GPU.
    """
    check_rows("x", x)
    seed, inverse = check_seed(seed), check_flag("inverse", inverse)
    if choose_backend(backend, x, what="hadamard_transform") == "reference":
        return hadamard_reference(x, seed=seed, inverse=inverse).to(x.dtype)
    return _hadamard_op(x, seed, inverse)
