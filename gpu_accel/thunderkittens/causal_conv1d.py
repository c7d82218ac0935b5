"""Short causal convolutions with names and argument orders of causal_conv1d (Dao-AILab), so that calls drop in.

y = causal_conv1d_fn(x, weight, bias, activation="silu")          # x (batch, dim, seqlen), weight (dim, width)
y = causal_conv1d_update(x, conv_state, weight, bias, "silu")     # a step; conv_state (batch, dim, state_len) changes
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.gluon_launch import multiprocessors
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_flag, check_written, share_memory
from gpu_accel.thunderkittens import conv_kernels as kernels
from gpu_accel.thunderkittens import rows
from gpu_accel.thunderkittens.arguments import check_tensors, check_values, readable
from gpu_accel.thunderkittens.chunked import _device
from gpu_accel.thunderkittens.linear import _need, _shape, choose

# What its tests in tests/gpu have passed on (H100, Triton 3.6.0): "auto" takes the kernels for that alone.
GPU_CHECKED = (torch.bfloat16, torch.float16, torch.float32)
_BC = 64
# Whether y and gradients are made by walks where channels lie side by side, without first states and seq_idx: x and
# dy are read once for four times.
WALK = WALK_BACK = True
_STEPS, _CHANNELS = 64, 512  # at most, of a program that makes y
_STAGES, _AHEAD = 1, False  # y: copies of the next steps to shared memory, or loads of them into registers, beforehand
_BACK_STEPS, _BACK_CHANNELS = 512, 256  # at most, of a program that makes gradients
_BACK_STAGES, _BACK_AHEAD = 3, False
_BACK_PROGRAMS = 9  # of 8 channels a thread, that an SM has registers for
_LANE = 4  # channels of a thread that makes y
_GO = _BACK_GO = ""


def _columns(dim: int, most: int) -> int:
    """Channels of a program: no more than an eighth beyond what narrow ones would take."""
    narrow = min(128, max(16, next_power_of_2(dim)))
    return next((n for n in (512, 256) if n <= most and 8 * (-dim % n) <= dim), min(most, narrow))


def _cut(x: Tensor, elements: int) -> dict:
    """Tiles that are long where neighbours in memory are: channels, or steps."""
    rows, cols = (elements // 64, 64) if x.stride(1) <= x.stride(2) else (128, elements // 128)
    return dict(BT=rows, BC=cols, num_warps=4)


def _packed(x: Tensor | None) -> Tensor | None:
    """Kernels read vectors with stride 1."""
    return None if x is None else x.contiguous()


def _arguments(x, weight, bias, initial, seq_idx, dy=None):
    far = x.shape[1] * max(t.stride(1) for t in (x, initial, dy) if t is not None) >= 2**31
    strides = (0, 0, 0) if initial is None else (initial.stride(0), initial.stride(2), initial.stride(1))
    return (x.stride(0), x.stride(2), x.stride(1), *strides), dict(
        WIDTH=weight.shape[1], HAS_INITIAL=initial is not None, HAS_BIAS=bias is not None, HAS_SEQ=seq_idx is not None,
        FAR=far,
    )


@torch.library.custom_op("gpu_accel::tk_conv1d", mutates_args=())
def conv_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seq_idx: Tensor | None, silu: bool
) -> Tensor:
    """x (batch, dim, seqlen) with any strides; y has the layout of x."""
    y = torch.empty_like(x)
    weight, bias, seq_idx = weight.contiguous(), _packed(bias), _packed(seq_idx)
    strides, options = _arguments(x, weight, bias, initial, seq_idx)
    cut = _cut(x, 2048)
    near = max(x.stride(2), y.stride(2)) * (_STEPS + 8) < 2**31
    if WALK and x.numel() and initial is None and seq_idx is None and x.stride(1) == y.stride(1) == 1 and near:
        columns = _columns(x.shape[1], _CHANNELS)
        with _device(x):
            launch(kernels._conv_walk_kernel, -(-x.shape[2] // _STEPS) * -(-x.shape[1] // columns) * x.shape[0],
                   (x, weight, bias, y, x.stride(0), x.stride(2), y.stride(0), y.stride(2), x.shape[2], x.shape[1],
                    _STEPS),
                   dict(WIDTH=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, BC=columns, STAGES=_STAGES,
                        AHEAD=_AHEAD, GO=_GO, num_warps=max(1, columns // (32 * _LANE))),
                   )  # fmt: skip
    elif x.numel():
        with _device(x):
            launch(kernels._conv_kernel, -(-x.shape[2] // cut["BT"]) * -(-x.shape[1] // cut["BC"]) * x.shape[0],
                   (x, initial, weight, bias, seq_idx, y, *strides, y.stride(0), y.stride(2), y.stride(1), x.shape[2],
                    x.shape[1]), options | cut | {"SILU": silu})  # fmt: skip
    return y


@conv_op.register_fake
def _(x, weight, bias, initial, seq_idx, silu):
    return torch.empty_like(x)


def _walk_back(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool):
    """As `conv_backward_op`, of contiguous vectors, channels side by side."""
    batch, dim, seqlen = x.shape
    columns = _columns(dim, _BACK_CHANNELS if x.element_size() == 2 else 128)
    across = -(-dim // columns)
    fit = max(1, _BACK_PROGRAMS * multiprocessors(x.device) // (across * batch))  # programs a sequence, at once
    steps = min(_BACK_STEPS, max(_STEPS, -(-seqlen // (16 * fit)) * 16))
    blocks = -(-seqlen // steps)
    dx = x.new_empty((batch, seqlen, dim))
    dweight = x.new_empty((batch * blocks, dim, weight.shape[1]), dtype=torch.float32)
    dbias = x.new_empty((batch * blocks if bias is not None else 0, dim), dtype=torch.float32)
    with _device(x):
        launch(kernels._conv_walk_back_kernel, blocks * across * batch,
               (x, weight, bias, dy, dx, dweight, dbias, x.stride(0), x.stride(2), dy.stride(0), dy.stride(2), seqlen,
                dim, steps),
               dict(WIDTH=weight.shape[1], HAS_BIAS=bias is not None, SILU=silu, BC=columns, STAGES=_BACK_STAGES,
                    AHEAD=_BACK_AHEAD, GO=_BACK_GO, num_warps=1))  # fmt: skip
    absent = x.new_empty(0, dtype=torch.float32)
    return dx.transpose(1, 2), *rows._summed(dweight, dbias, weight, None if bias is None else bias.dtype), absent


@torch.library.custom_op("gpu_accel::tk_conv1d_backward", mutates_args=())
def conv_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seq_idx: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias, dinitial), dinitial in float32, the others as what they are of; what is absent is empty."""
    weight, bias, seq_idx = weight.contiguous(), _packed(bias), _packed(seq_idx)
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    near = max(dim, x.stride(2), dy.stride(2)) * (_BACK_STEPS + 8) < 2**31
    if WALK_BACK and x.numel() and initial is None and seq_idx is None and x.stride(1) == dy.stride(1) == 1 and near:
        return _walk_back(dy, x, weight, bias, silu)
    if x.numel() and not x.is_contiguous() and not x.transpose(1, 2).is_contiguous():
        x = x.contiguous()  # dx is written with the strides of x, which must not overlap
    dx = torch.empty_like(x)
    strides, options = _arguments(x, weight, bias, initial, seq_idx, dy)
    cut = _cut(x, 512)  # it holds four taps of four taps
    blocks = -(-(seqlen + width - 1) // cut["BT"])
    parts = batch * blocks if x.numel() else 0
    dweight = x.new_empty((parts, dim, width), dtype=torch.float32)
    dbias = x.new_empty((parts if bias is not None else 0, dim), dtype=torch.float32)
    wanted = (batch, dim, width - 1) if initial is not None else (0,)
    dinitial = x.new_zeros(wanted, dtype=torch.float32)
    if x.numel():
        with _device(x):
            launch(kernels._conv_backward_kernel, blocks * -(-dim // cut["BC"]) * batch,
                   (x, initial, weight, bias, seq_idx, dy, dx, dinitial, dweight, dbias, *strides, dy.stride(0),
                    dy.stride(2), dy.stride(1), seqlen, dim), options | cut | {"SILU": silu})  # fmt: skip
    of_bias = dbias.sum(0).to(bias.dtype) if bias is not None else x.new_empty(0, dtype=torch.float32)
    return dx, dweight.sum(0).to(weight.dtype), of_bias, dinitial


@conv_backward_op.register_fake
def _(dy, x, weight, bias, initial, seq_idx, silu):
    wide = torch.float32
    return (
        torch.empty_like(x), weight.new_empty(weight.shape),
        bias.new_empty(bias.shape) if bias is not None else x.new_empty(0, dtype=wide),
        x.new_empty((*x.shape[:2], weight.shape[1] - 1) if initial is not None else (0,), dtype=wide),
    )  # fmt: skip


refuse_second(conv_backward_op, "the short convolution by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.silu = inputs[5]


def _gradients(ctx, dy):
    x, weight, bias, initial, seq_idx = ctx.saved_tensors
    dx, dweight, dbias, dinitial = conv_backward_op(dy, x, weight, bias, initial, seq_idx, ctx.silu)
    return (dx, dweight, None if bias is None else dbias,
            None if initial is None else dinitial.to(initial.dtype), None, None)  # fmt: skip


conv_op.register_autograd(_gradients, setup_context=_save)


def _silu(activation: str | None) -> bool:
    _need(activation in (None, "silu", "swish"), f"activation is {activation!r}; choose None, 'silu' or 'swish'")
    return activation is not None


def causal_conv1d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, seq_idx: Tensor | None, silu: bool
) -> Tensor:
    """The formula, a tap at a time, in float32 (float64 where x is)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    width, seqlen = weight.shape[1], x.shape[2]
    early = x.new_zeros(*x.shape[:2], width - 1) if initial is None else initial
    padded = torch.cat([early.to(wide), x.to(wide)], -1)
    out = torch.zeros_like(x, dtype=wide)
    for w in range(width):
        tap = padded[..., w : w + seqlen]
        back = width - 1 - w
        if seq_idx is not None and back:
            same = torch.zeros_like(seq_idx, dtype=torch.bool)
            same[:, back:] = seq_idx[:, back:] == seq_idx[:, : max(0, seqlen - back)]
            tap = torch.where(same[:, None], tap, 0.0)
        out = out + tap * weight[:, w, None].to(wide)
    out = out if bias is None else out + bias[:, None].to(wide)
    return (torch.nn.functional.silu(out) if silu else out).to(x.dtype)


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None, *, backend: str = "auto",
):  # fmt: skip
    """y[t] = act(bias + sum over w of weight[:, w] x[t - (width - 1 - w)]), a filter a channel; or (y, final states).

    Args:
        x: (batch, dim, seqlen) float32, bfloat16 or float16, of any strides (Mamba has channels innermost).
        weight: (dim, width), width 2 to 4. bias: (dim,).
        seq_idx: (batch, seqlen) integers: a step sees those before it that have its number; not beside initial_states.
        initial_states: (batch, dim, width - 1), what was before x; None: zeros.
        return_final_states: also the last width - 1 steps, for the next call; with seq_idx zeros for those of another
            number than the last.
        final_states_out: (batch, dim, width - 1) in the dtype of x, into which they are written, of any strides.
        activation: None, "silu" or "swish" (the same).

    Raises:
        InvalidInputError: shapes do not fit. UnsupportedError: the backend cannot run here.
    """
    check_tensors({"x": x, "weight": weight},
                  {"bias": bias, "seq_idx": seq_idx, "initial_states": initial_states,
                   "final_states_out": final_states_out}, ("seq_idx",))  # fmt: skip
    return_final_states = check_flag("return_final_states", return_final_states)
    _need(x.dim() == 3, f"x must be (batch, dim, seqlen), got {_shape(x)}")
    _check_filter(weight, bias, x.shape[1])
    width = weight.shape[1]
    _need(seq_idx is None or (seq_idx.shape == (x.shape[0], x.shape[2]) and initial_states is None),
          "seq_idx must be (batch, seqlen), and not beside initial_states")  # fmt: skip
    _need(initial_states is None or initial_states.shape == (*x.shape[:2], width - 1),
          f"initial_states must be (batch, dim, width - 1) {(*x.shape[:2], width - 1)}")  # fmt: skip
    if final_states_out is not None:
        _need(return_final_states, "final_states_out needs return_final_states=True")
        wanted = (*x.shape[:2], width - 1)
        _need(final_states_out.shape == wanted and final_states_out.dtype == x.dtype,
              f"final_states_out must be {wanted} {x.dtype}, got {_shape(final_states_out)}")  # fmt: skip
        check_written("final_states_out", final_states_out)
        for name, t in (("x", x), ("weight", weight), ("bias", bias)):
            _need(t is None or not share_memory(final_states_out, t),
                  f"final_states_out shares memory with {name}: pass one of its own")  # fmt: skip
        _need(not (final_states_out.is_leaf and final_states_out.requires_grad and torch.is_grad_enabled()),
              "final_states_out is written in place, but gradients are wanted of it: pass one of its own")  # fmt: skip
    run = conv_op if choose(x, backend, x.dtype in GPU_CHECKED) == "portable" else causal_conv1d_reference
    y = run(x, weight, bias, initial_states, seq_idx, _silu(activation))
    if not return_final_states:
        return y
    early = x.new_zeros(*x.shape[:2], width - 1) if initial_states is None else initial_states.to(x.dtype)
    last = torch.cat([early, x], -1)[..., x.shape[2] :]
    if seq_idx is not None and x.shape[2]:
        numbers = torch.nn.functional.pad(seq_idx, (width - 1, 0))[:, x.shape[2] :]  # before x there are zeros anyway
        last = torch.where((numbers == seq_idx[:, -1:])[:, None], last, 0.0)
    return y, last if final_states_out is None else final_states_out.copy_(last)


def _check_filter(weight: Tensor, bias: Tensor | None, dim: int) -> None:
    _need(weight.dim() == 2 and weight.shape[0] == dim and 2 <= weight.shape[1] <= 4,
          f"weight must be (dim, width) ({dim}, 2 to 4), got {_shape(weight)}")  # fmt: skip
    _need(bias is None or bias.shape == (dim,), f"bias must be (dim,) ({dim},)")


@torch.library.custom_op("gpu_accel::tk_conv1d_update", mutates_args=("conv_state",))
def update_op(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None,
    indices: Tensor | None, silu: bool,
) -> Tensor:  # fmt: skip
    """x (batch, dim, seqlen); see `conv_kernels._update_kernel`."""
    batch, dim, seqlen = x.shape
    y = x.new_empty(x.shape)
    weight, bias, lengths, indices = weight.contiguous(), _packed(bias), _packed(lengths), _packed(indices)
    if x.numel():
        with _device(x):
            launch(kernels._update_kernel, -(-dim // _BC) * batch,
                   (x, conv_state, weight, bias, lengths, indices, y, *x.stride(), *conv_state.stride(), seqlen, dim,
                    conv_state.shape[2], conv_state.shape[0]),
                   dict(WIDTH=weight.shape[1], HAS_BIAS=bias is not None, CIRCULAR=lengths is not None,
                        INDEXED=indices is not None, SILU=silu, BS=next_power_of_2(conv_state.shape[2]), BC=_BC,
                        FAR=dim * max(x.stride(1), conv_state.stride(1)) >= 2**31,
                        num_warps=2))  # fmt: skip
    return y


@update_op.register_fake
def _(x, conv_state, weight, bias, lengths, indices, silu):
    return x.new_empty(x.shape)


def _update_reference(x, conv_state, weight, bias, lengths, indices, silu):
    rows = torch.arange(x.shape[0], device=x.device) if indices is None else indices.long()
    state = conv_state[rows]
    width, seqlen, length = weight.shape[1], x.shape[2], conv_state.shape[2]
    order = None
    if lengths is not None:
        order = (lengths.long()[:, None] + torch.arange(length, device=x.device)) % length  # oldest first
        state = state.gather(2, order[:, None].expand_as(state))
    y = causal_conv1d_reference(x, weight, bias, state[..., length - width + 1 :], None, silu)
    kept = torch.cat([state.to(x.dtype), x], -1)[..., seqlen:].to(conv_state.dtype)
    if lengths is not None:
        slots = (lengths.long()[:, None] + seqlen + torch.arange(length, device=x.device)) % length
        kept = torch.zeros_like(kept).scatter(2, slots[:, None].expand_as(kept), kept)
    conv_state[rows] = kept
    return y


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None, *, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Steps of decoding: y of x (batch, dim) or (batch, dim, seqlen), and conv_state changed in place. No gradients.

    Args:
        conv_state: (rows, dim, state_len), state_len at least width - 1: the last steps, the newest at the end.
        cache_seqlens: (batch,) int32: conv_state is a ring, in which step n lies at n modulo state_len.
        conv_state_indices: (batch,) int32: the row of each sequence, all different. None: row n for sequence n.

    Values of both are checked on the CPU. On a GPU, where that would wait for it, y of a sequence whose row does not
    exist is NaN and no state changes for it; two sequences with one row overwrite each other's state.
    weight, bias, activation and errors as of `causal_conv1d_fn`.
    """
    check_tensors(
        {"x": x, "conv_state": conv_state, "weight": weight},
        {"bias": bias, "cache_seqlens": cache_seqlens, "conv_state_indices": conv_state_indices},
        ("cache_seqlens", "conv_state_indices"),
    )
    check_written("conv_state", conv_state)
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        _need(t is None or not share_memory(conv_state, t),
              f"conv_state is written, and shares memory with {name}, which is read: pass {name}.clone()")  # fmt: skip
    flat = x.dim() == 2
    x = x[..., None] if flat else x
    _need(x.dim() == 3, f"x must be (batch, dim) or (batch, dim, seqlen), got {_shape(x)}")
    _check_filter(weight, bias, x.shape[1])
    _need(conv_state.dim() == 3 and conv_state.shape[1] == x.shape[1] and conv_state.shape[2] >= weight.shape[1] - 1,
          f"conv_state must be (rows, {x.shape[1]}, at least width - 1), got {_shape(conv_state)}")  # fmt: skip
    _need(conv_state_indices is not None or conv_state.shape[0] == x.shape[0],
          f"conv_state has {conv_state.shape[0]} rows for {x.shape[0]} sequences; give conv_state_indices")  # fmt: skip
    for name, t in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        _need(t is None or t.shape == x.shape[:1], f"{name} must be (batch,) integers")
    if cache_seqlens is not None:
        check_values("cache_seqlens", cache_seqlens, 0, 2**31 - 1 - x.shape[2], "steps seen, in int32")
    if conv_state_indices is not None:
        check_values("conv_state_indices", conv_state_indices, 0, conv_state.shape[0] - 1, "rows of conv_state")
        _need(not readable(conv_state_indices) or conv_state_indices.unique().numel() == conv_state_indices.numel(),
              "conv_state_indices must all be different: each sequence writes its row of conv_state")  # fmt: skip
    run = update_op if choose(x, backend, x.dtype in GPU_CHECKED) == "portable" else _update_reference
    with torch.no_grad():
        y = run(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, _silu(activation))
    return y[..., 0] if flat else y
