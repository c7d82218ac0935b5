"""Cross-entropy, and a linear layer fused with it so that the logits of all tokens never exist at once.

loss = cross_entropy(logits, target)                            # (tokens, classes), as torch.nn.functional has it
loss = fused_linear_cross_entropy(x, weight, target)            # x (tokens, hidden), weight (classes, hidden)

What the options are called, and what they mean, is as in Liger-Kernel (arXiv 2410.10989), without weights of classes
and return_z_loss. The fused one takes tokens in
pieces: logits of a piece, their loss, their gradient in place, and with it the gradients of x and of the weight, all
in the forward. Its memory is one piece of logits and a float32 gradient of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.api import autocasted
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_first_gradient, check_softcap
from gpu_accel.thunderkittens import loss_kernels as kernels
from gpu_accel.thunderkittens.arguments import check_tensors, integer, readable, real
from gpu_accel.thunderkittens.chunked import _device
from gpu_accel.thunderkittens.linear import _need, _shape, choose
from gpu_accel.thunderkittens.rows import _rows

# What its tests in tests/gpu have passed on (H100, Triton 3.6.0): "auto" takes the kernels for that alone.
GPU_CHECKED = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 4096
_BACK = 2048  # of a program of the backward
FOUR = True  # of whole blocks: one largest value for every four logits of a thread
_WARPS = 4  # of a program that does so
_SIDE = 16  # bytes of logits side by side that have one largest value: what a thread loads at once


def _forward(logits, target, ignore, smoothing, square, cap) -> tuple[Tensor, Tensor]:
    rows, classes = logits.shape
    loss, lse = (logits.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows, 2)))
    block = min(_BLOCK, max(16, next_power_of_2(classes)))
    warps = max(1, min(8, block // 512))
    four = FOUR and block == _BLOCK
    block, warps = (block // 4, _WARPS) if four else (block, warps)
    if rows:
        launch(kernels._cross_entropy_kernel, rows,
               (logits, target, loss, lse, logits.stride(0), classes, ignore, smoothing, square, cap),
               dict(CAP=cap > 0, SMOOTH=smoothing > 0, BLOCK=block, FOUR=four,
                    SIDE=min(_SIDE // logits.element_size(), block), num_warps=warps))  # fmt: skip
    return loss, lse


def _backward(logits, target, lse, scale, grad, ignore, smoothing, square, cap) -> None:
    rows, classes = logits.shape
    block = min(_BACK, max(16, next_power_of_2(classes)))
    blocks = -(-classes // block)
    if rows:
        launch(kernels._cross_entropy_backward_kernel, rows * blocks,
               (logits, target, lse, scale, grad, logits.stride(0), grad.stride(0), classes, blocks, ignore, smoothing,
                square, cap), dict(CAP=cap > 0, BLOCK=block, num_warps=4))  # fmt: skip


@torch.library.custom_op("gpu_accel::tk_cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, square: float, cap: float
) -> tuple[Tensor, Tensor]:
    """(loss (rows,), its two parts of the logarithm (rows, 2)); cap 0: none."""
    logits, target = _rows(logits), target.contiguous()
    with _device(logits):
        return _forward(logits, target, ignore, smoothing, square, cap)


@cross_entropy_op.register_fake
def _(logits, target, ignore, smoothing, square, cap):
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.float32), logits.new_empty((rows, 2), dtype=torch.float32)


@torch.library.custom_op("gpu_accel::tk_cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore: int, smoothing: float, square: float, cap: float
) -> Tensor:
    logits, target = _rows(logits), target.contiguous()
    grad = logits.new_empty(logits.shape)
    with _device(logits):
        _backward(logits, target, lse, dloss.contiguous(), grad, ignore, smoothing, square, cap)
    return grad


@cross_entropy_backward_op.register_fake
def _(dloss, logits, target, lse, ignore, smoothing, square, cap):
    return logits.new_empty(logits.shape)


refuse_second(cross_entropy_backward_op, "cross-entropy by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.scalars = inputs[2:]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, dloss, _):
    logits, target, lse = ctx.saved_tensors
    return cross_entropy_backward_op(dloss, logits, target, lse, *ctx.scalars), None, None, None, None, None


cross_entropy_op.register_autograd(_gradients, setup_context=_save)


def _pieces(tokens: int, hidden: int, classes: int) -> int:
    """Tokens at once: as many as keep a piece of logits about as large as x."""
    return max(1, min(tokens, next_power_of_2(-(-tokens * hidden // max(1, classes)))))


@torch.library.custom_op("gpu_accel::tk_linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, scale: Tensor, ignore: int, smoothing: float,
    square: float, cap: float, want_x: bool, want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(sum of scale * loss, gradients of x, weight float32 and bias float32); unwanted gradients are empty.

    scale: (tokens,) float32.
    """
    tokens, classes = x.shape[0], weight.shape[0]
    target, scale = target.contiguous(), scale.contiguous()
    step = _pieces(tokens, x.shape[1], classes)
    dx = x.new_empty(x.shape if want_x else (0,))
    dweight = weight.new_zeros(weight.shape if want_weight else (0,), dtype=torch.float32)
    dbias = weight.new_zeros((classes,) if want_weight and bias is not None else (0,), dtype=torch.float32)
    total = x.new_zeros((), dtype=torch.float32)
    with _device(x), torch.autocast(x.device.type, enabled=False):
        for at in range(0, tokens, step):
            part = slice(at, at + step)
            logits = torch.nn.functional.linear(x[part], weight, bias)
            loss, lse = _forward(logits, target[part], ignore, smoothing, square, cap)
            total += (loss * scale[part]).sum()
            if not (want_x or want_weight):
                continue
            _backward(logits, target[part], lse, scale[part], logits, ignore, smoothing, square, cap)
            if want_x:
                torch.mm(logits, weight, out=dx[part])
            if want_weight:
                dweight += logits.mT @ x[part]
            if dbias.numel():
                dbias += logits.sum(0, dtype=torch.float32)
    return total, dx, dweight, dbias


@linear_cross_entropy_op.register_fake
def _(x, weight, target, bias, scale, ignore, smoothing, square, cap, want_x, want_weight):
    wide = torch.float32
    return (
        x.new_empty((), dtype=wide), x.new_empty(x.shape if want_x else (0,)),
        weight.new_empty(weight.shape if want_weight else (0,), dtype=wide),
        weight.new_empty(weight.shape[:1] if want_weight and bias is not None else (0,), dtype=wide),
    )  # fmt: skip


def _linear_save(ctx, inputs, output):
    ctx.dtypes = (inputs[1].dtype, None if inputs[3] is None else inputs[3].dtype)
    ctx.wanted = inputs[9:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _linear_gradients(ctx, dloss, *_):
    check_first_gradient("fused_linear_cross_entropy", depends=True)  # its gradients were made in the forward
    dx, dweight, dbias = ctx.saved_tensors
    want_x, want_weight = ctx.wanted
    weight_dtype, bias_dtype = ctx.dtypes
    return (
        (dx * dloss).to(dx.dtype) if want_x else None, None if not want_weight else (dweight * dloss).to(weight_dtype),
        None, (dbias * dloss).to(bias_dtype) if bias_dtype is not None and want_weight else None,
        *(None,) * 7,
    )  # fmt: skip


linear_cross_entropy_op.register_autograd(_linear_gradients, setup_context=_linear_save)


def _check(
    target: Tensor, rows: int, classes: int, reduction: str, ignore: int, smoothing: float, square: float,
    softcap: float | None,
) -> tuple[int, float, float, float]:  # fmt: skip
    """What the ops take: (ignore, smoothing, square, cap)."""
    _need(target.shape == (rows,), f"target must be ({rows},) integers, got {_shape(target)}")
    _need(reduction in ("mean", "sum", "none"), f"reduction is {reduction!r}; choose 'mean', 'sum' or 'none'")
    ignore, smoothing = integer("ignore_index", ignore), real("label_smoothing", smoothing)
    _need(0 <= smoothing <= 1, f"label_smoothing must be 0 to 1, got {smoothing}")
    cap = 0.0 if softcap is None else check_softcap(softcap)
    if readable(target):
        y = target.long()
        wrong = y[((y < 0) | (y >= classes)) & (y != ignore)]
        if wrong.numel():
            raise InvalidInputError(
                f"target must be from 0 to {classes - 1}, or ignore_index ({ignore}), got {int(wrong[0])}"
            )
    return ignore, smoothing, real("lse_square_scale", square), cap


def cross_entropy_reference(
    logits: Tensor, target: Tensor, ignore: int, smoothing: float, square: float, cap: float
) -> Tensor:
    """The loss of every row in float32 (float64 where logits are)."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    y = target.long()
    counted, known = y != ignore, (y >= 0) & (y < z.shape[1])
    z = torch.where(counted[:, None], z, 0.0)  # what counts for nothing may be NaN
    z = cap * torch.tanh(z / cap) if cap else z
    lse = z.logsumexp(-1)
    at_y = z.gather(1, torch.where(counted & known, y, 0)[:, None])[:, 0]
    loss = lse - (1 - smoothing) * at_y + square * lse.square()
    loss = loss - smoothing * z.mean(-1) if smoothing else loss  # a class at -inf has no part in it otherwise
    loss = loss * torch.where(known | ~counted, torch.ones_like(loss), torch.nan)
    return torch.where(counted, loss, 0.0)


def cross_entropy(
    input: Tensor, target: Tensor, *, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """-log softmax(input)[target], in float32.

    Args:
        input: logits (rows, classes) float32, bfloat16 or float16.
        target: (rows,) integers from 0 to classes - 1, or ignore_index. Another one is refused on the CPU; on a GPU,
            where looking would wait for it, the loss and the gradient of such a row are NaN.
        ignore_index: rows with this target count for nothing; "mean" divides by the number of the others.
        lse_square_scale: adds this times the squared log of the sum (the z loss). label_smoothing: as in torch.
        softcap: logits become softcap tanh(input / softcap).
        reduction: "mean", "sum", or "none" for (rows,).

    Raises:
        InvalidInputError: shapes or options do not fit. UnsupportedError: the backend cannot run here.
    """
    check_tensors({"input": input, "target": target}, None, ("target",))
    _need(input.dim() == 2 and input.shape[1] > 0, f"input must be (rows, classes), got {_shape(input)}")
    rows, classes = input.shape
    options = _check(target, rows, classes, reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    ignore_index = options[0]
    if choose(input, backend, input.dtype in GPU_CHECKED) == "portable":
        loss, _ = cross_entropy_op(input, target, *options)
    else:
        loss = cross_entropy_reference(input, target, *options)
    if reduction == "none":
        return loss
    return loss.sum() / (target.long() != ignore_index).sum() if reduction == "mean" else loss.sum()


def fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """cross_entropy(input @ weight.T + bias, target) with the logits in pieces.

    Args:
        input: (tokens, hidden); weight: (classes, hidden) and bias (classes,) of the same dtype. The rest as in
            `cross_entropy`. Under torch.autocast all three are cast, as those of a linear layer are.

    Raises:
        UnsupportedError: reduction "none": the gradient of the weight is made in the forward, when the gradient of
            every row is not known yet. Use cross_entropy on the logits. Gradients of gradients, for the same reason.
    """
    check_tensors({"input": input, "weight": weight, "target": target}, {"bias": bias}, ("target",))
    input, weight = autocasted(input, weight)
    bias = bias if bias is None else autocasted(bias)[0]
    _need(input.dim() == 2 and weight.dim() == 2 and input.shape[1] == weight.shape[1] and weight.shape[0] > 0,
          f"input is (tokens, hidden), weight (classes, hidden); got {_shape(input)}, {_shape(weight)}")  # fmt: skip
    _need(input.dtype == weight.dtype, f"input and weight must have one dtype, got {input.dtype}, {weight.dtype}")
    _need(bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype),
          f"bias must be (classes,) ({weight.shape[0]},) {weight.dtype}")  # fmt: skip
    if reduction == "none":
        raise UnsupportedError("reduction='none' needs the gradient of every row before the logits are dropped; "
                               "use cross_entropy")  # fmt: skip
    rows, classes = input.shape[0], weight.shape[0]
    options = _check(target, rows, classes, reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    ignore_index = options[0]
    counted = target.long() != ignore_index
    chosen = choose(input, backend, input.dtype in GPU_CHECKED)
    if chosen == "reference" or not rows:  # no rows: the mean of nothing is NaN, which a sum would not be
        loss = cross_entropy_reference(torch.nn.functional.linear(input, weight, bias), target, *options).sum()
        return loss / counted.sum() if reduction == "mean" else loss
    scale = counted.float() / (counted.sum() if reduction == "mean" else 1)
    grad = torch.is_grad_enabled()
    want_x, want_weight = grad and input.requires_grad, grad and (
        weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    return linear_cross_entropy_op(input, weight, target, bias, scale, *options, want_x, want_weight)[0]
