"""Fused rows with autograd: RMSNorm and LayerNorm with residual and dropout before them, and softmax.

    y, h = layer_norm(x, weight, bias, residual=r, dropout_p=0.1, seed=7, prenorm=True)     # h = dropout(x) + r
    y = rms_norm(x, weight)
    p = softmax(x)

Any row length, float32, bfloat16 or float16; arithmetic in float32. The custom ops are gpu_accel::tk_norm, tk_softmax
and their backwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.gluon_launch import multiprocessors
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_flag
from gpu_accel.thunderkittens import long_rows, reference, row_ring
from gpu_accel.thunderkittens import row_kernels as kernels
from gpu_accel.thunderkittens.arguments import check_tensors, integer, real
from gpu_accel.thunderkittens.chunked import _device
from gpu_accel.thunderkittens.linear import choose

WHOLE = 16384  # elements of a row that stay in registers
_BLOCK = 16384  # of a longer one
_ROW_STAGES = 3  # rows on their way at once in the backward of norms; see test_norms_with_three_rows_ahead
_ROW_THREADS = 640  # an SM, of its programs, all of which must have room at once: they share the rows evenly
_CENTER_THREADS = 576  # where sums of bias take more registers; as fast as 640 (285 us, 281)
_ROW_BYTES = 224 << 10  # of shared memory for rows on their way; sums of warps and numbers of rows take up to 1 KB more
_WIDE = 65536  # sums of parts from which on they are added in small tiles: 9 us for 20 (33 parts, H200)
_PARTS = 256  # of the sums over rows: about two programs an SM
_ROW_ELEMENTS = 512  # of a warp, in that backward
_TOGETHER = 1024  # width up to which LayerNorm's backward has one reduction over threads for two sums (239 us for 288)


def _rows(x: Tensor) -> Tensor:
    """x as (rows, width) with neighbours along a row next to each other in memory; copied where it must be."""
    width = x.shape[-1]
    x = x.reshape(x.numel() // width if width else 0, width)
    return x if x.stride(1) == 1 or width == 1 else x.contiguous()


def _policies(width: int, whole: int) -> dict:
    """Of long rows, which are read twice, in the L2 cache: to stay until then."""
    kept = width > whole
    return dict(STAY="evict_last" if kept else "", GO="evict_first" if kept else "")


def _cut(width: int, whole: int) -> dict:
    block = next_power_of_2(width) if width <= whole else min(_BLOCK, next_power_of_2(whole))
    most = 16 if width <= whole else 32
    return dict(BLOCK=block, WHOLE=width <= whole, num_warps=max(1, min(most, block // 512)))


def _row_programs(width: int, device: torch.device, center: bool, *loaded: Tensor | None) -> tuple[int, dict]:
    """(programs, options) of `_norm_backward_rows_kernel`: 16 elements a thread.

    loaded: what every row reads. Stages but the last are buffers in shared memory, as many as fit.
    """
    block = next_power_of_2(width)
    warps = max(1, min(32, block // _ROW_ELEMENTS))
    sms = multiprocessors(device) if device.type == "cuda" else 2
    stages = min(_ROW_STAGES, 1 + _ROW_BYTES // sum(block * x.element_size() for x in loaded if x is not None))
    threads = _CENTER_THREADS if center else _ROW_THREADS
    return sms * max(1, threads // (32 * warps)), dict(BLOCK=block, STAGES=stages, num_warps=warps)


def _dropout_arguments(p: float, seed: int) -> tuple[int, int, float]:
    """(seed, limit, scale of what is kept)."""
    return seed, reference.dropout_limit(p), 1.0 / (1.0 - p) if p < 1 else 0.0


@torch.library.custom_op("gpu_accel::tk_norm", mutates_args=())
def norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, center: bool,
    dropout_p: float, seed: int, keep_sum: bool, whole: int, way: str = "portable",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, sum, means, rstds) of x (rows, width). The sum is empty unless keep_sum; so are means unless center.

    whole: elements of a row that stay in registers. way: "portable", "hopper" (`long_rows_kernel`) or "auto".
    """
    rows, width = x.shape
    y = x.new_empty(rows, width)
    summed = x.new_empty((rows, width) if keep_sum else (0, width), dtype=_sum_dtype(x, residual))
    means = x.new_empty(rows if center else 0, dtype=torch.float32)
    rstds = x.new_empty(rows, dtype=torch.float32)
    x = _rows(x)
    residual = None if residual is None else _rows(residual)
    weight, bias = (None if w is None else w.contiguous() for w in (weight, bias))
    kind = "layer" if center else "rms"
    bare = residual is None and not dropout_p and not keep_sum
    ring = None
    if x.numel() and not dropout_p:
        name = kind if residual is None else f"add_{kind}"
        ring = row_ring.choice(way, "forward", name, [x, residual], [weight, bias], [y.dtype, summed.dtype])
    with _device(x):
        if ring is not None:
            row_ring.forward(x, y, kind, ring, weight, bias, residual, summed, means, rstds, eps)
        elif x.numel() and bare and _long(x, kind, whole, way):
            long_rows.run(x, y, kind, weight, bias, means, rstds, eps)
        elif x.numel():
            launch(
                kernels._norm_kernel, rows,
                (x, residual, weight, bias, y, summed, means, rstds, x.stride(0),
                 residual.stride(0) if residual is not None else 0, width, eps, *_dropout_arguments(dropout_p, seed)),
                dict(CENTER=center, WEIGHT=weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
                     DROPOUT=dropout_p > 0, KEEP_SUM=keep_sum, **_policies(width, whole), **_cut(width, whole)),
            )  # fmt: skip
    return y, summed, means, rstds


def _sum_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


@norm_op.register_fake
def _(x, residual, weight, bias, eps, center, dropout_p, seed, keep_sum, whole, way="portable"):
    rows, width = x.shape
    return (
        x.new_empty(rows, width),
        x.new_empty((rows, width) if keep_sum else (0, width), dtype=_sum_dtype(x, residual)),
        x.new_empty(rows if center else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )


@torch.library.custom_op("gpu_accel::tk_norm_backward", mutates_args=())
def norm_backward_op(
    dy: Tensor, dsum: Tensor | None, h: Tensor, weight: Tensor | None, means: Tensor, rstds: Tensor,
    x_dtype: torch.dtype, residual_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
    center: bool, dropout_p: float, seed: int, whole: int, way: str = "portable",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, dweight, dbias); what is absent is empty. h: what was normalised."""
    rows, width = h.shape
    has_residual, has_bias = residual_dtype is not None, bias_dtype is not None
    dx = h.new_empty(rows, width, dtype=x_dtype)
    dresidual = h.new_empty((rows, width) if has_residual else (0,), dtype=residual_dtype or torch.float32)
    h, dy = _rows(h), _rows(dy)
    dsum = None if dsum is None else _rows(dsum)
    weight = None if weight is None else weight.contiguous()
    given = dict(CENTER=center, WEIGHT=weight is not None, DSUM=dsum is not None, RESIDUAL=has_residual,
                 DROPOUT=dropout_p > 0)  # fmt: skip
    ring = None
    if h.numel() and not dropout_p:
        name = ("add_" if has_residual else "") + ("layer" if center else "rms")
        ring = row_ring.choice(way, "backward", name, [h, dy, dsum], [weight], [x_dtype, residual_dtype])
    if ring is not None:
        programs = row_ring.programs_of_rows(rows, ring, h.device)
        scaled = weight is not None
        partial_w, partial_b = (h.new_empty(programs * n, width, dtype=torch.float32) for n in (scaled, has_bias))
        with _device(h):
            row_ring.backward(h, dy, dx, "layer" if center else "rms", ring, weight, means, rstds, dsum,
                              dresidual if has_residual else None, partial_w if scaled else None,
                              partial_b if has_bias else None)  # fmt: skip
        return dx, dresidual, *_summed(partial_w, partial_b, weight, bias_dtype)
    if width <= whole and (weight is not None or has_bias):
        programs, options = _row_programs(width, h.device, center, h, dy, dsum, weight)
        programs = max(1, min(programs, rows))
        partial_w, partial_b = (
            h.new_empty((programs, width) if there and h.numel() else (0, width), dtype=torch.float32)
            for there in (weight is not None, has_bias)
        )
        with _device(h):
            if h.numel():
                launch(
                    kernels._norm_backward_rows_kernel, programs,
                    (h, dy, dsum, weight, means, rstds, dx, dresidual, partial_w, partial_b, h.stride(0), dy.stride(0),
                     dsum.stride(0) if dsum is not None else 0, rows, width, programs,
                     *_dropout_arguments(dropout_p, seed)),
                    given | options | {"BIAS": has_bias, "TOGETHER": width <= _TOGETHER},
                )  # fmt: skip
        return dx, dresidual, *_summed(partial_w, partial_b, weight, bias_dtype)
    cols = min(128, max(16, next_power_of_2(width)))
    blocks = -(-width // cols)
    parts = max(1, min(-(-_PARTS // max(1, blocks)), -(-rows // 16)))
    partial_w = h.new_zeros((parts, width) if weight is not None else (0,), dtype=torch.float32)
    partial_b = h.new_zeros((parts, width) if has_bias else (0,), dtype=torch.float32)
    with _device(h):
        if h.numel():
            launch(
                kernels._norm_backward_kernel, rows,
                (h, dy, dsum, weight, means, rstds, dx, dresidual, h.stride(0), dy.stride(0),
                 dsum.stride(0) if dsum is not None else 0, width, *_dropout_arguments(dropout_p, seed)),
                given | _policies(width, whole) | _cut(width, whole),
            )  # fmt: skip
            if weight is not None or has_bias:
                launch(
                    kernels._norm_columns_kernel, (blocks, parts),
                    (h, dy, means, rstds, partial_w, partial_b, h.stride(0), dy.stride(0), rows, width,
                     -(-rows // parts)),
                    dict(ROWS=32, COLS=cols, CENTER=center, WEIGHT=weight is not None, BIAS=has_bias, STAGES=3,
                         num_warps=4),
                )  # fmt: skip
    return dx, dresidual, *_summed(partial_w, partial_b, weight, bias_dtype)


def add_parts(parts: Tensor, dtype: torch.dtype, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums of parts (count, ...) float32 over the first dimension in `dtype`, and of `second` (count, ...), if any."""
    given = [x for x in (parts, second) if x is not None]
    outs = [x.new_empty(x.shape[1:], dtype=dtype) for x in given]
    count, width = parts.shape[0], parts[:1].numel()
    wide = max(x[:1].numel() for x in given)
    if count and width:
        with _device(parts):
            rows, cols, warps = (32, 32, 4) if wide >= _WIDE else (min(512, max(16, next_power_of_2(count))), 16, 8)
            launch(kernels._parts_kernel, (-(-wide // cols), len(given)),
                   (parts, outs[0], given[-1], outs[-1], count, width, given[-1][:1].numel()),
                   dict(ROWS=rows, COLS=cols, num_warps=warps))  # fmt: skip
    else:
        for out in outs:
            out.zero_()
    return outs[0], outs[1] if second is not None else parts.new_empty(0)


def _summed(parts_w: Tensor, parts_b: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None):
    """(dweight, dbias) of their parts (parts, width); empty where there is none."""
    if weight is not None and bias_dtype in (None, weight.dtype):
        return add_parts(parts_w, weight.dtype, parts_b if bias_dtype is not None else None)
    dweight = parts_w.sum(0).to(weight.dtype) if weight is not None else parts_w.new_empty(0)
    return dweight, parts_b.sum(0).to(bias_dtype) if bias_dtype is not None else parts_b.new_empty(0)


@norm_backward_op.register_fake
def _(dy, dsum, h, weight, means, rstds, x_dtype, residual_dtype, bias_dtype, center, dropout_p, seed, whole,
      way="portable"):  # fmt: skip
    rows, width = h.shape
    wide = torch.float32
    return (
        h.new_empty(rows, width, dtype=x_dtype),
        h.new_empty((rows, width) if residual_dtype is not None else (0,), dtype=residual_dtype or wide),
        h.new_empty((width,) if weight is not None else (0,), dtype=weight.dtype if weight is not None else wide),
        h.new_empty((width,) if bias_dtype is not None else (0,), dtype=bias_dtype or wide),
    )


refuse_second(norm_backward_op, "a norm by kernels")


def _norm_save(ctx, inputs, output):
    x, residual, weight, bias, _, center, dropout_p, seed, keep_sum, whole, way = inputs
    _, summed, means, rstds = output
    ctx.save_for_backward(summed if keep_sum else x, weight, means, rstds)
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype)
    ctx.scalars = (center, dropout_p, seed, whole, way)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(means, rstds)


def _norm_gradients(ctx, dy, dsum, *_):
    h, weight, means, rstds = ctx.saved_tensors
    dy = h.new_zeros(h.shape, dtype=ctx.dtypes[0]) if dy is None else dy
    dsum = None if dsum is None or not dsum.numel() else dsum
    dx, dresidual, dweight, dbias = norm_backward_op(dy, dsum, h, weight, means, rstds, *ctx.dtypes, *ctx.scalars)
    needs = ctx.needs_input_grad
    return (dx, dresidual if needs[1] else None, dweight if needs[2] else None, dbias if needs[3] else None,
            *(None for _ in range(7)))  # fmt: skip


norm_op.register_autograd(_norm_gradients, setup_context=_norm_save)


@torch.library.custom_op("gpu_accel::tk_softmax", mutates_args=())
def softmax_op(x: Tensor, whole: int, way: str = "portable") -> Tensor:
    rows, width = x.shape
    y = x.new_empty(rows, width)
    x = _rows(x)
    with _device(x):
        ring = row_ring.choice(way, "forward", "softmax", [x], [], []) if x.numel() else None
        if ring is not None:
            row_ring.forward(x, y, "softmax", ring)
        elif x.numel() and _long(x, "softmax", whole, way):
            long_rows.run(x, y, "softmax")
        elif x.numel():
            launch(kernels._softmax_kernel, rows, (x, y, x.stride(0), width), _cut(width, whole))
    return y


@softmax_op.register_fake
def _(x, whole, way="portable"):
    return x.new_empty(x.shape)


@torch.library.custom_op("gpu_accel::tk_softmax_backward", mutates_args=())
def softmax_backward_op(dy: Tensor, y: Tensor, whole: int, way: str = "portable") -> Tensor:
    rows, width = y.shape
    dx = y.new_empty(rows, width)
    dy, y = _rows(dy), _rows(y)
    ring = row_ring.choice(way, "backward", "softmax", [y, dy], [], []) if y.numel() else None
    with _device(y):
        if ring is not None:
            row_ring.backward(y, dy, dx, "softmax", ring)
        elif y.numel():
            launch(kernels._softmax_backward_kernel, rows, (y, dy, dx, y.stride(0), dy.stride(0), width),
                   _policies(width, whole) | _cut(width, whole))  # fmt: skip
    return dx


@softmax_backward_op.register_fake
def _(dy, y, whole, way="portable"):
    return y.new_empty(y.shape)


refuse_second(softmax_backward_op, "softmax by kernels")


def _softmax_save(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.scalars = inputs[1:]


def _softmax_gradients(ctx, dy):
    (y,) = ctx.saved_tensors
    return softmax_backward_op(dy, y, *ctx.scalars), None, None


softmax_op.register_autograd(_softmax_gradients, setup_context=_softmax_save)


# ---- public


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInputError(message)


def softmax(x: Tensor, *, backend: str = "auto") -> Tensor:
    """softmax over the last dimension of x (..., width) float32, bfloat16 or float16, differentiable.

    Sums are float32, the result has the shape and dtype of x. backend and errors as in `rms_norm`.
    """
    check_tensors({"x": x})
    _need(x.dim() >= 1, "x must be (..., width), got a tensor of no dimensions")
    if backend != "hopper" and choose(x, backend, others=("hopper",)) == "reference":
        wide = x if x.dtype == torch.float64 else x.float()
        return reference.softmax(wide).to(x.dtype)
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(0, x.shape[-1])
    return softmax_op(flat, WHOLE, _way(flat, backend, "softmax")).view(x.shape)


def _way(x: Tensor, backend: str, op: str, bare: bool = True) -> str:
    """backend. Raises UnsupportedError where "hopper" was asked for and has no kernel for x (rows, width)."""
    if backend == "hopper" and not row_ring.takes(x, op):
        why = long_rows.refusal(x) if bare else f"no kernel of {x.shape[1]} columns has residual or dropout"
        if why is not None:
            raise UnsupportedError(f"backend 'hopper': {why}")
    return backend


def _long(x: Tensor, op: str, whole: int, way: str) -> bool:
    """Whether `long_rows` takes x."""
    return way == "hopper" and long_rows.refusal(x) is None or way == "auto" and long_rows.takes(x, op, whole)


def _norm(x, weight, bias, residual, eps, dropout_p, seed, prenorm, backend, center):
    check_tensors({"x": x}, {"weight": weight, "bias": bias, "residual": residual})
    _need(x.dim() >= 1, "x must be (..., width), got a tensor of no dimensions")
    width = x.shape[-1]
    for name, w in (("weight", weight), ("bias", bias)):
        _need(w is None or w.shape == (width,), f"{name} must be (width,) ({width},)")
    _need(residual is None or residual.shape == x.shape, "residual must have the shape of x")
    prenorm = check_flag("prenorm", prenorm)
    eps, dropout_p = real("eps", eps, 0.0), real("dropout_p", dropout_p)
    _need(0 <= dropout_p < 1, f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    _need(dropout_p == 0 or seed is not None, "dropout needs a seed, so that the backward can draw it again")
    seed = None if seed is None else integer("seed", seed)
    _need(seed is None or 0 <= seed < 2**63, f"seed must be from 0 to 2**63 - 1, got {seed}")
    seed = 0 if seed is None else seed
    name = "hopper" if backend == "hopper" else choose(x, backend, others=("hopper",))
    rows = x.numel() // width if width else 0
    _need(rows < 2**31 and width < 2**31, f"at most 2**31 - 1 rows and columns, got {rows} and {width}")
    if name == "reference":
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        h = x.to(wide)
        if dropout_p > 0:
            keep = reference.dropout_keep(seed, rows, width, dropout_p, x.device).view(x.shape)
            h = torch.where(keep, h / (1 - dropout_p), 0.0)
        h = h if residual is None else h + residual.to(wide)
        h = h.to(_sum_dtype(x, residual))
        scale, shift = (None if w is None else w.to(wide) for w in (weight, bias))
        exact = h.to(wide)
        out = reference.layer_norm(exact, scale, shift, eps) if center else reference.rms_norm(exact, scale, eps)
        return (out.to(x.dtype), h) if prenorm else out.to(x.dtype)
    flat = [None if t is None else t.reshape(rows, width) for t in (x, residual)]
    keep_sum = residual is not None or dropout_p > 0
    op = ("add_" if residual is not None else "") + ("layer" if center else "rms")
    way = _way(x.reshape(rows, width), backend, op, not keep_sum)
    y, h, _, _ = norm_op(*flat, weight, bias, eps, center, dropout_p, seed, keep_sum, WHOLE, way)
    y = y.view(x.shape)
    return (y, h.view(x.shape) if keep_sum else x) if prenorm else y


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, eps: float = 1e-6,
    dropout_p: float = 0.0, seed: int | None = None, prenorm: bool = False, backend: str = "auto",
):  # fmt: skip
    """h = dropout(x) + residual, y = h / sqrt(mean(h^2) + eps) * weight.

    Args:
        x: (..., width) float32, bfloat16 or float16. weight: (width,). residual: the shape of x, of any float dtype;
            h has the wider of both dtypes, and is what is normalised, after rounding.
        dropout_p, seed: dropout of x by Philox with counter (column, row); the same seed drops the same elements, so
            dropout needs another one in every step.
        prenorm: return (y, h).
        backend: "hopper" keeps rows in shared memory (16 bits, contiguous, no dropout; widths and passes of
            `row_ring.CHOSEN`, without residual also multiples of 64 up to 81920 forwards; the other pass is plain
            Triton; compute capability 9.0), "portable", "reference"; "auto": what was seen right on a card, the first
            where it is the faster one.

    Raises:
        InvalidInputError: shapes or dtypes do not fit. UnsupportedError: the backend cannot run here.
    """
    return _norm(x, weight, None, residual, eps, dropout_p, seed, prenorm, backend, center=False)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None = None,
    eps: float = 1e-5, dropout_p: float = 0.0, seed: int | None = None, prenorm: bool = False, backend: str = "auto",
):  # fmt: skip
    """h = dropout(x) + residual, y = (h - mean) / sqrt(var + eps) * weight + bias.

    bias: (width,). Other arguments, what is returned and errors as in `rms_norm`.
    """
    return _norm(x, weight, bias, residual, eps, dropout_p, seed, prenorm, backend, center=True)
