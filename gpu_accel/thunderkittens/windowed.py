"""Softmax over the last `window` tokens, linear attention over all before them, one sum of weights for both.

    o_t = (a_t sum e_ts v_s + b_t sum w_ts v_s) / (a_t sum e_ts + b_t sum w_ts)         e_ts = exp(scale q_t' k_s)
          s in t - window + 1 .. t    s <= t - window

The window is flash_attention3's, whose log-sum-exp says what its weights sum to. The linear part has no window to leave
out: keys that are `window` tokens late to their queries are all that come before it, so it is linear attention of
q[window:] with k[:-window] and v[:-window]. A second one, over values of one, sums its weights up. What joins the two
is two numbers a row, in float32.

a and b differ: `shifted` has e^-c with c the largest score of the row in its window, so that the linear part is
weighed against the strongest key of the window (Hedgehog as LoLCATs, arXiv 2410.10254, and ThunderKittens have it);
`plain` has 1 for both (a Taylor series that stands for the exponential, as Based's, is of the same scale), and a
common factor of both that overflows nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.reference import without_autocast
from gpu_accel.thunderkittens import chunked, reference, window_kernels
from gpu_accel.thunderkittens.arguments import integer, real

# Dtypes that tests/gpu/test_windowed.py has passed on in whole (H200, Triton 3.6.0): "auto" takes the kernels for those
# alone. In float32 no attention of a window was seen, only its largest score.
WINDOW_CHECKED: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
FLOOR = 1e-6  # added to sums of weights, as ThunderKittens' test of its kernel does
_ONES = 64  # columns of ones that sum weights up: a tile of the kernels
_ELEMENTS = 2048  # of o in a program
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_window(window: object) -> int:
    """window, a number of tokens, as an int of at least 1."""
    return integer("window", window, 1, (1 << 31) - 1)


def score_scale(scale: object, key_dim: int) -> float:
    """scale as a number that float32 holds, K**-0.5 for None; 0 and negative ones are numbers like others."""
    if scale is None:
        return chunked.default_scale(key_dim)
    number = real("scale", scale)
    if abs(number) > torch.finfo(torch.float32).max:
        raise InvalidInputError(f"scale must be within float32, whose largest is 3.4e38, got {number:g}")
    return number


class Places:
    """Which keys a row sees: `low` (seqlen,) int32 is the first of its window; of none where it lies behind the row."""

    def __init__(self, v: Tensor, window: int, cu_seqlens: Tensor | None) -> None:
        self.window = window
        self.cu = None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous()
        row = torch.arange(v.shape[1], device=v.device, dtype=torch.int32)
        self.low = (row - (window - 1)).clamp_min(0)
        if self.cu is None:
            return
        ends = self.cu[1:].contiguous()
        which = torch.searchsorted(ends, row, right=True)
        begins = self.cu[which.clamp_max(max(0, ends.shape[0] - 1))] if ends.shape[0] else row
        self.inside = (which < ends.shape[0])[None, :, None, None]
        self.late = self.inside & (row - window >= begins)[None, :, None, None]  # whether a late key is of the sequence
        self.low = torch.where(which < ends.shape[0], torch.maximum(begins, row - (window - 1)), row + 1)

    def cleaned(self, *tensors: Tensor) -> list[Tensor]:
        """Rows behind the last sequence may hold anything; here they hold zeros."""
        return list(tensors) if self.cu is None else [torch.where(self.inside, x, 0.0) for x in tensors]

    def delayed(self, x: Tensor) -> Tensor:
        """Row t is row t - window of the same sequence, or 0."""
        moved = torch.nn.functional.pad(x, (0, 0, 0, 0, self.window, 0))[:, : x.shape[1]]
        return torch.where(self.late, moved, 0.0)


@without_autocast
def softmax_in_window(
    q: Tensor, k: Tensor, v: Tensor, places: Places, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """o (batch, seqlen, heads, V) and lse (batch, seqlen, heads) of the last `window` keys, by flash_attention3."""
    value_dim = v.shape[3]
    heads = v.shape[2]
    if abs(scale) < torch.finfo(torch.float32).tiny:  # no weight differs from another
        q, scale = q * 0.0, 1.0
    elif scale < 0:  # flash_attention3's are positive
        q, scale = -q, -scale
    q, k = (reference._for_heads(x, heads) for x in (q, k))
    q, k, v = (torch.nn.functional.pad(x, (0, -x.shape[3] % 8)) if x.shape[3] % 8 else x for x in (q, k, v))
    options = dict(softmax_scale=scale, causal=True, window_size=(places.window - 1, 0), return_lse=True,
                   backend=backend)  # fmt: skip
    if places.cu is None:
        o, lse = flash_attn_func(q, k, v, **options)
    else:
        cu = dict(cu_seqlens_q=places.cu, cu_seqlens_k=places.cu)
        o, lse = (x[None] for x in flash_attn_varlen_func(q[0], k[0], v[0], **cu, **options))
    return o[..., :value_dim], lse.transpose(1, 2)


@torch.library.custom_op("gpu_accel::tk_window_maximum", mutates_args=())
def maximum_op(q: Tensor, k: Tensor, low: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(largest score (batch, seqlen, heads) float32, which key has it int32) of each query in its window."""
    q, k = chunked._unit(q), chunked._unit(k)
    batch, seqlen, heads, key_dim = q.shape
    largest = torch.empty(batch, seqlen, heads, dtype=torch.float32, device=q.device)
    where = torch.empty(batch, seqlen, heads, dtype=torch.int32, device=q.device)
    if largest.numel():
        rows = 16 if INTERPRET else 64
        block = chunked._block(key_dim, 256 // q.element_size())
        with chunked._device(q):
            launch(
                window_kernels._window_maximum_kernel, batch * heads * -(-seqlen // rows),
                (q, k, low, largest, where, *q.stride()[:3], *k.stride()[:3], seqlen, heads, scale),
                dict(K=key_dim, BT=rows, BK=block, PRECISION=chunked.precision(q.dtype), num_warps=4, num_stages=2),
            )  # fmt: skip
    return largest, where


@maximum_op.register_fake
def _(q, k, low, scale):
    return q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.int32)


def _maximum_save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.scale = inputs[3]


def _maximum_gradients(ctx, dlargest, _):
    """A largest score is one score: its query gets its key, its key adds up its queries."""
    q, k, where = ctx.saved_tensors
    d = (torch.where(where >= 0, dlargest, 0.0) * ctx.scale)[..., None]
    at = where.clamp_min(0).long()[..., None].expand(k.shape)
    dq = (k.gather(1, at).float() * d).to(q.dtype) if ctx.needs_input_grad[0] else None
    dk = None
    if ctx.needs_input_grad[1]:
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device).scatter_add_(1, at, q.float() * d).to(k.dtype)
    return dq, dk, None, None


maximum_op.register_autograd(_maximum_gradients, setup_context=_maximum_save)


def _mix_launch(like: Tensor) -> tuple[int, dict]:
    rows, block = like.shape[:3].numel(), max(16, next_power_of_2(like.shape[3]))
    tile = max(1, _ELEMENTS // block)
    return -(-rows // tile), dict(R=tile, V=like.shape[3], BV=block, num_warps=4)


@torch.library.custom_op("gpu_accel::tk_mix", mutates_args=())
def mix_op(o: Tensor, n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a o + b n, rounded once: o (batch, seqlen, heads, V), a and b (batch, seqlen, heads) float32.

    n has the last tokens of o, perhaps all, perhaps none.
    """
    o, n, a, b = chunked._unit(o), chunked._unit(n), a.contiguous(), b.contiguous()
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if out.numel():
        programs, options = _mix_launch(o)
        late = o.shape[1] - n.shape[1]
        sizes = (o.shape[1], o.shape[2], late, a.numel())
        with chunked._device(o):
            launch(window_kernels._mix_kernel, programs,
                   (o, n, a, b, out, *o.stride()[:3], *n.stride()[:3], *sizes), options)  # fmt: skip
    return out


@mix_op.register_fake
def _(o, n, a, b):
    return torch.empty(o.shape, dtype=o.dtype, device=o.device)


@torch.library.custom_op("gpu_accel::tk_mix_backward", mutates_args=())
def mix_backward_op(
    dout: Tensor, o: Tensor, n: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of o, n, a and b."""
    dout, o, n, a, b = chunked._unit(dout), chunked._unit(o), chunked._unit(n), a.contiguous(), b.contiguous()
    do, dn, da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, n, a, b))
    if do.numel():
        programs, options = _mix_launch(o)
        late = o.shape[1] - n.shape[1]
        sizes = (o.shape[1], o.shape[2], late, a.numel())
        strides = [s for x in (dout, o, n) for s in x.stride()[:3]]
        with chunked._device(o):
            launch(window_kernels._mix_backward_kernel, programs,
                   (dout, o, n, a, b, do, dn, da, db, *strides, *sizes), options)  # fmt: skip
    return do, dn, da, db


@mix_backward_op.register_fake
def _(dout, o, n, a, b):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, n, a, b))


refuse_second(mix_backward_op, "what joins a window and sums before it")


mix_op.register_autograd(
    lambda ctx, dout: mix_backward_op(dout, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def mix_reference(o: Tensor, n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`mix_op` in plain torch, in the dtype of a."""
    late = o.shape[1] - n.shape[1]
    wide = torch.nn.functional.pad(n.to(b.dtype) * b[:, late:, :, None], (0, 0, 0, 0, late, 0))
    return (o.to(a.dtype) * a[..., None] + wide).to(o.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor, linear: Linear, window: int, *, scale: float,
    kind: str, window_factor: Tensor | None = None, linear_factor: Tensor | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto", kernels: bool = True,
) -> Tensor:  # fmt: skip
    """The formula above, differentiable; arguments are checked by those who call.

    Args:
        q, k, v: what the window sees, (batch, seqlen, heads, dim). left, right: what the linear part sees instead of q
            and k, of the same tokens. linear(left, right, v): its sums, not divided.
        kind: "shifted" or "plain". window_factor, linear_factor: (heads,), of a and b; None: 1.
        kernels: by flash_attention3 with `backend` and the kernels here, or all in plain torch.
    """
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    places = Places(v, window, cu_seqlens)
    q, k, v, left, right = places.cleaned(q, k, v, left, right)
    heads, late = v.shape[2], min(window, v.shape[1])
    kernels = kernels and v.numel() > 0
    ones = v.new_ones(*v.shape[:3], _ONES)
    if places.cu is None:
        left, right, before, ones = left[:, late:], right[:, : -late or None], v[:, : -late or None], ones[:, late:]
    else:
        late = 0
        right, before, ones = (places.delayed(x) for x in (right, v, ones))
    if left.shape[1]:
        sums, weight = linear(left, right, before), linear(left, right, ones)[..., 0].to(wide)
    else:  # all lies in the window, and gradients of features are zeros
        sums, weight = before, ones[..., 0].to(wide) + left.sum() + right.sum()
    weight = torch.nn.functional.pad(weight, (0, 0, late, 0))
    if kernels:
        o, lse = softmax_in_window(q, k, v, places, scale, backend)
        largest = maximum_op(q, k, places.low, scale)[0] if kind == "shifted" else None
    else:
        o, lse, largest = reference.window_softmax(q, k, v, window=window, scale=scale, low=places.low)
    a, b = _factors(lse, largest if kind == "shifted" else None, weight, heads, window_factor, linear_factor)
    return mix_op(o, sums, a, b) if kernels else mix_reference(o, sums, a, b)


def _factors(
    lse: Tensor, largest: Tensor | None, weight: Tensor, heads: int, window_factor: Tensor | None,
    linear_factor: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What o of the window and sums of the linear part are multiplied with, (batch, seqlen, heads)."""
    if largest is not None:
        if largest.shape[2] != heads:
            largest = largest.repeat_interleave(heads // max(1, largest.shape[2]), 2)
        a, b = (lse - largest).exp(), torch.ones_like(weight)
    else:
        # a common factor of both changes nothing: the larger of them is 1 after it
        some = weight.detach() > 0
        most = torch.maximum(lse.detach(), torch.where(some, weight.detach(), 1.0).log())
        most = torch.where(some, most, lse.detach())
        most = torch.where(most == -torch.inf, 0.0, most)
        a, b = (lse - most).exp(), torch.where(some, -most, -torch.inf).exp()
    if window_factor is not None:
        a = a * window_factor.to(a.dtype)
    if linear_factor is not None:
        b = b * linear_factor.to(b.dtype)
    total = a + b * weight
    total = total + FLOOR if largest is not None else torch.where(total == 0, 1.0, total)  # 0: rows of no sequence
    return a / total, b / total
