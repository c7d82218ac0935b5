"""Softmax of rows of any length, block by block: the online softmax inside attention, as an op of its own.

    forward   walk 1:  m = max(m, max x),  l_i = l * exp(m_old - m) + sum exp(x - m)     (one read)
              walk 2:  y = exp(x - m) / l                                              (one read, one write)
    backward  walk 1:  s = sum(dy * y);    walk 2:  dx = y * (dy - s)

A row that fits one block is read once and kept in registers. Short rows share a program, `ROWS` at a time. All sums are
float32. A row of -inf only (a fully masked row) gives zeros and zero gradients, where torch.softmax gives NaN; NaN and
+inf in a row make the row NaN, as in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.device import LOG2E
from gpu_accel.flash_attention3.hadamard import DTYPES, as_bhsd, choose_backend
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_strided

MAX_BLOCK = 32768
_TILE = 4096  # values a program holds at least, when rows are short


@triton.jit
def _row_pointers(x, rows, heads, seqlen, sb, sh, ss):
    """Pointers to the first element of `rows`, counted over (batch, heads, seqlen)."""
    s = rows % seqlen
    bh = rows // seqlen
    return x + (bh // heads) * sb + (bh % heads) * sh + s * ss


@triton.jit
def _load(base, start, length, stride, live, BLOCK: tl.constexpr, TILE: tl.constexpr, other: tl.constexpr):
    c = tl.arange(0, TILE)
    inside = (c < BLOCK) & (start + c < length)
    pointers = base[:, None] + (start + c).to(tl.int64)[None, :] * stride
    return tl.load(pointers, mask=live[:, None] & inside[None, :], other=other).to(tl.float32)


@triton.jit
def _store(base, tile, start, length, live, BLOCK: tl.constexpr, TILE: tl.constexpr):
    c = tl.arange(0, TILE)
    inside = (c < BLOCK) & (start + c < length)
    tl.store(base[:, None] + (start + c)[None, :], tile.to(base.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _online(x, m_i, l_i):
    """One step of the online softmax: (m_i, l_i) of the values seen so far -> with the columns of x."""
    m_new = tl.maximum(m_i, tl.max(x, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    l_i = l_i * tl.exp2((m_i - safe) * LOG2E) + tl.sum(tl.exp2((x - safe[:, None]) * LOG2E), 1)
    return m_new, l_i


@triton.jit
def _normalised(x, m_i, l_i):
    safe = tl.where(m_i == float("-inf"), 0.0, m_i)
    total = tl.where(l_i == 0.0, 1.0, l_i)  # not "l > 0": NaN has to stay NaN
    return tl.exp2((x - safe[:, None]) * LOG2E) / total[:, None]


@triton.jit
def _softmax_kernel(
    x, y, count, heads, seqlen, length, sb, sh, ss, sn,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    x_rows = _row_pointers(x, rows, heads, seqlen, sb, sh, ss)
    y_rows = y + rows * length
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    if SINGLE:
        tile = _load(x_rows, 0, length, sn, live, BLOCK, TILE, float("-inf"))
        m_i, l_i = _online(tile, m_i, l_i)
        _store(y_rows, _normalised(tile, m_i, l_i), 0, length, live, BLOCK, TILE)
    else:
        for start in range(0, length, BLOCK):
            m_i, l_i = _online(_load(x_rows, start, length, sn, live, BLOCK, TILE, float("-inf")), m_i, l_i)
        for start in range(0, length, BLOCK):
            tile = _load(x_rows, start, length, sn, live, BLOCK, TILE, float("-inf"))
            _store(y_rows, _normalised(tile, m_i, l_i), start, length, live, BLOCK, TILE)


@triton.jit
def _softmax_backward_kernel(
    dy, y, dx, count, heads, seqlen, length, sb, sh, ss, sn,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < count
    dy_rows = _row_pointers(dy, rows, heads, seqlen, sb, sh, ss)
    y_rows = y + rows * length
    dx_rows = dx + rows * length
    if SINGLE:
        g = _load(dy_rows, 0, length, sn, live, BLOCK, TILE, 0.0)
        p = _load(y_rows, 0, length, 1, live, BLOCK, TILE, 0.0)
        _store(dx_rows, p * (g - tl.sum(g * p, 1)[:, None]), 0, length, live, BLOCK, TILE)
    else:
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, length, BLOCK):
            g = _load(dy_rows, start, length, sn, live, BLOCK, TILE, 0.0)
            total += tl.sum(g * _load(y_rows, start, length, 1, live, BLOCK, TILE, 0.0), 1)
        for start in range(0, length, BLOCK):
            g = _load(dy_rows, start, length, sn, live, BLOCK, TILE, 0.0)
            p = _load(y_rows, start, length, 1, live, BLOCK, TILE, 0.0)
            _store(dx_rows, p * (g - total[:, None]), start, length, live, BLOCK, TILE)


def _launch(kernel, strided: Tensor, others: tuple[Tensor, ...], out: Tensor, block_size: int) -> None:
    """Run a kernel over the rows of `strided`; `others` and `out` are contiguous and of its shape."""
    if out.numel() == 0:
        return
    view = as_bhsd(strided)
    batch, heads, seqlen, length = view.shape
    block = min(block_size, next_power_of_2(length))
    tile = next_power_of_2(block)
    rows = max(1, min(64, _TILE // tile, next_power_of_2(batch * heads * seqlen)))
    count = batch * heads * seqlen
    arguments = (view, *others, out, count, heads, seqlen, length, *view.stride())
    options = dict(
        ROWS=rows, BLOCK=block, TILE=tile, SINGLE=length <= block, num_warps=max(1, min(16, rows * tile // 1024))
    )
    launch(kernel, triton.cdiv(count, rows), arguments, options)


@torch.library.custom_op("gpu_accel::blockwise_softmax", mutates_args=())
def _softmax_op(scores: Tensor, block_size: int) -> Tensor:
    y = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    _launch(_softmax_kernel, scores, (), y, block_size)
    return y


@_softmax_op.register_fake
def _(scores: Tensor, block_size: int) -> Tensor:
    return torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)


@torch.library.custom_op("gpu_accel::blockwise_softmax_backward", mutates_args=())
def _softmax_backward_op(dy: Tensor, y: Tensor, block_size: int) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _launch(_softmax_backward_kernel, dy, (y.contiguous(),), dx, block_size)
    return dx


@_softmax_backward_op.register_fake
def _(dy: Tensor, y: Tensor, block_size: int) -> Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _setup(ctx, inputs, output) -> None:
    ctx.block_size = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx, dy: Tensor):
    (y,) = ctx.saved_tensors
    return _softmax_backward_op(dy, y, ctx.block_size), None


_softmax_op.register_autograd(_backward, setup_context=_setup)


def softmax_reference(scores: Tensor) -> Tensor:
    """Softmax over the last dimension in plain torch, in float32 or float64; a row of -inf gives zeros."""
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if x.shape[-1] == 0:
        return scores.clone()
    empty = (x == float("-inf")).all(-1, keepdim=True)
    y = torch.softmax(torch.where(empty, 0.0, x), -1)
    return torch.where(empty, 0.0, y).to(scores.dtype)


def blockwise_softmax(scores: Tensor, block_size: int = 4096, *, backend: str = "auto") -> Tensor:
    """Softmax over the last dimension, computed online over blocks of `block_size` columns.

    Args:
        scores: (..., length) bfloat16, float16 or float32, rows of any length, any strides. Differentiable (once).
        block_size: columns held at a time, 1 to 32768. Rows up to this length are read once instead of twice.
        backend: "portable" (plain Triton), "reference" (plain torch), "auto": portable where it runs.

    Returns:
        a contiguous tensor of the shape and dtype of `scores`; zeros for rows of -inf.

    Raises:
        InvalidInputError: wrong dtype, rank or block_size. HardwareError: backend="portable" without a GPU.
    """
    if not isinstance(scores, Tensor) or scores.dim() < 1:
        raise InvalidInputError(f"scores must be a tensor of at least one dimension, got {shown(scores)}")
    check_strided("scores", scores)
    if scores.dtype not in DTYPES:
        raise InvalidInputError(f"scores must be bfloat16, float16 or float32, got {scores.dtype}")
    if not isinstance(block_size, int) or isinstance(block_size, bool) or not 1 <= block_size <= MAX_BLOCK:
        raise InvalidInputError(f"block_size must be 1 to {MAX_BLOCK} columns, got {shown(block_size)}")
    if choose_backend(backend, scores, what="blockwise_softmax") == "reference":
        return softmax_reference(scores)
    return _softmax_op(scores, block_size)
